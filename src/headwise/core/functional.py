"""Attention as functions: checked once at the door, lowered once, one backend chosen.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise._checks import invalid, is_number
from headwise.core.algebra import Mask, is_flag, learned, lower, terms, walk_tensors
from headwise.core.backends import (
    BACKENDS,
    NOT_WORTH,
    PLAIN,
    TILED,
    Backend,
    Request,
    autocasts,
    eager,
    named,
    needs_grad,
    readable,
    softmax_scores,
)
from headwise.core.lowering import NOTHING_HIDDEN, Lowered, Rectangle, Size, Tiling, flagged_pairs
from headwise.core.tiling import Sequences, as_sequences, find_tiling, tiles_each_sample, with_flag
from headwise.core.traits import visible_keys
from headwise.core.varlen import VARLEN, takes, takes_rows

__all__ = ["Explanation", "TopWeights", "attention", "attention_weights", "explain", "top_attention_weights"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mix, for each query, the values of the keys it may see.

        score[b,h,l,s] = softcap(scale * query[b,h,l] . key[b,g,s]) + bias,   g = h // (H / G)
        out[b,h,l]     = sum_s softmax_s(score[b,h,l])[s] * value[b,g,s]

    Args:
        query: (B, H, L, K), float16 | bfloat16 | float32 | float64.
        key: (B, G, S, K), the query's dtype and device; H % G == 0.
        value: (B, G, S, V), likewise; V is usually K, and has to be for the fast kernel.
        mask: which keys a query may see, from `headwise.masks`. None: all.
        scale: factor on the scores, no unit. None: 1 / sqrt(K).
        dropout: probability in [0, 1] on the weights, drawn from torch's generator; pass 0 outside training.
        softcap: bounds the scaled scores to +-softcap by tanh, before the mask. None: unbounded.
        sink: (H,), one more logit per head that takes weight and gives no value. None: none.
        backend: "tiled", "sdpa" or "plain" to insist. None: chosen by `explain`'s rules.

    Returns:
        (B, H, L, V) in the query's dtype. A query that sees no key gives exactly 0, with gradient 0. Keys hidden from
        every query of a sample (padding) have no influence even if they hold NaN or Inf. L, S or B of 0 are legal.

    Raises:
        ValueError: ranks, sizes, dtypes or devices disagree, dropout outside [0, 1], a mask that is not a Mask or does
            not fit, an unknown backend or one that cannot take the call (its reasons are listed).

    Cost: 2*B*H*L*S*(K + V) FLOPs forward; "plain" holds B*H*L*S weights, "sdpa" on CPU and GPU only blocks of them.
    Source: arXiv 1706.03762 section 3.2.1; grouped heads arXiv 2305.13245; the checks and rules are ours.
    Checked in: tests/oracle/test_backends.py.

    Example:
        >>> import torch
        >>> from headwise import attention, masks
        >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind(0)
        >>> attention(q, k, v, mask=masks.causal() & masks.padding([5, 3])).shape
        torch.Size([2, 8, 5, 16])
    """
    if not is_number(dropout) or not 0 <= dropout <= 1:
        raise invalid("attention", "dropout", "be in [0, 1]", repr(dropout), query=query, key=key)
    request = _request("attention", query, key, value, mask, scale, softcap, sink, dropout, backend)
    return named("attention", backend, request).run(request)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    average_attn_weights: bool = False,
    rows: int | Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The weights that `attention` mixes values with; its twin, with the same arguments.

    Args:
        query: (B, H, L, K).
        key: (B, G, S, K), H % G == 0.
        mask: as in `attention`.
        scale: as in `attention`.
        softcap: as in `attention`.
        sink: as in `attention`.
        average_attn_weights: True averages over heads.
        rows: R query positions, or one, negative ones from the end; only their weights are computed. None: all, R = L.

    Returns:
        (B, H, R, S), or (B, R, S) averaged; float32 for 16-bit inputs, else the query's dtype. Before dropout. Rows sum
        to 1, to less with a sink, to 0 where no key is visible.

    Raises:
        ValueError: as `attention`; a row that is no query position.

    Cost: 2*B*H*R*S*K FLOPs and B*H*R*S numbers; averaged without gradients, B*R*S numbers and one head at a time.
    Source: as `attention`.

    Example:
        >>> import torch
        >>> from headwise import attention_weights
        >>> attention_weights(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), rows=[-1])[0, 0]
        tensor([[0.2000, 0.2000, 0.2000, 0.2000, 0.2000]])
    """
    given = check_request("attention_weights", query, key, None, mask, scale, softcap, sink)
    if rows is None:
        return _weights(given, mask, average_attn_weights)
    places = places_of("attention_weights", rows, query)
    parts = [_weights(*_rows_of(given, mask, first, last), average_attn_weights) for first, last in runs_of(places)]
    if not parts:
        return _weights(*_rows_of(given, mask, 0, 0), average_attn_weights)
    return torch.cat(parts, dim=-2)


class TopWeights(NamedTuple):
    """The largest weights of each query.

    Attributes:
        weights: (B, H, L, n), or (B, L, n) averaged, the largest first.
        keys: int64, of the same shape: the key that each belongs to.
    """

    weights: Tensor
    keys: Tensor


def top_attention_weights(
    query: Tensor,
    key: Tensor,
    n: int,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    average_attn_weights: bool = False,
    rows: int | Sequence[int] | Tensor | None = None,
) -> TopWeights:
    """The n largest of `attention_weights` of each query, without holding all of them.

    Args:
        query: (B, H, L, K).
        key: (B, G, S, K), H % G == 0.
        n: how many, 1 .. S.
        mask: as in `attention`.
        scale: as in `attention`.
        softcap: as in `attention`.
        sink: as in `attention`.
        average_attn_weights: True averages over heads first.
        rows: as in `attention_weights`.

    Returns:
        Weights, each as `attention_weights` has it, and the keys they belong to. Where fewer than n keys are visible
        the last ones are 0, and their keys any of the hidden ones.

    Raises:
        ValueError: as `attention_weights`; n outside 1 .. S.

    Cost: 2*B*H*R*S*K FLOPs; some MiB of weights at a time, so memory is linear in L, but for what gradients keep.
    Source: as `attention`.

    Example:
        >>> import torch
        >>> from headwise import top_attention_weights
        >>> top = top_attention_weights(torch.ones(1, 1, 2, 4), torch.eye(4)[None, None] * 2, 2)
        >>> top.weights.shape, top.keys.shape
        (torch.Size([1, 1, 2, 2]), torch.Size([1, 1, 2, 2]))
    """
    function = "top_attention_weights"
    given = check_request(function, query, key, None, mask, scale, softcap, sink)
    B, H, L, _ = query.shape
    S = key.shape[2]
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= S:
        raise invalid(function, "n", f"be an int in 1 .. S = {S}", n, query=query, key=key)
    places = list(range(L)) if rows is None else places_of(function, rows, query)
    step = max(1, _TOP_BLOCK // max(1, B * H * S))
    cuts = [(at, min(at + step, last)) for first, last in runs_of(places) for at in range(first, last, step)]
    cuts = cuts or [(0, 0)]
    found, done = [], 0
    weights, keys = None, None  # written to memory taken once: small tensors between the blocks would break up the heap
    for first, last in cuts:
        part = _weights(*_rows_of(given, mask, first, last), average_attn_weights)
        if part.requires_grad or not eager():
            found.append(part.topk(n, dim=-1))
            continue
        if weights is None or keys is None:
            weights = part.new_empty(*part.shape[:-2], len(places), n)
            keys = torch.empty_like(weights, dtype=torch.int64)
        rows_here = slice(done, done + last - first)
        weights[..., rows_here, :], keys[..., rows_here, :] = part.topk(n, dim=-1)
        del part  # or two blocks are held
        done += last - first
    if weights is None or keys is None:
        weights, keys = (torch.cat(parts, dim=-2) for parts in zip(*found, strict=True))
    return TopWeights(weights, keys)


_TOP_BLOCK = 2**20  # weights held at a time


def _weights(given: Request, mask: Mask | None, average: bool) -> Tensor:
    """Of a request without values, whose mask is not lowered yet."""
    _, _, _, _, scale, _, _, softcap, sink, grouped = given
    request = prepare(*given[:3], mask, scale, 0.0, None, softcap, sink, grouped, tiled=False)
    if average:
        return PLAIN.run_with_average(request._replace(value=request.key[..., :0]))[1]
    weight, dead = softmax_scores(request)
    return weight if dead is None else weight.masked_fill(dead, 0)


def _rows_of(given: Request, mask: Mask | None, first: int, last: int) -> tuple[Request, Mask | None]:
    """The same request for some of the queries, and its mask."""
    B, H, L, _ = given.query.shape
    S = given.key.shape[2]
    part = Rectangle((0, B), (first, last), (0, S))
    cut = None if mask is None else mask.cut(part, Size(B, H, L, S, given.query.device))
    return given._replace(query=given.query[:, :, first:last]), cut


def places_of(function: str, rows: int | Sequence[int] | Tensor, query: Tensor) -> list[int]:
    """Query positions as asked for, counted from 0."""
    L = query.shape[2]
    rule = f"be query positions, ints in {-L} .. {L - 1}"
    listed = rows.flatten().tolist() if isinstance(rows, Tensor) else rows
    asked = list(listed) if isinstance(listed, Iterable) else [listed]
    for row in asked:
        if not isinstance(row, int) or isinstance(row, bool) or not -L <= row < L:
            raise invalid(function, "rows", rule, repr(row), query=query)
    return [row % L for row in asked]


def runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Positions side by side, as (first, behind the last), in their order."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


class Explanation(NamedTuple):
    """What a call of attention would do.

    Attributes:
        backend: the name of the backend that runs.
        refused: for each other backend, why it does not.
        flops: of the forward pass, a product of (m, k) and (k, n) counted as 2*m*k*n; elementwise work is not counted.
        dense_flops: the same with all queries and keys, padding included.
        bytes: held at once in the forward pass beside inputs and output, about.
        packed: of a module, the positions that are projected and all of them, queries and keys together; or why it
            does not pack them. None: of a function, which has no projections.
    """

    backend: str
    refused: dict[str, list[str]]
    flops: float = 0.0
    dense_flops: float = 0.0
    bytes: int = 0
    packed: tuple[int, int] | str | None = None

    @property
    def saved(self) -> float:
        """The share of `dense_flops` that is not computed, 0 to 1."""
        return 1 - self.flops / self.dense_flops if self.dense_flops else 0.0

    def __str__(self) -> str:
        cost = f"{_short(self.flops)}FLOP, {self.saved:.0%} saved, {_short(self.bytes)}B beside inputs and output"
        lines = [f"{self.backend} runs: {cost}"]
        if isinstance(self.packed, str):
            lines.append(f"not packed: {self.packed}")
        elif self.packed is not None:
            lines.append("packed: {:,} of {:,} positions are projected".format(*self.packed))
        lines += [f"{name} does not: " + "; ".join(reasons) for name, reasons in self.refused.items()]
        return "\n".join(lines)


def _short(number: float) -> str:
    """With a prefix: 12.9 G."""
    for power, prefix in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {prefix}"
    return f"{number:.3g} "


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
) -> Explanation:
    """Say which backend `attention` runs for a call, what it spends, and why each other one does not.

    Args:
        query: as in `attention`, and likewise all that follow.
        key: see `attention`.
        value: see `attention`.
        mask: see `attention`.
        scale: see `attention`.
        dropout: see `attention`.
        softcap: see `attention`.
        sink: see `attention`.
        backend: see `attention`.

    Returns:
        The backend's name, its cost and the others' reasons; `print` it. `MultiheadAttention.explain` says the same of
        a whole module.

    Raises:
        ValueError: as `attention`.

    The rule: parts of the scores that nobody sees are left out ("tiled") where the FLOPs that this saves are more than
    what a tile costs beside them (3e6 FLOPs, 1e7 while gradients are recorded, measured), and where dropout, a softcap,
    a sink or a learned mask would else need all scores in memory and there are enough of them.

    Cost: none of attention's work; a mask is lowered.

    Example:
        >>> import torch
        >>> from headwise import explain, masks
        >>> x = torch.randn(1, 8, 4096, 64)
        >>> print(explain(x, x, x, mask=masks.window(127, 0)))
        tiled runs: 1.58 GFLOP, 95% saved, 131 kB beside inputs and output
        sdpa does not: it would compute what nobody sees, tiled does not
        plain does not: it would hold all the weights, tiled does not
    """
    if not is_number(dropout) or not 0 <= dropout <= 1:
        raise invalid("explain", "dropout", "be in [0, 1]", repr(dropout), query=query, key=key)
    request = _request("explain", query, key, value, mask, scale, softcap, sink, dropout, backend)
    return explain_request(request, named("explain", backend, request), asked=backend is not None)


def explain_request(request: Request, chosen: Backend, *, asked: bool) -> Explanation:
    """`explain` of what is prepared already."""
    refused = {}
    for other in BACKENDS:
        if other is not chosen and (other is not VARLEN or request.query.is_cuda):
            reasons = other.why_not(request)
            if not reasons or (asked and reasons == [NOT_WORTH]):
                reasons = [_why_rather(chosen, other, request, asked=asked)]
            refused[other.name] = reasons
    B, H, L, K = request.query.shape
    dense = 2.0 * B * H * L * request.key.shape[2] * (K + request.value.shape[-1])
    flops, held = chosen.cost(request)
    return Explanation(chosen.name, refused, flops, dense, held)


def _why_rather(chosen: Backend, other: Backend, request: Request, *, asked: bool) -> str:
    if asked:
        return "another was asked for"
    if other is PLAIN or (chosen is TILED and chosen.cost(request)[0] >= other.cost(request)[0]):
        return f"it would hold all the weights, {chosen.name} does not"
    if chosen is TILED:
        return "it would compute what nobody sees, tiled does not"
    return PLAIN.faster(request)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    drop: Callable[[Tensor], Tensor] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    grouped: bool = False,
    tiled: bool | None = None,
) -> Request:
    """Lower the mask and silence the keys that no query of a sample may see; sizes are the caller's to check.

    A hidden NaN would reach every output: 0 * NaN is NaN. Such keys and values become 0, which also stops the gradient,
    unless a look at the numbers says that they are harmless: then their weight of 0 does the same. What is cut away
    never meets a kernel; `tiled` asks for that, or forbids it. None: where it is quicker.
    """
    request = Request(query, key, value, NOTHING_HIDDEN, scale, dropout, drop, softcap, sink, grouped)
    if mask is None and dropout == 0 and softcap is None and sink is None and not tiled:
        return request
    B, H, L, _ = query.shape
    size = Size(B, H, L, key.shape[-2], query.device)
    pair = 2 * H * (query.shape[-1] + value.shape[-1])  # FLOPs of a query and a key
    large = not torch.compiler.is_compiling() and pair * B * L * size.keys >= min(TURN, TURN_GRAD, _WORTH_READING)
    apart = tiled is None and dropout == 0 and drop is None and softcap is None and sink is None
    if mask is not None and apart and takes(query, key, value):
        rows = as_sequences(mask)
        if rows is not None and takes_rows(rows):
            return request._replace(mask=Lowered(sequences=rows))
    if tiled is None and mask is not None and any(isinstance(term, Sequences) for term in terms(mask)):
        tiled = True  # whoever said so has settled that it is quicker, and one sample's NaN stays its own
    if (large or tiled) and readable(query) and (mask is None or all(map(readable, walk_tensors(mask)))):
        if mask is not None and pair * B >= _WORTH_AN_ENTRY and pair * B * L * size.keys >= _WORTH_READING:
            mask = with_flag(mask, size)
        tiling = None if tiled is False else _tiling(request, mask, size, pair, asked=bool(tiled))
        if tiling is not None:
            query, key, value = _silenced(request, tiling.rest, size)
            return request._replace(key=key, value=value, mask=Lowered(tiling=tiling))
    if mask is None:
        return request
    query, key, value = _silenced(request, mask, size)
    return request._replace(key=key, value=value, mask=lower(mask, size, _score_dtype(query)))


def _silenced(request: Request, mask: Mask | None, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = request[:3]
    keys = visible_keys(mask, size)
    if keys is None or _harmless(query, key, value, _score_dtype(query), request.scale):
        return query, key, value
    return query, *_silence(keys, key, value)


def _tiling(request: Request, mask: Mask | None, size: Size, pair: int, *, asked: bool) -> Tiling | None:
    """The tiles of a call, if they can be and are quicker than all of the scores at once, or were asked for."""
    if request.drop is not None or learned(mask) is None:
        return None
    turn = cost_of_turn(*request[:3], request.dropout)
    pairs = size.batch * size.queries * size.keys
    blockwise = request.dropout > 0 or request.softcap is not None or request.sink is not None or bool(learned(mask))
    if not asked:  # first what can be told without reading lengths
        if blockwise and size.heads * pairs < _WORTH_A_TILE:
            return None  # all scores, in memory
        if not blockwise and pair * pairs < turn * (size.batch if tiles_each_sample(mask) else 1):
            return None
    tiling = find_tiling(mask, size, pair, max(turn, 1.0))
    if asked or blockwise:
        return tiling
    if mask is not None and any(map(is_flag, terms(mask))):
        pairs = size.batch * flagged_pairs(size.queries, size.keys)
    saved = pairs - sum(tile.pairs for tile in tiling.tiles)
    return tiling if saved > 0 and pair * saved >= turn * len(tiling.tiles) else None


def cost_of_turn(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> float:
    """FLOPs that take as long as one turn of a loop over sequences.

    With dropout alike with and without gradients: recomputation has to choose the same and draw the same numbers.
    """
    recorded = dropout > 0 or needs_grad(Request(query, key, value, NOTHING_HIDDEN))
    return TURN_GRAD if recorded else TURN


# FLOPs that are worth reading a mask's numbers for, in all and for each of its entries; and FLOPs that take as long as
# one turn of the loop over sequences. Measured on one thread.
_WORTH_READING = 1e7
_WORTH_AN_ENTRY = 2e3
TURN = 3e6
TURN_GRAD = 1e7
_WORTH_A_TILE = 2**18  # scores: fewer are quicker in memory


def _score_dtype(query: Tensor) -> torch.dtype:
    """The dtype the scores will have, which a bias has to fit: under autocast it is not the query's."""
    if query.dtype != torch.float64 and autocasts(query.device):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype


