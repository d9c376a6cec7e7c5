"""Tensors as bytes, for the transports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from aiorlinf.codec.pool import TensorBufferPool

__all__ = ["byte_tensor", "byte_view", "fresh_bytes"]


def fresh_bytes(nbytes: int, pool: TensorBufferPool | None) -> torch.Tensor:
    """Memory that becomes a received leaf: one-dimensional uint8."""
    if pool is not None:
        return pool.empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the caller's default device is


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as one-dimensional uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor, writable."""
    array: Any = tensor.numpy()  # NumPy's stubs do not say that arrays are buffers on every Python
    return memoryview(array)
