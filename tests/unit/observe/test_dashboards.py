"""The shipped dashboard and rules against the table of metrics, and by the rules of Grafana's dashboard-linter.

Its Go program is not used; tests/e2e runs every expression of both in a real Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.contract.source import PACKAGE

from headwise.observe import dashboards
from headwise.observe.prometheus import METRICS

FOLDER = PACKAGE / "observe" / "dashboards"
BOARD = json.loads((FOLDER / "attention.json").read_text("utf-8"))
RULES = (FOLDER / "rules.yml").read_text("utf-8")
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
KINDS = {metric.name: metric for metric in METRICS}
# In no panel and no rule: nothing.
UNUSED: frozenset[str] = frozenset()
OTHERS = {"up", "scrape_samples_scraped", "ALERTS"}  # Prometheus's own


def series() -> dict[str, set[str]]:
    """What may be asked for, with its labels: the metrics, parts of histograms, and what the rules record."""
    known = {}
    for metric in METRICS:
        labels = {*metric.labels, "job", "instance"}
        if metric.kind == "histogram":
            known |= {f"{metric.name}_{part}": labels for part in ("count", "sum")}
            known[f"{metric.name}_bucket"] = {*labels, "le"}
        else:
            known[metric.name] = labels
    for name in re.findall(r"record: (\S+)", RULES):
        known[name] = {"model", "layer", "head", "job", "instance"}
    return known | {name: {"job", "instance", "alertname", "alertstate", "model"} for name in OTHERS}


SERIES = series()


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The series of an expression with their matchers."""
    expression = re.sub(r"\b(by|without|on|group_left|ignoring) *\([^)]*\)", "", expression)
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)(?![\w:(]| *\()(?:{([^}]*)})?", _without_texts(expression)):
        if name not in ("and", "or", "unless", "by", "bool", "offset", "h", "d", "m"):
            yield name, dict(re.findall(r"(\w+)(?:=~|!~|!=|=)(\S+?)(?:,|$)", matchers))


def _without_texts(expression: str) -> str:
    """Texts become their first word, so that what is in them is no name; `"$job"` stays as `$job`."""
    expression = re.sub(r'"([^"]*)"', lambda text: re.sub(r"[^\w$]", "_", text[1]) or "_", expression)
    return re.sub(r"\[[^]]*\]|offset \w+|\$\w+(?![^{]*})|\b\d[\w.]*", "", expression)


def expressions_of_rules() -> list[str]:
    found = re.findall(r"^ +expr: (?:\|\n((?: {10,}.*\n)+)|(.*)\n)", RULES, re.MULTILINE)
    assert len(found) == RULES.count("expr:")
    return [long or short for long, short in found]


def test_the_reader_of_expressions() -> None:
    text = (
        'sum by (le) (increase(a_bucket{job=~"$job", x!~"min|max"}[$__rate_interval])) / on (job) b:c:d offset 1h > $e'
    )
    assert list(selectors(text)) == [("a_bucket", {"job": "$job", "x": "min_max"}), ("b:c:d", {})]
    assert list(selectors("time() - max without (layer) (a) < 900 and on (b) c[5m:1m] or vector(0)")) == [
        ("a", {}),
        ("c", {}),
    ]


# --- Names --------------------------------------------------------------------------------------------------------


def used() -> set[str]:
    expressions = [target["expr"] for _, target in TARGETS] + expressions_of_rules()
    return {name for expression in expressions for name, _ in selectors(expression)}


def test_every_name_exists() -> None:
    assert used() <= SERIES.keys()
    rest = json.dumps([BOARD["annotations"], BOARD["templating"]]) + RULES
    assert set(re.findall(r"\battention_\w+\b(?!:)", rest)) <= SERIES.keys() | {"attention_baseline"} | {
        name.split(":")[1] for name in SERIES if ":" in name
    }


def test_every_metric_is_used() -> None:
    told = {metric.name for metric in METRICS if {metric.name, f"{metric.name}_bucket"} & used()}
    assert KINDS.keys() - told == UNUSED


def test_counters_are_rated_and_gauges_are_not() -> None:
    for expression in [target["expr"] for _, target in TARGETS] + expressions_of_rules():
        for name, _ in selectors(expression):
            before = set(re.findall(rf"(\w*)\((?={name}\b)", expression))
            cumulative = name.endswith(("_total", "_bucket", "_count", "_sum")) and not name.startswith("model")
            assert (before <= {"rate", "increase"} and bool(before)) == cumulative, (name, expression)


@pytest.mark.parametrize("expression", [target["expr"] for _, target in TARGETS])
def test_labels_of_queries_exist(expression: str) -> None:
    for name, matchers in selectors(expression):
        assert matchers.keys() <= SERIES[name]
        expected = {"job": "$job", "instance": "$instance"}
        if name not in OTHERS:
            expected["model"] = "$model"
        if "layer" in SERIES[name] and name not in OTHERS:
            expected["layer"] = "$one_layer" if "$one_layer" in expression else "$layer"
        assert {label: matchers.get(label) for label in expected} == expected, name
    labels = {
        label for group in re.findall(r"\b(?:by|without|on) \(([^)]*)\)", expression) for label in group.split(", ")
    }
    assert labels <= set().union(*(SERIES[name] for name, _ in selectors(expression)))


def test_rules_name_labels_that_exist() -> None:
    for block in re.split(r"\n +- (?=alert|record)", RULES)[1:]:
        (expression,) = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*)\n?)", block)
        names = [name for name, _ in selectors("".join(expression))]
        labels = set().union(*(SERIES[name] for name in names))
        assert set(re.findall(r"\$labels\.(\w+)", block)) <= labels
        for group in re.findall(r"\b(?:by|without|on) \(([^)]*)\)", block):
            assert set(group.split(", ")) <= labels


