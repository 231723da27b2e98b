"""`MultiheadAttention`: torch's constructor, call and `state_dict`, one answer on every path.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, D model width, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise._checks import invalid, positive
from headwise.core import options
from headwise.core.algebra import Mask, terms
from headwise.core.backends import BACKENDS, PLAIN, TILED, eager, named, run_step, run_unmasked
from headwise.core.cache import Cache, StaticCache, all_or_nothing, open_cache
from headwise.core.explained import explain_module, some_weights
from headwise.core.functional import Explanation, TopWeights, prepare
from headwise.core.inputs import (
    Masks,
    check_inputs,
    check_shards,
    dropout_of,
    finish,
    once,
    settle_masks,
    still,
    wrong_kind,
)
from headwise.core.layouts import is_hooked
from headwise.core.nested import attend_nested
from headwise.core.packing import find_packed
from headwise.core.positions import Alibi
from headwise.core.projections import ProjectedAttention, call, direct
from headwise.core.tiling import Sequences

__all__ = ["Attend", "MultiheadAttention"]

_NAME = "MultiheadAttention"


class Attend(nn.Module):
    """The attention inside a module, without parameters: receives the final queries, keys, values and mask.

    A forward pre-hook on it sees `(query (B, H, L, K), key (B, G, S, K), value, mask)` of every call, whichever kernel
    runs; `headwise.attention_weights(query, key, mask=mask)` gives the weights. `key` ends in `bias_k` and the zeros.
    A module with a softcap or a sink passes them as the last two of ten: `softcap=given[8], sink=given[9]` there.
    """

    shards = 1  # processes that hold H heads each, in tensor parallelism by headwise.layers.tp_plan
    backend: str | None = None  # what `headwise.attention` is told

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        dropout: float = 0.0,
        drop: Callable[[Tensor], Tensor] | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, L, K), and weights (B, L, S), or (B, H, L, S) not averaged, or None."""
        grouped = False
        if query.shape[1] != key.shape[1]:  # a branch, for what may be a symbol in a compiled call
            grouped = True
        tiled = False if need_weights else None if self.backend is None else self.backend == TILED.name
        request = prepare(query, key, value, mask, None, dropout, drop, softcap, sink, grouped, tiled)
        if not need_weights:
            return named(_NAME, self.backend, request).run(request), None
        return PLAIN.run_with_average(request) if average_attn_weights else PLAIN.run_with_weights(request)


