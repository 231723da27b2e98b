"""What torch.export took for granted about free sizes, and where a model takes calls that break it.

torch.export writes one branch of a model down: the one that the example took. What it asked on the way are guards:
`length <= 63`, `batch != length`. A file does not hold them, so that each is broken on purpose here.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.export.parts import Call, Positional
from headwise.export.shapes import Sizes, Wanted, inputs_of, outputs_at, varied, with_sizes

_LARGE = 1024  # sizes above it are followed without numbers
_MUCH = 2**17  # and their product
_MANY = 3  # broken calls for each guard


def conditions(program: Any, sizes: Sizes) -> list[Any]:
    """The guards on the free sizes of an exported program, each once, as expressions of `sizes.hints`' symbols."""
    final: dict[Any, Any] = {}
    guards: list[Any] = []
    for shape, named in zip(inputs_of(program), sizes.shapes, strict=True):
        for size, expression in zip(shape, named, strict=True):
            if isinstance(size, torch.SymInt):
                raw = size.node._expr  # before torch put equal sizes in its place
                if raw.is_symbol and raw != expression:
                    final[raw] = _sympy().Integer(expression) if isinstance(expression, int) else expression
                guards = [guard.expr for guard in size.node.shape_env.guards]
    found: dict[Any, None] = {}
    for guard in guards:
        guard = guard.xreplace(final)
        held: set[Any] = getattr(guard, "free_symbols", set())
        if held and held <= set(sizes.hints):
            found[guard] = None
    for symbol in sizes.hints:
        if sizes.most[symbol] is not None and sizes.asked_bounds(symbol)[1] is None:
            found.setdefault(_sympy().Le(symbol, sizes.most[symbol]))
    return list(found)


def _sympy() -> Any:
    return importlib.import_module("sympy")  # torch brings it, and loads it late


def limit(condition: Any) -> tuple[Any, str, int] | None:
    """The symbol, "at most" or "at least", and the size, where that is all that a guard says."""
    symbols = list(condition.free_symbols)
    if len(symbols) != 1:
        return None
    sizes = _candidates(condition, symbols[0], None, None)
    holds = [_holds(condition, {symbols[0]: size}) for size in sizes]
    changes = [place for place in range(1, len(sizes)) if holds[place] != holds[place - 1]]
    if len(changes) != 1 or sizes[changes[0]] != sizes[changes[0] - 1] + 1:
        return None
    return (symbols[0], "at most", sizes[changes[0] - 1]) if holds[0] else (symbols[0], "at least", sizes[changes[0]])


def broken(condition: Any, sizes: Sizes) -> list[dict[Any, int]]:
    """A few sizes, of at least 2, that break a guard: near the least, and further away."""
    symbols = sorted(condition.free_symbols, key=str)
    short = len(symbols) > 1
    ranges = [_candidates(condition, one, sizes, 12 if short else None) for one in symbols]
    found: list[dict[Any, int]] = []
    for point in itertools.islice(itertools.product(*ranges), 4000):
        chosen = {**sizes.hints, **dict(zip(symbols, point, strict=True))}
        if not _holds(condition, chosen):
            found.append(chosen)
    found.sort(key=lambda one: (math.prod(one.values()), max(one.values())))
    small = [one for one in found if not is_large(one)] or found[:1]
    if len(small) <= _MANY:
        return small
    near = min(small, key=lambda one: sum(abs(one[symbol] - sizes.hints[symbol]) for symbol in symbols))
    far = [one for one in small if math.prod(one.values()) <= 4 * math.prod(near.values())]
    picked = [small[0], near, far[-1]]
    return [one for place, one in enumerate(picked) if one not in picked[:place]]


def is_large(chosen: Mapping[Any, int]) -> bool:
    """Whether sizes are too large for a model to be tried at them."""
    return max(chosen.values()) > _LARGE or math.prod(chosen.values()) > _MUCH


