"""The thread in which the workers of this process say that they live, whatever their own loops are doing."""

from __future__ import annotations

import asyncio
import os
import threading

from aiorlinf.errors import InternalError
from aiorlinf.work.threads import make_loop, start_thread

__all__ = ["LifeThread", "acquire_life_thread"]

_JOIN_LIMIT_S = 5.0


class LifeThread:
    """A loop in a thread, shared by its users; made by `acquire_life_thread`, each use is ended by `release`."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = make_loop(asyncio.SelectorEventLoop)
        self.users: int = 0
        self._pid = os.getpid()
        # daemon: an exit without close must be prompt, and with the process its connections end
        self._thread = threading.Thread(target=self._run, name="aiorlinf heartbeat", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self.loop.close()
            raise

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._wind_up())
            self.loop.close()

    async def _wind_up(self) -> None:
        for _ in range(3):  # connections that were just aborted are closed in a later turn
            await asyncio.sleep(0)
        await self.loop.shutdown_default_executor()  # name look-ups

    @property
    def inside(self) -> bool:
        """The caller is in this thread."""
        return threading.current_thread() is self._thread

    def release(self) -> None:
        """End one use. The last one ends the thread, and waits for that. In a child process after a fork it does nothing."""
        global _current
        if self._pid != os.getpid():
            return
        with _lock:
            if self.users < 1:
                raise InternalError("the heartbeat thread is released more often than it was acquired")
            self.users -= 1
            if self.users:
                return
            if _current is self:
                _current = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.inside:
            self._thread.join(_JOIN_LIMIT_S)


_lock = threading.Lock()
_current: LifeThread | None = None
_fork_hook = False  # whether `_forget` is called in the children of this process


def _forget() -> None:
    """In a child: the thread is the parent's, and the lock may have been held by another thread at the fork."""
    global _lock, _current
    _lock = threading.Lock()
    _current = None


def acquire_life_thread() -> LifeThread:
    """Use this process's thread, which is started now if this is its first use."""
    global _current, _fork_hook
    with _lock:
        if not _fork_hook:
            os.register_at_fork(after_in_child=_forget)
            _fork_hook = True
        if _current is None:
            _current = LifeThread()
        _current.users += 1
        return _current
