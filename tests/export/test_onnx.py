"""`export_onnx`: files that onnxruntime runs with the model's numbers, float and int8, and what is refused at the door.

The grid of models and calls is in test_onnx_grid.py.
"""

from __future__ import annotations

import copy
import logging
import warnings

import onnx
import onnxruntime
import pytest
import torch
from tests.export.running import run
from torch import nn

import headwise
from headwise.export import export_onnx
from headwise.quant import quantize

pytestmark = pytest.mark.export
D, H = 24, 4


def block(**options):
    """An encoder block whose biases and norms are not what they start as."""
    made = headwise.EncoderBlock(D, H, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def inputs(batch=3, length=7):
    """A batch, and its padding: the last sample is nothing else."""
    x = torch.randn(batch, length, D)
    kept = torch.linspace(length, 0, batch).long()
    return x, torch.arange(length) >= kept[:, None]


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A block with padding: the model, what it was before, and the report."""
    model = block(norm_first=True)
    before = copy.deepcopy(model.state_dict())
    x, padding = inputs()
    path = tmp_path_factory.mktemp("onnx") / "block.onnx"
    return model, before, export_onnx(model, {"x": x, "key_padding_mask": padding}, path, verbose=False)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 1), (1, 11), (5, 13)])
def test_numbers_with_padding(masked, batch, length):
    """At other sizes than the example's, where a sample sees nothing and its padding holds NaN."""
    model, _, report = masked
    x, padding = inputs(batch, length)
    with torch.no_grad():
        want = model.eval()(x, key_padding_mask=padding)
    (got,) = run(report.path, x=x, key_padding_mask=padding)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_report(masked):
    _, _, report = masked
    assert [str(value) for value in report.inputs] == [
        f"x float (batch, length, {D})",
        "key_padding_mask bool (batch, length)",
    ]
    assert [str(value) for value in report.outputs] == [f"output float (batch, length, {D})"]
    assert (report.opset, report.kind, report.projections) == (20, "float", 0)
    assert report.bytes == report.path.stat().st_size == report.float_bytes
    assert report.operators["LayerNormalization"] == 2
    assert report.operators["Gelu"] == 1
    values = {"", "negated", "times 50", "signs and zeros mixed, times 200", "zeros"}
    values |= {"masks half inverted", "masks inverted"}
    assert {trial.values for trial in report.trials} == values
    assert max(trial.sizes["length"] for trial in report.trials) == 67
    assert report.error < 1e-5
    assert str(report.path) in str(report)
    assert "batch 1, length 1: " in str(report)


def test_file_says_nothing_of_this_machine(masked):
    """Names of headwise alone; no paths, no traces of code."""
    _, _, report = masked
    model = onnx.load(report.path)
    assert model.producer_name == "headwise"
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 20)]
    assert not model.metadata_props
    text = report.path.read_bytes()
    assert b"site-packages" not in text
    assert b".py" not in text


def test_model_is_as_before(masked):
    model, before, _ = masked
    assert model.self_attn.attend.backend is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_static_int8(tmp_path, capsys):
    """One QGemm for queries, keys and values, one for each of the other projections; the report is printed."""
    x, _ = inputs()
    model = quantize(block(), [x])
    report = export_onnx(model, x[:1, :1], tmp_path / "static.onnx")  # sizes of 1 in the example stay free
    assert str(report) in capsys.readouterr().out
    assert (report.kind, report.projections, report.integer_operators) == ("static", 4, {"QGemm": 4})
    stored = [one for one in onnx.load(report.path).graph.initializer if one.data_type == onnx.TensorProto.INT8]
    assert sum(one.dims[0] * one.dims[1] for one in stored if len(one.dims) == 2) == 4 * D * D + 2 * 4 * D * D
    (got,) = run(report.path, x=x)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)


def test_dynamic_int8(tmp_path):
    x, _ = inputs()
    model = quantize(block())
    report = export_onnx(model, x, tmp_path / "dynamic.onnx", verbose=False)
    assert (report.kind, report.projections, report.integer_operators) == ("dynamic", 4, {"DynamicQuantizeMatMul": 4})
    (got,) = run(report.path, x=x[:2, :5])
    with torch.no_grad():
        torch.testing.assert_close(got, model(x[:2, :5]), rtol=1e-4, atol=1e-4)


class Small(nn.Module):
    """Exports in a moment."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_file_that_does_not_hold(tmp_path):
    """A file whose numbers differ gets no name; the one that was there stays."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"older")
    with pytest.raises(RuntimeError, match=r"was not written: its numbers differ .* is dropout a function in it"):
        export_onnx(Noisy(), torch.randn(2, 3), path, verbose=False)
    assert path.read_bytes() == b"older"
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]


