"""Tensors on an accelerator between processes: to one that has none, to one whose accelerator cannot be reached from here, and to some
that share it with us, so that they open each other's memory and wait for each other's events."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import PeerLost
from aiorlinf.link.device_events import sweep
from aiorlinf.link.device_out import DeviceOut
from aiorlinf.testing.fake import FakeAccelerator
from tests.peers import worker
from tests.system import soon

__all__: list[str] = []

VALUES = torch.arange(100_000, dtype=torch.int32)
LATE = 100
"""Ticks: much longer than anything else takes, but not what a test waits for in vain."""
ROUNDS = 4


async def answer_without(comm: Worker) -> str:
    """A worker with nothing but a CPU."""
    got = await comm.recv("a:0")
    assert torch.equal(got[0], VALUES)
    await comm.send(got[0] + 1, "a:0")
    return str(got[0].device)


async def answer_with(comm: Worker) -> str:
    """A worker with a device that has the same name, and other memory."""
    with FakeAccelerator() as fake:
        fake.limbo = True
        got = await comm.recv("a:0")
        assert torch.equal(got[0].cpu(), VALUES)
        await comm.send(got[0] + 1, "a:0")
        return str(got[0].device)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "where", "reason"), [(answer_without, "cpu", "has no accelerator"), (answer_with, "fake:0", "cuda_ipc")]
)
async def test_another_process(function: Any, where: str, reason: str) -> None:
    with FakeAccelerator() as fake:
        async with init("a:0") as a, worker(a, "b:0", function) as b:
            work = a.send([fake.late(VALUES)], "b:0")
            answer = await a.recv("b:0")
            await work
            assert answer.device == (torch.device("cpu") if where == "cpu" else torch.device("fake", 0))
            assert torch.equal(answer.cpu(), VALUES + 1)
            ((backend, why),) = [(link.device_backend, link.device_reason) for link in a.stats().links]
            assert backend == "staging"
            assert reason in why
            assert await b.result() == where


# ---- processes that share the devices


def shared(seed: int) -> FakeAccelerator:
    """One process's view of devices that all of them have."""
    return FakeAccelerator(2, seed=seed, ticks=(1, 9), between=True)


def all_free(fake: FakeAccelerator) -> bool:
    sweep()
    gc.collect()
    return fake.memory(0)[0] == fake.memory(0)[1]


async def answer_over_the_device(comm: Worker, seed: int) -> None:
    with shared(seed) as fake:
        for number in range(ROUNDS):
            got = await comm.recv("a:0")
            assert torch.equal(got["w"].cpu(), VALUES + number)
            assert torch.equal(got["part"].cpu(), VALUES[100:200] + number)
            await comm.send({"w": fake.late(VALUES - number, ticks=LATE)}, "a:0")
            del got
        await comm.recv("a:0")


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_one_device_of_two_processes(seed: int) -> None:
    with shared(seed) as fake:
        async with init("a:0") as a, worker(a, "b:0", answer_over_the_device, seed + 10) as b:
            for number in range(ROUNDS):
                weight = fake.late(VALUES + number, ticks=LATE)
                work = a.send({"w": weight, "part": weight[100:200]}, "b:0")
                del weight  # others get its memory as soon as nobody has a right to it any more
                got = await a.recv("b:0")
                assert torch.equal(got["w"].cpu(), VALUES - number)
                await work
                del got, work
            (link,) = a.stats().links
            assert (link.device_backend, link.device_reason) == ("cuda_ipc", "both workers use the same device")
            await a.send("over", "b:0")
            await b.result()
        await soon(lambda: all_free(fake))


async def get_weights(comm: Worker, seed: int, members: list[str], hurry: int) -> int:
    """By a broadcast of a:0, in turn into new memory and into tensors that are there; returns how much of it came through host memory."""
    pieces = 0
    with shared(seed) as fake:
        pinned = fake.pinned

        def counted(nbytes: int) -> torch.Tensor:
            nonlocal pieces
            pieces += 1
            return pinned(nbytes)

        fake.pinned = counted  # type: ignore[method-assign]
        for number in range(ROUNDS):
            into = {"w": fake.late(torch.zeros_like(VALUES), ticks=LATE), "part": fake.tensor(torch.zeros(10))} if number % 2 else None
            got = await comm.broadcast(None, root="a:0", members=members, into=into)
            assert torch.equal(got["w"].cpu(), VALUES + number), number
            assert torch.equal(got["part"].cpu(), torch.full((10,), float(number)))
            if number == hurry:
                await comm.send("soon", "a:0")
                await comm.recv("a:0")  # for ever
            del got, into
        await comm.gather(None, root="a:0", members=members)
    return pieces


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_broadcast_to_processes_of_the_roots_device(seed: int) -> None:
    """One copy for each, on the device, whatever takes how long; and the root's memory is its own again afterwards."""
    members = ["a:0", "b:0", "c:0"]
    with shared(seed) as fake:
        async with (
            init("a:0") as a,
            worker(a, "b:0", get_weights, seed + 10, members, -1) as b,
            worker(a, "c:0", get_weights, seed + 20, members, -1) as c,
        ):
            for number in range(ROUNDS):
                state = {"w": fake.late(VALUES + number, ticks=LATE), "part": fake.late(torch.full((10,), float(number)))}
                await a.broadcast(state, root="a:0", members=members)
                fake.write(state["w"], torch.zeros_like(VALUES))  # what they have is theirs
                del state
            await a.gather(None, root="a:0", members=members)
            assert (await b.result(), await c.result()) == (0, 0)
        await soon(lambda: all_free(fake))


