"""Addresses, and ranges of them as the configuration names workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.address import AddressRange, WorkerAddress
from aiorlinf.errors import UsageError

ranges = st.builds(
    lambda group, first, extra: AddressRange(group, 0 if extra is None else first, None if extra is None else first + extra),
    st.sampled_from(["rollout", "a-1", "team/b.c"]),
    st.integers(0, 6),
    st.none() | st.integers(0, 5),
)
addresses = st.builds(
    lambda group, rank: WorkerAddress(f"{group}:{rank}"), st.sampled_from(["rollout", "a-1", "team/b.c"]), st.integers(0, 14)
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trainer:0", AddressRange("trainer", 0, 0)),
        ("rollout:0-3", AddressRange("rollout", 0, 3)),
        ("a-1:2-10", AddressRange("a-1", 2, 10)),
        ("rollout:*", AddressRange("rollout", 0, None)),
    ],
)
def test_ranges(text: str, found: AddressRange) -> None:
    assert AddressRange.parse(text) == found
    assert str(found) == text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("rollout", "rollout:*"),
        ("rollout:0..3", "rollout:0-3"),
        ("rollout[0-3]", "rollout:0-3"),
        ("rollout:3-0", "rollout:0-3"),
        ("rollout:0-*", "rollout:*"),
        ("r:01", "r:1"),
        (" r:1", "r:1"),
    ],
)
def test_what_is_no_range_and_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match="names no workers; do you mean") as caught:
        AddressRange.parse(text)
    assert f"do you mean {meant}?" in caught.value.message
    AddressRange.parse(meant)


@pytest.mark.parametrize("text", ["", "3", ":", "0:r"])
def test_what_is_no_range_at_all(text: str) -> None:
    with pytest.raises(UsageError, match=r"names no workers"):
        AddressRange.parse(text)


@given(ranges)
def test_a_range_makes_the_round_trip(some: AddressRange) -> None:
    assert AddressRange.parse(str(some)) == some


@given(ranges, ranges, st.lists(addresses, max_size=30))
def test_ranges_overlap_if_some_worker_is_in_both(some: AddressRange, other: AddressRange, workers: list[WorkerAddress]) -> None:
    workers += [WorkerAddress(f"{one.group}:{one.first}") for one in (some, other)]
    assert some.overlaps(other) == any(some.holds(worker) and other.holds(worker) for worker in workers)
