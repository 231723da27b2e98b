"""`upgrade` and `downgrade`: what becomes what, what stays, and what other tools see."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import pickle
import warnings
import weakref

import pytest
import torch
from tests.compiling import Counter
from tests.parity.pair import fill
from tests.unit.layers.upgrading import (
    B,
    D,
    H,
    L,
    M,
    assert_same_state,
    assert_untouched,
    build,
    close,
    each_layout,
    each_model,
    first,
    refused,
    snapshot,
    tied,
)
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import headwise
from headwise.layers import transformer
from headwise.layers.upgrade import downgrade, upgrade

PAIRS = {
    nn.MultiheadAttention: headwise.MultiheadAttention,
    nn.TransformerEncoderLayer: transformer.TransformerEncoderLayer,
    nn.TransformerEncoder: transformer.TransformerEncoder,
    nn.TransformerDecoderLayer: transformer.TransformerDecoderLayer,
    nn.TransformerDecoder: transformer.TransformerDecoder,
    nn.Transformer: transformer.Transformer,
}


# --- what becomes what ---


@each_layout
@each_model
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_becomes_ours_with_the_same_numbers(name, fused_qkv, train):
    theirs, inputs = build(name)
    ours = copy.deepcopy(theirs).train(train)
    theirs.train(train)
    objects = {path: id(module) for path, module in ours.named_modules()}
    random = torch.get_rng_state()

    assert upgrade(ours, fused_qkv=fused_qkv) is ours

    assert torch.equal(torch.get_rng_state(), random)
    modules = dict(ours.named_modules())
    for path, module in theirs.named_modules():
        assert id(modules[path]) == objects[path], path
        wanted = PAIRS.get(type(module), type(module))
        assert type(modules[path]) is (nn.Linear if wanted is NonDynamicallyQuantizableLinear else wanted), path
        assert modules[path].training == module.training
    for module in modules.values():
        if isinstance(module, headwise.MultiheadAttention):
            assert module.fused_qkv == fused_qkv
            assert {child.training for child in module.modules()} == {train}
    assert_same_state(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(first(ours(*inputs)), first(theirs(*inputs)), rtol=1e-10, atol=1e-10)


@each_layout
@each_model
def test_has_all_attributes_of_a_new_one(name, fused_qkv):
    """A module that became ours holds what the constructor of ours sets, and nothing of torch's besides."""
    model, _ = build(name)
    upgrade(model, fused_qkv=fused_qkv)
    for module in model.modules():
        if type(module) is not headwise.MultiheadAttention:
            continue
        new = headwise.MultiheadAttention(
            D, H, bias=module.out_proj.bias is not None, kdim=module.kdim, vdim=module.vdim, fused_qkv=fused_qkv,
            add_bias_kv=module.bias_k is not None,
        )  # fmt: skip
        assert vars(module).keys() == vars(new).keys()
        assert set(module._parameters) == set(new._parameters)
        assert list(module._modules) == list(new._modules)
        for child in ("out_proj",) if fused_qkv else ("q_proj", "k_proj", "v_proj", "out_proj"):
            assert vars(module._modules[child]).keys() == vars(new._modules[child]).keys()
        assert [hook.__name__ for hook in module._state_dict_hooks.values()] == ["speak_torch"]


@pytest.mark.parametrize("kind", list(PAIRS)[1:], ids=lambda kind: kind.__name__)
def test_a_layer_has_all_attributes_of_a_new_one(kind):
    name = {
        nn.TransformerEncoderLayer: "encoder layer",
        nn.TransformerEncoder: "encoder",
        nn.TransformerDecoderLayer: "decoder layer",
        nn.TransformerDecoder: "decoder",
        nn.Transformer: "transformer",
    }[kind]
    model, _ = build(name)
    upgrade(model)
    ours = PAIRS[kind]
    if kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        new = ours(D, H, M, batch_first=True)
    elif kind is nn.TransformerEncoder:
        new = ours(transformer.TransformerEncoderLayer(D, H, M, batch_first=True), 2)
    elif kind is nn.TransformerDecoder:
        new = ours(transformer.TransformerDecoderLayer(D, H, M, batch_first=True), 2, nn.LayerNorm(D))
    else:
        new = ours(D, H, 2, 2, M, batch_first=True)
    assert vars(model).keys() == vars(new).keys()
    assert list(model._modules) == list(new._modules)


