"""Shared memory as the only way that a payload may go: two links moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import BackendUnavailable, ClosedError, Mismatch, RemoteError, UnsupportedObject, UsageError
from aiorlinf.link.packing import PACK_INLINE_BYTES
from aiorlinf.link.ways import SharedWay
from aiorlinf.wire.frames import FrameType
from aiorlinf.work.base import AsyncWork
from tests.link.planned_memory import SEGMENT, PlannedMemory
from tests.link.stage import Side, StepHome, StepLoop, join

__all__: list[str] = []


class Line:
    """From a to b."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        config = CollectiveConfig(inline_max_bytes=64, window_bytes=2000, chunk_bytes=500)
        self.a, self.b = Side(self.home, "a:0", "b:0", config), Side(self.home, "b:0", "a:0", config)
        join(self.loop, self.a, self.b)
        self.memory = PlannedMemory(self.home, self.a.link, self.b.link)
        self.a.link.sender.ways.append(SharedWay(self.a.link.sender, self.memory.out, 64, required=True))
        self.a.up()
        self.b.up()

    def send(self, value: int, size: int = 1000) -> tuple[AsyncWork[None], AsyncWork[torch.Tensor]]:
        sent = self.a.exchange.send(self.a.other, 0, torch.full((size,), value, dtype=torch.uint8), 0, None)
        received = self.b.exchange.recv(self.b.other, 0, 0, None)
        self.settle()
        return sent, received

    def settle(self) -> None:
        """Until nothing moves any more; the clock stands still."""
        while any((self.home.run_thread(), self.loop.busy(), self.a.socket.readable(), self.b.socket.readable())):
            self.a.socket.read(1 << 20)
            self.b.socket.read(1 << 20)
            self.loop.turn()

    def close(self) -> None:
        for side in (self.a, self.b):
            side.link.end(lambda: ClosedError("over"))
        self.settle()
        self.memory.free()
        self.settle()
        self.home.close_nowait()
        self.loop.close()
        assert self.loop.problems == []


@pytest.fixture
def line() -> Iterator[Line]:
    """Nothing has been sent yet."""
    line = Line()
    yield line
    line.close()


def test_a_lost_descriptor_fails_its_messages_on_both_sides_and_the_next_try_is_at_once(line: Line) -> None:
    first, second = line.send(1), line.send(2)
    assert line.memory.step("lose")
    line.settle()
    for sent, received in (first, second):
        with pytest.raises(BackendUnavailable, match="the peer could not map the memory file"):
            sent.result()
        with pytest.raises(RemoteError, match="the peer could not map the memory file"):
            received.result()
    sent, received = line.send(3)
    assert line.memory.step("pass")
    line.settle()
    assert sent.result() is None
    assert (received.result() == 3).all()
    assert line.a.link.sender.pending == {}
    assert line.b.link.receiver.opened == {}


def test_a_descriptor_that_cannot_be_sent_fails_its_message(line: Line) -> None:
    line.memory.step("refuse")
    sent, received = line.send(1)
    with pytest.raises(BackendUnavailable, match="the peer cannot be given the memory file"):
        sent.result()
    with pytest.raises(RemoteError):
        received.result()
    line.memory.step("refuse")
    sent, received = line.send(2)
    line.memory.step("pass")
    line.settle()
    assert (received.result() == 2).all()
    sent.result()


def test_memory_that_is_held_fails_what_has_no_room(line: Line) -> None:
    kept = []

    def keep(number: int) -> None:
        sent, received = line.send(number, SEGMENT)
        line.memory.step("pass")
        line.settle()
        sent.result()
        kept.append(received.result())

    keep(0)
    keep(1)
    sent, failed = line.send(2, SEGMENT)
    with pytest.raises(BackendUnavailable, match="receivers hold all of it"):
        sent.result()
    with pytest.raises(RemoteError):
        failed.result()
    kept.pop()
    line.settle()
    sent, received = line.send(3, SEGMENT)
    line.settle()
    assert (received.result() == 3).all()
    sent.result()


def test_a_message_that_is_cancelled_while_its_descriptor_is_lost_is_as_if_never_sent(line: Line) -> None:
    sent, received = line.send(1)
    assert sent.cancel()
    line.memory.step("lose")
    line.settle()
    assert not received.done()
    second = line.a.exchange.send(line.a.other, 0, torch.full((1000,), 2, dtype=torch.uint8), 0, None)
    line.settle()
    assert isinstance(second.exception(), BackendUnavailable), "it relied on the lost one"
    assert isinstance(received.exception(), RemoteError)
    sent, received = line.send(3)
    line.memory.step("pass")
    line.settle()
    assert (received.result() == 3).all()
    sent.result()


