"""Private views: one memory for many, until somebody writes to his."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf.backends.shm import private
from aiorlinf.backends.shm.private import private_view
from aiorlinf.backends.shm.segment import Segment, create_segment, open_segment
from tests.system import memory_file_at, memory_file_mappings, resident_bytes, soon

SIZE = 1 << 20


@pytest.fixture
def made() -> Iterator[Segment]:
    segment = create_segment(1, SIZE)
    yield segment
    segment.close()


def anonymous_kib() -> int:
    return int(Path("/proc/self/smaps_rollup").read_text().split("Anonymous:")[1].split()[0])


def opened(made: Segment) -> Segment:
    """As a peer that keeps descriptors has it."""
    return open_segment(made.number, SIZE, os.dup(made.fd), keep=True)


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (4096, 8192), (100, 1), (5000, 9000), (SIZE - 1, 1)])
def test_what_one_writes_nobody_else_sees(made: Segment, offset: int, size: int) -> None:
    made.view(0, SIZE)[:] = 7
    peer = opened(made)
    mine, his = private_view(peer, offset, size), private_view(made, offset, size)
    assert mine.shape == (size,)
    assert (mine == 7).all()
    mine[:] = 1
    assert (his == 7).all()
    assert (made.view(0, SIZE) == 7).all()
    his[-1] = 9
    assert (mine == 1).all()


def test_tensors_over_it_are_writable_and_keep_it(made: Segment) -> None:
    made.view(0, SIZE)[:] = 3
    root = private_view(made, 64, 4000)
    gone = weakref.ref(root)
    tensor = torch.from_numpy(root[: 250 * 16]).view(torch.float32)
    del root
    tensor.fill_(2.5)
    assert memory_file_at(tensor.data_ptr(), tensor.nbytes)
    assert gone() is not None
    assert tensor.sum() == 2.5 * tensor.numel()
    del tensor
    assert gone() is None


@pytest.mark.asyncio
async def test_the_mapping_ends_with_the_last_view(made: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = memory_file_mappings()
    for threshold in (SIZE * 2, SIZE // 2):
        monkeypatch.setattr(private, "_LARGE_BYTES", threshold)
        view: Any = private_view(made, 0, SIZE)
        part = view[100:200]
        del view
        assert sum(end - start for start, end in memory_file_mappings()) == sum(end - start for start, end in before) + SIZE
        del part
        await soon(lambda: memory_file_mappings() == before)


def test_reading_takes_no_memory_of_our_own(made: Segment) -> None:
    big = create_segment(2, 64 << 20)
    big.view(0, big.size)[:] = 1
    views = [private_view(big, 0, big.size) for _ in range(4)]
    before = anonymous_kib()
    assert all(np.add.reduce(view) == big.size for view in views)
    after = anonymous_kib()
    assert after - before < 8 << 10, "kibibytes"
    assert resident_bytes() > big.size


def test_without_a_descriptor_there_is_none(made: Segment) -> None:
    closed = open_segment(made.number, SIZE, os.dup(made.fd))
    with pytest.raises(OSError, match="Bad file descriptor"):
        private_view(closed, 0, SIZE)