def _candidates(condition: Any, symbol: Any, sizes: Sizes | None, most: int | None) -> list[int]:
    """Sizes at which a guard may change: around the numbers in it, and some more."""
    sympy = _sympy()
    numbers = sorted({abs(int(one)) for one in condition.atoms(sympy.Integer)} - {0, 1})
    around = {*numbers, *(a // b for a in numbers for b in numbers if b < a)}
    around |= {n + 1 for n in around} | {n - 1 for n in around}
    hint = 4 if sizes is None else sizes.hints[symbol]
    usual = [2, 3, hint, hint + 1, 4, 5, 7, 8, 2 * hint + 3, 17, 67, 101, 1009]
    chosen = list(dict.fromkeys([*sorted(around), *usual]))
    low, high = (2, None) if sizes is None else sizes.asked_bounds(symbol)
    fit = [n for n in chosen if n >= max(2, low) and (high is None or n <= high) and n < 2**40]
    return sorted(fit if most is None else [*fit[:most], *(n for n in (hint,) if n not in fit[:most])])


def _holds(condition: Any, chosen: Mapping[Any, int]) -> bool:
    sympy = _sympy()
    try:
        return bool(condition.xreplace({one: sympy.Integer(size) for one, size in chosen.items()}) == sympy.true)
    except (ZeroDivisionError, TypeError, ValueError):
        return False


def takes(module: Positional, call: Call, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a model takes inputs too large to be tried, by their sizes alone; also where these say nothing."""
    own = [tuple(x.shape) for x in call.tensors]
    return not _without_numbers(module, call, own) or _without_numbers(module, call, shapes)


def _without_numbers(module: Positional, call: Call, shapes: Iterable[Sequence[int]]) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad():
            module(*(torch.empty(shape, dtype=x.dtype) for x, shape in zip(call.tensors, shapes, strict=True)))
    except Exception:  # the model is the caller's: it raises what it likes
        return False
    return True


def untied(module: Positional, tensors: tuple[Tensor, ...], program: Any, sizes: Sizes) -> tuple[Tensor, ...] | None:
    """The example with different sizes where torch took equal ones for one; None: the model wants them equal."""
    groups: dict[Any, list[tuple[int, int]]] = {}
    for at, (shape, named) in enumerate(zip(inputs_of(program), sizes.shapes, strict=True)):
        for dim, (size, expression) in enumerate(zip(shape, named, strict=True)):
            if isinstance(size, torch.SymInt) and expression in sizes.hints:
                groups.setdefault(expression, []).append((at, dim))
    used = {size for x in tensors for size in x.shape}
    found = None
    for members in groups.values():
        for part in _parts(members):
            other = next(n for n in itertools.count(3) if n not in used)
            changed = varied(tensors, with_sizes(tensors, dict.fromkeys(part, other)))
            if outputs_at(module, changed) is not None:
                tensors, found = changed, changed
                used.add(other)
                break
    return found


def _parts(members: list[tuple[int, int]]) -> Iterator[set[tuple[int, int]]]:
    """Which of some equal sizes may be another size: all of one dimension, each alone, all of one tensor."""
    seen: list[set[tuple[int, int]]] = [set(members), set()]
    ways = [{one for one in members if one[1] == dim} for dim in sorted({dim for _, dim in members}, reverse=True)]
    ways += [{one} for one in members]
    ways += [{one for one in members if one[0] == at} for at in sorted({at for at, _ in members})]
    for way in ways:
        if way not in seen:
            seen.append(way)
            yield way


def needlessly_fixed(module: Positional, call: Call, sizes: Sizes, wanted: Wanted) -> list[str]:
    """Sizes that the file fixes and neither model nor caller does: `math.sqrt(x.shape[1])`, a recurrence's length."""
    places: dict[int, list[tuple[int, int]]] = {}
    for at, (x, shape) in enumerate(zip(call.tensors, sizes.shapes, strict=True)):
        for dim, size in enumerate(x.shape):
            if size > 1 and dim in wanted[at] and getattr(shape[dim], "is_number", True):
                places.setdefault(size, []).append((at, dim))
    notes = []
    for size, members in places.items():
        for part in [{one} for one in members] + ([set(members)] if len(members) > 1 else []):
            changed = varied(call.tensors, with_sizes(call.tensors, dict.fromkeys(part, size + 1)))
            if outputs_at(module, changed) is not None:
                said = ", ".join(f"{call.names[at]}[{dim}]" for at, dim in sorted(part))
                notes.append(f"fixed: {said} = {size}, where the model takes other sizes too")
    return notes
