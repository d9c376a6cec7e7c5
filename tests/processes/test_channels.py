"""Channels between processes: the channel worker in its own, and what is left when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.channel import spawn
from aiorlinf.errors import ChannelClosed, PeerLost, ProducerLost, RendezvousError, UsageError
from tests.peers import worker

__all__ = ["Unpicklable"]

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]

LARGE = 1 << 18  # float32: 1 MiB


class Unpicklable:
    """Whoever rebuilds this notices."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _pid, ()


def _pid() -> int:
    return os.getpid()


async def pid_of(comm: Worker, address: str) -> int:
    return next(peer.pid for peer in await comm.peers() if peer.address == address)


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return "(zombie)" not in file.read()
    except FileNotFoundError:
        return False


async def echo(comm: Worker) -> None:
    """Pass on what comes, from a channel that is made later to another."""
    source = await comm.connect_channel("in")
    target = await comm.connect_channel("out")
    async for item in source:
        await target.put(item)
    await target.close()


async def test_a_channel_of_the_job() -> None:
    async with init("a:0") as comm, worker(comm, "b:0", echo) as peer:
        source = await comm.create_channel("in", maxsize=8, worker="both")
        target = await comm.create_channel("out", worker="both")
        again = await comm.create_channel("in", maxsize=8, worker="both")
        with pytest.raises(UsageError, match="maxsize=9, not 8"):
            await comm.create_channel("in", maxsize=9, worker="both")
        with pytest.raises(RendezvousError):
            await comm.connect_channel("nobody", timeout=0.1)
        tensor = torch.arange(float(LARGE))
        puts = [source.put(item) for item in (1, tensor, {"x": tensor[:7].clone()}, Unpicklable())]
        got = [await target.get() for _ in range(4)]
        assert got[0] == 1
        assert torch.equal(got[1], tensor)
        assert torch.equal(got[2]["x"], tensor[:7])
        assert got[3] == peer.pid  # rebuilt by the one that got it, as a number; the channel worker never looked
        for work in puts:
            await work
        await source.close()
        await again.close()
        with pytest.raises(ChannelClosed):
            await target.get()
        assert len({peer.address for peer in await comm.peers()} & {"channel.both:0", "channel.in:0"}) == 1
        await peer.result()


async def produce(comm: Worker, count: int) -> None:
    channel = await comm.connect_channel("c")
    for number in range(count):
        await channel.put([number, torch.zeros(LARGE if number % 3 == 0 else 4)])
    await asyncio.Event().wait()


async def lease(comm: Worker) -> None:
    channel = await comm.connect_channel("c")
    async with channel.lease():
        await comm.send("held", "a:0")
        await asyncio.Event().wait()


async def get_one(comm: Worker) -> Any:
    channel = await comm.connect_channel("c", consumer="other")
    item = await channel.get()
    await comm.send("got", "a:0")
    await asyncio.Event().wait()
    return item


async def test_who_is_killed() -> None:
    async with init("a:0") as comm:
        channel = await comm.create_channel("c")
        async with worker(comm, "p:0", produce, 5) as producer:
            items = [await channel.get() for _ in range(2)]
            async with worker(comm, "l:0", lease) as holder, worker(comm, "g:0", get_one) as getter:
                assert await comm.recv("l:0") == "held"
                assert await comm.recv("g:0") == "got"
                rest = asyncio.ensure_future(asyncio.gather(channel.get(), channel.get()))
                holder.kill()
                items += await rest  # one of them was on lease
                getter.kill()
            numbers = sorted(item[0] for item in items)
            assert len(set(numbers)) == 4
            work = channel.get()
            producer.kill()
            with pytest.raises(ProducerLost, match="p:0"):
                await work
        await channel.put("mine")
        assert await channel.get() == "mine"
        stats = await channel.stats()
        assert {each.name: each.state for each in stats.producers} == {"p:0": "lost", "a:0": "open"}
        assert stats.redeliveries == 1


