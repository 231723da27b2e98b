"""Values of `state_dict()` of split projections: they are the parameters, as torch's are."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import headwise
from headwise.core.live import Live
from headwise.layers import own_names

D, H = 6, 2
NAMES = ["in_proj_weight", "in_proj_bias"]
each_name = pytest.mark.parametrize("name", NAMES)


def made(fused: bool = False, **kwargs: Any) -> headwise.MultiheadAttention:
    torch.manual_seed(1)
    module = headwise.MultiheadAttention(D, H, fused_qkv=fused, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def held(module: headwise.MultiheadAttention, name: str) -> Tensor:
    """What the projections hold, read from themselves."""
    part = name.removeprefix("in_proj_")
    return torch.cat([getattr(module.get_submodule(child), part).detach() for child in ("q_proj", "k_proj", "v_proj")])


WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda v: v.mul_(3),
    "copy_": lambda v: v.copy_(v.clone() * 3),
    "operator": lambda v: v.__imul__(3),
    "index": lambda v: v.__setitem__(slice(None), v.clone() * 3),
    "row by row": lambda v: [row.mul_(3) for row in v],
    "view": lambda v: v.view(-1).mul_(3),
    "unbind": lambda v: [row.mul_(3) for row in v.unbind(0)],
    "split": lambda v: [piece.mul_(3) for piece in v.split(5)],
    "transposed": lambda v: v.transpose(0, -1).mul_(3),
    "detach": lambda v: v.detach().mul_(3),
    "data": lambda v: v.data.mul_(3),
    "cpu": lambda v: v.cpu().mul_(3),
    "out": lambda v: torch.mul(v.clone(), 3, out=v),
    "foreach": lambda v: torch._foreach_mul_([v], 3.0),
    "foreach lerp": lambda v: torch._foreach_lerp_([v], [v.clone() * 5], 0.5),
    "addcmul": lambda v: v.addcmul_(v.clone(), torch.full_like(v, 2.0)),
    "masked_fill and add": lambda v: v.add_(v.clone().masked_fill_(torch.zeros_like(v).bool(), 0) * 2),
    "inference mode": lambda v: inside(torch.inference_mode(), v),
    "no_grad": lambda v: inside(torch.no_grad(), v),
    "optimizer": lambda v: step(v),
}


def inside(context: Any, value: Tensor) -> None:
    with context:
        value.mul_(3)


def step(value: Tensor) -> None:
    """One step of SGD: minus the gradient, which is minus twice the value."""
    leaf = value.detach().requires_grad_()
    (-(leaf**2)).sum().backward()
    torch.optim.SGD([leaf], lr=1.0).step()


@each_name
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writes_reach_the_parameters(write: Callable[[Tensor], object], name: str) -> None:
    module = made()
    want = {other: held(module, other) * (3 if other == name else 1) for other in NAMES}
    parameters = list(module.parameters())
    write(module.state_dict()[name])
    for other in NAMES:
        torch.testing.assert_close(held(module, other), want[other])
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))


def test_reads_see_what_the_parameters_hold_now() -> None:
    module = made()
    values = module.state_dict()
    view = values["in_proj_weight"][D : 2 * D]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)  # counts no versions
    module(*torch.randn(3, 4, 2, D))[0].sum().backward()
    optimizer.step()
    for name in NAMES:
        assert torch.equal(values[name], held(module, name))
        assert np.array_equal(values[name].numpy(), held(module, name).numpy())
        assert values[name].tolist() == held(module, name).tolist()
    assert torch.equal(view, module.k_proj.weight)
    assert torch.equal(values["in_proj_weight"].sum(), held(module, "in_proj_weight").sum())


def test_copies_are_ordinary_tensors() -> None:
    module = made()
    values = module.state_dict()
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    value = values["in_proj_weight"]
    copies = {
        "clone": value.clone(),
        "product": value * 1,
        "double": value.double(),
        "deepcopy": copy.deepcopy(values)["in_proj_weight"],
        "pickle": pickle.loads(pickle.dumps(value)),
        "file": torch.load(buffer, weights_only=True)["in_proj_weight"],
    }
    before = held(module, "in_proj_weight")
    with torch.no_grad():
        module.q_proj.weight.zero_()
    for how, copied in copies.items():
        assert type(copied) is Tensor, how
        assert torch.equal(copied, before.to(copied.dtype)), how
        copied.fill_(7)
    assert torch.equal(held(module, "in_proj_weight")[D:], before[D:])


def test_a_parameter_of_it_is_an_ordinary_one() -> None:
    module = made()
    value = module.state_dict()["in_proj_weight"]
    for requires_grad in (True, False):
        parameter = nn.Parameter(value, requires_grad=requires_grad)
        assert type(parameter) is nn.Parameter
        assert type(parameter.data) is Tensor
        assert parameter.requires_grad is requires_grad
        assert torch.equal(parameter, held(module, "in_proj_weight"))


@pytest.mark.parametrize("target", ["torch", "split", "fused"])
def test_assigned_to_another_module(target: str) -> None:
    module = made()
    other: Any = nn.MultiheadAttention(D, H) if target == "torch" else made(target == "fused")
    other.load_state_dict(module.state_dict(), assign=True)
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
    query, key, value = torch.randn(3, 4, 2, D)
    want = module(query, key, value)[0]
    torch.testing.assert_close(other(query, key, value)[0], want, rtol=1e-5, atol=1e-5)
    other(query, key, value)[0].sum().backward()
    with torch.no_grad():
        next(other.parameters()).zero_()
    torch.testing.assert_close(module(query, key, value)[0], want, rtol=0, atol=0)


def test_loading_its_own_values() -> None:
    module = made()
    before = [parameter.clone() for parameter in module.parameters()]
    module.load_state_dict(module.state_dict())
    for parameter, wanted in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, wanted)


def test_numpy_cannot_be_written() -> None:
    array = made().state_dict()["in_proj_weight"].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_memory_cannot_be_handed_on() -> None:
    with pytest.raises(BufferError, match="clone"):
        torch.from_dlpack(made().state_dict()["in_proj_weight"])


@pytest.mark.parametrize("background", [False, True])
def test_collectives(tmp_path: Path, background: bool) -> None:
    """They work on memory without asking the tensor's class."""
    module, other = made(), made()
    value = module.state_dict()["in_proj_weight"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        work = dist.all_gather([other.state_dict()["in_proj_weight"]], value.mul_(2), async_op=background)
        if background:
            work.wait()
        assert torch.equal(held(other, "in_proj_weight"), held(module, "in_proj_weight"))
        group = dist.all_reduce(value, dist.ReduceOp.SUM, async_op=background)
        if background:
            group.wait()
        assert torch.equal(value, held(module, "in_proj_weight"))
    finally:
        dist.destroy_process_group()


def test_on_the_meta_device() -> None:
    module = headwise.MultiheadAttention(D, H, device="meta")
    value = module.state_dict()["in_proj_weight"]
    assert value.device.type == "meta"
    assert value.mul_(2).shape == (3 * D, D)


def test_in_inference_mode() -> None:
    module = made()
    with torch.inference_mode():
        values = module.state_dict()
    want = held(module, "in_proj_weight") * 2
    values["in_proj_weight"].mul_(2)
    assert torch.equal(held(module, "in_proj_weight"), want)


def test_projections_of_several_dtypes_keep_their_names() -> None:
    """Joined they would be copies."""
    module = made()
    module.k_proj.double()
    values = module.state_dict()
    assert "q_proj.weight" in values
    assert "in_proj_weight" not in values
    assert not hasattr(module, "in_proj_weight")
    assert module.in_proj_bias is None
    values["k_proj.weight"].zero_()
    assert not module.k_proj.weight.any()
    made().load_state_dict(values)


def test_pruned_projections_can_be_read_and_not_written() -> None:
    module = made()
    torch.nn.utils.prune.l1_unstructured(module.q_proj, "weight", 0.5)
    want = held(module, "in_proj_weight")
    whole = module.in_proj_weight
    assert torch.equal(whole, want)
    whole.square().sum().backward()
    assert module.q_proj.weight_orig.grad.any()
    with torch.no_grad(), pytest.raises(RuntimeError, match="weight_orig"):
        module.in_proj_weight.zero_()
    assert torch.equal(held(module, "in_proj_weight"), want)


def test_gradient_of_partly_frozen_projections() -> None:
    module = made()
    module.q_proj.requires_grad_(False)
    module(*torch.randn(3, 4, 2, D))[0].square().sum().backward()
    grad = module.in_proj_weight.grad
    assert not grad[:D].any()
    assert torch.equal(grad[D:], torch.cat([module.k_proj.weight.grad, module.v_proj.weight.grad]))


def test_shared_memory() -> None:
    module = made()
    module.state_dict()["in_proj_weight"].share_memory_()
    assert module.q_proj.weight.is_shared()
    assert not module.q_proj.bias.is_shared()


def test_a_tool_that_adds_the_modules_own_values() -> None:
    """As `set_model_state_dict(full_state_dict=True)` does: what was given beside them is loaded."""
    module, other = made(), made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    given = {**other.state_dict(), **{name: value.detach() for name, value in module.named_parameters()}}
    given["out_proj.weight"] = other.out_proj.weight
    module.load_state_dict(given)
    assert torch.equal(held(module, "in_proj_weight"), held(other, "in_proj_weight"))
    given["q_proj.weight"] = given["q_proj.weight"].clone()  # now somebody's
    with pytest.raises(RuntimeError, match="two spellings"):
        module.load_state_dict(given)


def test_kept_variables_are_the_parameters() -> None:
    module = made()
    value = module.state_dict(keep_vars=True)["in_proj_weight"]
    value.square().sum().backward()
    torch.testing.assert_close(value.grad, 2 * held(module, "in_proj_weight"))
    with torch.no_grad():
        value.zero_()
    assert not held(module, "in_proj_weight").any()


def test_printed_as_an_ordinary_tensor() -> None:
    module = made()
    assert repr(module.state_dict()["in_proj_weight"]) == repr(held(module, "in_proj_weight"))


def test_own_names() -> None:
    model = nn.ModuleDict({"own": made(), "fused": made(True), "other": nn.Linear(2, 2)})
    before = model.state_dict()
    assert isinstance(before["own.in_proj_weight"], Live)
    assert own_names(model) is model
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(before)  # torch's names
    assert list(again.state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    missing = again.load_state_dict({}, strict=False).missing_keys
    assert sorted(missing) == sorted(model.state_dict())
    assert "in_proj_weight" in headwise.downgrade(model)["own"].state_dict()
    assert "torch_names" not in vars(model["own"])


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.MultiheadAttention(D, H), None], ids=["linear", "torch", "none"])
def test_own_names_of_nothing(model: Any) -> None:
    with pytest.raises(ValueError, match="own_names: model must"):
        own_names(model)