class MultiheadAttention(ProjectedAttention):
    """Multi-head attention, a drop-in for `torch.nn.MultiheadAttention`.

        out = out_proj(concat_h(softmax(q_h k_h^T / sqrt(K) + masks) v_h)),   q = q_proj(query), and so on

    Args:
        embed_dim: D, width of query and output; num_heads must divide it unless head_dim is given.
        num_heads: H, at least 1.
        dropout: probability in [0, 1] on the attention weights, in training.
        bias: adds a bias to all four projections.
        add_bias_kv: appends one learned key and value (`bias_k`, `bias_v`) that every query sees.
        add_zero_attn: appends a key and value of zeros that every query sees.
        kdim: width of the keys. None: embed_dim.
        vdim: width of the values. None: embed_dim.
        batch_first: True reads (B, L, D), False (L, B, D).
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.
        average_attn_weights: what `forward` does while its own argument is None.
        fused_qkv: True holds the input projections as torch's Parameters with one product, False as three `nn.Linear`.
        num_kv_heads: G, heads of keys and values, each shared by H / G query heads; must divide H. None: H.
        head_dim: K, the width of a head; q_proj then gives H*K, k_proj and v_proj G*K, out_proj takes H*K. None: D / H.
        positions: "rotary" turns queries and keys by their positions, "alibi" lowers scores by distance; or a `Rotary`
            or `Alibi` of `headwise.core.positions` with settings of its own, or a module called like `Rotary`, with
            (x (B, H, L, K), positions). Appended keys have no position. None: no positions.
        qk_norm: norms queries and keys over K, before positions: True or "rmsnorm" (eps 1e-6), "layernorm", or a
            callable that makes a module of K. Children `q_norm`, `k_norm`.
        gate: multiplies what the heads found by sigmoid(gate_proj(query)), before out_proj; `gate_proj` gives H*K.
        sink: a learned logit per head, the Parameter `sink` (H,), which takes weight and gives nothing; starts at 0.
        softcap: bounds the scaled scores to +-softcap by tanh, before the mask. None: unbounded.
        backend: what `headwise.attention` is told: "tiled", "sdpa" or "plain" insist, and the last two forbid packing.
            None: headwise chooses, see `explain`. An attribute too.

    Raises:
        ValueError: sizes below 1, num_heads that does not divide embed_dim (without head_dim), num_kv_heads that does
            not divide num_heads, dropout outside [0, 1], a softcap that is not positive, rotary on an odd width, an
            `Alibi` of another number of heads.

    Parameters by name are those of `ProjectedAttention`; `state_dict` has torch's keys in both layouts.

    Children: `attn_dropout` (its own `training` flag decides; anything but an unhooked `nn.Dropout` is called on the
    weights) and `attend`, which hooks can watch.

    Unlike torch: a query that sees no key gives `out_proj.bias`, never NaN; `is_causal` works alone and always holds;
    masks may be per sample or 4-D and mix dtypes; weights are returned before dropout; train and eval run the same
    code; `out_proj` is called, so hooks and adapters on it work. Not a subclass of torch's.

    Cost: 8*B*L*D^2 + 4*B*L*S*D FLOPs forward for L = S.
    Source: arXiv 1706.03762 section 3.2.2; grouped heads arXiv 2305.13245; norms arXiv 2010.04245; gate arXiv
        2505.06708; sink arXiv 2309.17453 and gpt-oss; softcap arXiv 2408.00118.
    Checked in: tests/parity, tests/contract/test_semantics.py.

    Example:
        >>> import torch
        >>> from headwise import MultiheadAttention
        >>> mha = MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(10, 20, 64)
        >>> out, weights = mha(x, x, x, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([10, 20, 64]), torch.Size([10, 4, 20, 20]))
    """

    # torch's encoder layers read this before they bypass their self_attn in eval; ours must always be called
    _qkv_same_embed_dim = False
    _head_dim: int | None = None  # these three where they are not torch's
    _num_kv_heads: int | None = None
    _softcap: float | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        average_attn_weights: bool = True,
        fused_qkv: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        positions: str | nn.Module | None = None,
        qk_norm: options.QkNorm = False,
        gate: bool = False,
        sink: bool = False,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = positive(_NAME, "embed_dim", embed_dim), positive(_NAME, "num_heads", num_heads)
        if dtype is not None and not dtype.is_floating_point:
            raise invalid(_NAME, "dtype", "be a floating one", dtype)
        self.kdim = embed_dim if kdim is None else positive(_NAME, "kdim", kdim)
        self.vdim = embed_dim if vdim is None else positive(_NAME, "vdim", vdim)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        options.settle_heads(self, num_kv_heads, head_dim)
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        self.average_attn_weights = average_attn_weights
        self._warned_of_zero_one = False
        self._build_projections(bias=bias, fused=fused_qkv, add_bias_kv=add_bias_kv, device=device, dtype=dtype)
        options.build(self, positions, qk_norm, gate, sink, softcap, bias=bias, device=device, dtype=dtype)
        self.attn_dropout: nn.Module = nn.Dropout(_probability(dropout))
        self.attend = Attend()
        self.backend = backend
        self.reset_parameters()

    @property
    def head_dim(self) -> int:
        """K, the width of a head; without options it follows `num_heads`, as torch's call does."""
        return self._head_dim or self.embed_dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """G, the number of heads of keys and values."""
        return self._num_kv_heads or self.num_heads

    @property
    def softcap(self) -> float | None:
        """The bound of the scaled scores; None without one."""
        return self._softcap

    @property
    def backend(self) -> str | None:
        """What `headwise.attention` is told; None: headwise chooses. Weights always come from the plain formula."""
        return getattr(self.attend, "backend", None)

    @backend.setter
    def backend(self, name: str | None) -> None:
        known = [backend.name for backend in BACKENDS]
        if name is not None and name not in known:
            raise invalid(_NAME, "backend", f"be {' or '.join(map(repr, known))}, or None", repr(name))
        if name != self.backend:
            self.attend.backend = name

    @property
    def dropout(self) -> float | None:
        """Probability of `attn_dropout`; None if that child was replaced by a module without one."""
        return getattr(self.attn_dropout, "p", None)

    @dropout.setter
    def dropout(self, probability: float) -> None:
        if not isinstance(self.attn_dropout, nn.modules.dropout._DropoutNd):
            kind = type(self.attn_dropout).__name__
            raise invalid(_NAME, "dropout", "be set on attn_dropout while that is a dropout layer", kind)
        self.attn_dropout.p = _probability(probability)

    def extra_repr(self) -> str:
        """torch's arguments where they differ from the default, and the widths always."""
        always = f"{self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"
        return ", ".join([always, *options.said(self)])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and mix `value`.

        Args:
            query: (B, L, D) with `batch_first`, (L, B, D) without, (L, D) unbatched; the parameters' dtype. Nested:
                (B, *, D), samples of unequal lengths, each as if it were alone; no torch masks then.
            key: (B, S, kdim), (S, B, kdim) or (S, kdim); nested if the query is, and to a dense query too.
            value: (B, S, vdim), (S, B, vdim) or (S, vdim); nested if the key is, with the same lengths.
            key_padding_mask: (B, S), or (S,) unbatched; bool with True = padding, or floating and added.
            need_weights: False returns None for the weights and lets the fused kernel run.
            attn_mask: bool with True = may not attend, or floating and added; (L, S), (B*H, L, S), (B, L, S), (1, L, S)
                or 4-D that broadcasts to (B, H, L, S).
            average_attn_weights: True averages the returned weights over heads, False gives each head's. None: what the
                constructor was told.
            is_causal: query l sees keys 0 .. l only, beside all other masks; needs no `attn_mask`.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0, the output bias included.
            mask: a Mask of `headwise.masks` (True may attend), intersected with the above; of each sample if nested.
            cache: a `StaticCache` or `RollingCache`, to which the new keys and values are added before all that it
                holds are attended to, or a `CrossCache`. Query l is at position l + cache.length for all masks;
                attn_mask is (L, S) with S all positions so far; key_padding_mask is that of the new keys, the cache
                remembers the rest. Not while gradients are recorded, and not with nested tensors.

        Returns:
            Output shaped as `query` (jagged: with its offsets, so that they add), and the weights (B, L, S) or
            (B, H, L, S), without B if unbatched, before dropout; S counts `bias_k` and the zero key too. A query that
            sees no key has attention 0 (the output is then `out_proj.bias`), weights 0 and gradients 0. What padding
            holds, NaN included, has no influence. Weights of nested input are padded to the longest sample with 0.

        Raises:
            ValueError: ranks, widths, lengths, dtypes or devices that do not fit, with all sizes; integer masks; torch
                masks, holes, a cache or a dense key beside nested tensors; a cache that is full, in use by another
                module or used with gradients. Nothing is added to a cache that is full.

        Warns:
            UserWarning: once per module, on the CPU in eager mode, for a floating mask of zeros and ones only.

        Cost: see the class; averaged weights hold one head at a time when no gradient is needed.
        """
        masks = (key_padding_mask, attn_mask, query_padding_mask, mask)
        if query is key and key is value and not need_weights:
            short = None
            if cache is not None:
                short = _short_step(self, query, masks, cache)
            elif not is_causal:
                short = _short_call(self, query, masks)
            if short is not None:
                return short, None
        given = (query, key, value)
        average = self.average_attn_weights if average_attn_weights is None else average_attn_weights
        if getattr(query, "is_nested", False) or getattr(key, "is_nested", False):
            return _attend_nested(self, given, masks, need_weights, average, is_causal, cache)
        if cache is None:
            return _attend(self, given, masks, need_weights, average, is_causal)
        return all_or_nothing(cache, lambda: _attend(self, given, masks, need_weights, average, is_causal, cache))

    def attention_weights(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool | None = None,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
        rows: int | Sequence[int] | Tensor | None = None,
        top: int | None = None,
    ) -> Tensor | TopWeights:
        """Some of the weights, or all, without the output: a look at a module whose own calls stay as fast as they are.

        Args:
            query: as in `forward`, not nested; so are those that follow.
            key: as there.
            key_padding_mask: as there.
            attn_mask: as there.
            average_attn_weights: as there.
            is_causal: as there.
            mask: as there.
            rows: R query positions, negative ones from the end; no others are computed. None: all, R = L.
            top: give only so many of the largest weights of each query, and which keys they belong to. None: all keys.

        Returns:
            (B, R, S) averaged over heads, or (B, H, R, S), as `forward` returns them; with `top` a pair
            `(weights, keys)` of (B, R, top), or (B, H, R, top), the largest first.

        Raises:
            ValueError: as `forward`; a module with add_bias_kv or add_zero_attn; rows or a number that do not exist.

        Cost: projections of queries and keys, and 2*B*R*S*H*K FLOPs; with `top` memory is linear in the lengths.
        """
        masks = (key_padding_mask, attn_mask, None, mask)
        average = self.average_attn_weights if average_attn_weights is None else average_attn_weights
        return some_weights(self, query, key, masks, is_causal, rows, top, average)

    def explain(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Explanation:
        """Say what `forward(..., need_weights=False)` would do and spend; `print` it.

        Args:
            query: as in `forward`, not nested; so are those that follow.
            key: as there.
            value: as there.
            key_padding_mask: as there.
            attn_mask: as there.
            is_causal: as there.
            query_padding_mask: as there.
            mask: as there.

        Returns:
            As `headwise.explain`, the projections' FLOPs included. Padded batches are packed, projections included,
            where the FLOPs that this saves are more than a turn of a loop over samples costs (3e6 FLOPs each, 1e7 while
            gradients are recorded); `backend` "sdpa" or "plain" refuses that, "tiled" asks attention for it.

        Raises:
            ValueError: as `forward`.

        Cost: none of attention's work; masks are read.

        Example:
            >>> import torch
            >>> from headwise import MultiheadAttention
            >>> mha, x = MultiheadAttention(512, 8, batch_first=True), torch.randn(4, 256, 512)
            >>> padding = torch.arange(256) >= torch.tensor([[256], [32], [64], [32]])
            >>> print(mha.explain(x, x, x, key_padding_mask=padding, query_padding_mask=padding))
            tiled runs: 952 MFLOP, 65% saved, 12.3 kB beside inputs and output
            packed: 768 of 2,048 positions are projected
            sdpa does not: it would compute what nobody sees, tiled does not
            plain does not: it would hold all the weights, tiled does not
        """
        masks = (key_padding_mask, attn_mask, query_padding_mask, mask)
        return explain_module(self, (query, key, value), masks, is_causal)


def _probability(value: float) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise invalid(_NAME, "dropout", "be in [0, 1]", repr(value))
    return value


def _is_bare(module: MultiheadAttention, x: Tensor, masks: Masks) -> bool:
    """Whether x is a batch, batch first, of what the module takes, without masks, and nothing is attached to either."""
    own = module.__dict__
    masked = not (masks[0] is None and masks[1] is None and masks[2] is None and masks[3] is None)
    if masked or not own["batch_first"] or own["add_zero_attn"] or not isinstance(x, Tensor) or x.is_nested:
        return False
    drop, attend, shape = own["_modules"]["attn_dropout"], own["_modules"]["attend"], x.shape
    return not (
        len(shape) != 3
        or not shape[2] == own["embed_dim"] == own["kdim"] == own["vdim"]
        or own.get("bias_k", 0) is not None  # a Parameter, parametrized or not, is elsewhere
        or type(drop) is not nn.Dropout
        or (drop.training and drop.p > 0)
        or type(attend) is not Attend
        or attend.backend is not None
        or is_hooked(drop)
        or is_hooked(attend)
        or "forward" in attend.__dict__  # who only looks has to be called
        or not direct()
    )


def _short_call(module: MultiheadAttention, x: Tensor, masks: Masks) -> Tensor | None:
    """`forward` of x on itself, batch first, without masks, weights or anything attached; None for any other call.

    The same operations in the same order, so the same numbers to the bit. Only the detours are missing: a fifth of
    the time of a short sequence goes into calls of modules and functions that have nothing to do.
    """
    own = module.__dict__
    if "extended" in own or not _is_bare(module, x, masks):
        return None
    modules: dict[str, Any] = own["_modules"]
    try:
        q_BHLK, k_BHSK, v_BHSK = module._project(x, x, x, own["embed_dim"] // own["num_heads"], True, True)
        if k_BHSK.shape != q_BHLK.shape:
            return None  # replaced projections may share key heads
        out_BLD = run_unmasked(q_BHLK, k_BHSK, v_BHSK).flatten(2)
        return cast(Tensor, call(modules["out_proj"], out_BLD, True))
    except RuntimeError as error:
        raise wrong_kind(module, error, x, x, x) from error.__cause__


def _short_step(module: MultiheadAttention, x: Tensor, masks: Masks, cache: Cache) -> Tensor | None:
    """`forward` of one new token, batch first, without masks of its own or anything attached; None for any other call.

    The same as the long way, without the detours, which for a single token are as long as the way. The token sees all
    that is cached, so that nothing depends on `is_causal`.
    """
    own, modules = module.__dict__, module._modules
    if not isinstance(cache, StaticCache) or not cache.is_ready(module) or not _is_bare(module, x, masks):
        return None
    positions = modules.get("positions") if "extended" in own else None
    if x.shape[1] != 1 or torch.is_grad_enabled() or not eager() or isinstance(positions, Alibi):
        return None
    if "extended" in own and options.scoring(module):
        return None
    try:
        q_BHLK, k_BGSK, v_BGSK = module._project(x, x, x, module.head_dim, True, True)
        if k_BGSK.shape[1] != module.num_kv_heads:
            return None  # sharded or replaced projections
        if "extended" in own:
            q_BHLK, k_BGSK = options.turned(module, q_BHLK, k_BGSK, *cache.places)
        keys, values = cache.append(k_BGSK, v_BGSK)
        out_BLD = run_step(q_BHLK, keys, values).transpose(1, 2).flatten(2)
        if "extended" in own:
            out_BLD = options.gated(module, x, out_BLD)
        return cast(Tensor, call(modules["out_proj"], out_BLD, True))
    except RuntimeError as error:
        raise wrong_kind(module, error, x, x, x) from error.__cause__


def _attend(
    module: MultiheadAttention,
    given: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    need_weights: bool,
    average: bool,
    is_causal: bool,
    cache: Cache | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`forward` of tensors that are not nested."""
    batch_first, (query, key, value) = module.batch_first, given
    batched, masked = check_inputs(module, query, key, value, masks)
    masks, padding = open_cache(module, cache, given, masks)
    if not batched:
        query, key, value = once(lambda t: t.unsqueeze(0 if batch_first else 1), query, key, value)
    packed = mask = query_padding_mask = None
    if masked or is_causal:
        mask, query_padding_mask = settle_masks(module, masks, is_causal, given)
        if not need_weights and cache is None and type(module.attend) is Attend:
            found = find_packed(module, query, key, mask, query_padding_mask)
            packed = None if isinstance(found, str) else found
        if packed is None and torch.is_grad_enabled():
            query, key, value = still(module, query, key, value, mask, query_padding_mask)
    try:
        if packed is None:
            out, weights = _attend_batch(module, (query, key, value), mask, need_weights, average, cache, padding)
        else:
            out, weights = _attend_batch(module, packed.pack(query, key, value), packed.mask, False, False)
            out, query_padding_mask = packed.queries.unpack(out), None
    except RuntimeError as error:
        raise wrong_kind(module, error, *given) from error.__cause__
    if need_weights or query_padding_mask is not None or not batched:
        return finish(out, weights, query_padding_mask, query.dtype, batched, batch_first)
    return out, None


