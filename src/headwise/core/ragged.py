"""What masks say in fewer words, found by reading their numbers: lengths, and the causal flag.

Letters: B batch, L query positions, S key positions.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.core.lowering import Lowered, Ragged, Size
from headwise.core.masks import Documents, Given, Mask, causal, is_flag, per_key, terms


class Sequences(Mask):
    """What `documents` says of sequences that lie one after the other, given by their lengths."""

    def __init__(self, ragged: Ragged) -> None:
        self.ragged = ragged
        self.extent = (1, 1, sum(ragged.queries), sum(ragged.keys))

    def keep(self, size: Size) -> Tensor | None:
        both = (torch.tensor(lengths, dtype=torch.long, device=size.device) for lengths in self.ragged[:2])
        ids = [torch.repeat_interleave(lengths) for lengths in both]
        return Documents(*ids).keep(size)

    def _arguments(self) -> str:
        return f"{list(self.ragged.queries)}"


def sequences(queries: Sequence[int], keys: Sequence[int] | None = None) -> Mask:
    """Sequences one after the other in a single row: `documents` for lengths that are known. keys=None: as queries."""
    return Sequences(Ragged(tuple(queries), tuple(queries if keys is None else keys), True))


def with_flag(mask: Mask, size: Size) -> Mask:
    """The same mask, with `causal()` in the place of a tensor that says just that. Reads the tensor's numbers.

    A kernel skips half of the work for the flag, and has a tensor to read else. Where the flag is there already, a
    tensor that hides nothing but the future is left out.
    """
    parts, flag, found = [], any(map(is_flag, terms(mask))), False
    for term in terms(mask):
        if isinstance(term, Given) and _says_causal(term, size, flag):
            found = True
        else:
            parts.append(term)
    if not found:
        return mask
    first, *rest = parts if flag else [causal(), *parts]
    return functools.reduce(operator.and_, rest, first)


def _says_causal(term: Given, size: Size, flag: bool) -> bool:
    """Whether it hides the future and nothing else; with the flag beside it, whether it hides nothing else."""
    keep, score = term.keep(size), term.score(size)
    tensor = keep if score is None else score
    if tensor is None or tensor.shape != (1, 1, size.queries, size.keys) or tensor.requires_grad:
        return False
    if tensor.numel() == 0:
        return False
    tensor_LS = tensor[0, 0]
    hidden = False if score is None else -math.inf
    if tensor_LS[-1, 0] == hidden or not (flag or tensor_LS[0, -1] == hidden):
        return False  # one cheap look settles most masks
    if score is None:
        past = torch.ones_like(tensor_LS).tril_()
        return torch.equal(tensor_LS.tril() if flag else tensor_LS, past)
    if flag:
        return not tensor_LS.tril().any()
    return torch.equal(tensor_LS, torch.full_like(tensor_LS, -math.inf).triu_(1))


def lower_to_lengths(mask: Mask, size: Size) -> Lowered | None:
    """The mask as lengths and the causal flag, if it says no more than that. Reads the numbers of its tensors.

    Padding has to be on the right, documents in one piece each and in the same order for queries and keys.
    """
    causal_flag, found = False, None
    for term in terms(mask):
        if is_flag(term):
            causal_flag = True
            continue
        if found is not None:
            return None
        if isinstance(term, Sequences):
            found = term.ragged
        elif isinstance(term, Documents):
            found = _pieces(term, size)
        elif per_key(term):
            found = _beginnings(term, size)
        if found is None:
            return None
    if found is not None and causal_flag and found.packed and found.queries != found.keys:
        return None  # the flag speaks of positions in the row
    if found is None or (found.packed and (size.batch, size.queries, size.keys) != (1, *map(sum, found[:2]))):
        return None  # what does not fit is named where it is written out
    return Lowered(causal_flag, ragged=found)


def _beginnings(term: Mask, size: Size) -> Ragged | None:
    """How many keys of each sample are visible, if they are its first ones, for all heads."""
    keep, score = term.keep(size), term.score(size)
    if keep is None or score is not None or keep.shape[1] != 1:
        return None
    keep_BS = keep[:, 0, 0].expand(size.batch, size.keys)
    lengths = keep_BS.sum(dim=1)
    if not torch.equal(keep_BS, torch.arange(size.keys, device=size.device) < lengths[:, None]):
        return None
    return Ragged((size.queries,) * size.batch, tuple(lengths.tolist()), False)


def _pieces(term: Documents, size: Size) -> Ragged | None:
    """The lengths of documents that are in one piece each."""
    if any(tensor.dim() == 2 and tensor.shape[0] != 1 for tensor in term.tensors):
        return None
    ids, lengths = [], []
    for tensor in term.tensors:
        names, counts = torch.unique_consecutive(tensor.reshape(-1), return_counts=True)
        ids.append(names.tolist())
        lengths.append(tuple(counts.tolist()))
    if ids[0] != ids[1] or len(set(ids[0])) != len(ids[0]):
        return None
    return Ragged(lengths[0], lengths[1], True)
