"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give another name to write to, beside `path`, and move it to `path` once all of it is written.

    Until then `path` stays what it was. On any error, an interruption included, the other name is removed again. What
    was written is on the disk before it gets its name, so that a crash of the machine cannot leave half a file either.

    Args:
        path: where the file will be; its folder must exist. A link is followed, and the file keeps the permissions of
            the one it replaces. What is no file (`/dev/stdout`, a pipe) is written to as it is.

    Yields:
        The name to write to; it keeps the suffix, which some libraries read the format from.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.part{path.suffix}")
    try:
        yield part
        with part.open("rb+") as written:
            os.fsync(written.fileno())
        if path.exists():
            part.chmod(path.stat().st_mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
