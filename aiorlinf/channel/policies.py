"""Which consumer gets an item: the load-balance policies, and where one comes from. Pure.

A policy decides when an item is put. Without one there is nothing to decide: whoever asks next gets the oldest item.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiorlinf.channel.members import Consumers
from aiorlinf.channel.records import Consumer, ItemInfo
from aiorlinf.errors import UsageError

__all__ = [
    "POLICIES",
    "LoadBalancePolicy",
    "MemoryAware",
    "PerformanceAware",
    "ShortestQueue",
    "WeightedRoundRobin",
    "import_policy",
]

_MANY = 48
"""From so many consumers on, arrays are faster than a loop."""


class LoadBalancePolicy:
    """Base of all policies. Write your own by deriving from it.

    It runs in the channel worker, for one channel, and must not block. An error that it raises, or a wrong index, fails that put and
    nothing else. Its instance may keep state; consumers come and go, so that state goes by their names.
    """

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        """The index of the consumer that shall get this item.

        Args:
            item: its key, weight, size in bytes and producer.
            consumers: at least one; see `Consumer` for what is known of each. Not to be changed.

        Raises:
            NotImplementedError: the policy does not say.
        """
        raise NotImplementedError

    def may_move(self, item: ItemInfo, holder: Consumer, taker: Consumer, waited: float) -> bool:
        """Whether an item that has `waited` so many seconds in the holder's queue goes to the taker, who asks and has none.

        By default it stays.
        """
        return False


class WeightedRoundRobin(LoadBalancePolicy):
    """In turn; a consumer with twice the `share` gets twice as many items, evenly spread (the "smooth" weighted round robin of nginx)."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        credit = self._credit
        if len(credit) > 2 * len(consumers) + 16:  # many have gone
            there = {consumer.name for consumer in consumers}
            self._credit = credit = {name: value for name, value in credit.items() if name in there}
        total = 0.0
        best, highest = 0, float("-inf")
        for index, consumer in enumerate(consumers):
            total += consumer.share
            value = credit[consumer.name] = credit.get(consumer.name, 0.0) + consumer.share
            if value > highest:
                best, highest = index, value
        credit[consumers[best].name] -= total
        return best


class ShortestQueue(LoadBalancePolicy):
    """Whoever has the least weight pending. An item that waits behind others goes to a consumer that has run out."""

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        if len(consumers) >= _MANY and isinstance(consumers, Consumers):
            return int(np.argmin(consumers.columns().pending))
        best, least = 0, (float("inf"), 0)
        for index, consumer in enumerate(consumers):
            pending = (consumer.pending_weight, consumer.pending_items)
            if pending < least:
                best, least = index, pending
        return best

    def may_move(self, item: ItemInfo, holder: Consumer, taker: Consumer, waited: float) -> bool:
        return holder.pending_weight > taker.pending_weight + item.weight


class PerformanceAware(LoadBalancePolicy):
    """Keeps all consumers equally long at work, by the speed that each has shown.

    An item goes to whoever will have worked least when it is done: the work done so far, and what is pending and this item, each divided by
    the consumer's measured speed. Under full load this is "earliest completion first" (list scheduling); under less it shares the work
    alike. Speeds follow the last ten or so items. An item that waits goes to a consumer that has run out, if that
    evens out the work, or if the other one is slower than it was.
    """

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        weight = item.weight
        if len(consumers) >= _MANY and isinstance(consumers, Consumers):
            work, pending, speed = consumers.columns()
            return int(np.argmin(work + (pending + weight) / speed))
        mean = 0.0
        best, least = 0, float("inf")
        for index, consumer in enumerate(consumers):
            speed_of = consumer.speed_meter.value
            if speed_of is None:
                mean = mean or _mean_speed(consumers)
                speed_of = mean
            cost = consumer.busy_seconds + consumer.head_start + (consumer.pending_weight + weight) / speed_of
            if cost < least:
                best, least = index, cost
        return best

    def may_move(self, item: ItemInfo, holder: Consumer, taker: Consumer, waited: float) -> bool:
        mean = 0.0 if holder.speed and taker.speed else _mean_speed([holder, taker])
        after = taker.work_seconds + (taker.pending_weight + item.weight) / (taker.speed or mean)
        ahead = holder.pending_weight / (holder.speed or mean)
        return after < holder.work_seconds + ahead or waited > ahead  # it should have had its turn by now


class MemoryAware(LoadBalancePolicy):
    """Whoever has most memory free, by its last report and what is pending for it; without reports, whoever has least pending."""

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        best, most = 0, (float("-inf"), float("-inf"))
        for index, consumer in enumerate(consumers):
            value = ((consumer.free_memory or 0) - consumer.pending_bytes, -consumer.pending_weight)
            if value > most:
                best, most = index, value
        return best


def _mean_speed(consumers: Sequence[Consumer]) -> float:
    speeds = [consumer.speed for consumer in consumers if consumer.speed is not None]
    return sum(speeds) / len(speeds) if speeds else 1.0


POLICIES: dict[str, Callable[[], LoadBalancePolicy]] = {
    "weighted_round_robin": WeightedRoundRobin,
    "shortest_queue": ShortestQueue,
    "performance_aware": PerformanceAware,
    "memory_aware": MemoryAware,
}
"""By the names that `create_channel` takes."""


def import_policy(path: str) -> LoadBalancePolicy:
    """A policy by its name in `POLICIES`, or by its import path, ``module:name``: a policy, or a class or function that makes one.

    Raises:
        UsageError: there is no such policy.
    """
    make: Any = POLICIES.get(path)
    if make is None:
        module, colon, name = path.partition(":")
        hint = f"a policy is one of {', '.join(POLICIES)}, an import path such as 'my.module:MyPolicy', or an object"
        if not colon:
            raise UsageError(f"there is no policy {path!r}", hint=hint)
        try:
            make = importlib.import_module(module)
            for part in name.split("."):
                make = getattr(make, part)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"the policy {path!r} cannot be imported: {error}", hint=hint) from error
    policy = make if callable(getattr(make, "select_consumer", None)) and not isinstance(make, type) else make()
    if not callable(getattr(policy, "select_consumer", None)):
        raise UsageError(f"{path!r} is not a policy: it has no select_consumer(item, consumers)")
    found: LoadBalancePolicy = policy
    return found
