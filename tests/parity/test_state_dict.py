"""Checkpoints: the same keys, in the same order, with the same first values, loading strictly in both directions."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.parity.pair import LAYOUTS, fill, same, torch_grads, twin
from torch import nn

from headwise import MultiheadAttention

D, H = 6, 3

KINDS = {
    "default": {},
    "nobias": {"bias": False},
    "kdim": {"kdim": 13},
    "vdim": {"vdim": 17},
    "kdim+vdim": {"kdim": 13, "vdim": 17},
    "kdim-equal-to-embed_dim": {"kdim": D, "vdim": D},
    "kdim+vdim-nobias": {"kdim": 13, "vdim": 17, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "bias_kv+zero-nobias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 13, "vdim": 17, "dropout": 0.5, "batch_first": True},
    "float64": {"dtype": torch.float64},
}
pytestmark = [
    pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys()),
    pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys()),
]


def identical(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(ours[name], value), name


def both(kind, fused_qkv, seed=7):
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(D, H, **kind)
    torch.manual_seed(seed)
    return theirs, MultiheadAttention(D, H, fused_qkv=fused_qkv, **kind)


def forward(module, kind):
    generator = torch.Generator().manual_seed(3)
    dtype = kind.get("dtype", torch.float32)
    shapes = ((7, 5, D), (11, 5, kind.get("kdim", D)), (11, 5, kind.get("vdim", D)))
    query, key, value = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    if module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return module.eval()(query, key, value)


def test_same_seed_same_state(kind, fused_qkv):
    """Keys, order, numbers; and what is drawn next."""
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(D, H, **kind)
    next_of_theirs = torch.rand(3)
    torch.manual_seed(7)
    ours = MultiheadAttention(D, H, fused_qkv=fused_qkv, **kind)
    assert torch.equal(torch.rand(3), next_of_theirs)
    identical(ours.state_dict(), theirs.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert all(p.requires_grad for p in ours.parameters())


def test_reset_parameters_is_torchs(kind, fused_qkv):
    """Drawn anew, the numbers are torch's again; torch leaves out_proj.weight alone, so that is made equal first."""
    theirs, ours = both(kind, fused_qkv)
    fill(theirs)
    fill(ours, seed=4)
    torch.manual_seed(11)
    theirs.out_proj.reset_parameters()  # as torch's constructor does before _reset_parameters
    theirs._reset_parameters()
    torch.manual_seed(11)
    ours.reset_parameters()
    identical(ours.state_dict(), theirs.state_dict())


def test_strict_both_ways(kind, fused_qkv):
    theirs, ours = both(kind, fused_qkv)
    fill(theirs)
    assert list(ours.load_state_dict(theirs.state_dict(), strict=True)) == [[], []]
    identical(ours.state_dict(), theirs.state_dict())
    for mine, its in zip(forward(ours, kind), forward(theirs, kind), strict=True):
        same(mine, its, 1e-5)
    fill(ours, seed=5)
    before = theirs.state_dict()["out_proj.weight"].clone()
    assert list(theirs.load_state_dict(ours.state_dict(), strict=True)) == [[], []]
    identical(ours.state_dict(), theirs.state_dict())
    assert not torch.equal(before, theirs.out_proj.weight)
    for mine, its in zip(forward(ours, kind), forward(theirs, kind), strict=True):
        same(mine, its, 1e-5)


def test_strict_both_ways_by_assignment(kind, fused_qkv):
    """`assign=True` takes the tensors as they are; the parameters share no memory with one another."""
    theirs, ours = both(kind, fused_qkv)
    fill(theirs)
    want = copy.deepcopy(theirs.state_dict())
    with torch.device("meta"):
        empty = MultiheadAttention(D, H, fused_qkv=fused_qkv, **kind)
        empty_torch = nn.MultiheadAttention(D, H, **kind)
    empty.load_state_dict(theirs.state_dict(), assign=True)
    assert all(isinstance(p, nn.Parameter) and p.device.type == "cpu" for p in empty.parameters())
    identical(empty.state_dict(), want)
    memories = [p.untyped_storage().data_ptr() for p in empty.parameters()]
    assert len(set(memories)) == len(memories)
    ours.load_state_dict(want)
    empty_torch.load_state_dict(ours.state_dict(), assign=True)
    identical(empty_torch.state_dict(), want)


def test_through_a_file(kind, fused_qkv):
    """What `torch.save` wrote from the one loads into the other, `weights_only` too."""
    theirs, ours = both(kind, fused_qkv)
    fill(theirs)
    for source, target in ((theirs, ours), (ours, nn.MultiheadAttention(D, H, **kind))):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True))
        identical(target.state_dict(), theirs.state_dict())


