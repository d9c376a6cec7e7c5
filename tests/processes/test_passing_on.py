"""Parcels between three real processes: the test is the producer p:0, or the one in the middle, or the consumer; what dies is killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import AiorlinfError, PeerLost
from aiorlinf.link.parcel import Parcel
from tests.peers import Peer, worker
from tests.system import memory_file_at, memory_file_mappings, no_more_descriptors

MIB = 1 << 20
ORDERS = 4711


def in_memory_file(tensor: torch.Tensor) -> bool:
    return memory_file_at(tensor.data_ptr(), tensor.nbytes)


class Actor:
    """Does what it is told, by the test, with whom it is told."""

    def __init__(self, comm: Worker, boss: str) -> None:
        self.comm = comm
        self.boss = boss
        self.parcels: list[Parcel] = []
        self.kept: list[torch.Tensor] = []
        self.hunger: contextlib.AbstractContextManager[None] | None = None

    async def run(self) -> None:
        while (order := await self.comm.recv(self.boss, tag=ORDERS)) is not None:
            name, *arguments = order
            try:
                answer = await getattr(self, name)(*arguments)
            except AiorlinfError as error:
                answer = type(error).__name__
            await self.comm.send(answer, self.boss, tag=ORDERS)

    async def send(self, size: int, value: int, to: str) -> None:
        await self.comm.send(torch.full((size,), value, dtype=torch.uint8), to)

    async def take_parcel(self, source: str, timeout: float = 20) -> int:
        parcel = await self.comm._exchange.recv_parcel(self.address(source), 0, 0, timeout)
        self.parcels.append(parcel)
        return parcel.nbytes

    async def pass_on(self, to: str, timeout: float = 20, keep: bool = False) -> tuple[bool, bool]:
        parcel = self.parcels[0]
        with contextlib.suppress(AiorlinfError):
            await self.comm._exchange.send_parcel(self.address(to), 0, 0, parcel, timeout, keep=keep)
        if parcel.closed:
            self.parcels.pop(0)
        return parcel.closed, parcel.uncertain

    async def relay(self, count: int, source: str, to: str) -> float:
        """Pass so many on; CPU seconds."""
        exchange = self.comm._exchange
        begin = time.process_time()
        for _ in range(count):
            parcel = await exchange.recv_parcel(self.address(source), 0, 0, 20)
            await exchange.send_parcel(self.address(to), 0, 0, parcel)
        return time.process_time() - begin

    async def receive(self, source: str, timeout: float = 20) -> tuple[int, bool]:
        tensor = await self.comm.recv(source, timeout=timeout)
        self.kept.append(tensor)
        return int(tensor[-1]), self.hunger is not None or in_memory_file(tensor)

    async def consume(self, count: int, source: str) -> float:
        """Look at so many; CPU seconds."""
        begin = time.process_time()
        for _ in range(count):
            tensor = await self.comm.recv(source, timeout=20)
            assert int(tensor[0]) == int(tensor[-1])
            del tensor
        return time.process_time() - begin

    async def values(self) -> list[tuple[int, int]]:
        return [(int(tensor.min()), int(tensor.max())) for tensor in self.kept]

    async def let_go(self) -> None:
        self.kept.clear()
        self.parcels.clear()

    async def arena(self) -> tuple[int, int]:
        stats = self.comm.stats().shared_memory
        assert stats is not None
        return stats.bytes, stats.used_bytes

    async def starve(self) -> None:
        self.hunger = no_more_descriptors()
        self.hunger.__enter__()

    async def feed(self) -> None:
        assert self.hunger is not None
        self.hunger.__exit__(None, None, None)
        self.hunger = None

    async def mappings(self) -> int:
        return len(memory_file_mappings())

    def address(self, name: str) -> Any:
        return name


async def act(comm: Worker, boss: str) -> None:
    comm._table.pass_on()
    await Actor(comm, boss).run()


class Told:
    """The test's end of an `Actor`."""

    def __init__(self, comm: Worker, address: str, peer: Peer) -> None:
        self.comm = comm
        self.address = address
        self.peer = peer

    async def ask(self, *order: Any) -> Any:
        await self.tell(*order)
        return await self.answer()

    async def tell(self, *order: Any) -> None:
        await self.comm.send(order, self.address, tag=ORDERS, timeout=20)

    async def answer(self) -> Any:
        return await self.comm.recv(self.address, tag=ORDERS, timeout=20)


