"""`EncoderBlock` and `Encoder`: padded queries, weights, errors, and all that PyTorch does with a module."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compiling import Counter
from torch import Tensor, nn
from torch.export import Dim, export
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwise import Encoder, EncoderBlock, MultiheadAttention, attention_weights, masks

D, H, B, L, M = 15, 3, 2, 7, 11
INF, NAN = float("inf"), float("nan")
F64 = torch.float64
PADDING = torch.tensor([[False] * 5 + [True] * 2, [False, False, True, False, True, True, True]])
PRE_POST = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
AVERAGE = pytest.mark.parametrize("average", [True, False], ids=["averaged", "per head"])


def fill(module: nn.Module, seed: int = 1) -> Any:
    """Random parameters everywhere, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if parameter.dim() > 1 else 1.0))
    return module


def made(*, width: int = D, dropout: float = 0.0, seed: int = 1, dtype: torch.dtype = F64, **more: Any) -> EncoderBlock:
    if "attention" not in more:
        more["num_heads"] = H
    block: EncoderBlock = fill(EncoderBlock(width, dropout=dropout, feedforward_dim=M, dtype=dtype, **more), seed)
    return block


def stack(*, norm: bool = True, layers: int = 2, **more: Any) -> Encoder:
    last = fill(nn.LayerNorm(D, dtype=F64), 5) if norm else None
    return Encoder([made(seed=3 + index, **more) for index in range(layers)], last)


def data(*shape: int, dtype: torch.dtype = F64, seed: int = 5) -> Tensor:
    return torch.randn(*(shape or (B, L, D)), generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def minus_inf(block: Tensor) -> Tensor:
    return torch.zeros(block.shape, dtype=F64).masked_fill(block, -INF)


def rows_of(padding: Tensor, weights: Tensor) -> Tensor:
    """The padded rows of (.., L, S) or (.., H, L, S) weights, as a mask that broadcasts."""
    return (padding if weights.dim() == padding.dim() + 1 else padding.unsqueeze(-2))[..., None]


def both(block: nn.Module, x: Tensor, **words: Any) -> tuple[Tensor, Tensor]:
    """Output and weights."""
    out, weights = block(x, need_weights=True, **words)
    assert isinstance(out, Tensor)
    assert isinstance(weights, Tensor)
    return out, weights


# --- query_padding_mask -----------------------------------------------------------------------------------------------


def compiled(block: nn.Module, x: Tensor, **words: Any) -> Any:
    return torch.compile(block, backend="eager", fullgraph=True)(x, **words)


def vmapped(block: nn.Module, x: Tensor, **words: Any) -> Any:
    """Each sample by itself, unbatched; masks are per sample, all other words are the same for all."""
    mapped = {word: value for word, value in words.items() if isinstance(value, Tensor)}
    others = {word: value for word, value in words.items() if word not in mapped}

    def one(x: Tensor, mapped: dict[str, Tensor]) -> Any:
        return block(x, **mapped, **others)

    return torch.func.vmap(one, randomness="different")(x, mapped)


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda block, x, **words: block(x, **words),
    "compiled": compiled,
    "vmapped": vmapped,
}


def way_and_training() -> Any:
    """Compiled takes a second a case: once in train and once in eval are enough."""
    return pytest.mark.parametrize(
        ("way", "training", "need_weights", "average", "norm_first"),
        [
            (way, training, need_weights, average, norm_first)
            for way in WAYS
            for training in (True, False)
            for need_weights, average in ((True, True), (True, False), (False, None))
            for norm_first in (True, False)
            if way != "compiled" or ((training == norm_first) and (training, average) in ((True, False), (False, None)))
        ],
    )


@way_and_training()
def test_padded_queries_are_exactly_zero(
    way: str, training: bool, need_weights: bool, average: bool | None, norm_first: bool
) -> None:
    """And all other rows, and all other weights, are what they are without it."""
    block, x = made(norm_first=norm_first).train(training), data()
    wanted, whole = both(block, x, key_padding_mask=PADDING, average_attn_weights=average)
    words = {
        "key_padding_mask": PADDING,
        "query_padding_mask": PADDING,
        "need_weights": need_weights,
        "average_attn_weights": average,
    }
    result = WAYS[way](block, x, **words)
    out = result[0] if need_weights else result
    assert torch.equal(out[PADDING], torch.zeros_like(out[PADDING]))
    assert_close(out, wanted.masked_fill(PADDING[..., None], 0.0))
    assert wanted[PADDING].abs().min() > 0
    if need_weights:
        weights = result[1]
        assert weights.shape == whole.shape == ((B, L, L) if average else (B, H, L, L))
        rows = rows_of(PADDING, weights)
        assert weights.masked_select(rows).eq(0).all()
        assert whole.masked_select(rows).ne(0).any()
        assert_close(weights, whole.masked_fill(rows, 0.0))


@pytest.mark.parametrize("average", [True, False, None])
@TRAINING
def test_query_padding_mask_alone(training: bool, average: bool | None) -> None:
    """Padded positions are still seen as keys: only key_padding_mask hides those."""
    block, x = made().train(training), data()
    wanted, whole = both(block, x, average_attn_weights=average)
    out, weights = both(block, x, query_padding_mask=PADDING, average_attn_weights=average)
    assert torch.equal(out, wanted.masked_fill(PADDING[..., None], 0.0))
    assert torch.equal(weights, whole.masked_fill(rows_of(PADDING, whole), 0.0))
    assert weights[0].select(-1, -1).ne(0).any()
    alone = block(x, query_padding_mask=PADDING)
    assert alone[PADDING].eq(0).all()
    assert_close(alone, out)


