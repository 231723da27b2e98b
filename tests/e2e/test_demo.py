"""`headwise demo` from data to picture: learns real speech as promised, draws it, and leaves nothing half done."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import figure, image

from headwise import pipelines
from headwise.data.samples import japanese_vowels, pad

pytestmark = pytest.mark.e2e


def test_demo_command_learns_real_speech(tmp_path: Path) -> None:
    """The whole command, in its own process."""
    folder = tmp_path / "new" / "out"
    command = [sys.executable, "-W", "error", "-c", "from headwise.cli import main; main()"]
    done = subprocess.run(
        [*command, "demo", "--json", "--output", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # about 10 s of work; a busy machine is no failure
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["test_accuracy"] >= 0.95
    assert report["test_accuracy"] * 370 == pytest.approx(round(report["test_accuracy"] * 370), abs=1e-6)
    assert report["seed"] == 0
    assert 50_000 < report["parameters"] < 200_000
    assert report["seconds"] > 0
    (path,) = folder.iterdir()
    assert report["files"] == [str(path)]
    assert path.name == "attention.png"
    assert image.imread(path).ndim == 3


def test_demo_draws_every_head(tmp_path: Path) -> None:
    result = pipelines.demo(tmp_path, epochs=1)
    assert result.files == tuple(tmp_path.iterdir())
    pixels = torch.from_numpy(image.imread(result.files[0]))[..., :3]
    height, width, _ = pixels.shape
    assert height >= 800
    assert width >= 1200
    # Not blank, in each of the three rows and four columns of panels: many colours, none of them everywhere.
    for band in pixels[60 : height - 60].chunk(3, dim=0):
        for panel in band[:, 90 : width - 90].chunk(4, dim=1):
            colors, counts = panel.reshape(-1, 3).unique(dim=0, return_counts=True)
            assert len(colors) > 50
            assert counts.max() < 0.95 * counts.sum()


def test_demo_model_does_not_see_padding() -> None:
    train, test = japanese_vowels()
    model = pipelines._Classifier(train).eval()
    some = test.values[:11]
    assert len({len(value_LX) for value_LX in some}) > 3
    with torch.inference_mode():
        together_BY, weights = model(*pad(some), need_weights=True)
        for index, value_LX in enumerate(some):
            alone_BY, alone_weights = model(*pad([value_LX]), need_weights=True)
            torch.testing.assert_close(together_BY[index], alone_BY[0])
            for weights_BHLS, alone_BHLS in zip(weights, alone_weights, strict=True):
                real_HLS = weights_BHLS[index, :, : len(value_LX), : len(value_LX)]
                torch.testing.assert_close(real_HLS, alone_BHLS[0])


def test_demo_repeats_itself_and_keeps_global_state(tmp_path: Path) -> None:
    seen: list[list[tuple[int, int, float]]] = []
    pictures = []
    torch.set_num_threads(3)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        torch.manual_seed(len(seen))
        state = torch.get_rng_state()
        epochs: list[tuple[int, int, float]] = []
        result = pipelines.demo(tmp_path / name, seed=seed, epochs=2, progress=lambda *args, to=epochs: to.append(args))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == 3
        seen.append([*epochs, (0, 0, result.test_accuracy)])
        pictures.append(hashlib.sha256(result.files[0].read_bytes()).hexdigest())
    assert [row[:2] for row in seen[0]] == [(1, 2), (2, 2), (0, 0)]
    assert seen[0] == seen[1] != seen[2]
    assert pictures[0] == pictures[1] != pictures[2]


def test_demo_interrupted_while_drawing_keeps_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention.png").write_bytes(b"the last run's")

    def savefig(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    with pytest.raises(KeyboardInterrupt):
        pipelines.demo(tmp_path, epochs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["attention.png"]
    assert (tmp_path / "attention.png").read_bytes() == b"the last run's"


def test_demo_refuses_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        pytest.fail("trained")

    monkeypatch.setattr(pipelines, "_fit", never)
    (tmp_path / "file").write_bytes(b"")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"^demo: output must be a folder that can be made; got .*file"):
            pipelines.demo(output)
    with pytest.raises(ValueError, match=r"^demo: seed must lie in \[0, 2\*\*63\); got -1"):
        pipelines.demo(tmp_path, seed=-1)
    with pytest.raises(ValueError, match=r"^demo: epochs must be at least 1; got 0"):
        pipelines.demo(tmp_path, epochs=0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"headwise\[observe\]"):
        pipelines.demo(tmp_path)
