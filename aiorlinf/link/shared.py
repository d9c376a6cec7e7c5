"""Payloads in shared memory, one link's two halves.

The sender copies a message's leaves into a region of its arena, one after the other at multiples of 64 bytes, and passes the
segment's descriptor the first time the peer needs it. START says where; END follows at once. The receiver's tensors live in that region;
when the last view of them is gone it says RELEASE, and the region can be used again. Tensors made with `empty` are in a region already.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiorlinf.backends.shm.arena import Arena, Region
from aiorlinf.backends.shm.descriptors import DescriptorReader, DescriptorWriter
from aiorlinf.backends.shm.regions import ALIGNMENT, align
from aiorlinf.backends.shm.segment import Segment, open_segment
from aiorlinf.errors import AiorlinfError, WireError

if TYPE_CHECKING:
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.home import LoopHome

__all__ = ["Placement", "SharedIn", "SharedOut", "packed_size"]

log = logging.getLogger("aiorlinf.link")

_PLACE = struct.Struct("<IQ")
_ITEM = struct.Struct("<IIQ")
_MAX_SEGMENT_BYTES = 1 << 42
_MAX_SEGMENTS = 4096
COPY_INLINE_BYTES = 1 << 20
"""Smaller copies are done on the loop: a thread costs more than they do."""


def packed_size(sizes: Sequence[int]) -> int:
    """Bytes of a region for leaves of these sizes."""
    return sum(align(size) for size in sizes)


class Placement:
    """Where the leaves of one message are: those without an entry in `owned` are packed into `region`, in order."""

    __slots__ = ("owned", "region")

    def __init__(self, region: Region | None, owned: dict[int, Region]) -> None:
        self.region = region
        self.owned = owned

    def regions(self) -> list[Region]:
        """All regions of the message."""
        return [*([self.region] if self.region is not None else []), *self.owned.values()]

    def encode(self) -> bytes:
        """For the START frame."""
        region = self.region
        parts = [_PLACE.pack(0, 0) if region is None else _PLACE.pack(region.segment.number, region.offset)]
        parts += [_ITEM.pack(index, owned.segment.number, owned.offset) for index, owned in self.owned.items()]
        return b"".join(parts)


class SharedOut:
    """The sending half. Home thread only.

    Args:
        arena: the worker's memory.
        open_writer: connects to the peer's descriptor listener; raises OSError.
        problem: called once if the peer cannot be reached that way; the link goes on without shared memory.
    """

    def __init__(self, arena: Arena, open_writer: Callable[[], DescriptorWriter], problem: Callable[[str], None]) -> None:
        self.arena = arena
        self.usable = True
        self.bytes = 0
        self._open_writer = open_writer
        self._problem = problem
        self._writer: DescriptorWriter | None = None
        self._passed: set[int] = set()
        self._lent: dict[tuple[int, int], Region] = {}

    def fill(self, leaves: Sequence[Leaf], region: Region) -> Callable[[], None]:
        """A function that copies these leaves into the region; it may run in any thread."""
        target = region.segment.address + region.offset
        copies = []
        for leaf in leaves:
            copies.append((target, leaf))
            target += align(leaf.nbytes)

        def copy() -> None:
            for address, leaf in copies:
                if leaf.nbytes:
                    _copy_leaf(address, leaf)

        return copy

    def lend(self, placement: Placement) -> bool:
        """Make sure the peer has the segments, and remember what it holds. False: it cannot get them."""
        regions = placement.regions()
        try:
            for region in regions:
                self._pass(region.segment)
        except (OSError, WireError) as error:
            self.stop(f"a memory file could not be passed: {error}")
            return False
        for region in regions:
            self.arena.hold(region)
            self._lent[region.segment.number, region.offset] = region
            self.bytes += region.size
        return True

    def _pass(self, segment: Segment) -> None:
        if segment.number in self._passed:
            return
        if self._writer is None:
            self._writer = self._open_writer()
        self._writer.send(segment.number, segment.size, segment.fd)
        self._passed.add(segment.number)

    def forget(self, number: int) -> bool:
        """The arena dropped a segment; True if the peer knows it and must be told."""
        if number in self._passed:
            self._passed.discard(number)
            return True
        return False

    def on_release(self, body: memoryview) -> None:
        """The peer's last views of these regions are gone."""
        for number, offset in _PLACE.iter_unpack(body):
            region = self._lent.pop((number, offset), None)
            if region is None:
                raise WireError(f"a region that was never lent is released ({number}, {offset})")
            self.arena.release(region)

    def stop(self, reason: str) -> None:
        """Use other backends from now on."""
        if self.usable:
            self.usable = False
            self._problem(reason)

    def close(self) -> None:
        """The link has ended; the peer may still look at what it holds."""
        self.usable = False
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        lent, self._lent = self._lent, {}
        for region in lent.values():
            self.arena.abandon(region)


def _copy_leaf(address: int, leaf: Leaf) -> None:
    memory = leaf.memory
    if memory is not None:
        ctypes.memmove(address, memory.data_ptr(), leaf.nbytes)
        return
    raw = leaf.raw
    assert raw is not None
    source = np.frombuffer(raw, dtype=np.uint8)
    ctypes.memmove(address, source.ctypes.data, leaf.nbytes)


class _Placing:
    """A message whose place is known. `packed` is the region of the leaves without an entry in `owned`."""

    __slots__ = ("owned", "packed", "sizes", "then")

    def __init__(
        self,
        sizes: Sequence[int],
        packed: tuple[int, int],
        owned: dict[int, tuple[int, int]],
        then: Callable[[list[torch.Tensor] | None], None],
    ) -> None:
        self.sizes = sizes
        self.packed = packed
        self.owned = owned
        self.then = then

    def segments(self) -> set[int]:
        """Numbers of the segments that it needs."""
        return {self.packed[0], *(number for number, _ in self.owned.values())} - {0}


