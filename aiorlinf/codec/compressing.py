"""One leaf on its way out: cut into chunks, each compressed in any thread, handed on in order.

The leaf is committed to being compressed only once what its chunks have saved pays for all headers, including those of chunks to
come even if not one of them gets smaller. So a tensor that is sent compressed is always smaller by it, although its end is not looked
at when its beginning leaves. Until then it can still go as it is; after that, a chunk that finds no context or no buffer, or does not
get smaller, goes as it is within the compressed leaf.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.contexts import ContextSource
from aiorlinf.codec.header import LEAF_HEADER, MAX_CHUNK, MIN_CHUNK, RECORD_HEADER, LeafHeader, pack_record
from aiorlinf.codec.memory import BufferLease, BufferSource, byte_view
from aiorlinf.codec.pace import Pace
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.sampling import SAMPLE, SAMPLED_FROM, looks_random
from aiorlinf.codec.stats import CompressionStats

__all__ = ["ChunkJob", "LeafCompressor", "Piece", "compress_chunks"]

log: logging.Logger = logging.getLogger("aiorlinf.codec")


class Piece:
    """What goes on the wire next: a header, then a body. Both must not change until they are sent.

    Attributes:
        head: the record's header, behind the leaf's in the first piece.
        body: a part of a buffer, or of the tensor itself.
        original: bytes of the tensor that it stands for.
    """

    __slots__ = ("_lease", "body", "head", "original")

    def __init__(self, head: bytes, body: memoryview, original: int, lease: BufferLease | None) -> None:
        self.head: bytes = head
        self.body: memoryview = body
        self.original: int = original
        self._lease = lease

    @property
    def borrowed(self) -> bool:
        """`body` is a part of the tensor."""
        return self._lease is None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.head) + self.body.nbytes

    def release(self) -> None:
        """It is sent, or never will be: the buffer is free for the next one."""
        self.body = memoryview(b"")
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class ChunkJob:
    """One chunk's share of the work. `run` it once, in any thread, then hand it to `LeafCompressor.finish` on the home thread.

    Attributes:
        ran: whether `run` was called and came back.
    """

    __slots__ = (
        "_alone",
        "_context",
        "_lease",
        "_limit",
        "_look",
        "_reason",
        "_seconds",
        "_src",
        "_target",
        "head",
        "index",
        "ran",
        "stored",
    )

    def __init__(
        self,
        index: int,
        src: memoryview,
        limit: int,
        context: Context | None,
        lease: BufferLease | None,
        *,
        look: memoryview | None,
        alone: bool,
        reason: RawReason | None,
    ) -> None:
        self.index: int = index
        self.ran: bool = False
        self.stored: int | None = None  # bytes after; None: as it is
        self.head: bytes = b""
        self._src = src
        self._limit = limit
        self._context = context
        self._lease = lease
        self._target: memoryview | None = None if lease is None else lease.view
        self._look = look  # the whole leaf, to be sampled first
        self._alone = alone
        self._reason = reason
        self._seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk."""
        return self._src.nbytes

    def run(self) -> None:
        """Compress the chunk and take its checksum. Does not raise: what a codec fails at goes as it is."""
        start = time.perf_counter()
        if self._context is not None and self._target is not None:
            try:
                self._compress(self._context, self._target)
            except Exception:  # a codec at its limits (such as no memory) must not fail a send that works without it
                log.warning("a tensor is sent as it is, because its codec failed", exc_info=True)
                self._reason = RawReason.FAILED
        if self.stored is not None and self._target is not None:
            self.head = pack_record(self.index, self._target[: self.stored], raw=False)
        elif not self._alone:
            self.head = pack_record(self.index, self._src, raw=True)
        self._seconds = time.perf_counter() - start
        self.ran = True

    def _compress(self, context: Context, target: memoryview) -> None:
        if self._look is not None and looks_random(context, self._look, target):
            self._reason = RawReason.RANDOM
            return
        size = context.compress_into(self._src, target[: self._limit])
        if size is None:
            self._reason = RawReason.NOT_SMALLER
        else:
            self.stored = size


