"""What masks say in fewer words: the causal flag, lengths, and the parts of the scores that anybody sees.

Letters: B batch, L query positions, S key positions.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core.algebra import Documents, Given, Mask, is_flag, terms
from headwise.core.lowering import Band, Rectangle, Size, Tile, Tiling
from headwise.core.masks import causal
from headwise.core.traits import per_key

_ALL = Band()
_FLAG = Band(None, 0)


class Sequences(Mask):
    """What `documents` says of sequences that lie one after the other, given by their lengths, and a band in each."""

    def __init__(self, queries: tuple[int, ...], keys: tuple[int, ...], own: Band = _ALL) -> None:
        self.queries, self.keys, self.own = queries, keys, own
        self.extent = (1, 1, sum(queries), sum(keys))

    def pieces(self, size: Size) -> list[tuple[Rectangle, Band]]:
        """Where each sequence is, and what is seen of it."""
        for name, lengths, length in (("queries", self.queries, size.queries), ("keys", self.keys, size.keys)):
            if sum(lengths) != length:
                raise invalid("sequences", name, f"add up to {length} for these scores", sum(lengths))
        found, row, column = [], 0, 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            place = Rectangle((0, size.batch), (row, row + queries), (column, column + keys))
            found.append((place, self.own))
            row, column = row + queries, column + keys
        return found

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(L,) and (S,) the position of each query and key in its own sequence."""
        found = []
        for each in (self.queries, self.keys):
            lengths = torch.tensor(each, dtype=torch.int64, device=device)
            before = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=sum(each))
            found.append(torch.arange(sum(each), device=device) - before)
        return found[0], found[1]

    def keep(self, size: Size) -> Tensor | None:
        keep = torch.zeros(1, 1, sum(self.queries), sum(self.keys), dtype=torch.bool, device=size.device)
        for place, own in self.pieces(size):
            (start, end), (low, high) = place.queries, place.keys
            keep[..., start:end, low:high] = own.keep(end - start, high - low, size.device)
        return keep

    def _arguments(self) -> str:
        return f"{list(self.queries)}"


def sequences(queries: Sequence[int], keys: Sequence[int] | None = None, own: Band = _ALL) -> Mask:
    """Sequences one after the other in a single row: `documents` for lengths that are known.

    Args:
        queries: of each sequence.
        keys: of each sequence. None: as queries.
        own: which keys of its sequence a query sees, counted from the beginning of the sequence.
    """
    return Sequences(tuple(queries), tuple(queries if keys is None else keys), own)


def joined(masks: Sequence[Mask]) -> Mask | None:
    """All of them at once, the opposite of `terms`; None: nothing is hidden."""
    return functools.reduce(operator.and_, masks) if masks else None


def as_band(mask: Mask | None) -> Band | None:
    """The mask as a stretch of keys for each query, if it says no more."""
    band = _ALL
    for term in [] if mask is None else terms(mask):
        own = term.band()
        met = None if own is None else band.meet(own)
        if met is None:
            return None
        band = met
    return band


def as_sequences(mask: Mask) -> Sequences | None:
    """The mask as sequences and the band in each, if it says no more."""
    rows = [term for term in terms(mask) if isinstance(term, Sequences)]
    others = [term for term in terms(mask) if not isinstance(term, Sequences)]
    band = as_band(joined(others))
    if len(rows) != 1 or band is None:
        return None
    [found] = rows
    if band == _ALL:
        return found
    own = found.own.meet(band)  # a band of the row means the same in each sequence where all are as long
    return None if own is None or found.queries != found.keys else Sequences(found.queries, found.keys, own)


def with_flag(mask: Mask, size: Size) -> Mask:
    """The same mask, with `causal()` in the place of a tensor that says just that. Reads the tensor's numbers.

    A kernel skips half of the work for the flag, and has a tensor to read else. Where the flag is there already, a
    tensor that hides nothing but the future is left out.
    """
    parts, flag, found = [], any(map(is_flag, terms(mask))), False
    for term in terms(mask):
        # of a single query it may be padding, whose keys are silenced
        if isinstance(term, Given) and not per_key(term) and _says_causal(term, size, flag):
            found = True
        else:
            parts.append(term)
    if not found:
        return mask
    whole = joined(parts if flag else [causal(), *parts])
    assert whole is not None  # the flag at least
    return whole


