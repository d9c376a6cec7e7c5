"""What codecs are expected to cost."""

from __future__ import annotations

import pytest

from aiorlinf.codec.forecast import at_best, expected, on_the_wire
from aiorlinf.codec.trial import Measured

LARGE = 12 << 20
QUICK, FAR, SLOW = Measured(4, 1e9, 4e9), Measured(8, 4e8, 1e9), Measured(8, 5e7, 1e9)
ALL = {"quick": QUICK, "far": FAR, "slow": SLOW}


def test_what_overlaps_takes_as_long_as_its_slowest_part() -> None:
    assert on_the_wire(QUICK, 1e7) == at_best(QUICK, LARGE, 1e7, 2) == pytest.approx(1 / 4e7)
    assert at_best(QUICK, LARGE, 1e10, 2) == pytest.approx(1 / 2e9)
    assert at_best(Measured(4, 4e9, 1e9), LARGE, 1e10, 2) == pytest.approx(1 / 2e9)
    assert at_best(QUICK, LARGE, 1e10, 2, 3.0) == pytest.approx(3 / 2e9)


def test_short_messages_go_step_by_step() -> None:
    assert at_best(QUICK, 1 << 20, 1e9, 2) == pytest.approx(1 / 1e9 + 1 / 4e9 + 1 / 4e9)


def test_without_any_outcome_the_samples_are_believed() -> None:
    assert expected(QUICK, LARGE, 1e9, 2, ALL, []) == at_best(QUICK, LARGE, 1e9, 2)


def test_what_one_has_cost_is_expected_of_the_others() -> None:
    rate = 1e9
    least = at_best(FAR, LARGE, rate, 2)
    known = [("quick", at_best(QUICK, LARGE, rate, 2) + 1e-9)]
    assert expected(FAR, LARGE, rate, 2, ALL, known) == pytest.approx(least + 1e-9), "each message costs that much more"
    known = [("quick", 3 * at_best(QUICK, LARGE, rate, 2))]
    assert expected(SLOW, LARGE, rate, 2, ALL, known) < 1.2 * at_best(SLOW, LARGE, rate, 2), "the better of both"


def test_the_one_that_did_best_counts() -> None:
    known = [("quick", 1e-6), ("slow", at_best(SLOW, LARGE, 1e9, 2))]
    assert expected(FAR, LARGE, 1e9, 2, ALL, known) == at_best(FAR, LARGE, 1e9, 2)


def test_where_the_link_is_what_a_message_waits_for_no_codec_seems_slower_than_it_is() -> None:
    known = [("quick", 1.1 * on_the_wire(QUICK, 1e7))]
    assert expected(FAR, LARGE, 1e7, 2, ALL, known) == at_best(FAR, LARGE, 1e7, 2)
