"""`FakeQuantLinear`: what an `nn.Linear` is while it is trained for int8.

Letters: K input width, N output width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._checks import invalid, kind_of
from headwise.core.backends import autocasts, eager, transformed
from headwise.core.nested import read_samples
from headwise.quant.state import FULL, LEVELS, REDUCED, Int8State, make_state, tensor_scale, weight_scales

_NAME = "FakeQuantLinear"
# The range is the plain mean of the first hundred batches' extremes, then follows those of about the last hundred:
# weights that train move it, one batch with an outlier does not. The first batch weighs no more than any other.
_RATE = 0.01
_LOWER = (torch.float16, torch.bfloat16)  # what autocast makes of float32


class FakeQuantLinear(nn.Linear):
    """A linear layer that computes with the numbers that int8 will have, and trains the float weights behind them.

    The input is rounded to u8 with one scale, the weights to s8 with one for each output channel; gradients pass
    straight through the rounding, and are 0 where an input lies outside of its range. In training the range follows
    the inputs for `freeze_after` forwards. In eval nothing changes: what is computed is what `headwise.convert` makes.

    Made by `headwise.prepare_qat`. `weight` and `bias` are the Parameters that the `nn.Linear` had.

    Buffers: `input_low`, `input_high`, the range of the input (float32, no dimensions), and `steps`, the training
    forwards that it was made of (int64, no dimensions). With DistributedDataParallel those of the first process count.

    Attributes:
        freeze_after: training forwards after which the range stays as it is.
        reduce_range: weights within +-63 rather than +-127.
    """

    input_low: Tensor
    input_high: Tensor
    steps: Tensor
    freeze_after: int
    reduce_range: bool

    @classmethod
    def become(cls, layer: nn.Linear, freeze_after: int, reduce_range: bool) -> FakeQuantLinear:
        """Turn a linear layer into this, the same object with the same Parameters."""
        made: Any = layer
        made.__class__ = cls
        made.freeze_after, made.reduce_range = freeze_after, reduce_range
        device = layer.weight.device
        for name in ("input_low", "input_high"):
            made.register_buffer(name, torch.zeros((), dtype=torch.float32, device=device))
        made.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        return made  # type: ignore[no-any-return]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as `nn.Linear` calls it
        """Multiply the rounded input by the rounded weights and add the bias.

        Args:
            input: (..., K) float32, or what autocast made of it; or nested (B, *, K).

        Returns:
            (..., N), in the dtype that `nn.Linear` gives: rounding is done in float32, the product as autocast says. A
            row of the input that holds NaN or infinity comes out as NaN, and the range does not see it.

        Raises:
            ValueError: an input of another width, dtype, layout or device, or weights that are no longer float32; the
                range has not seen it.

        In eval, before any training forward, the range is that of the input itself. A forward that is run again within
        the backward pass (gradient checkpointing) counts once. Within function transforms (`torch.func`, forward-mode
        AD) a forward counts as in eval: ranges and steps stay as they are.
        """
        if isinstance(input, Tensor) and input.is_nested:
            samples = read_samples(_NAME, "input", input)
            return samples.like(self._project(samples.values))
        return self._project(input)

    def fake_weight(self) -> Tensor:
        """The weights as int8 rounds them: (N, K) float32, with gradients for `weight`."""
        scales, most = weight_scales(self.weight, self.reduce_range), REDUCED if self.reduce_range else FULL
        return _on_grid(self.weight, scales[:, None], -most, most)

    def state(self, dynamic: bool, function: str, name: str) -> Int8State:
        """The int8 state with these weights; with this range unless dynamic.

        Raises:
            ValueError: NaN or infinity in weights or bias; no training forward yet, unless dynamic.
        """
        if not dynamic and not int(self.steps):
            rule = "have been called in training, which finds the range of its input; or dynamic=True"
            raise invalid(function, name, rule, "no training forward since prepare_qat")
        if not (self.input_low.isfinite() and self.input_high.isfinite()):
            raise invalid(function, name, "have a finite input range", f"{self.input_low} to {self.input_high}")
        # The rounded weights, not the trained ones: a number half way between two steps may be rounded either way
        weight = self.fake_weight().detach() if self.weight.isfinite().all() else self.weight
        span = None if dynamic else (self.input_low.item(), self.input_high.item())
        return make_state(weight, self.bias, span, reduce_range=self.reduce_range, function=function, name=name)

    def extra_repr(self) -> str:
        """As `nn.Linear`, and when the range is fixed."""
        reduced = ", reduce_range=True" if self.reduce_range else ""
        return f"{super().extra_repr()}, freeze_after={self.freeze_after}{reduced}"

    def _project(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.float32:
            rule = "stay float32 while it is trained for int8; use torch.autocast for a lower precision"
            raise invalid(_NAME, "weight", rule, self.weight.dtype)
        width = self.weight.shape[-1]
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.dim() == 0 or x.shape[-1] != width:
            raise invalid(_NAME, "input", f"be a dense tensor of {width} channels, (..., {width})", _described(x))
        if x.dtype != torch.float32 and not (x.dtype in _LOWER and autocasts(x.device)):
            raise invalid(_NAME, "input", "be float32, or come under torch.autocast", kind_of(x))
        if x.device != self.weight.device:
            raise invalid(_NAME, "input", f"be on {self.weight.device}, where the weights are", x.device)
        return functional.linear(self._fake_input(x.float()), self.fake_weight(), self.bias)

    def _fake_input(self, x: Tensor) -> Tensor:
        """The input as u8 rounds it, rows that are not finite as NaN; follows the range in training."""
        with torch.no_grad():
            # 0, or NaN in a row that holds NaN or infinity; a tenth of the time of isfinite
            poison = (x.detach() * 0.0).sum(-1, keepdim=True)
            low, high = self._range(x.detach(), poison == 0.0)
            scale, zero_point = tensor_scale(low, high)
        return _on_grid(x, scale, -zero_point, LEVELS - zero_point) + poison

    def _range(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """The range to round with, without a look at its numbers; in training it is brought forward first."""
        if x.numel() == 0:
            return self.input_low.clone(), self.input_high.clone()
        low = torch.where(keep, x.amin(-1, keepdim=True), 0.0).amin()
        high = torch.where(keep, x.amax(-1, keepdim=True), 0.0).amax()
        if not self.training or transformed():  # a transform may not write to what it is not given
            seen = self.steps > 0
            return torch.where(seen, self.input_low, low), torch.where(seen, self.input_high, high)
        if not _in_backward():
            follows = keep.any() & (self.steps < self.freeze_after)
            rate = torch.where(follows, (1.0 / (self.steps + 1)).clamp(min=_RATE), 0.0)
            for held, this in ((self.input_low, low), (self.input_high, high)):
                held.copy_(2 * torch.lerp(held / 2, this / 2, rate))  # halves: the whole difference may be infinite
            self.steps.add_(follows)
        return self.input_low, self.input_high


def _on_grid(x: Tensor, scale: Tensor, low: Any, high: Any) -> Tensor:
    """scale times the whole number nearest to x / scale in [low, high]; gradients pass where that is not at an end."""
    if eager():
        return cast(Tensor, _Rounded.apply(x, scale, low, high))
    # In graphs by plain operations: torch's own have no rule for dynamic shapes
    steps = (x.detach() * scale.reciprocal()).round()
    kept = steps.clamp(low, high)
    inside = torch.where(kept == steps, x, 0.0)
    return kept * scale + (inside - inside.detach())  # plus 0: the numbers are the first's, the gradient the second's


class _Rounded(torch.autograd.Function):
    """`torch.fake_quantize_per_tensor_affine` and its like, numbers and gradients, several times as fast on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, low: Any, high: Any) -> Tensor:  # tensors or numbers
        steps = (x * scale.reciprocal()).round_()
        kept = steps.clamp(low, high)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(kept == steps)
        return kept.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grad, 0.0), None, None, None


def _described(value: object) -> str:
    sparse = isinstance(value, Tensor) and value.layout != torch.strided
    return f"{kind_of(value)}, {value.layout}" if sparse else kind_of(value)  # type: ignore[attr-defined]


def _in_backward() -> bool:
    """Whether this forward is a recomputation, by a checkpoint, within a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
