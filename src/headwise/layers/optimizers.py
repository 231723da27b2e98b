"""Optimizers that follow when Parameters are cut or joined: groups in place, state cut or joined with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import counted, invalid
from headwise.core.layouts import CHILDREN
from headwise.layers.exchange import Exchange, Exchanges

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
_SOONER = "do it before the first step, or build the optimizer anew"


@dataclass(frozen=True)
class Followed:
    """What `plan_optimizers` found, and how to carry it out."""

    commit: Callable[[], None]  # cannot fail
    rewritten: int  # entries of param_groups that are replaced
    orphans: int  # trainable Parameters that are replaced and that no optimizer holds


def listed(function: str, optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers of the argument, each once, and those that they wrap (SAM's `base_optimizer`, Lookahead's).

    Raises:
        ValueError: it holds something else.
    """
    rule = "be a torch.optim.Optimizer or several of them"
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return _with_wrapped([optimizer])
    if isinstance(optimizer, (str, dict)) or not isinstance(optimizer, Iterable):
        raise invalid(function, "optimizer", rule, type(optimizer).__name__)
    found = list(optimizer)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise invalid(function, "optimizer", rule, f"{type(one).__name__} among them")
    return _with_wrapped(found)


def _with_wrapped(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    found: dict[int, torch.optim.Optimizer] = {}
    waiting = list(reversed(optimizers))
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting.extend(value for value in vars(one).values() if isinstance(value, torch.optim.Optimizer))
    return list(found.values())


def check_holds(function: str, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    """Hold that some group of one of them holds a Parameter of the model.

    Raises:
        ValueError: none does.
    """
    own = {id(parameter) for parameter in model.parameters()}
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    if not any(id(parameter) in own for group in groups for parameter in group["params"]):
        rule = "hold parameters of this model; pass the one that trains it, or none and build it afterwards"
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        raise invalid(function, "optimizer", rule, f"{kinds} with none of them" if kinds else "none in a list")


def plan_optimizers(function: str, optimizers: list[torch.optim.Optimizer], exchanges: Exchanges) -> Followed:
    """Compute each group and each state as it will be, and change nothing.

    Raises:
        ValueError: a state that cannot be cut or joined, or an optimizer that holds Parameters elsewhere too.
    """
    with torch.inference_mode(False), torch.no_grad():
        plans = [_Plan(function, optimizer, exchanges) for optimizer in optimizers]
    held = {id(parameter) for plan in plans for parameter in plan.replaced}
    trainable = [old for exchange in exchanges for old in exchange.old if old.requires_grad]

    def commit() -> None:
        for plan in plans:
            plan.commit()

    orphans = sum(id(old) not in held for old in trainable)
    entries: set[tuple[int, int]] = set().union(*(plan.entries for plan in plans))
    return Followed(commit, len(entries), orphans)


class _Plan:
    """One optimizer as it will be."""

    def __init__(self, function: str, optimizer: torch.optim.Optimizer, exchanges: Exchanges) -> None:
        self.function, self.optimizer = function, optimizer
        self.kind = type(optimizer).__name__
        self.replaced: list[nn.Parameter] = []
        self.entries: set[tuple[int, int]] = set()  # list and Parameter; a wrapper may share the lists
        self.groups: list[tuple[dict[str, Any], list[Any], list[str] | None]] = []
        self.states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        by_old = {id(old): exchange for exchange in exchanges for old in exchange.old}
        touched: dict[int, Exchange] = {}
        for group in optimizer.param_groups:
            touched.update(self._group(group, by_old))
        if touched:
            self._check_elsewhere(by_old)
        for exchange in touched.values():
            self._state(exchange)

    def commit(self) -> None:
        for group, parameters, names in self.groups:
            group["params"][:] = parameters
            if names is not None:
                group["param_names"][:] = names
        for parameter in self.replaced:
            self.optimizer.state.pop(parameter, None)
        for parameter, state in self.states:
            self.optimizer.state[parameter] = state

    def _group(self, group: dict[str, Any], by_old: dict[int, Exchange]) -> dict[int, Exchange]:
        held: list[Any] = group["params"]
        names: list[str] | None = group.get("param_names")
        found = {id(by_old[id(p)]): by_old[id(p)] for p in held if id(p) in by_old}
        if not found:
            return found
        if not isinstance(held, list) or not (names is None or isinstance(names, list)):
            raise invalid(self.function, f"{self.kind}.param_groups", "hold lists", type(held).__name__)
        ids = {id(p) for p in held}
        parameters: list[Any] = []
        new_names: list[str] = []
        placed: set[int] = set()
        for place, parameter in enumerate(held):
            exchange = by_old.get(id(parameter))
            name = "" if names is None else names[place]
            if exchange is None:
                parameters.append(parameter)
                new_names.append(name)
                continue
            self.replaced.append(parameter)
            self.entries.add((id(held), id(parameter)))
            if id(exchange) not in placed:
                placed.add(id(exchange))
                if missing := [old for old in exchange.old if id(old) not in ids]:
                    rule = f"hold all three of {exchange.path} and its like in one group, or none of them"
                    got = f"{counted(len(exchange.old) - len(missing), 'one', 'of them')} in this group"
                    raise invalid(self.function, f"{self.kind}.param_groups", rule, got)
                parameters.extend(exchange.new)
                new_names.extend(_renamed(name, exchange))
        self.groups.append((group, parameters, None if names is None else new_names))
        return found

    def _check_elsewhere(self, by_old: dict[int, Exchange]) -> None:
        """Optimizers that keep lists of their own (sharding ones, for instance) would go on with what is gone."""
        own = {id(group["params"]) for group in self.optimizer.param_groups}
        for name, value in vars(self.optimizer).items():
            if name in ("param_groups", "state", "defaults") or id(value) in own:
                continue
            if _holds(value, by_old, 3):
                rule = f"hold its parameters in param_groups and state only; {_SOONER}"
                raise invalid(self.function, "optimizer", rule, f"{self.kind}, which has them in {name} too")

    def _state(self, exchange: Exchange) -> None:
        states = [self.optimizer.state.get(old) for old in exchange.old]
        if all(state is None for state in states):
            return
        keys = [None if state is None else list(state) for state in states]
        if len(states) > 1 and any(own is None or set(own) != set(keys[0] or ()) for own in keys):
            raise self._invalid("state", exchange, "have the same entries for all three", f"{keys}")
        news: list[dict[str, Any]] = [{} for _ in exchange.new]
        for key in keys[0] or ():
            values = [state[key] for state in states if state is not None]
            parts = self._cut(key, values[0], exchange) if len(news) > 1 else [self._join(key, values, exchange)]
            for new, part in zip(news, parts, strict=True):
                new[key] = part
        self.states.extend(zip(exchange.new, news, strict=True))

    def _cut(self, key: str, value: Any, exchange: Exchange) -> list[Any]:
        if _is_scalar(value):
            return [value] * len(CHILDREN)
        if type(value) is Tensor and value.shape == exchange.old[0].shape:
            return [part.clone() for part in value.detach().chunk(3)]
        if type(value) is Tensor and value.numel() == 1:
            return [value.detach().clone() for _ in CHILDREN]
        raise self._invalid(key, exchange, f"be a number or as large as the parameter {_shape(exchange)}", _kind(value))

    def _join(self, key: str, values: list[Any], exchange: Exchange) -> Any:
        first = values[0]
        if all(map(_is_scalar, values)):
            if all(value == first for value in values):
                return first
        elif all(type(value) is Tensor for value in values):
            if all(value.shape == old.shape for value, old in zip(values, exchange.old, strict=True)):
                return torch.cat([value.detach() for value in values])
            if all(value.numel() == 1 and torch.equal(value, first) for value in values):
                return first.detach().clone()
        got = "; ".join(_kind(value) for value in values)
        raise self._invalid(key, exchange, "be equal numbers, or as large as the three parameters", got)

    def _invalid(self, key: str, exchange: Exchange, rule: str, got: str) -> ValueError:
        whole = ", or pass fused_qkv=True, which replaces no parameter" if self.function == "upgrade" else ""
        what = f"{key!r} in the state of {self.kind} for {exchange.path}"
        return invalid(self.function, what, f"{rule}; {_SOONER}{whole}", got)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _holds(value: object, by_old: dict[int, Exchange], depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in by_old
    if not depth or not isinstance(value, (list, tuple, set, frozenset, dict)):
        return False
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    return any(_holds(one, by_old, depth - 1) for one in inner)


def _shape(exchange: Exchange) -> str:
    return str(tuple(exchange.old[0].shape))


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        said = f" = {value.item()}" if value.numel() == 1 and not value.is_meta else ""
        return f"{type(value).__name__} {tuple(value.shape)}{said}"
    return f"{type(value).__name__} {value!r}" if _is_scalar(value) else type(value).__name__


def _renamed(name: str, exchange: Exchange) -> list[str]:
    """`x.in_proj_weight` is `x.q_proj.weight`, `x.k_proj.weight`, `x.v_proj.weight`, and back."""
    part = exchange.path.rpartition("_" if len(exchange.new) > 1 else ".")[2]
    if len(exchange.new) > 1:
        packed = f"in_proj_{part}"
        if name.endswith(packed):
            return [f"{name.removesuffix(packed)}{child}.{part}" for child in CHILDREN]
        return [f"{name}.{child}" for child in CHILDREN]
    split = f"{CHILDREN[0]}.{part}"
    return [f"{name.removesuffix(split)}in_proj_{part}" if name.endswith(split) else name]
