"""Channels of several replicas, one on each node. The nodes are labels; all workers are on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import aiorlinf
from aiorlinf import Channel, Worker, init
from aiorlinf.channel.affinity import Affinity, replica_name
from aiorlinf.channel.records import Key
from aiorlinf.errors import ChannelClosed, ChannelEmpty, DeadlineExceeded, PeerError, ProducerLost

__all__: list[str] = []

pytestmark = pytest.mark.asyncio

LARGE = 1 << 16


class Nodes:
    """Workers on nodes, and the workers that hold the replicas."""

    def __init__(self, stack: contextlib.AsyncExitStack, holders: dict[str, Worker]) -> None:
        self.holders = holders
        self.workers: list[Worker] = []
        self._stack = stack

    async def handle(self, node: str, **role: Any) -> Channel:
        worker = await self._stack.enter_async_context(init(f"w:{len(self.workers)}", labels={"host": node}))
        self.workers.append(worker)
        if len(self.workers) == 1:
            return await worker.create_channel("c", distributed=True, **role)
        return await worker.connect_channel("c", **role)

    def length(self, node: str) -> int:
        """Items that are held there."""
        host = self.holders[node]._host
        assert host is not None
        return host.length


@contextlib.asynccontextmanager
async def nodes(*names: str) -> AsyncIterator[Nodes]:
    async with contextlib.AsyncExitStack() as stack:
        holders = {}
        for index, name in enumerate(names):
            address = "channel.c:0" if not index else f"channel.c/{name}:0"
            holders[name] = await stack.enter_async_context(init(address, labels={"host": name}))
            holders[name].hold_channels()
        yield Nodes(stack, holders)


async def test_names_of_replicas() -> None:
    assert replica_name("c", "node-1.example") == "c/node-1.example"
    odd = replica_name("c", "no de")
    assert odd != replica_name("c", "no_de")
    long = [replica_name("x" * 50, f"node{number}") for number in range(3)]
    assert len(set(long)) == 3
    assert all(len(name) <= 55 for name in [odd, *long])


async def test_a_key_stays_where_it_was_used_first() -> None:
    affinity = Affinity()
    assert affinity.place("k", "a") == ""
    affinity.join("a", "c")
    affinity.join("b", "c/b")
    affinity.join("b", "other")
    assert affinity.nodes == {"a": "c", "b": "c/b"}
    keys: list[Key] = ["x", 1, b"x"]
    assert [affinity.place(key, "b") for key in keys] == ["b"] * 3
    assert [affinity.place(key, "a") for key in keys] == ["b"] * 3
    assert affinity.place(None, "elsewhere") == "a"


async def test_keys_have_homes() -> None:
    async with nodes("a", "b", "d") as job:
        one, two, three = await job.handle("a"), await job.handle("b"), await job.handle("d")
        waiting = three.get(key="wanted")
        with pytest.raises(DeadlineExceeded):
            await three.get(key="wanted", timeout=0.01)
        for number in range(6):
            await one.put(("one", number), key=f"one{number % 2}")
            await two.put(("two", number, torch.full((LARGE,), 1.0)), key="two")
        await one.put("here", key="wanted")
        assert await waiting == "here"
        assert (job.length("a"), job.length("b"), job.length("d")) == (6, 6, 0)
        assert [number for _, number, _ in [await three.get(key="two") for _ in range(6)]] == list(range(6))
        assert [await two.get(key="one1") for _ in range(3)] == [("one", 1), ("one", 3), ("one", 5)]
        assert await three.qsize() == await three.qsize(key="one0") == 3
        assert await two.peek_all(key="one0") == [("one", 0), ("one", 2), ("one", 4)]
        stats = await two.stats()
        assert (stats.name, stats.length, stats.puts, stats.gets) == ("c", 3, 13, 10)
        assert {each.key: each.length for each in stats.keys} == {"one0": 3}
        assert {each.name: each.puts for each in stats.producers} == {"w:0": 7, "w:1": 6}
        assert "channel.c/b:0" in stats.worker
        async with three.lease(key="one0") as item:
            assert item == ("one", 0)
        assert "replicas" in repr(one)


async def test_without_a_key_the_own_node_comes_first() -> None:
    async with nodes("a", "b") as job:
        one, two = await job.handle("a"), await job.handle("b")
        for number in range(4):
            await one.put(number)
            await two.put(10 + number)
        assert await one.qsize() == await two.qsize() == 8
        assert (job.length("a"), job.length("b")) == (4, 4)
        assert [await two.get() for _ in range(4)] == [10, 11, 12, 13]
        assert [await two.get() for _ in range(2)] == [0, 1]
        assert await two.get_nowait() == 2
        assert await two.get_batch(1) == [3]
        with pytest.raises(ChannelEmpty):
            await two.get_nowait()
        waiting = [two.get() for _ in range(3)]
        await asyncio.sleep(0.01)
        for number in range(3):
            await one.put(number)
        assert sorted([await work for work in waiting]) == [0, 1, 2]
        assert await one.empty()


async def test_the_stream_ends_when_all_producers_have_closed() -> None:
    async with nodes("a", "b") as job:
        one, two = await job.handle("a", producer=True), await job.handle("b", producer=True)
        near, far = await job.handle("a"), await job.handle("b")
        for number in range(5):
            await one.put(number)
            await two.put(number, key="k")
        await two.close()
        got: list[int] = []

        async def read(channel: Channel) -> None:
            got.extend([item async for item in channel])

        async def read_key(channel: Channel) -> None:
            with pytest.raises(ChannelClosed):
                while True:
                    got.append(await channel.get(key="k"))

        reading = asyncio.gather(read(near), read(far), read_key(near), read_key(far))
        await asyncio.sleep(0.01)
        assert not reading.done()
        await one.close()
        await reading
        assert sorted(got) == sorted([*range(5), *range(5)])
        for channel in (near, far):
            with pytest.raises(ChannelClosed):
                await channel.get_nowait()
            with pytest.raises(ChannelClosed):
                await channel.put(1)


async def test_what_was_put_before_the_close_comes_from_every_replica() -> None:
    """Also what had not found its replica yet, and what waits for room there."""
    async with nodes("a", "b", "c") as here:
        one, two, get = await here.handle("a", maxsize=2), await here.handle("b"), await here.handle("c")
        keys: list[Key] = [None, 0, 1, 2]
        puts = [one.put(torch.full((LARGE if number % 3 else 3,), float(number)), key=keys[number % 4]) for number in range(24)]
        puts += [two.put(torch.full((3,), float(number)), key=keys[number % 4]) for number in range(24, 48)]
        await asyncio.gather(one.close(), two.close())
        with pytest.raises(ChannelClosed):
            await one.put(48)

        async def drain(key: Key) -> list[float]:
            found = []
            while True:
                try:
                    found.append(float((await get.get(key=key))[0]))
                except ChannelClosed:
                    return found

        found = await asyncio.gather(*map(drain, keys))
        assert sorted(number for own in found for number in own) == [float(number) for number in range(48)]
        for own in found[1:]:
            for half in ([number for number in own if number < 24], [number for number in own if number >= 24]):
                assert half == sorted(half)
        for put in puts:
            await put


async def test_a_lease_elsewhere_may_come_back_after_the_end() -> None:
    async with nodes("a", "b") as job:
        put, one, two = await job.handle("b"), await job.handle("a"), await job.handle("b")
        await put.put("x")
        lease = two.lease()
        assert await lease.__aenter__() == "x"
        await put.close()
        waiting = one.get()
        await asyncio.sleep(0.02)
        assert not waiting.done()
        lease.give_back()
        assert await waiting == "x"


async def test_the_last_producer_is_lost() -> None:
    async with nodes("a", "b") as job:
        put, get = await job.handle("a"), await job.handle("b")
        other = await job.handle("b")
        await put.put(1)
        await put.put(2, key="k")
        with pytest.raises(RuntimeError):
            async with job.workers[0]:
                raise RuntimeError("it has failed")
        assert await get.get() == 1
        assert await other.get(key="k") == 2
        for work in (get.get(), other.get(key="k")):
            with pytest.raises(ProducerLost, match="w:0"):
                await work


async def test_a_replica_is_lost() -> None:
    async with nodes("a", "b") as job:
        one, two = await job.handle("a"), await job.handle("b")
        await two.put(1, key="b's")
        await two.get(key="b's")
        await one.put(1, key="a's")
        assert await one.qsize(key="b's") == 0
        waiting = [one.get(key="b's"), two.get(key="b's")]
        for channel in (one, two):
            assert await channel.qsize(key="b's") == 0  # they are there
        await job.holders["b"].close()
        for work in waiting:
            with pytest.raises(PeerError, match=r"channel\.c/b:0"):
                await work
        assert await two.get(key="a's") == 1  # the others go on
        await one.put("still")
        assert await two.get() == "still"
        with pytest.raises(PeerError, match=r"channel\.c/b:0"):
            await one.put(1, key="b's")


async def test_each_item_comes_once_whatever_is_cancelled() -> None:
    dice = random.Random(4)
    async with nodes("a", "b", "d") as job:
        producers = [await job.handle(node) for node in ("a", "b")]
        consumers = [await job.handle(node) for node in ("a", "b", "d")]
        count = 50
        got: list[Any] = []
        left = len(producers)

        async def produce(channel: Channel, who: int) -> None:
            for number in range(count):
                while True:
                    try:
                        async with asyncio.timeout(0.002 if dice.random() < 0.2 else None):
                            key = "k" if dice.random() < 0.3 else None
                            await channel.put((who, number, torch.zeros(LARGE) if dice.random() < 0.1 else None), key=key)
                        break
                    except TimeoutError:
                        pass
            await channel.close()

        async def consume(channel: Channel, key: Key) -> None:
            while True:
                try:
                    async with asyncio.timeout(0.1 * dice.random()):
                        item = await channel.get(key=key)
                except TimeoutError:
                    continue
                except ChannelClosed:
                    return
                got.append(item[:2])

        await asyncio.gather(
            *(produce(channel, who) for who, channel in enumerate(producers)),
            *(consume(channel, key) for channel in consumers for key in (None, "k")),
        )
        assert sorted(got) == [(who, number) for who in range(left) for number in range(count)]


async def test_a_node_that_comes_later() -> None:
    async with nodes("a", "b") as job:
        one = await job.handle("a")
        waiting = one.get()
        await asyncio.sleep(0.02)
        two = await job.handle("b")
        await two.put("from the new node")
        assert await asyncio.wait_for(_done(waiting), 20) == "from the new node"
        assert job.length("b") == 0


async def _done(work: aiorlinf.AsyncWork[Any]) -> Any:
    return await work
