"""A look at a few places of a large tensor, to spare the codec what looks random."""

from __future__ import annotations

from collections.abc import Sequence

from aiorlinf.codec.base import Context

__all__ = ["SAMPLE", "SAMPLED_FROM", "all_random", "looks_random"]

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


_FEW = 8


def all_random(context: Context, leaves: Sequence[memoryview]) -> bool:
    """Whether these are a few large leaves that all look random: half a millisecond at most with a quick codec, and far less where one
    does not.

    False if it cannot be said so quickly. Raises what the codec raises.
    """
    if not 0 < len(leaves) <= _FEW or any(leaf.nbytes < SAMPLED_FROM for leaf in leaves):
        return False
    scratch = memoryview(bytearray(SAMPLE))
    return all(looks_random(context, leaf, scratch) for leaf in leaves)
