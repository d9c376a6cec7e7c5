"""`scripts/gpu-check` itself, on the fake accelerator: two processes that share its devices."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiorlinf import Worker
from aiorlinf.device.registry import usable_runtime
from scripts.gpuchecks import watched as module
from scripts.gpuchecks.checks import Check, Half, idle
from scripts.gpuchecks.place import Place, place
from scripts.gpuchecks.running import Partner, run_check
from scripts.gpuchecks.watched import Watched

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


@pytest.mark.sampled(2, family="gpu-check")
def test_it_runs_and_says_what_it_found() -> None:
    done = run("--kind", "fake", "--only", "asked for", "--only", "collectives")
    assert done.returncode == 0, done.stderr
    assert "| nccl asked for on one device | passed | staging: nccl was asked for, but nothing connects fake devices |" in done.stdout
    assert "| collectives | passed | cuda_ipc: both workers use the same device |" in done.stdout
    assert "| collectives, staged | passed | staging: shm was asked for |" in done.stdout
    assert re.search(r"\nall passed in \d+ s\n$", done.stdout)
    assert "1 of 3: nccl asked for on one device ...\n" in done.stderr
    assert "\n3 of 3: passed after " in done.stderr


@pytest.mark.sampled(2, family="gpu-check")
def test_it_keeps_to_its_time() -> None:
    done = run("--kind", "fake", "--only", "asked for", "--limit", "0")
    assert done.returncode == 1
    assert "| nccl asked for on one device | skipped | the 0 s are over |" in done.stdout
    assert "no time for 1" in done.stdout


@pytest.mark.sampled(2, family="gpu-check")
def test_a_check_that_fails_costs_the_next_one_nothing() -> None:
    with Partner("fake") as partner, place("fake") as where:
        wrong = Check("fails there", idle, _fails)
        done = run_check(wrong, "fake", where, partner)
        assert done.word == "FAILED"
        assert "in the other process" in done.text
        assert "on purpose" in done.text
        done = run_check(Check("works", idle, idle), "fake", where, partner)
        assert done.word == "passed"


@pytest.mark.sampled(2, family="gpu-check")
def test_a_process_that_hangs_or_dies_costs_the_next_check_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver, for instance, where no time limit of a loop reaches it."""
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    with Watched("fake") as watched:
        assert "fake accelerator" in watched.describe(LIMIT_S)
        assert "it hangs: its process was ended after" in failure(watched, _hangs, 3.0)
        assert "fake accelerator" in watched.describe(LIMIT_S)
        assert "its process has died: by SIGSEGV" in failure(watched, _dies, LIMIT_S)
        assert "fake accelerator" in watched.describe(LIMIT_S)
        assert watched.run(Check("works", idle, idle), LIMIT_S, LIMIT_S).word == "passed"
        assert watched.end() is None


def failure(watched: Watched, half: Half, limit: float) -> str:
    """What is said of a check whose first half is this."""
    process = watched._process.pid
    done = watched.run(Check("of no good", half, idle), limit, LIMIT_S)
    assert done.word == "FAILED"
    while alive(process):  # nor is its partner left
        time.sleep(0.01)
    return done.text


def alive(group: int) -> bool:
    """A process of this group still runs. Who has ended may be waited for by nobody."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(of) == group and state not in "ZX":
            return True
    return False


async def _hangs(comm: Worker, place: Place) -> str:
    while True:
        time.sleep(10)


async def _dies(comm: Worker, place: Place) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


async def _fails(comm: Worker, place: Place) -> str:
    raise RuntimeError("on purpose")


@pytest.mark.skipif(usable_runtime("cuda") is not None, reason="this machine has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "nothing was checked" in done.stderr