@contextlib.asynccontextmanager
async def actors(comm: Worker, *addresses: str) -> AsyncIterator[list[Told]]:
    async with contextlib.AsyncExitStack() as stack:
        told = []
        for address in addresses:
            peer = await stack.enter_async_context(worker(comm, address, act, comm.address, loop="uvloop"))
            told.append(Told(comm, address, peer))
        for each in told:
            await each.ask("values")  # it is there
        yield told
        for each in told:
            with contextlib.suppress(AiorlinfError):
                await comm.send(None, each.address, tag=ORDERS, timeout=5)
                await each.peer.result()


async def through(boss: Worker, p: Told, f: Told, c: Told, value: int, size: int = MIB) -> None:
    """One message from p through f to c."""
    await p.tell("send", size, value, "f:0")
    await f.ask("take_parcel", "p:0")
    await p.answer()
    await f.tell("pass_on", "c:0")
    assert await c.ask("receive", "f:0") == (value, size == MIB)
    assert await f.answer() == (True, False)


@pytest.mark.asyncio
async def test_one_copy_from_process_to_process_to_process() -> None:
    async with init("boss:0") as boss, actors(boss, "p:0", "f:0", "c:0") as (p, f, c):
        for value in range(1, 6):
            await through(boss, p, f, c, value)
        assert await c.ask("values") == [(value, value) for value in range(1, 6)]
        assert await f.ask("arena") == (0, 0)
        assert (await p.ask("arena"))[1] == 5 * MIB
        assert await f.ask("mappings") == await c.ask("mappings") == await p.ask("mappings")
        await c.ask("let_go")
        await until(lambda: p.ask("arena"), lambda arena: arena[1] == 0)


async def until(ask: Any, holds: Any) -> None:
    """Ask again and again."""
    end = time.monotonic() + 20
    while not holds(await ask()):
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_through_four() -> None:
    async with init("boss:0") as boss, actors(boss, "p:0", "f:0", "g:0", "c:0") as (p, f, g, c):
        for value in range(3):
            await p.tell("send", MIB, value, "f:0")
            await f.ask("take_parcel", "p:0")
            await p.answer()
            await f.tell("pass_on", "g:0")
            await g.ask("take_parcel", "f:0")
            assert await f.answer() == (True, False)
            await g.tell("pass_on", "c:0")
            assert await c.ask("receive", "g:0") == (value, True)
            assert await g.answer() == (True, False)
        assert await c.ask("values") == [(value, value) for value in range(3)]
        assert await f.ask("arena") == await g.ask("arena") == (0, 0)
        # The first one in the middle dies: what came through it stays, and is left alone.
        f.peer.kill()
        await until(lambda: p.ask("arena"), lambda arena: arena[1] == 0)
        assert await c.ask("values") == [(value, value) for value in range(3)]
        await c.ask("let_go")


@pytest.mark.asyncio
async def test_the_producer_is_killed_at_each_stage() -> None:
    async with init("boss:0") as boss, actors(boss, "f:0", "c:0") as (f, c):
        for life, stage in enumerate(("sent", "parcel", "passed")):
            async with worker(boss, "p:0", act, "boss:0", loop="uvloop") as peer:
                p = Told(boss, "p:0", peer)
                await next_life(functools.partial(p.ask, "values"))
                await p.tell("send", MIB, 7 + life, "f:0")
                if stage == "sent":
                    await p.answer()  # in the hands of f, whom nobody has asked to take it
                else:
                    await f.ask("take_parcel", "p:0")
                    await p.answer()
                if stage == "passed":
                    await f.tell("pass_on", "c:0")
                    assert await c.ask("receive", "f:0") == (7 + life, True)
                    await f.answer()
                peer.kill()
                with pytest.raises(PeerLost):
                    await boss.recv("p:0", tag=ORDERS)
            if stage == "sent":
                await f.ask("take_parcel", "p:0")
            if stage != "passed":
                await f.tell("pass_on", "c:0")
                assert await c.ask("receive", "f:0") == (7 + life, True), "it is still the dead one's memory"
                assert await f.answer() == (True, False)
        assert await c.ask("values") == [(7, 7), (8, 8), (9, 9)]
        assert await f.ask("arena") == (0, 0)
        await c.ask("let_go")
        for each in (f, c):
            await until(lambda each=each: each.ask("mappings"), lambda count: count == 0)


