"""Snapshots as Prometheus metrics: one table of metrics, and the collector that reads it at each scrape.

Many processes: each one that watches a model serves a port of its own, and Prometheus scrapes each. With
`PROMETHEUS_MULTIPROC_DIR` set, prometheus_client collects from files and **leaves out custom collectors, so all metrics
of this module**: do not publish them in the registry of such an endpoint, give each process `watch(..., port=...)`.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from headwise._checks import class_of, invalid, need, positive
from headwise.observe.snapshot import Histogram, LayerReading, Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

__all__ = ["METRICS", "MOST_SERIES", "Collector", "Metric", "Publication", "publish"]

MOST_SERIES = 2500  # of one model; a scrape takes some 12 us of the process for each
SKIPPED = ("compiled", "empty", "replaced", "tokens", "unsupported")
# An exception of another class counts as "other": a label takes no value that is not known beforehand.
ERRORS = (
    *("AssertionError", "AttributeError", "IndexError", "KeyError", "MemoryError", "NotImplementedError"),
    *("OutOfMemoryError", "RuntimeError", "TypeError", "ValueError", "other"),
)
Detail = Literal["heads", "layers", "model"]
DETAILS: tuple[Detail, ...] = ("heads", "layers", "model")


class Reading(NamedTuple):
    """One value of a metric.

    Attributes:
        labels: values of the metric's labels behind `model`.
        value: None: nothing to tell yet, the series is left out.
    """

    labels: tuple[str, ...]
    value: float | Histogram | None


class Part(NamedTuple):
    """What one value of the label `layer` stands for: a layer, or all of them.

    Attributes:
        label: the layer's number, with zeros in front so that text sorts as numbers do, or "all".
        layers: one, or all.
    """

    label: str
    layers: tuple[LayerReading, ...]


class View(NamedTuple):
    """A snapshot, as finely as it is published.

    Attributes:
        of: the snapshot.
        detail: "heads": each head for itself; "layers": min, mean and max over a layer's heads; "model": over all.
        parts: one for each value of the label `layer`.
    """

    of: Snapshot
    detail: Detail
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        name: as it is asked for in PromQL; of a histogram without `_bucket`.
        kind: Prometheus's type.
        labels: in this order, `model` being the first.
        unit: what it counts or measures; "": none.
        help: one sentence.
        read: the values, one for each series or histogram.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: tuple[str, ...]
    unit: str
    help: str
    read: Callable[[View], Iterable[Reading]]

    @property
    def family(self) -> str:
        """The name without the ending that the type brings."""
        return self.name.removesuffix({"counter": "_total", "info": "_info"}.get(self.kind, ""))


# --- How a metric is read -----------------------------------------------------------------------------------------


def _view(snapshot: Snapshot, detail: Detail) -> View:
    if detail == "model":
        return View(snapshot, detail, (Part("all", snapshot.layers),))
    width = _width(len(snapshot.layers))
    return View(snapshot, detail, tuple(Part(f"{layer.index:0{width}}", (layer,)) for layer in snapshot.layers))


def _width(number: int) -> int:
    return max(2, len(str(number - 1)))


def _known(values: Iterable[float | None]) -> list[float]:
    """Those that can be averaged; what is NaN or infinite is counted elsewhere, not published."""
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return math.fsum(known) / len(known) if known else None


def _by_head(of: Callable[[LayerReading], Sequence[float | None]]) -> Callable[[View], Iterator[Reading]]:
    """Of each head; where heads are too many, the least, mean and greatest of them."""

    def read(view: View) -> Iterator[Reading]:
        for part in view.parts:
            values = [value for layer in part.layers for value in of(layer)]
            if view.detail == "heads":
                width = _width(len(values))
                yield from (Reading((part.label, f"{head:0{width}}"), value) for head, value in enumerate(values))
            elif values:
                known = _known(values)
                for head, reduce in (("max", max), ("mean", _mean), ("min", min)):
                    yield Reading((part.label, head), reduce(known) if known else None)

    return read


def _baseline(layer: LayerReading) -> Sequence[float | None]:
    """Entropy ratios at the baseline; without one as many as there may be, since series are counted beforehand."""
    return [head.entropy_ratio for head in layer.baseline] or [None] * len(layer.heads)


def _over_heads(field: str) -> Callable[[View], Iterator[Reading]]:
    def read(view: View) -> Iterator[Reading]:
        for part in view.parts:
            yield Reading((part.label,), _mean(getattr(head, field) for layer in part.layers for head in layer.heads))

    return read


def _by_layer(
    of: Callable[[LayerReading], float | None], reduce: Callable[..., float | None]
) -> Callable[..., Iterator[Reading]]:
    def read(view: View) -> Iterator[Reading]:
        for part in view.parts:
            yield Reading((part.label,), reduce([of(layer) for layer in part.layers]))

    return read


def _oldest(times: Sequence[float | None]) -> float | None:
    """The layer that was looked at the longest ago, of those that were."""
    return min(_known(times), default=None)


def _whole(of: Callable[[Snapshot], float | Histogram | None]) -> Callable[[View], Iterator[Reading]]:
    """One value of the model."""
    return lambda view: iter((Reading((), of(view.of)),))


def _reasons(
    of: Callable[[Snapshot], Iterable[tuple[str, int]]], known: Sequence[str]
) -> Callable[..., Iterator[Reading]]:
    """All known reasons, from 0 on: PromQL's `increase` does not see a series begin at 1."""

    def read(view: View) -> Iterator[Reading]:
        counts = dict.fromkeys(known, 0)
        for reason, number in of(view.of):
            # A reason that this module does not know yet; the last one known stands for it.
            counts[reason if reason in counts else known[-1]] += number
        yield from (Reading((reason,), number) for reason, number in counts.items())

    return read


