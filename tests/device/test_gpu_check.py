"""`scripts/gpu-check` itself, on the fake accelerator: two processes that share its devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiorlinf import Worker
from aiorlinf.device.registry import usable_runtime
from scripts.gpuchecks.checks import Check, idle
from scripts.gpuchecks.place import Place, place
from scripts.gpuchecks.running import Partner, run_check

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200.0
"""Each run imports torch twice, which takes half a minute on a machine that has much else to do."""

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gpuchecks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, "PYTHONPATH": "."}
    )


def test_it_runs_and_says_what_it_found() -> None:
    done = run("--kind", "fake", "--only", "asked for", "--only", "collectives")
    assert done.returncode == 0, done.stderr
    assert "| nccl asked for on one device | passed | staging: nccl was asked for, but nothing connects fake devices |" in done.stdout
    assert "| collectives | passed | cuda_ipc: both workers use the same device |" in done.stdout
    assert "| collectives, staged | passed | staging: shm was asked for |" in done.stdout
    assert re.search(r"\nall passed in \d+ s\n$", done.stdout)
    assert "1 of 3: nccl asked for on one device ...\n" in done.stderr
    assert "\n3 of 3: passed after " in done.stderr


def test_it_keeps_to_its_time() -> None:
    done = run("--kind", "fake", "--only", "asked for", "--limit", "0")
    assert done.returncode == 1
    assert "| nccl asked for on one device | skipped | the 0 s are over |" in done.stdout
    assert "no time for 1" in done.stdout


def test_a_check_that_fails_costs_the_next_one_nothing() -> None:
    with Partner("fake") as partner, place("fake") as where:
        wrong = Check("fails there", idle, _fails)
        done = run_check(wrong, "fake", where, partner)
        assert done.word == "FAILED"
        assert "in the other process" in done.text
        assert "on purpose" in done.text
        done = run_check(Check("works", idle, idle), "fake", where, partner)
        assert done.word == "passed"


async def _fails(comm: Worker, place: Place) -> str:
    raise RuntimeError("on purpose")


@pytest.mark.skipif(usable_runtime("cuda") is not None, reason="this machine has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "nothing was checked" in done.stderr
