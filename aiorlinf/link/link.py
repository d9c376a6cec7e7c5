"""The one connection between two workers, seen from one of them.

A link exists from the first use, before it is connected; operations wait in it. It ends once, by `end`: everything pending fails
with the same cause, complete messages that nobody took yet can still be received.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import AiorlinfError, ClosedError, PeerLeft, PeerLost, WireError
from aiorlinf.link.connection import FrameWriter
from aiorlinf.link.device_facts import DeviceFacts
from aiorlinf.link.mailbox import Mailbox, Wildcard
from aiorlinf.link.past import EndedLinks
from aiorlinf.link.receiver import Receiver
from aiorlinf.link.sender import Sender
from aiorlinf.link.shared import SharedOut
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.wire.frames import Flag, FrameType, frame

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Link", "LinkState", "LinkStats", "PairHandler"]


class LinkState(enum.Enum):
    """Only moves down this list."""

    CONNECTING = "connecting"
    UP = "up"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters of one link, since it came up.

    Attributes:
        remote: the peer's address; `incarnation` its life.
        state: connecting, up, closing or ended.
        backend: carrier of large payloads to this peer, `reason` why.
        address: ``host:port`` of the peer, None before the link is up.
        messages_sent, messages_received: whole messages.
        bytes_sent, bytes_received: payload bytes.
        around_bytes_sent: those of them that went around the stream, through the backend.
        shared_bytes_lent: our shared memory that the peer has not given back; a message counts whole as long as any part of it is in use.
        shared_bytes_held: the peer's shared memory that tensors received here keep, counted the same way.
        device_backend, device_reason: how tensors on accelerators are sent to the peer, and why; empty before the first one.
        device_opened, device_reused: how often memory of the peer's devices was opened to copy from (`cuda_ipc`), and how often a tensor
            was found in what was open.
        pending_sends: messages not yet in the peer's hands.
        unread_messages: messages that arrived and that nobody received yet.
        mismatches: messages refused because the receiver expected something else.
        reconnects: how often the network cut the connection and it was restored.
        compression: what it did for this peer (see the README), None if the job does not compress or the link is not up.
    """

    remote: str
    incarnation: int
    state: str
    backend: str
    reason: str
    address: str | None
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    around_bytes_sent: int
    shared_bytes_lent: int
    shared_bytes_held: int
    pending_sends: int
    unread_messages: int
    mismatches: int
    compression: dict[str, Any] | None
    device_backend: str = ""
    device_reason: str = ""
    device_opened: int = 0
    device_reused: int = 0
    reconnects: int = 0

    def __str__(self) -> str:
        who = f"{self.remote}#{self.incarnation}" if self.incarnation else self.remote
        lines = [f"{who}: {self.state}, large payloads over {self.backend} ({self.reason})"]
        if self.device_backend:
            lines.append(f"  between devices over {self.device_backend} ({self.device_reason})")
        lines.append(f"  sent {self.messages_sent} messages, {self.bytes_sent} bytes, {self.around_bytes_sent} of them around the stream")
        lines.append(f"  received {self.messages_received} messages, {self.bytes_received} bytes")
        rest = ("pending_sends", "unread_messages", "mismatches", "shared_bytes_lent", "shared_bytes_held")
        shown = [f"{name} {getattr(self, name)}" for name in rest if getattr(self, name)]
        if shown:
            lines.append(f"  {', '.join(shown)}")
        return "\n".join(lines)


class PairHandler(Protocol):
    """What a link hands PAIR frames to; see `rendezvous.pairs`."""

    def on_pair(self, generation: int, flags: int, body: memoryview) -> None: ...
    def close(self) -> None: ...


