"""The `headwise` command, run in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwise.cli import main


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in argv])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    capsys.readouterr()
    assert run(*argv, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def check_refused(capsys: pytest.CaptureFixture[str], argv: Sequence[str], message: str, folder: Path) -> None:
    """It ends with code 2 and one line, which says that, and touches no file below the folder."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line]
    assert re.search(message, line), line
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
