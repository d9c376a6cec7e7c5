"""`comm.trace`: record what becomes of a worker's messages and calls, into a file for Perfetto."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiorlinf.errors import AiorlinfError, ClosedError, UsageError
from aiorlinf.link.link import LinkState
from aiorlinf.link.tracing import LinkTrace
from aiorlinf.trace.clock import Reading
from aiorlinf.trace.events import LINK
from aiorlinf.trace.files import PART, Facts, facts_line, finish
from aiorlinf.trace.recorder import Recorder
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.address import Identity
    from aiorlinf.link.link import Link
    from aiorlinf.link.me import Self
    from aiorlinf.link.table import LinkTable
    from aiorlinf.manager.lifeline import Lifeline
    from aiorlinf.work.home import LoopHome

__all__ = ["DEFAULT_EVENTS", "Trace", "TraceCalls"]

log: logging.Logger = logging.getLogger("aiorlinf")

DEFAULT_EVENTS = 1_000_000
_CLOCK_S = 2.0
"""What a reading of the job's clock may take; without one, this host's own wall clock does."""


class _Ending(AsyncWork[Path]):
    """All who wait for the file share one: to cancel it stops their waiting only."""

    __slots__ = ()

    def _cancel_now(self) -> bool:
        return False


class Trace:
    """A recording, made by `comm.trace`. Use it with ``async with`` or ``with``, or `await` it to end it and have the file.

    Attributes:
        path: of the file that it makes.
    """

    def __init__(self, table: LinkTable, home: LoopHome, path: Path, events: int, seconds: float | None) -> None:
        self.path = path
        self._table = table
        self._home = home
        self._limit = events
        self._seconds = seconds
        self._part = path.with_name(path.name + PART)
        self._recorder: Recorder | None = None
        self._readings: list[Reading] = []
        self._links = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._work: AsyncWork[Path] = _Ending(home, "trace")

    # ---- use

    def stop(self) -> AsyncWork[Path]:
        """End the recording; done with the file's path when that is written. May be called again. Cancelling stops the waiting only.

        Raises OSError when the file cannot be written.
        """
        try:
            self._home.call(self._end)
        except AiorlinfError as error:  # the loop is gone
            if not self._work.done():
                raise ClosedError("the loop that would have written the trace is closed") from error
        return self._work

    def __await__(self) -> Generator[Any, None, Path]:
        """As `stop`, or with ``seconds`` the end of that time."""
        return (self._work if self._seconds is not None else self.stop()).__await__()

    async def __aenter__(self) -> Trace:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop().wait()

    # ---- home thread

    def begin(self) -> None:
        """Record from now on. Raises OSError when the file cannot be written."""
        self._recorder = Recorder(self._home, self._part, self._limit)
        self._table.trace = self
        self._home.trace = self._recorder
        self._spawn(self._note_facts(), "begin")
        if self._seconds is not None:
            self._timer = self._home.loop.call_later(self._seconds, self._end)
        for link in self._table.links():
            if link.state is LinkState.UP and link.identity is not None:
                self.link_up(link, link.identity)

    def link_up(self, link: Link, identity: Identity) -> None:
        """See `link.tracing.Tracing`."""
        recorder, me = self._recorder, self._table.me
        if recorder is not None and me is not None:
            self._links += 1
            recorder.record((LINK, self._links, str(me.identity), str(identity), self._table.links_had(identity)))
            link.sender.trace = link.receiver.trace = LinkTrace(recorder, self._links)

    async def close(self) -> None:
        """See `link.tracing.Tracing`."""
        self._end()
        try:
            await self._work
        except Exception as error:  # whatever it was, the worker closes; who waits for the file hears of it, too
            log.warning("no trace was written to %s: %s", self.path, error)

    def abandon(self) -> None:
        """See `link.tracing.Tracing`."""
        self._ending = True
        self._fail(ClosedError("the worker was closed before the trace was written"))

    def _spawn(self, coro: Any, what: str) -> None:
        try:
            task = self._home.hold(coro, f"{what} {self.path}")
        except AiorlinfError as error:
            self._fail(error)
            return
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._fail(ClosedError("the worker was closed before the trace was written"))
        elif (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._recorder is not None:
            self._detach()
            self._recorder.close()
        self._work._fail(error)

    def _detach(self) -> None:
        """Record nothing more."""
        recorder = self._recorder
        if recorder is None or self._table.trace is not self:
            return
        self._table.trace = None
        self._home.trace = None
        for link in self._table.all_links():
            link.sender.trace = link.receiver.trace = None
        recorder.stop()
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            self._detach()
            self._spawn(self._finish(), "end")

    async def _note_facts(self) -> None:
        """Say whose it is, and read the clock: for the case that this process is killed."""
        recorder = self._recorder
        assert recorder is not None
        me, manager = await self._table.joined()
        self._readings.append(await _read_clock(manager))
        await self._home.submit(recorder.write_line, facts_line(self._facts(me)))

    def _facts(self, me: Self) -> Facts:
        assert self._recorder is not None
        return Facts(str(me.identity), os.getpid(), socket.gethostname(), tuple(self._readings), self._recorder.dropped)

    async def _finish(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        begun = [task for task in self._tasks if task is not asyncio.current_task()]
        if begun:
            await asyncio.wait(begun)
        if self._work.done():
            return
        await recorder.written()
        taken = recorder.take()
        me, manager = await self._table.joined()
        self._readings.append(await _read_clock(manager))
        if recorder.dropped:
            log.warning("%s: %d events beyond the limit of %d are not in %s", me.identity, recorder.dropped, self._limit, self.path)
        facts = facts_line(self._facts(me))

        def write() -> None:
            recorder.write(taken)
            recorder.write_line(facts)
            recorder.close()
            finish(self._part, self.path)

        await self._home.submit(write)
        self._work._finish(self.path)


async def _read_clock(manager: Lifeline) -> Reading:
    """Of the job, or, while the manager is away, of this host."""
    try:
        async with asyncio.timeout(_CLOCK_S):
            return await manager.clock()
    except (AiorlinfError, TimeoutError):
        return Reading.of_this_host()


class TraceCalls:
    """`Worker.trace`."""

    home: LoopHome
    _table: LinkTable

    def trace(self, path: str | os.PathLike[str], *, seconds: float | None = None, events: int = DEFAULT_EVENTS) -> Trace:
        """Record from now on what becomes of every message, then-step, collective and call of a channel of this worker.

            async with comm.trace("step.json"):
                await step()

        The file opens in https://ui.perfetto.dev; ``aiorlinf trace merge`` makes one of those of several workers, in which arrows lead
        from each send to its arrival. Each message's stages are shown: queued, copied, compressed, on the wire, decompressed, rebuilt.

        Args:
            path: of the file; one beside it, with ``.part`` after its name, is written meanwhile.
            seconds: end by itself after this time; None: at `stop`, the end of the block, or when the worker is closed.
            events: a bound on what is kept; a small message has one at its sender, and one or two at its receiver. Later ones are only
                counted.

        Raises:
            OSError: the file cannot be written.
            UsageError: a trace is being recorded already, or an argument is out of range.

        From another thread than the worker's this waits for the worker's loop.
        """
        if events < 1 or (seconds is not None and not 0 < seconds < 1e9):
            raise UsageError(f"events={events!r}, seconds={seconds!r}: both are above 0")
        made = Trace(self._table, self.home, Path(path), events, seconds)
        if self.home.on_home():
            self._begin_trace(made)
        else:
            beginning: AsyncWork[None] = AsyncWork(self.home, "trace")
            self.home.call(self._begin_for, beginning, made)
            beginning.wait()
        return made

    def _begin_for(self, beginning: AsyncWork[None], made: Trace) -> None:
        try:
            self._begin_trace(made)
        except (OSError, UsageError) as error:
            beginning._fail(error)
        else:
            beginning._finish(None)

    def _begin_trace(self, made: Trace) -> None:
        self._table.check_open()
        if self._table.trace is not None:
            raise UsageError(f"a trace is being recorded into {self._table.trace.path}", hint="stop it first")
        made.begin()

    def _trace_into(self, folder: str | None, who: Identity) -> None:
        """`aiorlinf run --trace` wants one of each worker, from the beginning to the end."""
        if not folder:
            return
        name = f"{who.address.replace(':', '-')}.{who.incarnation}.json"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._begin_trace(Trace(self._table, self.home, Path(folder, name), DEFAULT_EVENTS, None))
        except OSError as error:
            log.warning("%s: no trace can be written into %s: %s", who, folder, error)
