"""Decompresses what all links of a worker receive in the home's private threads, in the order in which it has arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from aiorlinf.codec.base import Context
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Record
from aiorlinf.codec.encoder import AT_ONCE_BYTES, THREADS, in_thread
from aiorlinf.codec.payload import BATCH_BYTES
from aiorlinf.codec.registry import codecs_by_number
from aiorlinf.codec.turn_budget import TurnBudget
from aiorlinf.errors import AiorlinfError, ClosedError, WireError

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Decoder", "RecordOwner"]


class RecordOwner(Protocol):
    """The payload that records belong to."""

    @property
    def wanted(self) -> bool:
        """Somebody still wants it. Asked in any thread."""

    @property
    def spans(self) -> list[tuple[float, float]] | None:
        """Gets begin and end of each record's work, by `time.monotonic`; None: nobody wants to know."""

    def finish(self, record: Record, error: AiorlinfError | None) -> None:
        """A record is over: decompressed (`Record.ran`), void, or not wanted. To be called once for each record, on the home thread."""


class _Item:
    __slots__ = ("error", "owner", "record")

    def __init__(self, record: Record, owner: RecordOwner) -> None:
        self.record = record
        self.owner = owner
        self.error: AiorlinfError | None = None


class _Batch:
    """Work for one call of a thread."""

    __slots__ = ("context", "items")

    def __init__(self, items: list[_Item], context: Context | None) -> None:
        self.items = items
        self.context = context

    def run(self) -> None:
        for item in self.items:
            if not item.owner.wanted:
                continue
            spans = item.owner.spans
            begun = 0.0 if spans is None else monotonic()
            try:
                item.record.run(self.context)
            except AiorlinfError as error:
                item.error = error
            except Exception as error:  # such as no memory: it concerns this message only
                item.error = WireError(f"a compressed tensor cannot be decompressed here: {type(error).__name__}: {error}")
            if spans is not None:
                spans.append((begun, monotonic()))


class Decoder:
    """See the module. Home thread only.

    A record waits for a context here, with its bytes in hand; nobody waits for the network or for memory while he has one.

    Args:
        contexts: those of a codec, by its number; raises WireError if it cannot be had here.

    Attributes:
        running: batches under way.
    """

    def __init__(self, home: LoopHome, contexts: Callable[[int], ContextPool], *, at_once: int = THREADS) -> None:
        self.running: int = 0
        self._home = home
        self._contexts = contexts
        self._at_once = at_once
        self._queue: deque[_Item] = deque()
        self._waiting = False  # for a context
        self._budget = TurnBudget(home, AT_ONCE_BYTES)

    def add(self, record: Record, owner: RecordOwner) -> None:
        """Decompress a record, or tell its owner why not; a short one perhaps before this returns."""
        short = not self._queue and record.original <= _short(record.codec) and self._budget.take(record.original)
        if short and self._decompress(record, owner):
            return
        self._queue.append(_Item(record, owner))
        self._run()

    def _decompress(self, record: Record, owner: RecordOwner) -> bool:
        """Here and now. False: there is no context."""
        contexts = context = None
        if record.codec:
            try:
                contexts = self._contexts(record.codec)
                context = contexts.try_acquire()
            except (AiorlinfError, MemoryError):
                return False  # it is said where the others wait
            if context is None:
                return False
        batch = _Batch([_Item(record, owner)], context)
        batch.run()
        if contexts is not None and context is not None:
            contexts.release(context)
        owner.finish(record, batch.items[0].error)
        return True

    def _run(self) -> None:
        while self._queue and not self._waiting and self.running < self._at_once:
            item = self._queue[0]
            if not item.owner.wanted:
                self._queue.popleft()
                item.owner.finish(item.record, None)
                continue
            if not item.record.codec:
                self._begin(None, None)
                continue
            try:
                contexts = self._contexts(item.record.codec)
                context = contexts.try_acquire()
            except (AiorlinfError, MemoryError) as error:
                self._queue.popleft()
                item.owner.finish(item.record, error if isinstance(error, AiorlinfError) else WireError(f"no memory for a codec: {error}"))
                continue
            if context is None:
                self._wait(contexts)
            else:
                self._begin(contexts, context)

    def _wait(self, contexts: ContextPool) -> None:
        self._waiting = True
        try:
            self._home.spawn(self._acquire(contexts), "wait for a codec's context")
        except AiorlinfError as error:
            self._give_up(error)

    async def _acquire(self, contexts: ContextPool) -> None:
        try:
            context = await contexts.acquire()
        except AiorlinfError as error:
            self._give_up(error)
            return
        except BaseException:  # the home was closed
            self._give_up(ClosedError("the worker was closed while a payload waited to be decompressed"))
            raise
        self._waiting = False
        self._begin(contexts, context)
        self._run()

    def _give_up(self, error: AiorlinfError) -> None:
        """The worker is closing: nothing is decompressed any more."""
        queue, self._queue = self._queue, deque()
        for item in queue:
            item.owner.finish(item.record, error)
        self._waiting = False

    def _begin(self, contexts: ContextPool | None, context: Context | None) -> None:
        """Start a batch of what is first in line, and of what comes after it and can go along."""
        items: list[_Item] = []
        size = codec = 0
        while self._queue and size < BATCH_BYTES:
            record = self._queue[0].record
            if record.codec and (codec or record.codec) != record.codec:
                break
            if record.codec and context is None:
                break
            codec = codec or record.codec
            size += record.original
            items.append(self._queue.popleft())
        if not items:  # all were given up meanwhile
            if contexts is not None and context is not None:
                contexts.release(context)
            return
        batch = _Batch(items, context)
        self.running += 1

        def over(error: BaseException | None) -> None:
            self.running -= 1
            if contexts is not None and context is not None:
                contexts.release(context)
            for item in batch.items:
                failure = item.error or (error if isinstance(error, AiorlinfError) else None)
                item.owner.finish(item.record, failure)
            self._run()

        in_thread(self._home, batch, over)


def _short(codec: int) -> int:
    """Bytes that the loop may decompress itself."""
    known = codecs_by_number().get(codec)
    return AT_ONCE_BYTES if not codec else 0 if known is None else known.undone_at_once
