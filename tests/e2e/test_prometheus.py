"""Metrics, rules and dashboard in a real Prometheus, which is started here on loopback and stopped again.

The rules are the shipped ones with their times made short, by `hurried` alone: what is tested is their expressions.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.observe.readings import layer, snapshot, unseen
from torch import nn

import headwise
from headwise.observe import dashboards, monitor, record
from headwise.observe.prometheus import METRICS, publish

pytestmark = [pytest.mark.integration, pytest.mark.e2e]

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
MISSING = "needs prometheus and promtool; on Debian: apt-get install prometheus"
LAYERS, HEADS, BROKEN = 4, 4, (2, 0)  # the layer and the head that break


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboards")
    dashboards.write(folder)
    return folder


# --- promtool -----------------------------------------------------------------------------------------------------


def promtool(*arguments: str, text: bytes = b"", folder: Path | None = None) -> str:
    """Run it; what it finds fault with fails."""
    if PROMTOOL is None:
        pytest.skip(MISSING)
    done = subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, cwd=folder, timeout=300, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def test_metrics_pass_the_lint() -> None:
    """Small, collapsed and empty models in one registry, and a name that wants to be more than a label."""
    registry = CollectorRegistry()
    models = [
        snapshot(layer(0), layer(1), errors={"ValueError": 1}),
        snapshot(*(layer(index, 64) for index in range(48)), model="large"),
        snapshot(unseen(0), model='quoted "name"\\\n{x="y"} 1 \0 模型'),
        snapshot(model="none"),
    ]
    for model in models:
        publish(lambda model=model: model, registry)
    assert promtool("check", "metrics", text=generate_latest(registry)) == ""


def test_settings_and_rules_are_valid(files: Path) -> None:
    assert "1 rule files found" in promtool("check", "config", "prometheus.yml", folder=files)
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "rules.yml", folder=files)


@pytest.mark.slow
def test_rules_pass_their_tests(files: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml", folder=files)


# --- Prometheus ---------------------------------------------------------------------------------------------------

# A time of the shipped rules -> its time here.
HURRIED = {"1d": "30s", "1h": "4s", "30m": "4s", "15m": "4s", "10m": "4s", "5m": "4s", "1m": "1s"}


def hurried(rules: str) -> str:
    """The same rules with short times; a subquery's step becomes a second."""
    rules = re.sub(r":\d+m\]", ":1s]", rules)
    rules = re.sub(
        r"(\[|offset |\bfor: |\binterval: )(\d+[a-z])\b",
        lambda found: found[1] + HURRIED.get(found[2], found[2]),
        rules,
    )
    left = set(re.findall(r"(?<![\w.:])\d+[smhd]\b", rules)) - set(HURRIED.values())
    assert not left
    return rules


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


