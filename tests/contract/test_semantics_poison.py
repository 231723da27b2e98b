"""docs/design.md, the semantics table: NaN or Inf in a key or value that no query may see has no influence.

The oracle reads 0 where the call reads NaN or Inf; outputs, weights and all gradients must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tests.oracle.cases import (
    INF,
    B,
    Call,
    Case,
    H,
    K,
    L,
    S,
    Way,
    compare_attention,
    compare_module,
    every_call,
    every_training_way,
    every_way,
    heads,
    inputs,
    lower_left,
    make_module,
    minus_inf,
)
from torch import Tensor

from headwise import attention, attention_weights, masks
from headwise.core import reference

NAN = float("nan")
LENGTHS = torch.tensor([S, 2, 3])
PADDED = torch.arange(S) >= LENGTHS[:, None]  # (B, S)
HOLES = PADDED.clone()
HOLES[1] = torch.tensor([True, False, True, False, False, True, True])
PREFIX = torch.arange(S) >= 4


def poisoned(tensor: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf with NaN, inf and -inf in turn where `where` (B, length) is True, and what the oracle reads: 0 there."""
    poison = torch.tensor([NAN, INF, -INF]).repeat(tensor.numel() // 3 + 1)[: tensor.numel()].view(tensor.shape)
    where = where[:, *[None] * (tensor.dim() - 3), :, None]
    return (
        torch.where(where, poison, tensor.detach()).requires_grad_(),
        torch.where(where, 0.0, tensor.detach()),
    )


KEYS: dict[str, Case] = {
    "key_padding bool": Case({"key_padding_mask": HOLES}, {"keep": ~HOLES[:, None, None]}),
    "key_padding float": Case({"key_padding_mask": minus_inf(HOLES)}, {"keep": ~HOLES[:, None, None]}),
    "attn_mask (B, 1, 1, S) bool": Case({"attn_mask": HOLES[:, None, None]}, {"keep": ~HOLES[:, None, None]}),
    "attn_mask (B, 1, 1, S) float": Case(
        {"attn_mask": minus_inf(HOLES[:, None, None])}, {"keep": ~HOLES[:, None, None]}
    ),
    "attn_mask (B, H, 1, S)": Case(
        {"attn_mask": HOLES[:, None, None].repeat(1, H, 1, 1)}, {"keep": ~HOLES[:, None, None]}
    ),
    "~padding": Case({"mask": (lambda block: ~masks.padding(block), HOLES)}, {"keep": ~HOLES[:, None, None]}),
    "padding(keep)": Case({"mask": (masks.padding, ~HOLES)}, {"keep": ~HOLES[:, None, None]}),
    "dense (B, 1, 1, S)": Case({"mask": (masks.dense, ~HOLES[:, None, None])}, {"keep": ~HOLES[:, None, None]}),
    "bias (B, 1, 1, S)": Case({"mask": (masks.bias, minus_inf(HOLES[:, None, None]))}, {"keep": ~HOLES[:, None, None]}),
    "padding | padding": Case(
        {"mask": (lambda keep: masks.padding(keep) | masks.padding(keep), ~HOLES)}, {"keep": ~HOLES[:, None, None]}
    ),
    "beside a dense mask": Case(
        {"key_padding_mask": HOLES, "attn_mask": ~lower_left(L, S)}, {"keep": ~HOLES[:, None, None] & lower_left(L, S)}
    ),
    "causal": Case({"key_padding_mask": HOLES, "is_causal": True}, {"keep": ~HOLES[:, None, None] & lower_left(L, S)}),
}


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "appended"])
@every_way
def test_nan_or_inf_in_a_key_or_value(way: Way, options: dict[str, bool]) -> None:
    """Cross-attention: key and value are one tensor, then two."""
    if way.path == "compiled" and way.train == bool(options):
        return  # without in train and with them in eval are enough for a compiler
    module = make_module(way, **options)
    query, memory, other = inputs(L, S, S)
    memory, clean = poisoned(memory, HOLES)
    compare_module(module, way, [query, memory, memory], KEYS, finite=[query, clean, clean])
    if way.path == "eager":
        value, clean_value = poisoned(other, HOLES)
        compare_module(module, way, [query, memory, value], KEYS, finite=[query, clean, clean_value])
        compare_module(module, way, [query, other, value], KEYS, finite=[query, other, clean_value])


@every_way
def test_nan_or_inf_in_padding_of_self_attention(way: Way) -> None:
    """With `query_padding_mask` the padded rows play no role at all; gradients too."""
    module = make_module(way)
    (x,) = inputs(L)
    padded = torch.tensor([[False] * 5, [True, False, False, True, False], [False, False, True, True, True]])
    x, clean = poisoned(x, padded)
    rows = {"query_padding_mask": padded}
    cases = {
        "key_padding": Case(
            rows | {"key_padding_mask": padded}, {"keep": ~padded[:, None, None], "query_padding": padded}
        ),
        "float": Case(
            rows | {"key_padding_mask": minus_inf(padded)}, {"keep": ~padded[:, None, None], "query_padding": padded}
        ),
        "mask": Case(
            rows | {"mask": (masks.padding, ~padded)}, {"keep": ~padded[:, None, None], "query_padding": padded}
        ),
        "causal": Case(
            rows | {"key_padding_mask": padded, "is_causal": True},
            {"keep": ~padded[:, None, None] & lower_left(L, L), "query_padding": padded},
        ),
    }  # fmt: skip
    compare_module(module, way, [x, x, x], cases, finite=[clean, clean, clean])


