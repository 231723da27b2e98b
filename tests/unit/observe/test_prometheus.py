"""headwise.observe.prometheus: what a scrape holds, in how many series, and several models in one registry."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.contract.source import ROOT
from tests.unit.observe.readings import head, layer, snapshot, unseen

from headwise.observe import prometheus
from headwise.observe.prometheus import METRICS, MOST_SERIES, Collector, publish
from headwise.observe.snapshot import Histogram, LayerReading, Snapshot

Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(*snapshots: Snapshot, most_series: int = MOST_SERIES) -> Scrape:
    """Publish in one registry, and read the text back with prometheus_client's own parser."""
    registry = CollectorRegistry()
    for each in snapshots:
        publish(lambda each=each: each, registry, most_series=most_series)
    return samples(registry)


def samples(registry: CollectorRegistry) -> Scrape:
    found: Scrape = {}
    for family in parse(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def one(found: Scrape, name: str, /, **labels: str) -> float:
    return found[name, tuple(sorted({"model": "encoder", **labels}.items()))]


def values(found: Scrape, name: str, label: str) -> dict[str, float]:
    return {dict(labels)[label]: value for (each, labels), value in found.items() if each == name}


# --- What is read -------------------------------------------------------------------------------------------------


def test_every_reading_of_a_small_model() -> None:
    second = layer(
        1,
        (head(0.1, max_logit=-3.0), head(0.3, entropy_ratio=None)),
        kind="cross",
        distance_ratio=None,
        fully_masked=2,
        nonfinite=1,
        baseline=(head(0.7), head(None)),
    )
    found = scrape(snapshot(layer(0), second, skipped={"compiled": 4}, errors={"ValueError": 2, "Odd": 3, "other": 1}))
    assert one(found, "attention_entropy_ratio", layer="00", head="01") == 0.51
    assert one(found, "attention_entropy_ratio", layer="01", head="00") == 0.1
    assert {key[1]: value for key, value in found.items() if key[0] == "attention_baseline_entropy_ratio"} == {
        (("head", "00"), ("layer", "01"), ("model", "encoder")): 0.7
    }
    assert values(found, "attention_max_logit", "head").keys() == {"00", "01"}
    assert one(found, "attention_max_logit", layer="01", head="00") == -3
    assert one(found, "attention_sink_ratio", layer="01", head="01") == 0.3
    assert one(found, "attention_peak_weight_ratio", layer="01") == pytest.approx(0.2)
    assert one(found, "attention_effective_keys", layer="00") == 0.505
    assert one(found, "attention_spread_positions", layer="00") == 0.505
    assert values(found, "attention_distance_ratio", "layer") == {"00": 0.25}
    assert one(found, "attention_fully_masked_rows_total", layer="01") == 2
    assert one(found, "attention_nonfinite_rows_total", layer="01") == 1
    assert one(found, "attention_observed_rows_total", layer="01") == 48
    assert one(found, "attention_last_observation_timestamp_seconds", layer="01") == 1_000_001
    assert values(found, "attention_forward_passes_total", "observed") == {"true": 3, "false": 9}
    assert one(found, "attention_forward_seconds_total") == 6
    assert one(found, "attention_observer_seconds_total") == 0.05
    assert one(found, "attention_observer_interval_passes") == 4
    assert one(found, "attention_observer_budget_ratio") == 0.01
    assert values(found, "attention_observer_errors_total", "reason")["ValueError"] == 2
    assert values(found, "attention_observer_errors_total", "reason")["other"] == 4
    assert values(found, "attention_observer_skipped_total", "reason")["compiled"] == 4
    name = {"name": "layers.1.self_attn", "kind": "cross", "heads": "2"}
    assert one(found, "attention_layer_info", layer="01", **name) == 1


def test_histograms_are_cumulated() -> None:
    entropies = Histogram((0.1, 0.5, 1.0), (3, 0, 2, 0), 1.7)
    found = scrape(snapshot(layer(0, row_entropy=entropies)))
    name = "attention_row_entropy_ratio"
    assert values(found, f"{name}_bucket", "le") == {"0.1": 3, "0.5": 3, "1.0": 5, "+Inf": 5}
    assert one(found, f"{name}_count", layer="00") == 5
    assert one(found, f"{name}_sum", layer="00") == 1.7


def test_lengths_are_those_of_all_layers() -> None:
    lengths = Histogram((1.0, 2.0), (1, 2, 3), 20.0)
    found = scrape(snapshot(layer(0, queries=lengths), layer(1, queries=lengths)))
    assert one(found, "attention_sequence_length_tokens_count", side="query") == 12
    assert one(found, "attention_sequence_length_tokens_sum", side="query") == 40


def test_before_the_first_forward() -> None:
    """All counters are there from 0 on, or PromQL's increase() would miss the first event; no gauge is made up."""
    none = {"forwards": 0, "observed": 0, "forward_seconds": 0.0, "observer_seconds": 0.0, "interval": None}
    found = scrape(snapshot(unseen(0), unseen(1), **none))
    assert not any(math.isnan(value) for value in found.values())
    totals = {key: value for key, value in found.items() if key[0].endswith("_total")}
    assert set(totals.values()) == {0}
    named = {metric.name for metric in prometheus.METRICS if metric.kind == "counter"}
    assert {name for name, _ in totals} == named
    for name in ("fully_masked", "nonfinite", "observed"):
        assert values(found, f"attention_{name}_rows_total", "layer").keys() == {"00", "01"}
    assert len(values(found, "attention_observer_errors_total", "reason")) == len(prometheus.ERRORS)
    gauges = {name for name, _ in found if not re.search("_(total|bucket|count|sum|info)$", name)}
    assert gauges == {"attention_observer_budget_ratio"}
    assert values(found, "attention_layer_info", "kind") == {"unknown": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("most_series", [MOST_SERIES, 100])
def test_what_is_no_number_is_left_out(value: float | None, most_series: int) -> None:
    found = scrape(snapshot(layer(0, (head(value), head(0.5)), distance_ratio=value)), most_series=most_series)
    assert all(map(math.isfinite, found.values()))
    expected = {"01"} if most_series == MOST_SERIES else {"max", "mean", "min"}
    assert values(found, "attention_max_logit", "head").keys() == expected
    assert set(values(found, "attention_max_logit", "head").values()) == {0.5}
    assert values(found, "attention_peak_weight_ratio", "layer").popitem()[1] == 0.5
    assert values(found, "attention_distance_ratio", "layer") == {}


def test_a_model_without_attention() -> None:
    found = scrape(snapshot(forwards=1, observed=0))
    assert values(found, "attention_forward_passes_total", "observed") == {"true": 0, "false": 1}
    assert values(found, "attention_entropy_ratio", "head") == {}


# --- Names and labels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", prometheus.METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric: prometheus.Metric) -> None:
    """What promtool does not look at: a unit that Prometheus's naming page knows, in the name."""
    assert re.fullmatch("attention_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_info") == (metric.kind == "info")
    assert not re.search("percent|milli|_ms|_count$|_sum$|_bucket$", metric.name)
    if metric.unit in ("ratio", "seconds"):
        assert metric.family.endswith(f"_{metric.unit}")
    assert set(metric.labels) <= {"model", "layer", "head", "side", "observed", "reason", "name", "kind", "heads"}
    assert metric.labels[0] == "model"
    assert {"name", "kind", "heads"}.isdisjoint(metric.labels) or metric.kind == "info"
    assert metric.help.endswith(".")
    assert "\n" not in metric.help


def test_names_are_unique() -> None:
    assert len({metric.name for metric in prometheus.METRICS}) == len(prometheus.METRICS)


def test_numbers_sort_as_text() -> None:
    found = scrape(snapshot(*(layer(index, 101) for index in range(3))))
    heads = values(found, "attention_max_logit", "head")
    assert sorted(heads) == [f"{number:03}" for number in range(101)]
    many = scrape(snapshot(*(layer(index, 1) for index in range(101))), most_series=10_000)
    assert sorted(values(many, "attention_nonfinite_rows_total", "layer")) == [f"{number:03}" for number in range(101)]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ('a"b\\c\nd', 'a"b\\c\\nd'),
        ("modèle 模型 🙂", "modèle 模型 🙂"),
        ("half \ud83d", "half \\ud83d"),
        ("nul\0", "nul\\x00"),
        ('{evil="1"} 2\nattention_max_logit 3', '{evil="1"} 2\\nattention_max_logit 3'),
        ("", ""),
    ],
)
def test_any_text_is_a_label(name: str, shown: str) -> None:
    found = scrape(snapshot(layer(0, name=name), model=name))
    assert {dict(labels)["model"] for _, labels in found} == {shown}
    assert values(found, "attention_layer_info", "name") == {shown or "-": 1}


