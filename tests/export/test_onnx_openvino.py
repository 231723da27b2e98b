"""Static int8 files in OpenVINO: the same numbers, by integer products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise
from headwise.export import export_onnx
from headwise.quant import quantize

pytestmark = [pytest.mark.export, pytest.mark.edge, pytest.mark.integration]
D, H = 64, 4


@pytest.mark.parametrize("masked", [False, True])
def test_static_file(tmp_path, masked):
    openvino = pytest.importorskip("openvino")
    block = headwise.EncoderBlock(D, H)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(3, 7, D)
    call = {"x": x, "key_padding_mask": torch.arange(7) >= torch.tensor([[7], [4], [2]])} if masked else {"x": x}
    small = quantize(block, [call])
    report = export_onnx(small, call, tmp_path / "model.onnx", verbose=False)
    core = openvino.Core()
    model = core.compile_model(core.read_model(report.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for batch, length in ((3, 7), (1, 1), (2, 11)):
        given = {"x": torch.randn(batch, length, D)}
        if masked:
            given["key_padding_mask"] = torch.arange(length).expand(batch, length) >= (length + 1) // 2
        out = torch.from_numpy(model({name: value.numpy() for name, value in given.items()})[0])
        with torch.no_grad():
            want = small(**given)
        assert (out - want).norm() / want.norm() < 1e-2
    kinds = [
        (node.get_rt_info()["layerType"].astype(str), node.get_rt_info()["runtimePrecision"].astype(str))
        for node in model.get_runtime_model().get_ops()
    ]
    products = [precision for kind, precision in kinds if kind == "FullyConnected"]
    assert products == ["u8"] * report.projections or products == ["i8"] * report.projections
