"""Ctrl-C arrives while a program's own code runs inside an answer of the channel worker, as in a notebook, whose loop goes on after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiorlinf import AsyncWork, Channel
from aiorlinf.testing.cluster import LocalCluster, local_cluster

__all__: list[str] = []


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def test_what_comes_with_and_after_an_interrupted_answer_is_there_and_in_order() -> None:
    with asyncio.Runner() as runner:
        entered = local_cluster("w=1")

        async def begin() -> tuple[LocalCluster, Channel]:
            cluster = await entered.__aenter__()
            await cluster.hold_channels("c")
            return cluster, await cluster["w:0"].create_channel("c")

        async def ask(channel: Channel) -> tuple[AsyncWork[None], list[int]]:
            interrupted = channel.get().then(interrupt)
            gets = [channel.get() for _ in range(6)]
            await asyncio.gather(*(channel.put(number) for number in range(4)))  # which the gets are given together
            await asyncio.gather(*(channel.put(number) for number in range(4, 7)))
            return interrupted, [await get.async_wait(20) for get in gets]

        _, channel = runner.run(begin())
        loop = runner.get_loop()
        asking = loop.create_task(ask(channel))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asking)
        interrupted, got = loop.run_until_complete(asking)
        assert got == [1, 2, 3, 4, 5, 6]
        assert isinstance(interrupted.exception(), KeyboardInterrupt)
        runner.run(entered.__aexit__(None, None, None))
