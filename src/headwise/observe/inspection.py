"""One sample looked at as a whole: exact statistics of every row and maps of any length, of every attention of a model.

Letters: H query heads, L query positions, S key positions, n and m cells of a map.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import counted, invalid, kind_of, positive
from headwise.core.lowering import Rectangle, Size
from headwise.observe.capture import Capture, Sample, Seen, Unsupported
from headwise.observe.finding import find_layers
from headwise.observe.heatmap import AttentionMap
from headwise.observe.probes import AttentionStatistics, PooledWeights, attention_statistics, pooled_attention_weights

__all__ = ["InspectedCall", "Inspection", "inspect"]


@dataclass(frozen=True)
class InspectedCall:
    """One attention of one sample.

    Attributes:
        index: the number of the layer, in the order of `named_modules`.
        name: its dotted name.
        kind: "self" or "cross".
        queries: L, padding left out.
        keys: S, likewise; keys that the module appends are the last.
        statistics: of every row, (1, H, L) each.
        weights: maps (1, H, n, m).
    """

    index: int
    name: str
    kind: str
    queries: int
    keys: int
    statistics: AttentionStatistics
    weights: PooledWeights


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        output: what the model returned.
        calls: one for each attention, in the order they ran.
        model: its class.
    """

    output: Any
    calls: tuple[InspectedCall, ...]
    model: str

    def maps(
        self, *, title: str = "", query_names: Sequence[str] = (), key_names: Sequence[str] = ()
    ) -> list[AttentionMap]:
        """For `headwise.heatmap`: layers with the same positions in one map, such as all of an encoder.

        Args:
            title: of what was looked at. "": the model's class.
            query_names: tokens, padding left out; used where there are as many queries.
            key_names: likewise of the keys.

        Returns:
            A map for each kind ("self", "cross") and number of positions, with the statistics of each head.

        Raises:
            ValueError: the title is no text; names are none, or as many as no map has positions.
        """
        if not isinstance(title, str):
            raise invalid("Inspection.maps", "title", 'be a text; "" is the model\'s class', kind_of(title))
        query_names = _names("query_names", query_names, {call.queries for call in self.calls})
        key_names = _names("key_names", key_names, {call.keys for call in self.calls})
        groups: dict[tuple[str, int, int], list[InspectedCall]] = {}
        for call in self.calls:
            groups.setdefault((call.kind, call.queries, call.keys), []).append(call)
        found = []
        for (kind, queries, keys), calls in groups.items():
            words: dict[str, Any] = {
                "title": ", ".join([title or self.model, *([f"{kind} attention"] if len(groups) > 1 else [])]),
                "query_names": query_names if len(query_names) == queries else (),
                "key_names": key_names if len(key_names) == keys else (),
                "layer_names": [call.name or "attention" for call in calls],
                "notes": _notes(calls),
            }
            maps = [call.weights for call in calls]
            found.append(AttentionMap.pooled(maps, num_queries=queries, num_keys=keys, **words))
        return found

    def __repr__(self) -> str:
        """Say what is in it."""
        return f"<Inspection: {counted(len(self.calls), 'attention')}>"


