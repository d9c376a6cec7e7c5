"""What every codec keeps to. A new codec is in these tests by being in `codec/codecs`."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.registry import codecs_by_name
from aiorlinf.errors import WireError
from tests.codec.material import CODECS, MIB, dense, make_codec, random_bytes, resident

GUARD = 64
SIZES = [1, 2, 12, 13, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 65535, 65536, 65537, 131071, 131072, 131073]


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec[Any]:
    return make_codec(request.param)


@pytest.fixture
def context(codec: Codec[Any]) -> Context:
    return codec.context()


def test_these_are_all() -> None:
    assert {make_codec(name).name for name in CODECS} == set(codecs_by_name())


def pack(codec: Codec[Any], context: Context, data: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.compress_bound(data.numel()), dtype=torch.uint8)
    size = context.compress_into(data, out)
    assert size is not None
    return out[:size].clone()


@pytest.mark.parametrize("make", [dense, random_bytes, lambda n: torch.zeros(n, dtype=torch.uint8)], ids=["dense", "random", "zeros"])
def test_round_trip_at_every_boundary(codec: Codec[Any], context: Context, make: Callable[[int], torch.Tensor]) -> None:
    for nbytes in SIZES:
        data = make(nbytes)
        packed = pack(codec, context, data)
        memory = torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        context.decompress_into(packed, memory[GUARD : GUARD + nbytes])
        assert torch.equal(memory[GUARD : GUARD + nbytes], data)
        assert bool((memory[:GUARD] == 0xA5).all())
        assert bool((memory[GUARD + nbytes :] == 0xA5).all())


def test_what_does_not_fit_is_none_and_writes_nothing_outside(codec: Codec[Any], context: Context) -> None:
    data = dense(50_000)
    size = len(pack(codec, context, data))
    for room in (0, 1, 100, size - 1, size, size + 1):
        memory = torch.full((room + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        written = context.compress_into(data, memory[GUARD : GUARD + room])
        assert written == (size if room >= size else None) or (room > size and written is not None)
        assert bool((memory[:GUARD] == 0xA5).all())
        assert bool((memory[GUARD + room :] == 0xA5).all())


def test_random_bytes_do_not_get_smaller(codec: Codec[Any], context: Context) -> None:
    for nbytes in (100, 4096, 100_000):
        assert context.compress_into(random_bytes(nbytes), torch.empty(nbytes - 1, dtype=torch.uint8)) is None


def test_another_size_than_announced(codec: Codec[Any], context: Context) -> None:
    packed = pack(codec, context, dense(10_000))
    for nbytes in (0, 1, 9_999, 10_001, 20_000):
        memory = torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        with pytest.raises(WireError):
            context.decompress_into(packed, memory[GUARD : GUARD + nbytes])
        assert bool((memory[:GUARD] == 0xA5).all())
        assert bool((memory[GUARD + nbytes :] == 0xA5).all())


def test_every_truncation(codec: Codec[Any], context: Context) -> None:
    packed = pack(codec, context, dense(400))
    for size in range(len(packed)):
        with pytest.raises(WireError):
            context.decompress_into(packed[:size], bytearray(400))


def test_each_flipped_bit_is_an_error_or_other_data_and_never_outside(codec: Codec[Any], context: Context) -> None:
    data = dense(2_000)
    packed = pack(codec, context, data)
    memory = torch.empty(2_000 + 2 * GUARD, dtype=torch.uint8)
    outcomes = {"error": 0, "data": 0}
    for bit in range(0, packed.numel() * 8, 3):
        damaged = packed.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        memory.fill_(0xA5)
        try:
            context.decompress_into(damaged, memory[GUARD : GUARD + 2_000])
            outcomes["data"] += 1
        except WireError:
            outcomes["error"] += 1
        assert bool((memory[:GUARD] == 0xA5).all())
        assert bool((memory[GUARD + 2_000 :] == 0xA5).all())
    assert outcomes["error"] > 0
    out = torch.empty(2_000, dtype=torch.uint8)
    context.decompress_into(packed, out)  # the context is as good as before
    assert torch.equal(out, data)


def test_failures_keep_no_memory(codec: Codec[Any], context: Context) -> None:
    packed = pack(codec, context, dense(200_000))
    damaged = packed.clone()
    damaged[len(damaged) // 2 :] = random_bytes(len(damaged) - len(damaged) // 2)
    out = torch.empty(200_000, dtype=torch.uint8)
    small = torch.empty(1000, dtype=torch.uint8)
    data = dense(200_000)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(WireError):
                context.decompress_into(damaged, out)
            assert context.compress_into(data, small) is None

    fail(50)
    before = resident()
    fail(300)
    assert resident() - before < 8 * MIB  # 300 leaks of an output would be 60


def test_memory_that_may_not_be_written(context: Context) -> None:
    with pytest.raises(BufferError, match="read-only"):
        context.compress_into(b"abc", b"abcdef")
    with pytest.raises(BufferError, match="read-only"):
        context.decompress_into(b"abc", memoryview(bytearray(3)).toreadonly())


def test_the_interpreter_lock_is_released(codec: Codec[Any], context: Context) -> None:
    """With an endless switch interval this thread runs within the other's call only if that lets go of the lock."""
    data = dense(24 * MIB)
    packed = pack(codec, context, data)
    out = torch.empty(data.numel(), dtype=torch.uint8)
    room = torch.empty(codec.compress_bound(data.numel()), dtype=torch.uint8)
    calls: list[Callable[[], object]] = [lambda: context.compress_into(data, room), lambda: context.decompress_into(packed, out)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for call in calls:
            assert any(_runs_meanwhile(call) for _ in range(20))
    finally:
        sys.setswitchinterval(interval)


def _runs_meanwhile(call: Callable[[], object]) -> bool:
    state = {"in": False, "out": False}
    begin = threading.Event()

    def work() -> None:
        begin.wait()
        state["in"] = True
        call()
        state["out"] = True

    thread = threading.Thread(target=work)
    thread.start()
    begin.set()
    while not state["in"]:
        time.sleep(0.0001)
    seen = not state["out"]
    thread.join()
    return seen


def test_no_bytes_in_between(codec: Codec[Any], context: Context) -> None:
    """The peak of memory shows no second copy of what is compressed or decompressed."""
    if "package" in codec.describe()["calls"] and codec.name == "lz4":
        pytest.skip("the package's calls make one")
    data = torch.zeros(64 * MIB, dtype=torch.uint8)
    room = torch.zeros(8 * MIB, dtype=torch.uint8)
    out = torch.zeros(64 * MIB, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = context.compress_into(data, room)
    assert size is not None
    context.decompress_into(room[:size], out)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 * 1024  # KiB
