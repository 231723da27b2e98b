"""Files, classes and forwards stay short enough to be read: 500, 150 and 40 lines.

A file's docstring lines are not counted; in a class or a `forward`, neither are comments and blank lines.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest
from tests.contract.source import PACKAGE, docstring_lines, source_files

FILE_LINES, CLASS_LINES, FORWARD_LINES = 500, 150, 40

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def over_budget(text: str) -> list[str]:
    """What in this source is too long, as sentences."""
    tree = ast.parse(text)
    documented = docstring_lines(tree)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= documented

    problems = []
    if (length := len(set(range(1, len(text.splitlines()) + 1)) - documented)) > FILE_LINES:
        problems.append(f"the file has {length} lines without docstrings; at most {FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            kind, most = "class", CLASS_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "forward":
            kind, most = "function", FORWARD_LINES
        else:
            continue
        assert node.end_lineno is not None
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if (length := len(code & set(range(first, node.end_lineno + 1)))) > most:
            problems.append(f"line {node.lineno}: {kind} {node.name} has {length} lines of code; at most {most}")
    return problems


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_within_budget(path: Path) -> None:
    assert over_budget(path.read_text("utf-8")) == []


def lines(number: int, indent: int = 0) -> str:
    return (" " * indent + "x = 1\n") * number


DOC = '"""One.\n\nTwo.\n"""\n'
METHOD = """\
class A:
    '''Doc.'''

    # A remark.
    def forward(self):
        '''Doc.

        More.
        '''

"""


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (DOC + lines(500), []),
        (DOC + lines(501), ["the file has 501 lines without docstrings; at most 500"]),
        (lines(400) + "# remark\n" * 101, ["the file has 501 lines without docstrings; at most 500"]),
        (METHOD + lines(39, 8), []),
        (METHOD + lines(40, 8), ["line 5: function forward has 41 lines of code; at most 40"]),
        (METHOD + "        # remark\n\n" * 40 + lines(39, 8), []),
        ("class A:\n" + lines(149, 4), []),
        ("@final\nclass A:\n" + lines(149, 4), ["line 2: class A has 151 lines of code; at most 150"]),
        ("class A:\n    x = '''\n" + "a\n" * 149 + "'''\n", ["line 1: class A has 152 lines of code; at most 150"]),
    ],
)
def test_the_counter(text: str, problems: list[str]) -> None:
    assert over_budget(text) == problems
