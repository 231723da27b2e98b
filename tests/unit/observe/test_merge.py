"""headwise.observe.merge: snapshots of several monitors as one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import headwise
from headwise.observe.merge import merged
from headwise.observe.monitor import watch
from headwise.observe.snapshot import HeadReading, Histogram, LayerReading, Snapshot

NONE = HeadReading(*[None] * 7)
SOME = HeadReading(0.2, 2.0, 5.0, 0.5, None, 1.0, 3.0)
MORE = HeadReading(0.6, 6.0, 4.0, 0.1, 0.25, None, 7.0)


def counts(*numbers: int) -> Histogram:
    return Histogram((0.5,), numbers, float(sum(numbers)))


def snapshot(head: HeadReading, rows: int, at: float | None, **more: object) -> Snapshot:
    ones = counts(1, rows), counts(rows, 0), counts(0, rows)
    layer = LayerReading(0, "a", "self", (head,), 0.1 * rows, 1 if rows else 0, rows, 1, 2, at, *ones, None)
    return dataclasses.replace(
        Snapshot("M", 1.0, 1, 1, {"empty": 1}, {}, math.inf, 2.0, 0.5, counts(0, 1), 3.0, (layer,)), **more
    )


def test_rows_weigh_and_counts_add() -> None:
    both = merged([snapshot(SOME, 3, 1.0), snapshot(MORE, 1, 2.0, errors={"KeyError": 2}, time=7.0)])
    (layer,), (head,) = both.layers, both.layers[0].heads
    assert dataclasses.astuple(head) == pytest.approx((0.3, 3.0, 5.0, 0.4, 0.25, 1.0, 4.0))
    assert (layer.rows, layer.observed, layer.fully_masked, layer.nonfinite, layer.at) == (4, 2, 2, 4, 2.0)
    assert layer.distance_ratio == pytest.approx((0.3 * 3 + 0.1) / 4)
    assert layer.row_entropy == counts(2, 4)
    assert (both.forwards, both.observed, both.forward_seconds, both.observer_seconds) == (2, 2, 4.0, 1.0)
    assert (both.skipped, both.errors, both.time, both.interval) == ({"empty": 2}, {"KeyError": 2}, 7.0, None)
    assert both.observer_duration == counts(0, 2)


def test_what_was_not_seen_counts_for_nothing() -> None:
    blind = snapshot(NONE, 0, None)
    assert merged([snapshot(SOME, 4, 1.0), blind]).layers[0].heads == (SOME,)
    assert merged([blind, blind]).layers[0].heads == (NONE,)
    assert merged([blind]).layers[0].at is None


def test_one_monitor_of_all_agrees() -> None:
    """Ten series of one length: the mean of monitors of each is the monitor of all."""
    model = headwise.SequenceClassifier(2, num_channels=1).eval()
    series = torch.randn(10, 20, 1)
    parts = []
    with torch.inference_mode(), watch(model, budget=math.inf, rows=20) as whole:
        for one in series:
            model(one[None])
    for one in series:
        with torch.inference_mode(), watch(model, budget=math.inf, rows=20) as part:
            model(one[None])
        parts.append(part.snapshot())
    for layer, other in zip(merged(parts).layers, whole.snapshot().layers, strict=True):
        assert layer.rows == other.rows == 200
        for head, expected in zip(layer.heads, other.heads, strict=True):
            assert dataclasses.astuple(head) == pytest.approx(dataclasses.astuple(expected), rel=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [None, 5, "x", snapshot(SOME, 1, 1.0), [None], [snapshot(SOME, 1, 1.0), 3], {}, iter([snapshot(SOME, 1, 1.0)])],
)
def test_no_snapshots(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^merged: snapshots must be a sequence of Snapshots, .*; got "):
        merged(wrong)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^merged: snapshots must be one at least; got none"):
        merged([])
    two = snapshot(SOME, 1, 1.0)
    other = dataclasses.replace(two, layers=(dataclasses.replace(two.layers[0], heads=(SOME, SOME)),))
    with pytest.raises(ValueError, match=r"^merged: snapshots must be of the same layers and heads; got 2 different"):
        merged([two, other])
