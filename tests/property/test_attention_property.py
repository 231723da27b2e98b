"""Drawn calls of attention on every path, against the float64 reference; and of the module, against itself.

What a mask means is taken from `lower`, which test_masks_property.py holds to a naive evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headwise import MultiheadAttention, attention, masks
from headwise.core import functional, reference
from headwise.core.algebra import lower
from headwise.core.lowering import Band, Size
from headwise.core.tiling import sequences
from headwise.core.traits import visible_keys

few, many = settings(max_examples=30), settings(max_examples=1500)
CPU = torch.device("cpu")
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@contextmanager
def tiles_always() -> Iterator[None]:
    """Small calls take the paths of large ones, and tiles are as small as they can be."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TURN", "TURN_GRAD", "_WORTH_READING", "_WORTH_AN_ENTRY", "_WORTH_A_TILE"):
            patch.setattr(functional, name, 0)
        yield


class Call(NamedTuple):
    """A call, its leaves made anew by `leaves`."""

    size: Size
    groups: int
    widths: tuple[int, int]
    dtype: torch.dtype
    seed: int
    mask: masks.Mask | None
    learned: tuple[Tensor, ...]
    sink: Tensor | None
    options: dict[str, Any]

    def leaves(self) -> list[Tensor]:
        B, H, L, S, _ = self.size
        generator, (K, V) = torch.Generator().manual_seed(self.seed), self.widths
        shapes = ((B, H, L, K), (B, self.groups, S, K), (B, self.groups, S, V))
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        return [tensor.requires_grad_() for tensor in made]

    def cotangent(self) -> Tensor:
        B, H, L, _, _ = self.size
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(B, H, L, self.widths[1], generator=generator, dtype=torch.float64).to(self.dtype)

    def result(self, leaves: list[Tensor], backend: str | None) -> list[Tensor]:
        """The output and all gradients, those of the bias and the sink last, in float64."""
        out = attention(*leaves, mask=self.mask, sink=self.sink, backend=backend, **self.options)
        extra = [*self.learned, *([] if self.sink is None else [self.sink])]
        grads = torch.autograd.grad(out, [*leaves, *extra], self.cotangent(), allow_unused=True, materialize_grads=True)
        return [part.detach().double() for part in (out, *grads)]

    def wanted(self, leaves: list[Tensor]) -> list[Tensor]:
        lowered = lower(self.mask, self.size, self.dtype)
        given = [leaf.detach().double().requires_grad_() for leaf in leaves]
        sink = None if self.sink is None else self.sink.detach().double().requires_grad_()
        told = {"keep": lowered.whole_keep(self.size), "bias": lowered.bias, "sink": sink} | self.options
        out, _ = reference.attention(*given, **told)
        extra = [*self.learned, *([] if sink is None else [sink])]
        cotangent = self.cotangent().double()
        grads = torch.autograd.grad(out, [*given, *extra], cotangent, allow_unused=True, materialize_grads=True)
        return [part.detach().double() for part in (out, *grads)]

    def seen(self) -> Tensor:
        """(B, H, L, S) bool."""
        lowered, seen = lower(self.mask, self.size), torch.ones(self.size[:4], dtype=torch.bool)
        for part in (lowered.whole_keep(self.size), None if lowered.bias is None else lowered.bias != -math.inf):
            seen = seen if part is None else seen & part
        return seen


Draw = Callable[[st.SearchStrategy[Any]], Any]


def _lengths(draw: Draw, size: Size, low: int, high: int, *shapes: tuple[int, ...]) -> Tensor:
    shape = draw(st.sampled_from(shapes))
    count = math.prod(shape)
    values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    dtypes = [dtype for dtype in INTEGERS if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max]
    return torch.tensor(values, dtype=torch.int64).to(draw(st.sampled_from(dtypes))).view(shape)


