"""`state_dict` has torch's keys in torch's order in both layouts; every spelling loads into both, or says why not."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from headwise import MultiheadAttention

D, H, KDIM, VDIM = 15, 3, 13, 17
CHILDREN = ("q_proj", "k_proj", "v_proj")
LAYOUTS = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias=False": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "kdim": {"kdim": KDIM, "vdim": VDIM},
    "vdim,bias=False,bias_kv": {"vdim": VDIM, "bias": False, "add_bias_kv": True},
}
ALL_FLAGS = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())


class Model(nn.Module):
    """Attention between other layers, and twice, so that prefixes matter."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": attention(), "norm": nn.LayerNorm(7)}) for _ in range(2)])
        self.last = nn.Linear(5, 3)


def filled(module: nn.Module) -> Any:
    """With numbers in the biases too."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def ours(fused: bool, **flags: Any) -> Any:
    return filled(MultiheadAttention(D, H, fused_qkv=fused, **flags))


def torchs(**flags: Any) -> Any:
    return filled(nn.MultiheadAttention(D, H, **flags))


def pair(fused: bool, **flags: Any) -> tuple[Any, Any]:
    models = Model(lambda: ours(fused, **flags)), Model(lambda: torchs(**flags))
    return filled(models[0]), filled(models[1])


def answer(module: Any) -> Tensor:
    """What it computes on fixed inputs."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(4, 2, width, generator=generator) for width in (D, module.kdim, module.vdim))
    return module.eval()(query, key, value)[0].detach()


