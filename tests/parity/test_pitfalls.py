"""What `nn.MultiheadAttention` does wrong today, each fault beside what we do instead.

The numbers are the rows of the study of torch 2.13.0 that the project began with; p# is pytorch/pytorch#. Each test
first asserts torch's behaviour, so that we notice when it is mended, then ours. Where a row has no wrong number (cost,
missing names) the same holds for what it costs or lacks.
"""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from tests.parity.pair import LAYOUTS, causal_mask, fill, pair, same, same_pair, torch_grads, twin
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise import MultiheadAttention, masks

B, L, S, D, H = 3, 5, 7, 22, 2
NAN, INF = float("nan"), float("inf")

layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
each_need_weights = pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])


def batch(length=L, width=D, dtype=torch.float32):
    return torch.randn(B, length, width, dtype=dtype)


def equal(a, b):
    """Bit for bit, which NaN is not."""
    return torch.equal(a, b)


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator gives back."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, leaf.numel())
        return result


# Masks, NaN, causality


@layouts
def test_01_a_sample_whose_keys_are_all_padding(fused_qkv):
    """p#41508, p#40932, p#152028, PR p#189045: NaN in all gradients, though the loss reads the good sample."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[1] = True

    out, weights = theirs(x, x, x, key_padding_mask=padding)
    assert out[1].isnan().all()
    assert weights[1].isnan().all()
    out[0].sum().backward()
    assert theirs.in_proj_weight.grad.isnan().all()
    assert theirs(x, x, x, key_padding_mask=padding, need_weights=False)[0].isfinite().all()

    good = [0, 2]
    fine = x[good].clone().requires_grad_()
    theirs.zero_grad()
    want, want_weights = theirs(fine, fine, fine, key_padding_mask=padding[good])
    (want.square().sum() + want_weights.square().sum()).backward()
    for need_weights in (True, False):
        ours.zero_grad()
        mine = x.clone().requires_grad_()
        out, weights = ours(mine, mine, mine, key_padding_mask=padding, need_weights=need_weights)
        assert equal(out[1], ours.out_proj.bias.expand(L, D))
        same(out[good], want, 1e-5)
        if need_weights:
            assert equal(weights[1], torch.zeros(L, L))
            same(weights[good], want_weights, 1e-5)
            (out[good].square().sum() + weights.square().sum()).backward()
            for name, grad in torch_grads(theirs).items():
                same(torch_grads(ours)[name], grad, 1e-5, name)
            same(mine.grad[good], fine.grad, 1e-5)
        else:
            out.square().sum().backward()
        assert equal(mine.grad[1], torch.zeros(L, D))
        assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


@layouts
def test_01_a_query_without_a_key(fused_qkv):
    """The same for rows of `attn_mask`, for single heads (p#160064), and where bool and -inf together hide the row."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    row = torch.zeros(L, L, dtype=torch.bool)
    row[2] = True
    assert theirs(x, x, x, attn_mask=row)[0][:, 2].isnan().all()
    head = torch.zeros(B, H, L, L, dtype=torch.bool)
    head[1, 1, 3] = True
    out, weights = theirs(x, x, x, attn_mask=head.flatten(0, 1), average_attn_weights=False)
    assert out[1, 3].isnan().all()
    assert weights[1, 1, 3].isnan().all()

    want = theirs(x, x, x)[0]
    scores = torch.zeros(L, L).masked_fill(row, -INF)
    for mask, need_weights in itertools.product((row, scores, row.expand(B * H, L, L)), (True, False)):
        out, weights = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert equal(out[:, 2], ours.out_proj.bias.expand(B, D))
        same(out[:, [0, 1, 3, 4]], want[:, [0, 1, 3, 4]], 1e-5)
        assert weights is None or equal(weights[:, 2], torch.zeros(B, L))
    out, weights = ours(x, x, x, attn_mask=head.flatten(0, 1), average_attn_weights=False)
    assert out.isfinite().all()
    assert equal(weights[1, 1, 3], torch.zeros(L))
    same(weights[1, 0, 3], theirs(x, x, x, average_attn_weights=False)[1][1, 0, 3], 1e-5)


@layouts
def test_03_the_same_padding_in_eval(fused_qkv):
    """Near p#81077: in evaluation the fused kernel gives NaN where training without weights gives a number."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[1] = True
    call = {"key_padding_mask": padding, "need_weights": False}
    assert theirs(x, x, x, **call)[0].isfinite().all()
    with torch.no_grad():
        assert theirs.eval()(x, x, x, **call)[0][1].isnan().all()
        trained, evaluated = ours.train()(x, x, x, **call)[0], ours.eval()(x, x, x, **call)[0]
    assert equal(trained, evaluated)
    assert equal(evaluated[1], ours.out_proj.bias.expand(L, D))


@layouts
@each_need_weights
def test_05_is_causal_alone(need_weights, fused_qkv):
    """p#118972, p#172338, PRs p#108517, p#178588, p#195660: torch needs the mask that the flag stands for."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    query, memory = batch(), batch(S)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(query, memory, memory, is_causal=True, need_weights=need_weights)
    for key in (query, memory):
        want = theirs(query, key, key, attn_mask=causal_mask(L, key.shape[1]), need_weights=need_weights)
        same_pair(ours(query, key, key, is_causal=True, need_weights=need_weights), want)


@layouts
@each_need_weights
def test_06_is_causal_alone_in_eval(need_weights, fused_qkv):
    """p#96941, p#99282: in evaluation without gradients torch neither complains nor masks: the future leaks."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    theirs.eval(), ours.eval()
    x = batch()
    future = x.clone()
    future[:, 3:] += 10
    call = {"is_causal": True, "need_weights": need_weights}
    with torch.no_grad():
        assert equal(theirs(x, x, x, **call)[0], theirs(x, x, x, need_weights=need_weights)[0])
        assert not torch.allclose(theirs(x, x, x, **call)[0][:, :3], theirs(future, future, future, **call)[0][:, :3])
        same_pair(ours(x, x, x, **call), theirs(x, x, x, attn_mask=causal_mask(L), need_weights=need_weights))
        same(ours(x, x, x, **call)[0][:, :3], ours(future, future, future, **call)[0][:, :3], 1e-5)


@layouts
def test_07_is_causal_with_another_mask(fused_qkv):
    """p#131254: without weights torch drops the mask for the plain causal one, with weights it drops the causal one."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    position = torch.arange(L)
    window = (position[:, None] - position).abs() > 1  # one back and one ahead
    both_masks = window | causal_mask(L)
    assert not equal(both_masks, causal_mask(L))
    assert not equal(both_masks, window)
    want = theirs(x, x, x, attn_mask=both_masks)
    dropped = theirs(x, x, x, attn_mask=window, is_causal=True, need_weights=False)[0]
    same(dropped, theirs(x, x, x, attn_mask=causal_mask(L))[0], 1e-5)
    not_causal = theirs(x, x, x, attn_mask=window, is_causal=True)
    same_pair(not_causal, theirs(x, x, x, attn_mask=window))
    assert not torch.allclose(not_causal[0], want[0])
    assert theirs(x, x, x, attn_mask=torch.zeros(3, 1), is_causal=True, need_weights=False)[0].isfinite().all()

    for training, grad in itertools.product((True, False), (True, False)):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            same_pair(ours(x, x, x, attn_mask=window, is_causal=True), want)
            same(ours(x, x, x, attn_mask=window, is_causal=True, need_weights=False)[0], want[0], 1e-5)
    for need_weights in (True, False):
        with pytest.raises(ValueError, match=r"attn_mask must .*L = 5, S = 5; got \(3, 1\)"):
            ours(x, x, x, attn_mask=torch.zeros(3, 1), is_causal=True, need_weights=need_weights)


@layouts
@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=["bias_kv", "zero"])
def test_07_is_causal_and_keys_of_our_own(extra, fused_qkv):
    """Of the same root: torch's path without weights hides `bias_k` and the zero key, the other does not."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv, **extra)
    x = batch()
    call = {"attn_mask": causal_mask(L), "is_causal": True}
    want, weights = theirs(x, x, x, **call)
    assert (weights[..., -1] > 0).all()
    assert not torch.allclose(theirs(x, x, x, **call, need_weights=False)[0], want, atol=0.01)
    same_pair(ours(x, x, x, **call), (want, weights))
    same(ours(x, x, x, **call, need_weights=False)[0], want, 1e-5)
    same(ours(x, x, x, is_causal=True, need_weights=False)[0], want, 1e-5)


@layouts
@each_need_weights
def test_11_polarity(need_weights, fused_qkv):
    """PR p#170415, PR p#120668: True blocks in the module and keeps in SDPA. Ours: the module's, or `dense(keep)`."""
    theirs, ours = pair(D, 1, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    keep = torch.rand(L, L) < 0.6
    keep.fill_diagonal_(True)
    q, k, v = nn.functional.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).chunk(3, dim=-1)
    want = theirs.out_proj(scaled_dot_product_attention(q, k, v, attn_mask=keep))
    assert not torch.allclose(theirs(x, x, x, attn_mask=keep)[0], want)
    same(theirs(x, x, x, attn_mask=~keep)[0], want, 1e-5)
    same(ours(x, x, x, attn_mask=~keep, need_weights=need_weights)[0], want, 1e-5)
    same(ours(x, x, x, mask=masks.dense(keep), need_weights=need_weights)[0], want, 1e-5)
    same(ours(x, x, x, mask=masks.from_torch(~keep), need_weights=need_weights)[0], want, 1e-5)
    with pytest.raises(ValueError, match=r"mask must be a Mask .*dense\(keep\)"):
        ours(x, x, x, mask=keep)


