"""What is drawn of an `AttentionMap`, whatever draws it: without padding, pooled, with its axes and its one scale.

Letters: H heads, L queries, S keys, T time steps of the signal, X its channels, P points of a drawn line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def ends(self) -> tuple[float, float]:
        """Where the axis starts and ends."""
        return -0.5 * self.interval, (self.steps - 0.5) * self.interval

    @property
    def full(self) -> float:
        """Where the last cell would end if it were as wide as the others."""
        return (-(-self.num // self.size) * self.size * self.stride - 0.5) * self.interval


def _axis(each: AttentionMap, label: str, keep: Tensor, names: Sequence[str], *, timed: bool) -> Axis:
    num, unit, stride = int(keep.sum()), plain(each.unit, 16) if timed else "", each.stride if timed else 1
    kind = ("position", "index") if not timed else ("time step", "index") if unit == "step" else ("time", unit)
    label = label.format("token") if names else f"{label.format(kind[0])} ({kind[1]})"
    # The last patch of a signal may be partial.
    steps = num * stride if each.signal is None or not timed else len(each.signal)
    shown = tuple(plain(names[position], 60) for position in keep.nonzero().flatten().tolist()) if names else ()
    return Axis(label, num, -(-num // MOST_CELLS), stride, steps, float(each.interval) if timed else 1.0, unit, shown)


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


def _pool(weights_LS: Tensor, query_size: int, key_size: int) -> Tensor:
    """Return the mass on each run of keys, averaged over each run of queries; the last runs may be shorter."""
    num_queries, num_keys = weights_LS.shape
    if key_size > 1:
        weights_LS = F.pad(weights_LS, (0, -num_keys % key_size)).unflatten(1, (-1, key_size)).sum(2)
    if query_size > 1:
        sums_LS = F.pad(weights_LS, (0, 0, 0, -num_queries % query_size)).unflatten(0, (-1, query_size)).sum(1)
        starts_L = torch.arange(len(sums_LS)) * query_size
        weights_LS = sums_LS / (num_queries - starts_L).clamp(max=query_size)[:, None]
    return weights_LS


@dataclass(frozen=True)
class Picture:
    """One map, ready to be drawn."""

    title: str
    layers: list[list[Tensor]]  # each head's cells, float64
    averaged: list[bool]  # whether a layer's one map is the mean of its heads
    peaks: list[list[tuple[int, float]]]  # for each head, the key with the greatest mean weight, and that mean
    top: float  # the end of the colour scale
    label: str  # what a colour means
    query: Axis
    key: Axis
    line: Line | None
    channel_names: tuple[str, ...]

    @property
    def columns(self) -> int:
        """How many heads stand beside each other; rows of a layer are filled evenly."""
        most = max(len(heads) for heads in self.layers)
        return -(-most // -(-most // MOST_COLUMNS))


def prepare(each: AttentionMap) -> Picture:
    num_queries, num_keys = each.weights[0].shape[-2:]
    keep_L, keep_S = keep(each.query_padding_mask, num_queries), keep(each.key_padding_mask, num_keys)
    key = _axis(each, "key: {} attended to", keep_S, each.key_names, timed=True)
    # Whether queries stand where the keys do is not said anywhere; where the two differ, they cannot.
    query = _axis(each, "query: {}", keep_L, each.query_names, timed=torch.equal(keep_L, keep_S))
    layers: list[list[Tensor]] = []
    peaks: list[list[tuple[int, float]]] = []
    low, high = math.inf, -math.inf
    for weights in each.weights:
        layers.append([])
        peaks.append([])
        for weights_LS in weights.detach().reshape(-1, num_queries, num_keys):  # one head at a time, to bound memory
            weights_LS = weights_LS.to("cpu", torch.float64)[keep_L][:, keep_S]
            sums_L, mean_S = weights_LS.sum(1), weights_LS.mean(0)
            low, high = min(low, float(sums_L.min())), max(high, float(sums_L.max()))
            peaks[-1].append((int(mean_S.argmax()), float(mean_S.max())))
            layers[-1].append(_pool(weights_LS, query.size, key.size))
    cells = [cells for heads in layers for cells in heads]
    # 16-bit weights miss 1 by their rounding; a sink, dropout or an unseeing query by more.
    total = "1" if low > 0.98 and high < 1.02 else " to ".join(dict.fromkeys((f"{low:.2g}", f"{high:.2g}")))
    label = f"attention weight (each row sums to {total})"
    top = max(float(cell.max()) for cell in cells)
    if query.size > 1 or key.size > 1:
        label += f"; pooled: keys in a cell {key.size} (summed), queries {query.size} (averaged)"
    if any(bool((cell == 0).any()) for cell in cells):
        label += "; grey: exactly 0, as hidden keys have"
    return Picture(
        title=plain(" ".join(each.title.split()), 400),
        layers=layers,
        averaged=[weights.dim() == 2 for weights in each.weights],
        peaks=peaks,
        top=top if top >= LEAST else 1.0,
        label=label,
        query=query,
        key=key,
        line=None if each.signal is None else _thin(each.signal),
        channel_names=tuple(plain(name, 60) for name in each.channel_names),
    )


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
