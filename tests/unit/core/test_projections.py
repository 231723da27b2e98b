"""Tools on the projections are never bypassed, in either layout, and the two layouts are converted without loss.

Each test runs an eval forward before it changes anything (which would fill a cache, if there were one), then compares
with textbook attention on the weights that `state_dict()` names.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from headwise import MultiheadAttention
from headwise.core import reference

D, H, B, L, S, KDIM, VDIM = 15, 3, 2, 7, 11, 13, 17
CHILDREN = ("q_proj", "k_proj", "v_proj")
LAYOUTS = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias=False": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "kdim": {"kdim": KDIM, "vdim": VDIM},
    "vdim,bias=False,bias_kv": {"vdim": VDIM, "bias": False, "add_bias_kv": True},
}
ALL_FLAGS = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
# Where a tool can be put: every child of the split layout, and the output projection of the fused one.
PLACES = pytest.mark.parametrize(
    ("fused", "name"), [*((False, name) for name in (*CHILDREN, "out_proj")), (True, "out_proj")]
)
SOME_PLACES = pytest.mark.parametrize(("fused", "name"), [(False, "q_proj"), (False, "out_proj"), (True, "out_proj")])

Weights = dict[str, tuple[Tensor, Tensor | None]]


def made(fused: bool = False, **flags: Any) -> MultiheadAttention:
    """A module with biases that are not zero, that has answered once in eval."""
    module = MultiheadAttention(D, H, batch_first=True, fused_qkv=fused, **flags)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    assert_honest(module.eval())
    return module.train()


def inputs(module: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Self-attention, one tensor for keys and values, and three tensors; only what the widths allow."""
    x, key, value = torch.randn(B, L, D), torch.randn(B, S, module.kdim), torch.randn(B, S, module.vdim)
    if module.kdim == D == module.vdim:
        yield x, x, x
        yield x, key, key
    yield x, key, value


def weights_of(state: Mapping[str, Tensor]) -> Weights:
    """(weight, bias) of each projection, whatever the spelling."""
    found: Weights = {"out_proj": (state["out_proj.weight"], state.get("out_proj.bias"))}
    for index, name in enumerate(CHILDREN):
        weight = state.get(f"{name}.weight", state.get(f"{name}_weight"))
        bias = state.get(f"{name}.bias")
        if weight is None:
            weight = state["in_proj_weight"].chunk(3)[index]
        if bias is None and "in_proj_bias" in state:
            bias = state["in_proj_bias"].chunk(3)[index]
        found[name] = weight, bias
    return found


