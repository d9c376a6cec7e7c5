"""One connection, either end of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from aiorlinf.errors import ClosedError, LinkError
from aiorlinf.manager.connection import ManagerConnection
from aiorlinf.rendezvous.hosts import bind_listener
from aiorlinf.wire.handshake import ClientHandshake, Hello
from tests.manager.support import TOKEN, join, manager, until


def client_connection(closed: list[Any]) -> ManagerConnection:
    def never(_: object) -> None:
        raise AssertionError("nobody is there to prove anything")

    handshake = ClientHandshake(TOKEN, Hello(role="manager", job=None))
    return ManagerConnection(handshake, 30.0, on_ready=never, on_message=never, on_closed=closed.append)


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_idle_connections_are_kept_alive_and_small_messages_are_not_delayed(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def look() -> None:
        async with manager() as service, join(service, "a:0") as member:
            (session,) = service._sessions.values()
            for connection in (member.client._connection, session.connection):
                assert connection._transport is not None
                sock = connection._transport.get_extra_info("socket")
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(look())


@pytest.mark.asyncio
async def test_a_socket_connected_to_itself_is_no_peer() -> None:
    with bind_listener("127.0.0.1") as probe:
        where = probe.getsockname()
    sock = socket.socket()
    sock.bind(where)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, where)
    closed: list[Any] = []
    connection = client_connection(closed)
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
    await connection.wait_closed()
    assert [type(reason) for reason in closed] == [LinkError]
    assert "leads back to this side" in str(closed[0])
    assert connection.retryable


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["abort", "close"])
async def test_dropped_before_it_was_made(how: str) -> None:
    closed: list[Any] = []
    connection = client_connection(closed)
    getattr(connection, how)()
    assert connection.closing
    connection.send({"op": "pong"})
    with bind_listener("127.0.0.1") as listener:
        await asyncio.get_running_loop().create_connection(lambda: connection, *listener.getsockname())
        await connection.wait_closed()
    assert [type(reason) for reason in closed] == [ClosedError]


@pytest.mark.asyncio
async def test_the_first_reason_stays_and_is_told_once() -> None:
    closed: list[Any] = []
    connection = client_connection(closed)
    with bind_listener("127.0.0.1") as listener:
        await asyncio.get_running_loop().create_connection(lambda: connection, *listener.getsockname())
        connection.close(LinkError("first"))
        connection.abort(LinkError("second"))
        connection.abort()
        await connection.wait_closed()
        await until(lambda: bool(closed))
    assert [str(reason) for reason in closed] == ["first"]
    assert not connection.closed_here