def test_nothing_is_said_but_the_report(tmp_path, capfd, caplog):
    """No warning, no line of torch's loggers, which stay as they were; the same model gives the same bytes."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before, filters = list(logger.filters), list(warnings.filters)
    model, x = Small(), torch.randn(1, 4)
    files = [tmp_path / name for name in ("a.onnx", "b.onnx")]
    for file in files:
        export_onnx(model, {"x": x, "scale": 2.0}, file, verbose=False)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (logger.filters, warnings.filters) == (before, filters)
    assert files[0].read_bytes() == files[1].read_bytes()


REFUSED = {
    "no module": (lambda: {"model": len}, r"model must be an nn.Module; got builtin_function_or_method"),
    "half": (lambda: {"model": Small().half()}, r"model must hold float32; pass model.float\(\)"),
    "double": (lambda: {"model": Small().double()}, r"model must hold float32"),
    "meta": (lambda: {"model": Small().to("meta")}, r"model must hold numbers; load its weights first"),
    "opset": (lambda: {"opset": 17}, r"opset must be 18 to 23, .*; got 17"),
    "opset text": (lambda: {"opset": "20"}, r"opset must be 18 to 23, .*; got '20'"),
    "no example": (lambda: {"example": None}, r"example must be a tensor, a tuple .*; got NoneType"),
    "empty": (lambda: {"example": ()}, r"missing a required argument: 'x'"),
    "unknown": (lambda: {"example": {"x": torch.randn(2, 4), "y": 1}}, r"unexpected keyword argument 'y'"),
    "NaN": (lambda: {"example": torch.full((2, 4), float("nan"))}, r"example's x must hold no NaN; got 8 of 8"),
    "nothing in it": (lambda: {"example": torch.randn(0, 4)}, r"example's x must hold numbers, at least one"),
    "array": (lambda: {"example": (torch.randn(2, 4).numpy(),)}, r"example's x must be a tensor, .*numpy.ndarray"),
    "no tensor": (lambda: {"example": (3.0,)}, r"example must hold a tensor; got none"),
    "width": (
        lambda: {"example": torch.randn(2, 5)},
        r"example must be a call that the model takes; it raised",
    ),
    "nested": (
        lambda: {"example": torch.nested.nested_tensor([torch.randn(2, 4)], layout=torch.jagged)},
        r"example's x must be padded, beside a padding mask",
    ),
    "sizes": (lambda: {"dynamic_shapes": {"y": {0: "batch"}}}, r"dynamic_shapes must name inputs \(x\); got y"),
    "size": (lambda: {"dynamic_shapes": {"x": {2: "batch"}}}, r"dynamic_shapes\['x'\] must name dimensions 0 to 1"),
    "label": (lambda: {"dynamic_shapes": {"x": {0: "a b"}}}, r"must be a name such as 'batch', .*; got 'a b'"),
    "names": (lambda: {"output_names": ["a", "b"]}, r"output_names must be 1 name, one for each tensor"),
    "same name": (lambda: {"output_names": ["x"]}, r"output_names must be different from each other and from the inp"),
    "tolerance": (lambda: {"tolerance": 0}, r"tolerance must be above 0 and below 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    make, message = REFUSED[name]
    words = {"model": Small(), "example": torch.randn(2, 4), "path": tmp_path / "model.onnx"} | make()
    with pytest.raises(ValueError, match=f"^export_onnx: .*{message}"):
        export_onnx(**words, verbose=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "message"), [("", "be the path of a file, model.onnx"), ("no/model.onnx", "lie in a folder that exists")]
)
def test_refused_path(tmp_path, path, message):
    with pytest.raises(ValueError, match=f"export_onnx: path must {message}"):
        export_onnx(Small(), torch.randn(2, 4), tmp_path / path)
    with pytest.raises(ValueError, match=r"path must be the path of a file; got 3"):
        export_onnx(Small(), torch.randn(2, 4), 3)


@pytest.mark.parametrize("name", ["function", "argument", "rule", "got"])
def test_refused_call_whose_input_is_called_like_a_part_of_the_message(tmp_path, name):
    class Named(Small):
        def forward(self, **words):
            return self.linear(words[name])

    with pytest.raises(ValueError, match=rf"example must be a call that the model takes; .* \({name} \(2, 5\)\)"):
        export_onnx(Named(), {name: torch.randn(2, 5)}, tmp_path / "model.onnx", verbose=False)


def test_refused_attention(tmp_path):
    """What an attention takes and a file cannot: the message says what to do instead."""
    mha, x = headwise.MultiheadAttention(D, H, batch_first=True), torch.randn(2, 5, D)
    call = {"query": x, "key": x, "value": x}
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"example's cache must be left out: .* export the call on the whole sequence"):
        export_onnx(mha, {**call, "cache": headwise.StaticCache(8)}, path)
    mask = headwise.masks.padding(torch.tensor([3, 5]))
    with pytest.raises(ValueError, match=r"example's mask must be a mask of rules alone .* pass them as key_padding"):
        export_onnx(mha, {**call, "mask": mask}, path)


def test_refused_when_traced(tmp_path):
    """Control flow by numbers, an operator that ONNX lacks, a size that the model fixes."""

    class Chooses(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum().item() > 0 else x

    class Returns(nn.Module):
        def forward(self, x):
            return 3

    x, path = torch.randn(2, 4), tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"model must be one that torch.export can follow: no choice by the numbers"):
        export_onnx(Chooses(), x, path)
    with pytest.raises(ValueError, match=r"model must return a tensor, or a tuple, list or dict of tensors; got int"):
        export_onnx(Returns(), x, path)
    with pytest.raises(ValueError, match=r"dynamic_shapes\['x'\]\[1\] \(width\) must be free only where the model"):
        export_onnx(Small(), x, path, dynamic_shapes={"x": {1: "width"}})
    assert not list(tmp_path.iterdir())


def test_metadata(tmp_path):
    path = tmp_path / "model.onnx"
    said = {"classes": "rest, walk", "einheit": "m/s²"}
    headwise.export_onnx(torch.nn.Linear(4, 2), torch.randn(3, 4), path, metadata=said, verbose=False)
    assert onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map == said
    for wrong in ("classes", {"classes": ["rest"]}, {1: "one"}, {"": "x"}):
        with pytest.raises(ValueError, match=r"export_onnx: metadata must be a dict of texts by name"):
            headwise.export_onnx(torch.nn.Linear(4, 2), torch.randn(3, 4), path, metadata=wrong, verbose=False)
