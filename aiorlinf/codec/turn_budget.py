"""How much the loop does itself in one turn of what threads are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["TurnBudget"]


class TurnBudget:
    """So many bytes in each turn of the loop; what is asked for beyond that goes to a thread. Home thread only."""

    def __init__(self, home: LoopHome, nbytes: int) -> None:
        self._home = home
        self._nbytes = nbytes
        self._left = nbytes

    def take(self, nbytes: int) -> bool:
        """Whether so many more may be worked on in this turn."""
        if nbytes > self._left or self._home.loop.is_closed():
            return False
        if self._left == self._nbytes:
            self._home.loop.call_soon(self._renew)
        self._left -= nbytes
        return True

    def _renew(self) -> None:
        self._left = self._nbytes
