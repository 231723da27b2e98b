"""Textbook attention in float64: the oracle of every test, never fast and never changed for speed.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width.

Written from the formula alone, it shares no code with the backends and takes masks as plain tensors.
Source: arXiv 1706.03762 section 3.2.1; grouped heads arXiv 2305.13245; order of scale, softcap and mask as in ONNX
Attention; sink as an extra logit without a value (arXiv 2309.17453, gpt-oss).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its weights, term by term.

        score = softcap(scale * query . key) + bias,  visible where keep and bias > -inf
        weight = exp(score) / (sum of exp(score) over visible keys + exp(sink))
        out = sum of factor * weight * value over visible keys

    Args:
        query: (B, H, L, K), any floating dtype; computed in float64.
        key: (B, G, S, K), H % G == 0; query head h reads key head h // (H / G).
        value: (B, G, S, V).
        keep: bool, broadcasts to (B, H, L, S), True may attend. None: all.
        bias: broadcasts to (B, H, L, S). None: 0.
        scale: factor on the scores. None: 1 / sqrt(K).
        softcap: scores become softcap * tanh(score / softcap). None: as they are.
        sink: (H,), one more logit per head that takes weight and gives nothing. None: no sink.
        factor: broadcasts to (B, H, L, S), what dropout did: 0 or 1 / (1 - p). None: 1.

    Returns:
        Output (B, H, L, V) and weights (B, H, L, S), float64, weights before `factor`. A query that sees no key gives
        0 and weights 0. A hidden key has no influence, whatever it holds.

    Cost: holds B*H*L*S*V float64 numbers.
    """
    (B, H, L, K), (_, G, S, _) = query.shape, key.shape
    query, key, value = query.double(), key.double(), value.double()
    key = key.repeat_interleave(H // G, dim=1)
    value = value.repeat_interleave(H // G, dim=1)
    scale = 1 / math.sqrt(K) if scale is None else scale

    visible = torch.ones(B, H, L, S, dtype=torch.bool) if keep is None else keep.expand(B, H, L, S)
    added = torch.zeros(B, H, L, S, dtype=torch.float64) if bias is None else bias.double().expand(B, H, L, S)
    visible = visible & (added != -math.inf)

    score = scale * torch.einsum("bhlk,bhsk->bhls", query, key)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = torch.where(visible, score + torch.where(visible, added, 0.0), -math.inf)
    if sink is not None:
        score = torch.cat([score, sink.double().view(1, H, 1, 1).expand(B, H, L, 1)], dim=-1)

    highest = score.amax(dim=-1, keepdim=True) if score.shape[-1] else score.new_zeros(B, H, L, 1)
    highest = torch.where(highest == -math.inf, 0.0, highest.detach())
    exponential = torch.exp(score - highest)
    total = exponential.sum(dim=-1, keepdim=True)
    weight = (exponential / torch.where(total == 0, 1.0, total))[..., :S]

    used = weight if factor is None else weight * factor.double()
    product = used[..., None] * value[:, :, None]  # (B, H, L, S, V)
    return torch.where(visible[..., None], product, 0.0).sum(dim=-2), weight
