"""Keeps what is recorded, and writes it to a file now and then, so that little memory is needed and a killed process leaves a trace."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson

from aiorlinf.errors import AiorlinfError
from aiorlinf.trace.events import CALL, STEP, STEP_OVER, Event
from aiorlinf.work.base import STATE_NAMES, AsyncWork
from aiorlinf.work.waiters import Entry

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Recorder"]

_SPILL_EVENTS = 16 * 1024
_SPILL_S = 1.0


class Recorder:
    """Events of one worker. Home thread only, but for `write`.

    Args:
        path: of a file that is made anew; each line of it is a list of events as JSON.
        limit: events; later ones are counted and not kept.

    Attributes:
        events: those that are not written yet. Hot paths append to it themselves.
        dropped: how many came after the limit.
    """

    def __init__(self, home: LoopHome, path: str | os.PathLike[str], limit: int) -> None:
        self.events: list[Event] = []
        self.dropped: int = 0
        self.record: Callable[[Event], object] = self.events.append
        self._home = home
        self._path = os.fspath(path)
        self._left = limit
        self._steps = 0
        self._step_numbers: dict[int, int] = {}  # by id of a step that is not over
        self._lock = threading.Lock()
        self._closed = False
        self._writing: AsyncWork[None] | None = None  # one at a time, so that they stay in order
        self._error: BaseException | None = None
        self._file = open(self._path, "wb")  # noqa: SIM115 - it stays open
        self._timer = home.loop.call_later(_SPILL_S, self._spill)

    # ---- what is recorded here

    def step(self, step: AsyncWork[Any], source: AsyncWork[Any]) -> None:
        """A then-step begins."""
        if self._closed:
            return
        self._steps += 1
        number = self._steps
        order = getattr(source._detail, "order", -1)
        self.record((STEP, number, monotonic(), step.operation, order, self._step_numbers.get(id(source), -1), step.site))
        self._step_numbers[id(step)] = number
        step._attach(_StepEnd(self, number))

    def step_over(self, step: AsyncWork[Any], number: int) -> None:
        """It is over. The steps after it are told later, so they still find its number."""
        if not self._closed:
            self.record((STEP_OVER, number, monotonic(), STATE_NAMES[step._state]))
            self._home.loop.call_soon(self._step_numbers.pop, id(step), None)

    def call(self, work: AsyncWork[Any], subject: str) -> None:
        """A collective, or a call of a channel, has begun."""
        if work._state:
            self.call_over(work, subject, monotonic())
        else:
            work._attach(_CallEnd(self, subject))

    def call_over(self, work: AsyncWork[Any], subject: str, begun: float) -> None:
        """It is over."""
        if not self._closed:
            self.record((CALL, begun, monotonic(), work.operation, subject, STATE_NAMES[work._state], work.site))

    def ahead(self, operation: str, subject: str, begun: float, how: str) -> None:
        """A get of `prefetch`, which nobody called, has been served."""
        if not self._closed:
            self.record((CALL, begun, monotonic(), operation, subject, how, ""))

    # ---- files

    def _spill(self) -> None:
        """Hand what there is to a thread, and come again."""
        events = self.take()
        if not events:
            self._timer = self._home.loop.call_later(_SPILL_S, self._spill)
            return
        try:
            self._writing = self._home.submit(self.write, events)
        except AiorlinfError:  # the worker is closing, and writes the rest then
            self.events[:0] = events
            self._left += len(events)
            return
        self._writing.add_done_callback(self._spilled)

    def _spilled(self, work: AsyncWork[None]) -> None:
        self._writing = None
        if not work.cancelled() and (error := work.exception()) is not None and self._error is None:
            self._error = error
        if not self._closed:
            self._timer = self._home.loop.call_later(_SPILL_S, self._spill)

    async def written(self) -> None:
        """Wait for what is being written. Raises what an earlier write has failed with: the file is not whole then."""
        if self._writing is not None:
            await self._writing
        if self._error is not None:
            raise self._error

    def take(self) -> list[Event]:
        """What is not written yet, as far as the limit lets it."""
        events = self.events[:]
        self.events.clear()
        if len(events) > self._left:
            self.dropped += len(events) - self._left
            del events[self._left :]
        self._left -= len(events)
        return events

    def write(self, events: list[Event]) -> None:
        """Append to the file; any thread. Raises OSError."""
        with self._lock:
            for start in range(0, len(events), _SPILL_EVENTS):
                self._file.write(orjson.dumps(events[start : start + _SPILL_EVENTS]) + b"\n")
            self._file.flush()

    def write_line(self, line: bytes) -> None:
        """As `write`, something else."""
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def stop(self) -> None:
        """Record nothing more; what there is has still to be taken and written."""
        self._closed = True
        self._timer.cancel()
        self._step_numbers.clear()

    def close(self) -> None:
        """No more will be written; any thread."""
        with self._lock:
            self._file.close()


class _StepEnd(Entry):
    __slots__ = ("number", "recorder")
    counts = False

    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder = recorder
        self.number = number

    def _settled(self, work: AsyncWork[Any]) -> None:
        self.recorder.step_over(work, self.number)


class _CallEnd(Entry):
    __slots__ = ("recorder", "subject")
    counts = False

    def __init__(self, recorder: Recorder, subject: str) -> None:
        self.recorder = recorder
        self.subject = subject

    def _settled(self, work: AsyncWork[Any]) -> None:
        self.recorder.call_over(work, self.subject, work._born)
