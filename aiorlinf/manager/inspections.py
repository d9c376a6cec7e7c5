"""Questions to workers that go through the manager: what is this one doing? Pure.

A worker is asked in its heartbeat thread, so it answers while its loop is blocked. One that is frozen does not, and who asks gives up
(`forget`): nothing here waits for anything.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from aiorlinf.manager.instructions import SessionId

__all__ = ["MAX_INSPECTIONS", "Asked", "Inspections"]

MAX_INSPECTIONS = 10_000
"""That one connection may have under way."""


class Asked(NamedTuple):
    """Who asked, the number of his request, and whom."""

    asker: SessionId
    request: int
    target: SessionId


class Inspections:
    """Who has asked whom, and waits for the answer."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._by_request: dict[tuple[SessionId, int], int] = {}
        self._of: dict[SessionId, set[int]] = {}  # by session, as asker or as target

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, asker: SessionId, request: int, target: SessionId) -> int | None:
        """A new question; its number, which the target is told. None: this request is under way already, or there are too many."""
        own = self._of.get(asker, ())
        if (asker, request) in self._by_request or len(own) >= MAX_INSPECTIONS:
            return None
        number = next(self._numbers)
        self._asked[number] = Asked(asker, request, target)
        self._by_request[asker, request] = number
        for session in (asker, target):
            self._of.setdefault(session, set()).add(number)
        return number

    def answered(self, session: SessionId, number: int) -> Asked | None:
        """An answer has come from this session. None if nobody waits for it, or if it was not asked."""
        asked = self._asked.get(number)
        if asked is None or asked.target != session:
            return None
        self._remove(number)
        return asked

    def forget(self, asker: SessionId, request: int) -> None:
        """The answer is not wanted any more. Ignored when it is not under way."""
        number = self._by_request.get((asker, request))
        if number is not None:
            self._remove(number)

    def drop(self, session: SessionId) -> list[Asked]:
        """The session is gone: the questions to it, whose askers must be told."""
        gone = [self._remove(number) for number in sorted(self._of.get(session, ()))]
        return [asked for asked in gone if asked.asker != session]

    def _remove(self, number: int) -> Asked:
        asked = self._asked.pop(number)
        del self._by_request[asked.asker, asked.request]
        for session in {asked.asker, asked.target}:
            numbers = self._of[session]
            numbers.discard(number)
            if not numbers:
                del self._of[session]
        return asked