@each_layout
@each_model
def test_downgrade_undoes_it(name, fused_qkv):
    theirs, inputs = build(name)
    theirs.eval()
    model = upgrade(copy.deepcopy(theirs), fused_qkv=fused_qkv)
    assert downgrade(model) is model
    modules = dict(model.named_modules())
    assert list(modules) == [path for path, _ in theirs.named_modules()]
    for path, module in theirs.named_modules():
        assert type(modules[path]) is type(module)
        assert vars(modules[path]).keys() == vars(module).keys(), path
        for holder in ("_parameters", "_buffers", "_modules"):
            assert list(getattr(modules[path], holder)) == list(getattr(module, holder)), path
        for key, value in vars(module).items():
            if not key.startswith("_") and not callable(value):
                assert vars(modules[path])[key] == value, key
    assert_same_state(model.state_dict(), theirs.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert torch.equal(first(model(*inputs)), first(theirs(*inputs)))
    with pytest.raises(ValueError, match=r"downgrade: model must hold a layer of headwise .*already"):
        downgrade(model)


def test_twice_raises():
    model = upgrade(build("attends")[0])
    refused(upgrade, model, r"upgrade: model must hold a layer of torch .*got 2 layers of headwise already")


@pytest.mark.parametrize("function", [upgrade, downgrade])
def test_nothing_to_do_raises(function):
    refused(function, nn.Linear(3, 5), "hold a layer of .*got none")
    for wrong in (None, "model", nn.MultiheadAttention, [nn.Linear(3, 5)]):
        with pytest.raises(ValueError, match=r"model must be an nn\.Module; got"):
            function(wrong)


# --- what stays ---


def test_cuts_by_rows_and_keeps_grads_flags_and_attributes():
    model, inputs = build("attends")
    model.first.in_proj_bias.requires_grad_(False)
    model.cross.k_proj_weight.requires_grad_(False)
    first(model(*inputs)).square().sum().backward()
    model.first.in_proj_weight.no_weight_decay = True
    model.cross.in_proj_bias.tag = tag = ["x"]
    model.first.note = "mine"
    grads = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: id(p) for name, p in model.named_parameters() if "in_proj" not in name}
    weight, bias = model.first.in_proj_weight.detach().clone(), model.cross.in_proj_bias.detach().clone()

    upgrade(model)

    assert model.first.note == "mine"
    for index, child in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(index * D, (index + 1) * D)
        part, cross = getattr(model.first, child), getattr(model.cross, child)
        assert type(part) is nn.Linear
        assert torch.equal(part.weight, weight[rows])
        assert torch.equal(part.weight.grad, grads["first.in_proj_weight"][rows])
        assert part.weight.requires_grad
        assert part.weight.no_weight_decay is True
        assert not part.bias.requires_grad
        assert part.bias.grad is None
        assert part.weight.untyped_storage().nbytes() == part.weight.nbytes  # memory of its own
        assert torch.equal(cross.bias, bias[rows])
        assert torch.equal(cross.bias.grad, grads["cross.in_proj_bias"][rows])
        assert cross.bias.tag is tag
        assert id(cross.weight) == kept[f"cross.{child}_weight"]  # apart already: the same object
        assert cross.weight.requires_grad == (child != "k_proj")
    for name in ("head.weight", "first.out_proj.weight", "cross.out_proj.bias"):
        assert id(model.get_parameter(name)) == kept[name]
        assert model.get_parameter(name).grad is grads[name]

    downgrade(model)
    for name, grad in grads.items():
        got = model.get_parameter(name).grad
        assert (got is None) == (grad is None)
        assert grad is None or torch.equal(got, grad), name
    assert model.first.in_proj_weight.no_weight_decay is True
    assert model.cross.in_proj_bias.tag is tag


@each_model
def test_fused_keeps_every_parameter_object(name):
    model, _ = build(name)
    before = {name: id(p) for name, p in model.named_parameters()}
    upgrade(model, fused_qkv=True)
    assert before == {name: id(p) for name, p in model.named_parameters()}
    downgrade(model)
    assert before == {name: id(p) for name, p in model.named_parameters()}


