"""The system gives no more threads: what can do without goes on, slower; what cannot says so at once, and leaves nothing behind.

`threading.Thread.start` fails here as it does at the limit on processes (`ulimit -u`, a container's limit on pids).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.errors import AiorlinfError
from aiorlinf.work.pool import ThreadPool

__all__: list[str] = []


class Threads:
    """How many more can be started.

    Attributes:
        left: so many; None: as many as are wanted.
        refused: how often one was not.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self.refused = 0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    system = Threads()
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if system.left is not None:
            if system.left == 0:
                system.refused += 1
                raise RuntimeError("can't start new thread")
            system.left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    yield system
    system.left = None


class Reports(queue.Queue[tuple[Any, BaseException | None, str]]):
    def report(self, value: Any, error: BaseException | None) -> None:
        self.put((value, error, threading.current_thread().name))


def test_a_pool_without_threads_works_in_its_callers_or_says_so(threads: Threads) -> None:
    pool, reports = ThreadPool("pool", 2), Reports()
    threads.left = 0
    pool.submit(lambda: 1, reports.report, here=True)
    assert reports.get_nowait() == (1, None, threading.current_thread().name)
    with pytest.raises(AiorlinfError, match=r"the thread 'pool-0' cannot be started: can't start new thread .*ulimit -u"):
        pool.submit(lambda: 2, reports.report)
    threads.left = 1
    gate = threading.Event()
    for number in range(5):  # all of them by the one thread that there is
        pool.submit(lambda number=number: (gate.wait(10), number), reports.report, here=True)  # type: ignore[misc]
    gate.set()
    assert [reports.get(timeout=10) for _ in range(5)] == [((True, number), None, "pool-0") for number in range(5)]
    threads.left = None
    both = threading.Barrier(3)
    for _ in range(2):
        pool.submit(both.wait, reports.report)
    both.wait(10)
    pool.close()
    assert pool.join(10)


@pytest.mark.asyncio
async def test_joining_says_that_it_lacks_a_thread_and_leaves_nothing(threads: Threads) -> None:
    for left in range(3):  # one for the manager and what starts it, one for heartbeats
        threads.left = left
        with pytest.raises(AiorlinfError, match=r"the thread 'aiorlinf (manager|heartbeat)' cannot be started"):
            async with init("a:0"):
                raise AssertionError("it has joined")
    threads.left = 3
    async with init("a:0") as a:
        sent = a.send(1, "a:0")
        assert await a.recv("a:0", timeout=20) == 1
        await sent
    assert threads.refused


@pytest.mark.parametrize("left", range(4))
def test_joining_in_a_thread_of_its_own_says_so_too(threads: Threads, left: int) -> None:
    threads.left = left
    with pytest.raises(AiorlinfError, match=r"the thread 'aiorlinf (a:0|manager|heartbeat)' cannot be started"):
        init("a:0")
    threads.left = None
    with init("a:0") as a:
        sent = a.send(1, "a:0")
        assert a.recv("a:0").wait(20) == 1
        sent.wait(20)


@pytest.mark.asyncio
@pytest.mark.parametrize("left", range(3))
@pytest.mark.parametrize("carrier", ["shm", "gloo", "compressed"])
async def test_large_messages_arrive_without_threads(threads: Threads, complaints: list[str], carrier: str, left: int) -> None:
    collective: dict[str, Any] = {"backend": carrier}
    if carrier == "compressed":
        collective = {"backend": "stream", "tensor_compression": {"codec": "zstd", "excluded_dtypes": []}}
    config = {"cluster": {"collective": collective}}
    async with init("a:0", config=config) as a, init("b:0") as b:
        await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
        for most in (left, None):
            threads.left = most
            for number in range(3):
                sent = a.send(torch.full((1 << 21,), float(number)), "b:0")
                assert (await b.recv("a:0", timeout=20) == number).all()
                await sent
    if carrier == "gloo":  # a pair is made in a thread: without one the stream carries what it would have
        assert all("gloo was chosen, but the pair cannot be made" in text for text in complaints)
        complaints.clear()


@pytest.mark.asyncio
async def test_a_then_step_that_asks_for_a_thread_fails_without_one(threads: Threads) -> None:
    async with init("a:0") as a:
        a.home.drop_pool()  # the manager was started in one of its threads
        threads.left = 0
        sent = a.send(1, "a:0")
        step = a.recv("a:0").then_in_thread(lambda value: value)
        with pytest.raises(AiorlinfError, match="cannot be started"):
            await step
        await sent
        threads.left = None
        sent = a.send(2, "a:0")
        assert await a.recv("a:0").then_in_thread(lambda value: value + 1) == 3
        await sent
