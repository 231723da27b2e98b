"""Wrong calls: what torch refuses we refuse, at once, and say the argument, the rule, what came and all sizes.

An id that begins with `ours-` is a mistake that torch lets through, to a wrong number or to an error later.
"""

from __future__ import annotations

import re

import pytest
import torch
from tests.parity.pair import LAYOUTS
from torch import nn

from headwise import MultiheadAttention

B, L, S, D, H = 5, 7, 11, 6, 2
KDIM, VDIM = 13, 17
WRONG = 8


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def hides(*shape, dtype=torch.bool):
    return torch.zeros(shape, dtype=dtype)


CONSTRUCTORS = {
    "heads-do-not-divide": ((100, 3), {}, ["embed_dim", "multiple of num_heads 3", "99 or 102", "got 100"]),
    "more-heads-than-width": ((2, 3), {}, ["embed_dim", "multiple of num_heads 3", "got 2"]),
    "embed_dim-0": ((0, 1), {}, ["embed_dim", "at least 1", "got 0"]),
    "embed_dim-negative": ((-6, 2), {}, ["embed_dim", "at least 1", "got -6"]),
    "embed_dim-float": ((6.0, 2), {}, ["embed_dim", "int", "got 6.0"]),
    "embed_dim-None": ((None, 2), {}, ["embed_dim", "int", "got None"]),
    "embed_dim-string": (("6", 2), {}, ["embed_dim", "int", "got '6'"]),
    "num_heads-0": ((6, 0), {}, ["num_heads", "at least 1", "got 0"]),
    "num_heads-negative": ((6, -2), {}, ["num_heads", "at least 1", "got -2"]),
    "kdim-negative": ((6, 2), {"kdim": -1}, ["kdim", "at least 1", "got -1"]),
    "kdim-float": ((6, 2), {"kdim": 4.0}, ["kdim", "int", "got 4.0"]),
    "vdim-negative": ((6, 2), {"vdim": -3}, ["vdim", "at least 1", "got -3"]),
    "vdim-float": ((6, 2), {"vdim": 4.0}, ["vdim", "int", "got 4.0"]),
    "ours-num_heads-float": ((6, 2.0), {}, ["num_heads", "int", "got 2.0"]),
    "ours-num_heads-bool": ((6, True), {}, ["num_heads", "int", "got True"]),
    "ours-dropout-above-1": ((6, 2), {"dropout": 1.5}, ["dropout", "[0, 1]", "got 1.5"]),
    "ours-dropout-negative": ((6, 2), {"dropout": -0.1}, ["dropout", "[0, 1]", "got -0.1"]),
    "ours-dropout-nan": ((6, 2), {"dropout": float("nan")}, ["dropout", "[0, 1]", "got nan"]),
    "ours-dropout-string": ((6, 2), {"dropout": "a"}, ["dropout", "[0, 1]", "a"]),
}


@pytest.mark.parametrize(("args", "kwargs", "parts"), CONSTRUCTORS.values(), ids=CONSTRUCTORS.keys())
@pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_constructor(request, args, kwargs, parts, fused_qkv):
    if "ours-" in request.node.name:
        nn.MultiheadAttention(*args, **kwargs)
    else:
        with pytest.raises((ValueError, AssertionError, TypeError, RuntimeError)):
            nn.MultiheadAttention(*args, **kwargs)
    with pytest.raises(ValueError, match=r"^MultiheadAttention: ") as caught:
        MultiheadAttention(*args, fused_qkv=fused_qkv, **kwargs)
    said_in_order(caught, parts)


