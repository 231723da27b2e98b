"""An int8 model back from its `state_dict()`, without a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import class_of, invalid, kind_of
from headwise.quant.finding import open_up
from headwise.quant.linear import Int8Linear
from headwise.quant.quantize import copied_model, tell
from headwise.quant.state import Int8State

_NAME = "from_state_dict"
_KEY = "int_weight"


def from_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """Make an int8 copy of a float model with the numbers of an int8 model of its kind.

    `torch.save(small.state_dict(), path)` writes int8 weights as int8, and holds no code. To have the model again,
    build the float one as it was built before `quantize` or `convert` (its numbers do not matter), and give both here.

    Args:
        model: a float model of the same structure. Not changed.
        state_dict: of the int8 model, from `torch.load(path, weights_only=True)` for instance.

    Returns:
        The int8 copy, in eval mode, its parameters without gradients: the saved model's answers to the bit.

    Raises:
        ValueError: a state without int8 layers, or one that does not fit the model: which name and why.

    Cost: the model once more in memory.

    Example:
        >>> import torch
        >>> import headwise
        >>> from headwise.quant import from_state_dict
        >>> x = torch.randn(8, 5, 16)
        >>> small = headwise.quantize(headwise.EncoderBlock(16, 4), [x])
        >>> again = from_state_dict(headwise.EncoderBlock(16, 4), small.state_dict())
        >>> with torch.no_grad():
        ...     torch.equal(again(x), small(x))
        True
    """
    if not isinstance(state_dict, Mapping):
        raise invalid(_NAME, "state_dict", "be what state_dict() of an int8 model gave", class_of(state_dict))
    copied = copied_model(_NAME, model)
    open_up(_NAME, copied)
    names = [key.rpartition(".")[0] for key in state_dict if key.rpartition(".")[2] == _KEY]
    if not names:
        rule = "hold int8 layers; model.load_state_dict takes that of a float model"
        raise invalid(_NAME, "state_dict", rule, f"{len(state_dict)} entries without {_KEY}")
    linears = {name: module for name, module in copied.named_modules() if type(module) is nn.Linear}
    states = {}
    for name in names:
        if name not in linears:
            raise invalid(_NAME, "state_dict", "fit the model", f"{name!r}, which is no nn.Linear of {class_of(model)}")
        states[name] = _empty(name, linears[name], state_dict)
    layers = {name: Int8Linear.become(linears[name], state) for name, state in states.items()}  # all fit
    try:
        copied.load_state_dict(state_dict)
    except RuntimeError as error:
        raise invalid(_NAME, "state_dict", "fit the model", f"{error}") from error
    for name, layer in layers.items():
        try:
            _ = layer.state
        except ValueError as error:
            raise invalid(_NAME, "state_dict", "be as it was saved", f"in {name}: {error}") from None
    tell(_NAME, copied)
    return copied


def _empty(name: str, linear: nn.Linear, state_dict: Mapping[str, Any]) -> Int8State:
    """A state of the right kind, to be loaded into."""
    start = f"{name}." if name else ""
    weight, shape = state_dict[f"{start}{_KEY}"], tuple(linear.weight.shape)
    if not isinstance(weight, Tensor) or weight.dtype != torch.int8 or tuple(weight.shape) != shape:
        raise invalid(_NAME, "state_dict", f"hold {start}{_KEY} as int8 {shape}", kind_of(weight))
    return empty_state(linear, f"{start}input_scale" in state_dict)


def empty_state(linear: nn.Linear, is_static: bool) -> Int8State:
    """A state of this kind and of a linear's sizes, on its device, to be loaded into."""
    (N, K), device = linear.weight.shape, linear.weight.device
    bias = torch.zeros(N, dtype=torch.int32 if is_static else torch.float32, device=device)
    return Int8State(
        torch.zeros(N, K, dtype=torch.int8, device=device),
        torch.ones(N, dtype=torch.float32, device=device),
        None if linear.bias is None else bias,
        *((1.0, 0) if is_static else ()),
    )
