"""Buffers come back when their last view is gone, whoever holds it, wherever it dies."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf.codec import pool as pool_module
from aiorlinf.codec.buffer import Buffer
from aiorlinf.codec.pool import BufferPoolStats, Lease, TensorBufferPool
from aiorlinf.codec.pool_index import Grant, PoolIndex

MIB = 1 << 20
SIZE = 2 * MIB


@pytest.fixture
def pool() -> TensorBufferPool:
    return TensorBufferPool(64 * MIB)


def acquire(pool: TensorBufferPool, nbytes: int = SIZE) -> Lease:
    lease = pool.acquire(nbytes)
    assert lease is not None
    return lease


def test_exact_lengths_at_aligned_addresses(pool: TensorBufferPool) -> None:
    for nbytes in (1, 100, 65_537, MIB - 1, MIB, SIZE + 3):
        tensor = acquire(pool, nbytes).tensor
        assert tensor.shape == (nbytes,)
        assert tensor.dtype is torch.uint8
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == nbytes


def test_lengths_are_those_asked_for_and_not_the_last_users(pool: TensorBufferPool) -> None:
    chance = random.Random(3)
    for _ in range(1000):
        nbytes = chance.randrange(1, MIB)
        tensor = acquire(pool, nbytes).tensor
        assert tensor.numel() == tensor.numpy().nbytes == nbytes
        del tensor
    stats = pool.stats()
    assert stats.hits > 900
    assert stats.leased_bytes == 0


def test_a_buffer_is_used_again(pool: TensorBufferPool) -> None:
    first = acquire(pool)
    address = first.tensor.data_ptr()
    assert pool.stats() == BufferPoolStats(64 * MIB, SIZE, 0, 0, 1, 0, 0, 0)
    first.release()
    assert pool.stats() == BufferPoolStats(64 * MIB, 0, SIZE, 0, 1, 0, 0, 0)
    second = acquire(pool, SIZE - 5)
    assert second.tensor.data_ptr() == address
    assert second.nbytes == SIZE - 5
    assert pool.stats() == BufferPoolStats(64 * MIB, SIZE, 0, 1, 1, 0, 0, 0)


def test_it_is_not_while_anyone_looks(pool: TensorBufferPool) -> None:
    def leased() -> int:
        return pool.stats().leased_bytes

    tensor = pool.empty(SIZE)
    array: Any = tensor[7:].numpy()
    kept = [tensor[5:9], tensor.numpy()[100:], memoryview(array)[1:], np.asarray(tensor).view(np.float32).reshape(2, -1).T]
    del array
    del tensor
    for _ in range(len(kept)):
        assert leased() == SIZE
        kept.pop()
    assert leased() == 0


def test_release_is_safe_for_whoever_still_has_a_view(pool: TensorBufferPool) -> None:
    lease = acquire(pool)
    view = lease.tensor[:10]
    view.fill_(1)
    lease.release()
    acquire(pool).tensor.fill_(2)
    assert view.tolist() == [1] * 10
    with pytest.raises(RuntimeError, match="released"):
        _ = lease.tensor
    lease.release()


def test_a_block_releases(pool: TensorBufferPool) -> None:
    with acquire(pool) as lease:
        assert pool.stats().leased_bytes == SIZE
        assert lease.tensor.numel() == SIZE
    assert pool.stats().cached_bytes == SIZE


def test_a_buffer_that_did_not_pay_is_not_kept(pool: TensorBufferPool) -> None:
    lease = acquire(pool)
    lease.release(keep=False)
    assert pool.stats() == BufferPoolStats(64 * MIB, 0, 0, 0, 1, 0, 0, 0)


def test_a_handle_that_is_over_has_no_say_in_the_buffers_next_life(pool: TensorBufferPool) -> None:
    old = acquire(pool)
    old.release()
    new = acquire(pool)
    old.release(keep=False)
    new.release()
    assert pool.stats().cached_bytes == SIZE


def test_a_buffer_may_be_kept_again_after_another_was_dropped(pool: TensorBufferPool) -> None:
    acquire(pool).release(keep=False)
    acquire(pool).release()
    assert pool.stats().cached_bytes == SIZE


def test_over_the_budget_memory_is_the_callers_own() -> None:
    pool = TensorBufferPool(2 * SIZE)
    held = [pool.empty(SIZE), pool.empty(SIZE)]
    assert pool.acquire(SIZE) is None
    own = pool.empty(SIZE)
    assert own.shape == (SIZE,)
    assert pool.stats() == BufferPoolStats(2 * SIZE, 2 * SIZE, 0, 0, 2, 2, 0, 0)
    del own
    held.clear()
    assert pool.stats().cached_bytes == 2 * SIZE


def test_idle_ones_go_for_one_that_needs_the_room() -> None:
    pool = TensorBufferPool(4 * MIB)
    held = [acquire(pool, MIB), acquire(pool, 2 * MIB)]
    while held:
        held.pop().release()
    large = acquire(pool, 3 * MIB)
    assert pool.stats() == BufferPoolStats(4 * MIB, 3 * MIB, MIB, 0, 3, 0, 1, 0)
    large.release()


def test_small_memory_and_none_at_all_need_no_pool(pool: TensorBufferPool) -> None:
    assert pool.empty(0).shape == (0,)
    assert pool.empty(64 * 1024 - 1).shape == (64 * 1024 - 1,)
    assert pool.stats().misses == 0
    assert pool.empty(64 * 1024).shape == (64 * 1024,)
    assert pool.stats().misses == 1


def test_no_memory_for_a_new_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TensorBufferPool(1 << 62)
    acquire(pool, MIB).release()
    assert pool.acquire(1 << 60) is None
    # What was idle was given up for another try.
    assert pool.stats() == BufferPoolStats(1 << 62, 0, 0, 0, 1, 1, 0, 1)
    tries: list[int] = []

    class SecondTry(Buffer):
        def __init__(self, capacity: int) -> None:
            tries.append(capacity)
            if len(tries) == 1:
                raise MemoryError
            super().__init__(capacity)

    monkeypatch.setattr(pool_module, "Buffer", SecondTry)
    assert acquire(pool, MIB).nbytes == MIB
    assert tries == [MIB, MIB]


def test_the_default_device_is_none_of_our_business(pool: TensorBufferPool) -> None:
    with torch.device("meta"):
        assert pool.empty(10).device.type == pool.empty(SIZE).device.type == "cpu"


# ------------------------------------------------------------------------------------------------- where it comes back


def test_in_another_thread(pool: TensorBufferPool) -> None:
    holder = [pool.empty(SIZE)]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert pool.stats().cached_bytes == SIZE


def test_many_threads_let_go_while_one_asks(pool: TensorBufferPool) -> None:
    # Each thread writes its number and reads it back: nobody else may have the same memory.
    wrong: list[int] = []
    queues: list[list[torch.Tensor]] = [[] for _ in range(4)]
    over = threading.Event()

    def use(number: int) -> None:
        queue = queues[number]
        while not over.is_set() or queue:
            if queue:
                tensor = queue.pop()
                tensor.fill_(number)
                if not bool((tensor == number).all()):
                    wrong.append(number)
                del tensor

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for step in range(400):
        queues[step % 4].append(pool.empty(70_000 + step % 3))
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = pool.stats()
    assert stats.leased_bytes == 0
    assert stats.hits + stats.misses == 400
    assert stats.cached_bytes <= 400 * 70_080


def test_in_a_garbage_collection_within_the_pool_itself(pool: TensorBufferPool) -> None:
    def litter() -> None:
        cycle: list[object] = [pool.empty(SIZE)]
        cycle.append(cycle)

    gc.disable()
    try:
        for _ in range(3):
            litter()
        assert pool.stats().leased_bytes == 3 * SIZE

        class Strikes(PoolIndex[Buffer]):
            """The collector strikes right in the middle of a request."""

            __slots__ = ()

            def request(self, size: int) -> Grant[Buffer] | None:
                before = self.leased_bytes
                gc.collect()
                assert self.leased_bytes == before
                return super().request(size)

        pool._index.__class__ = Strikes
        tensor = pool.empty(SIZE)
        stats = pool.stats()
        assert (stats.leased_bytes, stats.cached_bytes, stats.misses) == (SIZE, 3 * SIZE, 4)
        del tensor
    finally:
        gc.enable()


def test_after_the_pool(pool: TensorBufferPool) -> None:
    tensor = pool.empty(SIZE)
    reference = weakref.ref(pool)
    pool.close()
    tensor.fill_(1)
    assert pool.acquire(SIZE) is None
    assert pool.empty(SIZE).shape == (SIZE,)
    del tensor
    assert pool.stats().cached_bytes == pool.stats().leased_bytes == 0
    kept = TensorBufferPool(SIZE).empty(SIZE)
    assert int(kept.fill_(3)[-1]) == 3
    del kept
    assert reference() is pool


def test_tensors_do_not_keep_the_pool() -> None:
    pool = TensorBufferPool(4 * SIZE)
    tensor = pool.empty(SIZE)
    gone = weakref.ref(pool)
    del pool
    assert gone() is None
    del tensor


def test_in_a_fork_and_at_the_end_of_the_program() -> None:
    code = """
