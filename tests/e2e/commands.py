"""The `headwise` command, run in this process."""

from __future__ import annotations

import json
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
