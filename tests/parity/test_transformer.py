"""torch's five Transformer classes beside ours: constructors, first values, checkpoints, calls, and our rules.

Where torch gives several answers to one call, or NaN, ours are compared with the one that is well defined; the section
"Where torch is wrong" holds torch's side of each such case, so that we notice when it is mended.
"""

from __future__ import annotations

import copy
import inspect
import itertools

import numpy as np
import pytest
import torch
from tests.compiling import Counter
from tests.parity.pair import LAYOUTS, causal_mask, fill, same
from torch import nn
from torch.nn import functional as F

import headwise
from headwise import masks
from headwise.layers import packing

B, L, S, D, H, M = 3, 5, 7, 22, 2, 13
INF = float("inf")
TOL = 1e-10  # float64
F64 = torch.float64
ENCODER_LAYER, DECODER_LAYER = "TransformerEncoderLayer", "TransformerDecoderLayer"
ENCODER, DECODER, TRANSFORMER = "TransformerEncoder", "TransformerDecoder", "Transformer"
KINDS = (ENCODER_LAYER, DECODER_LAYER, ENCODER, DECODER, TRANSFORMER)
FLAGS = {
    ENCODER_LAYER: ("is_causal",),
    ENCODER: ("is_causal",),
    DECODER_LAYER: ("tgt_is_causal",),
    DECODER: ("tgt_is_causal",),
    TRANSFORMER: ("src_is_causal", "tgt_is_causal"),
}
# The masks of each, as (mask, padding, queries, keys), those of self-attention first.
_MEMORY = ("memory_mask", "memory_key_padding_mask", L, S)
_TARGET = ("tgt_mask", "tgt_key_padding_mask", L, L)
SLOTS = {
    ENCODER_LAYER: (("src_mask", "src_key_padding_mask", L, L),),
    ENCODER: (("mask", "src_key_padding_mask", L, L),),
    DECODER_LAYER: (_TARGET, _MEMORY),
    DECODER: (_TARGET, _MEMORY),
    TRANSFORMER: (("src_mask", "src_key_padding_mask", S, S), _TARGET, _MEMORY),
}

kinds = pytest.mark.parametrize("kind", KINDS)
layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
trainings = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning"
)


def build(lib, kind, last=True, **options):
    """One of `nn` or of `headwise`: two encoder layers, two decoder layers, two and one in the whole."""
    words = {"dropout": 0.0, "dim_feedforward": M, "dtype": F64} | options
    if kind == TRANSFORMER:
        return lib.Transformer(D, H, 2, 1, **words)
    if kind in (ENCODER_LAYER, DECODER_LAYER):
        return getattr(lib, kind)(D, H, **words)
    norm = nn.LayerNorm(D, dtype=words["dtype"]) if last else None
    return getattr(lib, kind)(getattr(lib, f"{kind}Layer")(D, H, **words), 2, norm)


def mended(theirs):
    """torch's, with the activation that its decoder layers were given: see test_torch_copies_lose_the_activation."""
    for layer in theirs.modules():
        if isinstance(layer, nn.TransformerDecoderLayer) and "activation" in layer._modules:
            vars(layer).pop("activation", None)
    return theirs


