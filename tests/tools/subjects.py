"""The models that every tool is held against: the attention, torch's five layers, and a user's model after `upgrade`.

Each comes in three sides: torch's own, ours with the projections split, ours with them fused; all with the same random
parameters. A test takes `subject` and `side`, builds with `subject.build(side)` and calls with `subject.call`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.parity.pair import fill
from torch import Tensor, nn

import headwise

D, H, M = 24, 4, 36  # width, heads, feed-forward width
B, L, S = 3, 7, 5  # batch, query positions, key positions

SIDES = ("torch", "split", "fused")


class Tagger(nn.Module):
    """What a user wrote: an encoder, and a second look at it by a few learned queries."""

    def __init__(self, num_tags: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(10, D)
        layer = nn.TransformerEncoderLayer(D, H, M, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(D, H, 0.1, batch_first=True)
        self.queries = nn.Parameter(torch.zeros(2, D))
        self.head = nn.Linear(D, num_tags)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, 2, num_tags) from (B, L, 10) and the padding (B, L), True where there is nothing."""
        x = self.encoder(self.embed(x), src_key_padding_mask=padding)
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.head(self.pool(queries, x, x, key_padding_mask=padding, need_weights=False)[0])


@dataclass(frozen=True)
class Subject:
    """A model, and how to call it.

    Attributes:
        name: as the page has it.
        make: torch's, from a dropout.
        widths: of each input.
        lengths: of each input: which of L and S.
        padding: the keyword of the key padding mask, and of which input it speaks.
        extra: keywords of every call.
    """

    name: str
    make: Callable[[float], nn.Module]
    widths: tuple[int, ...]
    lengths: tuple[str, ...]
    padding: tuple[str, int]
    extra: tuple[tuple[str, Any], ...] = ()

    def build(self, side: str, dropout: float = 0.0, seed: int = 1) -> nn.Module:
        """The model of one side, float32, in train mode; the same parameters on every side."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch speaks of nested tensors
            stock = fill(self.make(dropout), seed)
        for module in stock.modules():  # wherever a probability is kept
            if isinstance(module, nn.Dropout):
                module.p = dropout
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = dropout
        if side == "torch":
            return stock
        return headwise.upgrade(stock, fused_qkv=side == "fused")

    def inputs(self, batch: int = B, seed: int = 2, **sizes: int) -> tuple[Tensor, ...]:
        """Inputs (batch, length, width); sizes: L and S."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {"L": L, "S": S} | sizes
        return tuple(
            torch.randn(batch, sizes[letter], width, generator=generator)
            for letter, width in zip(self.lengths, self.widths, strict=True)
        )

    def hide(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """A key padding mask: sample b lacks its last b positions, at least one stays."""
        word, place = self.padding
        batch, length, _ = inputs[place].shape
        kept = (length - torch.arange(batch)).clamp(min=1)
        return {word: torch.arange(length) >= kept[:, None]}

    def call(self, model: Any, *inputs: Tensor, **words: Any) -> Tensor:
        """The output alone."""
        if len(inputs) < len(self.widths):
            raise TypeError(f"{self.name} takes {len(self.widths)} inputs")
        result = model(*inputs, **dict(self.extra), **words)
        return result[0] if isinstance(result, tuple) else result


def _layer(kind: type[nn.Module], dropout: float) -> nn.Module:
    return kind(D, H, M, dropout, batch_first=True)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            "MultiheadAttention",
            lambda p: nn.MultiheadAttention(D, H, p, batch_first=True),
            (D, D, D),
            ("L", "S", "S"),
            ("key_padding_mask", 1),
            (("need_weights", False),),
        ),
        Subject(
            "TransformerEncoderLayer",
            lambda p: _layer(nn.TransformerEncoderLayer, p),
            (D,),
            ("L",),
            ("src_key_padding_mask", 0),
        ),
        Subject(
            "TransformerEncoder",
            lambda p: nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer, p), 2),
            (D,),
            ("L",),
            ("src_key_padding_mask", 0),
        ),
        Subject(
            "TransformerDecoderLayer",
            lambda p: _layer(nn.TransformerDecoderLayer, p),
            (D, D),
            ("L", "S"),
            ("memory_key_padding_mask", 1),
        ),
        Subject(
            "TransformerDecoder",
            lambda p: nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer, p), 2, nn.LayerNorm(D)),
            (D, D),
            ("L", "S"),
            ("memory_key_padding_mask", 1),
        ),
        Subject(
            "Transformer",
            lambda p: nn.Transformer(D, H, 1, 1, M, p, batch_first=True),
            (D, D),
            ("S", "L"),
            ("memory_key_padding_mask", 0),
        ),
        Subject("upgraded model", lambda p: Tagger(), (10,), ("L",), ("padding", 0)),
    )
}


def arguments(subject: Subject) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs in float64, and the padding mask."""
    inputs = tuple(tensor.double() for tensor in subject.inputs())
    return inputs, subject.hide(inputs)


def run(subject: Subject, model: Any, inputs: tuple[Tensor, ...], words: dict[str, Tensor]) -> Tensor:
    """What is real of the output: at padding a stack of ours gives what torch's gives in eval."""
    out = subject.call(model, *inputs, **words)
    if subject.name == "TransformerEncoder":
        out = out.masked_fill(words["src_key_padding_mask"][..., None], 0)
    return out


def loss_of(out: Tensor) -> Tensor:
    """Of bounded slope, so that the deepest model does not run away."""
    return nn.functional.huber_loss(out, torch.zeros_like(out))


each_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
each_side = pytest.mark.parametrize("side", SIDES)
split_side = pytest.mark.parametrize("side", ["torch", "split"])  # where the tool looks for nn.Linear
each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
