"""A padded batch as one long row of what is real: the form in which a whole block skips padding.

Axis letters: B batch, D width, L positions, P real positions of the whole batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.core.algebra import Mask
from headwise.core.backends import autocasts, readable
from headwise.core.functional import TURN, TURN_GRAD
from headwise.core.layouts import is_hooked
from headwise.core.masks import from_torch
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.core.nested import Samples, read_samples
from headwise.core.packing import Packed, pack_both, who_watches
from headwise.core.positions import Alibi, Rotary
from headwise.core.projections import direct
from headwise.layers.feedforward import are_ours

# What treats each position by itself, so that it makes no difference how positions are arranged
_POSITION_WISE = frozenset(
    (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU)
)
_KNOWN = _POSITION_WISE | {MultiheadAttention, Attend, Alibi, Rotary}
_FUNCTIONS = (F.relu, F.gelu, F.silu, torch.relu, torch.tanh)

_PER_POSITION = 24  # times D * D: about the FLOPs of a position in a block whose feed-forward is 4 * D wide


class BlockPacking(NamedTuple):
    """How blocks run on what is real of their inputs.

    Attributes:
        own: of x on itself.
        cross: of x on the memory; None: there is none.
    """

    own: Packed
    cross: Packed | None

    def pack(self, x: Tensor) -> Tensor:
        """What is real of x."""
        return self.own.queries.pack(x)

    def unpack(self, packed: Tensor) -> Tensor:
        """The other way; 0 at padding."""
        return self.own.queries.unpack(packed)


def find_packing(
    blocks: Sequence[nn.Module],
    x: Tensor,
    padding_BL: Tensor | None,
    words: dict[str, Any],
    memory: Tensor | None = None,
    memory_words: dict[str, Any] | None = None,
) -> BlockPacking | None:
    """How to run blocks, one after the other, on real positions alone, if that gives the same and is quicker.

    It is where the same positions are hidden as queries and as keys, where nothing else is masked but by `causal`,
    `window` and the like, where the masks can be read without a wait, and where every part of the blocks is known to
    treat positions alike: a hook, an adapter or a module of the user's own would see another shape.
    """
    inputs = [x] if memory is None else [x, memory]
    if padding_BL is None or "cache" in words or not all(map(_is_batch, inputs)):
        return None
    if not isinstance(padding_BL, Tensor) or padding_BL.dtype != torch.bool or padding_BL.dim() != 2:
        return None  # whoever is called next says so
    B, L = padding_BL.shape
    position = _PER_POSITION * x.shape[-1] ** 2
    if position * B * L < TURN * B or not all(_is_position_wise(block, x, memory) for block in blocks):
        return None
    parameters = itertools.chain.from_iterable(block.parameters() for block in blocks)
    recorded = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))
    # with dropout the same choice with and without gradients: recomputation has to draw the same numbers
    modules = itertools.chain.from_iterable(block.modules() for block in blocks)
    recorded = recorded or any(type(m) is nn.Dropout and m.training and m.p > 0 for m in modules)
    turns = B * (TURN_GRAD if recorded else TURN)  # attention becomes a loop over samples
    own = _packed(blocks, "self_attn", x, x, padding_BL, words)
    if own is None or own.queries is not own.keys or position * (B * L - sum(own.queries.lengths)) < turns:
        return None
    if memory is None:
        return BlockPacking(own, None)
    cross = _packed(blocks, "multihead_attn", x, memory, padding_BL, memory_words or {})
    return None if cross is None else BlockPacking(own, cross)


def _is_batch(x: object) -> bool:
    """Whether it is a batch whose numbers can be read."""
    return isinstance(x, Tensor) and not x.is_nested and x.dim() == 3 and x.numel() > 0 and readable(x)


def _packed(
    blocks: Sequence[nn.Module], name: str, x: Tensor, keys: Tensor, padding_BL: Tensor, words: dict[str, Any]
) -> Packed | None:
    """What is real, if that is all that the words of an attention say."""
    attentions: list[Any] = [block._modules[name] for block in blocks]
    hidden, attn_mask, mask = words.get("key_padding_mask"), words.get("attn_mask"), words.get("mask")
    layouts = {(attention.num_heads, attention.batch_first) for attention in attentions}
    if len(layouts) > 1 or (isinstance(hidden, Tensor) and hidden.dtype != torch.bool):
        return None
    if not (mask is None or isinstance(mask, Mask)):
        return None  # attention says so
    [(_, batch_first)] = layouts
    if x.shape[0 if batch_first else 1] != keys.shape[0 if batch_first else 1]:
        return None
    try:
        joined = from_torch(attn_mask, hidden, bool(words.get("is_causal")))
        if mask is not None:
            joined = mask if joined is None else joined & mask
        packed = pack_both(attentions, x, keys, joined, padding_BL)
    except ValueError:  # attention says what does not fit
        return None
    return None if isinstance(packed, str) else packed


def _is_position_wise(block: nn.Module, x: Tensor, memory: Tensor | None) -> bool:
    """Whether all that the block calls is known and takes x, and nothing but attention looks beyond a position."""
    if not _are_known(block, [module for module in block.modules() if module is not block]):
        return False
    inputs = {"self_attn": x} if memory is None else {"self_attn": x, "multihead_attn": memory}
    for name, keys in inputs.items():
        attention: Any = block._modules[name]
        if type(attention) is not MultiheadAttention or who_watches(attention):
            return False
        weight = attention.out_proj.weight  # what does not fit is named with the caller's shapes
        if x.shape[-1] != attention.embed_dim or keys.shape[-1] != attention.kdim or attention.vdim != attention.kdim:
            return False
        if not all(tensor.dtype == weight.dtype or autocasts(tensor.device) for tensor in (x, keys)):
            return False
    return True


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


def find_stack_packing(
    kind: type[nn.Module],
    blocks: Iterable[nn.Module],
    x: Tensor,
    padding_BL: Tensor | None,
    words: dict[str, Any],
    memory: Tensor | None = None,
    memory_words: dict[str, Any] | None = None,
) -> BlockPacking | None:
    """`find_packing` of a whole stack, whose blocks are exactly of a kind of ours, and which nobody watches."""
    held = list(blocks)
    if padding_BL is None or not all(type(block) is kind and not is_hooked(block) for block in held):
        return None
    return find_packing(held, x, padding_BL, words, memory, memory_words)
