"""What the tests of observation share: all rows of all samples, as they are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.core.lowering import Size
from headwise.observe.capture import Capture, Seen
from headwise.observe.finding import find_layers
from headwise.observe.monitor import Monitor
from headwise.observe.probes import AttentionStatistics, begin_look, end_look

INF = float("inf")


class Looked(NamedTuple):
    """One sample of one call.

    Attributes:
        name: of the layer.
        kind: "self" or "cross".
        weights: (H, R, S) of real queries on real keys.
        queries: R real positions.
        keys: S real positions, appended keys included.
        found: (1, H, R) statistics.
    """

    name: str
    kind: str
    weights: Tensor
    queries: list[int]
    keys: list[int]
    found: AttentionStatistics


def looked_at(model: nn.Module, call: Callable[[], Any]) -> tuple[Any, list[list[Looked]]]:
    """What the call gives, and each of its attentions with each of its samples."""
    calls: list[list[Looked]] = []

    def see(tell: Callable[[], Seen | None]) -> None:
        seen = tell()
        if seen is not None:
            calls.append([_whole(seen, at) for at in range(seen.samples)] if _has_any(seen) else [])

    with Capture(find_layers(model), see):
        out = call()
    assert_clean(model)
    return out, calls


def _has_any(seen: Seen) -> bool:
    return bool(seen.samples and seen.sample(0).queries and seen.sample(0).keys)


def _whole(seen: Seen, at: int) -> Looked:
    sample = seen.sample(at)
    places, (stretch, mask, real_keys) = sample.places(range(sample.num_queries)), sample.stretch()
    with torch.no_grad():
        request = sample.request(places)
        request = request._replace(key=request.key[:, :, slice(*stretch)])
        size = Size(1, request.query.shape[1], sample.queries, sample.keys, sample.device)
        with torch.autocast("cpu", enabled=False):
            begun = begin_look(request, mask, places, size, stretch)
            found, mass, wide = end_look(begun, cells=10**6, real_keys=real_keys)
    assert wide == 1
    keys = list(range(sample.keys)) if sample.real_keys is None else sample.real_keys.tolist()
    assert (len(places), len(keys)) == (sample.num_queries, sample.num_keys)
    return Looked(seen.layer.name, seen.kind, mass[0], places, keys, found)


def assert_shows(calls: list[Looked], weights: Tensor, tol: float, queries: list[list[int]] | None = None) -> None:
    """All samples of a call have the weights (B, H, L, S) that the layer gave; `queries`: which are real.

    Keys that are left out have no weight.
    """
    assert len(calls) == len(weights)
    for at, (one, whole) in enumerate(zip(calls, weights.detach().double().nan_to_num(0), strict=True)):
        if queries is not None:
            assert one.queries == queries[at]
        expected = whole[:, one.queries]
        torch.testing.assert_close(one.weights.double(), expected[..., one.keys], rtol=tol, atol=tol)
        others = [key for key in range(whole.shape[-1]) if key not in one.keys]
        assert not expected[..., others].any()


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, where both are numbers."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def assert_clean(model: nn.Module) -> None:
    """Nothing stands in for a `forward`."""
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == []


def assert_unhooked(model: nn.Module) -> None:
    """Nothing is attached either."""
    assert_clean(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def errors(monitor: Monitor) -> dict[str, int]:
    """Of the observer."""
    return dict(monitor.snapshot().errors)
