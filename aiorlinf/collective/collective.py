"""Collective: makes and remembers the groups of one worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.group import CollectiveGroup, context_of
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

    def create_collective_group(self, members: Iterable[str], group_name: str | None = None) -> CollectiveGroup:
        """The group of these workers, made on the first call and remembered by its set of members and its name.

        Nothing is connected yet and no other worker is asked; every member makes its own. Any thread may call.

        Args:
            members: two or more different addresses, ours among them; their order gives the ranks (of the first call).
            group_name: keeps the messages of several groups of the same workers apart.

        Raises:
            UsageError: fewer than two, a worker twice, ours missing, or not an address.
        """
        if isinstance(members, str):
            raise UsageError("members is a list of addresses, not one text")
        addresses = [WorkerAddress(member) for member in members]
        unique = frozenset(addresses)
        if len(unique) != len(addresses):
            raise UsageError("a worker is named twice among the members")
        if len(addresses) < 2:
            raise UsageError("a group has two or more members", hint="to send to yourself use comm.send(obj, comm.address)")
        if self._exchange.local not in unique:
            raise UsageError(f"{self._exchange.local} is not among the members {', '.join(addresses)}")
        key = (unique, group_name)
        group = self._groups.get(key)
        if group is None:
            context = context_of(addresses, group_name)
            if context and self._contexts.setdefault(context, key) != key:
                raise UsageError(f"the name {group_name!r} collides with that of another group", hint="choose another group_name")
            group = self._groups.setdefault(key, CollectiveGroup(self._exchange, addresses, group_name, context))
        return group
