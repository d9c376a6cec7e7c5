"""A channel's queue with somebody who does what it tells, and remembers who got what."""

from __future__ import annotations

from typing import Any

from aiorlinf.channel.budget import ByteBudget
from aiorlinf.channel.queue import ChannelQueue
from aiorlinf.channel.records import Consumer, Delivery, Get, Key, Producer, Put, PutState, Rejected

__all__ = ["Desk"]


class Desk:
    """Commits what is admitted at once, unless `slow`. Payloads are numbers that count up."""

    def __init__(self, *, slow: bool = False, shared: ByteBudget | None = None, **options: Any) -> None:
        self.queue = ChannelQueue("c", shared=shared, **options)
        self.slow = slow
        self.now = 0.0
        self.producers: dict[str, Producer] = {}
        self.consumers: dict[str, Consumer] = {}
        self.admitted: list[Put] = []
        self.committed: list[Any] = []
        self.deliveries: list[Delivery] = []
        self.errors: dict[Put | Get, BaseException] = {}
        self.got: dict[Get, list[Any]] = {}

    def producer(self, name: str = "p") -> Producer:
        known = self.producers.get(name)
        if known is None or known.state != "open":
            known = self.producers[name] = self.queue.roster.join(name)
        return known

    def consumer(self, name: str = "c", share: float = 1.0, **labels: str) -> Consumer:
        if name not in self.consumers:
            self.consumers[name] = Consumer(name, share, labels)
            self.queue.join_consumer(self.consumers[name], self.now)
            self.work()
        return self.consumers[name]

    def put(self, payload: Any, *, key: Key = None, weight: float = 1.0, nbytes: int = 1, producer: str = "p", nowait: bool = False) -> Put:
        put = Put(self.producer(producer), key, weight, nbytes, nowait=nowait, payload=payload)
        self.queue.put(put, self.now)
        self.work()
        return put

    def get(self, consumer: str = "c", key: Key = None, **options: Any) -> Get:
        get = Get(self.consumer(consumer), key, **options)
        self.queue.get(get, self.now)
        self.work()
        return get

    def take(self, consumer: str = "c", key: Key = None) -> Any:
        """An item that is there."""
        get = self.get(consumer, key, nowait=True)
        if get in self.errors:
            raise self.errors[get]
        self.queue.taken(self.delivery(get), self.now)
        self.work()
        return self.got[get][0]

    def delivery(self, get: Get) -> Delivery:
        return next(delivery for delivery in reversed(self.deliveries) if delivery.get is get)

    def commit(self, put: Put) -> None:
        self.admitted.remove(put)
        self.committed.append(put.payload)
        self.queue.commit(put, put.payload, self.now)
        self.work()

    def work(self) -> None:
        """Do what the queue tells."""
        while self.queue.told:
            each = self.queue.told.popleft()
            if isinstance(each, Put):
                if each.state == PutState.ADMITTED:
                    self.admitted.append(each)
                    if not self.slow:
                        self.commit(each)
            elif isinstance(each, Rejected):
                self.errors[each.request] = each.error
            else:
                self.deliveries.append(each)
                self.got[each.get] = [item.payload for item in each.items]
