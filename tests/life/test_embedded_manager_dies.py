"""The worker that has the job's manager in its process is killed: the others go on, and a manager as a process takes over from it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.config import ClusterConfig, JobConfig, NetworkConfig
from aiorlinf.errors import PeerLost, RendezvousError
from tests import peers
from tests.peers import Pipe

__all__: list[str] = []

ROOT = Path(__file__).parents[2]
CONFIG = JobConfig(ClusterConfig(network=NetworkConfig(heartbeat_timeout_s=3.0, connect_timeout_s=2.0)))

IMPATIENT = JobConfig(ClusterConfig(network=NetworkConfig(rendezvous_timeout_s=0.3)))


def run_first(pipe: Pipe) -> None:
    """The first worker of a job, with its manager."""

    async def main() -> None:
        async with init("a:0", config=CONFIG) as comm:
            pipe.say(comm.env("b:0"))
            async for sender, message in comm.inbox():
                await comm.send(message, sender)

    asyncio.run(main())


def successor(survivor: Worker) -> subprocess.Popen[str]:
    """What the README says: where the old one was, for the same job, with the same token."""
    port = survivor.manager_address.rpartition(":")[2]
    command = [sys.executable, "-m", "aiorlinf", "manager", "--port", port, "--job", survivor.job]
    token = survivor.env("a:0")["AIORLINF_TOKEN"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "AIORLINF_TOKEN": token})
    assert process.stdout is not None
    assert process.stdout.readline() == f"AIORLINF_MANAGER={survivor.manager_address}\n"
    return process


async def exchange(one: Worker, other: Worker) -> None:
    tensor = torch.arange(100_000)
    sent = one.send(tensor, other.address)
    assert torch.equal(await other.recv(one.address, timeout=20), tensor)
    await sent


@pytest.mark.asyncio
async def test_the_job_goes_on_without_the_worker_that_had_its_manager_and_gets_another_one() -> None:
    with peers.process(run_first) as first:
        env = await first.hear()
        where = {"manager": env["AIORLINF_MANAGER"], "token": env["AIORLINF_TOKEN"]}
        async with init("b:0", **where) as b, init("c:0", **where) as c:
            assert [str(peer) for peer in await b.peers()] == ["a:0#1", "c:0#1"]
            for one in (b, c):
                await one.send("x", "a:0")
                assert await one.recv("a:0", timeout=20) == "x"
            pending = [worker.recv("a:0") for worker in (b, c)]
            first.kill()
            for work in pending:
                with pytest.raises(PeerLost, match="a:0#1"):
                    await work.async_wait(20)
            await exchange(b, c)  # they had no link before
            await exchange(c, b)
            with pytest.raises(RendezvousError, match="connection refused"):
                async with init("d:0", **where, config=IMPATIENT):
                    pass
            process = await asyncio.to_thread(successor, b)
            try:
                async with init("a:0", **where) as again, init("d:0", **where) as newcomer:
                    assert (again.incarnation, newcomer.incarnation) == (2, 1)
                    assert again.config == newcomer.config == b.config, "learnt from those that live"
                    assert again.job == b.job
                    await exchange(b, again)
                    await exchange(newcomer, c)
                    assert [str(peer) for peer in await newcomer.peers()] == ["a:0#2", "b:0#1", "c:0#1"]
            finally:
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.communicate, timeout=20)
