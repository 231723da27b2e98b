"""`export_onnx`: a model as an ONNX file, float or int8, that was run beside the model before it got its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise._checks import counted, invalid, need
from headwise._files import whole
from headwise.export import graphs, guards, integers, shapes, verify
from headwise.export.doors import broken, check_tolerance, target_of
from headwise.export.parts import Call, Positional, first_call, followed, join_projections, take_apart, traceable
from headwise.export.quiet import plainly, quiet
from headwise.export.reports import OnnxReport, OnnxValue
from headwise.export.trials import Beside, Limit, hold_guards
from headwise.export.verify import Trial
from headwise.quant.quantize import report

OPSETS = range(18, 24)  # that torch's exporter writes and onnxruntime runs, each of them tried in the tests
_NAME = "export_onnx"
_LARGEST = 2**31 - 2**20  # bytes of numbers: an ONNX file in one piece ends at 2 GiB
_FLOAT_ERROR, _INT8_ERROR = 1e-4, 3e-2


def export_onnx(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    opset: int = 20,
    dynamic_shapes: shapes.Shapes | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    verbose: bool = True,
) -> OnnxReport:
    """Write a model as an ONNX file, and run the file beside the model before it gets its name.

    Args:
        model: any module. Not changed: a copy in eval mode, on the CPU, is exported, with torch's attention and
            Transformer layers upgraded. One from `headwise.quantize` or `headwise.convert` gives an int8 file: int8
            weights, integer products in onnxruntime, and, where it is static, in OpenVINO too.
        example: inputs of one call: a tensor, a tuple of arguments or a dict of keywords of the model's forward.
            Tensors, also in tuples, lists and dicts, are the inputs of the file, by the names of the parameters; masks
            too. Anything else (`is_causal=True`) is written into it. One tensor passed twice is two inputs.
        path: of the file; its folder must exist. A file that is there stays until the new one is whole and tried.
        opset: of the ONNX operators, 18 to 23. Below 20, GELU is several nodes.
        dynamic_shapes: names of the sizes that shall be free, `{"x": {0: "batch", 1: "length"}}`; all others are fixed.
            None: every size that the model leaves free. `{}`: none. In the place of a name may be a `torch.export.Dim`,
            with bounds: `Dim("length", max=512)`. One name is one size in the model.
        output_names: of the tensors that the model returns. None: `output`, `output_1` and so on, or a dict's keys.
        metadata: texts that the file shall carry, by name: classes, units, a licence. onnxruntime reads them as
            `session.get_modelmeta().custom_metadata_map`.
        tolerance: what the file's numbers may differ by, as a share of the largest number of an output. None: 1e-4,
            and 3e-2 for int8, where a number at the edge between two integers may fall on either side.
        verbose: print the report.

    Returns:
        The report: inputs and outputs, size, errors at several sizes (the example's, larger ones, 1), integer operators
        of the graph that onnxruntime makes of the file.

    Raises:
        ValueError: a wrong argument, a call that the model does not take, or what no file can hold: caches, nested
            tensors, masks with tensors of their own, 2 GiB of weights, control flow that depends on numbers, or on
            sizes that are free: the message names the condition, and sizes at which the file would be wrong.
        RuntimeError: the file does not do what the model does: other numbers, float products for int8 projections, a
            size that is not int8's. Nothing is left behind.
        ImportError: onnx, onnxscript or onnxruntime is missing.

    A row that sees no key gives what the model gives. Unlike the model in eager mode, an int8 file makes some number of
    a NaN that reaches a projection; in a dynamic one it may change the scale of the whole call.

    Cost: some seconds, and the model three times in memory. Threads take turns.
    Source: https://onnx.ai/onnx/operators/; docs/edge.md.

    Example:
        >>> import tempfile, torch, headwise
        >>> block = headwise.EncoderBlock(64, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = headwise.export_onnx(block, torch.randn(2, 5, 64), f"{folder}/block.onnx", verbose=False)
        >>> print(report.inputs[0])
        x float (batch, length, 64)
        >>> report.error < 1e-5
        True
    """
    _check_settings(opset, tolerance)
    target = target_of(_NAME, path, "model.onnx")
    said = _check_metadata(metadata)
    need("onnx", "onnx")
    need("onnx_ir", "onnx")
    need("onnxscript", "onnx")
    need("onnxruntime", "onnx")
    with quiet(), plainly(), torch.no_grad():
        twin = traceable(_NAME, model)
        call = take_apart(_NAME, twin, example)
        module = Positional(_NAME, twin, call)
        names = _output_names(output_names, first_call(_NAME, module, call), call.names)
        held = report(twin)
        _check_size(held.int8_bytes)
        integers.stand_in(module)
        join_projections(twin)
        module.eval().requires_grad_(False)
        wanted = shapes.asked(_NAME, call, dynamic_shapes)
        program, sizes = _followed(twin, module, call, wanted)
        proto, made = _translate(program, opset, len(call.names), len(names))
        graphs.finish(proto, sizes.names(), _version(), said)
        graphs.name_values(proto.graph, call.names, names)
        closest = tolerance or (_INT8_ERROR if made else _FLOAT_ERROR)
        with whole(target) as part:
            part.write_bytes(proto.SerializeToString(deterministic=True))
            session, counts = _opened(target, part)
            beside = Beside(session, module, call, sizes, closest, exact=not made)
            trials, untried = beside.everywhere()
            _hold(target, beside, trials)
            limits, needed = hold_guards(beside, program)
            products = graphs.int8_products(proto.graph) if made else 0
            _check_products(target, products, counts)
            num_bytes, float_bytes = _check_bytes(target, part, proto, made, held.float_bytes)
            limits += _asked_limits(sizes)
            inputs = tuple(_limited(OnnxValue.of(value), limits) for value in proto.graph.input)
            found = OnnxReport(
                path=target,
                opset=opset,
                kind=_kind(made),
                inputs=inputs,
                outputs=tuple(map(OnnxValue.of, proto.graph.output)),
                bytes=num_bytes,
                float_bytes=float_bytes,
                operators=graphs.operators(proto),
                projections=products,
                integer_operators=counts,
                trials=tuple(trials),
                tolerance=closest,
                notes=(*_fixed(inputs, module, call, sizes, wanted), *untried, *needed),
            )
    if verbose:
        print(found)
    return found


def _check_settings(opset: object, tolerance: object) -> None:
    if not isinstance(opset, int) or isinstance(opset, bool) or opset not in OPSETS:
        raise invalid(_NAME, "opset", f"be {OPSETS[0]} to {OPSETS[-1]}, which is what was tried", repr(opset))
    check_tolerance(_NAME, tolerance)


def _check_metadata(metadata: object) -> Mapping[str, str]:
    if metadata is None:
        return {}
    is_text = isinstance(metadata, Mapping) and all(isinstance(one, str) for pair in metadata.items() for one in pair)
    if not isinstance(metadata, Mapping) or not is_text or "" in metadata:
        raise invalid(_NAME, "metadata", "be a dict of texts by name, json.dumps for anything else", repr(metadata))
    return metadata


def _output_names(given: object, own: list[str], inputs: Sequence[str]) -> list[str]:
    names = list(own)
    if given is not None:
        fits = isinstance(given, (list, tuple)) and all(isinstance(one, str) and one for one in given)
        if not isinstance(given, (list, tuple)) or not fits or len(given) != len(own):
            raise invalid(_NAME, "output_names", f"be {counted(len(own), 'name')}, one for each tensor returned", given)
        names = list(given)
        if len({*names, *inputs}) < len(names) + len(inputs):
            raise invalid(_NAME, "output_names", "be different from each other and from the inputs", given)
    taken = set(inputs)
    for place, name in enumerate(names):
        while name in taken:
            name += "_"
        names[place] = name
        taken.add(name)
    return names


def _check_size(numbers: int) -> None:
    if numbers > _LARGEST:
        rule = "hold less than 2 GiB of numbers, which is where one ONNX file ends; headwise.quantize makes a quarter"
        raise invalid(_NAME, "model", rule, f"{numbers:,} bytes")


def _followed(twin: nn.Module, module: Positional, call: Call, wanted: shapes.Wanted) -> tuple[Any, shapes.Sizes]:
    """The program of torch.export, and its sizes; once more where equal sizes of the example passed for one."""
    tensors = shapes.grown(module, call)
    program = _trace(module, tensors, wanted)
    sizes = shapes.read_sizes(_NAME, twin, call, wanted, program)
    other = guards.untied(module, tensors, program, sizes)
    if other is not None:
        program = _trace(module, other, wanted)
        sizes = shapes.read_sizes(_NAME, twin, call, wanted, program)
    return program, sizes


def _trace(module: Positional, tensors: tuple[torch.Tensor, ...], wanted: shapes.Wanted) -> Any:
    integers.register()
    auto = torch.export.Dim.AUTO
    free = tuple({dim: auto(min=one.low, max=one.high) for dim, one in dims.items()} for dims in wanted)
    return followed(_NAME, module, tensors, free, "torch.export.export(model, ...) shows where")


def _translate(program: Any, opset: int, num_inputs: int, num_outputs: int) -> tuple[Any, list[str]]:
    """The `ModelProto`, with names of `graphs.PLACES` for its inputs and outputs, and the kind of each int8 product."""
    made: list[str] = []
    translations = integers.translations(made)
    try:
        result = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=[graphs.PLACES[0] + str(place) for place in range(num_inputs)],
            output_names=[graphs.PLACES[1] + str(place) for place in range(num_outputs)],
            custom_translation_table=translations,
            verbose=False,
        )
    except Exception as error:  # onnxscript and onnx_ir raise errors of their own in there
        said = str(error.__cause__ or error).strip().partition("\n")[0]
        rule = f"use operators that ONNX opset {opset} has"
        raise invalid(_NAME, "model", rule, f"{type(error).__name__}: {said}") from error
    assert result is not None
    proto: Any = result.model_proto
    written = {one.domain: one.version for one in proto.opset_import}[""]
    if written != opset:
        raise invalid(_NAME, "opset", f"be {written} for this model, which cannot be turned into another", opset)
    return proto, made


def _version() -> str:
    try:
        return version("headwise")
    except PackageNotFoundError:  # run from its sources
        return "0"


def _kind(made: list[str]) -> str:
    if not made:
        return "float"
    return made[0] if len(set(made)) == 1 else "mixed"


def _opened(target: Path, part: Path) -> tuple[Any, dict[str, int]]:
    """A session, and how many integer products of each kind it runs."""
    checker = need("onnx.checker", "onnx")
    try:
        checker.check_model(verify.source_of(part), full_check=True)
        return verify.open_session(part)
    except Exception as error:  # onnx's and onnxruntime's errors have no common base
        raise broken(_NAME, target, f"onnx or onnxruntime does not take it: {error}") from error


def _hold(target: Path, beside: Beside, trials: Sequence[Trial]) -> None:
    """Raise where the file's numbers are wrong."""
    for trial in trials:
        if trial.holds:
            continue
        why = f"its numbers differ from the model's by {trial}, above {beside.tolerance:g}"
        if trial.error <= beside.tolerance:
            why = f"its integers differ from the model's: {trial} of them"
        if not beside.repeats(beside.call.tensors):
            why += "; the model's own differ from call to call: is dropout a function in it?"
        elif trial is trials[0] and trial.error == float("inf"):
            why += "; pass an example with a batch and a length of at least 2"
        raise broken(_NAME, target, why)


def _check_products(target: Path, products: int, counts: Mapping[str, int]) -> None:
    if sum(counts.values()) < products:
        found = ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"
        said = f"onnxruntime runs {found} for {counted(products, 'int8 product')}: the rest in float"
        raise broken(_NAME, target, said)


def _check_bytes(target: Path, part: Path, proto: Any, made: list[str], float_bytes: int) -> tuple[int, int]:
    """Bytes of the file, and with float32 weights, which take `float_bytes`."""
    held = part.stat().st_size
    if not made:
        return held, held
    numbers = sum(len(one.raw_data) for one in proto.graph.initializer)
    as_float = max(held - numbers, 0) + float_bytes
    if held >= as_float:
        raise broken(_NAME, target, f"it has {held:,} bytes, and {as_float:,} with float32 weights")
    return held, as_float


def _asked_limits(sizes: shapes.Sizes) -> list[Limit]:
    found = []
    for symbol, (low, high) in sizes.bounds.items():
        label = sizes.labels[symbol]
        found += [(label, f"at least {low}")] * (low > 1) + [(label, f"at most {high}")] * (high is not None)
    return found


def _limited(value: OnnxValue, limits: Sequence[Limit]) -> OnnxValue:
    """An input, with what its sizes may be."""
    found = [f"{label} {limit}" for label, limit in limits if label in value.shape]
    return replace(value, limits=tuple(dict.fromkeys(found)))


def _fixed(
    inputs: Sequence[OnnxValue],
    module: Positional,
    call: Call,
    sizes: shapes.Sizes,
    wanted: shapes.Wanted,
) -> list[str]:
    notes = []
    if not any(isinstance(size, str) for value in inputs for size in value.shape):
        notes.append("every size is fixed")
    notes += guards.needlessly_fixed(module, call, sizes, wanted)
    said = {text for value in inputs for text in value.limits}
    notes += [note for label, size, note in sizes.least_notes() if f"{label} at least {size}" not in said]
    return notes + call.notes()
