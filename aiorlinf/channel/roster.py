"""The producers of a channel, and when its stream is over. Pure.

The stream ends when the last producer has closed: for good. When the last one is lost without having closed, it is broken: gets that would
wait fail, until a producer comes (again). So that a fast producer does not end it before a slow one has come, a channel can be told how
many producers there will be.
"""

from __future__ import annotations

from aiorlinf.channel.records import Producer
from aiorlinf.errors import ChannelClosed, ChannelError, ProducerLost

__all__ = ["Roster"]


class Roster:
    """See the module.

    Args:
        channel: its name, for errors.
        expected: so many producers must have come before the stream can end.
    """

    def __init__(self, channel: str, expected: int = 1) -> None:
        self.channel = channel
        self.expected = expected
        self.open: dict[str, Producer] = {}
        self.gone: dict[str, Producer] = {}  # closed and lost ones
        self._before: dict[str, Producer] = {}  # of those that have come again: what they were in between
        self.shut: str | None = None  # who ended the stream by `shutdown`
        self._last: Producer | None = None  # the last to go

    def join(self, name: str) -> Producer:
        """One has come, perhaps again.

        Raises:
            ChannelClosed: the stream is over.
        """
        if self.closed:
            raise self.error("put")
        producer = self.open.get(name)
        if producer is None:
            before = self.gone.pop(name, None)
            producer = self.open[name] = Producer(name)
            if before is not None:
                producer.puts, producer.weight = before.puts, before.weight
                self._before[name] = before
        return producer

    def withdraw(self, producer: Producer) -> None:
        """One that has put nothing since it came has not come after all."""
        if self.open.get(producer.name) is producer:
            del self.open[producer.name]
            before = self._before.pop(producer.name, None)
            if before is not None:
                self.gone[producer.name] = before

    def leave(self, producer: Producer, cause: str | None = None) -> None:
        """One has closed, or is lost for this cause."""
        if self.open.get(producer.name) is not producer:
            return
        del self.open[producer.name]
        self._before.pop(producer.name, None)
        producer.state = "closed" if cause is None else "lost"
        producer.cause = cause or ""
        self.gone[producer.name] = producer
        self._last = producer

    def shutdown(self, by: str) -> None:
        """End the stream, whoever else would put."""
        self.shut = self.shut or by

    @property
    def may_have_ended(self) -> bool:
        """Quick to ask for every item: False is certain."""
        return not self.open or self.shut is not None

    @property
    def ended(self) -> bool:
        """Nothing more comes, as far as is known."""
        return self.shut is not None or (not self.open and bool(self.gone) and len(self.gone) >= self.expected)

    @property
    def closed(self) -> bool:
        """The stream is over for good."""
        return self.shut is not None or (self.ended and self._last is not None and self._last.state == "closed")

    def error(self, operation: str) -> ChannelError:
        """Why nothing more comes. A fresh one each time."""
        name = self.channel
        if self.shut is not None:
            return ChannelClosed(f"channel {name!r} was shut down by {self.shut}", operation=operation)
        last = self._last
        assert last is not None
        if last.state == "closed":
            return ChannelClosed(f"channel {name!r} is closed: the last of its producers, {last.name}, has closed", operation=operation)
        return ProducerLost(f"channel {name!r} lost the last of its producers, {last.name}: {last.cause}", operation=operation)
