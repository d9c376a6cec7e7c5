"""The receiver's window: counters only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.errors import WireError
from aiorlinf.link.window import FRAME_COST, ReceiveWindow

__all__: list[str] = []


def test_what_arrives_is_charged_until_it_is_consumed() -> None:
    window = ReceiveWindow(1000)
    window.arrive(600)
    window.arrive(400)
    assert window.outstanding == 1000
    window.consume(600)
    window.arrive(500)
    assert (window.outstanding, window.consumed) == (900, 600)


def test_a_sender_that_does_not_keep_to_the_window_is_found_out() -> None:
    window = ReceiveWindow(1000)
    window.arrive(1000)
    with pytest.raises(WireError, match="more than the window of 1000 bytes"):
        window.arrive(1)


def test_a_report_is_urgent_when_a_quarter_of_the_window_is_unreported() -> None:
    window = ReceiveWindow(1000)
    window.arrive(1000)
    assert not window.consume(250)
    assert window.consume(1)
    assert window.report() == 251
    assert not window.consume(250)


def test_reports_are_running_sums_and_each_is_made_once() -> None:
    window = ReceiveWindow(1000)
    assert window.report() is None
    window.arrive(300)
    window.consume(100)
    assert window.report() == 100
    assert window.report() is None
    window.consume(200)
    assert window.report() == 300


def test_an_empty_message_costs_something() -> None:
    assert FRAME_COST > 0


@given(st.lists(st.integers(1, 400), max_size=60), st.randoms(use_true_random=False))
def test_everything_returned_is_everything_that_came(costs: list[int], random: object) -> None:
    window = ReceiveWindow(1000)
    charged: list[int] = []
    told = 0
    total = 0
    for cost in costs:
        while window.outstanding + cost > window.size:
            window.consume(charged.pop(random.randrange(len(charged))))  # type: ignore[attr-defined]
            told = window.report() or told
            assert told == window.consumed
        window.arrive(cost)
        charged.append(cost)
        total += cost
    for cost in charged:
        window.consume(cost)
    assert window.outstanding == 0
    assert window.consumed == total
