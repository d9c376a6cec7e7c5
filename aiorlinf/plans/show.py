"""A plan as text, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiorlinf.plans.broadcast import Node, Place, plan_broadcast

__all__ = ["Member", "show_topology"]

_ALONE = "(no rack)"


@dataclass(frozen=True, slots=True)
class Member:
    """One worker.

    Attributes:
        address: with the number of its life, say.
        place: where it is.
        labels: all of them.
        devices: such as cpu and cuda:0.
    """

    address: str
    place: Place
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[str] = ()


def show_topology(members: Sequence[Member], root: int) -> list[str]:
    """Racks, hosts and workers, and the ways that a small and a large broadcast of member `root` would take."""
    places = [member.place for member in members]
    racks = len({place.rack for place in places})
    hosts = len({(place.rack, place.host) for place in places})
    lines = [f"{_count(len(members), 'worker')} on {_count(hosts, 'host')} in {_count(racks, 'rack')}", ""]
    for rack in dict.fromkeys(place.rack for place in places):
        lines.append(f"rack {rack or _ALONE}")
        for host in dict.fromkeys(place.host for place in places if place.rack == rack):
            inside = [member for member in members if member.place == Place(host, rack)]
            lines.append(f"  host {inside[0].labels.get('host', host)}")
            for member in inside:
                free = [f"{name}={value}" for name, value in sorted(member.labels.items()) if name not in ("host", "rack")]
                lines.append("    " + "  ".join([member.address, *member.devices, *free]))
    for bulk, what in ((False, "small"), (True, "large")):
        plan = plan_broadcast(places, root, bulk=bulk)
        rounds = max([edge.round for edge in plan.edges()], default=0)
        how = "in pieces, all ways at once" if bulk else _count(rounds, "round")
        lines += ["", f"a {what} broadcast from {members[root].address}, {how}:"]
        lines += _tree(plan, members)
    return lines


def _tree(plan: Node, members: Sequence[Member]) -> list[str]:
    lines = [f"  {members[plan.member].address}"]
    todo = [(child, plan.member, 1) for child in reversed(plan.children)]
    while todo:
        node, parent, depth = todo.pop()
        lines.append(f"  {'  ' * depth}-> {members[node.member].address} {_way(members[parent].place, members[node.member].place)}")
        todo += [(child, node.member, depth + 1) for child in reversed(node.children)]
    return lines


def _way(source: Place, target: Place) -> str:
    if source.host == target.host:
        return "(same host: shared memory)"
    return "(network)" if source.rack == target.rack else "(network, to another rack)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
