"""`EncoderBlock` beside `torch.nn.TransformerEncoderLayer`, and beside a block written down from the textbook."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tests.parity.pair import causal_mask, fill, same, torch_grads
from torch import nn
from torch.nn import functional as F

from headwise import EncoderBlock

D, H, B, L, M = 15, 3, 2, 7, 11
INF = float("inf")
TOL = 1e-11  # float64

PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 3 + [True] * 4])
BLOCKED = causal_mask(L) | (torch.arange(L) == 4)  # every row sees key 0, which is no padding
PER_HEAD = torch.arange(B * H)[:, None, None] % 5 == (torch.arange(L) - torch.arange(L)[:, None]) % 7
PRE_POST = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
ACTIVATION = pytest.mark.parametrize("activation", ["gelu", "relu"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def minus_inf(block):
    return torch.zeros(block.shape, dtype=torch.float64).masked_fill(block, -INF)


def scores(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


# name: (torch's words, ours)
MASKS = {
    "none": ({}, {}),
    "padding bool": ({"src_key_padding_mask": PADDING}, {"key_padding_mask": PADDING}),
    "padding float": (
        {"src_key_padding_mask": minus_inf(PADDING) + scores(B, L)},
        {"key_padding_mask": minus_inf(PADDING) + scores(B, L)},
    ),
    "attn_mask bool": ({"src_mask": BLOCKED}, {"attn_mask": BLOCKED}),
    "attn_mask float": ({"src_mask": scores(L, L)}, {"attn_mask": scores(L, L)}),
    "attn_mask 3-D bool": ({"src_mask": PER_HEAD}, {"attn_mask": PER_HEAD}),
    "attn_mask 3-D float": ({"src_mask": scores(B * H, L, L)}, {"attn_mask": scores(B * H, L, L)}),
    "causal": ({"src_mask": causal_mask(L)}, {"is_causal": True}),
    "causal and padding": (
        {"src_mask": causal_mask(L), "src_key_padding_mask": PADDING},
        {"is_causal": True, "key_padding_mask": PADDING},
    ),
    "causal and attn_mask bool": (
        {"src_mask": BLOCKED},
        {"is_causal": True, "attn_mask": (torch.arange(L) == 4).expand(L, L)},
    ),
    "causal and attn_mask float": (
        {"src_mask": minus_inf(causal_mask(L)) + scores(L, L)},
        {"is_causal": True, "attn_mask": scores(L, L)},
    ),
    "all, of two dtypes": (
        {"src_mask": minus_inf(BLOCKED), "src_key_padding_mask": minus_inf(PADDING) + scores(B, L)},
        {"is_causal": True, "attn_mask": BLOCKED, "key_padding_mask": minus_inf(PADDING) + scores(B, L)},
    ),
}  # fmt: skip
MASK = pytest.mark.parametrize("masks", MASKS)


def block_pair(*, heads=H, dropout=0.0, activation="gelu", norm_first=True, bias=True, **ours_only):
    """torch's layer and our block with its parameters, float64."""
    width = D // H * heads
    theirs = nn.TransformerEncoderLayer(
        width, heads, M, dropout, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=torch.float64
    )
    fill(theirs)
    if "attention" in ours_only:
        ours_only["attention"] = nn.MultiheadAttention(
            width, heads, dropout, bias=bias, batch_first=True, dtype=torch.float64
        )
    ours = EncoderBlock(
        width,
        None if "attention" in ours_only else heads,
        dropout,
        feedforward_dim=M,
        activation=activation,
        norm_first=norm_first,
        bias=bias,
        dtype=torch.float64,
        **ours_only,
    )
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def block_grads(block):
    """Every parameter gradient under torch's names."""
    attention = block.self_attn
    found = {f"self_attn.{name}": grad for name, grad in torch_grads(attention).items()}
    for name, parameter in block.named_parameters():
        if not name.startswith("self_attn."):
            assert parameter.grad is not None, f"no gradient in {name}"
            found[name] = parameter.grad
    return found


def same_grads(ours, theirs):
    ours, theirs = block_grads(ours), block_grads(theirs)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert grad.abs().max() > 0 or "in_proj_bias" in name, f"{name} has no influence: the test would be empty"
        same(ours[name], grad, TOL, name)


def x_and_cotangent(*shape):
    generator = torch.Generator().manual_seed(5)
    x, cotangent = torch.randn(2, *(shape or (B, L, D)), dtype=torch.float64, generator=generator)
    return x, cotangent


