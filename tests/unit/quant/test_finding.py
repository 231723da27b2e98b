"""Which linears become int8, which are refused by name and with a cure, and which are left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import headwise
from headwise.quant import FakeQuantLinear, Int8Linear
from headwise.quant.finding import find_linears

WAYS = [headwise.quantize, headwise.prepare_qat]
OWN = ["steps", "input_low", "input_high", "freeze_after", "reduce_range", "int_weight", "weight_scale", "int_bias"]
OWN += ["input_scale", "input_zero_point", "backend", "state", "together", "_kept"]


def chain():
    return nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 5))


def kinds(model):
    return [type(module) for module in model]


COMPUTED = {
    "weight_norm": (nn.utils.weight_norm, "weight", nn.utils.remove_weight_norm),
    "spectral_norm": (nn.utils.spectral_norm, "weight", nn.utils.remove_spectral_norm),
    "prune": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight", lambda m: prune.remove(m, "weight")),
    "bias": (lambda layer: prune.l1_unstructured(layer, "bias", 0.5), "bias", lambda m: prune.remove(m, "bias")),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", COMPUTED)
def test_weights_that_something_computes_are_refused_with_the_cure(way, how):
    (do, part, undo), model = COMPUTED[how], chain().eval()
    do(model[2])
    with torch.no_grad():
        model(torch.randn(3, 7))
    with pytest.raises(ValueError, match=rf"{way.__name__}: 2 must have a {part} of its own: .*remove.*or leave .*whe"):
        way(model)
    assert kinds(model) == [nn.Linear, nn.ReLU, nn.Linear]
    left = way(model, where=lambda name, _: name != "2")
    assert type(left[2]) is nn.Linear
    assert type(left[0]) in (Int8Linear, FakeQuantLinear)
    undo(model[2])
    if way is headwise.quantize:
        assert kinds(way(model)) == [Int8Linear, nn.ReLU, Int8Linear]


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_is_not_the_classs_is_refused(way):
    model = chain()
    old = model[0].forward
    model[0].forward = lambda x: old(x) + 1
    with pytest.raises(ValueError, match=r"0 must have the forward of its class: remove .*; got a forward of its own"):
        way(model)
    del model[0].forward
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_forward_pre_hook(lambda *_: None)
    assert type(way(model)[0]) is not nn.Linear


def test_a_layer_that_is_compiled_is_refused():
    model = chain()
    model[0].compile(backend="eager")
    with pytest.raises(
        ValueError, match=r"prepare_qat: 0 must be compiled afterwards, not before, or leave .*\.compile\(\)"
    ):
        headwise.prepare_qat(model)
    assert type(model[0]) is nn.Linear
    del model[0]._compiled_call_impl
    headwise.prepare_qat(model)[0].compile(backend="eager")
    model(torch.randn(3, 7))
    assert type(headwise.convert(model)[0]) is Int8Linear


@pytest.mark.parametrize("way", WAYS)
def test_pruned_fused_projections_are_refused(way):
    model = headwise.MultiheadAttention(12, 4, fused_qkv=True)
    prune.l1_unstructured(model, "in_proj_weight", 0.5)
    with torch.no_grad():
        model(*[torch.randn(2, 3, 12)] * 3)
    model.in_proj_weight = model.in_proj_weight.detach()
    with pytest.raises(
        ValueError, match=r"split_projections: in_proj_weight must be a plain Parameter; got a parametr"
    ):
        way(model)
    assert model.fused_qkv


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWN)
def test_a_name_that_int8_needs_is_refused(way, name):
    for place in ("attribute", "buffer", "child"):
        model = chain()
        if place == "buffer" and name not in dir(nn.Linear):
            model[2].register_buffer(name, torch.zeros(3))
        else:
            setattr(model[2], name, 3 if place == "attribute" else nn.Identity())
        with pytest.raises(ValueError, match=rf"2 must leave the name '{name}' to int8: rename that attribute, or"):
            way(model)
        assert kinds(model) == [nn.Linear, nn.ReLU, nn.Linear]
        assert type(way(model, where=lambda name, _: name == "0")[2]) is nn.Linear


def test_other_buffers_and_attributes_stay():
    model = chain()
    model[0].register_buffer("seen", torch.tensor(4.0))
    model[0].note = "mine"
    headwise.prepare_qat(model)
    assert model[0].seen == 4.0
    assert model[0].note == "mine"


def test_what_is_attached_after_preparing_is_refused_by_convert():
    model = headwise.prepare_qat(chain())
    model(torch.randn(3, 7))
    prune.l1_unstructured(model[2], "weight", 0.5)
    model(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"convert: 2 must have a weight of its own: make it one first \(prune\.remov"):
        headwise.convert(model)
    prune.remove(model[2], "weight")
    assert (headwise.convert(model)[2].int_weight == 0).float().mean() >= 0.5
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"convert: 0 must have a weight of its own: .*remove_parametrizations"):
        headwise.convert(model)
    parametrize.remove_parametrizations(model[0], "weight")
    model[0].backend = "mine"
    with pytest.raises(ValueError, match=r"convert: 0 must leave the name 'backend' to int8"):
        headwise.convert(model)
    del model[0].backend
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match=r"convert: 0 must have the forward of its class"):
        headwise.convert(model)


def test_a_lazy_layer_is_refused_if_it_is_selected():
    model = nn.Sequential(nn.Linear(7, 5), nn.LazyLinear(3))
    for way in (headwise.prepare_qat, lambda model: find_linears("quantize", model, None)):
        with pytest.raises(ValueError, match=r"know its widths: call it once before; got 1, an nn.LazyLinear that was"):
            way(model)
    assert find_linears("quantize", model, lambda name, _: name == "0").keys() == {"0"}
    assert type(headwise.prepare_qat(model, where=lambda name, _: name == "0")[1]) is nn.LazyLinear


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_with_two_names_is_selected_by_any(way):
    for name in ("0", "2"):
        linear, asked = nn.Linear(7, 7), []
        model = nn.Sequential(linear, nn.ReLU(), linear)
        turned = way(model, where=lambda given, _: asked.append(given) or given == name)  # noqa: B023
        assert turned[0] is turned[2]
        assert type(turned[0]) in (Int8Linear, FakeQuantLinear)
        assert asked == ["0", "2"][: 1 + (name == "2")]


class Reader(nn.TransformerEncoderLayer):
    """A subclass, which stays torch's and reads the weights of its children."""


