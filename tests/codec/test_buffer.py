"""Buffers: aligned, private, one object that everything made from them refers to."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any

import pytest
import torch

from aiorlinf.codec.buffer import ALIGNMENT, Buffer, capacity_for

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 70_000, MIB - 1])
def test_small_capacities_are_whole_alignments(nbytes: int) -> None:
    capacity = capacity_for(nbytes)
    assert 0 <= capacity - nbytes < ALIGNMENT
    assert capacity % ALIGNMENT == 0


@pytest.mark.parametrize("nbytes", [MIB, MIB + 1, 3 * MIB - 5, 64 * MIB])
def test_large_capacities_are_whole_pages(nbytes: int) -> None:
    capacity = capacity_for(nbytes)
    assert 0 <= capacity - nbytes < mmap.PAGESIZE
    assert capacity % mmap.PAGESIZE == 0


@pytest.mark.parametrize("nbytes", [1, 65, 70_000, MIB - 1, MIB, 2 * MIB + 17])
def test_arrays_over_it(nbytes: int) -> None:
    buffer = Buffer(capacity_for(nbytes))
    root = buffer.root(nbytes)
    assert root.shape == (nbytes,)
    assert root.ctypes.data % ALIGNMENT == 0
    assert root.flags.writeable
    root[:] = 7
    assert buffer.root(nbytes).ctypes.data == root.ctypes.data
    buffer.fill(9)
    assert (root == 9).all()


@pytest.mark.parametrize("nbytes", [1000, 2 * MIB])
def test_the_root_dies_with_the_last_view_and_not_before(nbytes: int) -> None:
    buffer = Buffer(capacity_for(nbytes))
    root = buffer.root(nbytes)
    gone: list[int] = []
    weakref.finalize(root, gone.append, 1).atexit = False
    tensor = torch.from_numpy(root)
    del root
    view: Any = tensor.view(torch.float32)[8:16].reshape(2, 4).numpy()[1:]
    del tensor
    assert gone == []
    memory = memoryview(view)
    del view
    assert gone == []
    del memory
    assert gone == [1]


def test_a_root_in_a_cycle_outlives_what_looks_at_it_in_the_end() -> None:
    # A weak reference's callback runs before the `__del__` methods of a cycle that is collected. It does not for what the collector does
    # not look into.
    buffer = Buffer(1024)
    root = buffer.root(1024)
    order: list[str] = []
    weakref.finalize(root, order.append, "root").atexit = False

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.me = self

        def __del__(self) -> None:
            order.append(f"holder {int(self.tensor[0])}")

    root[0] = 5
    holder = Holder(torch.from_numpy(root))
    del root, holder
    gc.collect()
    assert order == ["holder 5", "root"]


def test_memory_let_go_lives_as_long_as_its_views() -> None:
    buffer = Buffer(2 * MIB)
    root = buffer.root(2 * MIB)
    buffer.let_go()
    root[:] = 3
    assert int(root[-1]) == 3


def test_more_than_the_system_has() -> None:
    with pytest.raises(OSError, match="allocate"):
        Buffer(1 << 60)
