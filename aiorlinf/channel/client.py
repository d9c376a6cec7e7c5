"""A worker's end of its conversation with one channel worker; the other is `channel.session`."""

from __future__ import annotations

import itertools
import logging
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from aiorlinf.channel.arrival import Arrival, Leaves
from aiorlinf.channel.calls import GetCall
from aiorlinf.channel.claims import Claims
from aiorlinf.channel.entries import GETS, HEAD, HELLO, LIFE, REPLIES, REQUESTS, RETURNS, Bits, Op, encode_end, entries, entry
from aiorlinf.channel.faults import decode_error
from aiorlinf.channel.landing import ANYWHERE, Wish
from aiorlinf.channel.pending import CONTEXTS, asks_under_way, calls_under_way
from aiorlinf.channel.ports import NUMBERS, Ports
from aiorlinf.channel.posting import post
from aiorlinf.channel.stream import GetStream
from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError, ClosedError, InternalError, UnsupportedObject, WireError
from aiorlinf.link.lending import leaves_here, take_leaves
from aiorlinf.link.parcel import Parcel
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.tree import assemble
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.channel.calls import PutCall
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.lending import Stores
    from aiorlinf.link.link import Link
    from aiorlinf.link.pending import PendingOperation
    from aiorlinf.wire.manifest import Manifest
    from aiorlinf.work.home import LoopHome

