"""What the tests of `upgrade` share: models of torch's, and how to say that nothing was changed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.parity.pair import fill
from torch import nn
from torch.nn import functional as F

D, H, B, L, S, M = 22, 2, 3, 5, 7, 13
each_layout = pytest.mark.parametrize("fused_qkv", [False, True], ids=["split", "fused"])


class Attends(nn.Module):
    """Self-attention, cross-attention with widths of its own, and a head."""

    def __init__(self, **kwargs):
        super().__init__()
        self.first = nn.MultiheadAttention(D, H, 0.0, batch_first=True, **kwargs)
        self.cross = nn.MultiheadAttention(D, H, 0.0, batch_first=True, kdim=11, vdim=17, **kwargs)
        self.head = nn.Linear(D, 3)

    def forward(self, x, key, value):
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.head(x + self.cross(x, key, value)[0])


def make_layer(kind, **kwargs):
    return kind(D, H, M, 0.0, batch_first=True, dtype=torch.float64, **kwargs)


def encoder(**kwargs):
    return nn.TransformerEncoder(make_layer(nn.TransformerEncoderLayer, **kwargs), 2, enable_nested_tensor=False)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


# A model of each kind, and a call of it.
MODELS = {
    "attention": (lambda: nn.MultiheadAttention(D, H).double(), (draw(L, B, D), draw(S, B, D), draw(S, B, D))),
    "bias_kv": (
        lambda: nn.MultiheadAttention(D, H, add_bias_kv=True, add_zero_attn=True, batch_first=True).double(),
        (draw(B, L, D), draw(B, S, D), draw(B, S, D)),
    ),
    "no bias": (
        lambda: nn.MultiheadAttention(D, H, bias=False).double(),
        (draw(L, B, D), draw(S, B, D), draw(S, B, D)),
    ),
    "attends": (lambda: Attends().double(), (draw(B, L, D), draw(B, S, 11), draw(B, S, 17))),
    "encoder layer": (lambda: make_layer(nn.TransformerEncoderLayer), (draw(B, L, D),)),
    "encoder layer, pre-norm gelu": (
        lambda: make_layer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"),
        (draw(B, L, D),),
    ),
    "encoder layer, module activation": (
        lambda: make_layer(nn.TransformerEncoderLayer, activation=nn.LeakyReLU()),
        (draw(B, L, D),),
    ),
    "encoder": (encoder, (draw(B, L, D),)),
    "decoder layer": (lambda: make_layer(nn.TransformerDecoderLayer), (draw(B, L, D), draw(B, S, D))),
    "decoder": (
        lambda: nn.TransformerDecoder(
            make_layer(nn.TransformerDecoderLayer, activation=F.silu), 2, nn.LayerNorm(D).double()
        ),
        (draw(B, L, D), draw(B, S, D)),
    ),
    "transformer": (
        lambda: nn.Transformer(D, H, 2, 2, M, 0.0, batch_first=True, dtype=torch.float64),
        (draw(B, S, D), draw(B, L, D)),
    ),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", MODELS)


def build(name):
    """The model with random parameters, biases too, and a gradient everywhere."""
    make, inputs = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of nested tensors
        model = fill(make())
    return model, inputs


def first(result):
    return result[0] if isinstance(result, tuple) else result


def close(model, inputs, wanted):
    """Not to the bit: torch's products depend on where in memory their operands lie."""
    torch.testing.assert_close(first(model(*inputs)), wanted, rtol=1e-10, atol=1e-10)


def assert_same_state(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].dtype == value.dtype


def snapshot(model, *optimizers):
    """All that a refusal must leave alone: objects by identity, numbers by value."""
    modules = []
    for name, module in model.named_modules():
        held = [*module._parameters.items(), *module._buffers.items(), *module._modules.items()]
        state = {key: id(value) for key, value in vars(module).items()}
        hooks = [list(value) for key, value in vars(module).items() if key.endswith("hooks")]
        modules.append((name, module, type(module), state, [(key, id(value)) for key, value in held], hooks))
    numbers = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [(id(g), id(g["params"]), [*map(id, g["params"])]) for o in optimizers for g in o.param_groups]
    names = [list(g.get("param_names", ())) for o in optimizers for g in o.param_groups]
    states = [{id(p): {**state} for p, state in o.state.items()} for o in optimizers]
    values = copy.deepcopy(states)
    return modules, numbers, groups, names, [{p: [*map(id, s.values())] for p, s in o.items()} for o in states], values


def assert_untouched(before, after):
    assert before[0] == after[0]
    assert before[2:5] == after[2:5]
    assert_same_state(after[1], before[1])
    torch.testing.assert_close(after[5], before[5], rtol=0, atol=0)


def refused(function, model, match, *optimizers, **kwargs):
    """The call raises with these words and changes nothing, random numbers included."""
    before, random = snapshot(model, *optimizers), torch.get_rng_state()
    given = {"optimizer": list(optimizers)} if optimizers else {}
    with pytest.raises(ValueError, match=match):
        function(model, **given, **kwargs)
    assert_untouched(before, snapshot(model, *optimizers))
    assert torch.equal(torch.get_rng_state(), random)


def tied():
    model = nn.ModuleList(fill(nn.MultiheadAttention(D, H), seed) for seed in (1, 2, 3))
    model[2].in_proj_weight, model[2].in_proj_bias = model[0].in_proj_weight, model[0].in_proj_bias
    model[1].out_proj = model[0].out_proj
    return model
