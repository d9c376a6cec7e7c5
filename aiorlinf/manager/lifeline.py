"""A worker's place in its job, as the worker holds it: the manager seen from the worker's own loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.config import JobConfig, NetworkConfig
from aiorlinf.errors import AiorlinfError, ClosedError, DeclaredDead, ForkedHandle
from aiorlinf.manager.emulation import Booking
from aiorlinf.manager.keeper import Keeper
from aiorlinf.manager.life_thread import acquire_life_thread
from aiorlinf.manager.names import Holding
from aiorlinf.manager.protocol import Registration, WorkerRecord
from aiorlinf.manager.requests import Kind
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.trace.clock import Reading

if TYPE_CHECKING:
    from aiorlinf.manager.mirror import News
    from aiorlinf.work.home import LoopHome

__all__ = ["Lifeline"]

log: logging.Logger = logging.getLogger("aiorlinf.manager")

_LOOP_ANSWERS_S = 0.5
"""A loop that has not had a turn in this time is called blocked."""

_TRIES = 5

R = TypeVar("R")


class Lifeline:
    """Home thread only, but for `abandon`. What is asked of the manager is asked in the heartbeat thread, by a `Keeper`.

    Every method that asks raises ClosedError once the worker is closed, DeclaredDead once it is known that the others have given
    this worker up, and ForkedHandle in a child process.

    Attributes:
        address: the manager's ``host:port``.
        on_news: called on the home thread with what is new of other workers.
        on_dead: called there once, if this worker was declared dead.
        make_report: says what the worker is doing; called there, or in the heartbeat thread while its loop is blocked.
        local_host: our own address of the first connection to the manager.
        leaving: see `manager.keeper.Owner`.
    """

    def __init__(
        self, home: LoopHome, worker: WorkerAddress, manager: str, token: bytes | None, limits: NetworkConfig | None, tls: Tls | None = None
    ) -> None:
        self.address = manager
        self.on_news: Callable[[News], None] = lambda _: None
        self.on_dead: Callable[[DeclaredDead], None] = lambda _: None
        self.make_report: Callable[[], dict[str, Any]] = dict
        self.local_host: str = ""
        self.leaving: bool = False
        self._home = home
        self._worker = worker
        self._pid = os.getpid()
        self._released = False
        self._thread = acquire_life_thread()
        self._keeper = Keeper(self, worker, manager, token, limits, tls)

    def __repr__(self) -> str:
        state = "closed" if self._released else "away from" if self.away else "at"
        return f"<Lifeline of {self._worker} {state} the manager at {self.address}>"

    # ------------------------------------------------------------------------------------------------------------- joining

    async def connect(self) -> JobConfig:
        """Reach the manager; the job's configuration. Raises what `ManagerClient.connect` and `ask_config` do.

        Cancelling leaves nothing open once it is closed.
        """
        client = await self._there(self._keeper.connect())
        self.local_host = client.local_host
        return self._keeper.config

    async def register(self, **details: Any) -> Registration:
        """Join. As `ManagerClient.register`, whose arguments it takes. From now on the heartbeats go."""
        return await self._there(self._keeper.register(**details))

    # ----------------------------------------------------------------------------------------------------------- questions

    @property
    def away(self) -> bool:
        """Whether the manager cannot be asked at the moment."""
        return self._keeper.away_since is not None

    async def lookup(self, address: str, timeout: float | None = None, above: int = 0) -> WorkerRecord:
        """Where a worker is, in a life above the number `above`. Waits until it registers, up to `timeout` seconds.

        While the manager is away: where it was when it was last looked up, if nothing is known against it.

        Raises RendezvousError as `ManagerClient.lookup` does, or when the manager is away for so long. Cancelling withdraws the question.
        """
        return await self._there(self._keeper.lookup(WorkerAddress(address), timeout, above))

    async def workers(self) -> list[WorkerRecord]:
        """All registered workers; while the manager is away, those that are known and may live."""
        return await self._there(self._keeper.workers())

    async def follow(self) -> list[Identity]:
        """Have the news of all workers from now on; who else lives at the moment."""
        return await self._there(self._keeper.follow())

    async def expect(self, address: str) -> None:
        """This worker will join, even if the job has a closed set of workers without it. Waits while the manager is away."""
        await self._there(self._keeper.expect(WorkerAddress(address)))

    async def publish(self, kind: Kind, name: str, value: Mapping[str, str]) -> None:
        """Hold a named thing until `withdraw` or the end of this worker. A manager that is started anew hears of it, too.

        Raises RendezvousError when another living worker holds it. Waits while the manager is away.
        """
        await self._there(self._keeper.publish(kind, name, value))

    async def withdraw(self, kind: Kind, name: str) -> None:
        """Hold it no more. Waits while the manager is away."""
        await self._there(self._keeper.withdraw(kind, name))

    async def find(self, kind: Kind, name: str, timeout: float | None = None) -> Holding:
        """Who holds a named thing. Waits until somebody does, up to `timeout` seconds. Raises RendezvousError when nobody did in time."""
        return await self._there(self._keeper.find(kind, name, timeout))

    async def inspect(self, identity: Identity, timeout: float) -> dict[str, Any]:
        """As `ManagerClient.inspect`. Raises RendezvousError at once while the manager is away."""
        return await self._there(self._keeper.inspect(identity, timeout))

    async def book(self, budgets: Sequence[int], nbytes: int, timeout: float) -> Booking:
        """As `ManagerClient.book`. Raises RendezvousError at once while the manager is away."""
        return await self._there(self._keeper.book(budgets, nbytes, timeout))

    async def clock(self) -> Reading:
        """As `ManagerClient.clock`. Waits while the manager is away."""
        return await self._there(self._keeper.clock())

    def watch(self, identity: Identity, record: WorkerRecord | None) -> None:
        """There is a link with this worker, which told where it is itself: hear of its end, and find it again. Returns at once."""
        if not self._released and os.getpid() == self._pid:
            self._thread.loop.call_soon_threadsafe(self._keeper.watch, identity, record)

    async def _there(self, asking: Coroutine[Any, Any, R]) -> R:
        if os.getpid() != self._pid or self._released:
            asking.close()
            if self._released:
                raise ClosedError("the worker was closed", local=self._worker)
            raise ForkedHandle(f"{self._worker} was made before a fork", hint="call aiorlinf.init() in the child")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._thread.loop))

    # -------------------------------------------------------------------------------------------------------------- the end

    async def close(self, timeout: float) -> None:
        """Leave the job and end the heartbeats, within `timeout` seconds. May be called again; does nothing after a fork.

        Cancelling leaves that to `abandon`.
        """
        if self._released or os.getpid() != self._pid:
            return
        try:
            await self._there(self._keeper.close(timeout))
        finally:
            self._release()

    def abandon(self) -> None:
        """End the heartbeats without a goodbye, from any thread: the worker's loop has ended. Blocks for a moment."""
        if self._released or os.getpid() != self._pid:
            return
        ending = asyncio.run_coroutine_threadsafe(self._keeper.abort(), self._thread.loop)
        try:
            ending.result(1.0)
        except TimeoutError:
            log.warning("the heartbeats of %s do not end", self._worker)
        self._release()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._thread.release()

    # ------------------------------------------------------------------------------------- the keeper's owner, in its thread

    def alive(self) -> bool:
        """See `manager.keeper.Owner`."""
        return not self._home.loop.is_closed()

    def news(self, news: News) -> None:
        """See `manager.keeper.Owner`."""
        self._tell(lambda: self.on_news(news))

    def dead(self, error: DeclaredDead) -> None:
        """See `manager.keeper.Owner`."""
        self._tell(lambda: self.on_dead(error))

    async def report(self) -> dict[str, Any]:
        """See `manager.keeper.Owner`."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._tell(functools.partial(self._report_on_home, asyncio.get_running_loop(), answer))
        try:
            async with asyncio.timeout(_LOOP_ANSWERS_S):
                return {**await answer, "loop_blocked": False}
        except TimeoutError:
            pass
        tries = 0
        while True:
            tries += 1
            try:
                return {**self.make_report(), "loop_blocked": True}
            except RuntimeError:  # something changed while it was looked at from this thread
                if tries == _TRIES:
                    raise

    def _report_on_home(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[dict[str, Any]]) -> None:
        report = self.make_report()

        def settle() -> None:
            if not answer.done():
                answer.set_result(report)

        loop.call_soon_threadsafe(settle)

    def gone(self) -> None:
        """See `manager.keeper.Owner`."""
        self._thread.loop.call_soon(self._release)

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._home.call_soon(call)
        except AiorlinfError:  # the worker's loop is closed: nobody is there to hear it
            pass
