"""Tensors through a codec, on the stream: the sending half.

Everything of such a message travels over the stream, also leaves that go as they are, and also where Gloo carries large payloads: over
sockets the stream is no slower than Gloo, and what is compressed is small. While the stream sends one chunk the next ones are compressed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from aiorlinf.codec.compressing import LeafCompressor
from aiorlinf.codec.contexts import ContextSource
from aiorlinf.codec.header import pack_tried
from aiorlinf.codec.payload import PayloadCompressor
from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.sampling import all_random
from aiorlinf.link.outgoing import Outgoing
from aiorlinf.wire.frames import Flag, Start, Via

if TYPE_CHECKING:
    from aiorlinf.codec.encoder import Encoder
    from aiorlinf.codec.provider import CodecUse, CompressionProvider
    from aiorlinf.codec.stats import CompressionStats
    from aiorlinf.link.pump import Pump
    from aiorlinf.link.selecting import Selector
    from aiorlinf.link.tracing import LinkTrace

__all__ = ["CodedHost", "CodedWay"]


class CodedHost(Protocol):
    """What this way needs of the sending half."""

    pump: Pump
    trace: LinkTrace | None

    def announce(self, out: Outgoing, start: Start) -> None: ...
    def begin_stream(self, out: Outgoing) -> None: ...


class CodedWay:
    """See the module. Meets `link.ways.Way`.

    Args:
        stats: of the link.
        selector: says which codec it is.
        against: why nothing is compressed for this peer, None if nothing speaks against it.
    """

    eager = False

    def __init__(
        self,
        host: CodedHost,
        provider: CompressionProvider,
        encoder: Encoder,
        stats: CompressionStats,
        selector: Selector,
        against: RawReason | None,
    ) -> None:
        self._host = host
        self._provider = provider
        self._encoder = encoder
        self._stats = stats
        self._selector = selector
        self._against = against

    def passes(self, out: Outgoing) -> None:
        """The message goes another way; count why its tensors are not compressed."""
        self.takes(out)

    def takes(self, out: Outgoing) -> bool:
        if out.flat is None or out.flags & Flag.TENSOR:
            return False
        if out.tried is None:  # asked more than once, and the reasons are to be counted once
            reasons = self._provider.plan(out.flat, self._stats, against=self._against)
            tried = [reason is None for reason in reasons]
            out.tried = tried if any(tried) else []
        return bool(out.tried)

    def begin(self, out: Outgoing) -> None:
        assert out.flat is not None
        assert out.tried
        provider, stats = self._provider, self._stats
        use = self._selector.select(out)
        against = RawReason.SLOWER if use is None else RawReason.RANDOM if self._looks_random(out, use) else None
        if use is None or against is not None:
            # From here on it is a message like any other: nothing of this way costs it anything.
            for leaf, tried in zip(out.flat.leaves, out.tried, strict=True):
                if tried:
                    stats.stayed_raw(against or RawReason.SLOWER, leaf.nbytes)
            self._selector.begun(out, None)
            self._host.begin_stream(out)
            return

        def make(src: memoryview, contexts: ContextSource) -> LeafCompressor:
            return provider.leaf_compressor(src, use, contexts, stats)

        leaves = []
        for leaf, tried in zip(out.flat.leaves, out.tried, strict=True):
            assert leaf.raw is not None
            leaves.append((leaf.raw, tried))
        payload = PayloadCompressor(leaves, make)
        payload.spans = None if self._host.trace is None else []
        pump, message_id = self._host.pump, out.message_id
        payload.on_ready = lambda: pump.wake(message_id)
        out.source = payload
        self._selector.begun(out, payload)
        self._host.announce(out, Start(Via.CODED, place=pack_tried(out.tried)))
        pump.begin_source(out, payload)
        self._encoder.add(payload, use.contexts, use.codec.at_once)

    def _looks_random(self, out: Outgoing, use: CodecUse) -> bool:
        """All that is to be tried will hardly get smaller, as far as a quick look tells."""
        assert out.flat is not None
        assert out.tried is not None
        looker = use.codec.looker()
        if looker is None:
            return False
        leaves = [leaf.raw for leaf, tried in zip(out.flat.leaves, out.tried, strict=True) if tried and leaf.raw is not None]
        start = time.perf_counter()
        try:
            return all_random(looker, leaves)
        except Exception:  # whoever compresses it says so and counts it
            return False
        finally:
            self._stats.worked(time.perf_counter() - start)

    def place(self, out: Outgoing, ahead: bool) -> bytes | None:
        return None

    def begin_at_once(self, out: Outgoing) -> bool:
        return False

    def again(self, out: Outgoing) -> bool:
        return False  # it cannot be lost on its own

    def revoke(self, out: Outgoing) -> bool:
        return False

    def accepted(self, message_id: int) -> None:
        pass

    def dropped(self, message_id: int) -> None:
        pass

    def close(self) -> None:
        pass
