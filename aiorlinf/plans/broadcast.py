"""How one object gets from its root to all members of a group.

Every host but the root's gets the object once, from outside; its leader, the first of its members, hands it on to the others, over memory
that they share where there is some. Every rack but the root's is entered once.

Large objects go along a chain of the hosts, in pieces: each host sends on what it has while more is coming, so that all of them together
take about as long as one transfer, whatever their number (a pipelined chain, as in van de Geijn and Watts, "SUMMA", 1997). Small
ones go along binomial trees, one of the racks and one inside each, since there it is the number of hops that counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Edge", "Node", "Place", "plan_broadcast"]


class Place(NamedTuple):
    """Where a member is.

    Attributes:
        host: equal for members that can share memory.
        rack: equal for members that are near each other; empty if nothing is known.
    """

    host: str
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A member, and those whom it hands the object on to, in this order.

    Attributes:
        member: its rank.
    """

    member: int
    children: tuple[Node, ...] = ()

    def edges(self) -> Iterator[Edge]:
        """Every handing-over, parents before their children."""
        rounds = {self.member: 0}
        nodes = [self]
        for node in nodes:
            for order, child in enumerate(node.children):
                rounds[child.member] = rounds[node.member] + order + 1
                yield Edge(rounds[child.member], node.member, child.member)
                nodes.append(child)

    def members(self) -> Iterator[int]:
        """Itself and all below."""
        yield self.member
        for edge in self.edges():
            yield edge.target


class Edge(NamedTuple):
    """One handing-over. What is of one round can happen at the same time, if all of it moves at once."""

    round: int
    source: int
    target: int


def plan_broadcast(places: Sequence[Place], root: int, *, bulk: bool) -> Node:
    """The tree that a broadcast takes.

    Args:
        places: of the members, by rank. A host that is said to be in two racks counts as two.
        root: rank of the one who has the object.
        bulk: the object is large: a chain of hosts instead of trees.
    """
    racks = _racks(places, root)
    if bulk:
        node: Node | None = None
        for host in reversed([host for hosts in racks for host in hosts]):
            inside = tuple(Node(member) for member in host[1:])
            node = Node(host[0], inside if node is None else (node, *inside))
        assert node is not None
        return node
    trees = [_binomial([_Branch(host[0], [_Branch(member) for member in host[1:]]) for host in hosts]) for hosts in racks]
    return _binomial(trees).freeze()


def _racks(places: Sequence[Place], root: int) -> list[list[list[int]]]:
    """Members by host, hosts by rack; the root's come first, and the root is the first of its own."""
    racks: dict[str, dict[str, list[int]]] = {}
    for member in [root, *(other for other in range(len(places)) if other != root)]:
        place = places[member]
        racks.setdefault(place.rack, {}).setdefault(place.host, []).append(member)
    return [list(hosts.values()) for hosts in racks.values()]


class _Branch:
    """A `Node` that is being made."""

    __slots__ = ("children", "member")

    def __init__(self, member: int, children: list[_Branch] | None = None) -> None:
        self.member = member
        self.children = children or []

    def freeze(self) -> Node:
        return Node(self.member, tuple(child.freeze() for child in self.children))


def _binomial(branches: list[_Branch]) -> _Branch:
    """The first gets the others as children and grandchildren: in each round all who have the object hand it on. These come before the
    children that they had, for the way to them is longer."""
    new: list[list[_Branch]] = [[] for _ in branches]
    reached = 1
    while reached < len(branches):
        for source in range(min(reached, len(branches) - reached)):
            new[source].append(branches[reached + source])
        reached *= 2
    for branch, children in zip(branches, new, strict=True):
        branch.children[:0] = children
    return branches[0]