def test_query_padding_mask_need_not_hide_the_same_positions() -> None:
    """A position that is padding as a query only still feeds the others, and gets their gradient."""
    keys, queries = torch.zeros(B, L, dtype=torch.bool), torch.zeros(B, L, dtype=torch.bool)
    keys[:, 1:3], queries[:, 2:5] = True, True
    block, x = made(), data().requires_grad_()
    wanted = block(x, key_padding_mask=keys).masked_fill(queries[..., None], 0.0)
    out = block(x, key_padding_mask=keys, query_padding_mask=queries)
    assert_close(out, wanted)
    cotangent = data(seed=7)
    got, want = (torch.autograd.grad(y, [x, *block.parameters()], cotangent) for y in (out, wanted))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)
    assert got[0][:, 2].eq(0).all()
    assert got[0][:, 3].abs().min() > 0


KINDS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "post-norm rmsnorm swiglu": {"norm": "rmsnorm", "norm_first": False, "activation": "swiglu"},
}
KIND = pytest.mark.parametrize("kind", KINDS)
POISON = torch.tensor([NAN, INF, -INF, 1e300])


def poisoned(x: Tensor, padding: Tensor) -> Tensor:
    poison = POISON.to(x.dtype).repeat(x.numel() // 4 + 1)[: x.numel()].view(x.shape)
    return torch.where(padding[..., None], poison, x)


def values_and_gradients(module: nn.Module, x: Tensor, **words: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and weights, and the gradients of x and of all parameters, from all outputs at all positions."""
    x = x.detach().clone().requires_grad_()
    result = module(x, **words)
    outs = [result] if isinstance(result, Tensor) else [result[0], *([result[1]] if words else [])]
    outs = [tensor for out in outs for tensor in (out if isinstance(out, list) else [out])]
    cotangents = [data(*out.shape, seed=11 + index) for index, out in enumerate(outs)]
    grads = torch.autograd.grad(outs, [x, *module.parameters()], cotangents)
    return [out.detach() for out in outs], list(grads)


@KIND
@TRAINING
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("form", ["bool", "float", "causal", "torch's attention"])
def test_what_padding_holds_has_no_influence(kind: str, training: bool, need_weights: bool, form: str) -> None:
    """NaN, inf and huge numbers there: the same outputs, weights and gradients to the bit, and none at padding."""
    more = dict(KINDS[kind])
    if form == "torch's attention":
        more["attention"] = nn.MultiheadAttention(D, H, batch_first=True, dtype=F64)
    block, x = made(**more).train(training), data()
    words = {"query_padding_mask": PADDING, "need_weights": need_weights}
    words["key_padding_mask"] = minus_inf(PADDING) if form == "float" else PADDING
    if form == "causal":
        words["is_causal"] = True
    wanted, want = values_and_gradients(block, x, **words)
    got, gradients = values_and_gradients(block, poisoned(x, PADDING), **words)
    for one, other in zip([*got, *gradients], [*wanted, *want], strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    assert gradients[0][PADDING].eq(0).all()
    assert gradients[0][~PADDING].abs().min() > 0


def test_poison_under_vmap() -> None:
    block, x = made(), data()
    words = {"query_padding_mask": PADDING, "key_padding_mask": PADDING}
    got = vmapped(block, poisoned(x, PADDING), **words)
    assert_close(got, block(x, **words))
    assert got[PADDING].eq(0).all()


@pytest.mark.parametrize("norm", [True, False], ids=["last norm", "no last norm"])
@PRE_POST
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_stack_keeps_exact_zeros_and_silence(norm: bool, norm_first: bool, need_weights: bool) -> None:
    """The bias of the last norm does not come back at padding."""
    encoder, x = stack(norm=norm, norm_first=norm_first), data()
    words = {"query_padding_mask": PADDING, "key_padding_mask": PADDING, "need_weights": need_weights}
    unmasked = encoder(x, key_padding_mask=PADDING)
    wanted, want = values_and_gradients(encoder, x, **words)
    got, gradients = values_and_gradients(encoder, poisoned(x, PADDING), **words)
    for one, other in zip([*got, *gradients], [*wanted, *want], strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    assert got[0][PADDING].eq(0).all()
    assert gradients[0][PADDING].eq(0).all()
    assert unmasked[PADDING].abs().min() > 0
    assert_close(got[0], unmasked.masked_fill(PADDING[..., None], 0.0))
    assert len(got) == (3 if need_weights else 1)


@KIND
@TRAINING
def test_a_sample_that_is_all_padding(kind: str, training: bool) -> None:
    """Finite everywhere, 0 with query_padding_mask, and no influence on its neighbour."""
    block, x = made(**KINDS[kind]).train(training), data()
    padding = PADDING.clone()
    padding[1] = True
    out, weights = both(block, x, key_padding_mask=padding)
    assert out.isfinite().all()
    assert weights[1].eq(0).all()
    for words in ({}, {"is_causal": True}):
        given = {"key_padding_mask": padding, "query_padding_mask": padding, **words}
        wanted, want = values_and_gradients(
            block, x[:1], **{word: m[:1] if isinstance(m, Tensor) else m for word, m in given.items()}
        )
        got, gradients = values_and_gradients(block, poisoned(x, padding), **given)
        assert got[0][1].eq(0).all()
        assert_close(got[0][:1], wanted[0])
        assert_close(gradients[0][:1], want[0])
        assert gradients[0][1].eq(0).all()
        # the cotangent of the whole batch begins with that of its first sample
        for one, other in zip(gradients[1:], want[1:], strict=True):
            assert_close(one, other)


@PRE_POST
@pytest.mark.parametrize("average", [True, False, None])
@TRAINING
def test_unbatched(norm_first: bool, average: bool | None, training: bool) -> None:
    """(L, D) gives what the same sample gives in a batch, without B."""
    block, x = made(norm_first=norm_first).train(training), data()
    words: dict[str, Any] = {"is_causal": True, "average_attn_weights": average}
    given = {"key_padding_mask": PADDING, "query_padding_mask": PADDING}
    wanted, whole = both(block, x, **given, **words)
    for sample in range(B):
        alone = {word: mask[sample] for word, mask in given.items()}
        out, weights = both(block, poisoned(x, PADDING)[sample], **alone, **words)
        assert_close(out, wanted[sample])
        assert_close(weights, whole[sample])
        assert out[PADDING[sample]].eq(0).all()
        assert weights.shape == ((H, L, L) if average is False else (L, L))
        assert weights.masked_select(rows_of(PADDING[sample], weights)).eq(0).all()
        only = {word: mask for word, mask in words.items() if word != "average_attn_weights"}
        assert_close(block(x[sample], **alone, **only), wanted[sample])


def test_stack_unbatched() -> None:
    encoder, x = stack(), data()
    given = {"key_padding_mask": PADDING, "query_padding_mask": PADDING}
    out, weights = encoder(x, need_weights=True, **given)
    for sample in range(B):
        alone, its = encoder(x[sample], need_weights=True, **{word: mask[sample] for word, mask in given.items()})
        assert_close(alone, out[sample])
        assert_close(its, [one[sample] for one in weights])


# --- Weights and masks ------------------------------------------------------------------------------------------------


@PRE_POST
@TRAINING
def test_weights_do_not_change_the_output(norm_first: bool, training: bool) -> None:
    block, x = made(norm_first=norm_first).train(training), data()
    plain = block(x, key_padding_mask=PADDING)
    averaged, mean = both(block, x, key_padding_mask=PADDING)
    apart, each = both(block, x, key_padding_mask=PADDING, average_attn_weights=False)
    assert isinstance(plain, Tensor)
    assert_close(averaged, plain)
    assert_close(apart, plain)
    assert mean.shape == (B, L, L)
    assert each.shape == (B, H, L, L)
    assert_close(mean, each.mean(1))
    assert_close(each.sum(-1), torch.ones(B, H, L, dtype=F64))
    assert each.masked_select(PADDING[:, None, None]).eq(0).all()
    assert (each[:, 0] - each[:, 1]).abs().max() > 1e-3


@PRE_POST
@AVERAGE
def test_weights_are_from_before_dropout(norm_first: bool, average: bool) -> None:
    """In train, with every dropout at one half, the first block's weights are those of eval, whatever was dropped."""
    block, x = made(norm_first=norm_first, dropout=0.5), data()
    wanted = both(block.eval(), x, average_attn_weights=average)
    block.train()
    for _ in range(3):
        out, weights = both(block, x, average_attn_weights=average)
        assert_close(weights, wanted[1])
        assert not torch.allclose(out, wanted[0])


def test_the_attentions_own_average_is_the_default() -> None:
    attention = MultiheadAttention(D, H, batch_first=True, average_attn_weights=False, dtype=F64)
    block, x = made(attention=attention), data()
    assert both(block, x)[1].shape == (B, H, L, L)
    assert both(block, x, average_attn_weights=True)[1].shape == (B, L, L)
    assert Encoder([block])(x, need_weights=True)[1][0].shape == (B, H, L, L)


def test_weights_are_those_of_the_attention_window() -> None:
    """A hook on `attend` sees what the block returns, and the returned weights give the returned output."""
    block, x, seen = made(), data(), []
    block.self_attn.attend.register_forward_pre_hook(lambda _, args: seen.append(args[:4]))
    _, weights = both(block, x, key_padding_mask=PADDING, is_causal=True, average_attn_weights=False)
    ((query, key, _, mask),) = seen
    assert_close(attention_weights(query, key, mask=mask), weights)


MASKS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "causal": ({"mask": masks.causal()}, torch.ones(L, L, dtype=torch.bool).tril()),
    "window": ({"mask": masks.window(2, 1)}, torch.ones(L, L, dtype=torch.bool).triu(-2).tril(1)),
    "causal and window": (
        {"mask": masks.window(2, 1), "is_causal": True},
        torch.ones(L, L, dtype=torch.bool).triu(-2).tril(0),
    ),
    "padding": ({"mask": masks.padding(~PADDING)}, ~PADDING[:, None]),
    "window and attn_mask": (
        {"mask": masks.window(2, 1), "attn_mask": (torch.arange(L) % 3 == 1).expand(L, L)},
        torch.ones(L, L, dtype=torch.bool).triu(-2).tril(1) & (torch.arange(L) % 3 != 1),
    ),
}


@PRE_POST
@pytest.mark.parametrize("name", MASKS)
def test_mask_objects(norm_first: bool, name: str) -> None:
    """In block and stack: what torch's polarity says too, and nothing hidden has weight."""
    words, keep = MASKS[name]
    block, encoder, x = made(norm_first=norm_first), stack(norm_first=norm_first), data()
    in_torchs_words = {"attn_mask": ~keep.expand(B, L, L).repeat_interleave(H, 0)}
    for module in (block, encoder):
        out, weights = module(x, need_weights=True, average_attn_weights=False, **words)
        wanted, whole = module(x, need_weights=True, average_attn_weights=False, **in_torchs_words)
        assert_close(out, wanted)
        assert_close(weights, whole)
        assert_close(module(x, **words), wanted)
        assert not torch.allclose(out, module(x))
        for one in weights if isinstance(weights, list) else [weights]:
            hidden = ~keep.expand(B, L, L)[:, None].expand(one.shape)
            assert one[hidden].eq(0).all()
            assert one[~hidden].ne(0).all()


def test_causal_positions_do_not_see_what_follows() -> None:
    block, encoder, x = made(), stack(), data()
    changed = torch.cat([x[:, :4], data(seed=9)[:, 4:]], dim=1)
    for words in ({"is_causal": True}, {"mask": masks.causal()}):
        for module in (block, encoder):
            one, other = module(x, **words), module(changed, **words)
            assert_close(one[:, :4], other[:, :4])
            assert (one[:, 4:] - other[:, 4:]).abs().amax(-1).min() > 1e-3


def test_the_articles_block() -> None:
    """As the article calls it: width, heads, dropout, post-norm; GELU, four times as wide."""
    block = fill(EncoderBlock(D, H, 0.25, norm_first=False).double()).eval()
    x = data()
    assert (block.linear1.in_features, block.linear1.out_features) == (D, 4 * D)
    assert [m.p for m in block.modules() if isinstance(m, nn.Dropout)] == [0.25] * 4
    attended, _ = block.self_attn(x, x, x)
    y = block.norm1(x + attended)
    wanted = block.norm2(y + block.linear2(nn.functional.gelu(block.linear1(y))))
    assert_close(block(x), wanted)
    assert torch.equal(block.train()(x), block(x)) is False


def test_stack_is_its_blocks_one_after_the_other() -> None:
    encoder, x = stack(layers=3), data()
    y, each = x, []
    for block in encoder.layers:
        y, weights = both(block, y, key_padding_mask=PADDING, is_causal=True)
        each.append(weights)
    out, weights = encoder(x, key_padding_mask=PADDING, is_causal=True, need_weights=True)
    assert_close(out, encoder.norm(y))
    assert_close(weights, each)
    assert_close(encoder(x, PADDING, None, True), out)
    assert (each[0] - each[1]).abs().max() > 1e-3
    encoder.norm = None
    assert_close(encoder(x, key_padding_mask=PADDING, is_causal=True), y)


def test_a_block_twice_shares_its_weights() -> None:
    block, x = made(), data()
    encoder = Encoder([block, block])
    assert_close(encoder(x), block(block(x)))
    assert len(list(encoder.parameters())) == len(list(block.parameters()))
    encoder(x).square().sum().backward()
    got = [parameter.grad for parameter in block.parameters()]
    apart = [copy.deepcopy(block), copy.deepcopy(block)]
    for one in apart:
        one.zero_grad()
    apart[1](apart[0](x)).square().sum().backward()
    for grad, one, other in zip(got, apart[0].parameters(), apart[1].parameters(), strict=True):
        assert_close(grad, one.grad + other.grad)


def test_a_stack_takes_a_generator() -> None:
    encoder = Encoder(made(seed=3 + index) for index in range(2))
    assert len(encoder.layers) == 2
    assert_close(encoder(data()), stack(norm=False)(data()))


class Plain(nn.Module):
    """A block that knows no masks."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_foreign_layer_gets_no_words_that_were_not_given() -> None:
    x = data()
    assert torch.equal(Encoder([Plain(), Plain()])(x), 4 * x)
    with pytest.raises(TypeError, match="is_causal"):
        Encoder([Plain()])(x, is_causal=True)


class Foreign(nn.Module):
    """An attention of someone else: only the arguments that say something reach it."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True) -> Any:
        assert query is key
        assert key is value
        return self.result(query)


def test_a_foreign_attention() -> None:
    block, x = made(attention=Foreign(lambda x: (x.flip(1), None))), data()
    y = x + block.norm1(x).flip(1)
    wanted = y + block.linear2(nn.functional.gelu(block.linear1(block.norm2(y))))
    assert_close(block(x), wanted)
    assert_close(block(x, query_padding_mask=PADDING), wanted.masked_fill(PADDING[..., None], 0.0))
    with pytest.raises(TypeError, match="is_causal"):
        block(x, is_causal=True)


# --- Errors -----------------------------------------------------------------------------------------------------------


def raises(message: str) -> Any:
    return pytest.raises(ValueError, match="^" + re.escape(message))


NORM_RULE = (
    "EncoderBlock: norm must be 'layernorm', 'rmsnorm', a callable that makes a module of width embed_dim, "
    "or a module; got "
)


ACTIVATION = (
    "EncoderBlock: activation must be one of ['gelu', 'relu', 'swiglu'], a function or a module (nn.SiLU(), not "
    "nn.SiLU); got "
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": None}, "EncoderBlock: num_heads must be given, or attention; got None"),
        (
            {"activation": "silu"},
            ACTIVATION + "'silu'",
        ),
        (
            {"activation": None},
            ACTIVATION + "None",
        ),
        ({"feedforward_dim": 0}, "EncoderBlock: feedforward_dim must be an int of at least 1; got 0"),
        ({"feedforward_dim": True}, "EncoderBlock: feedforward_dim must be an int of at least 1; got True"),
        ({"feedforward_dim": 8.0}, "EncoderBlock: feedforward_dim must be an int of at least 1; got 8.0"),
        (
            {"norm": "batchnorm"},
            NORM_RULE + "'batchnorm'",
        ),
        ({"norm": None}, "EncoderBlock: norm must be 'layernorm', 'rmsnorm', a callable"),
        ({"norm": lambda width: width}, "EncoderBlock: norm must be 'layernorm', 'rmsnorm', a callable"),
        ({"num_heads": 4}, "MultiheadAttention: embed_dim must be a multiple of num_heads 4"),
        ({"num_heads": 0}, "MultiheadAttention: num_heads must be an int of at least 1; got 0"),
        ({"dropout": 1.5}, "EncoderBlock: dropout must be in [0, 1]; the inner width is feedforward_dim; got 1.5"),
        ({"dropout": NAN}, "EncoderBlock: dropout must be in [0, 1]; the inner width is feedforward_dim; got nan"),
        ({"attention": Foreign}, "EncoderBlock: attention must be a module; got type"),
        ({"attention": lambda *args: args}, "EncoderBlock: attention must be a module; got function"),
        (
            {"attention": nn.MultiheadAttention(D, H)},
            "EncoderBlock: attention.batch_first must be True; got False",
        ),
        ({"attention": MultiheadAttention(D, H)}, "EncoderBlock: attention.batch_first must be True; got False"),
        (
            {"attention": MultiheadAttention(21, H, batch_first=True)},
            "EncoderBlock: attention.embed_dim must be 15; got 21",
        ),
        (
            {"attention": nn.MultiheadAttention(D, 5, batch_first=True)},
            "EncoderBlock: attention.num_heads must be 3; got 5",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with raises(message):
        EncoderBlock(**{"embed_dim": D, "num_heads": H, **arguments})


@pytest.mark.parametrize("wrong", [-0.1, 1.5, NAN])
def test_dropout_outside_its_range_beside_an_attention(wrong: float) -> None:
    """The attention brings its own; the block's three others are checked all the same."""
    with pytest.raises(ValueError, match="dropout"):
        EncoderBlock(D, dropout=wrong, attention=MultiheadAttention(D, H, batch_first=True))


def test_attention_without_num_heads() -> None:
    block = EncoderBlock(D, attention=MultiheadAttention(D, 5, batch_first=True))
    assert block.self_attn.num_heads == 5


@pytest.mark.parametrize(
    ("result", "need_weights", "message"),
    [
        (lambda x: x, False, "EncoderBlock: attention must return (output, weights); got Tensor from Foreign"),
        (lambda x: (x,), False, "EncoderBlock: attention must return (output, weights); got tuple from Foreign"),
        (lambda x: [x, None], False, "EncoderBlock: attention must return (output, weights); got list from Foreign"),
        (
            lambda x: (x, None),
            True,
            "EncoderBlock: attention must return weights where need_weights is True; got None from Foreign",
        ),
    ],
    ids=["tensor", "one", "list", "no weights"],
)
def test_an_attention_that_returns_something_else(result: Any, need_weights: bool, message: str) -> None:
    """A bare tensor of batch 2 would unpack into two."""
    assert B == 2
    block = made(attention=Foreign(result))
    with raises(message):
        block(data(), need_weights=need_weights)
    with raises(message):
        Encoder([block])(data(), need_weights=need_weights)


def test_mask_object_with_torchs_attention() -> None:
    block = made(attention=nn.MultiheadAttention(D, H, batch_first=True, dtype=F64))
    message = (
        "EncoderBlock: mask must be None with a torch.nn.MultiheadAttention, which has attn_mask only; "
        "use headwise.MultiheadAttention; got causal() (x (2, 7, 15))"
    )
    for module in (block, Encoder([block])):
        with raises(message):
            module(data(), mask=masks.causal())


QUERY_RULE = "EncoderBlock: query_padding_mask must be bool (2, 7), True = padding; got "
WRONG_MASKS: list[tuple[dict[str, Any], str]] = [
    ({"query_padding_mask": PADDING.double()}, QUERY_RULE + "torch.float64 (2, 7) (x (2, 7, 15))"),
    ({"query_padding_mask": PADDING.int()}, QUERY_RULE + "torch.int32 (2, 7) (x (2, 7, 15))"),
    ({"query_padding_mask": PADDING.T}, QUERY_RULE + "torch.bool (7, 2) (x (2, 7, 15))"),
    ({"query_padding_mask": PADDING[0]}, QUERY_RULE + "torch.bool (7,) (x (2, 7, 15))"),
    ({"query_padding_mask": PADDING[:, :6]}, QUERY_RULE + "torch.bool (2, 6) (x (2, 7, 15))"),
    ({"query_padding_mask": PADDING[..., None]}, QUERY_RULE + "torch.bool (2, 7, 1) (x (2, 7, 15))"),
    ({"query_padding_mask": PADDING.tolist()}, "EncoderBlock: query_padding_mask must"),
    ({"key_padding_mask": PADDING.int()}, "MultiheadAttention: key_padding_mask must be a bool or floating tensor"),
    ({"key_padding_mask": PADDING.tolist()}, "MultiheadAttention: key_padding_mask must be a bool or floating tensor"),
    ({"key_padding_mask": PADDING.T}, "MultiheadAttention: key_padding_mask must be (B, S) = (2, 7)"),
    ({"key_padding_mask": PADDING[:1]}, "MultiheadAttention: key_padding_mask must be (B, S) = (2, 7); got (1, 7)"),
    ({"key_padding_mask": PADDING[0]}, "MultiheadAttention: key_padding_mask must be (B, S) = (2, 7); got (7,)"),
    ({"key_padding_mask": PADDING[:, :1]}, "MultiheadAttention: key_padding_mask must be (B, S) = (2, 7); got (2, 1)"),
    ({"mask": PADDING}, "MultiheadAttention: mask must be a Mask of headwise.masks"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_MASKS)
@pytest.mark.parametrize("beside", [True, False], ids=["with query padding", "alone"])
@PRE_POST
def test_wrong_masks(words: dict[str, Any], message: str, beside: bool, norm_first: bool) -> None:
    """Block and stack; a wrong key_padding_mask is named also where a right query_padding_mask is looked at first."""
    words = {**({"query_padding_mask": PADDING, "key_padding_mask": PADDING} if beside else {}), **words}
    for module in (made(norm_first=norm_first), stack(norm_first=norm_first)):
        with raises(message):
            module(data(), **words)


def test_wrong_attn_mask() -> None:
    for attn_mask in (torch.zeros(L, L + 1, dtype=torch.bool), torch.zeros(L, L, dtype=torch.int64)):
        for module in (made(), stack()):
            with pytest.raises(ValueError, match="attn_mask"):
                module(data(), attn_mask=attn_mask)


@pytest.mark.parametrize("attn_mask", [torch.zeros(1, L, dtype=torch.bool), torch.zeros(L, L + 1, dtype=torch.bool)])
def test_wrong_attn_mask_with_torchs_attention(attn_mask: Tensor) -> None:
    """is_causal is joined with it: no broadcast may hide that torch would not have taken it."""
    block = made(attention=nn.MultiheadAttention(D, H, batch_first=True, dtype=F64))
    for is_causal in (False, True):
        with pytest.raises((ValueError, RuntimeError), match=r"attn_mask|size of tensor"):
            block(data(), attn_mask=attn_mask, is_causal=is_causal)


WRONG_X = {
    "width": (lambda: data(B, L, D + 2), "must be 15 wide; got 17"),
    "dtype": (lambda: data(dtype=torch.float32), "must have the parameters' dtype, torch.float64"),
    "bfloat16": (lambda: data(dtype=torch.bfloat16), "must have the parameters' dtype, torch.float64"),
    "integers": (lambda: torch.ones(B, L, D, dtype=torch.int64), "must have the parameters' dtype, torch.float64"),
    "device": (lambda: data().to("meta"), "must have the parameters' device, cpu"),
    "rank 4": (lambda: data()[None], "x must be a tensor, 3-D, or 2-D for one sample"),
    "rank 1": (lambda: data(D), "x must be a tensor, 3-D, or 2-D for one sample"),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's rms_norm, before the error
@pytest.mark.parametrize("what", WRONG_X)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@PRE_POST
def test_wrong_x(what: str, norm: str, norm_first: bool) -> None:
    """`forward` promises a ValueError for sizes and dtypes that do not fit; the norm that comes first is no excuse."""
    x, message = WRONG_X[what]
    for module in (made(norm=norm, norm_first=norm_first), Encoder([made(norm=norm, norm_first=norm_first)])):
        with pytest.raises(ValueError, match=re.escape(message)):
            module(x())


@pytest.mark.parametrize("layers", [[], (), iter([]), nn.ModuleList()], ids=["list", "tuple", "iterator", "ModuleList"])
def test_a_stack_without_blocks(layers: Any) -> None:
    with raises("Encoder: layers must hold at least one block; got none"):
        Encoder(layers)


# --- Everything else that is done with a module -----------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "module"])
@pytest.mark.parametrize("query_padding", [True, False])
@TRAINING
@PRE_POST
def test_every_child_is_called(activation: str, query_padding: bool, training: bool, norm_first: bool) -> None:
    """In train and in eval, with gradients and without; a hook neither changes the output nor is left out."""
    given: Any = nn.GELU() if activation == "module" else activation
    block, x = made(activation=given, norm_first=norm_first, dropout=0.0).train(training), data()
    words = {"key_padding_mask": PADDING, **({"query_padding_mask": PADDING} if query_padding else {})}
    wanted, called = block(x, **words), []
    names = [name for name, _ in block.named_modules()]
    for name, module in block.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    expected = {"", "self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2"}
    expected |= {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "attn_dropout", "attend")}
    expected |= {"linear3"} if activation == "swiglu" else {"activation"} if activation == "module" else set()
    assert set(names) == expected
    for grad in (True, False):
        called.clear()
        with torch.set_grad_enabled(grad):
            assert_close(block(x, **words), wanted)
        assert sorted(called) == sorted(names)


@TRAINING
def test_a_hook_changes_what_comes_out(training: bool) -> None:
    """Each child's result is used: doubling any one of them shows."""
    block, x = made(activation="swiglu").train(training), data()
    wanted = block(x)
    for name, module in block.named_children():
        handle = module.register_forward_hook(
            lambda _, args, out: (2 * out[0], out[1]) if isinstance(out, tuple) else 2 * out
        )
        assert (block(x) - wanted).abs().max() > 1e-3, name
        handle.remove()
    assert torch.equal(block(x), wanted)


def test_backward_hooks_on_every_child() -> None:
    block, x = made(), data().requires_grad_()  # torch warns where no input asks for a gradient
    leaves = [x, *block.parameters()]
    wanted = torch.autograd.grad(block(x).square().sum(), leaves)
    called = []
    for name, module in block.named_children():
        module.register_full_backward_hook(lambda *_, name=name: called.append(name))
    got = torch.autograd.grad(block(x).square().sum(), leaves)
    assert sorted(called) == sorted(name for name, _ in block.named_children())
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other)


DROPOUTS = ("self_attn.attn_dropout", "dropout", "dropout1", "dropout2")


@PRE_POST
@pytest.mark.parametrize("where", DROPOUTS)
def test_dropout_at_each_of_its_places(where: str, norm_first: bool) -> None:
    """With probability 1 at one place only, what is left is known."""
    block, x = made(norm_first=norm_first, activation="relu"), data()
    first, second = (block.norm1, block.norm2) if norm_first else (nn.Identity(), nn.Identity())
    third, fourth = (nn.Identity(), nn.Identity()) if norm_first else (block.norm1, block.norm2)
    block.get_submodule(where).p = 1.0
    z = first(x)
    attended = block.self_attn.eval()(z, z, z)[0]
    block.self_attn.train()
    if where == DROPOUTS[0]:
        attended = block.self_attn.out_proj.bias.expand_as(x)
    y = third(x + (0.0 if where == "dropout1" else attended))
    hidden = block.linear1(second(y)).relu() * (0.0 if where == "dropout" else 1.0)
    wanted = fourth(y + (0.0 if where == "dropout2" else block.linear2(hidden)))
    assert_close(block(x), wanted)
    inner = block.eval()(x)
    assert not torch.allclose(inner, wanted)
    block.get_submodule(where).p = 0.0
    assert_close(inner, block.train()(x))


@pytest.mark.parametrize("passed", [True, False], ids=["attention passed in", "attention built"])
def test_dropout_reaches_its_places(passed: bool) -> None:
    attention = MultiheadAttention(D, H, 0.375, batch_first=True) if passed else None
    block = EncoderBlock(D, H, 0.125, attention=attention)
    got = {name: module.p for name, module in block.named_modules() if isinstance(module, nn.Dropout)}
    assert got == {**dict.fromkeys(DROPOUTS, 0.125), DROPOUTS[0]: 0.375 if passed else 0.125}


def all_kinds() -> dict[str, Callable[[], nn.Module]]:
    return {
        "block": made,
        "swiglu rmsnorm post-norm": lambda: made(activation="swiglu", norm="rmsnorm", norm_first=False),
        "torch's attention": lambda: made(attention=nn.MultiheadAttention(D, H, batch_first=True, dtype=F64)),
        "stack": stack,
    }


@pytest.mark.parametrize("kind", all_kinds())
def test_deepcopy_pickle_and_state_dict(kind: str) -> None:
    build, x = all_kinds()[kind], data()
    module = build()
    wanted = module(x, key_padding_mask=PADDING, query_padding_mask=PADDING)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = fill(build(), seed=8)
    assert not torch.allclose(loaded(x), module(x))
    loaded.load_state_dict(torch.load(file))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x, key_padding_mask=PADDING, query_padding_mask=PADDING), wanted)
        assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in module.parameters())
        with torch.no_grad():
            next(other.parameters()).zero_()
    assert torch.equal(module(x, key_padding_mask=PADDING, query_padding_mask=PADDING), wanted)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "factory", "module"])
