"""Training for int8: what a linear computes while it is prepared, what convert makes of it, and what both refuse."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.compiling import Counter
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.quant import FakeQuantLinear, Int8Linear, report
from headwise.quant.fake import _RATE, _on_grid, _Rounded
from headwise.quant.state import scale_of, tensor_scale, weight_scales

REFUSED = [
    ({"freeze_after": 0}, "freeze_after must be an int of at least 1; got 0"),
    ({"freeze_after": 2.5}, "freeze_after must be an int of at least 1; got 2.5"),
    ({"reduce_range": 1}, "reduce_range must be True or False; got 1"),
    ({"where": "all"}, "where must be called as where(name, module); got 'all'"),
    ({"where": lambda name, module: False}, "model must hold an nn.Linear, .*; got 2 that where selected none of"),
    ({"freeze_after": 2**63}, f"freeze_after must be at most {2**63 - 1}, what steps can count; got {2**63}"),
    ({"optimizer": []}, "optimizer must hold parameters of this model; .*; got none in a list"),
    (
        {"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)},
        "optimizer must hold parameters of this model; .*; got SGD with none of them",
    ),
    ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer or several of them; got str"),
]


class Chain(nn.Sequential):
    """Two linears."""

    def __init__(self):
        super().__init__(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 5))


def prepared(K=7, N=5, *, low=-2.0, high=3.0, **options):
    """One layer whose range is known."""
    layer = headwise.prepare_qat(nn.Linear(K, N), **options)
    with torch.no_grad():
        layer.input_low.fill_(low)
        layer.input_high.fill_(high)
        layer.steps.fill_(1)
    return layer.eval()


def by_hand(layer, x, low, high, most=127):
    """The layer from its definition, in float64."""
    scale, zero_point = scale_of(low, high)
    rounded = ((x.double() / scale).round() + zero_point).clamp(0, 255) - zero_point
    scales = weight_scales(layer.weight, most == 63).double()[:, None]
    weight = (layer.weight.double() / scales).round().clamp(-most, most) * scales
    return F.linear(rounded * scale, weight, layer.bias.double()).float()


# In place


def test_the_same_objects_parameters_and_hooks_remain(caplog):
    block, calls = headwise.EncoderBlock(12, 4), []
    linear = block.linear1
    linear.register_forward_hook(lambda *_: calls.append(1))
    block.linear2.weight.requires_grad_(False)
    parameters, training = {name: id(p) for name, p in block.named_parameters()}, block.training
    with caplog.at_level(logging.INFO, "headwise"):
        assert headwise.prepare_qat(block) is block
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.records[0].getMessage() == (
        "prepare_qat: 6 linears rounded as in int8, ranges fixed after 1,000 training forwards"
    )
    assert block.linear1 is linear
    assert type(linear) is FakeQuantLinear
    assert {name: id(p) for name, p in block.named_parameters()} == parameters
    assert block.training is training
    block(torch.randn(2, 3, 12)).sum().backward()
    assert calls == [1]
    assert block.linear2.weight.grad is None
    assert block.linear1.weight.grad is not None


def test_stock_layers_are_upgraded_and_their_optimizer_follows(caplog):
    stock = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 16, 0.0, batch_first=True), 2)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    stock(torch.randn(2, 3, 12)).sum().backward()
    optimizer.step()
    model = headwise.prepare_qat(stock, optimizer=optimizer)
    assert sum(isinstance(module, FakeQuantLinear) for module in model.modules()) == 12
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    before = model.layers[1].self_attn.k_proj.weight.detach().clone()
    model(torch.randn(2, 3, 12)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.layers[1].self_attn.k_proj.weight, before)
    assert {record.levelname for record in caplog.records} <= {"INFO"}


@pytest.mark.parametrize("stock", [False, True], ids=["fused", "stock"])
def test_without_its_optimizer_a_warning_is_logged_where_parameters_are_cut(caplog, stock):
    kind = nn.MultiheadAttention(12, 4) if stock else headwise.MultiheadAttention(12, 4, fused_qkv=True)
    headwise.prepare_qat(kind)
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "optimizers and EMA copies built before hold parameters that are gone" in warned.getMessage()


def test_an_optimizer_that_cannot_follow_is_refused():
    attention = headwise.MultiheadAttention(12, 4, fused_qkv=True)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer must be built afterwards, or over projections that split_projec"):
        headwise.prepare_qat(attention, optimizer=optimizer)
    assert attention.fused_qkv


class Adapter(nn.Module):
    """A low-rank update beside a linear, as adapters have it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.down, self.up = base, nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def test_the_linear_inside_of_an_adapter_is_turned():
    attention = headwise.MultiheadAttention(12, 4, batch_first=True)
    attention.q_proj = Adapter(attention.q_proj)
    headwise.prepare_qat(attention, where=lambda name, _: "down" not in name and "up" not in name)
    assert type(attention.q_proj.base_layer) is FakeQuantLinear
    assert type(attention.q_proj.up) is nn.Linear
    attention(*[torch.randn(2, 3, 12)] * 3)
    assert report(headwise.convert(attention)).num_int8 == 4


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Embedding(17, 6), nn.Linear(6, 17, bias=False))
    model[1].weight = model[0].weight
    headwise.prepare_qat(model)
    assert model[1].weight is model[0].weight
    model(torch.tensor([3, 5])).sum().backward()
    small = headwise.convert(model)
    assert torch.equal(small[0].weight, model[0].weight)


