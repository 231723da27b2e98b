"""Attention in blocks on the CPU against the float64 reference: values, all gradients, and what dropout draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.core import blockwise, reference
from headwise.core.blockwise import Options, realised

B, H, L, S, K, V = 3, 4, 23, 19, 7, 5
SCALE = 0.4
INF = math.inf
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

DRAWN = torch.Generator().manual_seed(11)
FULL = torch.randn(B, H, L, S, generator=DRAWN)
FULL[FULL < -1] = -INF
FULL[1, :, 5] = -INF  # dead rows
PADDING = torch.zeros(B, 1, 1, S)
PADDING[0, ..., 13:] = PADDING[1] = -INF  # a sample without keys
MASKS: dict[str, tuple[Tensor | None, bool]] = {
    "none": (None, False),
    "causal": (None, True),
    "padding": (PADDING, False),
    "padding and causal": (PADDING, True),
    "full": (FULL, False),
    "full and causal": (FULL, True),
    "per head": (FULL[:1], False),
    "per sample": (FULL[:, :1], True),
    "per query": (FULL[:, :, :, :1], False),
    "two dimensions": (FULL[0, 0], False),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that few rows, heads and samples fit in one."""
    monkeypatch.setattr(blockwise, "BLOCK", 211)
    monkeypatch.setattr(blockwise, "ROWS", 3)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """(B, H, L, K), (B, L, H, K) in memory, as projections give it."""
    samples, heads, length, width = shape
    return (
        torch.randn(samples, length, heads, width, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .transpose(1, 2)
    )


def drawn(q: Tensor, k: Tensor, causal: bool, options: Options) -> Tensor:
    """Which weights dropout keeps, True, of what causal lets through: with equal scores and v = identity, out > 0."""
    b, g, s, _ = k.shape
    identity = torch.eye(s, dtype=q.dtype).expand(b, g, s, s)
    return blockwise.forward(torch.zeros_like(q), k, identity, None, causal, 1.0, options)[0] > 0


def assert_equals_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, options: Options, sink: Tensor | None = None
) -> None:
    """Output, log-sum-exp and all gradients."""
    dtype, p = q.dtype, options.dropout
    grad_out = normal(*q.shape[:3], v.shape[-1], dtype=dtype, seed=9)
    out, lse = blockwise.forward(q, k, v, mask, causal, SCALE, options)
    own = lse
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None].to(lse.dtype))
        out = out * (own - lse).exp()[..., None].to(dtype)
    grads = blockwise.backward(grad_out, q, k, v, out, lse, mask, causal, SCALE, options, mask_grad=mask is not None)

    leaves = [None if x is None else x.detach().double().clone().requires_grad_() for x in (q, k, v, mask)]
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    factor = drawn(q, k, causal, options).double() / (1 - realised(p)) if p < 1 else torch.zeros(1, 1, 1, 1)
    expected, weights = reference.attention(
        *leaves[:3],
        keep=keep, bias=leaves[3], scale=SCALE, softcap=options.softcap, sink=sink, factor=factor,
    )  # fmt: skip
    expected.backward(grad_out.double())

    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    assert out.dtype == dtype
    assert own.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(out.double(), expected.detach(), **tolerance)
    for name, grad, leaf in zip("qkvm", grads, leaves, strict=True):
        if leaf is None:
            assert grad is None
            continue
        given = {"q": q, "k": k, "v": v, "m": mask}[name]
        assert grad.dtype == given.dtype
        assert grad.shape == given.shape
        coarser = max(TOLERANCE[dtype], TOLERANCE[given.dtype])
        named = functools.partial("d{}: {}".format, name)
        assert_close(grad.double(), leaf.grad, rtol=coarser, atol=coarser, msg=named)
    assert torch.equal(own == -INF, weights.sum(dim=-1) == 0)