def by_hand(module: Any, weights: Weights, call: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What attention with these weights gives, in float64."""

    def linear(name: str, x: Tensor) -> Tensor:
        weight, bias = (None if t is None else t.detach().double() for t in weights[name])
        assert weight is not None
        return x.double() @ weight.T + (0 if bias is None else bias)

    q, k, v = (linear(name, x) for name, x in zip(CHILDREN, call, strict=True))
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.detach().double().expand(B, 1, D)], dim=1)
        v = torch.cat([v, module.bias_v.detach().double().expand(B, 1, D)], dim=1)
    if module.add_zero_attn:
        k, v = (torch.cat([t, torch.zeros(B, 1, D, dtype=t.dtype)], dim=1) for t in (k, v))
    heads = [t.unflatten(-1, (H, D // H)).transpose(1, 2) for t in (q, k, v)]
    return linear("out_proj", reference.attention(*heads)[0].transpose(1, 2).flatten(2))


def assert_honest(module: Any, change: Callable[[Weights], None] | None = None, weights: Weights | None = None) -> None:
    """The module computes with the weights its state_dict names (after `change`): every kind of call, grad or not."""
    weights = weights_of(module.state_dict()) if weights is None else weights
    if change is not None:
        change(weights)
    for call in inputs(module):
        expected = by_hand(module, weights, call)
        for grad, need_weights in itertools.product((True, False), (True, False)):
            with torch.set_grad_enabled(grad):
                out = module(*call, need_weights=need_weights)[0]
            torch.testing.assert_close(out.detach().double(), expected, rtol=1e-4, atol=2e-5)


def times(factor: float, name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weight, bias = weights[name]
        weights[name] = weight * factor, None if bias is None else bias * factor

    return change


def step(module: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(*list(inputs(module))[-1])[0].square().mean().backward()
    optimizer.step()


# --- Tools on one projection --------------------------------------------------------------------------------------


@PLACES
def test_forward_hooks(fused: bool, name: str) -> None:
    module, seen = made(fused), []
    child = getattr(module, name)
    child.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    child.register_forward_hook(lambda _, args, out: 2 * out)
    assert_honest(module, times(2, name))
    assert_honest(module.eval(), times(2, name))
    assert len(seen) == 24


@PLACES
@pytest.mark.parametrize("training", [True, False])
def test_full_backward_hooks(fused: bool, name: str, training: bool) -> None:
    module, seen = made(fused).train(training), []
    child = getattr(module, name)
    child.register_full_backward_hook(lambda _, given, came: (given[0] * 0,))
    child.register_full_backward_pre_hook(lambda _, came: seen.append(came[0].shape))
    query, key, value = (t.requires_grad_() for t in list(inputs(module))[-1])
    module(query, key, value)[0].sum().backward()
    stopped = {"q_proj": [query], "k_proj": [key], "v_proj": [value], "out_proj": [query, key, value]}[name]
    assert len(seen) == 1
    for tensor in (query, key, value):
        assert (not tensor.grad.any()) == any(tensor is one for one in stopped)


class Tripled(nn.Module):
    """A wrapper, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.inner(x)


@PLACES
def test_a_wrapped_projection_is_called(fused: bool, name: str) -> None:
    module = made(fused)
    weights = weights_of(module.state_dict())
    times(3, name)(weights)
    setattr(module, name, Tripled(getattr(module, name)))
    assert_honest(module, weights=weights)
    assert_honest(module.eval(), weights=weights)


@PLACES
def test_a_replaced_projection_is_called(fused: bool, name: str) -> None:
    module = made(fused)
    setattr(module, name, nn.Linear(D, D))
    assert_honest(module)
    assert_honest(module.eval())


@PLACES
def test_a_patched_forward_is_called(fused: bool, name: str) -> None:
    module = made(fused)
    original = getattr(module, name).forward
    getattr(module, name).forward = lambda x: 3 * original(x)
    assert_honest(module, times(3, name))
    assert_honest(module.eval(), times(3, name))


@LAYOUTS
def test_global_hooks_fire(fused: bool) -> None:
    module, seen = made(fused), []
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda child, args: seen.append(type(child))),
        nn.modules.module.register_module_forward_hook(
            lambda child, args, out: 2 * out if child is module.out_proj else None
        ),
    ]
    try:
        assert_honest(module, times(2, "out_proj"))
        assert seen.count(nn.Linear) == 12 * (1 if fused else 4)
    finally:
        for handle in handles:
            handle.remove()
    assert_honest(module)


@PLACES
def test_a_child_compiled_in_place_is_called(fused: bool, name: str) -> None:
    module = made(fused)
    child = getattr(module, name)
    child.compile(backend="eager")
    assert child._compiled_call_impl is not None
    child._compiled_call_impl = lambda x: 2 * nn.Linear.forward(child, x)  # to be told apart
    assert_honest(module, times(2, name))
    assert_honest(module.eval(), times(2, name))


@pytest.mark.parametrize(("fused", "name"), [(False, "q_proj"), pytest.param(True, "out_proj", marks=pytest.mark.slow)])
def test_a_hook_added_after_compiling_fires(fused: bool, name: str) -> None:
    """As far as torch guards hooks at all, which is a setting of its compiler."""
    module = made(fused).eval()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        call = next(inputs(module))
        weights = weights_of(module.state_dict())
        torch.testing.assert_close(compiled(*call)[0].double(), by_hand(module, weights, call), rtol=1e-4, atol=2e-5)
        getattr(module, name).register_forward_hook(lambda _, args, out: 2 * out)
        times(2, name)(weights)
        torch.testing.assert_close(compiled(*call)[0].double(), by_hand(module, weights, call), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("owner", [nn.Linear, nn.Module])
def test_a_patched_class_is_called(owner: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen, original = made(), [], nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, "__call__", counted)
    module(*next(inputs(module)))
    assert sum(type(child) is nn.Linear for child in seen) == 4


@PLACES
def test_weights_that_are_plain_attributes(fused: bool, name: str) -> None:
    """So meta-learning writes them, and `nn.DataParallel` in its replicas."""
    module = made(fused)
    weights = weights_of(module.state_dict())
    times(2, name)(weights)
    child = getattr(module, name)
    for part in ("weight", "bias"):
        value = 2 * getattr(child, part)
        delattr(child, part)
        setattr(child, part, value)
    assert not child._parameters
    assert_honest(module, weights=weights)
    assert_honest(module.eval(), weights=weights)


@LAYOUTS
@ALL_FLAGS
def test_replicas_of_data_parallel(fused: bool, flags: dict[str, Any]) -> None:
    """What `nn.parallel.replicate` does on several devices."""
    module = made(fused, **flags)
    replicas = {child: child._replicate_for_data_parallel() for child in module.modules()}
    for child, replica in replicas.items():
        for name, inner in child._modules.items():
            setattr(replica, name, replicas[inner])
        for name, parameter in child._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, parameter.clone())
    assert not list(replicas[module].parameters())
    assert_honest(replicas[module], weights=weights_of(module.state_dict()))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _normed(state: Mapping[str, Tensor], name: str) -> Tensor:
    size, direction = (state[f"{name}.parametrizations.weight.original{index}"] for index in (0, 1))
    return size * direction / direction.norm(dim=1, keepdim=True)


