"""The int8 state against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.quant.state import LEVELS, Int8State, dynamic_scale, make_state, scale_of, tensor_scale, weight_scales

FINITE = st.floats(-(2.0**100), 2.0**100, allow_nan=False, width=32)


@given(FINITE, FINITE)
def test_scale_covers_the_range_and_holds_zero(one, other):
    low, high = min(one, other), max(one, other)
    scale, zero_point = scale_of(low, high)
    assert scale > 0
    assert 0 <= zero_point <= LEVELS
    assert isinstance(zero_point, int)
    # Both ends are at most half a step outside what u8 can say; float32 rounds the scale itself
    reach = [scale * (level - zero_point) for level in (0, LEVELS)]
    slack = 0.5001 * scale * (1 + LEVELS * 1e-6)
    assert reach[0] - slack <= min(low, 0.0)
    assert max(high, 0.0) <= reach[1] + slack


@given(FINITE, FINITE)
def test_tensors_give_the_same_scale(one, other):
    low, high = min(one, other), max(one, other)
    scale, zero_point = scale_of(low, high)
    scale_t, zero_point_t = tensor_scale(torch.tensor(low), torch.tensor(high))
    assert scale_t.item() == pytest.approx(scale, rel=1e-6)
    assert abs(zero_point_t.item() - zero_point) <= 1
    assert zero_point_t.dtype == torch.int32


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-0.0, 0.0)])
def test_an_empty_range(low, high):
    assert scale_of(low, high) == (1.0, 0)
    assert [part.item() for part in tensor_scale(torch.tensor(low), torch.tensor(high))] == [1.0, 0]
    assert [part.item() for part in dynamic_scale(torch.zeros(0, 3))] == [1.0, 0]


@pytest.mark.parametrize(
    ("low", "high"), [(math.nan, 1.0), (0.0, math.inf), (2.0, 1.0), (0.0, 1e39), (0, 10**400), ("0", 1.0)]
)
def test_no_range(low, high):
    with pytest.raises(ValueError, match=r"^scale_of: low and high must be finite numbers of float32, low first; got "):
        scale_of(low, high)


@pytest.mark.parametrize("tiny", [1e-38, 1e-42, 0.0])
def test_reciprocals_of_scales_are_finite(tiny):
    scale, _ = scale_of(0.0, tiny)
    assert math.isfinite(torch.tensor(1 / scale, dtype=torch.float32).item())
    assert (1 / weight_scales(torch.full((2, 3), tiny))).isfinite().all()


@pytest.mark.parametrize("reduce_range", [False, True])
def test_each_channel_has_its_own_scale(reduce_range):
    weight = torch.randn(5, 7) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 5.0])[:, None]
    state = make_state(weight, None, reduce_range=reduce_range)
    most = 63 if reduce_range else 127
    assert state.weight.dtype == torch.int8
    assert state.weight.abs().amax(1).tolist() == [most, most, most, 0, most]
    error = (state.weights() - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / most * 0.5001).all()
    assert state.weight_scale.dtype == torch.float32


def test_static_bias_is_within_half_a_step():
    weight, bias = torch.randn(5, 7), torch.randn(5)
    state = make_state(weight, bias, (-2.0, 3.0))
    assert state.is_static
    assert state.bias.dtype == torch.int32
    assert state.input_scale == pytest.approx(5 / 255)
    step = state.input_scale * state.weight_scale
    assert ((state.biases() - bias).abs() <= 0.5001 * step + 1e-6).all()


def test_a_bias_beyond_int32_makes_coarser_weights():
    weight, bias = torch.randn(3, 7), torch.tensor([1e6, 0.5, -3e7])
    state = make_state(weight, bias, (-1e-3, 1e-3))
    torch.testing.assert_close(state.biases(), bias, rtol=1e-6, atol=1e-8)
    assert state.bias.abs().max() <= 2**30 + 1


def test_reference_is_exact_integer_arithmetic():
    weight, bias = torch.randn(5, 7), torch.randn(5)
    state = make_state(weight, bias, (-2.0, 3.0))
    x = torch.rand(4, 7) * 8 - 4  # beyond the range too: clipped
    x_int = (x / state.input_scale).round().long() + state.input_zero_point
    x_int = x_int.clamp(0, LEVELS) - state.input_zero_point
    got = state.reference(x)
    for row in range(4):
        for column in range(5):
            total = int((x_int[row] * state.weight[column].long()).sum()) + int(state.bias[column])
            exact = total * Fraction(state.input_scale) * Fraction(state.weight_scale[column].item())
            assert got[row, column].item() == pytest.approx(float(exact), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("input_range", [None, (-3.0, 3.0)], ids=["dynamic", "static"])
def test_rows_that_are_no_numbers(bad, input_range):
    state = make_state(torch.randn(5, 7), torch.randn(5), input_range)
    x = torch.randn(4, 7)
    x[2] = 100.0  # beside the bad number in its row: must not widen the range of the others
    clean = state.reference(x[[0, 1, 3]])
    x[2, 3] = bad
    got = state.reference(x)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], clean)


def test_wrong_weights():
    with pytest.raises(
        ValueError, match=r"^quantize: head must hold finite numbers only; got 2 that are NaN or infinite"
    ):
        make_state(torch.tensor([[1.0, math.nan], [math.inf, 0.0]]), None, function="quantize", name="head")
    with pytest.raises(ValueError, match=r"be float32 .*model.float\(\) converts it; got torch.float64"):
        make_state(torch.randn(2, 2, dtype=torch.float64), None)
    with pytest.raises(ValueError, match="got a meta tensor"):
        make_state(torch.randn(2, 2, device="meta"), None)


def test_state_is_its_own():
    weight, bias = torch.randn(5, 7), torch.randn(5)
    state = make_state(weight, bias)
    before = Int8State(state.weight.clone(), state.weight_scale.clone(), state.bias.clone())
    weight.zero_()
    bias.zero_()
    assert torch.equal(state.weight, before.weight)
    assert torch.equal(state.bias, before.bias)


@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (0, 0)])
def test_empty(shape):
    state = make_state(torch.randn(shape), torch.randn(shape[0]), (-1.0, 1.0))
    assert state.reference(torch.randn(2, shape[1])).shape == (2, shape[0])


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_rows_without_weights_keep_their_bias(size):
    weight, bias = torch.randn(4, 16), torch.tensor([0.3, -7.0, 1e-5, 0.0])
    weight[[0, 2, 3]] = 0
    state = make_state(weight, bias, (-size, size))
    torch.testing.assert_close(state.biases()[[0, 2, 3]], bias[[0, 2, 3]], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("width", "input_range"), [(70_000, None), (40_000, (0.0, 1.0))])
def test_sums_beyond_32_bits_are_refused(width, input_range):
    weight = torch.full((2, width), 0.01)
    with pytest.raises(ValueError, match=rf"wide, or the sums .* overflow; where= .*got {width:,} input features"):
        make_state(weight, None, input_range)
    state = make_state(weight[:, :33_000], None, input_range)
    torch.testing.assert_close(state.reference(torch.ones(1, 33_000)), torch.full((1, 2), 330.0), rtol=1e-2, atol=0)


WEIGHT, SCALE = torch.ones(3, 4, dtype=torch.int8), torch.ones(3)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((WEIGHT.float(), SCALE, None), r"weight must be int8 \(N, K\)"),
        ((WEIGHT[0], SCALE, None), r"weight must be int8 \(N, K\)"),
        ((-128 * WEIGHT, SCALE, None), r"within \+-127; got -128"),
        ((WEIGHT, SCALE[:2], None), r"weight_scale must be float32 \(3,\)"),
        ((WEIGHT, SCALE.double(), None), r"weight_scale must be float32 \(3,\)"),
        ((WEIGHT, -SCALE, None), "above 0 and finite"),
        ((WEIGHT, SCALE * math.nan, None), "above 0 and finite"),
        ((WEIGHT, SCALE, SCALE, 1.0, 3), r"bias must be torch.int32 \(3,\), as the state is static"),
        ((WEIGHT, SCALE, SCALE.int()), r"bias must be torch.float32 \(3,\), as the state is dynamic"),
        ((WEIGHT, SCALE, None, 1.0), "both be given, or none"),
        ((WEIGHT, SCALE, None, -1.0, 3), "input_scale must be finite"),
        ((WEIGHT, SCALE, None, 1e-45, 3), "input_scale must be finite"),
        ((WEIGHT, SCALE, torch.full((3,), 2**30 + 1).int(), 1.0, 3), r"bias must be within .*; got 1073741825"),
        ((WEIGHT, SCALE, torch.full((3,), -(2**31)).int(), 1.0, 3), r"bias must be within .*; got 2147483648"),
        ((WEIGHT, SCALE, None, 1.0, 300), "input_zero_point must be an int of 0 to 255"),
        ((WEIGHT, SCALE, None, 1.0, 3.5), "input_zero_point must be an int of 0 to 255"),
    ],
)
def test_states_that_cannot_be(parts, says):
    with pytest.raises(ValueError, match=f"^Int8State: .*{says}"):
        Int8State(*parts)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [(torch.ones(3), None), (torch.ones(3, 4), torch.ones(2)), ([[1.0]], None), (torch.ones(2, 2), 3)],
)
def test_weights_of_another_shape(weight, bias):
    with pytest.raises(ValueError, match=r"^make_state: weight must have a"):
        make_state(weight, bias)


def test_in_float32_under_autocast():
    state, x = make_state(torch.randn(5, 7), torch.randn(5), (-3.0, 3.0)), torch.randn(4, 7)
    want = state.reference(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(state.reference(x), want)


@pytest.mark.parametrize("input_range", [None, (-2.0, 3.0)])
def test_rounding_is_torchs_to_the_bit(input_range):
    state = make_state(torch.randn(5, 7), None, input_range)
    x = torch.randn(50, 7) * 3
    scale, zero_point = dynamic_scale(x) if input_range is None else (state.input_scale, state.input_zero_point)
    rounded = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, LEVELS)
    assert torch.equal(state.reference(x), torch.nn.functional.linear(rounded, state.weights()))


def test_another_default_device():
    with torch.device("meta"):
        state = make_state(torch.randn(5, 7, device="cpu"), torch.randn(5, device="cpu"), (-1.0, 1.0))
        assert state.reference(torch.randn(2, 7, device="cpu")).device.type == "cpu"
