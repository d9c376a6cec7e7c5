"""Who is in the job, as a user sees it: peers, and the news of their coming and going."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import AiorlinfError, ClosedError, DeadlineExceeded
from aiorlinf.manager.lives import Lives
from aiorlinf.manager.mirror import News
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import effective_deadline, expire
from aiorlinf.work.home import LoopHome

__all__ = ["Membership", "MembershipEvent", "Peer", "Question", "Streams"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker of the job.

    Attributes:
        address, incarnation: which life of which worker; `str()` of it shows both.
        host: the address that it is reached at.
        pid: its process id, on its own host.
        devices: its devices, as torch names them.
        labels: its host's name and whatever it was given.
    """

    address: WorkerAddress
    incarnation: Incarnation
    host: str
    pid: int
    devices: tuple[str, ...]
    labels: Mapping[str, str]

    @classmethod
    def of(cls, record: WorkerRecord) -> Peer:
        """What a user is told of it."""
        return cls(record.address, record.incarnation, record.host, record.pid, record.devices, record.labels)

    def __str__(self) -> str:
        return f"{self.address}#{self.incarnation}"


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """One worker came or went.

    Attributes:
        kind: ``joined``, ``left`` (it closed), ``lost`` (it died, or was cut off for too long), or ``restarted``: it joined again, after
            an earlier life that this stream has told of.
        address, incarnation: which life of which worker.
        reason: why it is gone; empty for those that came.
    """

    kind: Literal["joined", "left", "lost", "restarted"]
    address: WorkerAddress
    incarnation: Incarnation
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.address}#{self.incarnation} {self.kind}{f': {self.reason}' if self.reason else ''}"


class Question(AsyncWork[R]):
    """An answer that a coroutine on the home loop finds. Cancelling it, or its deadline, cancels the coroutine."""

    __slots__ = ("_task",)

    def __init__(self, home: LoopHome, operation: str) -> None:
        super().__init__(home, operation, abort=self._give_up)
        self._task: asyncio.Task[R] | None = None

    def begin(self, ask: Callable[..., Coroutine[Any, Any, R]], *args: Any) -> None:
        """Home thread only."""
        if not self.done():
            self._task = self._home.hold(ask(*args), self._operation)
            self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            self._fail(ClosedError("the worker was closed", operation=self._operation))
        elif (error := task.exception()) is not None:
            if isinstance(error, AiorlinfError):
                error.fill(operation=self._operation)
            self._fail(error)
        else:
            self._finish(task.result())

    def _give_up(self, _: AsyncWork[R]) -> None:
        if self._task is not None:
            self._task.cancel()


