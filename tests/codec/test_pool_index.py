"""The bookkeeping of the pool, against a model that is too simple to be wrong."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aiorlinf.codec.pool_index import Grant, PoolIndex
from tests.hypothesis_profiles import examples

BUDGET = 100


def lend(index: PoolIndex[str], size: int, name: str) -> str:
    """The buffer that a request gets: an idle one, or a new one of this name."""
    grant = index.request(size)
    assert grant is not None
    return grant.buffer or name


def filled(*sizes: int, max_bytes: int = BUDGET) -> PoolIndex[str]:
    """Idle buffers of these sizes, named by size and place; the last one came back last."""
    index: PoolIndex[str] = PoolIndex(10**6)
    leased = [lend(index, size, f"{size}.{place}") for place, size in enumerate(sizes)]
    for size, buffer in zip(sizes, leased, strict=True):
        index.give(size, buffer)
    index.resize(max_bytes)
    index.hits = index.misses = index.evictions = 0
    return index


# ------------------------------------------------------------------------------------------------------- what is chosen


def test_the_smallest_that_fits() -> None:
    index = filled(30, 20, 10)
    assert index.request(15) == Grant(20, "20.1", [])
    assert (index.hits, index.leased_bytes, index.cached_bytes) == (1, 20, 40)


def test_of_one_size_the_one_that_came_back_last() -> None:
    assert filled(10, 10, 10).request(10) == Grant(10, "10.2", [])


def test_at_most_twice_as_large() -> None:
    index = filled(20)
    assert index.request(9) == Grant(9, None, [])
    assert index.request(10) == Grant(20, "20.0", [])
    assert (index.hits, index.misses) == (1, 1)


def test_more_than_twice_as_large_when_there_is_no_room_for_a_new_one() -> None:
    index = filled(40, 56)
    assert index.request(4) == Grant(4, None, [])
    assert index.request(1) == Grant(40, "40.0", [])
    assert index.evictions == 0


def test_the_largest_go_to_make_room() -> None:
    index = filled(20, 30, 40)
    assert index.request(61) == Grant(61, None, ["40.2", "30.1"])
    assert (index.leased_bytes, index.cached_bytes, index.evictions, index.misses) == (61, 20, 2, 1)


def test_of_one_size_the_longest_idle_goes_first() -> None:
    assert filled(30, 30, 30).request(40) == Grant(40, None, ["30.0"])


def test_no_room_and_nothing_that_would_help() -> None:
    index = filled(50, 20)
    assert lend(index, 50, "") == "50.0"
    assert index.request(51) is None
    assert index.request(101) is None
    assert (index.unpooled, index.evictions, index.cached_bytes) == (2, 0, 20)


def test_exactly_the_budget() -> None:
    index: PoolIndex[str] = PoolIndex(BUDGET)
    assert index.request(BUDGET) == Grant(BUDGET, None, [])
    assert index.request(1) is None


def test_without_a_budget_there_is_nothing() -> None:
    assert PoolIndex[str](0).request(1) is None


# ------------------------------------------------------------------------------------------------------- what comes back


def test_a_buffer_that_does_not_come_back() -> None:
    index: PoolIndex[str] = PoolIndex(BUDGET)
    index.request(60)
    index.forget(60)
    assert (index.leased_bytes, index.cached_bytes) == (0, 0)


def test_a_buffer_that_could_not_be_made() -> None:
    index: PoolIndex[str] = PoolIndex(BUDGET)
    index.request(60)
    index.fail(60)
    assert (index.leased_bytes, index.misses, index.unpooled) == (0, 0, 1)


def test_a_smaller_bound_takes_idle_buffers_at_once_and_those_in_use_when_they_come_back() -> None:
    index = filled(20, 30)
    assert lend(index, 20, "") == "20.0"
    assert index.resize(10) == ["30.1"]
    assert not index.give(20, "20.0")
    assert (index.leased_bytes, index.cached_bytes) == (0, 0)


def test_what_was_idle_for_a_whole_period_goes() -> None:
    index = filled(10, 20, 30)
    assert index.age() == []
    used = lend(index, 20, "")
    index.give(20, used)
    assert sorted(index.age()) == ["10.0", "30.2"]
    assert index.cached_bytes == 20
    assert index.age() == [used]
    assert index.age() == []
    assert index.trims == 3


def test_everything_idle_goes() -> None:
    index = filled(10, 20, 20)
    assert sorted(index.clear()) == ["10.0", "20.1", "20.2"]
    assert index.cached_bytes == 0
    assert index.request(20) == Grant(20, None, [])


# ------------------------------------------------------------------------------------------------------------- the model


class Model:
    """The rules as the design words them: plain lists, everything searched every time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.leased: list[int] = []
        self.idle: list[tuple[int, int]] = []  # capacity, name; the last that came back at the end

    def total(self) -> int:
        return sum(self.leased) + sum(capacity for capacity, _ in self.idle)

    def request(self, size: int) -> tuple[int, int | None, list[int]] | None:
        fits = [entry for entry in reversed(self.idle) if entry[0] >= size]
        if fits:
            best = min(fits, key=lambda entry: entry[0])
            if best[0] <= 2 * size or self.total() + size > self.max_bytes:
                self.idle.remove(best)
                self.leased.append(best[0])
                return best[0], best[1], []
        if sum(self.leased) + size > self.max_bytes:
            return None
        evicted = []
        while self.total() + size > self.max_bytes:
            largest = max(self.idle, key=lambda entry: entry[0])
            self.idle.remove(largest)
            evicted.append(largest[1])
        self.leased.append(size)
        return size, None, evicted


