"""A sender that nobody receives from is held up by the window also where payloads lie in shared memory, which holds much more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.work.base import AsyncWork

__all__: list[str] = []

MIB = 1 << 20
WINDOW = 8 * MIB


def config() -> dict[str, Any]:
    return {"cluster": {"collective": {"backend": "shm", "window_bytes": WINDOW, "inline_max_bytes": 0}}}


async def sent_until_it_waits(worker: Worker, size: int, most: int, given: bool) -> tuple[int, AsyncWork[None]]:
    """How many messages were done one after the other, and the one that is not."""
    for count in range(most):
        tensor = worker.empty(size, dtype=torch.uint8) if given else torch.empty(size, dtype=torch.uint8)
        tensor.fill_(count)
        work = worker.send(tensor, "b:0")
        done, _ = await asyncio.wait([asyncio.ensure_future(asyncio.shield(work))], timeout=0.5)
        if not done:
            return count, work
    raise AssertionError(f"{most} messages of {size} bytes are in the peer's hands, and nobody has received one")


@pytest.mark.asyncio
@pytest.mark.parametrize("given", [False, True], ids=["copied", "given"])
@pytest.mark.parametrize(("size", "bound"), [(MIB, WINDOW // MIB), (WINDOW + MIB, 4)], ids=["small", "larger-than-the-window"])
async def test_unread_messages_are_bounded(size: int, bound: int, given: bool) -> None:
    async with init("a:0", config=config()) as a, init("b:0", config=config()) as b:
        for _ in range(3):  # the memory is made, and grows
            await asyncio.gather(a.send(torch.zeros(4 * size, dtype=torch.uint8), "b:0"), b.recv("a:0"))
        count, waiting = await sent_until_it_waits(a, size, 4 * bound, given)
        assert count <= bound
        for number in range(count + 1):
            got = await b.recv("a:0", timeout=20)
            assert got.numel() == size
            assert (got == number).all()
            del got
        await waiting
