"""headwise.core.backends: the rules of choice, the kernel's arguments, and the helpers behind them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headwise import MultiheadAttention, attention, masks
from headwise.core import backends, reference, tiles, twice
from headwise.core.algebra import Lowered, Size
from headwise.core.backends import PLAIN, SDPA, Request, choose, eager, hidden_keys, needs_grad, revive
from headwise.core.functional import prepare

B, H, L, S, K = 2, 3, 5, 7, 4
INF = math.inf


def request(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, **options: Any) -> Request:
    batch, heads, queries, keys, width = shape or (B, H, L, S, K)
    query = torch.randn(batch, heads, queries, width, dtype=dtype, requires_grad=grad)
    key, value = torch.randn(2, batch, heads, keys, width, dtype=dtype).unbind(0)
    return prepare(query, key, value, options.pop("mask", None))._replace(**options)


# --- choice -----------------------------------------------------------------------------------------------------------

MANY_SHORT = (32, 4, 5, 7, 32)


@pytest.mark.parametrize(
    ("shape", "options", "chosen"),
    [
        (MANY_SHORT, {}, PLAIN),
        ((32, 4, 32, 32, 32), {}, PLAIN),
        ((256, 4, 5, 7, 16), {}, PLAIN),
        ((32, 4, 16, 64, 64), {}, PLAIN),
        (MANY_SHORT, {"mask": masks.causal() & masks.padding([3] * 32)}, SDPA),
        (MANY_SHORT, {"mask": masks.causal()}, SDPA),
        ((32, 4, 33, 7, 32), {}, SDPA),
        ((32, 4, 32, 33, 32), {}, SDPA),
        ((1, 127, 5, 7, 32), {}, SDPA),
        ((32, 4, 5, 7, 31), {}, SDPA),
        ((255, 4, 5, 7, 16), {}, SDPA),
        ((2049, 1, 32, 32, 32), {}, SDPA),
        (MANY_SHORT, {"dtype": torch.float64}, SDPA),
        (MANY_SHORT, {"dtype": torch.bfloat16}, SDPA),
        (MANY_SHORT, {"grad": True}, SDPA),
        (MANY_SHORT, {"mask": masks.bias(torch.zeros(5, 7, requires_grad=True))}, SDPA),
        (MANY_SHORT, {"grad": True, "softcap": 1.0}, PLAIN),
        ((B, H, L, S, K), {"sink": torch.zeros(H)}, PLAIN),
        ((B, H, L, S, K), {"drop": torch.nn.Dropout()}, PLAIN),
        ((B, H, L, S, K), {"dropout": 0.5}, SDPA),
        ((B, H, 0, 0, K), {}, SDPA),
    ],
    ids=str,
)
def test_choose(
    shape: tuple[int, ...], options: dict[str, Any], chosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    made = request(*shape, **options)
    assert choose(made) is chosen
    with torch.no_grad():
        assert choose(request(*shape, **options)) is (
            PLAIN if shape == MANY_SHORT and "dtype" not in options and "mask" not in options else chosen
        )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    if shape == MANY_SHORT and not options:
        assert choose(made) is SDPA


def test_choose_gives_up_the_kernel_inside_transforms_and_not_elsewhere() -> None:
    chosen = []

    def note(x: Tensor) -> Tensor:
        chosen.append(choose(request(1, 2, 3, 5, 4)._replace(query=x)))
        return x.sum()

    x = torch.randn(1, 2, 3, 4)
    torch.func.vmap(note, randomness="same")(torch.stack([x, x]))
    torch.func.grad(note)(x)
    torch.func.vjp(note, x)
    note(x)
    assert chosen == [PLAIN, PLAIN, PLAIN, SDPA]


def test_eager() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(eager())
        return x * 2

    note(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2, 2))
    torch.func.functionalize(note)(torch.ones(2))
    assert seen == [True, False, False]
    compiled = torch.compile(lambda x: x + 1 if eager() else x - 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), -1.0))


def test_a_compiled_call_has_one_path_for_all_sizes() -> None:
    """Inside a graph no size is compared: what eager mode would run plainly runs as SDPA."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: attention(x, x, x), backend=keep, fullgraph=True, dynamic=True)
    for batch, length in ((8, 5), (2, 67), (3, 131)):
        x = torch.randn(batch, 4, length, 32)
        assert_close(compiled(x), attention(x, x, x), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.nn.functional.scaled_dot_product_attention in targets


def test_why_not() -> None:
    assert SDPA.why_not(request()) == []
    assert PLAIN.why_not(request(softcap=1.0, sink=torch.zeros(H), drop=torch.nn.Identity())) == []
    reasons = SDPA.why_not(request(softcap=1.0, sink=torch.zeros(H), drop=torch.nn.Identity()))
    assert reasons == [
        "softcap changes the scores, which the kernel keeps to itself",
        "a sink adds a logit without a key",
        "a module is called on the weights in place of dropout",
    ]
    assert torch.func.vmap(lambda x: x * len(SDPA.why_not(request())), randomness="same")(torch.ones(2)).tolist() == [
        1,
        1,
    ]


@pytest.mark.parametrize("part", ["query", "key", "value", "bias", "sink"])
def test_needs_grad(part: str) -> None:
    made = request(mask=masks.bias(torch.zeros(L, S)), sink=torch.zeros(H))
    assert not needs_grad(made)
    if part == "bias":
        made = made._replace(mask=Lowered(bias=torch.zeros(L, S, requires_grad=True)))
    else:
        made = made._replace(**{part: getattr(made, part).clone().requires_grad_()})
    assert needs_grad(made)
    with torch.no_grad():
        assert not needs_grad(made)


# --- what the kernel is given -----------------------------------------------------------------------------------------


class Spy:
    """Notes the arguments of torch's function and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        original = torch.nn.functional.scaled_dot_product_attention

        def noting(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **rest: Any,
        ) -> Tensor:
            self.calls.append({"mask": attn_mask, "dropout": dropout_p, "causal": is_causal, "key": key, **rest})
            return original(query, key, value, attn_mask, dropout_p, is_causal, **rest)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("mask", "causal", "shape", "dtype"),
    [
        (None, False, None, None),
        (masks.causal(), True, None, None),
        (masks.padding([S, 2]), False, (B, 1, 1, S), torch.bool),
        (masks.causal() & masks.padding([S, 2]), True, (B, 1, 1, S), torch.bool),
        (masks.causal() & masks.prefix(3), True, (1, 1, 1, S), torch.bool),
        (masks.causal() & masks.bias(torch.zeros(1, H, 1, S)), True, (1, H, 1, S), torch.float32),
        (masks.from_torch(None, torch.zeros(B, S), True), True, (B, 1, 1, S), torch.float32),
        (masks.causal() & masks.dense(torch.ones(L, S, dtype=torch.bool)), True, (1, 1, L, S), torch.bool),
        (masks.dense(torch.ones(B, L, S, dtype=torch.bool)), False, (B, 1, L, S), torch.bool),
        (masks.bias(torch.zeros(1, H, L, S)), False, (1, H, L, S), torch.float32),
        (masks.padding([S, 2]) & masks.bias(torch.zeros(L, S)), False, (B, 1, L, S), torch.float32),
        (masks.causal(1), False, (1, 1, L, S), torch.bool),
    ],
    ids=str,
)
def test_the_kernel_gets_a_flag_or_a_view(
    spy: Spy,
    mask: masks.Mask | None,
    causal: bool,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    grad: bool,
) -> None:
    """The causal flag stays beside a mask on CPU, and no mask is expanded to all heads."""
    query, key, value = (torch.randn(B, H, n, K, requires_grad=grad) for n in (L, S, S))
    attention(query, key, value, mask=mask, backend="sdpa")
    (call,) = spy.calls
    assert call["causal"] is causal
    assert (None if call["mask"] is None else tuple(call["mask"].shape)) == shape
    assert (None if call["mask"] is None else call["mask"].dtype) == dtype


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("need_weights", [False])
def test_the_kernel_of_a_module_gets_the_flag_and_the_padding(spy: Spy, grad: bool, need_weights: bool) -> None:
    module = MultiheadAttention(H * K, H, batch_first=True).train(grad)
    x, padding = torch.randn(B, L, H * K), torch.zeros(B, L, dtype=torch.bool)
    with torch.set_grad_enabled(grad):
        module(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=need_weights)
        module(x, x, x, attn_mask=torch.zeros(B, L, L).bool(), need_weights=need_weights)
        module(x, x, x, is_causal=True, need_weights=need_weights)
    assert [call["causal"] for call in spy.calls] == [True, False, True]
    assert [None if c["mask"] is None else tuple(c["mask"].shape) for c in spy.calls] == [
        (B, 1, 1, L),
        (B, 1, L, L),
        None,
    ]


@pytest.mark.parametrize(
    ("mask", "options", "grouped"),
    [
        (masks.causal() & masks.padding([S, 2]), {"dropout": 0.5}, False),
        (masks.causal() & masks.bias(torch.zeros(L, S, requires_grad=True)), {}, False),
    ],
    ids=["dropout", "learned bias"],
)
def test_the_flag_is_written_out_where_the_kernel_refuses_the_pair(
    spy: Spy, mask: masks.Mask, options: dict[str, Any], grouped: bool
) -> None:
    query, key, value = (torch.randn(B, H, n, K) for n in (L, S, S))
    attention(query, key, value, mask=mask, backend="sdpa", **options)
    (call,) = spy.calls
    assert call["causal"] is False
    assert call["mask"].shape[-2:] == (L, S)
    hidden = call["mask"] == -INF if call["mask"].is_floating_point() else ~call["mask"]
    assert hidden[..., torch.ones(L, S).triu(1).bool()].all()
    assert not hidden[0, :, torch.ones(L, S).tril().bool()].any()


def test_the_flag_is_written_out_for_other_widths_of_the_value(spy: Spy) -> None:
    """The fused kernel wants one width; the general one refuses the pair."""
    query, key, value = torch.randn(B, H, L, K), torch.randn(B, H, S, K), torch.randn(B, H, S, K + 1)
    mask = masks.causal() & masks.padding([S, 2])
    found = attention(query, key, value, mask=mask, backend="sdpa")
    keep = torch.ones(L, S).tril().bool() & (torch.arange(S) < torch.tensor([S, 2])[:, None])[:, None, None]
    assert_close(found.double(), reference.attention(query, key, value, keep=keep)[0], rtol=1e-5, atol=1e-5)
    assert spy.calls[0]["causal"] is False


@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_heads_are_not_repeated(spy: Spy, groups: int) -> None:
    query, key, value = torch.randn(B, 2 * groups, L, K), torch.randn(B, groups, S, K), torch.randn(B, groups, S, K)
    attention(query, key, value, backend="sdpa")
    (call,) = spy.calls
    assert call["enable_gqa"] is True
    assert call["key"].shape == key.shape
    assert call["key"].data_ptr() == key.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_hidden_keys_are_silenced_only_where_they_could_do_harm(spy: Spy, dtype: torch.dtype) -> None:
    """Writing zeros costs ten times what a look at the numbers costs; float16 overflows too soon for a look."""
    query, key, value = (torch.randn(B, H, n, K, dtype=dtype) for n in (L, S, S))
    attention(query, key, value, mask=masks.causal(), backend="sdpa")
    attention(query, key, value, mask=masks.padding([S, 2]), backend="sdpa")
    assert spy.calls[0]["key"].data_ptr() == key.data_ptr()
    assert (spy.calls[1]["key"].data_ptr() == key.data_ptr()) == (dtype != torch.float16)


def test_hidden_keys_are_silenced_where_autocast_makes_them_float16() -> None:
    """float32 outside, float16 inside: what is harmless in the one is infinite in the other."""
    query, key, value = torch.randn(3, B, H, S, K).unbind(0)
    for tensor in (key, value):
        tensor[1, :, 2:] = 1e6
    mask = masks.padding([S, 2])
    with torch.autocast("cpu", torch.float16):
        found = attention(query, key, value, mask=mask)
    key[1, :, 2:], value[1, :, 2:] = 0, 0
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(found, attention(query, key, value, mask=mask))
    assert found.isfinite().all()


def test_gradients_of_a_row_without_keys_beside_a_bias_at_the_limit() -> None:
    query, key = torch.full((1, 1, 2, 1), 1e16), torch.full((1, 1, 2, 1), -5e16)
    inputs = [tensor.requires_grad_() for tensor in (query, key, torch.randn(1, 1, 2, 1))]
    mask = masks.padding([0]) & masks.bias(torch.full((2, 2), torch.finfo(torch.float32).min))
    for backend in ("sdpa", "plain"):
        out = attention(*inputs, mask=mask, scale=1.0, backend=backend)
        for found in (out, *torch.autograd.grad(out.sum(), inputs)):
            assert torch.equal(found, torch.zeros_like(found))


# What is put into which tensor at [1, 2, 5], a position that the mask hides; or the scale.
HARM: dict[str, dict[str, float]] = {
    "NaN in a key": {"key": math.nan},
    "inf in a value": {"value": math.inf},
    "a key whose product overflows": {"key": 3e38},
    "a query and a key whose product overflows": {"every query": 1e20, "key": 1e20},
    "a scale that overflows": {"scale": 1e37},
    "a value whose product with the gradient overflows": {"value": 1e30},
}


@pytest.mark.parametrize("name", HARM)
def test_what_could_do_harm_is_silenced(name: str, spy: Spy) -> None:
    query, key, value = (torch.randn(B, H, n, K) for n in (L, S, S))
    clean = key.clone(), value.clone()
    harm = HARM[name]
    query *= harm.get("every query", 1.0)
    key[1, 2, 5], value[1, 2, 5] = harm.get("key", 1.0), harm.get("value", 1.0)
    scale = harm.get("scale")
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    call = {"mask": masks.padding([S, 2]), "backend": "sdpa", "scale": scale}
    attention(query, key, value, **call)
    assert torch.equal(spy.calls[0]["key"][1, :, 2:], torch.zeros(H, S - 2, K))
    if scale is None:
        grad = torch.randn(B, H, L, K) * 1e20 if "gradient" in name else torch.randn(B, H, L, K)
        found = [attention(query, key, value, **call)]
        found += torch.autograd.grad(found[0], inputs, grad)
        others = [query.detach().requires_grad_(), *(tensor.requires_grad_() for tensor in clean)]
        wanted = [attention(*others, **call)]
        wanted += torch.autograd.grad(wanted[0], others, grad)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)


# --- helpers ----------------------------------------------------------------------------------------------------------

SIZE = Size(B, H, L, S, torch.device("cpu"))


def dead_rows() -> list[tuple[Lowered, Tensor]]:
    """Masks with dead rows, and which rows are dead (B, H, L)."""
    keep = torch.rand(B, H, L, S) < 0.5
    keep[0, 1, 2] = False
    padding = torch.arange(S) < torch.tensor([S, 0])[:, None]
    score = torch.randn(1, 1, L, S)
    score[..., 3, :] = -INF
    left = torch.arange(S) >= torch.tensor([0, 2])[:, None]
    lower = torch.ones(L, S).tril().bool()
    every = torch.zeros(B, H, L, dtype=torch.bool)
    return [
        (Lowered(keep=keep), ~keep.any(dim=-1)),
        (Lowered(keep=padding[:, None, None]), every | ~padding.any(dim=-1)[:, None, None]),
        (Lowered(bias=score), every | (score == -INF).all(dim=-1)),
        (Lowered(keep=keep, bias=score), ~(keep & (score != -INF)).any(dim=-1)),
        (Lowered(causal=True, keep=left[:, None, None]), every | ~(left[:, None, None] & lower).any(dim=-1)),
        (Lowered(keep=torch.ones(1, 1, 1, S).bool()), every),
    ]


@pytest.mark.parametrize("index", range(6))
def test_revive_for_kernels_without_a_rule_for_dead_rows(index: int) -> None:
    """What other devices run: dead rows see everything and are named; the other rows are as they were."""
    lowered, dead_BHL = dead_rows()[index]
    revived, dead = revive(lowered, SIZE)
    assert torch.equal(dead.expand(B, H, L, 1)[..., 0], dead_BHL)
    assert revived.causal is False
    assert revived.keep is not None
    hidden, _ = hidden_keys(lowered, SIZE)
    assert hidden is not None
    assert torch.equal(revived.keep.expand(B, H, L, S), ~hidden.expand(B, H, L, S) | dead_BHL[..., None])
    if revived.bias is not None:
        assert revived.bias.isfinite().all()

    query, key, value = (torch.randn(B, H, n, K, requires_grad=True) for n in (L, S, S))
    mask = backends._one_mask(revived)
    assert not (mask == -INF if mask.is_floating_point() else ~mask).all(dim=-1).any()
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).masked_fill(dead, 0)
    whole = lowered.whole_keep(SIZE)
    want, _ = reference.attention(query, key, value, keep=whole, bias=lowered.bias)
    assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[dead_BHL], torch.zeros(int(dead_BHL.sum()), K))
    for grad in torch.autograd.grad((out * dead_BHL[..., None]).sum(), [query, key, value]):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("block", [1, 3 * B * S, 2**20])
@pytest.mark.parametrize("groups", [6, 2, 1])
def test_averages_in_blocks(groups: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head and some rows at a time, under masks that differ by head and row: as all at once."""
    monkeypatch.setattr(backends, "_BLOCK", block)
    heads = 6
    query, key, value = torch.randn(B, heads, L, K), torch.randn(B, groups, S, K), torch.randn(B, groups, S, K + 1)
    keep, score = torch.rand(B, heads, L, S) < 0.7, torch.randn(1, heads, 1, S)
    keep[0, :, 2] = False
    for mask in (
        None,
        masks.causal(),
        masks.padding([S, 0]) & masks.causal(),
        masks.dense(keep),
        masks.dense(keep[:, :1]) & masks.bias(score),
        masks.bias(score.expand(1, heads, L, S)) & masks.causal(),
    ):
        for options in ({}, {"sink": torch.randn(heads)}, {"softcap": 0.7}, {"scale": -0.4}):
            whole = prepare(query, key, value, mask)._replace(grouped=groups < heads, **options)
            want, want_weights = PLAIN.run_with_weights(whole)
            out, average = PLAIN.run_with_average(whole)
            assert_close(out, want, rtol=1e-5, atol=1e-6)
            assert_close(average, want_weights.mean(dim=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("queries", "values"), [(1.0, 1.0), (300.0, 1.0), (1e30, 1.0), (math.nan, 1.0), (1.0, 1e36), (1.0, math.nan)]
)
def test_averages_of_large_scores_and_values(
    queries: float, values: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maximum is taken off wherever an exponential could overflow, by itself or times a value."""
    monkeypatch.setattr(backends, "_FEW_WEIGHTS", 0)
    query, key, value = (torch.randn(B, H, n, K, dtype=dtype) for n in (L, S, S))
    query[0, 1, 2] *= queries
    value[:, :, 1] *= values
    made = prepare(query, key, value, masks.causal())
    assert backends._are_small(made) == (queries == values == 1)
    out, average = PLAIN.run_with_average(made)
    want, weights = PLAIN.run_with_weights(made)
    assert_close(out, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_close(average, weights.mean(dim=1), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, L, S), (B, 0, S), (B, L, 0), (B, 0, 0)])
def test_averages_of_nothing(batch: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    query, key = torch.randn(batch, H, queries, K).to(dtype), torch.randn(batch, H, keys, K).to(dtype)
    made = prepare(query, key, key)
    for one, other in zip(PLAIN.run_with_average(made), PLAIN.run_with_weights(made), strict=True):
        other = other if other.shape == one.shape else other.mean(dim=1)
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_private_operators_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a torch without them the general path runs, with the same answer."""
    query, key, value = (torch.randn(B, H, n, K, requires_grad=True) for n in (L, S, S))
    mask = masks.causal() & masks.padding([S, 2])
    want = attention(query, key, value, mask=mask, backend="sdpa")
    wanted = torch.autograd.grad(want.sum(), [query, key, value])
    for name in ("_FUSED_CHOICE", "_KEEPS_GRAPH", "_SAVED_HOOKS", "_IN_TRANSFORM"):
        lacking = {"_FUSED_CHOICE": -1, "_KEEPS_GRAPH": True, "_SAVED_HOOKS": None, "_IN_TRANSFORM": False}[name]
        module = backends if hasattr(backends, name) else twice
        monkeypatch.setattr(module, name, twice.private(object(), "not_there", lacking))
    got = attention(query, key, value, mask=mask, backend="sdpa")
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    for one, other in zip(torch.autograd.grad(got.sum(), [query, key, value]), wanted, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert callable(twice.private(torch, "softmax", None))


def test_tiles_without_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own kernel runs them, with the same answer."""
    query, key, value = (torch.randn(B, H, n, K, requires_grad=True) for n in (L, S, S))
    for mask in (masks.window(2, 1), masks.causal() & masks.padding([S, 2])):
        want = attention(query, key, value, mask=mask, backend="tiled")
        wanted = torch.autograd.grad(want.sum(), [query, key, value])
        with monkeypatch.context() as patch:
            patch.setattr(backends, "HAS_FUSED", False)
            for name in ("_FUSED", "_FUSED_BACKWARD"):
                patch.setattr(tiles, name, None)
            got = attention(query, key, value, mask=mask, backend="tiled")
            grads = torch.autograd.grad(got.sum(), [query, key, value])
        assert_close(got, want, rtol=1e-5, atol=1e-6)
        for one, other in zip(grads, wanted, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-6)
