"""``scripts/bench rollout`` over Ray: `ray.util.queue` with references into the object store, weights put there once per update."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from atari.messages import Trajectory, Weights

from scripts.benchmarks.ray_cluster import connected
from scripts.benchmarks.rollout_job import Figures, Job, roll_out, train

__all__ = ["run"]


def run(job: Job) -> Figures:
    """One run."""
    with connected() as ray:
        queue = importlib.import_module("ray.util.queue").Queue(maxsize=job.ahead, actor_options={"num_cpus": 0})
        rollouts = [ray.remote(num_cpus=1)(_Rollout).remote(queue) for _ in range(job.rollouts)]
        trainer = ray.remote(num_cpus=1)(_Trainer).remote(queue, rollouts)
        playing = [actor.run.remote(job, rank) for rank, actor in enumerate(rollouts)]
        figures: Figures = ray.get(trainer.run.remote(job))
        ray.get(playing)
        queue.shutdown()
    return figures


class _Rollout:
    """An actor. Only references are in the queue: the store shows its objects to all processes of the host."""

    def __init__(self, queue: Any) -> None:
        self._ray = importlib.import_module("ray")
        self._queue = queue
        self._news: asyncio.Queue[Weights | None] = asyncio.Queue()

    async def run(self, job: Job, rank: int) -> None:
        await roll_out(self, job, rank)

    async def take(self, weights: Weights | None) -> None:
        self._news.put_nowait(weights)

    async def put(self, trajectory: Trajectory) -> None:
        await self._queue.put_async([self._ray.put(trajectory)])

    async def weights(self) -> Weights | None:
        return await self._news.get()


class _Trainer:
    """An actor."""

    def __init__(self, queue: Any, rollouts: list[Any]) -> None:
        self._ray = importlib.import_module("ray")
        self._queue = queue
        self._rollouts = rollouts

    async def run(self, job: Job) -> Figures:
        return await train(self, job)

    async def get(self) -> Trajectory:
        (reference,) = await self._queue.get_async()
        got: Trajectory = await reference
        return got

    async def publish(self, weights: Weights | None) -> None:
        reference = self._ray.put(weights)
        await asyncio.gather(*(rollout.take.remote(reference) for rollout in self._rollouts))
