"""What a file may hold of int8 linears is what a layer can compute with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
from headwise.models import int8
from headwise.quant import Int8Linear


def made() -> nn.Module:
    model = headwise.SequenceClassifier(3, num_channels=3, embed_dim=10, num_heads=2, num_layers=1)
    return headwise.quantize(model, [torch.randn(4, 7, 3)])


@pytest.mark.parametrize("scale", [1e-38, 1e-36, 4e-36, 6e-36, 1e-35, 3e38])
def test_files_hold_the_input_scales_that_a_layer_takes(scale: float, tmp_path: Path) -> None:
    model = made()
    layer = model.get_submodule("head")
    assert isinstance(layer, Int8Linear)
    layer.input_scale.fill_(scale)
    layer.weight_scale.fill_(1e-12)  # whose product with the greatest is a number
    if scale > 5e-36:
        with torch.no_grad():
            wanted = layer(torch.randn(2, 10))
        assert wanted.isfinite().all()
        assert int8.wrong_numbers(model.state_dict(), int8.kinds_of(model)) == ""
        headwise.load(headwise.save(model, tmp_path))
        return
    with pytest.raises(ValueError, match=r"^Int8State: input_scale must be finite and at least "):
        layer(torch.randn(2, 10))
    with pytest.raises(ValueError, match=rf"^save: .*got {re.escape(f'{scale:.3g}')}, whose reciprocal .* in head\.in"):
        headwise.save(model, tmp_path)
