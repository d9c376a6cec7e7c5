"""A program answers what it has received and then computes without giving way to the loop: its answer must not wait for that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from tests.codec.material import dense, random_bytes
from tests.peers import LoopKind, worker

LIMIT_S = 20.0


async def answer_and_compute(comm: Worker, told: str, tensor: bool) -> int:
    """Answers each message, and after the last one blocks until the answer is known to have arrived."""
    rounds = 0
    while True:
        if tensor:
            got = await comm.recv_tensor(torch.empty(300_000, dtype=torch.uint8), "a:0", timeout=LIMIT_S)
        else:
            got = await comm.recv("a:0", timeout=LIMIT_S)
        rounds += 1
        answer = comm.send(len(got), "a:0", tag=1, timeout=LIMIT_S)
        if rounds == 3:
            break
        await answer
    end = time.monotonic() + LIMIT_S
    while not Path(told).exists():  # the computation
        if time.monotonic() > end:
            raise TimeoutError("the answer has not left")
        time.sleep(0.002)
    await answer
    return rounds


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("loop", "backend", "codec", "data", "tensor"),
    [
        ("asyncio", "stream", None, random_bytes(300_000), False),
        ("asyncio", "stream", "lz4", dense(100_000), False),
        ("uvloop", "stream", "lz4", dense(5_000_000), False),
        ("uvloop", "stream", "zstd", random_bytes(5_000_000), False),
        ("asyncio", "stream", "auto", dense(300_000), False),
        ("uvloop", "stream", None, random_bytes(300_000), True),
        ("uvloop", "shm", None, random_bytes(300_000), False),
        ("asyncio", "shm", None, random_bytes(300_000), True),
    ],
    ids=["plain", "at once", "in threads", "raw after all", "auto", "tensor", "shared", "shared tensor"],
)
async def test_the_answer_leaves_before_the_program_computes(
    loop: LoopKind, backend: Any, codec: str | None, data: torch.Tensor, tensor: bool, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    collective: dict[str, Any] = {"backend": backend}
    if codec is not None:
        collective["tensor_compression"] = {"codec": codec}
    config = {"cluster": {"collective": collective}}
    async with init("a:0", config=config) as comm, worker(comm, "b:0", answer_and_compute, str(told), tensor, loop=loop) as peer:
        try:
            for _ in range(3):
                sent = comm.send_tensor(data, "b:0", timeout=LIMIT_S) if tensor else comm.send(data, "b:0", timeout=LIMIT_S)
                assert await comm.recv("b:0", tag=1, timeout=LIMIT_S / 2) == len(data)
                await sent
        finally:
            told.touch()
        assert await peer.result() == 3
