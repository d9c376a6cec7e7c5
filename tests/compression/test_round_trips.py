"""What is sent compressed is what arrives, to the bit: every dtype, shape, kind of object, and size around every boundary."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch

from aiorlinf.codec.provider import CHUNK_BYTES
from aiorlinf.wire.dtypes import DTYPES
from tests.codec.material import MIB, dense, random_bytes
from tests.compression.conftest import compressing, pair_of, same
from tests.compression.conftest import config_of as config

CODECS = ["lz4", "zstd"]
BACKENDS: list[Literal["stream", "gloo"]] = ["stream", "gloo"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0), (7,), (64, 65), (2, 3, 4, 5), (40_001,), (1, 20_000, 1)]


def of_dtype(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor with bits that compress; None if this torch makes none."""
    dtype = DTYPES[name]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        return dense(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape)
    except RuntimeError:
        return None


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
async def test_every_dtype_and_shape(codec: str, backend: Literal["stream", "gloo"]) -> None:
    tensors = [tensor for name in sorted(DTYPES) for shape in SHAPES if (tensor := of_dtype(name, shape)) is not None]
    assert len(tensors) > 100
    async with compressing(codec, backend=backend, min_bytes=1) as pair:
        sends = [pair.ab.send(tensor, timeout=30) for tensor in tensors]
        for tensor in tensors:
            assert same(await pair.ba.recv(timeout=30), tensor), f"{tensor.dtype} {tuple(tensor.shape)}"
        await asyncio.gather(*sends)
        large = sum(tensor.nbytes >= 1000 for tensor in tensors)
        assert pair.sent()["tensors"] >= large
        assert pair.sent()["tensors"] == pair.received()["received"]
        assert pair.sent()["bytes_after"] == pair.received()["received_before"]
        assert pair.sent()["bytes_before"] == pair.received()["received_after"]
        assert pair.sent()["ratio"] > 2


INLINE = 64 * 1024
CHUNK = 128 * 1024
BOUNDARIES = sorted(
    {size + step for size in (1, 37, 4096, 16 * 1024, 32 * 1024, INLINE, CHUNK, 8 * CHUNK, CHUNK_BYTES, 4 * MIB) for step in (-1, 0, 1)}
)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
async def test_sizes_around_every_boundary(codec: str, backend: Literal["stream", "gloo"]) -> None:
    """Of a frame, of min_bytes, of a read, of a chunk on the stream, of a chunk of a codec, and of what is compressed ahead."""
    async with compressing(codec, backend=backend, collective={"chunk_bytes": CHUNK}) as pair:
        for size in BOUNDARIES:
            data = dense(max(size, 1), seed=size)[:size]
            before = pair.sent()["tensors"] if size > 0 else 0
            assert same(await pair.trip(data), data), size
            assert pair.sent()["tensors"] - before == (size >= 16 * 1024), size


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_what_does_not_get_smaller_arrives_too(codec: str) -> None:
    half = torch.cat([random_bytes(3 * MIB), dense(3 * MIB)])
    other_half = torch.cat([dense(3 * MIB), random_bytes(3 * MIB)])
    async with compressing(codec) as pair:
        for data in (random_bytes(20_000), random_bytes(3 * MIB), half, other_half, [half, random_bytes(MIB), other_half, dense(20_000)]):
            assert same(await pair.trip(data), data)
        stats = pair.sent()
        assert stats["raw"]["random"] == 2
        assert stats["raw"]["not_smaller"] == 1
        assert stats["raw_chunks"]["not_smaller"] > 0


class Batch(NamedTuple):
    frames: torch.Tensor
    mask: torch.Tensor


@dataclass
class Step:
    frames: torch.Tensor
    note: str
    reward: np.ndarray[Any, Any]


OBJECTS: list[Any] = [
    [dense(100_000), torch.zeros(300, 300), dense(10), random_bytes(50_000)],
    (torch.ones(100_000, dtype=torch.bool), torch.arange(50_000)),
    {"a": dense(30_000), "b": torch.zeros(0), "c": torch.full((200, 200), 3, dtype=torch.bfloat16)},
    torch.nn.Parameter(torch.zeros(20_000)),
    torch.zeros(20_000, requires_grad=True),
    [],
    {},
]


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_every_kind_of_object(codec: str) -> None:
    async with compressing(codec) as pair:
        for obj in OBJECTS:
            assert same(await pair.trip(obj), obj)
        assert pair.sent()["tensors"] == 8
        step = Step(dense(100_000), "note", np.arange(10_000))
        got = await pair.trip(step)
        assert isinstance(got, Step)
        assert same(got.frames, step.frames)
        assert (got.note, got.reward.tolist()) == (step.note, step.reward.tolist())
        assert pair.sent()["tensors"] == 9
        nested, named, mixed = (
            {"nested": {"deep": dense(100_000)}},
            Batch(dense(100_000), torch.ones(50_000, dtype=torch.bool)),
            ["text", dense(100_000)],
        )
        for pickled in (nested, named, mixed):
            assert same(await pair.trip(pickled), pickled)
        assert pair.sent()["tensors"] == 9
        assert pair.sent()["raw"]["kind"] == 4
        del got


