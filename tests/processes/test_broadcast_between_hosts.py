"""A broadcast between two hosts that are really two: the wire carries it once, whatever the number of receivers there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from aiorlinf import Worker
from aiorlinf.manager.service import ManagerService
from tests import peers
from tests.namespaces import Host, two_hosts

MEMBERS = ["w:0", "w:1", "w:2", "w:3", "w:4"]
NUMBERS = 2 << 20
TOKEN = "the token of the test"


async def _take_part(comm: Worker) -> Any:
    tensor = torch.arange(NUMBERS, dtype=torch.float32) if comm.address == "w:0" else None
    for _ in range(2):
        got = await comm.broadcast(tensor, members=MEMBERS, timeout=20)
        assert torch.equal(got, torch.arange(NUMBERS, dtype=torch.float32))
        if comm.address != "w:0":
            got.add_(1)  # nobody else sees it
        await comm.gather(None, members=MEMBERS, timeout=20)
    return {link.remote: link.backend for link in comm.stats().links}


def sent_bytes(host: Host) -> int:
    """Over its end of the wire."""
    (line,) = [line for line in host.run("cat /proc/net/dev").splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


@pytest.mark.timeout(90)
def test_the_wire_carries_it_once() -> None:
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(two_hosts())
        manager = stack.enter_context(peers.process(_manage, a.address, prepare=a.enter()))
        env = {**manager.wait_hear(), "AIORLINF_RACK": "left"}
        before = sent_bytes(a)
        members = []
        for rank in range(5):
            own = {**env, "AIORLINF_ADDRESS": f"w:{rank}"}
            enter = (a if rank < 2 else b).enter()
            run = peers.process(peers.run_worker, "asyncio", None, _take_part, (), env=own, prepare=enter)
            members.append(stack.enter_context(run))
        backends = [member.wait_result() for member in reversed(members)][::-1]
        payload = NUMBERS * 4
        assert 2 * payload < sent_bytes(a) - before < 2.3 * payload
        assert sent_bytes(b) < payload / 4
    assert backends[0]["w:1"] == "shm"
    assert backends[0]["w:2"] != "shm"


def _manage(pipe: peers.Pipe, host: str) -> None:
    async def serve() -> None:
        service = ManagerService(config=None, token=TOKEN.encode())
        await service.start(host)
        pipe.say({"AIORLINF_MANAGER": service.address, "AIORLINF_TOKEN": TOKEN})
        await asyncio.to_thread(pipe.hear, None)

    asyncio.run(serve())
