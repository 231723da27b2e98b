"""The classifier of the demo beside itself on `torch.nn.MultiheadAttention`: same outputs, weights and gradients."""

from __future__ import annotations

import pytest
from benchmarks.cases import classifier, with_torch_attention
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import headwise
from headwise.data.samples import collate, japanese_vowels


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [True, False])
def test_same_as_on_torch_attention(training: bool, norm_first: bool) -> None:
    train, _ = japanese_vowels()
    x, padding, labels = collate([train[index] for index in range(0, 256, 8)])
    assert padding.any()
    # No dropout: torch's attention returns another memory layout, which makes dropout draw other units.
    ours = headwise.SequenceClassifier(9, num_channels=12, norm_first=norm_first, dropout=0.0)
    ours.embedding.fit_scale(train.values)
    theirs = with_torch_attention(ours).double().train(training)
    ours.double().train(training)
    assert {type(block.self_attn) for block in theirs.encoder.layers} == {nn.MultiheadAttention}
    found = {}
    for name, model in (("ours", ours), ("theirs", theirs)):
        logits, weights = model(x.double(), padding, need_weights=True)
        F.cross_entropy(logits, labels).backward()
        gradients = [
            parameter.grad for layer in model.encoder.layers for parameter in (layer.linear1.weight, layer.norm1.weight)
        ]
        found[name] = [logits, *weights, model.embedding.conv.weight.grad, *gradients]
    for one, other in zip(found["ours"], found["theirs"], strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_what_is_measured_agrees(mode: str) -> None:
    case = classifier(mode)
    (theirs,) = case.theirs.values()
    for _ in range(2):  # after a step of the optimizer too
        assert_close(case.ours(), theirs(), rtol=1e-4, atol=1e-5)
