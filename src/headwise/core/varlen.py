"""Sequences one after the other on a GPU: torch's variable-length flash attention, behind the same seam.

Letters: H query heads, G key/value heads, P positions of all queries, R of all keys, K head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.core.lowering import Band
from headwise.core.tiling import Sequences

if TYPE_CHECKING:
    from headwise.core.backends import Request


class _Varlen:
    """`torch.nn.attention.varlen.varlen_attn`: nothing that belongs to two sequences is computed."""

    name = "varlen"

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def why_not(self, request: Request) -> list[str]:
        if request.mask.sequences is not None:
            return []
        return ["it needs sequences of known lengths in one row (nested tensors), in 16 bit on a GPU"]

    def cost(self, request: Request) -> tuple[float, int]:
        rows = request.mask.sequences
        assert rows is not None
        _, H, P, K = request.query.shape
        return 4.0 * H * K * sum(q * k for q, k in zip(rows.queries, rows.keys, strict=True)), 4 * H * P

    def run(self, request: Request) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # not at import: it registers operators

        rows, query = request.mask.sequences, request.query
        assert rows is not None
        q_PHK, k_RGK, v_RGK = (heads[0].transpose(0, 1).contiguous() for heads in request[:3])
        left, right, _ = rows.own
        out = varlen_attn(
            q_PHK,
            k_RGK,
            v_RGK,
            _bounds(rows.queries, query.device),
            _bounds(rows.keys, query.device),
            max(rows.queries),
            max(rows.keys),
            scale=request.scale,
            window_size=(-1 if left is None else left, -1 if right is None else right),
            enable_gqa=request.grouped,
        )
        assert isinstance(out, Tensor)
        return out.transpose(0, 1).unsqueeze(0)


VARLEN = _Varlen()


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel is made for such heads."""
    K = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and value.shape[-1] == K
        and K % 8 == 0
        and K <= 256
        and query.shape[0] == key.shape[0] == 1
        and not torch.compiler.is_compiling()
    )


def takes_rows(rows: Sequences) -> bool:
    """Whether it takes these lengths and this band, which it counts from the end of a sequence, not the beginning."""
    left, right, first = rows.own
    counts = all(side is None or side >= 0 for side in (left, right)) and not first
    aligned = rows.own == Band() or rows.queries == rows.keys
    return bool(rows.queries) and counts and aligned and all(rows.keys) and all(rows.queries)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(N + 1,) where each sequence begins, and where the last one ends."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
