"""Contexts: last in first out, senders never wait, receivers wait in line, and cancelling loses none."""

from __future__ import annotations

import asyncio
import random
from collections import deque

import pytest

from aiorlinf.codec.base import Context
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.memory import Memory
from aiorlinf.errors import ClosedError


class _Context(Context):
    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        return None

    def decompress_into(self, src: Memory, dst: Memory) -> None:
        return


def taken(pool: ContextPool) -> Context:
    context = pool.try_acquire()
    assert context is not None
    return context


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_last_in_first_out_and_made_only_when_needed() -> None:
    pool = ContextPool(_Context, 3)
    assert pool.made == 0
    first = taken(pool)
    pool.release(first)
    assert taken(pool) is first
    assert pool.made == 1
    second, third = taken(pool), taken(pool)
    assert pool.made == 3
    assert pool.try_acquire() is None
    for context in (second, first, third):
        pool.release(context)
    assert [taken(pool) for _ in range(3)] == [third, first, second]


def test_without_a_limit() -> None:
    one = _Context()
    pool = ContextPool(lambda: one, None)
    assert all(taken(pool) is one for _ in range(100))
    pool.release(one)
    assert pool.idle == 0


def test_one_that_cannot_be_made_takes_no_place() -> None:
    failing = [MemoryError("no more")]

    def make() -> Context:
        if failing:
            raise failing.pop()
        return _Context()

    pool = ContextPool(make, 1)
    with pytest.raises(MemoryError, match="no more"):
        pool.try_acquire()
    assert pool.made == 0
    assert pool.try_acquire() is not None


@pytest.mark.asyncio
async def test_receivers_wait_in_line_and_senders_do_not_overtake() -> None:
    pool = ContextPool(_Context, 1)
    context = taken(pool)
    order: list[int] = []

    async def receive(number: int) -> None:
        mine = await pool.acquire()
        order.append(number)
        assert pool.try_acquire() is None
        await asyncio.sleep(0)
        pool.release(mine)

    tasks = [asyncio.create_task(receive(number)) for number in range(5)]
    await turns()
    assert pool.waiting == 5
    assert pool.try_acquire() is None
    pool.release(context)
    assert pool.try_acquire() is None  # the first in line has it already
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert (pool.waits, pool.made, pool.idle) == (5, 1, 1)


@pytest.mark.asyncio
async def test_a_cancelled_wait_leaves_the_line() -> None:
    pool = ContextPool(_Context, 1)
    context = taken(pool)
    first, second = asyncio.create_task(pool.acquire()), asyncio.create_task(pool.acquire())
    await turns()
    first.cancel()
    await turns()
    assert pool.waiting == 1
    pool.release(context)
    assert await second is context


@pytest.mark.asyncio
async def test_cancelled_in_the_moment_of_the_handing_over() -> None:
    pool = ContextPool(_Context, 1)
    context = taken(pool)
    first, second = asyncio.create_task(pool.acquire()), asyncio.create_task(pool.acquire())
    await turns()
    pool.release(context)  # first has it, but has not run yet
    first.cancel()
    assert await second is context
    pool.release(context)
    assert pool.idle == 1


@pytest.mark.asyncio
async def test_close_fails_those_who_wait_and_keeps_none() -> None:
    pool = ContextPool(_Context, 2)
    one, two = taken(pool), taken(pool)
    waiting, cancelled = asyncio.create_task(pool.acquire()), asyncio.create_task(pool.acquire())
    await turns()
    pool.release(one)
    one = await waiting
    again = asyncio.create_task(pool.acquire())
    await turns()
    pool.close()
    cancelled.cancel()
    with pytest.raises(ClosedError):
        await again
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(ClosedError):
        await pool.acquire()
    assert pool.try_acquire() is None
    pool.release(one)
    pool.release(two)
    assert (pool.made, pool.idle) == (0, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(8))
async def test_against_a_model(seed: int) -> None:
    """Random takes, waits, cancels and releases against the simplest thing that could be right."""
    rng = random.Random(seed)
    limit = rng.randint(1, 3)
    pool = ContextPool(_Context, limit)
    idle: list[Context] = []
    held: list[Context] = []
    line: deque[asyncio.Task[Context]] = deque()
    made = 0
    for _ in range(300):
        action = rng.choice(["try", "wait", "release", "release", "cancel", "release and cancel"])
        if action == "try":
            got = pool.try_acquire()
            if idle:
                assert got is idle.pop()
            elif made < limit:
                assert got is not None
                made += 1
            else:
                assert got is None
            if got is not None:
                held.append(got)
        elif action == "wait":
            task = asyncio.create_task(pool.acquire())
            await turns()
            if idle or made < limit:
                got = task.result()
                assert got is idle.pop() if idle else got not in held
                made += pool.made - made
                held.append(got)
            else:
                assert not task.done()
                line.append(task)
        elif action == "cancel" and line:
            at = rng.randrange(len(line))
            line[at].cancel()
            del line[at]
            await turns()
        elif action.startswith("release") and held:
            context = held.pop(rng.randrange(len(held)))
            pool.release(context)
            if action == "release and cancel" and line:
                line.popleft().cancel()  # the one that has just been given it
            await turns()
            if line and line[0].done():
                assert line.popleft().result() is context
                held.append(context)
            else:
                assert not line
                idle.append(context)
        assert (pool.made, pool.idle, pool.waiting) == (made, len(idle), len(line))
        assert not (idle and line)
        assert len(set(map(id, held + idle))) == len(held) + len(idle) == made <= limit
    for task in line:
        task.cancel()
    await turns()
    for context in held:
        pool.release(context)
    assert pool.idle == made
