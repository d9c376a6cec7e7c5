"""The channel worker's end of its conversation with one worker; the other is `channel.client`."""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from aiorlinf.channel.client import post
from aiorlinf.channel.entries import (
    GETS,
    HEAD,
    LIFE,
    PUTS,
    REPLIES,
    RETURNS,
    Bits,
    Entry,
    Op,
    decode_end,
    decode_key,
    encode_key,
    entries,
    entry,
)
from aiorlinf.channel.faults import encode_error
from aiorlinf.channel.handle import Handle
from aiorlinf.channel.records import Delivery, Get, Item, Put, PutState, Rejected
from aiorlinf.channel.settings import ChannelSettings
from aiorlinf.channel.stats import take_stats
from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError, ChannelClosed, PeerLeft, UsageError, WireError
from aiorlinf.link.parcel import Parcel

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.address import WorkerAddress
    from aiorlinf.channel.queue import ChannelQueue
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["Holder", "HostPort", "Hosted", "Session"]

log = logging.getLogger("aiorlinf.channel")

_SLOTS = 64
"""So many large payloads may be on their way to a worker, and from it, at once; more wait."""

_FLUSH_BYTES = 32 * 1024
_MAX_TAKEN = 1 << 20
_U16 = struct.Struct("<H")


class Hosted(NamedTuple):
    """One channel."""

    settings: ChannelSettings
    queue: ChannelQueue


class Holder(Protocol):
    """What a session needs of the channel worker (`channel.host`)."""

    exchange: Exchange
    home: LoopHome

    async def channel(self, settings: ChannelSettings, *, create: bool) -> Hosted: ...
    def not_told(self, session: Session) -> list[Delivery]: ...
    def session_ended(self, session: Session) -> None: ...
    def work_off(self) -> None: ...


class HostPort:
    """One handle of the worker, on one channel.

    Attributes:
        puts: announced and not over, by number.
        admitted: those of them that have room, in order.
        gets: that wait, by number.
    """

    __slots__ = ("admitted", "gets", "handle", "hosted", "number", "puts", "session")

    def __init__(self, session: Session, number: int, hosted: Hosted, handle: Handle) -> None:
        self.session = session
        self.number = number
        self.hosted = hosted
        self.handle = handle
        self.puts: dict[int, Put] = {}
        self.admitted: deque[Put] = deque()
        self.gets: dict[int, Get] = {}


class _Piece(NamedTuple):
    """An item that is to be sent; `delivery` None: a look at it."""

    delivery: Delivery | None
    item: Item
    number: int
    bits: int


