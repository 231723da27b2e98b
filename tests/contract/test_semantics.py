"""docs/design.md, the semantics table, first part: dead rows, appended keys, padded queries, weights, causality.

Each test is one row and is named after it. Every numeric test holds outputs, weights and all gradients against the
float64 oracle, through both layouts, train and eval, weights off, averaged and per head, eager, compiled and vmapped.
"""

from __future__ import annotations

import pytest
import torch
from tests.oracle.cases import (
    B,
    Call,
    Case,
    D,
    H,
    K,
    L,
    S,
    Way,
    call_module,
    compare_attention,
    compare_module,
    every_call,
    every_eager_way,
    every_training_way,
    every_way,
    heads,
    inputs,
    lower_left,
    make_module,
    minus_inf,
    oracle,
    run_attention,
    run_module,
    through,
    torch_named,
)
from torch import Tensor, nn
from torch.testing import assert_close

import headwise
from headwise import attention, attention_weights, masks
from headwise.core import reference

# --- a query with no visible key --------------------------------------------------------------------------------------

LENGTHS = torch.tensor([S, 0, 3])
PADDED = torch.arange(S) >= LENGTHS[:, None]  # (B, S), sample 1 is all padding
ROW = torch.zeros(L, S, dtype=torch.bool)
ROW[2] = True  # query 2 may see nothing
LEFT = (
    torch.arange(S) < torch.tensor([0, 2, S])[:, None]
)  # left padding: under the causal rule queries 0 and 1 are dead
SAMPLE_1 = torch.tensor([False, True, False])[:, None, None].expand(B, H, L)
QUERY_2 = torch.zeros(B, H, L, dtype=torch.bool)
QUERY_2[..., 2] = True
LEFT_DEAD = ~(lower_left(L, S) & ~LEFT[:, None, None]).any(dim=-1).expand(B, H, L)
BOTH_DEAD = SAMPLE_1 | QUERY_2

MODULE_DEAD: dict[str, tuple[Case, Tensor]] = {
    "key_padding bool": (Case({"key_padding_mask": PADDED}, {"keep": ~PADDED[:, None, None]}), SAMPLE_1),
    "key_padding float": (Case({"key_padding_mask": minus_inf(PADDED)}, {"keep": ~PADDED[:, None, None]}), SAMPLE_1),
    "attn_mask bool": (Case({"attn_mask": ROW}, {"keep": ~ROW}), QUERY_2),
    "attn_mask float": (Case({"attn_mask": minus_inf(ROW)}, {"keep": ~ROW}), QUERY_2),
    "attn_mask 4-D bool": (
        Case({"attn_mask": PADDED[:, None, None] | ROW}, {"keep": ~(PADDED[:, None, None] | ROW)}),
        BOTH_DEAD,
    ),
    "attn_mask 4-D float": (
        Case({"attn_mask": minus_inf(PADDED[:, None, None])}, {"keep": ~PADDED[:, None, None]}),
        SAMPLE_1,
    ),
    "both masks": (
        Case({"attn_mask": ROW, "key_padding_mask": minus_inf(PADDED)}, {"keep": ~(PADDED[:, None, None] | ROW)}),
        BOTH_DEAD,
    ),
    "causal and left padding": (
        Case({"key_padding_mask": LEFT, "is_causal": True}, {"keep": lower_left(L, S) & ~LEFT[:, None, None]}),
        LEFT_DEAD,
    ),
    "padding()": (Case({"mask": (masks.padding, LENGTHS)}, {"keep": ~PADDED[:, None, None]}), SAMPLE_1),
    "dense()": (Case({"mask": (masks.dense, ~ROW)}, {"keep": ~ROW}), QUERY_2),
    "bias()": (Case({"mask": (masks.bias, minus_inf(ROW))}, {"bias": minus_inf(ROW)}), QUERY_2),
}


