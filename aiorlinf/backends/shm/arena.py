"""The sender's memory: a bounded set of segments, cut into regions that come back when nobody looks at them any more.

A region is held by its maker while it is being filled (or by the tensors of `empty`), and by every peer it was lent to until that
peer says that its last view is gone. A peer that ends its link without saying so may still look at what it holds: the segments
concerned are retired, nothing new is put into them, and their memory goes back to the system with the last mapping.

A region is lent whole and comes back whole: one small tensor of a large message keeps all of that message's region.

All methods run on the home thread; what blocks for long runs in private threads.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiorlinf.backends.shm.mapping import let_go
from aiorlinf.backends.shm.regions import PAGE, Regions, align
from aiorlinf.backends.shm.segment import Segment, create_segment

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Arena", "ArenaStats", "Region"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

FIRST_BYTES = 4 << 20
"""The first segment. To make one takes about half a millisecond for each MiB, for which the first message of its kind has to wait; so they
begin small, and each is twice the one before, up to the ordinary size."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What the shared memory of a worker's sends looks like.

    Attributes:
        segments, bytes: made, or being made.
        used_bytes: in regions that somebody holds: receivers, tensors of `empty`, messages being copied.
        retired_segments: those of `segments` that are only kept until the last holder lets go.
        hits: requests met from memory that was there; `misses`: made new; `refused`: over the bound, sent another way.
        evictions: unused segments given back to the system, to make room or to save memory.
    """

    segments: int
    bytes: int
    used_bytes: int
    retired_segments: int
    hits: int
    misses: int
    refused: int
    evictions: int


class Region:
    """Part of a segment. `holders` counts who may look at it: the maker, and peers it was lent to. With the last of them it ends."""

    __slots__ = ("arena", "holders", "offset", "segment", "size")

    def __init__(self, arena: Arena, segment: Segment, offset: int, size: int) -> None:
        self.arena: Arena = arena
        self.segment: Segment = segment
        self.offset: int = offset
        self.size: int = size
        self.holders: int = 1

    def hold(self) -> None:
        """See `Arena.hold`."""
        self.holders += 1

    def release(self) -> None:
        """See `Arena.release`."""
        self.arena.release(self)

    def abandon(self) -> None:
        """See `Arena.abandon`."""
        self.arena.abandon(self)


class _Growth:
    """A segment that is being made, and those who wait for a part of it."""

    __slots__ = ("regions", "waiting")

    def __init__(self, size: int) -> None:
        self.regions = Regions(size)
        self.waiting: list[tuple[int, int, Callable[[Region | None], None]]] = []

    def join(self, size: int, then: Callable[[Region | None], None]) -> bool:
        """Wait for a region of this size, if there is room for it."""
        offset = self.regions.take(size)
        if offset is None:
            return False
        self.waiting.append((offset, size, then))
        return True


class Arena:
    """See the module.

    Args:
        max_bytes: bound on all segments together.
        segment_bytes: size of an ordinary segment, once there are some smaller ones; larger requests get one of their own.

    Attributes:
        bytes: size of all segments, and of those being made.
        on_drop: called with the number of each segment that nobody will find anything new in.
        on_idle: called when a segment becomes unused.
    """

    def __init__(self, home: LoopHome, max_bytes: int, segment_bytes: int) -> None:
        self.home = home
        self.max_bytes = max_bytes
        self.segment_bytes: int = align(segment_bytes, PAGE)
        self.bytes: int = 0
        self.on_drop: Callable[[int], None] = lambda number: None
        self.on_idle: Callable[[], None] | None = None
        self._next_bytes = self._first_bytes = min(FIRST_BYTES, self.segment_bytes)
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._regions: dict[int, Regions] = {}
        self._retired: set[int] = set()
        self._resting: set[int] = set()
        self._growing: list[_Growth] = []
        self._closed = False
        self._complained = False
        self._hits = 0
        self._misses = 0
        self._refused = 0
        self._evictions = 0

    def new_number(self) -> int:
        """One that was never given before."""
        return next(self._numbers)

    def take(self, size: int, *, anywhere: bool = False) -> Region | None:
        """A region from memory that is there, None if there is none free.

        A segment that was made for one large request is left to others of that kind, unless `anywhere`: a small tensor that somebody
        keeps for long would make it useless for them.
        """
        for number, regions in self._regions.items():
            if size > regions.size - regions.used or number in self._retired:
                continue
            if size <= self.segment_bytes < regions.size and not anywhere:
                continue
            offset = regions.take(size)
            if offset is not None:
                self._hits += 1
                self._resting.discard(number)
                return Region(self, self._segments[number], offset, size)
        return None

    def grow(self, size: int, then: Callable[[Region | None], None]) -> bool:
        """Make a segment for a region of `size` bytes, then call back with it, or with None if the system has no memory.

        False: over the bound, and there is no room anywhere; `then` is not called.
        """
        if any(growth.join(size, then) for growth in self._growing):
            self._misses += 1
            return True
        need = self._room_for(size)
        if not need:
            region = self.take(size, anywhere=True)
            if region is not None:
                then(region)
            return self._served(region)
        growth = _Growth(need)
        growth.join(size, then)
        self._growing.append(growth)
        making = self.home.submit(create_segment, self.new_number(), need)
        making.add_done_callback(lambda work: self._grown(growth, work))
        return True

    def make_now(self, size: int) -> Region | None:
        """As `grow`, for callers who cannot wait: the pages come with the first touch."""
        need = self._room_for(size)
        if not need:
            region = self.take(size, anywhere=True)
            self._served(region)
            return region
        growth = _Growth(need)
        regions: list[Region | None] = []
        growth.join(size, regions.append)
        try:
            segment = create_segment(self.new_number(), need, populate=False)
        except OSError as error:
            self._failed(growth, error)
        else:
            self._add(growth, segment)
        return regions[0]

    def _served(self, region: Region | None) -> bool:
        if region is None:
            self._refused += 1
        return region is not None

    def _room_for(self, size: int) -> int:
        """Size of a new segment for such a region, counted from now on; 0 if that is over the bound."""
        if not self._segments and not self._growing:
            self._next_bytes = self._first_bytes
        need = max(self._next_bytes, align(size, PAGE))
        if self._closed or not self._evict(self.bytes + need - self.max_bytes):
            return 0
        self._next_bytes = min(2 * max(need, self._first_bytes), self.segment_bytes)
        self.bytes += need
        self._misses += 1
        return need

    def _evict(self, short: int) -> bool:
        """Drop unused segments of so many bytes, large ones first; none if they do not suffice."""
        if short <= 0:
            return True
        unused = [segment for number, segment in self._segments.items() if self._regions[number].empty]
        if sum(segment.size for segment in unused) < short:
            return False
        for segment in sorted(unused, key=lambda segment: -segment.size):
            if short <= 0:
                break
            short -= segment.size
            self._evictions += 1
            self._drop(segment.number)
        return True

    def _grown(self, growth: _Growth, work: Any) -> None:
        self._growing.remove(growth)
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or error is not None:
            self._failed(growth, error)
        elif self._closed:
            work.result().close()
            self._failed(growth, None)
        else:
            self._add(growth, work.result())

    def _failed(self, growth: _Growth, error: BaseException | None) -> None:
        self.bytes -= growth.regions.size
        if isinstance(error, OSError) and not self._complained:
            self._complained = True  # once, until it works again
            log.warning("no shared memory of %d bytes can be had, other backends are used: %s", growth.regions.size, error)
        for _, _, then in growth.waiting:
            then(None)

    def _add(self, growth: _Growth, segment: Segment) -> None:
        self._complained = False
        self._segments[segment.number] = segment
        self._regions[segment.number] = growth.regions
        for offset, size, then in growth.waiting:
            then(Region(self, segment, offset, size))

    def trim(self) -> int:
        """Give all unused segments back to the system; returns their bytes."""
        return self._trim(self._unused())

    def age(self) -> bool:
        """Give those back that nobody has used since before the last call; whether unused ones remain."""
        self._trim(self._resting)
        self._resting = self._unused()
        return bool(self._resting)

    def _unused(self) -> set[int]:
        return {number for number, regions in self._regions.items() if regions.empty}

    def _trim(self, numbers: set[int]) -> int:
        before = self.bytes
        for number in list(numbers):
            self._evictions += 1
            self._drop(number)
        return before - self.bytes

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        del self._regions[number]
        self._retired.discard(number)
        self._resting.discard(number)
        self.bytes -= segment.size
        segment.close()
        self.home.loop.call_soon(let_go, [segment])  # in a later turn: the callers of this may still refer to it
        self.on_drop(number)

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
        del region.segment  # so that it is not this region that keeps the mapping
        regions = self._regions.get(number)
        if regions is None:
            return
        regions.give(region.offset)
        if regions.empty and number in self._retired:
            self._drop(number)
        elif regions.empty and self.on_idle is not None:
            self.on_idle()

    def abandon(self, region: Region) -> None:
        """One who may look at it will never say when he is done: its memory must not be written to again."""
        number = region.segment.number
        if number in self._segments:
            self._retired.add(number)
        self.release(region)

    def close(self) -> None:
        """Forget all segments and make no new ones; views keep their memory."""
        self._closed = True
        for segment in self._segments.values():
            segment.close()
            self.bytes -= segment.size
        if self._segments:
            self.home.loop.call_soon(let_go, list(self._segments.values()))
        self._segments.clear()
        self._regions.clear()
        self._retired.clear()
        self._resting.clear()

    def stats(self) -> ArenaStats:
        """A frozen copy of the counters."""
        regions = [*self._regions.values(), *(growth.regions for growth in self._growing)]
        return ArenaStats(
            segments=len(regions),
            bytes=self.bytes,
            used_bytes=sum(each.used for each in regions),
            retired_segments=len(self._retired),
            hits=self._hits,
            misses=self._misses,
            refused=self._refused,
            evictions=self._evictions,
        )
