"""From device to device between two workers: which way is chosen, what travels, and what happens when a way fails in the middle."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.backends.device_pairs import register_pairs, unregister_pairs
from aiorlinf.device.runtime import Shared
from aiorlinf.errors import BackendUnavailable, RemoteError
from aiorlinf.link import device_out
from aiorlinf.link.device_events import sweep
from aiorlinf.link.device_out import EXPORT_INLINE
from aiorlinf.link.link import LinkStats
from aiorlinf.rendezvous.settings import Backend
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.testing.fake.pairs import FakeMaker
from aiorlinf.worker import Worker

__all__: list[str] = []

VALUES = torch.arange(300_000, dtype=torch.int32)
Pair = tuple[Worker, Worker]


@pytest.fixture(params=[0, 1])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, seed=request.param, ticks=(1, 9)) as fake:
        yield fake


@pytest.fixture
def maker(fake: FakeAccelerator) -> Iterator[FakeMaker]:
    maker = FakeMaker(fake)
    register_pairs("fake", maker)
    yield maker
    unregister_pairs("fake")


@asynccontextmanager
async def workers(backend: Backend = "auto", *, fallback: bool = True, device: str = "fake:1") -> AsyncIterator[Pair]:
    """Tensors of a's device 0 land on b's device 1."""
    config = {"cluster": {"collective": {"fallback": fallback}}}
    async with init("a:0", backend=backend, config=config) as a, init("b:0", backend=backend, device=device) as b:
        yield a, b


def nothing_left(fake: FakeAccelerator) -> bool:
    fake.drain()
    sweep()
    gc.collect()
    return fake.blocks == 0


def told(a: Worker) -> LinkStats:
    (stats,) = a.collective.create_collective_group(["a:0", "b:0"]).stats()
    return stats


async def exchange(pair: Pair, fake: FakeAccelerator, device: str = "fake:1", count: int = 1) -> None:
    """Messages with tensors here and there arrive as they were."""
    a, b = pair
    for number in range(count):
        there, small, none = fake.late(VALUES + number, ticks=30), fake.late(VALUES[:3]), fake.tensor(VALUES[:0])
        sent = {"there": there, "here": VALUES, "small": small, "none": none}
        work = a.send(sent, "b:0")
        del sent, there, small, none
        got = await b.recv("a:0")
        await work
        for name, values in (("there", VALUES + number), ("small", VALUES[:3]), ("none", VALUES[:0])):
            assert got[name].device == torch.device(device)
            assert torch.equal(got[name].cpu() if not got[name].is_cpu else got[name], values)
        assert torch.equal(got["here"], VALUES)


@pytest.mark.asyncio
async def test_memory_that_the_peer_copies_from(fake: FakeAccelerator) -> None:
    async with workers() as pair:
        await exchange(pair, fake, count=3)
        stats = told(pair[0])
        assert (stats.device_backend, stats.device_reason) == ("cuda_ipc", "the peer reads the sender's device itself")
        assert stats.around_bytes_sent >= 3 * VALUES.nbytes
    assert nothing_left(fake)


@pytest.mark.asyncio
async def test_the_same_device(fake: FakeAccelerator) -> None:
    async with workers(device="fake:0") as pair:
        await exchange(pair, fake, "fake:0")
        assert told(pair[0]).device_reason == "both workers use the same device"


@pytest.mark.asyncio
async def test_devices_that_cannot_read_each_other(fake: FakeAccelerator, maker: FakeMaker) -> None:
    fake.islands = True
    async with workers() as pair:
        await exchange(pair, fake)
        assert (told(pair[0]).device_backend, told(pair[0]).device_reason) == ("nccl", "two devices")
        await pair[0].send([fake.late(VALUES)], "b:0", tag=1)
        got = await pair[1].recv("a:0", tag=1, device="fake:0")  # another one than it lands on
        assert torch.equal(got[0].cpu(), VALUES)
    async with workers("cuda_ipc") as pair:
        await exchange(pair, fake)
        assert told(pair[0]).device_reason == "cuda_ipc was asked for, but the peer's device has no access to the sender's"


@pytest.mark.asyncio
async def test_a_pair(fake: FakeAccelerator, maker: FakeMaker) -> None:
    async with workers("nccl") as pair:
        await exchange(pair, fake, count=3)
        assert told(pair[0]).device_backend == "nccl"
        assert maker.made == 1
        a, b = pair
        work = b.send([fake.late(VALUES)], "a:0")  # the other direction has a pair of its own
        assert torch.equal((await a.recv("b:0"))[0].cpu(), VALUES)
        await work
        out = fake.late(torch.zeros_like(VALUES), 1)
        work = a.send_tensor(fake.late(VALUES), "b:0")
        assert torch.equal((await b.recv_tensor(out, "a:0")).cpu(), VALUES)
        await work
        del out, work
    assert nothing_left(fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["auto", "nccl"])
async def test_where_a_receive_wants_it(fake: FakeAccelerator, maker: FakeMaker, backend: Backend) -> None:
    async with workers(backend) as (a, b):
        for device in ("cpu", "fake:0", "fake:1"):
            work = a.send(fake.late(VALUES), "b:0")
            got = await b.recv("a:0", device=device)
            await work
            assert got.device == torch.device(device)
            assert torch.equal(got.cpu(), VALUES)
        await a.send(fake.late(VALUES[:100]), "b:0", tag=1)  # it comes before anybody asks for it
        got = await b.recv("a:0", tag=1, device="cpu")
        assert torch.equal(got, VALUES[:100])


@pytest.mark.asyncio
async def test_order_and_many_at_once(fake: FakeAccelerator, maker: FakeMaker) -> None:
    async with workers("nccl") as (a, b):
        works = [a.send((fake.late(VALUES[: 10 + number * 1000]) if number % 3 else VALUES[:5], number), "b:0") for number in range(12)]
        for number in range(12):
            tensor, came = await b.recv("a:0")
            assert came == number
            assert torch.equal(tensor.cpu(), VALUES[: 10 + number * 1000] if number % 3 else VALUES[:5])
        await asyncio.gather(*works)


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["cannot be made", "sender", "receiver", "midway"])
async def test_a_pair_that_fails(fake: FakeAccelerator, maker: FakeMaker, caplog: pytest.LogCaptureFixture, where: str) -> None:
    async with workers("nccl") as pair:
        if where == "cannot be made":
            maker.unmakable = "Duplicate GPU detected"
        else:
            await exchange(pair, fake)
            maker.broken = where
        with caplog.at_level(logging.WARNING, "aiorlinf"):
            await exchange(pair, fake, count=3)  # the message that was under way, too
        assert maker.failures == (0 if where == "cannot be made" else 1)
        lines = [record.getMessage() for record in caplog.records if "another way than nccl" in record.getMessage()]
        assert len(lines) == 1
        stats = told(pair[0])
        assert stats.device_backend == "staging"
        assert "nccl was asked for, but" in stats.device_reason
        if where == "cannot be made":
            assert "Duplicate GPU detected" in stats.device_reason


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["export", "open", "copy"])
async def test_memory_that_cannot_be_opened(fake: FakeAccelerator, caplog: pytest.LogCaptureFixture, call: str) -> None:
    async with workers() as pair:
        fake.fail_next(call)
        with caplog.at_level(logging.WARNING, "aiorlinf"):
            await exchange(pair, fake, count=2)
        assert len([record for record in caplog.records if "another way than cuda_ipc" in record.getMessage()]) == 1
        assert told(pair[0]).device_backend == "staging"


@pytest.mark.asyncio
async def test_many_tensors_are_exported_beside_the_loop(fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a while on a real device. In whatever order messages are ready then, they arrive in theirs."""
    real, threads = fake.export, set()

    def export(tensor: torch.Tensor) -> Shared:
        threads.add(threading.get_ident())
        return real(tensor)

    monkeypatch.setattr(fake, "export", export)
    async with workers() as (a, b):
        many = EXPORT_INLINE + 1
        sent = [[fake.late(VALUES[: number + 1], ticks=9) for number in range(count)] for count in (many, 1, many)]
        await a.send("first", "b:0")
        assert await b.recv("a:0") == "first"
        works = [a.send(each, "b:0") for each in (sent[0], sent[2])]
        got = [await b.recv("a:0") for _ in works]
        assert threads
        assert threading.get_ident() not in threads
        works.append(a.send(sent[1], "b:0"))
        got.append(await b.recv("a:0"))
        assert threading.get_ident() in threads
        for each, count in zip(got, (many, many, 1), strict=True):
            assert [tensor.cpu().tolist() for tensor in each] == [list(range(number + 1)) for number in range(count)]
        for work in works:
            await work
        assert told(a).device_backend == "cuda_ipc"


