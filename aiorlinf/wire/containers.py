"""The small tables inside a skeleton: keys of a dict of tensors, the leaf of each element, gaps of a pickle stream."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TypeVar

from aiorlinf.errors import WireError

__all__ = ["number", "pack_keys", "pack_numbers", "unpack_gaps", "unpack_keys", "unpack_numbers"]

T = TypeVar("T")

_U32 = struct.Struct("<I")
_CACHE_MAX = 512
_CACHED_BYTES_MAX = 2048

# The keys of a dict of tensors are the same from message to message in most jobs.
_packed: dict[tuple[str, ...], bytes] = {}


def pack_keys(keys: Iterable[str]) -> bytes:
    """A count, then each key with its length."""
    wanted = tuple(keys)
    data = _packed.get(wanted)
    if data is None:
        parts = [_U32.pack(len(wanted))]
        for key in wanted:
            text = key.encode("utf-8", "surrogatepass")
            parts += (_U32.pack(len(text)), text)
        data = b"".join(parts)
        if len(data) <= _CACHED_BYTES_MAX:
            if len(_packed) >= _CACHE_MAX:
                _packed.clear()
            _packed[wanted] = data
    return data


def unpack_keys(view: memoryview) -> tuple[tuple[str, ...], memoryview]:
    """The keys at the start of `view`, and what follows them.

    Raises:
        WireError: malformed, or a key twice.
    """
    try:
        (count,) = _U32.unpack_from(view)
        if count * 4 > len(view) - 4:
            raise WireError(f"{count} keys announced in {len(view)} bytes")
        at = 4
        keys = []
        for _ in range(count):
            (size,) = _U32.unpack_from(view, at)
            at += 4
            if at + size > len(view):
                raise WireError("a key cut short")
            keys.append(str(view[at : at + size], "utf-8", "surrogatepass"))
            at += size
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed keys: {error}") from None
    if len(set(keys)) != count:
        raise WireError("a key occurs twice")
    return tuple(keys), view[at:]


def number(values: Sequence[T]) -> tuple[list[T], list[int]]:
    """Each object once, in order; and for each element the number of its object."""
    numbers: dict[int, int] = {}
    once: list[T] = []
    for value in values:
        if numbers.setdefault(id(value), len(once)) == len(once):
            once.append(value)
    return once, [numbers[id(value)] for value in values]


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Without a count: the size tells it."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_numbers(view: memoryview, below: int) -> tuple[int, ...]:
    """Raises WireError if malformed or if a number is not `below` the bound."""
    if len(view) % 4:
        raise WireError("malformed leaf numbers")
    numbers = struct.unpack(f"<{len(view) // 4}I", view)
    if numbers and max(numbers) >= below:
        raise WireError("an element names a leaf that was not sent")
    return numbers


def unpack_gaps(view: memoryview) -> tuple[tuple[int, ...], memoryview]:
    """The offsets (a count, then ascending numbers) at the start of `view`, and the stream behind them.

    Raises:
        WireError: malformed, out of order, or outside the stream.
    """
    if len(view) < 4:
        raise WireError("table of gaps cut short")
    (count,) = _U32.unpack_from(view)
    end = 4 + 4 * count
    if end > len(view):
        raise WireError(f"{count} gaps announced in {len(view)} bytes")
    gaps = struct.unpack_from(f"<{count}I", view, 4)
    stream = view[end:]
    if list(gaps) != sorted(gaps) or (gaps and gaps[-1] > len(stream)):
        raise WireError("gaps out of order")
    return gaps, stream
