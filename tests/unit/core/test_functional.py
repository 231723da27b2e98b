"""headwise.core.functional: every refusal with its message, `explain`, and `attention_weights` beside its twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headwise import attention, attention_weights, explain, masks
from headwise.core import backends, functional, reference

B, H, G, L, S, K, V = 2, 6, 3, 5, 7, 11, 13
NO_LENGTHS = (
    "it needs a mask of lengths that can be read here and save enough: padding on the right, or documents, with "
    "causal() at most"
)
NO_MASK = "must be a Mask of headwise.masks; wrap a bool tensor (True may attend) in masks.dense, scores in masks.bias"
QUERY, KEY, VALUE = f"query {(B, H, L, K)}", f"key {(B, G, S, K)}", f"value {(B, G, S, V)}"


def good() -> dict[str, Any]:
    return {"query": torch.randn(B, H, L, K), "key": torch.randn(B, G, S, K), "value": torch.randn(B, G, S, V)}


# what is given instead -> the rule, what came, the sizes shown after
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"query": [1.0]}, "query must be a tensor; got list", ""),
    ({"key": None}, "key must be a tensor; got NoneType", ""),
    ({"value": 3}, "value must be a tensor; got int", ""),
    (
        {"query": torch.randn(B, L, K)},
        "query must be 4-D, (B, heads, length, width); got 3-D",
        f" (query {(B, L, K)}, {KEY}",
    ),
    ({"key": torch.randn(K)}, "key must be 4-D, (B, heads, length, width); got 1-D", f" ({QUERY}, key {(K,)}"),
    (
        {"value": torch.randn(1, B, G, S, V)},
        "value must be 4-D, (B, heads, length, width); got 5-D",
        f" ({QUERY}, {KEY}, value {(1, B, G, S, V)})",
    ),
    (
        {"query": torch.ones(B, H, L, K, dtype=torch.int64)},
        "query must be floating; got torch.int64",
        f" ({QUERY}, {KEY}",
    ),
    (
        {"key": torch.randn(B, G, S, K).double()},
        "key must have the query's dtype and device (torch.float32, cpu); got torch.float64, cpu",
        f" ({QUERY}, {KEY}",
    ),
    (
        {"value": torch.randn(B, G, S, V, device="meta")},
        "value must have the query's dtype and device (torch.float32, cpu); got torch.float32, meta",
        f" ({QUERY}, {KEY}, {VALUE})",
    ),
    (
        {"key": torch.randn(B + 1, G, S, K)},
        f"key must have the query's batch size {B}; got {B + 1}",
        f" ({QUERY}, key {(B + 1, G, S, K)}",
    ),
    (
        {"value": torch.randn(1, G, S, V)},
        f"value must have the query's batch size {B}; got 1",
        f" ({QUERY}, {KEY}, value {(1, G, S, V)})",
    ),
    (
        {"key": torch.randn(B, G, S, K + 1)},
        f"key must be as wide as the query, {K}; got {K + 1}",
        f" ({QUERY}, key {(B, G, S, K + 1)}",
    ),
    (
        {"key": torch.randn(B, 4, S, K)},
        f"key must have a number of heads that divides the query's {H}; got 4",
        f" ({QUERY}, key {(B, 4, S, K)}",
    ),
    (
        {"key": torch.randn(B, 2 * H, S, K)},
        f"key must have a number of heads that divides the query's {H}; got {2 * H}",
        f" ({QUERY}, key",
    ),
    (
        {"key": torch.randn(B, 0, S, K), "value": torch.randn(B, 0, S, V)},
        f"key must have a number of heads that divides the query's {H}; got 0",
        f" ({QUERY}, key {(B, 0, S, K)}",
    ),
    (
        {"value": torch.randn(B, G, S + 1, V)},
        f"value must have the key's heads and length, {(G, S)}; got {(G, S + 1)}",
        f" ({QUERY}, {KEY}, value {(B, G, S + 1, V)})",
    ),
    (
        {"value": torch.randn(B, 1, S, V)},
        f"value must have the key's heads and length, {(G, S)}; got {(1, S)}",
        f" ({QUERY}, {KEY}, value {(B, 1, S, V)})",
    ),
    (
        {"mask": torch.ones(L, S, dtype=torch.bool)},
        f"mask {NO_MASK}; got Tensor",
        f" ({QUERY}, {KEY}",
    ),
    (
        {"mask": True},
        f"mask {NO_MASK}; got bool",
        f" ({QUERY}, {KEY}",
    ),
    ({"mask": masks.padding([1]) & masks.dense(torch.ones(L, L).bool())}, "", ""),
    ({"scale": float("nan")}, "scale must be a finite number; got nan", f" ({QUERY}, {KEY}"),
    ({"scale": float("inf")}, "scale must be a finite number; got inf", f" ({QUERY}, {KEY}"),
    ({"softcap": 0.0}, "softcap must be ", f" ({QUERY}, {KEY}"),
    ({"softcap": -1.0}, "softcap must be ", f" ({QUERY}, {KEY}"),
    ({"softcap": float("nan")}, "softcap must be ", f" ({QUERY}, {KEY}"),
    ({"softcap": float("inf")}, "softcap must be ", f" ({QUERY}, {KEY}"),
    ({"sink": torch.zeros(H + 1)}, f"sink must be a floating tensor of one logit per query head, ({H},); got ", ""),
    ({"sink": torch.zeros(1, H)}, f"sink must be a floating tensor of one logit per query head, ({H},); got ", ""),
    ({"sink": 0.5}, f"sink must be a floating tensor of one logit per query head, ({H},); got 0.5", ""),
]
CALLS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "explain": explain,
    "attention_weights": lambda value, **rest: attention_weights(**rest),
}


@pytest.mark.parametrize(("given", "rule", "sizes"), REFUSED, ids=[rule[:40] for _, rule, _ in REFUSED])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str, given: dict[str, Any], rule: str, sizes: str) -> None:
    """`<function>: <argument> must <rule>; got <value> (<sizes>)`."""
    if name == "attention_weights" and "value" in given and "key" not in given:
        return
    with pytest.raises(ValueError, match=rf"^(dense|{name}): ") as raised:
        CALLS[name](**(good() | given))
    message = str(raised.value)
    if rule:
        assert message.startswith(f"{name}: {rule}")
    assert sizes in message


@pytest.mark.parametrize("sink", [torch.zeros(H, dtype=torch.int64), torch.zeros(H, device="meta")])
def test_a_sink_of_another_kind_is_refused(sink: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^attention: sink must "):
        attention(**good(), sink=sink)


def test_a_head_width_of_0_is_refused() -> None:
    """1 / sqrt(0) has no meaning."""
    query, key, value = torch.randn(B, H, L, 0), torch.randn(B, H, S, 0), torch.randn(B, H, S, V)
    for options in ({}, {"scale": 1.0}, {"backend": "plain"}):
        with pytest.raises(
            ValueError, match=rf"^attention: query must be at least 1 wide; got 0 \(query \({B}, {H}, {L}, 0\)"
        ):
            attention(query, key, value, **options)


@pytest.mark.parametrize("name", ["attention", "explain"])
def test_backends_that_are_refused(name: str) -> None:
    function = CALLS[name]
    known = "'ragged' or 'sdpa' or 'plain', or None to let headwise choose"
    with pytest.raises(ValueError, match=rf"^{name}: backend must be {known}; got 'flash'"):
        function(**good(), backend="flash")
    for given, reason in (
        ({"softcap": 2.0}, "softcap changes the scores, which the kernel keeps to itself"),
        ({"sink": torch.zeros(H)}, "a sink adds a logit without a key"),
    ):
        rule = re.escape(
            f"{name}: backend must take this call, and sdpa does not: {reason}; got 'sdpa' ({QUERY}, {KEY})"
        )
        with pytest.raises(ValueError, match=f"^{rule}$"):
            function(**good(), **given, backend="sdpa")
    rule = re.escape(f"{name}: backend must take this call, and ragged does not: {NO_LENGTHS}; got 'ragged' (")
    for given in ({}, {"mask": masks.causal()}, {"mask": masks.padding([S, 2]), "softcap": 2.0}):
        with pytest.raises(ValueError, match=f"^{rule}"):
            function(**good(), **given, backend="ragged")
    both = "softcap changes .*; a sink adds a logit without a key; got 'sdpa'"
    with pytest.raises(ValueError, match=both):
        function(**good(), softcap=2.0, sink=torch.zeros(H), backend="sdpa")
    with pytest.raises(ValueError, match="sdpa does not: a function transform"):
        torch.func.vmap(lambda q: function(**(good() | {"query": q}), backend="sdpa"), randomness="same")(
            torch.randn(2, B, H, L, K)
        )


# --- explain ----------------------------------------------------------------------------------------------------------

HOLDS_ALL, ASKED = "it holds all the weights, the other does not", "another was asked for"
COMPUTES_ALL = "it computes what is padding or belongs to other sequences, the other does not"
SLOW_TO_SET_UP = "many short heads in inference: a fused kernel's set-up costs more than it saves"


def test_explain_the_usual_call() -> None:
    answer = explain(**good())
    assert answer.backend == "sdpa"
    assert answer.refused == {"ragged": [NO_LENGTHS], "plain": [HOLDS_ALL]}
    assert str(answer) == f"sdpa runs\nragged does not: {NO_LENGTHS}\nplain does not: {HOLDS_ALL}"


def test_explain_what_only_the_plain_one_does() -> None:
    answer = explain(**good(), softcap=1.0, sink=torch.zeros(H))
    assert answer.backend == "plain"
    assert answer.refused == {
        "ragged": [NO_LENGTHS],
        "sdpa": ["softcap changes the scores, which the kernel keeps to itself", "a sink adds a logit without a key"],
    }
    assert str(answer).splitlines()[0] == "plain runs"


def test_explain_short_heads_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.randn(32, 4, 5, 32)
    assert explain(x, x, x) == ("plain", {"ragged": [NO_LENGTHS], "sdpa": [SLOW_TO_SET_UP]})
    assert explain(x.requires_grad_(), x, x).backend == "sdpa"


def test_explain_a_choice_of_the_caller() -> None:
    no_lengths = {"ragged": [NO_LENGTHS]}
    assert explain(**good(), backend="plain") == ("plain", no_lengths | {"sdpa": [ASKED]})
    assert explain(**good(), backend="sdpa") == ("sdpa", no_lengths | {"plain": [ASKED]})
    answer = explain(**good(), sink=torch.zeros(H), backend="plain")
    assert answer == ("plain", no_lengths | {"sdpa": ["a sink adds a logit without a key"]})
    padded = good() | {"mask": masks.padding([S, 2])}
    assert explain(**padded, backend="ragged") == ("ragged", {"sdpa": [ASKED], "plain": [ASKED]})
    assert explain(**padded, backend="sdpa") == ("sdpa", no_lengths | {"plain": [ASKED]})


def test_explain_sequence_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop pays, and only where its lengths are known."""
    padded = good() | {"mask": masks.padding([S, 2])}
    assert explain(**padded) == ("sdpa", {"ragged": [NO_LENGTHS], "plain": [HOLDS_ALL]})
    monkeypatch.setattr(functional, "TURN", 0)
    answer = explain(**padded)
    assert answer == ("ragged", {"sdpa": [COMPUTES_ALL], "plain": [HOLDS_ALL]})
    assert str(answer) == f"ragged runs\nsdpa does not: {COMPUTES_ALL}\nplain does not: {HOLDS_ALL}"
    assert explain(**padded | {"query": torch.randn(B, H, L, K, requires_grad=True)}).backend == "sdpa"
    monkeypatch.setattr(functional, "TURN_GRAD", 0)
    assert explain(**padded | {"query": torch.randn(B, H, L, K, requires_grad=True)}).backend == "ragged"
    assert explain(**padded, softcap=1.0).backend == "plain"


