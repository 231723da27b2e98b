"""Snapshots made by hand, from numbers."""

from __future__ import annotations

from typing import Any

from headwise.observe.snapshot import HeadReading, Histogram, LayerReading, Snapshot

LENGTHS = tuple(float(2**power) for power in range(15))
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def empty(bounds: tuple[float, ...]) -> Histogram:
    return Histogram(bounds, (0,) * (len(bounds) + 1), 0.0)


def filled(bounds: tuple[float, ...]) -> Histogram:
    """One value in each bucket, two in the last."""
    counts = (1,) * len(bounds) + (2,)
    return Histogram(bounds, counts, sum(bounds) + 3 * bounds[-1])


def head(value: float | None = 0.5, **more: float | None) -> HeadReading:
    names = ("entropy_ratio", "effective_keys", "max_logit", "peak", "sink", "distance", "spread")
    return HeadReading(**{**dict.fromkeys(names, value), **more})


def layer(index: int, heads: int | tuple[HeadReading, ...] = 2, **more: Any) -> LayerReading:
    """A layer that has been looked at; of a number of heads, the n-th one reads 0.5 + n / 100 everywhere."""
    if isinstance(heads, int):
        heads = tuple(head(0.5 + number / 100) for number in range(heads))
    fields: dict[str, Any] = {
        "name": f"layers.{index}.self_attn",
        "kind": "self",
        "heads": heads,
        "distance_ratio": 0.25,
        "observed": 3,
        "rows": 48,
        "fully_masked": 0,
        "nonfinite": 0,
        "at": 1_000_000.0 + index,
        "row_entropy": filled(RATIOS),
        "queries": filled(LENGTHS),
        "keys": filled(LENGTHS),
        "live": None,
    }
    return LayerReading(index=index, **{**fields, **more})


def unseen(index: int, heads: int = 2) -> LayerReading:
    """A layer that nobody has looked at yet."""
    nothing: dict[str, Any] = {"observed": 0, "rows": 0, "at": None, "kind": "", "distance_ratio": None}
    nothing |= {"row_entropy": empty(RATIOS), "queries": empty(LENGTHS), "keys": empty(LENGTHS)}
    return layer(index, **nothing, heads=(head(None),) * heads)


def snapshot(*layers: LayerReading, model: str = "encoder", **more: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "time": 1_000_010.0,
        "forwards": 12,
        "observed": 3,
        "skipped": {},
        "errors": {},
        "budget": 0.01,
        "forward_seconds": 6.0,
        "observer_seconds": 0.05,
        "observer_duration": filled(SECONDS),
        "interval": 4.0,
    }
    return Snapshot(model=model, layers=layers, **{**fields, **more})
