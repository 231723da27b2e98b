"""What a monitor has seen so far, as plain numbers: a table to print, a dict, and the source of every metric and page.

Letters: H query heads, R rows that were looked at, m cells of neighbouring keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headwise._checks import counted
from headwise.observe.picture import plain

__all__ = ["HeadReading", "Histogram", "LayerReading", "LiveMap", "Snapshot"]

STATISTICS = ("entropy_ratio", "effective_keys", "max_logit", "peak", "sink", "distance", "spread")


@dataclass(frozen=True)
class Histogram:
    """How often values fell below bounds.

    Attributes:
        bounds: upper ends of the buckets, ascending, without the last one, which has no end.
        counts: values in each bucket, the last one's too: one more than bounds; not cumulated.
        total: the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class HeadReading:
    """One head, averaged over the rows that were looked at lately (at most 60 s, the last one at least).

    None: no such row.

    Attributes:
        entropy_ratio: entropy of the weights over log(visible keys), 0 (one key) to 1 (all alike), rows of two keys on.
        effective_keys: exp(entropy).
        max_logit: the greatest scaled, biased and capped score of these rows; of all rows it may be greater.
        peak: the greatest weight of a row.
        sink: the weight of a row's first 4 visible keys, and of a learned sink, beyond that of even weights: 0 as
            much, 1 all of it, negative less; rows of more than 8 keys.
        distance: the mean of |key - query| in positions, self-attention only.
        spread: the standard deviation of the key position, in positions.
    """

    entropy_ratio: float | None
    effective_keys: float | None
    max_logit: float | None
    peak: float | None
    sink: float | None
    distance: float | None
    spread: float | None


@dataclass(frozen=True)
class LiveMap:
    """Some rows of one sample, as they were attended.

    Attributes:
        sample: which of its batch.
        queries: (R,) their positions, ascending, padding not counted.
        num_queries: real positions of that sample.
        num_keys: likewise.
        keys_a_cell: the last cell may have fewer.
        mass: (H, R, m) float32, on the CPU: the weight that falls into each cell.
        query_names: R tokens, or none.
        key_names: num_keys tokens, or none.
    """

    sample: int
    queries: tuple[int, ...]
    num_queries: int
    num_keys: int
    keys_a_cell: int
    mass: torch.Tensor
    query_names: tuple[str, ...] = ()
    key_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerReading:
    """One attention of the model.

    Attributes:
        index: its number, in the order of `model.named_modules()`.
        name: its dotted name in the model.
        kind: "self", "cross", or "" before it was looked at.
        heads: one for each of its H.
        distance_ratio: mean distance over visible keys, self-attention only.
        observed: forward passes in which it was looked at.
        rows: rows of queries that were looked at, all heads of a query being one.
        fully_masked: of these (queries, whatever the head), those with a head that sees no key.
        nonfinite: of these, those with a score that is NaN or +inf.
        at: when last, seconds since 1970; None: never.
        row_entropy: entropy ratios of single rows and heads, 64 a look at most.
        queries: real positions of the samples looked at.
        keys: likewise.
        live: the last rows.
        baseline: the heads as they were when `Monitor.baseline` was called, or none.
    """

    index: int
    name: str
    kind: str
    heads: tuple[HeadReading, ...]
    distance_ratio: float | None
    observed: int
    rows: int
    fully_masked: int
    nonfinite: int
    at: float | None
    row_entropy: Histogram
    queries: Histogram
    keys: Histogram
    live: LiveMap | None
    baseline: tuple[HeadReading, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A monitor's state at one moment. `print(snapshot)` gives a table, `snapshot.as_dict()` the same as JSON's types.

    Attributes:
        model: the name given to `watch`.
        time: when it was taken, seconds since 1970.
        forwards: passes of the model, of which
        observed: passes in which a layer was looked at.
        skipped: what could not be seen or shown, by reason: "compiled", "unsupported", "empty", "replaced" (the model
            holds another module there), "tokens" (texts of another batch).
        errors: exceptions of the observer, which the model never sees, by the exception's class.
        budget: share of the forwards' time that observing may take; inf, and None in `as_dict`: there is no limit.
        forward_seconds: time of all forwards, without the observer's.
        observer_seconds: time of the observer.
        observer_duration: histogram of the observer's seconds in an observed pass.
        interval: forwards from one observed pass to the next, lately; None: fewer than two.
        layers: one for each attention.
    """

    model: str
    time: float
    forwards: int
    observed: int
    skipped: Mapping[str, int]
    errors: Mapping[str, int]
    budget: float
    forward_seconds: float
    observer_seconds: float
    observer_duration: Histogram
    interval: float | None
    layers: tuple[LayerReading, ...]

    @property
    def overhead(self) -> float | None:
        """The observer's time over the forwards'; None before the first."""
        return self.observer_seconds / self.forward_seconds if self.forward_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """The same in dicts, lists, numbers, strings and None, without the maps."""
        layers = [_plain(layer, "live") for layer in self.layers]
        return {**_plain(self, "layers"), "overhead": self.overhead, "layers": layers}

    def __str__(self) -> str:
        """A row a head, and what was not seen, in words."""
        share = "-" if self.overhead is None else f"{self.overhead:.2%}"
        seen = f"{plain(self.model, _MOST)}: {counted(self.forwards, 'forward')}, {self.observed} observed"
        budget = f"budget {self.budget:.2%}" if math.isfinite(self.budget) else "no budget"
        lines = [f"{seen}, observer {share} of their time ({budget})"]
        rows: list[tuple[str, ...]] = [_COLUMNS]
        rows += [_row(layer, number, head) for layer in self.layers for number, head in enumerate(layer.heads)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (
                text.ljust(width) if at < 3 else text.rjust(width)
                for at, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines + self._remarks())

    def _remarks(self) -> list[str]:
        said = []
        for layer in self.layers:
            for number, what in ((layer.fully_masked, "saw no key"), (layer.nonfinite, "had a NaN or +inf score")):
                if number:
                    said.append(f"{_named(layer)}: {counted(number, 'query', 'queries')} of {layer.rows} {what}")
        blind = [_named(layer) for layer in self.layers if layer.at is None]
        if not self.forwards:
            said.append("no forward yet: call the model itself, model(...), since a method of it is not seen")
        elif blind:
            said.append(f"not looked at yet: {', '.join(blind)}")
        for counts, what in ((self.skipped, "call not looked at"), (self.errors, "error of the observer")):
            noun, _, rest = what.partition(" ")
            said += [f"{counted(number, noun)} {rest}: {plain(reason, _MOST)}" for reason, number in counts.items()]
        return said


_COLUMNS = ("layer", "kind", "head", "entropy", "keys", "max logit", "peak", "sink", "distance", "spread")
_MOST = 60  # letters of a name in the table


def _named(layer: LayerReading) -> str:
    """For the table: dotted names differ at their ends."""
    text = plain(layer.name, 10**6)
    return text if len(text) <= _MOST else f"…{text[1 - _MOST :]}"


def _row(layer: LayerReading, number: int, head: HeadReading) -> tuple[str, ...]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def size(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    return (
        _named(layer),
        layer.kind or "-",
        str(number),
        share(head.entropy_ratio),
        size(head.effective_keys),
        size(head.max_logit),
        share(head.peak),
        share(head.sink),
        size(head.distance),
        size(head.spread),
    )


def _plain(value: Any, *without: str) -> dict[str, Any]:
    fields = (field.name for field in dataclasses.fields(value) if field.name not in without)
    return {name: _json(getattr(value, name)) for name in fields}


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(value)
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