def _bools(draw: Draw, *shape: int) -> Tensor:
    """Mostly True, mostly False or mixed: drawn one by one, a long tensor would be all that is drawn."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))


def _ids(draw: Draw, size: Size, length: int) -> Tensor:
    shape = draw(st.sampled_from([(length,), (1, length), (size.batch, length)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ids = torch.randint(-1, draw(st.integers(0, 4)), shape, generator=generator)
    return draw(st.sampled_from([lambda t: t, lambda t: t.sort().values, lambda t: t.sort(descending=True).values]))(
        ids
    )


def _stretch(draw: Draw, size: Size) -> Tensor:
    """Padding on both sides, and samples that are all padding."""
    starts, ends = (_lengths(draw, size, 0, size.keys + 1, (size.batch,)).long() for _ in range(2))
    place = torch.arange(size.keys)
    return (place >= starts[:, None]) & (place < ends[:, None])


def _dense(draw: Draw, size: Size) -> Tensor:
    B, H, L, S, _ = size
    return _bools(
        draw,
        *draw(
            st.sampled_from([(L, S), (B, L, S), (B, 1, 1, S), (1, H, 1, S), (B, H, 1, 1), (1, 1, L, 1), (B, H, L, S)])
        ),
    )


def _torch_mask(draw: Draw, size: Size, *, floating: bool) -> masks.Mask:
    B, H, L, S, _ = size
    shape = draw(st.sampled_from([None, (L, S), (B * H, L, S), (B, L, S), (1, L, S), (B, H, L, S), (1, H, L, 1)]))
    if shape is not None and len(shape) == 3 and shape[0] == 0:
        shape = (L, S)  # B * H = B = 0 says nothing
    blocks = [None if shape is None else ~_bools(draw, *shape), ~_stretch(draw, size) if draw(st.booleans()) else None]
    if floating:
        low = draw(st.sampled_from([-math.inf, -1.5]))
        blocks = [None if block is None else torch.zeros(block.shape).masked_fill(block, low) for block in blocks]
    found = masks.from_torch(*blocks, is_causal=draw(st.booleans()))
    return masks.window(None, None) if found is None else found


def _packed(draw: Draw, size: Size) -> masks.Mask:
    """Sequences that fill the row."""
    cuts = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in (size.queries, size.keys)]
    queries, keys = (
        [b - a for a, b in zip([0, *cut], [*cut, n], strict=True)] for cut, n in zip(cuts, size[2:4], strict=True)
    )
    return sequences(queries, keys, draw(st.sampled_from([Band(), Band(None, 0), Band(2, 1)])))


def _side(draw: Draw) -> int | None:
    return draw(st.one_of(st.none(), st.integers(0, 9), st.sampled_from([60, 100, 2**62])))


LEAVES: dict[str, Callable[[Draw, Size], masks.Mask]] = {
    "causal": lambda draw, size: masks.causal(
        draw(st.one_of(st.integers(-9, 9), st.sampled_from([70, 2**62, -(2**62)])))
    ),
    "causal()": lambda draw, size: masks.causal(),
    "causal per sample": lambda draw, size: masks.causal(
        _lengths(draw, size, *draw(st.sampled_from([(-9, 9), (0, 120)])), (), (1,), (size.batch,))
    ),
    "window": lambda draw, size: masks.window(_side(draw), _side(draw)),
    "padding": lambda draw, size: masks.padding(_lengths(draw, size, 0, size.keys + 1, (1,), (size.batch,))),
    "stretch": lambda draw, size: masks.padding(_stretch(draw, size)),
    "holes": lambda draw, size: masks.padding(_bools(draw, size.batch, size.keys)),
    "documents": lambda draw, size: masks.documents(_ids(draw, size, size.queries), _ids(draw, size, size.keys)),
    "sequences": _packed,
    "prefix": lambda draw, size: masks.prefix(draw(st.integers(-1, size.keys + 1))),
    "prefix per sample": lambda draw, size: masks.prefix(
        _lengths(draw, size, 0, size.keys + 1, (), (1,), (size.batch,))
    ),
    "prefix language model": lambda draw, size: (
        masks.causal(draw(st.integers(-70, 9))) | masks.prefix(draw(st.integers(0, size.keys + 1)))
    ),
    "dense": lambda draw, size: masks.dense(_dense(draw, size)),
    "torch": lambda draw, size: _torch_mask(draw, size, floating=False),
}


def _leaf(draw: Draw, size: Size) -> masks.Mask:
    return LEAVES[draw(st.sampled_from(list(LEAVES)))](draw, size)


def _expression(draw: Draw, size: Size) -> masks.Mask:
    """What holds at once: leaves, and what is composed of them otherwise."""
    found = None
    for _ in range(draw(st.integers(1, 3))):
        term = _leaf(draw, size)
        kind = draw(st.sampled_from(["", "", "", "not", "or"]))
        if kind == "not":
            term = ~term
        elif kind == "or":
            term = term | (_leaf(draw, size) & ~_leaf(draw, size))
        found = term if found is None else found & term
    return found


def _scores(draw: Draw, size: Size, dtype: torch.dtype) -> Tensor:
    B, H, L, S, _ = size
    shape = draw(st.sampled_from([(L, S), (B, L, S), (B, 1, 1, S), (1, H, L, S), (1, H, 1, 1), (B, H, L, S)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scores = torch.randn(shape, generator=generator)
    hidden = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))
    return scores.masked_fill(hidden, -math.inf).to(draw(st.sampled_from([dtype, torch.float32])))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    groups = draw(st.integers(1, 2))
    long = draw(st.booleans())  # so that there are several tiles
    lengths = [draw(st.one_of(st.integers(0, 9), st.sampled_from([70, 131] if long else [1, 2]))) for _ in range(2)]
    size = Size(draw(st.integers(0, 3)), groups * draw(st.integers(1, 2)), *lengths, CPU)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    mask, learned, sink = _expression(draw, size) if draw(st.integers(0, 9)) else None, (), None
    if draw(st.integers(0, 3)) == 0:
        mask = (masks.window(None, None) if mask is None else mask) & _torch_mask(draw, size, floating=True)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        scores = _scores(draw, size, dtype).requires_grad_(draw(st.booleans()))
        mask = masks.bias(scores) if mask is None else mask & masks.bias(scores)
        learned += (scores,) if scores.requires_grad else ()
    if draw(st.integers(0, 3)) == 0:
        logits = [-1.0, 0.5, 3.0, 200.0, *([-math.inf] if size.keys else [])]  # else a softmax of -inf alone
        values = st.lists(st.sampled_from(logits), min_size=size.heads, max_size=size.heads)
        sink = torch.tensor(draw(values), dtype=draw(st.sampled_from([dtype, torch.float32]))).requires_grad_()
    options = {
        "scale": draw(st.sampled_from([None, None, None, 0.3, -1.7, 0.0])),
        "softcap": draw(st.sampled_from([None, None, None, 0.5, 30.0])),
    }
    widths = (draw(st.integers(1, 5)), draw(st.integers(0, 6)))
    return Call(size, groups, widths, dtype, draw(st.integers(0, 9)), mask, learned, sink, options)


def near(call: Call, got: list[Tensor], want: list[Tensor], path: str) -> None:
    eps = torch.finfo(call.dtype).eps
    extra = {f"bias {index}": scores for index, scores in enumerate(call.learned)} | {"sink": call.sink}
    names = ("output", "query", "key", "value", *extra)
    for name, one, other in zip(names, got, want, strict=False):
        own = max(eps, torch.finfo(extra[name].dtype).eps if name in extra else 0)
        size = max(1.0, other.abs().max().item() if other.numel() else 0.0)
        assert_close(one, other, rtol=64 * own, atol=64 * own * size, msg=lambda m, n=name: f"{n} on {path}: {m}")


def paths(call: Call, leaves: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """What comes out by each way that takes the call."""
    yield "what is chosen", call.result(leaves, None)
    with tiles_always():
        yield "what is chosen for large calls", call.result(leaves, None)
        for backend in ("tiled", "sdpa", "plain"):
            refused = {
                "tiled": bool(call.learned),
                "sdpa": call.sink is not None or call.options["softcap"] is not None,
            }
            if refused.get(backend):
                with pytest.raises(ValueError, match="backend must take this call"):
                    call.result(leaves, backend)
            else:
                yield backend, call.result(leaves, backend)


def check(call: Call) -> None:
    leaves = call.leaves()
    want, seen = call.wanted(leaves), call.seen()
    keys = visible_keys(call.mask, call.size)
    B, H, _, S, _ = call.size
    keys = torch.ones(B, H, 1, S, dtype=torch.bool) if keys is None else keys.expand(B, H, 1, S)
    hidden = ~keys.reshape(B, call.groups, H // call.groups, S).any(dim=2)[..., None]  # (B, G, S, 1)
    poison = [leaf if index == 0 else leaf.masked_fill(hidden, math.nan) for index, leaf in enumerate(leaves)]
    poisoned = [leaf.detach().requires_grad_() for leaf in poison]
    dead = ~seen.any(dim=-1)
    for ours in (leaves, poisoned):
        for path, got in paths(call, ours):
            near(call, got, want, path + (" with NaN" if ours is poisoned else ""))
            assert not got[0][dead].any(), path
            assert not got[1][dead].any(), path
            for grad in got[2:4]:
                assert not grad.masked_select(hidden).any(), path


@few
@given(calls())
def test_every_path_is_the_reference(call: Call) -> None:
    """Values and gradients; rows that see nothing are exactly 0, padded keys do nothing, even if they are NaN."""
    check(call)


@pytest.mark.slow
@many
@given(calls())
def test_every_path_is_the_reference_many_times(call: Call) -> None:
    check(call)


# --- the module -------------------------------------------------------------------------------------------------------

D = 6


class Layer(NamedTuple):
    """A module, its input and what is padding."""

    options: dict[str, Any]
    keep_BL: Tensor
    causal: bool
    train: bool
    average: bool

    def run(self, x_BLD: Tensor, keep_BL: Tensor, *, weights: bool = False, **more: Any) -> list[Tensor]:
        """Output, the gradients of the input and of all parameters, and weights where they are asked for."""
        torch.manual_seed(1)
        module = MultiheadAttention(D, 2, dtype=torch.float64, **self.options).train(self.train)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)  # torch's biases are 0 at first
        given = x_BLD.detach().requires_grad_()
        x = given if self.options["batch_first"] else given.transpose(0, 1)
        out, found = module(
            x, x, x, key_padding_mask=~keep_BL, need_weights=weights, average_attn_weights=self.average,
            is_causal=self.causal, **more,
        )  # fmt: skip
        out = out if self.options["batch_first"] else out.transpose(0, 1)
        grads = torch.autograd.grad(out.sin().sum(), [given, *module.parameters()])
        return [part.detach() for part in (out, *grads, *([found] if weights else []))]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    B, L = draw(st.integers(1, 4)), draw(st.one_of(st.integers(1, 9), st.just(70)))
    size = Size(B, 2, L, L, CPU)
    kind = draw(st.sampled_from(["right", "left", "both", "holes"]))
    ahead = torch.arange(L) - _lengths(draw, size, 0, L, (B,)).long()[:, None]
    keep = (
        ahead < 0 if kind == "right" else ahead >= 0 if kind == "left" else
        _stretch(draw, size) if kind == "both" else _bools(draw, B, L)
    )  # fmt: skip
    options = {
        name: draw(st.booleans()) for name in ("batch_first", "fused_qkv", "add_bias_kv", "add_zero_attn", "bias")
    }
    return Layer(options, keep, *(draw(st.booleans()) for _ in range(3)))


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=False):
        assert_close(one, other, rtol=1e-9, atol=1e-10)


def check_module(layer: Layer, random: Any) -> None:
    B, L = layer.keep_BL.shape
    x = torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    *want, weights = layer.run(x, layer.keep_BL, weights=True)
    assert weights.shape == ((B, L, weights.shape[-1]) if layer.average else (B, 2, L, weights.shape[-1]))
    same(layer.run(x, layer.keep_BL), want)
    with tiles_always():
        same(layer.run(x, layer.keep_BL), want)
        same(layer.run(x, layer.keep_BL, mask=masks.window(None, None)), want)
        order = list(range(B))
        random.shuffle(order)
        moved = layer.run(x[order], layer.keep_BL[order])
    for one, other in zip(moved[:2], want[:2], strict=True):
        assert_close(one, other[order], rtol=1e-9, atol=1e-10)
    same(moved[2:], want[2:])
    if not layer.causal:
        torch.manual_seed(1)
        module = MultiheadAttention(D, 2, dtype=torch.float64, **layer.options | {"batch_first": True})
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
            for sample, keep, row in zip(x, layer.keep_BL, want[0], strict=True):
                real = sample[keep][None]  # without its padding
                alone, _ = module(sample[None], real, real, need_weights=False)
                assert_close(alone[0], row, rtol=1e-9, atol=1e-10)


@settings(max_examples=12)
@given(layers(), st.randoms(use_true_random=False))
def test_the_module_is_the_same_on_every_path(layer: Layer, random: Any) -> None:
    """Padded or not, with weights or not, sample by sample or together, in any order."""
    check_module(layer, random)


@pytest.mark.slow
@settings(max_examples=200)
@given(layers(), st.randoms(use_true_random=False))
def test_the_module_is_the_same_on_every_path_many_times(layer: Layer, random: Any) -> None:
    check_module(layer, random)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from([masks.causal(), masks.window(3, 2), masks.window(None, None)]),
)
def test_the_order_of_documents_does_not_matter(lengths: list[int], random: Any, within: masks.Mask) -> None:
    """Moved in their row, documents take their outputs and gradients along; alone, each gives the same."""
    total, order = sum(lengths), list(range(len(lengths)))
    random.shuffle(order)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    to = torch.cat([torch.nonzero(ids == name).flatten() for name in order])
    inputs = [torch.randn(1, 2, total, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]
    moved = [tensor.detach()[:, :, to].requires_grad_() for tensor in inputs]
    with tiles_always():
        found = []
        for given_, mask in ((inputs, masks.documents(ids)), (moved, masks.documents(ids[to]))):
            out = attention(*given_, mask=mask & within)
            found.append([out, *torch.autograd.grad(out.sin().sum(), given_)])
        for one, other in zip(*found, strict=True):
            assert_close(one[:, :, to], other, rtol=1e-10, atol=1e-11)
        first = slice(0, lengths[0])
        alone = attention(*(tensor[:, :, first] for tensor in inputs), mask=within)
    assert_close(alone, found[0][0][:, :, first], rtol=1e-10, atol=1e-11)
