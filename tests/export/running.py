"""What tests of ONNX files share."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor


def run(path: Path, **fed: Tensor) -> list[Tensor]:
    """The outputs of a file in onnxruntime for these inputs."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(out) for out in session.run(None, {name: x.numpy() for name, x in fed.items()})]
