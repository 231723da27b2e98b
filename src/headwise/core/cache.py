"""Keys and values of earlier calls, so that decoding computes what is new and nothing twice.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width.

A cache is a plain object that the caller holds and passes with each call. It is no part of the module and so never in
a checkpoint. Its length is a Python number: eager code attends to views of what is filled and to nothing else, and
`torch.compile` makes a symbol of it at the second length it meets, so that no length is compiled for itself. For that
the cache has to be an argument or a local variable of what is compiled: numbers in globals are constants to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from headwise._checks import invalid, kind_of, positive
from headwise.core.algebra import Mask
from headwise.core.backends import readable
from headwise.core.inputs import Masks
from headwise.core.lowering import Size, version
from headwise.core.masks import window
from headwise.core.shifting import shifted

if TYPE_CHECKING:
    from headwise.core.multihead import MultiheadAttention

__all__ = ["Cache", "CacheList", "CrossCache", "RollingCache", "StaticCache"]

_CALLER = "MultiheadAttention"
_Result = TypeVar("_Result")


class Cache:
    """What `StaticCache`, `RollingCache` and `CrossCache` have in common; make one of these.

    One cache belongs to one attention of one model: the first module that it is passed to. A copy (`copy.deepcopy`)
    belongs to nobody yet, so that a prompt that many answers share is read once.

    Attributes:
        length: positions seen so far, which is the position of the next token; what a sample's padding takes counts.
    """

    def __init__(self) -> None:
        self.length = 0
        self._owner: int | None = None
        self._held: tuple[Tensor, ...] = ()  # keys, values and, if any are padding, which: (B, G or 1, capacity, *)
        self._first = self._end = 0  # of what is filled

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Sample b becomes what sample indices[b] was: the beams that go on, or a prompt that several beams start from.

        Args:
            indices: integers in 0 .. B - 1, as many as there shall be samples; they may repeat and leave out.

        Raises:
            ValueError: they are not, or nothing is cached yet.

        Cost: a copy of what is filled.
        """
        name = f"{type(self).__name__}.reorder"
        if not self._held:
            raise invalid(name, "cache", "hold something before it can be reordered", repr(self))
        chosen = _indices(name, indices, self._held[0])
        count = chosen.shape[0]
        held = []
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            for buffer in self._held:
                filled = buffer[:, :, : self._end].index_select(0, chosen)
                if self._end == buffer.shape[2]:
                    buffer = filled
                else:
                    if count != buffer.shape[0] or buffer.is_inference():
                        buffer = buffer.new_zeros(count, *buffer.shape[1:])
                    buffer[:, :, : self._end] = filled
                held.append(buffer)
        self._held = tuple(held)

    def reset(self) -> None:
        """Forget everything, for the next batch; memory and module stay."""
        self.length = self._first = self._end = 0
        self._held = self._held[:2]  # what it held is overwritten before it is seen again

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments()}length={self.length})"

    def _arguments(self) -> str:
        return ""

    def admit(self, module: MultiheadAttention, key: Tensor, value: Tensor) -> None:
        """Hold that this module may use it, with these inputs.

        Raises:
            ValueError: another module has used it.
        """
        if self._owner is None:
            self._owner = id(module)
        elif self._owner != id(module):
            rule = "be used by one attention alone; each layer needs its own, as make_cache of a stack gives them"
            raise invalid(_CALLER, "cache", rule, f"one that another module has used, {self!r}")

    @property
    def places(self) -> tuple[int, int]:
        """The positions of the first new query and of the first new key, before a call."""
        return self.length, self.length

    def ahead(self, queries: int, keys: int) -> int:
        """How many of the keys come before the first query's own position, after `extend`."""
        return keys - queries

    def project(
        self, module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, L, K), and the keys and values (B, G, S, K) that `extend` is to be given."""
        return module._project(query, key, value, module.head_dim, module.batch_first)

    def extend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """All keys and values that these queries may see, and the mask of this call, spoken of these keys."""
        raise NotImplementedError(f"{type(self).__name__}.extend: make a StaticCache, a RollingCache or a CrossCache")


class StaticCache(Cache):
    """Keeps all keys and values, in memory that is taken once.

    Args:
        max_length: positions that it has room for, prompt and padding included.

    Raises:
        ValueError: max_length below 1; in use, more positions than that, another batch size, head count, dtype or
            device than before.

    Batch size, heads, dtype and device are those of the first keys it is given, which is when memory is taken:
    2*B*G*max_length*K numbers.

    Example:
        >>> import torch
        >>> from headwise import MultiheadAttention, StaticCache
        >>> mha, x = MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 5, 64)
        >>> with torch.no_grad():
        ...     whole, _ = mha(x, x, x, is_causal=True)
        ...     cache = StaticCache(max_length=8)
        ...     for token in x.split(1, dim=1):
        ...         out, _ = mha(token, token, token, is_causal=True, cache=cache)
        >>> cache, torch.allclose(out, whole[:, -1:], atol=1e-6)
        (StaticCache(max_length=8, length=5), True)
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = positive("StaticCache", "max_length", max_length)

    def is_ready(self, module: MultiheadAttention) -> bool:
        """Whether the module has used it before, and no padding is held that would have to be hidden."""
        return self._owner == id(module) and len(self._held) == 2

    def append(self, key: Tensor, value: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add new positions; for those who call `headwise.attention` themselves.

        Args:
            key: (B, G, S, K), the new ones, any number of positions.
            value: (B, G, S, V), likewise.
            padding: (B, S) bool, True = padding: set to 0, and remembered for calls of a module.

        Returns:
            Keys and values that queries at the new positions may see, these included: (B, G, S_all, K), the last of
            them at position `length - 1`. Views: they change with the next call.

        Raises:
            ValueError: see the class; nothing is written then.

        Cost: a copy of what is new.
        """
        new = self._checked(key, value, padding)
        self._make_room(new)
        count = key.shape[2]
        for buffer, part in zip(self._held, new, strict=True):
            buffer.narrow(2, self._end, count).copy_(part)
        self._end += count
        self.length += count
        first, held = self._first, self._end - self._first
        return self._held[0].narrow(2, first, held), self._held[1].narrow(2, first, held)

    def extend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        first_query, L = self.length, query.shape[2]
        key, value = self.append(key, value, padding)
        size = Size(key.shape[0], query.shape[1], L, key.shape[2], key.device)
        mask = self._seen(mask, first_query, size)
        if len(self._held) == 3:
            hidden = self._held[2][:, :, self._first : self._end]
            mask = _and(mask, _Remembered(~hidden.transpose(2, 3)))
        return key, value, mask

    def _seen(self, mask: Mask | None, first_query: int, size: Size) -> Mask | None:
        return shifted(mask, first_query, self.length - size.keys, size)

    def _make_room(self, new: tuple[Tensor, ...]) -> None:
        asked = new[0].shape[2]
        if self.length + asked > self.max_length:
            # no numbers that change from call to call: to a compiler they are symbols, which it cannot print
            known = "" if torch.compiler.is_compiling() else f" {asked} more after {self.length}"
            rule = (
                f"have room for all positions; make one with a larger max_length than {self.max_length}, or reset() it"
            )
            raise invalid(type(self).__name__, "cache", rule, f"asked for{known}", key=new[0])
        if len(self._held) < len(new) or self._is_locked():
            self._take(new, self.max_length, self._end)

    def _is_locked(self) -> bool:
        """Whether it was copied or reordered in inference mode, which forbids to write to it outside of that mode."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return False
        return any(buffer.is_inference() for buffer in self._held)

    def _take(self, new: tuple[Tensor, ...], capacity: int, kept: int = 0) -> None:
        """Memory for what is new, and in it the last `kept` positions of the old."""
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            taken = [part.new_zeros(*part.shape[:2], capacity, part.shape[3]) for part in new]
        for buffer, old in zip(taken, self._held, strict=False):
            buffer[:, :, :kept] = old[:, :, self._end - kept : self._end]
        self._held, self._first, self._end = tuple(taken), 0, kept

    def _checked(self, key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, ...]:
        """What is to be written, in the order of `_held`; padding is 0 and hides no NaN."""
        name = type(self).__name__
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise invalid(name, "key and value", "be (B, G, S, K) with the same B, G and S", kind_of(key), value=value)
        for word, part, buffer in zip(("key", "value"), (key, value), self._held, strict=False):
            B, G, _, K = buffer.shape
            fits = part.shape[0] == B and part.shape[1] == G and part.shape[3] == K
            if not fits or part.dtype != buffer.dtype or part.device != buffer.device:
                rule = f"fit what is cached, {buffer.dtype} ({B}, {G}, *, {K}) on {buffer.device}; reset() keeps these"
                raise invalid(name, word, f"{rule}, a new cache does not", f"{kind_of(part)} on {part.device}")
        if padding is None and len(self._held) < 3:
            return key, value
        B, _, S, _ = key.shape
        if padding is None:
            return key, value, key.new_zeros(B, 1, S, 1, dtype=torch.bool)
        if padding.dtype != torch.bool or padding.shape != (B, S):
            rule = f"be bool (B, S) = {(B, S)} for the new keys, True = padding; the cache remembers those before"
            raise invalid(name, "padding", rule, kind_of(padding), key=key)
        hidden = padding[:, None, :, None]
        return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), hidden

    def _arguments(self) -> str:
        return f"max_length={self.max_length}, "


