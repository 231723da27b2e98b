"""What watching costs: a watched model beside its copy that nobody watches, forward by forward.

CPU time of one thread, the observer's own included, so that other processes of the machine do not count.

Letters: B batch, L length, D model width, H heads.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import headwise

BUDGET = 0.01
MOST_OVERHEAD = 0.013  # the observer's CPU time over the forwards'
MOST_TIMES, MOST_MORE = 1.25, 0.0005  # an observed forward over an unobserved one, or so many seconds more
SIZES = {"small": (8, 32, 64, 4, 2), "middle": (4, 128, 256, 8, 2), "large": (2, 256, 512, 8, 2)}  # B, L, D, H, layers


@dataclass(frozen=True)
class Watched:
    """What was measured, in seconds of CPU time.

    Attributes:
        name: of the model.
        forwards: how many.
        observed: of them.
        overhead: the observer's time over the forwards'.
        median: of a forward without a watcher.
        p99: likewise.
        watched_p99: with one.
        observed_median: of the forwards that were observed.
        observed_p99: likewise.
    """

    name: str
    forwards: int
    observed: int
    overhead: float
    median: float
    p99: float
    watched_p99: float
    observed_median: float
    observed_p99: float

    @property
    def missed(self) -> list[str]:
        """What is beyond what the project promises."""
        most = max(MOST_TIMES * self.median, self.median + MOST_MORE)
        found = []
        if self.overhead > MOST_OVERHEAD:
            found.append(f"{self.name}: overhead {self.overhead:.2%}, at most {MOST_OVERHEAD:.1%}")
        if self.observed_median > most:
            seen = 1000 * self.observed_median
            found.append(f"{self.name}: an observed forward {seen:.2f} ms, at most {1000 * most:.2f}")
        return found


def encoder(library: Any, size: tuple[int, int, int, int, int]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A stack of torch's or of our layers in eval, with a padded batch."""
    B, L, D, H, layers = size
    layer = library.TransformerEncoderLayer(D, H, 4 * D, batch_first=True)
    model = library.TransformerEncoder(layer, layers).eval()
    padding = torch.arange(L) >= torch.linspace(L // 2, L, B)[:, None]
    return model, torch.randn(B, L, D), padding


def compare(
    name: str, library: Any, size: tuple[int, int, int, int, int], forwards: int, budget: float = BUDGET
) -> Watched:
    """Run both models in turns."""
    model, x, padding = encoder(library, size)
    bare = copy.deepcopy(model)
    seconds: dict[str, list[float]] = {"bare": [], "watched": [], "observed": []}
    with torch.inference_mode(), mock.patch("headwise.observe.observer.time.perf_counter", time.process_time):
        expected = bare(x, src_key_padding_mask=padding)
        model(x, src_key_padding_mask=padding)
        with headwise.watch(model, budget=budget) as monitor:
            before = 0
            for _ in range(forwards):
                began = time.process_time()
                bare(x, src_key_padding_mask=padding)
                between = time.process_time()
                out = model(x, src_key_padding_mask=padding)
                ended = time.process_time()
                assert torch.equal(out, expected)
                seconds["bare"].append(between - began)
                seconds["watched"].append(ended - between)
                now = monitor.snapshot().observed
                if now > before:
                    seconds["observed"].append(ended - between)
                before = now
    seen = monitor.snapshot()
    return Watched(
        name,
        seen.forwards,
        seen.observed,
        seen.overhead or 0.0,
        statistics.median(seconds["bare"]),
        _p99(seconds["bare"]),
        _p99(seconds["watched"]),
        statistics.median(seconds["observed"]),
        _p99(seconds["observed"]),
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def table(forwards: int = 1000) -> Iterator[Watched]:
    """Three sizes, torch's layers and ours, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size, shape in SIZES.items():
            for library, who in ((nn, "torch"), (headwise, "headwise")):
                yield compare(f"{size} {shape}, {who}'s layers", library, shape, forwards)
    finally:
        torch.set_num_threads(threads)
