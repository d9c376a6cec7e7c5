"""The network cuts a link between two workers that both live on: nothing is lost, nothing comes twice, and those who wait go on waiting."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import torch
import uvloop

from aiorlinf import Worker, init
from aiorlinf.config import load_config
from aiorlinf.errors import ClosedError, PeerLost
from aiorlinf.link import resume
from aiorlinf.link.connection import Connection
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.resume import Resumptions
from aiorlinf.testing.cluster import local_cluster
from tests.link.test_table import link_of, until
from tests.manager.support import TOKEN, manager

__all__: list[str] = []


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine whose workers reach each other over TCP only, as from host to host."""
    monkeypatch.setattr("aiorlinf.link.enrolment._unix_listener", lambda: None)

    def run(coro: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param, debug=True) as runner:
            runner.run(coro)

    return run


@contextlib.asynccontextmanager
async def two(compress: bool = False, **network: Any) -> AsyncIterator[tuple[Worker, Worker]]:
    """Two workers on this loop, and a link between them."""
    collective: dict[str, Any] = {"backend": "stream", "chunk_bytes": 65_536}
    if compress:
        collective["tensor_compression"] = {"codec": "lz4", "min_bytes": 1024}
    config = load_config({"cluster": {"collective": collective, "network": network}})
    async with (
        manager(config=config) as service,
        init("a:0", manager=service.address, token=TOKEN) as a,
        init("b:0", manager=service.address, token=TOKEN) as b,
    ):
        await asyncio.gather(a.send("first", "b:0"), b.recv("a:0"), b.send("first", "a:0"), a.recv("b:0"))
        yield a, b


def connection_of(worker: Worker, peer: str) -> Connection:
    """Under the link that is there."""
    connection = link_of(worker, peer)._conn
    assert isinstance(connection, Connection)
    return connection


def cut(worker: Worker, peer: str, *, hard: bool = False) -> None:
    """Break the socket under a link: an orderly end, or what is on its way is lost, too."""
    transport = connection_of(worker, peer).transport
    if transport is None or transport.is_closing():
        return
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
        if hard:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            with contextlib.suppress(OSError):  # the other side was quicker
                sock.shutdown(socket.SHUT_RDWR)


def whole(*links: Link) -> bool:
    """All of them have a socket."""
    return all(isinstance(link._conn, Connection) and link._conn.transport is not None for link in links)


@pytest.mark.parametrize("hard", [False, True], ids=["closed", "reset"])
def test_small_messages_come_once_and_in_order_through_many_breaks(run: Callable[..., None], hard: bool) -> None:
    async def scenario() -> None:
        async with two() as (a, b):
            links = link_of(a, "b:0"), link_of(b, "a:0")
            chance = random.Random(7)

            async def talk(worker: Worker, peer: str) -> None:
                number = 0
                while number < 500 or link_of(worker, peer).reconnects < 4:
                    await worker.send((number, "x" * (number % 300)), peer)
                    number += 1
                    if number % 64 == 0:
                        await asyncio.sleep(0.001)
                await worker.send(None, peer)

            async def hear(worker: Worker, peer: str) -> None:
                number = 0
                while (message := await worker.recv(peer)) is not None:
                    assert message == (number, "x" * (number % 300))
                    number += 1

            async def disturb() -> None:
                while True:
                    await asyncio.sleep(chance.uniform(0.005, 0.03))
                    cut(*chance.choice([(a, "b:0"), (b, "a:0")]), hard=hard)

            disturbing = asyncio.create_task(disturb())
            await asyncio.gather(talk(a, "b:0"), talk(b, "a:0"), hear(a, "b:0"), hear(b, "a:0"))
            assert disturbing.cancel(), "it ended early"
            await until(lambda: whole(*links))
            assert (link_of(a, "b:0"), link_of(b, "a:0")) == links, "the link is the same"
            assert not any(link.mailbox for link in links)

    run(scenario())


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "lz4"])
def test_payloads_arrive_whole_through_many_breaks(run: Callable[..., None], compress: bool) -> None:
    async def scenario() -> None:
        async with two(compress) as (a, b):
            chance = random.Random(3)
            tensors = [torch.randint(0, 4, (chance.randrange(200_000, 4_000_000),), dtype=torch.uint8) for _ in range(12)]

            async def disturb() -> None:
                while True:
                    await asyncio.sleep(chance.uniform(0.002, 0.02))
                    cut(*chance.choice([(a, "b:0"), (b, "a:0")]), hard=chance.random() < 0.5)

            async def there() -> None:
                for tensor in tensors:
                    copy = tensor.clone()
                    await a.send({"t": copy}, "b:0")
                    copy.zero_()  # it is done: whatever is written again afterwards must not come from here

            async def back() -> None:
                for tensor in tensors:
                    await b.send_tensor(tensor, "a:0", tag=1)

            async def check() -> None:
                for tensor in tensors:
                    assert torch.equal((await b.recv("a:0"))["t"], tensor)

            async def check_into() -> None:
                for tensor in tensors:
                    assert torch.equal(await a.recv_tensor(torch.zeros_like(tensor), "b:0", tag=1), tensor)

            disturbing = asyncio.create_task(disturb())
            await asyncio.gather(there(), back(), check(), check_into())
            assert disturbing.cancel(), "it ended early"
            await until(lambda: whole(link_of(a, "b:0"), link_of(b, "a:0")))
            assert a.stats().links[0].reconnects > 0

    run(scenario())


