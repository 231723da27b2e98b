"""The two forms of `.csv`, long and wide; their grammar stands in `timeseries.py`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise._checks import counted
from headwise.data._textfile import File, Names, Table, floats, listed, number_in, short
from headwise.data._time import interval, time_column

if TYPE_CHECKING:
    from _csv import Reader  # the csv module has no name for it

_FORMS = """one of two forms, told apart by a column `series`
  long, one row a position:  series,time (ms),label,acc_x,acc_y
                             walk1,0,walk,0.1,9.8
  wide, one row a series:    label,0,1,2
                             walk,0.1,0.2,0.4"""
# Names that the class often has elsewhere. `y` is one of them beside features, and a channel beside `x` or alone.
_LIKE_LABEL = re.compile(
    r"labels|class(es)?|class[\W_]*(labels?|names?|ids?)|targets?|category|categories|ground[\W_]*truth|y",
    re.IGNORECASE,
)
_SPECIAL = ("series", "label")

_Row = tuple[int, list[str]]


def read_csv(file: File, text: str, channel_names: Names) -> Table:
    """Read either form; columns named in `channel_names` are channels."""
    rows = _rows(file, csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True))
    line, cells = next(rows, (1, [""]))
    header = [cell.strip() for cell in cells]
    _check_header(file, line, header)
    columns = {name.lower(): index for index, name in enumerate(header) if name.lower() in _SPECIAL}
    if "series" in columns:
        return _read_long(file, (line, header), columns, rows, channel_names)
    return _read_wide(file, (line, header), columns.get("label"), rows)


def _rows(file: File, reader: Reader) -> Iterator[_Row]:
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
                raise file.wrong(line, "the row", f"have {counted(width, 'cell')}, as the header", len(cells), cure)
            yield line, cells
    except csv.Error as error:
        cure = "close each quote, and write a quote inside a quoted cell twice"
        raise file.wrong(following, "the row", "be valid CSV", error, cure) from error


def _check_header(file: File, line: int, header: list[str]) -> None:
    """Refuse what is no header, and names that are empty or the same."""
    shown = short(",".join(header))
    if header[0].startswith(("@", "%", "#")):
        cure = "a .ts file needs the suffix .ts; a .csv has no comments, and no ARFF file is read"
        raise file.wrong(line, "the header", "be names of columns", shown, cure)
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise file.wrong(line, "the header", "have commas between its columns", shown, "export it with the delimiter ,")
    numbered = all(name.isdigit() for name in header)
    if not numbered and all(number_in(name) is not None for name in header):
        raise file.wrong(line, "the header", "be names of columns", shown, f"write a first line, of {_FORMS}")
    if "" in header:
        cure = "name it; pandas leaves it out with to_csv(index=False)"
        raise file.wrong(line, f"the name of column {header.index('') + 1}", "not be empty", "nothing", cure)
    known: set[str] = set()
    for name in header:
        same = name.lower() if name.lower() in _SPECIAL else name
        if same in known:
            raise file.wrong(line, "each name", "stand once", f"{short(name)} again", "rename one of the columns")
        known.add(same)


def _read_long(file: File, header: _Row, special: dict[str, int], rows: Iterator[_Row], wanted: Names) -> Table:
    """Read one row a position."""
    time, unit = time_column(file, *header, wanted or ())
    columns = _by_name(file, header, {*special.values(), time}, "label" in special, wanted)
    found = tuple(header[1][index] for index in columns)
    values: list[Tensor] = []
    labels: list[str] = []
    times: list[tuple[Sequence[int], list[str]]] = []
    first_lines: dict[str, int] = {}
    last = 0
    for name, group in groupby(rows, key=lambda row: row[1][special["series"]].strip()):
        lines, table = zip(*group, strict=True)
        start = lines[0]
        if not name:
            raise file.wrong(start, "the cell of 'series'", "name the series", "nothing", "write its name in each row")
        if name in first_lines:
            rule = f"stand with the others of series {short(name)}, which begins in line {first_lines[name]}"
            cure = "sort the rows by series; if this is another recording, give it another name"
            raise file.wrong(start, "the row", rule, f"another series in line {last}", cure)
        first_lines[name], last = start, lines[-1]
        if "label" in special:
            labels.append(_one_label(file, lines, [cells[special["label"]] for cells in table]))
        if time is not None:
            cells = [cells[time].strip() for cells in table]
            floats(file, cells, _csv_place(lines, [header[1][time]]))  # each is a finite number
            times.append((lines, cells))
        # One call for all rows: calling for each takes three times as long.
        cells = [cells[column] for cells in table for column in columns]
        flat = torch.tensor(floats(file, cells, _csv_place(lines, found)), dtype=torch.float32)
        values.append(flat.view(len(lines), len(columns)))
    step = interval(file, times)
    known = (step, unit) if step else (1.0, "step")
    told = labels if "label" in special else None
    return Table(values, list(first_lines.values()), told, tuple(first_lines), found, None, *known)


def _csv_place(lines: Sequence[int], names: Sequence[str]) -> Callable[[int], tuple[int, str]]:
    return lambda index: (lines[index // len(names)], f"column {short(names[index % len(names)])}")


def _by_name(file: File, header: _Row, special: set[int | None], labelled: bool, channel_names: Names) -> list[int]:
    """Return the columns of the channels in the order asked for; `special` are the others."""
    line, names = header
    found = {name: index for index, name in enumerate(names) if index not in special}
    if not found:
        raise file.wrong(line, "the header", "name at least one channel", "none", f"write {_FORMS}")
    if not labelled:
        like = [name for name in found if _LIKE_LABEL.fullmatch(name) and name not in (channel_names or ())]
        if len(found) == 1 or not {"x", "X"}.isdisjoint(found):
            like = [name for name in like if name.lower() != "y"]
        if like:
            raise _like_label(file, line, like)
    if channel_names is None:
        return list(found.values())
    if set(found) != set(channel_names):
        missing = [name for name in channel_names if name not in found]
        more = [name for name in found if name not in channel_names]
        got = "; ".join(f"{word}: {listed(which)}" for word, which in (("missing", missing), ("more", more)) if which)
        rule = f"have the channels {listed(channel_names)}"
        raise file.wrong(line, "the header", rule, f"{listed(list(found))}; {got}", "rename, add or delete columns")
    return [found[name] for name in channel_names]


def _like_label(file: File, line: int, names: Sequence[str]) -> ValueError:
    cure = "name it label or delete it; if it is a channel, give it another word"
    return file.wrong(line, "the column of the class", "be named label", listed(names), cure)


def _one_label(file: File, lines: Sequence[int], cells: Sequence[str]) -> str:
    """Return the label that each row of a series has."""
    label = cells[0].strip()
    for line, cell in zip(lines, cells, strict=True):
        if (other := cell.strip()) != label or not other:
            rule = f"be {short(label)}, as in line {lines[0]}" if label else "be the class of the series"
            cure = "give each row of a series its one label; without labels, drop the column"
            raise file.wrong(line, "the label", rule, short(other), cure)
    return label


def _read_wide(file: File, header: _Row, label: int | None, rows: Iterator[_Row]) -> Table:
    """Read one row a series of one channel."""
    columns = [index for index in range(len(header[1])) if index != label]
    names = [header[1][index] for index in columns]
    others = [name for name in names if not re.search("[0-9]$", name)]
    if label is None and len(others) == 1 and _LIKE_LABEL.fullmatch(others[0]):
        raise _like_label(file, header[0], others)
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
        values.append(torch.tensor(floats(file, cells, _csv_place([at], names)), dtype=torch.float32)[:, None])
        lines.append(at)
    return Table(values, lines, None if label is None else labels)


def _check_numbered(file: File, line: int, names: list[str]) -> None:
    """Hold that the columns are PREFIX0, PREFIX1 and so on, or begin with PREFIX1."""
    start: tuple[str, int] | None = None
    for index, name in enumerate(names or ["nothing else"]):
        match = re.fullmatch("(.*?)([0-9]{1,18})", name, re.DOTALL)
        part = (match[1], int(match[2]) - index) if match else ("", -1)  # the same for all
        start = start or part
        if part != start or part[1] not in (0, 1):
            rule = "have a column `series`, or, besides `label`, only columns numbered on from 0 or 1 with one prefix"
            raise file.wrong(line, "the header", rule, short(name), f"write {_FORMS}")
