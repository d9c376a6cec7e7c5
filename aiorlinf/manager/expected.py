"""Who belongs to the job: which workers it was started with, and which may come later. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from aiorlinf.address import WorkerAddress

__all__ = ["Expected"]


class Expected:
    """All workers that the job will ever have, so that looking up any other fails at once. Of an open job nothing is known.

    Args:
        addresses: None: the job is open, or it is to be learnt while recovering whether it is.
    """

    def __init__(self, addresses: Iterable[str] | None) -> None:
        self._all = None if addresses is None else {WorkerAddress(address) for address in addresses}
        self._began = self._all and frozenset(self._all)

    @property
    def all(self) -> set[WorkerAddress] | None:
        """Everybody; None in an open job."""
        return self._all

    def excludes(self, address: WorkerAddress) -> bool:
        """Whether this worker will never come."""
        return self._all is not None and address not in self._all

    def add(self, *addresses: WorkerAddress) -> None:
        """These come, too. Means nothing in an open job."""
        if self._all is not None:
            self._all.update(addresses)

    def learn(self, told: Iterable[WorkerAddress] | None, there: Iterable[WorkerAddress]) -> None:
        """What a manager before this one had said. ``there``: who has come without having been expected."""
        if self._all is not None:
            self._all.update(told or ())
        elif told is not None:
            self._all = {*told, *there}

    def told(self) -> tuple[list[WorkerAddress] | None, list[WorkerAddress] | None]:
        """In order: everybody, and those that the job was started with; None for both in an open job."""
        if self._all is None:
            return None, None
        return _ordered(self._all), _ordered(self._began or self._all)


def _ordered(addresses: Iterable[WorkerAddress]) -> list[WorkerAddress]:
    return sorted(addresses, key=lambda address: address.sort_key)
