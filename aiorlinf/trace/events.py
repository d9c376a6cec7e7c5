"""What is recorded. Times are seconds of `time.monotonic`.

A message is known by its link and its number among the messages of one direction of that link, which both sides count alike; so what a
sender and a receiver record of one message is found to belong together, and nothing travels for it. At the receiver it has, besides,
its place among all messages of the worker (`order`), by which it is known from there on.

What happens to each small message is packed as `PACKED`, always the same fields, with 0 where one means nothing; that costs half of what an
object of Python would that is kept until it is written. The last field is the number of the link times eight, and one of these:

=============  ======================================================================================================================
SENT_SMALL     time, 0, number, stream, 0, bytes: written whole at once, and done
CAME           time, 0, number, stream, order, bytes: all of a small message, or the description of a larger one
PASSED         time, time of the call, number, stream, order, bytes: as CAME, and taken at once by a receive that waited for it
UNREAD         time, time it was taken, number, stream, order, bytes: as CAME, and a receive that was called later found it
PICKED         time, 0, 0, 0, order, 0: the latter, of a message of which CAME is written already
=============  ======================================================================================================================

All else are short tuples, a number for the kind first:

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
from typing import Any, Final

__all__ = [
           "BEGUN",
           "CALL",
           "CAME",
           "CODEC",
           "COMING",
           "LEFT",
           "LINK",
           "MATCHED",
           "OPENED",
           "PACKED",
           "PASSED",
           "PICKED",
           "SENT",
           "SENT_SMALL",
           "STARTED",
           "STEP",
           "STEP_OVER",
           "TAKEN",
           "THERE",
           "UNREAD",
           "Event",
]  # fmt: skip

Event = tuple[Any, ...]

PACKED: Final = struct.Struct("@ddQQQQI")
"""In the order of bytes of the machine, which is quicker. There are no gaps: what is long comes first."""

SENT_SMALL, CAME, PASSED, UNREAD, PICKED = range(5)

LINK, OPENED, BEGUN, STARTED, LEFT, SENT, MATCHED, COMING, THERE, TAKEN, CODEC, STEP, STEP_OVER, CALL = range(14)
