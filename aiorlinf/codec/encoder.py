"""Compresses the payloads of all links of a worker in the home's private threads, in turns.

No more batches are under way than there are threads for. So a context is held only while a codec works, not while a batch waits for a
thread, and payloads that are sent at the same time share the threads instead of taking each other's contexts away.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.codec.base import Context
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.payload import Batch, PayloadCompressor
from aiorlinf.codec.turn_budget import TurnBudget
from aiorlinf.errors import AiorlinfError

if TYPE_CHECKING:
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["AT_ONCE_BYTES", "THREADS", "Encoder", "in_thread"]

THREADS = 2
"""Of a home."""

AT_ONCE_BYTES = 256 * 1024
"""In one turn of the loop; a fraction of a millisecond."""


class _Call(Protocol):
    """What runs in a thread."""

    def run(self) -> None:
        """In a thread. Does not raise."""


class _Entry:
    """A payload and where its contexts come from. `queued`: it is in line."""

    __slots__ = ("contexts", "payload", "queued")

    def __init__(self, payload: PayloadCompressor, contexts: ContextPool) -> None:
        self.payload = payload
        self.contexts = contexts
        self.queued = False


class Encoder:
    """See the module. Home thread only.

    A thread cannot be stopped in the middle of a codec. When a payload is dropped, the chunk under way is finished, and then its context
    and its buffer go back.

    Attributes:
        running: batches under way.
    """

    def __init__(self, home: LoopHome, *, at_once: int = THREADS) -> None:
        self.running: int = 0
        self._home = home
        self._at_once = at_once
        self._queue: deque[_Entry] = deque()
        self._lent: dict[ContextPool, int] = {}
        self._starting = False
        self._budget = TurnBudget(home, AT_ONCE_BYTES)

    def add(self, payload: PayloadCompressor, contexts: ContextPool, at_once: int = 0) -> None:
        """Compress a payload, ahead of who takes it, with contexts from here.

        Args:
            at_once: bytes that the loop may compress itself, if that is all there is to compress.
        """
        if payload.tried_bytes <= at_once and self._budget.take(payload.tried_bytes):
            self._compress(payload, contexts)
        entry = _Entry(payload, contexts)
        payload.on_room = lambda: self._queue_up(entry)
        self._queue_up(entry)

    def _compress(self, payload: PayloadCompressor, contexts: ContextPool) -> None:
        """Here and now, as far as there is a context."""
        context = _try(contexts)
        if context is None:
            return
        batch = payload.batch(context)
        if batch is not None:
            batch.run()
        contexts.release(context)
        if batch is not None:
            payload.finish(batch)

    def _queue_up(self, entry: _Entry) -> None:
        if not entry.queued and entry.payload.wants:
            entry.queued = True
            self._queue.append(entry)
            self._run()

    def _run(self) -> None:
        if self._starting:  # what is ready is sent at once, and that may lead back here
            return
        self._starting = True
        try:
            self._start()
        finally:
            self._starting = False

    def _start(self) -> None:
        while self._queue and self.running < self._at_once:
            entry = self._queue[0]
            if not entry.payload.wants:
                self._queue.popleft().queued = False
                continue
            contexts = entry.contexts
            context = _try(contexts)
            if context is None and self._lent.get(contexts):
                return  # our own batches have them, and will be over soon
            self._queue.popleft().queued = False
            batch = entry.payload.batch(context)
            if batch is None:
                # It waits for a batch of its own, or goes on as it is; both lead back here.
                if context is not None:
                    contexts.release(context)
                continue
            self._begin(entry, batch, context)
            self._queue_up(entry)  # behind the others

    def _begin(self, entry: _Entry, batch: Batch, context: Context | None) -> None:
        contexts = entry.contexts
        self.running += 1
        if context is not None:
            self._lent[contexts] = self._lent.get(contexts, 0) + 1

        def over(_error: BaseException | None) -> None:
            self.running -= 1
            if context is not None:
                self._lent[contexts] -= 1
                if not self._lent[contexts]:
                    del self._lent[contexts]
                contexts.release(context)
            entry.payload.finish(batch)
            self._queue_up(entry)
            self._run()

        in_thread(self._home, batch, over)


def _try(contexts: ContextPool) -> Context | None:
    try:
        return contexts.try_acquire()
    except MemoryError:  # then it is sent as it is
        return None


def in_thread(home: LoopHome, call: _Call, over: Any) -> None:
    """Run `call` in a private thread, and then, whatever becomes of it, call `over` once on the home thread, with the error if any."""
    try:
        work: AsyncWork[Any] = home.submit(call.run)
    except AiorlinfError as error:
        over(error)
        return
    # Not awaited: a task that waits for a work cancels it, and what the thread uses would be taken from under it.
    work.add_done_callback(lambda finished: over(finished.exception()))
