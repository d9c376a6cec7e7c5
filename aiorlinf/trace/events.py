"""What is recorded. Times are seconds of `time.monotonic`.

A message is known by its link and its number among the messages of one direction of that link, which both sides count alike; so what a
sender and a receiver record of one message is found to belong together, and nothing travels for it. At the receiver it has, besides,
its place among all messages of the worker (`order`), by which it is known from there on.

What happens to each small message is packed, in the order of bytes of the machine, into a sequence for each kind of event (`Packed`). That
costs less than objects of Python that are kept until they are written, for which the collector of garbage would have to run, too.

=============  ======================================================================================================================
SENT_SMALL     time, number, stream, bytes, link: written whole at once, and done
CAME           time, number, stream, bytes, order, link: all of a small message, or the description of a larger one
PASSED         as CAME, and time of the call of the receive that waited for it, and so took it at once
PICKED         time, order: a small message that waited is taken by a receive that has just been called
=============  ======================================================================================================================

All else are short tuples, a number for the kind first; they may refer to what is packed, never the other way round.

=============  ======================================================================================================================
LINK           link, us, the peer (lives: ``a:0#1``), which of the links of these two lives it is
OPENED         link, number, time, time of the call, stream, bytes, operation: its description, or all of it, is written
BEGUN          link, number, time: there is room for its payload
STARTED        link, number, time, way: the payload begins to travel; in shared memory: it is there
LEFT           link, number, time: all of it has left our memory
SENT           link, number, time, whether it is well: the work is done
MATCHED        order, time, time of the call of the receive, operation
COMING         order, time, way: the payload begins to come
THERE          order, time: all of it is here
TAKEN          order, time, time of the call of the receive, operation: the object is made, and the receive done
CODEC          link, number (out) or order (in), begin, end: a codec worked in a thread; which of the two the first says, "out" or "in"
STEP           number, time, name, order of the message that began its chain or -1, number of the step before or -1, where it was attached
STEP_OVER      number, time, how it ended
CALL           begin, end, operation, subject, how it ended, where it was called: a collective or a call of a channel
=============  ======================================================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "BEGUN",
    "CALL",
    "CODEC",
    "COMING",
    "LAYOUTS",
    "LEFT",
    "LINK",
    "MATCHED",
    "OPENED",
    "SENT",
    "STARTED",
    "STEP",
    "STEP_OVER",
    "TAKEN",
    "THERE",
    "Event",
    "Packed",
]  # fmt: skip

Event = tuple[Any, ...]

LAYOUTS: Final[Mapping[str, struct.Struct]] = {
    "sent": struct.Struct("@dQQQI"),  # no gaps: what is long comes first
    "came": struct.Struct("@dQQQQI"),
    "passed": struct.Struct("@dQQQQdI"),
    "picked": struct.Struct("@dQ"),
}
"""By names of the attributes of `Packed`; a time is first in each."""


class Packed:
    """A sequence of each kind, to which hot paths append for themselves."""

    __slots__ = ("came", "passed", "picked", "sent")

    def __init__(self) -> None:
        self.sent: bytearray = bytearray()
        self.came: bytearray = bytearray()
        self.passed: bytearray = bytearray()
        self.picked: bytearray = bytearray()


LINK, OPENED, BEGUN, STARTED, LEFT, SENT, MATCHED, COMING, THERE, TAKEN, CODEC, STEP, STEP_OVER, CALL = range(14)