def _harmless(query: Tensor, key: Tensor, value: Tensor, score_dtype: torch.dtype, scale: float | None) -> bool:
    """Whether no hidden key or value can make a NaN: all are finite, and so is every product of a query and a key.

    Reading is a tenth of the time of writing zeros, in backward too.
    """
    tensors = (query, key, value)
    if torch.float16 in (query.dtype, score_dtype) or not all(map(readable, tensors)):
        return False  # float16 overflows soon, in backward as well
    # |q . k| <= |q| |k|. Room is left for a bias beside it and for gradients; a length that overflows fails, as inf.
    known: dict[int, float] = {}
    most = query.numel() + key.numel() + value.numel()
    q_length, k_length, v_length = (_length(tensor, most, known) for tensor in tensors)
    return q_length * k_length * max(1.0, abs(scale or 0.0)) < 1e30 and v_length < 1e10


def _length(tensor: Tensor, most: int, known: dict[int, float]) -> float:
    """At least the Euclidean length of a tensor: that of the memory it lies in, unless that holds much else.

    Memory is read in one run, and once for heads that are views of one product.
    """
    tensor, storage = tensor.detach(), tensor.untyped_storage()
    number, place = storage.nbytes() // tensor.element_size(), storage.data_ptr()
    if number > most:
        return float(torch.linalg.vector_norm(tensor))
    if place not in known:
        flat = tensor.as_strided((number,), (1,), 0)
        square = float(torch.dot(flat, flat))
        known[place] = math.sqrt(square) if square >= 0 else math.nan
    return known[place]


