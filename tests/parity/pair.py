"""What the parity tests share: torch's module and ours with the same random parameters, and how to compare them."""

from __future__ import annotations

import torch
from torch import nn

from headwise import MultiheadAttention

LAYOUTS = {"split": False, "fused": True}
_CHILDREN = ("q_proj", "k_proj", "v_proj")


def fill(module, seed=1):
    """Random parameters everywhere, biases too: zeros would hide a bias that is left out."""
    generator = torch.Generator().manual_seed(seed)
    state = module.state_dict()
    for name, value in sorted(state.items()):
        spread = 0.5 if name.endswith("weight") else 1.0
        value.copy_(torch.randn(value.shape, generator=generator) * spread)
    return module


def pair(*args, fused_qkv=False, dtype=torch.float32, **kwargs):
    """torch's module and ours, same random parameters."""
    theirs = fill(nn.MultiheadAttention(*args, **kwargs)).to(dtype)
    return theirs, twin(theirs, fused_qkv=fused_qkv)


def twin(theirs, **ours_only):
    """Ours with the arguments and the parameters of one of torch's."""
    ours = MultiheadAttention(
        theirs.embed_dim,
        theirs.num_heads,
        theirs.dropout,
        bias=theirs.in_proj_bias is not None,
        add_bias_kv=theirs.bias_k is not None,
        add_zero_attn=theirs.add_zero_attn,
        kdim=theirs.kdim,
        vdim=theirs.vdim,
        batch_first=theirs.batch_first,
        dtype=theirs.out_proj.weight.dtype,
        **ours_only,
    )
    ours.load_state_dict(theirs.state_dict())
    return ours.train(theirs.training)


def torch_grads(module):
    """Every parameter gradient under torch's names, whatever the module's layout; one that is missing is an error."""
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient in {missing}"
    weights = [found.pop(f"{child}.weight", None) for child in _CHILDREN]
    biases = [found.pop(f"{child}.bias", None) for child in _CHILDREN]
    if weights[0] is not None:
        if module.embed_dim == module.kdim == module.vdim:
            found["in_proj_weight"] = torch.cat(weights)
        else:
            found.update({f"{child}_weight": grad for child, grad in zip(_CHILDREN, weights, strict=True)})
    if biases[0] is not None:
        found["in_proj_bias"] = torch.cat(biases)
    return found


def same(ours, theirs, tol, what=""):
    """Whole tensors: shape, dtype and each number, relative to the largest."""
    atol = tol * max(1.0, theirs.abs().max().item()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=tol, atol=atol, msg=lambda text: f"{what}: {text}")


def same_pair(ours, theirs, tol=1e-5):
    """(output, weights) of two forwards."""
    same(ours[0], theirs[0], tol, "output")
    assert (ours[1] is None) == (theirs[1] is None)
    if theirs[1] is not None:
        same(ours[1], theirs[1], tol, "weights")


def causal_mask(length, keys=None):
    """torch's polarity: True may not attend."""
    return torch.ones(length, keys or length, dtype=torch.bool).triu(1)