def couple(kind, fused_qkv=False, **options):
    """torch's and ours, same random parameters."""
    theirs = mended(fill(build(nn, kind, **options)))
    ours = build(headwise, kind, fused_qkv=fused_qkv, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def ours_alone(kind, seed=1, **options):
    return fill(build(headwise, kind, **({"batch_first": True} | options)), seed)


def draw(*shape, seed=3):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def inputs_of(kind, batch_first=True):
    x, memory = draw(B, L, D), draw(B, S, D, seed=4)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    return {ENCODER_LAYER: (x,), ENCODER: (x,), TRANSFORMER: (memory, x)}.get(kind, (x, memory))


def blocked(queries, keys):
    """True may not attend; key 0 is always visible, and no padding."""
    return ((torch.arange(queries)[:, None] + 2 * torch.arange(keys)) % 5 == 3) & (torch.arange(keys) > 0)


def per_head(queries, keys):
    generator = torch.Generator().manual_seed(8)
    return (torch.rand(B * H, queries, keys, generator=generator) < 0.4) & (torch.arange(keys) > 0)


def padding(length):
    return torch.arange(length) >= torch.tensor([length, length - 2, 1])[:, None]


def minus_inf(block):
    return torch.zeros(block.shape, dtype=F64).masked_fill(block, -INF)


def causal_float(queries, keys):
    return nn.Transformer.generate_square_subsequent_mask(queries, dtype=F64) if queries == keys else None


# name: (mask of queries and keys, padding of keys), for every attention of a module
MASKS = {
    "none": (lambda q, k: None, lambda k: None),
    "bool": (blocked, lambda k: None),
    "float": (lambda q, k: draw(q, k) + minus_inf(blocked(q, k)), lambda k: None),
    "causal float": (causal_float, lambda k: None),
    "per head bool": (per_head, lambda k: None),
    "per head float": (lambda q, k: draw(B * H, q, k), lambda k: None),
    "bool padding": (lambda q, k: None, padding),
    "float padding": (lambda q, k: None, lambda k: draw(B, k) + minus_inf(padding(k))),
    "both bool": (blocked, padding),
    "both float": (lambda q, k: draw(q, k), lambda k: minus_inf(padding(k))),
}


def masked(kind, name):
    make_mask, make_padding = MASKS[name]
    words = {}
    for mask, pad, queries, keys in SLOTS[kind]:
        words |= {mask: make_mask(queries, keys), pad: make_padding(keys)}
    return {word: value for word, value in words.items() if value is not None}


def gradients(module):
    """Every parameter's gradient under torch's names, in either layout."""
    parameters = list(module.parameters())
    values = [its.data for its in parameters]
    for its in parameters:
        its.data = torch.zeros_like(its) if its.grad is None else its.grad
    found = module.state_dict()
    for its, value in zip(parameters, values, strict=True):
        its.data = value
    return found


def compare(theirs, ours, inputs, words, rows=None, what="", our_words=None):
    """Outputs, and all gradients; `rows` of the output, laid out as it is, are left out of both."""
    found = []
    for module, given in ((theirs, words), (ours, words if our_words is None else our_words)):
        module.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = module(*leaves, **given)
        cotangent = draw(*out.shape, seed=5)
        if rows is not None:
            out, cotangent = out[~rows], cotangent[~rows]
        out.backward(cotangent)
        grads = {f"input {n}": x.grad for n, x in enumerate(leaves) if x.grad is not None}
        found.append({"output": out.detach()} | grads | gradients(module))
    its, mine = found
    assert list(mine) == list(its)
    for name, want in its.items():
        assert want.isfinite().all(), f"{what} {name}: torch's is not well defined"
        same(mine[name], want, TOL, f"{what} {name}")


# --- Constructors, names, first values --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["__init__", "forward"])
@kinds
def test_signature(kind, function):
    """torch's arguments in torch's order with torch's defaults; what is ours alone comes by keyword only."""
    ours = inspect.signature(getattr(getattr(headwise, kind), function)).parameters
    theirs = inspect.signature(getattr(getattr(nn, kind), function)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        default = "relu" if parameter.default is F.relu else parameter.default
        assert (ours[name].default, ours[name].kind) == (default, parameter.kind), name
    assert all(one.kind is one.KEYWORD_ONLY for one in list(ours.values())[len(theirs) :])
    assert all(one.default is not one.empty for one in list(ours.values())[len(theirs) :])


def test_by_position():
    """Every argument of constructors and calls without its name."""
    layer = (D, H, M, 0.0, "gelu", 0.1, True, True, False, "cpu", F64)
    whole = (D, H, 2, 1, M, 0.0, "gelu", None, None, 0.1, True, True, False, "cpu", F64)
    for kind, given in ((ENCODER_LAYER, layer), (DECODER_LAYER, layer), (TRANSFORMER, whole)):
        theirs = fill(getattr(nn, kind)(*given))
        ours = getattr(headwise, kind)(*given)
        ours.load_state_dict(theirs.state_dict())
        words = masked(kind, "both bool")
        names = list(inspect.signature(theirs.forward).parameters)
        call = [*inputs_of(kind), *(words.get(name, False) for name in names if "mask" in name or "causal" in name)]
        same(ours(*call), theirs(*call), TOL, kind)


CONSTRUCTIONS = {
    "default": {},
    "batch first": {"batch_first": True},
    "pre-norm": {"norm_first": True},
    "pre-norm, batch first": {"norm_first": True, "batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "gelu": {"activation": "gelu", "batch_first": True},
    "callable": {"activation": torch.tanh, "batch_first": True},
    "module": {"activation": nn.SiLU()},
    "eps, float32": {"layer_norm_eps": 0.3, "dtype": torch.float32, "norm_first": True},
}
constructions = pytest.mark.parametrize("construction", CONSTRUCTIONS)


def identical(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(ours[name], value), name


@layouts
@constructions
@kinds
def test_same_seed_same_state(kind, construction, fused_qkv):
    """Keys, order and numbers; which child is where; and what is drawn next."""
    options = CONSTRUCTIONS[construction]
    torch.manual_seed(7)
    theirs = build(nn, kind, **options)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    ours = build(headwise, kind, fused_qkv=fused_qkv, **options)
    assert torch.equal(torch.get_rng_state(), after)
    identical(ours.state_dict(), theirs.state_dict())
    its = [name for name, _ in theirs.named_modules()]
    inside = [name for name, _ in ours.named_modules() if name in its]
    assert inside == its
    assert {name for name, _ in ours.named_modules()} - {*its} == {
        f"{name}.{child}"
        for name, module in ours.named_modules()
        if isinstance(module, headwise.MultiheadAttention)
        for child in ("attn_dropout", "attend", *(() if fused_qkv else ("q_proj", "k_proj", "v_proj")))
    }
    if fused_qkv:  # then torch's optimizer states fit
        assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


@kinds
def test_checkpoints_strictly_both_ways(kind):
    for options, fused_qkv in itertools.product(({}, {"bias": False}), (True, False)):
        theirs, ours = couple(kind, fused_qkv, **options)
        identical(ours.state_dict(), theirs.state_dict())
        assert list(theirs.load_state_dict(fill(ours, seed=4).state_dict())) == [[], []]
        identical(ours.state_dict(), theirs.state_dict())
        same(ours(*inputs_of(kind, False)), theirs(*inputs_of(kind, False)), TOL)
        state = dict(theirs.state_dict())
        gone = next(name for name in state if name.endswith("self_attn.in_proj_weight"))
        del state[gone]
        with pytest.raises(RuntimeError, match=f"Missing key.*{gone}"):
            ours.load_state_dict(state)


@kinds
def test_attributes(kind):
    """What torch's hold beside children, other code reads."""
    theirs, ours = couple(kind, activation="gelu", batch_first=True)
    known = set(vars(nn.Module())) | {"activation_relu_or_gelu"}  # for the path in eval, which is not there
    for name in vars(theirs).keys() - known:
        assert getattr(ours, name) == getattr(theirs, name), name


class Foreign(nn.Module):
    """An encoder or decoder of the user's own, with parameters of one, two and three dimensions."""

    def __init__(self, shared=None):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, dtype=F64)
        self.shared = shared
        self.scale = nn.Parameter(torch.ones(D, dtype=F64))
        self.mix = nn.Parameter(torch.ones(D, D, dtype=F64))

    def forward(self, x, *memory, **words):
        return x @ self.mix * self.scale + sum(m.mean() for m in memory)


def _shared_attention(lib):
    attention = lib.MultiheadAttention(D, H, dtype=F64)
    return {"custom_encoder": Foreign(attention), "custom_decoder": Foreign(attention)}


def _one_for_both(lib):
    one = Foreign(lib.MultiheadAttention(D, H, add_bias_kv=True, dtype=F64))
    return {"custom_encoder": one, "custom_decoder": one}


CUSTOM = {
    "foreign encoder": lambda lib: {"custom_encoder": Foreign()},
    "foreign decoder": lambda lib: {"custom_decoder": Foreign()},
    "a shared attention": _shared_attention,
    "one module for both": _one_for_both,
    "torch's encoder": lambda lib: {"custom_encoder": build(nn, ENCODER)},
    "our encoder": lambda lib: {"custom_encoder": build(lib, ENCODER, batch_first=True)},
    "our decoder": lambda lib: {"custom_decoder": build(lib, DECODER, bias=False)},
    "unlike widths": lambda lib: {"custom_encoder": Foreign(lib.MultiheadAttention(D, H, kdim=11, vdim=17, dtype=F64))},
    "unlike widths and bias_kv": lambda lib: {
        "custom_encoder": Foreign(lib.MultiheadAttention(D, H, kdim=11, add_bias_kv=True, dtype=F64))
    },
}


@pytest.mark.parametrize("custom", CUSTOM)
def test_same_seed_with_custom_parts(custom):
    """`_reset_parameters` draws each matrix of a custom part once, where torch does."""
    found = []
    for lib in (nn, headwise):
        torch.manual_seed(7)
        found.append((build(lib, TRANSFORMER, **CUSTOM[custom](lib)), torch.get_rng_state()))
    (theirs, its_state), (ours, my_state) = found
    assert torch.equal(my_state, its_state)
    identical(ours.state_dict(), theirs.state_dict())


def test_a_foreign_encoder_and_decoder_are_called():
    parts = {"custom_encoder": Foreign(), "custom_decoder": Foreign()}
    theirs, ours = (build(lib, TRANSFORMER, **copy.deepcopy(parts)) for lib in (nn, headwise))
    ours.load_state_dict(fill(theirs).state_dict())
    assert ours.encoder is not ours.decoder
    same(ours(*inputs_of(TRANSFORMER, False)), theirs(*inputs_of(TRANSFORMER, False)), TOL)


def test_reset_again():
    theirs, ours = couple(TRANSFORMER)
    for module in (theirs, ours):
        torch.manual_seed(11)
        module._reset_parameters()
    identical(ours.state_dict(), theirs.state_dict())


def test_generate_square_subsequent_mask():
    for words in ({}, {"dtype": torch.bfloat16}, {"device": "cpu", "dtype": F64}):
        theirs, ours = (lib.Transformer.generate_square_subsequent_mask(L, **words) for lib in (nn, headwise))
        assert (ours.dtype, ours.device, ours.shape) == (theirs.dtype, theirs.device, theirs.shape)
        assert torch.equal(ours, theirs)
    assert headwise.Transformer(D, H, 1, 1).generate_square_subsequent_mask(3).tolist()[0] == [0, -INF, -INF]


def test_sizes_from_numpy():
    """Configurations hold numpy integers now and then."""
    for lib in (nn, headwise):
        layer = lib.TransformerEncoderLayer(np.int64(D), np.int64(H), np.int64(M))
        assert lib.TransformerEncoder(layer, np.int64(2))(torch.randn(L, B, D)).shape == (L, B, D)


# --- Calls ------------------------------------------------------------------------------------------------------------


def encodes_at_once(kind, options):
    """Whether torch computes encoder layers by one kernel, in eval without gradients."""
    usual = options.get("activation", "relu") in ("relu", "gelu") and options.get("bias", True)
    return "Decoder" not in kind and usual and options.get("batch_first", False)


@pytest.mark.thin(2)
@constructions
@kinds
def test_calls(kind, construction):
    """All masks, in train, in eval with gradients, and in eval without, where torch runs another kernel."""
    options = CONSTRUCTIONS[construction]
    fused_qkv = len(construction) % 2 == 0
    theirs, ours = couple(kind, fused_qkv, **(options | {"dtype": F64}))
    batch_first = options.get("batch_first", False)
    inputs = inputs_of(kind, batch_first)
    nests = getattr(ours, "use_nested_tensor", False) or getattr(
        getattr(ours, "encoder", None), "use_nested_tensor", False
    )
    for name in MASKS:
        words = masked(kind, name)
        rows = padding(L) if kind == ENCODER and nests and name == "bool padding" else None
        training = len(name) % 2 == 0  # both modes come up for each mask, in one construction or another
        training ^= len(construction) % 3 == 0
        compare(theirs.train(training), ours.train(training), inputs, words, rows, f"{name}, training {training}:")
        theirs.eval()
        ours.eval()
        if encodes_at_once(kind, options) and "float" in name and name != "causal float":
            continue  # torch takes these for bool ones, see below
        with torch.no_grad():
            same(ours(*inputs, **words), theirs(*inputs, **words), TOL, f"{name}, no gradients")


@pytest.mark.parametrize("flag", [None, True, False])
@trainings
@norms
@kinds
def test_causal_mask_with_each_hint(kind, norm_first, training, flag):
    """A causal float mask is what it is, with torch's hint, without it, and where torch looks for itself."""
    theirs, ours = couple(kind, norm_first=norm_first, batch_first=True)
    words = masked(kind, "causal float")
    flags = dict.fromkeys(FLAGS[kind], flag)
    their_flags = {} if "Layer" in kind and flag is None else flags  # which torch's layers do not take
    given = inputs_of(kind)
    compare(theirs.train(training), ours.train(training), given, words | their_flags, our_words=words | flags)
    alone = dict.fromkeys(FLAGS[kind], True)
    compare(theirs, ours, inputs_of(kind), words, our_words=alone)


@pytest.mark.parametrize("construction", ["default", "pre-norm, batch first", "no bias"])
@kinds
def test_unbatched(kind, construction):
    """One sample without B: its row of a padding mask, its heads of a mask for each head."""
    theirs, ours = couple(kind, **CONSTRUCTIONS[construction])
    inputs = [x[1] for x in inputs_of(kind)]
    for name in MASKS:
        words = masked(kind, name)
        for word, value in words.items():
            words[word] = value[1] if "padding" in word else value[H : 2 * H] if value.dim() == 3 else value
        compare(theirs.eval(), ours.eval(), inputs, words, what=name)
        with torch.no_grad():
            same(ours(*inputs, **words), theirs(*inputs, **words), TOL, name)


@kinds
def test_lengths_first_is_the_same(kind):
    """(L, B, D) is (B, L, D) turned, masks and weights unchanged."""
    first, last = ours_alone(kind), ours_alone(kind, batch_first=False)
    words = masked(kind, "both bool") | {"need_weights": True}
    (out, weights), (turned, same_weights) = first(*inputs_of(kind), **words), last(*inputs_of(kind, False), **words)
    same(turned.transpose(0, 1), out, TOL)
    for mine, its in zip(flat(same_weights), flat(weights), strict=True):
        same(mine, its, TOL)


def test_lengths_first_with_query_padding():
    for kind in (ENCODER_LAYER, DECODER_LAYER, ENCODER, DECODER):
        first, last = ours_alone(kind), ours_alone(kind, batch_first=False)
        words = masked(kind, "both bool") | {"query_padding_mask": padding(L), "need_weights": True}
        (out, weights), (turned, again) = first(*inputs_of(kind), **words), last(*inputs_of(kind, False), **words)
        same(turned.transpose(0, 1), out, TOL)
        for mine, its in zip(flat(again), flat(weights), strict=True):
            same(mine, its, TOL)


def test_nested_tensors_in_eval():
    """A nested source, which torch's encoder layers take in eval without gradients."""
    for norm_first in (False, True):
        theirs, ours = couple(ENCODER_LAYER, norm_first=norm_first, batch_first=True)
        x = draw(B, L, D)
        nested = torch.nested.nested_tensor([x[0], x[1, :3], x[2, :1]])
        with torch.no_grad():
            found = zip(ours.eval()(nested).unbind(), theirs.eval()(nested).unbind(), strict=True)
            for mine, its in found:
                same(mine, its, TOL)


@kinds
def test_bf16_autocast(kind):
    """One dtype whatever the mode, float32 gradients, and numbers near those of float32."""
    ours = ours_alone(kind, dtype=torch.float32)
    with torch.no_grad():  # a spread of 0.5 on each weight makes values in the tens
        for parameter in ours.parameters():
            parameter.mul_(0.3)
    inputs = [x.float() for x in inputs_of(kind)]
    words = masked(kind, "both bool")
    want = ours(*inputs, **words)
    outs = []
    for training in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(ours.train(training)(*inputs, **words))
        assert (outs[-1] - want).abs().max() < 5e-2 * want.abs().max()
    assert torch.equal(*outs)
    outs[0].float().sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


# --- Where torch is wrong ---------------------------------------------------------------------------------------------


def test_torch_is_causal_alone():
    """torch raises in training, and attends to the future in eval."""
    theirs, ours = couple(ENCODER_LAYER, batch_first=True)
    x = draw(B, L, D)
    want = theirs(x, causal_mask(L))
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, is_causal=True)
    same(ours(x, is_causal=True), want, TOL)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(x, is_causal=True), theirs(x))
        same(ours.eval()(x, is_causal=True), want, TOL)


def test_torch_is_causal_beside_another_mask():
    """torch drops the mask in training, and the flag in eval."""
    theirs, ours = couple(ENCODER_LAYER, batch_first=True)
    x, block = draw(B, L, D), blocked(L, L)
    want = theirs(x, block | causal_mask(L))
    same(theirs(x, block, is_causal=True), theirs(x, causal_mask(L)), TOL)
    same(ours(x, block, is_causal=True), want, TOL)
    with torch.no_grad():
        same(theirs.eval()(x, block, is_causal=True), theirs(x, block), TOL)
        same(ours.eval()(x, block, is_causal=True), want, TOL)


@norms
def test_torch_takes_a_floating_mask_for_bool(norm_first):
    """In eval without gradients torch's encoder layer hides whatever is not 0 in it."""
    theirs, ours = couple(ENCODER_LAYER, batch_first=True, norm_first=norm_first)
    x, penalty = draw(B, L, D), torch.zeros(L, L, dtype=F64).index_fill(1, torch.tensor([L - 1]), -0.5)
    want = theirs(x, penalty)
    with torch.no_grad():
        same(theirs.eval()(x, penalty), theirs(x, penalty != 0), TOL)
        assert (theirs(x, penalty) - want).abs().max() > 0.01
        same(ours.eval()(x, penalty), want, TOL)


def test_torch_float_padding_drops_tokens():
    """torch's encoder makes a nested tensor of a floating padding mask: what is not 0 there is dropped."""
    theirs, ours = couple(ENCODER, batch_first=True)
    x, penalty = draw(B, L, D), torch.zeros(B, L, dtype=F64).index_fill(1, torch.tensor([L - 1]), -0.5)
    want = theirs(x, src_key_padding_mask=penalty)
    with torch.no_grad():
        dropped = theirs.eval()(x, src_key_padding_mask=penalty)
        assert (dropped - want).abs().max() > 0.1
        same(dropped, theirs(x, src_key_padding_mask=penalty != 0), TOL)
        same(ours.eval()(x, src_key_padding_mask=penalty), want, TOL)


def test_torch_padding_depends_on_mode_and_side():
    """torch zeroes padding on the right in eval; on the left, or in training, it computes it."""
    theirs, ours = couple(ENCODER, batch_first=True, last=False)
    x, right = draw(B, L, D), padding(L)
    left = right.flip(1)
    assert theirs(x, src_key_padding_mask=right)[right].ne(0).all()
    with torch.no_grad():
        assert theirs.eval()(x, src_key_padding_mask=right)[right].eq(0).all()
        assert theirs(x, src_key_padding_mask=left)[left].ne(0).all()
    for side, training in itertools.product((right, left), (True, False)):
        assert ours.train(training)(x, src_key_padding_mask=side)[side].eq(0).all()


@pytest.mark.parametrize("kind", [DECODER_LAYER, ENCODER_LAYER])
def test_torch_all_padding(kind):
    """A sample without a visible key: attention 0 in both in training, but torch's give NaN in eval."""
    theirs, ours = couple(kind, batch_first=True)
    inputs, words = inputs_of(kind), masked(kind, "bool padding")
    dead = {word: mask | torch.tensor([False, False, True])[:, None] for word, mask in words.items()}
    compare(theirs, ours, inputs, dead)
    want = ours(*inputs, **dead)
    with torch.no_grad():
        assert theirs.eval()(*inputs, **dead)[2].isnan().all()
        same(ours.eval()(*inputs, **dead), want, TOL)
    for name, attention in ours.named_children():
        if name in ("self_attn", "multihead_attn"):
            nn.init.zeros_(attention.out_proj.weight)  # all that is left of an attention of 0 is its bias
    same(want[2], ours(*inputs)[2], TOL)


def test_torch_copies_lose_the_activation():
    """A copy of torch's decoder layer, so each layer of its stacks, computes relu in place of a module."""
    x = inputs_of(DECODER_LAYER)
    for activation, lost in ((nn.SiLU(), True), (F.silu, False)):
        theirs, ours = couple(DECODER_LAYER, activation=activation, batch_first=True)
        want = theirs(*x)
        same(ours(*x), want, TOL)
        same(copy.deepcopy(ours)(*x), want, TOL)
        copied = copy.deepcopy(theirs)
        assert ((copied(*x) - want).abs().max() > 1e-3) == lost
        theirs.activation = nn.ReLU() if lost else F.silu
        same(copied(*x), theirs(*x), TOL)


def test_torch_does_not_call_children_in_eval():
    """Swapped children and subclasses act in our eval; torch's whole layer is one kernel there."""

    class Double(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    theirs, ours = couple(ENCODER_LAYER, batch_first=True)
    x = draw(B, L, D)
    for layer in (theirs, ours):
        for name in ("linear1", "linear2"):
            double = Double(*reversed(getattr(layer, name).weight.shape), dtype=F64)
            double.load_state_dict(getattr(layer, name).state_dict())
            setattr(layer, name, double)
    want = theirs(x)
    with torch.no_grad():
        assert (theirs.eval()(x) - want).abs().max() > 0.1
        same(ours.eval()(x), want, TOL)


# --- Padded rows ------------------------------------------------------------------------------------------------------

NESTS = {
    "batch_first": (True, False),
    "norm_first": (False, True),
    "bias": (True, False),
    "activation": ("relu", "gelu", F.relu, F.gelu, nn.ReLU(), nn.GELU("tanh"), torch.relu, torch.tanh, nn.SiLU()),
    "nhead": (2, 1),
}


def test_use_nested_tensor_is_torchs():
    """In combinations of what it looks at, with and without enable_nested_tensor; ours does not warn."""
    usual = [values[:2] for values in NESTS.values()]
    others = [[values[0]] for name, values in NESTS.items() if name != "activation"]
    others.insert(3, NESTS["activation"])
    for values in {*itertools.product(*usual), *itertools.product(*others)}:
        words = dict(zip(NESTS, values, strict=True)) | {"d_model": 4, "dim_feedforward": 3, "device": "meta"}
        theirs, ours = nn.TransformerEncoderLayer(**words), headwise.TransformerEncoderLayer(**words)
        for enable in (True, False):
            want = nn.TransformerEncoder(theirs, 1, enable_nested_tensor=enable).use_nested_tensor
            for layer in (ours, theirs):  # torch's layer in our stack too
                stack = headwise.TransformerEncoder(layer, 1, enable_nested_tensor=enable)
                assert stack.use_nested_tensor is want, (words, enable)
                assert stack.enable_nested_tensor is enable
    for change in ("norm1.eps", "self_attn"):
        theirs, ours = couple(ENCODER_LAYER, batch_first=True)
        for layer in (theirs, ours):
            if change == "self_attn":
                cls = nn.MultiheadAttention if layer is theirs else headwise.MultiheadAttention
                layer.self_attn = cls(D, H, kdim=11, batch_first=True)
            else:
                layer.norm1.eps = 0.1
        assert nn.TransformerEncoder(theirs, 1).use_nested_tensor is False
        assert headwise.TransformerEncoder(ours, 1).use_nested_tensor is False
    assert headwise.TransformerEncoder(Recorder(), 1).use_nested_tensor is False
    assert headwise.TransformerEncoder(build(headwise, ENCODER_LAYER, batch_first=True), 1).use_nested_tensor is True


PATTERNS = {
    "right": padding(L),
    "left": padding(L).flip(1),
    "holes": torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool),
    "all padding": torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool),
    "nothing real": torch.ones(B, L, dtype=torch.bool),
}
patterns = pytest.mark.parametrize("pattern", PATTERNS)


