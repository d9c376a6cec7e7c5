"""A work that takes its outcome from something else: another work, a coroutine, a future, a call in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from aiorlinf.errors import ClosedError, UsageError
from aiorlinf.work.base import CANCELLED, DONE, FAILED, AsyncWork
from aiorlinf.work.pool import Job
from aiorlinf.work.waiters import Entry, OutsideWaiter

if TYPE_CHECKING:
    from aiorlinf.work.failure import Failure

__all__ = ["FollowingWork", "is_followed"]

R = TypeVar("R")

_log = logging.getLogger("aiorlinf")


def is_followed(value: object) -> bool:
    """Whether a then-step that returns this is over only when this is."""
    return hasattr(type(value), "__await__") or isinstance(value, concurrent.futures.Future)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class ForeignSource(OutsideWaiter):
    """A work of another home that is followed; told on that home's thread."""

    __slots__ = ("follower", "work")

    def __init__(self, follower: FollowingWork[Any], work: AsyncWork[Any]) -> None:
        super().__init__()
        self.follower = follower
        self.work = work

    def _settled(self, work: AsyncWork[Any]) -> None:
        try:
            self.follower._home.call_soon(self.follower._advance)
        except ClosedError:  # the follower's loop is gone: nobody will take the value
            work._leave(self, True)

    def drop(self) -> None:
        """The follower no longer wants it: cancel it unless others do."""
        work = self.work
        try:
            work._home.call_soon(work._leave_unless_needed, self)
        except ClosedError:  # its loop is gone, and it with it
            pass


Source = AsyncWork[Any] | ForeignSource | asyncio.Future[Any] | concurrent.futures.Future[Any] | Job


