"""headwise._checks: the one form of every error, and the door for optional dependencies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headwise._checks import invalid, need


def test_the_form_of_an_error() -> None:
    error = invalid(
        "attention", "key", "be as wide as query", 32, query=torch.zeros(2, 8, 5, 64), key=torch.zeros(2, 8, 7, 32)
    )
    assert type(error) is ValueError
    assert str(error) == "attention: key must be as wide as query; got 32 (query (2, 8, 5, 64), key (2, 8, 7, 32))"


def test_tensors_that_are_absent_are_left_out() -> None:
    assert str(invalid("f", "x", "be 1", "2")) == "f: x must be 1; got 2"
    assert str(invalid("f", "x", "be 1", 2, mask=None)) == "f: x must be 1; got 2"
    assert str(invalid("f", "x", "be 1", 2, a=None, b=torch.zeros(()))) == "f: x must be 1; got 2 (b ())"


def test_need_gives_the_module() -> None:
    assert need("json", "none") is sys.modules["json"]
    assert need("xml.dom", "none").__name__ == "xml.dom"


@pytest.mark.parametrize("module", ["no_such_library", "no_such_library.figure"])
def test_need_says_what_to_install(module: str) -> None:
    with pytest.raises(
        ImportError,
        match=r"^headwise needs no_such_library for this; install it with: pip install 'headwise\[observe\]'$",
    ) as raised:
        need(module, "observe")
    assert raised.value.name == module


def test_need_lets_other_import_errors_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is there but broken, or that lacks one of its own: its own message is the right one."""
    (tmp_path / "half_installed.py").write_text("import no_such_library_of_its_own\n")
    (tmp_path / "broken.py").write_text("raise ImportError('wrong version')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library_of_its_own"):
        need("half_installed", "observe")
    with pytest.raises(ImportError, match=r"^wrong version$"):
        need("broken", "observe")
