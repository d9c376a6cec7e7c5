"""Where leaves lie in shared memory: what one side says, the other side understands; what nobody says is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.backends.shm.arena import Region
from aiorlinf.backends.shm.regions import ALIGNMENT
from aiorlinf.backends.shm.segment import Segment
from aiorlinf.errors import WireError
from aiorlinf.link.placement import Placement, decode_places, offsets, packed_size
from tests.hypothesis_profiles import examples


class Numbered(Segment):
    """A segment of which only the number matters."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fd = -1


def region(number: int, offset: int, size: int) -> Region:
    arena: Any = None
    return Region(arena, Numbered(number), offset, size)


def encoded(packed: Region | None, owned: dict[int, Region]) -> memoryview:
    placement = Placement(packed, owned)
    placement.names = {region.segment.number: region.segment.number for region in placement.regions()}
    return memoryview(placement.encode())


sizes_lists = st.lists(st.sampled_from([0, 1, 63, 64, 65, 4096, 1 << 33]), max_size=8)


@given(sizes_lists)
def test_leaves_follow_each_other_aligned(sizes: list[int]) -> None:
    *starts, end = offsets(sizes)
    assert packed_size(sizes) == end
    before = 0
    for start, size in zip(starts, sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert before <= start < before + ALIGNMENT
        before = start + size
    assert before <= end < before + ALIGNMENT


@settings(max_examples=examples(200))
@given(sizes=sizes_lists, number=st.integers(1, 2**32 - 1), data=st.data())
def test_what_is_said_is_understood(sizes: list[int], number: int, data: st.DataObject) -> None:
    places = st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 2**40).map(lambda page: page * 4096))
    owned_by = {index: data.draw(places) for index, size in enumerate(sizes) if size and data.draw(st.booleans())}
    owned = {index: region(*place, sizes[index]) for index, place in owned_by.items()}
    packed = any(size for index, size in enumerate(sizes) if index not in owned)
    offset = data.draw(places)[1]
    body = encoded(region(number, offset, 1) if packed else None, owned)
    assert decode_places(body, sizes) == ((number, offset) if packed else None, owned_by)


@settings(max_examples=examples(300))
@given(body=st.binary(max_size=80), sizes=sizes_lists)
def test_anything_else_is_refused_or_makes_sense(body: bytes, sizes: list[int]) -> None:
    try:
        packed, owned = decode_places(memoryview(body), sizes)
    except WireError:
        return
    assert set(owned) <= set(range(len(sizes)))
    assert (packed is not None) == any(size for index, size in enumerate(sizes) if index not in owned)
    for number, offset in [*owned.values(), *([packed] if packed else [])]:
        assert number > 0
        assert offset % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("packed", "owned", "sizes"),
    [
        ((0, 0), {}, [100]),  # no place for the leaf
        ((1, 0), {}, []),  # a place for nothing
        ((1, 0), {}, [0, 0]),
        ((1, 0), {0: (2, 0)}, [100]),
        ((1, 32), {}, [100]),  # not aligned
        ((0, 0), {0: (2, 8)}, [100]),
        ((0, 0), {1: (2, 0)}, [100]),  # no such leaf
        ((0, 0), {0: (0, 0)}, [100]),  # no such segment
        ((0, 0), {0: (2, 0)}, [0]),  # a place for an empty leaf
    ],
)
def test_what_contradicts_itself_is_refused(packed: tuple[int, int], owned: dict[int, tuple[int, int]], sizes: list[int]) -> None:
    body = encoded(region(*packed, 1), {index: region(*place, 1) for index, place in owned.items()})
    with pytest.raises(WireError):
        decode_places(body, sizes)


def test_a_leaf_has_one_place() -> None:
    body = bytes(encoded(None, {0: region(2, 0, 1)}))
    with pytest.raises(WireError):
        decode_places(memoryview(body + body[12:]), [100])
