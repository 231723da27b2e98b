"""Where a query and a key stand, for attention: rotary angles on both, or a bias that grows with their distance.

Letters: B batch, H heads, L query positions, S key positions, K head width, N its part that is turned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import invalid, positive
from headwise.core import masks
from headwise.core.algebra import Mask

__all__ = ["Alibi", "Rotary", "alibi_slopes"]

_SCALINGS = ("linear", "ntk", "yarn")
# of YaRN: pairs that turn more often than this within the original length stay, those that turn less are stretched
_FAST, _SLOW = 32.0, 1.0


class Rotary(nn.Module):
    """Rotary positions: turns pairs of a query's or key's numbers by angles that grow with its position.

        angle[p, n] = p * base^(-2n / N),   n = 0 .. N/2 - 1
        out[n] + i * out[n + N/2] = (x[n] + i * x[n + N/2]) * exp(i * angle[p, n])

    A product of a turned query and a turned key depends on the distance of their positions only.

    Args:
        base: of the angles, above 1; larger ones turn slower.
        fraction: N / K, the share of a head's width that is turned, in (0, 1]; its first N numbers.
        scaling: how to reach positions beyond those of training. None: not. "linear": every angle / factor. "ntk": a
            larger base, base * factor^(N / (N - 2)), which leaves the fastest pair as it is and slows the slowest one
            by the factor, whatever the length. "yarn": fast pairs stay, slow ones are slowed by the factor, those
            between a mix; turned numbers grow by 0.1 ln(factor) + 1.
        factor: new length / trained length, at least 1; with a scaling.
        original_length: positions in training, for "yarn", which counts the turns of a pair within them.

    Raises:
        ValueError: a value outside of these, or one that the scaling has no use for.

    No parameters and no buffers: angles are computed anew for each call, in float32 (float64 for float64).

    Pairs are (n, n + N/2), as in Hugging Face's Llama, GPT-NeoX and Qwen ("half-split"). Weights of models that turn
    (2n, 2n + 1), such as Meta's own Llama, need the rows of q_proj and k_proj reordered.

    Source: arXiv 2104.09864 section 3.4; arXiv 2306.15595 (linear); arXiv 2309.00071 (ntk, yarn).
    Checked in: tests/unit/core/test_positions.py.

    Example:
        >>> import torch
        >>> from headwise.core.positions import Rotary
        >>> x = torch.randn(2, 8, 5, 16)
        >>> Rotary()(x, 100).shape
        torch.Size([2, 8, 5, 16])
    """

    def __init__(
        self,
        base: float = 10_000.0,
        *,
        fraction: float = 1.0,
        scaling: str | None = None,
        factor: float = 1.0,
        original_length: int | None = None,
    ) -> None:
        super().__init__()
        _check_number("base", base, 1 < _number(base) < math.inf, "be a number above 1")
        _check_number("fraction", fraction, 0 < _number(fraction) <= 1, "be in (0, 1]")
        _check_number("factor", factor, 1 <= _number(factor) < math.inf, "be a number of at least 1")
        if scaling is not None and scaling not in _SCALINGS:
            raise invalid("Rotary", "scaling", "be 'linear', 'ntk', 'yarn' or None", repr(scaling))
        if scaling is None and factor != 1:
            raise invalid("Rotary", "factor", "be 1 without a scaling; pass scaling='yarn' or another", factor)
        if (original_length is not None) != (scaling == "yarn"):
            rule = "be the number of positions in training for 'yarn', and None otherwise"
            raise invalid("Rotary", "original_length", rule, original_length)
        self.base, self.fraction, self.scaling, self.factor = base, fraction, scaling, factor
        self.original_length = None
        if original_length is not None:
            self.original_length = positive("Rotary", "original_length", original_length)

    def width(self, head_dim: int) -> int:
        """N, how many of a head's K numbers are turned.

        Raises:
            ValueError: it is odd or 0, or too narrow for "ntk".
        """
        turned = int(head_dim * self.fraction)
        if turned < 2 or turned % 2:
            rule = f"be even, 2 at least: Rotary turns pairs; change head_dim, or fraction {self.fraction}"
            raise invalid("Rotary", "the width that is turned", rule, f"{turned} of head_dim {head_dim}")
        if self.scaling == "ntk" and turned == 2:
            raise invalid("Rotary", "the width that is turned", "be 4 at least for scaling='ntk'", turned)
        return turned

    def rates(self, head_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """(N/2,) the angle, in radians, from one position to the next."""
        N, base = self.width(head_dim), self.base
        if self.scaling == "ntk":
            base *= self.factor ** (N / (N - 2))
        step_N = torch.arange(0, N, 2, dtype=dtype, device=device) / N
        rates_N = 1.0 / base**step_N
        if self.scaling == "linear":
            return rates_N / self.factor
        if self.scaling != "yarn":
            return rates_N
        assert self.original_length is not None

        def pair_that_turns(often: float) -> float:
            assert self.original_length is not None
            return N * math.log(self.original_length / (often * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = max(math.floor(pair_that_turns(_FAST)), 0), min(math.ceil(pair_that_turns(_SLOW)), N - 1)
        pair_N = torch.arange(N // 2, dtype=dtype, device=device)
        slowed_N = ((pair_N - first) / (last - first or 0.001)).clamp(0, 1)
        return rates_N * (1 - slowed_N) + rates_N / self.factor * slowed_N

    def forward(self, x_BHLK: Tensor, positions: int | Tensor = 0) -> Tensor:
        """x, turned.

        Args:
            x_BHLK: (B, H, L, K), queries or keys.
            positions: an int, or an integer tensor (), the position of the first of L that follow each other; or an
                integer tensor (L,) or (B, L), the position of each.

        Returns:
            (B, H, L, K) in x's dtype.

        Raises:
            ValueError: positions of another dtype or shape.
        """
        (B, _, L, K), N = x_BHLK.shape, self.width(x_BHLK.shape[-1])
        dtype = torch.float64 if x_BHLK.dtype == torch.float64 else torch.float32
        at = _places(positions, B, L, x_BHLK.device)
        angle = at[..., None].to(dtype) * self.rates(K, dtype, x_BHLK.device)  # (L, N/2) or (B, 1, L, N/2)
        cos, sin = angle.cos(), angle.sin()
        if self.scaling == "yarn":
            grown = 0.1 * math.log(self.factor) + 1
            cos, sin = cos * grown, sin * grown
        first, second = x_BHLK[..., : N // 2], x_BHLK[..., N // 2 : N]
        parts = [(first * cos - second * sin).to(x_BHLK.dtype), (second * cos + first * sin).to(x_BHLK.dtype)]
        return torch.cat([*parts, x_BHLK[..., N:]] if N < K else parts, dim=-1)

    def extra_repr(self) -> str:
        """Base, and what differs from the default."""
        said = [f"base={self.base}"]
        said += [f"fraction={self.fraction}"] if self.fraction != 1 else []
        said += [f"scaling={self.scaling!r}, factor={self.factor}"] if self.scaling else []
        said += [f"original_length={self.original_length}"] if self.original_length else []
        return ", ".join(said)


class Alibi(nn.Module):
    """ALiBi: scores fall with the distance of query and key, `-slope[h] * |position of query - position of key|`.

    Args:
        num_heads: H.
        learned: True holds the slopes as a Parameter `slopes` (H,), which starts at the fixed ones; nothing keeps
            them positive.
        device: of that Parameter. None: torch's default.
        dtype: of that Parameter. None: torch's default.

    Raises:
        ValueError: H below 1, `learned` not a bool, a dtype that is not of real floating-point numbers.

    In the paper, whose models are causal, the key never comes after the query; both sides fall alike here, so that
    encoders can use it.

    Source: arXiv 2108.12409 section 3, and its code for H that is no power of two.
    Checked in: tests/unit/core/test_positions.py.
    """

    def __init__(
        self,
        num_heads: int,
        learned: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = positive("Alibi", "num_heads", num_heads)
        if not isinstance(learned, bool):
            raise invalid("Alibi", "learned", "be True or False", repr(learned))
        if dtype is not None:
            _check_floating("Alibi", dtype)
        made = nn.Parameter(torch.empty(self.num_heads, device=device, dtype=dtype)) if learned else None
        self.register_parameter("slopes", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set learned slopes to the fixed ones."""
        if isinstance(self.slopes, Tensor):
            with torch.no_grad():
                self.slopes.copy_(alibi_slopes(self.num_heads, self.slopes.dtype, self.slopes.device))

    def forward(self, query_BHLK: Tensor, offset: int | Tensor = 0) -> Mask:
        """The bias as a mask, `masks.alibi`.

        Args:
            query_BHLK: tells dtype and device.
            offset: keys before the first query's own position, as in `masks.causal`.
        """
        slopes = self.slopes
        if not isinstance(slopes, Tensor):
            dtype = torch.float64 if query_BHLK.dtype == torch.float64 else torch.float32
            slopes = alibi_slopes(self.num_heads, dtype, query_BHLK.device)
        return masks.alibi(slopes, offset)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_heads}, learned={self.slopes is not None}"


