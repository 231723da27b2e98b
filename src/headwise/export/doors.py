"""Arguments that both exporters take, checked before any work."""

from __future__ import annotations

import os
from pathlib import Path

from headwise._checks import invalid, is_number

_LONGEST = 255 - len("..12345678.part")  # bytes of a name: while it is written, the file has a longer one


class NotWrittenError(RuntimeError):
    """A file that does not do what the model does was not written; what stood there before still does."""


def target_of(function: str, path: object, for_instance: str) -> Path:
    """The path of a file that can be written.

    Raises:
        ValueError: no path, one that no file can have, a folder, or in a folder that does not exist.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise invalid(function, "path", "be the path of a file", repr(path))
    text = os.fsdecode(path)
    target = Path(text)
    if "\0" in text or not _is_utf8(text):
        raise invalid(function, "path", "be a path that a file can have", repr(path))
    try:
        if target.is_dir() or text.endswith((os.sep, os.altsep or os.sep)):
            rule = f"be the path of a file, {for_instance} for instance"
            raise invalid(function, "path", rule, f"the folder {text}")
        if not target.parent.is_dir():
            raise invalid(function, "path", "lie in a folder that exists; make it first", str(target))
        if target.is_symlink():
            target.resolve(strict=target.exists())
        elif len(os.fsencode(target.name)) > _LONGEST:
            raise invalid(function, "path", f"have a name of at most {_LONGEST} bytes", f"{target.name[:20]}...")
    except (OSError, RuntimeError) as error:  # a loop of links, a folder's name that is too long
        raise invalid(function, "path", "be a path that a file can have", str(error)) from error
    return target


def broken(function: str, target: Path, why: str) -> NotWrittenError:
    """The error for a file that does not do what the model does; to be raised while the file has no name yet."""
    return NotWrittenError(f"{function}: {target} was not written: {why}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_tolerance(function: str, tolerance: object) -> None:
    """Hold that it is a share of an output, or None.

    Raises:
        ValueError: it is not.
    """
    if tolerance is not None and not (is_number(tolerance) and 0 < tolerance < 1):
        raise invalid(function, "tolerance", "be above 0 and below 1, or None", repr(tolerance))
