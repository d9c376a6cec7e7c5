"""Waiting for what devices were given to do: the loop's one poller asks, and memory is held until the devices are through with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiorlinf.errors import ClosedError
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.device.runtime import Event, Runtime
    from aiorlinf.work.home import LoopHome

__all__ = ["sweep", "watch_events"]


class _Events:
    """Meets `work.poller.Completion`. A device cannot be told to stop: what is aborted is kept until it has happened."""

    def __init__(self, events: list[tuple[Runtime, Event]], keep: object) -> None:
        self._events = events
        self._keep = keep

    def poll(self) -> bool:
        events = self._events
        while events:
            runtime, event = events[-1]
            if not runtime.query(event):
                return False
            events.pop()
        return True

    def abort(self) -> None:
        _left_over.append(self)


_left_over: list[_Events] = []
"""Of workers that were closed meanwhile."""


def sweep() -> None:
    """Let go of memory that devices used for workers that were closed, as far as the devices are through with it."""
    for left in list(_left_over):
        try:
            over = left.poll()
        except RuntimeError:  # the device has failed; it uses nothing any more
            over = True
        if over and left in _left_over:
            _left_over.remove(left)


def watch_events(
    home: LoopHome, events: list[tuple[Runtime, Event]], then: Callable[[BaseException | None], None], keep: object = None
) -> None:
    """Call back on the home thread once all these events have happened, or with what the device says instead.

    Args:
        keep: held until they have happened, whatever becomes of those who wait.
    """
    if _left_over:
        sweep()
    completion = _Events(events, keep)
    work: AsyncWork[None] = AsyncWork(home, "device")
    work.add_done_callback(lambda done: then(done.exception()))
    place = events[0][0].place(events[0][1]) if len(events) == 1 else None
    try:
        home.poller.watch(completion, work, place=place)
    except ClosedError as error:
        completion.abort()
        work._fail(error)
