"""headwise.observe.png: each panel in its place, no text over another, and nothing of the user's settings in it."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import figure, image
from torch import Tensor

from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.picture import hues

L, S = 5, 7


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, dtype=torch.float64)).softmax(-1).to(dtype)


def draw(each: AttentionMap, path: Path) -> tuple[Tensor, list[Any]]:
    """The pixels, (height, width, 3), and the axes of what was drawn."""
    figures: list[Any] = []
    original = figure.Figure.savefig

    def savefig(self: Any, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure.Figure, "savefig", savefig)
        heatmap(each, path)
    return torch.from_numpy(image.imread(path))[..., :3], figures[0].axes


def panel_pixels(pixels: Tensor, axes: Any) -> Tensor:
    box = axes.get_window_extent()
    height = len(pixels)
    return pixels[round(height - box.y1) + 2 : round(height - box.y0) - 2, round(box.x0) + 2 : round(box.x1) - 2]


def test_png_draws_every_panel(tmp_path: Path) -> None:
    each = AttentionMap(
        [weights(3, S, S), weights(2, S, S), weights(S, S)],
        title="three layers",
        signal=torch.randn(S, 2),
        channel_names=["load", "wind"],
    )
    pixels, axes = draw(each, tmp_path / "a.png")
    assert len(axes) == 3 + (3 + 2 + 1) + 1  # signals, maps, the colour bar
    for panel in axes:
        codes = (255 * panel_pixels(pixels, panel)).round().long() @ torch.tensor([1 << 16, 1 << 8, 1])
        colors, counts = codes.unique(return_counts=True)
        assert len(colors) > 6
        assert counts.max() < 0.98 * counts.sum()


def test_png_shows_each_weight_in_its_place(tmp_path: Path) -> None:
    """Four steps a key, the last key one step: its column is a quarter as wide. Hidden keys are grey."""
    layer = torch.zeros(1, 3, 4)
    layer[0, 0, 3] = layer[0, 1, 0] = layer[0, 2, 1] = 1.0
    each = AttentionMap([layer], signal=torch.randn(13, 1), stride=4)
    pixels, axes = draw(each, tmp_path / "a.png")
    panel = panel_pixels(pixels, axes[1])
    assert axes[1].get_xlim() == axes[0].get_xlim() == (-0.5, 12.5)
    assert axes[1].get_ylim() == (2.5, -0.5)
    height, width, _ = panel.shape
    grey = torch.tensor([0xC3, 0xC8, 0xD0]) / 255
    for query in range(3):
        for key in range(4):
            row, column = int((query + 0.5) / 3 * height), int(min(4 * key + 2, 12.5) / 13 * width)
            expected = grey if layer[0, query, key] == 0 else torch.tensor([0, 0, 4]) / 255
            torch.testing.assert_close(panel[row, column], expected, rtol=0, atol=0.02)


def test_png_one_scale_for_all(tmp_path: Path) -> None:
    layers = [torch.full((2, L, S), 1 / S), weights(1, L, S)]
    _, axes = draw(AttentionMap(layers), tmp_path / "a.png")
    top = pytest.approx(float(layers[1].max()))
    assert [panel.images[0].get_clim() for panel in axes[:3]] == [(0.0, top)] * 3
    assert axes[3].get_ylim() == (0.0, top)


USER = {  # what a user's matplotlibrc may hold
    "text.usetex": True,
    "text.color": "white",
    "savefig.bbox": "tight",
    "savefig.transparent": True,
    "savefig.facecolor": "red",
    "figure.facecolor": "red",
    "axes.facecolor": "red",
    "axes.spines.top": False,
    "axes.formatter.limits": (0, 0),
    "xtick.direction": "in",
    "font.family": ["monospace"],
    "font.size": 20,
    "lines.antialiased": False,
    "image.interpolation": "bilinear",
    "path.sketch": (2, 100, 2),
    "figure.constrained_layout.use": True,
}


@pytest.mark.parametrize("settings", [USER, {"figure.autolayout": True}])
def test_png_is_the_same_under_any_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    each = AttentionMap([weights(1, L, S)], title="a", signal=torch.randn(S, 2), key_names=["a"] * S)
    expected = heatmap(each, tmp_path / "a.png").read_bytes()
    with matplotlib.rc_context(settings):
        before = dict(matplotlib.rcParams)
        assert heatmap(each, tmp_path / "a.png").read_bytes() == expected
        with pytest.raises(ValueError, match="32 rows"):
            heatmap(replace(each, weights=each.weights * 33), tmp_path / "a.png")
        assert dict(matplotlib.rcParams) == before


def test_settings_outlive_threads(tmp_path: Path) -> None:
    """Without a lock, the one that ends last could put back the defaults that it found."""
    each = AttentionMap([weights(1, L, S)])
    with matplotlib.rc_context({"font.size": 20}):
        threads = [threading.Thread(target=heatmap, args=(each, tmp_path / f"{i}.png")) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert matplotlib.rcParams["font.size"] == 20
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert len(list(tmp_path.iterdir())) == 3


def overlaps(axes: list[Any]) -> list[tuple[str, str]]:
    """Pairs of drawn texts whose boxes meet: the figure's own, the labels of ticks and those of colour bars."""
    sides = [side for each in axes for side in (each.xaxis, each.yaxis)]
    ticks = [tick for side in sides for tick in side._update_ticks()]
    texts = [text for tick in ticks for text in (tick.label1, tick.label2)]
    texts += [*axes[0].figure.texts, *(side.label for side in sides)]
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    return [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[:i] if x.shrunk(0.97, 0.9).overlaps(y)]


