"""One message's payload on its way out: leaf after leaf, some through a codec, the others as they are. Pure.

A leaf that is tried begins with a leaf header on the wire, also if it goes as it is after all; the receiver is told which leaves are tried
and which are not (`Start.place` of a coded payload).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from aiorlinf.codec.base import Context
from aiorlinf.codec.compressing import ChunkJob, LeafCompressor, Piece
from aiorlinf.codec.contexts import ContextSource
from aiorlinf.codec.header import plain_header

__all__ = ["AHEAD_BYTES", "BATCH_BYTES", "Batch", "MakeCompressor", "PayloadCompressor"]

BATCH_BYTES = 1024 * 1024
"""So much is compressed in one call of a thread: a call costs as much as some 100 KB of it, so small leaves share one."""

AHEAD_BYTES = 4 * BATCH_BYTES
"""So much may be compressed before it is sent: enough for both threads to work while the network takes what is ready."""

MakeCompressor = Callable[[memoryview, ContextSource], LeafCompressor]


class _Leaf:
    """One leaf. `begun` bytes of it were handed out to be compressed, or are sure to go as they are."""

    __slots__ = ("begun", "compressor", "pieces", "src", "tried")

    def __init__(self, src: memoryview, tried: bool) -> None:
        self.src = src
        self.tried = tried and src.nbytes > 0  # nothing at all travels of an empty one
        self.compressor: LeafCompressor | None = None
        self.pieces: list[Piece] = []  # ready, behind what is not
        self.begun = 0


class _Part:
    """What goes on the wire next. `covers` bytes of the payload are through when all of it is; None: as many as its own."""

    __slots__ = ("covers", "piece", "tried", "view")

    def __init__(self, view: memoryview, covers: int | None, piece: Piece | None, tried: bool) -> None:
        self.view = view
        self.covers = covers
        self.piece = piece
        self.tried = tried


class _Lender:
    """Lends the one context of a batch to all of its jobs, which use it one after the other."""

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: Context | None = None

    def try_acquire(self) -> Context | None:
        return self.context

    def release(self, context: Context) -> None:
        """It goes back to its pool with the batch."""


class Batch:
    """Work for one call of a thread. `run` it once, in any thread, then hand it to `PayloadCompressor.finish` on the home thread.

    Attributes:
        nbytes: of the chunks in it.
    """

    __slots__ = ("_jobs", "_payload", "nbytes")

    def __init__(self, payload: PayloadCompressor, jobs: list[tuple[_Leaf, ChunkJob]]) -> None:
        self._payload = payload
        self._jobs = jobs
        self.nbytes: int = sum(job.nbytes for _, job in jobs)

    def run(self) -> None:
        """Compress. Does not raise; stops early when nobody wants the payload any more."""
        spans = self._payload.spans
        begun = 0.0 if spans is None else monotonic()
        for _, job in self._jobs:
            if self._payload.dropped:
                return
            job.run()
        if spans is not None:
            spans.append((begun, monotonic()))


class PayloadCompressor:
    """See the module. Home thread only, but for `Batch.run`.

    Hands out work by `batch`, and what is ready to be sent by `take`; nothing here waits. Every batch must be finished, also after `drop`
    and also if it could not run.

    Args:
        leaves: the bytes of each, and whether it is tried. They are read until all is sent.
        make: makes the compressor of a leaf.
        ahead: bytes that may be compressed before they are taken. A leaf that has not got smaller within so many goes as it is.

    Attributes:
        tried_bytes: of the leaves that are tried.
        taken: bytes that were taken.
        borrows: some of that was memory of the leaves themselves.
        dropped: nobody wants the rest.
        spans: begin and end of each batch, by `time.monotonic`; None: nobody wants to know.
        on_ready: called when there is more to take, or when it is dropped.
        on_room: called when there may be more to compress.
    """

    lends = True

    def __init__(self, leaves: Sequence[tuple[memoryview, bool]], make: MakeCompressor, *, ahead: int = AHEAD_BYTES) -> None:
        self.dropped: bool = False
        self.spans: list[tuple[float, float]] | None = None
        self.on_ready: Callable[[], None] = _nothing
        self.on_room: Callable[[], None] = _nothing
        self._leaves = [_Leaf(src, tried) for src, tried in leaves]
        self.tried_bytes: int = sum(leaf.src.nbytes for leaf in self._leaves if leaf.tried)
        self._make = make
        self._limit = ahead
        self._lender = _Lender()
        self._next = 0  # the leaf that is being handed out
        self._emitted = 0  # leaves whose parts are all in `_ready`, or were
        self._ahead = 0  # bytes of tried leaves that were begun and not taken
        self._ready: deque[_Part] = deque()
        self._lent: list[Piece] = []
        self.taken: int = 0
        self.borrows: bool = False
        self._emit()

    # ---- compressing

    @property
    def wants(self) -> bool:
        """There may be something to compress now."""
        return not self.dropped and self._next < len(self._leaves) and self._ahead < self._limit

    def batch(self, context: Context | None) -> Batch | None:
        """The next work, None if there is none now. With no context, leaves that are not committed to a codec yet go as they are."""
        self._lender.context = context
        jobs: list[tuple[_Leaf, ChunkJob]] = []
        size = 0
        while self.wants and size < BATCH_BYTES:
            leaf = self._leaves[self._next]
            if not leaf.tried:
                self._next += 1
                continue
            compressor = leaf.compressor
            if compressor is None:
                compressor = leaf.compressor = self._make(leaf.src, self._lender)
            job = compressor.next_job()
            if job is not None:
                jobs.append((leaf, job))
                size += job.nbytes
                self._begin(leaf, job.nbytes)
            elif compressor.exhausted:
                self._begin(leaf, leaf.src.nbytes - leaf.begun)
                self._next += 1
            else:
                break  # its samples are being looked at, or its own jobs have all the buffers
        self._lender.context = None
        self._emit()
        return Batch(self, jobs) if jobs else None

    def _begin(self, leaf: _Leaf, nbytes: int) -> None:
        leaf.begun += nbytes
        self._ahead += nbytes

    def finish(self, batch: Batch) -> None:
        """A batch is over. What it has made is ready, as far as all before it is."""
        for leaf, job in batch._jobs:
            assert leaf.compressor is not None
            refused = not job.ran and not self.dropped
            leaf.pieces += leaf.compressor.finish(job)
            if leaf.begun >= self._limit:
                leaf.compressor.end_trial()
            if refused:  # the worker's threads are closed: it will never be whole
                self.drop()
        if self.dropped:
            for leaf, _ in batch._jobs:
                _release(leaf.pieces)
            return
        self._emit()

    # ---- sending

    def _emit(self) -> None:
        """Move what is ready to be sent to where it is taken from."""
        before = len(self._ready)
        while self._emitted < len(self._leaves):
            leaf = self._leaves[self._emitted]
            if not leaf.tried:
                self._add(leaf.src, None, None, False)
            else:
                compressor = leaf.compressor
                for piece in leaf.pieces:
                    self._add(memoryview(piece.head), 0, None, True)
                    self._add(piece.body, piece.original, piece, True)
                leaf.pieces = []
                if compressor is None or not compressor.finished:
                    break
                if compressor.raw is not None:
                    self._add(memoryview(plain_header(leaf.src.nbytes)), 0, None, True)
                    self._add(leaf.src, None, None, True)
            self._emitted += 1
        if len(self._ready) > before:
            self.on_ready()

    def _add(self, view: memoryview, covers: int | None, piece: Piece | None, tried: bool) -> None:
        if view.nbytes:
            self.borrows |= covers is None or (piece is not None and piece.borrowed)
            self._ready.append(_Part(view, covers, piece, tried))

    @property
    def over(self) -> bool:
        """Everything was taken."""
        return not self._ready and self._emitted == len(self._leaves) and not self.dropped

    def take(self, limit: int) -> tuple[list[memoryview], int, int] | None:
        """What goes on the wire next, at most `limit` bytes: the views, their bytes, and how many of the payload's they stand for.

        None: there is nothing now. The views stay valid until `sent` is called.
        """
        views: list[memoryview] = []
        size = progress = 0
        ready = self._ready
        while ready and size < limit:
            part = ready[0]
            view = part.view
            if view.nbytes > limit - size:
                view, part.view = view[: limit - size], view[limit - size :]
                covered = view.nbytes if part.covers is None else 0
            else:
                ready.popleft()
                covered = view.nbytes if part.covers is None else part.covers
                if part.piece is not None:
                    self._lent.append(part.piece)
            views.append(view)
            size += view.nbytes
            progress += covered
            if part.tried:
                self._ahead -= covered
        self.taken += size
        return (views, size, progress) if size else None

    def sent(self) -> None:
        """The kernel has all that was taken: its buffers are free for the next ones."""
        _release(self._lent)
        if self.wants:
            self.on_room()

    def drop(self) -> None:
        """Nobody wants the rest. What was taken stays valid until `sent`, or until the last view of it is gone."""
        if self.dropped:
            return
        self.dropped = True
        for leaf in self._leaves[self._emitted :]:
            if leaf.compressor is not None:
                leaf.compressor.abort()
            _release(leaf.pieces)
        for part in self._ready:
            if part.piece is not None:
                part.piece.release()
        self._ready.clear()
        self._leaves = []
        self._next = self._emitted = 0
        self.on_ready()
        self.on_ready = self.on_room = _nothing  # they refer back to it


def _nothing() -> None:
    """Nobody listens."""


def _release(pieces: list[Piece]) -> None:
    for piece in pieces:
        piece.release()
    pieces.clear()
