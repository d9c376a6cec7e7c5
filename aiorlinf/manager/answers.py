"""What the directory says: the bodies of answers and news, and errors that tell a user what there is instead. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.errors import RendezvousError
from aiorlinf.manager.lives import Known
from aiorlinf.manager.names import Holding
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.requests import Register
from aiorlinf.manager.roster import Member
from aiorlinf.manager.waiting import Named

__all__ = [
    "gone",
    "held",
    "listing",
    "missing_name",
    "missing_worker",
    "no_such_worker",
    "not_there",
    "record_of",
    "taken",
    "unreachable",
]

_LISTED = 20


def record_of(request: Register, host: str, identity: Identity) -> WorkerRecord:
    """What others are told of the worker that registered."""
    return WorkerRecord(
        address=identity.address,
        incarnation=identity.incarnation,
        host=host,
        port=request.port,
        devices=request.devices,
        labels=request.labels,
        host_id=request.host_id,
        pid=request.pid,
        unix=request.unix,
        process=request.process,
    )


def gone(known: Known, silent: bool) -> dict[str, Any]:
    """The news that a life is over, which it must be. ``silent``: its connection was still there."""
    (address, life), end = known
    assert end is not None
    return {
        "event": "gone",
        "address": str(address),
        "incarnation": life,
        "reason": end.reason,
        "detail": end.detail,
        "silent": silent,
    }


def held(holding: Holding) -> dict[str, Any]:
    """The answer to who looked for a named thing."""
    return {"owner": str(holding.owner.address), "incarnation": holding.owner.incarnation, "value": dict(holding.value)}


def not_there(detail: str) -> RendezvousError:
    """Somebody cannot be inspected."""
    return RendezvousError(f"nobody is there to answer: {detail}")


def taken(member: Member, state: str, request: Register) -> RendezvousError:
    """Another worker has the address, and is in this state."""
    record = member.record
    hint = "give each worker an address of its own, or end the other process first"
    if record is not None and record.process and record.process == request.process:
        # Heartbeats come from a thread of their own, so a worker whose loop has ended without `close` still counts as alive.
        hint = (
            "that is this process: it may be a worker whose event loop ended before its `close()`, as when asyncio.run is over; "
            "close it (`async with aiorlinf.init(...)`), or use loop='thread', and it outlives the loop"
        )
    where = "another process" if record is None else f"process {record.pid} at {record.host}:{record.port}"
    host = record.labels.get("host") if record is not None else None
    return RendezvousError(
        f"{member.identity.address} is registered already, by {where}{f' on {host}' if host else ''}, {state}",
        local=str(member.identity.address),
        hint=hint,
    )


def no_such_worker(address: WorkerAddress, expected: Iterable[WorkerAddress], local: str | None) -> RendezvousError:
    """The job is closed, and this address is not in it."""
    return RendezvousError(f"there is no worker {address} in this job, which has {listing(expected)}", local=local, remote=str(address))


def missing_name(named: Named, local: str | None, waited: float) -> RendezvousError:
    """Nobody came who holds it. ``local``: the worker that waited, if it is one."""
    text = f"{local or 'a client'} waited for the {named.kind} {named.name!r}, which nobody holds"
    return RendezvousError(text, local=local, elapsed=waited)


def missing_worker(
    address: WorkerAddress,
    state: str,
    registered: set[WorkerAddress],
    expected: set[WorkerAddress] | None,
    local: str | None,
    waited: float,
) -> RendezvousError:
    """It did not come, and is in this state. ``expected`` None: the job is open."""
    missing = "" if expected is None else f"; expected and missing: {listing(expected - registered)}"
    return RendezvousError(
        f"{local or 'a client'} waited for {address}, {state}; registered: {listing(registered)}{missing}",
        local=local,
        remote=str(address),
        elapsed=waited,
        hint=f"start {address}, or check its name, and that both were given the same manager: one that is given none has its own",
    )


def unreachable(record: WorkerRecord, seen_host: str, local: str | None) -> RendezvousError:
    """It is known by an address of its own host, and who asks is on another."""
    return RendezvousError(
        f"{record.address} is known at {record.host} only, which leads nowhere from {seen_host}",
        local=local,
        remote=str(record.address),
        hint=f"let {record.address} reach the manager by an address that other hosts can use, "
        "or set cluster.network.bind_host and cluster.network.advertise_host for it",
    )


def listing(addresses: Iterable[WorkerAddress]) -> str:
    """The first of them in order, and how many there are besides."""
    ordered = sorted(addresses, key=lambda address: address.sort_key)
    if not ordered:
        return "nobody"
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
