"""`scripts/gpu-check` itself, on the fake accelerator: two processes, whose devices cannot reach each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiorlinf.device.registry import usable_runtime

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gpuchecks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False, env={**os.environ, "PYTHONPATH": "."})


def test_it_runs_and_says_what_it_found() -> None:
    done = run("--kind", "fake", "--only", "asked for")
    assert done.returncode == 0, done.stderr
    assert "| nccl asked for on one device | passed | staging: nccl was asked for, but nothing connects fake devices |" in done.stdout
    assert done.stdout.endswith("all passed\n")


@pytest.mark.skipif(usable_runtime("cuda") is not None, reason="this machine has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "nothing was checked" in done.stderr
