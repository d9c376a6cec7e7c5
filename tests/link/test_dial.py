"""Handshakes over real sockets, on both sides at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiorlinf.backends.shm.descriptors import abstract_listener, abstract_name
from aiorlinf.errors import AuthenticationError, LinkError, RendezvousError, WireError
from aiorlinf.link.connection import Connection, FrameHandler
from aiorlinf.link.dial import Refused, ServerSide, dial, dial_unix
from aiorlinf.link.sink import DiscardSink, Sink
from aiorlinf.wire.frames import FrameType, frame
from aiorlinf.wire.handshake import ClientHandshake, HandshakeState, Hello, Refusal, ServerHandshake, Write

__all__: list[str] = []

TOKEN = b"the token of the tests"


class Listener(FrameHandler):
    """Keeps the frames that come."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int]] = []
        self.lost: list[BaseException | None] = []

    def on_data(self, key: int, flags: int, body: memoryview) -> None:
        self.frames.append((key, len(body)))

    def on_frame(self, kind: int, flags: int, key: int, body: memoryview) -> None:
        self.frames.append((key, len(body)))

    def on_chunk(self, message_id: int) -> Sink | DiscardSink:
        return DiscardSink()

    def on_writable(self) -> None: ...
    def before_flush(self) -> None: ...

    def on_lost(self, error: BaseException | None) -> None:
        self.lost.append(error)


def hello(address: str, target: str | None = None) -> Hello:
    return Hello(role="link", job="job", address=address, incarnation=1, target=target)


class Server:
    """Accepts as a worker does, at `host` and `port` or under the Unix name `unix`."""

    def __init__(self, answer: Callable[[Hello], Hello | Refusal], timeout: float, on_proved: Callable[[Connection], None]) -> None:
        self.answer = answer
        self.timeout = timeout
        self.on_proved = on_proved
        self.sides: list[ServerSide] = []
        self.proved: list[tuple[ServerSide, Hello]] = []
        self.failed: list[tuple[LinkError, str | None]] = []
        self.listeners: list[Listener] = []
        self.host = "127.0.0.1"
        self.port = 0
        self.unix = abstract_name("test")

    def accept(self) -> Connection:
        def make(remote: str | None) -> ServerHandshake:
            return ServerHandshake(TOKEN, hello("b:0"), self.answer, remote=remote)

        side = ServerSide(
            asyncio.get_running_loop(), make, self.timeout, self._proved, lambda _side, error, code: self.failed.append((error, code))
        )
        self.sides.append(side)
        return side.connection

    def _proved(self, side: ServerSide, peer: Hello) -> None:
        self.proved.append((side, peer))
        listener = Listener()
        self.listeners.append(listener)
        assert side.handshake is not None
        side.connection.adopt(listener, side.handshake.leftover, 1 << 24)
        self.on_proved(side.connection)

    def close(self) -> None:
        for side in self.sides:
            side.abort()
            side.connection.abort()


