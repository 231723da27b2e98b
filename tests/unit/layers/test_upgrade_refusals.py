"""What `upgrade` and `downgrade` refuse before anything is changed, and what they keep with `fused_qkv=True`."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.unit.layers.upgrading import (
    B,
    D,
    H,
    L,
    M,
    assert_same_state,
    build,
    draw,
    each_layout,
    first,
    make_layer,
    refused,
    tied,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import headwise
from headwise.layers.upgrade import downgrade, upgrade


def _halve(module, name):
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    parametrize.register_parametrization(module, name, Half())


COMPUTED = {
    "pruned weight": lambda m: prune.random_unstructured(m, "in_proj_weight", 0.5),
    "pruned bias": lambda m: prune.random_unstructured(m, "in_proj_bias", 0.5),
    "parametrized weight": lambda m: _halve(m, "in_proj_weight"),
    "parametrized bias": lambda m: _halve(m, "in_proj_bias"),
    "weight norm": lambda m: parametrizations.weight_norm(m, "in_proj_weight"),
}


@pytest.mark.parametrize("change", COMPUTED)
def test_computed_projections_are_kept_in_the_fused_layout(change):
    model, theirs = (nn.Sequential(build("attention")[0], build("attention")[0]) for _ in range(2))
    inputs = build("attention")[1]
    for each in (model, theirs):
        torch.manual_seed(3)
        COMPUTED[change](each[1])
    refused(upgrade, model, r"1\.in_proj_\w+ must be a Parameter of the module itself.*pass fused_qkv=True.*remove")
    upgrade(model, fused_qkv=True)
    assert isinstance(model[1], headwise.MultiheadAttention)
    assert_same_state(model.state_dict(), theirs.state_dict())
    for _ in range(2):
        torch.testing.assert_close(model[1](*inputs), theirs[1](*inputs))
        for each in (model, theirs):
            first(each[1](*inputs)).sum().backward()
        for (name, p), q in zip(model[1].named_parameters(), theirs[1].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
            with torch.no_grad():
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
    downgrade(model)
    assert_same_state(model.state_dict(), theirs.state_dict())
    torch.testing.assert_close(model[1](*inputs), theirs[1](*inputs))
    assert type(model[1]).__mro__[1 if "param" in change or "norm" in change else 0] is nn.MultiheadAttention
    # and what put it there can take it away
    upgrade(model, fused_qkv=True)
    name = "in_proj_bias" if "bias" in change else "in_proj_weight"
    if "pruned" in change:
        prune.remove(model[1], name)
    else:
        parametrize.remove_parametrizations(model[1], name)
    assert type(model[1]) is headwise.MultiheadAttention
    torch.testing.assert_close(model[1](*inputs), theirs[1](*inputs))


def test_old_weight_norm_is_kept_in_the_fused_layout():
    model, inputs = build("attention")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model, "in_proj_weight")
    wanted = model(*inputs)
    with pytest.raises(ValueError, match="fused_qkv=True"):
        upgrade(model)
    torch.testing.assert_close(upgrade(model, fused_qkv=True)(*inputs), wanted)


def test_a_parametrized_bias_k_is_kept_in_both_layouts():
    for fused_qkv in (False, True):
        model, inputs = build("bias_kv")
        _halve(model, "bias_k")
        wanted = model(*inputs)
        upgrade(model, fused_qkv=fused_qkv)
        torch.testing.assert_close(model(*inputs), wanted)
        torch.testing.assert_close(copy.deepcopy(model)(*inputs), wanted)


def test_a_parametrized_out_proj_is_kept_in_both_layouts():
    for fused_qkv in (False, True):
        model, inputs = build("attention")
        _halve(model.out_proj, "weight")
        wanted = model(*inputs)
        upgrade(model, fused_qkv=fused_qkv)
        torch.testing.assert_close(model(*inputs), wanted)
        torch.testing.assert_close(downgrade(model)(*inputs), wanted)


def _patch_forward(model):
    model.first.forward = model.first.forward


def _compile_in_place(model):
    model.first.compile(backend="eager")


def _hook_parameter(model):
    model.first.in_proj_weight.register_hook(lambda grad: grad)


def _hook_accumulated(model):
    model.first.in_proj_bias.register_post_accumulate_grad_hook(lambda p: None)


def _tie_to_a_foreign_module(model):
    model.foreign = nn.Linear(D, 3 * D)
    model.foreign.weight = model.first.in_proj_weight


def _tie_to_a_list(model):
    model.listed = nn.ParameterList([model.first.in_proj_weight])


def _hold_in_a_plain_list(model):
    model.held = {"a": [model.first.in_proj_weight]}


def _alias_memory(model):
    model.register_buffer("view", model.first.in_proj_weight.detach()[3:5])


def _alias_memory_of_another(model):
    flat = torch.randn(2, 3 * D, D)
    model.first.in_proj_weight.data = flat[0]
    model.second = nn.MultiheadAttention(D, H)
    model.second.in_proj_weight.data = flat[0]


def _tensor_attribute(model):
    model.first.in_proj_weight.main_grad = torch.zeros(3 * D, D)


def _subclass_of_parameter(model):
    class Mine(nn.Parameter):
        pass

    model.first.in_proj_weight = Mine(model.first.in_proj_weight.detach())


def _other_grad(model):
    model.first.in_proj_weight.grad = torch.zeros(3 * D, D, dtype=torch.float64).to_sparse()


WHOLE = {  # refused for the split layout; with fused_qkv=True nothing is touched
    "parameter hook": (_hook_parameter, "first.in_proj_weight must carry no hooks.*fused_qkv=True"),
    "accumulate hook": (_hook_accumulated, "first.in_proj_bias must carry no hooks.*fused_qkv=True"),
    "foreign module": (_tie_to_a_foreign_module, "first.in_proj_weight must be used by nothing.*fused.*foreign.weight"),
    "parameter list": (_tie_to_a_list, "first.in_proj_weight must be used by nothing.*fused.*listed.0"),
    "plain list": (_hold_in_a_plain_list, "first.in_proj_weight must be used by nothing.*fused.*held of a Attends"),
    "memory": (_alias_memory, "first.in_proj_weight must be used by nothing.*fused.*view.*memory"),
    "memory of another": (_alias_memory_of_another, "must be used by nothing.*fused_qkv=True.*memory"),
    "tensor attribute": (_tensor_attribute, "first.in_proj_weight.main_grad must hold no tensor.*fused_qkv=True"),
    "sparse grad": (_other_grad, "first.in_proj_weight.grad must be a plain tensor.*fused_qkv=True.*zero_grad.*sparse"),
    "subclass": (_subclass_of_parameter, "first.in_proj_weight must be a plain Parameter.*fused_qkv=True.*Mine"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_what_belongs_to_the_whole_parameter_is_refused_when_split(case):
    change, match = WHOLE[case]
    model = build("attends")[0]
    change(model)
    refused(upgrade, model, match)
    before = {name: id(p) for name, p in model.named_parameters()}
    upgrade(model, fused_qkv=True)
    assert before == {name: id(p) for name, p in model.named_parameters()}


def test_a_tie_with_an_attention_that_stays_is_refused():
    model = tied()
    match = (
        r"0\.in_proj_weight must be used by nothing that stays as it is .*fused_qkv=True.*got also 2\.in_proj_weight"
    )
    refused(upgrade, model, match, where=lambda name, module: name != "2")
    upgrade(model, where=lambda name, module: name != "2", fused_qkv=True)
    assert model[0].in_proj_weight is model[2].in_proj_weight


ALWAYS = {
    "forward": (_patch_forward, "first.forward must be the method of its class"),
    "compile": (_compile_in_place, "first must not be compiled in place.*call .compile"),
    "name of ours": (lambda m: setattr(m.first, "attend", nn.Identity()), "first.attend must not exist.*rename"),
    "method of ours": (lambda m: setattr(m.first, "fuse_projections", 3), "first.fuse_projections must not exist"),
    "heads": (lambda m: setattr(m.first, "num_heads", 5), "first.embed_dim must be a multiple of num_heads 5; got 22"),
    "dropout": (lambda m: setattr(m.first, "dropout", 1.5), r"first.dropout must be in \[0, 1\]; got 1.5"),
    "widths": (lambda m: setattr(m.first, "kdim", 11), "first._qkv_same_embed_dim must be False"),
    "flag": (lambda m: setattr(m.first, "_qkv_same_embed_dim", False), "first._qkv_same_embed_dim must be True"),
    "shape": (
        lambda m: setattr(m.first, "in_proj_bias", nn.Parameter(torch.zeros(5))),
        r"first.in_proj_bias must be \(66,\) in a module of these widths; got \(5,\)",
    ),
    "no batch_first": (lambda m: delattr(m.first, "batch_first"), "first must have all attributes.*got no batch_first"),
    "no out_proj": (lambda m: setattr(m.first, "out_proj", None), "first.out_proj must be a module; got NoneType"),
}  # fmt: skip


@each_layout
@pytest.mark.parametrize("case", ALWAYS)
def test_what_ours_cannot_keep_is_refused(case, fused_qkv):
    change, match = ALWAYS[case]
    model = build("attends")[0]
    change(model)
    refused(upgrade, model, match, fused_qkv=fused_qkv)


def test_a_patched_layer_is_refused():
    model, _ = build("encoder")
    model.layers[1]._sa_block = lambda x, *args, **kwargs: x
    refused(upgrade, model, r"layers\.1\._sa_block must be the method of its class; remove")
    del model.layers[1]._sa_block
    model.layers[1].linear3 = nn.Linear(D, M)
    refused(upgrade, model, r"layers\.1\.linear3 must not exist")


def test_a_patched_class_is_refused(monkeypatch):
    model, _ = build("encoder")
    original = nn.TransformerEncoderLayer._sa_block

    def _sa_block(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.TransformerEncoderLayer, "_sa_block", _sa_block)
    refused(upgrade, model, "TransformerEncoderLayer._sa_block must be torch's own, not patched.*got .*test_upgrade")
    upgrade(model, where=lambda name, module: isinstance(module, nn.MultiheadAttention))
    monkeypatch.undo()
    monkeypatch.setattr(nn.TransformerEncoder, "forward", torch.relu)
    refused(upgrade, model, "TransformerEncoder.forward must be torch's own")


def test_a_late_fault_leaves_all_modules_and_optimizers_as_they_were():
    """Everything before the last module could be changed; nothing is."""
    model = nn.ModuleList([*(nn.MultiheadAttention(D, H) for _ in range(3)), nn.TransformerEncoderLayer(D, H, M)])
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    model[3].self_attn.forward = model[3].self_attn.forward
    refused(upgrade, model, r"3\.self_attn\.forward", optimizer)
    del model[3].self_attn.forward
    optimizer.state[model[3].self_attn.in_proj_bias]["odd"] = torch.zeros(2)
    refused(upgrade, model, "'odd' in the state of AdamW", optimizer)
    del optimizer.state[model[3].self_attn.in_proj_bias]["odd"]
    upgrade(model, optimizer)
    model[3].self_attn.v_proj.register_forward_hook(lambda *_: None)
    refused(downgrade, model, r"v_proj must carry no hooks", optimizer)


SPECIAL = {
    "average": (lambda m: setattr(m, "average_attn_weights", False), "average_attn_weights must be True"),
    "dropout hook": (lambda m: m.attn_dropout.register_forward_hook(lambda *_: None), "dropout must carry no hooks"),
    "dropout None": (lambda m: setattr(m, "attn_dropout", None), "attn_dropout must be a plain Dropout.*NoneType"),
    "dropout replaced": (lambda m: setattr(m, "attn_dropout", nn.Identity()), "attn_dropout must be a plain Dropout"),
    "dropout flag": (
        lambda m: (setattr(m, "dropout", 0.1), m.attn_dropout.eval()),
        "attn_dropout must have training=True, as its parent",
    ),
    "attend hook": (lambda m: m.attend.register_forward_pre_hook(lambda *_: None), "attend must carry no hooks"),
    "q replaced": (lambda m: setattr(m, "q_proj", nn.Sequential(m.q_proj)), "q_proj must be exactly an nn.Linear"),
    "q hook": (lambda m: m.q_proj.register_forward_hook(lambda *_: None), "q_proj must carry no hooks"),
    "q state hook": (lambda m: m.q_proj.register_state_dict_pre_hook(lambda *_: None), "q_proj must carry no hooks"),
    "q attribute": (lambda m: setattr(m.q_proj, "scale", 3), "q_proj must have no attribute scale"),
    "k bias": (lambda m: setattr(m.k_proj, "bias", None), "must be there for all or for none; got 2 of 3"),
    "frozen": (lambda m: m.v_proj.weight.requires_grad_(False), "requires_grad of model.*weight must be the same"),
    "dtype": (lambda m: m.v_proj.float(), "dtype of model.*must be the same"),
    "attribute": (lambda m: setattr(m.v_proj.bias, "tag", 3), "attribute tag of model.*bias must be the same"),
    "grad": (lambda m: setattr(m.v_proj.bias, "grad", torch.zeros_like(m.v_proj.bias)), "having .grad of.*zero_grad"),
    "tied": (lambda m: setattr(m.v_proj, "weight", m.k_proj.weight), "be Parameters of their own"),
    "out_proj replaced": (lambda m: setattr(m, "out_proj", nn.Sequential(m.out_proj)), "out_proj must be an nn.Linear"),
    "out_proj hook": (lambda m: m.out_proj.register_forward_hook(lambda *_: None), "out_proj must be an nn.Linear w"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECIAL)
def test_downgrade_refuses_what_torch_cannot_do(case):
    change, match = SPECIAL[case]
    model = upgrade(build("attention")[0])
    change(model)
    refused(downgrade, model, match)


def test_downgrade_refuses_a_projection_that_is_used_elsewhere():
    model = nn.ModuleDict({"a": upgrade(nn.MultiheadAttention(D, H)), "b": nn.Linear(D, D)})
    model["b"].weight = model["a"].q_proj.weight
    refused(downgrade, model, r"a\.q_proj\.weight must be used by nothing that stays.*untie.*got also b\.weight")
    model["b"] = model["a"].q_proj
    refused(downgrade, model, r"q_proj must be used by nothing that stays.*got also b")


@pytest.mark.parametrize(
    ("activation", "flag"),
    [(F.relu, 1), (nn.ReLU(), 1), (F.gelu, 2), (nn.GELU(), 2), (nn.GELU(approximate="tanh"), 0), (F.silu, 0)],
    ids=["relu", "ReLU", "gelu", "GELU", "GELU-tanh", "silu"],
)
def test_downgrade_notes_the_activation(activation, flag):
    layer = make_layer(nn.TransformerEncoderLayer, activation=activation).eval()
    x = draw(B, L, D)
    wanted = upgrade(layer)(x)
    assert "activation_relu_or_gelu" not in vars(layer)
    downgrade(layer)
    assert layer.activation_relu_or_gelu == flag
    with torch.no_grad():  # torch's fast path, where it takes it
        torch.testing.assert_close(layer(x), wanted)


def test_downgrade_keeps_torch_off_its_fast_path_where_that_passes_modules_by():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = upgrade(make_layer(nn.TransformerEncoderLayer)).eval()
    twice = Twice(D, M).double()
    layer.linear1 = twice
    x = draw(B, L, D)
    wanted = layer(x)
    downgrade(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("where", ["encoder", ["encoder"], 3], ids=repr)
def test_where_that_cannot_be_called_is_named(where):
    refused(upgrade, nn.MultiheadAttention(D, H), r"where must be called as where\(name, module\); got", where=where)


def test_an_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(nn.Linear(2, 3).parameters(), 0.1)
    model = nn.MultiheadAttention(D, H)
    with pytest.raises(ValueError, match=r"optimizer must hold parameters of this model.*got SGD with none of them"):
        upgrade(model, other)
    assert type(model) is nn.MultiheadAttention


def test_a_shallow_copy_is_refused():
    """It shares its original's Parameters, and would be half replaced with it."""
    original = nn.MultiheadAttention(D, H)
    model = nn.ModuleList([nn.MultiheadAttention(D, H), original, copy.copy(original)])
    refused(upgrade, model, r"2 must be a module of its own, by copy\.deepcopy; got a shallow copy of 1")


class Mixin:
    def greet(self):
        return "hello"


class WithMixin(nn.MultiheadAttention, Mixin):
    """As huggingface_hub has it: a class of methods after torch's."""

    def __init__(self):
        super().__init__(D, H)


def test_a_mixin_after_the_base_is_not_lost():
    model = nn.ModuleList([WithMixin(), nn.MultiheadAttention(D, H)])
    with pytest.warns(UserWarning, match=r"0 \(.*WithMixin, a MultiheadAttention, which has its own Mixin\.greet\)"):
        upgrade(model, where=lambda name, module: True)
    assert type(model[0]) is WithMixin
    assert model[0].greet() == "hello"
    assert type(model[1]) is headwise.MultiheadAttention
