"""headwise._files: a file appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise._files import whole


def test_whole_replaces_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    with whole(path) as part:
        assert part.suffix == ".png"
        assert part.parent == tmp_path
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_whole_leaves_nothing_behind(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")

    def write() -> None:
        with whole(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_whole_without_anything_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole(tmp_path / "a.txt"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_whole_follows_links_and_keeps_permissions(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with whole(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_whole_writes_into_what_is_no_file(tmp_path: Path) -> None:
    """A device must not be replaced by a file of its name."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole(pipe) as part:
            part.write_text("said")
        assert os.read(reader, 10) == b"said"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
