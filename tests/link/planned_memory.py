"""Shared memory between two links whose descriptors travel when the test says so, or are lost. Arena, halves and memory files are real."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from aiorlinf.backends.shm.arena import Arena
from aiorlinf.link.link import Link
from aiorlinf.link.loan import Keeper
from aiorlinf.link.shared import SharedOut
from aiorlinf.link.shared_in import SharedIn
from aiorlinf.work.home import LoopHome

__all__ = ["SEGMENT", "STEPS", "PlannedMemory"]

STEPS = ("pass", "lose", "refuse")
"""What `PlannedMemory.step` can be told."""

SEGMENT = 1 << 16


class PlannedMemory:
    """One direction of a link. It is itself the writer of descriptors that `SharedOut` opens.

    Args:
        arena: of the sender, if it sends over other links, too.
        keeper: of the receiver, if it passes messages on.
    """

    def __init__(self, home: LoopHome, sender: Link, receiver: Link, *, arena: Arena | None = None, keeper: Keeper | None = None) -> None:
        if arena is None:
            arena = Arena(home, 2 * SEGMENT, SEGMENT)
            arena.on_drop = sender.forget_segment
        self.arena = arena
        writer: Any = self
        self.out = SharedOut(self.arena, lambda: writer, lambda reason: None)
        self.incoming = SharedIn(home, receiver.release_shared, keeper)
        self._under_way: deque[tuple[int, int, int]] = deque()
        self._refusing = False
        sender.shared_out = self.out
        receiver.receiver.shared = self.incoming

    # ---- as DescriptorWriter

    def send(self, number: int, size: int, fd: int) -> None:
        if self._refusing:
            raise BlockingIOError("no room")
        self._under_way.append((number, size, os.dup(fd)))

    def close(self) -> None:
        """What is under way still arrives, or not."""

    # ---- the test's side

    def step(self, name: str) -> bool:
        """Do one of `STEPS`; False if there was nothing to do."""
        if name == "refuse":
            self._refusing = not self._refusing
            return True
        if not self._under_way:
            return False
        number, size, fd = self._under_way.popleft()
        if name == "lose":
            os.close(fd)
            self.incoming._take(number, size, None)
        else:
            self.incoming._take(number, size, fd)
        return True

    def go_on(self) -> bool:
        """Whatever can be done without a failure; False if nothing can."""
        self._refusing = False
        return self.step("pass")

    def unused(self) -> bool:
        """Nobody holds a part of it."""
        return self.arena.stats().used_bytes == 0 and self.out.lent_bytes == 0 and self.incoming.held_bytes == 0

    def free(self) -> None:
        """Give everything back to the system."""
        while self._under_way:
            os.close(self._under_way.popleft()[2])
        self.incoming.close()
        self.out.close()
        self.arena.close()
