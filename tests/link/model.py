"""The model of a link, and the machine that holds the real one against it.

What must hold is said once, for one stream (one direction, one tag). Let P be the receives that wait, in the order in which they were
posted, and L the announced messages that nobody has, in the order in which they were sent. Then at every moment

- the i-th of P is to get the i-th of L, and has it as soon as the whole message is there;
- the two disagree (an object for a tensor, another shape) as soon as both are known: then both are over, with `Mismatch`;
- a receive that is cancelled, even one that is done but whose value nobody has taken, leaves P, and its message is in L at its old place;
- a message that its sender cancelled leaves L when the peer hears of it, unless somebody has it, or had it and gave it back.

`Model` follows what the wire shows to know L, and looks after every frame whether each work is in the state that follows from this.
"""

from __future__ import annotations

import asyncio
import gc
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import (
    AiorlinfError,
    BackendUnavailable,
    ClosedError,
    Mismatch,
    PeerLeft,
    PeerLost,
    RemoteError,
    UnsupportedObject,
    UsageError,
)
from aiorlinf.link.connection import FrameHandler
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.outgoing import Outgoing, State
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.link.ways import LaneWay, SharedWay
from aiorlinf.wire.frames import MESSAGE_ID, Flag, FrameType
from aiorlinf.work.base import AsyncWork
from tests.link.planned_coding import CODECS, PlannedCoding
from tests.link.planned_lane import LaneEnds, PlannedLane
from tests.link.planned_memory import PlannedMemory
from tests.link.shapes import INLINE, THRESHOLD, WINDOW, Shape, fills
from tests.link.stage import Gone, Side, StepHome, StepLoop, join

__all__ = ["Model", "Receiving", "Sending"]

OVER = (PeerLost, PeerLeft, ClosedError)
"""What the end of a link does to what is pending."""


@dataclass(eq=False)
class Sending:
    """One message, from the call of `send` on."""

    side: int
    tag: int
    number: int
    shape: Shape
    obj: Any
    tensors: list[torch.Tensor]
    work: AsyncWork[None] = field(init=False)
    states: list[tuple[int, ...]] = field(default_factory=list)  # of the tensors, while the send was under way
    ident: int = 0
    order: int = 0
    complete: bool = False
    void: bool = False
    written: bool = False
    want_reply: bool = False
    accepted: bool = False
    refused: str = ""
    lost: bool = False  # at the end of the link it was not whole at the peer
    refusal_seen: bool = False
    cancelled: bool = False
    given_back: bool = False  # a receive was done with it

    def __repr__(self) -> str:
        return f"<{self.shape.name} {self.number}>"


@dataclass(eq=False)
class Receiving:
    """One receive."""

    side: int
    tag: int
    out: torch.Tensor | None
    inbox: bool
    work: AsyncWork[Any] = field(init=False)
    task: asyncio.Task[None] | None = None
    awaited: bool = False  # the task has come as far as that
    partner: Sending | None = None
    touched: bool = False  # it had another message before
    got: Sending | None = None
    taken: bool = False
    gone: bool = False  # cancelled, and the model knows it
    frozen: torch.Tensor | None = None  # what its buffer held when it was cancelled

    def __repr__(self) -> str:
        what = "inbox" if self.inbox else "recv" if self.out is None else f"recv_tensor {tuple(self.out.shape)}"
        return f"<{what} {'of task ' if self.task else ''}at {id(self):x}>"


class Stream:
    """One direction and tag: see the module."""

    def __init__(self) -> None:
        self.unannounced: list[Sending] = []
        self.messages: list[Sending] = []
        self.receives: list[Receiving] = []
        self.rebuilding: list[Receiving] = []

    def post(self, receive: Receiving) -> None:
        """An inbox gets what no other receive waits for."""
        receives = self.receives
        place = len(receives)
        if not receive.inbox:
            while place > len(self.messages) and receives[place - 1].inbox:
                place -= 1
        receives.insert(place, receive)

    def withdraw(self, message: Sending) -> None:
        """The receive that had it may have none now; then again all others go before an inbox."""
        self.messages.remove(message)
        place = len(self.messages)
        self.receives[place:] = sorted(self.receives[place:], key=lambda receive: receive.inbox)

    def put_back(self, message: Sending) -> None:
        place = len(self.messages)
        while place and self.messages[place - 1].order > message.order:
            place -= 1
        self.messages.insert(place, message)


