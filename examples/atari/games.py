"""Several copies of one Atari game, stepped together."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv

__all__ = ["SIZE", "STACK", "Games", "Step", "rom_name"]

SIZE = 42
"""Height and width of a frame. The usual 84 shows no more of most games than this does, and costs four times as much to learn from."""

STACK = 4
"""Frames in one observation, so that the policy can see what moves."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of all copies gave, each field with one entry per copy."""

    rewards: torch.Tensor  # float32; the game's own points
    ended: torch.Tensor  # bool; the copy is already at the start of its next episode


class Games:
    """The usual preprocessing (grey, scaled, the last four frames, each the maximum of two, every action four times) in C++.

    The emulators and their thread end with this object.

    Attributes:
        frames: what the policy looks at next: uint8, (copies, STACK, SIZE, SIZE).
        actions: how many there are to choose from.
    """

    def __init__(self, game: str, copies: int, seed: int) -> None:
        self._env = AtariVectorEnv(
            rom_name(game),
            copies,
            num_threads=1,  # workers are the unit of parallelism here
            autoreset_mode="SameStep",
            reward_clipping=False,
            img_height=SIZE,
            img_width=SIZE,
            stack_num=STACK,
        )
        self.actions = len(self._env.ale.get_action_set())
        frames, _ = self._env.reset(seed=seed)
        self.frames = torch.from_numpy(frames)

    def step(self, actions: torch.Tensor) -> Step:
        """Play one action in each copy. The interpreter lock is free meanwhile, so call this in a thread and the event loop stays quick."""
        frames, rewards, terminated, truncated, _ = self._env.step(actions.numpy())
        self.frames = torch.from_numpy(frames)
        return Step(torch.from_numpy(rewards.astype(np.float32)), torch.from_numpy(terminated | truncated))


def rom_name(game: str) -> str:
    """What the emulator calls a game: ``road_runner`` for RoadRunner, ALE/RoadRunner-v5 or road_runner.

    Raises:
        ValueError: there is no such game.
    """
    name = re.sub(r"^ALE/|-v\d+$", "", game)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if name not in roms.get_all_rom_ids():
        raise ValueError(f"no game {game!r}; there are {', '.join(sorted(roms.get_all_rom_ids()))}")
    return name
