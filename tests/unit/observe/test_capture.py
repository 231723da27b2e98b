"""What is seen of attention is what it did: all rows, against the weights that the same layer returns."""

from __future__ import annotations

import copy
import io
import itertools
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.unit.observe.looking import assert_clean, assert_shows, looked_at, same
from tests.unit.packed import set_price
from torch import Tensor, nn

import headwise
from headwise import masks
from headwise.core import reference
from headwise.observe.capture import Capture, Seen, Unsupported
from headwise.observe.finding import find_layers

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

B, L, S, D, H = 3, 6, 5, 16, 4
MODES: dict[str, Callable[[], Any]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
PADDING = {
    "right": ["######", "####..", "#....."],
    "left": ["######", "..####", ".....#"],
    "holes": ["#.##.#", "######", "#...#."],
}


def padding(kind: str, length: int) -> Tensor:
    """(B, length), True = padding."""
    return torch.tensor([[place == "." for place in row[:length]] for row in PADDING[kind]])


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf)


def attn_mask(kind: str, queries: int, keys: int, heads: int = B * H) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ahead = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    some = torch.rand(queries, keys, generator=generator) < 0.3
    some[:, 0] = False
    return {
        "none": {},
        "causal": {"attn_mask": ahead, "is_causal": True},
        "bool": {"attn_mask": some},
        "float": {"attn_mask": torch.randn(queries, keys, generator=generator)},
        "per head": {"attn_mask": torch.randn(heads, queries, keys, generator=generator)},
    }[kind]


def made(kind: type[nn.Module], **words: Any) -> Any:
    """A layer without a parameter of 0."""
    torch.manual_seed(2)
    layer = kind(D, H, **words).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return layer


def real(hidden: Tensor | None, length: int) -> list[list[int]]:
    if hidden is None:
        return [list(range(length))] * B
    return [(~row).nonzero()[:, 0].tolist() or list(range(length)) for row in hidden]  # none: that is to be reported


@pytest.mark.thin(3)
@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
@pytest.mark.parametrize("kind", ["self", "cross", "other widths"])
@pytest.mark.parametrize("hidden", ["none", "right", "left", "holes", "float"])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "per head"])
def test_rows_are_those_of_the_returned_weights(library: type[nn.Module], kind: str, hidden: str, mask: str) -> None:
    """In every layout, with every appended key, with what torch's layer takes."""
    mask = "bool" if (mask, hidden) == ("causal", "left") else mask  # or queries of torch's would see nothing
    modes = itertools.cycle(MODES.values())
    for batch_first, (bias, zeros) in itertools.product((True, False), itertools.product((False, True), repeat=2)):
        words: dict[str, Any] = {"batch_first": batch_first, "add_bias_kv": bias, "add_zero_attn": zeros}
        words |= {"kdim": 6, "vdim": 10} if kind == "other widths" else {}
        layer, given = made(library, **words), torchs_masks(hidden, mask, L if kind == "self" else S)
        query = torch.randn(B, L, D)
        key = query if kind == "self" else torch.randn(B, S, layer.kdim)
        value = query if kind == "self" else torch.randn(B, S, layer.vdim)
        pad = given.get("key_padding_mask")
        rows = real(None if pad is None or kind != "self" else pad != 0, L)
        tensors = {id(t): t if batch_first else t.transpose(0, 1) for t in (query, key, value)}
        inputs = [tensors[id(t)] for t in (query, key, value)]
        assert_seen(layer, inputs, given, kind, rows, next(modes))
        one = {id(t): t[1] for t in (query, key, value)}
        if pad is not None:
            given["key_padding_mask"] = pad[1]
        if mask == "per head":
            given["attn_mask"] = given["attn_mask"][H : 2 * H]
        assert_seen(layer, [one[id(t)] for t in (query, key, value)], given, kind, rows[1:2], next(modes))


def torchs_masks(hidden: str, mask: str, keys: int) -> dict[str, Any]:
    """Both of one dtype, as torch's layer wants them."""
    given = attn_mask(mask, L, keys)
    if hidden != "none":
        given["key_padding_mask"] = padding("holes" if hidden == "float" else hidden, keys)
    if hidden == "float" or mask in ("float", "per head"):
        as_floats = {name: as_float(each) for name, each in given.items() if getattr(each, "dtype", 0) == torch.bool}
        given |= as_floats
    return given


