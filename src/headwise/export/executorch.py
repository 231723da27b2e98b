"""`export_executorch`: a model as a .pte file that XNNPACK runs on phones and other small machines."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import at_least, counted, invalid, need
from headwise._files import whole
from headwise.export import shapes, verify, xnnpack
from headwise.export.doors import broken, check_tolerance, target_of
from headwise.export.parts import Call, Positional, first_call, followed, take_apart, traceable
from headwise.export.quiet import plainly, quiet, quiet_start
from headwise.export.verify import Trial
from headwise.quant.backends import REFERENCE
from headwise.quant.linear import Int8Linear
from headwise.quant.quantize import report

__all__ = ["ExecutorchReport", "export_executorch"]

_NAME = "export_executorch"
# The largest difference as a share of the largest number of an output
_CLOSE_FLOAT = 1e-4
_CLOSE_INT8 = 5e-2  # to the int8 model, whose inputs are rounded on another grid
_CLOSE_ROUNDED = 2e-2  # to torch on the file's own grid: a number at the edge may fall on either side
_SPARE_BYTES, _BYTES_PER_OPERATOR = 2**16, 2**10  # what a file holds beside weights, at most


@dataclass(frozen=True)
class ExecutorchReport:
    """An ExecuTorch file that was written and tried; `print` it.

    Attributes:
        path: of the file.
        kind: "float" or "int8".
        inputs: in this order: name, dtype and shape, `x float32 (1, length 1..512, 256)`.
        num_parts: pieces of the program that XNNPACK runs; 1 is best, each further one is a step out and in again.
        num_delegated: operators within them.
        left: how many of each operator are left to ExecuTorch's portable kernels.
        num_int8: int8 products that XNNPACK runs.
        num_static: int8 layers whose input's scale was known; the file takes it from each row of the input.
        trials: the file in ExecuTorch's runtime beside the model, at several sizes.
        tolerance: that every trial is held to.
        bytes: of the file.
        float_bytes: of the model's parameters and buffers, were its int8 weights float32.
        planned_bytes: memory that the program sets aside for the largest inputs, for outputs, and between the parts.
        notes: what is worth knowing.
    """

    path: Path
    kind: str
    inputs: tuple[str, ...]
    num_parts: int
    num_delegated: int
    left: Mapping[str, int]
    num_int8: int
    num_static: int
    trials: tuple[Trial, ...]
    tolerance: float
    bytes: int
    float_bytes: int
    planned_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def size_ratio(self) -> float:
        """Bytes of the file for each byte of the float model."""
        return self.bytes / max(1, self.float_bytes)

    @property
    def error(self) -> float:
        """The largest of all trials."""
        return max((trial.error for trial in self.trials), default=0.0)

    def __str__(self) -> str:
        beside = [str(trial) for trial in self.trials]
        if self.num_static:  # where the model cuts off what its calibration did not hold, and the file does not
            beside[1:] = [f"{one} (reported only)" for one in beside[1:]]
        left = ", ".join(f"{number} {name}" for name, number in self.left.items()) or "nothing"
        parts, delegated = counted(self.num_parts, "part"), counted(self.num_delegated, "operator")
        lines = [
            f"{self.path.name}: {self.kind}, {self.bytes:,} bytes, {self.size_ratio:.2f} of the float model",
            f"  inputs: {'; '.join(self.inputs)} ({self.planned_bytes:,} bytes planned for the largest)",
            f"  XNNPACK runs {delegated} in {parts}, {counted(self.num_int8, 'int8 product')} among them",
            f"  left to portable kernels: {left}",
            f"  beside the model (at most {self.tolerance:.0e}): {'; '.join(beside)}",
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def export_executorch(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: shapes.Shapes | None = None,
    max_size: int = 512,
    max_batch: int = 8,
    tolerance: float | None = None,
    verbose: bool = True,
) -> ExecutorchReport:
    """Write a model as an ExecuTorch file for XNNPACK, and run the file beside the model before it gets its name.

    Args:
        model: any module. Not changed: a copy in eval mode, on the CPU, is exported, with torch's attention and
            Transformer layers upgraded. One from `headwise.quantize` or `headwise.convert` gives an int8 file with the
            same integer weights; its inputs are rounded row by row, whether the model was static or dynamic.
        example: inputs of one call: a tensor, a tuple of arguments or a dict of keywords of the model's forward.
            Tensors are the inputs of the file, in the order of the forward's parameters; masks too. Anything else
            (`is_causal=True`) is written into it.
        path: of the file, usually .pte; its folder must exist. A file that is there stays until the new one is whole
            and tried.
        dynamic_shapes: names of the sizes that shall be free, `{"x": {1: "length"}}`; all others are fixed. None: every
            size that the model leaves free and that is not 1 in the example. `{}`: none. In the place of a name may be
            a `torch.export.Dim`, whose greatest size goes before `max_size`. With a batch of 1, which stays
            1, XNNPACK takes an encoder as one part; with a free batch and a free length it cannot reshape.
        max_size: the greatest free size, if the example's own is not greater. Memory is planned for it.
        max_batch: the same for the batch, where it can be told which size that is; the scores of all of it at the
            greatest length may have to lie between two parts.
        tolerance: what the file's numbers may differ by from the model's, as a share of the largest number of an
            output. None: 1e-4, and 5e-2 for int8, whose inputs are rounded on another grid than the model's.
        verbose: print the report.

    Returns:
        The report: what XNNPACK runs and what it does not, size, errors at several sizes.

    Raises:
        ValueError: a wrong argument, a call that the model does not take, a model that is still in
            quantization-aware training, or what no file can hold: caches, nested tensors, masks with tensors of their
            own, control flow that depends on numbers.
        RuntimeError: the file does not do what the model does: other numbers, float products for int8 layers, a size
            that is not int8's. Nothing is left behind.
        ImportError: executorch is missing; `pip install 'headwise[edge]'`.

    A row that sees no key gives what the model gives.

    Cost: some seconds, and the model three times in memory. Threads take turns.
    Not measured: ARM, where the file is meant to run.
    Source: https://docs.pytorch.org/executorch; docs/edge-executorch.md.
    """
    target, most = target_of(_NAME, path, "model.pte"), at_least(2, _NAME, "max_size", max_size)
    batch = at_least(1, _NAME, "max_batch", max_batch)
    check_tolerance(_NAME, tolerance)
    with quiet(), plainly(), torch.no_grad():
        twin = traceable(_NAME, model)
        _on_any_processor(twin)
        call = take_apart(_NAME, twin, example)
        module = Positional(_NAME, twin, call)
        first_call(_NAME, module, call)
        wanted = _wanted(call, dynamic_shapes)
        need("executorch.exir", "edge")
        need("torchao", "edge")  # ExecuTorch loads it itself, later and with another message
        light = xnnpack.lean(copy.deepcopy(twin))
        rounded = Positional(_NAME, light.model, call)
        program = _trace(rounded, call, wanted, _greatest(twin, call, wanted, most, batch))
        sizes = shapes.read_sizes(_NAME, twin, call, wanted, program)
        executable, taken = _lower(program)
        if taken.int8_outside or (light.num_int8 and not taken.int8):
            left = taken.int8_outside or light.num_int8
            raise broken(_NAME, target, f"XNNPACK did not take {counted(left, 'int8 product')}")
        with whole(target) as part:
            part.write_bytes(executable.buffer)
            made = part.stat().st_size
            _check_size(target, made, light, taken)
            closest = tolerance or (_CLOSE_INT8 if light.num_int8 else _CLOSE_FLOAT)
            trials, notes = _trials(part, module, rounded if light.num_int8 else None, call, sizes)
            _hold(target, trials, closest, light)
    found = ExecutorchReport(
        path=target,
        kind="int8" if light.num_int8 else "float",
        inputs=tuple(_inputs(call, sizes)),
        num_parts=taken.parts,
        num_delegated=taken.inside,
        left=taken.outside,
        num_int8=taken.int8,
        num_static=light.num_static,
        trials=tuple(trial for trial, _ in trials),
        tolerance=closest,
        bytes=made,
        float_bytes=report(twin).float_bytes,
        planned_bytes=sum(executable.executorch_program.execution_plan[0].non_const_buffer_sizes),
        notes=(*_said(call, sizes, light), *notes),
    )
    if verbose:
        print(found)
    return found


class Loaded:
    """An ExecuTorch file that is ready to run: tensors by position, a list of tensors back."""

    def __init__(self, path: Path) -> None:
        runtime: Any = need("executorch.runtime", "edge")
        self._program = runtime.Runtime.get().load_program(path)  # methods do not keep it alive
        self._method = self._program.load_method("forward")

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The outputs, each with memory of its own: the next call writes into the runtime's."""
        return [torch.as_tensor(one).clone() for one in self._method.execute([x.contiguous() for x in tensors])]