@pytest.mark.parametrize("name", ["kdim", "vdim"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_ours_widths_of_0(name):
    """torch builds the module, which then refuses every call."""
    theirs = nn.MultiheadAttention(6, 2, **{name: 0})
    with pytest.raises(AssertionError):
        theirs(ones(7, 5, 6), ones(7, 5, 6), ones(7, 5, 6))
    with pytest.raises(ValueError, match=f"^MultiheadAttention: {name} must be an int of at least 1; got 0$"):
        MultiheadAttention(6, 2, **{name: 0})


def test_keywords_and_names():
    """What Python itself refuses, it refuses for both; what comes after torch's eleven is by keyword only."""
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises(TypeError, match="nonsense"):
            cls(6, 2, nonsense=1)
        with pytest.raises(TypeError, match="num_heads"):
            cls(6)
        with pytest.raises(TypeError):
            cls(6, 2, 0.0, True, False, False, None, None, True, None, None, True)
        module, x = cls(6, 2), ones(7, 5, 6)
        with pytest.raises(TypeError, match="nonsense"):
            module(x, x, x, nonsense=1)
        with pytest.raises(TypeError, match="value"):
            module(x, x)
        with pytest.raises(TypeError):
            module(x, x, x, None, True, None, True, False, None)


def test_ours_dropout_set_afterwards():
    """torch takes any number and fails in the next training step, or draws no dropout at all."""
    nn.MultiheadAttention(6, 2).dropout = 1.5
    module = MultiheadAttention(6, 2, dropout=0.25)
    with pytest.raises(ValueError, match=r"^MultiheadAttention: dropout must be in \[0, 1\]; got 1.5"):
        module.dropout = 1.5
    assert module.dropout == 0.25


# name: (what replaces the right arguments, the argument at fault, what the message says of rule and value, in order)
BATCHED = {
    "query-width": ({"query": ones(B, L, WRONG)}, "query", ["6", "got 8"]),
    "key-width": ({"key": ones(B, S, WRONG)}, "key", ["13", "got 8"]),
    "value-width": ({"value": ones(B, S, WRONG)}, "value", ["17", "got 8"]),
    "key-of-the-query's-width": ({"key": ones(B, S, D)}, "key", ["13", "got 6"]),
    "value-of-the-query's-width": ({"value": ones(B, S, D)}, "value", ["17", "got 6"]),
    "value-length": ({"value": ones(B, S + 1, VDIM)}, "value", ["key's", "12"]),
    "value-length-1": ({"value": ones(B, 1, VDIM)}, "value", ["key's", "1"]),
    "value-batch": ({"value": ones(B + 1, S, VDIM)}, "value", ["key's", "6"]),
    "key-batch": ({"key": ones(B + 1, S, KDIM), "value": ones(B + 1, S, VDIM)}, "key", ["batch size 5", "got 6"]),
    "key-batch-1": ({"key": ones(1, S, KDIM), "value": ones(1, S, VDIM)}, "key", ["batch size 5", "got 1"]),
    "all-4-D": (
        {"query": ones(1, B, L, D), "key": ones(1, B, S, KDIM), "value": ones(1, B, S, VDIM)},
        "query", ["3-D", "2-D", "(4, 4, 4)"],
    ),
    "all-1-D": ({"query": ones(D), "key": ones(KDIM), "value": ones(VDIM)}, "query", ["3-D", "2-D", "(1, 1, 1)"]),
    "all-0-D": ({"query": ones(), "key": ones(), "value": ones()}, "query", ["3-D", "2-D", "(0, 0, 0)"]),
    "query-2-D": ({"query": ones(L, D)}, "query", ["3-D", "2-D", "(2, 3, 3)"]),
    "query-4-D": ({"query": ones(1, B, L, D)}, "query", ["3-D", "2-D", "(4, 3, 3)"]),
    "key-2-D": ({"key": ones(S, KDIM)}, "query", ["3-D", "2-D", "(3, 2, 3)"]),
    "value-2-D": ({"value": ones(S, VDIM)}, "query", ["3-D", "2-D", "(3, 3, 2)"]),
    "key-and-value-2-D": ({"key": ones(S, KDIM), "value": ones(S, VDIM)}, "query", ["3-D", "2-D", "(3, 2, 2)"]),
    "query-float64": ({"query": ones(B, L, D).double()}, "query", ["dtype", "float32", "got torch.float64"]),
    "key-float64": ({"key": ones(B, S, KDIM).double()}, "key", ["dtype", "float32", "got torch.float64"]),
    "value-bfloat16": ({"value": ones(B, S, VDIM).bfloat16()}, "value", ["dtype", "float32", "got torch.bfloat16"]),
    "query-int64": ({"query": ones(B, L, D).long()}, "query", ["dtype", "float32", "got torch.int64"]),
    "key-complex": ({"key": ones(B, S, KDIM).cfloat()}, "key", ["dtype", "float32", "got torch.complex64"]),
    "query-None": ({"query": None}, "query", ["tensor", "NoneType"]),
    "key-list": ({"key": [[1.0]]}, "key", ["tensor", "list"]),
    "value-on-meta": ({"value": ones(B, S, VDIM).to("meta")}, "value", ["device", "cpu", "got meta"]),
    "attn_mask-uint8": ({"attn_mask": hides(L, S, dtype=torch.uint8)}, "attn_mask", ["bool", "float", "torch.uint8"]),
    "attn_mask-int64": ({"attn_mask": hides(L, S, dtype=torch.int64)}, "attn_mask", ["bool", "float", "torch.int64"]),
    "attn_mask-complex": (
        {"attn_mask": hides(L, S, dtype=torch.complex64)}, "attn_mask", ["bool", "float", "torch.complex64"],
    ),
    "attn_mask-string": ({"attn_mask": "causal"}, "attn_mask", ["bool", "float", ""]),
    "attn_mask-0-D": ({"attn_mask": hides()}, "attn_mask", ["(L, S)", "()"]),
    "attn_mask-1-D": ({"attn_mask": hides(S)}, "attn_mask", ["(L, S)", "(11,)"]),
    "attn_mask-5-D": ({"attn_mask": hides(1, 1, 1, L, S)}, "attn_mask", ["(L, S)", "(1, 1, 1, 7, 11)"]),
    "attn_mask-2-D-keys": ({"attn_mask": hides(L, S + 1)}, "attn_mask", ["(L, S)", "(7, 12)"]),
    "attn_mask-2-D-queries": ({"attn_mask": hides(L + 1, S)}, "attn_mask", ["(L, S)", "(8, 11)"]),
    "attn_mask-2-D-transposed": ({"attn_mask": hides(S, L)}, "attn_mask", ["(L, S)", "(11, 7)"]),
    "attn_mask-2-D-one-row": ({"attn_mask": hides(1, S)}, "attn_mask", ["(L, S)", "(1, 11)"]),
    "attn_mask-2-D-one-column": ({"attn_mask": hides(L, 1)}, "attn_mask", ["(L, S)", "(7, 1)"]),
    "attn_mask-2-D-of-the-batch": ({"attn_mask": hides(B, S)}, "attn_mask", ["(L, S)", "(5, 11)"]),
    "attn_mask-3-D-batch": ({"attn_mask": hides(B * H + 1, L, S)}, "attn_mask", ["(B*H, L, S)", "(11, 7, 11)"]),
    "attn_mask-3-D-heads-only": ({"attn_mask": hides(H, L, S)}, "attn_mask", ["(B*H, L, S)", "(2, 7, 11)"]),
    "attn_mask-3-D-transposed": ({"attn_mask": hides(B * H, S, L)}, "attn_mask", ["(B*H, L, S)", "(10, 11, 7)"]),
    "attn_mask-3-D-one-column": ({"attn_mask": hides(B * H, L, 1)}, "attn_mask", ["(B*H, L, S)", "(10, 7, 1)"]),
    "attn_mask-4-D-heads-first": ({"attn_mask": hides(H, B, L, S)}, "attn_mask", ["(B, H, L, S)", "(2, 5, 7, 11)"]),
    "attn_mask-float-2-D-keys": ({"attn_mask": ones(L, S + 1)}, "attn_mask", ["(L, S)", "(7, 12)"]),
    "attn_mask-float-3-D-batch": ({"attn_mask": ones(B * H + 1, L, S)}, "attn_mask", ["(B*H, L, S)", "(11, 7, 11)"]),
    "key_padding_mask-uint8": (
        {"key_padding_mask": hides(B, S, dtype=torch.uint8)}, "key_padding_mask", ["bool", "float", "torch.uint8"],
    ),
    "key_padding_mask-int64": (
        {"key_padding_mask": hides(B, S, dtype=torch.int64)}, "key_padding_mask", ["bool", "float", "torch.int64"],
    ),
    "key_padding_mask-list": ({"key_padding_mask": [[False] * S] * B}, "key_padding_mask", ["bool", "float", "list"]),
    "key_padding_mask-length": ({"key_padding_mask": hides(B, S + 1)}, "key_padding_mask", ["(5, 11)", "(5, 12)"]),
    "key_padding_mask-of-the-query": ({"key_padding_mask": hides(B, L)}, "key_padding_mask", ["(5, 11)", "(5, 7)"]),
    "key_padding_mask-batch": ({"key_padding_mask": hides(B + 1, S)}, "key_padding_mask", ["(5, 11)", "(6, 11)"]),
    "key_padding_mask-one-row": ({"key_padding_mask": hides(1, S)}, "key_padding_mask", ["(5, 11)", "(1, 11)"]),
    "key_padding_mask-one-column": ({"key_padding_mask": hides(B, 1)}, "key_padding_mask", ["(5, 11)", "(5, 1)"]),
    "key_padding_mask-transposed": ({"key_padding_mask": hides(S, B)}, "key_padding_mask", ["(5, 11)", "(11, 5)"]),
    "key_padding_mask-1-D": ({"key_padding_mask": hides(S)}, "key_padding_mask", ["(5, 11)", "(11,)"]),
    "key_padding_mask-3-D": ({"key_padding_mask": hides(B, 1, S)}, "key_padding_mask", ["(5, 11)", "(5, 1, 11)"]),
    "key_padding_mask-float-length": (
        {"key_padding_mask": ones(B, S + 1)}, "key_padding_mask", ["(5, 11)", "(5, 12)"],
    ),
    "good-attn_mask-wrong-key_padding_mask": (
        {"attn_mask": hides(L, S), "key_padding_mask": hides(B, S + 1)}, "key_padding_mask", ["(5, 11)", "(5, 12)"],
    ),
    "wrong-attn_mask-good-key_padding_mask": (
        {"attn_mask": hides(L, S + 1), "key_padding_mask": hides(B, S)}, "attn_mask", ["(L, S)", "(7, 12)"],
    ),
    "ours-attn_mask-on-meta": ({"attn_mask": hides(L, S).to("meta")}, "attn_mask", ["device", "cpu", "got meta"]),
    "ours-key_padding_mask-on-meta": (
        {"key_padding_mask": hides(B, S).to("meta")}, "key_padding_mask", ["device", "cpu", "got meta"],
    ),
}  # fmt: skip

SINGLE = {
    "query-width": ({"query": ones(L, WRONG)}, "query", ["6", "got 8"]),
    "key-width": ({"key": ones(S, WRONG)}, "key", ["13", "got 8"]),
    "value-length": ({"value": ones(S + 1, VDIM)}, "value", ["key's", "12"]),
    "query-float64": ({"query": ones(L, D).double()}, "query", ["dtype", "float32", "got torch.float64"]),
    "key-3-D": ({"key": ones(B, S, KDIM)}, "query", ["3-D", "2-D", "(2, 3, 2)"]),
    "key-and-value-3-D": ({"key": ones(1, S, KDIM), "value": ones(1, S, VDIM)}, "query", ["3-D", "2-D", "(2, 3, 3)"]),
    "attn_mask-1-D": ({"attn_mask": hides(S)}, "attn_mask", ["(L, S)", "(11,)"]),
    "attn_mask-2-D-transposed": ({"attn_mask": hides(S, L)}, "attn_mask", ["(L, S)", "(11, 7)"]),
    "attn_mask-3-D-of-a-batch": ({"attn_mask": hides(B * H, L, S)}, "attn_mask", ["(B*H, L, S)", "(10, 7, 11)"]),
    "attn_mask-uint8": ({"attn_mask": hides(L, S, dtype=torch.uint8)}, "attn_mask", ["bool", "float", "torch.uint8"]),
    "key_padding_mask-2-D": ({"key_padding_mask": hides(1, S)}, "key_padding_mask", ["(11,)", "(1, 11)"]),
    "key_padding_mask-0-D": ({"key_padding_mask": hides()}, "key_padding_mask", ["(11,)", "()"]),
    "key_padding_mask-length": ({"key_padding_mask": hides(S + 1)}, "key_padding_mask", ["(11,)", "(12,)"]),
    "key_padding_mask-of-the-query": ({"key_padding_mask": hides(L)}, "key_padding_mask", ["(11,)", "(7,)"]),
}


def said_in_order(caught, parts):
    text = str(caught.value)
    assert re.search(".*".join(map(re.escape, parts)), text, re.DOTALL), f"{parts} are not in: {text}"


def says_all_sizes(caught, call):
    """The three shapes, or the letters that a mask's shape is told in; nothing where an input is no tensor at all."""
    inputs = {name: call[name] for name in ("query", "key", "value")}
    if not all(isinstance(given, torch.Tensor) for given in inputs.values()):
        return
    batch = B if inputs["query"].dim() == 3 else 1
    if f"with B = {batch}, H = {H}, L = {L}, S = {S}; got" not in str(caught.value):
        said_in_order(caught, [f"{name} {tuple(given.shape)}" for name, given in inputs.items()])


def refused(call, argument, parts, *, batch_first, torch_refuses):
    """Both refuse the call, with and without weights, and in both layouts."""
    for cls, layouts in (
        (nn.MultiheadAttention, [{}]),
        (MultiheadAttention, [{"fused_qkv": f} for f in (False, True)]),
    ):
        for layout in layouts:
            module = cls(D, H, kdim=KDIM, vdim=VDIM, batch_first=batch_first, **layout)
            for need_weights in (True, False):
                if cls is not MultiheadAttention:
                    if torch_refuses:
                        with pytest.raises((AssertionError, RuntimeError, AttributeError, TypeError)):
                            module(**call, need_weights=need_weights)
                    else:
                        module(**call, need_weights=need_weights)
                    continue
                with pytest.raises(ValueError, match=f"^MultiheadAttention: .*{argument}.* must ") as caught:
                    module(**call, need_weights=need_weights)
                said_in_order(caught, parts)
                says_all_sizes(caught, call)


def in_memory_order(batch_first, changes):
    call = {"query": ones(B, L, D), "key": ones(B, S, KDIM), "value": ones(B, S, VDIM)} | changes
    if batch_first:
        return call
    swapped = {
        name: given.transpose(0, 1) if "mask" not in name and hasattr(given, "dim") and given.dim() == 3 else given
        for name, given in call.items()
    }
    return call | swapped


@pytest.mark.parametrize(("changes", "argument", "parts"), BATCHED.values(), ids=BATCHED.keys())
@pytest.mark.parametrize("batch_first", [True, False], ids=["BLD", "LBD"])
def test_batched(request, changes, argument, parts, batch_first):
    theirs = "ours-" not in request.node.name
    call = in_memory_order(batch_first, changes)
    refused(call, argument, parts, batch_first=batch_first, torch_refuses=theirs)


@pytest.mark.parametrize(("changes", "argument", "parts"), SINGLE.values(), ids=SINGLE.keys())
@pytest.mark.parametrize("batch_first", [True, False], ids=["BLD", "LBD"])
def test_single(changes, argument, parts, batch_first):
    call = {"query": ones(L, D), "key": ones(S, KDIM), "value": ones(S, VDIM)} | changes
    refused(call, argument, parts, batch_first=batch_first, torch_refuses=True)


def test_the_right_calls_pass():
    """The tables above change one thing each: unchanged, the calls are fine."""
    for batch_first in (True, False):
        for cls in (nn.MultiheadAttention, MultiheadAttention):
            module = cls(D, H, kdim=KDIM, vdim=VDIM, batch_first=batch_first)
            out, weights = module(
                **in_memory_order(batch_first, {}), attn_mask=hides(L, S), key_padding_mask=hides(B, S)
            )
            assert out.shape == ((B, L, D) if batch_first else (L, B, D))
            assert weights.shape == (B, L, S)
            out, weights = module(ones(L, D), ones(S, KDIM), ones(S, VDIM), attn_mask=hides(H, L, S))
            assert (out.shape, weights.shape) == ((L, D), (L, S))


@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_first_forgotten(batch_first):
    """What fits the other memory order alone says so, and how it was read (p#64888, om-ai-lab/OmDet#19)."""
    query, key, value = ones(B, L, D), ones(B, S, D), ones(B, S, D)
    if batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    read = r"\(B, L, D\)" if batch_first else r"\(L, B, D\)"
    cure = f"batch_first={not batch_first}"
    ours, theirs = (
        MultiheadAttention(D, H, batch_first=batch_first),
        nn.MultiheadAttention(D, H, batch_first=batch_first),
    )
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        theirs(query, key, value)
    with pytest.raises(ValueError, match=f"key must .*{read}.*{cure}"):
        ours(query, key, value)
    padding = hides(B, L)
    with pytest.raises(AssertionError):
        theirs(query, query, query, key_padding_mask=padding)
    with pytest.raises(ValueError, match=f"key_padding_mask must .*{read}.*{cure}"):
        ours(query, query, query, key_padding_mask=padding)
    with pytest.raises(RuntimeError):
        theirs(query, query, query, attn_mask=hides(L, L))
    with pytest.raises(ValueError, match=f"attn_mask must .*{read}.*{cure}"):
        ours(query, query, query, attn_mask=hides(L, L))


@pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_refused_call_changes_nothing(fused_qkv):
    module = MultiheadAttention(D, H, fused_qkv=fused_qkv)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="query must"):
        module(ones(L, B, WRONG), ones(S, B, D), ones(S, B, D))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    module(ones(L, B, D), ones(S, B, D), ones(S, B, D))
