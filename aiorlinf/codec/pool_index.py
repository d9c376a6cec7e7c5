"""Which buffers of a pool are idle, and which one a request gets: pure, no memory and no clock.

A request gets the smallest idle buffer that it fits in, if that is at most twice as large or if a new one would break the budget; else
a new one of just its size, for which idle ones go, the largest first. If even that is not enough room, it gets nothing.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Grant", "PoolIndex"]

B = TypeVar("B")


class Grant(NamedTuple, Generic[B]):
    """What a request gets.

    Attributes:
        capacity: bytes of the buffer.
        buffer: an idle one, no longer idle; None: the caller makes a new one, or says `fail`.
        evicted: no longer in the pool; to be let go of before the new one is made.
    """

    capacity: int
    buffer: B | None
    evicted: list[B]


class PoolIndex(Generic[B]):
    """See the module. Sizes and capacities are positive numbers of bytes.

    Attributes:
        max_bytes: bound on `leased_bytes` and `cached_bytes` together; grants keep it, whatever happens.
        leased_bytes: capacity of the buffers that are in use.
        cached_bytes: capacity of the idle ones.
        hits: requests that got an idle buffer; misses: a new one; unpooled: none.
        evictions: idle buffers that went to make room.
        trims: idle buffers that went because nobody used them (`age`, `clear`).
    """

    __slots__ = (
        "_capacities",
        "_idle",
        "_period",
        "cached_bytes",
        "evictions",
        "hits",
        "leased_bytes",
        "max_bytes",
        "misses",
        "trims",
        "unpooled",
    )

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: int = max_bytes
        self.leased_bytes: int = 0
        self.cached_bytes: int = 0
        self.hits: int = 0
        self.misses: int = 0
        self.unpooled: int = 0
        self.evictions: int = 0
        self.trims: int = 0
        # By capacity: idle buffers with the period in which they came back, the latest last. Its pages are the likeliest in the cache.
        self._idle: dict[int, deque[tuple[int, B]]] = {}
        self._capacities: list[int] = []  # sorted keys of _idle
        self._period = 0

    def request(self, size: int) -> Grant[B] | None:
        """A buffer of at least `size` bytes; None if there is no room for it."""
        at = bisect.bisect_left(self._capacities, size)
        if at < len(self._capacities):
            capacity = self._capacities[at]
            if capacity <= 2 * size or self.leased_bytes + self.cached_bytes + size > self.max_bytes:
                self.hits += 1
                self.leased_bytes += capacity
                return Grant(capacity, self._take(capacity, latest=True), [])
        if self.leased_bytes + size > self.max_bytes:
            self.unpooled += 1
            return None
        evicted = self._evict(size)
        self.misses += 1
        self.leased_bytes += size
        return Grant(size, None, evicted)

    def _evict(self, room: int) -> list[B]:
        evicted = []
        while self._capacities and self.leased_bytes + self.cached_bytes + room > self.max_bytes:
            evicted.append(self._take(self._capacities[-1], latest=False))
        self.evictions += len(evicted)
        return evicted

    def fail(self, capacity: int) -> None:
        """The new buffer of a grant could not be made."""
        self.misses -= 1
        self.unpooled += 1
        self.leased_bytes -= capacity

    def give(self, capacity: int, buffer: B) -> bool:
        """A buffer is not in use any more. False: it is not kept either, as there is no room."""
        self.leased_bytes -= capacity
        if self.leased_bytes + self.cached_bytes + capacity > self.max_bytes:
            self.evictions += 1
            return False
        self.cached_bytes += capacity
        same = self._idle.get(capacity)
        if same is None:
            same = self._idle[capacity] = deque()
            bisect.insort(self._capacities, capacity)
        same.append((self._period, buffer))
        return True

    def forget(self, capacity: int) -> None:
        """A buffer that was in use does not come back."""
        self.leased_bytes -= capacity

    def resize(self, max_bytes: int) -> list[B]:
        """Set the bound; returns the buffers that have to go. Those in use stay, so that the bound may be broken for a while."""
        self.max_bytes = max_bytes
        return self._evict(0)

    def age(self) -> list[B]:
        """Begin a new period; returns the buffers that were idle through all of the one that ends. They are not in the pool any more."""
        old = []
        for capacity in list(self._capacities):
            while capacity in self._idle and self._idle[capacity][0][0] < self._period:
                old.append(self._take(capacity, latest=False))
        self._period += 1
        self.trims += len(old)
        return old

    def clear(self) -> list[B]:
        """Returns all idle buffers; they are not in the pool any more."""
        idle = [buffer for same in self._idle.values() for _, buffer in same]
        self._idle.clear()
        self._capacities.clear()
        self.cached_bytes = 0
        self.trims += len(idle)
        return idle

    def _take(self, capacity: int, *, latest: bool) -> B:
        same = self._idle[capacity]
        _, buffer = same.pop() if latest else same.popleft()
        if not same:
            del self._idle[capacity]
            del self._capacities[bisect.bisect_left(self._capacities, capacity)]
        self.cached_bytes -= capacity
        return buffer
