"""A classifier of sequences: time series of any number of channels, or token ids.

Axis letters: B batch, D width, H heads, L positions of the input, P positions that attend (L / stride), X channels,
Y classes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise._checks import invalid
from headwise.core.backends import autocasts
from headwise.core.multihead import MultiheadAttention
from headwise.layers.blocks import Encoder, EncoderBlock
from headwise.layers.feedforward import make_norm
from headwise.layers.parts import check_padding
from headwise.layers.positions import sinusoids

_CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
_NAME = "SequenceClassifier"
_NOT_SAVED = ("self", "device", "dtype", "__class__")
_EITHER = ("num_channels", "vocab_size")
_SIZES = ("num_classes", *_EITHER, "embed_dim", "num_heads", "num_layers", "kernel_size", "stride")
_CHOICES = {
    "activation": ("gelu", "relu", "swiglu"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_first": (True, False),
    "pooling": ("mean", "max"),
}


class SequenceClassifier(nn.Module):
    """Encoder blocks over an embedded sequence, pooled over its real positions to one score a class.

    Args:
        num_classes: Y, at least 1.
        num_channels: X, the values of each step of a time series. Give this or `vocab_size`.
        vocab_size: V, the number of token ids. Give this or `num_channels`.
        embed_dim: D, the width of the blocks.
        num_heads: H, which must divide D.
        num_layers: the number of blocks.
        dropout: probability in [0, 1], in training, inside the feed-forward and on what each part adds.
        attention_dropout: probability in [0, 1], in training, on the attention weights; 0 lets the fused kernel run.
        feedforward_dim: as in `EncoderBlock`.
        activation: "gelu", "relu" or "swiglu".
        norm: "layernorm" or "rmsnorm".
        norm_first: as in `EncoderBlock`; True adds a last norm.
        kernel_size: steps of a time series that one position is embedded from, centred. At least `stride`.
        stride: steps of a time series that one position stands for: above 1, long series become short, and attention
            costs 1 / stride^2. Tokens have 1.
        pooling: "mean" or "max" over the real positions.
        class_names: Y different names. Left out: "0", "1" and so on.
        channel_names: X different names. Left out: "1", "2" and so on.
        interval: the time from one step to the next in the training data, in `unit`; kept with the model, not computed
            with.
        unit: of `interval`: "ms", or "step" where the time is not known.
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.

    Raises:
        ValueError: sizes or names that cannot be, or not exactly one of `num_channels` and `vocab_size`.

    Series: `embedding.fit_scale(values)` before training brings each channel to one scale. Sequences of a padded batch
    give the same logits as alone. Positions are fixed sinusoids, so any length is taken.

    Cost: that of the blocks over P = L / stride positions.
    Source: arXiv 1706.03762 (encoder, positions).

    Example:
        >>> import torch
        >>> from headwise import SequenceClassifier
        >>> model = SequenceClassifier(3, num_channels=2)
        >>> x, padding = torch.randn(4, 9, 2), torch.arange(9) >= torch.tensor([[9], [7], [3], [1]])
        >>> logits, weights = model(x, padding, need_weights=True)
        >>> logits.shape, len(weights), weights[0].shape
        (torch.Size([4, 3]), 2, torch.Size([4, 4, 9, 9]))
    """

    def __init__(
        self,
        num_classes: int,
        *,
        num_channels: int | None = None,
        vocab_size: int | None = None,
        embed_dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        dropout: float = 0.2,
        attention_dropout: float = 0.0,
        feedforward_dim: int | None = None,
        activation: Literal["gelu", "relu", "swiglu"] = "gelu",
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        norm_first: bool = True,
        kernel_size: int = 1,
        stride: int = 1,
        pooling: Literal["mean", "max"] = "mean",
        class_names: Sequence[str] = (),
        channel_names: Sequence[str] = (),
        interval: float = 1.0,
        unit: str = "step",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # What `headwise.save` writes and `headwise.load` builds the model from; first, before anything else has a name.
        arguments = {name: value for name, value in locals().items() if name not in _NOT_SAVED}
        super().__init__()
        config = self.config = _settled(arguments)
        embed_dim = config["embed_dim"]
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding: SeriesEmbedding | TokenEmbedding
        if config["num_channels"] is not None:
            how = config["kernel_size"], config["stride"]
            self.embedding = SeriesEmbedding(config["num_channels"], embed_dim, *how, **factory)
        else:
            self.embedding = TokenEmbedding(config["vocab_size"], embed_dim, **factory)
        last_norm = make_norm(_NAME, norm, embed_dim, 1e-5, True, **factory) if norm_first else None
        self.encoder = Encoder([_block(config, factory) for _ in range(config["num_layers"])], last_norm)
        self.head = nn.Linear(embed_dim, config["num_classes"], **factory)

    @property
    def num_channels(self) -> int | None:
        """X of a model of time series; None for token ids."""
        number: int | None = self.config["num_channels"]
        return number

    @property
    def stride(self) -> int:
        """Steps that one position of the returned weights stands for."""
        stride: int = self.config["stride"]
        return stride

    @property
    def class_names(self) -> tuple[str, ...]:
        """Y names, in the order of the logits."""
        return tuple(self.config["class_names"])

    @property
    def channel_names(self) -> tuple[str, ...]:
        """X names, in the order of the input; none for token ids."""
        return tuple(self.config["channel_names"])

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, *, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Score each sequence of a batch.

        Args:
            x: a time series (B, L, X) in the parameters' dtype, or token ids (B, L), int64 or int32 in [0, V).
            padding_mask: (B, L) bool, True = padding. None: nothing is padding. Padding may hold anything; ids there
                must be in range.
            need_weights: True returns the attention weights too.

        Returns:
            Logits (B, Y); with need_weights also each block's weights (B, H, P, P), rows and columns of padding 0,
            where position p stands for the steps [p * stride, (p + 1) * stride). A sequence that is all padding is
            pooled to 0.

        Raises:
            ValueError: ranks, widths, lengths or dtypes that do not fit, and ids out of range (on the CPU).
        """
        _check_input(self, x, padding_mask)
        x_BPD, padding_BP = self.embedding(x, padding_mask)
        x_BPD = x_BPD + sinusoids(*x_BPD.shape[1:], device=x.device).to(x_BPD.dtype)
        words: dict[str, Any] = {"need_weights": True, "average_attn_weights": False} if need_weights else {}
        out = self.encoder(x_BPD, padding_BP, query_padding_mask=padding_BP, **words)
        x_BPD, weights = out if need_weights else (out, [])
        logits_BY: Tensor = self.head(_pool(x_BPD, padding_BP, self.config["pooling"]))
        return (logits_BY, weights) if need_weights else logits_BY


