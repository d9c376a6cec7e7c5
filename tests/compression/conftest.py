"""Two workers whose tensors are compressed, on asyncio's own loop and on uvloop. Complaints in the logs fail a test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aiorlinf import CollectiveGroup, Worker, init
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.link.coding import Coding
from aiorlinf.link.link import Link
from tests.cases.conftest import complaints, pytest_asyncio_loop_factories

__all__ = [
    "Pair",
    "all_back",
    "coding_of",
    "complaints",
    "compressing",
    "config_of",
    "link_of",
    "pair_of",
    "pool_of",
    "pytest_asyncio_loop_factories",
    "same",
]


def config_of(codec: str, *, backend: str = "stream", collective: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A job that compresses all dtypes, unless `keys` say otherwise."""
    keys.setdefault("excluded_dtypes", [])
    return {"cluster": {"collective": {"backend": backend, **(collective or {}), "tensor_compression": {"codec": codec, **keys}}}}


@dataclass(frozen=True)
class Pair:
    """Two workers of one job, each with its group of the two."""

    a: Worker
    b: Worker
    ab: CollectiveGroup
    ba: CollectiveGroup

    async def trip(self, obj: Any, tag: int = 0) -> Any:
        """Send from `a` to `b`; what arrives."""
        work = self.ab.send(obj, tag=tag, timeout=30)
        got = await self.ba.recv(tag=tag, timeout=30)
        await work
        return got

    def sent(self) -> dict[str, Any]:
        """What compression has done for what `a` sends to `b`."""
        return _stats(self.a)

    def received(self) -> dict[str, Any]:
        """The same, seen by `b`."""
        return _stats(self.b)


def _stats(worker: Worker) -> dict[str, Any]:
    compression = worker.stats().links[0].compression
    assert compression is not None
    return compression


@contextlib.asynccontextmanager
async def pair_of(config: dict[str, Any]) -> AsyncIterator[Pair]:
    """Two workers in this process."""
    async with init("a:0", config=config) as a, init("b:0", config=config) as b:
        members = ["a:0", "b:0"]
        yield Pair(a, b, a.collective.create_collective_group(members), b.collective.create_collective_group(members))


@contextlib.asynccontextmanager
async def compressing(codec: str, *, backend: Literal["stream", "gloo"] = "stream", **keys: Any) -> AsyncIterator[Pair]:
    """As `pair_of`, and at the end everything has come back."""
    async with pair_of(config_of(codec, backend=backend, **keys)) as pair:
        yield pair
        await all_back(pair.a)
        await all_back(pair.b)


def link_of(worker: Worker) -> Link:
    """Its only link."""
    (link,) = worker._table.links()
    return link


def coding_of(worker: Worker) -> Coding:
    """What it has for compressing."""
    coding = worker._table.coding
    assert coding is not None
    return coding


def pool_of(worker: Worker) -> TensorBufferPool:
    """Its pool."""
    return worker._table.pool


async def all_back(worker: Worker) -> None:
    """Wait until no codec works any more; then contexts and buffers must be back. Received tensors must have been let go of."""
    coding = coding_of(worker)
    for _ in range(2000):
        if not coding.encoder.running and not coding.decoder.running and not coding.encoder._queue and not coding.decoder._queue:
            break
        await asyncio.sleep(0.005)
    contexts = list(coding.provider._contexts.values())
    assert all(each.idle == each.made for each in contexts)
    pools: list[Any] = [pool_of(worker), coding.provider._buffers]
    if any(pool.stats().leased_bytes for pool in pools):
        gc.collect()
    assert [pool.stats().leased_bytes for pool in pools] == [0, 0]


def same(one: Any, other: Any) -> bool:
    """Two objects made of tensors are the same, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other) if tensor.numel()]
        return (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad) and (
            not bits or torch.equal(bits[0], bits[1])
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
