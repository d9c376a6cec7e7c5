"""What becomes of the links with workers whose life has ended, as the manager or a new life of theirs tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.errors import PeerLeft, PeerLost, PeerRestarted
from aiorlinf.wire.handshake import Refusal

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.link.link import Link
    from aiorlinf.manager.lives import End
    from aiorlinf.manager.mirror import News

__all__ = ["Departures", "replace"]

_LAST_WORDS_SECONDS = 0.25
"""How long after the news of a peer's death its connection may still bring what it had sent, before it is cut."""
_GOODBYE_SECONDS = 10.0
"""The same for a peer that left: it says goodbye on the connection itself, after all that it had sent."""


class Departures:
    """Home thread only. `links` is a live view of those that have not ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, links: Mapping[WorkerAddress, Link]) -> None:
        self._loop = loop
        self._links = links
        self._lost: dict[WorkerAddress, tuple[Identity, End]] = {}  # the last life of each that was declared lost

    def take(self, news: News) -> None:
        """The manager tells of another worker."""
        identity, end, silent, certain = news
        if certain and end is not None and end.reason == "lost":
            self._lost[identity.address] = (identity, end)
        link = self._links.get(identity.address)
        if link is None or link.identity is None:
            return
        if end is None:
            if link.identity.incarnation < identity.incarnation:
                self._loop.call_later(_LAST_WORDS_SECONDS, replace, link, identity)
        elif link.identity == identity:
            if end.reason == "left":
                self._loop.call_later(_GOODBYE_SECONDS, link.end, lambda: PeerLeft(f"{identity} closed"))
            else:
                what = "was declared lost" if certain else "is taken for lost"
                pause = 0.0 if silent else _LAST_WORDS_SECONDS
                self._loop.call_later(pause, link.end, lambda: PeerLost(f"{identity} {what}: {end.detail}"))

    def met(self, identity: Identity) -> None:
        """There is a link with this life of a worker."""
        self._lost.pop(identity.address, None)

    def refusal(self, remote: Identity) -> Refusal | None:
        """Why this one may not connect: it was declared lost, and what waited for it has failed. It will hear so from the manager, too."""
        lost, end = self._lost.get(remote.address, (None, None))
        if lost is None or end is None or remote.incarnation > lost.incarnation:
            return None
        return Refusal("dead", f"{remote} was declared lost: {end.detail}")


def replace(link: Link, by: Identity) -> None:
    """The peer has a newer connection, or a newer life. Does nothing to a link that has ended."""
    old = link.identity
    if old is not None and old.incarnation < by.incarnation:
        link.end(lambda: PeerRestarted(f"{old} is gone, {by} lives at its address"))
    else:
        link.end(lambda: PeerLost(f"{old} made a new connection, the old one is lost"))
