"""Whole jobs as functions; the command line is a thin shell over them.

Axis letters: B batch, D width, H heads, L positions, S keys, X channels, Y classes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from headwise import MultiheadAttention
from headwise._checks import invalid, need
from headwise.data.samples import Series, collate, japanese_vowels, pad


@dataclass(frozen=True)
class DemoResult:
    """What `demo` reached and wrote.

    Attributes:
        test_accuracy: the share of the test split named right, 0 to 1, measured once, after training.
        parameters: the number of the model's trained values.
        seconds: wall-clock time of the whole call.
        seed: the seed that was used; with it, the same machine gives the same accuracy again.
        files: what was written.
    """

    test_accuracy: float
    parameters: int
    seconds: float
    seed: int
    files: tuple[Path, ...]


def demo(
    output: Path, *, seed: int = 0, epochs: int = 30, progress: Callable[[int, int, float], None] | None = None
) -> DemoResult:
    """Train a small classifier of real speech, test it, and draw where one utterance attends.

    270 utterances of nine speakers train it, 370 from other occasions test it; the data is in the package, nothing is
    downloaded. Runs in one thread of the CPU, in about 10 s, and leaves torch's global random state as it was.

    Args:
        output: the folder to write `attention.png` into; made if needed.
        seed: decides the initial weights, the order of the batches and dropout.
        epochs: passes over the training split.
        progress: called after each epoch with its number (from 1), `epochs` and the accuracy on its training batches.

    Returns:
        The test accuracy, how long it took and what was written.

    Raises:
        ImportError: matplotlib is missing; nothing was trained yet.
        OSError: the picture could not be written; what stood there before still does.
        ValueError: `output` cannot be made, `seed` is not in [0, 2**63) or `epochs` is less than 1.
    """
    started = time.perf_counter()
    if not 0 <= seed < 2**63:
        raise invalid("demo", "seed", "lie in [0, 2**63)", seed)
    if epochs < 1:
        raise invalid("demo", "epochs", "be at least 1", epochs)
    need("matplotlib", "observe")  # before the training, not after it; the folder likewise
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid("demo", "output", "be a folder that can be made", f"{output} ({error.strerror})") from error

    train, test = japanese_vowels()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: `torch.manual_seed` would reseed every GPU as well
        model = _Classifier(train)
        _fit(model, train, epochs, progress)
        model.eval()
        values_BLX, padding_BL = pad(test.values)
        with torch.inference_mode():
            logits_BY, weights = model(values_BLX, padding_BL, need_weights=True)
    predicted_B = logits_BY.argmax(-1)
    # The longest utterance shows most. The weights are those of the padded batch, the very ones the test used.
    index = max(range(len(test)), key=lambda i: len(test.values[i]))
    length = len(test.values[index])
    path = output / "attention.png"
    _draw(
        path,
        test.values[index],
        [weights_BHLS[index, :, :length, :length] for weights_BHLS in weights],
        f"Attention on test utterance {index} ({length} frames, one each 6.4 ms): true speaker "
        f"{test.class_names[int(test.labels[index])]}, predicted speaker {test.class_names[int(predicted_B[index])]}",
    )
    return DemoResult(
        test_accuracy=int((predicted_B == test.labels).sum()) / len(test),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=time.perf_counter() - started,
        seed=seed,
        files=(path,),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: as fast for batches this small, and several times faster on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to what came in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.self_attn = MultiheadAttention(width, num_heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, padding_BL: Tensor, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        y_BLD = self.norm1(x_BLD)
        y_BLD, weights_BHLS = self.self_attn(
            y_BLD, y_BLD, y_BLD, key_padding_mask=padding_BL, need_weights=need_weights, average_attn_weights=False
        )
        x_BLD = x_BLD + self.dropout(y_BLD)
        return x_BLD + self.dropout(self.feedforward(self.norm2(x_BLD))), weights_BHLS


class _Classifier(nn.Module):
    """Series to class logits: linear embedding, sinusoidal positions, two blocks, mean over the real positions."""

    mean_X: Tensor
    std_X: Tensor

    def __init__(
        self, train: Series, width: int = 64, num_heads: int = 4, depth: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        std_X, mean_X = torch.std_mean(torch.cat(train.values), dim=0)
        self.register_buffer("mean_X", mean_X)
        self.register_buffer("std_X", std_X)
        self.embedding = nn.Linear(train.num_channels, width)
        self.blocks = nn.ModuleList(_Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(train.class_names))

    def forward(
        self, values_BLX: Tensor, padding_BL: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits (B, Y) and, if asked for, each block's weights (B, H, L, S), padded rows of no meaning."""
        x_BLD = self.embedding((values_BLX - self.mean_X) / self.std_X)
        x_BLD = x_BLD + _sinusoids(*x_BLD.shape[1:])
        weights = []
        for block in self.blocks:
            x_BLD, weights_BHLS = block(x_BLD, padding_BL, need_weights)
            weights.append(weights_BHLS)
        x_BLD = self.norm(x_BLD).masked_fill(padding_BL[..., None], 0.0)
        mean_BD = x_BLD.sum(1) / (~padding_BL).sum(1, keepdim=True)
        return self.head(mean_BD), weights if need_weights else []


