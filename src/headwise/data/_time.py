"""The time of a long `.csv`: which column it is, and the one step that all its stamps are apart.

Stamps are compared as the decimal numbers that they are: nanoseconds since 1970 have more digits than float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation, localcontext
from itertools import pairwise
from typing import NamedTuple

from headwise.data._textfile import File, listed, short

_NAMED = re.compile(r"time(?:\s*\(([^()]*)\))?", re.IGNORECASE)
_UNIT = (
    "s|secs?|seconds|ms|msecs?|millis|milliseconds|us|µs|usecs?|micros|microseconds|ns|nsecs?|nanos|nanoseconds"
    "|minutes|hours"
)
# `time_x` and `date_y` too: that is what pandas makes of such columns when it merges two tables.
_LIKE_TIME = re.compile(
    r"(time|times|timestamps?|dates?|datetimes?)([^a-z].*)?"
    rf"|(time|t|clock|epoch|elapsed|(elapsed|epoch|unix|utc|gps|local|system)[\W_]?time)[\W_]{{0,2}}({_UNIT})?\W?"
    rf"|(?!(s|us|µs|ns)$)({_UNIT})",
    re.IGNORECASE | re.DOTALL,
)
_DIGITS = 100
_EXACT = Context(prec=_DIGITS, Emin=-200, traps=[Inexact, InvalidOperation])  # to what float64 can tell from 0


def time_column(file: File, line: int, header: Sequence[str], channels: Sequence[str]) -> tuple[int | None, str]:
    """Return the column of the time, if there is one, and its unit; what `channels` names is a channel."""
    units = {
        index: _unit(name)
        for index, name in enumerate(header)
        if _unit(name) or (_LIKE_TIME.fullmatch(name) and name not in channels)
    }
    if not units:
        return None, "step"
    (column, unit), *others = units.items()
    if unit is None or others:
        cure = "give that name to the time and to nothing else; one that is a channel needs another word"
        got = listed([header[index] for index in units])
        raise file.wrong(line, "the column of the time", "be one, named time or time (UNIT)", got, cure)
    return column, unit


def _unit(name: str) -> str | None:
    """Return UNIT of `time (UNIT)`, "time" of `time`, None of another name."""
    match = _NAMED.fullmatch(name)
    if match is None or match[1] is None:
        return "time" if match else None
    return match[1].strip() or None


class _Series(NamedTuple):
    """The times of one series: line and stamp of each row, as they stand in the file, and the exact steps between."""

    lines: Sequence[int]
    stamps: Sequence[str]
    sizes: list[Decimal]


def interval(file: File, times: Sequence[tuple[Sequence[int], Sequence[str]]]) -> float | None:
    """Return the mean step of the time to 6 digits; None if no series has a step.

    A step is as good as the mean if it differs by no more than 1 in 1000, or than the rounding of two stamps explains:
    half a unit each, of the last digit that is written. Two more rules keep that from hiding what is no rounding: no
    step is twice another, and no series is 1 in 100 slower or faster than all together, unless that is rounding too.

    Args:
        file: where it all stands.
        times: of each series the lines and the stamps, which are finite numbers without blanks.
    """
    series = [_Series(lines, stamps, _sizes(file, lines, stamps)) for lines, stamps in times if len(lines) > 1]
    sizes = [size for one in series for size in one.sizes]
    if not sizes:
        return None
    with localcontext(Context(prec=_DIGITS)):
        mean = sum(sizes, Decimal()) / len(sizes)
        if max(max(sizes) - mean, mean - min(sizes)) > mean / 1000:
            _hold_rounded(file, series, sizes, mean)
        return float(f"{mean:.6g}")


def _sizes(file: File, lines: Sequence[int], stamps: Sequence[str]) -> list[Decimal]:
    """Return the exact steps of one series, each above 0."""
    try:
        exact = list(map(_EXACT.create_decimal, stamps))
        sizes = list(map(_EXACT.subtract, exact[1:], exact))
    except ArithmeticError:
        sizes = []
    if sizes and min(sizes) > 0:
        return sizes
    for line, (before, after) in zip(lines[1:], pairwise(stamps), strict=True):
        try:
            size = _EXACT.subtract(_EXACT.create_decimal(after), _EXACT.create_decimal(before))
        except ArithmeticError as error:
            rule = f"differ from the row before by a number of at most {_DIGITS} digits"
            got = f"{_bare(after)} after {_bare(before)}"
            raise file.wrong(line, "the time", rule, got, "write fewer digits") from error
        if size <= 0:
            cure = "sort the rows of each series by time" if size else "delete the row, or write the time more exactly"
            raise file.wrong(line, "the time", f"be above {_bare(before)}, the row before", _bare(after), cure)
    return []


def _hold_rounded(file: File, series: Sequence[_Series], sizes: Sequence[Decimal], mean: Decimal) -> None:
    """Refuse steps that are not the mean but for rounding."""
    half = _half_units({stamp for one in series for stamp in one.stamps})
    # The strictest bound is the bound of all, unless stamps have fewer digits the greater they are.
    least = max(2 * min(half.values()), mean / 1000)
    rounded = max(max(sizes) - mean, mean - min(sizes)) <= least or all(
        abs(size - mean) <= max(half[before] + half[after], mean / 1000)
        for one in series
        for before, after, size in zip(one.stamps, one.stamps[1:], one.sizes, strict=False)
    )
    if not rounded or max(sizes) >= 2 * min(sizes):
        raise _uneven(file, series, sizes, rounded)

    for one in series:
        first, last, count = one.stamps[0], one.stamps[-1], len(one.sizes)
        rounding = half[first] + half[last]
        own = sum(one.sizes, Decimal()) / count
        # The mean of the file is as rounded as its series are long.
        if abs(own - mean) > max(rounding / count + rounding * len(series) / len(sizes), mean / 100):
            rule = f"rise by about {mean:.6g} a row in each series, as in all together"
            got = f"{own:.6g}, from {_bare(first)} to {_bare(last)}"
            cure = "resample all series to the same step, or drop the column"
            raise file.wrong(one.lines[-1], "the time", rule, got, cure)


def _uneven(file: File, series: Sequence[_Series], sizes: Sequence[Decimal], rounded: bool) -> ValueError:
    """Build the error for the step that is furthest from the median."""
    median = sorted(sizes)[(len(sizes) - 1) // 2]
    far = max(abs(size - median) for size in sizes)
    places = [(one, at) for one in series for at in range(len(one.sizes))]  # of the steps, as in `sizes`
    usual, at_usual = next(place for place, size in zip(places, sizes, strict=True) if size == median)
    worst, at = next(place for place, size in zip(places, sizes, strict=True) if abs(size - median) == far)
    cure = "resample to even steps, split the series at a gap, or drop the column"
    if rounded:
        cure = f"write the time with more digits: with these, a gap looks like a rounded step; or {cure}"
    rule = f"rise by about {_bare(str(median))} a row, as in line {usual.lines[at_usual + 1]}"
    got = f"{_bare(str(worst.sizes[at]))}, from {_bare(worst.stamps[at])} to {_bare(worst.stamps[at + 1])}"
    return file.wrong(worst.lines[at + 1], "the time", rule, got, cure)


def _half_units(stamps: set[str]) -> dict[str, Decimal]:
    """Return by how much each stamp may be rounded.

    Trailing zeros may be left out, so that one stamp does not tell: all have as many decimals as the one with the most,
    or as many digits, where that is coarser, as the one with the most of these.
    """
    numbers = {stamp: _EXACT.create_decimal(stamp) for stamp in stamps}
    ends = {stamp: int(number.as_tuple().exponent) for stamp, number in numbers.items()}
    finest = min(ends.values())
    digits = max(number.adjusted() - ends[stamp] for stamp, number in numbers.items())
    return {stamp: Decimal(5).scaleb(max(finest, number.adjusted() - digits) - 1) for stamp, number in numbers.items()}


def _bare(number: str) -> str:
    """Show a number as it stands in the file, but not a whole line of digits."""
    return short(number)[1:-1]