@pytest.mark.asyncio
async def test_many_tensors_that_cannot_be_exported(fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_out, "EXPORT_INLINE", 0)
    async with workers() as pair:
        fake.fail_next("export")
        await exchange(pair, fake, count=2)
        assert told(pair[0]).device_backend == "staging"


@pytest.mark.asyncio
async def test_a_backend_that_must_not_be_replaced(fake: FakeAccelerator, maker: FakeMaker) -> None:
    async with workers("nccl", fallback=False) as (a, b):
        maker.unmakable = "Duplicate GPU detected"
        for _ in range(2):
            work = a.send([fake.late(VALUES)], "b:0")
            with pytest.raises(RemoteError, match="Duplicate GPU"):
                await b.recv("a:0")
            with pytest.raises(BackendUnavailable, match="Duplicate GPU"):
                await work
        work = a.send([VALUES], "b:0")  # tensors in CPU memory never needed it
        assert torch.equal((await b.recv("a:0"))[0], VALUES)
        await work


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@pytest.mark.parametrize(("backend", "inline"), [("cuda_ipc", 1), ("cuda_ipc", 0), ("nccl", 1)])
async def test_cancelled_at_every_moment(
    fake: FakeAccelerator, maker: FakeMaker, backend: Backend, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_out, "EXPORT_INLINE", inline)
    async with workers(backend) as pair:
        await cancel_at_every_moment(pair, fake)
    assert nothing_left(fake)


