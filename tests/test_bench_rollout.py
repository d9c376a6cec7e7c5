"""``scripts/bench rollout`` runs. The figures are not for a test. (Over Ray: tests/ray.)"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import ray_actors, rollout

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(110)
def test_all_of_it_works(tmp_path: Path) -> None:
    command = ["rollout", "--quick", "--peers", "aiorlinf", "torch", "zmq"]
    command += ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
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
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {name: len(runs) for name, runs in found["runs"].items()} == {"aiorlinf": 1, "torch": 1, "zmq": 1}
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_what_is_not_installed_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout.main(["--quick", "--peers", "ray"]) == 0
    assert re.search(r"^ray.util.queue, object store +not installed: No module named 'ray'$", capsys.readouterr().out, re.MULTILINE)
    assert ray_actors.main(["--quick"]) == 0
    assert "skipped: Ray is not installed: No module named 'ray'" in capsys.readouterr().out
