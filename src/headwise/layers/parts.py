"""What `blocks.py` (ours) and `transformer.py` (torch's names) are made of: each block once, and what both check.

Axis letters: B batch, D width, H heads, L positions, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import invalid, kind_of
from headwise.core.algebra import Mask
from headwise.core.inputs import cure_for
from headwise.core.multihead import MultiheadAttention
from headwise.core.nested import Samples, read_samples
from headwise.layers.feedforward import Activation, FeedForward, Norm, make_norm
from headwise.layers.packing import BlockPacking, find_packing, find_samples


class BlockParts(FeedForward):
    """The children of a block: its attentions, a feed-forward, and a norm and a dropout for each of these."""

    self_attn: nn.Module
    norm1: nn.Module
    norm2: nn.Module
    dropout1: nn.Module
    dropout2: nn.Module
    norm_first: bool
    _input_word = "x"  # what forward calls it

    def _build(
        self,
        attentions: dict[str, nn.Module],
        embed_dim: int,
        dropout: float,
        *,
        feedforward_dim: int | None,
        activation: Activation,
        norm: Norm,
        norm_first: bool,
        norm_eps: float,
        bias: bool,
        **factory: Any,
    ) -> None:
        """Make the children in torch's order, which is the order of random draws and of names."""
        self.norm_first = norm_first
        for name, attention in attentions.items():
            self.add_module(name, attention)
        act = self._build_feed_forward(embed_dim, feedforward_dim, activation, dropout, bias=bias, **factory)
        places = range(1, len(attentions) + 2)
        for place in places:
            made = make_norm(type(self).__name__, norm, embed_dim, norm_eps, bias, **factory)
            self.add_module(f"norm{place}", made)
        for place in places:
            self.add_module(f"dropout{place}", nn.Dropout(dropout))
        self.activation = act


