"""The gets of one worker, as the channel worker sees them: what was handed to them, is theirs, or comes back."""

from __future__ import annotations

import logging
import struct
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiorlinf.channel.entries import FIXED, GETS, RETURNS, Bits, Op, decode_key, encode_key, entry
from aiorlinf.channel.records import Delivery, Get, Item
from aiorlinf.channel.watching import watch
from aiorlinf.errors import ChannelClosed, ChannelError, UsageError, WireError
from aiorlinf.link.lending import pass_on
from aiorlinf.link.parcel import Parcel

if TYPE_CHECKING:
    from aiorlinf.channel.host_port import HostPort, Talk
    from aiorlinf.channel.queue import ChannelQueue
    from aiorlinf.work.base import AsyncWork

__all__ = ["Handout"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_SLOTS = 64
"""So many large payloads may be on their way to a worker at once; more wait."""

_MAX_TAKEN = 1 << 20
_U16 = struct.Struct("<H")
_ITEM = Op.ITEM
_BATCH, _LARGE, _LEASE, _MORE, _NOWAIT, _PLACED = Bits.BATCH, Bits.LARGE, Bits.LEASE, Bits.MORE, Bits.NOWAIT, Bits.PLACED


class _Piece(NamedTuple):
    """An item that is to be sent; `delivery` None: a look at it; `again`: one more than the index of an item that is sent once more."""

    delivery: Delivery | None
    item: Item
    number: int
    bits: int
    again: int = 0


class _HeldGet(NamedTuple):
    """A get that waits for what the same worker gives back."""

    port: HostPort
    bits: int
    target: float
    extra: int
    key: bytes


class Handout:
    """See the module. Home thread only."""

    def __init__(self, session: Talk) -> None:
        self._session = session
        self._given: dict[int, Delivery] = {}
        self._slots = deque(range(1, _SLOTS + 1))
        self._pieces: deque[_Piece] = deque()  # that wait for a slot
        self._on_way: dict[Delivery, AsyncWork[None]] = {}  # single items that are being sent as messages
        self._returning: dict[tuple[str, bytes], int] = {}  # by channel and key, deliveries that are on their way back
        self._coming_back: set[Delivery] = set()
        self._held: dict[tuple[str, bytes], dict[int, _HeldGet]] = {}  # and gets that came after them

    # ---- what the worker says

    def get(self, port: HostPort, bits: int, number: int, more: int, target: float, extra: int, key: bytes, now: float) -> None:
        """It wants something, and the same `more` times after that."""
        if self._returning and (lane := (port.hosted.settings.name, key)) in self._returning:  # what this worker gives back comes first
            held = self._held.setdefault(lane, {})
            for each in range(number, number + more + 1):
                held[each] = _HeldGet(port, bits, target, extra, key)
            return
        consumer = port.handle.consumer
        if consumer is None or consumer.row < 0:
            try:
                consumer = port.handle.consuming(now)
            except (ChannelClosed, UsageError) as error:
                for each in range(number, number + more + 1):
                    self._session.fail(port.number, each, error)
                return
        queue, gets = port.hosted.queue, port.gets
        wanted = decode_key(key) if key else None
        weight = target if bits & _BATCH else None
        nowait, lease = bool(bits & _NOWAIT), bool(bits & _LEASE)
        seconds = extra / 1000 if extra else None
        for each in range(number, number + more + 1):
            get = gets[each] = Get(consumer, wanted, weight, nowait, lease, seconds, port, each)
            queue.get(get, now)

    def cancel(self, port: HostPort, number: int, now: float) -> None:
        """It does not want that any more."""
        get = port.gets.pop(number, None)
        if get is not None:
            port.hosted.queue.cancel(get, now)
            return
        for held in self._held.values():
            if held.pop(number, None) is not None:
                return
        delivery = self._given.get(number)
        if delivery is None:
            return
        # The items were on their way when it was cancelled, so they are not taken. Those that we still have go back now, and what the
        # worker says about them when they are there is ignored; others it has to send, and what it asks for meanwhile waits.
        if delivery.get.lease:
            del self._given[number]
            if delivery.open:
                _queue_of(delivery).returned(delivery, now, redelivery=True)
        elif delivery.messages or any(piece.delivery is delivery for piece in self._pieces):
            self._expect_back(delivery)
        else:
            del self._given[number]
            _queue_of(delivery).returned(delivery, now)

    def _expect_back(self, delivery: Delivery) -> None:
        """Messages are on their way back."""
        if delivery not in self._coming_back:
            lane = _lane_of(delivery)
            self._coming_back.add(delivery)
            self._returning[lane] = self._returning.get(lane, 0) + 1

    def taken(self, number: int, count: int, now: float) -> None:
        """What these gets were given is its for good."""
        if count > _MAX_TAKEN:
            raise WireError(f"{count} items are said to be taken at once")
        given = self._given
        for each in range(number, number + count):
            delivery = given.pop(each, None)
            if delivery is not None:
                _queue_of(delivery).taken(delivery, now)
                _let_go(delivery)

    def come_back(self, number: int, payload: bytes, now: float) -> None:
        """What this get was given goes back."""
        delivery = self._given.pop(number, None)
        if delivery is None:
            return
        slots = [slot for (slot,) in _U16.iter_unpack(payload)] if not len(payload) % 2 else []
        gone = [item for item in delivery.items if isinstance(item.payload, Parcel) and item.payload.closed]
        if len(slots) != len(gone):
            raise WireError(f"{len(gone)} messages go back in {len(slots)} slots")
        if not gone:
            if delivery in self._coming_back:
                self._came_back(delivery, [])
            else:
                _queue_of(delivery).returned(delivery, now)
            return
        missing = len(gone)
        self._expect_back(delivery)
        lost: list[Item] = []
        session = self._session

        def arrived(item: Item, work: AsyncWork[Any]) -> None:
            nonlocal missing
            if work.cancelled() or work.exception() is not None:
                lost.append(item)  # the worker is gone, or could not send it
            else:
                item.payload = work.result()
            missing -= 1
            if not missing and not session.ended:
                self._came_back(delivery, lost)

        for item, slot in zip(gone, slots, strict=True):
            watch(session.exchange.recv_parcel(session.peer, RETURNS, slot), partial(arrived, item))

    def _came_back(self, delivery: Delivery, lost: list[Item]) -> None:
        session = self._session
        now = session.clock()
        lane = _lane_of(delivery)
        self._coming_back.discard(delivery)
        if lost:
            log.error("%d items that %s gave back to channel %r are lost", len(lost), session.peer, lane[0])
            _queue_of(delivery).dropped(delivery, now)
        else:
            _queue_of(delivery).returned(delivery, now)
        self._returning[lane] -= 1
        if not self._returning[lane]:
            del self._returning[lane]
            for number, held in self._held.pop(lane, {}).items():
                self.get(held.port, held.bits, number, 0, held.target, held.extra, held.key, now)
        session.work_off()

    def done(self, number: int, now: float) -> None:
        """This lease is over, its items are dealt with."""
        delivery = self._given.pop(number, None)
        if delivery is None:
            return
        if _queue_of(delivery).taken(delivery, now):
            _let_go(delivery)
        else:
            log.warning("%s was done with an item after the time of its lease: it has gone to another consumer", self._session.peer)

    def back(self, number: int, now: float) -> None:
        """This lease is over, its items go back."""
        delivery = self._given.pop(number, None)
        if delivery is not None and delivery.open:
            _queue_of(delivery).returned(delivery, now, redelivery=True)

    def again(self, number: int, index: int) -> None:
        """This item cannot be had where it was said to lie: it is sent as a message."""
        delivery = self._given.get(number)
        if delivery is None:
            self._session.fail(0, number, ChannelError("it has gone back meanwhile"))
            return
        if index >= len(delivery.items) or not isinstance(delivery.items[index].payload, Parcel):
            raise WireError(f"item {index} of get {number} was not said to lie anywhere")
        self._pieces.append(_Piece(delivery, delivery.items[index], number, _LARGE, index + 1))
        self._send_pieces()

    def look(self, number: int, items: list[Item]) -> None:
        """Let it look at these, of which there is at least one."""
        for item in items:
            self._pieces.append(_Piece(None, item, number, 0 if item is items[-1] else _MORE))
        self._send_pieces()

    # ---- what the queue says

    def deliver(self, port: HostPort, delivery: Delivery) -> None:
        """Hand these items over."""
        get = delivery.get
        number = get.number
        port.gets.pop(number, None)
        self._given[number] = delivery
        items = delivery.items
        bits = _LEASE if get.lease else 0
        if len(items) == 1 and not self._pieces:
            payload = items[0].payload
            if type(payload) is bytes:
                self._session.write(FIXED.pack(_ITEM, bits, 0, 0, 0, len(payload), number, 0.0, 0) + payload)
                return
            told = pass_on(self._session.link, payload, private=get.lease)
            if told is not None:
                self._session.write(entry(_ITEM, 0, number, bits | _LARGE | _PLACED, payload=told))
                return
        last = items[-1]
        for item in items:
            self._pieces.append(_Piece(delivery, item, number, bits if item is last else bits | _MORE))
        self._send_pieces()

    def _send_pieces(self) -> None:
        session = self._session
        while self._pieces:
            piece = self._pieces[0]
            delivery, item, number, bits, again = piece
            payload = item.payload
            if type(payload) is bytes:
                self._pieces.popleft()
                session.write(entry(_ITEM, 0, number, bits, payload=payload))
                continue
            if payload.closed or (again and self._given.get(number) is not delivery):
                self._pieces = deque(other for other in self._pieces if other.number != number)
                session.fail(0, number, ChannelError("it has gone to somebody else before it was on its way"))
                continue
            lease = delivery is not None and delivery.get.lease
            if delivery is not None and not again:
                told = pass_on(session.link, payload, private=lease)
                if told is not None:
                    self._pieces.popleft()
                    session.write(entry(_ITEM, 0, number, bits | _LARGE | _PLACED, payload=told))
                    continue
            if not self._slots:
                return
            self._pieces.popleft()
            slot = self._slots.popleft()
            session.write(entry(_ITEM, 0, number, bits | _LARGE, slot=slot, extra=again))
            keep = delivery is None or lease or bool(again)
            if delivery is not None and not keep:
                delivery.messages += 1
            work = self._send_message(payload, slot, keep)
            if delivery is not None and not keep and len(delivery.items) == 1:
                self._on_way[delivery] = work
            watch(work, partial(self._sent, slot, delivery))

    def _send_message(self, parcel: Parcel, slot: int, keep: bool) -> AsyncWork[None]:
        session = self._session
        session.flush()  # so that what says where it goes leaves in one write with it
        try:
            work = session.exchange.send_parcel(session.peer, GETS, slot, parcel, keep=keep)
        except UsageError:  # a lease of it that has ended is still on its way
            work = session.exchange.send_parcel(session.peer, GETS, slot, parcel, keep=True)
            watch(work, lambda work: parcel.close() if not work.cancelled() and work.exception() is None else None)
        return work

    def _sent(self, slot: int, delivery: Delivery | None, _: AsyncWork[None]) -> None:
        self._slots.append(slot)
        if delivery is not None:
            self._on_way.pop(delivery, None)
        if not self._session.ended:
            self._send_pieces()

    # ---- the end

    def end(self, now: float, *, link_lives: bool) -> None:
        """The worker is gone. What it certainly has not got goes back; of what it may have got, only leases do, when it leaves.

        Args:
            link_lives: so that messages that were begun may still arrive: whether they have is known when they are over.
        """
        unsent = {piece.delivery for piece in self._pieces if piece.delivery is not None and not piece.again}
        self._pieces.clear()
        given, self._given = self._given, {}
        on_way, self._on_way = self._on_way, {}
        for delivery in given.values():
            if delivery.get.lease:
                continue
            if link_lives and (sending := on_way.get(delivery)) is not None:
                watch(sending, partial(self._over_after_all, delivery))
            elif delivery.open and (delivery in unsent or _is_whole(delivery)) and not _is_closed(delivery):
                _queue_of(delivery).returned(delivery, now)
            else:
                _let_go(delivery)

    def _over_after_all(self, delivery: Delivery, _: AsyncWork[None]) -> None:
        """What was on its way when the conversation ended has arrived, or never will."""
        if _is_whole(delivery):
            _queue_of(delivery).returned(delivery, self._session.clock())  # also if it counts as gone meanwhile, with its consumer
            self._session.work_off()
        else:
            _let_go(delivery)


def _queue_of(delivery: Delivery) -> ChannelQueue:
    queue: ChannelQueue = delivery.get.owner.hosted.queue
    return queue


def _let_go(delivery: Delivery) -> None:
    """The items are gone; the delivery may be remembered for as long as the consumer works on it."""
    for item in delivery.items:
        item.payload = None


def _lane_of(delivery: Delivery) -> tuple[str, bytes]:
    """Channel and key."""
    return delivery.get.owner.hosted.settings.name, encode_key(delivery.get.key)


def _is_closed(delivery: Delivery) -> bool:
    """Of some item nothing is left here."""
    return any(isinstance(item.payload, Parcel) and item.payload.closed for item in delivery.items)


def _is_whole(delivery: Delivery) -> bool:
    """A single item that was sent as a message, of which the worker got nothing."""
    payload = delivery.items[0].payload
    return bool(delivery.messages) and len(delivery.items) == 1 and not payload.closed and not payload.uncertain
