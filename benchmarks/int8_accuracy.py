"""`python -m benchmarks.int8_accuracy`: what int8 costs in accuracy, and what wins it back.

The classifier of `headwise demo` on the utterances that ship with headwise (270 to train on, 370 to test), as it is,
and with outliers planted in its weights; after training, trained on with rounding, and equalized.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import headwise
from benchmarks.harness import machine, save
from headwise.data.samples import collate, japanese_vowels
from headwise.models.classifier import SequenceClassifier
from headwise.pipelines.classify import fit
from headwise.pipelines.shared import BATCH, logits_of, padded_batches
from headwise.quant import equalize

TRAIN, TEST = japanese_vowels()
FACTOR, CHANNELS = 300.0, 3


@dataclass(frozen=True)
class Tuning:
    """How a model is trained on with rounding: AdamW, the rate falls to 0 in a line."""

    epochs: int
    rate: float


@dataclass(frozen=True)
class Row:
    """One int8 model over the test series.

    Attributes:
        name: how it was made.
        right: of the 370.
        flips: series that it names otherwise than the float model that all began with.
        own_flips: than the fake-quantized model that it was converted from; None: it was not trained.
        error: of the logits against that float model, relative: |a - b| / |b|.
        own_error: against that fake-quantized one.
    """

    name: str
    right: int
    flips: int
    own_flips: int | None
    error: float
    own_error: float | None


BENIGN, SPIKED = Tuning(3, 1e-5), Tuning(20, 1e-3)


_AS_IT_IS = (
    "{machine}. JapaneseVowels, "
    f"{len(TRAIN)} series to train on, {len(TEST)} to test. Errors are the worst of "
    "{seeds} seeds. "
    f"QAT: {BENIGN.epochs} epochs from the float model, AdamW, rate {BENIGN.rate:g} falling to 0."
)
_WITH_OUTLIERS = (
    f"The same classifier with ReLU, and {CHANNELS} channels of each (v_proj, out_proj) and (linear1, linear2) made "
    f"{FACTOR:g} times as great before and as small after, which changes nothing in float. QAT: "
    f"{SPIKED.epochs} epochs, rate {SPIKED.rate:g}, chosen on the first seed of these tests; equalized, as above. "
    "*Won back*: of what static int8 lost, the mean over seeds."
)
_SHOWS = (
    "The outliers are just what equalization undoes: the case shows that the mechanism works, not what a typical model "
    "gains; as it is, this one loses nothing. Training finds a way by itself, but not back to the same function: its "
    "logits are others."
)


def trained(seed: int, epochs: int = 30, activation: str = "gelu") -> SequenceClassifier:
    """The float model, as `headwise demo` trains it."""
    return fit("int8_accuracy", TRAIN, seed, epochs, activation=activation)


def tuned(model: SequenceClassifier, tuning: Tuning, seed: int) -> SequenceClassifier:
    """A copy of it, prepared and trained on; in eval mode."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, headwise.MultiheadAttention):
            module.split_projections()  # here, so that prepare_qat has nothing to warn of
    headwise.prepare_qat(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tuning.rate, weight_decay=0.05)
    batches = DataLoader(TRAIN, batch_size=BATCH, shuffle=True, collate_fn=collate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, tuning.epochs * len(batches))
    model.train()
    for _ in range(tuning.epochs):
        for values_BLX, padding_BL, labels_B in batches:
            loss = F.cross_entropy(model(values_BLX, padding_BL), labels_B, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def with_outliers(model: SequenceClassifier, seed: int) -> SequenceClassifier:
    """The same function with some channels 300 times as great between v_proj and out_proj, linear1 and linear2."""
    model, draws = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in model.encoder.layers:
            attention = block.self_attn.split_projections()
            pairs = [(attention.v_proj, attention.out_proj)]
            if block.activation is F.relu:
                pairs.append((block.linear1, block.linear2))
            for first, second in pairs:
                chosen = torch.randperm(first.out_features, generator=draws)[:CHANNELS]
                first.weight[chosen] *= FACTOR
                first.bias[chosen] *= FACTOR
                second.weight[:, chosen] /= FACTOR
    return model


def calibration() -> list[tuple[Tensor, Tensor]]:
    """The training series, as the model is called with them."""
    return list(padded_batches(TRAIN))


def logits(model: SequenceClassifier) -> Tensor:
    """Of all test series, (370, 9)."""
    return logits_of("int8_accuracy", model, TEST)


def right(logits_NY: Tensor) -> int:
    """How many test series are named right."""
    return int((logits_NY.argmax(-1) == TEST.labels).sum())


def row(name: str, model: SequenceClassifier, began_NY: Tensor, own_NY: Tensor | None = None) -> Row:
    """Measure one int8 model."""
    found_NY = logits(model)
    other = [began_NY] if own_NY is None else [began_NY, own_NY]
    flips = [int((found_NY.argmax(-1) != one.argmax(-1)).sum()) for one in other]
    errors = [float((found_NY - one).norm() / one.norm()) for one in other]
    own = (None, None) if own_NY is None else (flips[1], errors[1])
    return Row(name, right(found_NY), flips[0], own[0], errors[0], own[1])


def after_training(model: SequenceClassifier, began_NY: Tensor, even: bool = False) -> list[Row]:
    """The rows of a model that was trained without rounding."""
    name = "equalized, " if even else ""
    return [
        row(f"{name}dynamic", headwise.quantize(model, equalize=even), began_NY),
        row(f"{name}static", headwise.quantize(model, calibration(), equalize=even), began_NY),
    ]


def by_training(name: str, model: SequenceClassifier, began_NY: Tensor, tuning: Tuning, seed: int) -> list[Row]:
    """The rows of one that is trained on with rounding."""
    fake = tuned(model, tuning, seed)
    own_NY = logits(fake)
    return [
        row(name, headwise.convert(fake), began_NY, own_NY),
        row(f"{name}, dynamic", headwise.convert(fake, dynamic=True), began_NY, own_NY),
    ]


def ordinary(model: SequenceClassifier, seed: int, tuning: Tuning = BENIGN) -> tuple[int, list[Row]]:
    """A model as it is: how many test series it names right in float, and the rows."""
    began_NY = logits(model)
    return right(began_NY), [*after_training(model, began_NY), *by_training("QAT", model, began_NY, tuning, seed)]


def outliers(model: SequenceClassifier, seed: int, tuning: Tuning = SPIKED) -> tuple[int, list[Row]]:
    """The same of a model with ReLU, with outliers."""
    model = with_outliers(model, seed)
    began_NY = logits(model)
    rows = [*after_training(model, began_NY), *after_training(model, began_NY, even=True)]
    rows += by_training("QAT", model, began_NY, tuning, seed)
    rows += by_training("equalized, QAT", equalize(copy.deepcopy(model)), began_NY, BENIGN, seed)
    return right(began_NY), rows


def table(title: str, runs: list[tuple[int, list[Row]]]) -> list[str]:
    """Rows of one case, each with all seeds."""
    lines = [
        f"| {title} | accuracy, by seed | won back | flips against float | logit error | against its own QAT |",
        "|---|---|---|---|---|---|",
        f"| float | {' '.join(_percent(number) for number, _ in runs)} | | | | |",
    ]
    lost = [number - found[1].right for number, found in runs]
    for rows in zip(*(rows for _, rows in runs), strict=True):
        each = zip(runs, rows, lost, strict=True)
        shares = [1 - (number - one.right) / gap for (number, _), one, gap in each if gap > 9]
        own = [one.own_error for one in rows if one.own_error is not None]
        lines.append(
            f"| {rows[0].name} | {' '.join(_percent(one.right) for one in rows)} "
            f"| {f'{sum(shares) / len(shares):.0%}' if shares else ''} "
            f"| {' '.join(str(one.flips) for one in rows)} | {max(one.error for one in rows):.1%} "
            f"| {' '.join(str(one.own_flips) for one in rows) + f', {max(own):.2%}' if own else ''} |"
        )
    return lines


def _percent(number: int) -> str:
    return f"{number / len(TEST):.2%}"


def main() -> int:
    """Train, print, and save on request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8_accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/int8-accuracy-DATE.md too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for job, activation in ((ordinary, "gelu"), (outliers, "relu")):
        for seed in range(args.seeds):
            runs.append(job(trained(seed, activation=activation), seed))
            print(f"{job.__name__}, seed {seed}: {runs[-1]}", file=sys.stderr)
    lines = ["# int8 and accuracy", "", _AS_IT_IS.format(machine=machine(), seeds=args.seeds), ""]
    lines += [*table("as it is", runs[: args.seeds]), "", _WITH_OUTLIERS, ""]
    lines += [*table("with outliers", runs[args.seeds :]), "", _SHOWS]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.save:
        save(f"int8-accuracy-{datetime.date.today()}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
