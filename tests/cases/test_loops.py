"""Loops that come and go: pytest's loop scopes, several `asyncio.run` in a row, patched loops (sections L and M of the cases)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from aiorlinf import Worker, init
from tests import peers
from tests.cases.scripts import run_script
from tests.inner_pytest import run_pytest


async def echo(comm: Worker, count: int) -> None:
    for _ in range(count):
        await comm.send(await comm.recv("a:0"), "a:0")


async def exchange(comm: Worker, number: int) -> None:
    sending = comm.send([number, torch.full((50_000,), float(number))], "b:0")
    got = await comm.recv("b:0")
    assert got[0] == number
    assert (got[1] == number).all()
    await sending


# ---- one worker, several loops


@pytest.mark.parametrize("peer_loop", ["asyncio", "uvloop"])
def test_three_asyncio_runs_with_the_same_peer(peer_loop: Any) -> None:
    with init("a:0") as comm, peers.process(run_echo, peer_loop, 6, env=comm.env("b:0")) as peer:
        for number in range(3):
            asyncio.run(exchange(comm, number), debug=True)
        factories: list[Any] = [uvloop.new_event_loop, asyncio.SelectorEventLoop, uvloop.new_event_loop]
        for number, factory in enumerate(factories):
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(exchange(comm, number))
        peer.wait_result()


def run_echo(_pipe: peers.Pipe, loop: Any, count: int) -> None:
    async def main() -> None:
        async with init() as comm:
            await echo(comm, count)

    peers.run_loop(loop, main)


def test_two_loops_at_once() -> None:
    """Two threads with a loop each use the same two workers at the same time."""

    async def both(a: Worker, b: Worker, tag: int) -> None:
        for number in range(20):
            sending = a.send([tag, number, torch.ones(number * 2000)], "b:0", tag=tag)
            got = await b.recv("a:0", tag=tag)
            assert got[:2] == [tag, number]
            await sending

    failures: list[BaseException] = []

    def run(kind: Any, tag: int) -> None:
        try:
            peers.run_loop(kind, lambda: both(a, b, tag))
        except BaseException as error:  # shown by the test's own thread
            failures.append(error)

    kinds: list[Any] = ["asyncio", "uvloop", "asyncio"]
    with init("a:0") as a, init("b:0") as b:
        threads = [threading.Thread(target=run, args=(kind, tag)) for tag, kind in enumerate(kinds)]
        for thread in threads:
            thread.start()
        run("uvloop", 9)
        for thread in threads:
            thread.join(30)
    assert failures == []


def left_open(pipe: peers.Pipe, kind: Any) -> list[str]:
    """A worker of a loop that has ended, used from another loop and from none. In a process of its own: it leaves sockets open."""

    async def begin() -> Worker:
        comm = await init("a:0")
        await comm.send(1, "a:0")
        return comm

    async def use(comm: Worker) -> None:
        await comm.recv("a:0")

    comm = peers.run_loop(kind, begin)
    said = []
    attempts: list[Callable[[], object]] = [
        lambda: peers.run_loop(kind, lambda: use(comm)),
        lambda: comm.recv("a:0").wait(),
        lambda: comm.send(1, "a:0").wait(),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:  # which one is what the test asks
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_worker_of_a_loop_that_has_ended_says_so(kind: Any) -> None:
    with peers.process(left_open, kind) as peer:
        said = peer.wait_result()
    assert len(said) == 3
    for text in said:
        assert text.startswith("ClosedError")
        assert "closed" in text


# ---- other people's loops


def test_nothing_of_asyncio_or_multiprocessing_is_changed(tmp_path: Path) -> None:
    """Importing starts nothing; making workers changes no policy, no start method and no accelerator; and it works under patches."""
    done = run_script(
        tmp_path,
        """
        import asyncio, multiprocessing, sys, threading

        policy = asyncio.get_event_loop_policy()
        kept = [asyncio.run, asyncio.new_event_loop, asyncio.get_running_loop, asyncio.Task, asyncio.Future]
        import aiorlinf
        aiorlinf.init, aiorlinf.Worker, aiorlinf.AsyncWork
        import torch

        assert threading.active_count() == 1, threading.enumerate()
        with aiorlinf.init("a:0") as a, aiorlinf.init("b:0", backend="gloo") as b:
            w = b.send(torch.ones(100_000), "a:0")
            assert a.recv("b:0").wait().sum() == 100_000
            w.wait()
        assert asyncio.get_event_loop_policy() is policy
        assert kept == [asyncio.run, asyncio.new_event_loop, asyncio.get_running_loop, asyncio.Task, asyncio.Future]
        assert multiprocessing.get_start_method(allow_none=True) is None
        assert not torch.cuda.is_initialized()
        assert not torch.distributed.is_initialized()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            print("unchanged")

        async def pair():
            async with aiorlinf.init("a:0") as a, aiorlinf.init("b:0") as b:
                w = a.send([1, torch.ones(100_000)], "b:0")
                assert (await b.recv("a:0"))[0] == 1
                await w

        import uvloop, warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # policies are on their way out
            asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
            asyncio.run(pair())
            print("with uvloop's policy")
            asyncio.set_event_loop_policy(None)

        try:
            import nest_asyncio
        except ImportError:
            try:
                import nest_asyncio2 as nest_asyncio
            except ImportError:
                nest_asyncio = None
        if nest_asyncio is not None:
            nest_asyncio.apply()
            asyncio.run(pair())

            async def nested():
                asyncio.run(pair())
                with aiorlinf.init("c:0", loop="thread") as c:
                    w = c.send(3, "c:0")
                    assert c.recv("c:0").wait() == 3
                    w.wait()

            asyncio.run(nested())
        print("with nested loops")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["unchanged", "with uvloop's policy", "with nested loops"]


