"""headwise.cli: what is printed where, and the exit codes; the jobs are replaced (tests/e2e runs them)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise import pipelines
from headwise.cli import main
from headwise.observe import dashboards
from headwise.observe.snapshot import HeadReading, Histogram, LayerReading, Snapshot
from headwise.pipelines import (
    ClassScore,
    Comparison,
    Evaluation,
    Exported,
    Form,
    Inspection,
    Prediction,
    Progress,
    Quantization,
    TrainResult,
)

SCORES = Evaluation(
    accuracy=0.75,
    majority=0.5,
    num_series=4,
    classes=(
        ClassScore("walk[red]", 2, 1, 0.5, 1.0),
        ClassScore("rest", 2, 2, 1.0, 2 / 3),
        ClassScore("no", 0, 0, None, None),
    ),
    confusion=((1, 1, 0), (0, 2, 0), (0, 0, 0)),
)
RESULT = TrainResult(SCORES, "the official test split", 101_513, 30, 12.34, 3, 270, (Path("some where/attention.png"),))
PREDICTIONS = [
    Prediction("gait[1]", "walk", 0.9, {"walk": 0.9, "rest": 0.1}),
    Prediction("b", "rest", 0.6, {"walk": 0.4, "rest": 0.6}),
]
NOTHING = Histogram((1.0,), (0, 0), 0.0)
HEADS = (HeadReading(0.25, 3.5, 7.0, 0.5, None, 2.0, 1.5), HeadReading(*[None] * 7))
LAYER = LayerReading(0, "encoder.0", "self", HEADS, 0.2, 4, 60, 1, 0, 5.0, NOTHING, NOTHING, NOTHING, None)
SNAPSHOT = Snapshot("M", 9.0, 4, 4, {}, {}, float("inf"), 2.0, 1.0, NOTHING, None, (LAYER,))
INSPECTION = Inspection(4, SNAPSHOT, (Path("x y/attention.html"),))
QUANTIZED = Quantization(
    "static", 13, 1, 4, 400_000, 120_000, SCORES, dataclasses.replace(SCORES, accuracy=0.5), 4, 1, "a.csv", (Path("i"),)
)


@dataclasses.dataclass
class _Report:
    path: Path = Path("m.onnx")
    error: float = 1e-7
    size_ratio: float = 0.25

    def __str__(self) -> str:
        return "m.onnx: what the exporter says"


EXPORTED = Exported("onnx", _Report(), {"class_names": ["walk"]}, 4, 1, (Path("m.onnx"),))
FORMS = (
    Form("torch", "float", 400_000, 0.004, 1.0, 2000.0, 1.0, 0.75, 0),
    Form("executorch", "int8 dynamic", 100_000, 0.001, 4.0, None, None, None, None),
)
COMPARED = Comparison(FORMS, ("onnxruntime: pip install 'headwise[onnx]'",), 4, (7, 19), 15, 1, {"processor": "P"})
JOBS: dict[str, tuple[str, list[str], Any]] = {
    "demo": ("demo", ["demo"], RESULT),
    "classify": ("train_classifier", ["train", "classify", "--data", "a.csv", "--output", "model"], RESULT),
    "evaluate": ("evaluate", ["evaluate", "model", "--data", "a.csv"], SCORES),
    "predict": ("predict", ["predict", "model", "--data", "a.csv"], PREDICTIONS),
    "inspect": ("inspect_attention", ["inspect", "model", "--data", "a.csv"], INSPECTION),
    "heatmap": ("draw_attention", ["heatmap", "model", "--data", "a.csv"], (Path("x y/attention.html"),)),
    "quantize": ("quantize_classifier", ["quantize", "model", "--output", "int8", "--data", "a.csv"], QUANTIZED),
    "export": ("export_classifier", ["export", "int8", "--output", "m.onnx", "--data", "a.csv"], EXPORTED),
    "benchmark": ("benchmark_classifier", ["benchmark", "model", "--data", "a.csv"], COMPARED),
}
Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


def _run(*argv: str) -> Any:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the jobs; returns what they were called with."""
    made: Calls = []

    def replace(name: str, result: Any) -> None:
        def job(*args: Any, **kwargs: Any) -> Any:
            if progress := kwargs.pop("progress", None):
                progress("timing" if name == "benchmark_classifier" else Progress(1, 2, 0.613, 0.5))
            made.append((name, args, kwargs))
            return result

        monkeypatch.setattr(pipelines, name, job)

    for name, _, result in JOBS.values():
        replace(name, result)
    return made


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--version") == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--help") == 0
    out = capsys.readouterr().out
    for command in (*(name for name in JOBS if name != "classify"), "train", "dashboard"):
        assert command in out
    assert _run("train", "--help") == 0
    assert "classify" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [argv[:-1] if argv[-1] == "DIR" else argv for _, argv, _ in JOBS.values()], ids=JOBS)
