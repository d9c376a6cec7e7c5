"""Channels in a job that named all its workers beforehand, as `aiorlinf run` does: the channel worker was not among them."""

from __future__ import annotations

import asyncio

import pytest

import aiorlinf
from aiorlinf.channel import spawn
from tests.manager.support import TOKEN, manager, until


@pytest.mark.asyncio
@pytest.mark.timeout(120)  # a process that imports torch, on a machine that may have other things to do
async def test_a_channel_is_made_and_found() -> None:
    async with manager(expected=["a:0", "b:0"]) as service:
        async with (
            aiorlinf.init("a:0", manager=service.address, token=TOKEN) as a,
            aiorlinf.init("b:0", manager=service.address, token=TOKEN) as b,
        ):
            mine: aiorlinf.Channel[str] = await a.create_channel("c")
            theirs: aiorlinf.Channel[str] = await b.connect_channel("c")
            await mine.put("hello")
            assert await theirs.get() == "hello"
            with pytest.raises(aiorlinf.errors.RendezvousError, match="there is no worker d:0 in this job"):
                await a.wait_for("d:0")
            await mine.close()
            await theirs.close()
        (pid,) = (pid for pid, given in spawn._children.items() if given == service.address)
        await asyncio.to_thread(spawn.end_of_job, service.address)
        await until(lambda: spawn.ended(pid) is not None, 40)
        assert spawn.ended(pid) == 0
