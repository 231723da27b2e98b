"""Probes against the full matrix in float64: every mask and option, small blocks and large, logits up to 2,000."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from headwise import masks
from headwise.core import reference
from headwise.core.algebra import Mask, lower
from headwise.core.backends import Request
from headwise.core.lowering import Lowered, Rectangle, Size
from headwise.observe import probes
from headwise.observe.probes import (
    AttentionStatistics,
    attention_statistics,
    begin_look,
    end_look,
    pooled_attention_weights,
)

B, H, G, L, S, K = 3, 6, 2, 13, 11, 8


def _masks() -> dict[str, Mask | None]:
    drawn = torch.Generator().manual_seed(1)
    low = torch.finfo(torch.float32).min
    holes = torch.rand(L, S, generator=drawn) > 0.3
    ids = torch.randint(0, 3, (B, L), generator=drawn), torch.randint(0, 3, (B, S), generator=drawn)
    return {
        "none": None,
        "causal": masks.causal(),
        "offset": masks.causal(3),
        "padding": masks.padding(torch.tensor([S, 3, 0])),
        "causal_padding": masks.causal() & masks.padding(torch.tensor([S, 3, 1])),
        "window": masks.window(2, 1),
        "causal_window": masks.causal() & masks.window(3, 0),
        "prefix": masks.causal() | masks.prefix(3),
        "documents": masks.documents(*ids),
        "dense": masks.dense(torch.rand(B, 1, L, S, generator=drawn) > 0.5),
        "bias": masks.bias(torch.randn(B, H, L, S, generator=drawn)),
        "minus_inf": masks.bias(torch.where(holes, 0.0, -math.inf)),
        "lowest": masks.bias(torch.where(holes, 0.0, low)),
        "alibi": masks.causal() & masks.alibi(torch.rand(H, generator=drawn)),
        "torch": masks.from_torch(~holes, torch.arange(S)[None] >= torch.tensor([S, 4, 2])[:, None], is_causal=True),
    }


MASKS = _masks()
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "sink": {"sink": torch.linspace(-2, 2, H)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.7},
}


def _expected(
    query: Tensor, key: Tensor, mask: Mask | None, offset: int, first_keys: int = 4, **options: object
) -> tuple[dict[str, Tensor], Tensor]:
    """All statistics and the weights, (B, H, L) and (B, H, L, S), term by term from the full matrix."""
    batch, heads, length = query.shape[:3]
    keys = key.shape[2]
    size = Size(batch, heads, length, keys, query.device)
    lowered = lower(mask, size)
    whole = lowered.whole_keep(size)
    keep = torch.ones(batch, heads, length, keys, dtype=torch.bool)
    keep = keep if whole is None else keep & whole
    bias = torch.zeros(batch, heads, length, keys, dtype=torch.float64)
    bias = bias if lowered.bias is None else bias + lowered.bias.double()
    keep = keep & (bias > -1e4)
    sink: Tensor | None = options.pop("sink", None)  # type: ignore[assignment]
    _, weight = reference.attention(query, key, key, keep=keep, bias=bias, sink=sink, **options)  # type: ignore[arg-type]
    _, own = reference.attention(query, key, key, keep=keep, bias=bias, **options)  # type: ignore[arg-type]
    scale: float = options.get("scale") or query.shape[-1] ** -0.5  # type: ignore[assignment]
    score = scale * query.double() @ key.double().repeat_interleave(heads // key.shape[1], dim=1).mT
    if options.get("softcap"):
        score = 2.0 * torch.tanh(score / 2.0)
    score = (score + bias).masked_fill(~keep, -math.inf)
    visible = keep.sum(dim=-1)
    entropy = -torch.special.xlogy(own, own).sum(dim=-1)
    where, at = torch.arange(keys).double(), torch.arange(length).double() + offset
    mean = (own * where).sum(dim=-1)
    begin = keep.to(torch.uint8).argmax(dim=-1, keepdim=True) if keys else torch.zeros(batch, heads, length, 1)
    early = (torch.arange(keys) >= begin) & (torch.arange(keys) < begin + first_keys)
    found = {
        "entropy": entropy,
        "entropy_ratio": (entropy / visible.double().log()).masked_fill(visible == 1, math.nan),
        "effective_keys": entropy.exp(),
        "max_logit": score.amax(dim=-1) if keys else score.new_zeros(batch, heads, length),
        "peak": weight.amax(dim=-1) if keys else score.new_zeros(batch, heads, length),
        "sink": (weight * early).sum(dim=-1) + 1 - weight.sum(dim=-1),
        "distance": (own * (where - at[:, None]).abs()).sum(dim=-1),
        "spread": (own * (where - mean[..., None]) ** 2).sum(dim=-1).sqrt(),
    }
    dead = visible == 0
    return {name: value.masked_fill(dead, math.nan) for name, value in found.items()} | {
        "visible": visible.double()
    }, weight


def _check(found: AttentionStatistics, expected: dict[str, Tensor], tolerance: float) -> None:
    assert not found.nonfinite.any()
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name).double(), value, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.thin(8)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logits", [1, 2000])
@pytest.mark.parametrize("block", [40, 2**18])
def test_statistics_and_maps_are_those_of_the_full_matrix(
    name: str, option: str, dtype: torch.dtype, logits: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_BLOCK", block)
    query, key = torch.randn(B, H, L, K).mul(logits / 3).to(dtype), torch.randn(B, G, S, K).to(dtype)
    mask, words = MASKS[name], OPTIONS[option]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3 if logits > 1 else 2e-5
    expected, weight = _expected(query, key, mask, 2, **words)
    found = attention_statistics(query, key, mask=mask, offset=2, **words)  # type: ignore[arg-type]
    _check(found, expected, tolerance)
    rows = [L - 1, 0, 2, 2, -3]
    some = attention_statistics(query, key, mask=mask, offset=2, rows=rows, **words)  # type: ignore[arg-type]
    _check(some, {each: value[:, :, rows] for each, value in expected.items()}, tolerance)
    _check_map(query, key, mask, words, weight, expected["visible"], tolerance)


def _check_map(
    query: Tensor, key: Tensor, mask: Mask | None, words: dict[str, object], weight: Tensor, visible: Tensor, off: float
) -> None:
    found = pooled_attention_weights(query, key, mask=mask, cells=(4, 3), **words)  # type: ignore[arg-type]
    assert found.mass.shape == (B, H, 4, 3)
    assert (found.queries_a_cell, found.keys_a_cell) == (4, 4)
    for row in range(4):
        for column in range(3):
            part = weight[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            seen = (visible[:, :, 4 * row : 4 * row + 4] > 0).sum(dim=-1).clamp(min=1)
            mass, peak = part.sum(dim=(2, 3)) / seen, part.amax(dim=(2, 3))
            torch.testing.assert_close(found.mass[:, :, row, column].double(), mass, rtol=off, atol=off)
            torch.testing.assert_close(found.peak[:, :, row, column].double(), peak, rtol=off, atol=off)


@pytest.mark.parametrize("name", MASKS)
def test_what_a_monitor_takes_is_the_same(name: str) -> None:
    query, key, mask = torch.randn(1, H, L, K), torch.randn(1, G, S, K), MASKS[name]
    if mask is not None:
        mask = mask.cut(Rectangle((1, 2), (0, L), (0, S)), Size(B, H, L, S, query.device))
    places = [0, 3, 4, 9, 12]
    request, size = Request(query[:, :, places], key, key, Lowered(), grouped=True), Size(1, H, L, S, query.device)
    expected, weight = _expected(query, key, mask, 2)
    real = torch.tensor([0, 2, 3, 7, 8, 9, 10])
    for columns, per_cell in ((None, 3), (real, 2)):
        begun = begin_look(request, mask, places, size, (0, S), offset=2)
        found, mass, wide = end_look(begun, cells=4, real_keys=columns)
        _check(found, {each: value[:, :, places] for each, value in expected.items()}, 2e-5)
        assert wide == per_cell
        picked = weight[:, :, places] if columns is None else weight[:, :, places][..., columns]
        cells = torch.stack([part.sum(dim=-1) for part in picked.split(wide, dim=-1)], dim=-1)
        torch.testing.assert_close(mass.double(), cells, rtol=2e-5, atol=2e-5)


def test_a_look_at_a_stretch_of_keys_knows_where_it_is() -> None:
    query, key, mask = torch.randn(1, H, L, K), torch.randn(1, G, S, K), masks.causal(4)
    begin, end, places = 3, 8, [1, 6, 12]
    hidden = torch.zeros(S, dtype=torch.bool).index_fill(0, torch.arange(begin, end), True)
    expected, _ = _expected(query, key, mask & masks.dense(hidden[None, None, None]), 0)
    part = key[:, :, begin:end]
    request = Request(query[:, :, places], part, part, Lowered(), grouped=True)
    begun = begin_look(request, mask, places, Size(1, H, L, S, query.device), (begin, end))
    found, _, _ = end_look(begun)
    _check(found, {each: value[:, :, places] for each, value in expected.items()}, 2e-5)


def test_rows_that_are_not_finite_are_said_and_nothing_else_is_touched() -> None:
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4)
    clean = attention_statistics(query, key)
    query[0, 0, 1], query[0, 1, 2, 0] = math.nan, math.inf
    found = attention_statistics(query, key)
    assert found.nonfinite.nonzero().tolist() == [[0, 0, 1], [0, 1, 2]]
    good = ~found.nonfinite
    for name in ("entropy", "peak", "distance", "spread", "sink", "max_logit"):
        assert getattr(found, name)[found.nonfinite].isnan().all()
        torch.testing.assert_close(getattr(found, name)[good], getattr(clean, name)[good])
    assert pooled_attention_weights(query, key).mass[0, 0, 1].eq(0).all()


def test_what_hidden_keys_hold_has_no_influence() -> None:
    query, key = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 6, 4)
    mask = masks.padding(torch.tensor([6, 3]))
    clean = attention_statistics(query, key, mask=mask)
    key[1, :, 3:] = math.nan
    for before, after in zip(clean, attention_statistics(query, key, mask=mask), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_one_key_is_no_uncertainty_and_uniform_rows_are_1() -> None:
    query = torch.zeros(1, 1, 4, 4)
    found = attention_statistics(query, query, mask=masks.causal())
    assert found.visible.tolist() == [[[1, 2, 3, 4]]]
    assert found.entropy_ratio[0, 0, 0].isnan()
    torch.testing.assert_close(found.entropy_ratio[0, 0, 1:], torch.ones(3))
    torch.testing.assert_close(found.effective_keys, torch.tensor([[[1.0, 2, 3, 4]]]))


@pytest.mark.parametrize(("length", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_and_no_keys_are_fine(length: int, keys: int) -> None:
    query, key = torch.randn(2, 3, length, 4), torch.randn(2, 3, keys, 4)
    found = attention_statistics(query, key)
    assert all(value.shape == (2, 3, length) for value in found)
    if length:
        assert (found.visible == 0).all()
        assert found.entropy.isnan().all()


def test_rows_that_reach_no_key_are_fine() -> None:
    query = torch.randn(1, 1, 2, 4)
    found = attention_statistics(query, query, mask=masks.causal(-1), rows=[0])
    assert found.visible.tolist() == [[[0]]]
    long = attention_statistics(torch.randn(1, 1, 9000, 4), torch.randn(1, 1, 40, 4), mask=masks.window(20, 0))
    assert (long.visible[0, 0] > 0).sum() == 60


def test_under_autocast_it_is_still_float32() -> None:
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 6, 16)
    expected = attention_statistics(query, key, mask=masks.causal(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_statistics(query, key, mask=masks.causal(1))
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_no_gradient_comes_out_and_nothing_goes_in_place() -> None:
    query, key = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 6, 4, requires_grad=True)
    before = query.detach().clone(), key.detach().clone()
    found, pooled = attention_statistics(query, key), pooled_attention_weights(query, key)
    assert not any(value.requires_grad for value in (*found, pooled.mass, pooled.peak))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rows": [7]}, "rows must be query positions"),
        ({"rows": 1.5}, "rows must be query positions"),
        ({"first_keys": 0}, "first_keys must be an int of at least 1"),
        ({"softcap": -1.0}, "softcap must be a finite number greater than 0"),
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, "mask must be a Mask"),
        ({"sink": torch.zeros(3)}, "sink must be a floating tensor of one logit per query head"),
    ],
    ids=["row", "rows", "first_keys", "softcap", "mask", "sink"],
)
def test_wrong_arguments_are_refused(words: dict[str, object], message: str) -> None:
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match=message):
        attention_statistics(query, key, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("cells", [0, (3, 0), 2.5, (1, 2, 3)], ids=str)
def test_wrong_cells_are_refused(cells: object) -> None:
    with pytest.raises(ValueError, match="cells must be"):
        pooled_attention_weights(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), cells=cells)  # type: ignore[arg-type]


_MEMORY = """
import resource, sys, torch
from headwise import masks
from headwise.observe.probes import attention_statistics, pooled_attention_weights
length = int(sys.argv[1])
query, key = torch.randn(1, 8, length, 16), torch.randn(1, 8, length, 16)
attention_statistics(query[:, :, :600], key[:, :, :600])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pooled_attention_weights(query, key, mask=masks.causal())
attention_statistics(query, key, mask=masks.causal())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize(
    ("length", "most"), [(2048, 60), pytest.param(16384, 200, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_memory_is_linear(length: int, most: int) -> None:
    # 8 heads of 2,048 x 2,048 weights are 128 MiB, of 16,384 x 16,384 8 GiB
    done = subprocess.run([sys.executable, "-c", _MEMORY, str(length)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < most
