"""``scripts/bench collectives`` runs, and prints a figure for each measurement. That they are good figures is not for a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(100)
def test_all_of_it_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", "collectives", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"one transfer of 1 MiB on this host +[0-9.]+ ms", done.stdout)
    assert re.findall(r"broadcast to (\d) +[0-9.]+ ms, [0-9.]+ times as long", done.stdout) == ["1", "2", "4"]
    exchanges = re.findall(r"^(gather|all_to_all) of tensors of (1 KiB|1 MiB) +[0-9.]+ ms +[0-9.]+ ms$", done.stdout, re.MULTILINE)
    assert exchanges == [("gather", "1 KiB"), ("all_to_all", "1 KiB"), ("gather", "1 MiB"), ("all_to_all", "1 MiB")]
