"""Both ends of a link between two hosts stand still at once, for shorter and for longer than silence is taken for death."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiorlinf
from aiorlinf import Worker
from aiorlinf.errors import DeclaredDead, PeerLost
from aiorlinf.testing.spawned import SpawnedWorker, spawned_cluster, talk

__all__: list[str] = []

LIMIT_S = 30.0
BEFORE = 40
"""Messages that each has received before they are frozen."""

MEMBERS = {"a:0": "left", "b:0": "right"}


def message(number: int) -> tuple[int, torch.Tensor]:
    """Small and large ones: some are whole on their way, and of some a part."""
    return number, torch.full((1 if number % 3 else 500_000,), number % 100, dtype=torch.uint8)


async def stream(comm: Worker, other: str) -> tuple[list[str], list[Any], int]:
    """Send and receive until the test says that it is enough, or the other side is lost; then what all that waited has said, what a new
    life exchanges, if there has to be one, and its number."""
    pipe = talk()
    got: list[int] = []
    enough = asyncio.ensure_future(asyncio.to_thread(pipe.hear))

    async def send() -> None:
        number = 0
        while not enough.done():
            await comm.send(message(number), other)
            number += 1
            await asyncio.sleep(0.001)
        await comm.send((-1, None), other)

    async def receive() -> None:
        while (received := await comm.recv(other))[0] >= 0:
            number, tensor = received
            assert number == len(got), "nothing is lost, nothing comes twice"
            assert torch.equal(tensor, message(number)[1])
            got.append(number)
            if len(got) == BEFORE:
                pipe.say("under way")

    waiting = [comm.recv(other, tag=tag) for tag in range(1, 6)]
    moving = [asyncio.ensure_future(each) for each in (send(), receive())]
    said = [type(error).__name__ for error in await asyncio.gather(*moving, return_exceptions=True) if error is not None]
    if not said:
        for work in waiting:
            work.cancel()
        more = comm.send("more", other, tag=9)
        answer = await comm.recv(other, tag=9)
        await more
        return [], [answer], comm.incarnation
    said += [type(error).__name__ for error in await asyncio.gather(*waiting, return_exceptions=True)]
    pipe.say("ended")
    await comm.close()
    async with aiorlinf.init() as again:
        await again.wait_for(other, LIMIT_S)
        more = again.send("more", other, tag=9)
        answer = await again.recv(other, tag=9)
        await more
        await enough
        return said, [answer], again.incarnation


async def under_way(cluster: Any) -> list[SpawnedWorker]:
    workers = []
    for member, other in zip(MEMBERS, reversed(MEMBERS), strict=True):
        workers.append(await cluster.start(member, stream, other, host=MEMBERS[member], loop="uvloop"))
    for worker in workers:
        assert await worker.hear(LIMIT_S) == "under way"
    return workers


@pytest.mark.asyncio
@pytest.mark.parametrize("first", [0, 1])
async def test_shorter_than_the_limit_they_go_on_as_if_nothing_had_been(first: int) -> None:
    async with spawned_cluster({"cluster": {"network": {"heartbeat_timeout_s": 300.0}}}) as cluster:
        workers = await under_way(cluster)
        for worker in workers:
            worker.freeze()
        await asyncio.sleep(1.0)
        workers[first].thaw()
        await asyncio.sleep(0.5)  # this one writes to a peer that stands still
        workers[1 - first].thaw()
        for worker in workers:
            worker.say("enough")
        assert [await worker.result(LIMIT_S) for worker in workers] == [([], ["more"], 1)] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("first", [0, 1])
async def test_longer_than_the_limit_all_that_waits_ends_by_name_and_they_join_again(first: int) -> None:
    async with spawned_cluster({"cluster": {"network": {"heartbeat_timeout_s": 1.5}}}) as cluster:
        watcher = await cluster.join("c:0")
        workers = await under_way(cluster)
        for worker in workers:
            worker.freeze()
        while await watcher.peers():
            await asyncio.sleep(0.05)
        workers[first].thaw()
        await asyncio.sleep(0.3)
        workers[1 - first].thaw()
        for worker in workers:
            assert await worker.hear(LIMIT_S) == "ended"  # before they are told that it is enough, by which a send would end well
            worker.say("enough")
        for worker in workers:
            said, answer, life = await worker.result(LIMIT_S)
            assert (answer, life) == (["more"], 2)
            assert len(said) == 7, "everything that was under way has ended"
            assert set(said) <= {DeclaredDead.__name__, PeerLost.__name__}, said