class FollowingWork(AsyncWork[R], Entry):
    """Base of the works that follow something.

    ``_source`` is what it waits for at the moment, and None before it waits for anything and after it is over. ``_advance`` is called, through the
    trampoline, when a work that it waits for is over.
    """

    __slots__ = ("_context", "_source")

    _source: Source | None
    _context: contextvars.Context | None

    # -- following --------------------------------------------------------------------------------------------

    def _follow(self, value: Any) -> None:
        """End with ``value``, or with the outcome of what it stands for."""
        if not is_followed(value):
            self._finish(value)
            return
        try:
            self._follow_awaitable(value)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # an awaitable that cannot even be started is this work's error, as if its step had raised it
            self._fail(error)

    def _follow_awaitable(self, value: Any) -> None:
        if isinstance(value, AsyncWork):
            self._follow_work(value)
        elif isinstance(value, concurrent.futures.Future):
            self._source = value
            value.add_done_callback(self._outside_future_done)
        elif asyncio.isfuture(value):
            self._source = value
            loop = value.get_loop()
            if loop is self._home.loop:
                value.add_done_callback(self._future_done)
            else:
                loop.call_soon_threadsafe(value.add_done_callback, self._outside_future_done)
        else:
            coro: Coroutine[Any, Any, Any] = value if asyncio.iscoroutine(value) else _await(value)
            task = self._home.hold(coro, self._operation, self._context)
            self._source = task
            task.add_done_callback(self._future_done)

    def _follow_work(self, work: AsyncWork[Any]) -> None:
        if depends_on(work, self):
            raise UsageError("a then-step cannot wait for its own chain", operation=self._operation)
        if work._home is self._home:
            self._source = work
            if work._state:
                self._home.advance(self)
            else:
                work._attach(self)
        else:
            foreign = ForeignSource(self, work)
            self._source = foreign
            work._home.call(work._attach_outside, foreign)

    def _settled(self, work: AsyncWork[Any]) -> None:
        self._home.advance(self)

    def _advance(self) -> None:
        """The work that is followed is over."""
        source, self._source = self._source, None
        if self._state:
            if isinstance(source, ForeignSource):
                source.drop()
            return
        if isinstance(source, ForeignSource):
            self._take_over_foreign(source)
        elif isinstance(source, AsyncWork):
            self._take_over(source)

    def _take_over(self, work: AsyncWork[Any]) -> None:
        if work._state == DONE:
            # The value is only passing through, so the right to give it back passes through too.
            self._give_back, work._give_back = work._give_back, None
            self._follow(work._value)
        elif work._state == FAILED:
            self._share(work._value)
        else:
            self._settle(CANCELLED, None)

    def _take_over_foreign(self, foreign: ForeignSource) -> None:
        work = foreign.work
        try:
            value = work._outcome()
        except BaseException as error:  # passed on unchanged
            self._fail(error)
        else:
            self._follow(value)

    def _share(self, failure: Failure) -> None:
        self._abort = None
        self._settle(FAILED, failure)

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        self._future_over(future)

    def _outside_future_done(self, future: Any) -> None:
        """Called in any thread."""
        try:
            self._home.call_soon(self._future_over, future)
        except ClosedError:  # nobody is left to tell
            pass

    def _future_over(self, future: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
        if future.cancelled():
            if not self._state:
                self._source = None
                self._settle(CANCELLED, None)
            return
        error = future.exception()
        if self._state:
            if error is not None:
                self._log_late(error)
            return
        self._source = None
        if error is not None:
            self._fail(error)
        else:
            self._follow(future.result())

    def _log_late(self, error: BaseException) -> None:
        _log.error("%s, begun at %s, failed after it was given up", self._operation, self.site, exc_info=error)

    # -- calls in threads -------------------------------------------------------------------------------------

    def _call_in_thread(self, call: Callable[[], Any]) -> None:
        try:
            self._source = self._home.pool.submit(call, self._thread_report)
        except ClosedError as error:
            self._fail(error)

    def _thread_report(self, value: Any, error: BaseException | None) -> None:
        try:
            self._home.call_soon(self._thread_over, value, error)
        except ClosedError:  # nobody is left to tell
            pass

    def _thread_over(self, value: Any, error: BaseException | None) -> None:
        if self._state:
            if error is not None and not isinstance(error, ClosedError):
                self._log_late(error)
            return
        self._source = None
        if error is not None:
            self._fail(error)
        else:
            self._follow(value)

    # -- giving up --------------------------------------------------------------------------------------------

    def _abandon(self, state: int, value: Any) -> None:
        """Cancel backwards as far as nobody else depends on it, then end this one.

        The steps on the way have one dependant each, the next of them, so they are ended one by one here, whatever the length of the chain.
        """
        path: list[FollowingWork[Any]] = [self]
        root: AsyncWork[Any] | None = None
        while True:
            source = path[-1]._source
            if not isinstance(source, AsyncWork) or source._state or source._dependants() > 1:
                break
            source._detach(path[-1])
            if isinstance(source, FollowingWork):
                path.append(source)
            else:
                root = source
                break
        if root is not None:
            root._abandon(CANCELLED, None)
        else:
            path[-1]._release_source()
        for work in reversed(path):
            work._source = None
            if work is not self and not work._state:
                AsyncWork._abandon(work, CANCELLED, None)
        if not self._state:
            AsyncWork._abandon(self, state, value)

    def _release_source(self) -> None:
        """Let go of a source that others need too, or that is not a work."""
        source = self._source
        if isinstance(source, AsyncWork):
            source._detach(self)
        elif isinstance(source, ForeignSource):
            source.drop()
        elif isinstance(source, Job):
            source.withdraw()
        elif isinstance(source, concurrent.futures.Future):
            source.cancel()
        elif source is not None:
            loop = source.get_loop()
            if loop is self._home.loop:
                source.cancel()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(source.cancel)


def depends_on(work: AsyncWork[Any], target: AsyncWork[Any]) -> bool:
    """Whether ``work`` waits, directly or through others of its home, for ``target``."""
    while work is not target:
        source = work._source if isinstance(work, FollowingWork) else None
        if not isinstance(source, AsyncWork):
            return False
        work = source
    return True
