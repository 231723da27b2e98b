"""How calls are timed beside each other, what they hold in memory, and when two of them count as the same.

A row is measured in rounds; in a round every call of the row runs once, in an order drawn anew, so that whatever else
the machine does meets all of them. A ratio is the median over rounds of the other's time over headwise's: above 1,
headwise is faster.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.pipelines.bench import processor

Call = Callable[[], Any]  # gives a tensor, or several: what has to agree
Clock = Callable[[Call, int], float]  # seconds a call, over so many of them
LONG = 0.03  # seconds from which a call is timed without one before it: caches are a small part of it


@dataclass
class Case:
    """One row: `theirs` are the baseline's ways to make the call, of which the fastest counts.

    Attributes:
        name: in the table.
        ours: headwise's call.
        theirs: the baseline's. A string instead of a call says why there is none.
        flops: of the call, or 0 where its share of what the machine can do is not asked for.
        floor: the least ratio that is promised.
        share: the least share that is promised: FLOPs a second, over those of a large matrix product.
        padding: (B, L), where outputs are not compared: torch's differ from one mode to the other there.
        peers: others that compute the same. A name before a colon is the peer, what follows one of its ways.
        same: how the calls are compared where they draw numbers; None: their outputs have to be equal.
    """

    name: str
    ours: Call
    theirs: dict[str, Call | str]
    flops: float
    floor: float | None = None
    share: float | None = None
    padding: Tensor | None = None
    peers: dict[str, Call | str] = field(default_factory=dict)
    same: Callable[[], None] | None = None

    def calls(self) -> dict[str, Call]:
        """All that can be called, headwise's first."""
        others = {**self.theirs, **self.peers}
        return {"headwise": self.ours} | {name: call for name, call in others.items() if not isinstance(call, str)}


@dataclass
class Row:
    """A measured case; `peers` holds a cell for each: the ratio and its way, or why there is none."""

    name: str
    ratio: float
    low: float
    high: float
    best: str
    share: float
    floor: float | None
    least_share: float | None
    peers: dict[str, str]

    def below(self, group: str) -> list[str]:
        """A line for what is below its floor; a ratio that could not be taken is."""
        lines = []
        if self.floor is not None and not self.ratio >= self.floor:
            lines.append(f"{group} {self.name}: {self.ratio:.2f} ({self.best}), floor {self.floor}")
        if self.least_share is not None and self.share < self.least_share:
            lines.append(f"{group} {self.name}: {self.share:.2f} of a matrix product's speed, floor {self.least_share}")
        return lines


def wall(call: Call, repeats: int) -> float:
    """Seconds of a call on the CPU."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def events(call: Call, repeats: int) -> float:
    """Seconds of a call on a CUDA device, by its own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def times(calls: dict[str, Call], *, rounds: int, repeats: int, clock: Clock = wall) -> dict[str, list[float]]:
    """Seconds of each call in each round."""
    last = {name: clock(call, 1) for name, call in calls.items()}
    for name in [name for name in calls if last[name] < LONG]:
        last[name] = min(clock(calls[name], 1) for _ in range(2))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                if last[name] < LONG:
                    calls[name]()  # its weights and code are in the caches, as in a loop of its own
                last[name] = clock(calls[name], repeats)
                seconds[name].append(last[name])
    finally:
        gc.enable()
    return seconds


class Product:
    """A matrix product of that size cubed, which is the most that a machine does with floats."""

    def __init__(self, size: int = 2048, **factory: Any) -> None:
        self.sides = torch.randn(2, size, size, **factory).unbind(0)
        self.flops = 2.0 * size**3

    def __call__(self) -> Tensor:
        """The product."""
        return self.sides[0] @ self.sides[1]


