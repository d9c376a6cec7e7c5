"""All links of one worker: made on first use, one per peer, by whichever side connects first.

How ours are connected is in `link.connecting`, how those of others are let in in `link.accepting`, and what is remembered of peers that are
gone in `link.peer_lives`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.trimmer import Trimmer
from aiorlinf.config import CollectiveConfig, JobConfig
from aiorlinf.errors import AiorlinfError, BackendUnavailable, ClosedError, LinkError, UsageError, WireError
from aiorlinf.link.accepting import Acceptor
from aiorlinf.link.coding import Coding
from aiorlinf.link.connecting import Connector, again
from aiorlinf.link.departures import Departures
from aiorlinf.link.emulation import Emulation
from aiorlinf.link.equip import equip
from aiorlinf.link.half_made import HalfMade
from aiorlinf.link.host_memory import HostMemory
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.mailbox import Wildcard
from aiorlinf.link.me import Self
from aiorlinf.link.past import Past
from aiorlinf.link.peer_lives import PeerLives
from aiorlinf.link.pending import Reporter
from aiorlinf.link.resume import Resumptions
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.manager.mirror import News
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.wire.frames import FrameType, frame
from aiorlinf.wire.handshake import ClientHandshake, Hello

if TYPE_CHECKING:
    import torch

    from aiorlinf.link.connection import Connection
    from aiorlinf.link.tracing import Tracing
    from aiorlinf.work.home import LoopHome

__all__ = ["LinkTable"]


class LinkTable:
    """See the module. Home thread only, but for `address`.

    Args:
        address: our own address.
        ready: done when we are registered; its error is the error of every link made before that.

    Attributes:
        lives: of peers that we have had links with.
        half_made: connections of peers that may become links.
        carried: what links have carried that have ended.
    """

    def __init__(self, home: LoopHome, address: WorkerAddress, ready: asyncio.Future[tuple[Self, Lifeline]]) -> None:
        self.home = home
        self.address = address
        self.wildcards: dict[int, Wildcard] = {}
        self.inboxes: set[Any] = set()
        self.reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()
        self.trace: Tracing | None = None
        self._orders = itertools.count()
        self._ready = ready
        self._self: Self | None = None
        self._manager: Lifeline | None = None
        self._also_expected: set[WorkerAddress] = set()
        self._links: dict[WorkerAddress, Link] = {}
        self.carried: Past = Past()
        self._departures = Departures(home.loop, self._links)
        self.lives: PeerLives = PeerLives(address, self._links, self._departures)
        self.half_made: HalfMade = HalfMade()
        self._connector = Connector(home, address, ready, self)
        self._acceptor: Acceptor | None = None
        self._cause: Callable[[], AiorlinfError] | None = None  # of everything, once this worker itself was declared dead
        self.memory: HostMemory | None = None
        self.tls: Tls | None = None
        self._passes_on = False
        self._emulation: Emulation | None = None
        self.device: torch.device | None = None  # where tensors come to that were on accelerators, see `link.staging.Landing`
        self.pool: TensorBufferPool = TensorBufferPool(CollectiveConfig().tensor_buffer_pool.max_bytes)
        self.coding: Coding | None = None
        self._trimmer: Trimmer | None = None
        self._closed = False
        self._closing: dict[Link, asyncio.Future[None]] = {}
        self._resumptions: Resumptions | None = None

    # ---- use

    def obtain(self, peer: WorkerAddress) -> Link:
        """The link to a worker, made now if there is none; operations wait in it until it is connected."""
        link = self._links.get(peer)
        if link is not None and link.usable:
            return link
        self._take_note(link)
        self.check_open()
        link = self._new_link(peer)
        if self._self is not None:
            self.check_expected(peer)
        self._connector.begin(link)
        return link

    def check_open(self) -> None:
        """Raise ClosedError if the worker was closed, DeclaredDead if the others have given it up."""
        if self._cause is not None:
            raise self._cause()
        if self._closed:
            raise ClosedError("the worker was closed", local=self.address)

    @property
    def by_address(self) -> Mapping[WorkerAddress, Link]:
        """The links that have not ended; a live view."""
        return self._links

    def peek(self, peer: WorkerAddress) -> Link | None:
        """The link to a worker, if there is one."""
        return self._links.get(peer)

    @property
    def left_behind(self) -> Mapping[WorkerAddress, list[Link]]:
        """Links that have ended and hold messages that nobody has received yet; a live view."""
        return self.lives.left_behind

    def unread(self, peer: WorkerAddress, key: int) -> Link | None:
        """A link that has ended but still holds a message of this stream: the one with the oldest."""
        self._take_note(self._links.get(peer))
        return self.lives.unread(peer, key)

    def past(self, peer: WorkerAddress) -> tuple[Identity | None, int]:
        """See `PeerLives.past`."""
        return self.lives.past(peer)

    def links_had(self, identity: Identity) -> int:
        """See `PeerLives.links_had`."""
        return self.lives.links_had(identity)

    def _new_link(self, peer: WorkerAddress) -> Link:
        config = (self._self.config if self._self is not None else JobConfig()).cluster.collective
        link = Link(self.home, self.address, peer, config, self.wildcards, self._orders, self._on_link_end)
        link.receiver.pool = self.pool
        link.receiver.delivery.landing.default = self.device
        link.receiver.on_late = functools.partial(self.lives.given_back_late, link)
        self._links[peer] = link
        return link

    def check_expected(self, peer: WorkerAddress) -> None:
        """Raise UsageError, and forget the link, if this worker does not belong to a job with a closed set of them."""
        me = self._self
        if me is not None and me.expected is not None and peer not in me.expected and peer not in self._also_expected:
            del self._links[peer]
            raise UsageError(f"{peer} is not a worker of this job", hint=f"the job has {', '.join(sorted(me.expected))}")

    def expect(self, peer: WorkerAddress) -> None:
        """This worker belongs to the job, too, although it was not among those that the job began with."""
        self._also_expected.add(peer)

    @property
    def me(self) -> Self | None:
        """Who we are, None before we have joined."""
        return self._self

    async def joined(self) -> tuple[Self, Lifeline]:
        """Who we are, and the manager, once we have joined. Raises what joining failed with. Cancelling is harmless."""
        return await asyncio.shield(self._ready)

    def pass_on(self) -> None:
        """This worker will send messages on that it has received: keep what it takes to hand memory over. Any thread."""
        self._passes_on = True
        if self.memory is not None:
            self.memory.keeper.wanted = True

    def links(self) -> list[Link]:
        """Links that have not ended."""
        return list(self._links.values())

    def all_links(self) -> list[Link]:
        """Also those that have ended but hold unread messages."""
        return [*self._links.values(), *itertools.chain(*self.left_behind.values())]

    # ---- life

    def share_memory(self, config: JobConfig) -> HostMemory:
        """Set up shared memory with workers of this host, the pool, and compression, as the job's configuration says."""
        collective = config.cluster.collective
        self.memory = HostMemory(self.home, collective.shared_memory, self._link_of, self.links)
        self.memory.keeper.wanted = self._passes_on
        self.pool.resize(collective.tensor_buffer_pool.max_bytes)
        if collective.tensor_compression.enabled:
            self.coding = Coding(self.home, collective.tensor_compression, self.pool)
        if collective.memory_allocator == "aggressive":
            self._trimmer = Trimmer(self.home, [self.pool, self.memory.arena])
            self.pool.on_idle = self.memory.arena.on_idle = self._trimmer.wake
        return self.memory

    def _link_of(self, address: str) -> Link | None:
        return self._links.get(WorkerAddress(address))

    async def serve(self, sock: socket.socket, unix: socket.socket | None, me: Self, manager: Lifeline) -> None:
        """Accept peers on these listening sockets from now on."""
        self._self = me
        self._manager = manager
        emulation = me.config.cluster.net_emulation
        if emulation.enabled:
            self._emulation = Emulation(self.home, self.address, emulation, manager)
        resumptions = self._resumptions = self._look_after(me)
        for link in self._links.values():
            link.configure(me.config.cluster.collective)
        acceptor = self._acceptor = Acceptor(
            self.home,
            me,
            self._links,
            self.lives,
            self._departures,
            self._connector,
            self.half_made,
            resumptions,
            self._new_link,
            self.bring_up,
        )
        acceptor.open(sock, self.tls)
        if unix is not None:
            acceptor.open(unix, None)
        if self._closed:  # this worker was declared dead before it could let anybody in
            acceptor.close()

    def _look_after(self, me: Self) -> Resumptions:
        network = me.config.cluster.network

        async def dial(record: WorkerRecord, hello: Hello) -> tuple[Connection, Hello, ClientHandshake]:
            return await self._connector.dial_tcp(me, record, hello, network.connect_timeout_s)

        return Resumptions(self.home, me.hello, dial, self._links, network.reconnect_timeout_s)

    def bring_up(self, link: Link, me: Self, connection: Connection, hello: Hello, leftover: bytes, *, dialled: bool = False) -> None:
        """The link has a proven connection: to the one who said this hello, and what came behind that.

        Args:
            dialled: we have made it, and the other side waits to hear that we have it.
        """
        assert hello.address is not None
        identity = Identity(WorkerAddress(hello.address), Incarnation(hello.incarnation))
        self.half_made.drop(identity.address)
        self.lives.meet(identity)
        peer = connection.extra_info("peername")
        address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix socket"
        window = hello.capabilities.get("window_bytes")
        if type(window) is not int or window < 1:
            connection.abort()
            link.end(lambda: LinkError(f"{identity} did not say how large its window is", remote=identity.address))
            return
        assert self.memory is not None
        route = None if self._emulation is None else self._emulation.route(identity.address)
        try:
            equip(self.home, link, me, self.memory, connection, hello, identity, route)
        except BackendUnavailable as error:
            connection.abort()
            link.end(functools.partial(again, error))
            return
        if self.coding is not None:
            self.coding.equip(link, hello)
        collective = me.config.cluster.collective
        record = _record(hello, identity)
        if self._resumptions is not None:
            self._resumptions.uphold(link, connection, hello, record, self.lives.links_had(identity))
        if dialled:
            connection.answer(frame(FrameType.TAKEN, 0))
        limit = max(collective.max_manifest_bytes, collective.inline_max_bytes) + (1 << 16)
        if self.trace is not None:
            self.trace.link_up(link, identity)
        if self._emulation is None or route is None:
            link.up(connection, identity, window, address)
            connection.adopt(link, leftover, limit)
        else:
            emulated = self._emulation.over(route, connection, link)
            link.up(emulated, identity, window, address)
            connection.adopt(emulated, leftover, limit)
        if self._manager is not None:
            self._manager.watch(identity, record)

    def take_news(self, news: News) -> None:
        """The manager tells of another worker."""
        self._departures.take(news)
        if news.identity in self.half_made and self._departures.refusal(news.identity) is not None:
            self.half_made.drop(news.identity.address)

    def _take_note(self, link: Link | None) -> None:
        """What fails as a link ends may run user code that uses the peer again before we are told of the end."""
        if link is not None and link.state is LinkState.ENDED:
            self._on_link_end(link)

    def _on_link_end(self, link: Link) -> None:
        if self._resumptions is not None:
            self._resumptions.forget(link)
        if link.identity is not None:
            self.carried.add(link.carried())
        if self._links.get(link.remote) is link:
            del self._links[link.remote]
            self.lives.end(link)
        waiter = self._closing.pop(link, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- the end

    def condemn(self, make_error: Callable[[], AiorlinfError]) -> None:
        """This worker was declared dead: everything fails, and nothing can be begun any more."""
        self._cause = make_error
        self._stop_serving()
        self._end_all(make_error)

    async def close(self, timeout: float) -> list[str]:
        """Send what is queued, say goodbye, end all links; says what could not be delivered in `timeout` seconds."""
        self._stop_serving()
        end = time.monotonic() + timeout
        links = self.links()
        # Receives can never finish now; sends get their chance.
        for inbox in list(self.inboxes):
            inbox.end(ClosedError("the worker was closed"))
        for link in links:
            link.stop_receiving()
        if links:
            await asyncio.wait([link.sender.idle() for link in links], timeout=timeout)
        if self._emulation is not None:  # what is done for its sender may still be under way
            await self._emulation.flushed(end - time.monotonic())
        lost = []
        for link in links:
            unfinished = link.sender.unfinished() if link.state is not LinkState.ENDED else []
            if unfinished:
                size = sum(out.total for out in unfinished)
                lost.append(f"{len(unfinished)} message{'s' if len(unfinished) > 1 else ''} ({size} bytes) to {link.remote}")
        waiters = []
        for link in links:
            if link.state is LinkState.UP:
                waiter = self._closing[link] = self.home.loop.create_future()
                waiters.append(waiter)
                link.say_goodbye()
        self._connector.cancel()
        if waiters:
            await asyncio.wait(waiters, timeout=max(0.05, min(1.0, end - time.monotonic())))
        self.abort()
        return lost

    def abort(self) -> None:
        """End everything at once."""
        self._stop_serving()
        self._end_all(lambda: ClosedError("the worker was closed"))
        self.lives.clear()
        if self.coding is not None:
            self.coding.close()
        self.pool.close()
        if self._trimmer is not None:
            self._trimmer.close()
        if self.memory is not None:
            self.memory.close()

    def _end_all(self, make_error: Callable[[], AiorlinfError]) -> None:
        self._connector.cancel()
        self.half_made.clear()
        for inbox in list(self.inboxes):
            inbox.end(make_error())
        for link in self.links():
            link.end(make_error)

    def _stop_serving(self) -> None:
        """Let nobody in any more, and begin nothing."""
        self._closed = self.lives.closed = True
        if self._acceptor is not None:
            self._acceptor.close()


def _record(hello: Hello, identity: Identity) -> WorkerRecord | None:
    """Where the peer is, by its own words; None if it does not say."""
    told = hello.capabilities.get("record")
    try:
        record = WorkerRecord.from_dict(told) if isinstance(told, dict) else None
    except WireError:
        return None
    return record if record is not None and record.identity == identity else None
