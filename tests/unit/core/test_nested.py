"""Nested input of attention and of blocks: both ways of computing it, weights, masks, layouts, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.compiling import Counter
from torch import Tensor, nn

import headwise
from headwise import masks
from headwise.core import nested

D, H = 12, 3
QUERIES, KEYS = (7, 1, 4), (2, 5, 11)
FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")


def jagged(lengths: Sequence[int], width: int = D, seed: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    values = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))


def strided(given: Any) -> Any:
    return torch.nested.as_nested_tensor(list(given.unbind()))


def attention(**words: Any) -> headwise.MultiheadAttention:
    torch.manual_seed(2)
    made = headwise.MultiheadAttention(D, H, batch_first=True, **words).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def check(module: Any, query: Any, key: Any, value: Any = None, **words: Any) -> None:
    """Output and each head's weights, with and without these, against one by one."""
    value = key if value is None else value
    words["average_attn_weights"] = False
    out, weights = module(query, key, value, **words)
    again, none = module(query, key, value, need_weights=False, **words)
    assert none is None
    assert again.layout == out.layout == query.layout
    longest = max((len(sample) for sample in query.unbind()), default=0)
    assert weights.shape[:3] == (len(query.unbind()), H, longest)
    samples = zip(query.unbind(), key.unbind(), value.unbind(), out.unbind(), again.unbind(), weights, strict=True)
    for q, k, v, mine, repeated, its in samples:
        (want,), (shown,) = module(q[None], k[None], v[None], **words)
        torch.testing.assert_close(mine, want, **FLOAT64)
        torch.testing.assert_close(repeated, want, **FLOAT64)
        more = shown.shape[-1] - len(k)
        padded = torch.zeros_like(its)
        padded[:, : len(q), : len(k)] = shown[..., : len(k)]
        if more:  # bias_k and the zero key come last
            padded[:, : len(q), -more:] = shown[..., len(k) :]
        torch.testing.assert_close(its, padded, **FLOAT64)


@pytest.fixture(params=[True, False], ids=["one by one", "padded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each of the two ways, whatever would be quicker."""
    monkeypatch.setattr(nested, "_is_worth", lambda *_: request.param)
    return bool(request.param)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (QUERIES, KEYS),
        ((4, 0, 3), (0, 5, 2)),
        ((0, 0), (2, 0)),
        ((3, 2), (0, 0)),
        ((5, 5), (5, 5)),
        ((3, 3), (1, 4)),
        ((), ()),
    ],
)
def test_self_and_cross(way: bool, fused: bool, causal: bool, queries: Any, keys: Any) -> None:
    module = attention(fused_qkv=fused)
    query, key, value = jagged(queries), jagged(keys, seed=3), jagged(keys, seed=4)
    check(module, query, query, is_causal=causal)
    check(module, query, key, is_causal=causal)
    check(module, query, key, value, is_causal=causal)  # its own offsets, of the same lengths
    assert (query + module(query, key, value)[0]).shape == query.shape


def test_very_unequal_samples_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others in a batch, since a turn of a loop has its price."""
    seen: list[torch.Size] = []
    module = attention()
    module.attend.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    long, short = jagged((900, 1, 2)), jagged((9, 1, 2))
    for given in (long, short):
        module(given, given, given, need_weights=False, is_causal=True)
    assert seen == [(1, H, 903, D // H), (3, H, 9, D // H)]
    check(module, long, jagged((1000, 2, 0), seed=3))


@pytest.mark.parametrize("words", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5, "vdim": 7}])
def test_other_keys(way: bool, words: Any) -> None:
    key, value = jagged(KEYS, words.get("kdim", D), 3), jagged(KEYS, words.get("vdim", D), 4)
    check(attention(**words), jagged(QUERIES), key, value)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.causal(1),
        masks.causal(torch.tensor([0, 3, -1])),
        masks.window(2, 1),
        masks.prefix(torch.tensor([1, 0, 3])) | masks.causal(),
        ~masks.window(1, 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_positions_hold_in_each_sample(way: bool, mask: masks.Mask, causal: bool) -> None:
    """Against the mask drawn for one sample; a number per sample is that sample's."""
    module, query = attention(), jagged(QUERIES)
    out, weights = module(query, query, query, mask=mask, is_causal=causal, average_attn_weights=False)
    for number, (x, mine, its) in enumerate(zip(query.unbind(), out.unbind(), weights, strict=True)):
        drawn = [line.split()[1:] for line in mask.draw(len(x), sample=number).splitlines()[1:]]
        keep = masks.dense(torch.tensor([[cell == "#" for cell in line] for line in drawn]))
        (want,), (shown,) = module(x[None], x[None], x[None], mask=keep, is_causal=causal, average_attn_weights=False)
        torch.testing.assert_close(mine, want, **FLOAT64)
        torch.testing.assert_close(its[:, : len(x), : len(x)], shown, **FLOAT64)


