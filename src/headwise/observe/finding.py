"""The attentions of a model, headwise's and torch's: where they are, and whether they can be seen there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import nn

from headwise.core.multihead import Attend

__all__ = ["Layer", "find_layers", "is_compiled", "while_compiling"]


def while_compiling(function: Callable[..., int]) -> Callable[..., int]:
    """Have a function run once, while a call that holds it is compiled, and not when the compiled call runs.

    It is what `torch.compiler.assume_constant_result` does, without loading the compiler at import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(eq=False)
class Layer:
    """An attention of a model.

    Attributes:
        index: its number, in the order of `named_modules`.
        name: its dotted name; "" where the model is one.
        module: it.
        path: the modules from the model down to it, both included.
        traced: a compiler met it while it was watched, in a function that holds it: it is left alone from then on.
    """

    index: int
    name: str
    module: nn.Module
    path: tuple[nn.Module, ...]
    traced: bool = False

    @property
    def heads(self) -> int:
        """H."""
        return cast(int, self.module.num_heads)

    @property
    def owner(self) -> nn.TransformerEncoderLayer | None:
        """Torch's layer around it, if that may compute it without calling it."""
        if len(self.path) < 2:
            return None
        above = self.path[-2]
        whole = isinstance(above, nn.TransformerEncoderLayer) and isinstance(self.module, nn.MultiheadAttention)
        return cast(nn.TransformerEncoderLayer, above) if whole else None

    def still_there(self) -> bool:
        """Whether the model still holds it at this place."""
        names = self.name.split(".") if self.name else []
        links = zip(self.path, names, self.path[1:], strict=False)
        return all(above._modules.get(name) is below for above, name, below in links)

    def is_compiled(self) -> bool:
        """Whether it or anything around it is compiled, so that what stands in for its `forward` is not called."""
        return self.traced or any(is_compiled(module) for module in self.path)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, `module.compile()` was called, or its `forward` is compiled."""
    state = module.__dict__
    made = "_orig_mod" in module._modules or state.get("_compiled_call_impl") is not None
    return made or hasattr(state.get("forward"), "_torchdynamo_orig_callable")


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """All attentions of a model, once each, in the order of `model.named_modules()`."""
    found: list[Layer] = []
    seen: set[int] = set()

    def walk(module: nn.Module, names: tuple[str, ...], path: tuple[nn.Module, ...]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        path = (*path, module)
        if isinstance(module, nn.MultiheadAttention) or isinstance(module._modules.get("attend"), Attend):
            found.append(Layer(len(found), ".".join(names), module, path))
        for name, child in module.named_children():
            walk(child, (*names, name), path)

    walk(model, (), ())
    return tuple(found)
