"""What one worker knows of its job, from what the manager told it. Pure.

It answers look-ups while the manager is away, and is what a manager that was started anew is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.errors import WireError
from aiorlinf.manager import fields
from aiorlinf.manager.lives import End, Known, Lives
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.requests import MAX_DETAIL
from aiorlinf.manager.waiting import Named

__all__ = ["Mirror", "News"]


class News(NamedTuple):
    """A worker has joined, or its life has ended.

    Attributes:
        end: how; None if it has joined.
        silent: it ended with its connections still open.
        certain: False if that is our own guess: then our link with it ends, and nobody else is told.
    """

    identity: Identity
    end: End | None
    silent: bool = False
    certain: bool = True


class Mirror:
    """See the module.

    Attributes:
        own: this worker, once registered.
        lives: of others.
        names: named things that this worker holds.
    """

    def __init__(self) -> None:
        self.own: Identity | None = None
        self.lives: Lives = Lives()
        self.names: dict[Named, Mapping[str, str]] = {}
        self._records: dict[WorkerAddress, WorkerRecord] = {}
        self._linked: dict[WorkerAddress, Identity] = {}

    def saw(self, record: WorkerRecord) -> None:
        """The manager told where a worker is."""
        self.lives.learn(record.identity)
        if self.lives.end_of(record.identity) is None:
            self._records[record.address] = record

    def linked(self, identity: Identity) -> None:
        """There is a link with this worker, which is proof that it lives, or has lived."""
        self.lives.learn(identity)
        if self.lives.end_of(identity) is None:
            self._linked[identity.address] = identity

    def take(self, event: Mapping[str, Any]) -> News | None:
        """What the manager told, if it is news to us. Raises WireError on anything malformed."""
        identity = fields.identity(event.get("address"), event.get("incarnation"), str(event.get("event"))[:20])
        if event.get("event") == "joined":
            return News(identity, None) if self.lives.learn(identity) else None
        reason = event.get("reason")
        if event.get("event") != "gone" or (reason != "left" and reason != "lost"):
            raise WireError("news of the manager that is neither that a worker joined nor that it is gone")
        return self.give_up(identity, End(reason, fields.text(event, "detail", 4096)[:MAX_DETAIL]), event.get("silent") is True)

    def give_up(self, identity: Identity, end: End, silent: bool) -> News | None:
        """Its life is over, if that is news to us."""
        news = self.lives.learn(identity, end)
        record, linked = self._records.get(identity.address), self._linked.get(identity.address)
        if record is not None and self.lives.end_of(record.identity) is not None:
            del self._records[identity.address]
        if linked is not None and self.lives.end_of(linked) is not None:
            del self._linked[identity.address]
        return News(identity, end, silent) if news else None

    def find(self, address: WorkerAddress, above: int = 0) -> WorkerRecord | None:
        """Where a worker was when the manager last told, unless it is known to live no more there."""
        record = self._records.get(address)
        if record is None or record.incarnation <= above or self.lives.end_of(record.identity) is not None:
            return None
        return record

    def records(self) -> list[WorkerRecord]:
        """All those, in order of address."""
        return sorted(
            (record for record in self._records.values() if self.find(record.address)), key=lambda record: record.address.sort_key
        )

    def beside(self, process: str) -> list[Identity]:
        """The workers known to live in that process."""
        return [record.identity for record in self._records.values() if process and record.process == process]

    def told(self) -> Iterator[Known]:
        """What a manager that was started anew has to learn."""
        for known in self.lives:
            if self.own is None or known.identity.address != self.own.address:
                yield known

    def links(self) -> list[Identity]:
        """The workers there are links with."""
        return list(self._linked.values())
