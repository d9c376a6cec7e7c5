"""Zstandard: compresses further than LZ4 and takes longer; for slow networks.

Its working state costs about a megabyte and a moment to make, so contexts are kept, and a worker has a bounded number of them. The
package's streaming readers are what works from memory to memory, without `bytes` in between.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.memory import Memory, byte_view, writable_view
from aiorlinf.config import option
from aiorlinf.errors import WireError

if TYPE_CHECKING:
    import zstandard

__all__ = ["CODEC", "Zstd", "ZstdContext", "ZstdParameters"]

_MAX_LEVEL = 22
_QUICK_LEVEL = 3
_MAX_WINDOW = 1 << 27
"""Bytes of history that a frame may ask us to keep; what the highest level uses."""


@dataclass(frozen=True, slots=True)
class ZstdParameters:
    """Keys of ``codec: zstd``."""

    level: int = option(1, "higher compresses more and takes longer", minimum=1, maximum=_MAX_LEVEL)
    max_inflight: int = option(4, "reusable contexts of one worker, shared by both directions", minimum=1, maximum=1024)


class ZstdContext(Context):
    """A compressor and a decompressor, each made when first needed."""

    __slots__ = ("_compressor", "_decompressor", "_level", "_library", "_spare")

    def __init__(self, level: int) -> None:
        self._library = importlib.import_module("zstandard")
        self._level = level
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None
        self._spare = bytearray(1)

    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        source, target = byte_view(src), writable_view(dst)
        if not target.nbytes:
            return None
        compressor = self._compressor
        if compressor is None:
            compressor = self._compressor = self._library.ZstdCompressor(level=self._level, write_checksum=False, write_content_size=True)
        if not source.nbytes:  # over an empty buffer, a reader of the package never comes back
            empty = compressor.compress(b"")
            if len(empty) > target.nbytes:
                return None
            target[: len(empty)] = empty
            return len(empty)
        # Starting a reader resets the compressor, also from one that was left in the middle of a frame.
        reader = compressor.stream_reader(source)
        size = reader.readinto(target)
        if size == target.nbytes and reader.readinto(self._spare):
            return None
        return size

    def decompress_into(self, src: Memory, dst: Memory) -> None:
        source, target = byte_view(src), writable_view(dst)
        decompressor = self._decompressor
        if decompressor is None:
            decompressor = self._decompressor = self._library.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        try:
            frame = self._library.get_frame_parameters(source)
            if frame.content_size != target.nbytes or frame.window_size > _MAX_WINDOW:
                raise WireError(f"a Zstandard frame of another size than the {target.nbytes} bytes announced")
            reader = decompressor.stream_reader(source)
            size = reader.readinto(target)
            more = reader.readinto(self._spare)
        except self._library.ZstdError as error:
            raise WireError(f"corrupt Zstandard data: {error}") from error
        if size != target.nbytes or more:
            raise WireError(f"corrupt Zstandard data: {size} of {target.nbytes} bytes came out")


class Zstd(Codec[ZstdParameters]):
    """See the module."""

    name = "zstd"
    number = 2
    package = "zstandard"
    max_input = 2**63 - 1
    undone_at_once = 128 * 1024
    Parameters = ZstdParameters

    def __init__(self, parameters: ZstdParameters | None = None) -> None:
        super().__init__(parameters)
        self._looker: ZstdContext | None = None

    @classmethod
    def probe(cls) -> None:
        importlib.import_module("zstandard")

    @classmethod
    def choices(cls) -> Sequence[tuple[str, ZstdParameters]]:
        # Those in between differ by less than what else happens on a machine.
        return [(f"{cls.name} {level}", ZstdParameters(level=level)) for level in (1, 3, 9)]

    @property
    def max_inflight(self) -> int | None:
        return self.parameters.max_inflight

    @property
    def at_once(self) -> int:
        return 64 * 1024 if self.parameters.level <= _QUICK_LEVEL else 0

    def looker(self) -> ZstdContext:
        if self._looker is None:
            self._looker = ZstdContext(1)
        return self._looker

    def context(self) -> ZstdContext:
        return ZstdContext(self.parameters.level)

    def compress_bound(self, nbytes: int) -> int:
        # A block is stored when it does not shrink: three bytes for each of 128 KiB, and the head of the frame. The library's own bound is
        # of this form.
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes")
        return nbytes + (nbytes >> 8) + 64

    def describe(self) -> dict[str, str]:
        library = importlib.import_module("zstandard")
        version = ".".join(map(str, library.ZSTD_VERSION))
        return {"library": f"Zstandard {version}", "calls": f"the zstandard package {library.__version__}, memory to memory"}


CODEC = Zstd
