"""Labelled series read from the two kinds of text file that they come in: `.ts` and `.csv`.

Whatever the file claims is held against what it holds: a wrong file is an error that names its line, never a `Series`
that is silently something else. The grammar, with `[ ]` for what may be left out and `...` for more of the same:

    .ts    tags, then @data, then one line a series; `#` or `%` begins a comment line, tags are matched in any case
           tag     @problemName TEXT | @timeStamps false | @missing BOOL | @univariate BOOL | @dimensions COUNT
                   | @equalLength BOOL | @seriesLength COUNT | @targetLabel false | @classLabel false
                   | @classLabel true CLASS CLASS ...
           line    CHANNEL[:CHANNEL ...][:CLASS]      CHANNEL is VALUE[,VALUE ...]; a CLASS with @classLabel true

    .csv   a header, then rows of as many cells; commas between, `"` around cells that need it
           long    the header has a column `series`; also `time` or `time (UNIT)`, and `label`; all others are
                   channels, but not with a name that says time or class
           wide    it has none; `label`, and columns numbered from 0 or 1, all with the same prefix or none

Axis letters: L positions, X channels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from headwise._checks import counted, invalid
from headwise.data._csvfile import read_csv
from headwise.data._textfile import File, Names, Table, listed, number_in, short, text_of, unknown_label
from headwise.data._tsfile import read_ts
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
    `label` are matched in any case. A column that by its name is likely the time or the class under another name
    (`t`, `date`, `time_ms`; without a `label` also `class`, `target`) is refused, unless `channel_names` has it.
    Values are rounded to float32. Blanks around cells and labels are dropped; a label is text otherwise, so that "1"
    and "1.0" are two classes. Nothing is filled in, resampled or guessed.

    `time` counts up in even steps, the same for all series. Rounded stamps are taken (0.017, 0.033, 0.050): a step may
    differ from the mean of the file by one unit of the last digit written, or by one in a thousand. Where that is so
    coarse that one step is twice another, it could as well be a gap, and is refused; so is a series whose own mean is
    one in a hundred off.

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
        and so on. `interval`, the mean step to 6 digits, and `unit` are those of the column `time (UNIT)`; the unit of
        a plain `time` is "time".
        Without that column, or with no series of two positions to tell it, the interval is 1 "step". Without labels,
        `labels` is None and `class_names` empty, as `Series` has it.

    Raises:
        ValueError: `path` is no text, the file cannot be read, is of another kind, breaks the grammar or its own
            claims, holds timestamps in `.ts`, targets of a regression, a missing, infinite or too great value, a
            series without values, or does not fit `class_names` or `channel_names`. The message names file, line and
            cure.

    Cost: linear in the file, which is held in memory; two to three seconds for 10 MB.

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
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise invalid("read_series", "path", "be text or a path of text, such as a pathlib.Path", repr(path))
    file = File(name)
    suffix = Path(file.name).suffix.lower()
    if suffix not in (".ts", ".csv"):
        cure = "convert it, or rename it if it is one of the two"
        raise file.wrong(None, "", "have the suffix .ts or .csv", short(suffix or "no suffix"), cure)
    text = text_of(file)
    table = read_ts(file, text) if suffix == ".ts" else read_csv(file, text, channels)
    return _finish(file, table, classes, channels)


def _given(argument: str, names: Sequence[str] | None) -> Names:
    if names is None:
        return None
    texts = not isinstance(names, str) and all(isinstance(name, str) for name in names)
    if not texts or not names or len(set(names)) != len(names):
        raise invalid("read_series", argument, "be at least one text, no two the same; or None", repr(names))
    return tuple(names)


def _finish(file: File, table: Table, class_names: Names, channel_names: Names) -> Series:
    """Count the classes, compare with what the caller knows, and make the `Series`."""
    if not table.values:
        raise file.wrong(None, "", "hold at least one series", "none", "add the data after the header")
    found = table.values[0].shape[1]
    if channel_names is not None and found != len(channel_names):
        rule = f"hold {counted(len(channel_names), 'channel')}, as channel_names: {listed(channel_names)}"
        raise file.wrong(None, "", rule, found, "give the channels that these names belong to")
    if table.labels is None:
        labels, class_names = None, ()
    else:
        class_names = class_names or table.class_names or _in_order(set(table.labels))
        index = {name: number for number, name in enumerate(class_names)}
        for line, label in zip(table.lines, table.labels, strict=True):
            if label not in index:
                raise unknown_label(file, line, label, class_names)
        labels = torch.tensor([index[label] for label in table.labels])
    channel_names = channel_names or table.channel_names
    return Series(table.values, labels, class_names, channel_names, table.names, table.interval, table.unit)


def _in_order(labels: set[str]) -> tuple[str, ...]:
    numbers = {label: number_in(label) for label in labels}
    if None in numbers.values():
        return tuple(sorted(labels))
    return tuple(sorted(labels, key=lambda label: (numbers[label], label)))
