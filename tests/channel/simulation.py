"""Consumers of known speeds on a simulated clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable

from aiorlinf.channel.policies import LoadBalancePolicy
from aiorlinf.channel.records import Delivery, Get
from tests.channel.desk import Desk

__all__ = ["Simulation", "arrivals", "spread", "spread_weights"]


def spread(count: int, ratio: float) -> list[float]:
    """Speeds from 1 to `ratio`, evenly spread on a logarithmic scale."""
    return [ratio ** (index / max(1, count - 1)) for index in range(count)]


def spread_weights(count: int, seed: int) -> list[float]:
    """Weights from 1 to 16."""
    generator = random.Random(seed)
    return [16 ** generator.random() for _ in range(count)]


def arrivals(weights: Iterable[float], rate: float, seed: int) -> list[tuple[float, float]]:
    """(time, weight) at random times; `rate` is weight per second."""
    generator = random.Random(seed)
    now = 0.0
    found = []
    for weight in weights:
        now += generator.expovariate(rate / 6.0)
        found.append((now, weight))
    return found


class Simulation:
    """Each consumer gets an item, works on it for weight / speed, and gets the next.

    Attributes:
        busy: seconds of work of each consumer.
        end: when all was done.
    """

    def __init__(
        self,
        policy: LoadBalancePolicy | None,
        speeds: list[float],
        *,
        maxsize: int = 0,
        speed_of: Callable[[int, float], float] | None = None,
    ) -> None:
        self.desk = Desk(policy=policy, maxsize=maxsize)
        self.speeds = speeds
        self.speed_of = speed_of or (lambda index, now: speeds[index])
        self.busy = [0.0] * len(speeds)
        self.end = 0.0
        self._index: dict[str, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._seen = 0

    def run(self, items: Iterable[tuple[float, float]]) -> None:
        """Put these (time, weight), and work until all is done."""
        desk = self.desk
        for index in range(len(self.speeds)):
            self._index[f"c{index}"] = index
            desk.consumer(f"c{index}")
        for index in range(len(self.speeds)):
            desk.get(f"c{index}")
        for time, weight in items:
            self._at(time, lambda weight=weight: self._put(weight))  # type: ignore[misc]  # mypy sees no default here
        while self._events:
            desk.now, _, event = heapq.heappop(self._events)
            event()
            self._hand_out()

    def _put(self, weight: float) -> None:
        self.desk.put(None, weight=weight)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _hand_out(self) -> None:
        deliveries = self.desk.deliveries
        while self._seen < len(deliveries):
            delivery = deliveries[self._seen]
            self._seen += 1
            index = self._index[delivery.get.consumer.name]
            seconds = delivery.weight / self.speed_of(index, self.desk.now)
            self.busy[index] += seconds
            self.end = max(self.end, self.desk.now + seconds)
            self._at(self.desk.now + seconds, lambda delivery=delivery: self._finish(delivery))  # type: ignore[misc]  # as above

    def _finish(self, delivery: Delivery) -> None:
        desk = self.desk
        desk.queue.taken(delivery, desk.now)
        get = Get(delivery.get.consumer)
        desk.queue.get(get, desk.now)
        desk.work()

    def unevenness(self) -> float:
        """The largest deviation of a consumer's busy time from the mean, as a share of it."""
        mean = sum(self.busy) / len(self.busy)
        return max(abs(busy - mean) for busy in self.busy) / mean