def compare(theirs, ours, their_words, our_words, x, cotangent, rows=None):
    """Outputs (at the rows that are no padding) and all gradients."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    wanted, got = theirs(inputs[0], **their_words), ours(inputs[1], **our_words)
    same(got if rows is None else got[~rows], wanted if rows is None else wanted[~rows], TOL, "output")
    cotangent = cotangent if rows is None else cotangent.masked_fill(rows[..., None], 0.0)
    wanted.backward(cotangent)
    got.backward(cotangent)
    same(inputs[1].grad, inputs[0].grad, TOL, "gradient of x")
    same_grads(ours, theirs)


# --- torch's layer ----------------------------------------------------------------------------------------------------


@PRE_POST
@ACTIVATION
@TRAINING
@MASK
def test_output_and_gradients(norm_first, activation, training, masks):
    theirs, ours = block_pair(norm_first=norm_first, activation=activation)
    compare(theirs.train(training), ours.train(training), *MASKS[masks], *x_and_cotangent())


@PRE_POST
@ACTIVATION
@TRAINING
@pytest.mark.parametrize("masks", ["none", "padding bool", "causal and attn_mask float"])
def test_without_biases(norm_first, activation, training, masks):
    theirs, ours = block_pair(norm_first=norm_first, activation=activation, bias=False)
    assert not [name for name in ours.state_dict() if name.endswith("bias")]
    compare(theirs.train(training), ours.train(training), *MASKS[masks], *x_and_cotangent())


@PRE_POST
@TRAINING
@pytest.mark.parametrize("masks", MASKS)
def test_unbatched(norm_first, training, masks):
    """One sample without B: its own row of a padding mask, its own heads of a 3-D mask."""
    theirs, ours = block_pair(norm_first=norm_first)
    narrow = {"src_key_padding_mask": 1, "key_padding_mask": 1}
    sample = 1

    def one(words):
        words = {word: mask[sample] if word in narrow else mask for word, mask in words.items()}
        return {
            word: mask[sample * H : (sample + 1) * H] if isinstance(mask, torch.Tensor) and mask.dim() == 3 else mask
            for word, mask in words.items()
        }

    x, cotangent = x_and_cotangent()
    their_words, our_words = MASKS[masks]
    compare(
        theirs.train(training), ours.train(training), one(their_words), one(our_words), x[sample], cotangent[sample]
    )


@PRE_POST
@TRAINING
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_real_rows_with_query_padding(norm_first, training, kind):
    """With query_padding_mask the padded rows are 0; all others, and every gradient, stay torch's."""
    theirs, ours = block_pair(norm_first=norm_first)
    padding = PADDING if kind == "bool" else minus_inf(PADDING)
    words = {"key_padding_mask": padding, "query_padding_mask": PADDING}
    x, cotangent = x_and_cotangent()
    compare(theirs, ours, {"src_key_padding_mask": padding}, words, x, cotangent, rows=PADDING)
    assert ours(x, **words)[PADDING].eq(0).all()


