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
from headwise.core.lowering import Size

B, H, G, L, S, K, V = 2, 6, 3, 5, 7, 11, 13
NOT_WORTH = "what can be left out of these scores is nothing, or not worth the cuts"
LEARNED = "a bias that is learned number by number needs the gradient of all scores"
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
    known = "'tiled' or 'varlen' or 'sdpa' or 'plain', or None to let headwise choose"
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
    rule = re.escape(
        f"{name}: backend must take this call, and tiled does not: {LEARNED}; got 'tiled' ({QUERY}, {KEY})"
    )
    scores = torch.zeros(L, S, requires_grad=True)
    for given in ({}, {"softcap": 2.0}, {"dropout": 0.5}):
        with pytest.raises(ValueError, match=f"^{rule}$"):
            function(**good(), **given, mask=masks.bias(scores) & masks.causal(), backend="tiled")
    both = "softcap changes .*; a sink adds a logit without a key; got 'sdpa'"
    with pytest.raises(ValueError, match=both):
        function(**good(), softcap=2.0, sink=torch.zeros(H), backend="sdpa")
    for backend, reason in (
        ("sdpa", "a function transform"),
        ("tiled", "it needs an eager call on plain tensors on the"),
    ):
        with pytest.raises(ValueError, match=f"{backend} does not: {reason}"):
            torch.func.vmap(lambda q, b=backend: function(**(good() | {"query": q}), backend=b), randomness="same")(
                torch.randn(2, B, H, L, K)
            )


# --- explain ----------------------------------------------------------------------------------------------------------

HOLDS_ALL, ASKED = "it would hold all the weights, sdpa does not", "another was asked for"
COMPUTES_ALL = "it would compute what nobody sees, tiled does not"
SLOW_TO_SET_UP = "many short heads in inference: a fused kernel's set-up costs more than it saves"


def test_explain_the_usual_call() -> None:
    answer = explain(**good())
    assert answer.backend == "sdpa"
    assert answer.refused == {"tiled": [NOT_WORTH], "plain": [HOLDS_ALL]}
    cost = "20.2 kFLOP, 0% saved, 240 B beside inputs and output"
    assert str(answer) == f"sdpa runs: {cost}\ntiled does not: {NOT_WORTH}\nplain does not: {HOLDS_ALL}"


def test_explain_what_only_the_plain_one_does() -> None:
    answer = explain(**good(), softcap=1.0, sink=torch.zeros(H))
    assert answer.backend == "plain"
    assert answer.refused == {
        "tiled": [NOT_WORTH],
        "sdpa": ["softcap changes the scores, which the kernel keeps to itself", "a sink adds a logit without a key"],
    }
    pairs = B * H * L * S
    assert (answer.flops, answer.dense_flops, answer.bytes) == (2 * pairs * (K + V), 2 * pairs * (K + V), 4 * pairs)
    assert str(answer).splitlines()[0] == "plain runs: 20.2 kFLOP, 0% saved, 1.68 kB beside inputs and output"


def test_explain_short_heads_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.randn(32, 4, 5, 32)
    assert explain(x, x, x)[:2] == ("plain", {"tiled": [NOT_WORTH], "sdpa": [SLOW_TO_SET_UP]})
    assert explain(x.requires_grad_(), x, x).backend == "sdpa"


def test_explain_a_choice_of_the_caller() -> None:
    asked = {"tiled": [ASKED]}
    assert explain(**good(), backend="plain")[:2] == ("plain", asked | {"sdpa": [ASKED]})
    assert explain(**good(), backend="sdpa")[:2] == ("sdpa", asked | {"plain": [ASKED]})
    answer = explain(**good(), sink=torch.zeros(H), backend="plain")
    assert answer[:2] == ("plain", asked | {"sdpa": ["a sink adds a logit without a key"]})
    padded = good() | {"mask": masks.padding([S, 2])}
    assert explain(**padded, backend="tiled")[:2] == ("tiled", {"sdpa": [ASKED], "plain": [ASKED]})
    assert explain(**padded, backend="sdpa")[:2] == ("sdpa", asked | {"plain": [ASKED]})


def test_explain_dropout() -> None:
    """Nothing is left out: what counts is that the others hold all weights."""
    x = torch.randn(1, 4, 512, 32)
    answer = explain(x, x, x, dropout=0.1)
    assert answer.backend == "tiled"
    assert answer.saved == 0
    holds = ["it would hold all the weights, tiled does not"]
    assert answer.refused == {"sdpa": holds, "plain": holds}


def test_explain_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop pays."""
    padded = good() | {"mask": masks.padding([S, 2])}
    assert explain(**padded)[:2] == ("sdpa", {"tiled": [NOT_WORTH], "plain": [HOLDS_ALL]})
    monkeypatch.setattr(functional, "TURN", 0)
    answer = explain(**padded)
    holds = "it would hold all the weights, tiled does not"
    assert answer[:2] == ("tiled", {"sdpa": [COMPUTES_ALL], "plain": [holds]})
    assert answer.flops == 2 * H * L * (S + 2) * (K + V)
    assert answer.saved == 1 - (S + 2) / (2 * S)
    cost = "13 kFLOP, 36% saved, 240 B beside inputs and output"
    assert str(answer) == f"tiled runs: {cost}\nsdpa does not: {COMPUTES_ALL}\nplain does not: {holds}"
    assert explain(**padded | {"query": torch.randn(B, H, L, K, requires_grad=True)}).backend == "sdpa"
    monkeypatch.setattr(functional, "TURN_GRAD", 0)
    assert explain(**padded | {"query": torch.randn(B, H, L, K, requires_grad=True)}).backend == "tiled"
    assert explain(**padded, softcap=1.0).backend == "plain"
    monkeypatch.setattr(functional, "_WORTH_A_TILE", 0)
    for options in ({"softcap": 1.0}, {"sink": torch.zeros(H)}, {"dropout": 0.5}):
        assert explain(**good(), **options).backend == "tiled"  # rather than all weights, in memory


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
        {"mask": masks.padding([3]), "backend": "tiled"},
    ],
    ids=["plain", "softcap", "sink", "causal", "padding", "padding and sink", "tiled"],
)
@pytest.mark.parametrize("turn", [None, 0], ids=["as measured", "always worth it"])
@pytest.mark.parametrize("shape", [(8, 4, 5, 32), (1, 4, 5, 32), (8, 4, 65, 32)], ids=str)
def test_explain_tells_the_truth(
    shape: tuple[int, ...], turn: int | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend it names is the one that runs."""
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
    assert not ran[1:]


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
    keep = None if mask is None else mask.keep(Size(B, H, L, S, query.device))
    _, want = reference.attention(query, key, key, keep=keep, sink=options["sink"])
    assert_close(one_by_one.double(), want.mean(dim=1), rtol=1e-5, atol=1e-6)


def test_attention_weights_really_holds_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for name in ("softmax_scores", "_share_out"):
        original = getattr(backends, name)
        monkeypatch.setattr(
            backends, name, lambda request, *m, f=original: (asked.append(request.query.shape[1]), f(request, *m))[1]
        )
    monkeypatch.setattr(backends, "_FEW_WEIGHTS", B * H * L * S - 1)
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
