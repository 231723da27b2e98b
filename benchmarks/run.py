"""`make bench`: interleaved ratios of headwise to torch's best call, outputs asserted equal first.

Each row is measured in rounds; in a round every call of the row runs once, in an order drawn anew, so that whatever
else the machine does meets all of them. A ratio is the median over rounds of torch's time over headwise's: above 1,
headwise is faster. Where torch has several ways to make a call, the one with the smallest median counts.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import headwise
from benchmarks.cases import LARGE, LAYERS, MASKS, SHORT, SHORT_LAYER, Call, Case, classifier, large, layer, short

# What the project promises of each group: every row's ratio, and the geometric mean of short calls.
NEVER_BELOW = 0.97
FLOORS = {"eval none": 1.2, "eval padding": 1.7}
LAYER_FLOORS = {
    ("six-layer encoder", "eval padding"): 1.5,
    ("encoder layer", "eval padding"): 1.2,
    ("decoder layer", "eval padding"): 1.2,
    ("decoder layer", "eval causal, padding"): 1.2,
}
MEAN_FLOORS = {("fused", "eval"): 1.1, ("fused", "train"): 1.4, ("split", "eval"): 0.9, ("split", "train"): 1.1}


@dataclass
class Row:
    """A measured case."""

    name: str
    ratio: float
    low: float
    high: float
    best: str
    share: float
    floor: float | None


def measure(case: Case, *, rounds: int, repeats: int, peak: float) -> Row:
    """Times of all calls of a case, as ratios."""
    calls: dict[str, Call] = {"headwise": case.ours, **case.theirs}
    agree(case)
    for call in calls.values():
        for _ in range(3):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                call = calls[name]
                call()  # its weights and code are in the caches, as in a loop of its own
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                seconds[name].append((time.perf_counter() - start) / repeats)
    finally:
        gc.enable()
    best = min(case.theirs, key=lambda name: statistics.median(seconds[name]))
    ratios = sorted(theirs / ours for theirs, ours in zip(seconds[best], seconds["headwise"], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    share = case.flops / statistics.median(seconds["headwise"]) / peak
    return Row(case.name, statistics.median(ratios), low, high, best, share, case.floor)


def agree(case: Case) -> None:
    """Whatever is compared gives the same output first."""
    ours = case.ours()
    for name, call in case.theirs.items():
        theirs = call()
        assert isinstance(ours, Tensor)
        assert isinstance(theirs, Tensor)
        if case.padding is not None:
            ours, theirs = (out.masked_fill(case.padding[..., None], 0) for out in (ours, theirs))
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{case.name}, {n}: {text}"
        )


def product_peak() -> float:
    """FLOP/s of a 2,048-cubed float32 matrix product, the best of several."""
    a, b = torch.randn(2, 2048, 2048).unbind(0)
    best = math.inf
    for _ in range(7):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def large_rows(peak: float, rounds: int) -> Iterator[tuple[str, Row]]:
    """B=8, L=512, in both layouts."""
    for layout in ("split", "fused"):
        for mode in ("eval", "train"):
            for kind in MASKS:
                case = large(mode, kind, fused=layout == "fused")
                case.floor = FLOORS.get(case.name, NEVER_BELOW)
                yield layout, measure(case, rounds=rounds, repeats=1, peak=peak)


def layer_rows(peak: float, rounds: int) -> Iterator[tuple[str, Row]]:
    """torch's layers beside the same after `upgrade`."""
    for which, kinds in LAYERS.items():
        for mode in ("eval", "train"):
            for kind in kinds:
                case = layer(mode, which, kind)
                case.floor = LAYER_FLOORS.get((which, case.name), NEVER_BELOW)
                turns = max(3, rounds // 3) if which == "six-layer encoder" else rounds
                yield which, measure(case, rounds=turns, repeats=1, peak=peak)
    for mode in ("eval", "train"):
        for kind in LAYERS["encoder layer"]:
            case = layer(mode, "encoder layer", kind, SHORT_LAYER, fused=True)  # no floor: torch's is one fused call
            yield f"short encoder layer {SHORT_LAYER}, fused", measure(case, rounds=3 * rounds, repeats=5, peak=peak)


def short_rows(peak: float, rounds: int) -> Iterator[tuple[str, str, list[Row]]]:
    """The six short shapes, in both layouts."""
    for layout in ("fused", "split"):
        for mode in ("eval", "train"):
            rows = []
            for shape in SHORT:
                case = short(mode, shape, fused=layout == "fused")
                repeats = max(3, min(50, int(2e7 / case.flops)))
                rows.append(measure(case, rounds=rounds, repeats=repeats, peak=peak))
            yield layout, mode, rows


def classifier_rows(peak: float, rounds: int) -> Iterator[Row]:
    """The demo's model beside itself on torch's attention: never slower."""
    for mode, floor in (("eval", NEVER_BELOW), ("train", 1.0)):
        case = classifier(mode)
        case.floor = floor
        yield measure(case, rounds=rounds, repeats=3, peak=peak)


def machine() -> str:
    """The processor's name where the system tells, versions and threads."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    versions = f"torch {torch.__version__}, headwise {headwise.__version__}, Python {platform.python_version()}"
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads; {versions}"


def below(group: str, row: Row) -> list[str]:
    """A line where the ratio is below its floor, else none."""
    fails = row.floor is not None and row.ratio < row.floor
    return [f"{group} {row.name}: {row.ratio:.2f}, floor {row.floor}"] if fails else []


def report(rounds: int, only: str | None) -> tuple[str, list[str]]:
    """The tables as Markdown, and what fell below its floor."""
    peak = product_peak()
    B, L, D, H = LARGE
    how = (
        f"float32, {rounds} interleaved rounds a row, median (quartiles) of torch's time over headwise's; torch is at "
        "its best: fast path on, inference mode in eval, the quickest of its ways to make the call."
    )
    lines = ["# headwise beside torch.nn.MultiheadAttention", "", f"{machine()}. {how}"]
    missed = []
    if only in (None, "large"):
        lines += [
            "",
            f"## B={B}, L={L}, D={D}, H={H}; train is forward and backward",
            "",
            "`share` is headwise's part of the measured peak of a 2,048-cubed matrix product, counting every position.",
            "",
            "| layout | case | ratio | quartiles | floor | torch's best call | share |",
            "|---|---|---|---|---|---|---|",
        ]
        for layout, row in large_rows(peak, rounds):
            lines.append(
                f"| {layout} | {row.name} | {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} | {row.floor} "
                f"| {row.best} | {row.share:.2f} |"
            )
            print(lines[-1], file=sys.stderr)
            missed += below(layout, row)
    if only in (None, "layers"):
        lines += [
            "",
            f"## torch's layers beside the same after `headwise.upgrade`, M={4 * D}, padding {L // 8} to {L}",
            "",
            "Train is a forward and a backward pass from real positions, without dropout.",
            "",
            "| layer | case | ratio | quartiles | floor | share |",
            "|---|---|---|---|---|---|",
        ]
        for which, row in layer_rows(peak, rounds):
            lines.append(
                f"| {which} | {row.name} | {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} | {row.floor} "
                f"| {row.share:.2f} |"
            )
            print(lines[-1], file=sys.stderr)
            missed += below(which, row)
    if only in (None, "short"):
        header = " | ".join(str(shape) for shape in SHORT)
        lines += [
            "",
            "## Short calls, (B, L, D, H); forward only, train records gradients",
            "",
            f"| layout | mode | {header} | geometric mean | floor | lowest |",
            "|---|---|" + "---|" * (len(SHORT) + 3),
        ]
        for layout, mode, rows in short_rows(peak, 3 * rounds):
            ratios = [row.ratio for row in rows]
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            floor = MEAN_FLOORS[layout, mode]
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {layout} | {mode} | {cells} | {mean:.2f} | {floor} | {min(ratios):.2f} |")
            print(lines[-1], file=sys.stderr)
            if mean < floor:
                missed.append(f"short {layout} {mode}: geometric mean {mean:.2f}, floor {floor}")
    if only in (None, "classifier"):
        lines += [
            "",
            "## The classifier of `headwise demo`, 32 padded utterances, beside itself on `nn.MultiheadAttention`",
            "",
            "Train is a whole step: forward, loss, backward, AdamW.",
            "",
            "| case | ratio | quartiles | floor |",
            "|---|---|---|---|",
        ]
        for row in classifier_rows(peak, 3 * rounds):
            lines.append(f"| {row.name} | {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} | {row.floor} |")
            print(lines[-1], file=sys.stderr)
            missed += below("classifier", row)
    return "\n".join(lines) + "\n", missed


def main() -> int:
    """Measure, print, and save on request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved rounds a row (short and classifier rows: three times that)"
    )
    parser.add_argument("--only", choices=("large", "layers", "short", "classifier"), help="one group of rows")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE.md too")
    parser.add_argument("--check", action="store_true", help="exit 1 if a ratio is below its floor")
    args = parser.parse_args()
    torch.manual_seed(0)
    text, missed = report(args.rounds, args.only)
    print(text)
    for line in missed:
        print(f"below its floor: {line}")
    if args.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today():%Y-%m-%d}.md"
        path.write_text(text + "".join(f"\nBelow its floor: {line}.\n" for line in missed))
        print(f"saved {path.name} in benchmarks/results")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