@each_layout
def test_training_flags_dropout_and_options_stay(fused_qkv):
    model = nn.Sequential(
        nn.MultiheadAttention(D, H, 0.25, batch_first=True, add_zero_attn=True), nn.MultiheadAttention(D, H, 0.5)
    )
    model[0].eval()
    model[0].out_proj.train()
    model[1].dropout = 0.75
    upgrade(model, fused_qkv=fused_qkv)
    assert [m.training for m in model] == [False, True]
    assert [m.attn_dropout.training for m in model] == [False, True]
    assert model[0].out_proj.training
    assert [m.dropout for m in model] == [0.25, 0.75]
    assert [m.head_dim for m in model] == [D // H] * 2
    assert [m.batch_first for m in model] == [True, False]
    assert [m.add_zero_attn for m in model] == [True, False]
    downgrade(model)
    assert [m.dropout for m in model] == [0.25, 0.75]
    assert vars(model[0])["dropout"] == 0.25


@each_layout
def test_hooks_of_every_kind_stay_and_can_be_removed(fused_qkv):
    model, inputs = build("encoder layer")
    module, called = model.self_attn, []

    def note(what):
        return lambda *args, **kwargs: called.append(what)

    handles = [
        module.register_forward_hook(note("forward"), with_kwargs=True),
        module.register_forward_hook(note("always"), always_call=True),
        module.register_forward_pre_hook(note("pre"), with_kwargs=True),
        module.register_full_backward_hook(note("backward")),
        module.register_full_backward_pre_hook(note("backward pre")),
        module.register_state_dict_post_hook(lambda m, state, prefix, meta: called.append(sorted(state))),
        module.register_state_dict_pre_hook(note("state pre")),
        module.register_load_state_dict_pre_hook(note("load pre")),
        module.register_load_state_dict_post_hook(note("load post")),
        model.register_forward_hook(note("layer")),
        module.out_proj.register_forward_hook(note("out_proj")),
    ]
    keys = sorted(f"self_attn.{key}" for key in module.state_dict())
    called.clear()
    hooks = {key: value for key, value in vars(module).items() if "_hooks" in key}
    upgrade(model, fused_qkv=fused_qkv)
    assert all(vars(module)[key] is value for key, value in hooks.items())

    x = inputs[0].clone().requires_grad_()
    model(x).sum().backward()
    assert called == ["pre", "out_proj", "forward", "always", "layer", "backward pre", "backward"]
    called.clear()
    state = model.state_dict()
    assert called == ["state pre", [key for key in sorted(state) if key.startswith("self_attn.")]]
    assert called[1] == keys  # our own hook spoke torch's names before
    called.clear()
    model.load_state_dict(state)
    assert called == ["load pre", "load post"]

    for handle in handles:
        handle.remove()
    called.clear()
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert called == []
    assert [hook.__name__ for hook in module._state_dict_hooks.values()] == ["speak_torch"]


def test_references_of_every_kind_are_right_afterwards():
    model, inputs = build("encoder")
    layer, attention = model.layers[1], model.layers[1].self_attn
    held, weak = [attention], weakref.ref(attention)
    closure = functools.partial(attention, *3 * inputs, need_weights=False)
    before = closure()[0]
    upgrade(model)
    assert held[0] is weak() is model.layers[1].self_attn
    assert model.layers[1] is layer
    assert type(held[0]) is headwise.MultiheadAttention
    torch.testing.assert_close(closure()[0], before)
    # nothing that was made on the way holds the model
    del model, layer, attention, held, closure
    gc.collect()
    assert weak() is None


@each_layout
def test_buffers_children_and_parameters_of_the_user_stay(fused_qkv):
    theirs, inputs = build("attention")
    theirs.register_buffer("steps", torch.arange(3))
    theirs.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
    theirs.probe = nn.Linear(3, 5).double()
    ours = upgrade(copy.deepcopy(theirs), fused_qkv=fused_qkv)
    assert_same_state(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))
    downgrade(ours)
    assert_same_state(ours.state_dict(), theirs.state_dict())
    assert vars(ours).keys() == vars(theirs).keys()


