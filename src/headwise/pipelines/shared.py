"""What several jobs need: reading and checking a model and its data, scores, folders. Axis letters as in `classify`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.data.samples import Series, pad
from headwise.data.timeseries import read_series
from headwise.models.classifier import SequenceClassifier
from headwise.models.files import load, weights_of
from headwise.quant.backends import REFERENCE, X86
from headwise.quant.linear import Int8Linear
from headwise.quant.quantize import quantize, report

BATCH = 32  # series a step, in training and after it
_SHORT = 64  # steps of series that one thread computes as fast as two


@dataclass(frozen=True)
class ClassScore:
    """How one class fared.

    Attributes:
        name: of the class.
        num_series: series of this class.
        num_right: how many of them were named so.
        recall: num_right / num_series; None if there is no such series.
        precision: num_right / the number that were named so; None if none was.
    """

    name: str
    num_series: int
    num_right: int
    recall: float | None
    precision: float | None


@dataclass(frozen=True)
class Evaluation:
    """How a model fared on labelled series.

    Attributes:
        accuracy: the share named right, 0 to 1.
        majority: the share that would be right if each were named as the most frequent class here.
        num_series: N.
        classes: one score for each class of the model.
        confusion: Y rows of Y counts: row the true class, column the predicted one.
        num_learnt: how many of these series the model was trained on, as far as is known: the very file that
            `train_classifier` was given is recognised, by its SHA-256.
    """

    accuracy: float
    majority: float
    num_series: int
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    num_learnt: int = 0


def logits_of(function: str, model: SequenceClassifier, series: Series, at_once: int = BATCH) -> Tensor:
    """Logits of all series, (N, Y), a padded batch at a time.

    Raises:
        ValueError: a series overflows in the model; NaN would be counted as the first class.
    """
    with threads_for(series, at_once), torch.inference_mode():
        logits_NY = torch.cat([model(*batch) for batch in padded_batches(series, at_once)])
    if not logits_NY.isfinite().all():
        index = int((~logits_NY.isfinite()).any(1).nonzero()[0])
        greatest = float(series.values[index].abs().max())
        rule = f"hold values that the model can compute with; series {series.names[index]!r} overflows"
        raise invalid(function, "data", rule, f"values up to {greatest:g} there")
    return logits_NY


def scored(class_names: Sequence[str], logits_NY: Tensor, series: Series, num_learnt: int = 0) -> Evaluation:
    assert series.labels is not None
    num_classes = len(class_names)
    pairs_N = series.labels * num_classes + logits_NY.argmax(-1)
    confusion_YY = torch.bincount(pairs_N, minlength=num_classes**2).view(num_classes, num_classes)
    right_Y, true_Y, named_Y = confusion_YY.diag().tolist(), confusion_YY.sum(1).tolist(), confusion_YY.sum(0).tolist()
    return Evaluation(
        accuracy=sum(right_Y) / len(series),
        majority=max(true_Y) / len(series),
        num_series=len(series),
        classes=tuple(
            ClassScore(name, true, right, right / true if true else None, right / named if named else None)
            for name, right, true, named in zip(class_names, right_Y, true_Y, named_Y, strict=True)
        ),
        confusion=tuple(tuple(row) for row in confusion_YY.tolist()),
        num_learnt=num_learnt,
    )


def read_labelled(
    function: str, path: str | os.PathLike[str], class_names: Sequence[str], channel_names: Sequence[str]
) -> Series:
    series = read_series(path, class_names=class_names, channel_names=channel_names)
    if series.labels is None:
        raise invalid(function, "data", "hold a label for each series; `predict` needs none", f"none, in {path}")
    return series


def read_fitting(function: str, model: SequenceClassifier, path: str | os.PathLike[str]) -> Series:
    """Series with the channels and the time of the training, and of its classes where they have labels."""
    series = read_series(path, class_names=model.class_names, channel_names=model.channel_names)
    same_time(function, model, series, path)
    return series


def load_classifier(function: str, directory: str | os.PathLike[str]) -> SequenceClassifier:
    model = load(directory)
    if not isinstance(model, SequenceClassifier) or model.num_channels is None:
        rule = "hold a classifier of time series"
        raise invalid(function, "directory", rule, f"{type(model).__name__}, in {directory}")
    return _able(model)


def load_float(function: str, directory: str | os.PathLike[str], rule: str) -> SequenceClassifier:
    """A classifier that is not int8 yet; `rule` says so, and why or what to do."""
    model = load_classifier(function, directory)
    if report(model).num_int8:
        raise invalid(function, "directory", rule, f"an int8 one, in {directory}")
    return model


def int8_of(
    model: SequenceClassifier, calibration: Series | None, *, equalize: bool = False, reduce_range: bool = False
) -> SequenceClassifier:
    """A copy in int8, static where there are series to calibrate with."""
    # Padding is 0 to the model, and 0 is in every range
    batches = None if calibration is None else padded_batches(calibration)
    small = quantize(model, batches, equalize=equalize, reduce_range=reduce_range)
    assert isinstance(small, SequenceClassifier)
    return _able(small)


def _able(model: SequenceClassifier) -> SequenceClassifier:
    """Let int8 layers compute the same by float arithmetic where torch's own int8 cannot run, on ARM for instance.

    In a program that is the caller's choice; a job is to give its result.
    """
    for module in model.modules():
        if isinstance(module, Int8Linear) and X86.why_not(module.state, module.int_weight.device):
            module.backend = REFERENCE.name
    return model


def same_time(function: str, model: SequenceClassifier, series: Series, data: str | os.PathLike[str]) -> None:
    """Hold that a step is as long as it was in training; the model sees steps, and would not notice."""
    (one, unit), (other, other_unit) = (model.config["interval"], model.config["unit"]), (series.interval, series.unit)
    if "step" not in (unit, other_unit) and (unit != other_unit or abs(one - other) > 0.01 * one):
        rule = f"have a row each {one:g} {unit}, as in training; resample it, or drop the time column"
        raise invalid(function, "data", rule, f"{other:g} {other_unit}, in {data}")


def num_learnt(directory: Path, data: str | os.PathLike[str], num_series: int) -> int:
    """How many of the file's series were trained on, if the report tells."""
    known = known_report(directory) or {}
    try:
        return min(len(known["trained_on"]), num_series) if known["data_sha256"] == sha256_of(data) else 0
    except (OSError, KeyError, TypeError):
        return 0


