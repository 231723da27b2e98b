"""torch's attention and Transformer layers become ours inside a model, and back: the same objects, weights and all.

Everything is planned and checked before anything is changed.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise._checks import counted, invalid
from headwise.core.layouts import own_matrix_resets
from headwise.core.multihead import MultiheadAttention
from headwise.layers import become
from headwise.layers.asked import who_asks
from headwise.layers.exchange import WHOLE_CURE, Exchanges, described
from headwise.layers.optimizers import Followed, Optimizers, check_holds, listed, plan_optimizers

__all__ = ["downgrade", "upgrade"]

_LOG = logging.getLogger("headwise")
Where = Callable[[str, nn.Module], Any] | None
_BACK = {ours: theirs for theirs, ours in become.TARGETS.items()}


def upgrade(
    model: nn.Module, optimizer: Optimizers = None, *, where: Where = None, fused_qkv: bool = False
) -> nn.Module:
    """Turn the attention and Transformer layers of torch inside a model into headwise's, in place.

    Each `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, `nn.TransformerEncoder`, `nn.TransformerDecoderLayer`,
    `nn.TransformerDecoder` and `nn.Transformer` *becomes* ours: the same object with another class. So whatever holds
    it (parents, lists, closures, hook handles) is right afterwards. Weights, ties, device, dtype, `training`,
    `requires_grad`, `.grad`, hooks, buffers and attributes of modules and Parameters stay.

    Args:
        model: a model that holds such layers, or such a layer.
        optimizer: one or several that were built over the model and train on: their groups get the new Parameters in
            the place of the old ones, and their state is cut with them. None: build them afterwards.
        where: `where(name, module)` says of each such layer whether to change it; name as in `model.named_modules()`.
            None: all but those whose class the code around them asks for (`isinstance(self.attn, ...)` in a method
            of a module that holds them), where the answer would change. A subclass that adds nothing but a constructor
            is changed if `where` selects it; any other subclass stays. A warning names what stays.
        fused_qkv: False cuts each packed in_proj_weight (3D, D) and in_proj_bias (3D,) in three, so that tools find
            four `nn.Linear`. True keeps these very Parameters, so that optimizers, EMA and DDP need nothing.

    Returns:
        `model` itself.

    Raises:
        ValueError: nothing to change was found, or something of the model or an optimizer cannot be kept; the message
            says what and the cure. Model and optimizers are then as before.

    Warns:
        UserWarning: once, with the layers that stay as they are.

    One line goes to the logger "headwise": what was changed, and, as a warning, that an optimizer built before still
    holds Parameters that were cut. Random numbers are not drawn. What code will notice: `isinstance` of torch's
    classes is False, and `named_parameters()` has `q_proj.weight` and so on (not with `fused_qkv`); `state_dict()` is
    as before, in both directions.

    Example:
        >>> import torch
        >>> from headwise import upgrade
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> x = torch.randn(3, 5, 8)
        >>> before, checkpoint = model(x), model.state_dict()
        >>> upgrade(model, optimizer) is model
        True
        >>> torch.testing.assert_close(model(x), before)
        >>> model.load_state_dict(checkpoint)
        <All keys matched successfully>
        >>> type(model.layers[0].self_attn.q_proj).__name__
        'Linear'
    """
    plan = _Plan("upgrade", model, where, become.TARGETS)
    exchanges = plan.exchanges
    for torch_class in {base for _, _, base in plan.found}:
        become.check_unpatched("upgrade", torch_class)
    for path, module, base in plan.found:
        shown = path or "model"
        if base is nn.MultiheadAttention:
            commit = become.plan_attention("upgrade", module, shown, fused=fused_qkv, exchanges=exchanges)
        else:
            commit = become.plan_layer("upgrade", module, shown, become.TARGETS[base])
        plan.commits.append(commit)
    plan.commits += [partial(own_matrix_resets, module) for _, module, base in plan.found if base is nn.Transformer]
    return plan.carry_out(optimizer)


def downgrade(model: nn.Module, optimizer: Optimizers = None, *, where: Where = None) -> nn.Module:
    """Turn headwise's attention and torch-named Transformer layers back into torch's, in place: `upgrade` undone.

    Args:
        model: as in `upgrade`.
        optimizer: as there; state is joined. The three parts must be in one group and have taken the same steps.
        where: as there.

    Returns:
        `model` itself, with torch's classes and packed Parameters.

    Raises:
        ValueError: nothing was found; torch's layer cannot do what ours does there (adapters or hooks on a projection,
            `average_attn_weights=False`, SwiGLU); parts that do not agree. Nothing is changed then.

    Warns:
        UserWarning: once, with the subclasses that stay as they are.

    Arguments of a call that only ours takes (`mask`, `query_padding_mask`) fail afterwards, and torch's answers to
    masks are back.
    """
    plan = _Plan("downgrade", model, where, _BACK)
    for path, module, base in plan.found:
        shown = path or "model"
        if base is MultiheadAttention:
            commit = become.plan_torch_attention("downgrade", module, shown, exchanges=plan.exchanges)
        else:
            commit = become.plan_layer("downgrade", module, shown, _BACK[base])
        plan.commits.append(commit)
    return plan.carry_out(optimizer)


def upgradable(model: nn.Module) -> list[nn.Module]:
    """The layers that `upgrade` would change; where there are none, it raises."""
    return [module for _, module, _ in _search(model, None, become.TARGETS).found]


def wrapper_kinds() -> tuple[type, ...]:
    """The classes of torch around a model, or in it, that keep Parameters where no one can replace them."""
    fsdp = getattr(torch.distributed, "fsdp", None)  # loaded, if a model is sharded
    sharded = (getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    return (nn.parallel.DistributedDataParallel, *sharded)


@dataclass
class _Search:
    """The modules to change, with the class that each is known by, and those that stay although they look like it."""

    found: list[tuple[str, nn.Module, type[nn.Module]]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unselected: int = 0
    done: int = 0
    scripted: list[str] = field(default_factory=list)


class _Plan:
    """One call: what is found, what would be done, and the doing."""

    def __init__(self, function: str, model: nn.Module, where: Where, targets: Mapping[Any, Any]) -> None:
        if not isinstance(model, nn.Module):
            raise invalid(function, "model", "be an nn.Module", type(model).__name__)
        if where is not None and not callable(where):
            raise invalid(function, "where", "be called as where(name, module)", repr(where))
        self.function, self.model = function, model
        self.exchanges = Exchanges(function)
        self.commits: list[become.Commit] = []
        search = _search(model, where, targets)
        self.found, self.left = search.found, search.left
        if not self.found:
            raise invalid(function, "model", _wanted(targets), _instead(function, search, targets))

    def check_apart(self) -> None:
        """Hold that each layer has Parameters of its own to replace; `copy.copy` of a module has its original's."""
        seen: dict[int, str] = {}
        for path, module, _ in self.found:
            other = seen.setdefault(id(module.__dict__["_parameters"]), path)
            if other != path:
                rule = "be a module of its own, by copy.deepcopy"
                raise invalid(self.function, path or "model", rule, f"a shallow copy of {other or 'model'}")

    def carry_out(self, optimizer: Optimizers) -> nn.Module:
        """Check what concerns the model as a whole, then change everything."""
        self.check_apart()
        optimizers = listed(self.function, optimizer)
        modules = {id(module): (name, module) for name, module in self.model.named_modules()}
        _check_wrappers(self.function, modules, self.exchanges)
        self.exchanges.check_other_uses(modules)
        followed = plan_optimizers(self.function, optimizers, self.exchanges)
        if optimizers:
            check_holds(self.function, optimizers, self.model)
        if self.left:  # before the first change: a warning may be an error
            which = ", ".join(self.left)
            warnings.warn(f"{self.function}: left as they are: {which}; {_cure(self.function)}", stacklevel=3)
        for commit in self.commits:
            commit()
        followed.commit()
        self._log(optimizers, followed)
        return self.model

    def _log(self, optimizers: list[torch.optim.Optimizer], followed: Followed) -> None:
        kinds = Counter(base.__name__ for _, _, base in self.found)
        said = [", ".join(f"{number} {kind}" for kind, number in kinds.items()), described(self.exchanges)]
        if optimizers:
            said.append(f"{counted(followed.rewritten, 'optimizer entry', 'optimizer entries')} rewritten")
        dead = bool(self.exchanges) and (not optimizers or followed.orphans > 0)
        if dead and not optimizers:
            said.append(
                "optimizers and EMA copies built before hold parameters that are no longer there: pass optimizer=, or "
                "build them after this"
            )
        elif dead:
            which = counted(followed.orphans, "trainable parameter")
            said.append(f"{which} of those that were replaced in none of the optimizers given")
        _LOG.log(logging.WARNING if dead else logging.INFO, "%s: %s", self.function, "; ".join(said))


def _search(model: nn.Module, where: Where, targets: Mapping[Any, Any]) -> _Search:
    search = _Search()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        kind = become.parametrized_base(module) or type(module)
        if isinstance(module, torch.jit.ScriptModule):
            if getattr(module, "original_name", None) in {target.__name__ for target in targets}:
                search.scripted.append(name or "model")
            continue
        search.done += kind in targets.values()
        base = next((one for one in targets if issubclass(kind, one)), None)
        if base is None:
            continue
        if where is not None and not where(name, module):
            search.unselected += 1
            continue
        changes = [] if kind is base else become.changed_by(kind, base)
        known_as = kind.__mro__[: kind.__mro__.index(base) + 1]
        asking = who_asks(_around(name, modules), known_as) if where is None else None
        if asking is not None:
            search.left.append(f"{name} (a {kind.__name__}, whose class {asking} asks for)")
        elif kind is base or (where is not None and not changes):
            search.found.append((name, module, base))
        else:
            also = f", which has its own {', '.join(changes)}" if changes and where is not None else ""
            search.left.append(f"{name or 'model'} ({kind.__module__}.{kind.__qualname__}, a {base.__name__}{also})")
    return search


def _around(name: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """What holds the module of this name, from the root on."""
    parts = name.split(".") if name else []
    return [modules[path] for n in range(len(parts)) if (path := ".".join(parts[:n])) in modules]


def _wanted(targets: Mapping[Any, Any]) -> str:
    home = next(iter(targets)).__module__.partition(".")[0]
    return f"hold a layer of {home} ({', '.join(target.__name__ for target in targets)})"


def _instead(function: str, search: _Search, targets: Mapping[Any, Any]) -> str:
    said = []
    if search.unselected:
        said.append(f"{counted(search.unselected, 'layer')} of which where selected none")
    if search.left:
        said.append(f"only what has to stay: {', '.join(search.left)}; {_cure(function)}")
    if search.scripted:
        said.append(f"TorchScript, which cannot be changed: {', '.join(search.scripted)}; do it before scripting")
    if search.done:
        home = next(iter(targets.values())).__module__.partition(".")[0]
        said.append(
            f"{counted(search.done, 'layer')} of {home} already, so there is nothing to do (the attention's own "
            "split_projections() and fuse_projections() change its layout)"
        )
    return "; ".join(said) or "none"


def _cure(function: str) -> str:
    return (
        f"{function} changes exact classes only, and none that the code around it asks for by class, as the answer "
        "would change. where= can select those, and subclasses with nothing but a constructor of their own; it can "
        "also pass them by without this warning"
    )


def _check_wrappers(function: str, modules: dict[int, tuple[str, nn.Module]], exchanges: Exchanges) -> None:
    """Wrappers that keep Parameters where no one can replace them."""
    going = {id(old): exchange for exchange in exchanges for old in exchange.old}
    if not going:
        return
    kinds = wrapper_kinds()
    for name, module in modules.values():
        if not isinstance(module, kinds):
            continue
        for parameter in module.parameters():
            if id(parameter) in going:
                cure = f" ({WHOLE_CURE})" if function == "upgrade" else ""
                kind = type(module).__name__
                rule = f"be wrapped in {kind} after {function}, not before: it goes on with the old parameters{cure}"
                raise invalid(function, name or "model", rule, f"a {kind} with {going[id(parameter)].path}")
