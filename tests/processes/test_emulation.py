"""An emulated network between real processes. Times are compared with generous bounds only."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import PeerLost
from tests.peers import PeerFailed, worker

MEGABYTE = 1_000_000
NARROW = {"members": ["rollout:0-3"], "bandwidth_mbps": 16}  # two megabytes per second


def job(**emulation: Any) -> dict[str, Any]:
    return {"cluster": {"net_emulation": emulation}}


async def push(comm: Worker, count: int) -> None:
    """Send some megabytes when told to, and wait until they have arrived."""
    await comm.send("here", "trainer:0")
    await comm.recv("trainer:0", timeout=20)
    for _ in range(count):
        comm.send(torch.ones(MEGABYTE, dtype=torch.uint8), "trainer:0")
    await comm.recv("trainer:0", timeout=20)


@pytest.mark.asyncio
async def test_members_in_several_processes_share_one_bandwidth() -> None:
    members = ["rollout:0", "rollout:1", "rollout:2"]
    async with (
        init("trainer:0", config=job(bandwidth_groups=[NARROW], symmetric=False)) as comm,
        worker(comm, members[0], push, 1) as first,
        worker(comm, members[1], push, 1, loop="uvloop") as second,
        worker(comm, members[2], push, 1) as third,
    ):
        for member in members:
            await comm.recv(member, timeout=20)
        begun = time.monotonic()
        for member in members:
            comm.send("go", member)
        arrived = []
        for member in members:
            assert (await comm.recv(member, timeout=20)).sum() == MEGABYTE
            arrived.append(time.monotonic() - begun)
        # Each alone would take half a second; together they never carry more than two megabytes per second.
        assert max(arrived) >= 1.4
        for member in members:
            await comm.send("seen", member)
        for peer in (first, second, third):
            await peer.result()


async def die_while_sending(comm: Worker) -> None:
    await comm.send("here", "trainer:0")
    for number in range(5):
        comm.send({"number": number}, "trainer:0")
    comm.send(torch.ones(10 * MEGABYTE, dtype=torch.uint8), "trainer:0")
    await comm.recv("trainer:0")


@pytest.mark.asyncio
async def test_a_killed_worker_takes_along_what_is_under_way_and_is_noticed_at_once() -> None:
    far = {"src": "rollout:*", "dst": "trainer:0", "delay_ms": 300}
    async with (
        init("trainer:0", config=job(crossdc_pairs=[far], bandwidth_groups=[NARROW])) as comm,
        worker(comm, "rollout:0", die_while_sending) as peer,
    ):
        assert await comm.recv("rollout:0", timeout=20) == "here"
        assert [(await comm.recv("rollout:0", timeout=20))["number"] for _ in range(3)] == [0, 1, 2]
        waiting = [comm.recv("rollout:0") for _ in range(3)]
        sent = comm.send(torch.ones(10 * MEGABYTE, dtype=torch.uint8), "rollout:0")
        await asyncio.sleep(0.1)
        peer.kill()
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            await sent
        with pytest.raises(PeerLost):
            await waiting[2]
        assert time.monotonic() - begun < 15
        with pytest.raises(PeerFailed, match="died"):
            await peer.result()


async def last_words(comm: Worker) -> None:
    await comm.send("here", "trainer:0")
    await comm.recv("trainer:0", timeout=20)
    comm.send("last words", "trainer:0")


@pytest.mark.asyncio
async def test_a_worker_that_closes_hands_over_what_is_under_way() -> None:
    far = {"src": "rollout:*", "dst": "trainer:0", "delay_ms": 200}
    async with (
        init("trainer:0", config=job(crossdc_pairs=[far])) as comm,
        worker(comm, "rollout:0", last_words) as peer,
    ):
        assert await comm.recv("rollout:0", timeout=20) == "here"
        begun = time.monotonic()
        await comm.send("go", "rollout:0")
        assert await comm.recv("rollout:0", timeout=20) == "last words"
        assert time.monotonic() - begun >= 0.4
        await peer.result()
