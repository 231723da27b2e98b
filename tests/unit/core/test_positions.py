"""Rotary angles and ALiBi slopes against their papers' formulas, number by number."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import attention, masks
from headwise.core import reference
from headwise.core.lowering import Size
from headwise.core.positions import Alibi, Rotary, alibi_slopes

B, H, L, K = 2, 3, 5, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": {"base": 500.0},
    "half": {"fraction": 0.5},
    "linear": {"scaling": "linear", "factor": 4.0},
    "ntk": {"scaling": "ntk", "factor": 4.0},
    "yarn": {"scaling": "yarn", "factor": 4.0, "original_length": 64},
    "yarn, half": {"scaling": "yarn", "factor": 8.0, "original_length": 300, "fraction": 0.5, "base": 100.0},
}
EACH = pytest.mark.parametrize("name", SETTINGS)


def rate(pair: int, width: int, settings: dict[str, Any]) -> float:
    """The angle of a pair from one position to the next, as the papers have it."""
    base, scaling, factor = settings.get("base", 10_000.0), settings.get("scaling"), settings.get("factor", 1.0)
    if scaling == "ntk":
        base *= factor ** (width / (width - 2))
    plain = base ** (-2 * pair / width)
    if scaling == "linear":
        return plain / factor
    if scaling != "yarn":
        return plain

    def dimension(turns: float) -> float:  # YaRN's appendix: the pair that turns so often within the length
        return width * math.log(settings["original_length"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), width - 1)
    slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
    return plain * (1 - slowed) + plain / factor * slowed


def by_hand(x: Tensor, positions: Tensor, settings: dict[str, Any]) -> Tensor:
    """A complex number times exp(i * angle); positions (B, L)."""
    width = int(x.shape[-1] * settings.get("fraction", 1.0))
    rates = torch.tensor([rate(pair, width, settings) for pair in range(width // 2)], dtype=torch.float64)
    angle = (positions.double()[..., None] * rates)[:, None]
    turned = torch.complex(x[..., : width // 2], x[..., width // 2 : width]) * torch.exp(1j * angle)
    if settings.get("scaling") == "yarn":
        turned = turned * (0.1 * math.log(settings["factor"]) + 1)
    return torch.cat([turned.real, turned.imag, x[..., width:]], dim=-1)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@EACH
def test_rotary_formula(name: str) -> None:
    """With every way to say where the positions are."""
    x = torch.randn(B, H, L, K, dtype=torch.float64)
    rotary = Rotary(**SETTINGS[name])
    row = torch.arange(L).expand(B, L)
    close(rotary(x), by_hand(x, row, SETTINGS[name]))
    for start in (70, torch.tensor(70), torch.arange(70, 70 + L), torch.arange(70, 70 + L, dtype=torch.int32)):
        close(rotary(x, start), by_hand(x, row + 70, SETTINGS[name]))
    each = torch.tensor([[0, 1, 2, 0, 1], [7, 3, 100, 4, 2]])
    close(rotary(x, each), by_hand(x, each, SETTINGS[name]))


@EACH
def test_rotary_depends_on_the_distance_only(name: str) -> None:
    rotary = Rotary(**SETTINGS[name])
    q, k = torch.randn(2, 1, 1, 1, K, dtype=torch.float64).unbind(0)
    products = [(rotary(q, at) * rotary(k, at - 9)).sum() for at in (9, 50, 4321)]
    close(products[1], products[0], 1e-9)
    close(products[2], products[0], 1e-9)
    assert (products[0] - (rotary(q, 9) * rotary(k, 1)).sum()).abs() > 1e-3


@EACH
def test_rotary_in_other_dtypes(name: str) -> None:
    """Angles in float32; 16-bit numbers are turned in float32 and rounded once."""
    x, rotary = torch.randn(B, H, L, K), Rotary(**SETTINGS[name])
    want = by_hand(x.double(), torch.arange(L).expand(B, L) + 200, SETTINGS[name])
    close(rotary(x, 200).double(), want, 1e-4)
    low = rotary(x.bfloat16(), 200)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, rotary(x.bfloat16().float(), 200).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary(x, 200), rotary(x, 200))
        assert rotary(x).dtype == torch.float32


def test_rotary_gradient() -> None:
    """Turning is a rotation: the gradient is turned back."""
    x = torch.randn(B, H, L, K, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(B, H, L, K, dtype=torch.float64)
    (grad,) = torch.autograd.grad((Rotary()(x, 11) * probe).sum(), x)
    close(grad, by_hand(probe, -torch.arange(11, 11 + L).expand(B, L), {}))


def test_rotary_holds_nothing() -> None:
    """No tensors: nothing to save, move or lose."""
    rotary = Rotary(scaling="yarn", factor=2.0, original_length=16, fraction=0.5)
    x = torch.randn(B, H, L, K)
    want = rotary(x, 3)
    for same in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), rotary.to("meta").to_empty(device="cpu")):
        assert torch.equal(same(x, 3), want)
    assert not rotary.state_dict()
    assert not [value for value in vars(rotary).values() if isinstance(value, Tensor)]
    assert repr(rotary) == "Rotary(base=10000.0, fraction=0.5, scaling='yarn', factor=2.0, original_length=16)"
    assert repr(Rotary()) == "Rotary(base=10000.0)"


def test_rotary_of_no_positions() -> None:
    assert Rotary()(torch.ones(2, 3, 0, 4)).shape == (2, 3, 0, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"base": 1.0}, "base must be a number above 1; got 1.0"),
        ({"base": "10000"}, "base must be a number above 1"),
        ({"base": math.nan}, "base must be a number above 1"),
        ({"fraction": 0.0}, r"fraction must be in \(0, 1\]"),
        ({"fraction": 1.5}, r"fraction must be in \(0, 1\]"),
        ({"scaling": "dynamic"}, "scaling must be 'linear', 'ntk', 'yarn' or None"),
        ({"scaling": "linear", "factor": 0.5}, "factor must be a number of at least 1"),
        ({"factor": 2.0}, "factor must be 1 without a scaling"),
        ({"scaling": "yarn", "factor": 2.0}, "original_length must be the number of positions"),
        ({"scaling": "ntk", "factor": 2.0, "original_length": 5}, "original_length must be"),
        ({"scaling": "yarn", "factor": 2.0, "original_length": 0}, "original_length must be an int of at least 1"),
    ],
    ids=str,
)
def test_rotary_refuses(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(**words)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (1.5, "be an int or an integer tensor"),
        (True, "be an int or an integer tensor"),
        (torch.ones(L), "positions must be integers"),
        (torch.ones(L, dtype=torch.bool), "positions must be integers"),
        (torch.arange(L + 1), r"\(5,\), or of B and L, \(2, 5\); got \(6,\)"),
        (torch.zeros(3, L, dtype=torch.int64), r"got \(3, 5\)"),
        (torch.zeros(L, dtype=torch.int64, device="meta"), "on the device of what is turned, cpu"),
    ],
    ids=str,
)
def test_rotary_refuses_positions(positions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary()(torch.ones(B, H, L, K), positions)


@pytest.mark.parametrize(
    ("words", "width", "message"),
    [
        ({}, 7, "be even, 2 at least.*got 7 of head_dim 7"),
        ({"fraction": 0.5}, 6, "got 3 of head_dim 6"),
        ({"fraction": 0.1}, 8, "got 0 of head_dim 8"),
        ({"scaling": "ntk", "factor": 2.0}, 2, "be 4 at least for scaling='ntk'"),
    ],
    ids=str,
)
def test_rotary_refuses_widths(words: dict[str, Any], width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(**words)(torch.ones(B, H, L, width))


# --- ALiBi --------------------------------------------------------------------------------------------------------


def papers_slopes(heads: int) -> list[float]:
    """`get_slopes` of the paper's code."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return papers_slopes(closest) + papers_slopes(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 71])
