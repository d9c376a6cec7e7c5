"""Finds what a piece of code leaves behind: tasks, threads, file descriptors, child processes, shared memory.

Around any block, in a coroutine or in plain code::

    async with check_leaks():
        async with aiorlinf.init("rollout:0") as comm:
            await play(comm)

For a whole test suite there is a pytest plugin, `aiorlinf.testing.pytest_leaks`, that does the same around each test.

What is compared, before and after:

===========  ==========================================================================================================
kind         what counts
===========  ==========================================================================================================
tasks        unfinished asyncio tasks of the running loop (only with ``async with`` or when loops are named)
threads      Python threads that are alive. Threads made in C++ are not seen (torch keeps a pool of its own), nor is
             a C++ thread that once called into Python, nor are those of a loop's default executor: they live as long
             as the loop does, and a loop that nobody closed shows by its descriptors
descriptors  open file descriptors, by what they point to. Linux only
children     direct child processes, also dead ones that nobody has waited for. Linux only
shm          names in ``/dev/shm``, unless a process that is not ours has them open. Linux only
===========  ==========================================================================================================

What belongs to the process as a whole and is made once does not count: multiprocessing's resource tracker and fork
server, and libuv's signal pipe. Things may take a moment to go, so one counts only when it is there at the end of the
block, after a garbage collection, and all through a grace period.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import os
import re
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from aiorlinf.testing import procfs

__all__ = ["DEFAULT_GRACE", "KINDS", "Leak", "LeakError", "Snapshot", "check_leaks"]

KINDS: Final = ("tasks", "threads", "descriptors", "children", "shm")
"""Every kind of thing that is looked at."""

DEFAULT_GRACE: Final = 2.0
"""Seconds that things are given to go away by themselves."""

_ASYNCIO = os.path.dirname(asyncio.__file__) + os.sep
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
_OF_DEFAULT_EXECUTOR = re.compile(r"asyncio_\d+")  # how asyncio names the threads of a loop's default executor


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing left behind.

    Attributes:
        kind: one of `KINDS`.
        what: one line that says what it is and, where that can be found out, what it is doing or points to.
        pid: the process id of a child; None for the other kinds.
        thing: tells it from all others of its kind, however what it is doing changes.
    """

    kind: str
    what: str
    pid: int | None = None
    thing: Hashable = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class LeakError(AssertionError):
    """Something was left behind. ``leaks`` lists it, ``grace`` is how many seconds it was given to go."""

    def __init__(self, leaks: Sequence[Leak], grace: float) -> None:
        self.leaks: tuple[Leak, ...] = tuple(leaks)
        self.grace = grace
        lines = "".join(f"\n  {leak}" for leak in leaks)
        super().__init__(f"left behind, and still there after {grace:g} s:{lines}")


@dataclass(frozen=True)
class Snapshot:
    """What exists at one moment. Made by `take`; two of them are compared by `leaks_since`."""

    tasks: frozenset[asyncio.Task[object]] = field(repr=False)
    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]
    children: frozenset[procfs.Child]
    shm: frozenset[str]

    @classmethod
    def take(cls, loops: Iterable[asyncio.AbstractEventLoop] = (), kinds: Collection[str] = KINDS) -> Snapshot:
        """Look now. ``loops`` are those whose unfinished tasks count; none by default. Of other kinds than ``kinds`` nothing is seen."""
        procfs.make_process_globals()
        return cls(
            tasks=frozenset(task for loop in loops for task in asyncio.all_tasks(loop)),
            threads=frozenset(filter(_counts, threading.enumerate())) if "threads" in kinds else frozenset(),
            descriptors=procfs.open_descriptors() if "descriptors" in kinds else {},
            children=procfs.child_processes() if "children" in kinds else frozenset(),
            shm=procfs.shm_names() if "shm" in kinds else frozenset(),
        )

    def leaks_since(self, before: Snapshot, kinds: Collection[str] = KINDS) -> list[Leak]:
        """What is here but was not in ``before``, in the order of `KINDS`; kinds that are not named are left out."""
        leaks: list[Leak] = []
        if "tasks" in kinds:
            leaks += [Leak("tasks", _describe_task(task), thing=task) for task in self.tasks - before.tasks if not task.done()]
        if "threads" in kinds:
            threads = [thread for thread in self.threads - before.threads if thread.is_alive()]
            leaks += [Leak("threads", _describe_thread(thread), thing=thread) for thread in threads]
        if "descriptors" in kinds:
            new = procfs.new_descriptors(before.descriptors, self.descriptors)
            leaks += [Leak("descriptors", text, thing=(number, self.descriptors[number])) for number, text in new.items()]
        if "children" in kinds:
            leaks += [Leak("children", procfs.describe_child(child), child.pid, child) for child in self.children - before.children]
        if "shm" in kinds:
            leaks += [Leak("shm", procfs.describe_shm(name), thing=name) for name in procfs.ours_in_shm(self.shm - before.shm)]
        return leaks

    def same_as(self, before: Snapshot, kinds: Collection[str] = KINDS) -> bool:
        """True when nothing is here that was not there before; cheaper than `leaks_since`, and may be wrongly False."""
        return (
            ("tasks" not in kinds or self.tasks <= before.tasks)
            and ("threads" not in kinds or self.threads <= before.threads)
            and ("descriptors" not in kinds or self.descriptors.items() <= before.descriptors.items())
            and ("children" not in kinds or self.children <= before.children)
            and ("shm" not in kinds or self.shm <= before.shm)
        )


