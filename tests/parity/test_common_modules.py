"""PyTorch's own module tests, with our class in the place of theirs.

The inputs and the reference functions are those that `torch.testing` holds for `nn.MultiheadAttention`; the checks are
those of PyTorch's test_modules.py, once for each of our layouts.
"""

from __future__ import annotations

import copy
import pickle
from unittest.mock import patch

import pytest
import torch
from tests.parity.pair import LAYOUTS, fill, same, same_pair, twin
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_utils import freeze_rng_state, mock_wrapper

from headwise import MultiheadAttention

INFO = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
trainings = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def samples(dtype=torch.float32, training=True, requires_grad=False):
    """torch's samples as (name, constructor keywords, inputs, masks, reference function)."""
    with freeze_rng_state():
        torch.manual_seed(0)
        given = INFO.module_inputs_func(INFO, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training)
    for sample in given:
        build, call = sample.constructor_input, sample.forward_input
        assert build.args == ()
        flags = [name for name, on in build.kwargs.items() if on is True]
        masks = [name for name, mask in call.kwargs.items() if mask is not None]
        yield "+".join(flags + masks), dict(build.kwargs), call.args, dict(call.kwargs), sample.reference_fn


def half_of_the_samples(*args, **kwargs):
    """Those of one memory order: unbatched, it makes no difference, which `test_forward` holds."""
    return (sample for sample in samples(*args, **kwargs) if sample[1]["batch_first"])


def built(kwargs, fused_qkv, dtype=torch.float32, training=True):
    module = fill(MultiheadAttention(**kwargs, fused_qkv=fused_qkv))
    return module.to(dtype).train(training)


def test_the_samples():
    """What they hold: 64 calls of one unbatched sample, and in none a query without a key, so torch's have no NaN."""
    given = list(samples())
    assert len({name for name, *_ in given}) == len(given) == 64
    for name, kwargs, inputs, masks, _ in given:
        assert [tuple(x.shape) for x in inputs] == [(3, 3)] * 3
        blocked = torch.zeros(3, 3, 3, dtype=torch.bool)
        for mask in masks.values():
            blocked = blocked if mask is None else blocked | mask
        assert not blocked.all(dim=-1).any()
        out, weights = nn.MultiheadAttention(**kwargs)(*inputs, **masks)
        assert out.isfinite().all(), name
        assert weights.isfinite().all(), name


@pytest.mark.slow
@layouts
@trainings
@dtypes
def test_forward(dtype, training, fused_qkv):
    """Against the reference function, which adds a batch of one; and against torch's module."""
    for name, kwargs, inputs, masks, reference in samples(dtype, training):
        module = built(kwargs, fused_qkv, dtype, training)
        outputs = module(*inputs, **masks)
        for mine, its in zip(outputs, reference(module, *inputs, **masks), strict=True):
            same(mine, its, TOLERANCE[dtype] / 10, name)
        theirs = nn.MultiheadAttention(**kwargs).to(dtype).train(training)
        theirs.load_state_dict(module.state_dict())
        if dtype == torch.float16:  # torch rounds the scores to 16 bit, headwise does not: judge both by float64
            exact = copy.deepcopy(theirs).double()(*(x.double() for x in inputs), **masks)
            for mine, its, want in zip(outputs, theirs(*inputs, **masks), exact, strict=True):
                floor = 2 * torch.finfo(dtype).eps * want.abs().max()
                assert (mine - want).abs().max() <= 2 * (its - want).abs().max() + floor, name
        else:
            for mine, its in zip(outputs, theirs(*inputs, **masks), strict=True):
                same(mine, its, TOLERANCE[dtype], name)


@layouts
@dtypes
def test_factory_kwargs(dtype, fused_qkv):
    """`device` and `dtype` reach every parameter, and no parameter is made elsewhere first and moved."""
    for name, kwargs, *_ in half_of_the_samples():
        for device in ("cpu", "meta"):
            made = mock_wrapper(nn.Parameter.__new__)
            with patch.object(nn.Parameter, "__new__", made):
                module = MultiheadAttention(**kwargs, device=device, dtype=dtype, fused_qkv=fused_qkv)
            assert made.mock.call_count >= len(list(module.parameters()))
            found = list(module.named_parameters()) + list(module.named_buffers())
            assert {(p.device.type, p.dtype) for _, p in found} == {(device, dtype)}, name


