"""Heads that are no longer what they were: a baseline, and what departed from it."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from headwise._checks import invalid, is_number, kind_of
from headwise.observe.snapshot import STATISTICS, HeadReading, LayerReading

__all__ = ["Drift", "Limits", "drifts", "read_baseline", "written_baseline"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """From where on a change is one. Starting points, but for `logit`: set them to what your model does in health.

    Attributes:
        collapse: a head collapsed below this share of its baseline's entropy ratio.
        logit: a head exploded above this greatest logit, if that is also twice its baseline's (arXiv 2507.20534 clips
            at 100).
        sink: a head's sink share moved by more than this.
        uniform: a head is uniform above this entropy ratio, if its baseline was below it by 0.05 at least.

    Raises:
        ValueError: one is no finite number above 0, or `collapse` or `uniform` is not below 1.
    """

    collapse: float = 0.3
    logit: float = 100.0
    sink: float = 0.2
    uniform: float = 0.99

    def __post_init__(self) -> None:
        """Refuse what would never, or always, be a change."""
        for name in ("collapse", "logit", "sink", "uniform"):
            value, below = getattr(self, name), 1.0 if name in ("collapse", "uniform") else math.inf
            if not _finite(value) or not 0 < value < below:
                rule = "be a finite number above 0" + (" and below 1" if below == 1 else "")
                raise invalid("Limits", name, rule, reprlib.repr(value))


@dataclasses.dataclass(frozen=True)
class Drift:
    """A head that departed from its baseline. `str()` gives a sentence for an alert.

    Attributes:
        layer: its dotted name.
        index: its number.
        head: from 0.
        what: "collapsed", "exploded", "sink moved" or "uniform".
        statistic: the name of the reading that tells.
        before: at the baseline.
        now: lately.
    """

    layer: str
    index: int
    head: int
    what: str
    statistic: str
    before: float
    now: float

    def __str__(self) -> str:
        """Say it."""
        statistic, where = self.statistic.replace("_", " "), self.layer or "the attention"
        change = f"{statistic} {self.before:.3g} -> {self.now:.3g}"
        return f"head {self.head} of {where} {_SAID[self.what]}: {change}"


_SAID = {"collapsed": "collapsed", "exploded": "exploded", "sink moved": "moved its sink", "uniform": "became uniform"}


def drifts(layers: Sequence[LayerReading], limits: Limits) -> list[Drift]:
    """All heads that departed from their baseline, in the order of layers and heads.

    Raises:
        ValueError: `limits` are none.
    """
    if not isinstance(limits, Limits):
        rule = "be a headwise.observe.drift.Limits, such as Limits(logit=50)"
        raise invalid("Monitor.drift", "limits", rule, kind_of(limits))
    found = []
    for layer in layers:
        for head, (before, now) in enumerate(zip(layer.baseline, layer.heads, strict=False)):
            for what, statistic in _changes(before, now, limits):
                values = getattr(before, statistic), getattr(now, statistic)
                found.append(Drift(layer.name, layer.index, head, what, statistic, *values))
    return found


def _changes(before: HeadReading, now: HeadReading, limits: Limits) -> list[tuple[str, str]]:
    found = []
    if before.entropy_ratio is not None and now.entropy_ratio is not None:
        if now.entropy_ratio < limits.collapse * before.entropy_ratio:
            found.append(("collapsed", "entropy_ratio"))
        if now.entropy_ratio > limits.uniform >= before.entropy_ratio + 0.05:
            found.append(("uniform", "entropy_ratio"))
    if before.max_logit is not None and now.max_logit is not None and now.max_logit > limits.logit:
        found += [("exploded", "max_logit")] if now.max_logit > 2 * before.max_logit else []
    if before.sink is not None and now.sink is not None and abs(now.sink - before.sink) > limits.sink:
        found.append(("sink moved", "sink"))
    return found


def written_baseline(layers: Sequence[LayerReading]) -> dict[str, list[dict[str, float | None]]]:
    """In JSON's types: by the layers' names, their heads."""
    return {layer.name: [dataclasses.asdict(head) for head in layer.baseline] for layer in layers}


def read_baseline(saved: object, heads: Mapping[str, int]) -> dict[str, tuple[HeadReading, ...]]:
    """The other way, for a model with so many heads in its layers.

    Raises:
        ValueError: it is none, or another model's, or has a reading that no head can have.
    """
    rule = "be what Monitor.baseline() gave for a model with the same layers and heads"
    if not isinstance(saved, Mapping):
        raise invalid("Monitor.baseline", "saved", rule, type(saved).__name__)
    if set(saved) != set(heads):
        raise invalid("Monitor.baseline", "saved", rule, f"layers {sorted(map(str, saved))} for {sorted(heads)}")
    found = {}
    for name, given in saved.items():
        if not isinstance(given, Sequence) or len(given) != heads[name]:
            raise invalid("Monitor.baseline", "saved", rule, f"{name!r} without its {heads[name]} heads")
        found[name] = tuple(_head(name, each) for each in given)
    return found


def _head(name: str, given: Any) -> HeadReading:
    whole = isinstance(given, Mapping) and set(given) == set(STATISTICS)
    values: list[Any] = [given[key] for key in STATISTICS] if whole else [()]
    if not all(value is None or _finite(value) for value in values):
        rule = f"hold a finite number or None for each of {', '.join(STATISTICS)}"
        raise invalid("Monitor.baseline", f"saved[{name!r}]", rule, reprlib.repr(given))
    for statistic, value in zip(STATISTICS, values, strict=True):
        low, high = _RANGES.get(statistic, (0.0, math.inf))
        if value is not None and not low - _ROUNDING <= value <= high + _ROUNDING:
            rule = f"hold {statistic} from {low:g} on" + (f" to {high:g}" if high < math.inf else "")
            raise invalid("Monitor.baseline", f"saved[{name!r}]", rule, value)
    return HeadReading(*(None if value is None else float(value) for value in values))


_RANGES = {"entropy_ratio": (0.0, 1.0), "peak": (0.0, 1.0), "sink": (-1.0, 1.0), "max_logit": (-math.inf, math.inf)}
_ROUNDING = 1e-3  # by which a mean of measured values may be out of its range


def _finite(value: Any) -> bool:
    """Whether it is a number that a float can hold, neither NaN nor infinite."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False
