"""A leaf on its way out: always smaller if it is sent compressed at all, raw for every other reason, and nothing kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.compressing import ChunkJob, LeafCompressor, Piece, compress_chunks
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.header import LEAF_HEADER, MIN_CHUNK, RECORD_HEADER, LeafHeader
from aiorlinf.codec.memory import Memory
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.sampling import SAMPLED_FROM
from aiorlinf.codec.stats import CompressionStats
from tests.codec.material import CODECS, MIB, compressed, decompressed, dense, make_codec, make_compressor, pool, random_bytes, view_of

CHUNK = 64 * 1024


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec[Any]:
    return make_codec(request.param)


def pieces_of(compressor: LeafCompressor) -> list[Piece]:
    return list(compress_chunks(compressor))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("nbytes", [200, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK + 777])
def test_round_trip_at_every_boundary(codec: Codec[Any], nbytes: int, whole: bool) -> None:
    data = dense(nbytes)
    stats, buffers = CompressionStats(), pool()
    compressor = make_compressor(view_of(data), codec, chunk=CHUNK, whole=whole, stats=stats, buffers=buffers)
    wire = compressed(compressor)
    assert compressor.finished
    assert compressor.committed
    assert compressor.raw is None
    assert 0 < len(wire) < nbytes
    header = LeafHeader.decode(wire[:LEAF_HEADER], nbytes)
    assert header.codec == codec.number
    one_chunk = nbytes <= CHUNK
    assert header.stored == (len(wire) - LEAF_HEADER if whole or one_chunk else None)
    for step in (1 << 30, 1000, 7):
        assert torch.equal(decompressed(wire, nbytes, codec.context(), step=step), data)
    assert (stats.tensors, stats.bytes_before, stats.bytes_after) == (1, nbytes, len(wire))
    assert stats.compress_s > 0
    assert buffers.stats().leased_bytes == 0


def test_tiny_leaves_are_sent_compressed_only_if_smaller(codec: Codec[Any]) -> None:
    for nbytes in range(80):
        data = torch.zeros(nbytes, dtype=torch.uint8)
        compressor = make_compressor(view_of(data), codec)
        wire = compressed(compressor)
        if compressor.raw is None:
            assert len(wire) < nbytes
            assert torch.equal(decompressed(wire, nbytes, codec.context()), data)
        else:
            assert wire == b""
            assert compressor.raw is RawReason.NOT_SMALLER


@pytest.mark.parametrize("nbytes", [100, 5000, CHUNK, 3 * CHUNK, SAMPLED_FROM - 1, SAMPLED_FROM, SAMPLED_FROM + 3 * CHUNK + 1])
def test_random_bytes_stay_raw(codec: Codec[Any], nbytes: int) -> None:
    stats, buffers = CompressionStats(), pool()
    compressor = make_compressor(view_of(random_bytes(nbytes)), codec, chunk=CHUNK, stats=stats, buffers=buffers)
    assert compressed(compressor) == b""
    expected = RawReason.RANDOM if nbytes >= SAMPLED_FROM else RawReason.NOT_SMALLER
    assert compressor.raw is expected
    assert stats.raw == {expected: 1}
    assert stats.raw_bytes == nbytes
    assert (stats.tensors, stats.bytes_after) == (0, 0)
    # A buffer that did not pay is dropped, not kept.
    assert (buffers.stats().leased_bytes, buffers.stats().cached_bytes) == (0, 0)


def test_a_buffer_that_paid_is_kept(codec: Codec[Any]) -> None:
    buffers = pool()
    assert compressed(make_compressor(view_of(dense(3 * CHUNK)), codec, chunk=CHUNK, buffers=buffers))
    assert (buffers.stats().leased_bytes, buffers.stats().cached_bytes, buffers.stats().misses) == (0, CHUNK, 1)


def test_chunks_that_do_not_get_smaller_go_as_they_are_within_the_leaf(codec: Codec[Any]) -> None:
    parts = [random_bytes(CHUNK, 1), dense(CHUNK), random_bytes(CHUNK, 2), random_bytes(CHUNK, 3), dense(100)]
    data = torch.cat(parts)
    stats = CompressionStats()
    wire = compressed(make_compressor(view_of(data), codec, chunk=CHUNK, stats=stats))
    assert len(wire) < len(data)
    assert bytes(view_of(parts[2])) in wire
    assert stats.raw_chunks == {RawReason.NOT_SMALLER: 3}
    assert stats.bytes_after == len(wire)
    for step in (1 << 30, 4099):
        assert torch.equal(decompressed(wire, len(data), codec.context(), step=step), data)


class _Exact(Context):
    """Makes each chunk smaller by as many bytes as it is told to; of no other use."""

    def __init__(self, savings: list[int]) -> None:
        self.savings = savings

    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        size = len(src) - self.savings.pop(0)
        return size if size <= len(dst) else None

    def decompress_into(self, src: Memory, dst: Memory) -> None:
        raise AssertionError


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("savings", "pays"),
    [
        ([1], False),
        ([LEAF_HEADER + RECORD_HEADER], False),
        ([LEAF_HEADER + RECORD_HEADER + 1], True),
        ([0, 0, 0], False),
        ([20, 20, 12], False),
        ([20, 20, 13], True),
        ([53, 0, 0], True),
        ([52, 0, 0], False),
        ([0, 0, 1000], True),
    ],
)
def test_it_is_committed_only_when_all_headers_are_paid_for(savings: list[int], pays: bool, whole: bool) -> None:
    """To the byte: the leaf's header and one per chunk."""
    nbytes = MIN_CHUNK * len(savings)
    overhead = LEAF_HEADER + RECORD_HEADER * len(savings)
    contexts, buffers = ContextPool(lambda: _Exact(list(savings)), 1), pool()
    compressor = make_compressor(
        view_of(random_bytes(nbytes)), make_codec("zstd"), contexts=contexts, buffers=buffers, chunk=MIN_CHUNK, whole=whole
    )
    sent = pieces_of(compressor)
    assert compressor.committed is pays
    assert compressor.raw is (None if pays else RawReason.NOT_SMALLER)
    assert sum(piece.nbytes for piece in sent) == (nbytes - sum(savings) + overhead if pays else 0)
    assert not pays or sum(piece.nbytes for piece in sent) < nbytes
    # A receiver takes it for what it is: each chunk smaller, or as it was.
    decompressor = Decompressor(bytearray(nbytes), pool(), (2,), CompressionStats())
    for piece in sent:
        for record in decompressor.feed(memoryview(piece.head + bytes(piece.body)))[1]:
            assert (record.codec == 0) == (savings[record.index] == 0)
            decompressor.finish(record)
        piece.release()
    assert decompressor.received is pays
    # Buffers of what did not pay are dropped, not kept.
    assert buffers.stats().leased_bytes == 0
    assert (buffers.stats().cached_bytes > 0) is pays


