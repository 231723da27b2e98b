"""Whether an ONNX file does what the model does: its numbers, its integer operators, its size."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise._checks import need
from headwise.export.graphs import operators

# What onnxruntime runs integer products with.
INTEGER_OPERATORS = (
    "QGemm",
    "QLinearMatMul",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "QLinearConv",
    "ConvInteger",
)
_QUIET = 4  # what fails comes as an error of Python too; that an optimized file fits this machine only is meant here
_HUGE = 1e8  # and above: what stands for infinity
_TINY = 1e-38
_LEAST = 1e-6  # of an output: below it numbers count as they are, not as shares


def at_sizes(sizes: Mapping[str, int]) -> str:
    """`batch 3, length 7`."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


@dataclass(frozen=True)
class Trial:
    """A file and the model, side by side on one input.

    Attributes:
        sizes: of what is free, by name.
        error: the largest difference as a share of the largest number of that output; over all outputs. Infinite where
            shapes differ, or one of them holds NaN or infinity where the other does not.
        values: what was done to the example's numbers: "negated". Empty: nothing.
        own: what the model itself differs by for an input that differs in its last digits, where `error` is above what
            is taken and no more than some of that.
        holds: the file is right there.
        raised: what the runtime said instead of giving numbers.
    """

    sizes: Mapping[str, int]
    error: float
    values: str = ""
    own: float = 0.0
    holds: bool = True
    raised: str = ""

    def __str__(self) -> str:
        sizes = at_sizes(self.sizes) or "the example"
        values = f", {self.values}" if self.values else ""
        own = f" (the model's own for a change in the last digit: {self.own:.1e})" if self.own else ""
        return f"{sizes}{values}: {self.raised or f'{self.error:.1e}'}{own}"


def source_of(path: Path) -> str | bytes:
    """What to give a reader of ONNX files: by another suffix it may take the file for one of another format."""
    return str(path) if path.suffix == ".onnx" else path.read_bytes()


def open_session(path: Path) -> tuple[Any, dict[str, int]]:
    """An onnxruntime session on the CPU with default settings, and how many integer products of each kind it runs."""
    onnx, runtime = need("onnx", "onnx"), need("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = _QUIET
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        session = runtime.InferenceSession(source_of(path), options, providers=["CPUExecutionProvider"])
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    return session, {name: number for name, number in operators(model).items() if name in INTEGER_OPERATORS}


def run(session: Any, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a session for these inputs; one that the graph does not read is left out."""
    taken = {one.name for one in session.get_inputs()}
    fed = {name: x.numpy() for name, x in zip(names, tensors, strict=True) if name in taken}
    return [torch.as_tensor(out) for out in session.run(None, fed)]


def difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest difference of two lists of outputs, as a share of the largest number of each output.

    Of integers and bools: the share of the entries that differ.
    """
    return max(differences(got, want), default=0.0)


def differences(got: Sequence[Tensor], want: Sequence[Tensor], scales: Sequence[float] | None = None) -> list[float]:
    """`difference` of each output.

    Args:
        got: outputs of one.
        want: and of the other.
        scales: the largest number of each output elsewhere: where all are far smaller, they count as shares of it.
    """
    if len(got) != len(want):
        return [math.inf]
    known = [1.0] * len(want) if scales is None else scales
    return [_one_difference(a, b, scale) for a, b, scale in zip(got, want, known, strict=True)]


def scale_of(x: Tensor) -> float:
    """The largest finite number of an output that does not stand for infinity."""
    if not x.is_floating_point():
        return 1.0
    usual = x[x.isfinite() & (x.abs() < _HUGE)]
    return float(usual.abs().max()) if usual.numel() else 1.0


def _one_difference(got: Tensor, want: Tensor, scale: float) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if got.numel() == 0:
        return 0.0
    if not want.is_floating_point():
        return float((got != want).double().mean())
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    if not torch.equal(got[got.isinf()], want[want.isinf()]):
        return math.inf
    # what stands for infinity (a masked logit's -1e9) counts apart, so that it does not hide all others
    usual = finite & (want.abs() < _HUGE)
    least = _LEAST * min(1.0, scale)
    return max(_share(got[some], want[some], least) for some in (usual, finite & ~usual))


def _share(got: Tensor, want: Tensor, least: float) -> float:
    apart = float((got - want).abs().max()) if want.numel() else 0.0
    return apart / max(float(want.abs().max()), least, _TINY) if apart else 0.0