# --- One operation, two readings ------------------------------------------------------------------------------------

READS = {
    "a part into another": lambda w: w()[:D].copy_(w()[D : 2 * D]),
    "times itself": lambda w: w().mul_(w()),
    "data plus data": lambda w: w().data.add_(w().data),
    "out": lambda w: torch.add(w(), w(), out=w()),
    "foreach": lambda w: torch._foreach_add_([w()], [w()]),
    "lerp": lambda w: w().lerp_(w() * 3, 0.5),
}


@pytest.mark.parametrize("how", READS.values(), ids=list(READS))
@pytest.mark.parametrize("source", ["attribute", "state_dict"])
def test_what_is_only_read_is_not_written_back(how: Callable[[Callable[[], Tensor]], object], source: str) -> None:
    ours, theirs = made(), made(fused=True)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        with torch.no_grad():
            if source == "attribute":
                how(lambda module=module: module.in_proj_weight)
            else:
                how(lambda module=module: module.state_dict()["in_proj_weight"])
    assert torch.equal(held(ours, "in_proj_weight"), theirs.in_proj_weight)


def test_a_write_to_a_projection_from_the_whole() -> None:
    module = made()
    with torch.no_grad():
        module.q_proj.weight.copy_(module.in_proj_weight[D : 2 * D])
    assert torch.equal(module.q_proj.weight, module.k_proj.weight)


