"""What is recorded: short tuples, a number for the kind first. Times are seconds of `time.monotonic`.

A message is known by its link and its number among the messages of one direction of that link, which both sides count alike; so what a
sender and a receiver record of one message is found to belong together, and nothing travels for it. At the receiver it has, besides,
its place among all messages of the worker (`order`), by which it is known from there on.

=============  ======================================================================================================================
LINK           link, us, the peer (lives: ``a:0#1``), which of the links of these two lives it is
SENT_SMALL     link, number, time, bytes, stream: written whole at once, and done
OPENED         link, number, time, time of the call, stream, bytes, operation: its description, or all of it, is written
BEGUN          link, number, time: there is room for its payload
STARTED        link, number, time, way: the payload begins to travel; in shared memory: it is there
LEFT           link, number, time: all of it has left our memory
SENT           link, number, time, whether it is well: the work is done
CAME           link, number, time, bytes, stream, order: all of a small message, or the description of a larger one
PASSED         link, number, time, bytes, stream, order, time of the call: CAME and TAKEN in one, as a receive waited for it
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

from typing import Any

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
    "PASSED",
           "SENT",
           "SENT_SMALL",
           "STARTED",
           "STEP",
           "STEP_OVER",
           "TAKEN",
           "THERE",
           "Event",
]  # fmt: skip

Event = tuple[Any, ...]

(
    LINK,
    SENT_SMALL,
    OPENED,
    BEGUN,
    STARTED,
    LEFT,
    SENT,
    CAME,
    MATCHED,
    COMING,
    THERE,
    TAKEN,
    CODEC,
    STEP,
    STEP_OVER,
    CALL,
    PASSED,
) = range(17)
