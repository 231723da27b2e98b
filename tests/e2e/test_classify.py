"""Train, evaluate, predict and heatmap on a user's own files, through the command line; broken files write nothing."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from tests.e2e.commands import check_refused, run, run_json

import headwise
from headwise import pipelines
from headwise.data.samples import Series
from headwise.data.timeseries import read_series
from headwise.pipelines import classify

pytestmark = pytest.mark.e2e

SERIES = 40


def made(seed: int, number: int = SERIES) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Series of two channels and 7 to 19 steps: "up" has its one bump before its one dip, "down" after it."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(number):
        length = int(torch.randint(7, 20, (), generator=generator))
        first, second = sorted(torch.randperm(length, generator=generator)[:2].tolist())
        label = ("up", "down")[index % 2]
        noise = torch.randn(length, 2, generator=generator) * 0.1
        values = [(a, 1_000 + 50 * b) for a, b in noise.tolist()]
        high, low = (first, second) if label == "up" else (second, first)
        values[high] = (values[high][0] + 3, values[high][1])
        values[low] = (values[low][0] - 3, values[low][1])
        rows.append((f"s{index}", label, values))
    return rows


def write_csv(path: Path, rows: list[Any], *, labelled: bool = True) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["series", *(["label"] if labelled else []), "time (ms)", "acc", "pressure"])
        for name, label, values in rows:
            for step, pair in enumerate(values):
                writer.writerow([name, *([label] if labelled else []), 20 * step, *pair])
    return path


def write_ts(path: Path, rows: list[Any]) -> Path:
    lines = ["@problemName bumps", "@univariate false", "@dimensions 2", "@classLabel true down up", "@data"]
    for _, label, values in rows:
        lines.append(":".join(",".join(str(value) for value in channel) for channel in zip(*values, strict=True)))
        lines[-1] += f":{label}"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.csv, test.csv and a model that was trained on the first through the command line."""
    folder = tmp_path_factory.mktemp("own")
    train, test = write_csv(folder / "train.csv", made(1, 80)), write_csv(folder / "test.csv", made(2))
    argv = ("train", "classify", "--data", train, "--test", test, "--output", folder / "model", "--epochs", 60)
    assert run(*argv) == 0
    return folder


