"""Labelled series read from the two kinds of text file that they come in: `.ts` and `.csv`.

Whatever the file claims is held against what it holds: a wrong file is an error that names its line, never a `Series`
that is silently something else. The grammar, with `[ ]` for what may be left out and `...` for more of the same:

    .ts    tags, then @data, then one line a series; `#` or `%` begins a comment line, tags are matched in any case
           tag     @problemName TEXT | @timeStamps false | @missing BOOL | @univariate BOOL | @dimensions COUNT
                   | @equalLength BOOL | @seriesLength COUNT | @targetLabel false | @classLabel false
                   | @classLabel true CLASS CLASS ...
           line    CHANNEL[:CHANNEL ...][:CLASS]      CHANNEL is VALUE[,VALUE ...]; a CLASS with @classLabel true

    .csv   a header, then rows of as many cells; commas between, `"` around cells that need it
           long    the header has a column `series`; also `time`, `time (UNIT)` and `label`; all others are channels
           wide    it has none; `label`, and columns numbered from 0 or 1, all with the same prefix or none

Axis letters: L positions, X channels.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.data.samples import Series


def read_series(
    path: str | os.PathLike[str],
    *,
    class_names: Sequence[str] | None = None,
    channel_names: Sequence[str] | None = None,
) -> Series:
    """Read series, labelled or not, from a text file; its suffix says how.

    `.ts` is the format of the UCR and UEA archives: one line a series, `:` between channels, the label last.

        @univariate false
        @dimensions 2
        @classLabel true walk run
        @data
        0.1,0.2,0.4:9.8,9.7,9.8:walk
        0.9,0.1:9.1,9.9:run

    `.csv` is told apart by its header alone. With a column `series` it is *long*: one row a position, the rows of a
    series together; `label` and `time` may be left out, every other column is a channel.

        series,time (ms),label,acc_x,acc_y
        a,0,walk,0.1,9.8
        a,10,walk,0.2,9.7
        b,0,run,0.9,9.1

    Without one it is *wide*: one row a series of one channel, columns numbered from 0 or 1 with or without a common
    prefix (`t0,t1,t2`); `label` may be left out, empty cells at the end of a row mean a shorter series.

        label,0,1,2
        walk,0.1,0.2,0.4
        run,0.9,0.1,

    Both are UTF-8, with or without a byte order mark, and any line ends. In `.csv`, the names `series`, `time` and
    `label` are matched in any case; `time` counts up in even steps, the same for all series (to one in a thousand).
    Values are rounded to float32. Blanks around cells and labels are dropped; a label is text otherwise, so that "1"
    and "1.0" are two classes. Nothing is filled in, resampled or guessed.

    Args:
        path: the file.
        class_names: those that the labels must come from, in the order to count them; those of a saved model, for
            instance. Left out: the order of `@classLabel`; of a `.csv`, the labels in order of number if each is one,
            else of text.
        channel_names: those that the series must have, in the order to take them. The columns of a long `.csv` are
            found by name; elsewhere channels have no names, their number must agree, and they get these. Left out: the
            columns in the order of the file, "1", "2" and so on without columns.

    Returns:
        The series in the file's order, each (L, X) float32. `names` are those of the column `series`, else "0", "1"
        and so on. `interval` and `unit` are those of the column `time (UNIT)`; the unit of a plain `time` is "time".
        Without that column, or with no series of two positions to tell it, the interval is 1 "step". Without labels,
        `labels` is None and `class_names` empty, as `Series` has it.

    Raises:
        ValueError: the file cannot be read, is of another kind, breaks the grammar or its own claims, holds timestamps
            in `.ts`, targets of a regression, a missing, infinite or too great value, a series without values, or
            does not fit `class_names` or `channel_names`. The message names file, line and cure.

    Cost: linear in the file, which is held in memory; about two seconds for 10 MB.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "gait.csv")
        ...     text = "series,time (ms),label,x,y\\na,0,walk,1,2\\na,10,walk,3,4\\nb,0,run,5,6\\n"
        ...     _ = path.write_text(text)
        ...     series = read_series(path, channel_names=("y", "x"))
        >>> [value_LX.tolist() for value_LX in series.values]
        [[[2.0, 1.0], [4.0, 3.0]], [[6.0, 5.0]]]
        >>> series.class_names, series.labels.tolist(), series.names, series.interval, series.unit
        (('run', 'walk'), [1, 0], ('a', 'b'), 10.0, 'ms')
    """
    classes = _given("class_names", class_names)
    channels = _given("channel_names", channel_names)
    file = _File(os.fspath(path))
    suffix = Path(file.name).suffix.lower()
    if suffix not in (".ts", ".csv"):
        cure = "convert it, or rename it if it is one of the two"
        raise file.wrong(None, "", "have the suffix .ts or .csv", _short(suffix or "no suffix"), cure)
    text = _text(file)
    table = _read_ts(file, text) if suffix == ".ts" else _read_csv(file, text, channels)
    return _finish(file, table, classes, channels)


_Names = tuple[str, ...] | None


class _Table(NamedTuple):
    """What both readers return."""

    values: list[Tensor]
    lines: list[int]  # where each series begins
    labels: list[str] | None
    names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()  # empty where the file has no names for them
    class_names: tuple[str, ...] | None = None  # None where the file does not say which there are
    interval: float = 1.0
    unit: str = "step"


class _File(NamedTuple):
    """The file under its caller's name, for errors."""

    name: str

    def wrong(self, line: int | None, what: str, rule: str, got: object, cure: str) -> ValueError:
        """Build the error `read_series: NAME, line LINE: WHAT must RULE; got GOT (cure: CURE)`."""
        place = self.name if line is None else f"{self.name}, line {line}"
        return invalid("read_series", f"{place}: {what}" if what else place, rule, f"{got} (cure: {cure})")


