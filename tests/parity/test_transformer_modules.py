"""PyTorch's own module tests for four of its Transformer classes, with ours in their place.

As `test_common_modules.py` does for the attention: inputs and reference functions are those of `torch.testing`, the
checks are those of PyTorch's test_modules.py, once for each layout of our projections.
"""

from __future__ import annotations

import copy
import pickle
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from tests.parity.pair import LAYOUTS, fill, same
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_utils import freeze_rng_state, mock_wrapper

import headwise

COUNTS = {"TransformerEncoderLayer": 35, "TransformerDecoderLayer": 67, "TransformerEncoder": 35, "Transformer": 64}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
trainings = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
kinds = pytest.mark.parametrize("kind", COUNTS)
ORDERS = [
    pytest.param(kind, order, marks=[pytest.mark.slow] * (order == 2 and "Layer" not in kind))
    for kind in COUNTS
    for order in (1, 2)
]
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning"
)


# Of the samples of each test every so manieth: odd, so that all combinations of the options (cycles of 2) occur.
STEP = {torch.float32: 7, torch.float64: 11, torch.bfloat16: 13, torch.float16: 13}


BUILT = {}


class Sample:
    """One of torch's samples: how to construct, what to call with, and what the result must be."""

    def __init__(self, kind, number, given):
        self.kind = kind
        build, call = given.constructor_input, given.forward_input
        self.args, self.kwargs = build.args, dict(build.kwargs)
        self.inputs, self.masks, self.reference = call.args, dict(call.kwargs), given.reference_fn
        self.name = f"{kind} {number} {given.desc}"
        self.number = number

    def theirs(self, dtype=torch.float32, training=True):
        return self._copy(
            "theirs", lambda: fill(getattr(nn, self.kind)(*self.args, **self.kwargs).float()), dtype, training
        )

    def ours(self, dtype=torch.float32, training=True, fused_qkv=False):
        """Ours with the parameters of `theirs`; the prototype of a stack is ours too."""

        def build():
            if self.kind == "TransformerEncoder":
                module = headwise.TransformerEncoder(our_layer(self.args[0], fused_qkv), *self.args[1:])
            else:
                module = getattr(headwise, self.kind)(*self.args, **self.kwargs, fused_qkv=fused_qkv)
            module.float().load_state_dict(self.theirs().state_dict())
            return module

        return self._copy(f"ours {fused_qkv}", build, dtype, training)

    def _copy(self, which, build, dtype, training):
        """A copy of what was built before: samples of one number are constructed alike, whatever their dtype."""
        key = (self.kind, self.number, which)
        if key not in BUILT:
            BUILT[key] = build()
        return copy.deepcopy(BUILT[key]).to(dtype).train(training)

    @property
    def zeroes(self):
        """Whether the encoder in it sets padding to 0 if batched: post-norm, batch first, biases, no mask."""
        layer = self.kwargs
        return (
            self.kind == "Transformer"
            and layer["batch_first"]
            and layer["bias"]
            and not layer["norm_first"]
            and self.masks["src_key_padding_mask"] is not None
            and self.masks["src_mask"] is None
        )


def our_layer(layer, fused_qkv):
    attention = layer.self_attn
    return headwise.TransformerEncoderLayer(
        attention.embed_dim,
        attention.num_heads,
        layer.linear1.out_features,
        layer.dropout.p,
        layer.activation,
        layer.norm1.eps,
        attention.batch_first,
        layer.norm_first,
        layer.linear1.bias is not None,
        dtype=layer.linear1.weight.dtype,
        fused_qkv=fused_qkv,
    )


@lru_cache
def samples(kind, dtype=torch.float32, training=True, requires_grad=False):
    info = next(info for info in module_db if info.module_cls is getattr(nn, kind))
    with freeze_rng_state():
        torch.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training)
    return [Sample(kind, number, one) for number, one in enumerate(given)]


def a_few(kind, *args, **kwargs):
    """Every seventh sample: 7 shares no factor with the cycles of the options, so that all of them occur."""
    return samples(kind, *args, **kwargs)[::7]


