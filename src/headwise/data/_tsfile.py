"""The `.ts` format of the UCR and UEA archives; its grammar stands in `timeseries.py`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise._checks import counted
from headwise.data._textfile import File, Table, floats, short, unknown_label

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


def read_ts(file: File, text: str) -> Table:
    """Read tags and series."""
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
            raise unknown_label(file, line, labels[-1], header.classes)
        numbers.append(line)
    return Table(values, numbers, None if header.classes is None else labels, class_names=header.classes)


def _ts_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines that count; only \\r and \\n end a line, as in an editor."""
    for number, line in enumerate(io.StringIO(text, newline=""), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith(("#", "%")):
            yield number, stripped


def _ts_header(file: File, lines: Iterable[tuple[int, str]]) -> _Header:
    """Read the tags up to @data."""
    known = {tag.lower(): tag for tag in _TAGS} | {"@dimension": "@dimensions"}
    tags: dict[str, tuple[int, str]] = {}
    for line, text in lines:
        word, value = [*text.split(maxsplit=1), ""][:2]
        if word.lower() in ("@relation", "@attribute"):
            raise file.wrong(line, "", "be .ts", f"an ARFF file: {short(text)}", "take the set's .ts file instead")
        if not word.startswith("@"):
            cure = "the data comes after @data; a table with a header line has the suffix .csv"
            raise file.wrong(line, "a line before @data", "be a tag (@...) or a comment (#...)", short(text), cure)
        if word.lower() not in known:
            raise file.wrong(line, "a tag", f"be one of {', '.join(_TAGS)}", short(word), "correct or delete it")
        tag = known[word.lower()]
        if tag == "@data":
            if value:
                raise file.wrong(line, "@data", "stand alone", short(text), "begin the data in the next line")
            return _checked_header(file, tags)
        first, before = tags.setdefault(tag, (line, value))
        if before != value and tag != "@problemName":
            raise file.wrong(line, tag, f"be {short(before)}, as in line {first}", short(value), "delete one of them")
    raise file.wrong(None, "", "have a line @data", "none", "write @data between the tags and the data")


def _checked_header(file: File, tags: dict[str, tuple[int, str]]) -> _Header:
    """Turn the tags into what they claim."""

    def claim(tag: str, pattern: str, rule: str) -> str:
        line, value = tags.get(tag, (0, ""))
        if line and not re.fullmatch(pattern, value.lower()):
            raise file.wrong(line, tag, rule, short(value), "correct or delete it")
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


def _ts_classes(file: File, line: int, value: str) -> tuple[str, ...] | None:
    first, *classes = value.split() or [""]
    told = first.lower()
    if told not in ("true", "false") or bool(classes) != (told == "true") or len(set(classes)) != len(classes):
        cure = "write '@classLabel true walk run', or '@classLabel false' for a file without labels"
        raise file.wrong(line, "@classLabel", "be false, or true and different classes", short(value), cure)
    return tuple(classes) or None


def _ts_values(file: File, line: int, channels: list[str], header: _Header) -> Tensor:
    """Return the (L, X) values of one line, once its sizes are those that were claimed."""
    then = "" if header.classes is None else " and then a label, with ':' between"
    _hold(file, line, len(channels), header.channels, "channel", then)
    if len(channels) < (least := 2 if header.univariate is False else 1):
        rule = f"have at least {counted(least, 'channel')}{then}"
        raise file.wrong(line, "the series", rule, len(channels), "add what is missing")
    rows = [channel.split(",") for channel in channels]
    length = len(rows[0])
    for number, (channel, row) in enumerate(zip(channels, rows, strict=True), start=1):
        if not channel.strip():
            cure = "write its values, or delete the line if the series is empty"
            raise file.wrong(line, f"channel {number}", "hold at least one value", "none", cure)
        if len(row) != length:
            cure = "cut or fill it" if header.classes else "cut or fill it; a label needs '@classLabel true ...'"
            raise file.wrong(
                line, f"channel {number}", f"hold {counted(length, 'value')}, as channel 1", len(row), cure
            )
    _hold(file, line, length, header.lengths, "value", " in each channel")
    if not header.channels:
        header.channels.append((len(rows), f"line {line}"))
    if header.equal_length and not header.lengths:
        header.lengths.append((length, f"line {line} with @equalLength"))
    cells = [cell for row in rows for cell in row]
    place = "channel {}, position {}".format
    flat = floats(file, cells, lambda index: (line, place(index // length + 1, index % length + 1)))
    return torch.tensor(flat, dtype=torch.float32).view(len(rows), length).T.contiguous()


def _hold(file: File, line: int, found: int, claims: list[tuple[int, str]], noun: str, then: str) -> None:
    for number, source in claims:
        if found != number:
            cure = "correct the series, or what the header says"
            rule = f"have {counted(number, noun)}{then}, as {source} says"
            raise file.wrong(line, "the series", rule, found, cure)