def _passes(view: View) -> Iterator[Reading]:
    yield Reading(("true",), view.of.observed)
    yield Reading(("false",), view.of.forwards - view.of.observed)


def _row_entropy(view: View) -> Iterator[Reading]:
    for part in view.parts:
        yield Reading((part.label,), _sum([layer.row_entropy for layer in part.layers]))


def _lengths(view: View) -> Iterator[Reading]:
    yield Reading(("key",), _sum([layer.keys for layer in view.of.layers]))
    yield Reading(("query",), _sum([layer.queries for layer in view.of.layers]))


def _sum(histograms: Sequence[Histogram]) -> Histogram | None:
    """One histogram of all their values; they have the same bounds."""
    if not histograms:
        return None
    counts = tuple(map(sum, zip(*(each.counts for each in histograms), strict=True)))
    return Histogram(histograms[0].bounds, counts, math.fsum(each.total for each in histograms))


def _info(view: View) -> Iterator[Reading]:
    for part in view.parts:
        kinds = sorted({layer.kind or "unknown" for layer in part.layers})
        name = part.layers[0].name if view.detail != "model" else ""
        heads = sum(len(layer.heads) for layer in part.layers)
        yield Reading((part.label, name or "-", "+".join(kinds) or "unknown", str(heads)), 1)


# --- The table ----------------------------------------------------------------------------------------------------

_SEEN = "over the rows looked at in the last 60 s"
_HEALTH = "A sign of health, not an explanation of a decision"
_HEAD, _LAYER = ("model", "layer", "head"), ("model", "layer")

