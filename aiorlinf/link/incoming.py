"""The receiving half of a link: matching, placing payloads, delivering, the window.

A message is matched when it is announced, delivered when it is complete. Its payload goes straight into its final memory: for
`recv_tensor` the caller's own buffer, else fresh memory that becomes the received tensors.

The window: DATA frames and payloads started without GO are charged; the charge is returned (CREDIT) when a receive takes the
message. Reports ride on the next write, or leave after a few milliseconds.

The lock-out rule: `send_tensor` is done when a `recv_tensor` takes it. If both workers send first and receive second, each would wait
for the other for ever; so when tensors wait unmatched in both directions, they are accepted into our memory and their sends are done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import torch

from aiorlinf.errors import AiorlinfError, Mismatch, RemoteError, UnsupportedObject, UsageError, WireError
from aiorlinf.link.mailbox import Incoming, Mailbox, Receive
from aiorlinf.link.memory import byte_tensor, byte_view, fresh_bytes
from aiorlinf.link.outgoing import FRAME_COST
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.wire.frames import MESSAGE_ID, OPEN_PREFIX, Flag, FrameType, Start, Via, frame
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.leaves import LeafSpec, read_spec
from aiorlinf.wire.manifest import Limits, Manifest, decode_manifest
from aiorlinf.wire.tensor_header import check_tensor_fits, decode_tensor_spec, describe_spec, describe_tensor, sendable_leaf
from aiorlinf.wire.tree import rebuild

if TYPE_CHECKING:
    from aiorlinf.link.connection import FrameWriter
    from aiorlinf.work.home import LoopHome

__all__ = ["ReceiveLane", "Receiver", "ReceiverLimits"]

log = logging.getLogger("aiorlinf.link")

_REPORT_SECONDS = 0.005
_HEAVY_SKELETON_BYTES = 256 * 1024
_FLOWING_LIMIT = 4096


class ReceiveLane(Protocol):
    """The receiving end of a `PayloadLane`."""

    def receive(self, generation: int, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> bool:
        """Receive these leaves in order, then call back once on the home thread. False if that generation is not there (any more)."""


class ReceiverLimits:
    """Bounds on what a peer can make us allocate, in bytes."""

    __slots__ = ("allow_pickle", "manifest", "message", "window")

    def __init__(self, window: int, message: int, manifest: int, allow_pickle: bool) -> None:
        self.window = window
        self.message = message
        self.manifest = manifest
        self.allow_pickle = allow_pickle


class _Content:
    """Payload of a message that does not fit in a frame.

    Attributes:
        manifest: what the payload is; None for a whole small message that had to wait for the window, and for tensors.
        spec: description of a `send_tensor` payload.
        total: payload bytes.
        tensors: memory of the leaves, one-dimensional uint8, once the payload has started.
        direct: the payload goes into the receive's own buffer.
        sink: where the stream's part goes.
        lane_pending: the lane has not delivered its part.
        attempt: how often the payload has begun.
        ended: the trailer is here.
        asked: GO was sent.
        relieved: bytes of our memory that the lock-out rule spends on it.
        refused: nobody wants the payload any more.
        borrowed: the receive was cancelled while a lane still writes into the caller's buffer.
    """

    __slots__ = (
        "asked",
        "attempt",
        "borrowed",
        "direct",
        "ended",
        "lane_pending",
        "manifest",
        "refused",
        "relieved",
        "sink",
        "spec",
        "tensors",
        "total",
    )

    def __init__(self, manifest: Manifest | None, spec: LeafSpec | None, total: int) -> None:
        self.manifest = manifest
        self.spec = spec
        self.total = total
        self.tensors: list[torch.Tensor] | None = None
        self.direct = False
        self.sink: Sink | None = None
        self.lane_pending = False
        self.attempt = 0
        self.ended = False
        self.asked = False
        self.relieved = 0
        self.refused = False
        self.borrowed = False

    def sizes(self) -> list[int]:
        if self.manifest is not None:
            return [spec.nbytes for spec in self.manifest.specs]
        return [self.total]

    def split(self, threshold: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Memory of the leaves that come around the stream, and of those that come over it."""
        tensors = self.tensors
        assert tensors is not None
        if self.manifest is not None:
            around = [spec.is_tensor and spec.nbytes >= threshold for spec in self.manifest.specs]
        else:
            around = [self.spec is not None and self.total >= threshold]
        lane = [tensor for tensor, yes in zip(tensors, around, strict=True) if yes]
        return lane, [tensor for tensor, yes in zip(tensors, around, strict=True) if not yes]


