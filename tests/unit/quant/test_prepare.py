"""prepare_qat turns all or nothing: what is planned before, what it refuses then, and projections that are tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise
from headwise.quant import FakeQuantLinear


class Two(nn.Module):
    """Attention with fused projections, of headwise or torch, and another layer."""

    def __init__(self, stock=False, other=None):
        super().__init__()
        kind = nn.MultiheadAttention if stock else headwise.MultiheadAttention
        options = {} if stock else {"fused_qkv": True}
        self.a, self.b = kind(12, 4, batch_first=True, **options), kind(12, 4, batch_first=True, **options)
        self.other = other or nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)


def state_of(model):
    """Everything that is changed where something is prepared."""
    return [(name, id(type(module)), id(module)) for name, module in model.named_modules()], {
        name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def raising(name, module):
    raise LookupError(name)


def hooked(model):
    model.b.in_proj_weight.register_hook(lambda grad: grad)


def too_tall(model):
    model.b.in_proj_bias = nn.Parameter(torch.zeros(35))


def parametrized(model):
    nn.utils.parametrize.register_parametrization(model.b, "in_proj_weight", nn.Identity())


def tied_elsewhere(model):
    model.other = nn.Linear(12, 36)
    model.other.weight = model.b.in_proj_weight


def aliased(model):
    model.other.linear1.register_buffer("rows", model.b.in_proj_weight.data[:5])


def tied_unevenly(model):
    model.b = headwise.MultiheadAttention(12, 4, num_kv_heads=1, head_dim=6, fused_qkv=True)
    model.a = headwise.MultiheadAttention(12, 4, num_kv_heads=2, head_dim=3, fused_qkv=True)
    model.a.in_proj_weight = nn.Parameter(torch.randn(24, 12))
    model.b.in_proj_weight = model.a.in_proj_weight
    model.b.in_proj_bias = nn.Parameter(torch.randn(36))


def listed(model):
    model.kept = {"one": [model.b.in_proj_bias]}


def lazy(model):
    model.other.extra = nn.LazyLinear(3)


HALFWAY = {
    "none selected": (None, {"where": lambda name, module: False}, ValueError, "10 that where|14 that where"),
    "where raises": (None, {"where": raising}, LookupError, "q_proj"),
    "where of one argument": (None, {"where": lambda name: True}, TypeError, "positional argument"),
    "second has hooks": (hooked, {}, ValueError, "in_proj_weight must carry no hooks"),
    "second is parametrized": (parametrized, {}, ValueError, "in_proj_weight must be a plain Parameter"),
    "lazy": (lazy, {}, ValueError, "know its widths"),
    "tied to a linear": (tied_elsewhere, {}, ValueError, r"[ab].in_proj_weight must be used by nothing .*other.weight"),
    "in a list": (listed, {}, ValueError, r"b.in_proj_bias must be used by nothing .* also kept, the same memory"),
    "aliased": (
        aliased,
        {},
        ValueError,
        r"b.in_proj_weight must be used by nothing .* also other.linear1.rows, the sa",
    ),
}


@pytest.mark.parametrize("stock", [False, True], ids=["fused", "stock"])
@pytest.mark.parametrize("case", HALFWAY)
def test_nothing_is_half_turned(case, stock):
    change, options, kind, message = HALFWAY[case]
    model = Two(stock)
    if change is not None:
        change(model)
    before = state_of(model)
    with pytest.raises(kind, match=message):
        headwise.prepare_qat(model, **options)
    assert state_of(model) == before


@pytest.mark.parametrize("change", [too_tall, tied_unevenly])
def test_projections_that_cannot_be_cut_leave_the_others_whole(change):
    model = Two()
    change(model)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"in_proj_(bias|weight) must (have 36 rows|be used by nothing)"):
        headwise.prepare_qat(model)
    assert state_of(model) == before


@pytest.mark.parametrize("stock", [False, True], ids=["fused", "stock"])
def test_projections_that_are_tied_stay_tied(stock):
    model = Two(stock)
    model.b.in_proj_weight, model.b.in_proj_bias = model.a.in_proj_weight, model.a.in_proj_bias
    number = sum(p.numel() for p in model.parameters())
    headwise.prepare_qat(model)
    assert sum(p.numel() for p in model.parameters()) == number
    for name in ("q_proj", "k_proj", "v_proj"):
        one, other = model.a.get_submodule(name), model.b.get_submodule(name)
        assert one is not other
        assert one.weight is other.weight
        assert one.bias is other.bias
    assert model.a.q_proj.weight is not model.a.k_proj.weight


def test_projections_beside_each_other_in_one_memory_are_not_tied():
    model = Two()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    headwise.prepare_qat(model)
    assert sum(isinstance(module, FakeQuantLinear) for module in model.modules()) == 14


def test_where_sees_the_layers_as_they_will_be():
    model = Two(other=nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 16, batch_first=True), 2))
    model.b = nn.MultiheadAttention(12, 4, kdim=7, vdim=9, bias=False)
    seen = {}
    headwise.prepare_qat(model, where=lambda name, linear: seen.update({name: linear}) or "out" not in name)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears.keys() == seen.keys()
    assert len(seen) == 2 * 4 + 2 * 6
    for name, linear in linears.items():
        assert (type(linear) is FakeQuantLinear) == ("out" not in name)
        assert (linear.in_features, linear.out_features) == (seen[name].in_features, seen[name].out_features)
        assert torch.equal(linear.weight, seen[name].weight)
        assert (linear.bias is None) == (seen[name].bias is None)
    assert seen["b.v_proj"].weight.shape == (12, 9)


def test_of_other_dtypes_only_what_is_selected_is_refused():
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"be float32; .*got torch.float64 in 1.weight"):
        headwise.prepare_qat(model)
    headwise.prepare_qat(model, where=lambda name, _: name == "0")
    assert [type(module) for module in model] == [FakeQuantLinear, nn.Linear]


def test_inference_mode_is_refused():
    model = nn.Sequential(nn.Linear(7, 5))
    with torch.inference_mode():
        with pytest.raises(ValueError, match=r"model must be prepared outside of torch.inference_mode"):
            headwise.prepare_qat(model)
        made = nn.Sequential(nn.Linear(7, 5))
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"model must be built outside of torch.inference_mode, .*got 0.weight"):
        headwise.prepare_qat(made)
