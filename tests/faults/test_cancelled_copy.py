"""A buffer belongs to its owner again once its `recv_tensor` is cancelled, also where the copy into it waits for a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from aiorlinf.link import memory
from tests.faults.conftest import Pair

SIZE = 2 << 20


@pytest.mark.asyncio
async def test_a_copy_that_was_not_begun_does_not_happen(stream_pair: Pair) -> None:
    pair = stream_pair
    release = threading.Event()
    sending = pair.ab.send_tensor(torch.ones(SIZE, dtype=torch.uint8))
    while not pair.b.stats().links or not pair.b.stats().links[0].unread_messages:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # in shared memory it comes unasked
    blocked = [pair.b.home.submit(release.wait, 10) for _ in range(2)]
    out = torch.zeros(SIZE, dtype=torch.uint8)
    receiving = pair.ba.recv_tensor(out)
    await asyncio.sleep(0.05)
    assert receiving.cancel()
    out.fill_(7)
    release.set()
    await asyncio.gather(*blocked)
    await asyncio.sleep(0.1)
    assert bool((out == 7).all())
    assert bool((await pair.ba.recv_tensor(torch.zeros(SIZE, dtype=torch.uint8), timeout=10) == 1).all())
    await sending


def test_nothing_is_written_after_stop() -> None:
    out, source = torch.zeros(64 << 20, dtype=torch.uint8), torch.ones(64 << 20, dtype=torch.uint8)
    copy = memory.Copy(out, source)
    thread = threading.Thread(target=copy)
    thread.start()
    while not out[0]:
        pass
    copy.stop()
    out.zero_()
    thread.join()
    assert not out.any()
    memory.Copy(out, source)()
    assert bool(out.all())
