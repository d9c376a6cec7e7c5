"""A peer that does not read holds its sender up; what it has not read does not pile up here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from tests.peers import worker
from tests.system import resident_bytes

__all__: list[str] = []

MIB = 1 << 20


async def block_then_receive(comm: Worker, count: int, seconds: float) -> bool:
    """Blocks the loop, then receives them all; whether they came whole and in order."""
    await comm.send("blocks", "a:0", tag=1)
    time.sleep(seconds)
    right = True
    for number in range(count):
        seen, tensor = await comm.recv("a:0")
        right &= seen == number and bool((tensor == number).all())
    return right


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["stream", "shm", "gloo"])
@pytest.mark.parametrize(("numbers", "count", "window"), [(25_000, 800, 4 * MIB), (4, 10_000, MIB // 8)], ids=["100 kB", "small"])
@pytest.mark.asyncio
async def test_a_peer_whose_loop_is_blocked(backend: Any, numbers: int, count: int, window: int) -> None:
    config = {"cluster": {"collective": {"backend": backend, "window_bytes": window}}}
    done = 0
    async with init("a:0", config=config) as a, worker(a, "b:0", block_then_receive, count, 2.0) as b:

        async def send_all() -> None:
            nonlocal done
            for number in range(count):
                await a.send((number, torch.full((numbers,), float(number))), "b:0")
                done += 1

        assert await a.recv("b:0", tag=1, timeout=20) == "blocks"
        before = resident_bytes()
        sending = asyncio.ensure_future(send_all())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sending), 1.0)
        assert done < count // 2, "nobody has received one"
        assert resident_bytes() - before < 32 * MIB
        await sending
        assert await b.result()
        assert resident_bytes() - before < 48 * MIB