class Streams:
    """The streams of one worker. One that is waited on stays; one that its program has dropped goes, with the news that it has kept."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Membership] = weakref.WeakSet()
        self._waited_on: set[Membership] = set()

    def now(self) -> list[Membership]:
        """Those that there are."""
        return list(self._all)

    def add(self, stream: Membership) -> None:
        """It gets the news from now on."""
        self._all.add(stream)

    def forget(self, stream: Membership) -> None:
        """It has ended."""
        self._all.discard(stream)
        self._waited_on.discard(stream)

    def waited_on(self, stream: Membership, somebody: bool) -> None:
        """Whether somebody waits for its next event. A chain that hangs on such a call may be all that is left of its program."""
        if somebody:
            self._waited_on.add(stream)
        else:
            self._waited_on.discard(stream)


class Membership:
    """What `comm.membership()` returns: an async iterator over `MembershipEvent`.

    It begins with a `joined` for every worker that is there already, so that there is no gap between asking who is there and hearing
    who comes. What happens while nobody waits is kept. While the manager is away there is no news; what was missed comes when it is
    back. Leave it with ``async with``, `aclose`, or by closing the worker.
    """

    def __init__(
        self,
        home: LoopHome,
        local: WorkerAddress,
        check: Callable[[], None],
        follow: Callable[[Membership], Coroutine[Any, Any, Iterable[Identity]]],
        streams: Streams,
    ) -> None:
        self._home = home
        self._local = local
        self._check = check
        self._follow = follow
        self._streams = streams
        self._seen = Lives()
        self._events: deque[MembershipEvent] = deque()
        self._waiting: deque[AsyncWork[MembershipEvent]] = deque()
        self._begun = False
        self._end: AiorlinfError | None = None

    # ---- use, any thread

    def next(self, timeout: float | None = None) -> AsyncWork[MembershipEvent]:
        """The next event.

        Raises:
            DeadlineExceeded: nothing happened within `timeout` seconds.
            ClosedError: this, or the worker, was closed.
            DeclaredDead: the others have given this worker up.

        Cancelling takes nothing: the event goes to the next call.
        """
        self._check()
        work: AsyncWork[MembershipEvent] = AsyncWork(self._home, "membership", abort=self._cancel, give_back=self._give_back)
        deadline = effective_deadline(timeout)
        if deadline.bounded:
            expire(work, deadline, self._too_late)
        self._home.call(self._post, work)
        return work

    def __aiter__(self) -> Membership:
        return self

    async def __anext__(self) -> MembershipEvent:
        """Cancelling takes nothing. Ends when this, or the worker, is closed."""
        try:
            return await self.next()
        except ClosedError:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Membership:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Hear nothing more; waiting calls end. Returns at once."""
        self.close()

    def close(self) -> None:
        """As `aclose`, from synchronous code."""
        try:
            self._home.call(self.end, ClosedError("the membership stream was closed", local=self._local))
        except AiorlinfError:  # the loop is gone, and everything with it
            pass

    # ---- home thread

    def _post(self, work: AsyncWork[MembershipEvent]) -> None:
        if self._end is not None:
            work._fail(self._copy(self._end))
            return
        if not self._begun:
            self._begun = True
            self._home.spawn(self._begin(), f"membership for {self._local}")
        self._waiting.append(work)
        self._serve()

    async def _begin(self) -> None:
        try:
            there = await self._follow(self)
        except AiorlinfError as error:
            self.end(error)
            return
        except asyncio.CancelledError:  # the worker is closing
            self.end(ClosedError("the worker was closed", local=self._local))
            raise
        for identity in there:
            self.take(News(identity, None))

    def take(self, news: News) -> None:
        """Something is new, or not to this stream."""
        identity, end = news.identity, news.end
        address, life = identity
        if self._end is not None or address == self._local:
            return
        before, over = self._seen.newest(address), self._seen.end(address)
        if not self._seen.learn(identity, end):
            return
        if before and over is None and life > before:  # nobody told how the one before ended
            self._events.append(MembershipEvent("lost", address, before, f"#{life} has joined"))
        if life > before:
            self._events.append(MembershipEvent("restarted" if before else "joined", address, life))
        if end is not None:
            self._events.append(MembershipEvent(end.reason, address, life, end.detail))
        self._serve()

    def _serve(self) -> None:
        while self._events and self._waiting:
            work = self._waiting.popleft()
            event = self._events.popleft()
            if not work._finish(event):
                self._events.appendleft(event)
        self._streams.waited_on(self, bool(self._waiting))

    def _give_back(self, event: MembershipEvent) -> None:
        self._events.appendleft(event)
        self._serve()

    def _cancel(self, work: AsyncWork[MembershipEvent]) -> None:
        if work in self._waiting:
            self._waiting.remove(work)
            self._streams.waited_on(self, bool(self._waiting))

    def _too_late(self, elapsed: float) -> DeadlineExceeded:
        text = f"nobody has come or gone within {elapsed:.3g} s"
        return DeadlineExceeded(text, operation="membership", step="membership", local=self._local, elapsed=elapsed)

    def end(self, error: AiorlinfError) -> None:
        """Nothing more is taken; waiting calls fail."""
        if self._end is not None:
            return
        self._end = error
        self._streams.forget(self)
        self._events.clear()
        waiting, self._waiting = self._waiting, deque()
        for work in waiting:
            work._fail(self._copy(error))

    def _copy(self, error: AiorlinfError) -> AiorlinfError:
        return type(error)(error.message, operation="membership", local=self._local, hint=error.hint)