@pytest.mark.parametrize("bias", [True, False])
def test_dtype_and_device_reach_every_parameter(norm: str, bias: bool) -> None:
    given: Any = {"factory": nn.LayerNorm, "module": nn.LayerNorm(D)}.get(norm, norm)
    block = EncoderBlock(D, H, norm=given, activation="swiglu", bias=bias, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in block.parameters()} == {("meta", torch.float16)}
    assert any(name.endswith("bias") for name, _ in block.named_parameters()) == (bias or norm in ("factory", "module"))


def test_norm_eps_reaches_both_norms() -> None:
    for norm in ("layernorm", "rmsnorm"):
        block = EncoderBlock(D, H, norm=norm, norm_eps=0.25)
        assert block.norm1.eps == block.norm2.eps == 0.25
    assert EncoderBlock(D, H).norm1.eps == 1e-5


@pytest.mark.parametrize("kind", all_kinds())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_to_another_dtype(kind: str, dtype: torch.dtype) -> None:
    module, x = all_kinds()[kind](), data()
    wanted = module(x, key_padding_mask=PADDING, query_padding_mask=PADDING)
    tolerance = {torch.bfloat16: 0.1, torch.float32: 1e-5, F64: 1e-12}[dtype]
    out = module.to(dtype)(x.to(dtype), key_padding_mask=PADDING, query_padding_mask=PADDING)
    assert out.dtype == dtype
    assert_close(out.double(), wanted, rtol=0, atol=tolerance * wanted.abs().max().item())
    assert out[PADDING].eq(0).all()