def _silence(keys: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    G, H = key.shape[1], keys.shape[1]
    if H not in (1, G):  # a shared key is silent only if all its query heads hide it
        keys = keys.unflatten(1, (G, H // G)).any(dim=2)
    hidden = ~keys.transpose(-1, -2)
    return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)


def _request(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float,
    backend: str | None,
) -> Request:
    """Check everything, then prepare."""
    grouped = check_request(function, query, key, value, mask, scale, softcap, sink).grouped
    tiled = None if backend is None else backend == TILED.name
    return prepare(query, key, value, mask, scale, dropout, None, softcap, sink, grouped, tiled)


def check_request(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Request:
    """The request without its mask, after all checks. `value` None stands for a key-only call."""
    shapes = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in shapes.items():
        if not isinstance(tensor, Tensor):
            raise invalid(function, name, "be a tensor", type(tensor).__name__)
    for name, tensor in shapes.items():
        if tensor.dim() != 4:
            raise invalid(function, name, "be 4-D, (B, heads, length, width)", f"{tensor.dim()}-D", **shapes)
        if not tensor.is_floating_point():
            raise invalid(function, name, "be floating", tensor.dtype, **shapes)
        if tensor.dtype != query.dtype or tensor.device != query.device:
            rule = f"have the query's dtype and device ({query.dtype}, {query.device})"
            raise invalid(function, name, rule, f"{tensor.dtype}, {tensor.device}", **shapes)
        if tensor.shape[0] != query.shape[0]:
            raise invalid(function, name, f"have the query's batch size {query.shape[0]}", tensor.shape[0], **shapes)
    (_, H, _, K), (_, G, S, key_width) = query.shape, key.shape
    if K == 0:
        raise invalid(function, "query", "be at least 1 wide", K, **shapes)
    if key_width != K:
        raise invalid(function, "key", f"be as wide as the query, {K}", key_width, **shapes)
    if G == 0 or H % G:
        raise invalid(function, "key", f"have a number of heads that divides the query's {H}", G, **shapes)
    if value is not None and value.shape[1:3] != key.shape[1:3]:
        rule = f"have the key's heads and length, {(G, S)}"
        raise invalid(function, "value", rule, tuple(value.shape[1:3]), **shapes)
    if mask is not None and not isinstance(mask, Mask):
        rule = "be a Mask of headwise.masks; wrap a bool tensor (True may attend) in masks.dense, scores in masks.bias"
        raise invalid(function, "mask", rule, type(mask).__name__, **shapes)
    compiling = torch.compiler.is_compiling()  # then a number may be a symbol
    if scale is not None and not compiling and not (is_number(scale) and math.isfinite(scale)):
        raise invalid(function, "scale", "be a finite number", scale, **shapes)
    if softcap is not None and not compiling and not (is_number(softcap) and 0 < softcap < math.inf):
        raise invalid(function, "softcap", "be a finite number greater than 0", softcap, **shapes)
    if sink is not None:
        if not isinstance(sink, Tensor) or tuple(sink.shape) != (H,) or not sink.is_floating_point():
            rule = f"be a floating tensor of one logit per query head, ({H},)"
            raise invalid(
                function, "sink", rule, tuple(sink.shape) if isinstance(sink, Tensor) else repr(sink), **shapes
            )
        if sink.device != query.device:
            raise invalid(function, "sink", f"be on the query's device {query.device}", sink.device, **shapes)
    grouped = False
    if H != G:  # a branch, since a compiled call needs a bool here and has a symbol
        grouped = True
    value = key if value is None else value
    return Request(query, key, value, NOTHING_HIDDEN, scale, 0.0, None, softcap, sink, grouped)
