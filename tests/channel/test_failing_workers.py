"""A worker whose block is left by an error has not come to a good end, whatever its goodbye says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from aiorlinf import init
from aiorlinf.channel import opening, spawn
from aiorlinf.channel.settings import ChannelSettings
from aiorlinf.errors import ChannelClosed, ProducerLost, RendezvousError, UsageError
from aiorlinf.testing.cluster import local_cluster

__all__: list[str] = []


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ValueError("the game crashed"), None, asyncio.CancelledError()])
async def test_a_producer_that_fails_is_lost_and_one_that_leaves_has_closed(error: BaseException | None) -> None:
    async with init("trainer:0") as trainer:
        channel = await trainer.create_channel("traj")
        with contextlib.suppress(ValueError, asyncio.CancelledError):
            async with init("rollout:0") as rollout:
                puts = await rollout.connect_channel("traj")
                await puts.put(1)
                if error is not None:
                    raise error
        assert await channel.get() == 1, "what was put before is there"
        if isinstance(error, ValueError):
            with pytest.raises(ProducerLost, match=r"rollout:0.*ValueError: the game crashed"):
                await channel.get().async_wait(20)
        else:
            with pytest.raises(ChannelClosed):
                await channel.get().async_wait(20)


@pytest.mark.asyncio
async def test_a_with_in_a_loop_is_refused_and_leaves_the_address_free() -> None:
    with pytest.raises(UsageError, match="block the event loop"), init("a:0"):
        pass
    async with init("a:0") as worker:
        assert worker.incarnation >= 1


@pytest.mark.asyncio
async def test_a_channel_worker_that_lives_anew_without_the_channel_is_waited_for() -> None:
    """What the manager tells of it is still of its earlier life."""
    async with local_cluster("w=2") as cluster:
        await cluster.hold_channels("c")
        left_over = ChannelSettings.make("c", maxsize=3)
        assert cluster["channel.c:0"]._manager is not None
        await cluster["channel.c:0"]._manager.publish("channel", "c", left_over.published())
        with pytest.raises(RendezvousError, match="holds no channel 'c'"):
            await cluster["w:0"].connect_channel("c", timeout=0.05)
        connecting = cluster["w:0"].connect_channel("c")
        put = await cluster["w:1"].create_channel("c", maxsize=3)
        await put.put("here")
        get = await connecting
        assert await get.get(timeout=20) == "here"


@pytest.mark.asyncio
async def test_a_channel_worker_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has joined, so nothing else would tell; long before it is silent for so long that it counts as dead."""
    monkeypatch.setattr(opening, "_ANSWER_GRACE_SECONDS", 0.1)
    async with init("w:0") as worker:
        await worker.create_channel("first", worker="c")
        (pid,) = [pid for pid, manager in spawn._children.items() if manager == worker.manager_address]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RendezvousError, match=r"create_channel: .*channel\.c:0 has joined the job and does not answer"):
                await worker.create_channel("second", worker="c", timeout=0.1)
            with pytest.raises(RendezvousError, match=r"connect_channel: .*channel\.c:0 has joined the job and does not answer"):
                await worker.connect_channel("first", timeout=0.1)
        finally:
            os.kill(pid, signal.SIGCONT)
        for again in (await worker.create_channel("second", worker="c"), await worker.connect_channel("first")):
            await again.put("here")
            assert await again.get(timeout=20) == "here"
