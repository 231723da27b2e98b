"""The tensor work behind masks, where only its own test can tell."""

from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from headwise import MultiheadAttention
from headwise.core.lowering import add_scores


def test_the_sum_of_two_finite_scores_is_finite() -> None:
    largest = torch.finfo(torch.float16).max
    left = torch.tensor([largest, -largest, -math.inf, 1.0], dtype=torch.float16)
    right = torch.tensor([largest, -largest, 5.0, 2.0], dtype=torch.float16)
    want = torch.tensor([largest, -largest, -math.inf, 3.0], dtype=torch.float16)
    assert torch.equal(add_scores(left, right), want)


def test_two_floating_masks_in_one_compiled_graph() -> None:
    """Both masks of torch at once, floating: the sum has to trace."""
    module = MultiheadAttention(22, 2, batch_first=True)
    x, attn_mask, padding = torch.randn(3, 5, 22), torch.randn(5, 5), torch.randn(3, 5)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for options in ({"need_weights": False}, {"need_weights": True}):
        got = compiled(x, x, x, attn_mask=attn_mask, key_padding_mask=padding, **options)
        want = module(x, x, x, attn_mask=attn_mask, key_padding_mask=padding, **options)
        assert_close(got, want, rtol=1e-5, atol=1e-6)
