"""What a mask becomes for a kernel, and the tensor work behind it.

Letters: B batch, H query heads, L query positions, S key positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise._checks import invalid

if TYPE_CHECKING:
    from headwise.core.algebra import Mask
    from headwise.core.tiling import Sequences

_KEYS_AT_ONCE = 512  # of torch's CPU kernel
_MAX_DRAWN = 48  # rows and columns that still fit a terminal beside their labels


class Size(NamedTuple):
    """The shape of the scores a mask is asked for, and where they live."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device


class Band(NamedTuple):
    """For each query a stretch of keys: query i sees the keys i - left .. i + right, and of those before it the first.

    Attributes:
        left: how far back, which may be negative; None: to the first key.
        right: how far ahead, which may be negative; None: to the last key.
        first: the keys 0 .. first - 1 are seen whatever `right` says.
    """

    left: int | None = None
    right: int | None = None
    first: int = 0

    def meet(self, other: Band) -> Band | None:
        """What both show; None where that is no Band."""
        lefts = [left for left in (self.left, other.left) if left is not None]
        if self.right is None or other.right is None:
            ahead = other if self.right is None else self
        elif self.right <= other.right and self.first <= other.first:
            ahead = self
        elif other.right <= self.right and other.first <= self.first:
            ahead = other
        else:
            return None
        return Band(min(lefts, default=None), ahead.right, ahead.first)

    def seen_from(self, query: int, key: int) -> Band:
        """The same, counted from this query and this key on."""
        ahead = query - key
        return Band(
            None if self.left is None else self.left - ahead,
            None if self.right is None else self.right + ahead,
            max(0, self.first - key) if self.first else 0,
        )

    def within(self, queries: int, keys: int) -> Band:
        """The same, without what hides nothing from so many queries and keys."""
        left = None if self.left is None or self.left >= queries - 1 else self.left
        if self.right is None or self.right >= keys - 1 or self.first >= keys:
            return Band(left)
        first = 0 if self.first <= self.right + 1 else self.first
        return Band(left, self.right, first)

    def keep(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """(1, 1, L, S) bool."""
        return self.between(torch.arange(queries, device=device), torch.arange(keys, device=device))

    def between(self, query_R: Tensor, key_S: Tensor) -> Tensor:
        """(1, 1, R, S) bool: which of these queries sees which of these keys, by their positions."""
        ahead_RS = key_S - query_R[:, None]
        keep_RS = torch.ones_like(ahead_RS, dtype=torch.bool)
        if self.right is not None:
            keep_RS = (ahead_RS <= self.right) | (key_S < self.first)
        if self.left is not None:
            keep_RS = keep_RS & (ahead_RS >= -self.left)
        return keep_RS[None, None]


class Rectangle(NamedTuple):
    """A part of the scores of all heads: from the first number to before the second one.

    Attributes:
        samples: of the batch.
        queries: positions.
        keys: positions.
    """

    samples: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]

    def of(self, tensor: Tensor | None) -> Tensor | None:
        """The part of what broadcasts to (B, H, L, S), as a view."""
        if tensor is None:
            return None
        for dim, bounds in ((0, self.samples), (2, self.queries), (3, self.keys)):
            if tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, bounds[0], bounds[1] - bounds[0])
        return tensor

    def before(self, offset: int | Tensor) -> int | Tensor:
        """Of keys before the first query's own position, of which `offset` says how many in the whole, those here."""
        if isinstance(offset, Tensor):
            offset = offset.long().clamp(-(2**62), 2**62)  # bytes would overflow below, and so would the largest
            if offset.dim() and offset.shape[0] > 1:
                offset = offset[slice(*self.samples)]
        return offset + self.queries[0] - self.keys[0]


class Tile(NamedTuple):
    """A part of the scores that is computed at once.

    Attributes:
        place: where it is.
        causal: query i sees keys 0 .. i of it (a kernel's own flag).
        band: which keys are seen, counted from its corner; None: all.
    """

    place: Rectangle
    causal: bool = False
    band: Band | None = None

    @property
    def pairs(self) -> float:
        """Queries times keys that torch's kernel computes."""
        (first, last), (low, high), (start, end) = self.place
        queries, keys = high - low, end - start
        return (last - first) * (flagged_pairs(queries, keys) if self.causal else queries * keys)


