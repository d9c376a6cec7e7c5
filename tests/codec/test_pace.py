"""Chunks grow with the speed of the codec, within bounds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.codec.compressing import LeafCompressor, compress_chunks
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.header import LEAF_HEADER, LeafHeader
from aiorlinf.codec.pace import Pace
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.stats import CompressionStats
from tests.codec.material import MIB, compressed, decompressed, dense, make_codec, view_of

CHUNK = 64 * 1024


def paced(rate: float) -> Pace:
    """Of a codec that does so many bytes a second."""
    pace = Pace()
    pace.note(MIB, MIB / rate)
    return pace


def test_a_quick_codec_gets_larger_chunks_of_large_tensors() -> None:
    assert Pace().chunk(MIB, 100 * MIB) == MIB, "nothing is known"
    assert paced(4e8).chunk(MIB, 100 * MIB) == MIB
    assert paced(4e9).chunk(MIB, 100 * MIB) == 2 * MIB
    assert paced(9e9).chunk(MIB, 100 * MIB) == paced(1e12).chunk(MIB, 100 * MIB) == 4 * MIB
    assert paced(1e12).chunk(MIB, 11 * MIB) == MIB
    assert paced(1e12).chunk(MIB, 12 * MIB) == 2 * MIB


@given(st.floats(1e6, 1e12), st.integers(1, 1 << 34))
def test_there_are_always_several_chunks(rate: float, nbytes: int) -> None:
    chunk = paced(rate).chunk(MIB, nbytes)
    assert chunk in (MIB, 2 * MIB, 4 * MIB)
    assert chunk == MIB or 6 * chunk <= nbytes


def test_it_follows_what_was_measured_last() -> None:
    pace = paced(1e10)
    for _ in range(20):
        pace.note(MIB, 0.01)
    assert pace.chunk(MIB, 100 * MIB) == MIB
    assert 0.009 < pace.seconds_per_byte * MIB < 0.0101


def compressor_of(data: torch.Tensor, buffers: TensorBufferPool, pace: Pace) -> LeafCompressor:
    codec = make_codec("lz4")
    contexts = ContextPool(codec.context, codec.max_inflight)
    return LeafCompressor(view_of(data), codec, contexts, buffers, CompressionStats(), chunk_bytes=CHUNK, pace=pace)


def test_large_chunks_arrive() -> None:
    data = dense(30 * CHUNK + 5)
    pace = paced(1e12)
    wire = compressed(compressor_of(data, TensorBufferPool(MIB), pace))
    assert LeafHeader.decode(wire[:LEAF_HEADER], len(data)).chunk == 4 * CHUNK
    assert torch.equal(decompressed(wire, len(data), make_codec("lz4").context()), data)
    assert pace.seconds_per_byte > 1e-12, "it was told"


def test_where_there_is_no_buffer_for_a_large_chunk_there_may_be_one_for_the_usual() -> None:
    data = dense(30 * CHUNK)
    compressor = compressor_of(data, TensorBufferPool(CHUNK + 100), paced(1e12))
    wire = b""
    for piece in compress_chunks(compressor):
        wire += piece.head + bytes(piece.body)
        piece.release()
    assert LeafHeader.decode(wire[:LEAF_HEADER], len(data)).chunk == CHUNK
    assert torch.equal(decompressed(wire, len(data), make_codec("lz4").context()), data)
