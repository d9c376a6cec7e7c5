"""What every codec keeps to (`aiorlinf.codec.base`)."""

from __future__ import annotations

import dataclasses
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from aiorlinf.codec.base import Codec, Context
from aiorlinf.errors import WireError

__all__ = ["CodecConformance"]

MIB = 1 << 20
GUARD = 64
MARK = 0xA5
SIZES = [1, 2, 12, 13, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 65535, 65536, 65537, 131071, 131072, 131073]
LARGE = 24 * MIB


def _dense(nbytes: int) -> torch.Tensor:
    """Small numbers as int64, with some variety: a codec makes these a few times smaller."""
    numbers = torch.randint(0, 200, (-(-nbytes // 8),), generator=torch.Generator().manual_seed(0))
    return numbers.view(torch.uint8)[:nbytes].clone()


def _random_bytes(nbytes: int) -> torch.Tensor:
    """Nothing makes these smaller."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def _zeros(nbytes: int) -> torch.Tensor:
    """What gets smallest."""
    return torch.zeros(nbytes, dtype=torch.uint8)


def _guarded(nbytes: int) -> torch.Tensor:
    """Memory with a mark on both sides."""
    return torch.full((nbytes + 2 * GUARD,), MARK, dtype=torch.uint8)


def _unharmed(memory: torch.Tensor) -> bool:
    """Whether the marks are what they were."""
    return bool((memory[:GUARD] == MARK).all()) and bool((memory[-GUARD:] == MARK).all())


def _inside(memory: torch.Tensor) -> torch.Tensor:
    """What lies between the marks."""
    return memory[GUARD:-GUARD]


class CodecConformance:
    """Tests of a codec. Say in `make` which one; it is made anew for each test.

    Attributes:
        releases_lock: its calls let go of the interpreter lock while they work. Without that a loop stands still meanwhile, so it is only
            for one that cannot do otherwise to switch this off.
        copies: it makes a copy of what it works on.
    """

    releases_lock: ClassVar[bool] = True
    copies: ClassVar[bool] = False

    def make(self) -> Codec[Any]:
        """A codec."""
        raise NotImplementedError(f"{type(self).__name__}.make() says which codec is tested")

    @pytest.fixture
    def codec(self) -> Codec[Any]:
        """The one under test."""
        return self.make()

    @pytest.fixture
    def context(self, codec: Codec[Any]) -> Context:
        """One of its contexts."""
        return codec.context()

    def pack(self, codec: Codec[Any], context: Context, data: torch.Tensor) -> torch.Tensor:
        """The data, compressed."""
        out = torch.empty(codec.compress_bound(data.numel()), dtype=torch.uint8)
        size = context.compress_into(data, out)
        assert size is not None, f"{data.numel()} bytes do not fit in compress_bound, {len(out)}"
        assert 0 <= size <= len(out)
        return out[:size].clone()

    # ---- what it says of itself

    def test_it_says_what_it_is(self, codec: Codec[Any]) -> None:
        kind = type(codec)
        assert isinstance(kind.name, str)
        assert kind.name
        assert isinstance(kind.package, str)
        assert 1 <= kind.number <= 255
        assert kind.max_input > 0
        assert codec.at_once >= 0
        assert kind.undone_at_once >= 0
        assert codec.max_inflight is None or codec.max_inflight >= 1
        described = codec.describe()
        assert described["library"]
        assert {type(text) for text in (*described, *described.values())} == {str}

    def test_its_parameters_are_a_record_with_defaults(self, codec: Codec[Any]) -> None:
        kind = type(codec)
        parameters = kind.Parameters()
        assert dataclasses.is_dataclass(parameters)
        assert parameters == kind.Parameters()
        assert pickle.loads(pickle.dumps(parameters)) == parameters
        for field in dataclasses.fields(parameters):
            with pytest.raises(AttributeError):
                setattr(parameters, field.name, getattr(parameters, field.name))
        for label, chosen in kind.choices():
            assert isinstance(label, str)
            assert isinstance(chosen, kind.Parameters)

    def test_the_bound_is_of_any_size_it_takes(self, codec: Codec[Any]) -> None:
        bounds = [codec.compress_bound(nbytes) for nbytes in (0, 1, 100, 65536, codec.max_input)]
        assert bounds == sorted(bounds)
        with pytest.raises(ValueError, match=r"-1"):
            codec.compress_bound(-1)

    # ---- lossless

    @pytest.mark.parametrize("make_data", [_dense, _random_bytes, _zeros])
    def test_a_round_trip_at_every_boundary(self, codec: Codec[Any], context: Context, make_data: Callable[[int], torch.Tensor]) -> None:
        for nbytes in SIZES:
            data = make_data(nbytes)
            packed = self.pack(codec, context, data)
            memory = _guarded(nbytes)
            context.decompress_into(packed, _inside(memory))
            assert torch.equal(_inside(memory), data), f"{nbytes} bytes came back as others"
            assert _unharmed(memory), f"of {nbytes} bytes some were written beside the target"

    def test_every_kind_of_memory(self, codec: Codec[Any], context: Context) -> None:
        data = _dense(5000)
        packed = self.pack(codec, context, data)
        for source in (bytes(data.numpy()), bytearray(data.numpy()), data.numpy().data, data):
            out = bytearray(codec.compress_bound(5000))
            size = context.compress_into(source, out)
            assert size is not None
            back = bytearray(5000)
            context.decompress_into(bytes(out[:size]), memoryview(back))
            assert back == bytes(data.numpy())
        context.decompress_into(packed.numpy().data, bytearray(5000))

    def test_one_context_undoes_what_another_has_done(self, codec: Codec[Any]) -> None:
        data = _dense(100_000)
        packed = self.pack(codec, codec.context(), data)
        out = torch.empty(100_000, dtype=torch.uint8)
        self.make().context().decompress_into(packed, out)
        assert torch.equal(out, data)

    def test_contexts_work_at_the_same_time(self, codec: Codec[Any]) -> None:
        wrong: list[str] = []

        def work(number: int, context: Context) -> None:
            for turn in range(20):
                data = _dense(20_000 + 977 * number + turn)
                out = torch.empty(len(data), dtype=torch.uint8)
                context.decompress_into(self.pack(codec, context, data), out)
                if not torch.equal(out, data):
                    wrong.append(f"context {number}, turn {turn}")

        count = min(4, codec.max_inflight or 4)
        threads = [threading.Thread(target=work, args=(number, codec.context())) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    # ---- what does not fit

    def test_what_does_not_fit_is_none_and_writes_nothing_outside(self, codec: Codec[Any], context: Context) -> None:
        data = _dense(50_000)
        size = len(self.pack(codec, context, data))
        for room in (0, 1, 100, size - 1, size, size + 1):
            memory = _guarded(room)
            written = context.compress_into(data, _inside(memory))
            assert written == (size if room >= size else None) or (room > size and written is not None)
            assert _unharmed(memory)

    def test_random_bytes_do_not_get_smaller(self, codec: Codec[Any], context: Context) -> None:
        for nbytes in (100, 4096, 100_000):
            assert context.compress_into(_random_bytes(nbytes), torch.empty(nbytes - 1, dtype=torch.uint8)) is None

    # ---- what a peer may have sent

    def test_another_size_than_announced_is_an_error(self, codec: Codec[Any], context: Context) -> None:
        packed = self.pack(codec, context, _dense(10_000))
        for nbytes in (0, 1, 9_999, 10_001, 20_000):
            memory = _guarded(nbytes)
            with pytest.raises(WireError):
                context.decompress_into(packed, _inside(memory))
            assert _unharmed(memory)

    def test_every_truncation_is_an_error(self, codec: Codec[Any], context: Context) -> None:
        packed = self.pack(codec, context, _dense(400))
        for size in range(len(packed)):
            with pytest.raises(WireError):
                context.decompress_into(packed[:size], bytearray(400))

    def test_garbage_is_an_error(self, codec: Codec[Any], context: Context) -> None:
        for size in (1, 7, 100, 5000):
            with pytest.raises(WireError):
                context.decompress_into(_random_bytes(size), bytearray(10_000))

    def test_each_flipped_bit_is_an_error_or_other_data_and_never_outside(self, codec: Codec[Any], context: Context) -> None:
        data = _dense(2_000)
        packed = self.pack(codec, context, data)
        memory = _guarded(2_000)
        errors = 0
        for bit in range(0, packed.numel() * 8, 3):
            damaged = packed.clone()
            damaged[bit // 8] ^= 1 << bit % 8
            memory.fill_(MARK)
            try:
                context.decompress_into(damaged, _inside(memory))
            except WireError:
                errors += 1
            assert _unharmed(memory)
        assert errors > 0
        out = torch.empty(2_000, dtype=torch.uint8)
        context.decompress_into(packed, out)
        assert torch.equal(out, data), "the context is as good as before"

    def test_a_context_can_be_used_again_after_anything(self, codec: Codec[Any], context: Context) -> None:
        data = _dense(300_000)
        wanted = self.pack(codec, codec.context(), data)
        out = torch.empty(codec.compress_bound(300_000), dtype=torch.uint8)
        back = torch.empty(300_000, dtype=torch.uint8)
        for _ in range(3):
            assert context.compress_into(data, out[:1000]) is None
            with pytest.raises(WireError):
                context.decompress_into(wanted[: len(wanted) // 2], back)
            assert context.compress_into(_random_bytes(5000), out[:4000]) is None
            assert torch.equal(self.pack(codec, context, data), wanted)
            context.decompress_into(wanted, back)
            assert torch.equal(back, data)

    # ---- memory

    def test_failures_keep_no_memory(self, codec: Codec[Any], context: Context) -> None:
        packed = self.pack(codec, context, _dense(200_000))
        damaged = packed.clone()
        damaged[len(damaged) // 2 :] = _random_bytes(len(damaged) - len(damaged) // 2)
        out, small, data = torch.empty(200_000, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8), _dense(200_000)

        def fail(times: int) -> None:
            for _ in range(times):
                with pytest.raises(WireError):
                    context.decompress_into(damaged, out)
                assert context.compress_into(data, small) is None

        fail(50)
        before = _resident()
        fail(300)
        assert _resident() - before < 8 * MIB  # 300 leaks of an output would be 60

    def test_memory_that_may_not_be_written_is_refused(self, context: Context) -> None:
        with pytest.raises(BufferError):
            context.compress_into(b"abc", b"abcdef")
        with pytest.raises(BufferError):
            context.decompress_into(b"abc", memoryview(bytearray(3)).toreadonly())

    def test_the_interpreter_lock_is_released(self, codec: Codec[Any], context: Context) -> None:
        """With an endless switch interval this thread runs within the other's call only if that lets go of the lock."""
        if not self.releases_lock:
            pytest.skip("it says that it does not")
        data = _dense(LARGE)
        packed = self.pack(codec, context, data)
        out = torch.empty(LARGE, dtype=torch.uint8)
        room = torch.empty(codec.compress_bound(LARGE), dtype=torch.uint8)
        calls: list[Callable[[], object]] = [lambda: context.compress_into(data, room), lambda: context.decompress_into(packed, out)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            for call in calls:
                assert any(_runs_meanwhile(call) for _ in range(20))
        finally:
            sys.setswitchinterval(interval)

    def test_no_copy_in_between(self, codec: Codec[Any], context: Context) -> None:
        """The peak of memory shows no second copy of what is compressed or decompressed."""
        if self.copies:
            pytest.skip("it says that it makes one")
        data = _zeros(64 * MIB)
        room = _zeros(codec.compress_bound(64 * MIB) // 8)
        out = _zeros(64 * MIB)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = context.compress_into(data, room)
        assert size is not None
        context.decompress_into(room[:size], out)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 40 * 1024  # KiB


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
