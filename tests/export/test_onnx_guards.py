"""What torch.export takes for granted about sizes, and numbers that the example lacks: no file is silently wrong.

Most of it is slow; the default run has one of each kind.
"""

from __future__ import annotations

import math
import os

import onnx
import pytest
import torch
from tests.export.running import run
from torch import nn

from headwise.export import export_onnx
from headwise.export.verify import difference
from headwise.quant import quantize

pytestmark = pytest.mark.export
W = 8


class Do(nn.Module):
    """A linear layer, and a function that is told of it."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(W, W)

    def forward(self, x, **more):
        return self.function(self.linear, x, **more)


def export(function, x=None, folder=None, **options):
    example = torch.randn(3, 10, W) if x is None else x
    return export_onnx(Do(function), example, folder / "model.onnx", verbose=False, **options)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda f, x: f(x[:, -64:]), r'Dim\("length", max=63\).*-length > -64'),
        slow(lambda f, x: f(x[:, -64:] if x.shape[1] > 64 else x).mean(1), r"length <= 64"),
        slow(lambda f, x: f(x) if x.shape[1] > 50 else 2 * f(x), r'Dim\("length", max=50\).*length <= 50'),
        slow(lambda f, x: f(x) if x.shape[1] != 17 else 2 * f(x), r"Ne\(length, 17\) .* at batch 3, length 17"),
        slow(lambda f, x: f(x) if x.shape[0] * x.shape[1] < 1000 else 2 * f(x), r"length\*batch < 1000"),
        slow(lambda f, x: f(x) if x.shape[1] < 100_000 else 2 * f(x), r"length < 100000 .* too large to be tried"),
    ],
)
def test_another_way_at_other_sizes(tmp_path, function, message):
    """The message names the size, what was taken for granted, and the cure."""
    with pytest.raises(ValueError, match=rf"(?s)export_onnx: model must do the same at all sizes.*{message}"):
        export(function, folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bounds_are_a_cure(tmp_path):
    """A bound is said in the inputs, and holds for the trials."""
    length = torch.export.Dim("length", max=63)
    report = export(lambda f, x: f(x[:, -64:]), folder=tmp_path, dynamic_shapes={"x": {1: length}})
    assert str(report.inputs[0]) == f"x float (3, length, {W}), length at most 63"
    assert max(trial.sizes["length"] for trial in report.trials) == 63


class Table(nn.Module):
    """Adds one of 50 places."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.randn(50, W))

    def forward(self, x):
        return x + self.places[: x.shape[1]]


def test_bound_of_the_model(tmp_path):
    """A model that takes no more itself is no fault: it is a note, and said of the input."""
    report = export_onnx(Table(), torch.randn(3, 10, W), tmp_path / "model.onnx", verbose=False)
    assert "length is at most 50" in report.notes
    assert str(report.inputs[0]) == f"x float (batch, length, {W}), length at most 50"


@pytest.mark.slow
def test_bounds_of_more_inputs_than_notes(tmp_path):
    """Notes are cut after four; what is said of an input is not."""
    most = {"a": 20, "b": 23, "c": 29, "d": 31, "e": 37}

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            for name, size in most.items():
                self.register_buffer(f"places_{name}", torch.randn(size, W))

        def forward(self, a, b, c, d, e):
            given = zip(most, (a, b, c, d, e), strict=True)
            return tuple(x + self.get_buffer(f"places_{name}")[: x.shape[0]] for name, x in given)

    example = {name: torch.randn(3 + place, W) for place, name in enumerate(most)}
    report = export_onnx(Tables(), example, tmp_path / "model.onnx", verbose=False)
    assert [value.limits for value in report.inputs] == [
        (f"{value.shape[0]} at most {most[value.name]}",) for value in report.inputs
    ]
    assert report.notes[3:] == ("d_batch is at most 31", "and 1 more guards of torch.export")


@pytest.mark.slow
def test_size_that_is_fixed(tmp_path):
    """By the model, where it is not what the model needs."""
    report = export(lambda f, x: f(x) / math.sqrt(x.shape[1]), folder=tmp_path)
    assert report.inputs[0].shape == ("batch", 10, W)
    assert "fixed: x[1] = 10, where the model takes other sizes too" in report.notes


