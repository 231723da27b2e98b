"""Which sizes of an exported model are free, what they are called, and at which sizes a file is tried."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise._checks import invalid
from headwise.export.parts import Call, Positional

Shapes = Mapping[str, Any]
_FREE = (0, 1)  # the dimensions that an example of size 1 is likely not to mean literally
_ENDLESS = 2**31  # a greatest size that is none
_FAR = 67  # at least, and more than twice the example's
_WORD = re.compile(r"[A-Za-z_]\w*")


class Free(NamedTuple):
    """A dimension that shall be free, by what the caller said of it: its name, its least and greatest size."""

    label: str | None = None
    low: int = 1
    high: int | None = None


Wanted = list[dict[int, Free]]  # for each tensor its dimensions that shall be free


def grown(module: Positional, call: Call) -> tuple[Tensor, ...]:
    """The example's tensors with other numbers in the place of a batch or length of 1, which torch.export writes down.

    Numbers that occur nowhere else in the example, another one for each dimension. Where the model takes no such call
    (a mask of one row that is meant for all), they stay.
    """
    ones = {(at, dim) for at, x in enumerate(call.tensors) for dim in _FREE if x.dim() > dim and x.shape[dim] == 1}
    used = {size for x in call.tensors for size in x.shape}
    first, second = [n for n in (5, 7, 11, 13, *range(17, 99, 2)) if n not in used][:2]
    tried = [(ones, second), (ones, first), *(({one for one in ones if one[1] == dim}, first) for dim in _FREE)]
    tried += [({one}, first) for one in sorted(ones)]
    for some, other in tried:
        if not some:
            continue
        sizes = {(at, dim): other if dim else first for at, dim in some}
        tensors = resized(call.tensors, with_sizes(call.tensors, sizes))
        if outputs_at(module, tensors) is not None:
            return tensors
    return call.tensors


def outputs_at(module: Positional, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """What the model gives for these, or None where it raises."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            out: tuple[Tensor, ...] = module(*(x.clone() for x in tensors))
        except Exception:  # the model is the caller's: it raises what it likes
            return None
    return out


def worded(text: str, labels: Mapping[str, str]) -> str:
    """An expression of torch's symbols in the names of the sizes."""
    return _WORD.sub(lambda found: labels.get(found[0], found[0]), text)