def gradients(module):
    """Every parameter's gradient under torch's names, in either layout."""
    parameters = list(module.parameters())
    values = [its.data for its in parameters]
    for its in parameters:
        its.data = its.grad
    found = module.state_dict()
    for its, value in zip(parameters, values, strict=True):
        its.data = value
    return found


@pytest.mark.slow
@kinds
def test_the_samples(kind):
    """How many there are, that a few of them show every option, and that torch's have no NaN."""
    given = samples(kind, training=False)
    assert len(given) == COUNTS[kind]
    assert len(samples(kind)) == COUNTS[kind] + 4 * ("Encoder" in kind)  # and the fast path
    for sample in given:
        assert sample.theirs()(*sample.inputs, **sample.masks).isfinite().all(), sample.name
    few = given[::7]
    if kind != "TransformerEncoder":  # whose options are in the prototype
        for option in ("batch_first", "norm_first", "bias"):
            assert {one.kwargs[option] for one in few if option in one.kwargs} == {True, False}, option
    for mask in {name for one in given for name in one.masks}:
        assert {one.masks.get(mask) is None for one in few} == {True, False}, mask


@pytest.mark.slow
@layouts
@trainings
@dtypes
@kinds
def test_forward(kind, dtype, training, fused_qkv):
    """Against the reference function (a batch of one; eval without gradients), and against torch's module.

    Where an encoder sets padding to 0, torch does so in eval without gradients only: it is compared in that mode. One
    sample alone is not padded there, in torch and in ours, so that it is no batch of one.
    """
    for sample in samples(kind, dtype, training)[
        :: 1 if (training, dtype, fused_qkv) == (True, torch.float32, False) else STEP[dtype]
    ]:
        module = sample.ours(dtype, training, fused_qkv=fused_qkv)
        out = module(*sample.inputs, **sample.masks)
        assert out.dtype == dtype
        if sample.reference is not None and not sample.zeroes:
            want = sample.reference(module, *sample.inputs, **sample.masks)
            same(out, want, TOLERANCE[dtype] / 10, sample.name)
        theirs = sample.theirs(dtype, training and not sample.zeroes)
        with torch.set_grad_enabled(not sample.zeroes):
            want = theirs(*sample.inputs, **sample.masks)
            if dtype.itemsize == 2:  # the two round elsewhere: judge both by float64
                exact = copy.deepcopy(theirs).double()(*(x.double() for x in sample.inputs), **sample.masks)
                floor = 4 * torch.finfo(dtype).eps * exact.abs().max()
                assert (out - exact).abs().max() <= 2 * (want - exact).abs().max() + floor, sample.name
            else:
                same(out, want, TOLERANCE[dtype], sample.name)


@layouts
@trainings
@kinds
def test_gradients_are_torchs(kind, training, fused_qkv):
    """Of every input and every parameter, in float64."""
    for sample in samples(kind, torch.float64, training)[::7]:
        if sample.zeroes:
            continue  # torch's gradient is that of computed padding, in eval too: see test_transformer.py
        found = []
        for module in (
            sample.ours(torch.float64, training, fused_qkv=fused_qkv),
            sample.theirs(torch.float64, training),
        ):
            inputs = [x.clone().requires_grad_() for x in sample.inputs]
            out = module(*inputs, **sample.masks)
            out.backward(torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2)))
            found.append({str(n): x.grad for n, x in enumerate(inputs)} | gradients(module))
        mine, its = found
        assert list(mine) == list(its)
        for name, want in its.items():
            same(mine[name], want, 1e-10, f"{sample.name}: {name}")


@pytest.mark.slow
@layouts
@pytest.mark.parametrize(("kind", "order"), ORDERS)
def test_gradients_numerically(kind, order, fused_qkv):
    """In float64; second derivatives too, which torch's own tests leave out for these classes."""
    for sample in samples(kind, torch.float64, requires_grad=True)[:: 23 if order == 1 else 33]:
        module = sample.ours(torch.float64, fused_qkv=fused_qkv)
        names = [name for name, _ in module.named_parameters()]
        number = len(sample.inputs)

        def call(*tensors, names=names, number=number, module=module, sample=sample):
            parameters = dict(zip(names, tensors[number:], strict=True))
            return functional_call(module, parameters, tensors[:number], sample.masks)

        check = gradcheck if order == 1 else gradgradcheck
        assert check(call, (*sample.inputs, *module.parameters()), fast_mode=True), sample.name


