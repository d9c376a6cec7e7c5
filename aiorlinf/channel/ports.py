"""The handles of one conversation, and their numbers, which are used again when both ends have forgotten a handle."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

__all__ = ["NUMBERS", "Numbered", "Ports"]

NUMBERS = 65535
"""So many handles can be open at a time: their numbers have 16 bits, and 0 is nobody's."""


class Numbered(Protocol):
    """A handle."""

    @property
    def number(self) -> int: ...


P = TypeVar("P", bound=Numbered)


class Ports(Generic[P]):
    """See the module. Home thread only.

    A handle is *kept* while there may be news for it. One that was closed and has nothing under way *rests*: it can still ask and get, so
    its number stays its own until the last reference to it is gone. Nobody is told of that at the time, for it can happen in any thread and
    at any moment; whoever wants the numbers asks for those that are `gone`.

    Attributes:
        kept: by number.
    """

    def __init__(self) -> None:
        self.kept: dict[int, P] = {}
        self._resting: dict[int, weakref.ref[P]] = {}
        self._gone: deque[int] = deque()
        self._free: deque[int] = deque()
        self._used = 0

    def number(self) -> int:
        """One that no handle has; 0 when there is none."""
        if self._free:
            return self._free.popleft()
        if self._used == NUMBERS:
            return 0
        self._used += 1
        return self._used

    def rest(self, port: P) -> None:
        """There will be no news for it."""
        number = port.number
        if self.kept.pop(number, None) is not None:
            gone = self._gone
            self._resting[number] = weakref.ref(port, lambda _: gone.append(number))

    def drop(self, number: int) -> None:
        """Nobody has this handle; the number is not used again."""
        self.kept.pop(number, None)

    def gone(self) -> list[int]:
        """The numbers of those that rested and are not there any more; each is told once."""
        found = []
        while self._gone:
            number = self._gone.popleft()
            del self._resting[number]
            found.append(number)
        return found

    def free(self, number: int) -> None:
        """The other end has forgotten it, too."""
        self.kept.pop(number, None)
        self._free.append(number)