@pytest.mark.asyncio
async def test_a_reader_that_is_killed() -> None:
    """Its loans end with its link, and the next broadcast goes to who is left."""
    members = ["a:0", "b:0", "c:0"]
    with shared(7) as fake:
        fake.limbo = True
        async with (
            init("a:0") as a,
            worker(a, "b:0", get_weights, 8, members, 0) as b,
            worker(a, "c:0", get_weights, 9, members, -1),
        ):
            await a.broadcast({"w": fake.late(VALUES, ticks=LATE), "part": fake.tensor(torch.zeros(10))}, root="a:0", members=members)
            assert await a.recv("b:0") == "soon"
            state = {"w": fake.late(VALUES + 1, ticks=LATE), "part": fake.tensor(torch.ones(10))}
            work = a.broadcast(state, root="a:0", members=members)
            b.kill()
            with pytest.raises(PeerLost, match="b:0"):
                await work
            del state, work
        await soon(lambda: all_free(fake))


# ---- the same, on a device that the root does not have


async def share_a_device(comm: Worker, seed: int, members: list[str], into: bool) -> int:
    """By a broadcast of a:0, on the other device; returns how much of it came through host memory."""
    pieces = 0
    with shared(seed) as fake:
        fake.islands = True
        fake.set_device(1)
        pinned = fake.pinned

        def counted(nbytes: int) -> torch.Tensor:
            nonlocal pieces
            pieces += 1
            return pinned(nbytes)

        fake.pinned = counted  # type: ignore[method-assign]
        for number in range(ROUNDS):
            target = {"w": fake.late(torch.zeros_like(VALUES), index=1, ticks=LATE)} if into else None
            got = await comm.broadcast(None, root="a:0", members=members, into=target)
            assert str(got["w"].device) == "fake:1"
            assert torch.equal(got["w"].cpu(), VALUES + number), number
            fake.write(got["w"], torch.zeros_like(VALUES))  # it is his own
            del got, target
        await comm.gather(None, root="a:0", members=members)
    return pieces


@pytest.mark.asyncio
@pytest.mark.parametrize("into", [True, False])
async def test_a_broadcast_to_processes_that_share_another_device(into: bool) -> None:
    """One of them has it through host memory, and the other from that one."""
    members = ["a:0", "b:0", "c:0"]
    with shared(3) as fake:
        fake.islands = True
        async with (
            init("a:0") as a,
            worker(a, "b:0", share_a_device, 13, members, into) as b,
            worker(a, "c:0", share_a_device, 23, members, into) as c,
        ):
            for number in range(ROUNDS):
                await a.broadcast({"w": fake.late(VALUES + number, ticks=LATE)}, root="a:0", members=members)
            await a.gather(None, root="a:0", members=members)
            assert await b.result() > 0
            assert await c.result() == 0
        await soon(lambda: all_free(fake))


async def meet(comm: Worker) -> None:
    """Go on when the others are there, too: from then on a second is enough for what is to happen."""
    await comm.send("here", "a:0")
    await comm.recv("a:0")


async def keep_and_die(comm: Worker, seed: int, members: list[str]) -> None:
    """It ends in the middle of lending what it has."""
    real = DeviceOut.lend

    def lend(self: DeviceOut, loan: Any, over: Any = None) -> int:
        asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGKILL)
        return real(self, loan, over)

    DeviceOut.lend = lend  # type: ignore[method-assign]
    await meet(comm)
    await share_a_device(comm, seed, members, False)


async def have_it_from_the_dead(comm: Worker, seed: int, members: list[str]) -> str:
    """The copy waits for what its own stream was given before, so it is under way when the keeper dies."""
    with shared(seed) as fake:
        fake.limbo = fake.islands = True
        fake.set_device(1)
        await meet(comm)
        target = {"w": fake.late(torch.zeros_like(VALUES), index=1, ticks=5 * LATE)}
        try:
            await comm.broadcast(None, root="a:0", members=members, into=target)
        except PeerLost as error:
            await comm.send(str(error), "a:0")
            await comm.recv("a:0")
            return str(error)
    return "it has it"


@pytest.mark.asyncio
async def test_a_keeper_that_is_killed() -> None:
    """Nobody waits for ever, nobody takes what may be torn for the object, and the others can go on."""
    members = ["a:0", "b:0", "c:0"]
    with shared(5) as fake:
        fake.limbo = fake.islands = True
        async with (
            init("a:0") as a,
            worker(a, "b:0", keep_and_die, 15, members),
            worker(a, "c:0", have_it_from_the_dead, 25, members) as c,
        ):
            for peer in members[1:]:
                await a.recv(peer)
            for peer in members[1:]:
                await a.send("go on", peer)
            with pytest.raises(PeerLost, match="b:0"):
                await a.broadcast({"w": fake.late(VALUES, ticks=LATE)}, root="a:0", members=members)
            assert "b:0" in await a.recv("c:0")
            await a.send("over", "c:0")
            assert "b:0" in await c.result()
        await soon(lambda: all_free(fake))
