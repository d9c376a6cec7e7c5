"""Handles come and go: both ends forget those that nobody can use any more, and their numbers are used again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any, NamedTuple

import pytest
import torch

from aiorlinf import AsyncWork, Channel, Worker, init
from aiorlinf.backends.shm.arena import Arena
from aiorlinf.channel.client import Conversation
from aiorlinf.channel.entries import Op, entry
from aiorlinf.channel.ports import NUMBERS, Ports
from aiorlinf.channel.session import Session
from aiorlinf.errors import ChannelClosed, ChannelError, ClosedError, UsageError, WireError
from tests.channel.places import Place, place

__all__: list[str] = []


class Handle:
    def __init__(self, number: int) -> None:
        self.number = number


def conversation(worker: Worker) -> Conversation:
    (found,) = worker._channels._conversations.values()
    return found


def session(where: Place, worker: Worker) -> Session:
    assert where.host is not None
    return where.host.sessions[worker.address]


def test_a_number_is_used_again_only_when_both_ends_have_forgotten_it() -> None:
    ports: Ports[Handle] = Ports()
    first, second = (Handle(ports.number()) for _ in range(2))
    ports.kept.update({first.number: first, second.number: second})
    ports.rest(first)
    ports.rest(first)
    assert list(ports.kept) == [2]
    assert ports.gone() == []
    del first
    gc.collect()
    assert ports.number() == 3
    assert ports.gone() == [1]
    assert ports.gone() == []
    ports.free(1)
    assert [ports.number(), ports.number()] == [1, 4]
    ports.drop(2)
    assert not ports.kept


def test_there_are_so_many_numbers_and_no_more() -> None:
    ports: Ports[Handle] = Ports()
    assert [ports.number() for _ in range(NUMBERS)] == list(range(1, NUMBERS + 1))
    assert ports.number() == 0
    ports.free(7)
    assert [ports.number(), ports.number()] == [7, 0]


async def one_after_the_other(worker: Worker, number: int) -> None:
    putting = await worker.connect_channel("c")
    getting = await worker.connect_channel("c", consumer=f"consumer {number}")
    await putting.put(number, key="k")
    assert await getting.get(key="k") == number
    await putting.close()
    await getting.close()
    with pytest.raises(ChannelClosed):
        await putting.put(0)


@pytest.mark.asyncio
async def test_closed_handles_are_forgotten_at_both_ends() -> None:
    async with place("hosted") as where:
        channel = await where.handle(producer=True)
        (worker,) = where.workers
        for number in range(60):
            await one_after_the_other(worker, number)
        gc.collect()
        last = await worker.connect_channel("c")
        await last.put("x")
        assert await channel.get() == "x"
        ours, theirs = conversation(worker), session(where, worker)
        assert len(ours.ports.kept) == 2  # the first handle, and the last
        assert len(theirs.ports) <= 6
        assert ours.ports.number() < 40, "numbers were not used again"
        assert not theirs.ports.keys() - set(range(40))


@pytest.mark.asyncio
async def test_a_closed_handle_that_somebody_holds_still_gets() -> None:
    async with place("hosted") as where:
        keeper = await where.handle(producer=True)
        (worker,) = where.workers
        closed = await worker.connect_channel("c")
        await closed.put(1)
        await closed.put(2)
        waiting = closed.get(key="later")
        await closed.close()
        port = closed._port
        del closed
        gc.collect()
        for _ in range(5):
            other = await worker.connect_channel("c")
            await other.put("later", key="later") if not waiting.done() else None
            await other.close()
        assert await waiting == "later"
        assert await keeper.get() == 1
        again: Channel[int] = Channel(port)
        assert await again.get() == 2
        assert await again.qsize() == 0


@pytest.mark.asyncio
async def test_handles_that_were_refused_or_given_up_are_kept_nowhere() -> None:
    async with place("hosted", maxsize=2) as where:
        await where.handle()
        (worker,) = where.workers
        ours = conversation(worker)
        for _ in range(5):
            with pytest.raises(UsageError, match="other settings"):
                await worker.create_channel("c", maxsize=3)
            work = worker.connect_channel("c")
            work.cancel()
            with contextlib.suppress(BaseException):
                await work
        await worker.connect_channel("c")
        assert len(ours.ports.kept) <= 2
        assert len(session(where, worker).ports) <= 2


@pytest.mark.asyncio
async def test_too_many_open_handles_are_an_error_and_the_others_go_on() -> None:
    async with place("hosted") as where:
        channel = await where.handle(producer=True)
        (worker,) = where.workers
        conversation(worker).ports._used = NUMBERS - 1
        last = await worker.connect_channel("c")
        with pytest.raises(ClosedError, match=r"handles of channels at .* are open"):
            await worker.connect_channel("c")
        await last.put(1)
        assert await channel.get() == 1
        await last.close()
        del last
        gc.collect()
        for _ in range(500):  # the number comes back with the channel worker's answer
            gc.collect()
            with contextlib.suppress(ClosedError):
                await (await worker.connect_channel("c")).put(2)
                break
            await asyncio.sleep(0.02)
        assert await channel.get_nowait() == 2


class Waiting(NamedTuple):
    """A put that waits for room, and a get that waits for an item, of one worker."""

    worker: Worker
    channel: Channel
    calls: list[AsyncWork[Any]]


async def waiting(where: Place) -> Waiting:
    await where.handle()
    channel = await where.handle()
    worker = where.workers[1]
    await channel.put("there", key="full")
    calls: list[AsyncWork[Any]] = [channel.put("waits", key="full"), channel.get(key="empty")]
    while (await channel.stats()).waiting_puts < 1:
        await asyncio.sleep(0.01)
    return Waiting(worker, channel, calls)


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["an entry that is none", "a fault of the channel worker"])
async def test_a_channel_worker_that_ends_a_conversation_says_so(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("hosted", maxsize=1) as where:
        worker, channel, calls = await waiting(where)
        if fault == "an entry that is none":
            conversation(worker).write(entry(99, 1, 1))
        else:
            monkeypatch.setattr(Session, "obey", lambda self, body: 1 // 0)
            conversation(worker).write(entry(Op.CANCEL, 1, 12345))
        for call in calls:
            with pytest.raises(ChannelError, match=r"has ended the conversation: .*(protocol|ZeroDivisionError)"):
                await asyncio.wait_for(call, 10)
        monkeypatch.undo()
        with pytest.raises(ChannelError, match="has ended the conversation"):
            await channel.get()
        again = await worker.connect_channel("c")
        assert await again.get(key="full", timeout=10) == "there"
        await again.close()


@pytest.mark.asyncio
async def test_a_channel_worker_is_told_by_one_who_ends_a_conversation() -> None:
    async with place("hosted", maxsize=1) as where:
        worker, _, calls = await waiting(where)
        talk, there = conversation(worker), session(where, worker)
        there.write(entry(99, 1, 1))
        for call in calls:
            with pytest.raises(WireError, match="unknown entry 99"):
                await asyncio.wait_for(call, 10)
        while not there.ended:
            await asyncio.sleep(0.01)
        again = await worker.connect_channel("c")
        assert conversation(worker) is not talk
        assert await again.get(key="full", timeout=10) == "there"
        await again.close()


@pytest.mark.asyncio
async def test_both_end_a_conversation_at_once_and_the_next_one_lives() -> None:
    async with place("hosted", maxsize=1) as where:
        worker, _, calls = await waiting(where)
        for _ in range(3):
            talk, there = conversation(worker), session(where, worker)
            there.write(entry(99, 1, 1))
            talk.write(entry(99, 1, 1))
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            while not there.ended or talk.cause is None:
                await asyncio.sleep(0.01)
            again = await asyncio.wait_for(worker.connect_channel("c"), 10)
            calls = [again.get(key="empty")]
            assert await asyncio.wait_for(again.qsize(key="full"), 10) == 1
            assert session(where, worker) is not there
        calls[0].cancel()


@pytest.mark.asyncio
async def test_a_conversation_that_has_ended_hears_nothing_more() -> None:
    """It may end in between, as by the rest of a message that Ctrl-C in the program's own code had interrupted."""
    async with place("hosted") as where:
        await where.handle()
        await where.handle()
        worker = where.workers[1]
        for turns in range(5):
            talk = conversation(worker)
            talk._broken(WireError("as if"))
            for _ in range(turns):
                await asyncio.sleep(0)
            again = await asyncio.wait_for(worker.connect_channel("c"), 10)
            assert conversation(worker) is not talk
            assert await asyncio.wait_for(again.qsize(), 10) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("arrives", [True, False])
