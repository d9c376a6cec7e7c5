"""What a worker has for compressing: made lazily, once, and shared by all of its links and groups."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from aiorlinf.codec.base import Codec
from aiorlinf.codec.compressing import LeafCompressor
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.header import MAX_CHUNK, PLAIN, LeafHeader
from aiorlinf.codec.memory import BufferSource, Memory
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.registry import codecs_by_number, make_codec
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.config import TensorCompressionConfig
from aiorlinf.errors import WireError
from aiorlinf.wire.flat import Flat, Kind
from aiorlinf.wire.leaves import Device, Leaf, LeafSpec

__all__ = ["CHUNK_BYTES", "CompressionProvider", "plain_header"]

CHUNK_BYTES = 1024 * 1024
"""Bytes of one chunk. Large enough that the codecs lose next to nothing by starting afresh with each, small enough to overlap."""

_SMALLEST_CHUNK = 64 * 1024


class CompressionProvider:
    """See the module. Home thread only.

    Args:
        config: the job's; its codec's library has been probed (`registry.probe`).
        buffers: for compressed bytes on their way out and in.
        chunk_bytes: bytes of one chunk, held to 64 KiB to 64 MiB.

    Attributes:
        enabled: whether anything is compressed.
        stats: of all links together.
    """

    def __init__(self, config: TensorCompressionConfig, buffers: BufferSource, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.enabled = config.enabled
        self.stats = CompressionStats()
        self.chunk_bytes = min(max(chunk_bytes, _SMALLEST_CHUNK), MAX_CHUNK)
        self._config = config
        self._excluded = frozenset(config.excluded_dtypes)
        self._buffers = buffers
        self._codec: Codec[Any] | None = None
        self._contexts: dict[int, ContextPool] = {}
        self._closed = False

    # ---- what is used

    @property
    def codec(self) -> Codec[Any]:
        """The codec for sending.

        Raises:
            ConfigError: its library is missing.
            ValueError: compression is off.
        """
        if self._codec is None:
            self._codec = make_codec(self._config)
        return self._codec

    def contexts(self, number: int) -> ContextPool:
        """The contexts of a codec by its number, for both directions.

        Raises:
            WireError: no such codec, or its library is missing here.
        """
        pool = self._contexts.get(number)
        if pool is None:
            codec = self._codec_of(number)
            pool = self._contexts[number] = ContextPool(codec.context, codec.max_inflight)
            if self._closed:
                pool.close()
        return pool

    def _codec_of(self, number: int) -> Codec[Any]:
        if self.enabled and self.codec.number == number:
            return self.codec
        cls = codecs_by_number().get(number)
        if cls is None:
            raise WireError(f"a tensor compressed with codec number {number}, which is not known here")
        try:
            return cls()
        except ImportError as error:
            raise WireError(f"a tensor compressed with {cls.name}, whose package {cls.package} cannot be imported here: {error}") from error

    @staticmethod
    def known() -> Container[int]:
        """Numbers of the codecs that may arrive."""
        return codecs_by_number().keys()

    # ---- sending

    def plan(self, flat: Flat, stats: CompressionStats | None = None) -> list[RawReason | None]:
        """For each leaf, why it goes as it is; None: it is to be tried (`compressor`), and may still turn out to.

        Counts the reasons. Looks at descriptions only, not at data.
        """
        counters = self.stats if stats is None else stats
        pickled = flat.kind is Kind.OBJECT
        planned: list[RawReason | None] = []
        for leaf in flat.leaves:
            reason = RawReason.KIND if pickled else self._against(leaf.spec)
            if reason is not None:
                counters.stayed_raw(reason, leaf.nbytes)
            planned.append(reason)
        return planned

    def _against(self, spec: LeafSpec) -> RawReason | None:
        if not spec.is_tensor:
            return RawReason.BUFFER
        if spec.device is not Device.CPU:
            return RawReason.DEVICE
        if spec.dtype in self._excluded:
            return RawReason.DTYPE
        if spec.nbytes < self._config.min_bytes or not spec.nbytes:
            return RawReason.SMALL
        if spec.nbytes > self.codec.max_input:
            return RawReason.TOO_LARGE
        return None

    def compressor(self, leaf: Leaf, stats: CompressionStats | None = None, *, whole: bool = False) -> LeafCompressor:
        """Compress a leaf that `plan` says to try. Its reasons, if it goes as it is after all, are counted.

        Args:
            whole: commit only once all of it is compressed, so that its size is known before the first byte leaves.

        Raises:
            ValueError: the leaf is not in CPU memory.
        """
        if leaf.raw is None:
            raise ValueError(f"{leaf} is not in CPU memory")
        codec = self.codec
        counters = self.stats if stats is None else stats
        pool = self.contexts(codec.number)
        return LeafCompressor(leaf.raw, codec, pool, self._buffers, counters, chunk_bytes=self.chunk_bytes, whole=whole)

    # ---- receiving

    def decompressor(self, dst: Memory, stats: CompressionStats | None = None) -> Decompressor:
        """Receive a leaf into `dst`, which has just the leaf's size by the manifest."""
        return Decompressor(dst, self._buffers, self.known(), self.stats if stats is None else stats)

    # ---- for people

    def link_stats(self) -> CompressionStats:
        """Counters for one link; what they count is in `stats`, too."""
        return CompressionStats(self.stats)

    def describe(self) -> dict[str, Any]:
        """For people and for ``stats()``: what is in use. Makes the codec."""
        if not self.enabled:
            return {"enabled": False}
        codec = self.codec
        pool = self._contexts.get(codec.number)
        return {
            "enabled": True,
            "codec": codec.name,
            **codec.describe(),
            "contexts": {} if pool is None else {"made": pool.made, "limit": pool.limit, "waits": pool.waits},
        }

    def close(self) -> None:
        """Keep no contexts, and fail who waits for one with ClosedError."""
        self._closed = True
        for pool in self._contexts.values():
            pool.close()


def plain_header(nbytes: int) -> bytes:
    """The leaf header ahead of a payload that goes as it is, where one is wanted."""
    return LeafHeader(PLAIN, nbytes, nbytes, 0).encode()