# ---- pytest-asyncio's loop scopes


def test_loop_scopes_of_pytest_asyncio(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path,
        """
        import asyncio
        import aiorlinf, pytest, pytest_asyncio, torch

        @pytest.fixture(scope="session")
        def comm():
            with aiorlinf.init("a:0") as a, aiorlinf.init("b:0") as b:
                yield a, b

        @pytest_asyncio.fixture(scope="session", loop_scope="session")
        async def made_in_a_coroutine():
            a = aiorlinf.init("c:0", loop="thread")
            await a
            yield a
            await a.close()

        @pytest_asyncio.fixture(scope="session", loop_scope="session")
        async def of_the_session_loop():
            async with aiorlinf.init("d:0") as d:
                yield d

        @pytest_asyncio.fixture
        async def fresh():
            async with aiorlinf.init("e:0") as e:
                yield e

        async def exchange(one, other, tag):
            w = one.send([tag, torch.ones(50_000)], str(other.address), tag=tag)
            assert (await other.recv(str(one.address), tag=tag))[0] == tag
            await w

        @pytest.mark.parametrize("number", range(2))
        @pytest.mark.asyncio
        async def test_function_loop(comm, number):
            await asyncio.gather(*(exchange(*comm, tag) for tag in range(5)))

        @pytest.mark.asyncio(loop_scope="module")
        async def test_module_loop(comm, made_in_a_coroutine):
            await asyncio.gather(*(exchange(*comm, tag) for tag in range(5)))
            await exchange(comm[0], made_in_a_coroutine, 1)

        @pytest.mark.asyncio
        async def test_mixed(comm, made_in_a_coroutine, fresh):
            await exchange(made_in_a_coroutine, comm[1], 1)
            await exchange(fresh, comm[1], 1)
            await exchange(comm[1], fresh, 1)

        @pytest.mark.parametrize("number", range(2))
        @pytest.mark.asyncio(loop_scope="session")
        async def test_session_loop(of_the_session_loop, comm, number):
            await exchange(of_the_session_loop, comm[0], number)
            await exchange(comm[0], of_the_session_loop, number)

        @pytest.mark.asyncio
        async def test_other_loop_than_the_workers(of_the_session_loop):
            # That loop cannot run now, so this would hang.
            with pytest.raises(aiorlinf.errors.UsageError, match="another event loop"):
                of_the_session_loop.recv("d:0")
            with pytest.raises(aiorlinf.errors.UsageError, match="another event loop"):
                of_the_session_loop.send(1, "d:0")

        def test_synchronous(comm):
            w = comm[0].send(1, "b:0")
            assert comm[1].recv("a:0").wait(20) == 1
            w.wait(20)
        """,
        "-o",
        "asyncio_default_fixture_loop_scope=function",
        "-W",
        "error",
    )
    assert run.status == 0, run.output
    assert len(run.outcomes) == 8
    assert set(run.outcomes.values()) == {"passed"}, run.texts
