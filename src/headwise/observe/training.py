"""Attention in a training's log, and a word before a loss explodes."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping

from headwise._checks import at_least, class_of, counted, invalid, is_number, positive
from headwise.observe.monitor import Monitor
from headwise.observe.snapshot import LayerReading

__all__ = ["AttentionLog", "scalars"]


def scalars(layers: tuple[LayerReading, ...]) -> dict[str, float]:
    """Numbers for a log: of each layer the mean entropy ratio of its heads, the least of them and the greatest logit.

    Returns:
        "attention/NAME/entropy_ratio", "attention/NAME/entropy_ratio_min" and "attention/NAME/max_logit", of layers
        that were looked at; "attention/NAME/nonfinite", the rows so far with a NaN or +inf score, where there were any.
    """
    found = {}
    for layer in layers:
        ratios = [head.entropy_ratio for head in layer.heads if head.entropy_ratio is not None]
        logits = [head.max_logit for head in layer.heads if head.max_logit is not None]
        name = f"attention/{layer.name or 'attention'}"
        if ratios:
            found[f"{name}/entropy_ratio"] = statistics.fmean(ratios)
            found[f"{name}/entropy_ratio_min"] = min(ratios)
        if logits:
            found[f"{name}/max_logit"] = max(logits)
        if layer.nonfinite:
            found[f"{name}/nonfinite"] = float(layer.nonfinite)
    return found


class AttentionLog:
    """Call it with the step, in any training loop or in a framework's callback: it logs, and warns early.

    Logits that grow without bound and heads that fall onto one key come before a loss that diverges (arXiv 2303.06296,
    2309.14322): the warning names the layer and head while there is still something to save.

    Args:
        monitor: of `headwise.watch(model)`.
        log: called as log(numbers, step) with the dict of `scalars`, of the layers that were looked at since the last
            log, so {} where nothing was; a TensorBoard, W&B or MLflow writer's method in a lambda. None: nothing is
            logged.
        every: steps from one log to the next.
        warn: called with a sentence. None: `warnings.warn`.
        logit: warn above this greatest logit.
        growth: warn where a layer's greatest logit is so many times the median of the last `memory` logs.
        memory: logs that are compared with.

    Raises:
        ValueError: an argument is none of these.

    Example:
        >>> import headwise, torch
        >>> from headwise.observe.training import AttentionLog
        >>> model = headwise.Encoder([headwise.EncoderBlock(16, 2)])
        >>> with headwise.watch(model, budget=float("inf")) as monitor:
        ...     log, seen = (
        ...         AttentionLog(monitor, lambda numbers, step: seen.append((step, sorted(numbers))), every=2),
        ...         [],
        ...     )
        ...     for step in range(1, 4):
        ...         _ = model(torch.randn(2, 5, 16))
        ...         _ = log(step)
        >>> seen[0][0], seen[0][1][1]
        (2, 'attention/layers.0.self_attn/entropy_ratio_min')
    """

    def __init__(
        self,
        monitor: Monitor,
        log: Callable[[dict[str, float], int], object] | None = None,
        *,
        every: int = 50,
        warn: Callable[[str], object] | None = None,
        logit: float = 100.0,
        growth: float = 4.0,
        memory: int = 20,
    ) -> None:
        if not isinstance(monitor, Monitor):
            rule = "be a Monitor, which headwise.watch(model) gives"
            raise invalid("AttentionLog", "monitor", rule, class_of(monitor))
        for name, function in (("log", log), ("warn", warn)):
            if function is not None and not callable(function):
                raise invalid("AttentionLog", name, "be a function, or None", class_of(function))
        every = positive("AttentionLog", "every", every)
        memory = positive("AttentionLog", "memory", memory)
        for name, value in (("logit", logit), ("growth", growth)):
            if not is_number(value) or not value > 0:
                raise invalid("AttentionLog", name, "be a number above 0", repr(value))
        self.monitor, self.log, self.every, self.logit, self.growth = monitor, log, every, logit, growth
        self.warn = _warn if warn is None else warn
        self._before: dict[str, deque[float]] = {}
        self._memory, self._said = memory, set[tuple[str, str]]()
        self._seen: dict[int, tuple[float, int]] = {}  # by the layers' numbers, the last look that was logged

    def __call__(self, step: int) -> Mapping[str, float]:
        """After a step of training; gives what was logged, {} between the logs and where nothing new was seen.

        Raises:
            ValueError: the step is no int of at least 0.
        """
        step = at_least(0, "AttentionLog", "step", step)
        if step % self.every:
            return {}
        layers = tuple(layer for layer in self.monitor.snapshot().layers if self._is_new(layer))
        numbers = scalars(layers)
        if self.log is not None:
            self.log(numbers, step)
        for layer in layers:
            self._compare(layer, step)
        return numbers

    def _is_new(self, layer: LayerReading) -> bool:
        """Whether it was looked at since the last log: an old number would pass for a new one."""
        if layer.at is None:
            return False
        look = layer.at, layer.rows  # clocks may stand still between two looks, rows do not
        before, self._seen[layer.index] = self._seen.get(layer.index), look
        return before != look

    def _compare(self, layer: LayerReading, step: int) -> None:
        """Warn of each kind of trouble once a layer."""
        logits = {head: reading.max_logit for head, reading in enumerate(layer.heads) if reading.max_logit is not None}
        if layer.nonfinite:
            rows = counted(layer.nonfinite, "query", "queries")
            self._say(
                layer, "nonfinite", f"{rows} had a NaN or +inf score; gradients and weights may have them too", step
            )
        if not logits:
            return
        head = max(logits, key=lambda each: logits[each])
        before = self._before.setdefault(layer.name, deque(maxlen=self._memory))
        usual = statistics.median(before) if len(before) == self._memory else None
        if logits[head] > self.logit:
            self._say(
                layer, "logit", f"head {head} has a logit of {logits[head]:.3g}, above {self.logit:g}{_MAY}", step
            )
        elif usual is not None and logits[head] > self.growth * max(usual, 1.0):
            grew = f"grew from {usual:.3g} to {logits[head]:.3g}"
            self._say(layer, "growth", f"the logits of head {head} {grew}{_MAY}", step)
        before.append(logits[head])

    def _say(self, layer: LayerReading, kind: str, what: str, step: int) -> None:
        if (layer.name, kind) not in self._said:
            self._said.add((layer.name, kind))
            self.warn(f"step {step}, {layer.name or 'the attention'}: {what}")


_MAY = "; the loss may follow"


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=5)  # where the log is called
