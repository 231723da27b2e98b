"""headwise._files: a file appears whole or not at all."""

from __future__ import annotations

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
