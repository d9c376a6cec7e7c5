"""``scripts/bench rollout`` runs over each transport that is installed, and says what is not. The figures are not for a test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(110)
def test_all_of_it_works(tmp_path: Path) -> None:
    command = ["rollout", "--quick", "--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = r"^{} +\d+ +\d+ to \d+ +[\d.]+ % +[\d.]+ % +[\d.]+ +\d+$"
    for title in ("aiorlinf", "torch.multiprocessing queues", "pyzmq, pickled"):
        assert re.search(row.format(title), done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"aiorlinf makes [\d.]+ times the steps per second of pyzmq", done.stdout)
    if "ray" in (found := json.loads((tmp_path / "figures.json").read_text()))["skipped"]:
        assert re.search(r"^ray.util.queue, object store +not installed: ", done.stdout, re.MULTILINE)
    assert [len(found["runs"][name]) for name in ("aiorlinf", "torch", "zmq")] == [1, 1, 1]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
