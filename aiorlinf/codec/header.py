"""How a compressed leaf looks on the wire.

A leaf header, then one record per chunk, in order. All numbers little-endian.

leaf header, 28 bytes
    codec u8 (0: the payload follows as it is, without records), flags u8, two bytes 0, chunk size u32, original size u64, size of all
    that follows u64 (0 with the flag STREAMED: not known yet when the header left), CRC-32 of these 24 bytes.
record
    word u32 (31 bits: size of the data; top bit: the data is the chunk itself), CRC-32 u32 of chunk number, word and data; data.

Which leaves of a message are sent this way is told beforehand, a bit each (`pack_tried`): leaf 0 is the lowest bit of the first byte.

Each chunk is compressed on its own, so that compressing, sending and decompressing overlap, and no call of a codec sees more than
`MAX_CHUNK` bytes. A leaf is only ever sent this way when it gets smaller by it, headers included.

The checksum is zlib's CRC-32: it is in the standard library, releases the interpreter lock, is several times faster than any codec's
compression, and notices every flipped bit and every burst of up to 32. It is taken of what travels, which is less than what it stands
for, and checked before a codec sees the data. It guards against accidents; against people, the link proves who sends.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aiorlinf.errors import WireError

__all__ = [
    "LEAF_HEADER",
    "MAX_CHUNK",
    "MIN_CHUNK",
    "PLAIN",
    "RECORD_HEADER",
    "STREAMED",
    "LeafHeader",
    "pack_record",
    "pack_tried",
    "plain_header",
    "record_crc",
    "record_size",
    "unpack_tried",
]

LEAF_HEADER: Final = 28
"""Bytes."""
RECORD_HEADER: Final = 8
"""Bytes."""
MIN_CHUNK: Final = 4096
"""Bytes; bounds how many records a leaf can be cut into."""
MAX_CHUNK: Final = 64 * 1024 * 1024
"""Bytes; bounds the buffer of a record."""

PLAIN: Final = 0
"""Number of no codec."""
STREAMED: Final = 1
"""Flag: the size of what follows was not known."""

_LEAF = struct.Struct("<BBHIQQ")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<II")
_SEED = struct.Struct("<QI")
_RAW_BIT = 1 << 31


@dataclass(frozen=True, slots=True)
class LeafHeader:
    """See the module.

    Attributes:
        codec: number, or `PLAIN`.
        original: bytes of the leaf.
        stored: bytes of all that follows the header; None: not known.
        chunk: bytes of each chunk but the last.
    """

    codec: int
    original: int
    stored: int | None
    chunk: int

    @property
    def chunks(self) -> int:
        """How many records follow."""
        return 0 if self.codec == PLAIN else -(-self.original // self.chunk)

    def span(self, index: int) -> tuple[int, int]:
        """Where a chunk starts and ends in the leaf."""
        return index * self.chunk, min((index + 1) * self.chunk, self.original)

    def encode(self) -> bytes:
        flags = STREAMED if self.stored is None else 0
        head = _LEAF.pack(self.codec, flags, 0, self.chunk, self.original, self.stored or 0)
        return head + _CRC.pack(zlib.crc32(head))

    @staticmethod
    def decode(data: bytes | bytearray | memoryview, expected: int) -> LeafHeader:
        """Read and check a header.

        Args:
            data: `LEAF_HEADER` bytes.
            expected: bytes of the leaf by the manifest, which is within bounds; a header that says otherwise is refused, so nothing is
                ever allocated for what it claims.

        Raises:
            WireError: corrupt, contradicting itself, or about another size.
        """
        view = memoryview(data)
        if len(view) != LEAF_HEADER:
            raise WireError(f"a leaf header of {len(view)} bytes; it has {LEAF_HEADER}")
        head = view[: _LEAF.size]
        if zlib.crc32(head) != _CRC.unpack_from(view, _LEAF.size)[0]:
            raise WireError("the header of a compressed tensor does not match its checksum")
        codec, flags, zero, chunk, original, stored = _LEAF.unpack(head)
        if original != expected:
            raise WireError(f"a compressed tensor claims {original} bytes, but {expected} were announced")
        if flags & ~STREAMED or zero:
            raise WireError(f"a compressed tensor with unknown flags {flags:#x}")
        header = LeafHeader(codec, original, None if flags & STREAMED else stored, chunk)
        header._check(stored)
        return header

    def _check(self, stored: int) -> None:
        if self.codec == PLAIN:
            if self.chunk or self.stored != self.original:
                raise WireError("a tensor sent as it is with the header of a compressed one")
            return
        if not min(MIN_CHUNK, self.original) <= self.chunk <= min(MAX_CHUNK, self.original) or not self.original:
            raise WireError(f"a compressed tensor of {self.original} bytes in chunks of {self.chunk}")
        if self.stored is None:
            if stored:
                raise WireError("a compressed tensor whose size is known and unknown")
        elif not RECORD_HEADER * self.chunks < stored < self.original:
            raise WireError(f"a tensor of {self.original} bytes that compresses to {stored}")


def plain_header(nbytes: int) -> bytes:
    """The leaf header ahead of a payload that goes as it is."""
    return LeafHeader(PLAIN, nbytes, nbytes, 0).encode()


def pack_tried(tried: Sequence[bool]) -> bytes:
    """For each leaf of a message, whether it begins with a leaf header."""
    data = bytearray((len(tried) + 7) // 8)
    for index, yes in enumerate(tried):
        if yes:
            data[index >> 3] |= 1 << (index & 7)
    return bytes(data)


def unpack_tried(data: bytes | memoryview, leaves: int) -> list[bool]:
    """The reverse of `pack_tried`.

    Raises:
        WireError: it is not about so many leaves.
    """
    if len(data) != (leaves + 7) // 8:
        raise WireError(f"{len(data)} bytes say which of {leaves} leaves are compressed")
    if leaves & 7 and data[-1] >> (leaves & 7):
        raise WireError(f"more than {leaves} leaves are said to be compressed")
    return [bool(data[index >> 3] >> (index & 7) & 1) for index in range(leaves)]


def pack_record(index: int, data: memoryview, *, raw: bool) -> bytes:
    """The header of a record. Reads all of `data`."""
    word = data.nbytes | (_RAW_BIT if raw else 0)
    return _RECORD.pack(word, record_crc(index, word, data))


def record_crc(index: int, word: int, data: memoryview) -> int:
    """The checksum of a record. It knows the chunk's number, so that a record in the wrong place is noticed, too."""
    return zlib.crc32(data, zlib.crc32(_SEED.pack(index, word)))


def record_size(head: bytes | bytearray, chunk_bytes: int) -> tuple[int, int, int, bool]:
    """Of a record's header: word, checksum, size of the data, whether the data is the chunk itself.

    Args:
        chunk_bytes: bytes of the chunk that it is about.

    Raises:
        WireError: a size that such a chunk cannot have.
    """
    word, crc = _RECORD.unpack(head)
    size, raw = word & ~_RAW_BIT, bool(word & _RAW_BIT)
    if (size != chunk_bytes) if raw else not 0 < size < chunk_bytes:
        raise WireError(f"a record of {size} bytes for a chunk of {chunk_bytes}")
    return word, crc, size, raw