def test_every_alert_is_complete() -> None:
    blocks = re.split(r"\n +- (?=alert|record)", RULES)[1:]
    alerts = [block for block in blocks if block.startswith("alert")]
    names = [re.match(r"alert: (Attention\w+)\n", block)[1] for block in alerts]
    assert len(set(names)) == len(names) > 15
    tests = (FOLDER / "rules_test.yml").read_text("utf-8")
    for name, block in zip(names, alerts, strict=True):
        assert re.search(r"\n +labels: {severity: (critical|warning|info)}\n", block), name
        assert re.search(r"\n +summary: .*\$labels\.(model|instance)", block), name
        assert re.search(r"\n +description: ", block), name
        assert re.search(rf"alertname: {name}, exp_alerts: \[\]", tests), f"{name} is not tested to keep still"
        assert re.search(rf"alertname: {name}\n +exp_alerts:\n", tests), f"{name} is not tested to fire"


# --- The dashboard ------------------------------------------------------------------------------------------------


def test_the_board_itself() -> None:
    assert BOARD["uid"] == "headwise-attention"
    assert "id" not in BOARD
    assert BOARD["schemaVersion"] == 36
    assert "__inputs" not in BOARD
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert [*variables][:5] == ["datasource", "job", "instance", "model", "layer"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("job", "instance", "layer"):
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]
    for variable in variables.values():
        assert variable["label"]
        if variable["type"] == "query":
            assert variable["refresh"] == 2
            assert variable["query"]["query"] == variable["definition"]
    text = json.dumps(BOARD)
    names = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range"}
    assert names == variables.keys()


def test_every_data_source_is_the_variable() -> None:
    def sources(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from (value["datasource"],) if "datasource" in value else ()
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from sources(each)

    found = list(sources(BOARD))
    assert len(found) > 2 * len(PANELS)
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)


def test_panels_lie_in_a_grid() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: dict[tuple[int, int], int] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert cells.setdefault((x, y), panel["id"]) == panel["id"]
    assert {y for _, y in cells} == set(range(max(y for _, y in cells) + 1))
    assert len(cells) == 24 * len({y for _, y in cells})  # no holes
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Health", "Entropy", "Logits", "Sinks and reach", "Layer by head, now", "Cost"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_say_what_they_show(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in ("percentunit", "s", "short", "ops", "none")
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        for step in re.findall(r"\[([^]]*)\]", target["expr"]):
            assert step in ("$__rate_interval", "$__range")
            assert step == "$__rate_interval" or target.get("instant")
        if panel["type"] in ("timeseries", "status-history"):
            assert target["legendFormat"]