def test_reading_is_no_change_to_autograd() -> None:
    module, average = made(), torch.zeros(3 * D, D)
    x = torch.randn(4, 2, D, requires_grad=True)
    out, _ = module(x, x, x)
    with torch.no_grad():
        average.lerp_(module.in_proj_weight, 0.5)
        made().load_state_dict(module.state_dict())
    out.sum().backward()
    assert module.q_proj.weight.grad is not None


def test_copies_freeze_nothing() -> None:
    module = made()
    nn.Parameter(module.in_proj_weight, requires_grad=False)
    assert not module.in_proj_weight.detach().requires_grad_(False).requires_grad
    module.in_proj_weight.square().sum().backward()
    copied = module.in_proj_weight.detach()
    assert copied.grad is None
    copied.grad = None
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.q_proj.weight.grad is not None
    leaf = module.requires_grad_(False).in_proj_weight.detach().requires_grad_()
    leaf.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3 * D, D))
    assert not module.q_proj.weight.requires_grad


REFUSED = {
    "transpose_": lambda w: w.transpose_(0, 1),
    "t_": lambda w: w.t_(),
    "squeeze_": lambda w: w.squeeze_(0),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "as_strided_": lambda w: w.as_strided_((2, 2), (1, 1)),
    "out= too small": lambda w: torch.add(torch.ones(3, D), 1, out=w),
    "set_": lambda w: w.set_(torch.zeros(3 * D, D)),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("write", REFUSED.values(), ids=list(REFUSED))
def test_what_would_change_the_tensor_and_not_the_module(write: Callable[[Tensor], object]) -> None:
    module = made()
    before = held(module, "in_proj_weight")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"stacked projections|must have the shape"):
        write(module.in_proj_weight)
    assert torch.equal(held(module, "in_proj_weight"), before)


