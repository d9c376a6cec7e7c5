"""What messages of one kind have cost with one way to send them, and what that says of the next. Pure.

Costs are seconds per byte. Whatever else happens on a machine makes a message slower, never quicker: so the lower end of the last few
counts, not their mean, and neither one that had bad luck nor a cold first one spoils the picture. A machine that stays busy is no bad
luck, and slows down some more than others: so it is never less than the best of the very last.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["Outcomes"]

_REMEMBERED = 8
_EXPIRES_S = 30.0
_EXPIRES_MESSAGES = 100
"""What was measured is used until both have passed: to try everything again must stay a small part of all that is sent."""

_LAST = 6
_CHANGED = 2.0
_IN_A_ROW = 3
"""So many in a row that took so many times as long as before: it is no bad luck any more."""


class _Outcome(NamedTuple):
    """`message`: how many of the kind there had been."""

    when: float
    message: int
    cost: float


class Outcomes:
    """See the module.

    Attributes:
        cost: what the next one is likely to cost when nothing disturbs it; None: nothing is known.
        tries: messages since it was last the best choice.
    """

    __slots__ = ("_last", "cost", "tries")

    def __init__(self) -> None:
        self.cost: float | None = None
        self.tries: int = 0
        self._last: deque[_Outcome] = deque(maxlen=_REMEMBERED)

    def note(self, cost: float, now: float, message: int) -> bool:
        """A message has cost so much. True: since a few messages it takes far longer than before, and what was before is forgotten."""
        self.tries += 1
        last = self._last
        last.append(_Outcome(now, message, cost))
        costs = [each.cost for each in last]
        recent, before = costs[-_IN_A_ROW:], costs[:-_IN_A_ROW]
        changed = bool(before) and min(recent) > _CHANGED * _lower(before)
        if changed:
            for _ in before:
                last.popleft()
        self.cost = _likely(recent if changed else costs)
        return changed

    def forget_old(self, now: float, message: int) -> None:
        """Drop what says nothing of the present any more."""
        last = self._last
        while last and now - last[0].when >= _EXPIRES_S and message - last[0].message >= _EXPIRES_MESSAGES:
            last.popleft()
            self.cost = _likely([each.cost for each in last]) if last else None

    @property
    def count(self) -> int:
        """Of those that are remembered."""
        return len(self._last)

    @property
    def latest(self) -> float | None:
        """What the last one has cost: where things have become better, it is the first that shows it."""
        return self._last[-1].cost if self._last else None

    def since(self, message: int) -> int:
        """Messages of the kind since the last of these."""
        return message - self._last[-1].message if self._last else message


def _likely(costs: list[float]) -> float:
    return max(_lower(costs), min(costs[-_LAST:]))


def _lower(costs: list[float]) -> float:
    """The least of up to four, the second least of more: one alone may have had good luck."""
    return sorted(costs)[(len(costs) - 1) // 4]
