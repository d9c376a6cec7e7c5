"""Data to compress, and the pieces of a leaf as one run of bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.codecs.lz4 import Lz4
from aiorlinf.codec.codecs.zstd import Zstd, ZstdParameters
from aiorlinf.codec.compressing import LeafCompressor, compress_chunks
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.memory import BufferSource
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.stats import CompressionStats

__all__ = [
    "CODECS",
    "MIB",
    "compressed",
    "decompressed",
    "dense",
    "make_codec",
    "make_compressor",
    "pool",
    "random_bytes",
    "resident",
    "view_of",
    "words",
]

MIB = 1024 * 1024
CODECS = ["lz4", "lz4 by the package", "zstd"]


def make_codec(name: str) -> Codec[Any]:
    """One of CODECS."""
    if name == "zstd":
        return Zstd(ZstdParameters(level=1, max_inflight=2))
    return Lz4() if name == "lz4" else Lz4(functions="the test wants it so")


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Nothing makes these smaller."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def dense(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Small numbers as int64, with some variety: every codec makes these a few times smaller."""
    numbers = torch.randint(0, 200, (-(-nbytes // 8),), generator=torch.Generator().manual_seed(seed))
    return numbers.view(torch.uint8)[:nbytes].clone()


def words(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Text of a thousand different words: the harder one looks, the smaller it gets."""
    vocabulary = random_bytes(8_000, seed).reshape(1000, 8)
    chosen = torch.randint(0, 1000, (-(-nbytes // 8),), generator=torch.Generator().manual_seed(seed))
    return vocabulary[chosen].reshape(-1)[:nbytes].clone()


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of any dtype."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def pool(max_bytes: int = 64 * MIB) -> TensorBufferPool:
    return TensorBufferPool(max_bytes)


def make_compressor(
    src: memoryview,
    codec: Codec[Any],
    *,
    buffers: BufferSource | None = None,
    contexts: ContextPool | None = None,
    stats: CompressionStats | None = None,
    chunk: int = MIB,
    whole: bool = False,
) -> LeafCompressor:
    return LeafCompressor(
        src,
        codec,
        contexts or ContextPool(codec.context, codec.max_inflight),
        buffers or pool(),
        stats or CompressionStats(),
        chunk_bytes=chunk,
        whole=whole,
    )


def compressed(compressor: LeafCompressor) -> bytes:
    """All pieces in a row; b"" if the leaf stays raw."""
    return b"".join(_taken(compressor))


def _taken(compressor: LeafCompressor) -> Iterator[bytes]:
    for piece in compress_chunks(compressor):
        data = piece.head + bytes(piece.body)
        assert len(data) == piece.nbytes
        piece.release()
        yield data


def decompressed(
    data: bytes, nbytes: int, context: Context, *, step: int = 1 << 30, buffers: BufferSource | None = None, known: Any = (1, 2)
) -> torch.Tensor:
    """What a leaf's pieces say, if they arrive in parts of `step` bytes; guarded on both sides of its memory."""
    memory = bytearray(b"\xa5") * (nbytes + 128)
    place = memoryview(memory)[64 : 64 + nbytes]
    decompressor = Decompressor(place, buffers or pool(), known, CompressionStats())
    view = memoryview(data)
    try:
        for start in range(0, len(view), step):
            part = view[start : start + step]
            used, records = decompressor.feed(part)
            assert used == len(part) or decompressor.received
            for record in records:
                try:
                    record.run(context)
                finally:
                    decompressor.finish(record)
        decompressor.end()
        assert decompressor.done
    finally:
        assert memory[:64] == memory[64 + nbytes :] == b"\xa5" * 64
    return torch.frombuffer(place, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
