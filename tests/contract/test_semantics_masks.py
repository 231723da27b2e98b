"""docs/design.md, the semantics table: masks of every rank and dtype, casting, the 0/1 warning."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from tests.oracle.cases import (
    INF,
    B,
    Call,
    Case,
    D,
    H,
    K,
    L,
    S,
    Way,
    compare_attention,
    compare_module,
    every_call,
    every_way,
    heads,
    inputs,
    make_module,
    minus_inf,
    run_attention,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import headwise
from headwise import attention, attention_weights, masks
from headwise.core import reference

DRAWN = torch.Generator().manual_seed(3)


def blocks(*shape: int) -> Tensor:
    """Bool, True blocks about a third; no row is blocked as a whole."""
    block = torch.rand(shape, generator=DRAWN) < 0.35
    block[..., 0] = False
    return block


def scores(*shape: int) -> Tensor:
    """Float, a third of it -inf."""
    return torch.randn(shape, generator=DRAWN) + minus_inf(blocks(*shape))


# --- masks ------------------------------------------------------------------------------------------------------------

# shape -> the view (B, H, L, S) of it
RANKS = {
    "(L, S)": ((L, S), (1, 1, L, S)),
    "(B*H, L, S)": ((B * H, L, S), (B, H, L, S)),
    "(B, L, S)": ((B, L, S), (B, 1, L, S)),
    "(1, L, S)": ((1, L, S), (1, 1, L, S)),
    "(B, H, L, S)": ((B, H, L, S), (B, H, L, S)),
    "(B, 1, L, S)": ((B, 1, L, S), (B, 1, L, S)),
    "(1, H, L, S)": ((1, H, L, S), (1, H, L, S)),
    "(1, 1, L, S)": ((1, 1, L, S), (1, 1, L, S)),
    "(B, 1, 1, S)": ((B, 1, 1, S), (B, 1, 1, S)),
    "(B, H, 1, S)": ((B, H, 1, S), (B, H, 1, S)),
    "(B, H, L, 1)": ((B, H, L, 1), (B, H, L, 1)),
    "(1, 1, L, 1)": ((1, 1, L, 1), (1, 1, L, 1)),
    "(1, 1, 1, 1)": ((1, 1, 1, 1), (1, 1, 1, 1)),
}
ATTN_MASKS: dict[str, Case] = {}
for _rank, (_shape, _view) in RANKS.items():
    _block, _score = blocks(*_shape), scores(*_shape)
    ATTN_MASKS[f"bool {_rank}"] = Case({"attn_mask": _block}, {"keep": ~_block.view(_view)})
    ATTN_MASKS[f"float {_rank}"] = Case({"attn_mask": _score}, {"bias": _score.view(_view)})
KEY_BLOCK, KEY_SCORE = blocks(B, S), scores(B, S)
KEEP_KEY = {"keep": ~KEY_BLOCK[:, None, None]}
ADD_KEY = {"bias": KEY_SCORE[:, None, None]}
SCORE_3D, BLOCK_2D = scores(B, L, S), blocks(L, S)
OTHER_MASKS: dict[str, Case] = {
    "padding bool": Case({"key_padding_mask": KEY_BLOCK}, KEEP_KEY),
    "padding float": Case({"key_padding_mask": KEY_SCORE}, ADD_KEY),
    "bool and bool": Case(
        {"attn_mask": BLOCK_2D, "key_padding_mask": KEY_BLOCK}, {"keep": ~BLOCK_2D & KEEP_KEY["keep"]}
    ),
    "float and bool": Case(
        {"attn_mask": SCORE_3D, "key_padding_mask": KEY_BLOCK}, KEEP_KEY | {"bias": SCORE_3D[:, None]}
    ),
    "bool and float": Case({"attn_mask": BLOCK_2D, "key_padding_mask": KEY_SCORE}, ADD_KEY | {"keep": ~BLOCK_2D}),
    "float and float": Case(
        {"attn_mask": SCORE_3D, "key_padding_mask": KEY_SCORE}, {"bias": SCORE_3D[:, None] + KEY_SCORE[:, None, None]}
    ),
    "both and a Mask": Case(
        {
            "attn_mask": SCORE_3D,
            "key_padding_mask": KEY_BLOCK,
            "mask": (lambda keep, n: masks.dense(keep) & masks.prefix(n), ~BLOCK_2D, torch.tensor(S - 1)),
        },
        {"bias": SCORE_3D[:, None], "keep": ~BLOCK_2D & KEEP_KEY["keep"] & (torch.arange(S) < S - 1)},
    ),
}  # fmt: skip
for _dtype in (torch.float16, torch.bfloat16, torch.float64):
    _small = torch.randn(L, S, generator=DRAWN).to(_dtype)  # of this dtype's values
    OTHER_MASKS[f"attn_mask {_dtype}"] = Case({"attn_mask": _small}, {"bias": _small})
    OTHER_MASKS[f"padding {_dtype}"] = Case(
        {"key_padding_mask": KEY_SCORE.to(_dtype)}, {"bias": KEY_SCORE.to(_dtype)[:, None, None]}
    )


@every_way
def test_masks(way: Way) -> None:
    """bool and float of any float dtype; 2-D, (B*H, L, S), (B, L, S), (1, L, S), 4-D; bool and float mix quietly."""
    cases = {"nothing": Case({}, {})} | ATTN_MASKS | OTHER_MASKS
    compare_module(make_module(way), way, inputs(L, S, S), cases)
    if way.path != "compiled":
        (x,) = inputs(L)
        compare_module(make_module(way), way, [x, x, x], {"nothing, of one tensor": Case({}, {})})


def _as_mask(held: Tensor) -> masks.Mask:
    return masks.dense(held) if held.dtype == torch.bool else masks.bias(held)


@every_call
def test_masks_in_attention(call: Call) -> None:
    cases = {}
    for name, case in ATTN_MASKS.items():
        (kind, means) = next(iter(case.means.items()))
        if "(B*H" in name:
            continue
        held = means[0, 0] if "(L, S)" in name and means.shape[:2] == (1, 1) else means
        cases[name] = Case({"mask": (_as_mask, held)}, {kind: means})
    compare_attention(call, [heads(B, H, length, K, grad=True) for length in (L, S, S)], cases)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_unbatched_input(batch_first: bool, train: bool) -> None:
    """As one sample: (L, S), (H, L, S), (1, L, S), 4-D; (S,) padding."""
    module = make_module(Way(False, batch_first, train, "averaged", "eager"))
    query, memory = torch.randn(L, D), torch.randn(S, D)
    one = (0, 1) if batch_first else (1, 0)
    padding = torch.tensor([False, False, True, False, False, True, False])
    for mask in (blocks(L, S), scores(L, S), blocks(H, L, S), scores(1, L, S), scores(1, H, L, S), blocks(1, 1, 1, S)):
        for average in (True, False):
            given = {"attn_mask": mask, "average_attn_weights": average, "is_causal": True}
            out, weights = module(query, memory, memory, key_padding_mask=padding, **given)
            batch = memory.unsqueeze(one[0])
            wanted, wanted_weights = module(
                query.unsqueeze(one[0]), batch, batch, key_padding_mask=padding[None], **given
            )
            assert_close(out, wanted.squeeze(one[0]))
            assert_close(weights, wanted_weights[0])
            assert out.shape == (L, D)
            assert weights.shape == ((L, S) if average else (H, L, S))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.complex64])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_masks_of_integers_raise(name: str, dtype: torch.dtype) -> None:
    module = make_module(Way(False, True, True, "averaged", "eager"))
    query, memory = inputs(L, S)
    mask = torch.zeros((B, S) if name == "key_padding_mask" else (L, S), dtype=dtype)
    with pytest.raises(ValueError, match=rf"^MultiheadAttention: {name} must be a (bool|bool or floating) .*{dtype}"):
        module(query, memory, memory, **{name: mask})
    with pytest.raises(ValueError, match=rf"^from_torch: {name} must be a bool .* or floating .*{dtype}"):
        masks.from_torch(**{name: mask})


@pytest.mark.parametrize(
    "shape",
    [
        (S,), (S, L), (L, 1), (1, S), (L + 1, S), (B + 1, L, S), (H, L, S), (B * H, 1, S),
        (B, H, L, S + 1), (2, 1, L, S), (1, 1, 1, L, S),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_other_shapes_raise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch's checks and ours: nothing is broadcast that is not in the table."""
    module = make_module(Way(False, True, True, "averaged", "eager"))
    query, memory = inputs(L, S)
    with pytest.raises(ValueError, match=r"^MultiheadAttention: attn_mask must .*got ") as raised:
        module(query, memory, memory, attn_mask=torch.zeros(shape, dtype=dtype))
    assert str(shape) in str(raised.value) or f"{len(shape)}-D" in str(raised.value)


