"""Two links and all that is between them, moved by hand: a clock that stands still, sockets whose bytes move when told, planned threads.

Everything of the product that can run is the real thing: `Exchange`, `Link`, `Connection`. Only what would make a run depend on
time is replaced: the loop's clock, the kernel's socket buffers, the private threads, and the table that makes links.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.collective.exchange import Exchange
from aiorlinf.collective.inbox import Inbox
from aiorlinf.config import CollectiveConfig
from aiorlinf.link.coding import Coding
from aiorlinf.link.connection import Connection, FrameHandler
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.mailbox import Wildcard
from aiorlinf.link.table import LinkTable
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome

__all__ = ["FewLinks", "Gone", "Side", "Socket", "StepHome", "StepLoop", "join"]

EVERYTHING = 1 << 40


class StepLoop(asyncio.SelectorEventLoop):
    """Turns once when told to. `now` is its clock, in seconds; what goes wrong unseen is in `problems`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.problems: list[dict[str, Any]] = []
        super().__init__()
        self.set_debug(False)  # it records a stack for each callback, which takes most of the time of a run
        self.set_exception_handler(lambda _loop, context: self.problems.append(context))

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """Run what is ready now."""
        self.call_soon(self.stop)
        self.run_forever()

    def busy(self) -> bool:
        """Something is ready."""
        ready: deque[Any] = self._ready  # type: ignore[attr-defined]
        return bool(ready)

    def to_next_timer(self) -> bool:
        """Move the clock to the next timer; False if there is none."""
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        times = [handle.when() for handle in scheduled if not handle.cancelled()]
        if not times:
            return False
        self.now = max(self.now, min(times))
        return True


