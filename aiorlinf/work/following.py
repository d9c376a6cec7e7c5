"""A work that takes its outcome from something else: another work, a coroutine, a future, a call in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from aiorlinf.errors import AiorlinfError, ClosedError, UsageError
from aiorlinf.work.base import CANCELLED, DONE, FAILED, AsyncWork
from aiorlinf.work.deadline import Timer
from aiorlinf.work.pool import Job
from aiorlinf.work.waiters import Entry, OutsideWaiter

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["FollowingWork", "ForeignSource", "is_followed", "waits_for"]

R = TypeVar("R")

_log = logging.getLogger("aiorlinf")


def is_followed(value: object) -> bool:
    """Whether a then-step that returns this is over only when this is."""
    return hasattr(type(value), "__await__") or isinstance(value, concurrent.futures.Future)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class ForeignSource(OutsideWaiter):
    """A work of another home that is followed. It is told on that home's thread."""

    __slots__ = ("follower", "work")

    def __init__(self, follower: FollowingWork[Any], work: AsyncWork[Any]) -> None:
        super().__init__()
        self.follower: FollowingWork[Any] = follower
        self.work: AsyncWork[Any] = work

    def _settled(self, work: AsyncWork[Any]) -> None:
        try:
            self.follower._home.call_soon(self.follower._advance)
        except ClosedError:  # the follower's loop is gone: nobody will take the value
            work._leave_soon(self, True)

    def drop(self, _value: object = None) -> None:
        """The follower no longer wants it: cancel it unless others do. Serves as ``give_back`` of the follower."""
        try:
            self.work._home.call_soon(self.work._leave_unless_needed, self)
        except ClosedError:  # its loop is gone, and it with it
            pass


