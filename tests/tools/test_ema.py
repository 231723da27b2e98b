"""Averages of models: a tool's own, by hand into the values of `state_dict()`, over clients; and what those values are.

torch's values of `state_dict()` are the parameters' memory: a write to one changes the model, and a later step of the
optimizer shows in one that was taken before.
"""

from __future__ import annotations

import copy
import functools
import io
import weakref

import ema_pytorch
import pytest
import safetensors.torch
import torch
from tests.tools.subjects import SUBJECTS, each_side, each_subject
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS, DECAY = 3, 0.75


def built(subject, side, seed=1):
    return subject.build(side, seed=seed).double()


def train(subject, model, seed=2, steps=1, optimizer=None):
    """Steps that move every number of every value."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        optimizer.step()


def now(model):
    """What it holds at this moment, apart from it: read from a copy that is torch's, parameter by parameter."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def out(subject, model):
    with torch.no_grad():
        return subject.call(model.eval(), *(x.double() for x in subject.inputs()))


@functools.cache
def stock_of(name):
    return built(SUBJECTS[name], "torch")


def holds(subject, model, want):
    """Its values, and what it computes: as a torch's model does that got them by `load_state_dict`."""
    stock = stock_of(subject.name)
    stock.load_state_dict(want)
    got = model.state_dict()
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-14, atol=1e-14, msg=name)
    torch.testing.assert_close(out(subject, model), out(subject, stock), rtol=1e-9, atol=1e-9)


def differs(state, other):
    return all(not torch.equal(value, other[name]) for name, value in state.items())


ema_row = pytest.mark.tool(
    order=11,
    tool="EMA by state_dict values",
    holds="loops that write into `state_dict()` (timm's ModelEmaV2 and V3, Ultralytics', FedAvg): as over parameters",
)


@torch.no_grad()
def timm_v2(ema, model):
    for theirs, ours in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        theirs.copy_(DECAY * theirs + (1.0 - DECAY) * ours)


@torch.no_grad()
def timm_v3_lerp(ema, model):
    torch._foreach_lerp_(list(ema.state_dict().values()), list(model.state_dict().values()), weight=1.0 - DECAY)


@torch.no_grad()
def timm_v3_mul(ema, model):
    values = list(ema.state_dict().values())
    torch._foreach_mul_(values, scalar=DECAY)
    torch._foreach_add_(values, list(model.state_dict().values()), alpha=1.0 - DECAY)


@torch.no_grad()
def timm_v3_each(ema, model):
    for theirs, ours in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        theirs.lerp_(ours, weight=1.0 - DECAY)


def ultralytics(ema, model):
    msd = model.state_dict()
    for name, value in ema.state_dict().items():
        if value.dtype.is_floating_point:
            value *= DECAY
            value += (1 - DECAY) * msd[name].detach()


VALUES = weakref.WeakKeyDictionary()  # no attribute of the average, which its copies would take along


def kept_values(ema, model):
    """The values taken once, written ever after."""
    theirs, ours = VALUES.setdefault(ema, (ema.state_dict(), model.state_dict()))
    for name, value in theirs.items():
        value.mul_(DECAY).add_(ours[name], alpha=1 - DECAY)


LOOPS = (timm_v2, timm_v3_lerp, timm_v3_mul, timm_v3_each, ultralytics, kept_values)