class EncoderParts(BlockParts):
    """An encoder block whose arguments have no names yet; x is laid out as its attention says."""

    def _encode(
        self, x: Tensor, rows: Tensor | None, need_weights: bool, words: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The block. `rows` is the query padding mask, `words` are those of the attention that say something."""
        name, batch_first = type(self).__name__, is_batch_first(self.self_attn)
        check_input(name, self._input_word, x)
        packing = samples = None
        if rows is None:
            x, samples = _unwrapped(self, x)
        else:
            check_rows(name, "query_padding_mask", rows, x, batch_first)
            packing = None if need_weights else find_packing([self], x, rows, words)
            if packing is None:
                x = silence(x, rows, words.get("key_padding_mask"), batch_first)
            else:
                x, words = packing.pack(x), {"mask": packing.own.mask}
        attend_to = first_norm(name, self.norm1, x) if self.norm_first else x
        attended, weights = attend(name, self.self_attn, attend_to, attend_to, need_weights, words, samples)
        x = x + self.dropout1(attended)
        if self.norm_first:
            x = x + self.dropout2(self._feed_forward(self.norm2(x)))
        else:
            x = self.norm1(x)
            x = self.norm2(x + self.dropout2(self._feed_forward(x)))
        if packing is not None:
            return packing.unpack(x)
        if samples is not None:
            x = samples.like(x)
        if rows is None:
            return x if weights is None else (x, weights)
        x = zero_rows(x, rows, batch_first)
        return x if weights is None else (x, _zero_weights(weights, rows))


class DecoderParts(BlockParts):
    """A decoder block whose arguments have no names yet. x and memory are laid out as its self-attention says."""

    multihead_attn: nn.Module
    norm3: nn.Module
    dropout3: nn.Module

    def _decode(
        self,
        x: Tensor,
        memory: Tensor,
        rows: Tensor | None,
        need_weights: bool,
        words: dict[str, Any],
        memory_words: dict[str, Any],
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """The block. `rows` is the query padding mask; the words are those of each attention that say something."""
        name, batch_first = type(self).__name__, is_batch_first(self.self_attn)
        check_input(name, self._input_word, x)
        packing = samples = None
        if rows is None:
            x, samples = _unwrapped(self, x)
        else:
            check_rows(name, "query_padding_mask", rows, x, batch_first)
            if not need_weights:
                packing = find_packing([self], x, rows, words, memory, memory_words)
            if packing is None or packing.cross is None:
                x = silence(x, rows, words.get("key_padding_mask"), batch_first)
            else:
                x, words = packing.pack(x), {"mask": packing.own.mask}
                memory, memory_words = packing.cross.keys.pack(memory), {"mask": packing.cross.mask}
        extras = (need_weights, memory_words, samples)
        if self.norm_first:
            y = first_norm(name, self.norm1, x)
            attended, own = attend(name, self.self_attn, y, y, need_weights, words, samples)
            x = x + self.dropout1(attended)
            attended, cross = attend(name, self.multihead_attn, self.norm2(x), memory, *extras)
            x = x + self.dropout2(attended)
            x = x + self.dropout3(self._feed_forward(self.norm3(x)))
        else:
            attended, own = attend(name, self.self_attn, x, x, need_weights, words, samples)
            x = self.norm1(x + self.dropout1(attended))
            attended, cross = attend(name, self.multihead_attn, x, memory, *extras)
            x = self.norm2(x + self.dropout2(attended))
            x = self.norm3(x + self.dropout3(self._feed_forward(x)))
        if packing is not None:
            return packing.unpack(x)
        if rows is not None:
            x = zero_rows(x, rows, batch_first)
        if samples is not None:
            x = samples.like(x)
        if own is None or cross is None:
            return x
        if rows is not None:
            own, cross = _zero_weights(own, rows), _zero_weights(cross, rows)
        return x, (own, cross)


def run_layers(
    layers: Iterable[nn.Module], step: Callable[[nn.Module, Tensor], Any], x: Tensor, need_weights: bool
) -> tuple[Tensor, list[Any]]:
    """The layers one after the other, and what each returns beside its output."""
    extras = []
    for layer in layers:
        x = step(layer, x)
        if need_weights:
            x, its_own = x
            extras.append(its_own)
    return x, extras


def close_stack(
    x: Tensor, packing: BlockPacking | None, norm: nn.Module | None, rows: Tensor | None, batch_first: bool = True
) -> Tensor:
    """What comes after the last layer: padding again where it was left out, the norm, and 0 at `rows` behind it."""
    if packing is not None:
        x = packing.unpack(x)
        if norm is None:
            return x
    x = x if norm is None else norm(x)
    return x if rows is None else zero_rows(x, rows, batch_first)


def given(**words: Any) -> dict[str, Any]:
    """The words of a call that say something: what is not asked for need not be understood by what is called."""
    return {word: value for word, value in words.items() if value is not None}


def is_batch_first(attention: nn.Module) -> bool:
    """How an attention lays out its input; what does not say is batch first."""
    return bool(getattr(attention, "batch_first", True))


# What torch's layers always say; hooks on their attention may read it
_ALWAYS: dict[str, Any] = {"attn_mask": None, "key_padding_mask": None, "is_causal": False}


def _unwrapped(block: nn.Module, x: Tensor) -> tuple[Tensor, Samples | None]:
    """x, or the row that a jagged x is and the way back, where the block's children may see that."""
    samples = find_samples(block, x)
    return (x, None) if samples is None else (samples.values, samples)


def attend(
    name: str,
    attention: nn.Module,
    x: Tensor,
    memory: Tensor,
    need_weights: bool,
    words: dict[str, Any],
    samples: Samples | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Call the attention of block `name` from x to memory; weights only if they were asked for.

    With `samples`, x and the output are the row of what attention sees as a nested tensor.

    Raises:
        ValueError: it does not return what it should, or is torch's and got a Mask.
    """
    if samples is not None:
        memory, x = (memory, samples.like(x)) if memory is not x else (samples.like(x),) * 2
    if isinstance(attention, (MultiheadAttention, nn.MultiheadAttention)):
        words = {**_ALWAYS, **words}
    if isinstance(attention, nn.MultiheadAttention):
        words = _words_for_torch(name, attention, x, memory, words)
    result = attention(x, memory, memory, need_weights=need_weights, **words)
    if not isinstance(result, tuple) or len(result) != 2:  # a bare tensor of batch 2 would unpack without a word
        kind = type(attention).__name__
        raise invalid(name, "attention", "return (output, weights)", f"{type(result).__name__} from {kind}")
    out, weights = result
    if need_weights and weights is None:
        kind = type(attention).__name__
        raise invalid(name, "attention", "return weights where need_weights is True", f"None from {kind}")
    return out if samples is None else read_samples(name, "attention", out).values, weights if need_weights else None


def _words_for_torch(
    name: str, attention: nn.MultiheadAttention, x: Tensor, memory: Tensor, words: dict[str, Any]
) -> dict[str, Any]:
    """torch's attention has no Mask and no cache, and takes is_causal as a mere hint: written out."""
    for word, instead in (("mask", "attn_mask only"), ("cache", "none")):
        if words.get(word) is not None:
            cure = f"be None with a torch.nn.MultiheadAttention, which has {instead}; use headwise.MultiheadAttention"
            raise invalid(name, word, cure, words[word], x=x)
    if not words.get("is_causal"):
        return words
    if x.is_nested or memory.is_nested:
        cure = "be headwise.MultiheadAttention for nested tensors; upgrade() makes it of torch's"
        raise invalid(name, "attention", cure, type(attention).__name__, x=x, memory=memory)
    dim = -2 if attention.batch_first or x.dim() == 2 else 0
    causal = future(x.shape[dim], memory.shape[dim], x.device)
    return {**words, "is_causal": False, "attn_mask": with_future(name, words.get("attn_mask"), causal)}


def future(queries: int, keys: int, device: torch.device) -> Tensor:
    """(L, S) bool, True where the key comes after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)


def with_future(name: str, attn_mask: Tensor | None, causal: Tensor) -> Tensor:
    """A mask of torch's kind that hides the future too.

    Raises:
        ValueError: it is of another size.
    """
    if attn_mask is None:
        return causal
    if attn_mask.shape[-2:] != causal.shape:  # a broadcast would hide that torch does not take it
        rule = f"end in (L, S) = {tuple(causal.shape)}"
        raise invalid(name, "attn_mask", rule, tuple(attn_mask.shape))
    return attn_mask | causal if attn_mask.dtype == torch.bool else attn_mask.masked_fill(causal, float("-inf"))


def first_norm(name: str, norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x); what does not fit is named as attention would, had it come first."""
    try:
        out: Tensor = norm(x)
    except RuntimeError as error:
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or not x.ndim:
            raise
        if x.size(-1) != weight.shape[-1]:
            raise invalid(name, "x", f"be {weight.shape[-1]} wide", x.size(-1), x=x) from error
        for what in ("dtype", "device"):
            have, want = getattr(x, what), getattr(weight, what)
            if have != want:
                rule = f"have the parameters' {what}, {want}; convert it or the module with .to()"
                raise invalid(name, "x", rule, have, x=x) from error
        raise
    return out


def check_attention(
    name: str, argument: str, attention: nn.Module, embed_dim: int, num_heads: int | None, memory_dim: int | None = None
) -> None:
    """What an attention that was passed in says of itself must fit; what it does not say cannot be known.

    Raises:
        ValueError: it does not fit.
    """
    if not isinstance(attention, nn.Module):
        raise invalid(name, argument, "be a module", type(attention).__name__)
    widths = {"embed_dim": embed_dim, "num_heads": num_heads, "batch_first": True}
    for attribute, wanted in (widths | {"kdim": memory_dim, "vdim": memory_dim}).items():
        got = getattr(attention, attribute, wanted)
        if wanted is not None and got != wanted:
            raise invalid(name, f"{argument}.{attribute}", f"be {wanted}", got)


def check_input(name: str, argument: str, x: object) -> None:
    """Hold that it is a tensor of one sample or of a batch.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        raise invalid(name, argument, f"be a tensor, 3-D, or 2-D for one sample{cure_for(x)}", kind_of(x))


def check_rows(name: str, argument: str, rows: Tensor, x: Tensor, batch_first: bool) -> None:
    """Hold that a padding mask of queries is bool and fits x: (B, L), or (L,) unbatched, and x is not nested.

    Raises:
        ValueError: it is not.
    """
    if x.is_nested:
        raise invalid(name, argument, "be None beside a nested tensor, which holds no padding", kind_of(rows), x=x)
    shape = x.shape[:-1] if batch_first or x.dim() != 3 else torch.Size((x.shape[1], x.shape[0]))
    check_padding(name, argument, rows, shape, x)


def zero_rows(x: Tensor, rows: Tensor, batch_first: bool) -> Tensor:
    """x with 0 where `rows`, (B, L) or (L,), is True."""
    return x.masked_fill((rows if batch_first or rows.dim() == 1 else rows.T)[..., None], 0.0)


def _zero_weights(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.masked_fill((rows if weights.dim() == rows.dim() + 1 else rows.unsqueeze(-2))[..., None], 0.0)


def check_padding(function: str, argument: str, mask: object, shape: torch.Size, x: Tensor) -> None:
    """Hold that a padding mask is bool, of this shape, and where x is.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(mask, Tensor) or mask.is_nested or mask.dtype != torch.bool or mask.shape != shape:
        raise invalid(function, argument, f"be bool {tuple(shape)}, True = padding", kind_of(mask), x=x)
    if mask.device != x.device:
        raise invalid(function, argument, f"be on the input's device {x.device}", mask.device, x=x)


def silence(x: Tensor, rows: Tensor, key_padding_mask: object, batch_first: bool) -> Tensor:
    """x with 0 where a position is padding as query and as key: no result depends on what it holds there."""
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.device != rows.device:
        return x  # nothing, or attention names it
    hidden = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == float("-inf")
    return zero_rows(x, rows & hidden, batch_first) if hidden.shape == rows.shape else x  # attention names the shape


def told(
    stack: nn.Module,
    part: nn.Module,
    ours: type[nn.Module],
    words: dict[str, Any],
    extras: dict[str, Any],
    x: Tensor,
    memory: Tensor,
    batch_first: bool,
    rows: Tensor | None = None,
) -> dict[str, Any]:
    """The words of a call of `part`. What has another forward than ours may know torch's arguments only."""
    if isinstance(part, ours) and type(part).forward is ours.forward:
        return {**words, **extras, **given(query_padding_mask=rows)}
    if extras:
        name, kind = type(stack).__name__, type(part).__name__
        rule = "be left out with parts that have another forward than headwise's; upgrade() them"
        raise invalid(name, ", ".join(extras), rule, kind)
    return _written_out(stack, words, x, memory, batch_first)


def _written_out(
    stack: nn.Module, words: dict[str, Any], x: Tensor, memory: Tensor, batch_first: bool
) -> dict[str, Any]:
    """The words for a layer that is not ours: torch's takes is_causal for a hint, and heeds it in some modes only."""
    name, dim = type(stack).__name__, -2 if batch_first or x.dim() == 2 else 0
    words = dict(words)
    pairs = (
        ("src_mask", "is_causal", x),
        ("mask", "is_causal", x),
        ("tgt_mask", "tgt_is_causal", x),
        ("memory_mask", "memory_is_causal", memory),
    )
    for mask_word, flag, keys in pairs:
        mask = words.get(mask_word)
        if isinstance(mask, Mask):
            rule = "be a tensor for parts that have another forward than headwise's; upgrade() them"
            raise invalid(name, mask_word, rule, repr(mask))
        if mask_word in words and words[flag]:
            if x.is_nested or keys.is_nested:
                rule = "be False for nested tensors in parts that have another forward than headwise's; upgrade() them"
                raise invalid(name, flag, rule, True, x=x)
            words[mask_word] = with_future(name, mask, future(x.shape[dim], keys.shape[dim], x.device))
            words[flag] = mask is None
    return words
