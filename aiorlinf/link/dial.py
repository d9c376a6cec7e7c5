"""Handshakes around connections, on both sides. Thin I/O: the machine that decides is `wire.handshake`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from aiorlinf.errors import LinkError, RendezvousError
from aiorlinf.link.connection import Connection
from aiorlinf.rendezvous.tls import SERVER_NAME, Tls
from aiorlinf.wire.handshake import ClientHandshake, Done, Fail, HandshakeState, Hello, Instruction, Refusal, ServerHandshake, Write

__all__ = ["Refused", "ServerSide", "dial", "dial_unix", "tune"]

_KEEPALIVE_IDLE_SECONDS = 20
_KEEPALIVE_INTERVAL_SECONDS = 5
_KEEPALIVE_COUNT = 4


class Refused(LinkError):
    """The other side proved itself and gave a reason. `code` is for programs."""

    def __init__(self, error: LinkError, refusal: Refusal) -> None:
        super().__init__(error.message, remote=error.remote, address=error.address)
        self.code: str = refusal.code


def tune(connection: Connection) -> None:
    """No delay for small frames; keep-alive well under a minute, so that middleboxes do not forget an idle link."""
    sock: socket.socket | None = connection.extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def dial_unix(loop: asyncio.AbstractEventLoop, name: str, handshake: ClientHandshake, timeout: float) -> tuple[Connection, Hello]:
    """As `dial`, to a socket in the abstract namespace of this host."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{name}")  # to a local listener with room this does not block; without room it raises
    except BaseException:
        sock.close()
        raise
    return await _prove(loop, lambda factory: loop.create_unix_connection(factory, sock=sock), handshake, timeout)


async def dial(
    loop: asyncio.AbstractEventLoop, host: str, port: int, handshake: ClientHandshake, timeout: float, tls: Tls | None = None
) -> tuple[Connection, Hello]:
    """Connect and prove each other. The connection is not adopted yet; `handshake.leftover` is to be handed to `adopt`.

    Raises:
        OSError: nobody answers there, or the peer hung up in the middle.
        TimeoutError: not within `timeout` seconds.
        Refused: the peer has a reason not to.
        LinkError: the handshake failed.

    Cancelling closes what was opened.
    """
    if tls is None:
        return await _prove(loop, lambda factory: loop.create_connection(factory, host, port), handshake, timeout)
    context = tls.client
    return await _prove(
        loop, lambda factory: loop.create_connection(factory, host, port, ssl=context, server_hostname=SERVER_NAME), handshake, timeout
    )


async def _prove(
    loop: asyncio.AbstractEventLoop,
    connect: Callable[[Callable[[], Connection]], Coroutine[Any, Any, Any]],
    handshake: ClientHandshake,
    timeout: float,
) -> tuple[Connection, Hello]:
    done: asyncio.Future[Hello] = loop.create_future()

    def raw(data: bytes) -> None:
        run(handshake.feed(data))

    def lost(error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(ConnectionResetError(str(error)))
        else:
            run(handshake.eof())

    def run(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Write):
                connection.write_raw(instruction.data)
            elif done.done():
                continue
            elif isinstance(instruction, Done):
                done.set_result(instruction.peer)
            elif instruction.refusal is not None:
                done.set_exception(Refused(instruction.error, instruction.refusal))
            elif instruction.retryable:
                done.set_exception(ConnectionResetError(instruction.error.message))
            else:
                done.set_exception(instruction.error)

    connection = Connection(loop, raw, lost)
    try:
        async with asyncio.timeout(timeout):
            await connect(lambda: connection)
            tune(connection)
            run(handshake.start())
            hello = await done
        return connection, hello
    except BaseException:
        # Nobody looks at it any more, whatever the end of the connection would still put into it.
        if not done.cancel() and not done.cancelled():
            done.exception()
        connection.abort()
        raise


class ServerSide:
    """One accepted connection until it is proved.

    Args:
        handshake: the machine.
        timeout: seconds for the peer to prove itself.
        proved: called with the connection and the peer's hello, once.
        failed: called with the reason otherwise, and with the code of our own refusal if it was one; once.

    Attributes:
        gone: the other side went away before it had proved itself.
        on_word: told of the first byte behind the handshake, once, if somebody waits for it before he adopts the connection.
        on_silent_end: told instead if the connection ends without one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_handshake: Callable[[str | None], ServerHandshake],
        timeout: float,
        proved: Callable[[ServerSide, Hello], None],
        failed: Callable[[ServerSide, LinkError, str | None], None],
    ) -> None:
        self.connection: Connection = Connection(loop, self._raw, self._lost)
        self.handshake: ServerHandshake | None = None
        self._make = make_handshake
        self._proved = proved
        self._failed = failed
        self._over = False
        self.gone: bool = False
        self.on_word: Callable[[], None] | None = None
        self.on_silent_end: Callable[[], None] | None = None
        self._timer = loop.call_later(timeout, self._too_late, timeout)

    def _machine(self) -> ServerHandshake:
        if self.handshake is None:
            peer = self.connection.extra_info("peername")
            self.handshake = self._make(f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else None)
            tune(self.connection)
        return self.handshake

    @property
    def early(self) -> bool:
        """It has not even said whole what anybody could say."""
        return self.handshake is None or self.handshake.state is HandshakeState.PREAMBLE

    def _raw(self, data: bytes) -> None:
        if not self._over:  # otherwise it must not be told that it was taken
            self._run(self._machine().feed(data))
        elif self.on_word is not None and self.handshake is not None:
            self.handshake.leftover += data
            heard, self.on_word = self.on_word, None
            heard()

    def _run(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Write):
                self.connection.write_raw(instruction.data)
            elif isinstance(instruction, Done):
                if not self._over and _hung_up(self.connection):
                    # It has waited for our loop in vain, and comes again. A link of this connection would break at once.
                    self.gone = True
                    self._end(LinkError("it gave up before it was let in"))
                elif not self._over:
                    self._over = True
                    self._timer.cancel()
                    self._proved(self, instruction.peer)
            elif isinstance(instruction, Fail):
                self._end(instruction.error, None if instruction.refusal is None else instruction.refusal.code)

    def _lost(self, error: BaseException | None) -> None:
        self.gone = True
        if self._over:
            if self.on_silent_end is not None:
                self.on_silent_end()
        elif error is None:
            self._run(self._machine().eof())
        else:
            self._end(LinkError(f"the connection broke in the handshake: {error}"))

    def _too_late(self, timeout: float) -> None:
        self._end(RendezvousError(f"a connection did not prove itself within {timeout:g} s"))

    def _end(self, error: LinkError, code: str | None = None) -> None:
        if self._over:
            return
        self._over = True
        self._timer.cancel()
        transport = self.connection.transport
        if transport is not None:
            transport.close()  # what was written (a refusal) still leaves
        self._failed(self, error, code)

    def abort(self) -> None:
        """Give up."""
        if not self._over:
            self._over = True
            self._timer.cancel()
            self.connection.abort()


def _hung_up(connection: Connection) -> bool:
    """Whether the other side has closed it, and nothing is to be read before that."""
    sock: socket.socket | None = connection.extra_info("socket")
    if sock is None:
        return False
    try:
        with socket.fromfd(sock.fileno(), sock.family, sock.type) as own:
            return not own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except ConnectionError:
        return True
    except OSError:  # there is nothing to be read, as it should be; or no descriptor is left, and it shows later
        return False