@ema_row
@each_subject
@each_side
@pytest.mark.parametrize("update", LOOPS, ids=lambda loop: loop.__name__)
def test_ema_by_hand(subject, side, update):
    """Beside a model that trains; then of the average's own copy, which is apart from it."""
    model = built(subject, side)
    ema = copy.deepcopy(model).eval()
    for parameter in ema.parameters():
        parameter.requires_grad_(False)
    want = now(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        train(subject, model, step, optimizer=optimizer)
        kept = now(model)
        update(ema, model)
        want = {name: DECAY * value + (1 - DECAY) * kept[name] for name, value in want.items()}
    holds(subject, ema, want)
    holds(subject, model, kept)
    apart = copy.deepcopy(ema)
    update(apart, model)
    holds(subject, ema, want)
    holds(subject, apart, {name: DECAY * value + (1 - DECAY) * kept[name] for name, value in want.items()})


WRITES = {
    "copy_": lambda value, new: value.copy_(new),
    "zero_, add_": lambda value, new: value.zero_().add_(new),
    "add_, div_": lambda value, new: value.copy_(3 * new).div_(3),
    "[...]": lambda value, new: value.__setitem__(..., new),
    "[0], [1:]": lambda value, new: (value.__setitem__(0, new[0]), value[1:].copy_(new[1:])),
    "view(-1)": lambda value, new: value.view(-1).mul_(0).add_(new.reshape(-1)),
    "flatten, chunk": lambda value, new: [a.copy_(b) for a, b in zip(value.chunk(3), new.chunk(3), strict=True)],
    "data": lambda value, new: value.data.copy_(new),
    "detach": lambda value, new: value.detach().copy_(new),
    "out=": lambda value, new: torch.add(new, 0.0, out=value),
    "cpu": lambda value, new: value.cpu().copy_(new),
    "to": lambda value, new: value.to(torch.float64).copy_(new),
    "foreach": lambda value, new: torch._foreach_copy_([value], [new]),
    "index_copy_": lambda value, new: value.index_copy_(0, torch.arange(len(value)), new),
    "masked_fill_": lambda value, new: value.masked_fill_(torch.ones_like(value, dtype=torch.bool), 0.0).add_(new),
}


@ema_row
@each_subject
@each_side
def test_federated_average(subject, side):
    """The clients' values averaged, and written into the server's, in every way; each client starts anew from those."""
    server = built(subject, side)
    clients = [copy.deepcopy(server) for _ in range(3)]
    lost = []
    for turn, (name, write) in enumerate(WRITES.items()):
        for seed, client in enumerate(clients):
            client.load_state_dict(server.state_dict())
            train(subject, client, 10 * turn + seed)
        states = [client.state_dict() for client in clients]
        kept = [now(client) for client in clients]
        want = {key: (kept[0][key] + kept[1][key] + kept[2][key]) / 3 for key in kept[0]}
        average = copy.deepcopy(states[0])
        for key, value in average.items():
            for state in states[1:]:
                value += state[key]
            value /= len(states)
        with torch.no_grad():
            for key, value in server.state_dict().items():
                write(value, average[key])
        if any(not torch.allclose(value, want[key], 1e-14, 1e-14) for key, value in server.state_dict().items()):
            lost.append(name)
            continue
        holds(subject, server, want)
        for client, state in zip(clients, kept, strict=True):
            holds(subject, client, state)
    assert not lost


PAST_TORCH = {
    "numpy": lambda value, new: value.numpy().__setitem__(..., new.numpy()),
    "dlpack": lambda value, new: torch.from_dlpack(value).copy_(new),
}


@ema_row
@each_subject
@each_side
@pytest.mark.parametrize("write", PAST_TORCH.values(), ids=list(PAST_TORCH))
def test_writes_past_torch(subject, side, write):
    """They reach the parameters, or are refused: none is lost without a word."""
    model = built(subject, side)
    new = now(built(subject, side, seed=5))
    want = now(model)
    for key, value in model.state_dict().items():
        try:
            write(value, new[key])
        except (ValueError, TypeError, RuntimeError, BufferError):
            continue
        want[key] = new[key]
    holds(subject, model, want)


alias_row = pytest.mark.tool(
    order=11,
    tool="state_dict values",
    holds="they are the parameters' memory, both ways, as long as the model keeps it; copies are snapshots",
)


@alias_row
@each_subject
@each_side
@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ("made", "SGD"),
        ("trained", "AdamW fused"),
        ("moved", "SGD foreach"),
        ("loaded", "AdamW"),
        ("assigned", "SGD fused"),
        ("copied", "AdamW foreach"),
        ("vector", "SGD"),
    ],
    ids=lambda value: value,
)
def test_both_ways(subject, side, after, kind):
    """A state taken before steps shows each of them, and a write into it reaches the model, whatever came before."""
    model = built(subject, side)
    if after == "trained":
        train(subject, model)
    elif after == "moved":
        model = model.float().double()
    elif after == "loaded":
        model.load_state_dict(now(built(subject, side, seed=5)))
    elif after == "assigned":
        model.load_state_dict(now(built(subject, side, seed=5)), assign=True)
    elif after == "copied":
        model = copy.deepcopy(model)
    elif after == "vector":
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
    name, _, flag = kind.partition(" ")
    optimizer = getattr(torch.optim, name)(model.parameters(), 0.01, **({flag: True} if flag else {}))
    state = model.state_dict()
    assert not any(value.requires_grad for value in state.values())
    before = now(model)
    snapshot = copy.deepcopy(state)
    cloned = {name: value.clone() for name, value in state.items()}
    for seed in range(2):
        train(subject, model, seed, optimizer=optimizer)
        assert differs(state, before)
        holds(subject, model, {name: value.clone() for name, value in state.items()})
    for kept in (snapshot, cloned):
        assert all(torch.equal(value, before[name]) for name, value in kept.items())
    with torch.no_grad():
        for value in state.values():
            value.mul_(0.5).add_(0.25)
    half = {name: value.clone() for name, value in state.items()}
    holds(subject, model, half)
    for value in snapshot.values():
        value.zero_()
    holds(subject, model, half)
    train(subject, model, 5, optimizer=optimizer)
    assert differs(state, half)
    holds(subject, model, {name: value.clone() for name, value in state.items()})


