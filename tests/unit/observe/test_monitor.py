"""A watched model: the same numbers, nothing left behind, and readings that are right."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.observe.looking import INF, assert_clean, assert_unhooked, errors, looked_at, same
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import headwise
from headwise.observe import looking
from headwise.observe import observer as observing
from headwise.observe.inspection import inspect
from headwise.observe.snapshot import STATISTICS

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

B, L, D, H = 3, 12, 16, 2
PAD = torch.arange(L) >= torch.tensor([[L], [7], [2]])


def x_of(seed: int = 0) -> Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed))


def torchs(norm_first: bool = False, dropout: float = 0.2) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def ours(dropout: float = 0.2) -> headwise.Encoder:
    torch.manual_seed(1)
    return headwise.Encoder([headwise.EncoderBlock(D, H, dropout) for _ in range(2)])


class Failing(nn.Module):
    """Attends, and may be told to fail, behind that or in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (headwise.MultiheadAttention(D, H, batch_first=True) for _ in range(2))
        self.error: type[BaseException] | None = None
        self.during: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, x, x, need_weights=False)[0]
        if self.during is not None:
            self.during()
        if self.error is not None:
            raise self.error
        return self.second(x, x, x, need_weights=False)[0]


def assert_observed_again(model: nn.Module, monitor: headwise.observe.monitor.Monitor, *args: Any) -> None:
    before = monitor.snapshot().observed
    model(*args)
    assert monitor.snapshot().observed == before + 1
    assert errors(monitor) == {}
    assert_clean(model)