def test_pieces_leave_before_the_rest_is_looked_at() -> None:
    compressor = make_compressor(view_of(dense(4 * CHUNK)), make_codec("lz4"), chunk=CHUNK)
    first = compressor.next_job()
    assert first is not None
    first.run()
    (piece,) = compressor.finish(first)
    assert piece.nbytes < CHUNK
    assert not compressor.finished
    compressor.abort()
    piece.release()


def test_jobs_may_finish_in_any_order(codec: Codec[Any]) -> None:
    data = torch.cat([dense(3 * CHUNK), random_bytes(CHUNK), dense(3 * CHUNK + 5)])
    rng = random.Random(5)
    for whole in (False, True):
        contexts = ContextPool(codec.context, None if codec.max_inflight is None else 8)
        compressor = make_compressor(view_of(data), codec, chunk=CHUNK, whole=whole, contexts=contexts)
        wire = b""
        under_way: list[ChunkJob] = []
        while not compressor.finished:
            while len(under_way) < 3 and (job := compressor.next_job()) is not None:
                under_way.append(job)
            job = under_way.pop(rng.randrange(len(under_way)))
            job.run()
            for piece in compressor.finish(job):
                wire += piece.head + bytes(piece.body)
                piece.release()
        assert torch.equal(decompressed(wire, len(data), codec.context()), data)


# ------------------------------------------------------------------------------------------- the sender never waits


