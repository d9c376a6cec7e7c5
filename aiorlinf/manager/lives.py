"""Which life of each worker is the newest, and how it ended. Pure.

Every worker and the manager keep such a table, and may tell each other any part of it in any order and any number of times: what is
known of one address is ordered (a later life above an earlier one, an ended life above the same one that goes on, one end above
another by its text), and `learn` takes the higher of two (a join semilattice, so that all come to the same table). Hence a life that was
said to be over stays over, and the numbers never go back, whoever had to start anew.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from aiorlinf.address import Identity, Incarnation, WorkerAddress

__all__ = ["End", "Known", "Lives", "Reason"]

Reason = Literal["left", "lost"]


class End(NamedTuple):
    """How a life ended: `left` (it said goodbye) or `lost`."""

    reason: Reason
    detail: str


class Known(NamedTuple):
    """The newest life of a worker, and its end if it has ended."""

    identity: Identity
    end: End | None


class Lives:
    """See the module.

    Args:
        had: so many lives every worker has had already, of which nothing else is known.
    """

    def __init__(self, had: int = 0) -> None:
        self._had = Incarnation(had)
        self._newest: dict[WorkerAddress, tuple[Incarnation, End | None]] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[Known]:
        for address, (number, end) in list(self._newest.items()):
            yield Known(Identity(address, number), end)

    def learn(self, identity: Identity, end: End | None = None) -> bool:
        """Take this in; whether it was news."""
        known = self._newest.get(identity.address)
        told = (identity.incarnation, None if end is None else _same(end))
        if known is not None and _rank(told) <= _rank(known):
            return False
        self._newest[identity.address] = told
        return True

    def newest(self, address: WorkerAddress) -> Incarnation:
        """The highest number known, 0 if none is."""
        return self._newest.get(address, (self._had, None))[0]

    def next(self, address: WorkerAddress) -> Identity:
        """The life that would come now."""
        return Identity(address, Incarnation(self.newest(address) + 1))

    def end_of(self, identity: Identity) -> End | None:
        """How this life ended; None if nothing is known against it."""
        number, end = self._newest.get(identity.address, (Incarnation(0), None))
        if number > identity.incarnation:
            return End("lost", f"#{number} lives under its address, or has lived")
        return end if number == identity.incarnation else None

    def end(self, address: WorkerAddress) -> End | None:
        """How the newest life ended; None if it goes on or there was none."""
        return self._newest.get(address, (Incarnation(0), None))[1]


@functools.lru_cache(maxsize=64)
def _same(end: End) -> End:
    """Most lives end like others, and of those the table keeps every one for ever."""
    return end


def _rank(entry: tuple[Incarnation, End | None]) -> tuple[int, tuple[str, ...]]:
    number, end = entry
    return number, () if end is None else end
