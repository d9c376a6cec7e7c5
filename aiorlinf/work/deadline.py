"""One time budget for all steps of an operation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from aiorlinf.errors import DeadlineExceeded, UsageError
from aiorlinf.work.waiters import Entry

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.work.base import AsyncWork

__all__ = ["NEAR_S", "NO_DEADLINE", "Deadline", "Timer", "check_limit", "current_deadline", "effective_deadline", "expire"]


class Deadline(NamedTuple):
    """A moment on the monotonic clock by which something has to be over; infinity for no limit."""

    end: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """The moment in ``seconds`` from now; None means no limit.

        Raises:
            UsageError: it is no number. One that is not even comparable would put a loop's timers out of order.
        """
        if seconds is None:
            return NO_DEADLINE
        try:
            end = time.monotonic() + seconds
        except TypeError:
            end = math.nan
        if math.isnan(end):
            raise UsageError(f"timeout={seconds!r}", hint="a time limit is a number of seconds, or None for none")
        return cls(end)

    @property
    def bounded(self) -> bool:
        """Whether there is a limit at all."""
        return self.end != math.inf

    def remaining(self) -> float:
        """Seconds left: never less than 0, infinity without a limit."""
        return max(0.0, self.end - time.monotonic())

    def left(self) -> float | None:
        """``remaining()``, with None for no limit, as asyncio and sockets want it."""
        return None if self.end == math.inf else max(0.0, self.end - time.monotonic())

    def passed(self) -> bool:
        """Whether no time is left."""
        return self.end <= time.monotonic()


NO_DEADLINE = Deadline(math.inf)

NEAR_S = 0.5
"""So long before the end of a limit that is at least twice as long somebody may be told that it is near."""

current_deadline: ContextVar[Deadline] = ContextVar("aiorlinf_deadline", default=NO_DEADLINE)
"""The budget of the chain whose step is running, so that operations begun inside a step are under it too."""


def effective_deadline(timeout: float | None) -> Deadline:
    """The deadline of an operation that begins now: ``timeout`` seconds from now, or the running chain's, whichever comes first."""
    return min(Deadline.after(timeout), current_deadline.get())


def check_limit(timeout: float | None) -> None:
    """For a call, before it begins anything that could not be taken back. Raises UsageError if this is no time limit."""
    if timeout is not None:
        Deadline.after(timeout)


class Timer(Entry):
    """The clock of one work; stopped when the work is over."""

    __slots__ = ("handle", "make_error", "near")
    counts = False

    def __init__(self, make_error: Callable[[float], BaseException] | None, near: Callable[[], None] | None = None) -> None:
        self.make_error: Callable[[float], BaseException] | None = make_error
        self.near = near
        self.handle: asyncio.TimerHandle | None = None

    def arm(self, work: AsyncWork[Any]) -> None:
        """Start it; home thread only."""
        if not work._state:
            work._attach(self)
            self._wind(work)

    def _wind(self, work: AsyncWork[Any]) -> None:
        left = work._deadline.remaining()
        if self.near is not None:
            if left >= 2 * NEAR_S:
                left -= NEAR_S
            else:
                self.near = None
        self.handle = work._home.loop.call_later(left, self._ring, work)

    def _ring(self, work: AsyncWork[Any]) -> None:
        if work._state:
            return
        if not work._deadline.passed():
            near, self.near = self.near, None
            if near is not None:
                near()
            self._wind(work)  # also where the loop's clock is coarser than ours
            return
        work._expire(self._error(work, time.monotonic() - work._born))

    def _error(self, work: AsyncWork[Any], elapsed: float) -> BaseException:
        cause: Exception | None = None
        if self.make_error is not None:
            try:
                return self.make_error(elapsed)
            except Exception as error:  # the work has to end all the same
                cause = error
        late = DeadlineExceeded("the time limit passed", operation=work._operation, step=work._operation, elapsed=elapsed)
        late.__cause__ = cause
        return late

    def _settled(self, work: AsyncWork[Any]) -> None:
        if self.handle is not None:
            self.handle.cancel()


def expire(
    work: AsyncWork[Any],
    limit: Deadline | float,
    make_error: Callable[[float], BaseException] | None = None,
    near: Callable[[], None] | None = None,
) -> None:
    """Put a work, and the then-steps that will be attached to it, under a deadline, or a limit in seconds from now.

    When it passes the work is aborted and fails with ``make_error(elapsed)``, elapsed in seconds since it was made; by default a
    DeadlineExceeded. One timer of the home loop, stopped when the work is over. For the producer, before it hands the work out; any thread.
    ``near`` is called once when `NEAR_S` are left, if the limit is at least twice as long and the work not over by then.
    """
    deadline = limit if isinstance(limit, Deadline) else Deadline.after(limit)
    if deadline.bounded and not work._state:
        work._deadline = deadline
        work._home.call(Timer(make_error, near).arm, work)
