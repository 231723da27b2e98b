"""Does attention show why? Time series in which the reason is planted, and known.

600 series of 96 steps and 3 channels train a `headwise.SequenceClassifier`. Each holds one cue: for 6 steps, somewhere,
the valve is open (a step in `valve`), and whether `pressure` rises or falls just then is the class. All else is there
to distract: three such steps of `pressure` while the valve is closed, spikes in `valve`, a wave in `room`, noise.

Then three ways to ask where the reason lies stand beside each other, each measured against the truth: what the heads
attend to, gradients, and occlusion. Run it: `python examples/planted_cue.py --output cue-output`, a minute or two.

Letters: N series, L steps, X channels, Z layers, H heads.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise import AttentionMap, MultiheadAttention, SequenceClassifier, heatmap, save, watch
from headwise.observe.snapshot import Snapshot

STEPS, CUE = 96, 6
CLASSES, CHANNELS = ("falls", "rises"), ("valve", "pressure", "room")
WINDOW = 5  # steps that occlusion hides at a time
CHANCE = CUE / STEPS  # of a step that is picked blindly to lie in the cue


class Data(NamedTuple):
    """Labelled series, and where the cue of each is: from `cue`, `CUE` steps."""

    series: Tensor  # (N, L, X)
    label: Tensor  # (N,) int64
    cue: Tensor  # (N,) int64

    @property
    def inside(self) -> Tensor:
        """(N, L) bool: the steps of the cue."""
        at = torch.arange(STEPS) - self.cue[:, None]
        return (at >= 0) & (at < CUE)


def make(number: int, seed: int) -> Data:
    """Series with one cue each, half of them of each class."""
    generator = torch.Generator().manual_seed(seed)

    def below(end: int, start: int = 0) -> int:
        return int(torch.randint(start, end, (), generator=generator))

    series, labels, cues = 0.5 * torch.randn(number, STEPS, len(CHANNELS), generator=generator), [], []
    for index, x_LX in enumerate(series):
        label = index % 2
        places: list[int] = []
        while len(places) < 4:  # the cue and three steps that mean nothing, apart from each other
            start = below(STEPS - CUE - 2, 2)
            if all(abs(start - other) > CUE + 2 for other in places):
                places.append(start)
        cue, *others = places
        x_LX[cue : cue + CUE, 0] += 2
        x_LX[cue : cue + CUE, 1] += 2 * (2 * label - 1)
        for start in others:
            x_LX[start : start + CUE, 1] += 2 * (2 * below(2) - 1)
        spikes = 0
        while spikes < 6:
            at = below(STEPS)
            if not cue - 2 <= at < cue + CUE + 2:
                x_LX[at, 0] += 3 * (2 * below(2) - 1)
                spikes += 1
        x_LX[:, 2] += torch.sin(torch.arange(STEPS) * (0.05 + 0.01 * below(10)) + below(7))
        labels.append(label)
        cues.append(cue)
    return Data(series, torch.tensor(labels), torch.tensor(cues))


def new_model(data: Data, seed: int) -> SequenceClassifier:
    """A small one; each position sees 5 steps, as a spike and a step differ in that."""
    torch.manual_seed(seed)
    names = {"class_names": CLASSES, "channel_names": CHANNELS}
    model = SequenceClassifier(2, num_channels=3, embed_dim=32, kernel_size=5, **names)
    model.embedding.fit_scale(list(data.series))
    return model.eval()


def train(data: Data, seed: int, epochs: int, flat: bool = False) -> SequenceClassifier:
    """As one trains any classifier: it is told the class, and never where the cue is. `flat`: with even weights."""
    model = new_model(data, seed).train()
    if flat:
        for layer in model.encoder.layers:
            lengthen(layer.self_attn, slice(model.config["embed_dim"]), 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = epochs * -(-len(data.label) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(epochs):
        for some in torch.randperm(len(data.label)).split(32):
            loss = F.cross_entropy(model(data.series[some]), data.label[some], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if flat:
                for layer in model.encoder.layers:
                    lengthen(layer.self_attn, slice(model.config["embed_dim"]), 0.0)
    return model.eval()


# --- Four ways to say which steps matter: each gives (N, L), greater = more ------------------------------------------


@torch.inference_mode()
def received(model: SequenceClassifier, series: Tensor) -> Tensor:
    """The weight that each step receives, averaged over the queries: (N, Z, H, L), each row sums to 1."""
    _, weights = model(series, need_weights=True)
    return torch.stack([weight.mean(dim=2) for weight in weights], dim=1)


def margin(model: SequenceClassifier, series: Tensor, named: Tensor) -> Tensor:
    """(N,): the logit of one class less the other's."""
    logits = model(series)
    return logits.gather(1, named[:, None])[:, 0] - logits.gather(1, 1 - named[:, None])[:, 0]


def input_x_gradient(model: SequenceClassifier, series: Tensor, named: Tensor) -> Tensor:
    """How steep the margin is, times how far the input is from its mean; both signs count."""
    return (_gradient(model, series, named) * (series - model.embedding.mean_X)).abs().sum(dim=-1)


