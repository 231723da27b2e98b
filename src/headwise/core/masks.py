"""Which keys a query may attend: a small algebra, lowered to the cheapest form a backend takes.

Letters: B batch, H query heads, L query positions, S key positions.

Every mask says *may attend* (True keeps), whatever its name. Masks combine with `&` (both hold), `|` (either
holds) and `~` (the opposite); additive scores (`bias`) join with `&` only. Nothing of size L x S exists until a
backend asks for it: `lower` hands over a flag, a view that broadcasts over heads and queries, or, last, the whole.

    causal()              window(2, 0)          padding([3, 5])       causal() & padding([3, 5])
    # . . . .             # . . . .             # # # . .             # . . . .
    # # . . .             # # . . .             # # # . .             # # . . .
    # # # . .             # # # . .             # # # . .             # # # . .
    # # # # .             . # # # .             # # # . .             # # # . .
    # # # # #             . . # # #             # # # . .             # # # . .

Source of the rules: ONNX Attention (opset 23 to 25) for the order of composition and for rows without a visible key;
`torch.nn.MultiheadAttention` for polarity and ranks in `from_torch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core.algebra import (
    TORCH_SHAPES,
    Alibi,
    Causal,
    Documents,
    Given,
    Mask,
    Padding,
    Prefix,
    TorchMask,
    Window,
    both,
)
from headwise.core.lowering import checked_count, four_dims, not_integer, said

__all__ = [
    "Mask",
    "alibi",
    "bias",
    "causal",
    "dense",
    "documents",
    "from_torch",
    "padding",
    "prefix",
    "window",
]


def causal(offset: int | Tensor = 0) -> Mask:
    """Query l sees the keys 0 .. l + offset (aligned to the first key, as SDPA's `is_causal`).

        causal(), L=3, S=5        causal(2), L=3, S=5 (two keys are already in a cache)
        # . . . .                 # # # . .
        # # . . .                 # # # # .
        # # # . .                 # # # # #

    Args:
        offset: keys before the first query's own; an int, or an integer tensor of shape () or (B,). With
            `offset = S - L` the last query sees the last key (flash-attention's alignment).

    Returns:
        A mask; lowered to the kernel's own flag where the offset is the int 0.

    Raises:
        ValueError: the offset is neither an int nor an integer tensor of one of these shapes.
    """
    return Causal(checked_count("causal", "offset", offset))


def window(left: int | None, right: int | None) -> Mask:
    """Query l sees the keys l - left .. l + right.

        window(1, 0)        window(1, 1)
        # . . .             # # . .
        # # . .             # # # .
        . # # .             . # # #
        . . # #             . . # #

    Args:
        left: keys before the query's own position, at least 0; None: all of them.
        right: keys after it, at least 0; None: all of them. `window(None, 0)` is `causal()`.

    Raises:
        ValueError: a side is negative or not an int.
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
            raise invalid("window", name, "be an int of at least 0, or None for no limit", repr(side))
    return causal() if left is None and right == 0 else Window(left, right)


def padding(lengths: Tensor | Sequence[int]) -> Mask:
    """Keys past a sample's length are invisible.

    Args:
        lengths: (B,) integers, the number of real keys of each sample; or a bool tensor (B, S), True where the key is
            real (left padding and holes included). Values are not read: a length beyond S hides nothing.

    Raises:
        ValueError: another dtype or rank. torch's `key_padding_mask` is the opposite: pass `~key_padding_mask`.
    """
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths)
    if lengths.dtype == torch.bool and lengths.dim() == 2:
        return Given("padding", "keep", lengths[:, None, None, :])
    if lengths.dim() != 1 or not_integer(lengths):
        raise invalid("padding", "lengths", "be integers (B,) or a bool keep mask (B, S)", said(lengths))
    return Padding(lengths)


def documents(ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Queries see the keys of their own document; for several sequences in one row.

    Args:
        ids: (L,) or (B, L) integers, the document of each query position.
        key_ids: (S,) or (B, S), the document of each key. None: `ids`, which needs L == S.

    Raises:
        ValueError: not an integer tensor of one or two dimensions.
    """
    for name, given in (("ids", ids), ("key_ids", key_ids)):
        if given is None and name == "key_ids":
            continue
        if not isinstance(given, Tensor) or given.dim() not in (1, 2) or not_integer(given):
            raise invalid("documents", name, "be an integer tensor (L,) or (B, L)", said(given))
    return Documents(ids, ids if key_ids is None else key_ids)


def prefix(n: int | Tensor) -> Mask:
    """Every query sees the first n keys and no other; a prefix language model is `causal() | prefix(n)`.

        causal() | prefix(2)
        # # . .
        # # . .
        # # # .
        # # # #

    Args:
        n: an int, or an integer tensor of shape () or (B,).

    Raises:
        ValueError: neither.
    """
    return Prefix(checked_count("prefix", "n", n))


def dense(keep: Tensor) -> Mask:
    """A mask you already have, True where a query may attend (SDPA's polarity, not `nn.MultiheadAttention`'s).

    Args:
        keep: bool, (L, S), (B, L, S) or anything 4-D that broadcasts to (B, H, L, S).

    Raises:
        ValueError: another dtype or rank; a size that does not broadcast is reported when the mask is used.
    """
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.dim() not in (2, 3, 4):
        raise invalid(
            "dense", "keep", "be a bool tensor (L, S), (B, L, S) or 4-D; float scores go into bias()", said(keep)
        )
    return Given("dense", "keep", four_dims(keep))


def bias(scores: Tensor) -> Mask:
    """Scores added before the softmax: ALiBi, a learned relative position, a soft penalty.

    Args:
        scores: any floating dtype, (L, S), (B, L, S) or anything 4-D that broadcasts to (B, H, L, S). Cast to the
            query's dtype where it differs: finite values stay finite, only -inf hides a key. Gradients flow to it.

    Raises:
        ValueError: another dtype or rank.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() not in (2, 3, 4):
        raise invalid(
            "bias", "scores", "be a floating tensor (L, S), (B, L, S) or 4-D; bool masks go into dense()", said(scores)
        )
    return Given("bias", "scores", four_dims(scores))


def alibi(slopes: Tensor, offset: int | Tensor = 0) -> Mask:
    """Scores that fall with the distance of query and key: -slopes[h] * |l + offset - s| is added.

    Args:
        slopes: (H,) floating; gradients flow to it. `headwise.core.positions.alibi_slopes` gives the paper's.
        offset: keys before the first query's own position, as in `causal`.

    Raises:
        ValueError: slopes that are no floating (H,), an offset as in `causal`; another H when the mask is used.

    Source: arXiv 2108.12409.
    """
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point() or slopes.dim() != 1:
        raise invalid("alibi", "slopes", "be a floating tensor of one slope per head, (H,)", said(slopes))
    return Alibi(slopes, checked_count("alibi", "offset", offset))


def from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, is_causal: bool = False
) -> Mask | None:
    """Turn the masks of `nn.MultiheadAttention` (True blocks) into one Mask (True keeps), once.

    Args:
        attn_mask: bool or floating, (L, S), (B*H, L, S), (B, L, S), (1, L, S), or 4-D that broadcasts to
            (B, H, L, S). A 3-D mask whose first size fits several is read in this order, torch's first.
        key_padding_mask: bool or floating, (B, S).
        is_causal: adds the causal rule; it holds beside the masks, it is no hint about them.

    Returns:
        The intersection of all that was given, floats added; None where nothing was.

    Raises:
        ValueError: another dtype or rank at once; a size that does not fit when the mask is used.

    Unlike torch: bool and floating masks mix, per-sample and 4-D masks are taken, and `is_causal` always holds.
    """
    return read_torch("from_torch", attn_mask, key_padding_mask, is_causal)


def read_torch(
    caller: str,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    shapes: dict[str, Tensor] | None = None,
) -> Mask | None:
    """`from_torch`, with the name that errors begin with and the tensors whose sizes they show."""
    shown = {} if shapes is None else shapes
    found: Mask | None = causal() if is_causal else None
    for argument, mask, ranks in (("attn_mask", attn_mask, (2, 3, 4)), ("key_padding_mask", key_padding_mask, (2,))):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise invalid(caller, argument, "be a bool (True blocks) or floating (added) tensor", said(mask), **shown)
        if mask.dim() not in ranks:
            rule = f"be {TORCH_SHAPES[argument].rstrip(',')}"
            raise invalid(caller, argument, rule, f"{mask.dim()}-D {tuple(mask.shape)}", **shown)
        if mask.is_floating_point() and mask.dtype.itemsize == 1:
            mask = mask.float()  # float8 has no arithmetic
        found = both(found, TorchMask(caller, argument, ~mask if mask.dtype == torch.bool else mask, shown))
    return found
