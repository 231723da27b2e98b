"""What the commands print: results on stdout, the progress bar on stderr."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise._checks import counted, need
from headwise.observe.picture import plain
from headwise.observe.snapshot import Snapshot
from headwise.pipelines import (
    Comparison,
    Evaluation,
    Exported,
    Form,
    Inspection,
    Prediction,
    Progress,
    Quantization,
    TrainResult,
)


@contextmanager
def progress(silent: bool) -> Iterator[Callable[[Progress], None]]:
    """Show a bar and a live line of the accuracy; gives what is to be called after each epoch."""
    console, bars = need("rich.console", "cli"), need("rich.progress", "cli")
    columns = (
        "training",
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        "epochs, accuracy in training {task.fields[accuracy]:.1%}",
        bars.TimeRemainingColumn(),
    )
    # On stderr: stdout holds the result alone.
    bar = bars.Progress(*columns, console=console.Console(stderr=True), disable=silent)
    task = bar.add_task("", total=None, accuracy=0.0)

    def update(now: Progress) -> None:
        bar.start()  # not before: a job that is refused shows its one line and no bar
        bar.update(task, total=now.epochs, completed=now.epoch, accuracy=now.accuracy)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def status(silent: bool) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done; gives what is to be called with it."""
    console = need("rich.console", "cli").Console(stderr=True)
    shown = need("rich.status", "cli").Status("", console=console)

    def update(now: str) -> None:
        if not silent:
            shown.start()  # not before: a job that is refused shows its one line
            shown.update(now)

    try:
        yield update
    finally:
        if not silent:
            shown.stop()


def training(result: TrainResult, as_json: bool) -> None:
    """Print what a training reached and wrote."""
    if as_json:
        # Not `asdict` of all: a snapshot has maps, and says itself what of it is to be printed.
        seen, rest = result.attention, dataclasses.replace(result, attention=None)
        _json({**dataclasses.asdict(rest), "attention": None if seen is None else seen.as_dict()})
        return
    evaluation(result.evaluation, False, tested_on=result.tested_on)
    print()
    _rows(
        ("trained on", f"{result.num_train} series, {result.epochs} epochs, seed {result.seed}"),
        ("parameters", f"{result.parameters:,}"),
        ("took", f"{result.seconds:.1f} s"),
    )
    files(result.files, False)


def evaluation(scores: Evaluation, as_json: bool, tested_on: str | None = None) -> None:
    """Print the scores, class by class."""
    if as_json:
        _json(dataclasses.asdict(scores))
        return
    _rows(
        ("accuracy", _accuracy(scores)),
        ("by guessing", f"{scores.majority:.1%}, always the most frequent class"),
        *([("tested on", tested_on)] if tested_on else []),
    )
    if scores.num_learnt:
        print(
            f"\nNote: {scores.num_learnt} of these {scores.num_series} series were trained on, so this is not the\n"
            "      accuracy on new ones; that is the one that the training printed."
        )
    table = _table(texts=("class",), numbers=("series", "right", "recall", "precision"))
    for score in scores.classes:
        shares = ("-" if share is None else f"{share:.1%}" for share in (score.recall, score.precision))
        table.add_row(_plain(score.name), str(score.num_series), str(score.num_right), *shares)
    _print(table)


def _accuracy(scores: Evaluation) -> str:
    num_right = sum(score.num_right for score in scores.classes)
    return f"{scores.accuracy:.1%} ({num_right} of {scores.num_series} series)"


def predictions(given: Sequence[Prediction], as_json: bool) -> None:
    """Print a line for each series."""
    if as_json:
        _json([dataclasses.asdict(one) for one in given])
        return
    table = _table(texts=("series", "predicted"), numbers=("probability",))
    for one in given:
        table.add_row(_plain(one.series), _plain(one.predicted), f"{one.probability:.1%}")
    _print(table)


def inspection(found: Inspection, as_json: bool) -> None:
    """Print what the heads do over a file."""
    if as_json:
        _json({"num_series": found.num_series, **found.snapshot.as_dict(), "files": found.files})
        return
    attention(found.snapshot, found.num_series)
    if found.files:
        print()
    files(found.files, False)


