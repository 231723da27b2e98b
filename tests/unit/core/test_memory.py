"""Peak memory, as torch's allocator reports it: averaged weights one head at a time, and attention linear in L."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import headwise
from headwise import masks
from headwise.core import blockwise

B, H, L, D = 1, 8, 2048, 64
MEBI = 2**20


def peak_bytes(call: Callable[[], object], tmp_path: Path) -> int:
    """The most bytes held at one time during a call beyond those before it."""
    trace = tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = call()
    watched.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    assert kept is not None
    return peak


def test_the_measure_sees_what_is_allocated(tmp_path: Path) -> None:
    def call() -> torch.Tensor:
        first = torch.empty(3 * MEBI, dtype=torch.uint8)
        del first
        second, third = torch.empty(5 * MEBI, dtype=torch.uint8), torch.empty(7 * MEBI, dtype=torch.uint8)
        del third
        return second

    assert peak_bytes(call, tmp_path) == 12 * MEBI


@pytest.mark.parametrize(("train", "masked"), [(True, True), (False, False)])
def test_averaged_weights_take_a_third_of_torch_at_most(tmp_path: Path, train: bool, masked: bool) -> None:
    ours = headwise.MultiheadAttention(D, H, batch_first=True).train(train)
    theirs = nn.MultiheadAttention(D, H, batch_first=True).train(train)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(B, L, D)
    padding = torch.arange(L).expand(B, L) >= L - 3 if masked else None
    found = {}
    with torch.no_grad():
        for name, module in (("ours", ours), ("theirs", theirs)):
            found[name] = peak_bytes(lambda m=module: m(x, x, x, key_padding_mask=padding), tmp_path)
    assert found["theirs"] >= B * H * L * L * 4  # it does hold the weights of all heads
    assert 3 * found["ours"] <= found["theirs"], {name: f"{size / MEBI:.0f} MiB" for name, size in found.items()}


HIDING = {
    "a window": masks.window(100, 0),
    "a window and a prefix": (masks.causal() | masks.prefix(64)) & masks.window(200, None),
    "documents": masks.documents(torch.arange(4096) // 128),
    "causal": masks.causal(),
}
BESIDE: dict[str, dict[str, object]] = {
    "nothing": {}, "sink": {"sink": torch.zeros(1)}, "softcap": {"softcap": 2.0}, "dropout": {"dropout": 0.1}
}  # fmt: skip


@pytest.mark.thin(4)
@pytest.mark.parametrize("option", BESIDE)
@pytest.mark.parametrize("name", HIDING)
def test_tiles_need_memory_that_is_linear_in_the_length(name: str, option: str, tmp_path: Path) -> None:
    """Forward and backward hold less than two bits for each pair of a query and a key; our kernel, four blocks."""
    length = 4096
    query, key, value = (torch.randn(1, 1, length, 8).requires_grad_() for _ in range(3))

    def call() -> tuple[torch.Tensor, ...]:
        out = headwise.attention(query, key, value, mask=HIDING[name], backend="tiled", **BESIDE[option])
        return torch.autograd.grad(out.sum(), [query, key, value])

    call()  # masks of bands stay in a cache
    found = peak_bytes(call, tmp_path)
    limit = 4 * 4 * blockwise.BLOCK if option in ("softcap", "dropout") else length**2 / 3
    assert found < limit < 4 * length**2, f"{found / MEBI:.1f} MiB"
