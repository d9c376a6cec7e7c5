"""Memory of a peer that several may look at, each with a copy of its own from the moment that he writes to it.

What is sent to many lies in shared memory once. Every receiver maps that part of the memory file privately: a page is copied by the kernel
when it is first written to, and seen by nobody else. Until then all read the same page. This holds as long as nobody writes to the file
itself, which is why whoever made it, and reads it too, maps it like the others.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import numpy as np

from aiorlinf.backends.shm.mapping import _calls
from aiorlinf.backends.shm.regions import PAGE
from aiorlinf.backends.shm.segment import Segment

__all__ = ["private_view"]

_PROT_READ_WRITE = 3
_MAP_PRIVATE = 2
_LARGE_BYTES = 8 << 20
"""Ending a mapping takes the kernel about a millisecond per 32 MiB: larger ones are ended in a thread of their own."""


class _Private:
    """What the array refers to. It ends with its last reference."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


def private_view(segment: Segment, offset: int, size: int) -> Any:
    """A NumPy array over part of the segment that is the caller's own. It is a root, as that of `Segment.view`. Takes some microseconds.

    Args:
        segment: its descriptor must be open.
        offset: of the part; any.
        size: of the part, at least 1.

    Raises:
        OSError: no address space, or too many mappings.
    """
    calls = _calls()
    start = offset // PAGE * PAGE
    length = offset + size - start
    address = calls.mmap(None, length, _PROT_READ_WRITE, _MAP_PRIVATE, segment.fd, start)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    private = _Private(address + offset - start, size)
    finalizer = weakref.finalize(private, _end, calls.munmap, address, length)
    finalizer.atexit = False
    array: Any = np.asarray(private)  # NumPy's stubs do not say that arrays are buffers on every Python
    return np.frombuffer(memoryview(array), dtype=np.uint8)


def _end(munmap: Any, address: int, length: int) -> None:
    """Called in whatever thread let go of it, which may be that of an event loop."""
    if length > _LARGE_BYTES:
        try:
            threading.Thread(target=munmap, args=(address, length), name="aiorlinf unmap", daemon=True).start()
            return
        except RuntimeError:  # no more threads can be had
            pass
    munmap(address, length)
