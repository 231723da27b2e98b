"""What `MultiheadAttention` holds its inputs to, and how it says so.

Letters: B batch, H heads, L query positions, S key positions, D model width, K head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core.backends import autocasts
from headwise.core.layouts import CHILDREN, is_sharded
from headwise.core.masks import Mask

if TYPE_CHECKING:
    from headwise.core.multihead import MultiheadAttention

_NAME = "MultiheadAttention"
Masks = tuple[Tensor | None, Tensor | None, Tensor | None, Mask | None]  # key padding, attention, query padding, ours


def cure_for(value: object) -> str:
    """What to say beside "be a tensor" where torch.fx is tracing."""
    if not isinstance(value, torch.fx.Proxy):
        return ""
    return (
        "; torch.fx takes torch's modules alone as leaves: trace by a torch.fx.Tracer whose is_leaf_module knows ours"
    )


def check_inputs(
    module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, masks: Masks
) -> tuple[bool, bool]:
    """Whether the input is batched, and whether masked; raises at what could not be computed or would be wrong."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)) or value.is_nested:
        kinds = ", ".join(type(given).__name__ for given in (query, key, value))
        rule = f"be tensors, key and value nested both or neither{cure_for(query)}"
        raise invalid(_NAME, "query, key and value", rule, kinds)
    query_shape = query.shape
    masked = not (masks[0] is None and masks[1] is None and masks[2] is None and masks[3] is None)
    key_shape = query_shape if key is query else key.shape
    value_shape = key_shape if value is key else value.shape
    rank = len(query_shape)
    if (
        rank not in (2, 3)
        or len(key_shape) != rank
        or len(value_shape) != rank
        or query_shape[-1] != module.embed_dim
        or key_shape[-1] != module.kdim
        or value_shape[-1] != module.vdim
        or (value is not key and value_shape[:-1] != key_shape[:-1])
        or (rank == 3 and key is not query and key_shape[not module.batch_first] != query_shape[not module.batch_first])
    ):
        raise _misfit(module, query, key, value)
    if masked:
        _check_masks(module, query, key, value, masks)
    return rank == 3, masked


def _misfit(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> ValueError:
    """Which rule the shapes break, the first one first."""
    shapes: dict[str, Tensor | None] = {"query": query, "key": key, "value": value}
    ranks = (query.dim(), key.dim(), value.dim())
    if ranks not in ((3, 3, 3), (2, 2, 2)):
        return invalid(_NAME, "query, key and value", "be all 3-D, or all 2-D for one sample", ranks, **shapes)
    widths = (("query", query, module.embed_dim), ("key", key, module.kdim), ("value", value, module.vdim))
    for name, tensor, width in widths:
        if tensor.shape[-1] != width:
            return invalid(_NAME, name, f"be {width} wide", tensor.shape[-1], **shapes)
    batch, length = (0, 1) if module.batch_first else (1, 0)
    if ranks[0] == 3 and query.shape[batch] != key.shape[batch]:
        hint = _layout_hint(module) if query.shape[length] == key.shape[length] else ""
        rule = f"have the query's batch size {query.shape[batch]}{hint}"
        return invalid(_NAME, "key", rule, key.shape[batch], **shapes)
    rule = f"have the key's batch size and length, {tuple(key.shape[:-1])}"
    return invalid(_NAME, "value", rule, tuple(value.shape[:-1]), **shapes)


def wrong_kind(
    module: MultiheadAttention, error: RuntimeError, query: Tensor, key: Tensor, value: Tensor
) -> RuntimeError | ValueError:
    """What to raise in place of a failure: dtype or device, if one of them is the reason, else the error itself.

    Asked afterwards, since only the projections themselves know what they take (adapters, quantized ones).
    """
    weight = getattr(module.out_proj, "_parameters", {}).get("weight")
    if type(error) is not RuntimeError or weight is None:
        return error
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        for what in ("device",) if autocasts(tensor.device) else ("dtype", "device"):
            have, want = getattr(tensor, what), getattr(weight, what)
            if have != want:
                rule = f"have the parameters' {what}, {want}; convert it or the module with .to()"
                return invalid(_NAME, name, rule, have, query=query, key=key, value=value)
    return error


def _layout_hint(module: MultiheadAttention) -> str:
    other = not module.batch_first
    layout = "(B, L, D)" if module.batch_first else "(L, B, D)"
    return f" (read as {layout}; these sizes fit batch_first={other})"


def _check_masks(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> None:
    """What a Mask cannot say by itself: padding of one rank only, and sizes that fit the other layout."""
    key_padding_mask, attn_mask, query_padding_mask, mask = masks
    shapes: dict[str, Tensor | None] = {"query": query, "key": key, "value": value}
    batched = query.dim() == 3
    batch, length = (0, 1) if module.batch_first else (1, 0)
    for name, letter, given, of in (
        ("key_padding_mask", "S", key_padding_mask, key.shape),
        ("query_padding_mask", "L", query_padding_mask, query.shape),
    ):
        if given is None:
            continue
        kinds = "bool" if letter == "L" else "bool or floating"
        fits = isinstance(given, Tensor) and (
            given.dtype == torch.bool or (letter == "S" and given.is_floating_point())
        )
        if not fits:
            rule = f"be a {kinds} tensor with True for padding"
            raise invalid(_NAME, name, rule, getattr(given, "dtype", type(given).__name__), **shapes)
        want = (of[batch], of[length]) if batched else (of[0],)
        if given.shape != want:
            hint = _layout_hint(module) if tuple(given.shape) == want[::-1] else ""
            letters = f"(B, {letter})" if batched else f"({letter},)"
            raise invalid(_NAME, name, f"be {letters} = {tuple(want)}{hint}", tuple(given.shape), **shapes)
        if given.device != query.device:
            raise invalid(_NAME, name, f"be on the query's device {query.device}", given.device, **shapes)
    if mask is not None and not isinstance(mask, Mask):
        rule = "be a Mask of headwise.masks; a bool tensor (True may attend) goes into masks.dense(keep)"
        raise invalid(_NAME, "mask", rule, type(mask).__name__, **shapes)
    if batched and isinstance(attn_mask, Tensor) and attn_mask.dim() in (2, 3):
        want = (query.shape[length], key.shape[length])
        if attn_mask.shape[-2:] != want and attn_mask.shape[-2:] == (query.shape[batch], key.shape[batch]):
            rule = f"end in (L, S) = {want}{_layout_hint(module)}"
            raise invalid(_NAME, "attn_mask", rule, tuple(attn_mask.shape), **shapes)


def check_shards(
    module: MultiheadAttention, q_BHLK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, need_weights: bool
) -> None:
    """Projections sharded over processes give some of the heads: the same of each, and the weights of no others."""
    heads = (q_BHLK.shape[1], k_BHSK.shape[1], v_BHSK.shape[1])
    if heads[0] == heads[1] == heads[2] == module.num_heads:
        return
    weights = [getattr(module._modules.get(name), "weight", None) for name in CHILDREN]
    if not any(map(is_sharded, weights)):
        return
    if len(set(heads)) > 1:
        rule = f"be sharded alike, all or none of {', '.join(CHILDREN)}; headwise.layers.tp_plan does"
        raise invalid(_NAME, "projections", rule, f"{heads} heads here of {module.num_heads}")
    if need_weights and getattr(module.attend, "shards", 1) == 1:
        rule = "be False where the heads are sharded by another plan than headwise.layers.tp_plan"
        raise invalid(_NAME, "need_weights", rule, f"True, with {heads[0]} of {module.num_heads} heads here")