def inputs(groups: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v."""
    sizes = ((H, L, K), (groups, S, K), (groups, S, V))
    q, k, v = (normal(B, *size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes))
    return q, k, v


@pytest.mark.thin(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("dropout", "softcap"), [(0.0, None), (0.0, 0.7), (0.1, None), (0.5, 0.7), (1.0, None)])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients(mask: str, dropout: float, softcap: float | None) -> None:
    assert_equals_reference(*inputs(), *MASKS[mask], Options(dropout, 3, softcap))


@pytest.mark.thin(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dtypes_and_groups(groups: int, dtype: torch.dtype) -> None:
    assert_equals_reference(*inputs(groups, dtype), FULL, True, Options(0.2, 5, 3.0))


@pytest.mark.parametrize("block", [1, 50, 1000, 2700, 10**6])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_blocks(block: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK", block)
    monkeypatch.setattr(blockwise, "ROWS", 11)
    assert_equals_reference(*inputs(), None, causal, Options(0.2, 5))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("queries", "keys"), [(5, 41), (41, 5), (1, 13), (13, 1)])
def test_causal_with_more_queries_or_more_keys(queries: int, keys: int) -> None:
    q, k, v = (normal(2, 3, length, 4, seed=length) for length in (queries, keys, keys))
    assert_equals_reference(q, k, v, None, True, Options(0.3, 1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_sink_in_the_log_sum_exp(dropout: float) -> None:
    assert_equals_reference(*inputs(), PADDING, True, Options(dropout, 8), torch.linspace(-1, 2, H))


@pytest.mark.usefixtures("small")
def test_strides_do_not_matter() -> None:
    q = torch.randn(K, L, H, B, generator=DRAWN).permute(3, 2, 1, 0)[:, :, ::2]
    k, v = torch.randn(2, 2, S, 2 * B, K, generator=DRAWN).permute(0, 3, 1, 2, 4)[:, ::2]
    mask = FULL.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)[:, :, ::2]
    assert_equals_reference(q, k, v, mask, False, Options(0.1, 2))
    assert_equals_reference(q, k[:1].expand(B, -1, -1, -1), v, mask[:1].expand(B, -1, -1, -1), False, Options())


@pytest.mark.parametrize("empty", ["samples", "queries", "keys"])
def test_sizes_of_zero(empty: str) -> None:
    samples, queries, keys = (0 if empty == name else n for name, n in (("samples", B), ("queries", L), ("keys", S)))
    q, k, v = normal(samples, H, queries, K), normal(samples, 2, keys, K), normal(samples, 2, keys, V)
    mask, options = torch.zeros(queries, keys), Options(0.1)
    out, lse = blockwise.forward(q, k, v, mask, True, SCALE, options)
    grads = blockwise.backward(torch.ones_like(out), q, k, v, out, lse, mask, True, SCALE, options, mask_grad=True)
    assert torch.equal(out, torch.zeros(samples, H, queries, V))
    assert torch.equal(lse, torch.full((samples, H, queries), -INF))
    for grad, given in zip(grads, (q, k, v, mask), strict=True):
        assert torch.equal(grad, torch.zeros_like(given))


def test_scores_in_the_hundreds() -> None:
    """Far beyond what exp takes, and with a bias beyond what fits when scores are counted in units of log 2."""
    q, k, v = (100 * normal(B, H, length, K, seed=seed) for seed, length in ((0, L), (1, S), (2, S)))
    lowest = torch.where(FULL == -INF, torch.finfo(torch.float32).min, 0.0)
    for mask in (None, lowest):
        out, lse = blockwise.forward(q, k, v, mask, False, SCALE, Options())
        expected, _ = reference.attention(q, k, v, bias=mask, scale=SCALE)
        rows = torch.ones(B, H, L, dtype=torch.bool) if mask is None else (mask == 0).any(dim=-1)
        assert_close(out[rows].double(), expected[rows], rtol=1e-3, atol=1e-2)
        assert torch.isfinite(lse).all()


@pytest.mark.usefixtures("small")
def test_the_seed_alone_decides_what_is_drawn() -> None:
    q, k, v = inputs()
    options = Options(0.4, 17)
    first = drawn(q, k, False, options)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            torch.rand(number)
            assert torch.equal(drawn(q, k, False, options), first)
    finally:
        torch.set_num_threads(threads)
    out = blockwise.forward(q, k, v, None, False, SCALE, options)[0]
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    assert torch.equal(blockwise.forward(*recorded, None, False, SCALE, options)[0], out)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(blockwise.forward(q, k, v, None, False, SCALE, options)[0], out)
    other = drawn(q, k, False, Options(0.4, 18))
    assert abs((first == other).double().mean() - (0.4**2 + 0.6**2)) < 0.03


def test_the_callers_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    drawn(normal(1, 2, 5, 3), normal(1, 2, 5, 3), False, Options(0.5, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.0, 1e-12, 1e-5, 0.1, 1 / 3, 0.5, 0.9, 1 - 1e-12, 1.0])
def test_realised_probability(p: float) -> None:
    assert abs(realised(p) - p) <= 2**-16
    assert (realised(p) == 0, realised(p) == 1) == (p == 0, p == 1)


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.999])
def test_share_of_dropped_weights(p: float) -> None:
    keep = drawn(normal(4, 8, 128, 2), normal(4, 8, 256, 2), False, Options(p, 23))
    assert abs(1 - keep.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / keep.numel())


def test_samples_heads_rows_keys_and_lanes_are_independent() -> None:
    p, samples, heads, length = 0.3, 4, 4, 128
    keep = drawn(*[normal(samples, heads, length, 2)] * 2, False, Options(p, 29))
    x = (keep.double() - (1 - p)) / math.sqrt(p * (1 - p))
    orders = {
        "samples and heads": x.reshape(samples * heads, -1),
        "rows": x.transpose(0, 2).reshape(length, -1),
        "keys": x.transpose(0, 3).reshape(length, -1),
        "lanes": x.reshape(blockwise.LANES, -1),
        "neighbours": torch.stack([x.flatten().roll(by) for by in range(16)]),
    }
    for name, rows in orders.items():
        correlation = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
        assert correlation.abs().max() < 5.5 / math.sqrt(rows.shape[1]), name


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_lanes_over_all_words(p: float) -> None:
    """How often the first lane and another drop together, counted over all 2**32 words: as if they were independent."""
    size, half, dropped = 2**32, 2**31, round(p * 2**32)
    for multiplier in blockwise._MULTIPLIERS[1:]:
        # the word is u - half, dropped if u < dropped; the other's u is multiplier * (u - half) + half mod size
        start = (half - multiplier * half) % size
        upper = floor_sum(dropped, size, multiplier % size, start + size)
        both = upper - floor_sum(dropped, size, multiplier % size, start + size - dropped)
        assert abs(both / size - p * p) < 1e-6 * p * (1 - p)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of (a * i + b) // m over i in 0..n-1."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        n, b = divmod(a % m * n + b % m, m)
        m, a = a % m, m
        if m == 0:
            break
    return total


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tensors_in(result):
            self.numel = max(self.numel, x.numel())
        return result


def tensors_in(result: Any) -> Iterator[Tensor]:
    for x in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(x, Tensor):
            yield x


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_length(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK", 2**13)
    monkeypatch.setattr(blockwise, "ROWS", 4)
    q, k, v = (normal(1, 2, 512, 8, seed=seed) for seed in range(3))
    mask, options = torch.zeros(1, 1, 1, 512), Options(0.1, 1, 5.0)
    with Largest() as largest:
        out, lse = blockwise.forward(q, k, v, mask, causal, SCALE, options)
        blockwise.backward(out, q, k, v, out, lse, mask, causal, SCALE, options, mask_grad=True)
    assert largest.numel <= 2**13 + 4 * blockwise.LANES < 2 * 512 * 512 / 50
