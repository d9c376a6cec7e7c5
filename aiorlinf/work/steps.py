"""Then-steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiorlinf.work.base import CANCELLED, DONE, FAILED, AsyncWork
from aiorlinf.work.deadline import current_deadline
from aiorlinf.work.following import FollowingWork

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["AsyncFuncWork"]

R = TypeVar("R")


class AsyncFuncWork(FollowingWork[R]):
    """A function that runs when the work before it is done, and whatever it returns, followed to its end.

    Cancelling it before the function has run cancels backwards; afterwards it cancels what the function returned. A coroutine is asked to
    end and may take its time over it; the work is cancelled at once, and an error of the coroutine after that is logged.
    """

    __slots__ = ("_args", "_func", "_kwargs", "_threaded", "_unbegun")

    _func: Callable[..., Any] | None  # None once it was called
    _unbegun: tuple[AsyncWork[Any], Coroutine[Any, Any, Any]] | None
    """The work whose value a coroutine was made with, and the coroutine, until its first line runs: before that the value can go back."""

    def __init__(
        self,
        home: LoopHome,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        source: AsyncWork[Any] | None = None,
        threaded: bool = False,
        operation: str | None = None,
        abort: Callable[[AsyncWork[R]], object] | None = None,
        give_back: Callable[[R], object] | None = None,
        detail: Any = None,
    ) -> None:
        if not callable(func):
            raise TypeError(f"a then-step needs something to call, not {func!r}")
        super().__init__(
            home,
            _name_of(func) if operation is None else operation,
            abort=abort,
            give_back=give_back,
            detail=detail,
        )
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._threaded = threaded
        self._unbegun = None
        self._source = source
        if source is not None:
            self._deadline = source._deadline

    def _start_alone(self) -> None:
        """Run the function with no work before it."""
        func, args, kwargs = self._take_call()
        if func is not None and not self._state:
            self._run(func, args, kwargs, here=True)

    def _advance(self) -> None:
        if self._func is None:
            super()._advance()
            return
        source, self._source = self._source, None
        func, args, kwargs = self._take_call()
        if func is None or not isinstance(source, AsyncWork):
            return
        self._queued = False
        if source._state == DONE:
            if self._home.trace is not None:
                self._home.trace.step(self, source)
            args = (source._value, *args)
            if source._give_back is not None:
                self._run(func, args, kwargs, source)
                return
            source._claims -= 1
            del source
            self._run(func, args, kwargs)
            return
        source._claims -= 1
        if source._state == FAILED:
            self._settle(FAILED, source._value)
        else:
            self._settle(CANCELLED, None)

    def _take_call(self) -> tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]]:
        """The call; neither the function nor its arguments are kept alive longer than needed."""
        func, args, kwargs = self._func, self._args, self._kwargs
        self._func, self._args, self._kwargs = None, (), {}
        return func, args, kwargs

    def _run(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: AsyncWork[Any] | None = None,
        *,
        here: bool = False,
    ) -> None:
        """Call the function.

        Args:
            source: a work whose value goes back there unless something begins with it.
            here: what was to run in a private thread runs in this one if there is none. Not a user's then-step, which may take for ever.
        """
        context = self._context
        if self._deadline.bounded:
            context.run(current_deadline.set, self._deadline)
        if self._threaded:
            _take(source)
            self._call_in_thread(partial(context.run, func, *args, **kwargs), here)
            return
        try:
            value = context.run(func, *args, **kwargs)
        except (KeyboardInterrupt, SystemExit) as error:
            _take(source)
            self._fail(_without_our_frame(error))
            raise
        except BaseException as error:  # whatever the function raises is the outcome of this step
            _take(source)
            self._fail(_without_our_frame(error))
        else:
            if source is not None and not self._state and asyncio.iscoroutine(value):
                self._unbegun = (source, value)
                value = self._begin(value)
            else:
                _take(source)
            del source
            self._follow(value)

    async def _begin(self, coro: Coroutine[Any, Any, R]) -> R:
        if self._unbegun is not None:
            _take(self._unbegun[0])
            self._unbegun = None
        return await coro

    def _let_go(self) -> None:
        self._take_call()
        unbegun, self._unbegun = self._unbegun, None
        if unbegun is not None:
            source, coro = unbegun
            coro.close()
            source._unclaim()


def _take(source: AsyncWork[Any] | None) -> None:
    """A step has begun with the value of this work, to which it has a claim: it cannot go back any more."""
    if source is not None:
        source._claims -= 1
        source._give_back = None


def _name_of(func: Callable[..., Any]) -> str:
    """What to call a function in a chain."""
    while isinstance(func, partial):
        func = func.func
    return getattr(func, "__name__", None) or type(func).__name__


def _without_our_frame(error: BaseException) -> BaseException:
    """Leave the frame of ``_run`` out of the traceback: it holds the work, the work will hold the error, and only the garbage collector
    could free that circle."""
    trace = error.__traceback__
    return error.with_traceback(trace.tb_next if trace is not None else None)


AsyncWork._step_type = AsyncFuncWork
