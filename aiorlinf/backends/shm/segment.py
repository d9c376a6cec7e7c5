"""Memory files: made, mapped, checked.

A memory file has no name; it lives as long as a descriptor or a mapping of it, so that a killed process leaves nothing behind. Its
size is sealed, so that a peer cannot make our reads fail with SIGBUS by cutting it short.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aiorlinf.backends.shm.mapping import Mapping
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

    __slots__ = ("__weakref__", "_array", "_mapping", "address", "fd", "number", "size")

    def __init__(self, number: int, fd: int, mapping: Mapping) -> None:
        self.number: int = number
        self.size: int = mapping.size
        self.fd: int = fd
        self.address: int = mapping.address
        self._mapping = mapping
        self._array: Any = np.asarray(mapping)  # refers to the mapping, as does every view: it ends with the last of them

    def view(self, offset: int, size: int) -> Any:
        """A NumPy array over part of the segment. It is a new root: everything made from it refers to it, not past it.

        That is what makes "the last view is gone" observable: a finalizer on the root.
        """
        # Through a memoryview: a slice of the array would have the whole segment's array as its base, not be one.
        return np.frombuffer(memoryview(self._array)[offset : offset + size], dtype=np.uint8)

    def enter_pages(self) -> None:
        """See `Mapping.enter_pages`."""
        self._mapping.enter_pages()

    def close(self) -> None:
        """Close the descriptor. Views stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # there is none, unless it was made in a thread and the loop ended before it could take it


def create_segment(number: int, size: int, *, populate: bool = True) -> Segment:
    """A fresh segment. With `populate` its pages exist, and it blocks for as long as the kernel needs to make them: call it in a private
    thread. Without, a page is made when it is first touched.

    Raises:
        OSError: no memory, or no descriptors.
    """
    fd = os.memfd_create("aiorlinf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = Mapping(fd, size)
        # Where the system counts what it has promised, a page that it cannot give would kill the process on first touch.
        if (populate or _counts_promises()) and not mapping.make_pages():
            os.posix_fallocate(fd, 0, size)
        return Segment(number, fd, mapping)
    except BaseException:
        os.close(fd)
        raise


def open_segment(number: int, size: int, fd: int, *, keep: bool = False) -> Segment:
    """Map a segment that a peer made; takes over `fd` and closes it, unless it is to `keep` it. Takes some microseconds.

    Raises:
        WireError: it is not a sealed memory file of that size.
        OSError: it cannot be mapped.
    """
    try:
        actual = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if actual != size or seals & _SEALS != _SEALS:
            raise WireError(f"the peer's memory file has {actual} bytes instead of {size}, or can be cut short")
        segment = Segment(number, -1, Mapping(fd, size))
        if keep:
            segment.fd, fd = fd, -1
        return segment
    finally:
        if fd >= 0:
            os.close(fd)


def _counts_promises() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False
