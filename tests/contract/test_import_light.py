"""Importing headwise loads torch and the standard library, and does nothing else.

Each of its modules can be imported without any optional library, and is as quiet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.contract.source import module_name, source_files
from tests.contract.test_layering import OPTIONAL

BLOCKED = sorted(set().union(*OPTIONAL.values()))

# Runs in a fresh interpreter: imports each module, and says what it did besides.
PROBE = r'''
import importlib, json, os, sys

modules, own, blocked = json.loads(sys.argv[1])


class Without:
    """A finder that knows nothing of the blocked libraries, as if they were not installed."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = map(Without, sys.meta_path)
import sysconfig
import torch

sysconfig.get_config_vars()  # loads a module of the standard library with the platform's name
did = []

# Device queries, compilation, and torch's process-wide switches.
FORBIDDEN = (
    "accelerator.current_accelerator", "accelerator.device_count", "accelerator.is_available", "backends.cuda.is_built",
    "backends.mps.is_available", "compile", "cuda.current_device", "cuda.device_count", "cuda.get_device_capability",
    "cuda.get_device_properties", "cuda.init", "cuda.is_available", "cuda._lazy_init", "get_num_threads", "jit.script",
    "manual_seed", "set_default_dtype", "set_default_device", "set_float32_matmul_precision", "set_grad_enabled",
    "set_num_threads", "use_deterministic_algorithms", "xpu.is_available",
)
for dotted in FORBIDDEN:
    *path, name = dotted.split(".")
    owner = torch
    for part in path:
        owner = getattr(owner, part)

    def forbid(*args, _original=getattr(owner, name), _dotted=dotted, **kwargs):
        did.append(f"calls torch.{_dotted}")
        return _original(*args, **kwargs)

    setattr(owner, name, forbid)


def watch_environment(method):
    original = getattr(type(os.environ), method)

    def watched(self, *args):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in own:
            did.append("reads the environment")
        return original(self, *args)

    setattr(type(os.environ), method, watched)


watch_environment("__getitem__")
watch_environment("__iter__")


def audit(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.posix_spawn", "os.fork"):
        did.append(f"does {event}")


sys.addaudithook(audit)

standard = sys.stdlib_module_names | {name for name in sys.modules if name.startswith("_sysconfigdata")}
report = {}
for module in modules:
    did.clear()
    before = set(sys.modules)
    try:
        importlib.import_module(module)
    except Exception as error:
        did.append(f"{type(error).__name__}: {error}")
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    did.extend(f"loads {name}" for name in sorted(new - standard - {"torch", *own}))
    report[module] = sorted(set(did))
print(json.dumps(report))
'''


def probe(
    modules: list[str], own: list[str], blocked: Sequence[str] = (), path: Path | None = None
) -> dict[str, list[str]]:
    """Import the modules in a fresh interpreter; for each, what it did that it should not."""
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, "-W", "error", "-c", PROBE, json.dumps([modules, own, blocked])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_import_headwise_loads_torch_and_the_standard_library() -> None:
    assert probe(["headwise"], own=["headwise"]) == {"headwise": []}


def test_every_module_imports_without_optional_libraries() -> None:
    modules = [module_name(path) for path in source_files() if path.name != "__main__.py"]
    assert probe(modules, own=["headwise"], blocked=BLOCKED) == {module: [] for module in modules}


BAD = {
    "bad_library": ("import mpmath", "loads mpmath"),
    "bad_optional": ("import matplotlib.figure", "ModuleNotFoundError: No module named 'matplotlib'"),
    "bad_device": ("import torch\nif torch.cuda.is_available(): pass", "calls torch.cuda.is_available"),
    "bad_compile": ("import torch\n@torch.compile\ndef f(x): return x", "calls torch.compile"),
    "bad_seed": ("import torch\ntorch.manual_seed(0)", "calls torch.manual_seed"),
    "bad_environment": ("import os\nx = os.environ.get('X')", "reads the environment"),
    "bad_getenv": ("import os\nx = os.getenv('X')", "reads the environment"),
    "bad_process": ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])", "does subprocess.Popen"),
    "bad_error": ("raise RuntimeError('at import')", "RuntimeError: at import"),
}


@pytest.mark.slow
def test_the_probe_catches_each_misdeed_and_no_other(tmp_path: Path) -> None:
    for name, (text, _) in BAD.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "good.py").write_text("import json, os\nimport torch.nn.functional\ndef f(): return os.environ['X']\n")
    modules = [*BAD, "good"]
    report = probe(modules, own=modules, blocked=BLOCKED, path=tmp_path)
    assert report["good"] == []
    for name, (_, misdeed) in BAD.items():
        # torch.compile loads much of the compiler, which does more of what is not wanted; the others do one thing.
        assert misdeed in report[name] if name == "bad_compile" else report[name] == [misdeed]