@torch.no_grad()
def inspect(model: nn.Module, *args: Any, sample: int = 0, cells: int = 256, **kwargs: Any) -> Inspection:
    """Run a model once and look at one sample of each of its attentions, headwise's or torch's, exactly and whole.

    Args:
        model: as `headwise.watch` takes it; its mode stays, so `model.eval()` is the caller's.
        args: of the model.
        sample: which of the batch.
        cells: maps of more positions are pooled to at most so many a side.
        kwargs: of the model.

    Returns:
        Statistics of every row and maps, beside the model's output; no gradients.

    Raises:
        ValueError: the model holds no attention, is compiled, or ran none; there is no such sample.

    Cost: beside the forward, 4*H*L*S*K FLOPs a layer; memory for the maps and some MiB, whatever L and S.

    Example:
        >>> import headwise, torch
        >>> from headwise.observe.inspection import inspect
        >>> model = headwise.MultiheadAttention(16, 2, batch_first=True)
        >>> x = torch.randn(3, 500, 16)
        >>> [call] = inspect(model, x, x, x, sample=2).calls
        >>> call.statistics.entropy.shape, call.weights.mass.shape
        (torch.Size([1, 2, 500]), torch.Size([1, 2, 250, 250]))
    """
    if not isinstance(model, nn.Module):
        raise invalid("inspect", "model", "be an nn.Module", kind_of(model))
    if isinstance(sample, bool) or not isinstance(sample, int) or sample < 0:
        raise invalid("inspect", "sample", "be the number of one of the batch, from 0", repr(sample))
    positive("inspect", "cells", cells)
    layers = find_layers(model)
    if not layers or any(layer.is_compiled() for layer in layers):
        rule = "hold headwise or torch.nn.MultiheadAttention modules and run eagerly"
        raise invalid("inspect", "model", rule, f"{type(model).__name__}, {'compiled' if layers else 'without any'}")
    calls: list[InspectedCall] = []

    def see(tell: Callable[[], Seen | None]) -> None:
        try:
            seen = tell()
        except Unsupported as error:
            raise invalid("inspect", "model", "call its attentions as torch's are called", str(error)) from None
        if seen is None:
            return
        if sample >= seen.samples:
            raise invalid("inspect", "sample", f"be one of the batch, in 0 .. {seen.samples - 1}", sample)
        one = seen.sample(sample)
        if one.num_queries and one.num_keys:
            with torch.no_grad():
                calls.append(_inspected(seen, one, cells))

    with Capture(layers, see):
        output = model(*args, **kwargs)
    if not calls:
        raise invalid("inspect", "model", "call an attention on this input, of a position at least", "none")
    return Inspection(output, tuple(calls), type(model).__name__)


def _inspected(seen: Seen, sample: Sample, cells: int) -> InspectedCall:
    (first, last), mask, keys = _stretch(sample.real_queries, sample.queries), sample.mask, (0, sample.keys)
    if sample.real_keys is not None and sample.appended == 0:
        keys = _stretch(sample.real_keys, sample.keys)
    request = sample.request(range(first, last))
    if mask is not None and (last - first, keys[1] - keys[0]) != (sample.queries, sample.keys):
        size = Size(1, request.query.shape[1], sample.queries, sample.keys, sample.device)
        mask = mask.cut(Rectangle((0, 1), (first, last), keys), size)
    key = request.key[:, :, slice(*keys)]
    with torch.autocast(sample.device.type, enabled=False):
        words: dict[str, Any] = {"mask": mask, "softcap": sample.softcap, "sink": sample.sink}
        offset = max(0, sample.keys - sample.appended - sample.queries) if seen.kind == "self" else 0
        found = attention_statistics(request.query, key, offset=offset + first - keys[0], **words)
        pooled = pooled_attention_weights(request.query, key, cells=cells, **words)
    layer = seen.layer
    return InspectedCall(layer.index, layer.name, seen.kind, last - first, key.shape[2], found, pooled)


def _names(argument: str, given: Any, numbers: Set[int]) -> tuple[str, ...]:
    unordered = isinstance(given, str | bytes | Tensor | Mapping | Set) or not isinstance(given, Iterable)
    names = () if unordered else tuple(given)
    if unordered or not all(isinstance(name, str) for name in names):
        got = kind_of(given) if isinstance(given, Tensor) else reprlib.repr(given)
        raise invalid("Inspection.maps", argument, "be a sequence of strings, one for each position", got)
    if names and len(names) not in numbers:
        rule = f"be as many as an attention has, without padding: {' or '.join(map(str, sorted(numbers)))}"
        raise invalid("Inspection.maps", argument, rule, len(names))
    return names


def _notes(calls: Sequence[InspectedCall]) -> dict[str, list[list[float]]]:
    """Means over rows, of each head of each call."""
    notes: dict[str, list[list[float]]] = {"entropy ratio": [], "max logit": [], "sink": []}
    for call in calls:
        found = call.statistics
        notes["entropy ratio"].append(found.entropy_ratio[0].nanmean(dim=-1).tolist())
        notes["max logit"].append(found.max_logit[0].nan_to_num(-math.inf).amax(dim=-1).tolist())
        notes["sink"].append(found.sink[0].nanmean(dim=-1).tolist())
    return notes


def _stretch(real: Tensor | None, length: int) -> tuple[int, int]:
    """From the first real position to behind the last one."""
    return (0, length) if real is None or not len(real) else (int(real[0]), int(real[-1]) + 1)