def test_on_meta() -> None:
    """Shapes without numbers, masks and weights included."""
    encoder = stack().to("meta")
    padding = PADDING.to("meta")
    words = {"key_padding_mask": padding, "query_padding_mask": padding, "average_attn_weights": False}
    out, weights = encoder(data().to("meta"), need_weights=True, **words)
    assert out.shape == (B, L, D)
    assert [one.shape for one in weights] == [(B, H, L, L)] * 2
    assert {t.device.type for t in (out, *weights)} == {"meta"}


@PRE_POST
@TRAINING
def test_autocast(norm_first: bool, training: bool) -> None:
    block, x = made(norm_first=norm_first, dtype=torch.float32).train(training), data(dtype=torch.float32)
    words = {"key_padding_mask": PADDING, "query_padding_mask": PADDING}
    wanted, weights = both(block, x, **words)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        out, its = both(block, x, **words)
        plain = block(x, **words)
    assert out.dtype == plain.dtype == torch.float32
    assert_close(out, wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())
    assert_close(plain, out, rtol=0.05, atol=0.05 * wanted.abs().max().item())
    assert_close(its, weights, rtol=0.1, atol=0.05)
    assert not torch.equal(out, wanted)
    assert out[PADDING].eq(0).all()
    if training:
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.slow
def test_compile_of_many_lengths() -> None:
    """A stack: one graph for all sizes, no break; the eager numbers, whatever padding holds."""
    module, counter = stack(layers=1), Counter()
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for batch, length in ((2, 5), (3, 7), (5, 11)):
        x, padding = data(batch, length, D), torch.arange(length) >= torch.arange(batch)[:, None] * 2
        words = {"key_padding_mask": padding, "query_padding_mask": padding, "is_causal": True}
        got, want = compiled(poisoned(x, padding), need_weights=True, **words), module(x, need_weights=True, **words)
        assert_close(got, want)
        assert got[0][padding].eq(0).all()
    assert len(counter.graphs) == 1


