"""What may be looked at, in numbers without a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from headwise.observe.budget import MOST_SECONDS, MOST_SHARE, Budget

SIZE = 1000


@dataclass
class Run:
    """A budget driven as a monitor drives it: forwards of so many seconds, looks of so many each."""

    budget: Budget
    forwards: float = 0.0
    looks: float = 0.0
    most: float = 0.0  # of one pass
    passes: int = 0
    observed: int = 0

    def forward(self, seconds: float, layers: int, look: float, scores: float = 0.0, size: int = SIZE) -> float:
        """One; gives what looking took in it."""
        spent, late = 0.0, False
        if self.budget.may_look:
            for at in range(layers):
                room = self.budget.allowance(size, seconds * at / layers) - spent
                if self.budget.forecast(scores) > room:
                    late = True
                    continue
                spent += look
                self.budget.learn(scores, look)
            if late and not spent:
                self.budget.forget()
        self.budget.earn(seconds, size)
        self.budget.spend(spent)
        self.forwards, self.looks, self.most = self.forwards + seconds, self.looks + spent, max(self.most, spent)
        self.passes, self.observed = self.passes + 1, self.observed + bool(spent)
        return spent


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 0.02, 1.0])
@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize("look", [1e-4, 3e-4, 2e-3])
def test_the_share_holds(share: float, seconds: float, layers: int, look: float) -> None:
    """Never more than it but by the last pass, and by what was allowed at the beginning."""
    run = Run(Budget(share))
    for _ in range(3000):
        run.forward(seconds, layers, look)
        assert run.looks <= share * run.forwards + run.most + 1e-12
    assert run.observed


@pytest.mark.parametrize("seconds", [1e-3, 0.02, 1.0])
def test_the_share_is_used(seconds: float) -> None:
    run = Run(Budget(0.01))
    for _ in range(5000):
        run.forward(seconds, 4, 2e-4)
    assert run.looks > 0.6 * 0.01 * run.forwards or run.observed == run.passes


@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 0.02, 1.0])
def test_no_pass_gets_much_longer(seconds: float) -> None:
    """From the second look on: the first of a kind is a guess."""
    run = Run(Budget(0.01))
    for at in range(2000):
        spent = run.forward(seconds, 12, 2.5e-4)
        if at > 10:
            assert spent <= max(MOST_SHARE * seconds, MOST_SECONDS) + 2.5e-4
            assert spent <= max(0.25 * seconds, 5e-4)


def test_sizes_have_their_own_time() -> None:
    budget = Budget(0.01)
    budget.earn(1.0, 2**20)
    budget.earn(0.001, 2**4)
    assert budget.allowance(2**20) == pytest.approx(MOST_SHARE)
    assert budget.allowance(2**4) == MOST_SECONDS
    assert budget.allowance(2**12) == MOST_SECONDS  # not seen yet
    assert budget.allowance(2**12, elapsed=2.0) == pytest.approx(2 * MOST_SHARE)  # but it runs for long already


def test_mixed_sizes_keep_the_share() -> None:
    run = Run(Budget(0.01))
    for at in range(3000):
        long = at % 10 == 0
        run.forward(0.5 if long else 0.001, 6, 4e-3 if long else 2e-4, 1e6 if long else 1e3, 2**20 if long else 2**8)
    assert 0.5 * 0.01 * run.forwards < run.looks <= 0.01 * run.forwards + run.most


def test_a_forecast_that_was_too_high_is_forgotten() -> None:
    """One look in a busy moment must not be the last one."""
    budget = Budget(0.01)
    run = Run(budget)
    for _ in range(20):
        budget.learn(1e3, 10.0)
    assert budget.forecast(1e3) > budget.allowance(SIZE)
    for _ in range(20_000):
        run.forward(0.001, 2, 2e-4, 1e3)
    assert run.observed > 10
    assert budget.forecast(1e3) < 4e-4


def test_a_single_slow_look_moves_the_forecast_by_little() -> None:
    budget = Budget(0.01)
    for _ in range(100):
        budget.learn(1e3, 3e-4)
    before = budget.forecast(1e3)
    budget.learn(1e3, 1.0)
    assert budget.forecast(1e3) <= 2 * before


def test_forecasts_learn() -> None:
    budget = Budget(0.01)
    for _ in range(200):
        budget.learn(1e5, 5e-3)
    assert budget.forecast(1e5) == pytest.approx(5e-3, rel=0.05)


def test_a_quiet_hour_is_not_saved_up() -> None:
    """A long forward, or many, earn two passes' worth at most."""
    budget = Budget(0.01)
    for _ in range(1000):
        budget.earn(0.1, SIZE)
    assert budget.credit <= 2 * budget.allowance(SIZE)
    passes = 0
    while budget.may_look:
        budget.spend(budget.allowance(SIZE))
        passes += 1
    assert passes <= 3


def test_no_limit() -> None:
    run = Run(Budget(math.inf))
    for _ in range(10):
        assert run.forward(1e-3, 5, 1.0) == 5.0
    assert run.budget.allowance(0) == math.inf
    assert run.budget.may_look


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_forwards_that_take_no_time(seconds: float) -> None:
    run = Run(Budget(0.01))
    for _ in range(100):
        run.forward(seconds, 2, 1e-4)
    assert run.observed <= 2


@pytest.mark.parametrize("around", [1e-6, 1e-5, 1e-4])
def test_what_is_spent_around_every_forward_counts_but_never_takes_all(around: float) -> None:
    budget, looks, forwards, seconds = Budget(0.01), 0.0, 20_000, 1e-4
    for _ in range(forwards):
        look = 3e-4 if budget.may_look else 0.0
        looks += look
        budget.earn(seconds, SIZE, 0.0 if look else around)
        budget.spend(look)
    earned = 0.01 * seconds * forwards
    expected = max(earned - around * forwards, 0.2 * earned)
    assert expected - 3e-4 <= looks <= 1.02 * expected + 3e-4


def test_forgetting_counts_forwards_not_tries() -> None:
    often, rarely = Budget(0.01, factor=100.0), Budget(0.01, factor=100.0)
    for _ in range(50):
        often.forget()
    rarely.forget(50)
    assert often.factor == pytest.approx(rarely.factor)
    assert often.factor < 100