@every_way
def test_a_query_with_no_visible_key(way: Way) -> None:
    module = make_module(way)
    triple = inputs(L, S, S)
    cases = {name: case for name, (case, _) in MODULE_DEAD.items()}
    found = compare_module(module, way, triple, cases)
    for name in found:
        dead_BHL = MODULE_DEAD[name][1]
        rows = dead_BHL.all(dim=1)
        assert rows.any()
        assert torch.equal(found[name][0][rows], module.out_proj.bias.expand(int(rows.sum()), D)), name
        if way.weights == "averaged":
            assert torch.equal(found[name][1][rows], torch.zeros(int(rows.sum()), S)), name
        elif way.weights == "per head":
            assert torch.equal(found[name][1][dead_BHL], torch.zeros(int(dead_BHL.sum()), S)), name


@every_training_way
def test_a_query_with_no_visible_key_has_gradient_0(way: Way) -> None:
    """A loss that reads dead rows only: exactly 0 for everything but the output bias."""
    module = make_module(way)
    triple = inputs(L, S, S)
    found = run_module(module, way, triple, {name: case for name, (case, _) in MODULE_DEAD.items()})
    loss = torch.zeros(())
    for name in found:
        dead_BHL = MODULE_DEAD[name][1]
        rows = dead_BHL.all(dim=1)
        loss = loss + found[name][0][rows].pow(3).sum()
        if way.weights != "off":
            loss = loss + found[name][1][rows if way.weights == "averaged" else dead_BHL].sum()
    loss.backward()
    for name, tensor in zip(("query", "key", "value"), triple, strict=True):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor)), name
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)) == (name != "out_proj.bias"), name


FUNCTION_DEAD: dict[str, tuple[Case, Tensor]] = {
    "padding(lengths)": (Case({"mask": (masks.padding, LENGTHS)}, {"keep": ~PADDED[:, None, None]}), SAMPLE_1),
    "padding(keep)": (Case({"mask": (masks.padding, ~PADDED)}, {"keep": ~PADDED[:, None, None]}), SAMPLE_1),
    "dense 2-D": (Case({"mask": (masks.dense, ~ROW)}, {"keep": ~ROW}), QUERY_2),
    "dense 4-D": (
        Case({"mask": (masks.dense, ~(PADDED[:, None, None] | ROW))}, {"keep": ~(PADDED[:, None, None] | ROW)}),
        BOTH_DEAD,
    ),
    "one head's row": (
        Case(
            {"mask": (masks.dense, ~(ROW & torch.tensor([True, False])[:, None, None])[None])},
            {"keep": ~(ROW & torch.tensor([True, False])[:, None, None])},
        ),
        QUERY_2 & torch.tensor([True, False])[:, None],
    ),
    "bias": (Case({"mask": (masks.bias, minus_inf(ROW))}, {"keep": ~ROW}), QUERY_2),
    "causal and left padding": (
        Case(
            {"mask": (lambda keep: masks.causal() & masks.padding(keep), ~LEFT)},
            {"keep": lower_left(L, S) & ~LEFT[:, None, None]},
        ),
        LEFT_DEAD,
    ),
    "documents": (
        Case(
            {"mask": (masks.documents, torch.tensor([0, 0, 9, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1, 1]))},
            {"keep": torch.tensor([0, 0, 9, 1, 1])[:, None] == torch.tensor([0, 0, 0, 1, 1, 1, 1])},
        ),
        QUERY_2,
    ),
    "prefix(0)": (
        Case({"mask": (masks.prefix, torch.tensor(0))}, {"keep": torch.zeros(1, 1, 1, S).bool()}),
        BOTH_DEAD | True,
    ),
    "softcap": (
        Case({"mask": (masks.dense, ~ROW), "softcap": 2.0}, {"keep": ~ROW}),
        QUERY_2,
    ),
}


