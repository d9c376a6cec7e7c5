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
from tests.hypothesis_profiles import TRIES

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
LONG = pytest.mark.skipif(TRIES <= 1, reason="a job of Atari takes 20 s; set AIORLINF_TRIES to more than 1")


@pytest.mark.timeout(90)  # several processes import torch, on a machine that may have other things to do
@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("aiorlinf", "aiorlinf"),
        pytest.param("torch", "torch.multiprocessing queues", marks=LONG),
        pytest.param("zmq", "pyzmq, pickled", marks=LONG),
    ],
)
def test_it_runs(name: str, title: str, tmp_path: Path) -> None:
    command = ["rollout", "--quick", "--peers", name, "--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=85,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{title} +\d+ +\d+ to \d+ +[\d.]+ % +[\d.]+ % +[\d.]+ +\d+$", done.stdout, re.MULTILINE), done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [run["worst_lag"] >= run["lag"] >= 0 for run in found["runs"][name]] == [True]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_how_they_are_compared() -> None:
    run = {"steps_per_s": 300.0, "idle": 0.1, "publishing": 0.01, "lag": 1.0, "worst_lag": 2, "megabytes": 1.9}
    table = rollout._table({"aiorlinf": [run], "zmq": [{**run, "steps_per_s": 200.0}], "ray": []}, {"ray": "failed: no room"})
    assert "aiorlinf makes 1.50 times the steps per second of pyzmq, pickled" in table
    assert re.search(r"^ray.util.queue, object store +failed: no room$", table, re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_what_is_not_installed_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout.main(["--quick", "--peers", "ray"]) == 0
    assert re.search(r"^ray.util.queue, object store +not installed: No module named 'ray'$", capsys.readouterr().out, re.MULTILINE)
    assert ray_actors.main(["--quick"]) == 0
    assert "skipped: Ray is not installed: No module named 'ray'" in capsys.readouterr().out