@layouts
@each_need_weights
def test_12_float_and_bool_mask_together(need_weights, fused_qkv):
    """PR p#92733, baudm/parseq#130: a deprecation warning at every call. Integer masks are refused."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    scores = torch.randn(L, L)
    padding = torch.arange(L) >= torch.tensor([5, 2, 3])[:, None]
    for attn_mask, key_padding_mask in (
        (scores, padding),
        (causal_mask(L), torch.zeros(B, L).masked_fill(padding, -INF)),
    ):
        call = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "need_weights": need_weights}
        for _ in range(2):
            with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
                want = theirs(x, x, x, **call)
        same_pair(ours(x, x, x, **call), want)  # and a warning would be an error here

    for name, shape in (("attn_mask", (L, L)), ("key_padding_mask", (B, L))):
        for dtype in (torch.uint8, torch.int64):
            mask = {name: torch.zeros(shape, dtype=dtype)}
            with pytest.raises(AssertionError, match="only bool and floating types"):
                theirs(x, x, x, **mask)
            with pytest.raises(ValueError, match=f"{name} must be a bool .*float.*{dtype}"):
                ours(x, x, x, **mask)


@layouts
def test_13_a_float_mask_of_0_and_1(fused_qkv):
    """p#21518, p#136816: added to the scores, hiding nothing, without a word. Ours adds the same, and says so once."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    meant = causal_mask(L)
    want = theirs(x, x, x, attn_mask=meant.float())  # a warning would be an error here
    assert (want[1].masked_select(meant) > 0).all()
    with pytest.warns(UserWarning, match=r"floating attn_mask holds only 0 and 1.*attn_mask.bool\(\)"):
        got = ours(x, x, x, attn_mask=meant.float())
    same_pair(got, want)
    same_pair(ours(x, x, x, attn_mask=meant.float()), want)  # no second warning

    padding = (torch.arange(L) >= torch.tensor([5, 2, 3])[:, None]).double()
    fresh = twin(theirs, fused_qkv=fused_qkv)
    with pytest.warns(UserWarning, match=r"floating key_padding_mask holds only 0 and 1"):
        fresh(x, x, x, key_padding_mask=padding)

    quiet = twin(theirs, fused_qkv=fused_qkv)
    for silent in (
        torch.zeros(L, L),
        torch.ones(L, L),
        torch.eye(L) * 2,
        torch.zeros(L, L).masked_fill(meant, -INF),
        meant,
    ):
        same_pair(quiet(x, x, x, attn_mask=silent), theirs(x, x, x, attn_mask=silent))


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_14_a_float32_mask_in_another_module(dtype, fused_qkv):
    """p#99012, p#111276, Stability-AI/stablediffusion#274: generate_square_subsequent_mask() is float32."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv, dtype=dtype)
    x = batch(dtype=dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    assert mask.dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        theirs(x, x, x, attn_mask=mask)
    want = theirs(x, x, x, attn_mask=causal_mask(L))
    tol = 1e-11 if dtype == torch.float64 else 2e-2
    same_pair(ours(x, x, x, attn_mask=mask), want, tol)
    same(ours(x, x, x, attn_mask=mask, need_weights=False)[0], want[0], tol)


@layouts
@each_need_weights
def test_14_a_float64_mask_in_a_float32_module(need_weights, fused_qkv):
    """Of either kind; only -inf hides after the cast."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    scores = torch.randn(L, L, dtype=torch.float64)
    padding = torch.zeros(B, L, dtype=torch.float64)
    padding[1, 3:] = -INF
    for call in ({"attn_mask": scores}, {"key_padding_mask": padding}):
        with pytest.raises(RuntimeError, match="dtype"):
            theirs(x, x, x, **call, need_weights=need_weights)
        narrow = {name: mask.float() for name, mask in call.items()}
        same_pair(
            ours(x, x, x, **call, need_weights=need_weights), theirs(x, x, x, **narrow, need_weights=need_weights)
        )
    # a penalty that float32 has no number for stays a penalty: a row that holds nothing else is a softmax as before
    scores = torch.full((L, L), -1e300, dtype=torch.float64)
    out, _ = ours(x, x, x, attn_mask=scores, need_weights=need_weights)
    assert scores.float().isinf().all()
    assert not torch.allclose(out, ours.out_proj.bias.expand(B, L, D))