def test_a_break_that_only_one_side_notices(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        for worker_is_a in (True, False):
            async with two() as (a, b):
                one, other = (a, b) if worker_is_a else (b, a)
                connection = connection_of(one, other.address)
                old = connection.transport
                assert old is not None
                await one.send("on its way", other.address)
                old.set_protocol(asyncio.Protocol())  # the middlebox has forgotten the flow: the other side hears nothing
                connection.connection_lost(TimeoutError("no answer"))
                await one.send("later", other.address)
                assert [await other.recv(one.address) for _ in range(2)] == ["on its way", "later"]
                await other.send("back", one.address)
                assert await one.recv(other.address) == "back"
                old.abort()

    run(scenario())


def forget_flow(connection: Connection) -> None:
    """From here on whatever arrives at this socket is dropped without a word, as by a middlebox that does not know the flow any more."""
    assert connection.transport is not None
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0: pass zero bytes on
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    with socket.socket(fileno=os.dup(connection.extra_info("socket").fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def test_a_flow_that_is_forgotten_in_silence_is_noticed(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_FUTILE_TRIES", 2)
    monkeypatch.setattr(resume, "_LOOK_SECONDS", 0.1)

    async def scenario() -> None:
        async with two() as (a, b):
            forget_flow(connection_of(a, "b:0"))
            forget_flow(connection_of(b, "a:0"))
            tensor = torch.arange(1_000_000)
            sent = a.send(tensor, "b:0")
            assert torch.equal(await asyncio.wait_for(b.recv("a:0"), 20), tensor)
            await sent
            assert a.stats().links[0].reconnects == 1

    run(scenario())


def test_what_is_sent_after_a_pause_in_which_the_flow_was_forgotten_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A middlebox between the two forgets an idle flow and tells nobody."""
    monkeypatch.setattr(resume, "_FUTILE_TRIES", 2)
    monkeypatch.setattr(resume, "_LOOK_SECONDS", 0.1)

    async def scenario() -> None:
        async with local_cluster("w=2", backend="stream") as cluster:
            proxy = cluster.between("w:0", "w:1")
            one, other = cluster["w:0"], cluster["w:1"]
            await asyncio.gather(one.send("before", "w:1"), other.recv("w:0"), other.send("before", "w:0"), one.recv("w:1"))
            assert proxy.forget() > 0
            await asyncio.sleep(0.3)
            tensor = torch.arange(100_000)
            works = [worker.send(obj, peer) for worker, peer in ((one, "w:1"), (other, "w:0")) for obj in (1, tensor, 2)]
            for worker, peer in ((one, "w:1"), (other, "w:0")):
                got = [await worker.recv(peer, timeout=20) for _ in range(3)]
                assert (got[0], got[2]) == (1, 2)
                assert torch.equal(got[1], tensor)
            await asyncio.gather(*works)
            assert [link.unread_messages for worker in (one, other) for link in worker.stats().links] == [0, 0]
            assert [link.reconnects for link in one.stats().links] == [1]

    asyncio.run(scenario(), debug=True)


def test_a_peer_that_does_not_read_is_left_alone(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_FUTILE_TRIES", 2)
    monkeypatch.setattr(resume, "_LOOK_SECONDS", 0.1)

    async def scenario() -> None:
        async with two() as (a, b):
            reading = connection_of(b, "a:0").transport
            assert reading is not None
            reading.pause_reading()
            sent = a.send(torch.zeros(20_000_000, dtype=torch.uint8), "b:0")
            received = b.recv("a:0")
            await asyncio.sleep(1.5)
            assert not sent.done()
            reading.resume_reading()
            await received
            await sent
            assert a.stats().links[0].reconnects == 0

    run(scenario())


def test_a_receive_goes_on_waiting_and_a_link_that_is_idle_is_restored_too(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with two() as (a, b):
            waiting = b.recv("a:0")
            for _ in range(5):
                cut(a, "b:0")
                await until(lambda: not whole(link_of(a, "b:0"), link_of(b, "a:0")))
                await until(lambda: whole(link_of(a, "b:0"), link_of(b, "a:0")))
            assert not waiting.done()
            await a.send("now", "b:0")
            assert await waiting == "now"

    run(scenario())


def test_where_nobody_listens_any_more_the_peer_is_dead_at_once(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with two() as (a, b):
            waiting = a.recv("b:0")
            assert b._table._acceptor is not None
            b._table._acceptor.close()  # as when its process ends
            cut(b, "a:0")
            with pytest.raises(PeerLost, match=r"ended without a goodbye|its connection broke"):
                await asyncio.wait_for(waiting, 5)

    run(scenario())


def test_it_is_not_tried_for_ever(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with two(reconnect_timeout_s=0.4) as (a, b):

            async def silence(*_: Any) -> None:
                raise TimeoutError("no answer")

            monkeypatch.setattr(Resumptions, "_try", silence)
            works = [a.recv("b:0"), b.recv("a:0"), a.send(torch.zeros(10_000_000), "b:0")]
            cut(a, "b:0")
            for work in works:
                with pytest.raises(PeerLost, match=r"could not be restored within 0\.\d s \(no answer\)"):
                    await asyncio.wait_for(work, 10)
            monkeypatch.undo()
            monkeypatch.setattr("aiorlinf.link.enrolment._unix_listener", lambda: None)
            await asyncio.gather(a.send("anew", "b:0"), b.recv("a:0"))
            assert a.stats().links[0].reconnects == 0

    run(scenario())


def test_one_that_has_given_up_says_so(run: Callable[..., None]) -> None:
    """The other side could wait longer, but what it still has to send can go nowhere."""

    async def scenario() -> None:
        async with two() as (a, b):
            waiting = a.recv("b:0")
            assert b._table._resumptions is not None
            link = link_of(b, "a:0")
            link.end(lambda: PeerLost("enough"))
            with pytest.raises(PeerLost):
                await asyncio.wait_for(waiting, 5)

    run(scenario())


def test_off_means_that_a_break_is_the_end(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with two(reconnect_timeout_s=0.0) as (a, b):
            works = a.recv("b:0"), b.recv("a:0")
            cut(a, "b:0")
            for work in works:
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(work, 5)

    run(scenario())


def test_closing_during_a_break_ends_in_time(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with two(close_timeout_s=0.3) as (a, b):
            monkeypatch.setattr(Resumptions, "_try", lambda *_: asyncio.sleep(60))
            waiting = a.recv("b:0")
            cut(b, "a:0")
            await until(lambda: not whole(link_of(a, "b:0")))
            await asyncio.wait_for(a.close(), 5)
            with pytest.raises(ClosedError):
                await waiting
            assert link_of(b, "a:0").state is LinkState.UP

    run(scenario())
