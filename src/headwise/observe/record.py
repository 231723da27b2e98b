"""What a monitor knows: counts and late readings of each layer, under one lock.

Letters: H query heads, R rows that are looked at.
"""

from __future__ import annotations

import bisect
import collections
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from headwise._checks import invalid
from headwise.observe.budget import Budget
from headwise.observe.drift import read_baseline
from headwise.observe.finding import Layer
from headwise.observe.snapshot import STATISTICS, HeadReading, Histogram, LayerReading, LiveMap, Snapshot

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
LENGTHS = tuple(float(2**power) for power in range(4, 19))
MAX_LOGIT = STATISTICS.index("max_logit")
_WINDOW = 60.0  # seconds that a reading goes back
_TRIES = 4  # to see a layer for the first time, whatever the budget
_KEPT = 16  # looks that a reading is a mean of, at most


class Counts:
    """A histogram that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def read(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.total)


class Taken(NamedTuple):
    """What a look brought.

    Attributes:
        layer: a record of it.
        kind: "self" or "cross".
        values: means over rows, by statistic and head.
        distance_ratio: mean distance over visible keys; NaN where that means nothing.
        row_ratios: entropy ratios of some rows and heads.
        rows: R.
        fully_masked: of them.
        nonfinite: of them.
        live: the rows.
    """

    layer: LayerRecord
    kind: str
    values: list[list[float]]
    distance_ratio: float
    row_ratios: list[float]
    rows: int
    fully_masked: int
    nonfinite: int
    live: LiveMap


class LayerRecord:
    """What is known of a layer."""

    def __init__(self, layer: Layer) -> None:
        self.layer: Layer | None = layer  # None once the monitor is closed, so that the model can go
        self.index, self.name, self.num_heads, self.kind = layer.index, layer.name, layer.heads, ""
        self.looks: collections.deque[tuple[float, list[list[float]], float]] = collections.deque(maxlen=_KEPT)
        self.observed = self.rows = self.fully_masked = self.nonfinite = 0
        self.at: float | None = None
        self.turn = 0  # of which pass the last look was
        self.scores = 0.0  # of its last look
        self.tried = self.tries = 0  # in which pass it was due last, whatever came of it, and how often
        self.ratios, self.queries, self.keys = Counts(RATIOS), Counts(LENGTHS), Counts(LENGTHS)
        self.live: LiveMap | None = None
        self.baseline: tuple[HeadReading, ...] = ()

    def keep(self, taken: Taken, turn: int, at: float) -> None:
        """Add a look in the forward of this number, at this time."""
        self.observed += self.turn != turn
        self.turn, self.kind, self.at, self.live = turn, taken.kind, at, taken.live
        self.rows += taken.rows
        self.fully_masked += taken.fully_masked
        self.nonfinite += taken.nonfinite
        self.looks.append((at, taken.values, taken.distance_ratio))
        for ratio in taken.row_ratios:
            self.ratios.add(ratio)
        self.queries.add(taken.live.num_queries)
        self.keys.add(taken.live.num_keys)

    def late(self, now: float) -> list[tuple[list[list[float]], float]]:
        """Looks that a reading is of: those of the last minute, the last one at least."""
        heads = len(self.looks[-1][1][0]) if self.looks else 0  # a layer may have lost or got some
        late = [(values, ratio) for at, values, ratio in self.looks if now - at <= _WINDOW and len(values[0]) == heads]
        return late or [(values, ratio) for _, values, ratio in list(self.looks)[-1:]]

    def heads(self, now: float) -> tuple[HeadReading, ...]:
        """Means over late looks."""
        late = [values for values, _ in self.late(now)]
        if not late:
            return (HeadReading(*[None] * len(STATISTICS)),) * self.num_heads
        found = []
        for head in range(len(late[0][0])):
            columns = [[values[which][head] for values in late] for which in range(len(STATISTICS))]
            means = [mean(column) for column in columns]
            means[MAX_LOGIT] = max((x for x in columns[MAX_LOGIT] if math.isfinite(x)), default=None)
            found.append(HeadReading(*means))
        return tuple(found)

    def reading(self, now: float) -> LayerReading:
        """All of it, in numbers that do not change any more."""
        return LayerReading(
            self.index,
            self.name,
            self.kind,
            self.heads(now),
            mean([ratio for _, ratio in self.late(now)]),
            self.observed,
            self.rows,
            self.fully_masked,
            self.nonfinite,
            self.at,
            self.ratios.read(),
            self.queries.read(),
            self.keys.read(),
            self.live,
            self.baseline,
        )


class Record:
    """What is known of a model. All methods take the lock."""

    def __init__(self, name: str, layers: Sequence[Layer], budget: Budget) -> None:
        self.name, self.budget, self.layers = name, budget, [LayerRecord(layer) for layer in layers]
        self.lock = threading.Lock()
        _RECORDS.add(self)
        self.forwards = self.observed = 0
        self._blind = True
        self._last = self._tried = 0  # the forward in which something was seen, or was due, last
        self._interval: float | None = None
        self._seconds = self._looking = 0.0
        self._durations = Counts(DURATIONS)
        self._skipped: collections.Counter[str] = collections.Counter()
        self._errors: collections.Counter[str] = collections.Counter()

    def let_go(self) -> None:
        """Of the model: what was seen stays."""
        with self.lock:
            for layer in self.layers:
                layer.layer = None

    def skip(self, reason: str) -> None:
        """Count a call that was not looked at."""
        with self.lock:
            self._skipped[reason] += 1

    def fail(self, error: Exception) -> None:
        """Count an error of the observer."""
        with self.lock:
            self._errors[type(error).__name__] += 1

    @property
    def may_look(self) -> bool:
        """Whether there is something to spend, or a layer that nobody looked at yet: those are paid for afterwards."""
        return self._blind or self.budget.may_look

    def due(self, allowed: float) -> list[LayerRecord]:
        """Layers to look at in so many seconds, one at least, those first that were not tried for longest."""
        with self.lock:
            due: list[LayerRecord] = []
            left = allowed
            for layer in sorted(self.layers, key=lambda layer: (layer.tried, layer.observed)):
                left -= self.budget.forecast(layer.scores)
                if due and left < 0:
                    break
                due.append(layer)  # also where it is not called, or takes too long, so that others get their turn
                layer.tried, layer.tries = self.forwards + 1, layer.tries + 1
            self._blind = any(not layer.looks and layer.tries < _TRIES for layer in self.layers)
            return due

    def keep(
        self, taken: Sequence[Taken], seconds: float, spent: float, size: int, *, looked: bool, late: bool
    ) -> None:
        """After a forward.

        Args:
            taken: what was seen.
            seconds: of the forward.
            spent: seconds on observing it.
            size: numbers in its input.
            looked: whether looks were due.
            late: whether all that were due were forecast to take too long.
        """
        with self.lock:
            self.forwards += 1
            self._seconds += seconds
            self._looking += spent
            self.budget.earn(seconds, size, 0.0 if looked else spent)
            self.budget.spend(spent if looked else 0.0)
            if looked:
                if late:
                    self.budget.forget(self.forwards - self._tried)
                self._tried = self.forwards
            if not taken:
                return
            self._durations.add(spent)
            self.observed += 1
            if self.observed > 1:
                gap = float(self.forwards - self._last)
                self._interval = gap if self._interval is None else self._interval + 0.2 * (gap - self._interval)
            self._last, at = self.forwards, time.time()
            for each in taken:
                each.layer.keep(each, self.forwards, at)

    def baseline(self, saved: object) -> None:
        """Set it: the present readings (None), or `saved`."""
        with self.lock:
            now, known = time.time(), {}
            if saved is not None:
                known = read_baseline(saved, {each.name: each.num_heads for each in self.layers})
            blind = [each.name for each in self.layers if not each.looks]
            if saved is None and blind:
                rule = (
                    "be called when every layer was looked at: run more forwards, give a greater budget, or a saved one"
                )
                raise invalid("Monitor.baseline", "it", rule, f"none of {', '.join(blind)}")
            for each in self.layers:
                each.baseline = each.heads(now) if saved is None else known[each.name]

    def snapshot(self) -> Snapshot:
        """All that was seen so far."""
        now = time.time()
        with self.lock:
            return Snapshot(
                self.name,
                now,
                self.forwards,
                self.observed,
                dict(self._skipped),
                dict(self._errors),
                self.budget.share,
                self._seconds,
                self._looking,
                self._durations.read(),
                self._interval,
                tuple(layer.reading(now) for layer in self.layers),
            )


_RECORDS: weakref.WeakSet[Record] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked process: another thread of the parent may have held one, and will never give it back."""
    for record in _RECORDS:
        record.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def mean(values: Sequence[float]) -> float | None:
    """Of those that are finite; None: there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