@PRE_POST
@ACTIVATION
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("masks", ["none", "padding bool", "attn_mask bool", "causal"])
def test_torchs_fast_path(norm_first, activation, grad_mode, masks):
    """An even number of heads in eval without gradients, where torch runs another kernel."""
    theirs, ours = block_pair(norm_first=norm_first, activation=activation, heads=2)
    x, _ = x_and_cotangent(B, L, 2 * D // H)
    their_words, our_words = MASKS[masks]
    rows = PADDING if "padding" in masks else torch.zeros(B, L, dtype=torch.bool)
    with grad_mode():
        wanted, got = theirs.eval()(x, **their_words), ours.eval()(x, **our_words)
    same(got[~rows], wanted[~rows], TOL, "output")


@PRE_POST
@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_both_ways(norm_first, bias):
    theirs, ours = block_pair(norm_first=norm_first, bias=bias)
    assert [(name, t.shape) for name, t in ours.state_dict().items()] == [
        (name, t.shape) for name, t in theirs.state_dict().items()
    ]
    fill(ours, seed=9)
    theirs.load_state_dict(ours.state_dict())
    x, _ = x_and_cotangent()
    same(ours(x), theirs(x), TOL, "output")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fused", [False, True], ids=["ours", "attention passed in"])
def test_same_seed_same_initial_weights(bias, fused):
    """The order of the draws is torch's, also behind the block: what is built next starts the same."""
    arguments = {"batch_first": True, "bias": bias}
    torch.manual_seed(7)
    theirs = [nn.TransformerEncoderLayer(D, H, M, **arguments), nn.Linear(3, 5)]
    torch.manual_seed(7)
    attention = nn.MultiheadAttention(D, H, **arguments) if fused else None
    ours = [EncoderBlock(D, H, feedforward_dim=M, bias=bias, attention=attention), nn.Linear(3, 5)]
    for one, other in zip(ours, theirs, strict=True):
        wanted = other.state_dict()
        assert one.state_dict().keys() == wanted.keys()
        for name, parameter in one.state_dict().items():
            assert torch.equal(parameter, wanted[name]), name


def test_defaults_are_four_times_as_wide():
    assert EncoderBlock(D, H).linear1.out_features == 4 * D
    assert EncoderBlock(D, H, activation="swiglu").linear1.out_features == 8 * D // 3
    wide, gated = EncoderBlock(30, 3, bias=False), EncoderBlock(30, 3, bias=False, activation="swiglu")
    assert sum(p.numel() for p in wide.parameters()) == sum(p.numel() for p in gated.parameters())


# --- Attention passed in ----------------------------------------------------------------------------------------------


@PRE_POST
@TRAINING
@MASK
def test_with_torchs_attention(norm_first, training, masks):
    theirs, ours = block_pair(norm_first=norm_first, attention=True)
    their_words, our_words = MASKS[masks]
    our_words = dict(our_words)
    if masks == "all, of two dtypes":  # torch warns where its two masks differ
        our_words["attn_mask"] = minus_inf(our_words["attn_mask"])
    compare(theirs.train(training), ours.train(training), their_words, our_words, *x_and_cotangent())


@PRE_POST
@pytest.mark.parametrize("masks", ["none", "padding bool", "causal and attn_mask float"])
def test_dropout_draws_in_torchs_order(norm_first, masks):
    """With torch's attention inside, the same seed drops the same numbers: each dropout stands where torch's does."""
    theirs, ours = block_pair(norm_first=norm_first, dropout=0.25, attention=True)
    x, _ = x_and_cotangent()
    their_words, our_words = MASKS[masks]
    torch.manual_seed(11)
    wanted = theirs(x, **their_words)
    torch.manual_seed(11)
    got = ours(x, **our_words)
    same(got, wanted, TOL, "output")
    assert not torch.allclose(wanted, theirs.eval()(x, **their_words))


@PRE_POST
@pytest.mark.parametrize("average", [True, False, None])
@pytest.mark.parametrize("masks", MASKS)
def test_weights_are_torchs(norm_first, average, masks):
    theirs, ours = block_pair(norm_first=norm_first)
    _, with_torchs = block_pair(norm_first=norm_first, attention=True)
    x, _ = x_and_cotangent()
    their_words, our_words = MASKS[masks]
    z = theirs.norm1(x) if norm_first else x
    _, wanted = theirs.self_attn(
        z,
        z,
        z,
        attn_mask=their_words.get("src_mask"),
        key_padding_mask=their_words.get("src_key_padding_mask"),
        average_attn_weights=average is not False,
    )
    same(ours(x, **our_words, need_weights=True, average_attn_weights=average)[1], wanted, TOL, "weights")
    if masks != "all, of two dtypes":
        out, weights = with_torchs(x, **our_words, need_weights=True, average_attn_weights=average)
        same(weights, wanted, TOL, "weights of torch's attention")
        same(out, theirs(x, **their_words), TOL, "output with torch's attention")


# --- The textbook -----------------------------------------------------------------------------------------------------


def layer_norm(x, p, name, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(x, p, name, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"]


def textbook(p, x, *, norm, eps, activation, norm_first, hidden=None):
    """(output, weights per head) of a block, in the words of arXiv 1706.03762, from its parameters `p` by name."""

    def heads(z, letter):
        z = z @ p[f"self_attn.{letter}_proj.weight"].T + p[f"self_attn.{letter}_proj.bias"]
        return torch.stack(z.split(D // H, dim=-1), dim=1)

    def attend(z):
        q, k, v = (heads(z, letter) for letter in "qkv")
        logits = torch.einsum("bhlk,bhsk->bhls", q, k) / (D // H) ** 0.5
        if hidden is not None:
            logits = logits.masked_fill(hidden[:, None, None], -INF)
        weights = logits.softmax(-1)
        mixed = torch.cat(torch.einsum("bhls,bhsk->bhlk", weights, v).unbind(1), dim=-1)
        return mixed @ p["self_attn.out_proj.weight"].T + p["self_attn.out_proj.bias"], weights

    def feed(z):
        inner = z @ p["linear1.weight"].T + p["linear1.bias"]
        if activation == "swiglu":
            inner = inner * torch.sigmoid(inner) * (z @ p["linear3.weight"].T + p["linear3.bias"])
        else:
            inner = activation(inner)
        return inner @ p["linear2.weight"].T + p["linear2.bias"]

    if norm_first:
        attended, weights = attend(norm(x, p, "norm1", eps))
        x = x + attended
        return x + feed(norm(x, p, "norm2", eps)), weights
    attended, weights = attend(x)
    x = norm(x + attended, p, "norm1", eps)
    return norm(x + feed(x), p, "norm2", eps), weights


def gelu(z):
    return 0.5 * z * (1 + torch.erf(z / 2**0.5))


EPS64 = torch.finfo(torch.float64).eps
NORMS = {
    "layernorm": ({"norm": "layernorm", "norm_eps": 0.3}, layer_norm, 0.3),
    "rmsnorm": ({"norm": "rmsnorm", "norm_eps": 0.3}, rms_norm, 0.3),
    "class": ({"norm": nn.RMSNorm, "norm_eps": 0.3}, rms_norm, EPS64),  # norm_eps is of the names only
    "factory": ({"norm": lambda width: nn.LayerNorm(width, eps=0.2)}, layer_norm, 0.2),
    "module": ({"norm": nn.LayerNorm(D, eps=0.2, dtype=torch.float64)}, layer_norm, 0.2),
}
ACTIVATIONS = {
    "gelu": ("gelu", gelu),
    "relu": ("relu", lambda z: z.clamp(min=0)),
    "swiglu": ("swiglu", "swiglu"),
    "callable": (torch.tanh, torch.tanh),
    "module": (nn.PReLU(M, init=0.125, dtype=torch.float64), lambda z: torch.where(z > 0, z, 0.125 * z)),
}


def fill_but_activation(block):
    kept = {n: t.clone() for n, t in block.state_dict().items() if n.startswith("activation")}
    fill(block)
    block.load_state_dict(kept, strict=False)
    return block


def made(norm="layernorm", activation="gelu", norm_first=True, **more):
    arguments, by_hand, eps = NORMS[norm]
    given, by_formula = ACTIVATIONS[activation]
    if isinstance(given, nn.PReLU):
        given = _LastAxisPReLU(given)
    block = EncoderBlock(
        D, H, feedforward_dim=M, activation=given, norm_first=norm_first, dtype=torch.float64, **arguments, **more
    )
    return fill_but_activation(block), {
        "norm": by_hand,
        "eps": eps,
        "activation": by_formula,
        "norm_first": norm_first,
    }


class _LastAxisPReLU(nn.Module):
    """PReLU counts channels on axis 1; ours are on the last."""

    def __init__(self, prelu):
        super().__init__()
        self.prelu = copy.deepcopy(prelu)

    def forward(self, z):
        return self.prelu(z.transpose(1, -1)).transpose(1, -1)


@PRE_POST
@pytest.mark.parametrize(
    ("norm", "activation"),
    sorted({*itertools.product(NORMS, ["gelu", "swiglu"]), *itertools.product(["layernorm", "rmsnorm"], ACTIVATIONS)}),
)
def test_textbook(norm_first, norm, activation):
    block, how = made(norm, activation, norm_first)
    x, cotangent = x_and_cotangent()
    ones = [x.clone().requires_grad_() for _ in range(2)]
    got, weights = block(ones[0], key_padding_mask=PADDING, need_weights=True, average_attn_weights=False)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in block.named_parameters()}
    wanted, by_hand = textbook(parameters, ones[1], hidden=PADDING, **how)
    same(got, wanted, TOL, "output")
    same(weights, by_hand, TOL, "weights")
    same(block(x, key_padding_mask=PADDING), wanted, TOL, "output without weights")
    got.backward(cotangent)
    wanted.backward(cotangent)
    same(ones[0].grad, ones[1].grad, TOL, "gradient of x")
    for name, parameter in block.named_parameters():
        if not name.startswith("activation"):
            same(parameter.grad, parameters[name].grad, TOL, name)
    if activation == "module":
        (slope,) = [p for n, p in block.named_parameters() if n.startswith("activation")]
        assert slope.grad is not None
        assert slope.grad.abs().max() > 0


def test_swiglu_against_its_formula():
    """arXiv 2002.05202: swish of one product gates the other, not the other way round."""
    block, _ = made(activation="swiglu")
    x, _ = x_and_cotangent()
    z = block.norm2(x)
    wanted = block.linear2(F.silu(block.linear1(z)) * block.linear3(z))
    with torch.no_grad():
        block.self_attn.out_proj.weight.zero_()
        block.self_attn.out_proj.bias.zero_()
    same(block(x) - x, wanted, TOL, "feed-forward")


def test_a_norm_module_is_copied():
    given = nn.LayerNorm(D, eps=0.2, dtype=torch.float64)
    nn.init.normal_(given.weight)
    block = EncoderBlock(D, H, norm=given, dtype=torch.float64)
    held = {id(p) for p in given.parameters()}
    for one, other in itertools.combinations([given, block.norm1, block.norm2], 2):
        assert one is not other
        assert one.weight is not other.weight
        assert torch.equal(one.weight, other.weight)
        assert one.eps == other.eps == 0.2
    assert not held & {id(p) for p in block.parameters()}


def test_a_norm_factory_makes_two():
    widths = []

    def factory(width):
        widths.append(width)
        return nn.RMSNorm(width)

    block = EncoderBlock(D, H, norm=factory, dtype=torch.float64)
    assert widths == [D, D]
    assert block.norm1.weight is not block.norm2.weight
    assert block.norm1.weight.dtype == block.norm2.weight.dtype == torch.float64