def test_one_operation_on_the_same_projections_twice() -> None:
    one, other = made(), made()
    other.k_proj = one.k_proj
    before = held(one, "in_proj_weight")
    with torch.no_grad(), pytest.raises(RuntimeError, match="twice"):
        torch._foreach_mul_([one.in_proj_weight, other.in_proj_weight], 3.0)
    assert torch.equal(held(one, "in_proj_weight"), before)


def test_a_graph_notices_that_its_numbers_changed() -> None:
    module = made()
    whole = module.in_proj_weight
    penalty = (whole * whole).sum()
    with torch.no_grad():
        module.state_dict()["in_proj_weight"].add_(1)
    whole.detach().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_a_frozen_module_written_from_a_graph() -> None:
    module = made().requires_grad_(False)
    with pytest.raises(RuntimeError, match="no_grad"):
        module.in_proj_weight.copy_(torch.randn(3 * D, D, requires_grad=True))


def test_safetensors_of_values_kept_over_a_step() -> None:
    from safetensors.torch import load, save

    module = made()
    values = module.state_dict()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    saved = load(save(values))
    for name, value in module.state_dict().items():
        assert torch.equal(saved[name], value.clone()), name


def test_threads() -> None:
    module = made()
    with torch.no_grad():
        module.in_proj_weight.zero_()

    def add(row: int) -> None:
        for _ in range(50):
            module.state_dict()["in_proj_weight"][row].add_(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert held(module, "in_proj_weight")[:4].eq(50).all()
