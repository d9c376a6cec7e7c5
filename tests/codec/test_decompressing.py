"""A leaf on its way in: bytes in pieces of any size, errors for everything that is not what was sent, and nothing kept."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

import pytest
import torch

from aiorlinf.codec.base import Codec
from aiorlinf.codec.decompressing import Decompressor, Record
from aiorlinf.codec.header import LEAF_HEADER, MIN_CHUNK, RECORD_HEADER, LeafHeader, pack_record, plain_header
from aiorlinf.codec.memory import BufferLease
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.errors import WireError
from tests.codec.material import (
    CODECS,
    MIB,
    compressed,
    decompressed,
    dense,
    make_codec,
    make_compressor,
    pool,
    random_bytes,
    resident,
    view_of,
)

CHUNK = 64 * 1024


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec[Any]:
    return make_codec(request.param)


def wire_of(data: torch.Tensor, codec: Codec[Any], *, chunk: int = CHUNK, whole: bool = False) -> bytes:
    wire = compressed(make_compressor(view_of(data), codec, chunk=chunk, whole=whole))
    assert wire
    return wire


def receiver(
    nbytes: int, *, buffers: TensorBufferPool | None = None, stats: CompressionStats | None = None
) -> tuple[torch.Tensor, Decompressor]:
    out = torch.zeros(nbytes, dtype=torch.uint8)
    return out, Decompressor(out, buffers or pool(), (1, 2), stats or CompressionStats())


def test_filled_in_place_without_a_copy(codec: Codec[Any]) -> None:
    data = torch.cat([dense(CHUNK), random_bytes(CHUNK), dense(CHUNK)])
    wire = memoryview(wire_of(data, codec))
    stats = CompressionStats()
    out, decompressor = receiver(len(data), stats=stats)
    rng, context = random.Random(0), codec.context()
    used = 0
    while not decompressor.received:
        place = decompressor.want()
        size = rng.randint(1, place.nbytes)
        place[:size] = wire[used : used + size]
        used += size
        record = decompressor.got(size)
        if record is not None:
            assert (record.codec == 0) == (record.index == 1)  # a raw chunk lands in its place, and needs no codec
            record.run(None if record.codec == 0 else context)
            decompressor.finish(record)
    assert used == len(wire)
    assert decompressor.want().nbytes == 0
    assert decompressor.done
    decompressor.end()
    assert torch.equal(out, data)
    assert (stats.received, stats.received_before, stats.received_after) == (1, len(wire), len(data))
    assert stats.decompress_s > 0


def test_records_may_finish_in_any_order(codec: Codec[Any]) -> None:
    data = dense(6 * CHUNK + 1)
    out, decompressor = receiver(len(data))
    _, records = decompressor.feed(memoryview(wire_of(data, codec)))
    assert decompressor.received
    assert len(records) == 7
    random.Random(3).shuffle(records)
    for record in records:
        assert not decompressor.done
        record.run(codec.context())
        decompressor.finish(record)
    assert decompressor.done
    assert torch.equal(out, data)


def test_what_follows_the_leaf_is_left_to_the_next_one(codec: Codec[Any]) -> None:
    data = dense(CHUNK + 5)
    wire = wire_of(data, codec)
    _, decompressor = receiver(len(data))
    used, records = decompressor.feed(memoryview(wire + b"the next leaf"))
    assert used == len(wire)
    assert decompressor.feed(memoryview(b"the next leaf")) == (0, [])
    for record in records:
        decompressor.finish(record)
    assert not decompressor.done  # received, but none was decompressed


def test_a_leaf_sent_as_it_is() -> None:
    for nbytes in (0, 1, 1000):
        data = random_bytes(nbytes)
        for step in (1 << 30, 1, 7):
            assert torch.equal(
                decompressed(plain_header(nbytes) + bytes(view_of(data)), nbytes, make_codec("lz4").context(), step=step), data
            )


def test_without_buffers_it_uses_memory_of_its_own(codec: Codec[Any]) -> None:
    data = dense(9 * CHUNK)
    assert torch.equal(decompressed(wire_of(data, codec, chunk=8 * CHUNK), len(data), codec.context(), buffers=pool(0)), data)


def test_what_is_large_and_still_compressed_waits_in_pooled_buffers() -> None:
    data = dense(MIB)
    buffers = pool()
    out, decompressor = receiver(len(data), buffers=buffers)
    _, (record,) = decompressor.feed(memoryview(wire_of(data, make_codec("lz4"), chunk=MIB)))
    assert buffers.stats().leased_bytes > 0
    record.run(make_codec("lz4").context())
    decompressor.finish(record)
    assert buffers.stats().leased_bytes == 0
    assert torch.equal(out, data)


# ------------------------------------------------------------------------------------------------- what is not right


def outcome(wire: bytes, data: torch.Tensor, codec: Codec[Any], *, step: int = 1 << 30) -> WireError:
    """The error that a damaged leaf gives; fails if there is none."""
    with pytest.raises(WireError) as caught:
        decompressed(wire, len(data), codec.context(), step=step)
    return caught.value


def test_each_flipped_bit_of_a_small_leaf_is_an_error(codec: Codec[Any]) -> None:
    data = dense(300)
    wire = wire_of(data, codec)
    for bit in range(len(wire) * 8):
        damaged = bytearray(wire)
        damaged[bit // 8] ^= 1 << bit % 8
        outcome(bytes(damaged), data, codec)


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_a_thousand_flips_are_a_thousand_errors_and_no_memory(name: str) -> None:
    codec = make_codec(name)
    data = torch.cat([dense(2 * 16384), random_bytes(5000)])
    wire = wire_of(data, codec, chunk=16384)
    rng, context, buffers = random.Random(name), codec.context(), pool()

    def flip() -> None:
        damaged = bytearray(wire)
        bit = rng.randrange(len(wire) * 8)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decompressed(bytes(damaged), len(data), context, buffers=buffers)

    for _ in range(100):
        flip()
    before = resident()
    for _ in range(900):
        flip()
    assert resident() - before < 7 * MIB  # 900 leaks of one chunk would be 14
    assert buffers.stats().leased_bytes == 0
    assert torch.equal(decompressed(wire, len(data), context, buffers=buffers), data)  # the next one is fine


def test_every_truncation(codec: Codec[Any]) -> None:
    data = dense(2 * MIN_CHUNK)
    wire = wire_of(data, codec, chunk=MIN_CHUNK)
    for size in [*range(LEAF_HEADER + 20), *range(LEAF_HEADER + 20, len(wire), 53), len(wire) - 1]:
        error = outcome(wire[:size], data, codec)
        assert error.message == "a compressed tensor is cut short"
        assert error.bytes_expected == len(data)


def test_records_in_another_order(codec: Codec[Any]) -> None:
    first, second = dense(MIN_CHUNK, 1), dense(MIN_CHUNK, 2)
    data = torch.cat([first, second])
    wire = wire_of(data, codec, chunk=MIN_CHUNK)
    size = struct.unpack_from("<I", wire, LEAF_HEADER)[0] + RECORD_HEADER
    swapped = wire[:LEAF_HEADER] + wire[LEAF_HEADER + size :] + wire[LEAF_HEADER : LEAF_HEADER + size]
    assert "does not match its checksum" in str(outcome(swapped, data, codec))


class _NoBuffers:
    def acquire(self, nbytes: int) -> BufferLease | None:
        raise AssertionError(f"{nbytes} bytes were asked for")


def test_a_claim_of_a_terabyte_is_refused_before_anything_is_allocated() -> None:
    tib = 1024**4
    for header in (LeafHeader(1, tib, None, 64 * MIB), LeafHeader(1, tib, tib - 1, 64 * MIB), LeafHeader(0, tib, tib, 0)):
        decompressor = Decompressor(bytearray(5000), _NoBuffers(), (1, 2), CompressionStats())
        with pytest.raises(WireError, match=f"claims {tib} bytes, but 5000 were announced"):
            decompressor.feed(memoryview(header.encode()))


def test_a_record_that_claims_too_much_is_refused_before_anything_is_allocated() -> None:
    header = LeafHeader(1, 5000, None, 5000).encode()
    for word in (5000, 2**31 - 1, 0, 2**31 + 4999, 2**32 - 1):
        decompressor = Decompressor(bytearray(5000), _NoBuffers(), (1, 2), CompressionStats())
        with pytest.raises(WireError, match="a record of"):
            decompressor.feed(memoryview(header + struct.pack("<II", word, 0)))


def test_an_unknown_codec() -> None:
    _, decompressor = receiver(5000)
    with pytest.raises(WireError, match="codec number 9, which is not known here"):
        decompressor.feed(memoryview(LeafHeader(9, 5000, None, 5000).encode()))


def test_more_or_less_than_announced_in_all(codec: Codec[Any]) -> None:
    data = dense(3 * MIN_CHUNK)
    wire = wire_of(data, codec, chunk=MIN_CHUNK, whole=True)
    header = LeafHeader.decode(wire[:LEAF_HEADER], len(data))
    assert header.stored is not None
    for wrong, said in ((1, "were announced"), (-1, "bytes and more"), (-50, "bytes and more")):
        head = LeafHeader(header.codec, header.original, header.stored + wrong, header.chunk).encode()
        assert said in str(outcome(head + wire[LEAF_HEADER:], data, codec))
    # Chunks that all come as they are: legal each, but then it should not have been sent this way.
    raw = LeafHeader(1, len(data), None, MIN_CHUNK).encode()
    for index in range(3):
        part = view_of(data)[index * MIN_CHUNK : (index + 1) * MIN_CHUNK]
        raw += pack_record(index, part, raw=True) + bytes(part)
    assert "bytes and more" in str(outcome(raw, data, codec))


def test_good_checksums_around_data_that_is_none(codec: Codec[Any]) -> None:
    """What the checksum cannot know, the codec finds: it is told how much must come out."""
    data = dense(10_000)
    for junk in (random_bytes(2_000), torch.zeros(2_000, dtype=torch.uint8)):
        part = view_of(junk)
        stored = RECORD_HEADER + len(part)
        wire = LeafHeader(codec.number, len(data), stored, len(data)).encode() + pack_record(0, part, raw=False) + bytes(part)
        assert "corrupt" in str(outcome(wire, data, codec)) or "another size" in str(outcome(wire, data, codec))


def test_a_compressed_chunk_with_a_good_checksum_for_the_wrong_place(codec: Codec[Any]) -> None:
    data = dense(2 * MIN_CHUNK + 100)
    wire = bytearray(wire_of(data, codec, chunk=MIN_CHUNK))
    # Let the last chunk, of 100 bytes, be what the first one was.
    size = struct.unpack_from("<I", wire, LEAF_HEADER)[0]
    body = bytes(wire[LEAF_HEADER + RECORD_HEADER : LEAF_HEADER + RECORD_HEADER + size])
    header = LeafHeader(codec.number, len(data), None, MIN_CHUNK)
    rebuilt = header.encode()
    for index in range(2):
        rebuilt += struct.pack("<II", size, zlib.crc32(body, zlib.crc32(struct.pack("<QI", index, size)))) + body
    rebuilt += struct.pack("<II", size, zlib.crc32(body, zlib.crc32(struct.pack("<QI", 2, size)))) + body
    outcome(rebuilt, data, codec)


def test_an_error_keeps_nothing(codec: Codec[Any]) -> None:
    data = dense(4 * MIB, 7)
    wire = bytearray(wire_of(data, codec, chunk=MIB))
    second = LEAF_HEADER + RECORD_HEADER + struct.unpack_from("<I", wire, LEAF_HEADER)[0]
    wire[second : second + 4] = b"\xff\xff\xff\x7f"
    buffers = pool()
    _, decompressor = receiver(len(data), buffers=buffers)
    with pytest.raises(WireError):
        decompressor.feed(memoryview(wire))
    decompressor.abort()
    assert buffers.stats().leased_bytes == 0
    assert not decompressor.done
    assert decompressor.want().nbytes == 0


def test_abort_in_the_middle(codec: Codec[Any]) -> None:
    data = dense(4 * MIB, 7)
    wire = memoryview(wire_of(data, codec, chunk=MIB))
    buffers = pool()
    _, decompressor = receiver(len(data), buffers=buffers)
    _, records = decompressor.feed(wire[: len(wire) * 2 // 3])
    assert records
    decompressor.abort()
    for record in records:
        record.run(codec.context())
        decompressor.finish(record)
    assert buffers.stats().leased_bytes == 0
    assert not decompressor.done
    with pytest.raises(BufferError, match="read-only"):
        Decompressor(b"abc", buffers, (1,), CompressionStats())


def test_a_record_needs_a_context() -> None:
    data = dense(1000)
    _, decompressor = receiver(len(data))
    _, (record,) = decompressor.feed(memoryview(wire_of(data, make_codec("lz4"))))
    assert isinstance(record, Record)
    with pytest.raises(ValueError, match="needs a context"):
        record.run()
    decompressor.finish(record)
    assert not decompressor.done
