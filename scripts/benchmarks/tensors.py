"""Tensors to send, and what every contender does to a tensor's bytes."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

__all__ = [
    "STREAM_BYTES",
    "byte_view",
    "check_bulk",
    "check_stream",
    "copied_bytes",
    "made_from",
    "make_bulk",
    "make_stream",
]

STREAM_ELEMENTS: Final = 64
STREAM_BYTES: Final = STREAM_ELEMENTS * 4
_DISTINCT: Final = 16


def make_bulk(nbytes: int) -> torch.Tensor:
    """A float32 tensor whose content shows shifted or missing parts."""
    return torch.arange(nbytes // 4, dtype=torch.float32)


def check_bulk(tensor: torch.Tensor, nbytes: int) -> None:
    """Raise unless ``tensor`` is what ``make_bulk`` made."""
    if not torch.equal(tensor.view(torch.float32), make_bulk(nbytes)):
        raise AssertionError("the tensor that arrived is not the one that was sent")


def make_stream() -> list[torch.Tensor]:
    """The few distinct small tensors that a stream of messages cycles through."""
    return [torch.arange(STREAM_ELEMENTS, dtype=torch.float32) + index for index in range(_DISTINCT)]


def check_stream(tensor: torch.Tensor, index: int) -> None:
    """Raise unless ``tensor`` is the one that message ``index`` carried."""
    if tensor.dtype != torch.float32 or tensor.tolist() != [float(index % _DISTINCT + i) for i in range(STREAM_ELEMENTS)]:
        raise AssertionError(f"message {index} does not hold what was sent")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as flat bytes, without a copy."""
    view: memoryview = tensor.numpy().data
    return view.cast("B")


def copied_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in memory of their own: what has to happen before ``send`` may return."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def made_from(data: bytes | memoryview) -> torch.Tensor:
    """A writable float32 tensor that owns a copy of ``data``."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32)
