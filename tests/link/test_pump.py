"""Payloads in chunks: fairly, a few per turn, and finished only when the kernel has every byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import ClosedError
from aiorlinf.link.outgoing import Outgoing, State
from aiorlinf.link.pump import Pump, cut
from aiorlinf.link.source import Chunk
from aiorlinf.work.base import AsyncWork
from tests.link.stage import Side, StepHome, StepLoop, join

__all__: list[str] = []


@given(st.lists(st.integers(0, 40), max_size=10), st.integers(1, 30))
def test_a_payload_is_cut_without_gap_or_overlap(sizes: list[int], limit: int) -> None:
    pieces = [memoryview(bytes((index * 7 + position) % 251 for position in range(size))) for index, size in enumerate(sizes)]
    groups = list(cut(pieces, limit))
    assert b"".join(bytes(view) for group, _ in groups for view in group) == b"".join(pieces)
    assert [size for _, size in groups] == [sum(map(len, group)) for group, _ in groups]
    assert all(size == limit for _, size in groups[:-1])
    assert all(0 < size <= limit for _, size in groups)
    assert all(len(view) for group, _ in groups for view in group)


class Writer:
    """Meets `FrameWriter`; takes `room` chunks, and has what it took in its buffer until told otherwise."""

    max_frame_bytes = 1 << 20

    def __init__(self) -> None:
        self.chunks: list[tuple[int, bytes]] = []
        self.paused = False
        self.room = 1 << 30
        self.held = False
        self.unsettled = False
        self.copied = False

    def give(self, room: int) -> None:
        """So many more chunks fit."""
        self.room = room
        self.paused = room <= 0

    def send(self, data: bytes) -> None:
        raise AssertionError("the pump writes no frames")

    def answer(self, data: bytes) -> None:
        self.send(data)

    def hold(self) -> None: ...
    def flush(self) -> None: ...
    def send_now(self, data: bytes) -> None: ...

    def send_chunk(self, message_id: int, pieces: Sequence[memoryview], size: int, *, copy: bool = False) -> None:
        self.copied = copy
        data = b"".join(pieces)
        assert len(data) == size
        self.chunks.append((message_id, data))
        self.give(self.room - 1)

    def drained(self) -> bool:
        return not self.held and not self.paused

    def settled(self) -> bool:
        return self.drained() and not self.unsettled

    def finish(self) -> None: ...
    def abort(self) -> None: ...


class Bench:
    """A pump of ten-byte chunks, its writer, and what is finished."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        self.writer = Writer()
        self.finished: list[int] = []
        self.pump = Pump(self.loop, 10, lambda out: self.finished.append(out.message_id))
        self.pump.up(self.writer)

    def begin(self, ident: int, size: int) -> Outgoing:
        """A message whose payload starts."""
        work: AsyncWork[None] = AsyncWork(self.home, "send")
        out = Outgoing(work, 0, body=bytes(size), total=size)
        out.message_id = ident
        out.state = State.STARTED
        self.pump.begin(out, [memoryview(bytes([ident]) * size)])
        return out

    def turns(self, count: int = 50) -> None:
        for _ in range(count):
            self.loop.to_next_timer()
            self.loop.turn()

    def idents(self) -> list[int]:
        """Of the chunks, in the order in which they were written."""
        return [ident for ident, _ in self.writer.chunks]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.home.close_nowait()
    bench.loop.close()


def test_a_few_chunks_per_turn(bench: Bench) -> None:
    bench.begin(1, 100)
    assert len(bench.writer.chunks) <= 2
    bench.loop.turn()
    assert len(bench.writer.chunks) <= 4
    bench.turns()
    assert bench.writer.chunks == [(1, bytes([1]) * 10)] * 10
    assert bench.finished == [1]