@pytest.fixture(params=["padded", "packed"])
def packed(request, monkeypatch):
    """Both ways of running a padded batch: short ones are packed only if told that it is worth while."""
    if request.param == "packed":
        monkeypatch.setattr(packing, "TURN", 0)
        monkeypatch.setattr(packing, "TURN_GRAD", 0)
    return request.param == "packed"


@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@trainings
@patterns
def test_padded_rows_of_an_encoder(pattern, training, causal, packed):
    """Exactly 0 before the last norm, with and without gradients; the rest as if each sample stood alone."""
    encoder = ours_alone(ENCODER, last=False).train(training)
    x, rows = draw(B, L, D), PATTERNS[pattern]
    calls = []
    encoder.layers[0].self_attn.register_forward_hook(lambda _, args, out: calls.append(args[0].shape))
    call = {"src_key_padding_mask": rows, "is_causal": causal}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = encoder(x, **call)
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
        for sample in range(B):
            keep = ~rows[sample]
            if keep.any():
                alone = encoder(x[sample : sample + 1, keep], is_causal=causal)[0]
                same(out[sample, keep], alone, TOL, f"{pattern} {sample}")
    assert calls[0] == (B, L, D)  # hooked, a block is not packed
    encoder.layers[0].self_attn._forward_hooks.clear()
    again = encoder(x, **call)
    same(again, out, TOL)
    assert torch.equal(again[rows], torch.zeros_like(again[rows]))
    norm = fill(nn.LayerNorm(D, dtype=F64))
    encoder.norm = norm
    same(encoder(x, **call), norm(out), TOL)
    assert encoder(x, **call)[rows].eq(norm.bias).all()