async def test_what_was_on_its_way_when_a_conversation_ended_is_gone_if_it_arrives_and_else_goes_back(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "take", lambda self, size, **_: None)  # so that large items are messages
    monkeypatch.setattr(Arena, "grow", lambda self, size, then: False)
    async with place("hosted") as where:
        first, second = await where.handle(), await where.handle()
        for number in range(4):
            await first.put(torch.full((1 << 18,), float(number)))
        there = session(where, where.workers[1])
        held: AsyncWork[None] = AsyncWork(there.exchange.home, "send_parcel")
        with monkeypatch.context() as patch:
            if not arrives:
                patch.setattr(there.exchange, "send_parcel", lambda *_, **__: held)
            call = second.get()
            while not there.handout._given:
                await asyncio.sleep(0)
            there.break_off("as if")
        with pytest.raises(ChannelError, match="as if"):
            await asyncio.wait_for(call, 10)
        if not arrives:
            held._fail(ClosedError("the link has ended"))
        left = range(1 if arrives else 0, 4)
        assert [(await first.get(timeout=10))[0].item() for _ in left] == list(left)
        assert await first.qsize() == 0
        assert where.host is not None
        (hosted,) = where.host._channels.values()
        while hosted.queue.nbytes:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("numbers", [4, 1 << 18])
async def test_what_is_on_its_way_to_a_consumer_that_closes_goes_to_the_others(fails: bool, numbers: int) -> None:
    """Its gets have not been served, so nothing of it is taken. Over the stream, where large items are messages."""
    for turns in range(0, 24, 2):
        async with place("hosted") as where:
            putting = await where.handle(producer=True)
            for number in range(12):
                await putting.put(torch.full((numbers,), float(number)))
            getting = await where.handle()
            with contextlib.suppress(ValueError):
                async with init("closing:0", backend="stream") as closing:
                    taking = await closing.connect_channel("c")
                    works = [taking.get() for _ in range(8)]
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if fails:
                        raise ValueError("as if")
            got = [work.result()[0].item() for work in works if work.done() and not work.cancelled() and work.exception() is None]
            await putting.close()
            with contextlib.suppress(ChannelClosed):
                while True:
                    got.append((await getting.get(timeout=10))[0].item())
            assert got == [float(number) for number in range(12)], turns
