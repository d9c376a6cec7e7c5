"""Playing: the policy and the games of one rollout worker, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from atari.games import SIZE, STACK, Games
from atari.messages import Trajectory, TrajectoryInfo, Weights
from atari.policy import Policy

__all__ = ["Player"]


class Player:
    """Plays with the newest policy and records what happened.

    Attributes:
        version: of the policy that plays now; -1 before the first weights.
        steps: played so far, all environments together.
        swaps: how often the policy was replaced.
    """

    def __init__(self, worker: str, games: Games, seed: int) -> None:
        self.version = -1
        self.steps = 0
        self.swaps = 0
        self._worker = worker
        self._games = games
        self._policy = Policy(games.actions)
        self._newest: Weights | None = None
        self._points = torch.zeros(len(games.frames))  # of the episodes under way
        self._random = torch.Generator().manual_seed(seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="games")

    def take(self, weights: Weights) -> None:
        """Play with these from the next step on. A step may be under way in the thread: it ends with the policy it began with."""
        self._newest = weights

    async def play(self, length: int) -> Trajectory:
        """Play `length` steps. The event loop is free meanwhile.

        Cancelling gives up the trajectory; the step under way is played to its end in the thread.
        """
        loop = asyncio.get_running_loop()
        envs = len(self._games.frames)
        trajectory = Trajectory(
            frames=torch.empty(length + 1, envs, STACK, SIZE, SIZE, dtype=torch.uint8),
            actions=torch.empty(length, envs, dtype=torch.int64),
            rewards=torch.empty(length, envs),
            log_probs=torch.empty(length, envs),
            masks=torch.empty(length, envs),
            info=TrajectoryInfo(self._worker, list(range(envs)), self.version, self.version),
        )
        for time in range(length):
            self._swap()
            if time == 0:
                trajectory.info.first_version = self.version
            await loop.run_in_executor(self._thread, self._step, trajectory, time)
        trajectory.frames[length] = self._games.frames
        trajectory.info.last_version = self.version
        return trajectory

    def _swap(self) -> None:
        """Between two steps, so no action is chosen by half-replaced weights. Of several that came meanwhile the latest wins."""
        if self._newest is not None:
            self._policy.load_state_dict(self._newest.state)
            self.version = self._newest.version
            self.swaps += 1
            self._newest = None

    @torch.inference_mode()
    def _step(self, trajectory: Trajectory, time: int) -> None:
        frames = self._games.frames
        log_probs, _ = self._policy(frames)
        actions = torch.multinomial(log_probs.exp(), 1, generator=self._random)
        step = self._games.step(actions.squeeze(1))
        trajectory.frames[time] = frames
        trajectory.actions[time] = actions.squeeze(1)
        trajectory.log_probs[time] = log_probs.gather(1, actions).squeeze(1)
        trajectory.rewards[time] = step.rewards
        trajectory.masks[time] = (~step.ended).float()
        self._points += step.rewards
        trajectory.info.returns += self._points[step.ended].tolist()
        self._points[step.ended] = 0
        self.steps += len(frames)

    def close(self) -> None:
        """End the thread, after the step under way."""
        self._thread.shutdown()
