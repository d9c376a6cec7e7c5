"""The pool under real messages, from another process."""

from __future__ import annotations

import asyncio
import resource
import zlib
from collections import deque
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from aiorlinf import Worker, init
from tests.peers import worker

MIB = 1 << 20


def settings(**collective: Any) -> dict[str, Any]:
    return {"cluster": {"collective": collective}}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


async def send_alike(comm: Worker, count: int, nbytes: int) -> None:
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    for number in range(count):
        tensor[-1] = number % 251
        await comm.send(tensor, "a:0")


def crc(tensor: torch.Tensor) -> tuple[int, int]:
    array: Any = tensor.numpy()
    return len(array), zlib.crc32(array)


async def send_random(comm: Worker, count: int) -> list[tuple[int, int]]:
    """Returns what `crc` says of what it sent."""
    chance = np.random.default_rng(5)
    sums = []
    for _ in range(count):
        tensor = torch.frombuffer(bytearray(chance.bytes(int(chance.integers(1, MIB)))), dtype=torch.uint8)
        sums.append(crc(tensor))
        await comm.send(tensor, "a:0")
    return sums


@pytest.mark.asyncio
async def test_steady_traffic_touches_no_fresh_pages() -> None:
    count, nbytes, kept = 300, 4 * MIB, 8
    async with init("a:0", config=settings(backend="stream")) as comm, worker(comm, "b:0", send_alike, count, nbytes):
        last: deque[torch.Tensor] = deque(maxlen=kept)
        faults = resident = 0
        for number in range(count):
            if number == 50:
                faults, resident = page_faults(), resident_bytes()
            last.append(await comm.recv("b:0"))
            assert int(last[-1][-1]) == number % 251
        faults, resident = page_faults() - faults, resident_bytes() - resident
        stats = comm.stats().buffer_pool
    assert [int(tensor[-1]) for tensor in last] == [number % 251 for number in range(count - kept, count)]
    assert stats.unpooled == stats.evictions == 0
    assert stats.leased_bytes == kept * nbytes
    assert stats.misses <= kept + 2 + 64 * MIB // nbytes  # those in use, and what may be under way within the window
    assert stats.hits == count - stats.misses
    assert resident < 16 * MIB
    assert faults < 20 * (count - 50)  # a message is 1024 pages


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["stream", "gloo"])
async def test_lengths_and_contents_are_those_of_this_message(backend: Literal["stream", "gloo"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORLINF_DEBUG_POOL", "1")
    count = 1000 if backend == "stream" else 200
    async with init("a:0", config=settings(backend=backend)) as comm, worker(comm, "b:0", send_random, count) as peer:
        sums = []
        kept: deque[torch.Tensor] = deque(maxlen=3)
        for _ in range(count):
            tensor = await comm.recv("b:0")
            sums.append(crc(tensor))
            kept.append(tensor)
            del tensor
        assert sums == await peer.result()
        stats = comm.stats().buffer_pool
        # The smallest messages need no buffer.
        assert stats.hits + stats.misses > 0.9 * count
        assert stats.misses < 50  # by then there is one for every size that may be under way
        assert [crc(tensor) for tensor in kept] == sums[-3:]


@pytest.mark.asyncio
async def test_when_receivers_hold_everything_memory_is_their_own() -> None:
    config = settings(backend="stream", tensor_buffer_pool={"max_bytes": 2 * MIB})
    async with init("a:0", config=config) as comm, worker(comm, "b:0", send_alike, 6, MIB):
        held = [await comm.recv("b:0") for _ in range(6)]
        stats = comm.stats().buffer_pool
        assert (stats.max_bytes, stats.leased_bytes, stats.misses, stats.unpooled) == (2 * MIB, 2 * MIB, 2, 4)
        assert [int(tensor[-1]) for tensor in held] == list(range(6))


@pytest.mark.asyncio
async def test_received_tensors_outlive_the_worker() -> None:
    async with init("a:0", config=settings(backend="stream")) as comm, worker(comm, "b:0", send_alike, 3, MIB):
        held = [await comm.recv("b:0") for _ in range(3)]
    assert [int(tensor[-1]) for tensor in held] == [0, 1, 2]
    assert all(int(tensor.sum()) == MIB - 1 + number for number, tensor in enumerate(held))
    held.clear()
    assert comm.stats().buffer_pool.cached_bytes == 0


@pytest.mark.asyncio
async def test_a_message_to_oneself_is_received_into_the_pool() -> None:
    async with init("a:0") as comm:
        for number in range(3):
            work = comm.send(torch.full((MIB,), number, dtype=torch.uint8), "a:0")
            assert int((await comm.recv("a:0"))[-1]) == number
            await work
        stats = comm.stats().buffer_pool
        assert (stats.hits, stats.misses) == (2, 1)


@pytest.mark.asyncio
async def test_aggressive_gives_idle_memory_back() -> None:
    async with init("a:0", config=settings(memory_allocator="aggressive", backend="stream")) as comm:
        trimmer = comm._table._trimmer
        assert trimmer is not None
        trimmer._period_s = 0.05
        async with worker(comm, "b:0", send_alike, 4, MIB) as peer:
            held = [await comm.recv("b:0") for _ in range(4)]
            await peer.result()
        shared = [comm.empty(MIB, dtype=torch.uint8), comm.empty(MIB, dtype=torch.uint8)]
        held.pop()
        shared.pop()
        async with asyncio.timeout(20):
            while comm.stats().buffer_pool.trims == 0:
                await asyncio.sleep(0.02)
            stats = comm.stats()
            assert stats.buffer_pool.leased_bytes == 3 * MIB
            assert stats.shared_memory is not None
            assert stats.shared_memory.segments == 1
            held.clear()
            shared.clear()
            while (stats := comm.stats()).buffer_pool.cached_bytes or stats.shared_memory is None or stats.shared_memory.segments:
                await asyncio.sleep(0.02)
        assert stats.buffer_pool.trims == 4
        assert not trimmer._awake


@pytest.mark.asyncio
async def test_by_default_idle_memory_is_kept() -> None:
    async with init("a:0", config=settings(backend="stream")) as comm, worker(comm, "b:0", send_alike, 2, MIB):
        assert comm._table._trimmer is None
        assert int((await comm.recv("b:0"))[-1]) == 0
        assert int((await comm.recv("b:0"))[-1]) == 1
        stats = comm.stats().buffer_pool
        assert (stats.cached_bytes > 0, stats.trims) == (True, 0)
