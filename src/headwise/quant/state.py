"""One int8 state of a projection, which eager int8, fake quantization and export all read.

    x is about input_scale * (u8 - input_zero_point)      one scale for the whole tensor
    weight is weight_scale[n] * s8                        one scale for each output channel
    bias is input_scale * weight_scale[n] * s32           where the input's scale is known beforehand; float otherwise

Letters: N output width, K input width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headwise._checks import invalid, is_number, kind_of

LEVELS = 255  # of a u8 input, above the lowest
FULL, REDUCED = 127, 63  # the greatest weight, and the one that no processor's 16-bit sums overflow on: 2 * 255 * 63
_SMALLEST = 1e-35  # of a scale, so that its reciprocal and its product with another are still float32 numbers
LEAST_SCALE = _SMALLEST / 2  # of an input, that is accepted: the smallest one made, with room for rounding
MOST_BIAS = 2**30  # of an int32 bias
_FINE_BIAS = 2**24  # steps of a bias that stands alone: as float32 has it
_MOST_SUM = 2**31 - 1  # of what the processor adds up
_MOST_FLOAT = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Int8State:
    """A linear layer in int8.

    Attributes:
        weight: (N, K) int8, within +-127, or +-63 if made with `reduce_range`.
        weight_scale: (N,) float32, above 0; the float weight is about weight_scale[:, None] * weight.
        bias: (N,) int32 in units of input_scale * weight_scale if static, (N,) float32 if dynamic; None: no bias.
        input_scale: of the u8 input; None: dynamic, taken from the range of each call's whole input.
        input_zero_point: the u8 number that stands for 0, 0 to 255; None: dynamic.

    Raises:
        ValueError: parts that are not so, or that do not fit each other.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_scale: float | None = None
    input_zero_point: int | None = None

    def __post_init__(self) -> None:
        _check_state(self)

    @property
    def is_static(self) -> bool:
        """Whether the input's scale is known beforehand."""
        return self.input_scale is not None

    def weights(self) -> Tensor:
        """The weights that the integers stand for: (N, K) float32."""
        return self.weight * self.weight_scale[:, None]

    def biases(self) -> Tensor | None:
        """The bias that is added: (N,) float32, or None."""
        return _biases(self.bias, self.weight_scale, self.input_scale)

    def reference(self, x: Tensor) -> Tensor:
        """The layer by float arithmetic on the rounded numbers: int8's answer on any device, at float's speed.

        Args:
            x: (..., K) float32.

        Returns:
            (..., N) float32; a row of x that holds NaN or infinity comes out as NaN and touches no other.
        """
        return float_linear(x, self.weight, self.weight_scale, self.bias, self.input_scale, self.input_zero_point)


def float_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | float | None,
    input_zero_point: Tensor | int | None,
) -> Tensor:
    """`Int8State.reference` of a state in parts; scale and zero point may be tensors, which are not looked at."""
    if torch.is_autocast_enabled(x.device.type):  # would make the product less exact than int8 is
        with torch.autocast(x.device.type, enabled=False):
            return float_linear(x, weight, weight_scale, bias, input_scale, input_zero_point)
    keep = x.isfinite().all(-1, keepdim=True)
    x = torch.where(keep, x, 0.0)
    scale, zero_point = (input_scale, input_zero_point) if input_scale is not None else dynamic_scale(x)
    assert scale is not None
    assert zero_point is not None
    # As torch.fake_quantize_per_tensor_affine to the bit, which graphs cannot hold with free sizes
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    zero_point = torch.as_tensor(zero_point, device=x.device)
    x = (x * scale.reciprocal()).round().clamp(-zero_point, LEVELS - zero_point) * scale
    out = functional.linear(x, weight * weight_scale[:, None], _biases(bias, weight_scale, input_scale))
    return torch.where(keep, out, math.nan)


