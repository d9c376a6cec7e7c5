"""Named things (channels, groups) and the workers that hold them. Pure. What a worker holds goes when it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiorlinf.address import Identity
from aiorlinf.manager.waiting import Named

__all__ = ["Holding", "Names"]


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a named thing, and what it says of it."""

    owner: Identity
    value: Mapping[str, str]


class Names:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[Named, Holding] = {}
        self._by_owner: dict[Identity, set[Named]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, named: Named) -> Holding | None:
        """Its holder."""
        return self._held.get(named)

    def count(self, owner: Identity) -> int:
        """How many this worker holds."""
        return len(self._by_owner.get(owner, ()))

    def put(self, named: Named, holding: Holding) -> Holding | None:
        """Take it, or say it anew if it is held by the same worker; who holds it already, if that is another."""
        held = self._held.get(named)
        if held is not None and held.owner != holding.owner:
            return held
        self._held[named] = holding
        self._by_owner.setdefault(holding.owner, set()).add(named)
        return None

    def withdraw(self, named: Named, owner: Identity) -> bool:
        """Give it up; False if this worker does not hold it."""
        held = self._held.get(named)
        if held is None or held.owner != owner:
            return False
        del self._held[named]
        mine = self._by_owner[owner]
        mine.discard(named)
        if not mine:
            del self._by_owner[owner]
        return True

    def drop(self, owner: Identity) -> None:
        """The worker is gone."""
        for named in self._by_owner.pop(owner, ()):
            del self._held[named]
