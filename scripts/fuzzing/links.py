"""Frames into a real link: recorded conversations of two links, changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import AiorlinfError
from aiorlinf.link.link import LinkState
from aiorlinf.link.placement import Placement
from aiorlinf.link.ways import SharedWay
from scripts.fuzzing.targets import Target
from tests.link.planned_memory import SEGMENT, PlannedMemory
from tests.link.stage import Side, Socket, StepHome, StepLoop, join

__all__ = ["frame_targets"]

_CONFIG = CollectiveConfig(inline_max_bytes=4096, window_bytes=1 << 16, chunk_bytes=8192, max_message_bytes=1 << 20, allow_pickle=False)
_SETTLE_TURNS = 40
_OVER_STREAM: tuple[Any, ...] = ({"a": 1}, torch.arange(50), torch.arange(20_000), [torch.ones(3), torch.zeros(3000)], "late")
_IN_MEMORY: tuple[Any, ...] = (torch.arange(1000), torch.arange(900), [torch.ones(3), torch.zeros(3000)], {"a": torch.ones(2000)}, 2)
"""The first makes the memory. All fit into the window together, for the other side takes none of them."""


class _Recorded(Socket):
    """Remembers what was written."""

    def write(self, data: Any) -> None:
        self.said = getattr(self, "said", b"") + bytes(data)
        super().write(data)


def _sides(loop: StepLoop) -> tuple[Side, Side]:
    return Side(StepHome(loop), "a:0", "b:0", _CONFIG), Side(StepHome(loop), "b:0", "a:0", _CONFIG)


def _settle(loop: StepLoop, *sides: Side) -> None:
    for _ in range(_SETTLE_TURNS):
        loop.turn()
        for side in sides:
            side.socket.read(1 << 20)
            while isinstance(side.home, StepHome) and side.home.run_thread():
                pass
        loop.to_next_timer()


class _Memory(PlannedMemory):
    """Shared memory from one side to another; descriptors arrive at once. What it is used for is told on the link."""

    def __init__(self, sender: Side, receiver: Side) -> None:
        super().__init__(sender.home, sender.link, receiver.link)
        sender.link.sender.ways.append(SharedWay(sender.link.sender, self.out, _CONFIG.inline_max_bytes))

    def send(self, number: int, size: int, fd: int) -> None:
        """See `PlannedMemory`."""
        super().send(number, size, fd)
        self.step("pass")


def _conversation(*, shared: bool) -> tuple[bytes, bytes]:
    """What two workers say that send each other every kind of message, in both orders of send and receive; `shared`: they share memory."""
    loop = StepLoop()
    one, two = _sides(loop)
    memories = [_Memory(one, two), _Memory(two, one)] if shared else []
    for side in (one, two):
        side.socket = _Recorded(loop, side.connection, capacity=1 << 30, high=64)
        side.connection.connection_made(side.socket)
    one.socket.peer, two.socket.peer = two.socket, one.socket
    one.up()
    two.up()
    works: list[Any] = []
    for tag, obj in enumerate(_IN_MEMORY if shared else _OVER_STREAM):
        for sender, receiver in ((one, two), (two, one)):
            early = receiver.exchange.recv(sender.address, 0, tag, None) if tag % 2 else None
            works.append(sender.exchange.send(receiver.address, 0, obj, tag, None))
            _settle(loop, one, two)
            works.append(early or receiver.exchange.recv(sender.address, 0, tag, None))
    works.append(one.exchange.send_tensor(two.address, 0, torch.arange(9), 9, None))
    works.append(two.exchange.recv_tensor(one.address, 0, torch.arange(9), 9, None))
    refused = one.exchange.send_tensor(two.address, 0, torch.arange(9), 10, None)
    wrong = two.exchange.recv_tensor(one.address, 0, torch.arange(8), 10, None)
    _settle(loop, one, two)
    assert all(work.done() for work in works), works
    assert isinstance(wrong.exception(), AiorlinfError)
    assert isinstance(refused.exception(), AiorlinfError)
    said = one.socket.said, two.socket.said  # type: ignore[attr-defined]
    for side in (one, two):
        side.link.end(lambda: AiorlinfError("over"))
    for memory in memories:
        memory.free()
    loop.turn()
    loop.close()
    return said


class _Feeder:
    """One worker that waits for everything, and a peer that says what it is told."""

    def __init__(self, loop: StepLoop, *, shared: bool) -> None:
        self._loop = loop
        self._shared = shared

    def read(self, data: bytes) -> None:
        loop = self._loop
        side, peer = _sides(loop)
        join(loop, side, peer)
        memory = _Memory(peer, side) if self._shared else None
        if memory is not None:
            region = memory.arena.make_now(SEGMENT)
            assert region is not None
            memory.out.lend(Placement(region, {}))  # so that its file is here, under the number that it had when it was talked about
        side.up()
        works: list[Any] = [side.exchange.recv(WorkerAddress("b:0"), 0, tag, None) for tag in range(5)]
        works += [side.exchange.recv_tensor(WorkerAddress("b:0"), 0, torch.arange(9), tag, None) for tag in (9, 10)]
        works.append(side.exchange.send(WorkerAddress("b:0"), 0, torch.arange(20_000), 1, None))
        peer.socket.write(data)
        try:
            for piece in (len(data) // 2, 1 << 20):
                side.socket.read(piece)
                loop.turn()
            _settle(loop, side)
            if side.link.state is LinkState.ENDED:
                assert side.link.cause is not None
                error = side.link.cause()
                if not isinstance(error, AiorlinfError):
                    raise AssertionError(f"the link ended with {error!r}")
        finally:
            side.link.end(lambda: AiorlinfError("the input is over"))
            peer.link.end(lambda: AiorlinfError("the input is over"))
            if memory is not None:
                memory.free()
            loop.turn()
            for work in works:
                if not work.done():
                    raise AssertionError(f"{work!r} never ended")
                _check(work)
            if loop.problems:
                raise AssertionError(f"unseen: {loop.problems.pop()}")


def _check(work: Any) -> None:
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, AiorlinfError):
        raise AssertionError(f"{work!r} ended with {error!r}") from error


@contextmanager
def frame_targets() -> Iterator[list[Target]]:
    """Frames of either side."""
    loop = StepLoop()
    try:
        yield [
            Target("frames", _conversation(shared=False), _Feeder(loop, shared=False).read, 2),
            Target("frames-memory", _conversation(shared=True), _Feeder(loop, shared=True).read, 1),
        ]
    finally:
        loop.close()
