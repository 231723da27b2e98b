"""The READMEs run: each Python block alone, warnings as errors; make targets exist; both languages have the same code.

A fence holds what a reader copies: `python` runs here, `sh` names make targets. What is not to be run (output, a
drawing) is `text`.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
import tokenize
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.contract.source import ROOT

from headwise.cli import main

READMES = ("README.md", "README.zh-CN.md")
# Whose `headwise` commands run here too, and which of them must be there. What else a page has is run by tests/e2e.
OF_CLASSIFY, OF_EDGE = {"train", "predict", "heatmap"}, {"train", "quantize", "export"}
COMMANDS = {**dict.fromkeys((*READMES, "docs/classify.md"), OF_CLASSIFY), "docs/edge-cli.md": OF_EDGE}
PAGES = (
    *COMMANDS,
    "docs/upgrade.md",
    "docs/attention.md",
    "docs/observe.md",
    "docs/observe-story.md",
    "docs/edge.md",
)  # whose code runs here too
SHELL = ("sh", "bash", "shell", "console")
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^\n]*$")


@dataclass(frozen=True)
class Block:
    file: str
    line: int  # of the first line of code
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks_of(text: str, file: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    found, opened, code = [], None, []
    for number, line in enumerate(text.splitlines(), 1):
        if opened is None:
            if opened := FENCE.match(line):
                start, code = number + 1, []
        elif line.strip().startswith(opened["fence"]) and set(line.strip()) == {opened["fence"][0]}:
            found.append(Block(file, start, opened["language"].lower(), "".join(f"{row}\n" for row in code)))
            opened = None
        else:
            code.append(line.removeprefix(opened["indent"]))
    assert opened is None, f"{file}:{start - 1}: this fence is never closed"
    return found


def readme_blocks(file: str, *languages: str) -> list[Block]:
    """The blocks of a README; none while it does not exist, for `test_readmes_exist` says so."""
    path = ROOT / file
    blocks = blocks_of(path.read_text("utf-8"), file) if path.exists() else []
    return [block for block in blocks if not languages or block.language in languages]


def run(block: Block, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run a block as a script of its own, in an empty folder; a traceback shows the README's own lines."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile("\n" * (block.line - 1) + block.code, str(ROOT / block.file), "exec", dont_inherit=True)
        exec(program, main.__dict__)


def make_targets(code: str) -> list[str]:
    """The targets that shell lines call: `make demo ARGS=...` -> demo."""
    targets = []
    for line in code.splitlines():
        for command in re.split(r"&&|\|\||[;|]", line.partition("#")[0].strip().removeprefix("$ ")):
            words = command.split()
            if words[:1] == ["make"]:
                targets += [word for word in words[1:] if re.fullmatch(r"[A-Za-z][\w-]*", word)]
    return targets


def without_comments(block: Block) -> str:
    """The code that must agree between languages: no comments, no trailing blanks, no blank lines."""
    code = block.code
    if block.language == "python":
        rows = code.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                rows[token.start[0] - 1] = rows[token.start[0] - 1][: token.start[1]]
        code = "\n".join(rows)
    elif block.language in (*SHELL, "yaml", "toml"):
        code = re.sub(r"(^|\s)#.*", "", code, flags=re.MULTILINE)
    elif block.language in ("", "text", "mermaid"):
        code = ""  # drawings and output may be translated
    return "\n".join(row.rstrip() for row in code.splitlines() if row.strip())


@pytest.mark.parametrize("file", READMES)
def test_readmes_exist_with_python_and_shell(file: str) -> None:
    assert (ROOT / file).is_file(), f"{file} is missing"
    assert readme_blocks(file, "python"), f"{file} has no ```python block"
    assert any(make_targets(block.code) for block in readme_blocks(file, *SHELL)), f"{file} calls no make target"


# The Chinese README's code is the English one's, which test_both_languages_have_the_same_code holds.
def _param(value: Block | str) -> Any:
    return pytest.param(value, marks=[pytest.mark.slow] if "zh-CN" in str(value) else [])


PYTHON = [_param(block) for file in PAGES for block in readme_blocks(file, "python")]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_runs(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(block, monkeypatch, tmp_path)


def write_recordings(folder: Path) -> None:
    """The files that the commands name: ten series of the README's form, twice, and once without labels."""
    steps = [
        (f"{label}-{index}", label, 20 * step, 0.1 * step * sign, 0.5 * index)
        for label, sign in (("walk", 1), ("rest", -1))
        for index in range(5)
        for step in range(4 + index)
    ]
    rows = [",".join(map(str, row)) for row in steps]
    (folder / "recordings.csv").write_text("\n".join(["series,label,time (ms),acc_x,acc_y", *rows]) + "\n", "utf-8")
    (folder / "labelled.csv").write_text((folder / "recordings.csv").read_text("utf-8"), "utf-8")
    rows = [f"{name},{time},{x},{y}" for name, _, time, x, y in steps]
    (folder / "new.csv").write_text("\n".join(["series,time (ms),acc_x,acc_y", *rows]) + "\n", "utf-8")


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.slow if words >= OF_EDGE else ()) for file, words in COMMANDS.items()]
)
def test_headwise_commands_run(file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In their order, in one folder; trained for a moment only."""
    monkeypatch.chdir(tmp_path)
    write_recordings(tmp_path)
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in readme_blocks(file, *SHELL)
        for line in block.code.splitlines()
        if line.startswith("headwise ") and not line.startswith("headwise benchmark")  # minutes
    ]
    assert {words[0] for words in commands} >= COMMANDS[file]
    for words in commands:
        with pytest.raises(SystemExit) as stopped:
            main([*words, *(["--epochs", "2"] if words[0] == "train" else [])])
        assert stopped.value.code == 0, words
        if "--output" in words:
            assert (tmp_path / words[words.index("--output") + 1]).exists()


@pytest.mark.parametrize("block", [block for file in READMES for block in readme_blocks(file, *SHELL)], ids=str)
def test_make_targets_exist(block: Block) -> None:
    real = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(make_targets(block.code)) <= real, str(block)


def test_both_languages_have_the_same_code() -> None:
    first, second = ([(block.language, without_comments(block)) for block in readme_blocks(file)] for file in READMES)
    assert first == second


EXAMPLE = """\
Text, and `inline`.

```python
import torch  # a remark

x = "# no remark"
```

1. In a list:

   ```sh
   # make nothing
   $ make test && make demo ARGS="--fast"  # make more
   ```

~~~~text
```python
raise
```
~~~~
"""


def test_the_reader_of_blocks() -> None:
    python, shell, text = blocks_of(EXAMPLE, "X.md")
    assert (str(python), python.language) == ("X.md:4", "python")
    assert without_comments(python) == 'import torch\nx = "# no remark"'
    assert (str(shell), shell.code.splitlines()[0]) == ("X.md:12", "# make nothing")
    assert make_targets(shell.code) == ["test", "demo"]
    assert without_comments(shell) == '$ make test && make demo ARGS="--fast"'
    assert (text.language, without_comments(text)) == ("text", "")
    with pytest.raises(AssertionError, match=r"X\.md:1: this fence is never closed"):
        blocks_of("```python\nx\n", "X.md")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import warnings\nwarnings.warn('old', DeprecationWarning)", DeprecationWarning),
        ("assert 1 == 2", AssertionError),
        ("undefined", NameError),
    ],
)
def test_a_bad_block_fails(code: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        run(Block("X.md", 7, "python", code), monkeypatch, tmp_path)
    assert caught.traceback[-1].lineno + 1 == 7 + code.count("\n")
