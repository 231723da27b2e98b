"""`in_proj_weight` and `in_proj_bias` while the projections are split: read and written as torch's Parameters are."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise import MultiheadAttention

D, H, KDIM, VDIM = 15, 3, 13, 17
CHILDREN = ("q_proj", "k_proj", "v_proj")
NAMES = pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
GRAD = pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])


def made(**flags: Any) -> MultiheadAttention:
    module = MultiheadAttention(D, H, **flags)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.eval()(*(torch.randn(2, 3, width) for width in (D, module.kdim, module.vdim)))
    return module


def joined(module: Any, name: str) -> Tensor:
    part = name.removeprefix("in_proj_")
    return torch.cat([getattr(getattr(module, child), part).detach() for child in CHILDREN])


def _iadd(w: Tensor) -> None:
    w.data[0] += 1


def _setitem(w: Tensor) -> None:
    w[0] = 0


def _rows(w: Tensor) -> None:
    for row in w.detach():
        row.zero_()


def _attribute(name: str, value: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    return lambda w: setattr(w, name, value(w))


def _fused_sgd(w: Tensor) -> None:
    torch._fused_sgd_(
        [w.detach()], [torch.ones_like(w)], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip


ZERO = torch.zeros(())

# Every way of writing that comes to mind. Some begin with detach(), as a user does whom autograd refuses a leaf.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda w: w.copy_(torch.zeros(w.shape)),
    "zero_": lambda w: w.zero_(),
    "mul_": lambda w: w.mul_(0),
    "fill_": lambda w: w.fill_(0),
    "normal_": lambda w: w.normal_(),
    "clamp_": lambda w: w.clamp_(min=0),
    "data.copy_": lambda w: w.data.copy_(torch.zeros(w.shape)),
    "data.mul_": lambda w: w.data.mul_(0),
    "data =": _attribute("data", torch.zeros_like),
    "grad =": _attribute("grad", torch.zeros_like),
    "requires_grad =": _attribute("requires_grad", lambda w: False),
    "requires_grad_": lambda w: w.requires_grad_(False),
    "detach_": lambda w: w.detach_(),
    "detach().zero_": lambda w: w.detach().zero_(),
    "set_": lambda w: w.set_(torch.zeros(w.shape)),
    "resize_": lambda w: w.resize_(1),
    "share_memory_": lambda w: w.share_memory_(),
    "setitem": _setitem,
    "row += ": _iadd,
    "slice": lambda w: w[:D].zero_(),
    "slice of detached": lambda w: w.detach()[:D].zero_(),
    "mask": lambda w: w.data.__setitem__(w > 0, 0),
    "rows": _rows,
    "list": lambda w: next(iter(w)).zero_(),
    "chunk": lambda w: w.chunk(3)[0].zero_(),
    "split": lambda w: torch.split(w, D)[1].zero_(),
    "tensor_split": lambda w: w.tensor_split(3)[2].zero_(),
    "unbind": lambda w: w.unbind()[0].zero_(),
    "view": lambda w: w.view(-1).zero_(),
    "reshape": lambda w: w.reshape(3, -1).zero_(),
    "unflatten": lambda w: w.unflatten(0, (3, D))[0].zero_(),
    "flatten": lambda w: w.flatten().zero_(),
    "expand": lambda w: w.expand(2, *w.shape)[0].zero_(),
    "T": lambda w: w.movedim(0, -1).zero_(),
    "squeeze": lambda w: w.unsqueeze(0).squeeze(0).zero_(),
    "narrow": lambda w: w.narrow(0, 0, 2).zero_(),
    "as_strided": lambda w: torch.as_strided(w, (3,), (1,)).zero_(),
    "other dtype": lambda w: w.detach().view(torch.int32).zero_(),
    "contiguous": lambda w: w.contiguous().zero_(),
    "to": lambda w: w.to("cpu", torch.float32).zero_(),
    "as_tensor": lambda w: torch.as_tensor(w).zero_(),
    "broadcast_tensors": lambda w: torch.broadcast_tensors(w, ZERO)[0].zero_(),
    "numpy": lambda w: w.detach().numpy().fill(0),
    "numpy(force=True)": lambda w: w.numpy(force=True).__setitem__(0, 0),
    "np.asarray": lambda w: np.asarray(w.detach()).fill(0),
    "numpy of a part": lambda w: w.chunk(3)[0].detach().numpy().fill(0),
    "numpy writeable": lambda w: w.detach().numpy().setflags(write=True),
    "out=": lambda w: torch.zeros(w.shape, out=w.detach()),
    "out= of add": lambda w: torch.add(w, 1, out=w.detach()),
    "out= of a part": lambda w: torch.add(w[:2], 1, out=w.detach()[:2]),
    "out= in a tuple": lambda w: torch.sort(w, out=(w.detach(), torch.empty(0, dtype=torch.long))),
    "out= of eye": lambda w: nn.init.eye_(w) if w.dim() == 2 else nn.init.ones_(w),
    "init.xavier_uniform_": lambda w: nn.init.xavier_uniform_(w if w.dim() == 2 else w[None]),
    "init.orthogonal_": lambda w: nn.init.orthogonal_(w if w.dim() == 2 else w[None]),
    "init.zeros_": nn.init.zeros_,
    "init.constant_(tensor=)": lambda w: nn.init.constant_(tensor=w, val=0.0),
    "init.trunc_normal_": nn.init.trunc_normal_,
    "foreach_mul_": lambda w: torch._foreach_mul_([w.detach()], 0.0),
    "foreach_copy_": lambda w: torch._foreach_copy_([w.detach()], [torch.zeros(w.shape)]),
    "foreach_zero_, second": lambda w: torch._foreach_zero_([torch.ones(2), w.detach()]),
    "fused_sgd_": _fused_sgd,
    "aten.add_": lambda w: torch.ops.aten.add_(w.detach(), 1),
    "aten.add_.Tensor": lambda w: torch.ops.aten.add_.Tensor(w.detach(), ZERO),
    "aten.zero_.default": lambda w: torch.ops.aten.zero_.default(w.detach()),
    "aten.add.out": lambda w: torch.ops.aten.add.out(torch.zeros(w.shape), ZERO, out=w.detach()),
    "aten.add(out=)": lambda w: torch.ops.aten.add(torch.zeros(w.shape), ZERO, out=w.detach()),
    "index_put_": lambda w: torch.index_put_(w, (torch.tensor([0]),), ZERO),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([0]), 0),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 0),
    "scatter_": lambda w: w.detach().flatten().scatter_(0, torch.tensor([0]), 0.0),
    "relu_(input=)": lambda w: torch.relu_(input=w),
    "relu(inplace)": lambda w: functional.relu(w.detach(), inplace=True),
    "ReLU(inplace)": lambda w: nn.ReLU(inplace=True)(w.detach()),
    "dropout(inplace)": lambda w: functional.dropout(w.detach(), 0.9, True, True),
    "leaky_relu(inplace)": lambda w: functional.leaky_relu(w.detach(), 0.0, True),
    "normalize(out=)": lambda w: functional.normalize(torch.ones(w.shape), dim=0, out=w.detach()),
    "embedding(max_norm)": lambda w: functional.embedding(torch.arange(2), w.detach().view(3, -1), max_norm=1e-3),
    "apply_": lambda w: w.detach().apply_(lambda x: 0.0),
    "map_": lambda w: w.detach().map_(w.detach(), lambda x, y: 0.0),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.zeros(w.numel()), [w]),
    "from_dlpack": lambda w: torch.from_dlpack(w.detach()).zero_(),
    "np.from_dlpack": lambda w: np.from_dlpack(w.detach()),
}


# Where torch's Parameter takes what ours cannot carry out, and says so.
LOUD = {"set_", "resize_", "numpy", "numpy(force=True)", "np.asarray", "numpy of a part", "numpy writeable"}
LOUD |= {"from_dlpack", "np.from_dlpack", "apply_", "map_"}


def tried(write: Callable[[Tensor], Any], module: Any, name: str) -> Exception | None:
    torch.manual_seed(3)
    try:
        write(getattr(module, name))
    except Exception as error:
        return error
    return None


@NAMES
@GRAD
@pytest.mark.parametrize("label", WRITES)
def test_a_write_does_what_it_does_to_torchs(label: str, name: str, grad: bool) -> None:
    """Or it raises, and then nothing is changed."""
    ours, theirs = made(), made(fused_qkv=True)
    theirs.load_state_dict(ours.state_dict())
    before = joined(ours, name)
    with torch.set_grad_enabled(grad):
        error, wanted_error = tried(WRITES[label], ours, name), tried(WRITES[label], theirs, name)
    part = name.removeprefix("in_proj_")
    parameters = [getattr(getattr(ours, child), part) for child in CHILDREN]
    if error is not None:
        assert wanted_error is not None or label in LOUD, error
        assert torch.equal(joined(ours, name), before)
        return
    assert wanted_error is None
    assert label not in LOUD
    whole = getattr(theirs, name)
    torch.testing.assert_close(joined(ours, name), whole.detach())
    assert {parameter.requires_grad for parameter in parameters} == {whole.requires_grad}
    grads = [parameter.grad for parameter in parameters]
    if whole.grad is None:
        assert grads == [None] * 3
    else:
        assert torch.equal(torch.cat(grads), whole.grad)


def test_a_write_counts_as_one() -> None:
    """Autograd notices a change between forward and backward."""
    module = made()
    x = torch.randn(2, 3, D, requires_grad=True)
    out, _ = module(x, x, x)
    with torch.no_grad():
        module.in_proj_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_read_in_a_graph_is_of_its_time() -> None:
    module = made()
    before = joined(module, "in_proj_weight")
    penalty = module.in_proj_weight.square().sum()
    module.q_proj.weight.data.zero_()
    penalty.backward()
    torch.testing.assert_close(module.q_proj.weight.grad, 2 * before[:D])


@NAMES
def test_its_gradient(name: str) -> None:
    module = made()
    assert getattr(module, name).grad is None
    getattr(module, name).square().sum().backward()
    gradient = getattr(module, name).grad
    torch.testing.assert_close(gradient, 2 * joined(module, name))
    torch.nn.utils.clip_grads_with_norm_([getattr(module, name)], 1.0, gradient.norm())
    part = name.removeprefix("in_proj_")
    got = torch.cat([getattr(getattr(module, child), part).grad for child in CHILDREN])
    torch.testing.assert_close(got.norm(), torch.ones(()), rtol=1e-4, atol=1e-4)
    getattr(module, name).grad = None
    assert module.q_proj.weight.grad is None or part == "bias"
    assert module.q_proj.bias.grad is None or part == "weight"
    with pytest.raises(ValueError, match="shape"):
        getattr(module, name).grad = torch.zeros(2)


def test_hooks_for_its_gradient_are_refused() -> None:
    with pytest.raises(TypeError, match=r"hook q_proj\.weight"):
        made().in_proj_weight.register_hook(print)


def test_data_of_another_shape_or_dtype() -> None:
    module = made()
    for value in (torch.zeros(3 * D, D + 1), torch.zeros(3 * D, D, dtype=torch.float64)):
        with pytest.raises(ValueError, match="must keep"):
            module.in_proj_weight.data = value


@NAMES
def test_an_optimizer_refuses_it(name: str) -> None:
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.SGD([getattr(made(), name)], lr=0.1)


@NAMES
def test_adding_in_place_to_the_attribute(name: str) -> None:
    module = made()
    before = joined(module, name)
    with torch.no_grad():
        if name == "in_proj_weight":
            module.in_proj_weight += 1
        else:
            module.in_proj_bias += 1
    torch.testing.assert_close(joined(module, name), before + 1)
    with pytest.raises(TypeError, match=r"only an nn\.Parameter"):
        setattr(module, name, getattr(module, name) + 1)
    torch.testing.assert_close(joined(module, name), before + 1)


def test_being_the_source_of_a_write_is_fine() -> None:
    module, target = made(), torch.zeros(3 * D, D)
    with torch.no_grad():
        assert torch.equal(target.copy_(module.in_proj_weight), joined(module, "in_proj_weight"))
        torch._foreach_copy_([target], [module.in_proj_weight * 2])
        assert torch.equal(target.sub_(module.in_proj_weight), joined(module, "in_proj_weight"))
        target[:D] = module.in_proj_weight[D : 2 * D]
        assert torch.equal(target[:D], module.k_proj.weight)
        assert torch.equal(torch.ops.aten.copy_.default(torch.zeros(3 * D), module.in_proj_bias), module.in_proj_bias)
        assert torch.equal(torch.mul(module.in_proj_bias, 2, out=torch.empty(3 * D)), 2 * module.in_proj_bias)


# --- Reading ------------------------------------------------------------------------------------------------------


@NAMES
@GRAD
def test_reading_gives_the_children(name: str, grad: bool) -> None:
    module = made()
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            tensor = getattr(module, name)
            assert torch.equal(tensor, joined(module, name))
            assert tensor.requires_grad == grad
            assert isinstance(tensor, Tensor)
            assert not isinstance(tensor, nn.Parameter)
            assert tensor.is_leaf == (not grad)
            module.q_proj.weight.data.mul_(2)
            module.q_proj.bias.data.mul_(2)


def test_what_is_computed_from_it_is_an_ordinary_tensor() -> None:
    weight = made().in_proj_weight
    for result in (weight + 1, 2 * weight, weight @ weight.T, weight.sum(), weight.clone(), weight > 0):
        assert type(result) is Tensor
    assert all(type(part) is Tensor for part in torch.linalg.svd(weight))
    assert type(torch.sort(weight).indices) is Tensor
    weight.clone().detach().zero_()
    np.array(weight.tolist()).fill(0)
    nn.Parameter(weight.detach().clone()).data.zero_()
    assert repr(weight) == repr(weight.detach().clone())
    assert f"{weight.sum():.3f}" == f"{weight.sum().item():.3f}"
    assert [tuple(row.shape) for row in weight] == [(D,)] * (3 * D)
    assert len(weight) == 3 * D


@NAMES
def test_a_penalty_on_it_trains_the_children(name: str) -> None:
    module = made()
    getattr(module, name).square().sum().backward()
    part = name.removeprefix("in_proj_")
    for child in CHILDREN:
        parameter = getattr(getattr(module, child), part)
        torch.testing.assert_close(parameter.grad, 2 * parameter.detach())
    module.zero_grad()
    getattr(module, name).chunk(3)[1].norm().backward()
    assert module.q_proj.get_parameter(part).grad.any() == 0
    assert module.k_proj.get_parameter(part).grad.any()


def test_frozen_children_give_a_frozen_whole() -> None:
    module = made().requires_grad_(False)
    assert not module.in_proj_weight.requires_grad
    module.q_proj.weight.requires_grad_(True)
    assert module.in_proj_weight.requires_grad


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": KDIM, "vdim": VDIM}], ids=["", "kdim"])
@pytest.mark.parametrize("bias", [True, False])
def test_each_name_is_as_on_torch(fused: bool, widths: dict[str, int], bias: bool) -> None:
    theirs = nn.MultiheadAttention(D, H, bias=bias, **widths)
    ours = MultiheadAttention(D, H, bias=bias, fused_qkv=fused, **widths)
    ours.load_state_dict(theirs.state_dict())
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        mine, his = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (his is None), name
        assert his is None or torch.equal(mine, his), name
        assert not fused or his is None or type(mine) is nn.Parameter


def test_separate_widths_give_the_children_own_parameters() -> None:
    module = made(kdim=KDIM, vdim=VDIM)
    assert module.k_proj_weight is module.k_proj.weight
    with torch.no_grad():
        module.k_proj_weight.zero_()
    assert not module.k_proj.weight.any()


def test_fused_it_is_the_parameter() -> None:
    module = made(fused_qkv=True)
    assert module.in_proj_weight is dict(module.named_parameters())["in_proj_weight"]
    nn.init.zeros_(module.in_proj_weight)
    module.in_proj_bias.data.zero_()
    assert not module.state_dict()["in_proj_weight"].any()
    assert not module.state_dict()["in_proj_bias"].any()


class NoCat(Tensor):
    """Like the quantizers' tensors, which cannot be joined."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            raise NotImplementedError("cat")
        return super().__torch_function__(func, types, args, kwargs or {})


