"""torch's five Transformer classes over our blocks: its constructors, calls, `state_dict` and first values.

What all five have in common, and where torch differs:

- What is a child is called, in train and in eval: hooks, adapters, swapped norms and activations act in both. torch
  computes whole encoder layers and stacks in eval without calling what they hold.
- `is_causal=True` hides the future whether or not a mask is given, and holds beside it. `False` and `None` leave all to
  the mask. torch takes it for a hint about the mask, and reads the mask's values where it is None.
- A mask is a tensor as torch takes it (bool with True = may not attend, or floating and added), of any shape that
  `MultiheadAttention` takes, or a Mask of `headwise.masks` (True may attend).
- `need_weights=True`, on every one of the five, returns the attention weights of each layer beside the output.
- Dropout on the attention weights is `self_attn.dropout`, and acts in training.
- Batch first, input may be nested, (B, *, D): each sample as if it were alone, in train and in eval, to a memory of
  other lengths too. Output is as the input is, jagged with its offsets. Masks have to be None, or a Mask of positions.
  torch takes the strided layout only, in an encoder, in eval without gradients.

Axis letters: B batch, D width (`d_model`), H heads (`nhead`), L target or source positions, S source positions.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise._checks import invalid, positive, shape_of
from headwise.core import layouts
from headwise.core.algebra import Mask
from headwise.core.multihead import MultiheadAttention
from headwise.core.projections import ProjectedAttention
from headwise.layers.blocks import DecoderBlock, EncoderBlock
from headwise.layers.feedforward import Activation, Norm, check_dropout, make_norm
from headwise.layers.packing import find_stack_packing
from headwise.layers.parts import (
    DecoderParts,
    EncoderParts,
    check_input,
    check_rows,
    close_stack,
    given,
    is_batch_first,
    run_layers,
    told,
    zero_rows,
)

__all__ = [
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

_AttnMask = Tensor | Mask | None
_Pair = tuple[Tensor, Tensor]


class TransformerEncoderLayer(EncoderParts):
    """`EncoderBlock` with the names, defaults and layouts of `torch.nn.TransformerEncoderLayer`.

    Args:
        d_model: D, the width of input and output.
        nhead: H, which must divide D.
        dim_feedforward: M, the inner width.
        dropout: probability in [0, 1], in training, on the attention weights, inside the feed-forward and on what is
            added to the input.
        activation: "relu", "gelu", "swiglu", or any callable or module on (B, L, M).
        layer_norm_eps: of the norms.
        batch_first: True reads (B, L, D), False (L, B, D).
        norm_first: True normalizes what goes into each part, False what comes out of it.
        bias: adds biases to attention, linears and "layernorm".
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.
        norm: "layernorm", "rmsnorm", a callable that makes a module of width D, or a module, which is copied.
        fused_qkv: as in `MultiheadAttention`.
        average_attn_weights: as there: what `need_weights` gives while `forward` is not told otherwise.

    Raises:
        ValueError: sizes, names or probabilities that cannot be.

    Children, `state_dict` and, under the same seed, first values are torch's. Unlike torch: see the module; output at
    padding is computed, in train and in eval, and is exactly 0 with `query_padding_mask=`.

    Source: arXiv 1706.03762 section 3.1; norm_first: arXiv 2002.04745.

    Example:
        >>> import torch
        >>> from headwise import TransformerEncoderLayer
        >>> layer = TransformerEncoderLayer(64, 4, batch_first=True)
        >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> layer(torch.randn(2, 5, 64), src_key_padding_mask=padding).shape
        torch.Size([2, 5, 64])
    """

    _width_word = "dim_feedforward"
    _input_word = "src"

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm = "layernorm",
        fused_qkv: bool = False,
        average_attn_weights: bool = True,
    ) -> None:
        super().__init__()
        check_dropout(TransformerEncoderLayer, dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"batch_first": batch_first, "fused_qkv": fused_qkv, **factory}
        options["average_attn_weights"] = average_attn_weights
        self._build(
            {"self_attn": MultiheadAttention(d_model, nhead, dropout, bias, **options)},
            d_model,
            dropout,
            feedforward_dim=dim_feedforward,
            activation=activation,
            norm=norm,
            norm_first=norm_first,
            norm_eps=layer_norm_eps,
            bias=bias,
            **factory,
        )

    def forward(
        self,
        src: Tensor,
        src_mask: _AttnMask = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | _Pair:
        """Attend from each position to all others, then transform each by itself.

        Args:
            src: (B, L, D) with batch_first, (L, B, D) without, (L, D) unbatched.
            src_mask: as in the module's text; a tensor (L, L) or any other shape that `MultiheadAttention` takes.
            src_key_padding_mask: (B, L), or (L,) unbatched; bool with True = padding, or floating and added.
            is_causal: position l sees positions 0 .. l only, beside all masks.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0.
            need_weights: True returns the attention weights too.
            average_attn_weights: True averages them over heads, False gives each head's. None: as constructed.

        Returns:
            Output shaped as src; with need_weights also the weights, (B, L, L) or (B, H, L, L), before dropout.

        Raises:
            ValueError: sizes, dtypes or devices that do not fit.
        """
        words = _words(src_mask, src_key_padding_mask, is_causal, average_attn_weights)
        return self._encode(src, query_padding_mask, need_weights, words)


class TransformerDecoderLayer(DecoderParts):
    """`DecoderBlock` with the names, defaults and layouts of `torch.nn.TransformerDecoderLayer`.

    Args:
        d_model: D, the width of input, memory and output.
        nhead: as in `TransformerEncoderLayer`, like all that follow.
        dim_feedforward: as there.
        dropout: as there.
        activation: as there.
        layer_norm_eps: as there.
        batch_first: as there.
        norm_first: as there.
        bias: as there.
        device: as there.
        dtype: as there.
        norm: as there.
        fused_qkv: as there.
        average_attn_weights: as there.

    Raises:
        ValueError: sizes, names or probabilities that cannot be.

    Children, `state_dict` and, under the same seed, first values are torch's. Unlike torch: see the module.

    Source: arXiv 1706.03762 section 3.1; norm_first: arXiv 2002.04745.

    Example:
        >>> import torch
        >>> from headwise import TransformerDecoderLayer
        >>> layer = TransformerDecoderLayer(64, 4, batch_first=True)
        >>> layer(torch.randn(2, 5, 64), torch.randn(2, 7, 64), tgt_is_causal=True).shape
        torch.Size([2, 5, 64])
    """

    _width_word = "dim_feedforward"
    _input_word = "tgt"

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm = "layernorm",
        fused_qkv: bool = False,
        average_attn_weights: bool = True,
    ) -> None:
        super().__init__()
        check_dropout(TransformerDecoderLayer, dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"batch_first": batch_first, "fused_qkv": fused_qkv, **factory}
        options["average_attn_weights"] = average_attn_weights
        names = ("self_attn", "multihead_attn")
        self._build(
            {name: MultiheadAttention(d_model, nhead, dropout, bias, **options) for name in names},
            d_model,
            dropout,
            feedforward_dim=dim_feedforward,
            activation=activation,
            norm=norm,
            norm_first=norm_first,
            norm_eps=layer_norm_eps,
            bias=bias,
            **factory,
        )

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: _AttnMask = None,
        memory_mask: _AttnMask = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, _Pair]:
        """Attend from each position to the others, then to the memory, then transform each by itself.

        Args:
            tgt: (B, L, D) with batch_first, (L, B, D) without, (L, D) unbatched.
            memory: (B, S, D), (S, B, D) or (S, D): what the encoder returned.
            tgt_mask: for the self-attention, (L, L) or as in `TransformerEncoderLayer.forward`.
            memory_mask: for the attention to the memory, (L, S) likewise.
            tgt_key_padding_mask: (B, L), or (L,) unbatched; bool with True = padding, or floating and added.
            memory_key_padding_mask: (B, S), or (S,) unbatched; likewise.
            tgt_is_causal: position l sees positions 0 .. l of tgt only, beside all masks.
            memory_is_causal: likewise for the memory; seldom what one wants.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0. None computes them, in train and in eval, as torch does.
            need_weights: True returns the weights of both attentions too.
            average_attn_weights: True averages them over heads, False gives each head's. None: as constructed.

        Returns:
            Output shaped as tgt; with need_weights also (own, cross): (B, L, L) and (B, L, S), or (B, H, L, L) and
            (B, H, L, S), before dropout.

        Raises:
            ValueError: sizes, dtypes or devices that do not fit.
        """
        words = _words(tgt_mask, tgt_key_padding_mask, tgt_is_causal, average_attn_weights)
        memory_words = _words(memory_mask, memory_key_padding_mask, memory_is_causal, average_attn_weights)
        return self._decode(tgt, memory, query_padding_mask, need_weights, words, memory_words)


class TransformerEncoder(nn.Module):
    """A stack of copies of an encoder layer: `torch.nn.TransformerEncoder` without its hidden paths.

    Args:
        encoder_layer: the layer to copy; ours, torch's, or any module that is called like torch's.
        num_layers: how many copies, at least 1.
        norm: applied to what the last layer returns. None: nothing.
        enable_nested_tensor: True makes padding exactly 0 where torch does so in eval, see below.
        mask_check: taken for torch's sake, and without effect: where padding lies makes no difference here.
        independent_init: True draws the parameters of each copy anew; False starts all copies equal, as torch does.

    Raises:
        ValueError: num_layers below 1, or a layer that takes other words (`EncoderBlock`, which `Encoder` stacks).

    Padding: with a bool `src_key_padding_mask`, no `src` mask and `use_nested_tensor`, the layers' output is exactly 0
    at padding, before the last norm, in train and in eval; layers of ours then compute nothing there. Everywhere else
    it is computed. `use_nested_tensor` is torch's: enable_nested_tensor, and a layer that is batch first and post-norm,
    with biases, relu or gelu, and an even number of heads. torch zeroes such padding in eval if it is on the right, and
    computes it in training; and drops tokens whose floating padding mask is not 0.

    Source: torch.nn.TransformerEncoder; the rule for padding is ours.

    Example:
        >>> import torch
        >>> from headwise import TransformerEncoder, TransformerEncoderLayer
        >>> encoder = TransformerEncoder(TransformerEncoderLayer(64, 4, batch_first=True), 2)
        >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> out = encoder(torch.randn(2, 5, 64), src_key_padding_mask=padding)
        >>> out[1, 3:].eq(0).all()
        tensor(True)
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        *,
        independent_init: bool = False,
    ) -> None:
        super().__init__()
        self.layers = _copies(self, encoder_layer, num_layers, independent_init)
        self.num_layers = num_layers
        self.norm = norm
        self.enable_nested_tensor = enable_nested_tensor
        self.use_nested_tensor = enable_nested_tensor and _torch_would_nest(encoder_layer)
        self.mask_check = mask_check

    def forward(
        self,
        src: Tensor,
        mask: _AttnMask = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        query_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Run the layers one after the other, each with the same masks.

        Args:
            src: (B, L, D) with batch_first layers, (L, B, D) without, (L, D) unbatched.
            mask: as `src_mask` of `TransformerEncoderLayer.forward`.
            src_key_padding_mask: as there.
            is_causal: as there; None is False: what is masked is what the mask says.
            query_padding_mask: as there; 0 behind the last norm too. None: the rule of the class.
            need_weights: True returns each layer's weights too.
            average_attn_weights: as there.

        Returns:
            Output shaped as src; with need_weights also a list of each layer's weights, first to last.

        Raises:
            ValueError: as the layers; need_weights with a layer that is not ours.
        """
        check_input("TransformerEncoder", "src", src)
        x, batch_first, rows = src, _layout_of(self.layers[0]), query_padding_mask
        if (
            rows is None
            and self.use_nested_tensor
            and mask is None
            and src.dim() == 3
            and _is_bool(src_key_padding_mask)
        ):
            rows = cast(Tensor, src_key_padding_mask)
            check_rows("TransformerEncoder", "src_key_padding_mask", rows, src, batch_first)
        extras = given(need_weights=need_weights or None, average_attn_weights=average_attn_weights)
        words = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": bool(is_causal)}
        packing = None
        if rows is not None and not need_weights:
            asked = _words(mask, src_key_padding_mask, bool(is_causal), None)
            packing = find_stack_packing(TransformerEncoderLayer, self.layers, x, rows, asked)
        if packing is not None:
            x, words = packing.pack(x), {"src_mask": packing.own.mask}
        hidden = rows if packing is None else None

        def step(layer: nn.Module, x: Tensor) -> Any:
            return layer(x, **told(self, layer, TransformerEncoderLayer, words, extras, x, x, batch_first, hidden))

        x, weights = run_layers(self.layers, step, x, need_weights)
        if hidden is not None:
            x = zero_rows(x, hidden, batch_first)
        x = close_stack(x, packing, self.norm, query_padding_mask, batch_first)
        return (x, weights) if need_weights else x


class TransformerDecoder(nn.Module):
    """A stack of copies of a decoder layer: `torch.nn.TransformerDecoder`.

    Args:
        decoder_layer: the layer to copy; ours, torch's, or any module that is called like torch's.
        num_layers: how many copies, at least 1.
        norm: applied to what the last layer returns. None: nothing.
        independent_init: True draws the parameters of each copy anew; False starts all copies equal, as torch does.

    Raises:
        ValueError: num_layers below 1, or a layer that takes other words (`DecoderBlock`, which `Decoder` stacks).

    Output at padding is computed, in train and in eval, as torch does.

    Source: torch.nn.TransformerDecoder.

    Example:
        >>> import torch
        >>> from headwise import TransformerDecoder, TransformerDecoderLayer
        >>> decoder = TransformerDecoder(TransformerDecoderLayer(64, 4, batch_first=True), 2)
        >>> out, weights = decoder(torch.randn(2, 5, 64), torch.randn(2, 7, 64), tgt_is_causal=True, need_weights=True)
        >>> [cross.shape for own, cross in weights]
        [torch.Size([2, 5, 7]), torch.Size([2, 5, 7])]
    """

    def __init__(
        self,
        decoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        independent_init: bool = False,
    ) -> None:
        super().__init__()
        self.layers = _copies(self, decoder_layer, num_layers, independent_init)
        self.num_layers = num_layers
        self.norm = norm

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: _AttnMask = None,
        memory_mask: _AttnMask = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[_Pair]]:
        """Run the layers one after the other, each with the same memory and masks.

        Args:
            tgt: as in `TransformerDecoderLayer.forward`, like all that follow.
            memory: as there.
            tgt_mask: as there.
            memory_mask: as there.
            tgt_key_padding_mask: as there.
            memory_key_padding_mask: as there.
            tgt_is_causal: as there; None is False: what is masked is what the mask says.
            memory_is_causal: as there.
            query_padding_mask: as there; 0 behind the last norm too.
            need_weights: True returns each layer's weights too.
            average_attn_weights: as there.

        Returns:
            Output shaped as tgt; with need_weights also a list of each layer's (own, cross) weights, first to last.

        Raises:
            ValueError: as the layers; need_weights with a layer that is not ours.
        """
        extras = given(need_weights=need_weights or None, average_attn_weights=average_attn_weights)
        check_input("TransformerDecoder", "tgt", tgt)
        x, batch_first = tgt, _layout_of(self.layers[0])
        words: dict[str, Any] = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "tgt_is_causal": bool(tgt_is_causal),
            "memory_is_causal": memory_is_causal,
        }
        packing, rows = None, query_padding_mask
        if rows is not None and not need_weights:
            own = _words(tgt_mask, tgt_key_padding_mask, bool(tgt_is_causal), None)
            cross = _words(memory_mask, memory_key_padding_mask, memory_is_causal, None)
            packing = find_stack_packing(TransformerDecoderLayer, self.layers, x, rows, own, memory, cross)
        if packing is not None and packing.cross is not None:
            words = {"tgt_mask": packing.own.mask, "memory_mask": packing.cross.mask}
            x, memory, rows = packing.pack(x), packing.cross.keys.pack(memory), None

        def step(layer: nn.Module, x: Tensor) -> Any:
            said = told(self, layer, TransformerDecoderLayer, words, extras, x, memory, batch_first, rows)
            return layer(x, memory, **said)

        x, weights = run_layers(self.layers, step, x, need_weights)
        x = close_stack(x, packing, self.norm, query_padding_mask, batch_first)
        return (x, weights) if need_weights else x


class Transformer(nn.Module):
    """Encoder and decoder: `torch.nn.Transformer`.

    Args:
        d_model: D, the width of source, target and output.
        nhead: as in `TransformerEncoderLayer`.
        num_encoder_layers: how many encoder layers, at least 1.
        num_decoder_layers: how many decoder layers, at least 1.
        dim_feedforward: as in `TransformerEncoderLayer`.
        dropout: as there.
        activation: as there.
        custom_encoder: a module to use in place of the encoder; called like torch's.
        custom_decoder: one in place of the decoder.
        layer_norm_eps: as in `TransformerEncoderLayer`.
        batch_first: as there.
        norm_first: as there.
        bias: as there.
        device: as there.
        dtype: as there.
        norm: as there, and of the last norm of both stacks.
        fused_qkv: as there.
        average_attn_weights: as there.

    Raises:
        ValueError: sizes, names or probabilities that cannot be.

    Padding: as `TransformerEncoder` and `TransformerDecoder` have it.

    Source: arXiv 1706.03762; torch.nn.Transformer.

    Example:
        >>> import torch
        >>> from headwise import Transformer
        >>> model = Transformer(64, 4, 2, 2, batch_first=True)
        >>> model(torch.randn(2, 7, 64), torch.randn(2, 5, 64), tgt_is_causal=True).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm = "layernorm",
        fused_qkv: bool = False,
        average_attn_weights: bool = True,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        words: dict[str, Any] = {
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": activation,
            "layer_norm_eps": layer_norm_eps,
            "batch_first": batch_first,
            "norm_first": norm_first,
            "bias": bias,
            "norm": norm,
            "fused_qkv": fused_qkv,
            "average_attn_weights": average_attn_weights,
            **factory,
        }
        if custom_encoder is None:
            layer: nn.Module = TransformerEncoderLayer(d_model, nhead, **words)
            last = make_norm("Transformer", norm, d_model, layer_norm_eps, bias, **factory)
            custom_encoder = TransformerEncoder(layer, num_encoder_layers, last)
        self.encoder = custom_encoder
        if custom_decoder is None:
            layer = TransformerDecoderLayer(d_model, nhead, **words)
            last = make_norm("Transformer", norm, d_model, layer_norm_eps, bias, **factory)
            custom_decoder = TransformerDecoder(layer, num_decoder_layers, last)
        self.decoder = custom_decoder
        self._reset_parameters()
        layouts.own_matrix_resets(self)
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: _AttnMask = None,
        tgt_mask: _AttnMask = None,
        memory_mask: _AttnMask = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        need_weights: bool = False,
        average_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[list[Tensor], list[_Pair]]]:
        """Encode the source, then decode the target beside it.

        Args:
            src: (B, S, D) with batch_first, (S, B, D) without, (S, D) unbatched.
            tgt: (B, L, D), (L, B, D) or (L, D).
            src_mask: as `mask` of `TransformerEncoder.forward`.
            tgt_mask: as in `TransformerDecoder.forward`.
            memory_mask: as there.
            src_key_padding_mask: (B, S), or (S,) unbatched; bool with True = padding, or floating and added.
            tgt_key_padding_mask: (B, L), or (L,) unbatched; likewise.
            memory_key_padding_mask: as src_key_padding_mask, for the decoder's attention to the memory; pass both.
            src_is_causal: as `is_causal` of `TransformerEncoder.forward`.
            tgt_is_causal: as in `TransformerDecoder.forward`.
            memory_is_causal: as there.
            need_weights: True returns all attention weights too.
            average_attn_weights: as there.

        Returns:
            Output shaped as tgt; with need_weights also (encoder, decoder): each layer's weights, and each layer's
            (own, cross) weights.

        Raises:
            ValueError: sizes, dtypes or devices that do not fit.
        """
        _check_both(self, src, tgt)
        extras = given(need_weights=need_weights or None, average_attn_weights=average_attn_weights)
        encoder_words = {"mask": src_mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": src_is_causal}
        words: dict[str, Any] = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "tgt_is_causal": tgt_is_causal,
            "memory_is_causal": memory_is_causal,
        }
        batch_first = self.batch_first
        said = told(self, self.encoder, TransformerEncoder, encoder_words, extras, src, src, batch_first)
        memory = self.encoder(src, **said)
        encoder_weights: list[Tensor] = []
        if need_weights:
            memory, encoder_weights = memory
        said = told(self, self.decoder, TransformerDecoder, words, extras, tgt, memory, batch_first)
        output = self.decoder(tgt, memory, **said)
        if not need_weights:
            return output  # type: ignore[no-any-return]
        output, decoder_weights = output
        return output, (encoder_weights, decoder_weights)

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """(sz, sz) floating, -inf where the key comes after the query, else 0; `is_causal=True` says it for less."""
        return torch.full((sz, sz), float("-inf"), dtype=dtype, device=device).triu(1)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, from the constructor's distributions."""
        for child in self.children():
            _draw_anew(child)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Xavier uniform for all that has two dimensions, under torch's name, in torch's order and with its numbers."""
        done: set[int] = set()
        for module in self.modules():
            split = isinstance(module, ProjectedAttention) and not module.fused_qkv
            first = [getattr(module, child) for child in layouts.CHILDREN] if split else []
            if split and layouts.draw_stacked(cast(ProjectedAttention, module)):
                done.update(id(child.weight) for child in first)
            for parameter in [p for child in first for p in child.parameters()] + list(module._parameters.values()):
                if parameter is not None and parameter.dim() > 1 and id(parameter) not in done:
                    nn.init.xavier_uniform_(parameter)
                    done.add(id(parameter))


def _words(
    mask: _AttnMask, key_padding_mask: Tensor | None, is_causal: bool, average_attn_weights: bool | None
) -> dict[str, Any]:
    """What `MultiheadAttention.forward` is told."""
    ours = isinstance(mask, Mask)
    return given(
        attn_mask=None if ours else mask,
        mask=mask if ours else None,
        key_padding_mask=key_padding_mask,
        is_causal=is_causal or None,
        average_attn_weights=average_attn_weights,
    )


def _is_bool(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == torch.bool


def _layout_of(layer: nn.Module) -> bool:
    return is_batch_first(getattr(layer, "self_attn", layer))


def _copies(stack: nn.Module, layer: nn.Module, number: int, independent_init: bool) -> nn.ModuleList:
    name, kind = type(stack).__name__, type(layer).__name__
    if not isinstance(layer, nn.Module) or isinstance(layer, (EncoderBlock, DecoderBlock)):
        rule = "be a module that is called like torch's layer; Encoder and Decoder stack our blocks"
        raise invalid(name, "the layer", rule, kind)
    copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(positive(name, "num_layers", number)))
    if independent_init:
        _draw_anew(copies)
    return copies


def _draw_anew(module: nn.Module) -> None:
    """Reset all that is in a module, children first: a parent may undo what its children draw."""
    for part in reversed(list(module.modules())):
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if reset is not None:
            reset()


def _torch_would_nest(layer: nn.Module) -> bool:
    """The conditions of torch's stack, as far as they concern how the layer was built."""
    attention: Any = getattr(layer, "self_attn", None)
    if not isinstance(layer, (TransformerEncoderLayer, nn.TransformerEncoderLayer)) or attention is None:
        return False
    norms = (getattr(layer.norm1, "eps", None), getattr(layer.norm2, "eps", None))
    activation = layer.activation
    return bool(
        not layer.norm_first
        and attention.batch_first
        and attention.kdim == attention.embed_dim == attention.vdim
        and attention.in_proj_bias is not None
        and (activation in (F.relu, F.gelu) or isinstance(activation, (nn.ReLU, nn.GELU)))
        and norms[0] == norms[1]
        and attention.num_heads % 2 == 0
    )


def _check_both(model: Transformer, src: Tensor, tgt: Tensor) -> None:
    for word, x in (("src", src), ("tgt", tgt)):
        check_input("Transformer", word, x)
    batch = 0 if model.batch_first else 1
    if batch and (src.is_nested or tgt.is_nested):
        rule = "be True for nested tensors, whose first dimension is the batch"
        raise invalid("Transformer", "batch_first", rule, False)
    if src.dim() != tgt.dim() or (src.dim() == 3 and src.size(batch) != tgt.size(batch)):
        shapes = f"({shape_of(src)}, {shape_of(tgt)})"
        raise invalid("Transformer", "src and tgt", "have the same batch size", shapes)
    widths = (src.size(-1), tgt.size(-1))
    if widths != (model.d_model, model.d_model):
        raise invalid("Transformer", "src and tgt", f"be {model.d_model} wide", widths, src=src, tgt=tgt)