# --- The same numbers -------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module, Tensor], Any]]]] = {
    "torch, padded": lambda: (torchs(), lambda m, x: m(x, src_key_padding_mask=PAD)),
    "torch, norm first": lambda: (torchs(True), lambda m, x: m(x, src_key_padding_mask=PAD)),
    "torch, plain": lambda: (torchs(), lambda m, x: m(x)),
    "torch, whole": lambda: (nn.Transformer(D, H, 1, 2, 32, 0.2, batch_first=True), lambda m, x: m(x, x[:, 2:])),
    "torch's layer alone": lambda: (
        nn.MultiheadAttention(D, H, 0.2, batch_first=True),
        lambda m, x: m(x, x, x, key_padding_mask=PAD, need_weights=False)[0],
    ),
    "ours, padded": lambda: (ours(), lambda m, x: m(x, PAD, query_padding_mask=PAD)),
    "ours, plain": lambda: (ours(), lambda m, x: m(x)),
    "ours, whole": lambda: (headwise.Transformer(D, H, 1, 2, 32, 0.2, batch_first=True), lambda m, x: m(x, x[:, 2:])),
    "our layer alone": lambda: (
        headwise.MultiheadAttention(D, H, 0.2, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
    ),
    "our classifier": lambda: (
        headwise.SequenceClassifier(3, num_channels=D, embed_dim=D, num_heads=H),
        lambda m, x: m(x, PAD),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_to_the_bit(name: str) -> None:
    """Outputs, gradients and random numbers, with dropout."""
    torch.manual_seed(2)
    model, call = MODELS[name]()
    model.train()
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        x = x_of().requires_grad_()
        model.zero_grad()
        monitor = headwise.watch(model, budget=INF) if watched else None
        out = call(model, x)
        (out**2).sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([out.detach(), torch.rand(4), *([] if x.grad is None else [x.grad.clone()]), *grads])
        if monitor is not None:
            seen = monitor.snapshot()
            assert seen.errors == {}
            assert all(layer.observed == 1 for layer in seen.layers)
            monitor.close()
    assert all(same(one, other) for one, other in zip(*found, strict=True))
    assert_unhooked(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_use_is_the_same_to_the_bit(name: str, mode: Any) -> None:
    model, call = MODELS[name]()
    model.eval()
    with mode():
        plain, state = call(model, x_of()), torch.get_rng_state()
        with headwise.watch(model, budget=INF) as monitor:
            for _ in range(2):
                assert same(call(model, x_of()), plain)
                assert_clean(model)
        seen = monitor.snapshot()
    assert torch.equal(torch.get_rng_state(), state)
    assert (seen.forwards, seen.observed, seen.errors, seen.skipped) == (2, 2, {}, {})
    assert all(layer.observed == 2 for layer in seen.layers)
    assert_unhooked(model)


def test_checkpointed_training_is_the_same() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ours()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    model, grads = Checkpointed(), []
    for budget in (None, INF):
        torch.manual_seed(3)
        model.zero_grad()
        monitor = None if budget is None else headwise.watch(model, budget=budget)
        model(x_of()).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert monitor is not None
    assert errors(monitor) == {}
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    monitor.close()


# --- Nothing left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, StopIteration])
def test_after_an_error_in_forward_the_next_one_is_observed(error: type[BaseException]) -> None:
    model = Failing()
    with headwise.watch(model, budget=INF) as monitor:
        model(x_of())
        for _ in range(2):
            model.error = error
            with pytest.raises(error):
                model(x_of())
            if issubclass(error, Exception):
                assert_clean(model)
            model.error = None
            assert_observed_again(model, monitor, x_of())
    assert_unhooked(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_closing_after_an_error_leaves_nothing(error: type[BaseException]) -> None:
    """As Ctrl-C ends a `with`."""
    model = Failing()
    model.error = error
    with pytest.raises(error), headwise.watch(model, budget=INF):
        model(x_of())
    assert_unhooked(model)
    model.error = None
    with headwise.watch(model, budget=INF) as monitor:
        assert_observed_again(model, monitor, x_of())


def test_closing_within_a_forward_leaves_nothing() -> None:
    model = Failing()
    monitor = headwise.watch(model, budget=INF)
    plain = copy.deepcopy(model)(x_of())
    model.during = monitor.close
    assert torch.equal(model(x_of()), plain)
    assert_unhooked(model)
    model.during = None
    with headwise.watch(model, budget=INF) as monitor:
        assert_observed_again(model, monitor, x_of())


def test_closing_while_another_thread_runs_leaves_nothing() -> None:
    model, inside, closed = Failing(), threading.Event(), threading.Event()

    def during() -> None:
        inside.set()
        closed.wait(10)

    model.during = during
    monitor = headwise.watch(model, budget=INF)
    worker = threading.Thread(target=lambda: model(x_of()))
    worker.start()
    assert inside.wait(10)
    monitor.close()
    closed.set()
    worker.join()
    assert_unhooked(model)
    model.during = None
    with headwise.watch(model, budget=INF) as monitor:
        assert_observed_again(model, monitor, x_of())


def test_close_twice_and_what_was_seen_stays() -> None:
    model = ours()
    with headwise.watch(model, budget=INF) as monitor:
        model(x_of())
    monitor.close()
    model(x_of())
    assert monitor.snapshot().forwards == 1
    assert monitor.snapshot().layers[0].live is not None


# --- Copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torchs, ours])
def test_copies_are_not_watched(make: Callable[[], nn.Module]) -> None:
    model, file = make().eval(), io.BytesIO()
    state = model.state_dict()
    with headwise.watch(model, budget=INF) as monitor:
        model(x_of())
        assert list(model.state_dict()) == list(state)
        copied = copy.deepcopy(model)
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        fresh = make().eval()
        fresh.load_state_dict(model.state_dict())
        for each in (copied, loaded, fresh):
            assert torch.equal(each(x_of()), model(x_of()))
        assert monitor.snapshot().forwards == 4
        with headwise.watch(copied, budget=INF) as other:
            copied(x_of())
            assert (other.snapshot().forwards, monitor.snapshot().forwards) == (1, 4)


# --- Threads and monitors within each other ---------------------------------------------------------------------------


def test_eight_threads() -> None:
    model = torchs().eval()
    with torch.no_grad():
        expected = [model(x_of(at), src_key_padding_mask=PAD) for at in range(8)]
    wrong: list[int] = []

    def work(at: int) -> None:
        with torch.no_grad():
            for _ in range(15):
                out = model(x_of(at), src_key_padding_mask=PAD)
                wrong.extend([] if torch.equal(out, expected[at]) else [at])

    with headwise.watch(model, budget=INF) as monitor:
        workers = [threading.Thread(target=work, args=(at,)) for at in range(8)]
        for worker in workers:
            worker.start()
        for _ in range(20):
            monitor.snapshot()
        for worker in workers:
            worker.join()
        seen = monitor.snapshot()
    assert wrong == []
    assert seen.errors == {}
    assert seen.forwards == 120
    assert seen.observed + seen.skipped.get("busy", 0) == 120
    assert {layer.observed for layer in seen.layers} == {seen.observed}
    assert all(sum(layer.queries.counts) == seen.observed for layer in seen.layers)
    assert_unhooked(model)


def test_two_monitors_of_one_model() -> None:
    model = ours().eval()
    plain = model(x_of())
    with headwise.watch(model, budget=INF) as one, headwise.watch(model, budget=INF, name="two") as two:
        for _ in range(3):
            assert torch.equal(model(x_of()), plain)
        for monitor in (one, two):
            seen = monitor.snapshot()
            assert (seen.forwards, seen.observed, seen.errors) == (3, 3, {})
        one.close()
        model(x_of())
        assert (one.snapshot().forwards, two.snapshot().observed) == (3, 4)
    assert_unhooked(model)


def test_a_watched_part_of_a_watched_model() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = ours(), ours()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    both = Both().eval()
    plain = both(x_of())
    with headwise.watch(both, budget=INF) as outer, headwise.watch(both.a, budget=INF) as inner:
        assert torch.equal(both(x_of()), plain)
        both.a(x_of())
        assert (outer.snapshot().forwards, inner.snapshot().forwards) == (1, 2)
        assert (outer.snapshot().observed, inner.snapshot().observed) == (1, 2)
        assert all(layer.observed == 1 for layer in outer.snapshot().layers)
    assert_unhooked(both)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self, inner_fails: bool = False) -> None:
        super().__init__()
        self.attention = headwise.MultiheadAttention(D, H, batch_first=True)
        self.inner_fails = inner_fails

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            with contextlib.suppress(ValueError):
                x = self(x, depth - 1)
        elif self.inner_fails:
            raise ValueError
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_calls_itself_is_one_pass(fails: bool) -> None:
    model = Recursive(fails)
    plain = model(x_of())
    with headwise.watch(model, budget=INF) as monitor:
        for at in range(2):
            assert torch.equal(model(x_of()), plain)
            seen = monitor.snapshot()
            assert (seen.forwards, seen.observed, seen.layers[0].observed) == (at + 1,) * 3
            assert sum(seen.layers[0].queries.counts) == (at + 1) * (2 if fails else 3)
    assert_unhooked(model)


def test_inspect_of_and_within_a_watched_model() -> None:
    model = Failing()
    with headwise.watch(model, budget=INF) as monitor:
        found = inspect(model, x_of())
        assert [call.name for call in found.calls] == ["first", "second"]
        assert monitor.snapshot().observed == 1
        inner = []
        model.during = lambda: inner.append(inspect(model.first, x_of(), x_of(), x_of()))
        assert_observed_again(model, monitor, x_of())
        assert len(inner) == 1
    assert_unhooked(model)


# --- Errors of the observer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_an_error_of_the_observer_is_counted_and_not_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    model, call = MODELS[name]()
    model.eval()
    plain = call(model, x_of())
    with headwise.watch(model, budget=INF) as monitor:
        monkeypatch.setattr(looking, "begin_look", look)
        assert same(call(model, x_of()), plain)
        seen = monitor.snapshot()
        assert seen.errors == {"ZeroDivisionError": len(seen.layers)}
        assert seen.observed == 0
        assert f"{len(seen.layers)} error" in str(seen)
        monkeypatch.undo()
        call(model, x_of())
        assert monitor.snapshot().observed == 1


@pytest.mark.parametrize("where", ["read_torch", "_given", "real_positions"])
def test_an_error_before_the_look_is_counted_too(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.observe import capture

    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    model = torchs().eval()
    with headwise.watch(model, budget=INF) as monitor, torch.no_grad():
        monkeypatch.setattr(capture, where, fails)
        model(x_of(), src_key_padding_mask=PAD)
        assert errors(monitor) == {"ZeroDivisionError": 2}
    assert_unhooked(model)


def test_warnings_of_the_observer_do_not_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: Any, **__: Any) -> Any:
        warnings.warn("odd", stacklevel=1)

    model = ours()
    with headwise.watch(model, budget=INF) as monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(looking, "begin_look", look)
        model(x_of())
        assert errors(monitor) == {"UserWarning": 2}


@pytest.mark.parametrize("hook", ["before", "after"])
def test_an_error_around_a_forward_is_counted(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours()
    with headwise.watch(model, budget=INF) as monitor:

        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(monitor._observer, hook, fails)
        model(x_of())
        assert errors(monitor) == {"ZeroDivisionError": 1}
        monkeypatch.undo()
    model(x_of())
    assert_unhooked(model)


def test_tokens_that_fail_are_an_error_of_the_observer() -> None:
    model = ours()

    def tokens(*_: Any) -> list[str]:
        raise ZeroDivisionError

    with headwise.watch(model, budget=INF, tokens=tokens, show_tokens=True) as monitor:
        model(x_of())
        seen = monitor.snapshot()
    assert seen.errors == {"ZeroDivisionError": 1}
    assert seen.observed == 1


# --- Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -1, -0.01, float("nan"), True, "x", None, [0.1], 1j])
def test_a_wrong_budget_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"watch: budget must be a share of the forwards' time above 0"):
        headwise.watch(ours(), budget=budget)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rows": 0}, "rows must"),
        ({"rows": 1.5}, "rows must"),
        ({"rows": True}, "rows must"),
        ({"name": ""}, "name must"),
        ({"name": 3}, "name must"),
        ({"tokens": 3}, "tokens must be a function"),
        ({"show_tokens": True}, "tokens must be given with show_tokens=True"),
    ],
)
def test_wrong_arguments_are_refused(words: dict[str, Any], said: str) -> None:
    model = ours()
    with pytest.raises(ValueError, match=f"watch: {said}"):
        headwise.watch(model, **words)
    assert_unhooked(model)


def test_models_that_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match=r"watch: model must be an nn.Module"):
        headwise.watch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"watch: model must hold headwise or torch.nn.MultiheadAttention"):
        headwise.watch(nn.Linear(2, 2))

    class Own(nn.TransformerEncoderLayer):
        pass

    for layer in (nn.TransformerEncoderLayer(D, H, 32), Own(D, H, 32)):
        with pytest.raises(ValueError, match=r"watch: model must not be a single nn.TransformerEncoderLayer"):
            headwise.watch(layer)