class Padded(nn.Module):
    def __init__(self, inner: nn.Module, **words: Any) -> None:
        super().__init__()
        self.inner, self.words = inner, words

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        return self.inner(x, key_padding_mask=padding, query_padding_mask=padding, **self.words)


@pytest.mark.slow
def test_export() -> None:
    """A stack of one block, with dynamic sizes."""
    model = Padded(stack(layers=1, norm_first=False), need_weights=True, is_causal=True).eval()
    sizes = {0: Dim("batch", max=64), 1: Dim("length", max=512)}
    program = export(model, (data(), PADDING), dynamic_shapes=(sizes, sizes), strict=False)
    for batch, length in ((3, 7), (5, 11), (2, 2)):
        x, padding = data(batch, length, D), torch.arange(length) >= torch.arange(batch)[:, None] * 2
        assert_close(program.module()(x, padding), model(x, padding))


def test_functional_call_and_vmap_over_parameters() -> None:
    members = [made(seed=seed) for seed in (1, 2, 3)]
    stacked, _ = torch.func.stack_module_state(members)
    x = data()

    def call(parameters: dict[str, Tensor]) -> Tensor:
        words = {"key_padding_mask": PADDING, "query_padding_mask": PADDING}
        return torch.func.functional_call(members[0], parameters, (x,), words)

    outs = torch.func.vmap(call, randomness="different")(stacked)
    for out, member in zip(outs, members, strict=True):
        assert_close(out, member(x, key_padding_mask=PADDING, query_padding_mask=PADDING))


