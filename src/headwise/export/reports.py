"""What `export_onnx` found out about the file it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise._checks import counted, need
from headwise.export.leaner import sizes_of
from headwise.export.verify import Trial


@dataclass(frozen=True)
class OnnxValue:
    """An input or output of a file.

    Attributes:
        name: by which a session takes or gives it.
        dtype: as onnx writes it: "float", "int64", "bool".
        shape: numbers, and names of the sizes that are free.
        limits: what these may be: "length at most 64". A runtime does not hold them.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    limits: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Any) -> OnnxValue:
        """What a `ValueInfoProto` says.

        Raises:
            ValueError: a type that ONNX does not have.
        """
        types = need("onnx", "onnx").TensorProto.DataType
        return cls(value.name, types.Name(value.type.tensor_type.elem_type).lower(), tuple(sizes_of(value)))

    def __str__(self) -> str:
        limits = "".join(f", {limit}" for limit in self.limits)
        return f"{self.name} {self.dtype} ({', '.join(map(str, self.shape))}){limits}"


@dataclass(frozen=True)
class OnnxReport:
    """An ONNX file that was written and tried; `print` it.

    Attributes:
        path: of the file.
        opset: of the ONNX operators.
        kind: "float", or of the int8 projections "static", "dynamic" or "mixed".
        inputs: in the order of the forward's parameters.
        outputs: `output`, `output_1` ... or the keys of the dict that the model returns.
        bytes: of the file.
        float_bytes: of the same file with float32 weights.
        operators: how many nodes of each kind the file has.
        projections: int8 products in the file; the query, key and value projections of a self-attention are one.
        integer_operators: how many integer products of each kind onnxruntime runs, by its optimized graph.
        trials: the file beside the model, at several sizes, and with other numbers at the example's.
        tolerance: that every trial is held to.
        notes: what is worth knowing: sizes that are fixed, constants, sizes that the model does not take.
    """

    path: Path
    opset: int
    kind: str
    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    bytes: int
    float_bytes: int
    operators: Mapping[str, int]
    projections: int
    integer_operators: Mapping[str, int]
    trials: tuple[Trial, ...]
    tolerance: float
    notes: tuple[str, ...] = field(default=())

    @property
    def size_ratio(self) -> float:
        """Bytes of the file for each byte that it would have with float32 weights."""
        return self.bytes / max(1, self.float_bytes)

    @property
    def error(self) -> float:
        """The largest error of the trials with the example's numbers; others, 200 times as large, cost digits."""
        return max(trial.error for trial in self.trials if not trial.values)

    def __str__(self) -> str:
        kind = "float32" if self.kind == "float" else f"int8, {self.kind}"
        size = f"{self.bytes:,} bytes"
        if self.kind != "float":
            size += f", {self.size_ratio:.2f} of float32"
        lines = [
            f"{self.path}: ONNX opset {self.opset}, {kind}, {size}, {counted(sum(self.operators.values()), 'node')}"
        ]
        lines += [f"  in   {value}" for value in self.inputs]
        lines += [f"  out  {value}" for value in self.outputs]
        if self.kind != "float":
            found = ", ".join(f"{number} {name}" for name, number in self.integer_operators.items())
            lines.append(f"  onnxruntime runs {found} for {counted(self.projections, 'int8 product')}")
        lines.append(f"  largest difference from the model, as a share (at most {self.tolerance:g} is taken):")
        lines += [f"    {trial}" for trial in self.trials]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