# --- Compilers and transforms -----------------------------------------------------------------------------------------

COMPILED = r"watch: model must not be compiled: .* watch the model that runs eagerly"


def test_what_is_compiled_already_is_refused() -> None:
    model = ours()
    with pytest.raises(ValueError, match=COMPILED):
        headwise.watch(torch.compile(model, backend="eager"))
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with pytest.raises(ValueError, match=COMPILED + r".*layers\.1"):
        headwise.watch(model)
    model = ours()
    model.layers[0].self_attn.compile(backend="eager")
    with pytest.raises(ValueError, match=COMPILED + r".*layers\.0\.self_attn"):
        headwise.watch(model)


@pytest.mark.parametrize("make", [torchs, ours])
@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()"])
def test_what_is_compiled_later_is_right_and_said(make: Callable[[], nn.Module], how: str) -> None:
    model = make().eval()
    with torch.no_grad():
        plain = model(x_of())
        with headwise.watch(model, budget=INF) as monitor:
            compiled: Any = model
            if how == "model.compile()":
                model.compile(backend="eager")
            else:
                compiled = torch.compile(model, backend="eager")
            for _ in range(3):
                torch.testing.assert_close(compiled(x_of()), plain)
            seen = monitor.snapshot()
            assert seen.skipped.get("compiled", 0) >= 1
            assert seen.errors == {}
            assert "not looked at: compiled" in str(seen)
    assert_clean(model)


