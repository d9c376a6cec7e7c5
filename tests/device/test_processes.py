"""Tensors on an accelerator between processes: to one that has none, and to one whose accelerator cannot be reached from here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.testing.fake import FakeAccelerator
from tests.peers import worker

__all__: list[str] = []

VALUES = torch.arange(100_000, dtype=torch.int32)


async def answer_without(comm: Worker) -> str:
    """A worker with nothing but a CPU."""
    got = await comm.recv("a:0")
    assert torch.equal(got[0], VALUES)
    await comm.send(got[0] + 1, "a:0")
    return str(got[0].device)


async def answer_with(comm: Worker) -> str:
    """A worker with a device that has the same name, and other memory."""
    with FakeAccelerator() as fake:
        fake.limbo = True
        got = await comm.recv("a:0")
        assert torch.equal(got[0].cpu(), VALUES)
        await comm.send(got[0] + 1, "a:0")
        return str(got[0].device)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "where", "reason"), [(answer_without, "cpu", "has no accelerator"), (answer_with, "fake:0", "cuda_ipc")]
)
async def test_another_process(function: Any, where: str, reason: str) -> None:
    with FakeAccelerator() as fake:
        async with init("a:0") as a, worker(a, "b:0", function) as b:
            work = a.send([fake.late(VALUES)], "b:0")
            answer = await a.recv("b:0")
            await work
            assert answer.device == (torch.device("cpu") if where == "cpu" else torch.device("fake", 0))
            assert torch.equal(answer.cpu(), VALUES + 1)
            ((backend, why),) = [(link.device_backend, link.device_reason) for link in a.stats().links]
            assert backend == "staging"
            assert reason in why
            assert await b.result() == where
