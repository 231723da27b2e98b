"""From a user's own file to an int8 classifier that runs without torch: quantize, export, serve, benchmark."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.commands import check_refused, run, run_json
from tests.e2e.serving import command, serve, serve_here

import headwise
from headwise import pipelines
from headwise.data.samples import Series, japanese_vowels
from headwise.data.timeseries import read_series
from headwise.export import doors
from headwise.quant import report
from headwise.quant.backends import X86

pytestmark = pytest.mark.e2e


def write_csv(path: Path, series: Series, *, labelled: bool = True) -> Path:
    """With channels named c1 and so on: a column of a file may not be a number."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = [f"c{name}" for name in series.channel_names]
        writer.writerow(["series", *(["label"] if labelled else []), f"time ({series.unit})", *names])
        labels = [""] * len(series) if series.labels is None else series.labels.tolist()
        for name, label, values in zip(series.names, labels, series.values, strict=True):
            for step, row in enumerate(values.tolist()):
                told = [series.class_names[label]] if labelled else []
                writer.writerow([name, *told, round(series.interval * step, 3), *row])
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real speech as CSV files, a classifier trained on it for a moment, int8 twins and an ONNX file."""
    folder = tmp_path_factory.mktemp("edge")
    train, test = japanese_vowels()
    write_csv(folder / "train.csv", train)
    write_csv(folder / "test.csv", test)
    write_csv(folder / "new.csv", test.subset(range(0, 370, 10)), labelled=False)
    assert run("train", "classify", "--data", folder / "train.csv", "--output", folder / "model", "--epochs", 3) == 0
    argv = ("--data", folder / "train.csv", "--test", folder / "test.csv", "--json")
    assert run("quantize", folder / "model", "--output", folder / "int8", *argv) == 0
    assert run("export", folder / "int8", "--output", folder / "model.onnx") == 0
    return folder


# --- quantize ---------------------------------------------------------------------------------------------------------


def test_quantize_says_what_it_did(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("quantize", place / "model", "--data", place / "train.csv", "--test", place / "test.csv")
    assert run(*argv, "--output", tmp_path / "int8") == 0
    out = capsys.readouterr().out
    small = headwise.load(tmp_path / "int8")
    assert (report(small).num_int8, report(small).kind) == (13, "static")
    scores = pipelines.evaluate(tmp_path / "int8", place / "test.csv")
    before = pipelines.evaluate(place / "model", place / "test.csv")
    assert abs(scores.accuracy - before.accuracy) < 0.02
    assert "13 of 13 linears (static, calibrated with 270 series)" in out
    assert re.search(rf"accuracy +{before.accuracy:.1%} .* before, {scores.accuracy:.1%} .* now", out)
    assert re.search(r"size +\d{3},\d{3} bytes before, \d{3},\d{3} now \(0\.3\d?\)", out)
    assert re.search(r"other class +\d+ of 370 series", out)
    assert f"export {tmp_path / 'int8'} --output model.onnx" in out
    # What evaluate knows of the training is known of the int8 model too
    assert pipelines.evaluate(tmp_path / "int8", place / "train.csv").num_learnt == 216


def test_quantize_without_data_is_dynamic(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "quantize", place / "model", "--output", tmp_path / "int8")
    assert (found["kind"], found["num_int8"], found["before"], found["measured_on"]) == ("dynamic", 13, None, None)
    assert found["int8_bytes"] < 0.31 * found["float_bytes"]
    assert {Path(name) for name in found["files"]} == set((tmp_path / "int8").iterdir())


def test_quantize_measures_on_the_calibration_where_that_is_all(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("quantize", place / "model", "--output", tmp_path / "int8")
    found = run_json(capsys, *argv, "--data", place / "train.csv", "--reduce-range", "--equalize")
    assert found["before"]["num_learnt"] == 216
    assert found["measured_on"] == str(place / "train.csv")
    found = run_json(capsys, *argv, "--data", place / "new.csv")
    assert (found["before"], found["num_series"], found["kind"]) == (None, 37, "static")
    assert run(*argv, "--data", place / "train.csv") == 0
    out = capsys.readouterr().out
    assert "the model was trained on that file" in out


def test_a_report_that_cannot_be_written_leaves_the_older_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("quantize", place / "model", "--output", tmp_path / "int8")
    assert run(*argv) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "int8").iterdir()}
    write = Path.write_text

    def full(self: Path, *words: Any, **more: Any) -> int:
        if self.name.startswith(".report."):
            raise OSError(28, "No space left on device")
        return write(self, *words, **more)

    monkeypatch.setattr(Path, "write_text", full)
    capsys.readouterr()
    assert run(*argv, "--data", place / "new.csv") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "int8").iterdir()} == before


def test_quantize_tells_of_its_options(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("quantize", place / "model", "--output", tmp_path / "int8", "--equalize", "--reduce-range")
    found = run_json(capsys, *argv)
    told = json.loads((tmp_path / "int8" / "report.json").read_text("utf-8"))
    assert (found["equalized"], found["weight_bits"]) == (told["equalized"], told["weight_bits"]) == (True, 7)
    assert told["int8_bytes"] == pipelines.shared.bytes_of(tmp_path / "int8")
    assert told["weights"] == next((tmp_path / "int8").glob("weights-*")).name


@pytest.mark.slow
def test_equalizing_keeps_what_the_model_says(place: Path, tmp_path: Path) -> None:
    found = pipelines.quantize_classifier(
        place / "model", tmp_path / "int8", test=place / "test.csv", equalize=True, reduce_range=True
    )
    assert found.num_changed <= 7
    weights = [m.state.weight for m in headwise.load(tmp_path / "int8").modules() if hasattr(m, "int_weight")]
    assert max(int(weight.abs().max()) for weight in weights) == 63


def test_where_torchs_int8_cannot_run_the_result_is_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ARM, for instance: by float arithmetic on the same integers."""
    here = pipelines.predict(place / "int8", place / "new.csv")
    monkeypatch.setattr(type(X86), "why_not", lambda *_: "it is another processor")
    there = pipelines.predict(place / "int8", place / "new.csv")
    for one, other in zip(here, there, strict=True):
        assert abs(one.probability - other.probability) < 0.02
    found = pipelines.quantize_classifier(place / "model", tmp_path / "int8", data=place / "new.csv")
    assert found.num_changed <= 1


