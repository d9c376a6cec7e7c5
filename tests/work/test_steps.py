"""Chains of then-steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import gc
import random
import threading
import traceback
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest

from aiorlinf.errors import ClosedError, DeadlineExceeded, UsageError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import Deadline, current_deadline, expire
from aiorlinf.work.home import STEPS_PER_TURN, LoopHome
from tests.work.helpers import LoopThread, finish_later, turns

pytestmark = pytest.mark.asyncio


class Broken(Exception):
    """What goes wrong in these tests."""


def pending(home: LoopHome, **options: Any) -> AsyncWork[Any]:
    return AsyncWork(home, "recv", **options)


def done(home: LoopHome, value: Any = 1) -> AsyncWork[Any]:
    work: AsyncWork[Any] = AsyncWork(home, "recv")
    work._finish(value)
    return work


def plus(value: int, amount: int = 1) -> int:
    return value + amount


async def test_the_value_comes_first_and_arguments_follow(home: LoopHome) -> None:
    work = pending(home)

    def note(value: str, /, *args: str, **kwargs: str) -> tuple[Any, ...]:
        return value, args, kwargs

    step = work.then(note, "a", "b", key="c")
    work._finish("value")
    assert step.done()
    assert await step == ("value", ("a", "b"), {"key": "c"})


async def test_steps_run_in_the_order_of_attachment_in_the_same_turn(home: LoopHome) -> None:
    work = pending(home)
    ran: list[str] = []
    first = work.then(lambda _value: ran.append("first"))
    first.then(lambda _value: ran.append("first of first"))
    work.then(lambda _value: ran.append("second"))
    work._finish(1)
    assert sorted(ran) == ["first", "first of first", "second"]
    assert ran.index("first") < ran.index("second")
    work.then(lambda _value: ran.append("late"))
    assert ran[-1] == "late"


async def test_a_step_that_ends_other_works_is_finished_first(home: LoopHome) -> None:
    ran: list[str] = []
    other = pending(home)
    other.then(lambda _value: ran.append("other"))

    def step(_value: int) -> None:
        other._finish(1)
        ran.append("step")

    done(home).then(step)
    assert ran == ["step", "other"]


class Later:
    """An awaitable that is neither a coroutine nor a future."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, None, Any]:
        yield
        return self.value


async def test_whatever_can_be_awaited_is_followed_to_its_end(home: LoopHome) -> None:
    loop = home.loop

    async def coroutine(value: int) -> int:
        await asyncio.sleep(0.001)
        return value + 1

    def work(value: int) -> AsyncWork[int]:
        inner = pending(home)
        finish_later(inner, value + 1)
        return inner

    def future(value: int) -> asyncio.Future[int]:
        inner = loop.create_future()
        loop.call_later(0.001, inner.set_result, value + 1)
        return inner

    def from_thread(value: int) -> concurrent.futures.Future[int]:
        inner: concurrent.futures.Future[int] = concurrent.futures.Future()
        threading.Timer(0.001, inner.set_result, (value + 1,)).start()
        return inner

    async def nested(value: int) -> AsyncWork[Any]:
        return done(home, value).then(lambda value: done(home, Later(value + 1)))

    ways: list[Callable[[int], Any]] = [coroutine, work, future, from_thread, nested, lambda value: Later(value + 1)]
    for follow in ways:
        assert await done(home, 1).then(follow) == 2
        assert await done(home, 1).then(follow).then(plus, 5) == 7


async def test_the_result_of_a_send_in_a_step_is_the_result_of_the_chain(home: LoopHome) -> None:
    sends: list[AsyncWork[Any]] = []

    def send(value: int) -> AsyncWork[Any]:
        sends.append(pending(home, detail=value))
        return sends[-1]

    chain = done(home, 3).then(send)
    await turns()
    assert not chain.done()
    sends[0]._finish("sent")
    assert await chain == "sent"


async def test_an_error_skips_functions_and_arrives_unchanged(home: LoopHome) -> None:
    ran: list[int] = []
    error = Broken("here")
    work = pending(home)
    end = work.then(ran.append).then(print)
    work._fail(error)
    with pytest.raises(Broken) as caught:
        await end
    assert caught.value is error
    assert ran == []
    assert work.exception() is error