def _on_any_processor(model: nn.Module) -> None:
    """Let int8 layers compute the same on any processor."""
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.backend = REFERENCE.name


def _wanted(call: Call, dynamic_shapes: shapes.Shapes | None) -> shapes.Wanted:
    wanted = shapes.asked(_NAME, call, dynamic_shapes)
    if dynamic_shapes is not None:
        return wanted
    return [
        {dim: free for dim, free in dims.items() if x.shape[dim] > 1}
        for x, dims in zip(call.tensors, wanted, strict=True)
    ]


def _greatest(model: nn.Module, call: Call, wanted: shapes.Wanted, most: int, batch: int) -> list[dict[int, int]]:
    """The greatest size of each free dimension of each tensor."""

    def greatest(place: int, dim: int, free: shapes.Free) -> int:
        if free.high is not None:
            return free.high
        name, x = call.names[place], call.tensors[place]
        told = place == 0 or (x.is_floating_point() and x.dim() == 3)  # a mask's first size may be a length
        is_batch = told and shapes.label_of(model, name, x, dim) == "batch"
        return max(batch if is_batch else most, x.shape[dim], 2)

    return [{dim: greatest(place, dim, free) for dim, free in dims.items()} for place, dims in enumerate(wanted)]


def _trace(module: Positional, call: Call, wanted: shapes.Wanted, greatest: list[dict[int, int]]) -> Any:
    """The program of torch.export. A free size of 1 in the example is 2 there: torch would write down the 1."""
    grown = {(at, dim): max(2, call.tensors[at].shape[dim]) for at, dims in enumerate(wanted) for dim in dims}
    tensors = shapes.resized(call.tensors, shapes.with_sizes(call.tensors, grown))
    auto = torch.export.Dim.AUTO
    free = tuple({dim: auto(min=1, max=most) for dim, most in held.items()} for held in greatest)
    cure = "dynamic_shapes={} fixes all sizes, if it is these that it cannot follow"
    return followed(_NAME, module, tensors, free, cure)


