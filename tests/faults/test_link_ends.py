"""What is left of a worker whose link has ended: its last messages, and a small record."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest
import torch

from aiorlinf import init, wait_all
from aiorlinf.errors import PeerError, PeerLeft, PeerLost
from tests.faults.conftest import Pair


@pytest.mark.asyncio
async def test_a_step_that_runs_as_the_link_ends_uses_the_peer_again() -> None:
    async with init("b:0") as b:
        a = await init("a:0", manager=b.manager_address, token=b.token)
        await a.send("unread", "b:0", tag=5)
        await b.send(1, "a:0")
        await a.recv("b:0")
        again = wait_all([b.recv("a:0")], return_exceptions=True).then(lambda _: [b.send("x", "a:0"), b.recv("a:0", tag=5), b.recv("a:0")])
        await a.close()
        sending, unread, receiving = await again
        assert await unread.async_wait(5) == "unread"
        for work in (sending, receiving):
            with pytest.raises(PeerLeft, match="a:0#1 closed"):
                await work.async_wait(5)


@pytest.mark.asyncio
async def test_messages_survive_a_connection_that_breaks_between_the_living(stream_pair: Pair) -> None:
    pair = stream_pair
    sent = ["small", torch.ones(100_000), "last"]
    for obj in sent:
        await pair.ab.send(obj, timeout=10)
    while pair.b.stats().links[0].unread_messages < len(sent):
        await asyncio.sleep(0.01)
    (link,) = pair.a._table.links()
    link._conn.abort()  # type: ignore[union-attr]
    link.on_lost(ConnectionResetError("cut"))
    await pair.ab.send("after", timeout=10)
    await asyncio.sleep(0.1)
    received = [await pair.ba.recv(timeout=10) for _ in range(4)]
    assert received[0] == "small"
    assert torch.equal(received[1], sent[1])  # type: ignore[arg-type]
    assert received[2:] == ["last", "after"]
    assert pair.b._table.left_behind == {}


@pytest.mark.asyncio
async def test_messages_of_an_earlier_life_are_dropped_aloud(complaints: list[str]) -> None:
    async with init("b:0") as b:
        for _ in range(2):
            async with init("a:0", manager=b.manager_address, token=b.token) as a:
                await a.send("hello", "b:0", timeout=10)
        assert complaints == ["b:0 had not received 1 messages of a:0#1 before #2 came: they are dropped"]
        complaints.clear()
        assert await b.recv("a:0", timeout=10) == "hello"
        with pytest.raises(PeerError):
            await b.recv("a:0", timeout=10)


@pytest.mark.asyncio
async def test_of_a_worker_that_is_gone_a_small_record_is_kept() -> None:
    links = []
    async with init("b:0") as b:
        for number in range(5):
            async with init(f"a:{number}", manager=b.manager_address, token=b.token) as a:
                await a.send(number, "b:0")
                await b.recv(f"a:{number}")
                links += [weakref.ref(link) for link in b._table.links()]
        await asyncio.sleep(0.1)
        gc.collect()
        table = b._table
        assert len(links) >= 5
        assert [link() for link in links if link() is not None] == []
        assert len(table.lives.ended) == 5
        for _ in range(3):
            async with init("a:0", manager=b.manager_address, token=b.token) as a:
                await a.send(0, "b:0")
                await b.recv("a:0")
        assert len(table.lives._links_had) == 5
        with pytest.raises((PeerLeft, PeerLost)):
            await b.recv("a:0", timeout=10)


@pytest.mark.asyncio
async def test_a_worker_that_was_pushed_out_before_its_connection_was_made_tries_again(complaints: list[str]) -> None:
    """Hundreds of strangers in one turn of the loop: whoever is dropped must notice, be it a worker or a stranger."""
    async with init("b:0", config={"cluster": {"network": {"handshake_timeout_s": 1.0}}}) as b:
        assert b._table._acceptor is not None
        (port,) = [door._listener.getsockname()[1] for door in b._table._acceptor.doors if door._listener.family == socket.AF_INET]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]  # our loop stands still meanwhile
        try:
            async with init("a:0", manager=b.manager_address, token=b.token) as a:
                sending = a.send("hello", "b:0", timeout=10)
                assert await b.recv("a:0", timeout=10) == "hello"
                await sending
            for stranger in strangers:
                stranger.setblocking(False)
                assert await asyncio.wait_for(_end_of(stranger), 10)
        finally:
            for stranger in strangers:
                stranger.close()
    assert 1 <= len(complaints) <= 8, "a flood of strangers is no flood of warnings"
    complaints.clear()


async def _end_of(stranger: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
    except ConnectionResetError:
        return True
