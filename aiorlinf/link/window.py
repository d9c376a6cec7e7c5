"""The receiver's side of the window: how much has arrived before anybody asked for it. Pure.

DATA frames and payloads started without GO are charged when they arrive; the charge is returned when a receive takes the
message. What was returned is reported to the sender as a running sum.
"""

from __future__ import annotations

from aiorlinf.errors import WireError

__all__ = ["FRAME_COST", "ReceiveWindow"]

FRAME_COST = 64
"""Bytes charged for a message besides its payload, so that empty messages are bounded too."""


class ReceiveWindow:
    """Counters in bytes.

    Attributes:
        size: the sender may have so much unreturned.
        outstanding: charged and not returned.
        consumed: returned since the beginning; `reported` of it is known to the sender.
    """

    __slots__ = ("consumed", "outstanding", "reported", "size")

    def __init__(self, size: int) -> None:
        self.size: int = size
        self.outstanding: int = 0
        self.consumed: int = 0
        self.reported: int = 0

    def arrive(self, cost: int) -> None:
        """Charge.

        Raises:
            WireError: the sender does not keep to the window; it could make us allocate without bound.
        """
        self.outstanding += cost
        if self.outstanding > self.size:
            raise WireError(f"the peer sends more than the window of {self.size} bytes")

    def consume(self, cost: int) -> bool:
        """Return a charge; True when a report is urgent."""
        self.outstanding -= cost
        self.consumed += cost
        return self.consumed - self.reported > self.size >> 2

    def pass_through(self, cost: int) -> bool:
        """`arrive` and `consume` in one.

        Raises:
            WireError: as `arrive`.
        """
        if self.outstanding + cost > self.size:
            self.arrive(cost)
        self.consumed = consumed = self.consumed + cost
        return consumed - self.reported > self.size >> 2

    @property
    def worth_telling(self) -> bool:
        """Enough was returned that the sender should know soon."""
        return self.consumed - self.reported > self.size >> 6

    def report(self) -> int | None:
        """The running sum that the sender should be told now, None if it knows it."""
        if self.consumed == self.reported:
            return None
        self.reported = self.consumed
        return self.consumed
