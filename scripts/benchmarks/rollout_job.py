"""The job of ``scripts/bench rollout``: that of examples/async_rollout.py in small, without a transport."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

import torch
from atari.games import Games
from atari.learner import Learner
from atari.messages import Trajectory, Weights
from atari.player import Player

__all__ = ["Figures", "Job", "RolloutSide", "TrainerSide", "roll_out", "train"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is played and learned; the same for all transports.

    Attributes:
        envs: environments of each rollout worker.
        length: steps of a trajectory.
        rollouts: workers; an update learns from as many trajectories.
        ahead: trajectories that may wait for the trainer, of all rollout workers together. Four, as over pyzmq no fewer can: one at each
            end of each worker's connection.
        warm_up, updates: updates before the clock runs, and those that are measured.
    """

    game: str = "road_runner"
    envs: int = 8
    length: int = 32
    rollouts: int = 2
    ahead: int = 4
    warm_up: int = 3
    updates: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """What the trainer saw.

    Attributes:
        steps_per_s: environment steps that were learned from, per second.
        idle: share of the time in which the trainer waited for trajectories.
        publishing: share in which it waited for its weights to be on their way.
        lag, worst_lag: versions that the weights were behind with which a trajectory was begun.
        megabytes: of one trajectory.
    """

    steps_per_s: float
    idle: float
    publishing: float
    lag: float
    worst_lag: float
    megabytes: float

    def to_json(self) -> dict[str, Any]:
        """As numbers by name."""
        return asdict(self)


class RolloutSide(Protocol):
    """The transport as a rollout worker has it."""

    async def put(self, trajectory: Trajectory) -> None:
        """Hand it over; waits while too many wait for the trainer."""

    async def weights(self) -> Weights | None:
        """The next ones; None: it is over."""


class TrainerSide(Protocol):
    """The transport as the trainer has it."""

    async def get(self) -> Trajectory:
        """The next trajectory of anyone."""

    async def publish(self, weights: Weights | None) -> None:
        """Send them to all rollout workers; None: it is over."""


async def roll_out(side: RolloutSide, job: Job, rank: int) -> None:
    """Play until it is over, always with the newest weights."""
    torch.set_num_threads(1)
    seed = job.seed + 1000 * (rank + 1)
    games = await asyncio.to_thread(Games, job.game, job.envs, seed)
    player = Player(f"rollout:{rank}", games, seed)
    first = await side.weights()
    assert first is not None
    player.take(first)

    async def follow() -> None:
        while (weights := await side.weights()) is not None:
            player.take(weights)

    async def play() -> None:
        while True:
            await side.put(await player.play(job.length))

    over, playing = asyncio.ensure_future(follow()), asyncio.ensure_future(play())
    try:
        await asyncio.wait({over, playing}, return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            playing.result()  # it can only have failed
        over.result()
    finally:
        over.cancel()
        playing.cancel()
        await asyncio.gather(over, playing, return_exceptions=True)
        player.close()


async def train(side: TrainerSide, job: Job) -> Figures:
    """Learn from whatever arrives, and publish after each update."""
    torch.set_num_threads(1)
    games = await asyncio.to_thread(Games, job.game, 1, job.seed)
    learner = Learner(games.actions, job.seed)
    await side.publish(Weights(0, 0, learner.snapshot()))
    idle = publishing = began = 0.0
    steps = nbytes = 0
    lags: list[int] = []
    for update in range(job.warm_up + job.updates):
        if update == job.warm_up:
            idle = publishing = 0.0
            steps, lags, began = 0, [], time.perf_counter()
        before = time.perf_counter()
        batch = [await side.get() for _ in range(job.rollouts)]
        idle += time.perf_counter() - before
        steps += sum(trajectory.actions.numel() for trajectory in batch)
        nbytes = batch[0].frames.nbytes
        lags += [learner.version - trajectory.info.first_version for trajectory in batch]
        await asyncio.to_thread(learner.update, batch)
        before = time.perf_counter()
        await side.publish(Weights(learner.version, 0, learner.snapshot()))
        publishing += time.perf_counter() - before
    took = time.perf_counter() - began
    await side.publish(None)
    return Figures(steps / took, idle / took, publishing / took, fmean(lags), max(lags), nbytes / 1e6)
