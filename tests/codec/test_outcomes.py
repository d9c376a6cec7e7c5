"""What a few measurements say, some of which had bad luck."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.codec.outcomes import Outcomes


def outcomes_of(*costs: float) -> Outcomes:
    """One message of the kind after the other, a second apart."""
    outcomes = Outcomes()
    for message, cost in enumerate(costs):
        outcomes.note(cost, float(message), message)
    return outcomes


def test_nothing_is_known_of_what_was_not_used() -> None:
    nothing = Outcomes()
    assert nothing.cost is None
    assert nothing.latest is None
    assert nothing.count == 0
    assert nothing.since(7) == 7


def test_bad_luck_and_a_cold_start_do_not_count() -> None:
    assert outcomes_of(30, 10).cost == 10
    assert outcomes_of(10, 90, 11).cost == 10
    assert outcomes_of(12, 11, 40, 40, 12).cost in (11, 12)


def test_good_luck_alone_does_not_count_for_long() -> None:
    assert outcomes_of(4, 10, 10, 11, 10, 10).cost == 10


def test_what_has_become_better_shows_at_once() -> None:
    outcomes = outcomes_of(10, 10, 10, 10, 10, 10, 3)
    assert outcomes.latest == 3


def test_what_stays_slow_has_become_slow() -> None:
    assert outcomes_of(10, 10, 10, *[15] * 5).cost == 10
    assert outcomes_of(10, 10, 10, *[15] * 6).cost == 15


def test_what_suddenly_takes_far_longer_is_soon_believed() -> None:
    outcomes = outcomes_of(10, 11, 10, 10)
    assert [outcomes.note(100, 5.0, 5), outcomes.note(100, 6.0, 6)] == [False, False]
    assert outcomes.cost == 10
    assert outcomes.note(99, 7.0, 7)
    assert (outcomes.cost, outcomes.count) == (99, 3)


def test_what_is_old_is_forgotten() -> None:
    outcomes = outcomes_of(10, 20, 30)
    outcomes.forget_old(1000.0, 50)
    assert outcomes.count == 3, "few messages since"
    outcomes.forget_old(20.0, 5000)
    assert outcomes.count == 3, "little time since"
    outcomes.forget_old(31.5, 5000)
    assert (outcomes.count, outcomes.cost) == (1, 30)
    outcomes.forget_old(1000.0, 5000)
    assert (outcomes.count, outcomes.cost) == (0, None)


@given(st.lists(st.floats(1e-12, 1e3), min_size=1, max_size=40))
def test_it_is_always_something_that_was_measured(costs: list[float]) -> None:
    outcomes = outcomes_of(*costs)
    assert outcomes.cost in costs[-8:]
    assert outcomes.latest == costs[-1]
    assert 1 <= outcomes.count <= 8
