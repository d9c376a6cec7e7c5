"""The small tables inside a skeleton."""

from __future__ import annotations

import struct

import pytest

from aiorlinf.errors import WireError
from aiorlinf.wire.containers import number, pack_keys, pack_numbers, unpack_gaps, unpack_keys, unpack_numbers

__all__: list[str] = []


@pytest.mark.parametrize("keys", [(), ("",), ("a", "b"), ("ключ", "\ud800", "x" * 5000), tuple(map(str, range(1000)))])
def test_keys_round_trip(keys: tuple[str, ...]) -> None:
    for _ in range(2):  # the second time from the cache
        got, rest = unpack_keys(memoryview(pack_keys(keys) + b"rest"))
        assert (got, bytes(rest)) == (keys, b"rest")


def test_the_cache_of_keys_is_bounded() -> None:
    for index in range(2000):
        assert unpack_keys(memoryview(pack_keys([f"key {index}"])))[0] == (f"key {index}",)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "malformed"),
        (b"\xff\xff\xff\xff", "announced"),
        (struct.pack("<I", 1), "announced"),
        (struct.pack("<II", 1, 5) + b"abc", "cut short"),
        (struct.pack("<II", 2, 2) + b"abcde", "malformed"),
        (struct.pack("<II", 1, 1) + b"\xff", "malformed"),
        (struct.pack("<III", 2, 0, 0), "twice"),
    ],
)
def test_malformed_keys(data: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        unpack_keys(memoryview(data))


def test_numbers_tell_which_objects_are_one() -> None:
    a, b = object(), object()
    assert number([a, b, a, a]) == ([a, b], [0, 1, 0, 0])
    assert unpack_numbers(memoryview(pack_numbers([0, 1, 0, 0])), 2) == (0, 1, 0, 0)


def test_malformed_numbers() -> None:
    with pytest.raises(WireError, match="not sent"):
        unpack_numbers(memoryview(pack_numbers([0, 2])), 2)
    with pytest.raises(WireError, match="malformed"):
        unpack_numbers(memoryview(b"12345"), 2)


def test_gaps_round_trip() -> None:
    gaps, stream = unpack_gaps(memoryview(pack_numbers([2, 0, 3]) + b"abc"))
    assert (gaps, bytes(stream)) == ((0, 3), b"abc")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"abc", "cut short"),
        (pack_numbers([2, 0]), "announced"),
        (pack_numbers([2, 3, 0]) + b"abc", "order"),
        (pack_numbers([1, 4]) + b"abc", "order"),
    ],
)
def test_malformed_gaps(data: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        unpack_gaps(memoryview(data))