@layouts
@each_need_weights
def test_14_two_penalties_that_overflow_together(need_weights, fused_qkv):
    """`finfo.min` in both masks, as many codebases write them: the sum is -inf in torch, and the sample is lost."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    lowest = torch.finfo(torch.float32).min
    scores, padding = torch.full((L, L), lowest), torch.zeros(B, L)
    padding[1] = lowest
    call = {"attn_mask": scores, "key_padding_mask": padding, "need_weights": need_weights}
    want = theirs(x, x, x, attn_mask=scores, need_weights=need_weights)
    lost = theirs(x, x, x, **call)[0][1]
    assert lost.isnan().all() if need_weights else equal(lost, theirs.out_proj.bias.expand(L, D))
    assert want[0].isfinite().all()
    assert not torch.allclose(want[0][1], theirs.out_proj.bias.expand(L, D))
    same_pair(ours(x, x, x, **call), want)


@layouts
@each_need_weights
def test_15_a_mask_for_each_sample(need_weights, fused_qkv):
    """p#64706, p#28884, p#116472, line/lighthouse#77: torch wants (N*H, L, S), and cannot tell a wrong repeat()."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x, memory = batch(), batch(S)
    block = torch.rand(B, L, S) < 0.5
    block[..., 3] = False
    want = theirs(x, memory, memory, attn_mask=block.repeat_interleave(H, dim=0), need_weights=need_weights)
    wrong = theirs(x, memory, memory, attn_mask=block.repeat(H, 1, 1), need_weights=need_weights)
    assert not torch.allclose(want[0], wrong[0], atol=0.01)
    heads = block[:, None].expand(B, H, L, S)
    for mask in (block, block[:, None], heads, block[:1]):
        with pytest.raises((RuntimeError, AssertionError)):
            theirs(x, memory, memory, attn_mask=mask, need_weights=need_weights)
    for mask in (block, block[:, None], heads, block.repeat_interleave(H, dim=0), masks.dense(~block)):
        named = {"mask": mask} if isinstance(mask, masks.Mask) else {"attn_mask": mask}
        same_pair(ours(x, memory, memory, **named, need_weights=need_weights), want)
        if not isinstance(mask, masks.Mask):
            scores = torch.zeros(mask.shape).masked_fill(mask, -INF)
            same_pair(ours(x, memory, memory, attn_mask=scores, need_weights=need_weights), want)
    for mask in (block[:1], block[:1, None]):
        first = theirs(x, memory, memory, attn_mask=block[0], need_weights=need_weights)
        same_pair(ours(x, memory, memory, attn_mask=mask, need_weights=need_weights), first)
    per_head = torch.rand(H, L, S) < 0.5
    per_head[..., 3] = False
    same_pair(
        ours(x, memory, memory, attn_mask=per_head[None], need_weights=need_weights),
        theirs(x, memory, memory, attn_mask=per_head.repeat(B, 1, 1), need_weights=need_weights),
    )


