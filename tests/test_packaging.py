"""The wheel and the sdist: built, installed where nothing of this tree is, and used by two workers."""

from __future__ import annotations

import email
import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling, of the extra 'test'")

PAIR = """
import asyncio, pathlib, sys
import torch
import aiorlinf

assert pathlib.Path(aiorlinf.__file__).is_relative_to(sys.argv[1]), aiorlinf.__file__

async def main():
    async with aiorlinf.init() as comm:
        if comm.address == "rollout:0":
            await comm.send({"frames": torch.arange(300_000, dtype=torch.int32)}, "trainer:0")
            print(await comm.recv("trainer:0"))
        else:
            batch = await comm.recv("rollout:0")
            await comm.send(int(batch["frames"].sum()), "rollout:0")

asyncio.run(main())
"""


def _build(tree: Path, target: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    done = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def _sources() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "aiorlinf").rglob("*.py")} | {"aiorlinf/py.typed"}


def _contents(wheel: Path) -> tuple[dict[str, bytes], Message]:
    """The package's files, and what it says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (about,) = (text for name, text in files.items() if name.endswith(".dist-info/METADATA"))
    return {name: text for name, text in files.items() if ".dist-info/" not in name}, email.message_from_bytes(about)


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    files, about = _contents(wheel)
    assert set(files) == _sources()
    assert (about["Name"], about["Version"]) == ("aiorlinf", PROJECT["version"])
    assert about["Requires-Python"] == PROJECT["requires-python"]
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert "# aiorlinf" in str(about.get_payload())  # what an index shows of it


def test_the_sdist_is_enough_to_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(_build(ROOT, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("aiorlinf-*")
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "tests/test_packaging.py", "examples/async_rollout.py", "config/default.yaml"):
        assert (tree / name).is_file()
    again = _build(tree, tmp_path / "wheel", "wheel")
    assert again.name == wheel.name
    assert _contents(again)[0] == _contents(wheel)[0]


@pytest.mark.timeout(120)  # two processes that import torch, on a machine that may have other things to do
def test_two_workers_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(home), str(wheel)], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
    script = tmp_path / "pair.py"
    script.write_text(PAIR)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(home)}

    def aiorlinf(*args: str) -> str:
        command = [str(home / "bin" / "aiorlinf"), *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    assert aiorlinf("--version").startswith(f"aiorlinf {PROJECT['version']} (")
    assert aiorlinf("run", "--workers", "rollout=1,trainer=1", str(script), str(home)) == f"[rollout:0] {sum(range(300_000))}\n"
