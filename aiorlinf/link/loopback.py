"""The connection of a link to oneself: frames come straight back, in order, on the next turn of the loop.

A worker that sends to itself gets the same rules as with any peer: copies, order, window, refusals. Only the socket is missing.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence

from aiorlinf.link.connection import FrameHandler
from aiorlinf.wire.frames import HEADER, FrameType

__all__ = ["Loopback"]

_EVERYTHING = sys.maxsize


class Loopback:
    """Meets `FrameWriter`.

    While frames are being delivered it looks full: a chunk that came in the middle would overtake the frames that are still queued, and
    each frame that starts a payload would add to the depth of the stack.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handler: FrameHandler) -> None:
        self.paused: bool = False
        self.max_frame_bytes = 1 << 40
        self._loop = loop
        self._handler: FrameHandler | None = handler
        self._out: deque[bytes] = deque()
        self._scheduled = False

    def send(self, data: bytes) -> None:
        if self._handler is not None:
            self._out.append(data)
            self._schedule()

    def send_now(self, data: bytes) -> None:
        """As `send`."""
        self.send(data)

    def answer(self, data: bytes) -> None:
        """As `send`."""
        self.send(data)

    def hold(self) -> None:
        """There are no writes to be saved."""

    def flush(self) -> None:
        """As `hold`."""

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        # What is sent in answer waits for the next turn, or a conversation with oneself would hold up the loop.
        self._flush(len(self._out))
        if self._handler is None:
            return
        if self._out:
            self._schedule()
        self._handler.on_writable()

    def _flush(self, count: int) -> None:
        """Deliver so many frames, if so many are queued."""
        handler = self._handler
        if self.paused or not self._out or handler is None:
            return
        self.paused = True
        try:
            handler.before_flush()
            while count and self._out:
                count -= 1
                self._deliver(self._out.popleft())
        finally:
            self.paused = False

    def _deliver(self, data: bytes) -> None:
        handler = self._handler
        if handler is None:
            return  # a goodbye ended the link
        _, kind, flags, _, key = HEADER.unpack_from(data)
        body = memoryview(data)[HEADER.size :]
        try:
            if kind == FrameType.DATA:
                handler.on_data(key, flags, body)
            else:
                handler.on_frame(kind, flags, key, body)
        except Exception as error:  # a fault of ours ends this link and nothing else
            self._fail(handler, error)

    def _fail(self, handler: FrameHandler, error: Exception) -> None:
        self._handler = None
        self._out.clear()
        handler.on_lost(error)

    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int, *, copy: bool = False) -> None:
        self._flush(_EVERYTHING)
        handler = self._handler
        if handler is None:
            return
        try:
            sink = handler.on_chunk(message_id)
            for piece in pieces:
                done = 0
                while done < len(piece):
                    view = sink.view(len(piece) - done)
                    count = len(view)
                    view[:] = piece[done : done + count]
                    sink.advance(count)
                    done += count
        except Exception as error:  # see _deliver
            self._fail(handler, error)

    def drained(self) -> bool:
        return not self._out

    def settled(self) -> bool:
        """As `drained`."""
        return self.drained()

    def finish(self) -> None:
        self._flush(_EVERYTHING)
        self._lose()

    def abort(self) -> None:
        self._out.clear()
        self._lose()

    def _lose(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            self._loop.call_soon(handler.on_lost, None)
