"""Waiting from other threads and other loops."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aiorlinf.errors import ClosedError, DeadlineExceeded, ForkedHandle, WouldBlockLoop
from aiorlinf.work import base
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all, wait_first
from aiorlinf.work.home import LoopHome
from tests.work.helpers import LoopThread, finish_later, turns

ROOT = Path(__file__).resolve().parent.parent.parent


class Broken(Exception):
    """What goes wrong in these tests."""


def recv(thread: LoopThread, **options: Any) -> AsyncWork[Any]:
    return AsyncWork(thread.home, "recv", **options)


# -- threads ------------------------------------------------------------------------------------------------------


def test_wait_from_a_thread(home_thread: LoopThread) -> None:
    work = recv(home_thread)
    finish_later(work, 3)
    assert work.wait() == 3
    assert work.wait(0) == 3
    assert work.result() == 3
    failing = recv(home_thread)
    home_thread.loop.call_soon_threadsafe(failing._fail, Broken("x"))
    with pytest.raises(Broken):
        failing.wait(10)
    cancelled = recv(home_thread)
    assert cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        cancelled.wait(10)


def test_a_chain_made_and_waited_for_in_a_thread(home_thread: LoopThread) -> None:
    work = recv(home_thread)
    finish_later(work, 3)

    async def postprocess(value: int, factor: int) -> int:
        await asyncio.sleep(0.001)
        return value * factor

    assert work.then(postprocess, 5).wait(10) == 15
    assert work.then(lambda value: (value, threading.get_ident())).wait(10) == (3, home_thread.home.thread_id)


def ends_with_its_loop(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> AsyncWork[int]:
    """A work that is finished as the last thing that its loop does, at the moment when somebody begins to wait."""
    work = recv(thread)
    calls = thread.home.call_soon

    def call_soon(*call: Any) -> None:
        monkeypatch.setattr(thread.home, "call_soon", calls)
        thread.loop.call_soon_threadsafe(work._finish, 7)
        thread.stop()
        calls(*call)

    monkeypatch.setattr(thread.home, "call_soon", call_soon)
    return work


def test_a_work_that_ends_with_its_loop_in_the_moment_of_the_wait(home_thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends_with_its_loop(home_thread, monkeypatch).wait(10) == 7


@pytest.mark.parametrize("timeout", [None, 10.0])
def test_the_same_for_one_that_waits_on_another_loop(
    home_thread: LoopThread, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    work = ends_with_its_loop(home_thread, monkeypatch)

    async def main() -> int:
        return await work.async_wait(timeout)

    assert asyncio.run(main()) == 7


def test_a_limit_of_wait_consumes_nothing(home_thread: LoopThread) -> None:
    given_back: list[int] = []
    work = recv(home_thread, give_back=given_back.append)
    for timeout in (0.005, 0, -1):
        with pytest.raises(DeadlineExceeded) as caught:
            work.wait(timeout)
        assert caught.value.operation == "recv"
    home_thread.do(lambda: None)
    assert work._dependants() == 0
    assert work._claims == 0
    finish_later(work, 4)
    assert work.wait(10) == 4
    assert given_back == []
    assert not work.cancel()


def test_wait_on_a_coroutine_of_the_home_raises(home_thread: LoopThread) -> None:
    work = recv(home_thread)

    async def block() -> None:
        work.wait(1)

    with pytest.raises(WouldBlockLoop, match="await"):
        home_thread.run(block()).result(10)
    work.cancel()


def test_wait_inside_another_loop_blocks_that_one_only(home_thread: LoopThread) -> None:
    async def main() -> int:
        work = recv(home_thread)
        finish_later(work, 5)
        return int(work.wait(10))

    assert asyncio.run(main()) == 5


def test_many_threads_wait_for_one_work(home_thread: LoopThread) -> None:
    work = recv(home_thread)
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(work.wait, 10) for _ in range(8)]
        finish_later(work, 6)
        assert [wait.result(10) for wait in waits] == [6] * 8


def test_wait_on_a_home_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SLICE", 0.01)
    with LoopThread(uvloop.new_event_loop) as thread:
        work = recv(thread)
        loop = thread.loop
        loop.call_soon_threadsafe(loop.call_later, 0.02, loop.stop)
        with pytest.raises(ClosedError, match="recv"):
            work.wait()
    with pytest.raises(ClosedError):
        work.wait(10)
    with pytest.raises(ClosedError):
        work.then(lambda value: value)
    assert not work.cancel()


def test_an_await_on_a_home_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SLICE", 0.01)

    async def main() -> None:
        with LoopThread(uvloop.new_event_loop) as thread:
            work = recv(thread)
            thread.loop.call_soon_threadsafe(thread.loop.call_later, 0.02, thread.loop.stop)
            with pytest.raises(ClosedError):
                await work
        with pytest.raises(ClosedError):
            await work.async_wait(1)

    asyncio.run(main())


def test_give_back_or_take_but_never_both(home_thread: LoopThread) -> None:
    rng = random.Random(8)
    for _ in range(300):
        given_back: list[int] = []
        work = recv(home_thread, give_back=given_back.append)
        if rng.random() < 0.5:
            home_thread.do(work._finish, 1)
        else:
            home_thread.loop.call_soon_threadsafe(work._finish, 1)
        work.cancel()
        try:
            taken = work.wait(10)
        except asyncio.CancelledError:
            taken = None
        home_thread.do(lambda: None)
        if taken is None:
            assert work.cancelled()
            assert given_back in ([], [1])
        else:
            assert given_back == []
            assert work.result() == 1


def test_every_message_is_taken_once_by_threads_that_give_up_now_and_then(home_thread: LoopThread) -> None:
    lock = threading.Lock()
    messages: list[int] = []
    waiting: list[AsyncWork[int]] = []
    taken: list[int] = []

    def match() -> None:
        while messages and waiting:
            work = waiting.pop(0)
            if not work.done():
                work._finish(messages.pop(0))

    def give_back(message: int) -> None:
        messages.insert(0, message)
        match()

    def post(work: AsyncWork[int]) -> None:
        waiting.append(work)
        match()

    def put(message: int) -> None:
        messages.append(message)
        match()

    def consume(seed: int) -> None:
        rng = random.Random(seed)
        while len(taken) < 200:
            work: AsyncWork[int] = AsyncWork(home_thread.home, "recv", give_back=give_back)
            home_thread.home.call(post, work)
            try:
                value = work.wait(rng.choice([0.0, 0.0005, 0.01]))
            except TimeoutError:
                work.cancel()
                try:
                    value = work.wait(10)
                except asyncio.CancelledError:
                    continue
            except asyncio.CancelledError:
                continue
            with lock:
                taken.append(value)

    threads = [threading.Thread(target=consume, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        home_thread.home.call(put, number)
        if number % 7 == 0:
            time.sleep(0.0005)
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(200))


PROGRAM = """
import asyncio, threading, time, sys
from aiorlinf.work import AsyncWork, LoopHome
loop = asyncio.new_event_loop()
def run():
    global home
    home = LoopHome(loop)
    loop.call_soon(ready.set)
    loop.run_forever()
