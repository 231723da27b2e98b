"""int8: torch's dynamic quantization and torchao, of every projection and feed-forward."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.tools.subjects import SUBJECTS, each_subject, split_side
from torch import nn
from torchao import quantization as torchao

import headwise

DYNAMIC = torch.ao.nn.quantized.dynamic.Linear
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])


def places(subject):
    """All that should be int8: four of each attention, two of each layer, and the user's own."""
    modules = dict(subject.build("torch").named_modules())
    attentions = [name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    own = [f"{name}.{child}".lstrip(".") for name in attentions for child in ("q_proj", "k_proj", "v_proj", "out_proj")]
    others = [name for name, module in modules.items() if type(module) is nn.Linear]
    return sorted(own + others)


def close(got, want):
    """Near the float result but not it: 8 bits are 1 part in 127 of each row's largest."""
    error = (got - want).norm() / want.norm()
    assert 0 < error < 0.1, error


def smaller(model):
    """Weights of a size as trained models have them, so that rounding does not pile up."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.4)
    return model.eval()


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def converted(model):
    return sorted(name for name, module in model.named_modules() if type(module) is DYNAMIC)


def run(subject, model, inputs, words, **more):
    with torch.no_grad():
        return subject.call(model, *inputs, **words, **more)


whole = pytest.mark.tool(
    order=4,
    tool="torch.ao quantize_dynamic",
    holds="all linears are converted, `q_proj`, `k_proj`, `v_proj` and `out_proj` too, and the model runs in int8",
    torch="none of the attention's (pytorch#118165); encoders then raise in eval (pytorch#82443)",
)


@whole
@each_subject
@split_side
@padded_or_not
def test_dynamic(subject, side, padded):
    model = smaller(subject.build(side))
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    want = run(subject, model, inputs, words)
    before = copy.deepcopy(model.state_dict())
    quantized = dynamic(model)
    assert converted(quantized) == places(subject)
    got = run(subject, quantized, inputs, words)
    close(got, want)
    assert torch.equal(run(subject, quantized.train(), inputs, words), got)
    # The float model is as it was
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert converted(model) == []
    assert torch.equal(run(subject, model, inputs, words), want)
    # Saved and loaded
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other = dynamic(smaller(subject.build(side, seed=5)))
    assert not torch.equal(run(subject, other, inputs, words), got)
    other.load_state_dict(torch.load(file))
    assert torch.equal(run(subject, other, inputs, words), got)


@whole
@split_side
@pytest.mark.parametrize("average", [True, False], ids=["averaged", "heads"])
def test_dynamic_attention_weights(side, average):
    subject = SUBJECTS["MultiheadAttention"]
    model = smaller(subject.build(side))
    inputs = subject.inputs()
    words = subject.hide(inputs) | {"need_weights": True, "average_attn_weights": average}
    quantized = dynamic(model)
    assert converted(quantized) == places(subject)
    with torch.no_grad():
        for got, want in zip(quantized(*inputs, **words), model(*inputs, **words), strict=True):
            close(got, want)


@pytest.mark.tool(
    order=4,
    tool="torch.ao quantize_dynamic",
    holds="a fused model after `split_projections()` on each attention: the same",
)
@each_subject
def test_dynamic_of_fused(subject):
    model = smaller(subject.build("fused"))
    inputs = subject.inputs()
    words = subject.hide(inputs)
    want = run(subject, model, inputs, words)
    # What it finds before: the packed matrix is no linear
    assert converted(dynamic(model)) == [
        name for name in places(subject) if name[-6:] not in ("q_proj", "k_proj", "v_proj")
    ]
    for module in model.modules():
        if isinstance(module, headwise.MultiheadAttention):
            module.split_projections()
    quantized = dynamic(model)
    assert converted(quantized) == places(subject)
    got = run(subject, quantized, inputs, words)
    close(got, want)
    assert torch.equal(got, run(subject, dynamic(smaller(subject.build("split"))), inputs, words))


CONFIGS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")


@pytest.mark.tool(
    order=4,
    tool="torchao quantize_ (int8 weights; int8 weights and activations)",
    holds="all linears are converted, `q_proj`, `k_proj`, `v_proj` and `out_proj` too, and the model runs in int8",
    package="torchao",
    torch="none of the attention's",
)
@each_subject
@split_side
@pytest.mark.parametrize("config", CONFIGS)
@padded_or_not
def test_torchao(subject, side, config, padded):
    model = smaller(subject.build(side))
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    want = run(subject, model, inputs, words)
    torchao.quantize_(model, getattr(torchao, config)())
    kinds = {name.removesuffix(".weight"): type(parameter) for name, parameter in model.named_parameters()}
    assert sorted(name for name, kind in kinds.items() if kind.__name__ == "Int8Tensor") == places(subject)
    got = run(subject, model, inputs, words)
    close(got, want)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = smaller(subject.build(side, seed=5))
    torchao.quantize_(other, getattr(torchao, config)())
    other.load_state_dict(torch.load(file, weights_only=False), assign=True)
    assert torch.equal(run(subject, other, inputs, words), got)