class Watcher(FrameHandler):
    """Tells the model of each frame that reaches a link, before and after the link acts on it."""

    def __init__(self, model: Model, side: int, link: Link) -> None:
        self.model = model
        self.side = side
        self.link = link

    def on_data(self, key: int, flags: int, body: memoryview) -> None:
        self._watch(FrameType.DATA, flags, key, body, lambda: self.link.on_data(key, flags, body))

    def on_frame(self, kind: int, flags: int, key: int, body: memoryview) -> None:
        self._watch(kind, flags, key, body, lambda: self.link.on_frame(kind, flags, key, body))

    def _watch(self, kind: int, flags: int, key: int, body: memoryview, act: Callable[[], None]) -> None:
        model = self.model
        model.guarded(model.frame_comes, self.side, kind, flags, key, body)
        try:
            act()
        except Exception as error:  # the connection ends the link with it; here it is a finding
            model.failures.append(error)
            raise
        model.guarded(model.settle)

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        try:
            return self.link.on_chunk(message_id)
        except Exception as error:  # as above
            self.model.failures.append(error)
            raise

    def on_writable(self) -> None:
        self.link.on_writable()
        self.model.guarded(self.model.settle)

    def before_flush(self) -> None:
        self.link.before_flush()

    def on_lost(self, error: BaseException | None) -> None:
        self.link.on_lost(error)
        self.model.guarded(self.model.settle)