class RollingCache(StaticCache):
    """Keeps the last keys and values only, for sequences without an end.

    A query at position p sees the positions p - window + 1 .. p, in calls of any number of tokens: what the full
    forward shows it under `masks.window(window - 1, None)`, beside all masks of the call. Hiding the future is the
    call's own business, as everywhere (`is_causal=True`).

    Args:
        window: positions that a query sees, its own included.

    Raises:
        ValueError: window below 1; in use, as `StaticCache`, but for its length.

    Memory is twice the window, or one long call: positions stay in order, and are moved once in `window` steps.

    Example:
        >>> import torch
        >>> from headwise import MultiheadAttention, RollingCache, masks
        >>> mha, x = MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 11, 64)
        >>> with torch.no_grad():
        ...     whole, _ = mha(x, x, x, mask=masks.window(3, 0))
        ...     cache = RollingCache(window=4)
        ...     for some in x.split(5, dim=1):
        ...         out, weights = mha(some, some, some, is_causal=True, cache=cache)
        >>> cache, torch.allclose(out, whole[:, -1:], atol=1e-6), weights.shape
        (RollingCache(window=4, length=11), True, torch.Size([2, 1, 4]))
    """

    def __init__(self, window: int) -> None:
        Cache.__init__(self)
        self.window = positive("RollingCache", "window", window)

    def _make_room(self, new: tuple[Tensor, ...]) -> None:
        asked = new[0].shape[2]
        # the first new query sees window - 1 before it; nobody will see what is older
        kept = min(self._end - self._first, self.window - 1)
        self._first = self._end - kept
        if len(self._held) < len(new) or self._end + asked > self._held[0].shape[2] or self._is_locked():
            self._take(new, max(2 * self.window, kept + asked), kept)

    def _seen(self, mask: Mask | None, first_query: int, size: Size) -> Mask | None:
        limit = window(self.window - 1, None)
        return super()._seen(limit if mask is None else mask & limit, first_query, size)

    def _arguments(self) -> str:
        return f"window={self.window}, "


