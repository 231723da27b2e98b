"""What torch's exporter, torchao and ExecuTorch say to themselves, kept out of the way of what others say.

Hidden is exactly what is listed here. Logging, warnings and the streams are afterwards what they were.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch

_LOCK = threading.RLock()  # tracing, warnings' filters and loggers belong to the whole process
_LOGGED = (  # logger, and how what it says begins
    ("headwise", "upgrade: "),  # of the copy that is exported
    ("torch.onnx._internal.exporter._registration", "torchvision is not installed"),  # which nobody asked for
    ("torch.utils._pytree", "<enum 'KernelPreference'>"),
    ("torchao", "Failed to load "),  # kernels of other devices
    ("torch._export.non_strict_utils", r"dimension \S+ 0/1 specialized"),  # a size of 1 that the report shows
    ("onnx_ir.passes.common.initializer_deduplication", "Skipped deduplication of initializer"),
)
_WARNED: tuple[tuple[str, type[Warning], str], ...] = (  # message, category, module
    (r".*LeafSpec.*is deprecated", FutureWarning, ""),
    (r"# The axis name.* will not be used", UserWarning, ""),
    ("", DeprecationWarning, r"(onnxscript|onnx_ir|onnx|torch)(\..*)?"),
    ("", FutureWarning, r"(onnxscript|onnx_ir|onnx|torch)(\..*)?"),
    (r"(read_text|read_binary|open_text|open_binary) is deprecated. Use files\(\)", DeprecationWarning, ""),
    (r"`torch.jit.script_method` is deprecated", DeprecationWarning, ""),
    (r"This API is experimental and subject to change", Warning, ""),
)
_RESTORED = ("TORCHINDUCTOR_CACHE_DIR", "OPENVINO_LIB_PATH")  # what they set, to the end of the process
_TRACE = "torch.__trace"  # the logger whose handlers torch.export takes off
_WRITTEN = ("[cpuinfo_utils.cpp:", "[threadpool.cpp:")


class _Hide(logging.Filter):
    """Takes away what this thread says and begins in one way."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning, self.thread = re.compile(beginning), threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or not self.beginning.match(record.getMessage())


@contextmanager
def quiet() -> Iterator[None]:
    """Without their log lines and warnings, one thread at a time; what they set up at import is put back."""
    hidden = [(logging.getLogger(name), _Hide(beginning)) for name, beginning in _LOGGED]
    root = logging.getLogger()
    with _LOCK, warnings.catch_warnings():
        handlers, level, traced = list(root.handlers), root.level, list(logging.getLogger(_TRACE).handlers)
        environment = {name: os.environ.get(name) for name in _RESTORED}
        numpy = sys.modules.get("numpy")
        numbers = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
        for message, category, module in _WARNED:
            warnings.filterwarnings("ignore", message, category, module)
        for logger, hide in hidden:
            logger.addFilter(hide)
        try:
            yield
        finally:
            for logger, hide in hidden:
                logger.removeFilter(hide)
            root.handlers[:] = handlers
            root.setLevel(level)
            logging.getLogger(_TRACE).handlers[:] = traced
            for name, text in environment.items():
                os.environ.pop(name, None)
                if text is not None:
                    os.environ[name] = text
            torch.set_rng_state(numbers[0])
            random.setstate(numbers[1])
            if numpy is not None:
                numpy.random.set_state(numbers[2])


@contextmanager
def without_graph() -> Iterator[None]:
    """Without the half a graph that torch.export prints to standard error before it raises; all else comes after it."""
    stream, aside, hidden = sys.stderr, io.StringIO(), ""
    try:
        with redirect_stderr(aside):
            yield
    except Exception as error:
        hidden = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = aside.getvalue()
        text = text.replace(f"{hidden}\n", "") if hidden else text
        if text and stream is not None:
            stream.write(text)


@contextmanager
def plainly() -> Iterator[None]:
    """On the CPU, in float32, without autocast, whatever is set outside."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def quiet_start(again: bool = False) -> Iterator[None]:
    """Without the lines that the runtime's C++ part writes to standard error when it first runs.

    Most do not pass through Python, so that the stream itself is turned aside; some come through Python's own stderr,
    which need not be the process's, in a notebook for instance. All other lines are written after it.

    Args:
        again: not only when it first runs.
    """
    if "executorch.runtime" in sys.modules and not again:
        yield
        return
    stream, said = sys.stderr, io.StringIO()
    try:
        with _turned_aside(), redirect_stderr(said):
            yield
    finally:
        if stream is not None:
            stream.writelines(one for one in said.getvalue().splitlines(True) if not one.startswith(_WRITTEN))


@contextmanager
def _turned_aside() -> Iterator[None]:
    try:
        saved = os.dup(2)
    except OSError:  # there is no such stream
        yield
        return
    written = tuple(one.encode() for one in _WRITTEN)
    with tempfile.TemporaryFile() as aside:
        try:
            os.dup2(aside.fileno(), 2)
            yield
        finally:
            os.dup2(saved, 2)
            aside.seek(0)
            rest = b"".join(line for line in aside if not line.startswith(written))
            if rest:
                os.write(saved, rest)
            os.close(saved)