class Holder(nn.Module):
    """As wrappers of quantized weights: a packed weight of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(D * D // 2, 1)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return x


CHANGED: dict[str, Callable[[Any], Any]] = {
    "wrapped": lambda m: setattr(m, "q_proj", nn.Sequential(m.q_proj)),
    "identity": lambda m: setattr(m, "q_proj", nn.Identity()),
    "packed": lambda m: setattr(m, "q_proj", Holder()),
    "all packed": lambda m: [setattr(m, name, Holder()) for name in CHILDREN],
    "convolution": lambda m: setattr(m, "q_proj", nn.Conv1d(D, D, 1)),
    "device": lambda m: m.q_proj.to("meta"),
    "no cat": lambda m: setattr(
        m.q_proj, "weight", nn.Parameter(torch.zeros(D, D).as_subclass(NoCat), requires_grad=False)
    ),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_hasattr_is_honest(change: Callable[[Any], Any]) -> None:
    module = made()
    assert hasattr(module, "in_proj_weight")
    change(module)
    assert not hasattr(module, "in_proj_weight")
    with pytest.raises(AttributeError, match="in_proj_weight"):
        _ = module.in_proj_weight


# --- Copies, files, transforms ------------------------------------------------------------------------------------


def _file(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"w": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


@NAMES
@GRAD
@pytest.mark.parametrize(
    "keep", [lambda t: pickle.loads(pickle.dumps(t)), _file, copy.copy], ids=["pickle", "save", "copy"]
)
def test_files_hold_an_ordinary_tensor(name: str, grad: bool, keep: Callable[[Tensor], Tensor]) -> None:
    module = made()
    with torch.set_grad_enabled(grad):
        kept = keep(getattr(module, name))
        assert type(kept) is Tensor
        assert torch.equal(kept, joined(module, name))
        kept.detach().zero_()
        assert joined(module, name).any()


def test_deepcopy_without_grad() -> None:
    module = made()
    with torch.no_grad():
        kept = copy.deepcopy(module.in_proj_weight)
    assert torch.equal(kept, joined(module, "in_proj_weight"))


def test_reads_in_compiled_code() -> None:
    module = made()

    @torch.compile(backend="eager", fullgraph=True)
    def penalty() -> Tensor:
        return module.in_proj_weight.square().sum() + module.in_proj_bias.abs().sum()

    value = penalty()
    value.backward()
    eager = joined(module, "in_proj_weight").square().sum() + joined(module, "in_proj_bias").abs().sum()
    torch.testing.assert_close(value.detach(), eager)
    torch.testing.assert_close(module.q_proj.weight.grad, 2 * module.q_proj.weight.detach())


def test_reads_in_function_transforms() -> None:
    module = made()
    own = {name: p.detach() for name, p in module.named_parameters()}

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self) -> Tensor:
            return self.inner.in_proj_weight.square().sum() + self.inner.in_proj_weight.chunk(3)[1].sum()

    def run(parameters: dict[str, Tensor]) -> Tensor:
        named = {f"inner.{name}": value for name, value in parameters.items()}
        return torch.func.functional_call(Penalty(), named, ())

    grads = torch.func.grad(run)(own)
    torch.testing.assert_close(grads["q_proj.weight"], 2 * own["q_proj.weight"])
    torch.testing.assert_close(grads["k_proj.weight"], 2 * own["k_proj.weight"] + 1)
    both = torch.func.vmap(run)({name: torch.stack([value, 2 * value]) for name, value in own.items()})
    torch.testing.assert_close(both, torch.stack([run(own), run({name: 2 * value for name, value in own.items()})]))


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_reads_without_memory(device: str) -> None:
    if device == "fake":
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            weight = MultiheadAttention(D, H).in_proj_weight
    else:
        weight = MultiheadAttention(D, H, device="meta").in_proj_weight
        assert type(torch.empty_like(weight).normal_()) is Tensor
    assert weight.shape == (3 * D, D)


# --- Assigning ----------------------------------------------------------------------------------------------------


@NAMES
def test_a_parameter_is_copied_into_the_children(name: str) -> None:
    module = made()
    given = nn.Parameter(torch.randn(joined(module, name).shape))
    expected = given.detach().clone()
    setattr(module, name, given)
    assert torch.equal(joined(module, name), expected)
    assert torch.equal(module.state_dict()[name], expected)
    assert len(list(module.parameters())) == 8
    assert all(p.is_leaf and p.requires_grad for p in module.parameters())
    given.data.zero_()  # a copy, which shares nothing
    assert torch.equal(joined(module, name), expected)
    module.q_proj.weight.data.zero_()
    assert module.k_proj.weight.any()


def test_a_parameter_for_one_child() -> None:
    module, given = made(kdim=KDIM), nn.Parameter(torch.randn(D, KDIM))
    module.k_proj_weight = given
    assert module.k_proj.weight is given
    assert torch.equal(module.state_dict()["k_proj_weight"], given)


@NAMES
def test_tying_to_another_split_module_raises(name: str) -> None:
    one, other = made(), made()
    before = joined(one, name)
    with pytest.raises(TypeError, match=f"{name}: only an nn.Parameter can be assigned"):
        setattr(one, name, getattr(other, name))
    assert torch.equal(joined(one, name), before)


@pytest.mark.parametrize(
    "value", [torch.zeros(3 * D, D), np.zeros((3 * D, D)), None, 0.0], ids=["tensor", "array", "None", "0"]
)
def test_anything_else_raises(value: Any) -> None:
    module = made()
    with pytest.raises(TypeError, match=r"in_proj_weight: only an nn\.Parameter can be assigned"):
        module.in_proj_weight = value
    assert module.in_proj_weight.any()


@pytest.mark.parametrize(
    ("flags", "name", "shape"),
    [
        ({}, "in_proj_weight", (D, 3 * D)),
        ({}, "in_proj_weight", (3 * D,)),
        ({}, "in_proj_bias", (D,)),
        ({}, "q_proj_weight", (D, D)),
        ({"bias": False}, "in_proj_bias", (3 * D,)),
        ({"kdim": KDIM}, "in_proj_weight", (3 * D, D)),
        ({"kdim": KDIM}, "k_proj_weight", (D, D)),
    ],
)
def test_a_parameter_that_does_not_fit_raises(flags: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    module = made(**flags)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=f"{name} must fit"):
        setattr(module, name, nn.Parameter(torch.zeros(shape)))
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_assigning_to_an_adapted_child_raises() -> None:
    module = made()
    module.k_proj = nn.Sequential(module.k_proj)
    with pytest.raises(ValueError, match=r"k_proj must be exactly an nn\.Linear"):
        module.in_proj_weight = nn.Parameter(torch.zeros(3 * D, D))


def test_registering_under_torchs_name_raises() -> None:
    module = made()
    with pytest.raises(KeyError, match="already exists"):
        module.register_parameter("in_proj_weight", nn.Parameter(torch.zeros(3 * D, D)))
    with pytest.raises(KeyError, match="already exists"):
        module.register_buffer("in_proj_bias", torch.zeros(3 * D))
    with pytest.raises(AttributeError):
        del module.in_proj_weight
    assert next(name for name, _ in module.named_parameters()) == "q_proj.weight"
