"""Code around a layer that asks for its class: `isinstance(self.attn, nn.MultiheadAttention)` is False after upgrade.

torch_geometric's GPSConv is such code, and passes its attention by without a word where the answer is False. What a
method asks is read from its compiled code, so that nothing is run and no source is needed.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_ASKS = frozenset(("isinstance", "issubclass", "type", "__class__"))
_SET_UP = ("init_", "_init", "initialize", "reset_", "_reset")  # how methods begin that make first values
_BESIDE = frozenset(("extra_repr", "load_state_dict", "state_dict", "_load_from_state_dict"))


def who_asks(parents: list[nn.Module], kinds: tuple[type[nn.Module], ...]) -> str | None:
    """The first method around a layer that asks for one of its classes, as "GPSConv.forward"; None: none.

    Methods that make first values, print or load are passed over, and those that ask for ours too. It sees a class by
    its name, by another name that the method's module gives it, inside a tuple there, and in a function of that module
    that the method calls.
    """
    for parent in parents:
        for owner in type(parent).__mro__:
            if owner.__module__.partition(".")[0] in ("torch", "headwise", "builtins"):
                continue
            for name, member in vars(owner).items():
                passed_over = name.startswith("__") and name != "__call__"
                if passed_over or name.startswith(_SET_UP) or name in _BESIDE:
                    continue
                if any(_asks(function, kinds) for function in _functions(member)):
                    return f"{owner.__name__}.{name}"
    return None


def _functions(member: Any) -> Iterator[FunctionType]:
    """What runs when an attribute of a class is used."""
    held: tuple[Any, ...] = (member,)
    if isinstance(member, property):
        held = (member.fget, member.fset)
    elif isinstance(member, functools.cached_property):
        held = (member.func,)
    elif isinstance(member, (classmethod, staticmethod)):
        held = (member.__func__,)
    for one in held:
        function = inspect.unwrap(one) if callable(one) else one
        if isinstance(function, FunctionType):
            yield function


def _asks(function: FunctionType, kinds: tuple[type[nn.Module], ...], *, further: bool = True) -> bool:
    codes = list(_codes(function.__code__))
    names = {name for code in codes for name in code.co_names}
    known = function.__globals__
    if any(_is_ours(name, known.get(name)) for name in names):
        return False  # it asks for ours too
    if any(_is_asked_for(name, known.get(name), kinds) for name in names) and (
        names & _ASKS or any(step.opname == "MATCH_CLASS" for code in codes for step in dis.get_instructions(code))
    ):
        return True
    called = [known.get(name) for name in names] if further else []
    return any(
        _asks(other, kinds, further=False)
        for other in called
        if isinstance(other, FunctionType) and other.__module__ == function.__module__
    )


def _is_ours(name: str, value: object) -> bool:
    return name == "headwise" or str(getattr(value, "__module__", "")).partition(".")[0] == "headwise"


def _is_asked_for(name: str, value: object, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a name in code stands for one of the classes; an attribute (`nn.MultiheadAttention`) by its spelling."""
    held = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    return name in {kind.__name__ for kind in kinds} or any(one is kind for one in held for kind in kinds)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
