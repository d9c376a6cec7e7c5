"""A worker's end of its conversation with one channel worker; the other is `channel.session`."""

from __future__ import annotations

import itertools
import logging
import random
import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from aiorlinf.channel.arrival import Arrival
from aiorlinf.channel.calls import GetCall
from aiorlinf.channel.entries import GETS, HEAD, HELLO, LIFE, REPLIES, REQUESTS, RETURNS, Bits, Entry, Op, encode_end, entries, entry
from aiorlinf.channel.faults import decode_error
from aiorlinf.channel.pending import CONTEXTS, asks_under_way, calls_under_way
from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError, ClosedError, UnsupportedObject, WireError
from aiorlinf.link.parcel import Parcel
from aiorlinf.wire.frames import stream_key
from aiorlinf.wire.inline import decode_inline
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.address import WorkerAddress
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.pending import PendingOperation

__all__ = ["Conversation", "PutSide", "post"]

log = logging.getLogger("aiorlinf.channel")

_FLUSH_BYTES = 32 * 1024
_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.5
_SLOTS = 1024
_U16 = struct.Struct("<H")


class PutSide(Protocol):
    """What the conversation tells a handle (`channel.remote`)."""

    def on_admit(self, upto: int) -> None: ...
    def on_go(self, number: int, slot: int) -> None: ...
    def on_error(self, number: int, error: AiorlinfError) -> None: ...
    def unfinished(self) -> list[PutCall]: ...
    def on_end(self, make_error: Callable[[], AiorlinfError]) -> None: ...


