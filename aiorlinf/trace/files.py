"""Files of traces: raw ones, written while it is recorded, and those for Perfetto, of one worker or of many."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from aiorlinf.errors import UsageError, WireError
from aiorlinf.trace.clock import Reading, microseconds
from aiorlinf.trace.convert import Recorded, chrome_events

__all__ = ["PART", "Facts", "facts_line", "finish", "merge"]

PART = ".part"
"""A raw file has this after the name that it will get. It stays if its worker is killed, and can be merged all the same."""

_EVENTS_KEY = "traceEvents"
_FACTS_KEY = "aiorlinf"


@dataclass(frozen=True, slots=True)
class Facts:
    """Whose trace it is.

    Attributes:
        worker: its life, such as ``rollout:0#1``.
        pid, host: where it ran.
        readings: of the clock, one or two.
        dropped: events that were not kept.
    """

    worker: str
    pid: int
    host: str
    readings: tuple[Reading, ...]
    dropped: int = 0

    @property
    def error_us(self) -> float:
        """How wrong the times may be, compared with another worker's."""
        return max(reading.error_ns for reading in self.readings) / 1000


def facts_line(facts: Facts) -> bytes:
    """A line for a raw file. A later one goes before an earlier one."""
    readings = [[reading.at, reading.job_ns, reading.error_ns] for reading in facts.readings]
    told = {"worker": facts.worker, "pid": facts.pid, "host": facts.host, "readings": readings, "dropped": facts.dropped}
    return orjson.dumps(told) + b"\n"


def finish(part: Path, target: Path) -> None:
    """Make the file for Perfetto of a raw one, which is deleted then. Any thread.

    Raises:
        OSError: a file cannot be read or written.
        WireError: it is not a raw file.
    """
    recorded, facts = _read_part(part)
    base = _base(recorded, facts)
    events = chrome_events(recorded, 1, facts.worker, microseconds(facts.readings, base))
    new = target.with_name(target.name + ".new")
    _write(new, events, [facts], base)
    os.replace(new, target)
    part.unlink()


def merge(paths: Sequence[Path], target: Path) -> list[Facts]:
    """One file for Perfetto of those of several workers, raw or not. Whose they were.

    Raises:
        UsageError: a file is not a trace of ours, or there is none.
        OSError: a file cannot be read or written.
    """
    if not paths:
        raise UsageError("no traces to merge")
    parts = []
    for path in paths:
        try:
            if path.name.endswith(PART):
                recorded, own = _read_part(path)
                start = _base(recorded, own)
                parts.append(([own], start, list(chrome_events(recorded, 1, own.worker, microseconds(own.readings, start)))))
            else:
                parts.append(_read(path))
        except WireError as error:
            raise UsageError(f"{path} is no trace of aiorlinf: {error.message}") from error
    base = min(start for _, start, _ in parts)
    everybody: list[Facts] = []
    events: list[dict[str, Any]] = []
    process = 0
    for facts, start, own_events in sorted(parts, key=lambda part: part[0][0].worker):
        numbers = sorted({event["pid"] for event in own_events})
        new = {number: process + place for place, number in enumerate(numbers, 1)}
        process += len(numbers)
        shift = (start - base) / 1000
        for event in own_events:
            event["pid"] = new[event["pid"]]
            if "ts" in event:
                event["ts"] += shift
            events.append(event)
        everybody += facts
    fresh = target.with_name(target.name + ".new")
    _write(fresh, events, everybody, base)
    os.replace(fresh, target)
    return everybody


def _base(recorded: Recorded, facts: Facts) -> int:
    """Where its picture begins, in nanoseconds of the job's clock: numbers are small then, and exact."""
    reading = facts.readings[0]
    return reading.job_ns if recorded.last == 0.0 else reading.job_ns + int((recorded.first - reading.at) * 1e9)


def _write(path: Path, events: Iterable[dict[str, Any]], facts: Sequence[Facts], base: int) -> None:
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [')
        separator = b"\n"
        for event in events:
            file.write(separator + orjson.dumps(event))
            separator = b",\n"
        told = {"base_ns": base, "workers": [orjson.loads(facts_line(each)) for each in facts]}
        file.write(b'\n], "' + _FACTS_KEY.encode() + b'": ' + orjson.dumps(told) + b"}\n")


def _read(path: Path) -> tuple[list[Facts], int, list[dict[str, Any]]]:
    try:
        data = orjson.loads(path.read_bytes())
        told = data[_FACTS_KEY]
        facts = [_facts(each) for each in told["workers"]]
        events = data[_EVENTS_KEY]
        base = told["base_ns"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from None
    if type(base) is not int or not facts or not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise WireError("it has another form")
    return facts, base, events


def _read_part(path: Path) -> tuple[Recorded, Facts]:
    recorded = Recorded()
    facts: Facts | None = None
    with path.open("rb") as file:
        whole = os.fstat(file.fileno()).st_size
        while (line := file.readline()).endswith(b"\n"):  # else it was killed while it wrote this
            try:
                told = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise WireError(str(error)) from None
            if isinstance(told, dict):
                facts = _facts(told)
            elif isinstance(told, list):
                recorded.take(told)
            elif isinstance(told, str) and (packed := re.fullmatch(r"(\w+) (\d{1,18})", told, re.ASCII)) is not None:
                recorded.take_packed(packed[1], file.read(min(int(packed[2]), whole)))  # where it was killed meanwhile, there is less
            else:
                raise WireError("a line of it is none of those that a recorder writes")
    if facts is None:
        raise WireError("it does not say whose it is")
    return recorded, facts


def _facts(told: Any) -> Facts:
    try:
        readings = tuple(Reading(float(at), int(job), int(error)) for at, job, error in told["readings"])
        facts = Facts(str(told["worker"]), int(told["pid"]), str(told["host"]), readings, int(told["dropped"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"it does not say whose it is ({type(error).__name__}: {error})") from None
    if not facts.readings:
        raise WireError("it has no reading of the clock")
    return facts
