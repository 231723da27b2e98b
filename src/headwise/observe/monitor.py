"""`watch`: the attention of a model in use, at a share of its time that the caller names."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from torch import nn

from headwise._checks import invalid, is_number, kind_of, positive
from headwise.observe import prometheus, server
from headwise.observe.budget import Budget
from headwise.observe.drift import Drift, Limits, drifts, written_baseline
from headwise.observe.finding import Layer, find_layers, is_compiled
from headwise.observe.heatmap import AttentionMap
from headwise.observe.observer import Observer, Tokens, warm_up
from headwise.observe.record import Record
from headwise.observe.snapshot import Snapshot

__all__ = ["Monitor", "watch"]


def watch(
    model: nn.Module,
    *,
    name: str | None = None,
    budget: float = 0.01,
    rows: int = 16,
    tokens: Tokens | None = None,
    show_tokens: bool = False,
    port: int | None = None,
    host: str = "127.0.0.1",
    registry: Any = None,
) -> Monitor:
    """Watch the attention of a model while it is used: a table now, metrics and live heatmaps for whoever asks.

    Works on `headwise` attention, on `torch.nn.MultiheadAttention` and on all that holds them, in training and in use,
    with padding, in eager calls. Outputs, gradients and torch's random numbers stay the same to the bit.

    Of some forwards, some rows of one sample are looked at, with all their heads: their weights are computed once more
    from queries, keys and masks. Those rows are exact; that they stand for all is an estimate. How many forwards,
    layers and rows follows from `budget`.

    Args:
        model: whose `model(...)` is called. A call of `model.some_method(...)` is not seen: watch what that calls.
        name: label in metrics and pages. None: the model's class.
        budget: the share of the forwards' time that looking may take, above 0; more than that share is never spent but
            by the last look. inf: every forward is looked at in all layers, with `rows` rows.
        rows: R, rows of a look at most.
        tokens: called as tokens(layer, sample, args, kwargs) with the attention's dotted name, the number of the sample
            and what the model was called with; gives that sample's token texts, padding left out, or a tuple of the
            texts of queries and of keys. For the live page alone.
        show_tokens: tokens may be shown. False by default, since they may be a patient's.
        port: serve `/metrics` for Prometheus and the page `/attention` there; 0 takes a free one, see `Monitor.port`.
        host: the address of this machine to serve on.
        registry: a `prometheus_client.CollectorRegistry` to register with. None: one of its own.

    Returns:
        The monitor; `close()` it, or use it in a `with`.

    Raises:
        ValueError: the model holds no attention that can be watched, it or a part of it is compiled, or an argument is
            wrong.
        ImportError: `port` or `registry` without the extra `observe`.
        OSError: the port is taken.

    Cost: two hooks on the model, some microseconds a forward; looking takes its `budget`, never more than about a
    quarter of a forward at once, or 0.5 ms where that is more. Nothing of size L x S is made. On a GPU a look waits for
    the device.

    Example:
        >>> import headwise, torch
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        >>> with headwise.watch(model, budget=0.05) as monitor:
        ...     for _ in range(20):
        ...         _ = model(torch.randn(4, 10, 16))
        >>> monitor.snapshot().forwards
        20
    """
    if not isinstance(model, nn.Module):
        raise invalid("watch", "model", "be an nn.Module", kind_of(model))
    if not is_number(budget) or not (0 < budget <= 1 or budget == math.inf):
        rule = "be a share of the forwards' time above 0 and at most 1, such as 0.01, or inf for no limit"
        raise invalid("watch", "budget", rule, repr(budget))
    positive("watch", "rows", rows)
    if name is not None and (not isinstance(name, str) or not name):
        raise invalid("watch", "name", "be a text, or None for the model's class", repr(name))
    if tokens is not None and not callable(tokens):
        raise invalid("watch", "tokens", "be a function of (layer, sample, args, kwargs)", type(tokens).__name__)
    if show_tokens and tokens is None:
        raise invalid("watch", "tokens", "be given with show_tokens=True: a model knows no texts", None)
    layers = _watchable(model)
    warm_up()
    shown = tokens if show_tokens else None
    record = Record(name or type(model).__name__, layers, Budget(float(budget)))
    monitor = Monitor(record, Observer(model, record, rows, shown))
    try:
        if port is not None or registry is not None:
            monitor._serve(port, host, registry)
    except BaseException:
        monitor.close()
        raise
    return monitor


def _watchable(model: nn.Module) -> tuple[Layer, ...]:
    for name, module in model.named_modules():
        if is_compiled(module):
            rule = "not be compiled: a compiled call does not pass by observers; watch the model that runs eagerly"
            raise invalid("watch", "model", rule, f"a compiled {name or 'model'}")
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise invalid("watch", "model", "be what is called: watch the model that holds it", type(model).__name__)
    if isinstance(model, nn.TransformerEncoderLayer):
        rule = "not be a single nn.TransformerEncoderLayer: a hook on it changes torch's path; watch what holds it"
        raise invalid("watch", "model", rule, type(model).__name__)
    layers = find_layers(model)
    if not layers:
        rule = "hold headwise or torch.nn.MultiheadAttention modules; upgrade another attention first"
        raise invalid("watch", "model", rule, f"{type(model).__name__} without any")
    return layers


class Monitor:
    """What `watch` gives: the readings of a model's attention, until it is closed. All methods are thread-safe."""

    def __init__(self, record: Record, observer: Observer) -> None:
        self._record, self._observer = record, observer
        self._server: server.Server | None = None
        self._published: prometheus.Publication | None = None

    @property
    def name(self) -> str:
        """Of the model, in metrics and pages."""
        return self._record.name

    @property
    def budget(self) -> float:
        """The share of the forwards' time that looking may take."""
        return self._record.budget.share

    @property
    def port(self) -> int | None:
        """Where it serves; None: nowhere."""
        return None if self._server is None else self._server.port

    def snapshot(self) -> Snapshot:
        """All that was seen so far."""
        return self._record.snapshot()

    def heatmap(self, layer: int | str) -> AttentionMap:
        """The rows of a layer that were looked at last, to be drawn by `headwise.heatmap`.

        Args:
            layer: its number or its dotted name, as the snapshot has them.

        Returns:
            Rows of one sample, each beside its position; keys pooled to 64 cells at most. For whole maps of an input
            see `headwise.observe.inspection.inspect`.

        Raises:
            ValueError: there is no such layer, or it was not looked at yet.
        """
        layers = self.snapshot().layers
        found = [each for each in layers if layer in (each.name, each.index) and not isinstance(layer, bool)]
        if not found:
            names = ", ".join(f"{each.index} {each.name!r}" for each in layers)
            raise invalid("Monitor.heatmap", "layer", f"be the number or name of one of {names}", repr(layer))
        [reading] = found
        if reading.live is None:
            rule = "have been looked at: run more forwards, or give a greater budget"
            raise invalid("Monitor.heatmap", "layer", rule, f"{reading.name!r} not looked at yet")
        return AttentionMap.sampled(reading.live, title=self.name, layer_names=[reading.name or "attention"])

    def baseline(self, saved: object = None) -> dict[str, list[dict[str, float | None]]]:
        """Remember how each head reads now, or how it did when `saved` was made; `drift` compares with that.

        Args:
            saved: what an earlier call returned, by way of JSON for instance. None: the present readings.

        Returns:
            The baseline: by the layers' names, a dict of readings for each head.

        Raises:
            ValueError: a layer was not looked at yet, or `saved` is of another model.
        """
        self._record.baseline(saved)
        return written_baseline(self.snapshot().layers)

    def drift(self, limits: Limits | None = None) -> list[Drift]:
        """Heads that are no longer what they were at the baseline; `str()` of each is a sentence for an alert.

        Args:
            limits: from where on a change is one. None: `Limits()`.

        Raises:
            ValueError: there is no baseline.
        """
        layers = self.snapshot().layers
        if not any(layer.baseline for layer in layers):
            raise invalid("Monitor.drift", "baseline", "be taken first, by monitor.baseline() in health", None)
        return drifts(layers, Limits() if limits is None else limits)

    def close(self) -> None:
        """Stop watching and serving; what was seen stays readable. A second call does nothing."""
        self._observer.close()
        self._record.let_go()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._published is not None:
            self._published.close()
            self._published = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Monitor of {self.name}: {len(self._record.layers)} attentions, budget {self.budget:g}>"

    def _serve(self, port: int | None, host: str, registry: Any) -> None:
        if port is None:
            self._published = prometheus.publish(self.snapshot, registry)
        else:
            self._server = server.serve(self.snapshot, port, host, registry)
