"""A handle of a channel that another worker holds."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from aiorlinf.channel.calls import GetCall, PutCall
from aiorlinf.channel.entries import FIXED, PUTS, Bits, Op, encode_key, entry
from aiorlinf.channel.putting import Confirming
from aiorlinf.channel.stats import ChannelStats
from aiorlinf.channel.stream import GetStream
from aiorlinf.channel.watching import watch
from aiorlinf.collective.giving import Gift, encode_giving
from aiorlinf.errors import AiorlinfError, ChannelClosed
from aiorlinf.link.lending import INLINE_BYTES, put_down
from aiorlinf.link.outgoing import Outgoing
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.frames import stream_key
from aiorlinf.wire.inline import encode_inline
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.channel.client import Conversation
    from aiorlinf.channel.landing import Wish
    from aiorlinf.channel.records import Key
    from aiorlinf.channel.settings import ChannelSettings
    from aiorlinf.work.home import LoopHome

__all__ = ["RemotePort"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_PUT, _LARGE, _NOWAIT, _PLACED = Op.PUT, Bits.LARGE, Bits.NOWAIT, Bits.PLACED
_FIXED = FIXED.pack
_SMALL_BYTES = 64 * 1024

_AHEAD_BYTES = 32 << 20
"""So much of the payloads that wait for room is copied to shared memory beforehand."""


class _Item:
    """A payload that does not ride in its entry, or one that holds tensors that are given away.

    Attributes:
        body: the whole payload if it is small.
        work, out: that it is sent as a message, and that; None as long as it is not.
        flat, manifest, total: a large payload of which no message was made yet.
        placed: it lies where the channel worker can see it.
        versions: those of its tensors when it was put.
    """

    __slots__ = ("body", "flat", "manifest", "out", "placed", "total", "versions", "work")

    def __init__(self, total: int, body: bytes | None = None, flat: Flat | None = None, manifest: bytes = b"") -> None:
        self.body = body
        self.work: AsyncWork[None] | None = None
        self.out: Outgoing | None = None
        self.flat = flat
        self.manifest = manifest
        self.total = total
        self.placed = False
        self.versions = None if flat is None else flat.versions()

    def message(self, work: AsyncWork[None]) -> Outgoing:
        """One of it."""
        assert self.flat is not None
        self.work = work
        self.out = out = Outgoing(work, 0, flat=self.flat, manifest=self.manifest, total=self.total)
        out.versions = self.versions
        self.flat = None
        return out

    def stop(self) -> None:
        """It is not put after all: tensors that were given away come back."""
        self.flat = None
        if self.out is not None and self.out.sender is None:
            self.out.restore()
        if self.work is not None:
            self.work.cancel()

    def gone(self) -> None:
        """It has left in an entry."""
        if self.out is not None:
            self.out.moved = []


class RemotePort:
    """See `calls.Port`.

    A put is announced to the channel worker, with its payload if that is small. When it has room there the put is committed here, unless it
    was cancelled meanwhile; a large payload is sent before that. So there is one moment, here, in which a put becomes final.
    """

    def __init__(self, conversation: Conversation, settings: ChannelSettings) -> None:
        self.home: LoopHome = conversation.home
        self.name: str = settings.name
        self.settings = settings
        self.number: int = conversation.next_port()
        self._conversation = conversation
        self._exchange = conversation.exchange
        self._puts: dict[int, PutCall] = {}
        self._unadmitted: deque[PutCall] = deque()
        self._order: deque[PutCall] = deque()  # not committed; a put is final when all before it are settled
        self._confirming = Confirming(self.home, self._commit, self._retract)
        self._ahead = 0  # bytes of payloads that lie where the channel worker can see them, and have no room yet as far as we know
        self._closed = False
        conversation.ports.kept[self.number] = self

    # ---- any thread

    def check(self) -> None:
        self._exchange.check(0)
        if self._conversation.cause is not None:
            raise self._conversation.cause()

    def prepare(self, item: Any) -> tuple[Any, int]:
        exchange = self._exchange
        config = exchange.config
        memory = exchange.table.memory
        limit = min(config.inline_max_bytes, _SMALL_BYTES)
        message: bytes | Flat
        gift: Gift | None = None
        if memory is not None and memory.used:
            message, gift = encode_giving(item, memory, limit, config.allow_pickle)
        else:
            message = encode_inline(item, limit, allow_pickle=config.allow_pickle)
        if type(message) is bytes and len(message) <= _SMALL_BYTES:
            if gift is None:
                return message, len(message)
            given = _Item(len(message), message)
            given.work = work = self._message_work()
            given.out = Outgoing(work, 0, body=message, total=len(message))
            gift.give(given.out)
            return given, len(message)
        if gift is None and type(message) is Flat and not message.on_devices:
            total = message.payload_bytes
            manifest = exchange.describe(message, total)
            message.hold()
            return _Item(total, None, message, manifest), total + len(manifest)
        work = self._message_work()
        out = exchange._large(work, 0, message)
        if gift is not None:
            gift.give(out)
        if out.flat is not None:
            out.flat.hold()
        large = _Item(out.total)
        large.work, large.out = work, out
        return large, out.total + len(out.manifest)

    def _message_work(self) -> AsyncWork[None]:
        return AsyncWork(self.home, "put", abort=self._exchange._withdraw)

    # ---- puts, home thread

    def start_put(self, call: PutCall) -> None:
        item = call.payload
        cause = self._conversation.cause
        if call.work is None or self._closed or cause is not None:
            if isinstance(item, _Item):
                item.stop()
            call.payload = None
            if cause is not None:
                call.fail(cause())
            else:
                call.fail(ChannelClosed(f"this handle of channel {self.name!r} was closed", operation="put"))
            return
        if self.home.trace is not None:
            self.home.trace.call(call.work, f"channel {self.name!r}")
        call.number = number = self._conversation.next_number()
        bits = _NOWAIT if call.nowait else 0
        copied = 0
        if type(item) is bytes:
            call.payload = None
            body = item
        else:
            body = item.body or b""
            if item.body is None:
                bits |= _LARGE
                told = self._put_down(item)
                if told is not None:
                    bits |= _PLACED
                    body = told
                    copied = item.total
        self._puts[number] = call
        self._unadmitted.append(call)
        self._order.append(call)
        key = b"" if call.key is None else encode_key(call.key)
        # `entry`, in line.
        fixed = _FIXED(_PUT, bits, self.number, 0, len(key), len(body), number, call.weight, call.nbytes)
        self._conversation.write(fixed + key + body, copied)

    def _put_down(self, item: _Item) -> bytes | None:
        """Copy a payload to where the channel worker can see it, before it is asked for, unless that is much or impossible."""
        flat = item.flat
        if flat is None or item.total > INLINE_BYTES or self._ahead + item.total > _AHEAD_BYTES:
            return None
        told = put_down(self._conversation.link, flat, item.manifest, item.total, item.versions)
        if told is not None:
            item.placed = True
            self._ahead += item.total
        return told

    def _not_ahead(self, item: Any) -> None:
        """The channel worker has heard of it, or will not want it."""
        if type(item) is _Item and item.placed:
            item.placed = False
            self._ahead -= item.total

    def on_again(self, number: int) -> None:
        """The channel worker has not found this payload: it will ask for it."""
        call = self._puts.get(number)
        if call is not None:
            self._not_ahead(call.payload)

    def stop_put(self, call: PutCall) -> None:
        if type(call.payload) is bytes:
            call.payload = None
        if call.number:
            self._retract(call)
        elif call.payload is not None:
            call.payload.stop()

    def _drop(self, call: PutCall) -> None:
        """Cancelled, or its payload could not be sent."""
        if self._puts.pop(call.number, None) is not None and self._conversation.cause is None:
            call.settled = True
            self._conversation.write(entry(Op.RETRACT, self.number, call.number))
            self._advance()

    def on_admit(self, upto: int) -> None:
        """All puts up to this number have room, but for those that have failed."""
        unadmitted = self._unadmitted
        finished = []
        while unadmitted and unadmitted[0].number <= upto:
            call = unadmitted.popleft()
            item = call.payload
            if call.settled:
                continue
            if item is not None and item.body is None:
                if not item.placed:
                    continue
                self._not_ahead(item)
                item.flat = None
            finished.append(call)
        self._finish(finished)

    def _finish(self, calls: list[PutCall]) -> None:
        """Tell the callers, which may run their code."""
        for index, call in enumerate(calls):
            try:
                self._confirming.finish(call)
            except BaseException:
                if rest := calls[index + 1 :]:  # Ctrl-C in a then-step, say: the others are told all the same
                    self.home.loop.call_soon(self._finish, rest)
                raise

    def _commit(self, call: PutCall) -> None:
        """It is final."""
        item, call.payload = call.payload, None
        if item is not None:
            item.gone()
        if self._puts.pop(call.number, None) is not None:
            call.settled = True
            self._advance()

    def _retract(self, call: PutCall) -> None:
        """It is not put after all."""
        item, call.payload = call.payload, None
        if item is not None:
            self._not_ahead(item)
            item.stop()
        self._drop(call)

    def on_go(self, number: int, slot: int) -> None:
        """The payload of this put is expected."""
        call = self._puts.get(number)
        if call is None:
            return  # cancelled meanwhile; the channel worker will hear of it
        item: _Item = call.payload
        work, out = item.work, item.out
        if work is None or out is None:
            work = self._message_work()
            out = item.message(work)
        out.key = stream_key(PUTS, slot)
        watch(work, lambda work: self._sent(call, work))
        try:
            self._exchange._send(self._conversation.host, out)
        except AiorlinfError as error:
            work._fail(error)

    def _sent(self, call: PutCall, work: AsyncWork[None]) -> None:
        """The payload of a put is with the channel worker, or will never be."""
        if call.number not in self._puts or work.cancelled():
            return
        error = work.exception()
        if error is not None:
            call.payload = None
            self._drop(call)
            call.fail(error)
        else:
            self._confirming.finish(call)

    def on_error(self, number: int, error: AiorlinfError) -> None:
        """This put has failed."""
        call = self._puts.pop(number, None)
        if call is None:
            return
        call.settled = True
        item, call.payload = call.payload, None
        if item is not None:
            self._not_ahead(item)
            item.stop()
        self._advance()
        call.fail(error)

    def _advance(self) -> None:
        """Commit what has nothing unsettled before it."""
        order = self._order
        number = 0
        while order and order[0].settled:
            number = order.popleft().number
        if number:
            self._conversation.commit(self.number, number)
            self._rest()

    def _rest(self) -> None:
        """Nothing is put any more: the conversation need not keep this handle."""
        if self._closed and not self._puts and not self._order:
            self._unadmitted.clear()
            self._conversation.ports.rest(self)

    def unfinished(self) -> list[PutCall]:
        """Puts that are not final, for diagnosis."""
        return list(self._puts.values())

    def on_end(self, make_error: Callable[[], AiorlinfError]) -> None:
        """The channel is gone."""
        puts, self._puts = self._puts, {}
        self._confirming.close()
        self._unadmitted.clear()
        self._order.clear()
        for call in puts.values():
            item, call.payload = call.payload, None
            if item is not None:
                item.stop()
            call.fail(make_error())

    # ---- gets, home thread

    def start_get(self, call: GetCall) -> None:
        if call.work is None:
            return
        if self.home.trace is not None:
            self.home.trace.call(call.work, f"channel {self.name!r}")
        conversation = self._conversation
        if conversation.cause is not None:
            call.fail(conversation.cause())
            return
        bits = (Bits.NOWAIT if call.nowait else 0) | (Bits.LEASE if call.lease else 0) | (0 if call.target is None else Bits.BATCH)
        extra = 0 if call.seconds is None else max(1, round(call.seconds * 1000))
        key = b"" if call.key is None else encode_key(call.key)
        conversation.start_get(call, self.number, bits, call.target or 0.0, extra, key)

    def stream(self, key: Key, count: int, wish: Wish) -> GetStream:
        return GetStream(self, self._conversation, key, count, wish)

    def stop_get(self, call: GetCall) -> None:
        if call.number and self._conversation.cause is None:
            self._conversation.stop_get(call, self.number)

    def give_back(self, call: GetCall, value: Any) -> None:
        self._conversation.give_back(call, value)

    def end_lease(self, call: GetCall, *, done: bool) -> None:
        self._conversation.end_lease(call.number, done=done)

    # ---- the rest, home thread

    def ask(self, work: AsyncWork[Any], what: str, key: Key, all_keys: bool) -> None:
        if self._conversation.cause is not None:
            work._fail(self._conversation.cause())
            return
        answer: AsyncWork[Any] = AsyncWork(self.home, what)
        watch(answer, lambda answer: _pass_on(answer, work, what))
        self._conversation.ask(answer, Op.ASK, self.number, Bits.ALL_KEYS if all_keys else 0, what.encode(), encode_key(key))

    @property
    def lost(self) -> Callable[[], AiorlinfError] | None:
        """Makes the error of what is called after the end of the channel worker; None before it."""
        return self._conversation.cause

    def question(self, what: bytes, key: Key = None) -> AsyncWork[Any]:
        """Ask what only the parts of a channel ask each other."""
        work: AsyncWork[Any] = AsyncWork(self.home, "connect_channel", abort=lambda _: None)
        watch(work, lambda _: None)
        if self._conversation.cause is not None:
            work._fail(self._conversation.cause())
        else:
            self._conversation.ask(work, Op.ASK, self.number, 0, what, b"" if key is None else encode_key(key))
        return work

    def forget_put(self, call: PutCall) -> None:
        """This one will not be started."""
        item, call.payload = call.payload, None
        if isinstance(item, _Item):
            item.stop()

    def report(self, free_memory: int | None) -> None:
        if self._conversation.cause is None:
            bits = Bits.NOWAIT if free_memory is None else 0
            self._conversation.write(entry(Op.REPORT, self.number, 0, bits, extra=free_memory or 0))

    def close(self, work: AsyncWork[None], *, shutdown: bool, immediate: bool) -> None:
        if self._conversation.cause is not None:
            work._finish(None)  # there is nothing left to close
            return
        if not shutdown:
            self._closed = True
            self._rest()
        bits = (Bits.SHUTDOWN if shutdown else 0) | (Bits.IMMEDIATE if immediate else 0)
        self._conversation.ask(work, Op.CLOSE, self.number, bits)

    def give_up(self) -> None:
        """Nobody has got this handle, nor will: it counts for nothing."""
        if not self._closed and self._conversation.cause is None:
            self._closed = True
            self._conversation.ports.drop(self.number)
            self._conversation.write(entry(Op.CLOSE, self.number, 0, Bits.NOWAIT))

    def refused(self) -> None:
        """The channel worker has none of this: nobody will get this handle."""
        self._closed = True
        self._conversation.ports.free(self.number)

    def open(self, work: AsyncWork[Any], who: dict[str, Any]) -> None:
        """Tell the channel worker of this handle; the work is done when it knows."""
        payload = orjson.dumps({"settings": self.settings.to_dict(), **who})
        self._conversation.ask(work, Op.OPEN, self.number, 0, payload)

    def describe(self) -> str:
        settings = self.settings
        bounds = [f"maxsize {settings.maxsize}"] if settings.maxsize else []
        bounds += [f"max_bytes {settings.max_bytes}"] if settings.max_bytes is not None else []
        bounds += [settings.policy] if settings.policy else []
        state = "" if self._conversation.cause is None else ", lost"
        return f"{self.name!r} at {settings.worker}{''.join(f', {part}' for part in bounds)}{state}"


def _pass_on(answer: AsyncWork[Any], work: AsyncWork[Any], what: str) -> None:
    error = answer.exception()
    if error is not None:
        work._fail(error)
        return
    value = answer.result()
    if what == "stats":
        value = ChannelStats.from_dict(value)
    elif what == "peek":
        value = value or []
    work._finish(value)
