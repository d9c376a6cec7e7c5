"""Runs a program of a few lines in an interpreter of its own, as a user would."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["ROOT", "run_script"]

ROOT = Path(__file__).resolve().parents[2]


def run_script(
    folder: Path, source: str, name: str = "script.py", *, limit: float = 50.0, debug: bool = True
) -> subprocess.CompletedProcess[str]:
    """Write `source` into the folder and run it there, in asyncio's debug mode or not; it must end within `limit` seconds."""
    (folder / name).write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONASYNCIODEBUG": "1" if debug else ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
