"""Whose turn it is on a device: the one order in which the transfers of all its pairs are given to it.

A transfer between two devices occupies both from the moment that a side has been given it until both are through. With several peers, two
devices that are given the same two transfers in different order wait for each other for ever. So each direction of a device belongs to one
pair at a time, and a transfer takes its turns in one order everywhere: first the sender's, on the way out, then the receiver's, on the way
in. Who waits for a way in holds a way out, never the other way round, so there is always a transfer that has both and comes to its end,
whatever the other workers do; and nobody has to be asked.

Further transfers of the pair whose turn it is may join, in their order, unless another pair waits.

Several workers of a process share its devices, and each has a thread of its own: this is one of the few things with a lock.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiorlinf.errors import AiorlinfError

if TYPE_CHECKING:
    from aiorlinf.device.runtime import Runtime

__all__ = ["INWARD", "OUTWARD", "Turn", "Turns", "turns_of"]

OUTWARD, INWARD = "out", "in"
"""The two directions of a device."""

Go = Callable[["Turn"], None]
Call = Callable[[Callable[[], None]], None]
"""Has something done in its owner's thread, in the order of the calls."""


class _State(enum.Enum):
    WAITING = enum.auto()
    DUE = enum.auto()  # its owner is told
    GOING = enum.auto()
    OVER = enum.auto()


class Turn:
    """One transfer's, from `Turns.take` until `end`."""

    __slots__ = ("call", "go", "owner", "state", "turns")

    def __init__(self, turns: Turns, owner: object, go: Go, call: Call) -> None:
        self.turns: Turns = turns
        self.owner: object = owner
        self.go: Go = go
        self.call: Call = call
        self.state: _State = _State.WAITING

    @property
    def over(self) -> bool:
        """`end` was called."""
        return self.state is _State.OVER

    def end(self) -> None:
        """The device is through with it, or it is not wanted any more. Any thread; any number of times."""
        self.turns._end(self)


class Turns:
    """One direction of one device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: object = None
        self._begun: int = 0
        self._due: int = 0
        self._waiting: deque[Turn] = deque()

    @property
    def idle(self) -> bool:
        """Nobody has it, and nobody waits."""
        return not self._begun and not self._waiting

    def take(self, owner: object, go: Go, call: Call) -> Turn:
        """Have `go` called when it is this owner's turn: at once, in the calling thread, or later through `call`. An owner's come in order.

        Args:
            owner: one end of a pair.
        """
        turn = Turn(self, owner, go, call)
        with self._lock:
            joins = self._owner is owner and not self._waiting and not self._due
            if self._begun and not joins:
                self._waiting.append(turn)
                return turn
            self._owner = owner
            self._begun += 1
            turn.state = _State.GOING
        go(turn)
        return turn

    def _end(self, turn: Turn) -> None:
        with self._lock:
            state, turn.state = turn.state, _State.OVER
            if state is _State.OVER:
                return
            if state is _State.WAITING:
                self._waiting.remove(turn)
            else:
                self._begun -= 1
                self._due -= state is _State.DUE
            due = self._next()
        for each in due:
            self._tell(each)

    def _next(self) -> list[Turn]:
        """Those who come now: of one owner, as far as nobody else waits between them."""
        due: list[Turn] = []
        while self._waiting and (not self._begun or self._waiting[0].owner is self._owner):
            turn = self._waiting.popleft()
            turn.state = _State.DUE
            self._owner = turn.owner
            self._begun += 1
            self._due += 1
            due.append(turn)
        if not self._begun:
            self._owner = None
        return due

    def _tell(self, turn: Turn) -> None:
        try:
            turn.call(lambda: self._come(turn))
        except AiorlinfError:  # its loop has ended
            turn.end()

    def _come(self, turn: Turn) -> None:
        with self._lock:
            if turn.state is not _State.DUE:
                return
            turn.state = _State.GOING
            self._due -= 1
        turn.go(turn)


_all: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], Turns]] = weakref.WeakKeyDictionary()
_all_lock = threading.Lock()


def turns_of(runtime: Runtime, index: int, direction: str) -> Turns:
    """Of a device of this process."""
    with _all_lock:
        return _all.setdefault(runtime, {}).setdefault((index, direction), Turns())
