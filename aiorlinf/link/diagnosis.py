"""What a worker is waiting for, as text: on demand, or when a signal comes.

Read from a signal handler, the state may belong to a loop that is in the middle of something, or that is blocked for good: that is when
one wants to see it. Nothing here waits, and nothing is changed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from aiorlinf.errors import UsageError
from aiorlinf.link.link import Link, LinkState
from aiorlinf.link.pending import PendingOperation, pending_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from aiorlinf.link.table import LinkTable
    from aiorlinf.work.home import LoopHome

__all__ = ["busy_at", "describe", "dump_all", "dump_on_signal", "hidden_contexts", "pending", "register"]

_TRIES = 5
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_in_handler = False
"""A signal handler asks: the thread that it interrupted may be the loop's."""

_reporters: weakref.WeakSet[object] = weakref.WeakSet()
"""Workers that are alive; each has a `dump` method."""


def register(worker: object) -> None:
    """Let `dump_all` find a worker as long as it lives."""
    _reporters.add(worker)


def pending(table: LinkTable) -> list[PendingOperation]:
    """Every operation of a worker that is not over."""
    found: list[PendingOperation] = []
    hidden = hidden_contexts(table)
    for link in table.links():
        found.extend(pending_on(link, hidden))
    return found + _elsewhere(table, hidden)


def hidden_contexts(table: LinkTable) -> set[int]:
    """Messages of these contexts belong to something that tells of its own calls."""
    return {context for reporter in list(table.reporters) for context in reporter.contexts}


def _elsewhere(table: LinkTable, hidden: set[int]) -> list[PendingOperation]:
    """What belongs to no single link: inboxes, collectives, calls of channels."""
    found = [each for inbox in list(table.inboxes) for each in inbox.pending() if each.context not in hidden]
    return found + [each for reporter in list(table.reporters) for each in reporter.pending()]


def describe(name: str, table: LinkTable, home: LoopHome) -> str:
    """A few lines about a worker, its links and what is pending on each."""
    return "\n".join(_lines(name, table, home))


def _lines(name: str, table: LinkTable, home: LoopHome) -> Iterator[str]:
    yield f"{name}: {_count(len(table.links()), 'link')}, {_count(len(pending(table)), 'operation')} pending"
    hidden = hidden_contexts(table)
    for link in table.all_links():
        yield f"  {_link(link)}"
        yield from _operations("    ", pending_on(link, hidden))
    yield from _operations("  ", _elsewhere(table, hidden))
    where = busy_at(home)
    if where:
        yield "  its loop is running:"
        yield from (f"    {line}" for line in where)


def _operations(indent: str, operations: Iterable[PendingOperation]) -> Iterator[str]:
    """One line each; those that differ in their age only share one."""
    seen: dict[PendingOperation, tuple[str, int]] = {}
    for operation in operations:
        alike = replace(operation, elapsed_s=None)
        text, number = seen.get(alike, (str(operation), 0))
        seen[alike] = text, number + 1
    for text, number in seen.values():
        yield f"{indent}{text}" + (f" (and {number - 1} more like it)" if number > 1 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _link(link: Link) -> str:
    text = f"link to {link.identity or link.remote}: {link.state.value}"
    if link.state is LinkState.UP:
        text += f" over {link.address or 'memory'}, large payloads over {link.backend}"
    if link.missing:
        text += ", the manager does not know it (yet)"
    unread = len(link.mailbox)
    if unread:
        tags = sorted({message.key & 0xFFFFFFFF for message in link.mailbox.all_queued()})
        text += f", {_count(unread, 'unread message')} (tags {', '.join(map(str, tags[:8]))}{', …' if len(tags) > 8 else ''})"
    return text


def busy_at(home: LoopHome) -> list[str]:
    """Where the thread of a loop is, if that is not in the loop itself waiting for something to do, nor here."""
    if home.on_home() and not _in_handler:
        return []  # it runs whoever asks
    frame = sys._current_frames().get(home.thread_id)
    stack = traceback.extract_stack(frame) if frame is not None else []
    while stack and stack[-1].filename.startswith(_PACKAGE):
        stack.pop()  # who asks
    if not stack or stack[-1].name in ("select", "run_forever", "_run_once", "run_until_complete", "run"):
        return []
    return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in stack[-6:]]


def dump_all(file: TextIO | None = None) -> None:
    """Print what every worker of this process is waiting for, to stderr by default. Any thread; also for use in a debugger."""
    file = sys.stderr if file is None else file
    for reporter in list(_reporters):
        dump: Callable[[], str] = reporter.dump  # type: ignore[attr-defined]
        for left in reversed(range(_TRIES)):
            try:
                print(dump(), file=file, flush=True)
                break
            except RuntimeError:  # something changed while it was looked at from another thread
                if not left:
                    raise
    for task in _tasks():
        print(f"  {task}", file=file, flush=True)


def _tasks() -> list[str]:
    """The tasks of the loop that runs in this thread."""
    try:
        tasks = asyncio.all_tasks(asyncio.get_running_loop())
    except RuntimeError:
        return []
    found = []
    for task in tasks:
        stack = task.get_stack(limit=1)
        where = f" at {stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else ""
        found.append(f"task {task.get_name()}{where}")
    return sorted(found)


def dump_on_signal(signum: int = signal.SIGUSR1, file: TextIO | None = None) -> None:
    """Let a signal print what every worker of this process is waiting for: ``kill -USR1 PID`` on a program that seems stuck.

    It works also while a loop is blocked, as long as the main thread runs Python code at all (`faulthandler.register` shows the rest).
    A handler that was there before is called afterwards.

    Args:
        signum: the signal.
        file: where to; stderr of the moment by default.

    Raises:
        UsageError: not the main thread, where signal handlers live.
    """
    try:
        before = signal.getsignal(signum)

        def handler(number: int, frame: FrameType | None) -> None:
            global _in_handler
            _in_handler = True
            try:
                dump_all(file)
            finally:
                _in_handler = False
            if callable(before):
                before(number, frame)

        signal.signal(signum, handler)
    except ValueError as error:
        raise UsageError(f"a handler of signal {signum} cannot be set: {error}", hint="call it in the main thread") from None