class CrossCache(Cache):
    """Keys and values of a memory, projected at the first call and read in all others.

    The caller passes the same memory (key and value) and the same masks with every call, as without a cache. Another
    tensor is compared with the first one, and taken if the numbers are the same; that is a look at its shape where
    numbers cannot be read without a wait (on a GPU, in compiled code), and after `reorder`, when the memory may have
    been reordered too. `length` counts queries, so that masks of positions hold from call to call.

    Raises:
        ValueError: in use, another memory than at the first call; `reset()` takes a new one.

    Holds the memory itself, and 2*B*G*S*K numbers.

    Example:
        >>> import torch
        >>> from headwise import CrossCache, MultiheadAttention
        >>> mha, memory = MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 7, 64)
        >>> cache = CrossCache()
        >>> with torch.no_grad():
        ...     for token in torch.randn(2, 3, 64).split(1, dim=1):
        ...         out, weights = mha(token, memory, memory, cache=cache)
        >>> cache, weights.shape
        (CrossCache(length=3), torch.Size([2, 1, 7]))
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: tuple[tuple[Tensor, int], ...] | None = None  # key and value, and their versions

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._memory is not None:  # a copy counts anew, but what was written to is not forgotten: no version is -1
            state["_memory"] = tuple((tensor, 0 if version(tensor) == at else -1) for tensor, at in self._memory)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._memory is not None:
            self._memory = tuple((tensor, at or version(tensor)) for tensor, at in self._memory)

    @property
    def places(self) -> tuple[int, int]:
        return self.length, 0

    def ahead(self, queries: int, keys: int) -> int:
        return self.length - queries

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        super().reorder(indices)
        self._memory = None

    def reset(self) -> None:
        """Forget the memory; the next call brings another."""
        super().reset()
        self._held, self._memory = (), None

    def admit(self, module: MultiheadAttention, key: Tensor, value: Tensor) -> None:
        super().admit(module, key, value)
        if self._held:
            self._recognize(module, key, value)
        else:
            self._memory = ((key, version(key)), (value, version(value)))

    def project(
        self, module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._held:
            query, key, value = super().project(module, query, key, value)
            self._held, self._end = (key.contiguous(), value.contiguous()), key.shape[2]
        else:
            query = module._project_query(query, module.head_dim, module.batch_first)
        return query, self._held[0], self._held[1]

    def extend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        first_query, L = self.length, query.shape[2]
        self.length += L
        size = Size(key.shape[0], query.shape[1], L, key.shape[2], key.device)
        return key, value, shifted(mask, first_query, 0, size)

    def _recognize(self, module: MultiheadAttention, key: Tensor, value: Tensor) -> None:
        cure = "be the memory of the first call; reset() the cache for another"
        batch = 0 if module.batch_first or key.dim() == 2 else 1
        B, _, S, _ = self._held[0].shape
        have = (1 if key.dim() == 2 else key.shape[batch], key.shape[-2 if batch == 0 else 0])
        if have != (B, S):
            raise invalid(_CALLER, "key", f"{cure}: (B, S) = {(B, S)}", have, key=key, value=value)
        for word, given, known in zip(("key", "value"), (key, value), self._memory or (), strict=False):
            first, at = known
            if given is first:
                if version(given) != at:
                    raise invalid(_CALLER, word, cure, "the same tensor, written to since", key=key, value=value)
            elif given.shape != first.shape or (
                readable(given) and readable(first) and (version(first) != at or not _same(given, first))
            ):
                raise invalid(_CALLER, word, cure, "other numbers", key=key, value=value)
        self._memory = ((key, version(key)), (value, version(value)))


class CacheList:
    """The caches of a stack, one for each block, or of a decoder block, `(own, cross)`; `make_cache` makes it.

    Args:
        caches: `Cache`s, or lists of them, in the order of the layers.

    Raises:
        ValueError: there is none, or something else.

    Attributes:
        length: positions seen so far.
    """

    def __init__(self, caches: Iterable[Cache | CacheList]) -> None:
        self._caches = tuple(caches) if isinstance(caches, Iterable) else (caches,)
        if not self._caches or not all(isinstance(cache, (Cache, CacheList)) for cache in self._caches):
            kinds = ", ".join(type(cache).__name__ for cache in self._caches) or "none"
            raise invalid("CacheList", "caches", "be caches, at least one", kinds)

    @property
    def length(self) -> int:
        return self._caches[0].length

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """`Cache.reorder` of all."""
        for cache in self._caches:
            cache.reorder(indices)

    def reset(self) -> None:
        """`Cache.reset` of all."""
        for cache in self._caches:
            cache.reset()

    def __len__(self) -> int:
        return len(self._caches)

    def __iter__(self) -> Iterator[Cache | CacheList]:
        return iter(self._caches)

    def __getitem__(self, index: int) -> Cache | CacheList:
        return self._caches[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._caches))})"


def all_or_nothing(cache: object, run: Callable[[], _Result]) -> _Result:
    """run(), after whose failure the caches are as they were: a call that is made again adds nothing twice.

    What it wrote lies behind what is filled, so that nobody sees it.
    """
    if cache is None or torch.compiler.is_compiling():
        return run()
    before = [(one, dict(one.__dict__)) for one in _walk(cache)]
    try:
        return run()
    except BaseException:
        for one, state in before:
            one.__dict__.update(state)
        raise


def _walk(cache: object) -> Iterator[Cache]:
    if isinstance(cache, Cache):
        yield cache
    elif isinstance(cache, CacheList):
        for one in cache:
            yield from _walk(one)


def self_cache(function: str, max_length: int | None, window: int | None) -> Cache:
    """The cache of a self-attention, of one kind or the other.

    Raises:
        ValueError: both sizes are given, or none.
    """
    if (max_length is None) == (window is None):
        rule = "be given, one of them: room for a whole sequence, or for the last positions of an endless one"
        raise invalid(function, "max_length or window", rule, (max_length, window))
    return RollingCache(window) if window is not None else StaticCache(positive(function, "max_length", max_length))


def open_cache(
    module: MultiheadAttention, cache: Cache | None, given: tuple[Tensor, Tensor, Tensor], masks: Masks
) -> tuple[Masks, Tensor | None]:
    """The masks of a call, without the padding of new keys if the cache is to remember it, and that padding (B, S).

    Raises:
        ValueError: it is no cache or another module's, gradients are recorded, the padding is not bool, or the memory
            is another one.
    """
    if cache is None:
        return masks, None
    shapes = dict(zip(("query", "key", "value"), given, strict=True))
    if not isinstance(cache, Cache):
        rule = "be a StaticCache, RollingCache or CrossCache"
        raise invalid(_CALLER, "cache", rule, type(cache).__name__, **shapes)
    if torch.is_grad_enabled():
        rule = "be used under torch.no_grad() or torch.inference_mode(), since its numbers carry no gradients"
        raise invalid(_CALLER, "cache", rule, "gradients enabled", **shapes)
    cache.admit(module, *given[1:])
    padding = masks[0]
    if padding is None or isinstance(cache, CrossCache):
        return masks, None
    if padding.dtype != torch.bool:
        rule = "be bool, True = padding, with a cache that is to remember it"
        raise invalid(_CALLER, "key_padding_mask", rule, padding.dtype, **shapes)
    return (None, *masks[1:]), padding if padding.dim() == 2 else padding[None]


class _Remembered(Mask):
    """Padding of all that is cached. It was silenced when it was written, so nobody has to look at the keys again."""

    def __init__(self, keep_B11S: Tensor) -> None:
        self.tensors = (keep_B11S,)
        self.extent = (keep_B11S.shape[0], 1, None, keep_B11S.shape[3])

    def keep(self, size: Size) -> Tensor | None:
        return self.tensors[0]

    def __repr__(self) -> str:
        return f"remembered(padding {tuple(self.tensors[0].shape)})"


def _and(left: Mask | None, right: Mask) -> Mask:
    return right if left is None else left & right


def _indices(function: str, indices: Tensor | Sequence[int], held: Tensor) -> Tensor:
    B = held.shape[0]
    rule = f"be integers in 0 .. {B - 1}, as many as there shall be samples"
    try:
        chosen = indices if isinstance(indices, Tensor) else torch.tensor(indices, device=held.device)
    except (TypeError, ValueError, RuntimeError) as error:  # which of them depends on what holds no numbers
        raise invalid(function, "indices", rule, kind_of(indices), held=held) from error
    if chosen.dim() != 1 or chosen.dtype not in (torch.int32, torch.int64) or chosen.device != held.device:
        raise invalid(function, "indices", f"{rule}, on {held.device}", f"{kind_of(chosen)} on {chosen.device}")
    if readable(chosen) and chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < B:
        raise invalid(function, "indices", rule, chosen.tolist(), held=held)
    return chosen


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether the numbers are the same, those that padding may hold included: NaN is NaN."""
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
