"""Published packages that build on torch's layers: `upgrade` changes none of their numbers, `downgrade` nothing at all.

Their code calls the layers, with its own masks and its own assumptions. The models are in benchmarks/packages.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from benchmarks.packages import EXAMPLES, KINDS, loss, tensors
from tests.parity.pair import LAYOUTS, same, torch_grads

import headwise

pytestmark = [
    pytest.mark.packages,
    pytest.mark.integration,
    # vietocr's padding masks; ours says that they hide nothing.
    pytest.mark.filterwarnings("ignore:.*holds only 0 and 1, which are added:UserWarning"),
]
layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
NAMES = [f"{example.package}-{example.model}" for example in EXAMPLES]
examples = pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)


def make(example):
    """torch's model and what calls it, or a skip."""
    if reason := example.missing():
        pytest.skip(reason)
    return example.make()


def grads(model):
    """The gradients under torch's names of all that has one."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, headwise.MultiheadAttention):
            own = [found.pop(f"{path}.{name}") for name, _ in module.named_parameters()]
            if any(grad is not None for grad in own):
                found.update({f"{path}.{name}": grad for name, grad in torch_grads(module).items()})
    return {name: grad for name, grad in found.items() if grad is not None}


def same_output(ours, theirs):
    ours, theirs = tensors(ours), tensors(theirs)
    assert len(ours) == len(theirs) > 0
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other.isfinite().all()
        same(one, other, 1e-5, f"output {index}")


@examples
@layouts
def test_same_numbers_and_gradients(example, fused_qkv):
    theirs, call = make(example)
    ours = headwise.upgrade(copy.deepcopy(theirs), fused_qkv=fused_qkv)
    with torch.no_grad():
        same_output(call(ours.eval()), call(theirs.eval()))
    outputs = [call(model.train()) for model in (ours, theirs)]
    same_output(*outputs)
    for output in outputs:
        loss(output).backward()
    found, expected = grads(ours), grads(theirs)
    assert found.keys() == expected.keys()
    attention = [grad for name, grad in expected.items() if name.endswith("in_proj_weight")]
    assert attention
    assert all(grad.abs().max() > 1e-5 for grad in attention)
    for name, grad in expected.items():
        same(found[name], grad, 1e-5, name)


@examples
@layouts
def test_every_layer_is_replaced_and_comes_back(example, fused_qkv):
    theirs, _ = make(example)
    model = headwise.upgrade(copy.deepcopy(theirs), fused_qkv=fused_qkv)
    changed = 0
    for name, module in theirs.named_modules():
        kind = type(module)
        if kind in KINDS:
            changed += 1
            assert type(model.get_submodule(name)) is getattr(headwise, kind.__name__), name
    assert changed == example.layers
    back = headwise.downgrade(model)
    assert [type(module) for module in back.modules()] == [type(module) for module in theirs.modules()]
    found, expected = back.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_attention_that_is_asked_for_by_class_stays():
    """torch_geometric's GPSConv skips an attention that is no nn.MultiheadAttention, without a word."""
    nn = pytest.importorskip("torch_geometric.nn", reason="needs the package torch_geometric; run `make test-packages`")
    model = nn.GPSConv(24, nn.GCNConv(24, 24), heads=4, norm="layer_norm").eval()
    nodes, edges, batch = torch.randn(11, 24), torch.randint(11, (2, 33)), torch.arange(11) // 4
    want = model(nodes, edges, batch)
    with pytest.raises(ValueError, match=r"attn \(a MultiheadAttention, whose class GPSConv\.forward asks for\)"):
        headwise.upgrade(model)
    assert torch.equal(model(nodes, edges, batch), want)
    headwise.upgrade(model, where=lambda name, module: True)  # whoever insists gets what the package makes of it
    assert not torch.allclose(model(nodes, edges, batch), want)
