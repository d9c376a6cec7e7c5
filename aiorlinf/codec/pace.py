"""How quickly a codec works at present, and so how large a chunk of a large tensor should be. Pure."""

from __future__ import annotations

__all__ = ["Pace"]

_LARGEST = 4
"""Times the usual chunk."""
_AIM_S = 0.0008
"""A chunk costs a tenth of a millisecond besides what the codec does: to hand it to a thread and back, to write and to read it."""
_CHUNKS = 6
"""At least so many a tensor: compressing, sending and decompressing overlap chunk by chunk."""
_WEIGHT = 0.25
"""Of the last chunk."""


class Pace:
    """One codec's, for what is sent with it. Home thread only.

    Attributes:
        seconds_per_byte: lately; 0.0: nothing is known.
    """

    def __init__(self) -> None:
        self.seconds_per_byte: float = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """A chunk took so long."""
        now = seconds / nbytes
        before = self.seconds_per_byte
        self.seconds_per_byte = before + (now - before) * _WEIGHT if before else now

    def chunk(self, usual: int, nbytes: int) -> int:
        """Bytes of each chunk of a tensor: the usual number, or more where the codec is so quick that handing over would take most time."""
        chunk = usual
        per_byte = self.seconds_per_byte
        while per_byte and chunk < _LARGEST * usual and 2 * chunk * per_byte <= _AIM_S and 2 * chunk * _CHUNKS <= nbytes:
            chunk *= 2
        return chunk
