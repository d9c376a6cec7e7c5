"""AsyncWork: one operation under way."""

from __future__ import annotations

import asyncio
import contextvars
from _thread import allocate_lock, get_ident
from asyncio import CancelledError, Future, InvalidStateError, get_running_loop
from collections.abc import Awaitable, Callable, Generator, Sequence
from sys import _getframe
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from aiorlinf.errors import ClosedError, DeadlineExceeded, ForkedHandle, UnsupportedObject, UsageError, WouldBlockLoop
from aiorlinf.work.deadline import NO_DEADLINE, Deadline
from aiorlinf.work.failure import Failure
from aiorlinf.work.sites import INSIDE, describe_site
from aiorlinf.work.waiters import Callback, Entry, LoopWaiter, OutsideWaiter, ThreadWaiter, wake

if TYPE_CHECKING:
    from types import CodeType

    from aiorlinf.work.home import LoopHome
    from aiorlinf.work.steps import AsyncFuncWork

__all__ = ["AsyncWork", "pending"]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

PENDING = 0
DONE = 1
FAILED = 2
CANCELLED = 3
STATE_NAMES = ("pending", "done", "failed", "cancelled")

SLICE = 1.0
"""Seconds after which those who wait from outside look whether the home loop still exists."""

_claim = allocate_lock()
"""Decides between somebody who takes a value on another thread and a cancel on the home thread that gives it back.
Held for a few instructions, and only for works that have a ``give_back``."""


