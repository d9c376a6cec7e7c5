"""What people print: statistics, errors, who belongs to the job."""

from __future__ import annotations

import pytest
import torch

from aiorlinf import init
from aiorlinf.errors import DeadlineExceeded, UsageError
from aiorlinf.manager.service import ManagerService

__all__: list[str] = []


@pytest.mark.asyncio
async def test_statistics_are_lines() -> None:
    compressed = {"cluster": {"collective": {"backend": "stream", "tensor_compression": {"codec": "lz4"}}}}
    async with init("a:0", config=compressed) as a, init("b:0", config=compressed) as b:
        await a.send(torch.zeros(1000), "b:0")
        await b.recv("a:0")
        lines = str(a.stats()).splitlines()
        assert lines[0] == "a:0: 1 link"
        assert lines[1].startswith("  b:0#1: up, large payloads over stream (")
        assert any(line.startswith("    sent 1 messages, ") for line in lines)
        assert any(line.startswith("  buffer pool: ") for line in lines)
        assert any(line.startswith("  compression: ") for line in lines)
        assert max(map(len, lines)) < 600
        assert repr(a.stats()) == "<WorkerStats a:0: 1 link>"


@pytest.mark.asyncio
async def test_a_wait_that_times_out_says_what_for() -> None:
    async with init("channel.c:0") as held, init("a:0") as a, init("b:0") as b:
        held.hold_channels()
        await a.send(1, "b:0")
        await b.recv("a:0")
        receiving = a.recv("b:0", tag=7)
        with pytest.raises(DeadlineExceeded) as caught:
            await receiving.async_wait(timeout=0.01)
        assert (caught.value.local, caught.value.remote, caught.value.tag) == ("a:0", "b:0", 7)
        sending = a.send_tensor(torch.zeros(1 << 20), "b:0", tag=8)
        with pytest.raises(DeadlineExceeded, match="of 4194304") as caught:
            await sending.async_wait(timeout=0.01)
        assert (caught.value.remote, caught.value.tag) == ("b:0", 8)
        channel = await a.create_channel("c")
        getting = channel.get()
        with pytest.raises(DeadlineExceeded, match=r"\('c'\)"):
            await getting.async_wait(timeout=0.01)
        for work in (receiving, sending, getting):
            assert not work.done(), "the work goes on"
            work.cancel()


@pytest.mark.asyncio
async def test_the_workers_of_a_group() -> None:
    manager = ManagerService(config=None, token=b"t", expected=["rollout:10", "rollout:2", "trainer:0"])
    await manager.start()
    try:
        async with init("trainer:0", manager=manager.address, token="t") as comm:
            assert comm.workers() == ("rollout:2", "rollout:10", "trainer:0")
            assert comm.workers("rollout") == ("rollout:2", "rollout:10")
            assert comm.workers("nobody") == ()
    finally:
        await manager.close()
    async with init("a:0") as comm:
        with pytest.raises(UsageError, match="anybody may join"):
            comm.workers()
