"""What a call of a whole attention module would cost, and some of its weights without the rest.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, D model width, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core import options
from headwise.core.algebra import Mask
from headwise.core.backends import Request, named
from headwise.core.functional import (
    Explanation,
    TopWeights,
    attention_weights,
    explain_request,
    prepare,
    top_attention_weights,
)
from headwise.core.inputs import Masks, check_inputs, dropout_of, once, settle_masks, size_of
from headwise.core.packing import find_packed, flops_of

if TYPE_CHECKING:
    from headwise.core.multihead import MultiheadAttention

_Three = tuple[Tensor, Tensor, Tensor]


def explain_module(module: MultiheadAttention, given: _Three, masks: Masks, is_causal: bool) -> Explanation:
    """`MultiheadAttention.explain`."""
    query, key, _, mask, query_padding_mask = _settled("explain", module, given, masks, is_causal)
    B, _, L, S, _ = size_of(module, query, key)
    found = find_packed(module, query, key, mask, query_padding_mask)
    packed = None if isinstance(found, str) else found
    recorded = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
    sizes, positions = (B, L, S), (B * L, B * S)
    if packed is not None:
        positions = sum(packed.queries.lengths), sum(packed.keys.lengths)
        sizes, mask = (1, *positions), packed.mask
    request = _request(module, query, sizes, mask, recorded=recorded)
    core = explain_request(request, named("explain", module.backend, request), asked=module.backend is not None)
    return core._replace(
        flops=core.flops + flops_of(module, *positions),
        dense_flops=flops_of(module, B * L, B * S, B * L * S),
        packed=found if isinstance(found, str) else (sum(positions), B * (L + S)),
    )


def _request(
    module: MultiheadAttention, like: Tensor, sizes: tuple[int, int, int], mask: Mask | None, *, recorded: bool
) -> Request:
    """What attention would be asked, with heads that take no memory."""
    B, L, S = sizes
    H, G, K = module.num_heads, module.num_kv_heads, module.head_dim
    q, k, v = (
        like.new_zeros(()).expand(B, heads, length, K).requires_grad_(recorded)
        for heads, length in ((H, L), (G, S), (G, S))
    )
    dropout, drop = dropout_of(module.attn_dropout)
    if module.extended:
        mask = options.biased(module, q, mask)
    softcap, sink = options.scoring(module) or (None, None)
    tiled = None if module.backend is None else module.backend == "tiled"
    return prepare(q, k, v, mask, None, dropout, drop, softcap, sink, H != G, tiled)


def some_weights(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    masks: Masks,
    is_causal: bool,
    rows: int | Sequence[int] | Tensor | None,
    top: int | None,
    average: bool,
) -> Tensor | TopWeights:
    """`MultiheadAttention.attention_weights`."""
    function = "attention_weights"
    if module.bias_k is not None or module.add_zero_attn:
        rule = "have neither add_bias_kv nor add_zero_attn; forward(need_weights=True) gives its weights"
        raise invalid(function, "module", rule, repr(module).partition("\n")[0])
    batched = query.dim() == 3 if isinstance(query, Tensor) else True
    value = key if module.vdim == module.kdim else key.new_zeros(()).expand(*key.shape[:-1], module.vdim)
    query, key, value, mask, _ = _settled(function, module, (query, key, value), masks, is_causal)
    q_BHLK, k_BGSK = module._project(query, key, value, module.head_dim, module.batch_first)[:2]
    if module.extended:
        q_BHLK, k_BGSK = options.turned(module, q_BHLK, k_BGSK)
        mask = options.biased(module, q_BHLK, mask)
    softcap, sink = options.scoring(module) or (None, None)
    words: dict[str, Any] = {"mask": mask, "softcap": softcap, "sink": sink, "average_attn_weights": average}
    if top is None:
        weights, keys = attention_weights(q_BHLK, k_BGSK, rows=rows, **words), None
    else:
        weights, keys = top_attention_weights(q_BHLK, k_BGSK, top, rows=rows, **words)
    weights = weights.to(query.dtype)
    if not batched:
        weights, keys = weights.squeeze(0), None if keys is None else keys.squeeze(0)
    return weights if keys is None else TopWeights(weights, keys)


def _settled(
    function: str, module: MultiheadAttention, given: _Three, masks: Masks, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Mask | None, Tensor | None]:
    """Checked inputs, batched, all masks of keys as one, and that of the queries."""
    if any(getattr(tensor, "is_nested", False) for tensor in given):
        raise invalid(function, "query and key", "be dense; ask for one sample at a time", "nested tensors")
    batched, masked = check_inputs(module, *given, masks)
    query, key, value = given
    if not batched:
        query, key, value = once(lambda t: t.unsqueeze(0 if module.batch_first else 1), query, key, value)
    if not masked and not is_causal:
        return query, key, value, None, None
    return query, key, value, *settle_masks(module, masks, is_causal, given)
