"""What headwise does to an ONNX model that torch has made: names, fewer nodes, nothing of the machine it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headwise.export import leaner
from headwise.export.shapes import worded

PLACES = ("headwise_in_", "headwise_out_")  # names of inputs and outputs, until all inner names are known
_INT8 = 3  # as onnx counts its types


def finish(model: Any, labels: Mapping[str, str], version: str, metadata: Mapping[str, str]) -> None:
    """Name sizes, take out what a file does not need, and say who made it; in place.

    Args:
        model: a `ModelProto`.
        labels: what each of torch's symbols is called.
        version: of headwise.
        metadata: what else the file says, by name.
    """
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.ClearField("metadata_props")
        for size in value.type.tensor_type.shape.dim:
            if size.HasField("dim_param"):
                text = worded(size.dim_param, labels)
                if text.isdecimal():  # torch writes down a size that it found to be fixed as a name
                    size.dim_value = int(text)
                else:
                    size.dim_param = text
    for node in graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for tensor in graph.initializer:
        tensor.ClearField("metadata_props")
        tensor.ClearField("doc_string")
    for part in (model, graph):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    share(graph)
    leaner.make_lean(graph)
    share(graph)
    _sweep(graph)
    graph.name = "headwise"
    model.producer_name, model.producer_version = "headwise", version
    for key, text in metadata.items():
        model.metadata_props.add(key=key, value=text)


def name_values(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names, and other ones to what has those names inside; in place."""
    final = {PLACES[0] + str(at): name for at, name in enumerate(inputs)}
    final |= {PLACES[1] + str(at): name for at, name in enumerate(outputs)}
    inner = {name for node in nodes_of(graph) for name in (*node.input, *node.output)}
    inner |= {tensor.name for tensor in graph.initializer}
    taken = {*inner, *final.values()}
    renamed = dict(final)
    for name in sorted(inner & set(final.values())):
        other = f"{name}_inner"
        while other in taken:
            other += "_"
        taken.add(other)
        renamed[name] = other
    for node in nodes_of(graph):
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
    for part in (graph, *(inside for node in nodes_of(graph) for inside in _inner(node))):
        for value in (*part.input, *part.output, *part.value_info, *part.initializer):
            value.name = renamed.get(value.name, value.name)


def int8_products(graph: Any) -> int:
    """How many products with int8 weights a graph has."""
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == _INT8 and len(tensor.dims) == 2}
    floats = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in weights}
    static = sum(node.op_type in ("Gemm", "MatMul") and node.input[1] in floats for node in graph.node)
    dynamic = [node for node in nodes_of(graph) if node.op_type == "MatMulInteger"]
    return int(static) + len(dynamic)


def operators(model: Any) -> dict[str, int]:
    """How many nodes of each kind a model has, those inside of others included; sorted."""
    counts: dict[str, int] = {}
    for node in nodes_of(model.graph):
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return dict(sorted(counts.items()))


def nodes_of(graph: Any) -> Iterator[Any]:
    """All nodes of a graph and of those inside its nodes."""
    for node in graph.node:
        yield node
        for inner in _inner(node):
            yield from nodes_of(inner)


def share(graph: Any) -> None:
    """Compute once what several nodes compute in the same way: masks of a stack's layers, sizes.

    Nodes with graphs of their own stay, and what they read keeps its name.
    """
    held = {value.name for value in graph.output} | {
        name for node in graph.node for inner in _inner(node) for one in nodes_of(inner) for name in one.input
    }
    seen: dict[Any, Any] = {}
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        attributes = tuple(sorted(one.SerializeToString(deterministic=True) for one in node.attribute))
        mark = (node.domain, node.op_type, tuple(node.input), attributes, len(node.output))
        first = seen.get(mark)
        if first is None or _inner(node) or held & set(node.output) or node.op_type.startswith("Random"):
            seen.setdefault(mark, node)
            kept.append(node)
        else:
            renamed.update(zip(node.output, first.output, strict=True))
    del graph.node[:]
    graph.node.extend(kept)


def graphs_in(attribute: Any) -> list[Any]:
    """The graphs that an attribute of a node holds."""
    return [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]


def _inner(node: Any) -> list[Any]:
    return [graph for attribute in node.attribute for graph in graphs_in(attribute)]


def _sweep(graph: Any) -> None:
    """Take out nodes and constants that nothing reads."""
    while True:
        read = {name for node in nodes_of(graph) for name in node.input} | {value.name for value in graph.output}
        kept = [node for node in graph.node if any(name in read for name in node.output)]
        if len(kept) == len(graph.node):
            break
        del graph.node[:]
        graph.node.extend(kept)
    left = [tensor for tensor in graph.initializer if tensor.name in read]
    if len(left) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(left)
    there = {name for node in graph.node for name in node.output}
    values = [value for value in graph.value_info if value.name in there]
    del graph.value_info[:]
    graph.value_info.extend(values)
