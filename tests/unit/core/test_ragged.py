"""Masks that say just lengths or just `causal()`: sequence by sequence, or as a flag, with everyone else's numbers."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headwise import MultiheadAttention, attention, attention_weights, explain, masks
from headwise.core import backends, functional, reference
from headwise.core.lowering import Lowered, Ragged, Size
from headwise.core.masks import Mask, appended, lower
from headwise.core.ragged import lower_to_lengths, sequences, with_flag

B, H, G, L, S, K, V = 3, 4, 2, 5, 7, 3, 3
INF = math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
traced = pytest.mark.filterwarnings(
    "ignore:.torch.jit.trace. is deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def tril(queries: int, keys: int) -> Tensor:
    return torch.tensor([[s <= query for s in range(keys)] for query in range(queries)]).bool().view(queries, keys)


def first_keys(*lengths: int, keys: int = S) -> Tensor:
    """(B, 1, 1, S)."""
    return torch.tensor([[s < length for s in range(keys)] for length in lengths])[:, None, None]


def pieces(queries: list[int], keys: list[int]) -> Tensor:
    """(1, 1, L, S), where the queries of a sequence see the keys of the same one."""
    keep = torch.zeros(1, 1, sum(queries), sum(keys), dtype=torch.bool)
    row = column = 0
    for wide, long in zip(queries, keys, strict=True):
        keep[0, 0, row : row + wide, column : column + long] = True
        row, column = row + wide, column + long
    return keep


def drawn(
    batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float64, groups: int = G, width: int = V
) -> list[Tensor]:
    sizes = ((H, queries, K), (groups, keys, K), (groups, keys, width))
    return [torch.randn(batch, *size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


# name -> the mask, (B, L, S), what may be seen, and with causal() beside
PADDED: dict[str, tuple[Callable[[], Mask], tuple[int, int, int], Tensor]] = {
    "lengths": (lambda: masks.padding([S, 3, 1]), (3, L, S), first_keys(S, 3, 1)),
    "long queries": (lambda: masks.padding([3, 2]), (2, 11, 3), first_keys(3, 2, keys=3)),
    "a length of 0": (lambda: masks.padding([0, 3, 0]), (3, L, S), first_keys(0, 3, 0)),
    "all lengths 0": (lambda: masks.padding([0, 0]), (2, L, S), first_keys(0, 0)),
    "full": (lambda: masks.padding([S, S]), (2, L, S), first_keys(S, S)),
    "beyond the keys, below 0": (lambda: masks.padding([S + 9, -2]), (2, L, S), first_keys(S, 0)),
    "one for all": (lambda: masks.padding([4]), (3, L, S), first_keys(4, 4, 4)),
    "one sample": (lambda: masks.padding([4]), (1, L, S), first_keys(4)),
    "one key": (lambda: masks.padding([1, 0]), (2, 1, 1), first_keys(1, 0, keys=1)),
    "no queries": (lambda: masks.padding([2, 3]), (2, 0, S), first_keys(2, 3)),
    "bool": (lambda: masks.padding(first_keys(2, 5)[:, 0, 0]), (2, L, S), first_keys(2, 5)),
    "bytes": (lambda: masks.padding(torch.tensor([2, 5], dtype=torch.uint8)), (2, L, S), first_keys(2, 5)),
    "prefix": (lambda: masks.prefix(2), (2, L, S), first_keys(2, 2)),
    "prefixes": (lambda: masks.prefix(ints(2, 0)), (2, L, S), first_keys(2, 0)),
    "dense": (lambda: masks.dense(first_keys(6, 2)), (2, L, S), first_keys(6, 2)),
    "dense for all": (lambda: masks.dense(first_keys(6)), (2, L, S), first_keys(6, 6)),
    "torch's": (lambda: masks.from_torch(None, ~first_keys(6, 2)[:, 0, 0]), (2, L, S), first_keys(6, 2)),
    "not hidden": (lambda: ~masks.padding(~first_keys(3, 1)[:, 0, 0]), (2, L, S), first_keys(3, 1)),
    "either": (lambda: masks.padding([3, 1]) | masks.prefix(2), (2, L, S), first_keys(3, 2)),
}
PACKED: dict[str, tuple[Callable[[], Mask], list[int], list[int]]] = {
    "documents": (lambda: masks.documents(ints(4, 4, 4, -1, 9, 9)), [3, 1, 2], [3, 1, 2]),
    "documents (1, L)": (lambda: masks.documents(ints(4, 4, 4, -1, 9, 9)[None]), [3, 1, 2], [3, 1, 2]),
    "documents of bytes": (lambda: masks.documents(ints(0, 0, 1, 7).to(torch.uint8)), [2, 1, 1], [2, 1, 1]),
    "one document": (lambda: masks.documents(ints(5, 5, 5)), [3], [3]),
    "to other keys": (lambda: masks.documents(ints(0, 0, 1, 2, 2), ints(0, 1, 1, 1, 2, 2)), [2, 1, 2], [1, 3, 2]),
    "sequences": (lambda: sequences([3, 1, 2]), [3, 1, 2], [3, 1, 2]),
    "sequences to other keys": (lambda: sequences([3, 1, 2], [1, 4, 2]), [3, 1, 2], [1, 4, 2]),
    "empty sequences": (lambda: sequences([0, 3, 0, 1], [0, 2, 3, 1]), [0, 3, 0, 1], [0, 2, 3, 1]),
    "a sequence without keys": (lambda: sequences([2, 3], [0, 4]), [2, 3], [0, 4]),
}
Case = tuple[Callable[[], Mask], tuple[int, int, int], Tensor]
CASES: dict[str, Case] = {}
for name, (build, shape, keep) in PADDED.items():
    CASES[name] = build, shape, keep
    CASES[f"{name}, causal"] = lambda b=build: b() & masks.causal(), shape, keep & tril(*shape[1:])
for name, (build, queries, keys) in PACKED.items():
    shape, keep = (1, sum(queries), sum(keys)), pieces(queries, keys)
    CASES[name] = build, shape, keep
    if queries == keys:  # causal() counts positions of the whole row
        CASES[f"{name}, causal"] = lambda b=build: masks.causal() & b(), shape, keep & tril(*shape[1:])

WRITTEN = torch.ones(2, 1, 1, S, dtype=torch.bool)
WRITTEN[1, ..., 3] = False
LEFT = first_keys(3, S).flip(-1)
PER_HEAD = first_keys(3, 2, 4, 1).view(1, H, 1, S)
# what says more than lengths: name -> the mask, (B, L, S), what may be seen or is added
OTHERS: dict[str, tuple[Callable[[], Mask], tuple[int, int, int], dict[str, Tensor]]] = {
    "a hole": (lambda: masks.dense(WRITTEN), (2, L, S), {"keep": WRITTEN}),
    "on the left": (lambda: masks.padding(LEFT[:, 0, 0]), (2, L, S), {"keep": LEFT}),
    "per head": (lambda: masks.dense(PER_HEAD), (2, L, S), {"keep": PER_HEAD}),
    "two of them": (lambda: masks.padding([3, 2]) & masks.prefix(2), (2, L, S), {"keep": first_keys(2, 2)}),
    "a float": (
        lambda: masks.from_torch(None, torch.zeros(2, S).masked_fill(~first_keys(3, 2)[:, 0, 0], -INF)),
        (2, L, S),
        {"keep": first_keys(3, 2)},
    ),
    "a window": (
        lambda: masks.padding([3, 2]) & masks.window(1, 0),
        (2, L, S),
        {"keep": first_keys(3, 2) & tril(L, S) & (torch.arange(S) >= torch.arange(L)[:, None] - 1)},
    ),
    "a later causal": (
        lambda: masks.padding([3, 2]) & masks.causal(1), (2, L, S), {"keep": first_keys(3, 2) & tril(L + 1, S)[1:]}
    ),
    "scattered documents": (
        lambda: masks.documents(ints(0, 1, 0)), (1, 3, 3), {"keep": ints(0, 1, 0)[:, None] == ints(0, 1, 0)}
    ),
    "in another order": (
        lambda: masks.documents(ints(0, 0, 1), ints(1, 0, 0)), (1, 3, 3),
        {"keep": ints(0, 0, 1)[:, None] == ints(1, 0, 0)},
    ),
    "documents without keys": (
        lambda: masks.documents(ints(0, 0, 1), ints(0, 0)), (1, 3, 2), {"keep": ints(0, 0, 1)[:, None] == ints(0, 0)}
    ),
    "documents per sample": (
        lambda: masks.documents(ints(0, 0, 1)), (2, 3, 3), {"keep": ints(0, 0, 1)[:, None] == ints(0, 0, 1)}
    ),
    "a key that is appended": (
        lambda: appended(masks.padding([3, 2]), 1), (2, L, S),
        {"keep": torch.cat([first_keys(3, 2, keys=S - 1), torch.ones(2, 1, 1, 1).bool()], dim=-1)},
    ),
    "documents to other keys, causal": (
        lambda: masks.causal() & PACKED["to other keys"][0](), (1, 5, 6),
        {"keep": pieces([2, 1, 2], [1, 3, 2]) & tril(5, 6)},
    ),
    "sequences to other keys, causal": (
        lambda: PACKED["sequences to other keys"][0]() & masks.causal(), (1, 6, 7),
        {"keep": pieces([3, 1, 2], [1, 4, 2]) & tril(6, 7)},
    ),
    "as many keys as queries, causal, but elsewhere": (
        lambda: masks.causal() & sequences([2, 3], [3, 2]), (1, 5, 5), {"keep": pieces([2, 3], [3, 2]) & tril(5, 5)}
    ),
    "padding or the past": (
        lambda: masks.padding([3, 2]) | masks.causal(), (2, L, S), {"keep": first_keys(3, 2) | tril(L, S)}
    ),
}  # fmt: skip


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take the paths of large ones."""
    for name in ("TURN", "TURN_GRAD", "_WORTH_READING", "_WORTH_AN_ENTRY"):
        monkeypatch.setattr(functional, name, 0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that were called, one inside another too."""
    names: list[str] = []
    for backend in backends.BACKENDS:
        original = type(backend).run
        monkeypatch.setattr(
            type(backend), "run", lambda self, request, f=original: (names.append(self.name), f(self, request))[1]
        )
    return names


def results(function: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output and each input's gradient, in float64."""
    out = function(*inputs)
    return [part.detach().double() for part in (out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype)))]


