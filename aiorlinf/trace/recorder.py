"""Keeps what is recorded, and writes it to a file now and then, so that little memory is needed and a killed process leaves a trace."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson

from aiorlinf.errors import AiorlinfError
from aiorlinf.trace.events import CALL, LAYOUTS, STEP, STEP_OVER, Event, Packed
from aiorlinf.work.base import STATE_NAMES, AsyncWork
from aiorlinf.work.waiters import Entry

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Recorder", "Taken"]

_SPILL_EVENTS = 16 * 1024
_SPILL_S = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What is to be written.

    Attributes:
        packed: small messages' events, by the names of `trace.events.LAYOUTS`.
        events: all others.
        times: when each of the latter was recorded.
    """

    packed: Mapping[str, bytes]
    events: list[Event]
    times: list[float]

    @property
    def count(self) -> int:
        """Of all of them."""
        return len(self.events) + sum(len(data) // LAYOUTS[kind].size for kind, data in self.packed.items())

    def first(self, count: int) -> Taken:
        """So many of them, the earliest, or somewhat fewer where several are of one time."""
        times = {kind: [time for time, *_ in LAYOUTS[kind].iter_unpack(data)] for kind, data in self.packed.items()}
        end = sorted(chain(self.times, *times.values()))[count]
        kept = bisect_left(self.times, end)
        packed = {kind: data[: bisect_left(times[kind], end) * LAYOUTS[kind].size] for kind, data in self.packed.items()}
        return Taken(packed, self.events[:kept], self.times[:kept])


class Recorder:
    """Events of one worker. Home thread only, but for `write`.

    Args:
        path: of a file that is made anew, see `write`.
        limit: events; later ones are counted and not kept.

    Attributes:
        packed: small messages' events that are not written yet, see `trace.events`. Hot paths append to it themselves.
        dropped: how many came after the limit.
    """

    def __init__(self, home: LoopHome, path: str | os.PathLike[str], limit: int) -> None:
        self.packed: Packed = Packed()  # its sequences are for ever the same: each link's part knows them
        self.dropped: int = 0
        self._events: list[Event] = []
        self._times: list[float] = []  # of each event
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

    def record(self, event: Event) -> None:
        """One that is not packed."""
        self._times.append(monotonic())
        self._events.append(event)

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
        taken = self.take()
        if not taken.count:
            self._timer = self._home.loop.call_later(_SPILL_S, self._spill)
            return
        try:
            self._writing = self._home.submit(self.write, taken)
        except AiorlinfError:  # the worker is closing, and writes it with the rest then
            for kind, data in taken.packed.items():
                getattr(self.packed, kind).extend(data)
            self._events, self._times = taken.events, taken.times
            self._left += taken.count
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

    def take(self) -> Taken:
        """What is not written yet, as far as the limit lets it."""
        packed = {}
        for kind in LAYOUTS:
            sequence: bytearray = getattr(self.packed, kind)
            packed[kind] = bytes(sequence)
            sequence.clear()
        taken = Taken(packed, self._events, self._times)
        self._events, self._times = [], []
        if (count := taken.count) > self._left:
            taken = taken.first(self._left)
            self.dropped += count - taken.count
        self._left -= taken.count
        return taken

    def write(self, taken: Taken) -> None:
        """Append to the file; any thread. Raises OSError.

        Packed events are there as they are, after a line with the name of their kind and how many bytes they have; others as lines of JSON,
        each a list of them. The latter come after the former, see `trace.events`.
        """
        with self._lock:
            for kind, data in taken.packed.items():
                if data:
                    self._file.write(b'"%s %d"\n' % (kind.encode(), len(data)))
                    self._file.write(data)
            for start in range(0, len(taken.events), _SPILL_EVENTS):
                self._file.write(orjson.dumps(taken.events[start : start + _SPILL_EVENTS]) + b"\n")
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
