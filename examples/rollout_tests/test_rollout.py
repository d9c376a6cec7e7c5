"""Tests of `rollout.py`, with pytest-asyncio: real workers, in one process and on the loop of the test.

    pytest examples/rollout_tests

`local_cluster` is a fixture of `aiorlinf.testing.pytest_plugin`: a whole job with as many workers as a test needs, which plays one side
itself. Nothing is mocked, no port is chosen, and workers can be killed.
"""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import torch
from rollout import WEIGHTS, Trajectory, play

import aiorlinf
from aiorlinf.testing.cluster import LocalCluster

pytestmark = pytest.mark.asyncio

Pair = tuple[aiorlinf.Worker, aiorlinf.Worker]


class Countdown:
    """An environment that ends after three steps."""

    async def reset(self) -> torch.Tensor:
        self.left = 3
        return torch.ones(2)

    async def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        self.left -= 1
        return torch.ones(2), float(action), self.left == 0


@pytest_asyncio.fixture
async def pair(local_cluster: LocalCluster) -> Pair:
    """A rollout worker and a trainer."""
    return await local_cluster.join("rollout:0"), await local_cluster.join("trainer:0")


async def test_episodes_arrive_in_order_with_the_version_that_played_them(pair: Pair) -> None:
    rollout, trainer = pair
    playing = asyncio.create_task(play(rollout, Countdown(), "trainer:0", episodes=2))
    await trainer.send((torch.tensor([1.0, 1.0]), 7), "rollout:0", tag=WEIGHTS)
    for _ in range(2):
        trajectory = await trainer.recv("rollout:0")
        assert isinstance(trajectory, Trajectory)
        assert trajectory.observations.shape == (3, 2)
        assert trajectory.rewards.tolist() == [1.0, 1.0, 1.0]
        assert trajectory.version == 7
    await playing


async def test_new_weights_are_used_from_the_next_episode_on(pair: Pair) -> None:
    rollout, trainer = pair
    began = asyncio.Event()
    go_on = asyncio.Event()

    class Watched(Countdown):
        async def reset(self) -> torch.Tensor:
            began.set()
            await go_on.wait()
            return await super().reset()

    playing = asyncio.create_task(play(rollout, Watched(), "trainer:0", episodes=2))
    await trainer.send((torch.tensor([1.0, 1.0]), 1), "rollout:0", tag=WEIGHTS)
    await began.wait()
    await trainer.send((torch.tensor([-1.0, -1.0]), 2), "rollout:0", tag=WEIGHTS)
    go_on.set()
    assert [(await trainer.recv("rollout:0")).version for _ in range(2)] == [1, 2]
    await playing


async def test_it_ends_when_the_trainer_is_gone() -> None:
    async with aiorlinf.init("rollout:0") as rollout:
        async with aiorlinf.init("trainer:0") as trainer:
            playing = asyncio.create_task(play(rollout, Countdown(), "trainer:0", episodes=10**9))
            await trainer.send((torch.zeros(2), 1), "rollout:0", tag=WEIGHTS)
            await trainer.recv("rollout:0")
        with pytest.raises(aiorlinf.errors.PeerLeft):
            await playing


async def test_it_ends_when_the_trainer_is_killed(pair: Pair, local_cluster: LocalCluster) -> None:
    rollout, trainer = pair
    playing = asyncio.create_task(play(rollout, Countdown(), "trainer:0", episodes=10**9))
    await trainer.send((torch.zeros(2), 1), "rollout:0", tag=WEIGHTS)
    await trainer.recv("rollout:0")
    await local_cluster.kill("trainer:0")
    with pytest.raises(aiorlinf.errors.PeerLost):
        await playing


async def test_it_can_be_cancelled_while_it_waits(pair: Pair) -> None:
    rollout, trainer = pair
    playing = asyncio.create_task(play(rollout, Countdown(), "trainer:0", episodes=1))
    await asyncio.sleep(0)  # it waits for weights now
    assert [operation.peer for operation in rollout.pending()] == ["trainer:0"]
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    # Nothing was taken: the message is there for who asks next.
    await trainer.send("weights", "rollout:0", tag=WEIGHTS)
    assert await rollout.recv("trainer:0", tag=WEIGHTS) == "weights"
