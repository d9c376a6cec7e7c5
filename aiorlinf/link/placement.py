"""Where the leaves of one message lie in shared memory, and how its frame (START, PLACED) says so. Pure.

The leaves are packed into one region, one after the other, each at a multiple of 64 bytes; those that were in shared memory before the
send (made with `empty`) stay where they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from aiorlinf.backends.shm.regions import ALIGNMENT
from aiorlinf.errors import WireError

if TYPE_CHECKING:
    from aiorlinf.backends.shm.segment import Segment

__all__ = ["PLACE", "Lendable", "Place", "Placement", "decode_places", "offsets", "packed_size"]

PLACE = struct.Struct("<IQ")
"""Segment number, offset."""

_ITEM = struct.Struct("<IIQ")
_PLACE_SIZE = PLACE.size
_ITEM_SIZE = _ITEM.size
_NO_PLACE = PLACE.pack(0, 0)

Place = tuple[int, int]
"""Segment number and offset."""


_ROUND = ALIGNMENT - 1


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where leaves of these sizes lie in their region, and at the end the size of that region."""
    end = 0
    found = [0]
    for size in sizes:
        end += (size + _ROUND) & ~_ROUND  # `align`, in line: it is done for each leaf of each message
        found.append(end)
    return found


def packed_size(sizes: Sequence[int]) -> int:
    """Bytes of a region for leaves of these sizes."""
    return offsets(sizes)[-1]


class Lendable(Protocol):
    """A part of a segment that can be lent: a `Region` of our own, or a `Loan` of a peer."""

    @property
    def segment(self) -> Segment: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    def hold(self) -> None:
        """One more may look at it."""

    def release(self) -> None:
        """One less."""

    def abandon(self) -> None:
        """One of them will never say when he is done."""


class Placement:
    """Where one message is, on the sender's side.

    Attributes:
        region: of the packed leaves, None if there are none.
        owned: by index, the regions of leaves that were in shared memory already.
        names: the segments that it was lent in, and the numbers by which the peer knows them.
        lent: how many regions the peer has not given back.
        back: called once it has given back all of them.
    """

    __slots__ = ("back", "lent", "names", "owned", "region")

    def __init__(self, region: Lendable | None, owned: Mapping[int, Lendable]) -> None:
        self.region = region
        self.owned: Mapping[int, Lendable] = owned
        self.names: dict[int, int] = {}
        self.lent: int = 0
        self.back: Callable[[], None] | None = None

    def regions(self) -> list[Lendable]:
        """All regions of the message."""
        return [*self.owned.values()] if self.region is None else [self.region, *self.owned.values()]

    def let_go(self) -> None:
        """Refer to the parts themselves no more: of those that are given back one by one, none may keep another."""
        self.region = None
        self.owned = {}

    def encode(self) -> bytes:
        """For the frame that says it (START, PLACED), once `names` is filled in."""
        region, names = self.region, self.names
        told = _NO_PLACE if region is None else PLACE.pack(names[region.segment.number], region.offset)
        if not self.owned:
            return told
        return told + b"".join([_ITEM.pack(index, names[owned.segment.number], owned.offset) for index, owned in self.owned.items()])


def decode_places(body: memoryview, sizes: Sequence[int]) -> tuple[Place | None, dict[int, Place]]:
    """The place of the packed leaves, None if there are none, and those of the others by index.

    Raises:
        WireError: malformed.
    """
    more = len(body) - _PLACE_SIZE
    if more < 0 or more % _ITEM_SIZE:
        raise WireError("a malformed place in shared memory")
    count = len(sizes)
    owned: dict[int, Place] = {}
    for index, number, offset in _ITEM.iter_unpack(body[_PLACE_SIZE:]) if more else ():
        if index >= count or index in owned or not number or offset % ALIGNMENT or not sizes[index]:
            raise WireError(f"a wrong place for leaf {index} of {count}: segment {number}, offset {offset}")
        owned[index] = (number, offset)
    number, offset = PLACE.unpack_from(body)
    packs = any(sizes) if not owned else len(owned) < count and any(size for index, size in enumerate(sizes) if index not in owned)
    if bool(number) != packs or offset % ALIGNMENT:
        raise WireError(f"a wrong place for {count} leaves: segment {number}, offset {offset}")
    return ((number, offset) if number else None), owned