class FollowingWork(AsyncWork[R], Entry):
    """Base of the works that follow something.

    ``_source`` is what it waits for at the moment; None when it waits for nothing. ``_advance`` is called through the trampoline when the
    work that it waits for is over.
    """

    __slots__ = ("_context", "_queued", "_source", "_timed")

    _source: AsyncWork[Any] | ForeignSource | asyncio.Future[Any] | concurrent.futures.Future[Any] | Job | None
    _queued: bool  # was told that the work before it is over, and has a claim on its value until it advances or is cancelled
    _context: contextvars.Context
    _timed: bool  # has a timer of its own; as long as the work before it runs, that one's timer does for both

    def __init__(
        self,
        home: LoopHome,
        operation: str,
        *,
        abort: Callable[[AsyncWork[R]], object] | None = None,
        give_back: Callable[[R], object] | None = None,
        detail: Any = None,
    ) -> None:
        super().__init__(home, operation, abort=abort, give_back=give_back, detail=detail)
        self._source = None
        self._queued = self._timed = False
        self._context = contextvars.copy_context()

    # -- following --------------------------------------------------------------------------------------------

    def _follow(self, value: Any) -> None:
        """End with ``value``, or with the outcome of what it stands for."""
        if self._state or not is_followed(value):
            self._finish(value)
            return
        self._start_timer()
        try:
            self._follow_awaitable(value)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # an awaitable that cannot even be started is this work's error, as if its step had raised it
            self._fail(error)

    def _start_timer(self) -> None:
        if self._deadline.bounded and not self._timed:
            self._timed = True
            Timer(None).arm(self)

    def _follow_awaitable(self, value: Any) -> None:
        if isinstance(value, AsyncWork):
            self._follow_work(value)
        elif isinstance(value, concurrent.futures.Future):
            self._source = value
            value.add_done_callback(self._outside_future_over)
        elif asyncio.isfuture(value):
            self._source = value
            loop = value.get_loop()
            if loop is self._home.loop:
                value.add_done_callback(self._future_over)
            else:
                loop.call_soon_threadsafe(value.add_done_callback, self._outside_future_over)
        else:
            coro: Coroutine[Any, Any, Any] = value if asyncio.iscoroutine(value) else _await(value)
            task = self._home.hold(coro, self._operation, self._context)
            self._source = task
            task.add_done_callback(self._future_over)

    def _follow_work(self, work: AsyncWork[Any]) -> None:
        # A circle can only be closed here, and only through somebody who waits for this work already.
        if work is self or (self._entries is not None and waits_for(work, self)):
            raise UsageError("a then-step cannot wait for its own chain", operation=self._operation)
        if work._home is self._home:
            self._source = work
            if work._state:
                self._settled(work)
            else:
                work._attach(self)
        else:
            foreign = ForeignSource(self, work)
            self._source = foreign
            try:
                work._home.call_soon(work._attach_outside, foreign)
            except ClosedError:
                if not work._state:
                    raise
                self._advance()  # over, so its home is not needed

    def _settled(self, work: AsyncWork[Any]) -> None:
        work._claims += 1
        self._queued = True
        self._home.advance(self)

    def _advance(self) -> None:
        """The work that is followed is over."""
        source, self._source = self._source, None
        self._queued = False
        if isinstance(source, ForeignSource):
            self._take_over(source.work, source.drop)
        elif isinstance(source, AsyncWork):
            self._take_over(source, source._unclaim)

    def _take_over(self, work: AsyncWork[Any], give_back: Callable[[Any], object]) -> None:
        if work._state == DONE:
            value = work._value
            if work._give_back is not None and self._give_back is None and not is_followed(value):
                # It is only passing through. Our claim there stays, so a cancel before anybody takes it from us returns it to there.
                self._give_back = give_back
            self._follow(value)
        elif work._state == FAILED:
            self._settle(FAILED, work._value)
        else:
            self._settle(CANCELLED, None)

    def _future_over(self, future: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
        if future.cancelled():
            if not self._state:
                self._source = None
                self._let_go()
                self._settle(CANCELLED, None)
        elif (error := future.exception()) is not None:
            self._call_failed(error)
        else:
            self._source = None
            self._follow(future.result())

    def _outside_future_over(self, future: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
        """Called in any thread."""
        try:
            self._home.call_soon(self._future_over, future)
        except ClosedError:  # nobody is left to tell
            pass

    def _call_failed(self, error: BaseException) -> None:
        self._source = None
        if not self._fail(error) and not isinstance(error, ClosedError):
            _log.error("%s, begun at %s, failed after it was given up", self._operation, self.site, exc_info=error)

    # -- calls in threads -------------------------------------------------------------------------------------

    def _call_in_thread(self, call: Callable[[], Any], here: bool) -> None:
        """`here`: see `ThreadPool.submit`."""
        self._start_timer()
        try:
            self._source = self._home.pool.submit(call, self._thread_report, here=here)
        except AiorlinfError as error:
            self._fail(error)

    def _thread_report(self, value: Any, error: BaseException | None) -> None:
        try:
            self._home.call_soon(self._thread_over, value, error)
        except ClosedError:  # nobody is left to tell
            pass

    def _thread_over(self, value: Any, error: BaseException | None) -> None:
        if error is not None:
            self._call_failed(error)
        elif not self._state:
            self._source = None
            self._follow(value)

    # -- giving up --------------------------------------------------------------------------------------------

    def _abandon(self, state: int, value: Any) -> None:
        """Cancel backwards as far as nobody else depends on it, then end this one.

        Each work on the way has one dependant, the next on the way, so they are ended one by one here, whatever the length of the chain.
        """
        path: list[FollowingWork[Any]] = []
        root: AsyncWork[Any] = self
        while isinstance(root, FollowingWork):
            path.append(root)
            source = root._source
            if not isinstance(source, AsyncWork) or source._state:
                root._release_source()
                break
            source._detach(root)
            root._source = None
            if source._dependants():
                break
            root = source
        else:
            root._abandon(CANCELLED, None)
        for work in reversed(path):
            work._let_go()
            if not work._state:
                if work is self:
                    AsyncWork._abandon(work, state, value)
                else:
                    AsyncWork._abandon(work, CANCELLED, None)

    def _let_go(self) -> None:
        """It is being given up: drop what it holds for later."""

    def _release_source(self) -> None:
        """Let go of a source that is over, or that is not a work of this home."""
        source, self._source = self._source, None
        if isinstance(source, AsyncWork):
            if self._queued:
                source._unclaim()
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

    def _waits_on(self) -> Iterable[AsyncWork[Any]]:
        """The works that it waits for at the moment."""
        source = self._source
        if isinstance(source, ForeignSource):
            source = source.work
        return (source,) if isinstance(source, AsyncWork) else ()


def waits_for(work: AsyncWork[Any], target: AsyncWork[Any]) -> bool:
    """Whether ``work`` is ``target`` or waits, directly or through others, for it."""
    seen: set[int] = set()
    todo = [work]
    while todo:
        work = todo.pop()
        if work is target:
            return True
        if id(work) not in seen and (below := getattr(work, "_waits_on", None)) is not None:
            seen.add(id(work))
            todo.extend(below())
    return False
