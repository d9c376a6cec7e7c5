"""Peers that end, restart, or are alive and do not take part: nobody hangs, and whoever is told is told who and why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import time
from typing import Any

import pytest
import torch

from aiorlinf import AsyncWork, Worker, init
from aiorlinf.collective.asking import what_it_waits_for
from aiorlinf.errors import AiorlinfError, ChannelError, DeadlineExceeded, PeerError, PeerLeft, PeerLost, PeerRestarted
from aiorlinf.testing.cluster import LocalCluster, local_cluster
from aiorlinf.testing.proxy import Plan
from tests import peers
from tests.hypothesis_profiles import examples

__all__: list[str] = []

AT_ONCE: dict[str, Any] = {"cluster": {"network": {"reconnect_timeout_s": 0.0}}}
SLOW: dict[str, Any] = {"cluster": {"network": {"close_timeout_s": 60.0, "heartbeat_timeout_s": 60.0, "connect_timeout_s": 60.0}}}


async def meet(cluster: LocalCluster, one: str, other: str) -> None:
    """They have a link."""
    sent = cluster[one].send("hello", other)
    assert await cluster[other].recv(one, timeout=20) == "hello"
    await sent


async def endings(works: list[AsyncWork[Any]]) -> list[BaseException | None]:
    return [each if isinstance(each, BaseException) else None for each in await asyncio.gather(*works, return_exceptions=True)]


# ---- the end of a peer


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("how", ["leave", "kill"])
async def test_all_that_is_queued_on_a_peer_ends_with_it_and_then_nothing_spins(how: str, backend: Any) -> None:
    async with local_cluster("w=2", SLOW, backend=backend) as cluster:
        await meet(cluster, "w:0", "w:1")
        a = cluster["w:0"]
        works: list[AsyncWork[Any]] = [a.recv("w:1") for _ in range(10)]
        works += [a.recv_tensor(torch.zeros(5), "w:1", tag=1), a.send_tensor(torch.ones(100_000), "w:1", tag=2)]
        works += [a.recv("w:1", tag=3).then(lambda value: value), a.send(torch.ones(5), "w:1").then(lambda _: a.recv("w:1", tag=4))]
        await asyncio.sleep(0.02)
        await (cluster.leave if how == "leave" else cluster.kill)("w:1")
        async with asyncio.timeout(20):
            got = await endings(works)
        assert [type(error) for error in got] == [PeerLeft if how == "leave" else PeerLost] * len(works), got
        assert all("w:1" in str(error) for error in got)
        before = time.process_time()
        await asyncio.sleep(0.4)
        assert time.process_time() - before < 0.3


@pytest.mark.asyncio
async def test_groups_and_channels_that_share_a_dead_peer_end_with_it_all_at_once() -> None:
    async with local_cluster("w=2") as cluster:
        await meet(cluster, "w:0", "w:1")
        a, b = cluster["w:0"], cluster["w:1"]
        works: list[AsyncWork[Any]] = [a.collective.create_collective_group(["w:0", "w:1"], f"g{number}").recv() for number in range(47)]
        for number in range(3):
            await cluster.hold_channels(f"c{number}")
            channel = await a.create_channel(f"c{number}")
            await b.connect_channel(f"c{number}", producer=True)
            works.append(channel.get())
        await asyncio.sleep(0.02)
        assert not any(work.done() for work in works)
        await cluster.kill("w:1")
        async with asyncio.timeout(20):
            got = await endings(works)
        assert all(isinstance(error, (PeerLost, ChannelError)) and "w:1" in str(error) for error in got), got


@pytest.mark.asyncio
async def test_the_first_member_is_dead_and_the_others_close_without_waiting_for_it() -> None:
    async with local_cluster("w=3", SLOW) as cluster:
        members = ["w:0", "w:1", "w:2"]
        groups = [cluster[name].collective.create_collective_group(members) for name in members]
        assert await asyncio.gather(*(group.broadcast("hello" if not rank else None, root=0) for rank, group in enumerate(groups))) == [
            *("hello",) * 3
        ]
        works: list[AsyncWork[Any]] = [cluster["w:1"].recv("w:0"), cluster["w:2"].recv("w:0"), groups[1].gather(1, root=0)]
        await asyncio.sleep(0.02)
        await cluster.kill("w:0")
        async with asyncio.timeout(20):  # far less than any limit of this job
            await cluster.leave("w:1")
            await cluster.leave("w:2")
            assert all(isinstance(error, AiorlinfError) for error in await endings(works))


@pytest.mark.asyncio
@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
async def test_a_tensor_that_came_only_in_part_is_no_success(where: float) -> None:
    size = 2_000_000
    async with local_cluster("w=2", AT_ONCE, backend="stream") as cluster:
        cluster.between("w:0", "w:1", Plan(cut_after=int(where * size)), Plan())
        out = torch.full((size,), 7, dtype=torch.uint8)
        sending = cluster["w:0"].send_tensor(torch.zeros(size, dtype=torch.uint8), "w:1")
        receiving = cluster["w:1"].recv_tensor(out, "w:0")
        for work in (receiving, sending):
            with pytest.raises(PeerLost):
                await work.async_wait(20)
            assert work.done()
            with pytest.raises(PeerLost):
                work.wait()
        again = cluster["w:1"].recv_tensor(out, "w:0")
        await cluster["w:0"].send_tensor(torch.ones(size, dtype=torch.uint8), "w:1")
        assert bool((await again == 1).all())


@pytest.mark.asyncio
async def test_a_send_that_nobody_awaits_to_a_peer_that_is_gone_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with local_cluster("w=2") as cluster:
        await meet(cluster, "w:0", "w:1")
        cluster["w:0"].send_tensor(torch.ones(100_000), "w:1")
        await asyncio.sleep(0.02)
        told: list[str] = []
        with caplog.at_level(logging.ERROR):
            await cluster.kill("w:1")
            for _ in range(100):
                gc.collect()
                told = [record.getMessage() for record in caplog.records if "never looked at" in record.getMessage()]
                if told:
                    break
                await asyncio.sleep(0.02)
        assert len(told) == 1
        assert "PeerLost" in told[0]
        assert __file__ in told[0], "where it was begun"


# ---- the next life


@pytest.mark.asyncio
async def test_what_belongs_to_an_earlier_life_of_the_peer_says_so() -> None:
    """The news of the first death are lost: the next life itself is what shows that the first one is over."""
    async with local_cluster("w=2", AT_ONCE, backend="stream") as cluster:
        proxy = cluster.between("w:0", "w:1")
        await meet(cluster, "w:0", "w:1")
        a = cluster["w:0"]
        assert a._manager is not None
        news, a._manager.on_news = a._manager.on_news, lambda news: None
        proxy.forget()
        await cluster.kill("w:1")
        group = a.collective.create_collective_group(["w:0", "w:1"])
        works: list[AsyncWork[Any]] = [a.recv("w:1"), a.send_tensor(torch.ones(10), "w:1"), a.recv("w:1", tag=1).then(lambda value: value)]
        works.append(group.recv(tag=2))
        await asyncio.sleep(0.05)
        assert not any(work.done() for work in works)
        b = await cluster.join("w:1")
        assert b.incarnation == 2
        sent = b.send("anew", "w:0")
        for work in works:
            with pytest.raises(PeerRestarted, match="w:1#1 is gone, w:1#2 lives at its address"):
                await work.async_wait(20)
        assert await a.recv("w:1", timeout=20) == "anew"
        await sent
        # What names the address, and not a life of it, is good for the next one.
        sent = b.collective.create_collective_group(["w:0", "w:1"]).send("to the group", tag=2)
        assert await group.recv(tag=2, timeout=20) == "to the group"
        await sent
        await meet(cluster, "w:0", "w:1")
        a._manager.on_news = news


@pytest.mark.asyncio
async def test_a_peer_that_comes_and_goes_again_and_again_with_a_receive_pending_each_time() -> None:
    lives = examples(20)
    async with local_cluster("w=1") as cluster:
        a = cluster["w:0"]
        for life in range(1, lives + 1):
            b = await cluster.join("w:1")
            sent = b.send(life, "w:0")
            assert await a.recv("w:1", timeout=20) == life
            await sent
            told: list[AsyncWork[Any]] = []
            pending = a.recv("w:1")
            pending.add_done_callback(told.append)
            await cluster.leave("w:1")
            with pytest.raises(PeerLeft, match=f"w:1#{life}"):
                await pending.async_wait(20)
            await asyncio.sleep(0)
            assert told == [pending], "once, and with its own life's end"


async def talk_and_leave(comm: Worker, others: list[str], when: float) -> None:
    """Exchange with all others, then close at some moment."""
    works = [comm.send(str(comm.address), other) for other in others]
    assert [await comm.recv(other, timeout=20) for other in others] == others
    await asyncio.gather(*works)
    await asyncio.sleep(when)


@pytest.mark.asyncio
async def test_workers_that_leave_in_any_order_leave_in_silence() -> None:
    names = ["b:0", "b:1", "b:2"]
    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(init("a:0"))
        leaving = []
        for name in names:
            others = [other for other in names if other != name]
            leaving.append(await stack.enter_async_context(peers.worker(a, name, talk_and_leave, others, 0.1 * random.random())))
        for each in leaving:
            await each.result()
            # asyncio, in its debug mode, tells of turns that took long on a busy machine
            assert [line for line in each.said_on_stderr().splitlines() if not line.startswith("Executing <")] == []


# ---- a peer that lives and does not take part


@pytest.mark.asyncio
@pytest.mark.parametrize("direction", ["send", "recv"])
async def test_the_error_of_a_limit_says_what_the_living_peer_waits_for(direction: str) -> None:
    async with local_cluster("w=3") as cluster:
        await meet(cluster, "w:0", "w:1")
        elsewhere = [cluster["w:1"].recv("w:2", tag=5)]
        begin = time.monotonic()
        sends_itself = direction == "send"
        a = cluster["w:0"]
        work: AsyncWork[Any] = (
            a.send_tensor(torch.ones(50_000), "w:1", tag=9, timeout=1.2) if sends_itself else a.recv("w:1", tag=9, timeout=1.2)
        )
        with pytest.raises(DeadlineExceeded) as caught:
            await work
        assert time.monotonic() - begin >= 1.2
        told = str(caught.value)
        what = "has posted no matching receive" if sends_itself else "has sent nothing that matches"
        assert f"w:1 is alive but {what}" in told
        assert "; it waits for recv from w:2 tag 5" in told, told
        assert "tag 9" in told or "tag=9" in told
        assert "w:0" in told
        for each in elsewhere:
            each.cancel()


@pytest.mark.asyncio
async def test_the_error_of_a_limit_does_not_wait_for_who_cannot_answer() -> None:
    async with local_cluster("w=2") as cluster:
        await meet(cluster, "w:0", "w:1")
        await cluster.kill_manager()
        with pytest.raises(DeadlineExceeded, match=r"w:1 is alive but has sent nothing that matches within [0-9.]+ s") as caught:
            await cluster["w:0"].recv("w:1", timeout=1.0)
        assert "waits" not in str(caught.value)
        await cluster.start_manager()
        works = [cluster["w:0"].recv("w:1", tag=tag, timeout=1.0 if tag % 2 else 0.1) for tag in range(20)]
        got = await endings(list(works))
        assert [type(error) for error in got] == [DeadlineExceeded] * 20
        with pytest.raises(DeadlineExceeded):
            await cluster["w:0"].recv("nobody:0", timeout=1.0)


def test_what_a_peer_says_of_itself_makes_a_line_or_none() -> None:
    def report(*pending: dict[str, Any], **facts: Any) -> dict[str, Any]:
        return {"pending": list(pending), "pending_total": len(pending), "busy_at": [], **facts}

    def operation(**facts: Any) -> dict[str, Any]:
        return {"operation": "recv", "peer": "c:0", "tag": 0, "subject": "", "moving": False, **facts}

    assert what_it_waits_for(report()) == "it waits for nothing"
    assert what_it_waits_for(report(operation(moving=True))) == "it waits for nothing"
    assert what_it_waits_for(report(operation())) == "it waits for recv from c:0"
    assert what_it_waits_for(report(operation(operation="send", tag=4), operation(peer=None, operation="inbox"))) == (
        "it waits for send to c:0 tag 4, inbox from anyone"
    )
    assert what_it_waits_for(report(*(operation(tag=tag) for tag in range(9)), pending_total=20)) == (
        "it waits for recv from c:0, recv from c:0 tag 1, recv from c:0 tag 2 and 17 more"
    )
    assert what_it_waits_for(report(operation(operation="gather", subject="of a:0, b:0"))) == "it waits for gather of a:0, b:0"
    assert what_it_waits_for(report(operation(), busy_at=["x.py:1 in f", "y.py:2 in g"])) == "its loop is busy at y.py:2 in g"
    for nonsense in ({}, {"pending": 3}, report({}), report(operation(tag="x")), report(pending_total=None), report(busy_at=None)):
        assert what_it_waits_for(nonsense) == ""


def test_errors_of_peers_are_one_kind() -> None:
    assert all(issubclass(kind, PeerError) for kind in (PeerLeft, PeerLost, PeerRestarted))
