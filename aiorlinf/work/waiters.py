"""What a pending work holds on behalf of those that wait for it.

An entry is either an ``asyncio.Future`` of the home loop (a task that awaits there) or one of these. When the work is over it calls
``_settled(work)`` on each, once, on the home thread. ``counts`` says whether the entry is a dependant: a work that has other dependants
is not cancelled because one branch is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from _thread import LockType

    from aiorlinf.work.base import AsyncWork

__all__ = ["Callback", "Entry", "LoopWaiter", "OutsideWaiter", "ThreadWaiter", "wake"]


class Entry:
    """Base of the entries that are not futures."""

    __slots__ = ()
    counts: ClassVar[bool] = True

    def _settled(self, work: AsyncWork[Any]) -> None:
        """The work is over."""


def wake(future: asyncio.Future[bool]) -> None:
    """Let the task behind the future go on, if it still waits."""
    if not future.done():
        future.set_result(True)


class Callback(Entry):
    """A user's done callback. ``loop`` is the loop it was added from, if that is not the home's."""

    __slots__ = ("context", "fn", "loop")
    counts = False

    def __init__(self, fn: Callable[[Any], object], context: Context, loop: asyncio.AbstractEventLoop | None) -> None:
        self.fn: Callable[[Any], object] = fn
        self.context: Context = context
        self.loop: asyncio.AbstractEventLoop | None = loop

    def _settled(self, work: AsyncWork[Any]) -> None:
        work._mark_seen()
        if self.loop is not None:
            try:
                self.loop.call_soon_threadsafe(self.fn, work, context=self.context)
            except RuntimeError:  # that loop has ended meanwhile; better called on the home than never
                pass
            else:
                return
        work._home.loop.call_soon(self.fn, work, context=self.context)


class OutsideWaiter(Entry):
    """A dependant that has a claim on the value, from being attached until it leaves. ``live`` is true in between."""

    __slots__ = ("live",)

    def __init__(self) -> None:
        self.live: bool = False


class LoopWaiter(OutsideWaiter):
    """A task that awaits on another loop."""

    __slots__ = ("future", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop = loop
        self.future: asyncio.Future[bool] = loop.create_future()

    def _settled(self, work: AsyncWork[Any]) -> None:
        try:
            self.loop.call_soon_threadsafe(wake, self.future)
        except RuntimeError:  # that loop is closed, and its task with it
            work._leave_soon(self, True)


class ThreadWaiter(OutsideWaiter):
    """A thread blocked in ``wait()``."""

    __slots__ = ("lock",)

    def __init__(self, lock: LockType) -> None:
        super().__init__()
        self.lock: LockType = lock

    def _settled(self, work: AsyncWork[Any]) -> None:
        self.lock.release()
