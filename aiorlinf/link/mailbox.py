"""Matching what arrives with what is asked for: pure, no I/O, no clock.

One mailbox per link. It keeps, for each stream (group and tag), the messages that nobody asked for yet and the
receives that nothing came for yet; at most one of the two is non-empty. Matching is strictly in order.

A message may be matched long before its payload is there: it is matched when its manifest arrives. A receive that is
cancelled after that gives its message back to the place it had, so that the next receive gets it (`give_back`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aiorlinf.errors import AiorlinfError
    from aiorlinf.work.base import AsyncWork

__all__ = ["Incoming", "Mailbox", "Receive", "Wildcard"]


class Receive:
    """A posted receive.

    Attributes:
        work: what the caller holds.
        key: stream it asks for.
        tensor_out: the caller's buffer for `recv_tensor`, None for `recv`.
        cancelled: set instead of searching the queue, which skips such entries when it meets them.
        message: the matched message whose payload is still to come, else None.
        order: position of the message it got, for giving it back.
        with_sender: the value is (sender, object), as `inbox` gives it.
        receiver: the receiving half that it was posted to, None before that.
    """

    __slots__ = ("cancelled", "key", "message", "order", "receiver", "tensor_out", "with_sender", "work")

    work: AsyncWork[Any]

    def __init__(self, key: int, tensor_out: Any = None, *, with_sender: bool = False) -> None:
        self.key = key
        self.tensor_out = tensor_out
        self.with_sender = with_sender
        self.cancelled = False
        self.message: Incoming | None = None
        self.order = 0
        self.receiver: Any = None

    def give_back(self, value: Any) -> None:
        """The caller was cancelled between delivery and taking the value."""
        self.receiver.give_back(self, value)

    def __str__(self) -> str:
        tag = f"tag {self.key & 0xFFFFFFFF}"
        if self.receiver is None:
            return tag
        return f"{self.receiver.local}<-{self.receiver.remote} {tag}"


class Incoming:
    """A message that has been announced; its payload may still be under way.

    Attributes:
        key: stream it belongs to.
        order: position among all messages of this link, from 0.
        message_id: sender's number, 0 where the sender waits for no reply.
        is_tensor: from `send_tensor`.
        want_reply: the sender waits for ACCEPTED or REFUSED.
        charged: bytes that count against the window until the message is taken, 0 once returned.
        complete: the payload is there and committed.
        body: whole small message, when it travelled inline.
        content: what the link needs to place and rebuild a larger payload.
        receive: the matched receive, None while waiting.
        value: the finished object in a one-element list, once a receive gave it back.
        error: the sender failed in the middle; whoever receives the message gets this.
        queued: it is in its mailbox, nobody has taken it.
    """

    __slots__ = (
        "body",
        "charged",
        "complete",
        "content",
        "error",
        "is_tensor",
        "key",
        "message_id",
        "order",
        "queued",
        "receive",
        "value",
        "want_reply",
    )

    def __init__(self, key: int, order: int, message_id: int, is_tensor: bool, want_reply: bool) -> None:
        self.key = key
        self.order = order
        self.message_id = message_id
        self.is_tensor = is_tensor
        self.want_reply = want_reply
        self.charged = 0
        self.complete = False
        self.body: Any = None
        self.content: Any = None
        self.receive: Receive | None = None
        self.value: list[Any] | None = None
        self.error: AiorlinfError | None = None
        self.queued = False


class Wildcard(Protocol):
    """Takes messages of one stream key from any link (`inbox`)."""

    def offer(self, mailbox: Mailbox, message: Incoming) -> bool:
        """Called for a message that no posted receive takes. True: it was taken. False: it goes into the queue."""


class _Stream:
    __slots__ = ("arrived", "posted")

    def __init__(self) -> None:
        self.posted: deque[Receive] = deque()
        self.arrived: deque[Incoming] = deque()


class Mailbox:
    """See the module. `wildcards` (stream key to inbox) and `orders` are shared by all mailboxes of a worker."""

    __slots__ = ("_orders", "_streams", "owner", "wildcards")

    def __init__(self, owner: Any, wildcards: dict[int, Wildcard], orders: Iterator[int]) -> None:
        self.owner = owner
        self.wildcards = wildcards
        self._streams: dict[int, _Stream] = {}
        self._orders = orders

    def next_order(self) -> int:
        """The position of the message that is being announced, among all that this worker gets."""
        return next(self._orders)

    def waiting(self, key: int) -> Receive | None:
        """Take the receive that a message of this stream must go to, if one is posted."""
        stream = self._streams.get(key)
        if stream is None:
            return None
        posted = stream.posted
        while posted:
            receive = posted.popleft()
            if not receive.cancelled:
                if not posted and not stream.arrived:
                    del self._streams[key]
                return receive
        if not stream.arrived:
            del self._streams[key]
        return None

    def keep(self, message: Incoming) -> None:
        """Queue a message that no receive waits for, at the place of its order."""
        wildcard = self.wildcards.get(message.key)
        if wildcard is not None and wildcard.offer(self, message):
            return
        message.queued = True
        stream = self._streams.get(message.key)
        if stream is None:
            stream = self._streams[message.key] = _Stream()
        arrived = stream.arrived
        if not arrived or arrived[-1].order < message.order:
            arrived.append(message)
            return
        # A message that was given back: it is older than most of what is queued.
        position = 0
        while arrived[position].order < message.order:
            position += 1
        arrived.insert(position, message)

    def first(self, key: int) -> Incoming | None:
        """Take the oldest queued message of this stream."""
        stream = self._streams.get(key)
        if stream is None or not stream.arrived:
            return None
        message = stream.arrived.popleft()
        message.queued = False
        if not stream.arrived and not stream.posted:
            del self._streams[key]
        return message

    def post(self, key: int, receive: Receive, *, at_head: bool = False) -> None:
        """Queue a receive; only valid after `first` returned None."""
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        if at_head:
            stream.posted.appendleft(receive)
        else:
            stream.posted.append(receive)

    def withdraw(self, key: int, receive: Receive) -> None:
        """Cancel a posted, unmatched receive."""
        receive.cancelled = True
        stream = self._streams.get(key)
        if stream is None:
            return
        posted = stream.posted
        # Cancelled receives are skipped lazily; trim the ends so that a poller which posts and cancels for ever leaves nothing.
        while posted and posted[-1].cancelled:
            posted.pop()
        while posted and posted[0].cancelled:
            posted.popleft()
        if not posted and not stream.arrived:
            del self._streams[key]

    def remove(self, message: Incoming) -> None:
        """Forget a queued message, for instance because its sender withdrew it."""
        stream = self._streams.get(message.key)
        if stream is not None and message.queued:
            message.queued = False
            stream.arrived.remove(message)
            if not stream.arrived and not stream.posted:
                del self._streams[message.key]

    def queued(self, key: int) -> Iterator[Incoming]:
        """The queued messages of a stream, oldest first."""
        stream = self._streams.get(key)
        return iter(stream.arrived if stream is not None else ())

    def all_queued(self) -> Iterator[Incoming]:
        """Every queued message."""
        for stream in self._streams.values():
            yield from stream.arrived

    def drain_posted(self) -> list[tuple[int, Receive]]:
        """Take every waiting receive, in no order between streams: the link has ended."""
        taken = []
        for key, stream in list(self._streams.items()):
            taken.extend((key, receive) for receive in stream.posted if not receive.cancelled)
            stream.posted.clear()
            if not stream.arrived:
                del self._streams[key]
        return taken

    def posted_keys(self) -> list[int]:
        """Streams on which somebody waits, for diagnosis."""
        return [key for key, stream in self._streams.items() if any(not receive.cancelled for receive in stream.posted)]

    def __len__(self) -> int:
        return sum(len(stream.arrived) for stream in self._streams.values())
