"""Loops in other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome

__all__ = ["LoopThread", "finish_later", "turns"]

T = TypeVar("T")


class LoopThread:
    """A loop that runs in a thread of its own, with a home on it."""

    home: LoopHome

    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop], problems: list[dict[str, Any]] | None = None) -> None:
        self.loop = factory()
        self._problems = problems
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._run, name="loop-thread")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_debug(True)
        if self._problems is not None:
            self.loop.set_exception_handler(lambda _loop, context: self._problems.append(context))  # type: ignore[union-attr]
        self.home = LoopHome(self.loop, name="other")
        self.loop.call_soon(self._ready.set)
        self.loop.run_forever()
        self.loop.run_until_complete(self.home.close())
        self.loop.close()

    def __enter__(self) -> LoopThread:
        self.thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        """End the loop and the thread."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        assert not self.thread.is_alive()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def run(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine there."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    def do(self, fn: Callable[..., T], *args: Any) -> T:
        """Call something there and wait for what it returns."""

        async def call() -> T:
            return fn(*args)

        return self.run(call()).result(10)


def finish_later(work: AsyncWork[T], value: T, delay: float = 0.005) -> None:
    """Finish it in a moment; any thread."""
    loop = work.home.loop
    loop.call_soon_threadsafe(lambda: loop.call_later(delay, work._finish, value))


async def turns(count: int = 3) -> None:
    """Let the loop go round a few times."""
    for _ in range(count):
        await asyncio.sleep(0)