async def cancel_at_every_moment(pair: Pair, fake: FakeAccelerator) -> None:
    a, b = pair
    for turns in range(12):
        work, got = a.send([fake.late(VALUES, ticks=9), 0], "b:0"), b.recv("a:0")
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        after = a.send([fake.late(VALUES + 1, ticks=9), 1], "b:0")
        tensor, which = await got
        assert torch.equal(tensor.cpu(), VALUES + which)
        if not which:
            tensor, which = await b.recv("a:0")
            assert which == 1
            assert torch.equal(tensor.cpu(), VALUES + 1)
        await after
    for turns in range(12):
        work, got = a.send([fake.late(VALUES, ticks=9)], "b:0"), b.recv("a:0")
        for _ in range(turns):
            await asyncio.sleep(0)
        got.cancel()
        again = await b.recv("a:0", device="fake:0")
        assert torch.equal(again[0].cpu(), VALUES)
        await work


@pytest.mark.asyncio
@pytest.mark.parametrize(("backend", "inline"), [("cuda_ipc", 9), ("cuda_ipc", 0), ("nccl", 9)])
async def test_a_worker_that_ends_in_the_middle(
    fake: FakeAccelerator, maker: FakeMaker, backend: Backend, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_out, "EXPORT_INLINE", inline)
    ended: list[Any] = []
    fake.limbo = True
    for turns in (0, 3, 6, 9, 15):
        async with workers(backend) as (a, b):
            await exchange((a, b), fake)
            works = [a.send([fake.late(VALUES, ticks=50)], "b:0"), b.recv("a:0")]
            for _ in range(turns):
                await asyncio.sleep(0)
            await (b if turns % 2 else a).close()
            ended += await asyncio.gather(*works, return_exceptions=True)
        works.clear()
    assert len(ended) == 10
    ended.clear()
    assert nothing_left(fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["cuda_ipc", "nccl"])
async def test_what_was_received_lives_as_long_as_it_is_used(fake: FakeAccelerator, maker: FakeMaker, backend: Backend) -> None:
    async with workers(backend) as (a, b):
        work = a.send(fake.late(VALUES), "b:0")
        got = await b.recv("a:0")
        await work
        fake.launch("a use of it", fake.current_stream(1), lambda: None, reads=[got], ticks=1000)
        del got, work  # the device is not through with it, and nobody may get its memory before that
        gc.collect()
    assert fake.faults == []