def _spectral(state: Mapping[str, Tensor], name: str) -> Tensor:
    weight = state[f"{name}.parametrizations.weight.original"]
    u, v = (state[f"{name}.parametrizations.weight.0.{side}"] for side in ("_u", "_v"))
    return weight / (u @ weight @ v)


# How to put each tool on an nn.Linear, and the weight that its state_dict stands for.
WEIGHT_TOOLS: dict[str, tuple[Callable[[nn.Linear], Any], Callable[[Mapping[str, Tensor], str], Tensor]]] = {
    "parametrize": (
        lambda child: parametrize.register_parametrization(child, "weight", Doubled()),
        lambda state, name: 2 * state[f"{name}.parametrizations.weight.original"],
    ),
    "prune": (
        lambda child: prune.l1_unstructured(child, "weight", 0.5),
        lambda state, name: state[f"{name}.weight_orig"] * state[f"{name}.weight_mask"],
    ),
    "weight_norm": (parametrizations.weight_norm, _normed),
    "spectral_norm": (parametrizations.spectral_norm, _spectral),
}


@SOME_PLACES
@pytest.mark.parametrize("tool", WEIGHT_TOOLS)
def test_weight_tools_over_training_steps(tool: str, fused: bool, name: str) -> None:
    module = made(fused)
    put, weight_in = WEIGHT_TOOLS[tool]
    put(getattr(module, name))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    before: Tensor | None = None
    for _ in range(3):
        state = module.state_dict()
        weight = weight_in(state, name)
        assert before is None or not torch.equal(weight, before)  # it trains
        weights = weights_of({**state, f"{name}.weight": weight})
        assert_honest(module.eval(), weights=weights)
        before = weight
        step(module.train(), optimizer)


@pytest.mark.parametrize("tool", ["parametrize", "prune"])
def test_weight_tools_on_the_fused_weight(tool: str) -> None:
    module = made(fused=True)
    if tool == "parametrize":
        parametrize.register_parametrization(module, "in_proj_weight", Doubled())
    else:
        prune.l1_unstructured(module, "in_proj_weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(3):
        state = module.state_dict()
        if tool == "parametrize":
            whole = 2 * state["parametrizations.in_proj_weight.original"]
        else:
            whole = state["in_proj_weight_orig"] * state["in_proj_weight_mask"]
        assert_honest(module.eval(), weights=weights_of({**state, "in_proj_weight": whole}))
        step(module.train(), optimizer)


@LAYOUTS
@pytest.mark.parametrize("tool", ["parametrize", "prune"])
def test_weight_tools_on_the_extra_key(fused: bool, tool: str) -> None:
    module = made(fused, add_bias_kv=True)
    if tool == "parametrize":
        parametrize.register_parametrization(module, "bias_k", Doubled())
    else:
        prune.l1_unstructured(module, "bias_k", 0.5)
    assert_honest(module)
    assert_honest(module.eval())


# --- Weights written in place or replaced -------------------------------------------------------------------------


def _set(part: str) -> Callable[[Any, Tensor], None]:
    def write(module: Any, new: Tensor) -> None:
        weight = module.in_proj_weight if module.fused_qkv else module.q_proj.weight
        if part == "Parameter" and module.fused_qkv:
            module.in_proj_weight = nn.Parameter(torch.cat([new, weight.detach()[D:]]))
        elif part == "Parameter":
            module.q_proj.weight = nn.Parameter(new)
        elif part == "data =":
            weight.data = torch.cat([new, weight.data[D:]])
        elif part == "data.copy_":
            weight.data[:D].copy_(new)
        elif part == "data.mul_":
            weight.data[:D].mul_(new / weight.data[:D])
        else:
            with torch.no_grad():
                weight[:D] = new

    return write


@LAYOUTS
@pytest.mark.parametrize("part", ["Parameter", "data =", "data.copy_", "data.mul_", "no_grad"])
def test_a_written_weight_is_used(fused: bool, part: str) -> None:
    module, new = made(fused).eval(), torch.randn(D, D)
    _set(part)(module, new.clone())
    torch.testing.assert_close(module.state_dict()["in_proj_weight"][:D], new)
    assert_honest(module)


@PLACES
def test_a_transposed_view_as_data_is_used(fused: bool, name: str) -> None:
    """Same memory, same version, other numbers."""
    module = made(fused).eval()
    weight = getattr(module, name).weight
    new = weight.detach().T.clone()
    weight.data = weight.data.t()
    torch.testing.assert_close(weights_of(module.state_dict())[name][0], new)
    assert_honest(module)


@LAYOUTS
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    "how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=["fused", "foreach", "loop"]
)
def test_optimizers_step_as_on_torch(fused: bool, kind: Any, how: dict[str, bool]) -> None:
    """`fused` does not move the Parameters' version counters."""
    module, theirs = made(fused), nn.MultiheadAttention(D, H, batch_first=True)
    theirs.load_state_dict(module.state_dict())
    ours_opt, theirs_opt = (kind(m.parameters(), lr=1e-2, **how) for m in (module, theirs))
    for seed in range(3):
        for m, optimizer in ((module.train(), ours_opt), (theirs, theirs_opt)):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            x = torch.randn(B, L, D)
            m(x, x, x)[0][0].square().sum().backward()
            optimizer.step()
        assert_honest(module.eval())
    for name in ("in_proj_weight", "out_proj.weight"):
        torch.testing.assert_close(module.state_dict()[name], theirs.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["requires_grad_", "parameters", "by name"])