@norms
@patterns
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_gradients(pattern, batch_first, norm_first, monkeypatch):
    """A packed block has the padded block's numbers and gradients, and its padding none."""
    layer = ours_alone(ENCODER_LAYER, norm_first=norm_first, batch_first=batch_first)
    (x,), rows = inputs_of(ENCODER_LAYER, batch_first), PATTERNS[pattern]
    found = []
    for worth in (2**60, 0):
        monkeypatch.setattr(packing, "TURN", worth)
        monkeypatch.setattr(packing, "TURN_GRAD", worth)
        seen = []
        handle = headwise.MultiheadAttention.forward
        monkeypatch.setattr(
            headwise.MultiheadAttention,
            "forward",
            lambda self, q, *a, handle=handle, seen=seen, **k: seen.append(q.shape) or handle(self, q, *a, **k),
        )
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = layer(leaf, src_key_padding_mask=rows, query_padding_mask=rows, is_causal=True)
        out.backward(draw(*out.shape, seed=5))
        found.append({"out": out.detach(), "x": leaf.grad} | gradients(layer))
        monkeypatch.setattr(headwise.MultiheadAttention, "forward", handle)
        real = int((~rows).sum())
        assert seen[0] == (x.shape if worth else (1, real, D) if batch_first else (real, 1, D))
    for name, want in found[0].items():
        same(found[1][name], want, TOL, name)
    assert found[1]["x"][rows if batch_first else rows.T].eq(0).all()


COMPUTED = {
    "pre-norm": ({"norm_first": True}, {}),
    "lengths first": ({"batch_first": False}, {}),
    "no bias": ({"bias": False}, {}),
    "another activation": ({"activation": torch.tanh}, {}),
    "a mask": ({}, {"mask": torch.zeros(L, L, dtype=torch.bool)}),
    "floating padding": ({}, {"src_key_padding_mask": minus_inf(padding(L))}),
    "not enabled": ({}, {}),
    "odd heads": ({}, {}),
}


@trainings
@pytest.mark.parametrize("why", COMPUTED)
def test_padded_rows_are_computed_elsewhere(why, training):
    """Everywhere else all positions are torch's in training, without and with gradients."""
    options, more = COMPUTED[why]
    options = {"batch_first": True} | options
    theirs, ours = couple(ENCODER, **options, last=False)
    if why == "not enabled":
        theirs, ours = (
            lib.TransformerEncoder(layers.layers[0], 2, enable_nested_tensor=False)
            for lib, layers in ((nn, theirs), (headwise, ours))
        )
    if why == "odd heads":
        for layer in (theirs.layers[0], ours.layers[0]):
            layer.self_attn.num_heads = 11
        theirs.layers[0].self_attn.head_dim = 2
        theirs, ours = (lib.TransformerEncoder(layers.layers[0], 2) for lib, layers in ((nn, theirs), (headwise, ours)))
    words = {"src_key_padding_mask": padding(L)} | more
    compare(theirs.train(), ours.train(training), inputs_of(ENCODER, options["batch_first"]), words)
    out = ours(*inputs_of(ENCODER, options["batch_first"]), **words)
    assert out[padding(L) if options["batch_first"] else padding(L).T].ne(0).all()


@trainings
def test_single_layers_and_decoders_do_not_zero(training):
    for kind in (ENCODER_LAYER, DECODER_LAYER, DECODER):
        ours = ours_alone(kind, **({} if kind != DECODER else {"last": False})).train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert ours(*inputs_of(kind), **masked(kind, "bool padding"))[padding(L)].ne(0).all(), kind


@trainings
@patterns
@norms
@pytest.mark.parametrize("kind", [ENCODER_LAYER, DECODER_LAYER, ENCODER, DECODER])
def test_query_padding_mask(kind, norm_first, pattern, training):
    """0 at padding, behind the last norm too; the rest is what it is without; NaN there has no influence."""
    ours = ours_alone(kind, norm_first=norm_first).train(training)
    rows = PATTERNS[pattern]
    x, *memory = inputs_of(kind)
    pad = {SLOTS[kind][0][1]: rows}
    want = ours(x, *memory, **pad)
    for x_given in (x, x.masked_fill(rows[..., None], float("nan"))):
        leaf = x_given.clone().requires_grad_()
        ours.zero_grad()
        out, weights = ours(leaf, *memory, **pad, query_padding_mask=rows, need_weights=True)
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
        same(out[~rows], want[~rows], TOL)
        same(ours(leaf, *memory, **pad, query_padding_mask=rows), out, TOL)
        for one in flat(weights):
            assert torch.equal(one[rows], torch.zeros_like(one[rows]))
            same(one[~rows].sum(-1), one[~rows].new_ones(int((~rows).sum())), TOL)
        out.sum().backward()
        assert leaf.grad[rows].eq(0).all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_a_transformer_hides_the_padding_of_its_source():
    """Given the source's padding for the memory too, no output depends on what stands there."""
    model = ours_alone(TRANSFORMER)
    src, tgt = inputs_of(TRANSFORMER)
    rows = padding(S)
    words = {"src_key_padding_mask": rows, "memory_key_padding_mask": rows}
    want = model(src, tgt, **words)
    same(model(src.masked_fill(rows[..., None], float("nan")), tgt, **words), want, TOL)
    for sample in range(B):
        keep = ~rows[sample]
        same(want[sample], model(src[sample : sample + 1, keep], tgt[sample : sample + 1])[0], TOL)


