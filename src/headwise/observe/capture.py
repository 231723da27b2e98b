"""Seeing the attention of a model's layers while it runs, headwise's and torch's alike, without changing a bit of it.

For one forward pass, and no longer, the `forward` of each attention is stood in for by one that calls it and then shows
what went in. Hooks would not do: any hook below a `nn.TransformerEncoderLayer` makes it take another path, with other
numbers; the path it would have taken calls no child. So a layer is watched as well, and where its attention was not
called, what it must have received follows from what the layer did.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, D model width, K head width, R
rows that are looked at.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.core.algebra import Mask, appended, both, terms
from headwise.core.backends import Request, eager
from headwise.core.layouts import LOOKS_ONLY, is_hooked
from headwise.core.lowering import Band, Lowered, Rectangle, Size
from headwise.core.masks import causal, prefix, read_torch, window
from headwise.core.multihead import Attend
from headwise.core.tiling import Sequences, joined
from headwise.core.traits import hides_keys, per_key
from headwise.observe.finding import Layer, while_compiling
from headwise.observe.probes import BARELY

__all__ = ["Capture", "Sample", "Seen", "Unsupported"]


class Sample(NamedTuple):
    """One sample of one call of an attention.

    Attributes:
        queries: L, padding included.
        keys: S, padding and appended keys included.
        appended: the last keys, which the module appends to all.
        query: gives (1, H, R, K) of R positions.
        key: gives (1, G, S, K).
        mask: of (1, H, L, S); None: nothing is hidden.
        real_queries: (R,) int64, the positions that are not padding; None: all.
        real_keys: (R,) int64, likewise, with the appended ones; None: all.
        softcap: as in `headwise.attention`.
        sink: likewise.
        device: of all of them.
    """

    queries: int
    keys: int
    appended: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[], Tensor]
    mask: Mask | None
    real_queries: Tensor | None
    real_keys: Tensor | None
    softcap: float | None
    sink: Tensor | None
    device: torch.device

    @property
    def num_queries(self) -> int:
        """Real ones."""
        return self.queries if self.real_queries is None else len(self.real_queries)

    @property
    def num_keys(self) -> int:
        """Real ones."""
        return self.keys if self.real_keys is None else len(self.real_keys)

    def places(self, at: Sequence[int]) -> list[int]:
        """Positions with padding, of positions without."""
        return list(at) if self.real_queries is None else cast("list[int]", self.real_queries[list(at)].tolist())

    def stretch(self) -> tuple[tuple[int, int], Mask | None, Tensor | None]:
        """The keys that have to be looked at, from the first to behind the last, with the mask and the real ones of it.

        Where the real ones lie side by side, they are all, and what hides the others goes from the mask.
        """
        if self.real_keys is None or self.mask is None or self.appended:
            return (0, self.keys), self.mask, self.real_keys
        first, last = int(self.real_keys[0]), int(self.real_keys[-1]) + 1
        if last - first != len(self.real_keys):
            return (0, self.keys), self.mask, self.real_keys
        return (first, last), joined([term for term in terms(self.mask) if not hides_keys(term)]), None

    def request(self, places: Sequence[int]) -> Request:
        """Queries of these positions, padding counted, and all keys, for `headwise.observe.probes`."""
        query = self.query(torch.tensor(places, dtype=torch.int64, device=self.device)).detach()
        key = self.key().detach()
        grouped = query.shape[1] != key.shape[1]
        return Request(query, key, key, Lowered(), grouped=grouped, softcap=self.softcap, sink=self.sink)


class Seen(NamedTuple):
    """One call of an attention, after it returned.

    Attributes:
        layer: which.
        kind: "self" where queries and keys are made of one tensor, "cross" where not.
        samples: B, or how many sequences lie in a row.
        sample: gives one of them.
    """

    layer: Layer
    kind: str
    samples: int
    sample: Callable[[int], Sample]


# --- Standing in for forward ------------------------------------------------------------------------------------------


class Unsupported(Exception):
    """An attention that was called in a way that nothing can be told of."""


class Capture:
    """Shows each attention of some layers that this thread runs between `open` and `close`, or inside of a `with`.

    Args:
        layers: of one model.
        see: is called after each attention with a function that tells what it was: a `Seen`, or None where it was seen
            already; that may raise `Unsupported`, or anything where the call was odd. What `see` raises reaches the
            model's caller.
    """

    def __init__(self, layers: Sequence[Layer], see: Callable[[Callable[[], Seen | None]], None]) -> None:
        self.layers, self.see = layers, see
        self.thread, self.is_open = 0, False
        self.about: dict[int, tuple[bool, Tensor | None, bool]] = {}
        self.called: set[int] = set()
        self._stand_ins: list[_StandIn] = []

    def open(self) -> None:
        """Begin."""
        self.thread, self.is_open = threading.get_ident(), True
        try:
            for layer in self.layers:
                for stand_in in _stand_ins(self, layer):
                    self._stand_ins.append(stand_in)
                    object.__setattr__(stand_in.module, "forward", stand_in)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave nothing behind; a second call does nothing. Any thread may, in any order with other captures."""
        self.is_open = False
        while self._stand_ins:
            self._stand_ins.pop().leave()

    def begun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a model that is an attention itself, and whose `forward` was looked up before `open`."""
        for stand_in in self._stand_ins:
            if len(stand_in.layer.path) == 1 and stand_in.before_it is not None:
                stand_in.before_it(args, kwargs)

    def returned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Likewise, after it returned."""
        for stand_in in self._stand_ins:
            if stand_in.module is stand_in.layer.path[0] and stand_in.tell is not None:
                self.see(functools.partial(stand_in.tell, args, kwargs))

    def __enter__(self) -> Capture:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StandIn:
    """What a module's `forward` is meanwhile: it calls it, and has its arguments looked at.

    A class, so that a copy of the model, in memory or in a file, that is made meanwhile has its own `forward`.
    """

    def __init__(
        self,
        capture: Capture,
        layer: Layer,
        module: nn.Module,
        tell: Callable[[Any, Any], Seen | None] | None,
        before_it: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self.capture, self.layer, self.module, self.tell, self.before_it = capture, layer, module, tell, before_it
        self.before, self.forward = module.__dict__.get("forward"), module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _note_traced(self.layer)
            return self.forward(*args, **kwargs)
        now = self.capture
        if not now.is_open or threading.get_ident() != now.thread or not eager():
            return self.forward(*args, **kwargs)
        if self.before_it is not None:
            self.before_it(args, kwargs)
        try:
            out = self.forward(*args, **kwargs)
        except Exception:
            raise
        except BaseException:  # torch calls no hook then
            now.close()
            raise
        if self.tell is not None and now.is_open:
            now.see(functools.partial(self.tell, args, kwargs))
        return out

    def leave(self) -> None:
        """Give its place back, unless somebody else took it; who stands in for a stand-in that left takes it along."""
        at = self.module.__dict__.get("forward")
        while isinstance(at, _StandIn) and not at.capture.is_open:
            at = at.before
        if at is None:
            self.module.__dict__.pop("forward", None)
        else:
            object.__setattr__(self.module, "forward", at)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return _same, (self.before,)
        return _own, (self.module,)


@while_compiling
def _note_traced(layer: Layer) -> int:
    layer.traced = True
    return 0


def _own(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


setattr(_StandIn, LOOKS_ONLY, True)


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _stand_ins(now: Capture, layer: Layer) -> Iterator[_StandIn]:
    attend = layer.module._modules.get("attend")
    if isinstance(attend, Attend):
        yield _StandIn(now, layer, layer.module, None, functools.partial(_note, now, layer))
        yield _StandIn(now, layer, attend, functools.partial(_ours, now, layer))
        return
    yield _StandIn(now, layer, layer.module, functools.partial(_torchs, now, layer))
    if layer.owner is not None:
        forget = functools.partial(_forget, now, layer)
        yield _StandIn(now, layer, layer.owner, functools.partial(_fused, now, layer), forget)


@functools.lru_cache(maxsize=64)
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Of its arguments, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _given(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call that was right, by their names."""
    return {**dict(zip(_names(forward), args, strict=False)), **kwargs}


# --- Our attention ----------------------------------------------------------------------------------------------------

_ATTENDS = _names(Attend.forward)


def _note(now: Capture, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep what `attend` is not told: whether queries are keys, and which queries are padding."""
    query = args[0] if args else kwargs.get("query")
    key = args[1] if len(args) > 1 else kwargs.get("key")
    now.about[id(layer.module)] = (query is key, kwargs.get("query_padding_mask"), kwargs.get("cache") is not None)


def _ours(now: Capture, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
    bound = {**dict(zip(_ATTENDS, args, strict=False)), **kwargs}
    query, key, mask = bound["query"], bound["key"], bound.get("mask")
    is_self, query_padding, cached = now.about.get(id(layer.module), (False, None, False))
    module: Any = layer.module
    extra = int(getattr(module, "bias_k", None) is not None) + int(getattr(module, "add_zero_attn", False))
    scoring = bound.get("softcap"), bound.get("sink")
    rows = [term for term in ([] if mask is None else terms(mask)) if isinstance(term, Sequences)]

    def sample(at: int) -> Sample:
        if mask is not None and rows:
            return _of_row(query, key, mask, rows[0], at, scoring)
        padded = None if query_padding is None else query_padding.reshape(query.shape[0], -1)[at]
        own = is_self and not cached
        return _of_batch(query, key, mask, at, extra, own, padded, scoring)

    kind = "self" if is_self else "cross"
    return Seen(layer, kind, len(rows[0].queries) if rows else query.shape[0], sample)


def _of_batch(
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    at: int,
    extra: int,
    own: bool,
    padded: Tensor | None,
    scoring: tuple[float | None, Tensor | None],
) -> Sample:
    (B, H, L, _), S = query.shape, key.shape[2]
    size = Size(B, H, L, S, query.device)
    cut = None if mask is None else mask.cut(Rectangle((at, at + 1), (0, L), (0, S)), size)
    real_queries, real_keys = real_positions(cut, size._replace(batch=1), extra, own, padded)
    query, key = query[at : at + 1], key[at : at + 1]
    return Sample(
        L, S, extra, lambda at: query[:, :, at], lambda: key, cut, real_queries, real_keys, *scoring, query.device
    )


def _of_row(
    query: Tensor, key: Tensor, mask: Mask, row: Sequences, at: int, scoring: tuple[float | None, Tensor | None]
) -> Sample:
    """A sequence of those that lie one after the other, in a packed call."""
    (B, H, L, _), S = query.shape, key.shape[2]
    size = Size(B, H, L, S, query.device)
    place, band = row.pieces(size)[at]
    others = joined([term for term in terms(mask) if term is not row])
    cut = None if others is None else others.cut(place._replace(samples=(0, 1)), size)
    own = of_band(band)
    if own is not None:
        cut = both(cut, own)
    q, k = query[:1, :, slice(*place.queries)], key[:1, :, slice(*place.keys)]
    return Sample(q.shape[2], k.shape[2], 0, lambda at: q[:, :, at], lambda: k, cut, None, None, *scoring, query.device)


def of_band(band: Band) -> Mask | None:
    """The mask that says what a band says."""
    ahead = None if band.right is None else causal(band.right)
    if ahead is not None and band.first:
        ahead = ahead | prefix(band.first)
    back = None if band.left is None else window(band.left, None)
    return ahead if back is None else both(ahead, back)


def real_positions(
    mask: Mask | None, size: Size, extra: int, own: bool, padded: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Which positions of one sample are not padding, as int64 positions; None: all.

    Keys that are hidden from every query are padding; so are the queries at their places, where queries are keys.
    Where all keys are hidden, they are taken for real: that is what is to be reported.
    """
    keep, own_keys = None, size.keys - extra
    if mask is not None and extra:
        mask = mask.cut(Rectangle((0, size.batch), (0, size.queries), (0, own_keys)), size)
    size = size._replace(keys=own_keys)
    for term in [] if mask is None else terms(mask):
        if per_key(term):
            for part in (term.keep(size), term.score(size)):
                if part is not None:
                    seen = (part if part.dtype == torch.bool else part > BARELY).amax(dim=1)[0, 0]
                    keep = seen if keep is None else keep & seen
    real_queries = None if padded is None else ~padded
    real_keys = None if keep is None or not bool(keep.any()) else keep.expand(own_keys)
    if real_queries is None and own and real_keys is not None and size.queries == own_keys:
        real_queries = real_keys
    if real_keys is not None:
        real_keys = F.pad(real_keys, (0, extra), value=True)
    return _positions(real_queries), _positions(real_keys)


def _positions(real: Tensor | None) -> Tensor | None:
    return None if real is None or bool(real.all()) else real.nonzero()[:, 0]


# --- Torch's attention ------------------------------------------------------------------------------------------------


def _torchs(now: Capture, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
    now.called.add(id(layer.module))
    if type(layer.module).forward is not nn.MultiheadAttention.forward:
        raise Unsupported(f"{type(layer.module).__name__}.forward may change its inputs before it attends")
    given = _given(nn.MultiheadAttention.forward, args, kwargs)
    return _of_call(
        layer,
        (given["query"], given["key"]),
        given.get("attn_mask"),
        given.get("key_padding_mask"),
        is_causal=bool(given.get("is_causal")),
        need_weights=bool(given.get("need_weights", True)),
    )


def _forget(now: Capture, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of earlier calls: what counts is whether the layer calls its attention now."""
    now.called.discard(id(layer.module))


def _fused(now: Capture, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen | None:
    """Of a layer that computed attention by itself, what its attention would have received."""
    if id(layer.module) in now.called:
        return None
    given, owner = _given(nn.TransformerEncoderLayer.forward, args, kwargs), layer.owner
    assert owner is not None
    if type(owner).forward is not nn.TransformerEncoderLayer.forward:
        raise Unsupported(f"{type(owner).__name__}.forward may have changed what torch's layer then fused")
    src, before = given["src"], owner.norm1 if owner.norm_first else None
    if before is not None and (type(before) is not nn.LayerNorm or is_hooked(before)):
        raise Unsupported("torch's fused layer read the norm without calling it")
    masks = given.get("src_mask"), given.get("src_key_padding_mask")
    return _of_call(layer, (src, src), *masks, before=before)


def _of_call(
    layer: Layer,
    given: tuple[Tensor, Tensor],
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    is_causal: bool = False,
    need_weights: bool = True,
    before: nn.Module | None = None,
) -> Seen:
    module = cast(nn.MultiheadAttention, layer.module)
    if "parametrizations" in module._modules:
        raise Unsupported("to read a parametrized weight once more may change it, or draw random numbers")
    (query, key), own = given, given[0] is given[1]
    if query.dim() == 2:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        first = True
    else:
        first = module.batch_first
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # then torch takes the hint for the mask
    else:
        is_causal = False
    mask = read_torch("watch", attn_mask, key_padding_mask, is_causal)
    B = query.size(0 if first else 1)

    def sample(at: int) -> Sample:
        x_LD, y_SD = (_one_of(x, at, first) for x in (query, key))
        return _of_torch(module, x_LD, y_SD, B, at, mask, own, before)

    return Seen(layer, "self" if own else "cross", B, sample)


def _one_of(x: Tensor, at: int, batch_first: bool) -> Tensor:
    """(L, D) of a batch, which may be nested."""
    if x.is_nested:
        return x.unbind()[at].detach()
    return (x[at] if batch_first else x[:, at]).detach()


def _of_torch(
    module: nn.MultiheadAttention,
    x_LD: Tensor,
    y_SD: Tensor,
    batch: int,
    at: int,
    mask: Mask | None,
    own: bool,
    before: nn.Module | None,
) -> Sample:
    extra = int(module.bias_k is not None) + int(module.add_zero_attn)
    H, L, S = module.num_heads, x_LD.shape[0], y_SD.shape[0]
    size = Size(batch, H, L, S, x_LD.device)
    cut = None if mask is None else mask.cut(Rectangle((at, at + 1), (0, L), (0, S)), size)
    cut = appended(cut, extra) if extra else cut
    real_queries, real_keys = real_positions(cut, size._replace(batch=1, keys=S + extra), extra, own, None)

    def normed(x: Tensor) -> Tensor:
        return x if before is None else cast(Tensor, before(x))

    def query(places: Tensor) -> Tensor:
        return _heads(module, normed(x_LD[places]), 0)

    def key() -> Tensor:
        k = _heads(module, normed(y_SD), 1)
        if module.bias_k is not None:
            k = torch.cat([k, module.bias_k.detach().to(k.dtype).view(1, H, 1, -1)], dim=2)
        return F.pad(k, (0, 0, 0, 1)) if module.add_zero_attn else k

    return Sample(L, S + extra, extra, query, key, cut, real_queries, real_keys, None, None, x_LD.device)


def _heads(module: nn.MultiheadAttention, x_RD: Tensor, which: int) -> Tensor:
    """(1, H, R, K): queries (0) or keys (1)."""
    D, bias = module.embed_dim, module.in_proj_bias
    part = slice(which * D, (which + 1) * D)
    if module._qkv_same_embed_dim:
        weight = module.in_proj_weight[part]
    else:
        weight = module.k_proj_weight if which else module.q_proj_weight
    projected = F.linear(x_RD, weight, None if bias is None else bias[part])
    H = module.num_heads
    return projected.view(len(x_RD), H, projected.shape[-1] // H).transpose(0, 1)[None]