# --- casting a float mask ---------------------------------------------------------------------------------------------

LOW = torch.finfo(torch.float64).min
CASTS = {
    "float64 min": torch.tensor(LOW, dtype=torch.float64),
    "-1e300": torch.tensor(-1e300, dtype=torch.float64),
    "float32 min": torch.tensor(torch.finfo(torch.float32).min, dtype=torch.float32),
    "bfloat16 min": torch.tensor(torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
    "float16 min": torch.tensor(torch.finfo(torch.float16).min, dtype=torch.float16),
}


def penalty(value: Tensor) -> Tensor:
    """(3, S): all of it the penalty; the penalty but for key 1; -inf but for keys 2 and 5, which have the penalty."""
    mask = value.expand(3, S).clone()
    mask[1, 1] = 0
    mask[2] = -INF
    mask[2, [2, 5]] = value
    return mask


# a penalty drowns every score and every row is uniform over what has the same penalty
CAST_WEIGHTS = torch.zeros(3, S)
CAST_WEIGHTS[0] = 1 / S
CAST_WEIGHTS[1, 1] = 1
CAST_WEIGHTS[2, [2, 5]] = 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize(
    "call", [("sdpa", True, "eager"), ("plain", True, "eager"), ("sdpa", False, "eager"), (None, False, "vmapped")]
)
def test_casting_a_float_mask(call: Call, name: str, dtype: torch.dtype) -> None:
    """Only -inf hides a key; finite values are clamped to the target's range."""
    limit = torch.finfo(dtype).min
    mask = penalty(CASTS[name])
    query = torch.zeros(1, H, 3, K, dtype=dtype)  # equal scores, so that every dtype gives the same rows
    key, value = torch.randn(2, 1, H, S, K).to(dtype)
    outs = run_attention(call, [query, key, value], {"one": Case({"mask": (masks.bias, mask)}, {})})["one"]
    clamped = torch.where(mask == -INF, -INF, mask.double().clamp(limit, -limit))
    _, weights = reference.attention(query, key, value, bias=clamped)
    assert_close(weights[0, 0], CAST_WEIGHTS.double())
    assert_close(outs.double(), CAST_WEIGHTS.double() @ value.double(), rtol=2e-2, atol=torch.finfo(dtype).eps * 4)
    assert_close(attention_weights(query, key, mask=masks.bias(mask))[0, 1].float(), CAST_WEIGHTS)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_casting_a_float_mask_drowns_real_scores_alike(backend: str, name: str) -> None:
    """Against the reference, which adds the clamped penalty in float64."""
    mask = penalty(CASTS[name])
    query, key, value = heads(B, H, 3, K), heads(B, H, S, K), heads(B, H, S, K)
    limit = torch.finfo(torch.float32).min
    clamped = torch.where(mask == -INF, -INF, mask.double().clamp(limit, -limit))
    wanted, _ = reference.attention(query, key, value, bias=clamped)
    found = attention(query, key, value, mask=masks.bias(mask), backend=backend)
    # float16's penalty of -65504 leaves the scores 4 bits in float32
    assert_close(
        found.double(), wanted, rtol=1e-2 if name == "float16 min" else 1e-5, atol=2e-2 if "16 m" in name else 1e-5
    )


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_casting_two_float_masks_whose_sum_leaves_the_range(backend: str) -> None:
    low = torch.finfo(torch.float32).min
    query, key, value = heads(B, H, L, K), heads(B, H, S, K), heads(B, H, S, K)
    both = masks.from_torch(torch.full((L, S), low), torch.full((B, S), low))
    found = attention(query, key, value, mask=both, backend=backend)
    assert_close(found, value.mean(dim=2, keepdim=True).expand(B, H, L, K))
    hidden = torch.zeros(B, S)
    hidden[:, 2:] = -INF
    found = attention(query, key, value, mask=masks.from_torch(torch.full((L, S), low), hidden), backend=backend)
    assert_close(found, value[:, :, :2].mean(dim=2, keepdim=True).expand(B, H, L, K))


@pytest.mark.parametrize("value", [1e300, torch.finfo(torch.float64).max])
@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_casting_a_large_positive_mask(backend: str, value: float) -> None:
    mask = torch.zeros(L, S, dtype=torch.float64)
    mask[:, [1, 4]] = value
    query, key, values = heads(B, H, L, K), heads(B, H, S, K), heads(B, H, S, K)
    found = attention(query, key, values, mask=masks.bias(mask), backend=backend)
    assert_close(found, values[:, :, [1, 4]].mean(dim=2, keepdim=True).expand(B, H, L, K))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("weights", ["off", "averaged", "per head"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast"])
def test_casting_a_float_mask_in_the_module(kind: str, weights: str, train: bool) -> None:
    """A module of 16 bits, and one of 32 under autocast: a float32 or float64 penalty still hides nothing."""
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    module = make_module(Way(False, True, train, weights, "eager"))
    module = module if kind == "autocast" else module.to(dtype)
    query, memory = (x.detach().to(torch.float32 if kind == "autocast" else dtype) for x in inputs(3, S))
    with torch.no_grad():
        module.q_proj.weight.zero_()
        module.q_proj.bias.zero_()
    for name in ("float64 min", "-1e300", "float32 min"):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            out, weight = module(
                query, memory, memory, attn_mask=penalty(CASTS[name]),
                need_weights=weights != "off", average_attn_weights=weights == "averaged",
            )  # fmt: skip
            mixed = CAST_WEIGHTS.to(dtype) @ module.v_proj(memory)
            wanted = module.out_proj(mixed)
        assert_close(out.float(), wanted.float(), rtol=3e-2, atol=3e-2)
        assert out.dtype == dtype
        if weight is not None:
            assert weight.dtype == query.dtype
            expected = CAST_WEIGHTS if weights == "averaged" else CAST_WEIGHTS.expand(H, 3, S)
            assert_close(weight[1].float(), expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_casting_a_float_mask_under_autocast(backend: str) -> None:
    """The kernel casts to the autocast dtype behind the call's back; float32's minimum must not become -inf there."""
    query = torch.zeros(1, H, 3, K)
    key, value = torch.randn(2, 1, H, S, K)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(query, key, value, mask=masks.bias(penalty(CASTS["float32 min"])), backend=backend)
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), CAST_WEIGHTS @ value, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_casting_a_float_mask_of_float64_is_not_needed_under_autocast(backend: str) -> None:
    """Autocast leaves float64 alone, so penalties beyond bfloat16's range keep their order."""
    query, key, value = torch.randn(3, 1, H, S, K, dtype=torch.float64).unbind(0)
    scores = torch.full((S, S), -1e300, dtype=torch.float64)
    scores[:, 3] = -1e200
    want = attention(query, key, value, mask=masks.bias(scores), backend=backend)
    assert_close(want, value[:, :, 3:4].expand_as(want))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(query, key, value, mask=masks.bias(scores), backend=backend), want)
        assert_close(attention_weights(query, key, mask=masks.bias(scores))[..., 3], torch.ones(1, H, S).double())


# --- 0/1 float mask ---------------------------------------------------------------------------------------------------

ZERO_ONE = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]] * L)
MESSAGE = r"^MultiheadAttention: the floating {name} holds only 0 and 1, which are added to the scores and hide nothing"


