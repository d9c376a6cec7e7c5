"""Payloads over the stream, in chunks, fairly, without holding up the loop.

A payload is finished when the kernel has its last byte (if the connection outlives its socket: when the peer has it): only then is the
memory free for the caller again, and only then can the tensors' version counters prove that nobody wrote to them meanwhile. One of which
nothing but copies is sent, such as what a codec has made of it, is finished when it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aiorlinf.link.outgoing import Outgoing, State
from aiorlinf.link.source import Chunk, Source

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.link.connection import FrameWriter

__all__ = ["Pump", "cut"]

_CHUNKS_PER_TURN = 2
_DRAIN_POLL_SECONDS = 0.0005
_QUICK_POLLS = 2
"""So often it is looked again in the very next turn of the loop: what was written usually leaves at the end of this one."""


def cut(pieces: list[memoryview], limit: int) -> Iterator[tuple[list[memoryview], int]]:
    """Cut a payload into groups of views of at most `limit` bytes together."""
    group: list[memoryview] = []
    size = 0
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            part = piece[offset : offset + limit - size]
            group.append(part)
            size += len(part)
            offset += len(part)
            if size == limit:
                yield group, size
                group, size = [], 0
    if size:
        yield group, size


class _Memory:
    """A payload that is all there. It meets `Source`."""

    __slots__ = ("_chunks", "_left", "over")

    lends = False
    borrows = True

    def __init__(self, pieces: list[memoryview], total: int, limit: int) -> None:
        self._chunks = cut(pieces, limit)
        self._left = total
        self.over = not total

    def take(self, limit: int) -> Chunk | None:
        if self.over:
            return None
        views, size = next(self._chunks)
        self._left -= size
        self.over = not self._left
        return views, size, size

    def sent(self) -> None: ...
    def drop(self) -> None: ...


class _Payload:
    """A payload under way. `attempt` tells it from an earlier start of the same message."""

    __slots__ = ("attempt", "out", "source")

    def __init__(self, out: Outgoing, source: Source) -> None:
        self.out = out
        self.attempt = out.attempt
        self.source = source

    @property
    def wanted(self) -> bool:
        out = self.out
        return out.state == State.STARTED and not out.withdrawn and self.attempt == out.attempt


class Pump:
    """See the module. Home thread only.

    Args:
        finished: called with a message whose part over the stream has left our memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, chunk_bytes: int, finished: Callable[[Outgoing], None]) -> None:
        self.chunk_bytes = chunk_bytes
        self._loop = loop
        self._finished = finished
        self._conn: FrameWriter | None = None
        self._active: deque[_Payload] = deque()
        self._resting: dict[int, _Payload] = {}  # by message id: their sources have nothing at the moment
        self._draining: list[_Payload] = []
        self._lending: list[Source] = []  # taken from, and the kernel may not have all of it
        self._scheduled = False
        self._quick_polls = 0

    def up(self, conn: FrameWriter) -> None:
        """Write here from now on."""
        self._conn = conn

    def down(self) -> None:
        """The link has ended."""
        self._conn = None
        sources = [payload.source for payload in (*self._active, *self._resting.values(), *self._draining)]
        self._active.clear()
        self._resting.clear()
        self._draining.clear()
        lending, self._lending = self._lending, []
        for source in (*sources, *lending):
            source.drop()
        for source in lending:
            source.sent()  # what still has to be written is held on to by its writer

    def begin(self, out: Outgoing, pieces: list[memoryview]) -> None:
        """Send a payload; begins anew if this message was under way already."""
        total = sum(map(len, pieces))
        out.stream_bytes = total
        self.begin_source(out, _Memory(pieces, total, self.chunk_bytes))

    def begin_source(self, out: Outgoing, source: Source) -> None:
        """As `begin`, with a payload that comes into being while it is sent."""
        out.position = 0
        out.attempt += 1
        self._active.append(_Payload(out, source))
        self.run()

    def wake(self, message_id: int) -> None:
        """There is more of a payload whose source had nothing."""
        payload = self._resting.pop(message_id, None)
        if payload is not None:
            self._active.append(payload)
            self.run()

    def run(self) -> None:
        """Write while the socket has room, a few chunks per turn; called whenever there may be room."""
        conn = self._conn
        if conn is None:
            return
        self._look(conn)  # now: what is written next would have to be drained first
        budget = _CHUNKS_PER_TURN
        while self._active and not conn.paused:
            if not budget:
                self._again(0.0)
                return
            payload = self._active.popleft()
            out, source = payload.out, payload.source
            if not payload.wanted:
                source.drop()
                continue
            chunk = source.take(self.chunk_bytes)
            if chunk is not None:
                budget -= 1
                views, size, progress = chunk
                if source.lends:
                    self._lending.append(source)
                conn.send_chunk(out.message_id, views, size, copy=source.lends)
                self._quick_polls = _QUICK_POLLS
                out.position += progress
            if source.over:
                if source.borrows:
                    self._draining.append(payload)
                else:
                    self._finished(out)
            elif chunk is not None:
                self._active.append(payload)  # others get their turn in between
            else:
                self._resting[out.message_id] = payload
        self._settle(conn)

    def _settle(self, conn: FrameWriter) -> None:
        self._look(conn)
        # Otherwise the connection calls `run`, as it does when the peer has what it had not.
        if (self._draining or self._lending) and not conn.paused and not conn.drained():
            self._again(0.0 if self._quick_polls else _DRAIN_POLL_SECONDS)
            self._quick_polls = max(self._quick_polls - 1, 0)

    def _look(self, conn: FrameWriter) -> None:
        """End what is over."""
        if self._lending and conn.drained():
            lending, self._lending = self._lending, []
            for source in lending:
                source.sent()
        if self._draining and conn.settled():
            draining, self._draining = self._draining, []
            for payload in draining:
                if payload.wanted:
                    self._finished(payload.out)

    def _again(self, delay: float) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        if delay:
            self._loop.call_later(delay, self._turn)
        else:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self.run()
