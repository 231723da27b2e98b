"""`headwise demo` from data to pictures: learns real speech as promised, saves it, leaves nothing half done."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image

import headwise
from headwise import pipelines
from headwise.data.samples import japanese_vowels, pad
from headwise.pipelines import classify, shared

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-W", "error", "-c", "from headwise.cli import main; main()", "demo"]


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_demo_command_learns_real_speech(tmp_path: Path) -> None:
    """The whole command, in its own process."""
    folder = tmp_path / "new" / "out"
    done = subprocess.run(
        [*COMMAND, "--json", "--output", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # about 15 s of work; a busy machine is no failure
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    scores = report["evaluation"]
    assert scores["accuracy"] >= 0.97
    assert scores["num_series"] == 370
    assert scores["majority"] == 88 / 370
    assert [score["name"] for score in scores["classes"]] == list("123456789")
    assert [score["num_series"] for score in scores["classes"]] == [31, 35, 88, 44, 29, 24, 40, 50, 29]
    assert sum(score["num_right"] for score in scores["classes"]) == round(scores["accuracy"] * 370)
    assert report["tested_on"] == "the official test split"
    assert report["seed"] == 0
    assert 50_000 < report["parameters"] < 200_000
    assert report["seconds"] > 0
    assert {str(Path(file).relative_to(folder)) for file in report["files"]} == names_in(folder)
    assert {name for name in names_in(folder) if "weights" not in name} == {
        "model/config.json",
        "model/report.json",
        "attention.png",
        "attention.html",
    }
    seen = report["attention"]
    assert [layer["name"] for layer in seen["layers"]] == [f"encoder.layers.{at}.self_attn" for at in range(2)]
    assert seen["forwards"] == 370
    for layer in seen["layers"]:
        assert layer["observed"] == 370
        assert layer["rows"] == sum(map(len, japanese_vowels()[1].values))
        assert len(layer["heads"]) == 4
        for head in layer["heads"]:
            assert 0 < head["entropy_ratio"] < 1 < head["effective_keys"] < 29
    # The saved model is the one that was tested.
    model, (_, test) = headwise.load(folder / "model"), japanese_vowels()
    assert test.labels is not None
    with torch.inference_mode():
        num_right = int((model(*pad(test.values)).argmax(-1) == test.labels).sum())
    assert abs(num_right - scores["accuracy"] * 370) <= 1  # another batch rounds differently
    assert image.imread(folder / "attention.png").ndim == 3
    assert (folder / "attention.html").read_text("utf-8").count("Attention in series") == 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_demo_learns_from_other_seeds_as_well(seed: int, tmp_path: Path) -> None:
    assert pipelines.demo(tmp_path, seed=seed).evaluation.accuracy >= 0.97


@pytest.mark.slow
def test_demo_repeats_itself_and_keeps_global_state(tmp_path: Path) -> None:
    seen: list[list[pipelines.Progress]] = []
    results = []
    torch.set_num_threads(3)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        torch.manual_seed(len(seen))
        state = torch.get_rng_state()
        epochs: list[pipelines.Progress] = []
        results.append(pipelines.demo(tmp_path / name, seed=seed, epochs=2, progress=epochs.append))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == 3
        seen.append(epochs)
    assert [(now.epoch, now.epochs) for now in seen[0]] == [(1, 2), (2, 2)]
    assert seen[0] == seen[1] != seen[2]
    assert results[0].evaluation == results[1].evaluation
    files = [
        {path.name: path.read_bytes() for path in result.files if path.name != "report.json"}  # which has the seconds
        for result in results
    ]
    assert files[0] == files[1]
    for name in ("attention.png", "attention.html"):
        assert files[0][name] != files[2][name]


def test_demo_model_does_not_see_padding(tmp_path: Path) -> None:
    pipelines.demo(tmp_path, epochs=1)
    model, (_, test) = headwise.load(tmp_path / "model"), japanese_vowels()
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


def test_demo_says_when_the_loaded_model_disagrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(directory: Path) -> torch.nn.Module:
        model = headwise.load(directory)
        model.head.bias.data[3] += 1e-6
        return model

    monkeypatch.setattr(shared, "load", other)
    with pytest.raises(RuntimeError, match="gives other logits"):
        pipelines.demo(tmp_path, epochs=1)


def test_demo_interrupted_while_drawing_keeps_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention.png").write_bytes(b"the last run's")
    write_bytes = Path.write_bytes

    def interrupted(self: Path, content: bytes) -> int:
        write_bytes(self, content[:10])
        if "attention" in self.name:
            raise KeyboardInterrupt
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipelines.demo(tmp_path, epochs=1)
    assert (tmp_path / "attention.png").read_bytes() == b"the last run's"
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_interrupted_command_leaves_no_model(tmp_path: Path) -> None:
    """Ctrl-C in the middle of training: code 130, one line, and no folder that was not there before."""
    folder = tmp_path / "new" / "out"
    process = subprocess.Popen(
        [*COMMAND, "--output", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(1_000):
            if folder.exists():  # made before the first epoch
                break
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.rstrip().endswith("headwise: interrupted")
    assert list(tmp_path.iterdir()) == []


def test_demo_refuses_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        pytest.fail("trained")

    monkeypatch.setattr(classify, "SequenceClassifier", never)
    (tmp_path / "file").write_bytes(b"")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"^demo: output must be a folder that can be made; got .*file"):
            pipelines.demo(output)
    with pytest.raises(ValueError, match=r"^demo: seed must lie in \[0, 2\*\*63\); got -1"):
        pipelines.demo(tmp_path, seed=-1)
    with pytest.raises(ValueError, match=r"^demo: epochs must be at least 1; got 0"):
        pipelines.demo(tmp_path, epochs=0)
    for module, extra in (("matplotlib", "observe"), ("safetensors.torch", "models")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=rf"headwise\[{extra}\]"):
                pipelines.demo(tmp_path)