class SharedIn:
    """The receiving half. Home thread only, but for the finalizers, which may run anywhere.

    Args:
        release: sends a RELEASE frame with this body.
    """

    def __init__(self, home: LoopHome, release: Callable[[bytes], None]) -> None:
        self._home = home
        self._release = release
        self._segments: dict[int, Segment] = {}
        self._waiting: dict[int, list[_Placing]] = {}
        self._reader: DescriptorReader | None = None
        self._gone: list[bytes] = []
        self._scheduled = False
        self._closed = False
        self.failed: str | None = None
        self.on_failed: Callable[[str], None] = lambda reason: None

    # ---- segments

    def attach(self, reader: DescriptorReader) -> bool:
        """The peer has connected to pass descriptors."""
        if self._closed or self._reader is not None:
            return False
        self._reader = reader
        reader.start(self._take, self._fail)
        return True

    def _take(self, number: int, size: int, fd: int) -> None:
        if number in self._segments or not 0 < size < _MAX_SEGMENT_BYTES or len(self._segments) >= _MAX_SEGMENTS:
            import os

            os.close(fd)
            self._fail(f"the peer passed segment {number} of {size} bytes out of order")
            return
        # Mapping makes page tables for pages that exist: a millisecond or so for 64 MiB.
        self._home.submit(open_segment, number, size, fd).add_done_callback(lambda work: self._mapped(number, work))

    def _mapped(self, number: int, work: Any) -> None:
        if self._closed or work.cancelled():
            return
        error = work.exception()
        if error is not None:
            self._fail(f"a memory file cannot be mapped: {error}")
            return
        self._segments[number] = work.result()
        for placing in self._waiting.pop(number, ()):
            self._try(placing)

    def _fail(self, reason: str) -> None:
        if self._closed or self.failed is not None:
            return
        self.failed = reason
        self._reader = None
        self.on_failed(reason)
        waiting, self._waiting = self._waiting, {}
        for placings in waiting.values():
            for placing in placings:
                self._try(placing)

    def drop(self, number: int) -> None:
        """The peer will not use this segment again."""
        self._segments.pop(number, None)

    # ---- messages

    def place(self, sizes: Sequence[int], body: memoryview, then: Callable[[list[torch.Tensor] | None], None]) -> None:
        """Views of the leaves, one-dimensional uint8, as soon as their segments are mapped; None if they cannot be had.

        Raises:
            WireError: the description is malformed or points outside its segment.
        """
        self._try(_Placing(sizes, *_decode(body, len(sizes)), then))

    def _try(self, placing: _Placing) -> None:
        # No closure that refers to itself: it would keep the tensors until the next garbage collection.
        if self.failed is not None:
            placing.then(None)
            return
        for number in placing.segments():
            if number not in self._segments:
                self._waiting.setdefault(number, []).append(placing)
                return
        (number, offset), owned = placing.packed, placing.owned
        placing.then(self._views(placing.sizes, number, offset, owned))

    def _views(self, sizes: Sequence[int], number: int, offset: int, owned: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
        packed = packed_size([size for index, size in enumerate(sizes) if index not in owned])
        root = self._root(number, offset, packed) if packed else None
        tensors = []
        at = 0
        for index, size in enumerate(sizes):
            if index in owned:
                tensors.append(torch.from_numpy(self._root(*owned[index], size)))
            elif size:
                assert root is not None
                tensors.append(torch.from_numpy(root[at : at + size]))
                at += align(size)
            else:
                tensors.append(torch.empty(0, dtype=torch.uint8))
        return tensors

    def _root(self, number: int, offset: int, size: int) -> Any:
        segment = self._segments[number]
        if offset % ALIGNMENT or offset + size > segment.size:
            raise WireError(f"a region outside its segment: {offset} + {size} of {segment.size}")
        root = segment.view(offset, size)
        finalizer = weakref.finalize(root, self._root_gone, _PLACE.pack(number, offset))
        finalizer.atexit = False
        return root

    def _root_gone(self, place: bytes) -> None:
        """The last view is gone; called in whatever thread let go of it."""
        if self._closed:
            return
        try:
            self._home.call_soon(self._say_gone, place)
        except AiorlinfError:  # the loop is gone, or we are a fork: nobody is left to tell
            pass

    def refuse(self, body: memoryview, count: int) -> None:
        """A message that nobody wants: give its regions back at once."""
        (number, offset), owned = _decode(body, count)
        for place in [(number, offset), *owned.values()]:
            if place[0]:
                self._say_gone(_PLACE.pack(*place))

    def _say_gone(self, place: bytes) -> None:
        self._gone.append(place)
        if not self._scheduled:
            self._scheduled = True
            self._home.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        gone, self._gone = self._gone, []
        if gone and not self._closed:
            self._release(b"".join(gone))

    def close(self) -> None:
        """The link has ended; views stay valid."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._segments.clear()
        self._waiting.clear()


def _decode(body: memoryview, count: int) -> tuple[tuple[int, int], dict[int, tuple[int, int]]]:
    if len(body) < _PLACE.size or (len(body) - _PLACE.size) % _ITEM.size:
        raise WireError("a malformed place in shared memory")
    owned = {}
    for index, number, offset in _ITEM.iter_unpack(body[_PLACE.size :]):
        if index >= count or not number:
            raise WireError(f"a place for leaf {index} of {count}")
        owned[index] = (number, offset)
    return _PLACE.unpack_from(body), owned
