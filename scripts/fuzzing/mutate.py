"""Changes to good input: those that parsers stumble over."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["mutated"]

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_MOST_CHANGES = 6

Change = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def mutated(source: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One entry of the corpus with one to six changes, often only one: several at once hide behind the first that is noticed."""
    data = bytearray(source.choice(corpus))
    count = 1 if source.random() < 0.6 else source.randint(2, _MOST_CHANGES)
    for _ in range(count):
        source.choice(_CHANGES)(source, data, corpus)
    return bytes(data)


def _place(source: random.Random, data: bytearray) -> int:
    """More often near the front, where headers are."""
    if not data:
        return 0
    return source.randrange(min(len(data), 64)) if source.random() < 0.5 else source.randrange(len(data))


def _flip_bit(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[_place(source, data)] ^= 1 << source.randrange(8)


def _set_byte(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[_place(source, data)] = source.randrange(256)


def _set_number(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    width = source.choice((1, 2, 4, 8))
    at = _place(source, data)
    number = source.choice(_NUMBERS) + source.choice((-1, 0, 0, 1))
    data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, source.choice(("little", "big")))


def _cut(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = _place(source, data)
    del data[at : at + source.choice((1, 2, 4, 8, source.randint(1, 64)))]


def _cut_end(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    del data[_place(source, data) :]


def _repeat(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = _place(source, data)
    piece = data[at : at + source.randint(1, 64)]
    data[at:at] = piece * source.randint(1, 4)


def _insert(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = _place(source, data)
    data[at:at] = source.randbytes(source.randint(1, 16))


def _splice(source: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """The rest of another entry."""
    other = source.choice(corpus)
    at = _place(source, data)
    data[at:] = other[_place(source, bytearray(other[:4096])) :]


_CHANGES: tuple[Change, ...] = (_flip_bit, _flip_bit, _set_byte, _set_number, _set_number, _cut, _cut_end, _repeat, _insert, _splice)
