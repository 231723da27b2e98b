"""What torch's five Transformer layers do wrong today, each fault beside what ours do instead.

As in test_pitfalls.py: the numbers are the rows of the study of torch 2.13.0, p# is pytorch/pytorch#, and each test
first asserts torch's behaviour. Ours are torch's own layers after `headwise.upgrade`, unless a test says otherwise.
docs/pitfalls.md lists all rows for users; what it says of tests is held at the end of this file.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import itertools
import re
import warnings

import pytest
import torch
from tests.contract.source import ROOT
from tests.parity.pair import causal_mask, fill, same, torch_grads
from tests.unit.core.test_memory import peak_bytes
from torch import nn
from torch.nn.functional import multi_head_attention_forward

import headwise
from headwise.layers import packing, parts

B, L, S, D, H, M = 3, 5, 7, 22, 2, 13
NAN, INF = float("nan"), float("inf")
RIGHT = torch.arange(L) >= torch.tensor([5, 2, 3])[:, None]  # True = padding, at the end
LEFT = RIGHT.flip(1)
HIDDEN = torch.tensor([[False], [True], [False]]).expand(B, L)  # all of sample 1
POSITION = torch.arange(L)
CHILDREN = ("q_proj", "k_proj", "v_proj", "out_proj")
WINDOW = (POSITION[:, None] - POSITION).abs() > 1  # one back and one ahead

# torch says so once a process, wherever it nests first
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
each_layout = pytest.mark.parametrize("fused_qkv", [False, True], ids=["split", "fused"])
each_norm = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def make(kind, **kwargs):
    """One of torch's layers, with random parameters, biases too, and no dropout."""
    kwargs = {"dim_feedforward": M, "dropout": 0.0, "batch_first": True} | kwargs
    return fill(kind(D, H, **kwargs))


def layer(**kwargs):
    return make(nn.TransformerEncoderLayer, **kwargs)


def stack(nest=True, norm=None, **kwargs):
    return fill(nn.TransformerEncoder(layer(**kwargs), 2, norm, enable_nested_tensor=nest))


def decoder_layer(**kwargs):
    return make(nn.TransformerDecoderLayer, **kwargs)


def decoder(**kwargs):
    return fill(nn.TransformerDecoder(decoder_layer(**kwargs), 2))


def transformer(**kwargs):
    return make(nn.Transformer, num_encoder_layers=2, num_decoder_layers=2, **kwargs)


ENCODERS = {  # what makes it, and its word for an attention mask
    "layer": (layer, "src_mask"),
    "stack": (stack, "mask"),
    "stack-not-nested": (lambda **kwargs: stack(nest=False, **kwargs), "mask"),
}
each_encoder = pytest.mark.parametrize("kind", ENCODERS)


def encoder(kind, fused_qkv=False, **kwargs):
    """torch's, ours, and the word for an attention mask."""
    build, word = ENCODERS[kind]
    theirs = build(**kwargs)
    return theirs, upgraded(theirs, fused_qkv), word


def upgraded(model, fused_qkv=False, where=None):
    return headwise.upgrade(copy.deepcopy(model), fused_qkv=fused_qkv, where=where)


def batch(length=L, width=D):
    return torch.randn(B, length, width)


def trained(model, *args, **kwargs):
    """The output in training, detached."""
    with torch.enable_grad():
        return model.train()(*args, **kwargs).detach()


def evaluated(model, *args, **kwargs):
    """The output in evaluation without gradients: where torch's fused kernels run."""
    with torch.no_grad():
        return model.eval()(*args, **kwargs)


def modes(model, *args, **kwargs):
    """The outputs in training and evaluation, with gradients and without."""
    for training, grad in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            yield model.train(training)(*args, **kwargs).detach()


@contextlib.contextmanager
def packed_anyhow():
    """Short batches are run on real positions alone too, as long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "TURN", 0)
        patch.setattr(packing, "TURN_GRAD", 0)
        yield


@pytest.fixture(params=[False, True], ids=["whole", "packed"])
def packed(request):
    with packed_anyhow() if request.param else contextlib.nullcontext():
        yield


def test_packed_is_packed(monkeypatch):
    """What the tests with `packed` stand on."""
    found = []

    original = packing.find_packing

    def spy(*args):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(parts, "find_packing", spy)
    monkeypatch.setattr(packing, "find_packing", spy)
    ours = upgraded(stack())
    list(modes(ours, batch(), src_key_padding_mask=RIGHT))
    assert [one is None for one in found] == [True] * 12  # the stack of two layers, then each, in four modes
    found.clear()
    with packed_anyhow():
        list(modes(ours, batch(), src_key_padding_mask=RIGHT))
    assert [one is None for one in found] == [False] * 4  # the stack at once


# Masks, NaN, causality


@each_layout
@each_norm
def test_03_a_layer_with_a_sample_of_padding(norm_first, fused_qkv):
    """Near p#81077: finite in training, NaN in evaluation."""
    theirs, ours, _ = encoder("layer", fused_qkv, norm_first=norm_first)
    x = batch()
    want = trained(theirs, x, src_key_padding_mask=HIDDEN)
    assert want.isfinite().all()
    fast = evaluated(theirs, x, src_key_padding_mask=HIDDEN)
    assert fast[1].isnan().all()
    same(fast[[0, 2]], want[[0, 2]], 1e-5)
    for got in modes(ours, x, src_key_padding_mask=HIDDEN):
        same(got, want, 1e-5)


@each_layout
def test_04_a_stack_with_a_sample_of_padding(packed, fused_qkv):
    """p#27968, p#64525: torch's stack computes it in training and gives 0 in evaluation, or NaN if it may not nest."""
    theirs, ours, _ = encoder("stack", fused_qkv)
    x = batch()
    want = trained(theirs, x, src_key_padding_mask=HIDDEN)
    assert (want[1] != 0).all()
    fast = evaluated(theirs, x, src_key_padding_mask=HIDDEN)
    assert fast[1].eq(0).all()
    for got in modes(ours, x, src_key_padding_mask=HIDDEN):
        assert got[1].eq(0).all()
        same(got[[0, 2]], want[[0, 2]], 1e-5)

    theirs, ours, _ = encoder("stack-not-nested", fused_qkv)
    assert evaluated(theirs, x, src_key_padding_mask=HIDDEN)[1].isnan().all()
    for got in modes(ours, x, src_key_padding_mask=HIDDEN):
        same(got, want, 1e-5)


