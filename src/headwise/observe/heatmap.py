"""Attention weights as a picture: a PNG of one sample, or one self-contained page of several to flip through.

Letters: H heads, L queries, S keys, T time steps of the signal, X its channels, P points of a drawn line.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise._checks import invalid, need
from headwise._files import whole

MOST_CELLS = 256  # a side; above it a screen shows no single cell, so neighbours are pooled
MOST_COLUMNS = 12  # of panels; a layer with more heads goes on in the next row
MOST_ROWS = 32  # of panels in a PNG: 4,000 pixels
MOST_POINTS = 2048  # of one drawn line
MOST_PAGE = 64 * 2**20  # bytes of weights and signals in one page; a browser shows more, but slowly
MOST_NAMES = 64  # tick labels of one axis; above it only every k-th name is written
LEVELS = 254  # codes of a stored weight above 0; code 0 is exactly 0

_wrong = partial(invalid, "AttentionMap")


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """What one sample's heads attended to, with what is needed to read it.

    Nothing is copied or changed here: tensors stay on their device, and may require gradients.

    Attributes:
        weights: one tensor for each layer, (H, L, S), or (L, S) if averaged over heads; floating, finite, at least 0. H
            may differ from layer to layer, L and S not. Rows need not sum to 1: the picture says what they sum to.
        title: what is shown; any text.
        signal: (T, X) floating, the series that was attended, without its padding. NaN and infinities leave gaps.
        channel_names: one for each of the X channels. Left out: "1", "2" and so on.
        key_padding_mask: (S,) bool, True = padding, as the layer takes it: these columns are left out of the picture.
        query_padding_mask: (L,) bool, True = padding: these rows are left out. In self-attention, give the same mask
            twice; rows of padding mean nothing, but only the caller knows which they are.
        key_names: tokens, one for each of the S keys, those of padding included.
        query_names: tokens, one for each of the L queries, those of padding included.
        stride: time steps that one key covers: key j those in [j * stride, (j + 1) * stride), counted without padding;
            the last one may be partial. In self-attention (L == S and the same padding) a query covers as many.
        interval: the time from one step to the next, in `unit`.
        unit: of `interval`: "ms", or "step" where the time is not known.

    Raises:
        ValueError: these do not fit together, or no key or no query is left without the padding.
    """

    weights: Sequence[Tensor]
    title: str = ""
    signal: Tensor | None = None
    channel_names: Sequence[str] = ()
    key_padding_mask: Tensor | None = None
    query_padding_mask: Tensor | None = None
    key_names: Sequence[str] = ()
    query_names: Sequence[str] = ()
    stride: int = 1
    interval: float = 1.0
    unit: str = "step"

    def __post_init__(self) -> None:
        """Hold what the class promises, once, before anything is drawn."""
        _check_weights(self.weights)
        object.__setattr__(self, "weights", tuple(self.weights))
        num_queries, num_keys = self.weights[0].shape[-2:]
        _check_mask("key_padding_mask", self.key_padding_mask, num_keys, "keys")
        _check_mask("query_padding_mask", self.query_padding_mask, num_queries, "queries")
        if isinstance(self.stride, bool) or not isinstance(self.stride, int) or self.stride < 1:
            raise _wrong("stride", "be an integer of at least 1", self.stride)
        if not 0 < self.interval < float("inf"):
            raise _wrong("interval", "be above 0 and finite", self.interval)
        if not isinstance(self.title, str) or not isinstance(self.unit, str):
            raise _wrong("title and unit", "be strings", repr((self.title, self.unit)))
        if self.signal is not None:
            self._check_signal(self.signal)
        num_channels = 0 if self.signal is None else self.signal.shape[1]
        self._check_names("channel_names", num_channels, "channels of signal")
        self._check_names("key_names", num_keys, "keys, padding included")
        self._check_names("query_names", num_queries, "queries, padding included")
        if not self.channel_names:
            object.__setattr__(self, "channel_names", tuple(str(1 + channel) for channel in range(num_channels)))

    def _check_signal(self, signal: Tensor) -> None:
        if signal.dim() != 2 or not signal.is_floating_point() or 0 in signal.shape:
            rule = "be floating with shape (T, X), a time step and a channel at least"
            raise _wrong("signal", rule, f"{signal.dtype} {tuple(signal.shape)}")
        num_keys = int(_keep(self.key_padding_mask, self.weights[0].shape[-1]).sum())
        if -(-len(signal) // self.stride) != num_keys:
            rule = f"have ceil(T / stride) = {num_keys}, the number of keys that are not padding"
            got = f"T = {len(signal)} with stride {self.stride}; cut keys that are no time step off the weights first"
            raise _wrong("signal", rule, got, weights=self.weights[0], key_padding_mask=self.key_padding_mask)

    def _check_names(self, attribute: str, number: int, things: str) -> None:
        names = getattr(self, attribute)
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise _wrong(attribute, f"be a sequence of strings, one for each of the {things}", repr(names))
        if len(names) not in (0, number):
            raise _wrong(attribute, f"be one for each of the {number} {things}", len(names))
        object.__setattr__(self, attribute, tuple(names))


def _check_weights(weights: Sequence[Tensor]) -> None:
    if not isinstance(weights, Sequence) or not weights or not all(isinstance(each, Tensor) for each in weights):
        got = tuple(weights.shape) if isinstance(weights, Tensor) else weights
        raise _wrong("weights", "be a list of tensors, one for each of at least one layer", got)
    for layer, weight in enumerate(weights):
        name = f"weights[{layer}]"
        if weight.dim() not in (2, 3) or 0 in weight.shape or not weight.is_floating_point():
            rule = "be floating with shape (H, L, S) or (L, S), none of them 0; of a batch, give one sample"
            raise _wrong(name, rule, f"{weight.dtype} {tuple(weight.shape)}")
        if weight.shape[-2:] != weights[0].shape[-2:]:
            rule = "have the L and S of the first layer; draw layers of other lengths by themselves"
            raise _wrong(name, rule, tuple(weight.shape), **{"weights[0]": weights[0]})
        low, high = weight.detach().float().aminmax()
        if not (low >= 0 and high < float("inf")):  # NaN is neither
            rule = "be finite and at least 0: weights after the softmax, not scores"
            raise _wrong(name, rule, f"values from {float(low):.4g} to {float(high):.4g}")


def _check_mask(name: str, mask: Tensor | None, number: int, things: str) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (number,) or bool(mask.all())):
        rule = f"be bool with one value for each of the {number} {things}, True = padding, and leave one at least"
        raise _wrong(name, rule, f"{mask.dtype} {tuple(mask.shape)} with {int(mask.sum())} of padding")


def _keep(mask: Tensor | None, number: int) -> Tensor:
    return torch.ones(number, dtype=torch.bool) if mask is None else ~mask.detach().cpu()


def heatmap(maps: AttentionMap | Sequence[AttentionMap], path: str | os.PathLike[str]) -> Path:
    """Draw attention weights: a `.png` of one map, or a `.html` page of one or more.

    Queries go down, keys to the right, a row a layer, a column a head; all heads share one colour scale, from 0 to the
    greatest weight shown, and the signal stands above each column on the same time axis. Padding is left out; weights
    that are exactly 0, as hidden keys have, are grey. Above 256 positions a side, equal runs of neighbours are drawn as
    one cell: the sum over its keys of the mean over its queries, so that rows keep their sum; the last run may be
    shorter. More than 12 heads take several rows.

    The page needs no network, no server and no matplotlib. It keeps each drawn weight in a byte, as its square root:
    weights come back to within 1/254 of the map's greatest, small ones far closer; hovering shows how close.

    Args:
        maps: what to draw. Texts in it may be anything: they are never read as markup or mathematics. In a PNG, long
            ones are cut and characters without a glyph become squares; the page shows them.
        path: the file to write, by its suffix a picture or a page. It appears whole or not at all.

    Returns:
        `path`, as a `Path`.

    Raises:
        ImportError: a PNG without matplotlib; nothing was written.
        OSError: the file could not be written; what stood there before still does.
        ValueError: there is no map, or several for a PNG; the suffix is another or the folder does not exist; a PNG
            would need more than 32 rows of panels; a page would hold more than 64 MiB.

    Cost: one head's weights at a time on the CPU, in float64. A PNG of 2 x 4 heads takes about a second, one of
    12 x 12 about five; in a page, a head takes up to 85 KiB.
    """
    path = Path(path)
    maps = (maps,) if isinstance(maps, AttentionMap) else tuple(maps)
    suffix = path.suffix.lower()
    if not maps or not all(isinstance(each, AttentionMap) for each in maps):
        raise invalid("heatmap", "maps", "be an AttentionMap, or a sequence of one at least", maps)
    if suffix not in (".png", ".html"):
        raise invalid("heatmap", "path", "end in .png or .html", path)
    if not path.parent.is_dir() or path.is_dir():
        raise invalid("heatmap", "path", "name a file in a folder that exists", path)
    if suffix == ".png" and len(maps) > 1:
        raise invalid("heatmap", "maps", "be one for a PNG; write .html to flip through several", len(maps))
    if suffix == ".png":
        need("matplotlib.figure", "observe")  # before the work, not after it
    content = _Sheet(_prepare(maps[0])).draw() if suffix == ".png" else _page(maps)
    with whole(path) as part:
        part.write_bytes(content)
    return path


# --- What is drawn: without padding, pooled, with its axes ----------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
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


def _axis(each: AttentionMap, label: str, keep: Tensor, names: Sequence[str], *, timed: bool) -> _Axis:
    num, unit, stride = int(keep.sum()), _plain(each.unit, 16) if timed else "", each.stride if timed else 1
    kind = ("position", "index") if not timed else ("time step", "index") if unit == "step" else ("time", unit)
    label = label.format("token") if names else f"{label.format(kind[0])} ({kind[1]})"
    # The last patch of a signal may be partial.
    steps = num * stride if each.signal is None or not timed else len(each.signal)
    shown = tuple(_plain(names[position], 60) for position in keep.nonzero().flatten().tolist()) if names else ()
    return _Axis(label, num, -(-num // MOST_CELLS), stride, steps, float(each.interval) if timed else 1.0, unit, shown)


@dataclass(frozen=True)
class _Line:
    """The signal as it is drawn: point i of P stands `first + i * step` time steps after the start."""

    values_PX: Tensor  # NaN is a gap
    first: float
    step: float

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest value; 0 and 1 if there is none."""
        real = self.values_PX[~self.values_PX.isnan()]
        return (float(real.min()), float(real.max())) if len(real) else (0.0, 1.0)


