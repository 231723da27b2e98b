"""What the tests of packing share, in the core and in the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.core import functional
from headwise.core import packing as core_packing
from headwise.layers import packing

_Module = TypeVar("_Module", bound=nn.Module)


def hidden(*rows: str) -> Tensor:
    """`#` is real, `.` is padding."""
    return torch.tensor([[place == "." for place in row] for row in rows])


def set_price(patch: pytest.MonkeyPatch, price: float, names: tuple[str, ...] = ("TURN", "TURN_GRAD")) -> None:
    """What a turn of the loop over sequences costs: for a block, for an attention with its projections, for scores."""
    for name in names:
        for module in (packing, core_packing, functional):
            patch.setattr(module, name, price)


def count_products(patch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each `functional.linear` is given from now on."""
    counts: list[int] = []
    original = F.linear

    def linear(x: Tensor, *rest: Any) -> Tensor:
        counts.append(x.shape[:-1].numel())
        return original(x, *rest)

    patch.setattr(F, "linear", linear)
    return counts


def without_packing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls something as if packing did not exist."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            set_price(patch, 1e30)
            return function(*arguments)

    return call


def filled(module: _Module) -> _Module:
    """No parameter 0 or 1, and the same ones each time."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
    return module
