"""Public reports that no longer reproduce on torch 2.13.0, where they concern the layer: torch is right, and so are we.

p# is pytorch/pytorch#. Kept so that neither of the two falls back.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.parity.pair import LAYOUTS, causal_mask, fill, pair, same, same_pair, torch_grads
from torch import nn

from headwise import MultiheadAttention

B, L, S, D, H = 3, 5, 7, 22, 2

layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
each_need_weights = pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])


def batch(length=L, width=D):
    return torch.randn(B, length, width)


@layouts
@each_need_weights
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("padded", [True, False], ids=["padding", "no-padding"])
def test_3d_masks_in_eval(padded, rank, need_weights, fused_qkv):
    """p#97409, p#97605, p#102333, p#63271: (N*H, L, S) with and without padding, in training and evaluation."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    shape = (L, L) if rank == 2 else (B * H, L, L)
    block = torch.rand(shape) < 0.5
    block[..., 1] = False
    call = {"attn_mask": block, "need_weights": need_weights}
    if padded:
        call["key_padding_mask"] = torch.arange(L) >= torch.tensor([5, 2, 3])[:, None]
    want = theirs(x, x, x, **call)
    theirs.eval(), ours.eval()
    same_pair(ours(x, x, x, **call), want)
    with torch.no_grad():
        same_pair(theirs(x, x, x, **call), want)
        same_pair(ours(x, x, x, **call), want)


