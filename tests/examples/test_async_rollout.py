"""The example as its users run it: three processes, a few seconds; started by `aiorlinf run`, and by torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]


def play(out: Path, *command: str, seconds: float = 3, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the file, as it is, by some starter of processes."""
    options = ["--seconds", str(seconds), "--game", "Pong", "--envs", "2", "--length", "16", "--out", str(out)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", *command, ROOT / "examples" / "async_rollout.py", *options],
        # Without asyncio's debug mode: on a busy machine it has something to say about every slow moment.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONASYNCIODEBUG": "", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def check_figures(out: Path) -> None:
    """What the trainer has written agrees with itself."""
    assert (out / "async_rollout.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "async_rollout.json").read_text())["summary"]
    assert summary["game"] == "pong"
    assert summary["rollout workers"] == 2
    assert summary["weight versions"] >= 2
    assert summary["swaps at the rollout workers"] >= 2
    trajectories, rest = divmod(summary["steps"], 2 * 16)
    assert rest == 0
    assert summary["weight versions"] == (trajectories + 1) // 2  # all were learned from, two at a time
    assert summary["messages"] >= trajectories + 2  # and the farewells; the weights go the other way


@pytest.mark.sampled(2, family="starters of the example")
@pytest.mark.timeout(120)  # three processes import torch, on a machine that may have other things to do
def test_a_few_seconds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = play(out, "aiorlinf", "run", "--workers", "rollout=2,trainer=1")
    noise = [line for line in done.stderr.splitlines() if "building the font cache" not in line]  # matplotlib, once on each machine
    assert (done.returncode, noise) == (0, []), done.stdout

    lines = [line.removeprefix("[trainer:0] ") for line in done.stdout.splitlines()]
    progress = [line for line in lines if re.match(r" *\d+ s +\d+ steps/s", line)]
    assert progress
    assert all(re.search(r" episodes +return .* messages/s .* MB/s +version +\d+ +lag", line) for line in progress)
    assert any(re.fullmatch(r"steps per second +[\d.]+", line) for line in lines)
    assert f"plot: {out / 'async_rollout.png'}" in lines
    check_figures(out)


@pytest.mark.sampled(2, family="starters of the example")
@pytest.mark.timeout(120)
def test_the_same_file_under_torchrun(tmp_path: Path) -> None:
    """The ranks are the workers that the environment names. (On Ray: tests/ray.)"""
    starter = ("torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--monitor-interval", "0.1")
    env = {"AIORLINF_WORKERS": "trainer=1,rollout=2", "OMP_NUM_THREADS": "1"}
    done = play(tmp_path / "out", *starter, seconds=1.5, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    check_figures(tmp_path / "out")
