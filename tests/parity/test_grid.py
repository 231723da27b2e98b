"""The grid: outputs, weights, input, mask and parameter gradients are torch's wherever torch's are well defined.

Every triple of values of the axes below occurs in some case, except where the axes exclude each other, as
`test_the_grid` holds. An id reads: heads, biases, extra keys, widths, memory order, layout, batch, attention, mask,
dtype, mode, weights.
"""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from tests.parity.pair import fill, same, torch_grads, twin
from torch import nn

B, L, S, K = 5, 7, 11, 3
KDIM, VDIM = 13, 17

AXES = {
    "heads": (1, 2, 3),
    "bias": ("bias", "nobias"),
    "extra": ("plain", "biaskv", "zero", "biaskv+zero"),
    "widths": ("same", "kdim", "vdim", "kdim=vdim", "kdim+vdim"),
    "order": ("BLD", "LBD"),
    "layout": ("split", "fused"),
    "batch": ("batched", "single"),
    "inputs": ("self", "kv", "qk", "cross", "cross-of-equal-length"),
    "mask": (
        "none", "pad", "padf", "2d", "2df", "3d", "3df", "2d+pad", "2df+padf", "3d+pad", "3df+padf",
        "causal", "causalf", "causal+pad", "causal-not-said",
    ),
    "dtype": ("float32", "float64", "bfloat16"),
    "mode": ("train-grad", "train-nograd", "eval-grad", "eval-nograd", "eval-frozen", "train-frozen-input"),
    "weights": ("average", "heads", "off"),
}  # fmt: skip
NAMES = tuple(AXES)


def possible(case):
    """One tensor in two roles needs one width in both."""
    allowed = {"self": ("same",), "kv": ("same", "kdim=vdim"), "qk": ("same", "vdim")}
    return case["widths"] in allowed.get(case["inputs"], AXES["widths"])


def triples(case):
    return itertools.combinations(((name, case[name]) for name in NAMES), 3)


def build_grid():
    """Cases that each bring a triple that was not there, until a long row of candidates brings none."""
    draw, grid, covered = random.Random(20130), [], set()
    candidates = ({name: draw.choice(values) for name, values in AXES.items()} for _ in range(24_000))
    for case in filter(possible, candidates):
        new = [triple for triple in triples(case) if triple not in covered]
        if new:
            grid.append(case)
            covered.update(new)
    return grid, covered


GRID, COVERED = build_grid()


def test_the_grid():
    """Every possible triple occurs, and no case twice."""
    wanted = set()
    for names in itertools.combinations(NAMES, 3):
        free = {"widths": "same", "inputs": "cross"} if not {"widths", "inputs"} & set(names) else {}
        for values in itertools.product(*(AXES[name] for name in names)):
            case = dict(zip(names, values, strict=True)) | free
            case.setdefault("widths", "same")
            case.setdefault("inputs", "cross")
            if possible(case):
                wanted.add(tuple(zip(names, values, strict=True)))
    assert wanted == COVERED
    assert len({tuple(case.values()) for case in GRID}) == len(GRID)