def test_openmetrics_is_accepted_by_its_strict_parser() -> None:
    registry = CollectorRegistry()
    publish(lambda: snapshot(layer(0), layer(1)), registry)
    publish(lambda: snapshot(unseen(0), model="other"), registry)
    families = {family.name: family for family in parse_openmetrics(generate_openmetrics(registry).decode())}
    assert families.keys() == {metric.family for metric in prometheus.METRICS}
    assert families["attention_observed_rows"].unit == "rows"
    assert families["attention_layer"].type == "info"


# --- How many series ----------------------------------------------------------------------------------------------


def model_of(layers: int, heads: int, make: Callable[..., LayerReading] = layer, **more: str) -> Snapshot:
    return snapshot(*(make(index, heads) for index in range(layers)), **more)


def measured(index: int, heads: int) -> LayerReading:
    """With a baseline."""
    return layer(index, heads, baseline=(head(0.9),) * heads)


@pytest.mark.parametrize(
    ("layers", "heads", "shown"),
    [
        (12, 12, "heads"),
        (24, 16, "heads"),
        (32, 32, "layers"),
        (48, 64, "layers"),
        (1, 5000, "layers"),
        (128, 128, "model"),
        (1000, 1, "model"),
    ],
)
@pytest.mark.parametrize("make", [layer, unseen, measured])
def test_series_stay_below_the_bound(layers: int, heads: int, shown: str, make: Callable[..., LayerReading]) -> None:
    found = scrape(model_of(layers, heads, make))
    assert len(found) <= MOST_SERIES
    entropies = {
        (dict(labels)["layer"], dict(labels)["head"]) for name, labels in found if name == "attention_max_logit"
    }
    masked = values(found, "attention_fully_masked_rows_total", "layer")
    assert len(masked) == (1 if shown == "model" else layers)
    assert (set(masked) == {"all"}) == (shown == "model")
    if make is not unseen:
        assert len(entropies) == {"heads": layers * heads, "layers": 3 * layers, "model": 3}[shown]
        assert ({"min", "mean", "max"} == {name for _, name in entropies}) == (shown != "heads")


