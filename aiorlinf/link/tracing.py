"""What a link tells the recorder of a trace; see `trace.events`. Home thread only."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.trace.events import (
    BEGUN,
    CODEC,
    COMING,
    LAYOUTS,
    LEFT,
    MATCHED,
    OPENED,
    SENT,
    STARTED,
    TAKEN,
    THERE,
)
from aiorlinf.wire.frames import Via

if TYPE_CHECKING:
    from pathlib import Path

    from aiorlinf.address import Identity
    from aiorlinf.link.incoming import Incoming, Receive
    from aiorlinf.link.outgoing import Outgoing
    from aiorlinf.trace.recorder import Recorder

__all__ = ["LinkTrace", "Tracing"]


# Looked up for each small message.
_sent, _came, _passed, _picked = (LAYOUTS[kind].pack for kind in ("sent", "came", "passed", "picked"))

_WAYS: dict[int, str] = {via: via.name.lower() for via in Via}


class LinkTrace:
    """One link's part of a trace. While it is not recorded, `Sender.trace` and `Receiver.trace` are None, which is all that it costs.

    Args:
        number: of the link, in this trace.
    """

    __slots__ = ("_came", "_number", "_passed", "_picked", "_record", "_sent")

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._record = recorder.record
        self._number = number
        packed = recorder.packed
        self._sent, self._came, self._passed, self._picked = packed.sent, packed.came, packed.passed, packed.picked

    # ---- sending

    def small(self, message: int, size: int, key: int) -> None:
        """A small message is written, and its send done."""
        self._sent += _sent(monotonic(), message, key, size, self._number)

    def opened(self, out: Outgoing) -> None:
        """A message goes to the peer, at least its description."""
        now = monotonic()
        born = now if out.work is None else out.work._born
        self._record((OPENED, self._number, out.number, now, born, out.key, out.total, out.operation))

    def begun(self, out: Outgoing) -> None:
        """There is room for its payload."""
        self._record((BEGUN, self._number, out.number, monotonic()))

    def started(self, out: Outgoing, via: int) -> None:
        """Its payload begins to travel."""
        self._record((STARTED, self._number, out.number, monotonic(), _WAYS[via]))

    def left(self, out: Outgoing) -> None:
        """All of it has left."""
        for begin, end in getattr(out.source, "spans", None) or ():
            self._record((CODEC, "out", self._number, out.number, begin, end))
        self._record((LEFT, self._number, out.number, monotonic()))

    def sent(self, out: Outgoing, well: bool) -> None:
        """The work is over."""
        if out.number:
            self._record((SENT, self._number, out.number, monotonic(), well))

    # ---- receiving

    def came(self, message: int, size: int, key: int, order: int) -> None:
        """A small message, or the description of a larger one."""
        self._came += _came(monotonic(), message, key, size, order, self._number)

    def passed(self, message: int, size: int, key: int, receive: Receive) -> None:
        """A small message goes to a receive that waits: `came` and `taken` in one."""
        now = monotonic()
        work = receive.work
        self._passed += _passed(now, message, key, size, receive.order, now if work is None else work._born, self._number)

    def picked(self, order: int) -> None:
        """A small message that waited goes to a receive that is just called: `taken`, kept short."""
        self._picked += _picked(monotonic(), order)

    def matched(self, receive: Receive, message: Incoming) -> None:
        """It goes to this receive, when it is whole."""
        now = monotonic()
        self._record((MATCHED, message.order, now, _born(receive.work, now), receive.operation))

    def coming(self, message: Incoming, via: int) -> None:
        """Its payload begins to come."""
        self._record((COMING, message.order, monotonic(), _WAYS[via]))

    def there(self, message: Incoming) -> None:
        """All of it is here."""
        content = message.content
        for begin, end in getattr(content.sink, "spans", None) or () if content is not None else ():
            self._record((CODEC, "in", self._number, message.order, begin, end))
        self._record((THERE, message.order, monotonic()))

    def taken(self, receive: Receive) -> None:
        """The receive has its value; to be told before its work is."""
        now = monotonic()
        self._record((TAKEN, receive.order, now, _born(receive.work, now), receive.operation))


def _born(work: Any, now: float) -> float:
    """Those that found their message waiting remember no time of their own."""
    return now if work is None or not work._born else work._born


class Tracing(Protocol):
    """A recording that goes on, as a table of links sees it.

    Attributes:
        path: of the file that it makes.
    """

    @property
    def path(self) -> Path: ...
    def link_up(self, link: Any, identity: Identity) -> None:
        """A link comes up, and nothing was sent on it yet."""

    async def close(self) -> None:
        """The worker is closing: end it, and write what there is."""

    def abandon(self) -> None:
        """The worker's loop ends: let go of the file as it is."""
