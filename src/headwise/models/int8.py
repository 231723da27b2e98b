"""Which linears of a saved model are int8: what a config says of them, and what their numbers must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.quant.finding import find_linears, open_up
from headwise.quant.linear import Int8Linear
from headwise.quant.saved import empty_state
from headwise.quant.state import FULL, LEAST_SCALE, LEVELS, MOST_BIAS

Kinds = dict[str, str]  # the name of each int8 linear -> "static" or "dynamic"

_KINDS = ("static", "dynamic")
_PARTS = ("int_weight", "weight_scale", "int_bias", "input_scale", "input_zero_point")  # that have limits


def kinds_of(model: nn.Module) -> Kinds:
    """The int8 linears of a model, by name."""
    found = {name: module for name, module in model.named_modules() if type(module) is Int8Linear}
    return {name: _KINDS[0] if module.is_static else _KINDS[1] for name, module in found.items()}


def make_int8(model: nn.Module, kinds: Kinds) -> None:
    """Turn linears of a model that is on the meta device into int8 ones, in place, as `headwise.quantize` leaves them.

    Raises:
        ValueError: a name that is no linear of this model.
    """
    open_up("load", model)
    linears = find_linears("load", model, None)
    if unknown := [name for name in kinds if name not in linears]:
        raise ValueError(f"int8: {unknown[0]!r}, which is no linear of this model")
    for name, kind in kinds.items():
        Int8Linear.become(linears[name], empty_state(linears[name], kind == "static"))
    model.requires_grad_(False)


def check_kinds(kinds: Any) -> bool:
    """Whether this is what a config may hold of int8 linears."""
    return isinstance(kinds, dict) and bool(kinds) and all(kind in _KINDS for kind in kinds.values())


def wrong_numbers(state: dict[str, Tensor], kinds: Kinds) -> str:
    """What in the int8 linears no quantization ever makes; empty if there is nothing."""
    for name in kinds:
        part = {key: state[f"{name}.{key}"] for key in _PARTS if f"{name}.{key}" in state}
        if part["int_weight"].numel() and int(part["int_weight"].amin()) < -FULL:
            return f"-128 in {name}.int_weight"
        for key in ("weight_scale", "input_scale"):
            if key in part and not bool(((part[key] > 0) & part[key].isfinite()).all()):
                return f"a scale that is not above 0 and finite in {name}.{key}"
        if "input_scale" in part and (wrong := _wrong_static(part)):
            return wrong.format(name)
    return ""


def _wrong_static(part: dict[str, Tensor]) -> str:
    scale = part["input_scale"].double()
    if scale < LEAST_SCALE:
        return f"{scale.item():.3g}, whose reciprocal is no float32 number with room above it, in {{}}.input_scale"
    greatest = part["weight_scale"].double().amax().item() if part["weight_scale"].numel() else 0.0
    if greatest * scale.item() * 2.0**31 > torch.finfo(torch.float32).max:
        return "scales whose product with a sum of int32 is infinite in {}.weight_scale and input_scale"
    if not 0 <= int(part["input_zero_point"]) <= LEVELS:
        return f"{int(part['input_zero_point'])} in {{}}.input_zero_point"
    bias = part.get("int_bias")
    if bias is not None and bias.numel() and int(bias.long().abs().amax()) > MOST_BIAS:
        return f"{int(bias.long().abs().amax())}, too great to add sums to, in {{}}.int_bias"
    return ""
