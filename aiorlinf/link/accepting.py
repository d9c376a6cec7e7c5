"""Who connects to us: strangers are turned away, peers are judged, and those that are let in become links."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import LinkError
from aiorlinf.link.arbitrate import Answer, arbitrate
from aiorlinf.link.connecting import Connector
from aiorlinf.link.departures import Departures, replace
from aiorlinf.link.dial import ServerSide
from aiorlinf.link.half_made import HalfMade
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.me import Self
from aiorlinf.link.peer_lives import PeerLives
from aiorlinf.link.resume import Resumptions, from_the_beginning, resumes
from aiorlinf.manager.throttle import Throttle
from aiorlinf.rendezvous.door import Door
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.wire.handshake import Hello, Refusal, ServerHandshake

if TYPE_CHECKING:
    from aiorlinf.link.connection import Connection
    from aiorlinf.work.home import LoopHome

__all__ = ["Acceptor"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_MAX_UNPROVEN = 256
_ORDINARY_REFUSALS = ("yield", "closing", "ended")


class Acceptor:
    """See the module. Home thread only.

    Args:
        links: those that have not ended; a live view.
        new_link: makes one that is not connected yet.
        bring_up: connects it: with its hello, and what came behind that.
        resumptions: who has the links that the network has cut.

    Attributes:
        doors: where we listen.
        unproven: who has come and not yet proved to belong to the job, in the order of their coming.
        closed: nobody is let in any more.
    """

    def __init__(
        self,
        home: LoopHome,
        me: Self,
        links: Mapping[WorkerAddress, Link],
        lives: PeerLives,
        departures: Departures,
        connector: Connector,
        half_made: HalfMade,
        resumptions: Resumptions,
        new_link: Callable[[WorkerAddress], Link],
        bring_up: Callable[[Link, Self, Connection, Hello, bytes], None],
    ) -> None:
        self.doors: list[Door] = []
        self.unproven: dict[ServerSide, None] = {}
        self.closed: bool = False
        self._home = home
        self._me = me
        self._links = links
        self._lives = lives
        self._departures = departures
        self._connector = connector
        self._half_made = half_made
        self._resumptions = resumptions
        self._new_link = new_link
        self._bring_up = bring_up
        self._warnings = Throttle(log)

    def open(self, listener: socket.socket, tls: Tls | None) -> None:
        """Let peers in that come to this listening socket."""
        self.doors.append(
            Door(
                self._home.loop,
                listener,
                self._accept,
                time_limit_s=self._me.config.cluster.network.handshake_timeout_s,
                limit=lambda: _MAX_UNPROVEN - len(self.unproven),
                tls=None if tls is None else tls.server,
                turned_away=lambda why: self._warn(LinkError(why)),
            )
        )

    def close(self) -> None:
        """Listen no more, and send those away who have not proved anything. May be called again."""
        self.closed = True
        for door in self.doors:
            door.close()
        self.doors.clear()
        for side in list(self.unproven):
            side.abort()
        self.unproven.clear()

    def _accept(self) -> Connection:
        me = self._me

        def make(remote: str | None) -> ServerHandshake:
            return ServerHandshake(me.token, me.hello(None), self._judge, remote=remote)

        side = ServerSide(self._home.loop, make, me.config.cluster.network.handshake_timeout_s, self._proved, self._unproved)
        if len(self.unproven) >= _MAX_UNPROVEN:
            # Those who could be anybody go first: a real worker says its preamble at once.
            oldest = next((side for side in self.unproven if side.early), next(iter(self.unproven)))
            del self.unproven[oldest]
            oldest.abort()
        self.unproven[side] = None
        if self.closed:  # let in at the moment of closing
            del self.unproven[side]
            side.abort()
        return side.connection

    def _judge(self, hello: Hello) -> Hello | Refusal:
        me, lives = self._me, self._lives
        if self.closed:
            return Refusal("closing", f"{me.identity} is closing")
        if hello.address is None or hello.incarnation < 1:
            return Refusal("address", "a link needs the address of a registered worker")
        remote = Identity(WorkerAddress(hello.address), Incarnation(hello.incarnation))
        refusal = self._departures.refusal(remote)
        resume = resumes(hello)
        if resume is not None and refusal is None:
            if self._unheard(remote, resume):
                return from_the_beginning(me.hello(remote.address), resume)
            return self._resumptions.judge(remote, resume, me.hello(remote.address))
        link = self._links.get(remote.address)
        links_there = hello.capabilities.get("links")
        answer = arbitrate(
            me.identity,
            remote,
            None if link is None else link.state,
            lives.newest.get(remote.address, 0),
            remote.address in self._connector.dialling,
            lives.links_had(remote),
            links_there if type(links_there) is int else 0,
        )
        if refusal is not None:
            return refusal
        if answer is Answer.YIELD:
            return Refusal("yield", f"{me.identity} is connecting to {remote} at this moment")
        if answer is Answer.STALE:
            return Refusal("stale", f"{remote} is an earlier life; #{lives.newest[remote.address]} is known here")
        return me.hello(remote.address)

    def _unheard(self, remote: Identity, resume: Mapping[str, Any]) -> bool:
        """The peer goes on with a link whose first word was lost on its way to us, so that there is none here: all of it comes again."""
        link = self._links.get(remote.address)
        return (
            (link is None or link.state is LinkState.CONNECTING)
            and resume.get("received") == 0
            and resume.get("link") == self._lives.links_had(remote) + 1
            and remote.incarnation >= self._lives.newest.get(remote.address, 0)
        )

    def _proved(self, side: ServerSide, hello: Hello) -> None:
        self.unproven.pop(side, None)
        assert hello.address is not None
        assert side.handshake is not None
        remote = WorkerAddress(hello.address)
        identity = Identity(remote, Incarnation(hello.incarnation))
        resume = resumes(hello)
        if resume is not None:
            if self._unheard(identity, resume):
                self._taken(side, identity, hello)
            else:
                self._resumptions.proved(remote, resume, side.connection, side.handshake.leftover)
            return
        link = self._links.get(remote)
        if link is None or link.state is LinkState.CONNECTING:
            self._lives.heard_of(identity)
        self._half_made.add(identity, side, functools.partial(self._taken, side, identity, hello))

    def _taken(self, side: ServerSide, identity: Identity, hello: Hello) -> None:
        """The peer has the link."""
        assert side.handshake is not None
        remote = identity.address
        link = self._links.get(remote)
        if self._departures.refusal(identity) is not None or (self.closed and link is None):
            side.connection.abort()  # while it said nothing it was declared lost, or we have closed
            return
        if link is not None and link.state is not LinkState.CONNECTING:
            replace(link, identity)
            link = None
        if link is None:
            link = self._new_link(remote)
        task = self._connector.attempts.pop(remote, None)
        self._bring_up(link, self._me, side.connection, hello, side.handshake.leftover)
        if task is not None:
            task.cancel()

    def _unproved(self, side: ServerSide, error: LinkError, code: str | None) -> None:
        self.unproven.pop(side, None)
        # A peer gives up its own connection when ours was faster: an end without a wrong word is nothing to worry about.
        if side.gone or code in _ORDINARY_REFUSALS:
            log.debug("%s refused a connection: %s", self._me.identity.address, error)
        else:
            self._warn(error)

    def _warn(self, error: LinkError) -> None:
        self._warnings.warn(f"{self._me.identity.address} refused a connection: %s", error)
