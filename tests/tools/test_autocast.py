"""Autocast with padding: one dtype and one answer in train and eval, on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests.tools.subjects import each_side, each_subject

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
row = pytest.mark.tool(
    order=12,
    tool="autocast",
    holds="with padding: train and eval give one dtype and the same numbers, near those of float32",
    torch="eval gives float32 where train gives bfloat16, a padded encoder raises on dtypes",
)
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def built(subject, side):
    """With weights about as large as torch draws them: sharp softmaxes would magnify all rounding."""
    model = subject.build(side)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() > 1 else 1.0)
    return model


def answer(subject, model, dtype, inputs, words, training, grad=True):
    """Output, and what of it is at the positions that padding leaves."""
    model.train(training)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = subject.call(model, *inputs, **words)
    return out, out if "src_key_padding_mask" not in words else out[~words["src_key_padding_mask"]]


@row
@each_subject
@each_side
@each_dtype
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_train_and_eval_agree(subject, side, dtype, padded):
    model = built(subject, side)
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    want = answer(subject, model, None, inputs, words, True)[1]
    outs = [
        answer(subject, model, dtype, inputs, words, training, grad)
        for training in (True, False)
        for grad in (True, False)
    ]
    assert len({(out.dtype, out.shape) for out, _ in outs}) == 1
    for _, kept in outs[1:]:  # a few roundings apart at most, such as another order of the same sums
        torch.testing.assert_close(kept, outs[0][1], rtol=0, atol=4 * EPS[dtype] * want.abs().max().item())
    error = (outs[0][1].float() - want).abs().max() / want.abs().max()
    assert error < 16 * EPS[dtype]


@row
@each_subject
@each_side
@each_dtype
def test_gradients_are_of_the_parameters_dtype(subject, side, dtype):
    """Of float32, near those without autocast, in both modes the same."""
    inputs = subject.inputs()
    words = subject.hide(inputs)
    found = []
    for cast, training in ((None, True), (dtype, True), (dtype, False)):
        model = built(subject, side)
        out = answer(subject, model, cast, inputs, words, training)[1]
        # One direction: the sum of squares behind a LayerNorm is nearly constant, and its gradient all rounding
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
        (out.float() * direction).sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        found.append(grads)
    largest = max(grad.abs().max() for grad in found[0].values())
    for name, want in found[0].items():
        assert (found[2][name] - found[1][name]).norm() <= 4 * EPS[dtype] * (want.norm() + 0.1 * largest), name
        assert (found[1][name] - want).norm() <= 32 * EPS[dtype] * (want.norm() + 0.1 * largest), name
