"""One sample looked at as a whole."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from tests.unit.observe.looking import assert_clean, same
from tests.unit.packed import set_price
from torch import Tensor, nn

import headwise
from headwise.observe.inspection import inspect

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

B, L, D, H = 3, 10, 16, 4
LENGTHS = [10, 6, 1]
RIGHT = torch.arange(L) >= torch.tensor(LENGTHS)[:, None]
LEFT = RIGHT.flip(1)


def real(pad: Tensor | None, sample: int) -> list[int]:
    return list(range(L)) if pad is None else (~pad[sample]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("library", [nn.MultiheadAttention, headwise.MultiheadAttention])
@pytest.mark.parametrize("pad", [None, RIGHT, LEFT], ids=["none", "right", "left"])
@pytest.mark.parametrize("sample", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_maps_and_statistics_are_those_of_the_weights(
    library: type[nn.Module], pad: Tensor | None, sample: int, causal: bool
) -> None:
    torch.manual_seed(0)
    layer, x = library(D, H, batch_first=True).eval(), torch.randn(B, L, D)
    given: dict[str, Any] = {"key_padding_mask": pad}
    if causal:
        given |= {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1), "is_causal": True}
    out, weights = layer(x, x, x, **given, average_attn_weights=False)
    found = inspect(layer, x, x, x, **given, sample=sample)
    assert_clean(layer)
    torch.testing.assert_close(found.output[0].nan_to_num(), out.nan_to_num())
    assert not found.output[0].requires_grad
    [call] = found.calls
    rows = real(pad, sample)
    expected = weights[sample][:, rows][..., rows].detach()
    assert (call.index, call.name, call.kind, call.queries, call.keys) == (0, "", "self", len(rows), len(rows))
    torch.testing.assert_close(call.weights.mass[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(call.weights.peak[0], expected, rtol=1e-5, atol=1e-6)
    entropy = -(expected * expected.clamp(min=1e-30).log()).sum(dim=-1)
    torch.testing.assert_close(call.statistics.entropy[0], entropy, rtol=1e-4, atol=1e-5)
    away = (torch.arange(len(rows))[:, None] - torch.arange(len(rows))).abs()
    torch.testing.assert_close(call.statistics.distance[0], (expected * away).sum(dim=-1), rtol=1e-4, atol=1e-5)
    assert repr(found) == "<Inspection: 1 attention>"


@pytest.mark.parametrize("price", [0.0, 1e30])
def test_a_whole_model(price: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not, in the order in which they ran."""
    torch.manual_seed(0)
    model = headwise.Transformer(D, H, 1, 2, 32, batch_first=True).eval()
    x, y = torch.randn(B, L, D), torch.randn(B, 4, D)
    set_price(monkeypatch, price)
    plain = model(x, y, src_key_padding_mask=RIGHT, memory_key_padding_mask=RIGHT)
    found = inspect(model, x, y, src_key_padding_mask=RIGHT, memory_key_padding_mask=RIGHT, sample=1)
    torch.testing.assert_close(found.output, plain)
    assert [(call.name, call.kind) for call in found.calls] == [
        ("encoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.multihead_attn", "cross"),
        ("decoder.layers.1.self_attn", "self"),
        ("decoder.layers.1.multihead_attn", "cross"),
    ]
    assert [(call.queries, call.keys) for call in found.calls] == [(6, 6), (4, 4), (4, 6), (4, 4), (4, 6)]
    for call in found.calls:
        torch.testing.assert_close(call.weights.mass.sum(dim=-1), torch.ones(1, H, call.queries))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_model_of_torchs_in_its_fused_path(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(B, L, D)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=RIGHT)
    found = inspect(model, x, src_key_padding_mask=RIGHT, sample=1)
    assert same(found.output, plain)
    assert [call.queries for call in found.calls] == [6, 6]


def test_cells() -> None:
    layer, x = headwise.MultiheadAttention(D, H, batch_first=True), torch.randn(1, 100, D)
    [call] = inspect(layer, x, x, x, cells=10).calls
    assert call.weights.mass.shape == (1, H, 10, 10)
    assert (call.weights.queries_a_cell, call.weights.keys_a_cell) == (10, 10)
    assert call.statistics.entropy.shape == (1, H, 100)


def decoded() -> Any:
    torch.manual_seed(0)
    model = headwise.Transformer(D, H, 1, 2, 32, batch_first=True).eval()
    return inspect(model, torch.randn(1, L, D), torch.randn(1, 4, D))


def test_maps() -> None:
    found, tokens = decoded(), list("abcdefghij")
    assert found.model == "Transformer"
    assert [each.title for each in found.maps()] == [
        *("Transformer, self attention", "Transformer, self attention", "Transformer, cross attention")
    ]
    maps = found.maps(title="t", query_names=tokens, key_names=tokens)
    assert [(each.title, len(each.query_names), len(each.key_names)) for each in maps] == [
        *(("t, self attention", 10, 10), ("t, self attention", 0, 0), ("t, cross attention", 0, 10))
    ]
    layer, x = headwise.MultiheadAttention(D, H, batch_first=True), torch.randn(1, L, D)
    assert [each.title for each in inspect(layer, x, x, x).maps()] == ["MultiheadAttention"]


