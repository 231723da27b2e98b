"""Attention as functions: checked once at the door, lowered once, one backend chosen.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core.backends import (
    BACKENDS,
    PLAIN,
    RAGGED,
    Backend,
    Request,
    autocasts,
    choose,
    needs_grad,
    readable,
    softmax_scores,
)
from headwise.core.lowering import NOTHING_HIDDEN, Lowered, Size
from headwise.core.masks import Mask, lower, terms, visible_keys, walk_tensors
from headwise.core.ragged import Sequences, lower_to_lengths, with_flag

__all__ = ["Explanation", "attention", "attention_weights", "explain"]


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
        backend: "sdpa", "ragged" or "plain" to insist. None: chosen by `explain`'s rules.

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
    if not 0 <= dropout <= 1:
        raise invalid("attention", "dropout", "be in [0, 1]", dropout, query=query, key=key)
    request = _request("attention", query, key, value, mask, scale, softcap, sink, dropout, backend)
    return _named("attention", backend, request).run(request)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    average_attn_weights: bool = False,
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

    Returns:
        (B, H, L, S), or (B, L, S) averaged; float32 for 16-bit inputs, else the query's dtype. Before dropout. Rows sum
        to 1, to less with a sink, to 0 where no key is visible.

    Raises:
        ValueError: as `attention`.

    Cost: 2*B*H*L*S*K FLOPs and B*H*L*S numbers; averaged without gradients, B*L*S numbers and one head at a time.
    Source: as `attention`.

    Example:
        >>> import torch
        >>> from headwise import attention_weights
        >>> attention_weights(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4))[0, 0, 0]
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
    """
    request = _request("attention_weights", query, key, None, mask, scale, softcap, sink, backend=PLAIN.name)
    if average_attn_weights:
        return PLAIN.run_with_average(request._replace(value=key[..., :0]))[1]
    weight, dead = softmax_scores(request)
    return weight if dead is None else weight.masked_fill(dead, 0)


class Explanation(NamedTuple):
    """What `attention` would do with a call.

    Attributes:
        backend: the name of the backend that runs.
        refused: for each other backend, why it does not.
    """

    backend: str
    refused: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"{self.backend} runs"]
        lines += [f"{name} does not: " + "; ".join(reasons) for name, reasons in self.refused.items()]
        return "\n".join(lines)


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
    """Say which backend `attention` runs for a call, and why each other one does not.

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
        The backend's name and the others' reasons; `print` it.

    Raises:
        ValueError: as `attention`.

    Cost: none of attention's work; a mask is lowered.

    Example:
        >>> import torch
        >>> from headwise import explain
        >>> x = torch.randn(1, 2, 128, 16)
        >>> print(explain(x, x, x, softcap=30.0))
        plain runs
        ragged does not: it needs a mask of lengths ...
        sdpa does not: softcap changes the scores, which the kernel keeps to itself
    """
    if not 0 <= dropout <= 1:
        raise invalid("explain", "dropout", "be in [0, 1]", dropout, query=query, key=key)
    request = _request("explain", query, key, value, mask, scale, softcap, sink, dropout, backend)
    chosen = _named("explain", backend, request)
    refused = {}
    for other in BACKENDS:
        if other is not chosen:
            refused[other.name] = other.why_not(request) or [_why_rather(chosen, other, asked=backend is not None)]
    return Explanation(chosen.name, refused)


