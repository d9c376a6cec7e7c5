"""One collective under way, seen from one member."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import traceback
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.notes import Cause, Key, Note, Step
from aiorlinf.errors import AiorlinfError, DeadlineExceeded, Mismatch, PeerError, RemoteError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import NO_DEADLINE, current_deadline, effective_deadline, expire

if TYPE_CHECKING:
    from aiorlinf.collective.circle import Circle

__all__ = ["Operation"]

_ASKED = 3
"""So many members are asked what they wait for."""


class Operation:
    """See the module. Made in any thread, everything else on the home thread.

    It ends once: with `finish`, or with `fail`, which tells the others. Its work may be done before that, when it has still to help others.

    Attributes:
        name: the public call.
        domain: ROOT or ALL.
        coordinates: what one member tells of a failure has to be told to the others.
        keys: by peer, how the two count it.
        work: what the caller holds; None again once it is over, so that the two do not keep each other (and the value) alive.
        over: it has ended.
    """

    name: ClassVar[str]
    domain: ClassVar[str]
    coordinates: ClassVar[bool] = False

    def __init__(self, circle: Circle, timeout: float | None) -> None:
        self.circle = circle
        self.keys: dict[WorkerAddress, Key] = {}
        self.over: bool = False
        self.work: AsyncWork[Any] | None = AsyncWork(circle.exchange.home, self.name, abort=self._given_up, detail=self)
        self._limit = effective_deadline(timeout) if timeout is not None or current_deadline.get() is not NO_DEADLINE else NO_DEADLINE
        self._notes: deque[tuple[WorkerAddress, Note]] = deque()
        self._lost: dict[WorkerAddress, AiorlinfError] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: dict[WorkerAddress, list[str]] = {}

    # ---- what each kind of operation says

    def peers(self) -> Iterable[WorkerAddress]:
        """Those whose life matters to it, and with whom it is counted."""
        raise NotImplementedError

    def pair(self, peer: WorkerAddress) -> tuple[str, str]:
        """First and second of the key with this peer."""
        raise NotImplementedError

    async def run(self) -> None:
        """All of it. When it returns the work must be done."""
        raise NotImplementedError

    def waits_for(self) -> Iterable[WorkerAddress]:
        """Whose word is missing."""
        raise NotImplementedError

    def audience(self) -> Iterable[WorkerAddress]:
        """Whom to tell of a failure."""
        raise NotImplementedError

    def lost(self, peer: WorkerAddress, error: AiorlinfError) -> None:
        """One of `peers` is gone."""
        if any(sender == peer for sender, _ in self._notes):
            self._lost[peer] = error  # what it said before may be all that is waited for
        elif peer in self.waits_for():
            self.fail(error, absent=peer)

    def failed_elsewhere(self, sender: WorkerAddress, cause: Cause) -> None:
        """A member says that it failed."""
        self.fail(cause.error(self.name, self.circle.local), cause, told_by=sender)

    # ---- life

    def begin(self) -> None:
        """Start to run."""
        self.spawn(self._main(), self.name)
        if self._limit is not NO_DEADLINE and self.work is not None:
            expire(self.work, self._limit, self._too_late, self._ask)

    async def _main(self) -> None:
        await self.run()
        self.finish(None)

    def spawn(self, coro: Coroutine[Any, Any, None], what: str) -> None:
        """Run a part of it; an error there is one of the operation."""
        # In an empty context: a deadline of the caller's chain is kept by the work, not by what it does.
        task = self.circle.exchange.home.hold(coro, f"{what} of {self.circle.local}", contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if not self.over:  # the worker is being closed
                self.fail(self.circle.closed_error())
            return
        error = task.exception()
        if error is not None:
            self.fail(error)

    def finish(self, value: Any) -> None:
        """All is done. The work gets the value, unless it has one already."""
        if not self.over:
            self._leave()
        self.give(value)

    def give(self, value: Any) -> None:
        """The work is done, though there may still be something to do for others."""
        work, self.work = self.work, None
        if work is not None:
            work._finish(value)

    def fail(
        self, error: BaseException, cause: Cause | None = None, *, told_by: WorkerAddress | None = None, absent: str | None = None
    ) -> None:
        """It has failed: tell those who may not know yet."""
        if self.over:
            return
        if cause is None:
            trace = "" if isinstance(error, AiorlinfError) else "".join(traceback.format_exception(error))
            cause = Cause.of(error, self.circle.local, trace)
        if isinstance(error, PeerError) and not isinstance(error, RemoteError):
            error = cause.error(self.name, self.circle.local)
        elif isinstance(error, AiorlinfError):
            error.fill(operation=self.name, local=self.circle.local)
        if isinstance(error, AiorlinfError):
            # The frames of what ran here tell nobody anything, and would keep payloads for as long as somebody keeps the error.
            error.__traceback__ = error.__context__ = None
        self._leave()
        try:
            self._tell_all(cause, told_by, absent)
        finally:
            work, self.work = self.work, None
            if work is not None:
                work._fail(error)

    def _given_up(self, work: AsyncWork[Any]) -> None:
        """The work was cancelled, or its time is over."""
        self.work = None
        if self.over:
            return
        error: BaseException = asyncio.CancelledError() if work.cancelled() else work._value.error
        self._tell_all(Cause.of(error, self.circle.local), None, None)
        self._leave()

    def _tell_all(self, cause: Cause, told_by: WorkerAddress | None, absent: str | None) -> None:
        if told_by is None or self.coordinates:
            for peer in self.audience():
                if peer not in (told_by, absent, cause.member) and peer in self.keys:
                    with contextlib.suppress(AiorlinfError):  # it learns of the end of our link, if there was one
                        self.tell(peer, Step.FAIL, cause.facts())

    def _leave(self) -> None:
        self.over = True
        self.circle.forget(self)
        current = asyncio.current_task(self.circle.exchange.home.loop)
        for task in list(self._tasks):
            if task is not current:
                task.cancel()
        while self._notes:
            self.circle.dispose(*self._notes.popleft())

    def _ask(self) -> None:
        """A time limit will soon pass: what do those do whose word is missing? One may be a new life that never calls."""
        for peer in list(self.waits_for())[:_ASKED]:
            link = self.circle.exchange.table.peek(peer)
            if link is not None and link.identity is not None:
                self.circle.exchange.asking.ask(link.identity, self._said.setdefault(peer, []))

    def _too_late(self, elapsed: float) -> DeadlineExceeded:
        missing = list(self.waits_for())
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        text = f"not over within {elapsed:.3g} s" + (f"; nothing has come yet of {shown}" if missing else "")
        for peer in missing:
            link = self.circle.exchange.table.peek(peer)
            for said in self._said.get(peer, ()):
                text += f"; {peer if link is None or link.identity is None else link.identity}: {said}"
        return DeadlineExceeded(text, operation=self.name, step=self.name, local=self.circle.local, elapsed=elapsed)

    # ---- notes

    def tell(self, peer: WorkerAddress, step: str, facts: dict[str, Any] | None = None, body: bytes | memoryview = b"") -> None:
        """Send a note to one of `peers`. Raises as `Exchange.send`."""
        self.circle.tell(peer, Note(self.keys[peer], step, {}, {"op": self.name, "of": self.circle.digest, **(facts or {})}, body))

    def take(self, sender: WorkerAddress, note: Note) -> None:
        """A note has come."""
        if self.over:
            self.circle.dispose(sender, note)
            return
        if note.step == Step.FAIL:
            self.failed_elsewhere(sender, Cause.from_note(note))
        elif note.facts.get("op") != self.name:
            self.circle.dispose(sender, note)
            self.fail(Mismatch(f"as part of {str(note.facts.get('op'))[:40]}", self.name, remote=sender))
        elif note.facts.get("of") != self.circle.digest:
            self.circle.dispose(sender, note)
            self.fail(Mismatch("by one who counts others as members", ", ".join(self.circle.members), remote=sender))
        else:
            self._notes.append((sender, note))
            self.nudge()

    def nudge(self) -> None:
        """Let `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> tuple[WorkerAddress, Note] | None:
        """The next note and who sent it; None if something else has happened. One at a time may wait. Raises the error of a lost peer."""
        if not self._notes:
            lost, self._lost = self._lost, {}
            for peer, error in lost.items():
                self.lost(peer, error)
                if self.over:
                    raise error
            self._waiter = self.circle.exchange.home.loop.create_future()
            await self._waiter
        return self._notes.popleft() if self._notes else None

    def __str__(self) -> str:
        missing = list(self.waits_for())
        return f"waits for {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}" if missing else "all have answered"