def test_what_begins_at_once_is_not_asked_for(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame less, which would leave before all others. What has to wait for the window is asked for as ever."""
    asked: list[int] = []
    on_go = line.a.link.sender.on_go

    def note(number: int) -> None:
        asked.append(number)
        on_go(number)

    monkeypatch.setattr(line.a.link.sender, "on_go", note)
    received = [line.b.exchange.recv(line.b.other, 0, 0, None) for _ in range(2)]
    sent = [line.a.exchange.send(line.a.other, 0, torch.full((1000,), value, dtype=torch.uint8), 0, None) for value in range(2)]
    line.settle()
    line.memory.step("pass")
    line.settle()
    assert [int(work.result()[0]) for work in received] == [0, 1]
    assert all(work.result() is None for work in sent)
    assert asked in ([], [2]), "the first has room"

    late = [line.a.exchange.send(line.a.other, 0, torch.full((1000,), value, dtype=torch.uint8), 0, None) for value in range(3)]
    line.settle()
    assert not late[2].done(), "two of them fill the window"
    for value in range(3):
        work = line.b.exchange.recv(line.b.other, 0, 0, None)
        line.settle()
        assert (work.result() == value).all()
    assert all(work.result() is None for work in late)


# ---- a message in one frame


class Fickle:
    """Pickled with this many bytes beside it; cannot be made again."""

    def __init__(self) -> None:
        self.bulk = torch.zeros(1000, dtype=torch.uint8)

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("not here")


def noted(line: Line, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The types of frames that b gets from now on."""
    kinds: list[int] = []
    on_frame = line.b.link.on_frame

    def note(kind: int, flags: int, key: int, body: memoryview) -> None:
        kinds.append(kind)
        on_frame(kind, flags, key, body)

    monkeypatch.setattr(line.b.link, "on_frame", note)
    return kinds


def in_this_order(
    line: Line, early: bool, send: Callable[[], AsyncWork[None]], receive: Callable[[], AsyncWork[Any]]
) -> tuple[AsyncWork[None], AsyncWork[Any]]:
    """Both, settled after each; `early`: the receive first."""
    first, second = (receive, send) if early else (send, receive)
    works: list[AsyncWork[Any]] = [first()]
    line.settle()
    works.append(second())
    line.settle()
    if early:
        works.reverse()
    return works[0], works[1]


def warm(line: Line) -> None:
    """There is memory, and b has it."""
    _, received = line.send(0)
    line.memory.step("pass")
    line.settle()
    assert received.done()


@pytest.mark.parametrize("early", [True, False])
def test_what_needs_no_thread_goes_in_one_frame(line: Line, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    warm(line)
    kinds = noted(line, monkeypatch)
    for value, obj in ((1, torch.arange(300)), (2, {"a": torch.ones(500), "b": torch.zeros(0)}), (3, {"n": 3, "t": torch.arange(99.0)})):
        sent, received = in_this_order(
            line,
            early,
            partial(line.a.exchange.send, line.a.other, 0, obj, 0, None),
            partial(line.b.exchange.recv, line.b.other, 0, 0, None),
        )
        sent.result()
        got = received.result()
        if isinstance(obj, torch.Tensor):
            assert torch.equal(got, obj)
        else:
            assert all(torch.equal(got[key], part) if isinstance(part, torch.Tensor) else got[key] == part for key, part in obj.items())
        assert kinds.count(FrameType.PLACED) == value
        del got, received
    assert not {FrameType.OPEN, FrameType.START, FrameType.END} & set(kinds)
    line.settle()
    assert line.memory.unused()


def test_one_frame_whose_memory_file_comes_later(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment that it lies in was passed before, by a message that still waits for it."""
    kinds = noted(line, monkeypatch)
    first = line.send(1)
    second = line.send(2, 500)
    third = line.send(3, 100)
    assert FrameType.PLACED in kinds
    assert not any(received.done() for _, received in (first, second, third))
    line.memory.step("pass")
    line.settle()
    for value, (sent, received) in enumerate((first, second, third), 1):
        sent.result()
        assert (received.result() == value).all()


def test_one_frame_for_another_kind_of_receive_is_a_mismatch_on_both_sides(line: Line) -> None:
    warm(line)
    for early in (True, False):
        out = torch.zeros(1000, dtype=torch.uint8)
        sent, received = in_this_order(
            line,
            early,
            partial(line.a.exchange.send, line.a.other, 0, torch.ones(1000, dtype=torch.uint8), 0, None),
            partial(line.b.exchange.recv_tensor, line.b.other, 0, out, 0, None),
        )
        assert isinstance(received.exception(), Mismatch)
        assert isinstance(sent.exception(), Mismatch) == early, "it was in the hands of the peer"
        assert not out.any()
        line.send(5)[1].result()
        line.settle()
        assert line.memory.unused()
        assert line.b.link.receiver.opened == {}


@pytest.mark.parametrize("early", [True, False])
def test_one_frame_of_a_tensor(line: Line, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    warm(line)
    kinds = noted(line, monkeypatch)
    out = torch.zeros(200)
    sent, received = in_this_order(
        line,
        early,
        partial(line.a.exchange.send_tensor, line.a.other, 0, torch.arange(200.0), 0, None),
        partial(line.b.exchange.recv_tensor, line.b.other, 0, out, 0, None),
    )
    sent.result()
    assert received.result() is out
    assert torch.equal(out, torch.arange(200.0))
    assert kinds[0] == FrameType.PLACED
    line.settle()
    assert line.memory.unused()


def test_one_frame_that_cannot_be_made_an_object_again(line: Line) -> None:
    warm(line)
    received = line.b.exchange.recv(line.b.other, 0, 0, None)
    sent = line.a.exchange.send(line.a.other, 0, Fickle(), 0, None)
    line.settle()
    assert isinstance(received.exception(), UnsupportedObject)
    failure = sent.exception()
    assert isinstance(failure, RemoteError)
    assert failure.remote_type == "RuntimeError"
    sent, received = line.send(7)
    sent.result()
    assert (received.result() == 7).all()
    assert line.b.link.receiver.window.outstanding == 0


def test_one_frame_that_was_written_to_fails_on_both_sides(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(line)
    tensor = torch.zeros(1000, dtype=torch.uint8)
    received = line.b.exchange.recv(line.b.other, 0, 0, None)
    monkeypatch.setattr("aiorlinf.link.ways.pack", lambda address, leaves: tensor.add_(1))
    sent = line.a.exchange.send(line.a.other, 0, tensor, 0, None)
    line.settle()
    assert isinstance(sent.exception(), UsageError)
    assert isinstance(received.exception(), RemoteError)
    assert line.memory.unused()


def test_one_frame_that_is_withdrawn_before_anybody_took_it(line: Line) -> None:
    """Also where a receive has it before that is known: it keeps it."""
    warm(line)
    sent = line.a.exchange.send(line.a.other, 0, torch.ones(1000), 0, None)
    assert sent.cancel()
    line.settle()
    assert line.b.link.receiver.opened == {}
    assert line.memory.unused()
    received = line.b.exchange.recv(line.b.other, 0, 0, None)
    line.settle()
    assert not received.done()
    sent = line.a.exchange.send(line.a.other, 0, torch.full((1000,), 2.0), 0, None)
    line.settle()
    assert (received.result() == 2).all()
    sent.result()


def test_one_frame_only_where_the_window_has_room(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that fit, then one that must wait; of those that are larger than the window no more than two are in the hands of the peer."""
    warm(line)
    kinds = noted(line, monkeypatch)
    sends = [line.a.exchange.send(line.a.other, 0, torch.full((900,), value, dtype=torch.uint8), 0, None) for value in range(3)]
    line.settle()
    assert [kind for kind in kinds if kind in (FrameType.PLACED, FrameType.OPEN)] == [FrameType.PLACED, FrameType.PLACED, FrameType.OPEN]
    for value in range(3):
        received = line.b.exchange.recv(line.b.other, 0, 0, None)
        line.settle()
        assert (received.result() == value).all()
    assert all(sent.result() is None for sent in sends)
    kinds.clear()
    large = [line.a.exchange.send(line.a.other, 0, torch.full((5000,), value, dtype=torch.uint8), 0, None) for value in range(3)]
    line.settle()
    assert [kind for kind in kinds if kind in (FrameType.PLACED, FrameType.OPEN)] == [FrameType.PLACED, FrameType.PLACED, FrameType.OPEN]
    assert line.b.link.receiver.window.outstanding == 0
    for value in range(3):
        received = line.b.exchange.recv(line.b.other, 0, 0, None)
        line.settle()
        assert (received.result() == value).all()
    assert all(sent.result() is None for sent in large)


def test_one_frame_that_was_delivered_and_not_taken_goes_to_the_next(line: Line) -> None:
    warm(line)
    received = line.b.exchange.recv(line.b.other, 0, 0, None)
    sent = line.a.exchange.send(line.a.other, 0, torch.arange(300), 0, None)
    line.settle()
    sent.result()
    assert received.done()
    assert received.cancel()
    again = line.b.exchange.recv(line.b.other, 0, 0, None)
    line.settle()
    assert torch.equal(again.result(), torch.arange(300))
    del again
    line.settle()
    assert line.memory.unused()


def test_a_large_copy_is_not_made_for_one_frame(line: Line) -> None:
    """It would hold up the loop."""
    way = line.a.link.sender.ways[0]
    flat = torch.zeros(PACK_INLINE_BYTES + 1, dtype=torch.uint8)
    sent = line.a.exchange.send(line.a.other, 0, flat, 0, None)
    out = sent._detail
    assert way.place(out, True) is None
    sent.cancel()
    line.settle()
