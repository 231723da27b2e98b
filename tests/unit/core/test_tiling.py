"""What nobody sees is cut away, and "causal" becomes a flag: the same numbers, whatever the mask says."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
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
from headwise.core.algebra import Mask, appended, lower
from headwise.core.lowering import Band, Lowered, Rectangle, Size, Tile, Tiling
from headwise.core.tiling import Sequences, find_tiling, sequences, with_flag

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


def some(every: int, values: list[Any]) -> list[Any]:
    """All of them, of which each `every`-th runs by default and the rest is slow."""
    return [pytest.param(value, marks=pytest.mark.slow if at % every else ()) for at, value in enumerate(values)]


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
# what says more than lengths, or less: name -> the mask, (B, L, S), what may be seen or is added
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
    "documents for all": (
        lambda: masks.documents(ints(0, 0, 1)), (2, 3, 3), {"keep": ints(0, 0, 1)[:, None] == ints(0, 0, 1)}
    ),
    "documents per sample": (
        lambda: masks.documents(torch.stack([ints(0, 0, 1), ints(3, 2, 2)]), ints(2, 0, 0, 1)), (2, 3, 4),
        {"keep": torch.stack([ints(0, 0, 1), ints(3, 2, 2)])[:, None, :, None] == ints(2, 0, 0, 1)},
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
    "sequences, each causal": (
        lambda: sequences([3, 1, 2], [2, 4, 2], Band(None, 0)), (2, 6, 8),
        {"keep": torch.block_diag(tril(3, 2), tril(1, 4), tril(2, 2)).bool()},
    ),
    "as many keys as queries, causal, but elsewhere": (
        lambda: masks.causal() & sequences([2, 3], [3, 2]), (1, 5, 5), {"keep": pieces([2, 3], [3, 2]) & tril(5, 5)}
    ),
    "padding or the past": (
        lambda: masks.padding([3, 2]) | masks.causal(), (2, L, S), {"keep": first_keys(3, 2) | tril(L, S)}
    ),
    "nothing": (lambda: masks.window(None, None), (2, L, S), {}),
    "all": (lambda: ~masks.window(None, None), (2, L, S), {"keep": torch.zeros(1, 1, 1, 1).bool()}),
}  # fmt: skip
# nothing can be cut away from these
WHOLE = ("full", "no queries", "no queries, causal", "one document", "one document, causal")

# --- masks that take several tiles: a tile has 64 queries or more
ROWS, COLUMNS = 150, 167
AHEAD = torch.arange(COLUMNS) - torch.arange(ROWS)[:, None]
COLUMN = torch.arange(COLUMNS)
LEFT_OUT = torch.rand(2, COLUMNS, generator=torch.Generator().manual_seed(3)) < 0.3
STARTS = ints(0, 90)
ADDED = torch.randn(1, 2, ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
ADDED_OR_HIDDEN = ADDED.masked_fill(ADDED > 1, -INF)
DOCUMENTS = (torch.arange(ROWS) // 70).flip(0), torch.arange(COLUMNS) // 50
OFFSETS = torch.tensor([3, 200], dtype=torch.uint8)
LONG: dict[str, tuple[Mask, dict[str, Tensor]]] = {
    "a window": (masks.window(30, 4), {"keep": (AHEAD >= -30) & (AHEAD <= 4)}),
    "to the left": (masks.window(20, None), {"keep": AHEAD >= -20}),
    "to the right": (masks.window(None, 5), {"keep": AHEAD <= 5}),
    "itself": (masks.window(0, 0), {"keep": AHEAD == 0}),
    "wider than all": (masks.window(2**62, 2**62), {}),
    "causal": (masks.causal(), {"keep": AHEAD <= 0}),
    "causal(17)": (masks.causal(17), {"keep": AHEAD <= 17}),
    "causal(-90)": (masks.causal(-90), {"keep": AHEAD <= -90}),
    "causal(-500)": (masks.causal(-500), {"keep": AHEAD <= -500}),
    "causal(2**62)": (masks.causal(2**62), {}),
    "causal(-2**62)": (masks.causal(-(2**62)), {"keep": AHEAD < -COLUMNS - ROWS}),
    "a prefix": (masks.causal() | masks.prefix(100), {"keep": (AHEAD <= 0) | (COLUMN < 100)}),
    "a prefix, later": (masks.prefix(3) | masks.causal(-70), {"keep": (AHEAD <= -70) | (COLUMN < 3)}),
    "no prefix": (masks.causal(-20) | masks.prefix(-3), {"keep": AHEAD <= -20}),
    "a prefix in a window": (
        (masks.causal(-4) | masks.prefix(80)) & masks.window(40, None),
        {"keep": ((AHEAD <= -4) | (COLUMN < 80)) & (AHEAD >= -40)},
    ),
    "prefixes that do not nest": (
        (masks.causal(-4) | masks.prefix(80)) & (masks.causal(9) | masks.prefix(30)),
        {"keep": ((AHEAD <= -4) | (COLUMN < 80)) & ((AHEAD <= 9) | (COLUMN < 30))},
    ),
    "two windows": (
        masks.window(30, 9) & masks.window(60, 2) & masks.causal(1), {"keep": (AHEAD >= -30) & (AHEAD <= 1)}
    ),
    "a window and padding": (
        masks.window(30, 4) & masks.padding([COLUMNS, 41]),
        {"keep": (AHEAD >= -30) & (AHEAD <= 4) & (ints(COLUMNS, 41)[:, None] > COLUMN)[:, None, None]},
    ),
    "a window and padding on the left": (
        masks.padding(STARTS[:, None] <= COLUMN) & masks.window(30, 4),
        {"keep": (AHEAD >= -30) & (AHEAD <= 4) & (STARTS[:, None] <= COLUMN)[:, None, None]},
    ),
    "causal and holes": (
        masks.causal(2) & masks.padding(~LEFT_OUT), {"keep": (AHEAD <= 2) & ~LEFT_OUT[:, None, None]}
    ),
    "padding twice": (
        masks.padding([120, 10]) & masks.padding(ints(150, 130)) & masks.causal(),
        {"keep": (AHEAD <= 0) & (ints(120, 10)[:, None] > COLUMN)[:, None, None]},
    ),
    "a window in documents": (
        masks.documents(*DOCUMENTS) & masks.window(200, 60),
        {"keep": (DOCUMENTS[0][:, None] == DOCUMENTS[1]) & (AHEAD >= -200) & (AHEAD <= 60)},
    ),
    "documents, causal by bytes": (
        masks.causal(OFFSETS) & masks.documents(*DOCUMENTS),
        {"keep": (DOCUMENTS[0][:, None] == DOCUMENTS[1]) & (OFFSETS.long()[:, None, None] >= AHEAD)[:, None]},
    ),
    "causal by the largest offsets": (
        masks.causal(ints(2**63 - 1, -(2**63))) & masks.window(30, 30),
        {"keep": (AHEAD.abs() <= 30) & torch.tensor([True, False]).view(2, 1, 1, 1)},
    ),
    "what is added": (
        masks.window(40, 0) & masks.bias(ADDED), {"keep": (AHEAD >= -40) & (AHEAD <= 0), "bias": ADDED}
    ),
    "what is added, causal": (
        masks.causal() & masks.bias(ADDED_OR_HIDDEN), {"keep": AHEAD <= 0, "bias": ADDED_OR_HIDDEN}
    ),
    "what is added twice": (
        masks.bias(ADDED_OR_HIDDEN) & masks.window(None, 30) & masks.bias(ADDED[:, :1]),
        {"keep": AHEAD <= 30, "bias": ADDED_OR_HIDDEN + ADDED[:, :1]},
    ),
    "dense": (
        masks.dense(ADDED > 0) & masks.padding([9, 160]),
        {"keep": (ADDED > 0) & (ints(9, 160)[:, None] > COLUMN)[:, None, None]},
    ),
    "dense for each query": (
        masks.dense(ADDED[..., :1] > 0) & masks.window(3, 3), {"keep": (ADDED[..., :1] > 0) & (AHEAD.abs() <= 3)}
    ),
    "dense for each head": (
        masks.dense(ints(1, 0).bool().view(1, 2, 1, 1)) & masks.causal(),
        {"keep": ints(1, 0).bool().view(1, 2, 1, 1) & (AHEAD <= 0)},
    ),
    "torch's": (
        masks.window(50, 50) & masks.from_torch(ADDED[0, 0], LEFT_OUT, is_causal=True),
        {"keep": (AHEAD >= -50) & (AHEAD <= 0) & ~LEFT_OUT[:, None, None], "bias": ADDED[:, :1]},
    ),
    "not": (~masks.causal(5) & masks.window(100, 90), {"keep": (AHEAD > 5) & (AHEAD <= 90)}),
}  # fmt: skip
# each beside all of the masks
OPTIONS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "a sink": {"sink": torch.tensor([-1.5, 2.0], dtype=torch.float64)},
    "all of them": {"sink": torch.tensor([-INF, 0.3], dtype=torch.float64), "softcap": 0.9, "scale": -0.6},
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take the paths of large ones."""
    for name in ("TURN", "TURN_GRAD", "_WORTH_READING", "_WORTH_AN_ENTRY", "_WORTH_A_TILE"):
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


