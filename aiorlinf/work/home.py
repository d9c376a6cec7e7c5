"""The loop that owns a worker's state, and the ways onto it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from aiorlinf.errors import ClosedError, ForkedHandle
from aiorlinf.work.pool import ThreadPool

if TYPE_CHECKING:
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.poller import CompletionPoller
    from aiorlinf.work.steps import AsyncFuncWork

__all__ = ["Advancing", "LoopHome", "Tracer"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_log = logging.getLogger("aiorlinf")

STEPS_PER_TURN = 256
"""After this many then-steps in one go the loop gets a turn."""

CALLS_PER_TURN = 1024
"""After this many handed-over calls in one go the loop gets a turn."""


class Tracer(Protocol):
    """Records what becomes of works. Home thread only."""

    def step(self, step: AsyncWork[Any], source: AsyncWork[Any]) -> None:
        """This then-step begins, with the value of that work."""

    def call(self, work: AsyncWork[Any], subject: str) -> None:
        """This call has begun, and concerns that."""

    def ahead(self, operation: str, subject: str, begun: float, how: str) -> None:
        """What has begun then, by itself and without a work, ends now, in this way (one of `work.base.STATE_NAMES`)."""


class Advancing(Protocol):
    """Something the trampoline can push one step forward."""

    def _advance(self) -> None:
        """One step."""


class LoopHome:
    """The loop that owns a worker's state, and what belongs to it: its tasks, private threads and completion poller.

    All state of a worker is touched on this loop's thread only; ``call`` is the one way in from elsewhere.

    Attributes:
        loop: the loop.
        thread_id: ident of the thread it runs in; 0 in a fork, where nobody is on it.
        name: used for thread names and in logs.
        turns: awaits of finished works so far; every 64th lets the loop have a turn.
        debug: the loop's debug mode when the home was made; works then check that they are finished on this thread.
        trace: is told of then-steps and calls, None: nobody is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, name: str = "aiorlinf") -> None:
        self.loop = loop
        self.name = name
        self.thread_id: int = threading.get_ident()
        self.turns = 0
        self.debug: bool = loop.get_debug()
        self.closed: bool = False
        self.forked = False
        self.trace: Tracer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself holds tasks only weakly
        self._steps: deque[Advancing] = deque()
        self._stepping = False
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._calls_scheduled = False
        self._at_rest: threading.RLock | None = None
        self._pool: ThreadPool | None = None
        self._poller: CompletionPoller | None = None
        _remember(self)

    def bind(self) -> None:
        """Say that the loop runs in the calling thread."""
        self.thread_id = threading.get_ident()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "forked" if self.forked else "open"
        return f"<LoopHome {self.name} {state}>"

    # -- ways in ----------------------------------------------------------------------------------------------

    def on_home(self) -> bool:
        """Whether the caller is on the home thread."""
        return threading.get_ident() == self.thread_id

    def call(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``fn`` on the home thread: now if that is the caller's thread, else soon and in call order.

        Raises:
            ClosedError: the loop is closed, so nothing can run there any more.
            ForkedHandle: this process is a fork of the one that made the home.
        """
        if threading.get_ident() == self.thread_id:
            fn(*args)
        else:
            self.call_soon(fn, *args)

    def call_soon(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``fn`` on the home thread in a later turn, whatever thread this is; raises as ``call`` does.

        Calls handed over before the loop gets to them share one wake-up of the loop.
        """
        if self.forked:
            raise ForkedHandle(f"{self.name} was made before a fork", hint="make a new worker in the child process")
        if self.loop.is_closed() and self._at_rest is None:  # in this order: it comes to rest first, and is closed then
            raise ClosedError(f"the event loop of {self.name} is closed")
        self._calls.append((fn, args))
        if self._made_at_rest():  # asked after the append: whoever comes to rest in between finds the call
            return
        if not self._calls_scheduled:
            # _run_calls clears the flag before it looks at the deque, so whoever finds it set is still seen.
            self._calls_scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._run_calls)
            except RuntimeError as error:
                if not self._made_at_rest():  # it may have come to rest since we asked, and been closed
                    self._calls.clear()
                    raise ClosedError(f"the event loop of {self.name} is closed") from error

    def _run_calls(self) -> None:
        self._calls_scheduled = False
        calls = self._calls
        for _ in range(min(len(calls), CALLS_PER_TURN)):
            fn, args = calls.popleft()
            try:
                fn(*args)
            except (KeyboardInterrupt, SystemExit):
                self._run_calls_later()
                raise
            except BaseException as error:  # one caller's failure must not lose the calls of the others
                self.report(f"a call handed over to {self.name} failed", error)
        self._run_calls_later()

    def _run_calls_later(self) -> None:
        if self._calls and not self._calls_scheduled:
            self._calls_scheduled = True
            self.loop.call_soon_threadsafe(self._run_calls)

    def rest(self) -> None:
        """The loop is about to end, and all that lives on it is at rest: from now on calls run in the thread of whoever makes them, one
        after the other. Home thread only."""
        self._at_rest = threading.RLock()
        self.thread_id = 0
        self.debug = False  # works may be finished in any thread now
        self._made_at_rest()

    def _made_at_rest(self) -> bool:
        """Make the calls that wait in this thread, if the loop has come to rest. False: it has not."""
        lock = self._at_rest
        if lock is None:
            return False
        with lock:
            while self._calls:
                fn, args = self._calls.popleft()
                fn(*args)
        return True

    # -- what runs here ---------------------------------------------------------------------------------------

    def spawn(self, coro: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run a coroutine as a task that is kept until it is done; an exception it ends with is logged once. Home thread only."""
        task = self.hold(coro, name)
        task.add_done_callback(self._log_outcome)
        return task

    def hold(self, coro: Coroutine[Any, Any, R], name: str, context: Any = None) -> asyncio.Task[R]:
        """As ``spawn``, for a caller who looks at the outcome himself."""
        if self.closed or self.loop.is_closed():
            coro.close()
            raise ClosedError(f"{self.name} is closed")
        task = self.loop.create_task(coro, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _log_outcome(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task %s of %s failed", task.get_name(), self.name, exc_info=error)

    def submit(self, fn: Callable[[*Ts], R], *args: *Ts) -> AsyncFuncWork[R]:
        """Run a blocking function in the private threads; any thread may call. Cancelling the work drops the call if it has not
        started, and its result otherwise. The work fails with ClosedError if the home is closed first."""
        from aiorlinf.work.steps import AsyncFuncWork

        work: AsyncFuncWork[R] = AsyncFuncWork(self, fn, args, {}, threaded=True)
        self.call(work._start_alone)
        return work

    @property
    def pool(self) -> ThreadPool:
        """The private threads, two at most, started when first used."""
        if self._pool is None:
            if self.closed:
                raise ClosedError(f"{self.name} is closed")
            self._pool = ThreadPool(self.name)
        return self._pool

    def drop_pool(self) -> None:
        """Let the private threads end; the next use starts new ones. Home thread only."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @property
    def poller(self) -> CompletionPoller:
        """The one that asks pending completions; made when first used. Home thread only."""
        if self._poller is None:
            if self.closed:
                raise ClosedError(f"{self.name} is closed")
            from aiorlinf.work.poller import CompletionPoller

            self._poller = CompletionPoller(self)
        return self._poller

    def report(self, message: str, error: BaseException) -> None:
        """Hand an error that nobody waits for to the loop's exception handler."""
        self.loop.call_exception_handler({"message": message, "exception": error})

    # -- the trampoline ---------------------------------------------------------------------------------------

    def advance(self, step: Advancing) -> None:
        """Push a then-step forward, now or right after the one that is being pushed.

        A loop instead of recursion, so that the length of a chain is limited by memory only. Home thread only.
        """
        self._steps.append(step)
        if not self._stepping:
            self._run_steps()

    def _run_steps(self) -> None:
        if self._stepping:
            return
        self._stepping = True
        steps = self._steps
        left = STEPS_PER_TURN
        try:
            while steps:
                if left == 0 and not self.loop.is_closed():
                    break
                left -= 1
                steps.popleft()._advance()
        finally:
            self._stepping = False
            if steps:
                self.loop.call_soon(self._run_steps)

    # -- the end ----------------------------------------------------------------------------------------------

    def close_nowait(self) -> None:
        """Cancel the tasks but for the calling one, refuse the thread calls that have not started, and fail what the poller watches.

        Home thread only, or after the loop has ended. Returns at once; a second call does nothing.
        """
        if self.closed:
            return
        self.closed = True
        if self._poller is not None:
            self._poller.close()
        if self._pool is not None:
            self._pool.close()
        if not self.loop.is_closed():
            me = asyncio.current_task(self.loop)
            for task in list(self._tasks):
                if task is not me:
                    task.cancel()

    async def close(self, timeout: float = 1.0) -> None:
        """``close_nowait``, then wait up to ``timeout`` seconds for the tasks and threads to end.

        Cancelling stops the waiting, nothing else.
        """
        self.close_nowait()
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        await asyncio.sleep(0)  # the refused calls are on their way to their works
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        pause = 0.0005
        while self._pool is not None and self._pool.alive() and loop.time() < end:
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)


_homes: weakref.WeakSet[LoopHome] = weakref.WeakSet()
_watching_forks = False


def _remember(home: LoopHome) -> None:
    global _watching_forks
    _homes.add(home)
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_disown)


def _disown() -> None:
    for home in list(_homes):
        home.forked = True
        home.thread_id = 0  # so that every way in goes through call_soon, which refuses