def test_explain_inside_a_transform() -> None:
    answers = []
    torch.func.grad(lambda q: (answers.append(explain(q, q, q)), q.sum())[1])(torch.randn(1, 2, 3, 4))
    assert answers[0].backend == "plain"
    assert answers[0].refused["sdpa"] == [
        "a function transform (torch.func, forward-mode AD) needs rules the kernel lacks"
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"sink": torch.zeros(4)},
        {"mask": masks.causal()},
        {"mask": masks.padding([3])},
        {"mask": masks.padding([3]), "sink": torch.zeros(4)},
        {"mask": masks.padding([3]), "backend": "ragged"},
    ],
    ids=["plain", "softcap", "sink", "causal", "padding", "padding and sink", "ragged"],
)
@pytest.mark.parametrize("turn", [None, 0], ids=["as measured", "always worth it"])
@pytest.mark.parametrize("shape", [(8, 4, 5, 32), (1, 4, 5, 32), (8, 4, 65, 32)], ids=str)
def test_explain_tells_the_truth(
    shape: tuple[int, ...], turn: int | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend it names is the one that runs, though one of them runs another inside."""
    if turn is not None:
        monkeypatch.setattr(functional, "TURN", turn)
    ran: list[str] = []
    for backend in backends.BACKENDS:
        original = type(backend).run
        monkeypatch.setattr(
            type(backend), "run", lambda self, request, f=original: (ran.append(self.name), f(self, request))[1]
        )
    options = options | ({"mask": masks.padding([3] * shape[0])} if "padding" in repr(options.get("mask")) else {})
    x = torch.randn(shape)
    attention(x, x, x, **options)
    assert ran[0] == explain(x, x, x, **options).backend
    assert ran[1:] == (["sdpa"] * shape[0] if ran[0] == "ragged" else [])


# --- attention_weights ------------------------------------------------------------------------------------------------


def test_attention_weights_mix_the_values_that_attention_mixes() -> None:
    inputs = good()
    mask = masks.causal() & masks.padding([S, 2])
    for options in ({}, {"softcap": 0.8}, {"sink": torch.linspace(-1, 1, H)}, {"scale": -0.2}):
        weights = attention_weights(inputs["query"], inputs["key"], mask=mask, **options)
        mixed = weights @ inputs["value"].repeat_interleave(H // G, dim=1)
        assert_close(mixed, attention(**inputs, mask=mask, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.padding([S, 0]), masks.dense(torch.rand(B, H, L, S) < 0.5)]
)
@pytest.mark.parametrize("with_sink", [False, True])
def test_attention_weights_averaged_one_head_at_a_time(mask: masks.Mask | None, with_sink: bool) -> None:
    """Without gradients the heads come one by one, with them all at once: the same numbers, and the reference's."""
    query, key = torch.randn(B, H, L, K), torch.randn(B, G, S, K)
    options: dict[str, Any] = {"mask": mask, "sink": torch.linspace(-1, 1, H) if with_sink else None}
    one_by_one = attention_weights(query, key, average_attn_weights=True, **options)
    at_once = attention_weights(query.clone().requires_grad_(), key, average_attn_weights=True, **options)
    each = attention_weights(query, key, **options)
    assert one_by_one.shape == (B, L, S)
    assert_close(one_by_one, at_once, rtol=1e-6, atol=1e-7)
    assert_close(one_by_one, each.mean(dim=1), rtol=1e-6, atol=1e-7)
    keep = None if mask is None else mask.keep(masks.Size(B, H, L, S, query.device))
    _, want = reference.attention(query, key, key, keep=keep, sink=options["sink"])
    assert_close(one_by_one.double(), want.mean(dim=1), rtol=1e-5, atol=1e-6)


def test_attention_weights_really_holds_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = backends.softmax_scores
    monkeypatch.setattr(backends, "_FEW_WEIGHTS", B * H * L * S - 1)
    monkeypatch.setattr(
        backends, "softmax_scores", lambda request: (asked.append(request.query.shape[1]), original(request))[1]
    )
    query, key = torch.randn(B, H, L, K), torch.randn(B, G, S, K)
    attention_weights(query, key, average_attn_weights=True)
    assert asked == [1] * H
    asked.clear()
    attention_weights(query.requires_grad_(), key, average_attn_weights=True)
    assert asked == [H]
    asked.clear()
    monkeypatch.setattr(backends, "_FEW_WEIGHTS", B * H * L * S)
    attention_weights(query.detach(), key, average_attn_weights=True)
    assert asked == [H]  # a loop would take longer than so little memory is worth


def test_attention_weights_of_single_precision_for_half_the_bits() -> None:
    for dtype, want in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        x = torch.randn(1, 2, 3, 4).to(dtype)
        assert attention_weights(x, x).dtype == want
        assert attention_weights(x, x, average_attn_weights=True).dtype == want
        assert attention(x, x, x).dtype == dtype


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_dropout(backend: str) -> None:
    """Each weight is dropped alone and the rest scaled up: values that name their key tell which."""
    query = torch.zeros(1, 1, 400, S)
    eye = torch.eye(S).view(1, 1, S, S)
    out = attention(query, eye, eye, dropout=0.25, backend=backend)[0, 0]
    kept = out != 0
    assert_close(out[kept], torch.full((int(kept.sum()),), 1 / S / 0.75))
    assert 0.7 < kept.float().mean() < 0.8
    assert kept.any(dim=0).all()
    assert not kept.all(dim=0).any()
    assert torch.equal(attention(query, eye, eye, dropout=1.0, backend=backend), torch.zeros(1, 1, 400, S))
    torch.manual_seed(3)
    first = attention(query, eye, eye, dropout=0.5, backend=backend)
    torch.manual_seed(3)
    assert torch.equal(first, attention(query, eye, eye, dropout=0.5, backend=backend))