@every_call
def test_a_query_with_no_visible_key_in_attention(call: Call) -> None:
    cases = {
        name: case for name, (case, _) in FUNCTION_DEAD.items() if call[0] != "sdpa" or "softcap" not in case.given
    }
    triple = [heads(B, H, length, K, grad=True) for length in (L, S, S)]
    found = compare_attention(call, triple, cases)
    for name, out in found.items():
        dead_BHL = FUNCTION_DEAD[name][1]
        assert torch.equal(out[dead_BHL], torch.zeros(int(dead_BHL.sum()), K)), name
    if call[1]:
        triple = [tensor.detach().requires_grad_() for tensor in triple]
        found = run_attention(call, triple, cases)
        torch.stack([(out * FUNCTION_DEAD[name][1][..., None]).sum() for name, out in found.items()]).sum().backward()
        for tensor in triple:
            assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("path", ["eager", "compiled", "vmapped"])
def test_a_query_with_no_visible_key_in_attention_weights(path: str) -> None:
    query, key = heads(B, H, L, K, grad=True), heads(B, H, S, K, grad=True)

    def both(query: Tensor, key: Tensor, lengths: Tensor) -> list[Tensor]:
        mask = masks.padding(lengths)
        return [
            attention_weights(query, key, mask=mask),
            attention_weights(query, key, mask=mask, average_attn_weights=True),
        ]

    each, average = through(path, both, query, key, LENGTHS)
    _, wanted = reference.attention(query, key, key, keep=~PADDED[:, None, None])
    assert_close(each.double(), wanted, rtol=2e-5, atol=5e-6)
    assert_close(average.double(), wanted.mean(dim=1), rtol=2e-5, atol=5e-6)
    assert torch.equal(each[1], torch.zeros(H, L, S))
    assert torch.equal(average[1], torch.zeros(L, S))
    (each[1].sum() + average[1].sum()).backward()
    assert torch.equal(query.grad, torch.zeros_like(query))
    assert torch.equal(key.grad, torch.zeros_like(key))


# --- which keys a mask speaks of --------------------------------------------------------------------------------------

APPENDED = [
    pytest.param({"add_bias_kv": True}, id="bias_kv"),
    pytest.param({"add_bias_kv": True, "add_zero_attn": True}, id="both"),
]
SPEAKS = {
    "no mask": Case({}, {}),
    **{name: MODULE_DEAD[name][0] for name in MODULE_DEAD if name != "causal and left padding"},
    "is_causal": Case({"is_causal": True}, {"keep": lower_left(L, S)}),
    "causal()": Case({"mask": (masks.causal,)}, {"keep": lower_left(L, S)}),
    "float": Case(
        {"attn_mask": torch.linspace(-2, 2, L * S).view(L, S)}, {"bias": torch.linspace(-2, 2, L * S).view(L, S)}
    ),
}


@pytest.mark.parametrize("options", APPENDED)
@every_way
def test_which_keys_a_mask_speaks_of(way: Way, options: dict[str, bool]) -> None:
    """The caller's: the appended keys are visible to every query, so that none is dead."""
    if way.path == "compiled" and (len(options) == 1 or way.train):
        return  # both together, once, are enough for a compiler
    module = make_module(way, **options)
    found = compare_module(module, way, inputs(L, S, S), SPEAKS)
    count = len(options)
    for name, parts in found.items():
        if way.weights != "off":
            assert parts[1].shape[-1] == S + count
            appended = parts[1][..., S:].sum(dim=-1)
            assert (appended > 0).all(), name
            assert_close(parts[1].sum(dim=-1), torch.ones(parts[1].shape[:-1]))


@pytest.mark.parametrize(
    "options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["none", "zero", "both"]
)
@every_way
def test_which_keys_a_mask_speaks_of_with_no_keys_at_all(way: Way, options: dict[str, bool]) -> None:
    if way.path in ("compiled", "aot") and len(options) != 2 * (not way.train):
        return  # none in train and both in eval are enough for a compiler
    module = make_module(way, **options)
    no_keys = torch.zeros(B, 0, dtype=torch.bool)
    everything = torch.ones(1, 1, L, 0, dtype=torch.bool)
    cases = {
        "no mask": Case({}, {}),
        "key_padding": Case({"key_padding_mask": no_keys}, {"keep": everything}),
        "float": Case({"attn_mask": torch.zeros(L, 0)}, {"keep": everything}),
        "causal": Case({"is_causal": True}, {"keep": everything}),
        "padding": Case({"mask": (masks.padding, torch.zeros(B, dtype=torch.int64))}, {"keep": everything}),
    }
    found = compare_module(module, way, inputs(L, 0, 0), cases)
    for parts in found.values():
        if way.weights != "off":
            assert parts[1].shape[-1] == len(options)
        if not options:
            assert torch.equal(parts[0], module.out_proj.bias.expand(B, L, D))