@PRE_POST
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoint(norm_first: bool, reentrant: bool, dropout: float) -> None:
    block, x = made(norm_first=norm_first, dropout=dropout), data().requires_grad_()
    words = [PADDING, None, True]
    results = []
    for call in (block, lambda *args: checkpoint(block, *args, use_reentrant=reentrant)):
        torch.manual_seed(3)
        block.zero_grad()
        x.grad = None
        out = call(x, *words)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in block.parameters())])
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.*grad mode is not supported.*")
@KIND
def test_gradcheck_and_second_derivatives(kind: str) -> None:
    """By finite differences in float64, with padding."""
    torch.manual_seed(2)
    block = fill(EncoderBlock(6, 3, feedforward_dim=5, dtype=F64, **KINDS[kind]))
    x = data(2, 3, 6).requires_grad_()
    padding = torch.tensor([[False, False, False], [False, True, True]])

    def call(x: Tensor, weight: Tensor) -> Tensor:
        words = {"key_padding_mask": padding, "query_padding_mask": padding}
        return torch.func.functional_call(block, {"linear1.weight": weight}, (x,), words)

    weight = block.linear1.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(call, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, weight), fast_mode=True)


@PRE_POST
def test_second_derivatives_of_every_parameter(norm_first: bool) -> None:
    """The fused kernel and the plain path (weights) agree on the gradient of a gradient's norm."""
    block, x = made(norm_first=norm_first), data().requires_grad_()
    leaves = [x, *block.parameters()]
    results = []
    for need_weights in (False, True):
        result = block(x, key_padding_mask=PADDING, query_padding_mask=PADDING, need_weights=need_weights)
        out = result[0] if need_weights else result
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-7 * max(1.0, other.abs().max().item()))
        assert one.isfinite().all()
    assert results[0][0][PADDING].eq(0).all()
    assert max(grad.abs().max().item() for grad in results[0]) > 0


