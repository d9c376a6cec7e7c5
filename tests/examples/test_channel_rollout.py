"""The channel example: six processes and the channel worker, a few seconds."""

from __future__ import annotations

import re

import pytest

from tests.examples.jobs import run_job

__all__: list[str] = []


@pytest.mark.timeout(150)  # on a machine that may have other things to do
def test_a_few_seconds() -> None:
    lines = [line.removeprefix("[trainer:0] ") for line in run_job("channel_rollout.py", "--seconds", "2", channel_worker="pipeline")]
    items = {match[1]: int(match[2]) for line in lines if (match := re.match(r"(\w+:\d) +(\d+) items   busy +[\d.]+ %", line))}
    assert set(items) == {"rollout:0", "rollout:1", "rollout:2", "reward:0", "reward:1", "trainer:0"}
    played = sum(count for worker, count in items.items() if worker.startswith("rollout"))
    assert played == sum(count for worker, count in items.items() if worker.startswith("reward")) > 0
    assert any(line.startswith("channel trajectories: 0 items") for line in lines)
    learned = next(match for line in lines if (match := re.match(r"(\d+) steps learned from in (\d+) batches", line)))
    assert int(learned[1]) >= 8 * played
