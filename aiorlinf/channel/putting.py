"""The moment in which a put becomes final: when whoever waits for it goes on.

A task that is cancelled in the moment in which its put is done hears of the cancelling only, and may put the item again. So, as in
`asyncio.Queue.put`, the item may not be there before the task runs on. A put that no task waits for is final when there is room for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from aiorlinf.errors import AiorlinfError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.waiters import LoopWaiter, ThreadWaiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiorlinf.channel.calls import PutCall
    from aiorlinf.work.home import LoopHome

__all__ = ["Confirming", "PutWork"]

_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.5


class PutWork(AsyncWork[None]):
    """The work of a put, which says when it is final. Its detail is the call."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        if self._state:
            # Final already, so this must not be a place to be cancelled at.
            self._outcome()
            return
        yield from AsyncWork.__await__(self)
        call: PutCall = self._detail
        if call.confirming is not None:
            call.confirming.confirm(call)

    def _take(self) -> bool:
        """See AsyncWork. Any thread."""
        taken = AsyncWork._take(self)
        confirming = self._detail.confirming
        if taken and confirming is not None:
            try:
                self._home.call(confirming.confirm, self._detail)
            except AiorlinfError:  # the loop is gone, and the channel with it
                pass
        return taken


class Confirming:
    """Puts that are done and may still be taken back. Home thread only.

    Args:
        commit: makes a put final.
        retract: takes it back.
    """

    def __init__(self, home: LoopHome, commit: Callable[[PutCall], None], retract: Callable[[PutCall], None]) -> None:
        self._home = home
        self._commit = commit
        self._retract = retract
        self._open: dict[PutCall, AsyncWork[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = _FIRST_LOOK_SECONDS

    def finish(self, call: PutCall) -> None:
        """There is room: end the work. May run the caller's code."""
        work, call.work = call.work, None
        if work is None:
            self._retract(call)
            return
        if not _somebody_waits(work):
            self._commit(call)
            work._finish(None)
            return
        call.confirming = self
        self._open[call] = work
        work._give_back = lambda _: self._take_back(call)
        work._finish(None)
        if call in self._open and self._timer is None:
            # The usual way is that a task takes the value in the next turn. Who waits in vain for that finds out here.
            self._timer = self._home.loop.call_later(self._pause, self._look)

    def confirm(self, call: PutCall) -> None:
        """Whoever waited for this goes on."""
        if self._open.pop(call, None) is not None:
            call.confirming = None
            self._commit(call)

    def _take_back(self, call: PutCall) -> None:
        if self._open.pop(call, None) is not None:
            call.confirming = None
            self._retract(call)

    def _look(self) -> None:
        self._timer = None
        before = len(self._open)
        for call, work in list(self._open.items()):
            if work._give_back is None or work._claims <= 0:
                work._give_back = None
                self.confirm(call)
        self._pause = min(2 * self._pause, _LAST_LOOK_SECONDS) if len(self._open) == before else _FIRST_LOOK_SECONDS
        if self._open:
            self._timer = self._home.loop.call_later(self._pause, self._look)

    def close(self) -> None:
        """The channel is gone."""
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _somebody_waits(work: AsyncWork[None]) -> bool:
    """A task or a thread goes on when the work is done, and can be cancelled before that.

    Others (then-steps, `wait_all`) take the value at once, or only together with others, which may wait for what this put holds up.
    """
    entries = work._entries
    if entries is None:
        return False
    for entry in entries if type(entries) is list else (entries,):
        if isinstance(entry, (asyncio.Future, LoopWaiter, ThreadWaiter)):
            return True
    return False