class Api:
    """Prometheus's HTTP API."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str | float) -> Any:
        url = f"{self.root}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found = self.get("query", query=expression)["result"]
        assert isinstance(found, list)
        return found

    def query_range(self, expression: str) -> list[dict[str, Any]]:
        """The last 10 s, as a panel over time asks."""
        now = time.time()
        found = self.get("query_range", query=expression, start=now - 10, end=now, step=1)["result"]
        assert isinstance(found, list)
        return found

    def alerts(self, state: str = "firing") -> set[tuple[str, ...]]:
        """Names with layer and head."""
        found = (alert for alert in self.get("alerts")["alerts"] if alert["state"] == state)
        labels = (alert["labels"] for alert in found)
        return {
            tuple(each[name] for name in ("alertname", "model", "layer", "head") if name in each) for each in labels
        }


@contextmanager
def prometheus(folder: Path, files: Path, target: int) -> Iterator[Api]:
    """A Prometheus that scrapes a port of this machine each second, with the shipped rules, hurried."""
    if PROMETHEUS is None:
        pytest.skip(MISSING)
    settings = (files / "prometheus.yml").read_text("utf-8")
    settings = settings.replace("127.0.0.1:9464", f"127.0.0.1:{target}").replace("_interval: 15s", "_interval: 1s")
    (folder / "prometheus.yml").write_text(settings)
    (folder / "rules.yml").write_text(hurried((files / "rules.yml").read_text("utf-8")))
    port = free_port()
    command = [PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        api = Api(port)
        until(lambda: _ready(api), "Prometheus is ready", lambda: (folder / "log").read_text())
        yield api
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(api: Api) -> bool:
    try:
        with urllib.request.urlopen(f"{api.root}/-/ready", timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until(true: Callable[[], bool], what: str, told: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, f"not in a minute: {what}; {told()}"
        time.sleep(0.2)


# --- End to end ---------------------------------------------------------------------------------------------------


class Watched:
    """A padded encoder that runs in a thread, watched."""

    def __init__(self) -> None:
        block = nn.TransformerEncoderLayer(32, HEADS, 64, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=True).eval()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    @contextmanager
    def running(self) -> Iterator[monitor.Monitor]:
        # A budget this great looks often: the times of the rules are short too.
        with headwise.watch(self.model, name="encoder", budget=0.3, port=0) as seen:
            self.thread.start()
            try:
                yield seen
            finally:
                self.stop.set()
                self.thread.join()

    def _run(self) -> None:
        padding = torch.arange(24) >= torch.tensor([24, 17, 12, 20])[:, None]
        draw = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            while not self.stop.is_set():
                self.model(torch.randn(4, 24, 32, generator=draw), src_key_padding_mask=padding)
                self.stop.wait(0.002)

    def break_head(self) -> None:
        """The head's query weights, times 400."""
        attention = self.model.layers[BROKEN[0]].self_attn
        width = attention.head_dim
        with torch.no_grad():
            attention.in_proj_weight[BROKEN[1] * width : (BROKEN[1] + 1) * width] *= 400


def substituted(expression: str, model: str) -> str:
    """What Grafana makes of an expression, with the whole of each variable."""
    known = {
        "job": ".*",
        "instance": ".*",
        "model": re.escape(model).replace("\\", r"\\"),
        "layer": ".*",
        "one_layer": "02",
    }
    known |= {"collapse": "0.05", "__rate_interval": "4s", "__range": "20s"}
    return re.sub(r"\$(\w+)", lambda name: known[name[1]], expression)


def watch_a_head_break(api: Api, model: str, break_head: Callable[[], None]) -> None:
    """Nothing fires; a head breaks; one alert fires, for that head; and every panel shows something."""
    every = LAYERS * HEADS
    baseline = "job_model_layer_head:attention_entropy_ratio:avg1d"
    until(lambda: len(api.query(f"count_over_time({baseline}[1h]) > 4")) == every, "there is a day before")
    assert api.query("up") != []
    assert api.alerts() == set()

    break_head()
    until(lambda: bool(api.alerts()), "an alert fires", lambda: api.query("attention_entropy_ratio"))
    expected = {("AttentionEntropyCollapse", model, f"{BROKEN[0]:02}", f"{BROKEN[1]:02}")}
    end = time.monotonic() + 5  # longer than any other alert would wait
    while time.monotonic() < end:
        assert api.alerts() == expected
        time.sleep(0.5)

    for panel in json.loads((Path(dashboards.__file__).parent / "attention.json").read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            ask = api.query if target.get("instant") else api.query_range
            assert ask(substituted(target["expr"], model)), f"{panel['title']} shows nothing: {target['expr']}"
    (fired,) = api.query(f'ALERTS{{alertname=~"Attention.*", alertstate="firing", model="{model}"}}')
    assert (fired["metric"]["layer"], fired["metric"]["head"]) == ("02", "00")

    found = {name for name in api.get("label/__name__/values") if name.startswith("attention_")}
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in found} <= {
        re.sub("_count$", "", metric.name) for metric in METRICS
    }
    for group in api.get("rules")["groups"]:
        for rule in group["rules"]:
            assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
            assert rule["type"] == "alerting" or api.query(rule["name"]), f"{rule['name']} records nothing"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_head_breaks_in_a_watched_model(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Readings go back a minute, which is short for the shipped rules and long for these.
    monkeypatch.setattr(record, "_WINDOW", 1.0)
    watched = Watched()
    with watched.running() as seen, prometheus(tmp_path, files, seen.port) as api:
        watch_a_head_break(api, seen.name, watched.break_head)
