"""The rows of benchmarks/wasted.py on a CUDA device in bfloat16: `python -m benchmarks.gpu`.

Correct first: each call is held to the baseline's in float64 on the same rounded numbers, at most twice as far off as
the baseline in bfloat16, and a floor. Then interleaved ratios by the device's own clock, and headwise's FLOPs a second
over those of a large matrix product. `--device cpu --quick` runs the same code with tiny sizes by the wall clock: it
shows that the script runs, and claims nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable, Iterator

import torch

import headwise
from benchmarks import peers, wasted
from benchmarks.harness import Case, Product, agree_in_low_precision, events, measure, save, wall
from benchmarks.wasted import TINY, Setting
from headwise.pipelines.bench import processor

Build = Callable[[Setting], Case]
LARGE = Setting(batch=16, length=1024, width=1024, heads=16, weights=4096)  # 64 wide heads, as on the CPU
COLUMNS = ("headwise nested", *peers.NAMES)


def builds(setting: Setting) -> Iterator[Build]:
    """The rows: each can be built in more than one dtype."""
    half = setting.window // 2
    for mode in ("eval", "train"):
        yield functools.partial(wasted.dense, mode=mode)
        for causal in (False, True):
            for queries in (False, True):
                yield functools.partial(wasted.padded, mode=mode, causal=causal, queries=queries)
            yield functools.partial(wasted.documents, mode=mode, causal=causal)
        for left, right in ((setting.window - 1, 0), (half, half)):
            yield functools.partial(wasted.window, mode=mode, left=left, right=right)
    yield wasted.dropout
    yield wasted.weights
    yield wasted.decode


def seeded(build: Build, setting: Setting) -> Case:
    """The case with the same numbers each time."""
    torch.manual_seed(0)
    return build(setting)


def table(setting: Setting, rounds: int, repeats: int) -> Iterator[str]:
    """The lines of the table."""
    on_cpu = setting.device == "cpu"
    factory = {"device": setting.device, "dtype": setting.dtype}
    product = Product(256 if on_cpu else 8192, **factory)
    header = ("case", "ratio", "quartiles", "best call", "share", *COLUMNS)
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    exact_setting = dataclasses.replace(setting, dtype=torch.float64, compiled=False)
    for build in builds(setting):
        case = seeded(build, setting)
        if case.same is None:
            exact = seeded(build, exact_setting)
            case.same = functools.partial(agree_in_low_precision, case, exact)
        row = measure(case, rounds=rounds, repeats=repeats, product=product, clock=wall if on_cpu else events)
        cells = [row.name, f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}", row.best]
        cells += [f"{row.share:.2f}" if row.share else "", *(row.peers.get(name, "") for name in COLUMNS)]
        yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print, and save on request; 2 without the device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing compiled, few rounds")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds a row")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gpu-DATE.md too")
    args = parser.parse_args(arguments)
    on_cpu = args.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (--device cpu --quick tries the script)", file=sys.stderr)
        return 2
    if on_cpu and args.save:
        parser.error("--save is for a GPU's numbers")
    sizes = TINY if args.quick else LARGE
    setting = dataclasses.replace(sizes, device=args.device, dtype=torch.bfloat16, rounded=torch.bfloat16)
    name = processor() if on_cpu else torch.cuda.get_device_name()
    rounds, repeats = (1, 1) if args.quick else (args.rounds, 10)
    what = (
        f"{name}; torch {torch.__version__}, headwise {headwise.__version__}{peers.versions()}. bfloat16, "
        f"{rounds} interleaved rounds, median (quartiles) of the baseline's time over headwise's. {setting}."
    )
    lines = [f"# headwise on a {'CPU, to try the script: no claim' if on_cpu else 'GPU'}", "", what, ""]
    print("\n".join(lines))
    for line in table(setting, rounds, repeats):
        print(line, flush=True)
        lines.append(line)
    if args.save:
        save(f"gpu-{datetime.date.today()}", "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