# --- is_causal and masks ----------------------------------------------------------------------------------------------


@trainings
@kinds
def test_is_causal_alone_and_beside_a_mask(kind, training):
    """It is the explicit mask; beside another mask, both hold; whatever kind of mask that is."""
    ours = ours_alone(kind).train(training)
    inputs = inputs_of(kind)
    flags = dict.fromkeys(FLAGS[kind], True)
    for name in MASKS:
        words = masked(kind, name)
        both = dict(words)
        for mask, _, queries, keys in SLOTS[kind]:
            if mask != "memory_mask":
                given = words.get(mask, torch.zeros(queries, keys, dtype=torch.bool))
                hidden = causal_mask(queries)
                both[mask] = given | hidden if given.dtype == torch.bool else given.masked_fill(hidden, -INF)
        mine, want = ours(*inputs, **words, **flags), ours(*inputs, **both)
        rows = padding(L) & (kind == ENCODER and name == "bool padding")  # a mask turns the zeros off
        same(mine[~rows], want[~rows], TOL, name)


@pytest.mark.parametrize("kind", [DECODER_LAYER, DECODER, TRANSFORMER])
def test_memory_is_causal(kind):
    """The upper-left rule, although the memory is longer."""
    ours = ours_alone(kind)
    inputs, block = inputs_of(kind), blocked(L, S)
    same(ours(*inputs, memory_is_causal=True), ours(*inputs, memory_mask=causal_mask(L, S)), TOL)
    want = ours(*inputs, memory_mask=causal_mask(L, S) | block)
    same(ours(*inputs, memory_mask=block, memory_is_causal=True), want, TOL)


@pytest.mark.parametrize("flag", [None, False])
@kinds
def test_a_nearly_causal_mask_is_honoured(kind, flag):
    """Nothing is guessed from a mask's values: one finite entry, one visible future, one hidden past count."""
    theirs, ours = couple(kind, batch_first=True)
    mask, _, length, _ = SLOTS[kind][0]
    for position, value in (((1, 0), -2.5), ((1, 3), 0.0), ((4, 1), -INF)):
        nearly = causal_float(length, length)
        plain = ours(*inputs_of(kind), **{mask: nearly.clone()})
        nearly[position] = value
        words = {mask: nearly}
        flags = dict.fromkeys(FLAGS[kind], flag)
        assert not torch.allclose(ours(*inputs_of(kind), **words, **flags), plain)
        compare(theirs, ours, inputs_of(kind), words, our_words=words | flags)


@trainings
@kinds
def test_a_mask_of_ours_in_place_of_a_tensor(kind, training):
    """True may attend; alone, beside padding and beside is_causal."""
    ours = ours_alone(kind).train(training)
    inputs = inputs_of(kind)
    for pad in ("none", "bool padding"):
        words = masked(kind, pad)
        tensors, objects = dict(words), dict(words)
        for mask, _, queries, keys in SLOTS[kind]:
            tensors[mask] = blocked(queries, keys)
            objects[mask] = masks.dense(~blocked(queries, keys))
        same(ours(*inputs, **objects), ours(*inputs, **tensors), TOL)
        flags = dict.fromkeys(FLAGS[kind], True)
        same(ours(*inputs, **objects, **flags), ours(*inputs, **tensors, **flags), TOL)
    own = [slot[0] for slot in SLOTS[kind] if slot[0] != "memory_mask"]
    causal = dict.fromkeys(own, masks.causal())
    same(ours(*inputs, **causal), ours(*inputs, **flags), TOL)
    window = dict.fromkeys(own, masks.causal() & masks.window(1, 0))
    far = {slot[0]: causal_mask(slot[2]) | torch.ones(slot[2], slot[2]).tril(-2).bool() for slot in SLOTS[kind]}
    far.pop("memory_mask", None)
    same(ours(*inputs, **window), ours(*inputs, **far), TOL)


def test_a_mask_for_each_sample():
    """(B, L, L) and 4-D masks, which torch's do not take, are the (B*H, L, L) that they stand for."""
    layer = ours_alone(ENCODER_LAYER)
    x, heads = draw(B, L, D), per_head(L, L)
    want = layer(x, heads)
    same(layer(x, heads.view(B, H, L, L)), want, TOL)
    per_sample = heads[::H]
    same(layer(x, per_sample), layer(x, per_sample.repeat_interleave(H, dim=0)), TOL)


# --- Weights ----------------------------------------------------------------------------------------------------------


def flat(weights):
    """The tensors of however nested weights, in order."""
    return [weights] if isinstance(weights, torch.Tensor) else [t for one in weights for t in flat(one)]


