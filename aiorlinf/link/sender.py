"""The sending half of a link: admission by window, payloads, trailers, replies.

States of a message (`Outgoing.state`), only downwards:

QUEUED    the link is not up yet
OPENED    its manifest is on the wire; it waits for the window or for GO
STARTED   its payload is on the way
SENT      everything is written; a reply is awaited
DONE      its work is finished, failed or cancelled

A small message leaves whole, at once, if the window has room; so does one whose payload lies in shared memory, or nearly (PLACED). A
send is done when the payload's memory is free again: for small messages that is when they are copied into the frame. Three exceptions
wait for the peer's answer: `send_tensor`, which is done when a `recv_tensor` took it; payloads that go around the stream, which can be
lost on their own; and the first messages of a stream, until the peer says (FLOW) that general receives take them, so that a `send` that
meets a `recv_tensor` fails on both sides.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from aiorlinf.errors import AiorlinfError, InternalError, Mismatch, PeerError, RemoteError, UsageError, WireError
from aiorlinf.link.outgoing import Outgoing, State
from aiorlinf.link.pump import Pump
from aiorlinf.link.ways import Way
from aiorlinf.link.window import FRAME_COST
from aiorlinf.wire.frames import HEADER, MESSAGE_ID, OPEN_PREFIX, PLACED_PREFIX, Flag, FrameType, Start, Via, frame

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.link.connection import FrameWriter
    from aiorlinf.link.device_out import DeviceOut
    from aiorlinf.link.tracing import LinkTrace
    from aiorlinf.wire.flat import Flat
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["Sender"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_FLOWING_LIMIT = 4096
_PENDING_LIMIT = 16384
"""So many messages may be unanswered at once; more wait here, so that a peer that does not receive holds a bounded number of manifests."""
_OVER_STREAM = Start(Via.STREAM, 0, 0)


class Sender:
    """See the module. Everything here runs on the home thread.

    Attributes:
        window: bytes the peer accepts before a receive is posted.
        ways: around the stream, in order of preference.
        devices: for tensors on accelerators; None: they always go through CPU memory.
        messages, payload_bytes: sent so far; `around_bytes` of them around the stream.
        flowing: streams whose messages general receives take: small sends there are done once written.
        pending: by message id, everything the peer may still answer or that is not fully written.
        trace: is told what happens, None: nobody is.
    """

    def __init__(self, home: LoopHome, chunk_bytes: int, local: str, remote: str) -> None:
        self.home = home
        self.local = local
        self.remote = remote
        self.window: int = 0
        self.ways: list[Way] = []
        self.devices: DeviceOut | None = None
        self.trace: LinkTrace | None = None
        self.messages: int = 0
        self.payload_bytes: int = 0
        self.around_bytes = 0
        self.pending: dict[int, Outgoing] = {}
        self.pump: Pump = Pump(home.loop, chunk_bytes, self._over)
        self._conn: FrameWriter | None = None
        self._charged = 0
        self._consumed = 0
        self._next_id = 1
        self.flowing: set[int] = set()
        self._backlog: deque[Outgoing] = deque()  # not admitted yet: the link is not up, or too much is pending
        self._waiting: dict[int, Outgoing] = {}  # by message id: those that wait for the window, in order
        self._working_off = False
        self._idle: asyncio.Future[None] | None = None
        self._tensors = 0  # send_tensor messages among `pending`

    # ---- admission

    def up(self, conn: FrameWriter, window: int) -> None:
        """The link is connected: what waited for it leaves now, in order."""
        self._conn = conn
        self.window = window
        self.pump.up(conn)
        self._work_off()

    def _work_off(self) -> None:
        """Admit what is queued. Finishing a message may run user code that sends more: that comes after what is queued."""
        if self._working_off:
            return
        self._working_off = True
        try:
            while self._backlog and self._conn is not None and len(self.pending) < _PENDING_LIMIT:
                out = self._backlog.popleft()
                if out.state == State.QUEUED:
                    self._admit(self._conn, out)
        finally:
            self._working_off = False

    def send_now(self, key: int, body: bytes) -> bool:
        """Write a whole small general message of a stream in `flowing`, if the window has room. The common case, kept short."""
        size = len(body)
        charged = self._charged + size + FRAME_COST
        conn = self._conn
        if conn is None or charged - self._consumed > self.window or self._backlog:
            return False
        self._charged = charged
        self.messages += 1
        self.payload_bytes += size
        if self.trace is not None:
            self.trace.small(self.messages, size, key)
        conn.send(HEADER.pack(size, FrameType.DATA, 0, 0, key) + body)
        return True

    def send_small(self, work: AsyncWork[None], key: int, body: bytes) -> None:
        """A general message whose payload is in `body`."""
        if key in self.flowing and self.send_now(key, body):
            work._finish(None)
        else:
            self.send(Outgoing(work, key, body=body, total=len(body)))

    def send(self, out: Outgoing) -> None:
        """Take a message; its work finishes by the rules of the module."""
        if out.work is not None:
            out.work._detail = out
        out.sender = self
        self._backlog.append(out)
        self._work_off()

    def _credit(self) -> int:
        return self.window - (self._charged - self._consumed)

    def _admit(self, conn: FrameWriter, out: Outgoing) -> None:
        self.messages += 1
        self.payload_bytes += out.total
        out.number = self.messages
        if self.trace is not None:
            self.trace.opened(out)
        departing = out.departure is not None  # nobody knows yet which way it will go
        around: Way | None = None
        if not departing:
            for way in self.ways:
                if way.takes(out):
                    around = way
                    break
        out.reply = bool(out.flags & Flag.TENSOR) or out.key not in self.flowing or around is not None or departing
        if out.reply:
            out.flags |= Flag.WANT_REPLY
        if out.body is None:
            self._open(conn, out, around)
        elif len(out.body) + FRAME_COST <= self._credit():
            self._send_whole(conn, out, out.body)
        else:
            if out.head:
                out.manifest = out.body[: out.head]
            else:
                out.flags |= Flag.INLINE
            self._open(conn, out, None)

    def _send_whole(self, conn: FrameWriter, out: Outgoing, body: bytes) -> None:
        self._charged += len(body) + FRAME_COST
        if out.reply:
            self._register(out)
            out.state = State.SENT
            conn.send(frame(FrameType.DATA, out.key, MESSAGE_ID.pack(out.message_id) + body, out.flags))
        else:
            conn.send(frame(FrameType.DATA, out.key, body, out.flags))
            self._done(out)

    def _open(self, conn: FrameWriter, out: Outgoing, around: Way | None) -> None:
        if around is not None and around.eager and self._place(conn, out, around):
            return
        self._register(out)
        out.state = State.OPENED
        eager = around is not None and around.eager
        flags = out.flags
        if eager:
            conn.hold()
            if not self._waiting and out.total + FRAME_COST <= min(self.window, self._credit()):
                flags |= Flag.BEGUN
        conn.send(frame(FrameType.OPEN, out.key, OPEN_PREFIX.pack(out.message_id, out.total) + out.manifest, flags))
        if around is not None and eager and out.total + FRAME_COST > self.window and around.begin_at_once(out):
            conn.flush()
            return
        if out.flags & Flag.TENSOR and not eager:
            return  # it goes straight into the receiver's own memory, so it waits for its receive (GO)
        self._waiting[out.message_id] = out
        self._open_window()
        if eager:
            conn.flush()

    def _place(self, conn: FrameWriter, out: Outgoing, way: Way) -> bool:
        """Send a message in one frame, if there is room for it and its payload is where the peer can see it, or nearly."""
        cost = out.total + FRAME_COST
        ahead = cost > self.window
        if not ahead and (self._waiting or cost > self.window - (self._charged - self._consumed)):
            return False
        place = way.place(out, ahead)
        if place is None:
            return False
        self._register(out)
        out.state = State.SENT
        flags = out.flags
        if not ahead:
            self._charged += cost
            flags |= Flag.CHARGED
        if self.trace is not None:
            self.trace.begun(out)
            self.trace.started(out, Via.SHM)
            self.trace.left(out)
        body = PLACED_PREFIX.pack(out.message_id, out.total, len(place)) + place + out.manifest
        conn.send_now(HEADER.pack(len(body), FrameType.PLACED, flags, 0, out.key) + body)
        return True

    def _register(self, out: Outgoing) -> None:
        out.message_id = self._next_id
        self._next_id += 1
        self.pending[out.message_id] = out
        if out.flags & Flag.TENSOR:
            self._tensors += 1

    def on_credit(self, consumed: int) -> None:
        """The peer has consumed so many bytes since the beginning."""
        self._consumed = max(self._consumed, min(consumed, self._charged))
        self._open_window()

    def _open_window(self) -> None:
        """Start what fits, in order; what is larger than the whole window can only be started by its receive."""
        while self._waiting:
            out = next((out for out in self._waiting.values() if out.total + FRAME_COST <= self.window), None)
            if out is None or out.total + FRAME_COST > self._credit():
                return
            del self._waiting[out.message_id]
            self._begin(out, out.total + FRAME_COST)

    def on_go(self, message_id: int) -> None:
        """The receiver has a place for this message."""
        out = self.pending.get(message_id)
        if out is not None and out.state == State.OPENED:
            self._stop_waiting(out)
            self._begin(out, 0)

    def _stop_waiting(self, out: Outgoing) -> None:
        self._waiting.pop(out.message_id, None)

    # ---- payload

    def _begin(self, out: Outgoing, charge: int) -> None:
        self._charged += charge
        out.charged = charge
        out.state = State.STARTED
        if self.trace is not None:
            self.trace.begun(out)
        if out.departure is None:
            self._carry(out)
        elif self.devices is not None:
            self.devices.begin(out)
        else:
            self.stage(out)

    def stage(self, out: Outgoing) -> None:
        """Bring the payload to CPU memory, and go on from there."""
        assert out.departure is not None
        out.busy = True
        out.departure.begin(self.home, lambda flat, error: self._departed(out, flat, error), out.begun)

    def _carry(self, out: Outgoing) -> None:
        for way in self.ways:
            if way.takes(out):
                way.begin(out)
                return
        self.begin_stream(out)

    def _departed(self, out: Outgoing, flat: Flat | None, error: Exception | None) -> None:
        """The message is in CPU memory, all of it; or its device has failed."""
        out.busy = False
        out.under_way = None
        if out.withdrawn:
            self.end_withdrawn(out)
        elif out.state != State.STARTED:
            self.release(out)
        elif flat is None:
            self.void(out, error if isinstance(error, AiorlinfError) else InternalError(f"no copy and no reason: {error}"))
        elif not out.unchanged():
            self.trailer(out)  # which says so
        else:
            out.departure = None
            out.flat = flat
            out.versions = flat.versions()
            self._carry(out)

    def announce(self, out: Outgoing, start: Start) -> None:
        """Tell how the payload travels."""
        if self.trace is not None:
            self.trace.started(out, start.via)
        if self._conn is not None:
            self._conn.answer(frame(FrameType.START, out.message_id, start.encode(), Flag.CHARGED if out.charged else 0))
            out.charged = 0

    def hand_over(self, out: Outgoing, start: Start) -> None:
        """The payload is in the peer's reach already."""
        if self._conn is not None:
            self._conn.hold()
        self.announce(out, start)
        self.trailer(out)
        if self._conn is not None:
            self._conn.flush()

    def begin_stream(self, out: Outgoing, threshold: int | None = None, start: Start = _OVER_STREAM) -> None:
        """The payload over the stream, but for leaves that go around it from `threshold` bytes on."""
        self.announce(out, start)
        self.pump.begin(out, out.stream_pieces(threshold))

    def _over(self, out: Outgoing) -> None:
        """The stream has carried its part."""
        if not out.busy:
            self.trailer(out)

    def trailer(self, out: Outgoing) -> None:
        """The whole payload has left our memory."""
        if out.withdrawn:
            self.end_withdrawn(out)
            return
        if not out.unchanged():
            text = "a tensor was written to while it was being sent"
            self.void(out, UsageError(text, hint="do not change a tensor until its send is done, or send a clone()"))
            return
        if self.trace is not None:
            self.trace.left(out)
        self._end(out, b"", 0)
        if out.reply:
            out.state = State.SENT
        else:
            self._done(out)

    def _end(self, out: Outgoing, text: bytes, flags: int) -> None:
        if self._conn is not None:
            self._conn.answer(frame(FrameType.END, out.message_id, text, flags))

    def end_withdrawn(self, out: Outgoing) -> None:
        """The caller has cancelled, and nothing uses the memory any more."""
        if self.trace is not None:
            self.trace.sent(out, False)
        self._end(out, b"", Flag.WITHDRAWN)
        if not any(way.revoke(out) for way in self.ways):
            out.restore()
        self._forget(out)

    def void(self, out: Outgoing, error: AiorlinfError) -> None:
        """The payload cannot be completed: an error on both sides."""
        self._end(out, error.message.encode()[:4096], Flag.VOID)
        self._fail(out, error)

    def on_again(self, message_id: int) -> None:
        """The payload was lost on its way around the stream: over the stream this time."""
        out = self.pending.get(message_id)
        if out is not None and out.carrier and self.devices is not None:
            self.devices.again(out)
            return
        if out is None or not any(way.again(out) for way in self.ways) or out.state == State.DONE:
            return
        if out.withdrawn:
            self.end_withdrawn(out)
        else:
            out.state = State.STARTED
            self.begin_stream(out)

    # ---- replies

    def on_flow(self, key: int) -> None:
        """General receives take this stream's messages: small sends on it are done once written."""
        if len(self.flowing) < _FLOWING_LIMIT:
            self.flowing.add(key)

    def on_accepted(self, message_id: int) -> None:
        """The message is in the peer's hands."""
        out = self.pending.get(message_id)
        if out is None:
            for way in self.ways:
                way.accepted(message_id)
        elif out.state in (State.STARTED, State.SENT):
            self._done(out)

    def on_refused(self, message_id: int, body: memoryview) -> None:
        """The peer will not take the message; `body` says why."""
        out = self.pending.get(message_id)
        if out is None:
            for way in self.ways:
                way.dropped(message_id)
            self._on_regret(bytes(body))
            return
        self.flowing.discard(out.key)
        self._stop_waiting(out)
        if out.state != State.SENT:
            self._end(out, b"", Flag.WITHDRAWN)
        out.over(False)
        self._fail(out, _refusal(bytes(body), self.remote))

    def _on_regret(self, body: bytes) -> None:
        """A message whose send was done was of no use to the peer; or one that was cancelled, about which there is nothing to say."""
        try:
            key = orjson.loads(body).get("key")
        except (orjson.JSONDecodeError, AttributeError):
            raise WireError(f"{self.remote} refuses a message without a readable reason") from None
        if type(key) is not int:
            return
        self.flowing.discard(key)
        error = _refusal(body, self.remote)
        error.fill(operation="send", tag=key & 0xFFFFFFFF, local=self.local, remote=self.remote)
        log.warning("a message was lost after its send was done: %s", error)

    # ---- ends

    def _done(self, out: Outgoing) -> None:
        if self.trace is not None:
            self.trace.sent(out, True)
        work = out.work
        out.over(True)
        self._forget(out)
        if work is not None:
            work._finish(None)

    def _fail(self, out: Outgoing, error: AiorlinfError) -> None:
        if self.trace is not None:
            self.trace.sent(out, False)
        work = out.work
        out.restore()
        self._forget(out)
        error.fill(operation=out.operation, tag=out.key & 0xFFFFFFFF, local=self.local, remote=self.remote)
        if work is not None:
            work._fail(error)

    def _forget(self, out: Outgoing) -> None:
        out.state = State.DONE
        out.work = None
        out.moved = []
        out.held = None
        if self.pending.pop(out.message_id, None) is not None and out.flags & Flag.TENSOR:
            self._tensors -= 1
        self.release(out)
        if out.charged:  # the peer never knew
            self._charged -= out.charged
            out.charged = 0
            self._open_window()
        if self._backlog:
            self._work_off()
        elif self._idle is not None and not self.pending and not self._idle.done():
            self._idle.set_result(None)

    def release(self, out: Outgoing) -> None:
        """Let go of the caller's tensors, unless a way still uses them."""
        if not out.busy:
            out.flat = out.departure = None
        source, out.source = out.source, None
        if source is not None:
            source.drop()

    def idle(self) -> asyncio.Future[None]:
        """Done once everything sent so far is in the peer's hands, or has failed."""
        if self._idle is None or self._idle.done():
            self._idle = self.home.loop.create_future()
            if not self.pending and not self._backlog:
                self._idle.set_result(None)
        return self._idle

    def withdraw(self, out: Outgoing) -> None:
        """The caller cancelled its send."""
        if out.state == State.DONE:
            return
        if out.state == State.QUEUED:
            out.restore()
            out.state = State.DONE
            backlog = self._backlog
            while backlog and backlog[-1].state == State.DONE:
                backlog.pop()
            while backlog and backlog[0].state == State.DONE:
                backlog.popleft()
            self._forget(out)
            return
        self._stop_waiting(out)
        if out.busy:
            out.withdrawn = True  # a started transfer cannot be recalled; it is thrown away at its end
            out.over(False)
        else:
            self.end_withdrawn(out)

    def fail_all(self, make_error: Callable[[], AiorlinfError]) -> None:
        """The link has ended: nothing that is unfinished will finish."""
        self._conn = None
        self.flowing.clear()
        self.pump.down()
        ended = self.unfinished()
        self._backlog.clear()
        self._waiting.clear()
        for way in self.ways:
            way.close()
        if self.devices is not None:
            self.devices.close()
        for out in ended:
            error = make_error()
            error.fill(bytes_done=out.position, bytes_expected=out.total)
            if out.in_shared is not None:
                out.moved = []  # the peer may look at that memory
            self._fail(out, error)

    def tensors_waiting(self) -> bool:
        """A `send_tensor` of ours may be waiting for its `recv_tensor`."""
        return self._tensors > 0

    @property
    def connected(self) -> bool:
        """The link is up."""
        return self._conn is not None

    def unfinished(self) -> list[Outgoing]:
        """Messages that are not yet in the peer's hands, oldest first."""
        backlog = [out for out in self._backlog if out.state == State.QUEUED]
        return [*self.pending.values(), *backlog]


def _refusal(body: bytes, remote: str) -> AiorlinfError:
    try:
        fact: dict[str, Any] = orjson.loads(body)
        if fact["why"] == "mismatch":
            return Mismatch(str(fact["sent"]), str(fact["expected"]))
        if fact["why"] == "too large":
            return UsageError(str(fact["message"]))
        return RemoteError(str(fact["message"]), remote_type=fact.get("type"))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return PeerError(f"{remote} refused the message without a readable reason")
