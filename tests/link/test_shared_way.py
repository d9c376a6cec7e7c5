"""Shared memory as the only way that a payload may go: two links moved by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import BackendUnavailable, ClosedError, RemoteError
from aiorlinf.link.ways import SharedWay
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
