"""A look at a few places of a large tensor, to spare the codec what looks random."""

from __future__ import annotations

from aiorlinf.codec.base import Context

__all__ = ["SAMPLE", "SAMPLED_FROM", "looks_random"]

_PLACES = 4
SAMPLE = 16 * 1024
"""Bytes of one."""
SAMPLED_FROM = 8 * _PLACES * SAMPLE
"""Bytes. In smaller tensors the samples would cost too large a part of what they may save."""


def looks_random(context: Context, src: memoryview, scratch: memoryview) -> bool:
    """Whether none of the samples gets smaller at all, by even one byte: then the whole hardly will.

    One that does is enough to try, so the codec has the last word on all that is not random nearly everywhere.

    Args:
        src: at least `SAMPLED_FROM` bytes.
        scratch: at least `SAMPLE` bytes; overwritten.
    """
    gap = (src.nbytes - SAMPLE) // (_PLACES - 1)
    room = scratch[: SAMPLE - 1]
    return all(context.compress_into(src[place * gap : place * gap + SAMPLE], room) is None for place in range(_PLACES))
