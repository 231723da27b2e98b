"""A model comes to life and moves: from the meta device, through files, into another model, through one vector."""

from __future__ import annotations

import functools
import io
import itertools
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from tests.tools import subjects
from tests.tools.subjects import SUBJECTS, D, each_side, each_subject
from torch import nn

import headwise

DRAWS = 41
KINDS = [name for name in SUBJECTS if hasattr(headwise, name)]


def made(subject, side, how, monkeypatch):
    """A model of one side as a constructor leaves it: of headwise's own classes, or torch's after `upgrade`."""
    if side == "torch" or how == "upgraded":
        model = subject.make(0.0)
        return model if side == "torch" else headwise.upgrade(model, fused_qkv=side == "fused")
    names = {name: getattr(nn, name) for name in nn.__dict__ if not name.startswith("_")}
    for name in KINDS:
        takes = "fused_qkv" in getattr(headwise, name).__init__.__annotations__
        names[name] = functools.partial(getattr(headwise, name), **({"fused_qkv": side == "fused"} if takes else {}))
    with monkeypatch.context() as patch:
        patch.setattr(subjects, "nn", SimpleNamespace(**names))
        return subject.make(0.0)


def by_apply(model):
    """Children first."""
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)


def by_loop(model):
    """Parents first."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def by_owner(model):
    """As FSDP's meta-device initialisation: each module that holds parameters itself, memory given one by one."""
    model.to("meta")
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None and hasattr(module, "reset_parameters"):
            module.to_empty(device="cpu", recurse=False)
            poison(module)
            module.reset_parameters()


def by_outermost(model):
    """Each module that can, and nothing inside it."""
    if hasattr(model, "reset_parameters"):
        model.reset_parameters()
    else:
        for child in model.children():
            by_outermost(child)


def poison(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.fill_(torch.nan)


def empty(subject, side, how, monkeypatch):
    """Built without memory, then given some, all NaN; what the user's own class holds is the user's to fill."""
    with torch.device("meta"):
        model = made(subject, side, how, monkeypatch)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    poison(model)
    return model


def fill_own(model):
    if hasattr(model, "queries"):
        if model.queries.is_meta:
            model.queries = nn.Parameter(torch.empty(2, D))
        nn.init.zeros_(model.queries)


meta_row = pytest.mark.tool(
    order=10,
    tool="meta device",
    holds="`to_empty`, then `reset_parameters` wherever there is one: torch's first values, nothing left as it fell",
    torch="the attention has no `reset_parameters`, its packed matrices stay as they fell (pytorch#107909)",
)
each_way = pytest.mark.parametrize(
    ("side", "how"),
    [("torch", "constructed"), *itertools.product(("split", "fused"), ("constructed", "upgraded"))],
    ids=lambda value: value,
)


@functools.cache
def torchs(name):
    """Many draws of each tensor by torch's constructors, under the names of the state."""
    torch.manual_seed(3)
    states = [SUBJECTS[name].make(0.0).state_dict() for _ in range(DRAWS)]
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}


