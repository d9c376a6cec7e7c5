"""One link's share of a worker's compression: its counters, and what undoes a codec's work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorlinf.link.coded_sink import CodedOwner, CodedSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiorlinf.codec.decoder import Decoder
    from aiorlinf.codec.provider import CompressionProvider
    from aiorlinf.codec.stats import CompressionStats

__all__ = ["LinkCoding"]


class LinkCoding:
    """See the module. Home thread only.

    Attributes:
        stats: of this link.
        choices: what ``codec: auto`` knows and chooses, None if the job says which codec it is.
    """

    def __init__(self, provider: CompressionProvider, decoder: Decoder) -> None:
        self.stats: CompressionStats = provider.link_stats()
        self.choices: Callable[[], dict[str, Any]] | None = None
        self._provider = provider
        self._decoder = decoder

    def as_dict(self) -> dict[str, Any]:
        """For ``stats()``."""
        stats = self.stats.as_dict()
        return stats if self.choices is None else {**stats, "auto": self.choices()}

    def sink(self, owner: CodedOwner, message_id: int, leaves: Sequence[tuple[memoryview, bool]]) -> CodedSink:
        """Where the bytes of a coded payload go."""
        provider, stats = self._provider, self.stats
        return CodedSink(owner, message_id, leaves, self._decoder, lambda dst: provider.decompressor(dst, stats))
