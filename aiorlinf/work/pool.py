"""A few private threads for work that blocks. Never the loop's default executor: user code may have filled that one."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from aiorlinf.errors import AiorlinfError, ClosedError
from aiorlinf.work.threads import start_thread

__all__ = ["Job", "ThreadPool"]


class Job:
    """One call on its way to a pool thread. ``report`` is called exactly once, in whatever thread, unless the job is withdrawn first."""

    __slots__ = ("_call", "_report")

    def __init__(self, call: Callable[[], Any], report: Callable[[Any, BaseException | None], None]) -> None:
        self._call: Callable[[], Any] | None = call
        self._report: Callable[[Any, BaseException | None], None] | None = report

    def withdraw(self) -> None:
        """Do not start it, if it has not started. Its report is not called then."""
        self._call = None

    def run(self) -> None:
        call, self._call = self._call, None
        report, self._report = self._report, None
        if call is None or report is None:
            return
        value: Any = None
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as raised:  # whatever the user's function raises belongs to the work, not to this thread
            trace = raised.__traceback__
            error = raised.with_traceback(trace.tb_next if trace is not None else None)
        del call  # drop the arguments before the report may wake somebody who counts references
        report(value, error)

    def refuse(self, error: BaseException) -> None:
        call, self._call = self._call, None
        report, self._report = self._report, None
        if call is not None and report is not None:
            report(None, error)


class ThreadPool:
    """At most ``max_workers`` daemon threads, started when first needed.

    Daemon threads, because a call that never returns must not keep the interpreter from ending; idle ones are ended and joined at exit,
    because a thread that is stopped while it holds native resources is not safe.
    """

    def __init__(self, name: str, max_workers: int = 2) -> None:
        self._name = name
        self._max = max_workers
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads waiting for a job, less the jobs already on their way to them
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        _open_pools.add(self)

    def submit(self, call: Callable[[], Any], report: Callable[[Any, BaseException | None], None], *, here: bool = False) -> Job:
        """Run ``call`` in a thread, then ``report(value, error)`` in that thread.

        Args:
            here: where the system gives no thread at all, run it in the caller's, before this returns.

        Raises:
            ClosedError: the pool was closed.
            AiorlinfError: the system gives no thread at all, and it is not to be run here.
        """
        job = Job(call, report)
        with self._lock:
            if self._closed:
                raise ClosedError(f"the threads of {self._name} are closed")
            if self._queue_up(job, here):
                return job
        job.run()
        return job

    def _queue_up(self, job: Job, here: bool) -> bool:
        """Give it to a thread, to a new one if no other is idle. False: there is none."""
        if self._idle <= 0 and len(self._threads) < self._max:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                start_thread(thread)
            except AiorlinfError:
                if not self._threads:
                    if here:
                        return False
                    raise
                self._idle -= 1
            else:
                self._threads.append(thread)
        else:
            self._idle -= 1
        self._jobs.put(job)
        return True

    def close(self) -> None:
        """Refuse what has not started with ClosedError and let the threads end. Returns at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting: list[Job] = []
            while True:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is not None:
                    waiting.append(job)
            for _ in self._threads:
                self._jobs.put(None)
        for job in waiting:
            job.refuse(ClosedError(f"{self._name} was closed before this call started"))

    def alive(self) -> int:
        """How many threads still run."""
        return sum(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the threads to end. Blocks; not for a loop's thread."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return not self.alive()

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job.run()
            del job  # an idle thread must not keep the last call's result alive
            with self._lock:
                self._idle += 1


_open_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@atexit.register  # as this module is imported, so after those who need the threads for what they do at the end (`work.loop_thread`)
def _close_all() -> None:
    pid = os.getpid()
    # What a fork has inherited has no threads there, and perhaps a lock that one of them held.
    pools = [pool for pool in list(_open_pools) if pool._pid == pid]
    for pool in pools:
        pool.close()
    for pool in pools:
        pool.join(0.2)
