"""The home loop and the ways onto it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from typing import Any

import pytest

from aiorlinf.errors import ClosedError
from aiorlinf.work.home import CALLS_PER_TURN, LoopHome
from tests.system import soon
from tests.work.helpers import LoopThread, turns


class Broken(Exception):
    """What goes wrong in these tests."""


@pytest.mark.asyncio
async def test_call_on_the_home_thread_is_immediate(home: LoopHome) -> None:
    calls: list[int] = []
    assert home.on_home()
    home.call(calls.append, 1)
    assert calls == [1]
    home.call_soon(calls.append, 2)
    assert calls == [1]
    await turns()
    assert calls == [1, 2]
    with pytest.raises(Broken):
        home.call(fail)


def fail() -> None:
    raise Broken


def test_calls_of_a_thread_arrive_in_order(home_thread: LoopThread) -> None:
    home = home_thread.home
    calls: list[int] = []
    assert not home.on_home()
    assert home_thread.do(home.on_home)
    for number in range(3 * CALLS_PER_TURN):
        home.call(calls.append, number)
    home_thread.do(lambda: None)
    while len(calls) < 3 * CALLS_PER_TURN:
        time.sleep(0.001)
    assert calls == list(range(3 * CALLS_PER_TURN))


def test_calls_of_many_threads_are_all_made(home_thread: LoopThread) -> None:
    home = home_thread.home
    calls: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for number in range(500):
            home.call(calls.append, (thread, number))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 10
    while len(calls) < 2000 and time.monotonic() < deadline:
        time.sleep(0.001)
    for index in range(4):
        assert [number for thread_index, number in calls if thread_index == index] == list(range(500))


def test_a_call_that_fails_does_not_lose_the_others(home_thread: LoopThread, problems: list[dict[str, Any]]) -> None:
    calls: list[int] = []

    def hand_over() -> None:
        home_thread.home.call_soon(fail)
        home_thread.home.call_soon(calls.append, 1)

    home_thread.do(hand_over)
    home_thread.do(lambda: None)
    assert calls == [1]
    assert isinstance(problems.pop()["exception"], Broken)


def test_an_interrupt_in_a_call_does_not_lose_the_others() -> None:
    loop = asyncio.new_event_loop()
    home = LoopHome(loop)
    calls: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    home.call_soon(interrupt)
    home.call_soon(calls.append, 1)
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(turns())
    assert calls == [1]
    loop.run_until_complete(home.close())
    loop.close()


def test_a_closed_loop_refuses(home_thread: LoopThread) -> None:
    home_thread.stop()
    with pytest.raises(ClosedError):
        home_thread.home.call(print)


class Ending(asyncio.SelectorEventLoop):
    """Comes to rest and is closed at the moment named by `at`: as if its thread had done so just then."""

    home: LoopHome
    at = ""

    def _end(self, moment: str) -> None:
        if self.at == moment:
            self.at = ""
            self.home.rest()
            self.close()

    def is_closed(self) -> bool:
        self._end("is_closed")
        return super().is_closed()

    def call_soon_threadsafe(self, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        self._end("call_soon_threadsafe")
        return super().call_soon_threadsafe(*args, **more)


@pytest.mark.parametrize("moment", ["is_closed", "call_soon_threadsafe"])
def test_a_call_is_made_also_where_the_loop_comes_to_rest_in_the_middle_of_handing_it_over(moment: str) -> None:
    loop = Ending()
    loop.home = home = LoopHome(loop, name="test")
    loop.at = moment
    made: list[int] = []
    for number in range(3):
        home.call_soon(made.append, number)
    assert made == [0, 1, 2]
    assert loop.is_closed()


def test_the_thread_can_be_bound_later() -> None:
    loop = asyncio.new_event_loop()
    home = LoopHome(loop)
    assert home.on_home()
    found: list[bool] = []

    def run() -> None:
        home.bind()
        found.append(home.on_home())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    loop.close()
    assert found == [True]
    assert home.thread_id == thread.ident


@pytest.mark.asyncio
async def test_spawned_tasks_are_held_and_their_errors_logged_once(home: LoopHome, logged: list[logging.LogRecord]) -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0.001)
        done.append(1)

    async def bad() -> None:
        raise Broken

    task = home.spawn(work(), "worker")
    assert task.get_name() == "worker"
    del task
    gc.collect()
    home.spawn(bad(), "bad one")
    while not done or not logged:
        await asyncio.sleep(0.001)
    (record,) = logged
    assert "bad one" in record.getMessage()
    logged.clear()
    await turns()
    assert home._tasks == set()


@pytest.mark.asyncio
async def test_submit_runs_in_a_private_thread(home: LoopHome) -> None:
    def where(value: int) -> tuple[int, str]:
        return value, threading.current_thread().name

    value, name = await home.submit(where, 3)
    assert value == 3
    assert name.startswith("test-")
    with pytest.raises(Broken):
        await home.submit(fail)
    assert await home.submit(where, 1).then(lambda pair: pair[0] + 1) == 2


def test_submit_from_another_thread(home_thread: LoopThread) -> None:
    assert home_thread.home.submit(lambda: threading.current_thread().name).wait(10).startswith("other-")


@pytest.mark.asyncio
async def test_a_full_default_executor_does_not_matter(home: LoopHome) -> None:
    gate = threading.Event()
    blocked = [home.loop.run_in_executor(None, gate.wait, 10) for _ in range(40)]
    assert await asyncio.gather(*(home.submit(int) for _ in range(20))) == [0] * 20
    gate.set()
    await asyncio.gather(*blocked)


@pytest.mark.asyncio
async def test_close_ends_everything_and_is_idempotent(home: LoopHome) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def occupy(number: int) -> bool:
        begun.append(number)
        return gate.wait(10)

    running = [home.submit(occupy, number) for number in range(2)]
    queued = [home.submit(int) for _ in range(3)]
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("task")

    home.spawn(forever(), "forever")
    await asyncio.sleep(0.001)
    await soon(lambda: len(begun) == 2)
    threading.Timer(0.005, gate.set).start()
    await home.close()
    assert ended == ["task"]
    for work in queued:
        with pytest.raises(ClosedError):
            await work
    assert [await work for work in running] == [True, True]
    await home.close()
    home.close_nowait()
    with pytest.raises(ClosedError):
        home.spawn(forever(), "late")
    with pytest.raises(ClosedError):
        await home.submit(int)
    with pytest.raises(ClosedError):
        _ = home.poller
    assert "closed" in repr(home)


@pytest.mark.asyncio
async def test_close_does_not_wait_for_ever_for_a_stuck_thread(home: LoopHome) -> None:
    gate = threading.Event()
    begun = threading.Event()

    def get_stuck() -> bool:
        begun.set()
        return gate.wait(30)

    stuck = home.submit(get_stuck)
    await soon(begun.is_set)
    await home.close(0.01)
    assert not stuck.done()
    gate.set()
    assert await stuck is True


@pytest.mark.asyncio
async def test_a_task_may_close_its_own_home(home: LoopHome) -> None:
    other = home.spawn(asyncio.sleep(100), "other")
    await asyncio.wait_for(home.spawn(home.close(), "closer"), 5)
    assert other.cancelled()
