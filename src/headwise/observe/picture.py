"""What is drawn of an `AttentionMap`, whatever draws it: without padding, pooled, with its axes and its one scale.

Letters: H heads, L queries, S keys, T time steps of the signal, X its channels, P points of a drawn line.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from headwise.observe.heatmap import AttentionMap

MOST_CELLS = 256  # a side; above it a screen shows no single cell, so neighbours are pooled
MOST_COLUMNS = 12  # of panels; a layer with more heads goes on in the next row
MOST_POINTS = 2048  # of one drawn line
GREATEST = 1e100  # of a weight, a value of the signal and an interval: sums and differences of these are finite
LEVELS = 254  # codes of a stored weight above 0; code 0 is exactly 0
LEAST = 1e-100  # of what a scale spans; below it all is drawn as one value

# Channels up to eight, by names of hues; the second row is for dark ground.
FEW_HUES = (
    ("#1f77b4", "#d9640a", "#2a9d46", "#c8293c", "#8250c4", "#8c564b", "#d450a6", "#5c6570"),
    ("#58a6e8", "#ff9a4d", "#5ccb78", "#ff7b88", "#b595f0", "#c79a8f", "#f08fd0", "#a9b4c2"),
)
# More channels: from blue by green, yellow and red to violet, dark and bright by turns, since hues alone are not enough
# for everybody. In OKLCH, lightness 0.43 and 0.63 on white, 0.62 and 0.85 on dark ground.
MANY_HUES = (
    (
        "1346ab 03577a 055c5c 016129 425900 5f4f01 734301 892d01 970525 8d0e5d 7b1f81 602e9d",
        "4d84ee 0994cd 0b9d9d 0fa44d 739801 a28706 c27405 db5d2c dd555d d15697 bb5fc1 9a6cdf",
    ),
    (
        "4a81eb 0891c9 0c9999 03a14a 719507 9e8406 be7204 d75928 d9525a cd5394 b75cbd 9769dc",
        "b4cffe 95d7fe 0deaeb 70ec90 b5e058 f1cb1c ffbf81 febca5 feb9b8 feb4d7 fbaeff d6c2fe",
    ),
)
MOST_TURNS = 24  # channels that are dark and bright by turns; more would only flicker


@dataclass(frozen=True)
class Axis:
    """One side of the maps. Position p covers steps [p * stride, (p + 1) * stride), and step i stands at i * interval.

    A step fills half an interval to each side of its time, so the axis runs from -interval / 2.
    """

    label: str
    num: int  # positions
    size: int  # positions that share a cell; the last cell may have fewer
    stride: int
    steps: int
    interval: float
    unit: str  # empty: positions are counted, not timed
    names: tuple[str, ...]
    marks: tuple[str, ...] = ()  # what to call each position where it is not its number: some rows of many

    @property
    def ends(self) -> tuple[float, float]:
        """Where the axis starts and ends."""
        return -0.5 * self.interval, (self.steps - 0.5) * self.interval

    @property
    def full(self) -> float:
        """Where the last cell would end if it were as wide as the others."""
        return (-(-self.num // self.size) * self.size * self.stride - 0.5) * self.interval


@dataclass(frozen=True)
class Grid:
    """How many cells a map is drawn with."""

    rows: int
    columns: int
    query_runs: int  # rows of the weights that share a drawn one
    key_runs: int  # likewise columns
    peaks: bool  # whether cells hold several weights, of which the greatest is known


def grid_of(each: AttentionMap, most: int) -> Grid:
    rows, columns = each.weights[0].shape[-2:]
    if each.query_padding_mask is not None:
        rows -= int(each.query_padding_mask.sum())
    if each.key_padding_mask is not None:
        columns -= int(each.key_padding_mask.sum())
    query_runs, key_runs = -(-rows // most), -(-columns // most)
    single = each.queries_a_cell == each.keys_a_cell == 1
    peaks = bool(each.peaks) or (single and max(query_runs, key_runs) > 1)
    return Grid(-(-rows // query_runs), -(-columns // key_runs), query_runs, key_runs, peaks)


def _axis(each: AttentionMap, label: str, keep: Tensor, names: Sequence[str], size: int, *, timed: bool) -> Axis:
    """One axis of all positions; `size` of them share a drawn cell."""
    num, unit, stride = int(keep.sum()), plain(each.unit, 16) if timed else "", each.stride if timed else 1
    kind = ("position", "index") if not timed else ("time step", "index") if unit == "step" else ("time", unit)
    label = label.format("token") if names else f"{label.format(kind[0])} ({kind[1]})"
    # The last patch of a signal may be partial.
    steps = num * stride if each.signal is None or not timed else len(each.signal)
    shown = tuple(plain(names[position], 60) for position in keep.nonzero().flatten().tolist()) if names else ()
    return Axis(label, num, size, stride, steps, float(each.interval) if timed else 1.0, unit, shown)


def _rows(axis: Axis, positions: Sequence[int], names: Sequence[str], size: int) -> Axis:
    """The axis of some of its positions, which stand side by side like names."""
    times = (position * axis.stride * axis.interval for position in positions)
    marks, shown = tuple(f"{time:.6g}" for time in times), tuple(plain(name, 60) for name in names)
    num = len(positions)
    return replace(axis, num=num, size=size, stride=1, steps=num, interval=1.0, names=shown, marks=marks)


@dataclass(frozen=True)
class Line:
    """The signal as it is drawn: point i of P stands `first + i * step` time steps after the start."""

    values_PX: Tensor  # NaN is a gap
    first: float
    step: float

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest value; 0 and 1 if there is none."""
        real = self.values_PX[~self.values_PX.isnan()]
        return (float(real.min()), float(real.max())) if len(real) else (0.0, 1.0)

    @property
    def frame(self) -> tuple[float, float]:
        """Where the axis starts and ends: far enough apart for ticks, where the signal is constant but for rounding."""
        low, high = self.range
        spread, size = high - low, max(abs(low), abs(high))
        margin = 0.1 * size if spread <= 1e-12 * size else max(0.05 * spread, 1e-9 * size)
        margin = margin if margin >= LEAST else 0.5
        return low - margin, high + margin


