"""Small tensors: a second thread would only be waited for."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_torch_state: None) -> None:
    torch.set_num_threads(1)