def test_inside_a_model(kind, fused_qkv):
    """Prefixes are kept, and what else the model holds keeps its place."""
    theirs, ours = both(kind, fused_qkv)
    fill(theirs)

    def model(attention):
        torch.manual_seed(1)
        parts = {
            "before": nn.Linear(2, 3),
            "attn": attention,
            "attn2": copy.deepcopy(attention),
            "norm": nn.LayerNorm(D),
        }
        return nn.ModuleDict({"block": nn.ModuleDict(parts)})

    their_model, our_model = model(theirs), model(ours)
    assert list(our_model.load_state_dict(their_model.state_dict())) == [[], []]
    identical(our_model.state_dict(), their_model.state_dict())
    identical(our_model.state_dict(prefix="here."), their_model.state_dict(prefix="here."))
    assert list(their_model.load_state_dict(our_model.state_dict())) == [[], []]


def test_a_state_dict_does_not_follow_the_caller(kind, fused_qkv):
    """Without `keep_vars` nothing in it requires a gradient; with it, gradients reach the parameters, as in torch."""
    theirs, ours = both(kind, fused_qkv)
    assert not any(value.requires_grad for value in ours.state_dict().values())
    for module in (theirs, ours):
        kept = module.state_dict(keep_vars=True)
        assert all(value.requires_grad for value in kept.values())
        sum(value.square().sum() for value in kept.values()).backward()
    want = torch_grads(theirs)
    got = torch_grads(ours)
    assert got.keys() == want.keys()
    for name, value in want.items():
        same(got[name], value, 1e-6, name)


def test_missing_and_unexpected(kind, fused_qkv):
    """The same complaint about the same names."""
    theirs, ours = both(kind, fused_qkv)
    before = copy.deepcopy(ours.state_dict())
    for name in theirs.state_dict():
        state = dict(theirs.state_dict())
        del state[name]
        want = theirs.load_state_dict(dict(state), strict=False)
        got = ours.load_state_dict(dict(state), strict=False)
        assert (got.missing_keys, got.unexpected_keys) == (want.missing_keys, want.unexpected_keys), name
        for module in (theirs, ours):
            with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
                module.load_state_dict(dict(state))
    identical(ours.state_dict(), before)
    state = dict(theirs.state_dict()) | {"nonsense": torch.ones(2)}
    assert ours.load_state_dict(state, strict=False).unexpected_keys == ["nonsense"]
    for module in (theirs, ours):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*nonsense"):
            module.load_state_dict(state)


def test_partly_there(kind, fused_qkv):
    """`strict=False` loads what is there, as torch does, and leaves the rest as it was."""
    source = fill(nn.MultiheadAttention(D, H, **kind))
    for name in source.state_dict():
        state = dict(source.state_dict())
        del state[name]
        theirs, ours = both(kind, fused_qkv)
        theirs.load_state_dict(dict(state), strict=False)
        ours.load_state_dict(dict(state), strict=False)
        identical(ours.state_dict(), theirs.state_dict())


def test_sizes_that_do_not_fit(kind, fused_qkv):
    """Both refuse, name the parameter, and keep what they had."""
    theirs, ours = both(kind, fused_qkv)
    before = copy.deepcopy(ours.state_dict())
    for name, value in theirs.state_dict().items():
        state = dict(theirs.state_dict()) | {name: torch.cat([value, value], dim=-1)}
        for module in (theirs, ours):
            with pytest.raises(RuntimeError, match=f"size mismatch for {name}: "):
                module.load_state_dict(dict(state))
        identical(ours.state_dict(), before)


def test_loading_leaves_the_callers_dict_alone(kind, fused_qkv):
    theirs, ours = both(kind, fused_qkv)
    state = fill(theirs).state_dict()
    names, values = list(state), {name: value.clone() for name, value in state.items()}
    ours.load_state_dict(state)
    assert list(state) == names
    identical(state, values)
    fill(ours, seed=6)
    identical(state, values)


def test_optimizer_state_of_the_fused_layout(kind, fused_qkv):
    """Fused, parameters have torch's names and order: torch's optimizer state continues in ours. Split ones differ."""
    theirs, ours = both(kind, fused_qkv)
    ours.load_state_dict(fill(theirs).state_dict())
    if not fused_qkv:
        assert [name for name, _ in ours.named_parameters()] != [name for name, _ in theirs.named_parameters()]
        return
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    steps = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (theirs, ours)]
    for turn in range(3):
        if turn == 1:
            steps[1].load_state_dict(copy.deepcopy(steps[0].state_dict()))
            ours.load_state_dict(theirs.state_dict())
        for module, step in zip((theirs, ours), steps, strict=True):
            if module is ours and turn == 0:
                continue
            step.zero_grad()
            forward(module, kind)[0].square().sum().backward()
            step.step()
    for name, value in theirs.state_dict().items():
        same(ours.state_dict()[name], value, 1e-5, name)


def test_the_other_layout_afterwards(kind, fused_qkv):
    """Converted, the module still speaks torch's names and gives the same numbers."""
    theirs = fill(nn.MultiheadAttention(D, H, **kind))
    ours = twin(theirs, fused_qkv=fused_qkv)
    for convert in (
        ("split_projections", "fuse_projections") if fused_qkv else ("fuse_projections", "split_projections")
    ):
        getattr(ours, convert)()
        identical(ours.state_dict(), theirs.state_dict())
        assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
        for mine, its in zip(forward(ours, kind), forward(theirs, kind), strict=True):
            same(mine, its, 1e-5)
