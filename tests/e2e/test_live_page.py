"""The live page in a real browser, served on loopback: it refreshes, answers the pointer and the keyboard.

The server sends a page with one more script, which plays the user and writes what it saw into the document.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.browser import browse, played, player

from headwise.observe.live import payload
from headwise.observe.snapshot import HeadReading, Histogram, LayerReading, LiveMap, Snapshot

pytestmark = [pytest.mark.integration, pytest.mark.e2e]

NONE = Histogram((1.0,), (0, 0), 0.0)
PAGE = (resources.files("headwise.observe") / "live.html").read_text("utf-8")


def layer(index: int, live: LiveMap | None, heads: int = 3, **more: Any) -> LayerReading:
    readings = tuple(
        HeadReading(0.25 * (head + 1), 3.0 + head, 7.5 * (index + 1), 0.5, 0.125, None, 2.0) for head in range(heads)
    )
    one = LayerReading(index, f"encoder.{index}", "self", readings, 0.5, 10, 160, 0, 0, 995.0, NONE, NONE, NONE, live)
    return replace(one, **more)


def snapshot(**more: Any) -> Snapshot:
    mass = (2 * torch.randn(3, 4, 6)).softmax(-1)
    mass[0, 1] = 0.0
    plain = LiveMap(2, (0, 5, 17, 40), 41, 43, 8, mass)
    names = tuple(f"<b>{name}" for name in "abcdef")
    named = LiveMap(0, (1, 2, 3, 5), 6, 6, 1, mass.flip(0), tuple(names[q] for q in (1, 2, 3, 5)), names)
    layers = (layer(0, plain), layer(1, named, nonfinite=2, fully_masked=1), layer(2, None, 2, at=None))
    one = Snapshot("a <b>model", 1000.0, 1234, 10, {}, {}, 0.01, 100.0, 0.9, NONE, 123.4, layers)
    return replace(one, **more)


@contextmanager
def served(answer: Callable[[], tuple[int, str]], page: str, seen: list[str]) -> Iterator[str]:
    """A server on a free port, for as long as the block runs; it answers below any mount."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            if re.fullmatch(r".*/attention/?", self.path):
                self.send(200, "text/html; charset=utf-8", page)
            elif self.path.endswith("/attention/data.json"):
                status, text = answer()
                self.send(status, "application/json", text)
            else:
                self.send(404 if "favicon" not in self.path else 204, "text/plain", "")

        def send(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            """Nothing to standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def text_of(one: Snapshot) -> tuple[int, str]:
    return 200, json.dumps(payload(one), allow_nan=False)


LOOK = """
        await until(() => document.documentElement.dataset.ready);
        const cells = () => [...document.querySelectorAll("td button")].map(node => node.textContent);
        const first = { model: text("model"), status: text("status"), cells: cells(), counts: text("counts"),
          bad: [...document.querySelectorAll("#counts .bad dt")].map(node => node.textContent),
          badLayers: [...document.querySelectorAll("tbody th.bad")].map(node => node.textContent),
          title: text("map-title"), about: text("about"), label: document.getElementById("panel").ariaLabel,
          pressed: document.querySelectorAll("td button[aria-pressed=true]").length, images: document.images.length };
        go("max_logit", "statistic");
        const logits = cells(), label = document.querySelector("td button").ariaLabel;
        return { first, logits, label, age: text("age"), bold: document.querySelectorAll("h1 b, .tick b").length };
"""
CLICK = """
        const map = document.getElementById("panel"), ticks = css =>
          [...document.querySelectorAll(".tick." + css)].map(node => node.textContent);
        panel("0,1").click();
        move(map, 0.999, 0.6); const last = text("readout"), queries = ticks("y"), keys = ticks("x");
        panel("0,0").click();
        move(map, 0.1, 0.3); const dead = text("readout"), rows = text("rows");
        const before = pixels(map.firstChild).join();
        click("log"); const logged = pixels(map.firstChild).join(); click("log");
        panel("1,2").click();
        move(map, 0.3, 0.9); const named = text("readout"), tokens = [ticks("y"), ticks("x")];
        panel("2,1").click();
        const nothing = [text("about"), map.hidden, text("map-title")];
        return { last, queries, keys, dead, rows, named, tokens, nothing, changes: before !== logged };
"""
KEYS = """
        panel("0,0").click(); panel("0,0").focus();
        const seen = [], look = () => seen.push([text("map-title"), document.activeElement.dataset.head ?? ""]);
        for (const key of ["ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"]) {
          press(key); look(); }
        document.getElementById("panel").dispatchEvent(new PointerEvent("pointerleave"));
        document.getElementById("panel").focus();
        press("ArrowRight"); look();
        press("ArrowDown", { shiftKey: true }); press("ArrowRight", { shiftKey: true });
        const cell = text("readout");
        press("p"); const paused = [text("status"), document.getElementById("pause").ariaPressed];
        press("p");
        return { seen, cell, paused };
"""


def value_of(readout: str) -> tuple[float, float]:
    found = re.search(r"weight ([\d.e-]+) ± ([\d.e-]+)$", readout)
    assert found is not None, readout
    return float(found[1]), float(found[2])


def near(readout: str, mass: float) -> bool:
    value, slack = value_of(readout)
    return value == pytest.approx(mass, abs=1.1 * slack + 0.01 * value)


def test_what_one_sees_and_does(tmp_path: Path) -> None:
    one, paths = snapshot(), list[str]()
    with served(lambda: text_of(one), PAGE.replace("</body>", player(LOOK, CLICK, KEYS)), paths) as url:
        # The script reads one canvas twice, which Chromium has an opinion on.
        dom = browse(f"{url}/attention", "--dump-dom", profile=tmp_path / "profile", noise="willReadFrequently")
    looked, clicked, keyed = played(dom)
    assert set(paths) - {"/favicon.ico"} == {"/attention", "/attention/data.json"}
    check_looks(looked)
    check_clicks(clicked, one)
    titles = [
        f"encoder.{index}, head {head}" for index, head in [(0, 1), (1, 1), (2, 1), (2, 1), (2, 1), (1, 1), (1, 0)]
    ]
    assert [title for title, _ in keyed["seen"]] == [*titles, "encoder.1, head 1"]
    assert [head for _, head in keyed["seen"]] == ["0,1", "1,1", "2,1", "2,1", "2,1", "1,1", "1,0", ""]
    live = one.layers[1].live
    assert live is not None
    assert keyed["cell"].startswith("query “<b>b” (1) → key “<b>b” (1) · weight ")
    assert near(keyed["cell"], float(live.mass[1, 0, 1]))
    assert keyed["paused"] == ["paused", "true"]


def check_looks(seen: Any) -> None:
    first = seen["first"]
    assert first["model"] == "a <b>model"
    assert first["status"] == "live"
    assert first["cells"] == ["0.25", "0.50", "0.75"] * 2 + ["0.25", "0.50"]
    assert seen["logits"] == ["7.5"] * 3 + ["15"] * 3 + ["22.5"] * 2
    assert seen["label"] == "encoder.0, head 0: max logit 7.5"
    for words in ("1,234", "10 looked at, every 123", "0.9 %", "budget 1 %", "layer 1: 2", "layer 1: 1", "480"):
        assert words in first["counts"]
    assert first["bad"] == ["fully masked rows", "non-finite rows"]
    assert first["badLayers"] == ["1  encoder.1"]
    assert first["title"] == "encoder.0, head 0"
    assert first["about"] == "4 rows of sample 2, which has 41 queries and 43 keys; 8 keys a cell, summed; 5 s ago"
    assert first["label"].startswith("encoder.0, head 0: 4 rows; most attended keys ")
    assert (first["pressed"], first["images"], seen["bold"]) == (1, 0, 0)
    assert seen["age"] == "last looked at a layer 5 s ago"


def check_clicks(seen: Any, one: Snapshot) -> None:
    plain, named = one.layers[0].live, one.layers[1].live
    assert plain is not None
    assert named is not None
    assert seen["last"].startswith("query 17 → key 40 to 42 · weight ")  # the last cell holds three keys of eight
    assert near(seen["last"], float(plain.mass[1, 2, 5]))
    assert seen["queries"] == ["0", "5", "17", "40"]
    assert seen["keys"][:3] == ["0", "2", "4"]
    assert seen["dead"] == "query 5 → key 0 to 7 · weight exactly 0"
    assert "5none: it sees no key" in seen["rows"]
    assert seen["named"].startswith("query “<b>f” (5) → key “<b>b” (1) · weight ")
    assert near(seen["named"], float(named.mass[2, 3, 1]))
    assert seen["tokens"] == [[f"<b>{name}" for name in "bcdf"], [f"<b>{name}" for name in "abcdef"]]
    assert seen["nothing"] == ["No rows of it yet.", True, "encoder.2, head 1"]
    assert seen["changes"]


def test_it_refreshes_and_says_when_it_is_cut_off(tmp_path: Path) -> None:
    """Numbers change by themselves; a pause holds them; without answers the page says so and comes back."""
    count = iter(range(100))
    answers = {0: 200, 1: 200, 2: 503, 3: 200}

    def answer() -> tuple[int, str]:
        number = next(count)
        return answers.get(number, 200), text_of(snapshot(forwards=number, time=1000.0 + (100 if number > 2 else 0)))[1]

    script = """
        const ready = () => Number(document.documentElement.dataset.ready), seen = [];
        const look = () => seen.push([text("status").replace(/[0-9:]{8}/, "TIME"),
          document.querySelector("#counts dd").firstChild.textContent, document.getElementById("main").className]);
        for (let i = 1; i < 5; i++) { await until(() => ready() >= i); look(); }
        seen.push(text("age"));
        click("pause"); const held = ready();
        await new Promise(done => setTimeout(done, 5000));
        seen.push(ready() - held); look();
        click("pause"); await until(() => ready() > held); look();
        return seen;
    """
    noise = "503 (Service Unavailable)"
    with served(answer, PAGE.replace("</body>", player(script)), []) as url:
        dom = browse(f"{url}/attention", "--dump-dom", profile=tmp_path / "profile", clock=30_000, noise=noise)
    (seen,) = played(dom)
    assert seen[:4] == [
        ["live", "0", ""],
        ["live", "1", ""],
        ["disconnected since TIME, trying again", "1", "old"],
        ["stale", "3", ""],
    ]
    assert seen[4] == "last looked at a layer 2 min ago; no newer rows since"
    assert seen[5:] == [0, ["paused", "3", ""], ["stale", "4", ""]]


@pytest.mark.parametrize("path", ["/attention/", "/monitor/attention", "/a/b/attention/"])
def test_below_a_mount(path: str, tmp_path: Path) -> None:
    paths: list[str] = []
    with served(
        lambda: text_of(snapshot()),
        PAGE.replace(
            "</body>", player("await until(() => document.documentElement.dataset.ready); return text('status')")
        ),
        paths,
    ) as url:
        dom = browse(url + path, "--dump-dom", profile=tmp_path / "profile")
    assert played(dom) == ["live"]
    assert path.rstrip("/") + "/data.json" in paths
