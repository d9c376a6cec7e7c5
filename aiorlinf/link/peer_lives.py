"""The lives of other workers that we have had links with: which is the newest, how they ended, and what they left unread."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import PeerLeft
from aiorlinf.link.departures import Departures
from aiorlinf.link.link import Link

__all__ = ["EndedLife", "PeerLives"]

log: logging.Logger = logging.getLogger("aiorlinf.link")


class EndedLife(NamedTuple):
    """A worker whose link has ended, and why; None if it said goodbye. One is kept for each address there ever was, so it is small."""

    identity: Identity
    why: str | None


class PeerLives:
    """See the module. Home thread only. Nothing is kept of lives before the newest one.

    Args:
        links: those that have not ended; a live view.
        address: our own, for the log.

    Attributes:
        ended: workers whose last link has ended.
        newest: number of the newest life that was met.
        left_behind: links that have ended and hold messages that nobody has received yet.
        closed: nobody will receive anything any more.
    """

    def __init__(self, address: WorkerAddress, links: Mapping[WorkerAddress, Link], departures: Departures) -> None:
        self.ended: dict[WorkerAddress, EndedLife] = {}
        self.newest: dict[WorkerAddress, int] = {}
        self.left_behind: dict[WorkerAddress, list[Link]] = {}
        self.closed: bool = False
        self._address = address
        self._links = links
        self._departures = departures
        self._links_had: dict[Identity, int] = {}

    def links_had(self, identity: Identity) -> int:
        """How many links there were with this life of a worker, the present one included; both sides count alike."""
        return self._links_had.get(identity, 0)

    def past(self, peer: WorkerAddress) -> tuple[Identity | None, int]:
        """The life of this worker whose link has ended, if there is no newer one; and its number if it is over for certain, else 0."""
        past = self.ended.get(peer)
        if past is None:
            return None, 0
        over = past.why is None or self._departures.refusal(past.identity) is not None
        return past.identity, past.identity.incarnation if over else 0

    def heard_of(self, identity: Identity) -> None:
        """It has connected to us, without a link so far. If it is gone before there is one, nobody has to wait for it."""
        if identity.incarnation >= self.newest.get(identity.address, 0) and not self.closed:
            self.ended[identity.address] = EndedLife(identity, f"{identity} is gone: its connection ended at its beginning")

    def meet(self, identity: Identity) -> None:
        """There is a link with this life of a worker. Of its earlier lives nothing is kept."""
        address = identity.address
        self._links_had[identity] = self._links_had.get(identity, 0) + 1
        newest = self.newest.get(address, 0)
        if identity.incarnation > newest:
            self.newest[address] = identity.incarnation
            self._links_had.pop(Identity(address, Incarnation(newest)), None)
            self._departures.met(identity)
        self.ended.pop(address, None)
        for link in self.left_behind.pop(address, []):
            if len(link.mailbox):
                self._leave_behind(link)

    def end(self, link: Link) -> None:
        """The link was the one with this worker, and has ended."""
        if link.identity is not None and not self.closed:
            assert link.cause is not None
            error = link.cause()
            self.ended[link.remote] = EndedLife(link.identity, None if isinstance(error, PeerLeft) else error.message)
            if len(link.mailbox):
                self._leave_behind(link)

    def unread(self, peer: WorkerAddress, key: int) -> Link | None:
        """A link that has ended but still holds a message of this stream: the one with the oldest."""
        links = self.left_behind.get(peer)
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
            del self.left_behind[peer]
        return min(found, key=lambda each: each[0])[1] if found else None

    def given_back_late(self, link: Link) -> None:
        """A message went back to a link that has ended: to whoever waits on the next one, which must not get a later one first."""
        current = self._links.get(link.remote)
        if current is not None and current is not link and current.identity in (None, link.identity):
            for message in list(link.mailbox.all_queued()):
                if current.mailbox.awaited(message.key):
                    link.mailbox.remove(message)
                    current.receiver.returns.offer(message)
        if len(link.mailbox):
            self._leave_behind(link)

    def clear(self) -> None:
        """Nothing is received any more."""
        self.closed = True
        self.ended.clear()
        self.left_behind.clear()

    def _leave_behind(self, link: Link) -> None:
        """The link has ended, and there is a message in it that can still be received."""
        identity = link.identity
        if identity is None or self.closed:
            return
        newest = self.newest.get(identity.address, 0)
        if newest > identity.incarnation:
            lost = link.mailbox.clear()
            log.warning("%s had not received %d messages of %s before #%d came: they are dropped", self._address, lost, identity, newest)
            return
        links = self.left_behind.setdefault(identity.address, [])
        if link not in links:
            links.append(link)
