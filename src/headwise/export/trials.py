"""An ONNX file beside the model: at several sizes, with other numbers, and where torch.export's guards are broken."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.export import guards, shapes, verify
from headwise.export.parts import Call, Positional
from headwise.export.verify import Trial

_NAME = "export_onnx"
_FACTOR, _MIXED = 50.0, 200.0
_LARGEST = 1e30  # that a number times the factor may be
_SPARE = 8.0  # times the model's own change for another last digit
_LAST_DIGIT = 2.0**-22
_FREELY = 16  # the most guards whose breaks are tried
_ALL = "masks inverted"
_SAID = 4  # notes on guards


def _floats(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x) if x.is_floating_point() else x


def _masks(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x) if x.dtype is torch.bool else x


def _times(x: Tensor, factor: Tensor | float) -> Tensor:
    return (x * factor).clamp(-_LARGEST, _LARGEST).where(x.isfinite(), x)


def _mixed(x: Tensor) -> Tensor:
    return _times(x, (torch.randint(3, x.shape, generator=torch.Generator().manual_seed(0)) - 1) * _MIXED)


def _half(x: Tensor) -> Tensor:
    """Every second entry turned, so that few rows see nothing."""
    return x ^ (torch.arange(x.shape[-1]) % 2 == 1) if x.dim() else x


def _moved(x: Tensor, noise: torch.Generator, and_zeros: bool) -> Tensor:
    """With other last digits; `and_zeros`: zeros become small numbers."""
    if not x.is_floating_point():
        return x
    size = x.abs()
    if and_zeros:
        size = size.where(x != 0, size.where(x.isfinite(), torch.zeros(())).max().clamp_min(_LAST_DIGIT))
    moved = x + _LAST_DIGIT * size * (2 * torch.rand(x.shape, generator=noise) - 1)
    return moved.where(x.isfinite(), x)


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": _floats(torch.neg),
    f"times {_FACTOR:g}": _floats(lambda x: _times(x, _FACTOR)),
    f"signs and zeros mixed, times {_MIXED:g}": _floats(_mixed),
    "zeros": _floats(lambda x: x.where(x.isinf(), torch.zeros_like(x))),
    "masks half inverted": _masks(_half),
    _ALL: _masks(torch.logical_not),
}


Limit = tuple[str, str]  # the name of a size, and what it may be: ("length", "at most 64")


class Beside:
    """A session and the model, on the same inputs.

    Args:
        session: of the file.
        module: the model.
        call: the example.
        sizes: that are free.
        tolerance: share of an output that is taken.
        exact: integer outputs may not differ at all.
    """

    def __init__(
        self, session: Any, module: Positional, call: Call, sizes: shapes.Sizes, tolerance: float, exact: bool
    ) -> None:
        self.session, self.module, self.call = session, module, call
        self.sizes, self.tolerance, self.exact = sizes, tolerance, exact
        want = shapes.outputs_at(module, call.tensors)
        assert want is not None, "the example ran before"
        self.scales = [verify.scale_of(one) for one in want]
        for place, one in enumerate(want):
            if one.is_floating_point() and one.numel() and bool(one.isnan().all()):
                rule = "be a call whose outputs are numbers, by which a file can be judged"
                raise invalid(_NAME, "example", rule, f"NaN in all of output {place}")

    def at(self, chosen: Mapping[Any, int]) -> tuple[Tensor, ...]:
        """The example's tensors at some sizes."""
        return shapes.varied(self.call.tensors, self.sizes.at(chosen))

    def compare(self, tensors: Sequence[Tensor], named: Mapping[str, int], values: str = "") -> Trial | None:
        """One trial; None: the model does not take it."""
        tensors = tuple(tensors)
        want = shapes.outputs_at(self.module, tensors)
        if want is None:
            return None
        try:
            got = verify.run(self.session, self.call.names, tensors)
        except Exception as error:  # onnxruntime's errors have no common base
            return Trial(named, math.inf, values, holds=False, raised=str(error).partition("\n")[0])
        errors = verify.differences(got, want, self.scales)
        if self._holds(errors, want):
            return Trial(named, max(errors, default=0.0), values)
        own = self._own(tensors, want)
        excused = len(own) == len(errors) and self._holds(
            [
                max(0.0, error - _SPARE * one) if math.isfinite(one) else error
                for error, one in zip(errors, own, strict=True)
            ],
            want,
        )
        return Trial(named, max(errors), values, max(own) if excused else 0.0, excused)

    def repeats(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the model gives the same for the same inputs."""
        one, other = (shapes.outputs_at(self.module, tensors) for _ in range(2))
        return one is not None and other is not None and verify.difference(one, other) == 0

    def _holds(self, errors: Sequence[float], want: Sequence[Tensor]) -> bool:
        if len(errors) != len(want):
            return False
        return all(
            error <= (0.0 if self.exact and not one.is_floating_point() else self.tolerance)
            for error, one in zip(errors, want, strict=True)
        )

    def _own(self, tensors: tuple[Tensor, ...], want: Sequence[Tensor]) -> list[float]:
        """What the model differs by where its inputs differ in their last digits: ties, and sums of large numbers."""
        most = [0.0] * len(want)
        if not self.repeats(tensors):  # it draws random numbers: that excuses nothing
            return []
        choices = any(not one.is_floating_point() for one in want)
        for seed, and_zeros in itertools.product(range(3), (False, True) if choices else (False,)):
            noise = torch.Generator().manual_seed(seed)
            other = shapes.outputs_at(self.module, tuple(_moved(x, noise, and_zeros) for x in tensors))
            if other is None or len(other) != len(want):
                return []
            found = verify.differences(other, want, self.scales)
            for place, one in enumerate(want):  # zeros that tie excuse a choice, not a number
                if not (and_zeros and one.is_floating_point()):
                    most[place] = max(most[place], found[place])
        return most

    def everywhere(self) -> tuple[list[Trial], list[str]]:
        """The example as it is, other sizes, and other numbers; and what the model does not take."""
        trials: list[Trial] = []
        notes: list[str] = []
        example = self.sizes.said(self._own_sizes())
        waiting: list[dict[Any, int] | None] = [None, *self.sizes.trials()]
        while waiting:
            chosen = waiting.pop(0)
            named = example if chosen is None else self.sizes.said(chosen)
            if chosen is not None and any(trial.sizes == named for trial in trials):
                continue
            trial = self.compare(self.call.tensors if chosen is None else self.at(chosen), named)
            if trial is not None:
                trials.append(trial)
                continue
            assert chosen is not None, "the example ran before"
            if (other := self.sizes.multiple(chosen)) != chosen:
                waiting.append(other)
            notes.append(f"not tried at {verify.at_sizes(named)}, which the model does not take")
        for trial in self.with_values(self.call.tensors, example):
            if trial.holds or trial.values != _ALL:
                trials.append(trial)
            else:  # torch's own attention has numbers of its own where nothing is seen
                notes.append(f"differs from the model where a mask is the example's inverted: {trial.error:.1e}")
        return trials, notes

    def with_values(self, tensors: Sequence[Tensor], named: Mapping[str, int]) -> list[Trial]:
        """Trials with other numbers."""
        found = []
        for values, change in _VALUES.items():
            changed = tuple(change(x) for x in tensors)
            if all(torch.equal(a, b) for a, b in zip(changed, tensors, strict=True)):
                continue
            trial = self.compare(changed, named, values)
            if trial is not None:
                found.append(trial)
        return found

    def _own_sizes(self) -> dict[Any, int]:
        """The example's own sizes, also where torch.export saw others."""
        found = dict(self.sizes.hints)
        for x, shape in zip(self.call.tensors, self.sizes.shapes, strict=True):
            for size, expression in zip(x.shape, shape, strict=True):
                if expression in found:
                    found[expression] = size
        return found


def hold_guards(beside: Beside, program: Any) -> tuple[list[Limit], list[str]]:
    """Break each guard where the model takes it, and compare the file there.

    Returns:
        Of those that the model needs too: what they say of a single size, and notes on the first of all.

    Raises:
        ValueError: the file is wrong where a guard is broken, and does not say so.
    """
    sizes = beside.sizes
    limits: list[Limit] = []
    notes: list[str] = []
    needed: list[str] = []
    for place, condition in enumerate(guards.conditions(program, sizes)):
        text = shapes.worded(str(condition), sizes.names())
        points = guards.broken(condition, sizes)
        if points and place >= _FREELY:
            notes.append(f"not tried where this does not hold: {text}")
        elif _is_loud(beside, condition, text, points):
            limit = guards.limit(condition)
            if limit is None:
                needed.append(f"the file needs {text}")
            else:
                symbol, way, size = limit
                limits.append((sizes.labels[symbol], f"{way} {size}"))
                notes.append(f"{sizes.labels[symbol]} is {way} {size}")
    notes = list(dict.fromkeys([*notes, *needed]))
    more = len(notes) - _SAID
    return limits, notes if more <= 0 else [*notes[:_SAID], f"and {more} more guards of torch.export"]


def _is_loud(beside: Beside, condition: Any, text: str, points: Sequence[Mapping[Any, int]]) -> bool:
    """Whether the model or the file raises at one of these sizes, which break a guard; both are right at the others."""
    sizes, loud = beside.sizes, False
    for chosen in points:
        named = sizes.said(chosen)
        if guards.is_large(chosen):
            if guards.takes(beside.module, beside.call, sizes.at(chosen)):
                raise _taken_for_granted(condition, sizes, text, named, "too large to be tried")
            loud = True
            continue
        tensors = beside.at(chosen)
        trial = beside.compare(tensors, named)
        if trial is None:
            loud = True
            continue
        values = [] if chosen is not points[0] else beside.with_values(tensors, named)
        wrong = [one for one in (trial, *values) if not one.holds and one.values != _ALL]
        if wrong and not wrong[0].raised:
            raise _taken_for_granted(condition, sizes, text, named, f"off by {wrong[0].error:.1e}")
        loud = loud or bool(wrong)
    return loud


def _taken_for_granted(
    condition: Any, sizes: shapes.Sizes, text: str, named: Mapping[str, int], why: str
) -> ValueError:
    most = guards.limit(condition)
    cure = "fix that size by dynamic_shapes, or write the model without a choice by its sizes"
    if most is not None and most[1] == "at most":
        cure += f', or give its bound: torch.export.Dim("{sizes.labels[most[0]]}", max={most[2]})'
    label = ", ".join(sorted(sizes.labels[one] for one in condition.free_symbols))
    rule = f"do the same at all sizes that the file takes; {cure}"
    got = f"another way where {text} does not hold ({label}): at {verify.at_sizes(named)} the file is {why}"
    return invalid(_NAME, "model", rule, got)
