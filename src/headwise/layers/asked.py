"""Code around a layer that asks for its class: `isinstance(self.attn, nn.MultiheadAttention)` is False after upgrade.

torch_geometric's GPSConv is such code, and passes its attention by without a word where the answer is False. What a
method asks is read from its compiled code, so that nothing is run and no source is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

_SET_UP = ("init", "reset", "repr", "load", "state_dict", "pickle")  # methods named so look at classes before or beside


def who_asks(parents: list[nn.Module], kinds: tuple[type[nn.Module], ...]) -> str | None:
    """The first method around a layer that asks for one of its classes by name, as "GPSConv.forward"; None: none."""
    wanted = {kind.__name__ for kind in kinds}
    for parent in parents:
        for owner in type(parent).__mro__:
            if owner.__module__.partition(".")[0] in ("torch", "headwise", "builtins"):
                continue
            for name, member in vars(owner).items():
                if any(word in name for word in _SET_UP):
                    continue
                function = inspect.unwrap(member) if callable(member) else member
                if isinstance(function, FunctionType) and _asks(function.__code__, wanted):
                    return f"{owner.__name__}.{name}"
    return None


def _asks(code: CodeType, wanted: set[str]) -> bool:
    return any("isinstance" in each.co_names and wanted & set(each.co_names) for each in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
