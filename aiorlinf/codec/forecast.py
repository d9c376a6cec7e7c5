"""What a message should cost by the samples and the link's rate, before or besides what was measured. Pure. Seconds per byte.

Sending is as quick as the slowest of compressing, the link and decompressing, for they overlap; in short messages they follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiorlinf.codec.trial import Measured

__all__ = ["at_best", "expected", "on_the_wire"]

_PIPELINED_BYTES = 2 * 1024 * 1024
"""Smaller messages are compressed, sent and decompressed one after the other."""


def on_the_wire(found: Measured, rate: float) -> float:
    """What the link takes for what is left of a byte."""
    return 1 / (found.ratio * rate)


def at_best(found: Measured, nbytes: int, rate: float, threads: int, slower: float = 1.0) -> float:
    """What it costs if nothing but the codec, which is so many times slower than with samples, and the link takes time."""
    compress, wire, decompress = slower / found.compress, on_the_wire(found, rate), slower / found.decompress
    if nbytes < _PIPELINED_BYTES:
        return compress + wire + decompress
    return max(compress / threads, wire, decompress / threads)


def expected(
    found: Measured, nbytes: int, rate: float, threads: int, others: Mapping[str, Measured], known: Iterable[tuple[str, float]]
) -> float:
    """What it will cost, by what codecs of which more is `known` have cost.

    They took longer than they might have either because codecs are slower in messages than with samples, or because of what each message
    costs with any codec. Which of the two it is cannot be told, so the better outcome counts, and of several codecs the one that did best.
    """
    more, slower = 0.0, 1.0
    observed = [(others[label], cost) for label, cost in known if label in others]
    if observed:
        more = max(min(cost - at_best(other, nbytes, rate, threads) for other, cost in observed), 0.0)
        times = [cost / at_best(other, nbytes, float("inf"), threads) for other, cost in observed if on_the_wire(other, rate) < cost / 2]
        slower = max(min(times, default=1.0), 1.0)
    best = at_best(found, nbytes, rate, threads)
    return min(best + more, at_best(found, nbytes, rate, threads, slower))
