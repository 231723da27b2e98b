"""Jagged nested tensors: samples of unequal lengths in, jagged out, each as if it were alone."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.tools.subjects import each_mode, each_side, each_subject

row = pytest.mark.tool(
    order=9,
    tool="jagged nested tensors",
    holds="in and out, self and cross, equal to one by one, with gradients",
    torch="refused, in train and in eval (pytorch#153472)",
)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")

LENGTHS = {"L": [[7, 1, 3], [2, 11, 2]], "S": [[5, 2, 13], [3, 3, 1]]}  # of two batches
EMPTY = {"L": [4, 0, 0], "S": [3, 5, 0]}  # an empty memory leaves a bias, no NaN
LONG = {"L": [611, 2, 7], "S": [711, 5, 3]}  # so unequal that sequences run one by one


def jagged(subject, lengths, dtype=torch.float64, seed=3):
    """An input of each of the subject's widths; those of one letter share their offsets."""
    generator, offsets = torch.Generator().manual_seed(seed), {}
    made = []
    for letter, width in zip(subject.lengths, subject.widths, strict=True):
        if letter not in offsets:
            offsets[letter] = torch.tensor([0, *lengths[letter]]).cumsum(0)
        values = torch.randn(sum(lengths[letter]), width, generator=generator, dtype=dtype)
        made.append(torch.nested.nested_tensor_from_jagged(values, offsets[letter]).requires_grad_())
    return made


def one_by_one(subject, model, inputs, **words):
    """The output of each sample, dense and alone, one after the other; and the samples."""
    samples = [[sample.detach().requires_grad_() for sample in given.unbind()] for given in inputs]
    outs = [subject.call(model, *(s[None] for s in group), **words)[0] for group in zip(*samples, strict=True)]
    return torch.cat(outs), samples


def values_of(out):
    """One output after the other, whether the model pools (a dense output) or not."""
    return out.values() if out.is_nested else out.flatten(0, 1)


def check(subject, model, inputs, **words):
    """Output and gradients of inputs and parameters, against one by one; which sums what the samples give."""
    want_model = copy.deepcopy(model)
    out = subject.call(model, *inputs, **words)
    want, samples = one_by_one(subject, want_model, inputs, **words)
    got = values_of(out)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    seed = torch.randn(got.shape, generator=torch.Generator().manual_seed(5), dtype=got.dtype)
    got.backward(seed)
    want.backward(seed)
    for given, parts in zip(inputs, samples, strict=True):
        torch.testing.assert_close(given.grad.values(), torch.cat([p.grad for p in parts]), rtol=1e-8, atol=1e-8)
    theirs = dict(want_model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-8, atol=1e-8, msg=name)
    return out


@row
@each_subject
@each_side
@each_mode
def test_jagged_is_one_by_one(subject, side, training):
    model = subject.build(side).double().train(training)
    for batch in range(2):
        model.zero_grad()
        inputs = jagged(subject, {letter: both[batch] for letter, both in LENGTHS.items()})
        out = check(subject, model, inputs)
        query = inputs[0 if subject.lengths[0] == "L" else 1]
        if out.is_nested:  # with the query's own symbol for its lengths, so that a residual adds up
            assert out.shape == query.shape
            torch.testing.assert_close((query + out).values(), query.values() + out.values())


@row
@each_subject
@each_side
@pytest.mark.parametrize("lengths", [EMPTY, LONG], ids=["empty", "long"])
def test_empty_and_very_unequal_samples(subject, side, lengths):
    if lengths is EMPTY and subject.name == "Transformer":
        lengths = {"L": EMPTY["S"], "S": EMPTY["L"]}  # the other one empty, beside
    check(subject, subject.build(side).double(), jagged(subject, lengths))


CAUSAL = {
    "MultiheadAttention": {"is_causal": True},
    "TransformerEncoderLayer": {"is_causal": True},
    "TransformerEncoder": {"is_causal": True},
    "TransformerDecoderLayer": {"tgt_is_causal": True},
    "TransformerDecoder": {"tgt_is_causal": True},
    "Transformer": {"tgt_is_causal": True},
}


@row
@each_subject
@each_side
@pytest.mark.parametrize("lengths", [{k: v[0] for k, v in LENGTHS.items()}, LONG], ids=["short", "long"])
def test_the_future_of_each_sample_is_hidden(subject, side, lengths):
    """A changed last position of each sample changes nothing before it, and the whole is as one by one."""
    if subject.name == "upgraded model":  # its encoder is called without the word
        model = subject.build(side).double()
        encoder, inputs = model.encoder, jagged(subject, lengths)
        out = encoder(model.embed(inputs[0]), is_causal=True).values()
        want = [encoder(model.embed(sample[None]), is_causal=True)[0] for sample in inputs[0].unbind()]
        torch.testing.assert_close(out, torch.cat(want), rtol=1e-9, atol=1e-9)
        return
    model, inputs = subject.build(side).double(), jagged(subject, lengths)
    check(subject, model, inputs, **CAUSAL[subject.name])


@row
@each_subject
@each_side
def test_dropout_draws_for_each_position(subject, side):
    """In train, dropout acts: two calls differ, the same seed gives the same, and eval has none."""
    model = subject.build(side, dropout=0.3).train()
    inputs = jagged(subject, {letter: both[0] for letter, both in LENGTHS.items()}, torch.float32)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(values_of(subject.call(model, *inputs)))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    model.eval()
    want, _ = one_by_one(subject, model, inputs)
    torch.testing.assert_close(values_of(subject.call(model, *inputs)), want, rtol=1e-4, atol=1e-5)


@row
@each_subject
@each_side
def test_a_step_of_training(subject, side):
    """SGD on a jagged batch moves the parameters as SGD on the samples, one by one, does."""
    model = subject.build(side).double()
    other = copy.deepcopy(model)
    inputs = jagged(subject, {letter: both[1] for letter, both in LENGTHS.items()})
    values_of(subject.call(model, *inputs)).square().sum().backward()
    one_by_one(subject, other, inputs)[0].square().sum().backward()
    for one in (model, other):
        torch.optim.SGD(one.parameters(), 1e-3).step()
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=name)
