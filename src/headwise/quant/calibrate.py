"""The ranges of what goes into each linear, seen over a sample of real inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import counted, invalid, kind_of

Calibration = Iterable[Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]]


def ranges_of(
    function: str, model: nn.Module, names: Iterable[str], calibration: Calibration
) -> dict[str, tuple[float, float]]:
    """Run a copy of the model and note the least and greatest number that each linear is given.

    In a copy, so that what a forward leaves behind (running means, caches, hooks' records) is not in the model; random
    numbers are put back.

    Raises:
        ValueError: no inputs, inputs that the model does not take, NaN or infinity in what a linear is given, or a
            linear that was never called, or with zeros alone.
    """
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        rule = "be an iterable of inputs, each a tensor, a tuple of arguments or a dict of keywords; [x] for one"
        raise invalid(function, "calibration", rule, kind_of(calibration))
    seen: dict[str, _Seen] = {}
    probe = copy.deepcopy(model)
    for name in names:
        linear: Any = probe.get_submodule(name)
        linear.__class__ = _Seen
        linear.seen_as, linear.seen = name, None
        seen[name] = linear
    number = 0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number, given in enumerate(calibration, start=1):
            _call(function, probe, given, number)
    if number == 0:
        raise invalid(function, "calibration", "hold inputs, some hundred samples that are like those to come", "none")
    ranges = {name: linear.seen for name, linear in seen.items() if linear.seen is not None}
    leave = "where=lambda name, module: name not in {} leaves those as they are"
    inputs = counted(number, "input")
    if never := [name for name in seen if name not in ranges]:
        rule = f"reach every linear; {leave.format(set(never[:3]))}"
        raise invalid(function, "calibration", rule, f"{inputs}, and {', '.join(never[:5])} never called")
    if empty := [name for name, (low, high) in ranges.items() if low == high == 0.0]:
        rule = f"give every linear more than zeros, or its scale cannot be known; {leave.format(set(empty[:3]))}"
        raise invalid(function, "calibration", rule, f"{inputs}, of which zeros alone reach {', '.join(empty[:5])}")
    return ranges


class _Seen(nn.Linear):
    """A linear that notes the range of its inputs, however it is called."""

    seen_as: str
    seen: tuple[float, float] | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it
        if isinstance(input, Tensor) and input.numel():
            values = input.values() if input.is_nested else input
            low, high = (bound.item() for bound in torch.aminmax(values.detach().float()))
            if not (math.isfinite(low) and math.isfinite(high)):
                bad = int((~values.isfinite()).sum())
                raise _NotFinite(
                    f"{bad} of {values.numel()} numbers that are NaN or infinite in what {self.seen_as} is given"
                )
            before = self.seen or (low, high)
            self.seen = min(before[0], low), max(before[1], high)
        return super().forward(input)


def call(model: nn.Module, given: Any) -> Any:
    """The model on one input of a calibration: a tensor, arguments in order, or keywords."""
    if isinstance(given, Mapping):
        return model(**given)
    return model(*given) if isinstance(given, (tuple, list)) else model(given)


def _call(function: str, model: nn.Module, given: Any, number: int) -> None:
    if not isinstance(given, (Tensor, tuple, list, Mapping)):
        rule = "hold tensors, tuples of arguments or dicts of keywords"
        raise invalid(function, "calibration", rule, f"{kind_of(given)} at {number - 1}")
    try:
        call(model, given)
    except _NotFinite as error:
        rule = f"hold finite numbers only; clean or drop input {number - 1}, counted from 0"
        raise invalid(function, "calibration", rule, str(error)) from None
    except Exception as error:
        rule = "hold what the model is called with, labels left out: tensors, tuples of arguments or dicts of keywords"
        got = f"{type(error).__name__} from input {number - 1}, {_shown(given)}: {error}"
        raise invalid(function, "calibration", rule, got) from error


def _shown(given: Any) -> str:
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{name}: {kind_of(value)}" for name, value in given.items()) + "}"
    return f"({', '.join(map(kind_of, given))})" if isinstance(given, (tuple, list)) else kind_of(given)


class _NotFinite(ArithmeticError):
    pass
