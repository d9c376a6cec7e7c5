"""Plans: every member gets just what it should, for all sizes, roots and layouts."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from aiorlinf.plans.broadcast import Node, Place, plan_broadcast
from aiorlinf.plans.exchange import plan_all_to_all, plan_gather

__all__: list[str] = []


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Place], int]:
    """Places of 1 to 40 members, and a root. A host is in one rack."""
    hosts = draw(st.integers(1, 12))
    racks = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=hosts, max_size=hosts))
    members = draw(st.lists(st.integers(0, hosts - 1), min_size=1, max_size=40))
    return [Place(f"host-{host}", racks[host]) for host in members], draw(st.integers(0, len(members) - 1))


def crossings(plan: Node, keys: list[str]) -> Counter[str]:
    """How often each host (or rack) is entered from outside."""
    return Counter(keys[edge.target] for edge in plan.edges() if keys[edge.source] != keys[edge.target])


@given(layouts(), st.booleans())
@example(([Place("x")], 0), True)
@example(([Place("x")], 0), False)
def test_everybody_gets_it_once_and_only_from_one_who_has_it(layout: tuple[list[Place], int], bulk: bool) -> None:
    places, root = layout
    plan = plan_broadcast(places, root, bulk=bulk)
    assert plan.member == root
    assert sorted(plan.members()) == list(range(len(places)))
    have = {root: 0}
    busy: set[tuple[int, int]] = set()
    for turn, source, target in sorted(plan.edges()):
        assert have[source] < turn, "who hands it on got it in an earlier round"
        assert (source, turn) not in busy, "nobody sends two in one round"
        busy.add((source, turn))
        have[target] = turn
    assert len(have) == len(places)


@given(layouts(), st.booleans())
def test_each_host_and_each_rack_is_entered_once(layout: tuple[list[Place], int], bulk: bool) -> None:
    places, root = layout
    plan = plan_broadcast(places, root, bulk=bulk)
    for keys in ([place.host for place in places], [place.rack for place in places]):
        assert crossings(plan, keys) == Counter(set(keys) - {keys[root]})


@given(layouts())
def test_a_large_object_leaves_every_host_once(layout: tuple[list[Place], int]) -> None:
    places, root = layout
    plan = plan_broadcast(places, root, bulk=True)
    left = Counter(places[edge.source].host for edge in plan.edges() if places[edge.source].host != places[edge.target].host)
    assert all(count == 1 for count in left.values()), "so the time does not grow with the number of hosts"
    first = [node.children[0].member for node in _nodes(plan) if node.children and len(left) > 0]
    outward = {edge.target for edge in plan.edges() if places[edge.source].host != places[edge.target].host}
    assert outward <= set(first), "the way to the next host comes before the neighbours"


@given(st.integers(1, 300), st.data())
def test_small_objects_take_few_rounds(hosts: int, data: st.DataObject) -> None:
    places = [Place(str(number)) for number in range(hosts)]
    plan = plan_broadcast(places, data.draw(st.integers(0, hosts - 1)), bulk=False)
    assert max([edge.round for edge in plan.edges()], default=0) == math.ceil(math.log2(hosts))


@given(st.integers(1, 40), st.data())
def test_gather_brings_each_part_to_the_root(size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    assert [(source, target) for _, source, target in plan_gather(size, root)] == [(i, root) for i in range(size) if i != root]


@given(st.integers(1, 40))
def test_all_to_all_is_everybody_to_everybody_one_at_a_time(size: int) -> None:
    plan = plan_all_to_all(size)
    assert Counter((source, target) for _, source, target in plan) == Counter((i, j) for i in range(size) for j in range(size) if i != j)
    for ends in ([(turn, source) for turn, source, _ in plan], [(turn, target) for turn, _, target in plan]):
        assert len(set(ends)) == len(ends)


def _nodes(node: Node) -> list[Node]:
    return [node, *(below for child in node.children for below in _nodes(child))]