def test_slopes(heads: int) -> None:
    want = torch.tensor(papers_slopes(heads), dtype=torch.float64)
    close(alibi_slopes(heads, torch.float64), want)
    close(alibi_slopes(heads), want.float(), 1e-6)
    assert torch.equal(alibi_slopes(heads, torch.bfloat16), alibi_slopes(heads).bfloat16())


def test_the_papers_list() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-power for power in range(1, 9)]


@pytest.mark.parametrize("offset", [0, 3, torch.tensor(3), torch.tensor([0, 4])], ids=str)
def test_alibi_mask(offset: int | Tensor) -> None:
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)
    first = torch.as_tensor(offset).expand(B)
    want = torch.stack(
        [
            torch.stack([-slope * (torch.arange(L)[:, None] + int(start) - torch.arange(7)).abs() for slope in slopes])
            for start in first
        ]
    )
    mask = masks.alibi(slopes, offset)
    assert mask.keep(Size(B, H, L, 7, slopes.device)) is None
    score = mask.score(Size(B, H, L, 7, slopes.device))
    assert score is not None
    close(score.expand(B, H, L, 7), want)
    q, k, v = torch.randn(3, B, H, 7, K, dtype=torch.float64).unbind(0)
    out = attention(q[:, :, :L], k, v, mask=mask & masks.causal(offset))
    keep = torch.arange(7) <= first[:, None, None, None] + torch.arange(L)[:, None]
    expected, _ = reference.attention(q[:, :, :L], k, v, bias=want, keep=keep)
    close(out, expected)
    grads = [torch.autograd.grad((one * v[:, :, :L]).sum(), slopes, retain_graph=True)[0] for one in (out, expected)]
    close(grads[0], grads[1], 1e-9)
    assert grads[0].abs().min() > 1e-4


