"""Connections that we have accepted, and of which the other side has not said yet that it has them.

After our last word of a handshake nobody here can know whether the peer still hears it: its time limit may have passed while its loop or
ours was blocked. A link that was up by our word alone would then break at once, and fail with PeerLost what waits on it, although nobody
is dead; and the peer, who knows of no such link, would wait for the others' part of what has failed here. So a link is up on this side
when the first frame of the peer has come (`FrameType.TAKEN`). If the connection ends before that, it has never been: what waits goes on
waiting, and the two connect again.

While a peer is about to say so, we do not connect to it: of two connections each side could take another one for theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from aiorlinf.address import Identity, WorkerAddress
    from aiorlinf.link.dial import ServerSide

__all__ = ["HalfMade"]


class _Entry(NamedTuple):
    identity: Identity
    side: ServerSide
    over: asyncio.Future[None]


class HalfMade:
    """See the module. Home thread only. At most one for each peer: it connects again when it has given the one before up."""

    def __init__(self) -> None:
        self._entries: dict[WorkerAddress, _Entry] = {}

    def add(self, identity: Identity, side: ServerSide, taken: Callable[[], None]) -> None:
        """The handshake is over. `taken` is called at the peer's first word, if that comes."""
        self.drop(identity.address)
        self._entries[identity.address] = _Entry(identity, side, side.connection.loop.create_future())

        def word() -> None:
            self._remove(identity.address)
            taken()

        side.on_word = word
        side.on_silent_end = lambda: self.drop(identity.address)

    def __contains__(self, identity: Identity) -> bool:
        entry = self._entries.get(identity.address)
        return entry is not None and entry.identity == identity

    async def over(self, identity: Identity, seconds: float) -> None:
        """Wait until there is none of this life any more, and no longer than that. Cancelling is harmless."""
        entry = self._entries.get(identity.address)
        if entry is not None and entry.identity == identity:
            await asyncio.wait([entry.over], timeout=seconds)

    def drop(self, address: WorkerAddress) -> None:
        """It has ended, or there is another connection."""
        entry = self._remove(address)
        if entry is not None:
            entry.side.connection.abort()

    def clear(self) -> None:
        """Drop all."""
        for address in list(self._entries):
            self.drop(address)

    def _remove(self, address: WorkerAddress) -> _Entry | None:
        entry = self._entries.pop(address, None)
        if entry is not None:
            entry.side.on_word = entry.side.on_silent_end = None
            entry.over.set_result(None)
        return entry