class LeafCompressor:
    """See the module. Home thread only, but for `ChunkJob.run`. Nothing here waits.

    Ask for `next_job` until it gives none, `run` each anywhere, `finish` each in any order; pieces come out in order. Every job
    must be finished, also after `abort` and also if it could not run: that is when its context and its buffer go back.

    Args:
        src: the leaf's bytes, contiguous; read until all pieces are released.
        chunk_bytes: bytes of one chunk, from `MIN_CHUNK` to `MAX_CHUNK`.
        pace: says how many times larger they may be, and is told how long each took.
        whole: commit only when all of it is compressed, so that the first piece tells the size of everything.

    Attributes:
        raw: why the leaf is to be sent as it is; None: it is not, or not known yet.
        committed: it is sent compressed.
        running: jobs that were given out and not finished.
    """

    def __init__(
        self,
        src: memoryview,
        codec: Codec[Any],
        contexts: ContextSource,
        buffers: BufferSource,
        stats: CompressionStats,
        *,
        chunk_bytes: int,
        whole: bool = False,
        pace: Pace | None = None,
    ) -> None:
        if not MIN_CHUNK <= chunk_bytes <= MAX_CHUNK:
            raise ValueError(f"chunks of {chunk_bytes} bytes; from {MIN_CHUNK} to {MAX_CHUNK} are possible")
        self.raw: RawReason | None = None
        self.committed: bool = False
        self.running: int = 0
        self._src = byte_view(src)
        self._contexts = contexts
        self._buffers = buffers
        self._stats = stats
        self._whole = whole
        self._pace = pace
        nbytes = self._src.nbytes
        self._usual = min(chunk_bytes, nbytes)
        self._cut(codec.number, self._usual if pace is None else min(pace.chunk(chunk_bytes, nbytes), MAX_CHUNK, nbytes))
        self._looks = nbytes >= SAMPLED_FROM and chunk_bytes >= SAMPLE
        self._looker = codec.looker()
        self._next = 0
        self._emitted = 0
        self._saved = 0
        self._results: dict[int, ChunkJob] = {}
        self._aborted = False
        if nbytes <= self._overhead + 1:
            self._give_up(RawReason.NOT_SMALLER)
        elif nbytes > codec.max_input:
            self._give_up(RawReason.TOO_LARGE)

    def _cut(self, codec: int, chunk: int) -> None:
        nbytes = self._src.nbytes
        self._header = LeafHeader(codec, nbytes, None, chunk)
        self._chunks = self._header.chunks if nbytes else 0
        self._overhead = LEAF_HEADER + RECORD_HEADER * self._chunks

    @property
    def nbytes(self) -> int:
        """Bytes of the leaf."""
        return self._header.original

    @property
    def finished(self) -> bool:
        """Nothing more will come out: all pieces did, or it is `raw`, or it was aborted."""
        return self.raw is not None or self._aborted or self._emitted == self._chunks

    @property
    def exhausted(self) -> bool:
        """`next_job` gives no more, now or later."""
        return self.raw is not None or self._aborted or self._next == self._chunks

    def next_job(self) -> ChunkJob | None:
        """The next chunk's work; None: there is none now (later there may be, when a job was finished), or ever (`exhausted`)."""
        if self.exhausted:
            return None
        if self._looks and self._looker is not None and self._next == 0:
            self._look(self._looker)
            if self.raw is not None:
                return None
        look = self._looks and self._next == 0
        if self._looks and self._next and not self._emitted and 0 not in self._results:
            return None  # the samples are being looked at; more work might be for nothing
        context, lease, shortage = self._resources()
        if shortage is not None and self.running:
            return None  # our own jobs have it, and will be over soon
        if shortage is not None and not self.committed:
            self._give_up(shortage)
            return None
        start, end = self._header.span(self._next)
        alone = self._chunks == 1
        job = ChunkJob(
            self._next,
            self._src[start:end],
            end - start - 1 - (self._overhead if alone else 0),
            context,
            lease,
            look=self._src if look else None,
            alone=alone,
            reason=shortage,
        )
        self._next += 1
        self.running += 1
        return job

    def _look(self, looker: Context) -> None:
        """Look at the samples here and now, so that what is sent as it is after all has not waited for a thread."""
        self._looks = False
        start = time.perf_counter()
        try:
            random = looks_random(looker, self._src, memoryview(bytearray(SAMPLE)))
        except Exception:  # as in `ChunkJob.run`
            log.warning("a tensor is sent as it is, because its codec failed", exc_info=True)
            self._give_up(RawReason.FAILED)
            return
        finally:
            self._stats.worked(time.perf_counter() - start)
        if random:
            self._give_up(RawReason.RANDOM)

    def _resources(self) -> tuple[Context | None, BufferLease | None, RawReason | None]:
        try:
            context = self._contexts.try_acquire()
        except MemoryError:
            return None, None, RawReason.FAILED
        if context is None:
            return None, None, RawReason.NO_CONTEXT
        lease = self._buffers.acquire(self._header.chunk)  # for the last chunk too: buffers of one size fit each other
        if lease is None and not self._next and self._header.chunk > self._usual:
            self._cut(self._header.codec, self._usual)
            lease = self._buffers.acquire(self._usual)
        if lease is None:
            self._contexts.release(context)
            return None, None, RawReason.NO_BUFFER
        return context, lease, None

    def finish(self, job: ChunkJob) -> list[Piece]:
        """A job is over; returns the pieces that are to be sent now, in order. Each must be released once it is sent."""
        self.running -= 1
        context, job._context = job._context, None
        if context is not None:
            self._contexts.release(context)
        self._stats.worked(job._seconds)
        if self._pace is not None and job._seconds:
            self._pace.note(job.nbytes, job._seconds)
        if not job.ran:
            self._aborted = True  # it was not run because everything ends
        if job.stored is None:
            _drop(job, keep=False)  # a buffer that did not pay
        if self._aborted or self.raw is not None:
            _drop(job, keep=True)
            self._drop_results()
            return []
        if job._reason is RawReason.RANDOM and not self.committed:
            self._give_up(RawReason.RANDOM)
            return []
        self._results[job.index] = job
        if job.stored is not None:
            self._saved += job._src.nbytes - job.stored
        return self._emit() if self._commit() else []

    def _commit(self) -> bool:
        if self.committed:
            return True
        complete = len(self._results) == self._chunks
        if self._saved > self._overhead and (complete or not self._whole):
            self.committed = True
            if complete:
                stored = self.nbytes - self._saved + RECORD_HEADER * self._chunks
                self._header = LeafHeader(self._header.codec, self.nbytes, stored, self._header.chunk)
            self._stats.began()
            return True
        if complete:
            failed = any(result._reason is RawReason.FAILED for result in self._results.values())
            self._give_up(RawReason.FAILED if failed else RawReason.NOT_SMALLER)
        return False

    def _emit(self) -> list[Piece]:
        pieces = []
        while (job := self._results.pop(self._emitted, None)) is not None:
            head = job.head if self._emitted else self._header.encode() + job.head
            body, reason = job._src, job._reason
            if job.stored is not None and job._target is not None:
                body, reason = job._target[: job.stored], None
            lease, job._lease, job._target = job._lease, None, None
            piece = Piece(head, body, job.nbytes, lease)
            self._stats.sent(job._src.nbytes, piece.nbytes, reason)
            pieces.append(piece)
            self._emitted += 1
        return pieces

    def end_trial(self) -> None:
        """If it is not committed by now, and nothing is under way that could change that, it goes as it is: what has been looked at does
        not get smaller, and nothing can be sent as long as that is all there is."""
        if not self.committed and not self.exhausted and not self.running:
            self._give_up(RawReason.NOT_SMALLER)

    def _give_up(self, reason: RawReason) -> None:
        self.raw = reason
        self._stats.stayed_raw(reason, self.nbytes)
        self._drop_results()

    def abort(self) -> None:
        """Nobody wants it any more. Pieces that came out stay valid until they are released; jobs under way must still be finished."""
        self._aborted = True
        self._drop_results()

    def _drop_results(self) -> None:
        # Within a leaf that did not pay, single chunks may have.
        for job in self._results.values():
            _drop(job, keep=self.raw is not RawReason.NOT_SMALLER)
        self._results.clear()


def _drop(job: ChunkJob, *, keep: bool) -> None:
    job._target = None
    lease, job._lease = job._lease, None
    if lease is not None:
        lease.release(keep=keep)


def compress_chunks(compressor: LeafCompressor) -> Iterator[Piece]:
    """All pieces of a leaf, compressed here and now; none if it is to be sent as it is (`LeafCompressor.raw` says why).

    Each piece must be released before the next is asked for, or there may be no buffer for that. Closing the iterator aborts.
    """
    try:
        while (job := compressor.next_job()) is not None:
            job.run()
            yield from compressor.finish(job)
    finally:
        if not compressor.finished:
            compressor.abort()