__all__ = ["Conversation", "PutSide"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_FLUSH_BYTES = 48 * 1024
_FLUSH_COPIED_BYTES = 4 << 20
"""Of payloads that lie where the channel worker can see them: it begins with these while the next ones are copied. Not with fewer: each
message costs three processes more than an item does."""
_SLOTS = 1024
_MOST_AT_ONCE = 65535
_ITEM, _ADMIT = Op.ITEM, Op.ADMIT  # they are compared for every entry
_LARGE, _LEASE, _MORE, _PLACED = Bits.LARGE, Bits.LEASE, Bits.MORE, Bits.PLACED
_U16 = struct.Struct("<H")


class PutSide(Protocol):
    """What the conversation tells a handle (`channel.remote`)."""

    @property
    def number(self) -> int: ...

    def on_admit(self, upto: int) -> None: ...
    def on_go(self, number: int, slot: int) -> None: ...
    def on_again(self, number: int) -> None: ...
    def on_error(self, number: int, error: AiorlinfError) -> None: ...
    def unfinished(self) -> list[PutCall]: ...
    def on_end(self, make_error: Callable[[], AiorlinfError]) -> None: ...


class Conversation:
    """All handles of one worker on channels that one channel worker holds. Home thread only.

    Attributes:
        ports: the handles.
        host: the channel worker.
        cause: makes the error of what is called after the end; None before it.
        contexts: of its messages (see `link.pending.Reporter`).
        next_number: of a call.
    """

    contexts = CONTEXTS

    def __init__(self, exchange: Exchange, host: WorkerAddress, on_end: Callable[[Conversation], None]) -> None:
        self.exchange = exchange
        self.home: LoopHome = exchange.home
        self.host = host
        self.ports: Ports[PutSide] = Ports()
        self.cause: Callable[[], AiorlinfError] | None = None
        self._on_end = on_end
        self._links = exchange.table.by_address
        self._number = random.getrandbits(64)
        self._hello = HELLO
        self.next_number: Callable[[], int] = itertools.count(1).__next__
        self._slots = itertools.cycle(range(1, _SLOTS))
        self.streams: set[GetStream] = set()
        self._gets: dict[int, GetCall | GetStream] = {}
        self._asks: dict[int, AsyncWork[Any]] = {}
        self._arrivals: dict[int, Arrival] = {}
        self.claims: Claims = Claims(exchange.home.loop, self.flush)
        self._wanted: tuple[int, int, float, int, bytes] | None = None  # gets that are alike and not written yet
        self._wanted_from = 0
        self._wanted_count = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._out_copied = 0
        self._commits: dict[int, int] = {}
        self._scheduled = False
        self._rest: Iterator[tuple[int, int, int, int, int, float, int, bytes, bytes]] | None = None
        self._hearing: AsyncWork[Any] | None = None
        exchange.table.reporters.add(self)
        self._listen()

    def pending(self) -> list[PendingOperation]:
        """Calls that are not over, for diagnosis."""
        found = list(calls_under_way(self._gets.values(), "waits for an item"))
        for port in self.ports.kept.values():
            found += calls_under_way(port.unfinished(), "waits for room")
        return found + list(asks_under_way(self._asks.values(), self.host))

    # ---- sending

    def next_port(self) -> int:
        """Of a handle. Raises ClosedError when there are too many."""
        for gone in self.ports.gone():
            self._forget(gone)
        number = self.ports.number()
        if not number:
            raise ClosedError(
                f"{NUMBERS} handles of channels at {self.host} are open", hint="close handles, or keep them instead of making new ones"
            )
        return number

    def _forget(self, port: int) -> None:
        """Nobody can use this handle, which was closed, any more."""
        if self.cause is not None:
            return
        answer: AsyncWork[Any] = AsyncWork(self.home, "forget a handle")
        watch(answer, lambda answer: self.ports.free(port) if answer.exception() is None and answer.result() else None)
        self.ask(answer, Op.CLOSE, port, Bits.FORGET)

    @property
    def link(self) -> Link | None:
        """To the channel worker."""
        return self._links.get(self.host)

    def write(self, data: bytes, copied: int = 0) -> None:
        """An entry; those of one turn of the loop leave together, unless they are many or took long.

        Args:
            copied: bytes that were put down for it.
        """
        if self._wanted_count:
            self._write_gets()
        self._out.append(data)
        self._out_bytes += len(data)
        self._out_copied += copied
        if self._out_bytes > _FLUSH_BYTES or self._out_copied >= _FLUSH_COPIED_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self.home.loop.call_soon(self._flush_soon)

    def commit(self, port: int, number: int) -> None:
        """The puts of this port up to this number are final."""
        self._commits[port] = number
        if not self._scheduled:
            self._scheduled = True
            self.home.loop.call_soon(self._flush_soon)

    def _flush_soon(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send what is there."""
        if self.cause is not None:
            return
        out = self._out
        if self._commits:
            self._write_commits()
        if self._wanted_count:
            self._write_gets()
        if self.claims:
            self.claims.tell(out)
        if not out:
            return
        body = HEAD.pack(self._number, self._hello) + b"".join(out)
        self._hello = 0
        out.clear()
        self._out_bytes = self._out_copied = 0
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

    def start_get(self, call: GetCall | GetStream, port: int, bits: int, value: float, extra: int, key: bytes) -> None:
        """A get: an entry GET of these fields. Those that are alike share one."""
        if self._commits:
            self._write_commits()
        call.number = number = self.next_number()
        self._gets[number] = call
        form = (port, bits, value, extra, key)
        if self._wanted_count:
            if form == self._wanted and number == self._wanted_from + self._wanted_count and self._wanted_count < _MOST_AT_ONCE:
                self._wanted_count += 1
                return
            self._write_gets()
        self._wanted = form
        self._wanted_from = number
        self._wanted_count = 1
        if not self._scheduled:
            self._scheduled = True
            self.home.loop.call_soon(self._flush_soon)

    def _write_gets(self) -> None:
        assert self._wanted is not None
        port, bits, value, extra, key = self._wanted
        count, self._wanted_count = self._wanted_count, 0
        self._out.append(entry(Op.GET, port, self._wanted_from, bits, slot=count - 1, value=value, extra=extra, key=key))

    def stop_get(self, call: GetCall, port: int) -> None:
        """It is not wanted any more. What is on its way goes back when it is here."""
        self.stop_number(call.number, port)

    def stop_number(self, number: int, port: int) -> None:
        """As `stop_get`."""
        if self._gets.pop(number, None) is not None:
            self.write(entry(Op.CANCEL, port, number))

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
                self._hearing = work
                watch(work, self._heard)
                return
            self._take(work)

    def _heard(self, work: AsyncWork[Any]) -> None:
        try:
            self._take(work)
        finally:  # also where Ctrl-C interrupts the code of the program that an answer runs: a notebook's loop goes on after it
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
        except WireError as wrong:
            self._broken(wrong)
            return
        self._go_on()
        self._obey(entries(body))

    def _go_on(self) -> None:
        """With a message that was left in the middle."""
        rest, self._rest = self._rest, None
        if rest is not None and self.cause is None:
            self._obey(rest)

    def _obey(self, rest: Iterator[tuple[int, int, int, int, int, float, int, bytes, bytes]]) -> None:
        try:
            for op, bits, port, slot, number, _, extra, _, payload in rest:
                if op == _ITEM:
                    self._item(bits, slot, number, extra, payload)
                elif op == _ADMIT:
                    if (side := self.ports.kept.get(port)) is not None:
                        side.on_admit(number)
                else:
                    self._obey_rare(op, port, slot, number, payload)
        except WireError as wrong:
            self._broken(wrong)
        except AiorlinfError as closing:
            self.end(closing)
        except Exception as error:  # a fault of ours: whoever waits hears of it
            log.exception("%s ends its conversation with %s", self.exchange.local, self.host)
            self._break_off(InternalError(f"a message of a channel worker was not understood: {type(error).__name__}: {error}"))
        except BaseException:  # Ctrl-C in the program's own code: what else the message holds is not lost
            self._rest = rest
            self.home.loop.call_soon(self._go_on)
            raise

    def _broken(self, wrong: WireError) -> None:
        log.error("%s ends its conversation with %s: %s", self.exchange.local, self.host, wrong)
        self._break_off(wrong)

    def _break_off(self, error: AiorlinfError) -> None:
        """The channel worker is told, so that it hands out nothing to calls that have failed."""
        post(self.exchange, self.host, LIFE, encode_end(self._number, str(error)))
        self.end(error)

    def _obey_rare(self, op: int, port: int, slot: int, number: int, payload: bytes) -> None:
        side = self.ports.kept.get(port)
        if op == Op.GO:
            if side is not None:
                side.on_go(number, slot)
        elif op == Op.AGAIN:
            if side is not None:
                side.on_again(number)
        elif op == Op.ANSWER:
            work = self._asks.pop(number, None)
            if work is not None:
                work._finish(orjson.loads(payload) if payload else None)
        elif op == Op.ERROR:
            error = decode_error(payload)
            self._arrivals.pop(number, None)
            get = self._gets.pop(number, None)
            work = self._asks.pop(number, None)
            if get is not None:
                get.failed(number, error)
            elif work is not None:
                work._fail(error)
            elif side is not None:
                side.on_error(number, error)
        elif op == Op.END:
            raise decode_error(payload)
        else:
            raise WireError(f"unknown entry {op} of a channel")

    # ---- items

    def _item(self, bits: int, slot: int, number: int, extra: int, payload: bytes) -> None:
        arrival = self._arrivals.get(number) if self._arrivals else None
        if arrival is None:
            if extra:
                return  # asked for again, and cancelled meanwhile
            call = self._gets.get(number)
            if call is not None and not bits & (_MORE | _LEASE) and call.target is None and not call.wish.everything:
                # The common cases: one item, which is here.
                if not bits & _LARGE:
                    self._item_here(call, number, memoryview(payload), ())
                    return
                if bits & _PLACED and (leaves := leaves_here(self.link, payload)) is not None:
                    self._item_here(call, number, leaves[0], leaves[1])
                    return
            arrival = self._arrivals[number] = Arrival(number, bool(bits & _LEASE))
        large = bool(bits & _LARGE)
        if extra:
            self._receive(arrival, extra - 1, slot)
            return
        index = arrival.expect(None if large else payload, last=not bits & _MORE)
        if bits & _PLACED:
            take_leaves(self.link, payload, lambda manifest, stores: self._placed(arrival, index, manifest, stores), private=arrival.lease)
        elif large:
            arrival.messages.append(index)
            self._receive(arrival, index, slot)
        elif arrival.complete:
            self._complete(arrival)

    def _item_here(self, call: GetCall | GetStream, number: int, what: memoryview | Manifest, stores: Stores) -> None:
        """A single item that nothing has to be waited for: a small one, or the leaves of a large one. What `_landed` does, in one go."""
        del self._gets[number]
        try:
            allow_pickle = self.exchange.config.allow_pickle
            if isinstance(what, memoryview):
                value = decode_inline(what, allow_pickle=allow_pickle)
            else:
                value = assemble(what, stores, allow_pickle=allow_pickle)
        except BaseException as error:  # whatever unpickled code raises, sys.exit() too, concerns this item only
            self._undecodable(call, number, error)
            return
        self._hand_over(call, number, value, ())

    def _receive(self, arrival: Arrival, index: int, slot: int) -> None:
        work = self.exchange.recv_parcel(self.host, GETS, slot)
        watch(work, lambda work: self._part(arrival, index, work))

    def _placed(self, arrival: Arrival, index: int, manifest: Manifest, stores: Stores | None) -> None:
        if self.cause is not None:
            return
        if stores is None:
            self.write(entry(Op.AGAIN, 0, arrival.number, extra=index))
            return
        arrival.part(index, Leaves(manifest, stores))
        if arrival.complete:
            self._complete(arrival)

    def _part(self, arrival: Arrival, index: int, work: AsyncWork[Any]) -> None:
        if self.cause is not None or work.cancelled():
            return
        error = work.exception()
        arrival.part(index, error if error is not None else work.result())
        if arrival.complete:
            self._complete(arrival)

    def _complete(self, arrival: Arrival) -> None:
        """All of it is here: bring tensors to their devices, and hand it over."""
        number = arrival.number
        call = self._gets.get(number)
        if number not in self._asks and (call is None or (call.work is None and not isinstance(call, GetStream))):
            self._arrivals.pop(number, None)
            self._gets.pop(number, None)
            self._send_back(arrival)
            return
        wish = call.wish if call is not None else ANYWHERE
        if wish.device is None and self.exchange.device is not None:
            wish = Wish(self.exchange.device, wish.everything)
        try:
            if arrival.land(self.home, wish, lambda error: self._landed(arrival, error)):
                return
        except Exception as error:  # what the item is not, or what the device says
            self._landed(arrival, error)
        else:
            self._landed(arrival, None)

    def _landed(self, arrival: Arrival, error: Exception | None) -> None:
        number = arrival.number
        if self.cause is not None:
            return
        self._arrivals.pop(number, None)
        asked = self._asks.pop(number, None)
        call = self._gets.pop(number, None)
        if asked is None and (call is None or (call.work is None and not isinstance(call, GetStream))):
            self._send_back(arrival)
            return
        values: list[Any] = []
        wrong: BaseException | None = error
        if wrong is None:
            try:
                values = arrival.values(self.exchange.config.allow_pickle)
            except BaseException as found:  # as in _item
                wrong = found
        if wrong is not None:
            if asked is not None:
                asked._fail(_undecodable(wrong))
            elif call is not None:
                self._undecodable(call, number, wrong)
        elif asked is not None:
            asked._finish(values)
        elif call is not None:
            self._hand_over(call, number, values[0] if call.target is None else values, arrival.messages)

    def _undecodable(self, call: GetCall | GetStream, number: int, error: BaseException) -> None:
        if call.lease:
            self.write(entry(Op.BACK, 0, number))
        else:
            self.write(entry(Op.TAKEN, 0, number, extra=1))
        call.failed(number, _undecodable(error))
        if isinstance(error, KeyboardInterrupt):
            raise error

    def _hand_over(self, call: GetCall | GetStream, number: int, value: Any, messages: Sequence[int]) -> None:
        if isinstance(call, GetStream):
            call.arrived(number, value, messages)
            return
        call.record = messages
        work, call.work = call.work, None
        if work is None:
            self.give_back(call, value)
            return
        if not call.lease:
            self.claims.add(number, work)
        work._finish(value)

    # ---- what goes back

    def give_back(self, call: GetCall, value: Any) -> None:
        """A get that was done is cancelled: its items go back."""
        self.claims.drop(call.number)
        if self.cause is not None:
            return
        if call.lease:
            self.write(entry(Op.BACK, 0, call.number))
            return
        messages, call.record = call.record, None
        self.send_values_back(call.number, [value] if call.target is None else value, messages or ())

    def send_values_back(self, number: int, values: Sequence[Any], messages: Sequence[int]) -> None:
        """What get `number` was given goes back. The channel worker has it but for those that came as messages."""
        self._return(number, [values[index] for index in messages])

    def _send_back(self, arrival: Arrival) -> None:
        """Nobody wants it any more."""
        if arrival.lease:
            self.write(entry(Op.BACK, 0, arrival.number))
        else:
            self._return(arrival.number, [arrival.parts[index] for index in arrival.messages])

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
        if self._hearing is not None:
            self._hearing.cancel()  # what comes next is for the next conversation
        self._on_end(self)
        gets, self._gets = self._gets, {}
        asks, self._asks = self._asks, {}
        self._arrivals.clear()
        self.claims.close()
        for port in self.ports.kept.values():
            port.on_end(self.cause)
        for number, get in gets.items():
            get.failed(number, self.cause())
        for work in asks.values():
            work._fail(self.cause())

    def close(self, failure: str | None = None) -> None:
        """Our worker is closing, perhaps because of a failure: what nobody has taken goes back."""
        for stream in list(self.streams):
            stream.close()
        self.claims.give_all_back()
        for number, get in self._gets.items():  # they will fail, so what is on its way to them is not taken
            if isinstance(get, GetCall):
                self.write(entry(Op.CANCEL, cast("PutSide", get.port).number, number))  # all ports here are a channel worker's
        self.flush()
        if failure is not None:
            post(self.exchange, self.host, LIFE, encode_end(self._number, failure))
        self.end(ClosedError("the worker was closed"))


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