def _given(argument: str, names: Sequence[str] | None) -> _Names:
    if names is None:
        return None
    texts = not isinstance(names, str) and all(isinstance(name, str) for name in names)
    if not texts or not names or len(set(names)) != len(names):
        raise invalid("read_series", argument, "be at least one text, no two the same; or None", repr(names))
    return tuple(names)


def _finish(file: _File, table: _Table, class_names: _Names, channel_names: _Names) -> Series:
    """Count the classes, compare with what the caller knows, and make the `Series`."""
    if not table.values:
        raise file.wrong(None, "", "hold at least one series", "none", "add the data after the header")
    found = table.values[0].shape[1]
    if channel_names is not None and found != len(channel_names):
        rule = f"hold {len(channel_names)} channels, as channel_names: {_listed(channel_names)}"
        raise file.wrong(None, "", rule, found, "give the channels that these names belong to")
    if table.labels is None:
        labels, class_names = None, ()
    else:
        class_names = class_names or table.class_names or _in_order(set(table.labels))
        index = {name: number for number, name in enumerate(class_names)}
        for line, label in zip(table.lines, table.labels, strict=True):
            if label not in index:
                raise _unknown_label(file, line, label, class_names)
        labels = torch.tensor([index[label] for label in table.labels])
    channel_names = channel_names or table.channel_names
    return Series(table.values, labels, class_names, channel_names, table.names, table.interval, table.unit)


def _in_order(labels: set[str]) -> tuple[str, ...]:
    numbers = {label: _number(label) for label in labels}
    if None in numbers.values():
        return tuple(sorted(labels))
    return tuple(sorted(labels, key=lambda label: (numbers[label], label)))


def _unknown_label(file: _File, line: int, label: str, class_names: Sequence[str]) -> ValueError:
    same = [name for name in class_names if _number(label) is not None and _number(name) == _number(label)]
    cure = "correct the label or the list of classes" if not same else f"write it {same[0]!r}: labels are text"
    return file.wrong(line, "the label", f"be one of {_listed(class_names)}", _short(label), cure)


