"""A bound on bytes that several channels of one worker may share. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

__all__ = ["ByteBudget"]


class ByteBudget:
    """So many bytes, for all who take of it.

    Attributes:
        limit: in bytes; None: no bound.
        used: taken and not returned. Who takes some adds to it, whether there is room or not.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used: int = 0
        self._waiting: OrderedDict[Callable[[], None], None] = OrderedDict()

    def fits(self, nbytes: int) -> bool:
        """Whether there is room. What is larger than all of it has room when nothing else is there: it could wait for ever otherwise."""
        return self.limit is None or self.used + nbytes <= self.limit or not self.used

    def give(self, nbytes: int) -> None:
        """Return room, and tell those who wait for some, in the order in which they began to."""
        self.used -= nbytes
        if self._waiting and nbytes:
            waiting, self._waiting = self._waiting, OrderedDict()
            for again in waiting:
                again()

    def wait(self, again: Callable[[], None]) -> None:
        """Call this once when there is room again."""
        self._waiting[again] = None