def hold(inputs: list[Tensor], mask: Mask, means: dict[str, Tensor], backend: str | None, **options: Any) -> None:
    """Values and gradients are the float64 reference's."""
    dtype, (batch, _, queries, _), width = inputs[0].dtype, inputs[0].shape, inputs[2].shape[-1]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    cotangent = torch.randn(batch, H, queries, width)
    want = results(lambda *t: reference.attention(*t, **means, **options)[0], doubles, cotangent.to(dtype).double())
    got = results(lambda *t: attention(*t, mask=mask, backend=backend, **options), inputs, cotangent)
    eps = torch.finfo(dtype).eps
    for part, one, other in zip(("output", "query", "key", "value"), got, want, strict=True):
        size = max(1.0, other.abs().max().item() if other.numel() else 0.0)
        assert_close(one, other, rtol=64 * eps, atol=64 * eps * size, msg=lambda m, p=part: f"{p}: {m}")
        assert not one[other == 0].any(), f"{part} is not exactly 0"


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, ran: list[str]) -> None:
    build, shape, keep = CASES[name]
    for dtype, groups, width in itertools.product(DTYPES[:2], (H, G, 1), (V, 11)):
        ran.clear()
        hold(drawn(*shape, dtype, groups, width), build(), {"keep": keep}, "ragged")
        assert ran[0] == "ragged"
        assert set(ran[1:]) <= {"sdpa"}


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_16_bit(dtype: torch.dtype) -> None:
    for build, shape, keep in CASES.values():
        hold(drawn(*shape, dtype), build(), {"keep": keep}, "ragged")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", CASES)
