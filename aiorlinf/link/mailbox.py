"""Matching what arrives with what is asked for: pure, no I/O, no clock.

One mailbox per link. It keeps, for each stream (group and tag), the messages that nobody asked for yet and the
receives that nothing came for yet; at most one of the two is non-empty. Matching is strictly in order.

A message may be matched long before its payload is there: it is matched when its manifest arrives. A receive that is
cancelled after that gives its message back to the place it had, so that the next receive gets it (`give_back`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from aiorlinf.link.incoming import Incoming, Receive, Whole

__all__ = ["Mailbox", "Stream", "Wildcard"]


class Wildcard(Protocol):
    """Takes messages of one stream key from any link (`inbox`)."""

    def offer(self, mailbox: Mailbox, message: Incoming) -> bool:
        """Called for a message that no posted receive takes. True: it was taken. False: it goes into the queue."""

    def again(self, receive: Receive) -> None:
        """The message that this receive had been given was withdrawn: it is the first to get another one."""

    def make_way(self) -> bool:
        """Another one wants the messages. True: it is not offered any more. False: it is waited on."""


_IDLE_STREAMS = 64
"""Streams that are empty at the moment are kept, up to so many in all: making them anew for every message would be the larger part of
matching it."""


_CANCELLED_AT_LEAST = 32
"""Cancelled receives of a stream are skipped when they are met; when so many lie between others, and half of all, they are taken out."""


class Stream:
    """Of one key: what nobody has asked for yet, and who waits; at most one of the two."""

    __slots__ = ("arrived", "cancelled", "posted")

    def __init__(self) -> None:
        self.posted: deque[Receive] = deque()
        self.cancelled: int = 0  # at most so many of `posted` are cancelled
        self.arrived: deque[Incoming] = deque()


class Mailbox:
    """See the module. `wildcards` (stream key to inbox) and `orders` are shared by all mailboxes of a worker.

    Attributes:
        streams: by key; the receiver looks at them itself where it would be a call for every message.
    """

    __slots__ = ("orders", "owner", "streams", "wildcards")

    def __init__(self, owner: Any, wildcards: dict[int, Wildcard], orders: Iterator[int]) -> None:
        self.owner: Any = owner
        self.wildcards: dict[int, Wildcard] = wildcards
        self.streams: dict[int, Stream] = {}
        self.orders: Iterator[int] = orders

    def next_order(self) -> int:
        """The position of the message that is being announced, among all that this worker gets."""
        return next(self.orders)

    def waiting(self, key: int) -> Receive | None:
        """Take the receive that a message of this stream must go to, if one is posted."""
        stream = self.streams.get(key)
        if stream is None:
            return None
        posted = stream.posted
        while posted:
            receive = posted.popleft()
            if not receive.cancelled:
                self._settle(key, stream)
                return receive
        self._settle(key, stream)
        return None

    def plain_waits(self, key: int) -> bool:
        """`waiting_plain` would find one."""
        stream = self.streams.get(key)
        if stream is None or not stream.posted:
            return False
        receive = stream.posted[0]
        return type(receive) is Receive and not receive.cancelled and receive.tensor_out is None

    def waiting_plain(self, key: int) -> Receive | None:
        """As `waiting`, if the first of them is a plain `recv`: the common case, kept short."""
        stream = self.streams.get(key)
        if stream is None or not stream.posted:
            return None
        receive = stream.posted[0]
        if type(receive) is not Receive or receive.cancelled or receive.tensor_out is not None:
            return None
        stream.posted.popleft()
        if len(self.streams) > _IDLE_STREAMS:
            self._settle(key, stream)
        return receive

    def _settle(self, key: int, stream: Stream) -> None:
        """Forget a stream that is empty, if there are many."""
        if len(self.streams) > _IDLE_STREAMS and not stream.posted and not stream.arrived:
            del self.streams[key]

    def keep(self, message: Incoming) -> None:
        """Queue a message that no receive waits for, at the place of its order."""
        wildcard = self.wildcards.get(message.key)
        if wildcard is not None and wildcard.offer(self, message):
            return
        message.queued = True
        stream = self.streams.get(message.key)
        if stream is None:
            stream = self.streams[message.key] = Stream()
        arrived = stream.arrived
        if not arrived or arrived[-1].order < message.order:
            arrived.append(message)
            return
        # A message that was given back: it is older than most of what is queued.
        position = 0
        while arrived[position].order < message.order:
            position += 1
        arrived.insert(position, message)

    def take_whole(self, key: int) -> Whole | None:
        """As `first`, if the oldest is a plain small message."""
        stream = self.streams.get(key)
        if stream is None or not stream.arrived:
            return None
        message = stream.arrived[0]
        if type(message) is not Whole:
            return None
        del stream.arrived[0]
        message.queued = False
        if len(self.streams) > _IDLE_STREAMS:
            self._settle(key, stream)
        return message

    def first(self, key: int) -> Incoming | None:
        """Take the oldest queued message of this stream."""
        stream = self.streams.get(key)
        if stream is None or not stream.arrived:
            return None
        message = stream.arrived.popleft()
        message.queued = False
        if len(self.streams) > _IDLE_STREAMS:
            self._settle(key, stream)
        return message

    def post(self, key: int, receive: Receive, *, at_head: bool = False) -> None:
        """Queue a receive; only valid after `first` returned None."""
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = Stream()
        if at_head:
            stream.posted.appendleft(receive)
        else:
            stream.posted.append(receive)

    def withdraw(self, key: int, receive: Receive) -> None:
        """Cancel a posted, unmatched receive."""
        receive.cancelled = True
        stream = self.streams.get(key)
        if stream is None:
            return
        posted = stream.posted
        # Cancelled receives are skipped lazily; trim the ends so that a poller which posts and cancels for ever leaves nothing.
        while posted and posted[-1].cancelled:
            posted.pop()
        while posted and posted[0].cancelled:
            posted.popleft()
        stream.cancelled += 1
        if stream.cancelled >= max(_CANCELLED_AT_LEAST, len(posted) // 2):
            stream.cancelled = 0
            stream.posted = deque(receive for receive in posted if not receive.cancelled)
        self._settle(key, stream)

    def remove(self, message: Incoming) -> None:
        """Forget a queued message, for instance because its sender withdrew it."""
        stream = self.streams.get(message.key)
        if stream is not None and message.queued:
            message.queued = False
            stream.arrived.remove(message)
            self._settle(message.key, stream)

    def queued(self, key: int) -> Iterator[Incoming]:
        """The queued messages of a stream, oldest first."""
        stream = self.streams.get(key)
        return iter(stream.arrived if stream is not None else ())

    def all_queued(self) -> Iterator[Incoming]:
        """Every queued message."""
        for stream in self.streams.values():
            yield from stream.arrived

    def unread_keys(self) -> list[int]:
        """Streams with a queued message, for diagnosis."""
        return [key for key, stream in list(self.streams.items()) if stream.arrived]

    def clear(self) -> int:
        """Forget every queued message; how many there were."""
        messages = list(self.all_queued())
        for message in messages:
            self.remove(message)
        return len(messages)

    def drain_posted(self) -> list[Receive]:
        """Take every waiting receive, in no order between streams: the link has ended."""
        taken: list[Receive] = []
        for key, stream in list(self.streams.items()):
            taken.extend(receive for receive in stream.posted if not receive.cancelled)
            stream.posted.clear()
            self._settle(key, stream)
        return taken

    def awaited(self, key: int) -> bool:
        """Whether a receive of this stream waits."""
        stream = self.streams.get(key)
        return stream is not None and any(not receive.cancelled for receive in stream.posted)

    def posted(self) -> list[Receive]:
        """Receives that wait, stream by stream, for diagnosis."""
        return [receive for stream in list(self.streams.values()) for receive in list(stream.posted) if not receive.cancelled]

    def posted_keys(self) -> list[int]:
        """Streams on which somebody waits, for diagnosis."""
        return [key for key, stream in self.streams.items() if any(not receive.cancelled for receive in stream.posted)]

    def __len__(self) -> int:
        return sum(len(stream.arrived) for stream in self.streams.values())