def integrated_gradients(model: SequenceClassifier, series: Tensor, named: Tensor, points: int = 16) -> Tensor:
    """Sundararajan et al. 2017: the gradient on the way from the channels' means to the series; against is negative."""
    base = model.embedding.mean_X
    ways = (_gradient(model, base + (series - base) * (point + 0.5) / points, named) for point in range(points))
    return (sum(ways) / points * (series - base)).sum(dim=-1)


@torch.inference_mode()
def occlusion(model: SequenceClassifier, series: Tensor, named: Tensor) -> Tensor:
    """How far the margin falls when the steps around one are hidden behind their channel's mean."""
    whole = margin(model, series, named)
    hidden = (hide(model, series, torch.full((len(series),), at)) for at in range(STEPS))
    return torch.stack([whole - margin(model, each, named) for each in hidden], dim=1)


def hide(model: SequenceClassifier, series: Tensor, at: Tensor, window: int = WINDOW) -> Tensor:
    """The series with some steps around `at`, one of each series, at their channel's mean."""
    near = (torch.arange(STEPS) - at[:, None]).abs() <= window // 2
    return torch.where(near[..., None], model.embedding.mean_X, series)


def _gradient(model: SequenceClassifier, series: Tensor, named: Tensor) -> Tensor:
    series = series.clone().requires_grad_()
    return torch.autograd.grad(margin(model, series, named).sum(), series)[0]


# --- How well they do -------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """How well one way finds the cue. What is negative counts as nothing.

    Attributes:
        name: of the way.
        mass: the share of its total that lies on the cue's 6 steps; chance is 1/16.
        hit: in what share of the series its greatest step lies in the cue; chance is 1/16.
        falls: the same of the series of that class.
        rises: likewise.
        left: the mean probability of the named class after 9 steps around its greatest one are hidden.
        like_occlusion: Spearman's rank correlation with occlusion over the steps of a series, averaged.
    """

    name: str
    mass: float
    hit: float
    falls: float
    rises: float
    left: float
    like_occlusion: float


def score(name: str, found: Tensor, model: SequenceClassifier, data: Data, named: Tensor, occluded: Tensor) -> Score:
    """Against the truth, against the model, and against occlusion."""
    inside, top = data.inside, found.argmax(dim=1)
    positive = found.clamp(min=0)
    mass = (positive * inside).sum(dim=1) / positive.sum(dim=1).clamp(min=1e-12)
    hit = inside.gather(1, top[:, None])[:, 0]
    hits = hit, hit[data.label == 0], hit[data.label == 1]
    with torch.inference_mode():
        left = model(hide(model, data.series, top, window=9)).softmax(dim=1).gather(1, named[:, None])
    ranks = torch.stack([found, occluded]).argsort(dim=-1).argsort(dim=-1).double()
    one, other = ranks - ranks.mean(dim=-1, keepdim=True)
    alike = (one * other).sum(dim=1) / (one.norm(dim=1) * other.norm(dim=1))
    return Score(name, *(float(each.double().mean()) for each in (mass, *hits, left, alike)))


def look(model: SequenceClassifier, series: Tensor) -> Snapshot:
    """What a monitor says of these series, with no limit to its time."""
    with watch(model, budget=math.inf, rows=STEPS) as monitor, torch.inference_mode():
        for one in series:
            model(one[None])
    return monitor.snapshot()


def sharpest(snapshot: Snapshot) -> tuple[int, int]:
    """The layer and head with the lowest entropy: where a person would look first, not knowing where the cue is."""
    heads = {
        (layer.index, number): head.entropy_ratio
        for layer in snapshot.layers
        for number, head in enumerate(layer.heads)
        if head.entropy_ratio is not None
    }
    return min(heads, key=heads.__getitem__)


def changed(model: SequenceClassifier, head: tuple[int, int], factor: float) -> SequenceClassifier:
    """A copy of the model in which one head's queries are so much longer; 0: it attends to all steps alike."""
    other = copy.deepcopy(model)
    attention = other.encoder.layers[head[0]].self_attn
    lengthen(attention, slice(head[1] * attention.head_dim, (head[1] + 1) * attention.head_dim), factor)
    return other


@torch.no_grad()
def lengthen(attention: MultiheadAttention, features: slice, factor: float) -> None:
    """Multiply some features of all queries; they come first in the packed projection."""
    attention.in_proj_weight[features] *= factor
    attention.in_proj_bias[features] *= factor


