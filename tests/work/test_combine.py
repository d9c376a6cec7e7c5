"""wait_all and wait_first."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest

from aiorlinf.errors import DeadlineExceeded, UsageError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all, wait_first
from aiorlinf.work.deadline import expire
from aiorlinf.work.home import LoopHome
from tests.work.helpers import LoopThread, finish_later, turns


class Broken(Exception):
    """What goes wrong in these tests."""


def some(home: LoopHome, count: int, **options: Any) -> list[AsyncWork[Any]]:
    return [AsyncWork(home, "recv", **options) for _ in range(count)]


@pytest.mark.asyncio
async def test_all_values_in_the_order_given(home: LoopHome) -> None:
    works = some(home, 3)
    total = wait_all(works)
    for index in (2, 0, 1):
        assert not total.done()
        works[index]._finish(index)
    assert total.done()
    assert await total == [0, 1, 2]
    assert await wait_all(works).then(sum) == 3
    assert [await work for work in works] == [0, 1, 2]
    assert repr(total) == "<AllWork wait_all of 3 done>"


@pytest.mark.asyncio
async def test_the_first_error_arrives_when_all_are_over(home: LoopHome) -> None:
    works = some(home, 4)
    total = wait_all(works)
    works[2]._fail(Broken("first"))
    works[0]._fail(Broken("second"))
    works[1].cancel()
    assert not total.done()
    works[3]._finish(3)
    with pytest.raises(Broken, match="first"):
        await total
    assert works[3].result() == 3
    del works, total
    gc.collect()


@pytest.mark.asyncio
async def test_an_unseen_error_in_wait_all_is_logged_once(home: LoopHome, logged: list[Any]) -> None:
    works = some(home, 3)
    total = wait_all(works)
    for work in works:
        work._fail(Broken())
    del works, work, total
    gc.collect()
    (record,) = logged
    assert "recv" in record.getMessage()
    logged.clear()


@pytest.mark.asyncio
async def test_a_cancelled_part_cancels_the_whole(home: LoopHome) -> None:
    works = some(home, 2)
    total = wait_all(works)
    works[0].cancel()
    works[1]._finish(1)
    with pytest.raises(asyncio.CancelledError):
        await total
    assert total.cancelled()


@pytest.mark.asyncio
async def test_errors_as_values(home: LoopHome) -> None:
    works = some(home, 3)
    total = wait_all(works, return_exceptions=True)
    error = Broken()
    works[0]._fail(error)
    works[1].cancel()
    works[2]._finish(2)
    first, second, third = await total
    assert first is error
    assert isinstance(second, asyncio.CancelledError)
    assert third == 2


@pytest.mark.asyncio
async def test_cancelling_the_whole_cancels_what_nobody_else_needs(home: LoopHome) -> None:
    for combine in (wait_all, wait_first):
        works = some(home, 3)
        needed = works[1].then(str)
        total: AsyncWork[Any] = combine(works)
        end = total.then(str)
        assert end.cancel()
        assert total.cancelled()
        assert works[0].cancelled()
        assert not works[1].done()
        assert works[2].cancelled()
        works[1]._finish(1)
        assert await needed == "1"


@pytest.mark.asyncio
async def test_what_arrived_and_was_not_taken_goes_back_in_its_old_order(home: LoopHome) -> None:
    queue: list[int] = []

    def put_back(message: int) -> None:
        queue.insert(0, message)

    works = some(home, 3, give_back=put_back)
    task = asyncio.ensure_future(wait_all(works))
    await turns()
    works[0]._finish(0)
    works[1]._finish(1)
    task.cancel()
    await asyncio.wait([task])
    assert queue == [0, 1]
    assert all(work.cancelled() for work in works)
    queue.clear()
    works = some(home, 3, give_back=put_back)
    task = asyncio.ensure_future(wait_all(works))
    await turns()
    for number, work in enumerate(works):
        work._finish(number)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert queue == [0, 1, 2]
    queue.clear()
    works = some(home, 2, give_back=put_back)
    total = wait_all(works)
    works[0]._finish(0)
    works[1]._finish(1)
    assert await works[0] == 0
    assert total.cancel()
    assert queue == [1]
    works = some(home, 2, give_back=put_back)
    total = wait_all(works)
    works[0]._finish(0)
    works[1]._finish(1)
    assert await total == [0, 1]
    assert not works[0].cancel()
    assert not total.cancel()
    assert queue == [1]


@pytest.mark.asyncio
async def test_values_next_to_an_error_can_still_be_taken_or_given_back(home: LoopHome) -> None:
    queue: list[int] = []
    works = some(home, 3, give_back=queue.append)
    total = wait_all(works)
    works[0]._finish(0)
    works[1]._finish(1)
    works[2]._fail(Broken())
    with pytest.raises(Broken):
        await total
    assert await works[0] == 0
    assert works[1].cancel()
    assert queue == [1]


@pytest.mark.asyncio
async def test_the_first_of_several(home: LoopHome) -> None:
    works = some(home, 3)
    first = wait_first(works)
    works[1]._finish("one")
    assert await first == (1, "one")
    works[0]._finish("zero")
    works[2]._finish("two")
    assert [await work for work in works] == ["zero", "one", "two"]
    assert await wait_first(works) == (0, "zero")
    failing = some(home, 2)
    first = wait_first(failing)
    failing[1]._fail(Broken())
    with pytest.raises(Broken):
        await first
    failing[0]._finish(1)
    cancelled = some(home, 2)
    first = wait_first(cancelled)
    cancelled[0].cancel()
    assert first.cancelled()
    cancelled[1]._finish(1)


@pytest.mark.asyncio
async def test_the_first_may_cancel_the_rest(home: LoopHome) -> None:
    works = some(home, 4)
    needed = works[3].then(str)
    first = wait_first(works, cancel_rest=True)
    works[2]._finish("two")
    assert await first == (2, "two")
    assert [work.cancelled() for work in works] == [True, True, False, False]
    works[3]._finish(3)
    assert await needed == "3"


@pytest.mark.asyncio
async def test_messages_are_not_lost_in_wait_first(home: LoopHome) -> None:
    rng = random.Random(10)
    for cancel_rest in (False, True):
        for _ in range(100):
            given_back: list[int] = []
            works = some(home, 3, give_back=given_back.append)
            task = asyncio.ensure_future(wait_first(works, cancel_rest=cancel_rest))
            await turns(rng.randrange(3))
            arrived = rng.sample(range(3), rng.randrange(1, 4))
            for number in arrived:
                works[number]._finish(number)
            await turns(rng.randrange(3))
            if rng.random() < 0.5:
                task.cancel()
            await asyncio.wait([task])
            taken = [] if task.cancelled() else [task.result()[1]]
            left = [work.result() for work in works if work.done() and not work.cancelled()]
            finished = [number for number in arrived if number in given_back or number in taken or number in left]
            assert sorted(finished) == sorted(number for number in arrived if not works[number].cancelled() or number in given_back)
            assert len(given_back) == len(set(given_back))
            assert not set(given_back) & set(taken)
            for work in works:
                work.cancel()


@pytest.mark.asyncio
async def test_bad_arguments(home: LoopHome) -> None:
    with pytest.raises(UsageError):
        wait_first([])
    with pytest.raises(UsageError, match="not a work"):
        wait_all([3])  # type: ignore[arg-type]
    assert await wait_all([]) == []
    assert await wait_all([]).then(lambda values: asyncio.sleep(0, len(values))) == 0


@pytest.mark.asyncio
async def test_the_same_work_twice(home: LoopHome) -> None:
    (work,) = some(home, 1)
    total, first = wait_all([work, work]), wait_first([work, work])
    work._finish(1)
    assert await total == [1, 1]
    assert await first == (0, 1)


@pytest.mark.asyncio
async def test_a_thousand_levels(home: LoopHome) -> None:
    (work,) = some(home, 1)
    total: AsyncWork[Any] = work
    for _ in range(3000):
        total = wait_all([total])
    work._finish(1)
    value: Any = await total
    depth = 0
    while isinstance(value, list):
        (value,) = value
        depth += 1
    assert (depth, value) == (3000, 1)


@pytest.mark.asyncio
async def test_a_circle_through_a_combination_is_an_error(home: LoopHome) -> None:
    works = some(home, 2)
    step: AsyncWork[Any] = works[0].then(lambda _value: total)
    total: AsyncWork[Any] = wait_all([step, works[1]])
    works[0]._finish(1)
    with pytest.raises(UsageError, match="its own chain"):
        await step
    works[1]._finish(1)
    with pytest.raises(UsageError):
        await total


@pytest.mark.asyncio
async def test_a_deadline_on_a_combination(home: LoopHome) -> None:
    works = some(home, 2)
    total = wait_all(works)
    expire(total, 0.002)
    with pytest.raises(DeadlineExceeded):
        await total
    assert all(work.cancelled() for work in works)


@pytest.mark.asyncio
async def test_works_of_several_homes(home: LoopHome, loop_thread: LoopThread) -> None:
    given_back: list[int] = []

    def mixed() -> list[AsyncWork[Any]]:
        return [AsyncWork(home, "recv"), AsyncWork(loop_thread.home, "recv", give_back=given_back.append)]

    works = mixed()
    total, first = wait_all(works), wait_first(works)
    loop_thread.do(works[1]._finish, 1)
    assert await first == (1, 1)
    works[0]._finish(0)
    assert await total == [0, 1]
    works = mixed()
    total = wait_all(works)
    loop_thread.do(works[1]._finish, 5)
    await asyncio.sleep(0.002)
    assert total.cancel()
    loop_thread.do(lambda: None)
    assert given_back == [5]
    assert works[0].cancelled()
    works = mixed()
    first = wait_first(works, cancel_rest=True)
    works[0]._finish(1)
    assert await first == (0, 1)
    loop_thread.do(lambda: None)
    assert works[1].cancelled()


def test_from_a_thread(home_thread: LoopThread) -> None:
    works = some(home_thread.home, 100)
    total, first = wait_all(works), wait_first(works)
    for number, work in enumerate(works):
        finish_later(work, number, 0)
    assert total.wait(10) == list(range(100))
    assert first.wait(10) == (0, 0)


def test_nothing_in_a_thread_without_a_loop() -> None:
    empty: AsyncWork[list[Any]] = wait_all([])
    assert empty.wait() == []
    assert empty.then(len).wait() == 0
    called: list[int] = []
    empty.add_done_callback(lambda work: called.append(threading.get_ident()))
    assert called == [threading.get_ident()]
    assert not empty.cancel()
    step = empty.then(lambda _values: asyncio.sleep(0))
    with pytest.raises(UsageError, match="loop"):
        step.wait()

    async def main() -> list[Any]:
        return await empty

    assert asyncio.run(main()) == []


@pytest.mark.asyncio
async def test_parts_that_are_over_before_all_are_attached(home: LoopHome) -> None:
    works = some(home, 3)
    works[0]._finish(0)
    assert await wait_first(works) == (0, 0)
    assert [work._claims for work in works[1:]] == [0, 0]
    assert await wait_first(works, cancel_rest=True) == (0, 0)
    assert [work.cancelled() for work in works] == [False, True, True]


@pytest.mark.asyncio
async def test_made_and_cancelled_inside_a_step(home: LoopHome) -> None:
    works = some(home, 2)
    needed = works[1].then(str)

    def step(_value: int) -> None:
        total = wait_all(works)
        assert total.cancel()

    (start,) = some(home, 1)
    end = start.then(step)
    start._finish(0)
    await end
    assert works[0].cancelled()
    works[1]._finish(1)
    assert await needed == "1"
