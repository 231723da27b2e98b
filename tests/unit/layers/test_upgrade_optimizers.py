"""`upgrade` and `downgrade` with optimizers: training goes on as if nothing had happened, or the call refuses."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from tests.parity.pair import fill
from torch import nn

from headwise.layers.upgrade import downgrade, upgrade

D, H, B, L, S, M = 22, 2, 3, 5, 7, 13
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.01}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.001}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01, "t0": 3}),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Net(nn.Module):
    """Packed and separate projections, a layer, and a head."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, H, M, 0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(D, H, kdim=11, vdim=17, batch_first=True)
        self.head = nn.Linear(D, 3)

    def forward(self, x, key, value):
        x = self.layer(x)
        return self.head(x + self.cross(x, key, value)[0])


def net():
    torch.manual_seed(0)
    model = fill(Net()).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.3)
    return model


def losses(model, optimizer, steps, scheduler=None):
    generator = torch.Generator().manual_seed(7)
    shapes = ((B, L, D), (B, S, 11), (B, S, 17), (B, L, 3))
    *inputs, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(*inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def assert_same_curve(ours, theirs):
    assert theirs[-1] < 0.99 * theirs[0]  # something is learned
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)


def refused(function, model, optimizer, match, **kwargs):
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = [
        (id(g["params"]), list(map(id, g["params"])), g.get("param_names")) for o in optimizers for g in o.param_groups
    ]
    states = [copy.copy({id(p): dict(s) for p, s in o.state.items()}) for o in optimizers]
    kinds = [(type(m), list(m._modules), list(m._parameters)) for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        function(model, optimizer, **kwargs)
    assert before == [
        (id(g["params"]), list(map(id, g["params"])), g.get("param_names")) for o in optimizers for g in o.param_groups
    ]
    for state, one in zip(states, optimizers, strict=True):
        after = {id(p): s for p, s in one.state.items()}
        assert state.keys() == after.keys()
        assert all(value is after[key][name] for key, own in state.items() for name, value in own.items())
    assert kinds == [(type(m), list(m._modules), list(m._parameters)) for m in model.modules()]


@pytest.mark.slow
@each_optimizer
@pytest.mark.parametrize("before", [0, 5])
def test_training_goes_on_as_it_would_have(name, before):
    kind, options = OPTIMIZERS[name]
    theirs, ours = net(), net()
    stock, optimizer = kind(theirs.parameters(), **options), kind(ours.parameters(), **options)
    for model, one in ((theirs, stock), (ours, optimizer)):
        losses(model, one, before)
    entries = [id(p) for group in optimizer.param_groups for p in group["params"]]
    held = optimizer.param_groups[0]["params"]

    upgrade(ours, optimizer)

    assert optimizer.param_groups[0]["params"] is held
    assert len(held) == len(entries) + 2 * 3
    assert {id(p) for p in held} == {id(p) for p in ours.parameters()}
    assert set(map(id, optimizer.state)) <= {id(p) for p in held}
    middle = losses(ours, optimizer, 30)
    assert_same_curve(middle, losses(theirs, stock, 30))

    downgrade(ours, optimizer)

    assert optimizer.param_groups[0]["params"] is held
    assert [tuple(p.shape) for p in held] == [tuple(p.shape) for p in stock.param_groups[0]["params"]]
    state, wanted = optimizer.state_dict(), stock.state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    if name != "Rprop":  # goes by signs, and the gradient of the keys' bias is 0 but for rounding
        torch.testing.assert_close(state["state"], wanted["state"], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(losses(ours, optimizer, 10), losses(theirs, stock, 10), rtol=1e-9, atol=0)
    stock.load_state_dict(optimizer.state_dict())  # and back in a checkpoint
    losses(theirs, stock, 1)


@each_optimizer
def test_state_is_cut_by_rows_into_memory_of_its_own(name):
    kind, options = OPTIMIZERS[name]
    model = net()
    optimizer = kind(model.parameters(), **options)
    losses(model, optimizer, 3)
    old = copy.deepcopy(optimizer.state[model.layer.self_attn.in_proj_weight])
    kept = optimizer.state.get(model.head.weight)
    upgrade(model, optimizer)
    assert optimizer.state.get(model.head.weight) is kept
    seen = set()
    for index, child in enumerate(("q_proj", "k_proj", "v_proj")):
        state = optimizer.state[getattr(model.layer.self_attn, child).weight]
        assert list(state) == list(old)
        for key, value in old.items():
            if not isinstance(value, torch.Tensor):
                assert state[key] == value
                continue
            wanted = value[index * D : (index + 1) * D] if value.dim() else value
            assert torch.equal(state[key], wanted)
            assert state[key].dtype == value.dtype
            assert state[key].untyped_storage().nbytes() == state[key].nbytes
            seen.add(state[key].data_ptr())
    assert len(seen) == 3 * sum(isinstance(value, torch.Tensor) for value in old.values())


def test_round_trip_of_state_is_exact():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    losses(model, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    upgrade(model, optimizer)
    downgrade(model, optimizer)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


def test_groups_names_order_and_scheduler():
    theirs, ours = net(), net()
    runs = []
    for model in (theirs, ours):
        named = dict(model.named_parameters())
        decay = [(name, p) for name, p in named.items() if p.dim() > 1]
        rest = [(name, p) for name, p in named.items() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 0.02}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.03, 0.02], total_steps=60)
        losses(model, optimizer, 4, scheduler)
        runs.append((model, optimizer, scheduler))
    _, optimizer, scheduler = runs[1]
    first, second = optimizer.param_groups
    names, lists = list(first["param_names"]), [g["params"] for g in (first, second)]
    place = names.index("layer.self_attn.in_proj_weight")

    upgrade(ours, optimizer)

    assert all(g["params"] is held for g, held in zip(optimizer.param_groups, lists, strict=True))
    assert optimizer.param_groups[0] is first
    cut = [f"layer.self_attn.{child}.weight" for child in ("q_proj", "k_proj", "v_proj")]
    assert first["param_names"] == names[:place] + cut + names[place + 1 :]
    named = dict(ours.named_parameters())
    for group in (first, second):
        for name, p in zip(group["param_names"], group["params"], strict=True):
            # separate projections keep their object and with it the optimizer's name
            assert p is named.get(name, p)
    assert "cross.k_proj.bias" in second["param_names"]
    assert_same_curve(losses(ours, optimizer, 30, scheduler), losses(*runs[0][:2], 30, runs[0][2]))
    downgrade(ours, optimizer)
    assert first["param_names"] == names
    assert_same_curve(losses(ours, optimizer, 20, scheduler), losses(*runs[0][:2], 20, runs[0][2]))


def test_several_optimizers_shared_and_absent_parameters(caplog):
    caplog.set_level(logging.INFO, logger="headwise")
    model = net()
    packed, bias = model.layer.self_attn.in_proj_weight, model.layer.self_attn.in_proj_bias
    both = [torch.optim.SGD([packed, bias], lr=0.1), torch.optim.Adam([bias, model.head.weight])]
    upgrade(model, iter(both))
    q = model.layer.self_attn.q_proj
    assert both[0].param_groups[0]["params"][0] is q.weight
    assert both[0].param_groups[0]["params"][3] is q.bias
    assert both[1].param_groups[0]["params"][0] is q.bias
    assert both[1].param_groups[0]["params"][3] is model.head.weight
    text = caplog.messages[-1]
    assert "3 optimizer entries rewritten" in text
    assert "1 trainable parameter of those that were replaced in none" in text  # the bias of cross
    downgrade(model, both)
    assert [len(o.param_groups[0]["params"]) for o in both] == [2, 2]


def test_tied_attentions_are_rewritten_once():
    model = nn.ModuleList(nn.MultiheadAttention(D, H) for _ in range(2))
    model[1].in_proj_weight = model[0].in_proj_weight
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    upgrade(model, optimizer)
    held = optimizer.param_groups[0]["params"]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters())) == 3 + 6 + 4
    assert len(optimizer.state) == len(held)


