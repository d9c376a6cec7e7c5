"""Collective: makes and remembers the groups of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.calls import Members
from aiorlinf.collective.circle import Circle
from aiorlinf.collective.group import CollectiveGroup, circle_context, context_of
from aiorlinf.errors import UsageError

if TYPE_CHECKING:
    from aiorlinf.collective.exchange import Exchange

__all__ = ["Collective"]


class Collective:
    """The groups of one worker; `comm.collective`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._groups: dict[tuple[frozenset[WorkerAddress], str | None], CollectiveGroup] = {}
        self._contexts: dict[int, tuple[frozenset[WorkerAddress], str | None]] = {}
        self._members: dict[frozenset[WorkerAddress] | None, Members] = {}

    def create_collective_group(self, members: Iterable[str], group_name: str | None = None) -> CollectiveGroup:
        """The group of these workers, made on the first call and remembered by its set of members and its name.

        Nothing is connected yet and no other worker is asked; every member makes its own. Any thread may call.

        Args:
            members: two or more different addresses, ours among them; their order gives the ranks (of the first call).
            group_name: keeps the messages of several groups of the same workers apart.

        Raises:
            UsageError: fewer than two, a worker twice, ours missing, or not an address; the name is no text.
        """
        addresses = self._addresses(members)
        _check_name(group_name)
        unique = frozenset(addresses)
        if len(addresses) < 2:
            raise UsageError("a group has two or more members", hint="to send to yourself use comm.send(obj, comm.address)")
        self._check_ours(addresses)
        key = (unique, group_name)
        group = self._groups.get(key)
        if group is None:
            context = context_of(addresses, group_name)
            if context and self._contexts.setdefault(context, key) != key:
                raise UsageError(f"the name {group_name!r} collides with that of another group", hint="choose another group_name")
            group = self._groups.setdefault(key, CollectiveGroup(self._exchange, addresses, group_name, context))
        return group

    def members(self, members: Iterable[str]) -> Members:
        """The collectives of these workers, ours among them. Raises UsageError as `create_collective_group`."""
        addresses = self._addresses(members)
        key = frozenset(addresses)
        found = self._members.get(key)
        if found is None:
            self._check_ours(addresses)
            found = self._members.setdefault(key, Members(Circle(self._exchange, addresses, circle_context(addresses, "comm"))))
        if found.addresses != tuple(addresses):
            raise UsageError("these members were named in another order before", hint=f"it was {', '.join(found.addresses)}")
        return found

    def whole_job(self, expected: Callable[[], Iterable[str]]) -> Members:
        """The collectives of all workers of the job, in the order of their addresses; `expected` is asked the first time."""
        found = self._members.get(None)
        if found is None:
            addresses = sorted(self._addresses(expected()), key=lambda address: address.sort_key)
            self._check_ours(addresses)
            # One context, whoever is thought to belong to the job: that two workers think differently is then seen.
            made = Members(Circle(self._exchange, addresses, circle_context([], "job")))
            found = self._members.setdefault(None, made)
        return found

    def _addresses(self, members: Iterable[str]) -> list[WorkerAddress]:
        if isinstance(members, str):
            raise UsageError("members is a list of addresses, not one text")
        addresses = [WorkerAddress(member) for member in members]
        if len(set(addresses)) != len(addresses):
            raise UsageError("a worker is named twice among the members")
        return addresses

    def _check_ours(self, addresses: Iterable[WorkerAddress]) -> None:
        if self._exchange.local not in addresses:
            raise UsageError(f"{self._exchange.local} is not among the members {', '.join(addresses)}")


def _check_name(name: object) -> None:
    """Others have to come to the same number by it (`context_of`)."""
    if name is None:
        return
    try:
        if isinstance(name, str):
            name.encode()
            return
    except UnicodeEncodeError:
        pass
    raise UsageError(f"group_name={name!r} is no text")
