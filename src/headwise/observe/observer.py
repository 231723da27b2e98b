"""What goes on around and inside of the forwards of a watched model: when to look, and a look.

Letters: H query heads, R rows that are looked at, S key positions.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from headwise.core.backends import Request, eager
from headwise.core.lowering import Lowered, Size
from headwise.core.masks import causal, dense
from headwise.observe.capture import Capture, Seen, Unsupported
from headwise.observe.finding import while_compiling
from headwise.observe.looking import Job, look
from headwise.observe.probes import begin_look, end_look
from headwise.observe.record import Record

Tokens = Callable[[str, int, tuple[Any, ...], dict[str, Any]], Sequence[str] | tuple[Sequence[str], Sequence[str]]]


@functools.cache
def warm_up() -> None:
    """The first look of a process loads and allocates what later ones find there; a forward shall not wait for that."""
    x = torch.zeros(1, 2, 16, 8)
    request, size = Request(x, x, x, Lowered()), Size(1, 2, 16, 16, x.device)
    for mask in (None, causal(), dense(torch.ones(16, 16, dtype=torch.bool))):
        end_look(begin_look(request, mask, list(range(16)), size, (0, 16)))


class _Pass:
    """One forward of the model in one thread."""

    __slots__ = ("at", "began", "frames", "jobs", "open", "size", "spent")

    def __init__(self, began: float, size: int, frame: FrameType) -> None:
        self.began, self.size = began, size
        self.frames = id(frame), id(frame.f_back)  # not the frames, which hold the model's tensors
        self.spent = 0.0
        self.open: Capture | None = None
        self.jobs: list[Job] = []
        self.at = 0.0  # which sample, as a share of the batch

    def is_of(self, caller: FrameType) -> bool:
        """Whether this frame ends it: torch calls hooks a frame further out where `forward` raised."""
        return id(caller) in self.frames

    def is_running(self) -> bool:
        """Whether its call is on this thread's stack: an interrupt may have ended it without a word."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame) != self.frames[0]:
            frame = frame.f_back
        return frame is not None


