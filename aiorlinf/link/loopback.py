"""The connection of a link to oneself: frames come straight back, in order, on the next turn of the loop.

A worker that sends to itself gets the same rules as with any peer: copies, order, window, refusals. Only the socket is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiorlinf.link.connection import FrameHandler
from aiorlinf.wire.frames import HEADER, FrameType

__all__ = ["Loopback"]


class Loopback:
    """Meets `FrameWriter`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handler: FrameHandler) -> None:
        self.paused = False
        self.max_frame_bytes = 1 << 40
        self._loop = loop
        self._handler: FrameHandler | None = handler
        self._out: list[bytes] = []
        self._scheduled = False

    def send(self, data: bytes) -> None:
        self._out.append(data)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        handler = self._handler
        if handler is not None and self._out:
            handler.before_flush()
        while self._out:
            out, self._out = self._out, []
            for data in out:
                handler = self._handler
                if handler is None:
                    return  # a goodbye ended the link
                _, kind, flags, _, key = HEADER.unpack_from(data)
                try:
                    body = memoryview(data)[HEADER.size :]
                    if kind == FrameType.DATA:
                        handler.on_data(key, flags, body)
                    else:
                        handler.on_frame(kind, flags, key, body)
                except Exception as error:  # a fault of ours ends this link and nothing else
                    self._handler = None
                    handler.on_lost(error)
                    return

    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int) -> None:
        self._flush()
        handler = self._handler
        if handler is None:
            return
        sink = handler.on_chunk(message_id)
        for piece in pieces:
            done = 0
            while done < len(piece):
                view = sink.view(len(piece) - done)
                count = len(view)
                view[:] = piece[done : done + count]
                sink.advance(count)
                done += count

    def drained(self) -> bool:
        return not self._out

    def finish(self) -> None:
        self._flush()
        self._lose()

    def abort(self) -> None:
        self._out.clear()
        self._lose()

    def _lose(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            self._loop.call_soon(handler.on_lost, None)