def test_a_part_that_is_compiled_later_is_said() -> None:
    model = ours().eval()
    with torch.no_grad():
        plain = model(x_of())
        with headwise.watch(model, budget=INF) as monitor:
            model.layers[1].compile(backend="eager")
            torch.testing.assert_close(model(x_of()), plain)
            seen = monitor.snapshot()
    assert [layer.observed for layer in seen.layers] == [1, 0]
    assert seen.skipped == {"compiled": 1}


def test_export_and_trace_of_a_watched_model() -> None:
    model = ours().eval()
    plain = model(x_of())
    with headwise.watch(model, budget=INF) as monitor:
        exported = torch.export.export(model, (x_of(),))
        torch.testing.assert_close(exported.module()(x_of()), plain)
        model(x_of())
        assert errors(monitor) == {}
    assert_unhooked(model)


@pytest.mark.filterwarnings("ignore")  # torch says that jit is on its way out
def test_jit_trace_of_a_watched_model() -> None:
    model = torchs().eval()
    with torch.no_grad():
        plain = model(x_of())
        with headwise.watch(model, budget=INF) as monitor:
            traced = torch.jit.trace(model, (x_of(),))
            torch.testing.assert_close(traced(x_of()), plain)
            assert errors(monitor) == {}
            model(x_of())
            assert monitor.snapshot().observed >= 1


def test_function_transforms_of_a_watched_model() -> None:
    model = ours().eval()
    x = x_of()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (one,)).sum()

    expected = torch.func.vmap(lambda one: model(one[None])[0])(x)
    grads = torch.func.grad(loss)(parameters, x)
    with headwise.watch(model, budget=INF) as monitor:
        found = torch.func.vmap(lambda one: model(one[None])[0])(x)
        again = torch.func.grad(loss)(parameters, x)
        torch.func.functional_call(model, {name: 2 * p for name, p in parameters.items()}, (x,))
        model(x)
        seen = monitor.snapshot()
    assert torch.equal(found, expected)
    assert all(torch.equal(grads[name], again[name]) for name in grads)
    assert seen.errors == {}
    assert seen.observed == 2  # what runs under a transform is let be