def flagged_pairs(queries: int, keys: int) -> int:
    """Queries times keys that torch's CPU kernel computes under its causal flag: it leaves out whole blocks of keys."""
    square = min(queries, keys)
    return square * min(keys, (square + _KEYS_AT_ONCE) // 2) + (queries - square) * keys


class Tiling(NamedTuple):
    """All that is seen of the scores, in tiles; a query that is in none of them sees nothing.

    Attributes:
        tiles: no query is in two of them.
        rest: what else is hidden or added in them; None: nothing.
        whole: the mask that all of this came from; None: nothing is hidden.
    """

    tiles: tuple[Tile, ...]
    rest: Mask | None
    whole: Mask | None


class Lowered(NamedTuple):
    """A mask in the form that kernels take; everything here holds at once.

    Attributes:
        causal: query l sees keys 0 .. l (a kernel's own flag).
        keep: bool, broadcasts to (B, H, L, S); None: every key.
        bias: float, broadcasts to (B, H, L, S), added to the scaled scores; -inf hides a key; None: nothing.
        tiling: the parts of the scores that anybody sees, in place of all of the above; for the backend that runs them
            one by one.
        sequences: which lie one after the other in a row, in place of all of the above; for the backend that takes
            their lengths.
    """

    causal: bool = False
    keep: Tensor | None = None
    bias: Tensor | None = None
    tiling: Tiling | None = None
    sequences: Sequences | None = None

    def whole_keep(self, size: Size) -> Tensor | None:
        """`keep` with the causal flag written out, for a kernel that has no such flag."""
        if not self.causal:
            return self.keep
        rule = lower_triangle(size, 0)
        return rule if self.keep is None else self.keep & rule


NOTHING_HIDDEN = Lowered()


def lower_triangle(size: Size, offset: int | Tensor) -> Tensor:
    """Query l sees keys 0 .. l + offset, (1 or B, 1, L, S)."""
    query_L1 = torch.arange(size.queries, device=size.device)[:, None]
    keep = torch.arange(size.keys, device=size.device) - query_L1 <= offset  # a difference cannot overflow, a sum can
    return keep if keep.dim() == 4 else keep[None, None]


def steps_ahead(size: Size, offset: int | Tensor) -> Tensor:
    """How far key s lies after query l's own position l + offset, (1 or B, 1, L, S) integers."""
    query_L1 = torch.arange(size.queries, device=size.device)[:, None]
    ahead = torch.arange(size.keys, device=size.device) - query_L1 - offset
    return ahead if ahead.dim() == 4 else ahead[None, None]


def per_sample(function: str, argument: str, value: int | Tensor, size: Size) -> int | Tensor:
    """An int as it is, a tensor as (B, 1, 1, 1) or ()."""
    if not isinstance(value, Tensor):
        return value
    same_device(function, argument, value, size)
    if value.dim() == 0:
        return value
    if value.shape[0] not in (1, size.batch):
        raise invalid(function, argument, f"have one entry per sample, B = {size.batch}", tuple(value.shape))
    return value[:, None, None, None]


def checked_count(function: str, argument: str, value: int | Tensor) -> int | Tensor:
    """Check that it is an int or an integer tensor of shape () or (B,)."""
    fits = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        fits = value.dim() <= 1 and not not_integer(value)
    elif isinstance(value, torch.SymInt):
        fits = True
    if not fits:
        raise invalid(function, argument, "be an int or an integer tensor of shape () or (B,)", said(value))
    return value


def four_dims(tensor: Tensor) -> Tensor:
    """(L, S) as (1, 1, L, S), (B, L, S) as (B, 1, L, S)."""
    if tensor.dim() == 4:
        return tensor
    return tensor[None, None] if tensor.dim() == 2 else tensor[:, None]


def not_integer(tensor: Tensor) -> bool:
    """Whether it holds no integers; bool is none."""
    return tensor.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def same_device(function: str, argument: str, tensor: Tensor, size: Size, **shapes: Tensor) -> None:
    """Refuse a tensor that is not where the scores are."""
    if tensor.device != size.device:
        raise invalid(function, argument, f"be on the query's device {size.device}", tensor.device, **shapes)


def version(tensor: Tensor | None) -> int:
    """How often a tensor has been written to, where that is counted."""
    uncounted = tensor is None or torch.compiler.is_compiling() or tensor.is_inference()
    return 0 if tensor is None or uncounted else tensor._version


def cast_scores(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast so that finite values stay finite: a narrower dtype would round a large penalty to -inf, which hides."""
    if torch.finfo(scores.dtype).max <= torch.finfo(dtype).max:
        return scores.to(dtype)
    limits = torch.finfo(dtype)  # clamped after the cast: in a coarser dtype the limit itself would round up
    return torch.where(scores == -math.inf, -math.inf, scores.to(dtype).clamp(limits.min, limits.max))


def add_scores(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Sum of two biases; only what is -inf in one of them is -inf."""
    if left is None or right is None:
        return right if left is None else left
    total = left + right
    limits = torch.finfo(total.dtype)
    hidden = (left == -math.inf) | (right == -math.inf)
    return torch.where(hidden, -math.inf, total.clamp(limits.min, limits.max))


def said(value: object) -> str:
    """A value as an error or a repr shows it: small tensors in full."""
    if isinstance(value, Tensor):
        small = value.dim() <= 1 and value.numel() <= 8 and value.device.type == "cpu"
        return str(value.tolist()) if small else f"{value.dtype} {tuple(value.shape)}"
    return repr(value)


def picture(keep_LS: Tensor, bias_LS: Tensor | None) -> str:
    """Rows of `#`, `.`, `+` or numbers, with positions at the edges."""
    L, S = keep_LS.shape
    rows, columns = -(-L // _MAX_DRAWN), -(-S // _MAX_DRAWN)
    blocks = rows > 1 or columns > 1
    lines = []
    if bias_LS is not None and not blocks and bool((bias_LS[keep_LS] != 0).any()):
        cells = [[f"{bias_LS[i, j].item():.3g}" if keep_LS[i, j] else "." for j in range(S)] for i in range(L)]
    else:
        cells = []
        for i in range(0, L, rows):
            strip = [keep_LS[i : i + rows, j : j + columns] for j in range(0, S, columns)]
            cells.append(["#" if block.all() else "+" if block.any() else "." for block in strip])
    width = max(len(cell) for line in [*cells, [str((S - 1) % 10)]] for cell in line)
    header = [str(j if width >= len(str(S - 1)) else j % 10) for j in range(0, S, columns)]
    if blocks:
        header = [str(n % 10) for n in range(len(header))]
    for label, line in [("", header), *((str(i * rows), line) for i, line in enumerate(cells))]:
        lines.append(f"{label:>5}   " + " ".join(f"{cell:>{width}}" for cell in line))
    if blocks:
        lines.append(f"        one cell is {rows} queries x {columns} keys; + is partly visible")
    return "\n".join(lines)