def assert_seen(
    layer: nn.Module, inputs: list[Tensor], given: dict[str, Any], kind: str, rows: list[list[int]], mode: Any
) -> None:
    weights = layer(*inputs, **given, need_weights=True, average_attn_weights=False)[1]
    with mode():
        again = layer(*inputs, **given, need_weights=False)[0]
        (out, _), [calls] = looked_at(layer, lambda: layer(*inputs, **given, need_weights=False))
    assert same(out, again)
    assert {one.kind for one in calls} == {"self" if kind == "self" else "cross"}
    assert_shows(calls, weights if weights.dim() == 4 else weights[None], 2e-6, rows)


OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "qk_norm": {"qk_norm": True},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": True},
    "fused, wide heads": {"fused_qkv": True, "head_dim": 6},
    "all": {"num_kv_heads": 2, "positions": "rotary", "qk_norm": True, "softcap": 2.0, "sink": True, "gate": True},
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("hidden", ["none", "right", "holes"])
@pytest.mark.parametrize("mode", MODES)
def test_our_options(option: str, hidden: str, mode: str) -> None:
    layer = made(headwise.MultiheadAttention, batch_first=True, **OPTIONS[option])
    x = torch.randn(B, L, D)
    given: dict[str, Any] = {"is_causal": True} if hidden == "none" else {"key_padding_mask": padding(hidden, L)}
    _, weights = layer(x, x, x, average_attn_weights=False, **given)
    with MODES[mode]():
        _, [calls] = looked_at(layer, lambda: layer(x, x, x, need_weights=False, **given))
    assert_shows(calls, weights, 2e-6, real(given.get("key_padding_mask"), L))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(1, 2),
        masks.causal() & masks.window(2, None),
        masks.prefix(3) | masks.causal(),
        masks.documents(torch.tensor([0, 0, 1, 1, 1, 2])),
        masks.dense(torch.eye(L, dtype=torch.bool) | (torch.arange(L) < 2)),
        masks.bias(torch.linspace(-2, 2, L * L).view(L, L)) & masks.causal(),
    ],
    ids=str,
)
def test_our_masks(mask: masks.Mask) -> None:
    layer = made(headwise.MultiheadAttention, batch_first=True)
    x = torch.randn(B, L, D)
    _, weights = layer(x, x, x, average_attn_weights=False, mask=mask)
    _, [calls] = looked_at(layer, lambda: layer(x, x, x, need_weights=False, mask=mask))
    assert_shows(calls, weights, 2e-6)


def test_padded_queries_of_their_own() -> None:
    """Cross-attention has no other word for them."""
    layer = made(headwise.MultiheadAttention, batch_first=True)
    x, y = torch.randn(B, L, D), torch.randn(B, S, D)
    hidden, hidden_keys = padding("holes", L), padding("left", S)
    given = {"key_padding_mask": hidden_keys, "query_padding_mask": hidden}
    _, weights = layer(x, y, y, average_attn_weights=False, **given)
    _, [calls] = looked_at(layer, lambda: layer(x, y, y, need_weights=False, **given))
    assert_shows(calls, weights, 2e-6, real(hidden, L))


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(library: type[nn.Module], dtype: torch.dtype) -> None:
    layer = made(library, batch_first=True).to(dtype)
    x = torch.randn(B, L, D, dtype=dtype)
    hidden = padding("right", L)
    _, weights = layer(x, x, x, hidden, average_attn_weights=False)
    _, [calls] = looked_at(layer, lambda: layer(x, x, x, hidden, need_weights=False))
    assert_shows(calls, weights, 2e-2 if dtype == torch.bfloat16 else 1e-12, real(hidden, L))
    assert calls[0].weights.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
