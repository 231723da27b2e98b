"""What `MultiheadAttention` holds its inputs to, and how it says so.

Letters: B batch, H heads, L query positions, S key positions, D model width, K head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise._checks import invalid
from headwise.core.algebra import Mask
from headwise.core.backends import autocasts, readable
from headwise.core.layouts import CHILDREN, is_hooked, is_sharded
from headwise.core.lowering import Size
from headwise.core.masks import read_torch
from headwise.core.traits import visible_keys

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
    heads, whole = (q_BHLK.shape[1], k_BHSK.shape[1], v_BHSK.shape[1]), (module.num_heads, module.num_kv_heads)
    if (heads[0], heads[1]) == whole and heads[2] == whole[1]:
        return
    weights = [getattr(module._modules.get(name), "weight", None) for name in CHILDREN]
    if not any(map(is_sharded, weights)):
        return
    if heads[1] != heads[2] or heads[0] * whole[1] != heads[1] * whole[0]:
        rule = f"be sharded alike, all or none of {', '.join(CHILDREN)}; headwise.layers.tp_plan does"
        raise invalid(_NAME, "projections", rule, f"{heads} heads here of {module.num_heads}")
    if need_weights and getattr(module.attend, "shards", 1) == 1:
        rule = "be False where the heads are sharded by another plan than headwise.layers.tp_plan"
        raise invalid(_NAME, "need_weights", rule, f"True, with {heads[0]} of {module.num_heads} heads here")


def once(
    change: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Change each distinct tensor once, so that self-attention stays recognisable by identity."""
    new_query = change(query)
    new_key = new_query if key is query else change(key)
    return new_query, new_key, (new_key if value is key else new_query if value is query else change(value))


def settle_masks(
    module: MultiheadAttention, masks: Masks, is_causal: bool, given: tuple[Tensor, Tensor, Tensor]
) -> tuple[Mask | None, Tensor | None]:
    """All masks of keys as one, and that of the queries, (B, L)."""
    key_padding_mask, attn_mask, query_padding_mask, mask = masks
    if given[0].dim() == 2:
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        query_padding_mask = None if query_padding_mask is None else query_padding_mask.unsqueeze(0)
    shapes = dict(zip(("query", "key", "value"), given, strict=True))
    joined = read_torch(_NAME, attn_mask, key_padding_mask, is_causal, shapes)
    if not module._warned_of_zero_one:
        for name, tensor in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if tensor is not None and _zeros_and_ones(tensor):
                module._warned_of_zero_one = True
                warnings.warn(
                    f"{_NAME}: the floating {name} holds only 0 and 1, which are added to the scores and hide nothing; "
                    f"if 1 means 'may not attend' pass {name}.bool(), if it means 'may attend' pass {name} == 0",
                    stacklevel=6,  # this function, `_attend`, forward, two frames of nn.Module
                )
                break
    if mask is not None:
        joined = mask if joined is None else joined & mask
    return joined, query_padding_mask


def finish(
    out: Tensor,
    weights: Tensor | None,
    query_padding_mask: Tensor | None,
    dtype: torch.dtype,
    batched: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """0 for padded queries, weights in the dtype of the input, and without the batch dimension that was added."""
    weights = None if weights is None else weights.to(dtype)
    if query_padding_mask is not None:
        rows_BL = query_padding_mask
        out = out.masked_fill((rows_BL if batch_first else rows_BL.T)[..., None], 0)
        if weights is not None:
            rows = rows_BL[:, :, None] if weights.dim() == 3 else rows_BL[:, None, :, None]
            weights = weights.masked_fill(rows, 0)
    if batched:
        return out, weights
    return out.squeeze(0 if batch_first else 1), None if weights is None else weights.squeeze(0)


def _zeros_and_ones(mask: Tensor) -> bool:
    if not isinstance(mask, Tensor) or not readable(mask) or not mask.is_floating_point():
        return False
    if mask.dtype.itemsize == 1 or mask.numel() == 0:
        return False
    mask = mask.detach()
    if mask[(0,) * (mask.dim() - 1) + (-1,)].item() not in (0.0, 1.0):
        return False  # one cheap look settles causal masks and biases
    low, high = mask.aminmax()
    return low.item() == 0 and high.item() == 1 and bool(((mask == 0) | (mask == 1)).all())


def size_of(module: MultiheadAttention, query: Tensor, key: Tensor) -> Size:
    """Of the scores that batched queries and keys make."""
    batch, length = (0, 1) if module.batch_first else (1, 0)
    return Size(query.shape[batch], module.num_heads, query.shape[length], key.shape[length], query.device)


def still(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    joined: Mask | None,
    query_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Set to 0 what is padding in every role it plays: a NaN there would reach the projections' gradients (0 * NaN)."""
    batch_first = module.batch_first
    keys = visible_keys(joined, size_of(module, query, key))
    hidden_key = None
    if keys is not None:
        hidden_key = ~keys.any(dim=1)[:, 0, :, None]  # (B or 1, S or 1, 1)
    hidden_query = None if query_padding_mask is None else query_padding_mask[..., None]

    def quiet(tensor: Tensor) -> Tensor:
        roles = [(query, hidden_query), (key, hidden_key), (value, hidden_key)]
        hidden = None
        for played, where in roles:
            if played is tensor:
                if where is None:
                    return tensor
                hidden = where if hidden is None else hidden & where
        assert hidden is not None
        return tensor.masked_fill(hidden if batch_first else hidden.transpose(0, 1), 0)

    return once(quiet, query, key, value)


def dropout_of(child: nn.Module | None) -> tuple[float, Callable[[Tensor], Tensor] | None]:
    """A probability where the kernel can draw it, else the module to call on the weights."""
    if child is None:
        return 0.0, None
    if type(child) is nn.Dropout and not is_hooked(child):
        return (child.p if child.training else 0.0), None
    return 0.0, child
