"""A look at one attention in one forward: some rows of one sample, in steps that a short forward can spread.

Letters: H query heads, R rows that are looked at.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise

import torch

from headwise.core.lowering import Size
from headwise.observe.budget import Budget
from headwise.observe.capture import Seen
from headwise.observe.probes import AttentionStatistics, begin_look, end_look
from headwise.observe.record import MAX_LOGIT, LayerRecord, Taken, mean
from headwise.observe.snapshot import LiveMap

_STEPS = (0.5, 0.3, 0.2)  # of a look's time
_MOST_SCORES = 2**22  # of a look: some 50 MB
_ROW_VALUES = 64  # entropy ratios of single rows kept of a look
_SINK_FROM = 8  # visible keys; of fewer the first four are the most


class Job:
    """A look, which may be taken in steps.

    Attributes:
        steps: each gives the seconds that the next one is forecast to take; the last one sets `taken`.
        sample: which of the batch.
        scores: how many.
        seconds: that it took so far.
        layer: the name of the attention.
        samples: in its batch.
        batch_dim: of what the model is called with, as far as the attention tells.
        query_names: tokens of the sample.
        key_names: likewise.
        empty: there was nothing to look at.
        late: it was forecast to take too long, whatever the rows.
        taken: what was seen; None: nothing yet.
    """

    def __init__(self, look: Callable[[Job], Generator[float, None, None]]) -> None:
        self.steps = look(self)
        self.sample, self.scores, self.seconds = 0, 0.0, 0.0
        self.layer, self.samples, self.batch_dim = "", 0, 0
        self.query_names: Sequence[str] = ()
        self.key_names: Sequence[str] = ()
        self.empty = self.late = False
        self.taken: Taken | None = None

    def named(self) -> Taken | None:
        """What was seen, with tokens; those that are not as many as positions are left out."""
        if self.taken is None or not (self.query_names or self.key_names):
            return self.taken
        live = self.taken.live
        queries = _texts(self.query_names, live.num_queries)
        return self.taken._replace(
            live=dataclasses.replace(
                live,
                query_names=tuple(queries[at] for at in live.queries) if queries else (),
                key_names=_texts(self.key_names, live.num_keys),
            )
        )


def _texts(names: Sequence[str], number: int) -> tuple[str, ...]:
    return tuple(map(str, names)) if len(names) == number and not isinstance(names, str) else ()


def look(
    job: Job,
    layer: LayerRecord,
    seen: Seen,
    most: int,
    share: float,
    room: float,
    budget: Budget,
    chance: random.Random,
) -> Generator[float, None, None]:
    """The steps of a job.

    Args:
        job: whose they are.
        layer: that was called.
        seen: the call.
        most: rows.
        share: which sample, as a share of the batch.
        room: seconds that there are for the first step.
        budget: which forecasts.
        chance: which rows.
    """
    at = min(int(share * seen.samples), seen.samples - 1)
    job.layer, job.samples = layer.name, seen.samples
    job.batch_dim = 0 if getattr(seen.layer.module, "batch_first", True) else 1
    sample = seen.sample(at) if seen.samples else None
    if sample is None or not sample.num_queries or not sample.keys:
        job.empty = True
        return
    each = float(layer.num_heads * sample.keys)
    rows = max(1, min(most, sample.num_queries, int(_MOST_SCORES / each)))
    while _STEPS[0] * budget.forecast(each * rows) > room:
        if rows == 1:
            if not layer.looks:
                break  # the first one is taken whatever it costs
            job.late = True
            return
        rows = max(1, rows // 2)
    job.sample, job.scores, seconds = at, each * rows, budget.forecast(each * rows)
    layer.scores = job.scores
    places = _some(sample.num_queries, rows, chance)
    padded, (keys, mask, real_keys) = sample.places(places), sample.stretch()
    with torch.no_grad():
        request = sample.request(padded)  # projected as the model does, under its autocast
        request = request._replace(key=request.key[:, :, slice(*keys)])
        size = Size(1, request.query.shape[1], sample.queries, sample.keys, sample.device)
        offset = max(0, sample.keys - sample.appended - sample.queries) if seen.kind == "self" else 0
        with torch.autocast(sample.device.type, enabled=False):
            begun = begin_look(request, mask, padded, size, keys, offset)
    live, kind = LiveMap(at, tuple(places), sample.num_queries, sample.num_keys, 1, torch.empty(0)), seen.kind
    del seen, sample, request, mask  # nothing of the model's outlives its forward
    yield _STEPS[1] * seconds
    # in inference mode, since the first step may have been in it
    with torch.inference_mode(), torch.autocast(begun.at_R.device.type, enabled=False):
        found, mass, wide = end_look(begun, real_keys=real_keys)
    yield _STEPS[2] * seconds
    live = dataclasses.replace(live, keys_a_cell=wide, mass=mass[0].float().cpu().clone())
    with torch.inference_mode():
        job.taken = _taken(layer, kind, found, live)


def _some(number: int, rows: int, chance: random.Random) -> list[int]:
    """So many of the positions, one of each of so many equal stretches, ascending."""
    ends = [at * number // rows for at in range(rows + 1)]
    return [low + int(chance.random() * (high - low)) for low, high in pairwise(ends)]


def _taken(layer: LayerRecord, kind: str, found: AttentionStatistics, live: LiveMap) -> Taken:
    """(1, H, R) statistics as means over rows, in plain numbers."""
    visible = found.visible
    even = 4 / visible  # what even weights give the first four, so that it does not hang on the length
    sink = ((found.sink - even) / (1 - even)).masked_fill(visible <= _SINK_FROM, math.nan)
    distance = found.distance if kind == "self" else torch.full_like(found.distance, math.nan)
    share = distance / visible
    rows = (found.entropy_ratio, found.effective_keys, found.max_logit, found.peak, sink, distance, found.spread, share)
    means = torch.stack(rows)[:, 0].nanmean(dim=-1)
    means[MAX_LOGIT] = found.max_logit[0].nan_to_num(-math.inf, math.inf).amax(dim=-1)
    *values, shares = means.tolist()
    share_of_all = mean(shares)
    broken = torch.stack([visible == 0, found.nonfinite]).any(dim=2)[:, 0].sum(dim=-1)
    flat = found.entropy_ratio.flatten()
    some = flat[:: max(1, -(-len(flat) // _ROW_VALUES))].tolist()
    masked, nonfinite = broken.tolist()
    return Taken(
        layer,
        kind,
        values,
        math.nan if share_of_all is None else share_of_all,
        [value for value in some if value == value],
        visible.shape[2],
        masked,
        nonfinite,
        live,
    )
