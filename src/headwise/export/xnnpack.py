"""A model as XNNPACK takes it whole: what stands in for int8 layers, attention and norms, and changes of the graph.

XNNPACK runs what it is given as one piece, and each operator that it does not take cuts the model in two. So nothing
here computes anything new: it says the same with the operators that XNNPACK has.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width, V value width,
N output width, D model width.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.core.algebra import Mask
from headwise.core.backends import PLAIN, Request, hidden_keys
from headwise.core.functional import prepare
from headwise.core.layouts import is_hooked
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.export.parts import replace_children, split_fused
from headwise.quant.linear import Int8Linear
from headwise.quant.state import Int8State

_LOW, _HIGH = -128, 127


class DynamicInt8(nn.Module):
    """An `Int8Linear` in the words of XNNPACK: the same integer weights, the scale of the input that of each row."""

    def __init__(self, state: Int8State) -> None:
        super().__init__()
        self.out_features, self.in_features = state.weight.shape
        self.register_buffer("int_weight", state.weight)
        self.register_buffer("scale", state.weight_scale)
        self.register_buffer("zero", torch.zeros_like(state.weight_scale, dtype=torch.int64))
        self.register_buffer("bias", state.biases())

    def forward(self, x: Tensor) -> Tensor:
        """(..., N) of (..., K)."""
        return self._product(_by_rows(x))

    @staticmethod
    def together(children: Sequence[DynamicInt8], x: Tensor) -> tuple[Tensor, ...] | None:
        """The outputs of several layers for one input, which is rounded once."""
        if not all(type(child) is DynamicInt8 for child in children):
            return None
        rounded = _by_rows(x)
        return tuple(child._product(rounded) for child in children)

    def _product(self, rounded: Tensor) -> Tensor:
        operators, own = torch.ops.quantized_decomposed, self._buffers
        # as wide as int8 goes: XNNPACK refuses other bounds, and the numbers lie within +-127 anyway
        weight = operators.dequantize_per_channel(
            own["int_weight"], own["scale"], own["zero"], 0, _LOW, _HIGH, torch.int8
        )
        return functional.linear(rounded, weight, own["bias"])


def _by_rows(x: Tensor) -> Tensor:
    """x on the grid of 255 steps between the least and greatest number of each row, 0 included."""
    operators = torch.ops.quantized_decomposed
    scale, zero = operators.choose_qparams_per_token_asymmetric(x, torch.int8)
    rounded = operators.quantize_per_token(x, scale, zero, _LOW, _HIGH, torch.int8)
    back: Tensor = operators.dequantize_per_token(rounded, scale, zero, _LOW, _HIGH, torch.int8, torch.float32)
    return back


class Norm(nn.Module):
    """`nn.LayerNorm` or `nn.RMSNorm` over one dimension by products with a vector of 1/D, which XNNPACK takes."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm) -> None:
        super().__init__()
        (width,) = self.normalized_shape = norm.normalized_shape
        self.eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        self.centers = isinstance(norm, nn.LayerNorm)
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.register_buffer("share", torch.full((1, width), 1 / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x normed over its last dimension."""
        share: Any = self._buffers["share"]
        if self.centers:
            x = x - functional.linear(x, share)
        x = x * torch.rsqrt(functional.linear(x * x, share) + self.eps)
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias


class LeanAttend(Attend):
    """`Attend` by `torch.bmm` on (B*H, L, K): no broadcast products, no mask on the scores but one that is added."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        dropout: float = 0.0,
        drop: Callable[[Tensor], Tensor] | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, L, V), and weights (B, L, S), or (B, H, L, S) not averaged, or None."""
        grouped = query.shape[1] != key.shape[1]
        request = prepare(query, key, value, mask, None, dropout, drop, softcap, sink, grouped, False)
        if sink is not None or drop is not None or dropout > 0:
            result: tuple[Tensor, Tensor | None] = PLAIN.run_with_weights(request)
        else:
            result = _attend(request, need_weights)
        out, weights = result
        if weights is None or not need_weights:
            return out, None
        return out, weights.mean(dim=1) if average_attn_weights else weights


def _attend(request: Request, need_weights: bool) -> tuple[Tensor, Tensor | None]:
    query, key, value = request[:3]
    (B, H, L, K), (_, G, S, V) = query.shape, value.shape
    added, alive = _added(request)
    if G != H and (added is not None or need_weights):  # the scores of each head have to be reached
        key, value, G = key.repeat_interleave(H // G, dim=1), value.repeat_interleave(H // G, dim=1), H
    # Heads that share a key are more rows of one product
    query = query.reshape(B * G, (H // G) * L, K) * (K**-0.5 if request.scale is None else request.scale)
    score = torch.bmm(query, key.reshape(B * G, S, K).transpose(1, 2))
    if request.softcap is not None:
        score = request.softcap * torch.tanh(score / request.softcap)
    if added is not None:
        # A batch of one needs no fourth dimension: XNNPACK cannot give a tensor a shape with two unknown sizes
        one = isinstance(B, int) and B == 1
        score = score + added[0] if one else (score.view(B, H, L, S) + added).view(B * H, L, S)
    weight = torch.softmax(score, dim=-1)
    out = torch.bmm(weight, value.reshape(B * G, S, V)).view(B, H, L, V)
    whole = weight.view(B, H, L, S) if need_weights else None
    if alive is None:
        return out, whole
    return out * alive, None if whole is None else whole * alive


def _added(request: Request) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores, and 1 or 0 for rows that see a key or none; each broadcasts to (B, H, L, S)."""
    hidden, bias = hidden_keys(request.mask, request.size)
    if hidden is None:
        return bias, None
    alive = None
    if request.mask.keep is not None or request.mask.bias is not None:
        dead = hidden.all(dim=-1, keepdim=True)
        hidden, alive = hidden & ~dead, (~dead).to(request.query.dtype)
    shown = hidden.new_zeros((), dtype=request.query.dtype) if bias is None else bias
    return torch.where(hidden, -math.inf, shown), alive


@dataclass(frozen=True)
class Lean:
    """A model with its stand-ins.

    Attributes:
        model: the model.
        num_int8: int8 layers.
        num_static: those of them that knew their input's scale beforehand.
    """

    model: nn.Module
    num_int8: int
    num_static: int


def lean(model: nn.Module) -> Lean:
    """Put the stand-ins into a model that is the caller's own. Fused projections are split: one rounding serves all."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the operators
    split_fused(model)
    for module in model.modules():
        if isinstance(module, MultiheadAttention) and type(module.attend) is Attend:
            module.attend = LeanAttend()
    small: list[Int8Linear] = []

    def make(child: nn.Module) -> nn.Module | None:
        stand_in = _stand_in(child)
        if stand_in is not None and isinstance(child, Int8Linear):
            small.append(child)
        return stand_in

    root = nn.ModuleList([model])  # so that the root has a parent too
    replace_children(root, make)
    return Lean(root[0], len(small), sum(layer.is_static for layer in small))


def _stand_in(child: nn.Module) -> nn.Module | None:
    if is_hooked(child):
        return None
    if isinstance(child, Int8Linear):
        return DynamicInt8(child.state)
    if isinstance(child, (nn.LayerNorm, nn.RMSNorm)) and type(child) in (nn.LayerNorm, nn.RMSNorm):
        return Norm(child) if len(child.normalized_shape) == 1 else None
    return None


def tidy(graph_module: Any) -> Any:
    """A pass over the edge graph: drops expansions to the size that is there, and writes the only unknown size as -1.

    XNNPACK takes a view with one size to infer, and no expansion at all.
    """
    from torch.fx.passes.infra.pass_base import PassResult

    graph = graph_module.graph
    for node in list(graph.nodes):
        name = _name(node)
        if name == "aten.expand_copy.default":
            source = node.args[0]
            if list(map(str, source.meta["val"].shape)) == list(map(str, node.meta["val"].shape)):
                node.replace_all_uses_with(source)
        elif name == "aten.view_copy.default":
            shape = list(node.args[1])
            unknown = [place for place, size in enumerate(shape) if not isinstance(size, int)]
            if len(unknown) == 1 and -1 not in shape:
                shape[unknown[0]] = -1
                node.args = (node.args[0], shape)
    graph.eliminate_dead_code()
    graph_module.recompile()
    return PassResult(graph_module, True)


@dataclass(frozen=True)
class Delegation:
    """What XNNPACK took of a program.

    Attributes:
        parts: pieces that it runs; one if it took all.
        inside: operators within them.
        outside: how many of each operator are left to ExecuTorch's portable kernels.
        int8: int8 products within.
        int8_outside: int8 weights that are left outside.
    """

    parts: int
    inside: int
    outside: dict[str, int]
    int8: int
    int8_outside: int


def delegation(edge: Any) -> Delegation:
    """Count in a program after the partitioner has been over it."""
    parts = inside = int8 = 0
    outside: Counter[str] = Counter()
    module = edge.exported_program().graph_module
    for node in module.graph.nodes:
        name = _name(node)
        if name == "executorch_call_delegate":
            names = [_name(one) for one in getattr(module, node.args[0].target).original_module.graph.nodes]
            parts += 1
            inside += sum(1 for one in names if one and not one.startswith("quantized_decomposed"))
            int8 += sum(one.startswith("quantized_decomposed.dequantize_per_channel") for one in names)
        elif name:
            outside[name.removeprefix("aten.").partition(".")[0]] += 1
    left = sum(number for name, number in outside.items() if "quantized_decomposed" in name)
    return Delegation(parts, inside, dict(outside.most_common()), int8, left)


def _name(node: Any) -> str:
    """`aten.view_copy.default` and the like; empty for what computes no tensor."""
    if node.op != "call_function":
        return ""
    target = node.target
    if getattr(target, "__name__", "") == "executorch_call_delegate":
        return "executorch_call_delegate"
    schema = getattr(target, "_schema", None)
    if schema is None or "sym_size" in str(target):  # getitem, and arithmetic on sizes
        return ""
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