def _thin(signal_TX: Tensor) -> _Line:
    """Return the signal, or, if it is longer than a screen is wide, the least and greatest value of equal runs."""
    values_TX = signal_TX.detach().cpu().double()
    values_TX = values_TX.masked_fill(~torch.isfinite(values_TX), math.nan)
    length, num_channels = values_TX.shape
    most = max(256, min(MOST_POINTS, 2**18 // num_channels))
    if length <= most:
        return _Line(values_TX, 0.0, 1.0)
    size = -(-2 * length // most)
    runs_PTX = F.pad(values_TX, (0, 0, 0, -length % size), value=math.nan).unflatten(0, (-1, size))
    gap = runs_PTX.isnan()
    least, greatest = runs_PTX.masked_fill(gap, math.inf).amin(1), runs_PTX.masked_fill(gap, -math.inf).amax(1)
    both_PX = torch.stack([least, greatest], dim=1).flatten(0, 1)
    return _Line(both_PX.masked_fill(both_PX.isinf(), math.nan), 0.25 * size - 0.5, 0.5 * size)


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
class _Picture:
    """One map, ready to be drawn."""

    title: str
    layers: list[list[Tensor]]  # each head's cells, float64
    averaged: list[bool]  # whether a layer's one map is the mean of its heads
    peaks: list[list[tuple[int, float]]]  # for each head, the key with the greatest mean weight, and that mean
    top: float  # the end of the colour scale
    label: str  # what a colour means
    query: _Axis
    key: _Axis
    line: _Line | None
    channel_names: tuple[str, ...]

    @property
    def columns(self) -> int:
        """How many heads stand beside each other; rows of a layer are filled evenly."""
        most = max(len(heads) for heads in self.layers)
        return -(-most // -(-most // MOST_COLUMNS))


def _prepare(each: AttentionMap) -> _Picture:
    num_queries, num_keys = each.weights[0].shape[-2:]
    keep_L, keep_S = _keep(each.query_padding_mask, num_queries), _keep(each.key_padding_mask, num_keys)
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
    if query.size > 1 or key.size > 1:
        label += f"; pooled: keys in a cell {key.size} (summed), queries {query.size} (averaged)"
    if any(bool((cell == 0).any()) for cell in cells):
        label += "; grey: exactly 0, as hidden keys have"
    return _Picture(
        title=_plain(" ".join(each.title.split()), 400),
        layers=layers,
        averaged=[weights.dim() == 2 for weights in each.weights],
        peaks=peaks,
        top=max(float(cell.max()) for cell in cells) or 1.0,
        label=label,
        query=query,
        key=key,
        line=None if each.signal is None else _thin(each.signal),
        channel_names=tuple(_plain(name, 60) for name in each.channel_names),
    )


def _plain(text: str, most: int) -> str:
    """Return text on one line that hides nothing: what does not print is spelled out, what is too long is cut."""
    joiners = "\u200c\u200d"  # they do not print, but shape the letters beside them
    letters = (c if c.isprintable() or c in joiners else c.encode("unicode_escape").decode() for c in text)
    text = "".join(letters)
    return text if len(text) <= most else f"{text[: most - 1]}…"


# --- The page -------------------------------------------------------------------------------------------------------


def _page(maps: Sequence[AttentionMap]) -> bytes:
    payloads: list[str] = []
    for each in maps:
        payloads.append(json.dumps(_payload(_prepare(each)), allow_nan=False, separators=(",", ":")))
        if sum(map(len, payloads)) > MOST_PAGE:
            rule = f"need at most {MOST_PAGE // 2**20} MiB in one page; give fewer samples, layers or heads at once"
            raise invalid("heatmap", "maps", rule, f"more in the first {len(payloads)} of {len(maps)}")
    data = f"[{','.join(payloads)}]"
    # Inside a script element only "<" can end or comment out anything; the rest is ASCII already.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = (resources.files("headwise.observe") / "heatmap.html").read_text("utf-8")
    before, after = template.split("@DATA@")
    return f"{before}{data}{after}".encode()


def _payload(picture: _Picture) -> dict[str, Any]:
    return vars(picture) | {
        "columns": picture.columns,
        "query": vars(picture.query),
        "key": vars(picture.key),
        "line": None if picture.line is None else _signal(picture.line),
        "layers": [[_codes(cells, picture.top) for cells in heads] for heads in picture.layers],
    }


def _codes(cells_LS: Tensor, top: float) -> str:
    """Return a byte for each cell: 0 for exactly 0, else `1 + 254 * sqrt(weight / top)`, rounded.

    The square root keeps small weights apart where one head has a sink near 1: the smallest step is top / 64,516.
    """
    codes_LS = 1 + (LEVELS * (cells_LS / top).sqrt()).round().clamp(max=LEVELS)
    codes_LS = codes_LS.masked_fill(cells_LS == 0, 0).to(torch.uint8)
    return base64.b64encode(bytes(codes_LS.flatten().tolist())).decode()


def _signal(line: _Line) -> dict[str, Any]:
    """Return the lines as 16-bit numbers from the least value (0) to the greatest (65,534); 65,535 is a gap."""
    low, high = line.range
    # Divided first: the difference of two great values may be no float.
    levels_XP = (line.values_PX.T / 2 - low / 2) / ((high / 2 - low / 2) or 1.0) * 65_534
    codes_XP = levels_XP.round().nan_to_num(65_535).to(torch.int64)
    channels = [b"".join(code.to_bytes(2, "little") for code in codes_P) for codes_P in codes_XP.tolist()]
    coded = [base64.b64encode(channel).decode() for channel in channels]
    return {"low": low, "high": high, "first": line.first, "step": line.step, "channels": coded}


# --- The PNG --------------------------------------------------------------------------------------------------------

# Fonts that come with systems and hold what matplotlib's own lacks.
MORE_FONTS = "Noto Sans CJK JP;Noto Sans CJK SC;Hiragino Sans;Yu Gothic;PingFang SC;Microsoft YaHei;Malgun Gothic"
MORE_FONTS += ";WenQuanYi Zen Hei;IPAexGothic;Droid Sans Fallback;Arial Unicode MS;Noto Sans;Segoe UI Symbol;Symbola"
FEW_HUES = ["#1f77b4", "#d9640a", "#2a9d46", "#c8293c", "#8250c4", "#8c564b", "#d450a6", "#5c6570"]
MANY_HUES = ("#0b3c8c", "#1f9e89", "#e8890c")
SIDEWAYS: dict[str, Any] = {"fontsize": 10, "rotation": 90, "va": "center", "ha": "left"}


class _Sheet:
    """A figure laid out in inches from its upper left corner, so that nothing overlaps whatever the numbers are.

    The object API alone: pyplot would keep the figure and pick a backend for the whole process.
    """

    def __init__(self, picture: _Picture) -> None:
        self.ticker, colors = need("matplotlib.ticker", "observe"), need("matplotlib.colors", "observe")
        families, self.squares = _letters(picture)
        # No text is read as mathematics or TeX.
        self.plain = {"parse_math": False, "usetex": False, "fontfamily": families}
        self.picture, columns, names = picture, picture.columns, picture.channel_names
        self.rows = [(layer, i) for layer, heads in enumerate(picture.layers) for i in range(0, len(heads), columns)]
        if len(self.rows) > MOST_ROWS:
            rule = f"need at most {MOST_ROWS} rows of panels in a PNG; give fewer layers or heads, or write .html"
            raise invalid("heatmap", "maps", rule, len(self.rows))
        self.panel_width, self.panel_height = _panel(picture.query, picture.key, columns)
        self.panel_height = max(self.panel_height, 1.5 / len(self.rows))  # room for the label beside them
        # Where rows do not hold the same heads, a title over the first row would be wrong for the others.
        kinds = set(zip(map(len, picture.layers), picture.averaged, strict=True))
        self.titled = len(self.rows) > len(picture.layers) or len(kinds) > 1
        self.pitch, self.gap_y = self.panel_width + 0.12, 0.3 if self.titled else 0.12
        # A few named channels are told apart by their names, others by their numbers.
        self.named = 1 < len(names) <= len(FEW_HUES) and names != tuple(str(1 + i) for i in range(len(names)))
        self.hues = colors.ListedColormap(FEW_HUES[: len(names)])
        if len(names) > 1 and not self.named:
            self.hues = colors.LinearSegmentedColormap.from_list("channels", MANY_HUES, N=len(names))
        self.shades = need("matplotlib", "observe").colormaps["magma_r"].with_extremes(bad="#c3c8d0")
        self.left = 0.7 + max(0.45, _width(picture.query.names, 12))
        self.right = max(1.35, 0.2 + _width(names, 18) if self.named else 0.0)
        self.maps_width = columns * self.pitch - 0.12
        self.maps_height = len(self.rows) * (self.panel_height + self.gap_y) - self.gap_y
        self.width = self.left + self.maps_width + self.right
        self.title = textwrap.wrap(picture.title, int(self.width / 0.115), max_lines=2, placeholder=" …")
        self.signal_top = 0.15 + 0.25 * len(self.title) + 0.27
        self.signal_height = max(1.1, min(1.6, 0.6 * self.panel_width), 0.17 * len(names) if self.named else 0.0)
        self.maps_top = self.signal_top + (0.0 if picture.line is None else self.signal_height + self.gap_y + 0.04)
        self.height = self.maps_top + self.maps_height + 0.4 + max(0.2, _width(picture.key.names, 12))
        self.figure = need("matplotlib.figure", "observe").Figure(figsize=(self.width, self.height), dpi=100)

    def draw(self) -> bytes:
        picture, center = self.picture, self.left + self.maps_width / 2
        for line, text in enumerate(self.title):
            self.write(self.width / 2, 0.3 + 0.25 * line, text, fontsize=13, ha="center")
        if picture.line is not None:
            self.draw_signals(picture.line, picture.channel_names)
        self.draw_maps()
        height, middle = min(6.0, self.maps_height), self.maps_top + self.maps_height / 2
        self.bar(middle - height / 2, height, self.shades, 256, (0.0, picture.top), picture.label)
        query = "\n".join(textwrap.wrap(picture.query.label, max(18, int(self.maps_height / 0.085))))
        self.write(0.07, middle, query, **SIDEWAYS, multialignment="center")
        self.write(center, self.height - 0.1, picture.key.label, fontsize=10, ha="center", va="bottom")
        content = io.BytesIO()
        self.figure.savefig(content, format="png", dpi=100)
        return content.getvalue()

    def write(self, x: float, y: float, text: str, **how: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text.translate(self.squares), **self.plain, **how)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.set_title("", y=1.0)  # a fixed place: looking for a free one took half of the time
        axes.tick_params(labelsize=8, grid_alpha=0.0)
        return axes

    def bar(self, y: float, height: float, hues: Any, number: int, ends: tuple[float, float], label: str) -> None:
        axes = self.axes(self.left + self.maps_width + 0.15, y, 0.16, height)
        axes.imshow([[i] for i in range(number)], hues, aspect="auto", origin="lower", extent=(0.0, 1.0, *ends))
        axes.yaxis.set(ticks_position="right", label_position="right")
        most = max(2, min(10, int(height / 0.2)))
        axes.yaxis.set_major_locator(self.ticker.MaxNLocator(most, integer=ends[0] > 0, min_n_ticks=1))
        axes.set_xticks([])
        axes.set_ylabel("\n".join(textwrap.wrap(label, max(20, int(height / 0.075)))), fontsize=9, **self.plain)

    def draw_signals(self, line: _Line, names: Sequence[str]) -> None:
        """Draw the signal above each column and say which line is which channel."""
        times_P = [(line.first + line.step * point) * self.picture.key.interval for point in range(len(line.values_PX))]
        channels = [list(zip(times_P, values_P, strict=True)) for values_P in line.values_PX.T.tolist()]
        if len(times_P) == 1:
            channels = [points * 2 for points in channels]  # a line of no length has round ends: a dot
        collections = need("matplotlib.collections", "observe")
        low, high = line.range
        margin = 0.05 * (high - low) or 0.1 * abs(high) or 0.5
        colors, width = [self.hues(channel) for channel in range(len(names))], 1.2 if len(names) <= 12 else 0.7
        for column in range(self.picture.columns):
            axes = self.axes(self.left + column * self.pitch, self.signal_top, self.panel_width, self.signal_height)
            lines = collections.LineCollection(channels, linewidths=width, colors=colors, capstyle="round")
            axes.add_collection(lines)
            axes.set(xlim=self.picture.key.ends, ylim=(low - margin, high + margin))
            self.tick(axes.xaxis, self.picture.key, self.panel_width, shown=False)
            axes.yaxis.set_major_locator(self.ticker.MaxNLocator(5) if column == 0 else self.ticker.NullLocator())
        x, y, middle = self.left + self.maps_width, self.signal_top, self.signal_top + self.signal_height / 2
        self.write(0.1, middle, _plain(names[0], 18) if len(names) == 1 and names[0] != "1" else "signal", **SIDEWAYS)
        if self.named:
            for i, name in enumerate(names):
                self.write(x + 0.12, y + 0.1 + 0.17 * i, _plain(name, 18), color=colors[i], fontsize=9, va="center")
        elif len(names) > 1:
            self.bar(y, self.signal_height, self.hues, len(names), (0.5, len(names) + 0.5), "channel")

    def draw_maps(self) -> None:
        picture, query, key = self.picture, self.picture.query, self.picture.key
        counts = [min(picture.columns, len(picture.layers[layer]) - first) for layer, first in self.rows]
        for row, (layer, first) in enumerate(self.rows):
            y = self.maps_top + row * (self.panel_height + self.gap_y)
            self.write(0.44, y + self.panel_height / 2, f"layer {layer + 1}", **SIDEWAYS)
            for column in range(counts[row]):
                cells_LS = picture.layers[layer][first + column]
                axes = self.axes(self.left + column * self.pitch, y, self.panel_width, self.panel_height)
                grid = cells_LS.masked_fill(cells_LS == 0, math.nan).numpy()
                extent = (key.ends[0], key.full, query.full, query.ends[0])
                look: dict[str, Any] = {"vmin": 0.0, "vmax": picture.top, "aspect": "auto", "origin": "upper"}
                axes.imshow(grid, self.shades, extent=extent, interpolation="nearest", **look)
                axes.set(xlim=key.ends, ylim=query.ends[::-1])  # cuts last cells that hold fewer positions than others
                title = "mean of heads" if picture.averaged[layer] else f"head {first + column + 1}"
                if self.titled or row == 0:
                    x, above = (
                        self.left + column * self.pitch + self.panel_width / 2,
                        y if self.titled else self.signal_top,
                    )
                    self.write(x, above - 0.07, title, fontsize=9, ha="center")
                self.tick(axes.yaxis, query, self.panel_height, shown=column == 0)
                lowest = all(column >= count for count in counts[row + 1 :])
                self.tick(axes.xaxis, key, self.panel_width, shown=lowest)

    def tick(self, axis: Any, side: _Axis, room: float, *, shown: bool) -> None:
        """Put ticks on one axis of a map: as many names as fit, where there are any; else round numbers."""
        across = axis.axis_name == "x"
        if not shown:
            axis.set_ticks([])
        elif side.names:
            step = -(-side.num // max(1, min(MOST_NAMES, int(room / 0.125))))
            starts = range(0, side.num * side.stride, step * side.stride)
            lasts = [min(start + side.stride, side.steps) - 1 for start in starts]
            middles = [0.5 * (start + last) * side.interval for start, last in zip(starts, lasts, strict=True)]
            names = [_plain(name, 12).translate(self.squares) for name in side.names[::step]]
            axis.set_ticks(middles, names, rotation=90 if across else 0, **self.plain)
        else:
            wide = 0.09 * len(f"{side.ends[1]:.0f}") + 0.25 if across else 0.3
            most, integer = max(1, min(8, int(room / wide))), side.unit in ("", "step")
            axis.set_major_locator(self.ticker.MaxNLocator(most, integer=integer, min_n_ticks=1))


def _panel(query: _Axis, key: _Axis, columns: int) -> tuple[float, float]:
    """Return a panel's width and height in inches: large if there are few, larger where that shows every name."""
    width = max(1.3, min(4.2, 12.0 / columns))
    height = max(0.9, width * max(0.4, min(1.0, query.num / key.num)))
    wide, high = (0.13 * len(side.names) * (len(side.names) <= MOST_NAMES) for side in (key, query))
    return max(width, wide * (columns * wide <= 18)), max(height, high * (columns * high <= 18))


def _width(names: Sequence[str], most: int) -> float:
    """Return the inches that the longest of these names takes, cut at `most` characters of 8 points."""
    return 0.1 + 0.08 * max((min(most, len(name)) for name in names), default=0)


def _letters(picture: _Picture) -> tuple[list[str], dict[int, str]]:
    """Return the font families to write with, and what to write for each letter that none of them has."""
    fonts = need("matplotlib.font_manager", "observe")

    def missing(letters: set[str], families: list[str]) -> set[str]:
        paths = [fonts.findfont(fonts.FontProperties(family=[family])) for family in families]
        return {c for c in letters if not any(fonts.get_font(path).get_char_index(ord(c)) for path in paths)}

    query, key = picture.query, picture.key
    texts = (picture.title, query.label, key.label, *query.names, *key.names, *picture.channel_names)
    families = list(fonts.FontProperties().get_family())
    lacking = missing(set("".join(texts)), families)
    if lacking:
        installed = {font.name for font in fonts.fontManager.ttflist}
        families += [family for family in MORE_FONTS.split(";") if family in installed]
        lacking = missing(lacking, families)
    return families, str.maketrans(dict.fromkeys(lacking, "?" if missing({"\u25a1"}, families) else "\u25a1"))