def hold(
    inputs: list[Tensor], mask: Mask | None, means: dict[str, Tensor], backend: str | None, **options: Any
) -> None:
    """Values and gradients, of a sink too, are the float64 reference's; what is not seen is exactly 0."""
    dtype, (batch, heads, queries, _), width = inputs[0].dtype, inputs[0].shape, inputs[2].shape[-1]
    sink = options.pop("sink", None)
    sinks = [] if sink is None else [sink.detach().clone().requires_grad_()]
    given = [*inputs, *sinks]
    doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    cotangent = torch.randn(batch, heads, queries, width)

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        return attention(q, k, v, mask=mask, backend=backend, sink=sink, **options)

    def theirs(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        return reference.attention(q, k, v, **means, sink=sink, **options)[0]

    want = results(theirs, doubles, cotangent.to(dtype).double())
    got = results(ours, given, cotangent)
    eps = torch.finfo(dtype).eps
    names = ("output", "query", "key", "value", "sink")
    for part, one, other in zip(names, got, want, strict=False):
        size = max(1.0, other.abs().max().item() if other.numel() else 0.0)
        assert_close(one, other, rtol=64 * eps, atol=64 * eps * size, msg=lambda m, p=part: f"{p}: {m}")
    out, _, _, of_value = want[:4]  # a single visible key gives gradients of 0 by cancellation, the rest exactly
    dead, unseen = (out == 0).all(dim=-1), (of_value == 0).all(dim=-1)
    for part, one, hidden in zip(names, got, (dead, dead, unseen, unseen), strict=False):
        assert not one[hidden].any(), f"{part} is not exactly 0"


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize(("groups", "width"), [(H, V), (G, 11), (1, 2)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, groups: int, width: int, ran: list[str]) -> None:
    build, shape, keep = CASES[name]
    for dtype in DTYPES[:2]:
        ran.clear()
        hold(drawn(*shape, dtype, groups, width), build(), {"keep": keep}, "tiled")
        assert ran == ["tiled"]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("groups", "width"), [(H, V), (G, 2)])
@pytest.mark.parametrize("name", OTHERS)
def test_masks_that_are_more_than_lengths(name: str, groups: int, width: int, ran: list[str]) -> None:
    build, shape, means = OTHERS[name]
    for dtype in DTYPES[:2]:
        ran.clear()
        hold(drawn(*shape, dtype, groups, width), build(), means, "tiled")
        assert ran == ["tiled"]


@pytest.mark.thin(3)
@pytest.mark.usefixtures("always")  # then a tile is as small as one can be
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LONG)
def test_several_tiles(name: str, options: str) -> None:
    mask, means = LONG[name]
    groups, width = (1, 3) if options == "a sink" else (2, 2) if options == "all of them" else (2, 3)
    sizes = ((2, ROWS, 3), (groups, COLUMNS, 3), (groups, COLUMNS, width))
    inputs = [torch.randn(2, *size, dtype=torch.float64).requires_grad_() for size in sizes]
    hold(inputs, mask, means, "tiled", **OPTIONS[options])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_several_tiles_in_fewer_bits(dtype: torch.dtype) -> None:
    for name in ("a window", "causal(-90)", "a prefix in a window", "what is added, causal", "dense"):
        mask, means = LONG[name]
        inputs = [
            torch.randn(2, heads, n, 4).to(dtype).requires_grad_()
            for heads, n in ((2, ROWS), (1, COLUMNS), (1, COLUMNS))
        ]
        hold(inputs, mask, means, "tiled")
        hold(inputs, mask, means, "tiled", **OPTIONS["a sink"])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", LONG)