def _says_causal(term: Given, size: Size, flag: bool) -> bool:
    """Whether it hides the future and nothing else; with the flag beside it, whether it hides nothing else."""
    keep, score = term.keep(size), term.score(size)
    tensor = keep if score is None else score
    if tensor is None or tensor.shape != (1, 1, size.queries, size.keys) or tensor.requires_grad:
        return False
    if tensor.numel() == 0:
        return False
    tensor_LS = tensor[0, 0]
    hidden = False if score is None else -math.inf
    if tensor_LS[-1, 0] == hidden or not (flag or tensor_LS[0, -1] == hidden):
        return False  # one cheap look settles most masks
    if score is None:
        past = torch.ones_like(tensor_LS).tril_()
        return torch.equal(tensor_LS.tril() if flag else tensor_LS, past)
    if flag:
        return not tensor_LS.tril().any()
    return torch.equal(tensor_LS, torch.full_like(tensor_LS, -math.inf).triu_(1))


def find_tiling(mask: Mask | None, size: Size, pair: float, turn: float) -> Tiling:
    """The parts of the scores that anybody sees, cut so that little else is computed. Reads the numbers of lengths.

    Args:
        mask: what is hidden and added. Stretches of keys for each query (`causal`, `window`, prefixes), padding that
            leaves one stretch of keys, and documents in one piece each are cut out; all else is left in `rest`.
        size: of the scores.
        pair: FLOPs of a query and a key, in all heads of a sample.
        turn: FLOPs that take as long as it takes to begin a tile.
    """
    band, pieces, rest = _ALL, None, []
    for term in [] if mask is None else terms(mask):
        own = term.band()
        met = None if own is None else band.meet(own)
        if met is not None:
            band = met
            continue
        found = _pieces(term, size) if pieces is None else None
        if found is None:
            rest.append(term)
        else:
            pieces = found
    if pieces is None:
        pieces = [(Rectangle((0, size.batch), (0, size.queries), (0, size.keys)), _ALL)]
    tiles: list[Tile] = []
    for place, own in pieces:
        (first, last), (row, below), (column, behind) = place
        if first == last or pair == 0:
            continue  # no samples, no heads
        seen = own.meet(band.seen_from(row, column))
        if seen is None:
            return find_tiling(None, size, pair, turn)._replace(rest=mask, whole=mask)
        price = round(turn / (pair * (last - first)))
        for tile in _cut(below - row, behind - column, seen, price):
            (low, high), (start, end) = tile.place[1:]
            moved = Rectangle(place.samples, (row + low, row + high), (column + start, column + end))
            tiles.append(tile._replace(place=moved))
    if not all(map(per_key, rest)):  # its tensor is made tile by tile: of a few MiB each
        tiles = [part for tile in tiles for part in _in_rows(tile, size.heads)]
    return Tiling(tuple(tiles), joined(rest), mask)


def tiles_each_sample(mask: Mask | None) -> bool:
    """Whether `find_tiling` would find a tile or more for each sample that sees a key. Reads no numbers."""
    others = [term for term in ([] if mask is None else terms(mask)) if not is_flag(term)]
    return any(term.extent[0] > 1 for term in others) and all(term.band() is None for term in others)


_NUMBERS = 2**20  # of the mask of a tile
_ROWS = 64  # that a tile has at least


