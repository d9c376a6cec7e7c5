"""LZ4 through its C functions, and by the package's calls where they are not to be had."""

from __future__ import annotations

import _ctypes
import ctypes
import types

import lz4.block
import pytest
import torch

from aiorlinf.codec.codecs import lz4 as module
from aiorlinf.codec.codecs.lz4 import CODEC, MAX_INPUT, Lz4, Lz4Parameters, find_functions
from aiorlinf.errors import WireError
from tests.codec.material import dense, random_bytes, view_of, words


def test_the_functions_of_the_installed_package_are_used() -> None:
    described = Lz4().describe()
    assert described["calls"] == "the LZ4 functions, memory to memory"
    assert described["library"].startswith("LZ4 1.")
    assert CODEC is Lz4


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (_ctypes, "_ctypes does not export the LZ4 functions"),
        (types.ModuleType("nowhere"), "nowhere has no file"),
    ],
)
def test_without_the_functions_the_package_does_it(library: types.ModuleType, said: str) -> None:
    found = find_functions(library)
    assert isinstance(found, str)
    assert said in found
    codec = Lz4(functions=found)
    described = codec.describe()
    assert described["calls"] == "the lz4 package, with a copy each way"
    assert described["reason"] == found
    _round_trip(codec, Lz4())


def test_a_file_that_is_no_library(tmp_path: object) -> None:
    text = types.ModuleType("text")
    text.__file__ = __file__
    assert "text does not export the LZ4 functions" in str(find_functions(text))


def test_functions_that_do_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_works", lambda functions: False)
    assert "do not do what they should" in str(find_functions(lz4.block._block))


def _round_trip(one: Lz4, other: Lz4) -> None:
    data = dense(100_000)
    packed = torch.empty(100_000, dtype=torch.uint8)
    for sender, receiver in ((one, other), (other, one), (one, one)):
        size = sender.compress_into(view_of(data), packed)
        assert size is not None
        out = torch.empty(100_000, dtype=torch.uint8)
        receiver.decompress_into(packed[:size], out)
        assert torch.equal(out, data)


def test_what_the_package_wrote_can_be_read_and_the_other_way_round() -> None:
    data = bytes(view_of(dense(10_000)))
    codec = Lz4()
    out = bytearray(len(data))
    codec.decompress_into(lz4.block.compress(data, store_size=False), out)
    assert out == data
    packed = bytearray(len(data))
    size = codec.compress_into(data, packed)
    assert lz4.block.decompress(packed[:size], uncompressed_size=len(data)) == data


def test_acceleration_trades_size_for_time() -> None:
    data = words(200_000)
    out = torch.empty(200_000, dtype=torch.uint8)
    slow = Lz4(Lz4Parameters(acceleration=1)).compress_into(data, out)
    fast = Lz4(Lz4Parameters(acceleration=100)).compress_into(data, out)
    assert slow is not None
    assert fast is None or fast > slow


class _Large:
    """Nobody has these bytes: for the check of the size, which comes first."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview((ctypes.c_uint8 * nbytes).from_address(0x1000)).cast("B")


@pytest.mark.parametrize("functions", [None, "no"])
def test_input_beyond_lz4s_limit_is_refused_before_it_is_touched(functions: str | None) -> None:
    codec = Lz4(functions=functions)
    with pytest.raises(ValueError, match="LZ4 takes at most 2113929216"):
        codec.compress_into(_Large(MAX_INPUT + 1).view, bytearray(10))
    with pytest.raises(WireError, match="at most 2147483647 are possible"):
        codec.decompress_into(b"x", _Large(2**31).view)
    with pytest.raises(ValueError, match="LZ4 takes at most"):
        codec.compress_bound(MAX_INPUT + 1)


@pytest.mark.parametrize("nbytes", [0, 1, 15, 65536, MAX_INPUT])
def test_the_bound_is_the_librarys(nbytes: int) -> None:
    functions = find_functions(lz4.block._block)
    assert not isinstance(functions, str)
    assert Lz4().compress_bound(nbytes) == functions.bound(nbytes)


def test_garbage_is_an_error_for_both() -> None:
    for codec in (Lz4(), Lz4(functions="no")):
        for size in (1, 7, 100, 5000):
            with pytest.raises(WireError, match="corrupt LZ4 data"):
                codec.decompress_into(random_bytes(size), bytearray(10_000))