LAYOUTS: dict[str, Callable[[], AttentionMap]] = {
    "one": lambda: AttentionMap([weights(1, 5, 5)], title="one"),
    "one query": lambda: AttentionMap([weights(4, 1, 31)], title="a long title " * 30),
    "one key": lambda: AttentionMap([weights(2, 31, 1)], signal=torch.randn(1, 1)),
    "speech": lambda: AttentionMap([weights(4, 29, 29)] * 2, signal=torch.randn(29, 12), interval=6.4, unit="ms"),
    "patches": lambda: AttentionMap([weights(4, 244, 244)], signal=torch.randn(1460, 1), stride=6, unit="day"),
    "tokens": lambda: AttentionMap(
        [weights(1, 64, 64)], key_names=["a long token name"] * 64, query_names=["another long name"] * 64
    ),
    "many tokens": lambda: AttentionMap([weights(3, 200, 90)], key_names=["token"] * 90, query_names=["word"] * 200),
    "many heads": lambda: AttentionMap([weights(14, 9, 11)], signal=torch.randn(11, 5), channel_names=list("abcde")),
    "many": lambda: AttentionMap([weights(12, 8, 8)] * 2, signal=torch.randn(8, 321)),
    "millions": lambda: AttentionMap([weights(12, 8, 8)], interval=1e6, unit="s", signal=torch.randn(8, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_png_nothing_overlaps(name: str, tmp_path: Path) -> None:
    pixels, axes = draw(LAYOUTS[name](), tmp_path / "a.png")
    assert overlaps(axes) == []
    height, width, _ = pixels.shape
    assert width <= 2600
    assert height <= 4000
    for text in axes[0].figure.texts:  # and nothing is cut off
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    if name == "many heads":
        texts = [text.get_text() for text in axes[0].figure.texts]
        assert [text for text in texts if text.startswith("head")] == [f"head {i}" for i in range(14)]
        assert texts.count("layer 0") == 2  # two rows of seven
    border = torch.cat([pixels[:2].flatten(0, 1), pixels[-2:].flatten(0, 1), pixels[:, -2:].flatten(0, 1)])
    assert (border > 0.99).all()


@pytest.mark.parametrize("num_keys", [64, 65, 200])
def test_png_names_every_key_or_every_kth(num_keys: int, tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(num_keys)]
    _, axes = draw(AttentionMap([weights(1, 3, num_keys)], key_names=names), tmp_path / "a.png")
    labels = [label.get_text() for label in axes[0].get_xticklabels()]
    step = 1 if num_keys == 64 else -(-num_keys // len(labels))
    assert labels == names[::step]
    assert axes[0].get_xticks().tolist() == list(range(0, num_keys, step))


def test_png_texts_are_no_mathematics_and_need_no_glyph(tmp_path: Path) -> None:
    """Warnings are errors here: a glyph that no font has would raise."""
    evil = r"$\frac{1}{$ \textbf $x$ 日本語 🦊 \ud800"
    names = [evil, "日本", "$x$", "\n", "a\u202eb", "", "\u0627\u0644"]
    each = AttentionMap(
        [weights(2, S, S)],
        title=evil,
        signal=torch.randn(S, 2),
        channel_names=["$y_1$", "温度"],
        key_names=names,
        query_names=names,
    )
    _, axes = draw(each, tmp_path / "a.png")
    texts = [text.get_text() for text in axes[0].figure.texts]
    assert texts[0].startswith(r"$\frac{1}{$ \textbf $x$")
    assert "$y_1$" in texts
    labels = [label.get_text() for label in axes[-2].get_xticklabels()]
    assert len(labels) == S
    assert labels[2:4] == ["$x$", r"\n"]
    assert r"\u202e" in labels[4]
    assert not any(label.get_parse_math() for label in axes[-2].get_xticklabels())


def test_png_does_not_touch_pyplot(tmp_path: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    heatmap(AttentionMap([weights(2, L, S)]), tmp_path / "a.PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    each = AttentionMap([weights(2, L, S)])
    with pytest.raises(ImportError, match=re.escape("pip install 'headwise[observe]'")):
        heatmap(each, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
    heatmap(each, tmp_path / "a.html")  # needs none


# --- Channels --------------------------------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    """As the web's accessibility rules define it: from 1 to 21."""

    def luminance(hue: str) -> float:
        parts = [part / 255 for part in bytes.fromhex(hue[1:])]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("number", [0, 1, 5, 8, 9, 12, 24, 25, 321])
@pytest.mark.parametrize("dark", [False, True])
def test_hues_can_be_told_apart(number: int, dark: bool) -> None:
    found = hues(number, dark=dark)
    assert len(found) == number
    assert all(re.fullmatch("#[0-9a-f]{6}", hue) for hue in found)
    assert min((contrast(hue, "#14181f" if dark else "#ffffff") for hue in found), default=3.0) >= 3.0
    assert len(set(found)) == number or number > 100
    if 8 < number <= 24:  # neighbours differ in brightness, for those who see no hues
        assert min(contrast(*pair) for pair in zip(found[1:], found, strict=False)) > 1.5


def test_the_page_has_the_hues_of_the_png(tmp_path: Path) -> None:
    for number in (5, 12):
        each = AttentionMap([weights(1, 2, 3)], signal=torch.randn(3, number))
        page = heatmap(each, tmp_path / "a.html").read_text("utf-8")
        assert f'"hues":{json.dumps([hues(number), hues(number, dark=True)], separators=(",", ":"))}' in page
        _, axes = draw(each, tmp_path / "a.png")
        colors = [matplotlib.colors.to_hex(color) for color in axes[0].collections[0].get_colors()]
        assert colors == hues(number)
