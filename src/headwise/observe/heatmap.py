"""Attention weights as a picture: a PNG of one sample, or one self-contained page of several to flip through.

Letters: H heads, L queries, S keys, T time steps of the signal, X its channels, P points of a drawn line.
"""

from __future__ import annotations

import base64
import json
import operator
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise._checks import counted, invalid, kind_of, need
from headwise._files import whole
from headwise.observe.picture import GREATEST, Line, Picture, hues, keep, prepare
from headwise.observe.png import draw

MOST_PAGE = 64 * 2**20  # bytes of weights and signals in one page; a browser shows more, but slowly
LEVELS = 254  # codes of a stored weight above 0; code 0 is exactly 0
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
        title: what is shown; any text.
        signal: (T, X) floating, the series that was attended, without its padding. NaN and infinities leave gaps; other
            values are at most 1e100 in size.
        channel_names: one for each of the X channels. Left out: "1", "2" and so on.
        key_padding_mask: (S,) bool, True = padding, as the layer takes it: these columns are left out of the picture.
        query_padding_mask: (L,) bool, True = padding: these rows are left out. In self-attention, give the same mask
            twice; rows of padding mean nothing, but only the caller knows which they are.
        key_names: tokens, one for each of the S keys, those of padding included.
        query_names: tokens, one for each of the L queries, those of padding included.
        stride: time steps that one key covers: key j those in [j * stride, (j + 1) * stride), counted without padding;
            the last one may be partial. In self-attention (L == S and the same padding) a query covers as many.
        interval: the time from one step to the next, in `unit`; from 1e-100 to 1e100.
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
        object.__setattr__(self, "stride", _stride(self.stride))
        object.__setattr__(self, "interval", _interval(self.interval))
        if not isinstance(self.title, str) or not isinstance(self.unit, str):
            raise _wrong("title and unit", "be strings", reprlib.repr((self.title, self.unit)))
        if self.signal is not None:
            self._check_signal(self.signal)
        num_channels = 0 if self.signal is None else self.signal.shape[1]
        self._check_names("channel_names", num_channels, "channels of signal")
        self._check_names("key_names", num_keys, "keys, padding included")
        self._check_names("query_names", num_queries, "queries, padding included")
        if not self.channel_names:
            object.__setattr__(self, "channel_names", tuple(str(1 + channel) for channel in range(num_channels)))

    def __repr__(self) -> str:
        """Say what is in it, not all of it: a tensor's values would fill the screen."""
        num_queries, num_keys = self.weights[0].shape[-2:]
        heads = ("mean of heads" if each.dim() == 2 else counted(len(each), "head") for each in self.weights)
        parts = [counted(len(self.weights), "layer"), " or ".join(dict.fromkeys(heads))]
        parts.append(f"{counted(num_queries, 'query', 'queries')} x {counted(num_keys, 'key')}")
        if self.query_padding_mask is not None:
            parts.append(f"{counted(int(self.query_padding_mask.sum()), 'query', 'queries')} of padding")
        if self.key_padding_mask is not None:
            parts.append(f"{counted(int(self.key_padding_mask.sum()), 'key')} of padding")
        if self.signal is not None:
            parts.append(f"signal of {counted(len(self.signal), 'step')} x {counted(self.signal.shape[1], 'channel')}")
        title = f" {reprlib.repr(self.title)}" if self.title else ""
        return f"<AttentionMap{title}: {', '.join(parts)}>"

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
        num_keys = int(keep(self.key_padding_mask, self.weights[0].shape[-1]).sum())
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


