"""Bytes to frames and back: every way a stream can be cut into reads, and what is written when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiorlinf.link.connection as module
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import WireError
from aiorlinf.link.connection import Connection, FrameHandler
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.wire.frames import HEADER, FrameType, frame
from tests.hypothesis_profiles import examples
from tests.link.stage import Side, Socket, StepHome, StepLoop, join

__all__: list[str] = []

Event = tuple[Any, ...]


class Recorder(FrameHandler):
    """Keeps what it is told. Chunks go into the memory of their message, of `sizes` bytes."""

    def __init__(self, **sizes: int) -> None:
        self.events: list[Event] = []
        self.memory = {int(name[1:]): bytearray(size) for name, size in sizes.items()}
        self.sinks: dict[int, Sink | DiscardSink] = {number: Sink([memoryview(data)]) for number, data in self.memory.items()}
        self.lost: list[BaseException | None] = []
        self.writable = 0
        self.report: bytes | None = None
        self.connection: Connection | None = None
        self.fail_on = 0
        self.interrupt_on = -1

    def on_data(self, key: int, flags: int, body: memoryview) -> None:
        self.on_frame(FrameType.DATA, flags, key, body)

    def on_frame(self, kind: int, flags: int, key: int, body: memoryview) -> None:
        if kind == self.fail_on:
            raise KeyError("a fault of ours")
        if key == self.interrupt_on:
            raise KeyboardInterrupt
        self.events.append((kind, flags, key, bytes(body)))

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        return self.sinks.get(message_id) or DiscardSink()

    def on_writable(self) -> None:
        self.writable += 1

    def before_flush(self) -> None:
        if self.report is not None and self.connection is not None:
            report, self.report = self.report, None
            self.connection.send(report)

    def on_lost(self, error: BaseException | None) -> None:
        self.lost.append(error)


def chunk(message_id: int, data: bytes) -> bytes:
    """As `send_chunk` writes it."""
    return HEADER.pack(len(data), FrameType.CHUNK, 0, 0, message_id) + data


def numbered(size: int, start: int = 0) -> bytes:
    """Bytes that tell where they are."""
    return bytes((start + index) % 251 for index in range(size))


@pytest.fixture
def loop() -> Iterator[StepLoop]:
    """A loop that turns when told to."""
    loop = StepLoop()
    yield loop
    assert loop.problems == []
    loop.close()


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for few frames, so that short ones take all paths."""
    monkeypatch.setattr(module, "_STAGING_BYTES", 96)
    monkeypatch.setattr(module, "_BULK_READ_BYTES", 20)
    monkeypatch.setattr(module, "_READ_BYTES", 33)


def connect(loop: asyncio.AbstractEventLoop, recorder: Recorder, leftover: bytes = b"", limit: int = 1000) -> Connection:
    """A connection whose handshake is over, with a socket that nobody moves."""
    connection = Connection(loop, lambda _data: None, lambda _error: None)
    one = Socket(cast(StepLoop, loop), connection, capacity=1 << 30, high=1 << 30)
    one.peer = Socket(cast(StepLoop, loop), connection, capacity=0, high=0)
    connection.connection_made(one)
    recorder.connection = connection
    connection.adopt(recorder, leftover, limit)
    return connection


def feed(connection: Connection, data: bytes, limit: int = 1 << 30) -> None:
    """Reads of at most `limit` bytes."""
    position = 0
    while position < len(data):
        buffer = connection.get_buffer(-1)
        size = min(len(buffer), limit, len(data) - position)
        assert size > 0
        buffer[:size] = data[position : position + size]
        connection.buffer_updated(size)
        position += size


STREAM = b"".join(
    [
        frame(FrameType.DATA, 5, b"hello", 1),
        frame(FrameType.GO, 9),
        frame(FrameType.OPEN, 6, numbered(70)),
        chunk(1, numbered(40)),
        chunk(2, numbered(3)),
        chunk(1, b""),
        chunk(1, numbered(120, 40)),
        frame(FrameType.END, 1),
        frame(FrameType.DATA, 7, numbered(300)),  # longer than the staging area
        chunk(3, numbered(90)),  # nobody wants it
        frame(FrameType.DATA, 8, b""),
        chunk(2, numbered(7, 3)),
        frame(FrameType.END, 2, b"", 16),
    ]
)
FRAMES: list[Event] = [
    (FrameType.DATA, 1, 5, b"hello"),
    (FrameType.GO, 0, 9, b""),
    (FrameType.OPEN, 0, 6, numbered(70)),
    (FrameType.END, 0, 1, b""),
    (FrameType.DATA, 0, 7, numbered(300)),
    (FrameType.DATA, 0, 8, b""),
    (FrameType.END, 16, 2, b""),
]


