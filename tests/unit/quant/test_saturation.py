"""A processor without VNNI, emulated: what overflows there, and that nothing of ours does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import headwise

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CODE = """
import json, warnings
import torch
from headwise.quant import Int8Linear, make_state
from headwise.quant.backends import X86, has_vnni
assert not has_vnni()
weight, x = torch.full((8, 64), 0.5), torch.full((70, 64), 2.0)
x[0] = 0
said = {}
for kind, words in {
    "dynamic": {}, "static": {"input_range": (0.0, 2.0)},
    "reduced": {"input_range": (0.0, 2.0), "reduce_range": True},
}.items():
    layer = Int8Linear.of(make_state(weight, None, **words))
    try:
        said[kind] = layer(x)[1:].tolist()
    except ValueError as error:
        said[kind] = str(error)
# What the refused one would have given
packed = X86.pack([make_state(weight, None, (0.0, 2.0))], "fbgemm")
said["unguarded"] = X86.run(packed, x)[1, 0].item()
print(json.dumps(said))
"""


FILES = """
import json, sys
import numpy as np
import onnxruntime
x = np.full((70, 64), 2.0, np.float32)
said = {}
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path)
    said[path] = float(session.run(None, {session.get_inputs()[0].name: x})[0][1, 0])
print(json.dumps(said))
"""


def emulated(code, *arguments):
    """What the code prints last on a Haswell, as JSON."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("needs qemu-x86_64 (Debian: qemu-user)")
    command = [emulator, "-cpu", "Haswell", sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_on_a_haswell():
    said = emulated(CODE)
    assert said["unguarded"] < 40  # of 64: sums of two products beyond 16 bits were cut
    for kind in ("dynamic", "reduced"):
        for row in said[kind]:
            assert row == pytest.approx([64.0] * 8, rel=0.01), kind
    assert "no VNNI" in said["static"]
    assert "reduce_range=True" in said["static"]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_files_on_a_haswell(kind, tmp_path):
    """onnxruntime has no guard of its own: that a file is meant for such a processor has to be said when it is made."""
    layer = nn.Linear(64, 8)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.bias.fill_(0.0)
    x = torch.full((70, 64), 2.0)
    paths = []
    for reduced in (False, True):
        small = headwise.quantize(layer, [x] if kind == "static" else None, reduce_range=reduced)
        paths.append(str(tmp_path / f"{reduced}.onnx"))
        headwise.export_onnx(small, x, paths[-1], verbose=False)
    full, reduced = emulated(FILES, *paths).values()
    assert full < 40  # of 64
    assert reduced == pytest.approx(64.0, rel=0.01)
