"""A cache changes how often something is computed and nothing else: the full forward is the oracle of every test."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headwise import CacheList, CrossCache, MultiheadAttention, RollingCache, StaticCache, attention, explain, masks
from headwise.core.cache import Cache
from headwise.core.lowering import Size
from headwise.core.reference import attention as reference

B, L, D, H = 3, 13, 20, 5
CHUNKS = [(1,) * L, (2, 3, 5, 3), (7, 1, 1, 1, 1, 1, 1), (L,)]
CHUNK_IDS = ["one by one", "chunks", "prompt and steps", "at once"]
WINDOW = 4

PADDING = torch.zeros(B, L, dtype=torch.bool)
PADDING[1, :5], PADDING[2, :2] = True, True


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def module(**options: Any) -> MultiheadAttention:
    made = MultiheadAttention(D, H, **{"batch_first": True, "dtype": torch.float64} | options).eval()
    for parameter in made.parameters():
        parameter.copy_(torch.randn_like(parameter) / 3)
    return made


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, L, D, dtype=dtype)


def decode(mha: MultiheadAttention, x: Tensor, chunks: tuple[int, ...], cache: Cache, **words: Any) -> Tensor:
    """The outputs of one call per chunk; a function among the words gives those of a chunk."""
    out, dim = [], 1 if mha.batch_first else 0
    for first, some in zip(starts(chunks), x.split(chunks, dim), strict=True):
        cut = {
            name: value(first, first + some.shape[dim]) if callable(value) else value for name, value in words.items()
        }
        out.append(mha(some, some, some, need_weights=False, cache=cache, **cut)[0])
    return torch.cat(out, dim)


def starts(chunks: tuple[int, ...]) -> list[int]:
    return [sum(chunks[:n]) for n in range(len(chunks))]


def rows(tensor: Tensor) -> Callable[[int, int], Tensor]:
    """The part of (B, L) that belongs to the new positions."""
    return lambda first, end: tensor[:, first:end]


def close(got: Tensor, want: Tensor) -> None:
    limit = 1e-12 if got.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=CHUNK_IDS)
@pytest.mark.parametrize("options", [{}, {"fused_qkv": True}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_static_equals_the_full_forward(options: dict[str, Any], chunks: tuple[int, ...], dtype: torch.dtype) -> None:
    mha, x = module(dtype=dtype, **options), inputs(dtype)
    cache = StaticCache(L)
    close(decode(mha, x, chunks, cache, is_causal=True), mha(x, x, x, is_causal=True)[0])
    assert cache.length == L


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=CHUNK_IDS)
@pytest.mark.parametrize("window", [1, 2, WINDOW, L + 4])
def test_rolling_equals_the_full_forward_under_a_window(
    window: int, chunks: tuple[int, ...], dtype: torch.dtype
) -> None:
    mha, x = module(dtype=dtype, add_bias_kv=True), inputs(dtype)
    whole = mha(x, x, x, mask=masks.window(window - 1, 0))[0]
    close(decode(mha, x, chunks, RollingCache(window), is_causal=True), whole)


def test_a_rolling_cache_has_no_end_and_bounded_memory() -> None:
    mha, x, cache = module(), torch.randn(2, 211, D, dtype=torch.float64), RollingCache(WINDOW)
    chunks = (61, *(1,) * 30, 17, 103)
    whole = mha(x, x, x, mask=masks.window(WINDOW - 1, 0))[0]
    close(decode(mha, x, chunks, cache, is_causal=True), whole)
    mha(x[:, :1], x[:, :1], x[:, :1], cache=cache)
    assert cache._held[0].shape[2] == 2 * WINDOW
    assert cache.length == 212


@pytest.mark.thin(2)
@pytest.mark.parametrize("chunks", CHUNKS, ids=CHUNK_IDS)
@pytest.mark.parametrize("make", [lambda: StaticCache(L + 2), lambda: RollingCache(WINDOW)], ids=["static", "rolling"])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_is_remembered(side: str, make: Callable[[], Cache], chunks: tuple[int, ...]) -> None:
    mha, x = module(add_zero_attn=True), inputs()
    padding = {"left": PADDING, "right": PADDING.flip(1), "holes": torch.rand(B, L) < 0.4}[side]
    x[padding] = float("nan")
    mask = masks.window(WINDOW - 1, 0) if isinstance(make(), RollingCache) else None
    words = {"is_causal": True, "key_padding_mask": padding, "query_padding_mask": padding}
    whole = mha(x, x, x, mask=mask, **words)[0]
    cut = {"is_causal": True, "key_padding_mask": rows(padding), "query_padding_mask": rows(padding)}
    close(decode(mha, x, chunks, make(), **cut), whole)


@pytest.mark.parametrize("make", [lambda: StaticCache(L), lambda: RollingCache(L)], ids=["static", "rolling"])
@pytest.mark.parametrize("first", [0, 5])
def test_padding_of_some_calls_only(first: int, make: Callable[[], Cache]) -> None:
    """A left padded prompt, or one that comes later, among calls without padding."""
    mha, x, cache = module(), inputs(), make()
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[1, first : first + 3] = True
    whole = mha(x, x, x, is_causal=True, key_padding_mask=padding)[0]
    out = []
    for begin, end in ((0, first), (first, first + 5), (first + 5, first + 6), (first + 6, L)):
        some = x[:, begin:end]
        hidden = padding[:, begin:end] if begin == first and end > begin else None
        out.append(mha(some, some, some, key_padding_mask=hidden, is_causal=True, cache=cache)[0])
    close(torch.cat(out, 1), whole)


RELATIVE = {
    "causal": masks.causal(),
    "ahead": masks.causal(2),
    "each its own": masks.causal(torch.tensor([0, 1, 2])),
    "window": masks.window(3, 0),
    "both sides": masks.window(2, 1),
    "left side": masks.window(3, None),
    "right side": masks.window(None, 2),
    "no side": masks.window(None, None),
    "prefix": masks.causal() | masks.prefix(4),
    "prefixes": masks.causal() | masks.prefix(torch.tensor([0, 3, 5])),
    "lengths": masks.padding([13, 3, 11]) & masks.causal(),
    "not": ~masks.window(2, 0) & masks.causal(),
    "documents": masks.causal() & masks.documents(torch.tensor([0] * 4 + [1] * 9)),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("chunks", CHUNKS, ids=CHUNK_IDS)
@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("rolls", [False, True], ids=["static", "rolling"])
def test_positions_of_masks_go_on(name: str, rolls: bool, chunks: tuple[int, ...]) -> None:
    """Row l of a later call is row `length + l` of the full forward, as far as its keys were there already."""
    mha, x, cache = module(add_zero_attn=True), inputs(), RollingCache(6) if rolls else StaticCache(L)
    mask = RELATIVE[name]
    own = mask & masks.window(5, None) if rolls else mask
    for first, some in zip(starts(chunks), x.split(chunks, 1), strict=True):
        end = first + some.shape[1]
        seen, call_mask = x[:, :end], mask
        if name == "documents":
            ids = mask.parts[1].tensors[0]  # rows of this call, keys of all so far
            call_mask = masks.causal() & masks.documents(ids[first:end], ids[:end])
            own = masks.causal() & masks.documents(ids[:end])
            own = own & masks.window(5, None) if rolls else own
        got, weights = mha(some, some, some, mask=call_mask, cache=cache, average_attn_weights=False)
        want, all_weights = mha(seen, seen, seen, mask=own, average_attn_weights=False)
        close(got, want[:, first:])
        held = weights.shape[3]
        close(weights, all_weights[:, :, first:, all_weights.shape[3] - held :])
        assert not all_weights[:, :, first:, : all_weights.shape[3] - held].any()


@pytest.mark.thin(2)
@pytest.mark.parametrize("chunks", CHUNKS[:3], ids=CHUNK_IDS[:3])
@pytest.mark.parametrize("kind", ["bool", "float", "per head", "dense", "bias", "per key"])
@pytest.mark.parametrize("rolls", [False, True], ids=["static", "rolling"])
def test_tensor_masks_have_a_column_for_every_position(kind: str, rolls: bool, chunks: tuple[int, ...]) -> None:
    mha, x, cache = module(), inputs(), RollingCache(6) if rolls else StaticCache(L)
    hidden, scores = torch.rand(L, L) < 0.3, torch.randn(B * H, L, L, dtype=torch.float64)
    whole: dict[str, dict[str, Any]] = {
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": scores[0]},
        "per head": {"attn_mask": scores},
        "dense": {"mask": masks.dense(~hidden)},
        "bias": {"mask": masks.bias(scores.view(B, H, L, L))},
        "per key": {"mask": masks.padding(~PADDING)},
    }

    def part(first: int, end: int) -> dict[str, Any]:
        return {
            "bool": {"attn_mask": hidden[first:end, :end]},
            "float": {"attn_mask": scores[0, first:end, :end]},
            "per head": {"attn_mask": scores[:, first:end, :end]},
            "dense": {"mask": masks.dense(~hidden[first:end, :end])},
            "bias": {"mask": masks.bias(scores.view(B, H, L, L)[:, :, first:end, :end])},
            "per key": {"mask": masks.padding(~PADDING[:, :end])},
        }[kind]

    words = whole[kind]
    if rolls:
        words = {**words, "mask": words.get("mask", masks.window(5, None)) & masks.window(5, None)}
    want = mha(x, x, x, is_causal=True, **words)[0]
    out = []
    for first, some in zip(starts(chunks), x.split(chunks, 1), strict=True):
        words = part(first, first + some.shape[1])
        out.append(mha(some, some, some, is_causal=True, cache=cache, **words)[0])
    close(torch.cat(out, 1), want)


@pytest.mark.parametrize("average", [False, True], ids=["heads", "average"])
def test_weights_count_all_keys(average: bool) -> None:
    mha, x, cache = module(add_bias_kv=True, add_zero_attn=True), inputs(), StaticCache(L)
    _, want = mha(x, x, x, is_causal=True, average_attn_weights=average)
    for first, some in zip((0, 7, 8), x.split((7, 1, 5), 1), strict=True):
        end = first + some.shape[1]
        _, got = mha(some, some, some, is_causal=True, average_attn_weights=average, cache=cache)
        assert got.shape[-1] == end + 2
        close(got[..., :end], want[..., first:end, :end])
        close(got[..., end:], want[..., first:end, L:])


def test_length_first_and_unbatched() -> None:
    mha, x = module(batch_first=False), inputs().transpose(0, 1)
    close(decode(mha, x, (7, 1, 5), StaticCache(L), is_causal=True), mha(x, x, x, is_causal=True)[0])
    mha, one, cache = module(), inputs()[0], StaticCache(L)
    padding = PADDING[1]
    want, want_weights = mha(one, one, one, is_causal=True, key_padding_mask=padding)
    out = []
    for some, hidden in zip(one.split((7, 1, 5)), padding.split((7, 1, 5)), strict=True):
        got, weights = mha(some, some, some, is_causal=True, key_padding_mask=hidden, cache=cache)
        out.append(got)
    close(torch.cat(out), want)
    close(weights, want_weights[8:])


@pytest.mark.parametrize("G", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 5])
def test_grouped_heads_by_hand(G: int, window: int | None) -> None:
    q, k, v = (torch.randn(2, heads, 17, 7, dtype=torch.float64) for heads in (6, G, G))
    cache = StaticCache(17) if window is None else RollingCache(window)
    rule = masks.causal() if window is None else masks.window(window - 1, 0)
    keep = rule.keep(Size(2, 6, 17, 17, q.device)).expand(2, 6, 17, 17)
    want, _ = reference(q, k, v, keep=keep)
    for at in range(17):
        keys, values = cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        close(attention(q[:, :, at : at + 1], keys, values), want[:, :, at : at + 1])
    assert keys.shape == (2, G, 17 if window is None else window, 7)


@pytest.mark.parametrize(
    ("L", "S", "expected"), [(1, 4096, "plain"), (4, 1024, "plain"), (1, 1024, "sdpa"), (5, 4096, "sdpa")]
)
def test_a_step_over_many_shared_keys_is_one_product(L: int, S: int, expected: str) -> None:
    """Heads that share keys are the rows of one product where there is enough to multiply, and few rows."""
    q, k = torch.randn(1, 8, L, 64), torch.randn(1, 2, S, 64)
    told = explain(q, k, k)
    assert told.backend == expected
    if expected == "plain":
        why = "few queries in inference: all heads that share a key make one product, the kernel one each"
        assert told.refused["sdpa"] == [why]
    torch.testing.assert_close(attention(q, k, k), attention(q, k, k, backend="sdpa"), rtol=1e-5, atol=1e-5)
    assert explain(*(t[:, :2].contiguous() for t in (q, k, k))).backend == "sdpa"  # nothing is shared


@pytest.mark.parametrize("memory_first", [True, False], ids=["batch first", "length first"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 7, "vdim": 11}], ids=["D", "other widths"])
def test_a_memory_is_projected_once(widths: dict[str, int], fused: bool, memory_first: bool) -> None:
    mha, x = module(fused_qkv=fused, batch_first=memory_first, **widths), inputs()
    key, value = (torch.randn(B, 11, widths.get(name, D), dtype=torch.float64) for name in ("kdim", "vdim"))
    value = value if widths else key
    padding = torch.arange(11) >= torch.tensor([11, 4, 7])[:, None]
    if not memory_first:
        x, key, value = x.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    want = mha(x, key, value, key_padding_mask=padding)[0]
    cache, calls = CrossCache(), []
    if not fused:
        for child in (mha.k_proj, mha.v_proj):
            child.register_forward_hook(lambda *_: calls.append(1))
    out = [
        mha(some, key, value, key_padding_mask=padding, cache=cache)[0]
        for some in x.split((5, 1, 7), int(memory_first))
    ]
    close(torch.cat(out, int(memory_first)), want)
    assert len(calls) == (0 if fused else 2)
    assert cache.length == L


def test_positions_go_on_to_a_memory_too() -> None:
    mha, x, memory, cache = module(), inputs(), torch.randn(B, L, D, dtype=torch.float64), CrossCache()
    want = mha(x, memory, memory, is_causal=True)[0]
    out = [mha(some, memory, memory, is_causal=True, cache=cache)[0] for some in x.split((5, 1, 7), 1)]
    close(torch.cat(out, 1), want)


def test_another_memory_is_refused() -> None:
    mha, x, memory, cache = module(), inputs(), torch.randn(B, 7, D, dtype=torch.float64), CrossCache()
    want = mha(x, memory, memory, cache=cache)[0]
    close(mha(x, memory.clone(), memory, cache=cache)[0], want)  # the same numbers
    close(mha(x, memory, memory, cache=cache)[0], want)
    other = torch.randn_like(memory)
    with pytest.raises(ValueError, match=r"key must be the memory of the first call; reset\(\).*got other numbers"):
        mha(x, other, memory, cache=cache)
    with pytest.raises(ValueError, match="value must be the memory of the first call"):
        mha(x, memory, other, cache=cache)
    with pytest.raises(ValueError, match=r"\(B, S\) = \(3, 7\); got \(3, 5\)"):
        mha(x, memory[:, :5], memory[:, :5], cache=cache)
    memory += 1
    with pytest.raises(ValueError, match="got the same tensor, written to since"):
        mha(x, memory, memory, cache=cache)
    with pytest.raises(ValueError, match="got other numbers"):
        mha(x, memory.clone(), memory.clone(), cache=cache)
    cache.reset()
    close(mha(x, other, other, cache=cache)[0], mha(x, other, other)[0])


@pytest.mark.parametrize("indices", [[2, 0, 1], [1, 1, 1], [2, 0], [0, 0, 1, 1, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("make", [lambda: StaticCache(L), lambda: RollingCache(WINDOW)], ids=["static", "rolling"])
def test_reorder_is_decoding_of_reordered_inputs(make: Callable[[], Cache], indices: list[int]) -> None:
    mha, x, cache = module(), inputs(), make()
    mask = masks.window(WINDOW - 1, 0) if isinstance(cache, RollingCache) else masks.causal()
    both = torch.cat([x[indices, :9], torch.randn(len(indices), 4, D, dtype=torch.float64)], 1)
    padding = torch.cat([PADDING[indices, :9], torch.zeros(len(indices), 4, dtype=torch.bool)], 1)
    want = mha(both, both, both, key_padding_mask=padding, mask=mask)[0]
    decode(mha, x[:, :9], (5, 1, 3), cache, is_causal=True, key_padding_mask=rows(PADDING))
    cache.reorder(torch.tensor(indices))
    assert cache.length == 9
    close(decode(mha, both[:, 9:], (1, 1, 2), cache, is_causal=True), want[:, 9:])


def test_reorder_of_a_memory() -> None:
    mha, x, memory, cache = module(), inputs(), torch.randn(B, 7, D, dtype=torch.float64), CrossCache()
    mha(x, memory, memory, cache=cache)
    cache.reorder([1, 1, 0, 2])
    chosen, y = memory[[1, 1, 0, 2]], torch.randn(4, 1, D, dtype=torch.float64)
    close(mha(y, chosen, chosen, cache=cache)[0], mha(y, chosen, chosen)[0])
    with pytest.raises(ValueError, match="got other numbers"):
        mha(y, chosen + 1, chosen, cache=cache)


def test_a_reordered_cache_shares_nothing_with_its_copy() -> None:
    mha, x, cache = module(), inputs(), StaticCache(L)
    decode(mha, x[:, :6], (6,), cache, is_causal=True)
    kept = copy.deepcopy(cache)
    cache.reorder([1, 0, 2])
    decode(mha, torch.randn_like(x[:, 6:]), (3, 4), cache, is_causal=True)
    close(decode(mha, x[:, 6:], (3, 4), kept, is_causal=True), mha(x, x, x, is_causal=True)[0][:, 6:])


def test_reset_forgets() -> None:
    mha, x = module(), inputs()
    for cache in (StaticCache(L), RollingCache(L)):
        decode(mha, torch.full_like(x, float("nan")), (5, 8), cache, key_padding_mask=rows(PADDING))
        cache.reset()
        assert cache.length == 0
        close(decode(mha, x, (5, 8), cache, is_causal=True), mha(x, x, x, is_causal=True)[0])


def test_never_in_a_checkpoint() -> None:
    mha, x, cache = module(), inputs(), StaticCache(L)
    before, names = set(vars(mha)), list(mha.state_dict())
    mha(x, x, x, cache=cache)
    assert set(vars(mha)) == before
    assert list(mha.state_dict()) == names
    for other in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        close(other(x, x, x)[0], mha(x, x, x)[0])
        loaded = pickle.loads(pickle.dumps(cache))  # of nobody yet
        loaded.reset()
        close(other(x, x, x, cache=loaded)[0], mha(x, x, x)[0])


def test_inference_mode_and_no_grad_mix() -> None:
    mha, x, memory = module(), inputs(), torch.randn(B, 7, D, dtype=torch.float64)
    cache, cross = StaticCache(L), CrossCache()
    with torch.inference_mode():
        decode(mha, x[:, :6], (6,), cache, is_causal=True)
    close(decode(mha, x[:, 6:], (3, 4), cache, is_causal=True), mha(x, x, x, is_causal=True)[0][:, 6:])
    other = module()
    with torch.inference_mode():
        other(x, memory, memory, cache=cross)
    cross.reorder([0, 1, 2])
    close(other(x, memory, memory, cache=cross)[0], other(x, memory, memory)[0])


def test_overflow_writes_nothing() -> None:
    mha, x, cache = module(), inputs(), StaticCache(10)
    decode(mha, x[:, :8], (8,), cache, is_causal=True)
    with pytest.raises(ValueError, match=r"larger max_length than 10.*asked for 3 more after 8 \(key \(3, 5, 3, 4\)\)"):
        mha(x[:, :3], x[:, :3], x[:, :3], cache=cache)
    assert cache.length == 8
    close(decode(mha, x[:, 8:10], (2,), cache, is_causal=True), mha(x, x, x, is_causal=True)[0][:, 8:10])
    with pytest.raises(ValueError, match="asked for 13 more after 0"):
        module()(x, x, x, cache=StaticCache(12))


def test_misuse_says_so() -> None:
    mha, x, cache = module(), inputs(), StaticCache(2 * L)
    mha(x, x, x, cache=cache)
    some = x[:, :2]
    with pytest.raises(ValueError, match="cache must be used by one attention alone; each layer needs its own"):
        module()(some, some, some, cache=cache)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"cache must be used under torch.no_grad\(\)"):
        mha(some, some, some, cache=cache)
    with pytest.raises(ValueError, match="cache must be a StaticCache, RollingCache or CrossCache; got dict"):
        mha(some, some, some, cache={})
    with pytest.raises(ValueError, match=r"StaticCache: key must fit what is cached, torch.float64 \(3, 5, \*, 4\)"):
        mha(some[:2], some[:2], some[:2], cache=cache)
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(B, S\) = \(3, 2\)"):
        mha(some, some, some, key_padding_mask=torch.zeros(B, L + 2, dtype=torch.bool), cache=cache)
    with pytest.raises(ValueError, match="key_padding_mask must be bool, True = padding, with a cache"):
        mha(some, some, some, key_padding_mask=torch.zeros(B, 2, dtype=torch.float64), cache=cache)
    nested = torch.nested.nested_tensor([x[0], x[1, :5]], layout=torch.jagged)
    with pytest.raises(ValueError, match="cache must be None with nested tensors"):
        mha(nested, nested, nested, cache=cache)
    with pytest.raises(ValueError, match=r"cache must hold something.*StaticCache\(max_length=3, length=0\)"):
        StaticCache(3).reorder([0])
    for wrong in ([0, 3], [-1], torch.tensor([0.5]), torch.zeros(1, 1, dtype=torch.long), "ab", None, {}, ["a"]):
        with pytest.raises(ValueError, match=r"StaticCache.reorder: indices must be integers in 0 .. 2"):
            cache.reorder(wrong)
    for kind, word in ((StaticCache, "max_length"), (RollingCache, "window")):
        for size in (0, -1, 2.0, None):
            with pytest.raises(ValueError, match=f"{kind.__name__}: {word} must be an int of at least 1"):
                kind(size)
    with pytest.raises(ValueError, match="key and value must be"):
        StaticCache(3).append(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"padding must be bool \(B, S\) = \(2, 1\) for the new keys"):
        StaticCache(3).append(*torch.zeros(2, 2, 3, 1, 4), padding=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="caches must be caches, at least one; got none"):
        CacheList([])
    with pytest.raises(ValueError, match="caches must be caches, at least one; got StaticCache, int"):
        CacheList([StaticCache(1), 1])
    with pytest.raises(ValueError, match="caches must be caches, at least one; got NoneType"):
        CacheList(None)


def test_a_tensor_mask_of_the_new_keys_alone_is_refused() -> None:
    mha, x = module(), inputs()
    for cache in (StaticCache(2 * L), RollingCache(WINDOW)):
        own, some = module(), x[:, :2]
        own(x, x, x, cache=cache)
        with pytest.raises(ValueError, match="attn_mask"):
            own(some, some, some, attn_mask=torch.zeros(2, 2, dtype=torch.bool), cache=cache)
    cache = RollingCache(WINDOW)
    mha(x, x, x, cache=cache)
    with pytest.raises(ValueError, match=r"attn_mask must be .*, L = 2, S = 15; got \(2, 5\)"):
        mha(x[:, :2], x[:, :2], x[:, :2], attn_mask=torch.zeros(2, 5, dtype=torch.bool), cache=cache)


def test_a_list_is_one_cache() -> None:
    caches = CacheList([StaticCache(9), CacheList([RollingCache(2), CrossCache()])])
    assert repr(caches) == (
        "CacheList(StaticCache(max_length=9, length=0), "
        "CacheList(RollingCache(window=2, length=0), CrossCache(length=0)))"
    )
    assert len(caches) == 2
    assert caches[1] is list(caches)[1]
    caches[0].append(*torch.randn(2, 1, 1, 3, 4))
    assert caches.length == 3
    caches.reset()
    assert caches.length == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "padded"),
    [(lambda: StaticCache(40), False), (lambda: StaticCache(40), True), (lambda: RollingCache(30), True)],
    ids=["static", "static, padded", "rolling, padded"],
)
def test_compiled_steps_are_not_compiled_for_each_length(make: Callable[[], Cache], padded: bool) -> None:
    mha, x, cache = module(), torch.randn(B, 30, D, dtype=torch.float64), make()
    padding = torch.zeros(B, 30, dtype=torch.bool)
    padding[1, :3] = padded

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(token: Tensor, cache: Cache) -> Tensor:
        return mha(token, token, token, need_weights=False, is_causal=True, cache=cache)[0]

    want = mha(x, x, x, is_causal=True, key_padding_mask=padding)[0]
    out = [mha(*[x[:, :5]] * 3, is_causal=True, key_padding_mask=padding[:, :5] if padded else None, cache=cache)[0]]
    tokens = x[:, 5:].split(1, 1)
    out += [step(token, cache) for token in tokens[:2]]  # the second length makes a symbol of it
    with torch._dynamo.config.patch(error_on_recompile=True):
        out += [step(token, cache) for token in tokens[2:]]
    close(torch.cat(out, 1), want)


@pytest.mark.slow
def test_compiled_overflow_is_never_silent() -> None:
    mha, x, cache = module(), inputs(), StaticCache(4)
    step = torch.compile(lambda x: mha(x, x, x, need_weights=False, cache=cache)[0], backend="eager")
    for token in x[:, :4].split(1, 1):
        step(token)
    with pytest.raises(ValueError, match="have room for all positions; make one with a larger max_length than 4"):
        step(x[:, :1])
    assert cache.length == 4


@pytest.mark.slow
def test_compiled_from_the_first_call_on() -> None:
    mha, x, cache, cross = module(), inputs(), StaticCache(L), CrossCache()
    memory = torch.randn(B, 7, D, dtype=torch.float64)
    other = module()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(some: Tensor) -> Tensor:
        y = mha(some, some, some, need_weights=False, is_causal=True, cache=cache)[0]
        return other(y, memory, memory, need_weights=False, cache=cross)[0]

    want = other(mha(x, x, x, is_causal=True)[0], memory, memory)[0]
    close(torch.cat([step(some) for some in x.split((5, 1, 1, 1, 5), 1)], 1), want)


@pytest.mark.parametrize("make", [lambda: StaticCache(16), lambda: RollingCache(8)], ids=["static", "rolling"])
def test_copied_and_reordered_in_inference_mode_and_used_outside_of_it(make: Any) -> None:
    """Tensors that are made there can be written to nowhere else; a prompt's cache is often copied there."""
    own = module(dtype=torch.float32)
    x = torch.randn(2, 7, D)
    want = own(x, x, x, is_causal=True, mask=masks.window(7, 0), need_weights=False)[0]
    with torch.inference_mode():
        cache = make()
        own(*[x[:, :5]] * 3, is_causal=True, cache=cache)
        cache.reorder([1, 0])
        copied = copy.deepcopy(cache)
    turned = x.flip(0)
    for one in (cache, copied):
        with torch.no_grad():
            for token in turned[:, 5:].split(1, dim=1):
                out, _ = own(token, token, token, is_causal=True, need_weights=False, cache=one)
        assert_close(out, want.flip(0)[:, -1:], rtol=1e-5, atol=1e-5)


def test_a_memory_with_nan_in_its_padding_is_recognised() -> None:
    own = module(dtype=torch.float32)
    memory, query = torch.randn(2, 7, D), torch.randn(2, 1, D)
    memory[1, 4:] = math.nan
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    cache = CrossCache()
    with torch.no_grad():
        first, _ = own(query, memory, memory, key_padding_mask=padding, need_weights=False, cache=cache)
        same = memory.clone()
        again, _ = own(query, same, same, key_padding_mask=padding, need_weights=False, cache=cache)
    assert_close(again, first)
