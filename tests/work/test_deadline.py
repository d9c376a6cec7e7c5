"""Time budgets."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from typing import Any

import pytest

from aiorlinf.errors import DeadlineExceeded
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import NO_DEADLINE, Deadline, current_deadline, effective_deadline, expire
from aiorlinf.work.home import LoopHome
from tests.work.helpers import LoopThread


def test_a_deadline_counts_down_to_zero() -> None:
    deadline = Deadline.after(10)
    assert 9 < deadline.remaining() <= 10
    assert deadline.left() == pytest.approx(deadline.remaining(), abs=1)
    assert deadline.bounded
    assert not deadline.passed()
    past = Deadline.after(-1)
    assert past.remaining() == 0
    assert past.left() == 0
    assert past.passed()
    assert past < deadline < NO_DEADLINE


def test_no_deadline_is_infinity() -> None:
    assert Deadline.after(None) is NO_DEADLINE
    assert NO_DEADLINE.remaining() == math.inf
    assert NO_DEADLINE.left() is None
    assert not NO_DEADLINE.bounded
    assert not NO_DEADLINE.passed()


def test_the_earlier_of_the_callers_and_the_chains() -> None:
    def check() -> None:
        assert effective_deadline(None) is NO_DEADLINE
        assert effective_deadline(5).remaining() <= 5
        current_deadline.set(Deadline.after(2))
        assert effective_deadline(None).remaining() <= 2
        assert effective_deadline(5).remaining() <= 2
        assert effective_deadline(1).remaining() <= 1

    contextvars.copy_context().run(check)


@pytest.mark.asyncio
async def test_a_work_that_is_late_is_aborted_and_fails(home: LoopHome) -> None:
    aborted: list[Any] = []
    work: AsyncWork[int] = AsyncWork(home, "recv", abort=aborted.append)
    begin = time.monotonic()
    expire(work, Deadline.after(0.003))
    with pytest.raises(DeadlineExceeded) as caught:
        await work
    assert time.monotonic() - begin >= 0.003
    assert (caught.value.operation, caught.value.step) == ("recv", "recv")
    assert caught.value.elapsed is not None
    assert caught.value.elapsed >= 0.003
    assert aborted == [work]
    assert not work._finish(1)


@pytest.mark.asyncio
async def test_the_producer_makes_the_error(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    expire(work, 0.002, lambda elapsed: ValueError(f"{elapsed > 0}"))
    with pytest.raises(ValueError, match="True"):
        await work

    def bad(_elapsed: float) -> BaseException:
        raise KeyError("no text")

    work = AsyncWork(home, "recv")
    expire(work, 0.0, bad)
    with pytest.raises(DeadlineExceeded) as caught:
        await work
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.asyncio
async def test_no_timer_is_left_when_it_is_over_in_time(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    expire(work, 1000)
    (timer,) = [work._entries]
    work._finish(1)
    assert timer is not None
    assert timer.handle.cancelled()  # type: ignore[union-attr]
    free: AsyncWork[int] = AsyncWork(home, "recv")
    expire(free, NO_DEADLINE)
    assert free._entries is None
    expire(work, 0)
    await asyncio.sleep(0)
    assert work.result() == 1
    free.cancel()


@pytest.mark.asyncio
async def test_a_timer_is_not_a_dependant(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    expire(work, 1000)
    step = work.then(str)
    assert step.cancel()
    assert work.cancelled()


@pytest.mark.asyncio
async def test_a_timer_that_rings_early_is_wound_again(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    expire(work, 0.002)
    begin = time.monotonic()
    work._deadline = Deadline.after(0.01)
    with pytest.raises(DeadlineExceeded):
        await work
    assert time.monotonic() - begin >= 0.01


def test_from_another_thread(home_thread: LoopThread) -> None:
    work: AsyncWork[int] = AsyncWork(home_thread.home, "recv")
    expire(work, 0.003)
    with pytest.raises(DeadlineExceeded) as caught:
        work.then(str).wait(10)
    assert caught.value.step == "recv"
    assert threading.get_ident() != home_thread.home.thread_id
