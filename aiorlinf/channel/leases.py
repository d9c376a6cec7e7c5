"""The leases of a channel that have not ended, and when the next one will. Pure: no clock of its own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from aiorlinf.channel.records import Consumer, Delivery

__all__ = ["Leases"]

_ENDED_AT_LEAST = 64
"""Leases that ended before their time are skipped when they are met; so many, if they are more than half of all, are taken out."""


class Leases:
    """See the module. A delivery that was closed counts as ended, whether or not it was removed; it is closed before that."""

    def __init__(self) -> None:
        self._open: dict[Delivery, None] = {}
        self._deadlines: list[tuple[float, int, Delivery]] = []
        self._given = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, delivery: Delivery) -> None:
        """It was handed out on lease."""
        self._open[delivery] = None
        if delivery.deadline is not None:
            heapq.heappush(self._deadlines, (delivery.deadline, next(self._given), delivery))

    def remove(self, delivery: Delivery) -> None:
        """It has ended."""
        self._open.pop(delivery, None)
        if len(self._deadlines) > 2 * len(self._open) + _ENDED_AT_LEAST:
            self._deadlines = [each for each in self._deadlines if each[2].open]
            heapq.heapify(self._deadlines)

    def of_others(self, consumer: Consumer) -> bool:
        """Whether anybody else has one."""
        return any(delivery.get.consumer is not consumer for delivery in self._open)

    def next_deadline(self) -> float | None:
        """When the first of them is over."""
        while self._deadlines and not self._deadlines[0][2].open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> Iterator[Delivery]:
        """Take out those whose time is over, one after the other: to end one may end others."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, delivery = heapq.heappop(self._deadlines)
            if delivery.open:
                yield delivery
