"""What tools make of torch's attention and Transformer layers today, each fault beside what they make of ours.

As in test_pitfalls.py: the numbers are the rows of the study of torch 2.13.0, p# is pytorch/pytorch#, and each test
first asserts torch's behaviour. Tools that are not part of torch (peft, torchao, onnx) are tried where they are
installed, and stood in for by hand where that says the same.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import pytest
import torch
from tests.compiling import Counter
from tests.parity.pair import LAYOUTS, causal_mask, fill, pair, same, same_pair
from tests.parity.test_pitfalls_layers import (
    CHILDREN,
    RIGHT,
    B,
    D,
    H,
    L,
    Lora,
    M,
    S,
    batch,
    decoder,
    decoder_layer,
    evaluated,
    layer,
    modes,
    stack,
    trained,
    upgraded,
)
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import is_parametrized

import headwise
from headwise import MultiheadAttention

# torch says so once a process, wherever it nests first
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
NAN = float("nan")

layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
each_child = pytest.mark.parametrize("name", CHILDREN)


def old_names(call, *args, **kwargs):
    """torch.ao and the old exporter say at every call that they are deprecated, of which we know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


# Hooks, adapters, pruning


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", [layer, decoder_layer], ids=["encoder layer", "decoder layer"])
def test_22_hooks_on_out_proj_in_a_layer(build, training):
    """p#78109 (p#128413 is mended: hooks on the layer's own linears are called)."""
    theirs = build()
    x = batch()

    def calls(model):
        found, hooks = [], []
        for name in ("self_attn.out_proj", "linear1"):
            child = model.train(training).get_submodule(name)
            hooks += [
                child.register_forward_hook(lambda *_, name=name: found.append(name)),
                child.register_full_backward_hook(lambda *_, name=name: found.append(f"{name} backward")),
            ]
        inputs = [x] if build is layer else [x, batch(S)]
        model(*inputs).sum().backward()
        with torch.no_grad():
            model(*inputs)
        for hook in hooks:
            hook.remove()
        return found

    assert calls(theirs) == ["linear1", "linear1 backward", "linear1"]
    out = "self_attn.out_proj"
    backward = ["linear1 backward", f"{out} backward"]
    assert calls(upgraded(theirs)) == [out, "linear1", *backward, out, "linear1"]


@pytest.mark.parametrize("widths", [{}, {"kdim": 13, "vdim": 17}], ids=["one width", "kdim"])
@each_child
def test_26_lora_by_hand(name, widths):
    """helicalAI/helical#405, Baijiong-Lin/LoRA-Torch#3, huggingface/peft#761: accepted on `out_proj` and never called.

    The others are not there to be found; peft, with a class of its own for torch's attention, refuses other widths.
    """
    theirs, ours = pair(D, H, batch_first=True, **widths)
    x = batch()
    inputs = (x, batch(S, theirs.kdim), batch(S, theirs.vdim))
    without = theirs(*inputs)
    if name == "out_proj":
        theirs.out_proj = Lora(theirs.out_proj)
        out, weights = theirs(*inputs)
        same_pair((out, weights), without)
        out.sum().backward()
        assert theirs.out_proj.up.grad is None
    else:
        assert name not in dict(theirs.named_modules())
    adapter = Lora(getattr(ours, name))
    setattr(ours, name, adapter)
    ours.requires_grad_(False)
    adapter.up.requires_grad_(), adapter.down.requires_grad_()
    first = ours(*inputs)[0]
    assert not torch.allclose(first, without[0], atol=0.01)
    first.square().sum().backward()
    assert adapter.up.grad.abs().sum() > 0
    assert adapter.down.grad.abs().sum() > 0
    for training, need_weights in itertools.product((True, False), (True, False)):
        same(ours.train(training)(*inputs, need_weights=need_weights)[0], first, 1e-5)
    merged = copy.deepcopy(adapter.base)
    with torch.no_grad():
        merged.weight += adapter.up @ adapter.down
    setattr(ours, name, merged)
    same(ours(*inputs)[0], first, 1e-4)