ready = threading.Event()
thread = threading.Thread(target=run)
thread.start()
ready.wait()
work = AsyncWork(home, "recv")
print("waiting", flush=True)
try:
    work.wait({timeout})
except KeyboardInterrupt:
    print("interrupted", work.done(), flush=True)
loop.call_soon_threadsafe(work._finish, 3)
print(work.wait(10), flush=True)
loop.call_soon_threadsafe(loop.stop)
thread.join()
loop.close()
"""


@pytest.mark.parametrize("timeout", ["None", "100"])
def test_ctrl_c_interrupts_a_wait_and_leaves_the_work_alive(timeout: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{timeout}", timeout)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
        assert output == "interrupted False\n3\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


# -- other loops ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_awaiting_on_another_loop(home: LoopHome, loop_thread: LoopThread) -> None:
    other = loop_thread.home
    work: AsyncWork[int] = AsyncWork(other, "recv")
    tasks = [asyncio.ensure_future(work) for _ in range(3)]
    await turns()
    loop_thread.do(work._finish, 1)
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert await work == 1
    failing: AsyncWork[int] = AsyncWork(other, "recv")
    loop_thread.loop.call_soon_threadsafe(failing._fail, Broken())
    with pytest.raises(Broken):
        await failing
    cancelled: AsyncWork[int] = AsyncWork(other, "recv")
    loop_thread.loop.call_soon_threadsafe(cancelled.cancel)
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    limited: AsyncWork[int] = AsyncWork(other, "recv")
    with pytest.raises(DeadlineExceeded):
        await limited.async_wait(0.003)
    loop_thread.do(lambda: None)
    assert limited._claims == 0
    finish_later(limited, 2)
    assert await limited.async_wait(10) == 2


@pytest.mark.asyncio
async def test_a_long_await_on_another_loop(home: LoopHome, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SLICE", 0.0005)
    for delay in (0.0, 0.001, 0.01):
        work: AsyncWork[int] = AsyncWork(loop_thread.home, "recv")
        finish_later(work, 2, delay)
        assert await work == 2
        finish_later(work := AsyncWork(loop_thread.home, "recv"), 3, delay)
        assert await work.async_wait(5) == 3


@pytest.mark.asyncio
async def test_cancelling_from_another_loop(home: LoopHome, loop_thread: LoopThread) -> None:
    aborted: list[Any] = []
    given_back: list[int] = []
    work: AsyncWork[int] = AsyncWork(loop_thread.home, "recv", abort=aborted.append)
    task = asyncio.ensure_future(work)
    await turns()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    loop_thread.do(lambda: None)
    assert work.cancelled()
    assert aborted == [work]
    late: AsyncWork[int] = AsyncWork(loop_thread.home, "recv", give_back=given_back.append)
    task = asyncio.ensure_future(late)
    await turns()
    loop_thread.do(late._finish, 3)
    task.cancel()
    await asyncio.wait([task])
    loop_thread.do(lambda: None)
    assert task.cancelled()
    assert given_back == [3]


@pytest.mark.asyncio
async def test_a_yielding_await_on_another_loop_gives_back(home: LoopHome, loop_thread: LoopThread) -> None:
    given_back: list[int] = []
    work: AsyncWork[int] = AsyncWork(loop_thread.home, "recv", give_back=given_back.append)
    loop_thread.do(work._finish, 3)
    loop_thread.home.turns = 63
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    loop_thread.do(lambda: None)
    assert given_back == [3]


@pytest.mark.asyncio
async def test_messages_survive_random_cancels_on_another_loop(home: LoopHome, loop_thread: LoopThread) -> None:
    rng = random.Random(9)
    given_back: list[int] = []
    taken: list[int] = []

    async def one(number: int) -> None:
        work: AsyncWork[int] = AsyncWork(loop_thread.home, "recv", give_back=given_back.append)
        task = asyncio.ensure_future(work)
        await turns(rng.randrange(3))
        loop_thread.loop.call_soon_threadsafe(work._finish, number)
        if number % 3:
            await turns(rng.randrange(40))
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            taken.append(task.result())

    for start in range(0, 300, 20):
        await asyncio.gather(*(one(number) for number in range(start, start + 20)))
    loop_thread.do(lambda: None)
    assert len({*taken, *given_back}) == len(taken) + len(given_back)
    assert {number for number in range(300) if number % 3 == 0} <= {*taken}


@pytest.mark.asyncio
async def test_callbacks_are_called_on_the_loop_they_were_added_from(home: LoopHome, loop_thread: LoopThread) -> None:
    work: AsyncWork[int] = AsyncWork(loop_thread.home, "recv")
    threads: list[int] = []
    work.add_done_callback(lambda _work: threads.append(threading.get_ident()))
    loop_thread.do(work.add_done_callback, lambda _work: threads.append(threading.get_ident()))
    in_plain_thread = threading.Thread(target=work.add_done_callback, args=(lambda _work: threads.append(-threading.get_ident()),))
    in_plain_thread.start()
    in_plain_thread.join()
    done, _pending = await asyncio.wait([work], timeout=0.001)  # type: ignore[type-var]
    assert done == set()
    loop_thread.do(lambda: None)
    loop_thread.do(work._finish, 1)
    done, _pending = await asyncio.wait([work], timeout=10)  # type: ignore[type-var]
    assert done == {work}
    while len(threads) < 3:
        await asyncio.sleep(0.001)
    assert sorted(threads) == sorted([threading.get_ident(), loop_thread.home.thread_id, -loop_thread.home.thread_id])


def test_a_callback_of_a_loop_that_has_ended_is_called_at_home(home_thread: LoopThread) -> None:
    work = recv(home_thread)
    called: list[int] = []

    async def main() -> None:
        work.add_done_callback(lambda _work: called.append(threading.get_ident()))

    asyncio.run(main())
    home_thread.do(work._finish, 1)
    home_thread.do(lambda: None)
    assert called == [home_thread.home.thread_id]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_several_loops_in_turn(home_thread: LoopThread, run: Callable[[Any], Any]) -> None:
    work = recv(home_thread)

    async def use(number: int) -> int:
        other = recv(home_thread)
        finish_later(other, number)
        assert await other == number
        if number == 2:
            finish_later(work, 10)
        if number >= 2:
            return int(await work.async_wait(10)) + number
        with pytest.raises(DeadlineExceeded):
            await work.async_wait(0.002)
        return number

    assert [run(use(number)) for number in range(4)] == [0, 1, 12, 13]


def test_a_loop_that_ends_while_it_waits_loses_nothing(home_thread: LoopThread) -> None:
    given_back: list[int] = []
    work = recv(home_thread, give_back=given_back.append)
    loop = asyncio.new_event_loop()
    task = loop.create_task(work.async_wait())
    loop.run_until_complete(turns())
    loop.close()
    home_thread.do(work._finish, 3)
    home_thread.do(lambda: None)
    assert given_back == [3]
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # destroyed on purpose
    del task


def test_a_task_destroyed_on_another_loop_leaves_the_work_alone(home_thread: LoopThread) -> None:
    work = recv(home_thread)

    async def main() -> None:
        waiting = work.__await__()
        next(waiting)
        home_thread.do(lambda: None)
        assert work._dependants() == 1
        waiting.close()
        home_thread.do(lambda: None)
        assert work._dependants() == 0

    asyncio.run(main())
    home_thread.do(work._finish, 1)
    assert work.wait(10) == 1


def test_after_a_fork_works_refuse_instead_of_hanging(home_thread: LoopThread) -> None:
    work = recv(home_thread)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                work.wait(5)
            except ForkedHandle:
                os.write(write, b"refused")
                code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"refused"
    assert os.waitpid(pid, 0)[1] == 0
    finish_later(work, 1)
    assert work.wait(10) == 1


def test_a_finished_work_outlives_its_loop(home_thread: LoopThread) -> None:
    work = recv(home_thread)
    home_thread.do(work._finish, 1)
    home_thread.stop()

    async def main() -> list[int]:
        done, _ = await asyncio.wait([work], timeout=5)  # type: ignore[type-var]
        return [await work, work.wait(), work.result(), *(each.result() for each in done)]

    assert asyncio.run(main()) == [1, 1, 1, 1]


def test_a_work_that_ends_after_its_loop_does_no_harm() -> None:
    loop = asyncio.new_event_loop()
    home = LoopHome(loop)
    work: AsyncWork[int] = AsyncWork(home, "recv")
    called: list[int] = []
    ran: list[int] = []

    async def wait() -> int:
        return await work

    task = loop.create_task(wait())
    loop.run_until_complete(turns())
    work.add_done_callback(lambda done: called.append(done.result()))
    step = work.then(ran.append)
    loop.close()
    assert work._finish(1)
    assert work.result() == 1
    assert step.done()
    assert ran == [1]
    assert called == []
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # destroyed on purpose
    del task


def test_followers_of_works_whose_loop_ends() -> None:
    given_back: list[int] = []
    with LoopThread(uvloop.new_event_loop) as ending, LoopThread(uvloop.new_event_loop) as staying:
        inner: AsyncWork[int] = AsyncWork(staying.home, "recv", give_back=given_back.append)
        start: AsyncWork[int] = AsyncWork(ending.home, "recv")
        step = start.then(lambda _value: inner)
        ending.do(start._finish, 1)
        both = ending.do(wait_all, [start, inner])
        while inner._dependants() < 2:
            staying.do(lambda: None)
        ending.stop()
        staying.do(inner._finish, 5)
        staying.do(lambda: None)
        assert given_back == [5]
        assert inner.cancelled()
        with pytest.raises(ClosedError):
            step.wait(1)
        with pytest.raises(ClosedError):
            both.wait(1)
        # What is over is of use without its loop; what is not will never be.
        pending: AsyncWork[int] = AsyncWork(ending.home, "recv")
        live: AsyncWork[int] = AsyncWork(staying.home, "recv")
        assert staying.do(wait_first, [start, live]).wait(10) == (0, 1)
        assert staying.do(wait_all, [start, start]).wait(10) == [1, 1]
        assert wait_all([start]).wait(10) == [1]
        for combined in (wait_first([pending, live]), wait_all([pending])):
            with pytest.raises(ClosedError):
                combined.wait(10)
        assert not live.done()
        assert live._claims == 0
        live.cancel()
        done: AsyncWork[int] = AsyncWork(staying.home, "recv")
        followers = [done.then(lambda _value: start), done.then(lambda _value: pending)]
        staying.do(done._finish, 0)
        assert followers[0].wait(10) == 1
        with pytest.raises(ClosedError):
            followers[1].wait(10)
