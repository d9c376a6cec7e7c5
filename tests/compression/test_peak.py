"""What is received compressed is decompressed where it stays: there is no second copy of it on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiorlinf import Worker, init
from tests.codec.material import MIB, dense
from tests.compression.conftest import config_of
from tests.peers import worker

__all__: list[str] = []

SIZE = 96 * MIB


def memory(figure: str) -> int:
    """Bytes of this process, by what its status calls them."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{figure}:")]
    return int(line.split()[1]) * 1024


async def receive_and_measure(comm: Worker) -> None:
    """Say how many bytes came, and by how much the memory of this process had grown at the worst moment."""
    await comm.recv("a:0")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    await comm.send("ready", "a:0")
    got = await comm.recv("a:0")
    await comm.send((got.numel(), memory("VmHWM") - before), "a:0")
    await comm.recv("a:0")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.asyncio
async def test_a_receiver_needs_hardly_more_than_the_tensor(codec: str) -> None:
    data = dense(MIB).repeat(SIZE // MIB)
    async with init("a:0", config=config_of(codec)) as a, worker(a, "b:0", receive_and_measure) as peer:
        await a.send(data[: 2 * MIB].clone(), "b:0")
        assert await a.recv("b:0", timeout=20) == "ready"
        await a.send(data, "b:0")
        received, grown = await a.recv("b:0", timeout=20)
        compression = a.stats().links[0].compression
        assert compression is not None
        assert compression["ratio"] > 2
        await a.send("end", "b:0")
        await peer.result()
    assert received == SIZE
    assert grown < 1.3 * SIZE, grown / SIZE
