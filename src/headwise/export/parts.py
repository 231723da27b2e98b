"""What every exporter starts from: a copy of the model that can be traced, and an example call taken apart.

Letters: B batch, L query positions, S key positions.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from headwise._checks import class_of, invalid, kind_of
from headwise.core.algebra import Mask
from headwise.core.backends import PLAIN
from headwise.core.cache import Cache, CacheList
from headwise.core.layouts import is_hooked
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.export.quiet import without_graph
from headwise.layers import upgrade
from headwise.layers.become import TARGETS
from headwise.quant.fake import FakeQuantLinear
from headwise.quant.quantize import copied_model

_STOCK = tuple(TARGETS)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_LIMIT = 100  # values of another kind that are looked into for tensors


def traceable(function: str, model: object) -> nn.Module:
    """A copy of the model on the CPU, in eval mode, whose attention is written as two products and a softmax.

    Torch's attention and Transformer layers in it are ours afterwards, so that the copy gives what
    `headwise.upgrade(model)` gives. The model itself is not changed; what wraps it (DataParallel, DDP, torch.compile)
    is taken off.

    Raises:
        ValueError: it is no module, is TorchScript, in quantization-aware training, lazy, lies on the meta device, is
            not float32, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise invalid(function, "model", "be an nn.Module", class_of(model))
    while isinstance(model, _WRAPPERS) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, _WRAPPERS) else model._modules["_orig_mod"]
        assert isinstance(model, nn.Module)
    if isinstance(model, torch.jit.ScriptModule):
        raise invalid(function, "model", "be the module that TorchScript was made of", class_of(model))
    if trained := [name for name, module in model.named_modules() if isinstance(module, FakeQuantLinear)]:
        rule = "be float or int8; headwise.convert makes an int8 copy of what headwise.prepare_qat prepared"
        raise invalid(function, "model", rule, f"{trained[0] or 'model'} in quantization-aware training")
    for name, tensor in _state(model):
        if is_lazy(tensor):
            raise invalid(function, "model", "know its widths: call it once before", f"{name}, which is lazy")
        if tensor.device.type == "meta":
            raise invalid(function, "model", "hold numbers; load its weights first", f"{name} on the meta device")
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise invalid(function, "model", "hold float32; pass model.float()", f"{name} in {tensor.dtype}")
    twin = copied_model(function, model).cpu()
    if any(isinstance(module, _STOCK) for module in twin.modules()):
        twin = _upgraded(twin)
    for module in twin.modules():
        if isinstance(module, Attend):
            module.backend = PLAIN.name
    return twin


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _upgraded(model: nn.Module) -> nn.Module:
    """With our layers where upgrade knows how; what it leaves is exported as torch wrote it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what stays as it is
        try:
            return upgrade.upgrade(model)
        except ValueError:
            return model


class JoinedLinear(nn.Linear):
    """A query projection that knows how to give queries, keys and values of one input as one product."""

    def __init__(self, children: list[nn.Linear]) -> None:
        first = children[0]
        super().__init__(first.in_features, first.out_features, bias=first.bias is not None, device="meta")
        self.weight, self.bias = first.weight, first.bias
        self.register_buffer("joined_weight", torch.cat([child.weight for child in children]))
        self.register_buffer(
            "joined_bias", torch.cat([one.bias for one in children]) if first.bias is not None else None
        )
        self.parts = [child.out_features for child in children]

    @staticmethod
    def together(children: Sequence[Any], x: Tensor) -> tuple[Tensor, ...] | None:
        """Queries, keys and values while torch exports; None at any other time: one by one."""
        own = children[0]
        if not torch.compiler.is_compiling():
            return None
        return tuple(functional.linear(x, own.joined_weight, own.joined_bias).split(own.parts, dim=-1))


def split_fused(model: nn.Module) -> None:
    """Split fused query, key and value projections, in place, where that can be done."""
    for module in model.modules():
        if isinstance(module, MultiheadAttention) and module.fused_qkv:
            with suppress(ValueError):  # parametrized: as it is
                module.split_projections()


def replace_children(root: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put a stand-in in the place of each module inside of another, in place; a shared one gets one that is shared.

    Args:
        root: stays itself.
        make: the stand-in for a module; None: it stays.
    """
    made: dict[int, nn.Module | None] = {}
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) not in made:
                made[id(child)] = make(child)
            stand_in = made[id(child)]
            if stand_in is not None:
                parent._modules[name] = stand_in


