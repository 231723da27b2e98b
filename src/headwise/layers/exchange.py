"""Parameters that are cut in three or joined from three: each once, whoever holds it, and nothing put in place yet.

Letters: D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise._checks import counted, invalid
from headwise.core.layouts import CHILDREN, is_plain

WHOLE_CURE = "with fused_qkv=True it stays as it is"


@dataclass(frozen=True, eq=False)
class Exchange:
    """The Parameters of `new` take the place of those of `old`: three for one, or one for three."""

    old: tuple[nn.Parameter, ...]
    new: tuple[nn.Parameter, ...]
    path: str  # of the first holder, for messages


class Exchanges:
    """All exchanges of one call, by the identity of what is exchanged, so that what is tied stays tied."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._done: dict[tuple[int, ...], Exchange] = {}
        self._slots: set[tuple[int, str]] = set()  # (module, name) pairs whose Parameter is exchanged
        self._dropped: dict[int, str] = {}  # children that go, by id, and the parents that let them go
        self._parents: set[int] = set()

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self._done.values())

    def __len__(self) -> int:
        return len(self._done)

    def cut(self, holder: nn.Module, name: str, path: str) -> tuple[nn.Parameter, ...]:
        """Three Parameters of their own memory for the one that `holder` has under `name`.

        Raises:
            ValueError: it carries what three cannot carry.
        """
        parameter = cast(nn.Parameter, holder._parameters[name])
        self._slots.add((id(holder), name))
        key = (id(parameter),)
        if key not in self._done:
            _check(self.function, parameter, path, WHOLE_CURE)
            self._done[key] = Exchange((parameter,), _parts(parameter), path)
        return self._done[key].new

    def join(self, holders: list[nn.Module], name: str, path: str) -> nn.Parameter:
        """One Parameter for the three that `holders` have under `name`.

        Raises:
            ValueError: they carry what one cannot carry, or do not agree.
        """
        three = tuple(cast(nn.Parameter, holder._parameters[name]) for holder in holders)
        self._slots.update((id(holder), name) for holder in holders)
        key = tuple(map(id, three))
        if key not in self._done:
            paths = [f"{path}.{child}.{name}" for child in CHILDREN]
            for parameter, where in zip(three, paths, strict=True):
                _check(self.function, parameter, where, "remove that first")
            for done in self:
                if {id(old) for old in done.old} & set(key):
                    raise self._tied(paths[0], f"{done.path}, in another order")
            self._done[key] = Exchange(three, (_joined(self.function, three, f"{path}.*.{name}"),), paths[0])
        return self._done[key].new[0]

    def drop(self, parent: nn.Module, children: list[nn.Module], path: str) -> None:
        """Note that `parent` is going to lose these children."""
        self._parents.add(id(parent))
        self._dropped.update((id(child), f"{path}.{name}") for name, child in zip(CHILDREN, children, strict=True))

    def check_other_uses(self, modules: Mapping[int, tuple[str, nn.Module]]) -> None:
        """Hold that nothing in the model but what is changed uses the Parameters that go, or their memory.

        Args:
            modules: id of each module of the model to its name and itself.

        Raises:
            ValueError: something does.
        """
        for path, module in modules.values():
            for name, child in module._modules.items():
                if id(child) in self._dropped and id(module) not in self._parents:
                    raise self._tied(self._dropped[id(child)], f"{path}.{name}".lstrip("."))
        going = {id(old): exchange for exchange in self for old in exchange.old}
        memory = sorted((*span(old), exchange.path) for exchange in self for old in exchange.old if span(old)[1])
        for path, module in modules.values():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or (id(module), name) in self._slots:
                    continue
                where = f"{path}.{name}".lstrip(".")
                if id(tensor) in going:
                    raise self._tied(going[id(tensor)].path, where)
                start, stop = span(tensor)
                for first, last, mine in memory:
                    if start < last and first < stop:
                        raise self._tied(mine, f"{where}, which lies in the same memory")
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    for found in tensors_in(value):
                        if id(found) in going:
                            kind = type(module).__name__
                            raise self._tied(going[id(found)].path, f"{path or 'model'}.{name} of a {kind}")
        for index, (_, last, one) in enumerate(memory[:-1]):
            if memory[index + 1][0] < last:
                raise self._tied(one, f"{memory[index + 1][2]}, which lies in the same memory")

    def _tied(self, path: str, where: str) -> ValueError:
        cure = WHOLE_CURE if self.function == "upgrade" else "untie them first"
        return invalid(self.function, path, f"be used by nothing that stays as it is ({cure})", f"also {where}")