@every_call
def test_which_keys_a_mask_speaks_of_with_a_sink(call: Call) -> None:
    """The sink counts before a row is called dead: such a row is 0 because the sink takes all, with no error."""
    backend = call[0]
    if backend == "sdpa":
        with pytest.raises(ValueError, match="a sink adds a logit without a key"):
            attention(*(heads(B, H, n, K) for n in (L, S, S)), sink=torch.zeros(H), backend="sdpa")
        return
    sink = torch.tensor([1.5, -0.5])
    triple = [heads(B, H, length, K, grad=True) for length in (L, S, S)]
    cases = {name: Case({**case.given, "sink": sink}, case.means) for name, (case, _) in FUNCTION_DEAD.items()}
    compare_attention(call, triple, cases)
    weights = attention_weights(triple[0], triple[1], mask=masks.padding(LENGTHS), sink=sink)
    _, wanted = reference.attention(*triple, keep=~PADDED[:, None, None], sink=sink)
    assert_close(weights.double(), wanted, rtol=2e-5, atol=5e-6)
    assert (weights[0].sum(dim=-1) < 1).all()
    assert torch.equal(weights[1], torch.zeros(H, L, S))


# --- padded query rows ------------------------------------------------------------------------------------------------

QUERY_PADDED = torch.arange(L) >= torch.tensor([L, 2, 0])[:, None]  # (B, L), sample 2 is all padding
SELF_PADDED = QUERY_PADDED.clone()
SELF_PADDED[2] = torch.tensor([True, False, False, True, False])  # left padding and holes


@every_way
def test_padded_query_rows(way: Way) -> None:
    """Without `query_padding_mask` they are computed like any other row, in train and eval."""
    module = make_module(way)
    (x,) = inputs(L)
    cases = {
        "key_padding": Case({"key_padding_mask": SELF_PADDED}, {"keep": ~SELF_PADDED[:, None, None]}),
        "causal": Case(
            {"key_padding_mask": SELF_PADDED, "is_causal": True},
            {"keep": lower_left(L, L) & ~SELF_PADDED[:, None, None]},
        ),
    }
    found = compare_module(module, way, [x, x, x], cases)
    if "key_padding" in found:
        assert (found["key_padding"][0][SELF_PADDED] - module.out_proj.bias).abs().amax(dim=-1).min() > 1e-3


@every_eager_way
def test_padded_query_rows_as_torch_does(way: Way) -> None:
    module = make_module(way)
    theirs = nn.MultiheadAttention(D, H, batch_first=way.batch_first).train()  # its eval path has other rules
    theirs.load_state_dict(module.state_dict())
    (x,) = inputs(L)
    padded = SELF_PADDED.clone()
    found = call_module(module, way, x, x, x, {"key_padding_mask": padded})
    turned = x if way.batch_first else x.transpose(0, 1)
    out, weights = theirs(
        turned, turned, turned, key_padding_mask=padded, average_attn_weights=way.weights == "averaged"
    )
    assert_close(found[0], out if way.batch_first else out.transpose(0, 1))
    if way.weights != "off":
        assert_close(found[1], weights)


