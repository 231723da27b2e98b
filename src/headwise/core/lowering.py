"""What a mask becomes for a kernel, and the tensor work behind it.

Letters: B batch, H query heads, L query positions, S key positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headwise._checks import invalid

_MAX_DRAWN = 48  # rows and columns that still fit a terminal beside their labels


class Size(NamedTuple):
    """The shape of the scores a mask is asked for, and where they live."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device


class Ragged(NamedTuple):
    """Sequences of unequal lengths that attend apart: the queries of one see the keys of the same one.

    Attributes:
        queries: the number of queries of each.
        keys: the number of keys of each.
        packed: True where they lie one after the other in a single row (B = 1); False where each is the beginning of a
            sample, and what comes after it is hidden.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    packed: bool


class Lowered(NamedTuple):
    """A mask in the form that kernels take; everything here holds at once.

    Attributes:
        causal: query l sees keys 0 .. l (a kernel's own flag); of its sequence, if ragged.
        keep: bool, broadcasts to (B, H, L, S); None: every key.
        bias: float, broadcasts to (B, H, L, S), added to the scaled scores; -inf hides a key; None: nothing.
        ragged: lengths, in place of `keep` and `bias`; for the backend that runs sequence by sequence.
    """

    causal: bool = False
    keep: Tensor | None = None
    bias: Tensor | None = None
    ragged: Ragged | None = None

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


def same_device(function: str, argument: str, tensor: Tensor, size: Size, **shapes: Tensor) -> None:
    """Refuse a tensor that is not where the scores are."""
    if tensor.device != size.device:
        raise invalid(function, argument, f"be on the query's device {size.device}", tensor.device, **shapes)


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