@pytest.mark.filterwarnings("ignore:upgrade. left as they are. reader:UserWarning")
@pytest.mark.parametrize("first", [True, False])
def test_what_a_layer_of_torch_reads_is_left_by_any_of_its_names(first):
    reader = Reader(12, 4, 16, batch_first=True)
    parts = {"shared": reader.linear1, "reader": reader} if first else {"reader": reader, "shared": reader.linear1}
    model = nn.ModuleDict({**parts, "own": nn.Linear(3, 3)})
    headwise.prepare_qat(model)
    assert type(model["shared"]) is nn.Linear
    assert type(model["own"]) is FakeQuantLinear


class Asking(nn.Module):
    """Asks for the class of its attention, so that upgrade leaves that."""

    def __init__(self, linear=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = linear

    def forward(self, x):
        assert isinstance(self.attn, nn.MultiheadAttention)
        y = self.attn(x, x, x, need_weights=False)[0]
        return y if self.linear is None else self.linear(y)


@pytest.mark.filterwarnings("ignore:upgrade. left as they are. 0.attn:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beside", [[], [nn.TransformerEncoderLayer(5, 1, 7, batch_first=True)]])
def test_the_only_stock_layer_may_be_one_that_stays(way, beside):
    """Whether another one beside it is changed makes no difference."""
    model = nn.Sequential(Asking(nn.Linear(8, 5)), *beside).eval()
    with pytest.warns(UserWarning, match=rf"{way.__name__}: left in float: 0.attn \(MultiheadAttention\): "):
        turned = way(model)
    assert type(turned[0].linear) in (Int8Linear, FakeQuantLinear)
    assert type(turned[0].attn) is nn.MultiheadAttention
    turned(torch.randn(3, 7, 8))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_a_stock_layer_that_stays_is_refused_by_the_functions_own_name(way):
    with pytest.raises(ValueError, match=rf"^{way.__name__}: model must hold an nn.Linear, .*; got only attn.out_proj"):
        way(Asking())


class Uncopied(nn.Module):
    """Gives no reason."""

    def __deepcopy__(self, memo):
        raise NotImplementedError

    def forward(self, x):
        return x


def test_what_cannot_be_copied_is_blamed_on_nothing_else():
    model = nn.Sequential(nn.Linear(3, 3), Uncopied())
    model[0].forward = model[0].forward  # unusual, but it can be copied
    with pytest.raises(ValueError, match=r"can copy.*got \S*Sequential: NotImplementedError"):
        headwise.quantize(model, where=lambda name, _: name != "0")


def test_a_cure_that_would_not_help_is_not_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prune.l1_unstructured(model[0], "weight", 2)
    model(torch.randn(2, 3))  # with gradients: what it computed cannot be copied, wherever where= looks
    with pytest.raises(ValueError, match=r"^quantize: 0 must have a weight of its own: make it one first") as caught:
        headwise.quantize(model, where=lambda name, _: name == "1")
    assert "where=" not in str(caught.value)
