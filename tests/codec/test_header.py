"""Headers: read back, and refused when they claim what cannot be."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.codec.header import (
    LEAF_HEADER,
    MAX_CHUNK,
    MIN_CHUNK,
    PLAIN,
    RECORD_HEADER,
    STREAMED,
    LeafHeader,
    pack_record,
    pack_tried,
    record_crc,
    record_size,
    unpack_tried,
)
from aiorlinf.errors import WireError

TIB = 1024**4


def sealed(codec: int, flags: int, zero: int, chunk: int, original: int, stored: int) -> bytes:
    """A header with a good checksum, whatever it says."""
    head = struct.pack("<BBHIQQ", codec, flags, zero, chunk, original, stored)
    return head + struct.pack("<I", zlib.crc32(head))


@pytest.mark.parametrize(
    "header",
    [
        LeafHeader(1, 100, 50, 100),
        LeafHeader(2, 10_000_000, None, 1_000_000),
        LeafHeader(2, 5 * TIB, 3 * TIB, MAX_CHUNK),
        LeafHeader(255, 8192, 8191, MIN_CHUNK),
        LeafHeader(PLAIN, 77, 77, 0),
        LeafHeader(PLAIN, 0, 0, 0),
    ],
)
def test_round_trip(header: LeafHeader) -> None:
    data = header.encode()
    assert len(data) == LEAF_HEADER
    assert LeafHeader.decode(data, header.original) == header


def test_spans_cover_the_leaf() -> None:
    header = LeafHeader(1, 10_001, None, 5000)
    assert header.chunks == 3
    assert [header.span(index) for index in range(3)] == [(0, 5000), (5000, 10_000), (10_000, 10_001)]
    assert LeafHeader(1, 10_000, None, 5000).chunks == 2
    assert LeafHeader(PLAIN, 5, 5, 0).chunks == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (sealed(1, 0, 0, 4096, TIB, 5000), f"claims {TIB} bytes, but 10000 were announced"),
        (sealed(1, 0, 0, 10_000, 9_999, 5000), "claims 9999 bytes"),
        (sealed(1, 2, 0, 10_000, 10_000, 5000), "unknown flags 0x2"),
        (sealed(1, 0, 1, 10_000, 10_000, 5000), "unknown flags"),
        (sealed(1, 0, 0, 0, 10_000, 5000), "in chunks of 0"),
        (sealed(1, 0, 0, MIN_CHUNK - 1, 10_000, 5000), "in chunks of 4095"),
        (sealed(1, 0, 0, 10_001, 10_000, 5000), "in chunks of 10001"),
        (sealed(1, 0, 0, 10_000, 10_000, 10_000), "compresses to 10000"),
        (sealed(1, 0, 0, 10_000, 10_000, TIB), f"compresses to {TIB}"),
        (sealed(1, 0, 0, 10_000, 10_000, RECORD_HEADER), "compresses to 8"),
        (sealed(1, 0, 0, 10_000, 10_000, 0), "compresses to 0"),
        (sealed(1, STREAMED, 0, 10_000, 10_000, 5), "known and unknown"),
        (sealed(PLAIN, 0, 0, 10_000, 10_000, 10_000), "sent as it is with the header of a compressed one"),
        (sealed(PLAIN, 0, 0, 0, 10_000, 9_000), "sent as it is"),
        (sealed(PLAIN, STREAMED, 0, 0, 10_000, 0), "sent as it is"),
        (b"\0" * (LEAF_HEADER - 1), "a leaf header of 27 bytes"),
    ],
)
def test_what_cannot_be(data: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        LeafHeader.decode(data, 10_000)


def test_an_empty_leaf_is_not_compressed() -> None:
    with pytest.raises(WireError, match="of 0 bytes"):
        LeafHeader.decode(sealed(1, STREAMED, 0, 0, 0, 0), 0)


def test_a_chunk_larger_than_any_buffer_should_be() -> None:
    with pytest.raises(WireError, match=f"in chunks of {MAX_CHUNK + 1}"):
        LeafHeader.decode(sealed(1, STREAMED, 0, MAX_CHUNK + 1, TIB, 0), TIB)


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    data = LeafHeader(1, 10_000, 5_000, 10_000).encode()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            LeafHeader.decode(damaged, 10_000)


def test_records() -> None:
    data = memoryview(b"some data")
    head = pack_record(3, data, raw=False)
    assert len(head) == RECORD_HEADER
    word, crc, size, raw = record_size(head, 100)
    assert (size, raw) == (9, False)
    assert record_crc(3, word, data) == crc
    assert record_crc(4, word, data) != crc  # in another place
    word, crc, size, raw = record_size(pack_record(0, data, raw=True), 9)
    assert (size, raw, record_crc(0, word, data) == crc) == (9, True, True)


@pytest.mark.parametrize(
    ("size", "raw", "chunk"), [(0, False, 9), (9, False, 9), (10, False, 9), (8, True, 9), (10, True, 9), (2**31 - 1, False, 9)]
)
def test_sizes_that_no_chunk_has(size: int, raw: bool, chunk: int) -> None:
    head = struct.pack("<II", size | (raw << 31), 0)
    with pytest.raises(WireError, match=f"a record of {size} bytes for a chunk of {chunk}"):
        record_size(head, chunk)


@given(st.lists(st.booleans(), max_size=40))
def test_which_leaves_are_tried(tried: list[bool]) -> None:
    assert unpack_tried(pack_tried(tried), len(tried)) == tried


@pytest.mark.parametrize(("data", "leaves"), [(b"", 1), (b"\0\0", 8), (b"\x10", 4), (b"\1", 0), (b"\0\x80", 15)])
def test_what_says_nothing_about_so_many_leaves(data: bytes, leaves: int) -> None:
    with pytest.raises(WireError, match=f"{leaves} leaves"):
        unpack_tried(data, leaves)
