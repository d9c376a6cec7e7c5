"""The policy: a small actor-critic over stacked frames."""

from __future__ import annotations

import math

import torch
from torch import nn

from atari.games import SIZE, STACK

__all__ = ["Policy"]


class Policy(nn.Module):
    """Frames in; logits of the actions and the value of the state out. About 0.2 million parameters."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(STACK, 16, kernel_size=6, stride=3),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        features = self.body(torch.zeros(1, STACK, SIZE, SIZE)).shape[1]
        self.hidden = nn.Sequential(nn.Linear(features, 256), nn.ReLU())
        self.logits = nn.Linear(256, actions)
        self.value = nn.Linear(256, 1)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter, math.sqrt(2))
        nn.init.orthogonal_(self.logits.weight, 0.01)  # at first all actions are about equally likely
        nn.init.orthogonal_(self.value.weight, 1.0)

    def forward(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (batch, STACK, SIZE, SIZE) to log-probabilities (batch, actions) and values (batch,)."""
        hidden = self.hidden(self.body(frames.float() / 255))
        return self.logits(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)
