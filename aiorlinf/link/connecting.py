"""How a link of ours finds its peer and connects to it: again and again, until it is up, or the time is over."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.errors import AiorlinfError, DeclaredDead, InternalError, LinkError, PeerLeft, PeerLost, RendezvousError
from aiorlinf.link.dial import Refused, dial, dial_unix
from aiorlinf.link.half_made import HalfMade
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.loopback import Loopback
from aiorlinf.link.me import Self
from aiorlinf.link.peer_lives import EndedLife, PeerLives
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.rendezvous.hosts import local_failure
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.wire.handshake import ClientHandshake, Hello

if TYPE_CHECKING:
    from aiorlinf.link.connection import Connection
    from aiorlinf.link.tracing import Tracing
    from aiorlinf.work.home import LoopHome

__all__ = ["Connector", "Ties", "again"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_RETRY_FIRST_SECONDS = 0.02
_RETRY_MAX_SECONDS = 1.0
_YIELD_SECONDS = 0.5
_SILENCE_SECONDS = 10.0


class Ties(Protocol):
    """What connecting needs of the table of links."""

    tls: Tls | None
    trace: Tracing | None
    lives: PeerLives
    half_made: HalfMade

    def check_expected(self, peer: WorkerAddress) -> None: ...
    def bring_up(self, link: Link, me: Self, connection: Connection, hello: Hello, leftover: bytes, *, dialled: bool = False) -> None: ...


class Connector:
    """See the module. Home thread only.

    Args:
        address: our own.
        ready: done when we are registered; its error is the error of every link made before that.

    Attributes:
        dialling: peers to which a connection of ours is on its way right now.
        attempts: by peer, the task that connects to it.
    """

    def __init__(self, home: LoopHome, address: WorkerAddress, ready: asyncio.Future[tuple[Self, Lifeline]], ties: Ties) -> None:
        self.dialling: set[WorkerAddress] = set()
        self.attempts: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._home = home
        self._address = address
        self._ready = ready
        self._ties = ties

    def begin(self, link: Link) -> None:
        """Connect this link, in a task of its own."""
        connect = self._connect_self if link.remote == self._address else self._connect
        self.attempts[link.remote] = self._home.spawn(connect(link), f"link {link.remote}")

    def cancel(self) -> None:
        """Give all attempts up."""
        for task in list(self.attempts.values()):
            task.cancel()

    async def _connect_self(self, link: Link) -> None:
        try:
            me, _ = await asyncio.shield(self._ready)
        except AiorlinfError as error:
            link.end(functools.partial(again, error))
            return
        if link.state is LinkState.CONNECTING:
            link.backend, link.reason = "stream", "a worker's messages to itself stay in its memory"
            if self._ties.trace is not None:
                self._ties.trace.link_up(link, me.identity)
            link.up(Loopback(self._home.loop, link), me.identity, me.config.cluster.collective.window_bytes, None)

    async def _connect(self, link: Link) -> None:
        peer = link.remote
        try:
            me, manager = await asyncio.shield(self._ready)
            self._ties.check_expected(peer)
            await self._reach(link, me, manager)
        except AiorlinfError as error:
            if link.state is LinkState.CONNECTING:
                link.end(functools.partial(again, error))
        except OSError as error:
            text = local_failure(error) or str(error)
            if link.state is LinkState.CONNECTING:
                link.end(lambda: LinkError(f"{peer} cannot be reached: {text}", local=self._address, remote=peer))
        except Exception as error:  # a bug of ours must not leave the link's operations waiting
            cause = error
            link.end(lambda: _internal(cause))
            raise
        finally:
            if self.attempts.get(peer) is asyncio.current_task():
                del self.attempts[peer]

    async def _reach(self, link: Link, me: Self, manager: Lifeline) -> None:
        """Find the peer and connect, again and again until the time is over; or until the peer has connected to us."""
        peer = link.remote
        network = me.config.cluster.network
        begin = time.monotonic()
        end = begin + network.rendezvous_timeout_s
        pause = _RETRY_FIRST_SECONDS
        tried: dict[str, str] = {}
        old = seen = self._ties.lives.ended.get(peer)
        met: Identity | None = None  # a life that has answered
        while link.state is LinkState.CONNECTING:
            if (ended := self._ties.lives.ended.get(peer)) is not seen:
                old = seen = ended
            left = end - time.monotonic()
            if manager.away and old is not None and old.identity in self._ties.half_made and left > 0:
                # It is about to have a link with us, and a manager that cannot be asked knows nothing against it.
                await self._ties.half_made.over(old.identity, left)
                continue
            record = await self._find(link, old, manager, left)
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
                    raise DeclaredDead(f"{me.identity} was declared dead, says {peer}: {refused.message}", local=self._address) from None
                elif refused.code not in ("target", "stale"):
                    raise
                else:
                    tried[where] = refused.message
            except TimeoutError:
                tried[where] = f"no answer within {network.connect_timeout_s:g} s"
            except OSError as error:
                local = local_failure(error)
                if isinstance(error, ConnectionRefusedError) and (old is not None or record.identity == met):
                    # Its connection ended, and nobody listens there: that is what a death looks like, also before the manager knows of it.
                    raise self._gone(record.identity, old, f"nobody listens at {where} any more") from error
                if isinstance(error, ConnectionResetError):
                    met = record.identity
                if local is not None:
                    raise LinkError(f"{peer} cannot be reached: {local}", local=self._address, remote=peer, address=where) from error
                tried[where] = os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else str(error)
            if link.state is LinkState.CONNECTING:  # for those who look at what waits
                link.reason = f"not connected yet: {where}: {tried[where]}"
            left = end - time.monotonic()
            if left <= 0:
                reasons = "; ".join(f"{address}: {reason}" for address, reason in tried.items())
                raise RendezvousError(
                    f"{self._address} could not connect to {peer}: {reasons}",
                    local=self._address,
                    remote=peer,
                    address=where,
                    elapsed=time.monotonic() - begin,
                )
            await self._until_up(link, min(left, pause * (0.5 + random.random())))
            pause = min(pause * 2, _RETRY_MAX_SECONDS)

    async def _find(self, link: Link, old: EndedLife | None, manager: Lifeline, left: float) -> WorkerRecord:
        peer = link.remote
        if old is None:
            link.missing = True
            news = self._home.loop.call_later(
                _SILENCE_SECONDS, log.warning, "%s waits for %s, which has not joined the job yet", self._address, peer
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
            raise self._gone(old.identity, old, "has not come back") from None
        return record

    def _gone(self, identity: Identity, old: EndedLife | None, what: str) -> PeerLeft | PeerLost:
        """The error of a life that had a connection with us, and has none any more."""
        if old is not None and old.why is None:
            return PeerLeft(f"{identity} closed and {what}", local=self._address, remote=identity.address)
        why = "its connection ended at its beginning" if old is None else old.why
        return PeerLost(f"{identity} is gone and {what} ({why})", local=self._address, remote=identity.address)

    async def _until_up(self, link: Link, seconds: float) -> None:
        """Wait, or less if the peer connects to us meanwhile."""
        await asyncio.wait([link.settled], timeout=seconds)

    async def _dial(self, link: Link, me: Self, record: WorkerRecord) -> None:
        peer = link.remote
        network = me.config.cluster.network
        if record.identity in self._ties.half_made:
            await self._ties.half_made.over(record.identity, _YIELD_SECONDS)
            raise ConnectionError("it has connected to this side, and has not gone on")
        self.dialling.add(peer)
        try:
            connection, hello, handshake = await self._prove(me, record, network.connect_timeout_s)
        finally:
            self.dialling.discard(peer)
        if link.state is not LinkState.CONNECTING:
            connection.abort()
            return
        self._ties.bring_up(link, me, connection, hello, handshake.leftover, dialled=True)

    async def _prove(self, me: Self, record: WorkerRecord, timeout: float) -> tuple[Connection, Hello, ClientHandshake]:
        hello = me.hello(record.address, self._ties.lives.links_had(record.identity))
        if record.unix and record.host_id == me.host_id:
            handshake = ClientHandshake(me.token, hello, remote=f"unix:{record.unix}")
            try:
                return *await dial_unix(self._home.loop, record.unix, handshake, timeout), handshake
            except (TimeoutError, ConnectionResetError, BlockingIOError):
                raise  # it is there, and stands still, or has no room: so it is with TCP, and what has come by that stays with it
            except OSError as error:  # another namespace after all: there is still TCP
                log.info("%s connects to %s over TCP: %s", me.identity, record.identity, error)
        return await self.dial_tcp(me, record, hello, timeout)

    async def dial_tcp(self, me: Self, record: WorkerRecord, hello: Hello, timeout: float) -> tuple[Connection, Hello, ClientHandshake]:
        """Connect to a worker with this hello. Raises as `link.dial.dial`; cancelling closes what was opened."""
        handshake = ClientHandshake(me.token, hello, remote=f"{record.host}:{record.port}")
        return *await dial(self._home.loop, record.host, record.port, handshake, timeout, self._ties.tls), handshake


def _internal(error: Exception) -> InternalError:
    internal = InternalError(f"connecting failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal


def again(error: AiorlinfError) -> AiorlinfError:
    """A fresh error of the same content for each operation that fails by it."""
    make: Callable[..., AiorlinfError]
    make, arguments = error.__reduce__()
    fresh = make(*arguments)
    fresh.__cause__ = error.__cause__
    return fresh
