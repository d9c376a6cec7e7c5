"""Compression between the two links of the model: all of it is real, and its limits are so small that short messages meet them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import aiorlinf.codec.compressing
import aiorlinf.codec.header
import aiorlinf.codec.payload
import aiorlinf.link.coded_sink
from aiorlinf.codec.codecs.lz4 import Lz4
from aiorlinf.codec.codecs.zstd import Zstd
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.config import TensorCompressionConfig, load_config
from aiorlinf.link.coding import Coding
from aiorlinf.link.link import Link
from aiorlinf.wire.handshake import Hello
from aiorlinf.work.home import LoopHome
from tests.link.shapes import THRESHOLD

__all__ = ["CODECS", "PlannedCoding", "small_chunks"]

CODECS = ("lz4", "zstd")
CHUNK = 256
HELLO = Hello(role="link", job="model", address=None, incarnation=0, target=None, host_id="", capabilities={"codecs": [1, 2]})


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes are several chunks, several batches, and more than is compressed ahead."""
    patch.setattr(aiorlinf.codec.header, "MIN_CHUNK", CHUNK)
    patch.setattr(aiorlinf.codec.compressing, "MIN_CHUNK", CHUNK)
    patch.setattr(aiorlinf.codec.payload, "BATCH_BYTES", 2 * CHUNK)
    patch.setattr(aiorlinf.link.coded_sink, "_STAGING_BYTES", 100)
    for codec in (Lz4, Zstd):  # the loop does the shortest ones itself
        patch.setattr(codec, "at_once", CHUNK + 40)
        patch.setattr(codec, "undone_at_once", CHUNK // 2)


def config_of(codec: str) -> TensorCompressionConfig:
    """Nearly everything is tried, and zstd has one context for both directions."""
    keys: dict[str, Any] = {"codec": codec, "min_bytes": THRESHOLD - 100, "excluded_dtypes": []}
    if codec == "zstd":
        keys["max_inflight"] = 1
    return load_config({"cluster": {"collective": {"tensor_compression": keys}}}).cluster.collective.tensor_compression


class PlannedCoding:
    """What one side has."""

    def __init__(self, home: LoopHome, codec: str) -> None:
        self.pool = TensorBufferPool(4 * CHUNK)
        self.coding = Coding(home, config_of(codec), self.pool)
        self.coding.provider.chunk_bytes = CHUNK

    def equip(self, link: Link) -> None:
        """The link comes up."""
        self.coding.equip(link, HELLO)

    def unused(self) -> bool:
        """Nothing is under way, and contexts and buffers are back."""
        coding = self.coding
        contexts = [coding.provider.contexts(number) for number in (1, 2)]
        if self.pool.stats().leased_bytes:
            gc.collect()
        return (
            not coding.encoder.running
            and not coding.encoder._queue
            and not coding.decoder.running
            and not coding.decoder._queue
            and all(each.idle == each.made for each in contexts)
            and not self.pool.stats().leased_bytes
        )