# What is computed


@pytest.mark.parametrize("reduce_range", [False, True])
def test_eval_computes_on_the_rounded_numbers(reduce_range):
    layer, x = prepared(reduce_range=reduce_range), 2 * torch.randn(3, 4, 7)
    expected = by_hand(layer, x, -2.0, 3.0, 63 if reduce_range else 127)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    error = (layer(x) - F.linear(x.clamp(-2, 3), layer.weight, layer.bias)).abs().max()
    assert 1e-4 < error < 0.1


def test_zero_stays_exact():
    layer = prepared(low=0.37, high=3.0)
    torch.testing.assert_close(layer(torch.zeros(2, 7)), layer.bias.expand(2, 5), rtol=0, atol=0)


def test_gradients_pass_straight_through_and_end_outside_of_the_range():
    layer, x = prepared(), (3 * torch.randn(13, 7)).requires_grad_()
    pull = torch.randn(13, 5)
    layer(x).backward(pull)
    inside = (x > -2.0) & (x < 3.0)
    assert 0 < inside.sum() < x.numel()
    weight = layer.fake_weight().detach()
    torch.testing.assert_close(x.grad, (pull @ weight) * inside)
    scale, zero_point = scale_of(-2.0, 3.0)
    rounded = torch.fake_quantize_per_tensor_affine(x.detach(), scale, zero_point, 0, 255)
    torch.testing.assert_close(layer.weight.grad, pull.T @ rounded)
    torch.testing.assert_close(layer.bias.grad, pull.sum(0))


@pytest.mark.parametrize("bounds", [(0.0, 1e-3), (-2.0, 3.0), (-40.0, 0.0)])
def test_rounding_is_torchs_fake_quantization_to_the_bit(bounds, monkeypatch):
    scale, zero_point = tensor_scale(*map(torch.tensor, bounds))
    steps = torch.arange(-300, 300, 0.25)  # half way between two, too, and beyond both ends
    x, pull = torch.cat([steps * scale, 3 * torch.randn(999)]).requires_grad_(), torch.randn(2400 + 999)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)
    ours = _Rounded.apply(x, scale, -zero_point, 255 - zero_point)
    with monkeypatch.context() as patch:
        patch.setattr("headwise.quant.fake.eager", lambda: False)
        in_graphs = _on_grid(x, scale, -zero_point, 255 - zero_point)
    for one in (ours, in_graphs):
        torch.testing.assert_close(one, theirs, rtol=0, atol=0)
        gradients = [torch.autograd.grad(out, x, pull, retain_graph=True)[0] for out in (one, theirs)]
        assert torch.equal(*gradients)


def test_cached_decoding_gives_what_a_whole_sequence_gives():
    block, x = headwise.prepare_qat(headwise.EncoderBlock(12, 4)), torch.randn(2, 5, 12)
    block(x, is_causal=True)
    block.eval()
    with torch.no_grad():
        cache = block.make_cache(5)
        steps = [block(x[:, [place]], is_causal=True, cache=cache) for place in range(5)]
        torch.testing.assert_close(torch.cat(steps, 1), block(x, is_causal=True), rtol=0, atol=0.02)