def test_freezing_the_query_projection_only(how: str) -> None:
    module = made()
    if how == "requires_grad_":
        module.q_proj.requires_grad_(False)
    else:
        named = module.q_proj.named_parameters() if how == "parameters" else module.named_parameters()
        chosen = [p for name, p in named if how == "parameters" or "q_proj" in name]
        assert len(chosen) == 2
        for parameter in chosen:
            parameter.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    still = {name for name, p in module.named_parameters() if torch.equal(p, before[name])}
    assert still - {"k_proj.bias"} == {"q_proj.weight", "q_proj.bias"}  # a key's bias has no gradient but rounding
    assert_honest(module.eval())


@PLACES
def test_one_projection_in_another_dtype_is_never_quiet(fused: bool, name: str) -> None:
    module = made(fused).eval()
    getattr(module, name).to(torch.float64)
    assert getattr(module, name).weight.dtype == torch.float64
    for call in inputs(module):
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises((RuntimeError, ValueError), match="dtype"):
                module(*call)
    getattr(module, name).to(torch.float32)
    assert_honest(module)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_whole_module_in_another_dtype(fused: bool, dtype: torch.dtype) -> None:
    module = made(fused).to(dtype)
    assert {p.dtype for p in module.parameters()} == {dtype}
    out = module(*(t.to(dtype) for t in next(inputs(module))))[0]
    assert out.dtype == dtype
    assert_honest(module.float())


def test_gradients_of_the_children_are_torchs() -> None:
    module, theirs = made(), nn.MultiheadAttention(D, H, batch_first=True)
    theirs.load_state_dict(module.state_dict())
    for call in inputs(module):
        for m in (module, theirs):
            m.zero_grad()
            m(*call)[0].square().sum().backward()
        for part in ("weight", "bias"):
            grads = torch.cat([getattr(getattr(module, name), part).grad for name in CHILDREN])
            torch.testing.assert_close(grads, getattr(theirs, f"in_proj_{part}").grad, rtol=1e-4, atol=1e-4)


def test_state_dict_of_one_child() -> None:
    module = made()
    whole = module.state_dict()
    for index, name in enumerate(CHILDREN):
        own = getattr(module, name).state_dict()
        assert list(own) == ["weight", "bias"]
        assert torch.equal(own["weight"], whole["in_proj_weight"].chunk(3)[index])
        assert torch.equal(own["bias"], whole["in_proj_bias"].chunk(3)[index])


@LAYOUTS
def test_writing_into_state_dict_values(fused: bool) -> None:
    """They are the module's, as torch's (tests/unit/core/test_live.py)."""
    module = made(fused).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for value in module.state_dict().values():
        value.mul_(2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name] * 2), name
    assert_honest(module)


