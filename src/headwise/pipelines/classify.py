"""Classifiers of time series: train, test, predict, look inside.

Axis letters: B batch, H heads, L positions, P positions that attend, X channels, Y classes.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from headwise._checks import invalid, need
from headwise._files import whole
from headwise.data.samples import Series, collate, japanese_vowels
from headwise.data.timeseries import read_series
from headwise.models.classifier import SequenceClassifier, SeriesEmbedding
from headwise.models.files import save
from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.merge import merged
from headwise.observe.monitor import watch
from headwise.observe.snapshot import Snapshot
from headwise.pipelines.shared import (
    BATCH,
    Evaluation,
    files_of,
    load_classifier,
    logits_of,
    made_folder,
    num_learnt,
    read_labelled,
    same_time,
    scored,
    sha256_of,
    threads_for,
)

_MOST_POSITIONS = 128  # longer series are cut into strides, as attention costs the square
_HELD_OUT = 0.2


class Progress(NamedTuple):
    """Where a training stands, after an epoch.

    Attributes:
        epoch: passes over the training data done, from 1.
        epochs: passes to do.
        loss: mean cross entropy over the training data in this pass, with label smoothing 0.1.
        accuracy: the share of the training data named right in this pass, 0 to 1, with dropout on.
    """

    epoch: int
    epochs: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class TrainResult:
    """What a training reached and wrote.

    Attributes:
        evaluation: on the test data, measured once, after training.
        tested_on: what that data was: the test file, or "a fifth of each class, held out".
        parameters: the number of the model's trained values.
        epochs: passes over the training data.
        seconds: wall-clock time of the whole job.
        seed: the seed that was used; with it, the same machine gives the same model again.
        num_train: series it was trained on.
        files: what was written.
        attention: what each head does over the test data, in numbers; None: not looked at, as after
            `train_classifier`, where `inspect_attention` looks.
    """

    evaluation: Evaluation
    tested_on: str
    parameters: int
    epochs: int
    seconds: float
    seed: int
    num_train: int
    files: tuple[Path, ...]
    attention: Snapshot | None = None


@dataclass(frozen=True)
class Prediction:
    """What a model says of one series.

    Attributes:
        series: its name in the file, or its number counted from 0 where the file has no names.
        predicted: the class with the highest probability.
        probability: of that class, 0 to 1. A softmax of the logits: not calibrated.
        probabilities: of every class, by name.
    """

    series: str
    predicted: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class Inspection:
    """What the heads of a model do with the series of a file.

    Attributes:
        num_series: N.
        snapshot: statistics of each layer and head over every step of all of them.
        files: what was written.
    """

    num_series: int
    snapshot: Snapshot
    files: tuple[Path, ...]


def demo(
    output: Path, *, seed: int = 0, epochs: int = 30, progress: Callable[[Progress], None] | None = None
) -> TrainResult:
    """Train a classifier of real speech, test it, save it, load it again, and show what its heads attend to.

    270 utterances of nine speakers train it, 370 from other occasions test it; the data is in the package, nothing is
    downloaded. Takes well under a minute in one thread of the CPU, and leaves torch's global random state as it was.

    Args:
        output: the folder to write to, made if needed: the model into `model`, `attention.png` and `attention.html`.
        seed: decides the initial weights, the order of the batches and dropout.
        epochs: passes over the training split.
        progress: called after each epoch.

    Returns:
        The scores on the test split, what each head does over it, how long it took and what was written.

    Raises:
        ImportError: matplotlib or safetensors is missing; nothing was trained yet.
        OSError: a file could not be written; what stood there before still does.
        RuntimeError: the model that was loaded again does not give the same logits to the bit.
        ValueError: `output` cannot be made, `seed` is not in [0, 2**63) or `epochs` is less than 1.
    """
    started = time.perf_counter()
    need("matplotlib", "observe")  # before the training, not after it
    need("safetensors.torch", "models")
    train, test = japanese_vowels()
    with made_folder("demo", output):
        model = fit("demo", train, seed, epochs, progress)
        logits_NY = logits_of("demo", model, test)
        save(model, output / "model")
        again = load_classifier("demo", output / "model")
        if not torch.equal(logits_of("demo", again, test), logits_NY):
            raise RuntimeError("demo: the model that was saved and loaded again gives other logits")
        # The longest utterance shows most, so it is the picture; the page has one utterance of each speaker.
        longest = max(range(len(test)), key=lambda index: len(test.values[index]))
        maps = _attention_maps(again, test, [longest, *_one_of_each_class(test)], logits_NY)
        pictures = heatmap(maps[0], output / "attention.png"), heatmap(maps, output / "attention.html")
        attention = _watched(again, test)
        result = _report(
            model,
            output / "model",
            train,
            evaluation=scored(model.class_names, logits_NY, test),
            tested_on="the official test split",
            epochs=epochs,
            seed=seed,
            started=started,
        )
        return dataclasses.replace(result, files=(*result.files, *pictures), attention=attention)


def train_classifier(
    data: str | os.PathLike[str],
    output: Path,
    *,
    test: str | os.PathLike[str] | None = None,
    seed: int = 0,
    epochs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TrainResult:
    """Train a classifier on a file of labelled time series, test it and save it.

    Args:
        data: a .ts or .csv file, as `headwise.data.timeseries.read_series` reads it.
        output: the folder for the model, made if needed; a model that it holds is replaced at the end.
        test: a file of the same kind, which is only tested on. None: a fifth of each class in `data` is held out.
        seed: decides the split, the initial weights, the order of the batches and dropout.
        epochs: passes over the training data. None: 30, or as many as 400 steps need.
        progress: called after each epoch.

    Returns:
        The scores on the test data, how long it took and what was written: the model and `report.json`.

    Raises:
        ImportError: safetensors is missing; nothing was trained yet.
        OSError: a file could not be written; the folder holds the old model or the new one.
        ValueError: a file is not as it should be (which one, where and the cure), there are no labels, fewer than two
            classes, nothing to hold out, `output` cannot be made, `seed` is not in [0, 2**63), `epochs` is less than 1,
            or the loss is no longer a number.
    """
    started = time.perf_counter()
    need("safetensors.torch", "models")
    given = read_series(data)
    if given.labels is None or len(given.labels.unique()) < 2:
        got = "none" if given.labels is None else f"one class, {given.class_names[int(given.labels[0])]!r}"
        raise invalid("train_classifier", "data", "hold labelled series of at least two classes", f"{got}, in {data}")
    if test is None:
        train, held_out = _split(given, seed)
        tested_on = "a fifth of each class, held out"
    else:
        train, held_out = given, read_labelled("train_classifier", test, given.class_names, given.channel_names)
        tested_on = f"{test}"
    if epochs is None:
        epochs = max(30, -(-400 * BATCH // len(train)))
    with made_folder("train_classifier", output):
        model = fit("train_classifier", train, seed, epochs, progress)
        evaluation = scored(model.class_names, logits_of("train_classifier", model, held_out), held_out)
        save(model, output)
        return _report(
            model,
            output,
            train,
            data=data,
            evaluation=evaluation,
            tested_on=tested_on,
            epochs=epochs,
            seed=seed,
            started=started,
        )


def evaluate(directory: str | os.PathLike[str], data: str | os.PathLike[str]) -> Evaluation:
    """Test a saved classifier on a file of labelled time series.

    Args:
        directory: where `train_classifier` or `headwise.save` put the model.
        data: a .ts or .csv file with the channels and classes of the training.

    Returns:
        Its scores.

    Raises:
        ImportError: safetensors is missing.
        ValueError: no model there, or a file that is not as it should be or has no labels.
    """
    model = load_classifier("evaluate", directory)
    series = read_labelled("evaluate", data, model.class_names, model.channel_names)
    same_time("evaluate", model, series, data)
    logits_NY = logits_of("evaluate", model, series)
    return scored(model.class_names, logits_NY, series, num_learnt(Path(directory), data, len(series)))


def predict(
    directory: str | os.PathLike[str], data: str | os.PathLike[str], output: Path | None = None
) -> list[Prediction]:
    """Name the class of each time series in a file.

    Args:
        directory: where `train_classifier` or `headwise.save` put the model.
        data: a .ts or .csv file with the channels of the training; labels are not needed and not used.
        output: a file to write them to as CSV: series, predicted, probability, and a column `p(CLASS)` for each class.

    Returns:
        One prediction a series, in the file's order.

    Raises:
        ImportError: safetensors is missing.
        OSError: `output` could not be written; what stood there before still does.
        ValueError: no model there, a file that is not as it should be, values so great that the model overflows, or an
            `output` that is a folder or in none.
    """
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise invalid("predict", "output", "be a file in a folder that exists", output)
    model = load_classifier("predict", directory)
    series = read_series(data, channel_names=model.channel_names)
    same_time("predict", model, series, data)
    predictions = []
    probabilities_NY = logits_of("predict", model, series).softmax(-1).tolist()
    for name, probability_Y in zip(series.names, probabilities_NY, strict=True):
        by_name = dict(zip(model.class_names, probability_Y, strict=True))
        predicted = max(by_name, key=by_name.__getitem__)
        predictions.append(Prediction(name, predicted, by_name[predicted], by_name))
    if output is not None:
        with whole(output) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["series", "predicted", "probability", *(f"p({name})" for name in model.class_names)])
            for one in predictions:
                writer.writerow([one.series, one.predicted, one.probability, *one.probabilities.values()])
    return predictions


def draw_attention(
    directory: str | os.PathLike[str],
    data: str | os.PathLike[str],
    output: Path,
    *,
    series: Sequence[str] = (),
) -> tuple[Path, ...]:
    """Draw what each head of a saved classifier attends to in some time series of a file.

    Args:
        directory: where `train_classifier` or `headwise.save` put the model.
        data: a .ts or .csv file with the channels of the training; labels are shown if there are any.
        output: the folder for `attention.html`, one page of all of them, and `attention-NAME.png`, one of each.
        series: names of the series; where the file has none, their numbers counted from 0. None given: the first of
            each class if the file has labels, else the first; six at most.

    Returns:
        What was written, the page first.

    Raises:
        ImportError: safetensors or matplotlib is missing.
        OSError: a file could not be written.
        ValueError: no model there, a file that is not as it should be, an unknown series, `output` cannot be made.
    """
    need("matplotlib", "observe")
    model, _, chosen = _to_look_at("draw_attention", directory, data, series)
    maps = _attention_maps(model, chosen, range(len(chosen)), logits_of("draw_attention", model, chosen))
    with made_folder("draw_attention", output):
        files = [heatmap(maps, output / "attention.html")]
        taken: set[str] = set()
        for name, one in zip(chosen.names, maps, strict=True):
            safe = unique = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:60]
            number = 1
            while unique.lower() in taken:  # some file systems do not tell A from a
                number += 1
                unique = f"{safe}-{number}"
            taken.add(unique.lower())
            files.append(heatmap(one, output / f"attention-{unique}.png"))
    return tuple(files)


def inspect_attention(
    directory: str | os.PathLike[str],
    data: str | os.PathLike[str],
    output: Path | None = None,
    *,
    series: Sequence[str] = (),
) -> Inspection:
    """Measure what each head of a saved classifier does with all the time series of a file, every step of each.

    Args:
        directory: where `train_classifier` or `headwise.save` put the model.
        data: a .ts or .csv file with the channels of the training; labels are not used but in titles.
        output: the folder for `attention.html`, the page that `draw_attention` makes too. None: nothing is written.
        series: names of the series on the page, as in `draw_attention`; the numbers are of all series.

    Returns:
        The numbers, and what was written.

    Raises:
        ImportError: safetensors is missing.
        OSError: the page could not be written.
        ValueError: no model there, a file that is not as it should be, an unknown series, values so great that the
            model overflows, or `output` cannot be made.
    """
    function = "inspect_attention"
    model, given, chosen = _to_look_at(function, directory, data, series)
    logits_NY = logits_of(function, model, given)  # all of them: an overflow has a name then
    if output is None:
        return Inspection(len(given), _watched(model, given), ())
    with made_folder(function, output):
        snapshot = _watched(model, given)
        shown = [given.names.index(name) for name in chosen.names]
        page = heatmap(_attention_maps(model, given, shown, logits_NY), output / "attention.html")
    return Inspection(len(given), snapshot, (page,))


def _to_look_at(
    function: str, directory: str | os.PathLike[str], data: str | os.PathLike[str], names: Sequence[str]
) -> tuple[SequenceClassifier, Series, Series]:
    """A model, all series of a file, and those of them that are to be drawn."""
    model = load_classifier(function, directory)
    given = read_series(data, channel_names=model.channel_names)
    unknown = [name for name in names if name not in given.names]
    if unknown:
        known = f"{given.names[0]!r} to {given.names[-1]!r}"
        raise invalid(function, "series", f"be names of the {len(given)} series in {data}, {known}", unknown)
    same_time(function, model, given, data)
    indices = [given.names.index(name) for name in dict.fromkeys(names)]
    if not indices:
        indices = ([0] if given.labels is None else _one_of_each_class(given))[:6]
    return model, given, given.subset(indices)


def _watched(model: SequenceClassifier, series: Series) -> Snapshot:
    """What each head does, every row of each series.

    A monitor for each: its readings are of late forwards and of one sample of a batch, and here all count.
    """
    seen = []
    with threads_for(series, at_once=1), torch.inference_mode():
        for values_LX in series.values:
            with watch(model, budget=math.inf, rows=-(-len(values_LX) // model.stride)) as monitor:
                model(values_LX[None])
            seen.append(monitor.snapshot())
    return merged(seen)


def fit(
    function: str,
    train: Series,
    seed: int,
    epochs: int,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> SequenceClassifier:
    """Train a classifier whose sizes fit the data, with other options of its constructor; returned in eval mode."""
    if not 0 <= seed < 2**63:
        raise invalid(function, "seed", "lie in [0, 2**63)", seed)
    if epochs < 1:
        raise invalid(function, "epochs", "be at least 1", epochs)
    stride = -(-max(map(len, train.values)) // _MOST_POSITIONS)
    with threads_for(train), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: `torch.manual_seed` would reseed every GPU as well
        model = SequenceClassifier(
            len(train.class_names),
            num_channels=train.num_channels,
            kernel_size=1 if stride == 1 else 2 * stride + 1,
            stride=stride,
            class_names=train.class_names,
            channel_names=train.channel_names,
            interval=train.interval,
            unit=train.unit,
            **options,
        )
        assert isinstance(model.embedding, SeriesEmbedding)
        model.embedding.fit_scale(train.values)
        batches = DataLoader(train, batch_size=BATCH, shuffle=True, collate_fn=collate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=epochs * len(batches))
        model.train()
        for epoch in range(1, epochs + 1):
            num_right, total_loss = 0, 0.0
            for values_BLX, padding_BL, labels_B in batches:
                logits_BY = model(values_BLX, padding_BL)
                loss = F.cross_entropy(logits_BY, labels_B, label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                num_right += int((logits_BY.argmax(-1) == labels_B).sum())
                total_loss += float(loss.detach()) * len(labels_B)
            if not total_loss < float("inf"):
                raise invalid(function, "data", "give a finite loss; are there absurd values in it?", total_loss)
            if progress is not None:
                progress(Progress(epoch, epochs, total_loss / len(train), num_right / len(train)))
    return model.eval()


def _attention_maps(
    model: SequenceClassifier, series: Series, indices: Sequence[int], logits_NY: Tensor
) -> list[AttentionMap]:
    """What `heatmap` draws for some of the series, each run alone: without padding there is nothing to cut off."""
    maps = []
    for index in indices:
        values_LX = series.values[index]
        with threads_for(series), torch.inference_mode():
            _, weights = model(values_LX[None], need_weights=True)
        said = f"predicted {model.class_names[int(logits_NY[index].argmax())]}"
        if series.labels is not None:
            said = f"true class {series.class_names[int(series.labels[index])]}, {said}"
        maps.append(
            AttentionMap(
                [weights_BHPP[0] for weights_BHPP in weights],
                title=f"Attention in series {series.names[index]}: {said}",
                signal=values_LX,
                channel_names=series.channel_names,
                stride=model.stride,
                interval=series.interval,
                unit=series.unit,
            )
        )
    return maps


def _one_of_each_class(series: Series) -> list[int]:
    """The first series of each class that has one, in the order of the classes."""
    labels = [] if series.labels is None else series.labels.tolist()
    return [labels.index(label) for label in range(len(series.class_names)) if label in labels]


def _split(series: Series, seed: int) -> tuple[Series, Series]:
    """Hold out a fifth of each class, at least one series where there are two."""
    assert series.labels is not None
    generator = torch.Generator().manual_seed(seed)
    held_out: set[int] = set()
    for label in series.labels.unique().tolist():
        members_N = (series.labels == label).nonzero().flatten()
        number = max(round(_HELD_OUT * len(members_N)), 1) if len(members_N) > 1 else 0
        held_out.update(members_N[torch.randperm(len(members_N), generator=generator)[:number]].tolist())
    if not held_out:
        rule = "hold a class with at least two series, so that one can be held out; or give a test file (--test FILE)"
        raise invalid("train_classifier", "data", rule, f"{len(series)} series, each of its own class")
    kept = [index for index in range(len(series)) if index not in held_out]
    return series.subset(kept), series.subset(sorted(held_out))


def _report(
    model: SequenceClassifier,
    directory: Path,
    train: Series,
    *,
    data: str | os.PathLike[str] | None = None,
    evaluation: Evaluation,
    tested_on: str,
    epochs: int,
    seed: int,
    started: float,
) -> TrainResult:
    """Sum a training up, and write what `evaluate` and a person want to know of it beside the model that came of it."""
    (config, weights), path = files_of(directory), directory / "report.json"
    result = TrainResult(
        evaluation=evaluation,
        tested_on=tested_on,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=epochs,
        seconds=time.perf_counter() - started,
        seed=seed,
        num_train=len(train),
        files=(config, weights, path),
    )
    report = dataclasses.asdict(result)
    del report["files"], report["attention"]
    report |= {"weights": weights.name, "data": None if data is None else os.fspath(data)}
    report |= {"data_sha256": None if data is None else sha256_of(data), "trained_on": list(train.names)}
    with whole(path) as part:
        part.write_text(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return result