@layouts
def test_device_context(fused_qkv):
    """A surrounding `torch.device` decides where no `device` is given; a given one wins."""
    for name, kwargs, *_ in samples():
        with torch.device("meta"):
            inside = MultiheadAttention(**kwargs, fused_qkv=fused_qkv)
            told = MultiheadAttention(**kwargs, device="cpu", fused_qkv=fused_qkv)
        assert {p.device.type for p in inside.parameters()} == {"meta"}, name
        assert {p.device.type for p in told.parameters()} == {"cpu"}, name


@layouts
def test_default_dtype(fused_qkv):
    torch.set_default_dtype(torch.float64)
    module = MultiheadAttention(6, 3, add_bias_kv=True, fused_qkv=fused_qkv)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert module(*[torch.randn(7, 6)] * 3)[0].dtype == torch.float64


@layouts
@trainings
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
def test_pickle_and_copy(copied, training, fused_qkv):
    """The copy gives the same numbers, is in the same mode, and has its own parameters, unless it is a shallow one."""
    for name, kwargs, inputs, masks, _ in half_of_the_samples(training=training):
        module = built(kwargs, fused_qkv, training=training)
        twice = copied(module)
        for mine, its in zip(twice(*inputs, **masks), module(*inputs, **masks), strict=True):
            assert torch.equal(mine, its), name
        assert twice.training == training
        assert type(twice) is MultiheadAttention
        assert list(twice.state_dict()) == list(module.state_dict())
        if copied is not copy.copy:
            before = module(*inputs, **masks)[0]
            fill(twice, seed=9)
            assert torch.equal(module(*inputs, **masks)[0], before), name
            assert not torch.equal(twice(*inputs, **masks)[0], before), name


@layouts
def test_copies_keep_what_was_changed(fused_qkv):
    """Mode, dropout, frozen parameters, hooks of children and the once-only warning travel along."""
    module = MultiheadAttention(6, 3, 0.5, fused_qkv=fused_qkv)
    module.out_proj.weight.requires_grad_(False)
    module.attn_dropout.eval()
    for twice in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twice.dropout == 0.5
        assert [p.requires_grad for p in twice.parameters()] == [p.requires_grad for p in module.parameters()]
        assert (twice.training, twice.attn_dropout.training) == (True, False)
        before = copy.deepcopy(module.state_dict())
        twice.reset_parameters()
        for child in twice.children():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert not torch.equal(twice.state_dict()["in_proj_weight"], before["in_proj_weight"])
        assert twice.extra_repr() == module.extra_repr()
        assert twice.out_proj.weight is not module.out_proj.weight