MISUSED: dict[str, tuple[str, str]] = {
    "int8 again": ("quantize int8 --output new", r"directory must hold a float model; .*got an int8 one, in int8"),
    "in place": ("quantize model --output model", r"output must be another folder than the float model's, which stays"),
    "no labels": ("quantize model --output new --test new.csv", r"data must hold a label for each series"),
    "no calibration": ("quantize model --output new --data none.csv", r"none\.csv"),
    "no model": ("quantize . --output new", r"directory must be the folder of a saved model"),
    "a file": ("quantize model --output test.csv", r"output must be a folder that can be made; got test\.csv"),
    "suffix": ("export int8 --output x.bin", r"output must end in \.onnx or \.pte; or give --format; got x\.bin"),
    "two formats": ("export int8 --output x.pte --format onnx", r"output must end in \.onnx, as the format is onnx"),
    "no folder": ("export int8 --output a/x.onnx", r"output must be a file in a folder that exists; got a/x\.onnx"),
    "report": (
        "quantize model --output taken",
        r"output must be a folder in which report\.json can be written; got taken",
    ),
    "names": ("export int8 --output taken/x.pte", r"output must be a file that can be written; got taken/x\.pte\.json"),
    "device": (
        "export int8 --output /dev/null --format onnx",
        r"output must be a file that can be written; got /dev/nu",
    ),
    "threads": ("benchmark model --threads 100000000", r"threads must be at most \d+, four for each processor here"),
    "benchmark of int8": (
        "benchmark int8",
        r"directory must hold a float model, .*; got an int8 one, in int8",
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_one_line_and_writes_nothing(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = MISUSED[name]
    monkeypatch.chdir(place)
    for folder in ("taken/report.json", "taken/x.pte.json"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    check_refused(capsys, words.split(), message, place)


def test_a_model_in_preparation_is_not_saved(place: Path, tmp_path: Path) -> None:
    model = headwise.load(place / "model")
    prepared = headwise.quant.prepare_qat(model)
    with pytest.raises(ValueError, match=r"^save: model must be trained to its end: convert it first \(headwise\.conv"):
        headwise.save(prepared, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    with torch.no_grad():
        prepared.train()(torch.randn(2, 5, 12))
    headwise.save(headwise.quant.convert(prepared), tmp_path / "new")
    assert report(headwise.load(tmp_path / "new")).kind == "static"


def test_a_file_that_is_not_what_the_model_is_is_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And, in a benchmark, one form that was left out."""

    def broken(_: Any, __: Any, path: Path, **___: Any) -> None:
        part = f"{path.parent}/.x.0123abcd.part.onnx"
        raise doors.broken("export_onnx", path, f"Cannot\n  read '{part}'")

    monkeypatch.setattr(pipelines.runners, "export_onnx", broken)
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.chdir(tmp_path)
    assert run("export", place / "model", "--output", "x.onnx") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "headwise: x.onnx was not written: Cannot read 'x.onnx'\n")
    assert list(tmp_path.iterdir()) == []
    found = run_json(capsys, "benchmark", place / "model", "--rounds", 1)
    assert [line.partition(":")[0] for line in found["missing"]] == [
        "int8 static",
        "onnxruntime, float",
        "onnxruntime, int8 dynamic",
        "executorch",
    ]
    assert "Cannot read" in found["missing"][1]


def test_series_with_which_the_model_overflows_are_not_the_files_fault(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "huge.csv").write_text(f"{HEADER}\n" + rows("h", "3e38", "-3e38"), "utf-8")
    argv = ("export", place / "model", "--output", tmp_path / "x.onnx", "--data", tmp_path / "huge.csv")
    assert run(*argv) == 2
    assert "series 'h' overflows" in capsys.readouterr().err


# --- export and serve -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float", "dynamic"])
@pytest.mark.slow
def test_export_of_other_kinds(kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = place / "model"
    if kind == "dynamic":
        directory = tmp_path / "int8"
        pipelines.quantize_classifier(place / "model", directory)
    argv = ("export", directory, "--output", tmp_path / "x.bin", "--format", "onnx", "--data", place / "test.csv")
    found = run_json(capsys, *argv)
    assert (found["format"], found["says"]["kind"], found["num_series"]) == ("onnx", kind, 370)
    assert found["num_changed"] <= 1
    check_served(tmp_path / "x.bin", directory, place / "test.csv")


def check_served(file: Path, directory: Path, data: Path) -> None:
    """What the recipe says of each series is what headwise says of it, alone."""
    model = headwise.load(directory)
    series = read_series(data, channel_names=model.channel_names)
    served = serve(file, data)
    assert served.code == 0, served.said
    assert [answer["series"] for answer in served.answers] == list(series.names)
    with torch.inference_mode():
        wanted = torch.cat([model(values_LX[None]).softmax(-1) for values_LX in series.values])
    classes = [model.class_names[index] for index in wanted.argmax(-1).tolist()]
    differ = sum(one["class"] != other for one, other in zip(served.answers, classes, strict=True))
    assert differ <= len(series) // 100  # rounding at the edge between two integers
    told = torch.tensor([answer["probability"] for answer in served.answers])
    assert (told - wanted.amax(-1)).abs().max() < 0.05
    (last,) = served.said
    found = re.fullmatch(r"serve: (\d+) series, (\d+) answers, 0 refused; peak memory (\d+) MB", last)
    assert found, last
    assert (int(found[1]), int(found[2])) == (len(series), len(series))
    assert int(found[3]) < 150


@pytest.mark.integration
def test_served_without_torch_it_says_the_same(place: Path) -> None:
    check_served(place / "model.onnx", place / "int8", place / "test.csv")


def test_padding_and_batches_in_the_file_change_nothing(place: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(place / "model.onnx"))
    says = json.loads(session.get_modelmeta().custom_metadata_map["headwise"])
    assert says["class_names"] == list("123456789")
    assert says["channel_names"] == [f"c{number}" for number in range(1, 13)]
    assert (says["interval"], says["unit"], says["kind"]) == (6.4, "ms", "static")
    assert set(says["inputs"]) == {"x", "padding_mask"}
    _, test = japanese_vowels()
    values = test.values[:5]
    longest = max(map(len, values))
    x, mask = torch.full((5, longest, 12), torch.nan), torch.ones(5, longest, dtype=torch.bool)
    for row, one in enumerate(values):
        x[row, : len(one)], mask[row, : len(one)] = one, False
    (together,) = session.run(["logits"], {"x": x.numpy(), "padding_mask": mask.numpy()})
    for row, one in enumerate(values):
        none = torch.zeros(1, len(one), dtype=torch.bool)
        (alone,) = session.run(["logits"], {"x": one[None].numpy(), "padding_mask": none.numpy()})
        torch.testing.assert_close(torch.tensor(together[row]), torch.tensor(alone[0]), rtol=0, atol=0.02)


HEADER = "series,time (ms)," + ",".join(f"c{number}" for number in range(1, 13))


def rows(name: str, *steps: str, interval: float = 6.4) -> str:
    return "".join(f"{name},{interval * index:.1f},{','.join([step] * 12)}\n" for index, step in enumerate(steps))


def test_bad_series_are_refused_and_the_stream_goes_on(place: Path) -> None:
    text = f"{HEADER}\n" + rows("a", "0.1", "0.2") + rows("nan", "0.1", "nan", "0.3") + rows("b", "0.1", "0.2")
    text += "short,0,1,2\n" + rows("inf", "1e39") + rows("words", "one") + rows("gap", "0.1", "0.2", interval=20)
    text += rows("1_0", "1_0") + rows("slow", *["0.1"] * 9, interval=6.9)
    text += 'quoted,"x"\n' + rows("a", "0.1", "0.2")
    served = serve_here(place / "model.onnx", text=text)
    assert served.code == 1
    assert [(answer["series"], answer["steps"]) for answer in served.answers] == [("a", 2), ("b", 2), ("a", 2)]
    assert served.answers[0] == served.answers[2]
    *lines, last = served.said
    assert [line.partition(" is refused: ")[0] for line in lines] == [
        f"serve: series {name!r}" for name in ("nan", "short", "inf", "words", "gap", "1_0", "slow", "quoted")
    ]
    for line, why in zip(
        lines,
        (
            "line 5 has 'nan' where a finite number belongs",
            "line 9 has 4 cells, the header 14",
            "'1e39'",
            "'one'",
            "20 ms after the one before; 6.4 in training",
            "'1_0'",
            "its steps are 6.9 ms long; 6.4 in training",
            "cells, the header 14",
        ),
        strict=True,
    ):
        assert why in line
    assert "11 series, 3 answers, 8 refused" in last


def test_windows_slide(place: Path) -> None:
    text = f"{HEADER}\n" + rows("a", *"12345678") + "\n" + rows("b", "1", "2")
    served = serve_here(place / "model.onnx", "--window", 4, "--hop", 2, text=text)
    assert [(one["series"], one["first_step"], one["steps"]) for one in served.answers] == [
        ("a", 0, 4),
        ("a", 2, 4),
        ("a", 4, 4),
    ]
    assert "series 'b' is refused: 2 steps, fewer than a window has" in served.said[0]
    whole = serve_here(place / "model.onnx", text=f"{HEADER}\n" + rows("w", *"3456"))
    assert whole.answers[0]["probability"] == served.answers[1]["probability"]


def test_an_answer_comes_as_soon_as_a_blank_line_ends_the_series(place: Path) -> None:
    with subprocess.Popen(
        command(place / "model.onnx"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(f"{HEADER}\n" + rows("a", "1", "2") + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["series"] == "a"  # while the stream goes on
        process.stdin.close()
        assert "1 series, 1 answers" in process.stderr.read()


def test_a_series_without_an_end_is_refused(place: Path) -> None:
    served = serve_here(
        place / "model.onnx", "--longest", 3, text=f"{HEADER}\n" + rows("a", *"1234567") + rows("b", "1")
    )
    assert [answer["series"] for answer in served.answers] == ["b"]
    assert served.said[0] == "serve: series 'a' is refused: more than 3 steps (--longest)"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("", "the first line must name the columns"),
        ("id,c1", "the first line must name the columns"),
        (HEADER.removesuffix(",c12"), "c12 is missing"),
        (f"{HEADER},c13", "c13 is none of them"),
        (HEADER.replace("(ms)", "(s)"), "the time must be in ms, as in training; got time (s)"),
    ],
)
def test_a_header_that_does_not_fit_ends_it(header: str, said: str, place: Path) -> None:
    served = serve_here(place / "model.onnx", text=f"{header}\n" + rows("a", "1"))
    assert served.code == 2
    assert served.answers == []
    (line,) = served.said
    assert said in line


def test_models_that_are_not_to_be_trusted_are_refused(place: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    whole = (place / "model.onnx").read_bytes()

    def harmed(change: Any) -> bytes:
        model = onnx.load_from_string(whole)
        change(model)
        return bytes(model.SerializeToString())

    def elsewhere(tensor: Any) -> None:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "../secret"

    def in_a_constant(model: Any) -> None:
        node = onnx.helper.make_node("Constant", [], ["z"], value=onnx.helper.make_tensor("z", 1, [1], [0.0]))
        elsewhere(node.attribute[0].t)
        model.graph.node.append(node)

    def in_a_branch(model: Any) -> None:
        inner = onnx.helper.make_graph([], "inner", [], [], [onnx.helper.make_tensor("z", 1, [1], [0.0])])
        elsewhere(inner.initializer[0])
        model.graph.node.append(onnx.helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))

    def in_a_function(model: Any) -> None:
        node = onnx.helper.make_node("Constant", [], ["z"], value=onnx.helper.make_tensor("z", 1, [1], [0.0]))
        elsewhere(node.attribute[0].t)
        model.functions.append(onnx.helper.make_function("own", "f", [], ["z"], [node], []))

    content = {
        "weights": (harmed(lambda model: elsewhere(model.graph.initializer[0])), "has numbers in another file"),
        "constant": (harmed(in_a_constant), "has numbers in another file"),
        "branch": (harmed(in_a_branch), "has numbers in another file"),
        "function": (harmed(in_a_function), "has numbers in another file"),
        "no names": (harmed(lambda model: model.ClearField("metadata_props")), "does not say its classes and channels"),
        "truncated": (whole[:-1000], "is truncated, or no ONNX file"),
        "text": (b"hello world, this is no model", "no ONNX file"),
        "empty": (b"", "is no ONNX file"),
        "another format": (whole[:4] + b"ORTM" + whole[8:], "is no ONNX file"),
    }
    for name, (harm, said) in content.items():
        path = tmp_path / "bad.onnx"
        path.write_bytes(harm)
        served = serve_here(path, place / "test.csv")
        assert served.code == 2, name
        assert served.answers == [], name
        (line,) = served.said
        assert said in line, (name, line)
    assert serve_here(tmp_path / "none.onnx", place / "test.csv").code == 2


# --- benchmark --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_benchmark_puts_all_side_by_side(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("benchmark", place / "model", "--rounds", 2)
    found = run_json(capsys, *argv, "--data", place / "test.csv")
    told = {(form["runtime"], form["kind"]): form for form in found["forms"]}
    for runtime in ("torch", "onnxruntime"):
        for kind in ("float", "int8 dynamic", "int8 static"):
            form = told[runtime, kind]
            assert form["num_changed"] <= 7
            assert form["speed"] > 0
            assert form["batch_speed"] > 0
    accuracy = pipelines.evaluate(place / "model", place / "test.csv").accuracy
    assert told["torch", "float"]["accuracy"] == pytest.approx(accuracy, abs=0.003)
    assert (told["torch", "float"]["speed"], told["torch", "float"]["num_changed"]) == (1.0, 0)
    assert ("executorch" in found["machine"]) == (("executorch", "float") in told)
    assert run(*argv) == 0
    out = capsys.readouterr().out
    assert "made-up series" in out
    assert "left out: int8 static: needs series to calibrate with, --data FILE" in out


def test_benchmark_names_what_would_bring_the_rest(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("onnxruntime", "executorch")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("onnxruntime", "executorch"):
        monkeypatch.setitem(sys.modules, name, None)
    found = run_json(capsys, "benchmark", place / "model", "--data", place / "new.csv", "--rounds", 1)
    assert [(form["runtime"], form["kind"]) for form in found["forms"]] == [
        ("torch", "float"),
        ("torch", "int8 dynamic"),
        ("torch", "int8 static"),
    ]
    for line, extra in zip(found["missing"], ("onnx", "edge"), strict=True):
        assert f"pip install 'headwise[{extra}]'" in line
    assert found["num_series"] == 37
    assert found["forms"][0]["accuracy"] is None


def test_a_pte_without_data_or_what_brings_it(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run("export", place / "int8", "--output", tmp_path / "m.pte")
    err = capfd.readouterr().err
    if code == 0:
        assert err == ""  # nothing of what its C++ part says
        assert {path.name for path in tmp_path.iterdir()} == {"m.pte", "m.pte.json"}
    else:
        assert code == 2
        assert "pip install 'headwise[edge]'" in err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.edge
def test_benchmark_with_executorch_says_nothing_else(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("benchmark", place / "model", "--rounds", 1, "--json") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "executorch" in json.loads(out)["machine"]


@pytest.mark.edge
def test_export_for_executorch(place: Path) -> None:
    found = pipelines.export_classifier(place / "int8", place / "model.pte", data=place / "test.csv")
    assert (found.format, found.num_series) == ("executorch", 370)
    assert found.num_changed <= 4
    assert [path.name for path in found.files] == ["model.pte", "model.pte.json"]
    says = json.loads((place / "model.pte.json").read_text("utf-8"))
    assert says == found.says
    assert set(says["inputs"]) == {"x"}
