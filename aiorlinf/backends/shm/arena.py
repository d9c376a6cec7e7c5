"""The sender's memory: a bounded set of segments, cut into regions that come back when nobody looks at them any more.

A region is held by its maker while it is being filled (or by the tensors of `empty`), and by every peer it was lent to until that
peer says that its last view is gone. A peer that ends its link without saying so may still look at what it holds: the segments
concerned are retired, never written to again, and their memory goes back to the system with the last mapping.

All methods run on the home thread, but for `_make`, which blocks and runs in a private thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiorlinf.backends.shm.regions import PAGE, Regions, align
from aiorlinf.backends.shm.segment import Segment, create_segment

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Arena", "ArenaStats", "Region"]


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What the shared memory of a worker's sends looks like.

    Attributes:
        segments, bytes: made and usable now; `retired_segments` are only kept for views of others.
        used_bytes: in regions that somebody holds.
        hits: requests met from memory that was there; `misses`: made new; `refused`: over the bound, sent by another backend.
    """

    segments: int
    bytes: int
    used_bytes: int
    retired_segments: int
    hits: int
    misses: int
    refused: int


class Region:
    """Part of a segment. `holders` counts who may look at it: the maker, and peers it was lent to."""

    __slots__ = ("holders", "offset", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.holders = 1


class Arena:
    """See the module.

    Args:
        max_bytes: bound on all segments together.
        segment_bytes: size of an ordinary segment; larger requests get one of their own.
    """

    def __init__(self, home: LoopHome, max_bytes: int, segment_bytes: int) -> None:
        self.home = home
        self.max_bytes = max_bytes
        self.segment_bytes = segment_bytes
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._regions: dict[int, Regions] = {}
        self._retired: set[int] = set()
        self._making = 0
        self._hits = 0
        self._misses = 0
        self._refused = 0
        self.on_retire: Callable[[int], None] = lambda number: None

    @property
    def bytes(self) -> int:
        """Size of all usable segments, and of those being made."""
        return sum(segment.size for segment in self._segments.values()) + self._making

    def take(self, size: int) -> Region | None:
        """A region from memory that is there, None if there is none free."""
        for number, regions in self._regions.items():
            if number in self._retired:
                continue
            offset = regions.take(size)
            if offset is not None:
                self._hits += 1
                return Region(self._segments[number], offset, size)
        return None

    def grow(self, size: int, then: Callable[[Region | None], None]) -> bool:
        """Make a segment for a region of `size` bytes, then call back with it, or with None if the system has no memory.

        False: over the bound, `then` is not called.
        """
        need = align(max(size, 1), PAGE)
        need = max(self.segment_bytes, need)
        self._evict(need)
        if self.bytes + need > self.max_bytes:
            self._refused += 1
            return False
        number = next(self._numbers)
        self._making += need
        self._misses += 1
        self.home.submit(create_segment, number, need).add_done_callback(lambda work: self._made(work, size, need, then))
        return True

    def make_now(self, size: int) -> Region | None:
        """As `grow`, but blocking; for `empty`, whose caller waits for the memory anyway."""
        need = align(max(size, 1), PAGE)
        need = max(self.segment_bytes, need)
        self._evict(need)
        if self.bytes + need > self.max_bytes:
            self._refused += 1
            return None
        self._misses += 1
        try:
            segment = create_segment(next(self._numbers), need)
        except OSError:
            return None
        return self._add(segment, size)

    def _made(self, work: Any, size: int, need: int, then: Callable[[Region | None], None]) -> None:
        self._making -= need
        region = None
        if not work.cancelled() and work.exception() is None:
            region = self._add(work.result(), size)
        then(region)

    def _add(self, segment: Segment, size: int) -> Region:
        self._segments[segment.number] = segment
        regions = self._regions[segment.number] = Regions(segment.size)
        offset = regions.take(size)
        assert offset is not None
        return Region(segment, offset, size)

    def _evict(self, need: int) -> None:
        """Drop unused segments, the largest first, until `need` bytes fit."""
        unused = [segment for number, segment in self._segments.items() if self._regions[number].empty]
        for segment in sorted(unused, key=lambda segment: -segment.size):
            if self.bytes + need <= self.max_bytes:
                return
            self._drop(segment.number)

    def trim(self) -> int:
        """Give all unused segments back to the system; returns their bytes."""
        before = self.bytes
        for number in [number for number in self._segments if self._regions[number].empty]:
            self._drop(number)
        return before - self.bytes

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        del self._regions[number]
        self._retired.discard(number)
        segment.close()
        self.on_retire(number)

    # ---- holding

    def hold(self, region: Region) -> None:
        """One more may look at it."""
        region.holders += 1

    def release(self, region: Region) -> None:
        """One less."""
        region.holders -= 1
        if region.holders:
            return
        number = region.segment.number
        regions = self._regions.get(number)
        if regions is None:
            return
        regions.give(region.offset)
        if number in self._retired and regions.empty:
            self._drop(number)

    def abandon(self, region: Region) -> None:
        """One who may look at it will never say when he is done: the segment must not be written to again."""
        number = region.segment.number
        if number in self._segments:
            self._retired.add(number)
        self.release(region)

    def close(self) -> None:
        """Forget all segments; views keep their memory."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._regions.clear()
        self._retired.clear()

    def stats(self) -> ArenaStats:
        """A frozen copy of the counters."""
        return ArenaStats(
            segments=len(self._segments) - len(self._retired),
            bytes=self.bytes,
            used_bytes=sum(regions.used for regions in self._regions.values()),
            retired_segments=len(self._retired),
            hits=self._hits,
            misses=self._misses,
            refused=self._refused,
        )
