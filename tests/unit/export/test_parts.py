"""What every exporter starts from: the copy, and what no copy can be made of."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from headwise.export.parts import traceable


def test_a_model_that_copies_to_itself() -> None:
    """It stays what it is: in training, with gradients."""

    class Shared(nn.Linear):
        def __deepcopy__(self, memo: object) -> Shared:
            return self

    model = nn.Sequential(nn.Sequential(Shared(3, 5)), nn.Linear(5, 7)).train()
    with pytest.raises(ValueError, match=r"^f: model must be copied whole by .*; got 0\.0, whose __deepcopy__ "):
        traceable("f", model)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.LazyLinear(3), r"1\.weight"), (nn.LazyBatchNorm1d(affine=False), r"1\.running_mean")]
)
def test_a_lazy_model(layer: nn.Module, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^f: model must know its widths: call .*; got {name}, which is lazy"):
        traceable("f", nn.Sequential(nn.Linear(3, 5), layer))


def test_what_cannot_be_copied() -> None:
    model = nn.Linear(3, 5)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^f: model must be one that copy\.deepcopy can copy; .*; got Linear: cannot"):
        traceable("f", model)


def test_a_copy_is_for_evaluation_only() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5)).train()
    twin = traceable("f", model)
    assert not any(module.training for module in twin.modules())
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert model.training
