"""Idle memory goes back to the system: after a pause, or at once when memory is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from aiorlinf.codec.pressure import memory_is_short
from aiorlinf.errors import AiorlinfError

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Keeper", "Trimmer"]

PERIOD_S = 1.0
"""What has been idle for longer than this, and at most twice as long, goes."""


class Keeper(Protocol):
    """Something that keeps idle memory."""

    def age(self) -> bool:
        """Give up what has been idle since before the last call; whether anything idle remains."""

    def trim(self) -> int:
        """Give up everything idle; returns its bytes."""


class Trimmer:
    """Asks its keepers once per period, as long as they have anything idle. A worker at rest costs nothing.

    Args:
        keepers: they say `wake` when memory becomes idle.
        period_s: seconds.
        short: whether memory is short.
    """

    def __init__(
        self, home: LoopHome, keepers: Sequence[Keeper], *, period_s: float = PERIOD_S, short: Callable[[], bool] = memory_is_short
    ) -> None:
        self._home = home
        self._keepers = keepers
        self._period_s = period_s
        self._short = short
        self._awake = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def wake(self) -> None:
        """Something has become idle. Any thread, also from finalizers."""
        if self._awake or self._closed:
            return
        self._awake = True
        try:
            self._home.call_soon(self._start)
        except AiorlinfError:  # the loop is gone, or we are a fork: nobody is left to trim
            pass

    def _start(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._home.loop.call_later(self._period_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        # Before looking: what becomes idle after the look starts the timer again.
        self._awake = False
        if self._short():
            for keeper in self._keepers:
                keeper.trim()
            return
        remains = [keeper.age() for keeper in self._keepers]
        if any(remains):
            self.wake()

    def close(self) -> None:
        """Trim no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