def test_collapsed_heads_keep_their_extremes() -> None:
    heads = tuple(head(0.5, entropy_ratio=0.01 if number == 17 else 0.9) for number in range(64))
    found = scrape(snapshot(*(layer(index, heads if index == 3 else 64) for index in range(48))))
    assert one(found, "attention_entropy_ratio", layer="03", head="min") == 0.01
    assert one(found, "attention_entropy_ratio", layer="03", head="max") == 0.9
    assert one(found, "attention_entropy_ratio", layer="03", head="mean") == pytest.approx((0.01 + 63 * 0.9) / 64)


def test_a_whole_model_in_one() -> None:
    found = scrape(snapshot(layer(0, nonfinite=2), unseen(1), layer(2, nonfinite=3)), most_series=1)
    assert one(found, "attention_nonfinite_rows_total", layer="all") == 5
    assert one(found, "attention_last_observation_timestamp_seconds", layer="all") == 1_000_000
    assert one(found, "attention_max_logit", layer="all", head="max") == 0.51
    assert one(found, "attention_row_entropy_ratio_count", layer="all") == 28
    assert one(found, "attention_layer_info", layer="all", name="-", kind="self+unknown", heads="6") == 1
    assert len(found) <= 130


# --- Several models -----------------------------------------------------------------------------------------------


def test_two_models_in_one_registry() -> None:
    registry = CollectorRegistry()
    first = publish(lambda: snapshot(layer(0)), registry)
    second = publish(lambda: snapshot(layer(0), model="other"), registry)
    assert first.registry is second.registry is registry
    assert {dict(labels)["model"] for _, labels in samples(registry)} == {"encoder", "other"}
    text = generate_latest(registry).decode()
    assert text.count("# TYPE attention_entropy_ratio gauge") == 1
    first.close()
    first.close()
    assert {dict(labels)["model"] for _, labels in samples(registry)} == {"other"}
    second.close()
    assert generate_latest(registry) == b""
    publish(lambda: snapshot(layer(0)), registry)
    assert samples(registry)


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    publish(lambda: snapshot(layer(0)), registry)
    with pytest.raises(ValueError, match=r"^publish: .*name.* pass watch\(\.\.\., name=\.\.\.\).*; got 'encoder'"):
        publish(lambda: snapshot(layer(1)), registry)
    assert values(samples(registry), "attention_nonfinite_rows_total", "layer").keys() == {"00"}
    publish(lambda: snapshot(layer(1)))  # another registry


def test_a_registry_with_our_names_is_refused() -> None:
    registry = CollectorRegistry()
    Counter("attention_nonfinite_rows", "Of somebody else.", registry=registry)
    with pytest.raises(ValueError, match=r"^publish: registry must .*another registry; got .*attention_nonfinite_rows"):
        publish(lambda: snapshot(layer(0)), registry)


def test_a_collector_alone() -> None:
    registry = CollectorRegistry()
    registry.register(Collector(lambda: snapshot(layer(0))))
    assert one(samples(registry), "attention_max_logit", layer="00", head="00") == 0.5
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Collector(lambda: snapshot(layer(0), model="other")))


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "many"])
def test_a_bound_is_a_number(most: object) -> None:
    with pytest.raises(ValueError, match=r"^Collector: most_series must be an int of at least 1; got "):
        Collector(snapshot, most)


def test_registering_reads_names_only() -> None:
    """A registry that describes by itself would otherwise read the snapshot when the collector comes in."""

    def never() -> Snapshot:
        raise AssertionError

    CollectorRegistry(auto_describe=True).register(Collector(never))


def test_multiprocess_mode_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    with pytest.warns(UserWarning, match=r"custom collectors.*its own port.*port=\.\.\."):
        publish(lambda: snapshot(layer(0)), CollectorRegistry())
    publish(lambda: snapshot(layer(0)))  # a registry of its own can only be served by the process itself


def test_the_page_names_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "observe.md").read_text("utf-8")
    rows = re.findall(r"^\| `(attention_\w+)` \| (\w+) \| ([^|]+) \|", page, flags=re.MULTILINE)
    assert [(name, kind, labels) for name, kind, labels in rows] == [
        (metric.name, metric.kind, ", ".join(metric.labels)) for metric in METRICS
    ]
