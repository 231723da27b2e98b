"""Weights of some queries, and the largest of each: parts of `attention_weights`, and never more in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from headwise import attention_weights, masks
from headwise.core import functional
from headwise.core.functional import top_attention_weights

B, H, G, L, S, K = 2, 6, 3, 7, 11, 5
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2])
MASKS: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "causal per sample": masks.causal(torch.tensor([1, 4])),
    "window and padding": masks.window(2, 3) & masks.padding([11, 4]),
    "prefix": masks.causal() | masks.prefix(3),
    "not": ~masks.causal(2),
    "documents": masks.documents(IDS, torch.arange(S) // 4),
    "documents per sample": masks.documents(torch.stack([IDS, IDS.flip(0)]), torch.arange(S) // 4),
    "bias": masks.bias(torch.randn(B, 1, L, S)) & masks.dense(torch.rand(1, H, L, S) < 0.7),
    "torch's": masks.from_torch(torch.rand(B * H, L, S) < 0.3, torch.arange(S) > torch.tensor([[9], [3]])),
}
every_mask = pytest.mark.parametrize("name", MASKS)
ROWS: list[Any] = [
    [3],
    [0, 6],
    [-1, 2, 3, 4, 2],
    [],
    range(L),
    torch.tensor([5, 1]),
    torch.tensor([], dtype=torch.int64),
]


def heads() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, L, K, dtype=torch.float64), torch.randn(B, G, S, K, dtype=torch.float64)


@every_mask
@pytest.mark.parametrize("average", [False, True])
def test_some_rows(name: str, average: bool) -> None:
    query, key = heads()
    options = {"softcap": 2.0, "sink": torch.randn(H, dtype=torch.float64), "scale": 0.7}
    whole = attention_weights(query, key, mask=MASKS[name], average_attn_weights=average, **options)
    for rows in ROWS:
        part = attention_weights(query, key, mask=MASKS[name], average_attn_weights=average, rows=rows, **options)
        assert_close(part, whole[..., list(rows), :], rtol=1e-12, atol=1e-13)


@every_mask
@pytest.mark.parametrize("average", [False, True])
def test_the_largest(name: str, average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = heads()
    whole = attention_weights(query, key, mask=MASKS[name], average_attn_weights=average)
    for block in (1, 3 * B * H * S, 2**20):
        monkeypatch.setattr(functional, "_TOP_BLOCK", block)
        for rows in (None, [5, 1, 2]):
            top = top_attention_weights(query, key, 4, mask=MASKS[name], average_attn_weights=average, rows=rows)
            want = whole if rows is None else whole[..., rows, :]
            assert_close(top.weights, want.topk(4).values, rtol=1e-12, atol=1e-13)
            assert_close(want.gather(-1, top.keys), top.weights, rtol=1e-12, atol=1e-13)


def test_gradients_of_some_rows() -> None:
    query, key = (tensor.requires_grad_() for tensor in heads())
    part = torch.autograd.grad(attention_weights(query, key, rows=[2, 5]).sin().sum(), (query, key))
    whole = torch.autograd.grad(attention_weights(query, key)[:, :, [2, 5]].sin().sum(), (query, key))
    for got, want in zip(part, whole, strict=True):
        assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rows", [[7], [-8], [0.5], [True], torch.tensor([1.5]), torch.tensor(3)], ids=repr)
def test_rows_that_are_none(rows: Any) -> None:
    query, key = heads()
    if isinstance(rows, torch.Tensor) and rows.dim() == 0:
        assert attention_weights(query, key, rows=rows).shape == (B, H, 1, S)
        return
    with pytest.raises(ValueError, match=r"^attention_weights: rows must be query positions, ints in -7 .. 6; got"):
        attention_weights(query, key, rows=rows)


@pytest.mark.parametrize("n", [0, 12, -1, 2.0, True])
def test_n_that_is_none(n: Any) -> None:
    with pytest.raises(ValueError, match=r"^top_attention_weights: n must be an int in 1 .. S = 11; got"):
        top_attention_weights(*heads(), n)
