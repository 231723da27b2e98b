"""`torch.func`, forward mode and derivatives of derivatives, in float64, against loops over torch's plain formula."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from tests.tools.subjects import each_side, each_subject
from torch.autograd import functional as by_loop
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise import MultiheadAttention
from headwise.core import backends

row = pytest.mark.tool(
    order=7,
    tool="torch.func",
    holds="vmap over inputs and parameters, per-sample gradients, vjp, jvp, Jacobians, Hessian-vector products: a "
    "float64 loop's numbers",
    torch="no forward mode in the fused kernel (pytorch#128971); in eval a padded stack nests",
)
double = pytest.mark.tool(
    order=7,
    tool="double backward",
    holds="second derivatives by inputs and parameters: the plain formula's in float64, whichever kernel ran",
    torch="the fused kernel has none (pytorch#116350)",
)
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
each_padding = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
LANES = 3
MODES = (True, False)


def agree(got, want):
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


class Case:
    """A model in float64 as a function of its parameters, and torch's in train mode on the plain formula beside it."""

    def __init__(self, subject, side, training=True, padded=False, seed=1, batch=3, **sizes):
        self.subject, self.side = subject, side
        self.model = subject.build(side, seed=seed).double().train(training)
        self.stock = subject.build("torch", seed=seed).double()
        self.inputs = tuple(x.double() for x in subject.inputs(batch, **sizes))
        self.words = subject.hide(self.inputs) if padded else {}
        self.parameters = {name: value.detach() for name, value in self.model.named_parameters()}
        self.wanted = {name: value.detach() for name, value in self.stock.named_parameters()}

    def direction(self):
        """One direction in the space of parameters: in the model's own names, and in torch's."""
        both = (self.subject.build(side, seed=9).double() for side in (self.side, "torch"))
        return tuple({name: value.detach() for name, value in model.named_parameters()} for model in both)

    def call(self, parameters, inputs, words=None):
        return self._run(self.model, parameters, inputs, self.words if words is None else words)

    def want(self, parameters, inputs, words=None):
        with sdpa_kernel(SDPBackend.MATH):
            return self._run(self.stock, parameters, inputs, self.words if words is None else words)

    def _run(self, model, parameters, inputs, words):
        out = functional_call(model, parameters, tuple(inputs), dict(self.subject.extra) | words)
        out = out[0] if isinstance(out, tuple) else out
        if words and self.subject.name == "TransformerEncoder":  # here padding may be 0 or not
            out = out.masked_fill(words["src_key_padding_mask"][..., None], 0)
        return out

    def agree_by_name(self, got, want):
        """Two dictionaries, by the model's own names and by torch's."""
        twin = copy.deepcopy(self.model)
        for name, parameter in twin.named_parameters():
            parameter.data = got[name].detach()
        got = twin.state_dict()  # which speaks torch's names
        assert list(got) == list(want)
        largest = max(1.0, *(value.abs().max().item() for value in want.values()))  # a key's bias has 0, and rounding
        for name, value in want.items():
            torch.testing.assert_close(
                got[name], value, rtol=1e-8, atol=1e-10 * largest, msg=lambda text, name=name: f"{name}: {text}"
            )


def bent(out):
    """A number that depends on every number of an output in its own way, and not linearly."""
    return (torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view_as(out) * out.sin()).sum()


def gradients(case, parameters, inputs, words=None):
    """Of torch's on the plain formula: by name, and by input."""
    leaves = [value.clone().requires_grad_() for value in (*parameters.values(), *inputs)]
    named = dict(zip(parameters, leaves[: len(parameters)], strict=True))
    found = torch.autograd.grad(bent(case.want(named, leaves[len(parameters) :], words)), leaves)
    return dict(zip(parameters, found[: len(parameters)], strict=True)), found[len(parameters) :]