def test_no_context_means_raw() -> None:
    codec = make_codec("zstd")
    contexts = ContextPool(codec.context, 1)
    held = contexts.try_acquire()
    assert held is not None
    stats, buffers = CompressionStats(), pool()
    compressor = make_compressor(view_of(dense(3 * CHUNK)), codec, contexts=contexts, stats=stats, buffers=buffers, chunk=CHUNK)
    assert pieces_of(compressor) == []
    assert compressor.raw is RawReason.NO_CONTEXT
    assert stats.raw == {RawReason.NO_CONTEXT: 1}
    assert buffers.stats().misses == 0
    contexts.release(held)
    assert compressed(make_compressor(view_of(dense(3 * CHUNK)), codec, contexts=contexts, chunk=CHUNK))


def test_a_leaf_does_not_get_in_its_own_way() -> None:
    """One context, two jobs asked for: the second waits for the first, whose context it will have."""
    codec = make_codec("zstd")
    contexts, stats = ContextPool(codec.context, 1), CompressionStats()
    compressor = make_compressor(view_of(dense(3 * CHUNK)), codec, contexts=contexts, stats=stats, chunk=CHUNK)
    while (job := compressor.next_job()) is not None:
        assert compressor.next_job() is None
        job.run()
        for piece in compressor.finish(job):
            piece.release()
    assert compressor.finished
    assert compressor.committed
    assert stats.raw_chunks == {}


def test_no_buffer_means_raw(codec: Codec[Any]) -> None:
    contexts = ContextPool(codec.context, 1)
    compressor = make_compressor(view_of(dense(3 * CHUNK)), codec, contexts=contexts, buffers=pool(CHUNK - 1), chunk=CHUNK)
    assert pieces_of(compressor) == []
    assert compressor.raw is RawReason.NO_BUFFER
    assert contexts.idle == 1


@pytest.mark.parametrize("short_of", [RawReason.NO_BUFFER, RawReason.NO_CONTEXT])
def test_once_committed_a_shortage_costs_only_the_chunks_that_meet_it(codec: Codec[Any], short_of: RawReason) -> None:
    data = dense(4 * CHUNK + 99)
    stats, contexts, buffers = CompressionStats(), ContextPool(codec.context, 1), pool(CHUNK)
    compressor = make_compressor(view_of(data), codec, contexts=contexts, buffers=buffers, stats=stats, chunk=CHUNK)
    wire = b""
    held: list[Any] = []
    for index in range(5):
        if index == 1:  # the only one is in use while two chunks are looked at
            held.append(buffers.acquire(CHUNK) if short_of is RawReason.NO_BUFFER else contexts.try_acquire())
        elif index == 3 and short_of is RawReason.NO_BUFFER:
            held.pop().release()
        elif index == 3:
            contexts.release(held.pop())
        job = compressor.next_job()
        assert job is not None
        job.run()
        for piece in compressor.finish(job):
            wire += piece.head + bytes(piece.body)
            piece.release()
    assert stats.raw_chunks == {short_of: 2}
    assert stats.raw == {}
    assert torch.equal(decompressed(wire, len(data), codec.context()), data)


def test_too_large_for_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = make_codec("lz4")
    monkeypatch.setattr(codec, "max_input", 9_999)
    stats = CompressionStats()
    compressor = make_compressor(view_of(dense(10_000)), codec, stats=stats)
    assert pieces_of(compressor) == []
    assert stats.raw == {RawReason.TOO_LARGE: 1}


class _Failing(Context):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        raise self.error

    def decompress_into(self, src: Memory, dst: Memory) -> None:
        raise AssertionError


def test_a_codec_that_fails_does_not_fail_the_send(caplog: pytest.LogCaptureFixture) -> None:
    contexts = ContextPool(lambda: _Failing(MemoryError("none left")), 1)
    compressor = make_compressor(view_of(dense(2 * CHUNK)), make_codec("zstd"), contexts=contexts, chunk=CHUNK)
    assert pieces_of(compressor) == []
    assert compressor.raw is RawReason.FAILED
    assert contexts.idle == 1
    assert "a tensor is sent as it is, because its codec failed" in caplog.text