class Link:
    """See the module. Everything here runs on the home thread.

    Attributes:
        state: see `LinkState`; set by `up`, `say_goodbye` and `end` only.
        remote: the peer's address; `identity` its life, once the link is up.
        settled: done once the link is up or has ended.
        cause: makes the error of everything that was pending when the link ended.
        backend, reason: how large payloads travel, and why.
        missing: the manager does not know the peer, or has not answered yet.
        codes: tensors that are sent over it are compressed.
        reconnects: connections that took over from one that the network had cut.
        pairs, device_pairs: process groups, between CPUs and between accelerators.
        tell_devices: tells the peer which accelerators we have.
    """

    def __init__(
        self,
        home: LoopHome,
        local: WorkerAddress,
        remote: WorkerAddress,
        config: CollectiveConfig,
        wildcards: dict[int, Wildcard],
        orders: Iterator[int],
        on_end: Callable[[Link], None],
    ) -> None:
        self.home = home
        self.local = local
        self.remote = remote
        self.identity: Identity | None = None
        self.state: LinkState = LinkState.CONNECTING
        self.settled: asyncio.Future[None] = home.loop.create_future()
        self.cause: Callable[[], AiorlinfError] | None = None
        self.address: str | None = None
        self.backend = "stream"
        self.reason = "not connected yet"
        self.missing = False
        self.reconnects = 0
        self.codes = False
        self.pairs: PairHandler | None = None
        self.device_pairs: PairHandler | None = None
        self.tell_devices: Callable[[], None] = lambda: None
        self.shared_out: SharedOut | None = None
        self.config: CollectiveConfig = config
        self.mailbox: Mailbox = Mailbox(self, wildcards, orders)
        self.sender: Sender = Sender(home, config.chunk_bytes, local, remote)
        self.receiver: Receiver = Receiver(home, self.mailbox, config, local, remote)
        self.receiver.lockout.sends_waiting = self.sender.tensors_waiting
        self.on_data: Callable[[int, int, memoryview], None] = self.receiver.on_data
        self._conn: FrameWriter | None = None
        self._on_end = on_end
        self._left = False

    # ---- life

    def up(self, conn: FrameWriter, identity: Identity, window: int, address: str | None) -> None:
        """The connection is made and proved. `window` is what the peer accepts before a receive is posted."""
        if self.state is not LinkState.CONNECTING:
            raise WireError(f"link to {self.remote} is {self.state.value}, it cannot come up")
        self.state = LinkState.UP
        self.settled.set_result(None)
        self.identity = identity
        self.address = address
        self._conn = conn
        self.receiver.up(conn)
        self.sender.up(conn, window)

    def configure(self, config: CollectiveConfig) -> None:
        """The job's configuration has come; a link that was used before knows only the defaults."""
        self.config = config
        self.sender.pump.chunk_bytes = config.chunk_bytes
        self.receiver.configure(config)

    def release_shared(self, body: bytes, abandoned: bool = False) -> None:
        """Tell the peer which of its shared memory nobody here looks at any more; `abandoned`: but perhaps somebody elsewhere."""
        if self._conn is not None:
            self._conn.answer(frame(FrameType.RELEASE, 0, body, Flag.ABANDONED if abandoned else 0))

    def forget_segment(self, number: int) -> None:
        """The arena dropped a segment; the peer need not keep it mapped."""
        for name in self.shared_out.forget(number) if self.shared_out is not None else ():
            if self._conn is not None:
                self._conn.answer(frame(FrameType.DROP, name))

    def stop_receiving(self) -> None:
        """The worker is closing: its receives end, its sends still may finish."""
        self.receiver.fail_posted(lambda: ClosedError("the worker was closed"))

    @property
    def usable(self) -> bool:
        """New operations may start."""
        return self.state is LinkState.CONNECTING or self.state is LinkState.UP

    def say_goodbye(self) -> None:
        """Tell the peer that nothing more will come, after everything that is queued."""
        if self.state is LinkState.UP:
            self.state = LinkState.CLOSING
            conn = self._conn
            assert conn is not None
            conn.send(frame(FrameType.GOODBYE, 0))
            self.sender.pump.down()  # a payload that is not over by now is cut short: its send must not look done
            conn.finish()

    def end(self, make_error: Callable[[], AiorlinfError]) -> None:
        """End now. Everything unfinished fails with an error of `make_error`."""
        if self.state is LinkState.ENDED:
            return
        self.state = LinkState.ENDED
        if not self.settled.done():
            self.settled.set_result(None)
        self.cause = make_error
        conn, self._conn = self._conn, None
        self.sender.fail_all(make_error)
        self.receiver.fail_all(make_error)
        if self.pairs is not None:
            self.pairs.close()
            self.pairs = self.receiver.lane = None  # they refer to the connection and its buffers
        if self.device_pairs is not None:
            if self.receiver.devices is not None:
                self.receiver.devices.close()
            self.device_pairs.close()
            self.device_pairs = self.receiver.devices = None
        if conn is not None:
            conn.abort()
        self._on_end(self)

    # ---- the connection's side (FrameHandler)

    def on_frame(self, kind: int, flags: int, key: int, body: memoryview) -> None:
        if kind == FrameType.CREDIT:
            self.sender.on_credit(key)
        elif kind == FrameType.ACCEPTED:
            self.sender.on_accepted(key)
            if flags & Flag.RELIEVED:
                # The peer saw tensors waiting both ways; so did the message that it waits for itself.
                self.receiver.lockout.relieve()
        elif kind == FrameType.PLACED:
            self.receiver.on_placed(key, flags, body)
        elif kind == FrameType.RELEASE:
            if self.shared_out is None:
                raise WireError("shared memory is released that this side has not got")
            self.shared_out.on_release(body, bool(flags & Flag.ABANDONED))
        elif kind == FrameType.OPEN:
            self.receiver.on_open(key, flags, body)
        elif kind == FrameType.START:
            self.receiver.payloads.on_start(key, flags, body)
        elif kind == FrameType.END:
            self.receiver.payloads.on_end(key, flags, body)
        elif kind == FrameType.GO:
            self.sender.on_go(key)
        elif kind == FrameType.REFUSED:
            self.sender.on_refused(key, body)
        elif kind == FrameType.FLOW:
            self.sender.on_flow(key)
        elif kind == FrameType.AGAIN:
            self.sender.on_again(key)
        elif kind == FrameType.DROP:
            if self.receiver.shared is not None:
                self.receiver.shared.drop(key)
        elif kind == FrameType.PAIR:
            pairs = self.device_pairs if flags & Flag.DEVICES else self.pairs
            if pairs is None:
                raise WireError("a pair is offered, but this side has no backend for pairs")
            pairs.on_pair(key, flags, body)
        elif kind == FrameType.DEVICE:
            self._on_devices(flags, body)
        elif kind == FrameType.COPIED:
            if self.sender.devices is not None:
                self.sender.devices.on_copied(key)
        elif kind == FrameType.GOODBYE:
            self._on_goodbye()
        elif kind == FrameType.TAKEN:
            pass  # whoever accepted the connection has waited for it
        else:
            raise WireError(f"unknown frame type {kind}")

    def _on_devices(self, flags: int, body: memoryview) -> None:
        facts = DeviceFacts.decode(body)
        if flags & Flag.ASK:
            self.tell_devices()  # before what may be sent now
        if self.sender.devices is not None:
            self.sender.devices.on_facts(facts)

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        return self.receiver.payloads.on_chunk(message_id)

    def on_writable(self) -> None:
        self.sender.pump.run()

    def before_flush(self) -> None:
        report = self.receiver.take_report(riding=True)
        if report is not None and self._conn is not None:
            self._conn.answer(report)

    def _on_goodbye(self) -> None:
        """The peer sends nothing more: what it owes us fails now, what it sent stays."""
        self._left = True
        conn = self._conn
        remote = str(self.identity)
        if self.state is LinkState.UP and conn is not None:
            conn.finish()
        self.end_softly(lambda: PeerLeft(f"{remote} closed"))

    def end_softly(self, make_error: Callable[[], AiorlinfError]) -> None:
        """As `end`, but what is queued on the connection still leaves."""
        conn, self._conn = self._conn, None
        self.end(make_error)
        if conn is not None:
            conn.finish()

    def on_lost(self, error: BaseException | None) -> None:
        """The connection is gone."""
        self._conn = None
        if self.state is LinkState.CLOSING:
            self.end(lambda: ClosedError("the worker was closed"))
            return
        remote = str(self.identity)
        address = self.address
        if isinstance(error, AiorlinfError):
            cause = error
            self.end(lambda: _copy(cause, remote))
            return
        why = "its connection ended without a goodbye" if error is None else f"its connection broke: {error}"
        self.end(lambda: PeerLost(f"{remote} is gone: {why}", address=address))

    # ---- diagnosis

    def stats(self) -> LinkStats:
        """A frozen copy of the counters."""
        sender, receiver = self.sender, self.receiver
        return LinkStats(
            remote=str(self.remote),
            incarnation=self.identity.incarnation if self.identity else Incarnation(0),
            state=self.state.value,
            backend=self.backend,
            reason=self.reason,
            address=self.address,
            messages_sent=sender.messages,
            messages_received=receiver.messages,
            bytes_sent=sender.payload_bytes,
            bytes_received=receiver.payload_bytes,
            around_bytes_sent=sender.around_bytes,
            shared_bytes_lent=0 if self.shared_out is None else self.shared_out.lent_bytes,
            shared_bytes_held=0 if receiver.shared is None else receiver.shared.held_bytes,
            pending_sends=len(sender.unfinished()),
            unread_messages=len(self.mailbox),
            mismatches=receiver.mismatches,
            compression=None if receiver.coding is None else receiver.coding.as_dict(),
            device_backend="" if sender.devices is None else sender.devices.backend,
            device_reason="" if sender.devices is None else sender.devices.reason,
            device_opened=0 if receiver.devices is None else receiver.devices.openings.opened,
            device_reused=0 if receiver.devices is None else receiver.devices.openings.reused,
            reconnects=self.reconnects,
        )

    def carried(self) -> EndedLinks:
        """What is left of its counters when it has ended."""
        sender, receiver = self.sender, self.receiver
        return EndedLinks(
            remote=str(self.remote),
            links=1,
            messages_sent=sender.messages,
            messages_received=receiver.messages,
            bytes_sent=sender.payload_bytes,
            bytes_received=receiver.payload_bytes,
            around_bytes_sent=sender.around_bytes,
            mismatches=receiver.mismatches,
            reconnects=self.reconnects,
        )

    def __repr__(self) -> str:
        return f"<Link {self.local} - {self.identity or self.remote} {self.state.value} {self.backend}>"


def _copy(error: AiorlinfError, remote: str) -> AiorlinfError:
    """One error per operation: each is filled in with its own facts and has a traceback of its own."""
    fresh: Any = error.__reduce__()
    copy: AiorlinfError = fresh[0](*fresh[1])
    copy.__cause__ = error
    copy.fill(remote=remote)
    return copy
