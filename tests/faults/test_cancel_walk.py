"""Every public operation between two workers, cancelled after each number of turns of the loop: nothing is lost, doubled or left over.

An operation is begun in a task that is cancelled after `turns` turns, for 0, 1, 2, … until it is over before the cancel comes. Whatever
the moment, either it has happened or it has not, and the next exchange works.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf import init
from aiorlinf.errors import AiorlinfError
from tests.cases.conftest import CARRIERS, Pair, carried_by
from tests.faults.walking import cancelled_after, points

__all__: list[str] = []

SIZE = 40_000
"""Bytes of a payload: more than a frame takes where the carrier is not the frame."""


@pytest_asyncio.fixture(params=CARRIERS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two workers that have met."""
    config = carried_by(request.param, window_bytes=1 << 20)
    async with init("a:0", config=config) as a, init("b:0", config=config) as b:
        members = ["a:0", "b:0"]
        made = Pair(a, b, a.collective.create_collective_group(members), b.collective.create_collective_group(members), request.param)
        await made.trip(payload(-1))
        await made.trip(payload(-1), tag=1)
        yield made


def payload(number: int) -> torch.Tensor:
    return torch.full((SIZE,), number % 251, dtype=torch.uint8)


def number(value: torch.Tensor) -> int:
    assert value.shape == (SIZE,)
    first = int(value[0])
    assert (value == first).all(), "torn"
    return first


async def sane(pair: Pair, tag: int) -> None:
    """Both directions work, and nothing is queued or pending."""
    await asyncio.gather(pair.ab.send("there", tag=tag), pair.ba.send("back", tag=tag))
    assert await pair.ba.recv(tag=tag, timeout=20) == "there"
    assert await pair.ab.recv(tag=tag, timeout=20) == "back"
    for worker in (pair.a, pair.b):
        for link in worker.stats().links:
            assert link.unread_messages == 0


@pytest.mark.sampled(2)
@pytest.mark.asyncio
async def test_a_send_is_delivered_or_not(pair: Pair) -> None:
    for count, turns in enumerate(points()):
        cancelled, _ = await cancelled_after(turns, lambda: pair.ab.send(payload(count)))  # noqa: B023  # run at once
        await pair.ab.send("end")
        got = []
        while not isinstance(value := await pair.ba.recv(timeout=20), str):
            got.append(number(value))
        assert got in ([], [count % 251]), "it comes whole, once, or not at all"
        assert cancelled or got, "a send that was not cancelled is delivered"
    await sane(pair, 0)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@pytest.mark.parametrize("waits", [False, True], ids=["message-waits", "message-comes"])
async def test_a_receive_takes_the_message_or_leaves_it(pair: Pair, waits: bool) -> None:
    for count, turns in enumerate(points()):
        if waits:
            sending = asyncio.ensure_future(pair.ab.send(payload(count)).async_wait())
            await asyncio.sleep(0)
            cancelled, value = await cancelled_after(turns, pair.ba.recv)
        else:
            receiving = asyncio.ensure_future(cancelled_after(turns, pair.ba.recv))
            await asyncio.sleep(0)
            sending = asyncio.ensure_future(pair.ab.send(payload(count)).async_wait())
            cancelled, value = await receiving
        if cancelled:
            value = await pair.ba.recv(timeout=20)
        assert number(value) == count % 251
        await sending
    await sane(pair, 0)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
async def test_a_cancelled_receive_keeps_the_order_of_those_behind_it(pair: Pair) -> None:
    for turns in points():
        behind: list[Any] = []

        async def first_and_second(behind: list[Any] = behind) -> Any:
            first = pair.ba.recv()
            behind.append(pair.ba.recv())
            return await first

        sends = asyncio.gather(pair.ab.send(payload(1)), pair.ab.send(payload(2)))
        cancelled, value = await cancelled_after(turns, first_and_second)
        if not behind:
            behind.append(pair.ba.recv())
        following = number(await behind[0])
        if cancelled:
            # If the second receive was over already, the first message went back to the head behind its back.
            assert following in (1, 2)
            assert number(await pair.ba.recv(timeout=20)) == 3 - following
        else:
            assert (number(value), following) == (1, 2)
        await sends
    await sane(pair, 0)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
async def test_a_tensor_is_taken_or_not(pair: Pair) -> None:
    for turns in points():
        for side in ("send", "recv"):
            out = torch.zeros(SIZE, dtype=torch.uint8)
            if side == "send":
                receiving = asyncio.ensure_future(pair.ba.recv_tensor(out, tag=2).async_wait())
                await asyncio.sleep(0)
                cancelled, _ = await cancelled_after(turns, lambda: pair.ab.send_tensor(payload(7), tag=2))
                if cancelled:
                    # It may have been taken back or not; a second one ends the receive in either case.
                    second = pair.ab.send_tensor(payload(9), tag=2)
                    try:
                        got = number(await receiving)
                    except AiorlinfError:  # it was withdrawn in the middle: the receive of that message says so
                        got = 0
                    if got != 9:
                        assert number(await pair.ba.recv_tensor(out, tag=2, timeout=20)) == 9
                    await second
                else:
                    assert number(await receiving) == 7
            else:
                sending = pair.ab.send_tensor(payload(7), tag=2)
                cancelled, value = await cancelled_after(turns, lambda: pair.ba.recv_tensor(out, tag=2))  # noqa: B023  # run at once
                if cancelled:
                    value = await pair.ba.recv_tensor(torch.zeros(SIZE, dtype=torch.uint8), tag=2, timeout=20)
                assert number(value) == 7
                await sending
    await sane(pair, 1)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
async def test_an_inbox_gives_each_message_once(pair: Pair) -> None:
    for count, turns in enumerate(points()):
        sending = asyncio.ensure_future(pair.ab.send(payload(count)).async_wait())
        await asyncio.sleep(0)
        inbox = pair.b.inbox()
        cancelled, value = await cancelled_after(turns, inbox.__anext__)
        if cancelled:
            value = await anext(pair.b.inbox())
        sender, got = value
        assert (sender, number(got)) == ("a:0", count % 251)
        await sending
    await sane(pair, 1)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
async def test_a_chain_gives_its_message_back_until_a_step_has_it(pair: Pair) -> None:
    for count, turns in enumerate(points()):
        taken: list[int] = []

        async def step(value: torch.Tensor, taken: list[int] = taken) -> int:
            taken.append(number(value))
            await asyncio.sleep(0)
            return taken[-1]

        sending = asyncio.ensure_future(pair.ab.send(payload(count)).async_wait())
        cancelled, value = await cancelled_after(turns, lambda: pair.ba.recv().then(step))
        if not cancelled:
            assert value == count % 251
        if not taken:
            taken.append(number(await pair.ba.recv(timeout=20)))
        assert taken == [count % 251]
        await sending
    await sane(pair, 0)


@pytest.mark.asyncio
async def test_joining_and_leaving_leave_nothing(pair: Pair, complaints: list[str]) -> None:
    for turns in points()[::3]:

        async def visit(turns: int = turns) -> str:
            async with init(f"c:{turns}") as worker:
                await worker.send("hello", "b:0", tag=5)
            return "was there"

        cancelled, _ = await cancelled_after(turns, visit)
        await pair.ab.send("end", tag=5)
        seen = [await anext(pair.b.inbox(tag=5))]
        while seen[-1][1] != "end":
            seen.append(await anext(pair.b.inbox(tag=5)))
        greetings = [entry for entry in seen if entry[1] == "hello"]
        assert len(greetings) <= 1
        assert cancelled or greetings
    complaints.clear()  # what a visitor could not deliver is said there
    await sane(pair, 0)
