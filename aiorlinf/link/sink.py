"""Where the bytes of a payload go: into the memory of its leaves, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from aiorlinf.errors import WireError

__all__ = ["DiscardSink", "Sink"]

_SCRATCH = memoryview(bytearray(1 << 16))  # nobody reads it, so one does for all


class Sink:
    """Hands out the memory that comes next and counts.

    Attributes:
        done: bytes received so far.
        total: bytes expected.
    """

    __slots__ = ("_index", "_offset", "_views", "done", "total")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._index = 0
        self._offset = 0
        self.done: int = 0
        self.total: int = sum(map(len, self._views))

    def view(self, limit: int) -> memoryview:
        """The next writable piece, at most `limit` bytes, never empty.

        Raises:
            WireError: the sender sends more than it announced.
        """
        if self._index == len(self._views):
            raise WireError(f"more payload than the {self.total} bytes announced")
        view = self._views[self._index]
        return view[self._offset : self._offset + limit]

    def advance(self, count: int) -> None:
        """`count` bytes of the last view were filled."""
        self.done += count
        self._offset += count
        if self._offset == len(self._views[self._index]):
            self._index += 1
            self._offset = 0

    @property
    def stages(self) -> str | None:
        """For people: what there is to do, where that is more than to receive, and in brackets what is being done."""
        return None

    def redirect(self, views: Sequence[memoryview]) -> None:
        """Go on in other memory of the same sizes; what has been received is copied over."""
        fresh = [view for view in views if len(view)]
        for index in range(self._index):
            fresh[index][:] = self._views[index]
        if self._offset:
            fresh[self._index][: self._offset] = self._views[self._index][: self._offset]
        self._views = fresh


class DiscardSink:
    """For payload that nobody wants any more but that is still on its way."""

    __slots__ = ("_scratch", "done", "total")

    def __init__(self) -> None:
        self.done: int = 0
        self.total: int = 0

    def view(self, limit: int) -> memoryview:
        return _SCRATCH[:limit]

    def advance(self, count: int) -> None:
        self.done += count