@layouts
def test_16_two_masks_cost_no_more_than_one(fused_qkv):
    """p#116472: torch writes both masks out for every head in floating point; ours joins views."""
    length, heads = 101, 11
    theirs, ours = pair(2 * heads, heads, batch_first=True, fused_qkv=fused_qkv)
    x = batch(length, 2 * heads)
    padding = torch.arange(length) >= torch.tensor([101, 60, 9])[:, None]
    call = {"attn_mask": causal_mask(length), "key_padding_mask": padding, "need_weights": False}
    whole = B * heads * length * length
    with Sizes() as theirs_largest:
        want, _ = theirs(x, x, x, **call)
    with Sizes() as ours_largest:
        got, _ = ours(x, x, x, **call)
    assert theirs_largest.largest == whole
    assert ours_largest.largest <= whole // heads
    same(got, want, 1e-5)


@layouts
@each_need_weights
@pytest.mark.parametrize("held", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize(
    "extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=["plain", "bias_kv", "zero"]
)
def test_62_nan_in_padding(extra, held, need_weights, fused_qkv):
    """p#101967: what a padded key or value holds reaches every output. 1e30 does not, so the mask itself works."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv, **extra)
    query, memory = batch(), batch(S)
    padding = torch.arange(S) >= torch.tensor([7, 4, 2])[:, None]
    clean = memory.masked_fill(padding[..., None], 0)
    dirty = memory.masked_fill(padding[..., None], held)
    call = {"key_padding_mask": padding, "need_weights": need_weights}
    want = theirs(query, clean, clean, **call)
    assert theirs(query, dirty, dirty, **call)[0][1:].isnan().all()
    for grad, training in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            same_pair(ours.train(training)(query, dirty, dirty, **call), want)


@layouts
@each_need_weights
def test_62_nan_in_padding_and_gradients(need_weights, fused_qkv):
    """Nor does it reach a gradient: self-attention whose padded outputs are not read, with the queries padded too."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    padding = torch.arange(L) >= torch.tensor([5, 4, 2])[:, None]
    x = batch()
    clean = x.masked_fill(padding[..., None], 0).requires_grad_()
    dirty = x.masked_fill(padding[..., None], NAN).requires_grad_()
    call = {"key_padding_mask": padding, "need_weights": need_weights}

    leaking = dirty.detach().clone().requires_grad_()
    theirs(leaking, leaking, leaking, **call)[0][~padding].square().sum().backward()
    assert theirs.in_proj_weight.grad.isnan().any()
    assert leaking.grad.isnan().any()
    theirs.zero_grad()
    theirs(clean, clean, clean, **call)[0][~padding].square().sum().backward()
    out, _ = ours(dirty, dirty, dirty, **call, query_padding_mask=padding)
    assert equal(out[padding], torch.zeros(int(padding.sum()), D))
    out.square().sum().backward()
    for name, grad in torch_grads(theirs).items():
        same(torch_grads(ours)[name], grad, 1e-5, name)
    same(dirty.grad, clean.grad, 1e-5)


# Tools, features, cost


@layouts
def test_18_what_the_default_costs(fused_qkv):
    """lyuwenyu/RT-DETR#678: weights are asked for by default. Without gradients ours holds one head's at a time."""
    length, heads = 101, 11
    theirs, ours = pair(2 * heads, heads, batch_first=True, fused_qkv=fused_qkv)
    x = batch(length, 2 * heads)
    whole = B * heads * length * length
    with torch.no_grad():
        with Sizes() as theirs_default:
            want = theirs(x, x, x)
        with Sizes() as ours_default:
            got = ours(x, x, x)
        with Sizes() as ours_without:
            ours(x, x, x, need_weights=False)
    assert theirs_default.largest == whole
    assert ours_default.largest <= whole // heads
    assert ours_without.largest < length * length * B
    same_pair(got, want)


@layouts
def test_19_returned_weights_carry_no_dropout(fused_qkv):
    """p#33360, p#90842, p#42929: in training torch's rows sum to anything. Ours are the weights of evaluation."""
    theirs, ours = pair(D, H, dropout=0.5, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    weights = theirs(x, x, x, average_attn_weights=False)[1]
    assert (weights == 0).any()
    assert not torch.allclose(weights.sum(dim=-1), torch.ones(B, H, L))
    want, want_weights = theirs.eval()(x, x, x, average_attn_weights=False)
    for average in (True, False):
        out, weights = ours.train()(x, x, x, average_attn_weights=average)
        same(weights, want_weights.mean(dim=1) if average else want_weights, 1e-5)
        assert not torch.allclose(out, want)  # the dropout is there
        same_pair(ours.eval()(x, x, x, average_attn_weights=False), (want, want_weights))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each_need_weights
@layouts
def test_22_hooks_on_out_proj(fused_qkv, need_weights, training):
    """p#78109: no hook of `out_proj` is ever called."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)

    def calls(module):
        found = []
        module.train(training)
        hooks = [
            module.out_proj.register_forward_pre_hook(lambda *_: found.append("before")),
            module.out_proj.register_forward_hook(lambda *_: found.append("after")),
            module.out_proj.register_full_backward_pre_hook(lambda *_: found.append("backward before")),
            module.out_proj.register_full_backward_hook(lambda *_: found.append("backward")),
        ]
        x = batch().requires_grad_()
        module(x, x, x, need_weights=need_weights)[0].sum().backward()
        for hook in hooks:
            hook.remove()
        return found

    assert calls(theirs) == []
    assert calls(ours) == ["before", "after", "backward before", "backward"]


@layouts
def test_22_hooks_may_change_the_output(fused_qkv):
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    x = batch()
    want = theirs(x, x, x)[0]
    for module in (theirs, ours):
        module.out_proj.register_forward_hook(lambda _module, _args, out: out * 2)
    assert equal(theirs(x, x, x)[0], want)
    same(ours(x, x, x)[0], want * 2, 1e-5)


@layouts
def test_35_second_derivatives(fused_qkv):
    """p#116350, p#181177, learnables/learn2learn#429: torch's fused kernel has no second derivative; ours gets one."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv, dtype=torch.float64)
    x = batch(dtype=torch.float64).requires_grad_()

    def second(module, need_weights, **masks):
        module.zero_grad()
        out, _ = module(x, x, x, need_weights=need_weights, **masks)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()])

    with pytest.raises(RuntimeError, match="not implemented"):
        second(theirs, False)
    padding = torch.arange(L) >= torch.tensor([5, 4, 2])[:, None]
    for call in ({}, {"attn_mask": causal_mask(L)}, {"key_padding_mask": padding}):
        want = second(theirs, True, **call)
        for need_weights in (True, False):
            got = second(ours, need_weights, **call)
            same(got[0], want[0], 1e-9)
            by_name = dict(zip([name for name, _ in ours.named_parameters()], got[1:], strict=True))
            by_name_theirs = dict(zip([name for name, _ in theirs.named_parameters()], want[1:], strict=True))
            same(by_name["out_proj.weight"], by_name_theirs["out_proj.weight"], 1e-9)
            inner = by_name["in_proj_weight"] if fused_qkv else torch.cat([by_name[f"{n}_proj.weight"] for n in "qkv"])
            same(inner, by_name_theirs["in_proj_weight"], 1e-9)


