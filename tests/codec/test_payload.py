"""A message's payload on its way out: whatever happens when, the bytes are those of its leaves in order, and everything comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiorlinf.codec.payload
from aiorlinf.codec.compressing import LeafCompressor
from aiorlinf.codec.contexts import ContextPool, ContextSource
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.payload import Batch, PayloadCompressor
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.stats import CompressionStats
from tests.codec.material import dense, make_codec, random_bytes, view_of
from tests.hypothesis_profiles import examples

CHUNK = 4096


class Bench:
    """A payload, and everything that it takes from elsewhere."""

    def __init__(
        self, leaves: list[tuple[torch.Tensor, bool]], *, codec: str = "zstd", max_bytes: int = 1 << 24, ahead: int = 1 << 20
    ) -> None:
        self.codec = make_codec(codec)
        self.contexts = ContextPool(self.codec.context, self.codec.max_inflight)
        self.buffers = TensorBufferPool(max_bytes)
        self.stats = CompressionStats()
        self.leaves = leaves
        self.ready = self.room = 0
        self.running: list[tuple[Batch, object]] = []
        self.wire = b""
        self.progress = 0
        self.payload = PayloadCompressor([(view_of(leaf), tried) for leaf, tried in leaves], self.make, ahead=ahead)
        self.payload.on_ready = lambda: self.count("ready")
        self.payload.on_room = lambda: self.count("room")

    def count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)

    def make(self, src: memoryview, contexts: ContextSource) -> LeafCompressor:
        return LeafCompressor(src, self.codec, contexts, self.buffers, self.stats, chunk_bytes=CHUNK)

    def begin(self) -> bool:
        """Start the next batch; False if there is none."""
        context = self.contexts.try_acquire()
        batch = self.payload.batch(context)
        if batch is not None:
            self.running.append((batch, context))
        elif context is not None:
            self.contexts.release(context)
        return batch is not None

    def end(self, index: int, *, run: bool = True) -> None:
        """Finish one of the batches that were started."""
        if self.running:
            batch, context = self.running.pop(index % len(self.running))
            if run:
                batch.run()
            self.payload.finish(batch)
            if context is not None:
                self.contexts.release(context)  # type: ignore[arg-type]  # it is one of its own

    def take(self, limit: int) -> bool:
        chunk = self.payload.take(limit)
        if chunk is None:
            return False
        views, size, progress = chunk
        assert 0 < size <= limit
        data = b"".join(views)
        assert len(data) == size
        assert progress >= 0
        self.wire += data
        self.progress += progress
        return True

    def to_the_end(self) -> None:
        for _ in range(100_000):
            if self.payload.over or self.payload.dropped:
                break
            if not self.take(1 << 20):
                self.begin()
                self.end(0)
            self.payload.sent()
        while self.running:
            self.end(0)
        self.payload.sent()

    def check(self) -> None:
        """What is on the wire says what the leaves are."""
        assert self.payload.over
        rest = memoryview(self.wire)
        for leaf, tried in self.leaves:
            out = torch.empty(leaf.numel(), dtype=torch.uint8)
            if not tried:
                out.copy_(torch.frombuffer(bytearray(rest[: len(out)]), dtype=torch.uint8)) if len(out) else None
                rest = rest[len(out) :]
            elif len(out):
                decompressor = Decompressor(out, TensorBufferPool(1 << 24), (1, 2), CompressionStats())
                used, records = decompressor.feed(rest)
                for record in records:
                    record.run(self.codec.context())
                    decompressor.finish(record)
                assert decompressor.done
                rest = rest[used:]
            assert torch.equal(out, leaf)
        assert not rest
        assert self.progress == sum(leaf.numel() for leaf, _ in self.leaves)

    def check_all_back(self) -> None:
        assert self.contexts.idle == self.contexts.made
        assert self.buffers.stats().leased_bytes == 0


sizes = st.sampled_from([0, 1, 30, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 5])
kinds: list[Callable[[int], torch.Tensor]] = [dense, random_bytes]
leaf = st.tuples(sizes, st.sampled_from(kinds), st.sampled_from([True, True, False]))
happening = st.one_of(
    st.tuples(st.just("begin")),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("take"), st.sampled_from([1, 7, 36, 500, 5000, 1 << 20])),
    st.tuples(st.just("sent")),
)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiorlinf.codec.payload, "BATCH_BYTES", 4 * CHUNK)


@settings(max_examples=examples(150), deadline=None)
@given(
    made=st.lists(leaf, max_size=8),
    steps=st.lists(happening, max_size=60),
    codec=st.sampled_from(["zstd", "lz4"]),
    max_bytes=st.sampled_from([1 << 24, 2 * CHUNK, 0]),
    ahead=st.sampled_from([1, 3 * CHUNK, 1 << 20]),
    drop=st.none() | st.integers(0, 60),
)
def test_any_order_of_things(
    made: list[tuple[int, Callable[[int], torch.Tensor], bool]],
    steps: list[tuple[str, int]],
    codec: str,
    max_bytes: int,
    ahead: int,
    drop: int | None,
) -> None:
    bench = Bench([(kind(size), tried) for size, kind, tried in made], codec=codec, max_bytes=max_bytes, ahead=ahead)
    for index, (name, *args) in enumerate(steps):
        if index == drop:
            bench.payload.drop()
        if name == "sent":
            bench.payload.sent()
        else:
            getattr(bench, name)(*args)
    bench.to_the_end()
    if bench.payload.dropped:
        assert not bench.take(1 << 20)
        assert not bench.payload.over
    else:
        bench.check()
    bench.check_all_back()


def test_no_more_than_a_bounded_part_is_compressed_ahead() -> None:
    bench = Bench([(dense(100 * CHUNK), True)], codec="lz4", ahead=10 * CHUNK)
    while bench.begin():
        bench.end(0)
    assert bench.stats.bytes_before <= 14 * CHUNK
    assert not bench.payload.wants
    bench.to_the_end()
    bench.check()


def test_a_leaf_that_does_not_get_smaller_is_not_tried_for_ever() -> None:
    bench = Bench([(random_bytes(40 * CHUNK), True), (dense(CHUNK), True)], ahead=10 * CHUNK)
    for _ in range(40):
        bench.begin()
        bench.end(0)
    assert bench.stats.raw == {RawReason.NOT_SMALLER: 1}
    bench.to_the_end()
    bench.check()
    assert bench.stats.tensors == 1


def test_small_leaves_share_a_batch() -> None:
    bench = Bench([(dense(1000), True) for _ in range(40)], codec="lz4")
    batches = 0
    while bench.begin():
        batches += 1
    assert batches == 3
    while bench.running:
        bench.end(0)
    bench.to_the_end()
    bench.check()


def test_what_was_taken_keeps_its_buffers_until_it_is_sent() -> None:
    bench = Bench([(dense(3 * CHUNK), True)], codec="lz4")
    bench.begin()
    bench.end(0)
    leased = bench.buffers.stats().leased_bytes
    while bench.take(100):
        pass
    assert bench.buffers.stats().leased_bytes == leased > 0
    bench.payload.sent()
    assert bench.buffers.stats().leased_bytes == 0


@pytest.mark.parametrize(
    ("leaf", "tried", "borrows"),
    [
        (dense(3 * CHUNK), True, False),
        (dense(3 * CHUNK), False, True),
        (random_bytes(3 * CHUNK), True, True),
        (torch.cat([dense(CHUNK), random_bytes(CHUNK)]), True, True),
    ],
    ids=["compressed", "as it is", "not smaller", "a chunk as it is"],
)
def test_whether_it_sends_the_leaves_own_memory(leaf: torch.Tensor, tried: bool, borrows: bool) -> None:
    bench = Bench([(leaf, tried)], codec="lz4")
    bench.to_the_end()
    bench.check()
    assert bench.payload.borrows == borrows
    assert bench.payload.taken == len(bench.wire)


def test_without_a_context_a_leaf_goes_as_it_is() -> None:
    bench = Bench([(dense(3 * CHUNK), True), (dense(5 * CHUNK), True)])
    assert bench.payload.batch(None) is None
    assert bench.stats.raw == {RawReason.NO_CONTEXT: 2}
    bench.to_the_end()
    bench.check()
    assert len(bench.wire) == 8 * CHUNK + 2 * 28


def test_a_leaf_that_has_begun_goes_on_without_a_context() -> None:
    bench = Bench([(dense(3 * CHUNK), True)], ahead=CHUNK)
    bench.begin()
    bench.end(0)
    while not bench.payload.over:
        while bench.take(1 << 20):
            bench.payload.sent()
        batch = bench.payload.batch(None)
        if batch is not None:
            bench.running.append((batch, None))
            bench.end(0)
    bench.check()
    assert bench.stats.raw_chunks == {RawReason.NO_CONTEXT: 2}


def test_a_batch_that_could_not_run_ends_the_payload() -> None:
    bench = Bench([(dense(3 * CHUNK), True), (dense(10), False)])
    bench.begin()
    bench.end(0, run=False)
    assert bench.payload.dropped
    bench.check_all_back()


def test_a_dropped_payload_lets_go_of_its_tensors_and_stops_its_batch() -> None:
    bench = Bench([(dense(8 * CHUNK), True)])
    bench.begin()
    ready = bench.ready
    bench.payload.drop()
    bench.payload.drop()
    assert bench.ready == ready + 1
    assert bench.payload._leaves == []
    bench.end(0)
    assert bench.stats.compress_s == 0
    bench.check_all_back()


def test_whoever_compresses_is_told_when_there_is_room_again() -> None:
    bench = Bench([(dense(20 * CHUNK), True)], codec="lz4", ahead=CHUNK)
    bench.begin()
    bench.end(0)
    assert not bench.begin()
    bench.take(1 << 20)
    assert bench.room == 0
    bench.payload.sent()
    assert bench.room == 1


def test_nothing_to_try_is_ready_at_once() -> None:
    bench = Bench([(dense(100), False), (torch.empty(0, dtype=torch.uint8), True), (dense(7), False)])
    assert bench.ready == 0
    assert not bench.begin()
    bench.to_the_end()
    bench.check()
    assert len(bench.wire) == 107
