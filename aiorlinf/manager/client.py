"""A worker's connection to the manager, and what can be asked over it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.config import JobConfig, NetworkConfig, config_to_dict, load_config
from aiorlinf.errors import AuthenticationError, UsageError, WireError
from aiorlinf.manager import fields
from aiorlinf.manager.dial import Budget, Dialer
from aiorlinf.manager.emulation import Booking
from aiorlinf.manager.lives import Known
from aiorlinf.manager.names import Holding
from aiorlinf.manager.protocol import Registration, WorkerRecord
from aiorlinf.manager.requests import MAX_LISTED, Kind, known_to_list, parse_request
from aiorlinf.manager.session import EventCallback, LostCallback, ManagerSession
from aiorlinf.rendezvous.hosts import host_identity, host_labels, process_identity
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.trace.clock import Reading
from aiorlinf.wire.handshake import Hello

__all__ = ["ManagerClient"]

_ANSWER_GRACE_S = 5.0  # how much later than its own time limit an answer may come: a manager that recovers waits that long for workers


_CLOCK_TRIES = 8


class ManagerClient(ManagerSession):
    """A proven connection to the manager, made by `connect`. Belongs to the loop it was made on."""

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
        tls: Tls | None = None,
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
            tls: what the manager is reached with; None: without TLS.

        Raises:
            AuthenticationError: there is no token, or the two sides have different ones, or certificates that do not fit.
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
        dialer = Dialer(address, token, hello, NetworkConfig() if network is None else network, tls)
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
        life: int = 0,
        timeout: float = 30.0,
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
            life: the number of the life that goes on, after its connection to the manager was lost; 0 for a new one.
            timeout: seconds for the manager to answer. When the address is held by a worker that does not answer, that is once its
                silence is taken for its death.

        Raises:
            RendezvousError: the address is taken by a living worker, which is named; or the manager is lost or does not answer.
            DeclaredDead: that life has been declared lost.
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
            "process": process_identity(),
            "life": life,
        }
        _check_arguments(message)
        registration = Registration.from_dict(await self._request(message, timeout))
        self.registration: Registration | None = registration
        return registration

    async def lookup(self, address: str, timeout: float | None = None, above: int = 0) -> WorkerRecord:
        """Where a worker is. Waits until it registers, up to ``timeout`` seconds (None: as long as the manager is there).

        Args:
            above: only a life with a higher number will do.

        Raises:
            RendezvousError: the job will never have such a worker; or it did not come in time (who is there is listed); or it can
                only be reached over its own host's loopback; or the manager is lost.

        Cancelling withdraws the question.
        """
        message: dict[str, Any] = {"op": "lookup", "address": WorkerAddress(address), "timeout": timeout, "above": above}
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

    def expect(self, addresses: Iterable[str]) -> None:
        """Tell a manager with a closed set of workers that these will join, too. Returns at once."""
        self._check()
        self._connection.send({"op": "expect", "addresses": [WorkerAddress(address) for address in addresses]})

    async def inspect(self, worker: Identity, timeout: float) -> dict[str, Any]:
        """What a worker is doing, in its own words (`link.report`); its loop may be blocked.

        Raises RendezvousError when it is not there or does not answer within ``timeout`` seconds, or the manager is lost. Cancelling
        withdraws the question.
        """
        message = {"op": "inspect", "address": worker.address, "incarnation": worker.incarnation}
        report = (await self._request(message, timeout, withdraw=True)).get("report")
        if not isinstance(report, dict):
            raise WireError(f"the manager answered without what {worker} says", address=self.address)
        return report

    def tell(self, number: int, report: Mapping[str, Any]) -> None:
        """Answer an ``inspect`` event. Returns at once. Raises UsageError when the report is too large."""
        self._connection.send({"op": "tell", "number": number, "report": report})

    async def clock(self, timeout: float = 10.0) -> Reading:
        """The job's clock, which is the manager's. On one host it is read exactly, else it is the best of some exchanges.

        Raises RendezvousError when the manager is lost or does not answer. Cancelling is harmless.
        """
        best: Reading | None = None
        for _ in range(_CLOCK_TRIES):
            before = time.monotonic_ns()
            answer = await self._request({"op": "time"}, timeout)
            after = time.monotonic_ns()
            told, epoch = answer.get("job_ns"), answer.get("epoch_ns")
            if type(told) is not int or type(epoch) is not int:
                raise WireError("the manager did not tell the time", address=self.address)
            if self.peer.host_id == host_identity():  # one host has one monotonic clock
                return Reading(after / 1e9, epoch + after, 0)
            reading = Reading((before + after) / 2e9, told, (after - before) // 2)
            if best is None or reading.error_ns < best.error_ns:
                best = reading
        assert best is not None
        return best

    async def book(self, budgets: Sequence[int], nbytes: int, timeout: float) -> Booking:
        """Book bandwidth of the emulated network, which all workers of the job share.

        Raises RendezvousError when the manager is lost or does not answer in time. Cancelling leaves it booked.
        """
        answer = await self._request({"op": "book", "budgets": list(budgets), "bytes": nbytes}, timeout)
        wait, span = answer.get("wait"), answer.get("span")
        if not (isinstance(wait, float) and isinstance(span, float) and wait >= 0 and span >= 0):
            raise WireError("the manager answered a booking without saying how long it takes", address=self.address)
        return Booking(wait, span)

    async def subscribe(self, timeout: float = 10.0) -> None:
        """Hear of every worker that comes or goes from now on. Raises RendezvousError when the manager is lost."""
        await self._request({"op": "subscribe"}, timeout)

    # ------------------------------------------------------------------------------------------------------ named things

    async def publish(self, kind: Kind, name: str, value: Mapping[str, str], *, again: bool = False, timeout: float = 10.0) -> None:
        """Hold a named thing, until `withdraw` or the end of this worker; said again, its value is replaced.

        Args:
            kind: "channel" or "group".
            value: a small table of texts, given to whoever finds it.
            again: it was held before the manager was started anew.

        Raises:
            RendezvousError: another living worker holds it, or the manager is lost.
            UsageError: an argument is malformed, or this connection has not registered.

        Cancelling leaves open whether it is held.
        """
        message = {"op": "publish", "kind": kind, "name": name, "value": dict(value), "again": again}
        _check_arguments(message)
        await self._request(message, timeout)

    async def withdraw(self, kind: Kind, name: str, timeout: float = 10.0) -> None:
        """Hold a named thing no more. Harmless if it is not held here. Raises RendezvousError when the manager is lost."""
        message = {"op": "withdraw", "kind": kind, "name": name}
        _check_arguments(message)
        await self._request(message, timeout)

    async def find(self, kind: Kind, name: str, timeout: float | None = None) -> Holding:
        """Who holds a named thing, and its value. Waits until somebody does, up to ``timeout`` seconds.

        Raises RendezvousError when nobody did in time, or the manager is lost. Cancelling withdraws the question.
        """
        message: dict[str, Any] = {"op": "find", "kind": kind, "name": name, "timeout": timeout}
        _check_arguments(message)
        answer = await self._request(message, None if timeout is None else timeout + _ANSWER_GRACE_S, withdraw=True)
        return Holding(fields.identity(answer.get("owner"), answer.get("incarnation"), "owner"), fields.table(answer, "value"))

    # ------------------------------------------------------------------------------------------- what we tell of the others

    def learn(self, lives: Iterable[Known]) -> None:
        """Tell what we know of the lives of others. Returns at once."""
        entries = [known_to_list(known) for known in lives]
        self._tell_in_pages("learn", "lives", entries)

    def watch(self, workers: Iterable[Identity]) -> None:
        """We have links with these: hear of their ends. Returns at once."""
        self._tell_in_pages("watch", "workers", [[worker.address, worker.incarnation] for worker in workers])

    def _tell_in_pages(self, op: str, key: str, entries: Sequence[list[str | int]]) -> None:
        for start in range(0, len(entries), MAX_LISTED):
            self._connection.send({"op": op, key: entries[start : start + MAX_LISTED]})

    def remember(self, config: JobConfig, expected: Iterable[WorkerAddress] | None) -> None:
        """Tell a manager that was started anew what the last one told us. Returns at once."""
        listed = None if expected is None else list(expected)
        self._connection.send({"op": "remember", "config": config_to_dict(config), "expected": listed})

    # -------------------------------------------------------------------------------------------------- what the manager is

    @property
    def recovering(self) -> bool:
        """Whether the manager was started anew, and takes in what its workers know, when we connected to it."""
        return self.peer.capabilities.get("recovering") is True

    @property
    def process(self) -> str:
        """The process that the manager runs in, as `process_identity` names it; empty if it does not say."""
        told = self.peer.capabilities.get("process")
        return told if isinstance(told, str) else ""

    async def ask_config(self, timeout: float = 10.0) -> JobConfig:
        """The job's configuration: from the manager's hello or, if that manager has to learn it first, when it has.

        Raises:
            ConfigError: it has keys that this version of the library does not know.
            WireError: the manager did not tell one.
            RendezvousError: the manager is lost.

        Cancelling is harmless.
        """
        if "config" in self.peer.capabilities or not self.recovering:
            return self.config
        told = (await self._request({"op": "job"}, timeout)).get("config")
        if not isinstance(told, dict):
            raise WireError("the manager did not tell the job's configuration", address=self.address)
        return load_config(told)

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