@alias_row
@each_subject
@each_side
def test_keep_vars(subject, side):
    """Gradients go through the values to the parameters, and writes reach these."""
    model = built(subject, side)
    state, plain = model.state_dict(keep_vars=True), model.state_dict()
    assert list(state) == list(plain)
    assert all(value.requires_grad for value in state.values())
    torch.stack([(value * value).sum() for value in state.values()]).sum().backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, 2 * parameter)
    with torch.no_grad():
        for value in state.values():
            value.mul_(0.5).add_(0.25)
    holds(subject, model, {name: value.clone() for name, value in plain.items()})
    for value in model.state_dict(keep_vars=True).values():
        value.data.mul_(0.5)
    holds(subject, model, {name: value.clone() for name, value in plain.items()})
    model.load_state_dict(model.state_dict(keep_vars=True))
    holds(subject, model, {name: value.clone() for name, value in plain.items()})


@alias_row
@each_subject
@each_side
def test_values_in_files(subject, side, tmp_path):
    """Plain tensors that load with `weights_only`, once each, and no more bytes than torch's; what is read is apart."""
    model = built(subject, side)
    state, before = model.state_dict(), now(model)
    sizes = []
    for values in (state, built(subject, "torch").state_dict()):
        file = io.BytesIO()
        torch.save(values, file)
        sizes.append(file.getbuffer().nbytes)
        if values is state:
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
    assert sizes[0] < 1.02 * sizes[1] + 1_000
    alone = io.BytesIO()
    last = list(state)[-1]
    torch.save({"alone": state[last]}, alone)
    alone.seek(0)
    assert torch.equal(torch.load(alone, weights_only=True)["alone"], before[last])
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    read = safetensors.torch.load_file(tmp_path / "state.safetensors")
    for found in (loaded, read, safetensors.torch.load(safetensors.torch.save(state))):
        assert set(found) == set(before)
        assert all(type(value) is torch.Tensor and torch.equal(value, before[name]) for name, value in found.items())
        for value in found.values():
            value.zero_()
    holds(subject, model, before)
    for values in (state, {name: value.clone() for name, value in state.items()}):
        assert model.load_state_dict(values) == ([], [])  # its own
        holds(subject, model, before)
    model.load_state_dict(state, assign=True)
    holds(subject, model, before)
    train(subject, model)
    assert differs(now(model), before)
    holds(subject, model, now(model))
    for name, value in model.state_dict().items():
        assert (value.numpy() == now(model)[name].numpy()).all()
        assert value.is_contiguous()
        assert value.untyped_storage().nbytes() <= 3 * value.nbytes