import os
from aiorlinf.codec.pool import TensorBufferPool

pool = TensorBufferPool(1 << 24)
holder = [pool.empty(1 << 21)]
array = holder[0].numpy()
array[:] = 4
child = os.fork()
if child == 0:
    seen = int(array[-1])
    array[:] = 5
    del array
    holder.clear()
    os._exit(0 if seen == 4 and pool.stats().cached_bytes == 1 << 21 else 1)
assert os.waitpid(child, 0)[1] == 0
assert (array == 4).all() and pool.stats().leased_bytes == 1 << 21
kept = pool.empty(1 << 16)
cycle = [pool.empty(1 << 20)]
cycle.append(cycle)
"""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stderr == ""


# ------------------------------------------------------------------------------------------------------ poison, giving up


def test_returned_memory_is_poisoned_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORLINF_DEBUG_POOL", "1")
    pool = TensorBufferPool(8 * MIB)
    for nbytes in (70_000, SIZE):
        pool.empty(nbytes).fill_(1)
        assert bool((pool.empty(nbytes) == 0xDB).all())
    monkeypatch.setenv("AIORLINF_DEBUG_POOL", "0")
    pool = TensorBufferPool(8 * MIB)
    pool.empty(SIZE).fill_(1)
    assert bool((pool.empty(SIZE) == 1).all())


def test_idle_memory_is_given_up_when_asked(pool: TensorBufferPool) -> None:
    kept = pool.empty(MIB)
    held = [pool.empty(SIZE), pool.empty(SIZE)]
    held.clear()
    assert pool.age()
    pool.empty(SIZE)
    assert pool.age()
    assert pool.stats().cached_bytes == SIZE
    assert not pool.age()
    pool.empty(SIZE)
    assert pool.trim() == SIZE
    assert pool.stats() == BufferPoolStats(64 * MIB, MIB, 0, 1, 4, 0, 0, 3)
    del kept


def test_a_smaller_budget(pool: TensorBufferPool) -> None:
    held = [pool.empty(SIZE), pool.empty(MIB)]
    held.pop()
    pool.resize(SIZE)
    assert pool.stats().cached_bytes == 0
    held.clear()
    assert pool.stats().cached_bytes == SIZE


def test_it_says_when_something_comes_back(pool: TensorBufferPool) -> None:
    calls: list[int] = []
    pool.on_idle = lambda: calls.append(1)
    pool.empty(SIZE)
    assert calls == [1]
