"""Random series, written and read back; damaged files are an error, or exactly what a naive reading says they hold."""

from __future__ import annotations

import csv
import io
import re
import struct
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.data.samples import Series
from headwise.data.timeseries import read_series

Rows = list[list[float]]  # (L, X)


class Drawn(NamedTuple):
    """What a file holds: also what a naive reading of a file returns."""

    values: list[Rows]
    labels: list[str] | None
    names: list[str]
    channels: list[str]


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# What `strip` leaves alone and the header of .ts can hold; no text that begins a comment or ends a line.
LETTERS = st.characters(
    min_codepoint=33, max_codepoint=0x17F, exclude_characters='#%@:"', exclude_categories=("C", "Z")
)
WORDS = st.text(LETTERS, min_size=1, max_size=5)
TEXTS = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=6).map(str.strip).filter(bool)
# Names that mean or suggest something else than a channel.
SPECIAL = re.compile(
    r"series|labels?|class(es)?|target|y|t.*|dates?.*|clock.*|epoch.*|hours.*|[mun]?secs?.*|ms.*|millis|micros|nanos",
    re.IGNORECASE | re.DOTALL,
)


@st.composite
def _drawn(draw: st.DrawFn, words: st.SearchStrategy[str], channels: int | None = None) -> Drawn:
    width = channels or draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    row = st.lists(NUMBERS, min_size=width, max_size=width)
    values = [draw(st.lists(row, min_size=length, max_size=length)) for length in lengths]
    labels = draw(st.none() | st.lists(words, min_size=len(values), max_size=len(values)))
    names = draw(st.lists(words, min_size=len(values), max_size=len(values), unique=True))
    found = words.filter(lambda word: not SPECIAL.fullmatch(word) and word[0] not in "@%#")
    return Drawn(values, labels, names, draw(st.lists(found, min_size=width, max_size=width, unique=True)))


def _ts(drawn: Drawn) -> str:
    header = f"@dimensions {len(drawn.channels)}\n"
    if drawn.labels is not None:
        header += f"@classLabel true {' '.join(dict.fromkeys(drawn.labels))}\n"
    lines = []
    for index, rows in enumerate(drawn.values):
        cells = [",".join(map(repr, channel)) for channel in zip(*rows, strict=True)]
        lines.append(":".join(cells if drawn.labels is None else [*cells, drawn.labels[index]]))
    return header + "@data\n" + "".join(line + "\n" for line in lines)


def _csv(header: list[str], rows: list[list[object]], **options: int) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, **options).writerows([header, *rows])
    return text.getvalue()


def _long(drawn: Drawn, step: float | None = None, **options: int) -> str:
    header = ["series", *["label"] * (drawn.labels is not None), *["time (s)"] * (step is not None), *drawn.channels]
    rows: list[list[object]] = []
    for index, series in enumerate(drawn.values):
        label = [] if drawn.labels is None else [drawn.labels[index]]
        for position, row in enumerate(series):
            time = [] if step is None else [position * step]
            rows.append([drawn.names[index], *label, *time, *map(repr, row)])
    return _csv(header, rows, **options)


def _wide(drawn: Drawn) -> str:
    longest = max(map(len, drawn.values))
    rows: list[list[object]] = []
    for index, series in enumerate(drawn.values):
        label = [] if drawn.labels is None else [drawn.labels[index]]
        rows.append([*label, *(repr(row[0]) for row in series), *[""] * (longest - len(series))])
    return _csv([*["label"] * (drawn.labels is not None), *map(str, range(longest))], rows)


def _read(suffix: str, content: bytes) -> Series:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "f" + suffix)
        path.write_bytes(content)
        return read_series(path)


def _same(series: Series, drawn: Drawn) -> None:
    assert len(series) == len(drawn.values)
    for value_LX, rows in zip(series.values, drawn.values, strict=True):
        assert value_LX.dtype == torch.float32
        assert value_LX.tolist() == [[_float32(value) for value in row] for row in rows]
    if drawn.labels is None:
        assert series.labels is None
    else:
        assert series.labels is not None
        assert [series.class_names[label] for label in series.labels.tolist()] == drawn.labels


@given(_drawn(WORDS))
def test_ts_round_trip(drawn: Drawn) -> None:
    series = _read(".ts", _ts(drawn).encode())
    _same(series, drawn)
    assert series.class_names == tuple(dict.fromkeys(drawn.labels or []))


