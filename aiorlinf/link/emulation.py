"""The emulated network as one worker has it: which of its links are emulated, and who keeps the clocks of shared bandwidths."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiorlinf.errors import AiorlinfError
from aiorlinf.link.emulated import EmulatedConnection
from aiorlinf.link.emulated_wire import slice_bytes
from aiorlinf.manager.emulation import Booking, Budgets, EmulatedNetwork, Route

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.config import NetEmulationConfig
    from aiorlinf.link.connection import Connection
    from aiorlinf.link.link import Link
    from aiorlinf.manager.lifeline import Lifeline
    from aiorlinf.work.home import LoopHome

__all__ = ["Emulation"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_ANSWER_S = 2.0
"""For the manager to answer. It does so at once; meanwhile nothing leaves."""

_ALONE_S = 10.0
"""So long a worker whose manager does not answer goes on with clocks of its own before it asks again."""


class Emulation:
    """See the module. Home thread only."""

    def __init__(self, home: LoopHome, address: WorkerAddress, config: NetEmulationConfig, manager: Lifeline) -> None:
        self._home = home
        self._address = address
        self._manager = manager
        self._network = EmulatedNetwork(config)
        self._own = Budgets(config)
        self._alone_until = float("-inf")
        self._warned = False
        self._open: set[EmulatedConnection] = set()
        self._change: asyncio.Future[None] | None = None

    def route(self, peer: WorkerAddress) -> Route | None:
        """What lies between us and a peer, for what we send."""
        return self._network.route(self._address, peer)

    def over(self, route: Route, connection: Connection, link: Link) -> EmulatedConnection:
        """Put the emulated network in front of a link's connection."""
        emulated = EmulatedConnection(self._home.loop, connection, link, route, self._book, time.monotonic, self._changed)
        self._open.add(emulated)
        if route.rate is not None:  # or a chunk would hold up what comes behind it for long
            pump = link.sender.pump
            pump.chunk_bytes = min(pump.chunk_bytes, slice_bytes(route.rate))
        return emulated

    def _changed(self, emulated: EmulatedConnection) -> None:
        if emulated.closed:
            self._open.discard(emulated)
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    async def flushed(self, timeout: float) -> None:
        """Wait until everything that was sent has arrived, or `timeout` seconds."""
        end = time.monotonic() + timeout
        while any(emulated.busy for emulated in self._open) and (left := end - time.monotonic()) > 0:
            self._change = self._home.loop.create_future()
            await asyncio.wait([self._change], timeout=left)

    # ---- shared bandwidths

    def _book(self, route: Route, nbytes: int, done: Callable[[Booking], None]) -> None:
        if not self._home.closed:
            self._home.spawn(self._ask(route, nbytes, done), f"bandwidth of {self._address}")

    async def _ask(self, route: Route, nbytes: int, done: Callable[[Booking], None]) -> None:
        booking = await self._shared(route, nbytes) if time.monotonic() >= self._alone_until else None
        done(booking or self._own.book(route.budgets, nbytes, time.monotonic()))

    async def _shared(self, route: Route, nbytes: int) -> Booking | None:
        """By the manager's clocks; None if it cannot be asked."""
        try:
            booking = await self._manager.book(route.budgets, nbytes, _ANSWER_S)
        except AiorlinfError as error:
            self._alone_until = time.monotonic() + _ALONE_S
            if not self._warned:
                self._warned = True
                log.warning("%s keeps the clocks of emulated bandwidths itself until the manager answers: %s", self._address, error)
            return None
        self._warned = False
        return booking
