"""Attention weights as a picture: a PNG of one sample, or one self-contained page of several to flip through.

Letters: H heads, L queries, S keys, T time steps of the signal, X its channels, P points of a drawn line.
"""

from __future__ import annotations

import json
import math
import operator
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise._checks import at_least, counted, invalid, kind_of, need
from headwise._files import whole
from headwise.observe.picture import GREATEST, MOST_CELLS, Line, Picture, codes, grid_of, hues, keep, prepare, text_of
from headwise.observe.png import draw
from headwise.observe.snapshot import LiveMap

if TYPE_CHECKING:
    from headwise.observe.probes import PooledWeights

PAGE_CELLS = 3 * 2**17  # of all maps of a page, a byte each, where nobody says how many: 512 KiB of text
MOST_SIDE = 1024  # cells; a browser still draws as many heads as the page may hold
FEWEST_CELLS = 64  # a side, however many heads there are; fewer would show nothing
MOST_PAGE = 64 * 2**20  # bytes of weights and signals in one page; a browser shows more, but slowly
MOST_STRIDE = 2**31  # so that JavaScript, whose numbers are doubles, counts every time step

_wrong = partial(invalid, "AttentionMap")


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap:
    """What one sample's heads attended to, with what is needed to read it.

    Nothing is copied or changed here: tensors stay on their device, and may require gradients.

    Examples:
        A sentence of three tokens in a batch padded to four, of which `AttentionMap` takes one sample:

        >>> import torch
        >>> from headwise import AttentionMap
        >>> weights, padding = torch.full((2, 4, 4), 0.25), torch.tensor([False, False, False, True])
        >>> tokens = ["the", "cat", "sat", "<pad>"]
        >>> AttentionMap([weights], key_names=tokens, query_names=tokens, key_padding_mask=padding)
        <AttentionMap: 1 layer, 2 heads, 4 queries x 4 keys, 1 key of padding>

    Attributes:
        weights: one tensor for each layer, (H, L, S), or (L, S) if averaged over heads; floating, from 0 to 1e100. H
            may differ from layer to layer, L and S not. Rows need not sum to 1: the picture says what they sum to.
            Where they are pooled already, L and S are the cells of a side: see `AttentionMap.pooled`.
        title: what is shown; any text.
        signal: (T, X) floating, the series that was attended, without its padding. NaN and infinities leave gaps; other
            values are at most 1e100 in size.
        channel_names: one for each of the X channels. Left out: "1", "2" and so on.
        key_padding_mask: (S,) bool, True = padding, as the layer takes it: these columns are left out of the picture.
        query_padding_mask: (L,) bool, True = padding: these rows are left out. In self-attention, give the same mask
            twice; rows of padding mean nothing, but only the caller knows which they are.
        key_names: tokens, one for each of the keys, those of padding included; pooled or not, one for each position.
        query_names: tokens, one for each of the queries, those of padding included; of some rows, one for each row.
        stride: time steps that one key covers: key j those in [j * stride, (j + 1) * stride), counted without padding;
            the last one may be partial. In self-attention (L == S and the same padding) a query covers as many.
        interval: the time from one step to the next, in `unit`; from 1e-100 to 1e100.
        unit: of `interval`: "ms", or "step" where the time is not known. Without a signal, stride and interval, a
            "step" is a position.
        layer_names: one for each layer. Left out: "layer 0", "layer 1" and so on.
        notes: numbers to read beside each head, by what they are: for each layer, one for each of its heads. None or
            what is not finite: no number.
        query_positions: where the rows are some of the queries: their L positions, ascending.
        queries_a_cell: neighbouring queries that a row of the weights stands for; the last row may have fewer.
        keys_a_cell: neighbouring keys that a column stands for; the last one may have fewer.
        num_queries: positions of the queries. Left out: the rows of weights that are not pooled.
        num_keys: positions of the keys, likewise.
        peaks: of pooled weights, the greatest single weight in each cell, shaped as `weights`.

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
    layer_names: Sequence[str] = ()
    notes: Mapping[str, Sequence[Sequence[float | None]]] = field(default_factory=dict)
    query_positions: Sequence[int] = ()
    queries_a_cell: int = 1
    keys_a_cell: int = 1
    num_queries: int | None = None
    num_keys: int | None = None
    peaks: Sequence[Tensor] = ()

    @classmethod
    def pooled(
        cls, layers: Sequence[PooledWeights], *, num_queries: int, num_keys: int, sample: int = 0, **more: Any
    ) -> AttentionMap:
        """A map of weights that never existed one by one, so of any length.

        Args:
            layers: what `headwise.observe.probes.pooled_attention_weights` gave for each layer, all with the same
                positions and cells.
            num_queries: L of that call. Cut padding off before it; what follows is of the positions that are left.
            num_keys: S of that call, likewise.
            sample: which of the batch.
            more: as for the class, without masks of padding and what `layers` say.

        Raises:
            ValueError: as the class; there is no layer, or their cells are not of the same sizes; no such sample.

        Example:
            >>> import torch
            >>> from headwise import AttentionMap
            >>> from headwise.observe.probes import pooled_attention_weights
            >>> x = torch.randn(1, 2, 20_000, 4)
            >>> layer = pooled_attention_weights(x[:, :, ::200], x, cells=(100, 256))
            >>> AttentionMap.pooled([layer], num_queries=100, num_keys=20_000)
            <AttentionMap: 1 layer, 2 heads, 100 queries x 20000 keys in 100 x 254 cells>
        """
        sample = _check_pooled(layers, sample, more)
        sizes = {(layer.queries_a_cell, layer.keys_a_cell) for layer in layers}
        if len(sizes) != 1:
            rule = "be one at least, all with cells of the same size"
            raise invalid("AttentionMap.pooled", "layers", rule, f"queries and keys a cell {sorted(sizes)}")
        queries_a_cell, keys_a_cell = sizes.pop()
        cells: dict[str, Any] = {"queries_a_cell": queries_a_cell, "keys_a_cell": keys_a_cell}
        cells |= {"num_queries": num_queries, "num_keys": num_keys}
        return cls(
            [layer.mass[sample] for layer in layers], peaks=[layer.peak[sample] for layer in layers], **cells, **more
        )

    @classmethod
    def sampled(cls, live: LiveMap, **more: Any) -> AttentionMap:
        """The rows that a monitor looked at last, of one layer; each stands beside its real position."""
        _check_live(live, more)
        given: dict[str, Any] = {"query_positions": live.queries, "keys_a_cell": live.keys_a_cell}
        given |= {"num_queries": live.num_queries, "num_keys": live.num_keys}
        given |= {"query_names": live.query_names, "key_names": live.key_names}
        return cls([live.mass], **(given | more))

    def __post_init__(self) -> None:
        """Hold what the class promises, once, before anything is drawn."""
        _check_weights(self.weights)
        object.__setattr__(self, "weights", tuple(self.weights))
        object.__setattr__(self, "peaks", _peaks(self.peaks, self.weights))
        num_queries, num_keys = self._check_cells()
        object.__setattr__(self, "stride", _stride(self.stride))
        object.__setattr__(self, "interval", _interval(self.interval))
        num_rows = len(self.query_positions) or num_queries
        if not isinstance(self.title, str) or not isinstance(self.unit, str):
            raise _wrong("title and unit", "be strings", reprlib.repr((self.title, self.unit)))
        if self.signal is not None:
            self._check_signal(self.signal)
        num_channels = 0 if self.signal is None else self.signal.shape[1]
        self._check_names("channel_names", num_channels, "channels of signal")
        self._check_names("key_names", num_keys, "keys, padding included")
        self._check_names("query_names", num_rows, "rows" if self.query_positions else "queries, padding included")
        self._check_names("layer_names", len(self.weights), "layers")
        self._check_notes()
        if not self.channel_names:
            object.__setattr__(self, "channel_names", tuple(str(1 + channel) for channel in range(num_channels)))

    def __repr__(self) -> str:
        """Say what is in it, not all of it: a tensor's values would fill the screen."""
        rows, columns = self.weights[0].shape[-2:]
        heads = ("mean of heads" if each.dim() == 2 else counted(len(each), "head") for each in self.weights)
        parts = [counted(len(self.weights), "layer"), " or ".join(dict.fromkeys(heads))]
        some = f"{rows} of " if self.query_positions else ""
        size = f"{some}{counted(self.num_queries or 0, 'query', 'queries')} x {counted(self.num_keys or 0, 'key')}"
        parts.append(size + (f" in {rows} x {columns} cells" if self.queries_a_cell * self.keys_a_cell > 1 else ""))
        if self.query_padding_mask is not None:
            parts.append(f"{counted(int(self.query_padding_mask.sum()), 'query', 'queries')} of padding")
        if self.key_padding_mask is not None:
            parts.append(f"{counted(int(self.key_padding_mask.sum()), 'key')} of padding")
        if self.signal is not None:
            parts.append(f"signal of {counted(len(self.signal), 'step')} x {counted(self.signal.shape[1], 'channel')}")
        title = f" {reprlib.repr(self.title)}" if self.title else ""
        return f"<AttentionMap{title}: {', '.join(parts)}>"

    def _check_cells(self) -> tuple[int, int]:
        """Bring rows and columns together with the positions they stand for, and return how many these are."""
        rows, columns = self.weights[0].shape[-2:]
        object.__setattr__(self, "query_positions", _positions(self.query_positions, rows, self.num_queries))
        numbers = []
        for side, things, cells, mask in (
            ("query", "queries", rows, self.query_padding_mask),
            ("key", "keys", columns, self.key_padding_mask),
        ):
            size, name = _whole(f"{things}_a_cell", getattr(self, f"{things}_a_cell")), f"num_{things}"
            some = self.query_positions if side == "query" else ()
            number = getattr(self, name)
            if number is None and size == 1:
                number = 1 + some[-1] if some else cells
            number = _whole(name, number)
            if some and size > 1:
                raise _wrong("queries_a_cell", "be 1 where query_positions says which row is which", size)
            if not some and -(-number // size) != cells:
                rule = f"be positions of {counted(cells, 'cell')} with {size} in each, but for the last one"
                raise _wrong(name, rule, number, **{"weights[0]": self.weights[0]})
            if mask is not None and (size > 1 or some):
                rule = "be left out where rows or columns are no single positions; cut padding off before pooling"
                raise _wrong(f"{side}_padding_mask", rule, _kind(mask))
            _check_mask(f"{side}_padding_mask", mask, cells, things)
            object.__setattr__(self, f"{things}_a_cell", size)
            object.__setattr__(self, name, number)
            numbers.append(number)
        return numbers[0], numbers[1]

    def _check_notes(self) -> None:
        rule = "be a mapping from a text to a list for each layer, of a number or None for each head"
        if not isinstance(self.notes, Mapping) or not all(isinstance(name, str) for name in self.notes):
            raise _wrong("notes", rule, _kind(self.notes))
        heads = [1 if each.dim() == 2 else len(each) for each in self.weights]
        found = {}
        for name, layers in self.notes.items():
            try:
                read = tuple(tuple(None if each is None else float(each) for each in layer) for layer in layers)
            except (TypeError, ValueError, RuntimeError):
                raise _wrong("notes", rule, f"{reprlib.repr(name)}: {reprlib.repr(layers)}") from None
            if [len(layer) for layer in read] != heads:
                raise _wrong(
                    "notes", f"{rule}, here {heads}", f"{reprlib.repr(name)} of {[len(layer) for layer in read]}"
                )
            found[name] = tuple(
                tuple(None if each is None or not math.isfinite(each) else each for each in layer) for layer in read
            )
        object.__setattr__(self, "notes", found)

    def _check_signal(self, signal: Tensor) -> None:
        if not _held(signal):
            rule = "be a dense tensor that holds values; torch.as_tensor takes an array or a list"
            raise _wrong("signal", rule, _kind(signal))
        if signal.dim() != 2 or not signal.is_floating_point() or 0 in signal.shape:
            rule = "be floating with shape (T, X), a time step and a channel at least"
            raise _wrong("signal", rule, _kind(signal))
        # No other dtype reaches as far.
        if signal.dtype == torch.float64 and bool((signal.isfinite() & (signal.detach().abs() > GREATEST)).any()):
            rule = f"be at most {GREATEST:g} in size, or NaN where there is no value"
            raise _wrong("signal", rule, f"{float(signal.detach().nan_to_num(0, 0, 0).abs().max()):.4g}")
        num_keys = int(keep(self.key_padding_mask, self.num_keys or 0).sum())
        if -(-len(signal) // self.stride) != num_keys:
            rule = f"have ceil(T / stride) = {num_keys}, the number of keys that are not padding"
            got = f"T = {len(signal)} with stride {self.stride}; cut keys that are no time step off the weights first"
            raise _wrong("signal", rule, got, weights=self.weights[0], key_padding_mask=self.key_padding_mask)

    def _check_names(self, attribute: str, number: int, things: str) -> None:
        given = getattr(self, attribute)
        unordered = isinstance(given, str | bytes | Tensor | Mapping | Set) or not isinstance(given, Iterable)
        names = () if unordered else tuple(given)
        if unordered or not all(isinstance(name, str) for name in names):
            got = _kind(given) if isinstance(given, Tensor) else reprlib.repr(given)
            raise _wrong(attribute, f"be a sequence of strings, one for each of the {things}", got)
        if len(names) not in (0, number):
            raise _wrong(attribute, f"be one for each of the {number} {things}", len(names))
        object.__setattr__(self, attribute, names)


def _held(value: object) -> bool:
    """Whether this is a tensor whose values can be read as a grid: not sparse, nested or on the meta device."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and not value.is_nested


def _kind(value: object) -> str:
    """What came, in words: never a tensor's values."""
    if _held(value) or not isinstance(value, Tensor):
        return kind_of(value)
    if value.is_nested:  # it has no shape
        return f"a nested tensor of {value.dtype}"
    return f"{kind_of(value)}, {value.layout} on {value.device}"


def _kinds(value: object) -> str:
    """What came where a sequence of tensors or maps belongs."""
    if not isinstance(value, list | tuple):
        return _kind(value)
    return f"[{', '.join(map(_kind, value[:4]))}{', ...' if len(value) > 4 else ''}]"


def _stride(given: Any) -> int:
    try:
        stride = 0 if isinstance(given, bool) else operator.index(given)
    except (TypeError, RuntimeError):  # of a tensor, the second
        stride = 0
    if not 1 <= stride <= MOST_STRIDE:
        raise _wrong("stride", "be an integer of at least 1 and at most 2**31", _number(given))
    return stride


def _interval(given: Any) -> float:
    try:
        interval = 0.0 if isinstance(given, bool | str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        interval = 0.0
    if not 1 / GREATEST <= interval <= GREATEST:
        rule = f"be a number above 0 and finite, from {1 / GREATEST:g} to {GREATEST:g}"
        raise _wrong("interval", rule, _number(given))
    return interval


def _number(given: object) -> str:
    return _kind(given) if isinstance(given, Tensor) else reprlib.repr(given)


def _whole(name: str, given: Any) -> int:
    try:
        number = 0 if isinstance(given, bool) else operator.index(given)
    except (TypeError, RuntimeError):
        number = 0
    if number < 1:
        rule = "be an integer of at least 1" + (", of pooled weights always given" if name.startswith("num_") else "")
        raise _wrong(name, rule, _number(given))
    return number


def _positions(given: Any, rows: int, number: Any) -> tuple[int, ...]:
    rule = f"be the positions of the {counted(rows, 'row')}, whole numbers from 0 on, ascending, below num_queries"
    try:
        found = tuple(operator.index(each) for each in given)
    except (TypeError, RuntimeError):
        raise _wrong("query_positions", rule, _number(given)) from None
    if found and (len(found) != rows or found[0] < 0 or any(b <= a for a, b in pairwise(found))):
        raise _wrong("query_positions", rule, reprlib.repr(found))
    if found and number is not None and found[-1] >= _whole("num_queries", number):
        raise _wrong("query_positions", rule, f"{found[-1]} of {number}")
    return found


def _check_weights(weights: Sequence[Tensor], attribute: str = "weights") -> None:
    if not isinstance(weights, Sequence) or not weights or not all(isinstance(each, Tensor) for each in weights):
        raise _wrong(attribute, "be a list of tensors, one for each of at least one layer", _kinds(weights))
    for layer, weight in enumerate(weights):
        name = f"{attribute}[{layer}]"
        if not _held(weight):
            raise _wrong(name, "be dense and hold values", _kind(weight))
        if weight.dim() not in (2, 3) or 0 in weight.shape or not weight.is_floating_point():
            rule = "be floating with shape (H, L, S) or (L, S), none of them 0; of a batch, give one sample"
            raise _wrong(name, rule, _kind(weight))
        if weight.shape[-2:] != weights[0].shape[-2:]:
            rule = "have the L and S of the first layer; draw layers of other lengths by themselves"
            raise _wrong(name, rule, tuple(weight.shape), **{f"{attribute}[0]": weights[0]})
        values = weight.detach()
        low, high = map(float, (values if weight.dtype == torch.float64 else values.float()).aminmax())
        if not (low >= 0 and high <= GREATEST):  # NaN is neither
            rule = f"be finite and at least 0, at most {GREATEST:g}: weights after the softmax, not scores"
            raise _wrong(name, rule, f"values from {low:.4g} to {high:.4g}")


def _check_pooled(layers: Sequence[PooledWeights], sample: object, more: Mapping[str, object]) -> int:
    from headwise.observe.probes import PooledWeights

    wrong = partial(invalid, "AttentionMap.pooled")
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(each, PooledWeights) for each in layers):
        raise wrong("layers", "be a sequence of PooledWeights, one for each of at least one layer", _kinds(layers))
    said = sorted({"weights", "peaks", "queries_a_cell", "keys_a_cell"}.intersection(more))
    if said:
        raise wrong("more", "leave to layers what they say", ", ".join(said))
    number, size = at_least(0, "AttentionMap.pooled", "sample", sample), min(len(layer.mass) for layer in layers)
    if number >= size:
        raise wrong("sample", f"be one of the batch, in 0 .. {size - 1}", number)
    return number


def _check_live(live: object, more: Mapping[str, object]) -> None:
    if not isinstance(live, LiveMap) or "weights" in more:
        got = _kind(live) if not isinstance(live, LiveMap) else "weights beside it"
        rule = "be a LiveMap, such as snapshot.layers[0].live of a layer that was looked at, and alone"
        raise invalid("AttentionMap.sampled", "live", rule, got)


def _peaks(peaks: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not isinstance(peaks, Sequence) or not all(isinstance(each, Tensor) for each in peaks):
        raise _wrong("peaks", "be a list of tensors, one for each layer", _kinds(peaks))
    if peaks:
        _check_weights(peaks, "peaks")
        if [each.shape for each in peaks] != [each.shape for each in weights]:
            rule = "be shaped as weights are, layer by layer"
            raise _wrong("peaks", rule, _kinds(list(peaks)), **{"weights[0]": weights[0]})
    return tuple(peaks)


def _check_mask(name: str, mask: Tensor | None, number: int, things: str) -> None:
    if mask is None:
        return
    rule = f"be bool with one value for each of the {number} {things}, True = padding, and leave one at least"
    if not _held(mask):
        raise _wrong(name, f"be a tensor: {rule}", _kind(mask))
    if mask.dtype != torch.bool or mask.shape != (number,) or bool(mask.all()):
        raise _wrong(name, rule, f"{_kind(mask)} with {int(mask.sum())} of padding")


def heatmap(
    maps: AttentionMap | Sequence[AttentionMap], path: str | os.PathLike[str], *, cells: int | None = None
) -> Path:
    """Draw attention weights: a `.png` of one map, or a `.html` page of one or more.

    Queries go down, keys to the right, a row a layer, a column a head; all heads share one colour scale, from 0 to the
    greatest weight shown, and the signal stands above each column on the same time axis. Padding is left out; weights
    that are exactly 0, as hidden keys have, are grey. Above 256 positions a side, equal runs of neighbours are drawn as
    one cell: the sum over its keys of the mean over its queries, so that rows keep their sum; the last run may be
    shorter. More than 12 heads take several rows.

    In the page, a click on a head enlarges it; there one flips through layers and heads by buttons or arrow keys, and
    zooms by dragging, the wheel or + and -. Where cells are pooled, it shows the greatest single weight of each on
    demand: a column one key wide does not vanish. With many heads, cells are pooled further, down to 64 a side: a page
    stays below 600 KiB beside its signals up to 96 maps (of pooled weights, 48 heads), then adds 5.5 KiB a map.

    The page needs no network, no server and no matplotlib. It keeps each drawn weight in a byte, as its square root:
    weights come back to within 1/254 of the map's greatest, small ones far closer; hovering shows how close. Where one
    head washes the others out, its log scale helps.

    A PNG looks the same whatever the user's matplotlib settings are: while one is drawn, about a second, matplotlib's
    own defaults stand in for the process's `rcParams`. PNGs wait for each other; another thread that draws with
    matplotlib at that moment, or sets `rcParams`, meets the defaults or loses the setting. The page is free of this.

    Args:
        maps: what to draw. Texts in it may be anything: they are never read as markup or mathematics. In a PNG, long
            ones are cut and characters without a glyph become squares; the page shows them.
        path: the file to write, by its suffix a picture or a page. It appears whole or not at all.
        cells: at most so many a side, from 1 to 1,024. Left out: 256, in a page fewer where there are many heads.

    Returns:
        `path`, as a `Path`.

    Raises:
        ImportError: a PNG without matplotlib; nothing was written.
        OSError: the file could not be written; what stood there before still does.
        ValueError: there is no map, or several for a PNG; the suffix is another or the folder does not exist; a PNG
            would need more than 32 rows of panels; a page would hold more than 64 MiB; `cells` is out of range.

    Cost: one head's weights at a time on the CPU, in float64. A PNG of 2 x 4 heads takes about a second, one of
    12 x 12 about five.
    """
    given = maps
    maps = (maps,) if isinstance(maps, AttentionMap) else maps
    maps = tuple(maps) if isinstance(maps, Iterable) and not isinstance(maps, Tensor) else ()
    if not maps or not all(isinstance(each, AttentionMap) for each in maps):
        got = _kinds(given if isinstance(given, Tensor) or not maps else maps)
        raise invalid("heatmap", "maps", "be an AttentionMap, or a sequence of one at least", got)
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise invalid("heatmap", "path", "be a string or a path that ends in .png or .html", type(path).__name__)
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".png", ".html"):
        raise invalid("heatmap", "path", "end in .png or .html", path)
    if not path.parent.is_dir() or path.is_dir():
        raise invalid("heatmap", "path", "name a file in a folder that exists", path)
    if suffix == ".png" and len(maps) > 1:
        raise invalid("heatmap", "maps", "be one for a PNG; write .html to flip through several", len(maps))
    if cells is not None and not (type(cells) is int and 1 <= cells <= MOST_SIDE):
        raise invalid("heatmap", "cells", f"be an int from 1 to {MOST_SIDE}, or None", reprlib.repr(cells))
    if suffix == ".png":
        need("matplotlib.figure", "observe")  # before the work, not after it
    content = draw(prepare(maps[0], cells or MOST_CELLS)) if suffix == ".png" else _page(maps, cells or _side(maps))
    with whole(path) as part:
        part.write_bytes(content)
    return path


# --- The page -------------------------------------------------------------------------------------------------------


def _side(maps: Sequence[AttentionMap]) -> int:
    """Return the most cells a side, 256 or fewer, with which a page of these maps stays small."""
    for side in range(MOST_CELLS, FEWEST_CELLS, -1):
        total = 0
        for each in maps:
            heads = sum(1 if weights.dim() == 2 else len(weights) for weights in each.weights)
            grid = grid_of(each, side)
            total += heads * grid.rows * grid.columns * (2 if grid.peaks else 1)
        if total <= PAGE_CELLS:
            return side
    return FEWEST_CELLS


def _page(maps: Sequence[AttentionMap], cells: int) -> bytes:
    payloads: list[str] = []
    for each in maps:
        payloads.append(json.dumps(_payload(prepare(each, cells)), allow_nan=False, separators=(",", ":")))
        if sum(map(len, payloads)) > MOST_PAGE:
            rule = f"need at most {MOST_PAGE // 2**20} MiB in one page; give fewer samples, layers or heads at once"
            raise invalid("heatmap", "maps", rule, f"more in the first {len(payloads)} of {len(maps)}")
    data = f"[{','.join(payloads)}]"
    # Inside a script element only "<" can end or comment out anything; the rest is ASCII already.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = (resources.files("headwise.observe") / "heatmap.html").read_text("utf-8")
    before, after = template.split("@DATA@")
    return f"{before}{data}{after}".encode()


def _payload(picture: Picture) -> dict[str, Any]:
    return vars(picture) | {
        "columns": picture.columns,
        "hues": [hues(len(picture.channel_names), dark=dark) for dark in (False, True)],
        "query": vars(picture.query),
        "key": vars(picture.key),
        "line": None if picture.line is None else _signal(picture.line),
        "layers": [[text_of(codes(cells, picture.top)) for cells in heads] for heads in picture.layers],
        "greatest": [[text_of(codes(cells, picture.greatest_top)) for cells in heads] for heads in picture.greatest],
    }


def _signal(line: Line) -> dict[str, Any]:
    """Return the lines as 16-bit numbers from the least value (0) to the greatest (65,534); 65,535 is a gap."""
    low, high = line.range
    levels_XP = (line.values_PX.T - low) / ((high - low) or 1.0) * 65_534
    codes_XP = levels_XP.round().nan_to_num(65_535).to(torch.int64)
    channels = [b"".join(code.to_bytes(2, "little") for code in codes_P) for codes_P in codes_XP.tolist()]
    coded = [text_of(channel) for channel in channels]
    ends = {"low": low, "high": high, "frame": line.frame}
    return ends | {"first": line.first, "step": line.step, "channels": coded}