@pytest.mark.tools
@pytest.mark.filterwarnings("ignore")
def test_26_lora_of_peft():
    """The same with peft."""
    import peft

    def adapted(model, names):
        config = peft.LoraConfig(r=2, target_modules=names, lora_alpha=4)
        made = peft.inject_adapter_in_model(config, model)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        return made

    x = batch()
    theirs = layer()
    for names in (["q_proj", "v_proj"], ["k_proj"]):
        with pytest.raises(ValueError, match="not found in the base model"):
            adapted(copy.deepcopy(theirs), names)
    without = trained(theirs, x)
    same(trained(adapted(copy.deepcopy(theirs), ["out_proj"]), x), without, 1e-5)
    passed_by = adapted(copy.deepcopy(theirs), ["linear1"])
    assert not torch.allclose(trained(passed_by, x), without, atol=0.01)
    same(evaluated(passed_by, x), without, 1e-5)
    ours = adapted(upgraded(theirs), [*CHILDREN, "linear1"])
    assert sum("lora_A" in name for name, _ in ours.named_parameters()) == 5
    want = trained(ours, x)
    assert not torch.allclose(want, without, atol=0.01)
    for got in modes(ours, x):
        same(got, want, 1e-5)


def steps(module, count=3):
    """Train for a few steps on one batch; the losses."""
    torch.manual_seed(2)
    x = batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = module(x, x, x)[0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def halve(child):
    prune.l1_unstructured(child, "weight", amount=0.5)


@layouts
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("tool", [halve, nn.utils.weight_norm], ids=["prune", "weight_norm"])
def test_27_tools_that_hook_out_proj(tool, fused_qkv):
    """p#78109: their hook is never called, so the second step goes through the first one's graph."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    tool(theirs.out_proj)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        steps(theirs)
    tool(ours.out_proj)
    before = {name: parameter.detach().clone() for name, parameter in ours.out_proj.named_parameters()}
    losses = steps(ours, 5)
    assert losses == sorted(losses, reverse=True)
    assert all(not torch.equal(before[name], parameter) for name, parameter in ours.out_proj.named_parameters())
    with torch.no_grad():
        ours(*(batch(),) * 3)
    if tool is halve:
        hidden = ours.out_proj.weight_mask == 0
        assert int(hidden.sum()) == D * D // 2
        assert ours.out_proj.weight[hidden].eq(0).all()
        assert torch.equal(ours.out_proj.weight, ours.out_proj.weight_orig * ours.out_proj.weight_mask)
    else:
        norms = ours.out_proj.weight.norm(dim=1, keepdim=True)
        same(norms, ours.out_proj.weight_g.abs(), 1e-5)


def test_27_a_pruned_weight_goes_stale():
    """After a step torch goes on with the matrix of the moment when it was pruned; ours has the new one."""
    theirs, ours = pair(D, H, batch_first=True)
    x = batch()
    for module in (theirs, ours):
        halve(module.out_proj)
        before = module(x, x, x)[0].detach()
        with torch.no_grad():
            module.out_proj.weight_orig.mul_(2)
        after = module(x, x, x)[0].detach()
        bias = module.out_proj.bias.detach()
        same(after, before if module is theirs else 2 * (before - bias) + bias, 1e-5)


@layouts
def test_27_the_old_spectral_norm_never_trains_out_proj(fused_qkv):
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=fused_qkv)
    for module in (theirs, ours):
        old_names(nn.utils.spectral_norm, module.out_proj)
        steps(module)
    assert theirs.out_proj.weight_orig.grad is None
    assert ours.out_proj.weight_orig.grad.abs().sum() > 0


@pytest.mark.parametrize("tool", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spec"])
def test_27_parametrizations_work_in_both(tool):
    theirs, ours = pair(D, H, batch_first=True)
    losses = []
    for module in (theirs, ours):
        torch.manual_seed(3)
        tool(module.out_proj)
        assert is_parametrized(module.out_proj, "weight")
        losses.append(steps(module))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_27_pruning_the_input_projections():
    """torch: of the packed matrix only. Ours: of each one, or of the packed one in the fused layout."""
    theirs, ours = pair(D, H, batch_first=True, fused_qkv=True)
    for module in (theirs, ours):
        prune.l1_unstructured(module, "in_proj_weight", amount=0.5)
    assert steps(ours) == pytest.approx(steps(theirs), rel=1e-4)
    theirs, ours = pair(D, H, batch_first=True)
    with pytest.raises(AttributeError):
        halve(theirs.q_proj)
    halve(ours.q_proj)
    assert len(set(steps(ours))) == 3
    assert int((ours.q_proj.weight == 0).sum()) == D * D // 2


# Quantization


def dynamic(model):
    return old_names(torch.ao.quantization.quantize_dynamic, model.eval(), {nn.Linear}, dtype=torch.qint8)


def quantized_children(model):
    """The names of what runs in int8."""
    dynamic_linear = torch.ao.nn.quantized.dynamic.Linear
    return [name for name, module in model.named_modules() if type(module) is dynamic_linear]


@pytest.mark.parametrize("build", [layer, stack, decoder_layer], ids=["layer", "stack", "decoder layer"])
def test_28_quantize_dynamic_of_layers(build):
    """p#82443, p#32764, intel/neural-compressor#1416: converted, and then evaluation fails; decoders run."""
    theirs = build()
    ours = upgraded(theirs)
    inputs = (batch(),) if build is not decoder_layer else (batch(), batch(S))
    want = evaluated(theirs, *inputs)
    eight_bits = dynamic(theirs)
    attentions = sum(isinstance(module, nn.MultiheadAttention) for module in theirs.modules())
    feed_forwards = 2 * (2 if build is stack else 1)
    assert len(quantized_children(eight_bits)) == feed_forwards
    if build is decoder_layer:
        assert evaluated(eight_bits, *inputs).isfinite().all()
    else:
        with pytest.raises(AttributeError, match="'function' object has no attribute 'device'"):
            evaluated(eight_bits, *inputs)

    converted = dynamic(ours)
    assert len(quantized_children(converted)) == feed_forwards + 4 * attentions
    got = evaluated(converted, *inputs)
    assert 0 < (got - want).abs().max() < 0.15 * want.abs().max()


def test_28b_quantize_dynamic_of_attention():
    """p#118165, neural-compressor#1416: nothing of torch's attention is converted; of ours all four projections."""
    theirs, ours = pair(D, H, batch_first=True)
    x = batch()
    assert quantized_children(dynamic(theirs)) == []
    converted = dynamic(ours)
    assert quantized_children(converted) == list(CHILDREN)
    got, want = evaluated(converted, x, x, x), evaluated(theirs, x, x, x)
    for one, other in zip(got, want, strict=True):
        assert 0 < (one - other).abs().max() < 0.1 * other.abs().max()
    fused = pair(D, H, batch_first=True, fused_qkv=True)[1]
    assert quantized_children(dynamic(fused)) == ["out_proj"]  # whose cure is split_projections()
    fused.split_projections()
    assert quantized_children(dynamic(fused)) == list(CHILDREN)


def test_29_prepare_qat():
    """p#118165: quantization-aware training stops at torch's `out_proj`; with ours all linears take part and learn."""
    theirs = layer().train()
    ours = upgraded(theirs)
    x = batch()
    for model in (theirs, ours):
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    with pytest.raises(AssertionError, match="only works for Linear, got NonDynamicallyQuantizableLinear"):
        old_names(torch.ao.quantization.prepare_qat, theirs)
    prepared = old_names(torch.ao.quantization.prepare_qat, ours)
    fake = [name for name, module in prepared.named_modules() if type(module) is torch.ao.nn.qat.Linear]
    assert fake == [f"self_attn.{name}" for name in CHILDREN] + ["linear1", "linear2"]
    prepared(x).square().sum().backward()
    assert all(prepared.get_submodule(name).weight.grad.abs().sum() > 0 for name in fake)


@pytest.mark.parametrize("batch_first", [True, False], ids=["BLD", "LBD"])
def test_30_the_quantizable_attention(batch_first):
    """p#67651, p#91435: torch.ao's own class reads (B, L, D) wrongly, in floats already, and takes no single sample.

    Static quantization puts it in the place of torch's; ours stays what it is, and its four linears are observed.
    What `convert` makes of them wants quantized inputs, which ours does not make: not promised.
    """
    quantization = torch.ao.quantization
    theirs, ours = pair(D, H, batch_first=batch_first)
    x = batch() if batch_first else batch().transpose(0, 1)
    want = evaluated(theirs, x, x, x)
    model = nn.ModuleList([theirs, ours]).eval()
    model.qconfig = quantization.default_qconfig
    swapped, kept = old_names(quantization.prepare, model)
    assert type(swapped) is torch.ao.nn.quantizable.MultiheadAttention
    got = old_names(evaluated, swapped, x, x, x)
    if batch_first:
        assert not torch.allclose(got[0], want[0], atol=0.1)
    else:
        same_pair(got, want)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        swapped(x[0], x[0], x[0])

    assert type(kept) is MultiheadAttention
    same_pair(old_names(evaluated, kept, x, x, x), want)
    assert all(hasattr(getattr(kept, name), "activation_post_process") for name in CHILDREN)
    same_pair(evaluated(kept, x[:, 0], x[:, 0], x[:, 0]), evaluated(theirs, x[:, 0], x[:, 0], x[:, 0]))
    converted = old_names(quantization.convert, kept)
    with pytest.raises(NotImplementedError, match="quantized::linear"):
        converted(x, x, x)


@pytest.mark.tools
@pytest.mark.filterwarnings("ignore")
def test_58_torchao():
    """Near intel/neural-compressor#960: int8 for the feed-forward only; with ours all six."""
    from torchao import quantization as torchao

    theirs = layer().eval()
    ours = upgraded(theirs)
    x = batch()
    want = evaluated(theirs, x)

    def eight_bits(model):
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return [name for name, one in model.named_parameters() if type(one).__name__.startswith(("Int8", "Affine"))]

    assert eight_bits(theirs) == ["linear1.weight", "linear2.weight"]
    linears = [f"self_attn.{name}.weight" for name in CHILDREN] + ["linear1.weight", "linear2.weight"]
    assert eight_bits(ours) == linears
    same(evaluated(ours, x), want, 0.1)


# Graphs


class Masked(nn.Module):
    """A model with an encoder in it, called with a mask and without a word about causality."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x, mask):
        return self.encoder(x, mask=mask)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["grad", "no-grad"])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["non-strict", "strict"])
def test_32_export_of_a_stack_with_a_mask(strict, grad):
    """p#134616 (p#156681 is mended): torch reads the mask's values, or keeps its fused kernel in the graph."""
    theirs = Masked(stack()).eval()
    ours = upgraded(theirs)
    x, mask = batch(), causal_mask(L)
    with torch.set_grad_enabled(grad):
        want = theirs(x, mask).detach()
        if strict and not grad:
            names = operators(torch.export.export(theirs, (x, mask), strict=True))
            assert "aten._transformer_encoder_layer_fwd.default" in names
        else:
            with pytest.raises(Exception, match="Could not guard on data-dependent expression"):
                torch.export.export(theirs, (x, mask), strict=strict)
        length = torch.export.Dim("length", max=64)
        shapes = ({1: length}, {0: length, 1: length})
        program = torch.export.export(ours, (x, mask), dynamic_shapes=shapes, strict=strict)
        same(program.module()(x, mask).detach(), want, 1e-5)
        longer = torch.randn(B, 11, D)
        same(program.module()(longer, causal_mask(11)).detach(), ours(longer, causal_mask(11)).detach(), 1e-5)
    assert not [name for name in operators(program) if "_fwd" in name or "nested" in name]


class Attends(nn.Module):
    """What the old exporter is given: positional tensors, one output."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def script_export(model, *inputs, grad=False):
    file = io.BytesIO()
    axes = {name: {0: "batch", 1: "length"} for name in ("x", "padding")[: len(inputs)]}
    with torch.set_grad_enabled(grad):
        old_names(
            torch.onnx.export,
            model.eval(),
            inputs,
            file,
            dynamo=False,
            input_names=list(axes),
            dynamic_axes=axes,
            opset_version=17,
        )
    return file.getvalue()


class Encodes(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


def test_33_the_old_onnx_exporter():
    """p#143107, p#94434, PR p#111800, onnx/onnx#6532, immich-app/immich#12496: no such operator in ONNX.

    Ours: the fused layout only. Split, the exporter finds no Parameter for torch's names in `state_dict()`.
    """
    theirs, ours = pair(D, H, batch_first=True)
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="_native_multi_head_attention"):
        script_export(Attends(theirs), batch())
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="_nested_tensor_from_mask"):
        old_names(script_export, Encodes(stack()), batch(), RIGHT)
    with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a constant"):
        script_export(Attends(ours), batch())
    ours.fuse_projections()
    try:
        assert len(script_export(Attends(ours), batch())) > 4 * 4 * D * D
    except torch.onnx.OnnxExporterError as error:  # for its last step it wants the package, which may not be there
        assert "onnx is not installed" in str(error)  # noqa: PT017
    for model, match in ((layer(), "must be bool, not Tensor"), (upgraded(layer()), "positional arguments")):
        with pytest.raises(TypeError, match=match):  # an exported model is given all arguments by position
            script_export(model, batch(), grad=True)


@pytest.mark.tools
@pytest.mark.parametrize("kind", ["attention", "stack"])
def test_33_a_file_of_the_old_onnx_exporter(kind):
    """With gradients on torch's layers export, with the length of the example in them."""
    import onnxruntime as runtime

    if kind == "attention":
        theirs, inputs, longer = Attends(pair(D, H, batch_first=True)[0]), (batch(),), (batch(11),)
    else:
        more = torch.arange(11) >= torch.tensor([11, 2, 3])[:, None]
        theirs, inputs, longer = Encodes(stack()), (batch(), RIGHT), (batch(11), more)
    ours = upgraded(theirs, fused_qkv=True)

    def run(file, *tensors):
        session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    baked = script_export(theirs, *inputs, grad=True)
    with pytest.raises(Exception, match=r"[Rr]eshape"):
        run(baked, *longer)
    for grad in (True, False):
        file = script_export(ours, *inputs, grad=grad)
        for tensors in (inputs, longer):
            same(run(file, *tensors), evaluated(ours, *tensors), 1e-4)


@pytest.mark.tools
@pytest.mark.filterwarnings("ignore")
def test_33_the_new_onnx_exporter():
    """dynamo=True exports both."""
    theirs = Encodes(layer()).eval()
    inputs = (batch(), RIGHT)
    for model in (theirs, upgraded(theirs)):
        length = torch.export.Dim("length", max=64)
        program = torch.onnx.export(
            model, inputs, dynamo=True, dynamic_shapes=({1: length}, {1: length}), verbose=False
        )
        longer = (batch(11), torch.arange(11) >= torch.tensor([11, 2, 3])[:, None])
        for tensors in (inputs, longer):
            same(program(*tensors)[0], evaluated(theirs, *tensors), 1e-4)


def graphs(model, call, fullgraph=True):
    """How many graphs four lengths take, the outputs compared with eager ones."""
    torch._dynamo.reset()
    counter = Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=fullgraph)
    for length in (5, 7, 11, 13):
        args, kwargs = call(torch.randn(B, length, D))
        got, want = compiled(*args, **kwargs), model(*args, **kwargs)
        same(got[0], want[0], 1e-5) if isinstance(got, tuple) else same(got, want, 1e-5)
    return len(counter.graphs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_34_compile_of_a_stack_with_a_mask(kind):
    """p#134616: torch reads the mask's values, so there is no whole graph, and by default no graph at all."""
    if kind == "encoder":
        theirs = stack()

        def call(x):
            return (x,), {"mask": causal_mask(x.shape[1])}
    else:
        theirs = decoder()

        def call(x):
            return (x, x[:, 1:]), {"tgt_mask": causal_mask(x.shape[1])}

    with pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        graphs(theirs, call)
    assert graphs(theirs, call, fullgraph=False) == 0
    assert graphs(upgraded(theirs), call) == 2  # one for the first length, one for all others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_34_compile_of_a_stack_with_padding():
    """With mask_check=False torch's stack nests without looking, which cannot be compiled."""
    theirs = fill(nn.TransformerEncoder(layer(), 2, mask_check=False)).eval()

    def call(x):
        return (x,), {"src_key_padding_mask": torch.arange(x.shape[1]) >= torch.tensor([x.shape[1], 2, 3])[:, None]}

    with torch.no_grad():
        with pytest.raises(torch._dynamo.exc.Unsupported):
            graphs(theirs, call)
        assert graphs(upgraded(theirs), call) == 2


@pytest.mark.slow
def test_34_compile_of_a_stack_with_checked_padding():
    """PR p#163773 mended the default: it compiles. Compiled, torch computes the padding that is 0 in eager mode."""
    theirs = stack().eval()
    ours = upgraded(theirs)
    x = batch()
    with torch.no_grad():
        same(theirs(x, src_key_padding_mask=RIGHT), ours(x, src_key_padding_mask=RIGHT), 1e-5)
        for model, zero in ((theirs, False), (ours, True)):
            compiled = torch.compile(model, backend="eager", fullgraph=True)(x, src_key_padding_mask=RIGHT)
            same(compiled[~RIGHT], model(x, src_key_padding_mask=RIGHT)[~RIGHT], 1e-5)
            assert compiled[RIGHT].eq(0).all() == zero


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["self", "cross"])
def test_34_compile_of_attention(own):
    """Here both give a whole graph, for the first length and for all others."""
    theirs, ours = pair(D, H, batch_first=True)

    def call(x):
        return ((x, x, x), {"attn_mask": causal_mask(x.shape[1])}) if own else ((x, x[:, 1:], x[:, 1:]), {})

    assert graphs(theirs, call) == 2
    assert graphs(ours, call) == 2


