"""Rates and waiting times, measured cheaply. Pure: the clock is the caller's."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Percentiles", "RateMeter", "Speed", "Waits"]

_BUCKETS = 10
"""Rates are over so many seconds."""

_REMEMBERED = 1024
"""Waiting times of so many of the last items are kept."""

_FORGET = 0.9
"""What a consumer's last item counts less with each further one: after ten it counts a third."""


class RateMeter:
    """How many things happened, and per second of the last ten."""

    __slots__ = ("_begin", "_buckets", "_now", "total")

    def __init__(self) -> None:
        self.total: float = 0.0
        self._buckets = [0.0] * _BUCKETS
        self._now = -1
        self._begin = 0.0

    def add(self, amount: float, now: float) -> None:
        """So much happened now."""
        second = int(now)
        if second != self._now:
            self._turn(second, now)
        self._buckets[second % _BUCKETS] += amount
        self.total += amount

    def _turn(self, second: int, now: float) -> None:
        if self._now < 0:
            self._begin = now
        elif second > self._now:
            for old in range(self._now + 1, min(second, self._now + _BUCKETS) + 1):
                self._buckets[old % _BUCKETS] = 0.0
        self._now = second

    def rate(self, now: float) -> float:
        """Per second, over the last ten or since the first."""
        if self._now < 0:
            return 0.0
        second = int(now)
        if second != self._now:
            self._turn(second, now)
        return sum(self._buckets) / max(1.0, min(now - self._begin, _BUCKETS - 1 + now - second))


class Percentiles(NamedTuple):
    """Seconds that half, nine tenths and ninety-nine hundredths of the last thousand did not exceed."""

    p50: float
    p90: float
    p99: float


class Waits:
    """How long the last items waited, in seconds."""

    __slots__ = ("_at", "_last")

    def __init__(self) -> None:
        self._last: list[float] = []
        self._at = 0

    def add(self, seconds: float) -> None:
        """One more."""
        if len(self._last) < _REMEMBERED:
            self._last.append(seconds)
        else:
            self._last[self._at] = seconds
            self._at = (self._at + 1) % _REMEMBERED

    def percentiles(self) -> Percentiles | None:
        """None: nothing was taken yet."""
        if not self._last:
            return None
        ordered = sorted(self._last)
        return Percentiles(*(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)))


class Speed:
    """Weight per second of work: a weighted mean of the last items, the newest counting most.

    Attributes:
        value: None before anything was finished.
    """

    __slots__ = ("_seconds", "_weight", "value")

    def __init__(self) -> None:
        self._weight = 0.0
        self._seconds = 0.0
        self.value: float | None = None

    def add(self, weight: float, seconds: float) -> None:
        """So much was done in so long."""
        self._weight = self._weight * _FORGET + weight
        self._seconds = self._seconds * _FORGET + seconds
        if self._weight > 0:
            self.value = self._weight / max(self._seconds, 1e-9)