@layouts
def test_44_first_values(fused_qkv):
    """p#166378, p#57117, PR p#171409: packed projections start smaller than separate ones. Kept: ours are torch's."""
    wide = 128

    def spreads(module):
        found = module.state_dict()
        packed = found.get("in_proj_weight")
        parts = [found[f"{n}_proj_weight"] for n in "qkv"] if packed is None else packed.chunk(3)
        return [part.std().item() for part in (*parts, found["out_proj.weight"])]

    for separate in (False, True):
        # kdim = 127 is as good as embed_dim for the spread, and makes torch keep three matrices
        kwargs = {"kdim": wide - 1} if separate else {}
        expected = [1 / wide**0.5 * (1 if separate else 2**-0.5)] * 3 + [(3 * wide) ** -0.5]
        torch.manual_seed(0)
        theirs = spreads(nn.MultiheadAttention(wide, 4, **kwargs))
        torch.manual_seed(0)
        ours = spreads(MultiheadAttention(wide, 4, fused_qkv=fused_qkv, **kwargs))
        assert theirs == pytest.approx(expected, rel=0.02)
        assert ours == theirs


@layouts
@pytest.mark.parametrize("kwargs", [{}, {"kdim": 13}, {"add_bias_kv": True}, {"bias": False}], ids=str)
def test_46_first_values_after_the_meta_device(kwargs, fused_qkv):
    """p#107909, NVIDIA/Megatron-LM#6799: torch's layer has no public reset, so its matrices stay as they fell."""

    def materialised(module):
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.constant_(parameter, NAN)
        for child in module.modules():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()
        return module.state_dict()

    with torch.device("meta"):
        theirs = nn.MultiheadAttention(64, 4, **kwargs)
        ours = MultiheadAttention(64, 4, fused_qkv=fused_qkv, **kwargs)
    assert not hasattr(theirs, "reset_parameters")
    torches = materialised(theirs)
    left = [name for name, value in torches.items() if value.isnan().all()]
    assert left == [name for name in torches if not name.startswith("out_proj")]
    state = materialised(ours)
    fresh = nn.MultiheadAttention(64, 4, **kwargs).state_dict()
    assert list(state) == list(fresh)
    for name, value in state.items():
        assert value.isfinite().all(), name
        assert value.std().item() == pytest.approx(fresh[name].std().item(), rel=0.35), name