_KINDS = (
    (b"\x89PNG", "a PNG picture"),
    (b"PK\x03\x04", "a ZIP archive (.zip, .xlsx, .npz or .pt)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"%PDF", "a PDF document"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text"),
)
_TOO_GREAT = 2.0**128 - 2.0**103  # from here on, float32 rounds to infinity
_CURES = (  # the first that a cell matches
    (r"[-+]?[0-9]+,[0-9]+", "write a decimal point"),
    (r"\(.*", "leave the timestamps out; .ts is read without them"),
    (r".*[0-9][-/:T][0-9].*", "write a date or a time as one number, such as the seconds from the start"),
    (r"\D*", "fill or drop that series; missing values are not read"),
    (r".*", "write it as a number such as -2.5e-3; float32 ends at 3.4e38"),
)


def _text(file: _File) -> str:
    try:
        data = Path(file.name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        got = getattr(error, "strerror", None) or error
        raise file.wrong(None, "", "be a file that can be read", got, "check the path and its permissions") from error
    cure = "export the data as .csv or .ts, in UTF-8"
    for magic, kind in _KINDS:
        if data.startswith(magic):
            raise file.wrong(None, "", "be UTF-8 text", kind, cure)
    if (nul := data.find(b"\0")) >= 0:
        raise file.wrong(data.count(b"\n", 0, nul) + 1, "", "be UTF-8 text", "a NUL byte, as in binary files", cure)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec counts from behind a byte order mark; the bytes it was given are its own.
        line = error.object.count(b"\n", 0, error.start) + 1
        raise file.wrong(line, "", "be UTF-8 text", f"the byte 0x{error.object[error.start]:02x}", cure) from error
    if not text.strip():
        raise file.wrong(None, "", "hold at least one series", "an empty file", "write a header and the data")
    return text


def _short(text: str) -> str:
    """Quote a piece of the file, but not a whole line of garbage."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(_short(name) for name in names[:20])
    return shown if len(names) <= 20 else f"{shown}, ... ({len(names)} in all)"


def _number(cell: str) -> float | None:
    """Return the value, or None: `float` also takes 1_000, nan, infinity and the digits of other scripts."""
    text = cell.strip()
    try:
        value = float(text)
    except ValueError:
        return None
    return value if "_" not in text and text.isascii() and abs(value) < _TOO_GREAT else None


def _floats(file: _File, cells: Sequence[str], place: Callable[[int], tuple[int, str]]) -> list[float]:
    """Return the values of `cells`; for the error, `place` tells line and name of the cell at an index."""
    try:
        values = list(map(float, cells))
    except ValueError:
        pass
    else:
        text = "".join(cells)
        # One sum finds what is not finite or too great; NaN makes it False.
        if sum(map(abs, values)) < _TOO_GREAT and "_" not in text and text.isascii():
            return values
    values = []
    for index, cell in enumerate(cells):
        if (value := _number(cell)) is None:
            cure = next(cure for pattern, cure in _CURES if re.fullmatch(pattern, cell.strip(), re.DOTALL))
            raise file.wrong(*place(index), "hold a finite number", _short(cell), cure)
        values.append(value)
    return values


# The .ts format.

_FLAGS = ("@timeStamps", "@targetLabel", "@missing", "@univariate", "@equalLength")
_COUNTS = ("@dimensions", "@seriesLength")
_TAGS = ("@problemName", *_FLAGS, *_COUNTS, "@classLabel", "@data")
_REFUSED = {
    "@timeStamps": "leave the timestamps out and say false, or write a long .csv with a column time",
    "@targetLabel": "this is a regression set; headwise reads classes: sort the targets into some, with @classLabel",
}


class _Header(NamedTuple):
    """What every data line must be like; each number with who claims it, the first line too once it is read."""

    channels: list[tuple[int, str]]
    lengths: list[tuple[int, str]]
    univariate: bool | None
    equal_length: bool
    classes: tuple[str, ...] | None


def _read_ts(file: _File, text: str) -> _Table:
    lines = _ts_lines(text)
    header = _ts_header(file, lines)
    values: list[Tensor] = []
    numbers: list[int] = []
    labels: list[str] = []
    for line, row in lines:
        channels = row.split(":")
        if header.classes is not None:
            labels.append(channels.pop().strip())
        values.append(_ts_values(file, line, channels, header))
        if header.classes is not None and labels[-1] not in header.classes:
            raise _unknown_label(file, line, labels[-1], header.classes)
        numbers.append(line)
    return _Table(values, numbers, None if header.classes is None else labels, class_names=header.classes)


def _ts_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines that count; only \\r and \\n end a line, as in an editor."""
    for number, line in enumerate(io.StringIO(text, newline=""), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith(("#", "%")):
            yield number, stripped


def _ts_header(file: _File, lines: Iterable[tuple[int, str]]) -> _Header:
    """Read the tags up to @data."""
    known = {tag.lower(): tag for tag in _TAGS} | {"@dimension": "@dimensions"}
    tags: dict[str, tuple[int, str]] = {}
    for line, text in lines:
        word, value = [*text.split(maxsplit=1), ""][:2]
        if word.lower() in ("@relation", "@attribute"):
            raise file.wrong(line, "", "be .ts", f"an ARFF file: {_short(text)}", "take the set's .ts file instead")
        if not word.startswith("@"):
            cure = "the data comes after @data; a table with a header line has the suffix .csv"
            raise file.wrong(line, "a line before @data", "be a tag (@...) or a comment (#...)", _short(text), cure)
        if word.lower() not in known:
            raise file.wrong(line, "a tag", f"be one of {', '.join(_TAGS)}", _short(word), "correct or delete it")
        tag = known[word.lower()]
        if tag == "@data":
            if value:
                raise file.wrong(line, "@data", "stand alone", _short(text), "begin the data in the next line")
            return _checked_header(file, tags)
        first, before = tags.setdefault(tag, (line, value))
        if before != value and tag != "@problemName":
            raise file.wrong(line, tag, f"be {_short(before)}, as in line {first}", _short(value), "delete one of them")
    raise file.wrong(None, "", "have a line @data", "none", "write @data between the tags and the data")


def _checked_header(file: _File, tags: dict[str, tuple[int, str]]) -> _Header:
    """Turn the tags into what they claim."""

    def claim(tag: str, pattern: str, rule: str) -> str:
        line, value = tags.get(tag, (0, ""))
        if line and not re.fullmatch(pattern, value.lower()):
            raise file.wrong(line, tag, rule, _short(value), "correct or delete it")
        return value.lower()

    flags = {tag: claim(tag, "true|false", "be true or false") for tag in _FLAGS}
    counts = {tag: claim(tag, "0*[1-9][0-9]{0,17}", "be a count of at least 1") for tag in _COUNTS}
    claims = {tag: [(int(value), tag)] if value else [] for tag, value in counts.items()}
    for tag, cure in _REFUSED.items():
        if flags[tag] == "true":
            raise file.wrong(tags[tag][0], tag, "be false", "true", cure)
    univariate = {"true": True, "false": False}.get(flags["@univariate"])
    if univariate:
        claims["@dimensions"].append((1, "@univariate"))
    classes = _ts_classes(file, *tags["@classLabel"]) if "@classLabel" in tags else None
    equal = flags["@equalLength"] == "true"
    return _Header(claims["@dimensions"], claims["@seriesLength"], univariate, equal, classes)


def _ts_classes(file: _File, line: int, value: str) -> tuple[str, ...] | None:
    first, *classes = value.split() or [""]
    told = first.lower()
    if told not in ("true", "false") or bool(classes) != (told == "true") or len(set(classes)) != len(classes):
        cure = "write '@classLabel true walk run', or '@classLabel false' for a file without labels"
        raise file.wrong(line, "@classLabel", "be false, or true and different classes", _short(value), cure)
    return tuple(classes) or None


def _ts_values(file: _File, line: int, channels: list[str], header: _Header) -> Tensor:
    """Return the (L, X) values of one line, once its sizes are those that were claimed."""
    what = "channels" if header.classes is None else "channels and then a label, with ':' between"
    _hold(file, line, len(channels), header.channels, what)
    if len(channels) < (least := 2 if header.univariate is False else 1):
        raise file.wrong(line, "the series", f"have at least {least} {what}", len(channels), "add what is missing")
    rows = [channel.split(",") for channel in channels]
    length = len(rows[0])
    for number, (channel, row) in enumerate(zip(channels, rows, strict=True), start=1):
        if not channel.strip():
            cure = "write its values, or delete the line if the series is empty"
            raise file.wrong(line, f"channel {number}", "hold at least one value", "none", cure)
        if len(row) != length:
            cure = "cut or fill it" if header.classes else "cut or fill it; a label needs '@classLabel true ...'"
            raise file.wrong(line, f"channel {number}", f"hold {length} values, as channel 1", len(row), cure)
    _hold(file, line, length, header.lengths, "values in each channel")
    if not header.channels:
        header.channels.append((len(rows), f"line {line}"))
    if header.equal_length and not header.lengths:
        header.lengths.append((length, f"line {line} with @equalLength"))
    cells = [cell for row in rows for cell in row]
    place = "channel {}, position {}".format
    flat = _floats(file, cells, lambda index: (line, place(index // length + 1, index % length + 1)))
    return torch.tensor(flat, dtype=torch.float32).view(len(rows), length).T.contiguous()


def _hold(file: _File, line: int, found: int, claims: list[tuple[int, str]], what: str) -> None:
    for number, source in claims:
        if found != number:
            cure = "correct the series, or what the header says"
            raise file.wrong(line, "the series", f"have {number} {what}, as {source} says", found, cure)


# The two .csv forms.

_FORMS = """one of two forms, told apart by a column `series`
  long, one row a position:  series,time (ms),label,acc_x,acc_y
                             walk1,0,walk,0.1,9.8
  wide, one row a series:    label,0,1,2
                             walk,0.1,0.2,0.4"""
_TIME = re.compile(r"time(?:\s*\(\s*([^()]*[^()\s])\s*\))?", re.IGNORECASE)
_LIKE_TIME = re.compile(r"time([^a-z].*|stamps?)?", re.IGNORECASE | re.DOTALL)
_SPECIAL = ("series", "label")

_Row = tuple[int, list[str]]


def _read_csv(file: _File, text: str, channel_names: _Names) -> _Table:
    rows = _rows(file, csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True))
    line, cells = next(rows, (1, [""]))
    header = [cell.strip() for cell in cells]
    _check_header(file, line, header)
    columns = {name.lower(): index for index, name in enumerate(header) if name.lower() in _SPECIAL}
    if "series" in columns:
        return _read_long(file, (line, header), columns, rows, channel_names)
    return _read_wide(file, (line, header), columns.get("label"), rows)


def _rows(file: _File, reader: csv._reader) -> Iterator[_Row]:  # type: ignore[name-defined]
    """Yield the rows that are not blank, each with the number of its first line."""
    width, following = 0, 1
    try:
        for cells in reader:
            line, following = following, reader.line_num + 1
            if not cells or (len(cells) == 1 != width and not cells[0].strip()):
                continue
            width = width or len(cells)
            if len(cells) != width:
                cure = "add or delete cells; a decimal comma must be a point, a comma in text needs quotes"
                raise file.wrong(line, "the row", f"have {width} cells, as the header", len(cells), cure)
            yield line, cells
    except csv.Error as error:
        cure = "close each quote, and write a quote inside a quoted cell twice"
        raise file.wrong(following, "the row", "be valid CSV", error, cure) from error


def _check_header(file: _File, line: int, header: list[str]) -> None:
    """Refuse what is no header, and names that are empty or the same."""
    shown = _short(",".join(header))
    if header[0].startswith(("@", "%", "#")):
        cure = "a .ts file needs the suffix .ts; a .csv has no comments, and no ARFF file is read"
        raise file.wrong(line, "the header", "be names of columns", shown, cure)
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise file.wrong(line, "the header", "have commas between its columns", shown, "export it with the delimiter ,")
    numbered = all(name.isdigit() for name in header)
    if not numbered and all(_number(name) is not None for name in header):
        raise file.wrong(line, "the header", "be names of columns", shown, f"write a first line, of {_FORMS}")
    if "" in header:
        cure = "name it; pandas leaves it out with to_csv(index=False)"
        raise file.wrong(line, f"the name of column {header.index('') + 1}", "not be empty", "nothing", cure)
    known: set[str] = set()
    for name in header:
        same = name.lower() if name.lower() in _SPECIAL else name
        if same in known:
            raise file.wrong(line, "each name", "stand once", f"{_short(name)} again", "rename one of the columns")
        known.add(same)


def _read_long(file: _File, header: _Row, special: dict[str, int], rows: Iterator[_Row], wanted: _Names) -> _Table:
    """Read one row a position."""
    time, unit = _time_column(file, header)
    columns = _by_name(file, header, {*special.values(), time}, wanted)
    found = tuple(header[1][index] for index in columns)
    values: list[Tensor] = []
    labels: list[str] = []
    times: list[tuple[Sequence[int], list[float]]] = []
    first_lines: dict[str, int] = {}
    last = 0
    for name, group in groupby(rows, key=lambda row: row[1][special["series"]].strip()):
        lines, table = zip(*group, strict=True)
        start = lines[0]
        if not name:
            raise file.wrong(start, "the cell of 'series'", "name the series", "nothing", "write its name in each row")
        if name in first_lines:
            rule = f"stand with the others of series {_short(name)}, which begins in line {first_lines[name]}"
            raise file.wrong(start, "the row", rule, f"another series in line {last}", "sort the rows by series")
        first_lines[name], last = start, lines[-1]
        if "label" in special:
            labels.append(_one_label(file, lines, [cells[special["label"]] for cells in table]))
        if time is not None:
            cells = [cells[time] for cells in table]
            times.append((lines, _floats(file, cells, _csv_place(lines, [header[1][time]]))))
        # One call for all rows: calling for each takes three times as long.
        cells = [cells[column] for cells in table for column in columns]
        flat = torch.tensor(_floats(file, cells, _csv_place(lines, found)), dtype=torch.float32)
        values.append(flat.view(len(lines), len(columns)))
    interval = _interval(file, times)
    known = (interval, unit) if interval else (1.0, "step")
    told = labels if "label" in special else None
    return _Table(values, list(first_lines.values()), told, tuple(first_lines), found, None, *known)


def _csv_place(lines: Sequence[int], names: Sequence[str]) -> Callable[[int], tuple[int, str]]:
    return lambda index: (lines[index // len(names)], f"column {_short(names[index % len(names)])}")


def _time_column(file: _File, header: _Row) -> tuple[int | None, str]:
    """Return the column of the time, if there is one, and its unit."""
    line, names = header
    like = [index for index, name in enumerate(names) if _LIKE_TIME.fullmatch(name)]
    if not like:
        return None, "step"
    match = _TIME.fullmatch(names[like[0]])
    if match is None or len(like) > 1:
        cure = "rename it or the others; a time that is a channel needs another name"
        got = _listed([names[index] for index in like])
        raise file.wrong(line, "the column of the time", "be one, named time or time (UNIT)", got, cure)
    return like[0], match[1] or "time"


def _by_name(file: _File, header: _Row, special: set[int | None], channel_names: _Names) -> list[int]:
    """Return the columns of the channels in the order asked for."""
    line, names = header
    found = {name: index for index, name in enumerate(names) if index not in special}
    if not found:
        raise file.wrong(line, "the header", "name at least one channel", "none", f"write {_FORMS}")
    if channel_names is None:
        return list(found.values())
    if set(found) != set(channel_names):
        missing = [name for name in channel_names if name not in found]
        more = [name for name in found if name not in channel_names]
        got = "; ".join(f"{word}: {_listed(which)}" for word, which in (("missing", missing), ("more", more)) if which)
        rule = f"have the channels {_listed(channel_names)}"
        raise file.wrong(line, "the header", rule, f"{_listed(list(found))}; {got}", "rename, add or delete columns")
    return [found[name] for name in channel_names]


def _one_label(file: _File, lines: Sequence[int], cells: Sequence[str]) -> str:
    """Return the label that each row of a series has."""
    label = cells[0].strip()
    for line, cell in zip(lines, cells, strict=True):
        if (other := cell.strip()) != label or not other:
            rule = f"be {_short(label)}, as in line {lines[0]}" if label else "be the class of the series"
            cure = "give each row of a series its one label; without labels, drop the column"
            raise file.wrong(line, "the label", rule, _short(other), cure)
    return label


def _interval(file: _File, times: list[tuple[Sequence[int], list[float]]]) -> float | None:
    """Return the step of the time, to 6 digits, and hold that there is only one; None if no series has a step."""
    first: tuple[float, int] | None = None
    total, steps = 0.0, 0
    for lines, series in times:
        for line, (before, after) in zip(lines[1:], pairwise(series), strict=True):
            step = after - before
            if step <= 0:
                cure = "sort the rows of each series by time"
                raise file.wrong(line, "the time", f"be above {before:.12g}, the row before", f"{after:.12g}", cure)
            first = first or (step, line)
            if abs(step - first[0]) > 1e-3 * first[0]:
                rule = f"be {first[0]:.6g} after the row before, as in line {first[1]}"
                raise file.wrong(line, "the time", rule, f"{step:.6g}", "resample to even steps, or drop the column")
            total += step
            steps += 1
    return float(f"{total / steps:.6g}") if steps else None


def _read_wide(file: _File, header: _Row, label: int | None, rows: Iterator[_Row]) -> _Table:
    """Read one row a series of one channel."""
    columns = [index for index in range(len(header[1])) if index != label]
    names = [header[1][index] for index in columns]
    _check_numbered(file, header[0], names)
    values: list[Tensor] = []
    lines: list[int] = []
    labels: list[str] = []
    for at, row in rows:
        if label is not None:
            labels.append(_one_label(file, [at], [row[label]]))
        cells = [row[index] for index in columns]
        while cells and not cells[-1].strip():
            cells.pop()
        if not cells:
            raise file.wrong(at, "the series", "hold at least one value", "none", "write its values or delete the row")
        values.append(torch.tensor(_floats(file, cells, _csv_place([at], names)), dtype=torch.float32)[:, None])
        lines.append(at)
    return _Table(values, lines, None if label is None else labels)


def _check_numbered(file: _File, line: int, names: list[str]) -> None:
    """Hold that the columns are PREFIX0, PREFIX1 and so on, or begin with PREFIX1."""
    start: tuple[str, int] | None = None
    for index, name in enumerate(names or ["nothing else"]):
        match = re.fullmatch("(.*?)([0-9]{1,18})", name, re.DOTALL)
        part = (match[1], int(match[2]) - index) if match else ("", -1)  # the same for all
        start = start or part
        if part != start or part[1] not in (0, 1):
            rule = "have a column `series`, or, besides `label`, only columns numbered on from 0 or 1 with one prefix"
            raise file.wrong(line, "the header", rule, _short(name), f"write {_FORMS}")
