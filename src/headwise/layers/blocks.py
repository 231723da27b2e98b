"""The encoder block and its stack: attention and feed-forward, each normalized and added to what came in.

Axis letters: B batch, D width, H heads, L positions, S keys (L = S here).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import invalid, kind_of
from headwise.core.masks import Mask
from headwise.core.multihead import MultiheadAttention
from headwise.layers.feedforward import Activation, FeedForward, Norm, check_dropout, make_norm


class EncoderBlock(FeedForward):
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
    the inner width is `feedforward_dim`. A checkpoint of a stock layer wants `activation="relu", norm_first=False` and
    its `feedforward_dim`. NaN in padding stays there, and eval runs the same code as training.

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
        check_dropout("EncoderBlock", dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm_first = norm_first
        if attention is None:
            if num_heads is None:
                raise invalid("EncoderBlock", "num_heads", "be given, or attention", None)
            attention = MultiheadAttention(embed_dim, num_heads, dropout, bias, batch_first=True, **factory)
        else:
            _check_attention(attention, embed_dim, num_heads)
        self.self_attn = attention
        self._build_feed_forward(embed_dim, feedforward_dim, activation, dropout, bias=bias, **factory)
        self.norm1 = make_norm("EncoderBlock", norm, embed_dim, norm_eps, bias, **factory)
        self.norm2 = make_norm("EncoderBlock", norm, embed_dim, norm_eps, bias, **factory)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each position to all others, then transform each by itself.

        Args:
            x: (B, L, D), or (L, D) unbatched.
            key_padding_mask: (B, L), or (L,) unbatched; bool with True = padding, or floating and added.
            attn_mask: as `MultiheadAttention` takes it; bool with True = may not attend, or floating and added.
            is_causal: position l sees positions 0 .. l only, beside all other masks.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0. Where key_padding_mask hides the same position, nothing that x holds there, NaN included,
                reaches a result or a gradient.
            mask: a Mask of `headwise.masks` (True may attend), intersected with the above.
            need_weights: True returns the attention weights too.
            average_attn_weights: True averages them over heads, False gives each head's. None: as the attention does.

        Returns:
            Output shaped as x; with need_weights also the weights (B, L, S) or (B, H, L, S), without B if unbatched,
            before dropout.

        Raises:
            ValueError: sizes or dtypes that do not fit; `mask` with an attention of torch's.
        """
        rows = None
        if query_padding_mask is not None:
            check_padding("EncoderBlock", "query_padding_mask", query_padding_mask, x.shape[:-1], x)
            rows = query_padding_mask
            if key_padding_mask is not None:
                x = x.masked_fill(_hidden_too(rows, key_padding_mask)[..., None], 0.0)
        words = _given(
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal or None,
            mask=mask,
            average_attn_weights=average_attn_weights,
        )
        attend_to = _first_norm(self.norm1, x) if self.norm_first else x
        attended, weights = _attend(self.self_attn, attend_to, need_weights, words)
        x = x + self.dropout1(attended)
        if self.norm_first:
            x = x + self.dropout2(self._feed_forward(self.norm2(x)))
        else:
            x = self.norm1(x)
            x = self.norm2(x + self.dropout2(self._feed_forward(x)))
        if rows is not None:
            x = x.masked_fill(rows[..., None], 0.0)
        if weights is None:
            return x
        if rows is not None:
            weights = weights.masked_fill((rows if weights.ndim == x.ndim else rows.unsqueeze(-2))[..., None], 0.0)
        return x, weights


