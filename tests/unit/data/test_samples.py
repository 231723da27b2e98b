"""headwise.data.samples: the vendored set is the published one, and padding says exactly where the series end."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from headwise.data import samples
from headwise.data.samples import Series, collate, japanese_vowels, pad

FOLDER = Path(samples.__file__).parent


@pytest.fixture(scope="module")
def splits() -> tuple[Series, Series]:
    return japanese_vowels()


def _series(*lengths: int, channels: int = 3) -> list[Tensor]:
    return [torch.randn(length, channels) + 5.0 for length in lengths]


def test_japanese_vowels_is_the_official_split(splits: tuple[Series, Series]) -> None:
    train, test = splits
    assert (len(train), len(test)) == (270, 370)
    assert train.labels.bincount().tolist() == [30] * 9
    assert test.labels.bincount().tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]
    assert train.class_names == test.class_names == tuple("123456789")
    lengths = [len(value_LX) for split in splits for value_LX in split.values]
    assert (min(lengths), max(lengths), sum(lengths)) == (7, 29, 9961)


def test_japanese_vowels_values_are_the_printed_ones(splits: tuple[Series, Series]) -> None:
    """The first frames of the first utterance of ae.train, as the source prints them: a swapped axis cannot pass."""
    first_LX = splits[0].values[0]
    assert first_LX.shape == (20, 12)
    assert first_LX.dtype == torch.float32
    torch.testing.assert_close(
        first_LX[:4, 0], torch.tensor([1.860936, 1.891651, 1.939205, 1.717517]), rtol=0, atol=5e-7
    )
    torch.testing.assert_close(first_LX[:3, 1], torch.tensor([-0.207383, -0.193249, -0.239664]), rtol=0, atol=5e-7)
    assert all(value_LX.isfinite().all() and value_LX.shape[1] == 12 for split in splits for value_LX in split.values)


def test_japanese_vowels_file_is_the_documented_one() -> None:
    content = (FOLDER / "japanese_vowels.pt").read_bytes()
    document = (FOLDER / "JAPANESE_VOWELS.md").read_text()
    assert f"sha256 of `japanese_vowels.pt`: `{hashlib.sha256(content).hexdigest()}`" in document
    assert len(content) < 600_000


def test_pad_keeps_every_value_and_marks_the_rest() -> None:
    values = _series(5, 2, 7)
    values_BLX, padding_BL = pad(values)
    assert values_BLX.shape == (3, 7, 3)
    assert padding_BL.dtype == torch.bool
    assert padding_BL.tolist() == [[False] * 5 + [True] * 2, [False] * 2 + [True] * 5, [False] * 7]
    for value_LX, padded_LX, padding_L in zip(values, values_BLX, padding_BL, strict=True):
        torch.testing.assert_close(padded_LX[~padding_L], value_LX, rtol=0, atol=0)
        assert (padded_LX[padding_L] == 0).all()


def test_series_goes_through_a_dataloader() -> None:
    series = Series(_series(5, 2, 7, 3, 4), torch.tensor([2, 0, 1, 1, 0]), ("a", "b", "c"))
    assert series.num_channels == 3
    batches = list(DataLoader(series, batch_size=3, collate_fn=collate))
    assert [values_BLX.shape for values_BLX, _, _ in batches] == [(3, 7, 3), (2, 4, 3)]
    assert torch.cat([labels_B for _, _, labels_B in batches]).tolist() == [2, 0, 1, 1, 0]
    assert [(~padding_BL).sum(1).tolist() for _, padding_BL, _ in batches] == [[5, 2, 7], [3, 4]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"pad: values must hold at least one series; got none"),
        ([torch.ones(4, 3), torch.ones(0, 3)], r"pad: values\[1\] must be floating .*; got torch.float32 \(0, 3\)"),
        ([torch.ones(4)], r"pad: values\[0\] must be floating .*; got torch.float32 \(4,\)"),
        ([torch.ones(4, 3, dtype=torch.int64)], r"pad: values\[0\] must be floating .*; got torch.int64 \(4, 3\)"),
        (
            [torch.ones(4, 3), torch.ones(2, 3), torch.ones(2, 5)],
            r"pad: values\[2\] must have 3 channels of torch.float32, .*; got 5 of torch.float32",
        ),
        ([torch.ones(4, 3), torch.ones(4, 3).double()], r"pad: values\[1\] must have 3 channels of torch.float32, .*"),
    ],
)
def test_pad_refuses(values: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        pad(values)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            torch.tensor([0]),
            r"Series: labels must be int64 with one label for each of 2 series; got torch.int64 \(1,\)",
        ),
        (torch.tensor([0.0, 1.0]), r"Series: labels must be int64 .*; got torch.float32 \(2,\)"),
        (torch.tensor([0, 2]), r"Series: labels must lie in \[0, 2\); got 0 to 2"),
        (torch.tensor([-1, 0]), r"Series: labels must lie in \[0, 2\); got -1 to 0"),
    ],
)
def test_series_refuses(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Series(_series(5, 2), labels, ("a", "b"))


@pytest.mark.parametrize(
    ("lengths", "channels", "classes", "shown"),
    [
        ((5, 2), 3, ("up", "down"), "Series(2 series, 3 channels, lengths 2 to 5, classes 'up', 'down')"),
        ((4,), 1, (), "Series(1 series, 1 channel, length 4, no labels)"),
        ((4,), 1, ("a" * 1000, "b"), "Series(1 series, 1 channel, length 4, 2 classes)"),
    ],
)
def test_series_shows_sizes_and_classes(
    lengths: tuple[int, ...], channels: int, classes: tuple[str, ...], shown: str
) -> None:
    labels = torch.zeros(len(lengths), dtype=torch.int64) if classes else None
    assert repr(Series(_series(*lengths, channels=channels), labels, classes)) == shown