def assert_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def cloned(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def spelled(module: Any, spelling: str) -> dict[str, Tensor]:
    """A state of torch's module: in torch's names, with separate weights, or as three children would name them."""
    state = dict(module.state_dict())
    if spelling != "torch" and "in_proj_weight" in state:
        for child, part in zip(CHILDREN, state.pop("in_proj_weight").chunk(3), strict=True):
            state[f"{child}_weight"] = part.clone()
    if spelling == "children":
        for child in CHILDREN:
            state[f"{child}.weight"] = state.pop(f"{child}_weight")
        if "in_proj_bias" in state:
            for child, part in zip(CHILDREN, state.pop("in_proj_bias").chunk(3), strict=True):
                state[f"{child}.bias"] = part.clone()
    return state


# --- Saving -------------------------------------------------------------------------------------------------------


@LAYOUTS
@ALL_FLAGS
def test_keys_order_and_values_are_torchs(fused: bool, flags: dict[str, Any]) -> None:
    mine, theirs = pair(fused, **flags)
    shapes = [[(name, value.shape) for name, value in m.state_dict().items()] for m in (mine, theirs)]
    assert shapes[0] == shapes[1]
    for block in mine.blocks:
        state, attn = mine.state_dict(), block["attn"]
        prefix = "blocks.0.attn." if block is mine.blocks[0] else "blocks.1.attn."
        if not fused and not ({"kdim", "vdim"} & set(flags)):
            whole = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
            assert torch.equal(state[f"{prefix}in_proj_weight"], whole)
        assert torch.equal(state[f"{prefix}out_proj.weight"], attn.out_proj.weight)


@LAYOUTS
@ALL_FLAGS
def test_strict_both_ways_inside_a_model(fused: bool, flags: dict[str, Any]) -> None:
    mine, theirs = pair(fused, **flags)
    assert not any(mine.load_state_dict(theirs.state_dict(), strict=True))
    assert_equal(mine.state_dict(), theirs.state_dict())
    for a, b in zip(mine.blocks, theirs.blocks, strict=True):
        torch.testing.assert_close(answer(a["attn"]), answer(b["attn"]), rtol=1e-4, atol=1e-4)
    filled(mine)
    assert not any(theirs.load_state_dict(mine.state_dict(), strict=True))
    assert_equal(theirs.state_dict(), mine.state_dict())
    for a, b in zip(mine.blocks, theirs.blocks, strict=True):
        torch.testing.assert_close(answer(a["attn"]), answer(b["attn"]), rtol=1e-4, atol=1e-4)


@LAYOUTS
@ALL_FLAGS
def test_keep_vars(fused: bool, flags: dict[str, Any]) -> None:
    """With `keep_vars` the values belong to the graph: a loss on them trains the module."""
    module = ours(fused, **flags)
    assert not any(value.requires_grad for value in module.state_dict().values())
    kept = module.state_dict(keep_vars=True)
    assert_equal(kept, torchs(**flags).state_dict() | module.state_dict())
    sum(value.square().sum() for value in kept.values()).backward()
    for parameter in module.parameters():
        torch.testing.assert_close(parameter.grad, 2 * parameter.detach())


@LAYOUTS
def test_prefix_and_destination(fused: bool) -> None:
    module, theirs = ours(fused), torchs()
    mine, his = OrderedDict(first=torch.zeros(1)), OrderedDict(first=torch.zeros(1))
    for prefix in ("encoder.", "decoder.", "x"):
        module.state_dict(destination=mine, prefix=prefix)
        theirs.state_dict(destination=his, prefix=prefix)
    assert list(mine) == list(his)
    assert torch.equal(mine["xin_proj_weight"], module.state_dict()["in_proj_weight"])


@LAYOUTS
def test_a_users_hooks_see_torchs_names(fused: bool) -> None:
    model, seen = Model(lambda: ours(fused)), []
    attn = model.blocks[1]["attn"]
    attn.register_state_dict_post_hook(lambda m, state, prefix, _: seen.append((prefix, list(state)[-4:])))
    model.state_dict()
    names = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    assert seen == [("blocks.1.attn.", [f"blocks.1.attn.{name}" for name in names])]


@LAYOUTS
def test_a_users_pre_hook_may_rename(fused: bool) -> None:
    module, state = ours(fused), torchs().state_dict()

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in list(state):
            state[name.removeprefix("old_")] = state.pop(name)

    module.register_load_state_dict_pre_hook(rename)
    module.load_state_dict({f"old_{name}": value for name, value in state.items()})
    assert_equal(module.state_dict(), state)


# --- Loading ------------------------------------------------------------------------------------------------------


@LAYOUTS
@ALL_FLAGS
@pytest.mark.parametrize("spelling", ["torch", "separate", "children"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_every_spelling_loads(fused: bool, flags: dict[str, Any], spelling: str, assign: bool) -> None:
    theirs, module = torchs(**flags), ours(fused, **flags)
    answer(module)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    state = copy.deepcopy(spelled(theirs, spelling))
    names = list(state)
    assert not any(module.load_state_dict(state, strict=True, assign=assign))
    assert list(state) == names  # the caller's dict is left alone
    assert_equal(module.state_dict(), before)
    torch.testing.assert_close(answer(module), answer(theirs), rtol=1e-4, atol=1e-4)
    filled(module)  # and it shares nothing inside
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == len(list(module.parameters()))
    assert all(p.is_leaf and p.requires_grad for p in module.parameters())


@LAYOUTS
@pytest.mark.parametrize("spelling", ["torch", "separate", "children"])
def test_every_spelling_loads_inside_a_model(fused: bool, spelling: str) -> None:
    mine, theirs = pair(fused)
    state = {name: value for name, value in theirs.state_dict().items() if ".attn." not in name}
    for index, block in enumerate(theirs.blocks):
        state |= {f"blocks.{index}.attn.{name}": v for name, v in spelled(block["attn"], spelling).items()}
    assert not any(mine.load_state_dict(state, strict=True))
    assert_equal(mine.state_dict(), theirs.state_dict())


@LAYOUTS
def test_the_parameters_stay_the_optimizers(fused: bool) -> None:
    module = ours(fused)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.load_state_dict(torchs().state_dict())
    before = cloned(module)
    module(*[torch.randn(4, 2, D)] * 3)[0].square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in module.state_dict().items() if "weight" in name)


@LAYOUTS
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_frozen_stays_frozen(fused: bool, assign: bool) -> None:
    module = ours(fused).requires_grad_(False)
    module.load_state_dict(torchs().state_dict(), assign=assign)
    assert not any(p.requires_grad for p in module.parameters())


@LAYOUTS
@ALL_FLAGS
def test_meta_module_and_assign(fused: bool, flags: dict[str, Any]) -> None:
    state = torchs(dtype=torch.float64, **flags).state_dict()
    module = MultiheadAttention(D, H, fused_qkv=fused, device="meta", **flags)
    module.load_state_dict(state, assign=True)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("cpu", torch.float64)}
    assert_equal(module.state_dict(), state)


@LAYOUTS
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("spelling", "part"), [("separate", "weight"), ("children", "weight"), ("children", "bias")])
def test_two_spellings_at_once_raise(fused: bool, strict: bool, spelling: str, part: str) -> None:
    module, theirs = ours(fused), torchs()
    own = cloned(module)
    [name] = [name for name in spelled(theirs, spelling) if name.startswith("q_proj") and part in name]
    extra = {name: spelled(theirs, spelling)[name]}
    with pytest.raises(RuntimeError, match=rf"two spellings: in_proj_{part}, {name}"):
        module.load_state_dict(theirs.state_dict() | extra, strict=strict)
    assert torch.equal(module.state_dict()[f"in_proj_{part}"], own[f"in_proj_{part}"])


