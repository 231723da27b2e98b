"""A padded batch as one long row of what is real: the form in which projections skip padding too.

Letters: B batch, D model width, L query positions, S key positions, P real positions of the whole batch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from headwise._checks import class_of
from headwise.core.algebra import Mask, terms, walk_tensors
from headwise.core.backends import readable
from headwise.core.functional import TURN, TURN_GRAD
from headwise.core.inputs import size_of
from headwise.core.layouts import CHILDREN, is_hooked, is_plain, rows
from headwise.core.lowering import Band, Size
from headwise.core.positions import Alibi, Rotary
from headwise.core.projections import direct
from headwise.core.tiling import as_band, joined, sequences, stretches, with_flag
from headwise.core.traits import per_key

if TYPE_CHECKING:
    from headwise.core.multihead import MultiheadAttention


class Packing(NamedTuple):
    """Where the real positions of a padded batch are, in the order of its samples.

    Attributes:
        places: (P,) positions in the batch, its two first dimensions seen as one; None: all, as they are.
        lengths: how many of each sample.
        shape: of the batch, (B, L, D) or (L, B, D).
        batch_first: which of the two.
    """

    places: Tensor | None
    lengths: tuple[int, ...]
    shape: torch.Size
    batch_first: bool

    def pack(self, x: Tensor) -> Tensor:
        """(1, P, D), or (P, 1, D), from (B, L, D), or (L, B, D)."""
        flat = x.flatten(0, 1)
        if self.places is not None:
            flat = flat.index_select(0, self.places)
        return flat.unsqueeze(0 if self.batch_first else 1)

    def unpack(self, packed: Tensor) -> Tensor:
        """The other way; 0 where there is padding."""
        D, (first, second, _) = packed.shape[-1], self.shape
        rows = packed.view(-1, D)
        if self.places is not None:
            rows = packed.new_zeros(first * second, D).index_copy(0, self.places, rows)
        return rows.view(first, second, D)


def pack_real(real_BL: Tensor | None, x: Tensor, batch_first: bool) -> Packing:
    """How to pack x, (B, L, D) or (L, B, D), to what is real of it. Reads the numbers. None: all is real."""
    B, L = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    if real_BL is None:
        places = None if batch_first else torch.arange(L * B, device=x.device).view(L, B).T.flatten()
        return Packing(places, (L,) * B, x.shape, batch_first)
    if batch_first:
        places = real_BL.flatten().nonzero().squeeze(1)
    else:
        sample, when = real_BL.nonzero().unbind(1)
        places = when * B + sample
    return Packing(places, tuple(real_BL.sum(dim=1).tolist()), x.shape, batch_first)


class Packed(NamedTuple):
    """How an attention runs on what is real.

    Attributes:
        queries: how they are packed.
        keys: likewise; the same object where the same positions are real.
        mask: keeps the sequences of the rows apart.
    """

    queries: Packing
    keys: Packing
    mask: Mask

    def pack(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of a batch; what is one tensor stays one, where the same positions of it are real."""
        key_row = self.keys.pack(key)
        value_row = key_row if value is key else self.keys.pack(value)
        query_row = key_row if query is key and self.queries is self.keys else self.queries.pack(query)
        return query_row, key_row, value_row


def find_packed(
    module: MultiheadAttention, query: Tensor, key: Tensor, mask: Mask | None, query_padding_mask: Tensor | None
) -> Packed | str:
    """How to run an attention, projections included, on what is real, or why that would not be the same or quicker.

    It is where keys are hidden from all queries of a sample, where beside that nothing is hidden but by `causal`,
    `window` and the like, and where the masks can be read without a wait. Decided by FLOPs: those of the projections
    and of attention that are saved, against a turn of a loop over the samples.
    """
    if mask is None and query_padding_mask is None:
        return "there is no padding mask"
    if not readable(query):
        return _UNREADABLE
    B, _, L, S, _ = size_of(module, query, key)
    turn = TURN_GRAD if torch.is_grad_enabled() or (module.attn_dropout.training and module.dropout) else TURN
    dense = flops_of(module, B * L, B * S, B * L * S)
    if dense < turn * B:
        return f"the batch is small: less than {turn:.0e} FLOPs a sample"
    if watched := who_watches(module):
        return watched
    packed = pack_both([module], query, key, mask, query_padding_mask)
    if isinstance(packed, str):
        return packed
    queries, keys = packed[:2]
    pairs = sum(map(operator.mul, queries.lengths, keys.lengths))
    saved = dense - flops_of(module, sum(queries.lengths), sum(keys.lengths), pairs)
    if saved < turn * B:
        return f"it would save {saved:.2g} FLOPs, less than {turn:.0e} a sample, what a loop over samples costs"
    return packed


_UNREADABLE = "masks can be read without a wait in eager calls on plain CPU tensors only"