class check_leaks:
    """Context manager, plain or async (so its name is a verb): what the block leaves behind raises `LeakError` at its end.

    In a coroutine use ``async with``: the running loop's tasks count too, and the loop goes on turning during the grace
    period. When the block raises, that error is passed on and nothing is looked at: an unfinished block has a reason to leave things.

        >>> import tempfile
        >>> with check_leaks():
        ...     with tempfile.TemporaryFile() as file:
        ...         written = file.write(b"closed again")

    Cancelling during the grace period ends the wait with CancelledError and reports nothing.

    Args:
        grace: seconds that things are given to go away by themselves.
        ignore: kinds that are not looked at, from `KINDS`.

    Raises:
        ValueError: ``ignore`` names something that is not a kind.
        LeakError: at the end of the block.
    """

    def __init__(self, *, grace: float = DEFAULT_GRACE, ignore: Collection[str] = ()) -> None:
        unknown = set(ignore) - set(KINDS)
        if unknown:
            raise ValueError(f"not a kind of leak: {', '.join(sorted(unknown))} (there are: {', '.join(KINDS)})")
        self.grace = grace
        self._kinds = tuple(kind for kind in KINDS if kind not in ignore)
        self._loops: tuple[asyncio.AbstractEventLoop, ...] = ()
        self._this_task: asyncio.Task[object] | None = None
        self._before: Snapshot | None = None
        self._suspects: set[tuple[str, Hashable]] | None = None

    def __enter__(self) -> Self:
        self._before, self._suspects = Snapshot.take(kinds=self._kinds), None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            return
        for pause in self._pauses():
            time.sleep(pause)
        self._raise_what_is_left()

    async def __aenter__(self) -> Self:
        self._loops = (asyncio.get_running_loop(),)
        self._before, self._suspects = Snapshot.take(self._loops, self._kinds), None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            return
        # A fixture's two halves run in two tasks; the one that looks is never a leak.
        self._this_task = asyncio.current_task()
        for pause in self._pauses():
            await asyncio.sleep(pause)
        self._raise_what_is_left()

    def _pauses(self) -> Iterable[float]:
        """The pauses to make, in seconds, for as long as something is there; ends when all is clean or the grace is over."""
        end = time.monotonic() + self.grace
        pause = _FIRST_PAUSE
        if self._look():
            gc.collect()
        while self._look() and time.monotonic() < end:
            yield pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self) -> list[Leak]:
        """What has been there at every look since the end of the block. What came later was not left by it, be it another's file."""
        before = self._entered()
        now = Snapshot.take(self._loops, self._kinds)
        now = dataclasses.replace(now, tasks=now.tasks - {self._this_task})
        seen = [] if now.same_as(before, self._kinds) else now.leaks_since(before, self._kinds)
        if self._suspects is not None:
            seen = [leak for leak in seen if (leak.kind, leak.thing) in self._suspects]
        self._suspects = {(leak.kind, leak.thing) for leak in seen}
        return seen

    def _raise_what_is_left(self) -> None:
        leaks = self._look()
        if leaks:
            raise LeakError(leaks, self.grace)

    def _entered(self) -> Snapshot:
        if self._before is None:
            raise RuntimeError("check_leaks was left without having been entered")
        return self._before


def _counts(thread: threading.Thread) -> bool:
    # A C++ thread that calls into Python gets a stand-in that stays listed after the thread is gone.
    return thread.is_alive() and not isinstance(thread, _stand_in_class()) and not _OF_DEFAULT_EXECUTOR.fullmatch(thread.name)


@functools.cache
def _stand_in_class() -> type[threading.Thread]:
    return getattr(threading, "_DummyThread", _NoThread)


class _NoThread(threading.Thread):
    """A class without instances."""


def _describe_task(task: asyncio.Task[object]) -> str:
    """The task, and where it was made: asyncio knows that only in its debug mode."""
    frames = getattr(task, "_source_traceback", None) or ()
    made = [frame for frame in frames if not frame.filename.startswith(_ASYNCIO)]
    if not made:
        return f"{task!r} (PYTHONASYNCIODEBUG=1 shows where it was made)"
    return f"{task!r}, made at {made[-1].filename}:{made[-1].lineno} in {made[-1].name}"


def _describe_thread(thread: threading.Thread) -> str:
    text = f"{thread.name!r}{' (daemon)' if thread.daemon else ''}"
    where = procfs.where_thread_is(thread.ident)
    return f"{text} at {where}" if where else text