async def test_a_killed_channel_worker() -> None:
    async with init("a:0") as comm:
        channel = await comm.create_channel("c", maxsize=1)
        await channel.put(1)
        works = [channel.put(2), channel.get(key="x"), channel.put(torch.zeros(LARGE)), channel.get_batch(5, key="y")]
        await channel.stats()
        os.kill(await pid_of(comm, "channel.c:0"), signal.SIGKILL)
        for work in works:
            with pytest.raises(PeerLost) as caught:
                await work
            assert caught.value.remote == "channel.c:0"
        with pytest.raises(PeerLost):
            channel.put(3)
        await channel.close()
        while True:  # until the manager knows
            try:
                channel = await comm.create_channel("c", maxsize=1)
                await channel.put(4)
                break
            except PeerLost:
                await asyncio.sleep(0.05)
        assert await channel.get() == 4


async def make(comm: Worker) -> None:
    channel = await comm.create_channel("c")
    await channel.put("from the dead")
    await comm.send("made", "a:0")
    await asyncio.Event().wait()


async def test_a_channel_outlives_its_maker() -> None:
    async with init("a:0") as comm:
        async with worker(comm, "m:0", make) as maker:
            assert await comm.recv("m:0") == "made"
            pid = await pid_of(comm, "channel.c:0")
            maker.kill()
        channel = await comm.connect_channel("c")
        assert await channel.get() == "from the dead"
        with pytest.raises(ProducerLost, match="m:0"):
            await channel.get()
        os.kill(pid, signal.SIGTERM)  # it is no child of ours, and ends when nobody is connected
    while running(pid):
        await asyncio.sleep(0.05)


async def close_early(comm: Worker) -> None:
    channel = await comm.connect_channel("c")
    puts = [channel.put(number) for number in range(3)]
    await puts[0]
    await channel.close()
    await comm.send("closed", "a:0")
    await asyncio.Event().wait()


async def test_a_producer_that_dies_with_puts_that_wait_has_not_closed_well() -> None:
    async with init("a:0") as comm, worker(comm, "m:0", close_early) as maker:
        channel = await comm.create_channel("c", maxsize=1)
        assert await comm.recv("m:0") == "closed"
        maker.kill()
        # Until that is known it has closed, for who asks for another key.
        while [each.state for each in (await channel.stats()).producers] != ["lost"]:
            await asyncio.sleep(0.01)
        with pytest.raises(ProducerLost, match="m:0"):
            await channel.get(key="another")
        assert await channel.get() == 0
        with pytest.raises(ProducerLost, match="m:0"):
            await channel.get()


async def test_a_channel_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_BOOTSTRAP", "import sys; sys.exit(3)")
    async with init("a:0") as comm:
        with pytest.raises(Exception, match="ended with exit code 3"):
            await comm.create_channel("c")


async def test_at_once_from_several() -> None:
    async with init("a:0") as one, init("b:0") as two:
        made = await asyncio.gather(one.create_channel("c"), two.create_channel("c"))
        await made[0].put(1)
        assert await made[1].get() == 1