def test_autocast(library: type[nn.Module]) -> None:
    """Projected as the model does; what comes of it is in float32."""
    layer = made(library, batch_first=True)
    x = torch.randn(B, L, D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, weights = layer(x, x, x, average_attn_weights=False)
        _, [calls] = looked_at(layer, lambda: layer(x, x, x, need_weights=False))
    assert_shows(calls, weights, 2e-2)
    assert calls[0].weights.dtype == torch.float32


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
def test_the_oracle_agrees(library: type[nn.Module]) -> None:
    """Written from the formula, in float64, from the layer's own parameters."""
    layer = made(library).double()
    x = torch.randn(B, L, D, dtype=torch.float64)
    weight, bias = layer.state_dict()["in_proj_weight"], layer.state_dict()["in_proj_bias"]
    q, k, _ = (x @ weight.T + bias).view(B, L, 3, H, D // H).permute(2, 0, 3, 1, 4)
    hidden = padding("left", L)
    _, weights = reference.attention(q, k, k, keep=~hidden[:, None, None])
    given = x.transpose(0, 1)
    _, [calls] = looked_at(layer, lambda: layer(given, given, given, hidden, need_weights=False))
    assert_shows(calls, weights, 1e-12, real(hidden, L))


# --- Stacks -----------------------------------------------------------------------------------------------------------


def torch_stack(norm_first: bool, layout: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=layout, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=not norm_first)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack.eval()


def layer_by_layer(stack: nn.Module, x: Tensor, **words: Any) -> list[Tensor]:
    """(B, H, L, L) of each layer of torch's kind."""
    found = []
    names = {"src_mask": "attn_mask", "src_key_padding_mask": "key_padding_mask"}
    for layer in stack.layers:
        y = layer.norm1(x) if layer.norm_first else x
        given = {names[name]: value for name, value in words.items()}
        found.append(layer.self_attn(y, y, y, average_attn_weights=False, **given)[1])
        x = layer(x, **words)
    return found


@pytest.mark.thin(3)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("hidden", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
def test_torch_encoder(norm_first: bool, hidden: str, mode: str, masked: bool) -> None:
    """Also where its layers call no attention, and where padding makes its tensors nested."""
    stack, x = torch_stack(norm_first), torch.randn(B, L, D)
    pad = None if hidden == "none" else padding(hidden, L)
    ahead = torch.ones(L, L, dtype=torch.bool).triu(1) if masked and hidden != "left" else None
    words = {} if pad is None else {"src_key_padding_mask": pad}
    expected = layer_by_layer(stack, x, **words, **({} if ahead is None else {"src_mask": ahead}))
    with MODES[mode]():
        plain = stack(x, ahead, **words)
        out, calls = looked_at(stack, lambda: stack(x, ahead, **words))
    assert same(out, plain)
    assert [one[0].name for one in calls] == [f"layers.{at}.self_attn" for at in range(3)]
    nested = not norm_first and mode != "grad" and hidden == "right" and not masked
    for seen, weights in zip(calls, expected, strict=True):
        if nested:
            assert [len(one.queries) for one in seen] == [6, 4, 1]
        else:
            assert {one.kind for one in seen} == {"self"}
        assert_shows(seen, weights, 1e-5, real(pad, L))


@pytest.mark.parametrize("mode", MODES)
def test_torch_transformer(mode: str) -> None:
    """Length first, encoder and decoder, with every padding it takes."""
    torch.manual_seed(4)
    model = nn.Transformer(D, H, 2, 2, 32).eval()
    src, tgt = torch.randn(L, B, D), torch.randn(S, B, D)
    words = {
        "src_key_padding_mask": padding("right", L),
        "tgt_key_padding_mask": padding("right", S),
        "memory_key_padding_mask": padding("holes", L),
    }
    with MODES[mode]():
        plain = model(src, tgt, **words)
        out, calls = looked_at(model, lambda: model(src, tgt, **words))
    assert same(out, plain)
    assert [seen[0].kind for seen in calls] == ["self"] * 3 + ["cross", "self", "cross"]
    memory, x = model.encoder(src, src_key_padding_mask=words["src_key_padding_mask"]), tgt
    for at, layer in enumerate(model.decoder.layers):
        pad = words["tgt_key_padding_mask"]
        found, weights = layer.self_attn(x, x, x, pad, average_attn_weights=False)
        assert_shows(calls[2 + 2 * at], weights, 1e-5, real(pad, S))
        x = layer.norm1(x + found)
        found, weights = layer.multihead_attn(
            x, memory, memory, words["memory_key_padding_mask"], average_attn_weights=False
        )
        assert_shows(calls[3 + 2 * at], weights, 1e-5, real(None, S))
        x = layer.norm2(x + found)
        x = layer.norm3(x + layer._ff_block(x))


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("price", [0.0, 1e30])
def test_our_encoder_packed_or_not(kind: str, mode: str, price: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed row holds all samples, and each is seen as itself."""
    stack = headwise.Encoder([headwise.EncoderBlock(D, H) for _ in range(2)]).eval()
    x, pad = torch.randn(B, L, D), padding(kind, L)
    set_price(monkeypatch, 1e30)
    _, expected = stack(x, pad, query_padding_mask=pad, need_weights=True, average_attn_weights=False)
    set_price(monkeypatch, price)
    with MODES[mode]():
        plain = stack(x, pad, query_padding_mask=pad)
        out, calls = looked_at(stack, lambda: stack(x, pad, query_padding_mask=pad))
    assert same(out, plain)
    for seen, weights in zip(calls, expected, strict=True):
        for at, one in enumerate(seen):
            rows = real(pad, L)[at]
            assert one.kind == "self"
            assert len(one.queries) == len(one.keys) == len(rows)
            torch.testing.assert_close(one.weights, weights[at][:, rows][..., rows], rtol=1e-5, atol=1e-6)


def test_a_large_batch_is_packed_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = headwise.MultiheadAttention(256, 4, batch_first=True).eval()
    x, lengths = torch.randn(4, 128, 256), torch.tensor([128, 40, 3, 64])
    pad = torch.arange(128) >= lengths[:, None]
    given = {"key_padding_mask": pad, "query_padding_mask": pad}
    _, weights = layer(x, x, x, **given, average_attn_weights=False)
    shapes = []
    original = type(layer.attend).forward

    def forward(self: nn.Module, query: Tensor, *rest: Any, **words: Any) -> Any:
        shapes.append(query.shape)
        return original(self, query, *rest, **words)

    monkeypatch.setattr(type(layer.attend), "forward", forward)
    with torch.no_grad():
        _, [calls] = looked_at(layer, lambda: layer(x, x, x, **given, need_weights=False))
    assert [shape[0] for shape in shapes] == [1]
    for at, (one, length) in enumerate(zip(calls, lengths.tolist(), strict=True)):
        torch.testing.assert_close(one.weights, weights[at, :, :length, :length], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_our_nested_batches(mode: str, layout: torch.layout) -> None:
    layer = made(headwise.MultiheadAttention, batch_first=True)
    parts = [torch.randn(length, D) for length in (4, 1, 6)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    with MODES[mode]():
        _, [calls] = looked_at(layer, lambda: layer(x, x, x, need_weights=False, is_causal=True))
    assert [one.kind for one in calls] == ["self"] * 3
    for part, one in zip(parts, calls, strict=True):
        _, weights = layer(part, part, part, average_attn_weights=False, is_causal=True)
        torch.testing.assert_close(one.weights, weights, rtol=2e-6, atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("option", ["none", "rotary", "alibi", "grouped", "softcap", "sink"])
@pytest.mark.parametrize("cache", ["static", "rolling"])
def test_decoding_with_a_cache(option: str, cache: str) -> None:
    """A prompt, then a token at a time; rows are those of the whole, and distances count from where the token is."""
    layer = made(headwise.MultiheadAttention, batch_first=True, **OPTIONS.get(option, {}))
    x = torch.randn(B, L, D)
    if cache == "static":
        held: Any = headwise.StaticCache(L)
        mask = masks.causal()
    else:
        held = headwise.RollingCache(3)
        mask = masks.causal() & masks.window(2, None)
    _, weights = layer(x, x, x, average_attn_weights=False, mask=mask)
    done = 0
    for step in (2, 1, 1, 2):
        part = x[:, done : done + step]

        def call(part: Tensor = part) -> Any:
            return layer(part, part, part, need_weights=False, is_causal=True, cache=held)

        _, [calls] = looked_at(layer, call)
        done += step
        for at, one in enumerate(calls):
            assert one.kind == "self"
            rows = weights[at, :, done - step : done, :done]
            seen = torch.cat([rows.new_zeros(H, step, done - one.weights.shape[-1]), one.weights], dim=-1)
            torch.testing.assert_close(seen, rows, rtol=2e-6, atol=2e-6)


# --- What is found ----------------------------------------------------------------------------------------------------


def test_find_layers_once_each_by_name_and_in_order() -> None:
    model = nn.ModuleDict({"a": torch_stack(False), "b": headwise.Decoder([headwise.DecoderBlock(D, H)])})
    model["c"] = model["a"].layers[1]
    layers = find_layers(model)
    assert [layer.name for layer in layers] == [
        *(f"a.layers.{at}.self_attn" for at in range(3)),
        "b.layers.0.self_attn",
        "b.layers.0.multihead_attn",
    ]
    assert [layer.index for layer in layers] == list(range(5))
    assert [layer.heads for layer in layers] == [H] * 5
    assert [layer.owner is not None for layer in layers] == [True] * 3 + [False] * 2
    assert all(layer.still_there() for layer in layers)
    model["a"].layers[0] = nn.Identity()
    assert [layer.still_there() for layer in layers] == [False, True, True, True, True]


def test_a_layer_called_twice_is_seen_twice() -> None:
    layer = made(headwise.MultiheadAttention, batch_first=True)
    x, y = torch.randn(B, L, D), torch.randn(B, S, D)
    _, calls = looked_at(layer, lambda: (layer(x, x, x), layer(x, y, y), layer(y, y, y)))
    assert [(seen[0].kind, seen[0].weights.shape) for seen in calls] == [
        ("self", (H, L, L)),
        ("cross", (H, L, S)),
        ("self", (H, S, S)),
    ]


def test_a_fused_layer_is_seen_also_after_its_attention_was_called_by_itself() -> None:
    stack, x = torch_stack(False), torch.randn(B, L, D)
    attention = stack.layers[0].self_attn

    def call() -> None:
        with torch.no_grad():
            attention(x, x, x)
            stack(x)

    _, calls = looked_at(stack, call)
    assert [seen[0].name for seen in calls] == ["layers.0.self_attn"] + [f"layers.{at}.self_attn" for at in range(3)]


# --- Standing in ------------------------------------------------------------------------------------------------------


def nothing(tell: Callable[[], Seen | None]) -> None:
    """See nothing."""


def test_captures_within_each_other_end_in_any_order() -> None:
    layer = made(nn.MultiheadAttention, batch_first=True)
    x, seen = torch.randn(B, L, D), []
    one, two, three = (Capture(find_layers(layer), lambda tell, at=at: seen.append(at)) for at in range(3))
    for each in (one, two, three):
        each.open()
    layer(x, x, x)
    assert sorted(seen) == [0, 1, 2]
    two.close()
    layer(x, x, x)
    assert sorted(seen) == [0, 0, 1, 2, 2]
    one.close()
    three.close()
    three.close()
    assert_clean(layer)


@pytest.fixture(autouse=True)
def _given_back() -> Any:
    """No test leaves a capture open."""
    opened: list[Capture] = []
    original = Capture.open

    def open_(self: Capture) -> None:
        opened.append(self)
        original(self)

    Capture.open = open_  # type: ignore[method-assign]
    yield
    Capture.open = original  # type: ignore[method-assign]
    for each in opened:
        each.close()


def test_threads_stand_in_beside_each_other() -> None:
    layer, x, seen = made(nn.MultiheadAttention), torch.randn(L, B, D), []
    ready, go = threading.Event(), threading.Event()

    def other() -> None:
        with Capture(find_layers(layer), lambda tell: seen.append("other")):
            ready.set()
            go.wait(10)
            layer(x, x, x)

    worker = threading.Thread(target=other)
    with Capture(find_layers(layer), lambda tell: seen.append("this")):
        worker.start()
        ready.wait(10)
        layer(x, x, x)
    assert seen == ["this"]
    layer(x, x, x)
    go.set()
    worker.join(10)
    assert seen == ["this", "other"]
    assert_clean(layer)


def test_only_the_thread_that_opened_is_seen() -> None:
    layer, x, seen = made(nn.MultiheadAttention), torch.randn(L, B, D), []
    with Capture(find_layers(layer), lambda tell: seen.append(tell())):
        worker = threading.Thread(target=lambda: layer(x, x, x))
        worker.start()
        worker.join()
        assert seen == []
        layer(x, x, x)
    assert len(seen) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_an_error_in_attention(error: type[BaseException]) -> None:
    class Failing(nn.MultiheadAttention):
        def forward(self, *args: Any, **words: Any) -> Any:
            raise error

    layer = Failing(D, H)
    capture = Capture(find_layers(layer), nothing)
    capture.open()
    with pytest.raises(error):
        layer(1, 2, 3)
    if error is not ValueError:  # whoever opened it may never be asked to close it
        assert_clean(layer)
    capture.close()
    assert_clean(layer)


def test_a_forward_of_the_users_own_is_kept() -> None:
    """As `accelerate` and others put on single modules."""
    layer, x, calls = made(nn.MultiheadAttention), torch.randn(L, B, D), []
    original = layer.forward

    def forward(*args: Any, **words: Any) -> Any:
        calls.append(1)
        return original(*args, **words)

    layer.forward = forward
    weights = layer(x, x, x, average_attn_weights=False)[1]
    seen: list[Seen | None] = []
    with Capture(find_layers(layer), lambda tell: seen.append(tell())):
        layer(query=x, key=x, value=x, need_weights=False)
        layer(x, x, value=x)
    assert layer.__dict__["forward"] is forward
    assert len(calls) == 3
    assert [one and one.kind for one in seen] == ["self", "self"]
    del layer.forward
    _, [calls_seen] = looked_at(layer, lambda: layer(x, x, x))
    assert_shows(calls_seen, weights, 2e-6)


def test_a_forward_that_is_put_on_top_meanwhile_stays_and_works() -> None:
    layer, x = made(nn.MultiheadAttention), torch.randn(L, B, D)
    with Capture(find_layers(layer), nothing):
        inner = layer.forward
        layer.forward = lambda *args, **words: inner(*args, **words)
    out = layer(x, x, x)[0]
    del layer.forward
    assert torch.equal(out, layer(x, x, x)[0])


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
def test_copies_that_are_made_meanwhile_are_whole(library: type[nn.Module]) -> None:
    """An average of weights, or a checkpoint that another thread writes."""
    layer, x, file = made(library), torch.randn(L, B, D), io.BytesIO()
    seen = []
    with Capture(find_layers(layer), lambda tell: seen.append(1)):
        copied = copy.deepcopy(layer)
        torch.save(layer, file)
        state = layer.state_dict()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with torch.no_grad():
            for each in (copied, loaded):
                each.out_proj.bias.add_(1)
            assert torch.allclose(copied(x, x, x)[0], layer(x, x, x)[0] + 1)
    assert len(seen) == 1
    assert torch.allclose(loaded(x, x, x)[0], layer(x, x, x)[0] + 1)
    assert state.keys() == layer.state_dict().keys()


def test_what_it_cannot_tell_is_said() -> None:
    """A class of the user's may add to its inputs before it calls torch's forward: what is attended is not seen."""

    class Placed(nn.MultiheadAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, **words: Any) -> Any:
            return super().forward(query + 1, key - 1, value, **words)

    x = torch.randn(L, B, D)
    layer = Placed(D, H)
    with pytest.raises(Unsupported, match=r"Placed\.forward may change its inputs"):
        looked_at(layer, lambda: layer(x, x, x))
    assert_clean(layer)


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_changes_when_it_is_read_is_let_be(training: bool) -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.MultiheadAttention(D, H), "in_proj_weight").train(training)
    x = torch.randn(L, B, D)
    with pytest.raises(Unsupported, match="parametrized"):
        looked_at(layer, lambda: layer(x, x, x))


def test_a_layer_of_the_users_that_torch_fuses_is_said() -> None:
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **words: Any) -> Tensor:
            return super().forward(*args, **words)

    layer = Mine(D, 2, batch_first=True).eval()
    model, x = nn.Sequential(layer), torch.randn(B, L, D)
    with torch.no_grad(), pytest.raises(Unsupported, match=r"Mine\.forward"):
        looked_at(model, lambda: model(x))


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
def test_nothing_and_one(library: type[nn.Module]) -> None:
    layer = made(library, batch_first=True)
    for shape, keys in (((0, L), L), ((2, 0), 3), ((1, 1), 1)):
        x, y = torch.randn(*shape, D), torch.randn(shape[0], keys, D)
        _, [calls] = looked_at(layer, lambda x=x, y=y: layer(x, y, y, need_weights=False))
        assert [one.weights.shape for one in calls] == [(H, shape[1], keys)] * (shape[0] if shape[1] else 0)


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
def test_large_logits(library: type[nn.Module]) -> None:
    layer = made(library, batch_first=True)
    x = 20 * torch.randn(B, L, D)
    _, weights = layer(x, x, x, average_attn_weights=False)
    _, [calls] = looked_at(layer, lambda: layer(x, x, x, need_weights=False))
    assert max(float(one.found.max_logit.max()) for one in calls) > 2000
    assert_shows(calls, weights, 1e-3)
