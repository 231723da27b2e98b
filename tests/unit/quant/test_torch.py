"""What torch's own int8 does today where ours does otherwise; each test asserts torch's side first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import headwise

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized.*deprecated.*:UserWarning"),
    pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without fbgemm"),
]


def both():
    """A linear, and it in torch's dynamic int8 and in ours."""
    linear = nn.Linear(64, 32, bias=False)
    theirs = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)
    return linear, theirs, headwise.quantize(linear)


@pytest.mark.parametrize(("size", "least"), [(1e-3, 0.012), (1e-4, 0.1), (1e-5, 0.9)])
def test_small_inputs(size, least):
    linear, theirs, ours = both()
    x = torch.randn(20, 64) * size
    with torch.no_grad():
        want = linear(x)
        assert (theirs(x) - want).norm() / want.norm() > least
        assert (ours(x) - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("rows", [4, 100])
def test_nan(rows):
    _, theirs, ours = both()
    x = torch.randn(rows, 64)
    x[1, 3] = math.nan
    with torch.no_grad():
        assert theirs(x).isfinite().all()
        got = ours(x)
    assert got[1].isnan().all()
    assert got[[0, *range(2, rows)]].isfinite().all()


def test_infinity_reaches_all_rows():
    _, theirs, ours = both()
    x = torch.randn(4, 64)
    x[1, 3] = math.inf
    with torch.no_grad():
        assert not theirs(x)[0].isfinite().any()
        assert ours(x)[[0, 2, 3]].isfinite().all()