def test_symbolic_trace_of_what_holds_a_watched_model() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(D, H, batch_first=True)
            self.head = nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x, x, x, need_weights=False)[0])

    holder = Holder().eval()
    plain = holder(x_of())
    with headwise.watch(holder, budget=INF) as monitor:
        traced = torch.fx.symbolic_trace(holder)
        torch.testing.assert_close(traced(x_of()), plain)
        assert errors(monitor) == {}


# --- Readings ---------------------------------------------------------------------------------------------------------


def test_readings_are_means_over_the_rows() -> None:
    model = ours().eval()
    with headwise.watch(model, budget=INF, rows=64) as monitor:
        model(x_of()[:1], PAD[1:2])
        seen = monitor.snapshot()
    _, calls = looked_at(model, lambda: model(x_of()[:1], PAD[1:2]))
    for layer, [one] in zip(seen.layers, calls, strict=True):
        assert (layer.name, layer.kind, layer.rows, layer.observed) == (one.name, "self", 7, 1)
        assert layer.live is not None
        torch.testing.assert_close(layer.live.mass, one.weights)
        assert layer.live.queries == tuple(range(7))
        for head, reading in enumerate(layer.heads):
            for name in set(STATISTICS) - {"max_logit", "sink"}:
                values = getattr(one.found, name)[0, head]
                assert getattr(reading, name) == pytest.approx(values.nanmean().item(), rel=1e-5)
            assert reading.max_logit == pytest.approx(one.found.max_logit[0, head].max().item(), rel=1e-5)
            assert reading.sink is None  # of 7 keys the first four are the most
        assert sum(layer.row_entropy.counts) == 2 * 7
        assert layer.row_entropy.total == pytest.approx(one.found.entropy_ratio.sum().item(), rel=1e-4)
        for histogram in (layer.queries, layer.keys):
            assert (sum(histogram.counts), histogram.total) == (1, 7.0)


def test_names_kinds_and_the_table() -> None:
    model = nn.Transformer(D, H, 1, 1, 32, batch_first=True).eval()
    with headwise.watch(model, budget=INF, name="mine") as monitor:
        assert "no forward yet" in str(monitor.snapshot())
        json.dumps(monitor.snapshot().as_dict(), allow_nan=False)
        model(x_of(), x_of()[:, :5])
        seen = monitor.snapshot()
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert [(layer.name, layer.kind) for layer in seen.layers] == list(
        zip(names, ["self", "self", "cross"], strict=True)
    )
    assert seen.layers[2].heads[0].distance is None
    assert seen.layers[2].distance_ratio is None
    assert seen.layers[0].heads[0].distance is not None
    text = str(seen)
    assert text.startswith("mine: 1 forward, 1 observed, observer ")
    assert len(text.splitlines()) == 2 + 3 * H
    for name in names:
        assert text.count(name) == H
    given = json.loads(json.dumps(seen.as_dict(), allow_nan=False))
    assert given["layers"][2]["kind"] == "cross"
    assert given["budget"] is None  # there is no infinity in JSON
    assert repr(monitor) == "<Monitor of mine: 3 attentions, budget inf>"


