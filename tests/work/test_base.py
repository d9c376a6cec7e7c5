"""One work on its own loop."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.errors import DeadlineExceeded, WouldBlockLoop
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.finished import finished
from aiorlinf.work.home import LoopHome
from tests.work.helpers import turns

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).resolve().parent.parent.parent


class Broken(Exception):
    """What goes wrong in these tests."""


def wait_with_a_limit(work: AsyncWork[int]) -> asyncio.Future[int]:
    return asyncio.ensure_future(work.async_wait(10))


class Inbox:
    """A producer as ``recv`` has one: messages are handed to the works in order, and come back at the head."""

    def __init__(self, home: LoopHome) -> None:
        self.home = home
        self.messages: list[int] = []
        self.waiting: list[AsyncWork[int]] = []
        self.aborted = 0
        self.given_back: list[int] = []

    def recv(self) -> AsyncWork[int]:
        work: AsyncWork[int] = AsyncWork(self.home, "recv", abort=self._abort, give_back=self._give_back)
        self.waiting.append(work)
        self._match()
        return work

    def put(self, message: int) -> None:
        self.messages.append(message)
        self._match()

    def _match(self) -> None:
        while self.messages and self.waiting:
            assert self.waiting.pop(0)._finish(self.messages.pop(0))

    def _abort(self, work: AsyncWork[int]) -> None:
        self.aborted += 1
        self.waiting.remove(work)

    def _give_back(self, message: int) -> None:
        self.given_back.append(message)
        self.messages.insert(0, message)
        self._match()


async def test_a_value_arrives_at_all_who_wait_and_stays(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    waiters = [asyncio.ensure_future(work) for _ in range(3)]
    await turns()
    assert not work.done()
    assert work._finish(7)
    assert work.done()
    assert not work.cancelled()
    assert await asyncio.gather(*waiters) == [7, 7, 7]
    assert await work == 7
    assert await work.async_wait() == 7
    assert await work.async_wait(0) == 7
    assert work.wait() == 7
    assert work.result() == 7
    assert work.exception() is None


async def test_an_outcome_is_final(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    assert work._finish(1)
    assert not work._finish(2)
    assert not work._fail(Broken())
    assert not work.cancel()
    assert work.result() == 1


async def test_before_the_outcome_there_is_none(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    with pytest.raises(asyncio.InvalidStateError, match="recv"):
        work.result()
    with pytest.raises(asyncio.InvalidStateError):
        work.exception()
    assert work.cancel()


async def test_an_error_is_raised_to_each_and_does_not_grow(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    error = Broken("once")
    work._fail(error)
    lengths = []
    for _ in range(5):
        with pytest.raises(Broken) as caught:
            await work
        assert caught.value is error
        lengths.append(len(traceback.extract_tb(error.__traceback__)))
    assert len(set(lengths)) == 1
    assert work.exception() is error
    for _ in range(3):
        with pytest.raises(Broken):
            work.result()


async def test_an_error_class_and_a_stop_iteration(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    work._fail(Broken)
    assert isinstance(work.exception(), Broken)
    other: AsyncWork[int] = AsyncWork(home, "recv")
    other._fail(StopIteration(3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await other


async def test_failing_with_a_cancelled_error_is_being_cancelled(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    work._fail(asyncio.CancelledError())
    assert work.cancelled()
    with pytest.raises(asyncio.CancelledError):
        work.exception()


async def test_cancel_aborts_once_and_late_completion_is_ignored(home: LoopHome) -> None:
    aborted: list[AsyncWork[int]] = []
    work: AsyncWork[int] = AsyncWork(home, "recv", abort=aborted.append)
    waiter = asyncio.ensure_future(work)
    await turns()
    assert work.cancel("because")
    assert not work.cancel()
    assert aborted == [work]
    assert not work._finish(1)
    assert not work._fail(Broken())
    with pytest.raises(asyncio.CancelledError):
        await waiter
    with pytest.raises(asyncio.CancelledError):
        work.result()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_an_abort_that_completes_the_work_comes_too_late(home: LoopHome) -> None:
    answers: list[bool] = []
    work: AsyncWork[int] = AsyncWork(home, "recv", abort=lambda work: answers.append(work._finish(1)))
    assert work.cancel()
    assert answers == [False]
    assert work.cancelled()


async def test_an_abort_that_fails_is_reported_and_the_cancel_stands(home: LoopHome, problems: list[dict[str, Any]]) -> None:
    def abort(_work: AsyncWork[int]) -> None:
        raise Broken

    work: AsyncWork[int] = AsyncWork(home, "recv", abort=abort)
    waiter = asyncio.ensure_future(work)
    await turns()
    assert work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    (problem,) = problems
    assert isinstance(problem["exception"], Broken)
    problems.clear()


async def test_cancelling_the_task_cancels_the_work(home: LoopHome) -> None:
    aborted: list[AsyncWork[int]] = []
    for wait in (asyncio.ensure_future, wait_with_a_limit):
        work: AsyncWork[int] = AsyncWork(home, "recv", abort=aborted.append)
        task: asyncio.Future[int] = wait(work)
        await turns()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert work.cancelled()
    assert len(aborted) == 2


async def test_shield_keeps_the_work(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")

    async def wait() -> int:
        return await asyncio.shield(work)

    task = asyncio.ensure_future(wait())
    await turns()
    task.cancel()
    await asyncio.wait([task])
    assert not work.done()
    work._finish(1)
    assert await work == 1


async def test_a_limit_that_passes_consumes_nothing(home: LoopHome) -> None:
    inbox = Inbox(home)
    work = inbox.recv()
    with pytest.raises(DeadlineExceeded) as caught:
        await work.async_wait(0.002)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.operation == "recv"
    assert "0.002 s" in str(caught.value)
    with pytest.raises(DeadlineExceeded):
        await work.async_wait(0)
    assert work._dependants() == 0
    assert work._claims == 0
    inbox.put(5)
    assert await work.async_wait(1) == 5
    assert inbox.aborted == 0


async def test_asyncio_timeout_cancels(home: LoopHome) -> None:
    inbox = Inbox(home)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.002):
            await inbox.recv()
    assert inbox.aborted == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.recv(), 0.002)
    assert inbox.aborted == 2
    inbox.put(3)
    assert inbox.messages == [3]


async def test_asyncio_helpers_take_works(home: LoopHome) -> None:
    inbox = Inbox(home)
    first, second, third = inbox.recv(), inbox.recv(), inbox.recv()
    gathered: asyncio.Future[Any] = asyncio.gather(first, second)
    home.loop.call_later(0.001, inbox.put, 1)
    home.loop.call_later(0.002, inbox.put, 2)
    done, pending = await asyncio.wait([first, third], timeout=1, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
    assert (done, pending) == ({first}, {third})
    assert await gathered == [1, 2]
    for next_done in asyncio.as_completed([third]):
        inbox.put(3)
        assert await next_done == 3


async def test_a_message_is_put_back_if_the_task_is_cancelled_before_it_resumes(home: LoopHome) -> None:
    inbox = Inbox(home)
    for wait in (asyncio.ensure_future, wait_with_a_limit):
        work = inbox.recv()
        task: asyncio.Future[int] = wait(work)
        await turns()
        inbox.put(1)
        assert work.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.cancelled()
        assert inbox.messages == [1]
        inbox.messages.clear()
    assert inbox.given_back == [1, 1]
    assert inbox.aborted == 0


async def test_cancelling_a_done_work_puts_the_message_back_unless_it_was_taken(home: LoopHome) -> None:
    inbox = Inbox(home)
    work = inbox.recv()
    inbox.put(1)
    assert work.cancel()
    assert work.cancelled()
    assert inbox.messages == [1]
    work = inbox.recv()
    assert work.result() == 1
    assert not work.cancel()
    assert work.result() == 1
    assert inbox.messages == []


async def test_a_message_is_not_put_back_while_somebody_is_about_to_take_it(home: LoopHome) -> None:
    inbox = Inbox(home)
    work = inbox.recv()
    first, second = asyncio.ensure_future(work), asyncio.ensure_future(work)
    await turns()
    inbox.put(1)
    assert not work.cancel()
    first.cancel()
    assert await second == 1
    assert first.cancelled()
    assert inbox.given_back == []
    assert not work.cancel()


async def test_a_message_is_put_back_once_if_all_who_waited_are_cancelled(home: LoopHome) -> None:
    inbox = Inbox(home)
    work = inbox.recv()
    tasks = [asyncio.ensure_future(work) for _ in range(4)]
    await turns()
    inbox.put(1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert inbox.given_back == [1]


async def test_a_give_back_that_fails_is_reported(home: LoopHome, problems: list[dict[str, Any]]) -> None:
    def give_back(_value: int) -> None:
        raise Broken

    work: AsyncWork[int] = AsyncWork(home, "recv", give_back=give_back)
    work._finish(1)
    assert work.cancel()
    assert work.cancelled()
    assert isinstance(problems.pop()["exception"], Broken)


async def test_every_message_is_taken_once_whenever_the_tasks_are_cancelled(home: LoopHome) -> None:
    inbox = Inbox(home)
    rng = random.Random(5)
    taken: list[int] = []

    async def take() -> None:
        taken.append(await inbox.recv())

    async def feed() -> None:
        for number in range(300):
            inbox.put(number)
            if rng.random() < 0.5:
                await asyncio.sleep(0)

    feeder = asyncio.ensure_future(feed())
    tasks: list[asyncio.Task[None]] = []
    while len(taken) < 300:
        tasks.append(asyncio.ensure_future(take()))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            rng.choice(tasks[-4:]).cancel()
        tasks = [task for task in tasks if not task.done()]
    await feeder
    assert sorted(taken) == list(range(300))
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def test_cancels_at_random_moments_never_reach_the_exception_handler(home: LoopHome) -> None:
    rng = random.Random(6)
    works: list[AsyncWork[int]] = [AsyncWork(home, "recv") for _ in range(1000)]
    tasks = [asyncio.ensure_future(work) for work in works]
    events: list[Callable[[], object]] = []
    for work, task in zip(works, tasks, strict=True):
        events += [partial(work._finish, 1), partial(work._finish, 2), task.cancel]
        if rng.random() < 0.5:
            events.append(work.cancel)
    rng.shuffle(events)
    for event in events:
        event()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.wait(tasks)
    cancelled = sum(task.cancelled() for task in tasks)
    assert 100 < cancelled < 900
    assert sum(task.result() in (1, 2) for task in tasks if not task.cancelled()) == 1000 - cancelled
    assert all(work.done() for work in works)


async def test_awaits_of_finished_works_let_others_run(home: LoopHome) -> None:
    ran = 0

    async def tick() -> None:
        nonlocal ran
        while True:
            ran += 1
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(tick())
    for _ in range(6400):
        work: AsyncWork[int] = AsyncWork(home, "send")
        work._finish(1)
        assert await work == 1
    assert 50 <= ran <= 200
    ticker.cancel()


async def test_awaiting_small_sends_lets_others_run(home: LoopHome) -> None:
    """Those that are over when they are made have an `await` of their own."""
    ran = 0

    async def tick() -> None:
        nonlocal ran
        while True:
            ran += 1
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(tick())
    work = finished(home)
    for _ in range(3200):
        await work
        await finished(home)
    assert 50 <= ran <= 200
    ticker.cancel()
    await asyncio.wait_for(work, 10)
    await work.async_wait(10)
    assert await work.then(lambda value: (value, "then")) == (None, "then")
    home.turns = 63
    task = asyncio.ensure_future(finished(home))
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_finished_await_that_yields_can_be_cancelled_and_gives_back(home: LoopHome) -> None:
    inbox = Inbox(home)
    home.turns = 63
    work = inbox.recv()
    inbox.put(1)
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert inbox.messages == [1]
    home.turns = 63
    again = asyncio.ensure_future(inbox.recv())
    await asyncio.sleep(0)
    assert await again == 1


async def test_done_callbacks_run_later_and_can_be_taken_back(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    calls: list[str] = []

    def never(_work: AsyncWork[int]) -> None:
        calls.append("never")

    work.add_done_callback(lambda done: calls.append(f"first {done.result()}"))
    work.add_done_callback(never)
    work.add_done_callback(never)
    assert work.remove_done_callback(never) == 2
    assert work.remove_done_callback(never) == 0
    work._finish(1)
    assert calls == []
    work.add_done_callback(lambda _done: calls.append("late"))
    await turns()
    assert calls == ["first 1", "late"]


async def test_a_callback_that_fails_goes_to_the_exception_handler(home: LoopHome, problems: list[dict[str, Any]]) -> None:
    def bad(_work: AsyncWork[int]) -> None:
        raise Broken

    work: AsyncWork[int] = AsyncWork(home, "recv")
    calls: list[int] = []
    work.add_done_callback(bad)
    work.add_done_callback(lambda done: calls.append(done.result()))
    work._finish(1)
    await turns()
    assert calls == [1]
    assert isinstance(problems.pop()["exception"], Broken)


async def test_wait_on_the_loop_raises_instead_of_hanging(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    with pytest.raises(WouldBlockLoop, match="await"):
        work.wait()
    with pytest.raises(WouldBlockLoop):
        work.wait(timeout=1)
    work._finish(1)
    assert work.wait() == 1


async def test_a_dropped_work_still_completes(home: LoopHome) -> None:
    seen: list[int] = []
    work: AsyncWork[int] = AsyncWork(home, "send")
    home.loop.call_later(0.003, work._finish, 1)
    step = work.then(seen.append).then(lambda _none: asyncio.sleep(0.001, 2)).then(seen.append)
    reference = weakref.ref(step)
    del work, step
    while len(seen) < 2:
        gc.collect()
        await asyncio.sleep(0.001)
    assert seen == [1, 2]
    await turns()
    gc.collect()
    assert reference() is None


async def test_finished_works_are_freed_without_the_garbage_collector(home: LoopHome) -> None:
    gc.collect()
    gc.disable()
    try:
        work: AsyncWork[int] = AsyncWork(home, "recv", abort=lambda _work: None, give_back=lambda _value: None)
        step = work.then(lambda value: value + 1).then(lambda value: value + 1)
        references: list[weakref.ref[AsyncWork[int]]] = [weakref.ref(work), weakref.ref(step)]
        work._finish(1)
        assert await step == 3
        del work, step
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


async def test_a_destroyed_task_leaves_no_claim(home: LoopHome) -> None:
    inbox = Inbox(home)
    work = inbox.recv()
    waiting = work.__await__()
    next(waiting)
    assert work._dependants() == 1
    waiting.close()
    del waiting
    await turns()
    assert work._dependants() == 0
    assert work._claims == 0
    inbox.put(1)
    assert work.cancel()
    assert inbox.messages == [1]
    home.turns = 63
    work = inbox.recv()
    waiting = work.__await__()
    next(waiting)
    waiting.close()
    await turns()
    assert work.cancel()


async def test_ten_thousand_works_need_no_thread(home: LoopHome) -> None:
    before = threading.active_count()
    works: list[AsyncWork[int]] = [AsyncWork(home, "recv") for _ in range(10_000)]
    waiters = [asyncio.ensure_future(work) for work in works[::50]]
    steps = [work.then(lambda value: value + 1) for work in works]
    await turns()
    assert threading.active_count() == before
    for number, work in enumerate(works):
        work._finish(number)
    assert await asyncio.gather(*waiters) == list(range(0, 10_000, 50))
    assert sum([await step for step in steps]) == sum(range(1, 10_001))
    assert threading.active_count() == before


async def test_repr_tells_what_is_going_on(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv", detail="rollout:0<-trainer:0 tag 0")

    def decode(value: int) -> int:
        return value

    def postprocess(value: int) -> int:
        return value

    work.then(decode).then(postprocess)
    pattern = r"<AsyncWork recv rollout:0<-trainer:0 tag 0 pending \d+\.\ds -> decode -> postprocess>"
    assert re.fullmatch(pattern, repr(work))
    work._finish(1)
    assert repr(work) == "<AsyncWork recv rollout:0<-trainer:0 tag 0 done -> decode -> postprocess>"
    failed: AsyncWork[int] = AsyncWork(home, "recv")
    failed._fail(Broken("x"))
    assert repr(failed) == "<AsyncWork recv failed with Broken>"
    assert isinstance(failed.exception(), Broken)
    cancelled: AsyncWork[int] = AsyncWork(home, "recv")
    cancelled.cancel()
    assert repr(cancelled) == "<AsyncWork recv cancelled>"
    step: AsyncWork[Any] = cancelled
    for _ in range(20):
        step = step.then(decode)
    assert repr(cancelled).endswith("-> decode -> ...>")
    assert work.operation == "recv"
    assert work.home is home
    assert f"{__file__}:" in work.site


async def test_finishing_outside_the_home_thread_is_noticed_in_debug_mode(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    caught: list[BaseException] = []

    def finish() -> None:
        for end in (partial(work._finish, 1), partial(work._fail, Broken())):
            try:
                end()
            except RuntimeError as error:
                caught.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    assert len(caught) == 2
    assert not work.done()
    work.cancel()


async def test_an_interrupted_abort_still_tells_everybody(home: LoopHome) -> None:
    def abort(_work: AsyncWork[int]) -> None:
        raise KeyboardInterrupt

    work: AsyncWork[int] = AsyncWork(home, "recv", abort=abort)
    waiter = asyncio.ensure_future(work)
    await turns()
    with pytest.raises(KeyboardInterrupt):
        work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert work.cancelled()


async def test_a_task_destroyed_while_it_waits_with_a_limit(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    waiting = work.async_wait(100)
    waiting.send(None)
    assert work._dependants() == 1
    waiting.close()
    await turns()
    assert work._dependants() == 0
    assert work._claims == 0
    assert not work.done()
    work.cancel()


async def test_what_the_producer_said_about_it(home: LoopHome) -> None:
    detail = object()
    work: AsyncWork[int] = AsyncWork(home, "recv", detail=detail)
    assert work.detail is detail
    work.cancel()


@pytest.mark.parametrize("wait", [asyncio.ensure_future, wait_with_a_limit])
async def test_a_cancel_is_never_swallowed(home: LoopHome, wait: Callable[[AsyncWork[int]], asyncio.Future[int]]) -> None:
    rng = random.Random(11)
    works: list[AsyncWork[int]] = [AsyncWork(home, "recv", give_back=lambda _value: None) for _ in range(500)]
    tasks = [wait(work) for work in works]
    accepted: list[asyncio.Future[int]] = []

    def cancel(task: asyncio.Future[int]) -> None:
        if task.cancel():
            accepted.append(task)

    events: list[Callable[[], object]] = []
    for work, task in zip(works, tasks, strict=True):
        events += [partial(work._finish, 1), partial(cancel, task), partial(cancel, task)]
    rng.shuffle(events)
    for event in events:
        event()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.wait(tasks)
    assert len(set(accepted)) > 100
    assert all(task.cancelled() for task in accepted)


async def test_loops_that_somebody_else_has_patched() -> None:
    pytest.importorskip("nest_asyncio2")
    program = """
import asyncio
from aiorlinf.work import AsyncWork, LoopHome, wait_all
import nest_asyncio2
nest_asyncio2.apply()

async def main():
    home = LoopHome(asyncio.get_running_loop())
    works = [AsyncWork(home, "recv") for _ in range(3)]
    for number, work in enumerate(works):
        home.loop.call_later(0.001, work._finish, number)
    values = [await works[0], await works[1].then(lambda value: asyncio.sleep(0.001, value)), *await wait_all(works)]
    inner = AsyncWork(home, "recv")
    home.loop.call_later(0.001, inner._finish, "nested")
    values.append(home.loop.run_until_complete(inner.async_wait(5)))
    task = asyncio.ensure_future(AsyncWork(home, "recv"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await home.close()
    return values, task.cancelled()

print(asyncio.run(main()))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    assert done.stdout == "([0, 1, 0, 1, 2, 'nested'], True)\n"
