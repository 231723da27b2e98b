"""What of a model becomes int8, shared by `quantize` and `prepare_qat`: stock layers upgraded, attention split."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from headwise._checks import class_of, invalid
from headwise.core.layouts import CHILDREN, LOOKS_ONLY, WEIGHTS, check_split, rows
from headwise.core.projections import ProjectedAttention
from headwise.layers.become import TARGETS
from headwise.layers.exchange import span, tensors_in
from headwise.layers.optimizers import Optimizers
from headwise.layers.upgrade import Where, upgradable, upgrade
from headwise.quant.fake import FakeQuantLinear
from headwise.quant.linear import Int8Linear

# These read the weights of their children and never call them, in eval at least
_BYPASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_PACKED = ("in_proj_weight", "in_proj_bias")


def _names(*kinds: type[nn.Module]) -> frozenset[str]:
    """What these classes call their own, and `nn.Linear` does not."""
    found = {name for kind in kinds for name in (*dir(kind), *kind.__annotations__)}
    return frozenset(found - {*dir(nn.Linear), *nn.Linear.__annotations__})


_INT8_NAMES = _names(Int8Linear) | {"int_bias", "_kept"}
_TAKEN = _INT8_NAMES | _names(FakeQuantLinear)


def open_up(function: str, model: nn.Module, optimizer: Optimizers = None) -> None:
    """Make every projection an `nn.Linear`, in place: stock layers become ours, fused projections are split.

    Projections of several attentions that are one Parameter stay so, where their parts have one shape.

    Raises:
        ValueError: no module, TorchScript, or something that `upgrade` or `split_projections` refuses.
    """
    _check_module(function, model)
    if _stock(model):
        # Without an optimizer nobody holds the packed parameters: they are cut below, and nothing is to be warned of
        upgrade(model, optimizer, fused_qkv=optimizer is None)
    cut: dict[Tensor, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, ProjectedAttention) and module.fused_qkv:
            _split(module, cut)


def find_linears(function: str, model: nn.Module, where: Where) -> dict[str, nn.Linear]:
    """By name, each `nn.Linear` that is called and that `where(name, module)` selects, by any of its names.

    Raises:
        ValueError: there is none; the message says what there is instead. Or one cannot become int8: it is lazy, its
            weights or its `forward` are not its own, or it has an attribute with a name that int8 needs.
    """
    return _find(function, model, where, frozenset())


def plan(function: str, model: nn.Module, where: Where, optimizer: Optimizers) -> dict[str, nn.Linear]:
    """What `find_linears` will find once `open_up` is done, with nothing changed yet.

    Returns:
        The linears by name; for projections that are still to be cut, ones that are like them.

    Raises:
        ValueError: as `find_linears`; projections that cannot be cut, or that are used elsewhere too.
    """
    _check_module(function, model)
    opened = frozenset(map(id, _stock(model)))
    packed = {}
    for name, module in model.named_modules():
        stock = optimizer is None and isinstance(module, nn.MultiheadAttention) and id(module) in opened
        if stock or (isinstance(module, ProjectedAttention) and module.fused_qkv):
            check_split(module)
            packed[name] = module
    _check_ties(function, model, packed)
    return _find(function, model, where, opened)


def check_own(function: str, name: str, linear: nn.Linear, can_leave: bool = True) -> None:
    """Hold that a linear is no more than its class says, and that no name of int8 is taken.

    Args:
        function: for errors.
        name: of the linear.
        linear: it.
        can_leave: whether a caller can leave it out by `where`.

    Raises:
        ValueError: weights that something computes, a `forward` that is not the class's, a name that is taken.
    """
    state, name, is_prepared = vars(linear), name or "model", isinstance(linear, FakeQuantLinear)
    leave = ", or leave the layer by where=" if can_leave and not is_prepared else ""
    for part in ("weight", "bias"):
        if part not in linear._parameters:
            undo = "prune.remove, remove_weight_norm, remove_spectral_norm, remove_parametrizations"
            rule = f"have a {part} of its own: make it one first ({undo}){leave}"
            raise invalid(function, name, rule, f"one that is computed before each call, in a {class_of(linear)}")
    if "_compiled_call_impl" in state and not is_prepared:  # a copy, such as convert makes, is not compiled
        raise invalid(function, name, f"be compiled afterwards, not before{leave}", "one with .compile()")
    if "forward" in state and not hasattr(state["forward"], LOOKS_ONLY):
        rule = f"have the forward of its class: remove what was put in its place{leave}"
        raise invalid(function, name, rule, "a forward of its own")
    taken = _INT8_NAMES if is_prepared else _TAKEN
    for held in (state, linear._parameters, linear._buffers, linear._modules):
        if clash := sorted(taken & held.keys()):
            rule = f"leave the name {clash[0]!r} to int8: rename that attribute{leave}"
            raise invalid(function, name, rule, f"a {class_of(held[clash[0]])} of that name")


class Held(NamedTuple):
    """A tensor that a module holds."""

    path: str
    owner: nn.Module
    name: str
    tensor: Tensor


def held_by(model: nn.Module) -> Iterator[Held]:
    """Every Parameter, buffer and tensor in an attribute of a model, as often as there are names for it."""
    for path, module in model.named_modules():
        others = [item for item in vars(module).items() if item[0] not in ("_parameters", "_buffers", "_modules")]
        for name, value in (*module._parameters.items(), *module._buffers.items(), *others):
            for tensor in tensors_in(value):
                yield Held(f"{path}.{name}".lstrip("."), module, name, tensor)


def _check_module(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise invalid(function, "model", "be an nn.Module that is not scripted", class_of(model))


def _stock(model: nn.Module) -> list[nn.Module]:
    """The layers of torch that are to be upgraded; none where all of them are parametrized."""
    found = upgradable(model)
    return found if any(type(module) in TARGETS for module in found) else []


def _split(module: ProjectedAttention, cut: dict[Tensor, list[Any]]) -> None:
    """Split, with the parts of a Parameter that was cut before in the place of new ones."""
    packed = {name.removeprefix("in_proj_"): module._parameters.get(name) for name in _PACKED}
    module.split_projections()
    children: list[Any] = [module._modules[child] for child in CHILDREN]
    for part, parameter in packed.items():
        if parameter is None:
            continue
        for child, first in zip(children, cut.setdefault(parameter, children), strict=True):
            if first._parameters[part].shape == child._parameters[part].shape:
                child._parameters[part] = first._parameters[part]


def _check_ties(function: str, model: nn.Module, packed: dict[str, Any]) -> None:
    """Hold that what is to be cut is used by attention alone that is cut with it, and to parts of the same sizes."""
    cut = {id(module) for module in packed.values()}
    held = [(one, *span(one.tensor)) for one in held_by(model)] if packed else []
    for path, module in packed.items():
        for name in _PACKED:
            parameter = module._parameters[name]
            if parameter is None:
                continue
            first, last = span(parameter)
            for other, start, stop in held:
                is_same = other.tensor is parameter
                if is_same and other.name == name and id(other.owner) in cut and _rows(other.owner) == _rows(module):
                    continue  # itself, or one that it stays tied to
                if is_same or (start < last and first < stop):
                    rule = (
                        "be used by nothing that stays as it is, as it is cut in three: untie it, tie the parts after"
                    )
                    raise invalid(function, f"{path}.{name}".lstrip("."), rule, f"also {other.path}, the same memory")


def _rows(attention: Any) -> tuple[int, int, int]:
    return rows(attention) if isinstance(attention, ProjectedAttention) else (attention.embed_dim,) * 3


def _find(function: str, model: nn.Module, where: Where, opened: frozenset[int]) -> dict[str, nn.Linear]:
    """`find_linears` as if `opened`, ids of modules, were upgraded, and all attention split."""
    if where is not None and not callable(where):
        raise invalid(function, "where", "be called as where(name, module)", repr(where))
    found: dict[str, nn.Linear] = {}
    left, unselected = [], 0
    for names, module, is_called in _candidates(model, opened):
        unknown = isinstance(module, nn.LazyLinear)
        if not is_called and not unknown:
            left.append(f"{names[0]} ({class_of(module)})")
        elif where is not None and not any(where(name, module) for name in names):
            unselected += 1
        elif unknown:
            got = f"{names[0] or 'model'}, an nn.LazyLinear that was not called yet"
            raise invalid(function, "model", "know its widths: call it once before", got)
        else:
            check_own(function, names[0], module)
            found[names[0]] = module
    if found:
        _tell_of_attention(function, model, opened)
        return found
    said = [f"{unselected} that where selected none of"] if unselected else []
    if left:
        said.append(f"only {', '.join(left[:5])}, which are not called as an nn.Linear is")
    rule = "hold an nn.Linear, or attention of headwise or torch"
    raise invalid(function, "model", rule, "; ".join(said) or f"{class_of(model)} with none")


def _tell_of_attention(function: str, model: nn.Module, opened: frozenset[int]) -> None:
    """Warn of attention that stays as it is: most of its weights are in no `nn.Linear`."""
    stays = [
        f"{name or 'model'} ({class_of(module)})"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and id(module) not in opened
    ]
    if stays:
        why = "a subclass that upgrade cannot know, or one that the code around it asks for by class"
        warnings.warn(f"{function}: left in float: {', '.join(stays)}: {why}", stacklevel=4)


def _candidates(model: nn.Module, opened: frozenset[int]) -> Iterator[tuple[list[str], nn.Linear, bool]]:
    """Each linear that is or will be, its names, and whether it is called, as no other than an `nn.Linear`."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    closed = [m for m in model.modules() if isinstance(m, _BYPASS) and id(m) not in opened]
    bypassed = tuple(f"{name}." if name else "" for module in closed for name in names[id(module)])
    stock = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention) and id(m) in opened]
    outs = {id(module._modules["out_proj"]) for module in stock}
    for module in model.modules():
        own = names[id(module)]
        if isinstance(module, nn.Linear):
            becomes = type(module) is NonDynamicallyQuantizableLinear and id(module) in outs
            is_called = type(module) is nn.Linear or becomes
            yield own, module, is_called and not any(name.startswith(bypassed) for name in own)
        elif module in stock or (isinstance(module, ProjectedAttention) and module.fused_qkv):
            yield from _to_be(module, own)


def _to_be(attention: Any, names: Iterable[str]) -> Iterator[tuple[list[str], nn.Linear, bool]]:
    """Linears like the projections of fused attention once it is split, in the same memory."""
    tall, stacked, bias = _rows(attention), attention.in_proj_weight, attention.in_proj_bias
    weights = [getattr(attention, name) for name in WEIGHTS] if stacked is None else stacked.split(tall)
    biases = (None,) * 3 if bias is None else bias.split(tall)
    for child, weight, part in zip(CHILDREN, weights, biases, strict=True):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=part is not None, device="meta")
        made.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        if part is not None:
            made.bias = nn.Parameter(part.detach(), requires_grad=part.requires_grad)
        yield [f"{name}.{child}".lstrip(".") for name in names], made.train(attention.training), True