@LAYOUTS
@ALL_FLAGS
def test_missing_and_unexpected_keys_are_torchs(fused: bool, flags: dict[str, Any]) -> None:
    mine, theirs = pair(fused, **flags)
    own, complete = cloned(mine), theirs.state_dict()
    for drop in ([*complete], *([name] for name in complete)):
        state = {name: value for name, value in complete.items() if name not in drop}
        found, expected = (m.load_state_dict(state, strict=False) for m in (mine, theirs))
        assert sorted(found.missing_keys) == sorted(expected.missing_keys)
        assert found.unexpected_keys == expected.unexpected_keys
        if len(drop) > 1:
            assert_equal(mine.state_dict(), own)
    wrong = {"blocks.0.attn.nothing": torch.zeros(1), "blocks.1.attn.q_proj.nothing": torch.zeros(1)}
    found, expected = (m.load_state_dict(complete | wrong, strict=False) for m in (mine, theirs))
    assert sorted(found.unexpected_keys) == sorted(expected.unexpected_keys) == sorted(wrong)
    assert found.missing_keys == expected.missing_keys == []


@LAYOUTS
def test_biases_for_a_module_without_are_unexpected(fused: bool) -> None:
    for spelling in ("torch", "children"):
        state = spelled(torchs(), spelling)
        module = ours(fused, bias=False)
        found = module.load_state_dict(state, strict=False)
        assert found.missing_keys == []
        assert sorted(found.unexpected_keys) == sorted(name for name in state if "bias" in name)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            module.load_state_dict(state)


@LAYOUTS
@pytest.mark.parametrize("drop", ["k_proj.weight", "v_proj.bias"])
def test_one_child_missing_raises(fused: bool, drop: str) -> None:
    module, state = ours(fused), spelled(torchs(), "children")
    del state[drop]
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(state)


@LAYOUTS
@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
@pytest.mark.parametrize("strict", [True, False])
def test_wrong_shapes_are_refused_as_on_torch(fused: bool, name: str, strict: bool) -> None:
    module, theirs, state = ours(fused), torchs(), torchs().state_dict()
    own = {key: value.clone() for key, value in module.state_dict().items()}
    state[name] = torch.zeros(48, *state[name].shape[1:])
    messages = []
    for m in (module, theirs):
        with pytest.raises(RuntimeError) as caught:
            m.load_state_dict(state, strict=strict)
        messages.append(str(caught.value).split("from checkpoint")[0])
    assert messages[0] == messages[1]  # "... size mismatch for in_proj_weight: copying a param with shape ..."
    for key, value in module.state_dict().items():  # the rest is loaded, as on torch
        assert torch.equal(value, own[key] if key == name else state[key]), key


def weight_of_k(state: dict[str, Tensor]) -> Tensor:
    return state["k_proj_weight"] if "k_proj_weight" in state else state["in_proj_weight"][D : 2 * D]


@LAYOUTS
@pytest.mark.parametrize("spelling", ["torch", "separate", "children"])
def test_states_of_other_widths_are_refused(fused: bool, spelling: str) -> None:
    for mine, his in itertools.permutations([{}, {"kdim": KDIM}, {"kdim": VDIM}], 2):
        module, state = ours(fused, **mine), spelled(torchs(**his), spelling)
        before = cloned(module)
        with pytest.raises(RuntimeError, match=r"size mismatch for \w+|Missing key|different widths"):
            module.load_state_dict(state)
        keys = [weight_of_k(state) for state in (module.state_dict(), before)]
        assert torch.equal(*keys)


@LAYOUTS
def test_what_is_no_tensor_is_refused_as_on_torch(fused: bool) -> None:
    for module in (torchs(), ours(fused)):
        with pytest.raises(RuntimeError, match="in_proj_weight"):
            module.load_state_dict(module.state_dict() | {"in_proj_weight": "w"})


@LAYOUTS
def test_another_dtype_is_converted(fused: bool) -> None:
    module, state = ours(fused), torchs(dtype=torch.float64).state_dict()
    module.load_state_dict(state)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert_equal(module.state_dict(), {name: value.float() for name, value in state.items()})


# --- Children that are no longer plain ----------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.extra = inner, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.extra(x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _quantize(module: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8, inplace=True)


