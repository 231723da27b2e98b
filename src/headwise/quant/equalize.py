"""Cross-layer equalization: channels between two linears brought to one size, before they are rounded together.

Letters: G key/value heads, H query heads, K head width, M feed-forward width, C channels between two linears.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from headwise._checks import class_of, counted, invalid
from headwise.core.layouts import is_hooked, is_plain
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.layers.feedforward import FeedForward, are_ours
from headwise.quant.finding import held_by

_LOG = logging.getLogger("headwise")
# f(s * x) = s * f(x) for s > 0
_HOMOGENEOUS = (F.relu, torch.relu, F.leaky_relu)
_HOMOGENEOUS_MODULES = (nn.ReLU, nn.LeakyReLU, nn.Identity)
_STOCK_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _Pair(NamedTuple):
    """Two linears with C channels between them, as the very memory of their Parameters."""

    weight: Tensor  # (C, width) of the first
    added: tuple[Tensor, ...]  # each (C,): its bias, and values that are appended to its output
    columns: Tensor  # (N, R, C), or (N, R, G, K) with G*K = C: the second, R columns for each channel

    def scales(self) -> Tensor:
        """(C,) powers of two to divide the first by and to multiply the second by, so that both are alike in size."""
        first = self.weight.abs().amax(1).double()
        second = self.columns.abs().amax((0, 1)).flatten().double()
        exponents = (0.5 * (first / second).log2()).round()
        return torch.where((first > 0) & (second > 0) & exponents.isfinite(), exponents, 0.0).exp2()

    def apply(self, scales: Tensor) -> float:
        """Bring the channels to one size, in place; returns the greatest factor."""
        self.weight.div_(scales[:, None])
        for part in self.added:
            part.div_(scales)
        self.columns.mul_(scales.view(self.columns.shape[2:]))
        return float(torch.maximum(scales, 1 / scales).max())


def equalize(model: nn.Module) -> nn.Module:
    """Bring the channels between two linears to one size, in place, so that int8 loses less; the model stays the same.

    A channel that is a hundred times as great as the others leaves these two or three of the 255 levels that they
    share. Where nothing but scaling lies between two linears, the first can be divided by any factor, a channel each,
    and the second multiplied: (v_proj, out_proj) of each attention, one factor for all query heads that share a value
    channel; (linear1, linear2) of a feed-forward with ReLU or leaky ReLU; (linear3, linear2) of a gated one (SwiGLU).
    GELU and SiLU by themselves do not pass a factor on: there only attention gains. The factors make the greatest
    weights of both sides equal, up to the nearest power of two.

    Args:
        model: with attention or layers of headwise or torch, in any floating dtype. Before the optimizer is built:
            the weights change, and what an optimizer remembers of them does not.

    Returns:
        `model` itself. All factors are powers of two, so that what it computes is the same to the bit, unless numbers
        leave the range of the dtype. One line in the logger "headwise" says how many pairs and how great a factor.

    Raises:
        ValueError: no such pair, or one that cannot be written: an expanded weight or bias, an inference tensor
            outside of inference mode. Nothing is changed then. Pairs with a hook, an adapter, or a weight that is not a
            plain tensor, or that shares its memory with anything else of the model, do not count: the factor would
            show elsewhere.

    Cost: one pass over these weights.
    Source: arXiv 1906.04721 section 4.1; docs/edge.md.

    Example:
        >>> import torch
        >>> import headwise
        >>> from headwise.quant import equalize
        >>> block, x = headwise.EncoderBlock(16, 4, activation="relu").eval(), torch.randn(2, 5, 16)
        >>> before = block(x)
        >>> torch.equal(equalize(block)(x), before)
        True
    """
    return equalized("equalize", model)


def equalized(function: str, model: nn.Module) -> nn.Module:
    """`equalize` for another public name."""
    if not isinstance(model, nn.Module):
        raise invalid(function, "model", "be an nn.Module", class_of(model))
    pairs = list(_pairs(model))
    if not pairs:
        rule = "hold attention whose v_proj and out_proj are plain linears, or a feed-forward with ReLU or SwiGLU"
        raise invalid(function, "model", f"{rule}, to be equalized", f"{class_of(model)} with none")
    for pair in pairs:
        for tensor in (pair.weight, *pair.added, pair.columns):
            _check_writable(function, tensor)
    with torch.no_grad():
        scales = [pair.scales() for pair in pairs]  # all before the first is written
        greatest = max(pair.apply(own) for pair, own in zip(pairs, scales, strict=True))
    number = counted(len(pairs), "pair of linears", "pairs of linears")
    _LOG.info("%s: %s equalized, by factors of up to %g", function, number, greatest)
    return model


def _pairs(model: nn.Module) -> Iterator[_Pair]:
    owners = _owners(model)
    for module in model.modules():
        pair = None
        if type(module) in (MultiheadAttention, nn.MultiheadAttention):
            pair = _of_attention(module, owners)
        elif type(module) in _STOCK_LAYERS or (
            isinstance(module, FeedForward) and are_ours(module, "forward", "_feed_forward")
        ):
            pair = _of_feed_forward(module, owners)
        if pair is not None:
            yield pair


def _owners(model: nn.Module) -> Counter[int]:
    """Under how many names each module is held, by id, and memory: a Parameter, a view of it, an alias of either."""
    owners = Counter(id(child) for module in model.modules() for child in module._modules.values())
    owners.update(_memory(held.tensor) for held in held_by(model))
    return owners


def _memory(tensor: Tensor) -> int:
    """What two tensors have in common that lie in the same memory."""
    if tensor.layout == torch.strided and not (is_lazy(tensor) or tensor.is_meta) and tensor.numel():
        with suppress(RuntimeError, NotImplementedError):  # what a subclass wraps is its own affair
            return tensor.untyped_storage().data_ptr() or id(tensor)
    return id(tensor)


def _check_writable(function: str, tensor: Tensor) -> None:
    """Hold that each number can be written, and has a place of its own."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= extent:
            rule = "hold each number in a place of its own, to be equalized; .clone() gives them one"
            raise invalid(function, "model", rule, f"an expanded weight or bias {tuple(tensor.shape)}")
        extent += stride * (size - 1)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        rule = "be built outside of torch.inference_mode, or equalized within it"
        raise invalid(function, "model", rule, f"an inference tensor {tuple(tensor.shape)}")


