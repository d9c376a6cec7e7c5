"""The thread that writes a job's output, so that a slow or stopped terminal never stops the launcher's loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, TextIO

__all__ = ["Printer", "Sink", "standard_sinks"]

HIGH_WATER = 4 << 20
"""Characters waiting to be written above which the workers' pipes are not read any more."""

_PIECE = 65536  # bytes of one write, so that progress can be seen

Channel = Literal["out", "err"]


class Sink:
    """Where one of the two streams goes.

    A real file descriptor is written to directly: a thread stuck in it then holds no lock that the interpreter needs to exit.
    Other streams (a notebook's, a test's) get text.
    """

    def __init__(self, stream: TextIO | None, original: TextIO | None) -> None:
        self._stream = stream
        self._fd: int | None = None
        self.pieces: int = 0  # counts the writes that succeeded
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        if stream is not None and stream is original and isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                self._fd = stream.fileno()

    @property
    def is_terminal(self) -> bool:
        """Whether a person may be looking."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def write(self, text: str) -> None:
        """Write all of it; blocks.

        Raises:
            OSError, ValueError: nobody reads any more, or the stream was closed.
        """
        if self._fd is not None:
            view = memoryview(text.encode(self.encoding, "backslashreplace"))
            while view:
                try:
                    view = view[os.write(self._fd, view[:_PIECE]) :]
                except BlockingIOError:  # somebody who shares the terminal made it non-blocking
                    select.select([], [self._fd], [], 1.0)
                else:
                    self.pieces += 1
        elif self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            self._stream.flush()
            self.pieces += 1


class Printer:
    """Takes whole lines from one loop, writes them in order from a thread of its own.

    `on_full` and `on_low` are called on the loop: to stop reading from the workers, and to go on.
    """

    def __init__(self, out: Sink, err: Sink, *, on_full: Callable[[], None], on_low: Callable[[], None]) -> None:
        self._sinks: dict[Channel, Sink] = {"out": out, "err": err}
        self._loop = asyncio.get_running_loop()
        self._on_full = on_full
        self._on_low = on_low
        self._queue: deque[tuple[Channel, str]] = deque()
        self._size = 0  # characters in the queue and in hand
        self._full = False  # above the high water, and not below the low one since
        self._closing = False
        self._wake = threading.Condition()
        self._done = asyncio.Event()
        self.lines: int = 0  # of all that was queued, for either stream
        self.lost: dict[Channel, str] = {}  # why a stream is not written to any more
        # A daemon: output that nobody reads shall not keep the process from ending.
        context = contextvars.copy_context()  # a notebook finds the cell of its output there
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="aiorlinf-printer", daemon=True)
        self._thread.start()

    def is_terminal(self, channel: Channel) -> bool:
        """Whether the stream is a terminal."""
        return self._sinks[channel].is_terminal

    def write(self, channel: Channel, text: str) -> None:
        """Queue text made of whole lines. Never blocks."""
        if not text:
            return
        self.lines += text.count("\n")
        with self._wake:
            self._queue.append((channel, text))
            self._size += len(text)
            self._wake.notify()
            filled = self._size > HIGH_WATER and not self._full
            self._full = self._full or filled
        if filled:
            self._on_full()

    async def close(self, limit: float | None) -> bool:
        """Wait until everything is written; give up after `limit` seconds without progress (None: never). Whether it was.

        Cancelling stops the waiting; what is not written yet may be lost.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        progress = -1
        while not self._done.is_set():
            now = sum(sink.pieces for sink in self._sinks.values())
            if now == progress:
                return False
            progress = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._done.wait()
        self._thread.join()
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                batch = list(self._queue)
                self._queue.clear()
            if not batch:
                break
            self._write_batch(batch)
            with self._wake:
                self._size -= sum(len(text) for _, text in batch)
                emptied = self._full and self._size <= HIGH_WATER // 2
                if emptied:
                    self._full = False
            if emptied:
                self._tell(self._low)
        self._tell(self._done.set)

    def _write_batch(self, batch: list[tuple[Channel, str]]) -> None:
        # Neighbours for the same stream leave in one write.
        start = 0
        while start < len(batch):
            channel, end = batch[start][0], start
            while end < len(batch) and batch[end][0] == channel:
                end += 1
            if channel not in self.lost:
                try:
                    self._sinks[channel].write("".join(text for _, text in batch[start:end]))
                except Exception as error:  # a stream of the user's may raise anything; the job is worth more than its output
                    self.lost[channel] = f"{type(error).__name__}: {error}"
            start = end

    def _low(self) -> None:
        if not self._full:  # it may have filled up again meanwhile
            self._on_low()

    def _tell(self, fn: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(fn)


def standard_sinks() -> tuple[Sink, Sink]:
    """The streams that Python code of this process writes to now."""
    return Sink(sys.stdout, sys.__stdout__), Sink(sys.stderr, sys.__stderr__)
