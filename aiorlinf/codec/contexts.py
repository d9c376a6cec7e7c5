"""A bounded number of a codec's contexts, shared by both directions of a worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aiorlinf.codec.base import Context
from aiorlinf.errors import ClosedError

__all__ = ["ContextPool", "ContextSource"]


class ContextSource(Protocol):
    """Where a sender's contexts come from."""

    def try_acquire(self) -> Context | None:
        """A context, or None if there is none now. Never waits."""

    def release(self, context: Context) -> None:
        """Give one back."""


class ContextPool:
    """Last in, first out: the context used last is the one whose memory is in the cache. Home thread only.

    A sender tries (`try_acquire`) and does without; a receiver, whose payload is there already, waits its turn (`acquire`). A context
    is held only while a codec works, never while anything waits for the network or for memory, so every wait ends.

    Args:
        make: makes one.
        limit: how many there may be; None: `make` costs nothing, and there is no bound.

    Attributes:
        made: how many there are.
        waits: how often a receiver had to wait, ever.
    """

    def __init__(self, make: Callable[[], Context], limit: int | None) -> None:
        self.limit = limit
        self.made: int = 0
        self.waits: int = 0
        self._make = make
        self._idle: list[Context] = []
        self._waiters: deque[asyncio.Future[Context]] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many receivers wait now."""
        return len(self._waiters)

    @property
    def idle(self) -> int:
        """How many are free now."""
        return len(self._idle)

    def try_acquire(self) -> Context | None:
        """A context, or None if all are in use. Those who wait come first: while anybody does, none is free.

        Raises:
            MemoryError: there could be one more, but not now.
        """
        if self._closed:
            return None
        if self.limit is None:
            return self._make()
        if self._idle:
            return self._idle.pop()
        if self.made >= self.limit:
            return None
        context = self._make()
        self.made += 1
        return context

    async def acquire(self) -> Context:
        """A context; waits in line for it.

        Cancelling leaves the line; a context that was handed over in the same moment goes to the next in line.

        Raises:
            ClosedError: the pool is closed.
        """
        context = self.try_acquire()
        if context is not None:
            return context
        if self._closed:
            raise _closed()
        self.waits += 1
        waiter: asyncio.Future[Context] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def release(self, context: Context) -> None:
        """Give one back; it goes to the first in line."""
        if self.limit is None:
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(context)
                return
        if self._closed:
            self.made -= 1
        else:
            self._idle.append(context)

    def close(self) -> None:
        """Keep none, and fail those who wait with ClosedError. One in use is dropped when it comes back."""
        self._closed = True
        self.made -= len(self._idle)
        self._idle.clear()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(_closed())


def _closed() -> ClosedError:
    return ClosedError("the worker was closed while a payload waited to be decompressed")
