"""Works made of several works."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from aiorlinf.errors import ClosedError, UsageError
from aiorlinf.work.base import CANCELLED, DONE, FAILED, AsyncWork
from aiorlinf.work.failure import Failure
from aiorlinf.work.home import LoopHome
from aiorlinf.work.nowhere import Nowhere
from aiorlinf.work.waiters import OutsideWaiter

__all__ = ["AllWork", "Combination", "FirstWork", "Part", "wait_all", "wait_first"]

T = TypeVar("T")
R = TypeVar("R")


class Part(OutsideWaiter):
    """One of the works that a combination depends on. It is told on the home thread of that work."""

    __slots__ = ("index", "whole", "work")

    def __init__(self, whole: Combination[Any], index: int, work: AsyncWork[Any]) -> None:
        super().__init__()
        self.whole: Combination[Any] = whole
        self.index: int = index
        self.work: AsyncWork[Any] = work

    def _settled(self, work: AsyncWork[Any]) -> None:
        home = self.whole._home
        if home is work._home:
            home.advance(self)
            return
        try:
            home.call_soon(self._advance)
        except ClosedError:  # the combination's loop is gone: nobody will take the value
            work._leave_soon(self, True)

    def _advance(self) -> None:
        self.whole._part_over(self)

    def drop(self) -> None:
        """The combination no longer wants it: cancel it unless others do, and return its value if nobody took it."""
        try:
            self.work._home.call(self.work._leave_unless_needed, self)
        except ClosedError:  # its loop is gone, and it with it
            pass

    def leave(self) -> None:
        """The combination no longer wants it, and it goes on."""
        try:
            self.work._home.call(self.work._leave, self, False)
        except ClosedError:  # its loop is gone, and it with it
            pass


class Combination(AsyncWork[R]):
    """Base of the combinators. The values stay claimed at their own works, so that a cancel before they are taken returns them."""

    __slots__ = ("_parts",)

    def __init__(self, home: LoopHome, operation: str, works: list[AsyncWork[Any]]) -> None:
        super().__init__(home, operation, detail=f"of {len(works)}")
        self._parts = [Part(self, index, work) for index, work in enumerate(works)]

    def _start(self) -> None:
        self._home.advance(self)  # so that no part is looked at before all are attached

    def _advance(self) -> None:
        parts = self._parts
        for part in parts:
            try:
                part.work._home.call(part.work._attach_outside, part)
            except ClosedError as error:
                if part.work._state:
                    self._home.advance(part)  # over, so its home is not needed
                else:
                    self._settle_without(parts, FAILED, self._failure(error))
                    return

    def _part_over(self, part: Part) -> None:
        """That part is over."""

    def _settle_without(self, parts: list[Part], state: int, failure: Failure | None) -> None:
        """End without the values of the parts. Those that were done keep them, others may still take them there; the rest goes on."""
        self._parts = []
        for part in parts:
            part.leave()
        self._settle(state, failure)

    def _abandon(self, state: int, value: Any) -> None:
        parts, self._parts = self._parts, []
        super()._abandon(state, value)
        _drop_parts(parts)

    def _waits_on(self) -> Iterable[AsyncWork[Any]]:
        return [part.work for part in self._parts if not part.work._state]


class AllWork(Combination[list[Any]]):
    """Over when all parts are."""

    __slots__ = ("_first_failure", "_left", "_return_exceptions")

    def __init__(self, home: LoopHome, works: list[AsyncWork[Any]], return_exceptions: bool) -> None:
        super().__init__(home, "wait_all", works)
        self._left = len(works)
        self._return_exceptions = return_exceptions
        self._first_failure: Failure | None = None

    def _part_over(self, part: Part) -> None:
        if self._state:
            return
        self._left -= 1
        work = part.work
        if work._state == FAILED:
            if self._first_failure is None and not self._return_exceptions:
                self._first_failure = work._value
            else:
                work._mark_seen()
        if not self._left:
            self._conclude()

    def _conclude(self) -> None:
        parts, self._parts = self._parts, []
        if not self._return_exceptions:
            if self._first_failure is not None:
                self._settle_without(parts, FAILED, self._first_failure)
                return
            if any(part.work._state == CANCELLED for part in parts):
                self._settle_without(parts, CANCELLED, None)
                return
        if any(part.work._give_back is not None for part in parts):
            self._give_back = partial(_drop_parts, parts)
        self._finish([_outcome_of(part.work) for part in parts])


def _drop_parts(parts: list[Part], _value: object = None) -> None:
    """Drop them, the last first: what was received goes back to the head of its queue, and must get there in its old order."""
    for part in reversed(parts):
        part.drop()


def _outcome_of(work: AsyncWork[Any]) -> Any:
    """The value, or the error as a value."""
    if work._state == DONE:
        return work._value
    return work._value.error if work._state == FAILED else CancelledError()


class FirstWork(Combination[tuple[int, Any]]):
    """Over when one part is."""

    __slots__ = ("_cancel_rest",)

    def __init__(self, home: LoopHome, works: list[AsyncWork[Any]], cancel_rest: bool) -> None:
        super().__init__(home, "wait_first", works)
        self._cancel_rest = cancel_rest

    def _part_over(self, part: Part) -> None:
        if self._state:
            return
        parts, self._parts = self._parts, []
        for other in reversed(parts):
            if other is not part:
                if self._cancel_rest:
                    other.drop()
                else:
                    other.leave()
        work = part.work
        if work._state == DONE:
            if work._give_back is not None:
                self._give_back = partial(_drop_parts, [part])
            self._finish((part.index, work._value))
        elif work._state == FAILED:
            self._settle(FAILED, work._value)
        else:
            self._settle(CANCELLED, None)


def wait_all(works: Iterable[AsyncWork[T]], *, return_exceptions: bool = False) -> AsyncWork[list[T]]:
    """A work that is over when all of ``works`` are, with their values in the order given.

        >>> with aiorlinf.init("a:0") as comm:
        ...     received = wait_all([comm.recv("a:0", tag=tag) for tag in (1, 2)])
        ...     sent = [comm.send(f"message {tag}", "a:0", tag=tag) for tag in (2, 1)]
        ...     received.wait(timeout=10)
        ['message 1', 'message 2']

    It fails with the first error (a cancelled part counts as one, if there is no other) but not before all are over; the other values can
    still be had from their works. With ``return_exceptions`` the errors are put in the list instead. Any thread may call.

    Cancelling it cancels those of ``works`` that nobody else depends on; values that it had and nobody took go back where they came from.

    Raises:
        UsageError: something in ``works`` is not a work.
    """
    parts = _checked(works)
    work = AllWork(_home_of(parts), parts, return_exceptions)
    if parts:
        work._home.call(work._start)
    else:
        work._home.call(work._finish, [])
    return work


def wait_first(works: Iterable[AsyncWork[T]], *, cancel_rest: bool = False) -> AsyncWork[tuple[int, T]]:
    """A work that is over when the first of ``works`` is, with that one's index and value, or its error.

        >>> with aiorlinf.init("a:0") as comm:
        ...     first = wait_first([comm.recv("a:0", tag=tag) for tag in (1, 2)], cancel_rest=True)
        ...     sent = comm.send("news", "a:0", tag=2)
        ...     first.wait(timeout=10)
        (1, 'news')

    The others go on and keep their values; with ``cancel_rest`` those that nobody else depends on are cancelled. Any thread may call.

    Cancelling it cancels those of ``works`` that nobody else depends on.

    Raises:
        UsageError: ``works`` is empty, or something in it is not a work.
    """
    parts = _checked(works)
    if not parts:
        raise UsageError("wait_first needs at least one work")
    work = FirstWork(_home_of(parts), parts, cancel_rest)
    work._home.call(work._start)
    return work


def _checked(works: Iterable[AsyncWork[Any]]) -> list[AsyncWork[Any]]:
    parts = list(works)
    for part in parts:
        if not isinstance(part, AsyncWork):
            raise UsageError(f"{part!r} is not a work", hint="use asyncio.gather or asyncio.wait for other awaitables")
    return parts


def _home_of(works: list[AsyncWork[Any]]) -> LoopHome:
    for work in works:
        if not work._home.loop.is_closed():
            return work._home
    try:
        return LoopHome(asyncio.get_running_loop())
    except RuntimeError:
        return Nowhere()