def alibi_slopes(
    num_heads: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """ALiBi's fixed slopes, steepest first.

    Args:
        num_heads: H.
        dtype: of the result, computed in float32 at least.
        device: of the result. None: torch's default.

    Returns:
        (H,): 2^(-8h / H), h = 1 .. H, for a power of two. Otherwise those of the power of two below H, followed by
        every second one of twice that power, as the authors' code has it.

    Raises:
        ValueError: H below 1, or a dtype in which the slopes would be whole numbers.

    Source: arXiv 2108.12409 section 3; its code, `get_slopes`.

    Example:
        >>> alibi_slopes(8)[:3]
        tensor([0.5000, 0.2500, 0.1250])
    """
    positive("alibi_slopes", "num_heads", num_heads)
    _check_floating("alibi_slopes", dtype)
    power = 1 << (num_heads.bit_length() - 1)
    wide: Any = torch.float64 if dtype == torch.float64 else torch.float32
    head = torch.arange(1, power + 1, dtype=wide, device=device)
    slopes = torch.exp2(head * (-8.0 / power))
    if power < num_heads:
        between = torch.exp2((head[: num_heads - power] * 2 - 1) * (-4.0 / power))
        slopes = torch.cat([slopes, between])
    return slopes.to(dtype)


def _check_floating(function: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise invalid(function, "dtype", "be one of floating-point numbers, as torch.float32", repr(dtype))


def _places(positions: int | Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    """(L,), or (B, 1, L)."""
    if not isinstance(positions, Tensor):
        if isinstance(positions, bool) or not isinstance(positions, (int, torch.SymInt)):
            raise invalid("Rotary", "positions", "be an int or an integer tensor", repr(positions))
        return torch.arange(positions, positions + length, device=device)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise invalid("Rotary", "positions", "be integers", positions.dtype)
    if positions.device != device:
        raise invalid("Rotary", "positions", f"be on the device of what is turned, {device}", positions.device)
    if positions.dim() == 0:
        return torch.arange(length, device=device) + positions
    if positions.shape[-1] != length or positions.dim() > 2 or (positions.dim() == 2 and len(positions) != batch):
        rule = f"be one for each of L, ({length},), or of B and L, ({batch}, {length})"
        raise invalid("Rotary", "positions", rule, tuple(positions.shape))
    return positions if positions.dim() == 1 else positions[:, None]


def _number(value: object) -> float:
    """NaN for what is none, which no rule takes."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _check_number(argument: str, value: object, fits: bool, rule: str) -> None:
    if not fits:
        raise invalid("Rotary", argument, rule, repr(value))