def _lower(program: Any) -> tuple[Any, xnnpack.Delegation]:
    """The executable program, and what XNNPACK took of it."""
    exir: Any = need("executorch.exir", "edge")
    partition: Any = need("executorch.backends.xnnpack.partition.xnnpack_partitioner", "edge")
    try:
        edge = exir.to_edge_transform_and_lower(
            program, transform_passes=[xnnpack.tidy], partitioner=[partition.XnnpackPartitioner()]
        )
        taken = xnnpack.delegation(edge)
        return edge.to_executorch(), taken
    except Exception as error:  # our own passes run inside, and XNNPACK's; ExecuTorch's errors have no common base
        first = str(error).strip().partition("\n")[0]
        rule = "use operators that ExecuTorch has, and XNNPACK can run"
        raise invalid(_NAME, "model", rule, f"{type(error).__name__}: {first}") from error


def _check_size(target: Path, made: int, light: xnnpack.Lean, taken: xnnpack.Delegation) -> None:
    """Float weights in an int8 file show here. A layer that is called twice may be in the file twice."""
    if not light.num_int8:
        return
    owners = [[*module._parameters.values(), *module._buffers.values()] for module in light.model.modules()]
    held = sum(one.numel() * one.element_size() for own in owners for one in own if one is not None)
    calls = max(1, math.ceil(taken.int8 / light.num_int8))
    most = int(1.25 * held * calls) + _SPARE_BYTES
    most += _BYTES_PER_OPERATOR * (taken.inside + sum(taken.outside.values()))
    if made > most:
        raise broken(_NAME, target, f"it has {made:,} bytes, more than the {most:,} that its weights explain")


def _trials(
    path: Path, module: Positional, rounded: Positional | None, call: Call, sizes: shapes.Sizes
) -> tuple[list[tuple[Trial, float]], list[str]]:
    """The file beside the model, and beside torch on the file's own grid; and sizes that the model does not take."""
    with quiet_start():
        file = Loaded(path)
        trials, notes = [], []
        for chosen in sizes.trials():
            named = sizes.said(chosen)
            tensors = shapes.resized(call.tensors, sizes.at(chosen))
            want = shapes.outputs_at(module, tensors)
            if want is None:
                notes.append(f"not tried at {verify.at_sizes(named)}, which the model does not take")
                continue
            try:
                got = file(*tensors)
            except Exception as error:  # whatever the runtime raises, the file does not run at these sizes
                trials.append((Trial(named, math.inf, holds=False, raised=str(error).partition("\n")[0]), 0.0))
                continue
            other = 0.0 if rounded is None else verify.difference(got, rounded(*tensors))
            trials.append((Trial(named, verify.difference(got, want)), other))
    return trials, notes


def _hold(target: Path, trials: list[tuple[Trial, float]], closest: float, light: xnnpack.Lean) -> None:
    """Raise where the file is wrong.

    A static model cuts off what its calibration did not hold, and other lengths may bring; the file does not. So only
    the example's sizes, the first of the trials, are held to the model then.
    """
    for place, (trial, to_rounded) in enumerate(trials):
        if not to_rounded <= _CLOSE_ROUNDED:
            raise broken(_NAME, target, f"it is {to_rounded:.1e} from the same rounding in torch, at {trial}")
        if (place == 0 or not light.num_static) and not trial.error <= closest:
            cure = "; let the example be like the calibration, or set tolerance" if light.num_static else ""
            raise broken(_NAME, target, f"it differs from the model at {trial}; at most {closest:.0e} is right{cure}")


def _inputs(call: Call, sizes: shapes.Sizes) -> list[str]:
    def said(size: Any) -> str:
        if size not in sizes.labels:
            return str(size)
        return f"{sizes.labels[size]} {sizes.least[size]}..{sizes.most[size]}"

    return [
        f"{name} {str(x.dtype).removeprefix('torch.')} ({', '.join(map(said, shape))})"
        for name, x, shape in zip(call.names, call.tensors, sizes.shapes, strict=True)
    ]


def _said(call: Call, sizes: shapes.Sizes, light: xnnpack.Lean) -> list[str]:
    notes = []
    if light.num_static:
        notes.append(
            f"of {counted(light.num_static, 'static int8 layer')} the weights are kept, not the input's scale: XNNPACK "
            "gives float outputs only where it takes the scale from each row, and cuts nothing off"
        )
    if not sizes.hints:
        notes.append("every size is fixed")
    return notes + call.notes()