async def test_errors_of_steps_keep_their_origin_and_nothing_of_ours(home: LoopHome) -> None:
    error = Broken("in a step")

    def bad(_value: int) -> None:
        raise error

    async def worse(_value: int) -> None:
        await asyncio.sleep(0)
        raise error

    for func in (bad, worse):
        end = done(home).then(func).then(print)
        await asyncio.sleep(0.001)
        while not end.done():
            await asyncio.sleep(0)
        got = end.exception()
        assert got is error
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert names[-1] == func.__name__
        assert "_run" not in names
        error.__traceback__ = None


async def test_an_error_that_cannot_be_returned_normally(home: LoopHome) -> None:
    def stop(_value: int) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError):
        await done(home).then(stop)

    def cancelled(_value: int) -> None:
        raise asyncio.CancelledError

    step = done(home).then(cancelled)
    assert step.cancelled()


async def test_what_cannot_be_followed_is_an_error_of_the_step(home: LoopHome) -> None:
    class Odd:
        def __await__(self) -> int:
            return 3

    with pytest.raises(TypeError):
        await done(home).then(lambda _value: Odd())
    with pytest.raises(TypeError):
        done(home).then(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_is_recorded_and_goes_on_to_the_loop(home: LoopHome, error: type[BaseException]) -> None:
    def interrupt(_value: int) -> None:
        raise error

    work = pending(home)
    ran: list[int] = []
    step = work.then(interrupt)
    end = step.then(print)
    other = work.then(ran.append)
    waiter = asyncio.ensure_future(work)
    await turns()
    with pytest.raises(error):
        work._finish(1)
    assert isinstance(step.exception(), error)
    assert await waiter == 1
    await other
    assert ran == [1]
    assert isinstance(end.exception(), error)


async def test_a_chain_of_ten_thousand(home: LoopHome) -> None:
    work = pending(home)
    end: AsyncWork[Any] = work
    for _ in range(10_000):
        end = end.then(plus)
    assert work.get_last_work() is end
    work._finish(0)
    assert await end == 10_000
    work = pending(home)
    end = work
    for _ in range(10_000):
        end = end.then(plus)
    work._fail(Broken())
    with pytest.raises(Broken):
        await end
    aborted: list[Any] = []
    work = pending(home, abort=aborted.append)
    end = work
    for _ in range(10_000):
        end = end.then(plus)
    assert end.cancel()
    assert end.cancelled()
    assert aborted == [work]
    middle = work.get_next_work()
    assert middle is not None
    assert middle.cancelled()


async def test_ten_thousand_works_that_follow_each_other(home: LoopHome) -> None:
    innermost = pending(home)
    outer: AsyncWork[Any] = innermost
    for _ in range(10_000):
        outer = done(home).then(lambda _value, inner: inner, outer)
    innermost._finish("deep")
    assert await outer == "deep"
    innermost = pending(home)
    outer = innermost
    for _ in range(10_000):
        outer = done(home).then(lambda _value, inner: inner, outer)
    outer.cancel()
    assert innermost.cancelled()


async def test_a_long_chain_lets_the_loop_turn(home: LoopHome) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(tick())
    work = pending(home)
    end: AsyncWork[Any] = work
    for _ in range(20 * STEPS_PER_TURN):
        end = end.then(plus)
    work._finish(0)
    await end
    assert ticks >= 15
    ticker.cancel()


async def test_a_chain_that_waits_for_itself_is_an_error(home: LoopHome) -> None:
    work = pending(home)
    step: AsyncWork[Any] = work.then(lambda _value: step)
    end = step.then(plus)
    other = pending(home)
    across: AsyncWork[Any] = other.then(lambda _value: far)
    far: AsyncWork[Any] = across.then(plus).then(plus)
    work._finish(1)
    other._finish(1)
    with pytest.raises(UsageError, match="its own chain"):
        await end
    with pytest.raises(UsageError, match="its own chain"):
        await far


async def test_each_step_runs_in_the_context_of_its_then(home: LoopHome) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def later(_value: int) -> str:
        await asyncio.sleep(0)
        return variable.get()

    work = pending(home)
    variable.set("one")
    first = work.then(lambda _value: variable.get())
    variable.set("two")
    second = work.then(later)
    third = work.then_in_thread(lambda _value: variable.get())
    variable.set("three")
    work._finish(1)
    assert [await first, await second, await third] == ["one", "two", "two"]
    assert variable.get() == "three"


# -- cancelling -------------------------------------------------------------------------------------------------


async def test_cancelling_the_end_cancels_backwards_and_forwards(home: LoopHome) -> None:
    aborted: list[Any] = []
    work = pending(home, abort=aborted.append)
    first = work.then(plus)
    second = first.then(plus)
    third = second.then(plus)
    seen: list[bool] = []
    first.add_done_callback(lambda step: seen.append(step.cancelled()))
    assert second.cancel()
    assert [item.cancelled() for item in (work, first, second, third)] == [True] * 4
    assert aborted == [work]
    assert not work._finish(1)
    await turns()
    assert seen == [True]


async def test_a_work_with_another_dependant_is_not_cancelled(home: LoopHome) -> None:
    work = pending(home)
    one, two = work.then(plus).then(plus), work.then(plus)
    assert one.cancel()
    assert one.cancelled()
    assert not work.done()
    waiter = asyncio.ensure_future(work)
    await turns()
    assert two.cancel()
    assert not work.done()
    three = work.then(plus)
    work._finish(1)
    assert await waiter == 1
    assert await three == 2


async def test_a_done_callback_does_not_keep_a_work_alive(home: LoopHome) -> None:
    work = pending(home)
    called: list[bool] = []
    work.add_done_callback(lambda work: called.append(work.cancelled()))
    work.then(plus).cancel()
    await turns()
    assert called == [True]


async def test_cancelling_a_work_cancels_its_steps(home: LoopHome) -> None:
    work = pending(home)
    steps = [work.then(plus).then(plus) for _ in range(3)]
    work.cancel()
    assert all(step.cancelled() for step in steps)


async def test_cancelling_a_task_that_awaits_a_step_reaches_the_transport(home: LoopHome) -> None:
    aborted: list[Any] = []
    work = pending(home, abort=aborted.append)
    task = asyncio.ensure_future(work.then(plus).then(plus))
    await turns()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert aborted == [work]


async def test_cancelling_a_step_cancels_what_it_follows(home: LoopHome) -> None:
    inner = pending(home)
    step = done(home).then(lambda _value: inner).then(plus)
    assert step.cancel()
    assert inner.cancelled()
    shared = pending(home)
    one, two = done(home).then(lambda _value: shared), done(home).then(lambda _value: shared)
    assert one.cancel()
    assert not shared.done()
    shared._finish(3)
    assert await two == 3
    future = home.loop.create_future()
    assert done(home).then(lambda _value: future).cancel()
    assert future.cancelled()
    outside: concurrent.futures.Future[int] = concurrent.futures.Future()
    assert done(home).then(lambda _value: outside).cancel()
    assert outside.cancelled()


async def test_a_coroutine_is_asked_to_end_and_held_until_it_has(home: LoopHome, logged: list[Any]) -> None:
    steps: list[str] = []

    async def slow(_value: int, then_raise: bool) -> int:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            steps.append("cleaned up")
            if then_raise:
                raise Broken("while cleaning up") from None
            raise
        return 1

    for then_raise in (False, True):
        step = done(home).then(slow, then_raise)
        await turns()
        assert step.cancel()
        assert step.cancelled()
        gc.collect()
    while len(steps) < 2 or not logged:
        await asyncio.sleep(0.001)
    (record,) = logged
    assert f"begun at {__file__}:" in record.getMessage()
    assert "after it was given up" in record.getMessage()
    assert isinstance(record.exc_info[1], Broken)
    logged.clear()


async def test_what_a_step_follows_can_be_cancelled_by_others(home: LoopHome) -> None:
    inner = pending(home)
    step = done(home).then(lambda _value: inner)
    inner.cancel()
    assert step.cancelled()
    future = home.loop.create_future()
    step = done(home).then(lambda _value: future)
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


async def test_a_message_in_a_chain_is_put_back_if_no_function_has_seen_it(home: LoopHome) -> None:
    given_back: list[int] = []
    inner: AsyncWork[int] = AsyncWork(home, "recv", give_back=given_back.append)
    task = asyncio.ensure_future(done(home).then(lambda _value: inner))
    await turns()
    inner._finish(5)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert given_back == [5]
    inner = AsyncWork(home, "recv", give_back=given_back.append)
    end = done(home).then(lambda _value: inner).then(plus)
    inner._finish(6)
    assert not end.cancel()
    assert await end == 7
    assert not inner.cancel()
    assert given_back == [5]


async def test_a_step_in_the_queue_can_still_be_cancelled(home: LoopHome) -> None:
    given_back: list[int] = []
    recv: AsyncWork[int] = AsyncWork(home, "recv", give_back=given_back.append)
    ran: list[int] = []
    step = recv.then(ran.append)
    follower = done(home).then(lambda _value: pending(home))

    def finish_and_cancel(_value: int) -> None:
        recv._finish(5)
        assert not recv.cancel()
        assert step.cancel()

    await done(home).then(finish_and_cancel)
    assert step.cancelled()
    assert recv.cancelled()
    assert ran == []
    assert given_back == [5]
    follower.cancel()


async def test_random_cancels_in_chains_leave_no_problem(home: LoopHome) -> None:
    rng = random.Random(7)

    async def one() -> None:
        work = pending(home)
        home.loop.call_later(rng.random() * 0.003, work._finish, 1)
        chain: AsyncWork[Any] = work
        members: list[AsyncWork[Any]] = [work]
        for _ in range(rng.randrange(1, 5)):
            kind = rng.randrange(4)
            if kind == 0:
                chain = chain.then(plus)
            elif kind == 1:
                chain = chain.then(lambda value: asyncio.sleep(rng.random() * 0.001, value))
            elif kind == 2:
                chain = chain.then(lambda value: done(home, value).then(plus))
            else:
                chain = chain.then_in_thread(plus)
            members.append(chain)
        task = asyncio.ensure_future(chain)
        cancels: list[Callable[[], bool]] = [task.cancel, *(member.cancel for member in members)]
        home.loop.call_later(rng.random() * 0.006, rng.choice(cancels))
        await asyncio.wait([task])
        assert task.cancelled() or task.result() > 0

    await asyncio.gather(*(one() for _ in range(200)))


# -- threads and deadlines ----------------------------------------------------------------------------------------


async def test_heavy_steps_run_in_private_threads(home: LoopHome) -> None:
    def where(value: int) -> tuple[int, str]:
        return value, threading.current_thread().name

    value, name = await done(home, 4).then_in_thread(where)
    assert value == 4
    assert name.startswith("test")

    def bad(_value: int) -> None:
        raise Broken

    with pytest.raises(Broken):
        await done(home).then_in_thread(bad).then(print)
    chain: AsyncWork[Any] = done(home).then_in_thread(Later)
    assert await chain.then(plus) == 2


async def test_a_step_in_a_thread_is_dropped_when_cancelled(home: LoopHome, logged: list[Any]) -> None:
    gate = threading.Event()
    began = threading.Event()
    ran: list[int] = []

    def hold(_value: int) -> None:
        began.set()
        gate.wait(10)
        raise Broken

    busy = [done(home).then_in_thread(hold) for _ in range(2)]
    queued = done(home).then_in_thread(ran.append)
    await home.loop.run_in_executor(None, began.wait, 10)
    assert queued.cancel()
    assert busy[0].cancel()
    gate.set()
    with pytest.raises(Broken):
        await busy[1]
    await asyncio.sleep(0.01)
    assert ran == []
    (record,) = logged
    assert "after it was given up" in record.getMessage()
    logged.clear()


async def test_a_budget_travels_along_the_chain(home: LoopHome) -> None:
    work = pending(home)
    expire(work, 0.01)
    budgets: list[Deadline] = []

    async def slow(_value: None) -> int:
        await asyncio.sleep(10)
        return 1

    end = work.then(lambda _value: budgets.append(current_deadline.get())).then(slow).then(plus)
    work._finish(1)
    with pytest.raises(DeadlineExceeded) as caught:
        await end
    assert caught.value.step == "slow"
    assert budgets == [work._deadline]
    held = home.loop.create_future()
    work = pending(home)
    expire(work, Deadline.after(0.002))
    end = work.then(lambda _value: held)
    with pytest.raises(DeadlineExceeded) as caught:
        await end
    assert caught.value.step == "recv"
    assert not held.done()
    gate = threading.Event()
    work = pending(home)
    expire(work, 0.003)
    end = work.then_in_thread(lambda _value: gate.wait(10))
    work._finish(1)
    with pytest.raises(DeadlineExceeded):
        await end
    gate.set()
    assert current_deadline.get().bounded is False


async def test_after_close_a_coroutine_step_fails(home: LoopHome) -> None:
    work = pending(home)
    end = work.then(lambda _value: asyncio.sleep(0))
    threaded = work.then_in_thread(plus)
    home.close_nowait()
    work._finish(1)
    with pytest.raises(ClosedError):
        await end
    with pytest.raises(ClosedError):
        await threaded


# -- across homes ---------------------------------------------------------------------------------------------------


async def test_a_step_follows_a_work_of_another_home(home: LoopHome, loop_thread: LoopThread) -> None:
    other = loop_thread.home
    inner: AsyncWork[int] = AsyncWork(other, "recv")
    step = done(home).then(lambda _value: inner).then(plus)
    finish_later(inner, 5)
    assert await step == 6
    ready: AsyncWork[int] = AsyncWork(other, "recv")
    loop_thread.do(ready._finish, 7)
    assert await done(home).then(lambda _value: ready) == 7
    failing: AsyncWork[int] = AsyncWork(other, "recv")
    step = done(home).then(lambda _value: failing)
    loop_thread.do(failing._fail, Broken())
    with pytest.raises(Broken):
        await step
    stopped: AsyncWork[int] = AsyncWork(other, "recv")
    step = done(home).then(lambda _value: stopped)
    loop_thread.do(stopped.cancel)
    with pytest.raises(asyncio.CancelledError):
        await step


async def test_cancelling_reaches_a_work_of_another_home_unless_it_is_needed(home: LoopHome, loop_thread: LoopThread) -> None:
    given_back: list[int] = []
    inner: AsyncWork[int] = AsyncWork(loop_thread.home, "recv")
    assert done(home).then(lambda _value: inner).cancel()
    loop_thread.do(lambda: None)
    assert inner.cancelled()
    needed: AsyncWork[int] = AsyncWork(loop_thread.home, "recv", give_back=given_back.append)
    other = loop_thread.do(needed.then, plus)
    step = done(home).then(lambda _value: needed)
    loop_thread.do(lambda: None)
    assert step.cancel()
    loop_thread.do(lambda: None)
    assert not needed.done()
    loop_thread.do(needed._finish, 1)
    assert await other == 2
    late: AsyncWork[int] = AsyncWork(loop_thread.home, "recv", give_back=given_back.append)
    step = done(home).then(lambda _value: late)
    loop_thread.do(late._finish, 3)
    await asyncio.sleep(0.005)
    assert step.done()
    assert step.cancel()
    loop_thread.do(lambda: None)
    assert given_back == [3]
    assert late.cancelled()


async def test_futures_of_other_loops_are_followed(home: LoopHome, loop_thread: LoopThread) -> None:
    future: asyncio.Future[int] = loop_thread.loop.create_future()
    step = done(home).then(lambda _value: future)
    loop_thread.loop.call_soon_threadsafe(future.set_result, 8)
    assert await step == 8
    held: asyncio.Future[int] = loop_thread.loop.create_future()
    step = done(home).then(lambda _value: held)
    assert step.cancel()
    loop_thread.do(lambda: None)
    assert held.cancelled()


# -- looks ------------------------------------------------------------------------------------------------------------


async def test_names_and_links_of_the_chain(home: LoopHome) -> None:
    work = pending(home)
    assert work.get_next_work() is None
    assert work.get_last_work() is work
    first = work.then(plus)
    branch = work.then(functools.partial(functools.partial(plus, amount=2)))
    last = first.then(plus, 3)
    assert work.get_next_work() is first
    assert work.get_last_work() is last
    assert last.get_last_work() is last
    assert branch.operation == "plus"

    class Function:
        def __call__(self, value: int) -> int:
            return value

    assert work.then(Function()).operation == "Function"
    work._finish(1)
    assert work.get_last_work() is last
    assert last.result() == 5


async def test_the_function_and_its_arguments_are_let_go(home: LoopHome) -> None:
    class Big:
        pass

    gc.collect()
    gc.disable()
    try:
        big = Big()
        reference = weakref.ref(big)
        work = pending(home)
        step = work.then(lambda _value, _big: 1, big)
        del big
        assert reference() is not None
        work._finish(1)
        assert reference() is None
        big = Big()
        reference = weakref.ref(big)
        step = pending(home).then(lambda _value, _big: 1, big)
        del big
        step.cancel()
        assert reference() is None
    finally:
        gc.enable()
