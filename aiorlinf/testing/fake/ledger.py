"""Who has used which memory, and whether that was in order."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from aiorlinf.testing.fake.memory import Memory
from aiorlinf.testing.fake.streams import Clock, FakeStream

__all__ = ["Block", "Ledger"]

_ACCESSES_MAX = 64


@dataclass(frozen=True, slots=True)
class _Access:
    start: int
    end: int
    stream: FakeStream
    count: int
    writes: bool
    what: str


class Block:
    """An allocation.

    Attributes:
        memory: where it is.
        owner: the stream that it was made for; None for pinned host memory.
        holds: other streams that are known to use it.
    """

    def __init__(self, memory: Memory, owner: FakeStream | None) -> None:
        self.memory = memory
        self.owner = owner
        self.holds: set[FakeStream] = set()
        self.accesses: list[_Access] = []


class Ledger:
    """All allocations. `object_to` is called with each thing that is wrong."""

    def __init__(self, object_to: Callable[[str], None]) -> None:
        self._object_to = object_to
        self._starts: list[int] = []
        self._blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        """A new allocation."""
        at = bisect.bisect(self._starts, block.memory.address)
        self._starts.insert(at, block.memory.address)
        self._blocks.insert(at, block)

    def find(self, address: int, nbytes: int) -> Block | None:
        """The allocation that these bytes are in."""
        at = bisect.bisect(self._starts, address) - 1
        if at < 0:
            return None
        block = self._blocks[at]
        return block if address + nbytes <= block.memory.address + max(block.memory.nbytes, 1) else None

    def use(self, stream: FakeStream, count: int, address: int, nbytes: int, *, writes: bool, what: str) -> Block | None:
        """An operation of a stream reads or writes these bytes. Everything before it that it depends on must be known to be over."""
        block = self.find(address, nbytes)
        if block is None:
            self._object_to(f"{what} on {stream.name} uses memory that the device does not know")
            return None
        access = _Access(address, address + nbytes, stream, count, writes, what)
        kept = []
        for other in block.accesses:
            overlaps = other.start < access.end and access.start < other.end
            ordered = stream.clock.get(other.stream.number, 0) >= other.count
            if overlaps and (writes or other.writes) and not ordered:
                verb = "writes" if writes else "reads"
                self._object_to(f"{what} on {stream.name} {verb} memory without waiting for {other.what} on {other.stream.name}")
            covered = access.start <= other.start and other.end <= access.end
            if not (covered and ordered and (writes or not other.writes) and other.stream is stream):
                kept.append(other)
        kept.append(access)
        block.accesses = kept[-_ACCESSES_MAX:]
        return block

    def host(self, known: Clock, address: int, nbytes: int, *, writes: bool, what: str) -> None:
        """The program itself reads or writes host memory."""
        block = self.find(address, nbytes)
        for other in () if block is None else block.accesses:
            overlaps = other.start < address + nbytes and address < other.end
            if overlaps and (writes or other.writes) and known.get(other.stream.number, 0) < other.count:
                self._object_to(f"{what} without knowing that {other.what} on {other.stream.name} is over")

    def free(self, block: Block, known: Clock | None) -> None:
        """Nobody refers to it any more; its memory may be used again, by its owner's stream, at once. `known`: to be over; None: all is."""
        at = self._blocks.index(block)
        del self._blocks[at], self._starts[at]
        owner = block.owner
        if owner is None or known is None:
            return
        for access in block.accesses:
            stream = access.stream
            over = max(owner.clock.get(stream.number, 0), known.get(stream.number, 0)) >= access.count
            if stream is not owner and stream not in block.holds and not over:
                self._object_to(f"memory of {owner.name} is freed while {access.what} on {stream.name} may still use it")