def _why_rather(chosen: Backend, other: Backend, *, asked: bool) -> str:
    if asked:
        return "another was asked for"
    if other is PLAIN:
        return "it holds all the weights, the other does not"
    if chosen is RAGGED:
        return "it computes what is padding or belongs to other sequences, the other does not"
    return "many short heads in inference: a fused kernel's set-up costs more than it saves"


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
    by_sequence: bool | None = None,
) -> Request:
    """Lower the mask and silence the keys that no query of a sample may see; sizes are the caller's to check.

    A hidden NaN would reach every output: 0 * NaN is NaN. Such keys and values become 0, which also stops the gradient,
    unless a look at the numbers says that they are harmless: then their weight of 0 does the same. Sequences that run
    one by one never meet what is hidden; `by_sequence` asks for that, or forbids it. None: where it is quicker.
    """
    lowered = NOTHING_HIDDEN
    if mask is not None:
        B, H, L, _ = query.shape
        size = Size(B, H, L, key.shape[-2], query.device)
        dtype = _score_dtype(query)
        if by_sequence is None and any(isinstance(term, Sequences) for term in terms(mask)):
            by_sequence = True  # whoever said so has settled that it is quicker, and one sample's NaN stays its own
        pair = 2 * size.heads * (query.shape[-1] + value.shape[-1])  # FLOPs of a query and a key
        large = not torch.compiler.is_compiling() and pair * B * L * size.keys >= min(TURN, TURN_GRAD, _WORTH_READING)
        if (large or by_sequence) and readable(query) and all(map(readable, walk_tensors(mask))):
            if pair * B >= _WORTH_AN_ENTRY and pair * B * L * size.keys >= _WORTH_READING:
                mask = with_flag(mask, size)
            if by_sequence is not False and drop is None and softcap is None and sink is None:
                turn = 0.0 if by_sequence else cost_of_turn(query, key, value, dropout)
                lengths = _lengths(mask, size, pair, turn)
                if lengths is not None:
                    return Request(query, key, value, lengths, scale, dropout, grouped=grouped)
        lowered = lower(mask, size, dtype)
        keys = visible_keys(mask, size)
        if keys is not None and not _harmless(query, key, value, dtype, scale):
            key, value = _silence(keys, key, value)
    return Request(query, key, value, lowered, scale, dropout, drop, softcap, sink, grouped)


def cost_of_turn(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> float:
    """FLOPs that take as long as one turn of a loop over sequences.

    With dropout alike with and without gradients: recomputation has to choose the same and draw the same numbers.
    """
    recorded = dropout > 0 or needs_grad(Request(query, key, value, NOTHING_HIDDEN))
    return TURN_GRAD if recorded else TURN


def _lengths(mask: Mask, size: Size, pair: int, turn: float) -> Lowered | None:
    """The mask as lengths, if it says no more, and what they save is worth a loop of this cost a turn."""
    B, _, L, S, _ = size
    if pair * L * S < turn:
        return None
    lowered = lower_to_lengths(mask, size)
    lengths = None if lowered is None else lowered.ragged
    if lengths is None or not lengths.queries:
        return None
    saved = B * L * S - sum(queries * keys for queries, keys in zip(lengths.queries, lengths.keys, strict=True))
    return lowered if pair * saved >= turn * len(lengths.queries) else None


# FLOPs that are worth reading a mask's numbers for, in all and for each of its entries; and FLOPs that take as long as
# one turn of the loop over sequences. Measured on one thread.
_WORTH_READING = 1e7
_WORTH_AN_ENTRY = 2e3
TURN = 3e6
TURN_GRAD = 1e7


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
    value: Tensor | None,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Request:
    """Check everything, then prepare. `value` None stands for a key-only call."""
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
    if scale is not None and (isinstance(scale, Tensor) or not (compiling or math.isfinite(scale))):
        raise invalid(function, "scale", "be a finite number", scale, **shapes)
    if softcap is not None and (isinstance(softcap, Tensor) or not (compiling or 0 < softcap < math.inf)):
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
    by_sequence = None if backend is None else backend == RAGGED.name
    return prepare(query, key, value, mask, scale, dropout, None, softcap, sink, grouped, by_sequence)


def _named(function: str, name: str | None, request: Request) -> Backend:
    if name is None:
        return choose(request)
    for backend in BACKENDS:
        if backend.name == name:
            reasons = backend.why_not(request)
            if reasons:
                raise invalid(
                    function,
                    "backend",
                    f"take this call, and {name} does not: " + "; ".join(reasons),
                    repr(name),
                    query=request.query,
                    key=request.key,
                )
            return backend
    known = " or ".join(repr(backend.name) for backend in BACKENDS)
    raise invalid(function, "backend", f"be {known}, or None to let headwise choose", repr(name))
