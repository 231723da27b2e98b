"""Hooks: on every submodule, one at a time, for all modules at once, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.tools.subjects import each_mode, each_side, each_subject
from torch import Tensor, nn
from torch.nn.modules import module as globally

padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])


def called(model):
    """All submodules but the lists, which nothing calls; `attend` and a dropout of 0 too."""
    return {name: module for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}


def check_plain(*given):
    for value in given:
        for tensor in value if isinstance(value, tuple) else (value,):
            assert not isinstance(tensor, Tensor) or (type(tensor) is Tensor and not tensor.is_nested)


@pytest.mark.tool(
    order=1,
    tool="hooks",
    holds="forward and pre-forward hooks of every submodule, `out_proj` included, fire, on plain tensors",
    torch="none on `out_proj` (pytorch#78109); a stack's see nested tensors in eval with padding (pytorch#82919)",
)
@each_subject
@each_side
@each_mode
@padded_or_not
def test_forward_hooks(subject, side, training, padded):
    model = subject.build(side).train(training)
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    want = subject.call(model, *inputs, **words)
    seen = {}

    def note(name):
        def hook(module, given, out=None):
            check_plain(*given, out)
            seen.setdefault(name, []).append("before" if out is None else "after")

        return hook

    handles = []
    for name, module in called(model).items():
        handles += [module.register_forward_pre_hook(note(name)), module.register_forward_hook(note(name))]
    with torch.no_grad():
        got = subject.call(model, *inputs, **words)
    assert seen == {name: ["before", "after"] for name in called(model)}
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for handle in handles:
        handle.remove()
    assert torch.equal(subject.call(model, *inputs, **words), want)


@pytest.mark.tool(
    order=1,
    tool="hooks",
    holds="full backward hooks and pre-hooks of every submodule, `out_proj` included, fire, with autograd's gradients",
    torch="none on `out_proj` (pytorch#78109)",
)
@each_subject
@each_side
@each_mode
@padded_or_not
def test_backward_hooks(subject, side, training, padded):
    model = subject.build(side).double().train(training)
    plain = copy.deepcopy(model)
    inputs = [tensor.double().requires_grad_() for tensor in subject.inputs()]
    words = subject.hide(inputs) if padded else {}
    subject.call(plain, *inputs, **words).square().mean().backward()
    want = {name: parameter.grad for name, parameter in plain.named_parameters()}
    want_inputs = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None

    seen, came, left = {}, {}, {}

    def before(name):
        def hook(module, grad_output):
            check_plain(*grad_output)
            seen.setdefault(name, []).append("before")
            left[name] = grad_output

        return hook

    def after(name):
        def hook(module, grad_input, grad_output):
            check_plain(*grad_input, *grad_output)
            seen.setdefault(name, []).append("after")
            came[name] = grad_input
            assert all(
                torch.equal(one, other) for one, other in zip(grad_output, left[name], strict=True) if one is not None
            )

        return hook

    fed = {}
    for name, module in called(model).items():
        module.register_full_backward_pre_hook(before(name))
        module.register_full_backward_hook(after(name))
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, given, name=name: fed.update({name: given[0].detach()}))
    subject.call(model, *inputs, **words).square().mean().backward()

    assert {name: sorted(calls) for name, calls in seen.items()} == {
        name: ["after", "before"] for name in called(model)
    }
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, want[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )
    for tensor, grad in zip(inputs, want_inputs, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-9, atol=1e-9)
    # What the hooks of a linear saw is what gave the gradients of the model without hooks
    assert fed
    for name, x in fed.items():
        grad, weight = left[name][0].flatten(0, -2), plain.get_submodule(name).weight
        torch.testing.assert_close(grad.T @ x.flatten(0, -2), want[f"{name}.weight"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grad.sum(0), want[f"{name}.bias"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(came[name][0].flatten(0, -2), (grad @ weight).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.tool(
    order=1,
    tool="hooks",
    holds="one hook alone, on any submodule, fires in eval without gradients, and what it returns is used",
    torch="not on `out_proj` (pytorch#78109)",
)
@each_subject
@each_side
@padded_or_not
def test_one_hook_alone(subject, side, padded):
    """An affine module whose output a hook doubles is one with doubled parameters."""
    model = subject.build(side).eval()
    inputs = subject.inputs(L=31, S=29)  # so long that our encoder skips padding where nothing is hooked
    words = subject.hide(inputs) if padded else {}
    affine = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.LayerNorm))}
    assert affine
    for name in called(model):
        module, calls = model.get_submodule(name), []

        def hook(module, given, out, calls=calls, doubles=name in affine):
            calls.append(out)
            return 2 * out if doubles else None

        doubled = copy.deepcopy(model)
        for parameter in doubled.get_submodule(name).parameters() if name in affine else ():
            parameter.detach().mul_(2)
        handle = module.register_forward_hook(hook)
        with torch.no_grad():
            got = subject.call(model, *inputs, **words)
            handle.remove()
            want = subject.call(doubled, *inputs, **words)
        assert len(calls) == 1, name
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.tool(
    order=1,
    tool="hooks",
    holds="hooks on all modules at once (`register_module_*_hook`) see every submodule, forward and backward",
    torch="not `out_proj` (pytorch#78109)",
)
@each_subject
@each_side
@each_mode
def test_global_hooks(subject, side, training):
    model = subject.build(side).train(training)
    inputs = [tensor.requires_grad_() for tensor in subject.inputs()]
    want = subject.call(model, *inputs).detach()
    # Not `attn_dropout`, which the kernel draws: who watches all modules (FLOP counters do) must not change the kernel
    names = {module: name for name, module in called(model).items() if not name.endswith("attn_dropout")}
    seen = {name: set() for name in names.values()}

    def note(kind):
        return lambda module, *_: seen.get(names.get(module), set()).add(kind)

    handles = [
        globally.register_module_forward_pre_hook(note("pre-forward")),
        globally.register_module_forward_hook(note("forward")),
        globally.register_module_full_backward_pre_hook(note("pre-backward")),
        globally.register_module_full_backward_hook(note("backward")),
    ]
    try:
        got = subject.call(model, *inputs)
        got.square().mean().backward()
    finally:
        for handle in handles:
            handle.remove()
    missed = {name: calls for name, calls in seen.items() if len(calls) < 4}
    assert missed == {}
    torch.testing.assert_close(got.detach(), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(subject.call(model, *inputs).detach(), want)
