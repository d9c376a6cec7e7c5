"""Works that are over when they are made: small sends, and receives whose message waits. There are thousands of them in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiorlinf.work.base import DONE, AsyncWork
from aiorlinf.work.deadline import NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from aiorlinf.work.home import LoopHome

__all__ = ["ArrivedWork", "FinishedWork", "arrived", "finished"]


_NOTHING = cast("Generator[Any, None, None]", iter(()))
"""Over before it begins, always, and with None: one serves all."""


def _made_here() -> None:
    """Stands for the place where such a work was begun, which nobody asks for: it cannot fail."""


class FinishedWork(AsyncWork[None]):
    """Done with None, with nothing to tell.

    Everything but its home is the same for all of them, so it lies in the class; what is changed later, a then-step attached, say, goes
    into the instance.
    """

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

    def __await__(self) -> Generator[Any, None, None]:
        # As that of all works, but without a generator that would have nothing to do.
        home = self._home
        home.turns = turns = home.turns + 1
        return self._yield_once() if not turns & 63 else _NOTHING


class ArrivedWork(FinishedWork):
    """A receive that found its message waiting."""

    __slots__ = ()

    _operation = "recv"

    __await__ = AsyncWork.__await__


_new = object.__new__


def arrived(home: LoopHome, value: Any, give_back: Callable[[Any], object], detail: Any) -> AsyncWork[Any]:
    """A receive that is done with `value`; the other arguments are those of `AsyncWork`."""
    work = _new(ArrivedWork)
    work._home = home
    work._value = value
    work._give_back = give_back  # type: ignore[assignment]  # the class says None for all others
    work._detail = detail
    return work


def finished(home: LoopHome) -> AsyncWork[None]:
    """A send that is done."""
    work = _new(FinishedWork)
    work._home = home
    return work
