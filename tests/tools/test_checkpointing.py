"""Activation checkpointing, saved tensors elsewhere, and dropout that is switched on alone."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.tools.subjects import SUBJECTS, each_side, each_subject
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

row = pytest.mark.tool(
    order=13,
    tool="activation checkpointing",
    holds="with dropout: output and gradients as without it, `checkpoint`, `checkpoint_wrapper`, selective, hooks",
)


def built(subject, side):
    """In float64, as the order of summing gradients may change."""
    return subject.build(side, dropout=0.3).double()


def gradients(subject, model, call, padded=True, seed=6):
    """Output and every gradient of one training step under a seed."""
    inputs = tuple(x.double().requires_grad_() for x in subject.inputs())
    words = subject.hide(inputs) if padded else {}
    model.train().zero_grad()
    torch.manual_seed(seed)
    out = call(lambda *given: subject.call(model, *given, **words), *inputs)
    out.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"out": out.detach(), **{f"input {i}": x.grad for i, x in enumerate(inputs)}, **grads}


def plainly(function, *inputs):
    return function(*inputs)


def unwrapped(found):
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


def same(got, want):
    assert list(got) == list(want)
    largest = max(value.abs().max().item() for value in want.values())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12 * largest, msg=name)


@row
@each_subject
@each_side
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpoint(subject, side, padded, reentrant):
    """The whole model again in the backward pass, with the same drops; other drops, other gradients."""
    model = built(subject, side)
    want = gradients(subject, model, plainly, padded)
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    same(gradients(subject, model, again, padded), want)
    other = gradients(subject, model, again, padded, seed=7)
    assert not torch.equal(other["out"], want["out"])
    apart = gradients(subject, model, functools.partial(again, preserve_rng_state=False), padded)
    assert torch.equal(apart["out"], want["out"])  # only done again it drops other things
    assert not all(torch.allclose(apart[name], value) for name, value in want.items())


@row
@each_subject
@each_side
@pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name.lower())
def test_checkpoint_wrapper(subject, side, impl):
    """Round the whole, and round each layer and attention inside, as training scripts choose them."""
    want = gradients(subject, built(subject, side), plainly)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    whole = wrap(built(subject, side))
    assert list(whole.state_dict()) == list(subject.build(side).state_dict())
    same(
        {name.removeprefix("_checkpoint_wrapped_module."): v for name, v in gradients(subject, whole, plainly).items()},
        want,
    )
    for kinds in (("MultiheadAttention",), ("TransformerEncoderLayer", "TransformerDecoderLayer")):
        model = built(subject, side)
        inside = [m for m in model.modules() if m is not model and type(m).__name__ in kinds]
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m, inside=inside: m in inside)
        assert sum("CheckpointWrapper" in type(m).__name__ for m in model.modules()) == len(inside)
        same(unwrapped(gradients(subject, model, plainly)), want)


@row
@each_subject
@each_side
def test_selective_checkpoint(subject, side):
    """Products kept, the rest done again."""
    seen = []

    def policy(context, operator, *args, **kwargs):
        kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        seen.append(kept)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    model = built(subject, side)
    want = gradients(subject, model, plainly)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    same(gradients(subject, model, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)), want)
    assert set(seen) == {True, False}


@row
@each_subject
@each_side
def test_saved_tensors_elsewhere(subject, side):
    """Packed by a hook, as bytes on the CPU, and as offloading does it."""
    model = built(subject, side)
    want = gradients(subject, model, plainly)
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        same(gradients(subject, model, plainly), want)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        same(gradients(subject, model, plainly), want)


drop_row = pytest.mark.tool(
    order=13,
    tool="Monte Carlo dropout",
    holds="in eval, each `nn.Dropout` set to train drops, the attention weights' included, and nothing else does",
    torch="attention weights never drop: the attention has a number, no `nn.Dropout`",
)


@drop_row
@each_subject
@each_side
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_monte_carlo_dropout(subject, side, padded):
    """All on: every call differs. Off again: exactly the answer of eval."""
    model = subject.build(side, dropout=0.1).eval()
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    with torch.no_grad():
        want = subject.call(model, *inputs, **words)
        assert torch.equal(subject.call(model, *inputs, **words), want)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        torch.manual_seed(8)
        draws = torch.stack([subject.call(model, *inputs, **words) for _ in range(3)])
        assert not torch.equal(draws[0], draws[1])
        torch.manual_seed(8)
        assert torch.equal(subject.call(model, *inputs, **words), draws[0])
        model.eval()
        assert torch.equal(subject.call(model, *inputs, **words), want)
        # as they drop in training, number for number
        torch.manual_seed(8)
        assert torch.equal(subject.call(model.train(), *inputs, **words), draws[0])


@drop_row
@each_side
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_mean_over_many_draws_of_an_attention(side, padded):
    """An attention is linear in its weights, so that dropping them changes no mean: checked to five of its errors."""
    subject = SUBJECTS["MultiheadAttention"]
    model = subject.build(side, dropout=0.2).eval()
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    with torch.no_grad():
        want = subject.call(model, *inputs, **words)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        torch.manual_seed(8)
        draws = torch.stack([subject.call(model, *inputs, **words) for _ in range(400)])
    spread = draws.std(0)
    assert (spread > 0).all()
    assert ((draws.mean(0) - want).abs() < 5 * spread / 400**0.5).all()


@drop_row
@each_subject
@each_side
def test_each_dropout_alone(subject, side):
    """One at a time: only that one is called with anything to do; the attention's changes what attention gives."""
    model = subject.build(side, dropout=0.4).eval()
    inputs = subject.inputs()
    with torch.no_grad():
        want = subject.call(model, *inputs)
        drops = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        attentions = [m for m in model.modules() if type(m).__name__ == "MultiheadAttention"]
        own = [drop for attention in attentions for drop in attention.modules() if drop in drops]
        assert len(own) == len(attentions)
        for chosen in drops:
            first = []
            handles = [
                # every attention and every other dropout says whether it added anything random
                module.register_forward_hook(lambda m, args, out, first=first: first.append((m, args[0], out)))
                for module in drops
                if module not in own
            ]
            chosen.train()
            torch.manual_seed(8)
            out = subject.call(model, *inputs)
            chosen.eval()
            for handle in handles:
                handle.remove()
            assert not torch.equal(out, want)
            for module, given, made in first:
                assert torch.equal(given, made) == (module is not chosen)
            assert torch.equal(subject.call(model, *inputs), want)
