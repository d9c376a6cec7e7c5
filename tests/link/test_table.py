"""Links are made on first use, one per pair of workers, and end as they should. Whole workers, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aiorlinf.link.accepting as module
from aiorlinf import Worker, init
from aiorlinf.address import WorkerAddress
from aiorlinf.errors import ClosedError, PeerLeft, PeerLost, RendezvousError, UsageError
from aiorlinf.link.link import Link, LinkState
from aiorlinf.manager.client import ManagerClient
from tests.holders import who_holds
from tests.manager.support import TOKEN, config_with, manager

__all__: list[str] = []


def link_of(worker: Worker, peer: str) -> Link:
    """The link that is there."""
    link = worker._table.peek(WorkerAddress(peer))
    assert link is not None
    return link


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def workers(*addresses: str, **network: Any) -> AsyncIterator[list[Worker]]:
    """Workers of one job on this loop, with these network settings."""
    async with manager(config=config_with(**network)) as service, contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(init(address, manager=service.address, token=TOKEN)) for address in addresses]


def break_connection(link: Link) -> None:
    """As a network would."""
    conn: Any = link._conn
    with socket.socket(fileno=os.dup(conn.extra_info("socket").fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def vanish(link: Link) -> None:
    """As a killed process would: nobody is at this end of the connection any more, so that the next word to it is answered by a reset."""
    conn: Any = link._conn
    one, other = socket.socketpair()
    with one, other:
        os.dup2(one.fileno(), conn.extra_info("socket").fileno())


@pytest.mark.asyncio
async def test_a_link_is_made_on_first_use_and_is_the_same_ever_after(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        assert a._table.links() == []
        await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
        link = link_of(a, "b:0")
        assert link.state is LinkState.UP
        assert a._table.obtain(WorkerAddress("b:0")) is link
        await asyncio.gather(b.send(1, "a:0"), a.recv("b:0"))
        assert a._table.links() == [link]
        assert len(b._table.links()) == 1


@pytest.mark.asyncio
async def test_all_connect_to_all_at_once(problems: list[dict[str, Any]]) -> None:
    names = [f"w:{rank}" for rank in range(8)]
    async with workers(*names) as members:
        for turn in range(3):
            works = []
            for one, other in itertools.permutations(members, 2):
                works.append(one.send((one.address, turn), other.address))
                works.append(other.recv(one.address))
            await asyncio.wait_for(asyncio.gather(*works), 30)
            for worker in members:
                assert sorted(link.remote for link in worker._table.links()) == sorted(set(names) - {worker.address})
                assert all(link.state is LinkState.UP for link in worker._table.links())
                assert worker._table._connector.dialling == set()
                await until(lambda worker=worker: not worker._table._connector.attempts)  # type: ignore[misc]


@pytest.mark.asyncio
async def test_two_that_connect_at_once_lose_nothing(problems: list[dict[str, Any]]) -> None:
    async with manager() as service:
        for turn in range(10):
            async with init("a:0", manager=service.address, token=TOKEN) as a, init("b:0", manager=service.address, token=TOKEN) as b:
                sent = [a.send(turn, "b:0"), b.send(-turn, "a:0")]
                assert await b.recv("a:0", timeout=20) == turn
                assert await a.recv("b:0", timeout=20) == -turn
                await asyncio.gather(*sent)
                assert len(a._table.links()) == len(b._table.links()) == 1


@pytest.mark.asyncio
async def test_operations_wait_until_the_peer_has_come(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", rendezvous_timeout_s=20.0) as (a,):
        sent = [a.send(number, "b:0") for number in range(3)]
        waiting = a.recv("b:0")
        await asyncio.sleep(0.05)
        assert link_of(a, "b:0").state is LinkState.CONNECTING
        async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
            assert [await b.recv("a:0", timeout=20) for _ in range(3)] == [0, 1, 2]
            await b.send("hello", "a:0")
            assert await waiting == "hello"
            await asyncio.gather(*sent)


@pytest.mark.asyncio
async def test_a_peer_that_never_comes(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", rendezvous_timeout_s=0.1) as (a,):
        works = [a.send(1, "b:0"), a.recv("b:0")]
        for work in works:
            with pytest.raises(RendezvousError, match=r"a:0 .*b:0") as caught:
                await work
            assert caught.value.remote == "b:0"
        assert a._table.links() == []


@pytest.mark.asyncio
async def test_a_peer_at_whose_port_nobody_listens_is_tried_until_the_time_is_over(problems: list[dict[str, Any]]) -> None:
    async with manager(config=config_with(rendezvous_timeout_s=0.3)) as service:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            client = await ManagerClient.connect(service.address, TOKEN, deadline=10.0, worker="b:0")
            await client.register("b:0", port=port)
            async with init("a:0", manager=service.address, token=TOKEN) as a:
                begin = time.monotonic()
                with pytest.raises(RendezvousError, match=f"could not connect to b:0: 127.0.0.1:{port}: .*refused"):
                    await a.send(1, "b:0")
                assert time.monotonic() - begin >= 0.3
            await client.close()


@pytest.mark.asyncio
async def test_a_peer_that_answers_late_is_reached_all_the_same(problems: list[dict[str, Any]]) -> None:
    """Its port says nothing at first; the attempt is given up after connect_timeout_s, and repeated."""
    async with workers("a:0", connect_timeout_s=0.1, rendezvous_timeout_s=20.0) as (a,):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = await ManagerClient.connect(a.manager_address, TOKEN, deadline=10.0, worker="b:0")
            await client.register("b:0", port=silent.getsockname()[1])
            sent = a.send("at last", "b:0")
            await asyncio.sleep(0.25)
            await client.close()
        async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
            assert await b.recv("a:0", timeout=20) == "at last"
            await sent


@pytest.mark.asyncio
async def test_someone_who_is_not_of_the_job_is_an_error_at_the_call(problems: list[dict[str, Any]]) -> None:
    async with manager(expected=["a:0", "b:0"]) as service, init("a:0", manager=service.address, token=TOKEN) as a:
        with pytest.raises(UsageError, match="c:0 is not a worker of this job") as caught:
            a.send(1, "c:0")
        assert "a:0, b:0" in str(caught.value)
        assert a._table.links() == []


@pytest.mark.asyncio
async def test_a_broken_connection_fails_what_was_under_way_and_the_next_use_connects_again(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        await asyncio.gather(a.send(0, "b:0"), b.recv("a:0"))
        waiting = [a.recv("b:0"), b.recv("a:0", tag=3)]
        old = link_of(a, "b:0")
        break_connection(old)
        for work in waiting:
            with pytest.raises(PeerLost):
                await work
        assert old.state is LinkState.ENDED
        await until(lambda: b._table.links() == [])
        sent = [a.send("again", "b:0"), b.send("and back", "a:0")]
        assert await b.recv("a:0", timeout=20) == "again"
        assert await a.recv("b:0", timeout=20) == "and back"
        await asyncio.gather(*sent)
        assert link_of(a, "b:0") is not old


@pytest.mark.asyncio
async def test_one_side_that_has_lost_its_connection_replaces_it_on_the_other(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        await asyncio.gather(a.send(0, "b:0"), b.recv("a:0"))
        old = link_of(b, "a:0")
        waiting = b.recv("a:0", tag=3)
        # As if b's network had been unplugged: it never hears of the end.
        held: Any = old._conn
        held.transport.pause_reading()
        link_of(a, "b:0").end(lambda: PeerLost("unplugged"))
        sent = a.send("anew", "b:0")
        with pytest.raises(PeerLost):
            await waiting
        assert await b.recv("a:0", timeout=20) == "anew"
        await sent
        assert link_of(b, "a:0") is not old


@pytest.mark.asyncio
async def test_what_a_peer_has_sent_can_be_received_after_it_has_left(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0") as (a,):
        async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
            for number in range(3):
                await b.send(number, "a:0")
            waiting = a.recv("b:0", tag=9)
        with pytest.raises(PeerLeft, match="b:0#1"):
            await waiting
        assert [await a.recv("b:0") for _ in range(3)] == [0, 1, 2]
        with pytest.raises(PeerLeft, match="b:0#1 closed and has not come back"):
            await a.recv("b:0")


@pytest.mark.asyncio
async def test_what_a_peer_had_sent_outlives_a_broken_connection(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        for turn in range(3):
            await b.send(f"over connection {turn}", "a:0")
            await b.send(f"on another tag {turn}", "a:0", tag=4)
            old = link_of(a, "b:0")
            break_connection(old)
            await until(lambda old=old: old.state is LinkState.ENDED and not b._table.links())  # type: ignore[misc]
        await b.send("at last", "a:0")
        assert [await a.recv("b:0") for _ in range(4)] == ["over connection 0", "over connection 1", "over connection 2", "at last"]
        assert [await a.recv("b:0", tag=4) for _ in range(3)] == ["on another tag 0", "on another tag 1", "on another tag 2"]
        assert a._table.unread(WorkerAddress("b:0"), 0) is None
        assert a._table.left_behind == {}


@pytest.mark.asyncio
async def test_what_is_given_back_late_goes_to_whoever_waits_on_the_next_link(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        await b.send("from before", "a:0")
        old = link_of(a, "b:0")
        break_connection(old)
        await until(lambda: old.state is LinkState.ENDED and not b._table.links())
        first = a.recv("b:0")
        assert first.done()
        second, third = a.recv("b:0"), a.recv("b:0")
        await b.send("from after", "a:0", tag=1)
        assert not second.done()
        assert first.cancel(), "nobody has taken its value"
        assert await second.async_wait(20) == "from before"
        await b.send("from now", "a:0")
        assert await third == "from now"
        assert await a.recv("b:0", tag=1) == "from after"


@pytest.mark.asyncio
async def test_what_an_earlier_life_had_sent_is_dropped_aloud(problems: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    async with workers("a:0") as (a,):
        async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
            await b.send("of the first life", "a:0")
        async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
            assert b.incarnation == 2
            await b.send("of the second", "a:0")
            assert await a.recv("b:0") == "of the second"
    assert "a:0 had not received 1 messages of b:0#1 before #2 came: they are dropped" in caplog.text


@pytest.mark.asyncio
async def test_a_new_life_is_connected_to_on_next_use(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0") as (a,):
        for life in range(1, 4):
            async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
                sent = a.send(life, "b:0")
                assert await b.recv("a:0", timeout=20) == life
                await sent
                identity = link_of(a, "b:0").identity
                assert identity is not None
                assert identity.incarnation == life
            await until(lambda: a._table.links() == [])


@pytest.mark.asyncio
async def test_strangers_cannot_keep_peers_out(problems: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNPROVEN", 5)
    async with workers("a:0", "b:0") as (a, b):
        acceptor = b._table._acceptor
        assert acceptor is not None
        door = acceptor.doors[0]
        port = door._listener.getsockname()[1]
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        await until(lambda: door.quiet == 5)
        sent = a.send(1, "b:0")
        assert await b.recv("a:0", timeout=20) == 1
        await sent
        for _, writer in strangers:
            writer.close()
        await until(lambda: not acceptor.unproven and not door.quiet)


@pytest.mark.asyncio
async def test_a_flood_does_not_end_the_attempt_of_a_peer(problems: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that the flood pushed out is tried again."""
    monkeypatch.setattr(module, "_MAX_UNPROVEN", 1)
    async with workers(*[f"w:{rank}" for rank in range(6)]) as members:
        target = members[0]
        works = [worker.send(worker.address, target.address) for worker in members[1:]]
        got = [await target.recv(worker.address, timeout=20) for worker in members[1:]]
        assert got == [worker.address for worker in members[1:]]
        await asyncio.gather(*works)


