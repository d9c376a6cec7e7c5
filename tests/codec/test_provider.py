"""What is tried and what is not, what is made and when, and that every dtype and shape arrives as it was."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf.codec.compressing import compress_chunks
from aiorlinf.codec.header import LEAF_HEADER, LeafHeader
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.provider import CompressionProvider
from aiorlinf.codec.reasons import RawReason
from aiorlinf.config import TensorCompressionConfig, load_config
from aiorlinf.errors import ConfigError, WireError
from aiorlinf.wire.dtypes import DTYPES
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.leaves import Device, Leaf, LeafSpec
from aiorlinf.wire.manifest import decode_manifest, encode_manifest
from aiorlinf.wire.tree import Kind, flatten, rebuild
from tests.codec.material import dense, random_bytes

COMPRESS = None


def config_of(**keys: Any) -> TensorCompressionConfig:
    return load_config({"cluster": {"collective": {"tensor_compression": keys}}}).cluster.collective.tensor_compression


def provider_of(codec: str = "lz4", *, max_bytes: int = 1 << 26, **keys: Any) -> CompressionProvider:
    keys.setdefault("excluded_dtypes", [])
    return CompressionProvider(config_of(codec=codec, **keys), TensorBufferPool(max_bytes))


@dataclass
class Step:
    frame: torch.Tensor
    mask: np.ndarray[Any, Any]
    note: bytes


def carried(provider: CompressionProvider, obj: Any, *, whole: bool = False) -> tuple[Any, int]:
    """The object at the other side, and the bytes of the payload on the wire."""
    flat = flatten(obj)
    sent = 0
    buffers = []
    for leaf, reason in zip(flat.leaves, provider.plan(flat), strict=True):
        out = torch.empty(leaf.nbytes, dtype=torch.uint8)
        buffers.append(out)
        wire = b""
        if reason is COMPRESS:
            for piece in compress_chunks(provider.compressor(leaf, whole=whole)):
                wire += piece.head + bytes(piece.body)
                piece.release()
        if wire:
            decompressor = provider.decompressor(out)
            used, records = decompressor.feed(memoryview(wire))
            assert used == len(wire)
            for record in records:
                pool = provider.contexts(record.codec) if record.codec else None
                context = None if pool is None else pool.try_acquire()
                record.run(context)
                decompressor.finish(record)
                if pool is not None and context is not None:
                    pool.release(context)
            assert decompressor.done
        else:
            wire = leaf.tobytes()
            if wire:
                out.copy_(torch.frombuffer(bytearray(wire), dtype=torch.uint8))
        sent += len(wire)
    return rebuild(decode_manifest(encode_manifest(flat)), buffers), sent


SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0), (7,), (64, 65), (2, 3, 4, 5), (40_001,), (1, 20_000, 1)]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_and_shape(name: str, codec: str) -> None:
    dtype = DTYPES[name]
    provider = provider_of(codec, min_bytes=0)
    for shape in SHAPES:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        data = dense(max(nbytes, 1))[:nbytes]
        try:
            tensor = data.view(dtype).reshape(shape)
        except RuntimeError:
            pytest.skip(f"this torch makes no {name} from bytes")
        result, sent = carried(provider, tensor)
        assert result.dtype == dtype
        assert result.shape == tensor.shape
        assert torch.equal(result.reshape(-1).view(torch.uint8), data) or not nbytes
        assert sent <= nbytes
        if nbytes > 1000:
            assert sent < nbytes * 0.7


def test_payload_bits_of_floats_arrive_as_they_were() -> None:
    odd = torch.tensor([0x7FC01234, -0x3FEDCC, -0x80000000, 1], dtype=torch.int32).repeat(2000).view(torch.float32)
    for codec in ("lz4", "zstd"):
        result, sent = carried(provider_of(codec), odd)
        assert torch.equal(result.view(torch.int32), odd.view(torch.int32))
        assert sent < odd.nbytes / 10


@pytest.mark.parametrize("whole", [False, True])
def test_elements_of_containers_stay_separate_payloads(whole: bool) -> None:
    provider = provider_of()
    frames, noise, short = dense(100_000), random_bytes(100_000), dense(100)
    for obj in ([frames, noise, short], (frames, noise, short), {"a": frames, "b": noise, "c": short}):
        result, sent = carried(provider, obj, whole=whole)
        assert type(result) is type(obj)
        values: Any = result.values() if isinstance(result, dict) else result
        assert all(torch.equal(one, other) for one, other in zip(values, (frames, noise, short), strict=True))
        assert sent < 160_000
    assert provider.stats.tensors == 3
    assert provider.stats.raw == {RawReason.NOT_SMALLER: 3, RawReason.SMALL: 3}


def test_plan_by_kind_and_dtype_and_size() -> None:
    provider = provider_of(excluded_dtypes=["float32", "bfloat16"], min_bytes=1000)
    tensors = [
        torch.zeros(1000, dtype=torch.uint8),
        torch.zeros(250),
        torch.zeros(999, dtype=torch.int8),
        torch.zeros(500, dtype=torch.bfloat16),
    ]
    stats = provider.link_stats()
    assert provider.plan(flatten(tensors), stats) == [COMPRESS, RawReason.DTYPE, RawReason.SMALL, RawReason.DTYPE]
    assert stats.raw == {RawReason.DTYPE: 2, RawReason.SMALL: 1}
    assert stats.raw_bytes == provider.stats.raw_bytes == 1000 + 999 + 1000
    assert provider.plan(flatten(tuple(tensors[:1]))) == [COMPRESS]
    assert provider.plan(flatten({"a": tensors[0]})) == [COMPRESS]
    assert provider.plan(flatten(tensors[0])) == [COMPRESS]
    assert provider.plan(flatten(torch.empty(0))) == [RawReason.DTYPE]


def test_pickled_objects_are_left_alone_and_buffers_of_a_dataclass_too() -> None:
    provider = provider_of()
    big = dense(100_000)
    assert set(provider.plan(flatten({"nested": {"a": big}}))) == {RawReason.KIND}
    assert set(provider.plan(flatten(["text", big]))) == {RawReason.KIND}
    step = flatten(Step(big, np.zeros(100_000, dtype=np.int8), b"x" * 100_000))
    assert step.kind is Kind.DATACLASS
    assert sorted(str(reason) for reason in provider.plan(step)) == ["None", "RawReason.BUFFER", "RawReason.BUFFER"]
    result, _ = carried(provider, Step(big, np.zeros(1, dtype=np.int8), b"note"))
    assert isinstance(result, Step)
    assert torch.equal(result.frame, big)


def test_without_pickle_nested_containers_are_no_pickled_objects() -> None:
    flat = flatten({"nested": {"a": dense(100_000)}}, allow_pickle=False)
    assert flat.kind is Kind.PLAIN
    assert provider_of().plan(flat) == [COMPRESS]


def test_a_reason_against_all_of_them_is_the_last_to_count() -> None:
    provider = provider_of(excluded_dtypes=["float32"])
    flat = flatten([dense(100_000), dense(100), torch.zeros(100_000)])
    assert provider.plan(flat, against=RawReason.PEER) == [RawReason.PEER, RawReason.SMALL, RawReason.DTYPE]
    assert provider.stats.raw == {RawReason.PEER: 1, RawReason.SMALL: 1, RawReason.DTYPE: 1}


def test_what_would_be_tried_is_what_is_planned_to_be() -> None:
    provider = provider_of(excluded_dtypes=["float32"])
    big, small, excluded = dense(100_000), dense(100), torch.zeros(100_000)
    for obj in (
        big,
        small,
        excluded,
        [small, excluded],
        [small, big],
        {"a": big},
        {"a": {"nested": big}},
        ["text", big],
        Step(big, np.zeros(1), b""),
    ):
        flat = flatten(obj)
        assert provider.would_try(flat) == (COMPRESS in provider.plan(flat))


def test_accelerator_tensors_are_left_alone() -> None:
    provider = provider_of()
    spec = LeafSpec(100_000, "uint8", (100_000,), 0, Device.CUDA)
    staged = Leaf(spec, None, dense(100_000), None)  # on its way through host memory
    assert provider.plan(Flat(Kind.TENSOR, [], [staged])) == [RawReason.DEVICE]
    leaf = Leaf(spec, None, None, None)
    with pytest.raises(ValueError, match="not in CPU memory"):
        provider.compressor(leaf)


def test_more_than_lz4_takes_is_planned_raw_and_zstd_takes_it() -> None:
    leaf = Leaf(LeafSpec(2_400_000_000, "uint8", (2_400_000_000,)), dense(10), dense(10), None)
    flat = Flat(Kind.TENSOR, [], [leaf])
    lz4 = provider_of()
    assert lz4.plan(flat) == [RawReason.TOO_LARGE]
    assert lz4.stats.as_dict()["raw"] == {"too_large": 1}
    assert provider_of("zstd").plan(flat) == [COMPRESS]


def test_large_leaves_are_cut_into_chunks_of_the_size_asked_for() -> None:
    for asked, used in ((1, 64 * 1024), (100_000, 100_000), (1 << 40, 64 * 1024 * 1024)):
        provider = CompressionProvider(config_of(codec="lz4"), TensorBufferPool(1 << 27), chunk_bytes=asked)
        assert provider.chunk_bytes == used
    provider = CompressionProvider(config_of(codec="lz4"), TensorBufferPool(1 << 27), chunk_bytes=100_000)
    (leaf,) = flatten(dense(250_000)).leaves
    first, *rest = compress_chunks(provider.compressor(leaf))
    assert LeafHeader.decode(first.head[:LEAF_HEADER], 250_000).chunk == 100_000
    assert len(rest) == 2


def test_nothing_is_made_before_it_is_needed() -> None:
    provider = provider_of("zstd", max_inflight=3)
    assert provider._uses == []
    provider.plan(flatten([1, 2]))
    assert provider._uses == []
    _, sent = carried(provider, dense(50_000))
    assert sent < 50_000
    assert provider.codec is provider.codec
    pool = provider.contexts(2)
    assert pool is provider.contexts(2)
    assert (pool.made, pool.limit) == (1, 3)
    described = provider.describe()
    assert described["codec"] == "zstd"
    assert described["contexts"] == {"made": 1, "limit": 3, "waits": 0}


def test_off() -> None:
    provider = CompressionProvider(config_of(enabled=False), TensorBufferPool(0))
    assert not provider.enabled
    assert provider.describe() == {"enabled": False}
    with pytest.raises(ValueError, match="compression is off"):
        _ = provider.codec


def test_any_known_codec_may_arrive() -> None:
    sender, receiver = provider_of("zstd"), provider_of("lz4")
    data = dense(50_000)
    (leaf,) = flatten(data).leaves
    (piece,) = compress_chunks(sender.compressor(leaf))
    out = torch.empty(50_000, dtype=torch.uint8)
    decompressor = receiver.decompressor(out)
    _, (record,) = decompressor.feed(memoryview(piece.head + bytes(piece.body)))
    record.run(receiver.contexts(record.codec).try_acquire())
    decompressor.finish(record)
    assert torch.equal(out, data)
    with pytest.raises(WireError, match="codec number 200, which is not known here"):
        receiver.contexts(200)


def test_a_codec_that_arrives_and_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    provider = provider_of("lz4")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(WireError, match="compressed with zstd, whose package zstandard cannot be imported here"):
        provider.contexts(2)
    with pytest.raises(ConfigError):
        _ = provider_of("zstd").codec


def test_close_keeps_no_contexts() -> None:
    provider = provider_of("zstd")
    carried(provider, dense(50_000))
    provider.close()
    assert provider.contexts(2).made == 0
    _, sent = carried(provider, dense(50_000))  # goes as it is
    assert sent == 50_000
    assert provider.stats.raw[RawReason.NO_CONTEXT] == 1


def test_more_than_two_gibibytes_with_zstd_in_chunks_of_an_odd_size() -> None:
    """Every offset and length beyond 32 bits. What was received is looked at and given back chunk by chunk."""
    nbytes, chunk = 2_400_000_001, 33_333_333
    source, target = (mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
    for memory in (source, target):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    marks = {0: 1, 2**31 - 1: 2, 2**31: 3, 2**31 + chunk: 4, nbytes - 1: 5}
    for at, value in marks.items():
        source[at] = value
    provider = CompressionProvider(config_of(codec="zstd", excluded_dtypes=[]), TensorBufferPool(1 << 26), chunk_bytes=chunk)
    assert _marks_that_arrive(provider, source, target) == marks
    assert provider.stats.bytes_before == provider.stats.received_after == nbytes
    assert provider.stats.ratio > 1000
    source.close()
    target.close()


def _marks_that_arrive(provider: CompressionProvider, source: mmap.mmap, target: mmap.mmap) -> dict[int, int]:
    nbytes, chunk, page = len(source), provider.chunk_bytes, mmap.PAGESIZE
    leaf = Leaf(LeafSpec(nbytes, "uint8", (nbytes,)), None, None, memoryview(source))
    out, contexts = memoryview(target), provider.contexts(2)
    decompressor = provider.decompressor(out)
    seen: dict[int, int] = {}
    for piece in compress_chunks(provider.compressor(leaf)):
        for part in (memoryview(piece.head), piece.body):
            used, records = decompressor.feed(part)
            assert used == part.nbytes
            for record in records:
                context = contexts.try_acquire()
                assert context is not None
                record.run(context)
                contexts.release(context)
                decompressor.finish(record)
                start = record.index * chunk
                content = np.frombuffer(out[start : start + chunk], dtype=np.uint8)
                if content.any():
                    seen |= {start + int(at): int(content[at]) for at in np.flatnonzero(content)}
                first, last = -(-start // page), (start + chunk) // page
                if not decompressor.received:
                    target.madvise(mmap.MADV_DONTNEED, first * page, (last - first) * page)
        piece.release()
    assert decompressor.done
    return seen