@layouts
@pytest.mark.parametrize("kind", [kind for kind in COUNTS if kind != "TransformerEncoder"])
def test_factory_kwargs(kind, fused_qkv):
    """`device` and `dtype` reach every parameter, and none is made elsewhere first and moved."""
    for sample in a_few(kind):
        for device, dtype in (("cpu", torch.float64), ("meta", torch.bfloat16)):
            made = mock_wrapper(nn.Parameter.__new__)
            with patch.object(nn.Parameter, "__new__", made):
                module = getattr(headwise, kind)(
                    *sample.args, **sample.kwargs, device=device, dtype=dtype, fused_qkv=fused_qkv
                )
            assert made.mock.call_count >= len({id(p) for p in module.parameters()})
            assert {(p.device.type, p.dtype) for p in module.parameters()} == {(device, dtype)}, sample.name
        with torch.device("meta"):
            inside = getattr(headwise, kind)(*sample.args, **sample.kwargs, fused_qkv=fused_qkv)
        assert {p.device.type for p in inside.parameters()} == {"meta"}, sample.name


@layouts
@trainings
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@kinds
def test_pickle_and_copy(kind, copied, training, fused_qkv):
    """The copy gives the same numbers, is in the same mode, and has its own parameters."""
    for sample in a_few(kind, training=training)[::3]:
        module = sample.ours(training=training, fused_qkv=fused_qkv)
        twice = copied(module)
        before = module(*sample.inputs, **sample.masks)
        assert torch.equal(twice(*sample.inputs, **sample.masks), before), sample.name
        assert [m.training for m in twice.modules()] == [training for _ in module.modules()]
        assert type(twice) is type(module)
        assert repr(twice) == repr(module)
        assert list(twice.state_dict()) == list(module.state_dict())
        fill(twice, seed=9)
        assert torch.equal(module(*sample.inputs, **sample.masks), before), sample.name
        assert not torch.equal(twice(*sample.inputs, **sample.masks), before), sample.name


@layouts
@kinds
def test_through_a_file(kind, fused_qkv, tmp_path):
    """State dict, read back with weights_only; and the whole module."""
    for sample in a_few(kind)[::3]:
        module = sample.ours(fused_qkv=fused_qkv)
        want = module(*sample.inputs, **sample.masks)
        torch.save(module.state_dict(), tmp_path / "state.pt")
        torch.save(module, tmp_path / "module.pt")
        fresh = fill(sample.ours(fused_qkv=fused_qkv), seed=9)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
        for again in (fresh, torch.load(tmp_path / "module.pt", weights_only=False)):
            assert torch.equal(again(*sample.inputs, **sample.masks), want), sample.name


def spaced(tensor):
    """The same numbers, in every second place of memory."""
    wide = tensor.detach().new_empty(*tensor.shape, 2)
    wide[..., 0] = tensor.detach()
    apart = wide[..., 0]
    assert not apart.is_contiguous()
    return apart.requires_grad_(tensor.requires_grad)


@layouts
@trainings
@kinds
def test_non_contiguous_tensors(kind, training, fused_qkv):
    """Inputs, masks and the outgoing gradient may lie anywhere in memory: same numbers, same gradients."""
    for sample in samples(kind, training=training)[::9]:
        module = sample.ours(training=training, fused_qkv=fused_qkv)

        def everything(change, module=module, sample=sample):
            module.zero_grad()
            inputs = [change(x.detach().clone().requires_grad_()) for x in sample.inputs]
            masks = {name: None if mask is None else change(mask) for name, mask in sample.masks.items()}
            out = module(*inputs, **masks)
            out.backward(change(torch.randn(out.shape, generator=torch.Generator().manual_seed(0))))
            return [out, *(x.grad for x in inputs), *(p.grad for p in module.parameters())]

        for mine, its in zip(everything(spaced), everything(lambda t: t), strict=True):
            same(mine, its, 1e-5, sample.name)


