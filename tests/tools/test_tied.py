"""One layer, or one Parameter, at several places: it stays one, whatever is done to the model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.parity.pair import fill
from tests.tools.subjects import D, H, M, each_side
from torch import Tensor, nn

import headwise

row = pytest.mark.tool(
    order=15,
    tool="tied layers",
    holds="one object at several places stays one through upgrade, copies, files and downgrade; gradients add up",
)
V = 11


class Shared(nn.Module):
    """As ALBERT: one layer three times, held in a list; each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, M, 0.0, batch_first=True)
        self.layers = nn.ModuleList([layer, layer, layer])

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x


class SharedDecoder(nn.Module):
    """One decoder layer twice, with one attention for its own and the cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerDecoderLayer(D, H, M, 0.0, batch_first=True)
        self.first.multihead_attn = self.first.self_attn
        self.second = self.first

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x, x.flip(1), tgt_key_padding_mask=padding)
        return x


class SharedAttention(nn.Module):
    """One attention in two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, H, M, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.encoder.layers[1].self_attn = self.encoder.layers[0].self_attn

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class Two(nn.Module):
    """Two attentions and two layers, with Parameters in common: the names say which."""

    def __init__(self, *tied: str) -> None:
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(D, H, batch_first=True) for _ in range(2))
        self.c, self.d = (nn.TransformerEncoderLayer(D, H, M, 0.0, batch_first=True) for _ in range(2))
        for name in tied:
            path, _, last = name.rpartition(".")
            for one, other in ((self.a, self.b), (self.c, self.d)):
                try:
                    source, target = one.get_submodule(path), other.get_submodule(path)
                    value = getattr(source, last)
                except AttributeError:
                    continue
                setattr(target, last, value)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        for attention in (self.a, self.b):
            x = x + attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        for layer in (self.c, self.d):
            x = layer(x, src_key_padding_mask=padding)
        return x


class Language(nn.Module):
    """The head is the embedding, round an encoder of which one matrix of the feed-forward is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, H, M, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder.layers[1].linear2.weight = self.encoder.layers[0].linear2.weight
        self.head = nn.Linear(D, V)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        tokens = x.abs().sum(-1).long() % V
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding))


MODELS = {
    "one layer thrice": Shared,
    "one decoder layer, one attention": SharedDecoder,
    "one attention in two layers": SharedAttention,
    "in_proj_weight": lambda: Two("in_proj_weight", "self_attn.in_proj_weight"),
    "in_proj_bias, out_proj": lambda: Two("in_proj_bias", "out_proj", "self_attn.out_proj"),
    "whole attention": lambda: Two("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"),
    "linear1.weight": lambda: Two("linear1.weight"),
    "out_proj.weight": lambda: Two("out_proj.weight", "self_attn.out_proj.weight"),
    "embedding and head": Language,
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))


def built(make, side):
    """float64, as gradients are summed in another order."""
    stock = fill(make()).double()
    return stock if side == "torch" else headwise.upgrade(stock, fused_qkv=side == "fused")


def inputs(seed=2):
    x = torch.randn(3, 7, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(7) >= torch.tensor([7, 5, 4])[:, None]


def places(model):
    """Which names share a Parameter, and which a module."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules(remove_duplicate=False):
        groups.setdefault(id(module), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def step(model, optimizer=None, seed=2):
    """A step of training, and the answer before it, where it is no padding."""
    x, padding = inputs(seed)
    out = model.train()(x, padding)
    model.zero_grad()
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype))[
        ~padding
    ].sum().backward()
    if optimizer is not None:
        optimizer.step()
    return out.detach()[~padding]


def as_torch(model):
    """torch's layers with these numbers and gradients, whatever the side."""
    stock = copy.deepcopy(model)
    if any(type(m).__module__.startswith("headwise") for m in stock.modules()):
        headwise.downgrade(stock)
    return stock


def same(got, want, tol=1e-8):
    """Outputs, gradients under torch's names, ties."""
    torch.testing.assert_close(step(got), step(want), rtol=tol, atol=tol)
    got, want = as_torch(got), as_torch(want)
    assert places(got) == places(want)
    found = {name: p.grad for name, p in got.named_parameters(remove_duplicate=False)}
    wanted = {name: p.grad for name, p in want.named_parameters(remove_duplicate=False)}
    assert list(found) == list(wanted)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=tol, atol=tol, msg=name)
    for name, value in want.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], value, rtol=tol, atol=tol, msg=name)


def loaded(thing, **words):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **words)


