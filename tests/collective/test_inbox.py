"""Messages from anyone: one worker with links to two others, moved by hand."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aiorlinf import init
from aiorlinf.collective.inbox import Inbox
from aiorlinf.errors import ClosedError, DeadlineExceeded, Mismatch, PeerLost, UsageError
from tests.collective.three import Three, big, three

__all__ = ["three"]


def test_messages_come_in_the_order_of_their_arrival_whoever_sent_them(three: Three) -> None:
    for number, side in enumerate([three.b, three.c, three.c, three.b]):
        three.send(side, number)
    works = [three.inbox.recv() for _ in range(4)]
    assert [work.result() for work in works] == [("b:0", 0), ("c:0", 1), ("c:0", 2), ("b:0", 3)]


def test_waiting_calls_are_served_in_their_order(three: Three) -> None:
    works = [three.inbox.recv() for _ in range(3)]
    three.send(three.c, "first")
    assert works[0].result() == ("c:0", "first")
    three.send(three.b, "second")
    assert works[1].result() == ("b:0", "second")
    assert not works[2].done()
    works[2].cancel()


def test_a_recv_goes_before_an_inbox(three: Three) -> None:
    work = three.inbox.recv()
    receive = three.recv()
    three.send(three.b, "for the recv")
    assert receive.result() == "for the recv"
    assert not work.done()
    three.send(three.b, "for the inbox")
    assert work.result() == ("b:0", "for the inbox")


def test_what_a_recv_takes_an_inbox_does_not_give(three: Three) -> None:
    first = three.inbox.recv()
    first.cancel()  # it is open
    for number in range(200):
        three.send(three.b, number)
        assert three.recv().result() == number
    three.send(three.c, "left")
    assert len(three.inbox._known) < 150, "it does not remember what is gone"
    assert three.inbox.recv().result() == ("c:0", "left")


def test_a_large_message_is_asked_for_and_comes(three: Three) -> None:
    sent = three.send(three.c, big(1))
    assert not sent.done()
    work = three.inbox.recv()
    three.flow(60)
    sender, tensor = work.result()
    assert sender == "c:0"
    assert torch.equal(tensor, big(1))
    sent.result()


def test_a_cancelled_call_takes_nothing(three: Three) -> None:
    work = three.inbox.recv()
    other = three.inbox.recv()
    work.cancel()
    three.send(three.b, "one")
    assert other.result() == ("b:0", "one")
    done = three.inbox.recv()
    three.send(three.b, "two")
    assert done.done()
    assert done.cancel(), "nobody had taken it"
    assert three.inbox.recv().result() == ("b:0", "two")


def test_a_message_given_back_can_be_received_by_name(three: Three) -> None:
    work = three.inbox.recv()
    three.send(three.b, "given back")
    work.cancel()
    assert three.recv().result() == "given back"


def test_many_cancelled_calls_leave_nothing(three: Three) -> None:
    standing = three.inbox.recv()
    for _ in range(1000):
        three.inbox.recv().cancel()
    assert len(three.inbox._waiting) < 100
    three.send(three.c, "it")
    assert standing.result() == ("c:0", "it")


def test_when_a_message_is_withdrawn_the_call_waits_for_any_worker_again(three: Three) -> None:
    work = three.inbox.recv()
    later = three.inbox.recv()
    sent = three.send(three.b, big(1))
    assert sent.cancel()
    three.flow()
    assert not work.done()
    three.send(three.c, "of another worker")
    assert work.result() == ("c:0", "of another worker")
    three.send(three.b, "and of this one")
    assert later.result() == ("b:0", "and of this one")


def test_when_a_message_is_withdrawn_the_call_gets_what_has_come_meanwhile(three: Three) -> None:
    work = three.inbox.recv()
    sent = three.b.exchange.send(three.b.other, 0, big(1), 0, None)
    for _ in range(2):
        three.loop.turn()
        three.to_b.socket.read(1 << 20)
    three.send(three.c, "meanwhile")
    if not sent.done():
        assert sent.cancel()
        three.flow()
        assert work.result() == ("c:0", "meanwhile")


def test_a_sender_that_dies_in_the_middle_fails_one_call(three: Three) -> None:
    work = three.inbox.recv()
    three.b.exchange.send(three.b.other, 0, big(1), 0, None)
    three.loop.turn()
    three.to_b.socket.read(1 << 20)
    three.b.link.end(lambda: PeerLost("killed"))
    three.flow()
    assert isinstance(work.exception(), PeerLost)
    following = three.inbox.recv()
    assert not following.done()
    three.send(three.c, "goes on")
    assert following.result() == ("c:0", "goes on")


def test_what_a_dead_worker_had_sent_is_still_there(three: Three) -> None:
    three.send(three.b, "last words")
    three.b.link.end(lambda: PeerLost("killed"))
    three.flow()
    assert three.inbox.recv().result() == ("b:0", "last words")


def test_a_tensor_is_no_object(three: Three) -> None:
    work = three.inbox.recv()
    sent = three.b.exchange.send_tensor(three.b.other, 0, torch.ones(3), 0, None)
    three.flow()
    assert isinstance(work.exception(), Mismatch)
    assert isinstance(sent.exception(), Mismatch)


def test_tags_are_apart(three: Three) -> None:
    other = Inbox(three.to_b.exchange, 5)
    works = [three.inbox.recv(), other.recv()]
    three.send(three.b, "five", tag=5)
    assert not works[0].done()
    assert works[1].result() == ("b:0", "five")
    works[0].cancel()


def test_one_inbox_of_a_tag_waits_at_a_time(three: Three) -> None:
    first = three.inbox.recv()
    second = Inbox(three.to_b.exchange, 0)
    with pytest.raises(UsageError, match="another inbox with this tag is waited on"):
        second.recv()
    first.cancel()
    work = second.recv()
    with pytest.raises(UsageError, match="another inbox"):
        three.inbox.recv()
    three.send(three.b, 1)
    assert work.result() == ("b:0", 1)
    second.close()
    three.send(three.b, 2)
    assert three.inbox.recv().result() == ("b:0", 2)


def test_an_inbox_that_makes_way_leaves_what_it_knew_to_the_next(three: Three) -> None:
    three.inbox.recv().cancel()
    for number in range(4):
        three.send(three.b, number)
    assert three.inbox.recv().result() == ("b:0", 0)
    second = Inbox(three.to_b.exchange, 0)
    assert [second.recv().result()[1] for _ in range(2)] == [1, 2]
    assert three.inbox.recv().result() == ("b:0", 3)


def test_a_call_whose_inbox_made_way_waits_on_in_the_next(three: Three) -> None:
    """Its message was withdrawn."""
    work = three.inbox.recv()
    sent = three.b.exchange.send(three.b.other, 0, big(1), 0, None)
    three.loop.turn()
    three.to_b.socket.read(1 << 20)
    second = Inbox(three.to_b.exchange, 0)
    later = second.recv()
    assert sent.cancel()
    three.flow()
    assert not work.done()
    three.send(three.c, "first")
    three.send(three.b, "second")
    assert work.result() == ("c:0", "first")
    assert later.result() == ("b:0", "second")


@pytest.mark.asyncio
async def test_a_loop_that_is_left_and_begun_again() -> None:
    async with init("a:0") as a:
        for number in range(3):
            a.send(number, "a:0")
        got = []
        for _ in range(2):
            async for _, obj in a.inbox():
                got.append(obj)
                break
        assert [*got, await a.recv("a:0")] == [0, 1, 2]


def test_closing_ends_waiting_calls_and_leaves_what_has_come(three: Three) -> None:
    work = three.inbox.recv()
    three.inbox.close()
    three.inbox.close()
    assert isinstance(work.exception(), ClosedError)
    with pytest.raises(ClosedError):
        three.inbox.recv()
    three.send(three.b, "stays")
    assert three.recv().result() == "stays"


def test_a_closed_inbox_still_gets_what_was_on_its_way(three: Three) -> None:
    work = three.inbox.recv()
    three.send(three.b, big(3))
    if not work.done():
        three.inbox.close()
        three.flow(60)
    assert work.result()[0] == "b:0"


def test_a_closed_inbox_whose_message_is_withdrawn_says_that_it_is_closed(three: Three) -> None:
    work = three.inbox.recv()
    sent = three.b.exchange.send(three.b.other, 0, big(1), 0, None)
    three.loop.turn()
    three.to_b.socket.read(1 << 20)
    three.inbox.close()
    assert not work.done()
    assert sent.cancel()
    three.flow()
    assert isinstance(work.exception(), ClosedError)


# ---- with real workers


@pytest.mark.asyncio
async def test_iterating() -> None:
    async with init("a:0") as a, init("b:0") as b, init("c:0") as c:
        seen = []

        async def listen() -> None:
            async for sender, obj in a.inbox():
                seen.append((sender, obj))

        listening = asyncio.get_running_loop().create_task(listen())
        for number in range(5):
            await b.send(number, "a:0")
            await c.send(-number, "a:0")
        while len(seen) < 10:
            await asyncio.sleep(0.002)
        assert [obj for sender, obj in seen if sender == "b:0"] == [0, 1, 2, 3, 4]
        assert [obj for sender, obj in seen if sender == "c:0"] == [0, -1, -2, -3, -4]
        await a.close()
        await asyncio.wait_for(listening, 10)


@pytest.mark.asyncio
async def test_leaving_an_inbox_gives_its_tag_free() -> None:
    async with init("a:0") as a:
        for number in range(3):
            async with a.inbox(tag=2) as inbox:
                work = inbox.recv()
                await a.send(number, "a:0", tag=2)
                assert await work == ("a:0", number)


@pytest.mark.asyncio
async def test_a_time_limit_says_what_was_waited_for() -> None:
    async with init("a:0") as a:
        with pytest.raises(DeadlineExceeded, match=r"nothing has come within 0\.0\d+ s") as caught:
            await a.inbox(tag=3).recv(timeout=0.03)
        assert caught.value.step == "match"
        assert caught.value.tag == 3
        assert caught.value.remote is None


@pytest.mark.asyncio
async def test_a_cancelled_iteration_loses_nothing() -> None:
    async with init("a:0") as a, init("b:0") as b:
        inbox = a.inbox()
        for number in range(20):
            waiting = asyncio.get_running_loop().create_task(anext(inbox))
            await asyncio.sleep(0)
            sending = b.send(number, "a:0")
            for _ in range(number % 7):
                await asyncio.sleep(0)
            waiting.cancel()
            try:
                got = await waiting
            except asyncio.CancelledError:
                got = await anext(inbox)
            assert got == ("b:0", number)
            await sending
