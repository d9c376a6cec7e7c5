"""The receiver has no memory for a message: both sides are told, and the next messages arrive, whatever the payload came through."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import AiorlinfError, UsageError
from aiorlinf.link.incoming import Content
from tests import peers

__all__: list[str] = []

TOO_MUCH = 3 << 20


async def receive_all(comm: Worker, wait: bool) -> list[tuple[str, int]]:
    """What comes until it is nothing; there is never memory for a message of `TOO_MUCH` bytes."""
    allocate: Any = Content.allocate

    def limited(content: Content, pool: Any) -> None:
        if content.total == TOO_MUCH:
            raise MemoryError
        allocate(content, pool)

    Content.allocate = limited  # type: ignore[method-assign, assignment]
    got: list[tuple[str, int]] = []
    if wait:
        await comm.recv("a:0", tag=1)
    while True:
        try:
            message = await comm.recv("a:0")
        except UsageError as error:
            got.append((error.message, 0))
            continue
        if message is None:
            return got
        assert (message == message[0]).all(), "torn"
        got.append(("came", int(message[0])))


@pytest.mark.asyncio
@pytest.mark.parametrize("wait", [False, True], ids=["receive-posted", "receive-later"])
@pytest.mark.parametrize("backend", ["stream", "gloo"])
async def test_the_ones_before_and_behind_it_arrive(backend: Any, wait: bool, complaints: list[str]) -> None:
    """Gloo ends the process when a transfer meets another one in its place (SIGABRT)."""
    async with init("a:0", backend=backend) as a, peers.worker(a, "b:0", receive_all, wait, backend=backend) as b:
        expected: list[tuple[str, int]] = []
        for turn in range(3):
            sizes = [1 << 20, TOO_MUCH, 2 << 20, 100, TOO_MUCH, 1 << 20]
            works = [a.send(torch.full((size,), 10 * turn + place, dtype=torch.uint8), "b:0") for place, size in enumerate(sizes)]
            if wait and not turn:
                await a.send("go", "b:0", tag=1)
            outcomes = await asyncio.gather(*(work.async_wait(25) for work in works), return_exceptions=True)
            for place, (size, outcome) in enumerate(zip(sizes, outcomes, strict=True)):
                if size == TOO_MUCH:
                    assert isinstance(outcome, AiorlinfError), outcome
                    assert f"no memory for a message of {TOO_MUCH} bytes" in str(outcome)
                else:
                    assert outcome is None
                    expected.append(("came", 10 * turn + place))
        await a.send(None, "b:0")
        got = await b.result()
        # A receive is told of one that it had been given already; otherwise it gets the next one.
        assert [entry for entry in got if entry[0] == "came"] == expected
        assert {text for text, _ in got} <= {"came", f"no memory for a message of {TOO_MUCH} bytes"}
    complaints.clear()
