"""``scripts/bench rollout`` over aiorlinf: a channel for the trajectories, a broadcast for the weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from atari.messages import Trajectory, Weights

import aiorlinf
from scripts.benchmarks.rollout_job import Figures, Job, roll_out, train
from scripts.benchmarks.rollout_processes import run_processes

__all__ = ["run"]

TRAINER = "trainer:0"
CHANNEL = "trajectories"
AHEAD = 1
"""Trajectories that come to the trainer before it asks for them."""


def run(job: Job) -> Figures:
    """One run in processes of its own."""
    with aiorlinf.init("driver:0", loop="thread") as comm:
        # Here, so that its process is told when the job is over: what nobody took at the end would keep it for a while.
        comm.create_channel(CHANNEL, maxsize=max(1, job.ahead - AHEAD)).wait()  # as many wait as elsewhere, in all
        return run_processes(job, _rollout, _trainer, comm.env(TRAINER))


def _members(job: Job) -> list[str]:
    return [TRAINER, *(f"rollout:{rank}" for rank in range(job.rollouts))]


class _Rollout:
    def __init__(self, comm: aiorlinf.Worker, channel: aiorlinf.Channel[Trajectory], members: list[str]) -> None:
        self._comm = comm
        self._channel = channel
        self._members = members

    async def put(self, trajectory: Trajectory) -> None:
        await self._channel.put(trajectory)

    async def weights(self) -> Weights | None:
        got: Weights | None = await self._comm.broadcast(None, root=TRAINER, members=self._members)
        return got


class _Trainer(_Rollout):
    """The next trajectory is there before it is asked for; weights are on their way while it goes on."""

    def __init__(
        self,
        comm: aiorlinf.Worker,
        channel: aiorlinf.Channel[Trajectory],
        members: list[str],
        trajectories: AsyncIterator[Trajectory],
    ) -> None:
        super().__init__(comm, channel, members)
        self._trajectories = trajectories
        self._publishing: aiorlinf.AsyncWork[Weights | None] | None = None

    async def get(self) -> Trajectory:
        return await anext(self._trajectories)

    async def publish(self, weights: Weights | None) -> None:
        if self._publishing is not None:
            await self._publishing
        self._publishing = self._comm.broadcast(weights, root=TRAINER, members=self._members)
        if weights is None:
            await self._publishing


def _rollout(job: Job, rank: int, env: dict[str, str]) -> None:
    async def main() -> None:
        async with aiorlinf.init(f"rollout:{rank}") as comm:
            await roll_out(_Rollout(comm, await comm.connect_channel(CHANNEL), _members(job)), job, rank)

    os.environ.update(env)
    uvloop.run(main())


def _trainer(job: Job, answers: Any, env: dict[str, str]) -> None:
    async def main() -> None:
        async with aiorlinf.init(TRAINER) as comm:
            channel = await comm.connect_channel(CHANNEL)
            async with channel.prefetch(AHEAD) as trajectories:
                answers.put((await train(_Trainer(comm, channel, _members(job), trajectories), job)).to_json())

    os.environ.update(env)
    uvloop.run(main())