def known_report(directory: Path) -> dict[str, Any] | None:
    """The `report.json` of the model that is there; None for one of other weights, and for models without."""
    weights = weights_of(directory)
    try:
        report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
        return report if weights is not None and report["weights"] == weights.name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # models that `headwise.save` wrote have none


def files_of(directory: Path) -> tuple[Path, Path]:
    """The files of the model that is there."""
    weights = weights_of(directory)
    assert weights is not None
    return directory / "config.json", weights


def bytes_of(directory: Path) -> int:
    """Their bytes."""
    return sum(path.stat().st_size for path in files_of(directory))


def padded_batches(series: Series, at_once: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """All series in batches, as the model is called with them."""
    return (pad(series.values[first : first + at_once]) for first in range(0, len(series), at_once))


def sha256_of(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def made_folder(function: str, path: Path) -> Iterator[None]:
    """Make a folder for what is to come, and take it away again if nothing came."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(function, "output", "be a folder that can be made", f"{path} ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise invalid(function, "output", "be a folder that can be written to", path)
    try:
        yield
    except BaseException:
        for folder in missing:
            if any(folder.iterdir()):
                break
            folder.rmdir()
        raise


@contextmanager
def in_threads(number: int) -> Iterator[None]:
    """Compute in that many threads; afterwards in as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(series: Series, at_once: int = BATCH) -> AbstractContextManager[None]:
    """Compute short series in one thread: as fast for such batches, and several times faster on a busy machine."""
    return in_threads(1) if max(map(len, series.values)) * at_once <= _SHORT * BATCH else nullcontext()
