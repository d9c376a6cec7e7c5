"""Frozen, blocked, killed, cut off: who is taken for dead, when, and what becomes of those that were."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aiorlinf import MembershipEvent, Worker, init
from aiorlinf.config import JobConfig
from aiorlinf.errors import PeerError, PeerLeft, PeerLost
from aiorlinf.manager.service import ManagerService
from tests import peers
from tests.life.roles import echo
from tests.manager.support import TOKEN, config_with, manager, until
from tests.namespaces import two_hosts
from tests.peers import Pipe

LIMIT = 1.5
"""Seconds of silence that are taken for death in these tests. A shorter limit would mistake a busy machine's pauses for it."""


@pytest_asyncio.fixture
async def service() -> AsyncIterator[ManagerService]:
    async with manager(config=config_with(heartbeat_timeout_s=LIMIT), job="j") as service:
        yield service


def member(service: ManagerService, address: str) -> Worker:
    return init(address, manager=service.address, token=TOKEN)


# ---- what runs in other processes


async def echo_and_try_again(comm: Worker) -> tuple[str, str, int]:
    """As `echo`; then what another operation says, and the number of a new life."""
    first = await echo(comm)
    try:
        await comm.send(1, "a:0")
        second = "it was sent"
    except Exception as error:
        second = type(error).__name__
    await comm.close()
    async with init() as again:
        await again.send("here again", "a:0")
        return first, second, again.incarnation


async def block(comm: Worker, seconds: float) -> str:
    await comm.recv("a:0")
    time.sleep(seconds)
    await comm.send("done", "a:0")
    await comm.recv("a:0")
    return "fine"


async def stay(comm: Worker) -> None:
    await comm.recv("a:0")


# ---- frozen


@pytest.mark.asyncio
async def test_a_frozen_peer_is_lost_within_the_limit_and_learns_it_when_it_goes_on(service: ManagerService) -> None:
    async with member(service, "a:0") as a, peers.worker(a, "b:0", echo_and_try_again) as b:
        await a.send("x", "b:0")
        assert await a.recv("b:0", timeout=20) == "x"
        pending = [a.recv("b:0", tag=tag) for tag in range(10)]
        os.kill(b.pid, signal.SIGSTOP)
        begin = time.monotonic()
        try:
            for work in pending:
                with pytest.raises(PeerLost, match=r"b:0#1 was declared lost: nothing was heard of it for 1\.5 s"):
                    await work.async_wait(20)
            assert 0.5 < time.monotonic() - begin < LIMIT + 1.0, "all of them in one detection period"
            with pytest.raises(PeerLost, match="b:0#1"):
                await a.send(1, "b:0")
            waiting = a.wait_for("b:0")
            await asyncio.sleep(0.3)
            assert not waiting.done()
        finally:
            os.kill(b.pid, signal.SIGCONT)
        assert str(await waiting) == "b:0#2"
        assert await a.recv("b:0", timeout=20) == "here again"
        first, second, life = await b.result()
        assert first.startswith(("DeclaredDead", "PeerLost")), first
        assert (second, life) == ("DeclaredDead", 2)


@pytest.mark.asyncio
async def test_the_address_of_a_frozen_worker_goes_to_the_next_one(service: ManagerService) -> None:
    async with member(service, "a:0") as a, peers.worker(a, "b:0", echo) as old:
        await a.wait_for("b:0", 20)
        os.kill(old.pid, signal.SIGSTOP)
        begin = time.monotonic()
        async with member(service, "b:0") as b:
            assert b.incarnation == 2
            assert time.monotonic() - begin < 2.0 + LIMIT + 1.0
            sent = b.send("new", "a:0")
            assert await a.recv("b:0", timeout=20) == "new"
            await sent
            os.kill(old.pid, signal.SIGCONT)
            assert (await old.result()).startswith("DeclaredDead: ")
            sent = a.send("still", "b:0")
            assert await b.recv("a:0", timeout=20) == "still"
            await sent


@pytest.mark.asyncio
async def test_a_blocked_loop_is_no_death(service: ManagerService) -> None:
    async with member(service, "a:0") as a, peers.worker(a, "b:0", block, 2 * LIMIT) as b:
        stream = a.membership()
        assert (await stream.next(20)).kind == "joined"
        news = stream.next()
        await a.send("go", "b:0")
        assert await a.recv("b:0", timeout=20) == "done"
        await a.send("end", "b:0")
        assert await b.result() == "fine"
        assert str(await news) == "b:0#1 left: it closed"


