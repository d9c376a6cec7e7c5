"""Tensors as bytes, for the transports."""

from __future__ import annotations

import torch

__all__ = ["byte_tensor", "byte_view", "fresh_bytes"]


def fresh_bytes(nbytes: int) -> torch.Tensor:
    """Memory that becomes a received leaf: one-dimensional uint8."""
    return torch.empty(nbytes, dtype=torch.uint8)


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as one-dimensional uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor, writable."""
    return memoryview(tensor.numpy())
