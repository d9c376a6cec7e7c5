"""Memory files: made, mapped, checked.

A memory file has no name; it lives as long as a descriptor or a mapping of it, so that a killed process leaves nothing behind. Its
size is sealed, so that a peer cannot make our reads fail with SIGBUS by cutting it short.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from typing import Any

import numpy as np

from aiorlinf.errors import WireError

__all__ = ["Segment", "create_segment", "open_segment", "shm_problem"]

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)


def shm_problem() -> str | None:
    """Why memory files cannot be used on this system, None if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "memory files need Linux"
    if not _SEALS:
        return "this Python cannot seal memory files"
    return None


class Segment:
    """One mapped memory file.

    Attributes:
        number: names it between the two sides; given by its maker.
        size: bytes.
        fd: descriptor, -1 once closed; the mapping does not need it.
        address: where it is mapped, for copies.
    """

    __slots__ = ("__weakref__", "_array", "address", "fd", "number", "size")

    def __init__(self, number: int, size: int, fd: int, memory: mmap.mmap) -> None:
        self.number = number
        self.size = size
        self.fd = fd
        self._array: Any = np.frombuffer(memory, dtype=np.uint8)  # keeps the mapping; the mapping ends with its last view
        self.address: int = self._array.ctypes.data

    def view(self, offset: int, size: int) -> Any:
        """A NumPy array over part of the segment. It is a new root: everything made from it refers to it, not past it.

        That is what makes "the last view is gone" observable: a finalizer on the root.
        """
        # Through a memoryview: a slice of the array would have the whole segment's array as its base, not be one.
        return np.frombuffer(memoryview(self._array)[offset : offset + size], dtype=np.uint8)

    def close(self) -> None:
        """Close the descriptor. Views stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def create_segment(number: int, size: int) -> Segment:
    """A fresh segment whose pages exist. Blocks for as long as the kernel needs to make them: call it in a private thread.

    Raises:
        OSError: no memory, or no descriptors.
    """
    fd = os.memfd_create("aiorlinf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)  # fails now instead of killing a process on first touch
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        return Segment(number, size, fd, memory)
    except BaseException:
        os.close(fd)
        raise


def open_segment(number: int, size: int, fd: int) -> Segment:
    """Map a segment that a peer made; takes over `fd` and closes it.

    Raises:
        WireError: it is not a sealed memory file of that size.
        OSError: it cannot be mapped.
    """
    try:
        actual = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if actual != size or seals & _SEALS != _SEALS:
            raise WireError(f"the peer's memory file has {actual} bytes instead of {size}, or can be cut short")
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        return Segment(number, size, -1, memory)
    finally:
        os.close(fd)
