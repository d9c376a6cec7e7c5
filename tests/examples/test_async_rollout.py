"""The example as its users run it: three processes, a few seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(120)  # three processes import torch, on a machine that may have other things to do
def test_a_few_seconds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--seconds", "3", "--game", "Pong", "--envs", "2", "--length", "16", "--out", str(out)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "aiorlinf", "run", "--workers", "rollout=2,trainer=1", ROOT / "examples" / "async_rollout.py", *options],
        # Without asyncio's debug mode: on a busy machine it has something to say about every slow moment.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONASYNCIODEBUG": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    noise = [line for line in done.stderr.splitlines() if "building the font cache" not in line]  # matplotlib, once on each machine
    assert (done.returncode, noise) == (0, []), done.stdout

    lines = [line.removeprefix("[trainer:0] ") for line in done.stdout.splitlines()]
    progress = [line for line in lines if re.match(r" *\d+ s +\d+ steps/s", line)]
    assert progress
    assert all(re.search(r" episodes +return .* messages/s .* MB/s +version +\d+ +lag", line) for line in progress)
    assert any(re.fullmatch(r"steps per second +[\d.]+", line) for line in lines)
    assert f"plot: {out / 'async_rollout.png'}" in lines
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
