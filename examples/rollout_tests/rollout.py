"""Rollout code of one's own, such as `test_rollout.py` beside it tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

import aiorlinf

__all__ = ["Environment", "Trajectory", "play"]

WEIGHTS = 1
"""The tag of what the trainer sends."""


class Environment(Protocol):
    """What is played in."""

    async def reset(self) -> torch.Tensor:
        """Begin anew; the first observation."""

    async def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        """The next observation, the reward, and whether that was the end."""


@dataclass
class Trajectory:
    """One episode."""

    observations: torch.Tensor
    rewards: torch.Tensor
    version: int


async def play(comm: aiorlinf.Worker, environment: Environment, trainer: str, episodes: int) -> None:
    """Play with the newest weights there are, and send each episode to the trainer."""
    news = comm.recv(trainer, tag=WEIGHTS)
    weights, version = await news
    news = comm.recv(trainer, tag=WEIGHTS)
    try:
        for _ in range(episodes):
            while news.done():  # without waiting for it
                weights, version = news.result()
                news = comm.recv(trainer, tag=WEIGHTS)
            observation, over = await environment.reset(), False
            observations, rewards = [], []
            while not over:
                observations.append(observation)
                observation, reward, over = await environment.step(int(observation @ weights > 0))
                rewards.append(reward)
            await comm.send(Trajectory(torch.stack(observations), torch.tensor(rewards), version), trainer)
    finally:
        if not news.cancel():
            news.exception()  # it has failed as well, or come at the last moment: nobody needs to hear of it
