"""Zstandard from memory to memory."""

from __future__ import annotations

import pytest
import torch
import zstandard

from aiorlinf.codec.codecs.zstd import CODEC, Zstd, ZstdParameters
from aiorlinf.errors import WireError
from tests.codec.material import dense, random_bytes, view_of, words


def test_it_says_what_it_is() -> None:
    assert CODEC is Zstd
    described = Zstd().describe()
    assert described["library"].startswith("Zstandard 1.")
    assert "memory to memory" in described["calls"]


def test_levels_trade_time_for_size() -> None:
    data = words(200_000)
    out = torch.empty(200_000, dtype=torch.uint8)
    sizes = [Zstd(ZstdParameters(level=level)).context().compress_into(data, out) for level in (1, 19)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert sizes[1] < sizes[0]


def test_what_the_package_wrote_can_be_read_and_the_other_way_round() -> None:
    data = bytes(view_of(dense(10_000)))
    context = Zstd().context()
    out = bytearray(len(data))
    context.decompress_into(zstandard.compress(data), out)
    assert out == data
    packed = bytearray(len(data))
    size = context.compress_into(data, packed)
    assert zstandard.decompress(packed[:size]) == data


def test_a_context_can_be_used_again_after_anything() -> None:
    context = Zstd().context()
    data = dense(300_000)
    out, back = torch.empty(300_000, dtype=torch.uint8), torch.empty(300_000, dtype=torch.uint8)
    fresh = Zstd().context().compress_into(data, out)
    wanted = out[:fresh].clone()
    for _ in range(3):
        assert context.compress_into(data, out[:1000]) is None  # left in the middle of a frame
        with pytest.raises(WireError):
            context.decompress_into(wanted[: len(wanted) // 2], back)
        assert context.compress_into(random_bytes(5000), out[:4000]) is None
        assert context.compress_into(data, out) == fresh
        assert torch.equal(out[:fresh], wanted)
        context.decompress_into(wanted, back)
        assert torch.equal(back, data)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        zstandard.compress(b"x" * 999),  # another size
        zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 1000),  # no size
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",  # a frame to be skipped
        zstandard.compress(b"x" * 1000)[:-1],
    ],
    ids=["empty", "magic", "size", "no-size", "skippable", "cut"],
)
def test_frames_that_are_not_what_was_announced(frame: bytes) -> None:
    with pytest.raises(WireError, match="Zstandard"):
        Zstd().context().decompress_into(frame, bytearray(1000))


def test_a_frame_that_asks_for_a_huge_window_is_refused_before_anything_is_allocated() -> None:
    # Content size 1000, window 2 GiB: descriptor with a two-byte size, then the window.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0x40, 0xA8]) + (1000 - 256).to_bytes(2, "little") + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(frame).window_size == 2**31
    with pytest.raises(WireError, match="Zstandard frame"):
        Zstd().context().decompress_into(frame, bytearray(1000))


@pytest.mark.parametrize("nbytes", [0, 1, 100, 128 * 1024, 1_000_001])
def test_the_bound_is_enough_for_anything(nbytes: int) -> None:
    codec = Zstd()
    out = torch.empty(codec.compress_bound(nbytes), dtype=torch.uint8)
    assert codec.context().compress_into(random_bytes(nbytes), out) is not None
    with pytest.raises(ValueError, match="-1 bytes"):
        codec.compress_bound(-1)


def test_it_has_as_many_contexts_as_configured() -> None:
    assert Zstd(ZstdParameters(max_inflight=7)).max_inflight == 7
    assert Zstd().max_inflight == 4
