"""How codecs do on samples of what is sent: pieces of it go through each of them, there and back."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiorlinf.codec.base import Context

__all__ = ["PIECE_BYTES", "Measured", "first_look", "take_pieces", "try_codecs"]

PIECE_BYTES = 256 * 1024
"""Of quick codecs, calls with much less would show what a call costs instead."""
_PIECES = 4
_SHORT_S = 0.001
"""What takes less is done twice, and the better time counts: something else may have had the processor."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a codec has done with the samples.

    Attributes:
        ratio: how many times smaller they got; 1.0 if they did not.
        compress, decompress: bytes (before compressing) per second of one core.
        whole: it has seen all samples, and not only the first of them.
    """

    ratio: float
    compress: float
    decompress: float
    whole: bool = True


def take_pieces(leaves: Sequence[memoryview]) -> list[bytes]:
    """Copies of a few pieces from all over these leaves."""
    total = sum(leaf.nbytes for leaf in leaves)
    count = min(_PIECES, max(1, total // PIECE_BYTES))
    gap = (total - PIECE_BYTES) // (count - 1) if count > 1 else 0
    pieces = []
    for place in range(count):
        start = place * gap
        for leaf in leaves:
            if start < leaf.nbytes:
                pieces.append(bytes(leaf[start : start + PIECE_BYTES]))
                break
            start -= leaf.nbytes
    return pieces


_LOOK_BYTES = 8 * 1024
_GRADES = ((1.05, "hardly smaller"), (2.0, "up to twice as small"), (8.0, "up to 8 times as small"), (64.0, "up to 64 times as small"))
_BEST_GRADE = "very much smaller"


def first_look(context: Context, leaves: Sequence[memoryview]) -> str:
    """How much smaller two places of these leaves get, roughly. It takes some ten microseconds with a quick codec.

    Raises what the codec raises.
    """
    total = sum(leaf.nbytes for leaf in leaves)
    before = after = 0
    room = memoryview(bytearray(_LOOK_BYTES))
    for start in (total // 4, total * 3 // 4):
        for leaf in leaves:
            if start < leaf.nbytes:
                piece = leaf[start : start + _LOOK_BYTES]
                stored = context.compress_into(piece, room[: piece.nbytes - 1]) if piece.nbytes > 1 else None
                before += piece.nbytes
                after += piece.nbytes if stored is None else stored
                break
            start -= leaf.nbytes
    ratio = before / max(after, 1)
    return next((grade for limit, grade in _GRADES if ratio < limit), _BEST_GRADE)


def try_codecs(contexts: Mapping[str, Context], pieces: Sequence[bytes], patience: float = math.inf) -> dict[str, Measured]:
    """Put these pieces through each codec. Any thread; one that fails is left out.

    Args:
        patience: seconds per byte at which compressing takes too long in any case; such a codec sees one piece only.
    """
    found = {}
    for label, context in contexts.items():
        try:
            found[label] = _try(context, pieces, patience)
        except Exception:  # such as no memory for its state: then it is nothing to choose
            continue
    return found


def _try(context: Context, pieces: Sequence[bytes], patience: float) -> Measured:
    # The first time has to make the codec's state, so it counts only where that makes no difference.
    first = _there_and_back(context, pieces[0])
    slow = first.compress > 2 * patience * first.before
    trips = [first] if slow else [_there_and_back(context, piece) for piece in pieces]
    before, after = sum(trip.before for trip in trips), sum(trip.after for trip in trips)
    compress, decompress = sum(trip.compress for trip in trips), sum(trip.decompress for trip in trips)
    return Measured(before / max(after, 1), before / max(compress, 1e-9), before / max(decompress, 1e-9), whole=not slow)


class _Trip(NamedTuple):
    """Bytes, and seconds of one core."""

    before: int
    after: int
    compress: float
    decompress: float


def _there_and_back(context: Context, piece: bytes) -> _Trip:
    size = len(piece)
    packed, back = memoryview(bytearray(size)), memoryview(bytearray(size))
    stored: int | None = None
    compress = decompress = math.inf
    for _ in range(2):
        start = time.thread_time()
        stored = context.compress_into(piece, packed[: size - 1]) if size > 1 else None
        middle = time.thread_time()
        if stored is not None:
            context.decompress_into(packed[:stored], back)
        end = time.thread_time()
        compress, decompress = min(compress, middle - start), min(decompress, end - middle)
        if end - start > _SHORT_S:
            break
    return _Trip(size, size if stored is None else stored, compress, decompress)