def spaced(tensor):
    """The same numbers, in every second place of memory."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    wide = tensor.detach().new_empty(*tensor.shape[:-1], tensor.shape[-1], 2)
    wide[..., 0] = tensor.detach()
    apart = wide[..., 0]
    assert not apart.is_contiguous() or apart.numel() <= 1
    return apart.requires_grad_(tensor.requires_grad)


@layouts
@trainings
def test_non_contiguous_tensors(training, fused_qkv):
    """Inputs, masks and the outgoing gradient may lie anywhere in memory: same numbers, same gradients."""
    for name, kwargs, inputs, masks, _ in samples(training=training, requires_grad=True):
        module = built(kwargs, fused_qkv, training=training)

        def everything(inputs, masks, change, module=module):
            module.zero_grad()
            out, weights = module(*inputs, **masks)
            generator = torch.Generator().manual_seed(0)
            grads = [change(torch.randn(x.shape, generator=generator)) for x in (out, weights)]
            torch.autograd.backward([out, weights], grads)
            return [out, weights, *(x.grad for x in inputs), *(p.grad for p in module.parameters())]

        want = everything([x.detach().clone().requires_grad_() for x in inputs], masks, lambda t: t)
        apart = [spaced(x) for x in inputs]
        apart_masks = {key: None if mask is None else spaced(mask) for key, mask in masks.items()}
        for mine, its in zip(everything(apart, apart_masks, spaced), want, strict=True):
            same(mine, its, 1e-5, name)


def differentiable(module, masks, need_weights):
    """The call as a function of inputs and parameters, for gradcheck."""
    names = [name for name, _ in module.named_parameters()]

    def call(*tensors):
        parameters = dict(zip(names, tensors[3:], strict=True))
        out, weights = functional_call(module, parameters, tensors[:3], masks | {"need_weights": need_weights})
        return (out, weights) if need_weights else out

    return call


@layouts
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("order", [1, 2], ids=["grad", "gradgrad"])
def test_gradients(order, need_weights, fused_qkv):
    """Numerically, in float64, with respect to the inputs and every parameter; second derivatives too."""
    check = gradcheck if order == 1 else gradgradcheck
    for name, kwargs, inputs, masks, _ in half_of_the_samples(torch.float64, requires_grad=True):
        both, no_mask = (
            all(mask is not None for mask in masks.values()),
            not any(mask is not None for mask in masks.values()),
        )
        if not kwargs["bias"] or not (both or no_mask):
            continue  # without bias: see the batch below; one mask alone hides the same keys as both
        module = built(kwargs, fused_qkv, torch.float64)
        tensors = (*inputs, *module.parameters())
        assert check(differentiable(module, masks, need_weights), tensors, fast_mode=True), name


@layouts
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("order", [1, 2], ids=["grad", "gradgrad"])
def test_gradients_of_a_batch(order, need_weights, fused_qkv):
    """The same for a batch with a padded sample, a query without a key, and unlike widths."""
    module = built({"embed_dim": 4, "num_heads": 2, "kdim": 3, "vdim": 5, "bias": False}, fused_qkv, torch.float64)
    inputs = [
        torch.randn(n, 2, width, dtype=torch.float64, requires_grad=True) for n, width in ((3, 4), (2, 3), (2, 5))
    ]
    masks = {
        "key_padding_mask": torch.tensor([[False, True], [True, True]]),
        "attn_mask": torch.tensor([[False, False], [True, False], [False, True]]),
    }
    check = gradcheck if order == 1 else gradgradcheck
    assert check(differentiable(module, masks, need_weights), (*inputs, *module.parameters()), fast_mode=True)


@layouts
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_moves_between_dtypes(dtype, fused_qkv):
    """`.to`, `.half`, `.double`: in place, every parameter, and the call follows; back again, torch's numbers."""
    for name, kwargs, inputs, masks, _ in half_of_the_samples():
        module = built(kwargs, fused_qkv)
        theirs = nn.MultiheadAttention(**kwargs)
        theirs.load_state_dict(module.state_dict())
        moves = {torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}
        assert module.to(dtype) is module
        getattr(theirs, moves[dtype])()
        assert {p.dtype for p in module.parameters()} == {dtype}, name
        moved = [x.to(dtype) for x in inputs]
        out, weights = module(*moved, **masks)
        assert (out.dtype, weights.dtype) == (dtype, dtype)
        for mine, its in zip((out, weights), theirs(*moved, **masks), strict=True):
            same(mine, its, TOLERANCE[dtype], name)
        with pytest.raises(ValueError, match="query must have the parameters' dtype"):
            module(*inputs, **masks)
        for mine, its in zip(module.float()(*inputs, **masks), theirs.float()(*inputs, **masks), strict=True):
            same(mine, its, 1e-5, name)


@layouts
def test_moves_to_meta_and_back(fused_qkv):
    """`.to("meta")` keeps names and shapes and computes shapes only; `.to_empty` and a state dict bring it back."""
    for name, kwargs, inputs, masks, _ in half_of_the_samples():
        module = built(kwargs, fused_qkv)
        want, state = module(*inputs, **masks), copy.deepcopy(module.state_dict())
        shapes = {key: value.shape for key, value in module.named_parameters()}
        module.to("meta")
        assert {key: value.shape for key, value in module.named_parameters()} == shapes
        assert {p.device.type for p in module.parameters()} == {"meta"}
        on_meta = {key: None if mask is None else mask.to("meta") for key, mask in masks.items()}
        out, weights = module(*(x.to("meta") for x in inputs), **on_meta)
        assert (out.shape, weights.shape) == (want[0].shape, want[1].shape)
        assert (out.device.type, weights.device.type) == ("meta", "meta")
        module.to_empty(device="cpu").load_state_dict(state)
        for mine, its in zip(module(*inputs, **masks), want, strict=True):
            assert torch.equal(mine, its), name