def warned(module: headwise.MultiheadAttention, **given: Tensor) -> list[str]:
    query, memory = torch.randn(B, L, D), torch.randn(B, S, D)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(query, memory, memory, **given)
    assert all(one.category is UserWarning for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_0_1_float_mask(name: str, dtype: torch.dtype, train: bool) -> None:
    """A warning, once a module, that names the mask and both cures; the numbers are torch's."""
    module = make_module(Way(False, True, train, "averaged", "eager"))
    mask = (ZERO_ONE if name == "attn_mask" else ZERO_ONE[:B]).to(dtype)
    query, memory = torch.randn(B, L, D), torch.randn(B, S, D)
    with pytest.warns(UserWarning, match=MESSAGE.format(name=name)) as caught:
        module(query, memory, memory, **{name: mask})
    assert len(caught) == 1
    assert caught[0].filename == __file__  # points at the caller
    assert f"{name}.bool()" in str(caught[0].message)
    assert f"{name} == 0" in str(caught[0].message)
    assert warned(module, **{name: mask}) == []  # once a module
    assert warned(module, attn_mask=ZERO_ONE, key_padding_mask=ZERO_ONE[:B]) == []
    other = make_module(Way(False, True, train, "averaged", "eager"))
    assert len(warned(other, attn_mask=ZERO_ONE, key_padding_mask=ZERO_ONE[:B])) == 1
    added = masks.bias(mask if name == "attn_mask" else mask[:, None, None])
    want = module(query, memory, memory, mask=added)[0]
    assert_close(module(query, memory, memory, **{name: mask})[0], want)


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * S,
        [1.0] * S,
        [0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 1.0],
        [0.0, 1.0, -INF, 0.0, 1.0, 0.0, 0.0],
        [0.0, 1.0, -1.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, -INF, -INF],
        [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, float("nan")],
        [0.0, 1.0, float("nan"), 0.0, 1.0, 0.0, 1.0],
    ],
    ids=str,
)
def test_0_1_float_mask_needs_both_and_nothing_else(values: list[float]) -> None:
    module = make_module(Way(False, True, True, "averaged", "eager"))
    assert warned(module, attn_mask=torch.tensor([values] * L)) == []
    assert warned(module, attn_mask=torch.zeros(L, S), key_padding_mask=torch.tensor([values] * B)) == []
    assert warned(module, attn_mask=ZERO_ONE.bool(), key_padding_mask=ZERO_ONE[:B].bool()) == []
    assert len(warned(module, attn_mask=ZERO_ONE)) == 1  # the others did not use it up


