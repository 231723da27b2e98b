"""docs/design.md, the semantics table: what cannot be done raises ValueError at once, with all sizes and the cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle.cases import B, D, H, K, L, S, heads, through
from torch import Tensor, nn

import headwise
from headwise import MultiheadAttention, attention, attention_weights, explain, masks


def call(batch_first: bool = True, options: dict[str, Any] | None = None, **given: Any) -> Any:
    """A module called with good arguments but for those given."""
    module = MultiheadAttention(D, H, batch_first=batch_first, **(options or {}))
    lead = ((B, L), (B, S)) if batch_first else ((L, B), (S, B))
    arguments = {"query": torch.randn(*lead[0], D), "key": torch.randn(*lead[1], D)}
    arguments["value"] = torch.randn(*lead[1], D)
    return module(**(arguments | given))


def test_the_good_call_is_good() -> None:
    assert call()[0].shape == (B, L, D)
    assert call(batch_first=False)[0].shape == (L, B, D)


# --- batch_first forgotten --------------------------------------------------------------------------------------------

READ_AS = {
    True: r"\(read as \(B, L, D\); these sizes fit batch_first=False\)",
    False: r"\(read as \(L, B, D\); these sizes fit batch_first=True\)",
}


def other_layout(batch_first: bool, length: int) -> Tensor:
    return torch.randn(*((length, B) if batch_first else (B, length)), D)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("path", ["eager", "vmapped"])
def test_batch_first_forgotten_in_key(batch_first: bool, path: str) -> None:
    module = MultiheadAttention(D, H, batch_first=batch_first)
    query, key = other_layout(batch_first, L), other_layout(batch_first, S)
    rule = rf"^MultiheadAttention: key must have the query's batch size {L} {READ_AS[batch_first]}; got {S} \(query \("
    with pytest.raises(ValueError, match=rule):
        through(path, lambda query, key: module(query, key, key)[0], query, key)


@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_first_forgotten_hints_only_where_the_other_layout_fits(batch_first: bool) -> None:
    lead = (B + 1, S) if batch_first else (S, B + 1)
    key = torch.randn(*lead, D)
    with pytest.raises(ValueError, match=rf"key must have the query's batch size {B}; got {B + 1} \(query"):
        call(batch_first, key=key, value=key)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_batch_first_forgotten_in_key_padding_mask(batch_first: bool, dtype: torch.dtype) -> None:
    """The caller's (B, S) mask beside inputs read in the other layout, where key and query agree."""
    x = other_layout(batch_first, L)
    sizes = rf"\(B, S\) = \({L}, {B}\) {READ_AS[batch_first]}; got \({B}, {L}\) \(query"
    rule = rf"^MultiheadAttention: key_padding_mask must be {sizes}"
    with pytest.raises(ValueError, match=rule):
        call(batch_first, query=x, key=x, value=x, key_padding_mask=torch.zeros(B, L, dtype=dtype))


@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_first_forgotten_in_query_padding_mask(batch_first: bool) -> None:
    x = other_layout(batch_first, L)
    sizes = rf"\(B, L\) = \({L}, {B}\) {READ_AS[batch_first]}; got \({B}, {L}\) \(query"
    rule = rf"^MultiheadAttention: query_padding_mask must be {sizes}"
    with pytest.raises(ValueError, match=rule):
        call(batch_first, query=x, key=x, value=x, query_padding_mask=torch.zeros(B, L, dtype=torch.bool))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(L, L), (1, L, L), (B, L, L), (B * H, L, L)], ids=str)
def test_batch_first_forgotten_in_attn_mask(batch_first: bool, shape: tuple[int, ...]) -> None:
    """A mask of the lengths beside self-attention read in the other layout, whose lengths are the batch sizes."""
    x = other_layout(batch_first, L)
    sizes = rf"\(L, S\) = \({B}, {B}\) {READ_AS[batch_first]}; got {re.escape(str(shape))} \(query"
    rule = rf"^MultiheadAttention: attn_mask must end in {sizes}"
    with pytest.raises(ValueError, match=rule):
        call(batch_first, query=x, key=x, value=x, attn_mask=torch.zeros(shape, dtype=torch.bool))