@layouts
@pytest.mark.parametrize("swap", [True, False], ids=["swap", "set"])
def test_moves_with_swapped_tensors(swap, fused_qkv):
    """Both ways that torch has of moving parameters: `torch.__future__.set_swap_module_params_on_conversion`."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for name, kwargs, inputs, masks, _ in half_of_the_samples():
            module = built(kwargs, fused_qkv)
            held = [id(parameter) for parameter in module.parameters()]
            with torch.no_grad():  # a graph would hold on to the parameters, which then cannot be swapped
                want = module(*inputs, **masks)
                module.double().float()
                assert [id(parameter) for parameter in module.parameters()] == held
                module.load_state_dict(copy.deepcopy(module.state_dict()))
                for mine, its in zip(module(*inputs, **masks), want, strict=True):
                    same(mine, its, 1e-6, name)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@layouts
def test_save_and_load(fused_qkv, tmp_path):
    """The state dict through a file, and the whole module."""
    for name, kwargs, inputs, masks, _ in half_of_the_samples():
        module = built(kwargs, fused_qkv)
        want = module(*inputs, **masks)
        torch.save(module.state_dict(), tmp_path / "state.pt")
        torch.save(module, tmp_path / "module.pt")
        fresh = MultiheadAttention(**kwargs, fused_qkv=fused_qkv)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
        for again in (fresh, torch.load(tmp_path / "module.pt", weights_only=False)):
            for mine, its in zip(again(*inputs, **masks), want, strict=True):
                assert torch.equal(mine, its), name


@layouts
def test_repr(fused_qkv):
    """It can be printed, and says the arguments that torch's hides."""
    for name, kwargs, *_ in samples():
        text = repr(MultiheadAttention(**kwargs, fused_qkv=fused_qkv))
        assert str(MultiheadAttention(**kwargs, fused_qkv=fused_qkv)) == text
        assert text.startswith("MultiheadAttention(\n"), name
        assert f"num_heads=3, batch_first={kwargs['batch_first']}" in text
        assert ("bias=False" in text) == (not kwargs["bias"])
        assert ("add_bias_kv=True" in text) == kwargs["add_bias_kv"]
        assert ("add_zero_attn=True" in text) == kwargs["add_zero_attn"]


@layouts
def test_train_and_eval_differ(fused_qkv):
    """Only by dropout: without it the two are bit for bit the same, in torch's samples and in a batch."""
    for name, kwargs, inputs, masks, _ in samples():
        module = built(kwargs, fused_qkv)
        for trained, evaluated in zip(module.train()(*inputs, **masks), module.eval()(*inputs, **masks), strict=True):
            assert torch.equal(trained, evaluated), name
    dropping = MultiheadAttention(6, 3, dropout=0.5, fused_qkv=fused_qkv)
    x = torch.randn(7, 5, 6)
    assert not torch.equal(dropping.train()(x, x, x)[0], dropping.eval()(x, x, x)[0])


@layouts
def test_forward_is_repeatable_and_changes_nothing(fused_qkv):
    """Two calls give the same bits, inputs and masks stay as they were, and no state appears."""
    for name, kwargs, inputs, masks, _ in samples():
        module = built(kwargs, fused_qkv)
        given = [x.clone() for x in inputs]
        given_masks = {key: None if mask is None else mask.clone() for key, mask in masks.items()}
        state = copy.deepcopy(module.state_dict())
        first, second = module(*inputs, **masks), module(*inputs, **masks)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), name
        assert all(torch.equal(a, b) for a, b in zip(inputs, given, strict=True)), name
        assert all(mask is None or torch.equal(mask, given_masks[key]) for key, mask in masks.items()), name
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items()), name


def test_twin_of_each_sample():
    """The shared helper gives torch's numbers for torch's samples."""
    for _, kwargs, inputs, masks, _ in samples():
        theirs = fill(nn.MultiheadAttention(**kwargs))
        same_pair(twin(theirs)(*inputs, **masks), theirs(*inputs, **masks))
