"""What attention does, from queries, keys and a mask alone: statistics of its rows, and maps of any length.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width, R rows that are
asked for, n and m cells of a map.

Nothing of size L x S exists: rows are worked off in blocks of one head, of the keys that the mask lets them reach.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise._checks import invalid, positive
from headwise.core.algebra import Mask, lower, terms
from headwise.core.backends import Request, one_head, scores
from headwise.core.functional import check_request, places_of, runs_of
from headwise.core.lowering import Band, Lowered, Rectangle, Size
from headwise.core.traits import in_rows

__all__ = ["AttentionStatistics", "PooledWeights", "attention_statistics", "pooled_attention_weights"]

_BLOCK = 2**18  # scores held at a time
_LOWEST = -1e38  # stands for the score of a hidden key; twice as much is still finite in float32
BARELY = -1e4  # a bias that low is somebody's way to hide a key: -10,000, or the lowest number of a dtype


class AttentionStatistics(NamedTuple):
    """Statistics of rows, each (B, H, R), in float32, or float64 of float64 queries. A row is what one query attends.

    Where a row sees no key, all but `visible` and `nonfinite` are NaN; likewise where its scores are not finite.

    Attributes:
        visible: the keys that the row may see, a whole number. 0: the row is fully masked.
        nonfinite: bool, a NaN or +inf among the scores of visible keys, or nothing but -inf.
        entropy: of the weights of its keys, in nats, 0 .. log(visible). A learned sink is left out: the weights of keys
            are taken to sum to 1.
        entropy_ratio: entropy / log(visible), 0 (one key) to 1 (all alike); NaN where one key is all there is.
        effective_keys: exp(entropy), the number of keys that as many nats would be spread over, 1 .. visible.
        max_logit: the greatest score, scaled, capped and biased.
        peak: the greatest weight.
        sink: the weight of the first visible key and the few behind it, and of a learned sink.
        distance: the mean of |key position - query position|, in positions.
        spread: the standard deviation of the key position, in positions.
    """

    visible: Tensor
    nonfinite: Tensor
    entropy: Tensor
    entropy_ratio: Tensor
    effective_keys: Tensor
    max_logit: Tensor
    peak: Tensor
    sink: Tensor
    distance: Tensor
    spread: Tensor


class PooledWeights(NamedTuple):
    """Weights in cells of neighbouring queries and keys.

    Attributes:
        mass: (B, H, n, m): summed over the keys of a cell, averaged over those of its queries that see a key. A row
            sums to what its queries' weights do: 1, less with a learned sink, 0 where none of them sees a key.
        peak: (B, H, n, m): the greatest single weight in the cell. It keeps a column or a diagonal that mass thins out.
        queries_a_cell: the last cell may have fewer.
        keys_a_cell: likewise.
    """

    mass: Tensor
    peak: Tensor
    queries_a_cell: int
    keys_a_cell: int


@torch.no_grad()
def attention_statistics(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    rows: int | Sequence[int] | Tensor | None = None,
    first_keys: int = 4,
    offset: int = 0,
) -> AttentionStatistics:
    """Statistics of the weights that `headwise.attention_weights` would return for the same arguments.

    Args:
        query: (B, H, L, K).
        key: (B, G, S, K), H % G == 0.
        mask: as in `headwise.attention`. A bias of -10,000 or less counts as hidden.
        scale: as in `headwise.attention`.
        softcap: as in `headwise.attention`.
        sink: as in `headwise.attention`.
        rows: R query positions, or one, negative ones from the end. None: all.
        first_keys: how many keys `sink` counts, from the row's first visible one on.
        offset: query i stands at key position i + offset, for distances; with cached keys S - L.

    Returns:
        (B, H, R) each, without gradients. Products are in float32 at least, whatever the inputs.

    Raises:
        ValueError: as `headwise.attention`; a row that is no query position; `first_keys` below 1.

    Cost: 2*B*H*R*S*K FLOPs, less where the mask's bands leave out stretches of keys, and some MiB at a time.
    Source: entropy as a health signal, arXiv 2303.06296; the largest logit, arXiv 2507.20534; sinks, arXiv 2309.17453.

    Example:
        >>> import torch
        >>> from headwise import masks
        >>> from headwise.observe.probes import attention_statistics
        >>> x = torch.zeros(1, 1, 4, 8)
        >>> attention_statistics(x, x, mask=masks.causal()).effective_keys[0, 0].round()
        tensor([1., 2., 3., 4.])
    """
    given = check_request("attention_statistics", query, key, None, mask, scale, softcap, sink)
    positive("attention_statistics", "first_keys", first_keys)
    L = query.shape[2]
    places = list(range(L)) if rows is None else places_of("attention_statistics", rows, query)
    picked = given if rows is None else given._replace(query=query[:, :, places])
    by_rows = []
    for block in _blocks(picked, mask, places, L):
        at_R = block.rows + (offset - block.low)
        by_rows.append(_joined([_statistics(_softmax(part), at_R, first_keys) for _, part in block.parts], 1))
    return _joined(by_rows, 2)


@torch.no_grad()
def pooled_attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    cells: int | tuple[int, int] = 64,
) -> PooledWeights:
    """`headwise.attention_weights` in cells, for inputs whose weights are too many to hold or to look at.

    Args:
        query: (B, H, L, K).
        key: (B, G, S, K), H % G == 0.
        mask: as in `headwise.attention`.
        scale: as in `headwise.attention`.
        softcap: as in `headwise.attention`.
        sink: as in `headwise.attention`.
        cells: at most so many a side, or (n, m) at most. Cells are of equal sizes, but for the last.

    Returns:
        The maps, in float32, or float64 of float64 queries, without gradients. Rows whose scores are not finite count
        as rows that see nothing.

    Raises:
        ValueError: as `headwise.attention`; no query or no key; cells below 1.

    Cost: 2*B*H*L*S*K FLOPs, less where the mask's bands leave out stretches of keys, and some MiB beside the maps.

    Example:
        >>> import torch
        >>> from headwise.observe.probes import pooled_attention_weights
        >>> x = torch.zeros(1, 2, 1000, 8)
        >>> pooled_attention_weights(x, x, cells=2).mass[0, 0]
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    function = "pooled_attention_weights"
    given = check_request(function, query, key, None, mask, scale, softcap, sink)
    most_n, most_m = cells if isinstance(cells, tuple) and len(cells) == 2 else (cells, cells)
    for most in (most_n, most_m):
        positive(function, "cells", most)
    (B, H, L, _), S = query.shape, key.shape[2]
    if not L or not S:
        raise invalid(function, "query and key", "have a position each", (L, S), query=query, key=key)
    tall, wide = -(-L // most_n), -(-S // most_m)
    n, m = -(-L // tall), -(-S // wide)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    mass, peak = (torch.zeros(B, H, n, m, dtype=dtype, device=query.device) for _ in range(2))
    seen = torch.zeros(B, H, n, 1, dtype=dtype, device=query.device)
    for block in _blocks(given, mask, list(range(L)), L, wide):
        first, last = int(block.rows[0]), int(block.rows[-1]) + 1
        for heads, part in block.parts:
            weight, dead = _weights(_softmax(part))
            weight = in_cells(weight, wide)
            columns = slice(block.low // wide, block.low // wide + weight.shape[-2])
            sums, peaks = weight.sum(dim=-1), weight.amax(dim=-1)
            for cell in range(first // tall, -(-last // tall)):
                rows = slice(max(first, cell * tall) - first, min(last, (cell + 1) * tall) - first)
                mass[:, heads, cell, columns] += sums[:, :, rows].sum(dim=2)
                peak[:, heads, cell, columns] = peak[:, heads, cell, columns].maximum(peaks[:, :, rows].amax(dim=2))
                seen[:, heads, cell, 0] += (~dead[:, :, rows]).sum(dim=2)
    return PooledWeights(mass / seen.clamp(min=1), peak, tall, wide)


def in_cells(weight: Tensor, wide: int) -> Tensor:
    """(.., m, wide) of (.., S), zeros behind the last."""
    padded = F.pad(weight, (0, -weight.shape[-1] % wide))
    return padded.view(*weight.shape[:-1], -1, wide)


# --- A look, in two steps -------------------------------------------------------------------------------------------


class Begun(NamedTuple):
    """A look whose scores are computed; it holds nothing of the model's.

    Attributes:
        scored: of the rows that are looked at, and a stretch of keys.
        at_R: where the queries stand, counted from the first key of the stretch.
    """

    scored: _Scored
    at_R: Tensor


@torch.no_grad()
def begin_look(
    picked: Request, mask: Mask | None, places: list[int], size: Size, keys: tuple[int, int], offset: int = 0
) -> Begun:
    """The first step of a look at some rows of one sample.

    Args:
        picked: queries (1, H, R, K) of these rows alone, and a stretch of keys; its own mask is not read.
        mask: of all rows and keys.
        places: R query positions.
        size: of all rows and keys.
        keys: from the first key of the stretch to behind the last.
        offset: query i stands at key position i + offset.
    """
    rows = torch.tensor(places, dtype=torch.int64, device=picked.query.device)
    request = picked._replace(mask=written(mask, size, rows, runs_of(places), keys))
    return Begun(_scored(request), rows + (offset - keys[0]))


@torch.no_grad()
def end_look(
    begun: Begun, *, first_keys: int = 4, cells: int = 64, real_keys: Tensor | None = None
) -> tuple[AttentionStatistics, Tensor, int]:
    """The second step.

    Args:
        begun: by `begin_look`, once.
        first_keys: as in `attention_statistics`.
        cells: of keys, at most so many.
        real_keys: int64, the keys of the stretch that are not padding. None: all.

    Returns:
        The statistics, (1, H, R) each, the mass of each cell (1, H, R, m), and the keys of a cell.
    """
    found = _shared(begun.scored)
    statistics = _statistics(found, begun.at_R, first_keys)
    weight, _ = _weights(found)
    if real_keys is not None:
        weight = weight.index_select(-1, real_keys)
    wide = max(1, -(-weight.shape[-1] // cells))
    return statistics, in_cells(weight, wide).sum(dim=-1), wide


# --- Blocks of rows -------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Some rows, with the keys that the mask lets them reach.

    Attributes:
        rows: (R,) int64, query positions.
        low: the first of these keys.
        parts: heads, and the request of these heads, rows and keys; all heads at once where that is little.
    """

    rows: Tensor
    low: int
    parts: Iterator[tuple[slice, Request]]


def _blocks(picked: Request, mask: Mask | None, places: list[int], length: int, align: int = 1) -> Iterator[_Block]:
    """All rows that are asked for, in their order; the first key is a multiple of `align`.

    The queries of `picked` are those of `places`, of `length` in all.
    """
    (B, H, _, _), S = picked.query.shape, picked.key.shape[2]
    reach = _reach(mask)
    step = max(1, _BLOCK // max(1, B * S))
    for begin in range(0, max(1, len(places)), step):
        some = places[begin : begin + step]
        first, last = (min(some), max(some) + 1) if some else (0, 0)
        low = 0 if reach.left is None or reach.first else max(0, min(first - reach.left, S))
        high = S if reach.right is None else max(0, min(max(last + reach.right, reach.first), S))
        low = low // align * align
        rows = torch.tensor(some, dtype=torch.int64, device=picked.query.device)
        query, key = picked.query[:, :, begin : begin + step], picked.key[:, :, low : max(low, high)]
        size, keys = Size(B, H, length, S, query.device), (low, max(low, high))
        lowered = written(mask, size, rows, runs_of(some), keys)
        request = picked._replace(query=query, key=key, value=key, mask=lowered)
        if B * H * len(some) * (high - low) <= _BLOCK:
            yield _Block(rows, low, iter([(slice(0, H), request)]))
        else:
            heads = range(H)
            yield _Block(rows, low, ((slice(at, at + 1), one_head(request, at, slice(None))) for at in heads))


def written(mask: Mask | None, size: Size, rows: Tensor, runs: list[tuple[int, int]], keys: tuple[int, int]) -> Lowered:
    """The mask of some rows and a stretch of keys, as tensors; `size` is of the whole, `runs` are the rows again."""
    if mask is None:
        return Lowered()
    if len(runs) == 1:
        return _of_run(mask, size, runs[0], keys)
    keep, bias = None, None  # a turn for each of many short runs would cost more than the scores
    for term in terms(mask):
        band = term.band()
        if band is not None:
            seen = None if band == Band() else band.between(rows, torch.arange(*keys, device=rows.device))
            part = Lowered(keep=seen)
        elif in_rows(term):
            part = Lowered(keep=_picked(term.keep(size), rows, keys), bias=_picked(term.score(size), rows, keys))
        else:
            parts = [_of_run(term, size, run, keys) for run in runs]
            heights = [last - first for first, last in runs]
            part = Lowered(
                keep=_one([each.keep for each in parts], heights), bias=_one([each.bias for each in parts], heights)
            )
        if part.keep is not None:
            keep = part.keep if keep is None else keep & part.keep
        if part.bias is not None:
            bias = part.bias if bias is None else bias + part.bias
    return Lowered(keep=keep, bias=bias)


def _of_run(mask: Mask, size: Size, run: tuple[int, int], keys: tuple[int, int]) -> Lowered:
    part = size._replace(queries=run[1] - run[0], keys=keys[1] - keys[0])
    lowered = lower(mask.cut(Rectangle((0, size.batch), run, keys), size), part)
    return Lowered(keep=lowered.whole_keep(part), bias=lowered.bias)


def _picked(whole: Tensor | None, rows: Tensor, keys: tuple[int, int]) -> Tensor | None:
    if whole is None:
        return None
    if whole.shape[2] > 1:
        whole = whole.index_select(2, rows)
    return whole[..., slice(*keys)] if whole.shape[3] > 1 else whole


def _one(parts: list[Tensor | None], heights: list[int]) -> Tensor | None:
    """Parts of a mask under each other, each of which broadcasts to its height; None says nothing."""
    given = [part for part in parts if part is not None]
    if not given or len(parts) == 1:
        return given[0] if given else None
    if all(part.shape[2] == 1 for part in given) and len({id(part) for part in given}) == 1:
        return given[0]
    B, H, S = (max(part.shape[dim] for part in given) for dim in (0, 1, 3))
    neutral = given[0].new_ones(1, 1, 1, 1) if given[0].dtype == torch.bool else given[0].new_zeros(1, 1, 1, 1)
    rows = [neutral if part is None else part for part in parts]
    return torch.cat([part.expand(B, H, height, S) for part, height in zip(rows, heights, strict=True)], dim=2)


def _reach(mask: Mask | None) -> Band:
    """A stretch of keys for each query beyond which the mask shows nothing."""
    bands = [band for band in (term.band() for term in ([] if mask is None else terms(mask))) if band is not None]
    return functools.reduce(lambda met, band: met.meet(band) or met, bands, Band())


# --- Softmax and what follows from it -------------------------------------------------------------------------------


class _Softmax(NamedTuple):
    """What the softmax of rows is made of.

    Attributes:
        below: (B, H, R, S) each score less the greatest one of its row; -1e38 or so where hidden, NaN where not finite.
        share: exp of that.
        total: (B, H, R) their sum over keys.
        kept: (B, H, R) the part of a row's weight that its keys have beside a learned sink; None: all.
        top: (B, H, R) the greatest score.
        visible: (B, H, R) keys.
        nonfinite: (B, H, R) bool.
        hidden: broadcastable to (B, H, R, S), or None.
    """

    below: Tensor
    share: Tensor
    total: Tensor
    kept: Tensor | None
    top: Tensor
    visible: Tensor
    nonfinite: Tensor
    hidden: Tensor | None


class _Scored(NamedTuple):
    """Scores of rows.

    Attributes:
        score: (B, H, R, S), -1e38 where hidden.
        hidden: broadcastable to it, or None.
        sink: (H,) or None.
    """

    score: Tensor
    hidden: Tensor | None
    sink: Tensor | None


def _softmax(request: Request) -> _Softmax:
    return _shared(_scored(request))


def _scored(request: Request) -> _Scored:
    score, hidden = scores(request)
    if request.mask.bias is not None:
        low = request.mask.bias <= BARELY
        hidden = low if hidden is None else hidden | low
    if hidden is not None:
        score.masked_fill_(hidden, _LOWEST)  # finite: its share is 0, and 0 times it is 0, not NaN
    return _Scored(score, hidden, request.sink)


def _shared(scored: _Scored) -> _Softmax:
    """Overwrites the scores."""
    score, hidden, sink = scored
    B, H, R, S = score.shape
    if hidden is None:
        count = score.new_full((), S).expand(B, H, R)
    else:
        count = (~hidden).expand(-1, -1, -1, S).sum(dim=-1, dtype=score.dtype).expand(B, H, R)
    top = score.amax(dim=-1) if S else score.new_full((B, H, R), _LOWEST)
    nonfinite = ~(top.abs() < -_LOWEST) & (count > 0)  # NaN, +inf, or nothing but -inf
    below = score.sub_(top[..., None])
    share = below.exp()
    total, kept = share.sum(dim=-1), None
    if sink is not None:
        kept = torch.sigmoid(total.log() + top - sink.to(score.dtype)[:, None])
    return _Softmax(below, share, total, kept, top, count, nonfinite, hidden)


def _weights(found: _Softmax) -> tuple[Tensor, Tensor]:
    """Weights (B, H, R, S), in the memory of the shares, and which rows have none (B, H, R)."""
    dead = found.nonfinite | (found.visible == 0)
    unit = found.total.reciprocal() if found.kept is None else found.kept / found.total
    return found.share.mul_(unit[..., None]).masked_fill_(dead[..., None], 0), dead


def _statistics(found: _Softmax, at_R: Tensor, first_keys: int) -> AttentionStatistics:
    """`at_R` is where each query stands, counted from the first key of the softmax. Overwrites `below`."""
    below, share, total, kept, top, count, nonfinite, hidden = found
    S = share.shape[-1]
    entropy = total.log() - below.mul_(share).sum(dim=-1) / total
    entropy = entropy.clamp(min=0).minimum(count.log())
    if hidden is None or not S:
        early = share[..., :first_keys].sum(dim=-1)
    else:
        begin = (~hidden).expand(-1, -1, -1, S).to(torch.uint8).argmax(dim=-1, keepdim=True)  # the first of equals
        place = begin + torch.arange(first_keys, device=begin.device)
        few = share.gather(-1, place.clamp(max=S - 1).expand(*share.shape[:3], -1))
        early = few.masked_fill(place >= S, 0).sum(dim=-1)
    peak, early = total.reciprocal(), early / total
    if kept is not None:
        peak, early = kept * peak, 1 - kept * (1 - early)
    key = torch.arange(S, device=share.device, dtype=share.dtype)
    mean = (share @ key) / total
    away = (key - at_R[:, None].to(share.dtype)).abs_()
    distance = torch.mul(share, away, out=below).sum(dim=-1) / total
    off = torch.sub(key, mean[..., None], out=below).square_()
    values: tuple[Tensor, ...] = (
        entropy,
        (entropy / count.log()).masked_fill(count == 1, math.nan),
        entropy.exp(),
        top,
        peak,
        early,
        distance,
        (off.mul_(share).sum(dim=-1) / total).sqrt(),
    )
    dead = nonfinite | (count == 0)
    if dead.device.type != "cpu" or dead.any():  # elsewhere to read is to wait
        values = tuple(value.masked_fill(dead, math.nan) for value in values)
    return AttentionStatistics(count, nonfinite, *values)


def _joined(parts: Sequence[AttentionStatistics], dim: int) -> AttentionStatistics:
    if len(parts) == 1:
        return parts[0]
    return AttentionStatistics(*(torch.cat(each, dim=dim) for each in zip(*parts, strict=True)))