@row
@each_subject
@each_side
@each_padding
def test_vmap_over_inputs(subject, side, padded):
    for training in MODES:
        case = Case(subject, side, training, padded)
        lanes = [torch.stack([x + lane * x.flip(0) for lane in range(LANES)]) for x in case.inputs]
        words = {word: torch.stack([mask.roll(lane, 0) for lane in range(LANES)]) for word, mask in case.words.items()}
        with torch.set_grad_enabled(training):
            got = vmap(lambda words, *inputs, case=case: case.call(case.parameters, inputs, words))(words, *lanes)
        for lane in range(LANES):
            its = {word: mask[lane] for word, mask in words.items()}
            agree(got[lane], case.want(case.wanted, [x[lane] for x in lanes], its))


@row
@each_subject
@each_side
@each_padding
def test_vmap_over_parameters(subject, side, padded):
    """An ensemble: outputs, and the gradients of each member."""
    for training in MODES:
        cases = [Case(subject, side, training, padded, seed=seed) for seed in range(LANES)]
        stacked, buffers = stack_module_state([case.model for case in cases])
        first = cases[0]
        assert not buffers
        with torch.set_grad_enabled(training):
            outs = vmap(first.call, (0, None))(stacked, first.inputs)
            grads = vmap(grad(lambda values, first=first: bent(first.call(values, first.inputs))))(stacked)
        for lane, case in enumerate(cases):
            agree(outs[lane], case.want(case.wanted, case.inputs))
            want, _ = gradients(case, case.wanted, case.inputs)
            case.agree_by_name({name: value[lane] for name, value in grads.items()}, want)


@row
@each_subject
@each_side
@each_padding
def test_per_sample_gradients(subject, side, padded):
    for training in MODES:
        case = Case(subject, side, training, padded)

        def loss(parameters, inputs, words, case=case):
            one = {word: mask[None] for word, mask in words.items()}
            return bent(case.call(parameters, [x[None] for x in inputs], one))

        each = vmap(grad(loss), (None, 0, 0))(case.parameters, case.inputs, case.words)
        for sample in range(len(case.inputs[0])):
            one = slice(sample, sample + 1)
            its = {word: mask[one] for word, mask in case.words.items()}
            want, _ = gradients(case, case.wanted, [x[one] for x in case.inputs], its)
            case.agree_by_name({name: value[sample] for name, value in each.items()}, want)


@row
@each_subject
@each_side
@each_padding
@forward_mode
def test_vjp_and_jvp(subject, side, padded):
    """By the inputs and all parameters together."""
    for training in MODES:
        case = Case(subject, side, training, padded)
        names, (along, wanted_along) = list(case.wanted), case.direction()
        tangents = tuple(x.cos() for x in case.inputs)
        with torch.set_grad_enabled(training):
            out, pull = vjp(lambda *both, case=case: bent(case.call(*both)), case.parameters, case.inputs)
            by_name, by_input = pull(torch.ones_like(out))
            _, got = jvp(case.call, (case.parameters, case.inputs), (along, tangents))
        want_by_name, want_by_input = gradients(case, case.wanted, case.inputs)
        case.agree_by_name(by_name, want_by_name)
        agree(by_input, want_by_input)

        def stock(*values, case=case, names=names):
            return case.want(dict(zip(names, values[: len(names)], strict=True)), values[len(names) :])

        given = (*case.wanted.values(), *case.inputs)
        agree(got, by_loop.jvp(stock, given, (*wanted_along.values(), *tangents))[1])


@row
@each_subject
@each_side
@each_padding
@forward_mode
def test_jacobians(subject, side, padded):
    for training in MODES:
        case = Case(subject, side, training, padded, batch=2, L=3, S=2)
        with torch.set_grad_enabled(training):
            each = [jac(lambda *x, case=case: case.call(case.parameters, x)) for jac in (jacrev, jacfwd)]
            backward, forward = (jac(*case.inputs) for jac in each)
        want = by_loop.jacobian(lambda *x, case=case: case.want(case.wanted, x), case.inputs)[0]
        agree(backward, want)
        agree(forward, want)


