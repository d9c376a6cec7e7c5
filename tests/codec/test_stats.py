"""Counters of a link count for its worker, too."""

from __future__ import annotations

from aiorlinf.codec.reasons import RawReason
from aiorlinf.codec.stats import CompressionStats


def test_a_link_counts_for_its_worker() -> None:
    worker = CompressionStats()
    one, two = CompressionStats(worker), CompressionStats(worker)
    assert worker.ratio == 1.0
    one.began()
    one.sent(1000, 100)
    two.began()
    two.sent(1000, 400)
    two.sent(50, 58, RawReason.NO_BUFFER)
    two.stayed_raw(RawReason.SMALL, 10)
    two.worked(0.5)
    one.took(28, 0, 0.0, last=False)
    one.took(100, 1000, 0.25, last=True)
    assert one.ratio == 10.0
    assert worker.as_dict() == {
        "tensors": 2,
        "bytes_before": 2050,
        "bytes_after": 558,
        "ratio": 2050 / 558,
        "compress_s": 0.5,
        "raw": {"small": 1},
        "raw_bytes": 10,
        "raw_chunks": {"no_buffer": 1},
        "received": 1,
        "received_before": 128,
        "received_after": 1000,
        "decompress_s": 0.25,
    }
    assert one.as_dict()["raw"] == {}
