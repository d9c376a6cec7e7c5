"""One buffer: memory that is handed out again and again."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

__all__ = ["ALIGNMENT", "Buffer", "capacity_for"]

ALIGNMENT = 64
"""Bytes. Every buffer starts at a multiple of it."""

_MAPPED_BYTES = 1 << 20
"""From this size on a buffer is a mapping of its own: its pages go back to the system when it goes, whatever lies around it."""

_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def capacity_for(nbytes: int) -> int:
    """Bytes of the smallest buffer for `nbytes`: whole pages for a mapping, else whole alignments."""
    step = mmap.PAGESIZE if nbytes >= _MAPPED_BYTES else ALIGNMENT
    return -(-nbytes // step) * step


class Buffer:
    """Memory of `capacity` bytes, uninitialised.

    Attributes:
        capacity: what the pool reckons with.
        keep: it is to be used again when it comes back.

    Raises:
        OSError, MemoryError: the system has no memory.
    """

    __slots__ = ("_memory", "_offset", "capacity", "keep")

    def __init__(self, capacity: int) -> None:
        self.capacity: int = capacity
        self.keep: bool = True
        self._offset = 0
        self._memory: mmap.mmap | memoryview | None
        if capacity >= _MAPPED_BYTES:
            # Private: a shared anonymous mapping would be a memory file, which gets no huge pages and which a fork would write to.
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if _HUGE_PAGES is not None:
                try:
                    memory.madvise(_HUGE_PAGES)
                except OSError:  # a kernel without them
                    pass
            self._memory = memory
        else:
            array: Any = np.empty(capacity + ALIGNMENT, dtype=np.uint8)
            self._offset = -array.ctypes.data % ALIGNMENT
            # As a memoryview: the base of a root must not be an array, see `root`.
            self._memory = memoryview(array)

    def root(self, nbytes: int) -> Any:
        """A NumPy array over the first `nbytes` bytes.

        It is the one object that everything made from it refers to (NumPy lets a view of a view refer to the first array), so the
        memory is free when it dies. It must be an array and nothing else: the garbage collector does not look into arrays, so one in a
        cycle dies only when nothing can reach it any more, not even a `__del__` of the same cycle.
        """
        return np.ndarray((nbytes,), np.uint8, self._memory, self._offset)

    def fill(self, value: int) -> None:
        """Overwrite all of it."""
        ctypes.memset(self.root(self.capacity).ctypes.data, value, self.capacity)

    def let_go(self) -> None:
        """The memory goes back to the system, at the latest with the last array over it."""
        self._memory = None