# --- dropout, widths, lengths, dtypes, devices ------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan"), float("inf")])
def test_dropout_outside_0_1(probability: float) -> None:
    with pytest.raises(ValueError, match=rf"^MultiheadAttention: dropout must be in \[0, 1\]; got {probability}$"):
        MultiheadAttention(D, H, dropout=probability)
    module = MultiheadAttention(D, H, dropout=0.25)
    with pytest.raises(ValueError, match=rf"^MultiheadAttention: dropout must be in \[0, 1\]; got {probability}$"):
        module.dropout = probability
    assert module.dropout == 0.25
    query = heads(B, H, L, K)
    for function, name in ((attention, "attention"), (explain, "explain")):
        with pytest.raises(
            ValueError, match=rf"^{name}: dropout must be in \[0, 1\]; got {probability} \(query \({B}, "
        ):
            function(query, query, query, dropout=probability)


@pytest.mark.parametrize("probability", [0, 0.0, 1, 1.0])
def test_dropout_of_0_and_1_is_legal(probability: float) -> None:
    module = MultiheadAttention(D, H, dropout=probability, batch_first=True)
    x = torch.randn(B, L, D)
    out, weights = module(x, x, x)
    assert torch.equal(out, module.out_proj.bias.expand(B, L, D)) == (probability == 1)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(B, L))


@pytest.mark.parametrize(
    ("embed_dim", "num_heads", "cure"),
    [(22, 4, "such as 20 or 24"), (3, 5, "such as 5 or 10"), (29, 7, "such as 28 or 35")],
)
def test_embed_dim_not_a_multiple_of_num_heads(embed_dim: int, num_heads: int, cure: str) -> None:
    rule = (
        rf"^MultiheadAttention: embed_dim must be a multiple of num_heads {num_heads}, {cure}, unless head_dim is "
        rf"given; got {embed_dim}$"
    )
    with pytest.raises(ValueError, match=rule):
        MultiheadAttention(embed_dim, num_heads)


@pytest.mark.parametrize("name", ["embed_dim", "num_heads", "kdim", "vdim"])
@pytest.mark.parametrize("value", [0, -2, 2.0, "2", True])
def test_sizes_that_are_no_counts(name: str, value: object) -> None:
    rule = rf"^MultiheadAttention: {name} must be an int of at least 1; got {re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=rule):
        MultiheadAttention(**({"embed_dim": D, "num_heads": H} | {name: value}))


