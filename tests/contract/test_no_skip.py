"""tests/conftest.py: an integration test that skips, in whichever way, fails in CI; torch's state is put back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import pytest, torch

@pytest.mark.integration
def test_inside():
    pytest.skip("no program")

@pytest.mark.integration
@pytest.mark.skipif(True, reason="no program")
def test_marked():
    pass

@pytest.mark.integration
@pytest.mark.xfail(strict=True)
def test_expected_failure():
    raise RuntimeError

def test_plain():
    pytest.skip("may skip")

def test_changes_the_state():
    assert torch.initial_seed() == 0
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)

def test_state_is_put_back():
    assert torch.initial_seed() == 0
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
"""

WHOLE_FILE = """
import pytest
pytestmark = pytest.mark.integration
pytest.importorskip("no_such_module_anywhere")
def test_never_seen():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("no_skip", "outcome"),
    [("1", "1 failed, 2 passed, 1 skipped, 1 xfailed, 2 errors"), ("0", "2 passed, 4 skipped, 1 xfailed")],
)
def test_integration_must_not_skip(tmp_path: Path, no_skip: str, outcome: str) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text(WHOLE_FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    integration\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", "."]
    done = subprocess.run(
        command, cwd=tmp_path, env=env | {"HEADWISE_NO_SKIP": no_skip}, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == (no_skip == "1")
    assert outcome in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert ("must not skip while HEADWISE_NO_SKIP is set" in done.stdout) == (no_skip == "1")
