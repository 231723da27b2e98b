"""What computes an int8 projection in eager mode: one object for each way, chosen for each layer's first call.

Torch's own complete operators are deprecated dtypes in front and fbgemm behind; all that is known of them is in here.
"""

from __future__ import annotations

import math
import threading
import warnings
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from headwise.quant.state import FULL, REDUCED, Int8State, dynamic_scale

# Where the range of its input is narrower, fbgemm takes a wider one: 1e-5 times a normal input becomes all zeros.
_LEAST_RANGE = 6.1e-5 * 255 * 1.01
_LEAST_ENERGY = _LEAST_RANGE**2  # an input of a greater mean square has a wider range for certain
# From where oneDNN's greater start pays: rows, and multiplications
_MANY_ROWS, _MUCH_WORK = 64, 2**24
_ENGINE = threading.Lock()  # torch's engine belongs to the whole process


class Packed(NamedTuple):
    """Weights in the operator's own order, with what a call needs beside them.

    Attributes:
        weights: torch's packed parameters.
        input_scale: of a static layer; None: dynamic.
        input_zero_point: likewise.
        seven_bits: whether a dynamic input gets 7 bits, where 8 would overflow.
        static: the operator for a known scale.
        dynamic: the operator that finds the scale.
        by_onednn: whether the weights are packed for oneDNN.
    """

    weights: Any
    input_scale: float | None
    input_zero_point: int | None
    seven_bits: bool
    static: Any
    dynamic: Any
    by_onednn: bool


class _X86:
    """`torch.ops.quantized`, float32 in and out: fbgemm, and oneDNN for many rows of a dynamic input (2 to 4 times of
    float where fbgemm has 2, but half as fast on a single row).
    """

    name = "x86"

    def why_not(self, state: Int8State, device: torch.device) -> str:
        """Why it cannot run this; empty where it can."""
        if device.type != "cpu":
            return f"it runs on the CPU, the input is on {device}; model.cpu()"
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return f"torch has no fbgemm here, only {', '.join(torch.backends.quantized.supported_engines)}"
        if has_vnni() or not state.is_static:
            return ""
        greatest = int(state.weight.abs().amax()) if state.weight.numel() else 0
        if greatest <= REDUCED:
            return ""
        return (
            f"this processor has no VNNI and adds u8 * s8 products in 16 bits, which overflow at weights of {greatest} "
            "(quantize with reduce_range=True)"
        )

    def engine(self, is_static: bool, rows: int, weights: int) -> str:
        """What multiplies that many rows by so many weights best."""
        many = rows >= _MANY_ROWS and rows * weights >= _MUCH_WORK
        return "onednn" if many and not is_static and _has_onednn() else "fbgemm"

    def pack(self, states: list[Int8State], engine: str) -> Packed:
        """Layers that take one input, as one product: their outputs side by side."""
        weight = torch.cat([state.weight for state in states])
        scales = torch.cat([state.weight_scale for state in states]).double()
        biases = [state.biases() for state in states]
        bias = None
        if any(one is not None for one in biases):
            bias = torch.cat(
                [
                    one if one is not None else s.weight_scale.new_zeros(len(s.weight))
                    for one, s in zip(biases, states, strict=True)
                ]
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the dtypes are deprecated; no successor is complete yet
            zeros = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
            quantized = torch._make_per_channel_quantized_tensor(weight, scales, zeros, 0)
            weights = _packed_for(engine, quantized, bias)
        own, first = torch.ops.quantized, states[0]
        static = own.linear_with_input_q_dq_qweight_dq_output_fp32.default
        dynamic = own.linear_dynamic.default
        seven_bits, by_onednn = not has_vnni(), engine == "onednn"
        return Packed(weights, first.input_scale, first.input_zero_point, seven_bits, static, dynamic, by_onednn)

    def run(self, packed: Packed, x: Tensor) -> Tensor | None:
        """(..., N) from (..., K); None for an input that is tiny, huge, not finite or empty, see `run_any`."""
        flat = x.reshape(-1)
        energy = torch.dot(flat, flat).item()  # far cheaper than the range, and not finite if any number is not
        if packed.input_scale is not None:
            if math.isfinite(energy):
                return cast(Tensor, packed.static(x, packed.input_scale, packed.input_zero_point, packed.weights))
        elif _LEAST_ENERGY * flat.shape[0] < energy < math.inf:
            if packed.by_onednn:
                return self._in_known_sizes(packed, x)
            return cast(Tensor, packed.dynamic(x, packed.weights, packed.seven_bits))
        return None

    def _in_known_sizes(self, packed: Packed, x: Tensor) -> Tensor:
        """oneDNN compiles for each number of rows: more rows of zeros, which no range sees, make those numbers few."""
        flat = x.flatten(0, -2)
        rows = flat.shape[0]
        step = 1 << max(0, rows.bit_length() - 4)  # an eighth of the rows at most
        if rows % step:
            flat = functional.pad(flat, (0, 0, 0, step - rows % step))
        out = packed.dynamic(flat, packed.weights, packed.seven_bits)
        return cast(Tensor, out[:rows].view(*x.shape[:-1], out.shape[-1]))

    def run_any(self, packed: Packed, x: Tensor) -> Tensor:
        """`run` for every input, by weights that were packed for fbgemm."""
        keep = x.isfinite().all(-1, keepdim=True)
        x = torch.where(keep, x, 0.0)
        scale, zero_point = packed.input_scale, packed.input_zero_point
        if scale is None:
            step, zero = dynamic_scale(x)
            scale, zero_point = step.item(), int(zero)
            if packed.seven_bits:  # twice the step, half the zero point
                scale, zero_point = 2 * scale, zero_point // 2
        return torch.where(keep, packed.static(x, scale, zero_point, packed.weights), math.nan)


class _Reference:
    """Float arithmetic on the same rounded numbers, on every device."""

    name = "reference"


X86, REFERENCE = _X86(), _Reference()
BACKENDS = (X86, REFERENCE)


def has_vnni() -> bool:
    """Whether the processor adds u8 * s8 products in 32 bits, as fbgemm asks it: AVX-512 VNNI."""
    return bool(torch.cpu._is_vnni_supported())


@cache
def _has_onednn() -> bool:
    return has_vnni() and "onednn" in torch.backends.quantized.supported_engines


def _packed_for(engine: str, weight: Tensor, bias: Tensor | None) -> Any:
    """The operator's own parameters; torch's engine decides their kind when they are packed, and their kind later."""
    with _ENGINE:
        before = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = engine
            return torch.ops.quantized.linear_prepack(weight, bias)
        finally:
            torch.backends.quantized.engine = before


assert FULL * 127 * 2 < 2**15  # what 7-bit inputs and full weights add up to in 16 bits
