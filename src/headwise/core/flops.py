"""FLOP formulas for the attention operators that `torch.utils.flop_counter` counts as 0, those of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import flop_counter

# The two of each pair take their tensors in the order of the operators that torch has formulas for.
_FORWARD = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
_FORMULAS = (("", flop_counter.sdpa_flop), ("_backward", flop_counter.sdpa_backward_flop))


def register_flop_formulas() -> None:
    """Teach `FlopCounterMode` the fused kernels it does not know; those that it knows keep torch's formulas.

    A product of (m, k) and (k, n) is 2*m*k*n. As torch does for its other kernels, all L*S scores are counted, hidden
    or not, and the backward pass as five products (it computes the scores again).
    """
    registry: dict[Any, Any] = flop_counter.flop_registry
    for name in _FORWARD:
        for suffix, formula in _FORMULAS:
            operator = getattr(torch.ops.aten, name + suffix, None)
            if operator is not None and operator not in registry:
                registry[operator] = formula