@each_layout
@each_encoder
def test_06_is_causal_alone_in_an_encoder(kind, fused_qkv):
    """p#96941, p#99282, and row 05: raises in training; in evaluation nothing is masked, without a word."""
    theirs, ours, word = encoder(kind, fused_qkv)
    x = batch()
    want = trained(theirs, x, **{word: causal_mask(L)})
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        trained(theirs, x, is_causal=True)
    leaking = evaluated(theirs, x, is_causal=True)
    assert torch.equal(leaking, evaluated(theirs, x))
    assert not torch.allclose(leaking, want, atol=0.01)
    for got in modes(ours, x, is_causal=True):
        same(got, want, 1e-5)


@pytest.mark.parametrize("flag", ["tgt_is_causal", "memory_is_causal"])
@pytest.mark.parametrize("build", [decoder_layer, decoder], ids=["layer", "stack"])
def test_06_is_causal_alone_in_a_decoder(build, flag):
    """The target's future leaks in evaluation; for the memory, which no fused path reads, torch raises there too."""
    theirs = build()
    ours = upgraded(theirs)
    x, memory = batch(), batch(S)
    mask = causal_mask(L, L if flag == "tgt_is_causal" else S)
    want = trained(theirs, x, memory, **{flag.replace("is_causal", "mask"): mask})
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        trained(theirs, x, memory, **{flag: True})
    if flag == "tgt_is_causal":
        leaking = evaluated(theirs, x, memory, **{flag: True})
        assert torch.equal(leaking, evaluated(theirs, x, memory))
        assert not torch.allclose(leaking, want, atol=0.01)
    else:
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            evaluated(theirs, x, memory, **{flag: True})
    for got in modes(ours, x, memory, **{flag: True}):
        same(got, want, 1e-5)


@each_layout
@each_encoder
def test_07_is_causal_with_another_mask_in_an_encoder(kind, fused_qkv):
    """p#131254: training heeds the flag and drops the mask, evaluation heeds the mask and drops the flag."""
    theirs, ours, word = encoder(kind, fused_qkv)
    x = batch()
    want = trained(theirs, x, **{word: WINDOW | causal_mask(L)})
    dropped = trained(theirs, x, **{word: WINDOW}, is_causal=True)
    same(dropped, trained(theirs, x, **{word: causal_mask(L)}), 1e-5)
    not_causal = evaluated(theirs, x, **{word: WINDOW}, is_causal=True)
    same(not_causal, trained(theirs, x, **{word: WINDOW}), 1e-5)
    for wrong in (dropped, not_causal):
        assert not torch.allclose(wrong, want, atol=0.01)
    for mask in (WINDOW, torch.zeros(L, L).masked_fill(WINDOW, -INF)):
        for got in modes(ours, x, **{word: mask}, is_causal=True):
            same(got, want, 1e-5)


@each_layout
@each_encoder
def test_07_a_mask_of_another_shape_in_an_encoder(kind, fused_qkv):
    """p#131254: in training a (3, 1) mask is taken where is_causal is True, and counts for nothing."""
    theirs, ours, word = encoder(kind, fused_qkv)
    x = batch()
    for wrong in (torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.bool)):
        got = trained(theirs, x, **{word: wrong}, is_causal=True)
        same(got, trained(theirs, x, **{word: causal_mask(L)}), 1e-5)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            evaluated(theirs, x, **{word: wrong}, is_causal=True)
        for mode in (trained, evaluated):
            with pytest.raises(ValueError, match=r"attn_mask must .*L = 5, S = 5; got \(3, 1\)"):
                mode(ours, x, **{word: wrong}, is_causal=True)


@each_layout
@each_encoder
def test_09_a_floating_mask_in_an_encoder(kind, fused_qkv):
    """p#118628: in evaluation an ALiBi-type mask is read as yes or no. NaN where no entry is 0."""
    theirs, ours, word = encoder(kind, fused_qkv)
    x = batch()
    slope = -(POSITION[:, None] - POSITION).abs().float()
    want = trained(theirs, x, **{word: slope})
    fast = evaluated(theirs, x, **{word: slope})
    only_itself = trained(theirs, x, **{word: slope != 0})
    same(fast, only_itself, 1e-5)
    assert not torch.allclose(fast, want, atol=0.01)
    assert evaluated(theirs, x, **{word: slope - 1}).isnan().all()
    for got in modes(ours, x, **{word: slope}):
        same(got, want, 1e-5)
    for got in modes(ours, x, **{word: slope - 1}):
        same(got, want, 1e-5)  # the same for all keys, which changes nothing


@each_layout
@each_norm
def test_09_a_floating_padding_mask_in_a_layer(norm_first, fused_qkv):
    """p#118628 (p#107084 is mended for the attention alone): a penalty of -1 hides in evaluation."""
    theirs, ours, _ = encoder("layer", fused_qkv, norm_first=norm_first)
    x = batch()
    penalty = torch.zeros(B, L).masked_fill(RIGHT, -1.0)
    want = trained(theirs, x, src_key_padding_mask=penalty)
    fast = evaluated(theirs, x, src_key_padding_mask=penalty)
    same(fast, trained(theirs, x, src_key_padding_mask=RIGHT), 1e-5)
    assert not torch.allclose(fast, want, atol=0.01)
    for got in modes(ours, x, src_key_padding_mask=penalty):
        same(got, want, 1e-5)


