"""Payloads over the stream, in chunks, fairly, without holding up the loop.

A payload is finished when the kernel has its last byte: only then is the memory free for the caller again, and only then can
the tensors' version counters prove that nobody wrote to them meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aiorlinf.link.outgoing import Outgoing, State

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.link.connection import FrameWriter

__all__ = ["Pump", "cut"]

_CHUNKS_PER_TURN = 2
_DRAIN_POLL_SECONDS = 0.0005


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


class _Payload:
    """A payload under way. `attempt` tells it from an earlier start of the same message."""

    __slots__ = ("attempt", "chunks", "out")

    def __init__(self, out: Outgoing, chunks: Iterator[tuple[list[memoryview], int]]) -> None:
        self.out = out
        self.attempt = out.attempt
        self.chunks = chunks

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
        self._draining: list[_Payload] = []
        self._scheduled = False

    def up(self, conn: FrameWriter) -> None:
        """Write here from now on."""
        self._conn = conn

    def down(self) -> None:
        """The link has ended."""
        self._conn = None
        self._active.clear()
        self._draining.clear()

    def begin(self, out: Outgoing, pieces: list[memoryview]) -> None:
        """Send a payload; begins anew if this message was under way already."""
        out.stream_bytes = sum(map(len, pieces))
        out.position = 0
        out.attempt += 1
        self._active.append(_Payload(out, cut(pieces, self.chunk_bytes)))
        self.run()

    def run(self) -> None:
        """Write while the socket has room, a few chunks per turn; called whenever there may be room."""
        conn = self._conn
        if conn is None:
            return
        if self._draining and conn.drained():
            self._finish_drained()  # now: what is written next would have to be drained first
        budget = _CHUNKS_PER_TURN
        while self._active and not conn.paused:
            if not budget:
                self._again(0.0)
                return
            payload = self._active.popleft()
            if not payload.wanted:
                continue
            chunk = next(payload.chunks, None)
            if chunk is None:
                self._draining.append(payload)
                continue
            budget -= 1
            pieces, size = chunk
            out = payload.out
            conn.send_chunk(out.message_id, pieces, size)
            out.position += size
            if out.position < out.stream_bytes:
                self._active.append(payload)  # others get their turn in between
            else:
                self._draining.append(payload)
        self._settle(conn)

    def _settle(self, conn: FrameWriter) -> None:
        if not self._draining:
            return
        if conn.drained():
            self._finish_drained()
        elif not conn.paused:  # otherwise the connection calls `run`
            self._again(_DRAIN_POLL_SECONDS)

    def _finish_drained(self) -> None:
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
