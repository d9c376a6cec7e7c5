"""Streams and events with a clock that only the test moves, and vector clocks that tell what is ordered before what.

Each stream counts its operations. A clock is a count per stream: everything up to there is known to have happened before. An event takes
its stream's clock with it; who waits for the event takes that over. So a missing wait is found whenever the code runs, in whatever order
things happened to finish in that run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiorlinf.testing.fake.between import Flag

__all__ = ["Clock", "FakeEvent", "FakeStream", "Operation", "merge", "shuffled"]

Clock = dict[int, int]
"""By stream number, the count up to which its operations are known to be over."""


def merge(clock: Clock, other: Clock) -> None:
    """Take over what `other` knows."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


class FakeEvent:
    """A point in a stream.

    Args:
        flag: where other processes see it; None: they do not.

    Attributes:
        clock: what is over by then.
        number: its own.
        foreign: it is one of another process's.
        stream: the number of the one that it was recorded on, if that is known.
    """

    def __init__(self, number: int, clock: Clock, flag: Flag | None = None, *, foreign: bool = False, stream: int | None = None) -> None:
        self.number = number
        self.stream = stream
        self.clock = clock
        self.foreign = foreign
        self.flag: Flag | None = flag
        self._happened = False

    @property
    def happened(self) -> bool:
        """The stream has come there."""
        return self.flag.is_up if self.foreign and self.flag is not None else self._happened

    def happen(self) -> None:
        """The stream comes there."""
        self._happened = True
        if self.flag is not None:
            self.flag.up()


class Operation:
    """What a stream is to do.

    Attributes:
        run: does it.
        waits_for: the stream stands still until this event has happened.
        ticks: how long it takes.
        keeps: memory that it uses; that it was freed too early is found by others, and must not end the process.
    """

    __slots__ = ("keeps", "run", "ticks", "waits_for", "what")

    def __init__(self, what: str, run: Callable[[], object] | None, ticks: int, waits_for: FakeEvent | None = None) -> None:
        self.what: str = what
        self.run: Callable[[], object] | None = run
        self.ticks: int = ticks
        self.waits_for: FakeEvent | None = waits_for
        self.keeps: list[object] = []


class FakeStream:
    """A queue of operations of one device.

    Attributes:
        clock: what is over when the last of its operations is.
        number: its own, from 1.
    """

    def __init__(self, number: int, index: int, name: str) -> None:
        self.number = number
        self.index = index
        self.name = name
        self.clock: Clock = {number: 0}
        self.queue: deque[Operation] = deque()

    @property
    def count(self) -> int:
        """Of its operations so far."""
        return self.clock[self.number]

    def add(self, operation: Operation) -> int:
        """Returns its count."""
        self.clock[self.number] += 1
        self.queue.append(operation)
        return self.clock[self.number]

    def tick(self) -> bool:
        """Let it run for one tick; False if it cannot go on."""
        moved = False
        while self.queue:
            head = self.queue[0]
            if head.waits_for is not None and not head.waits_for.happened:
                return moved
            if head.ticks > 0:
                head.ticks -= 1
                moved = True
                if head.ticks:
                    return True
            if head.run is not None:
                head.run()
            self.queue.popleft()
            moved = True
            if self.queue and self.queue[0].ticks:
                return True
        return moved

    @property
    def waits_for_another(self) -> bool:
        """What it has to do next waits for an event of another process."""
        event = self.queue[0].waits_for if self.queue else None
        return event is not None and event.foreign and not event.happened

    def __repr__(self) -> str:
        return f"<FakeStream fake:{self.index} {self.name}, {len(self.queue)} to do>"


def shuffled(streams: list[FakeStream], chance: random.Random) -> list[FakeStream]:
    """In the order in which they get their turn."""
    order = list(streams)
    chance.shuffle(order)
    return order