def by_hand(attention, query, key, hidden):
    """(B, H, L, S) weights from the textbook."""
    state = attention.state_dict()
    (w_q, w_k, _), (b_q, b_k, _) = state["in_proj_weight"].chunk(3), state["in_proj_bias"].chunk(3)
    q = (query @ w_q.T + b_q).unflatten(-1, (H, D // H))
    k = (key @ w_k.T + b_k).unflatten(-1, (H, D // H))
    scores = torch.einsum("blhk,bshk->bhls", q, k) / (D // H) ** 0.5
    scores = scores.masked_fill(hidden[:, None], -INF)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


@layouts
@trainings
@norms
@kinds
def test_need_weights(kind, norm_first, training, fused_qkv):
    """Of each layer, before dropout, as computed by hand; averaged and per head; beside the same output."""
    ours = ours_alone(kind, norm_first=norm_first, fused_qkv=fused_qkv).train(training)
    inputs, words = inputs_of(kind), masked(kind, "both bool")
    attentions = [m for m in ours.modules() if isinstance(m, headwise.MultiheadAttention)]
    seen = {}
    for attention in attentions:
        attention.register_forward_pre_hook(lambda module, args: seen.update({module: args[:2]}))
    want = ours(*inputs, **words)
    out, weights = ours(*inputs, **words, need_weights=True, average_attn_weights=False)
    same(out, want, TOL)
    shape = {  # per layer of the encoder, per layer of the decoder
        ENCODER_LAYER: 1,
        DECODER_LAYER: 2,
        ENCODER: [1, 1],
        DECODER: [2, 2],
        TRANSFORMER: ([1, 1], [2]),
    }[kind]
    assert counts(weights) == shape
    assert len(attentions) == len(flat(weights))
    for attention, one in zip(attentions, flat(weights), strict=True):
        query, key = seen[attention]
        queries, keys = query.shape[1], key.shape[1]
        hand = by_hand(attention, query, key, blocked(queries, keys)[None] | padding(keys)[:, None])
        same(one, hand, TOL)
    averaged, means = ours(*inputs, **words, need_weights=True)
    same(averaged, want, TOL)
    for mean, one in zip(flat(means), flat(weights), strict=True):
        same(mean, one.mean(1), TOL)
    told = ours_alone(kind, norm_first=norm_first, fused_qkv=fused_qkv, average_attn_weights=False)
    for mine, one in zip(flat(told(*inputs, **words, need_weights=True)[1]), flat(weights), strict=True):
        same(mine, one, TOL)
    forced = told(*inputs, **words, need_weights=True, average_attn_weights=True)[1]
    for mine, mean in zip(flat(forced), flat(means), strict=True):
        same(mine, mean, TOL)


def counts(weights):
    """How many tensors a layer gives, in the nesting of what came."""
    if isinstance(weights, torch.Tensor):
        return 1
    if isinstance(weights, tuple) and all(isinstance(one, torch.Tensor) for one in weights):
        return len(weights)
    return type(weights)(counts(one) for one in weights)


def test_weights_unbatched():
    out, (own, cross) = ours_alone(DECODER_LAYER)(
        *(x[0] for x in inputs_of(DECODER_LAYER)), need_weights=True, average_attn_weights=False
    )
    assert (out.shape, own.shape, cross.shape) == ((L, D), (H, L, L), (H, L, S))


def test_the_well_known_recipe_for_weights():
    """Users wrap `self_attn.forward` to ask for weights, and hook it: works in train, and in eval too."""
    for training in (True, False):
        encoder = ours_alone(ENCODER).train(training)
        found = []
        for layer in encoder.layers:
            forward = layer.self_attn.forward

            def asking(*args, forward=forward, **words):
                return forward(*args, **words | {"need_weights": True, "average_attn_weights": False})

            layer.self_attn.forward = asking
            layer.self_attn.register_forward_hook(lambda _, args, out, found=found: found.append(out[1]))
        with torch.no_grad():
            want = ours_alone(ENCODER)(draw(B, L, D), need_weights=True, average_attn_weights=False)[1]
            encoder(draw(B, L, D))
        assert len(found) == 2
        for mine, its in zip(found, want, strict=True):
            same(mine, its, TOL)


# --- Dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", [ENCODER_LAYER, DECODER_LAYER])
def test_dropout_on_the_weights(kind, need_weights):
    """`self_attn.dropout` is the probability, and acts in training: a single key is dropped or scaled up."""
    p, many = 0.25, 4000
    layer = ours_alone(kind, dropout=p)
    assert {m.dropout for m in layer.modules() if isinstance(m, headwise.MultiheadAttention)} == {p}
    for name in ("self_attn", "multihead_attn")[: 1 + (kind == DECODER_LAYER)]:
        attention, outs = getattr(layer, name), []
        nn.init.eye_(attention.out_proj.weight)
        nn.init.zeros_(attention.out_proj.bias)
        attention.register_forward_hook(lambda _, args, out, outs=outs: outs.append(out))
        memory = (draw(1, 1, D).expand(many, 1, D),) * (kind == DECODER_LAYER)
        x = draw(1, 1, D, seed=6).expand(many, 1, D)
        for training in (True, False):
            layer.train(training)(x, *memory, need_weights=need_weights)
        (dropped, weights), (whole, _) = outs
        if name == "multihead_attn":
            whole = whole[:1].expand_as(whole)
            key = memory[0][:1]
            value = key @ attention.state_dict()["in_proj_weight"].chunk(3)[2].T
            whole = (value + attention.state_dict()["in_proj_bias"].chunk(3)[2]).expand_as(whole)
        heads = (dropped / whole).unflatten(-1, (H, D // H))
        same(heads, heads[..., :1].expand_as(heads), TOL)  # a head is dropped as one
        gone = heads[..., 0].abs() < 0.5
        same(heads[..., 0][~gone], torch.full_like(heads[..., 0][~gone], 1 / (1 - p)), TOL)
        assert abs(gone.double().mean().item() - p) < 0.03
        assert weights is None or weights.eq(1).all()  # what is returned is from before


@kinds
def test_dropout_everywhere_and_nowhere(kind):
    """dropout=1 leaves the residuals and norms, 0 and eval leave nothing to chance, the seed decides the rest."""
    ours = ours_alone(kind, dropout=0.5)
    inputs = inputs_of(kind)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(ours(*inputs))
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    ours.eval()
    assert torch.equal(ours(*inputs), ours(*inputs))
    theirs, ours = couple(kind, dropout=1.0, batch_first=True)
    same(ours(*inputs), theirs(*inputs), TOL)


# --- What is ours alone -----------------------------------------------------------------------------------------------


def with_norms(theirs, make):
    """torch's module with other norms, which it calls in training."""
    for module in list(theirs.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, make())
    return fill(theirs)


NORMS = {
    "rmsnorm": ("rmsnorm", lambda: nn.RMSNorm(D, eps=0.3, dtype=F64)),
    "class": (nn.RMSNorm, lambda: nn.RMSNorm(D, dtype=F64)),
    "callable": (
        lambda width: nn.LayerNorm(width, eps=0.2, bias=False),
        lambda: nn.LayerNorm(D, eps=0.2, bias=False, dtype=F64),
    ),
    "module": (nn.LayerNorm(D, eps=0.2), lambda: nn.LayerNorm(D, eps=0.2, dtype=F64)),
}


@pytest.mark.parametrize("norm", NORMS)
@norms
@pytest.mark.parametrize("kind", [ENCODER_LAYER, DECODER_LAYER, TRANSFORMER])
def test_other_norms(kind, norm_first, norm):
    given, make = NORMS[norm]
    options = {"norm_first": norm_first, "batch_first": True, "layer_norm_eps": 0.3}
    theirs = with_norms(build(nn, kind, **options), make)
    ours = build(headwise, kind, norm=given, **options)
    ours.load_state_dict(theirs.state_dict())
    compare(theirs, ours, inputs_of(kind), masked(kind, "both bool"))
    its = {name: type(module) for name, module in theirs.named_modules() if "norm" in name}
    assert {name: type(module) for name, module in ours.named_modules() if "norm" in name} == its
    assert len({id(parameter) for parameter in ours.parameters()}) == len(list(ours.parameters()))
    held = given.parameters() if isinstance(given, nn.Module) else ()
    assert not {id(parameter) for parameter in held} & {id(parameter) for parameter in ours.parameters()}


@norms
@pytest.mark.parametrize("kind", [ENCODER_LAYER, DECODER_LAYER])
def test_swiglu(kind, norm_first):
    """silu(linear1(x)) * linear3(x) in the feed-forward of torch's layer."""
    ours = ours_alone(kind, activation="swiglu", norm_first=norm_first)
    theirs = build(nn, kind, norm_first=norm_first, batch_first=True)
    theirs.linear3 = nn.Linear(D, M, dtype=F64)
    theirs.load_state_dict(ours.state_dict())
    theirs._ff_block = lambda x: theirs.linear2(F.silu(theirs.linear1(x)) * theirs.linear3(x))
    words = masked(kind, "both bool")
    same(ours(*inputs_of(kind), **words), theirs(*inputs_of(kind), **words), TOL)
    whole = build(headwise, TRANSFORMER, activation="swiglu")
    assert sum("linear3.weight" in name for name in whole.state_dict()) == 3


@pytest.mark.parametrize("activation", [nn.PReLU(init=0.125, dtype=F64), nn.Linear(M, M, dtype=F64)], ids=type)
@kinds
def test_activation_with_parameters(kind, activation):
    """A module's parameters belong to the layer, are copied with it, and learn; it stands last, as torch's."""
    theirs, ours = couple(kind, activation=activation, batch_first=True)
    assert [name for name in ours.state_dict() if ".activation." in f".{name}"]
    for training in (True, False):
        compare(theirs.train(training), ours.train(training), inputs_of(kind), masked(kind, "both bool"))


@pytest.mark.parametrize("lib", [headwise, nn], ids=["ours", "torch's"])
@pytest.mark.parametrize("kind", [ENCODER, DECODER])
def test_independent_init(kind, lib):
    """Each copy is drawn anew, as a fresh layer would be; otherwise all are equal."""
    prototype = getattr(lib, f"{kind}Layer")(D, H, M, 0.0)
    stack = getattr(headwise, kind)
    first, second = (layer.state_dict() for layer in stack(prototype, 2).layers)
    identical(first, second)
    first, second = (layer.state_dict() for layer in stack(prototype, 2, independent_init=True).layers)
    for name, given in prototype.state_dict().items():
        drawn = given.std() > 0
        assert torch.equal(first[name], second[name]) != drawn, name
        assert torch.equal(first[name], given) != drawn, name
        limits = given.abs().max(), first[name].abs().max()
        assert max(limits) <= (1.3 if given.dim() > 1 else 2.5) * min(limits), name


class Recorder(nn.Module):
    """A layer of the user's own, called like torch's, which keeps what it was told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def forward(self, src, *memory, **words):
        self.told.append(words)
        return src + 1


FOREIGN_WORDS = {
    ENCODER: {"src_mask", "src_key_padding_mask", "is_causal"},
    DECODER: {name for slot in SLOTS[DECODER] for name in slot[:2]} | {"tgt_is_causal", "memory_is_causal"},
}


@pytest.mark.parametrize("kind", [ENCODER, DECODER])
def test_a_foreign_layer_gets_torchs_arguments_only(kind):
    """And a mask that is written out for is_causal=True, alone and beside a mask of either kind."""
    stack = getattr(headwise, kind)(Recorder(), 2)
    inputs = inputs_of(kind)
    same(stack(*inputs), inputs[0] + 2, TOL)
    flags = dict.fromkeys(FLAGS[kind], True) | ({"memory_is_causal": True} if kind == DECODER else {})
    for name in ("none", "bool", "float", "per head bool", "both bool"):
        words = masked(kind, name)
        stack(*inputs, **words, **flags)
        (told, again) = (layer.told[-1] for layer in stack.layers)
        assert set(told) == set(again) == FOREIGN_WORDS[kind]
        for mask, pad, queries, keys in SLOTS[kind]:
            hidden, given = causal_mask(queries, keys), words.get(mask)
            if given is None:
                want = hidden
            else:
                want = given | hidden if given.dtype == torch.bool else given.masked_fill(hidden, -INF)
            assert torch.equal(told["src_mask" if mask == "mask" else mask], want)
            assert told[pad] is words.get(pad)
    rows = padding(L)
    out = stack(*inputs, query_padding_mask=rows)
    assert out[rows].eq(0).all()
    assert set(stack.layers[0].told[-1]) == FOREIGN_WORDS[kind]


@trainings
@norms
@pytest.mark.parametrize("kind", [ENCODER, DECODER])
def test_torchs_layers_in_our_stacks(kind, norm_first, training):
    """The numbers of our layers, for every mask, with is_causal, and with zeros at the same places."""
    theirs, ours = couple(kind, norm_first=norm_first, batch_first=True)
    mixed = getattr(headwise, kind)(theirs.layers[0], 2, copy.deepcopy(theirs.norm))
    mixed.load_state_dict(theirs.state_dict())
    mixed.train(training)
    inputs = inputs_of(kind)
    for name in ("none", "bool", "float", "per head float", "both bool"):
        words = masked(kind, name)
        same(mixed(*inputs, **words), ours(*inputs, **words), TOL, name)
        flags = dict.fromkeys(FLAGS[kind], True)
        for grad in (True, False):
            if not grad and not training and "float" in name:
                continue  # torch's layer takes it for bool there
            with torch.set_grad_enabled(grad):
                same(mixed(*inputs, **words, **flags), ours(*inputs, **words, **flags), TOL, f"{name} causal")
    same(mixed(*inputs, **masked(kind, "bool padding")), ours(*inputs, **masked(kind, "bool padding")), TOL)


@trainings
@norms
@pytest.mark.parametrize("kind", [ENCODER, DECODER])
def test_ours_in_torchs_stacks(kind, norm_first, training):
    """Called, in eval without gradients too, and giving torch's numbers."""
    theirs, ours = couple(kind, norm_first=norm_first, batch_first=True)
    mixed = getattr(nn, kind)(ours.layers[0], 2, copy.deepcopy(ours.norm))
    mixed.load_state_dict(theirs.state_dict())
    mixed.train(training)
    calls = []
    for layer in mixed.layers:
        layer.self_attn.out_proj.register_forward_hook(lambda *_: calls.append(1))
    inputs = inputs_of(kind)
    for name in ("none", "bool", "float", "causal float", "both bool", "both float"):
        words = masked(kind, name)
        want = theirs(*inputs, **words)
        for grad in (True, False):
            calls.clear()
            with torch.set_grad_enabled(grad):
                same(mixed(*inputs, **words), want, TOL, name)
            assert len(calls) == 2


@pytest.mark.parametrize("part", ["custom_encoder", "custom_decoder"])
@trainings
def test_a_custom_part_of_torchs_is_causal_too(part, training):
    """Written out: torch's stack takes is_causal for a hint, raises in training and ignores it in eval."""
    kind, flag = (ENCODER, "src_is_causal") if part == "custom_encoder" else (DECODER, "tgt_is_causal")
    ours = ours_alone(TRANSFORMER)
    custom = build(nn, kind, batch_first=True)
    if kind == DECODER:
        custom = nn.TransformerDecoder(custom.layers[0], 1, custom.norm)
    mixed = build(headwise, TRANSFORMER, batch_first=True, **{part: custom})
    mixed.load_state_dict(ours.state_dict())
    mixed.train(training)
    with torch.set_grad_enabled(training):
        same(mixed(*inputs_of(TRANSFORMER), **{flag: True}), ours(*inputs_of(TRANSFORMER), **{flag: True}), TOL)


def test_a_subclass_with_torchs_signature():
    """What one gets by changing the import under a subclass of torch's layer."""

    class Mine(headwise.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

    ours = ours_alone(ENCODER)
    mine = headwise.TransformerEncoder(Mine(D, H, M, 0.0, batch_first=True, dtype=F64), 2, copy.deepcopy(ours.norm))
    mine.load_state_dict(ours.state_dict())
    assert mine.use_nested_tensor
    for name in ("none", "both bool", "bool padding"):
        words = masked(ENCODER, name)
        same(mine(*inputs_of(ENCODER), **words), ours(*inputs_of(ENCODER), **words), TOL, name)


# --- Errors -----------------------------------------------------------------------------------------------------------

X, MEMORY = draw(B, L, D), draw(B, S, D)


def encoder_of_torchs(**words):
    return headwise.TransformerEncoder(build(nn, ENCODER_LAYER, batch_first=True), 2)(X, **words)


def decoder_of_torchs(**words):
    return headwise.TransformerDecoder(build(nn, DECODER_LAYER, batch_first=True), 2)(X, MEMORY, **words)


def call(kind, *inputs, **words):
    return ours_alone(kind)(*inputs, **words)


def construct(kind, *args, **words):
    return getattr(headwise, kind)(*args, **words)


def custom_with(**words):
    return ours_alone(TRANSFORMER, custom_encoder=build(nn, ENCODER, batch_first=True))(MEMORY, X, **words)


LAYER = headwise.TransformerEncoderLayer(D, H, M)
ERRORS = {
    "num_layers 0": (lambda: construct(ENCODER, LAYER, 0), r"TransformerEncoder: num_layers must .* at least 1; got 0"),
    "num_layers -1": (lambda: construct(DECODER, LAYER, -1), r"TransformerDecoder: num_layers must .*; got -1"),
    "num_layers True": (lambda: construct(ENCODER, LAYER, True), r"num_layers must be an int.*; got True"),
    "num_layers 2.0": (lambda: construct(ENCODER, LAYER, 2.0), r"num_layers must be an int.*; got 2.0"),
    "num_encoder_layers 0": (lambda: construct(TRANSFORMER, D, H, 0, 1), r"num_layers must .* at least 1; got 0"),
    "a block of ours": (
        lambda: construct(ENCODER, headwise.EncoderBlock(D, H), 2),
        r"the layer must .*Encoder and Decoder stack our blocks; got EncoderBlock",
    ),
    "no module": (lambda: construct(DECODER, "layer", 2), r"the layer must be a module .*; got str"),
    "dropout 2": (lambda: construct(ENCODER_LAYER, D, H, M, 2.0), r"TransformerEncoderLayer: dropout .* got 2.0"),
    "dropout -0.1": (lambda: construct(DECODER_LAYER, D, H, M, -0.1), r"TransformerDecoderLayer: dropout .* got -0.1"),
    "dropout NaN": (lambda: construct(TRANSFORMER, D, H, 1, 1, M, float("nan")), r"dropout must be in \[0, 1\].* nan"),
    "dim_feedforward 0": (lambda: construct(ENCODER_LAYER, D, H, 0), r"dim_feedforward must be an int .* got 0"),
    "width in dropout's place": (lambda: construct(ENCODER_LAYER, D, H, M, 13), r"inner width is dim_feedforward"),
    "heads": (lambda: construct(TRANSFORMER, D, 3, 1, 1), r"embed_dim must be a multiple of num_heads 3"),
    "activation": (lambda: construct(ENCODER_LAYER, D, H, activation="elu"), r"activation must be one of .*'elu'"),
    "norm": (lambda: construct(TRANSFORMER, D, H, 1, 1, norm="batchnorm"), r"norm must be .*; got 'batchnorm'"),
    "weights of torch's encoder layer": (
        lambda: encoder_of_torchs(need_weights=True),
        r"TransformerEncoder: need_weights must .*upgrade\(\) them; got TransformerEncoderLayer",
    ),
    "weights of torch's decoder layer": (
        lambda: decoder_of_torchs(need_weights=True, average_attn_weights=False),
        r"TransformerDecoder: need_weights, average_attn_weights must .*; got TransformerDecoderLayer",
    ),
    "weights of torch's stack": (lambda: custom_with(need_weights=True), r"need_weights must"),
    "a Mask for torch's stack": (lambda: custom_with(src_mask=masks.causal()), r"must be a tensor"),
    "a Mask for torch's encoder layer": (
        lambda: encoder_of_torchs(mask=masks.causal()),
        r"TransformerEncoder: src_mask must be a tensor .*; got",
    ),
    "a Mask for torch's decoder layer": (
        lambda: decoder_of_torchs(memory_mask=masks.causal()),
        r"TransformerDecoder: memory_mask must be a tensor .*; got",
    ),
    "a mask of another size for torch's layer": (
        lambda: encoder_of_torchs(mask=causal_mask(1), is_causal=True),
        r"attn_mask must end in \(L, S\) = \(5, 5\); got \(1, 1\)",
    ),
    "width": (lambda: call(ENCODER_LAYER, draw(B, L, 7)), r"query must be 22 wide; got 7"),
    "width, pre-norm": (
        lambda: ours_alone(ENCODER_LAYER, norm_first=True)(draw(B, L, 7)),
        r"TransformerEncoderLayer: x must be 22 wide; got 7 \(x \(3, 5, 7\)\)",
    ),
    "width of the memory": (lambda: call(DECODER, X, draw(B, S, 7)), r"key must be 22 wide; got 7"),
    "width of the source": (lambda: call(TRANSFORMER, draw(B, S, 7), X), r"Transformer: src and tgt .* 22 wide"),
    "width of the target": (lambda: call(TRANSFORMER, MEMORY, draw(B, L, 7)), r"src and tgt .* 22 wide; got \(22, 7\)"),
    "batch": (lambda: call(TRANSFORMER, MEMORY[:2], X), r"same batch size; got \(\(2, 7, 22\), \(3, 5, 22\)\)"),
    "batch, lengths first": (
        lambda: ours_alone(TRANSFORMER, batch_first=False)(draw(S, 2, D), draw(L, B, D)),
        r"src and tgt must have the same batch size",
    ),
    "one batched": (lambda: call(TRANSFORMER, MEMORY[0], X), r"src and tgt must"),
    "batch of the memory": (lambda: call(DECODER_LAYER, X, MEMORY[:2]), r"key must have the query's batch size 3"),
    "batch_first forgotten": (
        lambda: ours_alone(ENCODER_LAYER, batch_first=False)(X, src_key_padding_mask=padding(L)),
        r"key_padding_mask must be .*batch_first=True",
    ),
    "dtype": (lambda: call(ENCODER_LAYER, X.float()), r"query must have the parameters' dtype"),
    "dtype, pre-norm": (
        lambda: ours_alone(DECODER_LAYER, norm_first=True)(X.float(), MEMORY),
        r"x must have the parameters' dtype",
    ),
    "dtype of the memory": (lambda: call(DECODER_LAYER, X, MEMORY.float()), r"key must have the parameters' dtype"),
    "integer mask": (lambda: call(ENCODER, X, causal_mask(L).long()), r"attn_mask must be .*bool"),
    "integer padding": (lambda: call(ENCODER, X, None, padding(L).long()), r"key_padding_mask must be a bool or float"),
    "size of the mask": (lambda: call(ENCODER, X, causal_mask(S)), r"\(7, 7\)"),
    "size of the memory's mask": (lambda: call(DECODER, X, MEMORY, memory_mask=causal_mask(S)), r"\(7, 7\)"),
    "size of the memory's padding": (
        lambda: call(DECODER, X, MEMORY, memory_key_padding_mask=padding(L)),
        r"key_padding_mask must be \(B, S\) = \(3, 7\); got \(3, 5\)",
    ),
    "size of the padding": (lambda: call(ENCODER, X, None, padding(S)), r"key_padding_mask must be .*\(3, 5\)"),
    "query padding": (lambda: call(ENCODER, X, query_padding_mask=padding(S)), r"query_padding_mask must be bool"),
    "floating query padding": (
        lambda: call(DECODER, X, MEMORY, query_padding_mask=minus_inf(padding(L))),
        r"query_padding_mask must be bool \(3, 5\)",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    make, match = ERRORS[error]
    with pytest.raises(ValueError, match=match):
        make()


def test_torch_raises_where_we_do():
    """Parity of refusals: widths, batch sizes and activations that torch refuses too, with other types."""
    theirs = build(nn, TRANSFORMER, batch_first=True)
    for inputs in ((MEMORY[:2], X), (draw(B, S, 7), X), (MEMORY, draw(B, L, 7))):
        with pytest.raises(RuntimeError, match="must be equal"):
            theirs(*inputs)
    with pytest.raises(RuntimeError, match="activation should be"):
        nn.TransformerEncoderLayer(D, H, activation="elu")
    with pytest.raises(ValueError, match="dropout probability"):
        nn.TransformerEncoderLayer(D, H, M, 2.0)


# --- torch.compile, torch.export, torch.func --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "norm_first", "training"),
    [
        (ENCODER, False, True),
        (DECODER_LAYER, True, False),
        (ENCODER_LAYER, True, True),
        (DECODER, False, True),
        (TRANSFORMER, False, False),
    ],
)
def test_compile(kind, norm_first, training):
    """One graph for the first size, one for all others; padding 0 where it is in eager mode; no break."""
    module = ours_alone(kind, norm_first=norm_first).train(training)
    counter = Counter()
    flags = dict.fromkeys(FLAGS[kind], True)
    compiled = torch.compile(lambda inputs, words: module(*inputs, **words, **flags), backend=counter, fullgraph=True)
    with torch.set_grad_enabled(training):
        for batch, queries, keys in ((3, 5, 7), (5, 11, 13), (7, 3, 2)):
            sizes = (keys, queries) if kind == TRANSFORMER else (queries, keys)
            inputs = tuple(draw(batch, size, D) for size in sizes)[: len(inputs_of(kind))]
            lengths = torch.arange(batch)[:, None] % 3
            words = {
                slot[1]: torch.arange(queries if slot[3] == L else keys) >= lengths for slot in SLOTS[kind]
            }  # sample 0 is all padding
            if kind == DECODER_LAYER:
                words["memory_mask"] = torch.zeros(queries, keys, dtype=F64)
            want = module(*inputs, **words, **flags)
            same(compiled(inputs, words), want, TOL)
    assert len(counter.graphs) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@norms
def test_export(norm_first, strict):
    """The whole, with dynamic batch and both lengths, padding and is_causal: the eager numbers for any size."""

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = ours_alone(TRANSFORMER, norm_first=norm_first)

        def forward(self, src, tgt, rows):
            words = {"src_key_padding_mask": rows, "memory_key_padding_mask": rows, "tgt_is_causal": True}
            return self.model(src, tgt, **words)

    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source", "target"))
    shapes = ({0: batch, 1: source}, {0: batch, 1: target}, {0: batch, 1: source})
    model = Translator().eval()
    exported = torch.export.export(
        model, (draw(B, S, D), draw(B, L, D), padding(S)), dynamic_shapes=shapes, strict=strict
    ).module()
    for b, s, t in ((B, S, L), (5, 3, 11), (2, 29, 2)):
        rows = torch.arange(s) >= torch.arange(b)[:, None]  # sample 0 is all padding
        given = (draw(b, s, D), draw(b, t, D), rows)
        same(exported(*given), model(*given), TOL)


@trainings
@kinds
def test_vmap_over_an_ensemble(kind, training):
    """Stacked parameters: each member's output, and its gradient."""
    members = [ours_alone(kind, seed=n).train(training) for n in range(3)]
    stacked, _ = torch.func.stack_module_state(members)
    inputs, words = inputs_of(kind), masked(kind, "bool padding")

    def run(parameters):
        return torch.func.functional_call(members[0], parameters, inputs, words)

    outs = torch.func.vmap(run)(stacked)
    grads = torch.func.vmap(torch.func.grad(lambda p: run(p).pow(2).sum()))(stacked)
    for number, member in enumerate(members):
        want = member(*inputs, **words)
        same(outs[number], want, TOL)
        wanted = torch.autograd.grad(want.pow(2).sum(), list(member.parameters()))
        for (name, _), one in zip(member.named_parameters(), wanted, strict=True):
            same(grads[name][number], one, TOL, name)


@pytest.mark.parametrize(
    "wrong", [None, [1.0], "x", torch.zeros(()), torch.zeros(3), torch.zeros(1, 2, 3, 4)], ids=repr
)
@kinds
def test_what_is_no_sequence_is_named(kind, wrong):
    ours = build(headwise, kind, batch_first=True)
    word = "tgt" if "Decoder" in kind else "src"
    inputs = (wrong,) if "Encoder" in kind else (wrong, draw(B, S, D))
    with pytest.raises(
        ValueError, match=rf"^Transformer\w*: {word} must be a tensor, 3-D, or 2-D for one sample; got "
    ):
        ours(*inputs)


@pytest.mark.parametrize("word", ["src_key_padding_mask", "query_padding_mask"])
@pytest.mark.parametrize("kind", [ENCODER_LAYER, ENCODER])
def test_padding_on_another_device_is_named(kind, word):
    ours = build(headwise, kind, batch_first=True)
    elsewhere = torch.zeros(B, L, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match=r"padding_mask must be on the (input|query)'s device cpu; got meta"):
        ours(draw(B, L, D), **{word: elsewhere})
    here = torch.zeros(B, L, dtype=torch.bool)
    with pytest.raises(ValueError, match="padding_mask must be on"):
        ours(draw(B, L, D), src_key_padding_mask=elsewhere, query_padding_mask=here)