class Laborious:
    """Takes long to be taken apart, all of it Python code."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> Any:
        end, turns = time.monotonic() + self.seconds, 0
        while time.monotonic() < end:
            turns += 1
        return str, ("done",)


async def pickle_for_long(comm: Worker, seconds: float) -> None:
    await comm.recv("a:0")
    await comm.send(Laborious(seconds), "a:0")
    await comm.recv("a:0")


@pytest.mark.asyncio
async def test_a_pickle_that_takes_longer_than_the_limit_is_no_death(service: ManagerService) -> None:
    async with member(service, "a:0") as a, peers.worker(a, "b:0", pickle_for_long, 2 * LIMIT) as b:
        stream = a.membership()
        assert (await stream.next(20)).kind == "joined"
        news = stream.next()
        await a.send("go", "b:0")
        begin = time.monotonic()
        assert await a.recv("b:0", timeout=20) == "done"
        assert time.monotonic() - begin > 1.5 * LIMIT
        assert not news.done()
        await a.send("end", "b:0")
        await b.result()
        assert str(await news) == "b:0#1 left: it closed"


@pytest.mark.asyncio
async def test_a_frozen_manager_declares_nobody_lost_when_it_goes_on() -> None:
    with peers.process(run_manager, LIMIT) as process:
        address = await process.hear()
        async with init("a:0", manager=address, token=TOKEN) as a, init("b:0", manager=address, token=TOKEN) as b:
            sent = a.send(1, "b:0")
            assert await b.recv("a:0", timeout=20) == 1
            await sent
            os.kill(process.pid, signal.SIGSTOP)
            try:
                assert a._manager is not None
                lifeline = a._manager
                await until(lambda: lifeline.away)
                sent = a.send(2, "b:0")
                assert await b.recv("a:0", timeout=20) == 2
                await sent
            finally:
                os.kill(process.pid, signal.SIGCONT)
            await until(lambda: not lifeline.away)
            assert [str(peer) for peer in await a.peers()] == ["b:0#1"]
            assert await a.wait_for("b:0", 20)
            assert a.incarnation == b.incarnation == 1


def run_manager(pipe: Pipe, limit: float) -> None:
    async def main() -> None:
        async with manager(config=config_with(heartbeat_timeout_s=limit), job="j") as service:
            pipe.say(service.address)
            await asyncio.sleep(60)

    asyncio.run(main())


@pytest.mark.asyncio
async def test_a_crowd_that_comes_while_the_manager_stands_still_gets_in_when_it_goes_on() -> None:
    """All of them wait in its backlog, or try again."""
    with peers.process(run_manager, 5.0) as process:
        address = await process.hear()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            crowd = [init(f"w:{number}", manager=address, token=TOKEN) for number in range(40)]
            await asyncio.sleep(0.5)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            await asyncio.gather(*crowd)
            sending = asyncio.gather(*(worker.send(str(worker.address), "w:0") for worker in crowd))
            assert [await crowd[0].recv(str(worker.address)) for worker in crowd] == [str(worker.address) for worker in crowd]
            await sending
        await asyncio.gather(*(worker.close() for worker in crowd))


def run_embedded(pipe: Pipe) -> Any:
    """A worker with the manager in its process."""

    async def main() -> str:
        async with init("b:0", config=config_with(heartbeat_timeout_s=LIMIT)) as comm:
            pipe.say(comm.env("a:0"))
            return await echo(comm)

    return asyncio.run(main())


@pytest.mark.asyncio
async def test_a_frozen_process_that_has_the_manager_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers.process(run_embedded) as process:
        env = await process.hear()
        async with init("a:0", manager=env["AIORLINF_MANAGER"], token=env["AIORLINF_TOKEN"]) as a:
            await a.send("x", "b:0")
            assert await a.recv("b:0", timeout=20) == "x"
            pending = a.recv("b:0")
            os.kill(process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            try:
                with pytest.raises(PeerLost, match=r"nothing was heard of its process for 1\.5 s, in which the manager is"):
                    await pending.async_wait(20)
                assert time.monotonic() - begin < LIMIT + 1.0
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert (await process.result()).startswith(("PeerLost", "DeclaredDead"))


# ---- killed


@pytest.mark.asyncio
async def test_the_news_of_all_that_come_and_go(service: ManagerService) -> None:
    async with member(service, "a:0") as a, member(service, "z:0"):
        events: list[MembershipEvent] = []

        async def listen() -> None:
            async for event in a.membership():
                events.append(event)  # noqa: PERF401 - each one when it comes

        listening = asyncio.create_task(listen())
        await until(lambda: len(events) == 1)
        for life in (1, 2):
            async with peers.worker(a, "b:0", stay) as b:
                await until(lambda life=life: len(events) == 2 * life, peers.LIMIT_S)  # type: ignore[misc]
                b.kill()
                await until(lambda life=life: len(events) == 2 * life + 1)  # type: ignore[misc]
        async with member(service, "b:0"):
            await until(lambda: len(events) == 6)
        await until(lambda: len(events) == 7)
        assert [(event.kind, event.address, event.incarnation) for event in events] == [
            ("joined", "z:0", 1),
            ("joined", "b:0", 1),
            ("lost", "b:0", 1),
            ("restarted", "b:0", 2),
            ("lost", "b:0", 2),
            ("restarted", "b:0", 3),
            ("left", "b:0", 3),
        ]
        assert "the connection" in events[2].reason
        await a.close()
        await asyncio.wait_for(listening, 20)


@pytest.mark.asyncio
async def test_waiting_for_a_worker_that_was_killed_is_for_the_next_one(service: ManagerService) -> None:
    async with member(service, "a:0") as a:
        for life in (1, 2, 3):
            waiting = a.wait_for("b:0", 20)
            async with peers.worker(a, "b:0", echo) as b:
                peer = await waiting
                assert (peer.incarnation, peer.pid) == (life, b.pid)
                await a.send("x", "b:0")
                assert await a.recv("b:0", timeout=20) == "x"
                pending = a.recv("b:0")
                b.kill()
                with pytest.raises(PeerLost):
                    await pending.async_wait(20)


@pytest.mark.asyncio
async def test_a_worker_that_left_is_known_to_have_left(service: ManagerService) -> None:
    async with member(service, "a:0") as a:
        async with member(service, "b:0") as b:
            sent = b.send(1, "a:0")
            assert await a.recv("b:0", timeout=20) == 1
            await sent
        with pytest.raises(PeerLeft):
            await a.recv("b:0").async_wait(20)
        waiting = a.wait_for("b:0", 20)
        async with member(service, "b:0") as b:
            assert str(await waiting) == "b:0#2"


def test_a_process_that_ends_without_closing_is_gone_at_once() -> None:
    program = """
