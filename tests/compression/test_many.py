"""Many who send and receive at once, with hardly any buffers and one context: nothing wrong, nothing stuck."""

from __future__ import annotations

import asyncio
import random
import zlib
from typing import Any

import pytest
import torch

from aiorlinf import Worker
from aiorlinf.codec.pool import TensorBufferPool
from tests.codec.material import MIB, dense, random_bytes, view_of
from tests.compression.conftest import all_back, coding_of, compressing, config_of, pair_of, pool_of
from tests.hypothesis_profiles import TRIES
from tests.peers import worker

SENDERS = 16
MESSAGES = max(10, round(300 * TRIES)) // SENDERS * SENDERS
"""2,000 with AIORLINF_TRIES=7."""

SOURCES = {"dense": dense(8 * MIB), "random": random_bytes(8 * MIB), "zeros": torch.zeros(8 * MIB, dtype=torch.uint8)}


def make(rng: random.Random) -> torch.Tensor:
    """From 1 kB to 8 MB, most of them small."""
    size = int(1000 * 8000 ** (rng.random() ** 2))
    source = SOURCES[rng.choice(list(SOURCES))]
    start = rng.randrange(len(source) - size + 1)
    return source[start : start + size]


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(view_of(tensor))


async def send_all(comm: Worker, peer: str, tag: int, count: int) -> list[int]:
    """Send so many messages on one tag, a few at a time; their checksums."""
    rng = random.Random(tag)
    sums: list[int] = []
    under_way: list[Any] = []
    for _ in range(count):
        data = make(rng)
        sums.append(checksum(data))
        under_way.append(comm.send([data, data[: len(data) // 3]], peer, tag=tag))
        if len(under_way) > 2:
            await under_way.pop(0)
    await asyncio.gather(*under_way)
    return sums


async def receive_all(comm: Worker, peer: str, tag: int, count: int) -> list[int]:
    """Receive so many; the checksums of what came."""
    rng = random.Random(tag + 1000)
    sums = []
    for _ in range(count):
        data, third = await comm.recv(peer, tag=tag, timeout=50)
        assert torch.equal(third, data[: len(data) // 3])
        sums.append(checksum(data))
        if rng.random() < 0.1:
            await asyncio.sleep(0.003)
    return sums


def starve(comm: Worker) -> None:
    """Two buffers of the size of a chunk for what is compressed; what is received needs no more than it has, and gets memory of its own."""
    coding = coding_of(comm)
    coding.provider._buffers = TensorBufferPool(2 * MIB + 8192)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
async def test_sixteen_senders_and_sixteen_receivers_in_one_process(codec: str) -> None:
    keys: dict[str, Any] = {"max_inflight": 1} if codec == "zstd" else {}
    async with compressing(codec, collective={"window_bytes": 16 * MIB}, **keys) as pair:
        starve(pair.a)
        starve(pair.b)
        half = SENDERS // 2
        each = MESSAGES // SENDERS
        sends = [send_all(pair.a, "b:0", tag, each) for tag in range(half)]
        sends += [send_all(pair.b, "a:0", tag, each) for tag in range(half, SENDERS)]
        receives = [receive_all(pair.b, "a:0", tag, each) for tag in range(half)]
        receives += [receive_all(pair.a, "b:0", tag, each) for tag in range(half, SENDERS)]
        results = await asyncio.gather(*sends, *receives)
        assert results[:SENDERS] == results[SENDERS:]
        stats = [pair.sent(), pair.received()]
        assert sum(each["tensors"] for each in stats) > 10
        assert sum(each["raw"].get("no_buffer", 0) for each in stats) > 0
        assert all(contexts.made <= 1 or contexts.limit is None for contexts in coding_of(pair.a).provider._contexts.values())


async def echo_sums(comm: Worker, count: int, each: int) -> list[list[int]]:
    """In another process: half of the senders and receivers."""
    starve(comm)
    half = count // 2
    results = await asyncio.gather(
        *(receive_all(comm, "a:0", tag, each) for tag in range(half)),
        *(send_all(comm, "a:0", tag, each) for tag in range(half, count)),
    )
    await all_back(comm)
    return results


@pytest.mark.asyncio
async def test_sixteen_senders_and_sixteen_receivers_in_two_processes() -> None:
    each = max(1, MESSAGES // SENDERS // 2)
    async with pair_of(config_of("zstd", max_inflight=1)) as pair:
        starve(pair.a)
        async with worker(pair.a, "c:0", echo_sums, SENDERS, each, loop="uvloop") as peer:
            half = SENDERS // 2
            results = await asyncio.gather(
                *(send_all(pair.a, "c:0", tag, each) for tag in range(half)),
                *(receive_all(pair.a, "c:0", tag, each) for tag in range(half, SENDERS)),
            )
            assert await peer.result() == results
        await all_back(pair.a)
        assert pool_of(pair.a).stats().leased_bytes == 0


@pytest.mark.asyncio
async def test_the_loop_is_not_held_up() -> None:
    """A tick every 10 ms beside a dict of many tensors, both ways through a codec on the same loop."""
    tensors = {f"t{index}": dense(100_000, seed=index % 7) for index in range(600)}
    async with compressing("lz4") as pair:
        await pair.trip(dense(100_000))
        loop = asyncio.get_running_loop()
        loop.set_debug(False)
        gaps = []

        async def tick() -> None:
            last = loop.time()
            while True:
                await asyncio.sleep(0.01)
                now = loop.time()
                gaps.append(now - last)
                last = now

        ticking = asyncio.create_task(tick())
        got = await pair.trip(tensors)
        ticking.cancel()
        assert list(got) == list(tensors)
        assert sorted(gaps)[-2] < 0.1, "a busy machine may hold it up once"
        del got
