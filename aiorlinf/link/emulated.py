"""A connection with an emulated network in front of it. Thin I/O: what waits, and how long, is `link.emulated_wire`'s business.

It stands between a link and its connection, on the sending side. The link writes to it; frames and chunks reach the real connection when
they would have arrived. The other direction passes untouched: the peer does the same for what it sends.

Everything of the link keeps its order. What carries users' data is charged (DATA, OPEN with its manifest, CHUNK as it was compressed);
answers and reports cost nothing, but wait their turn as on any connection. Outside of it, and so never late, are the handshake, the
rendezvous of Gloo pairs, and the traffic with the manager: their time limits concern the real network.

Chunks are copied as they are written, as the kernel does it: the sender's memory is free at once. What has not left is bounded to
three slices of the bandwidth (60 ms), and then the connection says `paused`, as one whose socket is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiorlinf.link.connection import Connection, FrameHandler
from aiorlinf.link.emulated_wire import EmulatedWire, slice_bytes
from aiorlinf.manager.emulation import Booking, Route
from aiorlinf.wire.frames import HEADER, FrameType

if TYPE_CHECKING:
    from typing import Any

    from aiorlinf.link.sink import DiscardSink, Sink

__all__ = ["Book", "EmulatedConnection"]

Book = Callable[[Route, int, Callable[[Booking], None]], None]
"""Book so many bytes on a route's budgets and call back on the home thread, later and once; not at all after the end of the worker."""

_UNDER_WAY_LIMIT = 256 * 1024 * 1024
"""Bytes in the delay at once: 20 ms of 100 Gbit/s."""

_SHORTEST_TIMER_S = 0.001
_CHARGED = (FrameType.DATA, FrameType.OPEN)


class EmulatedConnection:
    """See the module. The link has it as its `FrameWriter`, the connection as its `FrameHandler`. Home thread only.

    Args:
        link: what the connection's events are handed to.
        book: see `Book`; not needed for a route without budgets.
        clock: seconds, as of `time.monotonic`.
        changed: called when the last of what was sent is out, and at the end.

    Attributes:
        paused: see `FrameWriter`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        link: FrameHandler,
        route: Route,
        book: Book,
        clock: Callable[[], float],
        changed: Callable[[EmulatedConnection], None],
    ) -> None:
        self.paused: bool = False
        self.max_frame_bytes: int = connection.max_frame_bytes
        self.on_data: Callable[[int, int, memoryview], None] = link.on_data
        self.on_frame: Callable[[int, int, int, memoryview], None] = link.on_frame
        self.on_chunk: Callable[[int], Sink | DiscardSink] = link.on_chunk
        self.before_flush: Callable[[], None] = link.before_flush
        self._loop = loop
        self._connection = connection
        self._link = link
        self._route = route
        self._book = book
        self._clock = clock
        self._changed = changed
        self._room = _UNDER_WAY_LIMIT if route.rate is None else 3 * slice_bytes(route.rate)
        self._wire: EmulatedWire[bytes] = EmulatedWire(route)
        self._timer: asyncio.Handle | None = None
        self._due = float("inf")  # when the timer goes off
        self._closed = False

    @property
    def busy(self) -> bool:
        """Something that was sent is still here."""
        return len(self._wire) > 0

    @property
    def closed(self) -> bool:
        """It has ended, one way or another."""
        return self._closed

    # ---- the link's side

    def send(self, data: bytes) -> None:
        """As `Connection.send`."""
        self._put(data, len(data) if data[4] in _CHARGED else 0)

    def send_now(self, data: bytes) -> None:
        """As `send`."""
        self.send(data)

    def answer(self, data: bytes) -> None:
        """As `send`."""
        self.send(data)

    def hold(self) -> None:
        """There are no writes to be saved: each frame has a time of its own."""

    def flush(self) -> None:
        """As `hold`."""

    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int, *, copy: bool = False) -> None:
        """As `Connection.send_chunk`."""
        if not self._closed:
            self._put(b"".join((HEADER.pack(size, FrameType.CHUNK, 0, 0, message_id), *pieces)), HEADER.size + size)

    def _put(self, data: bytes, cost: int) -> None:
        if self._closed:
            return
        now = self._clock()
        self._wire.put(data, cost, now)
        self.paused = self._full()
        self._wake(now, now)

    def drained(self) -> bool:
        """What was written is here as a copy."""
        return True

    def settled(self) -> bool:
        """As `drained`."""
        return True

    def finish(self) -> None:
        """Send what is here at once, delayed or not: the worker has waited for it as long as it could. Then as `Connection.finish`."""
        for data in self._end():
            self._connection.send(data)
        self._connection.finish()

    def abort(self) -> None:
        """End now; what is here is lost."""
        self._end()
        self._connection.abort()

    def extra_info(self, name: str) -> Any:
        """As `Connection.extra_info`."""
        return self._connection.extra_info(name)

    # ---- the connection's side, besides what goes straight to the link

    def on_writable(self) -> None:
        """The real connection has room."""
        self._run()
        self._link.on_writable()

    def on_lost(self, error: BaseException | None) -> None:
        """The real connection has ended."""
        self._end()
        self._link.on_lost(error)

    # ---- in between

    def _full(self) -> bool:
        wire = self._wire
        return self._connection.paused or wire.backlog >= self._room or wire.under_way >= _UNDER_WAY_LIMIT

    def _run(self) -> None:
        """Move everything whose time has come."""
        if self._closed:
            return
        wire, connection = self._wire, self._connection
        now = self._clock()
        moved = wire.leave(now) > 0
        while not connection.paused and (data := wire.arrive(now)) is not None:
            moved = True
            connection.send(data)
            if self.closed:
                return  # it broke
        wanted = wire.lease(now)
        if wanted:
            self._book(self._route, wanted, self._booked)
        self.paused = self._full()
        self._wake(wire.next_time(held=connection.paused), now)
        if moved:
            self._link.on_writable()
            if not self.busy:
                self._changed(self)

    def _booked(self, booking: Booking) -> None:
        if not self._closed:
            self._wire.booked(booking, self._clock())
            self._run()

    def _wake(self, when: float | None, now: float) -> None:
        """Go on at this moment at the latest."""
        if when is None or when >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        # A loop's timers may be a millisecond coarse, and early by half of that: nothing leaves before its time, so it would turn idly.
        delay = when - now
        self._timer = self._loop.call_soon(self._tick) if delay <= 0 else self._loop.call_later(max(delay, _SHORTEST_TIMER_S), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._due = float("inf")
        self._run()

    def _end(self) -> list[bytes]:
        if self._closed:
            return []
        self._closed = True
        self.paused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left = self._wire.clear()
        self._changed(self)
        return left
