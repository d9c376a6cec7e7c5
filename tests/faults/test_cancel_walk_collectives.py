"""Every collective, cancelled at one member after each number of turns of the loop; see `test_cancel_walk` for what is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf import CollectiveGroup, init
from aiorlinf.errors import AiorlinfError
from aiorlinf.testing.cluster import LocalCluster, local_cluster
from tests.faults.walking import cancelled_after, points

__all__: list[str] = []

pytestmark = pytest.mark.asyncio

NAMES = ["w:0", "w:1", "w:2"]
SIZE = 30_000
"""float32: more than a frame takes; torch uses one thread for so few."""
Calls = Callable[[int, CollectiveGroup, int], Any]


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster(NAMES) as cluster:
        yield cluster


def groups_of(cluster: LocalCluster) -> list[CollectiveGroup]:
    return [cluster[name].collective.create_collective_group(NAMES) for name in NAMES]


def value(count: int, rank: int) -> torch.Tensor:
    return torch.full((SIZE,), float(count * 10 + rank))


def broadcast(rank: int, group: CollectiveGroup, count: int) -> Any:
    return group.broadcast(value(count, 0) if rank == 0 else None, root=0)


def gather(rank: int, group: CollectiveGroup, count: int) -> Any:
    return group.gather(value(count, rank), root=0)


def all_to_all(rank: int, group: CollectiveGroup, count: int) -> Any:
    return group.all_to_all([value(count, 3 * rank + other) for other in range(3)])


def right(call: Calls, rank: int, count: int, got: Any) -> bool:
    if call is broadcast:
        return torch.equal(got, value(count, 0))
    if call is gather:
        return got is None or all(torch.equal(each, value(count, other)) for other, each in enumerate(got))
    return all(torch.equal(each, value(count, 3 * other + rank)) for other, each in enumerate(got))


async def outcome(work: Any) -> Any:
    """Its value, or its error."""
    try:
        return await asyncio.wait_for(work, 20)
    except AiorlinfError as error:
        return error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", [broadcast, gather, all_to_all])
async def test_all_end_and_the_next_one_works(cluster: LocalCluster, call: Calls, rank: int) -> None:
    groups = groups_of(cluster)
    count = 0
    for turns in points(60)[1:]:  # before the first turn it is not called, and the others would wait for that
        count += 1
        others = [asyncio.ensure_future(outcome(call(other, groups[other], count))) for other in range(3) if other != rank]
        cancelled, got = await cancelled_after(turns, lambda: call(rank, groups[rank], count))  # noqa: B023  # run at once
        if not cancelled:
            assert right(call, rank, count, got)
        for other, result in zip([other for other in range(3) if other != rank], await asyncio.gather(*others), strict=True):
            if isinstance(result, BaseException):
                assert cancelled, f"{other} failed, and nobody was cancelled: {result}"
            else:
                assert right(call, other, count, result)
        count += 1
        results = await asyncio.gather(*(outcome(call(each, group, count)) for each, group in enumerate(groups)))
        assert all(right(call, each, count, result) for each, result in enumerate(results)), f"after {turns} turns: {results}"
    for worker in cluster:
        assert worker.pending() == []
        assert all(link.unread_messages == 0 for link in worker.stats().links)


@pytest.mark.parametrize("call", [broadcast, gather, all_to_all])
async def test_the_first_one_of_a_group_before_there_are_links(call: Calls) -> None:
    for turns in points(60)[1::6]:
        async with local_cluster(NAMES) as cluster:
            groups = groups_of(cluster)
            others = [asyncio.ensure_future(outcome(call(other, groups[other], 1))) for other in (1, 2)]
            await cancelled_after(turns, lambda: call(0, groups[0], 1))  # noqa: B023  # run at once
            await asyncio.gather(*others)
            results = await asyncio.gather(*(outcome(call(each, group, 2)) for each, group in enumerate(groups)))
            assert all(right(call, each, 2, result) for each, result in enumerate(results)), f"after {turns} turns: {results}"


# ---- who is there


async def test_waiting_for_a_worker(cluster: LocalCluster) -> None:
    for count, turns in enumerate(points(60)[::3]):
        address = f"x:{count}"
        await cancelled_after(turns, lambda: cluster["w:0"].wait_for(address))  # noqa: B023  # run at once
        await cancelled_after(turns, cluster["w:0"].peers)
        waiting = cluster["w:0"].wait_for(address)
        if count % 4 == 0:
            await cluster.join(address)
            assert str(await waiting) == f"{address}#1"
            await cluster.leave(address)
        else:
            assert waiting.cancel()
    assert cluster["w:0"].pending() == []
    assert [str(peer.address) for peer in await cluster["w:0"].peers()] == ["w:1", "w:2"]


async def test_no_news_are_lost(cluster: LocalCluster) -> None:
    stream = cluster["w:0"].membership()
    assert {(await anext(stream)).address for _ in range(2)} == {"w:1", "w:2"}
    expected: list[tuple[str, str, int]] = []
    seen: list[tuple[str, str, int]] = []

    async def take(turns: int) -> None:
        cancelled, event = await cancelled_after(turns, lambda: anext(stream))
        if not cancelled:
            seen.append((event.kind, str(event.address), int(event.incarnation)))

    for count, turns in enumerate(points(60)[::3]):
        await take(turns)
        await cluster.join("x:0")
        await take(turns)
        await cluster.leave("x:0")
        await take(turns)
        expected += [("joined" if count == 0 else "restarted", "x:0", count + 1), ("left", "x:0", count + 1)]
    while len(seen) < len(expected):
        event = await asyncio.wait_for(anext(stream), 20)
        seen.append((event.kind, str(event.address), int(event.incarnation)))
    assert seen == expected


# ---- the beginning and the end of a worker


async def test_a_start_that_was_given_up_leaves_the_address_free(cluster: LocalCluster) -> None:
    env = cluster.env("x:0")
    for turns in points(100)[::4]:

        async def start() -> Any:
            return await init("x:0", manager=env["AIORLINF_MANAGER"], token=env["AIORLINF_TOKEN"])  # it is always this

        cancelled, worker = await cancelled_after(turns, start)
        if not cancelled:
            await worker.close()
        async with await cluster.join("x:0") as again:
            await again.send(turns, "w:0")
            assert await cluster["w:0"].recv("x:0", timeout=20) == turns


async def test_a_close_that_nobody_waits_for_flushes_and_ends(cluster: LocalCluster) -> None:
    for turns in points(60)[::3]:
        worker = await cluster.join("x:0")
        sent = worker.send(value(turns, 1), "w:0")
        await cancelled_after(turns, worker.close)
        assert torch.equal(await cluster["w:0"].recv("x:0", timeout=20), value(turns, 1))
        await worker.close()
        assert sent.done()
        assert worker.closed