def test_equal_sizes(tmp_path):
    """A batch of 4 at length 4 is two sizes, also where a model compares them."""

    def turned(f, x):
        batch, length = x.shape[:2]
        return f(x).reshape(length, batch, W).transpose(0, 1).contiguous().reshape(batch, length, W)

    model, path = Do(turned).eval(), tmp_path / "model.onnx"
    report = export_onnx(model, torch.randn(4, 4, W), path, verbose=False)
    assert report.inputs[0].shape == ("batch", "length", W)
    x = torch.randn(2, 7, W)
    with torch.no_grad():
        torch.testing.assert_close(run(path, x=x)[0], model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_ones_that_mean_all(tmp_path):
    """A mask of one head for 2 heads stays of one head, and the file takes the example."""

    def attend(f, x, mask):
        q = f(x).unflatten(2, (2, W // 2)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    x, mask = torch.randn(2, 10, W), torch.ones(2, 1, 10, 10, dtype=torch.bool)
    report = export(attend, {"x": x, "mask": mask}, tmp_path)
    assert report.inputs[1].shape == ("batch", 1, "length", "length")
    run(report.path, x=x, mask=mask)


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda f, x: nn.functional.logsigmoid(x), "times .*: inf"),
        slow(lambda f, x: torch.atan2(x, x.flip(-1)), "signs and zeros mixed"),
        slow(lambda f, x: torch.logaddexp(x, x * 2), "times .*: inf"),
    ],
)
def test_other_numbers(tmp_path, function, values):
    """What torch's exporter translates in a way that large numbers break."""
    with pytest.raises(RuntimeError, match=rf"its numbers differ from the model's by .*{values}"):
        export(function, torch.rand(3, 10, W), tmp_path)


@pytest.mark.slow
def test_choices_that_tie(tmp_path):
    """Rows that begin anew at larger sizes differ a little: topk has one answer."""
    report = export(lambda f, x: x.topk(3, -1)[1], folder=tmp_path)
    assert report.error == 0


def test_nothing_but_nan(tmp_path):
    with pytest.raises(ValueError, match="example must be a call whose outputs are numbers"):
        export(lambda f, x: f(x) * math.nan, folder=tmp_path)


def test_difference():
    """Masked logits do not hide the others; tiny outputs count; integers count each."""
    want = torch.tensor([1.0, 2.0, -1e9])
    assert difference([want + torch.tensor([0.5, 0, 0])], [want]) == pytest.approx(0.25)
    assert difference([want * torch.tensor([1, 1, 1.5])], [want]) == pytest.approx(0.5)
    assert difference([torch.zeros(3)], [torch.zeros(3)]) == 0
    assert difference([torch.full((2,), math.nan)], [torch.zeros(2)]) == math.inf


@pytest.mark.slow
def test_one_wrong_integer(tmp_path):
    """Of many: a float file's integers are right or wrong."""

    def counted(f, x):
        return torch.arange(20_000) + (1 if x.shape[1] == 17 else 0) * (torch.arange(20_000) == 7)

    with pytest.raises(ValueError, match=r"at batch \d+, length 17"):
        export(counted, folder=tmp_path)


def test_names_of_values_inside(tmp_path):
    """Inputs and outputs may be called what torch calls its own values."""

    class Pad(nn.Module):
        def forward(self, pad, linear):
            return nn.functional.pad(pad, (1, 1)) + nn.functional.pad(linear, (1, 1))

    x = torch.randn(2, 3)
    path = tmp_path / "model.onnx"
    report = export_onnx(Pad(), {"pad": x, "linear": x}, path, output_names=["pad_1"], verbose=False)
    assert [value.name for value in (*report.inputs, *report.outputs)] == ["pad", "linear", "pad_1"]
    assert run(path, pad=x, linear=x)[0].shape == (2, 5)
    assert not [name for node in onnx.load(path).graph.node for name in node.output if name.startswith("headwise_")][1:]


