"""`torch.export` with dynamic sizes: the exported program, run at other sizes, gives what the model gives."""

from __future__ import annotations

import pytest
import torch
from tests.tools.subjects import each_subject
from tests.tools.test_compile import OBLONG, SQUARE, each_masked, masks
from torch import nn
from torch.export import Dim, export

row = pytest.mark.tool(
    order=6,
    tool="torch.export",
    holds="strict and not, with dynamic batch and lengths, train and eval: the eager numbers at other sizes, in core "
    "operators",
    torch="a stack's mask is read (pytorch#134616); its fused operators stay in the program in eval",
)
SIZES = ((3, 7, 5), (5, 11, 13), (2, 17, 7))  # batch, L, S


class Positional(nn.Module):
    """A subject as an exporter wants it: tensors by position, one output."""

    def __init__(self, subject, model, words=()):
        super().__init__()
        self.subject, self.model, self.words = subject, model, words

    def forward(self, *tensors):
        """Inputs first, then what is passed by keyword."""
        count = len(self.subject.widths)
        inputs, rest = tensors[:count], tensors[count:]
        return self.subject.call(self.model, *inputs, **dict(zip(self.words, rest, strict=True)))


def sizes():
    return Dim("batch", max=64), {letter: Dim(letter, max=512) for letter in "LS"}


def dynamic(subject, words=()):
    """Names of the sizes of each tensor: batch, and the length it has."""
    batch, lengths = sizes()
    letters = [*subject.lengths, *(subject.lengths[subject.padding[1]] for _ in words)]
    return (tuple({0: batch, 1: lengths[letter]} for letter in letters),)


def example(subject, padded, batch, **lengths):
    """Inputs, and the padding mask behind them."""
    inputs = subject.inputs(batch, **lengths)
    return (*inputs, *subject.hide(inputs).values()) if padded else inputs


def agree(got, want):
    """To float32's rounding with room: it differs between processors, and the page must say the same on each."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def check(model, shapes, strict, tensors_of):
    """Export at the first size, run at all of them."""
    grad = model.training
    with torch.set_grad_enabled(grad):
        program = export(model, tensors_of(SIZES[0]), dynamic_shapes=shapes, strict=strict)
        exported = program.module()
        for size in SIZES:
            given = tensors_of(size)
            agree(exported(*given), model(*given))
    names = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in names if "_fwd" in name or "_native_multi_head" in name or "nested" in name]


# Each side in one mode, torch's in both: a program of either layout is the same but for the projections
each_pair = pytest.mark.parametrize(
    ("side", "training"),
    [("torch", True), ("torch", False), ("split", False), ("fused", True)],
    ids=["torch-train", "torch-eval", "split-eval", "fused-train"],
)


@row
@each_subject
@each_pair
def test_export_with_padding(subject, side, training):
    words = (subject.padding[0],)
    model = Positional(subject, subject.build(side), words).train(training)
    check(model, dynamic(subject, words), False, lambda size: example(subject, True, size[0], L=size[1], S=size[2]))


@row
@each_subject
@each_pair
def test_strict_export(subject, side, training):
    model = Positional(subject, subject.build(side)).train(training)
    check(model, dynamic(subject), True, lambda size: example(subject, False, size[0], L=size[1], S=size[2]))


@row
@each_masked
@each_pair
def test_export_with_masks(subject, side, training):
    """In eval with bool masks, in train mode with floating ones."""
    kind = "float" if training else "bool"
    _, lengths = sizes()
    words = {word: [subject.lengths[at]] * 2 for word, at in SQUARE[subject.name].items()}
    if subject.name in OBLONG:
        words[OBLONG[subject.name]] = ["L", "S"]
    shapes = (*dynamic(subject)[0], *({at: lengths[letter] for at, letter in enumerate(two)} for two in words.values()))
    model = Positional(subject, subject.build(side), tuple(words)).train(training)

    def tensors(size):
        inputs = subject.inputs(size[0], L=size[1], S=size[2])
        return (*inputs, *masks(subject, inputs, kind).values())

    check(model, (shapes,), False, tensors)
