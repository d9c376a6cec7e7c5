"""Messages that go back: their receive was cancelled, or their sender took them back.

Both leave the others as if what was cancelled had never been: a message goes to the next receive of its stream, whose own message goes to
the one after it, and so on; a receive gets the next message of its stream, strictly in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import orjson

from aiorlinf.errors import ClosedError
from aiorlinf.link.delivery import Delivery, about
from aiorlinf.link.incoming import Content, Incoming, Receive
from aiorlinf.link.lockout import LockOut
from aiorlinf.link.mailbox import Mailbox
from aiorlinf.link.memory import byte_tensor, byte_view, copy_bytes, fresh_bytes
from aiorlinf.wire.frames import FrameType
from aiorlinf.wire.tensor_header import sendable_leaf

if TYPE_CHECKING:
    from aiorlinf.codec.pool import TensorBufferPool

__all__ = ["Matcher", "Returns"]


class Matcher(Protocol):
    """What going back needs of the receiving half."""

    mailbox: Mailbox
    pool: TensorBufferPool | None
    opened: dict[int, Incoming]
    delivery: Delivery
    lockout: LockOut

    def match(self, receive: Receive, message: Incoming) -> None: ...
    def keep(self, message: Incoming) -> None: ...
    def consume(self, message: Incoming) -> None: ...
    def reply(self, kind: int, key: int, body: bytes = b"", flags: int = 0) -> None: ...


class Returns:
    """See the module. Home thread only."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    # ---- the sender's side took it back

    def withdraw_whole(self, message_id: int) -> None:
        """The sender cancelled a message that is here already: it can be withdrawn until somebody takes it."""
        for message in self._matcher.mailbox.all_queued():
            if message.message_id == message_id:
                # Its sender may have heard from us that it is here. Said before its memory goes back, which tells the two cases apart.
                self._matcher.reply(FrameType.REFUSED, message_id, orjson.dumps({"why": "withdrawn"}))
                self.withdraw(message)
                return

    def withdraw(self, message: Incoming) -> None:
        """The sender cancelled: as if the message had never come."""
        matcher = self._matcher
        matcher.lockout.unmatched.discard(message)
        matcher.mailbox.remove(message)
        matcher.lockout.free(message)
        matcher.consume(message)
        message.content = message.body = None  # an inbox may remember the message for a while
        receive, message.receive = message.receive, None
        if receive is None:
            return
        receive.message = None
        for following in self._matched_after(message):
            # Each gets what the next one waited for, so that order stays strict.
            later = following.receive
            if later is None:
                continue
            self._unmatch(later, following)
            matcher.match(receive, following)
            receive = later
            if receive.cancelled:
                return
        self._wait_on(receive)

    def _wait_on(self, receive: Receive) -> None:
        """The message of this receive was withdrawn: it gets the next one."""
        key, mailbox = receive.key, self._matcher.mailbox
        if receive.with_sender:
            wildcard = mailbox.wildcards.get(key)
            if wildcard is None:
                receive.fail(about(ClosedError("the inbox was closed"), receive))
            else:
                wildcard.again(receive)
            return
        following = mailbox.first(key)
        if following is not None:
            self._matcher.match(receive, following)
        else:
            mailbox.post(key, receive, at_head=True)

    # ---- the caller's side gave it up

    def cancel(self, receive: Receive) -> None:
        """The caller cancelled before the message was delivered: the message, if one was matched, goes back to its place."""
        message = receive.message
        if message is None:
            self._matcher.mailbox.withdraw(receive.key, receive)
            return
        self._unmatch(receive, message)
        self.offer(message)

    def give_back(self, receive: Receive, value: Any) -> None:
        """The caller was cancelled between delivery and taking the value: the message goes back to its place."""
        if receive.opaque:
            self.offer((value[1] if receive.with_sender else value).message(receive.key, receive.order))
            return
        is_tensor = receive.tensor_out is not None
        message = Incoming(receive.key, receive.order, 0, is_tensor=is_tensor, want_reply=False)
        message.complete = True
        if is_tensor and not value.is_cpu:
            message.content = Content(None, sendable_leaf(value).spec, value.nbytes)
            message.content.tensors = [self._matcher.delivery.landing.snapshot(value)]
        elif is_tensor:
            message.body = bytes(byte_view(byte_tensor(value))) if value.numel() else b""
            message.content = Content(None, sendable_leaf(value).spec, len(message.body))
        else:
            message.value = [value[1] if receive.with_sender else value]
        self.offer(message)

    def offer(self, message: Incoming) -> None:
        """Nobody has it any more: it goes to the next receive, that one's message to the one after it, and so on."""
        matcher = self._matcher
        for following in self._matched_after(message):
            later = following.receive
            if later is not None:
                self._unmatch(later, following)
                matcher.match(later, message)
                message = following
        receive = matcher.mailbox.waiting(message.key)
        if receive is not None:
            matcher.match(receive, message)
        else:
            matcher.keep(message)

    # ---- both

    def _matched_after(self, message: Incoming) -> list[Incoming]:
        """Later messages of the same stream that are on their way to a receive, oldest first."""
        key, order = message.key, message.order
        later = [other for other in self._matcher.opened.values() if other.receive is not None and other.key == key and other.order > order]
        return sorted(later, key=lambda other: other.order)

    def _unmatch(self, receive: Receive, message: Incoming) -> None:
        receive.message = None
        message.receive = None
        content = message.content
        if content is not None and content.copying is not None:
            content.copying.stop()
            content.copying = None
        if content is not None and content.direct:
            content.direct = False
            if content.lane_pending:
                # The transfer cannot be recalled: it goes on into the caller's memory, and is copied from there at its end.
                content.borrowed = True
            elif content.sink is not None and content.sink.total:
                fresh = fresh_bytes(content.total, self._matcher.pool)
                content.sink.redirect([byte_view(fresh)])
                content.tensors = [fresh]
            elif content.tensors:
                self.own(content)  # a lane has delivered it, and the trailer has not come yet

    def own(self, content: Content) -> None:
        """Copy what a lane has written to a caller's memory, at once: from now on he may write to it himself."""
        fresh = fresh_bytes(content.total, self._matcher.pool)
        copy_bytes(fresh, content.tensors[0])
        content.tensors = [fresh]
