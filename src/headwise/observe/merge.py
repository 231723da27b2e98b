"""One snapshot of several: what heads do over a whole file, where a monitor's readings are of the last minute."""

from __future__ import annotations

import collections
import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence

from headwise._checks import class_of, invalid
from headwise.observe.snapshot import STATISTICS, HeadReading, Histogram, LayerReading, Snapshot

__all__ = ["merged"]


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Sum counts and times, and average the readings of heads.

    Args:
        snapshots: of one model, one at least. Each was taken by a monitor of its own, or counts would count twice.

    Returns:
        A snapshot whose means are over all rows: each snapshot weighs as many as it looked at. `max_logit` is the
        greatest; time, budget and live maps are the last one's.

    Raises:
        ValueError: there is none, they are no snapshots, or not of the same layers.
    """
    if not isinstance(snapshots, Sequence) or not all(isinstance(each, Snapshot) for each in snapshots):
        rule, listed = (
            "be a sequence of Snapshots, as monitor.snapshot() gives them",
            isinstance(snapshots, list | tuple),
        )
        got = reprlib.repr([class_of(each) for each in snapshots]) if listed else class_of(snapshots)
        raise invalid("merged", "snapshots", rule, got)
    if not snapshots:
        raise invalid("merged", "snapshots", "be one at least", "none")
    places = {tuple((layer.name, len(layer.heads)) for layer in snapshot.layers) for snapshot in snapshots}
    if len(places) > 1:
        raise invalid("merged", "snapshots", "be of the same layers and heads", f"{len(places)} different models")
    return dataclasses.replace(
        snapshots[-1],
        forwards=sum(each.forwards for each in snapshots),
        observed=sum(each.observed for each in snapshots),
        skipped=_counted(each.skipped for each in snapshots),
        errors=_counted(each.errors for each in snapshots),
        forward_seconds=sum(each.forward_seconds for each in snapshots),
        observer_seconds=sum(each.observer_seconds for each in snapshots),
        observer_duration=_histogram([each.observer_duration for each in snapshots]),
        interval=None,
        layers=tuple(map(_layer, zip(*(each.layers for each in snapshots), strict=True))),
    )


def _layer(readings: tuple[LayerReading, ...]) -> LayerReading:
    seen = [reading for reading in readings if reading.at is not None] or [readings[-1]]
    rows = [reading.rows for reading in seen]
    return dataclasses.replace(
        seen[-1],
        heads=tuple(_head(heads, rows) for heads in zip(*(reading.heads for reading in seen), strict=True)),
        distance_ratio=_mean([reading.distance_ratio for reading in seen], rows),
        observed=sum(reading.observed for reading in seen),
        rows=sum(rows),
        fully_masked=sum(reading.fully_masked for reading in seen),
        nonfinite=sum(reading.nonfinite for reading in seen),
        row_entropy=_histogram([reading.row_entropy for reading in seen]),
        queries=_histogram([reading.queries for reading in seen]),
        keys=_histogram([reading.keys for reading in seen]),
    )


def _head(readings: tuple[HeadReading, ...], rows: list[int]) -> HeadReading:
    columns = {name: [getattr(reading, name) for reading in readings] for name in STATISTICS}
    greatest = max((logit for logit in columns.pop("max_logit") if logit is not None), default=None)
    return HeadReading(max_logit=greatest, **{name: _mean(column, rows) for name, column in columns.items()})


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _counted(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _histogram(parts: Sequence[Histogram]) -> Histogram:
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return Histogram(parts[0].bounds, counts, sum(part.total for part in parts))
