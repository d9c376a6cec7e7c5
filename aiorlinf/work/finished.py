"""A work that is over when it is made, with nothing to tell. Small sends end so, thousands of times a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorlinf.work.base import DONE, AsyncWork
from aiorlinf.work.deadline import NO_DEADLINE

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["FinishedWork", "finished"]


def _made_here() -> None:
    """Stands for the place where such a work was begun, which nobody asks for: it cannot fail."""


class FinishedWork(AsyncWork[None]):
    """Done with None. Everything but its home is the same for all of them, so it lies in the class; what is changed later, a then-step
    attached, say, goes into the instance."""

    __slots__ = ("__dict__",)

    _operation = "send"
    _detail: Any = None
    _abort = None
    _give_back = None
    _state = DONE
    _claims = 0
    _value: Any = None
    _entries = None
    _next = None
    _deadline = NO_DEADLINE
    _born = 0.0
    _code = _made_here.__code__
    _lasti = 0


_new = object.__new__


def finished(home: LoopHome) -> AsyncWork[None]:
    """A send that is done."""
    work = _new(FinishedWork)
    work._home = home
    return work