class SeriesEmbedding(nn.Module):
    """Channels brought to one scale, and each run of `stride` steps embedded with its surroundings.

    Args:
        num_channels: X.
        embed_dim: D.
        kernel_size: steps that a position sees, centred on its own.
        stride: steps of its own.
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.
    """

    mean_X: Tensor
    std_X: Tensor

    def __init__(
        self,
        num_channels: int,
        embed_dim: int,
        kernel_size: int = 1,
        stride: int = 1,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("mean_X", torch.zeros(num_channels, device=device, dtype=dtype))
        self.register_buffer("std_X", torch.ones(num_channels, device=device, dtype=dtype))
        self.conv = nn.Conv1d(num_channels, embed_dim, kernel_size, stride, device=device, dtype=dtype)

    def fit_scale(self, values: Sequence[Tensor]) -> None:
        """Set `mean_X` and `std_X` to those of `values`, N series (L, X) each; a constant channel keeps its scale."""
        num_channels, series = self.conv.in_channels, list(values)
        shapes = [tuple(one.shape) for one in series]
        if not sum(len(one) for one in series) or any(len(s) != 2 or s[1] != num_channels for s in shapes):
            rule = f"hold series (L, {num_channels}), one step at least"
            raise invalid("fit_scale", "values", rule, sorted(set(shapes)) or "none")
        std_X, mean_X = torch.std_mean(torch.cat(series).detach().double(), dim=0, correction=0)
        if not std_X.isfinite().all():
            raise invalid("fit_scale", "values", "be finite", f"means {mean_X.tolist()}")
        std_X = std_X.to(self.std_X.dtype)  # first: what is too small for the dtype is a constant too
        self.mean_X.copy_(mean_X)
        self.std_X.copy_(torch.where(std_X > 0, std_X, 1.0))

    def forward(self, x_BLX: Tensor, padding_BL: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the positions (B, P, D), P = L / stride rounded up, and which of them are padding (B, P)."""
        x_BLX = (x_BLX - self.mean_X) / self.std_X
        if padding_BL is not None:
            # What lies behind the end is 0, as it is for a series that ends with the batch: same numbers, alone or not.
            x_BLX = x_BLX.masked_fill(padding_BL[..., None], 0.0)
        (kernel_size,), (stride,) = self.conv.kernel_size, self.conv.stride
        length = x_BLX.shape[1]
        num_positions = (length + stride - 1) // stride  # of numbers above 0: ONNX rounds a quotient below 0 upwards
        before = (kernel_size - stride) // 2
        after = (num_positions - 1) * stride + kernel_size - length - before
        x_BPD = self.conv(F.pad(x_BLX.mT, (before, after))).mT
        if padding_BL is not None and stride > 1:  # a position is padding when all of its steps are
            whole_BL = F.pad(padding_BL, (0, num_positions * stride - length), value=True)
            padding_BL = whole_BL.unflatten(1, (num_positions, stride)).all(-1)
        return x_BPD, padding_BL


class TokenEmbedding(nn.Embedding):
    """A learned vector a token id; the padding mask passes through."""

    def forward(  # type: ignore[override]  # one call for both embeddings
        self, ids_BL: Tensor, padding_BL: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the vectors (B, L, D) and the mask as it came."""
        try:
            return super().forward(ids_BL), padding_BL
        except IndexError as error:
            rule = f"hold ids in [0, {self.num_embeddings}), at padding too"
            raise invalid(_NAME, "x", rule, f"{int(ids_BL.min())} to {int(ids_BL.max())}", x=ids_BL) from error


def _pool(x_BPD: Tensor, padding_BP: Tensor | None, pooling: str) -> Tensor:
    """Pool over the positions that are not padding, where x is 0; over none to 0: (B, D)."""
    if padding_BP is None:
        return x_BPD.mean(1) if pooling == "mean" else x_BPD.amax(1)
    if pooling == "mean":
        return x_BPD.sum(1) / (~padding_BP).sum(1, keepdim=True).clamp(min=1)
    highest_BD = x_BPD.masked_fill(padding_BP[..., None], float("-inf")).amax(1)
    return highest_BD.masked_fill(padding_BP.all(1, keepdim=True), 0.0)


def _block(config: dict[str, Any], factory: dict[str, Any]) -> EncoderBlock:
    sizes = config["embed_dim"], config["num_heads"], config["attention_dropout"]
    words = ("dropout", "feedforward_dim", "activation", "norm", "norm_first")
    # Fused: for calls this short, one product in place of three is what one notices.
    attention = MultiheadAttention(*sizes, batch_first=True, fused_qkv=True, **factory)
    return EncoderBlock(sizes[0], attention=attention, **{word: config[word] for word in words}, **factory)


def _settled(arguments: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments checked, in JSON's types, with the names written out."""
    config = dict(arguments)
    for name in _SIZES:
        size = config[name]
        if size is None and name in _EITHER:
            continue
        if isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 1:
            raise invalid(_NAME, name, "be an int of at least 1", repr(size))
        config[name] = operator.index(size)
    if (config["num_channels"] is None) == (config["vocab_size"] is None):
        rule = "be given for time series, or else vocab_size for token ids; exactly one of the two"
        raise invalid(_NAME, "num_channels", rule, f"{config['num_channels']} and {config['vocab_size']}")
    kernel_size, stride = config["kernel_size"], config["stride"]
    if kernel_size < stride:
        raise invalid(_NAME, "kernel_size", f"be at least stride {stride}, or steps would be left out", kernel_size)
    if config["vocab_size"] is not None and kernel_size != 1:
        raise invalid(_NAME, "kernel_size", "be 1 for token ids", kernel_size)
    for name, known in _CHOICES.items():
        if config[name] not in known or type(config[name]) is not type(known[0]):
            raise invalid(_NAME, name, f"be one of {list(known)}", repr(config[name]))
    if config["feedforward_dim"] is not None and hasattr(config["feedforward_dim"], "__index__"):
        config["feedforward_dim"] = operator.index(config["feedforward_dim"])
    for name in ("dropout", "attention_dropout", "interval"):
        try:
            config[name] = float(config[name])
        except (TypeError, ValueError) as error:
            raise invalid(_NAME, name, "be a number", repr(config[name])) from error
    if not 0 < config["interval"] < float("inf"):
        raise invalid(_NAME, "interval", "be above 0 and finite", config["interval"])
    config["class_names"] = _names("class_names", config["class_names"], config["num_classes"], 0)
    config["channel_names"] = _names("channel_names", config["channel_names"], config["num_channels"] or 0, 1)
    (config["unit"],) = _names("unit", [config["unit"]], 1, 0)
    return config


def _names(argument: str, names: Sequence[str], number: int, first: int) -> list[str]:
    """The names as given, or numbers counted from `first`."""
    given = [names] if isinstance(names, str) else list(names)
    if not given:
        return [str(first + index) for index in range(number)]
    if len(given) != number or not all(isinstance(name, str) for name in given) or len(set(given)) != number:
        raise invalid(_NAME, argument, f"be {number} different names", repr(names))
    for name in given:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise invalid(_NAME, argument, "be text that can be written to a file, without lone surrogates", repr(name))
    return [str(name) for name in given]


def _check_input(model: SequenceClassifier, x: Tensor, padding_mask: Tensor | None) -> None:
    if isinstance(model.embedding, SeriesEmbedding):
        num_channels, dtype = model.embedding.conv.in_channels, model.embedding.conv.weight.dtype
        if x.ndim != 3 or x.shape[2] != num_channels or x.shape[1] == 0:
            rule = f"be a padded batch of series (B, L, {num_channels}) with L at least 1"
            raise invalid(_NAME, "x", rule, tuple(x.shape))
        if x.dtype != dtype and not (x.dtype in _CAST_BY_AUTOCAST and autocasts(x.device)):
            raise invalid(_NAME, "x", f"be {dtype}, as the parameters; x.to({dtype})", x.dtype)
    else:
        if x.ndim != 2 or x.shape[1] == 0:
            raise invalid(_NAME, "x", "be a padded batch of token ids (B, L) with L at least 1", tuple(x.shape))
        if x.dtype not in (torch.int64, torch.int32):
            raise invalid(_NAME, "x", "be int64 or int32 token ids", x.dtype)
    if padding_mask is not None:
        check_padding(_NAME, "padding_mask", padding_mask, x.shape[:2], x)