@every_way
def test_padded_query_rows_with_query_padding_mask(way: Way) -> None:
    """Exactly 0, the output bias included, in output and weights; the other rows as without it."""
    module = make_module(way)
    triple = inputs(L, S, S)
    rows = {"query_padding_mask": QUERY_PADDED}
    means = {"query_padding": QUERY_PADDED}
    cases = {
        "alone": Case(rows, means),
        "key_padding": Case(
            rows | {"key_padding_mask": PADDED}, means | {"keep": ~PADDED[:, None, None]}
        ),
        "attn_mask": Case(rows | {"attn_mask": minus_inf(ROW)}, means | {"keep": ~ROW}),
        "causal": Case(rows | {"is_causal": True}, means | {"keep": lower_left(L, S)}),
        "padding()": Case(rows | {"mask": (masks.padding, LENGTHS)}, means | {"keep": ~PADDED[:, None, None]}),
    }  # fmt: skip
    found = compare_module(module, way, triple, cases)
    for name, parts in found.items():
        assert torch.equal(parts[0][QUERY_PADDED], torch.zeros(int(QUERY_PADDED.sum()), D)), name
        if way.weights == "averaged":
            assert torch.equal(parts[1][QUERY_PADDED], torch.zeros(int(QUERY_PADDED.sum()), S)), name
        elif way.weights == "per head":
            assert torch.equal(parts[1].transpose(1, 2)[QUERY_PADDED], torch.zeros(int(QUERY_PADDED.sum()), H, S)), name


@every_way
def test_padded_query_rows_that_are_keys_and_keys_that_are_rows(way: Way) -> None:
    """Self-attention whose two masks differ: a position may be padding in one role and not in the other."""
    module = make_module(way)
    (x,) = inputs(L)
    keys = torch.tensor([[False, True, False, False, True], [False, False, False, True, False], [True] * 5])
    rows = {"query_padding_mask": QUERY_PADDED}
    cases = {
        "both": Case(
            rows | {"key_padding_mask": keys},
            {"keep": ~keys[:, None, None], "query_padding": QUERY_PADDED},
        ),
        "rows only": Case(rows, {"query_padding": QUERY_PADDED}),
        "keys only": Case({"mask": (masks.padding, ~keys)}, {"keep": ~keys[:, None, None]}),
    }
    compare_module(module, way, [x, x, x], cases)
    if way.path != "compiled":
        (value,) = inputs(L)
        compare_module(module, way, [x, x, value], cases)
        compare_module(module, way, [x, value, x], cases)
        compare_module(module, way, [value, x, x], cases)


@every_eager_way
def test_padded_query_rows_unbatched(way: Way) -> None:
    module = make_module(way)
    x = torch.randn(L, D)
    padded = torch.tensor([False, False, True, False, True])
    average = way.weights == "averaged"
    out, weights = module(
        x, x, x, key_padding_mask=padded, query_padding_mask=padded,
        need_weights=way.weights != "off", average_attn_weights=average,
    )  # fmt: skip
    params = {name: value.detach().double() for name, value in torch_named(module, lambda parameter: parameter).items()}
    wanted, wanted_weights = oracle(params, *[x[None]] * 3, keep=~padded, query_padding=padded[None])
    assert_close(out.double(), wanted[0], rtol=2e-5, atol=5e-6)
    assert torch.equal(out[padded], torch.zeros(2, D))
    if weights is not None:
        wanted_weights = wanted_weights[0].mean(dim=0) if average else wanted_weights[0]
        assert_close(weights.double(), wanted_weights, rtol=2e-5, atol=5e-6)


# --- returned weights -------------------------------------------------------------------------------------------------


class FixedFactor(nn.Module):
    """What dropout did, without chance: a given factor on every weight."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weights: Tensor) -> Tensor:
        return weights * self.factor


@every_way
def test_returned_weights_are_before_dropout(way: Way) -> None:
    """With half of them dropped, rows still sum to 1 and equal the oracle's; the output carries the dropout."""
    if way.path == "compiled" and not way.train:
        return
    module = make_module(way, dropout=0.5)
    triple = inputs(L, S, S)
    found = run_module(module, way, triple, {"all": Case({"key_padding_mask": LEFT}, {})})["all"]
    params = {name: value.detach().double() for name, value in torch_named(module, lambda parameter: parameter).items()}
    out, weights = oracle(params, *triple, keep=~LEFT[:, None, None])
    if way.weights != "off":
        wanted = weights if way.weights == "per head" else weights.mean(dim=1)
        assert_close(found[1].double(), wanted, rtol=2e-5, atol=5e-6)
        assert_close(found[1][:2].sum(dim=-1), torch.ones(found[1][:2].shape[:-1]))
    dropped = (found[0].double() - out).abs().amax(dim=-1)[:2]
    assert (dropped > 1e-3).all() if way.train else (dropped < 1e-5).all()


