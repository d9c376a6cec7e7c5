"""Then-steps."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiorlinf.work.base import CANCELLED, DONE, FAILED, AsyncWork
from aiorlinf.work.following import FollowingWork

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["AsyncFuncWork"]

R = TypeVar("R")


class AsyncFuncWork(FollowingWork[R]):
    """A function that runs when the work before it is done, and whatever it returns, followed to its end.

    Cancelling it before the function has run cancels backwards; afterwards it cancels what the function returned.
    """

    __slots__ = ("_args", "_func", "_kwargs", "_threaded")

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
        if operation is None:
            operation = getattr(func, "__name__", None) or type(func).__name__
        super().__init__(home, operation, abort=abort, give_back=give_back, detail=detail)
        self._func: Callable[..., Any] | None = func  # None once it was called
        self._args = args
        self._kwargs = kwargs
        self._source = source
        self._threaded = threaded
        self._context = contextvars.copy_context()

    def _start_alone(self) -> None:
        """Run the function with no work before it."""
        func, args, kwargs = self._take_call()
        if not self._state:
            self._run(func, args, kwargs)

    def _advance(self) -> None:
        if self._func is None:
            super()._advance()
            return
        source, self._source = self._source, None
        func, args, kwargs = self._take_call()
        if self._state or not isinstance(source, AsyncWork):
            return
        if source._state == DONE:
            source._give_back = None
            value = source._value
            del source
            self._run(func, (value, *args), kwargs)
        elif source._state == FAILED:
            self._share(source._value)
        else:
            self._settle(CANCELLED, None)

    def _take_call(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The call, whose function and arguments are not kept alive longer than needed."""
        func, args, kwargs = self._func, self._args, self._kwargs
        assert func is not None
        self._func, self._args, self._kwargs = None, (), {}
        return func, args, kwargs

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = self._context
        assert context is not None
        if self._threaded:
            self._call_in_thread(partial(context.run, func, *args, **kwargs))
            return
        try:
            value = context.run(func, *args, **kwargs)
        except (KeyboardInterrupt, SystemExit) as error:
            self._fail(_without_our_frame(error))
            raise
        except BaseException as error:  # whatever the function raises is the outcome of this step
            self._fail(_without_our_frame(error))
        else:
            self._follow(value)


def _without_our_frame(error: BaseException) -> BaseException:
    """The frame of ``_run`` refers to the work, and the work will refer to the error: leave it out, or only the garbage collector could free them."""
    trace = error.__traceback__
    return error.with_traceback(trace.tb_next if trace is not None else None)


AsyncWork._step_type = AsyncFuncWork
