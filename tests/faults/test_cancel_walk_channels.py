"""Every call of a channel, cancelled after each number of turns of the loop; see `test_cancel_walk` for what is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf import Channel
from aiorlinf.errors import ChannelClosed, ChannelEmpty
from aiorlinf.testing.cluster import LocalCluster, local_cluster
from tests.faults.walking import cancelled_after, points

__all__: list[str] = []

pytestmark = pytest.mark.asyncio

LARGE = 20_000
"""float32: more than rides with an entry."""


@dataclass
class Ends:
    """A channel, from both sides."""

    put: Channel[Any]
    get: Channel[Any]

    async def rest(self) -> list[Any]:
        """All that is there, taken."""
        found = []
        await settle(self.put)
        await settle(self.get)
        while True:
            try:
                found.append(number(await self.get.get_nowait()))
            except ChannelEmpty:
                return found

    async def ends_well(self) -> None:
        """Nobody is left over that could put, get or hold anything."""
        assert await self.rest() == []
        stats = await self.put.stats()
        assert stats.length == 0
        assert stats.held_bytes == 0
        await self.put.close()
        with pytest.raises(ChannelClosed):
            await self.get.get(timeout=20)


async def settle(channel: Channel[Any]) -> None:
    """What was said before has arrived."""
    for _ in range(2):
        await channel.stats()


def item(count: int) -> Any:
    """Small and large ones in turn."""
    return (count, torch.full((LARGE,), float(count))) if count % 2 else (count, None)


def number(content: Any) -> int:
    count, tensor = content
    assert tensor is None or bool((tensor == float(count)).all())
    return int(count)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster("w=3") as cluster:
        await cluster.hold_channels("c")
        yield cluster


@pytest_asyncio.fixture(params=["local", "hosted"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        if request.param == "local":
            put: Channel[Any] = Channel.local("c", maxsize=4)
            yield Ends(put, put.handle())
            return
        cluster = await stack.enter_async_context(local_cluster("w=2"))
        await cluster.hold_channels("c")
        put = await cluster["w:0"].create_channel("c", maxsize=4)
        yield Ends(put, await cluster["w:1"].connect_channel("c"))


async def test_a_put_has_happened_or_not(ends: Ends) -> None:
    for count, turns in enumerate(points(80)):
        cancelled, _ = await cancelled_after(turns, lambda: ends.put.put(item(count)))  # noqa: B023  # run at once
        assert await ends.rest() == ([] if cancelled else [count])
    await ends.ends_well()


async def test_what_does_not_wait_has_happened_or_not_too(ends: Ends) -> None:
    for count, turns in enumerate(points(60)[::2]):
        cancelled, _ = await cancelled_after(turns, lambda: ends.put.put_nowait(item(count)))  # noqa: B023  # run at once
        gone, got = await cancelled_after(turns, ends.get.get_nowait) if not cancelled else (True, None)
        assert ([] if gone else [number(got)]) + await ends.rest() == ([] if cancelled else [count])
    await ends.ends_well()


async def test_a_put_that_has_to_wait_for_room(ends: Ends) -> None:
    for count, turns in enumerate(points(60)):
        for full in range(4):
            await ends.put.put(item(1000 + full))
        cancelled, _ = await cancelled_after(turns, lambda: ends.put.put(item(count)))  # noqa: B023  # run at once
        assert cancelled
        assert await ends.rest() == [1000, 1001, 1002, 1003]
    await ends.ends_well()


@pytest.mark.parametrize("waits", [False, True], ids=["item-waits", "item-comes"])
async def test_a_get_takes_the_item_or_leaves_it(ends: Ends, waits: bool) -> None:
    for count, turns in enumerate(points(80)):
        if waits:
            await ends.put.put(item(2 * count))
            await ends.put.put(item(2 * count + 1))
            cancelled, got = await cancelled_after(turns, ends.get.get)
        else:
            getting = asyncio.ensure_future(cancelled_after(turns, ends.get.get))
            await asyncio.sleep(0)
            await ends.put.put(item(2 * count))
            await ends.put.put(item(2 * count + 1))
            cancelled, got = await getting
        first = [] if cancelled else [number(got)]
        assert first + await ends.rest() == [2 * count, 2 * count + 1]
    await ends.ends_well()


async def test_a_batch_is_taken_whole_or_not_at_all(ends: Ends) -> None:
    for count, turns in enumerate(points(80)):
        numbers = [3 * count, 3 * count + 1, 3 * count + 2]
        for each in numbers:
            await ends.put.put(item(each))
        cancelled, got = await cancelled_after(turns, lambda: ends.get.get_batch(2))
        first = [] if cancelled else [number(content) for content in got]
        assert cancelled or first == numbers[:2]
        assert first + await ends.rest() == numbers
    await ends.ends_well()


async def test_a_lease_gives_back_unless_the_block_has_ended(ends: Ends) -> None:
    for count, turns in enumerate(points(80)):
        await ends.put.put(item(count))
        done: list[int] = []

        async def use(done: list[int] = done) -> None:
            async with ends.get.lease() as content:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                done.append(number(content))

        cancelled, _ = await cancelled_after(turns, use)
        assert cancelled or done
        assert done + await ends.rest() == [count]
    await ends.ends_well()


async def steps_of(kind: str, channel: Channel[Any]) -> AsyncIterator[Any]:
    """A loop over the channel, whose next value can be asked for and which can be left."""
    if kind == "async for":
        async for content in channel:
            yield content
    else:
        async with channel.prefetch(2) if kind == "prefetch" else channel.batches(2, ahead=2) as stream:
            async for content in stream:
                yield content


@pytest.mark.parametrize("kind", ["async for", "prefetch", "batches"])
async def test_a_loop_takes_what_it_was_given_and_leaves_the_rest(ends: Ends, kind: str) -> None:
    for count, turns in enumerate(points(80)):
        numbers = [4 * count + each for each in range(4)]
        for each in numbers:
            await ends.put.put(item(each))
        steps = steps_of(kind, ends.get)
        cancelled, got = await cancelled_after(turns, steps.__anext__)
        first = [] if cancelled else [number(content) for content in got] if kind == "batches" else [number(got)]
        await steps.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert first + await ends.rest() == numbers
    await ends.ends_well()


@pytest.mark.parametrize("kind", ["prefetch", "batches"])
async def test_a_loop_whose_leaving_is_cancelled_gives_back_all_the_same(ends: Ends, kind: str) -> None:
    for count, turns in enumerate(points(80)[::2]):
        numbers = [4 * count + each for each in range(4)]
        for each in numbers:
            await ends.put.put(item(each))
        stream = ends.get.prefetch(3) if kind == "prefetch" else ends.get.batches(1, ahead=2)
        got = await stream.__anext__()
        first = [number(content) for content in got] if kind == "batches" else [number(got)]
        await cancelled_after(turns, stream.aclose)
        await stream.aclose()
        assert first + await ends.rest() == numbers
    await ends.ends_well()


async def test_peeking_and_counting_change_nothing(ends: Ends) -> None:
    for count in range(3):
        await ends.put.put(item(count))
    for turns in points(80)[::3]:
        for look in (ends.get.peek_all, ends.get.qsize, ends.get.empty, ends.put.full, ends.put.stats):
            await cancelled_after(turns, look)
    assert await ends.rest() == [0, 1, 2]
    await ends.ends_well()


@pytest.mark.parametrize("how", ["close", "shutdown"])
async def test_closing_goes_on_when_nobody_waits_for_it(cluster: LocalCluster, how: str) -> None:
    put, get = cluster["w:0"], cluster["w:1"]
    for count, turns in enumerate(points(60)[::3]):
        channel = await put.create_channel(f"n{count}", worker="c")
        await channel.put(item(count))
        other: Channel[Any] = await get.connect_channel(f"n{count}")
        await cancelled_after(turns, channel.close if how == "close" else channel.shutdown)
        assert number(await other.get(timeout=20)) == count
        if turns:
            with pytest.raises(ChannelClosed):
                await other.get(timeout=20)


@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_a_connection_that_was_given_up_is_none(cluster: LocalCluster, role: str) -> None:
    """One that was made would keep the stream from ending, or be given items by the policy."""
    first = await cluster["w:0"].create_channel("c", policy="shortest_queue" if role == "consumer" else None)
    get: Channel[Any] = await cluster["w:1"].connect_channel("c", consumer="the one that stays")
    for count, turns in enumerate(points(80)[::3]):
        who: dict[str, Any] = {role: f"visitor {count}"}
        cancelled, channel = await cancelled_after(turns, lambda: cluster["w:2"].connect_channel("c", **who))  # noqa: B023  # run at once
        if not cancelled:
            await channel.close()
        await settle(get)
        await first.put(item(count))
        assert number(await get.get(timeout=20)) == count, "it was given to one that has gone"
    await Ends(first, get).ends_well()


async def test_who_gives_up_does_not_count_as_a_producer(cluster: LocalCluster) -> None:
    for count, turns in enumerate(points(60)[::3]):
        first = await cluster["w:0"].create_channel(f"n{count}", producers=2, worker="c")
        get: Channel[Any] = await cluster["w:1"].connect_channel(f"n{count}")
        cancelled, channel = await cancelled_after(
            turns,
            lambda: cluster["w:2"].connect_channel(f"n{count}", producer=True),  # noqa: B023  # run at once
        )
        await first.put(item(count))
        await first.close()
        assert number(await get.get(timeout=20)) == count
        if cancelled:
            waiting = get.get()
            await settle(get)
            assert not waiting.done(), "the second producer has not come yet"
            channel = await cluster["w:2"].connect_channel(f"n{count}")
        else:
            waiting = get.get()
        await channel.close()
        with pytest.raises(ChannelClosed):
            await waiting


async def test_a_channel_whose_making_was_given_up_can_be_made(cluster: LocalCluster) -> None:
    for count, turns in enumerate(points(80)[::3]):
        name = f"n{count}"
        await cancelled_after(turns, lambda: cluster["w:0"].create_channel(name, maxsize=3, worker="c"))  # noqa: B023  # run at once
        channel = await cluster["w:0"].create_channel(name, maxsize=3, worker="c")
        other: Channel[Any] = await cluster["w:1"].connect_channel(name)
        await channel.put(item(count))
        assert number(await other.get(timeout=20)) == count
        await Ends(channel, other).ends_well()
