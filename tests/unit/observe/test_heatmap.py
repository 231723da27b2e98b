"""headwise.observe.heatmap: what is refused, what is drawn, and that a file is there whole or not at all."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import figure, image
from torch import Tensor

import headwise
from headwise.observe import heatmap as module
from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.picture import _pool

L, S = 5, 7


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, dtype=torch.float64)).softmax(-1).to(dtype)


def payload(path: Path) -> list[dict[str, Any]]:
    """The page's data, which stands in one script element."""
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text("utf-8"), re.S)
    data: list[dict[str, Any]] = json.loads(text)
    return data


def cells(picture: dict[str, Any], layer: int, head: int) -> Tensor:
    """A head's weights as the page reads them, (L, S) or pooled."""
    codes = torch.frombuffer(bytearray(base64.b64decode(picture["layers"][layer][head])), dtype=torch.uint8)
    rows, columns = (-(-picture[side]["num"] // picture[side]["size"]) for side in ("query", "key"))
    return (((codes.double() - 1).clamp(min=0) / 254) ** 2 * picture["top"]).reshape(rows, columns)


def signal_of(picture: dict[str, Any]) -> Tensor:
    """The signal as the page reads it, (P, X)."""
    line = picture["line"]
    channels = [
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint16).double() for text in line["channels"]
    ]
    codes = torch.stack(channels, dim=1)
    values = line["low"] + (line["high"] - line["low"]) * codes / 65_534
    return values.masked_fill(codes == 65_535, torch.nan)


def pooled(weights_LS: Tensor, query_size: int, key_size: int) -> Tensor:
    """The definition in float64, run by run: the mass on its keys, averaged over its queries."""
    columns = [run.sum(1) for run in weights_LS.double().split(key_size, dim=1)]
    return torch.stack([run.mean(0) for run in torch.stack(columns, dim=1).split(query_size, dim=0)])


# --- What is refused ------------------------------------------------------------------------------------------------

NAN = torch.full((2, L, S), float("nan"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": []}, "weights must be a list of tensors, one for each of at least one layer; got []"),
        ({"weights": torch.ones(2, L, S)}, "weights must be a list of tensors"),
        ({"weights": [[0.5]]}, "weights must be a list of tensors"),
        ({"weights": [torch.ones(1, 2, L, S)]}, r"weights[0] must be floating with shape (H, L, S) or (L, S)"),
        ({"weights": [torch.ones(S)]}, "weights[0] must be floating with shape (H, L, S) or (L, S)"),
        ({"weights": [torch.ones(2, L, S, dtype=torch.int64)]}, "got torch.int64 (2, 5, 7)"),
        ({"weights": [torch.ones(2, 0, S)]}, "none of them 0"),
        ({"weights": [torch.ones(0, L, S)]}, "none of them 0"),
        ({"weights": [torch.ones(L, S), torch.ones(2, L, S + 1)]}, "weights[1] must have the L and S of the first"),
        ({"weights": [NAN]}, "weights[0] must be finite and at least 0"),
        ({"weights": [torch.full((L, S), float("inf"))]}, "weights[0] must be finite and at least 0"),
        ({"weights": [torch.randn(2, L, S) - 1]}, "weights after the softmax, not scores"),
        ({"key_padding_mask": torch.zeros(L, dtype=torch.bool)}, "key_padding_mask must be bool with one value for"),
        ({"key_padding_mask": torch.zeros(S)}, "got torch.float32 (7,)"),
        ({"key_padding_mask": torch.ones(S, dtype=torch.bool)}, "and leave one at least"),
        ({"query_padding_mask": torch.zeros(S, dtype=torch.bool)}, "each of the 5 queries"),
        ({"query_padding_mask": torch.ones(L, dtype=torch.bool)}, "and leave one at least"),
        ({"stride": 0}, "stride must be an integer of at least 1; got 0"),
        ({"stride": 2.0}, "stride must be an integer"),
        ({"stride": True}, "stride must be an integer"),
        ({"interval": 0.0}, "interval must be above 0 and finite"),
        ({"interval": float("nan")}, "interval must be above 0 and finite"),
        ({"title": None}, "title and unit must be strings"),
        ({"unit": 3}, "title and unit must be strings"),
        ({"signal": torch.ones(S)}, "signal must be floating with shape (T, X)"),
        ({"signal": torch.ones(S, 2, dtype=torch.int64)}, "signal must be floating with shape (T, X)"),
        ({"signal": torch.ones(S, 0)}, "a channel at least"),
        ({"signal": torch.ones(S + 1, 2)}, "signal must have ceil(T / stride) = 7"),
        ({"signal": torch.ones(S * 3 - 3, 2), "stride": 3}, "got T = 18 with stride 3"),
        ({"signal": torch.ones(S, 2), "key_padding_mask": torch.arange(S) > 4}, "ceil(T / stride) = 5"),
        ({"channel_names": ["a"]}, "channel_names must be one for each of the 0 channels of signal"),
        ({"signal": torch.ones(S, 2), "channel_names": ["a"]}, "channel_names must be one for each of the 2 channels"),
        ({"key_names": ["a"] * L}, "key_names must be one for each of the 7 keys, padding included; got 5"),
        ({"query_names": ["a"] * S}, "query_names must be one for each of the 5 queries, padding included; got 7"),
        ({"key_names": "abcdefg"}, "key_names must be a sequence of strings"),
        ({"key_names": list(range(S))}, "key_names must be a sequence of strings"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        AttentionMap(**({"weights": [torch.full((2, L, S), 1 / S)]} | arguments))
    assert str(caught.value).startswith("AttentionMap: ")


def test_the_last_patch_may_be_partial() -> None:
    for length in range(3 * S - 2, 3 * S + 1):
        AttentionMap([weights(2, L, S)], signal=torch.ones(length, 1), stride=3)
    for length in (3 * S - 3, 3 * S + 1):
        with pytest.raises(ValueError, match="ceil"):
            AttentionMap([weights(2, L, S)], signal=torch.ones(length, 1), stride=3)


def test_heatmap_refuses(tmp_path: Path) -> None:
    one = AttentionMap([weights(2, L, S)])
    cases: list[tuple[Any, Path, str]] = [
        ([], tmp_path / "a.html", "maps must be an AttentionMap, or a sequence of one at least"),
        ([weights(2, L, S)], tmp_path / "a.html", "maps must be an AttentionMap"),
        ([one, one], tmp_path / "a.png", "maps must be one for a PNG; write .html"),
        (one, tmp_path / "a.svg", "path must end in .png or .html"),
        (one, tmp_path / "a", "path must end in .png or .html"),
        (one, tmp_path / "no" / "a.html", "path must name a file in a folder that exists"),
        (AttentionMap([weights(2, 2)] * 33), tmp_path / "a.png", "need at most 32 rows of panels in a PNG"),
    ]
    (tmp_path / "folder.html").mkdir()
    cases.append((one, tmp_path / "folder.html", "path must name a file"))
    for maps, path, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            heatmap(maps, path)
        assert str(caught.value).startswith("heatmap: ")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_a_page_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = AttentionMap([weights(2, 20, 20)])
    monkeypatch.setattr(module, "MOST_PAGE", 4000)
    heatmap(one, tmp_path / "a.html")
    with pytest.raises(ValueError, match="give fewer samples, layers or heads at once; got more in the first 3 of 9"):
        heatmap([one] * 9, tmp_path / "b.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


# --- The page's data ------------------------------------------------------------------------------------------------


def test_weights_come_back_within_the_step(tmp_path: Path) -> None:
    layers = [weights(2, L, S), weights(3, L, S), weights(L, S)]
    (picture,) = payload(heatmap(AttentionMap(layers), tmp_path / "a.html"))
    top = max(float(layer.max()) for layer in layers)
    assert picture["top"] == pytest.approx(top)
    assert picture["averaged"] == [False, False, True]
    assert [len(heads) for heads in picture["layers"]] == [2, 3, 1]
    for layer, expected in enumerate(layers):
        for head, expected_LS in enumerate(expected.reshape(-1, L, S).double()):
            # In the root, at most half of one step of 254; small weights are so much closer.
            slack = (expected_LS * top).sqrt() / 254 + top / 254**2
            assert ((cells(picture, layer, head) - expected_LS).abs() <= slack).all()
            assert ((cells(picture, layer, head) - expected_LS).abs() <= top / 254).all()
            mean_S = expected_LS.mean(0)
            assert picture["peaks"][layer][head] == [int(mean_S.argmax()), pytest.approx(float(mean_S.max()))]


def test_zero_is_kept_apart_from_small(tmp_path: Path) -> None:
    weights_LS = torch.tensor([[0.0, 1.0, 1e-12], [0.5, 0.5, 0.0]])
    (picture,) = payload(heatmap(AttentionMap([weights_LS]), tmp_path / "a.html"))
    codes = list(base64.b64decode(picture["layers"][0][0]))
    assert codes == [0, 255, 1, 181, 181, 0]
    assert "grey: exactly 0" in picture["label"]


@pytest.mark.parametrize(("num_queries", "num_keys"), [(256, 256), (257, 300), (1, 521), (769, 2), (600, 1021)])
def test_pooling_by_the_definition(tmp_path: Path, num_queries: int, num_keys: int) -> None:
    layer = weights(2, num_queries, num_keys)
    (picture,) = payload(heatmap(AttentionMap([layer]), tmp_path / "a.html"))
    sizes = [-(-number // 256) for number in (num_queries, num_keys)]
    assert [picture["query"]["size"], picture["key"]["size"]] == sizes
    assert [picture["query"]["num"], picture["key"]["num"]] == [num_queries, num_keys]
    expected = [pooled(weights_LS, *sizes) for weights_LS in layer]
    top = max(float(each.max()) for each in expected)
    assert picture["top"] == pytest.approx(top)
    for head, expected_LS in enumerate(expected):
        # Pooled rows keep their sum.
        torch.testing.assert_close(expected_LS.sum(1), torch.ones(len(expected_LS), dtype=torch.float64))
        torch.testing.assert_close(_pool(layer[head].double(), *sizes), expected_LS)
        slack = (expected_LS * top).sqrt() / 254 + top / 254**2
        assert ((cells(picture, 0, head) - expected_LS).abs() <= slack).all()
    assert ("pooled" in picture["label"]) == (max(sizes) > 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    layer = weights(2, L, S, dtype=dtype).requires_grad_()
    signal = torch.randn(S, 2, dtype=dtype).requires_grad_()
    before = layer.detach().clone(), signal.detach().clone()
    each = AttentionMap([layer], signal=signal)
    for suffix in ("png", "html"):
        path = heatmap(each, tmp_path / f"a.{suffix}")
        assert path == tmp_path / f"a.{suffix}"
    (picture,) = payload(tmp_path / "a.html")
    expected_LS = layer[1].detach().double()
    assert ((cells(picture, 0, 1) - expected_LS).abs() <= picture["top"] / 200).all()
    assert "each row sums to 1)" in picture["label"]
    torch.testing.assert_close(layer.detach(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(signal.detach(), before[1], rtol=0, atol=0)
    assert layer.grad is None
    assert layer.requires_grad


def test_weights_of_the_layer(tmp_path: Path) -> None:
    attention = headwise.MultiheadAttention(12, 3, batch_first=True)
    _, layer = attention(*[torch.randn(2, S, 12)] * 3, average_attn_weights=False)
    (picture,) = payload(heatmap(AttentionMap([layer[1]]), tmp_path / "a.html"))
    assert ((cells(picture, 0, 2) - layer[1, 2].detach().double()).abs() <= picture["top"] / 200).all()


def test_inference_tensors(tmp_path: Path) -> None:
    with torch.inference_mode():
        heatmap(AttentionMap([weights(2, L, S)]), tmp_path / "a.html")


def test_padding_is_left_out(tmp_path: Path) -> None:
    layer = weights(2, L, S)
    key_padding, query_padding = torch.arange(S) < 2, torch.arange(L) >= 4
    layer[:, :, key_padding] = 0
    layer = layer / layer.sum(-1, keepdim=True)
    each = AttentionMap(
        [layer],
        key_padding_mask=key_padding,
        query_padding_mask=query_padding,
        key_names=list("abcdefg"),
        query_names=list("vwxyz"),
    )
    (picture,) = payload(heatmap(each, tmp_path / "a.html"))
    assert picture["key"]["names"] == list("cdefg")
    assert picture["query"]["names"] == list("vwxy")
    assert (picture["key"]["num"], picture["query"]["num"]) == (5, 4)
    expected_LS = layer[1, :4, 2:].double()
    assert ((cells(picture, 0, 1) - expected_LS).abs() <= picture["top"] / 200).all()
    assert "grey" not in picture["label"]  # nothing dropped is drawn as 0


def test_labels_say_what_is_seen(tmp_path: Path) -> None:
    def labels(each: AttentionMap) -> tuple[str, str, str]:
        (picture,) = payload(heatmap(each, tmp_path / "a.html"))
        return picture["query"]["label"], picture["key"]["label"], picture["label"]

    square = [weights(2, S, S)]
    assert labels(AttentionMap(square)) == (
        "query: time step (index)",
        "key: time step attended to (index)",
        "attention weight (each row sums to 1)",
    )
    assert labels(AttentionMap(square, interval=6.4, unit="ms"))[:2] == (
        "query: time (ms)",
        "key: time attended to (ms)",
    )
    assert labels(AttentionMap([weights(2, L, S)], interval=6.4, unit="ms"))[:2] == (
        "query: position (index)",  # of another sequence, whose times are not known
        "key: time attended to (ms)",
    )
    assert labels(AttentionMap(square, key_names=["a"] * S))[:2] == (
        "query: time step (index)",
        "key: token attended to",
    )
    assert labels(AttentionMap([0.5 * square[0]]))[2] == "attention weight (each row sums to 0.5)"
    assert labels(AttentionMap([torch.zeros(2, L, S)]))[2].startswith("attention weight (each row sums to 0)")


def test_the_signal_comes_back(tmp_path: Path) -> None:
    signal = 100 * torch.randn(3 * S - 1, 3, dtype=torch.float64)
    signal[4, 1], signal[7, 2] = torch.nan, torch.inf
    each = AttentionMap([weights(2, S, S)], signal=signal, stride=3, interval=2.0, unit="h")
    (picture,) = payload(heatmap(each, tmp_path / "a.html"))
    expected = signal.masked_fill(~signal.isfinite(), torch.nan)
    step = (picture["line"]["high"] - picture["line"]["low"]) / 65_534
    torch.testing.assert_close(signal_of(picture), expected, rtol=0, atol=step, equal_nan=True)
    assert (picture["line"]["first"], picture["line"]["step"]) == (0.0, 1.0)
    assert picture["channel_names"] == ["1", "2", "3"]
    for side in ("key", "query"):
        axis = picture[side]
        assert (axis["num"], axis["stride"], axis["steps"], axis["interval"]) == (S, 3, 3 * S - 1, 2.0)


@pytest.mark.parametrize("fill", [0.0, float("nan"), 1e38])
def test_a_flat_or_empty_signal(tmp_path: Path, fill: float) -> None:
    signal = torch.full((S, 2), fill, dtype=torch.float64)
    each = AttentionMap([weights(2, L, S)], signal=signal)
    (picture,) = payload(heatmap(each, tmp_path / "a.html"))
    torch.testing.assert_close(signal_of(picture), signal, equal_nan=True)
    heatmap(each, tmp_path / "a.png")


def test_a_long_signal_keeps_its_peaks(tmp_path: Path) -> None:
    signal = torch.zeros(100_001, 2)
    signal[77_777, 0], signal[31_111, 1], signal[100_000, 1] = 9.0, -5.0, 4.0
    each = AttentionMap([weights(1, 10, 10)], signal=signal, stride=10_001)
    (picture,) = payload(heatmap(each, tmp_path / "a.html"))
    line, values = picture["line"], signal_of(picture)
    assert len(values) <= 2048
    assert values.amax(0).tolist() == pytest.approx([9, 4], abs=1e-3)
    assert values.amin(0).tolist() == pytest.approx([0, -5], abs=1e-3)
    at = line["first"] + line["step"] * values.argmax(0)
    assert (at - torch.tensor([77_777, 100_000])).abs().max() <= line["step"]


def test_texts_stay_texts(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- \u2028 \" ' & \\ ]]> \x00 \ud800"
    each = AttentionMap(
        [weights(2, S, S)],
        title=evil,
        signal=torch.randn(S, 2),
        channel_names=["<b>", evil],
        key_names=[evil] * S,
        unit="<i>",
    )
    text = heatmap([each, each], tmp_path / "a.html").read_text("utf-8")
    template = (Path(module.__file__).parent / "heatmap.html").read_text("utf-8")
    for mark in ("<script", "</script", "<!--", "<b>", "<i>"):
        assert text.count(mark) == template.count(mark), mark
    first, second = payload(tmp_path / "a.html")
    assert first == second
    assert first["title"] == evil.replace("\u2028 ", "").replace("\x00", "\\x00").replace("\ud800", "\\ud800")
    assert first["channel_names"][0] == "<b>"
    assert first["query"]["label"] == "query: time (<i>)"


def test_a_page_asks_for_nothing(tmp_path: Path) -> None:
    text = heatmap(AttentionMap([weights(2, L, S)], title="a"), tmp_path / "a.html").read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp|WebSocket|@DATA@", text)
    assert "default-src 'none'" in text


def test_a_typical_page_is_small(tmp_path: Path) -> None:
    each = AttentionMap([weights(4, 29, 29)] * 2, signal=torch.randn(29, 12))
    assert heatmap(each, tmp_path / "a.html").stat().st_size < 60_000
    assert heatmap(AttentionMap([weights(4, 256, 256)]), tmp_path / "b.html").stat().st_size < 450_000


# --- The PNG --------------------------------------------------------------------------------------------------------


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
        colors, counts = panel_pixels(pixels, panel).reshape(-1, 3).unique(dim=0, return_counts=True)
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


def test_png_does_not_depend_on_settings(tmp_path: Path) -> None:
    each = AttentionMap([weights(2, L, S)], signal=torch.randn(S, 2))
    expected, _ = draw(each, tmp_path / "a.png")
    settings = {"image.origin": "lower", "image.interpolation": "bilinear", "axes.grid": True, "savefig.dpi": 37}
    with matplotlib.rc_context(settings):
        pixels, _ = draw(each, tmp_path / "a.png")
    torch.testing.assert_close(pixels, expected, rtol=0, atol=0.01)  # the bar of colours is smoothed


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
        [weights(2, 64, 64)] * 2, key_names=["a long token name"] * 64, query_names=["another long name"] * 64
    ),
    "many tokens": lambda: AttentionMap([weights(3, 200, 90)], key_names=["token"] * 90, query_names=["word"] * 200),
    "many heads": lambda: AttentionMap([weights(14, 9, 11)], signal=torch.randn(11, 5), channel_names=list("abcde")),
    "many": lambda: AttentionMap([weights(12, 8, 8)] * 3, signal=torch.randn(8, 321)),
    "millions": lambda: AttentionMap([weights(12, 8, 8)], interval=1e6, unit="s", signal=torch.randn(8, 2)),
}


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
    border = torch.cat([pixels[:2].flatten(0, 1), pixels[-2:].flatten(0, 1), pixels[:, -2:].flatten(0, 1)])
    assert (border > 0.99).all()


def test_png_wraps_heads_and_names_them(tmp_path: Path) -> None:
    _, axes = draw(AttentionMap([weights(14, L, S)]), tmp_path / "a.png")
    texts = [text.get_text() for text in axes[0].figure.texts]
    assert [text for text in texts if text.startswith("head")] == [f"head {i + 1}" for i in range(14)]
    assert texts.count("layer 1") == 2  # two rows of seven


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


# --- The file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "html"])
@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_whole_or_not_at_all(
    suffix: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text("before")

    def replace(*args: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(type(error)):
        heatmap(AttentionMap([weights(2, L, S)]), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    assert heatmap(AttentionMap([weights(2, L, S)]), str(path)) == path
    assert path.stat().st_size > 5000
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_bytes_again(tmp_path: Path) -> None:
    each = AttentionMap([weights(2, L, S)], title="a")
    for suffix in ("png", "html"):
        first, second = (heatmap(each, tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
        assert first == second
