"""One handle of a channel, as its queue sees it: a producer from its first put on, a consumer from its first get on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from aiorlinf.channel.queue import ChannelQueue
from aiorlinf.channel.records import Consumer, Producer
from aiorlinf.errors import ChannelClosed

__all__ = ["Handle"]


class Handle:
    """See the module.

    Attributes:
        consumer_name, producer_name: as whom it gets and puts.
        producer, consumer: what it is by now.
    """

    def __init__(self, queue: ChannelQueue, consumer_name: str, producer_name: str, share: float, labels: Mapping[str, str] | None) -> None:
        self.queue = queue
        self.consumer_name = consumer_name
        self.producer_name = producer_name
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self._share = share
        self._labels = labels
        self._free_memory: int | None = None
        self._closed = False
        self._came = False  # the producer is there because of this handle

    def _closed_error(self, operation: str) -> ChannelClosed:
        return ChannelClosed(f"this handle of channel {self.queue.name!r} was closed", operation=operation)

    def producing(self) -> Producer:
        """It puts.

        Raises:
            ChannelClosed: the stream or this handle is closed.
        """
        producer = self.producer
        if producer is None or producer.state != "open":
            if self._closed:
                raise self._closed_error("put")
            roster = self.queue.roster
            self._came = self.producer_name not in roster.open
            producer = self.producer = roster.join(self.producer_name)
        return producer

    def consuming(self, now: float) -> Consumer:
        """It gets.

        Raises:
            ChannelClosed: this handle has left.
            UsageError: there is a consumer of its name.
        """
        consumer = self.consumer
        if consumer is None:
            consumer = Consumer(self.consumer_name, self._share, self._labels)
            consumer.free_memory = self._free_memory
            self.queue.join_consumer(consumer, now)
            self.consumer = consumer
        if consumer.row < 0:
            raise self._closed_error("get")
        return consumer

    def report(self, free_memory: int | None) -> None:
        """It has so many bytes free."""
        self._free_memory = free_memory
        if self.consumer is not None:
            self.consumer.free_memory = free_memory

    def close(self, now: float) -> None:
        """It puts nothing more; one that has only got leaves. See `Channel.close`."""
        if self._closed:
            return
        self._closed = True
        if self.producer is None and self.consumer is None and not self.queue.roster.closed:
            self.producer = self.queue.roster.join(self.producer_name)
        if self.producer is not None:
            self.queue.leave_producer(self.producer, now)
        elif self.consumer is not None:
            self.queue.leave_consumer(self.consumer, now, self._closed_error("get"))

    def give_up(self, now: float) -> None:
        """It was not used, and never will be: as if it had not been made. So it counts for no producer that had nothing to put."""
        self._closed = True
        if self.producer is not None and self._came:
            self.queue.withdraw_producer(self.producer, now)
        if self.consumer is not None and self.consumer.row >= 0:
            self.queue.leave_consumer(self.consumer, now)

    def cut_short(self, cause: str) -> None:
        """Its worker is lost, and with it some of what was put before the close: that was no good end."""
        producer = self.producer
        if producer is not None and producer.state == "closed":
            producer.state, producer.cause = "lost", cause

    def gone(self, now: float, cause: str | None) -> None:
        """Its worker is gone: lost for this cause, or (None) it has closed."""
        self._closed = True
        if self.producer is not None:
            self.queue.leave_producer(self.producer, now, cause)
        if self.consumer is not None and self.consumer.row >= 0:
            self.queue.leave_consumer(self.consumer, now)