def test_function_transforms_give_the_same():
    layer, x = prepared(), torch.randn(4, 7)
    own, pull = dict(layer.named_parameters()), torch.randn(4, 5)
    found = torch.func.grad(lambda given: (torch.func.functional_call(layer, given, x) * pull).sum())(own)
    layer(x).backward(pull)
    torch.testing.assert_close(found["weight"], layer.weight.grad)


def test_the_range_is_a_mean_that_turns_into_a_moving_one_and_freezes():
    layer = headwise.prepare_qat(nn.Linear(3, 2), freeze_after=150).train()
    batches = [torch.randn(5, 3) for _ in range(160)]
    for number, x in enumerate(batches, start=1):
        layer(x)
        assert layer.steps == min(number, 150)
        if number in (1, 40, 100):
            torch.testing.assert_close(layer.input_low, torch.stack([b.min() for b in batches[:number]]).mean())
            torch.testing.assert_close(layer.input_high, torch.stack([b.max() for b in batches[:number]]).mean())
    expected = torch.stack([b.max() for b in batches[:100]]).mean()
    for x in batches[100:150]:
        expected = expected + _RATE * (x.max() - expected)
    torch.testing.assert_close(layer.input_high, expected)


def test_a_range_never_leaves_the_numbers_of_float32():
    layer = headwise.prepare_qat(nn.Linear(7, 5)).train()
    for value in (3e38, -3e38, 3.4e38, -3.4e38):
        layer(torch.full((2, 7), value))
        assert layer.input_low.isfinite()
        assert layer.input_high.isfinite()
    assert layer.steps == 4
    for _ in range(1000):
        x = layer(torch.randn(4, 7))
    assert x.isfinite().all()
    assert layer.input_high < 1e36
    headwise.convert(layer)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, for jvp
def test_in_function_transforms_training_changes_no_range():
    layer, x, pull = prepared().train(), torch.randn(4, 7), torch.randn(4, 5)
    own = dict(layer.named_parameters())

    def loss(parameters, given, pulled):
        return (torch.func.functional_call(layer, parameters, given) * pulled).sum()

    before = copy.deepcopy(dict(layer.named_buffers()))
    whole = torch.func.grad(loss)(own, x, pull)
    single = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(own, x, pull)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.named_buffers())
    layer.eval()(x).backward(pull)
    torch.testing.assert_close(whole["weight"], layer.weight.grad)
    torch.testing.assert_close(single["weight"].sum(0), layer.weight.grad)
    step = torch.randn(4, 7)
    _, slope = torch.func.jvp(layer.eval(), (x,), (step,))
    inside = (x > -2.0) & (x < 3.0)
    torch.testing.assert_close(slope, (step * inside) @ layer.fake_weight().T)
    fresh = headwise.prepare_qat(nn.Linear(7, 5)).train()  # no range yet: that of the input, as in eval
    found = torch.func.vmap(fresh)(x[None])[0]
    torch.testing.assert_close(found, fresh.eval()(x))
    assert fresh.steps == 0


