"""ONNX files of `torch.onnx.export(..., dynamo=True)`, checked and run by onnxruntime at several sizes."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
import torch
from tests.tools.subjects import Subject, each_subject, split_side
from tests.tools.test_export import SIZES, Positional, dynamic, example

row = pytest.mark.tool(
    order=6,
    tool="ONNX",
    holds="a file of `torch.onnx.export(..., dynamo=True)` with dynamic batch and lengths passes onnx's checker and "
    "gives the model's numbers",
    package="onnxruntime",
    torch="in eval a padded `TransformerEncoder` nests, which the exporter cannot follow",
)
pytestmark = [  # torch and its exporter speaking to each other
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name. .* will not be used:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript"),
]


def check(subject: Subject, side, padded, path):
    """Export at the first size, run the file at all of them."""
    words = (subject.padding[0],) if padded else ()
    model = Positional(subject, subject.build(side), words).eval()

    def tensors(batch, queries, keys):
        return example(subject, padded, batch, L=queries, S=keys)

    program = torch.onnx.export(
        model, tensors(*SIZES[0]), dynamo=True, dynamic_shapes=dynamic(subject, words), verbose=False
    )
    program.save(path)
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    for size in SIZES:
        given = tensors(*size)
        fed = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        (got,) = session.run(None, fed)
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(got), model(*given), rtol=1e-4, atol=1e-4)


@row
@each_subject
@split_side
def test_file_with_padding(subject, side, tmp_path):
    check(subject, side, True, tmp_path / "model.onnx")


@row
@each_subject
@pytest.mark.parametrize("side", ["fused"])
def test_file_without_padding(subject, side, tmp_path):
    check(subject, side, False, tmp_path / "model.onnx")
