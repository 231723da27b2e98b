"""A classifier in each of its forms, side by side: size, speed and what it still knows.

Axis letters: B batch, L positions, N series, X channels, Y classes.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from headwise._checks import at_least, invalid
from headwise.data.samples import Series, pad
from headwise.export.doors import NotWrittenError
from headwise.models.classifier import SequenceClassifier
from headwise.models.files import save
from headwise.pipelines import runners
from headwise.pipelines.shared import BATCH, bytes_of, in_threads, int8_of, load_float, read_fitting
from headwise.quant.linear import Int8Linear

_LATE = 32  # series whose latency is taken
_MADE_UP = 64  # steps of the series that stand in where there is no data
_RUNTIMES = {"onnx": "onnxruntime", "executorch": "executorch"}  # by the format that they run


@dataclass(frozen=True)
class Form:
    """One form of a classifier and what was measured of it.

    Attributes:
        runtime: "torch", "onnxruntime" or "executorch".
        kind: "float", "int8 dynamic" or "int8 static".
        bytes: of its files.
        latency: of one series alone, in seconds on this machine: the median of the rounds' means.
        speed: latency of torch's float model by its own: above 1 is faster.
        throughput: series a second in padded batches of 32, on this machine; None: it takes one series at a time.
        batch_speed: its throughput by that of torch's float model; None likewise.
        accuracy: the share of the labelled series that it names right; None without labels.
        num_changed: series that it names otherwise than torch's float model does; None without data.
    """

    runtime: str
    kind: str
    bytes: int
    latency: float
    speed: float
    throughput: float | None
    batch_speed: float | None
    accuracy: float | None
    num_changed: int | None


@dataclass(frozen=True)
class Comparison:
    """A classifier in each form that could be run here.

    Attributes:
        forms: torch's float model first.
        missing: what was left out, and what would bring it.
        num_series: series of the data file; 0: made-up ones.
        steps: of the shortest and the longest series that were timed.
        rounds: how often each form had its turn.
        threads: that each form had.
        machine: its processor, and the versions of what ran.
    """

    forms: tuple[Form, ...]
    missing: tuple[str, ...]
    num_series: int
    steps: tuple[int, int]
    rounds: int
    threads: int
    machine: dict[str, str]


def benchmark_classifier(
    directory: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    threads: int = 1,
    rounds: int = 15,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run a saved float classifier beside its int8 and exported forms, in turns, in one process.

    Args:
        directory: where `train_classifier` or `headwise.save` put the model.
        data: a .ts or .csv file of series: the calibration, what is timed, and, if it has labels, the accuracy. None:
            made-up series of 64 steps are timed, and there is no static form.
        threads: for each form.
        rounds: turns that each form gets; medians are over these.
        progress: called with a word for what is being made or timed.

    Returns:
        A line for each form, torch's float model first, and what could not be run.

    Raises:
        ImportError: safetensors is missing.
        ValueError: no model there, one that is int8 already, a file that is not as it should be, no thread, or more
            than four for each processor.

    Cost: a few seconds for each file that is written, and 32 series and a batch a round and form.
    """
    function = "benchmark_classifier"
    most = 4 * (os.cpu_count() or 1)
    if at_least(1, function, "threads", threads) > most:  # far too many end the process
        raise invalid(function, "threads", f"be at most {most}, four for each processor here", threads)
    at_least(1, function, "rounds", rounds)
    model = load_float(function, directory, "hold a float model, which is made int8 here")
    series = None if data is None else read_fitting(function, model, data)
    say = progress or (lambda _: None)
    with in_threads(threads), tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        found, missing = _forms(model, series, Path(folder), threads, say)
        timed = _timed(model, series)
        say("timing")
        times = _times([run for *_, run in found], timed, rounds)
        forms = _told(found, times, series)
    lengths = [len(values_LX) for values_LX in timed]
    return Comparison(
        forms=tuple(forms),
        missing=tuple(missing),
        num_series=0 if series is None else len(series),
        steps=(min(lengths), max(lengths)),
        rounds=rounds,
        threads=threads,
        machine=_machine(),
    )


_Found = tuple[str, str, int, runners.Runner]  # runtime, kind, bytes, and what runs it


