"""The GPU's kernel for sequences, by a stand-in that speaks its signature: what it is given, and when.

The kernel itself runs in `python -m benchmarks.gpu` alone, where there is a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headwise import MultiheadAttention, attention, explain, masks
from headwise.core import functional, nested, reference
from headwise.core.algebra import lower
from headwise.core.tiling import sequences

H, G, K = 6, 2, 8


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention's rules: (T, H, K), bounds in int32, windows counted from the end of a sequence."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    outs, longest = [], [0, 0]
    bounds = zip(itertools.pairwise(cu_seq_q), itertools.pairwise(cu_seq_k), strict=True)
    for (start, end), (low, high) in bounds:
        q, k, v = (x[None].transpose(1, 2) for x in (query[start:end], key[low:high], value[low:high]))
        L, S = q.shape[2], k.shape[2]
        longest = [max(longest[0], L), max(longest[1], S)]
        ahead = torch.arange(S) - torch.arange(L)[:, None] - (S - L)
        left, right = window_size
        keep = (ahead >= -left if left >= 0 else ahead == ahead) & (ahead <= right if right >= 0 else ahead == ahead)
        out, _ = reference.attention(q, k, v, keep=keep, scale=scale)
        outs.append(out[0].transpose(0, 1).to(query.dtype))
    assert [max_q, max_k] == longest
    return torch.cat(outs)


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append("varlen")
        return stand_in(*given, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", counted)
    for module in (functional, nested):
        monkeypatch.setattr(module, "takes", lambda *_: True)
    return calls


def heads(queries: int, keys: int) -> list[Tensor]:
    return [torch.randn(1, n, length, K, dtype=torch.float64) for n, length in ((H, queries), (G, keys), (G, keys))]


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        (sequences([3, 1, 7]), True),
        (sequences([3, 1, 7]) & masks.causal(), True),
        (sequences([3, 1, 7]) & masks.window(2, 1), True),
        (masks.window(2, None) & sequences([3, 1, 7]) & masks.causal(), True),
        (sequences([3, 1, 7], [2, 5, 4]), True),
        (sequences([3, 8], [4, 7]) & masks.causal(), False),  # counted from another end
        (sequences([3, 8]) & masks.causal(1), True),
        (sequences([3, 8]) & masks.causal(-1), False),
        (sequences([3, 8], [0, 11]), False),
        (sequences([3, 8]) & (masks.causal() | masks.prefix(2)), False),
        (sequences([3, 8]) & masks.dense(torch.ones(11, 11).bool()), False),
        (masks.causal(), False),
    ],
    ids=repr,
)
def test_masks(mask: masks.Mask, runs: bool, as_if_on_a_gpu: list[str]) -> None:
    given = heads(11, 11)
    keep = lower(mask, functional.Size(1, H, 11, 11, torch.device("cpu")))
    keep = keep.whole_keep(functional.Size(1, H, 11, 11, torch.device("cpu")))
    want, _ = reference.attention(*given, keep=keep)
    assert_close(attention(*given, mask=mask), want, rtol=1e-11, atol=1e-12)
    assert as_if_on_a_gpu == (["varlen"] if runs else [])
    said = explain(*given, mask=mask)
    assert (said.backend == "varlen") == runs
    if runs:
        assert said.flops <= said.dense_flops


def test_what_the_kernel_lacks_runs_elsewhere(as_if_on_a_gpu: list[str]) -> None:
    given = heads(11, 11)
    for options in ({"dropout": 0.5}, {"softcap": 3.0}, {"sink": torch.zeros(H)}):
        attention(*given, mask=sequences([3, 8]), **options)
    assert as_if_on_a_gpu == []


def test_nested_tensors(as_if_on_a_gpu: list[str]) -> None:
    module = MultiheadAttention(H * K, H, batch_first=True, dtype=torch.float64)
    samples = [torch.randn(length, H * K, dtype=torch.float64) for length in (5, 2, 11)]
    x = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    for words in ({}, {"is_causal": True}, {"mask": masks.window(3, 0)}):
        as_if_on_a_gpu.clear()
        out, _ = module(x, x, x, need_weights=False, **words)
        for sample, got in zip(samples, out.unbind(), strict=True):
            want, _ = module(sample, sample, sample, need_weights=False, **words)
            assert_close(got, want, rtol=1e-10, atol=1e-11)
        assert as_if_on_a_gpu == ["varlen"]