@pytest.mark.asyncio
async def test_one_tensor_twice_is_one_payload() -> None:
    data = dense(100_000)
    async with compressing("lz4") as pair:
        one, other = await pair.trip([data, data])
        assert same(one, data)
        assert one.data_ptr() == other.data_ptr()
        assert pair.sent()["tensors"] == 1
        del one, other


@pytest.mark.asyncio
async def test_a_view_sends_its_own_bytes_and_a_lazy_conjugate_what_it_stands_for() -> None:
    whole = torch.zeros(10_000_000, dtype=torch.uint8)
    numbers = torch.full((50_000,), 1 + 2j)
    async with compressing("zstd") as pair:
        assert same(await pair.trip(whole[100:40_100]), whole[100:40_100])
        assert pair.sent()["bytes_before"] == 40_000
        assert torch.equal(await pair.trip(numbers.conj()), numbers.conj())


@pytest.mark.asyncio
async def test_received_tensors_are_writable_and_lie_in_the_pool() -> None:
    data = dense(MIB)
    async with compressing("lz4") as pair:
        got = await pair.trip(data)
        got.add_(1)
        assert pair.b._table.pool.stats().leased_bytes == MIB
        assert got.data_ptr() % 64 == 0
        del got


@pytest.mark.asyncio
async def test_both_directions_at_once_and_many_tags() -> None:
    async with compressing("zstd", max_inflight=1) as pair:
        payloads = [dense(200_000 + 1000 * index, seed=index) for index in range(12)]
        works = [pair.ab.send(data, tag=index) for index, data in enumerate(payloads)]
        works += [pair.ba.send(data, tag=index) for index, data in enumerate(payloads)]
        for index, data in reversed(list(enumerate(payloads))):
            assert same(await pair.ba.recv(tag=index, timeout=30), data)
            assert same(await pair.ab.recv(tag=index, timeout=30), data)
        await asyncio.gather(*works)


@pytest.mark.asyncio
async def test_a_received_message_is_sent_on_compressed_again() -> None:
    data = [dense(300_000), dense(10)]
    async with compressing("lz4") as pair:
        sending = pair.ab.send(data)
        exchange = pair.b._exchange
        parcel = await exchange.recv_parcel(pair.a.address, 0, 0)
        await sending
        on = exchange.send_parcel(pair.a.address, 0, 0, parcel)
        assert same(await pair.ab.recv(timeout=30), data)
        await on
        assert pair.received()["tensors"] == 1
        del parcel


@pytest.mark.asyncio
async def test_messages_of_one_tag_keep_their_order_whatever_becomes_of_them() -> None:
    """Compressed, as they are, in a frame: each takes its own time."""
    objects: list[Any] = []
    for index in range(40):
        objects += [index, dense(150_000, seed=index), random_bytes(30_000, seed=index), {"n": index}, dense(100, seed=index)]
    async with compressing("zstd") as pair:
        sends = [pair.ab.send(obj) for obj in objects]
        for obj in objects:
            assert same(await pair.ba.recv(timeout=30), obj)
        await asyncio.gather(*sends)


@pytest.mark.asyncio
async def test_send_tensor_is_never_compressed() -> None:
    async with compressing("lz4") as pair:
        out = torch.zeros(100_000, dtype=torch.uint8)
        sending = pair.ab.send_tensor(dense(100_000))
        await pair.ba.recv_tensor(out, timeout=30)
        await sending
        assert same(out, dense(100_000))
        assert pair.sent()["tensors"] == 0
        assert pair.sent()["raw"] == {}


@pytest.mark.asyncio
async def test_a_worker_that_sends_to_itself_does_not_compress() -> None:
    async with pair_of(config("lz4")) as pair:
        data = dense(100_000)
        sending = pair.a.send(data, "a:0")
        assert same(await pair.a.recv("a:0", timeout=30), data)
        await sending
        assert pair.a.stats().links[0].compression is None
