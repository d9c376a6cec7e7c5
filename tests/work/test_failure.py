"""Errors that nobody looks at."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.errors import ClosedError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all, wait_first
from aiorlinf.work.home import LoopHome
from aiorlinf.work.loop_thread import LoopThread
from tests.work.helpers import turns

ROOT = Path(__file__).resolve().parent.parent.parent


class Broken(Exception):
    """What goes wrong in these tests."""


def failed(home: LoopHome) -> AsyncWork[int]:
    work: AsyncWork[int] = AsyncWork(home, "send")
    work._fail(Broken("lost"))
    return work


@pytest.mark.asyncio
async def test_an_error_that_nobody_looks_at_is_logged_once_with_its_origin(home: LoopHome, logged: list[logging.LogRecord]) -> None:
    work = failed(home)
    assert logged == []
    del work
    (record,) = logged
    text = record.getMessage()
    assert "send" in text
    assert f"{__file__}:" in text
    assert "Broken: lost" in text
    assert record.exc_info is None, "there is no traceback, so it would say the same again"
    logged.clear()


@pytest.mark.asyncio
async def test_one_log_for_a_whole_chain_and_all_its_branches(home: LoopHome, logged: list[logging.LogRecord]) -> None:
    def decode(_value: int) -> int:
        raise Broken("in decode")

    work: AsyncWork[int] = AsyncWork(home, "recv")
    end, good = work.then(decode).then(str).then(len), work.then(str)
    branches = [end.then(print) for _ in range(3)]
    work._finish(1)
    assert good.result() == "1"
    del work, end, good
    gc.collect()
    assert logged == []
    del branches
    gc.collect()
    (record,) = logged
    assert "decode" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], Broken), "with the traceback of what the program itself did"
    logged.clear()


@pytest.mark.asyncio
async def test_the_end_of_what_one_closed_oneself_is_no_error(
    home: LoopHome, logged: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiorlinf")
    work: AsyncWork[int] = AsyncWork(home, "send")
    work._fail(ClosedError("closed"))
    del work
    assert logged == []
    assert [record.levelno for record in caplog.records if record.name == "aiorlinf"] == [logging.DEBUG]


async def awaits(work: AsyncWork[int]) -> None:
    with pytest.raises(Broken):
        await work


async def asks(work: AsyncWork[int]) -> None:
    assert work.exception() is not None


async def takes_the_result(work: AsyncWork[int]) -> None:
    with pytest.raises(Broken):
        work.result()


async def looks_at_the_end_of_the_chain(work: AsyncWork[int]) -> None:
    with pytest.raises(Broken):
        await work.then(str).then(str)


async def adds_a_callback(work: AsyncWork[int]) -> None:
    work.add_done_callback(lambda _work: None)
    await turns()


@pytest.mark.asyncio
@pytest.mark.parametrize("look", [awaits, asks, takes_the_result, looks_at_the_end_of_the_chain, adds_a_callback])
async def test_who_looks_keeps_it_out_of_the_log(
    home: LoopHome, logged: list[logging.LogRecord], look: Callable[[AsyncWork[int]], Any]
) -> None:
    await look(failed(home))
    pending: AsyncWork[int] = AsyncWork(home, "send")
    home.loop.call_soon(pending._fail, Broken())
    if look in (asks, takes_the_result):
        await turns()
    await look(pending)
    del pending
    gc.collect()
    assert logged == []


@pytest.mark.asyncio
async def test_a_cancelled_work_is_not_an_error(home: LoopHome, logged: list[logging.LogRecord]) -> None:
    work: AsyncWork[int] = AsyncWork(home, "send")
    end = work.then(str)
    work.cancel()
    del work, end
    gc.collect()
    assert logged == []


@pytest.mark.asyncio
async def test_a_wait_in_a_thread_is_a_look(home: LoopHome, logged: list[logging.LogRecord]) -> None:
    work: AsyncWork[int] = AsyncWork(home, "send")
    caught: list[BaseException] = []

    def wait(work: AsyncWork[int]) -> None:
        try:
            work.wait(10)
        except Broken as error:
            caught.append(error)

    thread = threading.Thread(target=wait, args=(work,))
    thread.start()
    await asyncio.sleep(0.002)
    work._fail(Broken())
    await asyncio.to_thread(thread.join)
    del work, thread
    gc.collect()
    assert len(caught) == 1
    assert logged == []


def test_an_exit_with_unseen_errors_is_quiet_or_clear() -> None:
    program = (
        "import asyncio\n"
        "from aiorlinf.work import AsyncWork, LoopHome\n"
        "async def main():\n"
        "    global work\n"
        "    work = AsyncWork(LoopHome(asyncio.get_running_loop()), 'send')\n"
        "    work._fail(ValueError('x'))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("how", ["await", "async_wait", "then", "all", "first"])
@pytest.mark.asyncio
async def test_who_gives_up_as_it_fails_wants_to_hear_nothing(how: str, home: LoopHome, logged: list[logging.LogRecord]) -> None:
    """Two time limits that end at the same moment, say: the work's own, and one around the task that waits for it."""

    async def wait(work: AsyncWork[int]) -> Any:
        if how == "async_wait":
            return await work.async_wait(timeout=100)
        if how == "then":
            return await work.then(str).then(len)
        if how in ("all", "first"):
            return await (wait_all([work]) if how == "all" else wait_first([work]))
        return await work

    work: AsyncWork[int] = AsyncWork(home, "recv")
    task = asyncio.create_task(wait(work))
    await turns(2)
    work._fail(Broken("too late"))
    task.cancel()  # before the task has had a turn
    with pytest.raises(asyncio.CancelledError):
        await task
    del work, task
    gc.collect()
    assert logged == []


def test_who_gives_up_on_another_loop_as_it_fails_wants_to_hear_nothing(logged: list[logging.LogRecord]) -> None:
    async def wait(work: AsyncWork[int]) -> int:
        return await work

    async def give_up(thread: LoopThread, work: AsyncWork[int]) -> None:
        task = asyncio.create_task(wait(work))
        await turns(2)
        thread.home.call_soon(work._fail, Broken("too late"))
        while not work.done():
            pass  # our loop has no turn: it does not hear of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    thread = LoopThread("test")
    try:
        asyncio.run(give_up(thread, AsyncWork(thread.home, "recv")))
        thread.home.submit(int).wait(10)  # what was handed over before has been done
    finally:
        thread.home.call_soon(thread.home.close_nowait)
        thread.home.call_soon(thread.stop)
        thread.join()
    gc.collect()
    assert logged == []