METRICS: tuple[Metric, ...] = (
    Metric(
        *("attention_entropy_ratio", "gauge", _HEAD, "ratio"),
        f"Mean entropy of a row's weights over log(keys it may see), {_SEEN}: 0 one key, 1 all alike. {_HEALTH}.",
        _by_head(lambda layer: [head.entropy_ratio for head in layer.heads]),
    ),
    Metric(
        *("attention_baseline_entropy_ratio", "gauge", _HEAD, "ratio"),
        "attention_entropy_ratio when monitor.baseline() was called; without that no series.",
        _by_head(_baseline),
    ),
    Metric(
        *("attention_row_entropy_ratio", "histogram", _LAYER, "ratio"),
        "Entropy ratios of single rows and heads, 64 an observed pass at most.",
        _row_entropy,
    ),
    Metric(
        *("attention_max_logit", "gauge", _HEAD, ""),
        f"Greatest scaled score {_SEEN}; a lower bound, rows not looked at may have greater ones.",
        _by_head(lambda layer: [head.max_logit for head in layer.heads]),
    ),
    Metric(
        *("attention_peak_weight_ratio", "gauge", _LAYER, "ratio"),
        f"Mean of a row's greatest weight, {_SEEN} and the heads.",
        _over_heads("peak"),
    ),
    Metric(
        *("attention_sink_ratio", "gauge", _HEAD, "ratio"),
        "Mean weight of a row's first 4 visible keys and of a learned sink beyond what even weights give them: 0 as "
        f"much, 1 all of it, {_SEEN} that may see more than 8 keys.",
        _by_head(lambda layer: [head.sink for head in layer.heads]),
    ),
    Metric(
        *("attention_distance_ratio", "gauge", _LAYER, "ratio"),
        f"Mean distance between query and key over the number of visible keys, {_SEEN}; self-attention only.",
        _by_layer(lambda layer: layer.distance_ratio, _mean),
    ),
    Metric(
        *("attention_spread_positions", "gauge", _LAYER, "positions"),
        f"Mean standard deviation of the attended position, {_SEEN} and the heads.",
        _over_heads("spread"),
    ),
    Metric(
        *("attention_effective_keys", "gauge", _LAYER, "keys"),
        f"Mean of exp(entropy), {_SEEN} and the heads: as many keys as a row really uses.",
        _over_heads("effective_keys"),
    ),
    Metric(
        *("attention_fully_masked_rows_total", "counter", _LAYER, "rows"),
        "Rows looked at with a head that may see no key; rows of padding are not counted.",
        _by_layer(lambda layer: layer.fully_masked, sum),
    ),
    Metric(
        *("attention_nonfinite_rows_total", "counter", _LAYER, "rows"),
        "Rows looked at with a score that is NaN or +Inf.",
        _by_layer(lambda layer: layer.nonfinite, sum),
    ),
    Metric(
        *("attention_observed_rows_total", "counter", _LAYER, "rows"),
        "Rows looked at, all heads of a query being one row.",
        _by_layer(lambda layer: layer.rows, sum),
    ),
    Metric(
        *("attention_last_observation_timestamp_seconds", "gauge", _LAYER, "seconds"),
        "When the layer was last looked at, since 1970; a gauge keeps its value when nobody looks any more.",
        _by_layer(lambda layer: layer.at, _oldest),
    ),
    Metric(
        *("attention_sequence_length_tokens", "histogram", ("model", "side"), "tokens"),
        "Real positions, without padding, of the samples looked at, once for each layer.",
        _lengths,
    ),
    Metric(
        *("attention_forward_passes_total", "counter", ("model", "observed"), "passes"),
        "Forward passes of the model; observed: whether a layer was looked at.",
        _passes,
    ),
    Metric(
        *("attention_forward_seconds_total", "counter", ("model",), "seconds"),
        "Time of the forward passes, without the observer's.",
        _whole(lambda snapshot: snapshot.forward_seconds),
    ),
    Metric(
        *("attention_observer_seconds_total", "counter", ("model",), "seconds"),
        "Time of the observer; its rate over that of the forward passes is the overhead.",
        _whole(lambda snapshot: snapshot.observer_seconds),
    ),
    Metric(
        *("attention_observer_duration_seconds", "histogram", ("model",), "seconds"),
        "Time of the observer in an observed pass.",
        _whole(lambda snapshot: snapshot.observer_duration),
    ),
    Metric(
        *("attention_observer_interval_passes", "gauge", ("model",), "passes"),
        "Forward passes from one observed pass to the next, lately.",
        _whole(lambda snapshot: snapshot.interval),
    ),
    Metric(
        *("attention_observer_budget_ratio", "gauge", ("model",), "ratio"),
        "The overhead that the observer may have.",
        _whole(lambda snapshot: snapshot.budget),
    ),
    Metric(
        *("attention_observer_errors_total", "counter", ("model", "reason"), "errors"),
        "Exceptions of the observer, by class; the model never sees them.",
        _reasons(lambda snapshot: snapshot.errors.items(), ERRORS),
    ),
    Metric(
        *("attention_observer_skipped_total", "counter", ("model", "reason"), "calls"),
        "Calls of attention that could not be looked at.",
        _reasons(lambda snapshot: snapshot.skipped.items(), SKIPPED),
    ),
    Metric(
        *("attention_layer_info", "info", ("model", "layer", "name", "kind", "heads"), ""),
        "Which module of the model a layer is, and whether its attention is self or cross.",
        _info,
    ),
)