# what is given instead -> the argument at fault, words of the rule and the cure, what came
WRONG: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "query's width": ({"query": torch.randn(B, L, D + 1)}, "query", f"be {D} wide", f"{D + 1}"),
    "key's width": ({"key": torch.randn(B, S, D - 1)}, "key", f"be {D} wide", f"{D - 1}"),
    "value's width": ({"value": torch.randn(B, S, 1)}, "value", f"be {D} wide", "1"),
    "kdim": ({"options": {"kdim": 13}}, "key", "be 13 wide", f"{D}"),
    "vdim": ({"options": {"vdim": 13}}, "value", "be 13 wide", f"{D}"),
    "key's batch": (
        dict.fromkeys(("key", "value"), torch.randn(B + 1, S, D)),
        "key",
        f"have the query's batch size {B}",
        f"{B + 1}",
    ),
    "value's length": (
        {"value": torch.randn(B, S + 1, D)},
        "value",
        "have the key's batch size and length",
        f"({B}, {S + 1}",
    ),
    "value's batch": (
        {"value": torch.randn(B + 1, S, D)},
        "value",
        "have the key's batch size and length",
        f"({B + 1}, {S}",
    ),
    "ranks": ({"query": torch.randn(L, D)}, "query, key and value", "be all 3-D, or all 2-D", "(2, 3, 3)"),
    "1-D": (
        {name: torch.randn(D) for name in ("query", "key", "value")},
        "query, key and value",
        "be all 3-D",
        "(1, 1, 1)",
    ),
    "4-D": (
        {name: torch.randn(1, B, L, D) for name in ("query", "key", "value")},
        "query, key and value",
        "be all 3-D",
        "(4, 4, 4)",
    ),
    "query's dtype": (
        {"query": torch.randn(B, L, D).double()},
        "query",
        "dtype, torch.float32; convert",
        "torch.float64",
    ),
    "key's dtype": ({"key": torch.randn(B, S, D).half()}, "key", "dtype, torch.float32; convert", "torch.float16"),
    "value's dtype": ({"value": torch.randint(9, (B, S, D))}, "value", "dtype, torch.float32; convert", "torch.int64"),
    "query's device": ({"query": torch.randn(B, L, D, device="meta")}, "query", "device, cpu; convert", "meta"),
    "key's device": ({"key": torch.randn(B, S, D, device="meta")}, "key", "device, cpu; convert", "meta"),
    "value's device": ({"value": torch.randn(B, S, D, device="meta")}, "value", "device, cpu; convert", "meta"),
    "padding's length": (
        {"key_padding_mask": torch.zeros(B, L, dtype=torch.bool)},
        "key_padding_mask",
        f"be (B, S) = ({B}, {S})",
        f"({B}, {L})",
    ),
    "padding's rank": (
        {"key_padding_mask": torch.zeros(S, dtype=torch.bool)},
        "key_padding_mask",
        f"be (B, S) = ({B}, {S})",
        f"({S},)",
    ),
    "padding's dtype": (
        {"key_padding_mask": torch.zeros(B, S, dtype=torch.int64)},
        "key_padding_mask",
        "be a bool or floating",
        "torch.int64",
    ),
    "padding's device": (
        {"key_padding_mask": torch.zeros(B, S, dtype=torch.bool, device="meta")},
        "key_padding_mask",
        "be on the query's device cpu",
        "meta",
    ),
    "query padding's length": (
        {"query_padding_mask": torch.zeros(B, S, dtype=torch.bool)},
        "query_padding_mask",
        f"be (B, L) = ({B}, {L})",
        f"({B}, {S})",
    ),
    "query padding's dtype": (
        {"query_padding_mask": torch.zeros(B, L)},
        "query_padding_mask",
        "be a bool tensor",
        "torch.float32",
    ),
    "query padding's device": (
        {"query_padding_mask": torch.zeros(B, L, dtype=torch.bool, device="meta")},
        "query_padding_mask",
        "be on the query's device cpu",
        "meta",
    ),
    "mask is a tensor": (
        {"mask": torch.ones(L, S, dtype=torch.bool)},
        "mask",
        "be a Mask of headwise.masks; a bool tensor (True may attend) goes into masks.dense(keep)",
        "Tensor",
    ),
    "mask is a string": ({"mask": "causal"}, "mask", "be a Mask of headwise.masks", "str"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("train", [True, False])
def test_wrong_widths_lengths_dtypes_devices(name: str, train: bool) -> None:
    """`MultiheadAttention: <argument> must <rule and cure>; got <what came> (query ..., key ..., value ...)`."""
    given, argument, rule, got = WRONG[name]
    with torch.set_grad_enabled(train), pytest.raises(ValueError, match=r"^MultiheadAttention: ") as raised:
        call(**given, need_weights=train)
    message = str(raised.value)
    assert message.startswith(f"MultiheadAttention: {argument} must ")
    asked, _, came = message.partition("; got ")
    assert rule in asked
    assert came.startswith(got)
    sizes = {"query": (B, L, D), "key": (B, S, D), "value": (B, S, D)}
    sizes |= {key: tuple(value.shape) for key, value in given.items() if key in sizes}
    assert message.endswith(f" (query {sizes['query']}, key {sizes['key']}, value {sizes['value']})")


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_wrong_kinds_of_input(name: str) -> None:
    with pytest.raises(ValueError, match=r"^MultiheadAttention: .*must be .*; got .*list"):
        call(**{name: [[1.0]]})


@pytest.mark.parametrize("train", [True, False])
def test_wrong_attn_mask(train: bool) -> None:
    where = rf"with B = {B}, H = {H}, L = {L}, S = {S}"
    for mask, message in (
        (
            torch.zeros(L, L, dtype=torch.bool),
            rf"attn_mask must be \(L, S\), \(B\*H, L, S\), .* {where}; got \({L}, {L}\)",
        ),
        (torch.zeros(L, S, device="meta"), r"attn_mask must be on the query's device cpu; got meta"),
        ([[True]], r"attn_mask must be a bool .* or floating .* tensor; got \[\[True\]\]"),
        (True, r"attn_mask must be a bool .* or floating .* tensor; got True"),
    ):
        with torch.set_grad_enabled(train), pytest.raises(ValueError, match=f"^MultiheadAttention: {message}"):
            call(attn_mask=mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            masks.dense(torch.ones(L, L, dtype=torch.bool)),
            rf"^dense: keep must broadcast to \(B, H, L, S\) = \({B}, {H}, {L}, {S}\); got \(1, 1, {L}, {L}\)",
        ),
        (masks.bias(torch.ones(B + 1, L, S)), r"^bias: scores must broadcast to .*; got \(4, 1, 5, 7\)"),
        (masks.padding([S, 2]), rf"^padding: lengths must have one entry per sample, B = {B}; got \(2,\)"),
        (
            masks.causal(torch.zeros(2, dtype=torch.int64)),
            rf"^causal: offset must have one entry per sample, B = {B}; got \(2,\)",
        ),
        (
            masks.prefix(torch.zeros(5, dtype=torch.int64)),
            rf"^prefix: n must have one entry per sample, B = {B}; got \(5,\)",
        ),
        (
            masks.documents(torch.zeros(L, dtype=torch.int64)),
            rf"^documents: key_ids must be \({S},\) or \({B}, {S}\) .*; L != S needs key_ids; got \({L},\)",
        ),
        (
            masks.dense(torch.ones(L, S, dtype=torch.bool, device="meta")),
            r"^dense: keep must be on the query's device cpu; got meta",
        ),
        (
            masks.padding(torch.zeros(B, dtype=torch.int64, device="meta")),
            r"^padding: lengths must be on the query's device cpu; got meta",
        ),
    ],
    ids=lambda part: repr(part) if isinstance(part, masks.Mask) else "",
)
def test_wrong_sizes_of_a_mask(mask: masks.Mask, message: str) -> None:
    query, key = heads(B, H, L, K), heads(B, H, S, K)
    functions: list[Callable[[], Any]] = [
        lambda: attention(query, key, key, mask=mask),
        lambda: attention(query, key, key, mask=masks.causal() & mask),
        lambda: attention(query, key, key, mask=mask, backend="plain"),
        lambda: attention_weights(query, key, mask=mask),
        lambda: explain(query, key, key, mask=mask),
        lambda: call(mask=mask),
    ]
    for function in functions:
        with pytest.raises(ValueError, match=message):
            function()


def test_wrong_arguments_raise_inside_vmap_too() -> None:
    query, key = heads(2, B, H, L, K), heads(2, B, H, S, K)
    with pytest.raises(ValueError, match=r"^attention: value must have the key's heads and length"):
        torch.func.vmap(lambda q, k: attention(q, k, q))(query, key)
    with pytest.raises(ValueError, match=r"^dense: keep must broadcast"):
        torch.func.vmap(lambda q, k: attention(q, k, k, mask=masks.dense(torch.ones(2, 2, dtype=torch.bool))))(
            query, key
        )


def test_a_failed_call_leaves_the_module_as_it_was() -> None:
    module = MultiheadAttention(D, H, batch_first=True)
    x = torch.randn(B, L, D)
    wanted = module(x, x, x)[0]
    with pytest.raises(ValueError, match="attn_mask"):
        module(x, x, x, attn_mask=torch.zeros(S, S))
    assert torch.equal(module(x, x, x)[0], wanted)
    assert isinstance(module, nn.Module)
    assert not isinstance(module, nn.MultiheadAttention)
    assert headwise.MultiheadAttention is MultiheadAttention