@pytest.mark.parametrize("frozen", ["self_attn", "linear1", "linear2", "norm1", "norm2", "x"])
def test_frozen_parts(frozen: str) -> None:
    """What is frozen gets no gradient; all others get the same as before."""
    block, x = made(), data().requires_grad_()
    words = {"key_padding_mask": PADDING, "query_padding_mask": PADDING}
    block(x, **words).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    y = x.detach() if frozen == "x" else x
    if frozen != "x":
        block.get_submodule(frozen).requires_grad_(False)
    block(y, **words).square().sum().backward()
    for name, parameter in block.named_parameters():
        if name.startswith(frozen + "."):
            assert parameter.grad is None
        else:
            assert_close(parameter.grad, wanted[name])


def test_empty_batches_and_lengths() -> None:
    encoder = stack()
    for batch, length in ((0, L), (B, 0)):
        padding = torch.zeros(batch, length, dtype=torch.bool)
        out, weights = encoder(
            torch.randn(batch, length, D, dtype=F64),
            key_padding_mask=padding,
            query_padding_mask=padding,
            need_weights=True,
        )
        assert out.shape == (batch, length, D)
        assert [one.shape for one in weights] == [(batch, length, length)] * 2


@PRE_POST
def test_the_input_is_left_alone(norm_first: bool) -> None:
    """No in-place write into x or a mask, NaN in padding included."""
    block, x = made(norm_first=norm_first), poisoned(data(), PADDING)
    x_before, padding = x.clone(), PADDING.clone()
    with torch.no_grad():
        block(x, key_padding_mask=padding, query_padding_mask=padding, is_causal=True)
    assert torch.equal(x.nan_to_num(7.0), x_before.nan_to_num(7.0))
    assert torch.equal(padding, PADDING)
    attention = nn.MultiheadAttention(D, H, batch_first=True, dtype=F64)
    attn_mask = torch.zeros(L, L, dtype=F64)
    made(attention=attention)(data(), attn_mask=attn_mask, is_causal=True)
    assert attn_mask.eq(0).all()
