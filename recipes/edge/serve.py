"""Classify time series as they come in, with onnxruntime and numpy alone: no torch, no headwise.

Usage: python serve.py model.onnx < samples.csv

The model is a file that `headwise export` wrote, float or int8; all that the program knows of it stands in there. See
README.md beside this file. Letters in names: L steps, X channels, Y classes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnxruntime

LARGEST_FILE = 2**31  # bytes; an ONNX file in one piece ends there
LONGEST_LINE = 2**20  # letters
MOST, MOST_THREADS = 10**9, 1024  # of what options count
FORMAT, VERSION = "headwise classifier", 1  # of what a file says of itself
OTHERS = ("series", "label")  # columns that are no channel, and so is the time


class Refused(Exception):
    """What came cannot be classified; the message is a line for whoever sent it."""


def cut(text: object, most: int = 60) -> str:
    """One line, and not too long, whatever somebody else put in."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[:most]}..."


# --- The model ----------------------------------------------------------------------------------------------------

# ONNX files are protocol buffers. Of each kind of message, which fields hold messages of which kind: just enough to
# find every tensor, wherever it stands. https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a tensor


def check_self_contained(content: bytes) -> None:
    """Hold that all numbers are in the file itself.

    A tensor may also name another file, anywhere on the disk, and onnxruntime would read it. `headwise export` never
    writes such tensors, so any is refused, before onnxruntime sees the file.

    Raises:
        ValueError: a tensor with data elsewhere, or no ONNX file.
    """
    if content[4:8] == b"ORTM":  # onnxruntime's own format, which it knows by these letters; nothing here reads it
        raise ValueError("is no ONNX file")
    todo = [("model", 0, len(content))]
    num_graphs = 0
    while todo:
        kind, start, end = todo.pop()
        num_graphs += kind == "graph"
        for number, value, length in fields(content, start, end):
            if kind == "tensor":
                if number == EXTERNAL_DATA or (number == DATA_LOCATION and value != 0):
                    raise ValueError("has numbers in another file; only files in one piece are run")
            elif number in INSIDE[kind]:
                if length is None:
                    raise ValueError("is no ONNX file")
                todo.append((INSIDE[kind][number], value, value + length))
    if num_graphs == 0:
        raise ValueError("is no ONNX file")


def fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, int, int | None]]:
    """Each field of a message: its number, and its value, or where its content starts and how long that is."""
    while at < end:
        key, at = varint(content, at, end)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(content, at, end)
            yield number, value, None
        elif wire == 2:
            length, at = varint(content, at, end)
            if length > end - at:
                raise ValueError("is truncated, or no ONNX file")
            yield number, at, length
            at += length
        elif wire in (1, 5):
            yield number, at, None
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("is no ONNX file")
    if at != end:
        raise ValueError("is truncated, or no ONNX file")


def varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = content[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("is truncated, or no ONNX file")


class Classifier:
    """A model of `headwise export`: names, units, and a session that runs it.

    Raises:
        ValueError: a file that is not such a model, with the reason.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        if path.stat().st_size >= LARGEST_FILE:
            raise ValueError("is too large")
        content = path.read_bytes()  # read once: what was checked is what is run
        check_self_contained(content)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4  # errors are told here, in one line
        # Waiting threads sleep, and no memory is kept beside what a call needs: a small machine has other work too
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False
        try:
            self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            told = self.session.get_modelmeta().custom_metadata_map
        except Exception as error:  # whatever a file made by hand brings out of the library
            raise ValueError(f"is not run by onnxruntime: {cut(error, 200)}") from error
        if "headwise" not in told:
            raise ValueError("does not say its classes and channels; was it written by headwise export?")
        self._read(told["headwise"])
        self._check_session()

    def _read(self, text: str) -> None:
        """Take what the file says of itself, if it is what this program knows."""
        try:
            says: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"says of itself what is no JSON: {cut(error)}") from error
        if not isinstance(says, dict) or says.get("format") != FORMAT:
            raise ValueError(f"does not say that it is a {FORMAT}; was it written by headwise export?")
        if type(says.get("version")) is not int or says["version"] != VERSION:
            raise ValueError(f"is of version {cut(repr(says.get('version')))}; this program reads version {VERSION}")
        self.class_names, self.channel_names = texts(says, "class_names"), texts(says, "channel_names")
        if taken := [name for name in self.channel_names if name.strip().lower() in OTHERS]:
            raise ValueError(f"has a channel {taken[0]!r}, which is the name of another column of a stream")
        interval, self.unit = says.get("interval"), says.get("unit")
        if type(interval) not in (int, float) or not 0 < interval <= sys.float_info.max:
            raise ValueError(f"says of a step's time {cut(repr_of(interval))}, not a number above 0")
        if not is_text(self.unit):
            raise ValueError(f"says of the unit of time {cut(repr(self.unit))}, not a text")
        self.interval = float(interval)

    def _check_session(self) -> None:
        """Run the model once, on one step: the names must be those of its channels and its classes."""
        inputs, num_channels = {one.name: one.shape for one in self.session.get_inputs()}, len(self.channel_names)
        if set(inputs) != {"x", "padding_mask"} or "logits" not in [one.name for one in self.session.get_outputs()]:
            raise ValueError("does not take x and padding_mask and give logits")
        if len(inputs["x"]) != 3 or (isinstance(inputs["x"][2], int) and inputs["x"][2] != num_channels):
            raise ValueError(f"names {num_channels} channels and takes x of {cut(inputs['x'])}")
        try:
            self.logits(np.zeros((1, num_channels), np.float32))
        except Refused as error:
            raise ValueError(f"cannot be trusted: {error}") from error

    def logits(self, values_LX: np.ndarray) -> np.ndarray:
        """Of each class, (Y,).

        Raises:
            Refused: the model cannot be run on the series, or gives something else.
        """
        x_1LX = values_LX[None]
        try:
            (logits_1Y,) = self.session.run(["logits"], {"x": x_1LX, "padding_mask": np.zeros(x_1LX.shape[:2], bool)})
        except Exception as error:  # of any kind, as above
            raise Refused(f"onnxruntime cannot run the model: {cut(error, 200)}") from error
        wanted, got = (1, len(self.class_names)), np.shape(logits_1Y)
        if got != wanted or np.asarray(logits_1Y).dtype.kind != "f":
            raise Refused(f"the model gives numbers of shape {got}; with its names of classes it would be {wanted}")
        return np.asarray(logits_1Y)[0].astype(np.float64)

    def probabilities(self, values_LX: np.ndarray) -> np.ndarray:
        """Of each class, (Y,), that the series (L, X) is of it.

        Raises:
            Refused: numbers so great that the model overflows, or a model that cannot be run.
        """
        logits_Y = self.logits(values_LX)
        if not np.isfinite(logits_Y).all():
            raise Refused(f"numbers up to {np.abs(values_LX).max():g}, with which the model overflows")
        weights_Y = np.exp(logits_Y - logits_Y.max())
        return weights_Y / weights_Y.sum()


def texts(says: dict[str, Any], key: str) -> list[str]:
    """The list of different texts that stands there."""
    names = says.get(key)
    if not isinstance(names, list) or not names or not all(map(is_text, names)) or len(set(names)) < len(names):
        raise ValueError(f"says of its {key} {cut(repr_of(names))}, not a list of different texts")
    return names


def is_text(value: object) -> bool:
    """A str that can be written."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a letter
        return False


def repr_of(value: object) -> str:
    """Its repr, also of what has none: an int of more digits than Python prints."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


# --- The stream ---------------------------------------------------------------------------------------------------


@dataclass
class Columns:
    """Where what stands in a row."""

    series: int
    channels: list[int]
    time: int | None
    width: int


@dataclass
class Current:
    """The series that is coming in."""

    name: str
    rows: deque[list[float]]
    num_steps: int = 0
    times: tuple[float, float] | None = None  # of the first and the last step
    why_not: str = ""  # it was refused; its other rows are passed over


@dataclass
class Counts:
    """What was done, for the last line."""

    series: int = 0
    answers: int = 0
    refused: int = 0


@dataclass
class Stream:
    """Rows in, answers out: one for each series, or one for each window.

    Args:
        model: to ask.
        out: for the answers, a line of JSON each.
        err: for what was refused, a line each.
        window: steps to classify at a time, as they come in; None: whole series, when they end.
        hop: steps from one window to the next.
        longest: steps of a whole series at most, so that a stream without an end cannot fill the memory.
    """

    model: Classifier
    out: TextIO
    err: TextIO
    window: int | None = None
    hop: int = 1
    longest: int = 100_000
    counts: Counts = field(default_factory=Counts)

    def run(self, lines: TextIO) -> None:
        """Read all rows: one line is one row, so that what is wrong in a line stays in it.

        Raises:
            ValueError: a header that does not fit the model.
        """
        columns: Columns | None = None
        current: Current | None = None
        for line, text in lines_of(lines):
            row, why = cells_of(text)
            if columns is None:
                if why:
                    raise ValueError(f"line {line} {why}")
                columns = self._columns(row)
                continue
            if not why and not any(row):  # a blank line ends a series at once
                self._finish(current)
                current = None
                continue
            # A row that does not come as far as its name may be one of the series that is coming in
            name = row[columns.series] if len(row) > columns.series else current.name if current else ""
            if current is None or name != current.name:
                self._finish(current)
                current = Current(name, deque(maxlen=self.window))
            if why:
                self._refuse(current, f"line {line} {why}")
            elif not current.why_not:
                self._take(current, columns, row, line)
        if columns is None:
            self._columns([])
        self._finish(current)

    def _columns(self, header: list[str]) -> Columns:
        at = {name.lower() if name.lower() in OTHERS else name: index for index, name in enumerate(header)}
        rule = "the first line must name the columns, each once: series, time if there is one, channels"
        if "series" not in at:
            raise ValueError(f"{rule}; got {cut(repr(', '.join(header)), 200)}")
        if len(at) != len(header):
            twice = next(name for name in header if header.count(name) > 1 or name not in at)
            raise ValueError(f"{rule}; there are two of {cut(repr(twice))}")
        channels = self.model.channel_names
        times = {name: unit_of(name) for name in at if unit_of(name) is not None and name not in channels}
        if len(times) > 1:
            raise ValueError(f"one column may be the time; got {cut(', '.join(times), 200)}")
        rule = f"the columns must be the channels {cut(', '.join(channels), 200)}"
        if missing := [name for name in channels if name not in at]:
            raise ValueError(f"{rule}; {cut(', '.join(missing), 200)} is missing")
        if more := [name for name in at if name not in (*times, *OTHERS, *channels)]:
            raise ValueError(f"{rule}; {cut(', '.join(more), 200)} is none of them")
        time = None
        for name, unit in times.items():
            if unit == self.model.unit:
                time = at[name]
            elif self.model.unit != "step":
                raise ValueError(f"the time must be in {cut(self.model.unit)}, as in training; got {cut(name)}")
        return Columns(at["series"], [at[name] for name in channels], time, len(header))

    def _take(self, current: Current, columns: Columns, row: list[str], line: int) -> None:
        """Add one step; a step that cannot be taken ends the whole series."""
        try:
            if len(row) != columns.width:
                raise Refused(f"line {line} has {len(row)} cells, the header {columns.width}")
            if not current.name:
                raise Refused(f"line {line} does not name its series")
            self._check_time(current, columns, row, line)
            current.rows.append([number(row[at], line) for at in columns.channels])
            current.num_steps += 1
            if self.window is None and current.num_steps > self.longest:
                raise Refused(f"more than {self.longest} steps (--longest)")
            if self.window is not None and current.num_steps >= self.window:
                more = current.num_steps - self.window
                if more % self.hop == 0:
                    self._answer(current)
        except Refused as error:
            self._refuse(current, str(error))

    def _check_time(self, current: Current, columns: Columns, row: list[str], line: int) -> None:
        """The model sees steps and not seconds: a step of another length would be another series to it."""
        if columns.time is None:
            return
        now = number(row[columns.time], line, np.float64)
        if current.times is None:
            current.times = now, now
            return
        (first, last), interval, unit = current.times, self.model.interval, self.model.unit
        if not abs(now - last - interval) <= 0.1 * interval:  # as stamps may be rounded
            raise Refused(f"line {line} is {now - last:g} {unit} after the one before; {interval:g} in training")
        mean = (now - first) / current.num_steps
        if not abs(mean - interval) <= (0.01 + 0.2 / current.num_steps) * interval:
            raise Refused(f"line {line}: its steps are {mean:g} {unit} long; {interval:g} in training")
        current.times = first, now

    def _finish(self, current: Current | None) -> None:
        """The series has ended: answer, if that was not done window by window."""
        if current is None:
            return
        self.counts.series += 1
        if current.why_not:
            return
        if self.window is not None:
            if current.num_steps < self.window:
                self._refuse(current, f"{current.num_steps} steps, fewer than a window has")
            return
        try:
            self._answer(current)
        except Refused as error:
            self._refuse(current, str(error))

    def _answer(self, current: Current) -> None:
        values_LX = np.asarray(current.rows, dtype=np.float32)
        probabilities_Y = self.model.probabilities(values_LX)
        best = int(probabilities_Y.argmax())
        answer = {"series": current.name, "class": self.model.class_names[best]}
        answer |= {"probability": round(float(probabilities_Y[best]), 6)}
        if self.window is not None:
            answer |= {"first_step": current.num_steps - self.window, "steps": self.window}
        else:
            answer |= {"steps": current.num_steps}
        print(json.dumps(answer, ensure_ascii=False), file=self.out, flush=True)
        self.counts.answers += 1

    def _refuse(self, current: Current, why: str) -> None:
        """Say why, once for a series, and go on with the next one."""
        if current.why_not:
            return
        current.why_not = why
        current.rows.clear()
        self.counts.refused += 1
        name = repr(current.name[:60]) + ("..." if len(current.name) > 60 else "")
        print(f"serve: series {name} is refused: {why}", file=self.err, flush=True)


def lines_of(stream: TextIO) -> Iterator[tuple[int, str]]:
    """Each line and its number, as soon as it is there; what is too long of it is read and dropped."""
    number_of_line = 0
    while text := stream.readline(LONGEST_LINE + 2):
        number_of_line += 1
        rest = text
        while rest and not rest.endswith("\n"):
            rest = stream.readline(LONGEST_LINE)
        yield number_of_line, text.removesuffix("\n")


# A cell and what ends it: quoted, with each quote in it doubled, or without any quote
CELL = re.compile(r' *(?:"([^"]*(?:""[^"]*)*)"\s*|([^" ,][^",]*)?)(,|\Z)')


def cells_of(text: str) -> tuple[list[str], str]:
    """The cells of a line of CSV, without the blanks around them; and why it is none, "" for nothing.

    In a line that is none, the cells before the fault are right, and those behind it what stands between two commas.
    """
    why = "" if is_text(text) else "is not UTF-8"
    if len(text) > LONGEST_LINE:
        text, why = text[:LONGEST_LINE], f"has more than {LONGEST_LINE} letters"
    if '"' not in text:
        return [cell.strip() for cell in text.split(",")], why
    cells, at, more = [], 0, ","
    while more:
        found = CELL.match(text, at)
        if found is None:
            rest = [cell.strip(' "') for cell in text[at:].split(",")]
            return cells + rest, why or "has a quote that does not end, or one inside of a cell"
        quoted, plain, more = found.groups()
        cells.append((plain or "" if quoted is None else quoted.replace('""', '"')).strip())
        at = found.end()
    return cells, why


def unit_of(name: str) -> str | None:
    """UNIT of `time (UNIT)`, "time" of `time`, None of another name."""
    first, _, rest = name.partition("(")
    if first.strip().lower() != "time" or (rest and not rest.endswith(")")):
        return None
    return rest[:-1].strip() or "time" if rest else "time"


def number(cell: str, line: int, dtype: Any = np.float32) -> float:
    """A finite number, also as float32.

    Raises:
        Refused: it is none.
    """
    try:
        # Python also reads 1_000, and the digits of every script
        value = float(cell) if cell.isascii() and "_" not in cell else math.nan
    except ValueError:
        value = math.nan
    with np.errstate(over="ignore"):
        if not np.isfinite(dtype(value)):
            raise Refused(f"line {line} has {cell[:40]!r} where a finite number belongs")
    return value


def peak_megabytes() -> float:
    """The most memory that this process ever had, in MB; NaN where the system does not tell."""
    try:  # Linux: ru_maxrss would count the program that started this one as well
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def main(argv: list[str] | None = None) -> int:
    """Run; returns the exit code: 0 all done, 1 some series were refused, 2 it could not start, or not go on."""
    if sys.stderr is None:  # it was closed; print() would write to stdout instead
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # whatever the machine's language
    given = arguments(argv)
    try:
        if sys.stdout is None:
            raise ValueError("stdout is closed, and answers go there")
        if given.data is None and sys.stdin is None:
            raise ValueError("stdin is closed, and no file was named")
        return classify(given)
    except BrokenPipeError:  # nobody reads the answers any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at the end would fail
        return 0
    except OSError as error:
        where = "" if error.filename is None else f"{cut(error.filename, 200)}: "
        print(f"serve: {where}{error.strerror or error}", file=sys.stderr)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
    return 2


def classify(given: argparse.Namespace) -> int:
    """Answer all series; returns the exit code.

    Raises:
        OSError: a file cannot be read, or an answer not be written.
        ValueError: the model or the header does not fit.
    """
    try:
        model = Classifier(given.model, given.threads)
    except ValueError as error:
        raise ValueError(f"{given.model} {error}") from error
    stream = Stream(model, sys.stdout, sys.stderr, given.window, given.hop or 1, given.longest)
    source = sys.stdin.fileno() if given.data is None else given.data
    try:
        # Bytes that are no UTF-8 stay in their line, which is refused
        with open(source, encoding="utf-8-sig", errors="surrogateescape", closefd=given.data is not None) as lines:
            stream.run(lines)
    except KeyboardInterrupt:
        pass
    counts = stream.counts
    print(
        f"serve: {counts.series} series, {counts.answers} answers, {counts.refused} refused; "
        f"peak memory {peak_megabytes():.0f} MB",
        file=sys.stderr,
    )
    return 1 if counts.refused else 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """What was asked for; SystemExit(2) where that is nothing that can be done."""
    parser = argparse.ArgumentParser(description="Classify time series as they come in, one JSON line each.")
    parser.add_argument("model", type=Path, help="a file that `headwise export` wrote")
    parser.add_argument("data", nargs="?", help="a CSV file; left out: stdin")
    parser.add_argument("--window", type=count, help="classify the last so many steps, as they come in")
    parser.add_argument("--hop", type=count, help="steps from one window to the next (default 1)")
    parser.add_argument("--longest", type=count, default=100_000, help="steps that a series may have at most")
    parser.add_argument("--threads", type=threads, default=1, help="for one answer (default 1)")
    given = parser.parse_intermixed_args(argv)
    if given.hop is not None and given.window is None:
        parser.error("--hop says from one window to the next; it needs --window")
    return given


def count(text: str, most: int = MOST) -> int:
    """An int of at least 1, for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"must be 1 to {most}; got {cut(repr(text))}")
    return int(text)


def threads(text: str) -> int:
    """The same for threads."""
    return count(text, MOST_THREADS)


if __name__ == "__main__":
    sys.exit(main())