@each_layout
def test_10_a_floating_padding_mask_in_a_stack(packed, fused_qkv):
    """Of the same root as 09: tokens with a penalty of -1 are dropped, and what comes out for them is 0."""
    theirs, ours, _ = encoder("stack", fused_qkv)
    x = batch()
    penalty = torch.zeros(B, L).masked_fill(RIGHT, -1.0)
    want = trained(theirs, x, src_key_padding_mask=penalty)
    fast = evaluated(theirs, x, src_key_padding_mask=penalty)
    assert fast[RIGHT].eq(0).all()
    assert (want[RIGHT] != 0).all()
    assert not torch.allclose(fast[~RIGHT], want[~RIGHT], atol=0.01)
    for got in modes(ours, x, src_key_padding_mask=penalty):
        same(got, want, 1e-5)


@each_layout
@each_encoder
def test_12_float_and_bool_mask_together_in_an_encoder(kind, fused_qkv):
    """PR p#92733: torch says at every call that this is deprecated. Integers are refused by both."""
    theirs, ours, word = encoder(kind, fused_qkv)
    x = batch()
    scores = torch.zeros(L, L).masked_fill(causal_mask(L), -INF)
    call = {word: scores, "src_key_padding_mask": RIGHT}
    for _ in range(2):
        with pytest.warns(UserWarning, match="mismatched src_key_padding_mask and .*mask is deprecated"):
            want = trained(theirs, x, **call)
    for got in modes(ours, x, **call):  # and a warning would be an error here
        same(got, want, 1e-5)
    integers = {word: torch.zeros(L, L, dtype=torch.int64)}
    with pytest.raises(AssertionError, match="only bool and floating types"):
        trained(theirs, x, **integers)
    with pytest.raises(ValueError, match=r"attn_mask must be a bool .*float.*int64"):
        trained(ours, x, **integers)


@each_layout
@each_encoder
def test_15_a_mask_for_each_sample_in_an_encoder(kind, fused_qkv):
    """p#64706, p#28884: torch's take (N*H, L, S) only, and cannot tell a wrong repeat()."""
    theirs, ours, word = encoder(kind, fused_qkv)
    x = batch()
    block = torch.rand(B, L, L) < 0.5
    block[..., 3] = False
    want = trained(theirs, x, **{word: block.repeat_interleave(H, dim=0)})
    assert not torch.allclose(trained(theirs, x, **{word: block.repeat(H, 1, 1)}), want, atol=0.01)
    for mask in (block, block[:, None], block[:1]):
        with pytest.raises((RuntimeError, AssertionError)):
            trained(theirs, x, **{word: mask})
    for mask in (block, block[:, None], headwise.masks.dense(~block)):
        for got in modes(ours, x, **{word: mask}):
            same(got, want, 1e-5)
    for got in modes(ours, x, **{word: block[:1]}):
        same(got, trained(theirs, x, **{word: block[0]}), 1e-5)


@each_layout
def test_17_padded_positions_of_a_stack(packed, fused_qkv):
    """p#86120: computed in training; in evaluation 0 for padding at the end, computed for padding at the start."""
    theirs, ours, _ = encoder("stack", fused_qkv)
    x = batch()
    for padding, zeroed in ((RIGHT, True), (LEFT, False)):
        want = trained(theirs, x, src_key_padding_mask=padding)
        assert (want[padding] != 0).all()
        fast = evaluated(theirs, x, src_key_padding_mask=padding)
        assert fast[padding].eq(0).all() == zeroed
        same(fast[~padding], want[~padding], 1e-5)
        if zeroed:  # so a mean over positions is another one
            assert not torch.allclose(fast.mean(dim=1), want.mean(dim=1), atol=0.01)
        for got in modes(ours, x, src_key_padding_mask=padding):
            assert got[padding].eq(0).all()
            same(got[~padding], want[~padding], 1e-5)


@each_layout
def test_17_zero_before_the_last_norm(packed, fused_qkv):
    """What a stack's norm makes of 0 is its bias, there in evaluation and here always."""
    theirs, ours, _ = encoder("stack", fused_qkv, norm=nn.LayerNorm(D))
    x = batch()
    bias = theirs.norm.bias.detach().expand(int(RIGHT.sum()), D)
    assert not torch.equal(trained(theirs, x, src_key_padding_mask=RIGHT)[RIGHT], bias)
    want = evaluated(theirs, x, src_key_padding_mask=RIGHT)
    assert torch.equal(want[RIGHT], bias)
    for got in modes(ours, x, src_key_padding_mask=RIGHT):
        assert torch.equal(got[RIGHT], bias)
        same(got, want, 1e-5)
    for got in modes(ours, x, src_key_padding_mask=RIGHT, query_padding_mask=RIGHT):
        assert got[RIGHT].eq(0).all()
        same(got[~RIGHT], want[~RIGHT], 1e-5)


@each_layout
@pytest.mark.parametrize("kind", ["layer", "stack-not-nested"])
def test_17_padded_positions_on_request(kind, packed, fused_qkv):
    """Elsewhere torch computes them in every mode, and so do ours, unless `query_padding_mask` says 0."""
    theirs, ours, _ = encoder(kind, fused_qkv)
    x = batch()
    want = trained(theirs, x, src_key_padding_mask=RIGHT)
    assert (want[RIGHT] != 0).all()
    same(evaluated(theirs, x, src_key_padding_mask=RIGHT), want, 1e-5)
    for got in modes(ours, x, src_key_padding_mask=RIGHT):
        same(got, want, 1e-5)
    for got in modes(ours, x, src_key_padding_mask=RIGHT, query_padding_mask=RIGHT):
        assert got[RIGHT].eq(0).all()
        same(got[~RIGHT], want[~RIGHT], 1e-5)


@pytest.mark.parametrize("build", [decoder_layer, decoder], ids=["layer", "stack"])
def test_17_padded_positions_of_a_decoder(build):
    """The same for decoders: computed in every mode, 0 on request."""
    theirs = build()
    ours = upgraded(theirs)
    x, memory = batch(), batch(S)
    call = {"tgt_key_padding_mask": RIGHT}
    want = trained(theirs, x, memory, **call)
    assert (want[RIGHT] != 0).all()
    same(evaluated(theirs, x, memory, **call), want, 1e-5)
    for got in modes(ours, x, memory, **call):
        same(got, want, 1e-5)
    for got in modes(ours, x, memory, **call, query_padding_mask=RIGHT):
        assert got[RIGHT].eq(0).all()
        same(got[~RIGHT], want[~RIGHT], 1e-5)


