"""Runs recipes/edge/serve.py as on a small machine, where torch and headwise are not to be had; or quicker, in here."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

SERVE = Path(__file__).parents[2] / "recipes" / "edge" / "serve.py"

# In a process of its own (-I: no environment, no folder of this repository on the path): what is on the list is not
# there, as if it were not installed.
GUARD = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "headwise", "onnx", "onnxscript", "safetensors", "pandas", "scipy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Served:
    code: int
    answers: list[dict[str, Any]]
    said: list[str]


def command(*argv: object) -> list[str]:
    return [sys.executable, "-I", "-c", GUARD, str(SERVE), *map(str, argv)]


def serve(*argv: object, text: str | None = None) -> Served:
    done = subprocess.run(command(*argv), input=text, capture_output=True, text=True, check=False, timeout=120)
    return Served(done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr.splitlines())


def serve_here(*argv: object, text: str = "", err: TextIO | None = None) -> Served:
    """The same in this process; `text` comes from a file, and errors go to `err` where there is one."""
    spec = importlib.util.spec_from_file_location("serve", SERVE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # its dataclasses look for it there
    out, said = io.StringIO(), io.StringIO()
    try:
        spec.loader.exec_module(module)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err or said), _file_of(text) as given:
            code = module.main([*map(str, argv), *given])
    finally:
        del sys.modules["serve"]
    return Served(code, [json.loads(line) for line in out.getvalue().splitlines()], said.getvalue().splitlines())


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[list[str]]:
    if not text:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stream.csv")
        path.write_text(text, "utf-8")
        yield [str(path)]
