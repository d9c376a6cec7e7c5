"""The sender's memory: bounded, used again, never written to while somebody may look at it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.backends.shm.arena import Arena, Region
from aiorlinf.backends.shm.regions import PAGE
from aiorlinf.work.home import LoopHome
from tests.hypothesis_profiles import examples
from tests.system import memory_file_mappings, no_more_descriptors, soon

SEGMENT = 16 * PAGE


async def grown(arena: Arena, size: int) -> Region | None:
    """A region from a segment that is made for it; the arena must not be at its bound."""
    future: asyncio.Future[Region | None] = arena.home.loop.create_future()
    assert arena.grow(size, future.set_result)
    return await future


def write(region: Region, value: int) -> None:
    ctypes.memset(region.segment.address + region.offset, value, region.size)


def view(region: Region) -> Any:
    return region.segment.view(region.offset, region.size)


@pytest.mark.asyncio
async def test_memory_that_comes_back_is_used_again(home: LoopHome) -> None:
    arena = Arena(home, 4 * SEGMENT, SEGMENT)
    assert arena.take(100) is None
    first = await grown(arena, 100)
    assert first is not None
    where = (first.segment, first.offset)
    other = arena.take(5000)
    assert other is not None
    assert (other.segment, other.offset) == (first.segment, PAGE)
    arena.release(first)
    again = arena.take(PAGE)
    assert again is not None
    assert (again.segment, again.offset) == where
    assert arena.stats().used_bytes == 3 * PAGE
    arena.release(again)
    arena.release(other)
    stats = arena.stats()
    assert (stats.segments, stats.bytes, stats.used_bytes) == (1, SEGMENT, 0)
    assert (stats.hits, stats.misses, stats.refused, stats.evictions) == (2, 1, 0, 0)
    arena.close()


@pytest.mark.asyncio
async def test_a_region_is_free_when_its_last_holder_lets_go(home: LoopHome) -> None:
    arena = Arena(home, SEGMENT, SEGMENT)
    region = await grown(arena, SEGMENT)
    assert region is not None
    arena.hold(region)
    arena.hold(region)
    for _ in range(2):
        arena.release(region)
        assert arena.take(1) is None
    arena.release(region)
    assert arena.take(SEGMENT) is not None
    arena.close()


@pytest.mark.asyncio
async def test_requests_of_one_moment_share_a_new_segment(home: LoopHome) -> None:
    arena = Arena(home, 100 * SEGMENT, SEGMENT)
    regions = await asyncio.gather(*(grown(arena, 2 * PAGE) for _ in range(20)))
    assert all(region is not None for region in regions)
    places = {(region.segment.number, region.offset) for region in regions if region is not None}
    assert len(places) == 20
    assert arena.stats().segments == 3  # eight fit into one
    assert arena.stats().misses == 20
    arena.close()


@pytest.mark.asyncio
async def test_segments_begin_small_and_grow(home: LoopHome) -> None:
    mib = 1 << 20
    arena = Arena(home, 1 << 30, 32 * mib)
    sizes: list[tuple[int, int]] = []
    for _ in range(2):
        held = []
        while arena.bytes < 124 * mib:
            region = arena.take(mib) or await grown(arena, mib)
            assert region is not None
            held.append(region)
            if not sizes or sizes[-1][0] != region.segment.number:
                sizes.append((region.segment.number, region.segment.size // mib))
        large = await grown(arena, 20 * mib)
        assert large is not None
        assert large.segment.size == 32 * mib
        for region in (*held, large):
            arena.release(region)
        arena.trim()
    assert [size for _, size in sizes] == [4, 8, 16, 32, 32, 32] * 2
    arena.close()


@pytest.mark.asyncio
async def test_after_a_large_request_the_next_segment_is_larger(home: LoopHome) -> None:
    mib = 1 << 20
    arena = Arena(home, 1 << 30, 32 * mib)
    for size, expected in ((10, 10), (9, 20), (12, 32), (40, 40), (1, 32)):
        region = await grown(arena, size * mib)
        assert region is not None
        assert region.segment.size == expected * mib
    arena.close()


@pytest.mark.asyncio
async def test_what_is_larger_than_a_segment_gets_one_of_its_own_size(home: LoopHome) -> None:
    arena = Arena(home, 100 * SEGMENT, SEGMENT)
    region = await grown(arena, 3 * SEGMENT + 1)
    assert region is not None
    assert region.segment.size == 3 * SEGMENT + PAGE
    assert arena.bytes == 3 * SEGMENT + PAGE
    arena.close()
    assert arena.bytes == 0


@pytest.mark.asyncio
async def test_small_regions_leave_large_segments_alone_while_there_is_room_elsewhere(home: LoopHome) -> None:
    arena = Arena(home, 5 * SEGMENT, SEGMENT)
    large = await grown(arena, 3 * SEGMENT)
    assert large is not None
    number = large.segment.number
    arena.release(large)
    small = [arena.take(SEGMENT) or await grown(arena, SEGMENT) for _ in range(2)]
    assert all(region is not None and region.segment.number != number for region in small)
    large = arena.take(3 * SEGMENT)
    assert large is not None
    assert large.segment.number == number
    arena.release(large)

    held = arena.take(2 * SEGMENT)
    assert held is not None
    assert held.segment.number == number
    last = await grown(arena, PAGE)  # at the bound, and that segment cannot be dropped: better there than nowhere
    assert last is not None
    assert last.segment.number == number
    also = arena.make_now(PAGE)
    assert also is not None
    assert also.segment.number == number
    assert arena.stats().refused == 0
    arena.close()


@pytest.mark.asyncio
async def test_over_the_bound_it_refuses_and_drops_nothing_in_vain(home: LoopHome) -> None:
    dropped: list[int] = []
    arena = Arena(home, 4 * SEGMENT, SEGMENT)
    arena.on_drop = dropped.append
    held = [await grown(arena, SEGMENT) for _ in range(2)]
    idle = await grown(arena, SEGMENT)
    assert idle is not None
    arena.release(idle)

    def never(_region: Region | None) -> None:
        raise AssertionError("it was refused")

    assert not arena.grow(3 * SEGMENT, never)
    assert arena.make_now(5 * SEGMENT) is None
    assert dropped == [], "dropping the idle one would not have made enough room"
    assert (arena.stats().refused, arena.bytes) == (2, 3 * SEGMENT)

    large = await grown(arena, 2 * SEGMENT)
    assert large is not None
    assert len(dropped) == 1
    assert (arena.bytes, arena.stats().evictions) == (4 * SEGMENT, 1)
    for region in [*held, large]:
        assert region is not None
        arena.release(region)
    assert arena.trim() == 4 * SEGMENT
    assert (arena.bytes, arena.stats().segments, len(dropped)) == (0, 0, 4)
    await soon(lambda: memory_file_mappings() == [])
    arena.close()


@pytest.mark.asyncio
async def test_segments_that_nobody_has_used_for_a_while_are_given_back(home: LoopHome) -> None:
    idle: list[int] = []
    dropped: list[int] = []
    arena = Arena(home, 4 * SEGMENT, SEGMENT)
    arena.on_idle = lambda: idle.append(1)
    arena.on_drop = dropped.append
    regions = [await grown(arena, SEGMENT) for _ in range(3)]
    numbers = [region.segment.number for region in regions if region is not None]
    for region in regions[1:]:
        assert region is not None
        arena.release(region)
    assert len(idle) == 2
    assert arena.age()
    used = arena.take(SEGMENT)
    assert used is not None
    arena.release(used)
    assert arena.age()
    assert dropped == [numbers[2]]
    assert not arena.age()
    assert dropped == [numbers[2], numbers[1]]
    assert arena.stats().segments == 1
    arena.close()


@pytest.mark.asyncio
async def test_segments_that_are_being_made_count(home: LoopHome) -> None:
    arena = Arena(home, 2 * SEGMENT, SEGMENT)
    waiting = [asyncio.ensure_future(grown(arena, SEGMENT)) for _ in range(2)]
    await asyncio.sleep(0)
    assert arena.bytes == 2 * SEGMENT
    assert not arena.grow(SEGMENT, lambda region: None)
    assert None not in await asyncio.gather(*waiting)
    arena.close()


@pytest.mark.asyncio
async def test_large_idle_segments_go_first(home: LoopHome) -> None:
    dropped: list[int] = []
    arena = Arena(home, 6 * SEGMENT, SEGMENT)
    arena.on_drop = dropped.append
    regions = [await grown(arena, size) for size in (SEGMENT, 3 * SEGMENT, 2 * SEGMENT)]
    numbers = [region.segment.number for region in regions if region is not None]
    for region in regions:
        assert region is not None
        arena.release(region)
    assert await grown(arena, 4 * SEGMENT) is not None
    assert dropped == [numbers[1], numbers[2]]
    arena.close()


@pytest.mark.asyncio
async def test_an_abandoned_region_is_never_written_to_again(home: LoopHome) -> None:
    dropped: list[int] = []
    arena = Arena(home, 3 * SEGMENT, SEGMENT)
    arena.on_drop = dropped.append
    theirs = await grown(arena, 4 * PAGE)
    mine, lent = arena.take(4 * PAGE), arena.take(4 * PAGE)
    assert theirs is not None
    assert mine is not None
    assert lent is not None
    number = theirs.segment.number
    write(theirs, 11)
    write(lent, 22)
    kept = view(theirs)
    arena.hold(theirs)  # lent to one who ends without a word
    arena.release(theirs)
    arena.abandon(theirs)
    assert arena.stats().retired_segments == 1

    # Nothing new goes there, what was there goes on.
    for _ in range(4):
        region = arena.take(PAGE) or await grown(arena, PAGE)
        assert region is not None
        assert region.segment.number != number
        write(region, 99)
    write(mine, 33)
    assert view(lent)[0] == 22
    assert (kept == 11).all()

    assert dropped == []
    arena.release(mine)
    arena.release(lent)
    assert dropped == [number]
    assert arena.stats().retired_segments == 0
    assert (kept == 11).all()
    arena.close()


@pytest.mark.asyncio
async def test_the_memory_of_an_abandoned_region_goes_with_its_last_view(home: LoopHome) -> None:
    arena = Arena(home, SEGMENT, SEGMENT)
    region = await grown(arena, PAGE)
    assert region is not None
    write(region, 5)
    kept = view(region)
    arena.abandon(region)
    del region
    assert arena.bytes == 0
    assert await grown(arena, SEGMENT) is not None, "it does not count any more"
    assert (kept == 5).all()
    arena.close()
    del kept
    await soon(lambda: memory_file_mappings() == [])


@pytest.mark.asyncio
async def test_no_memory_to_be_had_is_told_and_forgotten(home: LoopHome, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(home, 8 * SEGMENT, SEGMENT)
    with no_more_descriptors(), caplog.at_level(logging.WARNING, "aiorlinf"):
        assert await asyncio.gather(*[grown(arena, PAGE) for _ in range(2)]) == [None, None]
        assert arena.make_now(PAGE) is None
    assert [record.getMessage() for record in caplog.records] == [
        "no shared memory of 65536 bytes can be had, other backends are used: [Errno 24] Too many open files"
    ], "it is said once"
    assert arena.stats().segments == arena.bytes == 0
    assert await grown(arena, PAGE) is not None
    with no_more_descriptors(), caplog.at_level(logging.WARNING, "aiorlinf"):
        assert arena.make_now(SEGMENT) is None
    assert len(caplog.records) == 2, "and again after it had worked"
    arena.close()


@pytest.mark.asyncio
async def test_closing_while_a_segment_is_made(home: LoopHome) -> None:
    arena = Arena(home, 8 * SEGMENT, SEGMENT)
    waiting = asyncio.ensure_future(grown(arena, PAGE))
    await asyncio.sleep(0)
    arena.close()
    assert await waiting is None
    assert arena.stats().segments == arena.bytes == 0
    assert arena.take(1) is None
    assert arena.make_now(1) is None
    assert not arena.grow(1, lambda region: None)
    await soon(lambda: memory_file_mappings() == [])


@pytest.mark.asyncio
async def test_a_loop_that_ends_while_a_segment_is_made_leaves_nothing(home: LoopHome) -> None:
    arena = Arena(home, 8 * SEGMENT, SEGMENT)
    arena.grow(PAGE, lambda region: None)
    await home.close()  # the leak check looks for its descriptor
    arena.close()


@pytest.mark.asyncio
async def test_holders_may_let_go_after_the_end(home: LoopHome) -> None:
    arena = Arena(home, 8 * SEGMENT, SEGMENT)
    region, other = await grown(arena, PAGE), await grown(arena, PAGE)
    assert region is not None
    assert other is not None
    write(region, 3)
    kept = view(region)
    arena.close()
    arena.release(region)
    arena.abandon(other)
    assert (kept == 3).all()


@pytest.mark.asyncio
async def test_memory_for_those_who_cannot_wait_has_no_pages_yet(home: LoopHome) -> None:
    arena = Arena(home, 1 << 30, SEGMENT)
    region = arena.make_now(1 << 24)
    assert region is not None
    assert region.segment.size == 1 << 24
    assert os.fstat(region.segment.fd).st_blocks == 0
    arena.close()


Step = tuple[str, int]


@settings(max_examples=examples(60))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "take", "hold", "release", "release", "abandon", "drop view", "trim", "age"]),
            st.integers(0, 255),
        ),
        max_size=60,
    )
)
def test_nobody_sees_the_bytes_of_another(steps: list[Step]) -> None:
    async def run() -> None:
        home = LoopHome(asyncio.get_running_loop())
        arena = Arena(home, 6 * SEGMENT, SEGMENT)
        held: list[tuple[Region, int]] = []  # each entry is one hold
        seen: list[tuple[Any, int]] = []  # views of memory that was abandoned
        for number, (what, choice) in enumerate(steps):
            value = number % 255 + 1
            if what == "take":
                size = 1 + choice * PAGE // 10
                region = arena.take(size) or arena.make_now(size)
                if region is not None:
                    write(region, value)
                    held.append((region, value))
            elif what == "trim":
                arena.trim()
            elif what == "age":
                arena.age()
            elif what == "drop view":
                if seen:
                    seen.pop(choice % len(seen))
            elif held:
                region, value = held[choice % len(held)]
                if what == "hold":
                    arena.hold(region)
                    held.append((region, value))
                    continue
                del held[choice % len(held)]
                if what == "abandon":
                    seen.append((view(region), value))
                    arena.abandon(region)
                else:
                    arena.release(region)
            assert arena.bytes <= arena.max_bytes
            for region, value in held:
                assert (view(region) == value).all()
            for array, value in seen:
                assert (array == value).all()
        distinct = {id(region): region for region, _ in held}.values()
        assert arena.stats().used_bytes == sum(-(-region.size // PAGE) * PAGE for region in distinct)
        for region, _ in held:
            arena.release(region)
        assert arena.stats().used_bytes == arena.stats().retired_segments == 0
        arena.close()
        await home.close()

    asyncio.run(run())
