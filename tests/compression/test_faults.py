"""Cancelled, changed, lost or closed in every stage: who waits hears of it, the next message is fine, and everything comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorlinf import Worker
from aiorlinf.codec.compressing import ChunkJob
from aiorlinf.codec.decompressing import Record
from aiorlinf.errors import AiorlinfError, ClosedError, PeerError, PeerLost, RemoteError, UsageError
from aiorlinf.work.base import AsyncWork
from tests.codec.material import MIB, dense
from tests.compression.conftest import Pair, all_back, coding_of, compressing, config_of, link_of, pair_of, pool_of, same
from tests.peers import worker

LARGE = 24 * MIB


class Gate:
    """Threads that compress or decompress wait here once it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(30)

    async def wait_reached(self) -> None:
        """Until a codec is at work."""
        while not self.reached.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def compressing_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, run = Gate(), ChunkJob.run

    def gated(job: ChunkJob) -> None:
        gate.pass_through()
        run(job)

    monkeypatch.setattr(ChunkJob, "run", gated)
    yield gate
    gate.open()


@pytest.fixture
def decompressing_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, run = Gate(), Record.run

    def gated(record: Record, context: Any = None) -> None:
        gate.pass_through()
        run(record, context)

    monkeypatch.setattr(Record, "run", gated)
    yield gate
    gate.open()


def stop_reading(who: Worker) -> Any:
    """Its kernel's buffers fill up, and then its peer's."""
    transport = link_of(who)._conn.transport  # type: ignore[union-attr]
    transport.pause_reading()
    return transport


async def outcome(work: AsyncWork[Any]) -> Any:
    """What it ends with."""
    try:
        return await work.async_wait(20)
    except (AiorlinfError, asyncio.CancelledError) as error:
        return error.with_traceback(None)


async def until_sending(pair: Pair) -> None:
    """Until some of what `a` sends has left."""
    sender = link_of(pair.a).sender
    while not any(out.position for out in sender.pending.values()):
        await asyncio.sleep(0.001)


async def fine(pair: Pair) -> None:
    """The next message is."""
    data = dense(300_000, seed=99)
    assert same(await pair.trip(data, tag=9), data)


# ---- cancelled sends


@pytest.mark.asyncio
async def test_a_send_cancelled_while_it_is_compressed(compressing_gate: Gate) -> None:
    async with compressing("zstd") as pair:
        await fine(pair)
        compressing_gate.shut()
        data = dense(LARGE)
        sending, receiving = pair.ab.send(data), pair.ba.recv()
        await compressing_gate.wait_reached()
        sending.cancel()
        assert link_of(pair.a).sender.pending == {}
        compressing_gate.open()
        second = pair.ab.send("second")
        assert await receiving.async_wait(20) == "second"
        await second
        await fine(pair)


