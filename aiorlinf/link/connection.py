"""Bytes in and out of one socket: frames, chunks straight into their final memory, coalesced writes.

The connection knows frames but not what they mean; the link does. Until `adopt` is called it belongs to a handshake,
which gets the raw bytes.

Reading: one staging area for frames. The body of a CHUNK is read by the kernel directly into the payload's memory; only
what came along with the chunk's header is copied. While chunks flow, header reads are kept short so that little is copied.

Writing: small frames queued in one turn of the loop leave in one write. Chunks are written when the socket has room.
The transport's low-water mark is zero, so "not paused and its buffer empty" means that the kernel has every byte; the
link's check for writes during a send relies on it (`drained`).

A break: with a `Ledger` the connection outlives its socket. What is written while there is none is kept, and `resume` goes on with another
one (see `link.resume`); the link notices nothing but the pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from aiorlinf.errors import WireError
from aiorlinf.link.ledger import Ledger
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.wire.frames import HEADER, FrameType, frame

__all__ = ["Connection", "FrameHandler", "FrameWriter"]

_STAGING_BYTES = 256 * 1024
_BULK_READ_BYTES = 4096
_READ_BYTES = 64 * 1024
"""Of a chunk at once. libuv reads up to 32 times before anything else runs, so this bounds how long the loop is held up."""
_FLUSH_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 32 * 1024
_SMALL_PIECE_BYTES = 32 * 1024

# Looked up for every message.
_unpack = HEADER.unpack_from
_HEADER_SIZE = HEADER.size
_DATA = FrameType.DATA
_CHUNK = FrameType.CHUNK
_RECEIVED = FrameType.RECEIVED


class FrameHandler(Protocol):
    """The link, as its connection sees it."""

    def on_data(self, key: int, flags: int, body: memoryview) -> None:
        """A DATA frame. `body` is only valid during the call."""

    def on_frame(self, kind: int, flags: int, key: int, body: memoryview) -> None:
        """A whole frame other than DATA and CHUNK. `body` is only valid during the call."""

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        """A chunk of this message begins; where its bytes go."""

    def on_writable(self) -> None:
        """The socket has room again, or a flush just left."""

    def before_flush(self) -> None:
        """A write is about to leave; small reports may ride along."""

    def on_lost(self, error: BaseException | None) -> None:
        """The connection ended; None for an orderly end of stream. Called once."""


class FrameWriter(Protocol):
    """What a link needs of its connection; met by `Connection` and by the loop-back of a link to oneself."""

    paused: bool
    max_frame_bytes: int

    def send(self, data: bytes) -> None: ...
    def send_now(self, data: bytes) -> None: ...
    def answer(self, data: bytes) -> None: ...
    def hold(self) -> None: ...
    def flush(self) -> None: ...
    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int, *, copy: bool = False) -> None: ...
    def drained(self) -> bool: ...
    def settled(self) -> bool: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """See the module.

    Attributes:
        paused: the socket has no room.
        transport: set by the loop.
        max_frame_bytes: longer frames (other than chunks) end the connection; bounds what a peer can make us allocate.
        ledger: what it takes to go on after a break, None if that is not wanted.
        on_cut: told of a break instead of the handler, if there is a ledger.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_raw: Callable[[bytes], None], on_raw_lost: Callable[[BaseException | None], None]
    ) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.paused: bool = False
        self.max_frame_bytes: int = 1 << 24
        self._on_raw: Callable[[bytes], None] | None = on_raw
        self._on_raw_lost: Callable[[BaseException | None], None] | None = on_raw_lost
        self._handler: FrameHandler | None = None
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._start = 0
        self._end = 0
        self._bulk = False
        self._sink: Sink | DiscardSink | None = None
        self._chunk_left = 0
        self._large: memoryview | None = None
        self._large_fill = 0
        self._large_header: tuple[int, int, int] = (0, 0, 0)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_scheduled = False
        self._fresh = True  # the program has sent nothing since the loop last came to us
        self._silent = True  # nor have we on our own account
        self._held = False  # as `_fresh`, when `hold` was called
        self._finishing = False
        self._lost = False
        self._aborted = False
        self.ledger: Ledger | None = None
        self.on_cut: Callable[[BaseException | None], None] | None = None
        self.connected: asyncio.Future[None] = loop.create_future()

    # ---- lifetime

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # by duck type: uvloop's transports are no subclasses
        self.transport = stream
        if self._aborted:  # given up before it was even made
            stream.abort()
            return
        stream.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=0)
        if not self.connected.done():
            self.connected.set_result(None)

    def adopt(self, handler: FrameHandler, leftover: bytes, max_frame_bytes: int) -> None:
        """The handshake is over: frames go to `handler` from now on, beginning with `leftover`."""
        self._on_raw = None
        self._on_raw_lost = None
        self._handler = handler
        self.max_frame_bytes = max_frame_bytes
        self._feed(leftover)

    def _feed(self, data: bytes) -> None:
        """Bytes that came with a handshake."""
        rest = memoryview(data)
        while rest and self._handler is not None:
            buffer = self.get_buffer(-1)
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            self.buffer_updated(count)

    def write_raw(self, data: bytes) -> None:
        """For the handshake."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def finish(self) -> None:
        """Send what is queued, then end our direction; reading goes on until the peer ends its own. What is sent later is dropped."""
        self._finishing = True
        self._flush()
        if not self._out and not self.paused and self.transport is not None and not self.transport.is_closing():
            self._write_eof()

    def _write_eof(self) -> None:
        assert self.transport is not None
        if self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the network, or the peer's death, has just ended it; the loop was about to tell
                self.transport.abort()
        else:
            self.transport.close()  # with TLS no direction ends alone; what is queued still leaves

    def abort(self) -> None:
        """End now; what is queued is lost, and the handler hears nothing more."""
        self._handler = None
        self._aborted = True
        if self.ledger is not None:
            self.ledger.close()
        if self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool:
        return False  # the transport closes itself, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        if self._handler is not None and self.ledger is not None and self.on_cut is not None and not self._finishing:
            self.transport = None
            self.paused = True
            self.on_cut(exc)
        else:
            self.give_up(exc)

    def detach(self) -> None:
        """The socket is of no use any more, although it says nothing of the kind: the peer has come with another one."""
        transport = self.transport
        if transport is not None:
            self.transport = None
            self.paused = True
            transport.set_protocol(asyncio.Protocol())
            transport.abort()

    def resume(self, fresh: Connection, received: int, leftover: bytes) -> None:
        """Go on with the socket of `fresh`, whose handshake is over, for a peer that has `received` bytes of our stream.

        Raises:
            WireError: the peer cannot have so many.
            ConnectionError: that socket is gone, too.
        """
        ledger, handler, transport = self.ledger, self._handler, fresh.transport
        assert ledger is not None
        if handler is None or transport is None or fresh._lost or transport.is_closing():
            fresh.abort()
            raise ConnectionResetError("the new connection broke at once")
        missing = ledger.missing(received)
        fresh._on_raw = fresh._on_raw_lost = None
        transport.set_protocol(self)
        self.transport = transport
        self.paused = False
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=0)
        for data in missing:
            transport.write(data)
        self._feed(leftover)
        self._flush()
        if self._handler is not None and not self.paused:
            handler.on_writable()
        if self._finishing:
            self.finish()

    def give_up(self, exc: BaseException | None) -> None:
        """The connection has ended for good: tell who has to know."""
        self._lost = True
        if self.ledger is not None:
            self.ledger.close()
        self._out.clear()
        self._out_bytes = 0
        self._sink = None
        self._large = None
        if self._on_raw_lost is not None:
            lost, self._on_raw_lost, self._on_raw = self._on_raw_lost, None, None
            lost(exc)
        elif self._handler is not None:
            handler, self._handler = self._handler, None
            handler.on_lost(exc)

    # ---- reading

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._chunk_left:
            assert self._sink is not None
            return self._sink.view(min(self._chunk_left, _READ_BYTES))
        if self._large is not None:
            return self._large[self._large_fill :]
        if self._start == self._end:
            self._start = self._end = 0
            if not self._bulk:
                return self._staging
        if self._bulk:
            return self._staging[self._end : self._end + _BULK_READ_BYTES]
        return self._staging[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._fresh = self._silent = True
        if self.ledger is not None and self.ledger.arrived(nbytes):
            self._tell()
        if self._chunk_left:
            sink = self._sink
            assert sink is not None
            sink.advance(nbytes)
            self._chunk_left -= nbytes
            if not self._chunk_left:
                self._sink = None
                self._tell()
            return
        if self._large is not None:
            self._large_fill += nbytes
            if self._large_fill == len(self._large):
                body, self._large = self._large, None
                kind, flags, key = self._large_header
                self._deliver(kind, flags, key, body)
            return
        handler = self._handler
        if nbytes >= _HEADER_SIZE and not self._end and handler is not None:
            # The common case of `_parse`: one small message, alone.
            length, kind, flags, _extra, key = _unpack(self._staging)
            if kind == _DATA and length == nbytes - _HEADER_SIZE:
                self._bulk = False
                try:
                    handler.on_data(key, flags, self._staging[_HEADER_SIZE:nbytes])
                except Exception as error:  # as in `_parse`
                    self._fail(error)
                return
        self._end += nbytes
        if handler is not None:
            self._parse()
        elif self._on_raw is not None:
            data = bytes(self._staging[self._start : self._end])
            self._start = self._end = 0
            self._on_raw(data)

    def _deliver(self, kind: int, flags: int, key: int, body: memoryview) -> None:
        """A frame longer than the staging area. What fits is handed over in `_parse`, without a call for it."""
        handler = self._handler
        if handler is None:
            return
        try:
            if kind == FrameType.DATA:
                handler.on_data(key, flags, body)
            else:
                handler.on_frame(kind, flags, key, body)
        except Exception as error:  # malformed input, or a fault of ours: after it the position in the stream means nothing
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        handler, self._handler = self._handler, None
        self._chunk_left = 0
        self._large = None
        self._start = self._end = 0
        self.abort()
        if handler is not None:
            handler.on_lost(error)

    def _parse(self) -> None:
        staging = self._staging
        unpack = _unpack
        size = _HEADER_SIZE
        start = self._start
        end = self._end
        handler = self._handler
        if handler is None:
            return
        on_data = handler.on_data
        while end - start >= size:
            length, kind, flags, _extra, key = unpack(staging, start)
            if kind == _CHUNK:
                self._bulk = True
                start += size
                if not length:
                    continue
                start = self._begin_chunk(key, length, start, end)
                if start < 0:
                    return
                continue
            stop = start + size + length
            if stop > end:
                if length > self.max_frame_bytes:
                    self._fail(WireError(f"a frame of type {kind} announces {length} bytes, the limit is {self.max_frame_bytes}"))
                    return
                if size + length > _STAGING_BYTES:
                    start += size
                    large = memoryview(bytearray(length))
                    large[: end - start] = staging[start:end]
                    self._large = large
                    self._large_fill = end - start
                    self._large_header = (kind, flags, key)
                    self._start = self._end = 0
                    return
                break
            self._bulk = False
            self._start, self._end = stop, end
            try:
                if kind == _DATA:
                    on_data(key, flags, staging[start + size : stop])
                elif kind == _RECEIVED and self.ledger is not None:
                    self._on_received(self.ledger, key)
                else:
                    handler.on_frame(kind, flags, key, staging[start + size : stop])
            except Exception as error:  # malformed input, or a fault of ours: after it the position in the stream means nothing
                self._fail(error)
                return
            except BaseException:  # Ctrl-C in the program's own code: the frames behind this one are here, and no read tells of them again
                self.loop.call_soon(self._parse)
                raise
            if self._handler is None:
                return
            start = stop
        remaining = end - start
        if start and (remaining == 0 or end > _STAGING_BYTES // 2):
            if remaining:
                staging[:remaining] = bytes(staging[start:end])
            start, end = 0, remaining
        self._start, self._end = start, end

    def _begin_chunk(self, message_id: int, length: int, start: int, end: int) -> int:
        """Copy what has come of a chunk; the new start, or -1 when the connection failed."""
        handler = self._handler
        assert handler is not None
        try:
            sink = handler.on_chunk(message_id)
            self._sink = sink
            left = length
            while left and start < end:
                view = sink.view(left)
                count = min(len(view), end - start)
                view[:count] = self._staging[start : start + count]
                sink.advance(count)
                start += count
                left -= count
        except Exception as error:  # see _deliver
            self._fail(error)
            return -1
        self._chunk_left = left
        if not left:
            self._sink = None
            self._tell()
        return start

    def _tell(self) -> None:
        """The peer need not keep what is here; a payload of it has left its memory."""
        if self.ledger is not None:
            self.answer(frame(_RECEIVED, self.ledger.tell()))

    def _on_received(self, ledger: Ledger, count: int) -> None:
        waiting = not ledger.settled
        ledger.acknowledged(count)
        if waiting and ledger.settled and not self.paused and self._handler is not None:
            self._handler.on_writable()

    # ---- writing

    def send(self, data: bytes) -> None:
        """Queue a whole small frame; it leaves with the others of this turn."""
        if self._finishing:
            return
        if self._fresh and not self.paused and not self._lost:
            # The first frame of a turn goes at once: that is what a single request or answer needs. The next ones leave together.
            self._fresh = False
            transport = self.transport
            if self._out:
                self._queue(data)
                self._flush()
            elif self.ledger is not None:
                self._write(data)
            elif transport is not None and not transport.is_closing():
                transport.write(data)
            return
        self._queue(data)

    def send_now(self, data: bytes) -> None:
        """As `send`, but it does not wait for others of this turn."""
        if self._fresh:
            self.send(data)
        else:
            self._queue(data)
            self._flush()

    def _write(self, data: bytes | memoryview, *, lent: bool = False) -> None:
        """Write at once; with a ledger also to a socket that is broken, for the next one to bring."""
        if self.ledger is not None:
            self.ledger.keep(data, lent=lent)
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def answer(self, data: bytes) -> None:
        """As `send`, for what the link itself has to say: the first of a turn goes at once, and so does the program's first frame.

        For the program, which hears next of what has arrived or left, may send something and then compute for long.
        """
        if self._finishing:
            return
        transport = self.transport
        if self._silent and not self._out and not self.paused and transport is not None and not transport.is_closing():
            self._silent = False
            self._write(data)
            return
        self._queue(data)

    def _queue(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= _FLUSH_BYTES:
            self._flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._scheduled_flush)

    def hold(self) -> None:
        """What is sent from here to `flush` leaves in one write."""
        self._held |= self._fresh
        self._fresh = self._silent = False

    def flush(self) -> None:
        """Write what is queued now."""
        self._fresh, self._held = self._held, False
        self._silent = True
        self._flush()

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self._fresh = self._silent = True
        self._flush()

    def _flush(self) -> None:
        transport = self.transport
        if self.paused or self._lost or transport is None or transport.is_closing() or not self._out:
            return
        if self._handler is not None:
            self._handler.before_flush()
        out = self._out
        if not out:
            return  # a report that rode along filled the buffer and flushed it
        self._write(self._take_out())

    def _take_out(self) -> bytes:
        out = self._out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self._out_bytes = 0
        return data

    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int, *, copy: bool = False) -> None:
        """Write one chunk now. The pieces must stay alive and unchanged until `settled`; with `copy` only until `drained`."""
        self._flush()
        if self._lost or self._finishing:
            return
        transport = self.transport
        if self.ledger is None:
            if transport is None or transport.is_closing():
                return
        elif self._out:  # not flushed: there is no socket at the moment
            self._write(self._take_out())
        header = HEADER.pack(size, FrameType.CHUNK, 0, 0, message_id)
        if (len(pieces) > 1 and size <= _SMALL_PIECE_BYTES * len(pieces)) or (copy and self.ledger is not None):
            self._write(b"".join((header, *pieces)))
            return
        self._write(header)
        for piece in pieces:
            self._write(piece, lent=True)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._handler is not None:
            self._handler.on_writable()  # first, because now the kernel has all that was written
        self._flush()
        if self._finishing:
            self.finish()

    def drained(self) -> bool:
        """True when the kernel has every byte of the chunks that were written."""
        return not self.paused and (self.transport is None or self.transport.get_write_buffer_size() == 0)

    def settled(self) -> bool:
        """True when nobody will look at the chunks' memory again: as `drained`, and with a ledger the peer has them."""
        return self.drained() and (self.ledger is None or self.ledger.settled)

    def extra_info(self, name: str) -> Any:
        """As the transport's `get_extra_info`."""
        return None if self.transport is None else self.transport.get_extra_info(name)