def span(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins and ends; (0, 0) where that cannot be said."""
    if not is_plain(tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return 0, 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + extent * tensor.element_size()


def tensors_in(value: object, depth: int = 2) -> Iterator[Tensor]:
    """A tensor itself, or those in a list, tuple, set or dict, and in such a one inside it."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        for inner in list(value.values()) if isinstance(value, dict) else list(value):
            yield from tensors_in(inner, depth - 1)


def _check(function: str, parameter: nn.Parameter, path: str, cure: str) -> None:
    """A plain Parameter that carries nothing that belongs to the whole of it."""
    if not is_plain(parameter) or parameter.layout != torch.strided:
        kind = type(parameter.data).__name__ if type(parameter) is nn.Parameter else type(parameter).__name__
        raise invalid(function, path, f"be a plain Parameter ({cure})", f"{kind}, sharded, quantized or lazy")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise invalid(function, path, f"carry no hooks ({cure}; or remove them and set them anew after)", "some")
    grad = parameter.grad
    if grad is not None and (type(grad) is not Tensor or grad.layout != torch.strided):
        rule = f"be a plain tensor ({cure}; or call zero_grad() first)"
        raise invalid(function, f"{path}.grad", rule, f"{type(grad).__name__}, {grad.layout}")
    for name, value in vars(parameter).items():
        if isinstance(value, Tensor) and value.numel() > 1:
            rule = f"hold no tensor, of which it cannot be known how to take it apart ({cure})"
            raise invalid(function, f"{path}.{name}", rule, f"a tensor {tuple(value.shape)}")


def _parts(parameter: nn.Parameter) -> tuple[nn.Parameter, ...]:
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be trained later
        parts = [
            nn.Parameter(part.clone(), requires_grad=parameter.requires_grad) for part in parameter.detach().chunk(3)
        ]
        grads = (None,) * 3 if parameter.grad is None else parameter.grad.detach().chunk(3)
        for part, grad in zip(parts, grads, strict=True):
            _set_grad_dtype(part, parameter)
            part.grad = None if grad is None else grad.clone()
            _share([parameter], part)
            vars(part).update(vars(parameter))
    return tuple(parts)


def _joined(function: str, three: tuple[nn.Parameter, ...], path: str) -> nn.Parameter:
    def agree(what: str, values: list[Any], cure: str) -> None:
        if any(value is not values[0] and value != values[0] for value in values[1:]):
            raise invalid(function, f"{what} of {path}", f"be the same ({cure})", ", ".join(map(str, values)))

    if len({id(parameter) for parameter in three}) != 3:
        raise invalid(function, path, "be Parameters of their own", "tied ones, which would come apart")
    agree("dtype", [p.dtype for p in three], "convert them")
    agree("device", [p.device for p in three], "move them")
    agree("grad_dtype", [p.grad_dtype for p in three], "set it on all or none")
    agree("requires_grad", [p.requires_grad for p in three], "freeze all or none")
    agree("having .grad", [p.grad is not None for p in three], "call zero_grad() first")
    for name in sorted({name for parameter in three for name in vars(parameter)}):
        agree(f"attribute {name}", [vars(p).get(name, "none") for p in three], "set it on all or none")
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be trained later
        joined = nn.Parameter(torch.cat([p.detach() for p in three]), requires_grad=three[0].requires_grad)
        _set_grad_dtype(joined, three[0])
        grads = [p.grad.detach() for p in three if p.grad is not None]
        joined.grad = torch.cat(grads) if grads else None
        _share(list(three), joined)
    vars(joined).update(vars(three[0]))
    return joined


def _set_grad_dtype(new: nn.Parameter, old: nn.Parameter) -> None:
    if old.grad_dtype != new.grad_dtype:  # gradients in float32 for weights in bfloat16, for instance
        new.grad_dtype = old.grad_dtype


def _share(old: list[nn.Parameter], new: nn.Parameter) -> None:
    """Memory that other processes see stays such memory."""
    if new.device.type == "cpu" and any(parameter.is_shared() for parameter in old):
        new.share_memory_()
        if new.grad is not None and any(p.grad is not None and p.grad.is_shared() for p in old):
            new.grad.share_memory_()


def described(exchanges: Exchanges) -> str:
    """What was exchanged, for the log."""
    cuts = sum(len(exchange.old) == 1 for exchange in exchanges)
    joins = len(exchanges) - cuts
    said = [f"{counted(cuts, 'packed parameter')} split in three"] if cuts else []
    said += [f"{counted(joins, 'packed parameter')} joined from three"] if joins else []
    return ", ".join(said) or "no parameter replaced"
