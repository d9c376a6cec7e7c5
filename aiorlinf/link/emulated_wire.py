"""One direction of one link over an emulated network. Pure: what is sent and the time in, what leaves and what arrives out.

Everything passes two stages, in order. It waits until the bandwidth lets it leave (the moment its last byte is out), then it is under way
for the delay. Bandwidth is booked ahead in slices (`manager.emulation`): `lease` says how much to book, `booked` takes the answer.
What costs nothing books nothing, but keeps its place.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from aiorlinf.manager.emulation import Booking, Route

__all__ = ["LOOK_AHEAD_S", "SLICE_S", "EmulatedWire", "slice_bytes"]

T = TypeVar("T")

SLICE_S = 0.02
"""Seconds of the bandwidth that are booked at a time, so that members take turns."""

LOOK_AHEAD_S = 0.02
"""So long before the last slice is over the next one is booked: nothing is lost to the time that an answer takes."""

_SMALLEST_SLICE = 16 * 1024


def slice_bytes(rate: float) -> int:
    """What is booked at a time on a link of so many bytes per second."""
    return max(_SMALLEST_SLICE, round(rate * SLICE_S))


class EmulatedWire(Generic[T]):
    """See the module.

    Args:
        route: what lies between the two workers.

    Attributes:
        backlog: bytes that have not left.
        under_way: bytes that have left and not arrived.
    """

    def __init__(self, route: Route) -> None:
        self.backlog: int = 0
        self.under_way: int = 0
        self._delay = route.delay_s
        self._limited = route.rate is not None
        self._slice = 0 if route.rate is None else slice_bytes(route.rate)
        self._waiting: deque[tuple[T, int]] = deque()  # for bandwidth; the first of them always costs something
        self._leasing = 0  # so many of them are in the booking that was asked for
        self._leaving: deque[tuple[float, T, int]] = deque()
        self._coming: deque[tuple[float, T, int]] = deque()
        self._last = float("-inf")  # when the last of `_leaving` leaves

    def __len__(self) -> int:
        return len(self._waiting) + len(self._leaving) + len(self._coming)

    def put(self, item: T, cost: int, now: float) -> None:
        """Send something; the bandwidth is charged `cost` bytes for it."""
        self.backlog += cost
        if self._waiting or (cost and self._limited):
            self._waiting.append((item, cost))
        else:
            self._leave_at(now, item, cost)

    def lease(self, now: float) -> int:
        """How many bytes to book now; 0: none, or not yet. What it says must be booked and answered with `booked`."""
        if self._leasing or not self._waiting or now < self._last - LOOK_AHEAD_S:
            return 0
        total = 0
        for _, cost in self._waiting:
            if total >= self._slice:
                break
            total += cost
            self._leasing += 1
        return total

    def booked(self, booking: Booking, now: float) -> None:
        """The answer to the last booking that was asked for."""
        total = sum(self._waiting[index][1] for index in range(self._leasing))
        gone = 0
        for _ in range(self._leasing):
            item, cost = self._waiting.popleft()
            gone += cost
            self._leave_at(now + booking.wait_s - booking.span_s * (1 - gone / total), item, cost)
        self._leasing = 0
        while self._waiting and not self._waiting[0][1]:
            self._leave_at(now, self._waiting.popleft()[0], 0)

    def _leave_at(self, when: float, item: T, cost: int) -> None:
        self._last = max(self._last, when)
        self._leaving.append((self._last, item, cost))

    def leave(self, now: float) -> int:
        """Let go what has left by now; how many items."""
        leaving = self._leaving
        count = 0
        while leaving and leaving[0][0] <= now:
            when, item, cost = leaving.popleft()
            count += 1
            self.backlog -= cost
            self.under_way += cost
            self._coming.append((when + self._delay, item, cost))
        return count

    def arrive(self, now: float) -> T | None:
        """The next item that has arrived by now, None if there is none."""
        coming = self._coming
        if not coming or coming[0][0] > now:
            return None
        _, item, cost = coming.popleft()
        self.under_way -= cost
        return item

    def next_time(self, *, held: bool = False) -> float | None:
        """When there is something to do next. `held`: what has arrived cannot be taken at the moment."""
        times = []
        if self._waiting and not self._leasing:
            times.append(self._last - LOOK_AHEAD_S)
        if self._leaving:
            times.append(self._leaving[0][0])
        if self._coming and not held:
            times.append(self._coming[0][0])
        return min(times, default=None)

    def clear(self) -> list[T]:
        """Everything that has not arrived, in order; nothing is left here."""
        items = [*(item for _, item, _ in (*self._coming, *self._leaving)), *(item for item, _ in self._waiting)]
        for queue in (self._coming, self._leaving, self._waiting):
            queue.clear()
        self.backlog = self.under_way = self._leasing = 0
        return items