def masks_of(case, length, keys, dtype, generator):
    """attn_mask, key_padding_mask in torch's polarity; every row sees a key unless an extra key is there for it."""
    mask, heads, batch = case["mask"], case["heads"], B if case["batch"] == "batched" else 1
    dead_rows = case["extra"] != "plain"
    causal = mask.startswith("causal")
    attn_mask = key_padding_mask = None
    if causal:
        attn_mask = torch.ones(length, keys, dtype=torch.bool).triu(1)
    elif mask.startswith(("2d", "3d")):
        shape = (length, keys) if mask.startswith("2d") else (batch * heads, length, keys)
        attn_mask = torch.rand(shape, generator=generator) < 0.4
        attn_mask[..., 3] = False
        if dead_rows:
            attn_mask[..., 1, :] = True
    if "pad" in mask:
        lengths = torch.randint(4, keys + 1, (batch,), generator=generator)
        key_padding_mask = torch.arange(keys) >= lengths[:, None]
        if not causal and batch > 1:
            key_padding_mask[1, :3] = True  # left padding, and the hole that it leaves with the right one
        if dead_rows:
            key_padding_mask[batch // 2] = True
        if case["batch"] == "single":
            key_padding_mask = key_padding_mask[0]
    if mask == "causalf":
        attn_mask = torch.zeros(attn_mask.shape, dtype=dtype).masked_fill(attn_mask, float("-inf"))
    elif attn_mask is not None and "df" in mask:
        attn_mask = floating(attn_mask, dtype, generator)
    if key_padding_mask is not None and "padf" in mask:
        key_padding_mask = floating(key_padding_mask, dtype, generator)
    return attn_mask, key_padding_mask


def floating(mask, dtype, generator):
    """Scores to add, and -inf where `mask` hides."""
    return torch.randn(mask.shape, generator=generator).to(dtype).masked_fill(mask, float("-inf"))


def problem(case, dtype):
    """torch's module in float64 with parameters that `dtype` holds exactly, and everything a call needs."""
    widths = case["widths"]
    kdim = KDIM if "kdim" in widths else None
    vdim = {"vdim": VDIM, "kdim+vdim": VDIM, "kdim=vdim": KDIM}.get(widths)
    theirs = nn.MultiheadAttention(
        case["heads"] * K,
        case["heads"],
        bias=case["bias"] == "bias",
        add_bias_kv="biaskv" in case["extra"],
        add_zero_attn="zero" in case["extra"],
        kdim=kdim,
        vdim=vdim,
        batch_first=case["order"] == "BLD",
    )
    theirs = fill(theirs).to(dtype).train(case["mode"].startswith("train"))
    length = L
    keys = S if case["inputs"] in ("kv", "cross") else L
    generator = torch.Generator().manual_seed(2)

    def made(positions, width):
        shape = (positions, width)
        if case["batch"] == "batched":
            shape = (B, *shape) if theirs.batch_first else (positions, B, width)
        return torch.randn(shape, generator=generator).to(dtype)

    inputs = [made(length, theirs.embed_dim)]
    if case["inputs"] not in ("self", "qk"):
        inputs.append(made(keys, theirs.kdim))
    if case["inputs"] not in ("self", "kv"):
        inputs.append(made(keys, theirs.vdim))
    attn_mask, key_padding_mask = masks_of(case, length, keys, dtype, generator)
    loss_seed = torch.randn(4096, generator=generator, dtype=torch.float64)
    return theirs, inputs, attn_mask, key_padding_mask, loss_seed


def results(module, case, inputs, attn_mask, key_padding_mask, loss_seed, is_causal):
    """Everything that a call gives, by name."""
    mode, dtype = case["mode"], inputs[0].dtype
    grad = (mode.endswith("grad") and not mode.endswith("nograd")) or mode == "train-frozen-input"
    input_grad = mode.endswith("-grad")
    module.requires_grad_(grad).zero_grad()
    inputs = [x.clone().requires_grad_(input_grad) for x in inputs]
    roles = {"self": (0, 0, 0), "kv": (0, 1, 1), "qk": (0, 0, 1)}
    q, k, v = (inputs[i] for i in roles.get(case["inputs"], (0, 1, 2)))
    named = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    for name, mask in named.items():
        if mask is not None and mask.is_floating_point() and case["mask"] != "causalf":  # torch may drop that one
            named[name] = mask.clone().requires_grad_(input_grad)
    with torch.set_grad_enabled(not mode.endswith("nograd")):
        out, weights = module(
            q, k, v, **named, is_causal=is_causal,
            need_weights=case["weights"] != "off", average_attn_weights=case["weights"] == "average",
        )  # fmt: skip
    found = {"output": out.detach()}
    assert (weights is None) == (case["weights"] == "off")
    assert out.requires_grad == grad
    if weights is not None:
        found["weights"] = weights.detach()
    if not grad:
        return found
    loss = (out * spread(loss_seed, out)).sum()
    if weights is not None:
        loss = loss + (weights * spread(loss_seed, weights)).sum()
    loss.backward()
    found |= {f"gradient of {name}": value for name, value in torch_grads(module).items()}
    if input_grad:
        found |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs)}
        for name, mask in named.items():
            if mask is not None and mask.requires_grad:
                found[f"gradient of {name}"] = mask.grad
    assert all(value.dtype == dtype for value in found.values())
    return found


def spread(seed, like):
    return seed[torch.arange(like.numel()) % len(seed)].view(like.shape).to(like.dtype)


# torch's fused kernel of eval mode needs seven axes at one value each, which triples alone seldom bring together
FAST = {
    "heads": 2,
    "bias": "bias",
    "extra": "plain",
    "widths": "same",
    "order": "BLD",
    "batch": "batched",
    "inputs": "self",
}
FREE = {name: values for name, values in AXES.items() if name not in FAST} | {"mode": ("eval-nograd", "eval-frozen")}
FAST_GRID = [FAST | dict(zip(FREE, values, strict=True)) for values in itertools.product(*FREE.values())]


def test_the_fast_grid(monkeypatch):
    """torch runs its fused kernel in each of these cases with a bool mask or none."""
    calls = []
    fused = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or fused(*args))
    for mask in AXES["mask"]:
        case = FAST_GRID[0] | {"mask": mask}
        theirs, *given = problem(case, torch.float32)
        results(theirs, case, *given, is_causal=False)
        assert len(calls) == int(mask not in ("padf", "2df", "2df+padf", "3df", "3df+padf", "causalf"))
        calls.clear()


CASES = {"-".join(str(case[name]) for name in NAMES): case for case in GRID + FAST_GRID}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_parity(case):
    """Same numbers; in bfloat16 an error against float64 of at most twice torch's own, plus one step of the format."""
    dtype = getattr(torch, case["dtype"])
    theirs, inputs, attn_mask, key_padding_mask, loss_seed = problem(case, dtype)
    ours = twin(theirs, fused_qkv=case["layout"] == "fused")
    is_causal = case["mask"].startswith("causal") and case["mask"] != "causal-not-said"
    given = (case, inputs, attn_mask, key_padding_mask, loss_seed)
    got = results(ours, *given, is_causal=is_causal)
    # the hint makes torch drop the mask and hide bias_k and the zero key on one of its paths: see test_pitfalls.py
    hint = is_causal and case["extra"] == "plain"
    want = results(theirs, *given, is_causal=hint)
    assert got.keys() == want.keys()
    if dtype != torch.bfloat16:
        for name, value in want.items():
            same(got[name], value, 1e-5 if dtype == torch.float32 else 1e-11, name)
        return
    wide = [None if x is None else x.double() if x.is_floating_point() else x for x in (attn_mask, key_padding_mask)]
    exact = results(
        copy.deepcopy(theirs).double(), case, [x.double() for x in inputs], *wide, loss_seed, is_causal=hint
    )
    for name, truth in exact.items():
        assert got[name].shape == truth.shape, name
        allowed = 2 * (want[name] - truth).abs().max() + 2**-7 * truth.abs().max()
        error = (got[name] - truth).abs()
        assert (error <= allowed).all(), f"{name}: error {error.max():.3g}, allowed {allowed:.3g}"
