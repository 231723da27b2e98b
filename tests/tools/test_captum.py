"""captum: attributions to inputs and layers, and the attention, with padding, against torch's layers in train mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from captum import attr
from tests.tools.subjects import D, H, each_mode, each_side, each_subject, split_side
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*(required_grads|require gradients).*:UserWarning")


STEPS = 60


class Scored(nn.Module):
    """One number a sample, read at its first position, which is never padding; masks are given by position."""

    def __init__(self, subject, model, words):
        super().__init__()
        self.subject, self.model, self.names = subject, model, tuple(words)

    def forward(self, *given):
        inputs, masks = given[: len(self.subject.widths)], given[len(self.subject.widths) :]
        out = self.subject.call(self.model, *inputs, **dict(zip(self.names, masks, strict=True)))
        return out[:, 0, :5].sum(1)


def setting(subject, side, training):
    """A model to attribute, its inputs, baselines near them, and the mask."""
    model = subject.build(side).double().train(training)
    inputs = tuple(tensor.double() for tensor in subject.inputs())
    baselines = tuple(
        tensor + 0.1 * other.double() for tensor, other in zip(inputs, subject.inputs(seed=7), strict=True)
    )
    words = subject.hide(inputs)
    return Scored(subject, model, words), inputs, baselines, tuple(words.values())


def attentions(model):
    found = [name for name, module in model.named_modules() if type(module).__name__ == "MultiheadAttention"]
    assert found
    return found


def same(got, want, tol=1e-8):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol * max(1.0, want.abs().max().item()))


def assert_complete(total, change, parts):
    """Up to what a sum of STEPS gradients lacks of the integral, where ReLUs have their corners."""
    assert ((total - change).abs() < 0.01 * sum(part.detach().abs().flatten(1).sum(1) for part in parts)).all()


def real(subject, tensor, masks):
    """Without padding, if it is a torch stack's: there our layers are given what torch's are in eval."""
    if subject.name == "TransformerEncoder":
        return tensor.masked_fill(masks[0].view(*masks[0].shape, *(1,) * (tensor.dim() - 2)), 0)
    return tensor


@pytest.mark.tool(
    order=16,
    tool="captum IntegratedGradients, Saliency, FeatureAblation",
    holds="complete (they sum up to the change), and in eval what torch's layers give in train",
    package="captum",
)
@each_subject
@each_side
@each_mode
def test_inputs(subject, side, training):
    model, inputs, baselines, masks = setting(subject, side, training)
    stock = setting(subject, "torch", True)[0]
    parts = attr.IntegratedGradients(model).attribute(inputs, baselines, additional_forward_args=masks, n_steps=STEPS)
    with torch.no_grad():
        change = model(*inputs, *masks) - model(*baselines, *masks)
    total = sum(part.flatten(1).sum(1) for part in parts)
    assert change.abs().min() > 1e-5
    assert_complete(total, change, parts)
    wanted = attr.IntegratedGradients(stock).attribute(inputs, baselines, additional_forward_args=masks, n_steps=STEPS)
    for part, want in zip(parts, wanted, strict=True):
        same(part, want)

    def others(scored):
        yield from attr.Saliency(scored).attribute(inputs, additional_forward_args=masks)
        features = tuple(torch.arange(tensor.shape[1])[None, :, None] for tensor in inputs)  # one position at a time
        with torch.no_grad():
            yield from attr.FeatureAblation(scored).attribute(
                inputs, baselines, feature_mask=features, additional_forward_args=masks
            )

    for got, want in zip(others(model), others(stock), strict=True):
        same(got, want)
    # What padding holds has no part in it
    word, place = subject.padding
    if subject.name in ("MultiheadAttention", "TransformerDecoderLayer", "TransformerDecoder"):
        assert parts[place][masks[0]].eq(0).all(), word


@contextlib.contextmanager
def replaced(model, name, change):
    """torch's attention of that name gives change(output) on."""
    handle = model.get_submodule(name).register_forward_hook(lambda module, given, out: (change(out[0]), out[1]))
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.tool(
    order=16,
    tool="captum LayerActivation, LayerGradientXActivation, LayerIntegratedGradients",
    holds="on `out_proj` of each attention: what autograd gives for torch's attention's output, and complete",
    package="captum",
    torch="`out_proj` is never called (pytorch#78109)",
)
@each_subject
@each_side
def test_out_proj(subject, side):
    model, inputs, baselines, masks = setting(subject, side, False)
    stock = setting(subject, "torch", True)[0]
    for name in attentions(model):
        layer = model.get_submodule(name).out_proj
        outputs = []
        with replaced(stock, name, lambda out, kept=outputs: kept.append(out) or out):
            stock(*inputs, *masks)
            stock(*baselines, *masks)
            score = stock(*inputs, *masks)
        (grad,) = torch.autograd.grad(score.sum(), outputs[-1])
        at_inputs, at_baselines, _ = (out.detach() for out in outputs)
        got = attr.LayerActivation(model, layer).attribute(inputs, masks).detach()
        same(real(subject, got, masks), real(subject, at_inputs, masks))
        got = attr.LayerGradientXActivation(model, layer).attribute(inputs, additional_forward_args=masks)
        same(real(subject, got.detach(), masks), real(subject, at_inputs * grad, masks))
        parts = attr.LayerIntegratedGradients(model, layer).attribute(
            inputs, baselines, additional_forward_args=masks, n_steps=STEPS
        )
        with torch.no_grad(), replaced(stock, name, lambda out, other=at_baselines: other):
            change = score - stock(*inputs, *masks)
        assert_complete(parts.detach().flatten(1).sum(1), change.detach(), (parts,))


@pytest.mark.tool(
    order=16,
    tool="captum LayerActivation",
    holds="of `q_proj` and `k_proj`: the attention weights that torch's attention returns",
    package="captum",
    torch="no `q_proj`, `k_proj`",
)
@each_subject
@split_side
def test_attention(subject, side):
    model, inputs, _, masks = setting(subject, side, False)
    stock = setting(subject, "torch", True)[0]
    for name in attentions(model):
        attention, theirs = model.get_submodule(name), stock.get_submodule(name)
        calls = []
        handle = theirs.register_forward_pre_hook(lambda *call, kept=calls: kept.append(call[1:]), with_kwargs=True)
        stock(*inputs, *masks)
        handle.remove()
        ((given, words),) = calls
        words = {"key_padding_mask": words.get("key_padding_mask"), "need_weights": True, "average_attn_weights": False}
        _, want = theirs(*given[:3], **words)
        q, k = (
            attr.LayerActivation(model, child).attribute(inputs, masks).unflatten(2, (H, D // H)).transpose(1, 2)
            for child in (attention.q_proj, attention.k_proj)
        )
        scores = q @ k.mT / (D // H) ** 0.5
        if words["key_padding_mask"] is not None:
            hidden = words["key_padding_mask"] != 0  # torch's layers have made it a floating one
            scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
        got = scores.softmax(-1).detach().transpose(1, 2)
        same(real(subject, got, masks), real(subject, want.detach().transpose(1, 2), masks))