WRONG = {
    "width": lambda x: x[:, :3],
    "0-D": lambda x: x[0, 0],
    "None": lambda x: None,
    "number": lambda x: 3,
    "numpy": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "sparse": lambda x: x.to_sparse(),
    "double": lambda x: x.double(),
    "int": lambda x: x.int(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.cfloat(),
    "half": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_input_is_refused_before_the_range_sees_it(wrong, autocast):
    layer = headwise.prepare_qat(nn.Linear(7, 5)).train()
    x = WRONG[wrong](torch.randn(4, 7))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if autocast and wrong == "half":
            assert layer(x).dtype == torch.bfloat16
            return
        with pytest.raises(ValueError, match=r"^FakeQuantLinear: input must be "):
            layer(x)
    assert layer.steps == 0
    assert layer.input_high == 0


def test_the_input_has_the_name_that_torch_gives_it():
    layer, x = prepared(), torch.randn(4, 7)
    assert torch.equal(layer(input=x), layer(x))


def test_eval_changes_nothing():
    model = headwise.prepare_qat(Chain())
    model(torch.randn(4, 7))
    before = copy.deepcopy(model.state_dict())
    model.eval()(100 * torch.randn(4, 7))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_before_any_training_eval_takes_the_range_of_its_input():
    layer, x = headwise.prepare_qat(nn.Linear(7, 5)).eval(), torch.randn(4, 7)
    torch.testing.assert_close(layer(x), by_hand(layer, x, x.min().item(), x.max().item()), rtol=1e-6, atol=1e-6)
    assert layer.steps == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("training", [True, False])
def test_a_row_that_is_not_finite_is_nan_and_touches_nothing_else(bad, training):
    layer, x = prepared(freeze_after=9).train(training), torch.randn(4, 7)
    clean = copy.deepcopy(layer)
    expected = clean(torch.cat([x[:1], x[2:]]))
    x[1, 3] = bad
    out = layer(x)
    assert out[1].isnan().all()
    torch.testing.assert_close(torch.cat([out[:1], out[2:]]), expected)
    assert layer.input_high == clean.input_high
    assert layer.input_low == clean.input_low
    out.sum().backward()  # the loss is NaN, and gradients too, so that a GradScaler sees it
    assert layer.weight.grad.isnan().all()


def test_a_batch_of_nothing_but_nan_and_one_of_nothing_leave_the_range_alone():
    layer = headwise.prepare_qat(nn.Linear(7, 5)).train()
    assert layer(torch.full((2, 7), torch.nan)).isnan().all()
    assert layer(torch.empty(0, 7)).shape == (0, 5)
    assert layer.steps == 0
    layer(x := torch.randn(3, 7))
    assert layer.input_low == x.min()


def test_weights_that_are_not_finite_show():
    layer = prepared()
    layer.weight.data[2, 1] = torch.nan
    assert layer(torch.randn(3, 7))[:, 2].isnan().all()
    with pytest.raises(ValueError, match=r"convert: model must hold finite numbers only; got 1 that are NaN"):
        headwise.convert(layer)


def test_q_k_and_v_see_one_range_and_become_one_product(monkeypatch):
    attention = headwise.prepare_qat(headwise.MultiheadAttention(12, 4, batch_first=True))
    for _ in range(3):
        x = torch.randn(2, 5, 12)
        attention(x, x, x)
    ranges = [(p.input_low, p.input_high, p.steps) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert ranges[0] == ranges[1] == ranges[2]
    small, made = headwise.convert(attention), []
    together = Int8Linear.together
    monkeypatch.setattr(Int8Linear, "together", staticmethod(lambda *given: made.append(together(*given)) or made[-1]))
    with torch.no_grad():
        small(x, x, x)
    assert made[0] is not None


# Convert


def test_a_converted_layer_is_within_half_a_unit_of_its_bias():
    torch.manual_seed(3)
    layer, x = prepared(64, 33), 2 * torch.randn(50, 64)
    with torch.no_grad():
        small, expected = headwise.convert(layer), layer(x)
        error = (small(x) - expected).abs()
    unit = small.input_scale * small.weight_scale
    assert (error <= 0.5 * unit + 2e-6 * expected.abs().max()).all()


@pytest.mark.parametrize("reduce_range", [False, True])
def test_integers_are_those_that_training_rounded_to(reduce_range):
    layer = prepared(64, 33, reduce_range=reduce_range)
    most = 63 if reduce_range else 127
    static, dynamic = headwise.convert(layer), headwise.convert(layer, dynamic=True)
    assert static.is_static
    assert not dynamic.is_static
    for small in (static, dynamic):
        assert small.int_weight.abs().amax() == most
        torch.testing.assert_close(small.state.weights(), layer.fake_weight(), rtol=3e-7, atol=0)
    assert torch.equal(static.int_weight, dynamic.int_weight)
    assert static.state.input_scale == scale_of(-2.0, 3.0)[0]
    assert dynamic.bias.dtype == torch.float32


def test_a_converted_model_is_a_copy_that_computes_what_eval_does():
    torch.manual_seed(1)
    model = headwise.prepare_qat(headwise.EncoderBlock(32, 4), where=lambda name, _: name != "linear2")
    for _ in range(5):
        model(torch.randn(4, 9, 32))
    small = headwise.convert(model)
    assert report(small).num_int8 == 5
    assert report(small).kind == "static"
    assert type(small.linear2) is nn.Linear
    assert type(model.linear1) is FakeQuantLinear
    assert not small.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in small.parameters())
    assert not {"freeze_after", "reduce_range"} & set(vars(small.linear1))
    x = torch.randn(4, 9, 32)
    with torch.no_grad():
        error = (small(x) - model.eval()(x)).norm() / model(x).norm()
    # one number in a few thousand lies so near the middle between two steps that float32's rounding decides
    assert error < 1e-3


def test_convert_says_what_is_missing():
    model = headwise.prepare_qat(Chain())
    with pytest.raises(ValueError, match=r"convert: 0 must have been called in training.*no training forward since"):
        headwise.convert(model)
    assert report(headwise.convert(model, dynamic=True)).num_int8 == 2
    model[0](torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"convert: 2 must have been called in training"):
        headwise.convert(model)
    with pytest.raises(ValueError, match=r"convert: model must come from headwise.prepare_qat; .*Chain without a Fake"):
        headwise.convert(Chain())
    with pytest.raises(ValueError, match=r"convert: model must be an nn.Module; got int"):
        headwise.convert(3)
    with pytest.raises(ValueError, match=r"convert: dynamic must be True or False; got 'yes'"):
        headwise.convert(model, dynamic="yes")


# What is refused


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_arguments_are_refused_before_anything_changes(options, message):
    model = Chain()
    message = message if ".*" in message else re.escape(message)
    with pytest.raises(ValueError, match=f"^prepare_qat: {message}"):
        headwise.prepare_qat(model, **options)
    assert {type(module) for module in model} == {nn.Linear, nn.ReLU}


def test_models_that_cannot_be_prepared_are_refused():
    with pytest.raises(
        ValueError, match=r"prepare_qat: model must be prepared once; .*got 0, a FakeQuantLinear already"
    ):
        headwise.prepare_qat(headwise.prepare_qat(Chain()))
    with pytest.raises(ValueError, match=r"model must be the float model that was quantized.*got 0, an Int8Linear"):
        headwise.prepare_qat(headwise.quantize(Chain()))
    with pytest.raises(ValueError, match=r"model must be float32; .*got torch.bfloat16 in 0.weight"):
        headwise.prepare_qat(Chain().bfloat16())
    with pytest.raises(ValueError, match=r"know its widths: call it once before; got 0, an nn.LazyLinear that was not"):
        headwise.prepare_qat(nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)))
    with pytest.raises(ValueError, match=r"model must hold an nn.Linear"):
        headwise.prepare_qat(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match=r"model must be wrapped after prepare_qat, not before; got a DataParallel"):
        headwise.prepare_qat(nn.DataParallel(Chain()))
    with pytest.raises(ValueError, match=r"quantize: model must not be prepared for training; headwise.convert turns"):
        headwise.quantize(headwise.prepare_qat(Chain()))