def _in_rows(tile: Tile, heads: int) -> list[Tile]:
    """The tile, cut into some queries each where its scores are many."""
    samples, (low, high), (start, end) = tile.place
    rows = max(_ROWS, _NUMBERS // max(1, (samples[1] - samples[0]) * heads * (end - start)))
    if rows >= high - low:
        return [tile]
    band, found = _FLAG if tile.causal else tile.band or _ALL, []
    for first in range(low, high, rows):
        last = min(first + rows, high)
        behind = min(end, start + last - low) if tile.causal else end
        own = band.seen_from(first - low, 0).within(last - first, behind - start)
        place = Rectangle(samples, (first, last), (start, behind))
        found.append(Tile(place, band=None if own == _ALL else own))
    return found


@functools.lru_cache(maxsize=1024)
def _cut(queries: int, keys: int, band: Band, price: int) -> tuple[Tile, ...]:
    """The tiles of one sequence. `price` is what a tile costs beside its pairs, in pairs."""
    band = band.within(queries, keys)
    if not queries or not keys:
        return ()
    if band == _ALL:
        return (Tile(Rectangle((0, 1), (0, queries), (0, keys))),)
    if band == _FLAG:  # the kernel's own flag is quicker than what cuts would save
        return (Tile(Rectangle((0, 1), (0, queries), (0, min(queries, keys))), causal=True),)
    # more queries see more keys that others do not: what they cost grows as the square, and a tile costs the price
    rows = int(2 ** min(10, max(6, round(math.log2(max(1, price)) / 2))))
    if band.left is None:  # here each tile adds to the gradients of nearly all keys
        rows = max(2 * rows, min(keys // 16 // 64 * 64, 2 * _NUMBERS // keys))  # a tile's mask is some MiB
    starts = [*range(0, queries, rows), queries]
    if band.first and band.left is None and band.right is not None:  # the queries that see the prefix and no more
        alike = min(queries, max(0, band.first - band.right - 1))
        starts = [0, *range(alike, queries, rows), queries]
    tiles = []
    for low, high in itertools.pairwise(starts):
        start = 0 if band.left is None else max(0, low - band.left)
        end = keys if band.right is None else min(keys, max(high + band.right, band.first))
        if low < high and start < end:
            own = band.seen_from(low, start).within(high - low, end - start)
            tiles.append(Tile(Rectangle((0, 1), (low, high), (start, end)), band=None if own == _ALL else own))
    return tuple(tiles)


def _pieces(term: Mask, size: Size) -> list[tuple[Rectangle, Band]] | None:
    """Where a term leaves one stretch of keys to each sample, or to each of the sequences in a row."""
    if isinstance(term, Sequences):
        return term.pieces(size)
    if isinstance(term, Documents):
        return _documents(term, size)
    return _stretches(term, size) if per_key(term) else None


def _stretches(term: Mask, size: Size) -> list[tuple[Rectangle, Band]] | None:
    """What each sample sees, if those are keys side by side, for all heads."""
    keep, score = term.keep(size), term.score(size)
    if keep is None or score is not None or keep.shape[1] != 1 or size.keys == 0 or size.batch == 0:
        return None
    found = stretches(keep[:, 0, 0].expand(size.batch, size.keys))
    if found is None:
        return None
    pairs = zip(*(numbers.tolist() for numbers in found), strict=True)
    if len(keep) == 1:  # the same for all samples
        return [(Rectangle((0, size.batch), (0, size.queries), (s, s + n)), _ALL) for s, n in [next(pairs)]]
    return [(Rectangle((b, b + 1), (0, size.queries), (s, s + n)), _ALL) for b, (s, n) in enumerate(pairs)]


def stretches(keep_BS: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where what is kept of each sample begins and how long it is, (B,) each, if that lies side by side in all."""
    lengths = keep_BS.sum(dim=1)
    starts = keep_BS.int().argmax(dim=1) if keep_BS.shape[1] else lengths
    ahead_BS = torch.arange(keep_BS.shape[1], device=keep_BS.device) - starts[:, None]
    alike = torch.equal(keep_BS, (ahead_BS >= 0) & (ahead_BS < lengths[:, None]))
    return (starts, lengths) if alike else None


def _documents(term: Documents, size: Size) -> list[tuple[Rectangle, Band]] | None:
    """Documents that are in one piece each, among the queries and among the keys."""
    term.check(size)
    rows = [tensor if tensor.dim() == 2 else tensor[None] for tensor in term.tensors]
    batch = max(map(len, rows)) if size.batch else 0
    found = []
    for sample in range(batch):
        places = [_places(row[sample if len(row) > 1 else 0]) for row in rows]
        if places[0] is None or places[1] is None:
            return None
        samples = (sample, sample + 1) if batch > 1 else (0, size.batch)
        found += [
            (Rectangle(samples, queries, places[1][name]), _ALL)
            for name, queries in places[0].items()
            if name in places[1]
        ]
    return found


def _places(ids: Tensor) -> dict[int, tuple[int, int]] | None:
    """Where each document is; None: one is in several pieces."""
    names, counts = torch.unique_consecutive(ids, return_counts=True)
    ends = list(itertools.accumulate(counts.tolist()))
    places = dict(zip(names.tolist(), zip([0, *ends], ends, strict=False), strict=True))
    return places if len(places) == len(ends) else None
