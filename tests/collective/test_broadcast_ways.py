"""A large broadcast gets through whatever there is: memory that is not shared, segments that came before, slow networks, codecs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.collective import spread
from aiorlinf.link import shared_in
from tests.collective.company import Company, company
from tests.system import memory_file_at, no_more_descriptors

SIZE = 400_000


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Memory must come back without one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def check(workers: Company, *, shared: bool) -> None:
    """Twice from each, once into a tensor that is there."""
    target = torch.zeros(SIZE)
    for root in range(len(workers)):
        sent = torch.full((SIZE,), float(root + 1))
        for into in (None, target):
            got = await workers.all(_calls(workers, root, sent, into))
            assert all(torch.equal(value, sent) for value in got)
            if into is None:
                at = [memory_file_at(value.data_ptr(), value.nbytes) for value in got]
                assert at == [shared and rank != root for rank in range(len(workers))]
            del got
    await workers.all_is_free()


def _calls(workers: Company, root: int, sent: torch.Tensor, into: torch.Tensor | None) -> Any:
    return lambda rank: workers[rank].broadcast(sent if rank == root else None, root, into=into)


@pytest.mark.asyncio
async def test_in_shared_memory() -> None:
    async with company(["", "", ""]) as workers:
        await check(workers, shared=True)


@pytest.mark.asyncio
async def test_segments_that_came_before_the_first_collective_are_passed_once_more() -> None:
    async with company(["", "", ""]) as workers:
        for worker in workers.workers:
            for other in workers.workers:
                if other is not worker:
                    sending = worker.send(torch.ones(SIZE), other.address)
                    assert (await other.recv(worker.address, timeout=20)).sum() == SIZE
                    await sending
        await check(workers, shared=True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "collective",
    [{"shared_memory": {"enabled": False}}, {"shared_memory": {"max_bytes": 4096}}, {"backend": "stream"}, {"backend": "gloo"}],
)
async def test_without_shared_memory(collective: dict[str, Any]) -> None:
    async with company(["", "", ""], **collective) as workers:
        await check(workers, shared=False)


@pytest.mark.asyncio
async def test_a_private_view_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("too many mappings")

    monkeypatch.setattr(shared_in, "private_view", fail)
    async with company(["", ""]) as workers:
        sent = torch.ones(SIZE)
        for _ in range(2):
            assert all(torch.equal(value, sent) for value in await workers.all(_calls(workers, 0, sent, None)))
        assert "cannot be mapped privately: too many mappings" in caplog.text
        monkeypatch.undo()
        await check(workers, shared=True)


@pytest.mark.asyncio
async def test_no_descriptors_left() -> None:
    async with company(["", ""]) as workers:
        await workers.check_works()
        with no_more_descriptors():
            sent = torch.ones(SIZE)
            assert all(torch.equal(value, sent) for value in await workers.all(_calls(workers, 0, sent, None)))
        await workers.check_works()


@pytest.mark.asyncio
async def test_it_is_never_compressed() -> None:
    async with company(["a", "b", "c"], backend="stream", tensor_compression={"codec": "lz4", "excluded_dtypes": []}) as workers:
        sent = torch.zeros(SIZE)
        assert all(torch.equal(value, sent) for value in await workers.all(_calls(workers, 0, sent, None)))
        for worker in workers.workers:
            compression = worker.stats().compression
            assert compression is not None
            assert compression["tensors"] == 0
        assert sum(link.bytes_sent for link in workers.workers[0].stats().links) > sent.nbytes
        got = await workers.all(lambda rank: workers[rank].gather(torch.zeros(SIZE), 0))
        assert torch.equal(got[0][2], sent)
        assert workers.workers[1].stats().compression["tensors"] == 1  # type: ignore[index]


@pytest.mark.asyncio
async def test_over_an_emulated_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "PIECE_BYTES", 1 << 18)
    emulation = {"crossdc_pairs": [{"src": "w:0-1", "dst": "w:2-3", "delay_ms": 20}]}
    config = {"cluster": {"net_emulation": emulation}}
    members = [f"w:{rank}" for rank in range(4)]
    async with (
        init("w:0", config=config) as a,
        init("w:1", config=config) as b,
        init("w:2", config=config) as c,
        init("w:3", config=config) as d,
    ):
        sent = torch.arange(SIZE)
        works = [worker.broadcast(sent if worker is a else None, members=members) for worker in (a, b, c, d)]
        assert all(torch.equal(value, sent) for value in await asyncio.wait_for(asyncio.gather(*works), 20))
