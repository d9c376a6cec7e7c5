"""All links of one worker: made on first use, one per peer, by whichever side connects first."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import random
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.trimmer import Trimmer
from aiorlinf.config import CollectiveConfig, JobConfig
from aiorlinf.errors import (
    AiorlinfError,
    BackendUnavailable,
    ClosedError,
    DeclaredDead,
    InternalError,
    LinkError,
    PeerLeft,
    PeerLost,
    RendezvousError,
    UsageError,
    WireError,
)
from aiorlinf.link.arbitrate import Answer, arbitrate
from aiorlinf.link.coding import Coding
from aiorlinf.link.departures import Departures, replace
from aiorlinf.link.dial import Refused, ServerSide, dial, dial_unix
from aiorlinf.link.emulation import Emulation
from aiorlinf.link.equip import equip
from aiorlinf.link.host_memory import HostMemory
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.loopback import Loopback
from aiorlinf.link.mailbox import Wildcard
from aiorlinf.link.me import Self
from aiorlinf.link.past import Past
from aiorlinf.link.pending import Reporter
from aiorlinf.link.resume import Resumptions, resumes
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.manager.mirror import News
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.throttle import Throttle
from aiorlinf.rendezvous.door import Door
from aiorlinf.rendezvous.hosts import local_failure
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.wire.handshake import ClientHandshake, Hello, Refusal, ServerHandshake

if TYPE_CHECKING:
    import torch

    from aiorlinf.link.connection import Connection
    from aiorlinf.link.tracing import Tracing
    from aiorlinf.work.home import LoopHome

__all__ = ["LinkTable"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_MAX_UNPROVEN = 256
_RETRY_FIRST_SECONDS = 0.02
_RETRY_MAX_SECONDS = 1.0
_YIELD_SECONDS = 0.5
_SILENCE_SECONDS = 10.0
_ORDINARY_REFUSALS = ("yield", "closing", "ended")


class _Past(NamedTuple):
    """A worker whose link has ended, and why."""

    identity: Identity
    cause: Callable[[], AiorlinfError]


class LinkTable:
    """See the module. Home thread only, but for `address`.

    Args:
        address: our own address.
        ready: done when we are registered; its error is the error of every link made before that.
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
        self._ended: dict[WorkerAddress, _Past] = {}
        self._departures = Departures(home.loop, self._links)
        self._cause: Callable[[], AiorlinfError] | None = None  # of everything, once this worker itself was declared dead
        self._left_behind: dict[WorkerAddress, list[Link]] = {}
        self._warnings = Throttle(log)
        self._newest: dict[WorkerAddress, int] = {}
        self._links_had: dict[Identity, int] = {}
        self._dialling: set[WorkerAddress] = set()
        self._connects: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._unproven: dict[ServerSide, None] = {}
        self._doors: list[Door] = []
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
            self._check_expected(peer)
        if peer == self.address:
            self._connects[peer] = self.home.spawn(self._connect_self(link), f"link {peer}")
        else:
            self._connects[peer] = self.home.spawn(self._connect(link), f"link {peer}")
        return link

    def check_open(self) -> None:
        """Raise ClosedError if the worker was closed, DeclaredDead if the others have given it up."""
        if self._cause is not None:
            raise self._cause()
        if self._closed:
            raise ClosedError("the worker was closed", local=self.address)

    def past(self, peer: WorkerAddress) -> tuple[Identity | None, int]:
        """The life of this worker whose link has ended, if there is no newer one; and its number if it is over for certain, else 0."""
        past = self._ended.get(peer)
        if past is None:
            return None, 0
        over = isinstance(past.cause(), PeerLeft) or self._departures.refusal(past.identity) is not None
        return past.identity, past.identity.incarnation if over else 0

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
        return self._left_behind

    def unread(self, peer: WorkerAddress, key: int) -> Link | None:
        """A link that has ended but still holds a message of this stream: the one with the oldest."""
        self._take_note(self._links.get(peer))
        links = self._left_behind.get(peer)
        if links is None:
            return None
        found = []
        for link in list(links):
            message = next(link.mailbox.queued(key), None)
            if message is not None:
                found.append((message.order, link))
            elif not len(link.mailbox):
                links.remove(link)
        if not links:
            del self._left_behind[peer]
        return min(found, key=lambda each: each[0])[1] if found else None

    def _new_link(self, peer: WorkerAddress) -> Link:
        config = (self._self.config if self._self is not None else JobConfig()).cluster.collective
        link = Link(self.home, self.address, peer, config, self.wildcards, self._orders, self._on_link_end)
        link.receiver.pool = self.pool
        link.receiver.delivery.landing.default = self.device
        link.receiver.on_late = functools.partial(self._given_back_late, link)
        self._links[peer] = link
        return link

    def _check_expected(self, peer: WorkerAddress) -> None:
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

    def links_had(self, identity: Identity) -> int:
        """How many links there were with this life of a worker, the present one included; both sides count alike."""
        return self._links_had.get(identity, 0)

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
        return [*self._links.values(), *itertools.chain(*self._left_behind.values())]

    # ---- connecting

    async def _connect_self(self, link: Link) -> None:
        try:
            me, _ = await asyncio.shield(self._ready)
        except AiorlinfError as error:
            link.end(functools.partial(_again, error))
            return
        if link.state is LinkState.CONNECTING:
            link.backend, link.reason = "stream", "a worker's messages to itself stay in its memory"
            if self.trace is not None:
                self.trace.link_up(link, me.identity)
            link.up(Loopback(self.home.loop, link), me.identity, me.config.cluster.collective.window_bytes, None)

    async def _connect(self, link: Link) -> None:
        peer = link.remote
        try:
            me, manager = await asyncio.shield(self._ready)
            self._check_expected(peer)
            await self._reach(link, me, manager)
        except AiorlinfError as error:
            if link.state is LinkState.CONNECTING:
                link.end(functools.partial(_again, error))
        except OSError as error:
            text = local_failure(error) or str(error)
            if link.state is LinkState.CONNECTING:
                link.end(lambda: LinkError(f"{peer} cannot be reached: {text}", local=self.address, remote=peer))
        except Exception as error:  # a bug of ours must not leave the link's operations waiting
            cause = error
            link.end(lambda: _internal(cause))
            raise
        finally:
            if self._connects.get(peer) is asyncio.current_task():
                del self._connects[peer]

    async def _reach(self, link: Link, me: Self, manager: Lifeline) -> None:
        """Find the peer and connect, again and again until the time is over; or until the peer has connected to us."""
        peer = link.remote
        network = me.config.cluster.network
        begin = time.monotonic()
        end = begin + network.rendezvous_timeout_s
        pause = _RETRY_FIRST_SECONDS
        tried: dict[str, str] = {}
        old = self._ended.get(peer)
        while link.state is LinkState.CONNECTING:
            record = await self._find(link, old, manager, end - time.monotonic())
            if old is not None and record.identity != old.identity:
                old = None  # a new life; otherwise the manager may not know of the death yet
            where = f"{record.host}:{record.port}"
            try:
                await self._dial(link, me, record)
                return
            except Refused as refused:
                if refused.code == "yield":
                    tried[where] = "both sides connected at once, and the peer's own connection did not come"
                    await self._until_up(link, _YIELD_SECONDS)
                elif refused.code == "dead":  # the manager has told the peer before it could tell us
                    raise DeclaredDead(f"{me.identity} was declared dead, says {peer}: {refused.message}", local=self.address) from None
                elif refused.code not in ("target", "stale"):
                    raise
                else:
                    tried[where] = refused.message
            except TimeoutError:
                tried[where] = f"no answer within {network.connect_timeout_s:g} s"
            except OSError as error:
                local = local_failure(error)
                if manager.away and old is not None and isinstance(error, ConnectionRefusedError):
                    # Its connection ended, nobody listens there, and the manager cannot be asked: that is what a death looks like.
                    raise PeerLost(f"{old.identity} is gone, and nobody listens at {where}", local=self.address, remote=peer) from error
                if local is not None:
                    raise LinkError(f"{peer} cannot be reached: {local}", local=self.address, remote=peer, address=where) from error
                tried[where] = os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else str(error)
            left = end - time.monotonic()
            if left <= 0:
                reasons = "; ".join(f"{address}: {reason}" for address, reason in tried.items())
                raise RendezvousError(
                    f"{self.address} could not connect to {peer}: {reasons}",
                    local=self.address,
                    remote=peer,
                    address=where,
                    elapsed=time.monotonic() - begin,
                )
            await self._until_up(link, min(left, pause * (0.5 + random.random())))
            pause = min(pause * 2, _RETRY_MAX_SECONDS)

    async def _find(self, link: Link, old: _Past | None, manager: Lifeline, left: float) -> WorkerRecord:
        peer = link.remote
        if old is None:
            link.missing = True
            news = self.home.loop.call_later(
                _SILENCE_SECONDS, log.warning, "%s waits for %s, which has not joined the job yet", self.address, peer
            )
            try:
                return await manager.lookup(peer, max(left, 0.001))
            finally:
                news.cancel()
                link.missing = False
        # We have seen it die or leave: if no new life of it is registered, say so at once instead of waiting for one.
        try:
            record = await manager.lookup(peer, 0.0)
        except RendezvousError:
            error = old.cause()
            if isinstance(error, PeerLeft):
                raise PeerLeft(f"{old.identity} closed and has not come back", local=self.address, remote=peer) from None
            raise PeerLost(f"{old.identity} is gone and has not come back ({error.message})", local=self.address, remote=peer) from None
        return record

    async def _until_up(self, link: Link, seconds: float) -> None:
        """Wait, or less if the peer connects to us meanwhile."""
        await asyncio.wait([link.settled], timeout=seconds)

    async def _dial(self, link: Link, me: Self, record: WorkerRecord) -> None:
        peer = link.remote
        network = me.config.cluster.network
        self._dialling.add(peer)
        try:
            connection, hello, handshake = await self._prove(me, record, network.connect_timeout_s)
        finally:
            self._dialling.discard(peer)
        if link.state is not LinkState.CONNECTING:
            connection.abort()
            return
        self._bring_up(link, me, connection, hello, handshake.leftover)

    async def _prove(self, me: Self, record: WorkerRecord, timeout: float) -> tuple[Connection, Hello, ClientHandshake]:
        hello = me.hello(record.address, self._links_had.get(record.identity, 0))
        if record.unix and record.host_id == me.host_id:
            handshake = ClientHandshake(me.token, hello, remote=f"unix:{record.unix}")
            try:
                return *await dial_unix(self.home.loop, record.unix, handshake, timeout), handshake
            except OSError as error:  # another namespace after all, or too many at once: there is still TCP
                log.info("%s connects to %s over TCP: %s", me.identity, record.identity, error)
        handshake = ClientHandshake(me.token, hello, remote=f"{record.host}:{record.port}")
        return *await dial(self.home.loop, record.host, record.port, handshake, timeout, self.tls), handshake

    def _look_after(self, me: Self) -> Resumptions:
        network = me.config.cluster.network

        async def again(record: WorkerRecord, hello: Hello) -> tuple[Connection, Hello, ClientHandshake]:
            handshake = ClientHandshake(me.token, hello, remote=f"{record.host}:{record.port}")
            return *await dial(self.home.loop, record.host, record.port, handshake, network.connect_timeout_s, self.tls), handshake

        return Resumptions(self.home, me.hello, again, self._links, network.reconnect_timeout_s)

    # ---- accepting

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
        self._resumptions = self._look_after(me)
        for link in self._links.values():
            link.configure(me.config.cluster.collective)
        for listener in (sock, unix):
            if listener is not None:
                self._doors.append(
                    Door(
                        self.home.loop,
                        listener,
                        lambda: self._accept(me),
                        time_limit_s=me.config.cluster.network.handshake_timeout_s,
                        limit=lambda: _MAX_UNPROVEN - len(self._unproven),
                        tls=None if self.tls is None or listener is unix else self.tls.server,
                        turned_away=lambda why: self._warnings.warn(f"{self.address} refused a connection: %s", LinkError(why)),
                    )
                )

    def _accept(self, me: Self) -> Connection:
        def make(remote: str | None) -> ServerHandshake:
            return ServerHandshake(me.token, me.hello(None), functools.partial(self._judge, me), remote=remote)

        side = ServerSide(self.home.loop, make, me.config.cluster.network.handshake_timeout_s, self._proved, self._unproved)
        if len(self._unproven) >= _MAX_UNPROVEN:
            # Those who could be anybody go first: a real worker says its preamble at once.
            oldest = next((side for side in self._unproven if side.early), next(iter(self._unproven)))
            del self._unproven[oldest]
            oldest.abort()
        self._unproven[side] = None
        if self._closed:  # let in at the moment of closing
            del self._unproven[side]
            side.abort()
        return side.connection

    def _judge(self, me: Self, hello: Hello) -> Hello | Refusal:
        if self._closed:
            return Refusal("closing", f"{me.identity} is closing")
        if hello.address is None or hello.incarnation < 1:
            return Refusal("address", "a link needs the address of a registered worker")
        remote = Identity(WorkerAddress(hello.address), Incarnation(hello.incarnation))
        resume = resumes(hello)
        if resume is not None and self._resumptions is not None:
            refusal = self._departures.refusal(remote)
            return self._resumptions.judge(remote, resume, me.hello(remote.address)) if refusal is None else refusal
        link = self._links.get(remote.address)
        links_there = hello.capabilities.get("links")
        answer = arbitrate(
            me.identity,
            remote,
            None if link is None else link.state,
            self._newest.get(remote.address, 0),
            remote.address in self._dialling,
            self._links_had.get(remote, 0),
            links_there if type(links_there) is int else 0,
        )
        refusal = self._departures.refusal(remote)
        if refusal is not None:
            return refusal
        if answer is Answer.YIELD:
            return Refusal("yield", f"{me.identity} is connecting to {remote} at this moment")
        if answer is Answer.STALE:
            return Refusal("stale", f"{remote} is an earlier life; #{self._newest[remote.address]} is known here")
        return me.hello(remote.address)

    def _proved(self, side: ServerSide, hello: Hello) -> None:
        self._unproven.pop(side, None)
        me = self._self
        assert me is not None
        assert hello.address is not None
        assert side.handshake is not None
        remote = WorkerAddress(hello.address)
        resume = resumes(hello)
        if resume is not None and self._resumptions is not None:
            self._resumptions.proved(remote, resume, side.connection, side.handshake.leftover)
            return
        link = self._links.get(remote)
        if link is not None and link.state is not LinkState.CONNECTING:
            replace(link, Identity(remote, Incarnation(hello.incarnation)))
            link = None
        if link is None:
            link = self._new_link(remote)
        task = self._connects.pop(remote, None)
        self._bring_up(link, me, side.connection, hello, side.handshake.leftover)
        if task is not None:
            task.cancel()

    def _unproved(self, side: ServerSide, error: LinkError, code: str | None) -> None:
        self._unproven.pop(side, None)
        # A peer gives up its own connection when ours was faster: an end without a wrong word is nothing to worry about.
        if side.gone or code in _ORDINARY_REFUSALS:
            log.debug("%s refused a connection: %s", self.address, error)
        else:
            self._warnings.warn(f"{self.address} refused a connection: %s", error)

    # ---- both

    def _bring_up(self, link: Link, me: Self, connection: Connection, hello: Hello, leftover: bytes) -> None:
        assert hello.address is not None
        identity = Identity(WorkerAddress(hello.address), Incarnation(hello.incarnation))
        self._meet(identity)
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
            link.end(functools.partial(_again, error))
            return
        if self.coding is not None:
            self.coding.equip(link, hello)
        collective = me.config.cluster.collective
        record = _record(hello, identity)
        if self._resumptions is not None:
            self._resumptions.uphold(link, connection, hello, record, self._links_had[identity])
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

    def condemn(self, make_error: Callable[[], AiorlinfError]) -> None:
        """This worker was declared dead: everything fails, and nothing can be begun any more."""
        self._cause = make_error
        self._closed = True
        self._stop_serving()
        self._end_all(make_error)

    def _take_note(self, link: Link | None) -> None:
        """What fails as a link ends may run user code that uses the peer again before we are told of the end."""
        if link is not None and link.state is LinkState.ENDED:
            self._on_link_end(link)

    def _meet(self, identity: Identity) -> None:
        """There is a link with this life of a worker. Of its earlier lives nothing is kept."""
        address = identity.address
        self._links_had[identity] = self._links_had.get(identity, 0) + 1
        newest = self._newest.get(address, 0)
        if identity.incarnation > newest:
            self._newest[address] = identity.incarnation
            self._links_had.pop(Identity(address, Incarnation(newest)), None)
            self._departures.met(identity)
        self._ended.pop(address, None)
        for link in self._left_behind.pop(address, []):
            if len(link.mailbox):
                self._leave_behind(link)

    def _leave_behind(self, link: Link) -> None:
        """The link has ended, and there is a message in it that can still be received."""
        identity = link.identity
        if identity is None or self._closed:
            return
        newest = self._newest.get(identity.address, 0)
        if newest > identity.incarnation:
            lost = link.mailbox.clear()
            log.warning("%s had not received %d messages of %s before #%d came: they are dropped", self.address, lost, identity, newest)
            return
        links = self._left_behind.setdefault(identity.address, [])
        if link not in links:
            links.append(link)

    def _given_back_late(self, link: Link) -> None:
        """A message went back to a link that has ended: to whoever waits on the next one, which must not get a later one first."""
        current = self._links.get(link.remote)
        if current is not None and current is not link and current.identity in (None, link.identity):
            for message in list(link.mailbox.all_queued()):
                if current.mailbox.awaited(message.key):
                    link.mailbox.remove(message)
                    current.receiver.offer(message)
        if len(link.mailbox):
            self._leave_behind(link)

    def _on_link_end(self, link: Link) -> None:
        if self._resumptions is not None:
            self._resumptions.forget(link)
        if link.identity is not None:
            self.carried.add(link.carried())
        if self._links.get(link.remote) is link:
            del self._links[link.remote]
            if link.identity is not None and not self._closed:
                assert link.cause is not None
                self._ended[link.remote] = _Past(link.identity, link.cause)
                if len(link.mailbox):
                    self._leave_behind(link)
        waiter = self._closing.pop(link, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- the end

    async def close(self, timeout: float) -> list[str]:
        """Send what is queued, say goodbye, end all links; says what could not be delivered in `timeout` seconds."""
        self._closed = True
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
                lost.append(f"{len(unfinished)} messages ({size} bytes) to {link.remote}")
        waiters = []
        for link in links:
            if link.state is LinkState.UP:
                waiter = self._closing[link] = self.home.loop.create_future()
                waiters.append(waiter)
                link.say_goodbye()
        for task in list(self._connects.values()):
            task.cancel()
        if waiters:
            await asyncio.wait(waiters, timeout=max(0.05, min(1.0, end - time.monotonic())))
        self.abort()
        return lost

    def abort(self) -> None:
        """End everything at once."""
        self._closed = True
        self._stop_serving()
        self._end_all(lambda: ClosedError("the worker was closed"))
        self._ended.clear()
        self._left_behind.clear()
        if self.coding is not None:
            self.coding.close()
        self.pool.close()
        if self._trimmer is not None:
            self._trimmer.close()
        if self.memory is not None:
            self.memory.close()

    def _end_all(self, make_error: Callable[[], AiorlinfError]) -> None:
        for task in list(self._connects.values()):
            task.cancel()
        for inbox in list(self.inboxes):
            inbox.end(make_error())
        for link in self.links():
            link.end(make_error)

    def _stop_serving(self) -> None:
        for door in self._doors:
            door.close()
        self._doors.clear()
        for side in list(self._unproven):
            side.abort()
        self._unproven.clear()


def _record(hello: Hello, identity: Identity) -> WorkerRecord | None:
    """Where the peer is, by its own words; None if it does not say."""
    told = hello.capabilities.get("record")
    try:
        record = WorkerRecord.from_dict(told) if isinstance(told, dict) else None
    except WireError:
        return None
    return record if record is not None and record.identity == identity else None


def _internal(error: Exception) -> InternalError:
    internal = InternalError(f"connecting failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal


def _again(error: AiorlinfError) -> AiorlinfError:
    """A fresh error of the same content for each operation that fails by it."""
    make: Callable[..., AiorlinfError]
    make, arguments = error.__reduce__()
    fresh = make(*arguments)
    fresh.__cause__ = error.__cause__
    return fresh