def join_projections(model: nn.Module) -> None:
    """One product for the queries, keys and values of a self-attention, in place, where nothing is attached to them."""
    split_fused(model)
    uses = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    for module in model.modules():
        if not isinstance(module, MultiheadAttention) or module.fused_qkv:
            continue
        children: list[Any] = [module.q_proj, module.k_proj, module.v_proj]
        if not all(type(child) is nn.Linear and not is_hooked(child) for child in children):
            continue
        one_kind = len({(child.in_features, child.bias is None) for child in children}) == 1
        tied = any(uses[id(one)] > 1 for child in children for one in child.parameters())
        if one_kind and not tied:  # what is tied would be in the file twice
            module._modules["q_proj"] = JoinedLinear(children)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor stands among the arguments."""

    place: int


@dataclass(frozen=True)
class Call:
    """One call of a model, taken apart.

    Attributes:
        names: of the tensors, in the order of the forward's parameters: `src`, `masks_0`, `batch_ids`.
        tensors: on the CPU, each with memory of its own.
        constants: what else was passed, by name; it is written into the file.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    constants: dict[str, Any]
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the model with, with these tensors in the place of the example's."""

        def put(value: Any) -> Any:
            if isinstance(value, _Slot):
                return tensors[value.place]
            if isinstance(value, (list, tuple)):
                return _like(value, [put(one) for one in value])
            if isinstance(value, dict):
                return {key: put(one) for key, one in value.items()}
            return value

        return tuple(put(one) for one in self._args), {key: put(one) for key, one in self._kwargs.items()}

    def notes(self) -> list[str]:
        """For a report: what became a part of the file."""
        said = ", ".join(f"{name}={value!r}" for name, value in self.constants.items())
        return [f"written into the file: {said}"] if said else []


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items


