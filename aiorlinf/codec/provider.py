"""What a worker has for compressing: made lazily, once, and shared by all of its links and groups."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from aiorlinf.codec.base import Codec
from aiorlinf.codec.compressing import LeafCompressor
from aiorlinf.codec.contexts import ContextPool, ContextSource
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.header import MAX_CHUNK
from aiorlinf.codec.memory import BufferSource, Memory
from aiorlinf.codec.pace import Pace
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.registry import AUTO, codecs_by_number, make_codecs
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.config import TensorCompressionConfig
from aiorlinf.errors import WireError
from aiorlinf.wire.flat import Flat, Kind
from aiorlinf.wire.leaves import Device, Leaf, LeafSpec

__all__ = ["CHUNK_BYTES", "CodecUse", "CompressionProvider"]

CHUNK_BYTES = 1024 * 1024
"""Bytes of one chunk. Large enough that the codecs lose next to nothing by starting afresh with each, small enough to overlap."""

_SMALLEST_CHUNK = 64 * 1024


class CodecUse(NamedTuple):
    """A codec with its parameters, what to call it, and the contexts for sending with it. `pace`: of what was sent with it."""

    label: str
    codec: Codec[Any]
    contexts: ContextPool
    pace: Pace


class CompressionProvider:
    """See the module. Home thread only, but for `would_try`.

    Args:
        config: the job's; its codec's library has been probed (`registry.probe`).
        buffers: for compressed bytes on their way out and in.
        chunk_bytes: bytes of one chunk, held to 64 KiB to 64 MiB. Large tensors get larger ones where the codec is quick (`Pace`).

    Attributes:
        enabled: whether anything is compressed.
        stats: of all links together.
    """

    def __init__(self, config: TensorCompressionConfig, buffers: BufferSource, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.enabled: bool = config.enabled
        self.stats: CompressionStats = CompressionStats()
        self.chunk_bytes: int = min(max(chunk_bytes, _SMALLEST_CHUNK), MAX_CHUNK)
        self._config = config
        self._excluded = frozenset(config.excluded_dtypes)
        self._buffers = buffers
        self._uses: list[CodecUse] = []
        self._contexts: dict[int, ContextPool] = {}
        self._closed = False

    # ---- what is used

    @property
    def chooses(self) -> bool:
        """Each link chooses among several codecs."""
        return self._config.codec == AUTO

    @property
    def uses(self) -> list[CodecUse]:
        """The codec for sending; several of which one is chosen if `chooses`, the cheapest first.

        Raises:
            ConfigError: a library is missing.
            ValueError: compression is off.
        """
        if not self._uses:
            self._uses = [CodecUse(label, codec, self._pool(codec), Pace()) for label, codec in make_codecs(self._config)]
        return self._uses

    @property
    def codec(self) -> Codec[Any]:
        """The codec for sending, or the first of several. Raises as `uses`."""
        return self.uses[0].codec

    def contexts(self, number: int) -> ContextPool:
        """The contexts of a codec by its number, for both directions.

        Raises:
            WireError: no such codec, or its library is missing here.
        """
        pool = self._contexts.get(number)
        if pool is None:
            pool = self._contexts[number] = self._pool_of(number)
        return pool

    def _pool(self, codec: Codec[Any]) -> ContextPool:
        pool = ContextPool(codec.context, codec.max_inflight)
        if self._closed:
            pool.close()
        return pool

    def _pool_of(self, number: int) -> ContextPool:
        for use in self.uses if self.enabled else ():
            if use.codec.number == number:
                return use.contexts
        cls = codecs_by_number().get(number)
        if cls is None:
            raise WireError(f"a tensor compressed with codec number {number}, which is not known here")
        try:
            return self._pool(cls())
        except ImportError as error:
            raise WireError(f"a tensor compressed with {cls.name}, whose package {cls.package} cannot be imported here: {error}") from error

    @staticmethod
    def known() -> Container[int]:
        """Numbers of the codecs that may arrive."""
        return codecs_by_number().keys()

    # ---- sending

    def would_try(self, flat: Flat) -> bool:
        """Whether `plan` might say of some leaf that it is to be tried. Counts nothing. Any thread."""
        return flat.kind is not Kind.OBJECT and any(self._unfit(leaf.spec) is None for leaf in flat.leaves)

    def plan(self, flat: Flat, stats: CompressionStats | None = None, *, against: RawReason | None = None) -> list[RawReason | None]:
        """For each leaf, why it goes as it is; None: it is to be tried (`compressor`), and may still turn out to.

        Counts the reasons. Looks at descriptions only, not at data.

        Args:
            against: why none of them is tried; leaves that would not be tried anyway have reasons of their own.
        """
        counters = self.stats if stats is None else stats
        pickled = flat.kind is Kind.OBJECT
        planned: list[RawReason | None] = []
        for leaf in flat.leaves:
            reason = RawReason.KIND if pickled else self._against(leaf.spec) or against
            if reason is not None:
                counters.stayed_raw(reason, leaf.nbytes)
            planned.append(reason)
        return planned

    def _against(self, spec: LeafSpec) -> RawReason | None:
        return self._unfit(spec) or (RawReason.TOO_LARGE if spec.nbytes > self._max_input else None)

    @property
    def _max_input(self) -> int:
        return max(use.codec.max_input for use in self.uses)

    def _unfit(self, spec: LeafSpec) -> RawReason | None:
        if not spec.is_tensor:
            return RawReason.BUFFER
        if spec.device is not Device.CPU:
            return RawReason.DEVICE
        if spec.dtype in self._excluded:
            return RawReason.DTYPE
        if spec.nbytes < self._config.min_bytes or not spec.nbytes:
            return RawReason.SMALL
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
        use = self.uses[0]
        counters = self.stats if stats is None else stats
        return LeafCompressor(leaf.raw, use.codec, use.contexts, self._buffers, counters, chunk_bytes=self.chunk_bytes, whole=whole)

    def leaf_compressor(self, src: memoryview, use: CodecUse, contexts: ContextSource, stats: CompressionStats) -> LeafCompressor:
        """As `compressor`, of bytes in CPU memory, with a codec of one's choice and contexts from elsewhere."""
        return LeafCompressor(src, use.codec, contexts, self._buffers, stats, chunk_bytes=self.chunk_bytes, pace=use.pace)

    # ---- receiving

    def decompressor(self, dst: Memory, stats: CompressionStats | None = None) -> Decompressor:
        """Receive a leaf into `dst`, which has just the leaf's size by the manifest."""
        return Decompressor(dst, self._buffers, self.known(), self.stats if stats is None else stats)

    # ---- for people

    def link_stats(self) -> CompressionStats:
        """Counters for one link; what they count is in `stats`, too."""
        return CompressionStats(self.stats)

    def describe(self) -> dict[str, Any]:
        """For people and for ``stats()``: what is in use. Makes the codecs."""
        if not self.enabled:
            return {"enabled": False}
        if self.chooses:
            choices = {use.label: {**use.codec.describe(), "contexts": _contexts_of(use)} for use in self.uses}
            return {"enabled": True, "codec": AUTO, "choices": choices}
        (use,) = self.uses
        return {"enabled": True, "codec": use.label, **use.codec.describe(), "contexts": _contexts_of(use)}

    def close(self) -> None:
        """Keep no contexts, and fail who waits for one with ClosedError."""
        self._closed = True
        for pool in (*self._contexts.values(), *(use.contexts for use in self._uses)):
            pool.close()


def _contexts_of(use: CodecUse) -> dict[str, Any]:
    return {"made": use.contexts.made, "limit": use.contexts.limit, "waits": use.contexts.waits}