@pytest.mark.asyncio
async def test_a_send_cancelled_while_the_network_does_not_take_it() -> None:
    async with compressing("lz4") as pair:
        await fine(pair)
        transport = stop_reading(pair.b)
        data = torch.randint(0, 200, (LARGE // 8,)).view(torch.uint8)
        sending = pair.ab.send(data)
        await until_sending(pair)
        await asyncio.sleep(0.05)
        assert not sending.done()
        sending.cancel()
        second = pair.ab.send("second")
        transport.resume_reading()
        assert await pair.ba.recv(timeout=20) == "second"
        await second
        await fine(pair)


@pytest.mark.asyncio
async def test_a_send_cancelled_while_it_is_decompressed(decompressing_gate: Gate) -> None:
    async with compressing("zstd") as pair:
        await fine(pair)
        decompressing_gate.shut()
        receiving = pair.ba.recv()
        sending = pair.ab.send(dense(LARGE))
        await decompressing_gate.wait_reached()
        assert "[receive " in str(receiving.detail) or "[decompress]" in str(receiving.detail)
        sending.cancel()
        second = pair.ab.send("second")
        decompressing_gate.open()
        assert await receiving.async_wait(20) == "second"
        await second
        assert link_of(pair.b).receiver.opened == {}
        await fine(pair)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
async def test_sends_cancelled_at_any_moment(codec: str) -> None:
    rng = random.Random(5)
    async with compressing(codec) as pair:
        await fine(pair)
        for index in range(15):
            works = [pair.ab.send([dense(rng.choice([20_000, 300_000, 3 * MIB])), index], tag=0) for _ in range(3)]
            works += [pair.ab.send(dense(2 * MIB), tag=1)]
            receiving = pair.ba.recv(tag=1)
            await asyncio.sleep(rng.random() * 0.02)
            for work in rng.sample(works, 3):
                work.cancel()
            receiving.cancel()
            await asyncio.sleep(0)
        while link_of(pair.b).stats().unread_messages or link_of(pair.a).sender.pending:
            for tag in (0, 1):
                with contextlib.suppress(TimeoutError):
                    await pair.ba.recv(tag=tag, timeout=0.05)
        await fine(pair)


# ---- cancelled receives


@pytest.mark.asyncio
async def test_a_receive_cancelled_while_it_is_decompressed_leaves_its_message_to_the_next(decompressing_gate: Gate) -> None:
    async with compressing("lz4") as pair:
        await fine(pair)
        decompressing_gate.shut()
        data = [dense(2 * MIB), dense(900_000)]
        sending, receiving = pair.ab.send(data), pair.ba.recv()
        await decompressing_gate.wait_reached()
        receiving.cancel()
        decompressing_gate.open()
        assert same(await pair.ba.recv(timeout=20), data)
        await sending


@pytest.mark.asyncio
async def test_receives_cancelled_at_any_moment() -> None:
    rng = random.Random(7)
    async with compressing("zstd", max_inflight=1) as pair:
        for index in range(40):
            data = dense(rng.choice([20_000, 300_000, 2 * MIB]), seed=index)
            sending = pair.ab.send(data)
            for _ in range(rng.randrange(3)):
                receiving = pair.ba.recv()
                await asyncio.sleep(rng.random() * 0.01)
                receiving.cancel()
            assert same(await pair.ba.recv(timeout=20), data)
            await sending


@pytest.mark.asyncio
async def test_a_limit_that_passes_says_how_far_it_came(decompressing_gate: Gate) -> None:
    async with compressing("zstd") as pair:
        await fine(pair)
        decompressing_gate.shut()
        data = dense(900_000)
        sending = pair.ab.send(data)
        with pytest.raises(TimeoutError, match=r"900000 of 900000 bytes"):
            await pair.ba.recv(timeout=0.2)
        decompressing_gate.open()
        assert same(await pair.ba.recv(timeout=20), data)
        await sending


# ---- written to


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
async def test_a_tensor_written_to_while_it_is_sent(codec: str) -> None:
    async with compressing(codec) as pair:
        await fine(pair)
        data = [dense(3 * MIB), dense(20_000)]
        sending, receiving = pair.ab.send(data), pair.ba.recv(timeout=20)
        data[1].add_(1)
        with pytest.raises(UsageError, match="written to while it was being sent"):
            await sending
        with pytest.raises(RemoteError, match="the sender failed: a tensor was written to"):
            await receiving
        await fine(pair)


@pytest.mark.asyncio
async def test_a_chunk_that_changes_under_its_checksum_is_said_to_be_written_to(compressing_gate: Gate) -> None:
    """It goes as it is, so what is sent is the tensor's own memory: the receiver's checksum notices, and the sender knows why."""
    async with compressing("lz4") as pair:
        await fine(pair)
        transport = stop_reading(pair.b)
        data = torch.cat([dense(MIB), torch.randint(0, 256, (12 * MIB,), dtype=torch.uint8), dense(MIB)])
        sending, receiving = pair.ab.send(data), pair.ba.recv(timeout=20)
        await until_sending(pair)
        await asyncio.sleep(0.05)
        data.add_(1)
        transport.resume_reading()
        with pytest.raises(UsageError, match="written to while it was being sent"):
            await sending
        with pytest.raises(RemoteError, match="a tensor was written to"):
            await receiving
        await fine(pair)


# ---- the end of the link, or of a worker


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_the_link_is_lost_at_any_moment(seed: int) -> None:
    rng = random.Random(seed)
    async with compressing("zstd", max_inflight=1) as pair:
        for _ in range(6):
            await fine(pair)
            works: list[AsyncWork[Any]] = [pair.ab.send(dense(rng.choice([100_000, 4 * MIB]))) for _ in range(3)]
            works += [pair.ba.send(dense(rng.choice([100_000, 4 * MIB]))) for _ in range(3)]
            works += [group.recv() for group in (pair.ab, pair.ba) for _ in range(3)]
            await asyncio.sleep(rng.random() * 0.03)
            link = link_of(pair.a)
            link._conn.abort()  # type: ignore[union-attr]
            link.on_lost(ConnectionResetError("cut"))
            results = [await outcome(work) for work in works]
            assert all(result is None or isinstance(result, (PeerLost, torch.Tensor)) for result in results)
            works.clear()
            results.clear()
            while any(worker.stats().links[0].unread_messages for worker in (pair.a, pair.b) if worker.stats().links):
                await asyncio.sleep(0.01)
            for group in (pair.ab, pair.ba):
                await drain(group)


async def drain(group: Any) -> None:
    """Receive what an ended link has left behind."""
    with contextlib.suppress(TimeoutError, PeerError):
        while True:
            await group.recv(timeout=0.02)


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", ["compressing", "sending", "decompressing"])
async def test_a_worker_that_closes_in_the_middle(
    stage: str, compressing_gate: Gate, decompressing_gate: Gate, complaints: list[str]
) -> None:
    gate = {"compressing": compressing_gate, "decompressing": decompressing_gate}.get(stage)
    async with pair_of(config_of("zstd")) as pair:
        await fine(pair)
        transport = stop_reading(pair.b) if stage == "sending" else None
        if gate is not None:
            gate.shut()
        data = torch.randint(0, 200, (LARGE // 8,)).view(torch.uint8)
        sending, receiving = pair.ab.send(data), pair.ba.recv()
        if gate is None:
            await until_sending(pair)
        else:
            await gate.wait_reached()
        closing = pair.a.close(timeout=0.1)
        await asyncio.sleep(0.2)
        if gate is not None:
            gate.open()
        if transport is not None:
            transport.resume_reading()
        await closing.async_wait(20)
        assert isinstance(await outcome(sending), ClosedError)
        assert isinstance(await outcome(receiving), PeerError)
        for side in (pair.a, pair.b):
            await all_back(side)
        assert len(complaints) == 1
        assert "closed before it could deliver 1 message" in complaints.pop()


@pytest.mark.asyncio
async def test_a_receiver_that_closes_while_it_decompresses(decompressing_gate: Gate) -> None:
    async with pair_of(config_of("lz4")) as pair:
        await fine(pair)
        decompressing_gate.shut()
        sending, receiving = pair.ab.send(dense(LARGE)), pair.ba.recv()
        await decompressing_gate.wait_reached()
        closing = pair.b.close(timeout=0)
        await asyncio.sleep(0.1)
        decompressing_gate.open()
        await closing.async_wait(20)
        assert isinstance(await outcome(sending), PeerError)
        assert isinstance(await outcome(receiving), ClosedError)
        for side in (pair.a, pair.b):
            await all_back(side)


async def swallow(comm: Worker) -> None:
    """In another process: receive for ever."""
    while True:
        await comm.recv("a:0")


@pytest.mark.asyncio
async def test_a_peer_that_is_killed_in_the_middle() -> None:
    async with compressing("zstd") as pair:
        async with worker(pair.a, "c:0", swallow) as peer:
            await pair.a.send("hello", "c:0", timeout=20)
            works = [pair.a.send(dense(20 * MIB), "c:0") for _ in range(3)]
            await asyncio.sleep(0.02)
            peer.kill()
            results = [await outcome(work) for work in works]
            assert all(result is None or isinstance(result, PeerLost) for result in results)
            assert isinstance(results[-1], PeerLost)
        works.clear()
        gc.collect()
        await fine(pair)
        assert coding_of(pair.a).encoder.running == 0
        assert pool_of(pair.a).stats().leased_bytes == 0
