"""The receiving half of a link: matching, small messages, the window's reports.

A message is matched when it is announced, delivered when it is complete. Small ones come whole, and end here; for the payloads of larger
ones see `link.payloads`, for what is cancelled `link.returns`, and for tensors that wait in both directions `link.lockout`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from aiorlinf.codec.pressure import installed_memory
from aiorlinf.errors import AiorlinfError, Mismatch, UsageError, WireError
from aiorlinf.link.delivery import Delivery, about, undecodable_fact
from aiorlinf.link.incoming import Content, Incoming, ParcelReceive, Receive, Whole
from aiorlinf.link.lockout import LockOut
from aiorlinf.link.mailbox import Mailbox
from aiorlinf.link.payloads import Payloads, ReceiveLane
from aiorlinf.link.returns import Returns
from aiorlinf.link.shared_in import SharedIn
from aiorlinf.link.window import FRAME_COST, ReceiveWindow
from aiorlinf.wire.frames import MESSAGE_ID, OPEN_PREFIX, PLACED_PREFIX, Flag, FrameType, frame
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.leaves import read_spec
from aiorlinf.wire.manifest import Limits, known_manifest
from aiorlinf.wire.tensor_header import check_tensor_fits, decode_tensor_spec, describe_spec, describe_tensor
from aiorlinf.wire.tree import assemble
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.finished import arrived

if TYPE_CHECKING:
    from aiorlinf.address import Identity
    from aiorlinf.codec.pool import TensorBufferPool
    from aiorlinf.config import CollectiveConfig
    from aiorlinf.link.connection import FrameWriter
    from aiorlinf.link.device_in import DeviceIn
    from aiorlinf.link.link_coding import LinkCoding
    from aiorlinf.link.parcel import Parcel
    from aiorlinf.link.tracing import LinkTrace
    from aiorlinf.wire.manifest import Manifest
    from aiorlinf.work.home import LoopHome

__all__ = ["Receiver"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_REPORT_SECONDS = 0.005
_FLOWING_LIMIT = 4096
_OPENED_LIMIT = 1 << 16
_MAX_TOTAL = (1 << 64) - 1
_LARGE_BYTES = 1 << 30
"""Only from this size on it is worth asking how much memory there is."""

_QUICK_HEAD_BYTES = 64 * 1024
"""A longer description is looked at for longer, and perhaps in a private thread."""


class Receiver:
    """See the module. Everything here runs on the home thread.

    Attributes:
        lane, shared: the ways around the stream that this side has.
        coding: what undoes a codec's work; None: the job does not compress.
        devices: takes what comes from device to device; None: nothing does.
        pool: memory of payloads; None: each has memory of its own.
        messages, payload_bytes: received so far.
        mismatches: messages refused because the receive expected something else.
        opened: by message id, messages whose trailer has not come.
        lockout, payloads, returns: the parts of this half that have files of their own.
        on_late: called when a message is given back after the link has ended.
        trace: is told what happens, None: nobody is.
    """

    def __init__(self, home: LoopHome, mailbox: Mailbox, config: CollectiveConfig, local: str, remote: str) -> None:
        self.home = home
        self.mailbox = mailbox
        self.local = local
        self.remote = remote
        self.lane: ReceiveLane | None = None
        self.shared: SharedIn | None = None
        self.coding: LinkCoding | None = None
        self.devices: DeviceIn | None = None
        self.pool: TensorBufferPool | None = None
        self.trace: LinkTrace | None = None
        self.messages: int = 0
        self.payload_bytes: int = 0
        self.mismatches: int = 0
        self.opened: dict[int, Incoming] = {}
        self.on_late: Callable[[], None] = lambda: None
        self.window: ReceiveWindow = ReceiveWindow(config.window_bytes)
        self.delivery: Delivery = Delivery(self, config.allow_pickle)
        self.lockout: LockOut = LockOut(self)
        self.returns: Returns = Returns(self)
        self.payloads: Payloads = Payloads(self)
        self.configure(config)
        self._conn: FrameWriter | None = None
        self._report_scheduled = False
        self._flowing: set[int] = set()
        self._unmatched = self.lockout.unmatched  # looked at for each message that nobody waits for

    def configure(self, config: CollectiveConfig) -> None:
        """Take over the bounds on what a peer can make us allocate."""
        self.window.size = config.window_bytes
        self.allow_pickle: bool = config.allow_pickle
        self.delivery.allow_pickle = config.allow_pickle
        self._max_message_bytes = config.max_message_bytes
        self._quick_bytes = min(config.max_message_bytes, _LARGE_BYTES)
        # What is too large is refused, for itself (`_too_large`); it is not malformed.
        self._limits = Limits(max_manifest_bytes=config.max_manifest_bytes, max_message_bytes=_MAX_TOTAL)

    @property
    def identity(self) -> Identity | None:
        """The life of the peer, None while the link is not up."""
        identity: Identity | None = self.mailbox.owner.identity
        return identity

    def up(self, conn: FrameWriter) -> None:
        """The link is connected."""
        self._conn = conn

    def reply(self, kind: int, key: int, body: bytes = b"", flags: int = 0) -> None:
        """Send a small frame, unless the link has ended."""
        if self._conn is not None:
            self._conn.answer(frame(kind, key, body, flags))

    # ---- the window

    def consume(self, message: Incoming) -> None:
        """The message is taken: its room in the window is free again."""
        cost, message.charged = message.charged, 0
        if cost:
            self._consume(cost)

    def _consume(self, cost: int) -> None:
        if self.window.consume(cost):
            self._report()
        elif not self._report_scheduled:
            self._report_later()

    def _report_later(self) -> None:
        """It rides on the next write; if there is none, it goes alone after a few milliseconds."""
        self._report_scheduled = True
        self.home.loop.call_later(_REPORT_SECONDS, self._late_report)

    def _late_report(self) -> None:
        self._report_scheduled = False
        self._report()

    def _report(self) -> None:
        data = self.take_report()
        if data is not None and self._conn is not None:
            self._conn.answer(data)

    def take_report(self, *, riding: bool = False) -> bytes | None:
        """The CREDIT frame that is due, if any. One that rides on another write costs the peer a frame all the same."""
        if self._conn is None or (riding and not self.window.worth_telling):
            return None
        total = self.window.report()
        return None if total is None else frame(FrameType.CREDIT, total)

    # ---- arrivals

    def on_data(self, key: int, flags: int, body: memoryview) -> None:
        """A whole small message."""
        self.messages += 1
        size = len(body)
        if not flags and (receive := self.mailbox.waiting_plain(key)) is not None:
            # The common case in one go: somebody waits for it, nobody waits for an answer.
            self.payload_bytes += size
            try:
                urgent = self.window.pass_through(size + FRAME_COST)
            except WireError:
                self.mailbox.post(key, receive, at_head=True)  # who is taken from the mailbox must be served: it ends with the link
                raise
            if urgent:
                self._report()
            elif not self._report_scheduled:
                self._report_later()
            receive.order = next(self.mailbox.orders)
            if self.trace is not None:
                self.trace.passed(self.messages, size, key, receive)
            if key not in self._flowing:
                self._flow(key)
            try:
                value = decode_inline(body, allow_pickle=self.allow_pickle)
            except BaseException as error:  # as in ready
                self._undecodable(receive, error)
                return
            work = receive.work
            receive.work = None
            if work is not None:
                work._finish(value)
            return
        message_id = 0
        if flags & Flag.WANT_REPLY:
            if size < MESSAGE_ID.size:
                raise WireError("a message whose sender wants an answer has no number")
            (message_id,) = MESSAGE_ID.unpack_from(body)
            body = body[MESSAGE_ID.size :]
            size -= MESSAGE_ID.size
        self.payload_bytes += size
        cost = size + FRAME_COST
        self.window.arrive(cost)
        mailbox = self.mailbox
        order = next(mailbox.orders)
        if self.trace is not None:
            self.trace.came(self.messages, size, key, order)
        if flags:
            self._on_flagged(key, flags, order, message_id, cost, body)
            return
        receive = mailbox.waiting(key)
        if receive is None:
            self.keep(Whole(key, order, bytes(body), cost))
        elif receive.tensor_out is None:
            self._consume(cost)
            receive.order = order
            if key not in self._flowing:
                self._flow(key)
            self._hand_out(receive, body)
        else:
            self.match(receive, Whole(key, order, bytes(body), cost))

    def _on_flagged(self, key: int, flags: int, order: int, message_id: int, cost: int, body: memoryview) -> None:
        """A whole small message whose sender waits for an answer, or a tensor."""
        message = Incoming(key, order, message_id, is_tensor=bool(flags & Flag.TENSOR), want_reply=bool(flags & Flag.WANT_REPLY))
        message.charged = cost
        message.complete = True
        if message.is_tensor:
            spec, offset = read_spec(body, 0)
            body = body[offset:]
            if len(body) != spec.nbytes:
                raise WireError(f"a tensor of {spec.nbytes} bytes came with {len(body)}")
            message.content = Content(None, spec, spec.nbytes)
        receive = self.mailbox.waiting(key)  # not before: who is taken from the mailbox must be served
        if receive is not None:
            message.body = body  # used up before this call returns
            self.match(receive, message)
        else:
            message.body = bytes(body)
            self.keep(message)

    def on_open(self, key: int, flags: int, body: memoryview) -> None:
        """A larger message is announced."""
        if len(body) < OPEN_PREFIX.size:
            raise WireError("an OPEN frame is cut short")
        message_id, total = OPEN_PREFIX.unpack_from(body)
        self._announced(key, flags, message_id, total, bytes(body[OPEN_PREFIX.size :]))

    def on_placed(self, key: int, flags: int, body: memoryview) -> None:
        """A larger message is here, all of it: its payload lies in memory of the peer."""
        size = PLACED_PREFIX.size
        if len(body) < size:
            raise WireError("a PLACED frame is cut short")
        message_id, total, place_size = PLACED_PREFIX.unpack_from(body)
        end = size + place_size
        if end > len(body):
            raise WireError("a PLACED frame ends before its place does")
        place, head = body[size:end], bytes(body[end:])
        if not self._pass_placed(key, flags, message_id, total, place, head):
            self._announced(key, flags | Flag.BEGUN, message_id, total, head)
            self.payloads.on_placed(message_id, flags, place)

    def _pass_placed(self, key: int, flags: int, message_id: int, total: int, place: memoryview, head: bytes) -> bool:
        """The common case in one go: a plain `recv` waits for it, and nothing is out of the ordinary. False: it is."""
        shared = self.shared
        if shared is None or self.trace is not None or flags & ~Flag.CHARGED != Flag.WANT_REPLY or message_id in self.opened:
            return False
        if total > self._quick_bytes or len(head) > _QUICK_HEAD_BYTES or not self.mailbox.plain_waits(key):
            return False
        manifest = self._manifest(head, total)
        if manifest.spliced or manifest.on_devices:
            return False
        stores = shared.stores(manifest.sizes, place)
        if stores is None:
            return False
        urgent = bool(flags & Flag.CHARGED) and self.window.pass_through(total + FRAME_COST)
        receive = self.mailbox.waiting_plain(key)
        assert receive is not None
        self.messages += 1
        self.payload_bytes += total
        receive.order = next(self.mailbox.orders)
        try:
            value = assemble(manifest, stores, allow_pickle=self.allow_pickle)
        except BaseException as error:  # as in ready
            failure = self.delivery.undecodable(error, receive)
            self._flowing.discard(key)
            self.reply(FrameType.REFUSED, message_id, orjson.dumps(undecodable_fact(failure)))
            receive.fail(failure)
            if isinstance(error, KeyboardInterrupt):
                raise
            return True
        self.reply(FrameType.ACCEPTED, message_id)
        if key not in self._flowing:
            self._flow(key)
        if urgent:
            self._report()
        elif not self._report_scheduled:
            self._report_later()
        work = receive.work
        receive.work = None
        if work is not None:
            work._finish(value)
        return True

    def _announced(self, key: int, flags: int, message_id: int, total: int, head: bytes) -> None:
        self.messages += 1
        if message_id in self.opened or len(self.opened) >= _OPENED_LIMIT:
            raise WireError(f"message {message_id} is opened twice, or too many are open ({len(self.opened)})")
        self.payload_bytes += total
        message = Incoming(
            key, self.mailbox.next_order(), message_id, is_tensor=bool(flags & Flag.TENSOR), want_reply=bool(flags & Flag.WANT_REPLY)
        )
        if self.trace is not None:
            self.trace.came(self.messages, total, key, message.order)
        message.content = self._describe(flags, head, total)
        message.content.begun = bool(flags & Flag.BEGUN)
        self.opened[message_id] = message
        receive = self.mailbox.waiting(key)
        text = self._too_large(total, message.is_tensor)
        if text is not None:
            message.want_reply = True
            self.refuse(message, {"why": "too large", "message": text})
            if receive is not None:
                receive.fail(about(UsageError(text), receive))
        elif receive is not None:
            self.match(receive, message)
        else:
            self.keep(message)

    def _too_large(self, total: int, is_tensor: bool) -> str | None:
        """Why a message of this size is refused before anything is allocated for it, None if it is not."""
        if total > self._max_message_bytes:
            return f"a message of {total} bytes is over the receiver's max_message_bytes of {self._max_message_bytes}"
        # A tensor goes into memory that the receiver has.
        if total > _LARGE_BYTES and not is_tensor and total > (installed := installed_memory()):
            return f"a message of {total} bytes is larger than all memory that the receiver has, {installed} bytes"
        return None

    def _describe(self, flags: int, head: bytes, total: int) -> Content:
        if flags & Flag.TENSOR:
            spec = decode_tensor_spec(head)
            if spec.nbytes != total:
                raise WireError(f"a tensor of {spec.nbytes} bytes is announced with {total}")
            return Content(None, spec, total)
        if flags & Flag.INLINE:
            return Content(None, None, total)
        content = Content(self._manifest(head, total), None, total)
        content.head = head
        return content

    def _manifest(self, head: bytes, total: int) -> Manifest:
        manifest = known_manifest(head, self._limits)
        if manifest.payload_bytes != total:
            raise WireError(f"leaves of {manifest.payload_bytes} bytes are announced as {total}")
        return manifest

    def keep(self, message: Incoming) -> None:
        """Nobody waits for it yet."""
        if message.is_tensor and message.want_reply:
            self._unmatched.add(message)
        elif message.complete:
            self.accept(message)
        self.mailbox.keep(message)
        if self._unmatched:
            self.lockout.look()
        if self._conn is None:
            self.on_late()

    def ask(self, message: Incoming, content: Content) -> None:
        if not content.asked and not content.attempt and not content.begun:
            content.asked = True
            self.reply(FrameType.GO, message.message_id)

    def accept(self, message: Incoming, flags: int = 0) -> None:
        """The message is in our hands: the sender's work is done."""
        if message.want_reply:
            message.want_reply = False
            # At once, not with what the program may say next: until then it may block the loop, and the sender would wait for it.
            self.reply(FrameType.ACCEPTED, message.message_id, flags=flags)

    def refuse(self, message: Incoming, fact: dict[str, Any]) -> None:
        """Tell the sender, and throw away what is still to come."""
        self.lockout.free(message)
        message.body = None
        if message.message_id in self.opened:
            assert message.content is not None
            message.content.refused = True  # its payload may be on the way already
        else:
            message.content = None
        self.consume(message)
        self._flowing.discard(message.key)
        self.refuse_reply(message, fact)

    def refuse_reply(self, message: Incoming, fact: dict[str, Any]) -> None:
        """Make the sender's work fail; if it is done already, both sides say so in their logs."""
        if message.want_reply:
            message.want_reply = False
            self.reply(FrameType.REFUSED, message.message_id, orjson.dumps(fact))
        else:
            log.warning("%s: a message of %s was refused after its send was done: %s", self.local, self.remote, fact)
            self._regret(message.key, message.message_id, fact)

    def _regret(self, key: int, message_id: int, fact: dict[str, Any]) -> None:
        """As a refusal, for a message whose send may be done. The next one of its stream waits for an answer again."""
        self._flowing.discard(key)
        self.reply(FrameType.REFUSED, message_id, orjson.dumps({**fact, "key": key}))

    def _flow(self, key: int) -> None:
        if len(self._flowing) < _FLOWING_LIMIT:
            self._flowing.add(key)
            self.reply(FrameType.FLOW, key)

    # ---- matching

    def post(self, receive: Receive) -> None:
        """A receive of ours: it gets the oldest message of its stream, or waits."""
        receive.receiver = self
        key = receive.key
        stream = self.mailbox.streams.get(key)
        if stream is not None and not stream.arrived:
            stream.posted.append(receive)  # the common case of the next lines
            return
        message = self.mailbox.first(key)
        if message is None:
            self.mailbox.post(key, receive)
        elif type(message) is Whole and receive.tensor_out is None and key in self._flowing:
            # The common case of `match` and all that follows it.
            receive.order = message.order
            self._consume(message.charged)
            assert message.body is not None
            self._hand_out(receive, memoryview(message.body))
        else:
            self.match(receive, message)

    def ready(self, key: int) -> AsyncWork[Any] | None:
        """`post` and all that follows it for a `recv` whose message waits, a plain small one: its work, which is over. None: post it."""
        stream = self.mailbox.streams.get(key)
        if stream is None or not stream.arrived:
            return None
        message = self.mailbox.take_whole(key) if key in self._flowing else None
        if message is None:
            return None
        self._consume(message.charged)
        receive = Receive(key)
        receive.receiver = self
        receive.order = message.order
        if self.trace is not None:
            self.trace.picked(receive.order)
        assert message.body is not None
        try:
            value = decode_inline(memoryview(message.body), allow_pickle=self.allow_pickle)
        except BaseException as error:  # whatever unpickled code raises, see _undecodable
            work: AsyncWork[Any] = AsyncWork(self.home, "recv", detail=receive)
            receive.work = work
            self._undecodable(receive, error)
            return work
        return arrived(self.home, value, receive.give_back, receive)

    def ready_parcel(self, key: int) -> AsyncWork[Parcel] | None:
        """As `ready`, for a parcel."""
        message = self.mailbox.take_whole(key) if key in self._flowing else None
        if message is None:
            return None
        self._consume(message.charged)
        receive = ParcelReceive(key)
        receive.receiver = self
        receive.order = message.order
        if self.trace is not None:
            self.trace.picked(receive.order)
        assert message.body is not None
        return arrived(self.home, self.delivery.small_parcel(bytes(message.body)), receive.give_back, receive)

    def _hand_out(self, receive: Receive, body: memoryview) -> None:
        """A whole small message becomes the receive's value."""
        if self.trace is not None:
            self.trace.taken(receive)
        if receive.opaque:
            receive.finish(self.delivery.small_parcel(bytes(body)))
            return
        try:
            value = decode_inline(body, allow_pickle=self.allow_pickle)
        except BaseException as error:  # as in ready
            self._undecodable(receive, error)
            return
        work = receive.work
        receive.work = None
        if work is not None:
            work._finish(value)

    def _undecodable(self, receive: Receive, error: BaseException) -> None:
        """Whatever unpickled code raises, sys.exit() too, concerns this message only."""
        failure = self.delivery.undecodable(error, receive)
        self._regret(receive.key, 0, undecodable_fact(failure))
        receive.fail(failure)
        if isinstance(error, KeyboardInterrupt):
            raise error

    def match(self, receive: Receive, message: Incoming) -> None:
        """`message`, taken from its queue, goes to `receive`."""
        receive.order = message.order
        if self.trace is not None:
            self.trace.matched(receive, message)
        self._unmatched.discard(message)
        wrong = _mismatch(receive, message)
        if wrong is not None:
            self.mismatches += 1
            sent, expected = wrong
            self.refuse(message, {"why": "mismatch", "sent": sent, "expected": expected})
            receive.fail(about(Mismatch(sent, expected), receive))
            return
        if not message.is_tensor and message.key not in self._flowing:
            self._flow(message.key)
        if message.complete:
            self.deliver(receive, message)
            return
        receive.message = message
        message.receive = receive
        content = message.content
        assert content is not None
        self.ask(message, content)

    def deliver(self, receive: Receive, message: Incoming) -> None:
        receive.message = None
        message.receive = None
        self.lockout.free(message)
        self.consume(message)
        self.delivery.deliver(receive, message)

    def still_open(self, message: Incoming) -> bool:
        """Its payload is still awaited."""
        return self.opened.get(message.message_id) is message

    def around_over(self, message: Incoming) -> None:
        """What came around the stream is here."""
        assert message.content is not None
        self.payloads.check_complete(message, message.content)

    def fail_all(self, make_error: Callable[[], AiorlinfError]) -> None:
        """The link has ended: messages that are complete can still be received, everything else has failed."""
        self._conn = None
        if self.shared is not None:
            self.shared.close()
        opened = list(self.opened.values())
        self.opened.clear()
        self._unmatched.clear()
        for message in opened:
            content = message.content
            receive, message.receive = message.receive, None
            self.mailbox.remove(message)
            if receive is not None:
                receive.message = None
                error = make_error()
                if content is not None:
                    error.fill(bytes_done=content.sink.done if content.sink is not None else 0, bytes_expected=content.total)
                receive.fail(about(error, receive))
        self.fail_posted(make_error)

    def fail_posted(self, make_error: Callable[[], AiorlinfError]) -> None:
        """End the receives that no message was matched to."""
        for receive in self.mailbox.drain_posted():
            receive.fail(about(make_error(), receive))


def _mismatch(receive: Receive, message: Incoming) -> tuple[str, str] | None:
    """(what was sent, what was expected) when the two do not fit."""
    out = receive.memory
    if message.error is not None:
        return None
    if not message.is_tensor:
        if out is None:
            return None
        return "an object (send)", f"a {describe_tensor(out)} (recv_tensor)"
    content = message.content
    assert content is not None
    spec = content.spec
    assert spec is not None
    if out is None:
        return f"a {describe_spec(spec)} (send_tensor)", "an object (recv)"
    if check_tensor_fits(spec, out) is None:
        return None
    return f"a {describe_spec(spec)}", f"a {describe_tensor(out)}"