class Observer:
    """Looks at a model's attention, within the budget of a record, until it is closed."""

    def __init__(self, model: nn.Module, record: Record, rows: int, tokens: Tokens | None) -> None:
        self.record, self.rows, self.tokens = record, rows, tokens
        self._local, self._random = threading.local(), random.Random(0)
        self._open_ones: set[Capture] = set()
        self._closed = False
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self, "before"), with_kwargs=True, prepend=True),
            model.register_forward_hook(_Hook(self, "after"), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Take the hooks away, and what stands in for a forward; a second call does nothing."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for opened in list(self._open_ones):  # of a pass in another thread, or of one that an interrupt ended
            opened.close()

    # --- Around a forward -------------------------------------------------------------------------------------------

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before a forward."""
        began = time.perf_counter()
        running: _Pass | None = getattr(self._local, "now", None)
        if running is not None:
            if running.is_running():
                return  # the model calls itself: one pass
            self._shut(running)
        now = _Pass(began, _size_of(args, kwargs), sys._getframe(2))
        self._local.now = now
        if self.record.may_look and self._pending() is None:
            if _alone():
                self._open(now)
            else:
                self.record.skip("unsupported")
            if now.open is not None:
                now.open.begun(args, kwargs)
        now.spent = time.perf_counter() - began

    def _open(self, now: _Pass) -> None:
        """Have the layers shown that were not seen for longest, as many as may fit."""
        budget, record = self.record.budget, self.record
        due = record.due(budget.allowance(now.size))
        now.at = self._random.random()
        records = {id(each.layer): each for each in due}
        layers = []
        for layer in [each.layer for each in due if each.layer is not None]:
            compiled = layer.is_compiled()
            if compiled or not layer.still_there():
                record.skip("compiled" if compiled else "replaced")
            else:
                layers.append(layer)
        if not layers:
            return

        def see(tell: Callable[[], Seen | None]) -> None:
            if self._pending() is not None:
                return  # of this forward: there is no time for more in it
            began = time.perf_counter()
            try:
                seen = tell()
                if seen is not None:
                    layer = records[id(seen.layer)]
                    room = budget.allowance(now.size, began - now.began - now.spent) - now.spent
                    chance = self._random
                    job = Job(lambda job: look(job, layer, seen, self.rows, now.at, room, budget, chance))
                    now.jobs.append(job)
                    self._work(now, job, began)
                    if job.empty:
                        record.skip("empty")
            except Unsupported:
                record.skip("unsupported")
            except Exception as error:  # whatever it is, the model goes on
                record.fail(error)
            now.spent += time.perf_counter() - began

        self._sweep()
        now.open = opened = Capture(layers, see)
        self._open_ones.add(opened)
        opened.open()
        if self._closed:  # meanwhile, by another thread
            self._shut(now)

    def _sweep(self) -> None:
        """End what an interrupt left open: of this thread, which begins anew, and of threads that are no more."""
        alive = sys._current_frames() if self._open_ones else {}
        for opened in list(self._open_ones):
            if opened.thread == threading.get_ident() or opened.thread not in alive:
                opened.close()
                self._open_ones.discard(opened)

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Called by torch after a forward, also where it raised."""
        now: _Pass | None = getattr(self._local, "now", None)
        caller = sys._getframe(2)
        if now is None or not now.is_of(caller):
            return
        ended, before = time.perf_counter(), now.spent
        seconds = max(0.0, ended - now.began - before)
        opened, raised, pending = now.open, id(caller) != now.frames[0], self._pending()
        if opened is None and pending is None:  # nearly always, so this is to be quick
            self._local.now = None
            spent = before + time.perf_counter() - ended
            self.record.keep((), seconds, spent, now.size, looked=False, late=False)
            return
        earlier = pending if pending not in now.jobs else None  # of a forward before this one
        jobs = now.jobs if earlier is None else [earlier]
        try:
            if opened is not None and not raised:
                opened.returned(args, kwargs)
            if self.tokens is not None:
                self._name(now.jobs, self.tokens, args, kwargs)
            if earlier is not None and _alone():
                self._work(now, earlier, ended)
        except Exception as error:
            self.record.fail(error)
        finally:
            self._shut(now)
        taken = [each for each in (job.named() for job in jobs) if each is not None]
        spent = before + time.perf_counter() - ended
        late = not taken and self._pending() is None and any(job.late for job in jobs)
        self.record.keep(taken, seconds, spent, now.size, looked=True, late=late)

    def _name(self, jobs: list[Job], tokens: Tokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask for the texts of each sample that was looked at, where it is a sample of the model's own batch."""
        for job in jobs:
            if job.samples != _batch_of(args, kwargs, job.batch_dim):
                self.record.skip("tokens")  # they might be somebody else's
                continue
            given = tokens(job.layer, job.sample, args, kwargs)
            job.query_names, job.key_names = given if isinstance(given, tuple) else (given, given)

    def _pending(self) -> Job | None:
        """What this thread has begun to look at and not finished."""
        job: Job | None = getattr(self._local, "job", None)
        return job

    def _shut(self, now: _Pass) -> None:
        """Leave nothing behind."""
        self._local.now = None
        opened, now.open = now.open, None
        if opened is not None:
            opened.close()
            self._open_ones.discard(opened)

    # --- Inside of it -----------------------------------------------------------------------------------------------

    def _work(self, now: _Pass, job: Job, began: float) -> None:
        """Take the next step of a job, and more while there is room; the rest is for the forwards to come.

        A short forward has no time for a whole look: its three steps are then taken in three forwards.
        """
        self._local.job = None
        while True:
            started = time.perf_counter()
            try:
                forecast = next(job.steps)
            except StopIteration:
                job.seconds += time.perf_counter() - started
                if job.taken is not None:
                    self.record.budget.learn(job.scores, job.seconds)
                return
            at = time.perf_counter()
            job.seconds += at - started
            elapsed = began - now.began - now.spent
            if now.spent + at - began + forecast > self.record.budget.allowance(now.size, elapsed):
                self._local.job = job
                return


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> int:
    """Samples in the first tensor of a call; -1: not known."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return -1 if first is None or first.dim() <= dim else first.size(dim)


def _alone() -> bool:
    """Whether no transform, tracer or mode would see what an observer does."""
    return eager() and not _len_torch_dispatch_stack()


def _size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Numbers in the first tensor of a call."""
    if args and isinstance(args[0], Tensor):
        return args[0].numel()
    return next((value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)


class _Hook:
    """A hook that leads to an observer; a copy of the model, in memory or in a file, is not watched."""

    def __init__(self, observer: Observer | None, method: str) -> None:
        self.observer, self.method = observer, method

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if self.observer is None or torch.jit.is_tracing():
            return
        if torch.compiler.is_compiling():
            _note_compiled(self.observer)
            return
        try:
            getattr(self.observer, self.method)(*given)
        except Exception as error:
            self.observer.record.fail(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None, self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self.method)


@while_compiling
def _note_compiled(observer: Observer) -> int:
    observer.record.skip("compiled")
    return 0