def assert_received(recorder: Recorder) -> None:
    """It has got all of STREAM."""
    assert recorder.lost == []
    assert recorder.events == FRAMES
    assert bytes(recorder.memory[1]) == numbered(160)
    assert bytes(recorder.memory[2]) == numbered(10)


@pytest.mark.usefixtures("small_staging")
def test_every_cut_of_a_stream_in_two(loop: StepLoop) -> None:
    for cut in range(len(STREAM) + 1):
        recorder = Recorder(m1=160, m2=10)
        connection = connect(loop, recorder)
        feed(connection, STREAM[:cut])
        feed(connection, STREAM[cut:])
        assert_received(recorder)


@pytest.mark.usefixtures("small_staging")
def test_every_size_of_reads(loop: StepLoop) -> None:
    for size in range(1, len(STREAM) + 1):
        recorder = Recorder(m1=160, m2=10)
        feed(connect(loop, recorder), STREAM, size)
        assert_received(recorder)


@pytest.mark.usefixtures("small_staging")
def test_every_place_at_which_the_handshake_may_end(loop: StepLoop) -> None:
    for cut in range(97):
        recorder = Recorder(m1=160, m2=10)
        feed(connect(loop, recorder, leftover=STREAM[:cut]), STREAM[cut:])
        assert_received(recorder)


pieces = st.one_of(
    st.tuples(st.just("frame"), st.sampled_from([FrameType.DATA, FrameType.OPEN, FrameType.END]), st.integers(0, 250)),
    st.tuples(st.just("chunk"), st.sampled_from([1, 2, 3]), st.integers(0, 150)),
)