@pytest.mark.parametrize("argument", ["query_names", "key_names"])
@pytest.mark.parametrize("names", ["abcd", b"abcd", 3, None, [1, 2, 3, 4], set("abcd"), {"a": 1}, torch.ones(4)])
def test_no_names(argument: str, names: object) -> None:
    with pytest.raises(ValueError, match=rf"^Inspection.maps: {argument} must be a sequence of strings, .*; got "):
        decoded().maps(**{argument: names})


def test_names_that_fit_no_map() -> None:
    with pytest.raises(ValueError, match=r"^Inspection.maps: query_names must be as many .*: 4 or 10; got 5"):
        decoded().maps(query_names=list("abcde"))
    with pytest.raises(ValueError, match=r"^Inspection.maps: key_names must be as many .*: 4 or 10; got 1"):
        decoded().maps(key_names=["a"])


@pytest.mark.parametrize("title", [None, 3, b"t", ["t"]])
def test_no_title(title: object) -> None:
    with pytest.raises(ValueError, match=r"^Inspection.maps: title must be a text; .*; got "):
        decoded().maps(title=title)


@torch.no_grad()
def test_distances_count_from_where_a_cached_token_stands() -> None:
    layer = headwise.MultiheadAttention(D, H, batch_first=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    cache, x = headwise.StaticCache(8), torch.randn(1, 6, D)
    layer(x[:, :5], x[:, :5], x[:, :5], cache=cache)
    token = x[:, 5:]
    [call] = inspect(layer, token, token, token, cache=cache).calls
    assert (call.kind, call.queries, call.keys) == ("self", 1, 6)
    torch.testing.assert_close(call.statistics.distance[0, :, 0], torch.full((H,), 2.5))  # of 5, 4, 3, 2, 1, 0


def test_appended_keys_are_the_last() -> None:
    layer, x = nn.MultiheadAttention(D, H, add_bias_kv=True, add_zero_attn=True, batch_first=True), torch.randn(B, L, D)
    _, weights = layer(x, x, x, RIGHT, average_attn_weights=False)
    [call] = inspect(layer, x, x, x, RIGHT, sample=1).calls
    assert call.queries == 6
    torch.testing.assert_close(call.weights.mass[0, ..., -2:], weights[1, :, :6, -2:].detach())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"sample": -1}, "sample must"),
        ({"sample": True}, "sample must"),
        ({"sample": 1.0}, "sample must"),
        ({"sample": 3}, r"sample must be one of the batch, in 0 .. 2"),
        ({"cells": 0}, "cells must"),
    ],
)
def test_wrong_arguments_are_refused(words: dict[str, Any], said: str) -> None:
    layer, x = headwise.MultiheadAttention(D, H, batch_first=True), torch.randn(B, L, D)
    with pytest.raises(ValueError, match=f"inspect: {said}"):
        inspect(layer, x, x, x, **words)
    assert_clean(layer)


def test_models_that_cannot_be_inspected() -> None:
    x = torch.randn(B, L, D)

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = headwise.MultiheadAttention(D, H)

        def forward(self, x: Tensor) -> Tensor:
            return x

    class OfOne(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x, x, x)

    with pytest.raises(ValueError, match=r"inspect: model must be an nn.Module"):
        inspect(3, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"inspect: model must hold .* Linear, without any"):
        inspect(nn.Linear(D, D), x)
    compiled = torch.compile(headwise.MultiheadAttention(D, H), backend="eager")
    with pytest.raises(ValueError, match=r"inspect: model must hold .* compiled"):
        inspect(compiled, x, x, x)
    with pytest.raises(ValueError, match=r"inspect: model must call an attention"):
        inspect(Idle(), x)
    with pytest.raises(ValueError, match=r"inspect: model must call its attentions as torch's are called"):
        inspect(OfOne(D, H), x)
    with pytest.raises(ValueError, match=r"inspect: model must call an attention on this input"):
        inspect(headwise.MultiheadAttention(D, H, batch_first=True), *[torch.randn(1, 0, D)] * 3)


@pytest.mark.parametrize(
    ("length", "most"), [(2048, 40), pytest.param(4096, 60, marks=pytest.mark.slow)]
)  # of 128 and 512 MiB of weights
def test_memory_is_linear(length: int, most: int) -> None:
    script = f"""
        import resource, torch
        import headwise
        from headwise.observe.inspection import inspect
        torch.set_num_threads(1)
        layer = headwise.MultiheadAttention(64, 8, batch_first=True)
        short, long = torch.randn(1, 64, 64), torch.randn(1, {length}, 64)
        with torch.no_grad():
            inspect(layer, short, short, short)
            layer(long, long, long, need_weights=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        [call] = inspect(layer, long, long, long, sample=0).calls
        assert call.weights.mass.shape == (1, 8, 256, 256)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(out) * unit < most * 2**20
