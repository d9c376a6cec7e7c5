"""Items with tensors on accelerators: handed over, brought where they are wanted, kept in host memory. With the fake accelerator."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorlinf import Channel
from aiorlinf.errors import BackendUnavailable, ChannelEmpty, UsageError
from aiorlinf.testing.fake import FakeAccelerator
from tests.channel.places import KINDS, place
from tests.device.test_staging import same

__all__: list[str] = []

pytestmark = pytest.mark.asyncio

LARGE = 1 << 17


@dataclasses.dataclass
class Step:
    frames: torch.Tensor
    rewards: list[torch.Tensor]
    name: str


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, seed=3, ticks=(1, 9)) as fake:
        yield fake


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [7, LARGE])
async def test_they_come_to_an_accelerator_again(kind: str, size: int, fake: FakeAccelerator) -> None:
    values, rewards = torch.arange(float(size)), torch.arange(5.0)
    async with place(kind) as here:
        put, get = await here.handle(), await here.handle()
        for _ in range(4):
            await put.put({"x": fake.late(values, ticks=30), "r": rewards})
        got: list[Any] = [await get.get()]
        got += await get.get_batch(1)
        async with get.lease() as item:
            got.append(item)
        async with get.prefetch(2) as ahead:
            got.append(await anext(ahead))
        for each in got:
            assert same(fake, each["x"], values, "fake:0")
            assert same(fake, each["r"], rewards, "cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [7, LARGE])
async def test_a_device_that_is_named_gets_all_tensors(kind: str, size: int, fake: FakeAccelerator) -> None:
    values, rewards = torch.arange(float(size)), torch.arange(3).to(torch.int16)
    async with place(kind) as here:
        put, get = await here.handle(), await here.handle()
        for _ in range(5):
            await put.put(Step(values, [rewards, fake.late(values)], "x"), weight=1)
        await put.put("no tensor")
        got: list[Any] = [await get.get(device="fake:1"), await get.get_nowait(), *(await get.get_batch(1, device="fake:1"))]
        async with get.prefetch(3, device="fake:1") as ahead:
            got += [await anext(ahead) for _ in range(2)]
            assert await anext(ahead) == "no tensor"
        for index, each in enumerate(got):
            where = "cpu" if index == 1 else "fake:1"
            assert same(fake, each.frames, values, where)
            assert same(fake, each.rewards[0], rewards, where)
            assert same(fake, each.rewards[1], values, "fake:0" if index == 1 else where)
            assert each.name == "x"
        for call in (
            lambda: get.get(device="fake:2"),
            lambda: get.prefetch(2, device="no such"),
            lambda: get.batches(2, device="fake:7"),
            lambda: get.get_batch(2, device="meta"),
        ):
            with pytest.raises(UsageError):
                call()
        assert await get.empty()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_get_that_is_cancelled_while_its_tensors_travel(kind: str, fake: FakeAccelerator) -> None:
    values = torch.arange(float(LARGE))
    async with place(kind) as here:
        put, get = await here.handle(), await here.handle()
        for number in range(3):
            await put.put([values, number])
        for pauses in range(8):
            work = get.get(device="fake:0")
            for _ in range(pauses):
                await asyncio.sleep(0.001)
            if not work.cancel():
                await work
                raise AssertionError("nobody has taken it")
        got = [await get.get(device="fake:0", timeout=20) for _ in range(3)]
        assert sorted(number for _, number in got) == [0, 1, 2]
        assert all(same(fake, tensor, values, "fake:0") for tensor, _ in got)
        with pytest.raises(ChannelEmpty):
            await get.get_nowait()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_device_that_fails(kind: str, fake: FakeAccelerator) -> None:
    async with place(kind) as here:
        put, get = await here.handle(), await here.handle()
        await put.put(torch.ones(10))
        await put.put(torch.zeros(10))
        fake.fail_next("copy")
        with pytest.raises(BackendUnavailable):
            await get.get(device="fake:0")
        assert same(fake, await get.get(device="fake:0"), torch.zeros(10), "fake:0")
        fake.fail_next("copy")
        await put.put(torch.ones(10))
        assert float((await get.get())[0]) == 1.0


async def test_memory_that_runs_short(fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(float(LARGE))
    async with place("local", offload_above=0.8) as here:
        channel = await here.handle()
        await channel.put({"x": fake.late(values, ticks=20), "r": values})
        monkeypatch.setattr(fake, "memory", lambda index: (10, 100))
        for _ in range(2):
            await channel.put({"x": fake.late(values, ticks=20), "r": values})
        while [item["x"].device.type for item in await channel.peek_all()] != ["fake", "cpu", "cpu"]:
            await asyncio.sleep(0.001)
        monkeypatch.undo()
        for device in (None, None, "fake:1"):
            item = await channel.get(device=device)
            assert same(fake, item["x"], values, device or "fake:0")
            assert same(fake, item["r"], values, device or "cpu")
        monkeypatch.setattr(fake, "memory", lambda index: (10, 100))
        await channel.put([fake.late(values, ticks=200)])
        (tensor,) = await channel.get()  # before it has left
        assert same(fake, tensor, values, "fake:0")
    for wrong in (-1, 2, "0.5"):
        with pytest.raises(UsageError):
            async with place("local", offload_above=wrong) as here:
                await here.handle()


async def test_the_getter_uses_memory_of_the_putters_stream(fake: FakeAccelerator) -> None:
    """It is handed over as it is; nobody may get it before the getter's stream is through with it."""
    async with Channel.local("here") as channel:
        usual = fake.current_stream(0)
        fake.set_stream(fake.new_stream())
        putting = channel.put([fake.late(torch.arange(10.0))])
        fake.set_stream(usual)
        await putting
        (got,) = await channel.get()
        fake.launch("a use of it", usual, lambda: None, reads=[got], ticks=1000)
        del got, putting
        await channel.put("another")  # with it the channel forgets the one that was handed out before
        assert await channel.get() == "another"
        gc.collect()
        assert fake.memory(0)[0] == fake.memory(0)[1]
        assert fake.faults == []