def test_payloads_take_turns(bench: Bench) -> None:
    for ident in (1, 2, 3):
        bench.begin(ident, 100)
    bench.turns()
    order = bench.idents()
    assert sorted(order) == [1] * 10 + [2] * 10 + [3] * 10
    last = max(order.index(ident) for ident in (1, 2, 3))
    assert last < 10, "the last one to come waited until another was over"
    assert max(abs(order[:20].count(one) - order[:20].count(two)) for one in (1, 2, 3) for two in (1, 2, 3)) <= 6


def test_a_short_payload_does_not_wait_for_a_long_one(bench: Bench) -> None:
    bench.begin(1, 100_000)
    bench.begin(2, 15)
    bench.turns(10)
    assert bench.finished == [2]


def test_nothing_is_written_while_the_socket_is_full(bench: Bench) -> None:
    bench.writer.give(1)
    bench.begin(1, 50)
    bench.turns()
    assert len(bench.writer.chunks) == 1
    bench.writer.give(100)
    bench.pump.run()
    bench.turns()
    assert bench.finished == [1]


def test_it_is_finished_only_when_the_kernel_has_it(bench: Bench) -> None:
    bench.writer.held = True
    bench.begin(1, 30)
    bench.begin(2, 10)
    bench.turns()
    assert len(bench.writer.chunks) == 4
    assert bench.finished == []
    bench.writer.held = False
    bench.turns()
    assert sorted(bench.finished) == [1, 2]


def test_where_the_peer_must_have_it_first_it_is_finished_then_and_nobody_asks_meanwhile(bench: Bench) -> None:
    bench.writer.unsettled = True
    bench.begin(1, 30)
    bench.turns()
    assert len(bench.writer.chunks) == 3
    assert bench.finished == []
    assert not bench.loop.busy(), "the connection says when the peer has it"
    assert not bench.loop.to_next_timer()
    bench.writer.unsettled = False
    bench.pump.run()
    assert bench.finished == [1]


def test_a_payload_of_nothing_is_finished(bench: Bench) -> None:
    bench.begin(1, 0)
    bench.turns(3)
    assert (bench.writer.chunks, bench.finished) == ([], [1])


@pytest.mark.parametrize("how", ["done", "withdrawn"])
def test_what_nobody_wants_any_more_stops(bench: Bench, how: str) -> None:
    out = bench.begin(1, 1000)
    bench.begin(2, 50)
    if how == "done":
        out.state = State.DONE
    else:
        out.withdrawn = True
    bench.turns()
    assert bench.idents().count(1) <= 4
    assert bench.finished == [2]


def test_a_payload_that_begins_anew_is_sent_whole_once_more(bench: Bench) -> None:
    bench.writer.give(2)
    out = bench.begin(1, 50)
    bench.turns()
    bench.writer.give(1 << 30)
    bench.writer.chunks.clear()
    bench.pump.begin(out, [memoryview(bytes([9]) * 25)])
    bench.turns()
    assert bench.writer.chunks == [(1, bytes([9]) * 10), (1, bytes([9]) * 10), (1, bytes([9]) * 5)]
    assert (out.position, out.stream_bytes) == (25, 25)
    assert bench.finished == [1]


class Spring:
    """A payload that comes into being while it is sent: `fill` makes more of it. It meets `link.source.Source`."""

    lends = True
    borrows = True

    def __init__(self, total: int) -> None:
        self.left = total
        self.there = 0
        self.lent = 0
        self.given_back = 0
        self.dropped = False

    @property
    def over(self) -> bool:
        return not self.left

    def take(self, limit: int) -> Chunk | None:
        size = min(self.there, limit)
        if not size:
            return None
        self.there -= size
        self.left -= size
        self.lent += size
        return [memoryview(b"s" * size)], size, 2 * size

    def sent(self) -> None:
        self.given_back, self.lent = self.given_back + self.lent, 0

    def drop(self) -> None:
        self.dropped = True


def spring(bench: Bench, ident: int, total: int) -> tuple[Outgoing, Spring]:
    """A message with such a payload, which starts."""
    out = Outgoing(AsyncWork(bench.home, "send"), 0, body=b"", total=total)
    out.message_id = ident
    out.state = State.STARTED
    source = Spring(total)
    bench.pump.begin_source(out, source)
    return out, source