@pytest.mark.parametrize("where", [*itertools.product((0, 2, L - 1), (0, 3, S - 1))], ids=str)
def test_0_1_float_mask_reads_every_value(where: tuple[int, int]) -> None:
    module = make_module(Way(False, True, True, "averaged", "eager"))
    mask = torch.zeros(L, S)
    mask[where] = 1
    assert len(warned(module, attn_mask=mask)) == 1
    module = make_module(Way(False, True, True, "averaged", "eager"))
    mask[where] = 2
    assert warned(module, attn_mask=mask) == []


def test_0_1_float_mask_in_eager_mode_on_cpu_only() -> None:
    """Nothing reads values under compile, vmap or fake tensors: no warning, and no error from trying."""
    module = make_module(Way(False, True, True, "averaged", "eager"))
    query, memory = inputs(L, S)
    compiled = torch.compile(lambda q, m, mask: module(q, m, m, attn_mask=mask)[0], backend="eager", fullgraph=True)
    compiled(query, memory, ZERO_ONE)
    torch.func.vmap(lambda mask: module(query, memory, memory, attn_mask=mask))(torch.stack([ZERO_ONE, ZERO_ONE]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor.detach()) for tensor in (query, memory, ZERO_ONE)]
        assert module(fake[0], fake[1], fake[1], attn_mask=fake[2])[0].shape == (B, L, D)
    meta = make_module(Way(False, True, True, "averaged", "eager")).to("meta")
    on_meta = [tensor.to("meta") for tensor in (query, memory, ZERO_ONE)]
    assert meta(on_meta[0], on_meta[1], on_meta[1], attn_mask=on_meta[2])[0].shape == (B, L, D)
    with pytest.warns(UserWarning, match=MESSAGE.format(name="attn_mask")):
        module(query, memory, memory, attn_mask=ZERO_ONE)
