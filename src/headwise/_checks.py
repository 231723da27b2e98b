"""One form for every error, and one door for optional dependencies.

An error names the function, the argument, the rule, what came and the sizes of all tensors involved:

    attention: key must be as wide as query; got 32 (query (2, 8, 5, 64), key (2, 8, 7, 32))
"""

from __future__ import annotations

import importlib
import operator
from contextlib import suppress
from types import ModuleType
from typing import SupportsIndex, TypeGuard

from torch import Tensor


def invalid(function: str, argument: str, rule: str, got: object, /, **tensors: Tensor | None) -> ValueError:
    """Build, not raise, the error for a caller's mistake.

    Args:
        function: the public name that was called.
        argument: the argument at fault.
        rule: what it must do or be; reads after "must", and ends with the cure where there is one.
        got: what came instead.
        tensors: the other tensors of the call, by any names, `got` too, as a user's forward may have them; each is
            shown with its shape, None is left out.

    Returns:
        The error, so that the call site reads `raise invalid(...)` and type checkers see where the path ends.
    """
    shapes = ", ".join(f"{name} {shape_of(tensor)}" for name, tensor in tensors.items() if tensor is not None)
    return ValueError(f"{function}: {argument} must {rule}; got {got}" + (f" ({shapes})" if shapes else ""))


def shape_of(tensor: Tensor) -> str:
    """As a tuple shows it; what a nested tensor has no size for is not asked of it."""
    if not tensor.is_nested:
        return str(tuple(tensor.shape))
    return f"({tensor.size(0)}, {'*, ' * (tensor.dim() - 2)}{tensor.size(-1)})" if tensor.dim() > 1 else "nested"


def class_of(value: object) -> str:
    """The class by its whole name where it is not torch's or ours: peft's `Linear` is not torch's."""
    kind = type(value)
    known = (
        kind.__module__.partition(".")[0] in ("builtins", "torch", "headwise") and "quantized" not in kind.__module__
    )
    return kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"


def kind_of(value: object) -> str:
    """What came where a tensor belongs: dtype and shape, or the type of something else."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{value.dtype} {tuple(value.shape)}"
    return "a nested tensor" if isinstance(value, Tensor) else type(value).__name__


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positive(function: str, argument: str, value: object) -> int:
    """An int of at least 1, numpy's included.

    Raises:
        ValueError: it is something else.
    """
    return at_least(1, function, argument, value)


def at_least(least: int, function: str, argument: str, value: object) -> int:
    """An int of at least `least`, numpy's included.

    Raises:
        ValueError: it is something else.
    """
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # an array, or a tensor of another dtype
            number = operator.index(value)
    if number is None or number < least:
        raise invalid(function, argument, f"be an int of at least {least}", repr(value))
    return number


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return "1 channel", "2 channels"; `nouns` is the plural where an s does not make it."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Args:
        module: the module to import, `"matplotlib.figure"` for instance.
        extra: the name of headwise's extra that installs it.

    Returns:
        The imported module.

    Raises:
        ImportError: it is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is there, something it needs is not: its own message is the right one
        raise ImportError(
            f"headwise needs {module.partition('.')[0]} for this; install it with: pip install 'headwise[{extra}]'",
            name=module,
        ) from error