# --- Quantizers and adapters --------------------------------------------------------------------------------------


def quantized(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*deprecated", UserWarning)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@LAYOUTS
def test_quantize_dynamic_converts(fused: bool) -> None:
    module = made(fused).eval()
    converted = quantized(module)
    kinds = [type(child).__module__ for child in converted.children()]
    assert sum("quantized" in kind for kind in kinds) == (1 if fused else 4)
    if not fused:
        assert not hasattr(converted, "in_proj_weight")
    for call in inputs(module):
        expected = by_hand(module, weights_of(module.state_dict()), call)
        with torch.no_grad():
            out = converted(*call)[0].double()
        assert 0 < (out - expected).abs().max() < 0.1 * expected.abs().max()


def test_quantize_dynamic_inside_a_stock_layer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    layer.self_attn = MultiheadAttention(16, 2, batch_first=True).eval()
    x, converted = torch.randn(B, L, 16), quantized(layer)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), layer(x), rtol=0, atol=0.2)
    assert "quantized" in type(converted.self_attn.q_proj).__module__


@pytest.mark.tools
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stock", [False, True], ids=["alone", "in a stock layer"])
def test_peft_lora_is_active(stock: bool) -> None:
    import peft

    model: nn.Module = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    module = MultiheadAttention(16, 2, batch_first=True)
    model.self_attn = module
    x = torch.randn(B, L, 16)

    def run(model: nn.Module) -> Tensor:
        return model(x) if stock else model.self_attn(x, x, x)[0]

    base = run(model.eval()).detach()
    names = ["q_proj", "v_proj", "out_proj"]
    wrapped = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=names, lora_alpha=4), model)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    adapted = {}
    for training, grad in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            adapted[training, grad] = run(wrapped.train(training)).detach()
    assert all(torch.allclose(out, adapted[True, True], atol=1e-5) for out in adapted.values())
    assert not torch.allclose(base, adapted[True, True], atol=1e-2)
    for name in names:
        getattr(module, name).merge()
        setattr(module, name, getattr(module, name).get_base_layer())
    assert type(module.q_proj) is nn.Linear
    torch.testing.assert_close(run(model.eval()).detach(), adapted[True, True], rtol=1e-4, atol=1e-5)


# --- Parameters as torch's ----------------------------------------------------------------------------------------


@ALL_FLAGS
def test_fused_parameters_are_torchs(flags: dict[str, Any]) -> None:
    ours, theirs = MultiheadAttention(D, H, fused_qkv=True, **flags), nn.MultiheadAttention(D, H, **flags)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in theirs.named_parameters()]


def test_split_parameters() -> None:
    names = [f"{name}.{part}" for name in (*CHILDREN, "out_proj") for part in ("weight", "bias")]
    assert [n for n, _ in MultiheadAttention(D, H).named_parameters()] == names
    assert [type(getattr(MultiheadAttention(D, H), name)) for name in (*CHILDREN, "out_proj")] == [nn.Linear] * 4


@ALL_FLAGS
def test_fused_resumes_torchs_optimizer(flags: dict[str, Any]) -> None:
    theirs = nn.MultiheadAttention(D, H, batch_first=True, **flags)
    old = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for _ in range(2):
        step(theirs, old)
    ours = made(fused=True, **flags)
    ours.load_state_dict(theirs.state_dict())
    new = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for mine, his in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(new.state[mine]["exp_avg"], old.state[his]["exp_avg"])
    for module, optimizer in ((theirs, old), (ours, new)):
        torch.manual_seed(1)
        step(module, optimizer)
    for name, value in theirs.state_dict().items():
        if name != "in_proj_bias":  # a key's bias has no gradient but rounding, which Adam blows up
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_split_refuses_torchs_optimizer() -> None:
    theirs = torch.optim.AdamW(nn.MultiheadAttention(D, H).parameters())
    with pytest.raises(ValueError, match="doesn't match"):
        torch.optim.AdamW(MultiheadAttention(D, H).parameters()).load_state_dict(theirs.state_dict())


@LAYOUTS
def test_parameter_vectors(fused: bool) -> None:
    module, other = made(fused), made(fused)
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector.clone(), other.parameters())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert_honest(other.eval())
    if fused:
        theirs = nn.MultiheadAttention(D, H)
        theirs.load_state_dict(module.state_dict())
        assert torch.equal(nn.utils.parameters_to_vector(theirs.parameters()), vector)