def second(model, inputs, wanted):
    out = model(*inputs)
    (first,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    return torch.autograd.grad(first.square().sum(), wanted)


@pytest.mark.parametrize("build", [layer, stack, decoder_layer], ids=["layer", "stack", "decoder layer"])
def test_35_second_derivatives_of_layers(build):
    """p#116350, p#181177, learnables/learn2learn#429: none in any Transformer layer, but with the plain kernel."""
    theirs = build().double()
    ours = upgraded(theirs)
    inputs = [batch().double().requires_grad_()]
    inputs += [batch(S).double()] if build is decoder_layer else []
    with pytest.raises(RuntimeError, match="not implemented"):
        second(theirs, inputs, inputs[0])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = second(theirs, inputs, [inputs[0], theirs.get_parameter(last_weight(theirs))])
    got = second(ours, inputs, [inputs[0], ours.get_parameter(last_weight(ours))])
    for one, other in zip(got, want, strict=True):
        same(one, other, 1e-8)


def last_weight(model):
    return [name for name, _ in model.named_parameters() if name.endswith("linear1.weight")][-1]


def test_38_symbolic_trace():
    """p#67970, p#70485: torch's are opaque in a graph, and cannot be traced themselves.

    Ours cannot be traced either. They are no leaves to `symbolic_trace`, which knows torch's own only, so a model that
    holds them is traced by a Tracer that is told so.
    """

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return module.__module__.startswith("headwise.") or super().is_leaf_module(module, name)

    x = batch()
    theirs = nn.Sequential(nn.Linear(D, D), layer())
    graph = torch.fx.symbolic_trace(theirs)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    ours = upgraded(theirs)
    for module in (nn.MultiheadAttention(D, H), theirs[1], pair(D, H)[1], ours[1], ours):
        with pytest.raises((torch.fx.proxy.TraceError, RuntimeError, ValueError)):
            torch.fx.symbolic_trace(module)
    graph = torch.fx.GraphModule(ours, Leaves().trace(ours))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    for got in modes(graph, x):
        same(got, trained(theirs, x), 1e-5)


def flops(call):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_39_flop_counters():
    """p#195460, Lyken17/pytorch-OpCounter#197, facebookresearch/fvcore#153: nothing at all in evaluation.

    torch has no formula for the kernel that runs without weights; importing headwise registers one, for both.
    """
    x = batch()
    projections, products, feed_forward = 8 * B * L * D * D, 4 * B * L * L * D, 4 * B * L * D * M
    theirs = layer()
    ours = upgraded(theirs)
    for model, in_evaluation in ((theirs, 0), (ours, projections + feed_forward)):
        attention = model.self_attn
        whole = projections + products
        assert flops(lambda a=attention: trained_pair(a, x)) == whole
        least = projections
        assert least <= flops(lambda a=attention: a.train()(x, x, x, need_weights=False)) <= whole
        assert least + feed_forward <= flops(lambda m=model: trained(m, x)) <= whole + feed_forward
        assert in_evaluation <= flops(lambda m=model: evaluated(m, x))
        counted = flops(lambda a=attention: evaluated(a, x, x, x))
        assert counted == (whole if model is ours else 0)
    assert flops(lambda: evaluated(theirs, x)) == 0
    assert flops(lambda: trained(theirs, x)) == flops(lambda: trained(ours, x)) == whole + feed_forward


def trained_pair(attention, x):
    return attention.train()(x, x, x)


# Parameters


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_46_first_values_of_layers_after_the_meta_device(name):
    """p#107909, NVIDIA/Megatron-LM#6799: a loop over reset_parameters() leaves torch's packed matrices as they fell."""

    def materialised(home):
        with torch.device("meta"):
            model = getattr(home, name)(64, 4, M, batch_first=True)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, NAN)
        for child in model.modules():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()
        return model.state_dict()

    theirs, ours = materialised(nn), materialised(headwise)
    assert list(ours) == list(theirs)
    left = [key for key, value in theirs.items() if value.isnan().any()]
    assert left == [key for key in theirs if "in_proj" in key]
    fresh = getattr(nn, name)(64, 4, M, batch_first=True).state_dict()
    for key, value in ours.items():
        assert value.isfinite().all(), key
        assert value.std().item() == pytest.approx(fresh[key].std().item(), rel=0.35), key


