"""headwise.observe.heatmap: what is refused, what is drawn, and that a file is there whole or not at all."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise
from headwise.observe import heatmap as module
from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.picture import Line, _pool
from headwise.observe.probes import PooledWeights, pooled_attention_weights
from headwise.observe.snapshot import LiveMap

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


def greatest(picture: dict[str, Any], layer: int, head: int) -> Tensor:
    """Likewise the greatest single weight in each cell."""
    return cells(picture | {"layers": picture["greatest"], "top": picture["greatest_top"]}, layer, head)


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
        ({"stride": 0}, "stride must be an integer of at least 1 and at most 2**31; got 0"),
        ({"stride": 2.0}, "stride must be an integer"),
        ({"stride": True}, "stride must be an integer"),
        ({"interval": 0.0}, "interval must be a number above 0 and finite"),
        ({"interval": float("nan")}, "interval must be a number above 0 and finite"),
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
        # What is no tensor, no number or no sequence is refused like the rest, and named in a few words.
        ({"weights": None}, "got NoneType"),
        ({"weights": [torch.ones(L, S), None]}, "got [torch.float32 (5, 7), NoneType]"),
        ({"weights": [torch.ones(L, S).to_sparse()]}, "weights[0] must be dense and hold values; got torch.float32"),
        ({"weights": [torch.ones(L, S, device="meta")]}, "torch.strided on meta"),
        (
            {"weights": [torch.nested.nested_tensor([torch.ones(S)] * L, layout=torch.jagged)]},
            "got a nested tensor of torch.float32",
        ),
        ({"weights": [torch.full((L, S), -1e-300, dtype=torch.float64)]}, "got values from -1e-300 to -1e-300"),
        ({"weights": [torch.full((L, S), 1e101, dtype=torch.float64)]}, "weights[0] must be finite and at least 0, at"),
        ({"key_padding_mask": [True] * S}, "key_padding_mask must be a tensor: be bool with one value"),
        ({"query_padding_mask": np.zeros(L, dtype=bool)}, "query_padding_mask must be a tensor"),
        ({"query_padding_mask": torch.zeros(L, dtype=torch.bool, device="meta")}, "must be a tensor"),
        ({"signal": np.ones((S, 2))}, "torch.as_tensor takes an array or a list; got ndarray"),
        ({"signal": [[1.0]] * S}, "torch.as_tensor takes an array or a list; got list"),
        ({"signal": torch.ones(S, 2, device="meta")}, "signal must be a dense tensor"),
        ({"signal": torch.full((S, 1), -1.7e308, dtype=torch.float64)}, "signal must be at most 1e+100 in size"),
        ({"interval": None}, "interval must be a number above 0 and finite, from 1e-100 to 1e+100; got None"),
        ({"interval": "1"}, "interval must be a number above 0 and finite, from 1e-100 to 1e+100; got '1'"),
        ({"interval": True}, "interval must be a number"),
        ({"interval": torch.ones(2)}, "got torch.float32 (2,)"),
        ({"interval": 10**400}, "interval must be a number"),
        ({"interval": 1e308}, "interval must be a number"),
        ({"interval": 5e-324}, "interval must be a number"),
        ({"stride": None}, "stride must be an integer"),
        ({"stride": "2"}, "stride must be an integer"),
        ({"stride": torch.ones(2)}, "got torch.float32 (2,)"),
        ({"stride": 10**400}, "stride must be an integer of at least 1 and at most 2**31; got 1000"),
        ({"key_names": None}, "key_names must be a sequence of strings, one for each of the keys, padding included"),
        ({"key_names": 3}, "key_names must be a sequence of strings"),
        ({"key_names": set("abcdefg")}, "key_names must be a sequence of strings"),
        ({"query_names": dict.fromkeys("abcde")}, "query_names must be a sequence of strings"),
        ({"channel_names": torch.ones(2)}, "got torch.float32 (2,)"),
        ({"layer_names": ["a", "b"]}, "layer_names must be one for each of the 1 layers; got 2"),
        # Pooled weights, and some rows.
        ({"keys_a_cell": 2}, "num_keys must be an integer of at least 1, of pooled weights always given; got None"),
        ({"keys_a_cell": 0}, "keys_a_cell must be an integer of at least 1; got 0"),
        ({"queries_a_cell": 2.0, "num_queries": 9}, "queries_a_cell must be an integer of at least 1; got 2.0"),
        ({"keys_a_cell": 2, "num_keys": 12}, "num_keys must be positions of 7 cells with 2 in each, but for the last"),
        ({"keys_a_cell": 2, "num_keys": 15}, "num_keys must be positions of 7 cells with 2 in each, but for the last"),
        ({"num_queries": L + 1}, "num_queries must be positions of 5 cells with 1 in each"),
        ({"num_keys": True}, "num_keys must be an integer"),
        ({"num_keys": torch.ones(2)}, "num_keys must be an integer"),
        (
            {"keys_a_cell": 2, "num_keys": 13, "key_padding_mask": torch.zeros(S, dtype=torch.bool)},
            "key_padding_mask must be left out where rows or columns are no single positions; cut padding off before",
        ),
        (
            {"query_positions": range(L), "query_padding_mask": torch.zeros(L, dtype=torch.bool)},
            "query_padding_mask must be left out where rows",
        ),
        ({"keys_a_cell": 2, "num_keys": 13, "key_names": ["a"] * S}, "key_names must be one for each of the 13 keys"),
        ({"query_positions": [0, 1]}, "query_positions must be the positions of the 5 rows, whole numbers from 0 on"),
        ({"query_positions": [0, 1, 2, 3, 3]}, "ascending"),
        ({"query_positions": [-1, 1, 2, 3, 4]}, "whole numbers from 0 on"),
        ({"query_positions": [0, 1, 2, 3, 4.5]}, "query_positions must be"),
        ({"query_positions": 3}, "query_positions must be"),
        ({"query_positions": range(5, 10), "num_queries": 9}, "below num_queries; got 9 of 9"),
        ({"query_positions": range(5), "queries_a_cell": 2, "num_queries": 9}, "queries_a_cell must be 1 where"),
        ({"query_positions": range(5), "query_names": ["a"] * 9}, "query_names must be one for each of the 5 rows"),
        ({"peaks": torch.ones(2, L, S)}, "peaks must be a list of tensors, one for each layer"),
        ({"peaks": [torch.ones(1, L, S)]}, "peaks must be shaped as weights are, layer by layer"),
        ({"peaks": [torch.full((2, L, S), -1.0)]}, "peaks[0] must be finite and at least 0"),
        ({"notes": [1]}, "notes must be a mapping from a text to a list for each layer, of a number or None for each"),
        ({"notes": {"a": [[1.0]]}}, "here [2]; got 'a' of [1]"),
        ({"notes": {"a": [1.0, 2.0]}}, "got 'a': [1.0, 2.0]"),
        ({"notes": {"a": [["x", "y"]]}}, "notes must be a mapping"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        AttentionMap(**({"weights": [torch.full((2, L, S), 1 / S)]} | arguments))
    assert str(caught.value).startswith("AttentionMap: ")
    assert len(str(caught.value)) < 300


def test_numbers_and_names_of_other_libraries_are_taken() -> None:
    one = AttentionMap(
        [weights(2, L, S)], stride=np.int64(1), interval=np.float32(0.5), key_names=np.array(list("abcdefg"))
    )
    assert (one.stride, one.interval, one.key_names) == (1, 0.5, tuple("abcdefg"))
    assert type(one.stride) is int
    assert type(one.interval) is float
    assert AttentionMap([weights(2, L, S)], interval=torch.tensor(2), key_names=iter("abcdefg")).interval == 2.0


def test_repr_is_short() -> None:
    one = AttentionMap([weights(2, L, S)])
    assert repr(one) == "<AttentionMap: 1 layer, 2 heads, 5 queries x 7 keys>"
    more = AttentionMap(
        [weights(4, S, S), weights(1, S, S), weights(S, S)],
        title="a title " * 99,
        signal=torch.randn(6, 12),
        key_padding_mask=torch.arange(S) > 5,
    )
    parts = "3 layers, 4 heads or 1 head or mean of heads, 7 queries x 7 keys, 1 key of padding"
    assert repr(more).startswith("<AttentionMap 'a title ")
    assert repr(more).endswith(f": {parts}, signal of 6 steps x 12 channels>")
    assert len(repr(more)) < 200


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
        (None, tmp_path / "a.html", "a sequence of one at least; got NoneType"),
        (3, tmp_path / "a.html", "a sequence of one at least; got int"),
        (weights(2, L, S), tmp_path / "a.html", "a sequence of one at least; got torch.float32 (2, 5, 7)"),
        (torch.tensor(1.0), tmp_path / "a.html", "a sequence of one at least; got torch.float32 ()"),
        ([one, *[weights(L, S)] * 9], tmp_path / "a.html", "got [AttentionMap, torch.float32 (5, 7), "),
        (one, None, "path must be a string or a path that ends in .png or .html; got NoneType"),
        (one, b"a.png", "path must be a string or a path"),
    ]
    (tmp_path / "folder.html").mkdir()
    cases.append((one, tmp_path / "folder.html", "path must name a file"))
    for maps, path, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            heatmap(maps, path)
        assert str(caught.value).startswith("heatmap: ")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


@pytest.mark.parametrize("cells", [0, 1025, 2.0, True, "64"])
def test_heatmap_refuses_cells(tmp_path: Path, cells: Any) -> None:
    with pytest.raises(ValueError, match="heatmap: cells must be an int from 1 to 1024, or None; got "):
        heatmap(AttentionMap([weights(2, L, S)]), tmp_path / "a.html", cells=cells)


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
    for suffix in ("png", "html") if dtype == torch.bfloat16 else ("html",):
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
        "query: position (index)",
        "key: position attended to (index)",
        "attention weight (each row sums to 1)",
    )
    steps = "query: time step (index)", "key: time step attended to (index)"
    assert labels(AttentionMap(square, signal=torch.randn(S, 1)))[:2] == steps
    assert labels(AttentionMap(square, stride=4))[:2] == steps
    assert labels(AttentionMap(square, interval=0.5))[:2] == steps
    assert labels(AttentionMap(square, interval=6.4, unit="ms"))[:2] == (
        "query: time (ms)",
        "key: time attended to (ms)",
    )
    assert labels(AttentionMap([weights(2, L, S)], interval=6.4, unit="ms"))[:2] == (
        "query: position (index)",  # of another sequence, whose times are not known
        "key: time attended to (ms)",
    )
    assert labels(AttentionMap(square, key_names=["a"] * S))[:2] == (
        "query: position (index)",
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


@pytest.mark.parametrize("values", [[0.3, 0.1 + 0.2], [-1e100, 1e100], [5e-324, 0.0], [1e16, 1e16 + 2], [2e9, 2e9 + 1]])
def test_the_frame_has_room_for_ticks(values: list[float], tmp_path: Path) -> None:
    """A fifth of what it spans is far above the spacing of doubles; else a loop from tick to tick would not move."""
    low, high = Line(torch.tensor(values, dtype=torch.float64)[:, None], 0.0, 1.0).frame
    assert low < min(values) <= max(values) < high
    assert high - low >= 1e-9 * max(abs(low), abs(high))
    assert (high - low) / max(map(abs, values), default=0) > 1e-9
    signal = torch.tensor(values * 4, dtype=torch.float64)[:S, None]
    (picture,) = payload(heatmap(AttentionMap([weights(1, L, S)], signal=signal), tmp_path / "a.html"))
    assert picture["line"]["frame"] == [low, high]


def test_a_slow_drift_far_from_zero_is_not_flat() -> None:
    low, high = Line(torch.tensor([[1.7e9], [1.7e9 + 2]], dtype=torch.float64), 0.0, 1.0).frame
    assert high - low < 8


@pytest.mark.parametrize(
    "arguments",
    [
        {"weights": [torch.full((L, S), 5e-324, dtype=torch.float64)]},
        {"weights": [torch.full((L, S), 1e100, dtype=torch.float64)]},
        {"signal": torch.tensor([[-1e100], [1e100]] * 4, dtype=torch.float64)[:S]},
        {"signal": torch.tensor([[0.3], [0.1 + 0.2]] * 4, dtype=torch.float64)[:S]},
        {"interval": 1e100, "stride": 2**31},
        {"interval": 1e-100},
    ],
)
def test_the_ends_of_what_is_taken_are_drawn(arguments: dict[str, Any], tmp_path: Path) -> None:
    each = AttentionMap(**({"weights": [weights(1, L, S)]} | arguments))
    heatmap(each, tmp_path / "a.png")
    (picture,) = payload(heatmap(each, tmp_path / "a.html"))
    assert picture["top"] / 254**2 > 0


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


def test_many_heads_take_fewer_cells_so_that_the_page_stays_small(tmp_path: Path) -> None:
    """4 layers of 8 heads: 600 KiB at most, pooled or not; however many heads, 64 cells a side are left."""
    layers = [torch.rand(8, 256, 256) for _ in range(4)]
    path = heatmap(AttentionMap(layers), tmp_path / "a.html")
    assert path.stat().st_size < 600 * 1024
    (picture,) = payload(path)
    assert picture["query"]["size"] == picture["key"]["size"] == 4  # at 3, 86 cells a side, both views are too much
    assert "pooled: keys in a cell 4" in picture["label"]
    (picture,) = payload(heatmap(AttentionMap(layers), tmp_path / "b.html", cells=256))
    assert picture["key"]["size"] == 1
    assert (tmp_path / "b.html").stat().st_size > 2_500_000
    (picture,) = payload(heatmap([AttentionMap([torch.rand(400, 60, 90)])], tmp_path / "c.html"))
    assert (picture["query"]["size"], picture["key"]["size"]) == (1, 2)
    two = [AttentionMap([torch.rand(8, 200, 200)]), AttentionMap([torch.rand(12, 150, 150)])]
    assert heatmap(two, tmp_path / "d.html").stat().st_size < 600 * 1024


# --- Pooled weights, and some rows ----------------------------------------------------------------------------------


def long(num_queries: int, num_keys: int, size: int, *, batch: int = 1) -> tuple[Tensor, PooledWeights]:
    """All the weights, and the same pooled without them."""
    query, key = torch.randn(batch, 2, num_queries, 8), 2 * torch.randn(batch, 2, num_keys, 8)
    return headwise.attention_weights(query, key), pooled_attention_weights(query, key, cells=size)


@pytest.mark.parametrize(("num_queries", "num_keys", "size"), [(60, 60, 20), (61, 59, 20), (130, 517, 64), (1, 9, 4)])
def test_pooled_weights_are_drawn_as_they_are(tmp_path: Path, num_queries: int, num_keys: int, size: int) -> None:
    each, pooled_weights = long(num_queries, num_keys, size, batch=2)
    drawn = AttentionMap.pooled([pooled_weights] * 2, num_queries=num_queries, num_keys=num_keys, sample=1)
    (picture,) = payload(heatmap(drawn, tmp_path / "a.html"))
    for side, number in (("query", num_queries), ("key", num_keys)):
        assert (picture[side]["num"], picture[side]["size"]) == (number, -(-number // size))
    expected_LS = pooled_weights.mass[1, 1].double()
    slack = (expected_LS * picture["top"]).sqrt() / 254 + picture["top"] / 254**2
    assert ((cells(picture, 1, 1) - expected_LS).abs() <= slack).all()
    assert ((greatest(picture, 1, 1) - pooled_weights.peak[1, 1].double()).abs() <= picture["greatest_top"] / 250).all()
    # What is said of the most attended keys is of all queries alike, however ragged the last cell is.
    columns = torch.stack([run.sum(1) for run in each[1, 1].split(picture["key"]["size"], dim=1)], dim=1)
    column, share = picture["peaks"][0][1]
    assert (column, picture["grain"]) == (int(columns.mean(0).argmax()), picture["key"]["size"])
    assert share == pytest.approx(float(columns.mean(0).max()), rel=1e-4)
    assert "each row sums to 1)" in picture["label"]


@pytest.mark.parametrize(("num_queries", "num_keys"), [(100, 100), (97, 103), (41, 81)])
def test_pooled_weights_pool_further(tmp_path: Path, num_queries: int, num_keys: int) -> None:
    """As if all had been pooled at once, ragged last cells too; rows keep their sum."""
    each, pooled_weights = long(num_queries, num_keys, 50)
    drawn = AttentionMap.pooled([pooled_weights], num_queries=num_queries, num_keys=num_keys)
    (picture,) = payload(heatmap(drawn, tmp_path / "a.html", cells=12))
    sizes = picture["query"]["size"], picture["key"]["size"]
    assert sizes[0] % pooled_weights.queries_a_cell == 0
    expected_LS, top = pooled(each[0, 1], *sizes), picture["top"]
    assert max(expected_LS.shape) <= 12
    assert ((cells(picture, 0, 1) - expected_LS).abs() <= (expected_LS * top).sqrt() / 250 + top / 250**2).all()
    torch.testing.assert_close(
        cells(picture, 0, 1).sum(1), torch.ones(len(expected_LS), dtype=torch.float64), atol=0.01, rtol=0
    )
    runs = [run.amax(1) for run in each[0, 1].split(sizes[1], dim=1)]
    greatest_LS = torch.stack([run.amax(0) for run in torch.stack(runs, dim=1).split(sizes[0], dim=0)]).double()
    assert ((greatest(picture, 0, 1) - greatest_LS).abs() <= picture["greatest_top"] / 250).all()


def test_a_narrow_column_does_not_vanish(tmp_path: Path) -> None:
    """A single great weight among 520 x 520 is lost in the mass of its cell, and there in the greatest weight."""
    layer = torch.full((1, 520, 520), 1 / 520)
    layer[0, 100, 333] = 0.9
    (picture,) = payload(heatmap(AttentionMap([layer]), tmp_path / "a.html"))
    assert float(greatest(picture, 0, 0)[33, 111]) == pytest.approx(0.9)
    assert int((greatest(picture, 0, 0) > 0.1).sum()) == 1
    (small,) = payload(heatmap(AttentionMap([layer[:, :200, :200]]), tmp_path / "b.html"))
    assert small["greatest"] == []  # a cell holds one weight


def test_some_rows_stand_at_their_positions(tmp_path: Path) -> None:
    live = LiveMap(3, (2, 30, 77), 80, 45, 10, weights(2, 3, 5), ("a", "b", "c"), tuple(map(str, range(45))))
    drawn = AttentionMap.sampled(live, title="t")
    assert repr(drawn) == "<AttentionMap 't': 1 layer, 2 heads, 3 of 80 queries x 45 keys in 3 x 5 cells>"
    (picture,) = payload(heatmap(drawn, tmp_path / "a.html"))
    query, key = picture["query"], picture["key"]
    assert (query["num"], query["size"], query["marks"], query["names"]) == (3, 1, ["2", "30", "77"], ["a", "b", "c"])
    assert (key["num"], key["size"], len(key["names"])) == (45, 10, 45)
    assert ((cells(picture, 0, 1) - live.mass[1].double()).abs() <= picture["top"] / 250).all()
    assert picture["greatest"] == []
    # Where queries and keys are the same steps of a series, rows stand at their times.
    timed = AttentionMap([weights(2, 3, 9)], query_positions=[1, 4, 8], num_queries=9, interval=5.0, unit="ms")
    (picture,) = payload(heatmap(timed, tmp_path / "b.html"))
    assert (picture["query"]["marks"], picture["query"]["unit"]) == (["5", "20", "40"], "ms")
    assert picture["query"]["label"] == "query: time (ms)"
    heatmap(drawn, tmp_path / "a.png")


def test_layers_must_be_pooled_alike() -> None:
    _, some = long(60, 60, 20)
    _, other = long(60, 60, 10)
    with pytest.raises(ValueError, match=r"AttentionMap.pooled: layers must be one at least, all with cells of the"):
        AttentionMap.pooled([some, other], num_queries=60, num_keys=60)


@pytest.mark.parametrize("layers", [[], None, 5, "x", [None], [torch.ones(1, 1, 2, 2)], torch.ones(1, 1, 2, 2), "one"])
def test_layers_must_be_pooled(layers: Any) -> None:
    layers = long(60, 60, 20)[1] if layers == "one" else layers
    with pytest.raises(ValueError, match=r"^AttentionMap.pooled: layers must be a sequence of PooledWeights, .*; got "):
        AttentionMap.pooled(layers, num_queries=60, num_keys=60)


@pytest.mark.parametrize("sample", [-1, 2, 1.0, True, None, "0", torch.tensor([0, 1])])
def test_no_such_sample_of_pooled_weights(sample: Any) -> None:
    _, layer = long(60, 60, 20, batch=2)
    with pytest.raises(ValueError, match=r"^AttentionMap.pooled: sample must be .*; got "):
        AttentionMap.pooled([layer], num_queries=60, num_keys=60, sample=sample)


@pytest.mark.parametrize("word", ["weights", "peaks", "queries_a_cell", "keys_a_cell"])
def test_pooled_weights_say_it_themselves(word: str) -> None:
    _, layer = long(60, 60, 20)
    with pytest.raises(ValueError, match=rf"^AttentionMap.pooled: more must leave .*; got {word}"):
        AttentionMap.pooled([layer], num_queries=60, num_keys=60, **{word: 3})


@pytest.mark.parametrize("live", [None, 3, "x", torch.ones(1, 2, 2)])
def test_no_live_map(live: Any) -> None:
    with pytest.raises(ValueError, match=r"^AttentionMap.sampled: live must be a LiveMap, .*; got "):
        AttentionMap.sampled(live)
    with pytest.raises(ValueError, match=r"^AttentionMap.sampled: live must be .* alone; got weights"):
        AttentionMap.sampled(LiveMap(0, (0,), 3, 3, 1, weights(1, 1, 3)), weights=[])


def test_names_and_notes_are_told(tmp_path: Path) -> None:
    notes = {"max logit": torch.tensor([[1.5, float("inf")]]), "sink": [[None, 0.25]]}
    one = AttentionMap([weights(2, L, S)], layer_names=["enc"], notes=notes)
    (picture,) = payload(heatmap(one, tmp_path / "a.html"))
    assert picture["notes"] == {"max logit": [[1.5, None]], "sink": [[None, 0.25]]}
    assert picture["layer_names"] == ["enc"]


# Reads the peak of its memory above what it was after torch was loaded and had done a first small piece of the work.
MEMORY = """
import resource, sys, torch
from pathlib import Path
from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.probes import pooled_attention_weights
torch.set_num_threads(1)
def page(length):
    x = torch.randn(1, 1, length, 8)
    pooled = pooled_attention_weights(x, x, cells=128)
    return heatmap(AttentionMap.pooled([pooled], num_queries=length, num_keys=length), Path(sys.argv[2]))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
page(64)
before = peak()
size = page(int(sys.argv[1])).stat().st_size
print(peak() - before, size)
"""


@pytest.mark.parametrize("length", [6_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_long_input_in_linear_memory(tmp_path: Path, length: int) -> None:
    """An L x S matrix alone, in float32, has 144 MB at 6,000 positions and 1.6 GB at 20,000."""
    command = [sys.executable, "-c", MEMORY, str(length), str(tmp_path / "a.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kib, size = map(int, done.stdout.split())
    assert kib < 60 * 1024
    assert size < 120_000


# --- The file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "error"), [("png", OSError("full")), ("html", KeyboardInterrupt())])
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