@ALL_FLAGS
def test_init_loop_over_fused_parameters_is_torchs(flags: dict[str, Any]) -> None:
    both = MultiheadAttention(D, H, fused_qkv=True, **flags), nn.MultiheadAttention(D, H, **flags)
    for module in both:
        torch.manual_seed(3)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in both), strict=True))


# --- Initial weights ----------------------------------------------------------------------------------------------


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bias_kv", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": KDIM}, {"kdim": KDIM, "vdim": VDIM}], ids=["", "kdim", "vdim"])
def test_same_seed_same_weights(fused: bool, dtype: Any, bias: bool, bias_kv: bool, widths: dict[str, int]) -> None:
    flags = {"bias": bias, "add_bias_kv": bias_kv, "dtype": dtype, **widths}
    torch.manual_seed(11)
    theirs = nn.MultiheadAttention(D, H, **flags)
    drawn = torch.rand(())
    torch.manual_seed(11)
    ours = MultiheadAttention(D, H, fused_qkv=fused, **flags)
    assert torch.equal(torch.rand(()), drawn)  # and as many numbers drawn
    assert_same_state(ours, theirs)
    torch.manual_seed(11)
    ours.reset_parameters()
    assert_same_state(ours, theirs)


@LAYOUTS
@ALL_FLAGS
def test_meta_to_empty_reset(fused: bool, flags: dict[str, Any]) -> None:
    module = MultiheadAttention(D, H, fused_qkv=fused, device="meta", batch_first=True, **flags)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    assert_same_state(module, nn.MultiheadAttention(D, H, **flags))
    assert_honest(module)


@LAYOUTS
@pytest.mark.parametrize("moved", ["", "meta", "deepcopy", "pickle", "split"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 40, "vdim": 80}], ids=["", "kdim"])
def test_reset_loops_over_modules_keep_torchs_distribution(fused: bool, moved: str, widths: dict[str, int]) -> None:
    """Such loops reach the children last: nn.Linear's own draw would shrink the weights and fill the biases."""
    wide = 160
    module = MultiheadAttention(wide, 2, fused_qkv=fused, device="meta" if moved == "meta" else None, **widths)
    original = module
    if moved == "meta":
        module.to_empty(device="cpu")
    elif moved == "deepcopy":
        module = copy.deepcopy(module)
    elif moved == "pickle":
        module = pickle.loads(pickle.dumps(module))
    elif moved == "split":
        module.split_projections()
    kept = original.state_dict()["out_proj.weight"].clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9)
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    for name, (weight, bias) in weights_of(module.state_dict()).items():
        fan = weight.shape[1] + weight.shape[0] * (1 if widths else 3)
        bound = wide**-0.5 if name == "out_proj" else (6 / fan) ** 0.5
        assert bias is not None
        assert not bias.any()
        assert weight.abs().max() <= bound
        assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.03), name
    if original is not module:
        assert torch.equal(original.state_dict()["out_proj.weight"], kept)


def test_reset_parameters_refuses_a_replaced_projection() -> None:
    module = made()
    module.k_proj = Tripled(module.k_proj)
    with pytest.raises(ValueError, match=r"reset_parameters: k_proj must be an nn\.Linear.*; got Tripled"):
        module.reset_parameters()


