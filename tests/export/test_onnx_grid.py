"""Every kind of attention, mask and model through `export_onnx`, float, static and dynamic int8.

`export_onnx` raises where a file's numbers differ at any size, or where an int8 product runs in float.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import headwise
from headwise import masks
from headwise.export import export_onnx
from headwise.quant import quantize

pytestmark = [pytest.mark.export, pytest.mark.slow]
D, H = 24, 4
B, L, S = 3, 7, 5


class Vision(nn.Module):
    """A convolution, a norm with statistics, and a dict of outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, image):
        return {"logits": self.head(self.norm(self.conv(image)).relu().mean((2, 3))), "sum": image.sum()}


class Several(nn.Module):
    """Lists, a constant, an output twice, an input that is an output, an input called like one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, parts, *more, scale=1.0, **others):
        y = self.linear(parts[0] + parts[1]) * scale
        return y, y, parts[0], more[0] if more else others["output"]


def x():
    return torch.randn(B, L, D)


def memory():
    return torch.randn(B, S, D)


def padding(length):
    """Of the samples all, some and nothing is real."""
    return torch.arange(length) >= torch.tensor([[length], [length // 2], [0]])


def itself(**words):
    given = x()
    return {"query": given, "key": given, "value": given, **words}


def other(**words):
    given = memory()
    return {"query": x(), "key": given, "value": given, **words}


def attention(**options):
    return headwise.MultiheadAttention(D, H, **{"batch_first": True, **options})


FREE, KEYS = f"(batch, length, {D})", f"(batch, key_length, {D})"
MODELS = {
    "weights": (attention, itself),
    "no weights": (attention, lambda: itself(need_weights=False)),
    "weights of heads": (attention, lambda: itself(average_attn_weights=False, key_padding_mask=padding(L))),
    "cross": (attention, lambda: other(key_padding_mask=padding(S))),
    "causal": (attention, lambda: itself(is_causal=True, need_weights=False)),
    "bool mask": (attention, lambda: other(attn_mask=torch.rand(L, S) > 0.5)),
    "float masks": (attention, lambda: other(attn_mask=torch.randn(L, S), key_padding_mask=padding(S))),
    "mask of heads": (attention, lambda: other(attn_mask=torch.rand(B * H, L, S) > 0.5)),
    "rules": (attention, lambda: itself(mask=masks.causal() & masks.window(2, 2))),
    "grouped, rotary": (
        lambda: attention(num_kv_heads=2, positions="rotary"),
        lambda: itself(key_padding_mask=padding(L), need_weights=False),
    ),
    "alibi": (lambda: attention(positions="alibi"), lambda: itself(is_causal=True)),
    "all options": (
        lambda: attention(num_kv_heads=2, positions="rotary", qk_norm=True, gate=True, sink=True, softcap=5.0),
        lambda: itself(key_padding_mask=padding(L)),
    ),
    "appended keys": (lambda: attention(add_bias_kv=True, add_zero_attn=True), itself),
    "fused": (lambda: attention(fused_qkv=True), itself),
    "length first": (lambda: attention(batch_first=False), itself),
    "one sample": (attention, lambda: (torch.randn(L, D), *[torch.randn(S, D)] * 2)),
    "one token": (attention, lambda: (torch.randn(1, 1, D),) * 3),
    "encoder": (
        lambda: headwise.Encoder([headwise.EncoderBlock(D, H, norm="rmsnorm", activation="swiglu") for _ in "ab"]),
        lambda: {"x": x(), "key_padding_mask": padding(L), "query_padding_mask": padding(L), "need_weights": True},
    ),
    "grouped block": (
        lambda: headwise.EncoderBlock(D, H, attention=attention(num_kv_heads=2, positions="rotary")),
        lambda: {"x": x(), "is_causal": True},
    ),
    "decoder": (lambda: headwise.Decoder([headwise.DecoderBlock(D, H)]), lambda: (x(), memory())),
    "torch attention": (lambda: nn.MultiheadAttention(D, H, batch_first=True), lambda: other()),
    "torch encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 36, batch_first=True), 2),
        lambda: {"src": x(), "src_key_padding_mask": padding(L)},
    ),
    "torch transformer": (
        lambda: nn.Transformer(D, H, 1, 1, 36, batch_first=True),
        lambda: {
            "src": memory(),
            "tgt": x(),
            "tgt_mask": torch.ones(L, L, dtype=torch.bool).triu(1),
            "memory_key_padding_mask": padding(S),
        },
    ),
    "series": (
        lambda: headwise.SequenceClassifier(
            5, num_channels=6, embed_dim=D, num_heads=H, num_layers=1, kernel_size=3, stride=2
        ),
        lambda: (torch.randn(B, 12, 6), padding(12)),
    ),
    "tokens": (
        lambda: headwise.SequenceClassifier(5, vocab_size=11, embed_dim=D, num_heads=H, num_layers=1),
        lambda: torch.randint(0, 11, (2, 9)),
    ),
    "vision": (Vision, lambda: torch.randn(2, 3, 8, 8)),
    "layers": (lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)), lambda: torch.randn(1, 16)),
    "several": (Several, lambda: {"parts": [torch.randn(2, 4)] * 2, "scale": 2.0, "output": torch.randn(3)}),
}
NAMES = {  # of inputs and outputs, where they are worth holding
    "weights of heads": (
        [
            f"query float {FREE}",
            f"key float {KEYS}",
            f"value float {KEYS}",
            "key_padding_mask bool (batch, key_length)",
        ],
        [f"output float {FREE}", f"output_1 float (batch, {H}, length, key_length)"],
    ),
    "length first": (
        [f"query float (length, batch, {D})", *(f"{one} float (key_length, batch, {D})" for one in ("key", "value"))],
        [f"output float (length, batch, {D})", "output_1 float (batch, length, key_length)"],
    ),
    "tokens": (["x int64 (batch, length)"], ["output float (batch, 5)"]),
    "vision": (["image float (batch, 3, image_2, image_3)"], ["logits float (batch, 4)", "sum float ()"]),
    "several": (
        ["parts_0 float (batch, 4)", "parts_1 float (batch, 4)", "output float (output_batch)"],
        [*(f"output{end} float (batch, 4)" for end in ("_", "_1", "_2")), "output_3 float (output_batch)"],
    ),
}


def build(name):
    make, call = MODELS[name]
    torch.manual_seed(3)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model, call()


@pytest.mark.parametrize("name", MODELS)
def test_float(name, tmp_path):
    model, example = build(name)
    report = export_onnx(model, example, tmp_path / "model.onnx", verbose=False)
    assert report.error < 1e-5
    assert not [note for note in report.notes if "fixed" in note]
    assert len(report.trials) >= 3
    inputs, outputs = NAMES.get(name, (None, None))
    assert inputs in (None, [str(value) for value in report.inputs])
    assert outputs in (None, [str(value) for value in report.outputs])


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_int8(name, kind, tmp_path, caplog):
    caplog.set_level(logging.ERROR, "headwise")
    model, example = build(name)
    small = quantize(model, [example] if kind == "static" else None)
    report = export_onnx(small, example, tmp_path / "model.onnx", verbose=False)
    assert report.kind == kind
    assert sum(report.integer_operators.values()) >= report.projections > 0
    if kind == "static":
        assert set(report.integer_operators) == {"QGemm"}
    else:
        assert set(report.integer_operators) <= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}


@pytest.mark.parametrize("kind", ["float", "static", "dynamic"])
@pytest.mark.parametrize("opset", [18, 19, 21, 22, 23])
def test_opsets(opset, kind, tmp_path):
    model, example = build("grouped block")
    if kind != "float":
        model = quantize(model, [example] if kind == "static" else None)
    report = export_onnx(model, example, tmp_path / "model.onnx", opset=opset, verbose=False)
    assert report.opset == opset


def test_fixed_sizes_run_in_int8_too(tmp_path):
    """Without the weights' zero points onnxruntime would run a float product here."""
    model, example = build("grouped block")
    path = tmp_path / "model.onnx"
    report = export_onnx(quantize(model, [example]), example, path, dynamic_shapes={}, verbose=False)
    assert report.integer_operators == {"QGemm": 4}
    assert report.notes[0] == "every size is fixed"


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_size(kind, tmp_path):
    """At most 0.3 of float for a layer of usual size."""
    block, given = headwise.EncoderBlock(256, 8, feedforward_dim=1024), torch.randn(2, 16, 256)
    small = quantize(block, [given] if kind == "static" else None)
    report = export_onnx(small, given, tmp_path / "int8.onnx", verbose=False)
    whole = export_onnx(block, given, tmp_path / "float.onnx", verbose=False)
    assert report.size_ratio == pytest.approx(report.bytes / whole.bytes, rel=0.02)
    assert report.size_ratio < 0.3


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_wrapped(wrap, tmp_path):
    model, example = build("layers")
    report = export_onnx(wrap(model), example, tmp_path / "model.onnx", verbose=False)
    assert report.inputs[0].name == "input"
