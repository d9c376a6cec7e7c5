"""Values that a worker's gets were given: which of them are somebody's for good.

A work whose value nobody has looked at can still be cancelled, and gives it back. So the channel worker is told of a value when somebody
has taken it, or when nobody is left who could give it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiorlinf.channel.entries import Op, entry

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.work.base import AsyncWork

__all__ = ["Claims"]

_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.5


class Claims:
    """See the module. Home thread only.

    Args:
        flush: sends what there is to say, which includes `tell`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
        self._loop = loop
        self._flush = flush
        self._open: dict[int, Any] = {}  # by number, the work, or a weak reference to it once it has waited for a while
        self._taken: list[int] = []
        self._look: asyncio.TimerHandle | None = None
        self._pause = _FIRST_LOOK_SECONDS

    def __bool__(self) -> bool:
        return bool(self._open or self._taken)

    def add(self, number: int, work: AsyncWork[Any]) -> None:
        """This work is about to be done with what get `number` was given."""
        self._open[number] = work
        if self._look is None:
            self._look = self._loop.call_later(_FIRST_LOOK_SECONDS, self._look_again)

    def take(self, number: int) -> None:
        """What that get was given is somebody's now."""
        self._taken.append(number)
        if self._look is None:
            self._look = self._loop.call_later(_FIRST_LOOK_SECONDS, self._look_again)

    def drop(self, number: int) -> None:
        """It goes back."""
        self._open.pop(number, None)

    def tell(self, out: list[bytes]) -> None:
        """Say which have been taken."""
        gone, self._taken = self._taken, []
        if self._open:
            for number, held in self._open.items():
                work = held() if type(held) is weakref.ref else held
                if work is None or work._give_back is None:
                    gone.append(number)
                elif work is held:
                    self._open[number] = weakref.ref(work)
            gone.sort()
        first = count = 0
        for number in gone:
            self._open.pop(number, None)
            if number == first + count:
                count += 1
                continue
            if count:
                out.append(entry(Op.TAKEN, 0, first, extra=count))
            first, count = number, 1
        if count:
            out.append(entry(Op.TAKEN, 0, first, extra=count))
        if self._open and self._look is None:
            self._look = self._loop.call_later(self._pause, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        before = len(self._open)
        self._flush()
        idle = len(self._open) == before
        self._pause = min(2 * self._pause, _LAST_LOOK_SECONDS) if idle else _FIRST_LOOK_SECONDS

    def give_all_back(self) -> None:
        """Nobody will take a value any more."""
        for held in list(self._open.values()):
            work = held() if type(held) is weakref.ref else held
            if work is not None:
                work.cancel()

    def close(self) -> None:
        """There is nobody left to tell."""
        self._open.clear()
        self._taken.clear()
        if self._look is not None:
            self._look.cancel()
            self._look = None
