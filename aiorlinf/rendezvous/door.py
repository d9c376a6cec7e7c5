"""A listening socket that lets in, a few at a time, those who say something.

A loop's own servers accept as many connections in one go as there are, and make a transport for each: a crowd of strangers then holds up
everything else that the loop has to do, and pushes out those who are in the middle of proving themselves. Here each turn of the loop
accepts a few, and the kernel keeps the others waiting; and a connection that has not said a word, or whose first word is wrong, costs a
socket and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from aiorlinf.wire.handshake import BEGINNING_BYTES, wrong_beginning

__all__ = ["Door"]

log: logging.Logger = logging.getLogger("aiorlinf")

_AT_ONCE = 32
_PAUSE_S = 0.05
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """Accepts on the socket from now on, until `close`, which closes it.

    Args:
        make_protocol: called for each connection that has said something.
        time_limit_s: seconds within which it has to.
        limit: how many there may be that have not; the oldest makes way for the next one.
        turned_away: called for each one that was closed here, with the reason.
        tls: encrypt, and take only those with a certificate.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        time_limit_s: float,
        limit: Callable[[], int],
        turned_away: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._make_protocol = make_protocol
        self._time_limit_s = time_limit_s
        self._limit = limit
        self._turned_away = turned_away
        self._tls = tls
        self._quiet: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, with the time when they came; oldest first
        self._entering: dict[socket.socket, None] = {}  # those that have no protocol yet; oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._complained = False
        listener.setblocking(False)
        self._open()

    @property
    def quiet(self) -> int:
        """How many are there that have not got through: they have not said a word, or are about to agree on a cipher."""
        return len(self._quiet) + len(self._entering)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                self._wait(error)
                return
            self._complained = False
            sock.setblocking(False)
            self._make_room()
            self._quiet[sock.fileno()] = (sock, self._loop.time())
            self._loop.add_reader(sock.fileno(), self._spoke, sock.fileno())
            if self._sweep is None:
                self._sweep = self._loop.call_later(self._time_limit_s, self._look)

    def _make_room(self) -> None:
        limit = max(1, self._limit())
        while self._quiet and self.quiet >= limit:
            self._turn_away(next(iter(self._quiet)), "too many connections have not proved themselves")
        if self.quiet >= limit:  # all of them are entering: the oldest finds its connection at its end
            for sock in self._entering:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                    break

    def _wait(self, why: OSError) -> None:
        """There is no room, or a connection that was just cut reports it here (accept(2)), or a rule of the system forbids it."""
        if self._quiet and why.errno in _NONE_LEFT:
            self._turn_away(next(iter(self._quiet)), str(why))
            return
        if not self._complained:
            self._complained = True  # once, until it works again
            log.warning("connections have to wait: %s", why)
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(_PAUSE_S, self._open)

    def _look(self) -> None:
        """Close those whose time is over."""
        self._sweep = None
        now = self._loop.time()
        for number, (_, since) in list(self._quiet.items()):
            if since + self._time_limit_s > now:
                self._sweep = self._loop.call_at(since + self._time_limit_s, self._look)
                return
            self._turn_away(number, f"it said nothing within {self._time_limit_s:g} s")

    def _turn_away(self, number: int, why: str) -> None:
        sock, _ = self._quiet.pop(number)
        self._loop.remove_reader(number)
        sock.close()
        self._turned_away(why)

    def _spoke(self, number: int) -> None:
        sock, _ = self._quiet[number]
        try:
            start = sock.recv(BEGINNING_BYTES, socket.MSG_PEEK)
            wrong = wrong_beginning(start) if self._tls is None else _no_tls(start)
        except OSError:  # it is gone already, which its protocol may see
            wrong = None
        if wrong is not None:
            self._turn_away(number, wrong)
            return
        del self._quiet[number]
        self._loop.remove_reader(number)
        task = self._loop.create_task(self._let_in(sock), name="let a connection in")
        self._entering[sock] = None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_in(self, sock: socket.socket) -> None:
        # Not to be cancelled: between the socket and its transport it is unclear whose descriptor it is.
        limit = None if self._tls is None else self._time_limit_s
        hall = _Hall(self._make_protocol, lambda: self._entering.pop(sock, None))
        try:
            await self._loop.connect_accepted_socket(lambda: hall, sock, ssl=self._tls, ssl_handshake_timeout=limit)
        except (OSError, TimeoutError) as error:  # it is gone already, or it was not let in
            sock.close()
            self._turned_away(f"TLS: {error}" if self._tls is not None else str(error))
        finally:
            self._entering.pop(sock, None)

    def close(self) -> None:
        """Accept no more, and close those that have not said a word. Connections that were let in are not touched."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())
        if self._sweep is not None:
            self._sweep.cancel()
        self._listener.close()
        for number in list(self._quiet):
            sock, _ = self._quiet.pop(number)
            self._loop.remove_reader(number)
            sock.close()
        for sock in self._entering:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    async def wait_closed(self) -> None:
        """After `close`: until those that were being let in at that moment are in, to be cut by their owner."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))


class _Hall(asyncio.Protocol):
    """Makes the real protocol once there is a transport for it, which with TLS is when the other side has shown its certificate."""

    def __init__(self, make_protocol: Callable[[], asyncio.BaseProtocol], entered: Callable[[], object]) -> None:
        self._make_protocol = make_protocol
        self._entered = entered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._entered()
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def _no_tls(start: bytes) -> str | None:
    """Why this is no beginning of TLS."""
    if start[:2] == b"\x16\x03"[: len(start)]:
        return None
    if wrong_beginning(start) is None:
        return "it does not use TLS, which this side is configured to"
    return f"it does not speak TLS, it begins with {start!r}"
