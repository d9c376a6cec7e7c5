"""The completion poller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from aiorlinf.errors import ClosedError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all
from aiorlinf.work.home import LoopHome
from aiorlinf.work.poller import BUDGET_S, CompletionPoller
from tests.work.helpers import turns

pytestmark = pytest.mark.asyncio


class Broken(Exception):
    """What goes wrong in these tests."""


class Event:
    """A device event that is set by hand."""

    def __init__(self) -> None:
        self.ready = False
        self.error: Exception | None = None
        self.polls = 0
        self.aborts = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.error is not None:
            raise self.error
        return self.ready

    def abort(self) -> None:
        self.aborts += 1


def watch(home: LoopHome, event: Event, value: Any = None) -> AsyncWork[Any]:
    work: AsyncWork[Any] = AsyncWork(home, "event")
    home.poller.watch(event, work, lambda: value)
    return work


async def test_a_work_is_done_when_its_event_is(home: LoopHome) -> None:
    event = Event()
    work = watch(home, event, 5)
    await asyncio.sleep(0.003)
    assert not work.done()
    event.ready = True
    assert await work.async_wait(5) == 5
    assert event.aborts == 0
    assert len(home.poller) == 0
    without: AsyncWork[None] = AsyncWork(home, "event")
    home.poller.watch(event, without)
    await without.async_wait(5)


async def test_errors_of_poll_and_of_the_value_go_to_the_work(home: LoopHome) -> None:
    event = Event()
    event.error = Broken()
    with pytest.raises(Broken):
        await watch(home, event)
    assert event.polls == 1
    assert event.aborts == 0
    good = Event()
    good.ready = True
    work: AsyncWork[Any] = AsyncWork(home, "event")
    home.poller.watch(good, work, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await work


async def test_an_event_that_is_ready_ends_its_work_within_a_turn_or_two(home: LoopHome) -> None:
    event = Event()
    event.ready = True
    work = watch(home, event)
    await turns(2)
    assert work.done()


async def test_cancelling_aborts_once(home: LoopHome, problems: list[dict[str, Any]]) -> None:
    event = Event()
    work = watch(home, event)
    work.cancel()
    assert event.aborts == 1
    polls = event.polls
    await asyncio.sleep(0.003)
    assert event.aborts == 1
    assert event.polls == polls
    over: AsyncWork[Any] = AsyncWork(home, "event")
    over.cancel()
    late = Event()
    home.poller.watch(late, over)
    assert late.aborts == 1

    class BadEvent(Event):
        def abort(self) -> None:
            raise Broken

    watch(home, BadEvent()).cancel()
    assert isinstance(problems.pop()["exception"], Broken)
    assert len(home.poller) == 0


async def test_it_backs_off_and_stops(home: LoopHome) -> None:
    event = Event()
    work = watch(home, event)
    await asyncio.sleep(0.05)
    # Eager turns and the first short pauses, then at most one a millisecond; a busy machine makes it fewer.
    assert 5 <= event.polls <= 120
    event.ready = True
    await work
    await turns()
    assert home.poller._handle is None


async def test_a_new_event_does_not_wait_for_the_pause(home: LoopHome) -> None:
    slow = Event()
    slow_work = watch(home, slow)
    await asyncio.sleep(0.01)
    event = Event()
    event.ready = True
    work = watch(home, event)
    await turns(2)
    assert work.done()
    slow.ready = True
    await slow_work


async def test_ten_thousand_events_leave_the_loop_free(home: LoopHome) -> None:
    events = [Event() for _ in range(10_000)]
    works = [watch(home, event, number) for number, event in enumerate(events)]
    poller = home.poller
    assert len(poller) == 10_000

    async def turn_lasts() -> float:
        begin = time.thread_time()
        poller._ask_some()
        return time.thread_time() - begin

    lasts = sorted([await turn_lasts() for _ in range(30)])
    assert lasts[15] < 20 * BUDGET_S  # many times the budget, in case the machine is busy; all of them would take far longer
    deadline = time.monotonic() + 30
    while not all(event.polls for event in events) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert all(event.polls for event in events), "everybody has a turn"
    for event in events:
        event.ready = True
    assert await wait_all(works) == list(range(10_000))
    assert len(poller) == 0


async def test_a_step_may_watch_and_close_while_the_poller_is_asking(home: LoopHome) -> None:
    event, other, third = Event(), Event(), Event()
    works: list[AsyncWork[Any]] = []

    def more(_value: Any) -> AsyncWork[Any]:
        works.append(watch(home, other, "other"))
        return works[0]

    end = watch(home, event).then(more)
    event.ready = other.ready = True
    assert await end == "other"
    closing = watch(home, event).then(lambda _value: home.poller.close())
    pending = watch(home, third)
    await closing
    with pytest.raises(ClosedError):
        await pending
    assert third.aborts == 1


async def test_closing_fails_what_is_pending(home: LoopHome) -> None:
    event = Event()
    work = watch(home, event)
    poller = home.poller
    home.close_nowait()
    with pytest.raises(ClosedError):
        await work
    assert event.aborts == 1
    with pytest.raises(ClosedError):
        poller.watch(Event(), AsyncWork(home, "event"))
    assert isinstance(poller, CompletionPoller)


async def test_an_interrupt_while_asking_loses_nothing(home: LoopHome) -> None:
    class Interrupting(Event):
        def poll(self) -> bool:
            if super().poll() or self.polls > 1:
                return True
            raise KeyboardInterrupt

    poller = home.poller
    first, second = Event(), Interrupting()
    works = [watch(home, first), watch(home, second)]
    if poller._handle is not None:
        poller._handle.cancel()
    with pytest.raises(KeyboardInterrupt):
        poller._turn()
    first.ready = True
    await asyncio.gather(*works)


async def test_of_those_in_one_line_only_the_first_is_asked(home: LoopHome) -> None:
    events = [Event() for _ in range(1000)]
    works = []
    for number in [*range(500, 1000), *range(500)]:  # in whatever order they are watched
        work: AsyncWork[Any] = AsyncWork(home, "event")
        home.poller.watch(events[number], work, place=("stream", number))
        works.append((number, work))
    alone = Event()
    single = watch(home, alone)
    before = sum(event.polls for event in events)
    for _ in range(50):
        home.poller._ask_some()
    assert sum(event.polls for event in events) - before == events[0].polls == 50
    assert alone.polls == 50, "who stands alone is asked as often"
    alone.ready = True
    await single
    order: list[int] = []

    def noted(number: int) -> Callable[[object], None]:
        return lambda _done: order.append(number)

    for number, work in works:
        work.add_done_callback(noted(number))
    works[600][1].cancel()  # number 100, in the middle
    assert events[100].aborts == 1
    for event in events[:700]:
        event.ready = True
    events[300].error = Broken()
    while len(order) < 700:
        await asyncio.sleep(0)
    assert [number for number in order if number != 100] == [number for number in range(700) if number != 100]
    assert isinstance(dict(works)[300].exception(), Broken)
    assert events[100].polls == 0
    late, first = Event(), AsyncWork[Any](home, "event")
    late.ready = True
    home.poller.watch(late, first, place=("stream", 650))  # before all that are left
    await first.async_wait(5)
    home.close_nowait()
    left = [work for number, work in works if number >= 700]
    assert all(isinstance(work.exception(), ClosedError) for work in left)
    assert all(event.aborts == 1 for event in events[700:])
    assert len(home.poller) == 0


async def test_several_may_wait_for_one_event(home: LoopHome) -> None:
    class Device:
        happened = False

    class Same(Event):
        def poll(self) -> bool:
            self.ready = Device.happened
            return super().poll()

    works = []
    for number in (2, 1, 2, 1, 2):
        work: AsyncWork[Any] = AsyncWork(home, "event")
        home.poller.watch(Same(), work, place=("stream", number))
        works.append(work)
    await asyncio.sleep(0)
    assert not any(work.done() for work in works)
    Device.happened = True
    await asyncio.wait_for(asyncio.gather(*works), 5)
    assert not home.poller._named


async def test_lines_that_are_empty_are_forgotten(home: LoopHome) -> None:
    slow = watch(home, event := Event())
    for number in range(100):
        done = Event()
        done.ready = True
        work: AsyncWork[Any] = AsyncWork(home, "event")
        home.poller.watch(done, work, place=(f"stream {number}", 0))
        await work
    assert not home.poller._named
    event.ready = True
    await slow


async def test_the_loop_is_asked_for_one_turn_whatever_is_added_before_it(home: LoopHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles that are cancelled wait in the loop, too: ten thousand of them made its next turn take 2 ms."""
    asked: list[Any] = []

    class Loop:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def call_soon(self, call: Any, *args: Any) -> Any:
            asked.append(call)
            return loop.call_soon(call, *args)

    loop = home.loop
    monkeypatch.setattr(home, "loop", Loop())
    events = [Event() for _ in range(100)]
    works = [watch(home, event) for event in events]
    assert asked.count(home.poller._turn) == 1
    monkeypatch.undo()
    for event in events:
        event.ready = True
    await wait_all(works)
