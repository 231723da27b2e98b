"""A tensor that can be read and differentiated but not written: what `in_proj_weight` is while projections are split.

A write would change a copy and nothing else, so every way of writing that torch lets a tensor see raises, and whatever
shares its memory is read-only too. `as_subclass`, `torch.utils.dlpack.to_dlpack` and `data_ptr` are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_TO_MEMORY = ("untyped_storage", "storage", "_typed_storage", "__dlpack__", "set_")
_GRAD: Any = vars(torch._C.TensorBase)["grad"]
_WAITS_FOR_GRADIENT = (_GRAD.__get__, torch.Tensor.register_hook, torch.Tensor.retain_grad)
_READS_DESPITE_NAME = ("__invert__", "__index__", "__int__", "__iter__")


def _refuse() -> TypeError:
    return TypeError(
        "in_proj_weight and in_proj_bias are computed from q_proj, k_proj and v_proj while the projections are split, "
        "so writing to them would change nothing: write to the children, assign an nn.Parameter, take a .clone(), or "
        "call fuse_projections()"
    )


class ReadOnly(torch.Tensor):
    """A fresh tensor whose writes would vanish; see the module."""

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # torch does not send this one through __torch_function__
        """Raises TypeError, as every other way of writing does."""
        raise _refuse()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in _flatten((*args, *kwargs.values())) if isinstance(value, ReadOnly)]
        if _writes(func, args, kwargs):
            raise _refuse()
        if func in _WAITS_FOR_GRADIENT:
            raise TypeError(
                "in_proj_weight and in_proj_bias are made afresh at each reading while the projections are split, so "
                "no gradient arrives: read it from, or hook, q_proj.weight and its like, or call fuse_projections()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__):  # copied, it is an ordinary tensor
                plain = args[0].detach().as_subclass(torch.Tensor).clone()
                return func(plain, *args[1:], **kwargs)
            versions = [_version(tensor) for tensor in given]
            result = func(*args, **kwargs)
            if versions != [_version(tensor) for tensor in given]:
                raise _refuse()  # an in-place option of an ordinary function
            return _protected(result, {tensor.untyped_storage().data_ptr() for tensor in given} - {0})


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "").split(".")[0]
    schema = getattr(func, "_schema", None)
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in _READS_DESPITE_NAME
    targets: list[Any] = list(_flatten((kwargs.get("out"),)))
    if name in _TO_MEMORY or in_place or operator or name in ("__setitem__", "__set__", "__delete__"):
        # to be the source of a write to another tensor is fine: the target comes first
        targets += _flatten(args[:1] or kwargs.values())
    elif schema is not None and schema.is_mutable:
        targets += _flatten(
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return any(isinstance(target, ReadOnly) for target in targets)


def _protected(result: Any, memory: set[int]) -> Any:
    if isinstance(result, Tensor):
        shares = result.layout == torch.strided and result.untyped_storage().data_ptr() in memory
        return result.as_subclass(ReadOnly) if shares else result
    if isinstance(result, (list, tuple)):
        parts = [_protected(part, memory) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if hasattr(result, "flags") and hasattr(result.flags, "writeable"):
        result.flags.writeable = False  # a numpy view
    return result


def _flatten(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value