# --- The collector ------------------------------------------------------------------------------------------------


class Collector:
    """A custom collector of prometheus_client, which reads snapshots anew at each scrape and keeps nothing.

    A model has at most `most_series` series, whatever its size. Each head for itself if that fits (24 layers of 16
    heads are 2,183 series with a baseline); else `head` is "min", "mean" or "max" over a layer's heads (48 layers of
    64: 1,799); else, above some 65 layers, `layer` is "all". What fits is told from the numbers of layers and heads, a
    baseline being counted before it is there, so it stays.

    Cost: some 12 us a series in the scraping thread, 30 ms at 2,500 series.

    Args:
        snapshot: `monitor.snapshot`, or another callable.
        most_series: of one model, at least 1. Layer "all" takes about 100, and is published in any case.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: `most_series` is no such number, or `snapshot` is not callable.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], most_series: int = MOST_SERIES) -> None:
        need("prometheus_client", "observe")
        check("Collector", snapshot)
        self._most = positive("Collector", "most_series", most_series)
        self._snapshots: tuple[Callable[[], Snapshot], ...] = (snapshot,)
        self._details: dict[tuple[int, ...], Detail] = {}  # by the layers' numbers of heads

    def collect(self) -> Iterator[Family]:
        """Give every family with its samples: the method that registries call."""
        snapshots = [each() for each in dict.fromkeys(self._snapshots)]  # one that is published twice is in it twice
        tables = [(snapshot.model, self._read(snapshot)) for snapshot in snapshots]
        for at, metric in enumerate(METRICS):
            family = _family(metric)
            for model, table in tables:
                for reading in table[at]:
                    if reading.value is not None:
                        labels = map(_printable, (model, *reading.labels))
                        _add(family, metric, dict(zip(metric.labels, labels, strict=True)), reading.value)
            yield family

    def describe(self) -> Iterator[Family]:
        """Give the families without samples, from which registries learn the names."""
        return map(_family, METRICS)

    def _read(self, snapshot: Snapshot) -> list[list[Reading]]:
        shape = tuple(len(layer.heads) for layer in snapshot.layers)
        for detail in DETAILS if shape not in self._details else (self._details[shape],):
            view = _view(snapshot, detail)
            table = [list(metric.read(view)) for metric in METRICS]
            # Missing values count too: the detail must not change when they come.
            if sum(_series(reading.value) for readings in table for reading in readings) <= self._most:
                break
        self._details[shape] = detail
        return table


def _series(value: float | Histogram | None) -> int:
    return len(value.counts) + 2 if isinstance(value, Histogram) else 1


def _printable(text: str) -> str:
    """What a scrape can carry: half a surrogate pair has no UTF-8, and Prometheus ends the text at a NUL."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _family(metric: Metric) -> Family:
    # OpenMetrics knows a unit only where the name ends with it.
    unit = metric.unit if metric.family.endswith(f"_{metric.unit}") else ""
    family: Family = need("prometheus_client.core", "observe").Metric(metric.family, metric.help, metric.kind, unit)
    return family