def test_lower_precision_is_refused_when_it_is_called():
    layer = headwise.prepare_qat(nn.Linear(7, 5)).half()
    with pytest.raises(ValueError, match=r"weight must stay float32 .* use torch.autocast"):
        layer(torch.randn(2, 7).half())
    with pytest.raises(ValueError, match=r"input must be float32, or come under torch.autocast; got torch.float64"):
        headwise.prepare_qat(nn.Linear(7, 5))(torch.randn(2, 7).double())


# Beside other tools


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state_dict"])
def test_copies_and_files_keep_everything(how):
    model = headwise.prepare_qat(headwise.EncoderBlock(12, 4), freeze_after=7)
    model(torch.randn(2, 3, 12))
    if how == "deepcopy":
        again = copy.deepcopy(model)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(model))
    elif how == "save":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = headwise.prepare_qat(headwise.EncoderBlock(12, 4), freeze_after=7)
        assert again.load_state_dict(model.state_dict()).missing_keys == []
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=0, atol=0)
    assert again.linear1.freeze_after == 7
    assert again.linear1.steps == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.LBFGS])
def test_any_optimizer_trains_it(kind):
    torch.manual_seed(2)
    model, x, target = headwise.prepare_qat(Chain()), torch.randn(31, 7), torch.randn(31, 5)
    optimizer = kind(model.parameters(), lr=0.05)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(8):
        optimizer.step(closure)
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_counts_once(reentrant):
    model = headwise.prepare_qat(Chain())
    plain = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(5, 7, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        plain(x).sum().backward()
    assert model[2].steps == 3
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def test_under_autocast_rounding_stays_in_float32_and_the_product_follows():
    layer, x = prepared(64, 33).train(), torch.randn(5, 64)
    layer.freeze_after = 1
    full = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        low = F.linear(x, layer.weight, layer.bias)
    assert out.dtype == low.dtype == torch.bfloat16
    assert layer.input_low.dtype == torch.float32
    assert (out - full).norm() / full.norm() < 0.006  # bfloat16's own error
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_a_block_trains_under_autocast():
    block = headwise.prepare_qat(headwise.EncoderBlock(12, 4))
    with torch.autocast("cpu", torch.bfloat16):
        out = block(torch.randn(2, 3, 12))
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_give_what_their_samples_give(layout):
    torch.manual_seed(4)
    block = headwise.prepare_qat(headwise.EncoderBlock(12, 4, norm_first=False))
    samples = [torch.randn(length, 12) for length in (5, 2, 7)]
    block(torch.cat(samples)[None])
    block.eval()
    with torch.no_grad():
        nested = block(torch.nested.as_nested_tensor(samples, layout=layout))
        alone = [block(sample[None])[0] for sample in samples]
    for one, other in zip(nested.unbind(), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.05)
    layer = block.linear1
    out = layer(torch.nested.as_nested_tensor(samples, layout=layout))
    torch.testing.assert_close(torch.cat(out.unbind()), layer(torch.cat(samples)))


def test_padded_batches_train_and_padding_has_no_say():
    torch.manual_seed(5)
    encoder = headwise.Encoder([headwise.EncoderBlock(64, 4) for _ in range(2)], nn.LayerNorm(64))
    headwise.prepare_qat(encoder)
    x, padding = torch.randn(3, 40, 64), torch.arange(40) >= torch.tensor([[40], [9], [5]])
    x[padding] = torch.nan
    out = encoder(x, padding, query_padding_mask=padding)
    assert (out[padding] == 0).all()
    out.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    small = headwise.convert(encoder)
    with torch.no_grad():
        out = small(x, padding, query_padding_mask=padding)
        expected = encoder.eval()(x, padding, query_padding_mask=padding)
    assert out.isfinite().all()
    assert (out - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_layer_is_one_graph_that_computes_the_same(training):
    model = headwise.prepare_qat(Chain(), freeze_after=3).train(training)
    plain, counter = copy.deepcopy(model), Counter()
    fast = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(5):
        x = torch.randn(4, 7)
        torch.testing.assert_close(fast(x), plain(x))
    assert len(counter.graphs) == 1
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_layer_takes_batches_of_any_size(training):
    model = headwise.prepare_qat(nn.Sequential(nn.Linear(7, 5)))
    model(torch.randn(4, 7))
    model.train(training)
    plain = copy.deepcopy(model)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (6, 5, 1):  # the second makes the size a symbol
        x = 2 * torch.randn(size, 7)
        found, expected = fast(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        found.square().sum().backward()
        expected.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def test_an_exported_model_takes_batches_of_any_size():
    model = headwise.prepare_qat(Chain())
    model(torch.randn(4, 7))
    model.eval()
    made = torch.export.export(model, (torch.randn(6, 7),), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    x = torch.randn(13, 7)
    x[3, 2] = torch.nan
    torch.testing.assert_close(made(x), model(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_compiled_block_trains_as_one_graph():
    block = headwise.prepare_qat(headwise.EncoderBlock(16, 4))
    plain = copy.deepcopy(block)
    fast = torch.compile(block, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 7, 16)
        fast(x).square().sum().backward()
        plain(x).square().sum().backward()
    for one, other in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


PROCESS = """
import sys
import torch
from torch import nn
import headwise

rank = int(sys.argv[1])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = headwise.prepare_qat(headwise.EncoderBlock(16, 4))
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
torch.manual_seed(rank)
for _ in range(4):
    first, second = wrapped(torch.randn(3, 5, 16)), wrapped(torch.randn(3, 5, 16))  # a range may move in between
    optimizer.zero_grad()
    (first.square().mean() + second.square().mean()).backward()
    optimizer.step()
wrapped.eval()(torch.randn(3, 5, 16))
for tensor in (*model.parameters(), *model.buffers()):
    both = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(both, tensor.detach())
    assert torch.equal(*both), tensor
assert model.linear1.steps == 8
headwise.convert(model)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_agree_on_weights_and_ranges(tmp_path):
    given = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(PROCESS)]
    running = [
        subprocess.Popen([*given, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
