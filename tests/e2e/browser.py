"""Chromium without a window: it opens a page and prints its document, with what a script saw there, or a picture."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZE = (1280, 900)

# For scripts that play the user.
HELPERS = """
const panel = at => document.querySelector(`[data-head="${at}"]`);
const move = (node, x, y, kind = "pointermove") => { const box = node.getBoundingClientRect();
  node.dispatchEvent(new PointerEvent(kind, { bubbles: true,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height })); };
const wheel = (node, x, y, deltaY) => { const box = node.getBoundingClientRect();
  node.dispatchEvent(new WheelEvent("wheel", { bubbles: true, cancelable: true, deltaY,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height })); };
const drag = (at, x0, y0, x1, y1) => {
  move(panel(at), x0, y0, "pointerdown"); move(panel(at), x1, y1); move(panel(at), x1, y1, "pointerup"); };
const press = (key, more = {}) =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, ...more }));
const text = id => document.getElementById(id).textContent;
const click = id => document.getElementById(id).click();
const go = (at, id = "sample") => { const node = document.getElementById(id);
  node.value = at; node.dispatchEvent(new Event("change")); };
const pixels = canvas => [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
const until = async what => { while (!what()) await new Promise(done => setTimeout(done, 50)); };
"""


def browse(url: str, *arguments: str, profile: Path, clock: int = 3000, noise: str = "") -> str:
    """Open the page, let `clock` ms of its own time pass, return what the browser printed.

    Nothing may reach its console, but lines that hold `noise`.
    """
    if CHROMIUM is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}", f"--virtual-time-budget={clock}"]
    command += ["--enable-logging=stderr", "--v=0", "--force-device-scale-factor=1", *arguments, url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    unexpected = [line for line in console if not noise or noise not in line]
    assert not unexpected, unexpected
    return done.stdout


def player(*scripts: str) -> str:
    """A script element that runs these function bodies, one after the other, and writes down what they return.

    They may await; the page's own scripts have run before.
    """
    calls = " ".join(f"done.push(await (async () => {{{script}}})());" for script in scripts)
    body = f"<script>(async () => {{{HELPERS} const done = []; {calls} "
    body += "const node = document.createElement('output'); node.id = 'played'; "
    body += "node.textContent = JSON.stringify(done); document.body.append(node); })()</script></body>"
    return body


def played(dom: str) -> list[Any]:
    """What the scripts returned."""
    opening = re.search(r"<html[^>]*>", dom)
    assert opening is not None
    assert "data-ready=" in opening[0]
    assert "data-error" not in opening[0], opening[0]
    found = re.search(r'<output id="played">(.*?)</output>', dom, re.S)  # it is text, whatever it holds
    assert found is not None, "the script did not end"
    results: list[Any] = json.loads(html.unescape(found[1]))
    return results