@meta_row
@each_subject
@each_way
@pytest.mark.parametrize("reset", [by_apply, by_loop, by_owner], ids=["apply", "loop", "owner"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_first_values_after_the_meta_device(subject, side, how, reset, monkeypatch):
    """Each tensor constant, or of the same range and spread, over many draws."""
    model, want, got = empty(subject, side, how, monkeypatch), torchs(subject.name), {}
    torch.manual_seed(4)
    for _ in range(DRAWS):
        poison(model)
        reset(model)
        fill_own(model)
        for key, value in model.state_dict().items():
            got.setdefault(key, []).append(value.clone())
    assert list(got) == list(want)
    for key, theirs in want.items():
        ours = torch.stack(got[key])
        assert ours.isfinite().all(), f"{key} is left as it fell"
        if theirs.unique().numel() == 1:
            assert torch.equal(ours, theirs), key
            continue
        # Uniform: the largest of hundreds of draws is the bound, to a few per cent
        torch.testing.assert_close(ours.abs().max(), theirs.abs().max(), rtol=0.06, atol=0.0, msg=key)
        torch.testing.assert_close(ours.std(), theirs.std(), rtol=0.12, atol=0.0, msg=key)
        assert ours.mean().abs() < 0.15 * ours.std() + theirs.mean().abs(), key
        assert not torch.equal(ours[0], ours[1]), f"{key} is not drawn anew"


@meta_row
@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"])
@each_way
def test_the_constructors_numbers_after_the_meta_device(name, side, how, monkeypatch):
    """One seed, one set of numbers, where the order of construction is that of the modules."""
    subject = SUBJECTS[name]
    torch.manual_seed(5)
    want = subject.make(0.0).state_dict()
    model = empty(subject, side, how, monkeypatch)
    torch.manual_seed(5)
    by_outermost(model)
    got = model.state_dict()
    assert list(got) == list(want)
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def trained(subject, model):
    """One short step of SGD, from which every matrix must move."""
    inputs = subject.inputs()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    subject.call(model.train(), *inputs, **subject.hide(inputs)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    after = list(model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.dim() > 1)
    return model


def same_model(subject, got, want):
    """Outputs and the gradients of the inputs: with padding in train, without in eval."""
    for training in (True, False):
        answers = []
        for model in (got, want):
            inputs = tuple(x.requires_grad_() for x in subject.inputs())
            words = subject.hide(inputs) if training else {}
            out = subject.call(model.train(training), *inputs, **words)
            if "src_key_padding_mask" in words:  # what an encoder says of padding is another page's matter
                out = out.masked_fill(words["src_key_padding_mask"][..., None], 0.0)
            answers.append((out, *torch.autograd.grad(out.square().mean(), inputs)))
        for ours, theirs in zip(*answers, strict=True):
            # Relative to the largest: the input of the user's model has steep gradients
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * max(1.0, theirs.abs().max().item()))


def same_state(got, want):
    assert list(got) == list(want)
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def file_of(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


@pytest.mark.tool(order=10, tool="torch.save", holds="a whole module in a file: the same model, which trains on")
@each_subject
@each_side
def test_a_whole_module_in_a_file(subject, side):
    model = subject.build(side)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    file = file_of(model)
    # No more than the numbers and some names: nothing twice
    assert file.getbuffer().nbytes < 1.15 * file_of(subject.build("torch")).getbuffer().nbytes + 20_000
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(model)
    same_state(loaded.state_dict(), kept)
    same_model(subject, loaded, model)
    trained(subject, loaded)
    same_state(model.state_dict(), kept)
    same_model(subject, torch.load(file_of(loaded), weights_only=False), loaded)


state_row = pytest.mark.tool(
    order=10,
    tool="state_dict files",
    holds="torch's files into ours and ours into torch's: strict, `weights_only`, `mmap`, `assign`, onto meta",
)


@state_row
@each_subject
@pytest.mark.parametrize(
    ("side", "way"),
    [("torch", "to itself"), *itertools.product(("split", "fused"), ("to torch", "from torch", "to itself"))],
    ids=lambda value: value,
)
def test_a_state_in_a_file(subject, side, way, tmp_path):
    """A trained model's, into one with other numbers, that then trains on; the file keeps what was written."""
    source, target = {"to torch": (side, "torch"), "from torch": ("torch", side), "to itself": (side, side)}[way]
    model = trained(subject, subject.build(source))
    path = tmp_path / "state.pt"
    torch.save(model.state_dict(), path)
    for how, mmap in itertools.product(("copied", "assigned", "onto meta"), (False, True)):
        state = torch.load(path, weights_only=True, mmap=mmap)
        assert all(type(value) is torch.Tensor for value in state.values())
        same_state(state, model.state_dict())
        fresh = subject.build(target, seed=9)
        if how == "onto meta":
            fresh = fresh.to("meta")
        owners = dict(fresh.named_parameters())
        assert fresh.load_state_dict(state, strict=True, assign=how != "copied") == ([], [])
        if how == "copied":
            assert all(parameter is owners[name] for name, parameter in fresh.named_parameters())
        assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in fresh.parameters())
        same_state(fresh.state_dict(), model.state_dict())
        if mmap:
            same_model(subject, fresh, model)
        trained(subject, fresh)
        assert not torch.equal(*(next(iter(each.state_dict().values())) for each in (fresh, model)))
        same_state(torch.load(path, weights_only=True), model.state_dict())


@pytest.mark.tool(
    order=10, tool="safetensors", package="safetensors", holds="`save_file`, `save_model`, `load_model`: torch's names"
)
@each_subject
@each_side
def test_safetensors(subject, side, tmp_path):
    """Files of torch's load into ours, and ours into torch's, by both pairs of functions."""
    model = trained(subject, subject.build(side))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    path, whole = tmp_path / "state.safetensors", tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    safetensors.torch.save_model(model, whole)
    for read in (path, whole):
        found = safetensors.torch.load_file(read)
        assert set(found) == set(state)
        same_state({key: found[key] for key in state}, state)
    for target in ("torch", side):
        for assign in (False, True):
            fresh = subject.build(target, seed=9)
            fresh.load_state_dict(safetensors.torch.load_file(path), assign=assign)
            same_state(fresh.state_dict(), state)
            same_model(subject, fresh, model)
        fresh = subject.build(target, seed=9)
        assert safetensors.torch.load_model(fresh, path) == (set(), [])
        same_model(subject, fresh, model)
    stock = subject.build("torch", seed=4)
    safetensors.torch.save_model(stock, whole)
    safetensors.torch.load_model(model, whole)
    same_model(subject, model, stock)


@pytest.mark.tool(order=10, tool="parameter vector", holds="`parameters_to_vector`, `vector_to_parameters`")
@each_subject
@each_side
def test_one_vector_of_all(subject, side):
    model, other = subject.build(side), subject.build(side, seed=9)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.numel() == sum(value.numel() for value in state.values())
    vector = vector.detach()
    nn.utils.vector_to_parameters(vector, other.parameters())
    same_state(other.state_dict(), state)
    same_model(subject, other, model)
    # The model's parameters are views of the vector now, and train as such
    trained(subject, other)
    trained(subject, model)
    same_model(subject, other, model)
    torch.testing.assert_close(nn.utils.parameters_to_vector(other.parameters()), vector, rtol=0, atol=0)
    nn.utils.vector_to_parameters(torch.zeros_like(vector), other.parameters())
    assert not any(value.any() for value in other.state_dict().values())
    # A step along the gradient, all in one vector, as natural-gradient methods take it
    model, inputs = model.double(), [x.double() for x in subject.inputs()]
    loss = subject.call(model, *inputs).square().mean()
    gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
    step = 1e-7 * gradient / gradient.norm()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) - step, model.parameters())
    gain = loss - subject.call(model, *inputs).square().mean()
    torch.testing.assert_close(gain, gradient @ step, rtol=1e-3, atol=0.0)
