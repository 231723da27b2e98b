"""`make bench`: interleaved ratios of headwise to torch's best call, outputs asserted equal first.

benchmarks/harness.py says how a row is measured. Where torch has several ways to make a call, the one with the smallest
median counts.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks import int8, peers, wasted, watched
from benchmarks.cases import LARGE, LAYERS, MASKS, SHORT, SHORT_LAYER, classifier, large, layer, short
from benchmarks.harness import Product, Row, machine, measure, save

# What the project promises of each group: every row's ratio, and the geometric mean of short calls.
NEVER_BELOW = 0.97
FLOORS = {"eval none": 1.2, "eval padding": 2.0, "train padding": 1.4}
LAYER_FLOORS = {
    ("six-layer encoder", "eval padding"): 1.5,
    ("encoder layer", "eval padding"): 1.2,
    ("decoder layer", "eval padding"): 1.2,
    ("decoder layer", "eval causal, padding"): 1.2,
}
MEAN_FLOORS = {("fused", "eval"): 1.2, ("fused", "train"): 1.4, ("split", "eval"): 0.9, ("split", "train"): 1.1}
GROWTH = 1.2  # the most that time may grow beyond the length
MEMORY = 1 / 3  # of torch's, with averaged weights

B, L, D, H = LARGE
SHORT_PEERS = ("direct SDPA", "Hugging Face")
COLUMNS = ("slow path", "headwise nested", *peers.NAMES)
Line = tuple[list[str], list[str]]  # the cells of a row, and what fell below its floor


@dataclass(frozen=True)
class Table:
    """A table: its group (`--only`), heading, what a reader has to know, its columns, and where its rows come from."""

    group: str
    title: str
    note: str
    columns: tuple[str, ...]
    lines: Callable[[float, int], Iterator[Line]]


def ratio_cells(row: Row) -> list[str]:
    """The columns that every table of ratios has."""
    return [row.name, f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}", str(row.floor)]


def large_lines(product: Product, rounds: int) -> Iterator[Line]:
    """B=8, L=512, in both layouts."""
    for layout in ("split", "fused"):
        for mode in ("eval", "train"):
            for kind in MASKS:
                case = large(mode, kind, fused=layout == "fused")
                case.floor = FLOORS.get(case.name, NEVER_BELOW)
                case.share = wasted.SHARE if kind == "none" else None
                row = measure(case, rounds=rounds, repeats=1, product=product)
                yield [layout, *ratio_cells(row), row.best, f"{row.share:.2f}"], row.below(layout)


def layer_lines(product: Product, rounds: int) -> Iterator[Line]:
    """torch's layers beside the same after `upgrade`."""
    for which, kinds in LAYERS.items():
        for mode in ("eval", "train"):
            for kind in kinds:
                case = layer(mode, which, kind)
                case.floor = LAYER_FLOORS.get((which, case.name), NEVER_BELOW)
                turns = max(3, rounds // 3) if which == "six-layer encoder" else rounds
                row = measure(case, rounds=turns, repeats=1, product=product)
                yield [which, *ratio_cells(row), f"{row.share:.2f}"], row.below(which)
    for mode in ("eval", "train"):
        for kind in LAYERS["encoder layer"]:
            case = layer(mode, "encoder layer", kind, SHORT_LAYER, fused=True)  # no floor: torch's is one fused call
            row = measure(case, rounds=3 * rounds, repeats=5)
            yield [f"short encoder layer {SHORT_LAYER}, fused", *ratio_cells(row), ""], []


def short_lines(product: Product, rounds: int) -> Iterator[Line]:
    """The six short shapes, in both layouts."""
    for layout in ("fused", "split"):
        for mode in ("eval", "train"):
            rows = []
            for shape in SHORT:
                case = short(mode, shape, fused=layout == "fused")
                repeats = max(3, min(50, int(2e7 / case.flops)))
                rows.append(measure(case, rounds=3 * rounds, repeats=repeats))
            ratios = [row.ratio for row in rows]
            mean = statistics.geometric_mean(ratios)
            beside = [mean_cell([row.peers[name] for row in rows]) for name in SHORT_PEERS]
            floor = MEAN_FLOORS[layout, mode]
            missed = [f"short {layout} {mode}: geometric mean {mean:.2f}, floor {floor}"] if mean < floor else []
            cells = [*(f"{value:.2f}" for value in (*ratios, mean)), str(floor), f"{min(ratios):.2f}", *beside]
            yield [layout, mode, *cells], missed


def mean_cell(cells: list[str]) -> str:
    """The geometric mean of a peer's ratios, or why there are none."""
    try:
        return f"{statistics.geometric_mean(map(float, cells)):.2f}"
    except ValueError:
        return cells[0]


def classifier_lines(product: Product, rounds: int) -> Iterator[Line]:
    """The demo's model beside itself on torch's attention: never slower."""
    for mode, floor in (("eval", NEVER_BELOW), ("train", 1.0)):
        case = classifier(mode)
        case.floor = floor
        row = measure(case, rounds=3 * rounds, repeats=3)
        yield ratio_cells(row), row.below("classifier")


def wasted_lines(product: Product, rounds: int) -> Iterator[Line]:
    """What is not computed, beside those who compute it or leave it out too."""
    for case in wasted.table(wasted.Setting()):
        quick = case.name.startswith(("dense", "padded", "decoding"))  # the others' peers take seconds
        turns = rounds if quick else max(3, rounds // 2)
        row = measure(case, rounds=turns, repeats=1, product=product)
        cells = [row.peers.get(name, "") for name in COLUMNS]
        share = f"{row.share:.2f}" if row.share else ""
        yield [*ratio_cells(row), row.best, share, *cells], row.below("wasted")


def growth_lines(product: Product, rounds: int) -> Iterator[Line]:
    """A window's time as the row grows."""
    for length, seconds, grown in wasted.growth(wasted.Setting(), rounds):
        missed = [f"growth at {length}: {grown:.2f} times the length's, at most {GROWTH}"] if grown > GROWTH else []
        yield [f"{length:,}", f"{1000 * seconds:.1f} ms", f"{grown:.2f}", str(GROWTH)], missed


def memory_lines(product: Product, rounds: int) -> Iterator[Line]:
    """What a call that returns weights holds."""
    ours, theirs = wasted.memory(wasted.Setting())
    part = ours / theirs
    missed = [f"memory of weights: {part:.2f} of torch's, at most {MEMORY:.2f}"] if part > MEMORY else []
    yield [*(f"{count / 2**20:.0f} MiB" for count in (ours, theirs)), f"{part:.2f}", f"{MEMORY:.2f}"], missed


def watched_lines(product: Product, rounds: int) -> Iterator[Line]:
    """What watching costs, over at least 1,000 forwards."""
    for row in watched.table():
        times = [row.watched_p99 / row.p99, row.observed_median / row.median, row.observed_p99 / row.median]
        more = f"{1000 * (row.observed_median - row.median):+.2f} ms"
        counts = [f"{row.forwards:,}", f"{row.observed:,}"]
        yield [row.name, *counts, f"{row.overhead:.2%}", *(f"{each:.2f}" for each in times), more], row.missed


def int8_lines(product: Product, rounds: int) -> Iterator[Line]:
    """An encoder layer in int8, in every runtime that is there."""
    yield from int8.lines(rounds)


TABLES = (
    Table(
        "large",
        f"B={B}, L={L}, D={D}, H={H}; train is forward and backward",
        "`share` is headwise's FLOPs a second, counting every position, over those of a 2,048-cubed matrix product in "
        "the same rounds; "
        f"without a mask it is to be {wasted.SHARE} or more.",
        ("layout", "case", "ratio", "quartiles", "floor", "torch's best call", "share"),
        large_lines,
    ),
    Table(
        "layers",
        f"torch's layers beside the same after `headwise.upgrade`, M={4 * D}, padding {L // 8} to {L}",
        "Train is a forward and a backward pass from real positions, without dropout.",
        ("layer", "case", "ratio", "quartiles", "floor", "share"),
        layer_lines,
    ),
    Table(
        "short",
        "Short calls, (B, L, D, H); forward only, train records gradients",
        "The last columns are the geometric means of these peers' times over headwise's, in the same rounds.",
        ("layout", "mode", *map(str, SHORT), "geometric mean", "floor", "lowest", *SHORT_PEERS),
        short_lines,
    ),
    Table(
        "classifier",
        "The classifier of `headwise demo`, 32 padded utterances, beside itself on `nn.MultiheadAttention`",
        "Train is a whole step: forward, loss, backward, AdamW.",
        ("case", "ratio", "quartiles", "floor"),
        classifier_lines,
    ),
    Table(
        "wasted",
        f"What nobody needs: padding {L // 8} to {L} at B={B}, D={D}, H={H}; rows of K={D // H}",
        "The baseline is `nn.MultiheadAttention` for a batch, one SDPA with the mask for a row of heads, transformers' "
        "static cache for decoding. Train is forward and backward, to the input too; eval is in inference mode. The "
        "last columns ran in the same rounds and are their time over headwise's: `slow path` is torch's layer with its "
        "fast path switched off; `headwise nested` ours on a jagged tensor; direct SDPA is by hand, the quickest of "
        "its ways; Hugging Face is transformers' CLIP attention, or its SDPA function; FlexAttention is compiled; "
        "nested is SDPA on a jagged tensor.",
        ("case", "ratio", "quartiles", "floor", "best call", "share", *COLUMNS),
        wasted_lines,
    ),
    Table(
        "wasted",
        f"A causal window of {wasted.Setting().window} keys as the row grows, forward and backward",
        "`grown` is the time over that of the first row, over the length's ratio.",
        ("length", "time", "grown", "at most"),
        growth_lines,
    ),
    Table(
        "wasted",
        f"Memory that a call with averaged weights holds at once, L={wasted.Setting().weights:,}",
        "Counted by torch's allocator, beyond the inputs and weights of the layer; torch is at its least.",
        ("headwise", "torch", "part", "at most"),
        memory_lines,
    ),
    Table(
        "watched",
        f"A padded encoder (B, L, D, H, layers) under `headwise.watch(budget={watched.BUDGET})`, in inference mode",
        "CPU time of one thread, beside a copy that nobody watches, in turns; all outputs equal to the bit. `overhead` "
        f"is the observer's time over the forwards', at most {watched.MOST_OVERHEAD:.1%}; `p99` that of all forwards "
        "over the copy's; `an observed one` the median of the forwards that were observed over the copy's median, at "
        f"most {watched.MOST_TIMES} or {1000 * watched.MOST_MORE} ms more; `p99 of these` likewise.",
        ("model", "forwards", "observed", "overhead", "p99", "an observed one", "p99 of these", "more"),
        watched_lines,
    ),
    Table(
        "int8",
        f"An encoder layer in int8 beside torch's in float, D={int8.D}, H={int8.HEADS}, M={int8.M}, one thread",
        "Torch's `nn.TransformerEncoderLayer` in inference mode, fast path on, over each way's time; outputs within "
        f"{int8.MOST_ERROR:.0%} of torch's. `dynamic` and `static` are `headwise.quantize` without and with samples; "
        "`NNCF` is OpenVINO's own quantization of the same layer. Asked for: "
        + "; ".join(f"{floor} by {' or '.join(ways)} (T={length})" for ways, length, floor in int8.FLOORS)
        + f"; files of at most {int8.MOST_BYTES} of float's.",
        ("size", *int8.WAYS),
        int8_lines,
    ),
)


def report(rounds: int, only: str | None) -> tuple[str, list[str]]:
    """The tables as Markdown, and what fell below its floor."""
    product = Product()
    how = (
        f"float32, {rounds} interleaved rounds a row, median (quartiles) of torch's time over headwise's; torch is at "
        "its best: fast path on, inference mode in eval, the quickest of its ways to make the call."
    )
    lines = ["# headwise beside torch.nn.MultiheadAttention", "", f"{machine()}{peers.versions()}. {how}"]
    missed = []
    for table in TABLES:
        if only not in (None, table.group):
            continue
        lines += ["", f"## {table.title}", "", *([table.note, ""] if table.note else [])]
        lines += [f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
        for cells, below in table.lines(product, rounds):
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
            missed += below
    return "\n".join(lines) + "\n", missed


def main() -> int:
    """Measure, print, and save on request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved rounds a row (short and classifier rows: three times that)"
    )
    groups = list(dict.fromkeys(table.group for table in TABLES))
    parser.add_argument("--only", choices=groups, help="one group of rows")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE.md, or DATE-GROUP.md, too")
    parser.add_argument("--check", action="store_true", help="exit 1 if a ratio is below its floor")
    args = parser.parse_args()
    torch.manual_seed(0)
    text, missed = report(args.rounds, args.only)
    print(text)
    for line in missed:
        print(f"below its floor: {line}")
    if args.save:
        name = "-".join([f"{datetime.date.today()}", *([args.only] if args.only else [])])
        save(name, text + "".join(f"\nBelow its floor: {line}.\n" for line in missed))
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
