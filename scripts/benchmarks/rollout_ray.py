"""``scripts/bench rollout`` over Ray: `ray.util.queue` with references into the object store, weights put there once per update."""

from __future__ import annotations

import asyncio
import importlib
import os
import tempfile
from typing import Any, Final

from atari.messages import Trajectory, Weights

from scripts.benchmarks.rollout_job import Figures, Job, roll_out, train

__all__ = ["run"]

STORE_BYTES: Final = 2 << 30


def run(job: Job) -> Figures:
    """One run in a cluster of its own, on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    with tempfile.TemporaryDirectory(prefix="aio-") as folder:
        ray.init(
            address="local", num_cpus=4, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
            configure_logging=False, _temp_dir=folder, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        try:
            queue = importlib.import_module("ray.util.queue").Queue(maxsize=job.ahead, actor_options={"num_cpus": 0})
            rollouts = [ray.remote(num_cpus=1)(_Rollout).remote(queue) for _ in range(job.rollouts)]
            trainer = ray.remote(num_cpus=1)(_Trainer).remote(queue, rollouts)
            playing = [actor.run.remote(job, rank) for rank, actor in enumerate(rollouts)]
            figures: Figures = ray.get(trainer.run.remote(job))
            ray.get(playing)
        finally:
            ray.shutdown()
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
