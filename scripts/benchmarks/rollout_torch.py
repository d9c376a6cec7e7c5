"""``scripts/bench rollout`` over torch.multiprocessing: one queue for the trajectories, one per rollout worker for the weights.

Tensors go through it as shared memory, everything else is pickled.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch.multiprocessing
import uvloop
from atari.messages import Trajectory, Weights

from scripts.benchmarks.rollout_job import Figures, Job, roll_out, train
from scripts.benchmarks.rollout_processes import run_processes

__all__ = ["run"]


def run(job: Job) -> Figures:
    """One run in processes of its own."""
    context: Any = torch.multiprocessing.get_context("forkserver")
    trajectories = context.Queue(job.ahead)
    news = [context.Queue() for _ in range(job.rollouts)]
    return run_processes(job, _rollout, _trainer, trajectories, news, context=context)


class _Rollout:
    def __init__(self, trajectories: Any, news: Any) -> None:
        self._trajectories = trajectories
        self._news = news

    async def put(self, trajectory: Trajectory) -> None:
        await asyncio.to_thread(self._trajectories.put, trajectory)

    async def weights(self) -> Weights | None:
        got: Weights | None = await asyncio.to_thread(self._news.get)
        return got


class _Trainer:
    def __init__(self, trajectories: Any, news: list[Any]) -> None:
        self._trajectories = trajectories
        self._news = news

    async def get(self) -> Trajectory:
        got: Trajectory = await asyncio.to_thread(self._trajectories.get)
        return got

    async def publish(self, weights: Weights | None) -> None:
        for queue in self._news:
            queue.put(weights)


def _rollout(job: Job, rank: int, trajectories: Any, news: list[Any]) -> None:
    trajectories.cancel_join_thread()  # what nobody takes at the end is let go
    uvloop.run(roll_out(_Rollout(trajectories, news[rank]), job, rank))


def _trainer(job: Job, answers: Any, trajectories: Any, news: list[Any]) -> None:
    answers.put(uvloop.run(train(_Trainer(trajectories, news), job)).to_json())
