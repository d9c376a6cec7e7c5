"""An event loop in a thread of its own, for synchronous programs and notebooks."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from typing import Any

import uvloop

from aiorlinf.errors import AiorlinfError
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome
from aiorlinf.work.threads import make_loop, start_thread

__all__ = ["LoopThread"]

_EXIT_SECONDS = 5.0
_HALT_SECONDS = 1.0


class LoopThread:
    """Runs a uvloop loop until `stop`.

    Attributes:
        home: what belongs to the loop.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = make_loop(uvloop.new_event_loop)
        self._started = threading.Event()
        self.home: LoopHome
        self._closing: AsyncWork[Any] | None = None
        self._thread = threading.Thread(target=self._run, args=(name,), name=name, daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self.loop.close()
            raise
        self._started.wait()
        if not _threads:
            atexit.unregister(_finish_all)
            atexit.register(_finish_all)
        _threads.add(self)

    def _run(self, name: str) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.home = LoopHome(self.loop, name=name)
            self._started.set()
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            self.loop.close()

    def will_close(self, work: AsyncWork[Any]) -> None:
        """`stop` will be called when this work is done; the end of the program waits a little for it."""
        self._closing = work

    def stop(self) -> None:
        """End the loop once what is scheduled now has run. Loop thread only."""
        # One turn later: whoever waits for the last work from outside is told through this loop.
        self.loop.call_soon(self.loop.stop)

    def join(self, timeout: float = _EXIT_SECONDS) -> None:
        """Wait for the thread to end."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def finish_closing(self) -> None:
        """At the end of the program: a close that was begun gets its time; anything else ends with the process."""
        if self._closing is not None:
            try:
                self._closing.wait(_EXIT_SECONDS)
            except (AiorlinfError, TimeoutError):
                return
            self.join()

    def halt(self) -> None:
        """At the end of the program: keep the thread from running any further.

        One that comes back from C++ (torch's) into an interpreter that is being finalized takes the process down with SIGABRT.
        """
        if not self._thread.is_alive():  # ended, or of the process that this one was forked from
            return
        halted = threading.Event()
        never = threading.Lock()
        never.acquire()

        def stand_still() -> None:
            halted.set()
            never.acquire()

        try:
            self.loop.call_soon_threadsafe(stand_still)
        except RuntimeError:  # it has just ended
            return
        halted.wait(_HALT_SECONDS)


_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _finish_all() -> None:
    for thread in list(_threads):
        thread.finish_closing()
    for thread in list(_threads):
        thread.halt()
