"""The programs of the README run, and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiorlinf
from aiorlinf.cli import main
from scripts.benchmarks.__main__ import OTHERS, SUITES

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def _program(name: str, folder: Path) -> Path:
    """Save the block that begins with the name as a comment."""
    found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", README, re.DOTALL)
    assert found, f"no block named {name}"
    path = folder / name
    path.write_text(found[1])
    return path


def _run(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_workers(tmp_path: Path) -> None:
    _program("pair.py", tmp_path)
    found = re.search(r"```console\n\$ aiorlinf (run .* pair\.py)\n(.*?)```", README, re.DOTALL)
    assert found
    printed = _run(tmp_path, "-m", "aiorlinf", *found[1].split())
    assert sorted(printed) == sorted(found[2].splitlines())


def test_to_many_at_once(tmp_path: Path) -> None:
    _program("weights.py", tmp_path)
    found = re.search(r"```console\n\$ aiorlinf (run [^\n]* weights\.py)\n(.*?)```", README, re.DOTALL)
    assert found
    assert _run(tmp_path, "-m", "aiorlinf", *found[1].split()) == found[2].splitlines()


def test_a_channel(tmp_path: Path) -> None:
    _program("channels.py", tmp_path)
    printed = _run(tmp_path, "-m", "aiorlinf", "run", "--workers", "rollout=2,trainer=1", "channels.py")
    steps = [int(line.removeprefix("[trainer:0] ").removesuffix(" steps")) for line in printed]
    assert sum(steps) == 1200
    assert max(steps) <= 400


def test_one_worker_without_a_loop(tmp_path: Path) -> None:
    path = _program("alone.py", tmp_path)
    assert _run(tmp_path, path.name) == ["{'loss': 0.25}", "tensor([0., 1., 2., 3.]) tensor(6.)"]


def test_files_that_it_points_to_exist() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(targets) >= 3
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_example_is_named() -> None:
    programs = {path.name for path in (ROOT / "examples").glob("*.*") if path.suffix in (".py", ".ipynb")}
    assert programs - {name.removeprefix("examples/") for name in re.findall(r"\]\(([^)#:]+)\)", README)} == set()


def test_every_public_name_is_in_the_table() -> None:
    table = README.partition("## What there is\n")[2].partition("\n## ")[0]
    assert [name for name in aiorlinf.__all__ if not re.search(rf"\b{name}\b", table)] == []


def test_what_links_within_point_to_is_there() -> None:
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each `aiorlinf ...` that is named, with its options."""
    found: dict[str, set[str]] = {}
    for command, rest in re.findall(r"(?:`|^\$ |^|\"|= )aiorlinf ([a-z]+)([^`\n]*)", README, re.MULTILINE):
        if rest.startswith("("):
            continue
        own = re.sub(r" \w+\.py .*", "", rest)  # what follows a script is the script's
        found.setdefault(command, set()).update(re.findall(r" (--[a-z-]+)", own))
    assert len(found) >= 9
    for command, options in found.items():
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0, command
        text = capsys.readouterr().out
        assert [option for option in options if option not in text] == [], command


def test_scripts_exist() -> None:
    named = re.findall(r"scripts/([\w-]+)(?: ([a-z]\w+))?", README)
    assert [name for name, _ in named if not (ROOT / "scripts" / name).exists()] == []
    benchmarks = {what for name, what in named if name == "bench" and what}
    assert benchmarks
    assert benchmarks <= {*SUITES, *OTHERS}