def take_apart(function: str, model: nn.Module, example: object) -> Call:
    """The example call, by the names of the forward's parameters.

    Args:
        function: the public name that was called.
        model: whose forward it is for.
        example: a tensor, a tuple of arguments, or a dict of keywords.

    Raises:
        ValueError: it is none of these, does not fit the forward, or holds what cannot be exported: no tensor at all,
            an empty one, NaN, nested or sparse tensors, caches, masks that hold tensors.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Tensor):
        args = (example,)
    elif isinstance(example, tuple):
        args = example
    elif isinstance(example, dict) and all(isinstance(key, str) for key in example):
        kwargs = dict(example)
    else:
        rule = "be a tensor, a tuple of arguments or a dict of keywords of the model's forward"
        raise invalid(function, "example", rule, class_of(example))
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        rule = f"be arguments of {type(model).__name__}.forward{inspect.signature(model.forward)}"
        raise invalid(function, "example", rule, str(error)) from error
    reader = _Reader(function)
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given[name] = {key: reader.read(key, one) for key, one in value.items()}
        else:
            given[name] = reader.read(name, value)
    bound.arguments.update(given)
    if not reader.tensors:
        raise invalid(function, "example", "hold a tensor", "none")
    return Call(tuple(reader.names), tuple(reader.tensors), reader.constants, bound.args, bound.kwargs)


class _Reader:
    """Puts slots in the place of the tensors among the arguments, and names them."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.constants: dict[str, Any] = {}

    def read(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(name, value)
        if isinstance(value, (list, tuple)) and not isinstance(value, (CacheList, torch.Size)):
            return _like(value, [self.read(f"{name}_{place}", one) for place, one in enumerate(value)])
        if isinstance(value, dict):
            return {key: self.read(f"{name}_{key}", one) for key, one in value.items()}
        self._check_constant(name, value)
        if value is not None:
            self.constants[name] = value
        return value

    def _tensor(self, name: str, value: Tensor) -> _Slot:
        where = f"example's {name}"
        if value.is_nested:
            rule = "be padded, beside a padding mask: a file has no nested tensors"
            raise invalid(self.function, where, rule, kind_of(value))
        if value.layout is not torch.strided or value.is_quantized or value.dtype.is_complex:
            raise invalid(self.function, where, "be a dense tensor of real numbers", f"{value.layout}, {value.dtype}")
        if value.is_floating_point() and value.dtype != torch.float32:
            raise invalid(self.function, where, "be float32, as the model is", value.dtype)
        if value.device.type == "meta" or value.numel() == 0:
            raise invalid(self.function, where, "hold numbers, at least one", kind_of(value))
        if value.is_floating_point() and bool(value.isnan().any()):
            raise invalid(self.function, where, "hold no NaN", f"{int(value.isnan().sum())} of {value.numel()}")
        if name in self.names:
            raise invalid(self.function, where, "have a name that no other input has", repr(name))
        self.names.append(name)
        # memory of its own: what is one tensor in the example, passed twice, are two inputs of the file
        self.tensors.append(value.detach().cpu().clone())
        return _Slot(len(self.tensors) - 1)

    def _check_constant(self, name: str, value: Any) -> None:
        where = f"example's {name}"
        if isinstance(value, (Cache, CacheList)):
            rule = (
                "be left out: a file keeps nothing between calls, so that a cache cannot be exported; export the call "
                "on the whole sequence (is_causal=True), or a model that takes and returns keys and values as tensors"
            )
            raise invalid(self.function, where, rule, repr(value))
        if isinstance(value, Mask):
            if _holds_tensor(value):
                rule = (
                    "be a mask of rules alone (causal(), window(...)): the tensors of this one would be constants of "
                    "the file; pass them as key_padding_mask or attn_mask, or make the mask inside a forward that "
                    "takes them"
                )
                raise invalid(self.function, where, rule, repr(value))
        elif not isinstance(value, _CONSTANTS) and (_holds_tensor(value) or "numpy" in type(value).__module__):
            rule = "be a tensor, or a tuple, list or dict of tensors; other objects cannot be inputs of a file"
            raise invalid(self.function, where, rule, class_of(value))


def _holds_tensor(value: object) -> bool:
    """Whether a tensor is anywhere in the attributes, as far as a reasonable object goes."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting and len(seen) < _LIMIT:
        one = waiting.pop()
        if isinstance(one, Tensor):
            return True
        if id(one) in seen or isinstance(one, (*_CONSTANTS, type)):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting.extend(one)
        else:
            waiting.extend(getattr(one, "__dict__", {}).values())
            waiting.extend(getattr(one, name, None) for name in getattr(type(one), "__slots__", ()))
    return False


def read_outputs(function: str, result: object) -> tuple[list[str], list[Tensor]]:
    """The tensors of what a forward returned, and their names: `output`, `output_1`, or the keys of a dict.

    What is no tensor (the None of `need_weights=False`) is left out.

    Raises:
        ValueError: there is none, or a nested one.
    """
    names: list[str] = []
    tensors: list[Tensor] = []

    def walk(name: str, value: object) -> None:
        if isinstance(value, Tensor):
            if value.is_nested:
                raise invalid(function, "model", "return dense tensors", "a nested one")
            names.append(name or ("output" if not tensors else f"output_{len(tensors)}"))
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            for place, one in enumerate(value):
                walk(f"{name}_{place}" if name else "", one)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                walk(f"{name}_{key}" if name else str(key), one)

    walk("", result)
    if not tensors:
        raise invalid(function, "model", "return a tensor, or a tuple, list or dict of tensors", class_of(result))
    return names, tensors


class Positional(nn.Module):
    """The model as an exporter wants it: tensors by position, a tuple of tensors back."""

    def __init__(self, function: str, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._function, self._call = function, call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the model for these in the place of the example's tensors."""
        args, kwargs = self._call.arguments(tensors)
        return tuple(read_outputs(self._function, self.model(*args, **kwargs))[1])


def followed(function: str, module: Positional, tensors: tuple[Tensor, ...], free: tuple[Any, ...], cure: str) -> Any:
    """The program that torch.export makes of a module.

    Args:
        function: the public name that was called.
        module: to follow.
        tensors: to call it with.
        free: for each, its free dimensions, as torch.export's `dynamic_shapes`.
        cure: what helps where it cannot be followed.

    Raises:
        ValueError: it cannot.
    """
    try:
        with without_graph():
            return torch.export.export(module, tensors, dynamic_shapes=(free,), strict=False)
    except Exception as error:  # the model's own code runs in there, and torch's errors have no common base
        first = str(error).strip().partition("\n")[0]
        rule = "be one that torch.export can follow: no choice by the numbers of a tensor, no .item(), no .numpy()"
        raise invalid(function, "model", f"{rule}; {cure}", f"{type(error).__name__}: {first}") from error


def first_call(function: str, module: Positional, call: Call) -> list[str]:
    """Run the example: names of the outputs.

    Raises:
        ValueError: the call fails.
    """
    args, kwargs = call.arguments(call.tensors)
    shapes = dict(zip(call.names, call.tensors, strict=True))
    try:
        with torch.no_grad():
            result = module.model(*args, **kwargs)
    except Exception as error:  # the model is the caller's: it raises what it likes
        raise invalid(
            function, "example", f"be a call that the model takes; it raised {type(error).__name__}", error, **shapes
        ) from error
    return read_outputs(function, result)[0]