@every_eager_way
def test_returned_weights_beside_a_dropout_that_works_in_place(way: Way) -> None:
    """A hooked `nn.Dropout(inplace=True)` is called: it changes its own copy."""
    module = make_module(way)
    module.attn_dropout = nn.Dropout(0.5, inplace=True).train()
    module.attn_dropout.register_forward_hook(lambda *_: None)
    triple = inputs(L, S, S)
    found = run_module(module, way, triple, {"all": Case({}, {})})["all"]
    params = {name: value.detach().double() for name, value in torch_named(module, lambda parameter: parameter).items()}
    out, weights = oracle(params, *triple)
    assert ((found[0].double() - out).abs().amax(dim=-1) > 1e-3).all()
    if way.weights != "off":
        wanted = weights if way.weights == "per head" else weights.mean(dim=1)
        assert_close(found[1].double(), wanted, rtol=2e-5, atol=5e-6)


@every_way
def test_returned_weights_beside_a_dropout_module(way: Way) -> None:
    """Anything in the place of `attn_dropout` is called on the weights; what is returned is not what it changed."""
    if way.path == "compiled" and not way.train:
        return
    module = make_module(way)
    factor = torch.rand(B, H, L, S).round() * 2
    module.attn_dropout = FixedFactor(factor)
    means = {"keep": ~LEFT[:, None, None], "factor": factor}
    compare_module(module, way, inputs(L, S, S), {"all": Case({"key_padding_mask": LEFT}, means)})


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_without_any_mask(batch_first: bool, fused: bool) -> None:
    """Self-attention without weights goes the shortest way; what is dropped is dropped there too, in train only."""
    module = make_module(Way(fused, batch_first, True, "off", "eager"), dropout=1.0)
    x = torch.randn(B, L, D)
    for need_weights in (False, True):
        assert torch.equal(module(x, x, x, need_weights=need_weights)[0], module.out_proj.bias.expand(B, L, D))
    module.eval()
    assert_close(module(x, x, x, need_weights=False)[0], module(x, x, x)[0])
    module.attn_dropout.train()  # its own flag decides
    assert torch.equal(module(x, x, x, need_weights=False)[0], module.out_proj.bias.expand(B, L, D))


def test_returned_weights_of_the_article() -> None:
    x = torch.randn(10, 20, 64)
    module = headwise.MultiheadAttention(64, 4, batch_first=True)
    assert module(x, x, x)[1].shape == (10, 20, 20)
    assert module(x, x, x, average_attn_weights=False)[1].shape == (10, 4, 20, 20)
    assert module(x, x, x, need_weights=False)[1] is None
    module = headwise.MultiheadAttention(64, 4, batch_first=True, average_attn_weights=False)
    assert module(x, x, x)[1].shape == (10, 4, 20, 20)
    assert module(x, x, x, average_attn_weights=True)[1].shape == (10, 20, 20)


@pytest.mark.parametrize("grad", [True, False])
def test_returned_weights_average_is_the_mean_of_the_heads(grad: bool) -> None:
    module = make_module(Way(False, True, grad, "off", "eager"))
    triple = inputs(L, S, S)
    with torch.set_grad_enabled(grad):
        out, averaged = module(*triple, key_padding_mask=PADDED)
        same, each = module(*triple, key_padding_mask=PADDED, average_attn_weights=False)
    assert_close(averaged, each.mean(dim=1), rtol=1e-6, atol=1e-7)
    assert_close(out, same, rtol=1e-5, atol=1e-6)


# --- is_causal --------------------------------------------------------------------------------------------------------


