"""The small examples, each with the workers that the first lines of its file say."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.examples.jobs import EXAMPLES, run_job, run_script
from tests.peers import Pipe, process

__all__: list[str] = []

# On a machine that may have other things to do.
pytestmark = pytest.mark.timeout(150)


def _run_before(pipe: Pipe, rank: int, store: str) -> None:
    """As torchrun runs it, which itself takes a port of its own choice, and says a thing or two."""
    dist.init_process_group = functools.partial(dist.init_process_group, init_method=f"file://{store}", rank=rank, world_size=3)
    run_script(pipe, str(EXAMPLES / "torch_distributed" / "before.py"))


def test_embedded_simulator() -> None:
    policy, *simulators = run_job("embedded_simulator.py")
    assert simulators == [f"[simulator:{rank}] places of the robots: [5]" for rank in range(2)]
    found = re.fullmatch(r"\[policy:0\] answered 1200 questions in (\d+) batches", policy)
    assert found
    assert int(found[1]) < 1200


def test_synchronous_trainer() -> None:
    assert run_job("synchronous_trainer.py") == ["[trainer:0] after 20 updates the weights are close"]


def test_any_to_any() -> None:
    assert run_job("any_to_any.py") == ["[actor:0] 4 actors, close together"]


def test_llm_rollouts() -> None:
    lines = run_job("llm_rollouts.py", channel_worker="samples")
    found = [re.fullmatch(rf"\[trainer:{rank}\] trained on (\d+) samples with (\d+) tokens", line) for rank, line in enumerate(lines)]
    assert len(found) == 2
    assert sum(int(match[1]) for match in found if match) == 80


def test_torch_distributed_before_and_after(tmp_path: Path) -> None:
    """The script and what became of it print the same numbers."""
    after = run_job("torch_distributed/after.py")
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(process(_run_before, rank, str(tmp_path / "store"))) for rank in range(3)]
        before = [line for rank in ranks for line in (rank.wait_result(), rank.said_on_stderr())[1].splitlines()]
    assert len(before) == 3
    assert after == [f"[worker:0] {line}" for line in before]


def _run_tests(pipe: Pipe, folder: str) -> int:
    os.chdir(folder)
    return pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(EXAMPLES / "rollout_tests")])


def test_rollout_tests(tmp_path: Path) -> None:
    with process(_run_tests, str(tmp_path), env={"PYTHONASYNCIODEBUG": ""}) as tests:
        assert tests.wait_result(100) == 0, tests.said_on_stderr()
        assert "5 passed" in tests.said_on_stderr().splitlines()[-1]
