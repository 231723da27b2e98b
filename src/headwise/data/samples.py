"""Labelled series of unequal length, the real set that ships with headwise, and padded batches of them.

A data set is a `Series`, whichever file it came from; `pad` and `collate` make one batch of it and its padding mask.
Axis letters: B batch, L positions, N series of a set, X channels, Y classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from headwise._checks import counted, invalid, kind_of


@dataclass(frozen=True, eq=False)
class Series(Dataset[tuple[Tensor, Tensor]]):
    """Series of unequal length, labelled or not: a map-style data set for a `DataLoader` with `collate_fn=collate`.

    Attributes:
        values: N tensors of one floating dtype, each (L, X): every L at least 1, one X for all.
        labels: (N,) int64, the class of each series, counted from 0; None if nobody knows them.
        class_names: one name for each of the Y classes; empty without labels.
        channel_names: one for each of the X channels. Left out: "1", "2" and so on.
        names: one for each series, to find it again. Left out: "0", "1" and so on.
        interval: the time from one position to the next, in `unit`.
        unit: of `interval`: "ms", or "step" where the time is not known.

    Raises:
        ValueError: these do not fit together.
    """

    values: list[Tensor]
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    interval: float = 1.0
    unit: str = "step"

    def __post_init__(self) -> None:
        """Hold what the class promises, once, so that no consumer has to check again."""
        _check_values("Series", self.values)
        if self.labels is not None:
            self._check_labels(self.labels)
        if not 0 < self.interval < float("inf"):
            raise invalid("Series", "interval", "be above 0 and finite", self.interval)
        named = {
            "channel_names": (self.channel_names, self.num_channels, "channels", 1),
            "names": (self.names, len(self.values), "series", 0),
        }
        for attribute, (names, number, things, first) in named.items():
            if not names:
                object.__setattr__(self, attribute, tuple(str(first + index) for index in range(number)))
            elif len(names) != number or len(set(names)) != number:
                rule = f"be {number} different names, one for each of the {things}"
                raise invalid("Series", attribute, rule, f"{len(names)}, {len(set(names))} of them different")

    def _check_labels(self, labels: Tensor) -> None:
        if labels.shape != (len(self.values),) or labels.dtype != torch.int64:
            rule = f"be int64 with one label for each of {len(self.values)} series"
            raise invalid("Series", "labels", rule, kind_of(labels))
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(self.class_names):
            raise invalid("Series", "labels", f"lie in [0, {len(self.class_names)})", f"{low} to {high}")

    def __repr__(self) -> str:
        """Return sizes and classes, not the values."""
        lengths = [len(value) for value in self.values]
        low, high = min(lengths), max(lengths)
        length = f"length {low}" if low == high else f"lengths {low} to {high}"
        classes = "no labels" if self.labels is None else f"classes {', '.join(map(repr, self.class_names))}"
        if len(classes) > 80:
            classes = f"{len(self.class_names)} classes"
        return f"Series({len(self)} series, {counted(self.num_channels, 'channel')}, {length}, {classes})"

    def __len__(self) -> int:
        """Return N, the number of series."""
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one series, (L, X), and its label, a scalar int64.

        Raises:
            ValueError: there are no labels; take `values[index]`.
        """
        if self.labels is None:
            raise invalid("Series", "labels", "be there to make (series, label) pairs; else take values[index]", None)
        return self.values[index], self.labels[index]

    def subset(self, indices: Sequence[int]) -> Series:
        """Return the series at `indices`, in that order, with all that belongs to them.

        Raises:
            ValueError: there is no index, or one is given twice.
            IndexError: an index lies outside [-N, N).
        """
        return replace(
            self,
            values=[self.values[index] for index in indices],
            labels=None if self.labels is None else self.labels[list(indices)],
            names=tuple(self.names[index] for index in indices),
        )

    @property
    def num_channels(self) -> int:
        """X, the values of each position."""
        return self.values[0].shape[1]


def pad(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Put series of unequal length into one batch.

    Args:
        values: B tensors of one floating dtype, each (L, X) with its own L.

    Returns:
        The batch, (B, L, X) with L the greatest length, 0 after each series' end; and its padding, (B, L) bool, True
        after each series' end, as `key_padding_mask` of `headwise.MultiheadAttention` takes it.

    Raises:
        ValueError: there is no series, or one is empty, of another width or of another dtype.
    """
    _check_values("pad", values)
    lengths_B = torch.tensor([len(value_LX) for value_LX in values], device=values[0].device)
    values_BLX = pad_sequence(list(values), batch_first=True)
    positions_L = torch.arange(values_BLX.shape[1], device=values_BLX.device)
    return values_BLX, positions_L >= lengths_B[:, None]


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Make one batch of (series, label) pairs: the `collate_fn` of a `DataLoader` over a `Series`.

    Args:
        samples: B pairs as `Series.__getitem__` returns them.

    Returns:
        The padded batch (B, L, X), its padding (B, L) bool, True = padding, and the labels (B,) int64.

    Raises:
        ValueError: as `pad` does.
    """
    values_BLX, padding_BL = pad([value_LX for value_LX, _ in samples])
    return values_BLX, padding_BL, torch.stack([label for _, label in samples])


def japanese_vowels() -> tuple[Series, Series]:
    """Load the Japanese Vowels set: who of nine speakers says /ae/, from 12 LPC cepstrum coefficients each 6.4 ms.

    Kudo, Toyama and Shimbo (1999), UCI Machine Learning Repository, CC BY 4.0. It ships with headwise, nothing is
    downloaded; `JAPANESE_VOWELS.md` beside this file tells its source and what was converted.

    Returns:
        The official train and test splits, 270 and 370 utterances of 7 to 29 frames: values (L, 12) float32 without
        a unit, labels 0 to 8 for the speakers "1" to "9".
    """
    with resources.files(__package__).joinpath("japanese_vowels.pt").open("rb") as file:
        stored: dict[str, Tensor] = torch.load(file, weights_only=True)
    values = stored["values"].split(stored["lengths"].tolist())
    num_train = int(stored["split_sizes"][0])
    class_names = tuple(str(speaker) for speaker in range(1, 10))
    return (
        Series(list(values[:num_train]), stored["labels"][:num_train], class_names, interval=6.4, unit="ms"),
        Series(list(values[num_train:]), stored["labels"][num_train:], class_names, interval=6.4, unit="ms"),
    )


def _check_values(function: str, values: Sequence[Tensor]) -> None:
    if not values:
        raise invalid(function, "values", "hold at least one series", "none")
    for index, value in enumerate(values):
        if value.ndim != 2 or 0 in value.shape or not value.is_floating_point():
            rule = "be floating (L, X) tensors with at least one position and channel"
            raise invalid(function, f"values[{index}]", rule, kind_of(value))
    for index, (value, following) in enumerate(pairwise(values), start=1):
        if (value.shape[1], value.dtype) != (following.shape[1], following.dtype):
            rule = f"have {value.shape[1]} channels of {value.dtype}, as the series before"
            raise invalid(function, f"values[{index}]", rule, f"{following.shape[1]} of {following.dtype}")
