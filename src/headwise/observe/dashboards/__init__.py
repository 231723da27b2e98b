"""Files for Prometheus and Grafana beside a watched model: a dashboard, rules with their tests, settings of both."""

from __future__ import annotations

import reprlib
from contextlib import ExitStack
from importlib import resources
from os import PathLike
from pathlib import Path

from headwise._checks import invalid
from headwise._files import whole

__all__ = ["FILES", "outdated", "write"]

FILES = (
    "attention.json",
    "compose.yml",
    "prometheus.yml",
    "provisioning/dashboards/attention.yml",
    "provisioning/datasources/prometheus.yml",
    "rules.yml",
    "rules_test.yml",
)


def outdated(directory: str | PathLike[str]) -> list[Path]:
    """Those of the files in a folder that `write` would write: they are not there, or differ.

    Raises:
        ValueError: `directory` is no folder.
    """
    return [path for path, text in _texts(directory).items() if _differs(path, text) or not path.exists()]


def write(directory: str | PathLike[str], *, overwrite: bool = False) -> list[Path]:
    """Write the files into a folder: all, or on an error none.

    Args:
        directory: is made if it is not there.
        overwrite: also over files that were changed since, or are not ours.

    Returns:
        Where they are, those that were there already and are the same too.

    Raises:
        ValueError: `directory` is no folder; a file in it differs, and `overwrite` is False.
        OSError: a file cannot be written.
    """
    texts = _texts(directory)
    differ = [path for path, text in texts.items() if _differs(path, text)]
    if differ and not overwrite:
        rule = "hold no other files of these names, unless they may be overwritten (overwrite=True, --overwrite)"
        raise invalid("write", "directory", rule, ", ".join(map(str, differ)))
    with ExitStack() as moves:  # moves them to their names once the last one is written
        for path, text in texts.items():
            if path in differ or not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                moves.enter_context(whole(path)).write_bytes(text)
    return list(texts)


def _texts(directory: object) -> dict[Path, bytes]:
    """By where they belong."""
    path = directory.__fspath__() if isinstance(directory, PathLike) else directory
    if not isinstance(path, str) or not path:
        raise invalid("write", "directory", 'be the path of a folder, "." for this one', reprlib.repr(directory))
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise invalid("write", "directory", "be a folder", repr(str(folder)))
    shipped = resources.files(__name__)
    return {folder / name: shipped.joinpath(*name.split("/")).read_bytes() for name in FILES}


def _differs(path: Path, text: bytes) -> bool:
    return path.exists() and (path.is_dir() or path.read_bytes() != text)
