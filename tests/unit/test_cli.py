"""headwise.cli: what is printed where, and the exit codes; the job is replaced (tests/e2e/test_demo.py runs it)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise import pipelines
from headwise.cli import main

RESULT = pipelines.DemoResult(0.987, 101_513, 12.34, 3, (Path("some where/attention.png"),))


def _run(*argv: str) -> Any:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Replace the job; returns what it was called with."""
    made: list[tuple[Path, int]] = []

    def job(output: Path, *, seed: int, progress: Any) -> pipelines.DemoResult:
        made.append((output, seed))
        progress(1, 2, 0.5)
        return RESULT

    monkeypatch.setattr(pipelines, "demo", job)
    return made


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--version") == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"


def test_demo_prints_the_result_and_what_to_do_next(
    calls: list[tuple[Path, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("demo", "--output", "some where", "--seed", "3") == 0
    assert calls == [(Path("some where"), 3)]
    out, err = capsys.readouterr()
    for expected in ("98.7%", "101,513", "12.3", str(Path("some where/attention.png"))):
        assert expected in out
    assert "headwise.MultiheadAttention in place of torch.nn.MultiheadAttention" in out
    assert "50.0%" in err
    assert "50.0%" not in out


def test_demo_defaults(calls: list[tuple[Path, int]]) -> None:
    assert _run("demo") == 0
    assert calls == [(Path("demo-output"), 0)]


def test_demo_json_is_all_there_is(calls: list[tuple[Path, int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("demo", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "test_accuracy": 0.987,
        "parameters": 101_513,
        "seconds": 12.34,
        "seed": 3,
        "files": [str(Path("some where/attention.png"))],
    }
    assert err == ""


@pytest.mark.parametrize("argv", [["demo", "--seed", "-1"], ["demo", "--seed", "x"], ["demo", "--sed", "1"], ["dem"]])
def test_bad_usage_exits_2(argv: list[str], calls: list[tuple[Path, int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*argv) == 2
    assert calls == []
    out, err = capsys.readouterr()
    assert out == ""
    assert argv[-2 if len(argv) > 1 else 0] in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("demo: output must be a folder"), 2),
        (ImportError("pip install 'headwise[observe]'"), 2),
        (OSError("No space left on device"), 1),
        (KeyboardInterrupt("interrupted"), 130),
    ],
)
def test_a_failing_job_is_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipelines, "demo", job)
    assert _run("demo") == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("headwise: ")
    assert lines[0].endswith(str(error))


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert _run("--version") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "pip install 'headwise[cli]'" in err