def _sinusoids(length: int, width: int) -> Tensor:
    """Return the positions of "Attention Is All You Need" (section 3.5), sines before cosines: (L, D)."""
    rates = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _fit(model: _Classifier, train: Series, epochs: int, progress: Callable[[int, int, float], None] | None) -> None:
    batches = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=epochs * len(batches))
    model.train()
    for epoch in range(1, epochs + 1):
        num_right = 0
        for values_BLX, padding_BL, labels_B in batches:
            logits_BY, _ = model(values_BLX, padding_BL)
            optimizer.zero_grad()
            F.cross_entropy(logits_BY, labels_B, label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
            num_right += int((logits_BY.argmax(-1) == labels_B).sum())
        if progress is not None:
            progress(epoch, epochs, num_right / len(train))


def _draw(path: Path, values_LX: Tensor, weights: list[Tensor], title: str) -> None:
    """Draw each block's weights, (H, L, S), a column a head, under the signal on the same key axis."""
    figures, cm, colors, ticker = (
        need(f"matplotlib.{module}", "observe") for module in ("figure", "cm", "colors", "ticker")
    )
    depth, num_heads, length, num_channels = len(weights), weights[0].shape[0], *values_LX.shape
    top = max(float(weights_HLS.max()) for weights_HLS in weights)
    # The object API alone: pyplot would keep the figure and pick a backend for the whole process.
    figure = figures.Figure(figsize=(13.5, 3.0 + 3.1 * depth), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=14)
    axes = figure.subplots(
        depth + 1, num_heads, sharex=True, sharey="row", squeeze=False, height_ratios=[0.75] + [1.0] * depth
    )
    bounds = [channel + 0.5 for channel in range(num_channels + 1)]
    hues = colors.LinearSegmentedColormap.from_list("channels", ["#0b3c8c", "#1f9e89", "#e8890c"])
    channels = cm.ScalarMappable(colors.BoundaryNorm(bounds, hues.N), hues)
    image = cm.ScalarMappable(colors.Normalize(0.0, top), "magma_r")
    for head in range(num_heads):
        axes[0, head].set_title(f"head {head + 1}", fontsize=12)
        for channel in range(num_channels):
            signal_L = values_LX[:, channel].tolist()
            axes[0, head].plot(range(length), signal_L, color=channels.to_rgba(channel + 1), linewidth=1.3)
        for block, weights_HLS in enumerate(weights, start=1):
            axes[block, head].imshow(
                weights_HLS[head].tolist(), norm=image.norm, cmap=image.cmap, aspect="auto", interpolation="nearest"
            )
        axes[depth, head].set_xlabel("key frame attended to (index)")
        axes[depth, head].xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes[0, 0].set_ylabel("signal: LPC cepstrum\ncoefficients (no unit)")
    for block in range(1, depth + 1):
        axes[block, 0].set_ylabel(f"block {block}\nquery frame (index)")
    legend = figure.colorbar(channels, ax=axes[0, :], label="channel", pad=0.01, ticks=range(1, num_channels + 1))
    legend.minorticks_off()
    figure.colorbar(image, ax=axes[1:, :], label="attention weight (each row sums to 1)", pad=0.01, aspect=40)
    _replace(path, lambda part: figure.savefig(part, format="png"))


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all: under another name first, which an interruption removes again."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