@each_layout
def test_a_module_that_is_shared_stays_shared(fused_qkv):
    model = nn.ModuleDict({"a": fill(nn.MultiheadAttention(D, H)), "c": nn.Linear(3, 3)})
    model["b"] = model["a"]
    upgrade(model, fused_qkv=fused_qkv)
    assert model["a"] is model["b"]
    assert type(model["b"]) is headwise.MultiheadAttention
    assert len(list(model.parameters())) == (8 if not fused_qkv else 4) + 2


def test_tied_attentions_share_the_parts():
    model = tied()
    state = copy.deepcopy(model.state_dict())
    upgrade(model)
    for child in ("q_proj", "k_proj", "v_proj"):
        assert getattr(model[0], child).weight is getattr(model[2], child).weight
        assert getattr(model[0], child).bias is getattr(model[2], child).bias
        assert getattr(model[0], child).weight is not getattr(model[1], child).weight
    assert model[1].out_proj is model[0].out_proj
    assert_same_state(model.state_dict(), state)
    downgrade(model)
    assert model[2].in_proj_weight is model[0].in_proj_weight
    assert model[2].in_proj_bias is model[0].in_proj_bias
    assert_same_state(model.state_dict(), state)


def test_memory_shared_between_processes_stays_so():
    model = nn.MultiheadAttention(D, H).share_memory()
    assert all(p.is_shared() for p in upgrade(model).parameters())
    assert all(p.is_shared() for p in downgrade(model).parameters())
    assert not any(p.is_shared() for p in upgrade(nn.MultiheadAttention(D, H)).parameters())


@each_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_and_meta_device_stay(fused_qkv, dtype):
    model = upgrade(nn.MultiheadAttention(D, H, dtype=dtype, device="meta"), fused_qkv=fused_qkv)
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(dtype, "meta")}


def test_inference_parameters_can_be_cut():
    with torch.inference_mode():
        model = fill(nn.MultiheadAttention(D, H)).eval()
        x = torch.randn(L, B, D)
        before = model(x, x, x)
    upgrade(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(x, x, x), before)


def test_gradients_in_another_dtype_stay_so():
    model = nn.MultiheadAttention(D, H, dtype=torch.bfloat16)
    packed = model.in_proj_weight
    packed.grad_dtype = torch.float32
    packed.grad = torch.randn(3 * D, D)
    upgrade(model)
    assert model.q_proj.weight.grad_dtype == torch.float32
    assert torch.equal(model.k_proj.weight.grad, packed.grad[D : 2 * D])
    assert model.q_proj.bias.grad_dtype == torch.bfloat16
    downgrade(model)
    assert model.in_proj_weight.grad_dtype == torch.float32
    assert torch.equal(model.in_proj_weight.grad, packed.grad)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"])
def test_can_be_trained_although_upgraded_without_gradients(context):
    model, inputs = build("attention")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        first(model(*inputs)).sum().backward()
        optimizer.step()
        with context():
            (downgrade if isinstance(model, headwise.MultiheadAttention) else upgrade)(model, optimizer)
        assert all(p.requires_grad and not p.is_inference() for p in model.parameters())


@each_layout
def test_reset_parameters_draws_what_ours_draws(fused_qkv):
    model = upgrade(nn.MultiheadAttention(D, H), fused_qkv=fused_qkv)
    torch.manual_seed(3)
    model.reset_parameters()
    for child in model.children() if not fused_qkv else ():
        assert child is model.attn_dropout or child is model.attend or "reset_parameters" in vars(child)
    torch.manual_seed(3)
    assert_same_state(model.state_dict(), headwise.MultiheadAttention(D, H, fused_qkv=fused_qkv).state_dict())


@each_layout
@each_model
def test_copies_pickles_and_checkpoints(name, fused_qkv):
    theirs, inputs = build(name)
    ours = upgrade(copy.deepcopy(theirs), fused_qkv=fused_qkv)
    wanted = first(ours(*inputs))
    again = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again.append(torch.load(file, weights_only=False))
    for one in again:
        close(one, inputs, wanted)
        assert_same_state(one.state_dict(), theirs.state_dict())
        downgrade(one)  # a copy can go back too
    other = fill(copy.deepcopy(theirs), seed=9)
    assert not torch.equal(first(other(*inputs)), wanted)
    other.load_state_dict(ours.state_dict(), strict=True)
    assert_same_state(other.state_dict(), theirs.state_dict())
    upgraded = upgrade(fill(copy.deepcopy(theirs), seed=9), fused_qkv=fused_qkv)
    upgraded.load_state_dict(theirs.state_dict(), strict=True)
    close(upgraded, inputs, wanted)
    flat = nn.utils.parameters_to_vector(upgraded.parameters())
    nn.utils.vector_to_parameters(flat.clone(), upgraded.parameters())
    close(upgraded, inputs, wanted)


