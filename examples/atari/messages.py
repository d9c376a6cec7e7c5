"""What rollout workers and the trainer send each other: plain dataclasses, with tensors in them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Farewell", "Trajectory", "TrajectoryInfo", "Weights"]


@dataclass(slots=True)
class TrajectoryInfo:
    """Where a trajectory comes from."""

    worker: str
    env_ids: list[int]
    first_version: int  # of the policy that played the first step,
    last_version: int  # and the last: the weights may be swapped in between
    returns: list[float] = field(default_factory=list)  # of the episodes that ended in it


@dataclass(slots=True)
class Trajectory:
    """`length` steps of several environments: rollout to trainer. In all tensors time comes first, then the environment."""

    frames: torch.Tensor  # uint8, (length + 1, envs, stack, height, width); the last is what came after the last step
    actions: torch.Tensor  # int64, (length, envs)
    rewards: torch.Tensor  # float32, (length, envs)
    log_probs: torch.Tensor  # float32, (length, envs); of the actions, under the policy that chose them
    masks: torch.Tensor  # float32, (length, envs); 0 where an episode ended with this step
    info: TrajectoryInfo


@dataclass(slots=True)
class Weights:
    """A new policy: trainer to rollout."""

    version: int
    trained: int  # how many of the receiver's own trajectories went into it or into versions before
    state: dict[str, torch.Tensor]


@dataclass(slots=True)
class Farewell:
    """A rollout worker's last message, after its last trajectory."""

    steps: int
    swaps: int  # how often it took new weights
    lasted_s: float
    waited_s: float  # of that, for the trainer: it had played ahead as far as it may