@layouts
def test_47_batch_first_forgotten(fused_qkv):
    """p#64888, om-ai-lab/OmDet#19, p#137173: (N, L, E) into the default module mixes samples, here and there.

    Self-attention fits either reading, so nobody can know; what fits only one reading says so, see test_errors.py.
    """
    theirs, ours = pair(D, H, fused_qkv=fused_qkv)
    x = batch()
    other = x.clone()
    other[2] += 1
    for module in (theirs, ours):
        assert not torch.allclose(module(x, x, x)[0][0], module(other, other, other)[0][0])
    same_pair(ours(x, x, x), theirs(x, x, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MultiheadAttention(15, 3, fused_qkv=fused_qkv)  # odd heads, all defaults: no noise


def test_51_repr():
    """torch shows `out_proj` alone: heads, dropout, memory order and widths are hidden."""
    kwargs = {"dropout": 0.25, "kdim": 13, "vdim": 17, "batch_first": True, "add_zero_attn": True}
    text = repr(nn.MultiheadAttention(D, H, **kwargs))
    assert "out_proj" in text
    assert not any(hidden in text for hidden in ("heads", "0.25", "batch_first", "kdim", "13", "zero"))
    for fused_qkv in (False, True):
        text = repr(MultiheadAttention(D, H, fused_qkv=fused_qkv, **kwargs))
        for shown in (
            "22, num_heads=2, batch_first=True",
            "kdim=13",
            "vdim=17",
            "add_zero_attn=True",
            "p=0.25",
            "out_proj",
        ):
            assert shown in text
        assert ("fused_qkv=True" in text) == fused_qkv
        assert ("(q_proj): Linear(in_features=22, out_features=22" in text) == (not fused_qkv)


@layouts
@pytest.mark.parametrize("batch_first", [True, False], ids=["BLD", "LBD"])
def test_71_inside_a_stock_encoder_layer(batch_first, fused_qkv):
    """In evaluation torch's layer does not call a replaced attention at all, unless that says how its weights lie."""
    x = batch() if batch_first else batch().transpose(0, 1)
    padding = torch.arange(L) >= torch.tensor([5, 4, 2])[:, None]
    stock = fill(nn.TransformerEncoderLayer(D, H, 17, dropout=0.0, batch_first=batch_first))
    calls = []

    class Replacement(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            calls.append("replacement")
            return super().forward(*args, **kwargs)

    if batch_first:
        bypassed = copy.deepcopy(stock).eval()
        bypassed.self_attn = Replacement(D, H, batch_first=True)
        with torch.no_grad():
            bypassed(x)
        assert calls == []

    class Counted(MultiheadAttention):  # not a hook: one on any submodule sends torch's layer the long way
        def forward(self, *args, **kwargs):
            calls.append("ours")
            return super().forward(*args, **kwargs)

    ours = copy.deepcopy(stock)
    ours.self_attn = Counted(D, H, batch_first=batch_first, fused_qkv=fused_qkv)
    ours.self_attn.load_state_dict(stock.self_attn.state_dict())
    for training, grad in itertools.product((True, False), (True, False)):
        stock.train(training), ours.train(training)
        with torch.set_grad_enabled(grad):
            same(ours(x, src_key_padding_mask=padding), stock(x, src_key_padding_mask=padding), 1e-5)
            call = {"src_mask": causal_mask(L), "is_causal": True}
            same(ours(x, **call), stock(x, **call), 1e-5)
    assert calls == ["ours"] * 8


@layouts
def test_59_other_shapes(fused_qkv):
    """Four dimensions and masks of one row are refused by both, and by ours with the sizes; 4-D masks broadcast."""
    theirs, ours = pair(D, H, batch_first=True, add_zero_attn=True, fused_qkv=fused_qkv)
    x = batch()
    row = torch.tensor([[False, False, True, False, True]])
    wrong = [
        ((x[None],) * 3, {}, "3-D, or all 2-D"),
        ((x,) * 3, {"attn_mask": row}, r"attn_mask must .*\(1, 5\)"),
        ((x[0],) * 3, {"key_padding_mask": row}, r"key_padding_mask must .*\(1, 5\)"),
    ]
    for inputs, call, message in wrong:
        with pytest.raises((AssertionError, RuntimeError)):
            theirs(*inputs, **call)
        with pytest.raises(ValueError, match=message):
            ours(*inputs, **call)
    want = theirs(x, x, x, attn_mask=row.expand(L, L))
    same_pair(ours(x, x, x, attn_mask=row[None, None]), want)
    assert want[1].shape == (B, L, L + 1)  # a column for the zero key, in both
