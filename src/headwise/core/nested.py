"""Attention of nested tensors: samples of unequal lengths without padding, each as if it were alone.

The samples lie one after the other in one row, which is what the projections see. Attention runs on that row sequence
by sequence, or on heads that are padded and cut again, whichever is quicker.

Letters: B batch, H heads, L and S the longest query and key, P positions of all samples, D width, K head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from headwise._checks import invalid, kind_of
from headwise.core import options
from headwise.core.algebra import Alibi, Mask, is_flag, terms
from headwise.core.backends import readable
from headwise.core.functional import cost_of_turn
from headwise.core.inputs import Masks, check_shards
from headwise.core.masks import causal, padding
from headwise.core.tiling import as_band, as_sequences, joined, sequences
from headwise.core.varlen import takes, takes_rows

if TYPE_CHECKING:
    from headwise.core.multihead import MultiheadAttention

_NAME = "MultiheadAttention"
_CURE = "torch.nested.as_nested_tensor([sample, ...], layout=torch.jagged)"
_Three = tuple[Tensor, Tensor, Tensor]


class Samples(NamedTuple):
    """A batch as one row, and the way back.

    Attributes:
        values: (P, D), one sample after the other.
        lengths: of each sample.
        given: what it was made of.
    """

    values: Tensor
    lengths: tuple[int, ...]
    given: Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def places(self) -> Tensor | None:
        """(P,) where each position lies in a padded batch, its two first dimensions seen as one; None: there, too."""
        if len(self.lengths) * self.longest == self.values.shape[0]:
            return None
        device = self.values.device
        lengths = torch.tensor(self.lengths, device=device)
        padded_before = torch.arange(len(self.lengths), device=device) * self.longest - (lengths.cumsum(0) - lengths)
        position = torch.arange(self.values.shape[0], device=device)
        return position + padded_before.repeat_interleave(lengths, output_size=len(position))

    def positions(self) -> Tensor:
        """(P,) the position of each in its own sample."""
        lengths = torch.tensor(self.lengths, device=self.values.device)
        before = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=len(self.values))
        return torch.arange(len(self.values), device=self.values.device) - before

    def like(self, values: Tensor) -> Tensor:
        """New values for the same samples, in the layout that came; jagged with the same offsets, so that they add."""
        if values is self.values:
            return self.given
        if not self.given.is_nested:
            return values.view(*self.given.shape[:2], values.shape[-1])
        if self.given.layout != torch.jagged:
            return torch.nested.as_nested_tensor(list(values.split(self.lengths)))
        offsets: Tensor = cast(Any, self.given).offsets()
        least = min(self.lengths) if self.lengths else None
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=least, max_seqlen=self.longest if self.lengths else None
        )


def attend_nested(
    module: MultiheadAttention,
    inputs: _Three,
    masks: Masks,
    drops: tuple[float, Callable[[Tensor], Tensor] | None],
    need_weights: bool,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """`MultiheadAttention.forward` of nested tensors.

    Args:
        module: whose projections and `attend` are called.
        inputs: query, key and value, the last two nested.
        masks: key padding, attention, query padding, and ours; the first three have to be None.
        drops: dropout as a probability, or as what is called on the weights.
        need_weights: as in `forward`.
        average_attn_weights: likewise.
        is_causal: likewise; of each sample.

    Returns:
        Output as the query is, and weights (B, L, S) or (B, H, L, S), 0 where there is no position.
    """
    mask = _settle(module, inputs, masks, is_causal)
    query, key, value = _rows(module, inputs)
    rows_1PD = {id(row): row.values.unsqueeze(0) for row in (query, key, value)}  # one product sees one tensor
    given = rows_1PD[id(query)], rows_1PD[id(key)], rows_1PD[id(value)]
    q_BHLK, k_BHSK, v_BHSK = module._project(*given, module.head_dim, batch_first=True)
    check_shards(module, q_BHLK, k_BHSK, v_BHSK, need_weights)
    if module.extended:  # positions are those in each sample
        q_BHLK, k_BHSK = options.turned(module, q_BHLK, k_BHSK, query.positions(), key.positions())
        mask = options.biased(module, q_BHLK, mask)
    scoring = options.scoring(module)
    # the weights, and what sees or outlasts the row, want samples beside each other
    padded = need_weights or module.add_zero_attn or module.bias_k is not None or drops[1] is not None
    places, weights = None, None
    own = None if padded else _of_rows(mask, query, key)
    if padded or not _is_worth(q_BHLK, k_BHSK, v_BHSK, query, key, drops[0], None if scoring else own):
        places = query.places()
        key_places = places if key is query else key.places()
        q_BHLK = _pad(q_BHLK, query, places)
        k_BHSK, v_BHSK = _pad(k_BHSK, key, key_places), _pad(v_BHSK, key, key_places)
        if key_places is not None:
            real = padding(torch.tensor(key.lengths, device=key.values.device))
            mask = real if mask is None else mask & real
        k_BHSK, v_BHSK, mask = options.with_extra_keys(module, k_BHSK, v_BHSK, mask)
        out, weights = module.attend(q_BHLK, k_BHSK, v_BHSK, mask, *drops, need_weights, average_attn_weights, *scoring)
    elif own is not None:
        out, _ = module.attend(q_BHLK, k_BHSK, v_BHSK, own, *drops, False, True, *scoring)
    else:  # the mask speaks of positions in a sample, not in the row
        heads = q_BHLK.split(query.lengths, 2), k_BHSK.split(key.lengths, 2), v_BHSK.split(key.lengths, 2)
        out = torch.cat(
            [module.attend(*one, mask, *drops, False, True, *scoring)[0] for one in zip(*heads, strict=True)], 2
        )
    out_PD = out.transpose(1, 2).flatten(2).flatten(0, 1)
    if places is not None:
        out_PD = out_PD.index_select(0, places)
        if weights is not None:
            lengths = torch.tensor(query.lengths, device=places.device)
            none_BL = torch.arange(query.longest, device=places.device) >= lengths[:, None]
            weights = weights.masked_fill(none_BL.view(len(lengths), *(1,) * (weights.dim() - 3), query.longest, 1), 0)
    if module.extended:
        out_PD = options.gated(module, query.values, out_PD)
    out_PD = module.out_proj(out_PD.unsqueeze(0)).squeeze(0)
    return query.like(out_PD), None if weights is None else weights.to(query.values.dtype)


def _of_rows(mask: Mask | None, query: Samples, key: Samples) -> Mask | None:
    """What keeps the samples of two rows apart and holds in each of them; None: it cannot be said of a row."""
    added = [term for term in ([] if mask is None else terms(mask)) if isinstance(term, Alibi)]
    others = [term for term in ([] if mask is None else terms(mask)) if not isinstance(term, Alibi)]
    band = as_band(joined(others))
    if band is None or (added and query.lengths != key.lengths):  # distances are counted in the row
        return None
    return joined([sequences(query.lengths, key.lengths, band), *added])


def _pad(heads_1HPK: Tensor, row: Samples, places: Tensor | None) -> Tensor:
    """(B, H, L, K) from (1, H, P, K); 0 where there is no position."""
    B, L, (_, H, _, K) = len(row.lengths), row.longest, heads_1HPK.shape
    heads_PHK = heads_1HPK[0].transpose(0, 1)
    if places is not None:
        heads_PHK = heads_PHK.new_zeros(B * L, H, K).index_copy(0, places, heads_PHK)
    return heads_PHK.view(B, L, H, K).transpose(1, 2)


def _is_worth(
    q_1HPK: Tensor, k: Tensor, v: Tensor, query: Samples, key: Samples, dropout: float, own: Mask | None
) -> bool:
    """Whether attention runs sequence by sequence: what is no position costs more than a loop would.

    On a GPU that is where its kernel takes `own`, the mask of the rows: any other would need their scores as a whole.
    """
    if takes(q_1HPK, k, v):
        rows = None if own is None else as_sequences(own)
        return dropout == 0 and rows is not None and takes_rows(rows)
    if not readable(q_1HPK):
        return False
    B = len(query.lengths)
    padded = B * query.longest * key.longest
    saved = padded - sum(queries * keys for queries, keys in zip(query.lengths, key.lengths, strict=True))
    pair = 2 * q_1HPK.shape[1] * (q_1HPK.shape[-1] + v.shape[-1])  # FLOPs of a query and a key
    return pair * saved >= cost_of_turn(q_1HPK, k, v, dropout) * max(B, 1)


def _settle(module: MultiheadAttention, inputs: _Three, masks: tuple[Any, ...], is_causal: bool) -> Mask | None:
    """The mask of each sample; refuses what says something of a padded batch."""
    key_padding_mask, attn_mask, query_padding_mask, mask = masks
    if not all(isinstance(given, Tensor) for given in inputs):
        raise invalid(_NAME, "query, key and value", "be tensors", ", ".join(type(given).__name__ for given in inputs))
    if not module.batch_first:
        raise invalid(_NAME, "batch_first", "be True for nested tensors, whose first dimension is the batch", False)
    for name, given in (("key", inputs[1]), ("value", inputs[2])):
        if not given.is_nested:
            rule = f"be nested where query, key or value is, since padding could not be told apart: {_CURE}"
            raise invalid(_NAME, name, rule, kind_of(given))
    for name, given in (("key_padding_mask", key_padding_mask), ("query_padding_mask", query_padding_mask)):
        if given is not None:
            raise invalid(_NAME, name, "be None beside nested tensors, which hold no padding", kind_of(given))
    if attn_mask is not None:
        rule = "be None beside nested tensors, whose samples differ in length; is_causal=True hides the future of each"
        raise invalid(_NAME, "attn_mask", rule, kind_of(attn_mask))
    if mask is None:
        return causal() if is_causal else None
    if not isinstance(mask, Mask) or _has_lengths(mask):
        rule = "be a Mask of headwise.masks without lengths of its own beside nested tensors, such as window(8, 0)"
        raise invalid(_NAME, "mask", rule, repr(mask) if isinstance(mask, Mask) else kind_of(mask))
    return mask & causal() if is_causal and not is_flag(mask) else mask


def _has_lengths(mask: Mask) -> bool:
    return mask.extent[2:] != (None, None) or any(map(_has_lengths, mask.parts))


def _rows(module: MultiheadAttention, inputs: _Three) -> tuple[Samples, Samples, Samples]:
    """Each distinct input once, so that self-attention stays recognisable by identity."""
    query, key, value = inputs
    query_row = read_samples(_NAME, "query", query)
    key_row = query_row if key is query else read_samples(_NAME, "key", key)
    value_row = key_row if value is key else query_row if value is query else read_samples(_NAME, "value", value)
    widths = (module.embed_dim, module.kdim, module.vdim)
    for name, row, width in zip(("query", "key", "value"), (query_row, key_row, value_row), widths, strict=True):
        if row.values.shape[-1] != width:
            raise invalid(_NAME, name, f"be {width} wide", row.values.shape[-1])
    if len(key_row.lengths) != len(query_row.lengths):
        batch = len(query_row.lengths)
        raise invalid(_NAME, "key", f"have the query's batch size {batch}", len(key_row.lengths))
    if value_row.lengths != key_row.lengths:
        rule = f"have the key's lengths, {list(key_row.lengths)}"
        raise invalid(_NAME, "value", rule, list(value_row.lengths))
    return query_row, key_row, value_row


def read_samples(function: str, argument: str, given: Tensor) -> Samples:
    """(P, D) and the lengths of a jagged, strided nested or dense batch.

    Raises:
        ValueError: it is not (B, *, D), or its values are not all in its samples.
    """
    if given.dim() != 3 or getattr(given, "_ragged_idx", 1) != 1:
        rule = "be (B, *, D), with samples of unequal lengths and one width"
        raise invalid(function, argument, rule, f"{given.dim()}-D" if given.dim() != 3 else "another ragged dimension")
    if not given.is_nested:
        values, lengths = given.flatten(0, 1), (given.shape[1],) * given.shape[0]
    elif given.layout != torch.jagged:
        samples = given.unbind()
        values, lengths = torch.cat(samples), tuple(len(sample) for sample in samples)
    else:
        jagged: Any = given
        values, bounds = jagged.values(), jagged.offsets().tolist()
        if jagged.lengths() is not None or bounds[0] != 0 or bounds[-1] != len(values):
            rule = "hold its samples without holes between them; .contiguous() closes the holes"
            raise invalid(function, argument, rule, f"{len(values)} positions and offsets {bounds}")
        lengths = tuple(after - before for before, after in itertools.pairwise(bounds))
    return Samples(values, lengths, given)