# --- Copies, files, sharing ---------------------------------------------------------------------------------------


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@LAYOUTS
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved], ids=["deep", "pickle", "save"]
)
def test_copies_are_whole_and_apart(fused: bool, copied: Callable[[Any], Any]) -> None:
    module = made(fused)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    twin = copied(module)
    assert_same_state(twin, module)
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert_honest(twin.eval())
    assert not torch.equal(twin.state_dict()["in_proj_weight"], before["in_proj_weight"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert twin.fused_qkv == fused


@LAYOUTS
def test_files_are_no_larger_than_torchs(fused: bool) -> None:
    ours, theirs = (
        len(pickle.dumps(m)) for m in (MultiheadAttention(64, 4, fused_qkv=fused), nn.MultiheadAttention(64, 4))
    )
    assert ours < 1.2 * theirs


def test_a_copied_child_takes_nothing_along() -> None:
    module = made()
    alone = copy.deepcopy(module.q_proj)
    alone.reset_parameters()
    assert not torch.equal(alone.weight, module.q_proj.weight)
    assert len(pickle.dumps(alone)) < 2 * len(pickle.dumps(nn.Linear(D, D)))


@LAYOUTS
def test_share_memory(fused: bool) -> None:
    module = made(fused).share_memory()
    assert all(p.is_shared() for p in module.parameters())
    step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert_honest(module.eval())


@LAYOUTS
@pytest.mark.parametrize("flag", ["swap", "overwrite"])
def test_future_flags_of_module_conversion(fused: bool, flag: str) -> None:
    change = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")
    module = made(fused)
    module.zero_grad()
    change(True)
    try:
        module.double().float()
        assert_honest(module.eval())
        for assign in (False, True):
            state = MultiheadAttention(D, H).state_dict()
            module.load_state_dict(state, assign=assign)
            assert torch.equal(module.state_dict()["in_proj_weight"], state["in_proj_weight"])
            assert_honest(module)
    finally:
        change(False)


@pytest.mark.parametrize("what", ["weight", "child", "fused"])
def test_tied_modules(what: str) -> None:
    a, b = made(what == "fused"), made(what == "fused")
    if what == "weight":
        b.q_proj.weight = a.q_proj.weight
    elif what == "child":
        b.q_proj = a.q_proj
    else:
        b.in_proj_weight = a.in_proj_weight
    step(a, torch.optim.SGD(a.parameters(), lr=0.1))
    assert torch.equal(a.state_dict()["in_proj_weight"][:D], b.state_dict()["in_proj_weight"][:D])
    assert_honest(a.eval())
    assert_honest(b.eval())


@LAYOUTS
def test_functional_call(fused: bool) -> None:
    module = made(fused).eval()
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
    kept = {name: value.clone() for name, value in module.state_dict().items()}

    class Call:
        bias_k, add_zero_attn, kdim, vdim = None, False, D, D

        def __call__(self, *args: Tensor, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, doubled, args, kwargs)

    assert_honest(Call(), weights=weights_of(doubled))
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())
    if not fused:  # torch's names are no Parameters here: refused, never ignored
        with pytest.raises(TypeError, match=r"only an nn\.Parameter"):
            torch.func.functional_call(module, {"in_proj_weight": torch.zeros(3 * D, D)}, next(inputs(module)))


@LAYOUTS
def test_averaged_model(fused: bool) -> None:
    module = made(fused)
    averaged, states = torch.optim.swa_utils.AveragedModel(module), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        step(module, optimizer)
        averaged.update_parameters(module)
        states.append({name: value.clone() for name, value in module.state_dict().items()})
    for name, value in averaged.module.state_dict().items():
        torch.testing.assert_close(value, torch.stack([state[name] for state in states]).mean(dim=0))
    assert_honest(averaged.module.eval())


# --- One layout into the other ------------------------------------------------------------------------------------


def convert(module: MultiheadAttention) -> Any:
    return module.split_projections() if module.fused_qkv else module.fuse_projections()


@LAYOUTS
@ALL_FLAGS
@pytest.mark.parametrize("training", [True, False])
def test_conversion_loses_nothing(fused: bool, flags: dict[str, Any], training: bool) -> None:
    module = made(fused, **flags).train(training)
    calls = list(inputs(module))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    outs = [module(*call)[0] for call in calls]
    sum(out.square().sum() for out in outs).backward()
    assert convert(module) is module
    assert module.fused_qkv != fused
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    for call, out in zip(calls, outs, strict=True):
        torch.testing.assert_close(module(*call)[0], out)
    assert {child.training for child in module.modules()} == {training}
    assert_honest(module)
    fresh = MultiheadAttention(D, H, fused_qkv=not fused, **flags)
    for (name, p), (expected, q) in zip(module.named_parameters(), fresh.named_parameters(), strict=True):
        assert (name, p.shape, p.is_leaf, p.requires_grad) == (expected, q.shape, True, True)
    assert [name for name, _ in module.named_children()] == [name for name, _ in fresh.named_children()]


@LAYOUTS
@ALL_FLAGS
def test_conversion_carries_gradients(fused: bool, flags: dict[str, Any]) -> None:
    module = made(fused, **flags)
    twin = MultiheadAttention(D, H, batch_first=True, fused_qkv=not fused, **flags)
    twin.load_state_dict(module.state_dict())
    for m in (module, twin):
        torch.manual_seed(2)
        m(*list(inputs(m))[-1])[0].square().sum().backward()
    convert(module)
    for (name, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@LAYOUTS
def test_conversion_keeps_frozen_what_was(fused: bool) -> None:
    module = made(fused)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("bias" in name)
    convert(module)
    assert all(p.requires_grad == ("bias" in name) for name, p in module.named_parameters())


@LAYOUTS
@ALL_FLAGS
def test_there_and_back_and_twice(fused: bool, flags: dict[str, Any]) -> None:
    module = made(fused, **flags)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    convert(module)
    own = list(module.parameters())
    assert (module.split_projections() if fused else module.fuse_projections()) is module  # idempotent
    assert all(a is b for a, b in zip(own, module.parameters(), strict=True))
    convert(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert_honest(module.eval())


@LAYOUTS
@ALL_FLAGS
def test_a_converted_module_trains(fused: bool, flags: dict[str, Any]) -> None:
    module = convert(made(fused, **flags))
    memory = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(memory) == len(list(module.parameters()))  # nothing is a view of something else
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        before = [p.detach().clone() for p in module.parameters()]
        step(module, optimizer)
        assert not any(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
        assert_honest(module.eval())
        module.train()


@pytest.mark.parametrize("name", CHILDREN)
def test_fused_names_the_cure(name: str) -> None:
    module = made(fused=True)
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=rf"{name}.*split_projections\(\)"):
        getattr(module, name)
    assert getattr(module.split_projections(), name).weight.shape == (D, D)


class OwnLinear(nn.Linear):
    pass


def _replace(child: nn.Module) -> Callable[[Any], None]:
    return lambda module: setattr(module, "k_proj", child)


def _extra(module: Any) -> None:
    module.k_proj.adapter = nn.Linear(D, D)


# What may have been done to a split module that a fused one could not show.
TOUCHED: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda m: m.k_proj.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.v_proj.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.q_proj.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.q_proj.register_full_backward_pre_hook(lambda *_: None),
    "patched forward": lambda m: setattr(m.k_proj, "forward", lambda x: x),
    "wrapped": lambda m: setattr(m, "k_proj", Tripled(m.k_proj)),
    "subclass": _replace(OwnLinear(D, D)),
    "without bias": _replace(nn.Linear(D, D, bias=False)),
    "bias removed": lambda m: setattr(m.k_proj, "bias", None),
    "other width": _replace(nn.Linear(D, 2 * D)),
    "other dtype": lambda m: m.k_proj.double(),
    "extra child": _extra,
    "parametrized": lambda m: parametrize.register_parametrization(m.k_proj, "weight", Doubled()),
    "pruned": lambda m: prune.l1_unstructured(m.k_proj, "weight", 0.5),
    "quantized": lambda m: setattr(m, "k_proj", quantized(nn.Sequential(m.k_proj))[0]),
    "one frozen": lambda m: m.k_proj.requires_grad_(False),
    "one bias frozen": lambda m: m.k_proj.bias.requires_grad_(False),
    "tensor hook": lambda m: m.k_proj.weight.register_hook(lambda grad: grad * 0),
    "tensor hook after": lambda m: m.k_proj.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("touch", TOUCHED.values(), ids=TOUCHED.keys())
def test_fusing_refuses_what_it_would_lose(touch: Callable[[Any], Any]) -> None:
    module = made()
    touch(module)
    children, own = list(module.named_children()), list(module.named_parameters())
    with pytest.raises(ValueError, match=r"fuse_projections: .*(q|k|v)_proj.* must"):
        module.fuse_projections()
    assert not module.fused_qkv
    assert all(a is b for (_, a), (_, b) in zip(children, module.named_children(), strict=True))
    assert all(a is b for (_, a), (_, b) in zip(own, module.named_parameters(), strict=True))


@pytest.mark.parametrize("widths", [{}, {"kdim": KDIM}], ids=["", "kdim"])
@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("tool", ["parametrize", "prune"])
def test_splitting_refuses_what_it_would_lose(widths: dict[str, int], part: str, tool: str) -> None:
    module = made(fused=True, **widths)
    name = "in_proj_bias" if part == "bias" else "k_proj_weight" if widths else "in_proj_weight"
    if tool == "parametrize":
        parametrize.register_parametrization(module, name, Doubled())
    else:
        prune.l1_unstructured(module, name, 0.5)
    own = list(module.named_parameters())
    with pytest.raises(ValueError, match=f"split_projections: {name} must"):
        module.split_projections()
    assert module.fused_qkv
    assert all(a is b for (_, a), (_, b) in zip(own, module.named_parameters(), strict=True))


def test_gradients_of_some_children_only_are_not_dropped() -> None:
    module = made()
    step(module, torch.optim.SGD(module.parameters(), lr=0.0))
    kept = module.k_proj.weight.grad.clone()
    module.q_proj.weight.grad = None
    module.fuse_projections()
    assert module.in_proj_weight.grad is not None
    assert torch.equal(module.in_proj_weight.grad[D : 2 * D], kept)
    assert not module.in_proj_weight.grad[:D].any()