def _thin(signal_TX: Tensor) -> Line:
    """Return the signal, or, if it is longer than a screen is wide, the least and greatest value of equal runs."""
    values_TX = signal_TX.detach().cpu().double()
    values_TX = values_TX.masked_fill(~torch.isfinite(values_TX), math.nan)
    length, num_channels = values_TX.shape
    most = max(256, min(MOST_POINTS, 2**18 // num_channels))
    if length <= most:
        return Line(values_TX, 0.0, 1.0)
    size = -(-2 * length // most)
    runs_PTX = F.pad(values_TX, (0, 0, 0, -length % size), value=math.nan).unflatten(0, (-1, size))
    gap = runs_PTX.isnan()
    least, greatest = runs_PTX.masked_fill(gap, math.inf).amin(1), runs_PTX.masked_fill(gap, -math.inf).amax(1)
    both_PX = torch.stack([least, greatest], dim=1).flatten(0, 1)
    return Line(both_PX.masked_fill(both_PX.isinf(), math.nan), 0.25 * size - 0.5, 0.5 * size)


def _pool(weights_LS: Tensor, query_runs: int, key_runs: int, counts_L: Tensor | None = None) -> Tensor:
    """Return the mass on each run of keys, averaged over each run of queries; the last runs may be shorter.

    `counts_L` says how many queries each row stands for.
    """
    num_rows, num_columns = weights_LS.shape
    if key_runs > 1:
        weights_LS = F.pad(weights_LS, (0, -num_columns % key_runs)).unflatten(1, (-1, key_runs)).sum(2)
    if query_runs > 1:
        counts_L = weights_LS.new_ones(num_rows) if counts_L is None else counts_L
        short = -num_rows % query_runs
        sums_LS = F.pad(weights_LS * counts_L[:, None], (0, 0, 0, short)).unflatten(0, (-1, query_runs)).sum(1)
        weights_LS = sums_LS / F.pad(counts_L, (0, short)).unflatten(0, (-1, query_runs)).sum(1)[:, None]
    return weights_LS


def _greatest(weights_LS: Tensor, query_runs: int, key_runs: int) -> Tensor:
    num_rows, num_columns = weights_LS.shape
    padded_LS = F.pad(weights_LS, (0, -num_columns % key_runs, 0, -num_rows % query_runs))
    greatest_LS: Tensor = padded_LS.unflatten(1, (-1, key_runs)).amax(2).unflatten(0, (-1, query_runs)).amax(1)
    return greatest_LS


@dataclass(frozen=True)
class Picture:
    """One map, ready to be drawn."""

    title: str
    layers: list[list[Tensor]]  # each head's cells, float64
    averaged: list[bool]  # whether a layer's one map is the mean of its heads
    greatest: list[list[Tensor]]  # likewise the greatest single weight in each cell; none: a cell holds one, or unknown
    peaks: list[list[tuple[int, float]]]  # for each head, the column with the greatest mean weight, and that mean
    grain: int  # keys that such a column holds
    top: float  # the end of the colour scale
    greatest_top: float  # of the scale of the greatest
    label: str  # what a colour means
    query: Axis
    key: Axis
    line: Line | None
    channel_names: tuple[str, ...]
    layer_names: tuple[str, ...]  # empty: layers are counted
    notes: dict[str, list[list[float | None]]]  # for each layer, a number for each head

    @property
    def columns(self) -> int:
        """How many heads stand beside each other; rows of a layer are filled evenly."""
        most = max(len(heads) for heads in self.layers)
        return -(-most // -(-most // MOST_COLUMNS))


def prepare(each: AttentionMap, most: int = MOST_CELLS) -> Picture:
    """Return what is drawn, in at most `most` cells a side."""
    grid, (num_rows, num_columns) = grid_of(each, most), each.weights[0].shape[-2:]
    key, query = _axes(each, grid)
    keep_L, keep_S = keep(each.query_padding_mask, num_rows), keep(each.key_padding_mask, num_columns)
    counts_L = torch.full((int(keep_L.sum()),), float(each.queries_a_cell), dtype=torch.float64)
    if not each.query_positions:
        counts_L[-1] = query.num - each.queries_a_cell * (len(counts_L) - 1)
    layers: list[list[Tensor]] = []
    greatest: list[list[Tensor]] = []
    peaks: list[list[tuple[int, float]]] = []
    low, high = math.inf, -math.inf
    for layer, weights in enumerate(each.weights):
        layers.append([])
        greatest.append([])
        peaks.append([])
        above = each.peaks[layer] if each.peaks else weights
        # One head at a time, to bound memory.
        for weights_LS, above_LS in zip(_heads(weights), _heads(above), strict=True):
            weights_LS = weights_LS.to("cpu", torch.float64)[keep_L][:, keep_S]
            sums_L, mean_S = weights_LS.sum(1), counts_L @ weights_LS / counts_L.sum()
            low, high = min(low, float(sums_L.min())), max(high, float(sums_L.max()))
            peaks[-1].append((int(mean_S.argmax()), float(mean_S.max())))
            layers[-1].append(_pool(weights_LS, grid.query_runs, grid.key_runs, counts_L))
            if grid.peaks:
                above_LS = above_LS.to("cpu", torch.float64)[keep_L][:, keep_S] if each.peaks else weights_LS
                greatest[-1].append(_greatest(above_LS, grid.query_runs, grid.key_runs))
    cells = [cells for heads in layers for cells in heads]
    return Picture(
        title=plain(" ".join(each.title.split()), 400),
        layers=layers,
        averaged=[weights.dim() == 2 for weights in each.weights],
        greatest=greatest if grid.peaks else [],
        peaks=peaks,
        grain=each.keys_a_cell,
        top=_top(cells),
        greatest_top=_top([cells for heads in greatest for cells in heads]),
        label=_label(low, high, query, key, grey=any(bool((cell == 0).any()) for cell in cells)),
        query=query,
        key=key,
        line=None if each.signal is None else _thin(each.signal),
        channel_names=tuple(plain(name, 60) for name in each.channel_names),
        layer_names=tuple(plain(name, 60) for name in each.layer_names),
        notes={plain(name, 60): [list(layer) for layer in layers] for name, layers in each.notes.items()},
    )


def _axes(each: AttentionMap, grid: Grid) -> tuple[Axis, Axis]:
    """The axes of the keys and of the queries."""
    keep_L = keep(each.query_padding_mask, each.num_queries or 0)
    keep_S = keep(each.key_padding_mask, each.num_keys or 0)
    # Tokens and patches have no time; who gives a stride or an interval speaks of one.
    timed = each.signal is not None or (each.unit, each.stride, each.interval) != ("step", 1, 1.0)
    key = _axis(each, "key: {} attended to", keep_S, each.key_names, each.keys_a_cell * grid.key_runs, timed=timed)
    # Whether queries stand where the keys do is not said anywhere; where the two differ, they cannot.
    timed, some = timed and torch.equal(keep_L, keep_S), each.query_positions
    size = each.queries_a_cell * grid.query_runs
    query = _axis(each, "query: {}", keep_L, () if some else each.query_names, size, timed=timed)
    return key, _rows(query, some, each.query_names, grid.query_runs) if some else query


def _heads(weights: Tensor) -> Tensor:
    found: Tensor = weights.detach().reshape(-1, *weights.shape[-2:])
    return found


def _top(cells: Sequence[Tensor]) -> float:
    top = max((float(cell.max()) for cell in cells), default=0.0)
    return top if top >= LEAST else 1.0


def _label(low: float, high: float, query: Axis, key: Axis, *, grey: bool) -> str:
    # 16-bit weights miss 1 by their rounding; a sink, dropout or an unseeing query by more.
    total = "1" if low > 0.98 and high < 1.02 else " to ".join(dict.fromkeys((f"{low:.2g}", f"{high:.2g}")))
    label = f"attention weight (each row sums to {total})"
    if query.size > 1 or key.size > 1:
        label += f"; pooled: keys in a cell {key.size} (summed), queries {query.size} (averaged)"
    return f"{label}; grey: exactly 0, as hidden keys have" if grey else label


def codes(cells_LS: Tensor, top: float) -> bytes:
    """Return a byte for each cell, row by row: 0 for exactly 0, else `1 + 254 * sqrt(weight / top)`, rounded.

    The square root keeps small weights apart where one head has a sink near 1: the smallest step is top / 64,516.
    """
    codes_LS = 1 + (LEVELS * (cells_LS / top).sqrt()).round().clamp(max=LEVELS)
    codes_LS = codes_LS.masked_fill(cells_LS == 0, 0).to(torch.uint8)
    return bytes(codes_LS.flatten().tolist())


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def plain(text: str, most: int) -> str:
    """Return text on one line that hides nothing: what does not print is spelled out, what is too long is cut."""
    joiners = "\u200c\u200d"  # they do not print, but shape the letters beside them
    letters = (c if c.isprintable() or c in joiners else c.encode("unicode_escape").decode() for c in text)
    text = "".join(letters)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def hues(number: int, *, dark: bool = False) -> list[str]:
    """Return a colour for each of the channels, neighbours unlike each other, for white or for dark ground."""
    if number <= len(FEW_HUES[dark]):
        return list(FEW_HUES[dark][:number])
    dull, bright = (torch.tensor([list(bytes.fromhex(hue)) for hue in row.split()]).float() for row in MANY_HUES[dark])
    found = []
    for channel in range(number):
        share = channel % 2 if number <= MOST_TURNS else 0.5
        stops, at = dull.lerp(bright, share), channel / (number - 1) * (len(dull) - 1)
        mixed = stops[int(at)].lerp(stops[math.ceil(at)], at % 1)
        found.append("#" + bytes(mixed.round().int().tolist()).hex())
    return found


def keep(mask: Tensor | None, number: int) -> Tensor:
    return torch.ones(number, dtype=torch.bool) if mask is None else ~mask.detach().cpu()
