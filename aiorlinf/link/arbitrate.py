"""What to do with a connection that a peer makes: pure.

Both workers may connect to each other at the same moment; exactly one of the two connections must survive, and both sides must
choose the same. The one made by the worker with the smaller address wins. A worker that is told to `yield` waits for the
other's connection.
"""

from __future__ import annotations

import enum

from aiorlinf.address import Identity
from aiorlinf.link.link import LinkState

__all__ = ["Answer", "arbitrate"]


class Answer(enum.Enum):
    """What the accepting side does."""

    ACCEPT = "take it for the link that waits for a connection, or for a new one"
    REPLACE = "the peer has lost the old connection, or lives anew: end the old link, take it for a new one"
    YIELD = "our own connection wins, or has won already; the peer has to wait for it"
    STALE = "it comes from an earlier life of the peer"


def arbitrate(
    local: Identity, remote: Identity, state: LinkState | None, known: int, dialling: bool, links_here: int, links_there: int
) -> Answer:
    """Judge a proven connection from `remote`.

    Args:
        state: of the link to that address, None if there is none.
        known: incarnation of that link's peer, or the newest one seen of that address; 0 if none.
        dialling: our own connection to it is on its way right now (not merely planned).
        links_here, links_there: how many links with this life of each other the two sides have had.
    """
    if remote.incarnation < known:
        return Answer.STALE
    if state is None or state is LinkState.ENDED:
        return Answer.ACCEPT
    if state is LinkState.CONNECTING:
        if dialling and local.address < remote.address:
            return Answer.YIELD
        return Answer.ACCEPT
    if remote.incarnation == known and links_there < links_here:
        # It began to connect before our present link came up there: that one wins, and the peer will find it.
        return Answer.YIELD
    return Answer.REPLACE
