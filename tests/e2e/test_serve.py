"""recipes/edge/serve.py against files and streams that are not as they should be; models are made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.serving import SERVE, Served, serve_here

pytestmark = pytest.mark.e2e

SAYS: dict[str, Any] = {
    "format": "headwise classifier",
    "version": 1,
    "class_names": ["n", "y"],
    "channel_names": ["a", "b"],
    "interval": 20.0,
    "unit": "ms",
}
HEADER = "series,time (ms),a,b\n"


def rows(name: str, number: int = 3) -> str:
    return "".join(f"{name},{20 * step},{step},1\n" for step in range(number))


def model(path: Path, says: object, *, operator: str = "ReduceMean", output: str = "logits") -> Path:
    """A file whose logits are the means of the two channels, or what another operator makes of x."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    rest: dict[str, Any] = {"axes": [1], "keepdims": 0} if operator == "ReduceMean" else {}
    nodes = [helper.make_node(operator, ["x"], [output], **rest)]
    if operator == "Reshape":
        sizes = helper.make_node("Constant", [], ["sizes"], value=helper.make_tensor("s", 7, [2], [1, 2]))
        nodes = [sizes, helper.make_node("Reshape", ["x", "sizes"], [output])]
    inputs = [("x", 1, ["b", "l", 2]), ("padding_mask", 9, ["b", "l"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*one) for one in inputs],
        [helper.make_tensor_value_info(output, 1, None)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, {"headwise": says if isinstance(says, str) else json.dumps(says)})
    path.write_bytes(made.SerializeToString())
    return path


@pytest.fixture
def fine(tmp_path: Path) -> Path:
    return model(tmp_path / "fine.onnx", SAYS)


def names(served: Served) -> list[str]:
    return [answer["series"] for answer in served.answers]


UNFIT: dict[str, tuple[object, str]] = {
    "fewer classes": ({"class_names": ["n"]}, "gives numbers of shape (1, 2); with its names of classes"),
    "more classes": ({"class_names": ["n", "y", "z"]}, "gives numbers of shape (1, 2); with its names of classes"),
    "no class": ({"class_names": []}, "class_names [], not a list of different texts"),
    "classes are one text": ({"class_names": "ny"}, "class_names 'ny', not a list of different texts"),
    "classes are no texts": ({"class_names": [{"n": 1}, 2]}, "not a list of different texts"),
    "two classes of one name": ({"class_names": ["n", "n"]}, "not a list of different texts"),
    "half a letter": ({"class_names": ["n", "\ud800"]}, "not a list of different texts"),
    "channels are one text": ({"channel_names": "ab"}, "channel_names 'ab', not a list of different texts"),
    "two channels of one name": ({"channel_names": ["a", "a"]}, "channel_names ['a', 'a'], not a list of different"),
    "more channels": ({"channel_names": ["a", "b", "c"]}, "names 3 channels and takes x of ['b', 'l', 2]"),
    "a channel called series": ({"channel_names": ["a", "Series"]}, "a channel 'Series', which is the name of another"),
    "another format": ({"format": "other"}, "does not say that it is a headwise classifier"),
    "another version": ({"version": 2}, "is of version 2; this program reads version 1"),
    "interval 0": ({"interval": 0}, "step's time 0, not a number above 0"),
    "interval below 0": ({"interval": -5}, "step's time -5, not"),
    "interval NaN": ({"interval": float("nan")}, "step's time nan, not"),
    "interval infinite": ({"interval": float("inf")}, "step's time inf, not"),
    "interval huge": ({"interval": 10**400}, "step's time 1000"),
    "interval a text": ({"interval": "20"}, "step's time '20', not"),
    "unit": ({"unit": None}, "unit of time None, not a text"),
    "deep": ("[" * 100_000, "says of itself what is no JSON"),
    "a list": ("[]", "does not say that it is a headwise classifier"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_file_says_of_itself_must_fit_the_model(name: str, tmp_path: Path) -> None:
    change, said = UNFIT[name]
    served = serve_here(model(tmp_path / "m.onnx", {**SAYS, **change} if isinstance(change, dict) else change))
    assert (served.code, served.answers) == (2, [])
    (line,) = served.said
    assert said in line
    assert len(line) < 400


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"output": "other"}, "does not take x and padding_mask and give logits"),
        ({"operator": "Identity"}, "gives numbers of shape (1, 1, 2)"),
    ],
)
def test_a_model_that_gives_something_else_is_refused(form: dict[str, str], said: str, tmp_path: Path) -> None:
    served = serve_here(model(tmp_path / "m.onnx", SAYS, **form))
    assert (served.code, served.answers) == (2, [])
    (line,) = served.said
    assert said in line


def test_what_cannot_be_run_is_refused_and_the_stream_goes_on(tmp_path: Path) -> None:
    """This one takes one step, and no more."""
    file = model(tmp_path / "m.onnx", SAYS, operator="Reshape")
    served = serve_here(file, text=HEADER + rows("a", 1) + rows("b", 3) + rows("c", 1))
    assert names(served) == ["a", "c"]
    assert served.said[0].startswith("serve: series 'b' is refused: onnxruntime cannot run the model: [ONNXRuntime")
    assert len(served.said) == 2