@each_layout
@each_encoder
def test_62_nan_in_padding_of_an_encoder(kind, packed, fused_qkv):
    """p#101967: NaN in padding reaches every position of its sample. Ours: none, if its own row is padded too."""
    theirs, ours, _ = encoder(kind, fused_qkv)
    x = batch().masked_fill(RIGHT[..., None], NAN)
    clean = x.nan_to_num()
    want = trained(theirs, clean, src_key_padding_mask=RIGHT)
    assert trained(theirs, x, src_key_padding_mask=RIGHT)[1:].isnan().all()
    for got in modes(ours, x, src_key_padding_mask=RIGHT, query_padding_mask=RIGHT):
        assert got[RIGHT].eq(0).all()
        same(got[~RIGHT], want[~RIGHT], 1e-5)
    for got in modes(ours, x, src_key_padding_mask=RIGHT):
        same(got[~RIGHT], want[~RIGHT], 1e-5)
    ours.train()(x, src_key_padding_mask=RIGHT, query_padding_mask=RIGHT).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


# The fused path of evaluation


class Lora(nn.Module):
    """An adapter as tools put it around a linear layer: it shows the weight of what it wraps."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def put(model, name, module):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@pytest.mark.parametrize("name", ["linear1", "linear2"])
@each_norm
def test_25_an_adapter_in_a_layer(norm_first, name):
    """huggingface/peft#761: active in training, passed by in evaluation."""
    theirs, ours, _ = encoder("layer", norm_first=norm_first)
    x = batch()
    without = trained(theirs, x)
    for model in (theirs, ours):
        torch.manual_seed(1)
        put(model, name, Lora(model.get_submodule(name)))
    want = trained(theirs, x)
    assert not torch.allclose(want, without, atol=0.01)
    same(evaluated(theirs, x), without, 1e-5)
    for got in modes(ours, x):
        same(got, want, 1e-5)


@pytest.mark.parametrize("name", CHILDREN)
def test_25_an_adapter_on_attention_in_a_layer(name):
    """The same for attention: torch never calls `out_proj`, and has no child for the other three."""
    theirs, ours, _ = encoder("layer")
    x, name = batch(), f"self_attn.{name}"
    without = trained(theirs, x)
    if name.endswith("out_proj"):
        put(theirs, name, Lora(theirs.get_submodule(name)))
        for mode in (trained, evaluated):
            same(mode(theirs, x), without, 1e-5)
    else:
        with pytest.raises(AttributeError, match="has no attribute"):
            theirs.get_submodule(name)
    adapter = Lora(ours.get_submodule(name))
    put(ours, name, adapter)
    merged, row = layer(), CHILDREN.index(name.rpartition(".")[2]) * D
    matrix = merged.self_attn.out_proj.weight if row == 3 * D else merged.self_attn.in_proj_weight[row : row + D]
    with torch.no_grad():
        matrix += adapter.up @ adapter.down
    want = trained(merged, x)
    assert not torch.allclose(want, without, atol=0.01)
    for got in modes(ours, x):
        same(got, want, 1e-5)
    ours(x).square().sum().backward()
    assert adapter.up.grad.abs().sum() > 0