def test_a_context_that_cannot_be_made_means_raw() -> None:
    def make() -> Context:
        raise MemoryError

    compressor = make_compressor(view_of(dense(CHUNK)), make_codec("zstd"), contexts=ContextPool(make, 1))
    assert pieces_of(compressor) == []
    assert compressor.raw is RawReason.FAILED


# ------------------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("after", range(4))
def test_abort_gives_everything_back(after: int, whole: bool) -> None:
    codec = make_codec("zstd")
    contexts, buffers = ContextPool(codec.context, 2), pool()
    compressor = make_compressor(view_of(dense(4 * CHUNK)), codec, contexts=contexts, buffers=buffers, chunk=CHUNK, whole=whole)
    out: list[Piece] = []
    for _ in range(after):
        job = compressor.next_job()
        assert job is not None
        job.run()
        out += compressor.finish(job)
    under_way = compressor.next_job()
    assert under_way is not None
    compressor.abort()
    assert compressor.finished
    assert compressor.next_job() is None
    kept = [bytes(piece.body) for piece in out]
    under_way.run()
    assert compressor.finish(under_way) == []
    assert [bytes(piece.body) for piece in out] == kept  # what was handed out stays valid
    for piece in out:
        piece.release()
    assert buffers.stats().leased_bytes == 0
    assert contexts.idle == contexts.made
    assert compressor.running == 0


def test_a_job_that_never_ran_gives_back_what_it_had() -> None:
    codec = make_codec("zstd")
    contexts, buffers = ContextPool(codec.context, 1), pool()
    compressor = make_compressor(view_of(dense(4 * CHUNK)), codec, contexts=contexts, buffers=buffers, chunk=CHUNK)
    job = compressor.next_job()
    assert job is not None
    assert compressor.finish(job) == []
    assert compressor.finished
    assert (contexts.idle, buffers.stats().leased_bytes) == (1, 0)


def test_closing_the_iterator_aborts() -> None:
    buffers = pool()
    compressor = make_compressor(view_of(dense(4 * CHUNK)), make_codec("lz4"), buffers=buffers, chunk=CHUNK)
    pieces = compress_chunks(compressor)
    next(pieces).release()
    pieces.close()  # type: ignore[attr-defined]
    assert compressor.finished
    assert buffers.stats().leased_bytes == 0


@pytest.mark.parametrize("chunk", [0, MIN_CHUNK - 1, 64 * MIB + 1])
def test_chunks_out_of_range(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunks of {chunk} bytes"):
        make_compressor(view_of(dense(100)), make_codec("lz4"), chunk=chunk)


@pytest.mark.parametrize("make", [dense, random_bytes, lambda n: torch.zeros(n, dtype=torch.uint8)], ids=["dense", "random", "zeros"])
def test_never_larger_whatever_is_short(make: Callable[[int], torch.Tensor]) -> None:
    """Any mix of data and shortages: what is sent compressed is smaller, and arrives."""
    rng = random.Random(1)
    codec = make_codec("zstd")
    for _ in range(30):
        nbytes = rng.choice([50, 5_000, 20_000, 70_000])
        data = torch.cat([make(nbytes), random_bytes(rng.randrange(20_000)), dense(rng.randrange(20_000))])
        contexts, buffers = ContextPool(codec.context, 1), TensorBufferPool(rng.choice([0, MIN_CHUNK, 3 * MIN_CHUNK, MIB]))
        compressor = make_compressor(view_of(data), codec, contexts=contexts, buffers=buffers, chunk=MIN_CHUNK, whole=rng.random() < 0.3)
        wire = b""
        waiting: list[Piece] = []
        while (job := compressor.next_job()) is not None:
            held = contexts.try_acquire() if rng.random() < 0.2 else None
            job.run()
            waiting += compressor.finish(job)
            while waiting and rng.random() < 0.7:
                piece = waiting.pop(0)
                wire += piece.head + bytes(piece.body)
                piece.release()
            if held is not None:
                contexts.release(held)
        for piece in waiting:
            wire += piece.head + bytes(piece.body)
            piece.release()
        assert compressor.finished
        assert (wire == b"") == (compressor.raw is not None)
        if wire:
            assert len(wire) < len(data)
            assert torch.equal(decompressed(wire, len(data), codec.context()), data)
        assert (buffers.stats().leased_bytes, contexts.idle) == (0, contexts.made)
