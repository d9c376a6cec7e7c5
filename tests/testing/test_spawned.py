"""Workers in processes of their own: they run, answer, fail, die, freeze and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest

from aiorlinf import Worker
from aiorlinf.errors import PeerLost, UsageError
from aiorlinf.testing.spawned import WorkerFailed, spawned_cluster, talk

__all__: list[str] = []

QUICK = {"cluster": {"network": {"heartbeat_timeout_s": 1.5}}}


async def add(comm: Worker, number: int) -> tuple[int, str, int]:
    value = await comm.recv("here:0")
    await comm.send(value + number, "here:0")
    return value + number, str(comm.address), comm.incarnation


@pytest.mark.asyncio
async def test_what_another_process_cannot_find_is_refused() -> None:
    async def local(comm: Worker) -> None: ...

    async with spawned_cluster(here="here=1") as cluster:
        for function in (local, lambda comm: None):
            with pytest.raises(UsageError, match="at the top of a module"):
                await cluster.start("there:0", function)
        with pytest.raises(KeyError, match="no process of there:0; there are: none"):
            cluster.spawned("there:0")


async def echo(comm: Worker) -> None:
    while True:
        await comm.send(await comm.recv("here:0"), "here:0")


def add_without_a_loop(comm: Worker, number: int) -> int:
    value: int = comm.recv("here:0").wait()
    comm.send(value + number, "here:0").wait()
    return value + number


async def converse(comm: Worker) -> str:
    for word in ("one", "two"):
        talk().say(word)
    return f"heard {await asyncio.to_thread(talk().hear)}"


async def fail(comm: Worker) -> None:
    print("before the end")
    raise ZeroDivisionError("on purpose")


async def give_what_cannot_travel(comm: Worker) -> Any:
    return lambda: None


def leave_suddenly(code: int) -> None:
    print("gone", file=sys.stderr, flush=True)
    os._exit(code)


def sleep() -> None:
    time.sleep(60)


@pytest.mark.asyncio
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "thread"])
async def test_a_function_runs_as_a_worker(loop: Any) -> None:
    async with spawned_cluster(here=["here:0"], loop=loop) as cluster:
        worker = await cluster.start("there:0", add_without_a_loop if loop == "thread" else add, 5)
        here = cluster["here:0"]
        await here.send(1, "there:0")
        assert await here.recv("there:0", timeout=20) == 6
        assert await worker.result() == (6 if loop == "thread" else (6, "there:0", 1))
        assert await worker.exited() == 0
        assert "ended with 0" in repr(worker)


@pytest.mark.asyncio
async def test_it_says_and_hears() -> None:
    async with spawned_cluster() as cluster:
        worker = await cluster.start("w:0", converse)
        assert await worker.hear() == "one"
        worker.say("three")
        assert await worker.result() == "heard three"
        assert worker.heard() == ["two"]
        with pytest.raises(UsageError, match="not started by a spawned cluster"):
            talk()


@pytest.mark.asyncio
async def test_what_goes_wrong_there_is_told_here() -> None:
    async with spawned_cluster() as cluster:
        failing = await cluster.start("w:0", fail)
        with pytest.raises(WorkerFailed, match=r"on purpose\n+It has printed:\nbefore the end") as caught:
            await failing.result()
        assert (caught.value.address, caught.value.kind, caught.value.text) == ("w:0", "ZeroDivisionError", "on purpose")
        with pytest.raises(WorkerFailed, match="on purpose"):
            await failing.hear()
        dying = await cluster.start("w:1", leave_suddenly, 3, join=False)
        with pytest.raises(WorkerFailed, match=r"exit code 3\) has ended and is not over\nIt has printed:\ngone") as caught:
            await dying.result()
        assert caught.value.exit_code == 3
        slow = await cluster.start("w:2", sleep, join=False)
        with pytest.raises(WorkerFailed, match=r"is not over within 0\.05 s"):
            await slow.result(0.05)
        with pytest.raises(UsageError, match=f"runs already, in process {slow.pid}"):
            await cluster.start("w:2", sleep, join=False)
        slow.terminate()
        assert await slow.exited() == -signal.SIGTERM
        odd = await cluster.start("w:3", give_what_cannot_travel)
        with pytest.raises(WorkerFailed, match="pickle"):
            await odd.result()


@pytest.mark.asyncio
async def test_killed_frozen_and_started_again() -> None:
    async with spawned_cluster(QUICK, here=["here:0"]) as cluster:
        here = cluster["here:0"]
        worker = await cluster.start("there:0", echo)
        for life in (1, 2):
            assert (await here.wait_for("there:0", 20)).incarnation == life
            await here.send(life, "there:0")
            assert await here.recv("there:0", timeout=20) == life
            pending = here.recv("there:0")
            if life == 1:
                worker = await cluster.restart("there:0")
                assert cluster.spawned("there:0") is worker
            else:
                worker.freeze()
            with pytest.raises(PeerLost):
                await pending
        worker.thaw()
        assert await worker.kill() == -signal.SIGKILL
        assert not worker.alive


@pytest.mark.asyncio
async def test_another_host() -> None:
    async with spawned_cluster(here=["here:0"]) as cluster:
        worker = await cluster.start("there:0", add, 1, host="elsewhere", backend="stream")
        here = cluster["here:0"]
        await here.send(1, "there:0")
        assert await here.recv("there:0", timeout=20) == 2
        (link,) = here.stats().links
        assert link.address is not None
        assert link.address.startswith("127.0.0.1:"), "no Unix socket"
        await worker.result()
