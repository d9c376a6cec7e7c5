"""The program of the README on Ray, and the benchmarks that need it: that they run, not how fast."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hypothesis_profiles import TRIES
from tests.launch.programs import ROOT, child_env

pytestmark = pytest.mark.timeout(120)


def run(folder: Path, *command: str, **env: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=child_env(PYTHONASYNCIODEBUG="", **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_program_of_the_readme(cluster: Any, tmp_path: Path) -> None:
    found = re.search(r"```python\n# on_ray.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "on_ray.py").write_text(found[1])
    assert "64 steps" in run(tmp_path, "on_ray.py", RAY_ADDRESS=cluster.address).splitlines()


def test_bench_ray(cluster: Any) -> None:
    printed = run(ROOT, "-m", "scripts.benchmarks", "ray", "--quick", RAY_ADDRESS=cluster.address)
    assert re.search(
        r"ten tensors, 1 MiB\n  aiorlinf +[\d.]+ [mu]s\n  Ray, tensors +[\d.]+ [mu]s   aiorlinf is [\d.]+ times as fast, aim", printed
    )
    assert re.search(r"small dict.*\n  aiorlinf +[\d.]+ [mu]s\n  Ray, an actor's call +[\d.]+ [mu]s   aiorlinf is [\d.]+", printed)


@pytest.mark.skipif(TRIES <= 1, reason="a job of Atari takes 15 s; set AIORLINF_TRIES to more than 1")
def test_bench_rollout_over_ray(cluster: Any) -> None:
    printed = run(ROOT, "-m", "scripts.benchmarks", "rollout", "--quick", "--peers", "ray", RAY_ADDRESS=cluster.address)
    row = r"^ray.util.queue, object store +\d+ +\d+ to \d+ +[\d.]+ % +[\d.]+ % +[\d.]+ +\d+$"
    assert re.search(row, printed, re.MULTILINE), printed
