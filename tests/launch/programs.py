"""Small programs for the tests of the launcher, and looks at what became of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["ROOT", "alive", "child_env", "cli", "pids_in", "script", "start_cli", "wait_until"]

ROOT = Path(__file__).parents[2]

_PRELUDE = """
import os, signal, subprocess, sys, time
ME = os.environ.get("AIORLINF_ADDRESS", "?")
def note(name, pid=None):
    path = f"{sys.argv[1]}/{name}"
    with open(path + ".new", "w") as file:
        file.write(str(pid or os.getpid()))
    os.rename(path + ".new", path)
"""


def script(folder: Path, text: str, name: str = "worker.py") -> Path:
    """A program with a few names ready: ``ME``, its address, and ``note(name)``, which leaves its pid in its argument, a folder."""
    path = folder / name
    path.write_text(_PRELUDE + textwrap.dedent(text), encoding="utf-8")
    return path


def child_env(**more: str) -> dict[str, str]:
    """An environment in which this package is found."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def cli(*args: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "aiorlinf", *map(str, args)],
        cwd=cwd,
        env=env or child_env(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )


def start_cli(*args: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "aiorlinf", *map(str, args)],
        cwd=cwd,
        env=child_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        process_group=0,
    )


def wait_until(condition: Callable[[], bool], what: str, limit: float = 20) -> None:
    """Look again and again."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"not within {limit} s: {what}"
        time.sleep(0.01)


def pids_in(folder: Path, names: Sequence[str]) -> list[int]:
    """The pids that programs left there by `note`, once all have."""
    wait_until(lambda: all((folder / name).exists() for name in names), f"{names} in {folder}")
    return [int((folder / name).read_text()) for name in names]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