def test_a_copy_made_before_is_left_alone():
    model, _ = build("transformer")
    before = copy.deepcopy(model)
    state = snapshot(before)
    upgrade(model)
    assert_untouched(state, snapshot(before))


# --- which modules ---


def test_where_selects_by_name_and_module():
    model, inputs = build("encoder")
    wanted = model(*inputs)
    seen = {}

    def where(name, module):
        seen[name] = type(module)
        return name == "layers.1"

    upgrade(model, where=where)
    assert seen == {
        "": nn.TransformerEncoder,
        "layers.0": nn.TransformerEncoderLayer,
        "layers.0.self_attn": nn.MultiheadAttention,
        "layers.1": nn.TransformerEncoderLayer,
        "layers.1.self_attn": nn.MultiheadAttention,
    }
    assert type(model) is nn.TransformerEncoder
    assert type(model.layers[0]) is nn.TransformerEncoderLayer
    assert type(model.layers[1]) is transformer.TransformerEncoderLayer
    assert type(model.layers[1].self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(model(*inputs), wanted)
    upgrade(model, where=lambda name, module: name == "layers.0.self_attn")
    for train in (True, False):
        torch.testing.assert_close(model.train(train)(*inputs), wanted)
    refused(upgrade, model, "got 3 layers of which where selected none; 2 layers of headwise", where=lambda *_: False)
    upgrade(model)
    torch.testing.assert_close(model(*inputs), wanted)
    downgrade(model, where=lambda name, module: name.endswith("self_attn"))
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(model(*inputs), wanted)


class Named(nn.MultiheadAttention):
    """Adds a constructor and nothing else."""

    __constants__ = ["batch_first"]  # noqa: RUF012
    note: str

    def __init__(self, width):
        super().__init__(width, H, batch_first=True)
        self.note = "mine"
        self.extra = nn.Linear(3, 5)


class Doubles(Named):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class Helped(nn.TransformerEncoderLayer):
    def pooled(self, x):
        return self(x).mean(1)


def subclasses():
    return fill(nn.ModuleDict({
        "named": Named(D), "doubles": Doubles(D), "helped": Helped(D, H, M, batch_first=True),
        "quantizable": torch.ao.nn.quantizable.MultiheadAttention(D, H), "exact": nn.MultiheadAttention(D, H),
    }))  # fmt: skip


def test_subclasses_stay_and_one_warning_names_them():
    model = subclasses()
    with pytest.warns(UserWarning, match="upgrade: left as they are") as caught:
        upgrade(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    for name, kind in (
        ("named", "Named"),
        ("doubles", "Doubles"),
        ("helped", "Helped"),
        ("quantizable", "quantizable"),
    ):
        assert f"{name} (" in text
        assert kind in text
    assert type(model["named"]) is Named
    assert type(model["doubles"]) is Doubles
    assert type(model["helped"]) is Helped
    assert type(model["quantizable"]) is torch.ao.nn.quantizable.MultiheadAttention
    assert type(model["helped"].self_attn) is headwise.MultiheadAttention  # inside of a subclass
    assert type(model["exact"]) is headwise.MultiheadAttention
    x = torch.randn(B, L, D)
    assert model["helped"].eval().pooled(x).shape == (B, D)


def test_where_can_select_a_subclass_with_nothing_but_a_constructor():
    model = subclasses()
    before = {name: copy.deepcopy(model[name]) for name in ("named", "doubles")}
    with pytest.warns(UserWarning, match="its own Doubles.forward") as caught:
        upgrade(model, where=lambda name, module: name in ("named", "doubles", "exact"))
    assert len(caught) == 1
    assert "quantizable" not in str(caught[0].message)  # where passed it by
    assert type(model["named"]) is headwise.MultiheadAttention
    assert model["named"].note == "mine"
    assert type(model["doubles"]) is Doubles
    x = torch.randn(B, L, D)
    for name, module in before.items():
        torch.testing.assert_close(model[name](x, x, x), module(x, x, x))
    assert_same_state(model["named"].state_dict(), before["named"].state_dict())


def test_only_subclasses_raises_and_a_warning_as_error_changes_nothing():
    refused(upgrade, Doubles(D), r"got only what has to stay: model \(.*Doubles, a MultiheadAttention\)")
    model = subclasses()
    before = snapshot(model)
    with pytest.raises(UserWarning, match="left as they are"):  # warnings are errors here
        upgrade(model)
    assert_untouched(before, snapshot(model))


def test_scripted_modules_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.MultiheadAttention(D, H)))
    with pytest.raises(ValueError, match="TorchScript, which cannot be changed: 0; do it before scripting"):
        upgrade(model)