@alias_row
@each_subject
@each_side
def test_a_model_in_another_dtype_afterwards(subject, side):
    """`.to(dtype)` gives the model other memory; a state of before stays as it was, a state of after is alive."""
    model = built(subject, side)
    state, before = model.state_dict(), now(model)
    model.to(torch.float32)
    train(subject, model)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    model.double()
    after = model.state_dict()
    for value in after.values():
        value.mul_(0.5)
    holds(subject, model, {name: value.clone() for name, value in after.items()})


def halve(queue, back):
    """In another process: returns what came, then halves it where it lies."""
    while (values := queue.get()) is not None:
        back.put({name: value.numpy().copy() for name, value in values.items()})
        for value in values.values():
            value.mul_(0.5)
        back.put("halved")


@pytest.fixture(scope="module")
def elsewhere():
    """What the other process answers, first what it got, then that it has halved it."""
    context = torch.multiprocessing.get_context("spawn")
    queue, back = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=halve, args=(queue, back), daemon=True)
    process.start()

    def send(values):
        queue.put(values)
        came = back.get()
        assert back.get() == "halved"
        return came

    yield send
    queue.put(None)
    process.join(20)
    process.kill()


@alias_row
@each_subject
@each_side
def test_values_sent_to_another_process(subject, side, elsewhere):
    """They arrive, and the model trains on."""
    model = built(subject, side)
    came = elsewhere({name: value.clone() for name, value in model.state_dict().items()})
    again = elsewhere(model.state_dict())
    assert list(came) == list(again)
    assert all((again[name] == value).all() for name, value in came.items())
    state = now(model)
    train(subject, model)
    assert differs(now(model), state)
    holds(subject, model, now(model))


@pytest.mark.tool(
    order=11,
    tool="state_dict values",
    holds="sent through `torch.multiprocessing` they are shared: the model has what another process writes",
)
@each_subject
@each_side
def test_writes_of_another_process(subject, side, elsewhere):
    model = built(subject, side)
    before = now(model)
    elsewhere(model.state_dict())
    holds(subject, model, {name: 0.5 * value for name, value in before.items()})


averaged_row = pytest.mark.tool(
    order=11, tool="AveragedModel", holds="means and EMAs of a model that trains are those of a loop over parameters"
)


@averaged_row
@each_subject
@each_side
@pytest.mark.parametrize("kind", ["mean", "ema", "ema with buffers"])
def test_averaged_model(subject, side, kind):
    model = built(subject, side)
    how = {} if kind == "mean" else {"multi_avg_fn": get_ema_multi_avg_fn(DECAY), "use_buffers": kind != "ema"}
    averaged = AveragedModel(model, **how)
    states = []
    for step in range(STEPS):
        train(subject, model, step)
        averaged.update_parameters(model)
        states.append(now(model))
    want = states[0]
    for number, state in enumerate(states[1:], 1):
        share = 1 / (number + 1) if kind == "mean" else 1 - DECAY
        want = {name: value + share * (state[name] - value) for name, value in want.items()}
    holds(subject, averaged.module, want)
    holds(subject, model, states[-1])
    file = io.BytesIO()
    torch.save(averaged.state_dict(), file)
    file.seek(0)
    again = AveragedModel(built(subject, side, seed=7), **how)
    again.load_state_dict(torch.load(file, weights_only=True))
    holds(subject, again.module, want)


@pytest.mark.tool(
    order=11,
    tool="ema-pytorch",
    package="ema-pytorch",
    holds="its EMA is that of a loop over parameters",
)
@each_subject
@each_side
@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
def test_ema_pytorch(subject, side, foreach):
    model = built(subject, side)
    ema = ema_pytorch.EMA(model, beta=DECAY, min_value=DECAY, update_after_step=0, update_every=1, use_foreach=foreach)
    want = None
    for step in range(STEPS):
        train(subject, model, step)
        ema.update()
        state = now(model)
        decay = DECAY if step else 0.0  # the first is a copy
        want = state if not decay else {k: DECAY * value + (1 - DECAY) * state[k] for k, value in want.items()}
    holds(subject, ema.ema_model, want)
    holds(subject, model, state)
    ema.copy_params_from_ema_to_model()
    holds(subject, model, want)
    other = ema_pytorch.EMA(built(subject, side, seed=7), beta=DECAY)
    other.load_state_dict(ema.state_dict())
    holds(subject, other.ema_model, want)
