"""A tensor that was sent is as it was before: its memory can be freed and taken again in place, as FSDP does with parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.rendezvous.settings import Backend
from aiorlinf.wire.shown import shown
from tests.collective.company import company

__all__: list[str] = []

SIZES = {"inline": 100, "payload": 1_000_000}
WAYS: dict[str, tuple[Backend, dict[str, Any]]] = {
    "stream": ("stream", {}),
    "shm": ("shm", {}),
    "gloo": ("gloo", {}),
    "compressed": ("stream", {"tensor_compression": {"codec": "lz4", "excluded_dtypes": []}}),
    "zstd": ("stream", {"tensor_compression": {"codec": "zstd", "excluded_dtypes": []}}),
    "pool": ("stream", {"tensor_buffer_pool": {"max_bytes": 1 << 28}}),
}


def freed_and_taken_again(tensor: torch.Tensor) -> None:
    """As FSDP does it around each use."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(size)
    tensor.fill_(3)
    assert tensor.eq(3).all()


Sending = Callable[[Worker, Worker, torch.Tensor], Any]


async def by_send(a: Worker, b: Worker, tensor: torch.Tensor) -> None:
    work = a.send({"w": tensor, "again": [tensor]}, "b:0")
    got = await b.recv("a:0")
    await work
    assert torch.equal(got["w"], tensor)


async def by_send_tensor(a: Worker, b: Worker, tensor: torch.Tensor) -> None:
    out = torch.zeros_like(tensor)
    await asyncio.gather(a.send_tensor(tensor, "b:0"), b.recv_tensor(out, "a:0"))
    assert torch.equal(out, tensor)
    freed_and_taken_again(out)


async def by_channel(a: Worker, b: Worker, tensor: torch.Tensor) -> None:
    channel = await a.create_channel("items", maxsize=2)
    await channel.put([tensor])
    got = await channel.get()
    assert torch.equal(got[0], tensor)
    await channel.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("sending", [by_send, by_send_tensor])
async def test_after_a_send(way: tuple[Backend, dict[str, Any]], size: int, sending: Sending) -> None:
    backend, collective = way
    config = {"cluster": {"collective": collective}}
    async with init("a:0", backend=backend, config=config) as a, init("b:0", backend=backend, config=config) as b:
        tensor = torch.arange(size, dtype=torch.float32) // 100
        parameter = torch.nn.Parameter(tensor.clone())
        for each in (tensor, parameter.detach()):
            await sending(a, b, each)
            freed_and_taken_again(each)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_after_it_went_through_a_channel(size: int) -> None:
    async with init("a:0") as a:
        tensor = torch.arange(size, dtype=torch.float32)
        await by_channel(a, a, tensor)
        freed_and_taken_again(tensor)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("hosts", [["", ""], ["a", "b"]], ids=["one host", "two hosts"])
async def test_after_a_collective(hosts: list[str], size: int) -> None:
    async with company(hosts) as workers:
        tensors = [torch.arange(size, dtype=torch.float32) + rank for rank in range(2)]
        target = torch.zeros(size)
        await workers.all(lambda rank: workers[rank].broadcast({"w": tensors[0]}, 0, into={"w": target} if rank else None))
        assert torch.equal(target, tensors[0])
        await workers.all(lambda rank: workers[rank].gather(tensors[rank], 0))
        await workers.all(lambda rank: workers[rank].all_to_all([tensors[rank], {"w": tensors[rank]}]))
        for tensor in (*tensors, target):
            freed_and_taken_again(tensor)


def test_the_bytes_are_those_of_the_tensor() -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    view = shown(tensor[2:])
    assert (view.format, view.nbytes, view.readonly) == ("B", 8, False)
    assert bytes(view) == bytes([2, 0, 3, 0, 4, 0, 5, 0])
    view[0] = 9
    assert tensor[2] == 9
    assert not shown(tensor[:0]).nbytes
    with pytest.raises(BufferError, match="strides"):
        shown(torch.zeros(4, 4).t())
    with pytest.raises(BufferError, match="meta"):
        shown(torch.zeros(4, device="meta"))


def test_the_bytes_stay_when_the_tensor_gets_others() -> None:
    tensor = torch.ones(1000, dtype=torch.uint8)
    view = shown(tensor)
    tensor.data = torch.zeros(3, dtype=torch.uint8)
    more = [torch.zeros(1000, dtype=torch.uint8) for _ in range(10)]  # they would take the memory if it were free
    assert bytes(view) == b"\x01" * 1000
    del more