# --- the log ---


def lines(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "headwise"]


def test_one_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="headwise")
    upgrade(build("encoder")[0])
    (level, text), = lines(caplog)  # fmt: skip
    assert level == logging.WARNING
    assert "1 TransformerEncoder, 2 TransformerEncoderLayer, 2 MultiheadAttention" in text
    assert "4 packed parameters split in three" in text
    assert "no longer there" in text
    assert "pass optimizer=" in text

    caplog.clear()
    upgrade(build("encoder")[0], fused_qkv=True)
    (level, text), = lines(caplog)  # fmt: skip
    assert level == logging.INFO
    assert "no longer there" not in text

    caplog.clear()
    model = build("encoder")[0]
    upgrade(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (level, text), = lines(caplog)  # fmt: skip
    assert level == logging.INFO
    assert "4 optimizer entries rewritten" in text

    caplog.clear()
    model = build("encoder")[0]
    upgrade(model, torch.optim.SGD([model.layers[0].self_attn.in_proj_weight], lr=0.1))
    (level, text), = lines(caplog)  # fmt: skip
    assert level == logging.WARNING
    assert "1 optimizer entry rewritten" in text
    assert "3 trainable parameters of those that were replaced in none of the optimizers given" in text


# --- other tools ---


@each_layout
def test_a_model_compiled_before(fused_qkv):
    model, inputs = build("attends")
    calls = torch.compile(model, backend=Counter())
    wanted = first(calls(*inputs))
    upgrade(model, fused_qkv=fused_qkv)
    torch.testing.assert_close(calls(*inputs), wanted)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(calls(*inputs), model(*inputs))  # not the weights of before
    assert not torch.allclose(calls(*inputs), wanted)
    calls(*inputs).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    downgrade(model)
    torch.testing.assert_close(calls(*inputs), model(*inputs))


def test_an_optimized_module_as_the_root():
    module, inputs = build("attention")
    model = torch.compile(module, backend=Counter())
    wanted = model(*inputs)
    assert upgrade(model) is model
    assert type(module) is headwise.MultiheadAttention
    torch.testing.assert_close(model(*inputs), wanted)


def test_inside_of_a_traced_graph():
    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = fill(nn.MultiheadAttention(D, H))

        def forward(self, x):
            return self.mha(x, x, x, need_weights=False)[0] + 1

    graph = torch.fx.symbolic_trace(Tail())
    x = torch.randn(L, B, D)
    wanted = graph(x)
    upgrade(graph)
    assert type(graph.mha) is headwise.MultiheadAttention
    torch.testing.assert_close(graph(x), wanted)


def test_a_lazy_module_beside_is_left_alone():
    model = nn.Sequential(nn.LazyLinear(D), nn.MultiheadAttention(D, H))
    upgrade(model)
    assert type(model[0]) is nn.LazyLinear
    assert type(model[1]) is headwise.MultiheadAttention


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(process_group):
    model, inputs = build("attends")
    ddp = nn.parallel.DistributedDataParallel(model)
    wanted = ddp(*inputs)
    refused(upgrade, ddp, "be wrapped in DistributedDataParallel after upgrade, not before.*fused_qkv=True")
    refused(upgrade, nn.Sequential(ddp), "0 must be wrapped in DistributedDataParallel after upgrade")
    upgrade(ddp, fused_qkv=True)
    torch.testing.assert_close(ddp(*inputs), wanted)
    ddp(*inputs).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in ddp.parameters())

    again = nn.parallel.DistributedDataParallel(upgrade(build("attends")[0]))
    torch.testing.assert_close(again(*inputs), wanted)


