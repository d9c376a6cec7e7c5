"""One tensor beyond what LZ4 takes. Only where more is asked for than in every run: it takes 5 GB and a quarter of a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aiorlinf.codec.codecs.lz4 import MAX_INPUT
from aiorlinf.codec.pressure import group_memory, system_memory
from tests.compression.conftest import compressing
from tests.hypothesis_profiles import TRIES

GIB = 1 << 30
SIZE = 2_362_232_012
"""2.2 GiB."""


def memory_left() -> int:
    """Bytes that this process can have."""
    known = [system_memory(Path("/proc")), *group_memory(Path("/proc"), Path("/sys/fs/cgroup"))]
    return min([available for available, _ in filter(None, known)], default=0)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.timeout(300)
async def test_a_tensor_of_more_than_two_gigabytes(codec: str, request: pytest.FixtureRequest) -> None:
    """LZ4 leaves it alone and says so; Zstandard, which takes any size, gets it in chunks as everything else."""
    if TRIES <= 1:
        pytest.skip("takes 5 GB and a quarter of a minute; set AIORLINF_TRIES to more than 1")
    if "uvloop" not in request.node.name:
        pytest.skip("once is enough, on the quicker loop")
    if memory_left() < 3 * SIZE:
        pytest.skip(f"two of {SIZE} bytes need more memory than there is")
    assert SIZE > MAX_INPUT
    data = torch.zeros(SIZE, dtype=torch.uint8)
    data[::GIB] = 7
    data[-1] = 9
    async with compressing(codec) as pair:
        sending = pair.ab.send([data, torch.zeros(100_000)], timeout=200)
        got, small = await pair.ba.recv(timeout=200)
        await sending
        assert got.numel() == SIZE
        assert torch.equal(got, data)
        assert not small.any()
        if codec == "lz4":
            assert pair.sent()["raw"] == {"too_large": 1}
            assert pair.sent()["raw_bytes"] == SIZE
            assert pair.sent()["tensors"] == 1
        else:
            assert pair.sent()["tensors"] == 2
            assert pair.sent()["ratio"] > 1000
        del got, small