@layouts
def test_float_masks_add_in_eval(fused_qkv):
    """p#107084: a floating mask is added, not read as yes or no, whichever path runs."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    for call in ({"attn_mask": torch.randn(L, L)}, {"key_padding_mask": -torch.rand(B, L)}):
        want = theirs(x, x, x, **call)
        assert (want[1] > 0).all()
        theirs.eval(), ours.eval()
        with torch.no_grad():
            same_pair(theirs(x, x, x, **call), want)
            same_pair(ours(x, x, x, **call), want)
        theirs.train(), ours.train()


@layouts
@pytest.mark.parametrize("heads", [1, 2, 11])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_no_bias_and_odd_heads_in_eval(bias, heads, fused_qkv):
    """p#116385, p#116546, p#125015, p#143293, p#88669, p#97128: no biases, an odd number of heads."""
    theirs, ours = pair(D, heads, bias=bias, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    padding = torch.arange(L) >= torch.tensor([5, 2, 3])[:, None]
    want = theirs(x, x, x, key_padding_mask=padding)
    theirs.eval(), ours.eval()
    with torch.no_grad():
        same_pair(theirs(x, x, x, key_padding_mask=padding), want)
        same_pair(ours(x, x, x, key_padding_mask=padding), want)


@layouts
def test_weights_of_each_head(fused_qkv):
    """p#34537, p#47583: each head's weights, unbatched too."""
    theirs, ours = pair(D, H, fused_qkv=fused_qkv)
    x, memory = torch.randn(L, B, D), torch.randn(S, B, D)
    want = theirs(x, memory, memory, average_attn_weights=False)
    assert want[1].shape == (B, H, L, S)
    same_pair(ours(x, memory, memory, average_attn_weights=False), want)
    single = theirs(x[:, 0], memory[:, 0], memory[:, 0], average_attn_weights=False)
    assert single[1].shape == (H, L, S)
    same_pair(ours(x[:, 0], memory[:, 0], memory[:, 0], average_attn_weights=False), single)


@layouts
@pytest.mark.parametrize("widths", [{"vdim": 17}, {"kdim": 13}, {"kdim": 13, "vdim": 17}], ids=str)
def test_widths(widths, fused_qkv):
    """p#27623: one of kdim and vdim alone."""
    theirs, ours = pair(D, H, fused_qkv=fused_qkv, **widths)
    inputs = torch.randn(L, B, D), torch.randn(S, B, widths.get("kdim", D)), torch.randn(S, B, widths.get("vdim", D))
    same_pair(ours(*inputs), theirs(*inputs))


@layouts
@each_need_weights
def test_a_long_window(need_weights, fused_qkv):
    """p#127055: no NaN, and no gradient that is not finite, with a long window mask."""
    theirs, ours = pair(4, 2, batch_first=True, fused_qkv=fused_qkv)
    length = 521
    position = torch.arange(length)
    block = ((position[:, None] - position).abs() > 7) | causal_mask(length)
    x = torch.randn(2, length, 4)
    want = theirs(x, x, x, attn_mask=block, need_weights=need_weights)
    got = ours(x, x, x, attn_mask=block, need_weights=need_weights)
    same_pair(got, want)
    for module, result in ((theirs, want), (ours, got)):
        result[0].square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    for name, grad in torch_grads(theirs).items():
        same(torch_grads(ours)[name], grad, 1e-4, name)


@layouts
@each_need_weights
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_autocast_with_a_float_mask(training, need_weights, fused_qkv):
    """p#99012: a float32 mask under CPU autocast to bfloat16."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    theirs.train(training), ours.train(training)
    x = batch()
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    exact = copy.deepcopy(theirs).double()(x.double(), x.double(), x.double(), attn_mask=mask.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = theirs(x, x, x, attn_mask=mask, need_weights=need_weights)
        got = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
    assert got[0].dtype == want[0].dtype == torch.bfloat16
    for mine, its, truth in zip(got, want, exact, strict=True):
        if its is not None:
            assert (mine - truth).abs().max() <= 2 * (its - truth).abs().max() + 2**-7 * truth.abs().max()


@layouts
@pytest.mark.parametrize("change", ["batch", "queries"])
@each_need_weights
def test_rounding_does_not_depend_on_the_rest(need_weights, change, fused_qkv):
    """p#34060, p#33841: other samples and other queries change an output by rounding at most."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x, memory = batch(), batch(S)
    pick = (slice(0, 1), slice(None)) if change == "batch" else (slice(None), slice(0, 2))
    for module in (theirs, ours):
        whole = module(x, memory, memory, need_weights=need_weights)[0][pick]
        part = module(x[pick], memory[pick[0]], memory[pick[0]], need_weights=need_weights)[0]
        same(part, whole, 1e-6)


@layouts
@each_need_weights
@pytest.mark.parametrize("shape", [(L, S), (B * H, L, S)], ids=["2-D", "3-D"])
def test_a_learned_mask_gets_gradients(shape, need_weights, fused_qkv):
    """A relative position bias given as `attn_mask` learns on every path."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x, memory = batch(), batch(S)
    start = torch.randn(shape)
    grads = []
    for module in (theirs, ours):
        for training in (True, False):
            learned = nn.Parameter(start.clone())
            out, _ = module.train(training)(x, memory, memory, attn_mask=learned, need_weights=need_weights)
            out.square().sum().backward()
            grads.append(learned.grad)
    for grad in grads[1:]:
        same(grad, grads[0], 1e-5)


@layouts
def test_the_batch_sizes_disagree(fused_qkv):
    """p#64888: torch raises today, with a text about a view; ours says which argument and which sizes."""
    theirs, ours = pair(4, 2, fused_qkv=fused_qkv)
    query, memory = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        theirs(query, memory, memory)
    with pytest.raises(
        ValueError, match=r"key must have the query's batch size 3.*; got 5 \(query \(2, 3, 4\), key \(2, 5, 4\)"
    ):
        ours(query, memory, memory)


@layouts
def test_fill_reaches_every_parameter(fused_qkv):
    """What the other tests stand on: no parameter of a filled pair is 0 or like another's."""
    theirs, ours = pair(D, H, add_bias_kv=True, fused_qkv=fused_qkv)
    for module in (theirs, ours):
        for name, parameter in module.named_parameters():
            assert (parameter != 0).all(), name
    other = fill(MultiheadAttention(D, H, add_bias_kv=True, fused_qkv=fused_qkv), seed=2)
    assert all(not torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))
