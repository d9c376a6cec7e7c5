"""Tensors on accelerators between two workers: copied out, carried each way there is, and copied in, on streams that take their time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf import init
from aiorlinf.errors import Mismatch, UsageError
from aiorlinf.rendezvous.settings import Backend
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.worker import Worker

__all__: list[str] = []

LARGE = 3 << 20
BACKENDS: list[Backend] = ["stream", "shm", "gloo"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture
def fake(backend: Backend) -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, seed=BACKENDS.index(backend), ticks=(1, 9)) as fake:
        yield fake


@pytest_asyncio.fixture
async def pair(backend: Backend, fake: FakeAccelerator) -> AsyncIterator[tuple[Worker, Worker]]:
    async with init("a:0", backend=backend) as a, init("b:0", backend=backend) as b:
        yield a, b


def same(fake: FakeAccelerator, tensor: torch.Tensor, values: torch.Tensor, device: str) -> bool:
    """The tensor is on this device, and its current stream sees these values."""
    assert tensor.device == torch.device(device)
    assert (tensor.dtype, tensor.shape) == (values.dtype, values.shape)
    return torch.equal(tensor if tensor.is_cpu else fake.read(tensor), values)


@dataclasses.dataclass
class Batch:
    frames: torch.Tensor
    rewards: torch.Tensor
    name: str


@pytest.mark.asyncio
async def test_devices_and_the_cpu_in_one_message(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    frames, rewards = torch.arange(LARGE, dtype=torch.uint8), torch.arange(5.0)
    sent = {
        "batch": Batch(fake.late(frames, ticks=40), rewards, "first"),
        "more": [fake.late(rewards, index=1), fake.tensor(torch.zeros(0, 3)), fake.tensor(torch.tensor(7))],
        "large": frames.clone(),
    }
    work = a.send(sent, "b:0")
    got = await b.recv("a:0")
    await work
    batch = got["batch"]
    assert type(batch) is Batch
    assert same(fake, batch.frames, frames, "fake:0")
    assert same(fake, batch.rewards, rewards, "cpu")
    assert same(fake, got["more"][0], rewards, "fake:0")  # the receiver's current device, whatever it was at the sender
    assert same(fake, got["more"][1], torch.zeros(0, 3), "fake:0")
    assert same(fake, got["more"][2], torch.tensor(7), "fake:0")
    assert same(fake, got["large"], frames, "cpu")


@pytest.mark.asyncio
async def test_plain_containers_dtypes_and_parameters(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    dtypes = [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint16]
    values = {str(dtype): torch.tensor([0, 1, 1, 0]).to(dtype) for dtype in dtypes}
    work = a.send({name: fake.late(value) for name, value in values.items()}, "b:0")
    got = await b.recv("a:0")
    await work
    for name, value in values.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(fake.read(got[name]).view(torch.uint8), value.view(torch.uint8))
    weight = torch.nn.Parameter(fake.tensor(torch.ones(2, 2)))
    work = a.send([weight, weight], "b:0")
    first, second = await b.recv("a:0")
    await work
    assert first is second
    assert type(first) is torch.nn.Parameter
    assert first.requires_grad
    assert first.is_leaf
    assert not first._is_view()
    assert first.untyped_storage().nbytes() == 16


@pytest.mark.asyncio
async def test_where_it_lands(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    values = torch.arange(100.0)
    for device in ("cpu", "fake:1", "fake", torch.device("fake", 0)):
        work = a.send((fake.late(values), values), "b:0")
        got, plain = await b.recv(a.address, device=device)
        await work
        assert same(fake, got, values, "fake:0" if device == "fake" else str(device))
        assert plain.is_cpu
    fake.set_device(1)
    work = a.send([fake.late(values)], "b:0")
    assert same(fake, (await b.recv("a:0"))[0], values, "fake:1")
    await work
    with pytest.raises(UsageError, match="2 devices"):
        b.recv(a.address, device="fake:2")


@pytest.mark.asyncio
async def test_what_comes_before_it_was_asked_for(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    values = torch.arange(1000, dtype=torch.int32)
    await a.send([fake.late(values)], "b:0", tag=1)  # within the window: done when it is there
    work = a.send(fake.late(values), "b:0", tag=2)
    got = await b.recv("a:0", tag=1, device="fake:1")
    assert same(fake, got[0], values, "fake:1")
    assert same(fake, await b.recv("a:0", tag=2), values, "fake:0")
    await work


@pytest.mark.asyncio
async def test_order_among_small_large_cpu_and_device(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    sent: list[Any] = []
    works = []
    for number in range(30):
        size = (1, 5000, 400_000)[number % 3]
        values = torch.full((size,), number, dtype=torch.int32)
        sent.append((fake.late(values, index=number % 2, ticks=30 - number) if number % 4 else values, number))
        works.append(a.send(sent[-1], "b:0"))
    for number in range(30):
        tensor, told = await b.recv("a:0")
        assert told == number
        host = tensor if tensor.is_cpu else fake.read(tensor)
        assert host.eq(number).all()
    await asyncio.gather(*works)


@pytest.mark.asyncio
async def test_tensors_into_tensors(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    for size in (1, 70_000, LARGE):
        values = torch.arange(size, dtype=torch.int16)
        for source in (values, fake.late(values, ticks=20)):
            for out in (torch.zeros_like(values), fake.late(torch.zeros_like(values), ticks=20), fake.tensor(torch.zeros_like(values), 1)):
                if source.is_cpu and out.is_cpu:
                    continue
                version = out._version
                work = a.send_tensor(source, "b:0")
                assert await b.recv_tensor(out, "a:0") is out
                await work
                assert same(fake, out, values, str(out.device))
                assert out._version > version


@pytest.mark.asyncio
async def test_a_mismatch_leaves_all_as_it_was(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    out = fake.tensor(torch.zeros(3))
    work = a.send_tensor(fake.late(torch.ones(4)), "b:0")
    with pytest.raises(Mismatch):
        await b.recv_tensor(out, "a:0")
    with pytest.raises(Mismatch):
        await work
    assert same(fake, out, torch.zeros(3), "fake:0")
    work = a.send_tensor(fake.late(torch.ones(3)), "b:0")
    await b.recv_tensor(out, "a:0")
    await work
    assert same(fake, out, torch.ones(3), "fake:0")


@pytest.mark.asyncio
async def test_both_send_tensors_first(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    there, back = a.send_tensor(fake.late(torch.ones(70_000)), "b:0"), b.send_tensor(fake.late(torch.full((70_000,), 2.0)), "a:0")
    await there
    await back
    got = await b.recv_tensor(fake.tensor(torch.zeros(70_000)), "a:0")
    assert fake.read(got).eq(1).all()
    got = await a.recv_tensor(fake.tensor(torch.zeros(70_000)), "b:0")
    assert fake.read(got).eq(2).all()


@pytest.mark.asyncio
async def test_the_producing_stream_is_the_callers(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    fake.set_stream(fake.new_stream())
    values = torch.arange(10)
    work = a.send([fake.late(values, ticks=50)], "b:0")
    got = await b.recv("a:0")
    await work
    assert same(fake, got[0], values, "fake:0")
    out = fake.late(torch.zeros_like(values), ticks=50)
    work = a.send_tensor(fake.late(values, ticks=50), "b:0")
    assert same(fake, await b.recv_tensor(out, "a:0"), values, "fake:0")
    await work


@pytest.mark.asyncio
async def test_a_tensor_dropped_at_the_call(pair: tuple[Worker, Worker], fake: FakeAccelerator) -> None:
    a, b = pair
    values = torch.arange(200_000, dtype=torch.int32)
    works = [a.send(fake.late(values, ticks=30), "b:0", tag=tag) for tag in range(4)]
    for tag in range(4):
        assert same(fake, await b.recv("a:0", tag=tag), values, "fake:0")
    await asyncio.gather(*works)
    del works
    assert fake.memory(0)[0] == fake.memory(0)[1]
    fake.drain()
    assert fake.blocks == 0


@pytest.mark.asyncio
async def test_the_device_of_a_worker() -> None:
    with FakeAccelerator(2) as fake:
        async with init("a:0") as a, init("b:0", device="fake:1") as b, init("c:0", device="cpu") as c:
            for worker, device in ((b, "fake:1"), (c, "cpu")):
                group = worker.collective.create_collective_group(["a:0", worker.address])
                work = a.send(fake.late(torch.ones(3)), worker.address)
                assert same(fake, await worker.recv("a:0"), torch.ones(3), device)
                await work
                work = a.send(fake.late(torch.ones(3)), worker.address)
                assert same(fake, await group.recv(device="fake:0"), torch.ones(3), "fake:0")
                await work
        with pytest.raises(UsageError, match="2 devices"):
            init("d:0", device="fake:7")


def test_the_current_device_is_the_callers() -> None:
    with FakeAccelerator(2) as fake, init("a:0", loop="thread") as a:
        fake.set_device(1)  # of this thread, not of the loop's
        work = a.send(fake.late(torch.ones(3)), "a:0")
        assert same(fake, a.recv("a:0").wait(), torch.ones(3), "fake:1")
        work.wait()
