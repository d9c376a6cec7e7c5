"""Memory and events of a fake accelerator that other processes of this host can open, as they can those of a real one.

Each lies in a memory file of its own, and a handle says where: the process, its descriptor, and the file's number, so that a descriptor
that has come to mean another file is noticed. Who has a file open keeps it, whatever becomes of the one that made it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from aiorlinf.testing.fake.memory import Memory

__all__ = ["Flag", "SharedMemory", "open_memory"]


class SharedMemory(Memory):
    """Memory in a file.

    Attributes:
        handle: for other processes, as long as this object lives.
    """

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("aiorlinf-fake-accelerator")
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        os.ftruncate(descriptor, max(1, nbytes))
        super().__init__(nbytes, _mapped(descriptor))
        self.spoil()
        self.handle: str = f"{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}"

    def close(self) -> None:
        """Nobody finds it by its handle any more."""
        self._close()


class Flag:
    """Something that is either so or not yet, for other processes to see."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory: Memory = SharedMemory(1) if memory is None else memory
        if memory is None:
            self._byte.value = 0

    @property
    def _byte(self) -> ctypes.c_uint8:
        return ctypes.c_uint8.from_address(self.memory.address)

    def up(self) -> None:
        """It is so from now on."""
        self._byte.value = 1

    @property
    def is_up(self) -> bool:
        """It is so."""
        return self._byte.value == 1


def open_memory(handle: str, nbytes: int) -> Memory:
    """What another process has in a file of this handle. Raises RuntimeError if it is not there any more."""
    process, number, inode = map(int, handle.split(":"))
    try:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"there is no such memory: {error.strerror}") from None
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise RuntimeError("there is no such memory: another lies there now")
        return Memory(nbytes, _mapped(descriptor))
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> mmap.mmap:
    """All of the file, for as long as anything refers to the map."""
    return mmap.mmap(descriptor, 0)
