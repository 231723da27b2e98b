"""`make accuracy`: the classifier of `headwise train classify` on public sets, several seeds, as one table.

The sets are the UCR and UEA archives' own .ts files, read out of the wheel that `make data` downloads, with their
official splits. Each run is what the command does with its defaults; the model of the last epoch is tested once.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.harness import machine, save
from headwise import pipelines
from headwise.data.timeseries import read_series

WHEEL = Path(__file__).parent.parent / "build" / "data" / "aeon-1.6.0-py3-none-any.whl"
SETS = ("JapaneseVowels", "ItalyPowerDemand", "PickupGestureWiimoteZ", "OSULeaf", "ACSF1")


def unpack(name: str, folder: Path) -> tuple[Path, Path]:
    """The train and test files of a set, copied out of the wheel."""
    paths = []
    with zipfile.ZipFile(WHEEL) as wheel:
        for part in ("TRAIN", "TEST"):
            paths.append(folder / f"{name}_{part}.ts")
            with wheel.open(f"aeon/datasets/data/{name}/{name}_{part}.ts") as packed, paths[-1].open("wb") as file:
                shutil.copyfileobj(packed, file)
    return paths[0], paths[1]


def row(name: str, seeds: int) -> str:
    """Train and test on one set with each seed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train, test = unpack(name, folder)
        series, other = read_series(train), read_series(test)
        lengths = [len(value) for part in (series, other) for value in part.values]
        results = []
        for seed in range(seeds):
            results.append(pipelines.train_classifier(train, folder / "model", test=test, seed=seed))
            print(f"{name}, seed {seed}: {results[-1].evaluation.accuracy:.4f}", file=sys.stderr)
    shortest, longest = min(lengths), max(lengths)
    scores = [result.evaluation.accuracy for result in results]
    return (
        f"| {name} | {len(series)} / {results[0].evaluation.num_series} | {series.num_channels} "
        f"| {longest if shortest == longest else f'{shortest} to {longest}'} | {len(series.class_names)} "
        f"| {results[0].evaluation.majority:.3f} | {' '.join(f'{score:.3f}' for score in scores)} "
        f"| **{min(scores):.3f}** | {results[0].parameters:,} |"
    )


def main() -> int:
    """Train, print, and save on request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of each set")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="some of the sets")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/accuracy-DATE.md too")
    args = parser.parse_args()
    if not WHEEL.exists():
        parser.error(f"needs {WHEEL.name}; run `make data` first")
    lines = [
        "# The classifier of `headwise train classify` on public sets",
        "",
        f"{machine()}. Defaults of the command, official splits, no choice by the test data.",
        "",
        "| set | train / test | channels | steps | classes | most frequent | accuracy, by seed | worst | weights |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(name, args.seeds) for name in args.sets),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.save:
        save(f"accuracy-{datetime.date.today()}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
