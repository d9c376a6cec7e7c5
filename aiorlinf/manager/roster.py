"""The living workers, and for how long nothing has been heard of each. Pure.

Time is counted in ticks that the service gives, and only those that it really gave: when the manager itself stood still, nobody has
been silent meanwhile. A tick costs what there is to do in it, whatever the number of workers: each worker is in the bucket of the tick
at which it would be overdue, and is looked at again only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.manager.instructions import SessionId
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.requests import Register

__all__ = ["Member", "Patience", "Roster"]


class Patience(NamedTuple):
    """Ticks until a worker is declared lost."""

    silent: int  # nothing is heard of it, though its connection is open; or it was only heard of from others
    broken: int  # its connection broke: it may have been cut by something in between, which it notices at its next heartbeat
    closed: int  # its connection was closed, which is what the end of a process does


@dataclass(slots=True)
class Member:
    """One living worker.

    Attributes:
        record: None when it is only known from what others told a manager that was started anew.
        session: its connection; None when that is gone, or has not come yet.
        deadline: the tick at which it is declared lost.
        cause: why, if it comes to that.
        claimants: new lives that want its address, and wait for its end or a word of it.
    """

    identity: Identity
    record: WorkerRecord | None
    session: SessionId | None
    deadline: int
    cause: str
    due: int = 0  # in which bucket it is; in earlier ones it may still be listed
    claimants: list[tuple[SessionId, Register]] = field(default_factory=list)


class Roster:
    """See the module."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._now = 0
        self._members: dict[WorkerAddress, Member] = {}
        self._buckets: dict[int, list[Member]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, address: WorkerAddress) -> Member | None:
        """The living worker of this address."""
        return self._members.get(address)

    def add(self, identity: Identity, record: WorkerRecord | None, session: SessionId | None, cause: str) -> Member:
        """A worker lives. There must be none under its address."""
        member = Member(identity, record, session, self._now + self.patience.silent, cause)
        self._members[identity.address] = member
        self._schedule(member)
        return member

    def remove(self, member: Member) -> None:
        """It lives no more."""
        del self._members[member.identity.address]
        member.due = 0

    def heard(self, member: Member) -> None:
        """A word of it has come."""
        member.deadline = self._now + self.patience.silent

    def hasten(self, member: Member, ticks: int) -> None:
        """Unless something is heard, it is lost after this many ticks."""
        member.deadline = self._now + ticks
        if member.deadline < member.due:
            self._schedule(member)

    def tick(self) -> list[Member]:
        """Time passes; who is overdue now."""
        self._now += 1
        overdue = []
        for member in self._buckets.pop(self._now, ()):
            if member.due != self._now:
                continue  # removed, or moved to an earlier bucket, meanwhile
            if member.deadline <= self._now:
                overdue.append(member)
            else:
                self._schedule(member)
        return overdue

    def check(self) -> bool:
        """Whether everybody is where it must be; for tests."""
        return all(self._now < member.due <= max(member.deadline, member.due) and member in self._buckets[member.due] for member in self)

    def _schedule(self, member: Member) -> None:
        member.due = max(member.deadline, self._now + 1)
        self._buckets.setdefault(member.due, []).append(member)