class Receiver:
    """See the module. Everything here runs on the home thread.

    Attributes:
        messages, payload_bytes: received so far.
        opened: by message id, messages whose trailer has not come.
        tensor_sends_waiting: asks the sending half whether a `send_tensor` of ours waits for its match.
    """

    def __init__(self, home: LoopHome, mailbox: Mailbox, limits: ReceiverLimits, local: str, remote: str) -> None:
        self.home = home
        self.mailbox = mailbox
        self.limits = limits
        self.local = local
        self.remote = remote
        self.lane: ReceiveLane | None = None
        self.messages = 0
        self.payload_bytes = 0
        self.mismatches = 0
        self.opened: dict[int, Incoming] = {}
        self.tensor_sends_waiting: Callable[[], bool] = lambda: False
        self._conn: FrameWriter | None = None
        self._consumed = 0
        self._reported = 0
        self._outstanding = 0
        self._relieved = 0
        self._report_scheduled = False
        self._flowing: set[int] = set()
        self._unmatched_tensors: set[Incoming] = set()
        self._discard = DiscardSink()

    def up(self, conn: FrameWriter) -> None:
        self._conn = conn

    # ---- the window

    def _arrive(self, cost: int) -> None:
        self._outstanding += cost
        if self._outstanding > self.limits.window + FRAME_COST:
            raise WireError(f"{self.remote} sends more than the window of {self.limits.window} bytes")

    def _consume(self, cost: int) -> None:
        """The message is taken: its room in the window is free again."""
        self._outstanding -= cost
        self._consumed += cost
        if self._consumed - self._reported > self.limits.window >> 2:
            self._report()
        elif not self._report_scheduled:
            self._report_scheduled = True
            self.home.loop.call_later(_REPORT_SECONDS, self._late_report)

    def _late_report(self) -> None:
        self._report_scheduled = False
        if self._consumed != self._reported:
            self._report()

    def _report(self) -> None:
        data = self.take_report()
        if data is not None:
            self._reply(data)

    def take_report(self) -> bytes | None:
        """The CREDIT frame that is due, if any."""
        if self._consumed == self._reported or self._conn is None:
            return None
        self._reported = self._consumed
        return frame(FrameType.CREDIT, self._consumed)

    def _reply(self, data: bytes) -> None:
        if self._conn is not None:
            self._conn.send(data)

    # ---- arrivals

    def on_data(self, key: int, flags: int, body: memoryview) -> None:
        """A whole small message."""
        self.messages += 1
        size = len(body)
        self.payload_bytes += size
        message_id = 0
        if flags & Flag.WANT_REPLY:
            (message_id,) = MESSAGE_ID.unpack_from(body)
            body = body[MESSAGE_ID.size :]
            size -= MESSAGE_ID.size
        cost = size + FRAME_COST
        self._arrive(cost)
        mailbox = self.mailbox
        order = mailbox.next_order()
        receive = mailbox.waiting(key)
        if receive is not None and not flags and receive.tensor_out is None:
            # The common case: somebody waits for it, nobody waits for an answer.
            self._consume(cost)
            receive.order = order
            if key not in self._flowing:
                self._flow(key)
            try:
                value = decode_inline(body, allow_pickle=self.limits.allow_pickle)
            except Exception as error:  # whatever an unpickled class raises concerns this message only
                receive.work._fail(self._undecodable(error, receive))
                return
            receive.work._finish(value)
            return
        message = Incoming(key, order, message_id, bool(flags & Flag.TENSOR), bool(flags & Flag.WANT_REPLY))
        message.charged = cost
        message.complete = True
        if message.is_tensor:
            spec, offset = read_spec(body, 0)
            body = body[offset:]
            if len(body) != spec.nbytes:
                raise WireError(f"a tensor of {spec.nbytes} bytes came with {len(body)}")
            message.content = _Content(None, spec, spec.nbytes)
        if receive is not None:
            message.body = body  # taken before this call returns
            self.match(receive, message)
        else:
            message.body = bytes(body)
            self._keep(message)

    def on_open(self, key: int, flags: int, body: memoryview) -> None:
        """A larger message is announced."""
        self.messages += 1
        if len(body) < OPEN_PREFIX.size:
            raise WireError("an OPEN frame is cut short")
        message_id, total = OPEN_PREFIX.unpack_from(body)
        if message_id in self.opened:
            raise WireError(f"message {message_id} is opened twice")
        head = bytes(body[OPEN_PREFIX.size :])
        self.payload_bytes += total
        message = Incoming(key, self.mailbox.next_order(), message_id, bool(flags & Flag.TENSOR), bool(flags & Flag.WANT_REPLY))
        self.opened[message_id] = message
        if total > self.limits.message:
            text = f"a message of {total} bytes is over the receiver's max_message_bytes of {self.limits.message}"
            self._refuse(message, {"why": "too large", "message": text})
            receive = self.mailbox.waiting(key)
            if receive is not None:
                receive.work._fail(self._about(UsageError(text), receive))
            return
        if flags & Flag.TENSOR and not flags & Flag.INLINE:
            spec = decode_tensor_spec(head)
            if spec.nbytes != total:
                raise WireError(f"a tensor of {spec.nbytes} bytes is announced with {total}")
            message.content = _Content(None, spec, total)
        elif flags & Flag.INLINE:
            message.content = _Content(None, None, total)
        else:
            manifest = decode_manifest(head, limits=Limits(max_manifest_bytes=self.limits.manifest, max_message_bytes=self.limits.message))
            if sum(spec.nbytes for spec in manifest.specs) != total:
                raise WireError(f"the leaves of a message do not add up to the {total} bytes announced")
            message.content = _Content(manifest, None, total)
        receive = self.mailbox.waiting(key)
        if receive is not None:
            self.match(receive, message)
        else:
            self._keep(message)

    def _keep(self, message: Incoming) -> None:
        if message.is_tensor and message.want_reply:
            self._unmatched_tensors.add(message)
        elif message.complete and message.want_reply:
            self._accept(message)
        self.mailbox.keep(message)
        if self._unmatched_tensors:
            self.relieve_lockout()

    def relieve_lockout(self) -> None:
        """Apply the lock-out rule; also called when a `send_tensor` of ours starts to wait."""
        if not self._unmatched_tensors or not self.tensor_sends_waiting():
            return
        for message in sorted(self._unmatched_tensors, key=lambda message: message.order):
            if message.complete:
                self._accept(message)
                self._unmatched_tensors.discard(message)
            elif not message.content.asked and self._relieved + message.content.total <= self.limits.window:
                message.content.relieved = message.content.total
                self._relieved += message.content.total
                self._ask(message)

    def _ask(self, message: Incoming) -> None:
        content = message.content
        if not content.asked and content.tensors is None:
            content.asked = True
            self._reply(frame(FrameType.GO, message.message_id))

    def _accept(self, message: Incoming) -> None:
        if message.want_reply:
            message.want_reply = False
            self._reply(frame(FrameType.ACCEPTED, message.message_id))

    def _refuse(self, message: Incoming, fact: dict[str, Any]) -> None:
        """Tell the sender, and throw away what is still to come."""
        message.body = None
        if message.message_id in self.opened:
            message.content.refused = True  # its payload may be on the way already
        else:
            message.content = None
        if message.charged:
            self._consume(message.charged)
            message.charged = 0
        self._flowing.discard(message.key)
        if message.message_id:
            self._reply(frame(FrameType.REFUSED, message.message_id, orjson.dumps(fact)))
        if not message.want_reply:
            log.warning("%s: a message of %s was refused after its send was done: %s", self.local, self.remote, fact)

    def _flow(self, key: int) -> None:
        if len(self._flowing) < _FLOWING_LIMIT:
            self._flowing.add(key)
            self._reply(frame(FrameType.FLOW, key))

    # ---- matching

    def post(self, receive: Receive) -> None:
        """A receive of ours: it gets the oldest message of its stream, or waits."""
        receive.receiver = self
        message = self.mailbox.first(receive.key)
        if message is None:
            self.mailbox.post(receive.key, receive)
        else:
            self.match(receive, message)

    def match(self, receive: Receive, message: Incoming) -> None:
        """`message`, taken from its queue, goes to `receive`."""
        receive.order = message.order
        self._unmatched_tensors.discard(message)
        wrong = self._mismatch(receive, message)
        if wrong is not None:
            self.mismatches += 1
            sent, expected = wrong
            receive.work._fail(self._about(Mismatch(sent, expected), receive))
            self._refuse(message, {"why": "mismatch", "sent": sent, "expected": expected})
            return
        if not message.is_tensor and message.key not in self._flowing:
            self._flow(message.key)
        receive.message = message
        message.receive = receive
        if message.complete:
            self._deliver(receive, message)
        else:
            self._ask(message)

    def _mismatch(self, receive: Receive, message: Incoming) -> tuple[str, str] | None:
        """(what was sent, what was expected) when the two do not fit."""
        out = receive.tensor_out
        if message.error is not None:
            return None
        if not message.is_tensor:
            if out is None:
                return None
            return "an object (send)", f"a {describe_tensor(out)} (recv_tensor)"
        spec = message.content.spec
        if out is None:
            return f"a {describe_spec(spec)} (send_tensor)", "an object (recv)"
        if check_tensor_fits(spec, out) is None:
            return None
        return f"a {describe_spec(spec)}", f"a {describe_tensor(out)}"

    # ---- payload

    def on_start(self, message_id: int, flags: int, body: memoryview) -> None:
        """The payload begins (again)."""
        message = self.opened.get(message_id)
        if message is None:
            raise WireError(f"the payload of an unknown message {message_id} begins")
        start = Start.decode(body)
        content = message.content
        if flags & Flag.CHARGED and not message.charged and not content.refused:
            message.charged = content.total + FRAME_COST
            self._arrive(message.charged)
        elif flags & Flag.CHARGED and content.refused and content.attempt == 0:
            self._arrive(content.total + FRAME_COST)
            self._consume(content.total + FRAME_COST)
        content.attempt += 1
        content.ended = False
        if content.refused:
            if start.via != Via.STREAM:  # a started transfer must be taken off its lane, in order
                content.tensors = [fresh_bytes(size) for size in content.sizes()]
                self._start_lane(message, content, start.generation, content.split(start.threshold)[0])
            return
        if content.tensors is None:
            self._place(message, content)
        tensors = content.tensors
        assert tensors is not None
        if start.via == Via.STREAM:
            content.lane_pending = False
            content.sink = Sink([byte_view(tensor) for tensor in tensors])
        else:
            around, over = content.split(start.threshold)
            content.sink = Sink([byte_view(tensor) for tensor in over])
            self._start_lane(message, content, start.generation, around)

    def _place(self, message: Incoming, content: _Content) -> None:
        receive = message.receive
        if receive is not None and receive.tensor_out is not None:
            content.direct = True
            content.tensors = [byte_tensor(receive.tensor_out)]
        else:
            content.tensors = [fresh_bytes(size) for size in content.sizes()]

    def _start_lane(self, message: Incoming, content: _Content, generation: int, leaves: list[torch.Tensor]) -> None:
        attempt = content.attempt
        content.lane_pending = True

        def finished(error: BaseException | None) -> None:
            if content.attempt != attempt or self.opened.get(message.message_id) is not message:
                return
            if error is not None:
                self._reply(frame(FrameType.AGAIN, message.message_id))
                return
            content.lane_pending = False
            self._check_complete(message)

        lane = self.lane
        if lane is None or not lane.receive(generation, leaves, finished):
            self._reply(frame(FrameType.AGAIN, message.message_id))

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        message = self.opened.get(message_id)
        if message is None or message.content.refused:
            return self._discard
        sink: Sink | None = message.content.sink
        if sink is None:
            raise WireError(f"payload of message {message_id} comes before its START")
        return sink

    def on_end(self, message_id: int, flags: int, body: memoryview) -> None:
        """The trailer."""
        message = self.opened.get(message_id)
        if message is None:
            if flags & Flag.WITHDRAWN:
                self._withdrawn_small(message_id)
            return
        content = message.content
        if content.refused:
            del self.opened[message_id]
        elif flags & Flag.WITHDRAWN:
            del self.opened[message_id]
            self._withdrawn(message)
        elif flags & Flag.VOID:
            del self.opened[message_id]
            self._void(message, bytes(body).decode("utf-8", "replace"))
        else:
            content.ended = True
            self._check_complete(message)

    def on_payload(self, message_id: int) -> None:
        """Chunks arrived; only the trailer completes a message, so there is nothing to do."""

    def _check_complete(self, message: Incoming) -> None:
        content = message.content
        if content.refused or not content.ended or content.lane_pending:
            return
        sink = content.sink
        if sink is None or sink.done != sink.total:
            raise WireError(f"message {message.message_id} ends after {sink.done if sink else 0} bytes of {content.total}")
        message.complete = True
        del self.opened[message.message_id]
        if content.manifest is None and content.spec is None:
            message.body = byte_view(content.tensors[0]) if content.tensors[0].numel() else b""
        receive = message.receive
        if receive is not None:
            self._deliver(receive, message)
        elif message.is_tensor:
            if content.borrowed:
                content.borrowed = False
                content.tensors = [content.tensors[0].clone()]
            self.relieve_lockout()
        else:
            self._accept(message)

    def _withdrawn_small(self, message_id: int) -> None:
        for message in list(self._unmatched_tensors):
            if message.message_id == message_id:
                self._withdrawn(message)

    def _withdrawn(self, message: Incoming) -> None:
        """The sender cancelled: as if the message had never come."""
        self._unmatched_tensors.discard(message)
        self.mailbox.remove(message)
        if message.content is not None and message.content.relieved:
            self._relieved -= message.content.relieved
        message.content = None
        if message.charged:
            self._consume(message.charged)
            message.charged = 0
        receive, message.receive = message.receive, None
        if receive is not None:
            receive.message = None
            following = self.mailbox.first(message.key)
            if following is not None:
                self.match(receive, following)
            else:
                self.mailbox.post(message.key, receive, at_head=True)

    def _void(self, message: Incoming, text: str) -> None:
        """The sender failed in the middle: the message is an error for whoever receives it."""
        receive = message.receive
        if receive is not None:
            if message.charged:
                self._consume(message.charged)
            receive.message = None
            receive.work._fail(self._about(RemoteError(f"the sender failed: {text}"), receive))
            return
        message.content = None
        message.error = RemoteError(f"the sender failed: {text}")
        message.complete = True

    # ---- delivery

    def _deliver(self, receive: Receive, message: Incoming) -> None:
        """The message is complete and matched: hand it over."""
        receive.message = None
        message.receive = None
        if message.content is not None and message.content.relieved:
            self._relieved -= message.content.relieved
            message.content.relieved = 0
        if message.charged:
            self._consume(message.charged)
            message.charged = 0
        if message.error is not None:
            receive.work._fail(self._about(message.error, receive))
            return
        if receive.tensor_out is not None:
            self._deliver_tensor(receive, message)
            return
        if message.value is not None:
            self._finish(receive, message.value[0])
            return
        content = message.content
        if content is not None and content.manifest is not None and len(content.manifest.skeleton) > _HEAVY_SKELETON_BYTES:
            receive.message = message  # a cancel meanwhile gives it back
            self.home.submit(self._rebuild, message).add_done_callback(lambda work: self._rebuilt(receive, message, work))
            return
        try:
            value = self._rebuild(message)
        except Exception as error:  # whatever an unpickled class raises concerns this message only
            self._fail_undecodable(receive, message, error)
            return
        self._hand_over(receive, message, value)

    def _rebuild(self, message: Incoming) -> Any:
        content = message.content
        if content is not None and content.manifest is not None:
            return rebuild(content.manifest, content.tensors, allow_pickle=self.limits.allow_pickle)
        return decode_inline(memoryview(message.body), allow_pickle=self.limits.allow_pickle)

    def _rebuilt(self, receive: Receive, message: Incoming, work: Any) -> None:
        if receive.message is not message:
            return  # cancelled meanwhile; the message was given back whole
        receive.message = None
        error = work.exception()
        if error is None:
            self._hand_over(receive, message, work.result())
        elif isinstance(error, Exception):
            self._fail_undecodable(receive, message, error)
        else:
            receive.work._fail(error)

    def _hand_over(self, receive: Receive, message: Incoming, value: Any) -> None:
        message.content = None
        message.body = None
        self._accept(message)
        self._finish(receive, value)

    def _finish(self, receive: Receive, value: Any) -> None:
        receive.work._finish((self.remote, value) if receive.with_sender else value)

    def _deliver_tensor(self, receive: Receive, message: Incoming) -> None:
        content = message.content
        out = receive.tensor_out
        if content is None or not content.direct:
            source = content.tensors[0] if message.body is None else torch.frombuffer(bytearray(message.body), dtype=torch.uint8)
            target = byte_tensor(out)
            if target.numel():
                target.copy_(source)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        self._accept(message)
        receive.work._finish(out)

    def _fail_undecodable(self, receive: Receive, message: Incoming, error: Exception) -> None:
        failure = self._undecodable(error, receive)
        if message.want_reply:
            fact = {"why": "undecodable", "message": failure.message, "type": type(error).__name__}
            self._reply(frame(FrameType.REFUSED, message.message_id, orjson.dumps(fact)))
            message.want_reply = False
        message.content = None
        receive.work._fail(failure)

    def _undecodable(self, error: Exception, receive: Receive) -> AiorlinfError:
        if isinstance(error, AiorlinfError):
            return self._about(error, receive)
        text = f"the object cannot be rebuilt here: {type(error).__name__}: {error}"
        failure = UnsupportedObject(text, hint="its class must be importable on both sides")
        failure.__cause__ = error
        return self._about(failure, receive)

    def _about(self, error: AiorlinfError, receive: Receive) -> AiorlinfError:
        error.fill(operation=receive.work.operation, tag=receive.key & 0xFFFFFFFF, local=self.local, remote=self.remote)
        return error

    # ---- cancelling and ends

    def cancel(self, receive: Receive) -> None:
        """The caller cancelled before the message was delivered: the message, if one was matched, goes back to its place."""
        message = receive.message
        if message is None:
            self.mailbox.withdraw(receive.key, receive)
            return
        receive.message = None
        message.receive = None
        content = message.content
        if content is not None and content.direct:
            content.direct = False
            if content.lane_pending:
                # The transfer cannot be recalled: it goes on into the caller's memory, and is copied from there at its end.
                content.borrowed = True
            else:
                fresh = fresh_bytes(content.total)
                content.sink.redirect([byte_view(fresh)])
                content.tensors = [fresh]
        self._offer(message)

    def give_back(self, receive: Receive, value: Any) -> None:
        """The caller was cancelled between delivery and taking the value: the message goes back to its place."""
        if receive.with_sender:
            value = value[1]
        is_tensor = receive.tensor_out is not None
        message = Incoming(receive.key, receive.order, 0, is_tensor, False)
        message.complete = True
        if is_tensor:
            message.body = bytes(byte_view(byte_tensor(value))) if value.numel() else b""
            message.content = _Content(None, sendable_leaf(value).spec, len(message.body))
        else:
            message.value = [value]
        self._offer(message)

    def _offer(self, message: Incoming) -> None:
        receive = self.mailbox.waiting(message.key)
        if receive is not None:
            self.match(receive, message)
        else:
            self._keep(message)

    def fail_all(self, make_error: Callable[[], AiorlinfError]) -> None:
        """The link has ended: messages that are complete can still be received, everything else has failed."""
        self._conn = None
        for message in self.opened.values():
            receive, message.receive = message.receive, None
            content = message.content
            if receive is not None:
                receive.message = None
                error = make_error()
                done = content.sink.done if content is not None and content.sink is not None else 0
                error.fill(bytes_done=done, bytes_expected=content.total if content is not None else None)
                receive.work._fail(self._about(error, receive))
            else:
                self.mailbox.remove(message)
            message.content = None
        self.opened.clear()
        self._unmatched_tensors.clear()
        self.fail_posted(make_error)

    def fail_posted(self, make_error: Callable[[], AiorlinfError]) -> None:
        """End the receives that no message was matched to."""
        for _, receive in self.mailbox.drain_posted():
            receive.work._fail(self._about(make_error(), receive))