def test_own_csv_from_training_to_pictures(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads((trained / "model" / "report.json").read_text("utf-8"))
    assert report["evaluation"]["accuracy"] >= 0.9  # a coin gives 0.5; the order of bump and dip has to be seen
    assert report["num_train"] == 80
    assert report["epochs"] == 60
    assert report["tested_on"] == str(trained / "test.csv")
    assert run_json(capsys, "evaluate", trained / "model", "--data", trained / "test.csv") == report["evaluation"]

    rows = made(2)
    unlabelled = write_csv(trained / "new.csv", rows, labelled=False)
    predictions = run_json(capsys, "predict", trained / "model", "--data", unlabelled, "--output", trained / "p.csv")
    assert [one["series"] for one in predictions] == [name for name, _, _ in rows]
    right = sum(one["predicted"] == label for one, (_, label, _) in zip(predictions, rows, strict=True))
    assert right / len(rows) == report["evaluation"]["accuracy"]
    for one in predictions:
        assert one["probability"] == max(one["probabilities"].values()) == one["probabilities"][one["predicted"]]
        assert math.isclose(sum(one["probabilities"].values()), 1, rel_tol=1e-5)
    with (trained / "p.csv").open(newline="", encoding="utf-8") as file:
        assert [row["predicted"] for row in csv.DictReader(file)] == [one["predicted"] for one in predictions]

    argv = ("heatmap", trained / "model", "--data", unlabelled, "--series", "s3", "--series", "s8")
    files = run_json(capsys, *argv, "--output", trained / "maps")["files"]
    assert report["trained_on"] == [name for name, _, _ in made(1, 80)]
    assert [Path(file).name for file in files] == ["attention.html", "attention-s3.png", "attention-s8.png"]
    assert set(files) == {str(path) for path in (trained / "maps").iterdir()}
    for file in files[1:]:
        assert image.imread(file).ndim == 3
    page = Path(files[0]).read_text("utf-8")
    for said in ("Attention in series s3: predicted", "Attention in series s8", "pressure", "ms"):
        assert said in page


def test_columns_in_another_order_are_found_by_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = read_series(trained / "test.csv")
    assert series.labels is not None
    path = trained / "other.csv"
    lines = ["pressure,label,acc,series"]
    for name, label, values in zip(series.names, series.labels.tolist(), series.values, strict=True):
        lines += [f"{p!r},{series.class_names[label]},{a!r},{name}" for a, p in values.tolist()]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    one, other = (
        run_json(capsys, "evaluate", trained / "model", "--data", data) for data in (trained / "test.csv", path)
    )
    assert one == other


def test_ts_gives_what_csv_gives(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = write_ts(trained / "train.ts", made(1, 80)), write_ts(trained / "test.ts", made(2))
    argv = ("train", "classify", "--data", train, "--test", test, "--output", trained / "model-ts", "--epochs", 60)
    from_ts = run_json(capsys, *argv)
    report = json.loads((trained / "model" / "report.json").read_text("utf-8"))
    assert from_ts["evaluation"] == report["evaluation"]
    state, other = (headwise.load(trained / name).state_dict() for name in ("model", "model-ts"))
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_a_fifth_is_held_out_without_a_test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_csv(tmp_path / "all.csv", made(3, 23))
    argv = ("train", "classify", "--data", data, "--epochs", 1)
    results = [
        run_json(capsys, *argv, "--output", tmp_path / str(seed), "--seed", seed)["evaluation"] for seed in (0, 0, 1)
    ]
    assert results[0] == results[1]
    assert [score["num_series"] for score in results[0]["classes"]] == [2, 2]  # a fifth of 11 and of 12
    assert json.loads((tmp_path / "0" / "report.json").read_text())["num_train"] == 19


def test_nothing_is_both_learnt_and_tested() -> None:
    values = [torch.full((2, 1), float(index)) for index in range(50)]
    labels = torch.arange(50) % 3
    labels[7] = 3  # alone in its class: kept for training
    series = Series(values, labels, ("a", "b", "c", "d"))
    train, test = classify._split(series, seed=4)
    seen = [int(value[0]) for part in (train, test) for value in part.values]
    assert sorted(seen) == list(range(50))
    assert test.labels is not None
    assert torch.bincount(test.labels, minlength=4).tolist() == [3, 3, 3, 0]
    assert [int(value[0]) for value in classify._split(series, seed=5)[1].values] != [int(v[0]) for v in test.values]
    for part in (train, test):
        for name, value in zip(part.names, part.values, strict=True):
            assert name == str(int(value[0]))


def test_long_series_are_cut_into_strides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """300 steps: 3 steps a position; the map still speaks of steps."""
    rows = [f"{index % 2},{','.join(str((step + index) % 7) for step in range(300))}" for index in range(6)]
    data = tmp_path / "wide.csv"
    data.write_text("label," + ",".join(map(str, range(300))) + "\n" + "\n".join(rows) + "\n", "utf-8")
    run_json(capsys, "train", "classify", "--data", data, "--output", tmp_path / "model", "--epochs", 1)
    model = headwise.load(tmp_path / "model")
    assert model.stride == 3
    files = run_json(capsys, "heatmap", tmp_path / "model", "--data", data, "--output", tmp_path / "maps")["files"]
    assert [Path(file).name for file in files] == ["attention.html", "attention-0.png", "attention-1.png"]


@pytest.mark.slow
def test_names_make_safe_and_different_files(trained: Path, tmp_path: Path) -> None:
    names = ["../a b", ".._a_b-2", "../a/b", "日本", "../A b"]
    rows = [(name, "up", made(1)[index][2]) for index, name in enumerate(names)]
    data = write_csv(tmp_path / "odd.csv", rows)
    files = pipelines.draw_attention(trained / "model", data, tmp_path / "maps", series=[row[0] for row in rows])
    assert [path.name for path in files] == [
        "attention.html",
        "attention-.._a_b.png",
        "attention-.._a_b-2.png",
        "attention-.._a_b-3.png",
        "attention-_.png",
        "attention-.._A_b-4.png",
    ]
    assert {path.parent for path in files} == {tmp_path / "maps"}


def test_evaluate_knows_the_file_it_learnt(trained: Path, tmp_path: Path) -> None:
    assert pipelines.evaluate(trained / "model", trained / "train.csv").num_learnt == 80
    assert pipelines.evaluate(trained / "model", trained / "test.csv").num_learnt == 0
    (tmp_path / "renamed.csv").write_bytes((trained / "train.csv").read_bytes())
    assert pipelines.evaluate(trained / "model", tmp_path / "renamed.csv").num_learnt == 80
    # A report of another model says nothing of this one, and neither does none.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "report.json").write_bytes((trained / "model" / "report.json").read_bytes())
    headwise.save(headwise.SequenceClassifier(2, num_channels=2, class_names=["down", "up"]), tmp_path / "model")
    with pytest.raises(ValueError, match="channel"):
        pipelines.evaluate(tmp_path / "model", trained / "train.csv")
    names = {"class_names": ["down", "up"], "channel_names": ["acc", "pressure"]}
    headwise.save(headwise.SequenceClassifier(2, num_channels=2, **names), tmp_path / "model")
    assert pipelines.evaluate(tmp_path / "model", trained / "train.csv").num_learnt == 0


# --- Broken input: a clear line, code 2, nothing written --------------------------------------------------------------

GOOD = "series,label,acc,pressure\n" + "".join(f"s{i},{'ab'[i % 2]},{j},{i}\n" for i in range(6) for j in range(3))
TS = "@univariate false\n@dimensions 2\n@classLabel true a b\n@data\n1,2:3,4:a\n5,6:7,8:b\n1,3:3,4:a\n"

BROKEN: dict[str, tuple[str, bytes, str]] = {
    "empty csv": ("a.csv", b"", r"a\.csv .*empty"),
    "empty ts": ("a.ts", b"", r"a\.ts .*empty"),
    "wrong header": ("a.csv", GOOD.replace("series,", "id,").encode(), r"a\.csv, line 1: .*series"),
    "wrong delimiter": ("a.csv", GOOD.replace(",", ";").encode(), r"a\.csv, line 1: .*comma"),
    "wrong tag": ("a.ts", TS.replace("@univariate", "@univariat").encode(), r"a\.ts, line 1: .*@univariat\b"),
    "no data tag": ("a.ts", TS.replace("@data\n", "").encode(), r"a\.ts, line 4: "),
    "NaN in csv": ("a.csv", GOOD.replace("s2,a,1,2", "s2,a,NaN,2").encode(), r"a\.csv, line 9: .*'acc'.*'NaN'"),
    "NaN in ts": ("a.ts", TS.replace("5,6", "5,?").encode(), r"a\.ts, line 6: .*'\?'"),
    "one class in csv": ("a.csv", GOOD.replace(",b,", ",a,").encode(), r"at least two classes; got one class, 'a'"),
    "one class in ts": ("a.ts", TS.replace(":b\n", ":a\n").encode(), r"at least two classes; got one class, 'a'"),
    "no labels": (
        "a.csv",
        GOOD.replace(",label", "").replace(",a,", ",").replace(",b,", ",").encode(),
        r"got none, in",
    ),
    "missing channel in ts": ("a.ts", TS.replace("5,6:7,8", "5,6").encode(), r"a\.ts, line 6: .*2 channels"),
    "missing cell in csv": ("a.csv", GOOD.replace("s2,a,1,2", "s2,a,1").encode(), r"a\.csv, line 9: .*4 cells"),
    "another format": ("a.csv", b"PK\x03\x04\x14\x00\x00\x00", r"a\.csv .*(ZIP|zip|xlsx)"),
    "another suffix": ("a.json", b"[1, 2]", r"suffix \.ts or \.csv"),
    "ts named csv": ("a.csv", TS.encode(), r"a\.csv.*\.ts"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_is_one_clear_line_and_writes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, content, message = BROKEN[name]
    (tmp_path / file).write_bytes(content)
    monkeypatch.setattr(classify, "fit", lambda *_: pytest.fail("trained"))
    assert run("train", "classify", "--data", tmp_path / file, "--output", tmp_path / "out" / "model") == 2
    out, err = capsys.readouterr()
    assert out == ""
    line, *example = [line for line in err.splitlines() if line]
    assert re.search(r"^headwise: .*" + message, line), line
    assert bool(example) == (name == "wrong header")  # which shows what a header looks like
    assert [path.name for path in tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("where", [pipelines.draw_attention, pipelines.inspect_attention])
def test_pages_of_both_commands_are_the_same(where: Any, trained: Path, tmp_path: Path) -> None:
    written = where(trained / "model", trained / "test.csv", tmp_path / "maps", series=["s3", "s8"])
    page = (tmp_path / "maps" / "attention.html").read_text("utf-8")
    assert page.count("Attention in series") == 2
    assert (tmp_path / "maps" / "attention.html") == (written[0] if isinstance(written, tuple) else written.files[0])


def test_inspect_measures_every_row_of_every_series(trained: Path, tmp_path: Path) -> None:
    found = pipelines.inspect_attention(trained / "model", trained / "test.csv")
    assert found.files == ()
    assert found.num_series == SERIES
    model = headwise.load(trained / "model")
    series = read_series(trained / "test.csv", channel_names=model.channel_names)
    # The same from the whole matrices, in float64.
    entropy, peak, rows = torch.zeros(2, 4).double(), torch.zeros(2, 4).double(), 0
    for values_LX in series.values:
        with torch.inference_mode():
            _, weights = model(values_LX[None], need_weights=True)
        weight = torch.stack(weights)[:, 0].double()
        ratio = -(weight * weight.log()).sum(-1) / math.log(len(values_LX))
        entropy, peak, rows = entropy + ratio.sum(-1), peak + weight.amax(-1).sum(-1), rows + len(values_LX)
    assert [layer.rows for layer in found.snapshot.layers] == [rows, rows]
    for z, layer in enumerate(found.snapshot.layers):
        for h, head in enumerate(layer.heads):
            assert head.entropy_ratio == pytest.approx(float(entropy[z, h]) / rows, rel=1e-4)
            assert head.peak == pytest.approx(float(peak[z, h]) / rows, rel=1e-4)


# The command in the folder of `trained`, what the file behind --data holds if it is not there yet, and what is said.
MISUSED: dict[str, tuple[str, str, str]] = {
    "missing channel": (
        "evaluate model --data short.csv",
        "series,label,acc\ns0,up,1\ns0,up,2\n",
        r"short\.csv, line 1: .*pressure",
    ),
    "renamed channel": (
        "predict model --data renamed.csv",
        "series,acc,depth\ns0,1,3\ns0,2,4\n",
        r"renamed\.csv, line 1: .*pressure.*depth|depth.*pressure",
    ),
    "unknown label": (
        "evaluate model --data label.csv",
        "series,label,acc,pressure\ns0,left,1,3\n",
        r"label\.csv, line 2: .*'left'",
    ),
    "other rate": (
        "predict model --data rate.csv",
        "series,time (ms),acc,pressure\ns0,0,1,3\ns0,10,1,3\ns0,20,1,3\n",
        r"data must have a row each 20 ms, as in training; .*got 10 ms, in .*rate\.csv",
    ),
    "other unit": (
        "evaluate model --data unit.csv",
        "series,time (s),label,acc,pressure\ns0,0,up,1,3\ns0,0.02,up,1,3\ns0,0.04,up,1,3\n",
        r"data must have a row each 20 ms, as in training; .*got 0\.02 s, in .*unit\.csv",
    ),
    "overflowing": (
        "evaluate model --data huge.csv",
        "series,label,acc,pressure\ngood,up,1,3\nbad,up,3e38,-3e38\n",
        r"data must hold values that the model can .* series 'bad' overflows; got .* 3e\+38",
    ),
    "no labels": (
        "evaluate model --data bare.csv",
        "series,acc,pressure\ns0,1,3\ns0,2,4\n",
        r"data must hold a label for each series",
    ),
    "no folder for the predictions": (
        "predict model --data test.csv --output x/y.csv",
        "",
        r"output must be a file in a folder that exists; got .*y\.csv",
    ),
    "predictions into a folder": (
        "predict model --data test.csv --output model",
        "",
        r"output must be a file in a folder that exists; got .*model",
    ),
    "no model": (
        "predict . --data test.csv",
        "",
        r"directory must be the folder of a saved model .*no config\.json",
    ),
    "unknown series": (
        "heatmap model --data test.csv --series s3 --series x --output out",
        "",
        r"series must be names of the 40 series in .*'s0' to 's39'; got \['x'\]",
    ),
    "no model to inspect": (
        "inspect . --data test.csv",
        "",
        r"directory must be the folder of a saved model .*no config\.json",
    ),
    "unknown series to inspect": (
        "inspect model --data test.csv --series x --output out",
        "",
        r"series must be names of the 40 series in .*'s0' to 's39'; got \['x'\]",
    ),
    "inspecting what overflows": (
        "inspect model --data huge.csv --output out",
        "series,label,acc,pressure\ngood,up,1,3\nbad,up,3e38,-3e38\n",
        r"data must hold values that the model can .* series 'bad' overflows; got .* 3e\+38",
    ),
    "inspecting into a file": (
        "inspect model --data test.csv --output test.csv",
        "",
        r"output must be a folder that can be made; got .*test\.csv",
    ),
    "output is a file": (
        "heatmap model --data test.csv --output test.csv",
        "",
        r"output must be a folder that can be made; got .*test\.csv",
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_what_does_not_fit_the_model_is_one_clear_line(
    name: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, content, message = MISUSED[name]
    argv = command.split()
    monkeypatch.chdir(trained)
    if content:
        Path(argv[argv.index("--data") + 1]).write_text(content, "utf-8")
    check_refused(capsys, argv, message, trained)


def test_a_model_of_tokens_is_refused(tmp_path: Path, trained: Path) -> None:
    headwise.save(headwise.SequenceClassifier(2, vocab_size=5), tmp_path)
    with pytest.raises(ValueError, match=r"^evaluate: directory must hold a classifier of time series; got Seq"):
        pipelines.evaluate(tmp_path, trained / "test.csv")


def test_interrupted_training_keeps_the_old_model(trained: Path, tmp_path: Path) -> None:
    model = headwise.SequenceClassifier(2, num_channels=2)
    headwise.save(model, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def stop(_: pipelines.Progress) -> None:
        raise KeyboardInterrupt

    for folder in (tmp_path / "model", tmp_path / "new" / "model"):
        with pytest.raises(KeyboardInterrupt):
            pipelines.train_classifier(trained / "train.csv", folder, epochs=2, progress=stop)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
