"""Who waits for whom: circles are found, and nothing else is taken for one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.observe.waiting import Circle, Wait, find_circles

__all__: list[str] = []

NAMES = tuple("abcdef")


def waits() -> st.SearchStrategy[list[Wait]]:
    names = st.sampled_from(NAMES)
    wait = st.builds(
        Wait,
        worker=names,
        targets=st.lists(names, max_size=3, unique=True).map(tuple),
        any_of=st.booleans(),
        age_s=st.none() | st.floats(0, 100),
    )
    return st.lists(wait, max_size=10)


def closed(waits: Iterable[Wait], members: frozenset[str]) -> bool:
    """By the definition: each of these waits, over others of them, for itself; a wait for one of several counts if all are in the set."""
    edges = {name: set[str]() for name in members}
    for wait in waits:
        if wait.worker in members and (set(wait.targets) <= members if wait.any_of else set(wait.targets) & members):
            edges[wait.worker] |= set(wait.targets) & members
    return all(reached(edges, name) == members for name in members)


def reached(edges: dict[str, set[str]], start: str) -> frozenset[str]:
    """Where one comes from there, in one step or more."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for target in edges[ahead.pop()] - found:
            found.add(target)
            ahead.append(target)
    return frozenset(found)


def largest(waits: list[Wait]) -> set[frozenset[str]]:
    """The largest of all sets that are closed, by trying all."""
    sets = [frozenset(each) for size in range(1, len(NAMES) + 1) for each in itertools.combinations(NAMES, size)]
    good = [each for each in sets if closed(waits, each)]
    return {each for each in good if not any(each < other for other in good)}


@given(waits())
def test_the_circles_are_the_largest_sets_that_wait_for_themselves(waits: list[Wait]) -> None:
    assert {frozenset(circle.workers) for circle in find_circles(waits)} == largest(waits)


@given(waits())
def test_the_way_around_is_one(waits: list[Wait]) -> None:
    for circle in find_circles(waits):
        assert set(circle.path) <= set(circle.workers)
        assert len(set(circle.path)) == len(circle.path) == len(circle.waits)
        for worker, target, wait in zip(circle.path, (*circle.path[1:], circle.path[0]), circle.waits, strict=True):
            assert wait in waits
            assert wait.worker == worker
            assert target in wait.targets


@given(waits(), waits())
def test_more_waits_never_free_anybody(some: list[Wait], more: list[Wait]) -> None:
    every = {name for circle in find_circles([*some, *more]) for name in circle.workers}
    assert {name for circle in find_circles(some) for name in circle.workers} <= every


def test_two_that_wait_for_each_other() -> None:
    one, other = Wait("a", ("b",), text="recv from b tag 1", age_s=3.0), Wait("b", ("a",), text="recv from a tag 2", age_s=2.0)
    (circle,) = find_circles([Wait("c", ("a",)), one, other, Wait("a", ("b",), age_s=1.0), Wait("b", ("d",))])
    assert circle == Circle(("a", "b"), ("a", "b"), (one, other))
    assert str(circle) == "a -> b -> a"


def test_one_that_waits_for_itself() -> None:
    (circle,) = find_circles([Wait("a", ("a",))])
    assert circle.path == ("a",)


def test_who_is_helped_by_one_of_several_is_in_no_circle() -> None:
    assert find_circles([Wait("a", ("b", "c"), any_of=True), Wait("b", ("a",))]) == []
    (circle,) = find_circles([Wait("a", ("b", "c"), any_of=True), Wait("b", ("a",)), Wait("c", ("a",))])
    assert circle.workers == ("a", "b", "c")


def test_a_long_circle_is_no_deep_recursion() -> None:
    many = 5_000
    (circle,) = find_circles(Wait(f"w{index}", (f"w{(index + 1) % many}",)) for index in range(many))
    assert len(circle.workers) == many