def with_sizes(tensors: Sequence[Tensor], sizes: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """The shapes of tensors with other sizes at some places, each of them a tensor and a dimension."""
    return [[sizes.get((at, dim), size) for dim, size in enumerate(x.shape)] for at, x in enumerate(tensors)]


def resized(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Tensors of other shapes that begin anew with their first entries where they end."""
    return tuple(_resized(x, shape) for x, shape in zip(tensors, shapes, strict=True))


def varied(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """`resized`, where what begins anew differs a little, so that no two rows tie in a choice of the largest."""
    return tuple(_varied(x, shape) for x, shape in zip(tensors, shapes, strict=True))


def _resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        if size != x.shape[dim]:
            x = x.index_select(dim, torch.arange(size) % x.shape[dim])
    return x.contiguous()


def _varied(x: Tensor, shape: Sequence[int]) -> Tensor:
    out = _resized(x, shape)
    if not x.is_floating_point() or all(size <= old for size, old in zip(shape, x.shape, strict=True)):
        return out
    repeated = torch.zeros((), dtype=torch.bool)
    for dim, (size, old) in enumerate(zip(shape, x.shape, strict=True)):
        ending = (torch.arange(size) >= old).reshape([-1 if one == dim else 1 for one in range(x.dim())])
        repeated = repeated | ending
    noise = torch.rand(tuple(shape), generator=torch.Generator().manual_seed(0)) / 64 - 1 / 64
    return torch.where(repeated, out * (1 + noise), out)


def asked(function: str, call: Call, dynamic_shapes: Shapes | None) -> Wanted:
    """For each tensor the dimensions that shall be free, with the names and bounds that they were given.

    Raises:
        ValueError: a name that is no input, a dimension that it does not have, a label that is no name, bounds that
            the example is not within.
    """
    if dynamic_shapes is None:
        return [dict.fromkeys(range(x.dim()), Free()) for x in call.tensors]
    return [
        {
            dim: _free(function, f"dynamic_shapes[{name!r}][{dim}]", label, x.shape[dim])
            for dim, label in given.items()
            if _hint(label) != "STATIC"
        }
        for (name, given), x in zip(_given(function, call, dynamic_shapes), call.tensors, strict=True)
    ]


def _free(function: str, where: str, label: Any, size: int) -> Free:
    said = None if _hint(label) else getattr(label, "__name__", label)
    is_size = isinstance(label, (str, torch.export.Dim)) or _hint(label)
    if not is_size or hasattr(label, "root") or (said is not None and not _WORD.fullmatch(said)):
        rule = "be a name such as 'batch', or a torch.export.Dim that is not made of another"
        raise invalid(function, where, rule, repr(label))
    least, most = getattr(label, "min", None), getattr(label, "max", None)
    low, high = int(least or 1), None if most is None or not most < _ENDLESS else int(most)
    if not low <= size or (high is not None and not max(2, size) <= high):
        rule = "have bounds that hold the example's size, and more than 1"
        raise invalid(function, where, rule, f"{label} for {size}")
    return Free(said, low, high)


def _hint(label: object) -> str:
    """AUTO, STATIC or DYNAMIC; nothing for what is no hint of torch.export."""
    kind = getattr(label, "type", None) if isinstance(label, torch.export.dynamic_shapes._DimHint) else None
    return str(getattr(kind, "name", ""))


def _given(function: str, call: Call, dynamic_shapes: Shapes) -> list[tuple[str, dict[int, Any]]]:
    """What was said of each tensor, by dimension."""
    if not isinstance(dynamic_shapes, Mapping):
        rule = 'map inputs to their free dimensions, {"x": {0: "batch", 1: "length"}}, or be None: all that can be'
        raise invalid(function, "dynamic_shapes", rule, type(dynamic_shapes).__name__)
    unknown = [str(name) for name in dynamic_shapes if name not in call.names]
    if unknown:
        raise invalid(function, "dynamic_shapes", f"name inputs ({', '.join(call.names)})", ", ".join(unknown))
    result = []
    for name, x in zip(call.names, call.tensors, strict=True):
        given = dynamic_shapes.get(name)
        where = f"dynamic_shapes[{name!r}]"
        if isinstance(given, (list, tuple)):
            if len(given) != x.dim():
                raise invalid(function, where, f"have {x.dim()} entries, one for each dimension", len(given))
            given = dict(enumerate(given))
        elif given is not None and not isinstance(given, Mapping):
            raise invalid(function, where, 'map dimensions to names, {0: "batch", 1: "length"}', repr(given))
        for dim in given or {}:
            if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < x.dim():
                raise invalid(function, where, f"name dimensions 0 to {x.dim() - 1}", repr(dim))
        result.append((name, {dim: label for dim, label in (given or {}).items() if label is not None}))
    return result


@dataclass(frozen=True)
class Sizes:
    """The sizes of the inputs of an exported program.

    Attributes:
        shapes: of each input; a free size is an expression of symbols.
        hints: symbols and their size in the example.
        least: and the least size; 1 where torch only says 2.
        most: and the greatest, None without one.
        labels: what each symbol is called in the file.
        bounds: least and greatest size that were asked for, by symbol; 1 and None where nothing was.
    """

    shapes: tuple[tuple[Any, ...], ...]
    hints: dict[Any, int]
    least: dict[Any, int]
    most: dict[Any, int | None]
    labels: dict[Any, str]
    bounds: dict[Any, tuple[int, int | None]] = field(default_factory=dict)

    def at(self, chosen: Mapping[Any, int]) -> list[list[int]]:
        """The shape of each input at these sizes."""
        return [
            [int(size.subs(chosen)) if hasattr(size, "subs") else int(size) for size in shape] for shape in self.shapes
        ]

    def trials(self) -> Iterator[dict[Any, int]]:
        """Sizes to try a file at: the example's, larger ones, all least, one least at a time, one far at a time."""
        symbols = list(self.hints)
        large: dict[Any, int] = {}
        for place, one in enumerate(symbols):
            size = self.hints[one] + 1 + 2 * place
            while size in large.values():
                size += 1
            large[one] = self._within(one, size)
        all_least = {one: self._within(one, 1) for one in symbols}
        chosen = [dict(self.hints)]
        if symbols:
            chosen += [large, all_least]
        if len(symbols) > 1:
            chosen += [{**large, one: all_least[one]} for one in symbols[:3]]
        small = {one: self._within(one, 2) for one in symbols}
        for one in symbols[:3]:
            chosen.append({**small, one: self._within(one, max(2 * self.hints[one] + 3, _FAR))})
        seen: list[dict[Any, int]] = []
        for sizes in chosen:
            if sizes not in seen:
                seen.append(sizes)
                yield sizes

    def multiple(self, chosen: Mapping[Any, int]) -> dict[Any, int]:
        """The next sizes that are multiples of the example's, for a model that takes no others."""
        return {one: self._within(one, -(-size // self.hints[one]) * self.hints[one]) for one, size in chosen.items()}

    def asked_bounds(self, symbol: Any) -> tuple[int, int | None]:
        """The least and greatest size that were asked for."""
        return self.bounds.get(symbol, (1, None))

    def least_notes(self) -> list[tuple[str, int, str]]:
        """Where sizes were not tried from 1 on: their names, the least, and a note."""
        return [
            (label, size, f"{label} was tried from {size} on, the least that torch.export promises")
            for symbol, label in self.labels.items()
            if (size := self.least.get(symbol, 1)) > 1
        ]

    def names(self) -> dict[str, str]:
        """What each symbol is called in the file, by torch's own name for it."""
        return {str(symbol): label for symbol, label in self.labels.items()}

    def said(self, chosen: Mapping[Any, int]) -> dict[str, int]:
        """Sizes by their names."""
        return {self.labels.get(symbol, str(symbol)): size for symbol, size in chosen.items()}

    def _within(self, symbol: Any, size: int) -> int:
        most = self.most[symbol]
        size = max(size, self.least[symbol])
        return size if most is None else min(size, most)


def inputs_of(program: Any) -> list[tuple[Any, ...]]:
    """The shapes of a program's inputs: numbers, and `torch.SymInt` where a size is free."""
    user = set(program.graph_signature.user_inputs)
    return [
        tuple(node.meta["val"].shape) for node in program.graph.nodes if node.op == "placeholder" and node.name in user
    ]


def read_sizes(function: str, model: nn.Module, call: Call, wanted: Wanted, program: Any) -> Sizes:
    """The sizes of a program of torch.export, named.

    Raises:
        ValueError: a dimension that was asked for by name is fixed by the model, or two by one name are two sizes.
    """
    shapes: list[tuple[Any, ...]] = []
    hints: dict[Any, int] = {}
    for found in inputs_of(program):
        shapes.append(tuple(size.node.expr if isinstance(size, torch.SymInt) else int(size) for size in found))
        for size in found:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                hints[size.node.expr] = int(size.node.hint)
    labels: dict[Any, str] = {}
    by_name: dict[str, Any] = {}
    bounds: dict[Any, tuple[int, int | None]] = {}
    for name, x, dims, shape in zip(call.names, call.tensors, wanted, shapes, strict=True):
        for dim, (label, low, high) in dims.items():
            size = shape[dim]
            where = f"dynamic_shapes[{name!r}][{dim}] ({label})"
            if not hasattr(size, "is_symbol") or size.is_number:
                if label is not None:
                    rule = f"be free only where the model allows it, which takes size {size} there alone"
                    raise invalid(function, where, rule, tuple(x.shape))
                continue
            if label is not None and by_name.setdefault(label, size) != size:
                rule = "be one size in the model, where it has one name; give each size a name of its own"
                raise invalid(function, where, rule, "two sizes that the model tells apart")
            if size.is_symbol:
                bounds[size] = _both(bounds.get(size, (1, None)), (low, high))
            if size.is_symbol and size not in labels:
                labels[size] = _fresh(label or label_of(model, name, x, dim), name, labels, call.names)
    least: dict[Any, int] = {}
    most: dict[Any, int | None] = {}
    for symbol in hints:
        held = program.range_constraints.get(symbol)
        low, high = (2, None) if held is None else (held.lower, held.upper)
        least[symbol] = 1 if int(low) <= 2 else int(low)
        most[symbol] = None
        if high is not None and getattr(high, "is_Integer", False) and high < _ENDLESS:
            most[symbol] = int(high)
    return Sizes(tuple(shapes), hints, least, most, labels, bounds)


def _both(one: tuple[int, int | None], other: tuple[int, int | None]) -> tuple[int, int | None]:
    greatest = [high for _, high in (one, other) if high is not None]
    return max(one[0], other[0]), min(greatest, default=None)


def _fresh(label: str, name: str, taken: Mapping[Any, str], inputs: Sequence[str]) -> str:
    held = {*taken.values(), *inputs}
    if label in held:
        label = f"{name}_{label}"
    while label in held:
        label += "_"
    return label


def label_of(model: nn.Module, name: str, x: Tensor, dim: int) -> str:
    """`batch` and `length` where the model says, or is likely to mean, that these are theirs."""
    laid_out = [module.batch_first for module in model.modules() if isinstance(getattr(module, "batch_first", 0), bool)]
    known = type(model).__module__.partition(".")[0] in ("torch", "headwise") and bool(laid_out)
    floating = x.is_floating_point()
    if known and x.dim() == 2 and floating:
        return "length" if dim == 0 else f"{name}_{dim}"
    if dim > 1 or (dim == 1 and x.dim() > 3) or (laid_out and not all(laid_out) and not known):
        return f"{name}_{dim}"
    is_length_first = known and not laid_out[0] and floating
    return "batch" if dim == is_length_first else "length"
