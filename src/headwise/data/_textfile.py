"""What the readers of text files share: the file and its errors, numbers in cells, and the table that a reader returns.

Axis letters: L positions, X channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headwise._checks import invalid

Names = tuple[str, ...] | None


class Table(NamedTuple):
    """What both readers return."""

    values: list[Tensor]
    lines: list[int]  # where each series begins
    labels: list[str] | None
    names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()  # empty where the file has no names for them
    class_names: tuple[str, ...] | None = None  # None where the file does not say which there are
    interval: float = 1.0
    unit: str = "step"


class File(NamedTuple):
    """The file under its caller's name, for errors."""

    name: str

    def wrong(self, line: int | None, what: str, rule: str, got: object, cure: str) -> ValueError:
        """Build the error `read_series: NAME, line LINE: WHAT must RULE; got GOT (cure: CURE)`."""
        place = self.name if line is None else f"{self.name}, line {line}"
        return invalid("read_series", f"{place}: {what}" if what else place, rule, f"{got} (cure: {cure})")


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


def text_of(file: File) -> str:
    """Read the file, which must be text."""
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


def short(text: str) -> str:
    """Quote a piece of the file, but not a whole line of garbage."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def listed(names: Sequence[str]) -> str:
    """Quote the first of many names."""
    shown = ", ".join(short(name) for name in names[:20])
    return shown if len(names) <= 20 else f"{shown}, ... ({len(names)} in all)"


def unknown_label(file: File, line: int, label: str, class_names: Sequence[str]) -> ValueError:
    """Build the error for a label that is none of the classes, perhaps by its spelling only."""
    same = [name for name in class_names if number_in(label) is not None and number_in(name) == number_in(label)]
    cure = "correct the label or the list of classes" if not same else f"write it {same[0]!r}: labels are text"
    return file.wrong(line, "the label", f"be one of {listed(class_names)}", short(label), cure)


def number_in(cell: str) -> float | None:
    """Return the value, or None: `float` also takes 1_000, nan, infinity and the digits of other scripts."""
    text = cell.strip()
    try:
        value = float(text)
    except ValueError:
        return None
    return value if "_" not in text and text.isascii() and abs(value) < _TOO_GREAT else None


def floats(file: File, cells: Sequence[str], place: Callable[[int], tuple[int, str]]) -> list[float]:
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
        if (value := number_in(cell)) is None:
            cure = next(cure for pattern, cure in _CURES if re.fullmatch(pattern, cell.strip(), re.DOTALL))
            raise file.wrong(*place(index), "hold a finite number", short(cell), cure)
        values.append(value)
    return values