def test_fused_needs_no_rewriting(caplog):
    caplog.set_level(logging.INFO, logger="headwise")
    theirs, ours = net(), net()
    stock, optimizer = torch.optim.AdamW(theirs.parameters()), torch.optim.AdamW(ours.parameters())
    losses(theirs, stock, 3), losses(ours, optimizer, 3)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    upgrade(ours, optimizer, fused_qkv=True)
    assert before == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert caplog.records[-1].levelno == logging.INFO
    assert "0 optimizer entries rewritten" in caplog.messages[-1]
    torch.testing.assert_close(losses(ours, optimizer, 30), losses(theirs, stock, 30), rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_state_that_cannot_be_cut_is_refused(kind):
    if kind is torch.optim.LBFGS:
        model = nn.ModuleDict({"mha": nn.MultiheadAttention(D, H)})
        optimizer = kind(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        def step():
            optimizer.step(closure)
    else:
        model = net()
        optimizer = kind(model.parameters())

        def step():
            losses(model, optimizer, 1)

    early, early_optimizer = copy.deepcopy(model), None
    early_optimizer = kind(early.parameters())
    upgrade(early, early_optimizer)  # before the first step there is nothing to cut
    step()
    match = f"in the state of {kind.__name__} for .*in_proj_weight must .*before the first step.*fused_qkv=True.*got"
    refused(upgrade, model, optimizer, match)
    upgrade(model, optimizer, fused_qkv=True)
    step()


def test_an_entry_of_another_shape_is_named():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    packed = model.layer.self_attn.in_proj_weight
    for value, said in ((torch.zeros(3), r"Tensor \(3,\)"), ([1, 2], "list"), (object(), "object")):
        optimizer.state[packed] = {"fine": 3, "mine": value}
        refused(upgrade, model, optimizer, f"'mine' in the state of SGD for layer.self_attn.in_proj_weight.*got {said}")
    optimizer.state[packed] = {"number": 3, "flag": True, "none": None, "one": torch.ones(1), "text": "x"}
    upgrade(model, optimizer)
    for child in (model.layer.self_attn.q_proj, model.layer.self_attn.v_proj):
        assert optimizer.state[child.weight] == {
            "number": 3, "flag": True, "none": None, "one": torch.ones(1), "text": "x"
        }  # fmt: skip
    downgrade(model, optimizer)
    assert optimizer.state[model.layer.self_attn.in_proj_weight]["number"] == 3


@pytest.mark.parametrize("wrong", [3, "adam", {"lr": 0.1}, nn.Linear(2, 2), [nn.Linear(2, 2)], [None]], ids=repr)
def test_what_is_no_optimizer_is_refused(wrong):
    model = net()
    with pytest.raises(
        ValueError, match=r"upgrade: optimizer must be a torch\.optim\.Optimizer or several of them; got"
    ):
        upgrade(model, wrong)
    assert type(model.cross) is nn.MultiheadAttention


def test_an_optimizer_with_lists_of_its_own_is_refused():
    class Sharded(torch.optim.SGD):
        def __init__(self, params, **options):
            super().__init__(params, **options)
            self.buckets = [{"rank": 0, "own": [p for g in self.param_groups for p in g["params"]]}]

    model = net()
    refused(upgrade, model, Sharded(model.parameters(), lr=0.1), "param_groups and state only.*Sharded.*in buckets too")
    optimizer = Sharded(model.head.parameters(), lr=0.1)  # holds nothing that goes
    upgrade(model, optimizer)


def stepped(model, optimizer):
    losses(model, optimizer, 2)
    return optimizer


def test_downgrade_refuses_parts_that_were_trained_apart():
    model = upgrade(net())
    q, k, v = (getattr(model.layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj"))
    others = [p for p in model.parameters() if p is not q.weight]
    apart = torch.optim.Adam([{"params": [q.weight], "lr": 0.1}, {"params": others}])
    refused(downgrade, model, apart, "Adam.param_groups must hold all three of layer.self_attn.q_proj.weight")
    some = torch.optim.Adam([q.weight, k.weight])
    refused(downgrade, model, some, "must hold all three of .* in one group, or none of them; got 2 of them")

    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    optimizer.state[v.weight]["step"] += 1
    refused(downgrade, model, optimizer, r"'step' in the state of Adam.*got Tensor \(\) = 2.0; .* = 3.0")
    del optimizer.state[v.weight]
    refused(downgrade, model, optimizer, "'state' in the state of Adam .*must have the same entries for all three")
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    optimizer.state[v.weight]["more"] = 1
    refused(downgrade, model, optimizer, "must have the same entries for all three")
    optimizer.state[v.weight].pop("more")
    optimizer.state[v.weight]["exp_avg"] = torch.zeros(3)
    refused(downgrade, model, optimizer, "'exp_avg' in the state of Adam.*as large as the three parameters")
    downgrade(model, stepped(model, torch.optim.Adam(model.parameters())))


def test_frozen_and_never_stepped_parameters():
    model = net()
    model.layer.self_attn.in_proj_weight.requires_grad_(False)
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    assert model.layer.self_attn.in_proj_weight not in optimizer.state
    upgrade(model, optimizer)
    assert model.layer.self_attn.q_proj.weight not in optimizer.state
    assert not model.layer.self_attn.q_proj.weight.requires_grad
    assert len(optimizer.state[model.layer.self_attn.q_proj.bias]) == 3
    losses(model, optimizer, 2)
    downgrade(model, optimizer)
    assert not model.layer.self_attn.in_proj_weight.requires_grad


def test_gradients_wait_for_the_step():
    """Between backward and step: the gradients move with the parameters."""
    theirs, ours = net(), net()
    ends = []
    for model in (theirs, ours):
        optimizer = stepped(model, torch.optim.Adam(model.parameters()))
        optimizer.zero_grad()
        x = torch.ones(B, L, D, dtype=torch.float64)
        model(x, x[..., :11], x[..., :17]).square().sum().backward()
        if model is ours:
            upgrade(model, optimizer)
        optimizer.step()
        ends.append(model.state_dict())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-12, atol=1e-12)


def test_training_without_it_would_train_dead_parameters(caplog):
    """What the warning in the log speaks of, so that we notice if it is no longer so."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    upgrade(model)
    assert caplog.records[-1].levelno == logging.WARNING
    before = model.layer.self_attn.q_proj.weight.detach().clone()
    losses(model, optimizer, 2)
    assert torch.equal(model.layer.self_attn.q_proj.weight, before)


class Wrapper(torch.optim.Optimizer):
    """As SAM and Lookahead work: another optimizer inside, on the same groups."""

    def __init__(self, params, base, **options):
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


def test_an_optimizer_inside_another_follows(caplog):
    theirs = nn.MultiheadAttention(D, H)
    ours = copy.deepcopy(theirs)
    x = torch.randn(5, 3, D)
    optimizers = [Wrapper(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9) for model in (theirs, ours)]

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x, x, x)[0].square().sum().backward()
        optimizer.step()

    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        step(model, optimizer)
    packed = ours.in_proj_weight
    with caplog.at_level("INFO", "headwise"):
        upgrade(ours, optimizers[1])
    assert "2 optimizer entries rewritten" in caplog.text
    inner = optimizers[1].base_optimizer
    assert packed not in inner.state
    assert set(inner.state) == set(ours.parameters())
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        step(model, optimizer)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