def test_chosen_where_it_is_quicker(name: str, ran: list[str]) -> None:
    """With gradients and without, the same numbers; layouts are those of every other backend."""
    build, shape, keep = CASES[name]
    inputs = drawn(*shape)
    hold(inputs, build(), {"keep": keep}, None)
    assert ran[0] == "ragged" or not keep.any()  # where nothing is visible there is nothing to run
    with torch.no_grad():
        out = attention(*inputs, mask=build())
        same = attention(*inputs, mask=build(), backend="plain")
    assert_close(out, same, rtol=1e-12, atol=1e-12)
    assert out.dtype == same.dtype


@pytest.mark.parametrize("scale", [0.0, 0.3, -1.7])
def test_scale(scale: float) -> None:
    for build, shape, keep in CASES.values():
        hold(drawn(*shape), build(), {"keep": keep}, "ragged", scale=scale)


@pytest.mark.parametrize("name", ["lengths", "a length of 0, causal", "documents, causal", "to other keys"])
def test_other_strides(name: str) -> None:
    build, (batch, queries, keys), keep = CASES[name]
    query = torch.randn(batch, queries, H, K).transpose(1, 2)
    key = torch.randn(batch, 2 * G, K, keys)[:, ::2].transpose(-1, -2)
    value = torch.randn(1, 1, keys, V).expand(batch, G, keys, V)
    want, _ = reference.attention(query, key, value, keep=keep)
    assert_close(attention(query, key, value, mask=build(), backend="ragged").double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if "no queries" not in name])