def fill(bench: Bench, ident: int, source: Spring, size: int) -> None:
    source.there += size
    bench.pump.wake(ident)


def test_a_payload_that_is_not_there_yet_lets_others_go_first(bench: Bench) -> None:
    out, source = spring(bench, 1, 40)
    bench.begin(2, 30)
    bench.turns()
    assert bench.finished == [2]
    fill(bench, 1, source, 15)
    bench.turns()
    assert (bench.idents(), out.position) == ([2, 2, 2, 1, 1], 30)
    fill(bench, 1, source, 25)
    bench.turns()
    assert (bench.finished, out.position, source.given_back) == ([2, 1], 80, 40)


def test_what_was_lent_is_given_back_when_the_kernel_has_it(bench: Bench) -> None:
    _, source = spring(bench, 1, 40)
    bench.writer.held = True
    fill(bench, 1, source, 20)
    bench.turns()
    assert (source.lent, source.given_back) == (20, 0)
    bench.writer.held = False
    bench.turns()
    assert (source.lent, source.given_back) == (0, 20)
    assert bench.finished == []


def test_a_payload_of_copies_is_finished_when_it_is_written(bench: Bench) -> None:
    _, source = spring(bench, 1, 20)
    source.borrows = False
    bench.writer.held = True
    fill(bench, 1, source, 20)
    bench.turns()
    assert bench.finished == [1]
    assert source.given_back == 0
    bench.writer.held = False
    bench.turns()
    assert (bench.finished, source.given_back) == ([1], 20)


def test_a_payload_that_nobody_wants_any_more_is_dropped(bench: Bench) -> None:
    out, source = spring(bench, 1, 40)
    fill(bench, 1, source, 20)
    bench.turns()
    out.state = State.DONE
    fill(bench, 1, source, 20)
    bench.turns()
    assert source.dropped
    assert len(bench.writer.chunks) == 2
    assert not bench.pump._resting


def test_what_comes_after_the_end_of_the_link_is_not_written(bench: Bench) -> None:
    _, source = spring(bench, 1, 40)
    bench.pump.down()
    fill(bench, 1, source, 40)
    bench.turns()
    assert bench.writer.chunks == []


def test_the_end_of_the_link_ends_everything(bench: Bench) -> None:
    bench.begin(1, 1000)
    bench.pump.down()
    written = len(bench.writer.chunks)
    bench.turns()
    assert len(bench.writer.chunks) == written
    assert bench.finished == []


def test_finishing_one_may_begin_another(bench: Bench) -> None:
    begun: list[Any] = []

    def finished(out: Outgoing) -> None:
        bench.finished.append(out.message_id)
        if out.message_id < 5:
            begun.append(bench.begin(out.message_id + 1, 30))

    bench.pump._finished = finished
    bench.begin(1, 30)
    bench.turns()
    assert bench.finished == [1, 2, 3, 4, 5]


def test_a_short_message_overtakes_a_long_one_of_another_stream_on_a_full_connection(bench: Bench) -> None:
    config = CollectiveConfig(inline_max_bytes=0, window_bytes=1 << 20, chunk_bytes=1000)
    one, two = Side(bench.home, "a:0", "b:0", config), Side(bench.home, "b:0", "a:0", config)
    join(bench.loop, one, two, capacity=500)
    one.up()
    two.up()
    received = [two.exchange.recv(two.other, 0, tag, None) for tag in (0, 1)]
    sent = [one.exchange.send(one.other, 0, torch.ones(size, dtype=torch.uint8), tag, None) for tag, size in ((0, 500_000), (1, 3000))]
    for _ in range(200):
        two.socket.read(1 << 20)
        one.socket.read(1 << 20)
        bench.loop.turn()
    assert received[1].done()
    assert sent[1].done()
    assert not received[0].done()
    for side in (one, two):
        side.link.end(lambda: ClosedError("over"))
    bench.turns(3)
    assert received[0].exception() is not None
    assert sent[0].exception() is not None
