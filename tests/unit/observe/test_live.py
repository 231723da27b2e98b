"""headwise.observe.live: what the live page is told, in JSON's types, and no more than it may be."""

from __future__ import annotations

import base64
import json
import re
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.observe import live as module
from headwise.observe.live import payload
from headwise.observe.snapshot import HeadReading, Histogram, LayerReading, LiveMap, Snapshot

NONE = Histogram((1.0,), (0, 0), 0.0)
READING = HeadReading(0.5, 3.0, float("inf"), 0.5, None, None, float("nan"))


def snapshot(*maps: LiveMap | None) -> Snapshot:
    layers = tuple(
        LayerReading(i, f"layer{i}", "self", (READING,) * 2, None, 3, 48, 1, 2, 99.5, NONE, NONE, NONE, each)
        for i, each in enumerate(maps)
    )
    counts: dict[str, Any] = {"skipped": {"compiled": 4}, "errors": {"ValueError": 1}}
    return Snapshot("model", 100.0, 1000, 10, **counts, budget=0.01, forward_seconds=10.0, observer_seconds=0.05,
                    observer_duration=NONE, interval=None, layers=layers)  # fmt: skip


def rows(num_keys: int = 23, keys_a_cell: int = 5, heads: int = 2, **names: tuple[str, ...]) -> LiveMap:
    mass = (3 * torch.randn(heads, 3, -(-num_keys // keys_a_cell))).softmax(-1)
    return LiveMap(1, (2, 7, 19), 20, num_keys, keys_a_cell, mass, **names)


def mass_of(told: dict[str, Any]) -> Tensor:
    """(H, R, m) as the page reads it."""
    codes = torch.tensor([list(base64.b64decode(text)) for text in told["mass"]]).double()
    return (((codes - 1).clamp(min=0) / 254) ** 2 * told["top"]).unflatten(1, (len(told["queries"]), -1))


def test_all_is_told_in_finite_numbers() -> None:
    one = snapshot(rows(), None)
    told = json.loads(json.dumps(payload(one), allow_nan=False))
    assert (told["model"], told["forwards"], told["overhead"], told["budget"]) == ("model", 1000, 0.005, 0.01)
    assert (told["skipped"], told["errors"]) == ({"compiled": 4}, {"ValueError": 1})
    first = told["layers"][0]
    assert (first["name"], first["rows"], first["fully_masked"], first["nonfinite"]) == ("layer0", 48, 1, 2)
    assert first["heads"][1]["entropy_ratio"] == 0.5
    assert first["heads"][1]["max_logit"] is None
    assert first["heads"][1]["spread"] is None
    assert told["layers"][1]["live"] is None
    assert "row_entropy" not in first


def test_maps_come_back_within_the_step() -> None:
    each = rows()
    told = payload(snapshot(each))["layers"][0]["live"]
    assert (told["sample"], told["queries"], told["num_queries"], told["num_keys"]) == (1, [2, 7, 19], 20, 23)
    assert (told["keys_a_cell"], told["query_names"], told["key_names"]) == (5, [], [])
    assert told["top"] == pytest.approx(float(each.mass.max()))
    slack = (each.mass.double() * told["top"]).sqrt() / 254 + told["top"] / 254**2
    assert ((mass_of(told) - each.mass.double()).abs() <= slack).all()
    named = payload(snapshot(rows(3, 1, query_names=("a", "b", "c"), key_names=("k", "l", "m"))))["layers"][0]["live"]
    assert (named["query_names"], named["key_names"]) == (["a", "b", "c"], ["k", "l", "m"])


def test_zero_is_exact_and_what_is_not_finite_is_zero() -> None:
    mass = torch.tensor([[[0.0, 1e-9, 1.0], [float("nan")] * 3]])
    told = payload(snapshot(LiveMap(0, (0, 1), 2, 3, 1, mass)))["layers"][0]["live"]
    assert list(base64.b64decode(told["mass"][0])) == [0, 1, 255, 0, 0, 0]
    nothing = payload(snapshot(LiveMap(0, (0,), 2, 3, 1, torch.zeros(1, 1, 3))))["layers"][0]["live"]
    assert nothing["top"] == 1.0


@pytest.mark.parametrize("num_keys", [96, 97, 100, 111])
def test_many_maps_are_told_in_fewer_cells(num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CELLS", 20 * 12)  # of 12 rows: 20 cells each
    each = rows(num_keys, 2)
    told = payload(snapshot(each, each))["layers"][1]["live"]
    assert told["keys_a_cell"] == 6
    assert mass_of(told).shape == (2, 3, -(-num_keys // 6))
    sums = mass_of(told).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=0.02, rtol=0)  # rows keep their sum
    expected = torch.stack([each.mass[..., at : at + 3].sum(-1) for at in range(0, each.mass.shape[-1], 3)], dim=-1)
    assert ((mass_of(told) - expected.double()).abs() <= told["top"] / 250).all()


def test_a_large_model_stays_small() -> None:
    layers = [rows(64 * 30, 30, heads=32) for _ in range(32)]
    assert len(json.dumps(payload(snapshot(*layers)))) < 500_000


# --- The page -------------------------------------------------------------------------------------------------------


def page(name: str) -> str:
    return (resources.files("headwise.observe") / name).read_text("utf-8")


def test_the_page_fetches_nothing_else() -> None:
    text = page("live.html")
    assert "default-src 'none'" in text
    assert "connect-src 'self'" in text
    assert text.count("fetch(") == 1
    assert not re.search(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(|XMLHttp|WebSocket|innerHTML", text)
    assert len(text) < 40_000


def test_what_both_pages_need_is_written_the_same() -> None:
    (shared,) = re.findall(r"// --- as in heatmap.html\n(.*?)// --- until here\n", page("live.html"), re.S)
    assert len(shared.splitlines()) > 15
    assert shared in page("heatmap.html")


def test_every_statistic_has_a_name_on_the_page() -> None:
    for name in HeadReading.__dataclass_fields__:
        assert re.search(rf"^  {name}: \[", page("live.html"), re.M)
