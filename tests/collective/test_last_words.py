"""Who has answered and closes at once has answered: what a member said before its end counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.collective.company import company


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("kind", ["broadcast", "gather", "all_to_all"])
async def test_everybody_closes_as_soon_as_he_is_done(kind: str, size: int) -> None:
    obj = torch.ones(size)
    for _ in range(4):
        async with company(["", "", ""]) as workers:

            async def take_part(rank: int) -> Any:
                calls = workers[rank]
                if kind == "broadcast":
                    got = await calls.broadcast(obj, 0)
                elif kind == "gather":
                    got = await calls.gather(obj, 0)
                else:
                    got = await calls.all_to_all([obj, obj, obj])
                await workers.workers[rank].close()
                return got

            got = await asyncio.wait_for(asyncio.gather(*(take_part(rank) for rank in range(3))), 20)
            for rank, value in enumerate(got):
                if kind == "broadcast":
                    assert torch.equal(value, obj)
                elif kind == "gather" and rank:
                    assert value is None
                else:
                    assert len(value) == 3
                    assert all(torch.equal(part, obj) for part in value)
