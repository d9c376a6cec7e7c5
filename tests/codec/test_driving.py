"""Codecs in private threads: overlapping, in order, and cancelled in every state."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf.codec.codecs.zstd import Zstd, ZstdParameters
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.driving import CompressionRun, decompress_record
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.errors import ClosedError, WireError
from aiorlinf.work.home import LoopHome
from tests.codec.material import compressed, dense, make_compressor, random_bytes, view_of

CHUNK = 64 * 1024


@pytest_asyncio.fixture
async def home() -> AsyncIterator[LoopHome]:
    made = LoopHome(asyncio.get_running_loop(), name="codecs")
    yield made
    await made.close()


class Side:
    """What one worker has."""

    def __init__(self, limit: int = 1, max_bytes: int = 64 << 20) -> None:
        self.codec = Zstd(ZstdParameters(max_inflight=limit))
        self.contexts = ContextPool(self.codec.context, limit)
        self.buffers = TensorBufferPool(max_bytes)
        self.stats = CompressionStats()

    def run(self, home: LoopHome, data: torch.Tensor, **options: int) -> CompressionRun:
        compressor = make_compressor(view_of(data), self.codec, contexts=self.contexts, buffers=self.buffers, stats=self.stats, chunk=CHUNK)
        return CompressionRun(home, compressor, **options)

    async def clean(self) -> None:
        """All contexts and buffers are back."""
        for _ in range(2000):
            if self.contexts.idle == self.contexts.made and not self.buffers.stats().leased_bytes:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{self.contexts.idle} of {self.contexts.made} contexts, {self.buffers.stats()}")


async def all_pieces(run: CompressionRun) -> bytes:
    wire = b""
    while pieces := await run.pieces():
        for piece in pieces:
            wire += piece.head + bytes(piece.body)
            piece.release()
    return wire


async def received(home: LoopHome, wire: bytes, nbytes: int, side: Side) -> torch.Tensor:
    out = torch.empty(nbytes, dtype=torch.uint8)
    decompressor = Decompressor(out, side.buffers, (1, 2), side.stats)
    _, records = decompressor.feed(memoryview(wire))
    await asyncio.gather(*(decompress_record(home, decompressor, record, side.contexts) for record in records))
    decompressor.end()
    assert decompressor.done
    return out


@pytest.mark.asyncio
@pytest.mark.parametrize("ahead", [1, 2, 5])
async def test_there_and_back(home: LoopHome, ahead: int) -> None:
    side = Side(limit=2)
    data = torch.cat([dense(5 * CHUNK), random_bytes(CHUNK), dense(7)])
    run = side.run(home, data, ahead=ahead)
    wire = await all_pieces(run)
    assert len(wire) < len(data)
    assert await run.pieces() == []
    assert torch.equal(await received(home, wire, len(data), side), data)
    await side.clean()


@pytest.mark.asyncio
async def test_what_stays_raw_has_no_pieces(home: LoopHome) -> None:
    side = Side()
    run = side.run(home, random_bytes(3 * CHUNK))
    assert await run.pieces() == []
    assert run.compressor.raw is RawReason.NOT_SMALLER
    await side.clean()


@pytest.mark.asyncio
async def test_receivers_wait_for_the_only_context_and_all_get_it(home: LoopHome) -> None:
    side = Side(limit=1)
    data = dense(8 * CHUNK)
    wire = compressed(make_compressor(view_of(data), side.codec, chunk=CHUNK))
    outs = await asyncio.gather(*(received(home, wire, len(data), side) for _ in range(6)))
    assert all(torch.equal(out, data) for out in outs)
    assert side.contexts.made == 1
    assert side.contexts.waits > 0
    await side.clean()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_cancelled_at_any_moment(home: LoopHome, seed: int) -> None:
    rng = random.Random(seed)
    side = Side(limit=1, max_bytes=4 * CHUNK)
    data = torch.cat([dense(4 * CHUNK), random_bytes(CHUNK), dense(CHUNK)])
    good = compressed(make_compressor(view_of(data), side.codec, chunk=CHUNK))

    async def send() -> None:
        run = side.run(home, data)
        try:
            await all_pieces(run)
        finally:
            run.close()

    for _ in range(15):
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(send()) for _ in range(2)]
        tasks += [asyncio.create_task(received(home, good, len(data), side)) for _ in range(2)]
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.random() * 0.004)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await side.clean()
    assert torch.equal(await received(home, good, len(data), side), data)


@pytest.mark.asyncio
async def test_a_cancelled_call_loses_no_piece(home: LoopHome) -> None:
    side = Side(limit=2)
    data = dense(6 * CHUNK)
    run = side.run(home, data)
    wire = b""
    rng = random.Random(0)
    while not run.compressor.finished or run._ready:
        task = asyncio.create_task(run.pieces())
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            for piece in await task:
                wire += piece.head + bytes(piece.body)
                piece.release()
    assert torch.equal(await received(home, wire, len(data), side), data)
    await side.clean()


@pytest.mark.asyncio
async def test_close_wakes_the_one_who_waits(home: LoopHome) -> None:
    side = Side()
    run = side.run(home, dense(4 * CHUNK))
    waiting = asyncio.create_task(run.pieces())
    await asyncio.sleep(0)
    run.close()
    with pytest.raises(ClosedError, match="given up"):
        await waiting
    with pytest.raises(ClosedError):
        await run.pieces()
    await side.clean()


@pytest.mark.asyncio
async def test_a_closed_home_fails_both_sides_and_gives_all_back() -> None:
    home = LoopHome(asyncio.get_running_loop(), name="codecs")
    side = Side()
    data = dense(3 * CHUNK)
    wire = compressed(make_compressor(view_of(data), side.codec, chunk=CHUNK))
    out = torch.empty(len(data), dtype=torch.uint8)
    decompressor = Decompressor(out, side.buffers, (2,), side.stats)
    _, records = decompressor.feed(memoryview(wire))
    await home.close()
    with pytest.raises(ClosedError):
        await side.run(home, data).pieces()
    for record in records:
        with pytest.raises(ClosedError):
            await decompress_record(home, decompressor, record, side.contexts)
    assert not decompressor.done
    await side.clean()


@pytest.mark.asyncio
async def test_a_closed_line_fails_who_waits_in_it(home: LoopHome) -> None:
    side = Side()
    data = dense(CHUNK)
    held = side.contexts.try_acquire()
    assert held is not None
    waiting = asyncio.create_task(received(home, compressed(make_compressor(view_of(data), side.codec)), len(data), side))
    await asyncio.sleep(0.01)
    side.contexts.close()
    with pytest.raises(ClosedError, match="payload waited to be decompressed"):
        await waiting
    side.contexts.release(held)
    await side.clean()


@pytest.mark.asyncio
async def test_corrupt_records(home: LoopHome) -> None:
    side = Side()
    data = dense(3 * CHUNK)
    wire = bytearray(compressed(make_compressor(view_of(data), side.codec, chunk=CHUNK)))
    wire[-5] ^= 1
    with pytest.raises(WireError, match="chunk 2 of a compressed tensor does not match its checksum"):
        await received(home, bytes(wire), len(data), side)
    await side.clean()


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_codecs_work(home: LoopHome) -> None:
    side = Side()
    data = dense(200 * CHUNK)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await all_pieces(side.run(home, data))
    ticking.cancel()
    assert turns > 200  # at least as often as chunks were handed over
    await side.clean()