@layouts
@pytest.mark.parametrize("inside", [False, True], ids=["attention", "in a layer"])
def test_50_checkpoints_with_three_matrices(inside, fused_qkv):
    """facebookresearch/fairseq#1320, facebookresearch/ParlAI#2022: separate names do not load into a packed module."""
    theirs = layer() if inside else pair(D, H, batch_first=True)[0]
    ours = upgraded(theirs, fused_qkv)
    dot = "self_attn." if inside else ""
    state = theirs.state_dict()
    weights = dict(zip("qkv", state.pop(f"{dot}in_proj_weight").chunk(3), strict=True))
    packed_bias = state.pop(f"{dot}in_proj_bias")
    biases = dict(zip("qkv", packed_bias.chunk(3), strict=True))
    spellings = [
        {f"{dot}{n}_proj_weight": weights[n] for n in "qkv"} | {f"{dot}in_proj_bias": packed_bias} | state,
        {f"{dot}{n}_proj.weight": weights[n] for n in "qkv"}
        | {f"{dot}{n}_proj.bias": biases[n] for n in "qkv"}
        | state,
    ]
    for spelling in spellings:
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*in_proj_weight.*Unexpected key"):
            copy.deepcopy(theirs).load_state_dict(spelling)
        fresh = fill(copy.deepcopy(ours), seed=2)
        fresh.load_state_dict(spelling)
        for key, value in theirs.state_dict().items():
            assert torch.equal(fresh.state_dict()[key], value), key