def quantization(found: Quantization, as_json: bool) -> None:
    """Print what became int8, and what that did."""
    if as_json:
        _json(dataclasses.asdict(found))
        return
    how = "inputs scaled by each call"
    if found.num_calibration:
        how = f"calibrated with {counted(found.num_calibration, 'series', 'series')}"
    share = found.int8_bytes / found.float_bytes
    rows = [
        ("int8", f"{found.num_int8} of {counted(found.num_int8 + found.num_float, 'linear')} ({found.kind}, {how})"),
        ("size", f"{found.float_bytes:,} bytes before, {found.int8_bytes:,} now ({share:.2f})"),
    ]
    if found.weight_bits != 8:
        rows.append(("weights", f"{found.weight_bits} bits"))
    if found.equalized:
        rows.append(("equalized", "yes, ranges of channels were evened out first"))
    if found.before is not None and found.after is not None:
        rows.append(("accuracy", f"{_accuracy(found.before)} before, {_accuracy(found.after)} now"))
    if found.measured_on is not None:
        rows.append(("other class", f"{found.num_changed} of {counted(found.num_series, 'series', 'series')}"))
        rows.append(("measured on", found.measured_on))
    _rows(*rows)
    if found.before is not None and found.before.num_learnt:
        print(
            "\nNote: the model was trained on that file, so these are not the accuracies on new series;\n"
            "      --test FILE measures those.\n"
        )
    files(found.files, False)


def export(found: Exported, as_json: bool) -> None:
    """Print what the exporter found out about the file."""
    if as_json:
        _json({**dataclasses.asdict(found), "error": found.report.error, "size_ratio": found.report.size_ratio})
        return
    print(found.report)
    if found.num_series:
        told = counted(found.num_series, "series", "series")
        print(f"  of {told}, each alone, the file names {found.num_changed} otherwise than the model")
    print()
    files(found.files, False)


def comparison(found: Comparison, as_json: bool) -> None:
    """Print a line a form."""
    if as_json:
        _json(dataclasses.asdict(found))
        return
    series = counted(found.num_series, "series", "series") if found.num_series else "made-up series"
    print(
        f"{series}, {found.steps[0]} to {found.steps[1]} steps; {counted(found.threads, 'thread')}; medians of "
        f"{counted(found.rounds, 'round')} in turns;\nratios to torch's float model, above 1 is faster"
    )
    columns = ("bytes", "of float", "one series", "ms", "batch of 32", "series/s", "accuracy", "other class")
    table = _table(texts=("runtime", "model"), numbers=columns)
    for form in found.forms:
        table.add_row(form.runtime, form.kind, *_cells(form, found.forms[0]))
    _print(table)
    for missing in found.missing:
        print(f"left out: {missing}")
    _rows(*found.machine.items())


def _cells(form: Form, first: Form) -> tuple[str, ...]:
    return (
        f"{form.bytes:,}",
        f"{form.bytes / first.bytes:.2f}",
        f"{form.speed:.2f}x",
        f"{1000 * form.latency:.2f}",
        "-" if form.batch_speed is None else f"{form.batch_speed:.2f}x",
        "-" if form.throughput is None else f"{form.throughput:,.0f}",
        "-" if form.accuracy is None else f"{form.accuracy:.1%}",
        "-" if form.num_changed is None else str(form.num_changed),
    )


def attention(snapshot: Snapshot, num_series: int) -> None:
    """Print a row a head; the monitor's own first line is about its cost, and here it may cost what it needs."""
    rows = max((layer.rows for layer in snapshot.layers), default=0)
    print(f"attention of {counted(num_series, 'series', 'series')}, {counted(rows, 'row')} of each head:\n")
    print(str(snapshot).partition("\n")[2])


def files(paths: Sequence[Path], as_json: bool, alone: bool = False, kept: Collection[Path] = ()) -> None:
    """Print what was written, and what of it was there already; `alone`: it is the whole result."""
    if not as_json:
        # Not in a table: that would break a long path, which is to be copied in one piece.
        for path in paths:
            print(f"{'kept' if path in kept else 'wrote':14}{path}")
    elif alone:
        _json({"files": paths})


def _json(value: Any) -> None:
    print(json.dumps(value, default=str, allow_nan=False))


def _rows(*rows: tuple[str, str]) -> None:
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name:{width}}{value}")


def _table(texts: Sequence[str], numbers: Sequence[str]) -> Any:
    """A table in which names may be broken, so that no number is ever left out."""
    table = need("rich.table", "cli").Table(box=need("rich.box", "cli").SIMPLE)
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    return table


def _plain(text: str) -> Any:
    """Text from a file as it is: not as rich's markup, and without letters that would steer the terminal."""
    return need("rich.text", "cli").Text(plain(text, 10**6))


def _print(table: Any) -> None:
    console = need("rich.console", "cli").Console()
    if not console.is_terminal:
        console.width = 10**4  # nothing to fit into: a table in a pipe is as wide as it needs to be
    console.print(table)
