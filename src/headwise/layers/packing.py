"""A padded batch as one long row of what is real: the form in which a whole block skips padding.

Axis letters: B batch, D width, L positions, P real positions of the whole batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.core.backends import autocasts, readable
from headwise.core.functional import TURN, TURN_GRAD
from headwise.core.layouts import is_hooked
from headwise.core.masks import Mask
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.core.nested import Samples, read_samples
from headwise.core.projections import direct
from headwise.core.ragged import sequences
from headwise.layers.feedforward import are_ours

# What treats each position by itself, so that it makes no difference how positions are arranged
_POSITION_WISE = frozenset(
    (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU)
)
_KNOWN = _POSITION_WISE | {MultiheadAttention, Attend}
_FUNCTIONS = (F.relu, F.gelu, F.silu, torch.relu, torch.tanh)

_PER_POSITION = 24  # times D * D: about the FLOPs of a position in a block whose feed-forward is 4 * D wide


class Packing(NamedTuple):
    """Where the real positions of a padded batch are, in the order of its samples.

    Attributes:
        places: (P,) positions in the batch, its two first dimensions seen as one.
        shape: of the batch, (B, L, D) or (L, B, D).
        batch_first: which of the two.
        mask: keeps the sequences of the row apart.
    """

    places: Tensor
    shape: torch.Size
    batch_first: bool
    mask: Mask

    def pack(self, x: Tensor) -> Tensor:
        """(1, P, D), or (P, 1, D), from (B, L, D), or (L, B, D)."""
        return x.flatten(0, 1).index_select(0, self.places).unsqueeze(0 if self.batch_first else 1)

    def unpack(self, packed: Tensor) -> Tensor:
        """The other way; 0 where there is padding."""
        D = packed.shape[-1]
        flat = packed.new_zeros(self.shape[0] * self.shape[1], D)
        return flat.index_copy(0, self.places, packed.view(-1, D)).view(*self.shape[:2], D)


def find_packing(
    block: nn.Module, x: Tensor, padding_BL: Tensor, words: dict[str, Any], batch_first: bool
) -> Packing | None:
    """How to run an encoder block on real positions alone, if that gives the same and is quicker.

    It is where the same positions are hidden as queries and as keys and nothing else is masked but the future, where
    the mask can be read without a wait, and where every part of the block is known to treat positions alike: a hook, an
    adapter or a module of the user's own would see another shape.
    """
    hidden, rest = words.get("key_padding_mask"), words.keys() - {"key_padding_mask", "is_causal"}
    if rest or not isinstance(hidden, Tensor) or hidden.dtype != torch.bool or x.dim() != 3 or x.numel() == 0:
        return None
    B, L = padding_BL.shape
    position = _PER_POSITION * x.shape[-1] ** 2
    if position * B * L < TURN * B or not (readable(x) and readable(padding_BL) and readable(hidden)):
        return None
    recorded = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in block.parameters()))
    # with dropout the same choice with and without gradients: recomputation has to draw the same numbers
    recorded = recorded or any(type(m) is nn.Dropout and m.training and m.p > 0 for m in block.modules())
    turns = B * (TURN_GRAD if recorded else TURN)  # attention becomes a loop over samples
    if hidden is not padding_BL and not torch.equal(hidden, padding_BL):
        return None
    real_BL = ~padding_BL
    lengths = real_BL.sum(dim=1).tolist()
    if position * (B * L - sum(lengths)) < turns or not _is_position_wise(block, x):
        return None
    if batch_first:
        places = real_BL.flatten().nonzero().squeeze(1)
    else:
        sample, when = real_BL.nonzero().unbind(1)
        places = when * B + sample
    return Packing(places, x.shape, batch_first, sequences(lengths))


def _is_position_wise(block: nn.Module, x: Tensor) -> bool:
    """Whether all that the block calls is known and takes x, and nothing but attention looks beyond a position."""
    attention: Any = block._modules["self_attn"]
    if type(attention) is not MultiheadAttention or attention.bias_k is not None or attention.add_zero_attn:
        return False
    if type(attention._modules["attn_dropout"]) is not nn.Dropout:  # anything else sees the weights
        return False
    if not _are_known(block, [module for module in block.modules() if module is not block]):
        return False
    weight: Any = attention.out_proj.weight  # what does not fit is named with the caller's shapes
    return x.shape[-1] == attention.embed_dim and (x.dtype == weight.dtype or autocasts(x.device))


def find_samples(block: nn.Module, x: Tensor) -> Samples | None:
    """A nested batch as the row of its samples, if all that the block does outside of attention is known.

    A known child does the same to the row, without the detour of a tensor subclass; an unknown one is given x.
    """
    if not x.is_nested:
        return None
    linear: Any = block._modules["linear1"]
    others = [child for name, child in block.named_children() if name not in ("self_attn", "multihead_attn")]
    if not _are_known(block, [module for child in others for module in child.modules()]):
        return None
    fits = x.size(-1) == linear.in_features and (x.dtype == linear.weight.dtype or autocasts(x.device))
    return read_samples(type(block).__name__, "x", x) if fits and x.device == linear.weight.device else None


def _are_known(block: nn.Module, inside: list[nn.Module]) -> bool:
    """Whether the activation and these children treat positions alike, and nobody watches them."""
    activation = getattr(block, "activation", None)
    if not isinstance(activation, nn.Module) and all(activation is not known for known in _FUNCTIONS):
        return False
    if not are_ours(block, "_feed_forward"):
        return False
    return direct() and all(_is_known(module) and not is_hooked(module) for module in inside)


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
        return False
    return type(module) in _KNOWN