class StepHome(LoopHome):
    """Calls for the private threads wait in `threads` until `run_thread`."""

    def __init__(self, loop: StepLoop) -> None:
        super().__init__(loop, name="model")
        self.debug = True
        self.threads: deque[tuple[AsyncWork[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, fn: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """See `LoopHome.submit`."""
        work: AsyncWork[Any] = AsyncWork(self, "thread")
        self.threads.append((work, fn, args))
        return work

    def run_thread(self) -> bool:
        """Run the oldest call; False if there is none."""
        if not self.threads:
            return False
        work, fn, args = self.threads.popleft()
        try:
            value = fn(*args)
        except Exception as error:  # the work's, as in a real thread
            work._fail(error)
        else:
            work._finish(value)
        return True


class Socket(asyncio.Transport):
    """One end of a connection between two `Connection`s. The kernel holds at most `capacity` bytes for each direction.

    Memory that was written is kept by reference until the kernel takes it, as uvloop keeps it: a change meanwhile reaches the peer.
    """

    def __init__(self, loop: StepLoop, protocol: Connection, *, capacity: int, high: int) -> None:
        super().__init__()
        self.peer: Socket
        self.loop = loop
        self.protocol = protocol
        self.capacity = capacity
        self.high = high
        self.lost = False
        self._buffer: deque[memoryview] = deque()
        self._kernel = bytearray()
        self._paused = False
        self._closing = False
        self._eof = False
        self._eof_seen = False
        self._reset: Exception | None = None
        self._room_scheduled = False

    # ---- what a Connection uses

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert low == 0

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._buffer))

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not len(data):
            return
        self._buffer.append(memoryview(data).cast("B"))
        if len(self._buffer) == 1:
            self._push()
        if self.get_write_buffer_size() > self.high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._eof = True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.loop.call_soon(self._room)

    def abort(self) -> None:
        self.break_down(None)

    # ---- the kernel

    def break_down(self, error: Exception | None) -> None:
        """This end is gone at once; the peer can still read what the kernel has."""
        if self.lost:
            return
        self.lost = self._closing = True
        self._buffer.clear()
        self._reset = error or ConnectionResetError("reset by peer")
        self.loop.call_soon(self.protocol.connection_lost, error)

    def drop(self) -> None:
        """What is under way from here is lost."""
        self._kernel.clear()

    def _push(self) -> None:
        while self._buffer and len(self._kernel) < self.capacity:
            head = self._buffer[0]
            count = min(len(head), self.capacity - len(self._kernel))
            self._kernel += head[:count]
            if count == len(head):
                self._buffer.popleft()
            else:
                self._buffer[0] = head[count:]

    def _room(self) -> None:
        """The kernel has room again."""
        self._room_scheduled = False
        if self.lost:
            return
        self._push()
        if self._buffer:
            return
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()
        if self._closing and not self._buffer:
            self.lost = True
            self.protocol.connection_lost(None)

    def readable(self) -> bool:
        """There is something to read, if only the end."""
        if self._closing:
            return False
        peer = self.peer
        return bool(peer._kernel) or peer.lost or (peer._eof and not peer._buffer and not self._eof_seen)

    def read(self, count: int) -> None:
        """One read of at most `count` bytes."""
        peer = self.peer
        if not self.readable():
            return
        if peer._kernel:
            buffer = self.protocol.get_buffer(-1)
            assert len(buffer), "asyncio ends a connection that offers no room"
            size = min(len(buffer), count, len(peer._kernel))
            buffer[:size] = peer._kernel[:size]
            del peer._kernel[:size]
            if not peer._room_scheduled:
                peer._room_scheduled = True
                self.loop.call_soon(peer._room)
            self.protocol.buffer_updated(size)
        elif peer._reset is not None and not peer._eof:
            self.break_down(ConnectionResetError("reset by peer"))
        else:
            self._eof_seen = True
            if not self.protocol.eof_received():
                self.close()


class Gone(Exception):
    """There is no link any more; a real table would make a new one."""


class FewLinks:
    """As much of a `LinkTable` as operations need. Links are made by `Side`s and end for good."""

    def __init__(self, home: LoopHome, address: WorkerAddress) -> None:
        self.home = home
        self.address = address
        self.memory = None
        self.coding: Coding | None = None
        self.pool = None
        self.wildcards: dict[int, Wildcard] = {}
        self.inboxes: set[Inbox] = set()
        self.orders: Iterator[int] = itertools.count()
        self.by_address: dict[WorkerAddress, Link] = {}
        self.left_behind: dict[WorkerAddress, list[Link]] = {}
        self._all: dict[WorkerAddress, Link] = {}

    def add(self, link: Link) -> None:
        """A link that was made."""
        self.by_address[link.remote] = self._all[link.remote] = link

    def ended(self, link: Link) -> None:
        """It is of use to read what it has left."""
        self.by_address.pop(link.remote, None)
        self.left_behind[link.remote] = [link]

    def obtain(self, peer: WorkerAddress) -> Link:
        link = self._all[peer]
        if not link.usable:
            raise Gone
        return link

    def peek(self, peer: WorkerAddress) -> Link | None:
        return self._all.get(peer)

    def unread(self, peer: WorkerAddress, key: int) -> Link | None:
        link = self._all[peer]
        return link if link.state is LinkState.ENDED and next(link.mailbox.queued(key), None) is not None else None

    def all_links(self) -> list[Link]:
        return list(self._all.values())

    def check_open(self) -> None:
        """It is open to the end."""

    def pass_on(self) -> None:
        """There is no memory to hand over."""

    def links(self) -> list[Link]:
        return list(self._all.values())


class Side:
    """One worker and its link to another: its operations are those of `exchange`.

    Args:
        ended: called when the link has ended.
        of: another side of the same worker, if it has more than one link.
    """

    def __init__(
        self,
        home: LoopHome,
        address: str,
        other: str,
        config: CollectiveConfig,
        ended: Callable[[Link], None] = lambda _link: None,
        *,
        of: Side | None = None,
    ) -> None:
        self.home = home
        self.config = config
        self.address = WorkerAddress(address)
        self.other = WorkerAddress(other)
        self.table: FewLinks = FewLinks(home, self.address) if of is None else of.table
        self.link = Link(home, self.address, self.other, config, self.table.wildcards, self.table.orders, self._link_ended)
        self.table.add(self.link)
        self._ended = ended
        self.exchange: Exchange = Exchange(home, cast(LinkTable, self.table), config) if of is None else of.exchange
        self.connection = Connection(home.loop, lambda _data: None, lambda _error: None)
        self.socket: Socket
        self._inboxes: dict[int, Inbox] = {}

    def _link_ended(self, link: Link) -> None:
        self.table.ended(link)
        self._ended(link)

    def inbox(self, tag: int) -> Inbox:
        """The inbox of a tag, one for ever."""
        if tag not in self._inboxes:
            self._inboxes[tag] = Inbox(self.exchange, tag)
        return self._inboxes[tag]

    def up(self, handler: FrameHandler | None = None) -> None:
        """The handshake is over."""
        self.link.up(self.connection, Identity(self.other, Incarnation(1)), self.config.window_bytes, None)
        self.connection.adopt(handler or self.link, b"", 1 << 20)


def join(loop: StepLoop, one: Side, two: Side, *, capacity: int = EVERYTHING, high: int = 64) -> None:
    """A connection between the two; it is used once both are `up`."""
    for side in (one, two):
        side.socket = Socket(loop, side.connection, capacity=capacity, high=high)
        side.connection.connection_made(side.socket)
    one.socket.peer, two.socket.peer = two.socket, one.socket