def _add(family: Family, metric: Metric, labels: dict[str, str], value: float | Histogram) -> None:
    if not isinstance(value, Histogram):
        if math.isfinite(value):
            family.add_sample(metric.name, labels, value)
        return
    below = 0
    for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
        below += count
        name = "+Inf" if math.isinf(bound) else repr(float(bound))
        family.add_sample(f"{metric.name}_bucket", {**labels, "le": name}, below)
    family.add_sample(f"{metric.name}_count", labels, below)
    family.add_sample(f"{metric.name}_sum", labels, value.total)


# --- Registries ---------------------------------------------------------------------------------------------------

_published: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def check(function: str, snapshot: object, registry: object = None) -> None:
    """Refuse, in the name of this function, what cannot be published or where it cannot be."""
    if not callable(snapshot):
        rule = "be a function that gives a Snapshot; of a monitor, give monitor.snapshot, without ()"
        raise invalid(function, "snapshot", rule, class_of(snapshot))
    if registry is not None and not isinstance(registry, need("prometheus_client", "observe").CollectorRegistry):
        rule = "be a prometheus_client.CollectorRegistry, or None for a new one"
        raise invalid(function, "registry", rule, class_of(registry))


class Publication:
    """A model's metrics in a registry, until `close()`.

    Attributes:
        registry: the registry.
    """

    def __init__(self, registry: CollectorRegistry, snapshot: Callable[[], Snapshot]) -> None:
        self.registry = registry
        self._snapshot: Callable[[], Snapshot] | None = snapshot

    def close(self) -> None:
        """Take them out; the second time does nothing."""
        with _lock:
            snapshot, self._snapshot = self._snapshot, None
            collector = _published.get(self.registry)
            if snapshot is None or collector is None:
                return
            left = list(collector._snapshots)
            left.remove(snapshot)
            collector._snapshots = tuple(left)
            if not left:
                self.registry.unregister(collector)
                del _published[self.registry]


def publish(
    snapshot: Callable[[], Snapshot], registry: CollectorRegistry | None = None, *, most_series: int = MOST_SERIES
) -> Publication:
    """Put a model's metrics into a registry, beside those of other models that are there.

    Args:
        snapshot: `monitor.snapshot`, or another callable. It is called once here, for the model's name.
        registry: None: a new one, with nothing else in it. The same snapshot may come twice, to be served twice.
        most_series: as of `Collector`; the first model's holds for the registry.

    Returns:
        What takes them out again.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: the registry has a model of this name, or metrics of other code with our names, or is none;
            `snapshot` gives no `Snapshot`.

    Warns:
        UserWarning: the registry is the caller's and `PROMETHEUS_MULTIPROC_DIR` is set, see above.
    """
    client = need("prometheus_client", "observe")
    check("publish", snapshot, registry)
    seen = snapshot()
    if not isinstance(seen, Snapshot):
        raise invalid("publish", "snapshot", "give a Snapshot, as monitor.snapshot does", class_of(seen))
    if registry is None:
        registry = client.CollectorRegistry()
    elif os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        warnings.warn(
            "headwise: PROMETHEUS_MULTIPROC_DIR is set, and prometheus_client leaves custom collectors out of what it "
            "collects from there: attention metrics will not be in it; let each process serve its own port instead, "
            "watch(..., port=...), and scrape each",
            stacklevel=2,
        )
    assert registry is not None
    with _lock:
        name = _printable(seen.model)
        collector = _published.get(registry)
        if collector is None:
            collector = Collector(snapshot, most_series)
            try:
                registry.register(collector)
            except ValueError as error:
                rule = "hold no attention metrics yet, unless published by watch or publish: give another registry"
                raise invalid("publish", "registry", rule, error) from error
            _published[registry] = collector
        elif name in {_printable(other().model) for other in collector._snapshots if other != snapshot}:
            rule = "be another one for each model of a registry: pass watch(..., name=...), or close the other monitor"
            raise invalid("publish", "the model's name", rule, repr(name))
        else:
            collector._snapshots = (*collector._snapshots, snapshot)
    return Publication(registry, snapshot)