def test_heatmaps_read_buckets() -> None:
    """Else Grafana puts the buckets in the order of their text (grafana#18264, #55535)."""
    heatmaps = [panel for panel in PANELS if panel["type"] == "heatmap"]
    assert len(heatmaps) == 3
    for panel in heatmaps:
        assert panel["options"]["calculate"] is False
        (target,) = panel["targets"]
        assert target["format"] == "heatmap"
        assert target["legendFormat"] == "{{le}}"
        assert target["expr"].startswith("sum by (le) (increase(")


def test_tables_are_of_now() -> None:
    tables = [panel for panel in PANELS if panel["type"] in ("table", "stat")]
    for panel in tables:
        assert all(target["instant"] and target["range"] is False for target in panel["targets"])
        assert panel["type"] == "stat" or all(target["format"] == "table" for target in panel["targets"])
    matrices = [panel for panel in tables if panel.get("transformations", [{}])[0].get("id") == "groupingToMatrix"]
    assert [panel["title"] for panel in matrices] == ["Entropy ratio", "Sink weight", "Greatest logit"]


def test_the_history_of_heads_takes_few_points() -> None:
    (panel,) = (panel for panel in PANELS if panel["type"] == "status-history")
    assert panel["maxDataPoints"] <= 60
    assert "$one_layer" in panel["targets"][0]["expr"]


# --- Writing them out ---------------------------------------------------------------------------------------------


def test_all_files_are_listed() -> None:
    folder = resources.files(dashboards)
    assert isinstance(folder, Path)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in there if not name.endswith((".py", ".pyc"))} == set(dashboards.FILES)


def test_files_name_each_other() -> None:
    compose = (FOLDER / "compose.yml").read_text("utf-8")
    mounted = re.findall(r"- \./(\S+?):(\S+):ro", compose)
    assert {name for name, _ in mounted} == {"prometheus.yml", "rules.yml", "provisioning", "attention.json"}
    assert all((FOLDER / name).exists() for name, _ in mounted)
    folder = Path(dict(mounted)["attention.json"]).parent
    assert f"path: {folder} " in (FOLDER / "provisioning/dashboards/attention.yml").read_text("utf-8")
    url = re.search(r"listen-address=(\S+)", compose)[1]
    assert f"url: http://{url}\n" in (FOLDER / "provisioning/datasources/prometheus.yml").read_text("utf-8")
    assert BOARD["uid"] in compose
    assert "NOT RUN" in compose


def test_write(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    paths = dashboards.write(folder)
    assert paths == [folder / name for name in dashboards.FILES]
    for path in paths:
        assert path.read_bytes() == (FOLDER / path.relative_to(folder)).read_bytes()
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(paths)
    assert dashboards.write(str(folder)) == paths  # the same again


def test_changed_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text("mine")
    (tmp_path / "other.yml").write_text("mine too")
    with pytest.raises(ValueError, match=r"^write: directory must .*overwrite=True.*; got \S+rules\.yml$"):
        dashboards.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.yml", "rules.yml"]
    assert (tmp_path / "rules.yml").read_text() == "mine"
    dashboards.write(tmp_path, overwrite=True)
    assert (tmp_path / "rules.yml").read_text("utf-8") == RULES
    assert (tmp_path / "other.yml").read_text() == "mine too"


def test_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "attention.json").write_text("old")
    (tmp_path / "rules_test.yml").mkdir()  # the last of them cannot be written
    with pytest.raises(OSError, match="rules_test"):
        dashboards.write(tmp_path, overwrite=True)
    assert (tmp_path / "attention.json").read_text() == "old"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "attention.json"]


def test_what_would_be_written(tmp_path: Path) -> None:
    assert dashboards.outdated(tmp_path) == [tmp_path / name for name in dashboards.FILES]
    dashboards.write(tmp_path)
    assert dashboards.outdated(tmp_path) == []
    (tmp_path / "rules.yml").write_text("mine")
    (tmp_path / "compose.yml").unlink()
    assert dashboards.outdated(str(tmp_path)) == [tmp_path / "compose.yml", tmp_path / "rules.yml"]


class _Bytes:
    def __fspath__(self) -> bytes:
        return b"x"


@pytest.mark.parametrize("directory", [None, 5, b"", b"x", "", True, ["x"], _Bytes()])
def test_no_path(directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^write: directory must be the path of a folder.*; got "):
        dashboards.write(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^write: directory must be a folder; got "):
        dashboards.write(tmp_path / "file")