def _forms(
    model: SequenceClassifier, series: Series | None, folder: Path, threads: int, say: Callable[[str], None]
) -> tuple[list[_Found], list[str]]:
    """Each form that can be made and run here; and for each that cannot, why."""
    missing = []
    say("quantizing")
    models = {"float": model, "int8 dynamic": int8_of(model, None)}
    if series is None:
        missing.append("int8 static: needs series to calibrate with, --data FILE")
    else:
        models["int8 static"] = int8_of(model, series)
    found: list[_Found] = []
    for kind, one in models.items():
        place = save(one, folder / kind)
        if any(module.backend for module in one.modules() if isinstance(module, Int8Linear)):
            missing.append(f"torch, {kind}: torch's int8 does not run on this processor")
        else:
            found.append(("torch", kind, bytes_of(place), runners.Torch(one)))
    for file_format, runtime in _RUNTIMES.items():
        for kind, one in models.items():
            if runtime == "executorch" and kind == "int8 static":
                continue  # the same file as the dynamic one: XNNPACK takes the scale from each row in any case
            say(f"writing {kind} for {runtime}")
            path = folder / f"{runtime}-{kind.replace(' ', '-')}{runners.SUFFIX[file_format]}"
            try:
                runners.write(file_format, one, series, path)
                run = runners.RUNNERS[file_format](path, threads)
            except ImportError as error:
                missing.append(f"{runtime}: {error}")
                break
            except NotWrittenError as error:
                missing.append(f"{runtime}, {kind}: {str(error).partition(' was not written: ')[2] or error}")
                continue
            found.append((runtime, kind, path.stat().st_size, run))
    return found, missing


def _timed(model: SequenceClassifier, series: Series | None) -> list[Tensor]:
    """Series whose latency is taken, evenly out of all."""
    if series is None:
        return runners.made_up(model, [_MADE_UP] * _LATE)
    number = min(_LATE, len(series))
    return [series.values[index * len(series) // number] for index in range(number)]


def _times(runs: Sequence[runners.Runner], timed: list[Tensor], rounds: int) -> list[tuple[float, float | None]]:
    """Seconds for one series alone, and for one of a batch: medians over rounds in which each form has its turn.

    A form that takes one series at a time has no second number.
    """
    alone = [x_LX[None] for x_LX in timed]
    batch = pad((timed * BATCH)[:BATCH])
    latencies: list[list[float]] = [[] for _ in runs]
    batches: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds + 1):  # the first one warms up
        for place, run in enumerate(runs):
            started = time.perf_counter()
            for x_1LX in alone:
                run(x_1LX)
            between = time.perf_counter()
            if run.takes_batches:
                run(*batch)
            if round_:
                latencies[place].append((between - started) / len(alone))
                if run.takes_batches:
                    batches[place].append((time.perf_counter() - between) / BATCH)
    return [
        (statistics.median(late), statistics.median(many) if many else None)
        for late, many in zip(latencies, batches, strict=True)
    ]


def _told(found: list[_Found], times: list[tuple[float, float | None]], series: Series | None) -> list[Form]:
    """What was measured, beside the first form."""
    first_latency, first_batch = times[0]
    assert first_batch is not None
    first_N: Tensor | None = None
    forms = []
    for (runtime, kind, num_bytes, run), (latency, batch) in zip(found, times, strict=True):
        accuracy = num_changed = None
        if series is not None:
            own_N = runners.classes_of(run, series)
            first_N = own_N if first_N is None else first_N
            num_changed = int((own_N != first_N).sum())
            if series.labels is not None:
                accuracy = float((own_N == series.labels).double().mean())
        form = Form(
            runtime=runtime,
            kind=kind,
            bytes=num_bytes,
            latency=latency,
            speed=first_latency / latency,
            throughput=None if batch is None else 1 / batch,
            batch_speed=None if batch is None else first_batch / batch,
            accuracy=accuracy,
            num_changed=num_changed,
        )
        forms.append(form)
    return forms


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _machine() -> dict[str, str]:
    """The processor's name, and versions."""
    told = {"processor": processor(), "system": platform.system(), "python": platform.python_version()}
    for name in ("torch", *_RUNTIMES.values()):
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            continue
    return told
