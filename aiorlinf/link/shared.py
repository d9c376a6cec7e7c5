"""Payloads in shared memory: the sending half of a link (the receiving one is `link.shared_in`).

The sender copies a message's leaves into a region of its arena and passes the segment's descriptor the first time the peer needs it.
PLACED says where, or START with END right behind it. The receiver's tensors live in that region; when the last view of them is gone it
says RELEASE, and the region can be used again.

Descriptors and frames travel on different sockets, so either may be there first. A descriptor can be lost (the receiver has no room for
another open file): the messages that need it go over the stream (AGAIN), and after a pause shared memory is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiorlinf.backends.shm.arena import Arena
from aiorlinf.backends.shm.descriptors import DescriptorWriter
from aiorlinf.backends.shm.segment import Segment
from aiorlinf.errors import WireError
from aiorlinf.link.placement import PLACE, Lendable, Place, Placement

__all__ = ["SharedOut"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class SharedOut:
    """The sending half. Home thread only.

    Args:
        arena: the worker's memory.
        open_writer: connects to the peer's descriptor listener; raises OSError.
        changed: called with the reason when shared memory cannot be used for a while, with None when it is used again.

    Attributes:
        lent_bytes: in regions that the peer has not given back.
    """

    def __init__(self, arena: Arena, open_writer: Callable[[], DescriptorWriter], changed: Callable[[str | None], None]) -> None:
        self.arena = arena
        self.lent_bytes: int = 0
        self._open_writer = open_writer
        self._changed = changed
        self._writer: DescriptorWriter | None = None
        self._names: dict[int, list[int]] = {}  # by segment, the numbers by which the peer knows it
        self._stale: set[int] = set()  # segments that may have been lost: pass them again, under another number
        # Nearly always one at a place; a parcel can be there twice. None: it was handed over.
        self._lent: dict[Place, list[tuple[Lendable, Placement | None]]] = {}
        self._resting = False
        self._rests_until = float("-inf")
        self._pause = _FIRST_PAUSE_SECONDS
        self._closed = False

    @property
    def usable(self) -> bool:
        """It is worth a try."""
        return not self._closed and (not self._resting or self.arena.home.loop.time() >= self._rests_until)

    def lend(self, placement: Placement, *, anyway: bool = False) -> bytes | None:
        """Make sure the peer has the segments, remember what it holds, and say where that is. None: it cannot get them.

        `anyway`: try, though it has not worked of late.
        """
        if self._closed or (self._resting and not (anyway or self.usable)):
            return None
        regions, names = placement.regions(), placement.names
        try:
            for region in regions:
                if region.segment.number not in names:
                    names[region.segment.number] = self._pass(region.segment)
        except OSError as error:
            self._not_passed(error)
            return None
        for region in regions:
            region.hold()
            self._lent.setdefault((names[region.segment.number], region.offset), []).append((region, placement))
            self.lent_bytes += region.size
        placement.lent += len(regions)
        if self._resting:
            self._resting = False
            self._changed(None)
        return placement.encode()

    def hand_over(self, region: Lendable) -> bytes | None:
        """As `lend`, of one region that holds all of a message; the caller's hold becomes the peer's. None: it stays the caller's."""
        if self._closed or (self._resting and not self.usable):
            return None
        try:
            place = (self._pass(region.segment), region.offset)
        except OSError as error:
            self._not_passed(error)
            return None
        self._lent.setdefault(place, []).append((region, None))
        self.lent_bytes += region.size
        if self._resting:
            self._resting = False
            self._changed(None)
        return PLACE.pack(*place)

    def _not_passed(self, error: OSError) -> None:
        """What is in the socket may be lost, too."""
        self._close_writer()
        self._stale.update(self._names)
        self._rest(f"a memory file could not be passed: {error}")

    def _pass(self, segment: Segment) -> int:
        """The number by which the peer knows the segment. A new one each time that it is passed, so that what was lost stays lost."""
        names = self._names.get(segment.number)
        if names is not None and segment.number not in self._stale:
            return names[-1]
        if self._writer is None:
            self._writer = self._open_writer()
        name = self.arena.new_number()
        self._writer.send(name, segment.size, segment.fd)
        self._names.setdefault(segment.number, []).append(name)
        self._stale.discard(segment.number)
        return name

    def lost(self, placement: Placement) -> None:
        """The peer did not get a segment of this message."""
        for number, name in placement.names.items():
            if name in self._names.get(number, ())[-1:]:
                self._stale.add(number)
        self._rest("the peer could not map a memory file")

    def pass_again(self, placement: Placement) -> None:
        """The peer has these segments, but not in the way that it needs for this message: pass them once more when they are lent next."""
        for number, name in placement.names.items():
            if name in self._names.get(number, ())[-1:]:
                self._stale.add(number)

    def _rest(self, reason: str) -> None:
        """Use other backends for a while; for longer if the last try was not long ago."""
        now = self.arena.home.loop.time()
        if self._closed or now < self._rests_until:
            return
        soon = now < self._rests_until + _LONGEST_PAUSE_SECONDS
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS) if soon else _FIRST_PAUSE_SECONDS
        self._rests_until = now + self._pause
        self._resting = True
        self._changed(reason)

    def forget(self, number: int) -> list[int]:
        """The arena dropped a segment; the numbers by which the peer may know it."""
        self._stale.discard(number)
        return self._names.pop(number, [])

    def on_release(self, body: memoryview, abandoned: bool = False) -> None:
        """The peer's last views of these regions are gone; `abandoned`: but somebody that he lent them to may still look."""
        if len(body) % PLACE.size:
            raise WireError(f"a release of {len(body)} bytes")
        for place in PLACE.iter_unpack(body):
            loans = self._lent.get(place)
            if not loans:
                raise WireError(f"a region that was never lent is released {place}")
            region, placement = loans.pop(0)
            if not loans:
                del self._lent[place]
            self.lent_bytes -= region.size
            if abandoned:
                region.abandon()
            else:
                region.release()
            if placement is not None:
                placement.lent -= 1
                if not placement.lent and placement.back is not None:
                    back, placement.back = placement.back, None
                    back()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """The link has ended; the peer may still look at what it holds."""
        self._closed = True
        self._close_writer()
        lent, self._lent = self._lent, {}
        self.lent_bytes = 0
        for loans in lent.values():
            for region, _ in loans:
                region.abandon()
