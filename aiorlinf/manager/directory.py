"""Who lives where. Pure: sessions and requests in, instructions out; no sockets, no clock.

A session is one proven connection to the manager. A worker lives as long as the session that registered it; the next one to register
under its address is its next incarnation. Who looked a worker up, and whom it looked up itself, hears when it goes or comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import InternalError, LinkError, RendezvousError, UsageError
from aiorlinf.manager.protocol import Expect, ListWorkers, Lookup, Register, Unregister, WorkerRecord
from aiorlinf.rendezvous.hosts import is_loopback, is_wildcard

__all__ = ["Directory", "Instruction", "Probe", "Refuse", "Reply", "SessionId", "Tell", "Wait"]

SessionId = NewType("SessionId", int)

PAGE = 1000
MAX_WAITING = 10_000
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request."""

    session: SessionId
    request: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error."""

    session: SessionId
    request: int
    error: LinkError | UsageError


@dataclass(frozen=True, slots=True)
class Tell:
    """Send news."""

    session: SessionId
    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """The look-up waits: call `Directory.expire` if it still does after ``timeout`` seconds (None: never)."""

    session: SessionId
    request: int
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Probe:
    """The address is taken by ``holder``: find out if that one is alive, then register again with ``holder_state``."""

    session: SessionId
    request: Register
    holder: SessionId


Instruction = Reply | Refuse | Tell | Wait | Probe


@dataclass(slots=True)
class _Session:
    seen_host: str  # where its connection comes from
    record: WorkerRecord | None = None  # the worker it registered
    waiting: dict[int, WorkerAddress] = field(default_factory=dict)  # look-ups not answered yet, by request
    watched: set[WorkerAddress] = field(default_factory=set)  # whose coming and going it hears of


class Directory:
    """The manager's memory.

    Args:
        job: the job's id.
        config: the job's configuration as plain values, handed to every worker.
        expected: all workers the job will ever have, so that looking up any other fails at once; None: the job is open.
    """

    def __init__(self, *, job: str, config: Mapping[str, Any], expected: Iterable[str] | None = None) -> None:
        self.job = job
        self._config = config
        self._expected = None if expected is None else {WorkerAddress(address) for address in expected}
        self._sessions: dict[SessionId, _Session] = {}
        self._holders: dict[WorkerAddress, SessionId] = {}  # living workers
        self._lives: dict[WorkerAddress, Incarnation] = {}  # the last incarnation of every address ever registered
        self._ends: dict[WorkerAddress, str] = {}  # how that incarnation ended, if it did
        self._waiters: dict[WorkerAddress, dict[tuple[SessionId, int], None]] = {}  # in the order they asked
        self._watchers: dict[WorkerAddress, set[SessionId]] = {}

    # ------------------------------------------------------------------------------------------------------- sessions

    def join(self, session: SessionId, seen_host: str) -> None:
        """A proven connection is there; ``seen_host`` is the address it comes from."""
        self._sessions[session] = _Session(seen_host)

    def drop(self, session: SessionId, detail: str) -> list[Instruction]:
        """The connection is gone. Unknown sessions are ignored."""
        gone = self._sessions.get(session)
        if gone is None:
            return []
        out = self._end(session, gone, "lost", detail)
        del self._sessions[session]
        for request in list(gone.waiting):
            self._stop_waiting(session, gone, request)
        for address in gone.watched:
            self._unwatch(address, session)
        return out

    # ------------------------------------------------------------------------------------------------------- requests

    def register(self, session: SessionId, request: Register, *, holder_state: str | None = None) -> list[Instruction]:
        """A worker says who and where it is. ``holder_state``: what a probe of the address's holder showed, for the message."""
        own = self._sessions[session]
        address = request.address
        if own.record is not None:
            return [Refuse(session, request.id, UsageError(f"this connection already registered {own.record.identity}"))]
        holder = self._holders.get(address)
        if holder is not None:
            if holder_state is None:
                return [Probe(session, request, holder)]
            return [Refuse(session, request.id, self._taken(address, holder_state))]
        host = own.seen_host if request.host is None else request.host
        if is_wildcard(host):
            error = UsageError(f"{address} cannot be reached at {host}", hint="cluster.network.advertise_host is an address to connect to")
            return [Refuse(session, request.id, error)]
        incarnation = Incarnation(self._lives.get(address, 0) + 1)
        own.record = WorkerRecord(
            address=address,
            incarnation=incarnation,
            host=host,
            port=request.port,
            devices=request.devices,
            labels=request.labels,
            host_id=request.host_id,
            pid=request.pid,
            unix=request.unix,
        )
        self._holders[address] = session
        self._lives[address] = incarnation
        self._ends.pop(address, None)
        if self._expected is not None:
            self._expected.add(address)
        out: list[Instruction] = [Reply(session, request.id, self._registration(own.record))]
        out += self._news(address, session, {"event": "joined", "address": str(address), "incarnation": incarnation})
        for waiting_session, waiting_request in list(self._waiters.get(address, ())):
            asker = self._sessions[waiting_session]
            self._stop_waiting(waiting_session, asker, waiting_request)
            out.append(self._answer(waiting_session, asker, waiting_request, own.record))
        return out

    def unregister(self, session: SessionId, request: Unregister) -> list[Instruction]:
        """A worker leaves in an orderly way; its address is free at once."""
        out = self._end(session, self._sessions[session], "left", "it closed")
        out.append(Reply(session, request.id, {}))
        return out

    def lookup(self, session: SessionId, request: Lookup) -> list[Instruction]:
        """A worker asks where another one is."""
        asker, address = self._sessions[session], request.address
        if request.id in asker.waiting:
            return [Refuse(session, request.id, UsageError(f"request {request.id} is under way already"))]
        holder = self._holders.get(address)
        if holder is not None:
            record = self._sessions[holder].record
            if record is None:
                raise InternalError(f"{address} is held by a session that registered nothing")
            self._watch(asker, session, address)
            return [self._answer(session, asker, request.id, record)]
        if self._expected is not None and address not in self._expected:
            error = RendezvousError(
                f"there is no worker {address} in this job, which has {_listing(self._expected)}",
                local=_name(asker),
                remote=str(address),
            )
            return [Refuse(session, request.id, error)]
        if len(asker.waiting) >= MAX_WAITING:
            return [Refuse(session, request.id, UsageError(f"{MAX_WAITING} look-ups of this connection wait already"))]
        self._watch(asker, session, address)
        asker.waiting[request.id] = address
        self._waiters.setdefault(address, {})[session, request.id] = None
        return [Wait(session, request.id, request.timeout)]

    def forget(self, session: SessionId, request: int) -> None:
        """The look-up's answer is not wanted any more. Ignored when it does not wait."""
        self._stop_waiting(session, self._sessions[session], request)

    def expire(self, session: SessionId, request: int, waited: float) -> list[Instruction]:
        """The look-up's time is over, after ``waited`` seconds. Ignored when it does not wait any more."""
        asker = self._sessions.get(session)
        address = None if asker is None else asker.waiting.get(request)
        if asker is None or address is None:
            return []
        self._stop_waiting(session, asker, request)
        who = _name(asker) or "a client"
        last = self._lives.get(address)
        state = "which never registered" if last is None else f"whose life {last} is over ({self._ends.get(address, 'unknown')})"
        missing = "" if self._expected is None else f"; expected and missing: {_listing(self._expected - self._holders.keys())}"
        error = RendezvousError(
            f"{who} waited for {address}, {state}; registered: {_listing(self._holders)}{missing}",
            local=_name(asker),
            remote=str(address),
            elapsed=waited,
            hint=f"start {address}, or check its name, and that both were given the same manager: one that is given none has its own",
        )
        return [Refuse(session, request, error)]

    def workers(self, session: SessionId, request: ListWorkers) -> list[Instruction]:
        """One page of the living workers, in order of address."""
        addresses = sorted(self._holders, key=lambda address: address.sort_key)
        if request.after is not None:
            after = request.after.sort_key
            addresses = [address for address in addresses if address.sort_key > after]
        records = [self._sessions[self._holders[address]].record for address in addresses[:PAGE]]
        body = {"workers": [record.to_dict() for record in records if record is not None], "more": len(addresses) > PAGE}
        return [Reply(session, request.id, body)]

    def expect(self, request: Expect) -> None:
        """More workers will join, so that looking them up waits. Means nothing in an open job."""
        if self._expected is not None:
            self._expected.update(request.addresses)

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def living(self) -> tuple[Identity, ...]:
        """The registered workers."""
        return tuple(Identity(address, self._lives[address]) for address in self._holders)

    def name(self, session: SessionId) -> str | None:
        """The worker that the session registered, for messages."""
        known = self._sessions.get(session)
        return None if known is None else _name(known)

    def check(self) -> None:
        """Verify every invariant; for tests. Raises InternalError."""
        for address, holder in self._holders.items():
            record = self._sessions[holder].record
            if record is None or record.address != address or record.incarnation != self._lives[address] or address in self._ends:
                raise InternalError(f"{address} and its session disagree")
        waiting = {(s, r, a) for s, state in self._sessions.items() for r, a in state.waiting.items()}
        if waiting != {(s, r, a) for a, entries in self._waiters.items() for s, r in entries}:
            raise InternalError("the look-ups of sessions and of addresses disagree")
        watching = {(s, a) for s, state in self._sessions.items() for a in state.watched}
        if watching != {(s, a) for a, sessions in self._watchers.items() for s in sessions}:
            raise InternalError("the watches of sessions and of addresses disagree")
        if not all(self._waiters.values()) or not all(self._watchers.values()):
            raise InternalError("an empty entry was left behind")
        if any(address in self._holders for address in self._waiters):
            raise InternalError("somebody waits for a worker that is registered")

    # ------------------------------------------------------------------------------------------------------- internals

    def _registration(self, record: WorkerRecord) -> dict[str, Any]:
        expected = None if self._expected is None else sorted(self._expected, key=lambda address: address.sort_key)
        return {
            "address": str(record.address),
            "incarnation": record.incarnation,
            "host": record.host,
            "config": self._config,
            "job": self.job,
            "expected": expected,
        }

    def _taken(self, address: WorkerAddress, holder_state: str) -> RendezvousError:
        record = self._sessions[self._holders[address]].record
        where = "another process" if record is None else f"process {record.pid} at {record.host}:{record.port}"
        host = record.labels.get("host") if record is not None else None
        return RendezvousError(
            f"{address} is registered already, by {where}{f' on {host}' if host else ''}, {holder_state}",
            local=str(address),
            hint="give each worker an address of its own, or end the other process first",
        )

    def _end(self, session: SessionId, own: _Session, reason: Literal["left", "lost"], detail: str) -> list[Instruction]:
        record, own.record = own.record, None
        if record is None:
            return []
        del self._holders[record.address]
        self._ends[record.address] = f"{reason}: {detail}"
        event = {
            "event": "gone",
            "address": str(record.address),
            "incarnation": record.incarnation,
            "reason": reason,
            "detail": detail,
        }
        return self._news(record.address, session, event)

    def _news(self, address: WorkerAddress, source: SessionId, event: dict[str, Any]) -> list[Instruction]:
        return [Tell(watcher, event) for watcher in sorted(self._watchers.get(address, ())) if watcher != source]

    def _answer(self, session: SessionId, asker: _Session, request: int, record: WorkerRecord) -> Instruction:
        if is_loopback(record.host) and not is_loopback(asker.seen_host):
            error = RendezvousError(
                f"{record.address} is known at {record.host} only, which leads nowhere from {asker.seen_host}",
                local=_name(asker),
                remote=str(record.address),
                hint=f"let {record.address} reach the manager by an address that other hosts can use, "
                "or set cluster.network.bind_host and cluster.network.advertise_host for it",
            )
            return Refuse(session, request, error)
        if asker.record is not None:
            # both ends of the link that will follow hear of each other's death
            self._watch(self._sessions[self._holders[record.address]], self._holders[record.address], asker.record.address)
        return Reply(session, request, {"worker": record.to_dict()})

    def _watch(self, own: _Session, session: SessionId, address: WorkerAddress) -> None:
        own.watched.add(address)
        self._watchers.setdefault(address, set()).add(session)

    def _unwatch(self, address: WorkerAddress, session: SessionId) -> None:
        watchers = self._watchers[address]
        watchers.discard(session)
        if not watchers:
            del self._watchers[address]

    def _stop_waiting(self, session: SessionId, own: _Session, request: int) -> None:
        address = own.waiting.pop(request, None)
        if address is not None:
            waiters = self._waiters[address]
            del waiters[session, request]
            if not waiters:
                del self._waiters[address]


def _name(session: _Session) -> str | None:
    return None if session.record is None else str(session.record.address)


def _listing(addresses: Iterable[WorkerAddress]) -> str:
    ordered = sorted(addresses, key=lambda address: address.sort_key)
    if not ordered:
        return "nobody"
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
