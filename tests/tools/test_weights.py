"""Pruning, weight and spectral norms, parametrizations: on every projection, against torch's stock model in train mode.

The reference computes each weight by its formula, in float64, and differentiates through `functional_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.parity.pair import same
from tests.tools.subjects import arguments, each_subject, loss_of, run
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

RATE = 1e-3
SPLIT = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")
PACKED = ("in_proj_weight", "out_proj.weight")
ITERATIONS = 40  # until the largest singular value is exact


def _masked(learned: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
    return learned["{}_orig"] * held["{}_mask"]


def _weight_norm(learned: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
    g, v = learned.values()
    return g * v / v.square().sum(dim=1, keepdim=True).sqrt()


def _spectral_norm(learned: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
    (weight,) = learned.values()
    return weight / torch.linalg.matrix_norm(weight, 2)


def _orthogonal(learned: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
    (x,), (base,) = learned.values(), held.values()
    x = nn.functional.pad(x.tril(), (0, x.shape[0] - x.shape[1]))
    return (base @ torch.linalg.matrix_exp(x - x.T))[:, : learned["parametrizations.{}.original"].shape[1]]


@dataclass(frozen=True)
class Tool:
    """One of torch's, what it makes of a weight, and how it goes again.

    Attributes:
        put: from (module, name).
        formula: the weight, from the parameters and the buffers of that module, names with {} for the weight's.
        take: from (module, name).
    """

    put: Callable[[nn.Module, str], Any]
    formula: Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]
    take: Callable[[nn.Module, str], Any]


TOOLS = {
    "prune.l1_unstructured": Tool(
        lambda module, name: prune.l1_unstructured(module, name, amount=0.5), _masked, prune.remove
    ),
    "prune.random_structured": Tool(
        lambda module, name: prune.random_structured(module, name, amount=0.25, dim=0), _masked, prune.remove
    ),
    "weight_norm": Tool(nn.utils.weight_norm, _weight_norm, nn.utils.remove_weight_norm),
    "spectral_norm": Tool(
        lambda module, name: nn.utils.spectral_norm(module, name, ITERATIONS),
        _spectral_norm,
        nn.utils.remove_spectral_norm,
    ),
    "parametrizations.weight_norm": Tool(
        parametrizations.weight_norm, _weight_norm, parametrize.remove_parametrizations
    ),
    "parametrizations.spectral_norm": Tool(
        lambda module, name: parametrizations.spectral_norm(module, name, ITERATIONS),
        _spectral_norm,
        parametrize.remove_parametrizations,
    ),
    "parametrizations.orthogonal": Tool(
        lambda module, name: parametrizations.orthogonal(module, name, orthogonal_map="matrix_exp"),
        _orthogonal,
        parametrize.remove_parametrizations,
    ),
}


def cases(holds, stale):
    """Each tool, on the projections of one layout; `stale` is how some fail on torch's `out_proj`."""
    found = []
    for tool in TOOLS:
        never = f"on `out_proj` {stale[tool]} (pytorch#78109)" if tool in stale else None
        for weights, sides in ((SPLIT, ("torch", "split")), (PACKED, ("torch", "fused"))):
            names = ", ".join(f"`{weight.removesuffix('.weight')}`" for weight in weights)
            missing = "no `q_proj`, `k_proj`, `v_proj`"
            why = never if weights is PACKED else f"{missing}; {never}" if never else missing
            words = {} if why is None else {"torch": why}
            mark = pytest.mark.tool(order=3, tool=tool, holds=f"on {names}: {holds}", **words)
            found += [
                pytest.param(side, tool, weights, marks=mark, id=f"{tool}-{side}-{len(weights)}") for side in sides
            ]
    return pytest.mark.parametrize(("side", "tool", "weights"), found)


pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


@dataclass
class Place:
    """A weight that a tool has been put on."""

    attention: str
    weight: str
    module: nn.Module
    name: str

    def tensors(self, named: Any) -> dict[str, Tensor]:
        """What belongs to the weight, without its bias and its children, under the formulas' names."""
        own = {}
        for name, tensor in named(recurse=True):
            kind = name.replace(self.name, "{}")
            if kind != name:
                own[kind] = tensor
        return own


def places(model, weights):
    """Where the weights are, in every attention."""
    attentions = [name for name, module in model.named_modules() if type(module).__name__ == "MultiheadAttention"]
    assert attentions
    found = []
    for attention in attentions:
        for weight in weights:
            before, _, name = weight.rpartition(".")
            found.append(Place(attention, weight, model.get_submodule(attention).get_submodule(before), name))
    return found