@contextlib.asynccontextmanager
async def serve(
    answer: Callable[[Hello], Hello | Refusal] = lambda _peer: hello("b:0"),
    timeout: float = 5.0,
    on_proved: Callable[[Connection], None] = lambda _connection: None,
) -> AsyncIterator[Server]:
    """A server on loopback, closed at the end."""
    server = Server(answer, timeout, on_proved)
    loop = asyncio.get_running_loop()
    tcp = await loop.create_server(server.accept, server.host, 0)
    server.port = tcp.sockets[0].getsockname()[1]
    unix = await loop.create_unix_server(server.accept, sock=abstract_listener(server.unix, socket.SOCK_STREAM))
    try:
        yield server
    finally:
        server.close()
        tcp.close()
        unix.close()
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def client(token: bytes = TOKEN) -> ClientHandshake:
    return ClientHandshake(token, hello("a:0", "b:0"))


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_the_two_prove_each_other_and_go_on_with_frames(problems: list[dict[str, Any]], way: str) -> None:
    loop = asyncio.get_running_loop()
    async with serve() as server:
        machine = client()
        if way == "tcp":
            connection, peer = await dial(loop, server.host, server.port, machine, 5)
        else:
            connection, peer = await dial_unix(loop, server.unix, machine, 5)
        assert (peer.address, peer.incarnation) == ("b:0", 1)
        listener = Listener()
        connection.adopt(listener, machine.leftover, 1 << 24)
        connection.send(frame(FrameType.DATA, 7, b"hello"))
        await until(lambda: bool(server.listeners and server.listeners[0].frames))
        assert server.listeners[0].frames == [(7, 5)]
        ((side, seen),) = server.proved
        assert seen.address == "a:0"
        side.connection.send(frame(FrameType.GO, 9))
        await until(lambda: bool(listener.frames))
        connection.abort()
        await until(lambda: bool(server.listeners[0].lost))
    assert server.failed == []


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_the_server_may_send_much_before_the_client_looks(problems: list[dict[str, Any]], way: str) -> None:
    loop = asyncio.get_running_loop()

    def flood(connection: Connection) -> None:
        for key in range(60):
            connection.send(frame(FrameType.DATA, key, bytes(50_000)))

    async with serve(on_proved=flood) as server:
        machine = client()
        if way == "tcp":
            connection, _ = await dial(loop, server.host, server.port, machine, 5)
        else:
            connection, _ = await dial_unix(loop, server.unix, machine, 5)
        listener = Listener()
        connection.adopt(listener, machine.leftover, 1 << 24)
        await until(lambda: len(listener.frames) == 60)
        assert listener.frames == [(key, 50_000) for key in range(60)]
        connection.abort()


@pytest.mark.asyncio
async def test_whatever_came_with_the_handshake_is_handed_on(problems: list[dict[str, Any]]) -> None:
    """However much: on uvloop many reads may come before the coroutine that waits for the handshake goes on."""
    connection = Connection(asyncio.get_running_loop(), lambda _data: None, lambda _error: None)
    listener = Listener()
    stream = b"".join(frame(FrameType.DATA, key, bytes(50_000)) for key in range(40))
    connection.adopt(listener, stream, 1 << 24)
    assert listener.frames == [(key, 50_000) for key in range(40)]


@pytest.mark.asyncio
async def test_a_refusal_reaches_the_client_with_its_code(problems: list[dict[str, Any]]) -> None:
    async with serve(lambda _peer: Refusal("yield", "wait for us")) as server:
        with pytest.raises(Refused, match="wait for us") as caught:
            await dial(asyncio.get_running_loop(), server.host, server.port, client(), 5)
        assert caught.value.code == "yield"
        await until(lambda: bool(server.failed))
        assert [code for _, code in server.failed] == ["yield"]


@pytest.mark.asyncio
async def test_a_wrong_token_fails_on_both_sides(problems: list[dict[str, Any]]) -> None:
    async with serve() as server:
        with pytest.raises(AuthenticationError):
            await dial(asyncio.get_running_loop(), server.host, server.port, client(b"another"), 5)
        await until(lambda: bool(server.failed))
        assert [type(error) for error, _ in server.failed] == [AuthenticationError]


@pytest.mark.asyncio
async def test_nobody_there(problems: list[dict[str, Any]]) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but it does not listen
        with pytest.raises(OSError, match=r"[Rr]efused|111"):
            await dial(loop, "127.0.0.1", free.getsockname()[1], client(), 5)
    with pytest.raises(OSError, match="refused"):
        await dial_unix(loop, abstract_name("nobody"), client(), 5)


