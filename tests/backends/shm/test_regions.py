"""Free space of a segment, against a map of its pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.backends.shm.regions import ALIGNMENT, PAGE, Regions, align
from tests.hypothesis_profiles import examples

PAGES = 24


class Map:
    """Each page's owner, or None. First fit by looking at all of them."""

    def __init__(self) -> None:
        self.owners: list[int | None] = [None] * PAGES

    def find(self, pages: int) -> int | None:
        for start in range(PAGES - pages + 1):
            if not any(owner is not None for owner in self.owners[start : start + pages]):
                return start
        return None

    def own(self, start: int, pages: int, owner: int | None) -> None:
        self.owners[start : start + pages] = [owner] * pages


@settings(max_examples=examples(200))
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, PAGES * PAGE + PAGE), st.integers(0, 1 << 16)), max_size=60))
def test_it_gives_the_lowest_place_that_is_large_enough(steps: list[tuple[bool, int, int]]) -> None:
    regions, pages = Regions(PAGES * PAGE), Map()
    taken: list[tuple[int, int]] = []
    for number, (take, size, which) in enumerate(steps):
        if take:
            count = max(1, -(-size // PAGE))
            offset = regions.take(size)
            expected = pages.find(count)
            assert offset == (None if expected is None else expected * PAGE)
            if offset is not None:
                pages.own(offset // PAGE, count, number)
                taken.append((offset, count))
        elif taken:
            offset, count = taken.pop(which % len(taken))
            regions.give(offset)
            pages.own(offset // PAGE, count, None)
        assert regions.used == PAGE * sum(owner is not None for owner in pages.owners)
        assert regions.empty == (not taken)
    for offset, _ in taken:
        regions.give(offset)
    assert regions.take(PAGES * PAGE) == 0  # all of it is one piece again


def test_what_was_not_taken_cannot_be_given_back() -> None:
    regions = Regions(4 * PAGE)
    offset = regions.take(1)
    assert offset == 0
    with pytest.raises(KeyError):
        regions.give(PAGE)
    regions.give(0)
    with pytest.raises(KeyError):
        regions.give(0)
    assert regions.used == 0


def test_nothing_at_all_still_takes_a_page_of_its_own() -> None:
    regions = Regions(2 * PAGE)
    assert [regions.take(0), regions.take(0), regions.take(0)] == [0, PAGE, None]


@pytest.mark.parametrize(("size", "aligned"), [(0, 0), (1, 64), (64, 64), (65, 128), (6553600, 6553600)])
def test_align(size: int, aligned: int) -> None:
    assert align(size) == aligned
    assert align(size, ALIGNMENT) == aligned
