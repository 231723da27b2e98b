"""Attention tile by tile: what nobody sees is never computed, and what is kept for backward is linear in the length.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width.

One autograd function walks the tiles forward and again backward, where the scores of a tile are computed anew from the
log-sum-exp of its rows. Two kernels compute a tile: torch's fused one for the CPU, and `blockwise`, ours, for what
that one cannot do. Source: FlashAttention, arXiv 2205.14135 section 3 and appendix B.4; a sink as one more term of the
log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.core import blockwise
from headwise.core.algebra import Mask, lower, walk_tensors, with_learned
from headwise.core.lowering import NOTHING_HIDDEN, Band, Lowered, Size, Tile, Tiling, version
from headwise.core.twice import partial, private


class Call(NamedTuple):
    """What is asked of all tiles.

    Attributes:
        tiling: the tiles.
        scale: factor on the scores.
        options: of our kernel; None: torch's runs.
        again: gives the output by a formula that can be differentiated twice, from (query, key, value, sink, *learned).
    """

    tiling: Tiling
    scale: float
    options: blockwise.Options | None
    again: Callable[..., Tensor]


class Tiled(torch.autograd.Function):
    """`apply(query, key, value, sink, call, *learned)`: (B, H, L, K); V = K, and `learned` are tensors of the mask."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, call: Call, *learned: Tensor
    ) -> Tensor:
        out, lse = _fresh(query, call.tiling)
        for number, (run, mask) in enumerate(_runs_and_masks(call, query, key)):
            q, k, v = run.rows(query), run.columns(key), run.columns(value)
            part, its_lse = _forward(q, k, v, mask, run.tile.causal, call, number)
            if sink is not None:
                part, its_lse = _with_sink(part, its_lse, mask, sink)
            run.rows(out).copy_(part)
            run.rows(lse).copy_(its_lse)
        ctx.call, ctx.versions = call, (_versions(call.tiling.rest), _versions(call.tiling.whole))
        ctx.save_for_backward(query, key, value, sink, out, lse, *learned)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse, *learned = ctx.saved_tensors
        call: Call = ctx.call
        asked = [*ctx.needs_input_grad[:4], *ctx.needs_input_grad[5:]]
        again = torch.is_grad_enabled() or _is_batched(grad_out)  # by another formula, of all scores
        if ctx.versions[again] != _versions(call.tiling.whole if again else call.tiling.rest):
            raise RuntimeError(
                "attention: a mask was changed in place after the forward pass, and the backward pass reads it again; "
                "change a clone instead"
            )
        if again:
            if call.options is not None and call.options.dropout > 0:
                raise RuntimeError(
                    "attention: second derivatives and batches of gradients with dropout need the plain backend: "
                    "attention(..., backend='plain')"
                )
            grads = _differentiable(call, [query, key, value, sink, *learned], asked, grad_out)
            return (*grads[:4], None, *grads[4:])
        precise = _precise(query)
        grad_query, _ = _fresh(query, call.tiling)
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=precise) for tensor in (key, value))
        grad_learned = [torch.zeros_like(tensor) for tensor in learned]
        for number, (run, mask) in enumerate(_runs_and_masks(call, query, key)):
            given = (run.rows(grad_out), run.rows(query), run.columns(key), run.columns(value), run.rows(out))
            causal = run.tile.causal
            dq, dk, dv, dmask = _backward(*given, run.rows(lse), mask, causal, call, number, mask_grad=bool(learned))
            run.rows(grad_query).copy_(dq)
            run.add_columns(grad_key, dk)
            run.add_columns(grad_value, dv)
            if dmask is not None:
                parts = _of_learned(call, run.tile, _size(query, key), learned, dmask)
                for total, part in zip(grad_learned, parts, strict=True):
                    total += part
        grad_sink = None
        if sink is not None:
            delta = (grad_out * out).sum(dim=-1, dtype=precise)
            grad_sink = -(torch.exp(sink.to(precise)[None, :, None] - lse) * delta).sum(dim=(0, 2)).to(sink.dtype)
        return (grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sink, None, *grad_learned)


