"""Codecs at work in a home's private threads, so that the loop never waits for them.

A thread cannot be stopped in the middle of a codec. So when a waiting task is cancelled, the job under way goes on, and its context
and its buffer go back when it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiorlinf.codec.compressing import ChunkJob, LeafCompressor, Piece
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor, Record
from aiorlinf.errors import AiorlinfError, ClosedError

if TYPE_CHECKING:
    from aiorlinf.codec.base import Context
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["CompressionRun", "decompress_record"]


class CompressionRun:
    """Compresses a leaf ahead of who sends it. Home thread only, one task at a time.

    Args:
        ahead: chunks that may be under way at once.
    """

    def __init__(self, home: LoopHome, compressor: LeafCompressor, *, ahead: int = 2) -> None:
        self.compressor = compressor
        self._home = home
        self._ahead = ahead
        self._ready: list[Piece] = []
        self._error: BaseException | None = None
        self._wake: asyncio.Future[None] | None = None
        self._closed = False

    async def pieces(self) -> list[Piece]:
        """The next pieces, in order, at least one; none: that was all, or the leaf is to be sent as it is (`LeafCompressor.raw`).

        While they are sent, the next ones are compressed. Each must be released once it is sent. Cancelling loses nothing: they come
        with the next call.

        Raises:
            ClosedError: the worker's threads are closed.
        """
        while True:
            self._start()
            if self._error is not None:
                raise self._error
            if self._ready or not self.compressor.running:
                ready, self._ready = self._ready, []
                return ready
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None

    def _start(self) -> None:
        while self._error is None and self.compressor.running < self._ahead and (job := self.compressor.next_job()) is not None:
            self._begin(job)

    def _begin(self, job: ChunkJob) -> None:
        def over(error: BaseException | None) -> None:
            pieces = self.compressor.finish(job)
            if self._closed:
                for piece in pieces:
                    piece.release()
                return
            self._error = self._error or error
            self._ready += pieces
            _wake(self._wake)

        _in_thread(self._home, over, job.run)

    def close(self) -> None:
        """Nobody wants more. Pieces that were handed out stay valid until they are released."""
        self._closed = True
        self._error = self._error or ClosedError("the compression was given up")
        self.compressor.abort()
        for piece in self._ready:
            piece.release()
        self._ready = []
        _wake(self._wake)


async def decompress_record(home: LoopHome, decompressor: Decompressor, record: Record, contexts: ContextPool | None) -> None:
    """Wait in line for a context, have the record decompressed, and finish it.

    Args:
        contexts: of the codec that the record names; None if it names none.

    Cancelling makes the leaf void: before it is this record's turn nothing was written; after that the codec works to its end.

    Raises:
        WireError: corrupt.
        ClosedError: the worker was closed.
    """
    context: Context | None = None
    if record.codec and contexts is not None:
        try:
            context = await contexts.acquire()
        except BaseException:
            decompressor.finish(record)
            raise
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def over(error: BaseException | None) -> None:
        if context is not None and contexts is not None:
            contexts.release(context)
        decompressor.finish(record)
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    _in_thread(home, over, record.run, context)
    try:
        await done
    except asyncio.CancelledError:
        if not done.cancelled():
            done.exception()  # it came in the same moment, and nobody will ask for it
        raise


def _in_thread(home: LoopHome, over: Callable[[BaseException | None], None], fn: Callable[..., None], *args: object) -> None:
    """Run `fn` in a private thread, and then, whatever becomes of it, `over` once on the home thread."""
    try:
        work: AsyncWork[Any] = home.submit(fn, *args)
    except AiorlinfError as error:
        over(error)
        return
    # Not awaited: a task that waits for a work cancels it, and what the thread uses would be taken from under it.
    work.add_done_callback(lambda finished: over(finished.exception()))


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