async def next_life(operation: Any) -> Any:
    """Once a peer that was killed is there again; before that operations say that it is gone."""
    while True:
        try:
            return await operation()
        except PeerLost:
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", ["unread", "parcel", "passed"])
async def test_the_one_in_the_middle_is_killed(stage: str) -> None:
    async with init("boss:0") as boss, actors(boss, "p:0", "f:0", "c:0") as (p, f, c):
        await through(boss, p, f, c, 5)
        if stage != "passed":
            await p.ask("send", MIB, 6, "f:0")
        if stage == "parcel":
            await f.ask("take_parcel", "p:0")
        f.peer.kill()
        assert await c.ask("receive", "f:0") == "PeerLost"
        await until(lambda: p.ask("arena"), lambda arena: arena[1] == 0)
        # New messages do not go where the consumer looks.
        for value in range(20, 30):
            await p.tell("send", MIB, value, "c:0")
            assert await c.ask("receive", "p:0") == (value, True)
            await p.answer()
        assert await c.ask("values") == [(5, 5), *((value, value) for value in range(20, 30))]
        await c.ask("let_go")
        await until(lambda: p.ask("arena"), lambda arena: arena[1] == 0)


@pytest.mark.asyncio
async def test_a_killed_consumer_costs_nobody_anything_and_its_parcel_goes_to_another() -> None:
    async with init("boss:0") as boss, actors(boss, "p:0", "f:0", "c:0", "d:0") as (p, f, c, d):
        for value in (1, 2, 3):
            await through(boss, p, f, c, value)
        await p.ask("send", MIB, 9, "f:0")
        await f.ask("take_parcel", "p:0")
        await f.tell("pass_on", "c:0")  # it comes, and nobody there receives it; or the other is dead before
        c.peer.kill()
        whole_or_gone = await f.answer()
        if whole_or_gone[0]:
            return  # it had been accepted when it died
        assert await f.ask("take_parcel", "c:0", 0.01) in ("PeerLost", "DeadlineExceeded")
        await f.tell("pass_on", "d:0")
        assert await d.ask("receive", "f:0") == (9, True)
        assert await f.answer() == (True, whole_or_gone[1])
        await d.ask("let_go")
        for each in (p, f):
            await until(lambda each=each: each.ask("arena"), lambda arena: arena[1] == 0)


@pytest.mark.asyncio
async def test_without_descriptors_in_the_middle_or_at_the_end() -> None:
    async with init("boss:0") as boss, actors(boss, "p:0", "f:0", "c:0") as (p, f, c):
        for starving in (f, c):
            await through(boss, p, f, c, 1, size=10)  # all are connected
            await starving.ask("starve")
            await p.tell("send", MIB, 4, "f:0")
            await f.ask("take_parcel", "p:0")
            await p.answer()
            await f.tell("pass_on", "c:0")
            assert (await c.ask("receive", "f:0"))[0] == 4
            assert await f.answer() == (True, False)
            await starving.ask("feed")
        assert await c.ask("values") == [(1, 1), (4, 4)] * 2


@pytest.mark.asyncio
async def test_under_load_all_arrives_and_all_is_given_back() -> None:
    count = 150
    async with init("boss:0") as boss, actors(boss, "p:0", "f:0", "c:0") as (p, f, c):
        await f.tell("relay", count, "p:0", "c:0")
        await c.tell("consume", count, "f:0")
        for number in range(count):
            await p.ask("send", 70_000 + 5000 * number, number, "f:0")
        await f.answer()
        await c.answer()
        assert await f.ask("arena") == (0, 0)
        await until(lambda: p.ask("arena"), lambda arena: arena[1] == 0)