class Model:
    """Two links that are driven by the methods below, each of which is one thing that can happen.

    Args:
        capacity: bytes that the kernel holds per direction.
        ways: of each direction around the stream: "none", "lane" or "memory"; or a codec, which is for both.
        required: the ways must be used.
    """

    def __init__(self, *, capacity: int, chunk_bytes: int, ways: tuple[str, str], required: bool) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        self.failures: list[BaseException] = []
        self.sendings: list[Sending] = []
        self.receivings: list[Receiving] = []
        self.lanes = [PlannedLane(THRESHOLD) if way == "lane" else None for way in ways]
        self.required = required
        self.ended = [False, False]
        self.stopped = [False, False]
        self.broken = False
        self._number = 0
        self._order = 0
        self._streams: dict[tuple[int, int], Stream] = {}  # by receiving side and tag
        self._by_ident: dict[tuple[int, int], Sending] = {}  # by sending side
        config = CollectiveConfig(inline_max_bytes=INLINE, window_bytes=WINDOW, chunk_bytes=chunk_bytes)
        self.sides = [
            Side(self.home, "a:0", "b:0", config, lambda _: self.guarded(self._link_ended, 0)),
            Side(self.home, "b:0", "a:0", config, lambda _: self.guarded(self._link_ended, 1)),
        ]
        join(self.loop, *self.sides, capacity=capacity)
        links = [side.link for side in self.sides]
        self.codings = [PlannedCoding(self.home, way) if way in CODECS else None for way in ways]
        for side, coding in zip(self.sides, self.codings, strict=True):
            side.table.coding = None if coding is None else coding.coding
        self.memories = [
            PlannedMemory(self.home, links[index], links[1 - index]) if way == "memory" else None for index, way in enumerate(ways)
        ]

    def guarded(self, fn: Callable[..., None], *args: Any) -> None:
        """What the model finds inside a callback must not be taken for a fault of the link."""
        try:
            fn(*args)
        except BaseException as error:  # raised by `check`
            self.failures.append(error)

    def check(self) -> None:
        """Raise the first thing found."""
        self.guarded(self.settle)
        if self.failures:
            raise self.failures[0]
        assert self.loop.problems == []

    def stream(self, side: int, tag: int) -> Stream:
        """The messages that this side receives under this tag."""
        return self._streams.setdefault((side, tag), Stream())

    # ---- what can happen: calls

    def up(self, index: int) -> None:
        """The handshake is over on one side."""
        side = self.sides[index]
        if side.link.state is not LinkState.CONNECTING:
            return
        out, into = self.lanes[index], self.lanes[1 - index]
        if out is not None:
            side.link.sender.ways.append(LaneWay(side.link.sender, out, self.required))
        if into is not None:
            side.link.receiver.lane = into
        memory = self.memories[index]
        if memory is not None:
            side.link.sender.ways.append(SharedWay(side.link.sender, memory.out, THRESHOLD, self.required))
        coding = self.codings[index]
        if coding is not None:
            coding.equip(side.link)
        side.link.pairs = LaneEnds(out, into)
        side.up(Watcher(self, index, side.link))

    def send(self, index: int, tag: int, shape: Shape) -> None:
        side = self.sides[index]
        self._number += 1
        obj, tensors = shape.build(self._number)
        sending = Sending(index, tag, self._number, shape, obj, tensors)
        sending.states.append(fills(tensors))
        self.stream(1 - index, tag).unannounced.append(sending)
        try:
            if shape.tensor is not None:
                sending.work = side.exchange.send_tensor(side.other, 0, obj, tag, None)
            else:
                sending.work = side.exchange.send(side.other, 0, obj, tag, None)
        except Gone:
            self.stream(1 - index, tag).unannounced.remove(sending)
            return
        self.sendings.append(sending)

    def recv(self, index: int, tag: int, kind: str | tuple[torch.dtype, tuple[int, ...]], awaited: bool) -> Receiving | None:
        """A receive: "right" for the next message as far as that is known, "object", "inbox", or the dtype and shape of a buffer."""
        side = self.sides[index]
        if self.stopped[index]:
            return None
        stream = self.stream(index, tag)
        if kind == "right":
            known = [*stream.messages, *stream.unannounced]
            place = len(stream.receives)
            kind = "object" if place >= len(known) else known[place].shape.tensor or "object"
        out = None if isinstance(kind, str) else torch.full(kind[1], -7, dtype=kind[0])
        receive = Receiving(index, tag, out, kind == "inbox")
        try:
            if receive.inbox:
                receive.work = side.inbox(tag).recv()
            elif out is not None:
                receive.work = side.exchange.recv_tensor(side.other, 0, out, tag, None)
            else:
                receive.work = side.exchange.recv(side.other, 0, tag, None)
        except Gone:
            return None
        stream.post(receive)
        self.receivings.append(receive)
        self.settle()
        if awaited:
            receive.task = self.loop.create_task(self._await(receive))
        return receive

    async def _await(self, receive: Receiving) -> None:
        receive.awaited = True
        try:
            await receive.work
        except CancelledError:
            if receive.work.cancelled() and not receive.gone:
                self.guarded(self._receive_cancelled, receive)
                self.guarded(self.settle)
        except AiorlinfError:  # it is looked at in `settle`
            pass
        receive.taken = True

    def take(self, receive: Receiving) -> None:
        """Take the value, so that it cannot be given back any more."""
        if not receive.awaited and receive.work.done() and not receive.work.cancelled():
            receive.taken = True
            if receive.work.exception() is None:
                receive.work.result()

    def cancel_send(self, sending: Sending) -> None:
        detail = sending.work._detail
        queued = isinstance(detail, Outgoing) and detail.state == State.QUEUED
        if not sending.work.cancel():
            assert sending.work.done()
            return
        sending.cancelled = True
        if queued:
            self.stream(1 - sending.side, sending.tag).unannounced.remove(sending)

    def cancel_recv(self, receive: Receiving) -> None:
        if receive.awaited:
            assert receive.task is not None
            receive.task.cancel()
        elif receive.work.cancelled():
            return
        elif receive.work.cancel():
            assert not receive.taken
            self._receive_cancelled(receive)
        else:
            assert receive.work.done()
            assert receive.taken or receive.work.exception() is not None

    def _receive_cancelled(self, receive: Receiving) -> None:
        receive.gone = True
        stream = self.stream(receive.side, receive.tag)
        if receive in stream.receives:
            stream.receives.remove(receive)
            partner = receive.partner
            lane = self.lanes[1 - receive.side]
            if receive.out is not None and (lane is None or partner is None):
                receive.frozen = receive.out.clone()
        else:
            assert receive.got is not None, f"{receive} is cancelled, but had failed"
            if receive in stream.rebuilding:
                stream.rebuilding.remove(receive)
            else:
                receive.got.given_back = True
            stream.put_back(receive.got)
            receive.got = None

    def write(self, sending: Sending, which: int) -> None:
        """The user writes to a tensor that he sent."""
        tensors = [tensor for tensor in sending.tensors if tensor.numel()]
        if not tensors:
            return
        tensors[which % len(tensors)].add_(1)
        if not sending.work.done():
            sending.written = True
            sending.states.append(fills(sending.tensors))

    # ---- what can happen: the rest of the world

    def read(self, index: int, count: int) -> None:
        """A side reads from its socket; before it is up the bytes would be the handshake's."""
        side = self.sides[index]
        if side.link.state is not LinkState.CONNECTING:
            side.socket.read(count)

    def flow(self, rounds: int) -> None:
        """Both sides read, and turn, so often."""
        for _ in range(rounds):
            for index in (0, 1):
                self.read(index, 1 << 30)
                self.turn()
                self.check()

    def step_lane(self, index: int, name: str) -> None:
        lane = self.lanes[index]
        if lane is not None:
            lane.step(name)

    def step_memory(self, index: int, name: str) -> None:
        memory = self.memories[index]
        if memory is not None:
            memory.step(name)

    def thread(self) -> None:
        self.home.run_thread()

    def turn(self) -> None:
        self.loop.turn()

    def tick(self) -> None:
        self.loop.to_next_timer()
        self.loop.turn()

    def lose(self, index: int, everything: bool) -> None:
        """The connection breaks, seen by one side first; `everything`: what is under way is lost, too."""
        self.broken = True
        side = self.sides[index]
        if side.link.state in (LinkState.UP, LinkState.CLOSING):
            if everything:
                side.socket.drop()
                side.socket.peer.drop()
            side.socket.break_down(ConnectionResetError("broken"))

    def goodbye(self, index: int) -> None:
        """As the table does when the worker closes."""
        side = self.sides[index]
        if side.link.state is not LinkState.UP or self.stopped[index]:
            return
        self.stopped[index] = True
        for inbox in list(side.table.inboxes):
            inbox.end(ClosedError("the worker was closed"))
        side.link.stop_receiving()
        for (receiver, _), stream in self._streams.items():
            if receiver == index:
                waiting = stream.receives[len(stream.messages) :]
                del stream.receives[len(stream.messages) :]
                for receive in waiting:
                    assert isinstance(_error(receive.work), ClosedError), f"{receive} waits on a closed worker"
        side.link.say_goodbye()

    # ---- what the wire shows

    def frame_comes(self, index: int, kind: int, flags: int, key: int, body: memoryview) -> None:
        """Before the link at this side acts on it."""
        if self.ended[index]:
            return
        if kind in (FrameType.DATA, FrameType.OPEN, FrameType.PLACED):
            self._announced(index, kind, flags, key, body)
            return
        mine = self._by_ident.get((index, key))  # of a message that this side sends
        theirs = self._by_ident.get((1 - index, key))
        if kind == FrameType.ACCEPTED:
            assert mine is not None
            mine.accepted = True
        elif kind == FrameType.REFUSED and mine is not None:
            mine.refusal_seen = True
        elif kind == FrameType.END and theirs is not None:
            if flags & Flag.VOID:
                theirs.void = True
            elif flags & Flag.WITHDRAWN:
                stream = self.stream(index, theirs.tag)
                if theirs in stream.messages and not theirs.given_back:
                    stream.withdraw(theirs)

    def _announced(self, index: int, kind: int, flags: int, key: int, body: memoryview) -> None:
        stream = self.stream(index, key & 0xFFFFFFFF)
        message = stream.unannounced.pop(0)
        assert bool(flags & Flag.TENSOR) == (message.shape.tensor is not None)
        self._order += 1
        message.order = self._order
        message.want_reply = bool(flags & Flag.WANT_REPLY)
        message.complete = kind == FrameType.DATA
        if kind != FrameType.DATA or message.want_reply:
            (message.ident,) = MESSAGE_ID.unpack_from(body)
            self._by_ident[1 - index, message.ident] = message
        stream.messages.append(message)

    def _link_ended(self, index: int) -> None:
        self.ended[index] = True
        for (receiver, _), stream in self._streams.items():
            if receiver == index:
                for message in [*stream.unannounced, *stream.messages]:
                    message.lost = not message.complete
                stream.unannounced.clear()
                waiting, stream.receives = stream.receives, []
                for place, receive in enumerate(waiting):
                    if receive.inbox and place >= len(stream.messages):
                        stream.receives.append(receive)  # it waits for other links
                    else:
                        error = _error(receive.work)
                        assert isinstance(error, OVER), f"{receive} is {error!r} after the end of the link"
                stream.messages = [message for message in stream.messages if message.complete]

    # ---- what must hold

    def settle(self) -> None:
        """Hold every work against the model."""
        for (side, _), stream in self._streams.items():
            self._settle_stream(side, stream)
        for sending in self.sendings:
            if sending.work.done():
                self._check_sending(sending)

    def _settle_stream(self, side: int, stream: Stream) -> None:
        opened = self.sides[side].link.receiver.opened
        for message in stream.messages:
            if not message.complete and not self.ended[side]:
                message.complete = message.ident not in opened
        over: list[tuple[Receiving, Sending]] = []
        for receive, message in zip(stream.receives, stream.messages, strict=False):
            if receive.partner is not message:
                receive.touched = receive.partner is not None
                receive.partner = message
            if _disagree(receive, message):
                error = _error(receive.work)
                assert isinstance(error, Mismatch), f"{receive} got {message}: {receive.work}"
                message.refused = "mismatch"
                if receive.out is not None and not receive.touched:
                    assert bool((receive.out == -7).all()), "a refused buffer was written to"
                over.append((receive, message))
            elif message.complete:
                over.append((receive, message))
                receive.got = message
                if receive.work.done():
                    self._check_receiving(receive, message)
                else:
                    assert message.shape.heavy, f"{receive} waits for {message}, which is there"
                    stream.rebuilding.append(receive)
        for receive, message in over:
            stream.receives.remove(receive)
            stream.messages.remove(message)
        for receive in list(stream.receives):
            if receive.work.done():
                # A closed inbox takes no other message in place of one that was withdrawn.
                closed = self.stopped[side] and receive.inbox and isinstance(_error(receive.work), ClosedError)
                assert closed, f"{receive.work} has ended, nothing of its message is there"
                stream.receives.remove(receive)
        for receive in list(stream.rebuilding):
            if receive.work.done():
                stream.rebuilding.remove(receive)
                assert receive.got is not None
                self._check_receiving(receive, receive.got)

    def _check_receiving(self, receive: Receiving, message: Sending) -> None:
        error = _error(receive.work)
        if message.void:
            assert isinstance(error, RemoteError), f"{receive.work}: {error!r}"
        elif message.shape.bomb:
            assert isinstance(error, UnsupportedObject), f"{receive.work}: {error!r}"
            message.refused = "undecodable"
        else:
            assert error is None, f"{receive.work}: {error!r}"
            value = receive.work._value  # without taking it
            if receive.inbox:
                assert value[0] == self.sides[message.side].address
                value = value[1]
            if receive.out is not None:
                assert value is receive.out
            assert _same_parts(value, message), f"{receive} got {value}, not {message}"
            return
        receive.got = None  # nothing that could be given back

    def _check_sending(self, sending: Sending) -> None:
        error = _error(sending.work)
        if sending.work.cancelled():
            assert sending.cancelled
        elif error is None:
            assert sending.accepted or not sending.want_reply, f"{sending} is done, but the peer did not say so"
        elif isinstance(error, Mismatch):
            assert sending.refused == "mismatch"
            assert sending.refusal_seen
        elif isinstance(error, RemoteError):
            assert sending.refused == "undecodable"
            assert sending.refusal_seen
        elif isinstance(error, BackendUnavailable):
            assert self.required
        elif isinstance(error, UsageError):
            assert sending.written
        else:
            assert isinstance(error, OVER), f"{sending}: {error!r}"
            assert self.ended[sending.side]
            assert self.stopped[sending.side] or not isinstance(error, ClosedError), "the peer has closed, not this side"

    # ---- the end

    def come_to_rest(self) -> None:
        """Let everything happen that happens by itself, without failures."""
        for side in self.sides:
            side.socket.capacity = 1 << 30
        for _ in range(5000):
            moved = False
            for side in self.sides:
                if side.link.state is not LinkState.CONNECTING and side.socket.readable():
                    side.socket.read(1 << 30)
                    moved = True
            for lane in self.lanes:
                if lane is not None:
                    moved |= lane.go_on()
                    self.check()
            for memory in self.memories:
                if memory is not None:
                    moved |= memory.go_on()
                    self.check()
            moved |= self.home.run_thread() or self.loop.busy()
            if not moved and not self.loop.to_next_timer():
                return
            self.turn()
            self.check()
        raise AssertionError("it does not come to rest")

    def finish(self) -> None:
        """Deliver and receive everything; then nothing may be left."""
        for index in (0, 1):
            self.up(index)
        self.come_to_rest()
        for _ in range(1000):
            asked = False
            for (index, tag), stream in self._streams.items():
                while len(stream.receives) < len(stream.messages):
                    if self.recv(index, tag, "right", False) is None:
                        break
                    asked = True
            if not asked:
                break
            self.come_to_rest()
        for stream in self._streams.values():
            for receive in list(stream.receives):
                self.cancel_recv(receive)
        self.come_to_rest()
        self._check_nothing_pends()
        self._check_state()

    def _check_nothing_pends(self) -> None:
        for sending in self.sendings:
            assert sending.work.done(), f"{sending.work} pends for ever"
            if sending.lost and self.stopped[sending.side] and not self.broken:
                assert _error(sending.work) is not None, f"{sending} is lost, but the worker that closed believes it is delivered"
        for receive in self.receivings:
            assert receive.work.done(), f"{receive.work} pends for ever"
            if receive.task is not None:
                assert receive.task.done()
            if receive.frozen is not None:
                assert receive.out is not None
                assert torch.equal(receive.out, receive.frozen), "a buffer was written to after its receive was cancelled"
        for (index, _), stream in self._streams.items():
            if not self.stopped[index]:
                assert stream.messages == []

    def _check_state(self) -> None:
        """Counters and tables are where they began."""
        whole = not any(self.ended)
        for index, side in enumerate(self.sides):
            sender, receiver = side.link.sender, side.link.receiver
            peer = self.sides[1 - index].link.sender
            assert sender.pending == {}
            assert list(sender._backlog) == []
            assert sender._waiting == {}
            assert list(sender.pump._active) == []
            assert sender.pump._draining == []
            assert not sender.tensors_waiting()
            assert receiver.opened == {}
            assert receiver.lockout.unmatched == set()
            if not self.stopped[index]:
                assert len(side.link.mailbox) == 0
                assert side.link.mailbox.posted_keys() == []
            if whole:
                assert receiver.window.outstanding == 0
                assert receiver.lockout.spent == 0
                assert peer._charged == receiver.window.consumed
                assert peer._consumed == peer._charged

    def forget_received(self) -> None:
        """As a user who is done with what he got. Then no shared memory is in use, if both are still there."""
        failed = any(sending.shape.bomb for sending in self.sendings)
        self.receivings.clear()
        self._streams.clear()
        if failed:
            gc.collect()  # an error's traceback refers to what could not be rebuilt, and by way of its frames to itself
        self.come_to_rest()
        if not any(self.ended):
            for memory in self.memories:
                assert memory is None or memory.unused()
        for coding in self.codings:
            assert coding is None or coding.unused()

    def free(self) -> None:
        """End everything that the run has made."""
        for side in self.sides:
            side.link.end(lambda: ClosedError("the test is over"))
        self.loop.turn()
        for receive in self.receivings:
            if receive.task is not None:
                receive.task.cancel()
        self.loop.turn()
        for memory in self.memories:
            if memory is not None:
                memory.free()
        while self.home.run_thread():
            self.loop.turn()
        self.home.close_nowait()
        self.loop.close()


def _error(work: AsyncWork[Any]) -> BaseException | None:
    """The error of a work that is over; CancelledError if it was cancelled."""
    assert work.done(), f"{work} is not over"
    return CancelledError() if work.cancelled() else work.exception()


def _disagree(receive: Receiving, message: Sending) -> bool:
    if message.void:
        return False
    expected = None if receive.out is None else (receive.out.dtype, tuple(receive.out.shape))
    return message.shape.tensor != expected


def _same_parts(value: Any, message: Sending) -> bool:
    """It is the message's object, with its tensors as they were at one moment of the send."""
    tensors, others = message.shape.parts(value)
    first, first_others = message.shape.parts(message.shape.build(message.number)[0])
    return (
        others == first_others
        and [(tensor.dtype, tensor.shape) for tensor in tensors] == [(tensor.dtype, tensor.shape) for tensor in first]
        and fills(tensors) in message.states
    )
