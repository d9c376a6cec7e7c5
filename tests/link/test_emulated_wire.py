"""One direction of one link over an emulated network, under a clock that the tests move."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.config import load_config
from aiorlinf.link.emulated_wire import LOOK_AHEAD_S, SLICE_S, EmulatedWire, slice_bytes
from aiorlinf.manager.emulation import Booking, Budgets, Route
from tests.hypothesis_profiles import examples

MEGABYTE = 1_000_000


def about(value: float) -> Any:
    return pytest.approx(value)


class Run:
    """Wires that share one budget of a megabyte per second, driven as the I/O around them does it, by the clock alone.

    Args:
        answer: seconds that the answer to a booking takes.
    """

    def __init__(self, delays: list[float], *, limited: bool = True, answer: float = 0.0) -> None:
        emulation = {"bandwidth_groups": [{"members": "a:*", "bandwidth_mbps": 8}]}
        self.budgets = Budgets(load_config({"cluster": {"net_emulation": emulation}}).cluster.net_emulation)
        self.now = 0.0
        self.answer = answer
        self.lefts: list[list[tuple[float, int]]] = [[] for _ in delays]
        self.arrived: list[list[tuple[float, int]]] = [[] for _ in delays]
        self.delays = delays
        self.costs: dict[int, int] = {}
        self._answers: list[tuple[float, int, Booking]] = []
        budgets, rate = ((0,), float(MEGABYTE)) if limited else ((), None)
        self.wires: list[EmulatedWire[int]] = [EmulatedWire(Route(delay, budgets, rate)) for delay in delays]
        self._items: list[deque[int]] = [deque() for _ in delays]

    def put(self, index: int, item: int, cost: int) -> None:
        self.costs[item] = cost
        self._items[index].append(item)
        self.wires[index].put(item, cost, self.now)

    def act(self) -> None:
        """Everything that is due now."""
        while self._answers and self._answers[0][0] <= self.now:
            _, index, booking = heapq.heappop(self._answers)
            self.wires[index].booked(booking, self.now)
        for index, wire in enumerate(self.wires):
            for _ in range(wire.leave(self.now)):
                self.lefts[index].append((self.now, self._items[index].popleft()))
            while (item := wire.arrive(self.now)) is not None:
                self.arrived[index].append((self.now, item))
            wanted = wire.lease(self.now)
            if wanted:
                heapq.heappush(self._answers, (self.now + self.answer, index, self.budgets.book([0], wanted, self.now)))

    def until(self, end: float) -> None:
        """Let the time pass, up to then."""
        for _ in range(100_000):
            self.act()
            times = [wire.next_time() for wire in self.wires] + [self._answers[0][0] if self._answers else None]
            following = min((time for time in times if time is not None), default=end)
            if following >= end:
                break
            self.now = max(self.now, following)
        else:
            raise AssertionError("the clock does not get ahead")
        self.now = end
        self.act()


# ---------------------------------------------------------------------------------------------------------------- cases


def test_a_delay_alone() -> None:
    run = Run([0.02], limited=False)
    run.put(0, 1, 5000)
    run.until(0.005)
    run.put(0, 2, 0)
    run.until(1.0)
    assert run.lefts[0] == [(0.0, 1), (0.005, 2)]
    assert run.arrived[0] == [(about(0.02), 1), (about(0.025), 2)]


def test_bytes_leave_at_the_rate_and_arrive_a_delay_later() -> None:
    run = Run([0.5])
    for item in range(3):
        run.put(0, item, 100_000)
    assert run.wires[0].backlog == 300_000
    run.until(0.25)
    assert run.lefts[0] == [(about(0.1), 0), (about(0.2), 1)]
    assert (run.wires[0].backlog, run.wires[0].under_way) == (100_000, 200_000)
    run.until(2.0)
    assert run.arrived[0] == [(about(0.6), 0), (about(0.7), 1), (about(0.8), 2)]
    assert (len(run.wires[0]), run.wires[0].backlog, run.wires[0].under_way) == (0, 0, 0)


def test_what_costs_nothing_keeps_its_place() -> None:
    run = Run([0.0])
    run.put(0, 0, 0)
    run.put(0, 1, 100_000)
    run.put(0, 2, 0)
    run.put(0, 3, 100_000)
    run.put(0, 4, 0)
    run.until(1.0)
    assert [item for _, item in run.arrived[0]] == [0, 1, 2, 3, 4]
    times = [time for time, _ in run.arrived[0]]
    assert times == pytest.approx([0.0, 0.1, 0.1, 0.2, 0.2])


def test_what_costs_nothing_asks_for_nothing() -> None:
    wire: EmulatedWire[int] = EmulatedWire(Route(0.0, (0,), float(MEGABYTE)))
    wire.put(1, 0, 3.0)
    assert wire.lease(3.0) == 0
    wire.leave(3.0)
    assert wire.arrive(3.0) == 1


def test_bandwidth_is_booked_in_slices_and_the_next_one_in_time() -> None:
    wire: EmulatedWire[int] = EmulatedWire(Route(0.0, (0,), float(MEGABYTE)))
    per_slice = slice_bytes(MEGABYTE)
    for item in range(100):
        wire.put(item, 5000, 0.0)
    assert wire.lease(0.0) == per_slice == 20_000
    assert wire.lease(0.0) == 0, "one at a time"
    wire.booked(Booking(0.02, 0.02), 0.0)
    assert wire.next_time() == pytest.approx(SLICE_S - LOOK_AHEAD_S)
    assert wire.lease(0.0) == per_slice, "the next one is booked as the first begins"
    wire.booked(Booking(0.04, 0.02), 0.0)
    assert wire.lease(0.001) == 0, "that would be too far ahead"
    while (leaves := wire.next_time()) is not None and leaves < 0.019:
        wire.leave(leaves)
        wire.arrive(leaves)
    assert wire.next_time() == pytest.approx(2 * SLICE_S - LOOK_AHEAD_S)
    assert wire.lease(0.0201) == per_slice


def test_something_large_is_a_slice_of_its_own() -> None:
    wire: EmulatedWire[int] = EmulatedWire(Route(0.0, (0,), float(MEGABYTE)))
    wire.put(1, 3 * MEGABYTE, 0.0)
    wire.put(2, 10, 0.0)
    assert wire.lease(0.0) == 3 * MEGABYTE


def test_two_share_one_clock_and_take_turns() -> None:
    run = Run([0.0, 0.0])
    for item in range(40):
        run.put(item % 2, item, 10_000)
    run.until(10.0)
    ends = [times[-1][0] for times in run.lefts]
    assert max(ends) == pytest.approx(0.4)
    assert min(ends) >= 0.36, "one of them had to wait for all of the other"


def test_nothing_is_left_after_clear() -> None:
    run = Run([1.0])
    for item in range(6):
        run.put(0, item, 10_000 if item % 2 else 0)
    run.until(0.015)
    assert run.wires[0].clear() == [0, 1, 2, 3, 4, 5]
    assert (len(run.wires[0]), run.wires[0].backlog, run.wires[0].under_way, run.wires[0].next_time()) == (0, 0, 0, None)


def test_what_cannot_be_taken_at_the_moment_is_nothing_to_wake_for() -> None:
    wire: EmulatedWire[int] = EmulatedWire(Route(0.5, (), None))
    wire.put(1, 10, 0.0)
    wire.leave(0.0)
    assert wire.next_time() == 0.5
    assert wire.next_time(held=True) is None


# ------------------------------------------------------------------------------------------------------------- any run


@dataclass
class Sent:
    when: float
    cost: int


@dataclass
class Plan:
    """What is sent on which wire, and when."""

    delays: list[float]
    answer: float
    limited: bool
    sends: list[tuple[float, int, int]] = field(default_factory=list)


plans = st.builds(
    Plan,
    st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3]), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.0005, 0.004]),
    st.booleans(),
    st.lists(
        st.tuples(
            st.floats(0, 0.05) | st.just(0.0), st.integers(0, 3), st.just(0) | st.integers(1, 3000) | st.integers(1, 100_000)
        ),
        max_size=60,
    ),
)  # fmt: skip


@settings(max_examples=examples(200))
@given(plans)
def test_whatever_is_sent_arrives_once_in_order_and_never_early(plan: Plan) -> None:
    run = Run(plan.delays, limited=plan.limited, answer=plan.answer)
    sent: list[list[tuple[int, Sent]]] = [[] for _ in plan.delays]
    for item, (pause, index, cost) in enumerate(plan.sends):
        run.until(run.now + pause)
        index %= len(plan.delays)
        sent[index].append((item, Sent(run.now, cost)))
        run.put(index, item, cost)
    run.until(run.now + 60.0)
    for index, delay in enumerate(plan.delays):
        assert [item for _, item in run.arrived[index]] == [item for item, _ in sent[index]]
        for (arrived, _), (left, _), (_, what) in zip(run.arrived[index], run.lefts[index], sent[index], strict=True):
            assert left >= what.when + (what.cost / MEGABYTE if plan.limited else 0.0) - 1e-9
            assert arrived >= left + delay - 1e-9
        assert len(run.wires[index]) == run.wires[index].backlog == run.wires[index].under_way == 0
        assert run.wires[index].next_time() is None
    if plan.limited:
        check_the_budget(run, plan.answer)


def check_the_budget(run: Run, answer: float) -> None:
    """All wires together never carry more than the rate; an answer that is late shifts a slice by as much."""
    lefts = sorted((left, run.costs[item]) for lefts in run.lefts for left, item in lefts if run.costs[item])
    for start in range(len(lefts)):
        since, cost = lefts[start]
        total = cost
        for left, more in lefts[start + 1 :]:
            total += more
            assert total <= (left - since + cost / MEGABYTE + answer) * MEGABYTE + 1e-3


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=40), st.integers(1, 4), st.sampled_from([0.0, 0.0005, 0.004]))
def test_a_link_with_enough_to_send_is_never_idle(costs: list[int], wires: int, answer: float) -> None:
    run = Run([0.0] * wires, answer=answer)
    for item, cost in enumerate(costs):
        run.put(item % wires, item, cost)
    run.until(60.0)
    last = max(left for lefts in run.lefts for left, _ in lefts)
    assert last == pytest.approx(sum(costs) / MEGABYTE + answer, abs=1e-6 + (answer if wires > 1 else 0.0))
