"""What codecs read from and write to: memory, as flat bytes and by address. Does not import torch; a tensor is known by its methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from aiorlinf.wire.shown import shown

if TYPE_CHECKING:
    import torch

__all__ = ["BufferLease", "BufferSource", "Memory", "address_of", "byte_view", "writable_view"]

Memory: TypeAlias = "memoryview | bytes | bytearray | torch.Tensor"
"""Contiguous memory of the CPU. A tensor is one of dtype uint8."""


class BufferLease(Protocol):
    """Memory on loan. It goes back with `release`, at the earliest when the last view of it is gone."""

    @property
    def view(self) -> memoryview:
        """All of it, writable."""

    def release(self, *, keep: bool = True) -> None:
        """Let go; `keep` False: it is not worth keeping for the next one."""


class BufferSource(Protocol):
    """Where buffers come from, such as a `TensorBufferPool`."""

    def acquire(self, nbytes: int) -> BufferLease | None:
        """A buffer of at least `nbytes` bytes; None if there is none now. Never waits."""


def byte_view(memory: Memory) -> memoryview:
    """The memory as a flat view of unsigned bytes, without a copy.

    Raises:
        BufferError: not contiguous, or not in CPU memory.
    """
    if isinstance(memory, memoryview):
        view = memory
    elif isinstance(memory, (bytes, bytearray)):
        view = memoryview(memory)
    else:
        view = shown(memory)
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    # A view without elements cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def writable_view(memory: Memory) -> memoryview:
    """As `byte_view`, for memory that is to be written.

    Raises:
        BufferError: it is read-only.
    """
    view = byte_view(memory)
    if view.readonly:
        raise BufferError("the memory to be written is read-only")
    return view


def address_of(view: memoryview) -> int:
    """Where the bytes of a flat view lie. Valid as long as the view is held; 0 if it is empty."""
    if not view.nbytes:
        return 0
    array: Any = np.frombuffer(view, dtype=np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address
