"""Masks of a whole sequence, as they are for its later positions: what a cache does to a mask.

Letters: B batch, H query heads, L query positions, S key positions.
"""

from __future__ import annotations

from headwise.core.algebra import Documents, Given, Mask, rebuilt, terms
from headwise.core.lowering import Band, Rectangle, Size
from headwise.core.tiling import joined


def shifted(mask: Mask | None, query: int, key: int, size: Size) -> Mask | None:
    """A mask of a whole sequence, as it is for the queries from position `query` on and the keys from `key` on.

    What speaks of positions is moved; of tensors, whose rows are these queries, the last keys are taken. What hides
    none of these keys is left out.

    Raises:
        ValueError: a tensor does not speak of all keys up to the last.
    """
    found = []
    for term in [] if mask is None else terms(_moved(mask, query, key, size)):
        band = term.band()
        if band is None or band.within(size.queries, size.keys) != Band():
            found.append(term)
    return joined(found)


def _moved(mask: Mask, query: int, key: int, size: Size) -> Mask:
    if mask.parts:
        return rebuilt(mask, [_moved(part, query, key, size) for part in mask.parts])
    if isinstance(mask, (Given, Documents)):
        query = 0
    if query == key == 0:
        return mask
    B, _, L, S, _ = size
    part = Rectangle((0, B), (query, query + L), (key, key + S))
    return mask.cut(part, size._replace(queries=query + L, keys=key + S))
