"""One worker with links to two others, moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorlinf.collective.inbox import Inbox
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import ClosedError
from aiorlinf.work.base import AsyncWork
from tests.link.stage import Side, StepHome, StepLoop, join

__all__ = ["BIG", "Three", "big", "three"]

BIG = 5000


class Three:
    """Worker a:0, with links to b:0 and c:0."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        config = CollectiveConfig(inline_max_bytes=64, window_bytes=2000, chunk_bytes=500)
        self.to_b = Side(self.home, "a:0", "b:0", config)
        self.to_c = Side(self.home, "a:0", "c:0", config, of=self.to_b)
        self.b = Side(self.home, "b:0", "a:0", config)
        self.c = Side(self.home, "c:0", "a:0", config)
        join(self.loop, self.to_b, self.b)
        join(self.loop, self.to_c, self.c)
        for side in (self.to_b, self.to_c, self.b, self.c):
            side.up()
        self.inbox = Inbox(self.to_b.exchange, 0)

    def flow(self, rounds: int = 8) -> None:
        for _ in range(rounds):
            for side in (self.to_b, self.to_c, self.b, self.c):
                side.socket.read(1 << 20)
            self.loop.turn()

    def settle(self) -> None:
        """Until nothing moves any more, whatever time it takes."""
        sides = (self.to_b, self.to_c, self.b, self.c)
        while any((self.home.run_thread(), self.loop.busy(), *(side.socket.readable() for side in sides), self.loop.to_next_timer())):
            self.flow(1)

    def send(self, side: Side, obj: Any, tag: int = 0) -> AsyncWork[None]:
        work = side.exchange.send(side.other, 0, obj, tag, None)
        self.flow()
        return work

    def recv(self, tag: int = 0) -> AsyncWork[Any]:
        """Of a, from b."""
        return self.to_b.exchange.recv(self.to_b.other, 0, tag, None)

    def close(self) -> None:
        for side in (self.to_b, self.to_c):
            side.link.end(lambda: ClosedError("over"))
        self.flow()
        self.home.close_nowait()
        self.loop.close()
        assert self.loop.problems == []


@pytest.fixture
def three() -> Iterator[Three]:
    """All links are up."""
    three = Three()
    yield three
    three.close()


def big(number: int) -> torch.Tensor:
    """Larger than the window: it comes when a receive has asked for it."""
    return torch.full((BIG,), number, dtype=torch.int32)
