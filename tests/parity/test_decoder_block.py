"""`DecoderBlock` and `Decoder` beside torch's decoder layers, and what torch has no counterpart of."""

from __future__ import annotations

import pytest
import torch
from tests.parity.pair import causal_mask, fill, same
from torch import nn
from torch.nn import functional as F

import headwise
from headwise import Decoder, DecoderBlock, masks

B, L, S, D, H, M, N = 3, 5, 7, 22, 2, 13, 17
INF = float("inf")
TOL = 1e-10
F64 = torch.float64

PRE_POST = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
ACTIVATION = pytest.mark.parametrize("activation", ["gelu", "relu"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def draw(*shape, seed=3):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


X, MEMORY, COTANGENT = draw(B, L, D), draw(B, S, D, seed=4), draw(B, L, D, seed=5)
PADDING = torch.arange(L) >= torch.tensor([5, 3, 1])[:, None]
MEMORY_PADDING = torch.arange(S) >= torch.tensor([4, 7, 1])[:, None]
BLOCKED = ((torch.arange(L)[:, None] + 2 * torch.arange(L)) % 5 == 3) & (torch.arange(L) > 0)
MEMORY_BLOCKED = ((torch.arange(L)[:, None] + torch.arange(S)) % 3 == 1) & (torch.arange(S) > 0)
HEADS, MEMORY_HEADS = draw(B * H, L, L, seed=6), draw(B * H, L, S, seed=7)


def minus_inf(block):
    return torch.zeros(block.shape, dtype=F64).masked_fill(block, -INF)


# name: (torch's words, ours)
MASKS = {
    "none": ({}, {}),
    "padding": (
        {"tgt_key_padding_mask": PADDING, "memory_key_padding_mask": MEMORY_PADDING},
        {"key_padding_mask": PADDING, "memory_key_padding_mask": MEMORY_PADDING},
    ),
    "floating padding": (
        {"tgt_key_padding_mask": draw(B, L) + minus_inf(PADDING), "memory_key_padding_mask": draw(B, S)},
        {"key_padding_mask": draw(B, L) + minus_inf(PADDING), "memory_key_padding_mask": draw(B, S)},
    ),
    "masks": (
        {"tgt_mask": BLOCKED, "memory_mask": MEMORY_BLOCKED},
        {"attn_mask": BLOCKED, "memory_attn_mask": MEMORY_BLOCKED},
    ),
    "floating masks": (
        {"tgt_mask": draw(L, L), "memory_mask": draw(L, S)},
        {"attn_mask": draw(L, L), "memory_attn_mask": draw(L, S)},
    ),
    "per head": (
        {"tgt_mask": HEADS, "memory_mask": MEMORY_HEADS},
        {"attn_mask": HEADS, "memory_attn_mask": MEMORY_HEADS},
    ),
    "causal": ({"tgt_mask": causal_mask(L)}, {"is_causal": True}),
    "causal, all": (
        {
            "tgt_mask": BLOCKED | causal_mask(L),
            "memory_mask": MEMORY_BLOCKED,
            "tgt_key_padding_mask": PADDING,
            "memory_key_padding_mask": MEMORY_PADDING,
        },
        {
            "is_causal": True,
            "attn_mask": BLOCKED,
            "memory_attn_mask": MEMORY_BLOCKED,
            "key_padding_mask": PADDING,
            "memory_key_padding_mask": MEMORY_PADDING,
        },
    ),
}
MASK = pytest.mark.parametrize("name", MASKS)
# ours: (as masks of headwise, as tensors)
OBJECTS = {
    "causal": ({"mask": masks.causal()}, {"is_causal": True}),
    "dense": (
        {"mask": masks.dense(~BLOCKED), "memory_mask": masks.dense(~MEMORY_BLOCKED)},
        {"attn_mask": BLOCKED, "memory_attn_mask": MEMORY_BLOCKED},
    ),
    "beside tensors": (
        {"mask": masks.causal(), "attn_mask": BLOCKED, "memory_mask": masks.padding(~MEMORY_PADDING)},
        {"is_causal": True, "attn_mask": BLOCKED, "memory_key_padding_mask": MEMORY_PADDING},
    ),
}


def block_of(dropout=0.0, heads=H, **options):
    return fill(DecoderBlock(D, heads, dropout, **({"feedforward_dim": M, "dtype": F64} | options)))


def torchs_attention(dropout=0.0, **options):
    return nn.MultiheadAttention(D, H, dropout, batch_first=True, dtype=F64, **options)


def couple(*, dropout=0.0, activation="relu", norm_first=True, bias=True, **ours_only):
    """torch's layer and our block with its parameters."""
    theirs = fill(
        nn.TransformerDecoderLayer(
            D, H, M, dropout, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=F64
        )
    )
    heads = None if len(ours_only) == 2 else H
    options = {"activation": activation, "norm_first": norm_first, "bias": bias}
    ours = block_of(dropout, heads, **options, **ours_only)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def gradients(module):
    """Every parameter's gradient under torch's names."""
    parameters = list(module.parameters())
    values = [its.data for its in parameters]
    for its in parameters:
        its.data = its.grad
    found = module.state_dict()
    for its, value in zip(parameters, values, strict=True):
        its.data = value
    return found


def everything(module, x, memory, words, rows=None):
    module.zero_grad()
    leaves = [x.clone().requires_grad_(), memory.clone().requires_grad_()]
    out = module(*leaves, **words)
    kept = slice(None) if rows is None else ~rows
    out[kept].backward(COTANGENT[kept] if out.dim() == 3 else COTANGENT[1])
    return {"output": out[kept].detach(), "x": leaves[0].grad, "memory": leaves[1].grad} | gradients(module)


def compare(theirs, ours, their_words, our_words, x=X, memory=MEMORY, rows=None):
    """Outputs, at the rows that are no padding, and all gradients."""
    wanted, got = everything(theirs, x, memory, their_words, rows), everything(ours, x, memory, our_words, rows)
    assert list(got) == list(wanted)
    for name, want in wanted.items():
        same(got[name], want, TOL, name)


# --- torch's layer ----------------------------------------------------------------------------------------------------


@PRE_POST
@ACTIVATION
@TRAINING
@MASK
def test_output_and_gradients(norm_first, activation, training, name):
    theirs, ours = couple(norm_first=norm_first, activation=activation)
    compare(theirs.train(training), ours.train(training), *MASKS[name])
    with torch.no_grad():
        same(ours(X, MEMORY, **MASKS[name][1]), theirs(X, MEMORY, **MASKS[name][0]), TOL)


@PRE_POST
@TRAINING
@pytest.mark.parametrize("name", ["none", "causal, all"])
def test_without_biases(norm_first, training, name):
    theirs, ours = couple(norm_first=norm_first, bias=False)
    assert not [key for key in ours.state_dict() if key.endswith("bias")]
    compare(theirs.train(training), ours.train(training), *MASKS[name])


@PRE_POST
@MASK
def test_unbatched(norm_first, name):
    """One sample without B: its own row of a padding mask, its own heads of a 3-D mask."""
    theirs, ours = couple(norm_first=norm_first)

    def one(words):
        return {
            word: mask
            if not isinstance(mask, torch.Tensor)
            else mask[1]
            if "padding" in word
            else mask[H : 2 * H]
            if mask.dim() == 3
            else mask
            for word, mask in words.items()
        }

    compare(theirs, ours, *(one(words) for words in MASKS[name]), X[1], MEMORY[1])


@PRE_POST
@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_and_first_values(norm_first, bias):
    """Names and order, both ways; and the same seed draws the same numbers, and the same after them."""
    torch.manual_seed(7)
    theirs = nn.TransformerDecoderLayer(D, H, M, 0.0, norm_first=norm_first, bias=bias, dtype=F64, batch_first=True)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    ours = DecoderBlock(D, H, feedforward_dim=M, norm_first=norm_first, activation="relu", bias=bias, dtype=F64)
    assert torch.equal(torch.get_rng_state(), after)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert [name for name, _ in ours.named_children()] == [name for name, _ in theirs.named_children()]
    theirs.load_state_dict(fill(ours, seed=9).state_dict())
    same(ours(X, MEMORY), theirs(X, MEMORY), TOL)


def test_defaults():
    """Pre-norm, GELU, no dropout, four times as wide; SwiGLU as many weights; nothing causal by itself."""
    block = DecoderBlock(D, H)
    assert (block.norm_first, block.activation) == (True, F.gelu)
    assert {m.p for m in block.modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert block.linear1.out_features == 4 * D
    assert DecoderBlock(D, H, activation="swiglu").linear1.out_features == 8 * D // 3
    theirs, ours = couple(activation="gelu")
    later = X.clone()
    later[:, -1] = X[:, 0]
    assert (ours(later, MEMORY) - ours(X, MEMORY))[:, 0].abs().max() > 1e-3
    same(ours(later, MEMORY, is_causal=True)[:, :-1], ours(X, MEMORY, is_causal=True)[:, :-1], TOL)
    same(ours(X, MEMORY), theirs(X, MEMORY), TOL)


# --- Options ----------------------------------------------------------------------------------------------------------

NORMS = {
    "layernorm": ("layernorm", lambda: nn.LayerNorm(D, 0.3, dtype=F64)),
    "rmsnorm": ("rmsnorm", lambda: nn.RMSNorm(D, 0.3, dtype=F64)),
    "class": (nn.RMSNorm, lambda: nn.RMSNorm(D, dtype=F64)),
    "module": (nn.LayerNorm(D, 0.2, bias=False), lambda: nn.LayerNorm(D, 0.2, bias=False, dtype=F64)),
}


@PRE_POST
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm_first, norm):
    """torch's layer with other norms put in."""
    given, make = NORMS[norm]
    theirs = nn.TransformerDecoderLayer(D, H, M, 0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    theirs.norm1, theirs.norm2, theirs.norm3 = make(), make(), make()
    ours = block_of(norm=given, norm_eps=0.3, norm_first=norm_first, activation="relu")
    ours.load_state_dict(fill(theirs).state_dict())
    assert len({id(p) for p in ours.parameters()}) == len(list(ours.parameters()))
    compare(theirs, ours, *MASKS["causal, all"])


ACTIVATIONS = {"callable": torch.tanh, "module": nn.SiLU(), "with parameters": nn.Linear(M, M, dtype=F64)}


@PRE_POST
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(norm_first, activation):
    """A callable, a module, and one with parameters, which stand where torch's stand."""
    theirs, ours = couple(activation=ACTIVATIONS[activation], norm_first=norm_first)
    compare(theirs, ours, *MASKS["causal, all"])


@PRE_POST
def test_swiglu(norm_first):
    ours = block_of(activation="swiglu", norm_first=norm_first)
    theirs = nn.TransformerDecoderLayer(D, H, M, 0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    theirs.linear3 = nn.Linear(D, M, dtype=F64)
    theirs.load_state_dict(ours.state_dict())
    theirs._ff_block = lambda x: theirs.linear2(F.silu(theirs.linear1(x)) * theirs.linear3(x))
    their_words, our_words = MASKS["causal, all"]
    same(ours(X, MEMORY, **our_words), theirs(X, MEMORY, **their_words), TOL)


@PRE_POST
def test_memory_dim(norm_first):
    """A memory of another width: torch's layer with such an attention put in."""
    theirs = nn.TransformerDecoderLayer(D, H, M, 0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    theirs.multihead_attn = torchs_attention(kdim=N, vdim=N)
    ours = block_of(memory_dim=N, norm_first=norm_first, activation="relu")
    ours.load_state_dict(fill(theirs).state_dict())
    compare(theirs, ours, *MASKS["causal, all"], memory=draw(B, S, N, seed=8))
    assert (ours.multihead_attn.kdim, ours.multihead_attn.vdim, ours.self_attn.kdim) == (N, N, D)


@PRE_POST
@pytest.mark.parametrize("objects", OBJECTS)
def test_masks_of_headwise(norm_first, objects):
    block = block_of(norm_first=norm_first)
    mine, tensors = OBJECTS[objects]
    out, weights = block(X, MEMORY, **mine, need_weights=True)
    want, wanted = block(X, MEMORY, **tensors, need_weights=True)
    same(out, want, TOL)
    for one, other in zip(weights, wanted, strict=True):
        same(one, other, TOL)
    same(block(X, MEMORY, **mine), want, TOL)


# --- Padding ----------------------------------------------------------------------------------------------------------

PATTERNS = {
    "right": PADDING,
    "left": PADDING.flip(1),
    "holes": torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool),
    "all padding": torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool),
}


@PRE_POST
@TRAINING
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stack", [False, True], ids=["block", "stack"])
def test_padding_rows_are_zero(norm_first, training, pattern, stack):
    """Exactly 0 in output and weights, what stands there has no influence, and the rest is each sample's alone."""
    rows = PATTERNS[pattern]
    module = block_of(norm_first=norm_first)
    if stack:
        module = fill(Decoder([module, block_of(norm_first=norm_first)], nn.LayerNorm(D, dtype=F64)))
    module.train(training)
    words = {"key_padding_mask": rows, "query_padding_mask": rows, "memory_key_padding_mask": MEMORY_PADDING}
    want = everything(module, X, MEMORY, words)
    assert torch.equal(want["output"][rows], torch.zeros_like(want["output"][rows]))
    assert want["x"][rows].eq(0).all()
    assert want["memory"][MEMORY_PADDING].eq(0).all()
    bad = X.masked_fill(rows[..., None], float("nan")), MEMORY.masked_fill(MEMORY_PADDING[..., None], INF)
    got = everything(module, *bad, words)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    with torch.no_grad():
        same(module(*bad, **words), want["output"], TOL)
    out, weights = module(*bad, **words, need_weights=True, average_attn_weights=False)
    same(out, want["output"], TOL)
    for one in [w for pair in weights for w in pair] if stack else weights:
        by_row = one.transpose(1, 2)  # (B, L, H, keys)
        assert torch.equal(by_row[rows], torch.zeros_like(by_row[rows]))
        same(by_row[~rows].sum(-1), torch.ones_like(by_row[~rows][..., 0]), TOL)
    for sample in range(B):
        keep, seen = ~rows[sample], ~MEMORY_PADDING[sample]
        if keep.any():
            alone = module(X[sample : sample + 1, keep], MEMORY[sample : sample + 1, seen])
            same(out[sample, keep], alone[0], TOL, f"sample {sample}")


@PRE_POST
def test_real_rows_stay_torchs(norm_first):
    theirs, ours = couple(norm_first=norm_first)
    their_words, our_words = MASKS["padding"]
    compare(theirs, ours, their_words, our_words | {"query_padding_mask": PADDING}, rows=PADDING)
    assert ours(X, MEMORY, **our_words)[PADDING].ne(0).all()  # only on request
    compare(theirs, ours, their_words, our_words)


# --- Attention passed in ----------------------------------------------------------------------------------------------


@PRE_POST
@TRAINING
@MASK
def test_with_torchs_attention(norm_first, training, name):
    parts = {"attention": torchs_attention(), "cross_attention": torchs_attention()}
    theirs, ours = couple(norm_first=norm_first, **parts)
    their_words, our_words = MASKS[name]
    compare(theirs.train(training), ours.train(training), their_words, our_words)
    out, (own, cross) = ours(X, MEMORY, **our_words, need_weights=True, average_attn_weights=False)
    same(out, theirs(X, MEMORY, **their_words), TOL)
    with_ours = couple(norm_first=norm_first)[1](X, MEMORY, **our_words, need_weights=True, average_attn_weights=False)
    same(own, with_ours[1][0], TOL)
    same(cross, with_ours[1][1], TOL)


@PRE_POST
def test_dropout_draws_in_torchs_order(norm_first):
    """With torch's attentions inside, the same seed drops the same numbers: each dropout stands where torch's does."""
    parts = {"attention": torchs_attention(0.25), "cross_attention": torchs_attention(0.25)}
    theirs, ours = couple(norm_first=norm_first, dropout=0.25, **parts)
    their_words, our_words = MASKS["causal, all"]
    outs = []
    for module, words in ((theirs, their_words), (ours, our_words)):
        torch.manual_seed(11)
        outs.append(module(X, MEMORY, **words))
    same(outs[1], outs[0], TOL)
    assert not torch.allclose(outs[0], theirs.eval()(X, MEMORY, **their_words))


@pytest.mark.parametrize("argument", ["attention", "cross_attention"])
def test_one_attention_passed_in(argument):
    """The other is built, with num_heads; what came is used, not copied."""
    given = fill(torchs_attention())
    block = DecoderBlock(D, H, feedforward_dim=M, dtype=F64, **{argument: given})
    children = (block.self_attn, block.multihead_attn)
    assert (children[0] is given, children[1] is given) == (argument == "attention", argument == "cross_attention")
    assert {type(child) for child in children} == {nn.MultiheadAttention, headwise.MultiheadAttention}
    ours = block_of()
    ours.load_state_dict(block.state_dict())
    same(block(X, MEMORY, is_causal=True), ours(X, MEMORY, is_causal=True), TOL)


class Mean(nn.Module):
    """A module that is called like an attention, and keeps the words."""

    def __init__(self):
        super().__init__()
        self.words = None

    def forward(self, query, key, value, need_weights=True, **words):
        self.words = words
        weights = query.new_ones(query.shape[0], query.shape[1], key.shape[1]) / key.shape[1]
        return weights @ value, weights if need_weights else None


@PRE_POST
def test_any_attention(norm_first):
    """Called with the words that were given and no others."""
    own, cross = Mean(), Mean()
    block = fill(
        DecoderBlock(D, feedforward_dim=M, norm_first=norm_first, attention=own, cross_attention=cross, dtype=F64)
    )
    out, weights = block(X, MEMORY, need_weights=True)
    assert (own.words, cross.words) == ({}, {})
    same(weights[0], torch.full((B, L, L), 1 / L, dtype=F64), TOL)
    same(weights[1], torch.full((B, L, S), 1 / S, dtype=F64), TOL)

    def feed(z):
        return block.linear2(F.gelu(block.linear1(z)))

    if norm_first:
        want = X + block.norm1(X).mean(1, keepdim=True)
        want = want + MEMORY.mean(1, keepdim=True)
        want = want + feed(block.norm3(want))
    else:
        want = block.norm1(X + X.mean(1, keepdim=True))
        want = block.norm2(want + MEMORY.mean(1, keepdim=True))
        want = block.norm3(want + feed(want))
    same(out, want, TOL)
    words = {"key_padding_mask": PADDING, "memory_attn_mask": MEMORY_BLOCKED, "average_attn_weights": False}
    block(X, MEMORY, **words, is_causal=True, memory_mask=masks.causal())
    assert set(own.words) == {"key_padding_mask", "is_causal", "average_attn_weights"}
    assert own.words["is_causal"] is True
    assert own.words["key_padding_mask"] is PADDING
    assert set(cross.words) == {"attn_mask", "mask", "average_attn_weights"}
    assert cross.words["attn_mask"] is MEMORY_BLOCKED


# --- Weights ----------------------------------------------------------------------------------------------------------


@PRE_POST
@TRAINING
@MASK
def test_weights_are_torchs(norm_first, training, name):
    """Both pairs of averaged and per-head weights are those of torch's attentions on what they were given."""
    theirs, ours = couple(norm_first=norm_first)
    ours.train(training)
    their_words, our_words = MASKS[name]
    seen = []
    for attention in (theirs.self_attn, theirs.multihead_attn):
        attention.register_forward_pre_hook(lambda _, args: seen.append(args))
    want = theirs(X, MEMORY, **their_words)
    calls = list(seen)
    for average in (True, False, None):
        out, weights = ours(X, MEMORY, **our_words, need_weights=True, average_attn_weights=average)
        same(out, want, TOL)
        assert isinstance(weights, tuple)
        for prefix, attention, args, got in zip(
            ("tgt", "memory"), (theirs.self_attn, theirs.multihead_attn), calls, weights, strict=True
        ):
            wanted = attention(
                *args,
                attn_mask=their_words.get(f"{prefix}_mask"),
                key_padding_mask=their_words.get(f"{prefix}_key_padding_mask"),
                average_attn_weights=average is not False,
            )[1]
            same(got, wanted, TOL, prefix)


def test_weights_unbatched():
    _, (own, cross) = block_of()(X[0], MEMORY[0], need_weights=True)
    assert (own.shape, cross.shape) == ((L, L), (L, S))


# --- The stack --------------------------------------------------------------------------------------------------------


@PRE_POST
@TRAINING
@MASK
def test_stack(norm_first, training, name):
    """torch's decoder with its state dict, the norm last."""
    layer = nn.TransformerDecoderLayer(D, H, M, 0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    theirs = fill(nn.TransformerDecoder(layer, 2, nn.LayerNorm(D, dtype=F64)))
    blocks = [block_of(norm_first=norm_first, activation="relu") for _ in range(2)]
    ours = Decoder(iter(blocks), nn.LayerNorm(D, dtype=F64))
    ours.load_state_dict(theirs.state_dict())
    assert [block is kept for block, kept in zip(blocks, ours.layers, strict=True)] == [True, True]
    compare(theirs.train(training), ours.train(training), *MASKS[name])
    out, weights = ours(X, MEMORY, **MASKS[name][1], need_weights=True, average_attn_weights=False)
    same(out, theirs(X, MEMORY, **MASKS[name][0]), TOL)
    x = X
    for block, pair in zip(blocks, weights, strict=True):
        x, wanted = block(x, MEMORY, **MASKS[name][1], need_weights=True, average_attn_weights=False)
        for one, other in zip(pair, wanted, strict=True):
            same(one, other, TOL)


def test_stack_of_shared_and_without_norm():
    block = block_of()
    stack = Decoder([block, block])
    assert stack.norm is None
    assert len(list(stack.parameters())) == len(list(block.parameters()))
    same(stack(X, MEMORY, is_causal=True), block(block(X, MEMORY, is_causal=True), MEMORY, is_causal=True), TOL)


# --- Errors -----------------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    def forward(self, query, key, value, **words):
        return query


class Silent(nn.Module):
    def forward(self, query, key, value, **words):
        return query, None


def with_torchs(**words):
    return DecoderBlock(D, attention=torchs_attention(), cross_attention=torchs_attention(), dtype=F64)(
        X, MEMORY, **words
    )


def call(x, memory, **words):
    return block_of(norm_first=False)(x, memory, **words)


NARROW = nn.MultiheadAttention(20, 2, batch_first=True)
ERRORS = {
    "heads": (lambda: DecoderBlock(D, 3), r"embed_dim must be a multiple of num_heads 3"),
    "no heads": (lambda: DecoderBlock(D), r"DecoderBlock: num_heads must be given, or attention; got None"),
    "no heads for the other": (
        lambda: DecoderBlock(D, attention=torchs_attention()),
        r"DecoderBlock: num_heads must be given, or cross_attention; got None",
    ),
    "dropout": (
        lambda: DecoderBlock(D, H, 2.0),
        r"DecoderBlock: dropout must be in \[0, 1\].*feedforward_dim; got 2.0",
    ),
    "width": (lambda: DecoderBlock(D, H, feedforward_dim=0), r"DecoderBlock: feedforward_dim must .* got 0"),
    "memory_dim": (lambda: DecoderBlock(D, H, memory_dim=0), r"kdim must .* got 0"),
    "activation": (lambda: DecoderBlock(D, H, activation="elu"), r"DecoderBlock: activation must .*'elu'"),
    "norm": (lambda: DecoderBlock(D, H, norm="batchnorm"), r"DecoderBlock: norm must .*'batchnorm'"),
    "no module": (lambda: DecoderBlock(D, H, attention=torch.tanh), r"attention must be a module; got builtin"),
    "width of attention": (
        lambda: DecoderBlock(D, H, attention=NARROW),
        r"DecoderBlock: attention.embed_dim must be 22; got 20",
    ),
    "width of cross_attention": (
        lambda: DecoderBlock(D, H, cross_attention=NARROW),
        r"DecoderBlock: cross_attention.embed_dim must be 22; got 20",
    ),
    "heads of attention": (
        lambda: DecoderBlock(D, 11, attention=torchs_attention()),
        r"attention.num_heads must be 11; got 2",
    ),
    "lengths first": (
        lambda: DecoderBlock(D, H, cross_attention=nn.MultiheadAttention(D, H)),
        r"cross_attention.batch_first must be True; got False",
    ),
    "memory_dim of cross_attention": (
        lambda: DecoderBlock(D, H, memory_dim=N, cross_attention=torchs_attention()),
        r"cross_attention.kdim must be 17; got 22",
    ),
    "no blocks": (lambda: Decoder([]), r"Decoder: layers must hold at least one block; got none"),
    "x": (lambda: call(draw(B, L, 7), MEMORY), r"query must be 22 wide; got 7"),
    "x, pre-norm": (lambda: block_of()(draw(B, L, 7), MEMORY), r"DecoderBlock: x must be 22 wide; got 7"),
    "memory": (lambda: call(X, draw(B, S, 7)), r"key must be 22 wide; got 7"),
    "batch of the memory": (lambda: call(X, MEMORY[:2]), r"key must have the query's batch size 3"),
    "rank of the memory": (lambda: call(X, MEMORY[0]), r"must be all 3-D, or all 2-D"),
    "dtype of the memory": (lambda: call(X, MEMORY.float()), r"key must have the parameters' dtype"),
    "padding": (lambda: call(X, MEMORY, key_padding_mask=PADDING[:, :4]), r"key_padding_mask must be .*\(3, 5\)"),
    "memory's padding": (
        lambda: call(X, MEMORY, memory_key_padding_mask=PADDING),
        r"key_padding_mask must be .*\(3, 7\); got \(3, 5\)",
    ),
    "query padding": (
        lambda: call(X, MEMORY, query_padding_mask=MEMORY_PADDING),
        r"DecoderBlock: query_padding_mask must be bool \(3, 5\), True = padding; got torch.bool \(3, 7\)",
    ),
    "floating query padding": (
        lambda: call(X, MEMORY, query_padding_mask=PADDING.double()),
        r"query_padding_mask must be bool .*float64",
    ),
    "a tensor as mask": (lambda: call(X, MEMORY, memory_mask=MEMORY_BLOCKED), r"mask must be a Mask .*dense\(keep\)"),
    "a Mask for torch's": (
        lambda: with_torchs(mask=masks.causal()),
        r"DecoderBlock: mask must be None with a torch.nn.MultiheadAttention",
    ),
    "a Mask of the memory for torch's": (
        lambda: with_torchs(memory_mask=masks.causal()),
        r"DecoderBlock: mask must be None with a torch.nn.MultiheadAttention",
    ),
    "a bare tensor": (
        lambda: DecoderBlock(D, H, attention=Bare(), dtype=F64)(X, MEMORY),
        r"attention must return \(output, weights\); got Tensor from Bare",
    ),
    "no weights": (
        lambda: DecoderBlock(D, H, cross_attention=Silent(), dtype=F64)(X, MEMORY, need_weights=True),
        r"attention must return weights where need_weights is True; got None from Silent",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    make, match = ERRORS[error]
    with pytest.raises(ValueError, match=match):
        make()
