"""One connection between a worker and the manager, either end of it: first the handshake, then messages."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast

from aiorlinf.errors import ClosedError, LinkError, UsageError, WireError
from aiorlinf.manager.protocol import MessageReader, encode
from aiorlinf.rendezvous.hosts import format_endpoint
from aiorlinf.wire.handshake import ClientHandshake, Done, Fail, HandshakeState, Hello, ServerHandshake, Write

__all__ = ["ManagerConnection"]

_MAX_UNSENT_BYTES = 16 * 1024 * 1024

# a dead host or a forgotten NAT entry is noticed within about 45 s, below the minute after which middleboxes drop idle flows
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 8, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 45_000}


class ManagerConnection(asyncio.Protocol):
    """Bytes in, messages out.

    Args:
        handshake: the pure machine of our end.
        time_limit_s: seconds for the whole handshake, counted from the connection; not prolonged by anything the peer sends.
        on_ready: called with the peer's hello once the handshake is done.
        on_message: called with each message after that.
        on_closed: called exactly once, with the reason; `ClosedError` when this end closed it.
    """

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        time_limit_s: float,
        *,
        on_ready: Callable[[Hello], None],
        on_message: Callable[[dict[str, Any]], None],
        on_closed: Callable[[LinkError | ClosedError], None],
    ) -> None:
        self.peer: Hello | None = None  # set once the handshake is done
        self.local_host: str = ""  # our address of this connection, once connected
        self.peer_host: str = ""  # the peer's address of this connection, once connected
        self.remote: str = ""  # the same with its port, for messages
        self.ended: bool = False  # the other side closed it, in an orderly way
        self.gone: bool = False  # the other side went away before the handshake was done, and had said nothing wrong
        self.retryable: bool = True  # if it is closed before the handshake is done: whether another try may succeed
        self._handshake = handshake
        self._time_limit_s = time_limit_s
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = MessageReader()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason: LinkError | ClosedError | None = None  # why it was or will be closed; the first reason stays
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------------------------------------------------ for owners

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._reason is not None or self._transport is None or self._transport.is_closing()

    @property
    def early(self) -> bool:
        """Whether the other side has not even said whole what anybody could say."""
        return self._handshake.state is HandshakeState.PREAMBLE

    @property
    def closed_here(self) -> bool:
        """Whether it is closing because this end closed it."""
        return isinstance(self._reason, ClosedError)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; dropped silently when the connection is closing, whose reason is told to `on_closed`."""
        data = encode(message)
        if self.closing or self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.abort(LinkError(f"{self.remote} does not read what it is sent", address=self.remote))

    def close(self, reason: LinkError | ClosedError | None = None) -> None:
        """Close once everything queued is sent."""
        self._end(reason)
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: LinkError | ClosedError | None = None) -> None:
        """Close now."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Return once the socket is closed. Cancelling leaves the connection as it is."""
        await asyncio.shield(self._lost)

    def _end(self, reason: LinkError | ClosedError | None) -> None:
        if self._reason is None:
            self._reason = ClosedError("the connection to the manager was closed") if reason is None else reason
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --------------------------------------------------------------------------------------------------- asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.local_host = _host(transport.get_extra_info("sockname"))
        peer = transport.get_extra_info("peername")
        self.peer_host = _host(peer)
        self.remote = format_endpoint(self.peer_host, peer[1]) if isinstance(peer, tuple) else "a closed connection"
        self._handshake.remote = self.remote
        if self._reason is not None:  # dropped before it was even made
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._time_limit_s, self._too_slow)
        self._obey(self._handshake.start())

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self._obey(self._handshake.feed(data))
        else:
            self._take(data)

    def eof_received(self) -> bool:
        if self.peer is None:
            self.gone = self._reason is None
            self._obey(self._handshake.eof())
        return False  # asyncio closes the transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._reason is None:
            self.gone = self.peer is None and not isinstance(error, ssl.SSLError)
            self.ended = error is None
            if isinstance(error, ssl.SSLError):  # our certificate was not taken, which TLS 1.3 says after its handshake
                self.retryable = False
            text = "the connection was closed by the other side" if error is None else f"the connection broke: {error}"
            self._end(LinkError(text, address=self.remote))
        self._stop_timer()
        if not self._lost.done():
            self._lost.set_result(None)
        assert self._reason is not None
        self._on_closed(self._reason)

    # ------------------------------------------------------------------------------------------------------- internals

    def _obey(self, instructions: list[Write | Done | Fail]) -> None:
        assert self._transport is not None
        for instruction in instructions:
            if self._reason is not None:
                return
            if isinstance(instruction, Write):
                self._transport.write(instruction.data)
            elif isinstance(instruction, Fail):
                self.retryable = instruction.retryable
                self.close(instruction.error)
            else:
                self._stop_timer()
                self.peer = instruction.peer
                _keep_alive(self._transport.get_extra_info("socket"))
                self._on_ready(instruction.peer)
                self._take(self._handshake.leftover)

    def _take(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                if self.closing:
                    return
                self._on_message(message)
        except (WireError, UsageError) as error:
            reason = error if isinstance(error, LinkError) else WireError(error.message)
            reason.fill(address=self.remote)
            self.abort(reason)

    def _too_slow(self) -> None:
        self._timer = None
        state = self._handshake.state
        if state not in (HandshakeState.DONE, HandshakeState.FAILED):
            text = f"no {state.value.removeprefix('the ')} of the other side within {self._time_limit_s:.3g} s"
            self.abort(LinkError(text, address=self.remote))


def _host(endpoint: object) -> str:
    """The address of a socket name; without the prefix of an IPv4 address on an IPv6 socket. Empty when it closed meanwhile."""
    host = str(endpoint[0]) if isinstance(endpoint, tuple) else ""
    return host.removeprefix("::ffff:") if "." in host else host


def _keep_alive(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:
        return  # it closed already; connection_lost follows
