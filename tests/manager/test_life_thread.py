"""The thread in which workers say that they live, and what of it a fork leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import AuthenticationError, ClosedError, InternalError, RendezvousError
from aiorlinf.manager.life_thread import acquire_life_thread
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.work.home import LoopHome
from tests.manager.support import TOKEN, join, manager, spawn, until


def heartbeat_threads() -> int:
    return sum(thread.name == "aiorlinf heartbeat" for thread in threading.enumerate())


def test_it_is_shared_and_ends_with_its_last_user() -> None:
    assert heartbeat_threads() == 0
    first, second = acquire_life_thread(), acquire_life_thread()
    assert first is second
    assert heartbeat_threads() == 1
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "it runs"), first.loop).result(10) == "it runs"
    first.release()
    assert heartbeat_threads() == 1
    second.release()
    assert heartbeat_threads() == 0
    with pytest.raises(InternalError):
        first.release()
    third = acquire_life_thread()
    assert third is not first
    third.release()


def test_many_threads_start_one() -> None:
    found = []
    start = threading.Barrier(20)

    def use() -> None:
        start.wait(10)
        found.append(acquire_life_thread())

    threads = [threading.Thread(target=use) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    for one in found:
        one.release()
    assert heartbeat_threads() == 0


@pytest.mark.asyncio
async def test_a_lifeline_that_cannot_be_made_leaves_nothing() -> None:
    home = LoopHome(asyncio.get_running_loop(), name="test")
    async with manager() as service:
        for token, error in ((b"wrong", AuthenticationError), (None, AuthenticationError)):
            lifeline = Lifeline(home, WorkerAddress("a:0"), service.address, token, None)
            with pytest.raises(error):
                await lifeline.connect()
            await lifeline.close(1.0)
            await lifeline.close(1.0)
            assert heartbeat_threads() == 0
            with pytest.raises(ClosedError):
                await lifeline.workers()
    await home.close()


@pytest.mark.asyncio
async def test_an_address_that_is_taken_and_a_lifeline_that_is_abandoned() -> None:
    home = LoopHome(asyncio.get_running_loop(), name="test")
    async with manager() as service, join(service, "b:0") as watcher:
        first = Lifeline(home, WorkerAddress("a:0"), service.address, TOKEN, None)
        await first.connect()
        await first.register(port=1)
        assert not first.away
        second = Lifeline(home, WorkerAddress("a:0"), service.address, TOKEN, None)
        await second.connect()
        with pytest.raises(RendezvousError, match="a:0 is registered already"):
            await second.register(port=1)
        await second.close(1.0)
        await watcher.client.lookup("a:0", 10.0)
        await asyncio.to_thread(first.abandon)
        assert heartbeat_threads() == 0
        await until(lambda: watcher.news == [("gone", "a:0", 1, "lost")])
        first.abandon()
    await asyncio.get_running_loop().shutdown_default_executor()
    await home.close()


@pytest.mark.asyncio
async def test_cancelling_a_question_withdraws_it() -> None:
    home = LoopHome(asyncio.get_running_loop(), name="test")
    async with manager() as service:
        lifeline = Lifeline(home, WorkerAddress("a:0"), service.address, TOKEN, None)
        await lifeline.connect()
        await lifeline.register(port=1)
        asking = asyncio.create_task(lifeline.lookup("z:0"))
        await until(lambda: len(service._directory.waiting) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: len(service._directory.waiting) == 0)
        asking = asyncio.create_task(lifeline.lookup("z:0"))
        await until(lambda: len(service._directory.waiting) == 1)
        await lifeline.close(5.0)
        with pytest.raises(ClosedError):
            await asking
        assert service._directory.living == ()
    await home.close()


@pytest.mark.asyncio
async def test_a_fork_has_no_lifeline_and_does_no_harm() -> None:
    program = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of any fork with threads
from aiorlinf.address import WorkerAddress
from aiorlinf.errors import ForkedHandle
from aiorlinf.manager.life_thread import acquire_life_thread
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.work.home import LoopHome
from tests.manager.support import TOKEN

async def main():
    home = LoopHome(asyncio.get_running_loop(), name="test")
    lifeline = Lifeline(home, WorkerAddress("a:0"), sys.argv[1], TOKEN, None)
    await lifeline.connect()
    await lifeline.register(port=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                lifeline.workers().send(None)
            except ForkedHandle:
                lifeline.abandon()
                own = acquire_life_thread()
                assert own is not lifeline._thread
                own.release()
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print((await lifeline.lookup("a:0")).identity)
    await lifeline.close(5.0)
    await home.close()

asyncio.run(main())
"""
    async with manager() as service:
        child = spawn(program, service.address)
        out, err = await asyncio.to_thread(child.communicate, None, 50)
        assert (out.strip(), err) == ("a:0#1", "")
