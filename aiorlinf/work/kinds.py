"""Works that come from elsewhere: torch.distributed, channels, other libraries' futures."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiorlinf.errors import ClosedError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.following import FollowingWork

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["AsyncChannelWork", "AsyncCollWork", "TorchFuture", "TorchWork"]

T = TypeVar("T")


class TorchFuture(Protocol):
    """What is needed of a ``torch.futures.Future``."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None: ...

    def value(self) -> Any: ...


class TorchWork(Protocol):
    """What is needed of a ``torch.distributed.Work``."""

    def get_future(self) -> Any: ...


class AsyncCollWork(AsyncWork[T]):
    """One or more torch.distributed works as one: done when all are, failed as soon as one is.

    torch's works end in threads of the backend; this one ends on its home loop. A started transfer cannot be recalled: cancelling lets go
    of the result, and ``abort`` is the producer's chance to disturb the transfer; but the works, and ``keep``, are held until torch has
    really let go of the memory, and only then ``on_drained`` is called.

    Args:
        works: works or futures of torch; each work must have a future (Gloo's point-to-point ones have none).
        value_fn: makes the value when all are done; without it the value is None.
        keep: held until all are over, such as the tensors.
        on_drained: called once on the home thread when all are over, however they ended and whatever became of this work.
        map_error: turns torch's error into the one to fail with.

    The other arguments are those of AsyncWork. Any thread may make one.
    """

    __slots__ = ("_keep", "_left", "_map_error", "_on_drained", "_value_fn")

    def __init__(
        self,
        home: LoopHome,
        operation: str,
        works: Sequence[TorchWork | TorchFuture],
        *,
        value_fn: Callable[[], T] | None = None,
        keep: Any = None,
        on_drained: Callable[[], object] | None = None,
        map_error: Callable[[BaseException], BaseException] | None = None,
        abort: Callable[[AsyncWork[T]], object] | None = None,
        give_back: Callable[[T], object] | None = None,
        detail: Any = None,
    ) -> None:
        super().__init__(home, operation, abort=abort, give_back=give_back, detail=detail)
        futures: list[TorchFuture] = [getattr(work, "get_future", lambda work=work: work)() for work in works]
        self._left = len(futures)
        self._keep: Any = (keep, list(works))
        self._value_fn = value_fn
        self._on_drained = on_drained
        self._map_error = map_error
        for future in futures:
            future.add_done_callback(self._future_over)
        if not futures:
            home.call(self._drained)

    def _future_over(self, future: TorchFuture) -> None:
        """Called by a thread of the backend, or at once by ours. Nothing may be raised into torch."""
        error: BaseException | None = None
        try:
            future.value()
        except Exception as raised:  # torch raises whatever the backend did
            error = raised.with_traceback(None)
        try:
            self._home.call_soon(self._one_over, error)
        except ClosedError:  # nobody is left to tell
            pass

    def _one_over(self, error: BaseException | None) -> None:
        self._left -= 1
        if error is not None and not self._state:
            self._fail(error if self._map_error is None else self._map_error(error))
        if not self._left:
            self._drained()

    def _drained(self) -> None:
        self._keep = None
        on_drained, self._on_drained = self._on_drained, None
        value_fn, self._value_fn = self._value_fn, None
        if not self._state:
            self._conclude(value_fn)
        if on_drained is not None:
            on_drained()

    def _conclude(self, value_fn: Callable[[], Any] | None) -> None:
        value = None
        if value_fn is not None:
            try:
                value = value_fn()
            except Exception as error:  # making the value is part of the operation
                self._fail(error)
                return
        self._finish(value)  # type: ignore[arg-type]  # without value_fn, T is None


class AsyncChannelWork(FollowingWork[T]):
    """A call whose outcome comes from an awaitable or a future of another library.

    Cancelling cancels the source: a coroutine is asked to end, a future is cancelled.

    Args:
        source: a coroutine, a work, another awaitable, an asyncio or concurrent future. Anything else is taken for the value itself.

    The other arguments are those of AsyncWork. Any thread may make one; a coroutine runs on the home loop.
    """

    __slots__ = ()

    def __init__(
        self,
        home: LoopHome,
        operation: str,
        source: Awaitable[T] | concurrent.futures.Future[T],
        *,
        abort: Callable[[AsyncWork[T]], object] | None = None,
        give_back: Callable[[T], object] | None = None,
        detail: Any = None,
    ) -> None:
        super().__init__(home, operation, abort=abort, give_back=give_back, detail=detail)
        home.call(self._follow, source)
