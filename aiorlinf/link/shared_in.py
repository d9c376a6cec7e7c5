"""Payloads in shared memory: the receiving half of a link (the sending one is `link.shared`).

A message's tensors live in a region of the sender's memory, in a segment that is mapped when its descriptor comes. When the last view of
them is gone we say RELEASE, and the region can be used again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiorlinf.backends.shm.descriptors import DescriptorReader
from aiorlinf.backends.shm.mapping import let_go
from aiorlinf.backends.shm.private import private_view
from aiorlinf.backends.shm.segment import Segment, open_segment
from aiorlinf.errors import AiorlinfError, WireError
from aiorlinf.link.loan import Held, Hold, Keeper, Loan, Part
from aiorlinf.link.placement import PLACE, Place, decode_places, offsets, packed_size

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["SharedIn", "Views"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

PASS_SECONDS = 10.0
"""A descriptor that was sent has not come by then: it never will."""

_LAST_CHANCE_SECONDS = 1.0
_MAX_SEGMENT_BYTES = 1 << 42
_MAX_SEGMENTS = 1 << 16
_MAX_READERS = 4
_PLACES_PER_FRAME = 4096
_NOTHING: Any = np.empty(0, dtype=np.uint8)


class _Releases:
    """Tells the peer which regions nobody here looks at any more, all of one turn of the loop together.

    The finalizers of received memory refer to this and not to the link, which may have ended long before.

    Attributes:
        held_bytes: in regions that somebody here looks at.
    """

    def __init__(self, home: LoopHome, send: Callable[..., None]) -> None:
        self.held_bytes = 0
        self._home = home
        self._send: Callable[..., None] | None = send
        self._gone: list[bytes] = []
        self._abandoned: list[bytes] = []

    def root_gone(self, hold: Hold) -> None:
        """The last view is gone; called in whatever thread let go of it."""
        if self._send is None:
            return
        try:
            self._home.call(self._given_back, hold)
        except (AiorlinfError, RuntimeError):  # the loop is gone, or we are a fork: nobody is left to tell
            pass

    def _given_back(self, hold: Hold) -> None:
        self.held_bytes -= hold.size
        self.add(hold.place, hold.abandoned)

    def add(self, place: Place, abandoned: bool = False) -> None:
        """Home thread only."""
        if self._send is None:
            return
        if not self._gone and not self._abandoned:
            self._home.loop.call_soon(self._flush)
        (self._abandoned if abandoned else self._gone).append(PLACE.pack(*place))

    def _flush(self) -> None:
        gone, self._gone = self._gone, []
        abandoned, self._abandoned = self._abandoned, []
        for start in range(0, len(gone), _PLACES_PER_FRAME):
            if self._send is not None:
                self._send(b"".join(gone[start : start + _PLACES_PER_FRAME]))
        for start in range(0, len(abandoned), _PLACES_PER_FRAME):
            if self._send is not None:
                self._send(b"".join(abandoned[start : start + _PLACES_PER_FRAME]), True)

    def close(self) -> None:
        """Nobody is left to tell."""
        self._send = None


class Views(list[torch.Tensor]):
    """The leaves of a message, one-dimensional uint8.

    Attributes:
        held: the memory that they lie in, if it can be lent on.
    """

    held: Held | None = None


class _Placing:
    """A message whose place is known.

    Attributes:
        packed: place of the leaves without an entry in `owned`, None if there are none.
        private: others get the same memory.
        since: when it began to wait for its segments, None if it does not.
        late: it has waited for long and is given a last chance.
    """

    __slots__ = ("late", "owned", "packed", "private", "since", "sizes", "then")

    def __init__(
        self, sizes: Sequence[int], packed: Place | None, owned: dict[int, Place], private: bool, then: Callable[[Views | None], None]
    ) -> None:
        self.sizes = sizes
        self.packed = packed
        self.owned = owned
        self.private = private
        self.then = then
        self.since: float | None = None
        self.late = False

    def places(self) -> list[Place]:
        """All its places."""
        return [*([self.packed] if self.packed is not None else []), *self.owned.values()]

    def check(self, segments: dict[int, Segment]) -> None:
        """Raises WireError if a place is not all inside its segment."""
        ends = [(place, place[1] + self.sizes[index]) for index, place in self.owned.items()]
        if self.packed is not None:
            rest = [size for index, size in enumerate(self.sizes) if index not in self.owned]
            ends.append((self.packed, self.packed[1] + packed_size(rest)))
        for (number, offset), end in ends:
            if end > segments[number].size:
                raise WireError(f"a region outside its segment: {offset} to {end} of {segments[number].size}")


class SharedIn:
    """The receiving half. Home thread only, but for the finalizers, which may run anywhere.

    Args:
        release: sends a RELEASE frame with this body; with a second argument, True, it says ABANDONED.
        keeper: decides what can be passed on; None: nothing.
    """

    def __init__(self, home: LoopHome, release: Callable[..., None], keeper: Keeper | None = None) -> None:
        self._home = home
        self._keeper = keeper
        self._releases = _Releases(home, release)
        self._segments: dict[int, Segment] = {}
        self._lost: set[int] = set()
        self._dropped: set[int] = set()  # before they came
        self._waiting: deque[_Placing] = deque()
        self._readers: list[DescriptorReader] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the peer's memory that views here keep it from using again; all of a message's region counts."""
        return self._releases.held_bytes

    # ---- segments

    def attach(self, reader: DescriptorReader) -> bool:
        """The peer has connected to pass descriptors; it may do so again after it lost a connection."""
        if self._closed or len(self._readers) >= _MAX_READERS:
            return False
        self._readers.append(reader)
        reader.start(self._take, lambda: self._readers.remove(reader))
        return True

    def cut_off(self, reason: str) -> None:
        """The peer cannot connect at the moment."""
        if self._readers:
            return
        for _ in range(len(self._waiting)):
            self._give_up(self._waiting.popleft(), reason)

    def _take(self, number: int, size: int, fd: int | None) -> None:
        """A segment has come, or its descriptor was lost on the way."""
        if fd is None:
            self._lose(number, "its descriptor was lost: the limit of open files is reached")
            return
        if number in self._segments or number in self._dropped:
            self._dropped.discard(number)
            os.close(fd)
            return
        try:
            if not 0 < size < _MAX_SEGMENT_BYTES or len(self._segments) >= _MAX_SEGMENTS:
                os.close(fd)
                raise WireError(f"{size} bytes, and {len(self._segments)} are here")
            segment = self._open(number, size, fd)
        except (OSError, WireError) as error:
            self._lose(number, str(error))
            return
        self._lost.discard(number)
        self._segments[number] = segment
        if self._keeper is None or not self._keeper.wanted:  # who passes messages on does not look at them
            self._home.submit(segment.enter_pages)
        self._try_again()

    def _open(self, number: int, size: int, fd: int) -> Segment:
        keeper = self._keeper
        ours = None if keeper is None else keeper.number()
        if keeper is None or ours is None:
            return open_segment(number, size, fd)
        segment = open_segment(ours, size, fd, keep=True)
        keeper.watch(segment)
        return segment

    def _lose(self, number: int, reason: str) -> None:
        log.warning("memory file %d of a peer cannot be used: %s", number, reason)
        self._lost.add(number)
        self._try_again()

    def drop(self, number: int) -> None:
        """The peer will not put anything into this segment any more."""
        if number in self._segments:
            self._home.loop.call_soon(let_go, [self._segments.pop(number)])
        elif number not in self._lost and len(self._dropped) < _MAX_SEGMENTS:
            self._dropped.add(number)
        self._lost.discard(number)

    # ---- messages

    def place(self, sizes: Sequence[int], body: memoryview, then: Callable[[Views | None], None], *, private: bool = False) -> None:
        """Views of the leaves, one-dimensional uint8, as soon as their segments are here; None if they cannot be had.

        Args:
            private: others are given the same memory; the views are private ones (`backends.shm.private`). They can only be had of
                segments that came when the keeper kept them.

        Raises:
            WireError: the description is malformed or points outside its segment.
        """
        self._try(_Placing(sizes, *decode_places(body, sizes), private, then))

    def _try(self, placing: _Placing) -> None:
        # No closure that refers to itself: it would keep the tensors until the next garbage collection.
        for number, _ in placing.places():
            if number in self._lost:
                self._give_up(placing, "")
                return
            if number not in self._segments:
                self._wait(placing)
                return
        placing.check(self._segments)
        if placing.private and any(self._segments[number].fd < 0 for number, _ in placing.places()):
            self._give_up(placing, "")
            return
        try:
            views = self._views(placing)
        except OSError as error:
            self._give_up(placing, f"it cannot be mapped privately: {error}")
            return
        placing.then(views)

    def _try_again(self) -> None:
        for _ in range(len(self._waiting)):
            placing = self._waiting.popleft()
            try:
                self._try(placing)
            except WireError as error:
                self._give_up(placing, str(error))

    def _give_up(self, placing: _Placing, reason: str) -> None:
        if reason:
            log.warning("a message in shared memory is asked for again: %s", reason)
        for place in placing.places():
            self._releases.add(place)
        placing.then(None)

    def _wait(self, placing: _Placing) -> None:
        if placing.since is None:
            placing.since = self._home.loop.time()
        self._waiting.append(placing)
        if self._timer is None:
            self._timer = self._home.loop.call_later(PASS_SECONDS, self._look_for_late)

    def _look_for_late(self) -> None:
        self._timer = None
        now = self._home.loop.time()
        for _ in range(len(self._waiting)):
            placing = self._waiting.popleft()
            assert placing.since is not None
            if placing.late:
                self._give_up(placing, "its memory file has not come")
                continue
            # If it was our loop that stood still, the descriptor is in the socket and comes in the next turns.
            placing.late = now - placing.since >= PASS_SECONDS
            self._waiting.append(placing)
        if self._waiting:
            self._timer = self._home.loop.call_later(_LAST_CHANCE_SECONDS, self._look_for_late)

    def _views(self, placing: _Placing) -> Views:
        owned = placing.owned
        sizes = [0 if index in owned else size for index, size in enumerate(placing.sizes)]
        *starts, packed_bytes = offsets(sizes)
        private = placing.private
        root, packed = (None, None) if placing.packed is None else self._root(placing.packed, packed_bytes, private)
        loans: dict[int, Loan | None] = {}
        views = Views()
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if index in owned:
                own, loans[index] = self._root(owned[index], placing.sizes[index], private)
                views.append(torch.from_numpy(own))
            elif size:
                assert root is not None
                views.append(torch.from_numpy(root[start : start + size]))
            else:
                views.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        lendable = {index: loan for index, loan in loans.items() if loan is not None}
        if len(lendable) == len(loans) and (packed is None) == (root is None):
            views.held = Held(packed, lendable)
        return views

    def _root(self, place: Place, size: int, private: bool) -> tuple[Any, Loan | None]:
        """Part of a segment as an array that all views of it refer to, and what is needed to lend it on."""
        number, offset = place
        segment = self._segments[number]
        if not private:
            part = self._part(place, size)
            root = np.asarray(part)
            return root, Loan(segment, root, part.hold) if segment.fd >= 0 else None
        root = private_view(segment, offset, size)
        finalizer = weakref.finalize(root, self._releases.root_gone, Hold(place, size))
        finalizer.atexit = False
        self._releases.held_bytes += size
        return root, None

    def hold(self, sizes: Sequence[int], body: memoryview) -> Held | None:
        """As `place`, for who only passes the message on. None: its segments are not here, or cannot be lent on; nothing is held then.

        Raises:
            WireError: as `place`.
        """
        packed, owned = decode_places(body, sizes)
        segments = self._segments
        if packed is not None and not owned:
            segment = segments.get(packed[0])
            if segment is None or segment.fd < 0:
                return None
            whole = packed_size(sizes)
            self._check_inside(packed, whole)
            return Held(self._loan(packed, whole), {})
        for number, _ in owned.values() if packed is None else (packed, *owned.values()):
            segment = segments.get(number)
            if segment is None or segment.fd < 0:
                return None
        whole = packed_size([size for index, size in enumerate(sizes) if index not in owned])
        if packed is not None:
            self._check_inside(packed, whole)
        for index, place in owned.items():
            self._check_inside(place, sizes[index])
        loans = {index: self._loan(place, sizes[index]) for index, place in owned.items()}
        return Held(None if packed is None else self._loan(packed, whole), loans)

    def _loan(self, place: Place, size: int) -> Loan:
        part = self._part(place, size)
        return Loan(self._segments[place[0]], part, part.hold)

    def _part(self, place: Place, size: int) -> Part:
        self._releases.held_bytes += size
        return Part(self._segments[place[0]], Hold(place, size), self._releases.root_gone)

    def _check_inside(self, place: Place, size: int) -> None:
        number, offset = place
        if offset + size > self._segments[number].size:
            raise WireError(f"a region outside its segment: {offset} to {offset + size} of {self._segments[number].size}")

    def stores(self, sizes: Sequence[int], body: memoryview) -> list[Any] | None:
        """As `place`, at once: NumPy arrays over the leaves, uint8. None: a memory file is not here; nothing is held then.

        Raises:
            WireError: as `place`.
        """
        packed, owned = decode_places(body, sizes)
        segments = self._segments
        if owned:
            for index, (number, offset) in owned.items():
                if number not in segments:
                    return None
                self._check_inside((number, offset), sizes[index])
        if packed is None:
            stores: list[Any] = [_NOTHING] * len(sizes)
        elif packed[0] not in segments:
            return None
        else:
            *starts, whole = offsets([0 if index in owned else size for index, size in enumerate(sizes)] if owned else sizes)
            self._check_inside(packed, whole)
            root: Any = np.asarray(self._part(packed, whole))
            stores = [root[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for index, place in owned.items():
            stores[index] = np.asarray(self._part(place, sizes[index]))
        return stores

    def refuse(self, body: memoryview, sizes: Sequence[int]) -> None:
        """A message that nobody wants: give its regions back at once. Raises WireError as `place`."""
        packed, owned = decode_places(body, sizes)
        for place in [*([packed] if packed is not None else []), *owned.values()]:
            self._releases.add(place)

    def close(self) -> None:
        """The link has ended; views stay valid."""
        self._closed = True
        self._releases.close()
        for reader in list(self._readers):
            reader.close()
        self._readers.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()
        if self._segments:
            self._home.loop.call_soon(let_go, list(self._segments.values()))
            self._segments.clear()
