"""Reaching the manager: every address tried, retried with jitter, until a connection is proven or the time is over."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from aiorlinf.config import NetworkConfig
from aiorlinf.errors import AuthenticationError, ClosedError, LinkError, RendezvousError
from aiorlinf.manager.connection import ManagerConnection
from aiorlinf.rendezvous.hosts import format_endpoint, is_ip, local_failure, parse_endpoint
from aiorlinf.rendezvous.tls import SERVER_NAME, Tls
from aiorlinf.wire.handshake import ClientHandshake, Hello

__all__ = ["Budget", "Dialer", "Receiver"]

_log = logging.getLogger("aiorlinf.manager")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0
_SILENCE_S = 5.0


class Budget(Protocol):
    """What is left of a time limit."""

    def remaining(self) -> float | None:
        """Seconds, or None without a limit."""


class Receiver(Protocol):
    """Who gets what the connection brings, from the first message on."""

    def take(self, message: dict[str, Any]) -> None:
        """A message of the manager."""

    def lost(self, reason: LinkError | ClosedError) -> None:
        """The connection has ended. Called once."""


R = TypeVar("R", bound=Receiver)


class _Transient(Exception):
    """This attempt failed in a way that another one may not."""


class Dialer:
    """Makes one proven connection.

    Args:
        address: ``host:port``.
        token, hello: for the handshake.
        network: limits of one attempt.
        tls: what the manager has to be reached with.
    """

    def __init__(self, address: str, token: bytes, hello: Hello, network: NetworkConfig, tls: Tls | None = None) -> None:
        self._address = address
        self._host, self._port = parse_endpoint(address)
        self._token = token
        self._hello = hello
        self._network = network
        self._tls = tls
        self._remaining: Callable[[], float | None] = lambda: None
        self._reasons: dict[str, str] = {}  # why the last try of each address failed

    async def run(self, deadline: Budget | float | None, attach: Callable[[ManagerConnection, Hello], R]) -> R:
        """Try until it works. ``attach`` makes the receiver, at the moment the handshake is done.

        Raises what `ManagerClient.connect` documents. Cancelling closes what was opened.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._remaining = _countdown(self._network.rendezvous_timeout_s if deadline is None else deadline)
        attempts = 0
        told = False
        pause = _FIRST_PAUSE_S
        while self._time_is_left(0):
            attempts += 1
            receiver = await self._attempt(attach)
            if receiver is not None:
                return receiver
            if not told and loop.time() - begun > _SILENCE_S:
                told = True
                who = "" if self._hello.address is None else f"{self._hello.address}: "  # a command has no address
                _log.warning("%sthe manager is not reached yet, trying on: %s", who, self._tried())
            # jitter: a whole job that was refused must not come back in the same moment
            wait = pause * random.uniform(0.5, 1.5)
            pause = min(pause * 2, _LAST_PAUSE_S)
            if not self._time_is_left(wait):
                break
            await asyncio.sleep(wait)
        raise RendezvousError(
            f"the manager was not reached in {attempts} attempts: {self._tried()}",
            local=self._hello.address,
            address=self._address,
            elapsed=loop.time() - begun,
            hint=f"check that the manager runs, and that its address, as given or from AIORLINF_MANAGER, is right{self._tls_hint()}",
        )

    def _tls_hint(self) -> str:
        if not any(reason.startswith("the connection") for reason in self._reasons.values()):
            return ""
        if self._tls is None:
            return "; if it uses TLS, this worker needs certificates, too"
        return "; and that its authority has signed this worker's certificate"

    def _tried(self) -> str:
        return "; ".join(f"{endpoint}: {reason}" for endpoint, reason in self._reasons.items()) or "no time was left to try"

    def _time_is_left(self, needed: float) -> bool:
        left = self._remaining()
        return left is None or left > needed

    async def _attempt(self, attach: Callable[[ManagerConnection, Hello], R]) -> R | None:
        """One try of every answer of the name look-up; None when another attempt may succeed."""
        try:
            targets = await self._resolve()
        except (OSError, UnicodeError) as error:  # gaierror and TimeoutError are OSErrors; the name may become known later
            self._reasons[self._host] = f"name look-up failed: {getattr(error, 'strerror', None) or 'no answer in time'}"
            return None
        for host in targets:
            endpoint = format_endpoint(host, self._port)
            try:
                return await self._open(host, attach)
            except TimeoutError:
                # An attempt that our own deadline cut short says less than the one before it.
                if self._time_is_left(0) or endpoint not in self._reasons:
                    self._reasons[endpoint] = "no answer to the connection request in time (is it dropped by a firewall?)"
            except ssl.SSLError as error:
                raise AuthenticationError(
                    f"TLS with the manager failed: {error.reason or error}", address=endpoint, hint=_TLS_HINT
                ) from error
            except OSError as error:
                self._reasons[endpoint] = _socket_failure(error)
            except _Transient as error:
                if self._time_is_left(0) or endpoint not in self._reasons:  # as above
                    self._reasons[endpoint] = str(error)
        return None

    async def _resolve(self) -> list[str]:
        if is_ip(self._host):
            return [self._host]
        async with asyncio.timeout(self._bounded(self._network.connect_timeout_s)):
            answers = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(where[0]) for *_, where in answers))

    async def _open(self, host: str, attach: Callable[[ManagerConnection, Hello], R]) -> R:
        loop = asyncio.get_running_loop()
        proven: asyncio.Future[R] = loop.create_future()
        receiver: R | None = None

        def ready(peer: Hello) -> None:
            nonlocal receiver
            receiver = attach(connection, peer)
            if not proven.done():
                proven.set_result(receiver)

        def take(message: dict[str, Any]) -> None:
            assert receiver is not None
            receiver.take(message)

        def closed(reason: LinkError | ClosedError) -> None:
            if receiver is not None:
                receiver.lost(reason)
            elif not proven.done():
                text = reason.message
                if connection.early and text.startswith("no "):
                    text = f"what listens there is no manager, or one that stands still: {text}"
                proven.set_exception(_Transient(text) if connection.retryable else reason)

        connection = ManagerConnection(
            ClientHandshake(self._token, self._hello),
            self._bounded(self._network.handshake_timeout_s),
            on_ready=ready,
            on_message=take,
            on_closed=closed,
        )
        try:
            async with asyncio.timeout(self._bounded(self._network.connect_timeout_s)):
                context = None if self._tls is None else self._tls.client
                name = None if context is None else SERVER_NAME
                await loop.create_connection(lambda: connection, host, self._port, ssl=context, server_hostname=name)
            return await proven  # within the connection's own time limit
        except BaseException:  # whatever ended this attempt, its socket must not stay open
            connection.abort(ClosedError("the attempt was given up"))
            if not proven.cancel() and not proven.cancelled():
                proven.exception()  # seen; asyncio must not report it
            raise

    def _bounded(self, limit: float) -> float:
        left = self._remaining()
        return limit if left is None else max(0.001, min(left, limit))


_TLS_HINT = (
    "manager and workers need certificates of one authority: cluster.network.tls, or AIORLINF_TLS_CERT, AIORLINF_TLS_KEY, AIORLINF_TLS_CA"
)


def _socket_failure(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nobody listens there"
    # asyncio puts the address into strerror, which the caller names already
    return local_failure(error) or (os.strerror(error.errno) if error.errno else str(error))


def _countdown(deadline: Budget | float) -> Callable[[], float | None]:
    if not isinstance(deadline, (int, float)):
        return deadline.remaining
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    return lambda: end - loop.time()
