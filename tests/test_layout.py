"""Rules about the tree itself: public names, docstrings, what lies at the top, what may not be written anywhere."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "aiorlinf").rglob("*.py"))
TOP = ROOT / "aiorlinf" / "__init__.py"
AT_THE_TOP = {"CHANGELOG.md", "LICENSE", "README.md", "aiorlinf", "config", "examples", "pyproject.toml", "scripts", "tests"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _files_of_the_tree() -> list[Path]:
    """What git has or would take; in a tree without git, everything that is not hidden."""
    if not (ROOT / ".git").exists():
        return [
            path for path in ROOT.rglob("*") if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.parts)
        ]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _defined_here(module: ModuleType) -> Iterator[str]:
    """Functions and classes without an underscore that the module itself defines."""
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and isinstance(value, type | type(_name_of)):
            yield name


def test_each_module_has_a_docstring_and_lists_its_public_names() -> None:
    wrong = []
    for path in SOURCES:
        name = _name_of(path)
        if not ast.get_docstring(ast.parse(path.read_text())):
            wrong.append(f"{name}: no docstring")
        if path.name == "__main__.py":
            continue
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", None)
        if listed is None:
            wrong.append(f"{name}: no __all__")
            continue
        wrong += [f"{name}: {public} is listed twice" for public in {public for public in listed if listed.count(public) > 1}]
        wrong += [f"{name}: {public} is listed, but not there" for public in listed if not hasattr(module, public)]
        wrong += [f"{name}: {public} is public, but not listed" for public in _defined_here(module) if public not in listed]
        wrong += [
            f"{name}: {public} has no docstring"
            for public in listed
            if public in set(_defined_here(module)) and not getattr(module, public).__doc__
        ]
    assert wrong == []


def test_each_folder_of_the_package_is_a_package() -> None:
    # Python would import from a folder without the marker all the same, but the check of the imports would pass it over.
    folders = {path.parent for path in SOURCES}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_no_module_imports_from_the_top_of_the_package() -> None:
    # The top imports everything; the contract for one-way imports, which is about its parts, does not see this.
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())) if path != TOP else ():
            names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "aiorlinf":
                wrong += [f"{_name_of(path)}: {name}" for name in names if not (ROOT / "aiorlinf" / name).is_dir()]
            elif isinstance(node, ast.Import) and "aiorlinf" in names:
                wrong.append(f"{_name_of(path)}: aiorlinf")
    assert wrong == []


def test_importing_the_package_starts_nothing() -> None:
    program = (
        "import json, sys, threading, torch\n"
        "from aiorlinf.testing.leaks import Snapshot\n"
        "seen = Snapshot.take()\n"
        "import aiorlinf\n"
        "left = [str(leak) for leak in Snapshot.take().leaks_since(seen)]\n"
        "print(json.dumps([left, threading.active_count(), torch.cuda.is_initialized(), 'aiorlinf' in sys.modules]))\n"
    )
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [[], 1, False, True]


def _silent_broad_excepts(path: Path) -> Iterator[int]:
    with path.open("rb") as file:
        commented = {token.start[0] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
        passes_it_on = any(isinstance(part, ast.Raise) and part.exc is None for part in ast.walk(node))
        # From the line before it down to the end of its first statement.
        near = range(node.lineno - 1, (node.body[0].end_lineno or node.lineno) + 1)
        if broad and not passes_it_on and commented.isdisjoint(near):
            yield node.lineno


def test_a_broad_except_says_why() -> None:
    assert [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in _silent_broad_excepts(path)] == []


def test_nothing_else_lies_at_the_top() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in _files_of_the_tree()}
    assert {name for name in top if not name.startswith(".")} - AT_THE_TOP == set()


def test_nothing_is_left_for_later() -> None:
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X"]
    found = []
    for path in _files_of_the_tree():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []


def test_test_files_need_no_package_marker() -> None:
    # With pytest's importlib mode, __init__.py would give the same file two module names.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_installed_package_is_this_one() -> None:
    project = PYPROJECT["project"]
    try:
        installed = importlib.metadata.version("aiorlinf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a source tree that is not installed")
    assert installed == project["version"]
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="aiorlinf")
    assert callable(script.load())
    assert set(project["optional-dependencies"]) == {"test", "examples", "ray", "observe"}
    assert (ROOT / "aiorlinf" / "py.typed").exists()


def test_the_versions_that_ci_installs_meet_what_the_package_asks_for() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    pinned = {}
    for line in (ROOT / "scripts" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            assert separator, f"not an exact version: {line}"
            pinned[name.lower().replace("_", "-")] = version
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["test"] + extras["examples"] + extras["observe"]:
        requirement = requirements.Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), text


@pytest.mark.parametrize("name", ["scripts/bench", "scripts/check", "scripts/demo", "scripts/test", ".ci/run"])
def test_a_script_can_be_run(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)