@given(_drawn(TEXTS), st.none() | st.floats(1e-3, 1e6), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
def test_long_csv_round_trip(drawn: Drawn, step: float | None, quoting: int) -> None:
    series = _read(".csv", _long(drawn, step, quoting=quoting).encode())
    _same(series, drawn)
    assert series.names == tuple(drawn.names)
    assert series.channel_names == tuple(drawn.channels)
    if step is None or max(map(len, drawn.values)) == 1:
        assert (series.interval, series.unit) == (1.0, "step")
    else:
        assert abs(series.interval - step) <= 1e-5 * step
        assert series.unit == "s"


@given(
    st.floats(5, 1000),
    st.integers(0, 2 * 10**18),
    st.integers(0, 9),
    st.booleans(),
    st.lists(st.integers(2, 12), min_size=1, max_size=3),
    st.data(),
)
def test_rounded_stamps_are_even_and_a_gap_is_not(
    step: float, start: int, decimals: int, zeros: bool, lengths: list[int], data: st.DataObject
) -> None:
    """Whole multiples of the last digit, which may be far below what float64 keeps of the stamp."""
    times = [[str(Decimal(start + round(at * step)).scaleb(-decimals)) for at in range(length)] for length in lengths]
    if not zeros:
        times = [[time.rstrip("0").rstrip(".") if "." in time else time for time in series] for series in times]
    series = _read(".csv", _timed(times).encode())
    unit = 10.0**-decimals
    error = unit * len(lengths) / sum(length - 1 for length in lengths)
    assert abs(series.interval - step * unit) <= error + 1e-5 * step * unit
    which = data.draw(st.integers(0, len(times) - 1))
    if len(times[which]) > 3:
        gap = data.draw(st.integers(1, len(times[which]) - 2))
        del times[which][gap]
        with pytest.raises(ValueError, match="the time must rise by about"):
            _read(".csv", _timed(times).encode())


def _timed(times: list[list[str]]) -> str:
    return _csv(["series", "time", "x"], [[name, time, 1] for name, series in enumerate(times) for time in series])


@given(_drawn(TEXTS, channels=1))
def test_wide_csv_round_trip(drawn: Drawn) -> None:
    series = _read(".csv", _wide(drawn).encode())
    _same(series, drawn)
    assert len(set(series.class_names)) == len(series.class_names) == len(set(drawn.labels or []))


# Naive readings: no checks, no speed, no code of ours.


def _naive_ts(text: str) -> Drawn:
    values: list[Rows] = []
    labels: list[str] = []
    labelled = begun = False
    for line in re.split(r"\r\n|\r|\n", text):
        words = line.split()
        if not words or words[0][0] in "#%":
            continue
        if not begun:
            labelled |= words[0].lower() == "@classlabel" and words[1].lower() == "true"
            begun = words[0].lower() == "@data"
            continue
        parts = line.split(":")
        if labelled:
            labels.append(parts.pop().strip())
        channels = [[float(cell) for cell in part.split(",")] for part in parts]
        values.append([list(row) for row in zip(*channels, strict=True)])
    return Drawn(values, labels if labelled else None, [], [])


def _naive_long(text: str) -> Drawn:
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    header, *rows = [row for row in reader if row and (len(row) > 1 or row[0].strip())]
    columns = {name.strip(): index for index, name in enumerate(header)}
    key, label = columns.pop("series"), columns.pop("label", None)
    columns = {name: index for name, index in columns.items() if not re.fullmatch(r"time\s*(\(.*\))?", name, re.DOTALL)}
    groups: dict[str, list[list[str]]] = {}
    for row in rows:
        groups.setdefault(row[key].strip(), []).append(row)
    values = [[[float(row[index]) for index in columns.values()] for row in group] for group in groups.values()]
    labels = None if label is None else [group[0][label].strip() for group in groups.values()]
    return Drawn(values, labels, list(groups), list(columns))


def _naive_wide(text: str) -> Drawn:
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    header, *rows = [row for row in reader if row and (len(row) > 1 or row[0].strip())]
    label = next((index for index, name in enumerate(header) if name.strip().lower() == "label"), None)
    cells = [[cell for index, cell in enumerate(row) if index != label] for row in rows]
    values = [[[float(cell)] for cell in row if cell.strip()] for row in cells]
    return Drawn(values, None if label is None else [row[label].strip() for row in rows], [], [])


FORMS: dict[str, tuple[str, Callable[[Drawn], str], Callable[[str], Drawn]]] = {
    "ts": (".ts", _ts, _naive_ts),
    "long": (".csv", lambda drawn: _long(drawn, 10.0), _naive_long),
    "wide": (".csv", _wide, _naive_wide),
}
PIECES = st.sampled_from(
    [*'0123456789.,:;-+eE?#@%_"\n\r\t ', "\r\n", "\0", "nan", "inf", "1e39", "1,5", "\ufeff", ",,"]
)


@st.composite
def _damaged(draw: st.DrawFn, form: str) -> bytes:
    """A file with a few small changes, or with lines left out, twice or in another order, or cut off."""
    width = 1 if form == "wide" else None
    text = FORMS[form][1](draw(_drawn(st.sampled_from(["a", "b", "c", "d", "7", "7.0"]), channels=width)))
    for _ in range(draw(st.integers(1, 3))):
        lines = text.splitlines(keepends=True) or [""]
        at = draw(st.integers(0, len(text)))
        line, other = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["insert", "replace", "delete", "cut", "drop", "double", "swap"])):
            case "insert":
                text = text[:at] + draw(PIECES) + text[at:]
            case "replace":
                text = text[:at] + draw(PIECES) + text[at + 1 :]
            case "delete":
                text = text[:at] + text[at + draw(st.integers(1, 4)) :]
            case "cut":
                text = text[:at]
            case "drop":
                text = "".join(lines[:line] + lines[line + 1 :])
            case "double":
                text = "".join([*lines[: other + 1], lines[line], *lines[other + 1 :]])
            case "swap":
                lines[line], lines[other] = lines[other], lines[line]
                text = "".join(lines)
    return text.encode()


