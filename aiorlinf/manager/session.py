"""One proven connection of a worker to the manager: requests and their answers, news in between."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

from aiorlinf.errors import ClosedError, ForkedHandle, LinkError, RendezvousError, WireError
from aiorlinf.manager.connection import ManagerConnection
from aiorlinf.manager.protocol import Registration, error_from_dict
from aiorlinf.wire.handshake import Hello

__all__ = ["EventCallback", "LostCallback", "ManagerSession"]

EventCallback = Callable[[dict[str, Any]], None]
LostCallback = Callable[[LinkError], None]


class ManagerSession:
    """What `ManagerClient` is built on. Belongs to the loop it was made on.

    Attributes:
        address: the manager's ``host:port``, as given.
        job: the job's id.
        peer: what the manager said about itself.
        registration: what `register` returned, or None.
        unanswered: heartbeats since the manager was last heard of.
    """

    def __init__(
        self,
        address: str,
        connection: ManagerConnection,
        hello: Hello,
        *,
        on_event: EventCallback | None,
        on_lost: LostCallback | None,
    ) -> None:
        self.address = address
        self.job: str = hello.job or ""
        self.peer = hello
        self.registration: Registration | None = None
        self._connection = connection
        self._on_event = on_event
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reason: LinkError | ClosedError | None = None  # why the connection ended, once it did
        self.unanswered: int = 0

    def __repr__(self) -> str:
        who = "no worker" if self.registration is None else str(self.registration.identity)
        state = "open" if self._reason is None and not self._connection.closing else "closed"
        return f"<ManagerClient of {who} at {self.address} job {self.job} {state}, {len(self._pending)} requests pending>"

    async def close(self, timeout: float = 5.0) -> None:
        """Leave the directory and close the connection, within ``timeout`` seconds. May be called again; does nothing after a fork.

        Cancelling cuts the connection at once.
        """
        if os.getpid() != self._pid:
            return
        try:
            async with asyncio.timeout(timeout):
                if self.registration is not None and not self._connection.closing:
                    await self._request({"op": "unregister"}, None)
                self._connection.close()
                await self._connection.wait_closed()
        except (TimeoutError, LinkError, ClosedError):
            self.abort()
            await self._connection.wait_closed()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Cut the connection at once; the manager takes the worker for lost. Does nothing after a fork."""
        if os.getpid() == self._pid:
            self._connection.abort(ClosedError("the connection to the manager was closed"))

    async def wait_closed(self) -> None:
        """Return once the socket is closed. Cancelling leaves it as it is."""
        await self._connection.wait_closed()

    def is_closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._reason is not None or self._connection.closing

    def beat(self) -> None:
        """Say that we are alive; the manager says the same. Returns at once."""
        self.unanswered += 1
        self._connection.send({"op": "beat"})

    @property
    def local_host(self) -> str:
        """Our own address of this connection."""
        return self._connection.local_host

    @property
    def peer_host(self) -> str:
        """The manager's address of this connection."""
        return self._connection.peer_host

    # -------------------------------------------------------------------------------------------------------- internals

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedHandle(f"the connection to the manager at {self.address} was made before a fork", hint="init again in the child")
        if self._reason is not None:
            raise self._ended(self._reason)
        if self._connection.closing:
            closed = ClosedError("the connection to the manager was closed")
            raise self._ended(closed if self._connection.closed_here else LinkError("it is being closed by the other side"))

    def _ended(self, reason: LinkError | ClosedError) -> RendezvousError | ClosedError:
        """A fresh error each time: one instance raised in many places would collect all their tracebacks."""
        facts: dict[str, Any] = {"local": self._name, "address": self.address}
        if isinstance(reason, ClosedError):
            return ClosedError(reason.message, **facts)
        return RendezvousError(f"the connection to the manager is lost: {reason.message}", **facts)

    @property
    def _name(self) -> str | None:
        return None if self.registration is None else str(self.registration.identity.address)

    async def _request(self, message: dict[str, Any], timeout: float | None, *, withdraw: bool = False) -> dict[str, Any]:
        self._check()
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._pending[number] = answer
        try:
            self._connection.send({**message, "id": number})
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            text = f"the manager did not answer the request {message['op']!r} within {timeout:g} s"
            raise RendezvousError(text, local=self._name, address=self.address) from None
        finally:
            del self._pending[number]
            if withdraw and (answer.cancelled() or not answer.done()) and not self._connection.closing:
                self._connection.send({"op": "forget", "id": number})

    def take(self, message: dict[str, Any]) -> None:
        """A message of the manager. Raises WireError when it is malformed, which cuts the connection."""
        self.unanswered = 0
        event = message.get("event")
        if event == "ping":
            self._connection.send({"op": "pong"})
            return
        if event == "beat":
            return
        if event is not None:
            if self._on_event is not None:
                self._guard(self._on_event, message)
            return
        number = message.get("id")
        answer = self._pending.get(number) if type(number) is int else None
        if answer is None or answer.done():
            return  # withdrawn meanwhile
        if "error" in message:
            error = error_from_dict(message["error"])
            error.fill(address=self.address)
            answer.set_exception(error)
        elif isinstance(message.get("ok"), dict):
            answer.set_result(message["ok"])
        else:
            raise WireError("an answer of the manager with neither a result nor an error", address=self.address)

    def lost(self, reason: LinkError | ClosedError) -> None:
        """The connection has ended."""
        self._reason = reason
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._ended(reason))
        ended = self._ended(reason)
        if isinstance(ended, LinkError) and self._on_lost is not None:
            self._guard(self._on_lost, ended)

    def _guard(self, callback: Callable[[Any], None], argument: object) -> None:
        try:
            callback(argument)
        except Exception as error:  # user code; the connection must go on, and asyncio reports it
            self._loop.call_exception_handler({"message": "a manager callback failed", "exception": error})