async def test_bounded_memory() -> None:
    """The channel worker of a full channel holds what it is allowed to, and no more."""
    item, bound = 4 << 20, 16 << 20
    config = {"cluster": {"collective": {"backend": "stream"}}}

    def resident(pid: int) -> int:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return int(next(line for line in file if line.startswith("VmRSS")).split()[1]) * 1024

    async with init("a:0", config=config) as comm, init("b:0", config=config) as other:
        channel = await comm.create_channel("c", max_bytes=bound)
        slow = await other.connect_channel("c")
        await slow.stats()
        pid = await pid_of(comm, "channel.c:0")
        before = resident(pid)
        works = [channel.put(torch.zeros(item // 4)) for _ in range(40)]
        for number in range(40):
            await slow.get()
            await slow.stats()
            assert resident(pid) - before <= bound + item + (4 << 20), number
        for work in works:
            await work


# ---- many who wait


async def consume_in_tasks(comm: Worker, count: int) -> list[list[int]]:
    """What each of so many consumers gets before the stream ends."""
    channel = await comm.connect_channel("c")

    async def consume() -> list[int]:
        return [item async for item in channel]

    tasks = [asyncio.ensure_future(consume()) for _ in range(count)]
    await asyncio.sleep(0)
    await comm.send("waiting", "a:0")
    return await asyncio.gather(*tasks)


async def test_a_close_ends_all_that_wait_in_all_processes() -> None:
    """Two get the items that there are, three nothing, and none is left waiting."""
    async with init("a:0") as comm:
        channel = await comm.create_channel("c")
        async with (
            worker(comm, "b:0", consume_in_tasks, 2) as b,
            worker(comm, "c:0", consume_in_tasks, 2, loop="uvloop") as c,
            worker(comm, "d:0", consume_in_tasks, 1) as d,
        ):
            for address in ("b:0", "c:0", "d:0"):
                assert await comm.recv(address, timeout=20) == "waiting"
            while sum(each.waiting_gets for each in (await channel.stats()).consumers) < 5:
                await asyncio.sleep(0.01)
            await channel.put(1)
            await channel.put(2)
            begin = time.monotonic()
            await channel.close()
            got = [each for peer in (b, c, d) for each in await peer.result()]
            assert time.monotonic() - begin < 10
            assert sorted(item for each in got for item in each) == [1, 2]
            assert len(got) == 5


async def put_in_tasks(comm: Worker, count: int) -> list[str]:
    """How the puts of so many producers end."""
    channel = await comm.connect_channel("c")
    works = [channel.put(number) for number in range(count)]
    await comm.send("waiting", "a:0")
    return [type(outcome).__name__ for outcome in await asyncio.gather(*works, return_exceptions=True)]


async def test_a_shutdown_ends_all_that_wait_for_room_in_all_processes() -> None:
    async with init("a:0") as comm:
        channel = await comm.create_channel("c", maxsize=1)
        await channel.put("what fills it")
        async with (
            worker(comm, "b:0", put_in_tasks, 2) as b,
            worker(comm, "c:0", put_in_tasks, 2, loop="uvloop") as c,
            worker(comm, "d:0", put_in_tasks, 1) as d,
        ):
            for address in ("b:0", "c:0", "d:0"):
                assert await comm.recv(address, timeout=20) == "waiting"
            while (await channel.stats()).waiting_puts < 5:
                await asyncio.sleep(0.01)
            await channel.shutdown()
            for peer, count in ((b, 2), (c, 2), (d, 1)):
                assert await peer.result() == ["ChannelClosed"] * count
            assert await channel.get() == "what fills it"
            with pytest.raises(ChannelClosed):
                await channel.get()


# ---- nothing to do


def cpu_seconds(pid: int) -> float:
    """That a process has used so far, by itself and in the kernel."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_for_an_item(comm: Worker) -> Any:
    channel = await comm.connect_channel("c")
    work = channel.get()
    await comm.send("waiting", "a:0")
    return await work


async def test_an_idle_channel_costs_next_to_nothing() -> None:
    """Neither who waits for an item nor the channel worker polls. One that spins would use all of the time."""
    async with init("a:0") as comm:
        channel = await comm.create_channel("c")
        async with worker(comm, "b:0", wait_for_an_item) as consumer:
            assert await comm.recv("b:0", timeout=20) == "waiting"
            await channel.stats()
            pids = [await pid_of(comm, "channel.c:0"), consumer.pid, os.getpid()]
            await asyncio.sleep(0.3)
            before = [cpu_seconds(pid) for pid in pids]
            await asyncio.sleep(2.0)
            used = [cpu_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
            await channel.put("now")
            assert await consumer.result() == "now"
    assert max(used) < 0.2, used
