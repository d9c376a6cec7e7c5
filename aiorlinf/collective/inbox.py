"""Inbox: messages from anyone."""

from __future__ import annotations

import bisect
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.exchange import cancel_receive
from aiorlinf.errors import AiorlinfError, ClosedError, PeerError, UsageError
from aiorlinf.link.incoming import Incoming, ParcelReceive, Receive
from aiorlinf.link.mailbox import Mailbox
from aiorlinf.link.pending import PendingOperation, pending_receive
from aiorlinf.wire.frames import stream_key
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import check_limit

if TYPE_CHECKING:
    from aiorlinf.collective.exchange import Exchange

__all__ = ["Inbox", "ParcelInbox"]

log: logging.Logger = logging.getLogger("aiorlinf.collective")


class Inbox:
    """What `comm.inbox()` returns: an async iterator over (sender, object), in order of arrival.

    It gets what others send with `comm.send(obj, us)` or over the unnamed group of two, and that no `recv` of ours asks for. One inbox
    per tag waits at a time; one that is not waited on, such as one whose loop was left with `break`, makes way for the next. Leave it with
    `async with`, `aclose()`, or by closing the worker. Messages it does not take stay for a later `recv`.
    """

    _receive_type: type[Receive] = Receive

    def __init__(self, exchange: Exchange, tag: int, context: int = 0) -> None:
        self._exchange = exchange
        self._key = stream_key(context, tag)
        self._waiting: deque[Receive] = deque()
        self._known: list[tuple[int, Incoming, Mailbox]] = []
        self._prune_at = 64
        self._cancelled = 0  # at most so many of `_waiting` are
        self._open = False
        self._closed = False

    # ---- use, any thread

    def recv(self, timeout: float | None = None) -> AsyncWork[tuple[WorkerAddress, Any]]:
        """The next (sender, object).

        Raises:
            DeadlineExceeded: nothing came within `timeout` seconds.
            ClosedError: the inbox or the worker was closed.
            UsageError: another inbox with this tag is waited on.

        Cancelling takes nothing: the message goes to the next call.
        """
        exchange = self._exchange
        exchange.check(0)
        check_limit(timeout)
        receive = self._receive_type(self._key, with_sender=True)
        work: AsyncWork[tuple[WorkerAddress, Any]] = AsyncWork(
            exchange.home, "inbox", abort=self._cancel, give_back=receive.give_back, detail=receive
        )
        receive.work = work
        exchange._run(work, self._post, receive)
        exchange._limit(work, timeout, exchange.local, self._key & 0xFFFFFFFF)
        return work

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> tuple[WorkerAddress, Any]:
        """Cancelling takes nothing. Ends when the inbox or the worker is closed."""
        while True:
            try:
                return await self.recv()
            except ClosedError:
                raise StopAsyncIteration from None
            except PeerError as error:
                # Its sender died in the middle of a message; the others go on.
                log.warning("a message was lost on its way into the inbox: %s", error)

    async def __aenter__(self) -> Inbox:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop taking messages; waiting calls end. Cancelling does nothing: it returns at once."""
        self.close()

    def close(self) -> None:
        """As `aclose`, from synchronous code."""
        if not self._closed:
            self._closed = True
            try:
                self._exchange.home.call(self.end, ClosedError("the inbox was closed"))
            except AiorlinfError:  # the loop is gone, and everything with it
                pass

    # ---- home thread

    def pending(self) -> list[PendingOperation]:
        """Calls that wait, for diagnosis."""
        return [pending_receive(receive, None, "waits for a message") for receive in list(self._waiting) if not receive.cancelled]

    def _post(self, receive: Receive) -> None:
        if receive.cancelled:
            return
        if self._closed:
            raise ClosedError("the inbox was closed")
        self._exchange.table.check_open()
        self._register()
        if not self._take_known(receive):
            self._waiting.append(receive)

    def _take_known(self, receive: Receive) -> bool:
        while self._known:
            _, message, mailbox = self._known.pop(0)
            if message.queued:
                mailbox.remove(message)
                receive.receiver = mailbox.owner.receiver
                receive.receiver.match(receive, message)
                return True
        return False

    def again(self, receive: Receive) -> None:
        """See `link.mailbox.Wildcard`. The next message may come from any worker."""
        receive.receiver = None
        if not self._take_known(receive):
            self._waiting.appendleft(receive)

    def _register(self) -> None:
        if self._open:
            return
        table = self._exchange.table
        other = table.wildcards.get(self._key)
        if other is not None and not other.make_way():
            raise UsageError("another inbox with this tag is waited on", hint="iterate over one inbox per tag, or close the other")
        table.wildcards[self._key] = self
        self._open = True
        table.inboxes.add(self)
        for link in table.all_links():
            for message in link.mailbox.queued(self._key):
                self._remember(link.mailbox, message)

    def make_way(self) -> bool:
        """See `link.mailbox.Wildcard`."""
        if any(not receive.cancelled for receive in self._waiting):
            return False
        self._waiting.clear()
        self._cancelled = 0
        self._known.clear()
        self._open = False
        self._exchange.table.inboxes.discard(self)
        return True

    def _remember(self, mailbox: Mailbox, message: Incoming) -> None:
        bisect.insort(self._known, (message.order, message, mailbox), key=lambda entry: entry[0])

    def offer(self, mailbox: Mailbox, message: Incoming) -> bool:
        """See `link.mailbox.Wildcard`."""
        while self._waiting:
            receive = self._waiting.popleft()
            if not receive.cancelled:
                receive.receiver = mailbox.owner.receiver
                receive.receiver.match(receive, message)
                return True
        if len(self._known) > self._prune_at:
            # Those that a `recv` took.
            self._known = [entry for entry in self._known if entry[1].queued]
            self._prune_at = 64 + 2 * len(self._known)
        self._remember(mailbox, message)
        return False

    def _cancel(self, work: AsyncWork[Any]) -> None:
        receive = work._detail
        if receive.receiver is None:
            receive.cancelled = True
            receive.work = None
            self._cancelled += 1
            if self._cancelled >= max(32, len(self._waiting) // 2):
                self._cancelled = 0
                self._waiting = deque(waiting for waiting in self._waiting if not waiting.cancelled)
        else:
            cancel_receive(work)

    def end(self, error: AiorlinfError) -> None:
        """Nothing more is taken; waiting calls fail."""
        self._closed = True
        table = self._exchange.table
        if table.wildcards.get(self._key) is self:
            del table.wildcards[self._key]
        table.inboxes.discard(self)
        self._known.clear()
        waiting, self._waiting = self._waiting, deque()
        for receive in waiting:
            if not receive.cancelled:
                receive.fail(type(error)(error.message, operation="inbox", local=self._exchange.local))


class ParcelInbox(Inbox):
    """As `Inbox`, of (sender, `Parcel`): messages of one context and tag, whoever sends them, not looked into. `Parcel.sender` says which
    life of the sender it was."""

    _receive_type = ParcelReceive

    def __init__(self, exchange: Exchange, context: int, tag: int) -> None:
        super().__init__(exchange, tag, context)
        exchange.table.pass_on()