@every_way
def test_is_causal_alone(way: Way) -> None:
    """SDPA's upper-left rule for every pair of lengths; no attn_mask is needed."""
    for queries, keys in [(L, S)] if way.path == "compiled" else [(L, S), (S, L), (L, L), (1, S), (S, 1)]:
        rule = {"keep": lower_left(queries, keys)}
        cases = {"is_causal": Case({"is_causal": True}, rule), "causal()": Case({"mask": (masks.causal,)}, rule)}
        compare_module(make_module(way), way, inputs(queries, keys, keys), cases)


@every_call
def test_is_causal_alone_in_attention(call: Call) -> None:
    for queries, keys in [(S, L)] if call[2] == "compiled" else [(L, S), (S, L), (1, S), (S, 1)]:
        triple = [heads(B, H, length, K, grad=True) for length in (queries, keys, keys)]
        cases = {"causal()": Case({"mask": (masks.causal,)}, {"keep": lower_left(queries, keys)})}
        compare_attention(call, triple, cases)


SAMPLES = torch.rand(B, L, S, generator=torch.Generator().manual_seed(1)) < 0.3
PER_HEAD = torch.randn(B * H, L, S, generator=torch.Generator().manual_seed(2))
LOWER = lower_left(L, S)
CAUSAL_AND = {
    "attn_mask causal": Case({"attn_mask": ~LOWER}, {"keep": LOWER}),
    "attn_mask bool": Case({"attn_mask": SAMPLES[0]}, {"keep": LOWER & ~SAMPLES[0]}),
    "attn_mask float": Case({"attn_mask": PER_HEAD[0]}, {"keep": LOWER, "bias": PER_HEAD[0]}),
    "attn_mask per sample": Case({"attn_mask": SAMPLES}, {"keep": LOWER & ~SAMPLES[:, None]}),
    "attn_mask per head": Case({"attn_mask": PER_HEAD}, {"keep": LOWER, "bias": PER_HEAD.view(B, H, L, S)}),
    "attn_mask 4-D": Case({"attn_mask": PADDED[:, None, None]}, {"keep": LOWER & ~PADDED[:, None, None]}),
    "key_padding bool": Case({"key_padding_mask": PADDED}, {"keep": LOWER & ~PADDED[:, None, None]}),
    "key_padding float": Case(
        {"key_padding_mask": PER_HEAD[:B, 0]}, {"keep": LOWER, "bias": PER_HEAD[:B, 0][:, None, None]}
    ),
    "all of them": Case(
        {"attn_mask": PER_HEAD, "key_padding_mask": LEFT, "mask": (masks.window, 2, None)},
        {
            "keep": LOWER & ~LEFT[:, None, None] & lower_left(S + 2, L)[2:].T,
            "bias": PER_HEAD.view(B, H, L, S),
        },
    ),
    "padding()": Case({"mask": (masks.padding, LENGTHS)}, {"keep": LOWER & ~PADDED[:, None, None]}),
}
CAUSAL_AND = {name: Case({**case.given, "is_causal": True}, case.means) for name, case in CAUSAL_AND.items()}


@every_way
def test_is_causal_with_a_mask(way: Way) -> None:
    compare_module(make_module(way), way, inputs(L, S, S), CAUSAL_AND)


@every_call
def test_is_causal_with_a_mask_in_attention(call: Call) -> None:
    triple = [heads(B, H, length, K, grad=True) for length in (L, S, S)]
    cases = {}
    for name, builder, held, means in (
        ("padding", masks.padding, LENGTHS, {"keep": LOWER & ~PADDED[:, None, None]}),
        ("dense", masks.dense, ~SAMPLES, {"keep": LOWER & ~SAMPLES[:, None]}),
        ("bias", masks.bias, PER_HEAD.view(B, H, L, S), {"keep": LOWER, "bias": PER_HEAD.view(B, H, L, S)}),
        ("one key's bias", masks.bias, PER_HEAD[:1, None, :1], {"keep": LOWER, "bias": PER_HEAD[0, 0]}),
    ):
        cases[name] = Case({"mask": (lambda held, builder=builder: masks.causal() & builder(held), held)}, means)
    compare_attention(call, triple, cases)
