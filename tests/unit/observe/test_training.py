"""Attention in a training's log, and the warning that comes before the loss explodes."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import Any

import numpy
import pytest
import torch
from tests.unit.observe.looking import INF
from tests.unit.observe.readings import layer, snapshot
from torch import Tensor, nn

import headwise
from headwise.observe.training import AttentionLog, scalars

D, H, L = 16, 2, 12


def model() -> headwise.Encoder:
    torch.manual_seed(0)
    return headwise.Encoder([headwise.EncoderBlock(D, H) for _ in range(2)])


class Copier(nn.Module):
    """Says which symbol stood at the beginning, at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(8, 32), nn.Parameter(torch.randn(L, 32) * 0.1)
        self.encoder = headwise.Encoder([headwise.EncoderBlock(32, 4) for _ in range(2)], nn.LayerNorm(32))
        self.head = nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.symbols(ids) + self.places))


def train(rate: float, growth: float, steps: int) -> tuple[list[float], list[str], list[int]]:
    """Losses, and the sentences with their steps. The learning rate is multiplied by `growth` each time."""
    torch.manual_seed(0)
    learner = Copier()
    optimizer = torch.optim.Adam(learner.parameters(), lr=rate)
    losses, said, at = [], [], []
    with headwise.watch(learner, budget=INF) as monitor:
        log = AttentionLog(monitor, every=1, warn=said.append)
        for step in range(1, steps + 1):
            ids = torch.randint(0, 8, (16, L))
            scores = learner(ids)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, :1].expand(-1, L).flatten())
            log(step)
            at += [step] * (len(said) - len(at))
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= growth
    return losses, said, at


def explodes_at(losses: list[float]) -> int | None:
    bad = [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss) or loss > 10 * losses[0]]
    return bad[0] if bad else None


def test_it_warns_before_the_loss_explodes() -> None:
    """A learning rate that starts too high and grows to far too high."""
    losses, said, at = train(0.01, 1.05, 130)
    exploded = explodes_at(losses)
    assert exploded is not None
    assert said
    assert at[0] < exploded - 20
    assert "encoder.layers." in said[0]
    assert "the loss may follow" in said[0]


def test_a_healthy_training_is_not_warned_of() -> None:
    losses, said, _ = train(0.003, 1.0, 130)
    assert losses[-1] < 0.5 * losses[0]
    assert said == []


def test_scalars() -> None:
    watched = model()
    with headwise.watch(watched, budget=INF) as monitor:
        assert scalars(monitor.snapshot().layers) == {}
        watched(torch.randn(2, 5, D))
        layers = monitor.snapshot().layers
        found = scalars(layers)
    ratios = [head.entropy_ratio for head in layers[1].heads]
    assert found["attention/layers.1.self_attn/entropy_ratio"] == pytest.approx(sum(ratios) / H)
    assert found["attention/layers.1.self_attn/entropy_ratio_min"] == min(ratios)
    assert found["attention/layers.1.self_attn/max_logit"] == max(head.max_logit for head in layers[1].heads)
    assert len(found) == 6


def test_it_logs_every_so_many_steps() -> None:
    watched, logged = model(), []
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, lambda numbers, step: logged.append((step, numbers)), every=3)
        for step in range(1, 8):
            watched(torch.randn(2, 5, D))
            given = log(step)
            assert bool(given) == (step % 3 == 0)
    assert [step for step, _ in logged] == [3, 6]
    assert logged[-1][1].keys() == scalars(monitor.snapshot().layers).keys()


def scaled(watched: headwise.Encoder, factor: float) -> None:
    with torch.no_grad():
        for name, parameter in watched.layers[1].self_attn.named_parameters():
            if name.startswith("q_proj"):
                parameter.mul_(factor)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (5000.0, r"step 40, layers.1.self_attn: head \d has a logit of .*, above 100; the loss may follow"),
        (60.0, r"step 40, layers.1.self_attn: the logits of head \d grew from .* to .*; the loss may follow"),
        (1.5, None),
    ],
)
def test_what_it_warns_of_once(factor: float, said: str | None) -> None:
    watched, sentences = model(), []
    x = torch.randn(4, L, D)
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, every=1, warn=sentences.append, memory=5)
        for step in range(1, 60):
            if step == 40:
                scaled(watched, factor)
            watched(x)
            log(step)
    if said is None:
        assert sentences == []
    else:
        assert len(sentences) == 1
        assert re.fullmatch(said, sentences[0])


