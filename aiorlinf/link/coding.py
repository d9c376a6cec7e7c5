"""What a worker has for compressing: the provider, and the codecs at work in private threads. Gives each link its share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorlinf.codec.decoder import Decoder
from aiorlinf.codec.encoder import Encoder
from aiorlinf.codec.provider import CompressionProvider
from aiorlinf.codec.reasons import RawReason
from aiorlinf.link.coded_way import CodedWay
from aiorlinf.link.link_coding import LinkCoding
from aiorlinf.link.selecting import Always, Quickest, Selector, Trials
from aiorlinf.link.ways import SharedWay

if TYPE_CHECKING:
    from aiorlinf.codec.pool import TensorBufferPool
    from aiorlinf.config import TensorCompressionConfig
    from aiorlinf.link.link import Link
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.handshake import Hello
    from aiorlinf.work.home import LoopHome

__all__ = ["Coding"]


class Coding:
    """See the module. Home thread only, but for `would_try`.

    Args:
        config: the job's; compression is enabled, and the codec's library has been probed (`codec.registry.probe`).
        pool: the worker's.
    """

    def __init__(self, home: LoopHome, config: TensorCompressionConfig, pool: TensorBufferPool) -> None:
        self.provider: CompressionProvider = CompressionProvider(config, pool)
        self.encoder: Encoder = Encoder(home)
        self.decoder: Decoder = Decoder(home, self.provider.contexts)
        self._home = home
        self._trials: Trials | None = None

    def would_try(self, flat: Flat) -> bool:
        """Whether a codec might be tried on some leaf of this object. Any thread."""
        return self.provider.would_try(flat)

    def equip(self, link: Link, hello: Hello) -> None:
        """A link has come up, with all its other ways: from now on tensors are compressed, if they do not go through shared memory."""
        share = link.receiver.coding = LinkCoding(self.provider, self.decoder)
        known = hello.capabilities.get("codecs")
        uses = [use for use in self.provider.uses if isinstance(known, list) and use.codec.number in known]
        shared = [way for way in link.sender.ways if isinstance(way, SharedWay)]
        against = RawReason.SHARED_MEMORY if shared else None if uses else RawReason.PEER
        selector: Selector = Always(self.provider.uses[0])
        if self.provider.chooses and against is None:
            if self._trials is None:
                self._trials = Trials(self._home, self.provider.uses)
            selector = quickest = Quickest(uses, self._trials)
            share.choices = quickest.describe
        way = CodedWay(link.sender, self.provider, self.encoder, share.stats, selector, against)
        if shared:
            shared[0].carries = way.passes  # and what does not fit there goes as it is, too: this host's sockets are quicker than any codec
        else:
            link.sender.ways.insert(0, way)
        link.codes = against is None

    def stats(self) -> dict[str, Any]:
        """What is in use, and what it did for all links together."""
        return {**self.provider.describe(), **self.provider.stats.as_dict()}

    def close(self) -> None:
        """The worker ends: nobody gets a context any more."""
        self.provider.close()