@settings(max_examples=examples(100))
@given(st.lists(pieces, max_size=12), st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_any_frames_in_any_reads(parts: list[tuple[str, int, int]], reads: list[int]) -> None:
    loop = StepLoop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_STAGING_BYTES", 96)
        patch.setattr(module, "_BULK_READ_BYTES", 20)
        patch.setattr(module, "_READ_BYTES", 33)
        expected: list[Event] = []
        payload = {1: b"", 2: b"", 3: b""}
        stream = b""
        for index, (what, which, size) in enumerate(parts):
            data = numbered(size, index)
            if what == "chunk":
                stream += chunk(which, data)
                payload[which] += data
            else:
                stream += frame(which, index, data, 3)
                expected.append((which, 3, index, data))
        recorder = Recorder(m1=len(payload[1]), m2=len(payload[2]))
        connection = connect(loop, recorder)
        turn = 0
        while stream:
            size = reads[turn % len(reads)]
            feed(connection, stream[:size], size)
            stream = stream[size:]
            turn += 1
        assert recorder.lost == []
        assert recorder.events == expected
        assert bytes(recorder.memory[1]) == payload[1]
        assert bytes(recorder.memory[2]) == payload[2]
    loop.close()


def test_a_whole_small_message_may_be_longer_than_the_staging_area(loop: StepLoop) -> None:
    recorder = Recorder()
    body = numbered(300_000)
    feed(connect(loop, recorder, limit=1 << 20), frame(FrameType.DATA, 5, body) + frame(FrameType.GO, 1))
    assert recorder.events == [(FrameType.DATA, 0, 5, body), (FrameType.GO, 0, 1, b"")]


def test_a_link_takes_a_message_longer_than_the_staging_area(loop: StepLoop) -> None:
    home = StepHome(loop)
    config = CollectiveConfig(inline_max_bytes=1 << 20)
    one, two = Side(home, "a:0", "b:0", config), Side(home, "b:0", "a:0", config)
    join(loop, one, two)
    one.up()
    two.up()
    work = two.exchange.recv(two.other, 0, 0, None)
    sent = one.exchange.send(one.other, 0, {"data": bytes(400_000)}, 0, None)
    for _ in range(8):
        loop.turn()
        one.socket.read(1 << 20)
        two.socket.read(1 << 20)
    assert work.result() == {"data": bytes(400_000)}
    sent.result()
    home.close_nowait()


def test_an_endless_frame_is_refused_before_memory_is_taken_for_it(loop: StepLoop) -> None:
    recorder = Recorder()
    connection = connect(loop, recorder, limit=1000)
    feed(connection, HEADER.pack(0xFFFFFFFF, FrameType.OPEN, 0, 0, 1) + b"x")
    (error,) = recorder.lost
    assert isinstance(error, WireError)
    assert "announces 4294967295 bytes, the limit is 1000" in str(error)
    loop.turn()
    assert recorder.lost == [error], "told once"


def test_a_fault_in_the_handler_ends_the_connection_and_is_told_once(loop: StepLoop) -> None:
    recorder = Recorder()
    recorder.fail_on = FrameType.GO
    connection = connect(loop, recorder)
    feed(connection, frame(FrameType.DATA, 1, b"a") + frame(FrameType.GO, 1) + frame(FrameType.DATA, 2, b"b"))
    assert [type(error) for error in recorder.lost] == [KeyError]
    assert recorder.events == [(FrameType.DATA, 0, 1, b"a")]
    loop.turn()
    assert len(recorder.lost) == 1


def test_more_payload_than_announced_ends_the_connection(loop: StepLoop) -> None:
    recorder = Recorder(m1=10)
    feed(connect(loop, recorder), chunk(1, numbered(11)))
    assert [type(error) for error in recorder.lost] == [WireError]


def test_nothing_is_heard_after_an_abort(loop: StepLoop) -> None:
    recorder = Recorder()
    connection = connect(loop, recorder)
    connection.abort()
    loop.turn()
    assert recorder.lost == []


# ---- writing


class Written(asyncio.Transport):
    """A socket that keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.buffered = 0
        self.eof = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert low == 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        assert not self.eof, "asyncio and uvloop raise here"
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True


@pytest.fixture
def written(loop: StepLoop) -> tuple[Connection, Written, Recorder]:
    """A connection and what it writes."""
    connection = Connection(loop, lambda _data: None, lambda _error: None)
    transport = Written()
    connection.connection_made(transport)
    recorder = Recorder()
    recorder.connection = connection
    connection.adopt(recorder, b"", 1000)
    return connection, transport, recorder


GO = [frame(FrameType.GO, number) for number in range(200)]


def test_what_is_queued_in_one_turn_leaves_together(loop: StepLoop, written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, _ = written
    for data in GO:
        connection.send(data)
    loop.turn()
    assert b"".join(transport.writes) == b"".join(GO)
    assert len(transport.writes) <= 2
    connection.send(b"later")
    loop.turn()
    assert b"".join(transport.writes) == b"".join(GO) + b"later"


def test_an_answer_of_the_link_leaves_the_program_its_turn(loop: StepLoop, written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, _ = written

    def program(number: int) -> None:
        connection.send(GO[number])
        transport.writes.append(b"computes")

    connection.answer(GO[0])
    loop.call_soon(program, 1)
    loop.turn()
    assert transport.writes == [GO[0], GO[1], b"computes"]
    for held in (False, True):
        transport.writes.clear()
        feed(connection, GO[99])
        if held:
            connection.hold()
        loop.call_soon(program, 4)
        connection.answer(GO[2])
        connection.answer(GO[3])
        if held:
            connection.flush()
        assert transport.writes == [b"".join(GO[2:4])] if held else [GO[2]], "those of one turn leave together"
        loop.turn()
        assert b"".join(transport.writes) == b"".join(GO[2:5]) + b"computes"
    transport.writes.clear()
    feed(connection, GO[99])
    connection.answer(GO[5])
    connection.answer(GO[6])
    program(7)
    assert b"".join(transport.writes) == b"".join(GO[5:8]) + b"computes"


def test_much_that_is_queued_does_not_wait_for_the_turn(written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, _ = written
    data = bytes(100_000)
    for _ in range(6):
        connection.send(data)
    assert sum(map(len, transport.writes)) >= 300_000


def test_a_report_rides_on_what_is_written_anyway(loop: StepLoop, written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, recorder = written
    connection.send(GO[0])
    loop.turn()
    recorder.report = frame(FrameType.CREDIT, 77)
    connection.send(GO[1])
    connection.send(GO[2])
    loop.turn()
    connection.send(GO[3])
    loop.turn()
    stream = b"".join(transport.writes)
    assert sorted(stream[start : start + 16] for start in range(0, len(stream), 16)) == sorted([*GO[:4], frame(FrameType.CREDIT, 77)])


def test_nothing_is_written_while_the_socket_has_no_room(loop: StepLoop, written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, recorder = written
    connection.pause_writing()
    for data in GO[:5]:
        connection.send(data)
    loop.turn()
    assert transport.writes == []
    assert not connection.drained()
    connection.resume_writing()
    assert b"".join(transport.writes) == b"".join(GO[:5])
    assert recorder.writable == 1
    assert connection.drained()


def test_chunks_and_frames_keep_their_order(loop: StepLoop, written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, _ = written
    connection.send(GO[0])
    connection.send(GO[1])
    connection.send_chunk(7, [memoryview(b"abc"), memoryview(b"de")], 5)
    connection.send(GO[2])
    connection.send_chunk(7, [memoryview(numbered(100_000))], 100_000)
    loop.turn()
    stream = b"".join(transport.writes)
    assert stream == GO[0] + GO[1] + chunk(7, b"abcde") + GO[2] + chunk(7, numbered(100_000))


def test_it_is_drained_only_when_the_kernel_has_everything(written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, _ = written
    assert connection.drained()
    transport.buffered = 1
    assert not connection.drained()


@pytest.mark.parametrize("paused", [False, True])
def test_after_finish_what_was_queued_leaves_and_nothing_else(
    loop: StepLoop, written: tuple[Connection, Written, Recorder], paused: bool
) -> None:
    connection, transport, _ = written
    if paused:
        connection.pause_writing()
    connection.send(GO[0])
    connection.send(GO[1])
    connection.finish()
    connection.send(GO[2])
    connection.send_chunk(1, [memoryview(b"x")], 1)
    loop.turn()
    if paused:
        assert not transport.eof
        connection.resume_writing()
    connection.finish()
    connection.send(GO[3])
    loop.turn()
    assert transport.eof
    assert b"".join(transport.writes) == GO[0] + GO[1]


def test_after_the_end_writing_does_nothing(loop: StepLoop, written: tuple[Connection, Written, Recorder]) -> None:
    connection, transport, recorder = written
    connection.connection_lost(None)
    connection.send(GO[0])
    connection.send_chunk(1, [memoryview(b"x")], 1)
    loop.turn()
    assert transport.writes == []
    assert recorder.lost == [None]


# ---- on real sockets


async def joined(one: Recorder, two: Recorder) -> tuple[Connection, Connection]:
    """Two connections over a pair of sockets, on the loop of the test."""
    loop = asyncio.get_running_loop()
    made = []
    for sock, recorder in zip(socket.socketpair(), (one, two), strict=True):
        connection = Connection(loop, lambda _data: None, lambda _error: None)
        sock.setblocking(False)
        await loop.create_connection(lambda connection=connection: connection, sock=sock)  # type: ignore[misc]
        recorder.connection = connection
        connection.adopt(recorder, b"", 1 << 24)
        made.append(connection)
    return made[0], made[1]


async def heard(recorder: Recorder, count: int) -> None:
    """It has been told of so many frames and ends."""
    while len(recorder.events) + len(recorder.lost) < count:
        await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_payloads_and_frames_pass_both_ways_at_once(problems: list[dict[str, Any]]) -> None:
    size = 1_000_000
    one, two = Recorder(m1=size), Recorder(m1=size)
    ends = await joined(one, two)
    payloads = [numbered(size, 1), numbered(size, 2)]

    async def pump(connection: Connection, payload: bytes) -> None:
        step = 70_001
        for start in range(0, size, step):
            piece = memoryview(payload)[start : start + step]
            while connection.paused:
                await asyncio.sleep(0.001)
            connection.send_chunk(1, [piece[:10], piece[10:]], len(piece))
            connection.send(frame(FrameType.GO, start))
        connection.send(frame(FrameType.DATA, 1, bytes(500_000)))

    await asyncio.gather(*[pump(end, payload) for end, payload in zip(ends, payloads, strict=True)])
    for recorder, payload in ((one, payloads[1]), (two, payloads[0])):
        await heard(recorder, len(range(0, size, 70_001)) + 1)
        assert bytes(recorder.memory[1]) == payload
        assert [event[2] for event in recorder.events[:-1]] == list(range(0, size, 70_001))
        assert recorder.events[-1][3] == bytes(500_000)
    for end in ends:
        end.abort()


@pytest.mark.asyncio
async def test_an_orderly_end_is_told_to_both(problems: list[dict[str, Any]]) -> None:
    one, two = Recorder(), Recorder()
    first, second = await joined(one, two)
    first.send(frame(FrameType.GOODBYE, 0))
    first.finish()
    first.send(frame(FrameType.GO, 1))  # an answer to something that comes late
    await heard(two, 2)
    assert two.events == [(FrameType.GOODBYE, 0, 0, b"")]
    assert two.lost == [None]
    await heard(one, 1)
    assert one.lost == [None]
    second.send(frame(FrameType.GO, 1))
    await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_an_abort_is_an_end_for_the_peer(problems: list[dict[str, Any]]) -> None:
    one, two = Recorder(), Recorder()
    first, _ = await joined(one, two)
    first.abort()
    await heard(two, 1)
    assert one.lost == []


def test_what_is_behind_an_interrupted_frame_is_handed_over_when_the_loop_goes_on(loop: StepLoop) -> None:
    """Ctrl-C in a program's own code, which a frame runs: a notebook's loop goes on after it, and nothing more may come."""
    recorder = Recorder(_7=40)
    connection = connect(loop, recorder)
    recorder.interrupt_on = 2
    frames = [frame(FrameType.DATA, number, b"abc" * number) for number in range(5)]
    with pytest.raises(KeyboardInterrupt):
        feed(connection, b"".join(frames) + chunk(7, numbered(40)))
    assert [key for _, _, key, _ in recorder.events] == [0, 1]
    loop.turn()
    assert [key for _, _, key, _ in recorder.events] == [0, 1, 3, 4]
    assert bytes(recorder.memory[7]) == numbered(40)
    feed(connection, frames[4])
    assert [key for _, _, key, _ in recorder.events] == [0, 1, 3, 4, 4]
