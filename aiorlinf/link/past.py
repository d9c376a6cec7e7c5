"""What links have carried that have ended: their counters do not go with them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EndedLinks", "Past"]

_MOST = 1024
"""Peers that are told apart. Workers come and go for ever; what the first ones sent is one sum then."""

OTHERS = "*"


@dataclass(frozen=True, slots=True)
class EndedLinks:
    """The links with one worker, of all its lives, that have ended; to be added to what `LinkStats` says of the one that is up.

    Attributes:
        remote: the peer's address; ``*`` are those that ended longest ago, together, when there were more than a thousand peers.
        links: how many have ended.
        messages_sent, messages_received: whole messages.
        bytes_sent, bytes_received: payload bytes.
        around_bytes_sent: those of them that went around the stream, through a backend.
        mismatches: messages refused because the receiver expected something else.
        reconnects: how often the network cut a connection and it was restored.
    """

    remote: str
    links: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    around_bytes_sent: int = 0
    mismatches: int = 0
    reconnects: int = 0

    def plus(self, other: EndedLinks) -> EndedLinks:
        """Both together, under our name."""
        return EndedLinks(
            self.remote,
            self.links + other.links,
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.around_bytes_sent + other.around_bytes_sent,
            self.mismatches + other.mismatches,
            self.reconnects + other.reconnects,
        )

    def __str__(self) -> str:
        sent = f"sent {self.messages_sent} messages, {self.bytes_sent} bytes"
        received = f"received {self.messages_received} messages, {self.bytes_received} bytes"
        return f"{self.remote}, {self.links} ended link{'' if self.links == 1 else 's'}: {sent}; {received}"


class Past:
    """Sums by peer; the one whose link ended last comes last."""

    def __init__(self) -> None:
        self._sums: dict[str, EndedLinks] = {}

    def add(self, ended: EndedLinks) -> None:
        """One more has ended."""
        known = self._sums.pop(ended.remote, None)
        self._sums[ended.remote] = ended if known is None else known.plus(ended)
        if len(self._sums) > _MOST:
            oldest = next(remote for remote in self._sums if remote != OTHERS)
            others = self._sums.pop(OTHERS, EndedLinks(OTHERS)).plus(self._sums.pop(oldest))
            self._sums = {OTHERS: others, **self._sums}  # once per link that ends, and they are a thousand

    def all(self) -> tuple[EndedLinks, ...]:
        """The sums."""
        return tuple(self._sums.values())
