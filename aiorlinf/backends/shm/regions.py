"""Which parts of a segment are free: pure, first fit by address.

First fit keeps using the low addresses, whose pages exist already; touching fresh pages is about ten times slower than a copy.
"""

from __future__ import annotations

import bisect

__all__ = ["ALIGNMENT", "PAGE", "Regions", "align"]

ALIGNMENT = 64
"""Bytes. Each tensor of a message starts at a multiple of this; regions at a multiple of a page."""

PAGE = 4096
_ROUND = PAGE - 1


def align(size: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return (size + to - 1) // to * to


class Regions:
    """Free space of one segment of `size` bytes, as disjoint, sorted, never adjacent (offset, length) spans.

    Attributes:
        size: of the segment; a multiple of a page.
        used: bytes in use.
    """

    __slots__ = ("_free", "_taken", "size", "used")

    def __init__(self, size: int) -> None:
        self.size: int = size
        self.used: int = 0
        self._free: list[tuple[int, int]] = [(0, size)]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Offset of a region of at least `size` bytes, None if no span is large enough."""
        need = (size + _ROUND) & ~_ROUND or PAGE
        for index, (offset, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, length - need)
                self._taken[offset] = need
                self.used += need
                return offset
        return None

    def give(self, offset: int) -> None:
        """Free the region that starts at `offset`. Raises KeyError if there is none."""
        length = self._taken.pop(offset)
        self.used -= length
        index = bisect.bisect_left(self._free, (offset, 0))
        if index < len(self._free) and offset + length == self._free[index][0]:
            length += self._free[index][1]
            del self._free[index]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free[index]
            length += before
            del self._free[index]
        self._free.insert(index, (offset, length))

    @property
    def empty(self) -> bool:
        """Nothing is in use."""
        return not self._taken
