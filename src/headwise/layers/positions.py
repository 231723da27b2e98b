"""Positions that are added to the embeddings. Axis letters: D width, L positions."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoids(length: int, embed_dim: int, *, device: torch.device | None = None) -> Tensor:
    """Return the fixed positions of "Attention Is All You Need" (section 3.5), all sines before all cosines.

    Args:
        length: L.
        embed_dim: D; odd widths drop the last cosine.
        device: of the result. None: torch's default.

    Returns:
        (L, D) float32 in [-1, 1].
    """
    rates = 10_000.0 ** (-torch.arange(0, embed_dim, 2, device=device) / embed_dim)
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :embed_dim]
