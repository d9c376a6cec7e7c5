"""Members that give up at any moment, in any order: whatever happens, everybody ends, and the next collective is in step."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest
import torch

from aiorlinf.errors import AiorlinfError, DeadlineExceeded, RemoteError
from tests.collective.company import Company, company

ROUNDS = 25


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hosts", [["", "", ""], ["a", "b", "b", "c"]], ids=["one host", "three hosts"])
async def test_everybody_ends_and_the_next_one_works(hosts: list[str], seed: int) -> None:
    chance = random.Random(seed)
    async with company(hosts) as workers:
        for _ in range(ROUNDS):
            await one_round(workers, chance)
        await workers.check_works()
        gc.collect()  # errors and their frames
        await workers.all_is_free()
        for rank in range(len(workers)):
            assert all(link.unread_messages == 0 for link in workers.workers[rank].stats().links)


async def one_round(workers: Company, chance: random.Random) -> None:
    """Up to three collectives at once, of which some are given up by some."""
    everybody = range(len(workers))
    plans = [(chance.choice(["broadcast", "gather", "all_to_all"]), chance.choice(everybody), chance.choice([1, 60_000])) for _ in range(3)]
    works = []
    for rank in chance.sample(everybody, len(workers)):
        for kind, root, size in plans:
            obj = torch.full((size,), rank)
            timeout = 0.001 if chance.random() < 0.05 else None
            if kind == "broadcast":
                work: Any = workers[rank].broadcast(obj, root, timeout=timeout)
            elif kind == "gather":
                work = workers[rank].gather(obj, root, timeout=timeout, return_exceptions=chance.random() < 0.5)
            else:
                work = workers[rank].all_to_all([obj] * len(workers), timeout=timeout)
            works.append((kind, root, size, rank, work))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.004)
    for *_, work in works:
        if chance.random() < 0.08:
            work.cancel()
        if chance.random() < 0.1:
            await asyncio.sleep(0)
    got = await asyncio.wait_for(asyncio.gather(*(work for *_, work in works), return_exceptions=True), 20)
    for (kind, root, size, rank, _), value in zip(works, got, strict=True):
        if isinstance(value, BaseException):
            assert isinstance(value, (asyncio.CancelledError, RemoteError, DeadlineExceeded)), repr(value)
        elif kind == "broadcast":
            assert torch.equal(value, torch.full((size,), root))
        elif kind == "all_to_all" or rank == root:
            for other, part in enumerate(value):
                assert isinstance(part, AiorlinfError) or torch.equal(part, torch.full((size,), other))