@pytest.mark.asyncio
async def test_closing_delivers_what_was_sent(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0") as (a,):
        async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
            works = [b.send(number, "a:0") for number in range(100)]
        await asyncio.gather(*works)
        assert [await a.recv("b:0") for _ in range(100)] == list(range(100))


@pytest.mark.asyncio
async def test_closing_says_what_it_could_not_deliver(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0") as (a,), init("b:0", manager=a.manager_address, token=TOKEN) as b:
        nobody = b.send(b"x" * 1000, "c:0")
        (line,) = await b._table.close(0.05)
        assert line.startswith("1 message (10")
        assert line.endswith("bytes) to c:0")
        with pytest.raises(ClosedError):
            await nobody


@pytest.mark.asyncio
async def test_closing_in_the_moment_in_which_a_connection_is_reset(
    problems: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel knows already, the loop does not: the other links are closed in order all the same."""
    hosts = itertools.count()
    monkeypatch.setattr("aiorlinf.link.enrolment.host_identity", lambda: f"host {next(hosts)}")
    async with workers("a:0", "b:0", "c:0") as (a, b, c):
        for other in (b, c):
            await asyncio.gather(a.send("x", other.address), other.recv("a:0"))
        last = c.recv("a:0")
        for link in a._table.links():
            say_goodbye = link.say_goodbye

            def break_and_say(link: Link = link, say_goodbye: Callable[[], None] = say_goodbye) -> None:
                if link.remote == "b:0":
                    vanish(link_of(b, "a:0"))
                say_goodbye()

            link.say_goodbye = break_and_say  # type: ignore[method-assign]
        await a.close()
        with pytest.raises(PeerLeft, match="a:0#1"):
            await last
    assert "failed" not in caplog.text


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_what_was_cancelled(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0") as (a,):
        works = [a.send(number, "nobody:0") for number in range(5)]
        for work in works:
            work.cancel()
        begin = time.monotonic()
        assert await a._table.close(30.0) == []
        assert time.monotonic() - begin < 10


@pytest.mark.asyncio
async def test_nothing_new_begins_on_a_closed_table(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0", "b:0") as (a, b):
        await asyncio.gather(a.send(0, "b:0"), b.recv("a:0"))
        await a.close()
        with pytest.raises(ClosedError):
            a._table.obtain(WorkerAddress("b:0"))
        with pytest.raises(PeerLeft, match="a:0#1 closed and has not come back"):
            await b.send(1, "a:0")


@pytest.mark.asyncio
async def test_a_worker_talks_to_itself(problems: list[dict[str, Any]]) -> None:
    async with workers("a:0") as (a,):
        sent = a.send({"to": "me"}, "a:0")
        assert await a.recv("a:0", timeout=20) == {"to": "me"}
        await sent
        assert link_of(a, "a:0").backend == "stream"


@pytest.mark.asyncio
async def test_ended_links_are_not_kept_for_nothing(problems: list[dict[str, Any]]) -> None:
    def links_of_a() -> list[Link]:
        return [obj for obj in gc.get_objects() if type(obj) is Link and obj.local == "a:0"]

    earlier = weakref.WeakSet(links_of_a())  # of other tests
    async with workers("a:0") as (a,):
        for _ in range(5):
            async with init("b:0", manager=a.manager_address, token=TOKEN) as b:
                await asyncio.gather(b.send(0, "a:0"), a.recv("b:0"))
        gc.collect()
        links = [link for link in links_of_a() if link not in earlier]
        assert len(links) <= 2, "\n\n".join(f"{link}\n{who_holds(link)}" for link in links)
