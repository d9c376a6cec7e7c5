"""The least that two uvloop ends can do: length prefix, bytes, pickle or tensor, nothing else."""

from __future__ import annotations

import asyncio
import pickle
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from scripts.benchmarks.contender import SMALL_DICT
from scripts.benchmarks.tensors import byte_view, check_small_dict, check_stream, copied_bytes, made_from, make_stream

__all__ = [
    "BLOCK_MESSAGES",
    "Ask",
    "Bulk",
    "BulkSource",
    "ByteEcho",
    "BytePing",
    "ObjectEcho",
    "ObjectPing",
    "ObjectTalk",
    "Part",
    "Payload",
    "StreamSink",
    "StreamSource",
    "small_dict",
    "small_tensor",
]

LENGTH: Final = struct.Struct("<I")
DONE: Final = b"!"
BLOCK_MESSAGES: Final = 64


class Ask(asyncio.Protocol):
    """The asking end before it takes its part: says which one the other end shall take, and waits for its go."""

    def __init__(self, part: bytes) -> None:
        self.part = part
        self.transport: asyncio.Transport | None = None
        self.agreed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.part)

    def data_received(self, data: bytes) -> None:
        self.agreed.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.agreed.done():
            self.agreed.set_exception(ConnectionError("the other end closed before it answered"))


class Part(asyncio.BaseProtocol):
    """An end that plays one part on a connection which is made already."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_exception(ConnectionError("the connection broke in the middle"))


class Answer(Part):
    """An answering end: it is done when the asking end closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish()


class ByteEcho(Answer, asyncio.Protocol):
    """Sends back what comes."""

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class BytePing(Part, asyncio.Protocol):
    """One byte to and fro."""

    def __init__(self, transport: asyncio.Transport, count: int) -> None:
        super().__init__(transport)
        self.left = count
        self.took: list[float] = []
        self.start = 0.0

    def go(self) -> None:
        self.start = time.perf_counter()
        self.transport.write(b".")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.took.append(now - self.start)
        self.left -= 1
        if self.left:
            self.go()
        else:
            self.finish()


