"""Exactly what is listed is hidden, and everything is afterwards what it was."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import suppress

import pytest
import torch

from headwise.export.quiet import plainly, quiet, quiet_start, without_graph


def test_loggers_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    root, logger = logging.getLogger(), logging.getLogger("torchao")
    before = list(root.handlers), root.level, list(logger.filters), list(warnings.filters)
    with quiet():
        logger.warning("Failed to load %s", "kernels.so")
        logger.warning("another")
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.ERROR)
        warnings.warn("This API is experimental and subject to change without notice.", stacklevel=1)
        with pytest.raises(UserWarning, match="mine"):
            warnings.warn("mine", stacklevel=1)
    assert [record.message for record in caplog.records] == ["another"]
    assert before == (list(root.handlers), root.level, list(logger.filters), list(warnings.filters))


def test_lines_of_standard_error(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "executorch.runtime", raising=False)
    with suppress(KeyError), quiet_start():
        os.write(2, b"[cpuinfo_utils.cpp:71] Reading\nmine\n")
        raise KeyError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "mine\nafter\n"


def test_state_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, names in the environment, torch's trace logger, default dtype."""
    monkeypatch.setenv("OPENVINO_LIB_PATH", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    trace, state = logging.getLogger("torch.__trace"), torch.get_rng_state()
    handlers, kind = list(trace.handlers), torch.get_default_dtype()
    with quiet(), plainly():
        os.environ["OPENVINO_LIB_PATH"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = "theirs"
        trace.addHandler(logging.NullHandler())
        torch.set_default_dtype(torch.float64)
        torch.rand(3)
    assert os.environ["OPENVINO_LIB_PATH"] == "mine"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert trace.handlers == handlers
    assert torch.get_default_dtype() == kind
    assert torch.equal(torch.get_rng_state(), state)


def test_half_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError()
    error.partial_fx_graph = "def forward"  # type: ignore[attr-defined]
    with suppress(RuntimeError), without_graph():
        print("mine\ndef forward", file=sys.stderr)
        raise error
    assert capsys.readouterr().err == "mine\n"