@pytest.mark.asyncio
async def test_a_listener_that_says_nothing_costs_the_time_limit(problems: list[dict[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TimeoutError):
            await dial(asyncio.get_running_loop(), "127.0.0.1", silent.getsockname()[1], client(), 0.1)
        await read_to_the_end(silent)


async def read_to_the_end(silent: socket.socket) -> None:
    """Whoever has connected there has closed the connection."""
    await asyncio.sleep(0.02)  # the loop closes it
    peer, _ = silent.accept()
    with peer, contextlib.suppress(ConnectionResetError):
        peer.settimeout(5)
        while peer.recv(1000):
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize("after", [0, 20])
async def test_a_peer_that_hangs_up_in_the_middle_may_be_tried_again(problems: list[dict[str, Any]], after: int) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if after:
            await reader.readexactly(after)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    with pytest.raises(OSError, match=r"closed while waiting for the preamble|[Rr]eset"):
        await dial(asyncio.get_running_loop(), "127.0.0.1", server.sockets[0].getsockname()[1], client(), 5)
    server.close()
    await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_connection_to_oneself_may_be_tried_again(problems: list[dict[str, Any]]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1000))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    with pytest.raises(OSError, match="back to this side"):
        await dial(asyncio.get_running_loop(), "127.0.0.1", server.sockets[0].getsockname()[1], client(), 5)
    server.close()
    await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_cancelling_closes_what_was_opened(problems: list[dict[str, Any]]) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        task = loop.create_task(dial(loop, "127.0.0.1", silent.getsockname()[1], client(), 5))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await read_to_the_end(silent)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"AIORLINF" + b"\xff" * 100, b"x" * 100_000]
)
async def test_a_stranger_is_shown_the_door(problems: list[dict[str, Any]], words: bytes) -> None:
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(words)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await until(lambda: bool(server.failed))
        ((error, code),) = server.failed
        assert isinstance(error, WireError)
        assert code is None
        assert server.proved == []


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_stranger_who_only_knocks(problems: list[dict[str, Any]], how: str) -> None:
    async with serve() as server:
        for _ in range(5):
            knock = socket.create_connection((server.host, server.port))
            if how == "reset":
                knock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            knock.close()
        await until(lambda: len(server.failed) == 5)
        assert all(side.gone for side in server.sides)


@pytest.mark.asyncio
async def test_a_stranger_who_says_nothing_has_only_so_long(problems: list[dict[str, Any]]) -> None:
    async with serve(timeout=0.05) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        ((error, _),) = server.failed
        assert isinstance(error, RendezvousError)
        assert "did not prove itself within 0.05 s" in str(error)


@pytest.mark.asyncio
async def test_a_given_up_connection_is_told_to_nobody(problems: list[dict[str, Any]]) -> None:
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        await until(lambda: bool(server.sides))
        server.sides[0].abort()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert server.failed == []


@pytest.mark.asyncio
async def test_a_hundred_at_once(problems: list[dict[str, Any]]) -> None:
    loop = asyncio.get_running_loop()
    async with serve() as server:
        machines = [client() for _ in range(100)]
        made = await asyncio.gather(*[dial(loop, server.host, server.port, machine, 10) for machine in machines])
        assert len(server.proved) == 100
        for connection, _ in made:
            connection.abort()
        await until(lambda: all(listener.lost for listener in server.listeners))


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_who_has_given_up_waiting_for_our_loop_is_not_let_in(way: str) -> None:
    """All that it takes is there, and the end behind it: a link of this connection would break at once, and take messages with it."""
    async with serve() as server:
        machine = client()
        with socket.socket(socket.AF_INET if way == "tcp" else socket.AF_UNIX) as sock:
            sock.connect((server.host, server.port) if way == "tcp" else f"\0{server.unix}")
            sock.setblocking(False)
            instructions = machine.start()
            while True:
                for each in instructions:
                    assert isinstance(each, Write)
                    sock.sendall(each.data)
                if machine.state is HandshakeState.HELLO:
                    break  # that was our last word; this loop, which is the server's, too, has no turn before we are gone
                instructions = machine.feed(await asyncio.get_running_loop().sock_recv(sock, 1 << 16))
        await until(lambda: bool(server.failed or server.proved))
        assert not server.proved
        assert "it gave up before it was let in" in str(server.failed[0][0])
        assert server.sides[0].gone