REPLACED = {
    "rmsnorm": (("norm1", "norm2"), lambda: nn.RMSNorm(D)),
    "identity": (("norm2",), nn.Identity),
    "bias-free": (("linear1",), lambda: nn.Linear(D, M, bias=False)),
    "sequential": (("linear1",), lambda: nn.Sequential(nn.Linear(D, 17), nn.Linear(17, M))),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_63_parts_put_in_by_hand(kind, case):
    """p#116385, p#143293 in another guise: training runs, evaluation has no bias, or no weight, to look at."""
    theirs, _, _ = encoder(kind)
    names, build = REPLACED[case]
    for module in list(theirs.modules()):
        if isinstance(module, nn.TransformerEncoderLayer):
            for name in names:
                setattr(module, name, build())
    fill(theirs)
    ours = upgraded(theirs)
    x = batch()
    for call in ({}, {"src_key_padding_mask": RIGHT}):
        want = trained(theirs, x, **call)
        with pytest.raises(AttributeError):
            evaluated(theirs, x, **call)
        real = ~RIGHT if call and kind == "stack" else torch.ones(B, L, dtype=torch.bool)
        for got in modes(ours, x, **call):
            same(got[real], want[real], 1e-5)


def test_71_attention_in_a_stock_stack():
    """In evaluation torch's stack does not call a replaced attention; ours it calls, and then computes padding."""
    stock = stack()
    calls = []

    class Replacement(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            calls.append("replacement")
            return super().forward(*args, **kwargs)

    bypassed = copy.deepcopy(stock)
    for one in bypassed.layers:
        one.self_attn = Replacement(D, H, batch_first=True)
    x = batch()
    evaluated(bypassed, x, src_key_padding_mask=RIGHT)
    assert calls == []

    ours = upgraded(stock, where=lambda _, module: type(module) is nn.MultiheadAttention)
    assert [type(one) for one in ours.layers] == [nn.TransformerEncoderLayer] * 2
    assert [type(one.self_attn) for one in ours.layers] == [headwise.MultiheadAttention] * 2
    assert not any(one.self_attn._qkv_same_embed_dim for one in ours.layers)
    for call in ({}, {"src_key_padding_mask": RIGHT}, {"mask": causal_mask(L), "is_causal": True}):
        want = trained(stock, x, **call)
        same(evaluated(ours, x, **call), want, 1e-5)
    assert evaluated(stock.layers[0], x, src_key_padding_mask=HIDDEN)[1].isnan().all()
    assert evaluated(ours.layers[0], x, src_key_padding_mask=HIDDEN).isfinite().all()  # so ours was called


@pytest.mark.parametrize("where", ["layers.0", "layers.1.linear1", "layers.1.self_attn", "layers.0.norm2"])
def test_23_hooks_in_a_stack_with_padding(where, packed):
    """p#82919: in evaluation a hook is given nested tensors, which have no shape and no mean; it may count."""
    theirs, ours, _ = encoder("stack")
    x = batch()
    seen = []

    def look(_module, args, kwargs, out):
        out = out[0] if isinstance(out, tuple) else out
        seen.extend((*args, *kwargs.values(), out))

    for model in (theirs, ours):
        model.get_submodule(where).register_forward_hook(look, with_kwargs=True)
    evaluated(theirs, x, src_key_padding_mask=RIGHT)
    tensors = [one for one in seen if isinstance(one, torch.Tensor)]
    assert all(one.is_nested for one in tensors)
    for use in (lambda one: one.shape, lambda one: one.mean(), lambda one: one.numpy()):
        with pytest.raises(RuntimeError):
            use(tensors[0])
    for mode in (trained, evaluated):
        seen.clear()
        out = mode(ours, x, src_key_padding_mask=RIGHT)
        tensors = [one for one in seen if isinstance(one, torch.Tensor)]
        assert not any(one.is_nested for one in tensors)
        assert tensors[0].shape == (B, L, D)
        assert tensors[-1].shape[:2] == (B, L)
        assert tensors[-1].mean().isfinite()
        if where == "layers.0":
            same(mode(ours.layers[1], tensors[-1], src_key_padding_mask=RIGHT)[~RIGHT], out[~RIGHT], 1e-5)


def test_57_no_switch_for_the_fast_path():
    """p#111070: torch has one setter for the whole process, and nothing for a block of code or a module."""
    assert not hasattr(torch.backends.mha, "flags")  # as torch.backends.cudnn has, a context manager
    for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder):
        assert not any("fast" in word for word in inspect.signature(kind).parameters)
    models = [layer(), layer(norm_first=True)]
    ours = [upgraded(model) for model in models]
    x = batch()
    assert torch.backends.mha.get_fastpath_enabled()
    before = [evaluated(model, x, src_key_padding_mask=HIDDEN) for model in (*models, *ours)]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        after = [evaluated(model, x, src_key_padding_mask=HIDDEN) for model in (*models, *ours)]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert [one.isfinite().all().item() for one in before] == [False, False, True, True]
    assert all(one.isfinite().all() for one in after)
    for one, other in zip(before[2:], after[2:], strict=True):
        assert torch.equal(one, other)  # there is no other path to switch to


@pytest.mark.parametrize("masked", [True, False], ids=["masks", "no-masks"])
def test_61_memory_of_evaluation(masked, tmp_path):
    """p#166166, p#91305: torch's fused path holds the weights of every head; in training it does not."""
    length, heads, width = 307, 22, 44
    theirs = fill(nn.TransformerEncoderLayer(width, heads, M, 0.0, batch_first=True))
    ours = upgraded(theirs)
    x = torch.randn(2, length, width)
    padding = torch.arange(length) >= torch.tensor([length, length // 2])[:, None]
    call = {"src_mask": causal_mask(length), "src_key_padding_mask": padding} if masked else {}
    whole = 2 * heads * length * length * 4
    with torch.no_grad():
        want = theirs.train()(x, **call)
        slow = peak_bytes(lambda: theirs.train()(x, **call), tmp_path)
        fast = peak_bytes(lambda: theirs.eval()(x, **call), tmp_path)
        mine = peak_bytes(lambda: ours.eval()(x, **call), tmp_path)
        same(ours.eval()(x, **call), want, 1e-5)
    assert fast >= whole
    assert mine <= slow
    assert mine < whole / 8


@pytest.mark.parametrize("fused_qkv", [False, True], ids=["split", "fused"])
def test_61_memory_of_attention_in_evaluation(fused_qkv, tmp_path):
    """The same for attention alone without weights."""
    length, heads, width = 307, 22, 44
    theirs = fill(nn.MultiheadAttention(width, heads, batch_first=True))
    ours = upgraded(theirs, fused_qkv)
    x = torch.randn(2, length, width)
    peaks = {}
    with torch.no_grad():
        for name, module, training in (
            ("slow", theirs, True),
            ("fast", theirs, False),
            ("ours", ours, False),
        ):
            call = module.train(training)
            peaks[name] = peak_bytes(lambda call=call: call(x, x, x, need_weights=False), tmp_path)
    assert peaks["fast"] >= 2 * heads * length * length * 4
    assert peaks["ours"] <= peaks["slow"]


# Features and first values


def test_41_what_the_signatures_lack():
    """p#97899, p#107573, p#49791, p#124718, PR p#179747: shared key heads, positions, a cache, a scale, a head width.

    torch has none of it; our attention has all but a scale and an output width, which it refuses by name.
    """
    words = {"num_kv_heads", "head_dim", "out_dim", "scale", "positions", "rope", "qk_norm", "cache", "past_key_values"}
    layers = [nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer, nn.TransformerDecoder]
    for kind in (nn.MultiheadAttention, *layers, nn.Transformer):
        for function in (kind.__init__, kind.forward):
            assert not words & inspect.signature(function).parameters.keys()
    for kind in (headwise.TransformerEncoderLayer, headwise.TransformerDecoderLayer):
        for word in sorted(words):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'"):
                kind(D, H, **{word: 1})
    for word in ("out_dim", "scale", "rope", "past_key_values"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'"):
            headwise.MultiheadAttention(D, H, **{word: 1})
    options = {"num_kv_heads": 1, "head_dim": 6, "positions": "rotary", "qk_norm": True}
    ours = headwise.MultiheadAttention(D, H, batch_first=True, **options).eval()
    x, cache = batch(), headwise.StaticCache(max_length=L)
    with torch.no_grad():
        want, _ = ours(x, x, x, is_causal=True)
        got = [ours(token, token, token, is_causal=True, cache=cache)[0] for token in x.split(1, dim=1)]
    same(torch.cat(got, dim=1), want, 1e-5)

    q, (k, v) = torch.randn(B, 6, L, 11), torch.randn(2, B, 3, S, 11)
    got = headwise.attention(q, k, v, scale=0.3)
    wide_k, wide_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    same(got, nn.functional.scaled_dot_product_attention(q, wide_k, wide_v, scale=0.3), 1e-5)


def test_42_one_width_for_everything():
    """p#103668, VainF/Torch-Pruning#196, p#111932: a head cannot be taken away, a memory is as wide as the target."""
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        nn.MultiheadAttention(16, 3)
    with pytest.raises(
        ValueError,
        match="embed_dim must be a multiple of num_heads 3, such as 15 or 18",
    ):
        headwise.MultiheadAttention(16, 3)
    x, memory = batch(), batch(S, 17)
    theirs = decoder_layer()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        theirs(x, memory)
    with pytest.raises(ValueError, match=r"key must be 22 wide; got 17 \(query \(3, 5, 22\), key \(3, 7, 17\)"):
        upgraded(theirs)(x, memory)

    block = fill(headwise.DecoderBlock(D, H, memory_dim=17))
    out = block(x, memory)
    assert out.shape == x.shape
    assert not torch.allclose(out, block(x, memory * 2))
    for name, parameter in block.multihead_attn.named_parameters():
        wide = 17 if name in ("k_proj.weight", "v_proj.weight") else D
        assert parameter.shape[-1] == wide, name


def test_42_a_head_cannot_be_cut_off():
    """Rows of a head taken out of the projections: torch's call fails in a reshape, ours as well; not promised."""
    theirs = fill(nn.MultiheadAttention(D, H, batch_first=True))
    ours = upgraded(theirs)
    keep = D // H
    theirs.in_proj_weight = nn.Parameter(theirs.in_proj_weight.detach().view(3, D, D)[:, :keep].reshape(-1, D))
    theirs.in_proj_bias = nn.Parameter(theirs.in_proj_bias.detach().view(3, D)[:, :keep].flatten())
    theirs.num_heads = 1
    x = batch()
    with pytest.raises(RuntimeError):
        theirs(x, x, x)
    for name in ("q_proj", "k_proj", "v_proj"):
        child = getattr(ours, name)
        child.weight, child.bias = nn.Parameter(child.weight[:keep]), nn.Parameter(child.bias[:keep])
    ours.num_heads = 1
    with pytest.raises(RuntimeError):
        ours(x, x, x)


def test_43_weights_of_every_layer():
    """p#99304, p#32590: torch's layers ask for no weights, and a hook on their attention sees None."""
    theirs, x, memory = transformer(), batch(), batch(S)
    seen = []
    hooks = [
        module.register_forward_hook(lambda _module, _args, out: seen.append(out[1]))
        for module in theirs.modules()
        if isinstance(module, nn.MultiheadAttention)
    ]
    want = trained(theirs, memory, x)
    assert seen == [None] * 6
    for hook in hooks:
        hook.remove()
    with pytest.raises(TypeError, match="unexpected keyword argument 'need_weights'"):
        theirs(memory, x, need_weights=True)

    ours = upgraded(theirs)
    for training, average in itertools.product((True, False), (True, False)):
        out, (own, both) = ours.train(training)(memory, x, need_weights=True, average_attn_weights=average)
        same(out.detach(), want, 1e-5)
        heads = () if average else (H,)
        assert [one.shape for one in own] == [(B, *heads, S, S)] * 2
        assert [(one.shape, two.shape) for one, two in both] == [((B, *heads, L, L), (B, *heads, L, S))] * 2
        for one in (*own, *itertools.chain(*both)):
            same(one.sum(dim=-1), torch.ones(one.shape[:-1]), 1e-5)
        first = theirs.encoder.layers[0].self_attn
        same(own[0], first(memory, memory, memory, average_attn_weights=average)[1], 1e-5)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [(layer, 1), (stack, 1), (decoder_layer, 2), (decoder, 2), (transformer, 2)],
    ids=["encoder layer", "encoder", "decoder layer", "decoder", "transformer"],
)
def test_43_each_of_the_five_gives_weights(build, inputs):
    """And a hook on `attend`, the child of ours that sees the final queries, keys and mask, gives each head's."""
    theirs, given = build(), [batch(), batch(S)][:inputs]
    with pytest.raises(TypeError, match="unexpected keyword argument 'need_weights'"):
        theirs(*given, need_weights=True)
    ours, found = upgraded(theirs), []

    def look(_module, args):
        found.append(headwise.attention_weights(*args[:2], mask=args[3]))

    for module in ours.modules():
        if isinstance(module, headwise.MultiheadAttention):
            module.attend.register_forward_pre_hook(look)
    out, weights = ours(*given, need_weights=True, average_attn_weights=False)
    flat = torch.utils._pytree.tree_leaves(weights)
    assert len(flat) == len(found) == sum(isinstance(m, headwise.MultiheadAttention) for m in ours.modules())
    for one, other in zip(flat, found, strict=True):
        same(one, other, 1e-5)
    same(out, theirs(*given), 1e-5)


@pytest.mark.parametrize("name", ["Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_44_first_values_of_layers(name):
    """p#166378, p#57117: in a layer `out_proj` keeps Linear's spread, in nn.Transformer it is drawn anew. Kept."""
    wide = 64
    kwargs = {"num_encoder_layers": 1, "num_decoder_layers": 1} if name == "Transformer" else {}
    states = []
    for home in (nn, headwise):
        torch.manual_seed(0)
        states.append(getattr(home, name)(wide, 4, dim_feedforward=M, batch_first=True, **kwargs).state_dict())
    theirs, ours = states
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    spread = {"Transformer": (1 / wide) ** 0.5}.get(name, (3 * wide) ** -0.5)
    outs = [value.std().item() for key, value in theirs.items() if key.endswith("out_proj.weight")]
    assert outs == [pytest.approx(spread, rel=0.05)] * len(outs)


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_45_copies_start_equal(name):
    """p#86274, p#120396, p#72253: kept as torch has it; `independent_init=True` draws each layer anew."""

    def weights(stack):
        return [list(one.state_dict().values()) for one in stack.layers]

    torch.manual_seed(0)
    theirs = getattr(nn, name)(getattr(nn, name + "Layer")(D, H, M, batch_first=True), 3)
    torch.manual_seed(0)
    ours = getattr(headwise, name)(getattr(headwise, name + "Layer")(D, H, M, batch_first=True), 3)
    for first, second, third in zip(*weights(theirs), strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.state_dict().items())

    torch.manual_seed(0)
    apart = getattr(headwise, name)(
        getattr(headwise, name + "Layer")(D, H, M, batch_first=True), 3, independent_init=True
    )
    drawn = 0
    for first, second, third in zip(*weights(apart), strict=True):
        if first.std() > 0:  # not the ones and zeros of norms and biases
            drawn += 1
            assert not torch.equal(first, second)
            assert not torch.equal(second, third)
            if first.dim() > 1:
                assert first.std().item() == pytest.approx(second.std().item(), rel=0.25)
    assert drawn >= 4


@pytest.mark.parametrize(
    ("heads", "kwargs", "reason"),
    [
        (2, {}, "batch_first was not True"),
        (11, {"batch_first": True}, "num_heads is odd"),
        (2, {"batch_first": True, "norm_first": True}, "norm_first was True"),
    ],
    ids=["defaults", "odd heads", "norm_first"],
)
def test_47_constructors_warn(heads, kwargs, reason):
    """p#137173: with the defaults, with odd heads, with norm_first; about a path that the caller never chose."""
    with pytest.warns(UserWarning, match=f"enable_nested_tensor is True, but .*{reason}"):
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, heads, M, **kwargs), 2)
    with pytest.warns(UserWarning, match=f"enable_nested_tensor is True, but .*{reason}"):
        nn.Transformer(D, heads, 1, 1, M, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = headwise.TransformerEncoder(headwise.TransformerEncoderLayer(D, heads, M, **kwargs), 2)
        headwise.Transformer(D, heads, 1, 1, M, **kwargs)
    assert not made.use_nested_tensor


def test_47_batch_first_forgotten_in_a_layer():
    """p#64888, om-ai-lab/OmDet#19: (B, L, D) into the default layer mixes samples in both; a wrong batch is named."""
    theirs = layer(batch_first=False)
    ours = upgraded(theirs)
    x = batch()
    other = x.clone()
    other[2] += 1
    for model in (theirs, ours):
        assert not torch.allclose(model(x)[0], model(other)[0])
    same(ours(x), theirs(x), 1e-5)
    # two lengths that were meant for batch_first=True
    theirs = decoder_layer(batch_first=False)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        theirs(x, batch(S))
    with pytest.raises(
        ValueError, match=r"key must have the query's batch size 5 \(read as \(L, B, D\); these sizes fit "
    ):
        upgraded(theirs)(x, batch(S))


def test_59_other_shapes_in_a_layer():
    """Four dimensions, masks of one row and padding with a batch of one for an unbatched input are refused by both."""
    theirs, ours, _ = encoder("layer")
    x = batch()
    row = torch.tensor([[False, False, True, False, True]])
    wrong = [
        (x[None], {}, "src must be a tensor, 3-D, or 2-D"),
        (x, {"src_mask": row}, r"attn_mask must .*\(1, 5\)"),
        (x[0], {"src_key_padding_mask": row}, r"key_padding_mask must .*\(1, 5\)"),
    ]
    for given, call, message in wrong:
        with pytest.raises((AssertionError, RuntimeError)):
            trained(theirs, given, **call)
        with pytest.raises(ValueError, match=message):
            trained(ours, given, **call)
    want = trained(theirs, x, src_mask=row.expand(L, L))
    for got in modes(ours, x, src_mask=row[None, None]):
        same(got, want, 1e-5)


def test_60_keys_that_were_made_before():
    """PR p#21288: static_k and static_v are arguments of torch's function only, which projects keys all the same.

    No module takes them, here either; `headwise.attention` takes keys and values as they are.
    """
    theirs = fill(nn.MultiheadAttention(D, H, batch_first=True))
    ours = upgraded(theirs)
    assert {"static_k", "static_v"} <= inspect.signature(multi_head_attention_forward).parameters.keys()
    x, memory = batch(), batch(S)
    keys, values = torch.randn(2, B, H, S, D // H)
    static = {"static_k": keys.flatten(0, 1), "static_v": values.flatten(0, 1)}
    for module in (theirs, ours):
        with pytest.raises(TypeError, match="unexpected keyword argument 'static_k'"):
            module(x, memory, memory, **static)

    inputs = (D, H, theirs.in_proj_weight, theirs.in_proj_bias, None, None, False, 0.0)
    out = (theirs.out_proj.weight, theirs.out_proj.bias)
    x_LBD = x.transpose(0, 1)
    nothing = torch.full((S, B, D), NAN)  # is projected, in vain
    narrow = nothing[..., :3]  # and cannot be
    want, _ = multi_head_attention_forward(x_LBD, nothing, nothing, *inputs, *out, need_weights=False, **static)
    with pytest.raises(RuntimeError):
        multi_head_attention_forward(x_LBD, narrow, narrow, *inputs, *out, need_weights=False, **static)

    query = ours.q_proj(x).unflatten(2, (H, D // H)).transpose(1, 2)
    got = ours.out_proj(headwise.attention(query, keys, values).transpose(1, 2).flatten(2))
    same(got, want.transpose(0, 1), 1e-5)


def test_68_the_query_projection_by_itself():
    """p#92990: torch packs the three whenever they are alike, so one cannot be frozen or have its own learning rate."""
    theirs = nn.MultiheadAttention(D, H, kdim=D, vdim=D, batch_first=True)
    assert theirs.in_proj_weight.shape == (3 * D, D)
    assert theirs.q_proj_weight is None
    theirs = fill(theirs)
    ours = upgraded(theirs)
    names = [name for name, _ in ours.named_parameters()]
    assert names[:2] == ["q_proj.weight", "q_proj.bias"]
    x = batch()
    ours.k_proj.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    rest = [p for name, p in ours.named_parameters() if not name.startswith("q_proj") and p.requires_grad]
    optimizer = torch.optim.SGD([{"params": ours.q_proj.parameters(), "lr": 0.5}, {"params": rest}], lr=0.25)
    for model in (theirs, ours):
        model(x, x, x)[0].square().sum().backward()
    optimizer.step()
    rates = {"q_proj": 0.5, "k_proj": 0.0, "v_proj": 0.25}
    for (name, rate), want in zip(rates.items(), theirs.in_proj_weight.grad.chunk(3), strict=True):
        moved = before[f"{name}.weight"] - getattr(ours, name).weight.detach()
        same(moved, rate * want, 1e-5, name)


# Section 2 of the study: reports on layers and stacks that no longer reproduce


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("kind", ENCODERS)
@each_norm
def test_regressions_an_encoder_in_evaluation(norm_first, kind, bias):
    """p#97111 (output cut off), p#116385, p#88669 (no bias), p#88806, p#92554, p#100709, p#63271: with bool masks only.

    In evaluation torch gives what it gives in training at every real position, and the length of the input even if
    no sample is that long; so do ours, in every mode.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)
        theirs, ours, word = encoder(kind, bias=bias, norm_first=norm_first)
    x = batch()
    short = torch.arange(L) >= torch.tensor([3, 2, 3])[:, None]
    every_head = torch.rand(B * H, L, L) < 0.4
    every_head[..., 0] = False
    for call in (
        {},
        {word: causal_mask(L)},
        {word: every_head},
        {"src_key_padding_mask": RIGHT},
        {"src_key_padding_mask": short},
        {word: causal_mask(L), "src_key_padding_mask": short},
    ):
        real = ~call.get("src_key_padding_mask", torch.zeros(B, L, dtype=torch.bool))
        want = trained(theirs, x, **call)
        for got in (evaluated(theirs, x, **call), *modes(ours, x, **call)):
            assert got.shape == x.shape
            same(got[real], want[real], 1e-5)


def test_regressions_gradients_of_an_encoder():
    """What the layers learn from is the same too, where no position is padded."""
    theirs, ours, word = encoder("stack")
    x = batch()
    for model in (theirs, ours):
        model(x, **{word: causal_mask(L)}).square().sum().backward()
    for number in range(2):
        pairs = [(model.layers[number].self_attn, model.layers[number].linear1) for model in (theirs, ours)]
        wanted = torch_grads(pairs[0][0])
        for name, grad in torch_grads(pairs[1][0]).items():
            same(grad, wanted[name], 1e-4, name)
        same(pairs[1][1].weight.grad, pairs[0][1].weight.grad, 1e-4)


# Section 4 of the study: what a replacement inside torch's layers must know


def test_notes_what_torchs_layers_read_of_an_attention():
    """The names, and that ours has what is asked for before `_qkv_same_embed_dim` ends the questions."""
    text = inspect.getsource(nn.modules.transformer)
    read = set(re.findall(r"self_attn\.(\w+)", text))
    fast_path_only = {"embed_dim", "in_proj_weight", "merge_masks", "out_proj"}
    assert read == fast_path_only | {"_qkv_same_embed_dim", "batch_first", "in_proj_bias", "num_heads"}
    for fused_qkv in (False, True):
        ours = headwise.MultiheadAttention(D, H, batch_first=True, fused_qkv=fused_qkv)
        assert all(hasattr(ours, name) for name in read - {"merge_masks"})
        assert ours._qkv_same_embed_dim is False


def test_notes_not_a_subclass_of_torchs():
    """Tools that key on torch's class, or a subclass of it, treat it in a way of their own; ours is neither."""
    assert not issubclass(headwise.MultiheadAttention, nn.MultiheadAttention)
    for name in ("TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer", "TransformerDecoder"):
        assert not issubclass(getattr(headwise, name), getattr(nn, name))
    assert not issubclass(headwise.Transformer, nn.Transformer)


# docs/pitfalls.md

ROWS = {  # by section of the study
    "Masks, NaN, causality": "01 03 04 05 06 07 09 10 11 12 13 14 15 16 17 62",
    "The fast path of evaluation": "25 28 63 71 23 57 61",
    "Tools that look at modules": "22 26 27 28b 29 30 58 33 32 34 35 38 39 46 56 50",
    "Arguments, first values, cost": "18 19 41 42 43 44 45 47 59 60 68 51",
}


def page_sections():
    """The page by heading."""
    text = (ROOT / "docs" / "pitfalls.md").read_text("utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_has_every_row():
    """Once, in the table of its section, in the study's order, with four cells that say something."""
    sections = page_sections()
    assert list(sections) == [*ROWS, "Not promised"]
    for heading, rows in ROWS.items():
        cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in sections[heading].splitlines() if line.startswith("|")]
        assert [row[0].strip() for row in cells] == ["row", "---", *rows.split()]
        assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in cells)
    every = " ".join(ROWS.values()).split()
    assert len(every) == len(set(every)) == 51
    named = re.findall(r"^- ([\d, b]+):", sections["Not promised"], flags=re.MULTILINE)
    assert named
    assert {number for one in named for number in one.split(", ")} <= set(every)


def test_the_page_names_tests_that_exist():
    """Each row a test of its own number, and each test with a number is on the page."""
    files = {path.name: ast.parse(path.read_text("utf-8")) for path in (ROOT / "tests" / "parity").glob("test_*.py")}
    there = {
        f"{name}::{node.name}"
        for name, tree in files.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    sections = page_sections()
    named = []
    for heading in ROWS:
        for line in sections[heading].splitlines():
            if re.match(r"\| \d", line):
                tests = re.findall(r"`(test_\w+\.py::test_\w+)`", line)
                row = line.split("|")[1].strip()
                assert tests, row
                assert [one for one in tests if f"::test_{row}_" not in one] == []
                named += tests
    assert len(named) == len(set(named))
    assert sorted(set(named) - there) == []
    numbered = {one for one in there if re.match(r"test_pitfalls\w*\.py::test_\d+b?_", one)}
    assert sorted(numbered - set(named)) == []