def put(tool, subject, side, weights):
    """The model in float64 with the tool on its projections, which alone learn."""
    torch.manual_seed(3)
    model = subject.build(side).double().requires_grad_(False)
    found = places(model, weights)
    for place in found:
        weight = place.module.get_parameter(place.name)
        weight += 15 / weight.numel() ** 0.5  # one singular value far above the others
        weight.requires_grad_()
        TOOLS[tool].put(place.module, place.name)
    return model, found


def overridden(stock, found, made):
    """The stock model's parameters with these weights in their places."""
    parts = {(place.attention, place.weight): weight for place, weight in zip(found, made, strict=True)}
    replaced = {name: value.detach() for name, value in stock.named_parameters()}
    for attention in {place.attention for place in found}:
        start = f"{attention}." if attention else ""
        replaced[f"{start}out_proj.weight"] = parts[attention, "out_proj.weight"]
        packed = parts.get((attention, "in_proj_weight"))
        replaced[f"{start}in_proj_weight"] = (
            torch.cat([parts[attention, weight] for weight in SPLIT[:3]]) if packed is None else packed
        )
    return replaced


TWICE = "the second step goes through the first one's graph"
ONCE = dict.fromkeys(("prune.l1_unstructured", "prune.random_structured", "weight_norm"), TWICE)


@cases("right gradients over three steps, in eval what it is in train", ONCE | {"spectral_norm": "it never trains"})
@each_subject
def test_train(subject, side, tool, weights):
    model, found = put(tool, subject, side, weights)
    inputs, words = arguments(subject)
    formula = TOOLS[tool].formula
    learned = [
        {
            kind: tensor.detach().clone().requires_grad_()
            for kind, tensor in place.tensors(place.module.named_parameters).items()
        }
        for place in found
    ]
    start = [{kind: tensor.detach().clone() for kind, tensor in own.items()} for own in learned]
    held = [
        {kind: tensor.clone() for kind, tensor in place.tensors(place.module.named_buffers).items()} for place in found
    ]
    if tool.startswith("prune"):
        check_masks(tool, found)
    stock = subject.build("torch").double()
    flat = [tensor for own in learned for tensor in own.values()]

    def reference():
        made = [formula(*pair) for pair in zip(learned, held, strict=True)]
        replaced = overridden(stock, found, made)
        return run(subject, lambda *given, **named: functional_call(stock, replaced, given, named), inputs, words)

    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], RATE)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(run(subject, model, inputs, words)).backward()
        optimizer.step()
        for tensor, grad in zip(flat, torch.autograd.grad(loss_of(reference()), flat), strict=True):
            tensor.data -= RATE * grad
    for place, own, before in zip(found, learned, start, strict=True):
        for kind, got in place.tensors(place.module.named_parameters).items():
            moved, wanted = (got - before[kind]).detach(), (own[kind] - before[kind]).detach()
            largest = wanted.abs().max().item()
            assert largest > 1e-12
            torch.testing.assert_close(moved, wanted, rtol=1e-6, atol=1e-6 * largest + 2e-15)
    with torch.no_grad():
        want = reference()
        same(run(subject, model, inputs, words), want, 1e-8)
        same(run(subject, model.eval(), inputs, words), want, 1e-8)


def check_masks(tool, found):
    for place in found:
        mask, weight = (
            place.tensors(place.module.named_buffers)["{}_mask"],
            place.module.get_parameter(f"{place.name}_orig"),
        )
        if tool == "prune.l1_unstructured":
            assert torch.equal(mask == 0, weight.abs() <= weight.abs().flatten().sort().values[weight.numel() // 2 - 1])
        else:
            rows = mask.any(dim=1)
            assert torch.equal(mask, rows[:, None].expand_as(mask).to(mask.dtype))
            assert int((~rows).sum()) == len(rows) // 4


@cases(
    "removed, the model is a plain one again, which loads into torch's stock model",
    {"spectral_norm": "nothing is normalised before"},
)
@each_subject
def test_remove(subject, side, tool, weights):
    model, found = put(tool, subject, side, weights)
    inputs, words = arguments(subject)
    with torch.no_grad():
        want = run(subject, model, inputs, words)
    for place in found:
        TOOLS[tool].take(place.module, place.name)
    with torch.no_grad():
        fresh, stock = subject.build(side, seed=5).double(), subject.build("torch", seed=5).double()
        state = model.state_dict()
        assert set(state) == set(stock.state_dict())
        for training in (True, False):
            same(run(subject, model.train(training), inputs, words), want, 1e-9)
        fresh.load_state_dict(state)
        stock.load_state_dict(state)
        assert {name for name, _ in model.named_parameters()} == {name for name, _ in fresh.named_parameters()}
        same(run(subject, fresh.eval(), inputs, words), want, 1e-9)
        same(run(subject, stock, inputs, words), want, 1e-9)
    loss_of(run(subject, model.train(), inputs, words)).backward()
    assert all(place.module.get_parameter(place.name).grad.any() for place in found)