def test_help_of_a_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in argv[:2] if word in (*JOBS, "train")]
    assert _run(*words, "--help") == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert ("--data" in out) == (argv[0] != "demo")
    if argv[0] == "train":
        for line in ("series,label,time (ms),acc_x,acc_y", "walk-1,walk,20,0.31,-1.02"):
            assert line in out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 2
    assert "Commands" in "".join(capsys.readouterr())


def test_a_training_prints_the_result_and_what_to_do_next(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("demo", "--output", "some where", "--seed", "3") == 0
    assert calls == [("demo", (Path("some where"),), {"seed": 3})]
    out, err = capsys.readouterr()
    for expected in (
        "75.0% (3 of 4 series)",
        "50.0%, always the most frequent",
        "the official test split",
        "101,513",
        "12.3 s",
        "seed 3",
    ):
        assert expected in out
    assert "wrote         some where/attention.png\n" in out
    assert "saved model   loaded again, gives the same numbers to the bit" in out
    assert "Next: open some where/attention.html" in out
    assert "headwise train classify --data YOURS.csv" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["walk[red]", "2", "1", "50.0%", "100.0%"] in rows
    assert ["no", "0", "0", "-", "-"] in rows
    assert "1/2 epochs, accuracy in training 50.0%" in err
    assert "epochs, accuracy" not in out


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], {"test": None, "seed": 0, "epochs": None}),
        (["--test", "b.ts", "--seed", "7", "--epochs", "5"], {"test": Path("b.ts"), "seed": 7, "epochs": 5}),
    ],
)
def test_classify(more: list[str], expected: dict[str, Any], calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*JOBS["classify"][1], *more) == 0
    assert calls == [("train_classifier", (Path("a.csv"), Path("model")), expected)]
    out = capsys.readouterr().out
    assert f"headwise inspect model --data {expected['test'] or 'a.csv'} --output my-heatmaps" in out
    assert "headwise predict model --data NEW.csv" in out


def test_quantize(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*JOBS["quantize"][1], "--test", "b.ts", "--equalize", "--reduce-range") == 0
    words = {"data": Path("a.csv"), "test": Path("b.ts"), "equalize": True, "reduce_range": True}
    assert calls == [("quantize_classifier", (Path("model"), Path("int8")), words)]
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        ["int8", "13 of 14 linears (static, calibrated with 4 series)"],
        ["size", "400,000 bytes before, 120,000 now (0.30)"],
        ["accuracy", "75.0% (3 of 4 series) before, 50.0% (3 of 4 series) now"],
        ["other", "class  1 of 4 series"],
        ["measured", "on  a.csv"],
        ["wrote", "i"],
        ["headwise", "export int8 --output model.onnx"],
    ):
        assert expected in rows


