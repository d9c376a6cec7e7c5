"""Codecs at work for what is received: in order, off the loop, waiting for contexts, and all comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from aiorlinf.codec.base import Context
from aiorlinf.codec.codecs.zstd import Zstd, ZstdParameters
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decoder import Decoder
from aiorlinf.codec.decompressing import Decompressor, Record
from aiorlinf.codec.memory import Memory
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.errors import AiorlinfError, ClosedError, WireError
from aiorlinf.work.home import LoopHome
from tests.codec.material import compressed, dense, make_codec, make_compressor, random_bytes, view_of

CHUNK = 64 * 1024


@pytest_asyncio.fixture
async def home() -> AsyncIterator[LoopHome]:
    made = LoopHome(asyncio.get_running_loop(), name="codecs")
    yield made
    await made.close()


class Side:
    """What one worker has."""

    def __init__(self, home: LoopHome, limit: int = 1) -> None:
        self.codec = Zstd(ZstdParameters(max_inflight=limit))
        self.pool = ContextPool(self.codec.context, limit)
        self.buffers = TensorBufferPool(64 << 20)
        self.stats = CompressionStats()
        self.decoder = Decoder(home, self.contexts)

    def contexts(self, number: int) -> ContextPool:
        if number != 2:
            raise WireError(f"codec number {number} is not known here")
        return self.pool

    def wire(self, data: torch.Tensor) -> bytes:
        return compressed(make_compressor(view_of(data), self.codec, chunk=CHUNK))

    async def clean(self) -> None:
        """All contexts and buffers are back."""
        for _ in range(2000):
            if self.pool.idle == self.pool.made and not self.buffers.stats().leased_bytes and not self.decoder.running:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{self.pool.idle} of {self.pool.made} contexts, {self.buffers.stats()}, {self.decoder.running}")


class Leaf:
    """One leaf on its way in. Meets `RecordOwner`."""

    def __init__(self, side: Side, wire: bytes, nbytes: int) -> None:
        self.out = torch.zeros(nbytes, dtype=torch.uint8)
        self.wanted = True
        self.spans: list[tuple[float, float]] | None = []
        self.errors: list[AiorlinfError] = []
        self.finished: list[int] = []
        self.decompressor = Decompressor(self.out, side.buffers, (1, 2), side.stats)
        _, records = self.decompressor.feed(memoryview(wire))
        self.count = len(records)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for record in records:
            side.decoder.add(record, self)

    def finish(self, record: Record, error: AiorlinfError | None) -> None:
        self.decompressor.finish(record)
        self.finished.append(record.index)
        if error is not None:
            self.errors.append(error)
        if len(self.finished) == self.count:
            self.over.set_result(None)


@pytest.mark.asyncio
async def test_all_that_is_received_is_decompressed(home: LoopHome) -> None:
    side = Side(home)
    data = torch.cat([dense(5 * CHUNK), random_bytes(CHUNK), dense(7)])
    leaves = [Leaf(side, side.wire(data), len(data)) for _ in range(6)]
    await asyncio.gather(*(leaf.over for leaf in leaves))
    assert all(torch.equal(leaf.out, data) and leaf.decompressor.done for leaf in leaves)
    assert sorted(leaves[0].finished) == list(range(7))
    assert side.pool.made == 1
    await side.clean()


@pytest.mark.asyncio
async def test_what_is_short_is_decompressed_at_once_but_not_much_of_it_in_one_turn(home: LoopHome) -> None:
    side = Side(home, limit=2)
    data = dense(CHUNK)
    wire = side.wire(data)
    leaves = [Leaf(side, wire, len(data)) for _ in range(6)]
    assert [leaf.decompressor.done for leaf in leaves] == [True] * 4 + [False] * 2
    await asyncio.gather(*(leaf.over for leaf in leaves))
    assert all(torch.equal(leaf.out, data) for leaf in leaves)
    damaged = bytearray(wire)
    damaged[-3] ^= 4
    await asyncio.sleep(0)
    leaf = Leaf(side, bytes(damaged), len(data))
    assert leaf.over.done()
    assert [error.message for error in leaf.errors] == ["chunk 0 of a compressed tensor does not match its checksum"]
    await side.clean()


@pytest.mark.asyncio
async def test_receivers_wait_for_a_context_that_senders_have(home: LoopHome) -> None:
    side = Side(home)
    held = side.pool.try_acquire()
    assert held is not None
    data = dense(8 * CHUNK)
    leaf = Leaf(side, side.wire(data), len(data))
    await asyncio.sleep(0.02)
    assert leaf.finished == []
    assert side.pool.waits == 1
    side.pool.release(held)
    await asyncio.wait_for(leaf.over, 5)
    assert torch.equal(leaf.out, data)
    await side.clean()


@pytest.mark.asyncio
async def test_what_nobody_wants_any_more_is_skipped(home: LoopHome) -> None:
    side = Side(home)
    held = side.pool.try_acquire()
    assert held is not None
    data = dense(8 * CHUNK)
    unwanted, wanted = (Leaf(side, side.wire(data), len(data)) for _ in range(2))
    await asyncio.sleep(0.01)
    unwanted.wanted = False
    side.pool.release(held)
    await asyncio.gather(unwanted.over, wanted.over)
    assert unwanted.errors == []
    assert not unwanted.decompressor.done
    assert torch.equal(unwanted.out, torch.zeros(len(data), dtype=torch.uint8))
    assert torch.equal(wanted.out, data)
    await side.clean()


@pytest.mark.asyncio
async def test_corrupt_records_concern_their_leaf_only(home: LoopHome) -> None:
    side = Side(home)
    data = dense(3 * CHUNK)
    wire = bytearray(side.wire(data))
    wire[-5] ^= 1
    bad, good = Leaf(side, bytes(wire), len(data)), Leaf(side, side.wire(data), len(data))
    await asyncio.gather(bad.over, good.over)
    assert [error.message for error in bad.errors] == ["chunk 2 of a compressed tensor does not match its checksum"]
    assert torch.equal(good.out, data)
    await side.clean()


@pytest.mark.asyncio
async def test_a_codec_that_is_not_there(home: LoopHome) -> None:
    side = Side(home)
    data = dense(2 * CHUNK)
    wire = compressed(make_compressor(view_of(data), make_codec("lz4"), chunk=CHUNK))
    leaf = Leaf(side, wire, len(data))
    await leaf.over
    assert [error.message for error in leaf.errors] == ["codec number 1 is not known here"] * 2
    await side.clean()


@pytest.mark.asyncio
async def test_no_memory_is_an_error_of_its_leaf(home: LoopHome) -> None:
    side = Side(home)

    class Poor(Context):
        def compress_into(self, src: Memory, dst: Memory) -> int | None:
            raise MemoryError

        def decompress_into(self, src: Memory, dst: Memory) -> None:
            raise MemoryError("not a byte")

    side.pool = ContextPool(Poor, 1)
    data = dense(CHUNK)
    leaf = Leaf(side, side.wire(data), len(data))
    await leaf.over
    assert isinstance(leaf.errors[0], WireError)
    assert leaf.errors[0].message == "a compressed tensor cannot be decompressed here: MemoryError: not a byte"

    def make() -> Context:
        raise MemoryError("no room")

    side.pool = ContextPool(make, 1)
    leaf = Leaf(side, side.wire(data), len(data))
    await leaf.over
    assert leaf.errors[0].message == "no memory for a codec: no room"
    assert side.buffers.stats().leased_bytes == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("wait", [False, True])
async def test_the_end_of_the_worker_fails_what_is_not_done(wait: bool) -> None:
    home = LoopHome(asyncio.get_running_loop(), name="codecs")
    side = Side(home)
    data = dense(30 * CHUNK)
    held = side.pool.try_acquire() if wait else None
    leaves = [Leaf(side, side.wire(data), len(data)) for _ in range(3)]
    await asyncio.sleep(0)
    side.pool.close()
    await home.close()
    leaves.append(Leaf(side, side.wire(data), len(data)))
    await asyncio.wait_for(asyncio.gather(*(leaf.over for leaf in leaves)), 5)
    assert all(isinstance(error, ClosedError) for leaf in leaves for error in leaf.errors)
    assert leaves[-1].errors
    if held is not None:
        side.pool.release(held)
    await side.clean()


@pytest.mark.asyncio
async def test_the_end_of_the_loop_while_it_waits_for_a_context() -> None:
    home = LoopHome(asyncio.get_running_loop(), name="codecs")
    side = Side(home)
    held = side.pool.try_acquire()
    assert held is not None
    data = dense(CHUNK)
    leaf = Leaf(side, side.wire(data), len(data))
    await asyncio.sleep(0.01)
    await home.close()
    await asyncio.wait_for(leaf.over, 5)
    assert isinstance(leaf.errors[0], ClosedError)
    side.pool.release(held)
    await side.clean()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_given_up_at_any_moment(home: LoopHome, seed: int) -> None:
    rng = random.Random(seed)
    side = Side(home)
    data = dense(12 * CHUNK)
    wire = side.wire(data)
    for _ in range(20):
        leaves = [Leaf(side, wire, len(data)) for _ in range(3)]
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.random() * 0.003)
        for leaf in leaves:
            leaf.wanted = rng.random() < 0.3
        await asyncio.gather(*(leaf.over for leaf in leaves))
        assert all(torch.equal(leaf.out, data) for leaf in leaves if leaf.wanted)
    await side.clean()
