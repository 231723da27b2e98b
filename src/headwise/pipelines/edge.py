"""From a trained classifier to a file on a small machine: make it int8, and write it for another runtime.

Axis letters: B batch, L positions, N series, X channels, Y classes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise._checks import invalid
from headwise._files import whole
from headwise.data.samples import Series
from headwise.models.classifier import SequenceClassifier
from headwise.models.files import save
from headwise.pipelines import runners
from headwise.pipelines.runners import SUFFIX
from headwise.pipelines.shared import (
    Evaluation,
    bytes_of,
    files_of,
    int8_of,
    known_report,
    load_classifier,
    load_float,
    logits_of,
    made_folder,
    num_learnt,
    read_fitting,
    read_labelled,
    same_time,
    scored,
)
from headwise.quant.quantize import report

_KEPT = ("data", "data_sha256", "trained_on", "seed", "epochs")  # of the report of the training
_TRIED = 500  # series of a file that an exported model is run on beside torch


@dataclass(frozen=True)
class Quantization:
    """What became of a classifier in int8.

    Attributes:
        kind: "static" with calibration, "dynamic" without.
        num_int8: linears that were turned.
        num_float: linears that were not.
        num_calibration: series of the calibration; 0 without.
        float_bytes: of the files of the model, `config.json` and the weights.
        int8_bytes: of the files of the int8 model.
        before: scores of the float model; None without labels to score by.
        after: scores of the int8 model on the same series.
        num_series: series that both models were run on.
        num_changed: those of them that int8 names otherwise.
        measured_on: the file that these are from; None: there was none.
        files: what was written.
        equalized: ranges were spread evenly over channels first.
        weight_bits: 8, or 7 with weights of reduced range.
    """

    kind: str
    num_int8: int
    num_float: int
    num_calibration: int
    float_bytes: int
    int8_bytes: int
    before: Evaluation | None
    after: Evaluation | None
    num_series: int
    num_changed: int
    measured_on: str | None
    files: tuple[Path, ...]
    equalized: bool = False
    weight_bits: int = 8


@dataclass(frozen=True)
class Exported:
    """A classifier as a file for another runtime.

    Attributes:
        format: "onnx" or "executorch".
        report: of the exporter, which ran the file beside the model.
        says: what a program that runs the file needs to know: classes, channels, time, inputs and output.
        num_series: series of the data file that the written file was run on, each alone; 0 without a data file.
        num_changed: those of them that it names otherwise than the model.
        files: what was written; beside a .pte file, which has no place for it, `says` as JSON.
    """

    format: str
    report: Any
    says: dict[str, Any]
    num_series: int
    num_changed: int
    files: tuple[Path, ...]


def quantize_classifier(
    directory: str | os.PathLike[str],
    output: Path,
    *,
    data: str | os.PathLike[str] | None = None,
    test: str | os.PathLike[str] | None = None,
    equalize: bool = False,
    reduce_range: bool = False,
) -> Quantization:
    """Make a saved classifier int8, say what that did to it, and save it.

    Args:
        directory: where `train_classifier` or `headwise.save` put the float model.
        output: another folder, for the int8 model, made if needed; a model that it holds is replaced at the end.
        data: a .ts or .csv file of series like those to come, as calibration: inputs get fixed scales (static).
            None: each call takes its own (dynamic).
        test: a file of labelled series to score both models by. None: `data`, if it has labels.
        equalize: spread ranges evenly over channels first, as `headwise.quantize` does it.
        reduce_range: weights of 7 bits, for x86 processors without VNNI.

    Returns:
        What was turned, sizes and scores before and after. Of a `data` without labels, how many series change class.

    Raises:
        ImportError: safetensors is missing.
        OSError: a file could not be written; what stood there before still does.
        ValueError: no model there, one that is int8 already or not float32, a file that is not as it should be, values
            so great that the model overflows, or an `output` that cannot be made or written to, or is `directory`.
    """
    function = "quantize_classifier"
    model = load_float(function, directory, "hold a float model; quantize the model that training wrote")
    if output.resolve() == Path(directory).resolve():
        raise invalid(function, "output", "be another folder than the float model's, which stays", output)
    path = output / "report.json"
    if path.exists() and not path.is_file():
        raise invalid(function, "output", "be a folder in which report.json can be written", output)
    calibration = None if data is None else read_fitting(function, model, data)
    tested, measured_on = calibration, data
    if test is not None:
        tested, measured_on = read_labelled(function, test, model.class_names, model.channel_names), test
        same_time(function, model, tested, test)
    learnt = 0
    if tested is not None and measured_on is not None:
        learnt = num_learnt(Path(directory), measured_on, len(tested))
    with made_folder(function, output):
        small = int8_of(model, calibration, equalize=equalize, reduce_range=reduce_range)
        before, after, num_changed = _beside(function, model, small, tested, learnt)
        made = report(small)
        with tempfile.TemporaryDirectory() as folder:
            first = save(small, Path(folder, "int8"))
            names, int8_bytes = [file.name for file in files_of(first)], bytes_of(first)
        found = Quantization(
            kind=made.kind,
            num_int8=made.num_int8,
            num_float=made.num_float,
            num_calibration=0 if calibration is None else len(calibration),
            float_bytes=bytes_of(Path(directory)),
            int8_bytes=int8_bytes,
            before=before,
            after=after,
            num_series=0 if tested is None else len(tested),
            num_changed=num_changed,
            measured_on=None if measured_on is None else os.fspath(measured_on),
            files=(*(output / name for name in names), path),
            equalized=equalize,
            weight_bits=made.weight_bits,
        )
        _write(Path(directory), small, found)
        return found


def export_classifier(
    directory: str | os.PathLike[str],
    output: Path,
    *,
    file_format: str | None = None,
    data: str | os.PathLike[str] | None = None,
) -> Exported:
    """Write a saved classifier, float or int8, as a file for another runtime, and run the file beside it.

    An ONNX file takes `x` (B, L, X) float32 and `padding_mask` (B, L) bool, True = padding, and gives `logits` (B, Y).
    All that the model does to a series is inside: scales of the channels, strides, pooling over what is real. A
    program needs no more than what `says` holds, which is in the file as metadata under the key "headwise". A .pte file
    takes one series (1, L, X) and no mask; `says` is a JSON file beside it.

    Args:
        directory: where `train_classifier`, `quantize_classifier` or `headwise.save` put the model.
        output: the file, `.onnx` or `.pte`, in a folder that exists. A file that is there is replaced at the end.
        file_format: "onnx" or "executorch". None: by the suffix.
        data: a .ts or .csv file of series; the file is tried on 500 of them at most. None: on made-up series alone.

    Returns:
        The exporter's report, and what else was found and written.

    Raises:
        ImportError: safetensors is missing, or what the format needs.
        OSError: the file could not be written; what stood there before still does.
        RuntimeError: the file does not give what the model gives; it was not written (`NotWrittenError`).
        ValueError: no model there, a data file that is not as it should be, or an `output` that cannot be.
    """
    function = "export_classifier"
    kind = _format(function, output, file_format)
    if not output.parent.is_dir():
        raise invalid(function, "output", "be a file in a folder that exists", output)
    for path in (output, *runners.beside(output, kind)):
        if path.exists() and not path.is_file():  # a device neither: what is written is read again, and tried
            raise invalid(function, "output", "be a file that can be written", f"{path}, which is something else")
    model = load_classifier(function, directory)
    series = None if data is None else read_fitting(function, model, data)
    tried = None if series is None else series.subset(range(min(len(series), _TRIED)))
    if tried is not None:  # where the model overflows, it is not the file's fault
        # Each series alone, as the file is run: in a dynamic model a batch has one range
        wanted_N = logits_of(function, model, tried, at_once=1).argmax(-1)
    made, says, files = runners.write(kind, model, series, output)
    num_series, num_changed = 0, 0
    if tried is not None:
        got_N = runners.classes_of(runners.RUNNERS[kind](output, 1), tried)
        num_series, num_changed = len(tried), int((got_N != wanted_N).sum())
    return Exported(kind, made, says, num_series, num_changed, files)


def _format(function: str, output: Path, given: str | None) -> str:
    suffix = output.suffix.lower()
    if given is None:
        found = [name for name, own in SUFFIX.items() if own == suffix]
        if not found:
            raise invalid(function, "output", f"end in {' or '.join(SUFFIX.values())}; or give --format", output)
        return found[0]
    if given not in SUFFIX:
        raise invalid(function, "file_format", f"be one of {list(SUFFIX)}", repr(given))
    if suffix in SUFFIX.values() and suffix != SUFFIX[given]:
        raise invalid(function, "output", f"end in {SUFFIX[given]}, as the format is {given}", output)
    return given


def _beside(
    function: str, model: SequenceClassifier, small: SequenceClassifier, series: Series | None, learnt: int
) -> tuple[Evaluation | None, Evaluation | None, int]:
    """Scores of both, where there are labels, and how many series get another class."""
    if series is None:
        return None, None, 0
    logits_NY, small_NY = logits_of(function, model, series), logits_of(function, small, series)
    num_changed = int((logits_NY.argmax(-1) != small_NY.argmax(-1)).sum())
    if series.labels is None:
        return None, None, num_changed
    before, after = (scored(model.class_names, one_NY, series, learnt) for one_NY in (logits_NY, small_NY))
    return before, after, num_changed


def _write(directory: Path, small: SequenceClassifier, found: Quantization) -> None:
    """The model and, beside it, what was done and what is known of its training, so that `evaluate` knows that too.

    The report gets its name last, but all of it is on the disk before anything of an older model is replaced.
    """
    _, weights, path = found.files
    known: dict[str, Any] = known_report(directory) or {}
    told: dict[str, Any] = {key: known[key] for key in _KEPT if key in known}
    told |= {"weights": weights.name, "quantized_from": os.fspath(directory), **dataclasses.asdict(found)}
    del told["files"]
    with whole(path) as part:
        part.write_text(json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        save(small, path.parent)
