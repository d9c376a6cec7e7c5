"""Leaves copied into one region, by one thread or several."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.link import packing
from aiorlinf.link.packing import pack, pack_in_threads, shares
from aiorlinf.link.placement import offsets
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.inline import encode_inline
from aiorlinf.work.home import LoopHome


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_shares_are_all_of_it_once_and_about_equal(sizes: list[int], count: int) -> None:
    found = shares(sizes, count)
    assert 1 <= len(found) <= count
    seen = [(index, byte) for share in found for index, begin, end in share for byte in range(begin, end)]
    assert seen == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    most = -(-sum(sizes) // count)
    assert all(sum(end - begin for _, begin, end in share) <= most for share in found)


def leaves_of(obj: Any) -> Flat:
    flat = encode_inline(obj, 0)
    assert isinstance(flat, Flat)
    return flat


def check(memory: torch.Tensor, flat: Flat, obj: list[Any]) -> None:
    starts = offsets([leaf.nbytes for leaf in flat.leaves])
    for start, leaf, value in zip(starts, flat.leaves, obj, strict=False):
        expected = torch.frombuffer(bytearray(value), dtype=torch.uint8) if isinstance(value, bytes) else value.view(-1).view(torch.uint8)
        assert torch.equal(memory[start : start + leaf.nbytes], expected)


THINGS = [torch.arange(3001, dtype=torch.int64), torch.zeros(0), torch.arange(77, dtype=torch.uint8), torch.rand(5000)]


def test_every_leaf_lies_where_it_should() -> None:
    flat = leaves_of(THINGS)
    memory = torch.zeros(offsets([leaf.nbytes for leaf in flat.leaves])[-1], dtype=torch.uint8)
    pack(memory.data_ptr(), flat.leaves)
    check(memory, flat, THINGS)


@pytest.mark.asyncio
async def test_two_threads_make_the_same(home: LoopHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SHARED_BYTES", 1000)
    monkeypatch.setattr("aiorlinf.link.packing.os.cpu_count", lambda: 2)
    flat = leaves_of(THINGS)
    memory = torch.zeros(offsets([leaf.nbytes for leaf in flat.leaves])[-1], dtype=torch.uint8)
    over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    pack_in_threads(home, memory.data_ptr(), flat.leaves, over.set_result)
    assert await over is None
    check(memory, flat, THINGS)


@pytest.mark.asyncio
async def test_it_is_over_only_when_all_are_done_with_the_memory(home: LoopHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when one of them fails."""
    monkeypatch.setattr(packing, "_SHARED_BYTES", 1000)
    monkeypatch.setattr("aiorlinf.link.packing.os.cpu_count", lambda: 2)
    real = ctypes.memmove
    ended: list[str] = []

    def move(target: int, source: int, size: int) -> None:
        if not ended:
            ended.append("failed")
            raise OSError("on purpose")
        real(target, source, size)
        ended.append("copied")

    monkeypatch.setattr("aiorlinf.link.packing.ctypes.memmove", move)
    tensor = torch.rand(5000)
    flat = leaves_of([tensor])
    memory = torch.zeros(20032, dtype=torch.uint8)
    over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    pack_in_threads(home, memory.data_ptr(), flat.leaves, over.set_result)
    assert isinstance(await over, OSError)
    assert sorted(ended) == ["copied", "failed"]