import asyncio, os, sys
from aiorlinf import init
async def main():
    comm = await init("b:0", manager=sys.argv[1], token=sys.argv[2])
    await comm.send("here", "a:0")
asyncio.run(main())
"""
    with (
        init("a:0") as a,
        subprocess.Popen([sys.executable, "-c", program, a.manager_address, a.token.decode()], cwd=Path(__file__).parents[2]) as child,
    ):
        assert a.recv("b:0").wait(30) == "here"
        begin = time.monotonic()
        with pytest.raises(PeerError):
            a.recv("b:0").wait(20)
        child.wait(20)
        assert time.monotonic() - begin < 10


def forget_a_worker(pipe: Pipe, env: dict[str, str]) -> int:
    """A loop that ends without its worker having been closed; the process lives on."""

    async def main() -> None:
        await init()

    asyncio.run(main())
    pipe.hear()
    return sum(thread.name == "aiorlinf heartbeat" for thread in threading.enumerate())


def test_a_worker_whose_loop_is_closed_does_not_go_on_to_say_that_it_lives() -> None:
    with (
        init("a:0", config=config_with(heartbeat_timeout_s=1.0)) as a,
        peers.process(forget_a_worker, {}, env=a.env("b:0")) as process,
    ):
        assert a.wait_for("b:0").wait(20).pid == process.pid
        end = time.monotonic() + 10
        while a.peers().wait(10):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.say("go on")
        assert process.wait_result() == 0, "the thread has ended with its last worker"


# ---- cut off


def run_on_host(pipe: Pipe, address: str) -> Any:
    """A worker on another host, which says how it ended and then joins again."""

    async def main() -> Any:
        async with init("b:0", manager=address, token=TOKEN, backend="stream") as comm:
            pipe.say("joined")
            first = await echo(comm)
        async with init("b:0", manager=address, token=TOKEN, backend="stream") as again:
            return first, again.incarnation

    return asyncio.run(main())


def run_host_a(pipe: Pipe) -> Any:
    """The manager and a worker on one host; what that worker saw of the other one's end."""
    config: JobConfig = config_with(heartbeat_timeout_s=LIMIT)

    async def main() -> Any:
        async with (
            manager(config=config, host="10.77.0.1", job="j") as service,
            init("a:0", manager=service.address, token=TOKEN, backend="stream") as a,
        ):
            pipe.say(service.address)
            await a.wait_for("b:0", 20)
            await a.send("x", "b:0")
            assert await a.recv("b:0", timeout=20) == "x"
            pending = a.recv("b:0")
            pipe.say("cut")
            begin = time.monotonic()
            with pytest.raises(PeerLost) as caught:
                await pending.async_wait(20)
            took = time.monotonic() - begin
            pipe.say("mend")
            again = await a.wait_for("b:0", 20)
            return str(caught.value), took, again.incarnation

    return asyncio.run(main())


@pytest.mark.asyncio
async def test_a_host_that_is_cut_off_is_lost_and_learns_it_when_it_is_back() -> None:
    with two_hosts() as (one, two), peers.process(run_host_a, prepare=one.enter()) as a:
        address = await a.hear()
        with peers.process(run_on_host, address, prepare=two.enter()) as b:
            assert await b.hear() == "joined"
            assert await a.hear() == "cut"
            two.run("ip link set eth0 down")
            assert await a.hear() == "mend"
            two.run("ip link set eth0 up")
            text, took, again = await a.result()
            assert "b:0#1 was declared lost: nothing was heard of it for 1.5 s" in text
            assert took < LIMIT + 1.5
            assert again == 2
            first, life = await b.result()
            # for it the other side was silent, or has closed its link; whichever it noticed first
            assert first.startswith(("PeerLost: recv: a:0#1", "DeclaredDead")), first
            assert life == 2