@row
@each_model
@each_side
def test_ties_stay(make, side):
    """Through upgrade, a step, a deep copy, a file of the module, a state, and downgrade; each trains as one."""
    stock, model = built(make, "torch"), built(make, side)
    assert places(stock)
    ties = places(model)
    assert side != "torch" or ties == places(stock)
    same(model, stock)
    for each in (stock, model):
        step(each, torch.optim.SGD(each.parameters(), 1e-3))
    same(model, stock)
    for other in (copy.deepcopy(model), loaded(model, weights_only=False)):
        assert places(other) == ties
        before = as_torch(model).state_dict()
        step(other, torch.optim.SGD(other.parameters(), 1e-3))
        for name, value in as_torch(model).state_dict().items():
            assert torch.equal(value, before[name])
        step(again := copy.deepcopy(stock), torch.optim.SGD(again.parameters(), 1e-3))
        same(other, again)
    if side != "torch":
        headwise.downgrade(model)
        assert places(model) == places(stock)
        same(model, stock)
        same(headwise.upgrade(model, fused_qkv=side == "fused"), stock)
        assert places(model) == ties


@row
@each_model
@each_side
def test_ties_through_a_state(make, side):
    """Names in common are all there, as torch has them; loading keeps the ties; values in memory are one too."""
    stock, model = built(make, "torch"), built(make, side)
    assert list(model.state_dict()) == list(stock.state_dict())
    step(model, torch.optim.SGD(model.parameters(), 1e-3))
    state = loaded(model.state_dict(), weights_only=True)
    for target in ("torch", side):
        other = built(make, target)
        ties = places(other)
        other.load_state_dict(state)
        assert places(other) == ties
        same(other, model)
    with torch.no_grad():  # each name once, ties twice or more: as torch
        for each in (model.state_dict(), stock.state_dict()):
            for value in each.values():
                value.mul_(0.5)
    changed = built(make, "torch")
    changed.load_state_dict(state)
    with torch.no_grad():
        for value in changed.state_dict().values():
            value.mul_(0.5)
    same(model, changed)


@row
@each_model
@each_side
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_an_optimizer_of_before(make, side, kind):
    """Built, and stepped, before upgrade; goes on, and after downgrade too, each shared Parameter once."""
    words = {"momentum": 0.9} if kind is torch.optim.SGD else {"weight_decay": 0.1}
    stock, model = built(make, "torch"), built(make, "torch")
    optimizers = [kind(each.parameters(), 1e-3, **words) for each in (stock, model)]
    for turn in range(3):
        if side != "torch" and turn == 1:
            headwise.upgrade(model, optimizers[1], fused_qkv=side == "fused")
        elif side != "torch" and turn == 2:
            headwise.downgrade(model, optimizers[1])
        for seed in range(2):
            for each, optimizer in zip((stock, model), optimizers, strict=True):
                step(each, optimizer, 10 * turn + seed)
        held = [p for group in optimizers[1].param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in model.parameters()}
        assert len(held) == len({id(p) for p in held})
        same(model, stock, 1e-6)  # Adam divides rounding by rounding


@pytest.mark.tool(
    order=15,
    tool="tied projections",
    holds="`q_proj` of one attention given to another: one through copies, files and training; gradients add up",
    torch="one packed matrix, no `q_proj` to share",
)
@each_side
@pytest.mark.parametrize("which", [("q",), ("q", "v"), ("q", "k", "v")], ids="".join)
def test_projections_tied_afterwards(side, which):
    """The query's projection of one attention given to another: torch's packed matrix has no such part to give."""
    if side == "fused":
        model = built(lambda: Two("in_proj_weight"), side)
        model.a.split_projections()
        model.b.split_projections()
    else:
        model = built(lambda: Two(), side)
    for letter in which:
        setattr(model.b, f"{letter}_proj", getattr(model.a, f"{letter}_proj"))
    ties = places(model)
    assert len([names for names in ties if any("q_proj.weight" in name for name in names)]) == 1
    step(model)
    # Apart, each use has a gradient of its own, and the shared one is their sum
    apart = copy.deepcopy(model)
    for letter in which:
        setattr(apart.b, f"{letter}_proj", copy.deepcopy(getattr(apart.a, f"{letter}_proj")))
    torch.testing.assert_close(step(apart), step(model), rtol=1e-9, atol=1e-9)
    for letter in which:
        ours, first, second = (getattr(m, f"{letter}_proj").weight.grad for m in (model.a, apart.a, apart.b))
        torch.testing.assert_close(ours, first + second, rtol=1e-9, atol=1e-9)
        assert not torch.equal(first, second)
    before = model.a.q_proj.weight.clone()
    for other in (copy.deepcopy(model), loaded(model, weights_only=False)):
        assert places(other) == ties
        optimizer = torch.optim.SGD(other.parameters(), 1e-2)
        step(other, optimizer)
        assert torch.equal(other.a.q_proj.weight, other.b.q_proj.weight)
        assert not torch.equal(other.a.q_proj.weight, before)
        state = loaded(other.state_dict(), weights_only=True)
        model.load_state_dict(state)
        assert places(model) == ties
        torch.testing.assert_close(step(model), step(other), rtol=1e-9, atol=1e-9)