@dataclass(frozen=True)
class Story:
    """All that was measured; `print` shows it.

    Attributes:
        model: the trained one.
        test: series that it was not trained on.
        accuracy: on them.
        snapshot: the monitor's.
        head: the sharpest, layer and number.
        scores: of each way.
        hits: (Z, H), each head's, over the series that were named right.
        flattened: (Z, H), the accuracy with one head attending to all steps alike.
        all_flattened: with all of them so.
        trained_flat: of another model, trained with all heads so; None: not asked.
        drifted: the snapshot after the queries of the last layer's head 0 were multiplied by 400.
    """

    model: SequenceClassifier
    test: Data
    accuracy: float
    snapshot: Snapshot
    head: tuple[int, int]
    scores: tuple[Score, ...]
    hits: Tensor
    flattened: Tensor
    all_flattened: float
    drifted: Snapshot
    trained_flat: float | None = None

    def __str__(self) -> str:
        """The numbers of docs/observe-story.md."""
        lines = [f"accuracy {self.accuracy:.3f}; chance of a blind hit {CHANCE:.3f}", "", str(self.snapshot), ""]
        lines.append(f"{'which steps matter':35}  on cue    hit  falls  rises   left  like occlusion")
        for name, mass, *shares, alike in self.scores:
            lines.append(f"{name:35}  {mass:6.3f}  {'  '.join(f'{x:.3f}' for x in shares)}  {alike:14.3f}")
        for what, table in (("hits of each head", self.hits), ("accuracy with that head flat", self.flattened)):
            lines += ["", what]
            lines += [f"layer {z}  " + "  ".join(f"{x:.3f}" for x in row) for z, row in enumerate(table.tolist())]
        lines.append(f"all flat {self.all_flattened:.3f}")
        if self.trained_flat is not None:
            lines.append(f"trained with all flat {self.trained_flat:.3f}")
        lines += ["", "queries of head 0 of the last layer x400"]
        return "\n".join([*lines, str(self.drifted)])


def tell(number: int = 600, epochs: int = 12, tested: int = 200, seed: int = 0, flat: bool = True) -> Story:
    """Train, and ask; `flat`: train a second model, whose attention is even."""
    data, test = make(number, 0), make(tested, 1)
    story = ask(train(data, seed, epochs), new_model(data, seed), test)
    return replace(story, trained_flat=accuracy(train(data, seed, epochs, flat=True), test)) if flat else story


def ask(model: SequenceClassifier, untrained: SequenceClassifier, test: Data) -> Story:
    """In all ways where the cue is."""
    with torch.no_grad():
        named = model(test.series).argmax(dim=1)
    snapshot = look(model, test.series)
    layer, head = sharpest(snapshot)
    weights = received(model, test.series)
    occluded = occlusion(model, test.series, named)
    first, other = sharpest(look(untrained, test.series))
    ways = {
        f"attention, sharpest head ({layer}.{head})": weights[:, layer, head],
        "attention, mean of the first layer": weights[:, 0].mean(dim=1),
        "attention, mean of the last layer": weights[:, -1].mean(dim=1),
        "attention, mean of all heads": weights.mean(dim=(1, 2)),
        "attention, sharpest head, untrained": received(untrained, test.series)[:, first, other],
        "input x gradient": input_x_gradient(model, test.series, named),
        "integrated gradients": integrated_gradients(model, test.series, named),
        "occlusion": occluded,
        "blind": torch.rand(occluded.shape, generator=torch.Generator().manual_seed(0)),
    }
    right = named == test.label
    Z, H = weights.shape[1:3]
    tops = weights[right].argmax(dim=-1)  # (N, Z, H)
    hits = test.inside[right].gather(1, tops.flatten(1)).unflatten(1, (Z, H)).double().mean(dim=0)
    flattened = torch.empty(Z, H)
    flat = model
    for z in range(Z):
        for h in range(H):
            flattened[z, h] = accuracy(changed(model, (z, h), 0.0), test)
            flat = changed(flat, (z, h), 0.0)
    after = look(changed(model, (Z - 1, 0), 400.0), test.series)
    return Story(
        model,
        test,
        accuracy(model, test),
        snapshot,
        (layer, head),
        tuple(score(name, found, model, test, named, occluded) for name, found in ways.items()),
        hits,
        flattened,
        accuracy(flat, test),
        after,
    )


@torch.inference_mode()
def accuracy(model: SequenceClassifier, data: Data) -> float:
    """The share named right."""
    return float((model(data.series).argmax(dim=1) == data.label).double().mean())


def write(story: Story, folder: Path) -> None:
    """The model, the test series, and pictures of the first of them."""
    folder.mkdir(parents=True, exist_ok=True)
    save(story.model, folder / "model")
    with (folder / "test.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["series", "label", *CHANNELS])
        for index, (x_LX, label) in enumerate(zip(story.test.series.tolist(), story.test.label.tolist(), strict=True)):
            writer.writerows([f"s{index}", CLASSES[label], *row] for row in x_LX)
    with torch.inference_mode():
        logits, weights = story.model(story.test.series[:6], need_weights=True)
    maps = [
        AttentionMap(
            [weight[index] for weight in weights],
            title=f"{CLASSES[int(story.test.label[index])]}, predicted {CLASSES[int(logits[index].argmax())]}; "
            f"the cue is at steps {int(story.test.cue[index])} to {int(story.test.cue[index]) + CUE - 1}",
            signal=story.test.series[index],
            channel_names=CHANNELS,
        )
        for index in range(6)
    ]
    heatmap(maps[0], folder / "attention.png")
    heatmap(maps, folder / "attention.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the model, the test series and pictures")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    told = tell(seed=given.seed)
    print(told)
    if given.output is not None:
        write(told, given.output)