def _biases(bias: Tensor | None, weight_scale: Tensor, input_scale: Tensor | float | None) -> Tensor | None:
    if bias is None or input_scale is None:
        return bias
    # In double, as the product of two small scales may be no float32 number
    return (bias.double() * (input_scale * weight_scale.double())).float()


def scale_of(low: float, high: float) -> tuple[float, int]:
    """Scale and zero point of u8 for numbers in [low, high]; the range is widened to hold 0, which stays exact.

    Args:
        low: the least number; above 0 counts as 0.
        high: the greatest one; below 0 counts as 0.

    Returns:
        The scale, above 0, a float32 number, and the zero point, 0 to 255. An empty range gives (1, 0).

    Raises:
        ValueError: a bound is not finite in float32, or low is above high.
    """
    if not (is_number(low) and is_number(high) and -_MOST_FLOAT <= low <= high <= _MOST_FLOAT):
        rule = "be finite numbers of float32, low first"
        raise invalid("scale_of", "low and high", rule, f"{low!r} and {high!r}")
    # By the arithmetic of training, so that both round alike to the last bit
    bounds = torch.tensor([low, high], dtype=torch.float32, device="cpu")
    scale, zero_point = tensor_scale(bounds[0], bounds[1])
    return scale.item(), int(zero_point)


def dynamic_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """`scale_of` for the range of a tensor, without a look at its numbers: two tensors of no dimensions."""
    if x.numel() == 0:
        return x.new_ones(()), torch.zeros((), dtype=torch.int32, device=x.device)
    low, high = torch.aminmax(x)
    return tensor_scale(low, high)