@layouts
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@kinds
def test_moves_between_dtypes(kind, dtype, fused_qkv):
    """`.to`: in place, every parameter, and the call follows; an input of the old dtype is refused by name."""
    for sample in a_few(kind):
        module = sample.ours(fused_qkv=fused_qkv)
        want = module(*sample.inputs, **sample.masks)
        assert module.to(dtype) is module
        assert {p.dtype for p in module.parameters()} == {dtype}, sample.name
        out = module(*(x.to(dtype) for x in sample.inputs), **sample.masks)
        assert out.dtype == dtype
        error = {torch.float64: 1e-5, torch.float16: 5e-2, torch.bfloat16: 3e-1}[dtype]
        assert (out - want).abs().max() < error * want.abs().max(), sample.name
        with pytest.raises(ValueError, match="must have the parameters' dtype"):
            module(*sample.inputs, **sample.masks)


@pytest.mark.slow
@layouts
@kinds
def test_moves_to_meta_and_back(kind, fused_qkv):
    """On meta, names and shapes only; `.to_empty` and a state dict bring it back."""
    for sample in a_few(kind):
        module = sample.ours(fused_qkv=fused_qkv)
        want, state = module(*sample.inputs, **sample.masks), copy.deepcopy(module.state_dict())
        shapes = {key: value.shape for key, value in module.named_parameters()}
        module.to("meta")
        assert {key: value.shape for key, value in module.named_parameters()} == shapes
        masks = {key: None if mask is None else mask.to("meta") for key, mask in sample.masks.items()}
        out = module(*(x.to("meta") for x in sample.inputs), **masks)
        assert (out.shape, out.device.type) == (want.shape, "meta")
        module.to_empty(device="cpu").load_state_dict(state)
        assert torch.equal(module(*sample.inputs, **sample.masks), want), sample.name


@kinds
def test_repr(kind):
    """Children by torch's names, one line each; what each attention is says so."""
    for sample in a_few(kind):
        text = repr(sample.ours())
        assert text.startswith(f"{kind}(\n"), sample.name
        for name, child in sample.theirs().named_children():
            assert f"  ({name}): {type(child).__name__}(" in text, (sample.name, name)
        assert text.count("MultiheadAttention(") == repr(sample.theirs()).count("out_proj")
        assert "fused_qkv=True" in repr(sample.ours(fused_qkv=True))
        assert "fused_qkv" not in text


@layouts
@kinds
def test_train_and_eval_flags(kind, fused_qkv):
    """`.train` and `.eval` reach every module; the two modes differ by dropout only, to the bit."""
    for sample in a_few(kind):
        module = sample.ours(fused_qkv=fused_qkv)
        outs = []
        for training in (True, False):
            assert module.train(training) is module
            assert {m.training for m in module.modules()} == {training}
            outs.append(module(*sample.inputs, **sample.masks))
        assert torch.equal(*outs), sample.name
        with torch.no_grad():  # no hidden path: torch's numbers differ here in the last bits
            assert torch.equal(module(*sample.inputs, **sample.masks), outs[0]), sample.name
        for child in module.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.5
        torch.manual_seed(0)
        dropped = module.train()(*sample.inputs, **sample.masks)
        assert not torch.equal(dropped, outs[0]), sample.name
        assert torch.equal(module.eval()(*sample.inputs, **sample.masks), outs[0]), sample.name


@layouts
@kinds
def test_forward_is_repeatable_and_changes_nothing(kind, fused_qkv):
    for sample in a_few(kind):
        module = sample.ours(fused_qkv=fused_qkv)
        inputs = [x.clone() for x in sample.inputs]
        masks = {key: None if mask is None else mask.clone() for key, mask in sample.masks.items()}
        state = copy.deepcopy(module.state_dict())
        first, second = (module(*sample.inputs, **sample.masks) for _ in range(2))
        assert torch.equal(first, second), sample.name
        assert all(torch.equal(a, b) for a, b in zip(sample.inputs, inputs, strict=True)), sample.name
        assert all(mask is None or torch.equal(mask, masks[key]) for key, mask in sample.masks.items()), sample.name
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items()), sample.name
