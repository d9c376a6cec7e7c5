"""Learning: PPO on V-trace targets, which allow for trajectories that an older policy played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atari.messages import Trajectory
from atari.policy import Policy

__all__ = ["Learner", "Update", "vtrace"]

DISCOUNT = 0.99
TRACE_DECAY = 0.95
CLIP = 0.2
ENTROPY_BONUS = 0.005
LEARNING_RATE = 1e-3
EPOCHS = 2
MINIBATCH = 256


@dataclass(frozen=True, slots=True)
class Update:
    """What one update was like; means over its minibatches."""

    version: int
    policy_loss: float
    value_loss: float
    entropy: float


class Learner:
    """Owns the policy that is trained.

    Attributes:
        version: counts the updates.
    """

    def __init__(self, actions: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.version = 0
        self._policy = Policy(actions)
        self._optimizer = torch.optim.Adam(self._policy.parameters(), LEARNING_RATE, eps=1e-5)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the weights: the next update writes to the originals while this one is still being sent."""
        return {name: tensor.clone() for name, tensor in self._policy.state_dict().items()}

    def update(self, trajectories: Sequence[Trajectory]) -> Update:
        """Learn from trajectories of one length. Takes a good part of a second: call it in a thread."""
        frames = torch.cat([trajectory.frames for trajectory in trajectories], dim=1)
        actions = torch.cat([trajectory.actions for trajectory in trajectories], dim=1)
        played = torch.cat([trajectory.log_probs for trajectory in trajectories], dim=1)
        # Their sign only: games differ in what a point is worth.
        rewards = torch.cat([trajectory.rewards for trajectory in trajectories], dim=1).sign()
        masks = torch.cat([trajectory.masks for trajectory in trajectories], dim=1)

        now, values = self._evaluate(frames, actions)
        targets, advantages = vtrace(rewards, masks, values, (now - played).exp())
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)

        flat = [tensor.flatten(0, 1) for tensor in (frames[:-1], actions, now, advantages, targets)]
        losses = [
            self._descend(*(tensor[chosen] for tensor in flat))
            for _ in range(EPOCHS)
            for chosen in torch.split(torch.randperm(len(flat[0])), MINIBATCH)
        ]
        self.version += 1
        policy_loss, value_loss, entropy = torch.stack(losses).mean(0).tolist()
        return Update(self.version, policy_loss, value_loss, entropy)

    @torch.no_grad()
    def _evaluate(self, frames: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the policy of now thinks: log-probabilities of the actions taken, values of all states."""
        parts = [self._policy(part) for part in torch.split(frames.flatten(0, 1), MINIBATCH)]
        log_probs = torch.cat([part[0] for part in parts]).view(*frames.shape[:2], -1)
        values = torch.cat([part[1] for part in parts]).view(frames.shape[:2])
        return log_probs[:-1].gather(2, actions.unsqueeze(2)).squeeze(2), values

    def _descend(
        self, frames: torch.Tensor, actions: torch.Tensor, before: torch.Tensor, advantages: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        log_probs, values = self._policy(frames)
        ratio = (log_probs.gather(1, actions.unsqueeze(1)).squeeze(1) - before).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        value_loss = nn.functional.mse_loss(values, targets)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        loss = policy_loss + 0.5 * value_loss - ENTROPY_BONUS * entropy
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._policy.parameters(), 0.5)
        self._optimizer.step()
        return torch.stack([policy_loss, value_loss, entropy]).detach()


def vtrace(rewards: torch.Tensor, masks: torch.Tensor, values: torch.Tensor, ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets for the values, and advantages.

    `ratios` say how much likelier each action is now than when it was played. Cut off at 1 they weigh each step, so what the policy
    of now would hardly do teaches it little. With all ratios 1 the advantages are those of generalised advantage estimation.

    Args:
        rewards, masks, ratios: (length, envs).
        values: (length + 1, envs).
    """
    weights = ratios.clamp(max=1)
    advantages = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        error = rewards[time] + DISCOUNT * masks[time] * values[time + 1] - values[time]
        running = weights[time] * (error + DISCOUNT * TRACE_DECAY * masks[time] * running)
        advantages[time] = running
    return values[:-1] + advantages, advantages
