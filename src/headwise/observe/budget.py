"""How much a monitor may look at in a forward pass: a share of the model's time, and no pass gets much longer.

Every forward earns a share of its own time, and looking spends it. So the share holds whatever a forward costs and
however sizes change, without an interval to choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_SHARE = 0.18  # of an unobserved forward, in one observed: 1.25 times is promised, and a forecast may be off
MOST_SECONDS = 0.0003  # likewise, where that is more: 0.5 ms is promised
_SAVED = 2.0  # so many passes' worth may be saved up, and no more, or a quiet hour would end in a burst
_NEWEST = 0.1  # its weight in a mean
_FOR_LOOKS = 0.2  # of what is earned, at least
_FORGETS = 0.998  # of a forecast that was too high to look at all, in each forward


@dataclass
class Budget:
    """Earns and spends, in seconds.

    Attributes:
        share: of the forwards' time that looking may take; inf: there is no limit.
        credit: earned and not spent; negative after a pass that was looked at.
        forwards: seconds of a forward without looks, by the power of 2 of its input's size; a mean of late ones.
        factor: how long looks took over how long was forecast; a mean of late ones.
        fixed: seconds of a look at nothing, before the first was measured.
        per_score: seconds for each score more.
    """

    share: float
    credit: float = 0.0
    forwards: dict[int, float] = field(default_factory=dict)
    factor: float = 1.0
    fixed: float = 0.0003
    per_score: float = 1e-8

    @property
    def may_look(self) -> bool:
        """Whether there is something to spend; what one pass spends too much, the next ones wait for."""
        return self.credit >= 0

    def allowance(self, size: int, elapsed: float = 0.0) -> float:
        """Seconds that looks may take in a forward of an input of so many numbers, which runs for `elapsed` already."""
        seconds = max(self.forwards.get(size.bit_length(), 0.0), elapsed)
        return math.inf if math.isinf(self.share) else max(max(MOST_SHARE, self.share) * seconds, MOST_SECONDS)

    def forecast(self, scores: float) -> float:
        """Seconds of a look at so many scores."""
        return self.factor * (self.fixed + self.per_score * scores)

    def earn(self, seconds: float, size: int, around: float = 0.0) -> None:
        """After a forward took so long, looks not counted, on an input of so many numbers.

        `around` is what was spent where nothing was looked at. It counts, but never takes all: of a model that is
        hardly slower than the hooks around it, something is seen now and then.
        """
        power = size.bit_length()
        before = self.forwards.get(power)
        self.forwards[power] = seconds if before is None else before + _NEWEST * (seconds - before)
        if self.share == math.inf:
            return
        earned = self.share * seconds
        credit = self.credit + max(earned - around, _FOR_LOOKS * earned)
        if credit > 0:  # there is a most to it; but what a longer forward earned stays
            credit = min(credit, max(self.credit, _SAVED * self.allowance(size)))
        self.credit = credit

    def spend(self, seconds: float) -> None:
        """After looks took so long."""
        if math.isfinite(self.share):
            self.credit -= seconds

    def learn(self, scores: float, seconds: float) -> None:
        """After a look at so many scores took so long."""
        ratio = min(seconds / (self.fixed + self.per_score * scores), 4 * self.factor)  # a busy moment is no rule
        self.factor += (3 * _NEWEST if ratio > self.factor else _NEWEST) * (ratio - self.factor)

    def forget(self, forwards: int = 1) -> None:
        """After so many forwards, in the last of which looking was due and forecast to be too slow.

        A forecast must not last for ever.
        """
        self.factor *= _FORGETS**forwards