def test_real_queries_without_a_key_are_counted_and_padding_is_not() -> None:
    layer = headwise.MultiheadAttention(D, H, batch_first=True)
    blind = torch.zeros(L, L, dtype=torch.bool)
    blind[3] = True
    with headwise.watch(layer, budget=INF, rows=64) as monitor:
        layer(x_of(), x_of(), x_of(), key_padding_mask=PAD, need_weights=False)
        assert monitor.snapshot().layers[0].fully_masked == 0
        x = x_of()[:1]
        layer(x, x, x, key_padding_mask=PAD[1:2], attn_mask=blind, need_weights=False)
        seen = monitor.snapshot()
        assert (seen.layers[0].fully_masked, seen.layers[0].nonfinite) == (1, 0)
        assert ": 1 query of " in str(seen)
        layer(x, x, x, key_padding_mask=torch.ones(1, L, dtype=torch.bool), need_weights=False)
        assert monitor.snapshot().layers[0].fully_masked == 1 + L
        json.dumps(monitor.snapshot().as_dict(), allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
def test_rows_that_are_not_finite_are_counted(value: float, library: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = library(D, H, batch_first=True).eval(), x_of()[:1]
    with headwise.watch(layer, budget=INF, rows=64) as monitor:
        broken = x.clone()
        broken[0, 2, 0] = value
        pad = torch.zeros(1, L, dtype=torch.bool)
        layer(broken, x, x, key_padding_mask=pad, need_weights=False)
        assert monitor.snapshot().layers[0].nonfinite == 1
        layer(broken, broken, broken, key_padding_mask=pad, need_weights=False)
        seen = monitor.snapshot()
        assert seen.layers[0].nonfinite == 1 + L
        assert seen.layers[0].fully_masked == 0
        assert seen.errors == {}
        json.dumps(seen.as_dict(), allow_nan=False)
        assert "had a NaN or +inf score" in str(seen)


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
@pytest.mark.parametrize(("shape", "keys"), [((0, 4), 4), ((2, 0), 3), ((0, 0), 0)])
def test_empty_inputs(library: type[nn.Module], shape: tuple[int, int], keys: int) -> None:
    layer = library(D, H, batch_first=True)
    x, y = torch.randn(*shape, D), torch.randn(shape[0], keys, D)
    with headwise.watch(layer, budget=INF) as monitor:
        out = layer(x, y, y, need_weights=False)[0]
        seen = monitor.snapshot()
    assert out.shape == x.shape
    assert (seen.errors, seen.skipped, seen.observed) == ({}, {"empty": 1}, 0)


def test_no_keys() -> None:
    layer = headwise.MultiheadAttention(D, H, batch_first=True)
    with headwise.watch(layer, budget=INF) as monitor:
        layer(torch.randn(2, 3, D), torch.randn(2, 0, D), torch.randn(2, 0, D), need_weights=False)
        assert monitor.snapshot().skipped == {"empty": 1}
        assert errors(monitor) == {}


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_position_one_head_and_dtypes(heads: int, dtype: torch.dtype) -> None:
    layer = nn.MultiheadAttention(D, heads, batch_first=True, dtype=dtype)
    x = torch.randn(1, 1, D, dtype=dtype)
    with headwise.watch(layer, budget=INF) as monitor:
        layer(x, x, x)
        [reading] = monitor.snapshot().layers
    assert len(reading.heads) == heads
    assert reading.heads[0].entropy_ratio is None
    assert reading.heads[0].effective_keys == 1
    assert reading.heads[0].peak == 1
    assert reading.rows == 1


# --- Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torchs, ours])
def test_tokens_stand_at_their_positions(make: Callable[[], nn.Module]) -> None:
    """Padding on the left is left out of both."""
    model, asked = make().eval(), []
    lengths = [3, 5, 6]
    pad = torch.arange(L) < (L - torch.tensor(lengths))[:, None]

    def tokens(layer: str, sample: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        asked.append((layer, sample))
        return [f"{sample}:{at}" for at in range(lengths[sample])]

    with headwise.watch(model, budget=INF, rows=3, tokens=tokens, show_tokens=True) as monitor, torch.no_grad():
        for _ in range(12):
            model(x_of(), None, pad) if make is torchs else model(x_of(), pad, query_padding_mask=pad)
            for layer in monitor.snapshot().layers:
                live = layer.live
                assert live is not None
                assert (layer.name, live.sample) in asked[-2:]
                assert (live.num_queries, live.num_keys) == (lengths[live.sample],) * 2
                assert live.query_names == tuple(f"{live.sample}:{at}" for at in live.queries)
                assert live.key_names == tuple(f"{live.sample}:{at}" for at in range(live.num_keys))
    assert {sample for _, sample in asked} == {0, 1, 2}
    assert errors(monitor) == {}


def test_tokens_are_never_those_of_another_sample() -> None:
    """A layer that runs on another batch than the model's: nobody can say whose texts belong to it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (headwise.MultiheadAttention(D, H, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.one(x, x, x, need_weights=False)[0]] * 2)
            return self.two(x, x, x, need_weights=False)[0]

    model = Twice()
    with headwise.watch(model, budget=INF, tokens=lambda *_: ["t"] * L, show_tokens=True) as monitor:
        model(x_of())
    one, two = (layer.live for layer in monitor.snapshot().layers)
    assert one is not None
    assert two is not None
    assert one.key_names == ("t",) * L
    assert two.query_names == two.key_names == ()
    assert monitor.snapshot().skipped == {"tokens": 1}


def test_tokens_of_queries_and_keys() -> None:
    model, x = headwise.MultiheadAttention(D, H, batch_first=True), torch.randn(2, 4, D)
    words = (["q"] * 4, ["k"] * 5)
    with headwise.watch(model, budget=INF, tokens=lambda *_: words, show_tokens=True) as monitor:
        model(x, torch.randn(2, 5, D), torch.randn(2, 5, D))
    live = monitor.snapshot().layers[0].live
    assert live is not None
    assert (set(live.query_names), live.key_names) == ({"q"}, ("k",) * 5)


def test_tokens_are_not_asked_for_unless_they_may_be_shown() -> None:
    def tokens(*_: Any) -> list[str]:
        raise AssertionError

    model = ours()
    with headwise.watch(model, budget=INF, tokens=tokens) as monitor:
        model(x_of())
        live = monitor.snapshot().layers[0].live
    assert errors(monitor) == {}
    assert live is not None
    assert live.query_names == live.key_names == ()


def test_tokens_of_another_number_are_left_out() -> None:
    model = ours()
    with headwise.watch(model, budget=INF, tokens=lambda *_: ["a"], show_tokens=True) as monitor:
        model(x_of())
        live = monitor.snapshot().layers[0].live
    assert live is not None
    assert live.query_names == live.key_names == ()


# --- Which layers, and when -------------------------------------------------------------------------------------------


class Ticks:
    """A clock that stands still but for what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(observing.time, "perf_counter", lambda: self.now)


def test_all_layers_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks(monkeypatch)
    original = looking.begin_look

    def look(*args: Any, **words: Any) -> Any:
        clock.now += 0.0003
        return original(*args, **words)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(headwise.MultiheadAttention(D, H, batch_first=True) for _ in range(5))

        def forward(self, x: Tensor, skip: int = -1) -> Tensor:
            clock.now += 0.001
            for at, layer in enumerate(self.layers):
                if at != skip:
                    x = layer(x, x, x, need_weights=False)[0]
            return x

    monkeypatch.setattr(looking, "begin_look", look)
    model = Slow()
    with headwise.watch(model, budget=0.05) as monitor:
        for _ in range(300):
            model(x_of())
        seen = monitor.snapshot()
        assert seen.overhead is not None
        assert seen.overhead <= 0.05 + 0.0004 / seen.forward_seconds
        looks = [layer.observed for layer in seen.layers]
        assert max(looks) - min(looks) <= 1
        assert min(looks) >= 5
        assert seen.interval == pytest.approx(300 / seen.observed, rel=0.5)
        assert sum(seen.observer_duration.counts) == seen.observed
    with headwise.watch(model, budget=0.05) as monitor:  # one that is never called is not waited for
        for _ in range(300):
            model(x_of(), 2)
        looks = [layer.observed for layer in monitor.snapshot().layers]
        assert looks[2] == 0
        assert min(looks[:2] + looks[3:]) >= 5


def test_without_a_limit_all_layers_are_looked_at_each_time() -> None:
    model = ours()
    with headwise.watch(model, budget=INF, rows=5) as monitor:
        for _ in range(4):
            model(x_of())
        seen = monitor.snapshot()
    assert [(layer.observed, layer.rows) for layer in seen.layers] == [(4, 20)] * 2
    assert seen.interval == 1


def test_a_tiny_model_is_seen_too() -> None:
    """Though the hooks alone take more than its share."""
    layer = headwise.MultiheadAttention(D, H, batch_first=True)
    with headwise.watch(layer, budget=0.01) as monitor, torch.no_grad():
        x = torch.randn(1, 4, D)
        for _ in range(20_000):
            layer(x, x, x, need_weights=False)
            if monitor.snapshot().observed:
                break
        assert monitor.snapshot().observed


def test_a_small_budget_looks_rarely() -> None:
    model = ours()
    with headwise.watch(model, budget=1e-9) as monitor:
        for _ in range(30):
            model(x_of())
        assert monitor.snapshot().observed <= 6  # each layer once, a look in three steps at most
        assert monitor.budget == 1e-9


# --- Models of others -------------------------------------------------------------------------------------------------


def test_a_subclass_of_torchs_layer_that_takes_something_else_is_said() -> None:
    class OfOne(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x, need_weights=False)[0]

    model = nn.Sequential(OfOne(D, H, batch_first=True), OfOne(D, H, batch_first=True))
    plain = model(x_of())
    with headwise.watch(model, budget=INF) as monitor:
        assert torch.equal(model(x_of()), plain)
        seen = monitor.snapshot()
    assert (seen.skipped, seen.errors, seen.observed) == ({"unsupported": 2}, {}, 0)


def test_a_layer_called_twice_counts_once_a_pass() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, H, batch_first=True)
            self.shared = self.attention

        def forward(self, x: Tensor) -> dict[str, Any]:
            for layer in (self.attention, self.shared):
                x = layer(x, x, x, need_weights=False)[0]
            return {"out": x, "more": [x]}

    model = Twice()
    with headwise.watch(model, budget=INF, rows=4) as monitor:
        model(x=x_of())
        [layer] = monitor.snapshot().layers
    assert (layer.name, layer.observed, layer.rows) == ("attention", 1, 8)
    assert sum(layer.queries.counts) == 2


def test_a_layer_that_was_replaced_is_said_and_the_new_one_is_not_touched() -> None:
    model = torchs().eval()
    with headwise.watch(model, budget=INF) as monitor, torch.no_grad():
        model(x_of())
        model.layers[0] = copy.deepcopy(model.layers[0])
        model(x_of())
        seen = monitor.snapshot()
    assert [layer.observed for layer in seen.layers] == [1, 2]
    assert seen.skipped == {"replaced": 1}
    assert_unhooked(model)


def test_forwards_that_others_put_on_layers_are_kept() -> None:
    model, calls = ours().eval(), []
    layer = model.layers[0].self_attn
    original = layer.forward

    def forward(*args: Any, **words: Any) -> Any:
        calls.append(1)
        return original(*args, **words)

    layer.forward = forward
    with headwise.watch(model, budget=INF) as monitor:
        model(x_of())
        assert layer.__dict__["forward"] is forward
        assert [one.observed for one in monitor.snapshot().layers] == [1, 1]
    assert layer.__dict__["forward"] is forward
    assert calls == [1]


def test_threads_are_all_seen() -> None:
    model = ours()
    with headwise.watch(model, budget=INF) as monitor:
        workers = [threading.Thread(target=lambda: [model(x_of()) for _ in range(5)]) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seen = monitor.snapshot()
    assert (seen.forwards, seen.observed, seen.skipped, seen.errors) == (20, 20, {}, {})
    assert_clean(model)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_interrupt_outside_of_attention_stops_nobody(error: type[BaseException]) -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.stop = ours(), True

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(x)
            if self.stop:
                raise error
            return x

    model, other = Stops(), ours()
    with headwise.watch(model, budget=INF) as monitor:
        with contextlib.suppress(error):
            model(x_of())
        assert len(inspect(other, x_of()).calls) == 2
        with headwise.watch(other, budget=INF) as second:
            other(x_of())
            assert second.snapshot().observed == 1
        model.stop = False
        model(x_of())
        assert monitor.snapshot().observed == 1
        assert_clean(model)
    assert_unhooked(model)


def test_an_inner_function_that_is_compiled_stays_whole() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = ours().eval()
            self.run = torch.compile(lambda x: self.block(x), backend="eager", fullgraph=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    model, x = Inner(), x_of()
    plain = model(x)
    with headwise.watch(model, budget=INF) as monitor, torch.no_grad():
        for _ in range(4):
            assert same(model(x), plain)
        assert monitor.snapshot().skipped["compiled"] >= 2
        assert errors(monitor) == {}


def test_a_forward_that_is_compiled_is_refused() -> None:
    model = ours()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="must not be compiled"):
        headwise.watch(model)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_watched_on() -> None:
    model = ours()
    with headwise.watch(model, budget=INF) as monitor:
        model(x_of())
        with monitor._record.lock:  # as another thread's scrape may hold it at that moment
            child = os.fork()
            if not child:
                model(x_of())
                os._exit(0 if monitor.snapshot().observed == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_mode_of_the_callers_does_not_see_the_observer() -> None:
    model = ours()
    with FlopCounterMode(display=False) as plain:
        model(x_of())
    with headwise.watch(model, budget=INF) as monitor, FlopCounterMode(display=False) as watched:
        model(x_of())
    assert watched.get_total_flops() == plain.get_total_flops()
    assert monitor.snapshot().skipped == {"unsupported": 1}


def test_heads_may_come_and_go() -> None:
    model = nn.MultiheadAttention(D, H, batch_first=True)
    with headwise.watch(model, budget=INF) as monitor:
        model(x_of(), x_of(), x_of())
        model.num_heads, model.head_dim = H // 2, 2 * D // H
        model(x_of(), x_of(), x_of())
        assert len(monitor.snapshot().layers[0].heads) == H // 2


def test_close_lets_the_model_go() -> None:
    model = ours()
    gone = weakref.ref(model)
    monitor = headwise.watch(model, budget=INF)
    model(x_of())
    monitor.close()
    del model
    gc.collect()
    assert gone() is None
    assert monitor.snapshot().layers[0].name == "layers.0.self_attn"


def test_every_layer_is_seen_soon_whatever_the_budget() -> None:
    model = headwise.Encoder([headwise.EncoderBlock(D, H) for _ in range(6)])
    with headwise.watch(model, budget=1e-6) as monitor:
        for _ in range(60):
            model(x_of())
    assert all(layer.observed for layer in monitor.snapshot().layers)


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda layers: nn.ModuleDict({"a": layers[0]})], ids=["list", "dict"])
def test_what_is_not_called_is_refused(kind: Callable[[list[nn.Module]], nn.Module]) -> None:
    with pytest.raises(ValueError, match="must be what is called"):
        headwise.watch(kind([nn.MultiheadAttention(D, H)]))