@pytest.mark.slow
def test_one_product_for_two_calls(tmp_path):
    """A layer that is called twice on one input is one product in the file."""
    layer = quantize(nn.Sequential(nn.Linear(W, W)))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x) + 2 * self.layer(x)

    report = export_onnx(Twice(), torch.randn(2, 5, W), tmp_path / "model.onnx", verbose=False)
    assert (report.projections, report.integer_operators) == (1, {"DynamicQuantizeMatMul": 1})


@pytest.mark.slow
def test_static_int8_of_one_row(tmp_path):
    """Its width is fixed."""
    model = quantize(nn.Sequential(nn.Linear(W, W)), [torch.randn(W)])
    report = export_onnx(model, torch.randn(W), tmp_path / "model.onnx", verbose=False)
    assert report.inputs[0].shape == (W,)


WRONG_SHAPES = {
    "int": ({"x": 3}, r"dynamic_shapes\['x'\] must map dimensions to names"),
    "text": ({"x": "ab"}, r"dynamic_shapes\['x'\] must map dimensions to names"),
    "bool": ({"x": {True: "b"}}, r"must name dimensions 0 to 2; got True"),
    "number": ({"x": {0: 3}}, r"\[0\] must be a name such as 'batch'"),
    "made of another": ({"x": {0: 2 * torch.export.Dim("half")}}, r"\[0\] must be a name .* not made of another"),
    "too few": ({"x": ("b",)}, r"must have 3 entries"),
    "bounds": ({"x": {0: torch.export.Dim("b", min=5)}}, r"have bounds that hold the example's size"),
    "one name": ({"x": {0: "b", 1: "b"}}, r"\[1\] \(b\) must be one size in the model"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_dynamic_shapes(tmp_path, name):
    shapes, message = WRONG_SHAPES[name]
    with pytest.raises(ValueError, match=f"export_onnx: .*{message}"):
        export(lambda f, x: f(x), folder=tmp_path, dynamic_shapes=shapes)


@pytest.mark.slow
def test_dims(tmp_path):
    """Hints of torch.export: STATIC is fixed, AUTO is free by a name of ours."""
    hints = torch.export.Dim
    shapes = {"x": [hints.AUTO, hints.STATIC, None]}
    report = export(lambda f, x: f(x), folder=tmp_path, dynamic_shapes=shapes)
    assert report.inputs[0].shape == ("batch", 10, W)


@pytest.mark.parametrize("path", ["q/", "a\0b", "l" * 250 + ".onnx", "loop.onnx", "\udc80.onnx"])
def test_path(tmp_path, path):
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    with pytest.raises(ValueError, match="export_onnx: path must"):
        export_onnx(nn.Linear(2, 2), torch.randn(1, 2), f"{tmp_path}{os.sep}{path}", verbose=False)


def test_output_names_of_another_type(tmp_path):
    with pytest.raises(ValueError, match="output_names must be 1 name"):
        export(lambda f, x: f(x), folder=tmp_path, output_names=3)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["json", "onnxtxt", "textproto", "ort"])
def test_suffix(tmp_path, suffix):
    """The file is ONNX's own format by any name."""
    path = tmp_path / f"model.{suffix}"
    export_onnx(nn.Linear(2, 2), torch.randn(3, 2), path, verbose=False)
    onnx.load_model_from_string(path.read_bytes())


def test_what_is_set_outside(tmp_path, capfd, monkeypatch):
    """Another default device and dtype, autocast: as they were, and without a trace in the file."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    state = torch.get_rng_state()
    model, x = nn.Linear(2, 2), torch.randn(3, 2)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            torch.set_rng_state(state)
            report = export_onnx(model, x, tmp_path / "model.onnx", verbose=False)
            assert torch.get_default_dtype() == torch.float64
            assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.outputs[0].dtype == "float"
    assert torch.equal(state, torch.get_rng_state())
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    with pytest.raises(ValueError, match="no choice by the numbers"):
        export(lambda f, x: f(x) if x.sum().item() > 0 else x, folder=tmp_path)
    assert capfd.readouterr() == ("", "")
