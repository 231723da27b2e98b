"""The repository is fit to be given away.

No trace of one machine, a changelog in form, documented public names, complete pins, a wheel that holds the package.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest
from tests.contract.source import PACKAGE, ROOT

import headwise

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

# Written with character classes, so that this file does not hold what it looks for.
TRACES = re.compile(
    rb"(?<![\w.~-])[/](?:root|work)[/]|(?<![\w.~-])[/](?:home|Users)[/][A-Za-z]|file[:]///"
    rb"|index[-_]url|find[-_]links|(?:pypi|pythonhosted|testpypi)[.]org|download[.]pytorch",
    re.IGNORECASE,
)


def repository_files() -> list[Path]:
    """Tracked files, and untracked ones that git does not ignore; without git, all but hidden and built ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        names = [name.decode() for name in done.stdout.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        every = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        built = re.compile(r"(^|/)(\.\w+|__pycache__|build|dist|demo-output)(/|$)")
        names = [str(name) for name in every if not built.search(str(name))]
    files = [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in files
    return files


def test_no_trace_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{content.count(10, 0, trace.start()) + 1}: {trace[0].decode()}"
        for path in repository_files()
        for content in [path.read_bytes()]
        for trace in TRACES.finditer(content)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("see /" + "root/x", True),
        ('"/' + 'home/ann/x"', True),
        ("cd /" + "work/main", True),
        ("file" + ":///opt/x", True),
        ("pip install --index" + "-url x", True),
        ("PIP_FIND" + "_LINKS=x", True),
        ("https://pypi" + ".org/simple", True),
        ("https://example.com/home/page and tests/work/x, /usr/bin, /homepage, frame/work/", False),
    ],
)
def test_traces_are_caught(text: str, caught: bool) -> None:
    assert bool(TRACES.search(text.encode())) == caught


# --- The changelog ------------------------------------------------------------------------------------------------


def changelog_problems(text: str) -> list[str]:
    """How this text departs from the headings of keepachangelog.com, as sentences."""
    problems = []
    headings = re.findall(r"^(#+) (.*?)\s*$", text, re.MULTILINE)
    if headings[:1] != [("#", "Changelog")]:
        problems.append("the first heading is not '# Changelog'")
    versions: list[tuple[int, ...]] = []
    for number, (level, title) in enumerate(heading for heading in headings if heading[0] == "##"):
        assert level == "##"
        if title == "[Unreleased]":
            if number:
                problems.append("[Unreleased] is not the first section")
        elif match := re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)(?: \[YANKED\])?", title):
            versions.append(tuple(int(part) for part in match.groups()[:3]))
            try:
                datetime.date.fromisoformat(match[4])
            except ValueError:
                problems.append(f"{match[4]} is not a date")
        else:
            problems.append(f"'## {title}' is neither '## [Unreleased]' nor '## [1.2.3] - 2026-01-31'")
    if versions != sorted(set(versions), reverse=True):
        problems.append("versions do not go down")
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for level, title in headings:
        if level == "###" and title not in kinds:
            problems.append(f"'### {title}' is none of {sorted(kinds)}")
    if not any(level == "##" for level, _ in headings):
        problems.append("there is no section")
    return problems


def test_changelog_keeps_the_form() -> None:
    path = ROOT / "CHANGELOG.md"
    assert path.is_file(), "CHANGELOG.md is missing"
    assert changelog_problems(path.read_text("utf-8")) == []


GOOD = """\
# Changelog

## [Unreleased]

### Added

- x

## [0.2.0] - 2026-02-03

### Fixed

## [0.1.0] - 2026-01-31
"""
KINDS = "['Added', 'Changed', 'Deprecated', 'Fixed', 'Removed', 'Security']"


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ("", "", []),
        ("# Changelog\n\n", "", ["the first heading is not '# Changelog'"]),
        ("[0.2.0]", "[0.0.2]", ["versions do not go down"]),
        ("2026-01-31", "2026-02-31", ["2026-02-31 is not a date"]),
        ("[0.1.0]", "v0.1", ["'## v0.1 - 2026-01-31' is neither '## [Unreleased]' nor '## [1.2.3] - 2026-01-31'"]),
        ("### Fixed", "## [Unreleased]", ["[Unreleased] is not the first section"]),
        ("### Fixed", "### News", [f"'### News' is none of {KINDS}"]),
    ],
)
def test_the_reader_of_changelogs(old: str, new: str, problems: list[str]) -> None:
    assert changelog_problems(GOOD.replace(old, new)) == problems


# --- The public names ---------------------------------------------------------------------------------------------


def undocumented(names: list[str], module: types.ModuleType) -> list[str]:
    """The names that do not resolve, or have no docstring of their own: an inherited one says nothing about them."""
    problems = []
    for name in names:
        if not hasattr(module, name):
            problems.append(f"{name} does not resolve")
            continue
        value = getattr(module, name)
        doc = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        if not re.fullmatch(r"__\w+__", name) and not (doc or "").strip():
            problems.append(f"{name} has no docstring")
    return problems


def test_public_names_resolve_and_are_documented() -> None:
    assert headwise.__all__, "headwise has no public names"
    assert len(set(headwise.__all__)) == len(headwise.__all__)
    assert undocumented(list(headwise.__all__), headwise) == []


def test_the_check_of_public_names() -> None:
    class Documented:
        """Words."""

    class Inherits(Documented):
        pass

    module = types.ModuleType("sample")
    empty = types.ModuleType("empty")
    vars(module).update(
        good=Documented, also=undocumented, heir=Inherits, bare=lambda: None, empty=empty, __version__="1"
    )
    names = ["good", "also", "heir", "bare", "empty", "missing", "__version__"]
    expected = [f"{name} has no docstring" for name in ("heir", "bare", "empty")]
    assert undocumented(names, module) == [*expected, "missing does not resolve"]


# --- Versions, pins, the wheel ------------------------------------------------------------------------------------


def test_one_version() -> None:
    assert importlib.metadata.version("headwise") == PROJECT["version"]
    assert getattr(headwise, "__version__", PROJECT["version"]) == PROJECT["version"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_are_exact_and_complete() -> None:
    """Each line is `name==version`, without a local version, and all that the extras bring in is there."""
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    pins = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines)
    assert lines == sorted(lines, key=str.lower)
    pinned = {normal(name): version for name, version in pins.items()}

    from packaging.requirements import Requirement  # pytest brings it

    todo = [Requirement("headwise[all,dev]")]
    seen: set[str] = set()
    while todo:
        want = todo.pop()
        for extra in {"", *want.extras}:
            if (key := f"{normal(want.name)}[{extra}]") in seen:
                continue
            seen.add(key)
            for requirement in map(Requirement, importlib.metadata.requires(want.name) or []):
                # torch's builds for accelerators bring vendor libraries, whose versions torch itself fixes.
                vendor = want.name == "torch" and re.match(r"nvidia|cuda|triton", requirement.name)
                if not vendor and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
                    todo.append(requirement)
    missing = {key.partition("[")[0] for key in seen} - pinned.keys() - {"headwise"}
    assert missing == set()


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"headwise-{PROJECT['version']}.dist-info"
    assert f"{info}/licenses/LICENSE" in names
    shipped = {name for name in names if not name.startswith(f"{info}/")}
    ours = {str(path.relative_to(PACKAGE.parent)) for path in repository_files() if path.is_relative_to(PACKAGE)}
    assert shipped == ours
    assert "headwise/py.typed" in shipped


@pytest.mark.parametrize("target", PROJECT["scripts"].values())
def test_script_resolves(target: str) -> None:
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