def test_second_derivatives(name: str) -> None:
    build, shape, _ = CASES[name]
    call = lambda q, k, v: attention(q, k, v, mask=build(), backend="ragged")  # noqa: E731
    inputs = drawn(*shape)
    assert gradcheck(call, inputs, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("mask", [masks.padding([2, 4]), masks.padding([2, 4]) & masks.causal()], ids=repr)
def test_second_derivatives_where_inputs_depend_on_each_other(mask: Mask) -> None:
    x = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    found = {}
    for backend in ("ragged", "plain"):
        q = x * 1
        k = q * 2
        out = attention(q, k, k.sin() + q, mask=mask, backend=backend)
        (first,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        found[backend] = [first, *torch.autograd.grad(first.pow(2).sum(), x)]
    for got, want in zip(found["ragged"], found["plain"], strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_of_one_input_only(which: int) -> None:
    for name in ("lengths", "a length of 0, causal", "documents"):
        build, shape, _ = CASES[name]
        inputs = [tensor.detach() for tensor in drawn(*shape)]
        inputs[which].requires_grad_()
        found = [
            torch.autograd.grad(attention(*inputs, mask=build(), backend=backend).sin().sum(), inputs[which])[0]
            for backend in ("ragged", "plain")
        ]
        assert_close(*found, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 2]], ids=str)
def test_a_graph_where_no_key_is_visible(lengths: list[int]) -> None:
    """The output hangs on its inputs even if it does not depend on them: a backward gives 0, it does not fail."""
    for backend in ("sdpa", "plain", "ragged"):
        inputs = drawn(2, L, S)
        out = attention(*inputs, mask=masks.padding(lengths), backend=backend)
        assert out.requires_grad, backend
        out.sum().backward()
        for tensor in inputs:
            assert tensor.grad is not None, backend
            assert not tensor.grad[0].any(), backend


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("name", ["lengths", "a length of 0", "lengths, causal", "torch's", "all lengths 0"])
def test_what_is_hidden_has_no_influence(name: str, poison: float) -> None:
    build, shape, keep = CASES[name]
    inputs = drawn(*shape)
    hidden = ~PADDED[name.removesuffix(", causal")][2].transpose(-1, -2)
    dirty = [
        (tensor if index == 0 else tensor.masked_fill(hidden, poison)).detach().requires_grad_()
        for index, tensor in enumerate(inputs)
    ]
    cotangent = torch.randn(*inputs[0].shape[:3], V)
    want = results(lambda *t: reference.attention(*t, keep=keep)[0], inputs, cotangent.double())
    got = results(lambda *t: attention(*t, mask=build(), backend="ragged"), dirty, cotangent)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_row_without_keys_is_0_and_so_is_its_gradient() -> None:
    query, key, value = drawn(2, L, S)
    out = attention(query, key, value, mask=masks.padding([0, 4]), backend="ragged")
    assert not out[0].any()
    assert out[1].ne(0).all()
    for grad in torch.autograd.grad(out.exp().sum(), [query, key, value]):
        assert not grad[0].any()
        assert grad[1].any()


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_dropout(packed: bool) -> None:
    """Each weight is dropped alone and the rest scaled up: values that name their key tell which."""
    rows, seen = 400, 5
    query = torch.zeros(1, 1, 2 * rows, S) if packed else torch.zeros(2, 1, rows, S)
    eye = torch.eye(S).view(1, 1, S, S)
    key = torch.cat([eye, eye], dim=2) if packed else eye.expand(2, 1, S, S)
    mask = sequences([rows, rows], [S, S]) if packed else masks.padding([seen, S])
    out = attention(query, key, key, mask=mask, dropout=0.25, backend="ragged").view(2, rows, S)
    for sample, count in zip(out, (S if packed else seen, S), strict=True):
        kept = sample[:, :count] != 0
        assert_close(sample[:, :count][kept], torch.full((int(kept.sum()),), 1 / count / 0.75))
        assert 0.7 < kept.float().mean() < 0.8
        assert not sample[:, count:].any()
        assert kept.any(dim=0).all()
        assert not kept.all(dim=0).any()
    assert not torch.equal(out[0] != 0, out[1] != 0)  # drawn anew for each sequence
    torch.manual_seed(3)
    first = attention(query, key, key, mask=mask, dropout=0.5, backend="ragged")
    torch.manual_seed(3)
    assert torch.equal(first, attention(query, key, key, mask=mask, dropout=0.5, backend="ragged"))
    query.requires_grad_()
    out = attention(query, key, key, mask=mask, dropout=1.0, backend="ragged")
    assert torch.equal(out, torch.zeros_like(query))
    assert not torch.autograd.grad(out.sum(), query)[0].any()


# --- what is taken, and what is not -----------------------------------------------------------------------------------


def test_lengths_are_read_as_they_are() -> None:
    cpu = torch.device("cpu")
    for mask, size, want in (
        (masks.padding([3, 9, 0]), (3, H, L, S), Ragged((L, L, L), (3, S, 0), False)),
        (masks.documents(ints(2, 2, 0)), (1, H, 3, 3), Ragged((2, 1), (2, 1), True)),
        (masks.documents(ints(2, 0), ints(2, 2, 2, 0)), (1, H, 2, 4), Ragged((1, 1), (3, 1), True)),
        (sequences([2, 1]), (1, H, 3, 3), Ragged((2, 1), (2, 1), True)),
    ):
        assert lower_to_lengths(mask, Size(*size, cpu)) == Lowered(ragged=want)
        alike = not want.packed or want.queries == want.keys
        for whole in (mask & masks.causal(), masks.causal() & mask):
            assert lower_to_lengths(whole, Size(*size, cpu)) == (Lowered(True, ragged=want) if alike else None)
    for mask in (masks.causal(), masks.window(2, 0), masks.bias(torch.zeros(L, S)), masks.window(None, None)):
        assert lower_to_lengths(mask, Size(2, H, L, S, cpu)) is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", OTHERS)
def test_what_says_more_takes_the_general_path(name: str, ran: list[str]) -> None:
    build, shape, means = OTHERS[name]
    inputs = drawn(*shape)
    hold(inputs, build(), means, None)
    assert "ragged" not in ran
    assert explain(*inputs, mask=build()).refused["ragged"][0].startswith("it needs a mask of lengths")
    with pytest.raises(
        ValueError, match=r"^attention: backend must take this call, and ragged does not: it needs a mask"
    ):
        attention(*inputs, mask=build(), backend="ragged")


@pytest.mark.usefixtures("always")
def test_options_that_only_the_plain_backend_takes(ran: list[str]) -> None:
    inputs = drawn(2, L, S)
    for options in ({"softcap": 2.0}, {"sink": torch.zeros(H, dtype=torch.float64)}):
        hold(inputs, masks.padding([3, 2]), {"keep": first_keys(3, 2)}, None, **options)
        assert set(ran) == {"plain"}
        with pytest.raises(ValueError, match=r"^attention: backend must take this call, and ragged does not"):
            attention(*inputs, mask=masks.padding([3, 2]), backend="ragged", **options)
    weights = attention_weights(*inputs[:2], mask=masks.padding([3, 2]))
    assert_close(weights.sum(-1), torch.ones(2, H, L, dtype=torch.float64))


@pytest.mark.usefixtures("always")
def test_a_learned_bias_beside_keeps_its_gradient(ran: list[str]) -> None:
    scores = torch.randn(L, S, dtype=torch.float64, requires_grad=True)
    inputs = drawn(2, L, S)
    found = []
    for backend in (None, "plain"):
        out = attention(*inputs, mask=masks.padding([3, 2]) & masks.bias(scores), backend=backend)
        found.append(torch.autograd.grad(out.sin().sum(), scores)[0])
    assert_close(*found, rtol=1e-11, atol=1e-12)
    assert "ragged" not in ran


@pytest.mark.usefixtures("always")
def test_refusals_stay_refusals() -> None:
    """A mask that does not fit is named as on the general path, whatever its numbers would allow."""
    inputs = drawn(1, 6, 6)
    for mask, message in (
        (masks.padding([1, 2]), r"padding: lengths must have one entry per sample, B = 1; got \(2,\)"),
        (masks.padding(torch.ones(1, 5).bool()), r"padding: keep must broadcast to .*; got \(1, 1, 1, 5\)"),
        (masks.documents(torch.arange(5)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(5,\)"),
        (masks.documents(torch.arange(6).view(2, 3)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(2, 3\)"),
        (masks.documents(torch.arange(6).view(6, 1)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(6, 1\)"),
        (masks.from_torch(None, torch.zeros(2, 6).bool()), r"from_torch: key_padding_mask must be \(B, S\) with .*"),
        (masks.dense(torch.ones(5, 6).bool()), r"dense: keep must broadcast to .*; got \(1, 1, 5, 6\)"),
    ):
        for backend in ("sdpa", None, "ragged"):
            with pytest.raises(ValueError, match=f"^{message}"):
                attention(*inputs, mask=mask, backend=backend)
    with pytest.raises(ValueError, match=r"documents: ids must be"):
        attention(*drawn(1, 6, 6), mask=sequences([2, 3]))


def test_an_empty_batch() -> None:
    inputs = drawn(0, L, S)
    for backend in (None, "sdpa", "plain"):
        assert attention(*inputs, mask=masks.padding(torch.zeros(0, dtype=torch.int64)), backend=backend).shape == (
            0, H, L, V,
        )  # fmt: skip


def test_sequences_written_out_are_documents() -> None:
    for lengths in ([3, 1, 2], [0, 2, 0], [1], []):
        size = Size(1, 1, sum(lengths), sum(lengths), torch.device("cpu"))
        keep = sequences(lengths).keep(size)
        assert keep is not None
        assert torch.equal(keep, pieces(lengths, lengths))
    mask = sequences([3, 1], [1, 2])
    assert torch.equal(mask.keep(Size(1, 1, 4, 3, torch.device("cpu"))), pieces([3, 1], [1, 2]))
    assert repr(mask) == "sequences([3, 1])"
    assert mask.draw() == masks.documents(ints(0, 0, 0, 1), ints(0, 1, 1)).draw()
    assert copy.deepcopy(mask).ragged == mask.ragged


# --- when it pays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_as_much_is_saved_as_a_turn_costs(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """(sum of what is hidden) * 2 * H * (K + V) FLOPs, for each sequence one turn."""
    inputs = [tensor.detach().requires_grad_(grad) for tensor in drawn(2, L, S)]
    saved = 2 * H * (K + V) * L * (2 * S - 3 - 4)
    for name, price, want in (
        ("TURN_GRAD" if grad else "TURN", saved / 2, "ragged"),
        ("TURN_GRAD" if grad else "TURN", saved / 2 + 1, "sdpa"),
    ):
        for other in ("TURN", "TURN_GRAD"):
            monkeypatch.setattr(functional, other, price if other == name else 1e30 if want == "ragged" else 0)
        assert explain(*inputs, mask=masks.padding([3, 4])).backend == want
        with torch.no_grad():
            assert explain(*inputs, mask=masks.padding([3, 4])).backend == (
                want if not grad else "sdpa" if want == "ragged" else "ragged"
            )


def test_full_lengths_are_not_worth_a_loop_and_short_calls_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 128, 64)
    assert explain(x, x, x, mask=masks.padding([128, 128])).backend == "sdpa"
    assert explain(x, x, x, mask=masks.padding([128, 8])).backend == "ragged"
    assert explain(x, x, x, mask=masks.padding([127, 128])).backend == "sdpa"
    for name in ("lower_to_lengths", "with_flag"):
        monkeypatch.setattr(functional, name, lambda *_: pytest.fail("read"))
    short = x[:, :, :8]
    attention(short, short, short, mask=masks.padding([8, 2]))
    attention(short, short, short, mask=masks.dense(tril(8, 8)))


# --- where numbers cannot be read, or must not be ---------------------------------------------------------------------


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Tagged(Tensor):
    """A subclass that does nothing."""


def compiled(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager", fullgraph=True)(*inputs)


def dynamic(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager", fullgraph=True, dynamic=True)(*inputs)


def exported(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    class Wrapped(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return call(*given)

    return torch.export.export(Wrapped(), inputs).module()(*inputs)


def under_a_mode(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with Watch() as watch:
        out = call(*inputs)
    assert not any("_local_scalar_dense" in name or "equal" in name for name in watch.seen)
    return out


WAYS: dict[str, Callable[..., Tensor]] = {
    "compiled": compiled,
    "compiled for any size": dynamic,
    "exported": exported,
    "a dispatch mode": under_a_mode,
    "a subclass": lambda call, *inputs: call(*(tensor.as_subclass(Tagged) for tensor in inputs)).as_subclass(Tensor),
    "a mask of a subclass": lambda call, *inputs: call(*inputs[:3], inputs[3].as_subclass(Tagged)).as_subclass(Tensor),
    "vmap": lambda call, *inputs: torch.func.vmap(call)(*(torch.stack([tensor] * 2) for tensor in inputs))[1],
    "vmap of the mask": lambda call, *inputs: torch.func.vmap(call, (None, None, None, 0))(
        *inputs[:3], torch.stack([inputs[3]] * 2)
    )[1],
    "grad": lambda call, *inputs: torch.func.grad_and_value(lambda q: call(q, *inputs[1:]).sum())(inputs[0])[1],
    "forward mode": lambda call, *inputs: torch.func.jvp(lambda q: call(q, *inputs[1:]), inputs[:1], inputs[:1])[0],
    "traced": lambda call, *inputs: torch.jit.trace(call, inputs, check_trace=False)(*inputs),
}  # fmt: skip
GIVEN: dict[str, Callable[[Tensor], Mask]] = {
    "padding": masks.padding,
    "padding & causal": lambda keep: masks.padding(keep) & masks.causal(),
    "a causal tensor": lambda keep: (
        masks.dense(
            torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool).tril()  # no loop, for Dynamo
        )
        & masks.padding(keep)
    ),
}


@forward_mode
@traced
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("way", WAYS)
def test_the_general_path(way: str, given: str, ran: list[str]) -> None:
    """One graph for all numbers, and the same answer."""
    if way == "compiled for any size" and given != "padding & causal":
        return  # this one says as much
    query, key, value = (tensor.detach() for tensor in drawn(2, S, S, torch.float32))
    keep = first_keys(3, S)[:, 0, 0]
    want = attention(query, key, value, mask=GIVEN[given](keep))
    assert ran[0] == "ragged"
    ran.clear()
    got = WAYS[way](lambda q, k, v, m: attention(q, k, v, mask=GIVEN[given](m)), query, key, value, keep)
    assert "ragged" not in ran
    assert ran
    assert_close(got, want.sum() if way == "grad" else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", ["padding & causal", "a causal tensor"])
def test_large_calls_compile_to_one_graph(given: str) -> None:
    """As large as is read in eager mode: a number that is read would break the graph."""
    x = torch.randn(2, 4, 256, 64)
    keep = first_keys(17, 256, keys=256)[:, 0, 0]
    call = lambda q, m: attention(q, q, q, mask=GIVEN[given](m))  # noqa: E731
    assert explain(x, x, x, mask=GIVEN[given](keep)).backend == "ragged"
    assert_close(compiled(call, x, keep), call(x, keep), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always")
def test_no_numbers_at_all(ran: list[str]) -> None:
    x = torch.randn(2, H, S, K)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        for mask in (masks.padding(mode.from_tensor(ints(3, 2))), masks.dense(mode.from_tensor(tril(S, S)))):
            assert attention(fake, fake, fake, mask=mask).shape == x.shape
    meta = x.to("meta")
    for mask in (masks.padding(ints(3, 2).to("meta")), masks.dense(tril(S, S).to("meta"))):
        assert attention(meta, meta, meta, mask=mask).shape == x.shape
    assert "ragged" not in ran


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["lengths", "a length of 0, causal", "all lengths 0", "documents"])
def test_autocast(name: str) -> None:
    """The dtype is that of every other backend, also where a sequence has no keys."""
    build, shape, keep = CASES[name]
    inputs = drawn(*shape, torch.float32)
    for train in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(train):
            out, plain = (attention(*inputs, mask=build(), backend=backend) for backend in (None, "sdpa"))
        assert out.dtype == plain.dtype == torch.bfloat16
        want, _ = reference.attention(*inputs, keep=keep)
        assert_close(out.double(), want, rtol=5e-2, atol=5e-2)
        if train:
            for grad in torch.autograd.grad(out.float().sin().sum(), inputs):
                assert grad.dtype == torch.float32


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_another_default_device(device: str, ran: list[str]) -> None:
    """What is made on the way is made where the scores are."""
    inputs, lengths, causal = drawn(2, S, S), ints(3, 2), tril(S, S)
    ids = ints(0, 0, 0, 1, 1, 2, 2)
    with torch.device(device):
        out = attention(*inputs, mask=masks.padding(lengths) & masks.dense(causal))
        packed = attention(*(tensor[:1] for tensor in inputs), mask=masks.documents(ids))
        listed = attention(*(tensor[:1] for tensor in inputs), mask=sequences([3, 2, 2]))
    want, _ = reference.attention(*inputs, keep=first_keys(3, 2) & causal)
    assert_close(out, want, rtol=1e-11, atol=1e-12)
    assert_close(packed, listed, rtol=1e-11, atol=1e-12)
    assert ran.count("ragged") == 3


@pytest.mark.usefixtures("always")
def test_inference_tensors(ran: list[str]) -> None:
    with torch.inference_mode():
        query, key, value = (torch.randn(2, H, S, K) for _ in range(3))
        out = attention(query, key, value, mask=masks.padding(ints(3, 2)) & masks.dense(tril(S, S)))
    keep = first_keys(3, 2) & tril(S, S)
    assert_close(out.double(), reference.attention(query, key, value, keep=keep)[0], rtol=1e-5, atol=1e-5)
    learned = torch.randn(2, H, S, K, requires_grad=True)  # beside inference tensors
    with torch.no_grad():
        out = attention(learned, key, value, mask=masks.padding(ints(3, 2)))
    want, _ = reference.attention(learned.detach(), key, value, keep=first_keys(3, 2))
    assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert ran[0] == "ragged"


# --- memory, and what changes meanwhile -------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_lengths_are_read_at_each_call_and_kept_for_its_backward() -> None:
    """Masks that are written to: the next call sees it, a backward that is still to come does not."""
    lengths = ints(3, 2)
    mask, inputs = masks.padding(lengths), drawn(2, L, S)
    out = attention(*inputs, mask=mask)
    want = results(
        lambda *t: reference.attention(*t, keep=first_keys(3, 2))[0], inputs, torch.ones(2, H, L, V).double()
    )
    lengths.fill_(1)
    grads = torch.autograd.grad(out.sum(), inputs)
    for got, wanted in zip((out, *grads), want, strict=True):
        assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    later, _ = reference.attention(*inputs, keep=first_keys(1, 1))
    assert_close(attention(*inputs, mask=mask), later, rtol=1e-11, atol=1e-12)


def test_inputs_that_are_written_to_are_noticed() -> None:
    """A second derivative would be built from other numbers: an error, not a wrong gradient."""
    query, key, value = drawn(2, L, S)
    copies = [tensor * 1 for tensor in (query, key, value)]
    out = attention(*copies, mask=masks.padding([3, 2]), backend="ragged")
    with torch.no_grad():
        copies[1].mul_(2)
    with pytest.raises(RuntimeError, match=r"in ?-?place"):
        torch.autograd.grad(out.sum(), [query, key, value], create_graph=True)


def test_the_output_may_be_written_to() -> None:
    inputs = drawn(2, L, S)
    out = attention(*inputs, mask=masks.padding([3, 2]), backend="ragged")
    want = attention(*inputs, mask=masks.padding([3, 2]), backend="plain")
    with torch.no_grad():
        assert out.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in inputs]
        out += 1
    assert_close(out, want + 1, rtol=1e-11, atol=1e-12)


def test_one_sequence_is_no_view_of_the_input() -> None:
    """One sample, whose only key is its value: still a tensor of its own."""
    x = torch.randn(1, H, 1, K)
    out = attention(x, x, x, mask=masks.padding([1]), backend="ragged")
    assert_close(out, x)
    assert out.data_ptr() != x.data_ptr()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    inputs, mask = drawn(2, L, S), masks.padding([3, 0]) & masks.causal()
    call = lambda q, k, v: attention(q, k, v, mask=mask)  # noqa: E731
    cotangent = torch.randn(2, H, L, V, dtype=torch.float64)
    call(*inputs).backward(cotangent)
    want = [tensor.grad.clone() for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    checkpoint(call, *inputs, use_reentrant=reentrant).backward(cotangent)
    for tensor, wanted in zip(inputs, want, strict=True):
        assert_close(tensor.grad, wanted, rtol=1e-12, atol=1e-12)


def test_reentrant_checkpointing_with_dropout_draws_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs forward without a graph first: what is dropped there must be dropped when it runs again."""
    monkeypatch.setattr(functional, "TURN", 0)
    monkeypatch.setattr(functional, "TURN_GRAD", 1e30)  # a size between the two
    query, key, value = drawn(2, L, S)
    call = lambda q, k, v: attention(q, k, v, mask=masks.padding([S, 3]), dropout=0.5)  # noqa: E731
    out = checkpoint(call, query, key, value, use_reentrant=True)
    out.backward(torch.ones_like(out))  # sum(out) is linear in value, so that value . its gradient is sum(out)
    assert_close((value * value.grad).sum(), out.sum())


@pytest.mark.usefixtures("always")
def test_threads() -> None:
    inputs = [tensor.detach() for tensor in drawn(3, L, S)]
    lengths = [[1, 2, 3], [S, 0, 4], [5, 5, 5], [0, 0, 1]]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        found[index] = [attention(*inputs, mask=masks.padding(lengths[index])) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, outs in found.items():
        want, _ = reference.attention(*inputs, keep=first_keys(*lengths[index]))
        for out in outs:
            assert_close(out, want, rtol=1e-11, atol=1e-12)


# --- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_the_module(options: dict[str, Any], fused: bool, causal: bool, ran: list[str]) -> None:
    """Without weights sequence by sequence, with them as ever: the same output and gradients."""
    module = MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, fused_qkv=fused, **options)
    padding = ~first_keys(S, 3, 0)[:, 0, 0]
    found = []
    for need_weights in (True, False):
        x = torch.randn(3, S, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        ran.clear()
        out, _ = module(x, x, x, key_padding_mask=padding, is_causal=causal, need_weights=need_weights)
        assert ("ragged" in ran) == (not need_weights and not options)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])])
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("always")
def test_a_module_in_place_of_dropout_sees_the_weights(ran: list[str]) -> None:
    module = MultiheadAttention(6, 2, batch_first=True)
    seen = []
    module.attn_dropout.register_forward_hook(lambda _, given, __: seen.append(given[0].shape))
    x = torch.randn(2, S, 6)
    module(x, x, x, key_padding_mask=~first_keys(S, 3)[:, 0, 0], need_weights=False)
    assert seen == [(2, 2, S, S)]
    assert "ragged" not in ran


# --- a tensor that says just "causal" ---------------------------------------------------------------------------------

SIZES = [(5, 5), (5, 7), (7, 5), (1, 4), (2, 2), (3, 2), (2, 1)]
size_of = pytest.mark.parametrize("size", SIZES, ids=str)


def square(queries: int, keys: int) -> Size:
    return Size(B, H, queries, keys, torch.device("cpu"))


def says_causal(queries: int, keys: int) -> dict[str, Mask]:
    keep = tril(queries, keys)
    score = torch.zeros(queries, keys).masked_fill(~keep, -INF)
    minus = torch.full((queries, keys), -0.0).masked_fill(~keep, -INF)
    found = {
        "bool": masks.dense(keep),
        "bool, transposed": masks.dense(keep.T.contiguous().T),
        "bool, 4-D": masks.dense(keep[None, None]),
        "torch's bool": masks.from_torch(~keep),
        "torch's float": masks.from_torch(score),
        "float": masks.bias(score),
        "minus 0": masks.bias(minus),
        "double": masks.bias(score.double()),
        "half": masks.bias(score.half()),
        "bfloat16": masks.from_torch(score.bfloat16()),
    }
    return {name: mask for name, mask in found.items() if mask is not None}


@size_of
def test_an_exactly_causal_tensor_becomes_the_flag(size: tuple[int, int]) -> None:
    hides = not tril(*size).all()  # or there is no future to hide
    for name, mask in says_causal(*size).items():
        lowered = lower(with_flag(mask, square(*size)), square(*size))
        assert (lowered == Lowered(True)) == hides, name
        doubled = lower(with_flag(masks.causal() & mask, square(*size)), square(*size))
        assert doubled == Lowered(True), name
        assert lower(with_flag(mask & mask, square(*size)), square(*size)).causal == hides, name


@size_of
def test_one_entry_that_differs(size: tuple[int, int]) -> None:
    """Anywhere: the mask keeps its meaning, and only beside the flag is the future nobody's business."""
    keep, where = tril(*size), square(*size)
    for row, column in itertools.product(*map(range, size)):
        flipped = keep.clone()
        flipped[row, column] = ~keep[row, column]
        changed = [masks.dense(flipped), masks.from_torch(~flipped)]
        for value in (-1e9, 1e-30, -INF, INF, math.nan, torch.finfo(torch.float32).min, 1.0):
            score = torch.zeros(size).masked_fill(~keep, -INF)
            if score[row, column] != value:
                score[row, column] = value
                changed.append(masks.bias(score))
        if not keep[row, column]:
            score = torch.zeros(size).masked_fill(~keep, -INF)
            score[row, column] = 0
            changed.append(masks.bias(score))
        for mask in changed:
            assert with_flag(mask, where) is mask
            beside = masks.causal() & mask
            assert (with_flag(beside, where) is beside) == bool(keep[row, column])
            if not keep[row, column]:
                assert lower(with_flag(beside, where), where) == Lowered(True)


@size_of
@pytest.mark.parametrize("low", [-1e9, -1e4, torch.finfo(torch.float32).min])
def test_a_large_penalty_is_no_minus_infinity(size: tuple[int, int], low: float) -> None:
    mask = masks.bias(torch.zeros(size).masked_fill(~tril(*size), low))
    if tril(*size).all():
        return
    assert with_flag(mask, square(*size)) is mask
    assert lower(with_flag(masks.causal() & mask, square(*size)), square(*size)) == Lowered(True)


def test_masks_of_other_shapes_stay() -> None:
    keep, where = tril(L, S), square(L, S)
    for mask in (
        masks.dense(keep.expand(B, L, S)),
        masks.dense(keep.expand(1, H, L, S)),
        masks.dense(torch.ones(1, S).bool()),
        masks.dense(torch.ones(L, 1).bool()),
        masks.from_torch(torch.zeros(B * H, L, S)),
        masks.causal() | masks.dense(keep),
        ~masks.dense(~keep),
        masks.causal(1),
        appended(masks.dense(tril(L, S - 1)), 1),
        masks.bias(torch.zeros(L, S).masked_fill(~keep, -INF).requires_grad_()),
    ):
        assert with_flag(mask, where) is mask
    wide = masks.causal() & masks.dense(torch.ones(1, S).bool())
    assert with_flag(wide, where) is wide


def test_what_stands_beside_a_causal_tensor_stays() -> None:
    where = square(L, S)
    scores = torch.randn(L, S, requires_grad=True)
    mask = masks.padding([S, 3, 0]) & masks.dense(tril(L, S)) & masks.bias(scores) & masks.from_torch(~tril(L, S))
    lowered = lower(with_flag(mask, where), where)
    assert lowered.causal
    assert lowered.bias.data_ptr() == scores.data_ptr()
    assert torch.equal(lowered.keep, first_keys(S, 3, 0))


@pytest.mark.usefixtures("always")
@size_of
def test_numbers_and_gradients_with_the_flag(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    given = []
    original = type(backends.SDPA).run
    monkeypatch.setattr(type(backends.SDPA), "run", lambda self, r: (given.append(r.mask), original(self, r))[1])
    keep = tril(*size)
    learned = torch.randn(*size, dtype=torch.float64, requires_grad=True)
    for name, mask in says_causal(*size).items():
        given.clear()
        hold(drawn(B, *size), mask, {"keep": keep}, "sdpa")
        if not keep.all():
            assert given == [Lowered(True)], name
        lengths = masks.padding([size[1], 1, 0])
        hold(drawn(B, *size), mask & lengths, {"keep": keep & first_keys(size[1], 1, 0, keys=size[1])}, "sdpa")
        ran.clear()
        hold(drawn(B, *size), lengths & mask, {"keep": keep & first_keys(size[1], 1, 0, keys=size[1])}, None)
        assert keep.all() or ran[0] == "ragged", name  # a flag beside lengths
        hold(drawn(B, *size), masks.causal() & mask, {"keep": keep}, None)
        found = []
        for backend in ("sdpa", "plain"):
            out = attention(*drawn(B, *size)[:3], mask=mask & masks.bias(learned), backend=backend)
            found.append(torch.autograd.grad(out.sum() * 0 + out.mean(), learned)[0])
        assert all(not grad[~keep].any() for grad in found)


@pytest.mark.usefixtures("always")
def test_the_module_with_torchs_causal_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    original = type(backends.SDPA).run
    monkeypatch.setattr(type(backends.SDPA), "run", lambda self, r: (given.append(r.mask), original(self, r))[1])
    module = MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, L, 6, dtype=torch.float64)
    for mask in (~tril(L, L), nn.Transformer.generate_square_subsequent_mask(L)):
        for flag in (False, True):
            given.clear()
            out, _ = module(x, x, x, attn_mask=mask, is_causal=flag, need_weights=False)
            assert given == [Lowered(True)]
            want, _ = module(x, x, x, attn_mask=mask, is_causal=flag)
            assert_close(out, want, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("always")
def test_a_causal_tensor_that_is_changed_between_calls() -> None:
    keep, inputs = tril(L, L), drawn(2, L, L)
    mask = masks.dense(keep)
    assert_close(attention(*inputs, mask=mask), reference.attention(*inputs, keep=keep)[0], rtol=1e-11, atol=1e-12)
    keep[3, 1] = False
    assert_close(attention(*inputs, mask=mask), reference.attention(*inputs, keep=keep)[0], rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("always")
def test_sizes_of_0_under_a_causal_tensor() -> None:
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        out = attention(*drawn(2, queries, keys), mask=masks.dense(tril(queries, keys)))
        assert torch.equal(out, torch.zeros(2, H, queries, V, dtype=torch.float64))


def test_large_calls_are_read_and_small_ones_are_not() -> None:
    given = []
    x = torch.randn(2, 4, 256, 64)
    original = backends.SDPA.run
    try:
        backends.SDPA.run = lambda request: (given.append(request.mask), original(request))[1]
        attention(x, x, x, mask=masks.dense(tril(256, 256)))
        assert given == [Lowered(True)]
        small = x[:, :, :64]
        attention(small, small, small, mask=masks.dense(tril(64, 64)), backend="sdpa")
        assert given[1].keep is not None
    finally:
        del backends.SDPA.run
