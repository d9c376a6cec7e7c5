"""Receives that are posted and cancelled for ever leave nothing, whoever else waits on the stream."""

from __future__ import annotations

import asyncio
import gc
import itertools

import pytest

from aiorlinf import init
from aiorlinf.collective.inbox import Inbox
from aiorlinf.link.incoming import Receive
from aiorlinf.link.mailbox import Mailbox
from tests.faults.conftest import Pair


def test_cancelled_receives_between_living_ones() -> None:
    mailbox = Mailbox(None, {}, itertools.count())
    first = Receive(1)
    mailbox.post(1, first)
    last = Receive(1)
    mailbox.post(1, last)
    most = 0
    for _ in range(1000):
        following = Receive(1)
        mailbox.post(1, following)
        mailbox.withdraw(1, last)
        last = following
        most = max(most, len(mailbox.streams[1].posted))
    assert most < 100
    assert mailbox.waiting(1) is first
    assert mailbox.waiting(1) is last
    assert mailbox.waiting(1) is None


@pytest.mark.asyncio
async def test_cancelled_receives_of_an_inbox(stream_pair: Pair) -> None:
    pair = stream_pair
    async with pair.b.inbox() as inbox:
        assert isinstance(inbox, Inbox)
        first, last = inbox.recv(), inbox.recv()
        for number in range(1000):
            following = inbox.recv()
            last.cancel()
            last = following
            if not number % 100:
                await asyncio.sleep(0)
        assert len(inbox._waiting) < 100
        await pair.a.send("one", "b:0")
        await pair.a.send("two", "b:0")
        assert await first == ("a:0", "one")
        assert await last == ("a:0", "two")


@pytest.mark.asyncio
async def test_many_sends_that_wait_are_cancelled_one_by_one(stream_pair: Pair) -> None:
    pair = stream_pair
    await pair.trip("the link is up", tag=2)
    pair.a._table.obtain(pair.b.address).sender.window = 0
    works = [pair.ab.send(number, tag=1) for number in range(200)]
    while pair.b.stats().links[0].unread_messages < 200:
        await asyncio.sleep(0.01)
    for work in works[1::2]:
        assert work.cancel()
    assert [await pair.ba.recv(tag=1, timeout=10) for _ in range(100)] == list(range(0, 200, 2))
    sender = pair.a._table.obtain(pair.b.address).sender
    assert sender._waiting == {}


@pytest.mark.asyncio
async def test_membership_streams_that_are_dropped_keep_no_news(stream_pair: Pair) -> None:
    a = stream_pair.a
    kept = a.membership()
    assert (await kept.next(20)).address == "b:0"
    heard: list[str] = []
    dropped = abandoned = kept
    for _ in range(50):
        dropped = a.membership()
        await dropped.next(20)
        abandoned = a.membership()
        abandoned.next().cancel()
    chain = a.membership()
    assert (await chain.next(20)).address == "b:0"
    chain.next().then(lambda event: heard.append(str(event)))
    del dropped, abandoned, chain  # a chain hangs on the last one, which is all that is left of it
    gc.collect()
    assert len(a._streams.now()) == 2
    async with init("c:0", manager=a.manager_address, token=a.token):
        assert str(await kept.next(20)) == "c:0#1 joined"
        while not heard:
            await asyncio.sleep(0.01)
    assert heard == ["c:0#1 joined"]
    gc.collect()
    assert a._streams.now() == [kept]
