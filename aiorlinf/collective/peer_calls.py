"""Questions of a worker about the others of its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import DeadlineExceeded
from aiorlinf.manager.membership import Membership, Peer, Question, Streams
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import effective_deadline, expire

if TYPE_CHECKING:
    from aiorlinf.address import Identity
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.me import Self
    from aiorlinf.link.table import LinkTable
    from aiorlinf.manager.lifeline import Lifeline
    from aiorlinf.work.home import LoopHome

__all__ = ["PeerCalls"]

_NEWS_SECONDS = 0.2
"""After the end of a link: by then the manager has seen the end of a process, too."""

R = TypeVar("R")


class PeerCalls:
    """`Worker.peers`, `wait_for` and `membership`."""

    address: WorkerAddress
    home: LoopHome
    _exchange: Exchange
    _table: LinkTable
    _ready: asyncio.Future[tuple[Self, Lifeline]]
    _streams: Streams

    def peers(self, timeout: float | None = None) -> AsyncWork[tuple[Peer, ...]]:
        """The other workers that are there, in order of address. While the manager is away: those that we know and may still be there.

        Raises:
            DeadlineExceeded: the manager did not answer within `timeout` seconds.

        Cancelling is harmless.
        """
        return self._ask("peers", self._list_peers, (), timeout, lambda: "the manager did not say who is there")

    def wait_for(self, address: str, timeout: float | None = None) -> AsyncWork[Peer]:
        """Wait until a worker is there, as long as it takes. If we have seen one of this address leave or die, it is the next one.

        Args:
            timeout: seconds, or None for no limit.

        Raises:
            DeadlineExceeded: it has not come within `timeout` seconds.
            RendezvousError: the job has a closed set of workers, and this is none of them.

        Cancelling is harmless.
        """
        peer = WorkerAddress(address)
        return self._ask("wait_for", self._wait_for, (peer,), timeout, lambda: f"{peer} has not come")

    def membership(self) -> Membership:
        """News of all the others: ``async for event in comm.membership()``. See `Membership`."""
        self._exchange.check(0)
        return Membership(self.home, self.address, lambda: self._exchange.check(0), self._follow, self._streams)

    def _ask(
        self,
        operation: str,
        ask: Callable[..., Coroutine[Any, Any, R]],
        args: tuple[Any, ...],
        timeout: float | None,
        late: Callable[[], str],
    ) -> AsyncWork[R]:
        self._exchange.check(0)
        work: Question[R] = Question(self.home, operation)

        def too_late(elapsed: float) -> DeadlineExceeded:
            text = f"{late()} within {elapsed:.3g} s"
            return DeadlineExceeded(text, operation=operation, step=operation, local=self.address, elapsed=elapsed)

        expire(work, effective_deadline(timeout), too_late)
        self.home.call(work.begin, ask, *args)
        return work

    async def _list_peers(self) -> tuple[Peer, ...]:
        _, life = await asyncio.shield(self._ready)
        return tuple(Peer.of(record) for record in await life.workers() if record.address != self.address)

    async def _wait_for(self, address: WorkerAddress) -> Peer:
        _, life = await asyncio.shield(self._ready)
        past, above = self._table.past(address)
        record = await life.lookup(address, None, above)
        if record.identity == past:
            # Its connection to us has ended. If that was its death, the manager hears of it in a moment.
            await asyncio.sleep(_NEWS_SECONDS)
            record = await life.lookup(address, None, above)
        return Peer.of(record)

    async def _follow(self, stream: Membership) -> list[Identity]:
        _, life = await asyncio.shield(self._ready)
        self._streams.add(stream)
        return await life.follow()