class Encoder(nn.Module):
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

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not self.layers:
            raise invalid("Encoder", "layers", "hold at least one block", "none")
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Run the blocks one after the other, each with the same masks.

        Args:
            x: (B, L, D), or (L, D) unbatched.
            key_padding_mask: as in `EncoderBlock.forward`.
            attn_mask: as there.
            is_causal: as there.
            query_padding_mask: as there; the output is exactly 0 at padding, behind the last norm too.
            mask: as there.
            need_weights: True returns each block's weights too.
            average_attn_weights: as there.

        Returns:
            Output shaped as x; with need_weights also a list of each block's weights, first to last.

        Raises:
            ValueError: as `EncoderBlock.forward`.
        """
        words = _given(
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal or None,
            query_padding_mask=query_padding_mask,
            mask=mask,
            average_attn_weights=average_attn_weights,
            need_weights=need_weights or None,
        )
        weights: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, **words)
            if need_weights:
                x, its_weights = x
                weights.append(its_weights)
        if self.norm is not None:
            x = self.norm(x)
            if query_padding_mask is not None:
                x = x.masked_fill(query_padding_mask[..., None], 0.0)
        return (x, weights) if need_weights else x


def _given(**words: Any) -> dict[str, Any]:
    """The words of a call that say something: what is not asked for need not be understood by what is called."""
    return {word: value for word, value in words.items() if value is not None}


def _attend(attention: nn.Module, x: Tensor, need_weights: bool, words: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    if isinstance(attention, nn.MultiheadAttention):
        if "mask" in words:
            cure = (
                "be None with a torch.nn.MultiheadAttention, which has attn_mask only; use headwise.MultiheadAttention"
            )
            raise invalid("EncoderBlock", "mask", cure, words["mask"], x=x)
        if words.pop("is_causal", False):  # torch takes it as a mere hint
            length = x.shape[-2]
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            words["attn_mask"] = _both(words.get("attn_mask"), causal)
    result = attention(x, x, x, need_weights=need_weights, **words)
    if not isinstance(result, tuple) or len(result) != 2:  # a bare tensor of batch 2 would unpack without a word
        kind = type(attention).__name__
        raise invalid("EncoderBlock", "attention", "return (output, weights)", f"{type(result).__name__} from {kind}")
    out, weights = result
    if need_weights and weights is None:
        kind = type(attention).__name__
        raise invalid("EncoderBlock", "attention", "return weights where need_weights is True", f"None from {kind}")
    return out, weights if need_weights else None


def _first_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x); what does not fit is named as attention would, had it come first."""
    try:
        out: Tensor = norm(x)
    except RuntimeError as error:
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or not x.ndim:
            raise
        if x.shape[-1] != weight.shape[-1]:
            raise invalid("EncoderBlock", "x", f"be {weight.shape[-1]} wide", x.shape[-1], x=x) from error
        for what in ("dtype", "device"):
            have, want = getattr(x, what), getattr(weight, what)
            if have != want:
                rule = f"have the parameters' {what}, {want}; convert it or the module with .to()"
                raise invalid("EncoderBlock", "x", rule, have, x=x) from error
        raise
    return out


def _both(attn_mask: Tensor | None, causal: Tensor) -> Tensor:
    if attn_mask is None:
        return causal
    if attn_mask.shape[-2:] != causal.shape:  # a broadcast would hide that torch does not take it
        rule = f"end in (L, S) = {tuple(causal.shape)}"
        raise invalid("EncoderBlock", "attn_mask", rule, tuple(attn_mask.shape))
    return attn_mask | causal if attn_mask.dtype == torch.bool else attn_mask.masked_fill(causal, float("-inf"))


def _check_attention(attention: nn.Module, embed_dim: int, num_heads: int | None) -> None:
    """What an attention that was passed in says of itself must fit; what it does not say cannot be known."""
    if not isinstance(attention, nn.Module):
        raise invalid("EncoderBlock", "attention", "be a module", type(attention).__name__)
    for name, wanted in (("embed_dim", embed_dim), ("num_heads", num_heads), ("batch_first", True)):
        got = getattr(attention, name, wanted)
        if wanted is not None and got != wanted:
            raise invalid("EncoderBlock", f"attention.{name}", f"be {wanted}", got)


def check_padding(function: str, argument: str, mask: object, shape: torch.Size, x: Tensor) -> None:
    """Hold that a padding mask is bool and of this shape.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        raise invalid(function, argument, f"be bool {tuple(shape)}, True = padding", kind_of(mask), x=x)


def _hidden_too(rows: Tensor, key_padding_mask: Tensor) -> Tensor:
    """Positions that are padding as query and as key: no result depends on what x holds there."""
    if not isinstance(key_padding_mask, Tensor):
        return torch.zeros_like(rows)  # attention names it
    hidden = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == float("-inf")
    return rows & hidden if hidden.shape == rows.shape else torch.zeros_like(rows)  # attention names a wrong shape
