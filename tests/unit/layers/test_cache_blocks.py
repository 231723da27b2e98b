"""Decoding with the caches of blocks and stacks is the full forward, step by step; beams included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import (
    CacheList,
    CrossCache,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    RollingCache,
    StaticCache,
    TransformerEncoderLayer,
    masks,
)

B, L, S, D, H = 3, 11, 7, 20, 5
CHUNKS = [(1,) * L, (5, 1, 1, 1, 3), (2, 9)]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def encoder(**options: Any) -> Encoder:
    blocks = [EncoderBlock(D, H, **options) for _ in range(3)]
    return Encoder(blocks, nn.LayerNorm(D)).double().eval()


def decoder(**options: Any) -> Decoder:
    blocks = [DecoderBlock(D, H, **options) for _ in range(3)]
    return Decoder(blocks, nn.LayerNorm(D)).double().eval()


@pytest.mark.thin(2)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_language_model_step_by_step(window: int | None, norm_first: bool, chunks: tuple[int, ...]) -> None:
    model, x = encoder(norm_first=norm_first), torch.randn(B, L, D, dtype=torch.float64)
    padding = torch.arange(L) < torch.tensor([0, 4, 2])[:, None]
    cache = model.make_cache(L) if window is None else model.make_cache(window=window)
    mask = None if window is None else masks.window(window - 1, None)
    words: dict[str, Any] = {"is_causal": True, "need_weights": True}
    want, want_weights = model(x, padding, query_padding_mask=padding, mask=mask, **words)
    out = []
    for some, hidden in zip(x.split(chunks, 1), padding.split(chunks, 1), strict=True):
        got, weights = model(some, hidden, query_padding_mask=hidden, cache=cache, **words)
        out.append(got)
    close(torch.cat(out, 1), want)
    for its_weights, all_weights in zip(weights, want_weights, strict=True):
        close(its_weights, all_weights[:, -its_weights.shape[1] :, -its_weights.shape[2] :])
    assert cache.length == L


@pytest.mark.thin(2)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_decoder_step_by_step(window: int | None, norm_first: bool, chunks: tuple[int, ...]) -> None:
    model, x = decoder(norm_first=norm_first, memory_dim=9), torch.randn(B, L, D, dtype=torch.float64)
    memory = torch.randn(B, S, 9, dtype=torch.float64)
    hidden = torch.arange(S) >= torch.tensor([7, 3, 5])[:, None]
    cache = model.make_cache(max_length=L + 2) if window is None else model.make_cache(window=window)
    mask = None if window is None else masks.window(window - 1, None)
    words: dict[str, Any] = {"memory_key_padding_mask": hidden, "is_causal": True}
    want = model(x, memory, mask=mask, **words)
    close(torch.cat([model(some, memory, cache=cache, **words) for some in x.split(chunks, 1)], 1), want)
    assert cache.length == L


def test_beams_as_without_a_cache() -> None:
    """Beam search by whole sequences, and with a cache that is reordered: the same beams, scores and probabilities."""
    beams, vocabulary, steps = 4, 13, 9
    model, embedding, head = decoder(), nn.Embedding(vocabulary, D).double(), nn.Linear(D, vocabulary).double()
    source = torch.randn(B, S, D, dtype=torch.float64)
    hidden = torch.arange(S) >= torch.tensor([7, 3, 5])[:, None]
    rows = torch.arange(B).repeat_interleave(beams)
    memory, hidden = source[rows], hidden[rows]
    cache = model.make_cache(steps)
    cached, plain = (torch.zeros(B * beams, 1, dtype=torch.long) for _ in range(2))
    scores = torch.tensor([0.0] + [-1e9] * (beams - 1), dtype=torch.float64).repeat(B)[:, None]
    plain_scores = scores.clone()
    moved = False
    for _ in range(steps):
        words = {"memory_key_padding_mask": hidden, "is_causal": True}
        new = head(model(embedding(cached[:, -1:]), memory, cache=cache, **words)[:, -1]).log_softmax(-1)
        old = head(model(embedding(plain), memory, **words)[:, -1]).log_softmax(-1)
        close(new, old)
        chosen, cached, scores = best(scores + new, cached, beams)
        _, plain, plain_scores = best(plain_scores + old, plain, beams)
        cache.reorder(chosen)
        moved = moved or not torch.equal(chosen, torch.arange(B * beams))
        assert torch.equal(cached, plain)
        close(scores, plain_scores)
    assert moved
    assert cache.length == steps


def best(scores: Tensor, tokens: Tensor, beams: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which beams go on, with which tokens and scores."""
    vocabulary = scores.shape[1]
    top, places = scores.view(-1, beams * vocabulary).topk(beams)
    offset = torch.arange(0, len(scores), beams)[:, None]
    chosen = (places // vocabulary + offset).flatten()
    return chosen, torch.cat([tokens[chosen], (places % vocabulary).view(-1, 1)], 1), top.view(-1, 1)


def test_one_prompt_for_many_answers() -> None:
    model, x = encoder(), torch.randn(1, L, D, dtype=torch.float64)
    answers = torch.randn(4, 3, D, dtype=torch.float64)
    cache = model.make_cache(L + 3)
    model(x, is_causal=True, cache=cache)
    cache.reorder([0] * 4)
    want = model(torch.cat([x.expand(4, L, D), answers], 1), is_causal=True)[:, L:]
    close(torch.cat([model(token, is_causal=True, cache=cache) for token in answers.split(1, 1)], 1), want)


def test_a_shared_block_has_a_cache_in_each_place() -> None:
    block = EncoderBlock(D, H).double()
    model, x = Encoder([block, block]), torch.randn(B, L, D, dtype=torch.float64)
    cache = model.make_cache(L)
    close(torch.cat([model(some, is_causal=True, cache=cache) for some in x.split(4, 1)], 1), model(x, is_causal=True))


def test_overflow_leaves_every_layer_as_it_was() -> None:
    model, x = encoder(), torch.randn(B, L, D, dtype=torch.float64)
    cache = model.make_cache(L)
    model(x[:, :8], is_causal=True, cache=cache)
    with pytest.raises(ValueError, match=r"larger max_length than 11, or reset\(\) it; got asked for 4 more after 8"):
        model(x[:, :4], is_causal=True, cache=cache)
    assert [its.length for its in cache] == [8, 8, 8]
    close(model(x[:, 8:], is_causal=True, cache=cache), model(x, is_causal=True)[:, 8:])


def test_what_make_cache_makes() -> None:
    assert repr(EncoderBlock(D, H).make_cache(5)) == repr(StaticCache(5))
    assert repr(DecoderBlock(D, H).make_cache(window=5)) == repr(CacheList([RollingCache(5), CrossCache()]))
    assert repr(encoder().make_cache(5)) == repr(CacheList([StaticCache(5)] * 3))
    assert repr(decoder().make_cache(5)) == repr(CacheList([CacheList([StaticCache(5), CrossCache()])] * 3))


def test_misuse_says_so() -> None:
    x, memory = torch.randn(B, L, D, dtype=torch.float64), torch.randn(B, S, D, dtype=torch.float64)
    for made in (EncoderBlock(D, H), DecoderBlock(D, H)):
        for sizes in ({}, {"max_length": 3, "window": 3}):
            rule = rf"{type(made).__name__}\.make_cache: max_length or window must be given"
            with pytest.raises(ValueError, match=rule):
                made.make_cache(**sizes)
    with pytest.raises(ValueError, match="max_length must be an int of at least 1; got 0"):
        encoder().make_cache(0)
    block = EncoderBlock(D, attention=nn.MultiheadAttention(D, H, batch_first=True)).double()
    with pytest.raises(ValueError, match=r"cache must be None with a torch\.nn\.MultiheadAttention"):
        block(x, cache=StaticCache(L))
    with pytest.raises(ValueError, match="Encoder: cache must be a CacheList of 3; make_cache gives one"):
        encoder()(x, cache=StaticCache(L))
    with pytest.raises(ValueError, match="Decoder: cache must be a CacheList of 3"):
        decoder()(x, memory, cache=CacheList([StaticCache(L)]))
    with pytest.raises(ValueError, match="DecoderBlock: cache must be a CacheList of 2"):
        decoder().layers[0](x, memory, cache=StaticCache(L))
    with pytest.raises(ValueError, match="cache must be a StaticCache, RollingCache or CrossCache; got CacheList"):
        encoder().layers[0](x, cache=encoder().make_cache(L))
    with pytest.raises(ValueError, match=r"Encoder\.make_cache: layers must have make_cache.*TransformerEncoderLayer"):
        Encoder([TransformerEncoderLayer(D, H, batch_first=True)]).make_cache(L)
    own, other, cache = encoder(), encoder(), encoder().make_cache(2 * L)
    own(x, cache=cache)
    with pytest.raises(ValueError, match="cache must be used by one attention alone"):
        other(x, cache=cache)