@row
@each_subject
@each_side
@each_padding
@forward_mode
def test_hessian_times_vector(subject, side, padded):
    """Forward over reverse, by all parameters."""
    for training in MODES:
        case = Case(subject, side, training, padded)
        along, wanted_along = case.direction()
        slope = grad(lambda values, case=case: bent(case.call(values, case.inputs)))
        with torch.set_grad_enabled(training):
            _, got = jvp(slope, (case.parameters,), (along,))

        def loss(*values, case=case):
            return bent(case.want(dict(zip(case.wanted, values, strict=True)), case.inputs))

        _, want = by_loop.hvp(loss, tuple(case.wanted.values()), tuple(wanted_along.values()))
        case.agree_by_name(got, dict(zip(case.wanted, want, strict=True)))


def second(call, parameters, inputs):
    """The gradient of a gradient penalty: by name, and by input."""
    leaves = [value.clone().requires_grad_() for value in (*parameters.values(), *inputs)]
    names = list(parameters)
    named, inputs = dict(zip(names, leaves[: len(names)], strict=True)), leaves[len(names) :]
    slopes = torch.autograd.grad(bent(call(named, inputs)), inputs, create_graph=True)
    penalty = sum((slope.norm() - 1).square() for slope in slopes)
    found = torch.autograd.grad(penalty, leaves, allow_unused=True)  # a last bias has no second derivative
    found = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]
    return dict(zip(names, found[: len(names)], strict=True)), found[len(names) :]


@double
@each_subject
@each_side
@each_padding
def test_gradient_penalty(subject, side, padded):
    for training in MODES:
        case = Case(subject, side, training, padded)
        by_name, by_input = second(case.call, case.parameters, case.inputs)
        want_by_name, want_by_input = second(case.want, case.wanted, case.inputs)
        case.agree_by_name(by_name, want_by_name)
        agree(by_input, want_by_input)


@double
@each_subject
@each_side
@each_padding
def test_against_differences(subject, side, padded):
    """`gradgradcheck`, by inputs and parameters, along random directions."""
    case = Case(subject, side, True, padded, batch=2, L=3, S=2)
    names, count = list(case.parameters), len(case.inputs)

    def call(*values):
        return case.call(dict(zip(names, values[count:], strict=True)), values[:count])

    leaves = [value.clone().requires_grad_() for value in (*case.inputs, *case.parameters.values())]
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True, atol=1e-4)


@double
@pytest.mark.parametrize("side", ["split", "fused"])
def test_what_double_backward_costs_when_unused(side, say, monkeypatch):
    """Printed, for a short call, where it would show; the numbers are the same with it and without."""
    torch.set_num_threads(1)
    length, width = 16, 64
    module = MultiheadAttention(width, 4, batch_first=True, fused_qkv=side == "fused")
    x = torch.randn(1, length, width, requires_grad=True)
    leaves = [x, *module.parameters()]
    taught, calls = backends.teach, 10

    def forward():
        return module(x, x, x, need_weights=False)[0]

    def both():
        return torch.autograd.grad(forward(), leaves, torch.ones_like(x))

    found = {}
    for name, teach in (("with", taught), ("without", lambda *_: None)):
        monkeypatch.setattr(backends, "teach", teach)
        found[name] = forward(), *both()
    for one, other in zip(found["with"], found["without"], strict=True):
        assert torch.equal(one, other)

    for what, step in (("forward", forward), ("forward and backward", both)):
        best = {"with": float("inf"), "without": float("inf")}
        for _ in range(100):
            for name, teach in (("with", taught), ("without", lambda *_: None)):
                monkeypatch.setattr(backends, "teach", teach)
                begun = time.process_time()  # not wall time: machines are shared
                for _ in range(calls):
                    step()
                best[name] = min(best[name], (time.process_time() - begun) / calls * 1e6)
        cost = best["with"] - best["without"]
        share = 100 * cost / best["without"]
        say(
            f"double backward, when unused, {side}, {what} of B=1 L={length} D={width} H=4: "
            f"{cost:.1f} us a call ({share:.1f} % of {best['without']:.1f} us)"
        )
