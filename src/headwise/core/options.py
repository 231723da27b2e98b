"""What attention can do that torch's cannot: fewer or wider heads, positions, normed queries and keys, a gate, a sink.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, D model width, K head width.

Functions over the module that holds them, in the order of a call: `turned` and `biased` before attention, `scoring`
for it, `gated` after it. They are asked only where `module.extended` says so.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from headwise._checks import invalid, is_number, positive
from headwise.core import layouts
from headwise.core.algebra import Mask, appended
from headwise.core.layouts import is_sharded
from headwise.core.positions import Alibi, Rotary

if TYPE_CHECKING:
    from headwise.core.multihead import MultiheadAttention
    from headwise.core.projections import ProjectedAttention

_NAME = "MultiheadAttention"
CHILDREN = ("gate_proj", "q_norm", "k_norm", "positions")
HELD = frozenset((*CHILDREN, "sink"))  # what is there only where its option is on

QkNorm = bool | str | Callable[[int], nn.Module]


def settle_heads(module: MultiheadAttention, num_kv_heads: int | None, head_dim: int | None) -> None:
    """Check the number and the width of the heads, and note what is not torch's.

    Raises:
        ValueError: they do not go together.
    """
    D, H = module.embed_dim, module.num_heads
    if head_dim is None:
        if D % H:
            nearest = D // H * H or H
            rule = f"be a multiple of num_heads {H}, such as {nearest} or {nearest + H}, unless head_dim is given"
            raise invalid(_NAME, "embed_dim", rule, D)
        K = D // H
    else:
        K = positive(_NAME, "head_dim", head_dim)
    G = H if num_kv_heads is None else positive(_NAME, "num_kv_heads", num_kv_heads)
    if H % G:
        fit = [number for number in range(1, H + 1) if H % number == 0]
        raise invalid(_NAME, "num_kv_heads", f"divide num_heads {H}: one of {', '.join(map(str, fit))}", G)
    if G == H and K * H == D:
        return
    module.extended, module.inner_dims = True, (H * K, G * K)
    module._head_dim, module._num_kv_heads = K, G


def build(
    module: MultiheadAttention,
    positions: str | nn.Module | None,
    qk_norm: QkNorm,
    gate: bool,
    sink: bool,
    softcap: float | None,
    *,
    bias: bool,
    **factory: Any,
) -> None:
    """Make the children and Parameters of the options that are on.

    Raises:
        ValueError: a value that is none of an option's, or does not go with the width of the heads.
    """
    H, K = module.num_heads, module.head_dim
    for name, flag in (("gate", gate), ("sink", sink)):
        if not isinstance(flag, bool):
            raise invalid(_NAME, name, "be True or False", repr(flag))
    if softcap is not None:
        if not is_number(softcap) or not 0 < softcap < math.inf:
            raise invalid(_NAME, "softcap", "be a finite number greater than 0, or None", repr(softcap))
        module._softcap = float(softcap)
    if gate:
        child = layouts.linear(module.embed_dim, H * K, bias, **factory)
        object.__setattr__(child, "reset_parameters", layouts.Reset(child, 1))
        module.add_module("gate_proj", child)
    if qk_norm is not False:
        for name in ("q_norm", "k_norm"):
            module.add_module(name, _norm(qk_norm, K, **factory))
    if positions is not None:
        module.add_module("positions", _positions(positions, H, K))
    if sink:
        module.register_parameter("sink", layouts.empty(H, **factory))
    if gate or sink or softcap is not None or qk_norm is not False or positions is not None:
        module.extended = True


def _norm(asked: QkNorm, head_dim: int, **factory: Any) -> nn.Module:
    """A norm over K."""
    if asked is True or asked == "rmsnorm":
        return nn.RMSNorm(head_dim, eps=1e-6, **factory)
    if asked == "layernorm":
        return nn.LayerNorm(head_dim, **factory)
    made = asked(head_dim) if callable(asked) and not isinstance(asked, nn.Module) else None
    if not isinstance(made, nn.Module):
        rule = "be True, False, 'rmsnorm', 'layernorm', or a callable that makes a module of width head_dim"
        raise invalid(_NAME, "qk_norm", rule, repr(asked if made is None else made))
    return made.to(**{word: value for word, value in factory.items() if value is not None})


def _positions(asked: object, num_heads: int, head_dim: int) -> nn.Module:
    if asked == "rotary":
        asked = Rotary()
    elif asked == "alibi":
        asked = Alibi(num_heads)
    if not isinstance(asked, nn.Module) or not _takes_two(asked.forward):
        rule = "be 'rotary', 'alibi', a Rotary or an Alibi of headwise.core.positions, or a module called like Rotary"
        raise invalid(_NAME, "positions", rule, repr(asked))
    if isinstance(asked, Rotary):
        asked.width(head_dim)
    if isinstance(asked, Alibi) and asked.num_heads != num_heads:
        raise invalid(_NAME, "positions", f"be an Alibi of num_heads {num_heads}", asked.num_heads)
    return asked


def _takes_two(call: Callable[..., Any]) -> bool:
    try:
        inspect.signature(call).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature to read
        return True
    return True


def reset(module: ProjectedAttention) -> None:
    """Draw the gate anew, Xavier uniform with biases 0; norms and slopes as they begin; the sink at 0.

    A sink of 0 is an exp(0) = 1 in each denominator ("softmax off by one").
    """
    for name in CHILDREN:
        child: Any = module._modules.get(name)
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    sink = module._parameters.get("sink")
    if sink is not None:
        nn.init.zeros_(sink)


def turned(
    module: MultiheadAttention, q_BHLK: Tensor, k_BGSK: Tensor, query_at: int | Tensor = 0, key_at: int | Tensor = 0
) -> tuple[Tensor, Tensor]:
    """Queries and keys normed, then turned by their positions.

    Args:
        module: whose `q_norm`, `k_norm` and `positions` are called.
        q_BHLK: (B, H, L, K).
        k_BGSK: (B, G, S, K).
        query_at: the position of the first query, or of each, as `Rotary.forward` takes it.
        key_at: likewise of the keys.
    """
    children = module._modules
    q_norm, k_norm, positions = children.get("q_norm"), children.get("k_norm"), children.get("positions")
    if q_norm is not None:
        q_BHLK = _normed(q_norm, q_BHLK)
    if k_norm is not None:
        k_BGSK = _normed(k_norm, k_BGSK)
    if positions is None or isinstance(positions, Alibi):
        return q_BHLK, k_BGSK
    return positions(q_BHLK, query_at), positions(k_BGSK, key_at)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), computed in the dtype of its weight, which under autocast is not x's, and in x's dtype again."""
    weight = getattr(norm, "weight", None)
    wide = x.to(weight.dtype) if isinstance(weight, Tensor) else x
    return cast(Tensor, norm(wide)).to(x.dtype)


