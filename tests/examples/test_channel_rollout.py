"""The channel example as its users run it: six processes and the channel worker, a few seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(150)  # seven processes import torch, on a machine that may have other things to do
def test_a_few_seconds() -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    script = ROOT / "examples" / "channel_rollout.py"
    done = subprocess.run(
        [sys.executable, "-m", "aiorlinf", "run", "--workers", "rollout=3,reward=2,trainer=1", script, "--seconds", "2"],
        # Without asyncio's debug mode: on a busy machine it has something to say about every slow moment.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONASYNCIODEBUG": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[trainer:0] ") for line in done.stdout.splitlines()]
    items = {match[1]: int(match[2]) for line in lines if (match := re.match(r"(\w+:\d) +(\d+) items   busy +[\d.]+ %", line))}
    assert set(items) == {"rollout:0", "rollout:1", "rollout:2", "reward:0", "reward:1", "trainer:0"}
    played = sum(count for worker, count in items.items() if worker.startswith("rollout"))
    assert played == sum(count for worker, count in items.items() if worker.startswith("reward")) > 0
    assert any(line.startswith("channel trajectories: 0 items") for line in lines)
    learned = next(match for line in lines if (match := re.match(r"(\d+) steps learned from in (\d+) batches", line)))
    assert int(learned[1]) >= 8 * played
