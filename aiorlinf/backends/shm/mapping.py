"""Memory of a file, mapped into this process.

Making and ending a mapping of some hundred MiB takes the kernel up to a second, and Python's own `mmap` keeps the interpreter locked
meanwhile: every thread stands still, the event loop too. Here the kernel is called through ctypes, which lets the others run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Mapping", "let_go"]

_PROT = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED = getattr(mmap, "MAP_SHARED", 1)
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


class Mapping:
    """The first `size` bytes of the file that `fd` refers to, readable and writable. It ends with its last reference.

    Args:
        size: bytes, at least 1.

    Attributes:
        address: where it is.

    Raises:
        OSError: no address space, or too many mappings.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_unmap", "address", "size")

    def __init__(self, fd: int, size: int) -> None:
        calls = _calls()
        address = calls.mmap(None, size, _PROT, _MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address: int = address
        self.size: int = size
        self._unmap: Callable[[int, int], int] = calls.munmap  # at the interpreter's end the module may be gone before the last view
        # What NumPy needs to make an array of this memory; the array refers to this object.
        self.__array_interface__: dict[str, Any] = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}

    def make_pages(self) -> bool:
        """Give the file all its pages now, huge ones where the system has them. Blocks: call it in a private thread.

        False: the kernel (before Linux 5.14) cannot do that.

        Raises:
            OSError: there is no memory for them.
        """
        self._advise(_MADV_HUGEPAGE)  # a wish; that it cannot be met is no error
        error = self._advise(_MADV_POPULATE_WRITE)
        if not error:
            return True
        if error == errno.EINVAL:
            return False
        raise OSError(error, os.strerror(error))

    def enter_pages(self) -> None:
        """Enter all pages that the file has into this process's page table. Touching them costs the same, but stops whoever does it.

        Blocks: call it in a private thread.
        """
        self._advise(_MADV_POPULATE_READ)  # where the kernel cannot, they are entered on first touch

    def _advise(self, advice: int) -> int:
        """The number of the error, 0 for none."""
        return ctypes.get_errno() if _calls().madvise(self.address, self.size, advice) else 0

    def __del__(self) -> None:
        # Not there if the file could not be mapped.
        with contextlib.suppress(AttributeError):
            self._unmap(self.address, self.size)


def let_go(things: list[Any]) -> None:
    """Empty the list in a thread of its own. For last references to large mappings: to end one takes tens of milliseconds."""
    if not things:
        return
    try:
        threading.Thread(target=things.clear, name="aiorlinf unmap", daemon=True).start()
    except RuntimeError:  # no more threads can be had
        things.clear()


class _Calls:
    """The kernel's calls. Their C wrappers let other threads run."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self.mmap = library.mmap
        self.mmap.restype = ctypes.c_void_p
        self.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        self.munmap = library.munmap
        self.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.madvise = library.madvise
        self.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@functools.cache
def _calls() -> _Calls:
    return _Calls()
