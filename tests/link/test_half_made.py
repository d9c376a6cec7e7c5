"""Connections of peers that have proved themselves and have not said yet that they have the link. A whole worker, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from aiorlinf import Worker, init
from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import PeerLost
from aiorlinf.link.connection import Connection
from aiorlinf.link.dial import dial
from aiorlinf.manager.lives import End
from aiorlinf.manager.mirror import News
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.wire.frames import FrameType, frame
from aiorlinf.wire.handshake import ClientHandshake
from tests.manager.support import TOKEN, join, manager, until

__all__: list[str] = []

LIMIT_S = 15.0  # far below the time for joining and the heartbeat limit
B = Identity(WorkerAddress("b:0"), Incarnation(1))


@contextlib.asynccontextmanager
async def let_in() -> AsyncIterator[tuple[Worker, Connection, Any]]:
    """``a:0``, a connection of ``b:0`` with it that is half made, and the manager. Nobody listens at the port of ``b:0``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with (
        manager() as service,
        init("a:0", manager=service.address, token=TOKEN) as a,
        join(service, "b:0", port=port),
    ):
        me, _ = await a._table.joined()
        assert me.record is not None
        where = WorkerRecord.from_dict(me.record)
        hello = replace(me.hello(me.identity.address), address=str(B.address), incarnation=B.incarnation)
        connection, _ = await dial(asyncio.get_running_loop(), where.host, where.port, ClientHandshake(TOKEN, hello), 5)
        await until(lambda: B in a._table.half_made)
        try:
            yield a, connection, service
        finally:
            connection.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize("first", ["the wait", "the end"])
async def test_who_is_gone_before_his_first_word_is_gone_for_certain(problems: list[dict[str, Any]], first: str) -> None:
    """Killed while he connects: what waits ends before the manager knows."""
    async with let_in() as (a, connection, _):
        if first == "the end":
            connection.abort()
            await until(lambda: B not in a._table.half_made)
        work = a.recv("b:0")
        connection.abort()
        with pytest.raises(PeerLost, match="b:0#1 is gone and nobody listens at"):
            await asyncio.wait_for(work.async_wait(), LIMIT_S)


@pytest.mark.asyncio
async def test_who_was_declared_lost_before_his_first_word_says_it_in_vain(problems: list[dict[str, Any]]) -> None:
    """He stood still there. What has waited for him has failed, and his life is over: nothing of it may still come."""
    async with let_in() as (a, connection, _):
        a._table.take_news(News(B, End("lost", "nothing was heard of it"), silent=True))
        connection.write_raw(frame(FrameType.TAKEN, 0))
        await until(lambda: connection.transport is None or connection.transport.is_closing())
        assert B not in a._table.half_made
        assert a._table.links() == []


@pytest.mark.asyncio
async def test_while_the_manager_is_away_who_is_about_to_come_is_not_taken_for_gone(problems: list[dict[str, Any]]) -> None:
    async with let_in() as (a, connection, service):
        await service.close()
        await until(lambda: a.manager_away)
        work = a.recv("b:0")
        await asyncio.sleep(0.1)
        assert not work.done(), "its connection is there"
        connection.write_raw(frame(FrameType.TAKEN, 0))
        await until(lambda: B not in a._table.half_made)
        assert not work.done()
        assert [link.identity for link in a._table.links()] == [B]
        work.cancel()
