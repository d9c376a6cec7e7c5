"""A job outlives its manager: links go on, new ones form from what is known, and a new manager learns everything from the workers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import aiorlinf.manager.service as service_module
from aiorlinf import Worker, init
from aiorlinf.address import WorkerAddress
from aiorlinf.config import ClusterConfig, CollectiveConfig, JobConfig, NetworkConfig
from aiorlinf.errors import DeadlineExceeded, DeclaredDead, PeerLost, RendezvousError
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.manager.lives import End
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import parse_endpoint
from tests.manager.support import TOKEN, until

CONFIG = JobConfig(ClusterConfig(collective=CollectiveConfig(chunk_bytes=4096), network=NetworkConfig(heartbeat_timeout_s=2.0)))


class Managers:
    """One after the other, all at one address."""

    def __init__(self) -> None:
        self.service: ManagerService | None = None
        self.address = ""

    async def start(self, **options: Any) -> ManagerService:
        """The first one has the configuration, the next ones have to learn it."""
        assert self.service is None
        if self.address:
            options = {"config": None, "recover": True, **options}
        service = self.service = ManagerService(**{"config": CONFIG, "token": TOKEN, "job": "j", **options})
        await service.start(port=parse_endpoint(self.address)[1] if self.address else 0)
        self.address = service.address
        return service

    async def stop(self) -> None:
        if self.service is not None:
            service, self.service = self.service, None
            await service.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers here are quick to come back."""
    monkeypatch.setattr(service_module, "RECOVERY_S", 1.0)


@contextlib.asynccontextmanager
async def job(*addresses: str) -> AsyncIterator[tuple[Managers, list[Worker]]]:
    managers = Managers()
    await managers.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            yield managers, [await stack.enter_async_context(init(each, manager=managers.address, token=TOKEN)) for each in addresses]
    finally:
        await managers.stop()


def lifeline(worker: Worker) -> Lifeline:
    assert worker._manager is not None
    return worker._manager


async def exchange(one: Worker, other: Worker, what: Any = "x") -> None:
    sent = one.send(what, other.address)
    assert (await other.recv(one.address, timeout=20)) == what
    await sent


@pytest.mark.asyncio
async def test_links_go_on_without_a_manager_and_new_ones_form_from_what_is_known() -> None:
    async with job("a:0", "b:0", "c:0") as (managers, (a, b, c)):
        await exchange(a, b)
        await lifeline(a).lookup("c:0")  # known, and not used yet
        under_way = a.send(torch.ones(2_000_000), "b:0")
        await managers.stop()
        await until(lambda: lifeline(a).away and lifeline(b).away and lifeline(c).away)
        assert (await b.recv("a:0", timeout=20)).sum() == 2_000_000
        await under_way
        await exchange(a, c)
        await exchange(c, a)
        assert [str(peer) for peer in await a.peers()] == ["b:0#1", "c:0#1"], "those that it knows"
        with pytest.raises(DeadlineExceeded, match="d:0 has not come within"):
            await a.wait_for("d:0", timeout=0.2)
        with pytest.raises(RendezvousError, match=r"the manager has been away for .* and cannot be asked where d:0 is"):
            await lifeline(a).lookup("d:0", 0.2)
        # a link that is lost is made again from what is known
        link = a._table.peek(WorkerAddress("c:0"))
        assert link is not None
        conn: Any = link._conn
        conn.transport.abort()
        await until(lambda: a._table.peek(WorkerAddress("c:0")) is None and c._table.peek(WorkerAddress("a:0")) is None)
        await exchange(c, a)
    assert "closed" in repr(a)


@pytest.mark.asyncio
async def test_a_worker_that_died_while_the_manager_is_away_is_lost_at_once_and_not_waited_for() -> None:
    async with job("a:0", "b:0") as (managers, (a, b)):
        await exchange(a, b)
        await managers.stop()
        await until(lambda: lifeline(a).away)
        b._table.abort()  # as its process's end would
        begin = time.monotonic()
        with pytest.raises(PeerLost):
            await a.recv("b:0", timeout=20)
        with pytest.raises(PeerLost, match="b:0#1 is gone"):
            await a.send(1, "b:0", timeout=20)
        assert time.monotonic() - begin < 5.0


@pytest.mark.asyncio
async def test_a_new_manager_is_rebuilt_from_its_workers() -> None:
    async with job("a:0", "b:0") as (managers, (a, b)):
        async with init("b:1", manager=managers.address, token=TOKEN) as gone:
            await exchange(a, gone)
        async with init("b:1", manager=managers.address, token=TOKEN) as gone:
            await exchange(a, gone)
            assert gone.incarnation == 2
        await exchange(a, b)
        await lifeline(a).publish("channel", "traj", {"key": "7"})
        await lifeline(b).publish("group", "g", {})
        await lifeline(b).withdraw("group", "g")
        before = managers.service
        await managers.stop()
        assert before is not None
        begin = time.monotonic()
        service = await managers.start()
        newcomer = init("c:0", manager=managers.address, token=TOKEN)
        again = init("b:1", manager=managers.address, token=TOKEN)
        await until(lambda: len(service._directory.living) == 2)
        assert service._directory.recovering, "new ones wait"
        async with newcomer, again:
            assert time.monotonic() - begin < 5.0
            assert again.incarnation == 3, "the numbers go on"
            assert newcomer.config == service.config == CONFIG, "it was learnt from the workers"
            assert sorted(map(str, service._directory.living)) == ["a:0#1", "b:0#1", "b:1#3", "c:0#1"]
            holding = await lifeline(newcomer).find("channel", "traj", 5.0)
            assert (str(holding.owner), holding.value) == ("a:0#1", {"key": "7"})
            with pytest.raises(RendezvousError, match="which nobody holds"):
                await lifeline(newcomer).find("group", "g", 0.0)
            for one, other in ((newcomer, a), (again, b), (a, again)):
                await exchange(one, other)
            assert (a.incarnation, b.incarnation) == (1, 1)
        service._directory.check()