def _check_weights(weights: Sequence[Tensor]) -> None:
    if not isinstance(weights, Sequence) or not weights or not all(isinstance(each, Tensor) for each in weights):
        raise _wrong("weights", "be a list of tensors, one for each of at least one layer", _kinds(weights))
    for layer, weight in enumerate(weights):
        name = f"weights[{layer}]"
        if not _held(weight):
            raise _wrong(name, "be dense and hold values", _kind(weight))
        if weight.dim() not in (2, 3) or 0 in weight.shape or not weight.is_floating_point():
            rule = "be floating with shape (H, L, S) or (L, S), none of them 0; of a batch, give one sample"
            raise _wrong(name, rule, _kind(weight))
        if weight.shape[-2:] != weights[0].shape[-2:]:
            rule = "have the L and S of the first layer; draw layers of other lengths by themselves"
            raise _wrong(name, rule, tuple(weight.shape), **{"weights[0]": weights[0]})
        values = weight.detach()
        low, high = map(float, (values if weight.dtype == torch.float64 else values.float()).aminmax())
        if not (low >= 0 and high <= GREATEST):  # NaN is neither
            rule = f"be finite and at least 0, at most {GREATEST:g}: weights after the softmax, not scores"
            raise _wrong(name, rule, f"values from {low:.4g} to {high:.4g}")


def _check_mask(name: str, mask: Tensor | None, number: int, things: str) -> None:
    if mask is None:
        return
    rule = f"be bool with one value for each of the {number} {things}, True = padding, and leave one at least"
    if not _held(mask):
        raise _wrong(name, f"be a tensor: {rule}", _kind(mask))
    if mask.dtype != torch.bool or mask.shape != (number,) or bool(mask.all()):
        raise _wrong(name, rule, f"{_kind(mask)} with {int(mask.sum())} of padding")


def heatmap(maps: AttentionMap | Sequence[AttentionMap], path: str | os.PathLike[str]) -> Path:
    """Draw attention weights: a `.png` of one map, or a `.html` page of one or more.

    Queries go down, keys to the right, a row a layer, a column a head; all heads share one colour scale, from 0 to the
    greatest weight shown, and the signal stands above each column on the same time axis. Padding is left out; weights
    that are exactly 0, as hidden keys have, are grey. Above 256 positions a side, equal runs of neighbours are drawn as
    one cell: the sum over its keys of the mean over its queries, so that rows keep their sum; the last run may be
    shorter. More than 12 heads take several rows.

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
    if suffix == ".png":
        need("matplotlib.figure", "observe")  # before the work, not after it
    content = draw(prepare(maps[0])) if suffix == ".png" else _page(maps)
    with whole(path) as part:
        part.write_bytes(content)
    return path


# --- The page -------------------------------------------------------------------------------------------------------


def _page(maps: Sequence[AttentionMap]) -> bytes:
    payloads: list[str] = []
    for each in maps:
        payloads.append(json.dumps(_payload(prepare(each)), allow_nan=False, separators=(",", ":")))
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
        "layers": [[_codes(cells, picture.top) for cells in heads] for heads in picture.layers],
    }


def _codes(cells_LS: Tensor, top: float) -> str:
    """Return a byte for each cell: 0 for exactly 0, else `1 + 254 * sqrt(weight / top)`, rounded.

    The square root keeps small weights apart where one head has a sink near 1: the smallest step is top / 64,516.
    """
    codes_LS = 1 + (LEVELS * (cells_LS / top).sqrt()).round().clamp(max=LEVELS)
    codes_LS = codes_LS.masked_fill(cells_LS == 0, 0).to(torch.uint8)
    return base64.b64encode(bytes(codes_LS.flatten().tolist())).decode()


def _signal(line: Line) -> dict[str, Any]:
    """Return the lines as 16-bit numbers from the least value (0) to the greatest (65,534); 65,535 is a gap."""
    low, high = line.range
    levels_XP = (line.values_PX.T - low) / ((high - low) or 1.0) * 65_534
    codes_XP = levels_XP.round().nan_to_num(65_535).to(torch.int64)
    channels = [b"".join(code.to_bytes(2, "little") for code in codes_P) for codes_P in codes_XP.tolist()]
    coded = [base64.b64encode(channel).decode() for channel in channels]
    ends = {"low": low, "high": high, "frame": line.frame}
    return ends | {"first": line.first, "step": line.step, "channels": coded}