def test_quantize_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = dataclasses.replace(QUANTIZED, equalized=True, weight_bits=7)
    monkeypatch.setattr(pipelines, "quantize_classifier", lambda *_, **__: found)
    assert _run(*JOBS["quantize"][1]) == 0
    out = capsys.readouterr().out
    assert "weights      7 bits\n" in out
    assert "equalized    yes, ranges of channels were evened out first\n" in out
    assert _run(*JOBS["quantize"][1], "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["equalized"], told["weight_bits"]) == (True, 7)


def test_quantize_without_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bare = {"before": None, "after": None, "measured_on": None, "num_calibration": 0, "kind": "dynamic"}
    monkeypatch.setattr(pipelines, "quantize_classifier", lambda *_, **__: dataclasses.replace(QUANTIZED, **bare))
    assert _run("quantize", "model", "--output", "int8") == 0
    out = capsys.readouterr().out
    assert "13 of 14 linears (dynamic, inputs scaled by each call)" in out
    assert "accuracy" not in out


def test_quantize_says_what_was_learnt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    learnt = dataclasses.replace(QUANTIZED, before=dataclasses.replace(SCORES, num_learnt=3))
    monkeypatch.setattr(pipelines, "quantize_classifier", lambda *_, **__: learnt)
    assert _run(*JOBS["quantize"][1]) == 0
    assert "Note: the model was trained on that file" in capsys.readouterr().out


def test_export(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("export", "int8", "--output", "m.bin", "--format", "executorch") == 0
    assert calls == [("export_classifier", (Path("int8"), Path("m.bin")), {"file_format": "executorch", "data": None})]
    out = capsys.readouterr().out
    assert "m.onnx: what the exporter says" in out
    assert "of 4 series, each alone, the file names 1 otherwise than the model" in out
    assert "wrote         m.onnx" in out


def test_benchmark(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("benchmark", "model", "--threads", "2", "--rounds", "3") == 0
    assert calls == [("benchmark_classifier", (Path("model"),), {"data": None, "threads": 2, "rounds": 3})]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["torch", "float", "400,000", "1.00", "1.00x", "4.00", "1.00x", "2,000", "75.0%", "0"] in rows
    assert ["executorch", "int8", "dynamic", "100,000", "0.25", "4.00x", "1.00", "-", "-", "-", "-"] in rows
    assert "left out: onnxruntime: pip install 'headwise[onnx]'" in out
    assert ["processor", "P"] in rows


def test_evaluate(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*JOBS["evaluate"][1]) == 0
    assert calls == [("evaluate", (Path("model"), Path("a.csv")), {})]
    out = capsys.readouterr().out
    assert "75.0% (3 of 4 series)" in out
    assert "tested on" not in out


@pytest.mark.parametrize("output", [None, "p.csv"])
def test_predict(output: str | None, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*JOBS["predict"][1], *(["--output", output] if output else [])) == 0
    assert calls == [("predict", (Path("model"), Path("a.csv"), output and Path(output)), {})]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["gait[1]", "walk", "90.0%"] in rows
    assert ["b", "rest", "60.0%"] in rows
    assert ("wrote         p.csv\n" in out) == (output is not None)


def test_evaluate_says_what_was_learnt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pipelines, "evaluate", lambda *_: dataclasses.replace(SCORES, num_learnt=3))
    assert _run(*JOBS["evaluate"][1]) == 0
    assert "Note: 3 of these 4 series were trained on" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["20", "80"])
def test_no_column_is_lost_to_long_names(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    names = [f"{'a' * 120}{i}" for i in range(2)]
    given = [Prediction(name, "b" * 150, 0.75, {"b" * 150: 0.75}) for name in names]
    monkeypatch.setattr(pipelines, "predict", lambda *_: given)
    assert _run(*JOBS["predict"][1]) == 0
    out = capsys.readouterr().out
    for name in names:
        assert [name, "b" * 150, "75.0%"] in [line.split() for line in out.splitlines()]


def test_names_do_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = [Prediction("\x1b[31mred\nblue", "walk", 0.75, {"walk": 0.75})]
    monkeypatch.setattr(pipelines, "predict", lambda *_: given)
    assert _run(*JOBS["predict"][1]) == 0
    assert "\\x1b[31mred\\nblue" in capsys.readouterr().out


@pytest.mark.slow
def test_a_closed_pipe_is_no_error() -> None:
    """`headwise predict ... | head`, without a word."""
    program = (
        "import sys; from headwise import cli, pipelines\n"
        "from headwise.pipelines import Prediction\n"
        "pipelines.predict = lambda *_: [Prediction(str(i), 'walk', 0.75, {'walk': 0.75}) for i in range(20_000)]\n"
        "cli.main(['predict', 'model', '--data', 'a.csv'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_what_the_terminal_cannot_say_is_spelled_out() -> None:
    program = (
        "from headwise import cli, pipelines\n"
        "from headwise.pipelines import Prediction\n"
        "pipelines.predict = lambda *_: [Prediction('歩', '歩く', 0.75, {'歩く': 0.75})]\n"
        "cli.main(['predict', 'model', '--data', 'a.csv'])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\u6b69\\u304f" in done.stdout


@pytest.mark.parametrize(
    ("more", "output", "series"),
    [([], "heatmaps", ()), (["--output", "o", "--series", "a", "--series", "b c"], "o", ["a", "b c"])],
)
def test_heatmap(more: list[str], output: str, series: Any, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*JOBS["heatmap"][1], *more) == 0
    assert calls == [("draw_attention", (Path("model"), Path("a.csv"), Path(output)), {"series": series})]
    assert capsys.readouterr().out == "wrote         x y/attention.html\n"


def test_dashboard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "some where"
    assert _run("dashboard", str(folder)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    files = [folder / name for name in dashboards.FILES]
    assert out.startswith("".join(f"wrote         {file}\n" for file in files))
    assert out.endswith("prometheus --config.file=prometheus.yml\n")
    assert all(file.is_file() for file in files)

    files[0].write_text("mine")
    assert _run("dashboard", str(folder)) == 2
    out, err = capsys.readouterr()
    assert (out, files[0].read_text()) == ("", "mine")
    assert err.startswith("headwise: directory must hold no other files of these names")
    assert err.endswith(f"--overwrite); got {files[0]}\n")

    assert _run("dashboard", str(folder), "--overwrite", "--json") == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"files": list(map(str, files))}, "")
    assert files[0].read_text() != "mine"

    files[1].unlink()
    assert _run("dashboard", str(folder)) == 0
    words = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()[: len(files)]]
    assert words == ["kept", "wrote", *["kept"] * (len(files) - 2)]


def test_dashboard_needs_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run("dashboard", "") == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "headwise: directory must be the path of a folder, \".\" for this one; got ''\n")
    assert list(tmp_path.iterdir()) == []


TABLE = (
    "encoder.0  self  0       0.250   3.5          7  0.500     -         2     1.5\n"
    "encoder.0  self  1           -     -          -      -     -         -       -\n"
    "encoder.0: 1 query of 60 saw no key\n"
)


@pytest.mark.parametrize(
    ("more", "output", "series"),
    [
        ([], Path("heatmaps"), ()),
        (["--output", "o", "--series", "a", "--series", "b c"], Path("o"), ["a", "b c"]),
        (["--no-page"], None, ()),
    ],
)
def test_inspect(
    more: list[str], output: Path | None, series: Any, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*JOBS["inspect"][1], *more) == 0
    assert calls == [("inspect_attention", (Path("model"), Path("a.csv"), output), {"series": series})]
    out = capsys.readouterr().out
    assert out.startswith("attention of 4 series, 60 rows of each head:\n\nlayer      kind  head  entropy")
    assert out.endswith(TABLE + "\nwrote         x y/attention.html\n")


def test_the_demo_ends_with_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = dataclasses.replace(RESULT, attention=SNAPSHOT)
    monkeypatch.setattr(pipelines, "demo", lambda *_, **__: result)
    assert _run("demo") == 0
    assert TABLE in capsys.readouterr().out
    assert _run("demo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["attention"] == json.loads(json.dumps(SNAPSHOT.as_dict()))


def test_demo_defaults(calls: Calls) -> None:
    assert _run("demo") == 0
    assert calls == [("demo", (Path("demo-output"),), {"seed": 0})]


@pytest.mark.parametrize("command", JOBS)
def test_json_is_all_there_is(
    command: str, calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--output", "p.csv"] if command == "predict" else []
    assert _run(*JOBS[command][1], *more, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    scores = {
        "accuracy": 0.75,
        "majority": 0.5,
        "num_series": 4,
        "classes": [
            {"name": "walk[red]", "num_series": 2, "num_right": 1, "recall": 0.5, "precision": 1.0},
            {"name": "rest", "num_series": 2, "num_right": 2, "recall": 1.0, "precision": 2 / 3},
            {"name": "no", "num_series": 0, "num_right": 0, "recall": None, "precision": None},
        ],
        "confusion": [[1, 1, 0], [0, 2, 0], [0, 0, 0]],
        "num_learnt": 0,
    }
    expected = {
        "evaluate": scores,
        "predict": [
            {"series": "gait[1]", "predicted": "walk", "probability": 0.9, "probabilities": {"walk": 0.9, "rest": 0.1}},
            {"series": "b", "predicted": "rest", "probability": 0.6, "probabilities": {"walk": 0.4, "rest": 0.6}},
        ],
        "inspect": {
            "num_series": 4,
            **json.loads(json.dumps(SNAPSHOT.as_dict())),
            "files": [str(Path("x y/attention.html"))],
        },
        "heatmap": {"files": [str(Path("x y/attention.html"))]},
        "quantize": json.loads(json.dumps(dataclasses.asdict(QUANTIZED), default=str)),
        "export": {
            "format": "onnx",
            "report": {"path": "m.onnx", "error": 1e-7, "size_ratio": 0.25},
            "says": {"class_names": ["walk"]},
            "num_series": 4,
            "num_changed": 1,
            "files": ["m.onnx"],
            "error": 1e-7,
            "size_ratio": 0.25,
        },
        "benchmark": json.loads(json.dumps(dataclasses.asdict(COMPARED), default=str)),
    }
    training = {
        "evaluation": scores,
        "tested_on": "the official test split",
        "parameters": 101_513,
        "epochs": 30,
        "seconds": 12.34,
        "seed": 3,
        "num_train": 270,
        "files": [str(Path("some where/attention.png"))],
        "attention": None,
    }
    assert found == expected.get(command, training)


@pytest.mark.parametrize(
    "argv",
    [
        ["demo", "--seed", "-1"],
        ["demo", "--seed", "x"],
        ["demo", "--sed", "1"],
        ["dem"],
        ["train", "classify", "--data", "a.csv"],
        ["train", "classify", "--data", "a.csv", "--output", "o", "--epochs", "0"],
        ["evaluate", "model"],
        ["predict", "--data", "a.csv"],
        ["heatmap", "a", "b", "--data", "x"],
        ["dashboard"],
        ["inspect", "model"],
        ["quantize", "model"],
        ["export", "model", "--output", "a.onnx", "--format", "tflite"],
        ["benchmark", "model", "--threads", "0"],
    ],
)
def test_bad_usage_exits_2(argv: list[str], calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*argv) == 2
    assert calls == []
    out, err = capsys.readouterr()
    assert out == ""
    assert "Error" in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("demo: output must be a folder"), 2, "output must be a folder"),
        (ImportError("headwise needs x; pip install 'headwise[y]'"), 2, "needs x; pip install 'headwise[y]'"),
        (OSError("No space left on device"), 1, "a file could not be read or written: No space left on device"),
        (pipelines.NotWrittenError("export_onnx: x was not written: why"), 1, "x was not written: why"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
@pytest.mark.parametrize("command", JOBS)
def test_a_failing_job_is_one_line(
    command: str,
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def job(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipelines, JOBS[command][0], job)
    assert _run(*JOBS[command][1]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if line] == [f"headwise: {said}"]


@pytest.mark.parametrize("command", JOBS)
def test_an_empty_output_is_not_the_current_folder(
    command: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--output "$UNSET"` gives it."""
    code = _run(*JOBS[command][1], "--output", "")  # the last one counts
    out, err = capsys.readouterr()
    assert (code, out, calls) == (2, "", [])
    assert ("got an empty" in err) == (command not in ("evaluate", "benchmark"))  # which write nothing


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours must not look like one of the user's."""

    def job(*_: Any, **__: Any) -> None:
        raise RuntimeError("gives other logits")

    monkeypatch.setattr(pipelines, "demo", job)
    with pytest.raises(RuntimeError, match="other logits"):
        main(["demo"])


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert _run("--version") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "pip install 'headwise[cli]'" in err
