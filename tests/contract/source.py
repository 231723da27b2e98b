"""The source files that the contract tests read, and what of them is docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "headwise"


def source_files() -> list[Path]:
    """Every Python file of the library."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no Python file below {PACKAGE}"
    return files


def module_name(path: Path) -> str:
    """`.../src/headwise/core/masks.py` -> `headwise.core.masks`; a package has its folder's name."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstring_lines(tree: ast.AST) -> set[int]:
    """The line numbers of every docstring in a module, class or function, nested ones too."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                assert first.end_lineno is not None
                lines.update(range(first.lineno, first.end_lineno + 1))
    return lines