def test_average_weights_and_their_dtype() -> None:
    module = attention().bfloat16()
    query = jagged(QUERIES, dtype=torch.bfloat16)
    out, weights = module(query, query, query)
    assert (out.dtype, weights.dtype, weights.shape) == (torch.bfloat16, torch.bfloat16, (3, 7, 7))
    each = module(query, query, query, average_attn_weights=False)[1]
    torch.testing.assert_close(weights, each.mean(1), rtol=2e-2, atol=1e-3)


def test_the_strided_layout_stays_strided() -> None:
    module, query, key = attention(), jagged(QUERIES), jagged(KEYS, seed=3)
    check(module, strided(query), strided(query), is_causal=True)
    check(module, strided(query), strided(key))
    check(module, strided(query), key)
    check(module, query, strided(key))


def test_a_dense_query_of_nested_keys() -> None:
    """Learned queries that pool: dense in, dense out."""
    module, key = attention(), jagged(KEYS)
    query = torch.randn(3, 2, D, dtype=torch.float64)
    out, weights = module(query, key, key, average_attn_weights=False)
    for number, sample in enumerate(key.unbind()):
        (want,), (shown,) = module(query[number, None], sample[None], sample[None], average_attn_weights=False)
        torch.testing.assert_close(out[number], want, **FLOAT64)
        torch.testing.assert_close(weights[number, :, :, : len(sample)], shown, **FLOAT64)
        assert weights[number, :, :, len(sample) :].count_nonzero() == 0


def test_gradients(way: bool) -> None:
    """Of queries and keys; second ones torch's own `values()` lacks."""
    module, offsets, key_offsets = attention(), jagged((3, 0, 2)).offsets(), jagged((2, 1, 4)).offsets()

    def of(values: Tensor, key_values: Tensor) -> Tensor:
        query = torch.nested.nested_tensor_from_jagged(values, offsets)
        key = torch.nested.nested_tensor_from_jagged(key_values, key_offsets)
        out: Any = query + module(query, key, key, need_weights=False)[0]
        return out.values()

    inputs = [torch.randn(number, D, dtype=torch.float64, requires_grad=True) for number in (5, 7)]
    assert torch.autograd.gradcheck(of, inputs, fast_mode=True)


def test_what_is_called_on_the_weights_is_given_them() -> None:
    class Halve(nn.Module):
        def forward(self, weights: Tensor) -> Tensor:
            seen.append(weights.shape)
            return weights / 2

    seen: list[torch.Size] = []
    module = attention(bias=False)
    query = jagged(QUERIES)
    whole, _ = module(query, query, query, need_weights=False)
    module.attn_dropout = Halve()
    half, _ = module(query, query, query, need_weights=False)
    assert seen == [(3, H, 7, 7)]
    torch.testing.assert_close(half.values() * 2, whole.values(), **FLOAT64)


