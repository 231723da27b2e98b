"""The same arguments, in the same order, with the same defaults, and the attributes that other code reads."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from tests.parity.pair import LAYOUTS, causal_mask, fill, pair, same_pair, twin
from torch import nn

from headwise import MultiheadAttention

B, L, S, D, H = 3, 5, 7, 22, 2

layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())


def arguments(function):
    return [
        (p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY
    ]


def test_constructor():
    """All that torch takes, by position too; ours alone comes by keyword only."""
    assert arguments(MultiheadAttention.__init__) == arguments(nn.MultiheadAttention.__init__)


def test_forward():
    """`average_attn_weights` is None with us, which means what the constructor was told: True."""
    ours, theirs = arguments(MultiheadAttention.forward), arguments(nn.MultiheadAttention.forward)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert dict(theirs) | {"average_attn_weights": None} == dict(ours)
    own = inspect.signature(MultiheadAttention.__init__).parameters["average_attn_weights"]
    assert own.default is True


@layouts
def test_by_position(fused_qkv):
    """Every argument of the constructor and of the call without its name."""
    given = (D, H, 0.0, False, True, True, 13, 17, True, "cpu", torch.float64)
    theirs = fill(nn.MultiheadAttention(*given))
    ours = MultiheadAttention(*given, fused_qkv=fused_qkv)
    ours.load_state_dict(theirs.state_dict())
    query, key, value = (torch.randn(B, n, width).double() for n, width in ((L, D), (S, 13), (S, 17)))
    padding = torch.arange(S) >= torch.tensor([7, 4, 2])[:, None]
    for need_weights in (True, False):
        call = (query, key, value, padding, need_weights, causal_mask(L, S), False, False)
        same_pair(ours(*call), theirs(*call), 1e-11)


@layouts
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"bias": False}, {"kdim": 13}, {"kdim": 13, "vdim": 17, "add_bias_kv": True}, {"batch_first": True}],
    ids=str,
)
def test_attributes(kwargs, fused_qkv):
    """Same names, same values, None where torch has None; `_qkv_same_embed_dim` differs (row 71)."""
    theirs = fill(nn.MultiheadAttention(D, H, 0.25, **kwargs))
    ours = twin(theirs, fused_qkv=fused_qkv)
    for name in (
        "embed_dim",
        "kdim",
        "vdim",
        "num_heads",
        "head_dim",
        "dropout",
        "batch_first",
        "add_zero_attn",
        "training",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    weights = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
    for name in weights:
        mine, its = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (its is None), name
        if its is not None:
            assert torch.equal(mine, its), name
            assert (mine.dtype, mine.device, mine.requires_grad) == (its.dtype, its.device, its.requires_grad)
    assert torch.equal(ours.out_proj.weight, theirs.out_proj.weight)
    assert isinstance(ours.out_proj, nn.Linear)
    assert not isinstance(ours, nn.MultiheadAttention)


@layouts
def test_dropout_set_afterwards(fused_qkv):
    """Schedules write `module.dropout`, and the next call follows."""
    theirs, ours = pair(D, H, dropout=0.5, batch_first=True, fused_qkv=fused_qkv)
    x = torch.randn(B, L, D)
    assert not torch.allclose(ours(x, x, x)[0], ours(x, x, x)[0])
    theirs.dropout = ours.dropout = 0.0
    same_pair(ours(x, x, x), theirs(x, x, x))
    theirs.dropout = ours.dropout = 1.0  # everything is dropped: the bias remains
    for need_weights in (True, False):
        want = theirs(x, x, x, need_weights=need_weights)[0]
        assert torch.equal(want, theirs.out_proj.bias.expand(B, L, D))
        assert torch.equal(ours(x, x, x, need_weights=need_weights)[0], want)


@layouts
def test_sizes_from_numpy(fused_qkv):
    """Configurations hold numpy integers now and then."""
    x = torch.randn(L, B, D)
    for cls, ours_only in ((nn.MultiheadAttention, {}), (MultiheadAttention, {"fused_qkv": fused_qkv})):
        module = cls(np.int64(D), np.int64(H), kdim=np.int32(D), **ours_only)
        assert module(x, x, x)[0].shape == (L, B, D)
        assert module(x, x, x, need_weights=False)[0].shape == (L, B, D)


@layouts
@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)], ids=["batch", "queries", "keys", "all"])
def test_empty(sizes, fused_qkv):
    """A batch, a query and a memory of nothing give shapes, and torch's numbers."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    batch, length, keys = sizes
    query, memory = torch.randn(batch, length, D), torch.randn(batch, keys, D)
    for need_weights in (True, False):
        call = {"need_weights": need_weights, "average_attn_weights": False}
        want = theirs(query, memory, memory, **call)
        got = ours(query, memory, memory, **call)
        assert torch.equal(got[0], want[0]) if 0 in (batch, length, keys) else False
        assert (got[1] is None) == (want[1] is None)
        assert want[1] is None or got[1].shape == want[1].shape


@layouts
def test_any_memory(fused_qkv):
    """Expanded and transposed inputs and masks, a Parameter as input, and inference mode."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    block = (torch.rand(L, L) < 0.4).fill_diagonal_(False)
    inputs = {
        "expanded": torch.randn(1, L, D).expand(B, L, D),
        "permuted": torch.randn(D, L, B).permute(2, 1, 0),
        "strided": torch.randn(B, 2 * L, 3 * D)[:, ::2, ::3],
        "parameter": nn.Parameter(torch.randn(B, L, D)),
    }
    for x in inputs.values():
        for mask in (None, block, block.t(), block[:1, :1].expand(L, L), torch.randn(L, 2 * L)[:, ::2]):
            for need_weights in (True, False):
                call = {"attn_mask": mask, "need_weights": need_weights}
                same_pair(ours(x, x, x, **call), theirs(x, x, x, **call))
                with torch.inference_mode():
                    same_pair(ours(x, x, x, **call), theirs(x, x, x, **call))
