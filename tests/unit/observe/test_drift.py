"""Baselines, and heads that depart from them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from tests.unit.observe.looking import INF
from torch import nn

import headwise
from headwise.observe.drift import Drift, Limits, drifts
from headwise.observe.snapshot import HeadReading, Histogram, LayerReading

HEALTHY = HeadReading(0.8, 20.0, 5.0, 0.2, 0.1, 4.0, 3.0)
NOTHING = HeadReading(*[None] * 7)
_NONE = Histogram((), (0,), 0.0)


def layer(before: HeadReading, now: HeadReading) -> LayerReading:
    return LayerReading(
        1, "layers.1", "self", (HEALTHY, now), 0.1, 1, 1, 0, 0, 0.0, *[_NONE] * 3, None, (HEALTHY, before)
    )


def changed(**values: float | None) -> HeadReading:
    return dataclasses.replace(HEALTHY, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (HEALTHY, []),
        (NOTHING, []),
        (changed(entropy_ratio=0.25), []),
        (changed(entropy_ratio=0.23), ["collapsed"]),
        (changed(entropy_ratio=0.995), ["uniform"]),
        (changed(max_logit=99.0), []),
        (changed(max_logit=101.0), ["exploded"]),
        (changed(sink=0.29), []),
        (changed(sink=0.31), ["sink moved"]),
        (changed(entropy_ratio=0.01, max_logit=900.0, sink=0.9), ["collapsed", "exploded", "sink moved"]),
    ],
)
def test_changes(now: HeadReading, what: list[str]) -> None:
    found = drifts([layer(HEALTHY, now)], Limits())
    assert [each.what for each in found] == what
    assert all((each.layer, each.index, each.head) == ("layers.1", 1, 1) for each in found)
    assert drifts([layer(NOTHING, now)], Limits()) == []


def test_a_head_that_was_so_before_has_not_changed() -> None:
    for reading in (changed(entropy_ratio=0.97), changed(entropy_ratio=0.99)):
        assert drifts([layer(reading, changed(entropy_ratio=0.999))], Limits()) == []
    assert drifts([layer(changed(max_logit=80.0), changed(max_logit=150.0))], Limits()) == []
    sunk = layer(changed(sink=0.9), changed(sink=0.6))
    assert [each.what for each in drifts([sunk], Limits())] == ["sink moved"]
    assert drifts([sunk], Limits(sink=0.4)) == []


def test_it_is_said_in_a_sentence() -> None:
    [found] = drifts([layer(HEALTHY, changed(entropy_ratio=0.01))], Limits())
    assert str(found) == "head 1 of layers.1 collapsed: entropy ratio 0.8 -> 0.01"
    assert str(dataclasses.replace(found, layer="")) == "head 1 of the attention collapsed: entropy ratio 0.8 -> 0.01"


def model(layers: int = 3) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(one, layers).eval()


def run(watched: nn.Module, passes: int = 20) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(passes):
            watched(torch.randn(4, 24, 32, generator=generator))


def test_one_broken_head_is_found_and_no_other() -> None:
    """Its query weights times 400; it and no other head of any layer drifts."""
    watched = model()
    with headwise.watch(watched, budget=INF) as monitor:
        run(watched)
        monitor.baseline()
        run(watched)
        assert monitor.drift() == []
        with torch.no_grad():
            watched.layers[1].self_attn.in_proj_weight[8:16] *= 400
        run(watched)
        found = monitor.drift()
    assert {(each.index, each.head) for each in found} == {(1, 1)}
    assert {"collapsed", "exploded"} <= {each.what for each in found}
    assert all(isinstance(each, Drift) for each in found)


def test_a_baseline_goes_through_a_file() -> None:
    watched = model()
    with headwise.watch(watched, budget=INF) as monitor:
        run(watched, 3)
        saved = json.loads(json.dumps(monitor.baseline(), allow_nan=False))
    with headwise.watch(watched, budget=INF) as monitor:
        assert monitor.baseline(saved) == saved
        run(watched, 3)
        assert monitor.drift() == []
        assert monitor.snapshot().layers[0].baseline[0].entropy_ratio == saved["layers.0.self_attn"][0]["entropy_ratio"]
        json.dumps(monitor.snapshot().as_dict(), allow_nan=False)


def _broken(saved: Any, how: str) -> Any:
    first = saved["layers.0.self_attn"]
    if how == "no dict":
        return [1]
    if how == "a layer less":
        del saved["layers.0.self_attn"]
    elif how == "another layer":
        saved["x"] = saved.pop("layers.0.self_attn")
    elif how == "a head less":
        first.pop()
    elif how == "no list":
        saved["layers.0.self_attn"] = 3
    elif how == "a head that is no dict":
        first[0] = 3
    elif how == "a text":
        first[0]["sink"] = "0.1"
    elif how == "a bool":
        first[0]["sink"] = True
    elif how == "nan":
        first[0]["sink"] = float("nan")
    elif how == "a reading less":
        del first[0]["sink"]
    elif how == "an int that no float can hold":
        first[0]["max_logit"] = 10**400
    elif " = " in how:
        name, _, value = how.partition(" = ")
        first[0][name] = float(value)
    elif how == "keys of more kinds":
        saved[1] = saved.pop("layers.0.self_attn")
    return saved


@pytest.mark.parametrize(
    "how",
    [
        "no dict",
        "a layer less",
        "another layer",
        "a head less",
        "no list",
        "a head that is no dict",
        "a text",
        "a bool",
        "nan",
        "a reading less",
        "keys of more kinds",
        "an int that no float can hold",
        "entropy_ratio = 1.5",
        "entropy_ratio = -0.1",
        "peak = 2",
        "peak = -1",
        "sink = 1.1",
        "sink = -7",
        "effective_keys = -1",
        "distance = -3",
        "spread = -1",
    ],
)
def test_a_wrong_baseline_is_refused(how: str) -> None:
    watched = model()
    with headwise.watch(watched, budget=INF) as monitor:
        run(watched, 1)
        wrong = _broken(monitor.baseline(), how)
        before = monitor.snapshot().layers[0].baseline
        with pytest.raises(ValueError, match=r"Monitor.baseline: saved.* must "):
            monitor.baseline(wrong)
        assert monitor.snapshot().layers[0].baseline == before


@pytest.mark.parametrize("name", ["collapse", "logit", "sink", "uniform"])
@pytest.mark.parametrize("value", [0, -0.1, float("nan"), float("inf"), "0.3", None, True, 10**400, [0.3]])
def test_wrong_limits_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^Limits: {name} must be a finite number above 0.*; got "):
        Limits(**{name: value})
    if name in ("collapse", "uniform"):
        with pytest.raises(ValueError, match=rf"^Limits: {name} must .*below 1; got 1"):
            Limits(**{name: 1})


@pytest.mark.parametrize("limits", [0.3, "x", {"logit": 50.0}, Limits])
def test_no_limits(limits: object) -> None:
    with pytest.raises(ValueError, match=r"^Monitor.drift: limits must be a headwise.observe.drift.Limits.*; got "):
        drifts([], limits)
    with headwise.watch(model(), budget=INF) as monitor:
        run(model(), 0)
        monitor.baseline({name: [vars(HEALTHY)] * 4 for name in (f"layers.{n}.self_attn" for n in range(3))})
        with pytest.raises(ValueError, match=r"^Monitor.drift: limits must "):
            monitor.drift(limits)


def test_too_early() -> None:
    with headwise.watch(model(), budget=INF) as monitor:
        with pytest.raises(ValueError, match=r"Monitor.baseline: .* none of layers.0.self_attn, layers.1.self_attn"):
            monitor.baseline()
        with pytest.raises(ValueError, match=r"Monitor.drift: baseline must be taken first"):
            monitor.drift()
