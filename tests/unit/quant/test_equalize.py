"""Equalization: the same function to the bit, channels of one size, and int8 that survives outliers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headwise
from headwise.quant import equalize

D, H = 24, 6
ATTENTIONS = {
    "plain": {},
    "fused": {"fused_qkv": True},
    "no bias": {"bias": False},
    "widths": {"kdim": 7, "vdim": 11, "fused_qkv": True},
    "appended": {"add_bias_kv": True, "add_zero_attn": True},
    "grouped": {"num_kv_heads": 2, "head_dim": 5},
    "grouped, fused, appended": {"num_kv_heads": 3, "add_bias_kv": True, "fused_qkv": True},
    "all options": {
        "num_kv_heads": 2,
        "gate": True,
        "sink": True,
        "positions": "rotary",
        "qk_norm": True,
        "softcap": 5.0,
    },
}


def scramble(module, spread=4.0):
    """Weights whose channels differ by several powers of ten."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
            if parameter.dim() > 1:
                parameter *= (spread * torch.randn(parameter.shape[0], *[1] * (parameter.dim() - 1))).exp()
                parameter /= parameter.norm()
    return module.eval()


def sizes(attention):
    """Greatest weight of each value channel, before and after: (G*K,) each."""
    H, G, K = attention.num_heads, attention.num_kv_heads, attention.head_dim
    out = attention.out_proj.weight.detach().abs().amax(0).view(G, H // G, K).amax(1).flatten()
    return attention.v_proj.weight.detach().abs().amax(1), out


def named(activation):
    """A test's id that is the same in every process."""
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)


