"""Makes `docs/tools.md` of the last run of `make test-tools`: `python -m tests.tools.page [--check]`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "build" / "tools.json"
PAGE = _ROOT / "docs" / "tools.md"
BEGIN, END = "<!-- made by make tools-page; do not edit from here -->", "<!-- to here -->"


def table(found: list[dict[str, Any]]) -> str:
    """The rows in the order of the tools' numbers.

    Raises:
        ValueError: what a test says of torch does not fit what happened.
    """
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        key = (one["order"], one["tool"], one["holds"], one.get("package", "torch"), one.get("torch"))
        rows.setdefault(key, []).append(one)
    lines = ["| tool | version | what must hold | torch's layer | ours |", "|---|---|---|---|---|"]
    faults = []
    for key in sorted(rows, key=lambda key: (key[0], key[1], key[2])):
        _, tool, holds, package, why = key
        theirs = [one["held"] for one in rows[key] if one["side"] == "torch"]
        ours = [one["held"] for one in rows[key] if one["side"] != "torch"]
        if theirs and (why is None) != all(theirs):
            faults.append(f"{tool}, {holds!r}: torch held {sum(theirs)} of {len(theirs)}, and the test says: {why}")
        if not ours:
            faults.append(f"{tool}, {holds!r}: not run on ours")
        said = why or "-"
        if theirs:
            said = _count(theirs) + ("" if why is None else f": {why}")
        version = importlib.metadata.version(package).partition("+")[0]
        lines.append(f"| {tool} | {package} {version} | {holds} | {said} | {_count(ours)} |")
    if faults:
        raise ValueError("\n".join(faults))
    return "\n".join(lines) + "\n"


def _count(held: list[bool]) -> str:
    if all(held):
        return f"yes ({len(held)})"
    return f"no ({len(held)})" if not any(held) else f"{sum(held)} of {len(held)}"


def main(arguments: list[str]) -> int:
    """Write the page, or with --check say whether it is what the run found."""
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n\n{table(json.loads(RESULTS.read_text()))}\n{END}{after}"
    if arguments == ["--check"]:
        if made != page:
            print("docs/tools.md is not what this run found: make tools-page, and look at the difference")
            return 1
        print("docs/tools.md is what this run found")
        return 0
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
