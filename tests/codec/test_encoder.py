"""Codecs at work for what is sent: in turns, off the loop, with no more contexts than there are, all of which come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from aiorlinf.codec.codecs.zstd import Zstd, ZstdParameters
from aiorlinf.codec.compressing import LeafCompressor
from aiorlinf.codec.contexts import ContextPool, ContextSource
from aiorlinf.codec.encoder import Encoder
from aiorlinf.codec.payload import PayloadCompressor
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.work.home import LoopHome
from tests.codec.material import dense, random_bytes, view_of

CHUNK = 64 * 1024


@pytest_asyncio.fixture
async def home() -> AsyncIterator[LoopHome]:
    made = LoopHome(asyncio.get_running_loop(), name="codecs")
    yield made
    await made.close()


class Side:
    """What one worker has."""

    def __init__(self, home: LoopHome, *, limit: int = 2, max_bytes: int = 64 << 20, ahead: int = 4 << 20) -> None:
        self.codec = Zstd(ZstdParameters(max_inflight=limit))
        self.contexts = ContextPool(self.codec.context, limit)
        self.buffers = TensorBufferPool(max_bytes)
        self.stats = CompressionStats()
        self.encoder = Encoder(home)
        self.ahead = ahead

    def make(self, src: memoryview, contexts: ContextSource) -> LeafCompressor:
        return LeafCompressor(src, self.codec, contexts, self.buffers, self.stats, chunk_bytes=CHUNK)

    def begin(self, *leaves: torch.Tensor, at_once: int = 0) -> Reading:
        """Start to compress a payload."""
        payload = PayloadCompressor([(view_of(leaf), True) for leaf in leaves], self.make, ahead=self.ahead)
        reading = Reading(payload)
        self.encoder.add(payload, self.contexts, at_once)
        return reading

    async def clean(self) -> None:
        """All contexts and buffers are back."""
        for _ in range(2000):
            if self.contexts.idle == self.contexts.made and not self.buffers.stats().leased_bytes and not self.encoder.running:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{self.contexts.idle} of {self.contexts.made} contexts, {self.buffers.stats()}, {self.encoder.running}")


class Reading:
    """Takes a payload as a network would."""

    def __init__(self, payload: PayloadCompressor) -> None:
        self.payload = payload
        self.ready = asyncio.Event()
        payload.on_ready = self.ready.set

    async def all(self, pause: float = 0.0) -> int:
        """Take everything; how many bytes that were."""
        size = 0
        while not self.payload.over:
            chunk = self.payload.take(1 << 20)
            if chunk is None:
                self.ready.clear()
                await self.ready.wait()
                continue
            size += chunk[1]
            if pause:
                await asyncio.sleep(pause)
            self.payload.sent()
        return size


@pytest.mark.asyncio
async def test_payloads_take_turns(home: LoopHome) -> None:
    side = Side(home, ahead=2 << 20)
    large = side.begin(dense(400 * CHUNK))
    small = [side.begin(dense(CHUNK)) for _ in range(3)]
    reading = asyncio.create_task(large.all())
    await asyncio.gather(*(each.all() for each in small))
    assert not reading.done(), "the small ones waited for the large one"
    await reading
    assert side.stats.tensors == 4
    await side.clean()


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_payloads_of_one_worker_do_not_take_each_others_contexts_away(home: LoopHome, limit: int) -> None:
    side = Side(home, limit=limit)
    readings = [side.begin(dense(20 * CHUNK), dense(1000)) for _ in range(10)]
    await asyncio.gather(*(each.all() for each in readings))
    assert side.stats.tensors == 20
    assert not side.stats.raw
    assert side.contexts.made <= min(limit, 2)
    await side.clean()


@pytest.mark.asyncio
async def test_a_sender_does_not_wait_for_a_context_that_receivers_have(home: LoopHome) -> None:
    side = Side(home, limit=1)
    held = side.contexts.try_acquire()
    assert held is not None
    assert await asyncio.wait_for(side.begin(dense(20 * CHUNK), dense(CHUNK)).all(), 5) == 21 * CHUNK + 2 * 28
    assert side.stats.raw == {RawReason.NO_CONTEXT: 2}
    side.contexts.release(held)
    await side.begin(dense(20 * CHUNK)).all()
    assert side.stats.tensors == 1
    await side.clean()


@pytest.mark.asyncio
async def test_a_waiting_receiver_comes_before_the_next_batch(home: LoopHome) -> None:
    side = Side(home, limit=1)
    reading = side.begin(dense(200 * CHUNK))
    waiting = asyncio.create_task(side.contexts.acquire())
    taking = asyncio.create_task(reading.all())
    context = await asyncio.wait_for(waiting, 5)
    assert not taking.done()
    side.contexts.release(context)
    await taking
    await side.clean()


@pytest.mark.asyncio
async def test_without_buffers_it_goes_as_it_is(home: LoopHome) -> None:
    side = Side(home, max_bytes=0)
    assert await asyncio.wait_for(side.begin(dense(20 * CHUNK)).all(), 5) == 20 * CHUNK + 28
    assert side.stats.raw == {RawReason.NO_BUFFER: 1}
    await side.clean()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_dropped_at_any_moment(home: LoopHome, seed: int) -> None:
    rng = random.Random(seed)
    side = Side(home, limit=1, max_bytes=16 * CHUNK, ahead=4 * CHUNK)
    for _ in range(15):
        readings = [side.begin(torch.cat([dense(8 * CHUNK), random_bytes(CHUNK)]), dense(CHUNK)) for _ in range(3)]
        tasks = [asyncio.create_task(reading.all()) for reading in readings]
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.random() * 0.004)
        for reading, task in zip(readings, tasks, strict=True):
            reading.payload.drop()
            reading.payload.sent()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await side.clean()
    assert await side.begin(dense(30 * CHUNK)).all() < 10 * CHUNK
    await side.clean()


@pytest.mark.asyncio
async def test_what_is_short_is_compressed_at_once_but_not_much_of_it_in_one_turn(home: LoopHome) -> None:
    side = Side(home)
    readings = [side.begin(dense(CHUNK), dense(100), at_once=2 * CHUNK) for _ in range(6)]
    assert [reading.payload.take(1 << 20) is not None for reading in readings] == [True] * 3 + [False] * 3
    assert side.begin(dense(3 * CHUNK), at_once=2 * CHUNK).payload.take(1) is None
    await asyncio.gather(*(reading.all() for reading in readings[3:]))
    for reading in readings:
        reading.payload.sent()
    await asyncio.sleep(0)
    late = side.begin(dense(CHUNK), at_once=2 * CHUNK)
    assert late.payload.take(1 << 20) is not None
    late.payload.sent()
    side.encoder._queue.clear()


@pytest.mark.asyncio
async def test_what_is_short_waits_for_a_thread_where_there_is_no_context(home: LoopHome) -> None:
    side = Side(home, limit=1)
    large = side.begin(dense(200 * CHUNK))
    short = side.begin(dense(CHUNK), at_once=2 * CHUNK)
    assert short.payload.take(1) is None
    await asyncio.gather(large.all(), short.all())
    assert side.stats.tensors == 2
    await side.clean()


@pytest.mark.asyncio
async def test_a_closed_home_ends_payloads_and_gives_all_back() -> None:
    home = LoopHome(asyncio.get_running_loop(), name="codecs")
    side = Side(home)
    under_way = [side.begin(dense(100 * CHUNK)) for _ in range(5)]
    await home.close()
    late = side.begin(dense(3 * CHUNK))
    await side.clean()
    assert all(reading.payload.dropped for reading in [*under_way, late])


@pytest.mark.asyncio
async def test_a_codec_that_finds_no_memory_for_its_state(home: LoopHome) -> None:
    side = Side(home)

    def make() -> ContextPool:
        raise MemoryError

    side.contexts = ContextPool(make, 1)  # type: ignore[arg-type]  # it makes none
    assert await asyncio.wait_for(side.begin(dense(3 * CHUNK)).all(), 5) == 3 * CHUNK + 28
    assert side.stats.raw == {RawReason.NO_CONTEXT: 1}


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_codecs_work(home: LoopHome) -> None:
    side = Side(home)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await side.begin(dense(200 * CHUNK)).all()
    ticking.cancel()
    assert turns > 10
    await side.clean()