@pytest.mark.parametrize("options", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_computes_the_same_to_the_bit(options):
    attention = scramble(headwise.MultiheadAttention(D, H, batch_first=True, **options))
    given = torch.randn(2, 5, D), torch.randn(2, 7, attention.kdim), torch.randn(2, 7, attention.vdim)
    before, (expected, _) = copy.deepcopy(attention.state_dict()), attention(*given)
    assert equalize(attention) is attention
    assert torch.equal(attention(*given)[0], expected)
    changed = {name for name, tensor in attention.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "out_proj.weight" in changed
    assert not {"q_proj.weight", "gate_proj.weight", "out_proj.bias", "bias_k"} & changed
    if not options.get("fused_qkv"):
        value, out = sizes(attention)
        assert (value / out).log2().abs().max() <= 1.001  # the nearest power of two


FEED_FORWARDS = ["relu", F.leaky_relu, nn.LeakyReLU(0.3), nn.ReLU(), torch.relu, "swiglu"]


@pytest.mark.parametrize("activation", FEED_FORWARDS, ids=named)
@pytest.mark.parametrize("decoder", [False, True])
def test_blocks_compute_the_same_to_the_bit(activation, decoder):
    block = scramble((headwise.DecoderBlock if decoder else headwise.EncoderBlock)(D, H, activation=activation))
    given = [torch.randn(2, 5, D)] * (1 + decoder)
    before, expected = copy.deepcopy(block.state_dict()), block(*given)
    equalize(block)
    assert torch.equal(block(*given), expected)
    changed = {name for name, tensor in block.state_dict().items() if not torch.equal(tensor, before[name])}
    first = "linear3" if activation == "swiglu" else "linear1"
    assert {"linear2.weight", f"{first}.weight", f"{first}.bias"} <= changed
    assert ("linear1.weight" in changed) == (activation != "swiglu")
    assert decoder == ("multihead_attn.out_proj.weight" in changed)


def test_torchs_own_layers_compute_the_same_to_the_bit():
    model = nn.Transformer(D, H, 2, 2, 32, 0.0, batch_first=True)
    scramble(model)
    given, before = (torch.randn(2, 5, D), torch.randn(2, 3, D)), model.state_dict()["decoder.layers.0.linear1.bias"]
    before, expected = before.clone(), model(*given)
    equalize(model)
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.equal(model(*given), expected)
    assert not torch.equal(model.state_dict()["decoder.layers.0.linear1.bias"], before)


@pytest.mark.parametrize("activation", ["gelu", F.silu, nn.PReLU(), nn.Sequential(nn.ReLU()), torch.tanh], ids=named)
def test_what_passes_no_factor_on_is_left_alone(activation):
    block = scramble(headwise.EncoderBlock(D, H, activation=activation))
    before = copy.deepcopy(block.state_dict())
    equalize(block)
    for name in ("linear1.weight", "linear1.bias", "linear2.weight"):
        assert torch.equal(block.state_dict()[name], before[name])


def test_channels_of_zeros_are_left_alone():
    attention = scramble(headwise.MultiheadAttention(D, H, batch_first=True))
    with torch.no_grad():
        attention.v_proj.weight[3] = 0.0
        attention.out_proj.weight[:, 5] = 0.0
    kept = attention.v_proj.bias[3].item(), attention.v_proj.weight[5].clone()
    equalize(attention)
    assert attention.v_proj.bias[3] == kept[0]
    assert torch.equal(attention.v_proj.weight[5], kept[1])
    assert all(parameter.isfinite().all() for parameter in attention.parameters())


def hooked(block):
    block.self_attn.v_proj.register_forward_hook(lambda *_: None)


def adapted(block):
    block.self_attn.out_proj = nn.Sequential(block.self_attn.out_proj)


def tied(block):
    block.self_attn.v_proj.weight = block.self_attn.k_proj.weight


def shared(block):
    block.other = block.self_attn.v_proj


def watched(block):
    block.self_attn.attend.register_forward_hook(lambda *_: None)


def parametrized(block):
    nn.utils.parametrizations.weight_norm(block.self_attn.out_proj)


def prepared(block):
    headwise.prepare_qat(block)


def keys_by_the_same_child(block):
    block.self_attn.k_proj = block.self_attn.v_proj


def queries_by_the_same_child(block):
    block.self_attn.q_proj = block.self_attn.v_proj


def outputs_by_the_same_child(block):
    block.self_attn.out_proj = block.self_attn.v_proj


def same_memory(block):
    block.self_attn.v_proj.weight.data = block.self_attn.k_proj.weight.data


def views(block):
    base = torch.randn(2 * D, D)
    block.self_attn.v_proj.weight, block.linear1.weight = nn.Parameter(base[:D]), nn.Parameter(base[8:])


def buffer(block):
    block.register_buffer("rows", block.self_attn.v_proj.weight.data[:3])


def attribute(block):
    block.rows = block.self_attn.v_proj.bias.data.view(2, -1)


def in_a_list(block):
    block.kept = [block.self_attn.v_proj.bias]


SHARED = [keys_by_the_same_child, queries_by_the_same_child, outputs_by_the_same_child]
SHARED += [same_memory, views, buffer, attribute, in_a_list]


@pytest.mark.parametrize("done", [hooked, adapted, tied, shared, watched, parametrized, prepared, *SHARED])
def test_where_a_factor_would_show_elsewhere_there_is_none(done):
    block = headwise.EncoderBlock(D, H)
    done(block)
    with pytest.raises(ValueError, match=r"^equalize: model must hold attention whose v_proj and out_proj are plain"):
        equalize(block)


@pytest.mark.parametrize("how", ["child", "Parameter", "memory"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_a_feed_forward_whose_linears_are_one_is_left_alone(how, activation):
    block = scramble(headwise.EncoderBlock(D, H, activation=activation, feedforward_dim=D))
    first = block.linear3 if activation == "swiglu" else block.linear1
    if how == "child":
        other = "linear1" if activation == "swiglu" else "linear2"
        setattr(block, other, first)
    elif how == "Parameter":
        block.linear2.weight = first.weight
    else:
        block.linear2.weight.data = first.weight.data
    x, before = torch.randn(2, 5, D), copy.deepcopy(block.state_dict())
    expected = block(x)
    equalize(block)  # the attention
    assert torch.equal(block(x), expected)
    for name in ("linear1.weight", "linear2.weight", "self_attn.out_proj.weight"):
        assert torch.equal(block.state_dict()[name], before[name]) == ("linear" in name)


def test_torchs_attention_whose_weights_are_one_is_refused():
    attention = nn.MultiheadAttention(D, H, kdim=7, vdim=7)
    attention.k_proj_weight = attention.v_proj_weight
    with pytest.raises(ValueError, match=r"equalize: model must hold attention .*; got MultiheadAttention with none"):
        equalize(attention)


def expanded_bias(block):
    block.linear1.bias = nn.Parameter(torch.ones(1).expand(block.linear1.out_features))


def expanded_weight(block):
    block.linear2.weight = nn.Parameter(torch.ones(D, 1).expand(D, block.linear2.in_features))


def overlapping(block):
    block.linear1.weight = nn.Parameter(torch.randn(block.linear1.out_features + D).unfold(0, D, 1)[:-1])


@pytest.mark.parametrize("done", [expanded_bias, expanded_weight, overlapping])
def test_what_cannot_be_written_is_refused_before_anything_is(done):
    block = scramble(headwise.EncoderBlock(D, H, activation="relu"))
    done(block)
    before = copy.deepcopy(block.state_dict())
    with pytest.raises(
        ValueError, match=r"equalize: model must hold each number in a place of its own.*; got an expan"
    ):
        equalize(block)
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())


def test_a_slice_of_wider_memory_is_written():
    block = scramble(headwise.EncoderBlock(D, H, activation="relu"))
    block.linear1.weight = nn.Parameter((torch.randn(block.linear1.out_features, 2 * D) * 100)[:, :D])
    x = torch.randn(2, 5, D)
    expected, before = block(x), block.linear1.weight.clone()
    equalize(block)
    assert torch.equal(block(x), expected)
    assert not torch.equal(block.linear1.weight, before)


def test_a_model_of_inference_mode_is_changed_within_it_only():
    with torch.inference_mode():
        block = scramble(headwise.EncoderBlock(D, H, activation="relu"))
        before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"equalize: model must be built outside of torch.inference_mode, or equalized"
    ):
        equalize(block)
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())
    with torch.inference_mode():
        x = torch.randn(2, 5, D)
        expected = block(x)
        assert torch.equal(equalize(block)(x), expected)
    assert not torch.equal(before["linear1.weight"], block.linear1.weight)


def test_it_says_what_it_did_and_what_it_cannot_do(caplog):
    block = headwise.EncoderBlock(D, H, activation="relu")
    with torch.no_grad():
        block.linear1.weight[3, 0] = 2.0**13
        block.linear2.weight[:, 3] = 2.0**-13
    with caplog.at_level(logging.INFO, "headwise"):
        equalize(block)
    assert caplog.records[0].getMessage() == "equalize: 2 pairs of linears equalized, by factors of up to 8192"
    with pytest.raises(ValueError, match=r"equalize: model must be an nn.Module; got int"):
        equalize(3)
    with pytest.raises(
        ValueError, match=r"quantize: model must hold attention whose v_proj .* to be equalized; got Lin"
    ):
        headwise.quantize(nn.Linear(3, 3), equalize=True)


@pytest.mark.parametrize("static", [False, True])
def test_quantize_survives_planted_outliers_only_with_it(static):
    torch.manual_seed(7)
    block = headwise.EncoderBlock(64, 4, activation="relu", norm_first=False).eval()
    pairs = [(block.self_attn.v_proj, block.self_attn.out_proj), (block.linear1, block.linear2)]
    with torch.no_grad():
        for first, second in pairs:
            first.weight[:3] *= 300
            first.bias[:3] *= 300
            second.weight[:, :3] /= 300
    x, before = torch.randn(8, 11, 64), copy.deepcopy(block.state_dict())
    calibration = [x] if static else None
    with torch.no_grad():
        expected = block(x)
        errors = [
            (headwise.quantize(block, calibration, equalize=even)(x) - expected).norm() / expected.norm()
            for even in (False, True)
        ]
    assert errors[0] > 0.05
    assert errors[1] < 0.01
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())