def _error_or_what_it_says(form: str, content: bytes) -> bool:
    """Whether it was read."""
    suffix, _, naive = FORMS[form]
    try:
        series = _read(suffix, content)
    except ValueError as error:
        message = str(error)
        assert message.startswith("read_series: /")
        assert " (cure: " in message
        line = re.match(r"read_series: \S+?/f\.(?:ts|csv), line (\d+)[: ]", message)
        assert line is None or 1 <= int(line[1]) <= len(content.splitlines()) + 1
        return False
    said = naive(content.decode("utf-8-sig"))
    _same(series, said)
    if said.names:
        assert (series.names, series.channel_names) == (tuple(said.names), tuple(said.channels))
    return True


@settings(max_examples=200)
@given(_damaged("ts"))
def test_damaged_ts(content: bytes) -> None:
    _error_or_what_it_says("ts", content)


@settings(max_examples=200)
@given(_damaged("long"))
def test_damaged_long_csv(content: bytes) -> None:
    _error_or_what_it_says("long", content)


@settings(max_examples=200)
@given(_damaged("wide"))
def test_damaged_wide_csv(content: bytes) -> None:
    _error_or_what_it_says("wide", content)


@given(st.sampled_from([".ts", ".csv"]), st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.booleans())
def test_garbage_is_a_value_error_or_a_series(suffix: str, garbage: bytes, behind_a_header: bool) -> None:
    header = {".ts": b"@data\n", ".csv": b"series,x\n"}[suffix] if behind_a_header else b""
    try:
        series = _read(suffix, header + garbage)
    except ValueError as error:
        problems = [] if str(error).startswith("read_series: ") else [str(error)]
    else:
        problems = [value_LX for value_LX in series.values if not value_LX.isfinite().all()]
    assert problems == []


def test_the_damage_tests_can_tell() -> None:
    """Both outcomes occur, and a reading that is not what the text says is noticed."""
    good = b"series,label,time (s),x\na,1,0,5\na,1,10,6\nb,2,0,7\n"
    assert _error_or_what_it_says("long", good)
    assert not _error_or_what_it_says("long", good + b"a,1,20,8\n")
    assert _error_or_what_it_says("ts", b"@classLabel true 1 2\n@data\n5,6:1\n")
    assert not _error_or_what_it_says("ts", b"@classLabel true 1 2\n@data\n5,6\n")
    assert _error_or_what_it_says("wide", b"0,1,label\n5,6,1\n7,,2\n")
    assert not _error_or_what_it_says("wide", b"0,1,label\n5,6,1\n,7,2\n")
