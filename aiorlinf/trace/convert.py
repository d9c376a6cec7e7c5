"""From what was recorded to the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing show. Pure.

One process is one worker; its rows are named by what they show: sends to each peer, messages from each, receives, calls of channels,
collectives, then-steps. What overlaps goes side by side. An arrow joins a send and the arrival of its message at the other worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiorlinf.errors import WireError
from aiorlinf.trace import events as kinds

__all__ = ["Recorded", "chrome_events"]

_SHORTEST_US = 0.1
"""So long something is shown at least that was over at once; an arrow needs a place to begin."""

_TAG = 0xFFFFFFFF


@dataclass(slots=True)
class _Out:
    """A message on its way out. Times are None as long as nothing was recorded of them."""

    opened: float
    born: float
    key: int
    size: int
    operation: str
    begun: float | None = None
    started: float | None = None
    way: str = ""
    left: float | None = None
    over: float | None = None
    well: bool = True
    codec: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class _In:
    """A message on its way in."""

    link: int
    number: int
    came: float
    size: int
    key: int
    matched: float | None = None
    called: float | None = None
    operation: str = ""
    coming: float | None = None
    way: str = ""
    there: float | None = None
    taken: float | None = None
    codec: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Span:
    row: str
    start: float
    end: float
    name: str
    args: dict[str, Any]
    parts: list[tuple[float, float, str]] = field(default_factory=list)
    arrow: tuple[str, str, float] | None = None  # "s" or "f", its id, and when


class Recorded:
    """Takes the events of one worker in any number of pieces.

    Attributes:
        first, last: the earliest and the latest time in them; `first` is infinite if there is none.
    """

    def __init__(self) -> None:
        self.first: float = math.inf
        self.last: float = 0.0
        self._links: dict[int, tuple[str, str, int]] = {}
        self._out: dict[tuple[int, int], _Out] = {}
        self._in: dict[int, _In] = {}
        self._steps: dict[int, list[Any]] = {}
        self._calls: list[Sequence[Any]] = []

    def take_packed(self, kind: str, data: bytes) -> None:
        """Some more of a kind of those that are packed; all that are whole.

        Raises:
            WireError: there is no such kind.
        """
        layout = kinds.LAYOUTS.get(kind)
        if layout is None:
            raise WireError(f"no events are called {kind!r:.100}")
        for time, *rest in layout.iter_unpack(data[: len(data) // layout.size * layout.size]):
            self._saw(time)
            if kind == "sent":
                message, key, size, link = rest
                self._out[link, message] = _Out(time, time, key, size, "send", over=time)
            elif kind == "came":
                message, key, size, order, link = rest
                self._in[order] = _In(link, message, time, size, key)
            elif kind == "passed":
                message, key, size, order, called, link = rest
                self._saw(called)
                self._in[order] = _In(link, message, time, size, key, time, called, "recv", taken=time)
            elif rest[0] in self._in:
                self._of_in(kinds.TAKEN, self._in[rest[0]], (time, time, "recv"))

    def take(self, events: Iterable[Sequence[Any]]) -> None:
        """Some more of the others.

        Raises:
            WireError: they are not what a recorder has written.
        """
        for event in events:
            try:
                self._one(event)
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise WireError(f"this is no recorded event: {event!r:.100}") from error

    def _one(self, event: Sequence[Any]) -> None:
        kind, rest = event[0], event[1:]
        if kind == kinds.LINK:
            number, us, peer, ordinal = rest
            self._links[number] = (us, peer, ordinal)
        elif kind == kinds.OPENED:
            link, message, time, born, key, size, operation = rest
            self._saw(born)
            self._saw(time)
            self._out[link, message] = _Out(time, born, key, size, operation)
        elif kind in (kinds.BEGUN, kinds.STARTED, kinds.LEFT, kinds.SENT):
            out = self._out.get((rest[0], rest[1]))
            if out is not None:  # else it was opened before the recording began
                self._of_out(kind, out, rest[2:])
        elif kind in (kinds.MATCHED, kinds.COMING, kinds.THERE, kinds.TAKEN):
            message_in = self._in.get(rest[0])
            if message_in is not None:
                self._of_in(kind, message_in, rest[1:])
        elif kind == kinds.CODEC:
            which, link, number, begin, end = rest
            of: _Out | _In | None = self._out.get((link, number)) if which == "out" else self._in.get(number)
            if of is not None:
                of.codec.append((begin, end))
        elif kind == kinds.STEP:
            number, time, name, order, before, site = rest
            self._saw(time)
            self._steps[number] = [time, None, name, order, before, site, "pending"]
        elif kind == kinds.STEP_OVER:
            number, time, how = rest
            self._saw(time)
            if number in self._steps:
                self._steps[number][1], self._steps[number][6] = time, how
        elif kind == kinds.CALL:
            begun, over, _operation, _subject, _how, _site = rest
            self._saw(begun)
            self._saw(over)
            self._calls.append(rest)
        else:
            raise ValueError

    def _saw(self, time: float) -> None:
        if time < self.first:
            self.first = time
        if time > self.last:
            self.last = time

    def _of_out(self, kind: int, out: _Out, rest: Sequence[Any]) -> None:
        self._saw(rest[0])
        if kind == kinds.BEGUN:
            out.begun = rest[0]
        elif kind == kinds.STARTED:
            out.started, out.way = rest
        elif kind == kinds.LEFT:
            out.left = rest[0]
        else:
            out.over, out.well = rest

    def _of_in(self, kind: int, message: _In, rest: Sequence[Any]) -> None:
        self._saw(rest[0])
        if kind == kinds.MATCHED:
            message.matched, message.called, message.operation = rest
        elif kind == kinds.COMING:
            message.coming, message.way = rest
        elif kind == kinds.THERE:
            message.there = rest[0]
        else:
            message.taken, message.called, message.operation = rest
            self._saw(message.called or message.came)

    # ---- what is shown

    def spans(self) -> Iterator[_Span]:
        """Everything, in no order. What has not ended does so with the last that was recorded."""
        for (link, number), out in self._out.items():
            yield self._sending(link, number, out)
        for message in self._in.values():
            yield from self._receiving(message)
        for number, (begun, over, name, order, before, site, how) in self._steps.items():
            args: dict[str, Any] = {"outcome": how, "attached at": site}
            if before >= 0:
                args["after step"] = before
            if order in self._in:
                args["of message"] = self._message_id(self._in[order].link, self._in[order].number, ours=False)
            yield _Span("then-steps", begun, self.last if over is None else over, name, {"step": number, **args})
        for begun, over, operation, subject, how, site in self._calls:
            row = "channels" if subject.startswith("channel") else "collectives"
            yield _Span(row, begun, over, f"{operation} {subject}", {"outcome": how, "called at": site})

    def _sending(self, link: int, number: int, out: _Out) -> _Span:
        end = self.last if out.over is None else out.over
        identity = self._message_id(link, number, ours=True)
        args = {"message": identity, "bytes": out.size, **_stream(out.key), "outcome": "done" if out.well else "failed"}
        if out.over is None:
            args["outcome"] = "pending"
        parts = [(out.born, out.begun or out.opened, "queued")]
        begun = out.begun or out.opened
        if out.started is not None:
            args["way"] = out.way
            if out.started > begun:
                parts.append((begun, out.started, "copied" if out.way in ("shm", "ipc") else "prepared"))
            begun = out.started
        if out.left is not None:
            if out.way not in ("shm", "ipc"):
                parts.append((begun, out.left, "on the wire"))
            parts.append((out.left, end, "waits for the answer"))
        elif out.over is not None and out.over > begun:
            parts.append((begun, end, "waits for the answer" if out.begun is None else "on the wire"))
        if out.codec:
            args["compress_ms"] = _worked(out.codec)
        span = _Span(f"to {self._peer(link)}", out.born, end, out.operation, args, parts, ("s", identity, out.started or out.opened))
        return span

    def _receiving(self, message: _In) -> Iterator[_Span]:
        peer = self._peer(message.link)
        identity = self._message_id(message.link, message.number, ours=False)
        end = self.last if message.taken is None else message.taken
        args = {"message": identity, "bytes": message.size, **_stream(message.key)}
        args["outcome"] = "unread" if message.taken is None else "taken"
        parts = []
        whole = message.there or message.came
        if message.coming is not None:
            args["way"] = message.way
            if message.coming > message.came:
                parts.append((message.came, message.coming, "waits for its payload"))
            parts.append((message.coming, whole, "in memory" if message.way in ("shm", "ipc") else "on the wire"))
        matched = message.matched or message.taken
        if matched is None or matched > whole:
            parts.append((whole, end if matched is None else matched, "unread"))
        if message.taken is not None and max(whole, matched or whole) < message.taken:
            parts.append((max(whole, matched or whole), message.taken, "rebuilt"))
        if message.codec:
            args["decompress_ms"] = _worked(message.codec)
            parts += [(begin, over, "decompressed") for begin, over in message.codec] if message.coming is None else []
        yield _Span(f"from {peer}", message.came, end, "message", args, parts, ("f", identity, message.came))
        for begin, over in message.codec:
            yield _Span("codecs", begin, over, "decompress", {"message": identity})
        if message.called is not None and message.taken is not None:
            waited = [(message.called, message.came, "waits")] if message.called < message.came else []
            yield _Span(f"receives from {peer}", message.called, message.taken, message.operation, {"message": identity}, waited)

    def codec_spans(self) -> Iterator[_Span]:
        """What codecs did for messages on their way out."""
        for (link, number), out in self._out.items():
            for begin, over in out.codec:
                yield _Span("codecs", begin, over, "compress", {"message": self._message_id(link, number, ours=True)})

    def _peer(self, link: int) -> str:
        return self._links[link][1] if link in self._links else "?"

    def _message_id(self, link: int, number: int, *, ours: bool) -> str:
        """The same at both ends."""
        us, peer, ordinal = self._links.get(link, ("?", "?", 0))
        source, target = (us, peer) if ours else (peer, us)
        return f"{source}>{target}/{ordinal}:{number}"


def _stream(key: int) -> dict[str, Any]:
    context = key >> 32
    return {"tag": key & _TAG, **({"group": f"{context:08x}"} if context else {})}


def _worked(spans: Sequence[tuple[float, float]]) -> float:
    return round(sum(over - begin for begin, over in spans) * 1000, 3)


def chrome_events(recorded: Recorded, process: int, name: str, clock: Callable[[float], float]) -> Iterator[dict[str, Any]]:
    """The events of one worker.

    Args:
        process: its number in the picture.
        name: of the process there.
        clock: makes microseconds of what was recorded.
    """
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    rows: dict[str, list[_Span]] = {}
    for span in (*recorded.spans(), *recorded.codec_spans()):
        rows.setdefault(span.row, []).append(span)
    thread = 0
    for row in sorted(rows):
        lanes: list[tuple[float, int]] = []  # when it is free, and which
        for span in sorted(rows[row], key=lambda span: (span.start, -span.end)):
            start = clock(span.start)
            end = max(clock(span.end), start + _SHORTEST_US)
            if lanes and lanes[0][0] <= start:
                lane = heapq.heappop(lanes)[1]
            else:
                thread += 1
                lane = thread
                yield {"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": {"name": row}}
                yield {"ph": "M", "pid": process, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}
            heapq.heappush(lanes, (end, lane))
            yield from _slices(span, process, lane, start, end, clock)


def _slices(span: _Span, process: int, lane: int, start: float, end: float, clock: Callable[[float], float]) -> Iterator[dict[str, Any]]:
    where = {"pid": process, "tid": lane}
    yield {"ph": "X", **where, "cat": span.row.split(" ")[0], "name": span.name, "ts": start, "dur": end - start, "args": span.args}
    at = start
    for begin, over, name in span.parts:
        begun, ended = max(clock(begin), at), min(clock(over), end)
        if ended > begun:
            yield {"ph": "X", **where, "cat": "stage", "name": name, "ts": begun, "dur": ended - begun}
            at = ended
    if span.arrow is not None:
        phase, identity, moment = span.arrow
        flow = {"ph": phase, **where, "cat": "message", "name": "message", "id": identity, "ts": min(max(clock(moment), start), end)}
        yield {**flow, "bp": "e"} if phase == "f" else flow