def test_what_is_chosen_saves_something(name: str, ran: list[str]) -> None:
    """And without gradients it is the same."""
    mask, means = LONG[name]
    inputs = [torch.randn(2, 2, n, 3) for n in (ROWS, COLUMNS, COLUMNS)]
    out = attention(*inputs, mask=mask)
    want, _ = reference.attention(*inputs, **means)
    assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    saves_nothing = name in ("wider than all", "causal(2**62)", "causal and holes", "dense", "dense for each head")
    assert ran[0] == "tiled" or saves_nothing


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_16_bit(dtype: torch.dtype, first: int) -> None:
    for build, shape, keep in list(CASES.values())[first::3]:
        hold(drawn(*shape, dtype), build(), {"keep": keep}, "tiled")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", some(3, list(CASES)))
def test_chosen_where_it_is_quicker(name: str, ran: list[str]) -> None:
    """With gradients and without, the same numbers; layouts are those of every other backend."""
    build, shape, keep = CASES[name]
    inputs = drawn(*shape)
    hold(inputs, build(), {"keep": keep}, None)
    assert ran == (["sdpa"] if name in WHOLE else ["tiled"])
    with torch.no_grad():
        out = attention(*inputs, mask=build())
        same = attention(*inputs, mask=build(), backend="plain")
    assert_close(out, same, rtol=1e-12, atol=1e-12)
    assert out.dtype == same.dtype


@pytest.mark.thin(3)
@pytest.mark.parametrize("scale", [0.0, 0.3, -1.7])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_scale(scale: float, first: int) -> None:
    for build, shape, keep in list(CASES.values())[first::3]:
        hold(drawn(*shape), build(), {"keep": keep}, "tiled", scale=scale)


@pytest.mark.parametrize("name", ["lengths", "a length of 0, causal", "documents, causal", "to other keys"])
def test_other_strides(name: str) -> None:
    build, (batch, queries, keys), keep = CASES[name]
    query = torch.randn(batch, queries, H, K).transpose(1, 2)
    key = torch.randn(batch, 2 * G, K, keys)[:, ::2].transpose(-1, -2)
    value = torch.randn(1, 1, keys, V).expand(batch, G, keys, V)
    want, _ = reference.attention(query, key, value, keep=keep)
    assert_close(attention(query, key, value, mask=build(), backend="tiled").double(), want, rtol=1e-5, atol=1e-5)


STRIDED: dict[str, Callable[[int], Tensor]] = {
    "one row for all": lambda n: torch.randn(2, 2, 1, 4, dtype=torch.float64).expand(2, 2, n, 4),
    "one sample for all": lambda n: torch.randn(2, n, 4, dtype=torch.float64).expand(2, 2, n, 4),
    "overlapping rows": lambda n: torch.randn(2, 2, n + 3, dtype=torch.float64).unfold(2, 4, 1),
    "columns apart": lambda n: torch.randn(2, 2, n, 8, dtype=torch.float64)[..., ::2],
    "rows last": lambda n: torch.randn(2, 2, 4, n, dtype=torch.float64).mT,
}


