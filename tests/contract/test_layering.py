"""Who imports whom: the table of section 3 of docs/design.md, read from the imports with `ast`.

Held: a package imports only the packages of ours that the table allows; at module level it loads torch and the standard
library only; an optional library is loaded inside functions, and only where the table names it. `need("x", ...)` and
`import_module("x")` count as imports.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.contract.source import PACKAGE, ROOT, module_name, source_files

# Each package or top module -> what of ours it may import, besides itself, `_checks` and `_files`.
MODEL_PARTS = frozenset({"core", "layers", "experts"})
EVERYTHING = frozenset(
    {"__init__", "models", "quant", "export", "observe", "data", "train", "serve", "pipelines", "cli"} | MODEL_PARTS
)
OURS: dict[str, frozenset[str]] = {
    "__init__": MODEL_PARTS | {"models", "quant", "export", "observe"},
    "_checks": frozenset(),
    "_files": frozenset(),
    "core": frozenset(),
    "layers": frozenset({"core"}),
    "experts": frozenset({"core"}),
    "models": MODEL_PARTS | {"quant"},
    "quant": MODEL_PARTS,
    "export": MODEL_PARTS | {"quant"},
    "observe": MODEL_PARTS,
    "data": frozenset({"train"}),
    "train": frozenset({"data"}),
    "serve": frozenset({"models", "data", "quant", "export", "observe"}),
    "pipelines": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": EVERYTHING,
}

# Optional libraries, by import name. The training engine (train) and the HTTP library (serve) join once chosen.
OPTIONAL: dict[str, frozenset[str]] = {
    "models": frozenset({"safetensors"}),
    "export": frozenset({"sympy", "onnx_ir", "onnx", "onnxruntime", "onnxscript", "torchao", "executorch"}),
    "observe": frozenset({"prometheus_client", "matplotlib"}),
    "data": frozenset({"tokenizers"}),
    "train": frozenset({"tokenizers"}),
    "pipelines": frozenset({"safetensors", "matplotlib", "onnx", "onnxruntime", "executorch"}),
    "cli": frozenset({"typer", "rich"}),
}

EARLY = "is optional, load it inside a function"
UNKNOWN = "is not in the table: decide who may import whom in docs/design.md, then here"
UNREADABLE = "loads a module by a name that this test cannot read; write the name out"

ALWAYS = sys.stdlib_module_names | {"torch"}


@dataclass(frozen=True)
class Import:
    """One import: `target` is absolute, `late` means that it runs inside a function or never (TYPE_CHECKING)."""

    target: str
    line: int
    late: bool
    extra: str | None = None  # of need(target, extra)


class Reader(ast.NodeVisitor):
    """Collects a module's imports, relative ones made absolute, and loads by name."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.package = module.split(".") if is_package else module.split(".")[:-1]
        self.imports: list[Import] = []
        self.unreadable: list[int] = []
        self.late = False

    def add(self, target: str, node: ast.AST, extra: str | None = None) -> None:
        self.imports.append(Import(target, node.lineno, self.late, extra))

    def visit_late(self, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        before, self.late = self.late, True
        for node in nodes:
            self.visit(node)
        self.late = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for now in (*node.decorator_list, node.args):  # these run where the function is defined
            self.visit(now)
        self.visit_late(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self.visit_late([node.body])

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.visit_late(node.body)
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        base = [*base, *(node.module.split(".") if node.module else [])]
        if base == ["headwise"]:  # `from headwise import core` names a package of ours, or else a public name
            for alias in node.names:
                self.add(f"headwise.{alias.name}" if alias.name in OURS else "headwise", node)
        else:
            self.add(".".join(base), node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("need", "import_module", "__import__"):
            texts = [literal(part) for part in (*node.args, *(word.value for word in node.keywords))]
            target, extra = (*texts, None, None)[:2]
            if target is None:
                self.unreadable.append(node.lineno)
            else:
                self.add(target, node, extra if name == "need" else None)
        self.generic_visit(node)


def literal(node: ast.expr) -> str | None:
    """A string that is written out; of `f"rich.{name}"`, what stands before the last dot that does."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return str(node.values[0].value).rpartition(".")[0] or None
    return None


def read(text: str, module: str, is_package: bool = False) -> Reader:
    reader = Reader(module, is_package)
    reader.visit(ast.parse(text))
    return reader


def unit(module: str) -> str:
    """The row of the table that a module of ours belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def problems(text: str, module: str, is_package: bool = False) -> Iterator[str]:
    """What in this source breaks the table, as sentences."""
    me = unit(module)
    if me not in OURS:
        yield f"headwise.{me} {UNKNOWN}"
        return
    reader = read(text, module, is_package)
    for found in reader.imports:
        top = found.target.partition(".")[0]
        if top == "headwise":
            other = unit(found.target)
            if other not in (me, "_checks", "_files") and other not in OURS[me]:
                yield f"line {found.line}: {me} may not import {found.target}"
        elif top in ALWAYS:
            continue
        elif top not in OPTIONAL.get(me, ()):
            yield f"line {found.line}: {me} may not use {top}"
        elif not found.late:
            yield f"line {found.line}: {top} {EARLY}"
    if me not in ("_checks", "__init__"):
        for line in reader.unreadable:
            yield f"line {line}: {UNREADABLE}"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path: Path) -> None:
    found = problems(path.read_text("utf-8"), module_name(path), is_package=path.name == "__init__.py")
    assert list(found) == []


def test_table_has_the_rows_of_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text("utf-8")
    table = re.search(r"^\| package \| may import.*\n\|[-| ]+\n((?:\|.*\n)+)", design, re.MULTILINE)
    assert table, "docs/design.md has no table '| package | may import ...'"
    rows = [row.split("|")[1] for row in table[1].splitlines()]
    assert {name.strip() for row in rows for name in row.split(",")} == OURS.keys() - {
        "__init__",
        "__main__",
        "_checks",
        "_files",
    }


def test_optional_libraries_have_an_extra() -> None:
    """need(module, extra) names an extra that installs the module, and an extra installs nothing that no code loads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {
        name: {re.split(r"[^\w.-]", requirement)[0].replace("-", "_").lower() for requirement in requirements}
        for name, requirements in project["optional-dependencies"].items()
        if name not in ("all", "dev")
    }
    loaded: set[str] = set()
    for path in source_files():
        for found in read(path.read_text("utf-8"), module_name(path), path.name == "__init__.py").imports:
            top = found.target.partition(".")[0]
            loaded.add(top.lower())
            if found.extra is not None:
                assert top.lower() in extras.get(found.extra, set()), f"{path}:{found.line}: {found.extra} lacks {top}"
    assert set().union(*extras.values()) <= loaded


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("core.masks", "import math\nimport torch\nfrom torch import nn\nfrom .._checks import need", []),
        ("core.masks", "from . import cache\nfrom headwise.core.cache import Cache\nimport headwise._checks", []),
        ("core.masks", "from ..layers import blocks", ["line 1: core may not import headwise.layers"]),
        ("core.masks", "from .. import layers", ["line 1: core may not import headwise.layers"]),
        ("core.masks", "import headwise.observe.probes", ["line 1: core may not import headwise.observe.probes"]),
        ("core.masks", "from headwise import attention", ["line 1: core may not import headwise"]),
        ("core.masks", "def f():\n    from headwise import layers", ["line 2: core may not import headwise.layers"]),
        ("core.masks", "import_module('headwise.layers')", ["line 1: core may not import headwise.layers"]),
        ("core.masks", "def f():\n    import numpy", ["line 2: core may not use numpy"]),
        ("core.masks", "try:\n    import numpy\nexcept ImportError: pass", ["line 2: core may not use numpy"]),
        ("layers.blocks", "import headwise.experts", ["line 1: layers may not import headwise.experts"]),
        ("quant.state", "from ..observe import probes", ["line 1: quant may not import headwise.observe"]),
        ("train.loop", "from headwise import data, models", ["line 1: train may not import headwise.models"]),
        ("observe.heatmap", "def f():\n    import matplotlib.figure", []),
        ("observe.heatmap", "def f():\n    return need('matplotlib.figure', 'observe')", []),
        ("observe.heatmap", "if TYPE_CHECKING:\n    from matplotlib.figure import Figure", []),
        ("observe.heatmap", "import matplotlib", [f"line 1: matplotlib {EARLY}"]),
        ("observe.heatmap", "class A:\n    m = need('matplotlib', 'observe')", [f"line 2: matplotlib {EARLY}"]),
        ("observe.heatmap", "def f(m=need('matplotlib', 'observe')): ...", [f"line 1: matplotlib {EARLY}"]),
        ("observe.heatmap", "def f(name):\n    return need(name, 'observe')", [f"line 2: {UNREADABLE}"]),
        (
            "observe.heatmap",
            "def f(x):\n    return need(f'rich.{x}', 'cli')",
            ["line 2: observe may not use rich"],
        ),
        ("observe.heatmap", "def f():\n    import typer", ["line 2: observe may not use typer"]),
        ("cli.main", "from .. import pipelines, __version__\nfrom ..core import masks\ndef f():\n    import typer", []),
        ("", "from .core.multihead import MultiheadAttention", []),
        ("", "from . import cli", ["line 1: __init__ may not import headwise.cli"]),
        ("novelty", "", [f"headwise.novelty {UNKNOWN}"]),
    ],
)
def test_the_reader(module: str, text: str, expected: list[str]) -> None:
    name = f"headwise.{module}" if module else "headwise"
    assert list(problems(text, name, is_package=not module)) == expected
