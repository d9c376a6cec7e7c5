"""The sending half of a link: admission by window, the pump of large payloads, trailers, replies.

States of a message (`Outgoing.state`), only downwards:

QUEUED    the link is not up yet
OPENED    its manifest is on the wire; it waits for the window or for GO
STARTED   its payload is on the way
SENT      everything is written; a reply is awaited
DONE      its work is finished, failed or cancelled

A small message leaves whole, at once, if the window has room. A send is done when the payload's memory is free again: for
small messages that is when they are copied into the frame. Two exceptions wait for the peer's answer: `send_tensor`, which is
done when a `recv_tensor` took it, and the first messages of a stream until the peer says (FLOW) that general receives
take them; so a `send` that meets a `recv_tensor` fails on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import orjson

from aiorlinf.errors import AiorlinfError, Mismatch, PeerError, RemoteError, UsageError
from aiorlinf.link.memory import byte_tensor
from aiorlinf.wire.frames import HEADER, MESSAGE_ID, OPEN_PREFIX, Flag, FrameType, Start, Via, frame

if TYPE_CHECKING:
    import torch

    from aiorlinf.link.connection import FrameWriter
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["FRAME_COST", "Outgoing", "PayloadLane", "Sender", "State"]

FRAME_COST = 64
"""Bytes charged to the window for a message besides its payload, so that empty messages are bounded too."""

_CHUNKS_PER_TURN = 2
_DRAIN_POLL_SECONDS = 0.0005
_FLOWING_LIMIT = 4096


class State:
    QUEUED = 0
    OPENED = 1
    STARTED = 2
    SENT = 3
    DONE = 4


STATE_NAMES = ("waits for the link", "waits for the window or the receive", "under way", "waits for the peer's answer", "over")


class PayloadLane(Protocol):
    """A way around the stream for large leaves, one direction of one link (`backends.gloo`)."""

    via: int
    threshold: int

    def ready(self) -> int | None:
        """The generation that can be used now, None when it has to be prepared first."""

    def prepare(self, then: Callable[[AiorlinfError | None], None]) -> None:
        """Make it usable, then call back on the home thread; with an error it cannot be."""

    def send(self, generation: int, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None:
        """Send these one-dimensional uint8 tensors in order, then call back once on the home thread."""

    def drop_out(self, generation: int, reason: str) -> None:
        """Forget this generation."""


class Outgoing:
    """One message on its way out.

    Attributes:
        work: what the caller holds.
        key: stream.
        flags: TENSOR, WANT_REPLY, INLINE.
        body: the whole small message, or None.
        head: bytes at the front of `body` that describe it (a tensor's header); they go into the OPEN frame if the message must wait.
        flat: the flattened object (keeps its tensors alive), or None.
        manifest: encoded description of `flat`.
        total: payload bytes.
        charged: bytes taken from the window.
        position: payload bytes handed to the stream.
        stream_bytes: payload bytes that travel over the stream (the rest goes through a lane).
        lane_pending: the lane has not finished its part.
        lane_generation: of the pair that carries it, 0 for none.
        versions: version counters of the tensors when the payload started.
        attempt: how often the payload was started; chunks of an earlier attempt are dropped.
        withdrawn: cancelled, but a transfer that cannot be recalled still uses the memory.
        reply: the work finishes with the peer's answer.
        sender: the sending half that has it, None before that.
    """

    __slots__ = (
        "attempt",
        "body",
        "charged",
        "flags",
        "flat",
        "head",
        "key",
        "lane_generation",
        "lane_pending",
        "manifest",
        "message_id",
        "position",
        "reply",
        "sender",
        "state",
        "stream_bytes",
        "total",
        "versions",
        "withdrawn",
        "work",
    )

    def __init__(
        self,
        work: AsyncWork[None],
        key: int,
        *,
        flags: int = 0,
        body: bytes | None = None,
        head: int = 0,
        flat: Flat | None = None,
        manifest: bytes = b"",
        total: int,
    ) -> None:
        self.work = work
        self.key = key
        self.flags = flags
        self.body = body
        self.head = head
        self.flat = flat
        self.manifest = manifest
        self.total = total
        self.state = State.QUEUED
        self.message_id = 0
        self.charged = 0
        self.position = 0
        self.stream_bytes = total
        self.lane_pending = False
        self.lane_generation = 0
        self.versions: object = None
        self.attempt = 0
        self.withdrawn = False
        self.reply = False
        self.sender: Sender | None = None

    def __str__(self) -> str:
        return f"tag {self.key & 0xFFFFFFFF}, {self.total} bytes, {STATE_NAMES[self.state]}"

    def stream_pieces(self, threshold: int | None) -> list[memoryview]:
        """The parts of the payload that travel over the stream, when leaves from `threshold` on do not."""
        if self.flat is None:
            return [memoryview(self.body or b"")[self.head :]]
        pieces = []
        for leaf in self.flat.leaves:
            if leaf.nbytes and (threshold is None or not _on_lane(leaf, threshold)):
                assert leaf.raw is not None
                pieces.append(leaf.raw)
        return pieces


def _on_lane(leaf: Leaf, threshold: int) -> bool:
    return leaf.nbytes >= threshold and leaf.spec.is_tensor


def _chunks(pieces: list[memoryview], limit: int) -> Iterator[tuple[list[memoryview], int]]:
    """Cut a payload into groups of views of at most `limit` bytes together."""
    group: list[memoryview] = []
    size = 0
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            part = piece[offset : offset + limit - size]
            group.append(part)
            size += len(part)
            offset += len(part)
            if size == limit:
                yield group, size
                group, size = [], 0
    if size:
        yield group, size


class _Pumped:
    """A message whose payload goes out over the stream."""

    __slots__ = ("attempt", "chunks", "out")

    def __init__(self, out: Outgoing, chunks: Iterator[tuple[list[memoryview], int]]) -> None:
        self.out = out
        self.attempt = out.attempt
        self.chunks = chunks


class Sender:
    """See the module. Everything here runs on the home thread.

    Attributes:
        window: bytes the peer accepts before a receive is posted.
        messages, payload_bytes: sent so far.
        pending: by message id, everything the peer may still answer or that is not fully written.
    """

    def __init__(self, home: LoopHome, chunk_bytes: int, local: str, remote: str) -> None:
        self.home = home
        self.local = local
        self.remote = remote
        self.chunk_bytes = chunk_bytes
        self.window = 0
        self.lane: PayloadLane | None = None
        self.lane_required = False
        self.messages = 0
        self.payload_bytes = 0
        self.lane_bytes = 0
        self.pending: dict[int, Outgoing] = {}
        self._conn: FrameWriter | None = None
        self._charged = 0
        self._consumed = 0
        self._next_id = 1
        self._flowing: set[int] = set()
        self._backlog: deque[Outgoing] = deque()
        self._waiting: deque[Outgoing] = deque()
        self._lane_queue: deque[Outgoing] = deque()
        self._pumped: deque[_Pumped] = deque()
        self._draining: list[Outgoing] = []
        self._turn_scheduled = False

    # ---- admission

    def up(self, conn: FrameWriter, window: int) -> None:
        """The link is connected: what waited for it leaves now, in order."""
        self._conn = conn
        self.window = window
        backlog, self._backlog = self._backlog, deque()
        for out in backlog:
            if out.state == State.QUEUED:
                self._admit(out)

    def send_small(self, work: AsyncWork[None], key: int, body: bytes) -> None:
        """A general message whose payload is in `body`. The common case, kept short."""
        conn = self._conn
        cost = len(body) + FRAME_COST
        if conn is not None and key in self._flowing and self._charged + cost - self._consumed <= self.window:
            self._charged += cost
            self.messages += 1
            self.payload_bytes += len(body)
            conn.send(HEADER.pack(len(body), FrameType.DATA, 0, 0, key) + body)
            work._finish(None)
            return
        self.send(Outgoing(work, key, body=body, total=len(body)))

    def send(self, out: Outgoing) -> None:
        """Take a message; its work finishes by the rules of the module."""
        out.work._detail = out
        out.sender = self
        if self._conn is None:
            self._backlog.append(out)
        else:
            self._admit(out)

    def _credit(self) -> int:
        return self.window - (self._charged - self._consumed)

    def _admit(self, out: Outgoing) -> None:
        conn = self._conn
        assert conn is not None
        self.messages += 1
        self.payload_bytes += out.total
        # What goes around the stream can be lost on its own: the memory is needed until the peer has it.
        around = self.lane is not None and out.flat is not None and any(_on_lane(leaf, self.lane.threshold) for leaf in out.flat.leaves)
        out.reply = bool(out.flags & Flag.TENSOR) or around or out.key not in self._flowing
        if out.reply:
            out.flags |= Flag.WANT_REPLY
        body = out.body
        cost = (out.total if body is None else len(body)) + FRAME_COST
        if body is not None:
            if cost <= self._credit():
                self._charged += cost
                out.charged = cost
                if out.reply:
                    self._register(out)
                    out.state = State.SENT
                    conn.send(frame(FrameType.DATA, out.key, MESSAGE_ID.pack(out.message_id) + body, out.flags))
                else:
                    conn.send(frame(FrameType.DATA, out.key, body, out.flags))
                    self._done(out)
                return
            if out.head:
                out.manifest = body[: out.head]
            else:
                out.flags |= Flag.INLINE
        self._register(out)
        out.state = State.OPENED
        conn.send(frame(FrameType.OPEN, out.key, OPEN_PREFIX.pack(out.message_id, out.total) + out.manifest, out.flags))
        # A tensor goes straight into the receiver's own memory, so it waits for its receive (GO).
        if not out.flags & Flag.TENSOR and not self._waiting and cost <= self._credit():
            self._begin(out, cost)
        else:
            self._waiting.append(out)

    def _register(self, out: Outgoing) -> None:
        out.message_id = self._next_id
        self._next_id += 1
        self.pending[out.message_id] = out

    def on_credit(self, consumed: int) -> None:
        """The peer has consumed so many bytes since the beginning."""
        self._consumed = max(self._consumed, min(consumed, self._charged))
        self._open_window()

    def _open_window(self) -> None:
        while self._waiting:
            out = next((out for out in self._waiting if not out.flags & Flag.TENSOR and out.total + FRAME_COST <= self.window), None)
            if out is None or out.total + FRAME_COST > self._credit():
                return
            self._waiting.remove(out)
            self._begin(out, out.total + FRAME_COST)

    def on_go(self, message_id: int) -> None:
        """The receiver has a place for this message."""
        out = self.pending.get(message_id)
        if out is not None and out.state == State.OPENED:
            self._waiting.remove(out)
            self._begin(out, 0)

    # ---- payload

    def _begin(self, out: Outgoing, charge: int) -> None:
        self._charged += charge
        out.charged = charge
        out.state = State.STARTED
        if out.flat is not None:
            out.versions = out.flat.versions()
        lane = self.lane
        if lane is not None and out.flat is not None and any(_on_lane(leaf, lane.threshold) for leaf in out.flat.leaves):
            self._lane_queue.append(out)
            self._run_lane()
        else:
            self._begin_stream(out, None, Start(Via.STREAM, 0, 0))

    def _begin_stream(self, out: Outgoing, threshold: int | None, start: Start) -> None:
        assert self._conn is not None
        flags = Flag.CHARGED if out.charged else 0
        self._conn.send(frame(FrameType.START, out.message_id, start.encode(), flags))
        pieces = out.stream_pieces(threshold)
        out.stream_bytes = sum(map(len, pieces))
        out.position = 0
        out.attempt += 1
        self._pumped.append(_Pumped(out, _chunks(pieces, self.chunk_bytes)))
        self.pump()

    def pump(self) -> None:
        """Write chunks while the socket has room; a few per turn, so that the loop stays free."""
        conn = self._conn
        if conn is None:
            return
        budget = _CHUNKS_PER_TURN
        while self._pumped and not conn.paused:
            if not budget:
                self._schedule_turn(0.0)
                return
            pumped = self._pumped.popleft()
            out = pumped.out
            if out.state != State.STARTED or out.withdrawn or pumped.attempt != out.attempt:
                continue
            chunk = next(pumped.chunks, None)
            if chunk is None:
                self._draining.append(out)
                continue
            budget -= 1
            pieces, size = chunk
            conn.send_chunk(out.message_id, pieces, size)
            out.position += size
            if out.position < out.stream_bytes:
                self._pumped.append(pumped)  # others get their turn in between
            else:
                self._draining.append(out)
        self._finish_drained()

    def _schedule_turn(self, delay: float) -> None:
        if self._turn_scheduled:
            return
        self._turn_scheduled = True
        loop = self.home.loop
        if delay:
            loop.call_later(delay, self._turn)
        else:
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        self.pump()

    def _finish_drained(self) -> None:
        """Send the trailer of messages whose every byte has left our memory."""
        conn = self._conn
        if not self._draining or conn is None:
            return
        if not conn.drained():
            if not conn.paused:  # otherwise on_writable calls us
                self._schedule_turn(_DRAIN_POLL_SECONDS)
            return
        draining, self._draining = self._draining, []
        for out in draining:
            if out.state == State.STARTED and not out.lane_pending:
                self._trailer(out)

    def _trailer(self, out: Outgoing) -> None:
        conn = self._conn
        assert conn is not None
        if out.withdrawn:
            self._end(out, b"", Flag.WITHDRAWN)
            self._forget(out)
            return
        if out.flat is not None and out.flat.versions() != out.versions:
            text = "a tensor was written to while it was being sent"
            self._end(out, text.encode(), Flag.VOID)
            self._fail(out, UsageError(text, hint="do not change a tensor until its send is done, or send a clone()"))
            return
        self._end(out, b"", 0)
        if out.reply:
            out.state = State.SENT
        else:
            self._done(out)

    def _end(self, out: Outgoing, text: bytes, flags: int) -> None:
        if self._conn is not None:
            self._conn.send(frame(FrameType.END, out.message_id, text, flags))

    # ---- lanes

    def _run_lane(self) -> None:
        """Start what waits for the lane, in order; both sides post their transfers in the order of the START frames."""
        lane = self.lane
        if lane is None or not self._lane_queue:
            return
        generation = lane.ready()
        if generation is None:
            lane.prepare(self._lane_prepared)
            return
        while self._lane_queue:
            out = self._lane_queue.popleft()
            if out.withdrawn or out.state != State.STARTED:
                if out.withdrawn:
                    self._end(out, b"", Flag.WITHDRAWN)
                    self._forget(out)
                continue
            self._begin_lane(lane, generation, out)

    def _lane_prepared(self, error: AiorlinfError | None) -> None:
        if error is None:
            self._run_lane()
            return
        queue, self._lane_queue = self._lane_queue, deque()
        if not self.lane_required:
            self.lane = None
        for out in queue:
            if out.state != State.STARTED:
                continue
            if self.lane_required or out.withdrawn:
                self._end(out, str(error).encode(), Flag.WITHDRAWN if out.withdrawn else Flag.VOID)
                if out.withdrawn:
                    self._forget(out)
                else:
                    self._fail(out, error)
            else:
                self._begin_stream(out, None, Start(Via.STREAM, 0, 0))

    def _begin_lane(self, lane: PayloadLane, generation: int, out: Outgoing) -> None:
        assert out.flat is not None
        leaves = [byte_tensor(leaf.memory) for leaf in out.flat.leaves if _on_lane(leaf, lane.threshold)]
        out.lane_pending = True
        out.lane_generation = generation
        self.lane_bytes += sum(leaf.numel() for leaf in leaves)

        def finished(error: BaseException | None) -> None:
            out.lane_pending = False
            if out.state != State.STARTED or out.lane_generation != generation:
                if out.state == State.DONE:
                    out.flat = None
                return
            if error is not None and not out.withdrawn:
                # The pair is gone; the stream is not. Start again over the stream: nothing was committed.
                self._begin_stream(out, None, Start(Via.STREAM, 0, 0))
            elif out.position >= out.stream_bytes:
                self._draining.append(out)
                self._finish_drained()

        self._begin_stream(out, lane.threshold, Start(lane.via, generation, lane.threshold))
        lane.send(generation, leaves, finished)

    # ---- replies

    def on_flow(self, key: int) -> None:
        """General receives take this stream's messages: small sends on it are done once written."""
        if len(self._flowing) < _FLOWING_LIMIT:
            self._flowing.add(key)

    def on_again(self, message_id: int) -> None:
        """The lane lost the payload on the peer's side: over the stream this time."""
        out = self.pending.get(message_id)
        if out is None or not out.lane_generation:
            return
        if self.lane is not None:
            self.lane.drop_out(out.lane_generation, f"{self.remote} could not receive through it")
        out.lane_generation = 0
        if out.withdrawn:
            self._end(out, b"", Flag.WITHDRAWN)
            self._forget(out)
            return
        out.state = State.STARTED
        self._begin_stream(out, None, Start(Via.STREAM, 0, 0))

    def on_accepted(self, message_id: int) -> None:
        """The message is in the peer's hands."""
        out = self.pending.get(message_id)
        if out is not None and out.state in (State.STARTED, State.SENT):
            self._done(out)

    def on_refused(self, message_id: int, body: memoryview) -> None:
        """The peer will not take the message; `body` says why."""
        out = self.pending.get(message_id)
        if out is None:
            return
        self._flowing.discard(out.key)
        if out.state == State.OPENED and out in self._waiting:
            self._waiting.remove(out)
        if out.state != State.SENT:
            self._end(out, b"", Flag.WITHDRAWN)
        self._fail(out, _refusal(bytes(body), self.remote))

    # ---- ends

    def _done(self, out: Outgoing) -> None:
        self._forget(out)
        out.work._finish(None)

    def _fail(self, out: Outgoing, error: AiorlinfError) -> None:
        self._forget(out)
        tag = out.key & 0xFFFFFFFF
        error.fill(operation=out.work.operation, tag=tag, local=self.local, remote=self.remote)
        out.work._fail(error)

    def _forget(self, out: Outgoing) -> None:
        out.state = State.DONE
        self.pending.pop(out.message_id, None)
        if not out.lane_pending:
            out.flat = None  # the caller's tensors are free again

    def withdraw(self, out: Outgoing) -> None:
        """The caller cancelled its send."""
        if out.state == State.DONE:
            return
        if out.state == State.QUEUED:
            out.state = State.DONE
            return
        if out.state == State.OPENED:
            self._waiting.remove(out)
        if out.lane_pending or out in self._lane_queue:
            out.withdrawn = True  # a started transfer cannot be recalled; it is thrown away at its end
            return
        self._end(out, b"", Flag.WITHDRAWN)
        self._forget(out)

    def fail_all(self, make_error: Callable[[], AiorlinfError]) -> None:
        """The link has ended: nothing that is unfinished will finish."""
        self._conn = None
        ended = list(self._backlog) + list(self.pending.values())
        self._backlog.clear()
        self._waiting.clear()
        self._lane_queue.clear()
        self._pumped.clear()
        self._draining.clear()
        for out in ended:
            if out.state != State.DONE:
                error = make_error()
                error.fill(bytes_done=out.position, bytes_expected=out.total)
                self._fail(out, error)

    def tensors_waiting(self) -> bool:
        """A `send_tensor` waits for its `recv_tensor`."""
        return any(out.flags & Flag.TENSOR and out.state in (State.OPENED, State.SENT) for out in self.pending.values())

    def unfinished(self) -> list[Outgoing]:
        """Messages that are not yet in the peer's hands, oldest first."""
        return [out for out in (*self._backlog, *self.pending.values()) if out.state != State.DONE]


def _refusal(body: bytes, remote: str) -> AiorlinfError:
    try:
        fact = orjson.loads(body)
        if fact["why"] == "mismatch":
            return Mismatch(str(fact["sent"]), str(fact["expected"]))
        if fact["why"] == "too large":
            return UsageError(str(fact["message"]))
        return RemoteError(str(fact["message"]), remote_type=fact.get("type"))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return PeerError(f"{remote} refused the message without a readable reason")
