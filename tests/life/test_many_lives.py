"""Peers that come and go for ever: nothing of them piles up in whoever stays."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from tests.hypothesis_profiles import examples
from tests.system import resident_bytes, soon

__all__: list[str] = []

MIB = 1 << 20
OBJECTS_OF_A_LIFE = 10
"""Kept of each: its name, how it ended, what it carried; and what the manager knew of it, until it would have been overdue."""


@dataclass(frozen=True)
class Footprint:
    """What this process has; C++ threads count, too. Of objects those of our own classes: asyncio, in its debug mode, remembers much."""

    descriptors: int
    threads: int
    objects: int
    resident: int


def footprint() -> Footprint:
    gc.collect()
    objects = sum(type(obj).__module__.startswith("aiorlinf.") for obj in gc.get_objects())
    return Footprint(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), objects, resident_bytes())


async def settled(worker: Worker) -> Footprint:
    """When the last peer is gone, and nothing goes any more of what is destroyed in threads of its own."""
    await soon(lambda: not worker.stats().links)
    before, looks = footprint(), 0
    while looks < 8:
        await asyncio.sleep(0.05)
        now = footprint()
        looks = looks + 1 if (now.descriptors, now.threads) == (before.descriptors, before.threads) else 0
        before = now
    return before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["stream", "shm", "gloo"])
@pytest.mark.asyncio
async def test_a_peer_that_rejoins_and_exchanges_and_closes(backend: Any) -> None:
    cycles = examples(30 if backend == "gloo" else 60)
    async with init("a:0", backend=backend) as a:
        before = await settled(a)
        for cycle in range(cycles):
            async with init("b:0", backend=backend) as b:
                tensor = torch.full((MIB // 4,), float(cycle))
                works = [a.send({"x": tensor}, "b:0"), b.send_tensor(tensor, "a:0"), a.send(cycle, "b:0", tag=1)]
                assert torch.equal((await b.recv("a:0", timeout=20))["x"], tensor)
                assert torch.equal(await a.recv_tensor(torch.zeros(MIB // 4), "b:0", timeout=20), tensor)
                assert await b.recv("a:0", tag=1, timeout=20) == cycle
                await asyncio.gather(*works)
                del works
            if cycle == cycles // 3:
                before = await settled(a)
        after = await settled(a)
        assert after.descriptors <= before.descriptors
        assert after.threads <= before.threads
        assert after.objects - before.objects < OBJECTS_OF_A_LIFE * (cycles - cycles // 3), after.objects - before.objects
        assert after.resident - before.resident < 24 * MIB


@pytest.mark.asyncio
async def test_workers_that_send_one_message_and_leave() -> None:
    """Ever new addresses: a few words are kept of each, and no more."""
    count = examples(60)
    async with init("a:0") as a:
        before = await settled(a)
        for number in range(count):
            async with init(f"s:{number}") as short:
                await short.send(number, "a:0")
                assert await a.recv(f"s:{number}", timeout=20) == number
            if number == count // 3:
                before = await settled(a)
        after = await settled(a)
        assert after.descriptors <= before.descriptors
        assert after.threads <= before.threads
        assert after.objects - before.objects < OBJECTS_OF_A_LIFE * (count - count // 3), after.objects - before.objects
        assert a.pending() == []
        assert len(a.dump().splitlines()) < 20