def pack_both(
    modules: Sequence[MultiheadAttention],
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    query_padding_mask: Tensor | None,
) -> Packed | str:
    """What is real of queries and keys as a mask says, or why that cannot be read or would not mean the same in rows.

    Args:
        modules: that will run on the rows one after the other, of one layout and number of heads.
        query: as they are called with, padded.
        key: likewise.
        mask: what is hidden.
        query_padding_mask: (B, L), True = padding. None: all queries are real.
    """
    batch_first, size = modules[0].batch_first, size_of(modules[0], query, key)
    real_BL = None if query_padding_mask is None else ~query_padding_mask
    tensors = [] if mask is None else list(walk_tensors(mask))
    if not all(map(readable, tensors if query_padding_mask is None else [*tensors, query_padding_mask])):
        return _UNREADABLE
    found = (None, Band()) if mask is None else _read(with_flag(mask, size), size)
    if isinstance(found, str):
        return found
    real_BS, band = found
    alike = real_BL is not None and real_BS is not None and torch.equal(real_BL, real_BS)
    placed = [module._modules["positions"] for module in modules if "positions" in module._modules]
    if not _keeps_its_meaning(band, real_BL, real_BS, alike, placed=bool(placed)):
        return "positions count (causal, a window, rotary, ALiBi), and padding is not at the end of queries and keys"
    if not alike and any(isinstance(positions, Alibi) for positions in placed):
        return "ALiBi counts distances, and queries and keys are not padded alike"
    keys = pack_real(real_BS, key, batch_first)
    queries = keys if alike else pack_real(real_BL, query, batch_first)
    return Packed(queries, keys, sequences(queries.lengths, keys.lengths, band))


def flops_of(module: MultiheadAttention, queries: int, keys: int, pairs: int = 0) -> float:
    """Of the projections of so many queries and keys, the gate's too, and of so many products of the two."""
    wide, narrow, _ = rows(module)
    gates = 3 if "gate_proj" in module._modules else 2
    projections = gates * module.embed_dim * wide * queries + narrow * (module.kdim + module.vdim) * keys
    return 2.0 * projections + 4.0 * wide * pairs


def who_watches(module: MultiheadAttention) -> str:
    """What of an attention is hooked or another than it was, and would see other shapes; nothing: empty."""
    modules = module._modules
    if module.backend not in (None, "tiled"):
        return f"backend={module.backend!r} was asked for"
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv and add_zero_attn append a key to each sample"
    if not direct():
        return "a global hook, or a patched nn.Linear, would see other shapes"
    for name, kinds in _PLAIN.items():
        child = modules.get(name)
        if child is None and (name in _OPTIONAL or (module.fused_qkv and name in CHILDREN)):
            continue
        if child is None or (kinds and type(child) not in kinds):
            return f"{name} is {class_of(child)}, which might look beyond a position"
        if is_hooked(child):
            return f"a hook on {name} would see other shapes"
        if kinds == _LINEAR and not is_plain(child._parameters.get("weight")):
            return f"the weight of {name} is no plain Parameter"
    return ""


_LINEAR: tuple[type[nn.Module], ...] = (nn.Linear,)
_NORM = (nn.RMSNorm, nn.LayerNorm)
_OPTIONAL = ("gate_proj", "q_norm", "k_norm", "positions")
_PLAIN: dict[str, tuple[type[nn.Module], ...]] = {
    **dict.fromkeys((*CHILDREN, "out_proj", "gate_proj"), _LINEAR),
    **dict.fromkeys(("q_norm", "k_norm"), _NORM),
    "positions": (Rotary, Alibi),
    "attn_dropout": (nn.Dropout,),
    "attend": (),
}


def _read(mask: Mask, size: Size) -> tuple[Tensor | None, Band] | str:
    """Which keys are real, (B, S), and the band of queries and keys, or why the mask says more than these."""
    keys = [term for term in terms(mask) if per_key(term)]
    others = [term for term in terms(mask) if not per_key(term)]
    band, real = as_band(joined(others)), []
    if band is None:
        return "a mask speaks of single queries; causal, window and their like are packed"
    for term in keys:
        keep = term.keep(size)
        if keep is None or term.score(size) is not None:
            return "a padding mask is floating; a bool one is packed"
        if keep.shape[1] != 1:
            return "a mask differs from head to head"
        real.append(keep[:, 0, 0].expand(size.batch, size.keys))
    return (functools.reduce(operator.and_, real) if real else None), band


def _keeps_its_meaning(
    band: Band, real_BL: Tensor | None, real_BS: Tensor | None, alike: bool, *, placed: bool
) -> bool:
    """Whether a band, and positions if there are any, mean the same when they are counted in what is real."""
    if not placed and (band == Band() or (alike and band == Band(None, 0))):
        return True
    if alike and real_BS is not None and stretches(real_BS) is not None:
        return not band.first
    return all(real is None or _at_the_beginning(real) for real in (real_BL, real_BS))


def _at_the_beginning(real_BS: Tensor) -> bool:
    """Whether what is real of each sample lies side by side from its first position on."""
    found = stretches(real_BS)
    return found is not None and not found[0].any()