def measure(case: Case, *, rounds: int, repeats: int, product: Product | None = None, clock: Clock = wall) -> Row:
    """Times of all calls of a case, as ratios; first they have to agree. `product` beside them tells a share."""
    (case.same or (lambda: agree(case)))()
    calls = case.calls()
    if product is not None and case.flops:
        calls["product"] = product
    seconds = times(calls, rounds=rounds, repeats=repeats, clock=clock)
    ours = seconds["headwise"]

    def ratios(name: str) -> list[float]:
        return sorted(theirs / own for theirs, own in zip(seconds[name], ours, strict=True))

    def fastest(names: list[str]) -> str:
        return min(names, key=lambda name: statistics.median(seconds[name]))

    peers = {}
    for peer in dict.fromkeys(name.partition(":")[0] for name in case.peers):
        ways = [name for name in case.peers if name.partition(":")[0] == peer]
        if run := [name for name in ways if name in seconds]:
            best = fastest(run)
            way = best.partition(":")[2].strip()
            peers[peer] = f"{statistics.median(ratios(best)):.2f}" + (f" ({way})" if way else "")
        else:
            peers[peer] = str(case.peers[ways[0]])
    share = case.flops / product.flops * statistics.median(ratios("product")) if "product" in seconds else 0.0
    run = [name for name in case.theirs if name in seconds]
    best = fastest(run) if run else ", ".join(map(str, case.theirs.values()))
    found = ratios(best) if run else [math.nan]
    low, high = found[len(found) // 4], found[-1 - len(found) // 4]
    return Row(case.name, statistics.median(found), low, high, best, share, case.floor, case.share, peers)


def parts(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    if isinstance(output, Tensor):
        return [output]
    return [] if output is None else [part for whole in output for part in parts(whole)]


def comparable(case: Case, call: Call, like: list[Tensor] | None = None) -> list[Tensor]:
    """What a call gives, without what is not compared: of nested tensors the padded form, of padding zeros."""
    found = parts(call())
    if like is not None:
        found = [
            part.to_padded_tensor(0.0, other.shape) if part.is_nested else part
            for part, other in zip(found, like, strict=True)
        ]
    if case.padding is not None:
        found[0] = found[0].masked_fill(case.padding[..., None], 0)
    return found


def agree(case: Case) -> None:
    """Whatever is compared gives the same output first, and the same gradients where there are some."""
    ours = comparable(case, case.ours)
    others = {name: call for name, call in case.calls().items() if name != "headwise"}  # a training step goes on
    for name, call in others.items():
        for index, (own, other) in enumerate(zip(ours, comparable(case, call, ours), strict=True)):
            close = 1e-5 * max(1.0, float(other.abs().max()))

            def text(problem: str, name: str = name, index: int = index) -> str:
                return f"{case.name}, {name}, {'the output' if index == 0 else f'gradient {index}'}: {problem}"

            torch.testing.assert_close(own, other, rtol=1e-4, atol=close, msg=text)


def agree_in_low_precision(case: Case, exact: Case) -> None:
    """In a 16-bit dtype: within the error of the baseline's call from the same call in float64, doubled, and a floor.

    Others may be off twice as far before they count as computing something else.
    """
    others = [call for call in (*exact.theirs.values(), *exact.peers.values()) if not isinstance(call, str)]
    truth = comparable(exact, others[0] if others else exact.ours)

    def errors(call: Call) -> list[float]:
        return [
            float((part.double() - true).abs().max())
            for part, true in zip(comparable(case, call, truth), truth, strict=True)
        ]

    calls = case.calls()
    first = [name for name in calls if name in case.theirs] or [name for name in calls if name != "headwise"]
    baseline = errors(calls[first[0]])
    for name, call in calls.items():
        if name in case.theirs or name == first[0]:
            continue
        for index, (error, least, true) in enumerate(zip(errors(call), baseline, truth, strict=True)):
            floor = torch.finfo(parts(case.ours())[0].dtype).eps * float(true.abs().max())
            allowed = (2 if name == "headwise" else 4) * least + floor
            assert error <= allowed, f"{case.name}, {name}, part {index}: error {error:.2e}, allowed {allowed:.2e}"


def peak_bytes(call: Call) -> int:
    """The most memory that a call holds at once beyond what was there before: counted by torch's allocator, exactly."""
    call()
    if torch.cuda.is_available() and any(part.is_cuda for part in parts(call())):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    held = most = 0
    for event in sorted((event for event in trace if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def save(name: str, text: str) -> None:
    """Write a report to benchmarks/results, and say so."""
    path = Path(__file__).parent / "results" / f"{name}.md"
    path.write_text(text, "utf-8")
    print(f"saved {path.name} in benchmarks/results")


def machine() -> str:
    """The processor's name where the system tells, versions and threads."""
    versions = f"torch {torch.__version__}, headwise {headwise.__version__}, Python {platform.python_version()}"
    return f"{processor()} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads; {versions}"
