"""Tests of one tool each (`pytest.mark.tool`), run on torch's layers and on ours; what held is written down.

A test on torch's side may fail: that is what the page says of torch. Nothing here may skip.
`python -m tests.tools.page` makes `docs/tools.md` of what was written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tools.page import RESULTS

_HERE = Path(__file__).parent
_found: list[dict[str, Any]] = []
_said: list[str] = []


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """The packages are there for `-m tools` alone, and to import them takes a while."""
    asked = config.option.markexpr
    return None if "tools" in asked and "not tools" not in asked else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker("tools")
        if _side(item) == "torch":  # what torch warns of is not held against it
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def _side(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "split" if callspec is None else callspec.params.get("side", "split")


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a line at the end of the run, for measured costs, which a page that is compared cannot hold."""
    return lambda line: record_property("said", line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("tool")
    if _HERE not in item.path.parents:
        return report
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} skipped, which no test of a tool may"
    side = _side(item)
    if marker is not None and (call.when == "call" or report.failed):
        held = report.passed
        if side == "torch" and report.failed and call.when == "call":
            report.outcome, report.wasxfail = "skipped", f"torch's own: {call.excinfo}"
        report.user_properties.append(("tool", marker.kwargs | {"side": side, "held": held}))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "tool" and report.when == "call":
            _found.append(value)
        elif name == "said" and report.when == "teardown":
            _said.append(str(value))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _found and not hasattr(session.config, "workerinput"):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(_found))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _said:
        terminalreporter.write_line(line)
