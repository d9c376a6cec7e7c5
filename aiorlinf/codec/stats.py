"""What compression did, for a link and for a worker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from aiorlinf.codec.reasons import RawReason

__all__ = ["CompressionStats"]


class CompressionStats:
    """Counters, only ever growing. Home thread only.

    Args:
        parent: counts along, such as the worker's for a link's.

    Attributes:
        tensors: sent compressed.
        bytes_before: their bytes, as far as sent.
        bytes_after: what was sent for them, headers included.
        compress_s: seconds that codecs worked for sending, also in vain.
        raw_chunks: of `tensors`, chunks that were sent as they are.
        raw: tensors sent as they are, by reason.
        raw_bytes: their bytes.
        received: tensors received compressed.
        received_before: what was received for them, headers included.
        received_after: their bytes.
        decompress_s: seconds that codecs worked for receiving.
    """

    __slots__ = (
        "bytes_after",
        "bytes_before",
        "compress_s",
        "decompress_s",
        "parent",
        "raw",
        "raw_bytes",
        "raw_chunks",
        "received",
        "received_after",
        "received_before",
        "tensors",
    )

    def __init__(self, parent: CompressionStats | None = None) -> None:
        self.parent: CompressionStats | None = parent
        self.tensors: int = 0
        self.bytes_before: int = 0
        self.bytes_after: int = 0
        self.compress_s: float = 0.0
        self.raw_chunks: Counter[RawReason] = Counter()
        self.raw: Counter[RawReason] = Counter()
        self.raw_bytes: int = 0
        self.received: int = 0
        self.received_before: int = 0
        self.received_after: int = 0
        self.decompress_s: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times smaller the compressed tensors got; 1.0 as long as there is none."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    def stayed_raw(self, reason: RawReason, nbytes: int) -> None:
        """A tensor goes as it is."""
        self.raw[reason] += 1
        self.raw_bytes += nbytes
        if self.parent is not None:
            self.parent.stayed_raw(reason, nbytes)

    def began(self) -> None:
        """A tensor goes compressed."""
        self.tensors += 1
        if self.parent is not None:
            self.parent.began()

    def worked(self, seconds: float) -> None:
        """A codec worked for sending."""
        self.compress_s += seconds
        if self.parent is not None:
            self.parent.worked(seconds)

    def sent(self, before: int, after: int, reason: RawReason | None = None) -> None:
        """A chunk of a compressed tensor goes; `reason`: as it is, because of that."""
        self.bytes_before += before
        self.bytes_after += after
        if reason is not None:
            self.raw_chunks[reason] += 1
        if self.parent is not None:
            self.parent.sent(before, after, reason)

    def took(self, before: int, after: int, seconds: float, *, last: bool) -> None:
        """A chunk of a compressed tensor is decompressed; `last`: the tensor is whole."""
        self.received += last
        self.received_before += before
        self.received_after += after
        self.decompress_s += seconds
        if self.parent is not None:
            self.parent.took(before, after, seconds, last=last)

    def as_dict(self) -> dict[str, Any]:
        """A copy in plain values."""
        return {
            "tensors": self.tensors,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "ratio": self.ratio,
            "compress_s": self.compress_s,
            "raw": {reason.value: count for reason, count in self.raw.items()},
            "raw_bytes": self.raw_bytes,
            "raw_chunks": {reason.value: count for reason, count in self.raw_chunks.items()},
            "received": self.received,
            "received_before": self.received_before,
            "received_after": self.received_after,
            "decompress_s": self.decompress_s,
        }