def _each(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def every(module: Any) -> None:
        for name in CHILDREN:
            change(getattr(module, name))

    return every


# Each with the keys that must be there afterwards.
ADAPTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrapped": (lambda m: setattr(m, "q_proj", Wrapped(m.q_proj)), "q_proj.inner.weight"),
    "all wrapped": (lambda m: [setattr(m, n, Wrapped(getattr(m, n))) for n in CHILDREN], "k_proj.extra.bias"),
    "parametrized": (
        lambda m: parametrize.register_parametrization(m.q_proj, "weight", Doubled()),
        "q_proj.parametrizations.weight.original",
    ),
    "weight_norm": (_each(parametrizations.weight_norm), "v_proj.parametrizations.weight.original0"),
    "spectral_norm": (lambda m: parametrizations.spectral_norm(m.q_proj), "q_proj.parametrizations.weight.0._u"),
    "one pruned": (lambda m: prune.l1_unstructured(m.q_proj, "weight", 0.5), "q_proj.weight_mask"),
    "all pruned": (_each(lambda c: prune.l1_unstructured(c, "weight", 0.5)), "v_proj.weight_orig"),
    "all biases pruned": (_each(lambda c: prune.l1_unstructured(c, "bias", 0.5)), "v_proj.bias_orig"),
    "quantized": (_quantize, "q_proj._packed_params._packed_params"),
    "without a key bias": (lambda m: setattr(m, "k_proj", nn.Linear(D, D, bias=False)), "k_proj.weight"),
    "key bias removed": (lambda m: setattr(m.k_proj, "bias", None), "k_proj.weight"),
    "buffer": (lambda m: m.q_proj.register_buffer("scale", torch.ones(1)), "q_proj.scale"),
    "adapter inside": (lambda m: m.q_proj.add_module("lora", nn.Linear(D, 2)), "q_proj.lora.weight"),
}


@pytest.mark.parametrize(("adapt", "key"), ADAPTED.values(), ids=ADAPTED.keys())
def test_adapted_children_keep_their_names_and_round_trip(adapt: Callable[[Any], Any], key: str) -> None:
    module, other = ours(False), ours(False)
    for m in (module, other):
        answer(m)
        adapt(m)
    state = module.state_dict()
    assert key in state
    assert not {"in_proj_weight", "in_proj_bias"} & set(state)
    assert not torch.equal(answer(module), answer(other))
    assert not any(other.load_state_dict(state, strict=True))
    torch.testing.assert_close(answer(other), answer(module))
    nested = nn.Sequential(other)
    assert list(nested.state_dict()) == [f"0.{name}" for name in state]


FUSED_TOOLS: dict[str, Callable[[Any, str], Any]] = {
    "parametrize": lambda m, name: parametrize.register_parametrization(m, name, Doubled()),
    "prune": lambda m, name: prune.l1_unstructured(m, name, 0.5),
}


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
@pytest.mark.parametrize("tool", FUSED_TOOLS.values(), ids=FUSED_TOOLS.keys())
def test_tools_on_the_fused_parameters_round_trip(tool: Callable[[Any, str], Any], name: str) -> None:
    module, other = ours(True), ours(True)
    for m in (module, other):
        tool(m, name)
    assert not any(other.load_state_dict(copy.deepcopy(module.state_dict()), strict=True))
    torch.testing.assert_close(answer(other), answer(module))


@pytest.mark.parametrize("name", ["wrapped", "one pruned", "parametrized", "weight_norm"])
def test_a_plain_state_is_never_half_loaded_into_an_adapted_module(name: str) -> None:
    """torch's names do not fit any more: that is said."""
    module = ours(False)
    ADAPTED[name][0](module)
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(torchs().state_dict())


def test_out_proj_may_be_adapted_alone() -> None:
    module, other = ours(False), ours(False)
    for m in (module, other):
        m.out_proj = Wrapped(m.out_proj)
    assert list(module.state_dict())[:3] == ["in_proj_weight", "in_proj_bias", "out_proj.inner.weight"]
    assert not any(other.load_state_dict(module.state_dict(), strict=True))
    torch.testing.assert_close(answer(other), answer(module))


def test_names_come_back_when_the_adapter_goes() -> None:
    module = ours(False)
    before = cloned(module)
    parametrizations.weight_norm(module.q_proj)
    assert "in_proj_weight" not in module.state_dict()
    parametrize.remove_parametrizations(module.q_proj, "weight")
    assert list(module.state_dict()) == list(before)
    torch.testing.assert_close(module.state_dict()["in_proj_weight"], before["in_proj_weight"])
