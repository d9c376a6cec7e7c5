"""An event loop whose clock jumps: code that sleeps for hours is tested in milliseconds.

::

    def test_it_tries_again_after_ten_minutes():
        run_virtual(main())  # as asyncio.run, on a virtual clock

    async def main():
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(600)
        assert asyncio.get_running_loop().time() - began == 600  # and no time has passed

When nothing is left to do but to wait for a timer, the clock goes to that timer at once. So timers go off in their order, each at its
very moment, and a busy machine changes nothing. It is for code with pure timers: `asyncio.sleep`, `timeout`, `wait_for`,
`loop.call_later`. While work is under way in threads (`asyncio.to_thread`) the clock stands still; sockets are looked at, but not waited
for as long as there is a timer. ``time.monotonic()`` and ``time.time()`` go on as ever, so give your code its clock as a function; what
aiorlinf's own workers and channels are given as ``timeout=`` or ``seconds=`` is real time, too.

For pytest-asyncio: ``asyncio.Runner(loop_factory=VirtualClock)``, or the hook ``pytest_asyncio_loop_factories``; a test without
``async`` that calls `run_virtual` needs neither.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from aiorlinf.errors import DeadlineExceeded

__all__ = ["VirtualClock", "run_virtual"]

T = TypeVar("T")

DEFAULT_IDLE_S = 10.0


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own, which begins at 0. See the module.

    Attributes:
        idle_limit_s: real seconds that it waits when there is neither a timer nor a thread at work; then everything hangs, for good, and
            that is an error.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._at_work = 0
        self.idle_limit_s = DEFAULT_IDLE_S
        super().__init__(_Jumping(self))
        self._clock_resolution = 1e-6  # or a timer that is far away would never be due, for rounding

    def time(self) -> float:
        """Seconds on the virtual clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Set the clock forward, as if the loop had been busy for so long: what is due meanwhile is late."""
        self._now += seconds

    def _jump(self) -> None:
        """To the next timer, exactly."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # asyncio's heap of timers
        self._now = max(self._now, scheduled[0].when())

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # one way to call it
        """As asyncio's; the clock stands still until it is over."""
        future: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self._at_work += 1
        future.add_done_callback(self._one_less)
        return future

    def _one_less(self, _: object) -> None:
        self._at_work -= 1


class _Jumping(selectors.DefaultSelector):
    """Does not wait for a timer, but sets the clock to it."""

    def __init__(self, loop: VirtualClock) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready: list[Any] = super().select(0)
        if ready or timeout == 0:
            return ready
        loop = self._loop
        if loop._at_work:
            found: list[Any] = super().select(1.0)
            return found
        if timeout is not None:
            loop._jump()
            return ready
        begin = time.monotonic()
        while not ready:
            ready = super().select(max(0.0, begin + loop.idle_limit_s - time.monotonic()))
            if not ready and time.monotonic() - begin >= loop.idle_limit_s:
                raise DeadlineExceeded(
                    f"nothing is left that could happen: no timer, no thread at work, and nothing from outside for {loop.idle_limit_s:g} s",
                    step="wait",
                    elapsed=loop.idle_limit_s,
                )
        return ready


def run_virtual(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """As `asyncio.run`, on a virtual clock; its value.

    Raises:
        DeadlineExceeded: everything waits for something that cannot come any more (see `VirtualClock.idle_limit_s`).
    """
    with asyncio.Runner(debug=debug, loop_factory=VirtualClock) as runner:
        return runner.run(main)
