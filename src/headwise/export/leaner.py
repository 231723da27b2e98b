"""Fewer nodes for the same numbers: what torch's exporter writes around products, and a short call pays for.

A node costs about as much as the product of a single token. All passes leave alone what they do not know.

Letters: B batch, L positions, H heads, K head width, N output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise._checks import need

_INT64 = 7  # as onnx counts its types
_ONE_BY_ONE = frozenset({"Gelu", "Relu", "Sigmoid", "Tanh", "Silu", "Elu", "LeakyRelu", "HardSwish", "Identity"})


def make_lean(graph: Any) -> None:
    """All passes, in place; the sizes that the graph is annotated with must be named."""
    lean = _Lean(graph)
    lean.split_heads()
    lean.meet_reshapes()
    lean.copy_sizes()
    lean.join_sizes()
    del graph.node[:]
    graph.node.extend(lean.nodes)


def sizes_of(value: Any) -> list[int | str]:
    """The sizes of an input or output: numbers, and names of free ones, "?" for one without a name."""
    dims = value.type.tensor_type.shape.dim
    return [int(size.dim_value) if size.HasField("dim_value") else size.dim_param or "?" for size in dims]


def attribute(node: Any, name: str) -> Any:
    """The value of an attribute; None without it."""
    helper = need("onnx.helper", "onnx")
    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), None)


class _Graph:
    """A graph, and what is read of it again and again."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes = list(graph.node)  # a protobuf list copies what is put into it
        self.helper, self.numpy = need("onnx.helper", "onnx"), need("onnx.numpy_helper", "onnx")
        self.outputs = {value.name for value in graph.output}
        self.known = {value.name: sizes_of(value) for value in (*graph.input, *graph.output, *graph.value_info)}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self._index()

    def _index(self) -> None:
        self.made = {name: node for node in self.nodes for name in node.output}
        self.users: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
            if any(one.HasField("g") or one.graphs for one in node.attribute):  # reads what we do not look into
                self.outputs.update(self.made)

    def only_user(self, name: str) -> Any:
        """The node that reads it, where there is one alone."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.outputs else None

    def numbers(self, name: str) -> list[int] | None:
        """A constant list of integers."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_type != _INT64:
            return None
        return [int(one) for one in self.numpy.to_array(tensor).reshape(-1)]

    def constant(self, numbers: Sequence[int]) -> str:
        """The name of a list of integers, made where it is missing."""
        name = "list_" + "_".join(str(one).replace("-", "m") for one in numbers)
        if name not in self.constants:
            self.constants[name] = self.helper.make_tensor(name, _INT64, [len(numbers)], list(numbers))
            self.graph.initializer.append(self.constants[name])
        return name

    def forget(self, name: str) -> None:
        """Take away a size that is not true any more."""
        self.known.pop(name, None)
        kept = [value for value in self.graph.value_info if value.name != name]
        del self.graph.value_info[:]
        self.graph.value_info.extend(kept)

    def replace(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        """Put nodes in the place of the first of others."""
        gone, kept = {id(node) for node in old}, []
        for node in self.nodes:
            if id(node) not in gone:
                kept.append(node)
            elif node is old[0]:
                kept.extend(new)
        self.nodes = kept
        self._index()

    def point(self, old: str, new: str) -> None:
        """Let all that read one value read another; an output of the graph stays."""
        if old in self.outputs:
            return
        for user in self.users.get(old, []):
            for place, name in enumerate(user.input):
                if name == old:
                    user.input[place] = new
        self._index()


class _Lean(_Graph):
    """The passes."""

    def split_heads(self) -> None:
        """Turn the joined queries, keys and values to heads at once: one Reshape and one Transpose instead of three.

        Split, and for each part Reshape to (B, L, h, K) and Transpose, becomes Reshape to (B, L, all h, K), Transpose,
        and Split of the heads.
        """
        for split in [node for node in self.nodes if node.op_type == "Split"]:
            found = self._heads_of(split)
            if found is None:
                continue
            heads, width, order, nodes = found
            stem = split.output[0]
            whole, turned = f"{stem}_heads", f"{stem}_turned"
            outs, more = [], []
            for transpose in nodes[1::2]:
                perm = list(attribute(transpose, "perm"))
                name = transpose.output[0]
                if perm == order:
                    outs.append(name)
                else:  # keys, turned for the product already; apart again, onnxruntime makes it part of the product
                    outs.append(f"{name}_upright")
                    more.append(self.helper.make_node("Transpose", [outs[-1]], [name], perm=[0, 1, 3, 2]))
            shape = self.constant([0, 0, sum(heads), width])
            new = [
                self.helper.make_node("Reshape", [split.input[0], shape], [whole]),
                self.helper.make_node("Transpose", [whole], [turned], perm=order),
                self.helper.make_node("Split", [turned, self.constant(heads)], outs, axis=1),
                *more,
            ]
            for node in nodes[::2]:
                self.forget(node.output[0])
            for name in split.output:
                self.forget(name)
            before = self.known.get(split.input[0])
            self.replace([split, *nodes], new)
            if before is not None:
                self.known[whole] = [*before[:2], sum(heads), width]

    def _heads_of(self, split: Any) -> tuple[list[int], int, list[int], list[Any]] | None:
        """Heads of each part, their width, how they are turned, and the Reshape and Transpose of each; None: others."""
        before = self.known.get(split.input[0])
        if before is None or len(before) != 3 or attribute(split, "axis") not in (-1, 2):
            return None
        heads: list[int] = []
        orders: list[list[int]] = []
        nodes: list[Any] = []
        width = None
        for name in split.output:
            reshape = self.only_user(name)
            if reshape is None or reshape.op_type != "Reshape":
                return None
            after, transpose = self.known.get(reshape.output[0]), self.only_user(reshape.output[0])
            if after is None or len(after) != 4 or after[:2] != before[:2] or "?" in before[:2]:
                return None
            if transpose is None or transpose.op_type != "Transpose" or not isinstance(after[2], int):
                return None
            if width not in (None, after[3]) or not isinstance(after[3], int):
                return None
            width = after[3]
            perm = list(attribute(transpose, "perm") or ())
            if perm[1:2] != [2] or sorted(perm) != [0, 1, 2, 3]:
                return None
            heads.append(after[2])
            orders.append(perm if perm[3] == 3 else [perm[0], perm[1], perm[3], perm[2]])
            nodes += [reshape, transpose]
        if width is None or any(order != orders[0] for order in orders):
            return None
        return heads, width, orders[0], nodes

    def meet_reshapes(self) -> None:
        """A Reshape of a Reshape is the last one alone, also where functions of single numbers lie between."""
        for node in list(self.nodes):
            shape = self.numbers(node.input[1]) if node.op_type == "Reshape" and len(node.input) > 1 else None
            if shape is None or (0 in shape and attribute(node, "allowzero")):
                continue
            between: list[Any] = []
            above = self.made.get(node.input[0])
            while above is not None and above.op_type in _ONE_BY_ONE and self.only_user(above.output[0]) is not None:
                between.append(above)
                above = self.made.get(above.input[0])
            if above is None or above.op_type != "Reshape":
                continue
            if between and self.only_user(above.output[0]) is None:
                continue
            self._meet(above, between, node, shape)

    def _meet(self, above: Any, between: list[Any], node: Any, shape: list[int]) -> None:
        source = self.known.get(above.input[0])
        if len(shape) == 2 and shape[0] == -1 and source is not None and len(source) == 2 and source[1] == shape[1]:
            if between:
                between[-1].input[0] = above.input[0]
                for one in between:
                    self.forget(one.output[0])
            self.point(node.output[0], node.input[0] if between else above.input[0])
        elif not between and 0 not in shape:
            node.input[0] = above.input[0]
            self._index()
        elif not between and shape[:2] == [0, 0] and 0 not in shape[2:]:
            concat = self.made.get(above.input[1])
            if concat is None or concat.op_type != "Concat" or len(concat.input) != 3:
                return
            name = f"{node.output[0]}_shape"
            parts = [*concat.input[:2], self.constant(shape[2:])]
            self.replace([node], [self.helper.make_node("Concat", parts, [name], axis=0), node])
            node.input[0], node.input[1] = above.input[0], name
            self._index()

    def copy_sizes(self) -> None:
        """Write a 0, "as it is", for each leading size that a Reshape copies from its own input."""
        for node in self.nodes:
            source = self.made.get(node.input[1]) if node.op_type == "Reshape" else None
            if source is None or source.op_type != "Concat":
                continue
            wanted: list[int | str | None] = []
            for name in source.input:
                wanted += self._sizes_in(name)
            shape = _as_it_is(wanted, self.known.get(node.input[0], []))
            if shape is not None:
                node.input[1] = self.constant(shape)
                kept = [one for one in node.attribute if one.name != "allowzero"]
                del node.attribute[:]
                node.attribute.extend(kept)
        self._index()

    def _sizes_in(self, name: str) -> Sequence[int | str | None]:
        """A part of a shape that is put together: numbers, names of free sizes, None for what is neither."""
        numbers = self.numbers(name)
        if numbers is not None:
            return numbers
        node = self.made.get(name)
        sizes = self.known.get(node.input[0]) if node is not None and node.op_type == "Shape" else None
        if node is None or sizes is None:
            return [None]
        return sizes[_start(node) : len(sizes) if attribute(node, "end") is None else attribute(node, "end")]

    def join_sizes(self) -> None:
        """Read the sizes of one tensor that stand side by side in a shape with one node."""
        for node in [one for one in self.nodes if one.op_type == "Concat"]:
            parts = [self.made.get(name) for name in node.input]
            first, second = (*parts, None, None)[:2]
            if first is None or second is None or not first.op_type == second.op_type == "Shape":
                continue
            if first.input[0] != second.input[0] or (_start(first), attribute(first, "end")) != (0, 1):
                continue
            if (_start(second), attribute(second, "end")) != (1, 2):
                continue
            name = f"{first.input[0]}_sizes"
            if name not in self.made:
                self.replace([first], [self.helper.make_node("Shape", [first.input[0]], [name], start=0, end=2), first])
            rest = list(node.input[2:])
            numbers = [self.numbers(one) for one in rest]
            if rest and all(one is not None for one in numbers):
                rest = [self.constant([number for one in numbers if one for number in one])]
            del node.input[:]
            node.input.extend([name, *rest])
            self._index()


def _start(node: Any) -> int:
    return int(attribute(node, "start") or 0)


def _as_it_is(wanted: Sequence[int | str | None], have: Sequence[int | str]) -> list[int] | None:
    """The shape in numbers alone: 0 where a free size stands where it stood, -1 for one that moved; None: it cannot."""
    shape: list[int] = []
    for place, size in enumerate(wanted):
        if size is None or size == 0:
            return None
        if isinstance(size, str):
            size = 0 if place < len(have) and have[place] == size and size != "?" else -1
        shape.append(size)
    return shape if shape.count(-1) <= 1 else None