class AsyncWork(Generic[T]):
    """One operation under way: awaitable from any loop, waitable from any thread, chainable.

    It began when it was made; nobody has to look at it for it to complete. Awaiting a finished work gives its value again, as often as
    asked. Cancelling a task that awaits a work cancels the work, as with ``asyncio.Future``; the passing of a limit in ``async_wait`` or
    ``wait`` leaves it alive.

    States: pending, then once and for all done (with a value), failed (with an error) or cancelled. One exception: a work made with
    ``give_back`` that is done, and whose value nobody has taken, can still be cancelled; the value then goes back where it came from.

    The producer makes it in any thread, and ends it with ``_finish`` or ``_fail`` on the home thread. Both may run then-steps, that is
    user code, before they return, so producers bring their own state in order first. Both return False if the work was over already.

    Args:
        home: whose loop ends it.
        operation: the public call, such as ``"recv"``.
        abort: called once, on the home thread, when the work is cancelled or its deadline passes while it is pending; stops the
            transport side.
        give_back: called with the value, on the home thread, when the work is cancelled between its completion and the moment somebody
            takes the value; not once a then-step has begun with it.
        detail: what ``repr`` shows after the operation; only ``str()`` of it is used, and only then.
    """

    __slots__ = (
        "__weakref__",
        "_abort",
        "_born",
        "_claims",
        "_code",
        "_deadline",
        "_detail",
        "_entries",
        "_give_back",
        "_home",
        "_lasti",
        "_next",
        "_operation",
        "_state",
        "_value",
    )

    _step_type: ClassVar[type[AsyncFuncWork[Any]]]  # set by steps.py: a then-step is itself a work

    _home: LoopHome
    _state: int
    _value: Any  # the value when done, the Failure when failed
    _entries: Entry | Future[bool] | list[Entry | Future[bool]] | None  # who is told at the end, in order; None again after it
    _claims: int  # who was told, or will be, and has not taken the value yet; only used to decide about give_back
    _abort: Callable[[AsyncWork[T]], object] | None
    _give_back: Callable[[T], object] | None  # None again once the value was taken
    _deadline: Deadline  # the budget that then-steps inherit
    _next: AsyncFuncWork[Any] | None  # the first then-step
    _code: CodeType  # with _lasti: the instruction outside this package that began it
    _lasti: int

    def __init__(
        self,
        home: LoopHome,
        operation: str,
        *,
        abort: Callable[[AsyncWork[T]], object] | None = None,
        give_back: Callable[[T], object] | None = None,
        detail: Any = None,
    ) -> None:
        self._home = home
        self._operation = operation
        self._detail = detail
        self._abort = abort
        self._give_back = give_back
        self._state = PENDING
        self._claims = 0
        self._value = self._entries = self._next = None
        self._deadline = NO_DEADLINE
        self._born = monotonic()
        # The first caller outside this package. Not its frame: that would keep all its local variables alive.
        frame = _getframe(1)
        while INSIDE[(code := frame.f_code).co_filename]:
            back = frame.f_back
            if back is None:
                break
            frame = back
        self._code = code
        self._lasti = frame.f_lasti

    # -- the producer's side, home thread only ----------------------------------------------------------------

    def _finish(self, value: T) -> bool:
        """End it with a value. False if it had ended before, as it has when it was cancelled: the value is the caller's to keep then."""
        if self._state:
            return False
        if self._home.debug:
            self._check_thread()
        self._value = value
        self._state = DONE
        self._abort = None
        entries = self._entries
        if entries is not None:
            self._entries = None
            if type(entries) is Future:  # the common case of `_tell`: one task on the home loop
                try:
                    if not entries.done():
                        entries.set_result(True)
                except RuntimeError:
                    if not self._home.loop.is_closed():
                        raise
            else:
                self._tell(entries if type(entries) is list else (entries,))
        return True

    def _fail(self, error: BaseException | type[BaseException]) -> bool:
        """End it with an error. False if it had ended before."""
        if self._state:
            return False
        if self._home.debug:
            self._check_thread()
        if isinstance(error, type):
            error = error()
        if isinstance(error, CancelledError):
            self._settle(CANCELLED, None)
        else:
            self._settle(FAILED, self._failure(error))
        return True

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, StopIteration):
            # Raised out of __await__ it would look like a normal return.
            replacement = RuntimeError(f"{self._operation} raised StopIteration")
            replacement.__cause__ = error
            error = replacement
        return Failure(error, self._operation, self._code, self._lasti)

    def _check_thread(self) -> None:
        if get_ident() != self._home.thread_id and not self._home.loop.is_closed():
            raise RuntimeError(f"{self!r} was finished outside the thread of its loop")

    # -- transitions, home thread only ------------------------------------------------------------------------

    def _settle(self, state: int, value: Any) -> None:
        """The way out of pending for all but ``_finish`` and ``_abandon``."""
        self._value = value
        self._state = state
        self._abort = None
        entries = self._entries
        if entries is not None:
            self._entries = None
            self._tell(entries if type(entries) is list else (entries,))

    def _tell(self, entries: Sequence[Any]) -> None:
        for index, entry in enumerate(entries):
            try:
                if isinstance(entry, Entry):
                    entry._settled(self)
                elif not entry.done():
                    entry.set_result(True)
            except BaseException as error:
                if isinstance(error, RuntimeError) and self._home.loop.is_closed():
                    continue  # nobody is left on a closed loop who could be told
                if rest := entries[index + 1 :]:  # Ctrl-C in a then-step, say: the others are told all the same
                    self._home.loop.call_soon(self._tell, rest)
                raise

    def _cancel_now(self) -> bool:
        if self._state:
            return self._take_back()
        self._abandon(CANCELLED, None)
        return True

    def _expire(self, error: BaseException) -> None:
        """Its deadline passed."""
        if not self._state:
            self._abandon(FAILED, self._failure(error))

    def _abandon(self, state: int, value: Any) -> None:
        """Give a pending work up: stop the transport, then tell everybody."""
        abort, self._abort = self._abort, None
        self._value = value
        self._state = state  # first, so that an abort that completes the work finds it over
        try:
            if abort is not None:
                abort(self)
        except Exception as error:  # the work is over whatever the transport says; nobody else would hear of this
            self._home.report(f"aborting {self._operation} failed", error)
        finally:
            entries = self._entries
            if entries is not None:
                self._entries = None
                self._tell(entries if type(entries) is list else (entries,))

    def _take_back(self) -> bool:
        """Cancel a done work whose value nobody has taken or is about to take."""
        if self._state == FAILED:
            self._value.seen = True  # who gives it up, or is cancelled as he waits, wants to hear nothing more of it
            return False
        with _claim:
            give_back = self._give_back
            if give_back is None or self._claims > 0 or self._state != DONE:
                return False
            value = self._value
            self._give_back = None
            self._value = None
            self._state = CANCELLED
        try:
            give_back(value)
        except Exception as error:  # the cancel stands; nobody else would hear of this
            self._home.report(f"giving back the value of {self._operation} failed", error)
        return True

    def _unclaim(self, _value: object = None) -> None:
        """Somebody who had been told of the value is cancelled before he took it. Serves as ``give_back`` of works that pass a value on."""
        self._claims -= 1
        self._take_back()

    # -- dependants, home thread only -------------------------------------------------------------------------

    def _attach(self, entry: Entry | Future[bool]) -> None:
        entries = self._entries
        if entries is None:
            self._entries = entry
        elif isinstance(entries, list):
            entries.append(entry)
        else:
            self._entries = [entries, entry]

    def _detach(self, entry: Entry | Future[bool]) -> None:
        entries = self._entries
        if entries is entry:
            self._entries = None
        elif isinstance(entries, list):
            for index, other in enumerate(entries):
                if other is entry:
                    del entries[index]
                    return

    def _dependants(self) -> int:
        """How many wait for it: tasks, threads, steps, combinators; not callbacks and timers."""
        entries = self._entries
        if entries is None:
            return 0
        if not isinstance(entries, list):
            entries = [entries]
        return sum(entry.counts if isinstance(entry, Entry) else not entry.done() for entry in entries)

    def _attach_outside(self, waiter: OutsideWaiter) -> None:
        waiter.live = True
        self._claims += 1
        if self._state:
            waiter._settled(self)
        else:
            self._attach(waiter)

    def _leave(self, waiter: OutsideWaiter, cancelled: bool) -> None:
        """An outside waiter goes without having taken the value."""
        if waiter.live:
            waiter.live = False
            self._claims -= 1
            self._detach(waiter)
            if cancelled:
                self._cancel_now()

    def _leave_unless_needed(self, waiter: OutsideWaiter) -> None:
        """As ``_leave`` for a branch that was cancelled: what others depend on goes on."""
        self._leave(waiter, False)
        if not self._dependants():
            self._cancel_now()

    def _leave_soon(self, waiter: OutsideWaiter, cancelled: bool) -> None:
        try:
            self._home.call_soon(self._leave, waiter, cancelled)
        except (ClosedError, ForkedHandle):  # the home loop is gone and the claim with it
            pass

    # -- taking the outcome, any thread -----------------------------------------------------------------------

    def _outcome(self) -> T:
        """The value, or raise the error. The work must not be pending."""
        if self._state == DONE:
            value: T = self._value
            if self._give_back is None or self._take():
                return value
        self._reraise()

    def _take(self) -> bool:
        """The value is somebody's now and cannot be given back. False if it just was."""
        if get_ident() == self._home.thread_id:
            self._give_back = None
            return True
        with _claim:
            if self._state != DONE:
                return False
            self._give_back = None
            return True

    def _reraise(self) -> NoReturn:
        if self._state != FAILED:
            raise CancelledError
        failure: Failure = self._value
        failure.seen = True
        try:
            raise failure.error.with_traceback(failure.trace)
        finally:
            del self, failure  # the traceback holds this frame

    # -- the user's side --------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, T]:
        home = self._home
        if self._state:
            home.turns = turns = home.turns + 1
            if not turns & 63:
                # A loop of operations that are always ready must not starve everybody else.
                yield from self._yield_once()
            elif self._state == DONE and (self._give_back is None or get_ident() == home.thread_id):  # the common case of `_outcome`
                self._give_back = None
                done: T = self._value
                return done
            return self._outcome()
        loop = get_running_loop()
        if loop is not home.loop:
            yield from self._wait_outside(loop, None).__await__()
            return self._outcome()
        future: Future[bool] = loop.create_future()
        if self._entries is None:
            self._entries = future
        else:
            self._attach(future)
        self._claims += 1
        try:
            yield from future
        except CancelledError:
            self._claims -= 1
            self._detach(future)
            self._cancel_now()
            raise
        except BaseException:  # the coroutine is being destroyed, perhaps by the garbage collector in the middle of anything
            self._forget_soon(future)
            raise
        self._claims -= 1
        if self._state == DONE:  # the common case of `_outcome`; this is the home thread
            self._give_back = None
            value: T = self._value
            return value
        self._reraise()

    def _yield_once(self) -> Generator[Any, None, None]:
        if self._give_back is None:
            yield
            return
        at_home = get_ident() == self._home.thread_id
        if at_home:
            self._claims += 1
        try:
            yield
        except CancelledError:
            if at_home:
                self._unclaim()
            else:
                self.cancel()
            raise
        except BaseException:  # as in __await__
            if at_home:
                self._forget_soon(None)
            raise
        if at_home:
            self._claims -= 1

    def _forget_soon(self, future: Future[bool] | None) -> None:
        try:
            self._home.call_soon(self._forget, future)
        except (ClosedError, ForkedHandle):  # no state is left that the claim could matter to
            pass

    def _forget(self, future: Future[bool] | None) -> None:
        self._claims -= 1
        if future is not None:
            self._detach(future)

    async def _wait_outside(self, loop: asyncio.AbstractEventLoop, timeout: float | None) -> None:
        """Wait on another loop until it is over, or the time has passed."""
        if self._home.on_home():
            raise UsageError(
                "the loop that would finish it is another one of this thread, and cannot run now",
                operation=self._operation,
                hint="make the worker with loop='thread' to use it from several loops",
            )
        waiter = LoopWaiter(loop)
        try:
            self._home.call_soon(self._attach_outside, waiter)
        except ClosedError:
            if self._state:  # it was the last thing that its loop did, a moment ago
                return
            raise
        end = None if timeout is None else loop.time() + timeout
        while True:
            future = waiter.future
            timer = loop.call_later(SLICE if end is None else min(SLICE, end - loop.time()), wake, future)
            try:
                await future
            except CancelledError:
                self._leave_soon(waiter, True)
                raise
            except BaseException:  # as in __await__
                self._leave_soon(waiter, False)
                raise
            finally:
                timer.cancel()
            if self._state:
                return
            if self._home.loop.is_closed():
                if self.done():
                    return
                raise self._loop_closed()
            if end is not None and loop.time() >= end:
                self._leave_soon(waiter, False)
                return
            waiter.future = loop.create_future()
            if self.done():  # perhaps told between the two, on the future before
                return

    def wait_stream(self) -> AsyncWork[T]:
        """For those who go on on the same accelerator: be done as soon as the order there is settled.

        The current stream of the calling thread is made to wait for the tensors instead: what it is given after `await
        work.wait_stream()` sees what was received, or may write to what is being sent, while the copies are still under way. Where there is
        nothing to gain (no accelerator, a message with large parts in CPU memory, a way that has no stream of ours) this changes nothing.
        If a device fails later, its streams say so.

        Returns the work itself; it can be cancelled as before.
        """
        order = getattr(self._detail, "order_after_caller", None)
        if order is not None and not self._state:
            order(self._home.call)
        return self

    async def async_wait(self, timeout: float | None = None) -> T:
        """Wait for the value, at most ``timeout`` seconds.

        Raises:
            DeadlineExceeded: the time passed; the work goes on and its result is not consumed.
            ClosedError: the loop that would have finished it is closed.

        Cancelling the waiting task cancels the work; wait for ``asyncio.shield(work)`` to keep it.
        """
        if self._state or timeout is None:
            return await self
        loop = get_running_loop()
        begin = monotonic()
        if loop is self._home.loop:
            await self._wait_home(loop, timeout)
        else:
            await self._wait_outside(loop, timeout)
        if not self.done():
            raise self._too_late(timeout, begin)
        return self._outcome()

    async def _wait_home(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        future: Future[bool] = loop.create_future()
        self._attach(future)
        self._claims += 1
        timer = loop.call_later(timeout, wake, future)
        try:
            await future
        except CancelledError:
            self._claims -= 1
            self._detach(future)
            self._cancel_now()
            raise
        except BaseException:  # as in __await__
            self._forget_soon(future)
            raise
        finally:
            timer.cancel()
        self._forget(future)

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until it is over, at most ``timeout`` seconds. Ctrl-C interrupts it and, like the passing of the time, leaves
        the work alive.

        Raises:
            WouldBlockLoop: called on the work's own loop thread while it is not done; it would never return.
            DeadlineExceeded: the time passed; the work goes on and its result is not consumed.
            ClosedError: the loop that would have finished it is closed.
        """
        if not self._state:
            self._block(timeout)
        return self._outcome()

    def _block(self, timeout: float | None) -> None:
        home = self._home
        if home.loop.is_closed():
            if self._state:  # it was the last thing that its loop did, a moment ago
                return
            raise self._loop_closed()
        if home.on_home():
            raise WouldBlockLoop(
                "wait() on the loop's own thread would never return",
                operation=self._operation,
                hint="use `await work` or `await work.async_wait()`",
            )
        lock = allocate_lock()
        lock.acquire()
        waiter = ThreadWaiter(lock)
        begin = monotonic()
        woken = False
        try:
            try:
                home.call_soon(self._attach_outside, waiter)
            except ClosedError:
                if self._state:
                    woken = True
                    return
                raise
            while not self.done():
                left = SLICE if timeout is None else min(SLICE, timeout - (monotonic() - begin))
                woken = lock.acquire(True, max(0.0, left))
                if woken:
                    return
                if timeout is not None and monotonic() - begin >= timeout:
                    raise self._too_late(timeout, begin)
                if home.loop.is_closed() and not self._state:
                    raise self._loop_closed()
        finally:
            if not woken:
                self._leave_soon(waiter, False)

    def _too_late(self, timeout: float, begin: float) -> DeadlineExceeded:
        facts = getattr(self._detail, "facts", None)
        about = "" if self._detail is None or facts is not None else f" ({self._detail})"
        error = DeadlineExceeded(
            f"not over within {timeout:g} s{about}; the work goes on",
            operation=self._operation,
            step="wait",
            elapsed=monotonic() - begin,
        )
        error.fill(**(facts or {}))
        return error

    def _loop_closed(self) -> ClosedError:
        return ClosedError("the loop that would have finished it is closed", operation=self._operation)

    def done(self) -> bool:
        """Whether it is over: done, failed or cancelled. Any thread."""
        return self._state != PENDING

    def cancelled(self) -> bool:
        """Whether it was cancelled. Any thread."""
        return self._state == CANCELLED

    def result(self) -> T:
        """The value of a finished work; raises its error. Any thread.

        Raises:
            asyncio.InvalidStateError: it is not over yet.
            asyncio.CancelledError: it was cancelled.
        """
        if not self._state:
            raise InvalidStateError(f"{self!r} is not over yet")
        return self._outcome()

    def exception(self) -> BaseException | None:
        """The error of a finished work, or None; raises as ``result`` does when it is not over or was cancelled. Any thread."""
        if not self._state:
            raise InvalidStateError(f"{self!r} is not over yet")
        if self._state == CANCELLED:
            raise CancelledError
        if self._state == DONE:
            return None
        failure: Failure = self._value
        failure.seen = True
        return failure.error

    def cancel(self, msg: object = None) -> bool:
        """Give it up, unless it is over. Any thread; ``msg`` is accepted for likeness with asyncio and not used.

        On the home thread, True means that it is cancelled now and that nothing was consumed, False that its outcome stands. A done recv
        or get whose message nobody has taken counts as not over: the message is put back. A send is cancelled here at once, and withdrawn
        when the peer hears of it: True does not say that nobody has received it before that. From another thread the cancel is handed
        over, and True means no more than that. Cancelling a then-step cancels backwards, up to a work that others still depend on. An
        error that it has ended with counts as looked at.
        """
        if get_ident() == self._home.thread_id:
            return self._cancel_now()
        if self._state and self._give_back is None:
            return False
        try:
            self._home.call_soon(self._cancel_now)
        except ClosedError:  # nothing runs there any more that could be stopped
            return False
        return True

    def add_done_callback(self, fn: Callable[[AsyncWork[T]], object], *, context: contextvars.Context | None = None) -> None:
        """Call ``fn(work)`` once it is over, in a later turn of the loop that runs in this thread, or of the home loop if none does.

        An error of ``fn`` goes to that loop's exception handler. Adding a callback counts as looking at the error. Any thread.
        """
        if context is None:
            context = contextvars.copy_context()
        loop: asyncio.AbstractEventLoop | None
        try:
            loop = get_running_loop()
        except RuntimeError:
            loop = None
        if loop is self._home.loop:
            loop = None
        elif loop is not None and self._state:
            self._mark_seen()
            loop.call_soon(fn, self, context=context)  # the home may be gone, and is not needed
            return
        self._home.call(self._attach_callback, Callback(fn, context, loop))

    def _attach_callback(self, entry: Callback) -> None:
        if self._state:
            entry._settled(self)
        else:
            self._attach(entry)

    def _mark_seen(self) -> None:
        if self._state == FAILED:
            self._value.seen = True

    def remove_done_callback(self, fn: Callable[[AsyncWork[T]], object]) -> int:
        """Take back all callbacks equal to ``fn`` that were not called yet; returns how many there were. Any thread."""
        entries = self._entries
        found = [
            entry
            for entry in (list(entries) if isinstance(entries, list) else (entries,))
            if isinstance(entry, Callback) and entry.fn == fn
        ]
        for entry in found:
            self._home.call(self._detach, entry)
        return len(found)

    @overload
    def then(self, func: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> AsyncFuncWork[R]: ...

    @overload
    def then(self, func: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> AsyncFuncWork[R]: ...

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncFuncWork[Any]:
        """Go on with ``func(value, *args, **kwargs)`` on the home loop as soon as the value is there; any thread may call.

        ``func`` runs in a copy of the caller's context. It may return a value, a coroutine, a work or another awaitable, which is followed
        to its end. An error skips it and arrives at the end of the chain unchanged. It must not block; ``then_in_thread`` is for heavy
        functions. If the work is done already, ``func`` may have run when ``then`` returns. A deadline of this work is one for the new
        one too. Cancelling the returned work cancels backwards, up to a work that others still depend on.
        """
        return self._then(self._step_type(self._home, func, args, kwargs, source=self))

    def then_in_thread(self, func: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> AsyncFuncWork[R]:
        """As ``then``, with ``func`` called in one of the two private threads of the worker. Once it has begun there, cancelling the
        returned work drops its result."""
        return self._then(self._step_type(self._home, func, args, kwargs, source=self, threaded=True))

    def _then(self, step: AsyncFuncWork[R]) -> AsyncFuncWork[R]:
        if self._next is None:
            self._next = step
        self._home.call(self._attach_step, step)
        return step

    def _attach_step(self, step: AsyncFuncWork[Any]) -> None:
        if step._state:
            return
        if self._state:
            step._settled(self)
        else:
            self._attach(step)

    def get_next_work(self) -> AsyncFuncWork[Any] | None:
        """The first then-step attached to it, if any."""
        return self._next

    def get_last_work(self) -> AsyncWork[Any]:
        """The end of the chain of first then-steps; itself if it has none. Cancelling that one cancels backwards, see `cancel`."""
        work: AsyncWork[Any] = self
        while work._next is not None:
            work = work._next
        return work

    # -- looks ------------------------------------------------------------------------------------------------

    @property
    def home(self) -> LoopHome:
        """Whose loop ends it."""
        return self._home

    @property
    def operation(self) -> str:
        """The call that began it."""
        return self._operation

    @property
    def detail(self) -> Any:
        """What the producer gave to describe it."""
        return self._detail

    @property
    def site(self) -> str:
        """``file:line`` in the program where it was begun."""
        return describe_site(self._code, self._lasti)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedObject(f"a work ({self._operation}) cannot be sent or pickled", hint="await it first, and send what it gives")

    def __repr__(self) -> str:
        parts = [type(self).__name__, self._operation]
        if self._detail is not None:
            parts.append(str(self._detail))
        state, value = self._state, self._value
        parts.append(STATE_NAMES[state])
        if state == PENDING:
            parts.append(f"{monotonic() - self._born:.1f}s")
        elif isinstance(value, Failure):
            parts.append(f"with {type(value.error).__name__}")
        step = self._next
        shown = 0
        while step is not None and shown < 8:
            parts.append(f"-> {step._operation}")
            step = step._next
            shown += 1
        if step is not None:
            parts.append("-> ...")
        return f"<{' '.join(parts)}>"


_new = object.__new__


def pending(
    home: LoopHome, operation: str, abort: Callable[[Any], object], give_back: Callable[[Any], object], detail: Any
) -> AsyncWork[Any]:
    """``AsyncWork(home, operation, abort=abort, give_back=give_back, detail=detail)`` for who is called by a public method on the home
    loop: neither of the two is looked at to find the program's line, and the loop has a frame below them.

    Half the price, and there are thousands of them in a second.
    """
    work: AsyncWork[Any] = _new(AsyncWork)
    work._home = home
    work._operation = operation
    work._detail = detail
    work._abort = abort
    work._give_back = give_back
    work._state = PENDING
    work._claims = 0
    work._value = work._entries = work._next = None
    work._deadline = NO_DEADLINE
    work._born = monotonic()
    frame = _getframe(3)
    while INSIDE[(code := frame.f_code).co_filename]:
        back = frame.f_back
        if back is None:
            break
        frame = back
    work._code = code
    work._lasti = frame.f_lasti
    return work