def test_fully_sharded_data_parallel(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.MultiheadAttention(D, H, batch_first=True), nn.Linear(D, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated, and slow without an accelerator
        for use_orig_params, match in (
            (True, "wrapped in FullyShardedDataParallel after"),
            (False, "be a Parameter of"),
        ):
            sharded = FullyShardedDataParallel(
                copy.deepcopy(model), use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
            with pytest.raises(ValueError, match=match):
                upgrade(sharded)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # speaks of a view, which the last linear returns
def test_fully_sharded_parameters_are_refused_when_split(process_group):
    from torch.distributed.fsdp import fully_shard

    model, inputs = build("attends")
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    for match in (r"plain Parameter.*fused_qkv=True.*DTensor", "wrapped in FSDPAttends after upgrade.*fused_qkv=True"):
        with pytest.raises(ValueError, match=match):
            upgrade(model)
        wanted = model(*inputs)  # after a forward the parameters are whole and plain
    assert all(type(module) is not headwise.MultiheadAttention for module in model.modules())
    upgrade(model, fused_qkv=True)
    close(model, inputs, wanted)
    model(*inputs).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_averaged_copies_can_be_upgraded_alike():
    model, inputs = build("attends")
    average = torch.optim.swa_utils.AveragedModel(model)
    upgrade(model)
    upgrade(average)
    average.update_parameters(model)
    torch.testing.assert_close(average(*inputs), model(*inputs))


class AsksInForward(nn.Module):
    """As torch_geometric's GPSConv: what is no nn.MultiheadAttention is passed by."""

    def __init__(self):
        super().__init__()
        self.attn, self.other = nn.MultiheadAttention(D, H), nn.TransformerEncoderLayer(D, H, 13, 0.0)

    def forward(self, x):
        if isinstance(self.attn, nn.MultiheadAttention):
            x = x + self.attn(x, x, x)[0]
        return self.other(x)


class AsksInside(AsksInForward):
    def forward(self, x):
        return sum(one(x, x, x)[0] for one in self.children() if isinstance(one, nn.MultiheadAttention))


class AsksAtSetUp(nn.Module):
    """As many a model: only its first values depend on the class."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.MultiheadAttention):
            nn.init.ones_(module.in_proj_bias)

    def forward(self, x):
        return self.attn(x, x, x)[0]


@pytest.mark.parametrize("kind", [AsksInForward, AsksInside])
def test_what_the_code_around_asks_for_by_class_stays(kind):
    """Also the attention inside a layer there: the method may look for any of them."""
    model = nn.Sequential(kind()).eval()
    x = torch.randn(L, B, D)
    want = model(x)
    said = rf"0\.attn \(a MultiheadAttention, whose class {kind.__name__}\.forward asks for"
    with pytest.warns(UserWarning, match=said):
        upgrade(model)
    assert type(model[0].attn) is nn.MultiheadAttention
    assert type(model[0].other) is headwise.TransformerEncoderLayer
    torch.testing.assert_close(model(x), want)
    upgrade(model, where=lambda name, module: name == "0.attn")
    assert type(model[0].attn) is headwise.MultiheadAttention


def test_a_class_that_is_asked_for_at_set_up_is_no_obstacle():
    model = upgrade(AsksAtSetUp())
    assert type(model.attn) is headwise.MultiheadAttention


@pytest.mark.parametrize("part", ["", "encoder", "decoder.layers.0"])
def test_downgrading_a_part_leaves_nothing_of_ours(part):
    model = headwise.upgrade(nn.Transformer(D, H, 1, 1, M, batch_first=True))
    theirs = headwise.downgrade(model.get_submodule(part))
    assert b"headwise" not in pickle.dumps(theirs)
    reset = theirs.get_submodule({"": "encoder.layers.0.", "encoder": "layers.0."}.get(part, "") + "linear1")
    assert "reset_parameters" not in vars(reset)


def test_a_shallow_copy_of_a_projection_does_not_reset_what_is_gone():
    copied = copy.copy(headwise.MultiheadAttention(D, H).out_proj)
    gc.collect()
    with pytest.raises(RuntimeError, match="shallow copy"):
        copied.reset_parameters()