def biased(module: MultiheadAttention, q_BHLK: Tensor, mask: Mask | None, offset: int | Tensor = 0) -> Mask | None:
    """The mask, with what distances add to the scores; `offset` as in `masks.causal`."""
    positions = module._modules.get("positions")
    if not isinstance(positions, Alibi):
        return mask
    added: Mask = positions(q_BHLK, offset)
    return added if mask is None else mask & added


def scoring(module: MultiheadAttention) -> tuple[()] | tuple[float | None, Tensor | None]:
    """What `attend` gets after all else: softcap and sink; nothing where both are off."""
    if not module.extended:
        return ()
    sink: Tensor | None = module._parameters.get("sink")
    if sink is None and "parametrizations" in module._modules:
        sink = cast("Tensor | None", getattr(module, "sink", None))
    return () if sink is None and module.softcap is None else (module.softcap, sink)


def gated(module: MultiheadAttention, query: Tensor, out: Tensor) -> Tensor:
    """(.., .., H*K): what the heads found, times sigmoid(gate_proj(query))."""
    gate_proj = module._modules.get("gate_proj")
    return out if gate_proj is None else out * torch.sigmoid(gate_proj(query))


def with_extra_keys(
    module: MultiheadAttention, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask | None
) -> tuple[Tensor, Tensor, Mask | None]:
    """Keys and values that end in `bias_k`, `bias_v` and the zeros, and a mask that shows these to everyone."""
    if not module.add_zero_attn and module.bias_k is None:
        return k_BHSK, v_BHSK, mask
    B, H, _, K = k_BHSK.shape
    keys, values = [k_BHSK], [v_BHSK]
    if module.bias_k is not None and module.bias_v is not None:
        keys.append(_here(module.bias_k).to(k_BHSK.dtype).view(1, H, 1, K).expand(B, H, 1, K))
        values.append(_here(module.bias_v).to(v_BHSK.dtype).view(1, H, 1, K).expand(B, H, 1, K))
    if module.add_zero_attn:
        keys.append(k_BHSK.new_zeros(B, H, 1, K))
        values.append(v_BHSK.new_zeros(B, H, 1, K))
    return torch.cat(keys, dim=2), torch.cat(values, dim=2), appended(mask, len(keys) - 1)


def _here(bias: Tensor) -> Tensor:
    """What this process holds of a tensor that may be sharded."""
    return cast(Tensor, cast(Any, bias).to_local()) if is_sharded(bias) else bias


def said(module: MultiheadAttention) -> list[str]:
    """What `repr` says of a module beyond its children: what differs from the default."""
    K_given, G = module._head_dim, module.num_kv_heads
    has_bias = getattr(module.out_proj, "bias", None) is not None
    return [
        text
        for shown, text in (
            (module.kdim != module.embed_dim, f"kdim={module.kdim}"),
            (module.vdim != module.embed_dim, f"vdim={module.vdim}"),
            (not has_bias, "bias=False"),
            (module.bias_k is not None, "add_bias_kv=True"),
            (module.add_zero_attn, "add_zero_attn=True"),
            (not module.average_attn_weights, "average_attn_weights=False"),
            (module.fused_qkv, "fused_qkv=True"),
            (module.num_heads != G, f"num_kv_heads={G}"),
            (K_given is not None and K_given * module.num_heads != module.embed_dim, f"head_dim={K_given}"),
            (module.extended and hasattr(module, "sink"), "sink=True"),
            (module.softcap is not None, f"softcap={module.softcap}"),
        )
        if shown
    ]