class FrameReader:
    """Cuts a byte stream into length-prefixed frames."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes, take: Callable[[bytes], None]) -> None:
        if self.rest:
            data = self.rest + data
        at, end = 0, len(data)
        unpack, head = LENGTH.unpack_from, LENGTH.size
        while end - at >= head:
            stop = at + head + unpack(data, at)[0]
            if stop > end:
                break
            take(data[at + head : stop])
            at = stop
        self.rest = data[at:] if at else data


@dataclass(frozen=True, slots=True)
class Payload:
    """What goes to and fro in frames, and how it becomes bytes and back."""

    sample: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    check: Callable[[Any], None]

    def framed(self, obj: Any) -> bytes:
        body = self.encode(obj)
        return LENGTH.pack(len(body)) + body


def pickled(obj: Any) -> bytes:
    return pickle.dumps(obj, 5)


def small_dict() -> Payload:
    """The small dict, pickled."""
    return Payload(SMALL_DICT, pickled, pickle.loads, check_small_dict)


def small_tensor() -> Payload:
    """A float32[64]: its bytes, and a tensor of its own made of them."""
    return Payload(make_stream()[1], copied_bytes, made_from, lambda back: check_stream(back, 1))


class ObjectEcho(Answer, asyncio.Protocol):
    """Reads each object and sends it back."""

    def __init__(self, transport: asyncio.Transport, payload: Payload) -> None:
        super().__init__(transport)
        self.payload = payload
        self.reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data, self.take)

    def take(self, body: bytes) -> None:
        self.transport.write(self.payload.framed(self.payload.decode(body)))


class ObjectPing(Part, asyncio.Protocol):
    """A small object to and fro."""

    def __init__(self, transport: asyncio.Transport, payload: Payload, count: int) -> None:
        super().__init__(transport)
        self.payload = payload
        self.reader = FrameReader()
        self.left = count
        self.took: list[float] = []
        self.start = 0.0

    def go(self) -> None:
        self.start = time.perf_counter()
        self.transport.write(self.payload.framed(self.payload.sample))

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data, self.take)

    def take(self, body: bytes) -> None:
        back = self.payload.decode(body)
        self.took.append(time.perf_counter() - self.start)
        self.left -= 1
        if self.left:
            self.go()
            return
        try:
            self.payload.check(back)
        except AssertionError as error:
            self.finished.set_exception(error)
        self.finish()


class ObjectTalk(Answer, asyncio.Protocol):
    """The same round trip as a program with `await` makes it: whoever waits for an object is a task that a future wakes."""

    def __init__(self, transport: asyncio.Transport, payload: Payload) -> None:
        super().__init__(transport)
        self.payload = payload
        self.loop = asyncio.get_running_loop()
        self.reader = FrameReader()
        self.arrived: deque[Any] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data, self.take)

    def take(self, body: bytes) -> None:
        self.arrived.append(self.payload.decode(body))
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(ConnectionError("the other end closed"))

    def send(self, obj: Any) -> None:
        self.transport.write(self.payload.framed(obj))

    async def receive(self) -> Any:
        if not self.arrived:
            self.waiter = self.loop.create_future()
            await self.waiter
        return self.arrived.popleft()

    async def ask(self, count: int) -> list[float]:
        """Seconds of each of ``count`` round trips."""
        took = []
        for _ in range(count):
            start = time.perf_counter()
            self.send(self.payload.sample)
            back = await self.receive()
            took.append(time.perf_counter() - start)
            if len(took) == count:
                self.payload.check(back)
        return took

    async def answer(self, count: int) -> None:
        for _ in range(count):
            self.send(await self.receive())


class StreamSource(Part, asyncio.Protocol):
    """Frames small tensors and writes them, each alone or many in one write, held back only by the transport."""

    def __init__(self, transport: asyncio.Transport, count: int, per_write: int, elements: int) -> None:
        super().__init__(transport)
        self.count = count
        self.elements = elements
        self.per_write = per_write
        self.may_write = asyncio.Event()
        self.may_write.set()

    def pause_writing(self) -> None:
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    def data_received(self, data: bytes) -> None:
        self.finish()

    async def run(self) -> None:
        """Send everything and wait until the other end has it."""
        tensors = make_stream(self.elements)
        pack, distinct, sent = LENGTH.pack, len(tensors), 0
        while sent < self.count:
            if not self.may_write.is_set():
                await self.may_write.wait()
            block: list[bytes] = []
            for index in range(sent, min(self.count, sent + self.per_write)):
                tensor = tensors[index % distinct]
                block += (pack(tensor.nbytes), copied_bytes(tensor))
            self.transport.write(b"".join(block))
            sent += self.per_write
        await self.finished


class StreamSink(Answer, asyncio.Protocol):
    """Makes a tensor of its own from each frame and says when it has them all."""

    def __init__(self, transport: asyncio.Transport, count: int, elements: int) -> None:
        super().__init__(transport)
        self.reader = FrameReader()
        self.count = count
        self.elements = elements
        self.got = 0
        self.last: torch.Tensor | None = None

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data, self.take)

    def take(self, body: bytes) -> None:
        self.last = made_from(body)
        self.got += 1
        if self.got == self.count:
            check_stream(self.last, self.count - 1, self.elements)
            self.transport.write(DONE)


class Bulk(Part, asyncio.BufferedProtocol):
    """Receives messages of one fixed size straight into tensors, and can send such messages at the same time.

    Fresh: each message gets new memory, let go when the message is complete. Else one warm tensor takes them all.
    """

    def __init__(self, transport: asyncio.Transport, nbytes: int, expected: int, *, fresh: bool, acknowledge: bool) -> None:
        super().__init__(transport)
        self.nbytes = nbytes
        self.expected = expected
        self.fresh = fresh
        self.acknowledge = acknowledge
        self.target = torch.zeros(nbytes, dtype=torch.uint8)
        self.view = byte_view(self.target)
        self.filled = 0
        self.begun = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.filled == 0 and self.fresh and self.expected:
            self.view.release()
            del self.target
            self.target = torch.empty(self.nbytes, dtype=torch.uint8)
            self.view = byte_view(self.target)
        return self.view[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        self.begun.set()
        if self.filled == self.nbytes:
            self.filled = 0
            self.expected -= 1
            if self.acknowledge:
                self.transport.write(DONE)
            if self.expected == 0:
                self.finish()

    def pause_writing(self) -> None:
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    async def send(self, view: memoryview) -> None:
        """Write one message and wait until the kernel has it."""
        self.transport.write(view)
        await self.may_write.wait()


class BulkSource(Part, asyncio.Protocol):
    """Sends large messages one at a time, each after the last one's acknowledgement."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.acknowledged: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self.acknowledged is not None:
            self.acknowledged.set_result(None)

    async def send(self, view: memoryview) -> float:
        """Seconds from the write to the acknowledgement."""
        self.acknowledged = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self.transport.write(view)
        await self.acknowledged
        return time.perf_counter() - start