def _of_attention(module: Any, owners: Counter[int]) -> _Pair | None:
    """(v_proj, out_proj): heads mix positions, not channels, and a gate scales what a head found."""
    H, K = module.num_heads, module.head_dim
    G = getattr(module, "num_kv_heads", H)
    out, attend = module._modules["out_proj"], module._modules.get("attend")
    if not _is_plain(out, owners) or (attend is not None and (type(attend) is not Attend or is_hooked(attend))):
        return None
    if "v_proj" in module._modules:
        value = module._modules["v_proj"]
        if not _is_plain(value, owners):
            return None
        weight, bias = value.weight, value.bias
    else:
        own = module._parameters
        if not {"in_proj_weight", "in_proj_bias"} <= set(own):
            return None
        weight = own["v_proj_weight"] if own["in_proj_weight"] is None else own["in_proj_weight"]
        bias = own["in_proj_bias"]
        if not _are_own((weight, bias), owners):
            return None
        weight, bias = weight[-G * K :], None if bias is None else bias[-G * K :]
    if weight.shape[0] != G * K or out.weight.shape[1] != H * K:
        return None
    bias_v = module.bias_v
    if not _are_own((bias_v,), owners) or (bias_v is not None and "bias_v" not in module._parameters):
        return None
    added = [part for part in (bias, bias_v) if part is not None]
    columns = out.weight.detach().unflatten(1, (G, H // G, K)).transpose(1, 2)
    return _Pair(weight.detach(), tuple(part.detach().view(-1) for part in added), columns)


def _of_feed_forward(module: Any, owners: Counter[int]) -> _Pair | None:
    """(linear1, linear2), or (linear3, linear2) where linear3 is multiplied to what the activation gave."""
    children = module._modules
    first, second, dropout = children.get("linear3", children["linear1"]), children["linear2"], children["dropout"]
    if "linear3" not in children and not _passes_factors_on(module.activation):
        return None
    if type(dropout) not in (nn.Dropout, nn.Identity) or is_hooked(dropout):
        return None
    if not _is_plain(first, owners) or not _is_plain(second, owners):
        return None
    added = () if first.bias is None else (first.bias.detach(),)
    return _Pair(first.weight.detach(), added, second.weight.detach()[:, None])


def _passes_factors_on(activation: Any) -> bool:
    if isinstance(activation, nn.Module):
        return type(activation) in _HOMOGENEOUS_MODULES and not is_hooked(activation)
    return activation in _HOMOGENEOUS


def _is_plain(linear: Any, owners: Counter[int]) -> bool:
    """Whether it is a linear that nobody watches, and whose Parameters nobody shares."""
    if type(linear) not in (nn.Linear, NonDynamicallyQuantizableLinear) or is_hooked(linear) or owners[id(linear)] > 1:
        return False
    own = linear._parameters
    return {"weight", "bias"} <= set(own) and _are_own(own.values(), owners)


def _are_own(parameters: Iterable[Tensor | None], owners: Counter[int]) -> bool:
    return all(p is None or (is_plain(p) and not p.is_meta and owners[_memory(p)] == 1) for p in parameters)
