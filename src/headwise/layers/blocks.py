"""Encoder and decoder blocks and their stacks: attention and feed-forward, each normalized and added to what came in.

Axis letters: B batch, D width, H heads, L positions, S keys (L = S here).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import invalid
from headwise.core.algebra import Mask
from headwise.core.cache import Cache, CacheList, CrossCache, all_or_nothing, self_cache
from headwise.core.multihead import MultiheadAttention
from headwise.layers.feedforward import Activation, Norm, check_dropout
from headwise.layers.packing import find_stack_packing
from headwise.layers.parts import DecoderParts, EncoderParts, check_attention, close_stack, given, run_layers


class EncoderBlock(EncoderParts):
    """Self-attention and feed-forward with residuals: the block of a Transformer encoder, batch first.

        norm_first:  x = x + attention(norm1(x)),  then x = x + feed_forward(norm2(x))
        otherwise:   x = norm1(x + attention(x)),  then x = norm2(x + feed_forward(x))

    Args:
        embed_dim: D, the width of input and output.
        num_heads: H, which must divide D. None only with `attention`, which has its own.
        dropout: probability in [0, 1], in training, on the attention weights, inside the feed-forward and on what is
            added to x.
        feedforward_dim: M, the inner width. None: 4*D, with SwiGLU 8*D/3, which holds as many weights.
        activation: "gelu", "relu", "swiglu" (arXiv 2002.05202), or any callable or module on (B, L, M).
        norm: "layernorm", "rmsnorm", a callable that makes a module of width D (`nn.RMSNorm`), or a module, which is
            copied for each of the two places.
        norm_first: True normalizes what goes into each part (trains without warm-up), False what comes out of it (the
            original form).
        norm_eps: of "layernorm" and "rmsnorm".
        bias: adds biases to attention, linears and "layernorm".
        attention: a module that is called like `headwise.MultiheadAttention` and returns (output, weights); it brings
            its own dropout and must be batch first. `torch.nn.MultiheadAttention` fits. None builds ours.
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.

    Raises:
        ValueError: sizes, names or probabilities that cannot be; an `attention` of another width or not batch first.

    Children, named as those of `torch.nn.TransformerEncoderLayer`: `self_attn`, `linear1`, `linear2`, `norm1`, `norm2`,
    `dropout`, `dropout1`, `dropout2`, and `linear3` with SwiGLU. All of them are called, in train and in eval.

    Unlike torch's layer: batch first, pre-norm and GELU by default; `dropout` is the third argument and 0 by default,
    the inner width is `feedforward_dim`; in a call the padding mask comes before the attention mask. A checkpoint of a
    stock layer wants `activation="relu", norm_first=False` and its `feedforward_dim`. NaN in padding stays there, and
    eval runs the same code as training.

    Cost: 8*B*L*D^2 + 4*B*L^2*D + 4*B*L*D*M FLOPs forward, 6*B*L*D*M in place of the last with SwiGLU.
    Source: arXiv 1706.03762 section 3.1; norm_first: arXiv 2002.04745.

    Example:
        >>> import torch
        >>> from headwise import EncoderBlock
        >>> block = EncoderBlock(64, 4, 0.1)
        >>> x, padding = torch.randn(2, 5, 64), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> block(x, key_padding_mask=padding).shape
        torch.Size([2, 5, 64])
        >>> out, weights = block(x, key_padding_mask=padding, need_weights=True, average_attn_weights=False)
        >>> weights.shape
        torch.Size([2, 4, 5, 5])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int | None = None,
        dropout: float = 0.0,
        *,
        feedforward_dim: int | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layernorm",
        norm_first: bool = True,
        norm_eps: float = 1e-5,
        bias: bool = True,
        attention: nn.Module | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dropout(EncoderBlock, dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        own = _given_or_ours("EncoderBlock", "attention", attention, embed_dim, num_heads, None, dropout, bias, factory)
        self._build(
            {"self_attn": own},
            embed_dim,
            dropout,
            feedforward_dim=feedforward_dim,
            activation=activation,
            norm=norm,
            norm_first=norm_first,
            norm_eps=norm_eps,
            bias=bias,
            **factory,
        )

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each position to all others, then transform each by itself.

        Args:
            x: (B, L, D), or (L, D) unbatched, or nested (B, *, D): each sample as if alone, no torch masks.
            key_padding_mask: (B, L), or (L,) unbatched; bool with True = padding, or floating and added.
            attn_mask: as `MultiheadAttention` takes it; bool with True = may not attend, or floating and added.
            is_causal: position l sees positions 0 .. l only, beside all other masks.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0. Where key_padding_mask hides the same position, nothing that x holds there, NaN included,
                reaches a result or a gradient.
            mask: a Mask of `headwise.masks` (True may attend), intersected with the above.
            cache: of earlier positions, from `make_cache`; x are the new ones. Masks as in `MultiheadAttention`.
            need_weights: True returns the attention weights too.
            average_attn_weights: True averages them over heads, False gives each head's. None: as the attention does.

        Returns:
            Output shaped as x; with need_weights also the weights (B, L, S) or (B, H, L, S), without B if unbatched,
            before dropout.

        Raises:
            ValueError: sizes or dtypes that do not fit; `mask` or `cache` with an attention of torch's.
        """
        words = given(
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal or None,
            mask=mask,
            cache=cache,
            average_attn_weights=average_attn_weights,
        )
        return self._encode(x, query_padding_mask, need_weights, words)

    def make_cache(self, max_length: int | None = None, *, window: int | None = None) -> Cache:
        """A cache for decoding, empty: a `StaticCache` of max_length, or a `RollingCache` of window.

        Args:
            max_length: positions there is room for, prompt and padding included.
            window: positions that each position sees, its own included, of any number of positions.

        Raises:
            ValueError: both or none are given, or one below 1.
        """
        return self_cache(f"{type(self).__name__}.make_cache", max_length, window)


class DecoderBlock(DecoderParts):
    """Self-attention, attention to a memory, and feed-forward with residuals: the block of a decoder, batch first.

        norm_first:  x = x + self_attn(norm1(x)),  x = x + attention(norm2(x), memory),  x = x + feed_forward(norm3(x))
        otherwise:   x = norm1(x + self_attn(x)),  x = norm2(x + attention(x, memory)),  x = norm3(x + feed_forward(x))

    Args:
        embed_dim: D, the width of input and output.
        num_heads: H, which must divide D. None only with both attentions given, which have their own.
        dropout: as in `EncoderBlock`.
        feedforward_dim: as there.
        activation: as there.
        norm: as there, for three places.
        norm_first: as there.
        norm_eps: as there.
        bias: as there.
        memory_dim: width of the memory. None: D.
        attention: the self-attention, as in `EncoderBlock`. None builds ours.
        cross_attention: the attention to the memory, likewise.
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.

    Raises:
        ValueError: sizes, names or probabilities that cannot be; an attention of another width or not batch first.

    Children, named as those of `torch.nn.TransformerDecoderLayer`: `self_attn`, `multihead_attn` (to the memory),
    `linear1`, `linear2`, `norm1` to `norm3`, `dropout`, `dropout1` to `dropout3`, and `linear3` with SwiGLU.

    Nothing is causal by itself: pass `is_causal=True` to a decoder that must not look ahead.

    Cost: with L queries and S memory positions, 12*B*L*D^2 + 4*B*S*D^2 + 4*B*L*(L + S)*D + 4*B*L*D*M FLOPs forward.
    Source: arXiv 1706.03762 section 3.1; norm_first: arXiv 2002.04745.

    Example:
        >>> import torch
        >>> from headwise import DecoderBlock
        >>> block = DecoderBlock(64, 4)
        >>> x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
        >>> block(x, memory, is_causal=True).shape
        torch.Size([2, 5, 64])
        >>> out, (own, cross) = block(x, memory, is_causal=True, need_weights=True)
        >>> own.shape, cross.shape
        (torch.Size([2, 5, 5]), torch.Size([2, 5, 7]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int | None = None,
        dropout: float = 0.0,
        *,
        feedforward_dim: int | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layernorm",
        norm_first: bool = True,
        norm_eps: float = 1e-5,
        bias: bool = True,
        memory_dim: int | None = None,
        attention: nn.Module | None = None,
        cross_attention: nn.Module | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dropout(DecoderBlock, dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes = (embed_dim, num_heads)
        own = _given_or_ours("DecoderBlock", "attention", attention, *sizes, None, dropout, bias, factory)
        cross = _given_or_ours(
            "DecoderBlock", "cross_attention", cross_attention, *sizes, memory_dim, dropout, bias, factory
        )
        self._build(
            {"self_attn": own, "multihead_attn": cross},
            embed_dim,
            dropout,
            feedforward_dim=feedforward_dim,
            activation=activation,
            norm=norm,
            norm_first=norm_first,
            norm_eps=norm_eps,
            bias=bias,
            **factory,
        )

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        memory_attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: CacheList | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend from each position to the others, then to the memory, then transform each by itself.

        Args:
            x: (B, L, D), or (L, D) unbatched, or nested (B, *, D): each sample as if alone, no torch masks.
            memory: (B, S, memory_dim), or (S, memory_dim) unbatched: what an encoder returned; nested if x is.
            key_padding_mask: (B, L), or (L,) unbatched; bool with True = padding, or floating and added.
            memory_key_padding_mask: (B, S), or (S,) unbatched; likewise, for the memory.
            attn_mask: of the self-attention, as `MultiheadAttention` takes it.
            memory_attn_mask: of the attention to the memory, likewise.
            is_causal: position l sees positions 0 .. l of x only, beside all other masks; the memory is not affected.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0, and where key_padding_mask hides the same position nothing in it has an influence.
            mask: a Mask of `headwise.masks` (True may attend) for the self-attention, intersected with the above.
            memory_mask: one for the attention to the memory.
            cache: of earlier positions and of the memory, from `make_cache`; x are the new positions, memory is the
                same in each call. Masks as in `MultiheadAttention`.
            need_weights: True returns the weights of both attentions too.
            average_attn_weights: True averages them over heads, False gives each head's. None: as the attention does.

        Returns:
            Output shaped as x; with need_weights also (own, cross): (B, L, L) and (B, L, S), or (B, H, L, L) and
            (B, H, L, S), without B if unbatched, before dropout.

        Raises:
            ValueError: sizes or dtypes that do not fit; a Mask or `cache` with an attention of torch's.
        """
        own_cache, cross_cache = (None, None) if cache is None else _parts_of("DecoderBlock", cache, 2)
        words = given(
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal or None,
            mask=mask,
            cache=own_cache,
            average_attn_weights=average_attn_weights,
        )
        memory_words = given(
            key_padding_mask=memory_key_padding_mask,
            attn_mask=memory_attn_mask,
            mask=memory_mask,
            cache=cross_cache,
            average_attn_weights=average_attn_weights,
        )
        return all_or_nothing(
            cache, lambda: self._decode(x, memory, query_padding_mask, need_weights, words, memory_words)
        )

    def make_cache(self, max_length: int | None = None, *, window: int | None = None) -> CacheList:
        """The caches for decoding, empty: as `EncoderBlock.make_cache`, and a `CrossCache` for the memory.

        Args:
            max_length: positions there is room for, prompt and padding included.
            window: positions that each position sees, its own included, of any number of positions.

        Raises:
            ValueError: both or none are given, or one below 1.
        """
        return CacheList([self_cache(f"{type(self).__name__}.make_cache", max_length, window), CrossCache()])


class _Stack(nn.Module):
    """What `Encoder` and `Decoder` have in common."""

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = _blocks(type(self).__name__, layers)
        self.norm = norm

    def make_cache(self, max_length: int | None = None, *, window: int | None = None) -> CacheList:
        """The caches for decoding, empty, one for each block, which is asked for it.

        Args:
            max_length: positions there is room for, prompt and padding included.
            window: positions that each position sees, its own included, of any number of positions.

        Raises:
            ValueError: both or none are given, or one below 1, or a block has no `make_cache`.

        Example:
            >>> import torch
            >>> from headwise import Decoder, DecoderBlock
            >>> model = Decoder([DecoderBlock(64, 4) for _ in range(2)])
            >>> memory = torch.randn(2, 7, 64)
            >>> cache = model.make_cache(max_length=16)
            >>> with torch.no_grad():
            ...     for token in torch.randn(2, 3, 64).split(1, dim=1):
            ...         out = model(token, memory, is_causal=True, cache=cache)
            ...     cache.reorder([1, 1])
            >>> out.shape, cache.length
            (torch.Size([2, 1, 64]), 3)
        """
        name, caches = type(self).__name__, []
        for layer in self.layers:
            make = getattr(layer, "make_cache", None)
            if make is None:
                rule = "have make_cache, as headwise's blocks have, or CacheList be made by hand"
                raise invalid(f"{name}.make_cache", "layers", rule, type(layer).__name__)
            caches.append(make(max_length, window=window))
        return CacheList(caches)


class Encoder(_Stack):
    """A stack of encoder blocks and, if given, a last norm.

    Args:
        layers: the blocks, first to last, each called like an `EncoderBlock`; the same object may stand twice and then
            shares its weights. Kept as `layers`, as `torch.nn.TransformerEncoder` names them.
        norm: applied to what the last block returns; blocks with `norm_first=True` want one. None: nothing.

    Raises:
        ValueError: there is no block.

    Example:
        >>> import torch
        >>> from headwise import Encoder, EncoderBlock
        >>> encoder = Encoder([EncoderBlock(64, 4) for _ in range(2)], norm=torch.nn.LayerNorm(64))
        >>> encoder(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        cache: CacheList | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Run the blocks one after the other, each with the same masks.

        Args:
            x: (B, L, D), or (L, D) unbatched, or nested (B, *, D): each sample as if alone, no torch masks.
            key_padding_mask: as in `EncoderBlock.forward`.
            attn_mask: as there.
            is_causal: as there.
            query_padding_mask: as there; the output is exactly 0 at padding, behind the last norm too.
            mask: as there.
            cache: of earlier positions, from `make_cache`, one for each block.
            need_weights: True returns each block's weights too.
            average_attn_weights: as there.

        Returns:
            Output shaped as x; with need_weights also a list of each block's weights, first to last.

        Raises:
            ValueError: as `EncoderBlock.forward`.
        """
        words = given(
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal or None,
            query_padding_mask=query_padding_mask,
            mask=mask,
            average_attn_weights=average_attn_weights,
            need_weights=need_weights or None,
        )
        rows = None if need_weights else query_padding_mask
        packing = find_stack_packing(EncoderBlock, self.layers, x, rows, words | given(cache=cache))
        if packing is not None:
            x, words = packing.pack(x), {"mask": packing.own.mask}
        caches = _each("Encoder", cache, len(self.layers))
        step = partial(_call, (), words, caches)
        x, weights = all_or_nothing(cache, partial(run_layers, self.layers, step, x, need_weights))
        x = close_stack(x, packing, self.norm, query_padding_mask)
        return (x, weights) if need_weights else x


class Decoder(_Stack):
    """A stack of decoder blocks and, if given, a last norm.

    Args:
        layers: the blocks, first to last, each called like a `DecoderBlock`; the same object may stand twice and then
            shares its weights.
        norm: applied to what the last block returns; blocks with `norm_first=True` want one. None: nothing.

    Raises:
        ValueError: there is no block.

    Example:
        >>> import torch
        >>> from headwise import Decoder, DecoderBlock
        >>> decoder = Decoder([DecoderBlock(64, 4) for _ in range(2)], norm=torch.nn.LayerNorm(64))
        >>> decoder(torch.randn(2, 5, 64), torch.randn(2, 7, 64), is_causal=True).shape
        torch.Size([2, 5, 64])
    """

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        memory_attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: CacheList | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run the blocks one after the other, each with the same memory and masks.

        Args:
            x: (B, L, D), or (L, D) unbatched, or nested (B, *, D): each sample as if alone, no torch masks.
            memory: as in `DecoderBlock.forward`.
            key_padding_mask: as there.
            memory_key_padding_mask: as there.
            attn_mask: as there.
            memory_attn_mask: as there.
            is_causal: as there.
            query_padding_mask: as there; the output is exactly 0 at padding, behind the last norm too.
            mask: as there.
            memory_mask: as there.
            cache: of earlier positions and of the memory, from `make_cache`, one for each block.
            need_weights: True returns each block's weights too.
            average_attn_weights: as there.

        Returns:
            Output shaped as x; with need_weights also a list of each block's (own, cross) weights, first to last.

        Raises:
            ValueError: as `DecoderBlock.forward`.
        """
        words = given(
            key_padding_mask=key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            attn_mask=attn_mask,
            memory_attn_mask=memory_attn_mask,
            is_causal=is_causal or None,
            query_padding_mask=query_padding_mask,
            mask=mask,
            memory_mask=memory_mask,
            average_attn_weights=average_attn_weights,
            need_weights=need_weights or None,
        )
        cross = given(key_padding_mask=memory_key_padding_mask, attn_mask=memory_attn_mask, mask=memory_mask)
        rows = None if need_weights else query_padding_mask
        packing = find_stack_packing(DecoderBlock, self.layers, x, rows, words | given(cache=cache), memory, cross)
        if packing is not None and packing.cross is not None:
            words = {"mask": packing.own.mask, "memory_mask": packing.cross.mask}
            x, memory = packing.pack(x), packing.cross.keys.pack(memory)
        caches = _each("Decoder", cache, len(self.layers))
        step = partial(_call, (memory,), words, caches)
        x, weights = all_or_nothing(cache, partial(run_layers, self.layers, step, x, need_weights))
        x = close_stack(x, packing, self.norm, query_padding_mask)
        return (x, weights) if need_weights else x


def _call(
    given: tuple[Tensor, ...], words: dict[str, Any], caches: Iterator[dict[str, Any]], block: nn.Module, x: Tensor
) -> Any:
    """A block of a stack, with its own cache."""
    return block(x, *given, **words, **next(caches))


def _each(name: str, cache: CacheList | None, number: int) -> Iterator[dict[str, Any]]:
    """For each block of a stack, what its call says of its cache."""
    return iter([{}] * number if cache is None else [{"cache": one} for one in _parts_of(name, cache, number)])


def _parts_of(name: str, cache: object, count: int) -> CacheList:
    """The caches of so many parts.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(cache, CacheList) or len(cache) != count:
        raise invalid(name, "cache", f"be a CacheList of {count}; make_cache gives one", repr(cache))
    return cache


def _blocks(name: str, layers: Iterable[nn.Module]) -> nn.ModuleList:
    """The blocks of a stack."""
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.ModuleList, nn.Sequential)):
        raise invalid(name, "layers", "hold blocks, [block] for one", type(layers).__name__)
    held = nn.ModuleList(layers)
    if not held:
        raise invalid(name, "layers", "hold at least one block", "none")
    return held


def _given_or_ours(
    name: str,
    argument: str,
    attention: nn.Module | None,
    embed_dim: int,
    num_heads: int | None,
    memory_dim: int | None,
    dropout: float,
    bias: bool,
    factory: dict[str, Any],
) -> nn.Module:
    """The attention that was passed in, if it fits, else one of ours."""
    if attention is not None:
        check_attention(name, argument, attention, embed_dim, num_heads, memory_dim)
        return attention
    if num_heads is None:
        raise invalid(name, "num_heads", f"be given, or {argument}", None)
    return MultiheadAttention(
        embed_dim, num_heads, dropout, bias, kdim=memory_dim, vdim=memory_dim, batch_first=True, **factory
    )
