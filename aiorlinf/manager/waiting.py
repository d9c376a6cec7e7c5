"""Questions that wait for something to appear, and who hears whose news. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import InternalError
from aiorlinf.manager.instructions import SessionId
from aiorlinf.manager.requests import Kind

__all__ = ["Key", "Named", "Question", "Waiting", "Watchers"]


class Named(NamedTuple):
    """A named thing."""

    kind: Kind
    name: str


Key = WorkerAddress | Named


class Question(NamedTuple):
    """One that waits: for this key; if it is a worker, for a life of it above that number."""

    key: Key
    above: int


class Waiting:
    """Questions by session and by what they wait for."""

    def __init__(self) -> None:
        self._by_session: dict[SessionId, dict[int, Question]] = {}
        self._by_key: dict[Key, dict[tuple[SessionId, int], None]] = {}  # in the order they were asked

    def __len__(self) -> int:
        return sum(map(len, self._by_session.values()))

    def waits(self, session: SessionId, key: Key) -> bool:
        """Whether this session has asked for this."""
        return any(asker == session for asker, _ in self._by_key.get(key, ()))

    def on(self, key: Key) -> int:
        """How many wait for this."""
        return len(self._by_key.get(key, ()))

    def add(self, session: SessionId, request: int, question: Question) -> None:
        """It waits."""
        self._by_session.setdefault(session, {})[request] = question
        self._by_key.setdefault(question.key, {})[session, request] = None

    def get(self, session: SessionId, request: int) -> Question | None:
        """What this request waits for."""
        return self._by_session.get(session, {}).get(request)

    def count(self, session: SessionId) -> int:
        """How many questions of this session wait."""
        return len(self._by_session.get(session, ()))

    def remove(self, session: SessionId, request: int) -> None:
        """It waits no more. Ignored if it does not."""
        mine = self._by_session.get(session, {})
        question = mine.pop(request, None)
        if question is None:
            return
        if not mine:
            del self._by_session[session]
        others = self._by_key[question.key]
        del others[session, request]
        if not others:
            del self._by_key[question.key]

    def remove_all(self, session: SessionId) -> None:
        """The session is gone."""
        for request in list(self._by_session.get(session, ())):
            self.remove(session, request)

    def take(self, key: Key, life: int = 0) -> list[tuple[SessionId, int]]:
        """What they wait for is there: they wait no more. A worker is there in this life."""
        taken = []
        for session, request in list(self._by_key.get(key, ())):
            if self._by_session[session][request].above <= life - (1 if isinstance(key, WorkerAddress) else 0):
                self.remove(session, request)
                taken.append((session, request))
        return taken

    def __iter__(self) -> Iterator[tuple[SessionId, int, Question]]:
        for session, questions in self._by_session.items():
            for request, question in questions.items():
                yield session, request, question

    def check(self) -> None:
        """Verify the invariants; for tests. Raises InternalError."""
        if {(s, r, q.key) for s, r, q in self} != {(s, r, key) for key, entries in self._by_key.items() for s, r in entries}:
            raise InternalError("the questions of sessions and of keys disagree")
        if not all(self._by_key.values()) or not all(self._by_session.values()):
            raise InternalError("an empty entry was left behind")


class Watchers:
    """Who hears of which workers: of those it asked for or has links with, or of all.

    A session that lives long asks for workers without end, of which most are gone: as those that it hears of have doubled, they are looked
    through, and the useless ones forgotten.

    Args:
        useful: whether a session may still have to hear of a worker.
    """

    FEW = 1024
    """So many of one session are never looked through."""

    def __init__(self, useful: Callable[[SessionId, WorkerAddress], bool]) -> None:
        self._useful = useful
        self._look_at: dict[SessionId, int] = {}  # looked through at this number, if it is not `FEW`
        self._of: dict[WorkerAddress, set[SessionId]] = {}
        self._by: dict[SessionId, set[WorkerAddress]] = {}
        self._of_all: set[SessionId] = set()

    def add(self, session: SessionId, address: WorkerAddress) -> None:
        """It hears of this worker from now on."""
        mine = self._by.setdefault(session, set())
        mine.add(address)
        self._of.setdefault(address, set()).add(session)
        if len(mine) > self.FEW and len(mine) > self._look_at.get(session, self.FEW):
            self.look_through(session, address)

    def look_through(self, session: SessionId, new: WorkerAddress | None = None) -> None:
        """Forget what it need not hear of any more, but for this one, which it has only just asked for."""
        mine = self._by.get(session, set())
        for address in [address for address in mine if address != new and not self._useful(session, address)]:
            mine.discard(address)
            self._unwatched(session, address)
        self._look_at[session] = 2 * len(mine)

    def add_all(self, session: SessionId) -> None:
        """It hears of all."""
        self._of_all.add(session)

    def count(self, session: SessionId) -> int:
        """How many workers it hears of by name."""
        return len(self._by.get(session, ()))

    def remove(self, session: SessionId) -> None:
        """The session is gone."""
        self._of_all.discard(session)
        self._look_at.pop(session, None)
        for address in self._by.pop(session, ()):
            self._unwatched(session, address)

    def _unwatched(self, session: SessionId, address: WorkerAddress) -> None:
        watchers = self._of[address]
        watchers.discard(session)
        if not watchers:
            del self._of[address]

    def of(self, address: WorkerAddress) -> Iterable[SessionId]:
        """Who hears of it, in order."""
        return sorted(self._of_all.union(self._of.get(address, ())))

    def check(self) -> None:
        """Verify the invariants; for tests. Raises InternalError."""
        if {(s, a) for s, watched in self._by.items() for a in watched} != {(s, a) for a, watchers in self._of.items() for s in watchers}:
            raise InternalError("the watches of sessions and of addresses disagree")
        if not all(self._of.values()):
            raise InternalError("an empty entry was left behind")
