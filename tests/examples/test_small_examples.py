"""The small examples, each run as the first lines of its file say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Several processes import torch, on a machine that may have other things to do.
pytestmark = pytest.mark.timeout(150)


START = """
import functools, os, runpy, sys, torch.multiprocessing

def one(rank, script, store):
    import torch.distributed as dist

    dist.init_process_group = functools.partial(dist.init_process_group, init_method=f"file://{store}", rank=rank, world_size=3)
    runpy.run_path(script, run_name="__main__")

if __name__ == "__main__":
    torch.multiprocessing.spawn(one, sys.argv[1:], nprocs=3)
"""


def _run(command: Sequence[str], folder: Path) -> list[str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        # Without asyncio's debug mode: on a busy machine it has something to say about every slow moment.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONASYNCIODEBUG": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


def run_job(name: str, folder: Path) -> list[str]:
    """The command in the docstring of the example, `aiorlinf run ...`; what it printed, in order of the workers' names."""
    (command,) = re.findall(r"^    aiorlinf (run .*)$", (EXAMPLES / name).read_text(), re.MULTILINE)
    *options, script = command.split()
    assert script == f"examples/{name}"
    return sorted(_run(["aiorlinf", *options, str(EXAMPLES / name)], folder))


def test_embedded_simulator(tmp_path: Path) -> None:
    policy, *simulators = run_job("embedded_simulator.py", tmp_path)
    assert simulators == [f"[simulator:{rank}] places of the robots: [5]" for rank in range(2)]
    found = re.fullmatch(r"\[policy:0\] answered 1200 questions in (\d+) batches", policy)
    assert found
    assert int(found[1]) < 1200


def test_synchronous_trainer(tmp_path: Path) -> None:
    assert run_job("synchronous_trainer.py", tmp_path) == ["[trainer:0] after 20 updates the weights are close"]


def test_any_to_any(tmp_path: Path) -> None:
    assert run_job("any_to_any.py", tmp_path) == ["[actor:0] 4 actors, close together"]


def test_llm_rollouts(tmp_path: Path) -> None:
    lines = run_job("llm_rollouts.py", tmp_path)
    found = [re.fullmatch(rf"\[trainer:{rank}\] trained on (\d+) samples with (\d+) tokens", line) for rank, line in enumerate(lines)]
    assert len(found) == 2
    assert sum(int(match[1]) for match in found if match) == 80


def test_torch_distributed_before_and_after(tmp_path: Path) -> None:
    """The script and what became of it print the same numbers."""
    after = run_job("torch_distributed/after.py", tmp_path)
    # torchrun itself takes a port of its own choice, and says a thing or two.
    (tmp_path / "start.py").write_text(START)
    before = _run(["start", str(EXAMPLES / "torch_distributed" / "before.py"), str(tmp_path / "store")], tmp_path)
    assert len(before) == 3
    assert after == [f"[worker:0] {line}" for line in before]


def test_rollout_tests(tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    assert "5 passed" in _run(["pytest", *options, str(EXAMPLES / "rollout_tests")], tmp_path)[-1]
