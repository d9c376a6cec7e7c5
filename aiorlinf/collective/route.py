"""The way of a broadcast as it travels with it: who hands it on to whom. Pure.

Only the root plans: whoever gets the object finds in it whom to hand it on to. So members need not agree on where everybody is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import WireError
from aiorlinf.plans.broadcast import Node

__all__ = ["Route", "routes_of", "routes_to_list"]


@dataclass(frozen=True, slots=True)
class Route:
    """One who gets the object from us, and those who get it from him.

    Attributes:
        address, life: who.
        number: of the operation, as the root counts it with him.
        below: whom he hands it on to.
    """

    address: WorkerAddress
    life: int
    number: int
    below: tuple[Route, ...] = ()

    @classmethod
    def plan(cls, node: Node, members: Sequence[tuple[WorkerAddress, int, int]]) -> tuple[Route, ...]:
        """Below the root of a plan. `members` are address, life and number by rank."""
        made: dict[int, tuple[Route, ...]] = {}
        for each in reversed(list(_walk(node))):
            made[each.member] = tuple(cls(*members[child.member], made[child.member]) for child in each.children)
        return made[node.member]


def _walk(node: Node) -> Iterable[Node]:
    """Parents first. Not recursive: a chain may be long."""
    nodes = [node]
    for each in nodes:
        nodes.extend(each.children)
    return nodes


def routes_to_list(routes: Iterable[Route]) -> list[list[Any]]:
    """As JSON values: a flat list, for a chain may be deep; each entry says where in it its parent is, -1 for none."""
    out: list[list[Any]] = []
    todo = [(-1, route) for route in routes]
    for parent, route in todo:
        todo.extend((len(out), below) for below in route.below)
        out.append([parent, route.address, route.life, route.number])
    return out


def routes_of(told: object) -> tuple[Route, ...]:
    """The inverse. Raises WireError on anything malformed, UsageError if it names no worker."""
    if not isinstance(told, list):
        raise WireError("a broadcast came without its way")
    below: list[list[Route]] = [[] for _ in told]
    top: list[Route] = []
    for index in range(len(told) - 1, -1, -1):
        entry = told[index]
        if not isinstance(entry, list) or len(entry) != 4 or not all(type(entry[place]) is int for place in (0, 2, 3)):
            raise WireError("the way of a broadcast is malformed")
        parent, address, life, number = entry
        if not -1 <= parent < index:
            raise WireError("the way of a broadcast goes backwards")
        (top if parent < 0 else below[parent]).append(Route(WorkerAddress(address), life, number, tuple(reversed(below[index]))))
    return tuple(reversed(top))