class Session:
    """See the module. Home thread only."""

    def __init__(self, host: Holder, peer: WorkerAddress, number: int) -> None:
        self.peer = peer
        self.number = number
        self.ports: dict[int, HostPort] = {}
        self.ended = False
        self._host = host
        self._exchange = host.exchange
        self._given: dict[int, Delivery] = {}
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._scheduled = False
        self._admits: dict[int, int] = {}
        self._put_slots = deque(range(1, _SLOTS + 1))
        self._get_slots = deque(range(1, _SLOTS + 1))
        self._expected: deque[Put] = deque()  # large ones with room, that wait for a slot
        self._transfers: dict[Put, AsyncWork[Any]] = {}
        self._early: set[Put] = set()  # of those, the ones that are final already
        self._pieces: deque[_Piece] = deque()  # that wait for a slot
        self._returning: dict[tuple[str, bytes], int] = {}  # by channel and key, deliveries that are on their way back
        self._coming_back: set[Delivery] = set()
        self._held_gets: dict[tuple[str, bytes], dict[int, Entry]] = {}  # and gets that came after them
        self._actions: dict[int, Callable[[Entry], None]] = {
            Op.PUT: self._put,
            Op.GET: self._get,
            Op.COMMIT: self._commit,
            Op.TAKEN: self._taken,
            Op.RETRACT: self._retract,
            Op.CANCEL: self._cancel,
            Op.RETURN: self._return,
            Op.DONE: self._done,
            Op.BACK: self._back,
            Op.OPEN: self._open,
            Op.ASK: self._ask,
            Op.REPORT: self._report,
            Op.CLOSE: self._close,
        }

    def watch_life(self) -> None:
        """End with the link."""
        watch(self._exchange.recv_parcel(self.peer, LIFE, 0), self._link_over)

    def _link_over(self, work: AsyncWork[Any]) -> None:
        if work.cancelled():
            self.end(None)
            return
        error = work.exception()
        if error is None:
            self.end(decode_end(work.result().small))
        elif isinstance(error, PeerLeft):
            self.end(None)
        else:
            self.end(error.message if isinstance(error, AiorlinfError) else str(error))

    # ---- sending

    def write(self, data: bytes) -> None:
        """An entry; those of one turn of the loop leave together."""
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > _FLUSH_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._host.home.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is there."""
        self._scheduled = False
        if self.ended:
            return
        out = self._out
        for port, number in self._admits.items():
            out.append(entry(Op.ADMIT, port, number))
        self._admits.clear()
        if out:
            body = HEAD.pack(self.number, 0) + b"".join(out)
            out.clear()
            self._out_bytes = 0
            post(self._exchange, self.peer, REPLIES, body)

    def _fail(self, each: Entry, error: BaseException) -> None:
        self.write(entry(Op.ERROR, each.port, each.number, payload=encode_error(error)))

    def _answer(self, each: Entry, value: Any) -> None:
        self.write(entry(Op.ANSWER, each.port, each.number, payload=orjson.dumps(value)))

    # ---- what the worker says

    def obey(self, body: bytes) -> None:
        """A message of the worker.

        Raises:
            WireError: malformed.
        """
        actions = self._actions
        for each in entries(body):
            action = actions.get(each.op)
            if action is None:
                raise WireError(f"unknown entry {each.op} of a worker")
            action(each)

    def _port(self, each: Entry) -> HostPort:
        port = self.ports.get(each.port)
        if port is None:
            raise WireError(f"there is no port {each.port}")
        return port

    def _open(self, each: Entry) -> None:
        try:
            told = orjson.loads(each.payload)
            settings = ChannelSettings.from_dict(told["settings"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise WireError("a handle is opened without saying for what") from None
        opening = self._host.channel(settings, create=bool(told.get("create")))
        task = self._host.home.hold(opening, f"open {settings.name}")
        task.add_done_callback(lambda task: self._opened(each, told, task))

    def _opened(self, each: Entry, told: dict[str, Any], task: asyncio.Task[Hosted]) -> None:
        if task.cancelled() or self.ended:
            return
        try:
            hosted = task.result()
            names = (str(told["consumer"]), str(told["producer"]))
            handle = Handle(hosted.queue, *names, float(told["share"]), {str(k): str(v) for k, v in told["labels"].items()})
            if "producer" in told["joins"]:
                handle.producing()
            if "consumer" in told["joins"]:
                handle.consuming(time.monotonic())
        except Exception as error:  # whatever a policy's own code raises goes to the one who asked for it
            self._fail(each, error)
            return
        self.ports[each.port] = HostPort(self, each.port, hosted, handle)
        self._answer(each, {})
        self._host.work_off()

    def _put(self, each: Entry) -> None:
        port = self._port(each)
        try:
            producer = port.handle.producing()
        except ChannelClosed as error:
            self._fail(each, error)
            return
        put = Put(
            producer,
            decode_key(each.key) if each.key else None,
            each.value,
            each.extra,
            nowait=bool(each.bits & Bits.NOWAIT),
            payload=None if each.bits & Bits.LARGE else each.payload,
            owner=port,
            number=each.number,
        )
        port.puts[each.number] = put
        port.hosted.queue.put(put, time.monotonic())

    def _retract(self, each: Entry) -> None:
        port = self._port(each)
        put = port.puts.pop(each.number, None)
        if put is not None:
            self._drop(port, put)

    def _drop(self, port: HostPort, put: Put) -> None:
        transfer = self._transfers.get(put)
        if transfer is not None:
            transfer.cancel()
        port.hosted.queue.retract(put, time.monotonic())

    def _commit(self, each: Entry) -> None:
        port = self._port(each)
        admitted = port.admitted
        now = time.monotonic()
        queue = port.hosted.queue
        while admitted and admitted[0].number <= each.number:
            put = admitted.popleft()
            if put.state != PutState.ADMITTED:
                continue
            port.puts.pop(put.number, None)
            payload, put.payload = put.payload, None
            if payload is not None:
                queue.commit(put, payload, now)
            elif put in self._transfers:
                self._early.add(put)
            else:
                queue.retract(put, now)
                raise WireError(f"put {put.number} is committed without a payload")

    def _get(self, each: Entry) -> None:
        port = self._port(each)
        lane = (port.hosted.settings.name, each.key)
        if lane in self._returning:  # what this worker gives back comes first
            self._held_gets.setdefault(lane, {})[each.number] = each
            return
        now = time.monotonic()
        try:
            consumer = port.handle.consuming(now)
        except (ChannelClosed, UsageError) as error:
            self._fail(each, error)
            return
        bits = each.bits
        get = Get(
            consumer,
            decode_key(each.key) if each.key else None,
            target=each.value if bits & Bits.BATCH else None,
            nowait=bool(bits & Bits.NOWAIT),
            lease=bool(bits & Bits.LEASE),
            lease_seconds=each.extra / 1000 if each.extra else None,
            owner=port,
            number=each.number,
        )
        port.gets[each.number] = get
        port.hosted.queue.get(get, now)

    def _cancel(self, each: Entry) -> None:
        port = self._port(each)
        number = each.number
        get = port.gets.pop(number, None)
        if get is not None:
            port.hosted.queue.cancel(get, time.monotonic())
            return
        for held in self._held_gets.values():
            if held.pop(number, None) is not None:
                return
        delivery = self._given.get(number)
        if delivery is None:
            return
        # The items were on their way when it was cancelled, so they are not taken. Those that we still have go back now, and what the
        # worker says about them when they are there is ignored; large ones it has to send, and what it asks for meanwhile waits.
        if delivery.get.lease:
            del self._given[number]
            if delivery.open:
                _queue_of(delivery).returned(delivery, time.monotonic(), redelivery=True)
        elif any(isinstance(item.payload, Parcel) for item in delivery.items):
            self._expect_back(delivery)
        else:
            del self._given[number]
            _queue_of(delivery).returned(delivery, time.monotonic())

    def _expect_back(self, delivery: Delivery) -> None:
        """Large items are on their way back."""
        if delivery not in self._coming_back:
            lane = _lane_of(delivery)
            self._coming_back.add(delivery)
            self._returning[lane] = self._returning.get(lane, 0) + 1

    def _taken(self, each: Entry) -> None:
        if each.extra > _MAX_TAKEN:
            raise WireError(f"{each.extra} items are said to be taken at once")
        now = time.monotonic()
        for number in range(each.number, each.number + each.extra):
            delivery = self._given.pop(number, None)
            if delivery is not None:
                _queue_of(delivery).taken(delivery, now)

    def _return(self, each: Entry) -> None:
        delivery = self._given.pop(each.number, None)
        if delivery is None:
            return
        slots = [slot for (slot,) in _U16.iter_unpack(each.payload)] if not len(each.payload) % 2 else []
        large = [item for item in delivery.items if isinstance(item.payload, Parcel)]
        if len(slots) != len(large):
            raise WireError(f"{len(large)} large items go back in {len(slots)} slots")
        if not large:
            _queue_of(delivery).returned(delivery, time.monotonic())
            return
        missing = len(large)
        self._expect_back(delivery)

        def arrived(item: Item, work: AsyncWork[Any]) -> None:
            nonlocal missing
            if work.cancelled() or work.exception() is not None:
                lost.append(item)  # the worker is gone, or could not send it
            else:
                item.payload = work.result()
            missing -= 1
            if not missing and not self.ended:
                self._came_back(delivery, lost)

        lost: list[Item] = []

        for item, slot in zip(large, slots, strict=True):
            watch(self._exchange.recv_parcel(self.peer, RETURNS, slot), partial(arrived, item))

    def _came_back(self, delivery: Delivery, lost: list[Item]) -> None:
        now = time.monotonic()
        lane = _lane_of(delivery)
        self._coming_back.discard(delivery)
        if lost:
            log.error("%d items that %s gave back to channel %r are lost", len(lost), self.peer, lane[0])
            _queue_of(delivery).dropped(delivery, now)
        else:
            _queue_of(delivery).returned(delivery, now)
        self._returning[lane] -= 1
        if not self._returning[lane]:
            del self._returning[lane]
            for each in self._held_gets.pop(lane, {}).values():
                self._get(each)
        self._host.work_off()

    def _done(self, each: Entry) -> None:
        delivery = self._given.pop(each.number, None)
        if delivery is not None and not _queue_of(delivery).taken(delivery, time.monotonic()):
            log.warning("%s was done with an item after the time of its lease: it has gone to another consumer", self.peer)

    def _back(self, each: Entry) -> None:
        delivery = self._given.pop(each.number, None)
        if delivery is not None and delivery.open:
            _queue_of(delivery).returned(delivery, time.monotonic(), redelivery=True)

    def _report(self, each: Entry) -> None:
        self._port(each).handle.report(None if each.bits & Bits.NOWAIT else each.extra)

    def _ask(self, each: Entry) -> None:
        hosted = self._port(each).hosted
        queue = hosted.queue
        key = decode_key(each.key)
        if each.payload == b"length":
            self._answer(each, queue.length if each.bits & Bits.ALL_KEYS else len(queue.items(key)))
        elif each.payload == b"full":
            self._answer(each, queue.full)
        elif each.payload == b"stats":
            self._answer(each, take_stats(queue, time.monotonic(), str(self._exchange.local), hosted.settings.policy).to_dict())
        elif each.payload == b"peek":
            items = queue.items(key)
            for item in items:
                self._pieces.append(_Piece(None, item, each.number, 0 if item is items[-1] else Bits.MORE))
            if not items:
                self._answer(each, None)
            self._send_pieces()
        else:
            raise WireError(f"unknown question {each.payload[:40]!r}")

    def _close(self, each: Entry) -> None:
        port = self._port(each)
        now = time.monotonic()
        if each.bits & Bits.SHUTDOWN:
            port.hosted.queue.shutdown(port.handle.producer_name, now, immediate=bool(each.bits & Bits.IMMEDIATE))
        else:
            self._settle_puts(port, now)
            port.handle.close(now)
        self._answer(each, None)

    # ---- what the queue says

    def admitted(self, port: HostPort, put: Put) -> None:
        """This put has room."""
        port.admitted.append(put)
        self._admits[port.number] = put.number
        if put.payload is None:
            self._expected.append(put)
            self._deal_slots()
        if not self._scheduled:
            self._scheduled = True
            self._host.home.loop.call_soon(self.flush)

    def _deal_slots(self) -> None:
        while self._expected and self._put_slots:
            put = self._expected.popleft()
            if put.state != PutState.ADMITTED:
                continue
            put.slot = slot = self._put_slots.popleft()
            self._transfers[put] = work = self._exchange.recv_parcel(self.peer, PUTS, slot)
            watch(work, partial(self._received, put))
            self.write(entry(Op.GO, put.owner.number, put.number, slot=slot))

    def _received(self, put: Put, work: AsyncWork[Any]) -> None:
        self._transfers.pop(put, None)
        self._put_slots.append(put.slot)
        early = put in self._early
        self._early.discard(put)
        if not work.cancelled() and work.exception() is None and put.state == PutState.ADMITTED:
            if early:
                put.owner.hosted.queue.commit(put, work.result(), time.monotonic())
                self._host.work_off()
            else:
                put.payload = work.result()
        elif early:
            put.owner.hosted.queue.retract(put, time.monotonic())
        if not self.ended:
            self._deal_slots()

    def rejected(self, port: HostPort, told: Rejected) -> None:
        """This call has failed."""
        number = told.request.number
        port.puts.pop(number, None)
        port.gets.pop(number, None)
        self.write(entry(Op.ERROR, port.number, number, payload=encode_error(told.error)))

    def deliver(self, port: HostPort, delivery: Delivery) -> None:
        """Hand these items over."""
        number = delivery.get.number
        port.gets.pop(number, None)
        self._given[number] = delivery
        items = delivery.items
        bits = Bits.LEASE if delivery.get.lease else 0
        if len(items) == 1 and not self._pieces and type(items[0].payload) is bytes:
            item = items[0]
            self.write(entry(Op.ITEM, port.number, number, bits, value=item.weight, extra=item.nbytes, payload=item.payload))
            return
        last = items[-1]
        for item in items:
            self._pieces.append(_Piece(delivery, item, number, bits if item is last else bits | Bits.MORE))
        self._send_pieces()

    def _send_pieces(self) -> None:
        while self._pieces:
            piece = self._pieces[0]
            _, item, number, bits = piece
            payload = item.payload
            if type(payload) is bytes:
                self._pieces.popleft()
                self.write(entry(Op.ITEM, 0, number, bits, value=item.weight, extra=item.nbytes, payload=payload))
                continue
            if not self._get_slots:
                return
            self._pieces.popleft()
            slot = self._get_slots.popleft()
            self.write(entry(Op.ITEM, 0, number, bits | Bits.LARGE, slot=slot, value=item.weight, extra=item.nbytes))
            self._send_large(piece, payload, slot)

    def _send_large(self, piece: _Piece, parcel: Parcel, slot: int) -> None:
        self.flush()  # so that what says where it goes leaves in one write with it
        keep = piece.delivery is None or piece.delivery.get.lease
        try:
            work = self._exchange.send_parcel(self.peer, GETS, slot, parcel, keep=keep)
        except UsageError:  # a lease of it that has ended is still on its way
            work = self._exchange.send_parcel(self.peer, GETS, slot, parcel, keep=True)
            watch(work, lambda work: parcel.close() if not work.cancelled() and work.exception() is None else None)
        watch(work, lambda _: self._sent(slot))

    def _sent(self, slot: int) -> None:
        self._get_slots.append(slot)
        if not self.ended:
            self._send_pieces()

    # ---- the end

    def _settle_puts(self, port: HostPort, now: float) -> None:
        """The worker says nothing more about its puts: those whose items are here stay, the others are withdrawn."""
        queue = port.hosted.queue
        for put in list(port.puts.values()):
            payload, put.payload = put.payload, None
            if put.state == PutState.ADMITTED and payload is not None:
                queue.commit(put, payload, now)
            else:
                self._drop(port, put)
        port.puts.clear()
        port.admitted.clear()

    def end(self, cause: str | None) -> None:
        """The worker is gone: lost for this cause, or (None) it has closed."""
        if self.ended:
            return
        self.ended = True
        now = time.monotonic()
        unsent = {piece.delivery for piece in self._pieces if piece.delivery is not None}
        self._pieces.clear()
        self._out.clear()
        for port in self.ports.values():
            for get in port.gets.values():  # first, so that nothing more comes to them
                port.hosted.queue.cancel(get, now)
        given, self._given = self._given, {}
        for delivery in given.values():
            # What it certainly has not got goes back; of what it may have got, only leases do.
            parcels = [item.payload for item in delivery.items if isinstance(item.payload, Parcel)]
            certain = delivery in unsent or _is_whole(delivery)
            if certain and delivery.open and not delivery.get.lease and not any(parcel.closed for parcel in parcels):
                _queue_of(delivery).returned(delivery, now)
        for delivery in self._host.not_told(self):
            if delivery.open and not delivery.get.lease:
                _queue_of(delivery).returned(delivery, now)
        for port in self.ports.values():
            self._settle_puts(port, now)
        for port in self.ports.values():
            port.handle.gone(now, cause)
        self._host.session_ended(self)


def _queue_of(delivery: Delivery) -> Any:
    return delivery.get.owner.hosted.queue


def _lane_of(delivery: Delivery) -> tuple[str, bytes]:
    """Channel and key."""
    return delivery.get.owner.hosted.settings.name, encode_key(delivery.get.key)


def _is_whole(delivery: Delivery) -> bool:
    """A single large item of which the worker got nothing."""
    payload = delivery.items[0].payload
    return len(delivery.items) == 1 and isinstance(payload, Parcel) and not payload.closed and not payload.uncertain