class Conversation:
    """All handles of one worker on channels that one channel worker holds. Home thread only.

    Attributes:
        ports: handles by their numbers.
        host: the channel worker.
        cause: makes the error of what is called after the end; None before it.
        contexts: of its messages (see `link.pending.Reporter`).
    """

    contexts = CONTEXTS

    def __init__(self, exchange: Exchange, host: WorkerAddress, on_end: Callable[[Conversation], None]) -> None:
        self.exchange = exchange
        self.home = exchange.home
        self.host = host
        self.ports: dict[int, PutSide] = {}
        self.cause: Callable[[], AiorlinfError] | None = None
        self._on_end = on_end
        self._number = random.getrandbits(64)
        self._hello = HELLO
        self._numbers = itertools.count(1)
        self._port_numbers = itertools.count(1)
        self._slots = itertools.cycle(range(1, _SLOTS))
        self._gets: dict[int, GetCall] = {}
        self._asks: dict[int, AsyncWork[Any]] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._untaken: dict[int, Any] = {}  # by number, the work, or a weak reference to it once it has waited for a while
        self._look: asyncio.TimerHandle | None = None
        self._pause = _FIRST_LOOK_SECONDS
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._commits: dict[int, int] = {}
        self._scheduled = False
        exchange.table.reporters.add(self)
        self._listen()

    def pending(self) -> list[PendingOperation]:
        """Calls that are not over, for diagnosis."""
        found = list(calls_under_way(dict.fromkeys(self._gets.values()), "waits for an item"))
        for port in self.ports.values():
            found += calls_under_way(port.unfinished(), "waits for room")
        return found + list(asks_under_way(self._asks.values(), self.host))

    # ---- sending

    def next_number(self) -> int:
        """Of a call."""
        return next(self._numbers)

    def next_port(self) -> int:
        """Of a handle. Raises ClosedError when there were too many."""
        number = next(self._port_numbers)
        if number > 65535:
            raise ClosedError(f"{number} handles were made of channels at {self.host}", hint="keep handles instead of making new ones")
        return number

    def write(self, data: bytes) -> None:
        """An entry; those of one turn of the loop leave together."""
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > _FLUSH_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self.home.loop.call_soon(self.flush)

    def commit(self, port: int, number: int) -> None:
        """The puts of this port up to this number are final."""
        self._commits[port] = number
        if not self._scheduled:
            self._scheduled = True
            self.home.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is there."""
        self._scheduled = False
        if self.cause is not None:
            return
        out = self._out
        self._write_commits()
        if self._untaken:
            self._tell_taken()
        if not out:
            return
        body = HEAD.pack(self._number, self._hello) + b"".join(out)
        self._hello = 0
        out.clear()
        self._out_bytes = 0
        post(self.exchange, self.host, REQUESTS, body)

    def _write_commits(self) -> None:
        """Before anything that shall find what was put."""
        for port, number in self._commits.items():
            self._out.append(entry(Op.COMMIT, port, number))
        self._commits.clear()

    # ---- asking

    def ask(self, work: AsyncWork[Any], op: int, port: int, bits: int, payload: bytes = b"", key: bytes = b"") -> None:
        """Finish the work with the answer."""
        self._write_commits()
        number = self.next_number()
        self._asks[number] = work
        self.write(entry(op, port, number, bits, payload=payload, key=key))

    def start_get(self, call: GetCall, data: Callable[[int], bytes]) -> None:
        """A get."""
        self._write_commits()
        call.number = number = next(self._numbers)
        self._gets[number] = call
        self.write(data(number))

    def stop_get(self, call: GetCall, port: int) -> None:
        """It is not wanted any more. What is on its way goes back when it is here."""
        if self._gets.pop(call.number, None) is not None:
            self.write(entry(Op.CANCEL, port, call.number))

    # ---- receiving

    def _listen(self) -> None:
        """Take every message at once."""
        while self.cause is None:
            try:
                work = self.exchange.recv_parcel(self.host, REPLIES, 0)
            except AiorlinfError as error:
                self.end(error)
                return
            if not work.done():
                watch(work, self._heard)
                return
            self._take(work)

    def _heard(self, work: AsyncWork[Any]) -> None:
        self._take(work)
        self._listen()

    def _take(self, work: AsyncWork[Any]) -> None:
        if self.cause is not None:
            return
        if work.cancelled():
            self.end(ClosedError("the worker was closed"))
            return
        error = work.exception()
        if error is not None:
            self.end(error if isinstance(error, AiorlinfError) else ClosedError(str(error)))
            return
        body = work.result().whole_body(keep=True)
        try:
            if body is None or len(body) < HEAD.size:
                raise WireError("a message of a channel worker without a head")
            if HEAD.unpack_from(body)[0] != self._number:
                return  # to somebody who had our address before
            for each in entries(body):
                self._obey(each)
        except WireError as wrong:
            log.error("%s ends its conversation with %s: %s", self.exchange.local, self.host, wrong)
            self.end(wrong)
        except AiorlinfError as closing:
            self.end(closing)

    def _obey(self, each: Entry) -> None:
        op = each.op
        if op == Op.ITEM:
            self._item(each)
        elif op == Op.ADMIT:
            if (port := self.ports.get(each.port)) is not None:
                port.on_admit(each.number)
        elif op == Op.GO:
            if (port := self.ports.get(each.port)) is not None:
                port.on_go(each.number, each.slot)
        elif op == Op.ANSWER:
            work = self._asks.pop(each.number, None)
            if work is not None:
                work._finish(orjson.loads(each.payload) if each.payload else None)
        elif op == Op.ERROR:
            error = decode_error(each.payload)
            get = self._gets.pop(each.number, None)
            work = self._asks.pop(each.number, None)
            if get is not None:
                get.fail(error)
            elif work is not None:
                work._fail(error)
            elif (port := self.ports.get(each.port)) is not None:
                port.on_error(each.number, error)
        else:
            raise WireError(f"unknown entry {op} of a channel")

    # ---- items

    def _item(self, each: Entry) -> None:
        number = each.number
        arrival = self._arrivals.get(number)
        if arrival is None:
            call = self._gets.get(number)
            if call is not None and not each.bits & (Bits.LARGE | Bits.MORE) and call.target is None and not call.lease:
                # The common case: one small item.
                del self._gets[number]
                try:
                    value = decode_inline(memoryview(each.payload), allow_pickle=self.exchange.config.allow_pickle)
                except BaseException as error:  # whatever unpickled code raises, sys.exit() too, concerns this item only
                    self._undecodable(call, number, error)
                    return
                self._hand_over(call, value)
                return
            arrival = self._arrivals[number] = Arrival(number, bool(each.bits & Bits.LEASE))
        index = arrival.expect(each.payload if not each.bits & Bits.LARGE else None, last=not each.bits & Bits.MORE)
        if each.bits & Bits.LARGE:
            work = self.exchange.recv_parcel(self.host, GETS, each.slot)
            watch(work, lambda work: self._part(arrival, index, work))
        elif arrival.complete:
            self._complete(arrival)

    def _part(self, arrival: Arrival, index: int, work: AsyncWork[Any]) -> None:
        if self.cause is not None or work.cancelled():
            return
        error = work.exception()
        arrival.part(index, error if error is not None else work.result())
        if arrival.complete:
            self._complete(arrival)

    def _complete(self, arrival: Arrival) -> None:
        number = arrival.number
        self._arrivals.pop(number, None)
        asked = self._asks.pop(number, None)
        call = self._gets.pop(number, None)
        if asked is None and (call is None or call.work is None):
            self._send_back(arrival)
            return
        try:
            values = arrival.values(self.exchange.config.allow_pickle)
        except BaseException as error:  # as in _item
            if asked is not None:
                asked._fail(_undecodable(error))
            elif call is not None:
                self._undecodable(call, number, error)
            return
        if asked is not None:
            asked._finish(values)
        elif call is not None:
            call.record = arrival
            self._hand_over(call, values[0] if call.target is None else values)

    def _undecodable(self, call: GetCall, number: int, error: BaseException) -> None:
        if call.lease:
            self.write(entry(Op.BACK, 0, number))
        else:
            self.write(entry(Op.TAKEN, 0, number, extra=1))
        call.fail(_undecodable(error))
        if isinstance(error, KeyboardInterrupt):
            raise error

    def _hand_over(self, call: GetCall, value: Any) -> None:
        work, call.work = call.work, None
        if work is None:
            self.give_back(call, value)
            return
        if not call.lease:
            self._untaken[call.number] = work
            if not self._scheduled and self._look is None:
                self._look = self.home.loop.call_later(_FIRST_LOOK_SECONDS, self._look_again)
        work._finish(value)

    # ---- what was taken, and what goes back

    def _tell_taken(self) -> None:
        """Say which items are somebody's for good. A work whose value nobody has looked at can still give it back."""
        untaken = self._untaken
        first = count = 0
        gone = []
        for number, held in untaken.items():
            work = held() if type(held) is weakref.ref else held
            if work is not None and work._give_back is not None:
                if work is held:
                    untaken[number] = weakref.ref(work)
                continue
            gone.append(number)
            if number == first + count:
                count += 1
                continue
            if count:
                self._write_taken(first, count)
            first, count = number, 1
        if count:
            self._write_taken(first, count)
        for number in gone:
            del untaken[number]
        if untaken and self._look is None:
            self._look = self.home.loop.call_later(self._pause, self._look_again)

    def _write_taken(self, first: int, count: int) -> None:
        self._out.append(entry(Op.TAKEN, 0, first, extra=count))

    def _look_again(self) -> None:
        self._look = None
        before = len(self._untaken)
        self.flush()
        idle = len(self._untaken) == before
        self._pause = min(2 * self._pause, _LAST_LOOK_SECONDS) if idle else _FIRST_LOOK_SECONDS

    def give_back(self, call: GetCall, value: Any) -> None:
        """A get that was done is cancelled: its items go back."""
        self._untaken.pop(call.number, None)
        if self.cause is not None:
            return
        if call.lease:
            self.write(entry(Op.BACK, 0, call.number))
            return
        arrival: Arrival | None = call.record
        call.record = None
        large = [] if arrival is None else arrival.large
        values = [value] if call.target is None else value
        self._return(call.number, [values[index] for index in large])

    def _send_back(self, arrival: Arrival) -> None:
        """Nobody wants it any more."""
        if arrival.lease:
            self.write(entry(Op.BACK, 0, arrival.number))
        else:
            self._return(arrival.number, [arrival.parts[index] for index in arrival.large])

    def _return(self, number: int, large: list[Any]) -> None:
        slots = [next(self._slots) for _ in large]
        self.write(entry(Op.RETURN, 0, number, payload=b"".join(map(_U16.pack, slots))))
        for slot, thing in zip(slots, large, strict=True):
            try:
                if isinstance(thing, Parcel):
                    work = self.exchange.send_parcel(self.host, RETURNS, slot, thing)
                else:
                    work = self.exchange.send(self.host, RETURNS, thing, slot, None)
            except AiorlinfError as error:
                log.warning("an item that was given back to %s is lost: %s", self.host, error)
            else:
                watch(work, lambda _: None)

    def end_lease(self, number: int, *, done: bool) -> None:
        """A lease is over."""
        if self.cause is None:
            self.write(entry(Op.DONE if done else Op.BACK, 0, number))

    # ---- the end

    def end(self, error: AiorlinfError) -> None:
        """The channel worker, or we, are gone: everything that is under way fails with such an error."""
        if self.cause is not None:
            return
        error.fill(remote=str(self.host), local=str(self.exchange.local))
        self.cause = lambda: _again(error)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._on_end(self)
        gets, self._gets = self._gets, {}
        asks, self._asks = self._asks, {}
        self._arrivals.clear()
        self._untaken.clear()
        for port in self.ports.values():
            port.on_end(self.cause)
        for get in gets.values():
            get.fail(self.cause())
        for work in asks.values():
            work._fail(self.cause())

    def close(self, failure: str | None = None) -> None:
        """Our worker is closing, perhaps because of a failure: what nobody has taken goes back."""
        for held in list(self._untaken.values()):
            work = held() if type(held) is weakref.ref else held
            if work is not None:
                work.cancel()
        self.flush()
        if failure is not None:
            post(self.exchange, self.host, LIFE, encode_end(failure))
        self.end(ClosedError("the worker was closed"))


def post(exchange: Exchange, peer: WorkerAddress, context: int, body: bytes) -> None:
    """Send a small message that nobody waits for; if it cannot be delivered, the link has ended, and that is noticed elsewhere."""
    key = stream_key(context, 0)
    link = exchange.table.peek(peer)
    if link is not None and key in link.sender.flowing and link.sender.send_now(key, body):
        return
    work: AsyncWork[None] = AsyncWork(exchange.home, "send")
    watch(work, lambda _: None)
    try:
        exchange._send_small(peer, work, key, body)
    except AiorlinfError as error:
        work._fail(error)


def _undecodable(error: BaseException) -> AiorlinfError:
    if isinstance(error, AiorlinfError):
        return error
    text = f"the item cannot be rebuilt here: {type(error).__name__}: {error}"
    failure = UnsupportedObject(text, operation="get", hint="its class must be importable on both sides")
    failure.__cause__ = error
    return failure


def _again(error: AiorlinfError) -> AiorlinfError:
    """A fresh error of the same content for each call that fails by it."""
    make: Any
    make, arguments = error.__reduce__()
    fresh: AiorlinfError = make(*arguments)
    fresh.__cause__ = error.__cause__
    return fresh