@pytest.fixture
def _process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_56_children_in_parallel_with_one_process():
    """p#99432: torch's `out_proj` is not called, so its sharded weight meets a plain tensor; the class has no plan.

    Ours with one process. Several processes, where each has some of the heads, are not promised.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    theirs, ours = pair(D, H, batch_first=True)
    x = batch()
    want = theirs(x, x, x)

    sharded = parallelize_module(copy.deepcopy(theirs), mesh, {"out_proj": RowwiseParallel()})
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        sharded(x, x, x)
    wrapped = copy.deepcopy(theirs)
    fully_shard(wrapped.out_proj, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        wrapped(x, x, x)
    for module in (theirs, ours):
        with pytest.raises(NotImplementedError, match=r"only support nn\.Linear and nn\.Embedding"):
            parallelize_module(copy.deepcopy(module), mesh, ColwiseParallel())
    whole = copy.deepcopy(theirs)
    fully_shard(whole, mesh=mesh)
    same_pair(whole(x, x, x), want)

    plan = dict.fromkeys(CHILDREN[:3], ColwiseParallel()) | {"out_proj": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(ours), mesh, plan)
    assert all(isinstance(getattr(parallel, name).weight, DTensor) for name in CHILDREN)
    wrapped = copy.deepcopy(ours)
    for name in CHILDREN:
        fully_shard(getattr(wrapped, name), mesh=mesh)
    for module in (parallel, wrapped):
        same_pair(module(x, x, x), want)
        same(module(x, x, x, need_weights=False)[0], want[0], 1e-5)
        module(x, x, x)[0].square().sum().backward()
        assert all(getattr(module, name).weight.grad is not None for name in CHILDREN)
