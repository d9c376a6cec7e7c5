"""A worker whose block is left by an error has not come to a good end, whatever its goodbye says."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aiorlinf import init
from aiorlinf.errors import ChannelClosed, ProducerLost, UsageError

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