def test_what_is_wrong_in_a_line_stays_in_its_series(fine: Path, tmp_path: Path) -> None:
    broken = {
        "bad-byte": (b"bad-byte,0,1,\xe9\n", "line {} is not UTF-8"),
        "n\udce9": (b"n\xe9,0,1,1\n", "line {} is not UTF-8"),
        "open": (b'"open,0,1,1\n', "line {} has a quote that does not end"),
        "inner": (b'inner,0,1"1,1\n', "line {} has a quote that does not end, or one inside of a cell"),
        'after"x': (b'"after"x,0,1,1\n', "line {} has a quote that does not end, or one inside of a cell"),
        "with, comma": (b'"with, comma",0,"1,1\n', "line {} has a quote that does not end"),
        "": (b'"\n', "line {} has a quote that does not end"),
        "digits": ("digits,0,٣,1\n".encode(), "line {} has '٣' where a finite number belongs"),
        "long": (b"long,0," + b"1" * 2_000_000 + b",1\n", "line {} has more than 1048576 letters"),
        "x" * 60: (b"x" * 70_000 + b",0,nan,1\n", "line {} has 'nan'"),
    }
    content, line, wanted = HEADER.encode(), 2, []
    for number, (name, (text, why)) in enumerate(broken.items()):
        content += rows(f"before-{number}").encode() + text
        more = "..." if len(name) == 60 else ""
        wanted.append(f"serve: series {name!r}{more} is refused: {why.format(line + 3)}")
        line += 4
    path = tmp_path / "stream.csv"
    path.write_bytes(content + (rows('"q, ""u"""') + rows("last")).encode())
    served = serve_here(fine, path)
    assert served.code == 1
    assert names(served) == [*(f"before-{number}" for number in range(len(broken))), 'q, "u"', "last"]
    assert {answer["steps"] for answer in served.answers} == {3}
    *lines, last = served.said
    for one, other in zip(lines, wanted, strict=True):
        assert one.startswith(other)
        assert len(one) < 200
    assert f"{2 * len(broken) + 2} series, {len(broken) + 2} answers, {len(broken)} refused" in last


def test_a_row_that_ends_before_its_name_ends_the_series(fine: Path) -> None:
    """It may be one of its rows: half a series is not answered as a whole one."""
    text = "a,b,series\n1,1,s\n1,1,s\n1\n1,1,s\n1,1,t\n"
    served = serve_here(fine, text=text)
    assert names(served) == ["t"]
    assert served.said[0] == "serve: series 's' is refused: line 4 has 1 cells, the header 3"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("series,a,b,a\n", "there are two of 'a'"),
        ("Series,series,a,b\n", "there are two of 'Series'"),
        ("series,a,b," + "c" * 5000 + "\n", "ccc... is none of them"),
        ('series,a,b"\n', "line 1 has a quote that does not end"),
    ],
)
def test_a_header_that_does_not_fit_is_one_short_line(header: str, said: str, fine: Path) -> None:
    served = serve_here(fine, text=header)
    assert (served.code, served.answers) == (2, [])
    (line,) = served.said
    assert said in line
    assert len(line) < 400


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--window 1" + "0" * 30, "argument --window: must be 1 to 1000000000; got"),
        ("--threads 100000", "argument --threads: must be 1 to 1024; got '100000'"),
        ("--threads ٣", "argument --threads: must be 1 to 1024"),
        ("--longest 1_0", "argument --longest: must be 1 to"),
        ("--hop 2", "--hop says from one window to the next; it needs --window"),
    ],
)
def test_options_that_cannot_be(option: str, said: str, fine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        serve_here(fine, *option.split(), err=sys.stderr)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    served = serve_here(tmp_path / "none.onnx")
    assert (served.code, served.said) == (2, [f"serve: {tmp_path / 'none.onnx'}: No such file or directory"])


def shell(redirect: str, file: Path, text: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    line = f'exec "$0" "$1" "$2" {redirect}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, str(SERVE), str(file)],
        input=text.encode(),
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, **env},
    )


def test_closed_streams_and_other_alphabets(fine: Path) -> None:
    text = HEADER + rows("ü\u2028x")
    closed = shell(">&-", fine, text)
    assert (closed.returncode, closed.stderr) == (2, b"serve: stdout is closed, and answers go there\n")
    closed = shell("<&-", fine, text)
    assert (closed.returncode, closed.stderr) == (2, b"serve: stdin is closed, and no file was named\n")
    told = shell("", fine, text + "ü,0,nan,1\n", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert told.returncode == 1
    assert json.loads(told.stdout.decode("utf-8"))["series"] == "ü\u2028x"
    assert "series 'ü' is refused" in told.stderr.decode("utf-8")


@pytest.mark.slow
def test_refusals_never_come_among_the_answers(fine: Path) -> None:
    """With stderr closed, Python's print would write to stdout."""
    closed = shell("2>&-", fine, HEADER + rows("a") + "b,0,nan,1\n")
    assert closed.returncode == 1
    assert json.loads(closed.stdout)["series"] == "a"
