"""Tensors as bytes, for the transports."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import torch

from aiorlinf.wire.shown import shown

if TYPE_CHECKING:
    from aiorlinf.codec.pool import TensorBufferPool

__all__ = ["Copy", "byte_tensor", "byte_view", "copy_bytes", "fresh_bytes"]

_COPY_PIECE_BYTES = 4 << 20
"""A cancelled copy stops after so many bytes: about a millisecond."""


def fresh_bytes(nbytes: int, pool: TensorBufferPool | None) -> torch.Tensor:
    """Memory that becomes a received leaf: one-dimensional uint8."""
    if pool is not None:
        return pool.empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the caller's default device is


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as one-dimensional uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def copy_bytes(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between two one-dimensional uint8 tensors of one size, in the calling thread only, with the interpreter lock released.

    Not by `copy_`: it waits for all of torch's threads, on a busy machine for tens of milliseconds.
    """
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.numel())


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor, writable."""
    return shown(tensor)


class Copy:
    """Fills a caller's buffer in a private thread. Once `stop` has returned, nothing is written to the buffer any more."""

    __slots__ = ("_lock", "_out", "_source", "_stopped")

    def __init__(self, out: torch.Tensor, source: torch.Tensor) -> None:
        self._out = out
        self._source = source
        self._lock = threading.Lock()
        self._stopped = False

    def __call__(self) -> None:
        for start in range(0, self._out.numel(), _COPY_PIECE_BYTES):
            with self._lock:
                if self._stopped:
                    return
                copy_bytes(self._out[start : start + _COPY_PIECE_BYTES], self._source[start : start + _COPY_PIECE_BYTES])

    def stop(self) -> None:
        """Wait for the piece that is being copied, and copy no more."""
        with self._lock:
            self._stopped = True