@pytest.mark.asyncio
async def test_a_manager_may_go_and_come_as_often_as_it_likes() -> None:
    async with job("a:0", "b:0") as (managers, (a, b)):
        await exchange(a, b)
        for turn in range(4):
            await managers.stop()
            await exchange(a, b, turn)
            service = await managers.start()
            await until(lambda service=service: len(service._directory.living) == 2)  # type: ignore[misc]
            await until(lambda: not lifeline(a).away and not lifeline(b).away)
            await exchange(b, a, turn)
            assert sorted(map(str, service._directory.living)) == ["a:0#1", "b:0#1"]


@pytest.mark.asyncio
async def test_the_manager_of_another_job_or_token_is_not_joined(caplog: pytest.LogCaptureFixture) -> None:
    async with job("a:0", "b:0") as (managers, (a, b)):
        await exchange(a, b)
        for options in ({"job": "other"}, {"token": b"another"}):
            await managers.stop()
            await until(lambda: lifeline(a).away)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "aiorlinf.manager"):
                service = await managers.start(**options)
                await until(lambda: "a:0 cannot come back to its manager yet" in caplog.text)
            assert service._directory.living == ()
            await exchange(a, b)
        await managers.stop()
        await managers.start()
        await until(lambda: not lifeline(a).away and not lifeline(b).away)


@pytest.mark.asyncio
async def test_who_was_declared_lost_meanwhile_is_told_so_by_the_next_manager() -> None:
    async with job("a:0", "b:0", "c:0") as (managers, (a, b, c)):
        await exchange(a, b)
        await exchange(b, c)
        pending = b.recv("c:0")
        inbox = b.inbox(tag=5)
        waiting = inbox.recv()
        stream = b.membership()
        assert (await stream.next(20)).kind == "joined"
        assert (await stream.next(20)).kind == "joined"
        news = stream.next()
        await managers.stop()
        service = await managers.start()
        await until(lambda: len(service._directory.living) == 3)
        # as if it had been silent for too long
        member = service._directory._roster.get(WorkerAddress("b:0"))
        assert member is not None
        service._obey(service._directory._end(member, End("lost", "it was tried out"), silent=True))
        # c may hear of it first, and end its link with b before b itself knows.
        with pytest.raises((DeclaredDead, PeerLost), match=r"b:0#1 was declared dead: it was tried out|c:0#1 is gone"):
            await pending.async_wait(20)
        for work in (waiting, news):
            with pytest.raises(DeclaredDead, match="b:0#1 was declared dead: it was tried out"):
                await work.async_wait(20)
        for call in (
            lambda: b.send(1, "a:0"),
            lambda: b.recv("c:0"),
            lambda: b.inbox().recv(),
            lambda: b.peers(),
            lambda: b.membership().next(),
        ):
            with pytest.raises(DeclaredDead):
                await call().async_wait(20)
        with pytest.raises(DeclaredDead):
            async for _ in b.inbox():
                pass
        with pytest.raises(PeerLost, match="b:0#1"):
            await a.recv("b:0").async_wait(20)
        await b.close()
        async with init("b:0", manager=managers.address, token=TOKEN) as next_life:
            assert next_life.incarnation == 2
            await exchange(a, next_life)
        await exchange(a, c)


@pytest.mark.asyncio
async def test_a_connection_to_the_manager_that_breaks_is_no_death() -> None:
    async with job("a:0", "b:0") as (managers, (a, b)):
        service = managers.service
        assert service is not None
        stream = b.membership()
        assert str(await stream.next(20)) == "a:0#1 joined"
        nothing = stream.next()
        for _ in range(3):
            client = lifeline(a)._keeper._client
            assert client is not None
            lifeline(a)._thread.loop.call_soon_threadsafe(client._connection._transport.abort)  # type: ignore[union-attr]
            await until(lambda client=client: lifeline(a)._keeper._client not in (None, client))  # type: ignore[misc]
        await exchange(a, b)
        assert not nothing.done()
        nothing.cancel()
        assert sorted(map(str, service._directory.living)) == ["a:0#1", "b:0#1"]


@pytest.mark.asyncio
async def test_closing_while_the_manager_is_away_is_quick() -> None:
    async with job("a:0", "b:0") as (managers, (a, b)):
        await exchange(a, b)
        await managers.stop()
        await until(lambda: lifeline(a).away)
        waiting = a.wait_for("z:0")
        begin = time.monotonic()
        await a.close()
        assert time.monotonic() - begin < 2.0
        assert waiting.done()
        assert waiting.exception() is not None


@pytest.mark.asyncio
async def test_joining_a_manager_that_recovers_in_vain_gives_the_defaults() -> None:
    managers = Managers()
    managers.address = "127.0.0.1:0"
    service = ManagerService(config=None, token=TOKEN, job="j", recover=True)
    await service.start()
    try:
        begin = time.monotonic()
        async with init("a:0", manager=service.address, token=TOKEN) as a:
            assert 0.5 < time.monotonic() - begin < 3.0
            assert a.config == JobConfig()
    finally:
        await service.close()