def test_alibi_mask_is_drawn() -> None:
    assert masks.alibi(torch.tensor([1.0, 0.5])).draw(2, 3, head=1).splitlines()[1:] == [
        "    0      0 -0.5   -1",
        "    1   -0.5    0 -0.5",
    ]
    assert repr(masks.alibi(torch.tensor([1.0, 0.5]), 2)) == "alibi(slopes [1.0, 0.5], offset=2)"


@pytest.mark.parametrize(
    ("slopes", "offset", "message"),
    [
        ([0.5], 0, "slopes must be a floating tensor of one slope per head"),
        (torch.arange(3), 0, "slopes must be a floating tensor"),
        (torch.ones(3, 1), 0, "slopes must be a floating tensor"),
        (torch.ones(3), 1.5, "offset must be an int or an integer tensor"),
    ],
    ids=str,
)
def test_alibi_refuses(slopes: Any, offset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masks.alibi(slopes, offset)


def test_alibi_refuses_other_heads() -> None:
    q = torch.randn(B, H, L, K)
    with pytest.raises(ValueError, match=r"slopes must be one for each head, \(3,\); got \(4,\)"):
        attention(q, q, q, mask=masks.alibi(torch.ones(4)))
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match="num_heads must be an int of at least 1"):
            Alibi(wrong)
    with pytest.raises(ValueError, match="learned must be True or False"):
        Alibi(3, learned=1)
    for learned in (False, True):
        with pytest.raises(ValueError, match=r"Alibi: dtype must be one of floating-point numbers.*got torch.int64"):
            Alibi(3, learned, dtype=torch.int64)
    with pytest.raises(ValueError, match="alibi_slopes: dtype must be one of floating-point numbers"):
        alibi_slopes(3, torch.int32)
    with pytest.raises(ValueError, match="alibi_slopes: num_heads must be"):
        alibi_slopes(0)


def test_learned_slopes_begin_at_the_fixed_ones() -> None:
    learned, fixed = Alibi(6, learned=True), Alibi(6)
    close(learned.slopes.detach(), alibi_slopes(6), 1e-6)
    assert [*learned.state_dict()] == ["slopes"]
    assert not fixed.state_dict()
    with torch.no_grad():
        learned.slopes.zero_()
    learned.reset_parameters()
    close(learned.slopes.detach(), alibi_slopes(6), 1e-6)
    assert (repr(learned), repr(fixed)) == ("Alibi(6, learned=True)", "Alibi(6, learned=False)")
    assert fixed(torch.ones(1, 6, 1, 1).double()).tensors[0].dtype == torch.float64