def test_rows_that_are_not_finite_are_warned_of() -> None:
    watched, sentences = model(), []
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, every=1, warn=sentences.append)
        watched(torch.full((1, L, D), math.nan))
        log(1)
        log(2)
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "step 1, layers.0.self_attn",
        "step 1, layers.1.self_attn",
    ]
    assert all("12 queries had a NaN or +inf score" in sentence for sentence in sentences)
    assert not any("may follow" in sentence for sentence in sentences)


def test_rows_that_are_not_finite_are_logged() -> None:
    watched, logged = model(), []
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, lambda numbers, step: logged.append(numbers), every=1, warn=str)
        for step in range(2):
            watched(torch.full((1, L, D), math.nan))
            log(step)
    assert logged == [{f"attention/layers.{layer}.self_attn/nonfinite": rows for layer in (0, 1)} for rows in (12, 24)]


def test_an_old_number_is_not_logged_again() -> None:
    watched, logged = model(), []
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, lambda numbers, step: logged.append(len(numbers)), every=1)
        assert log(0) == {}
        watched(torch.randn(2, L, D))
        assert len(log(1)) == 6
        assert log(2) == {}
        watched.layers[1](torch.randn(2, L, D))  # not the model itself: nothing is looked at
        assert log(3) == {}
        watched(torch.randn(2, L, D))
        assert len(log(4)) == 6
    assert logged == [0, 6, 0, 0, 6]


def test_of_some_layers_the_new_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(0), layer(1)]
    with headwise.watch(model()) as monitor:
        monkeypatch.setattr(monitor, "snapshot", lambda: snapshot(*layers))
        log = AttentionLog(monitor, every=1)
        assert len(log(0)) == 6
        layers[1] = dataclasses.replace(layers[1], at=2_000_000.0)
        assert {name.split("/")[1] for name in log(1)} == {"layers.1.self_attn"}


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, torch.tensor(1.0), numpy.arange(2)])
def test_no_step(step: object) -> None:
    with (
        headwise.watch(model()) as monitor,
        pytest.raises(ValueError, match=r"AttentionLog: step must be an int of at"),
    ):
        AttentionLog(monitor)(step)


def test_steps_of_numpy() -> None:
    watched, logged = model(), []
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, lambda numbers, step: logged.append(step), every=numpy.int64(2))
        for step in numpy.arange(4):
            watched(torch.randn(2, L, D))
            log(step)
    assert logged == [0, 2]
    assert all(type(step) is int for step in logged)


@pytest.mark.parametrize("monitor", [None, "x", nn.Linear(1, 1), snapshot(layer(0))])
def test_no_monitor(monitor: object) -> None:
    with pytest.raises(ValueError, match=r"AttentionLog: monitor must be a Monitor, .*; got "):
        AttentionLog(monitor)


def test_it_warns_as_python_does_unless_told_otherwise() -> None:
    watched = model()
    scaled(watched, 1e5)
    with headwise.watch(watched, budget=INF) as monitor:
        log = AttentionLog(monitor, every=1)
        watched(torch.randn(2, L, D))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            log(1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "above 100" in str(caught[0].message)


@pytest.mark.parametrize(
    "words",
    [
        {"log": 3},
        {"log": "x"},
        {"warn": 3},
        {"every": numpy.ones(2)},
        {"every": 0},
        {"every": 1.5},
        {"memory": 0},
        {"logit": 0},
        {"logit": "x"},
        {"growth": -1},
        {"growth": True},
    ],
)
def test_wrong_arguments_are_refused(words: dict[str, Any]) -> None:
    with headwise.watch(model()) as monitor, pytest.raises(ValueError, match=f"AttentionLog: {next(iter(words))} must"):
        AttentionLog(monitor, **words)