def _attend_batch(
    module: MultiheadAttention,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    need_weights: bool,
    average: bool,
    cache: Cache | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Projections, options and attention of three batches, or of three rows and what keeps their sequences apart."""
    batch_first, query, ahead = module.batch_first, given[0], 0
    places: tuple[int | Tensor, int | Tensor] = (0, 0)
    if cache is None:
        q_BHLK, k_BGSK, v_BGSK = module._project(*given, module.head_dim, batch_first)
    else:
        places = cache.places
        q_BHLK, k_BGSK, v_BGSK = cache.project(module, *given)
    check_shards(module, q_BHLK, k_BGSK, v_BGSK, need_weights)
    if module.extended:
        rows = [term for term in ([] if mask is None else terms(mask)) if isinstance(term, Sequences)]
        places = rows[0].positions(query.device) if rows else places
        q_BHLK, k_BGSK = options.turned(module, q_BHLK, k_BGSK, *places)
    if cache is not None:
        k_BGSK, v_BGSK, mask = cache.extend(q_BHLK, k_BGSK, v_BGSK, padding, mask)
        ahead = cache.ahead(q_BHLK.shape[2], k_BGSK.shape[2])
    if module.extended:
        mask = options.biased(module, q_BHLK, mask, ahead)
    k_BGSK, v_BGSK, mask = options.with_extra_keys(module, k_BGSK, v_BGSK, mask)
    settings = (mask, *dropout_of(module.attn_dropout), need_weights, average, *options.scoring(module))
    out_BHLK, weights = module.attend(q_BHLK, k_BGSK, v_BGSK, *settings)
    out = (out_BHLK.transpose(1, 2) if batch_first else out_BHLK.permute(2, 0, 1, 3)).flatten(2)
    if module.extended:
        out = options.gated(module, query, out)
    return module.out_proj(out), weights


def _attend_nested(
    module: MultiheadAttention,
    given: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    need_weights: bool,
    average: bool,
    is_causal: bool,
    cache: Cache | None,
) -> tuple[Tensor, Tensor | None]:
    if cache is not None:
        raise invalid(_NAME, "cache", "be None with nested tensors; pad them, with key_padding_mask", cache)
    drops, run = dropout_of(module.attn_dropout), attend_nested
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(attend_nested)  # lengths are numbers to it, and a graph would hold for one batch
    try:
        return run(module, given, masks, drops, need_weights, average, is_causal)
    except RuntimeError as error:
        raise wrong_kind(module, error, *given) from error.__cause__
