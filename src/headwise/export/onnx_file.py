"""`check_onnx`: an ONNX file that somebody else made, looked at before anything runs it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise._checks import counted, invalid, need
from headwise.export.graphs import graphs_in, operators
from headwise.export.reports import OnnxValue

_NAME = "check_onnx"
_EXTERNAL = 1  # as onnx counts where a tensor's numbers lie
_OLDEST = 7  # opset that onnxruntime still runs


@dataclass(frozen=True)
class OnnxFile:
    """What an ONNX file says of itself; `print` it.

    Attributes:
        path: of the file.
        opset: of the ONNX operators.
        producer: who made it.
        inputs: without the weights.
        outputs: of the graph.
        operators: how many nodes of each kind.
        files: the file, and those beside it that hold its weights.
        bytes: of all of them.
    """

    path: Path
    opset: int
    producer: str
    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    operators: dict[str, int]
    files: tuple[Path, ...]
    bytes: int

    def __str__(self) -> str:
        who = f", by {self.producer}" if self.producer else ""
        nodes = counted(sum(self.operators.values()), "node")
        lines = [f"{self.path}: ONNX opset {self.opset}{who}, {self.bytes:,} bytes, {nodes}"]
        lines += [f"  in   {value}" for value in self.inputs]
        lines += [f"  out  {value}" for value in self.outputs]
        return "\n".join(lines)


def check_onnx(path: str | os.PathLike[str]) -> OnnxFile:
    """Read what an ONNX file says of itself, and hold that it is safe and whole enough to be run.

    Nothing in it is run, and nothing outside its folder is opened: a file may name other files as the place of its
    weights, and `onnx.load` and runtimes differ in what they open then.

    Args:
        path: of the file.

    Returns:
        Inputs, outputs, operators and size.

    Raises:
        ValueError: there is no such file, it cannot be read, it is no ONNX model, its opset is too old or too new for
            the onnx that is installed, weights lie outside its folder (an absolute name, `..`, a link), are missing or
            shorter than it says, or onnx's checker refuses it.
        ImportError: onnx is missing.

    Cost: reads the file, weights in other files not.
    """
    onnx = need("onnx", "onnx")
    if not isinstance(path, (str, os.PathLike)):
        raise invalid(_NAME, "path", "be the path of a file", repr(path))
    file = Path(os.fsdecode(path))
    try:
        there, is_folder = file.is_file(), file.is_dir()
    except (OSError, ValueError) as error:
        raise invalid(_NAME, "path", "be a path that a file can have", str(error)) from error
    if not there:
        raise invalid(_NAME, "path", "be a file", f"{file}, a folder" if is_folder else f"{file}, which is not there")
    model = _read(onnx, file)
    opset = _opset(onnx, file, model)
    try:
        files = _weights(onnx, file, model)
    except RecursionError as error:
        raise invalid(_NAME, "path", "be an ONNX model", f"{file}, whose graphs lie too deep") from error
    try:
        onnx.checker.check_model(str(file))
    except Exception as error:  # of a damaged file ValidationError, UnicodeDecodeError, ValueError and more
        raise invalid(_NAME, "path", "be a model that onnx's checker takes", f"{file}: {error}") from error
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_value(file, value) for value in model.graph.input if value.name not in weights)
    outputs = tuple(_value(file, value) for value in model.graph.output)
    producer = f"{model.producer_name} {model.producer_version}".strip()
    size = sum(one.stat().st_size for one in files)
    return OnnxFile(file, opset, producer, inputs, outputs, operators(model), tuple(files), size)


def _read(onnx: Any, file: Path) -> Any:
    try:
        held = file.read_bytes()
    except OSError as error:
        raise invalid(_NAME, "path", "be a file that can be read", f"{file}: {error}") from error
    try:
        model = onnx.load_model_from_string(held)
    except Exception as error:  # protobuf's own, of which onnx has no name
        raise invalid(_NAME, "path", "be an ONNX model", f"{file}, which cannot be read as one") from error
    if not model.ir_version or not model.graph.node:  # nearly any bytes are some protobuf message
        raise invalid(_NAME, "path", "be an ONNX model", f"{file}, which holds no graph")
    return model


def _opset(onnx: Any, file: Path, model: Any) -> int:
    newest = onnx.defs.onnx_opset_version()
    found = [int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx")]
    if not found:
        raise invalid(_NAME, "path", "say which opset of ONNX it needs", f"{file}, which does not")
    if len(found) > 1:
        raise invalid(_NAME, "path", "say once which opset of ONNX it needs", f"{file}, which says {found}")
    if not _OLDEST <= found[0] <= newest:
        rule = f"be of opset {_OLDEST} to {newest}; export it anew, or install another onnx"
        raise invalid(_NAME, "path", rule, f"{file} of opset {found[0]}")
    return found[0]


def _weights(onnx: Any, file: Path, model: Any) -> list[Path]:
    """The file and those that hold its weights, all of them in its folder."""
    found = {file.resolve(): file}
    for tensor in _tensors(model):
        if tensor.data_location == _EXTERNAL:
            said = {entry.key: entry.value for entry in tensor.external_data}
            if len(said) < len(tensor.external_data):
                raise invalid(_NAME, "path", "say once where a weight lies", f"{file}, whose {tensor.name} does not")
            other = _place(file, tensor.name, said.get("location", ""))
            _check_length(onnx, file, tensor, said, other)
            found[other.resolve()] = other
    return list(found.values())


def _place(file: Path, name: str, place: str) -> Path:
    """The file in its folder that a weight lies in."""
    folder = file.parent.resolve()
    rule = (
        "keep its weights in its own folder: a file from somewhere else could have any file of this machine read; "
        "put them beside it and save it anew by onnx.save(..., save_as_external_data=True), or do not use it"
    )
    other = folder / place
    outside = not place or Path(place).is_absolute() or "\\" in place or ".." in Path(place).parts or "\0" in place
    try:
        if outside or not other.resolve().is_relative_to(folder):
            raise invalid(_NAME, "path", rule, f"{file}, whose {name} lies at {place!r}")
        if other.is_symlink() or any((folder / one).is_symlink() for one in Path(place).parents):
            raise invalid(_NAME, "path", rule, f"{file}, whose {name} lies at {place!r}, a link")
        if other == file.resolve():
            raise invalid(_NAME, "path", "keep weights inside or in another file", f"{file}, whose {name} names itself")
        there = other.is_file()
    except (OSError, RuntimeError) as error:
        got = f"{file}, whose {name} lies at {place[:40]!r}: {type(error).__name__}"
        raise invalid(_NAME, "path", rule, got) from error
    if not there:
        cure = "come with all of its files; copy those that hold the weights beside it"
        raise invalid(_NAME, "path", cure, f"{file} without {place!r}")
    return other


def _check_length(onnx: Any, file: Path, tensor: Any, said: dict[str, str], other: Path) -> None:
    """Hold that the bytes that a weight needs are there."""
    held = other.stat().st_size
    try:
        first, count = (_whole(said.get(key, "0")) for key in ("offset", "length"))
        needed = _bytes(onnx, tensor)
    except (ValueError, KeyError, TypeError):
        first, count, needed = -1, -1, 0
    if "length" not in said and first >= 0:
        count = held - first
    if min(first, count) < 0 or first + count > held or count < needed:
        got = f"{file}, whose {tensor.name} takes {needed:,} bytes and lies outside the {held:,} of {other.name!r}"
        raise invalid(_NAME, "path", "come with whole files; copy them again", got)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise ValueError(text)
    return int(text)


def _bytes(onnx: Any, tensor: Any) -> int:
    """That a tensor's numbers take; small kinds lie two or four in a byte."""
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    count = math.prod(int(size) for size in tensor.dims)
    if min(tensor.dims, default=0) < 0:
        raise ValueError(name)
    for end, bits in (("INT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2)):
        if name.endswith(end):
            return (count * bits + 7) // 8
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _tensors(model: Any) -> Iterator[Any]:
    """All tensors of a model: weights, constants in nodes, functions and inner graphs, what training needs."""
    training = [graph for one in model.training_info for graph in (one.initialization, one.algorithm)]
    for graph in (model.graph, *model.functions, *training):
        yield from _in_graph(graph)


def _in_graph(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "initializer", ())
    for sparse in getattr(graph, "sparse_initializer", ()):
        yield from (sparse.values, sparse.indices)
    for one in getattr(graph, "attribute_proto", ()):  # what a function takes where a node says nothing else
        yield from _in_attribute(one)
    for node in graph.node:
        for one in node.attribute:
            yield from _in_attribute(one)


def _in_attribute(one: Any) -> Iterator[Any]:
    if one.HasField("t"):
        yield one.t
    yield from one.tensors
    for sparse in (*one.sparse_tensors, *((one.sparse_tensor,) if one.HasField("sparse_tensor") else ())):
        yield from (sparse.values, sparse.indices)
    for inner in graphs_in(one):
        yield from _in_graph(inner)


def _value(file: Path, value: Any) -> OnnxValue:
    try:
        return OnnxValue.of(value)
    except ValueError as error:
        got = f"{file}, whose {value.name} is of type {value.type.tensor_type.elem_type}"
        raise invalid(_NAME, "path", "hold types that ONNX has", got) from error