def tensor_scale(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """`scale_of` for bounds that are tensors, to train and to compile: float32 scale and int32 zero point."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # each divided first: the difference of two great numbers may be infinite
    scale = (high / LEVELS - low / LEVELS).clamp(min=_SMALLEST)
    scale = torch.where(high == low, 1.0, scale)
    return scale, (-low / scale).round().clamp(0, LEVELS).int()


def weight_scales(weight: Tensor, reduce_range: bool = False) -> Tensor:
    """(N,) float32 scales of a weight (N, K): each row's greatest number becomes 127, or 63 with `reduce_range`."""
    if weight.shape[1] == 0:
        return weight.new_ones(weight.shape[0])
    greatest = weight.detach().abs().amax(1)
    scale = greatest.double() / (REDUCED if reduce_range else FULL)
    return torch.where(greatest == 0, 1.0, scale.clamp(min=_SMALLEST)).float()


def make_state(
    weight: Tensor,
    bias: Tensor | None,
    input_range: tuple[float, float] | None = None,
    *,
    reduce_range: bool = False,
    function: str = "make_state",
    name: str = "weight",
) -> Int8State:
    """Round a linear layer to int8.

    Args:
        weight: (N, K) float32.
        bias: (N,) float32, or None.
        input_range: least and greatest number of the input, for a static state. None: dynamic.
        reduce_range: keep weights within +-63, so that processors without VNNI cannot overflow.
        function: which public name is at work, for errors.
        name: of the layer, for errors.

    Returns:
        The state, in memory of its own.

    Raises:
        ValueError: weight and bias do not fit, are not float32 or hold NaN or infinity; more input features than 32-bit
            sums hold (66,000, static 33,000); a range that is none.
    """
    _check_float(function, name, weight, bias)
    most = REDUCED if reduce_range else FULL
    widest = (_MOST_SUM - (MOST_BIAS if input_range is not None else 0)) // (LEVELS * most)
    if weight.shape[1] > widest:
        rule = f"be at most {widest:,} wide, or the sums of int8 products overflow; where= leaves it in float"
        raise invalid(function, name, rule, f"{weight.shape[1]:,} input features")
    scales, scale, zero_point = weight_scales(weight, reduce_range), None, None
    bias = None if bias is None else bias.detach().clone()
    if input_range is not None:
        scale, zero_point = scale_of(*input_range)
        if bias is not None:
            scales = _for_bias(scales, weight.detach(), bias.double(), scale)
            bias = (bias.double() / (scale * scales.double())).round().to(torch.int32)
    rounded = (weight.detach() / scales[:, None]).round_().clamp_(-most, most).to(torch.int8)
    return Int8State(rounded, scales, bias, scale, zero_point)


def _for_bias(scales: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Scales of weights by which a static layer's bias can be an int32 number too."""
    # A row without weights has no scale of its own, but its bias wants a fine one
    empty = (weight == 0).all(1) & (bias != 0)
    fine = (bias.abs() / (scale * _FINE_BIAS)).clamp(_SMALLEST, _MOST_FLOAT).float()
    # A bias far above all that the inputs can bring: coarser weights hold it
    coarse = (bias.abs() / (scale * MOST_BIAS)).float() * (1 + 1e-6)
    return torch.maximum(torch.where(empty, fine, scales), coarse)


def _check_float(function: str, name: str, weight: Tensor, bias: Tensor | None) -> None:
    for part, dims in ((weight, 2), (bias, 1)):
        if part is None and dims == 1:
            continue
        if not isinstance(part, Tensor) or part.layout is not torch.strided or part.dim() != dims:
            raise invalid(function, name, "have a weight (N, K) and a bias (N,) or None", kind_of(part))
        if part.is_meta or part.dtype != torch.float32:
            rule = "be float32 and hold numbers; model.float() converts it"
            raise invalid(function, name, rule, "a meta tensor" if part.is_meta else part.dtype)
        if not part.isfinite().all():
            bad = int((~part.isfinite()).sum())
            raise invalid(
                function, name, "hold finite numbers only", f"{bad} that are NaN or infinite of {part.numel()}"
            )
    if bias is not None and len(bias) != len(weight):
        raise invalid(function, name, f"have a bias of {len(weight)}", kind_of(bias))


def _check_state(state: Int8State) -> None:
    weight, scale, bias = state.weight, state.weight_scale, state.bias
    if not isinstance(weight, Tensor) or weight.dtype != torch.int8 or weight.dim() != 2:
        raise invalid("Int8State", "weight", "be int8 (N, K)", kind_of(weight))
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        raise invalid("Int8State", "weight_scale", f"be float32 ({len(weight)},)", kind_of(scale))
    kind = torch.float32 if state.input_scale is None else torch.int32
    if bias is not None and (not isinstance(bias, Tensor) or bias.dtype != kind or bias.shape != scale.shape):
        rule = f"be {kind} ({len(weight)},), as the state is {'static' if state.is_static else 'dynamic'}; or None"
        raise invalid("Int8State", "bias", rule, kind_of(bias))
    if (state.input_scale is None) != (state.input_zero_point is None):
        got = f"{state.input_scale} and {state.input_zero_point}"
        raise invalid("Int8State", "input_scale and input_zero_point", "both be given, or none", got)
    zero_point, step = state.input_zero_point, state.input_scale
    if step is not None and not (is_number(step) and LEAST_SCALE <= step <= _MOST_FLOAT):
        raise invalid("Int8State", "input_scale", f"be finite and at least {_SMALLEST}", repr(step))
    if zero_point is not None and not (type(zero_point) is int and 0 <= zero_point <= LEVELS):
        raise invalid("Int8State", "input_zero_point", "be an int of 0 to 255", repr(zero_point))
    if weight.is_meta or torch.compiler.is_compiling():
        return
    if weight.numel() and int(weight.amin()) < -FULL:
        raise invalid("Int8State", "weight", "be within +-127", int(weight.amin()))
    if not ((scale > 0) & scale.isfinite()).all():
        raise invalid("Int8State", "weight_scale", "be above 0 and finite", "others among them")
    if bias is not None and state.is_static and bias.numel():
        greatest = int(bias.long().abs().amax())
        if greatest > MOST_BIAS:
            raise invalid("Int8State", "bias", f"be within +-{MOST_BIAS}, to be added to sums of int32", greatest)
