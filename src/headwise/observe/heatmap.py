"""Attention weights as a picture: a PNG of one sample, or one self-contained page of several to flip through.

Letters: H heads, L queries, S keys, T time steps of the signal, X its channels, P points of a drawn line.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise._checks import invalid, need
from headwise._files import whole
from headwise.observe.picture import Line, Picture, keep, prepare
from headwise.observe.png import Sheet

MOST_PAGE = 64 * 2**20  # bytes of weights and signals in one page; a browser shows more, but slowly
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
        num_keys = int(keep(self.key_padding_mask, self.weights[0].shape[-1]).sum())
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
    content = Sheet(prepare(maps[0])).draw() if suffix == ".png" else _page(maps)
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
    # Divided first: the difference of two great values may be no float.
    levels_XP = (line.values_PX.T / 2 - low / 2) / ((high / 2 - low / 2) or 1.0) * 65_534
    codes_XP = levels_XP.round().nan_to_num(65_535).to(torch.int64)
    channels = [b"".join(code.to_bytes(2, "little") for code in codes_P) for codes_P in codes_XP.tolist()]
    coded = [base64.b64encode(channel).decode() for channel in channels]
    return {"low": low, "high": high, "first": line.first, "step": line.step, "channels": coded}
