"""A worker's connection to the manager."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.config import JobConfig, NetworkConfig, load_config
from aiorlinf.errors import AuthenticationError, ClosedError, ForkedHandle, LinkError, RendezvousError, UsageError, WireError
from aiorlinf.manager.connection import ManagerConnection
from aiorlinf.manager.dial import Budget, Dialer
from aiorlinf.manager.emulation import Booking
from aiorlinf.manager.protocol import Registration, WorkerRecord, error_from_dict, parse_request
from aiorlinf.rendezvous.hosts import host_identity, host_labels
from aiorlinf.wire.handshake import Hello

__all__ = ["ManagerClient"]

_ANSWER_GRACE_S = 2.0  # how much later than its own time limit a look-up's answer may come

EventCallback = Callable[[dict[str, Any]], None]
LostCallback = Callable[[LinkError], None]


class ManagerClient:
    """A proven connection to the manager, made by `connect`. Belongs to the loop it was made on.

    Attributes:
        address: the manager's ``host:port``, as given.
        job: the job's id.
        peer: what the manager said about itself.
        local_host, peer_host: this connection's two addresses.
        registration: what `register` returned, or None.
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
        self.job = hello.job or ""
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

    def __repr__(self) -> str:
        who = "no worker" if self.registration is None else str(self.registration.identity)
        state = "open" if self._reason is None and not self._connection.closing else "closed"
        return f"<ManagerClient of {who} at {self.address} job {self.job} {state}, {len(self._pending)} requests pending>"

    # ----------------------------------------------------------------------------------------------------------- making

    @classmethod
    async def connect(
        cls,
        address: str,
        token: bytes | None,
        job: str | None = None,
        *,
        deadline: Budget | float | None = None,
        network: NetworkConfig | None = None,
        worker: str | None = None,
        on_event: EventCallback | None = None,
        on_lost: LostCallback | None = None,
    ) -> ManagerClient:
        """Connect and prove the token. What a busy or just starting manager answers (refused, reset) is tried again.

        Args:
            address: the manager's ``host:port``; all answers of a name look-up are tried.
            token: the job's secret.
            job: the job's id; None: whatever job the manager runs.
            deadline: seconds, or something with ``remaining()``; None: ``network.rendezvous_timeout_s``.
            network: limits of one attempt; by default the defaults.
            worker: the address that will be registered, for the manager's messages.
            on_event: called on this loop with every ``{"event": "gone" | "joined", "address", "incarnation", ...}``.
            on_lost: called once, on this loop, when the connection breaks without having been closed here.

        Raises:
            AuthenticationError: there is no token, or the two sides have different ones.
            WireError: it is not a manager, or one of another protocol version.
            RendezvousError: nobody answered in time; every address tried is named with its reason.
            LinkError: it is the manager of another job, or no manager at all.
            UsageError: the address is not of the form ``host:port``.

        Cancelling closes what was opened.
        """
        if not token:
            raise AuthenticationError(
                "there is no job token to show to the manager", address=address, hint="set AIORLINF_TOKEN to the token of the job"
            )
        hello = Hello(
            role="manager",
            job=job,
            address=None if worker is None else WorkerAddress(worker),
            host_id=host_identity(),
            capabilities={"pid": os.getpid()},
        )
        dialer = Dialer(address, token, hello, NetworkConfig() if network is None else network)
        return await dialer.run(deadline, lambda connection, peer: cls(address, connection, peer, on_event=on_event, on_lost=on_lost))

    # --------------------------------------------------------------------------------------------------------- requests

    async def register(
        self,
        address: str,
        *,
        port: int,
        host: str | None = None,
        devices: Iterable[str] = (),
        labels: Mapping[str, str] | None = None,
        host_id: str | None = None,
        pid: int | None = None,
        unix: str = "",
        timeout: float = 10.0,
    ) -> Registration:
        """Enter this worker in the directory, where it stays as long as this connection lives.

        Args:
            address: its ``group:rank``.
            port: where it listens for links.
            host: what peers are told (``cluster.network.advertise_host``); None: the address this connection comes from.
            devices: such as "cpu" or "cuda:0".
            labels: on top of `host_labels`.
            unix: name of a listening socket in the abstract namespace, for peers on this host.
            host_id, pid: by default `host_identity` and this process's.
            timeout: seconds for the manager to answer.

        Raises:
            RendezvousError: the address is taken by a living worker, which is named; or the manager is lost or does not answer.
            ConfigError: the job's configuration has keys that this version of the library does not know.
            UsageError: an argument is malformed, or this connection has registered already.

        Cancelling leaves open whether it is registered: close the client.
        """
        message = {
            "op": "register",
            "address": WorkerAddress(address),
            "host": host,
            "port": port,
            "devices": list(devices),
            "labels": host_labels(labels),
            "host_id": host_identity() if host_id is None else host_id,
            "pid": os.getpid() if pid is None else pid,
            "unix": unix,
        }
        _check_arguments(message)
        self.registration = Registration.from_dict(await self._request(message, timeout))
        return self.registration

    async def lookup(self, address: str, timeout: float | None = None) -> WorkerRecord:
        """Where a worker is. Waits until it registers, up to ``timeout`` seconds (None: as long as the manager is there).

        Raises:
            RendezvousError: the job will never have such a worker; or it did not come in time (who is there is listed); or it can
                only be reached over its own host's loopback; or the manager is lost.

        Cancelling withdraws the question.
        """
        message: dict[str, Any] = {"op": "lookup", "address": WorkerAddress(address), "timeout": timeout}
        _check_arguments(message)
        answer = await self._request(message, None if timeout is None else timeout + _ANSWER_GRACE_S, withdraw=True)
        return _record(answer.get("worker"))

    async def workers(self, timeout: float = 10.0) -> list[WorkerRecord]:
        """All registered workers, in order of address. Raises RendezvousError when the manager is lost. Cancelling is harmless."""
        records: list[WorkerRecord] = []
        more = True
        while more:
            after = records[-1].address if records else None
            answer = await self._request({"op": "workers", "after": after}, timeout)
            page = answer.get("workers")
            if type(page) is not list:
                raise WireError("the manager answered without a list of workers", address=self.address)
            records += [_record(item) for item in page]
            more = bool(page) and answer.get("more") is True
        return records

    async def book(self, budgets: Sequence[int], nbytes: int, timeout: float) -> Booking:
        """Book bandwidth of the emulated network, which all workers of the job share.

        Raises RendezvousError when the manager is lost or does not answer in time. Cancelling leaves it booked.
        """
        answer = await self._request({"op": "book", "budgets": list(budgets), "bytes": nbytes}, timeout)
        wait, span = answer.get("wait"), answer.get("span")
        if not (isinstance(wait, float) and isinstance(span, float) and wait >= 0 and span >= 0):
            raise WireError("the manager answered a booking without saying how long it takes", address=self.address)
        return Booking(wait, span)

    def expect(self, addresses: Iterable[str]) -> None:
        """Tell a manager with a closed set of workers that these will join, too. Returns at once."""
        self._check()
        self._connection.send({"op": "expect", "addresses": [WorkerAddress(address) for address in addresses]})

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

    @property
    def config(self) -> JobConfig:
        """The job's configuration, which the manager tells in its hello: a worker needs it before it can register.

        Raises:
            ConfigError: it has keys that this version of the library does not know.
            WireError: the manager did not tell one.
        """
        told = self.peer.capabilities.get("config")
        if not isinstance(told, dict):
            raise WireError("the manager did not tell the job's configuration", address=self.address)
        return load_config(told)

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
        fields: dict[str, Any] = {"local": self._name, "address": self.address}
        if isinstance(reason, ClosedError):
            return ClosedError(reason.message, **fields)
        return RendezvousError(f"the connection to the manager is lost: {reason.message}", **fields)

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
        event = message.get("event")
        if event == "ping":
            self._connection.send({"op": "pong"})
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


def _record(data: object) -> WorkerRecord:
    if not isinstance(data, dict):
        raise WireError("the manager answered without a worker")
    return WorkerRecord.from_dict(data)


def _check_arguments(message: dict[str, Any]) -> None:
    """The manager would cut a connection that sends a malformed request; the caller gets a clear error instead."""
    try:
        parse_request({**message, "id": 1})
    except WireError as error:
        raise UsageError(f"{message['op']}: {error.message}") from None
