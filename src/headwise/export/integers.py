"""Int8 projections in an ONNX file: what stands in for `Int8Linear` while torch exports, and the nodes that it becomes.

Letters: N output width, K input width.

Static, all of it two-dimensional, and with the zero points of the weights written out: onnxruntime turns it into QGemm
then, with fixed sizes as well as free ones, and into a float product without them.

    QuantizeLinear(x) -> DequantizeLinear -> Gemm(., DequantizeLinear(s8 weights), DequantizeLinear(s32 bias))

Dynamic: onnxruntime turns it into DynamicQuantizeMatMul, or MatMulIntegerToFloat where two products share an input.

    DynamicQuantizeLinear(x) -> MatMulInteger(., s8 weights) -> Cast -> Mul(., x's scale * weights' scales) -> Add(bias)
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise._checks import need
from headwise.core.multihead import MultiheadAttention
from headwise.export.parts import replace_children
from headwise.quant.linear import Int8Linear
from headwise.quant.state import Int8State, float_linear

_LOCK = threading.Lock()
_LIBRARY: list[Any] = []  # holds what is registered, once


class ExportedLinear(nn.Module):
    """In the place of an `Int8Linear`: the same numbers when called, one node of a known name when exported.

    Buffers, as the file holds them: `weight_KN` (K, N) int8, `weight_scale` (N,), `bias`; static: `scale`, `zero_point`
    (uint8), `bias_scale` (N,), `weight_zero` (N,) int8 zeros.
    """

    def __init__(self, layer: Int8Linear, state: Int8State) -> None:
        super().__init__()
        self._layers = [layer]  # in a list: no child, so that the exporter does not see its buffers
        self.out_features, self.in_features = state.weight.shape
        self.is_static = state.is_static
        self.register_buffer("weight_KN", state.weight.T.contiguous())
        self.register_buffer("weight_scale", state.weight_scale)
        self.register_buffer("bias", state.bias)
        if state.input_scale is not None:
            self.register_buffer("scale", torch.tensor(state.input_scale, dtype=torch.float32))
            self.register_buffer("zero_point", torch.tensor(state.input_zero_point, dtype=torch.uint8))
            self.register_buffer("weight_zero", torch.zeros(self.out_features, dtype=torch.int8))
            self.register_buffer("bias_scale", state.weight_scale * torch.tensor(state.input_scale))
        self.merged: ExportedLinear | None = None  # the query, key and value projections as one
        self.parts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """(..., N) from x (..., K)."""
        if not torch.compiler.is_compiling():
            return cast(Tensor, self._layers[0](x))
        ops, own = torch.ops.headwise, self._buffers
        out: Tensor
        if not self.is_static:
            out = ops.int8_dynamic(x, own["weight_KN"], own["weight_scale"], own["bias"])
            return out
        names = ("scale", "zero_point", "weight_KN", "weight_scale", "weight_zero", "bias", "bias_scale")
        if x.shape[-1] != self.in_features:  # asked, so that torch.export takes the width for fixed, of one row too
            raise RuntimeError(f"{tuple(x.shape)} does not go with {self.in_features} input features")
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        out = ops.int8_static(flat, *(own[name] for name in names))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    @staticmethod
    def together(children: Sequence[Any], x: Tensor) -> Sequence[Tensor] | None:
        """The outputs of the three projections of one attention for one input, as one product; None: one by one."""
        merged: ExportedLinear | None = getattr(children[0], "merged", None)
        if merged is None:
            return None
        if not torch.compiler.is_compiling():
            return Int8Linear.together([child._layers[0] for child in children], x)
        return tuple(cast(Tensor, merged(x)).split(children[0].parts, dim=-1))


def stand_in(model: nn.Module) -> None:
    """Put an `ExportedLinear` in the place of each `Int8Linear`, in place."""
    replace_children(model, lambda child: ExportedLinear(child, child.state) if isinstance(child, Int8Linear) else None)
    for module in model.modules():
        if isinstance(module, MultiheadAttention) and "q_proj" in module._modules:
            _merge([module._modules[name] for name in ("q_proj", "k_proj", "v_proj")])


def _merge(children: list[Any]) -> None:
    if not all(isinstance(child, ExportedLinear) for child in children):
        return
    states = [child._layers[0].state for child in children]
    first = states[0]
    same = {(state.input_scale, state.input_zero_point, state.weight.shape[1]) for state in states}
    if len(same) > 1 or len({state.bias is None for state in states}) > 1:
        return
    bias = None if first.bias is None else torch.cat([state.bias for state in states])
    whole = Int8State(
        torch.cat([state.weight for state in states]),
        torch.cat([state.weight_scale for state in states]),
        bias,
        first.input_scale,
        first.input_zero_point,
    )
    children[0].merged = ExportedLinear(children[0]._layers[0], whole)
    children[0].parts = [child.out_features for child in children]


def register() -> None:
    """Make the operators that stand for an int8 projection while torch exports, once in a process."""
    with _LOCK:
        if _LIBRARY:
            return
        static = torch.library.custom_op("headwise::int8_static", _static, mutates_args=())
        dynamic = torch.library.custom_op("headwise::int8_dynamic", _dynamic, mutates_args=())
        static.register_fake(lambda x, scale, zero, weight, *rest: _shaped(x, weight))
        dynamic.register_fake(lambda x, weight, *rest: _shaped(x, weight))
        _LIBRARY.extend((static, dynamic))


def _shaped(x: Tensor, weight_KN: Tensor) -> Tensor:
    if x.shape[-1] != weight_KN.shape[0]:  # asked, so that torch.export takes the width for fixed
        raise RuntimeError(f"{tuple(x.shape)} does not go with {weight_KN.shape[0]} input features")
    return x.new_empty(*x.shape[:-1], weight_KN.shape[1])


def _static(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor,
) -> Tensor:
    return float_linear(x, weight.T, weight_scale, bias, scale, zero_point.int())


def _dynamic(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    return float_linear(x, weight.T, weight_scale, bias, None, None)


def translations(made: list[str]) -> dict[Any, Callable[..., Any]]:
    """What the exporter writes for each operator, and for `//` of sizes, which its own rounds towards 0: -7 // 2 is -4.

    Args:
        made: gets "static" or "dynamic" for each projection that is written.
    """
    op = need("onnxscript", "onnx").opset18

    def static(
        x: Any,
        scale: Any,
        zero_point: Any,
        weight: Any,
        weight_scale: Any,
        weight_zero: Any,
        bias: Any = None,
        bias_scale: Any = None,
    ) -> Any:
        made.append("static")
        rounded = op.DequantizeLinear(op.QuantizeLinear(x, scale, zero_point), scale, zero_point)
        weights = op.DequantizeLinear(weight, weight_scale, weight_zero, axis=1)
        if bias is None:
            return op.MatMul(rounded, weights)
        return op.Gemm(rounded, weights, op.DequantizeLinear(bias, bias_scale, axis=0))

    def dynamic(x: Any, weight: Any, weight_scale: Any, bias: Any = None) -> Any:
        made.append("dynamic")
        rounded, scale, zero_point = op.DynamicQuantizeLinear(x)
        product = op.Cast(op.MatMulInteger(rounded, weight, zero_point), to=1)
        product = op.Mul(product, op.Mul(scale, weight_scale))
        return product if bias is None else op.Add(product, bias)

    def floordiv(a: Any, b: Any) -> Any:
        return op.Div(op.Sub(a, op.Mod(a, b)), b)

    ops = torch.ops.headwise
    return {ops.int8_static.default: static, ops.int8_dynamic.default: dynamic, operator.floordiv: floordiv}
