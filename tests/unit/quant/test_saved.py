"""`from_state_dict`: an int8 model back from its numbers."""

from __future__ import annotations

import io
import logging
import math

import pytest
import torch
from torch import nn

import headwise
from headwise.quant import from_state_dict, report


def build():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return nn.Sequential(
        nn.Linear(5, 16, bias=False), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ).eval()


@pytest.mark.parametrize("kind", ["dynamic", "static", "mixed", "trained"])
def test_round_trip(kind):
    x = torch.randn(3, 7, 5)
    model = build()
    if kind == "trained":
        headwise.prepare_qat(model).train()(x)
        small = headwise.convert(model)
    elif kind == "mixed":
        small = headwise.quantize(model, [x], where=lambda name, _: "linear1" in name)
    else:
        small = headwise.quantize(model, [x] if kind == "static" else None)
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    fresh = build()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    again = from_state_dict(fresh, torch.load(file, weights_only=True))
    assert report(again) == report(small)
    with torch.no_grad():
        assert torch.equal(again(x), small(x))
    assert not again.training
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_it_says_what_was_loaded(caplog):
    small = headwise.quantize(build())
    with caplog.at_level(logging.INFO, logger="headwise"):
        again = from_state_dict(build(), small.state_dict())
    own = [message for message in caplog.messages if message.startswith("from_state_dict: ")]
    assert own == [f"from_state_dict: {report(again)}"]  # and not what stood there before


def test_a_linear_itself():
    small = headwise.quantize(nn.Linear(3, 2))
    again = from_state_dict(nn.Linear(3, 2), small.state_dict())
    assert torch.equal(again.int_weight, small.int_weight)


def changed(state, name, value):
    return {**state, name: value}


WRONG = {
    "float": (lambda state: build().state_dict(), "hold int8 layers; model.load_state_dict takes"),
    "nothing": (lambda state: 3, "be what state_dict"),
    "another name": (
        lambda state: {f"encoder.{key}": value for key, value in state.items()},
        "'encoder.0', which is no nn.Linear of Sequential",
    ),
    "another width": (
        lambda state: changed(state, "0.int_weight", torch.zeros(16, 4, dtype=torch.int8)),
        r"hold 0.int_weight as int8 \(16, 5\); got torch.int8 \(16, 4\)",
    ),
    "float weights": (lambda state: changed(state, "0.int_weight", torch.zeros(16, 5)), "hold 0.int_weight as int8"),
    "a part is missing": (lambda state: {k: v for k, v in state.items() if k != "0.weight_scale"}, "0.weight_scale"),
    "a part too much": (lambda state: changed(state, "0.bias", torch.zeros(16)), "0.bias"),
    "no scale": (
        lambda state: changed(state, "0.weight_scale", torch.full((16,), math.nan)),
        "be as it was saved; got in 0: Int8State: weight_scale must be above 0",
    ),
}


def test_a_bias_that_no_quantization_makes_is_refused():
    model, x = build(), torch.randn(8, 5)
    state = headwise.quantize(model, [x]).state_dict()
    for great in (2**30, -(2**30)):
        from_state_dict(model, changed(state, "1.layers.0.linear1.int_bias", torch.full((24,), great).int()))
    for greater in (2**31 - 1, -(2**31)):
        with pytest.raises(ValueError, match=r"^from_state_dict: .*be as it was saved; got in 1.*Int8State: bias must"):
            from_state_dict(model, changed(state, "1.layers.0.linear1.int_bias", torch.full((24,), greater).int()))


@pytest.mark.parametrize("kind", WRONG)
def test_refused(kind):
    make, says = WRONG[kind]
    with pytest.raises(ValueError, match=rf"(?s)^from_state_dict: .*{says}"):
        from_state_dict(build(), make(headwise.quantize(build()).state_dict()))
