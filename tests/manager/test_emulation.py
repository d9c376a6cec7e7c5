"""The emulated network: what lies between two workers, and clocks that a job shares."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.address import WorkerAddress
from aiorlinf.config import NetEmulationConfig, load_config
from aiorlinf.manager.emulation import Booking, Budgets, EmulatedNetwork, Route, missing_ranges

MEGABIT = 125_000.0


def config(**keys: Any) -> NetEmulationConfig:
    return load_config({"cluster": {"net_emulation": keys}}).cluster.net_emulation


def group(members: Any, bandwidth_mbps: float) -> dict[str, Any]:
    return {"members": members, "bandwidth_mbps": bandwidth_mbps}


def pair(src: Any, dst: Any, delay_ms: float) -> dict[str, Any]:
    return {"src": src, "dst": dst, "delay_ms": delay_ms}


def about(value: float) -> Any:
    return pytest.approx(value)


def routes(emulation: NetEmulationConfig, *ways: str) -> list[Route | None]:
    """Of ways such as ``a:0 b:0``."""
    network = EmulatedNetwork(emulation)
    return [network.route(*map(WorkerAddress, way.split())) for way in ways]


# --------------------------------------------------------------------------------------------------------------- routes


def test_delays_of_pairs() -> None:
    both = config(crossdc_pairs=[pair(["a:0-1", "c:*"], "b:0", 20)])
    there, back, other, beyond, own = routes(both, "a:1 b:0", "b:0 c:7", "a:0 a:1", "a:2 b:0", "b:0 b:0")
    assert there == back == Route(0.02, (), None)
    assert (other, beyond, own) == (None, None, None)
    one_way = config(crossdc_pairs=[pair("a:0", "b:0", 20)], symmetric=False)
    assert routes(one_way, "a:0 b:0", "b:0 a:0") == [Route(0.02, (), None), None]


def test_both_directions_may_differ() -> None:
    emulation = config(crossdc_pairs=[pair("a:0", "b:0", 20), pair("b:0", "a:0", 5)], symmetric=False)
    assert routes(emulation, "a:0 b:0", "b:0 a:0") == [Route(0.02, (), None), Route(0.005, (), None)]


def test_a_group_is_charged_for_what_leaves_it_and_what_comes_in() -> None:
    emulation = config(bandwidth_groups=[group("a:*", 80)])
    assert routes(emulation, "a:0 b:0", "b:0 a:0", "a:0 a:1", "b:0 b:1") == [
        Route(0.0, (0,), 80 * MEGABIT),
        Route(0.0, (1,), 80 * MEGABIT),
        None,
        None,
    ]
    only_out = config(bandwidth_groups=[group("a:*", 80)], symmetric=False)
    assert routes(only_out, "a:0 b:0", "b:0 a:0") == [Route(0.0, (0,), 80 * MEGABIT), None]


def test_two_members_that_are_a_pair_use_their_groups_link_all_the_same() -> None:
    emulation = config(bandwidth_groups=[group("a:*", 80)], crossdc_pairs=[pair("a:0", "a:1", 0)])
    assert routes(emulation, "a:0 a:1", "a:1 a:2") == [Route(0.0, (0, 1), 80 * MEGABIT), None]


def test_bytes_pass_all_links_on_their_way_and_the_narrowest_counts() -> None:
    emulation = config(bandwidth_groups=[group("a:*", 80), group("b:*", 40), group(["a:0", "c:*"], 1000)])
    assert routes(emulation, "a:0 b:0", "b:0 a:0", "a:1 b:0", "a:0 c:0") == [
        Route(0.0, (0, 4, 3), 40 * MEGABIT),
        Route(0.0, (2, 1, 5), 40 * MEGABIT),
        Route(0.0, (0, 3), 40 * MEGABIT),
        Route(0.0, (0,), 80 * MEGABIT),
    ]


def test_what_is_off_lies_between_nobody() -> None:
    off = config(enabled=False, crossdc_pairs=[pair("a:0", "b:0", 20)], bandwidth_groups=[group("a:*", 80)])
    assert routes(off, "a:0 b:0", "b:0 a:0") == [None, None]
    assert len(Budgets(off)) == 0


def test_a_route_in_words() -> None:
    assert str(Route(0.02, (0,), 1000 * MEGABIT)) == "20 ms, 1000 Mbit/s"
    assert str(Route(0.0005, (), None)) == "0.5 ms"
    assert str(Route(0.0, (0,), 2.5 * MEGABIT)) == "2.5 Mbit/s"


def test_groups_of_which_there_is_nobody() -> None:
    emulation = config(crossdc_pairs=[pair("a:0-3", "bb:*", 20)], bandwidth_groups=[group(["a:0", "c:1"], 80)])
    assert missing_ranges(emulation, [WorkerAddress("a:3"), WorkerAddress("b:0"), WorkerAddress("c:0")]) == ["bb:*", "a:0", "c:1"]
    assert missing_ranges(config(enabled=False, crossdc_pairs=[pair("a:0", "b:0", 1)]), []) == []


# --------------------------------------------------------------------------------------------------------------- clocks


def test_a_budget_is_one_clock_for_all() -> None:
    budgets = Budgets(config(bandwidth_groups=[group("a:*", 8)]))  # a megabyte per second
    assert budgets.book([0], 500_000, 10.0) == Booking(0.5, 0.5)
    assert budgets.book([0], 500_000, 10.25) == Booking(0.75, 0.5)  # waits for the first
    assert budgets.book([1], 250_000, 10.25) == Booking(0.25, 0.25)  # the other direction is another one
    assert budgets.book([0], 100_000, 20.0) == Booking(about(0.1), about(0.1))  # what was not used is lost


def test_a_second_link_gets_the_bytes_as_they_come_out_of_the_first() -> None:
    budgets = Budgets(config(bandwidth_groups=[group("a:*", 8), group("b:*", 80), group("c:*", 4)]))
    assert budgets.book([0, 3], 1_000_000, 0.0) == Booking(1.0, 1.0)
    assert budgets.book([3], 1_000_000, 0.0) == Booking(about(1.1), about(0.1))
    assert budgets.book([0, 5], 1_000_000, 0.0) == Booking(about(2.0 + 1.0), 2.0)


bookings = st.lists(
    st.tuples(
        st.floats(0, 0.2),  # seconds since the last one
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        st.integers(1, 400_000),
    ),
    min_size=1,
    max_size=60,
)


@given(bookings)
def test_no_budget_ever_carries_more_than_its_rate(calls: list[tuple[float, list[int], int]]) -> None:
    rates = [8.0, 8.0, 80.0, 80.0, 4.0, 4.0]
    budgets = Budgets(config(bandwidth_groups=[group("a:*", 8), group("b:*", 80), group("c:*", 4)]))
    now = 100.0
    ends: dict[int, float] = dict.fromkeys(range(6), now)
    for pause, chain, nbytes in calls:
        now += pause
        booking = budgets.book(chain, nbytes, now)
        slowest = max(nbytes / (rates[number] * MEGABIT) for number in chain)
        assert booking.span_s == pytest.approx(slowest)
        assert booking.wait_s >= slowest - 1e-9
        for number in chain:
            end, took = budgets._booked[number], nbytes / (rates[number] * MEGABIT)
            assert end - took >= max(ends[number], now) - 1e-9, "it overlaps with an earlier booking"
            ends[number] = end
        assert budgets._booked[chain[-1]] == pytest.approx(now + booking.wait_s)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=50), st.lists(st.floats(0, 0.01), min_size=50, max_size=50))
def test_a_budget_that_is_asked_in_time_never_rests(sizes: list[int], pauses: list[float]) -> None:
    budgets = Budgets(config(bandwidth_groups=[group("a:*", 8)]))
    now, end = 0.0, 0.0
    for size, pause in zip(sizes, pauses, strict=False):
        now = min(now + pause, end)
        end = now + budgets.book([0], size, now).wait_s
    assert end == pytest.approx(sum(sizes) / MEGABIT / 8)
