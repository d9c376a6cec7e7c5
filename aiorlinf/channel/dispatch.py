"""Lanes, and into which one an item goes: where a policy balances, each consumer has lanes of its own. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from aiorlinf.channel.lane import Lane
from aiorlinf.channel.members import Consumers
from aiorlinf.channel.policies import LoadBalancePolicy, ShortestQueue
from aiorlinf.channel.records import Consumer, Item, ItemInfo, Key
from aiorlinf.errors import ChannelError

__all__ = ["Dispatch"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_IDLE_LANES = 64
"""Lanes that are empty at the moment are kept, up to so many."""


class Dispatch:
    """See the module.

    Attributes:
        policy: None: all consumers take from the same lanes.
        common: lanes for all; with a policy, of items that came when there was no consumer.
        consumers: those that there are.
    """

    def __init__(self, channel: str, policy: LoadBalancePolicy | None) -> None:
        self.policy = policy
        self.common: dict[Key, Lane] = {}
        self.consumers: Consumers = Consumers()
        self._channel = channel
        self._own: dict[Consumer, dict[Key, Lane]] = {}
        self._fallback = ShortestQueue()

    def lane(self, consumer: Consumer | None, key: Key) -> Lane:
        """The lane of a key that this consumer takes from."""
        lanes = self.common if consumer is None or self.policy is None else self._own[consumer]
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane()
        return lane

    def tidy(self, consumer: Consumer | None, key: Key) -> None:
        """Forget a lane that is empty, if there are many."""
        lanes = self.common if consumer is None or self.policy is None else self._own[consumer]
        if len(lanes) > _IDLE_LANES:
            lane = lanes.get(key)
            if lane is not None and lane.empty:
                del lanes[key]

    def lanes_of(self, consumer: Consumer) -> Iterator[tuple[Key, Lane]]:
        """Those that it takes from."""
        yield from list((self.common if self.policy is None else self._own[consumer]).items())

    def lanes(self) -> Iterator[tuple[Consumer | None, Key, Lane]]:
        """All there are."""
        for key, lane in list(self.common.items()):
            yield None, key, lane
        if self.policy is not None:
            for consumer in self.consumers:
                for key, lane in list(self._own[consumer].items()):
                    yield consumer, key, lane

    # ---- choosing

    def choose(self, item: ItemInfo) -> Consumer | None:
        """Who gets it; None where nobody decides, or nobody is there yet.

        Raises:
            ChannelError: the policy gave no index of a consumer. And what the policy raises.
        """
        if self.policy is None or not self.consumers:
            return None
        index = self.policy.select_consumer(item, self.consumers)
        size = len(self.consumers)
        if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= index.__index__() < size:
            raise ChannelError(
                f"the policy of channel {self._channel!r}, {type(self.policy).__name__}, chose {index!r:.80} of {size} consumers",
                hint="select_consumer returns an index into the consumers it is given",
            )
        return self.consumers[index.__index__()]

    def choose_again(self, item: Item) -> Consumer | None:
        """As `choose`, for an item whose put is over: it must go somewhere."""
        try:
            return self.choose(item.info())
        except Exception as error:  # whatever a user's policy raises; the item may not be lost for it
            log.warning("channel %r: the policy failed for %r, which goes to the shortest queue: %s", self._channel, item, error)
            return self.consumers[self._fallback.select_consumer(item.info(), self.consumers)]

    def put_down(self, item: Item) -> Lane:
        """Into the lane of its consumer; if that is gone, or there is none, of one that is chosen now."""
        consumer = item.consumer
        if self.policy is not None and (consumer is None or consumer.row < 0):
            consumer = self.choose_again(item)
            if consumer is not None:
                consumer.chosen(item.weight, item.nbytes)
        item.consumer = consumer
        lane = self.lane(consumer, item.key)
        lane.insert(item)
        return lane

    def move_to(self, taker: Consumer, key: Key, now: float) -> bool:
        """Let an item that waits elsewhere go to a consumer that has none, if the policy allows it."""
        policy = self.policy
        if policy is None:
            return False
        holder: Consumer | None = None
        longest = 0.0
        for other in self.consumers.longest():
            if other is not taker and other.pending_items and (lane := self._own[other].get(key)) is not None and lane.items:
                ahead = other.pending_weight / (other.speed or 1.0)
                if holder is None or ahead > longest:
                    holder, longest = other, ahead
        if holder is None:
            return False
        lane = self._own[holder][key]
        item = lane.items[0]
        try:
            if not policy.may_move(item.info(), holder, taker, now - item.since):
                return False
        except Exception as error:  # as in choose_again
            log.warning("channel %r: the policy failed in may_move, so nothing moves: %s", self._channel, error)
            return False
        lane.take()
        holder.spared(item.weight, item.nbytes)
        taker.chosen(item.weight, item.nbytes)
        item.consumer = taker
        self.lane(taker, key).insert(item)
        return True

    # ---- coming and going

    def join(self, consumer: Consumer) -> list[Lane]:
        """A consumer has come: what waits is dealt out anew. The lanes that got something."""
        self.consumers.add(consumer)
        self._own[consumer] = {}
        if self.policy is None:
            return []
        items: list[Item] = []
        for holder, _, lane in list(self.lanes()):
            for item in lane.clear():
                if holder is not None:
                    holder.spared(item.weight, item.nbytes)
                item.consumer = None
                items.append(item)
        return self._deal(items)

    def leave(self, consumer: Consumer) -> list[Lane]:
        """A consumer has gone: what waits for it goes to the others. The lanes that got something."""
        self.consumers.remove(consumer)
        consumer.row = -1
        items = [item for lane in self._own.pop(consumer).values() for item in lane.clear()]
        return self._deal(items)

    def _deal(self, items: list[Item]) -> list[Lane]:
        lanes: dict[Lane, None] = {}
        for item in sorted(items, key=lambda item: item.seq):
            lanes[self.put_down(item)] = None
        return list(lanes)