def _fresh(query: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Memory for the output, laid out as the projection after it wants it, and for the log-sum-exp."""
    B, H, L, K = query.shape
    places = [tile.place for tile in tiling.tiles]
    covered = sum((last - first) * (high - low) for (first, last), (low, high), _ in places)
    out = query.new_empty_strided((B, H, L, K), (L * H * K, K, H * K, 1))  # no view, which autograd would guard
    lse = query.new_empty(B, H, L, dtype=_precise(query))
    return (out, lse) if covered == B * L else (out.zero_(), lse.fill_(math.inf))  # no share of it is a sink's


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Run(NamedTuple):
    """Tiles of one shape and band, each as far behind the one before as it has rows: the batch of one call.

    Attributes:
        tile: the first.
        times: how many; 1 where a tile has several samples.
    """

    tile: Tile
    times: int

    def rows(self, tensor: Tensor) -> Tensor:
        """(n, H, l, *), a view of the queries' part of (B, H, L, *)."""
        (first, last), (low, high), _ = self.tile.place
        if self.times == 1:
            return tensor[first:last, :, low:high]
        length = high - low
        own = tensor[first, :, low : low + self.times * length]
        return own.view(own.shape[0], self.times, length, *own.shape[2:]).transpose(0, 1)

    def columns(self, tensor: Tensor) -> Tensor:
        """(n, G, s, K), a view of the keys' part of (B, G, S, K); parts may overlap."""
        (first, last), (low, high), (start, end) = self.tile.place
        if self.times == 1:
            return tensor[first:last, :, start:end]
        step = high - low
        whole = tensor[first, :, start : end + (self.times - 1) * step]
        return whole.unfold(1, end - start, step).permute(1, 0, 3, 2)

    def add_columns(self, tensor: Tensor, parts: Tensor) -> None:
        """Add such parts to the tensor, pieces that do not overlap at a time."""
        if self.times == 1:
            self.columns(tensor).add_(parts)
            return
        (first, _), (low, high), (start, end) = self.tile.place
        step, own = high - low, tensor[first]
        for offset in range(0, end - start, step):
            width = min(step, end - start - offset)
            strides = (step * own.stride(1), *own.stride())
            size = (self.times, own.shape[0], width, own.shape[2])
            place = own.storage_offset() + (start + offset) * own.stride(1)
            own.as_strided(size, strides, place).add_(parts[:, :, offset : offset + width])


def _runs_and_masks(call: Call, query: Tensor, key: Tensor) -> Iterator[tuple[_Run, Tensor | None]]:
    """The tiles, in runs where they are alike, and what is added to the scores of each."""
    size, dtype, rest = _size(query, key), _precise(query), call.tiling.rest
    tiles = call.tiling.tiles
    if call.scale <= 0 and call.options is None:  # torch's kernel masks before it scales: -inf * 0 is NaN
        tiles = tuple(tile._replace(causal=False, band=Band(None, 0)) if tile.causal else tile for tile in tiles)
    at = 0
    while at < len(tiles):
        tile = tiles[at]
        _, (low, high), (start, end) = tile.place
        most = max(1, _KEYS_OF_A_RUN // ((end - start) * max(1, key.shape[1] * key.shape[3])))
        times = 1 if rest is not None else _alike(tiles[at : at + most])
        mask = None if tile.band is None else _band_mask(tile.band, high - low, end - start, dtype)
        if rest is not None:
            mask = _with_rest(mask, rest, tile, size, query.dtype)
        yield _Run(tile, times), mask
        at += times


def _alike(tiles: Sequence[Tile]) -> int:
    """How many of the first tiles make a run."""
    (samples, (low, high), (start, end)), causal, band = tiles[0]
    if samples[1] - samples[0] != 1:
        return 1
    step = high - low
    for number, (place, its_flag, its_band) in enumerate(tiles):
        by = number * step
        if place != (samples, (low + by, high + by), (start + by, end + by)) or (its_flag, its_band) != (causal, band):
            return number
    return len(tiles)


def _size(query: Tensor, key: Tensor) -> Size:
    B, H, L, _ = query.shape
    return Size(B, H, L, key.shape[2], query.device)


def _band_mask(band: Band, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    if queries * keys > _KEPT:
        return _made_band_mask(band, queries, keys, dtype)
    return _kept_band_mask(band, queries, keys, dtype)


_KEPT = 2**18  # numbers of a mask that is kept for the next call: 64 of them are 64 MiB at most


def _made_band_mask(band: Band, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # it outlives the call
        keep = band.keep(queries, keys, torch.device("cpu"))
        return torch.zeros(keep.shape, dtype=dtype, device="cpu").masked_fill_(~keep, -math.inf)


_kept_band_mask = functools.lru_cache(maxsize=64)(_made_band_mask)


def _with_rest(mask: Tensor | None, rest: Mask, tile: Tile, size: Size, dtype: torch.dtype) -> Tensor | None:
    """What else is hidden and added in a tile, beside its band."""
    own = _size_of(tile, size)
    lowered = lower(rest.cut(tile.place, size), own, dtype)
    keep, bias = lowered.whole_keep(own), lowered.bias
    precise = torch.promote_types(dtype, torch.float32)
    if bias is None:
        if keep is None:
            return mask
        added = torch.zeros(keep.shape, dtype=precise, device=size.device)
    else:
        added = bias.detach().to(precise)
    for hidden in (None if keep is None else ~keep, None if mask is None else mask == -math.inf):
        if hidden is not None:
            added = added.masked_fill(hidden, -math.inf)
    return added if added.stride(-1) == 1 else added.contiguous()


def _size_of(tile: Tile, size: Size) -> Size:
    (first, last), (low, high), (start, end) = tile.place
    return Size(last - first, size.heads, high - low, end - start, size.device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: Call, number: int
) -> tuple[Tensor, Tensor]:
    if call.options is not None or _FUSED is None:
        assert call.options is not None
        return blockwise.forward(q, k, v, mask, causal, call.scale, _of_tile(call.options, number))
    out: tuple[Tensor, Tensor] = _FUSED(q, k, v, 0.0, causal, attn_mask=mask, scale=call.scale)
    return out


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    call: Call,
    number: int,
    *,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    scale = call.scale
    if call.options is not None or _FUSED_BACKWARD is None:
        assert call.options is not None
        options = _of_tile(call.options, number)
        return blockwise.backward(grad_out, q, k, v, out, lse, mask, causal, scale, options, mask_grad=mask_grad)
    dq, dk, dv = _FUSED_BACKWARD(grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv, None


def _of_tile(options: blockwise.Options, number: int) -> blockwise.Options:
    """Other random numbers for each tile."""
    return options._replace(seed=(options.seed + number * _GOLDEN) % 2**63)


def _with_sink(out: Tensor, lse: Tensor, mask: Tensor | None, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one more logit in each row, that has no value."""
    if mask is not None:
        lse = lse.masked_fill((mask == -math.inf).all(dim=-1), -math.inf)  # torch's kernel says 0 there
    total = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None])
    share = torch.exp(lse - total)
    dead = total == -math.inf
    return out * share.masked_fill(dead, 0.0)[..., None].to(out.dtype), total.masked_fill(dead, 0.0)


def _of_learned(call: Call, tile: Tile, size: Size, learned: Sequence[Tensor], grad_mask: Tensor) -> Sequence[Tensor]:
    """Gradients of the mask's tensors from that of what they add to a tile."""
    assert call.tiling.rest is not None
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in learned]
        score = lower(with_learned(call.tiling.rest, leaves).cut(tile.place, size), _size_of(tile, size)).bias
    assert score is not None
    return torch.autograd.grad(score, leaves, grad_mask.sum_to_size(score.shape).to(score.dtype))


def _differentiable(
    call: Call, inputs: Sequence[Tensor | None], asked: Sequence[bool], grad_out: Tensor
) -> list[Tensor | None]:
    """The gradients by operations that can be differentiated again, and that vmap has rules for.

    Of aliases: the inputs may depend on each other, and only partial derivatives are wanted.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        out = call.again(*aliases)
    if not out.requires_grad:  # nothing is seen: zeros that hang on the inputs all the same
        everywhere = torch.ones((), dtype=torch.bool, device=grad_out.device)
        return [
            alias.masked_fill(everywhere, 0.0) if was and alias is not None else None
            for alias, was in zip(aliases, asked, strict=True)
        ]
    return partial(out, aliases, asked, grad_out, create_graph=create_graph)


def widened(tensor: Tensor, width: int) -> Tensor:
    """The tensor with zeros behind its last column, which change no product; side by side in memory."""
    if tensor.shape[-1] < width:
        tensor = torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def again(
    plain: Callable[..., Tensor],
    scale: float,
    options: blockwise.Options | None,
    tiling: Tiling,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    *learned_: Tensor,
) -> Tensor:
    """The output by the plain formula, tile by tile: all scores of a packed row would be B times as many."""
    B, H, L, _ = query.shape
    size = Size(B, H, L, key.shape[-2], query.device)
    rest, softcap = tiling.rest, None if options is None else options.softcap
    if learned_ and rest is not None:
        rest = with_learned(rest, learned_)
    out = query.new_zeros(B, H, L, value.shape[-1])
    for tile in tiling.tiles:
        samples, queries, keys = (slice(*bounds) for bounds in tile.place)
        q, k, v = query[samples, :, queries], key[samples, :, keys], value[samples, :, keys]
        own = Size(q.shape[0], H, q.shape[2], k.shape[2], query.device)
        mask = NOTHING_HIDDEN if rest is None else lower(rest.cut(tile.place, size), own, query.dtype)
        band = Band(None, 0) if tile.causal else tile.band
        if band is not None:
            seen, keep = band.keep(own.queries, own.keys, query.device), mask.whole_keep(own)
            mask = Lowered(keep=seen if keep is None else keep & seen, bias=mask.bias)
        out[samples, :, queries] = plain(q, k, v, mask, scale, softcap, sink)
    return out


def _versions(mask: Mask | None) -> list[int]:
    """How often the tensors of a mask have been written to."""
    tensors = () if mask is None else walk_tensors(mask)
    return [version(tensor) for tensor in tensors]


def _is_batched(tensor: Tensor) -> bool:
    """Whether vmap computes many of it at once (`is_grads_batched`), which nothing that writes to tensors allows."""
    return any(kind(tensor) for kind in _BATCHED)


_BATCHED = [private(torch._C._functorch, name, False) for name in ("is_batchedtensor", "is_legacy_batchedtensor")]
_GOLDEN = 0x9E3779B97F4A7C15
_KEYS_OF_A_RUN = 2**22  # numbers of keys that overlapping tiles have between them in one call: 16 MiB
_NAME = "_scaled_dot_product_flash_attention_for_cpu"  # private: None in a release that lacks them
_FUSED: Callable[..., Any] | None = getattr(torch.ops.aten, _NAME, None)
_FUSED_BACKWARD: Callable[..., Any] | None = getattr(torch.ops.aten, _NAME + "_backward", None)
HAS_FUSED = _FUSED is not None and _FUSED_BACKWARD is not None