def test_projections_see_the_row() -> None:
    seen = []
    module = attention()
    for child in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        child.register_forward_hook(lambda _, given, out: seen.append((*given[0].shape, *out.shape)))
    query = jagged(QUERIES)
    module(query, query, query)
    assert seen == [(1, sum(QUERIES), D) * 2] * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes(mode: Callable[[], Any]) -> None:
    query = jagged(QUERIES, dtype=torch.float32)
    torch.manual_seed(2)
    for norm_first in (False, True):
        block = headwise.EncoderBlock(D, H, norm_first=norm_first)
        want = torch.cat([block(sample[None])[0] for sample in query.unbind()])
        with mode():
            torch.testing.assert_close(block(query).values().float(), want, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_compiled() -> None:
    """In graphs around the attention, which hold for other lengths too."""
    module = attention()
    compiled = torch.compile(lambda x: x + module(2 * x, 2 * x, 2 * x, need_weights=False)[0], backend=Counter())
    for lengths in (QUERIES, (2, 3, 5)):
        x = jagged(lengths)
        want = x + module(2 * x, 2 * x, 2 * x, need_weights=False)[0]
        torch.testing.assert_close(compiled(x).values(), want.values(), **FLOAT64)


class Scale(nn.Module):
    """A user's norm, of which nothing is known."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_nested
        return x * 0.5


BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "post": lambda **words: headwise.EncoderBlock(D, H, norm_first=False, activation="relu", **words),
    "pre": lambda **words: headwise.EncoderBlock(D, H, **words),
    "swiglu": lambda **words: headwise.EncoderBlock(D, H, activation="swiglu", **{"norm": "rmsnorm"} | words),
    "decoder": lambda **words: headwise.DecoderBlock(D, H, **words),
    "decoder, post": lambda **words: headwise.DecoderBlock(D, H, norm_first=False, **words),
}


@pytest.mark.parametrize("change", ["plain", "hook", "norm", "activation"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks(kind: str, change: str) -> None:
    """Known children run on the row; hooked or unknown ones are given the jagged tensor. One answer."""
    block: Any = BLOCKS[kind](**{"norm": Scale()} if change == "norm" else {}).double()
    if change == "activation":
        block.activation = lambda x: torch.tanh(x)
    alone = [jagged(QUERIES)] + ([jagged(KEYS, seed=3)] if "decoder" in kind else [])
    if change == "norm":  # which insists on nested input
        want_block: Any = BLOCKS[kind](norm=Scale()).double()
        want_block.load_state_dict(block.state_dict())
        for module in want_block.modules():
            if isinstance(module, Scale):
                module.forward = lambda x: x * 0.5  # dense too
    else:
        want_block = block
    samples = zip(*(given.unbind() for given in alone), strict=True)
    want = torch.cat([want_block(*(s[None] for s in group), is_causal=True)[0] for group in samples])
    seen: list[bool] = []
    if change == "hook":
        block.linear1.register_forward_pre_hook(lambda _, given: seen.append(given[0].is_nested))
    out = block(*alone, is_causal=True)
    assert seen == ([True] if change == "hook" else [])
    assert out.shape == alone[0].shape
    torch.testing.assert_close(out.values(), want, **FLOAT64)
    again, weights = block(*alone, is_causal=True, need_weights=True)
    torch.testing.assert_close(again.values(), want, **FLOAT64)
    own = weights[0] if "decoder" in kind else weights
    assert own.shape == (3, 7, 7)


def holes() -> Any:
    whole = torch.randn(3, 9, D, dtype=torch.float64)
    starts, lengths = torch.tensor([1, 0, 4]), torch.tensor([3, 9, 2])
    return torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged)


def test_holes_are_refused_and_contiguous_is_the_cure() -> None:
    module, given = attention(), holes()
    with pytest.raises(ValueError, match=r"query must hold its samples without holes .*\.contiguous\(\) closes"):
        module(given, given, given)
    with pytest.raises(ValueError, match="without holes"):
        headwise.EncoderBlock(D, H).double()(given)
    check(module, given.contiguous(), given.contiguous())
    slack = torch.nested.nested_tensor_from_jagged(torch.zeros(9, D).double(), torch.tensor([1, 4, 8]))
    with pytest.raises(ValueError, match="9 positions and offsets"):
        module(slack, slack, slack)


x = jagged(QUERIES)
DENSE = torch.zeros(3, 7, D, dtype=torch.float64)
PADDING = torch.zeros(3, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("inputs", "words", "message"),
    [
        (
            (x, x, x),
            {"key_padding_mask": PADDING},
            "key_padding_mask must be None beside nested tensors, which hold no",
        ),
        ((x, x, x), {"query_padding_mask": PADDING}, "query_padding_mask must be None beside nested tensors"),
        ((x, x, x), {"attn_mask": PADDING}, "is_causal=True hides the future of each"),
        (
            (x, x, x),
            {"mask": masks.dense(torch.ones(7, 7, dtype=torch.bool))},
            "mask must be a Mask of headwise.masks w",
        ),
        ((x, x, x), {"mask": masks.causal() & masks.documents(torch.arange(7))}, "such as window(8, 0)"),
        ((x, x, x), {"mask": PADDING}, "got torch.bool (3, 7)"),
        ((x, DENSE, DENSE), {}, "key must be nested where query, key or value is"),
        ((x, x, DENSE), {}, "value must be nested where"),
        ((DENSE, DENSE, x), {}, "key and value nested both or neither"),
        ((DENSE, x, x), {"key_padding_mask": PADDING}, "key_padding_mask must be None"),
        ((DENSE[0], x, x), {}, "query must be (B, *, D)"),
        ((x, x, None), {}, "must be tensors; got NestedTensor, NestedTensor, NoneType"),
        ((x, jagged((1, 2)), jagged((1, 2))), {}, "key must have the query's batch size 3; got 2"),
        ((x, x, jagged((7, 2, 3))), {}, "value must have the key's lengths, [7, 1, 4]; got [7, 2, 3]"),
        ((jagged(QUERIES, 5),) * 3, {}, "query must be 12 wide; got 5"),
        ((x, jagged(QUERIES, 5), x), {}, "key must be 12 wide; got 5"),
        (
            (x.transpose(1, 2),) * 3,
            {},
            "query must be (B, *, D), with samples of unequal lengths and one width; got an",
        ),
        ((x.unsqueeze(-1),) * 3, {}, "got 4-D"),
        ((x.float(),) * 3, {}, "query must have the parameters' dtype, torch.float64"),
    ],
)
def test_refusals(inputs: Any, words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        attention()(*inputs, **words)
    assert str(raised.value).startswith("MultiheadAttention: ")


def test_a_strided_tensor_has_a_shape_in_errors() -> None:
    given = strided(x.float())
    with pytest.raises(ValueError, match=re.escape("(query (3, *, 12), key (3, *, 12), value (3, *, 12))")):
        attention()(given, given, given)


def test_refusals_of_layers() -> None:
    """What layers say before attention is asked."""
    words: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    model = headwise.Transformer(D, H, 1, 1, 16, **words)
    causal = headwise.Transformer.generate_square_subsequent_mask(7)
    other = headwise.Transformer(D, H, 1, 1, 16, dtype=torch.float64)
    torchs = headwise.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 16, **words), 1)
    block = headwise.EncoderBlock(D, attention=nn.MultiheadAttention(D, H, **words)).double()
    for call, message in (
        (lambda: model.encoder(x, src_key_padding_mask=PADDING), "key_padding_mask must be None beside"),
        (lambda: model(x, x, src_key_padding_mask=PADDING), "key_padding_mask must be None beside"),
        (lambda: model.decoder(x, x, query_padding_mask=PADDING), "query_padding_mask must be None beside"),
        (lambda: model.decoder(x, x, tgt_mask=causal), "attn_mask must be None .* is_causal=True hides the future"),
        (lambda: model(jagged((1, 2)), x), r"the same batch size; got \(\(2, \*, 12\), \(3, \*, 12\)\)"),
        (lambda: model(strided(jagged((1, 2))), x), r"the same batch size; got \(\(2, \*, 12\), \(3, \*, 12\)\)"),
        (lambda: other(x, x), "batch_first must be True for nested tensors"),
        (lambda: other.encoder(x), "batch_first must be True for nested tensors"),
        (lambda: torchs(x, is_causal=True), r"is_causal must be False for nested .*; upgrade\(\) them"),
        (lambda: block(x, is_causal=True), "attention must be headwise.MultiheadAttention for nested tensors"),
        (lambda: headwise.EncoderBlock(5, 1).double()(strided(x)), "x must be 5 wide; got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("lengths", [(400, 3, 5, 2), (700, 1), (3, 2)])
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"mask": masks.window(2, 1)}], ids=["", "causal", "window"])
def test_nan_in_one_sample_stays_there(lengths: tuple[int, ...], words: dict[str, Any]) -> None:
    module = attention()
    samples = [torch.randn(length, D, dtype=torch.float64) for length in lengths]
    samples[1][0] = torch.nan
    x = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    out, _ = module(x, x, x, need_weights=False, **words)
    assert [bool(sample.isnan().any()) for sample in out.unbind()] == [index == 1 for index in range(len(lengths))]


def test_masks_of_positions_in_an_uneven_batch() -> None:
    """Sample by sample, where padding would cost more."""
    module = attention().eval()
    x, y = jagged((900, 1, 1, 3)), jagged((700, 2, 1, 4), seed=3)
    for key, words in ((x, {"mask": masks.window(3, 1)}), (y, {"is_causal": True})):
        out, _ = module(x, key, key, need_weights=False, **words)
        for q, k, mine in zip(x.unbind(), key.unbind(), out.unbind(), strict=True):
            want, _ = module(q, k, k, need_weights=False, **words)
            torch.testing.assert_close(mine, want, **FLOAT64)


def test_a_subclass_with_a_feed_forward_of_its_own_sees_samples() -> None:
    class Centered(headwise.EncoderBlock):
        def _feed_forward(self, x: Tensor) -> Tensor:
            return super()._feed_forward(x - x.mean(dim=-1, keepdim=True)) if not x.is_nested else x

    block = Centered(D, H).double().eval()
    out = block(jagged(QUERIES))
    plain = headwise.EncoderBlock(D, H).double().eval()
    plain.load_state_dict(block.state_dict())
    assert not torch.allclose(out.values(), plain(jagged(QUERIES)).values())  # it was given the nested tensor


@pytest.mark.parametrize("options", [{"norm": "rmsnorm"}, {"bias": False}, {"activation": nn.SiLU()}], ids=str)
def test_strided_batches_in_blocks(options: dict[str, Any]) -> None:
    block = headwise.EncoderBlock(D, H, **options).double().eval()
    x = strided(jagged(QUERIES))
    out = block(x)
    assert out.layout == torch.strided
    for sample, mine in zip(x.unbind(), out.unbind(), strict=True):
        torch.testing.assert_close(mine, block(sample), **FLOAT64)