@pytest.mark.parametrize("options", ["plainly", "all of them"])
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, options: str) -> None:
    """Of the inputs, and of the gradient that comes in."""
    make, mask, told = STRIDED[name], masks.window(2, 1), OPTIONS[options]
    keep = {"keep": ((AHEAD >= -2) & (AHEAD <= 1))[:9, :11]}
    inputs = [make(n).detach() for n in (9, 11, 11)]
    doubles = [tensor.clone().contiguous().requires_grad_() for tensor in inputs]
    leaves = [tensor.requires_grad_() for tensor in inputs]
    for cotangent in (make(9), torch.ones(()).double().expand(2, 2, 9, 4)):
        want = results(lambda *t: reference.attention(*t, **keep, **told)[0], doubles, cotangent)
        got = results(lambda *t: attention(*t, mask=mask, backend="tiled", **told), leaves, cotangent)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "name", some(3, [*(name for name in CASES if "causal" in name and "no queries" not in name), *OTHERS])
)
def test_second_derivatives(name: str) -> None:
    build, shape, _ = CASES.get(name) or OTHERS[name]
    call = lambda q, k, v: attention(q, k, v, mask=build(), backend="tiled")  # noqa: E731
    inputs = drawn(*shape)
    assert gradcheck(call, inputs, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("mask", [masks.padding([2, 4]), masks.padding([2, 4]) & masks.causal()], ids=repr)
def test_second_derivatives_where_inputs_depend_on_each_other(mask: Mask) -> None:
    x = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    found = {}
    for backend in ("tiled", "plain"):
        q = x * 1
        k = q * 2
        out = attention(q, k, k.sin() + q, mask=mask, backend=backend)
        (first,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        found[backend] = [first, *torch.autograd.grad(first.pow(2).sum(), x)]
    for got, want in zip(found["tiled"], found["plain"], strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_of_one_input_only(which: int) -> None:
    for name in ("lengths", "a length of 0, causal", "documents"):
        build, shape, _ = CASES[name]
        inputs = [tensor.detach() for tensor in drawn(*shape)]
        inputs[which].requires_grad_()
        found = [
            torch.autograd.grad(attention(*inputs, mask=build(), backend=backend).sin().sum(), inputs[which])[0]
            for backend in ("tiled", "plain")
        ]
        assert_close(*found, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 2]], ids=str)
def test_a_graph_where_no_key_is_visible(lengths: list[int]) -> None:
    """The output hangs on its inputs even if it does not depend on them: a backward gives 0, it does not fail."""
    for backend in ("sdpa", "plain", "tiled"):
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
    got = results(lambda *t: attention(*t, mask=build(), backend="tiled"), dirty, cotangent)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_row_without_keys_is_0_and_so_is_its_gradient() -> None:
    query, key, value = drawn(2, L, S)
    out = attention(query, key, value, mask=masks.padding([0, 4]), backend="tiled")
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
    out = attention(query, key, key, mask=mask, dropout=0.25, backend="tiled").view(2, rows, S)
    for sample, count in zip(out, (S if packed else seen, S), strict=True):
        kept = sample[:, :count] != 0
        assert_close(sample[:, :count][kept], torch.full((int(kept.sum()),), 1 / count / 0.75))
        assert 0.7 < kept.float().mean() < 0.8
        assert not sample[:, count:].any()
        assert kept.any(dim=0).all()
        assert not kept.all(dim=0).any()
    assert not torch.equal(out[0] != 0, out[1] != 0)  # drawn anew for each sequence
    torch.manual_seed(3)
    first = attention(query, key, key, mask=mask, dropout=0.5, backend="tiled")
    torch.manual_seed(3)
    assert torch.equal(first, attention(query, key, key, mask=mask, dropout=0.5, backend="tiled"))
    query.requires_grad_()
    out = attention(query, key, key, mask=mask, dropout=1.0, backend="tiled")
    assert torch.equal(out, torch.zeros_like(query))
    assert not torch.autograd.grad(out.sum(), query)[0].any()


# --- what is taken, and what is not -----------------------------------------------------------------------------------


CPU = torch.device("cpu")


def tiles_of(mask: Mask | None, *size: int, pair: float = 1, turn: float = 1) -> Tiling:
    return find_tiling(mask, Size(*size, CPU), pair, turn)


def test_masks_are_read_as_they_are() -> None:
    """Each sample or document is one tile, wherever it is; what cannot be cut out is left for the tiles."""

    def tile(samples: tuple[int, int], queries: tuple[int, int], keys: tuple[int, int], flag: bool = False) -> Tile:
        return Tile(Rectangle(samples, queries, keys), flag)

    every = (0, L)
    for mask, size, want in (
        (None, (3, H, L, S), [tile((0, 3), every, (0, S))]),
        (masks.padding([3, 9, 0]), (3, H, L, S), [tile((0, 1), every, (0, 3)), tile((1, 2), every, (0, S))]),
        (masks.padding([3]), (3, H, L, S), [tile((0, 3), every, (0, 3))]),
        (masks.padding(LEFT[:, 0, 0]), (2, H, L, S), [tile((0, 1), every, (S - 3, S)), tile((1, 2), every, (0, S))]),
        (masks.documents(ints(2, 2, 0)), (1, H, 3, 3), [tile((0, 1), (0, 2), (0, 2)), tile((0, 1), (2, 3), (2, 3))]),
        (
            masks.documents(ints(2, 0, 0, 7), ints(0, 3, 2, 2)), (2, H, 4, 4),
            [tile((0, 2), (0, 1), (2, 4)), tile((0, 2), (1, 3), (0, 1))],
        ),
        (
            masks.documents(ints(0, 0, 1), torch.stack([ints(0, 0, 1), ints(1, 1, 0)])), (2, H, 3, 3),
            [
                tile((0, 1), (0, 2), (0, 2)), tile((0, 1), (2, 3), (2, 3)),
                tile((1, 2), (0, 2), (2, 3)), tile((1, 2), (2, 3), (0, 2)),
            ],
        ),
        (sequences([2, 1]), (1, H, 3, 3), [tile((0, 1), (0, 2), (0, 2)), tile((0, 1), (2, 3), (2, 3))]),
        (masks.causal(), (2, H, L, S), [tile((0, 2), every, (0, L), flag=True)]),
        (masks.causal() & masks.padding([9, 2]), (2, H, L, S), [
            tile((0, 1), every, (0, L), flag=True), tile((1, 2), every, (0, 2), flag=True)
        ]),
        (masks.window(S, S), (2, H, L, S), [tile((0, 2), every, (0, S))]),
    ):  # fmt: skip
        found = tiles_of(mask, *size)
        assert sorted(found.tiles) == want, mask
        assert (found.rest, found.whole) == (None, mask)
        beside = None if mask is None else mask & masks.bias(torch.zeros(size[2:]))
        if beside is not None:
            found = tiles_of(beside, *size)
            assert sorted(found.tiles) == want, mask
            assert found.rest is beside.parts[1]
    band = masks.causal() | masks.prefix(2)
    (only,) = tiles_of(masks.window(3, None) & band, 2, H, 6, 7).tiles
    assert only == Tile(Rectangle((0, 2), (0, 6), (0, 6)), band=Band(3, 0, 2))


def written_out(tiling: Tiling, size: Size) -> Tensor:
    """(B, H, L, S): what the tiles show, put together; and no query is in two of them."""
    keep = torch.zeros(size[:4], dtype=torch.bool)
    times = torch.zeros(size.batch, size.queries, dtype=torch.int64)
    for tile in tiling.tiles:
        samples, queries, keys = (slice(*bounds) for bounds in tile.place)
        times[samples, queries] += 1
        target = keep[samples, :, queries, keys]
        assert target.numel()  # nothing empty is run
        own = Size(target.shape[0], size.heads, *target.shape[2:], size.device)
        target[:] = True
        if tile.causal:
            target &= Band(None, 0).keep(own.queries, own.keys, CPU)
        if tile.band is not None:
            assert not tile.causal
            target &= tile.band.keep(own.queries, own.keys, CPU)
        if tiling.rest is not None:
            rest = lower(tiling.rest.cut(tile.place, size), own)
            for part in (rest.whole_keep(own), None if rest.bias is None else rest.bias != -INF):
                if part is not None:
                    target &= part
    assert (times <= 1).all()
    return keep


def kept(mask: Mask, size: Size) -> Tensor:
    """(B, H, L, S) by the mask's own rule."""
    lowered = lower(mask, size)
    keep = torch.ones(size[:4], dtype=torch.bool)
    for part in (lowered.whole_keep(size), None if lowered.bias is None else lowered.bias != -INF):
        if part is not None:
            keep = keep & part
    return keep


@pytest.mark.parametrize("name", some(3, [*CASES, *OTHERS, *LONG]))
def test_tiles_show_what_the_mask_shows(name: str) -> None:
    if name in LONG:
        mask, shape = LONG[name][0], (2, 2, ROWS, COLUMNS)
    else:
        build, (batch, queries, keys), _ = CASES.get(name) or OTHERS[name]
        mask, shape = build(), (batch, H, queries, keys)
    size = Size(*shape, CPU)
    for turn in (1, 1e6):
        assert torch.equal(written_out(find_tiling(mask, size, 1, turn), size), kept(mask, size))


def drawn_band(draw: random.Random, most: int) -> Band:
    left, right = (draw.choice([None, draw.randint(-most, most)]) for _ in range(2))
    return Band(left, right, draw.choice([0, draw.randint(0, most)]) if right is not None else 0)


def shown(band: Band, queries: int, keys: int) -> list[list[bool]]:
    """What the words of the class say."""
    left, right, first = band
    return [
        [(left is None or j >= i - left) and (right is None or j <= i + right or j < first) for j in range(keys)]
        for i in range(queries)
    ]


def test_bands_say_what_their_numbers_say() -> None:
    draw = random.Random(1)
    for _ in range(150):
        L_, S_ = draw.randint(1, 9), draw.randint(1, 9)
        one, other = drawn_band(draw, 11), drawn_band(draw, 11)
        keep = one.keep(L_, S_, CPU)
        assert keep.shape == (1, 1, L_, S_)
        assert keep[0, 0].tolist() == shown(one, L_, S_)
        within = one.within(L_, S_)
        assert shown(within, L_, S_) == shown(one, L_, S_), (one, within)
        assert within.within(L_, S_) == within
        if all(map(all, shown(one, L_, S_))):
            assert within == Band(), one  # what hides nothing is left out
        met = one.meet(other)
        assert met == other.meet(one)
        if met is not None:
            both = [
                [a and b for a, b in zip(*rows, strict=True)]
                for rows in zip(shown(one, L_, S_), shown(other, L_, S_), strict=True)
            ]
            assert shown(met, L_, S_) == both, (one, other, met)
        else:  # prefixes that do not nest
            assert (one.right < other.right) != (one.first < other.first)
        row, column = draw.randint(0, L_ - 1), draw.randint(0, S_ - 1)
        moved = shown(one.seen_from(row, column), L_ - row, S_ - column)
        assert moved == [line[column:] for line in shown(one, L_, S_)[row:]], (one, row, column)


def test_tiles_of_drawn_bands() -> None:
    """All that is seen is in the tiles, once, and hardly more."""
    draw = random.Random(2)
    for _ in range(60):
        size = Size(1, 1, draw.choice([1, 64, 65, 130, 200]), draw.choice([1, 63, 128, 190]), CPU)
        band = drawn_band(draw, 220)
        mask = Sequences((size.queries,), (size.keys,), band)
        tiling = find_tiling(mask, size, 1, draw.choice([1, 1e4, 1e9]))
        assert tiling.rest is None
        keep = band.keep(size.queries, size.keys, CPU)
        assert torch.equal(written_out(tiling, size), keep), (band, size)
        for tile in tiling.tiles:
            block = keep[0, 0, slice(*tile.place.queries), slice(*tile.place.keys)]
            if band.left is not None and band.right is not None and not band.first:
                assert block[:, 0].any() or block[0].any()  # no wider than what it shows
                assert block[:, -1].any()


@pytest.mark.parametrize("name", some(3, [name for name in (*CASES, *OTHERS) if "no queries" not in name]))
def test_a_part_of_a_mask_is_a_part_of_the_whole(name: str) -> None:
    """Every class of masks writes the part down as slices of what it writes down."""
    build, (batch, queries, keys), _ = CASES.get(name) or OTHERS[name]
    biased = build() & masks.bias(torch.randn(1, H, queries, keys)) & masks.bias(torch.randn(batch, 1, 1, keys))
    opposite = masks.window(1, 0) if name == "a float" else ~build()  # scores have no opposite
    combined = (masks.causal(torch.arange(batch) - 1) | opposite) & masks.causal(2)
    draw = random.Random(3)
    for mask in (build(), biased, combined, appended(build(), 1) if name not in PACKED else biased):
        size = Size(batch, H, queries, keys + (repr(mask).startswith("appended")), CPU)
        for _ in range(4):
            low = [draw.randint(0, n - 1) for n in (size.batch, size.queries, size.keys)]
            high = [draw.randint(a + 1, n) for a, n in zip(low, (size.batch, size.queries, size.keys), strict=True)]
            place = Rectangle(*zip(low, high, strict=True))
            part = mask.cut(place, size)
            own = Size(*(high[0] - low[0], H, high[1] - low[1], high[2] - low[2]), CPU)
            at = (slice(low[0], high[0]), slice(None), slice(low[1], high[1]), slice(low[2], high[2]))
            try:
                whole = kept(mask, size)
            except ValueError:
                continue  # packed rows with other sizes
            assert torch.equal(kept(part, own), whole[at])
            score = mask.score(size)
            if score is not None:
                assert torch.equal(part.score(own).expand(own[:4]), score.expand(size[:4])[at])
            assert repr(part)


@pytest.mark.usefixtures("always")
def test_options_beside_a_mask(ran: list[str]) -> None:
    """What only the plain backend took before; weights are still its business."""
    inputs = drawn(2, L, S)
    sink = torch.randn(H, dtype=torch.float64)
    for options in ({"softcap": 2.0}, {"sink": sink}, {"sink": sink, "softcap": 0.5, "scale": 2.0}):
        for backend in (None, "tiled"):
            ran.clear()
            hold(inputs, masks.padding([3, 0]), {"keep": first_keys(3, 0)}, backend, **options)
            assert set(ran) == {"tiled"}
    weights = attention_weights(*inputs[:2], mask=masks.padding([3, 2]))
    assert_close(weights.sum(-1), torch.ones(2, H, L, dtype=torch.float64))


def test_a_large_sink_beside_rows_that_see_nothing() -> None:
    """exp of it is no number, and those rows are in no tile."""
    inputs, sink = drawn(2, L, S, torch.float32), torch.tensor([200.0, 90.0, -200.0, -INF])
    hold(inputs, masks.padding([0, 3]), {"keep": first_keys(0, 3)}, "tiled", sink=sink)
    hold(inputs, masks.causal(-2), {"keep": tril(L, S + 2)[:, 2:]}, "tiled", sink=sink)


@pytest.mark.usefixtures("always")
def test_a_learned_bias_beside_keeps_its_gradient(ran: list[str]) -> None:
    scores = torch.randn(L, S, dtype=torch.float64, requires_grad=True)
    inputs = drawn(2, L, S)
    found = []
    for backend in (None, "plain"):
        out = attention(*inputs, mask=masks.padding([3, 2]) & masks.bias(scores), backend=backend)
        found.append(torch.autograd.grad(out.sin().sum(), scores)[0])
    assert_close(*found, rtol=1e-11, atol=1e-12)
    assert "tiled" not in ran
    reason = "a bias that is learned number by number needs the gradient of all scores"
    mask = masks.padding([3, 2]) & masks.bias(scores)
    assert explain(*inputs, mask=mask).refused["tiled"] == [reason]
    with pytest.raises(ValueError, match=f"^attention: backend must take this call, and tiled does not: {reason}"):
        attention(*inputs, mask=mask, backend="tiled")


@pytest.mark.usefixtures("always")
def test_refusals_stay_refusals() -> None:
    """A mask that does not fit is named as on the general path, whatever its numbers would allow."""
    inputs = drawn(1, 6, 6)
    for mask, message in (
        (masks.padding([1, 2]), r"padding: lengths must have one entry per sample, B = 1; got \(2,\)"),
        (masks.padding(torch.ones(1, 5).bool()), r"padding: keep must broadcast to .*; got \(1, 1, 1, 5\)"),
        (masks.documents(torch.arange(5)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(5,\)"),
        (masks.documents(torch.arange(8)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(8,\)"),
        (masks.documents(torch.arange(6), torch.arange(7)), r"documents: key_ids must be \(6,\) or .*; got \(7,\)"),
        (
            masks.padding([6]) & masks.documents(torch.arange(8)),  # cut tile by tile
            r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(8,\)",
        ),
        (masks.causal(ints(1, 2)), r"causal: offset must have one entry per sample, B = 1; got \(2,\)"),
        (masks.documents(torch.arange(6).view(2, 3)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(2, 3\)"),
        (masks.documents(torch.arange(6).view(6, 1)), r"documents: ids must be \(6,\) or \(1, 6\) .*; got \(6, 1\)"),
        (masks.from_torch(None, torch.zeros(2, 6).bool()), r"from_torch: key_padding_mask must be \(B, S\) with .*"),
        (masks.dense(torch.ones(5, 6).bool()), r"dense: keep must broadcast to .*; got \(1, 1, 5, 6\)"),
    ):
        for backend in ("sdpa", None, "tiled"):
            with pytest.raises(ValueError, match=f"^{message}"):
                attention(*inputs, mask=mask, backend=backend)
    for mask, message in (
        (sequences([2, 3]), "queries must add up to 6 for these scores; got 5"),
        (sequences([2, 5]), "queries must add up to 6 for these scores; got 7"),
        (sequences([2, 4], [3, 4]), "keys must add up to 6 for these scores; got 7"),
    ):
        for backend in ("sdpa", None, "tiled"):
            with pytest.raises(ValueError, match=f"^sequences: {message}"):
                attention(*inputs, mask=mask, backend=backend)


@pytest.mark.parametrize("backend", [None, "tiled", "sdpa", "plain"])
def test_sizes_of_0(backend: str | None) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for size in itertools.product((0, 2), (0, 3), (0, 3)):
        batch, queries, keys = size
        for mask in (
            None,
            masks.causal(),
            masks.window(1, 0),
            masks.prefix(2),
            masks.padding([2]) & masks.causal(),
            masks.padding(none if batch == 0 else ints(0, 2)),
            masks.documents(torch.arange(queries), torch.arange(keys)),
            masks.documents(torch.arange(queries).expand(batch, -1), torch.arange(keys)),
            sequences([queries], [keys]),
            masks.dense(torch.ones(queries, keys).bool()),
        ):
            inputs = drawn(*size)
            out = attention(*inputs, mask=mask, backend=backend)
            assert out.shape == (batch, H, queries, V)
            out.sum().backward()
            assert [tensor.grad.shape for tensor in inputs] == [tensor.shape for tensor in inputs]
    query, key = torch.randn(2, 0, 3, 4), torch.randn(2, 1, 3, 4)  # no heads
    assert attention(query, key, key, mask=masks.causal(), backend=backend).shape == (2, 0, 3, 4)


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
    own = sequences([3, 1], [1, 2], Band(1, 0))
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert vars(twin) == vars(own)


@pytest.mark.usefixtures("always")
def test_masks_that_were_copied() -> None:
    inputs = [torch.randn(2, 2, n, 3) for n in (ROWS, COLUMNS, COLUMNS)]
    for name in ("a prefix in a window", "a window in documents", "torch's", "what is added, causal"):
        mask = LONG[name][0]
        want = attention(*inputs, mask=mask)
        for twin in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
            assert torch.equal(attention(*inputs, mask=twin), want)


# --- when it pays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_as_much_is_saved_as_a_turn_costs(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """(sum of what is hidden) * 2 * H * (K + V) FLOPs, for each sequence one turn."""
    inputs = [tensor.detach().requires_grad_(grad) for tensor in drawn(2, L, S)]
    saved = 2 * H * (K + V) * L * (2 * S - 3 - 4)
    for name, price, want in (
        ("TURN_GRAD" if grad else "TURN", saved / 2, "tiled"),
        ("TURN_GRAD" if grad else "TURN", saved / 2 + 1, "sdpa"),
    ):
        for other in ("TURN", "TURN_GRAD"):
            monkeypatch.setattr(functional, other, price if other == name else 1e30 if want == "tiled" else 0)
        assert explain(*inputs, mask=masks.padding([3, 4])).backend == want
        with torch.no_grad():
            assert explain(*inputs, mask=masks.padding([3, 4])).backend == (
                want if not grad else "sdpa" if want == "tiled" else "tiled"
            )


def test_full_lengths_are_not_worth_a_loop_and_short_calls_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 128, 64)
    assert explain(x, x, x, mask=masks.padding([128, 128])).backend == "sdpa"
    assert explain(x, x, x, mask=masks.padding([128, 8])).backend == "tiled"
    assert explain(x, x, x, mask=masks.padding([127, 128])).backend == "sdpa"
    for name in ("find_tiling", "with_flag"):
        monkeypatch.setattr(functional, name, lambda *_: pytest.fail("read"))
    short = x[:, :, :8]
    attention(short, short, short, mask=masks.padding([8, 2]))
    attention(short, short, short, mask=masks.dense(tril(8, 8)))


def test_many_short_samples_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths cut each sample for itself; a band cuts all of them at once."""
    x, lengths = torch.randn(64, 8, 128, 2), torch.arange(64) + 1
    assert explain(x, x, x, mask=masks.padding(lengths)).refused["tiled"]
    assert explain(x, x, x, mask=masks.window(0, 0)).backend == "tiled"
    monkeypatch.setattr(functional, "find_tiling", lambda *_: pytest.fail("read"))
    attention(x, x, x, mask=masks.padding(lengths))
    attention(x, x, x, mask=masks.padding(lengths) & masks.causal())
    attention(x[:1], x[:1], x[:1], mask=masks.padding(lengths[:1]), dropout=0.5)


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
    "compiled for any size": dynamic,
    "compiled": compiled,
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
    "padding & causal": lambda keep: masks.padding(keep) & masks.causal(),
    "padding": masks.padding,
    "a causal tensor": lambda keep: (
        masks.dense(
            torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool).tril()  # no loop, for Dynamo
        )
        & masks.padding(keep)
    ),
}


@pytest.mark.thin(2)
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
    assert ran[0] == "tiled"
    ran.clear()
    got = WAYS[way](lambda q, k, v, m: attention(q, k, v, mask=GIVEN[given](m)), query, key, value, keep)
    assert "tiled" not in ran
    assert ran
    assert_close(got, want.sum() if way == "grad" else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [pytest.param("padding & causal", marks=pytest.mark.slow), "a causal tensor"])
def test_large_calls_compile_to_one_graph(given: str) -> None:
    """As large as is read in eager mode: a number that is read would break the graph."""
    x = torch.randn(2, 4, 256, 64)
    keep = first_keys(17, 256, keys=256)[:, 0, 0]
    call = lambda q, m: attention(q, q, q, mask=GIVEN[given](m))  # noqa: E731
    assert explain(x, x, x, mask=GIVEN[given](keep)).backend == "tiled"
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
    assert "tiled" not in ran


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
    assert ran.count("tiled") == 3


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
    assert ran[0] == "tiled"


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
    out = attention(*copies, mask=masks.padding([3, 2]), backend="tiled")
    with torch.no_grad():
        copies[1].mul_(2)
    with pytest.raises(RuntimeError, match=r"in ?-?place"):
        torch.autograd.grad(out.sum(), [query, key, value], create_graph=True)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["dense", "bias", "holes"])
def test_masks_that_are_read_again_in_backward_are_watched(kind: str, create_graph: bool) -> None:
    """Gradients would be those of another mask: an error, not a wrong gradient."""
    tensor = {"dense": tril(L, S), "bias": torch.randn(L, S), "holes": WRITTEN[:, 0, 0].clone()}[kind]
    mask = {"dense": masks.dense, "bias": masks.bias, "holes": masks.padding}[kind](tensor)
    inputs = drawn(2, L, S)
    out = attention(*inputs, mask=mask & masks.window(3, 1), backend="tiled")
    torch.autograd.grad(out.sum(), inputs, retain_graph=True, create_graph=create_graph)
    tensor[0] = 1
    with pytest.raises(RuntimeError, match="a mask was changed in place after the forward pass"):
        torch.autograd.grad(out.sum(), inputs, create_graph=create_graph)


def test_backward_twice() -> None:
    inputs = drawn(2, L, S)
    for options in ({}, {"dropout": 0.5}):
        out = attention(*inputs, mask=masks.padding([3, 2]) & masks.window(2, 2), backend="tiled", **options)
        first = torch.autograd.grad(out.sin().sum(), inputs, retain_graph=True)
        for one, other in zip(first, torch.autograd.grad(out.sin().sum(), inputs), strict=True):
            assert torch.equal(one, other)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out.sin().sum(), inputs)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("options", OPTIONS)
def test_many_gradients_at_once(options: str) -> None:
    """`is_grads_batched`, vectorized Jacobians and vmap over backward: as many single ones."""
    told = OPTIONS[options]
    sizes = ((2, 9, 3), (1, 11, 3), (1, 11, 3))
    inputs = [torch.randn(2, *size, dtype=torch.float64).requires_grad_() for size in sizes]
    out = attention(*inputs, mask=masks.window(3, 1) & masks.padding([9, 0]), backend="tiled", **told)
    many = torch.randn(3, *out.shape, dtype=torch.float64)
    alone = [torch.autograd.grad(out, inputs, one, retain_graph=True) for one in many]
    want = [torch.stack(grads) for grads in zip(*alone, strict=True)]
    batched = torch.autograd.grad(out, inputs, many, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda one: torch.autograd.grad(out, inputs, one, retain_graph=True))(many)
    for got in (batched, mapped):
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_what_dropout_leaves_out() -> None:
    """What was drawn is not kept, so only a plain backward draws it again: the rest is refused, with the cure."""
    inputs = drawn(2, L, S)
    out = attention(*inputs, mask=masks.window(3, 1), dropout=0.5, backend="tiled")
    with pytest.raises(RuntimeError, match=r"dropout need the plain backend: attention.*backend='plain'"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"dropout need the plain backend: attention.*backend='plain'"):
        torch.autograd.grad(out, inputs, torch.ones(2, *out.shape).double(), is_grads_batched=True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", ["plainly", "all of them"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_drops_what_forward_dropped(reentrant: bool | None, options: str) -> None:
    """Sum of the output is linear in value: value times its gradient is that sum, if the same weights were dropped."""
    query, key, value = (
        torch.randn(2, 2, n, 3, dtype=torch.float64).requires_grad_() for n in (ROWS, COLUMNS, COLUMNS)
    )
    mask = masks.window(40, 9) & masks.padding([COLUMNS, 60]) & masks.bias(ADDED_OR_HIDDEN)
    call = lambda q, k, v: attention(q, k, v, mask=mask, dropout=0.4, **OPTIONS[options])  # noqa: E731
    out = call(query, key, value) if reentrant is None else checkpoint(call, query, key, value, use_reentrant=reentrant)
    out.backward(torch.ones_like(out))
    assert_close((value * value.grad).sum(), out.sum(), rtol=1e-10, atol=1e-10)
    assert out[0].all()


def test_gradients_under_dropout() -> None:
    """Against finite differences, the same weights dropped each time."""

    def call(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(
            *inputs, mask=masks.window(3, 2) & masks.padding([S, 3]), dropout=0.4, softcap=2.0, backend="tiled"
        )

    assert gradcheck(call, drawn(2, L, S), fast_mode=True)


def test_hooks_on_saved_tensors() -> None:
    """Offloading sees all that is kept, and what it gives back is used."""
    inputs, seen = drawn(2, ROWS, COLUMNS), []
    mask = masks.window(9, 2)
    want = results(lambda *t: attention(*t, mask=mask, backend="tiled"), inputs, torch.ones(2, H, ROWS, V))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t.clone())[1], lambda t: t):
        out = attention(*inputs, mask=mask, backend="tiled")
    assert all(math.prod(shape) < ROWS * COLUMNS for shape in seen)
    for one, other in zip((out, *torch.autograd.grad(out.sum(), inputs)), want, strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_one_mode_after_another() -> None:
    """What one mode left in a cache serves the next: inference first, then gradients, both ways."""
    for width in (5, 6):
        mask, inputs = masks.window(width, 2), drawn(1, 71, 73, torch.float32)
        with torch.inference_mode():
            first = attention(*inputs, mask=mask, backend="tiled")
        second = attention(*inputs, mask=mask, backend="tiled")
        assert torch.equal(first, second)
        for tensor in torch.autograd.grad(second.sum(), inputs):
            assert tensor.isfinite().all()
        with torch.no_grad():
            third = attention(*inputs, mask=mask, backend="tiled")
            assert not third.requires_grad
            with torch.enable_grad():
                assert attention(*inputs, mask=mask, backend="tiled").requires_grad
        assert torch.equal(first, third)


def test_deterministic_algorithms_and_another_default_dtype() -> None:
    inputs = drawn(2, L, S, torch.float32)
    keep = {"keep": first_keys(3, 0) & tril(L, S)}
    torch.use_deterministic_algorithms(True)  # put back by conftest, like the dtype
    hold(inputs, masks.padding([3, 0]) & masks.causal(), keep, "tiled")
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        hold(inputs, masks.padding([3, 0]) & masks.causal(), keep, "tiled")
        hold(inputs, masks.padding([3, 0]) & masks.causal(), keep, "tiled", softcap=0.7)


def test_the_largest_numbers_of_float16() -> None:
    """Products that float16 cannot hold are held in float32."""
    inputs = [(torch.randn(2, 2, n, 16) * 80).half() for n in (70, 75, 75)]
    for options in ({}, {"softcap": 1e4}):
        want, _ = reference.attention(*inputs, keep=AHEAD[:70, :75] <= 1, **options)
        out = attention(*inputs, mask=masks.causal(1), backend="tiled", **options)
        assert_close(out.double(), want, rtol=2e-2, atol=0.5)


def test_the_output_may_be_written_to() -> None:
    inputs = drawn(2, L, S)
    out = attention(*inputs, mask=masks.padding([3, 2]), backend="tiled")
    want = attention(*inputs, mask=masks.padding([3, 2]), backend="plain")
    with torch.no_grad():
        assert out.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in inputs]
        out += 1
    assert_close(out, want + 1, rtol=1e-11, atol=1e-12)


def test_one_sequence_is_no_view_of_the_input() -> None:
    """One sample, whose only key is its value: still a tensor of its own."""
    x = torch.randn(1, H, 1, K)
    out = attention(x, x, x, mask=masks.padding([1]), backend="tiled")
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
        assert ("tiled" in ran) == (not need_weights and not options)
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
    assert "tiled" not in ran


# --- a tensor that says just "causal" ---------------------------------------------------------------------------------

SIZES = [(5, 5), (5, 7), (7, 5), (2, 4), (2, 2), (3, 2), (2, 1)]
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


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("backend", [None, "tiled", "sdpa", "plain"])
def test_the_mask_of_a_single_query_stays(backend: str | None) -> None:
    """It says the same of a key for all queries: as padding, whose keys are silenced, and no flag is."""
    mask = masks.causal() & masks.dense(tril(1, 4))
    assert with_flag(mask, square(1, 4)) is mask
    query, key, value = drawn(2, 1, 4)
    dirty = [tensor.detach().index_fill(2, ints(1, 2, 3), math.nan).requires_grad_() for tensor in (key, value)]
    out = attention(query, *dirty, mask=mask, backend=backend)
    assert_close(out, value[:, :, :1].repeat_interleave(H // G, dim=1), rtol=1e-12, atol=1e-12)
    for grad in torch.autograd.grad(out.sum(), [query, *dirty]):
        assert grad.isfinite().all()


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
@pytest.mark.parametrize("size", some(3, SIZES), ids=str)
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
        assert keep.all() or ran[0] == "tiled", name  # a flag beside lengths
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
