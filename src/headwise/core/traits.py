"""What the structure of a mask tells without its numbers."""

from __future__ import annotations

import math

from torch import Tensor

from headwise.core.algebra import Appended, Given, Mask, Padding, Part, Prefix, TorchMask, terms
from headwise.core.lowering import Size


def per_key(mask: Mask) -> bool:
    """Whether it hides a key from all queries or from none, as far as its structure tells."""
    if isinstance(mask, TorchMask) and mask.argument == "key_padding_mask":
        return True
    if isinstance(mask, Given):
        return mask.tensors[0].shape[-2] == 1
    return isinstance(mask, (Padding, Prefix)) or (bool(mask.parts) and all(per_key(part) for part in mask.parts))


def hides_keys(mask: Mask) -> bool:
    """Whether it hides keys from all queries, and says no more than that."""
    return per_key(mask) and not _adds(mask)


def _adds(mask: Mask) -> bool:
    return mask.adds or any(map(_adds, mask.parts))


def in_rows(mask: Mask) -> bool:
    """Whether what it says of all rows is at hand, or so little that single rows may be picked from it."""
    if isinstance(mask, Part):
        return isinstance(mask.parts[0], (Given, Padding, Prefix))
    return isinstance(mask, (Given, Padding, Prefix))


def visible_keys(mask: Mask | None, size: Size) -> Tensor | None:
    """(B or 1, H or 1, 1, S or 1) bool, False where no query of the sample may see the key; None: all visible.

    Only terms that do not depend on the query are asked, so that nothing of size L x S is read.
    """
    keys = None
    for term in [] if mask is None else terms(mask):
        if isinstance(term, Appended):
            seen = term.pad(visible_keys(term.parts[0], term.inner_size(size)), size, True)
        elif per_key(term):
            seen, score = term.keep(size), term.score(size)
            seen = seen if score is None else score != -math.inf
        else:
            continue
        keys = seen if keys is None else keys if seen is None else keys & seen
    return keys