@every_training_way
def test_nan_or_inf_in_the_value_while_queries_are_finite(way: Way) -> None:
    """Self-attention over positions that are finite, with values of their own that are not."""
    module = make_module(way)
    x, value = inputs(S, S)
    value, clean = poisoned(value, HOLES)
    cases = {
        name: case for name, case in KEYS.items() if "causal" not in name and name != "beside a dense mask"
    }  # fmt: skip
    compare_module(module, way, [x, x, value], cases, finite=[x, x, clean])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("weights", ["off", "averaged", "per head"])
def test_nan_in_padding_of_self_attention_stays_in_its_row(weights: str, train: bool) -> None:
    """Without `query_padding_mask` the padded row itself is computed, and is NaN; every other row is the oracle's."""
    way = Way(False, True, train, weights, "eager")
    module = make_module(way)
    x = torch.randn(1, 5, module.embed_dim)
    x[:, 3] = NAN
    padded = torch.tensor([[False, False, False, True, False]])
    clean = x.nan_to_num(0.0)
    with torch.set_grad_enabled(train):
        out, weight = module(x, x, x, key_padding_mask=padded, need_weights=weights != "off")
        wanted, wanted_weight = module(clean, clean, clean, key_padding_mask=padded, need_weights=weights != "off")
    assert torch.equal(out.isnan().any(dim=-1), padded)
    torch.testing.assert_close(out[~padded], wanted[~padded])
    if weight is not None:
        torch.testing.assert_close(weight[~padded], wanted_weight[~padded])


FUNCTION: dict[str, tuple[Callable[..., masks.Mask], tuple[Tensor, ...], Tensor]] = {
    "padding(lengths)": (masks.padding, (LENGTHS,), ~PADDED[:, None, None]),
    "padding(keep)": (masks.padding, (~PADDED,), ~PADDED[:, None, None]),
    "dense (B, 1, 1, S)": (masks.dense, (~PADDED[:, None, None],), ~PADDED[:, None, None]),
    "bias (B, 1, 1, S)": (masks.bias, (minus_inf(PADDED[:, None, None]),), ~PADDED[:, None, None]),
    "prefix": (lambda n: masks.prefix(n), (LENGTHS,), ~PADDED[:, None, None]),
    "from_torch": (lambda block: masks.from_torch(None, block), (PADDED,), ~PADDED[:, None, None]),
    "~padding": (lambda block: ~masks.padding(block), (PADDED,), ~PADDED[:, None, None]),
    "padding | prefix(0)": (lambda keep: masks.padding(keep) | masks.prefix(0), (~PADDED,), ~PADDED[:, None, None]),
    "(padding & prefix) | padding": (
        lambda keep: (masks.padding(keep) & masks.prefix(1)) | masks.padding(keep),
        (~PADDED,),
        ~PADDED[:, None, None],
    ),
    "padding & causal": (
        lambda n: masks.causal() & masks.padding(n),
        (LENGTHS,),
        ~PADDED[:, None, None] & lower_left(L, S),
    ),
}


@pytest.mark.parametrize("groups", [H, 1])
@every_call
def test_nan_or_inf_in_a_key_or_value_in_attention(call: Call, groups: int) -> None:
    if call[2] == "compiled" and groups == 1:
        return
    query = heads(B, H, L, K, grad=True)
    key, clean_key = poisoned(heads(B, groups, S, K), PADDED)
    value, clean_value = poisoned(heads(B, groups, S, K), PADDED)
    cases = {name: Case({"mask": (builder, *held)}, {"keep": keep}) for name, (builder, held, keep) in FUNCTION.items()}
    compare_attention(call, [query, key, value], cases, finite=[query, clean_key, clean_value])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("average", "softcap"), list(itertools.product((False, True), (None, 3.0))))
def test_nan_or_inf_in_a_key_in_attention_weights(average: bool, softcap: float | None, grad: bool) -> None:
    query = heads(B, H, L, K, grad=grad)
    key, clean = poisoned(heads(B, H, S, K), PADDED)
    for name, (builder, held, keep) in FUNCTION.items():
        got = attention_weights(query, key, mask=builder(*held), softcap=softcap, average_attn_weights=average)
        _, wanted = reference.attention(query, clean, clean, keep=keep, softcap=softcap)
        torch.testing.assert_close(
            got.double(),
            wanted.mean(dim=1) if average else wanted,
            rtol=2e-5,
            atol=5e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_nan_in_a_key_hidden_in_some_heads_only(backend: str) -> None:
    """(B, H, 1, S): a shared key is silent only where all its query heads hide it."""
    heads_q, groups = 6, 2
    hidden = torch.zeros(1, heads_q, 1, S, dtype=torch.bool)
    hidden[:, :3, :, 5] = True  # all query heads of group 0
    hidden[:, 4, :, 6] = True  # one query head of group 1
    query, key, value = heads(1, heads_q, L, K), heads(1, groups, S, K), heads(1, groups, S, K)
    poison_key, poison_value = key.clone(), value.clone()
    poison_key[:, 0, 5], poison_value[:, 0, 5] = NAN, INF
    got = attention(query, poison_key, poison_value, mask=masks.dense(~hidden), backend=backend)
    wanted, _ = reference.attention(query, key, value, keep=~hidden)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=5e-6)
