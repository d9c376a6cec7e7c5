"""Payloads of messages that do not come in one frame: where their bytes go, and when all of them are there.

A payload goes straight into its final memory: for `recv_tensor` the caller's own buffer, else memory of the worker's pool that becomes the
received tensors. It begins (START), comes over the stream in pieces or around it on one of the ways, and ends (END). What is lost on its
way around the stream begins again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aiorlinf.codec.header import unpack_tried
from aiorlinf.errors import AiorlinfError, RemoteError, UsageError, WireError
from aiorlinf.link.coded_sink import CodedSink
from aiorlinf.link.delivery import about
from aiorlinf.link.incoming import Content, Incoming, Receive
from aiorlinf.link.lockout import LockOut
from aiorlinf.link.mailbox import Mailbox
from aiorlinf.link.memory import byte_view
from aiorlinf.link.returns import Returns
from aiorlinf.link.shared_in import SharedIn, Views
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.link.window import FRAME_COST, ReceiveWindow
from aiorlinf.wire.frames import Flag, FrameType, Start, Via

if TYPE_CHECKING:
    from aiorlinf.codec.pool import TensorBufferPool
    from aiorlinf.link.device_in import DeviceIn
    from aiorlinf.link.link_coding import LinkCoding
    from aiorlinf.link.tracing import LinkTrace

__all__ = ["PayloadOwner", "Payloads", "ReceiveLane"]


class ReceiveLane(Protocol):
    """The receiving end of a `PayloadLane`."""

    def receive(self, generation: int, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> bool:
        """Receive these leaves in order, then call back once on the home thread. False if that generation is not there (any more)."""

    def drop_in(self, generation: int, reason: str) -> None:
        """A transfer of this generation is not received, nor anything behind it: that generation has ended here."""


class PayloadOwner(Protocol):
    """What payloads need of the receiving half."""

    mailbox: Mailbox
    pool: TensorBufferPool | None
    trace: LinkTrace | None
    window: ReceiveWindow
    lane: ReceiveLane | None
    shared: SharedIn | None
    coding: LinkCoding | None
    devices: DeviceIn | None
    opened: dict[int, Incoming]
    lockout: LockOut
    returns: Returns

    def reply(self, kind: int, key: int, body: bytes = b"", flags: int = 0) -> None: ...
    def consume(self, message: Incoming) -> None: ...
    def accept(self, message: Incoming, flags: int = 0) -> None: ...
    def refuse(self, message: Incoming, fact: dict[str, Any]) -> None: ...
    def refuse_reply(self, message: Incoming, fact: dict[str, Any]) -> None: ...
    def deliver(self, receive: Receive, message: Incoming) -> None: ...


class Payloads:
    """See the module. Home thread only, but for `coded_wanted`."""

    def __init__(self, owner: PayloadOwner) -> None:
        self._owner = owner
        self._discard = DiscardSink()

    # ---- the beginning

    def on_start(self, message_id: int, flags: int, body: memoryview) -> None:
        """The payload begins (again)."""
        owner = self._owner
        message = owner.opened.get(message_id)
        if message is None:
            raise WireError(f"the payload of an unknown message {message_id} begins")
        start = Start.decode(body)
        content = self._begin(message, flags, start.via)
        if start.via == Via.SHM:
            self._start_shared(message, content, memoryview(start.place))
            return
        if start.via in (Via.IPC, Via.NCCL):
            if owner.devices is None:
                raise WireError("a payload for an accelerator, but this side has told of none")
            owner.devices.start(message, content, start)
            return
        if start.via == Via.CODED:
            self._start_coded(message, content, start)
            return
        around = start.via == Via.GLOO
        if content.refused:
            if around:  # a started transfer must be taken off its lane, in order
                self._drain(message, content, start)
            return
        receive = message.receive
        if receive is not None and receive.memory is not None and receive.memory.is_cpu and not content.tensors:
            content.place_into(receive.memory)
        elif not content.tensors and not self._allocate(message, content):
            if around:
                self._drop_lane(start)
            return
        content.sink = Sink([byte_view(tensor) for tensor in content.split(start.threshold if around else None)[1]])
        if around:
            self._start_lane(message, content, start)

    def on_placed(self, message_id: int, flags: int, place: memoryview) -> None:
        """The payload was placed in memory of the peer before the message was announced, and that was just now."""
        message = self._owner.opened[message_id]
        self._start_shared(message, self._begin(message, flags, Via.SHM), place)
        self.on_end(message_id, 0, memoryview(b""))

    def _begin(self, message: Incoming, flags: int, via: int) -> Content:
        owner = self._owner
        if owner.trace is not None:
            owner.trace.coming(message, via)
        content = message.content
        assert content is not None
        if flags & Flag.CHARGED and not content.attempt:
            message.charged = content.total + FRAME_COST
            owner.window.arrive(message.charged)
            if content.refused:
                owner.consume(message)
        content.attempt += 1
        content.ended = False
        content.lane_pending = False
        return content

    def _allocate(self, message: Incoming, content: Content) -> bool:
        """Memory for the payload. False: there is none, and the message is refused."""
        owner = self._owner
        try:
            content.allocate(owner.pool)
        except (RuntimeError, MemoryError) as error:  # torch raises the first, the pool's mappings the second
            content.tensors = []
            text = f"no memory for a message of {content.total} bytes"
            receive, message.receive = message.receive, None
            owner.lockout.unmatched.discard(message)
            owner.mailbox.remove(message)
            owner.refuse(message, {"why": "too large", "message": text})
            if receive is not None:
                receive.message = None
                failure = about(UsageError(text), receive)
                failure.__cause__ = error
                receive.fail(failure)
            return False
        return True

    def _start_shared(self, message: Incoming, content: Content, place: memoryview) -> None:
        """The payload is there already, in memory of the peer."""
        owner = self._owner
        shared = owner.shared
        if shared is None:
            raise WireError("a payload in shared memory, but this side has none")
        if content.refused:
            shared.refuse(place, content.sizes())
            return
        if message.receive is not None and message.receive.takes_stores:
            content.stores = shared.stores(content.sizes(), place)
            if content.stores is not None:
                content.direct = False
                content.sink = Sink([])
                self.check_complete(message, content)
                return
        attempt = content.attempt
        content.lane_pending = True

        def placed(tensors: Views | None) -> None:
            if content.attempt != attempt or owner.opened.get(message.message_id) is not message:
                return
            if tensors is None:
                owner.reply(FrameType.AGAIN, message.message_id)
                return
            content.tensors, content.held = list(tensors), tensors.held
            content.direct = False
            content.sink = Sink([])
            content.lane_pending = False
            self.check_complete(message, content)

        shared.place(content.sizes(), place, placed)

    def _start_coded(self, message: Incoming, content: Content, start: Start) -> None:
        """The payload comes over the stream, some leaves of it compressed."""
        coding = self._owner.coding
        if coding is None or content.manifest is None:
            raise WireError("a compressed payload, but this side does not compress" if coding is None else "a compressed send_tensor")
        tried = unpack_tried(start.place, len(content.manifest.specs))
        if content.refused:
            return
        if not content.tensors and not self._allocate(message, content):
            return
        content.sink = coding.sink(self, message.message_id, list(zip(map(byte_view, content.tensors), tried, strict=True)))
        content.sink.spans = None if self._owner.trace is None else []

    def coded_wanted(self, sink: CodedSink) -> bool:
        message = self._owner.opened.get(sink.message_id)
        content = None if message is None else message.content
        return content is not None and content.sink is sink and not content.refused

    def coded_settled(self, sink: CodedSink) -> None:
        message = self._owner.opened.get(sink.message_id)
        if message is not None and message.content is not None and message.content.sink is sink:
            self.check_complete(message, message.content)

    def _drain(self, message: Incoming, content: Content, start: Start) -> None:
        try:
            content.allocate(self._owner.pool)
        except (RuntimeError, MemoryError):  # as in _allocate
            content.tensors = []
            self._drop_lane(start)
        else:
            self._start_lane(message, content, start)

    def _drop_lane(self, start: Start) -> None:
        """A transfer that was started is not received. Another one in its place would be a mismatch, at which Gloo ends the process."""
        lane = self._owner.lane
        if lane is not None:
            lane.drop_in(start.generation, "there was no memory for what came through it")

    def _start_lane(self, message: Incoming, content: Content, start: Start) -> None:
        owner = self._owner
        attempt = content.attempt
        content.lane_pending = True

        def finished(error: BaseException | None) -> None:
            if content.attempt != attempt or owner.opened.get(message.message_id) is not message:
                return
            if error is not None:
                owner.reply(FrameType.AGAIN, message.message_id)
                return
            content.lane_pending = False
            if content.borrowed:
                content.borrowed = False
                owner.returns.own(content)
            self.check_complete(message, content)

        lane = owner.lane
        if lane is None or not lane.receive(start.generation, content.split(start.threshold)[0], finished):
            owner.reply(FrameType.AGAIN, message.message_id)

    # ---- its pieces and its end

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        """A piece of a payload begins; where it goes."""
        message = self._owner.opened.get(message_id)
        content = None if message is None else message.content
        if content is None or content.refused:
            return self._discard
        if content.sink is None:
            raise WireError(f"payload of message {message_id} comes before its START")
        return content.sink

    def on_end(self, message_id: int, flags: int, body: memoryview) -> None:
        """The trailer."""
        owner = self._owner
        message = owner.opened.get(message_id)
        if message is None:
            if flags & Flag.WITHDRAWN:
                owner.returns.withdraw_whole(message_id)
            return
        content = message.content
        assert content is not None
        if content.refused:
            del owner.opened[message_id]
        elif flags & Flag.WITHDRAWN:
            del owner.opened[message_id]
            owner.returns.withdraw(message)
        elif flags & Flag.VOID:
            del owner.opened[message_id]
            # The sender failed in the middle: the message is an error for whoever receives it.
            message.want_reply = False
            self._spoil(message, RemoteError(f"the sender failed: {bytes(body[:4096]).decode('utf-8', 'replace')}"))
        else:
            content.ended = True
            self.check_complete(message, content)

    def check_complete(self, message: Incoming, content: Content) -> None:
        """Some part of it, or its trailer, has come: if that was the last, the message is whole."""
        owner = self._owner
        if not content.ended or content.lane_pending:
            return
        if content.refused:
            owner.opened.pop(message.message_id, None)  # it was refused after its trailer had come: nothing more will
            return
        sink = content.sink
        if type(sink) is CodedSink:
            sink.end()
            if not sink.settled:
                return
            if sink.error is not None:
                self._corrupt(message, sink.error)
                return
        if sink is None or sink.done != sink.total:
            raise WireError(f"message {message.message_id} ends after {sink.done if sink else 0} bytes of {content.total}")
        if owner.trace is not None:
            owner.trace.there(message)
        message.complete = True
        del owner.opened[message.message_id]
        if content.whole:
            message.body = byte_view(content.tensors[0]) if content.total else b""
        receive = message.receive
        if receive is not None:
            owner.deliver(receive, message)
        elif not message.is_tensor:
            owner.accept(message)
        elif content.relief:
            owner.lockout.accept(message)
        else:
            owner.lockout.look()

    def _corrupt(self, message: Incoming, error: AiorlinfError) -> None:
        """What was compressed is not what was sent: an error on both sides, for this message only."""
        del self._owner.opened[message.message_id]
        fact = {"why": "corrupt", "message": f"the payload arrived damaged: {error.message}", "type": "WireError"}
        self._owner.refuse_reply(message, fact)
        self._spoil(message, error)

    def _spoil(self, message: Incoming, error: AiorlinfError) -> None:
        """The message becomes an error for whoever receives it."""
        owner = self._owner
        owner.lockout.unmatched.discard(message)
        owner.lockout.free(message)
        message.content = None
        message.error = error
        message.complete = True
        receive = message.receive
        if receive is not None:
            owner.deliver(receive, message)
