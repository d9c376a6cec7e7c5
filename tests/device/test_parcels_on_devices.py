"""Tensors of an accelerator that go through a worker which does not look at them: they land where they are received, not on their way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import UsageError
from aiorlinf.link.parcel import Parcel, decode_parcel
from aiorlinf.rendezvous.settings import Backend
from aiorlinf.testing.fake import FakeAccelerator
from tests.device.test_staging import BACKENDS, same

__all__: list[str] = []

LARGE = 1 << 18


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, seed=1, ticks=(1, 9)) as fake:
        yield fake


@pytest_asyncio.fixture
async def cast(backend: Backend, fake: FakeAccelerator) -> AsyncIterator[tuple[Worker, Worker, Worker]]:
    async with init("p:0", backend=backend) as p, init("f:0", backend=backend) as f, init("c:0", backend=backend) as c:
        yield p, f, c


async def parcel_of(p: Worker, f: Worker, obj: object) -> Parcel:
    work = f._exchange.recv_parcel(p.address, 0, 0, 20)
    sent = p.send(obj, f.address)
    parcel = await work
    await sent
    return parcel


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [5, LARGE])
async def test_they_land_at_the_end(cast: tuple[Worker, Worker, Worker], fake: FakeAccelerator, size: int) -> None:
    p, f, c = cast
    values, rewards = torch.arange(float(size)), torch.arange(5.0)
    parcel = await parcel_of(p, f, {"x": fake.late(values, ticks=30), "r": rewards})
    for keep in (True, False):
        work = c.recv("f:0", timeout=20)
        sent = f._exchange.send_parcel(c.address, 0, 0, parcel, keep=keep)
        got = await work
        await sent
        assert same(fake, got["x"], values, "fake:0")
        assert same(fake, got["r"], rewards, "cpu")


@pytest.mark.asyncio
async def test_unpacked_they_land_where_they_are_wanted(cast: tuple[Worker, Worker, Worker], fake: FakeAccelerator) -> None:
    p, f, _ = cast
    values = torch.arange(float(LARGE))
    for device in (None, "cpu", "fake:1"):
        parcel = await parcel_of(p, f, [fake.late(values), values])
        there, here = await f._exchange.unpack_parcel(parcel, device)
        assert same(fake, there, values, device or "fake:0")
        assert same(fake, here, values, "cpu")
        assert parcel.closed
    parcel = await parcel_of(p, f, [fake.late(values)])
    with pytest.raises(UsageError, match="2 devices"):
        f._exchange.unpack_parcel(parcel, "fake:2")
    (there,) = decode_parcel(parcel)
    assert same(fake, there, values, "cpu")


@pytest.mark.asyncio
async def test_cancelled_on_the_way_to_the_device(cast: tuple[Worker, Worker, Worker], fake: FakeAccelerator) -> None:
    p, f, _ = cast
    values = torch.arange(float(LARGE))
    parcel = await parcel_of(p, f, [fake.late(values)])
    work = f._exchange.unpack_parcel(parcel)
    assert not work.done()
    assert work.cancel()
    assert not parcel.closed
    (there,) = await f._exchange.unpack_parcel(parcel)
    assert same(fake, there, values, "fake:0")
