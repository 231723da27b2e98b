"""headwise.core.reference: the oracle itself, against numbers worked out by hand and loops over every element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from headwise.core import reference

B, H, G, L, S, K, V = 2, 6, 2, 3, 5, 7, 11


def by_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same formula with Python numbers."""
    (B, H, L, K), (_, G, S, V) = query.shape, value.shape
    out, weights = torch.zeros(B, H, L, V, dtype=torch.float64), torch.zeros(B, H, L, S, dtype=torch.float64)
    scale = K**-0.5 if scale is None else scale
    whole = (B, H, L, S)
    keep_BHLS = torch.ones(whole).bool() if keep is None else keep.expand(whole)
    bias_BHLS = torch.zeros(whole) if bias is None else bias.expand(whole)
    factor_BHLS = torch.ones(whole) if factor is None else factor.expand(whole)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(L):
                masses = {}
                for j in range(S):
                    score = scale * sum(query[b, h, i, k].item() * key[b, g, j, k].item() for k in range(K))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    added = bias_BHLS[b, h, i, j].item()
                    if keep_BHLS[b, h, i, j] and added != -math.inf:
                        masses[j] = math.exp(score + added)
                total = sum(masses.values()) + (0.0 if sink is None else math.exp(sink[h].item()))
                for j, mass in masses.items():
                    weights[b, h, i, j] = mass / total
                    out[b, h, i] += factor_BHLS[b, h, i, j].item() * mass / total * value[b, g, j].double()
    return out, weights


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("masked", ["no", "keep", "bias", "both"])
def test_against_loops(masked: str, with_sink: bool, softcap: float | None, scale: float | None) -> None:
    query, key, value = torch.randn(B, H, L, K), torch.randn(B, G, S, K), torch.randn(B, G, S, V)
    keep = bias = None
    if masked in ("keep", "both"):
        keep = torch.rand(B, 1, L, S) < 0.6
        keep[0, 0, 1] = False
    if masked in ("bias", "both"):
        bias = torch.randn(1, H, L, S).masked_fill(torch.rand(1, H, L, S) < 0.2, -math.inf)
    sink = torch.randn(H) if with_sink else None
    factor = (torch.rand(B, H, L, S) < 0.5) * 2.0 if masked == "both" else None
    got = reference.attention(
        query, key, value, keep=keep, bias=bias, scale=scale, softcap=softcap, sink=sink, factor=factor
    )
    want = by_loops(query, key, value, keep, bias, scale, softcap, sink, factor)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float64
        assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_against_torch_where_torch_is_well_defined() -> None:
    query, key, value = torch.randn(3, B, H, S, K, dtype=torch.float64).unbind(0)
    want = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    assert_close(reference.attention(query, key, value, keep=keep)[0], want, rtol=1e-12, atol=1e-12)


def test_a_dead_row_is_0_with_gradient_0() -> None:
    query, key, value = (torch.randn(1, 1, n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3))
    keep = torch.tensor([[True, True, False], [False, False, False]])
    out, weights = reference.attention(query, key, value, keep=keep)
    assert torch.equal(out[0, 0, 1], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(weights[0, 0, 1], torch.zeros(3, dtype=torch.float64))
    (out[0, 0, 1].sum() + weights[0, 0, 1].sum()).backward()
    for leaf in (query, key, value):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_hidden_key_has_no_influence_whatever_it_holds(poison: float) -> None:
    query, key, value = torch.randn(3, 1, 2, 3, 4).unbind(0)
    keep = torch.tensor([True, True, False])
    want = reference.attention(query, key, value, keep=keep)
    key[:, :, 2], value[:, :, 2] = poison, poison
    for got, wanted in zip(reference.attention(query, key, value, keep=keep), want, strict=True):
        assert torch.equal(got, wanted)


def test_no_keys_and_no_queries() -> None:
    empty = torch.zeros(2, 3, 0, 4)
    out, weights = reference.attention(torch.randn(2, 3, 5, 4), empty, torch.zeros(2, 3, 0, 7))
    assert torch.equal(out, torch.zeros(2, 3, 5, 7, dtype=torch.float64))
    assert weights.shape == (2, 3, 5, 0)
    out, weights = reference.attention(empty, torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4))
    assert out.shape == (2, 3, 0, 4)
    assert weights.shape == (2, 3, 0, 5)


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 1, 1), 1e4, dtype=torch.float64)
    key = torch.tensor([1.0, 1.0, -1.0]).view(1, 1, 3, 1)
    out, weights = reference.attention(query, key, torch.tensor([1.0, 3.0, 9.0]).view(1, 1, 3, 1))
    assert_close(weights[0, 0, 0], torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    assert out.item() == 2
