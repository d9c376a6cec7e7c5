"""TensorBufferPool: memory for payloads, used again, so that steady traffic touches no fresh pages.

First touch of fresh memory costs many times the copy into it. A pool hands out tensors over buffers of its own; a buffer comes back by
itself when the last view of its memory is gone (a slice, a NumPy array, a tensor in a replay buffer), never before.

For debugging, with AIORLINF_DEBUG_POOL=1 in the environment, memory that comes back is overwritten with 0xDB bytes at once.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aiorlinf.codec.buffer import Buffer, capacity_for
from aiorlinf.codec.pool_index import PoolIndex

__all__ = ["BufferPoolStats", "Lease", "TensorBufferPool"]

SMALL_BYTES = 64 * 1024
"""Smaller memory is quicker to make than to keep."""

_POISON = 0xDB


@dataclass(frozen=True, slots=True)
class BufferPoolStats:
    """What a worker's pool of buffers looks like, and what it has done so far.

    Attributes:
        max_bytes: bound on the next two together (cluster.collective.tensor_buffer_pool.max_bytes).
        leased_bytes: in buffers whose memory somebody still uses.
        cached_bytes: in idle buffers.
        hits: requests met by an idle buffer.
        misses: requests met by a new buffer.
        unpooled: requests for which there was no room; they got memory of their own.
        evictions: idle buffers given up to make room.
        trims: idle buffers given back to the system because nobody used them (cluster.collective.memory_allocator: aggressive).
    """

    max_bytes: int
    leased_bytes: int
    cached_bytes: int
    hits: int
    misses: int
    unpooled: int
    evictions: int
    trims: int


class Lease:
    """Memory from a pool. It ends with the last view of `tensor` or `view`; this handle is one of them.

    Attributes:
        nbytes: size.
    """

    __slots__ = ("_buffer", "_root", "nbytes")

    def __init__(self, buffer: Buffer, root: Any) -> None:
        self.nbytes: int = root.nbytes
        self._buffer: Buffer | None = buffer
        self._root = root  # what everything made from it refers to

    @property
    def tensor(self) -> torch.Tensor:
        """One-dimensional uint8 of exactly `nbytes` elements, uninitialised. Raises RuntimeError after `release`."""
        if self._root is None:
            raise RuntimeError("the lease was released")
        return torch.from_numpy(self._root)

    @property
    def view(self) -> memoryview:
        """The same memory for those who need no tensor, which costs ten times as much to make. Raises RuntimeError after `release`."""
        if self._root is None:
            raise RuntimeError("the lease was released")
        return memoryview(self._root)

    def release(self, *, keep: bool = True) -> None:
        """Let go: the buffer is idle at once, unless somebody else still has a view; then it is when that one goes. Any thread.

        Args:
            keep: False: the buffer is not worth keeping, its memory goes back to the system.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not keep:
            buffer.keep = False
        self._root = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class TensorBufferPool:
    """See the module. One thread (the home thread) asks; memory may come back in any.

    Args:
        max_bytes: bound on what is in use and what is kept, together. 0: everything is unpooled.

    Attributes:
        on_idle: called when a buffer comes back, in whatever thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self.on_idle: Callable[[], None] | None = None
        self._index: PoolIndex[Buffer] = PoolIndex(max_bytes)
        # Memory comes back in finalizers: in any thread, and wherever the garbage collector strikes, also within our own methods. So they
        # touch nothing but this queue, which needs no lock.
        self._returned: deque[Buffer] = deque()
        self._closed = False
        self._poison = os.environ.get("AIORLINF_DEBUG_POOL", "0") not in ("", "0")

    def acquire(self, nbytes: int) -> Lease | None:
        """Memory of exactly `nbytes` bytes (at least 1), at an address that is a multiple of 64. None if there is no room, or
        the pool is closed; never waits."""
        if self._closed:
            return None
        self._collect()
        grant = self._index.request(capacity_for(nbytes))
        if grant is None:
            return None
        for buffer in grant.evicted:
            buffer.let_go()
        made = grant.buffer or self._make(grant.capacity)
        if made is None:
            return None
        made.keep = True
        root = made.root(nbytes)
        finalizer = weakref.finalize(root, _came_back, weakref.ref(self), made)
        finalizer.atexit = False
        return Lease(made, root)

    def _make(self, capacity: int) -> Buffer | None:
        try:
            return Buffer(capacity)
        except (OSError, MemoryError):
            self.trim()
        try:
            return Buffer(capacity)
        except (OSError, MemoryError):
            self._index.fail(capacity)
            return None

    def empty(self, nbytes: int) -> torch.Tensor:
        """An uninitialised one-dimensional uint8 tensor: from the pool, or on its own where it is small or there is no room.

        Raises:
            RuntimeError: the system has no memory.
        """
        if nbytes >= SMALL_BYTES:
            lease = self.acquire(nbytes)
            if lease is not None:
                return lease.tensor
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the caller's default device is

    def _collect(self) -> None:
        """Take in what has come back."""
        returned, index = self._returned, self._index
        while returned:
            buffer = returned.popleft()
            if self._closed or not buffer.keep:
                index.forget(buffer.capacity)
                buffer.let_go()
            elif not index.give(buffer.capacity, buffer):
                buffer.let_go()

    def _take_back(self, buffer: Buffer) -> None:
        """The last view is gone. Any thread, any moment."""
        if self._closed or not buffer.keep:
            buffer.let_go()
        elif self._poison:
            buffer.fill(_POISON)
        self._returned.append(buffer)
        if self.on_idle is not None:
            self.on_idle()

    # ---- giving memory back

    def resize(self, max_bytes: int) -> None:
        """Set the bound. What is in use stays."""
        self._collect()
        _let_go(self._index.resize(max_bytes))

    def age(self) -> bool:
        """Give up the buffers that have been idle since before the last call; whether idle ones remain."""
        self._collect()
        _let_go(self._index.age())
        return self._index.cached_bytes > 0

    def trim(self) -> int:
        """Give up all idle buffers; returns their bytes."""
        self._collect()
        before = self._index.cached_bytes
        _let_go(self._index.clear())
        return before

    def close(self) -> None:
        """Keep nothing any more. Memory in use stays valid and goes back to the system with its last view."""
        self._closed = True
        self.trim()

    def stats(self) -> BufferPoolStats:
        """A frozen copy of the counters."""
        self._collect()
        index = self._index
        return BufferPoolStats(
            max_bytes=index.max_bytes,
            leased_bytes=index.leased_bytes,
            cached_bytes=index.cached_bytes,
            hits=index.hits,
            misses=index.misses,
            unpooled=index.unpooled,
            evictions=index.evictions,
            trims=index.trims,
        )


def _came_back(pool: weakref.ref[TensorBufferPool], buffer: Buffer) -> None:
    """The finalizer. It does not keep the pool, whose idle buffers would then live as long as any tensor."""
    owner: Any = pool()
    if owner is not None:
        owner._take_back(buffer)


def _let_go(buffers: list[Buffer]) -> None:
    for buffer in buffers:
        buffer.let_go()
