"""Process groups that nobody needs any more. To destroy one may take long, as its destructor joins threads that end only with the peer."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from aiorlinf.errors import AiorlinfError
from aiorlinf.work.threads import start_thread

__all__ = ["Unwanted"]


class Unwanted:
    """Those of one backend. Any thread.

    Each thread that destroys takes what there is, and no group is here twice: so one that waits keeps none of the others waiting.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[Any, Any]] = []
        self._inherited: list[tuple[Any, Any]] = []  # in a forked process: their threads are not here, so they are never destroyed
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def take(self, pair: Any) -> None:
        """Abort and destroy the `_group` of a pair, which has none from now on, and then let go of its `_store`. Nothing waits for it."""
        group, pair._group = pair._group, None
        if group is None:
            return
        self._groups.append((group, pair._store))
        del group  # whoever lets go of it last runs the destructor
        self._destroy()

    def run(self, thread: threading.Thread) -> None:
        """Start one that `wait` waits for, too, if the system gives another one; otherwise groups are left to the next."""
        try:
            start_thread(thread)
        except AiorlinfError:
            return
        self._threads.add(thread)

    def wait(self, seconds: float) -> None:
        """Until all are destroyed, but no longer."""
        if self._groups:
            self._destroy()
        end = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _destroy(self) -> None:
        self.run(threading.Thread(target=self._destroy_each, name="aiorlinf-retire", daemon=True))

    def _destroy_each(self) -> None:
        while self._groups:
            try:
                group, store = self._groups.pop()
            except IndexError:  # another thread has just taken the last one
                return
            try:
                group.abort()
            except RuntimeError:  # it has failed already, or this torch cannot abort it; the destructor does the rest
                pass
            del group, store

    def _forget(self) -> None:
        self._threads.clear()
        self._inherited.extend(self._groups)
        self._groups.clear()