class PoolMachine(RuleBasedStateMachine):
    """Any requests and returns in any order: index and model do the same."""

    leases: Bundle[tuple[int, int]] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.index: PoolIndex[int] = PoolIndex(1000)
        self.model = Model(1000)
        self.names = itertools.count(1)
        self.aged: set[int] = set()

    @rule(target=leases, size=st.integers(1, 1100) | st.sampled_from([10, 20, 21, 100, 500, 1000]))
    def request(self, size: int) -> MultipleResults[tuple[int, int]] | tuple[int, int]:
        expected = self.model.request(size)
        grant = self.index.request(size)
        if expected is None:
            assert grant is None
            return multiple()
        assert grant is not None
        assert (grant.capacity, grant.buffer, grant.evicted) == expected
        assert size <= grant.capacity
        self.aged -= {grant.buffer or 0, *grant.evicted}
        return grant.capacity, grant.buffer or next(self.names)

    @rule(lease=consumes(leases))
    def give(self, lease: tuple[int, int]) -> None:
        capacity, name = lease
        self.model.leased.remove(capacity)
        kept = self.model.total() + capacity <= self.model.max_bytes
        if kept:
            self.model.idle.append((capacity, name))
        assert self.index.give(capacity, name) == kept

    @rule(lease=consumes(leases))
    def forget(self, lease: tuple[int, int]) -> None:
        self.model.leased.remove(lease[0])
        self.index.forget(lease[0])

    @rule()
    def age(self) -> None:
        assert set(self.index.age()) == self.aged
        self.model.idle = [entry for entry in self.model.idle if entry[1] not in self.aged]
        self.aged = {name for _, name in self.model.idle}

    @rule()
    def clear(self) -> None:
        assert sorted(self.index.clear()) == sorted(name for _, name in self.model.idle)
        self.model.idle.clear()
        self.aged.clear()

    @rule(max_bytes=st.integers(0, 1500))
    def resize(self, max_bytes: int) -> None:
        self.model.max_bytes = max_bytes
        expected = []
        while self.model.idle and self.model.total() > max_bytes:
            largest = max(self.model.idle, key=lambda entry: entry[0])
            self.model.idle.remove(largest)
            expected.append(largest[1])
        assert self.index.resize(max_bytes) == expected
        self.aged -= set(expected)

    @invariant()
    def sums_agree(self) -> None:
        assert self.index.leased_bytes == sum(self.model.leased)
        assert self.index.cached_bytes == sum(capacity for capacity, _ in self.model.idle)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 5))
@settings(max_examples=examples(60), deadline=None)
def test_steady_traffic_stops_making_buffers(sizes: list[int], held: int) -> None:
    index: PoolIndex[int] = PoolIndex(10**6)
    in_use: list[int] = []
    misses = 0
    for _ in range(4):
        misses = index.misses
        for size in sizes:
            grant = index.request(size)
            assert grant is not None
            in_use.append(grant.capacity)
            if len(in_use) > held:
                oldest = in_use.pop(0)
                index.give(oldest, 0)
    assert index.misses - misses <= len(in_use)
