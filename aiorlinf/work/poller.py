"""One poller per loop for completions that cannot call back, such as device events."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from aiorlinf.errors import ClosedError
from aiorlinf.work.waiters import Entry

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["Completion", "CompletionPoller", "Watch"]

T = TypeVar("T")

BUDGET_S = 0.0005
"""Most time spent asking in one turn of the loop; the rest is asked in the next."""

EAGER_TURNS = 8
"""Turns without a pause after something was added or got ready: most transfers are short, and company comes with them."""

FIRST_PAUSE_S = 50e-6
LAST_PAUSE_S = 1e-3
"""The pause doubles after each full round in which nothing got ready. Loops that count in milliseconds round it."""


class Completion(Protocol):
    """Something under way that can be asked."""

    def poll(self) -> bool:
        """True once it is done. Must not block. Raises what went wrong; it is not asked again after that."""
        ...

    def abort(self) -> None:
        """Nobody waits any more: stop what can be stopped. Called at most once, never after ``poll`` said True or raised."""
        ...


class Watch(Entry):
    """A completion and the work that it ends."""

    __slots__ = ("completion", "over", "poller", "value_fn", "work")
    counts = False

    def __init__(self, poller: CompletionPoller, completion: Completion, work: AsyncWork[Any], value_fn: Callable[[], Any] | None) -> None:
        self.poller: CompletionPoller = poller
        self.completion: Completion = completion
        self.work: AsyncWork[Any] = work
        self.value_fn: Callable[[], Any] | None = value_fn
        self.over: bool = False

    def _settled(self, work: AsyncWork[Any]) -> None:
        if not self.over:  # cancelled, or failed by somebody else
            self.poller._drop(self)


_Place: TypeAlias = tuple[int, int, Watch]
"""Its number in the line; one of its own, for an event may be waited for more than once; and who waits."""


class _Line:
    """Completions that happen one after the other, so that only the first of them is worth a question."""

    __slots__ = ("key", "watches")

    def __init__(self, key: Hashable) -> None:
        self.key: Hashable = key
        self.watches: list[_Place] = []  # a heap; those that are over stay until it is their turn


class CompletionPoller:
    """Asks all pending completions of a loop in turn, and ends their works. No thread is parked per waiter.

    It asks in every turn of the loop at first and backs off to once in a millisecond; nothing runs while nothing is pending. Of those that
    stand in one line only the first is asked. Home thread only.
    """

    def __init__(self, home: LoopHome) -> None:
        self._home = home
        self._lines: deque[_Line] = deque()  # that which is being asked is not in it
        self._named: dict[Hashable, _Line] = {}
        self._serials = itertools.count()
        self._pending = 0
        self._handle: asyncio.Handle | None = None
        self._soon = False  # it is for the next turn of the loop
        self._turning = False
        self._eager_left = 0
        self._pause = FIRST_PAUSE_S
        self._asked = 0  # since something last got ready or was added
        self._closed = False

    def __len__(self) -> int:
        """How many are pending."""
        return self._pending

    def watch(
        self,
        completion: Completion,
        work: AsyncWork[T],
        value_fn: Callable[[], T] | None = None,
        place: tuple[Hashable, int] | None = None,
    ) -> None:
        """End ``work`` with ``value_fn()``, or None, once ``completion`` is done; with its error if it raises.

        If the work is over first, as when it is cancelled, the completion is aborted.

        Args:
            place: a line, and a number there: it is never done before those with smaller numbers are, so it is not asked before. None: it
                stands alone.

        Raises:
            ClosedError: the home was closed.
        """
        if self._closed:
            raise ClosedError(f"{self._home.name} is closed")
        watch = Watch(self, completion, work, value_fn)
        self._pending += 1
        if work.done():
            self._drop(watch)
            return
        work._attach(watch)
        key, number = place if place is not None else (None, 0)
        line = self._named.get(key) if key is not None else None
        if line is None:
            line = _Line(key)
            if key is not None:
                self._named[key] = line
            self._lines.appendleft(line)
        heappush(line.watches, (number, next(self._serials), watch))
        self._hurry()
        # Once only, however many are added before that turn: a handle that is cancelled still costs the loop its share.
        if not self._turning and not (self._soon and self._handle is not None):
            if self._handle is not None:
                self._handle.cancel()
            self._soon = True
            self._handle = self._home.loop.call_soon(self._turn)

    def close(self) -> None:
        """Abort everything that is pending and fail its works with ClosedError."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        lines = [*self._named.values(), *(line for line in self._lines if line.key is None)]  # also that which is being asked
        self._forget()
        for line in lines:
            while line.watches:
                watch = heappop(line.watches)[-1]
                if not watch.over:
                    self._drop(watch)
                    watch.work._fail(ClosedError(f"{self._home.name} was closed", operation=watch.work._operation))

    def _forget(self) -> None:
        self._lines.clear()
        self._named.clear()

    def _hurry(self) -> None:
        self._eager_left = EAGER_TURNS
        self._pause = FIRST_PAUSE_S
        self._asked = 0

    def _drop(self, watch: Watch) -> None:
        watch.over = True
        self._pending -= 1
        try:
            watch.completion.abort()
        except Exception as error:  # the work is over in any case; nobody else would hear of this
            self._home.report(f"aborting the completion of {watch.work._operation} failed", error)

    def _turn(self) -> None:
        self._handle = None
        self._turning = True
        try:
            self._ask_some()
        finally:
            self._turning = False
            if self._pending and not self._closed:
                self._schedule()
            elif not self._pending:
                self._forget()

    def _ask_some(self) -> None:
        lines = self._lines
        end = time.monotonic() + BUDGET_S
        count = 0
        for _ in range(len(lines)):
            if not lines:  # closed by a then-step that ran in between
                return
            line = lines.popleft()
            try:
                while line.watches:
                    count += 1
                    if not count & 7 and time.monotonic() >= end:
                        return
                    if not self._over(line.watches):
                        break
            finally:  # Ctrl-C may have come in the middle; it stays pending
                if line.watches:
                    lines.append(line)
                elif self._named.get(line.key) is line:
                    del self._named[line.key]

    def _over(self, watches: list[_Place]) -> bool:
        """The first of them is, and has left."""
        watch = watches[0][-1]
        error = None
        if not watch.over:
            try:
                if not watch.completion.poll():
                    self._asked += 1
                    return False
            except Exception as raised:  # whatever a device says goes to those who wait for it
                error = raised
        heappop(watches)  # before its work ends: what that leads to may put others in front
        if not watch.over:
            self._end(watch, error)
        return True

    def _end(self, watch: Watch, error: Exception | None) -> None:
        watch.over = True
        self._pending -= 1
        self._hurry()
        value = None
        if error is None and watch.value_fn is not None:
            try:
                value = watch.value_fn()
            except Exception as raised:  # as in _over
                error = raised
        if error is None:
            watch.work._finish(value)
        else:
            watch.work._fail(error)

    def _schedule(self) -> None:
        loop = self._home.loop
        self._soon = self._eager_left > 0
        if self._soon:
            self._eager_left -= 1
            self._handle = loop.call_soon(self._turn)
            return
        self._handle = loop.call_later(self._pause, self._turn)
        if self._asked >= len(self._lines):
            self._asked = 0
            self._pause = min(self._pause * 2, LAST_PAUSE_S)
